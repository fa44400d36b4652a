"""Requests of kept answers at the engine: they outlive their worker, and another worker may take them over.

    worker 0 ──Submit(kept)──> request ──tokens──> KeptSink ──> SampleSink of worker 0
    worker 0 ends                                  KeptSink     nothing; the request runs on
    worker 1 ──Submit(kept, again, origin)──────>  KeptSink ──> SampleSink of worker 1: all tokens from the first one on

The sink stores what it passed on, until some time after the end of the request. A request that no worker takes over is
cancelled after DETACHED_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.settings import ServeSettings
from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.host.loop import ResultExtras, Sink, TokenLogprobs

DETACHED_S, ENDED_S = 60.0, 60.0
"""Seconds that a request waits for another worker, and that the results of an ended request are stored."""


class KeptSink:
    """The sink of one sample. `tokens`, `finished`, `rejected` and `attach` run in the host's thread.

    Args:
        sink: of the worker that has the request now; None: the worker ended.
    """

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink
        self._chunks: list[tuple[int, list[int], TokenLogprobs | None]] = []
        self._end: Callable[[Sink], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the sample has ended."""
        return self._end is not None

    @property
    def whole(self) -> bool:
        """Whether the first token is stored, so that another worker can receive all of them."""
        return not self._chunks or self._chunks[0][0] == 0

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Store new tokens, and pass them on."""
        self._chunks.append((offset, list(tokens), logprobs))
        if self.sink is not None:
            self.sink.tokens(offset, tokens, logprobs)

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """Store the end of the sample, and pass it on."""
        self._over(lambda sink: sink.finished(end, extras))

    def rejected(self, end: RejectRequest) -> None:
        """Store the rejection, and pass it on."""
        self._over(lambda sink: sink.rejected(end))

    def failed(self, message: str) -> None:
        """Pass on that the engine ends."""
        if self.sink is not None:
            self.sink.failed(message)

    def _over(self, end: Callable[[Sink], None]) -> None:
        self._end = end
        if self.sink is not None:
            end(self.sink)

    def attach(self, sink: Sink) -> None:
        """Pass everything that was stored to another worker's sink, and all that follows."""
        self.sink = sink
        for offset, tokens, logprobs in self._chunks:
            sink.tokens(offset, tokens, logprobs)
        if self._end is not None:
            self._end(sink)


@dataclass(slots=True)
class KeptTicket:
    """A request of a kept answer. `owner` is the worker and ticket that have it."""

    sinks: Sequence[KeptSink]
    owner: tuple[int, int]
    first_id: int = -1
    since_s: float | None = None  # when its worker ended, or it was first seen to have ended

    @property
    def ended(self) -> bool:
        """Whether all samples have ended."""
        return all(one.ended for one in self.sinks)


class KeptRequests:
    """The requests of kept answers, by their origin. Used in the main thread of the engine process.

    Args:
        cancel: cancels a request by its id.
    """

    def __init__(self, cancel: Callable[[int], object]) -> None:
        self._cancel = cancel
        self._all: dict[str, KeptTicket] = {}

    def add(self, origin: str, owner: tuple[int, int], sinks: Sequence[KeptSink]) -> KeptTicket:
        """Store a request that was just submitted."""
        added = self._all[origin] = KeptTicket(sinks, owner)
        return added

    def take_over(self, origin: str, samples: int) -> KeptTicket | None:
        """Return a request for another worker; None if it is unknown, or its first tokens are."""
        found = self._all.get(origin)
        if found is None or len(found.sinks) != samples or not all(one.whole for one in found.sinks):
            return None
        found.since_s = None
        return found

    def detach(self, worker: int) -> list[tuple[int, int]]:
        """Keep the requests of a worker that ended. Returns their tickets."""
        found = [one for one in self._all.values() if one.owner[0] == worker]
        for one in found:
            one.since_s = time.monotonic()
            for sink in one.sinks:
                sink.sink = None
        return [one.owner for one in found]

    def expire(self) -> None:
        """Cancel requests that no worker has taken over, and forget those that ended."""
        now_s = time.monotonic()
        for origin, one in list(self._all.items()):
            detached = one.sinks[0].sink is None
            if one.since_s is None:
                one.since_s = now_s if one.ended else None
            elif now_s - one.since_s > (ENDED_S if one.ended else DETACHED_S):
                if detached and not one.ended and one.first_id >= 0:
                    for sample in range(len(one.sinks)):
                        self._cancel(one.first_id + sample)
                del self._all[origin]


def awaited_workers(settings: ServeSettings, folder: Path, generation: int) -> tuple[int, ...]:
    """Return the workers of a starting server that may continue answers of the server before it."""
    if generation or settings.engines > 1 or settings.journal is None or not settings.kept_answers:
        return ()
    kept = settings.answers_folder(folder) / "kept"
    return tuple(range(settings.api_workers)) if any(kept.glob("*/*.open")) else ()
