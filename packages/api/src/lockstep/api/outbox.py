"""What an engine's steps have for its workers, put together: one message for each worker and step.

Everything here happens in the host's thread. Sinks put down what they are told; `send`, which the host calls when
nothing more comes of the same event, packs it and hands it over without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import zmq

from lockstep.api.request_times import EngineTimes
from lockstep.api.sockets import worker_address, writer
from lockstep.api.wire import (
    AdaptersKnown,
    Answered,
    BatchDrift,
    DraftFigures,
    Gauges,
    LogprobsMessage,
    SampleEnded,
    StepAnswers,
    ToWorker,
    encode,
)
from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import KnownAdapters
from lockstep.host.batches import Float32s
from lockstep.host.drafts import DraftCounts
from lockstep.host.loop import ResultExtras, TokenLogprobs

GAUGES_EVERY_US = 250_000


class HasAdapters(Protocol):
    """What is needed of a host."""

    adapters: KnownAdapters


class Writers:
    """A socket to each worker. For one thread; another one makes its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._context, self._folder = context, folder
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def send(self, message: ToWorker) -> bool:
        """Hand a message over; False if the worker has not read for very long."""
        socket = self._sockets.get(message.worker)
        if socket is None:
            socket = self._sockets[message.worker] = writer(self._context, worker_address(self._folder, message.worker))
        try:
            socket.send(encode(message), zmq.Flag.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Give the sockets up; what was handed over still goes out."""
        for socket in self._sockets.values():
            socket.close()


class _Page:
    """What one worker is to be told of this step."""

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.samples: list[int] = []
        self.offsets: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[LogprobsMessage] = []
        self.ended: list[SampleEnded] = []

    def message(self, worker: int, gauges: Gauges | None) -> StepAnswers:
        return StepAnswers(
            worker,
            np.array(self.tickets, "<i8").tobytes(),
            np.array(self.samples, "<i4").tobytes(),
            np.array(self.offsets, "<i4").tobytes(),
            np.array(self.counts, "<i4").tobytes(),
            np.array(self.tokens, "<i4").tobytes(),
            tuple(self.logprobs),
            tuple(self.ended),
            gauges,
        )


class Outbox:
    """Collects for all workers.

    Args:
        stuck: told of a worker that has not read for so long that nothing more can be kept for it.
        drift: how far predictions of batches were off so far, where there are any.
        host: knows the adapters that there are, of which workers are told.
    """

    def __init__(
        self,
        writers: Writers,
        engine: Engine,
        stuck: Callable[[int], object],
        drift: Callable[[], tuple[BatchDrift, ...]] = tuple,
        host: HasAdapters | None = None,
    ) -> None:
        self._writers, self._engine, self._stuck, self._drift = writers, engine, stuck, drift
        self.times = EngineTimes()
        self._pages: dict[int, _Page] = {}
        self._answers: list[Answered] = []
        self._gauges_us = -GAUGES_EVERY_US
        self._weights_version = engine.memory.weights_version
        self.workers: set[int] = set()  # who is told how the engine stands,
        self.newest: Gauges | None = None  # and the last that they were told
        self._host, self._adapters = host, 0
        self.restarts = 0  # engines before this one
        self.drafts = DraftCounts()  # of the host, while it goes on

    def page(self, worker: int) -> _Page:
        """Where to put down what is for a worker."""
        page = self._pages.get(worker)
        if page is None:
            page = self._pages[worker] = _Page()
        return page

    def now_us(self) -> int:
        """The time of the event that is performed."""
        return self._engine.now_us

    def answer(self, answer: Answered) -> None:
        """Put the answer to a control request down."""
        self._answers.append(answer)

    def send(self) -> None:
        """Tell every worker what this step has for it."""
        gauges = self._due_gauges()
        if gauges is not None:
            for worker in tuple(self.workers):
                self.page(worker)
        pages, self._pages = self._pages, {}
        for worker, page in pages.items():
            if not self._writers.send(page.message(worker, gauges)):
                self._stuck(worker)
        if self._host is not None and self._host.adapters.revision != self._adapters:
            self._adapters = self._host.adapters.revision
            for worker in tuple(self.workers):
                self._writers.send(AdaptersKnown(worker, self._host.adapters))
        answers, self._answers = self._answers, []
        for answer in answers:  # whoever has one knows of what happened before
            self._writers.send(answer)

    def _due_gauges(self) -> Gauges | None:
        """How the engine stands: when it comes to rest, and every so often before."""
        engine, version = self._engine, self._engine.memory.weights_version
        soon = engine.now_us - self._gauges_us < GAUGES_EVERY_US
        if engine.requests and soon and version == self._weights_version:
            return None
        self._gauges_us, self._weights_version = engine.now_us, version
        now = engine.stats()
        self.newest = Gauges(
            waiting=now.waiting + now.held,
            running=now.running + now.prefilling,
            pages=now.pages,
            token_usage=now.token_usage,
            cached_tokens=now.counts.cached_tokens,
            new_tokens=now.counts.new_tokens,
            retractions=now.counts.retractions,
            accepting=not now.draining,
            drift=self._drift(),
            page_size=engine.config.page_size,
            batch_counts=tuple(self.times.batch_counts),
            batch_tokens=self.times.batch_tokens,
            pages_cached=now.pages_cached,
            restarts=self.restarts,
            weights_version=version,
            drafts=self._draft_figures(),
            forced_tokens=self.drafts.forced if engine.config.jumps else None,
        )
        return self.newest

    def _draft_figures(self) -> DraftFigures | None:
        """What became of drafts so far, where any are verified."""
        if not self._engine.config.speculates:
            return None
        found = self.drafts
        return DraftFigures(found.verifications, found.drafts, found.right, tuple(found.right_by_position))


class SampleSink:
    """The sink of one sample of one ticket; see `lockstep.host.loop.Sink`.

    Args:
        over: called when nothing more comes.
    """

    def __init__(self, outbox: Outbox, worker: int, ticket: int, sample: int, over: Callable[[], object]) -> None:
        self._outbox, self._worker, self._ticket, self._sample, self._over = outbox, worker, ticket, sample, over
        self._first_us = self._last_us = -1  # tokens

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Put new tokens down."""
        self._last_us = self._outbox.now_us()
        if self._first_us < 0:
            self._first_us = self._last_us
        page = self._outbox.page(self._worker)
        if logprobs is not None:
            page.logprobs.append(_packed(len(page.tickets), logprobs))
        page.tickets.append(self._ticket)
        page.samples.append(self._sample)
        page.offsets.append(offset)
        page.counts.append(len(tokens))
        page.tokens += tokens

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """Put the end down."""
        positions = sorted(extras.prompt_logprobs)
        logprobs = [extras.prompt_logprobs[position] for position in positions]
        tops = [list(extras.prompt_top_logprobs.get(position, {}).items()) for position in positions]
        most = min(map(len, tops), default=0)
        times = self._outbox.times.take(end.request_id, self._first_us, self._last_us)
        self._end(
            SampleEnded(
                self._ticket,
                self._sample,
                end.reason,
                error=extras.error,
                prompt_tokens=end.prompt_tokens,
                output_tokens=end.output_tokens,
                cached_tokens=end.cached_tokens,
                prompt_positions=np.array(positions, "<i4").tobytes(),
                prompt_logprobs=np.array(logprobs, "<f4").tobytes(),
                prompt_top_ids=np.array([[token for token, _ in one[:most]] for one in tops], "<i4").tobytes(),
                prompt_top_logprobs=np.array([[value for _, value in one[:most]] for one in tops], "<f4").tobytes(),
                vector=b"" if extras.pooled is None else _floats(extras.pooled.values),
                queue_us=times.queue_us,
                prefill_us=times.prefill_us,
                decode_us=times.decode_us,
                weights=extras.weights,
            )
        )

    def rejected(self, end: RejectRequest) -> None:
        """Put the refusal down."""
        self._end(SampleEnded(self._ticket, self._sample, end.reason, error=end.message, rejected=True))

    def failed(self, message: str) -> None:
        """The engine ended first. What that means for the request is not for this engine to say."""

    def _end(self, ended: SampleEnded) -> None:
        self._outbox.page(self._worker).ended.append(ended)
        self._over()


def _packed(entry: int, logprobs: TokenLogprobs) -> LogprobsMessage:
    if logprobs.top_ids is None or logprobs.top_logprobs is None:
        return LogprobsMessage(entry, _floats(logprobs.logprobs))
    top_ids = logprobs.top_ids.astype("<i4", copy=False).tobytes()
    return LogprobsMessage(entry, _floats(logprobs.logprobs), top_ids, _floats(logprobs.top_logprobs))


def _floats(values: Float32s) -> bytes:
    return values.astype("<f4", copy=False).tobytes()
