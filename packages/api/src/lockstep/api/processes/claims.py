"""What was open when the engine before this one died, until its workers have said what they have of it.

again, have k tokens ──> in the journal        tokens from k on are said again, and it goes on
                         not in it             nothing of it was ever said: it begins
                         without what it needs it begins again; what was said before is passed over by number
                         twice deadly          it is failed, alone
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lockstep.api.engines import both
from lockstep.api.processes.wire import OVER
from lockstep.core.contract.commands import FinishRequest
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import CancelMany, RequestArrived, RequestId
from lockstep.core.contract.text import shown
from lockstep.core.journal.records import JournalError
from lockstep.host.loop import RuntimeHost, Sink, Untold
from lockstep.host.recovery import STRIKES_MAX, Death, Probation, may_go_on
from lockstep.host.startup import Keeper

log = logging.getLogger("lockstep.engine")

POISON = "the engine ended more than once while it worked on this request, which is therefore not tried again"


@dataclass(frozen=True, slots=True)
class PriorState:
    """What there was when an engine began.

    Args:
        death: how the engine before it ended, if there was one in this server.
        workers: those that may have something open.
    """

    death: Death | None = None
    workers: tuple[int, ...] = ()


FIRST = PriorState()


class Lost(LockstepError):
    """A request that does not go on.

    Args:
        reason: as in `Ended`: "engine" where another engine might, "error" where none would.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Claims:
    """Used in the main thread; until `close` the engine does not run.

    Args:
        keeper: what is known of the engine before; None: nothing was kept.
        server: what origins of this server begin with. A request of another one has no client any more.
        workers: those that there are.
    """

    def __init__(self, host: RuntimeHost, keeper: Keeper | None, server: str, workers: Sequence[int]) -> None:
        self._host, self._keeper = host, keeper
        self._told = None if keeper is None else keeper.recovered
        self._taken: set[RequestId] = set()
        self._guilty = set[RequestId]() if keeper is None else set(keeper.verdict.guilty)
        self.workers: set[int] = set()  # that may ask
        self.open = True
        if self._told is not None:
            for origin, (first, samples) in self._told.origins.items():
                whose, _, rest = origin.partition("/")
                if whose == server and any(first + sample in host.engine.requests for sample in range(samples)):
                    self.workers.add(int(rest.partition("/")[0]))
            self.workers.intersection_update(workers)

    def take(self, request: RequestArrived, have: Sequence[int], sinks: Sequence[Sink]) -> RequestId | None:
        """Take up a request that an engine before this one was sent.

        Args:
            have: output tokens of each sample that its worker has, or OVER.
        Returns: its id; None if it has to begin. Raises: Lost.
        """
        told = self._told
        if told is None:
            kept = "nothing was" if self._keeper is None else "only digests were"
            raise Lost(f"the engine ended and began again, and of its work {kept} kept; ask again", "engine")
        if told.image.strikes.get(request.origin, 0) >= STRIKES_MAX:
            raise Lost(POISON, "error")
        try:
            first = told.find(request.origin, [sample for sample, had in enumerate(have) if had != OVER])
        except JournalError as error:
            raise Lost(f"the engine ended and began again: {error}", "engine") from error
        if first is None:
            return None
        samples = range(first, first + len(have))
        if not self._guilty.isdisjoint(samples):
            log.error("%s: %s", shown(request.label) or request.origin, POISON)
            raise Lost(POISON, "error")
        request = msgspec.structs.replace(request, request_id=first)
        going = [(sample, had) for sample, had in zip(samples, have, strict=True) if had != OVER]
        ends = [told.said[sample].end for sample, _ in going]
        cancelled = any(isinstance(end, FinishRequest) and end.reason == "cancelled" for end in ends)
        if not self.open or cancelled or not may_go_on(told, request, first, have):
            return None
        untold: list[Untold | None] = [None] * len(have)
        for sample, had in going:
            said = told.said[sample]
            logprobs = {number: kept for number, kept in said.logprobs.items() if number >= had}
            untold[sample - first] = Untold(had, said.tokens[had:], logprobs, said.end, said.weights)
        self._host.adopt(request, sinks, untold)
        self._taken.update(samples)
        return first

    def close(self) -> None:
        """Cancel what nobody asked for, and let suspects in one at a time."""
        self.open = False
        if self._told is None or self._keeper is None:
            return
        engine, host = self._host.engine, self._host
        if gone := [request_id for request_id in engine.requests if request_id not in self._taken]:
            host.ask(CancelMany(tuple(gone)))
        log.warning(
            "recovered %d requests in %.0f ms from %d events behind a snapshot; %d of them nobody asks for",
            len(engine.requests),
            self._keeper.took_s * 1e3,
            self._told.steps,
            len(gone),
        )
        self._keeper.settled()
        suspects = self._keeper.suspects()
        for one in [one for one in suspects if one not in self._taken]:
            del suspects[one]
        probation = Probation(host, self._told.image)
        if not probation.over:
            host.observe = both(host.observe, probation.fold)
