"""Requests that were open when the previous engine generation died, until their workers submit them again.

A worker submits each open request `again`, with the number k of output tokens that it has received:

    in the journal             tokens from k on are sent again, and the request continues
    not in the journal         no token of it was ever sent: it starts as a new request
    cannot be continued        it starts again; tokens that were sent before are skipped by their numbers
    suspect of two deaths      it alone fails
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
from lockstep.host.loop import RuntimeHost, Sink, UnsentOutput
from lockstep.host.media.content import EncoderInput
from lockstep.host.recovery import STRIKES_MAX, Death, Probation, may_go_on
from lockstep.host.startup import Keeper

log = logging.getLogger("lockstep.engine")

POISON = "the engine ended more than once while it worked on this request, which is therefore not retried"


@dataclass(frozen=True, slots=True)
class PriorState:
    """What preceded an engine generation.

    Args:
        death: how the previous generation in this server ended, if there was one.
        workers: workers that may have open requests.
    """

    death: Death | None = None
    workers: tuple[int, ...] = ()


FIRST = PriorState()


class Lost(LockstepError):
    """Raised for a request that cannot continue.

    Args:
        reason: as in `SampleEnded`: "engine" if another engine might serve it, "error" if none would.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Claims:
    """Continues requests of the previous generation. Used in the main thread; the engine does not run until `close`.

    Args:
        keeper: state recovered from the previous generation; None: nothing was stored.
        server: prefix of the origins of this server. Requests of an earlier server that are still open in a later
            generation were taken over by a worker, which is not known: every worker may submit them again.
        workers: the running workers.
        awaited: workers that may take over requests of an earlier server.
    """

    def __init__(
        self,
        host: RuntimeHost,
        keeper: Keeper | None,
        server: str,
        workers: Sequence[int],
        awaited: Sequence[int] = (),
    ) -> None:
        self._host, self._keeper = host, keeper
        self._recovered = None if keeper is None else keeper.recovered
        self._taken: set[RequestId] = set()
        self._guilty = set[RequestId]() if keeper is None else set(keeper.verdict.guilty)
        self.workers: set[int] = set()  # workers from which requests may still be submitted again
        self.open = True
        if self._recovered is not None:
            for origin, (first, samples) in self._recovered.origins.items():
                prefix, _, rest = origin.partition("/")
                if any(first + sample in host.engine.requests for sample in range(samples)):
                    self.workers.update([int(rest.partition("/")[0])] if prefix == server else workers)
            self.workers.intersection_update(workers)
            if host.engine.requests:
                self.workers.update(awaited)

    def take(
        self,
        request: RequestArrived,
        have: Sequence[int],
        sinks: Sequence[Sink],
        contents: Sequence[EncoderInput] = (),
    ) -> RequestId | None:
        """Continue a request that was submitted to a previous generation.

        Args:
            contents: of its spans.
            have: for each sample the number of output tokens that the worker has, or OVER if it has ended.
        Returns: the id of the request; None if it must start anew. Raises: Lost.
        """
        recovered = self._recovered
        if recovered is None:
            kept = "nothing was" if self._keeper is None else "only digests were"
            raise Lost(f"the engine ended and restarted, and {kept} stored of its work; repeat the request", "engine")
        if recovered.image.strikes.get(request.origin, 0) >= STRIKES_MAX:
            raise Lost(POISON, "error")
        try:
            first = recovered.find(request.origin, [sample for sample, had in enumerate(have) if had != OVER])
        except JournalError as error:
            if not any(have):  # the client has nothing of the answer; or the request never arrived, and later ones did
                return None
            raise Lost(f"the engine ended and restarted: {error}", "engine") from error
        if first is None:
            return None
        samples = range(first, first + len(have))
        if not self._guilty.isdisjoint(samples):
            log.error("%s: %s", shown(request.label) or request.origin, POISON)
            raise Lost(POISON, "error")
        request = msgspec.structs.replace(request, request_id=first)
        going = [(sample, had) for sample, had in zip(samples, have, strict=True) if had != OVER]
        ends = [recovered.answers[sample].end for sample, _ in going]
        cancelled = any(isinstance(end, FinishRequest) and end.reason == "cancelled" for end in ends)
        if not self.open or cancelled or not may_go_on(recovered, request, first, have):
            return None
        unsent: list[UnsentOutput | None] = [None] * len(have)
        for sample, had in going:
            answered = recovered.answers[sample]
            logprobs = {number: kept for number, kept in answered.logprobs.items() if number >= had}
            unsent[sample - first] = UnsentOutput(had, answered.tokens[had:], logprobs, answered.end, answered.weights)
        self._host.adopt(request, sinks, unsent, contents)
        self._taken.update(samples)
        return first

    def close(self) -> None:
        """Cancel the requests that no worker submitted again, and admit suspects one at a time."""
        self.open = False
        if self._recovered is None or self._keeper is None:
            return
        engine, host = self._host.engine, self._host
        if gone := [request_id for request_id in engine.requests if request_id not in self._taken]:
            host.ask(CancelMany(tuple(gone)))
        log.warning(
            "recovered %d requests in %.0f ms from %d events after a snapshot; %d of them were not submitted again",
            len(engine.requests),
            self._keeper.took_s * 1e3,
            self._recovered.steps,
            len(gone),
        )
        self._keeper.settled()
        suspects = self._keeper.suspects()
        for one in [one for one in suspects if one not in self._taken]:
            del suspects[one]
        probation = Probation(host, self._recovered.image)
        if not probation.over:
            host.observe = both(host.observe, probation.fold)
