"""Results of an engine's steps for the workers: one message for each worker and step.

Everything here runs in the host's thread. Sinks only record; `send`, which the host calls when nothing more follows
from the same event, packs the records into messages and passes these to the sockets without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Protocol

import numpy as np
import zmq

from lockstep.api.observability.expert_load import ExpertFold
from lockstep.api.observability.request_times import EngineTimes
from lockstep.api.processes.sockets import worker_address, writer
from lockstep.api.processes.wire import (
    AdaptersKnown,
    Answered,
    BatchDrift,
    CheckFigures,
    DraftFigures,
    Gauges,
    LogprobsMessage,
    SampleEnded,
    StepAnswers,
    TierFigures,
    ToWorker,
    TransferFigures,
    encode,
)
from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import KnownAdapters
from lockstep.host.batches import Float32s
from lockstep.host.cache_moves import CacheMoves
from lockstep.host.drafts import DraftCounts
from lockstep.host.handover.decode import TransferCounts
from lockstep.host.idle_check import CheckCounts
from lockstep.host.loop import ResultExtras, TokenLogprobs

GAUGES_EVERY_US = 250_000


class HasAdapters(Protocol):
    """The part of a host that the outbox reads."""

    adapters: KnownAdapters


class Writers:
    """A socket to each worker. Not thread-safe: each thread has its own Writers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._context, self._folder = context, folder
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def send(self, message: ToWorker) -> bool:
        """Queue a message to its worker. Returns False if the worker has too many unread messages (MESSAGES_MAX)."""
        socket = self._sockets.get(message.worker)
        if socket is None:
            socket = self._sockets[message.worker] = writer(self._context, worker_address(self._folder, message.worker))
        try:
            socket.send(encode(message), zmq.Flag.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the sockets; queued messages are still sent."""
        for socket in self._sockets.values():
            socket.close()


class _Page:
    """Results of the current step for one worker."""

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
    """Collects the results of a step for all workers.

    Args:
        stuck: called with the number of a worker that has too many unread messages.
        drift: returns measured over predicted batch times so far; empty without predictions.
        host: holds the known adapters, which are sent to the workers whenever they change.
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
        self.workers: set[int] = set()  # workers that receive gauges
        self.newest: Gauges | None = None  # the gauges sent last
        self._host, self._adapters = host, 0
        self.restarts = 0  # engine generations before this one
        self.transfers: TransferCounts | None = None  # of a decode engine
        self.drafts = DraftCounts()  # counted by the host as it runs
        self.checks: CheckCounts | None = None  # of an engine that checks its invariants while it is idle
        self._experts = ExpertFold()
        self.moves: CacheMoves | None = None  # of the host, with their counts

    def page(self, worker: int) -> _Page:
        """Return the page of a worker for the current step, created on first use."""
        page = self._pages.get(worker)
        if page is None:
            page = self._pages[worker] = _Page()
        return page

    def now_us(self) -> int:
        """Return the time of the current event, in microseconds."""
        return self._engine.now_us

    def answer(self, answer: Answered) -> None:
        """Record the answer to a control request."""
        self._answers.append(answer)

    # mechanism: messages (executed)
    def send(self) -> None:
        """Send every worker its results of this step."""
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
        for answer in answers:  # last, so that a worker with the answer has every result that preceded it
            self._writers.send(answer)

    def _due_gauges(self) -> Gauges | None:
        """Return the gauges of the engine if they are due; else None.

        They are due when the engine is idle, when its weights changed, and GAUGES_EVERY_US after the last gauges.
        """
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
            tiers=self._tier_figures(),
            transfers=self._transfer_figures(),
            experts=self._experts.figures(engine.experts.loads),
            checks=None if self.checks is None else CheckFigures(*astuple(self.checks)),
        )
        return self.newest

    def _draft_figures(self) -> DraftFigures | None:
        """Return the totals of verified drafts; None if the engine verifies no drafts."""
        if not self._engine.config.speculates:
            return None
        found = self.drafts
        return DraftFigures(found.verifications, found.drafts, found.right, tuple(found.right_by_position))

    def _transfer_figures(self) -> TransferFigures | None:
        """Return the totals of transfers that were received; None if the engine receives none."""
        counts = self.transfers
        return None if counts is None else TransferFigures(counts.done, counts.failed, counts.pages)

    def _tier_figures(self) -> TierFigures | None:
        """Return the totals of moves between the tiers; None if the engine has none below the device."""
        if self.moves is None or self.moves.mover is None:
            return None
        found, store = self.moves.counts, self.moves.mover.store_counts
        return TierFigures(
            tuple((kind, outcome, count) for (kind, outcome), count in sorted(found.moves.items())),
            tuple(sorted(found.pages.items())),
            found.host_tokens,
            found.storage_tokens,
            () if store is None else tuple(asdict(store).items()),
            tuple((kind, block, count) for (kind, block), count in sorted(found.blocks.items())),
        )


class SampleSink:
    """The sink of one sample of one ticket; see `lockstep.host.loop.Sink`.

    Args:
        over: called once the sample has ended.
    """

    def __init__(self, outbox: Outbox, worker: int, ticket: int, sample: int, over: Callable[[], object]) -> None:
        self._outbox, self._worker, self._ticket, self._sample, self._over = outbox, worker, ticket, sample, over
        self._first_us = self._last_us = -1  # engine time of the first and last token; -1: none yet

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Record new tokens."""
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
        """Record the end of the sample."""
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
                hidden=b"".join(_floats(extras.hidden_states[one]) for one in sorted(extras.hidden_states)),
                hidden_size=next((state.size for state in extras.hidden_states.values()), 0),
            )
        )

    def rejected(self, end: RejectRequest) -> None:
        """Record the rejection."""
        self._end(SampleEnded(self._ticket, self._sample, end.reason, error=end.message, rejected=True))

    def failed(self, message: str) -> None:
        """Do nothing: the engine ends, and the next generation continues or fails the request."""

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
