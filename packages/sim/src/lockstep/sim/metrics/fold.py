"""A fold over observed events and their Steps that measures a run. Definitions and their reasons: docs/metrics.md.

    fold = MetricsFold(kv_pages=config.pages)
    step = engine.step(event)               # in a host, or from a replayed journal: the numbers are the same
    fold.observe(event, step)
    ...
    run = fold.result([Slo.parse("ttft_p99=500ms")])

`observe` appends numbers, and references to arrays that the core never writes again. From time to time `compact`
computes on whole columns and drops what it has measured: an ended request becomes a row of numbers, its gaps are added
to the counts of all gaps (value_counts.py), and a batch takes about 12 bytes (packed_rows.py). `result` computes the
summary.

    arrival                first token                    last token, finish
    |-- queue --|-- prefill --|-- itl --|-- itl --|-- itl --|
    |---------- ttft ---------|----- (n - 1) x tpot --------|
    |------------------------- e2e -------------------------|
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    EncodeMedia,
    Int32s,
    Int64s,
    LaunchBatch,
    LoadAdapter,
    Step,
    StreamTokens,
)
from lockstep.core.contract.declarations import Tallies
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    Decided,
    ExpertLoadMeasured,
    ExpertsPlaced,
    LaneReady,
    Observed,
    PrefetchFinished,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRejected,
    RequestRetracted,
    SessionClosed,
    SessionYielded,
    TierOperationEnded,
    TurnStarted,
)
from lockstep.core.contract.samples import sample_count, sample_label
from lockstep.sim.metrics.adapters import AdapterCounts
from lockstep.sim.metrics.blocks import BlockCounts
from lockstep.sim.metrics.columns import (
    BATCH_COLUMNS,
    BATCH_ID,
    COMPLETED,
    CPU_COLUMNS,
    FINISHED,
    MODE,
    STARTED,
    WORK,
    Float64s,
    Requests,
    Rows,
    Summary,
    Texts,
    objects,
    texts,
)
from lockstep.sim.metrics.device import DeviceUse, at_work
from lockstep.sim.metrics.drafts import Drafts
from lockstep.sim.metrics.expert_counts import ExpertCounts
from lockstep.sim.metrics.latency import gaps_us, per_request, tpot_us, ttft_us
from lockstep.sim.metrics.measured import MeasuredRequests, MeasuredRows
from lockstep.sim.metrics.media import MediaCounts
from lockstep.sim.metrics.messages import count_new_tokens, count_tokens, is_first
from lockstep.sim.metrics.packed import Codes, Packed, coded
from lockstep.sim.metrics.packed_rows import PART_ROWS, PackedRows
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.samples import measure_samples
from lockstep.sim.metrics.series import Levels, edges_us, make_series
from lockstep.sim.metrics.sessions import SessionCounts
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.metrics.summary import (
    describe,
    describe_cpu,
    describe_latency,
    describe_slo,
    describe_throughput,
    is_rejection,
    makespan,
    ratio,
)
from lockstep.sim.metrics.tiers import BLOCKS, BlockUse, TierCounts
from lockstep.sim.metrics.value_counts import ValueCountsBuilder

TALLIES = (
    "pages_evicted",
    "blocks_evicted",
    "host_pages_evicted",
    "adapters_evicted",
    "retractions",
    "tokens_discarded",
    "decodes_skipped",
    "deferred",
)
"""Tallies of decided events that the summary states. Others, such as `admitted`, follow from the requests."""
DECODING = ("decode", "verify", "draft_extend", "diffusion_extend", "idle")  # modes without prompts
COMPACT_ENTRIES = 2**18  # (message, request) pairs per `compact`: about 20 MB while it runs
COMPACT_RESULTS_MIN, COMPACT_RESULTS_MAX = 64, 4_096  # batches between two runs of `compact`
_result = Struct("3q").pack  # batch_id, started_us, finished_us


class MetricsFold:
    """Fold of events and Steps, in order, with small memory. `result` returns a RunData at any time."""

    def __init__(
        self,
        *,
        kv_pages: int | None = None,
        warm_up: int = 0,
        host_page_bytes: int | None = None,
        host_block_bytes: Mapping[str, int] | None = None,
        needs_media: bool = True,
        only_requests: bool = False,
    ) -> None:
        """Start an empty fold.

        Args:
            kv_pages: size of the page pool; None: the pages held by requests stay unknown.
            warm_up: requests with a smaller id are not measured. Their effect on batches, pages and other requests is.
            host_page_bytes: bytes of a page of KV in host memory; None: there is no host tier, and nothing is counted
                for it.
            host_block_bytes: bytes of a window block and of a state block in host memory, by kind.
            only_requests: whether only figures of requests are asked for. Batches, levels and messages of a run on the
                fast path, the most of its memory, are then not kept.
            needs_media: whether requests require their media on this engine from arrival on. False for a decode engine.
        """
        self._kv_pages = kv_pages
        self._warm_up = warm_up
        self._only_requests = only_requests
        self._first_us: int | None = None
        self._last_us = 0

        # One entry per request, in order of arrival. Positions within a request fit 32 bits, as in a BatchPlan.
        self._request_ids = array("q")
        self._arrival_us = array("q")
        self._prompt_tokens = array("i")
        self._admitted_us = array("q")
        self._cached_tokens = array("i")
        self._retractions = array("i")
        self._ended_us = array("q")
        self._finish_codes = array("H")
        self._tenant_codes = array("I")
        self._labels: list[Texts] = []
        self._recent_labels: list[str] = []
        self._finish_reasons = Codes({"": 0})
        self._tenants = Codes()
        # Messages to the client, up to the last `compact`; one entry per request.
        self._sent = array("i")  # end of the output sent so far, in tokens
        self._output_tokens = array("i")
        self._first_message_us = array("q")
        self._last_message_us = array("q")
        self._itl_us_max = array("d")

        # Open requests, and requests that ended since the last `compact`: the row, and the number of messages until the
        # end.
        self._row_of: dict[RequestId, int] = {}
        self._ended: dict[RequestId, tuple[int, int]] = {}

        # Since the last `compact`: one entry per message, launch and result.
        self._message_us = array("q")
        self._sent_messages: list[StreamTokens] = []
        self._launches: list[tuple[int, int, str, int, Int32s, Int32s]] = []
        self._results = array("q")  # batch_id, started_us, finished_us
        self._results_max = 3 * COMPACT_RESULTS_MIN  # length of `_results` that triggers the next `compact`

        # Measured but not settled: gaps of open requests, and batches without a result yet.
        self._open_gaps: tuple[Rows, Float64s, Int32s] = (np.empty(0, np.uint32), np.empty(0), np.empty(0, np.int32))
        self._open_batches: NDArray[np.int64] = np.empty((len(BATCH_COLUMNS), 0), np.int64)
        self._lost_batches: dict[int, int] = {}  # batch id -> row, of batches settled without a result

        # Settled.
        self._itl_us = ValueCountsBuilder()
        self._messages = PackedRows("time_us", "new_tokens")
        self._batches = PackedRows(*BATCH_COLUMNS)
        self._modes = Codes()
        self._gauges = PackedRows("time_us", "waiting", "running", "free_pages", "cached_pages")
        self._cpu = PackedRows(*CPU_COLUMNS)
        self._works = Codes()

        # Counts.
        self._tallies = Tallies(*TALLIES)
        self._experts: ExpertCounts | None = None  # None: their load was not measured
        self._blocks: BlockCounts | None = None  # of an engine whose model answers in blocks
        self._drafts: Drafts | None = None  # of an engine that verifies drafts
        self._tiers = TierCounts(host_page_bytes, host_block_bytes or {}) if host_page_bytes is not None else None
        self._media: MediaCounts | None = None  # of a run with media
        self._needs_media = needs_media
        self._sessions: SessionCounts | None = None  # of a run with server sessions
        self._sampled: list[tuple[int, int]] = []  # requests with several samples: first row, and number of samples
        self._adapters: AdapterCounts | None = None  # of a run with requests on adapters

    def observe(self, event: Observed, step: Step) -> None:
        """Fold one event and its Step. Raises ContractError for requests that are not open."""
        time_us = self._last_us = event.time_us
        if type(event) is BatchFinished:
            if len(self._results) >= self._results_max:
                self.compact()
            self._results.frombytes(_result(event.batch_id, event.started_us, event.finished_us))
            if event.accepted and self._drafts is not None:
                self._drafts.verified(event)
            if event.accepted and self._blocks is not None:
                self._blocks.finished(event)
        elif type(event) is not LaneReady:
            self._fold_other(event, step)
        for command in step.commands:
            if type(command) is StreamTokens:
                self._message_us.append(time_us)
                self._sent_messages.append(command)
            elif type(command) is LaunchBatch:
                # A reference to the plan itself would keep the token ids of prompts alive.
                plan = command.plan
                starts = plan.starts
                if plan.speculation is not None:
                    self._drafts = self._drafts or Drafts()
                    starts = self._drafts.launched(plan, plan.speculation)
                if plan.layers is not None and plan.layers[0]:
                    starts = plan.stops  # its new tokens were counted with its first layers
                if plan.blocks is not None:
                    self._blocks = self._blocks or BlockCounts()
                    self._blocks.launched(plan)
                self._launches.append((time_us, plan.batch_id, plan.mode, plan.extend_rows, starts, plan.stops))
            elif type(command) is EncodeMedia:
                self._media = self._media or MediaCounts()
                self._media.ordered(command, needed=not self._needs_media)
            elif type(command) is LoadAdapter:
                self._adapters = self._adapters or AdapterCounts()
                self._adapters.ordered(command, step.time_us)
            elif self._tiers is not None and isinstance(command, BlockUse) and command.blocks:
                self._tiers.began(command)
        if step.decided:
            self._tallies.fold(step.decided)
            for decided in step.decided:
                learn = _LEARNT.get(type(decided))
                if learn is not None:
                    learn(self, decided)

    def _fold_other(self, event: Observed, step: Step) -> None:
        """Fold an event that is neither a free slot nor a result."""
        if type(event) is RequestArrived:
            if event.parallel_samples > 1 and event.request_id >= self._warm_up:
                self._sampled.append((len(self._request_ids), sample_count(event)))
            for sample in range(sample_count(event)):  # each sample is a request
                self._arrive(event, event.request_id + sample, sample_label(event.label, sample))
            if (
                event.spans
                and self._needs_media
                and not any(type(decided) is RequestRejected for decided in step.decided)
            ):
                self._media = self._media or MediaCounts()
                self._media.arrived(event)
            if event.adapter and not any(type(decided) is RequestRejected for decided in step.decided):
                self._adapters = self._adapters or AdapterCounts()
                self._adapters.requests[event.adapter] += sample_count(event)
        elif type(event) is AdapterLoaded and self._adapters is not None:
            self._adapters.loaded(event)
        elif type(event) is ExpertLoadMeasured:
            self._experts = self._experts or ExpertCounts()
            self._experts.measured(event)
        elif type(event) is PrefetchFinished and event.blocks and self._tiers is not None:
            self._tiers.fetched(event)

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Record waiting and running requests, and free and cached pages, after a LaneReady."""
        gauges = self._gauges
        gauges.recent.frombytes(gauges.row(time_us, waiting, running, free_pages, cached_pages))

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Record CPU work of the scheduler in [start_us:stop_us), such as "plan" or "results"."""
        self._cpu.recent.frombytes(self._cpu.row(start_us, stop_us - start_us, self._works[what]))

    def encoder_interval(self, start_us: int, stop_us: int, contents: int, tokens: int, gpus: int) -> None:
        """Record encoder work in [start_us:stop_us), on `gpus` GPUs of its own or, with 0, on those of the engine."""
        self._media = self._media or MediaCounts()
        self._media.intervals.extend((start_us, stop_us, contents, tokens))
        self._media.gpus = gpus

    def media_wait(self, request_id: RequestId, waited_us: int) -> None:
        """Record the time for which a request waited for its media, in us."""
        if self._media is not None and request_id >= self._warm_up:
            self._media.waits_us.append(waited_us)

    def sessions_held(self, time_us: int, pages: int) -> None:
        """Record the pages that only sessions hold, from `time_us` on."""
        self._sessions = self._sessions or SessionCounts()
        self._sessions.held(time_us, pages)

    def take_measured(self, measured: MeasuredRows) -> None:
        """Append rows that the fast path measured."""
        self._itl_us.add(measured.itl_us[:, 0], measured.itl_us[:, 1])
        if self._only_requests:
            return
        batches, cpu = measured.batches.copy(), measured.cpu.copy()
        batches[:, MODE] = coded(batches[:, MODE], measured.modes, self._modes)
        cpu[:, WORK] = coded(cpu[:, WORK], measured.works, self._works)
        for rows, more in (
            (self._batches, batches),
            (self._gauges, measured.gauges),
            (self._cpu, cpu),
            (self._messages, measured.messages),
        ):
            rows.recent.frombytes(more.tobytes())
            rows.pack()

    def take_back(self, itl_us: Int64s) -> None:
        """Remove gaps between tokens, in us, that `take_measured` has added: those of requests that have not ended."""
        self._itl_us.remove(itl_us)

    def take_measured_requests(self, measured: MeasuredRequests) -> None:
        """Replace all requests by those of a run on the fast path. `take_measured` must have received all rows."""
        requests = len(measured.request_id)
        if requests:
            self._first_us = int(measured.arrival_us[0])
        self._last_us = measured.last_us
        codes = np.where(measured.ended_us < 0, 0, self._finish_reasons["length"])
        if measured.rejected.any():
            codes[measured.rejected] = self._finish_reasons["rejected_too_long"]
        computed = (measured.ended_us >= 0) & (measured.output_tokens == 0) & ~measured.rejected
        if computed.any():  # only their prompts were run
            codes[computed] = self._finish_reasons["computed"]
        for column, values in (
            (self._request_ids, measured.request_id),
            (self._arrival_us, measured.arrival_us),
            (self._prompt_tokens, measured.prompt_tokens),
            (self._admitted_us, measured.admitted_us),
            (self._cached_tokens, measured.cached_tokens),
            (self._retractions, measured.retractions),
            (self._ended_us, measured.ended_us),
            (self._finish_codes, codes),
            (self._tenant_codes, [self._tenants[tenant] for tenant in measured.tenants]),
            (self._sent, measured.output_tokens),
            (self._output_tokens, measured.output_tokens),
            (self._first_message_us, measured.first_message_us),
            (self._last_message_us, measured.last_message_us),
            (self._itl_us_max, measured.itl_us_max),
        ):
            del column[:]
            column.frombytes(np.asarray(values).astype(column.typecode).tobytes())
        self._labels.clear()
        for start in range(0, requests, PART_ROWS):
            rows = measured.request_id[start : start + PART_ROWS]
            self._labels.append(texts(measured.labels(rows)))
        still = np.full((len(BATCH_COLUMNS), len(measured.open_batches["batch_id"])), -1, np.int64)
        for name, values in measured.open_batches.items():
            still[BATCH_COLUMNS.index(name)] = values
        still[MODE] = coded(still[MODE], measured.modes, self._modes)
        self._open_batches = still
        self._tallies.put("pages_evicted", measured.evicted_pages)
        self._tallies.put("decodes_skipped", {"": measured.decodes_skipped})
        self._tallies.put("deferred", measured.deferred)
        self._tallies.put("retractions", {"pages": measured.retracted})
        self._tallies.put("tokens_discarded", {"": measured.tokens_discarded})

    def compact(self, part_rows: int = PART_ROWS) -> None:
        """Measure the records since the last call, and drop them. Results do not change. `observe` also calls it.

        Args:
            part_rows: long lists are packed from this many rows on; smaller parts waste memory.
        Raises: ContractError if a message was sent to a request that was not open.
        """
        self._settle_messages()
        self._settle_batches()
        for rows in (self._messages, self._batches, self._gauges, self._cpu):
            rows.pack(part_rows)
        if len(self._recent_labels) >= part_rows:
            self._labels.append(texts(self._recent_labels))
            self._recent_labels.clear()

    def result(self, slos: Sequence[Slo] = ()) -> RunData:
        """Measure everything observed so far. The fold remains usable."""
        self.compact()
        batches = self._batches.snapshot()
        batches.add_columns(*self._open_batches)
        packed = Packed(batches, tuple(self._modes), self._cpu.snapshot(), tuple(self._works))
        requests, itl_us = self._measured_requests(), self._itl_us.build()
        span_us = (self._first_us or 0, self._last_us)
        edges = edges_us(span_us)
        gauges = Levels.of(self._gauges, self._kv_pages, edges, span_us)
        device = DeviceUse.of(packed)
        summary: Summary = {
            "requests": self._count_requests(requests),
            "latency": describe_latency(requests, itl_us),
            "throughput": describe_throughput(requests, slos),
            "cache": self._describe_cache(requests),
            "kv": gauges.describe_kv(self._kv_pages),
            "scheduler": self._describe_scheduler(requests, gauges),
            "device": self._describe_device(requests, device),
            "cpu": describe_cpu(packed),
            "slos": [describe_slo(slo, requests, itl_us) for slo in slos],
        }
        if self._drafts is not None:
            summary |= self._drafts.summary()
        if self._blocks is not None:
            summary["diffusion"] = self._blocks.describe()
        encoder = None
        if self._media is not None and self._media.contents:
            summary["media"] = self._media.describe(summary["throughput"]["makespan_us"])
            encoder = self._media.table if len(self._media.intervals) else None
        if self._sessions is not None and self._sessions.turns:
            summary["sessions"] = self._sessions.describe(self._kv_pages)
        if self._experts is not None:
            summary["experts"] = self._experts.describe()
        if self._sampled:
            summary["samples"] = self._describe_samples()
        if self._adapters is not None and self._adapters.requests:
            summary["adapters"] = self._adapters.describe(self._tallies.total("adapters_evicted"))
        series = make_series(edges, gauges, self._messages, packed.batches, device.busy)
        decode_gaps = device.decode_gaps_us, device.busy_after_decode_us
        return RunData(
            requests,
            series,
            itl_us,
            span_us,
            summary,
            packed,
            self._drafts,
            encoder=encoder,
            decode_gaps=decode_gaps,
            blocks=self._blocks,
        )

    # ------------------------------------------------------------------------------------------------- taking in

    def _arrive(self, event: RequestArrived, request_id: RequestId, label: str) -> None:
        if self._first_us is None:
            self._first_us = event.time_us
        if request_id in self._row_of:
            raise ContractError(f"request {request_id} arrived twice\nhint: fold each record of a journal once")
        if request_id in self._ended or len(self._ended) >= PART_ROWS:
            self.compact()  # an id may be reused, and requests may end without any batch
        self._row_of[request_id] = len(self._request_ids)
        self._request_ids.append(request_id)
        self._arrival_us.append(event.time_us)
        self._prompt_tokens.append(count_tokens(event.prompt))
        self._recent_labels.append(label)
        self._tenant_codes.append(self._tenants[event.tenant])
        self._admitted_us.append(-1)
        self._cached_tokens.append(-1)
        self._retractions.append(0)
        self._ended_us.append(-1)
        self._finish_codes.append(0)
        self._sent.append(0)
        self._output_tokens.append(0)
        self._first_message_us.append(-1)
        self._last_message_us.append(-1)
        self._itl_us_max.append(math.nan)

    def _admitted(self, decided: RequestAdmitted) -> None:
        row = self._row(decided.request_id)
        self._went_on(decided.request_id, decided.time_us)
        if self._admitted_us[row] < 0:  # later admissions follow a retraction
            self._admitted_us[row] = decided.time_us
            self._cached_tokens[row] = decided.cached_tokens
            if self._tiers is not None and decided.request_id >= self._warm_up:
                self._tiers.admitted(decided)

    def _finished(self, decided: RequestFinished) -> None:
        self._end(decided.request_id, decided.time_us, decided.reason)

    def _rejected(self, decided: RequestRejected) -> None:
        self._end(decided.request_id, decided.time_us, f"rejected_{decided.reason}")

    def _retracted(self, decided: RequestRetracted) -> None:
        self._retractions[self._row(decided.request_id)] += 1

    def _deferred(self, decided: AdmissionDeferred) -> None:
        if decided.reason == "adapter" and self._adapters is not None:
            self._adapters.deferred(decided.request_id, decided.time_us)

    def _of_session(self, decided: TurnStarted | SessionYielded | SessionClosed) -> None:
        self._sessions = self._sessions or SessionCounts()
        self._sessions.learn(decided)
        if type(decided) is TurnStarted:  # the request arrived with the new tokens of its turn only
            self._prompt_tokens[self._row(decided.request_id)] = decided.prompt_tokens

    def _placed(self, decided: ExpertsPlaced) -> None:
        self._experts = self._experts or ExpertCounts()
        self._experts.placed(decided)

    def _tier_ended(self, decided: TierOperationEnded) -> None:
        if self._tiers is not None:
            self._tiers.learn(decided)

    def _went_on(self, request_id: RequestId, time_us: int) -> None:
        if self._adapters is not None:
            self._adapters.went_on(request_id, time_us, is_measured=request_id >= self._warm_up)

    def _end(self, request_id: RequestId, time_us: int, reason: str) -> None:
        row = self._row(request_id)
        self._went_on(request_id, time_us)
        self._ended_us[row] = time_us
        self._finish_codes[row] = self._finish_reasons[reason]
        del self._row_of[request_id]
        self._ended[request_id] = row, len(self._message_us)

    def _row(self, request_id: RequestId) -> int:
        try:
            return self._row_of[request_id]
        except KeyError:
            raise ContractError(_no_such_request(request_id)) from None

    # -------------------------------------------------------------------------------------------------- settling

    def _settle_messages(self) -> None:
        """Measure the messages since the last `compact`; then count the gaps of requests that ended."""
        gaps = [self._open_gaps]
        if self._sent_messages:
            gaps.append(self._measure_messages())
        rows, gaps_us, tokens = (np.concatenate(column) for column in zip(*gaps, strict=True))
        reasons = np.frombuffer(self._finish_codes, np.uint16)[rows]
        completed = np.array([reason in COMPLETED for reason in self._finish_reasons], np.bool_)[reasons]
        if self._warm_up:
            completed = completed & (np.frombuffer(self._request_ids, np.int64)[rows] >= self._warm_up)
        single, several = completed & (tokens == 1), completed & (tokens > 1)
        self._itl_us.add(gaps_us[single])  # nearly all gaps; values without counts are sorted much faster
        self._itl_us.add(gaps_us[several], tokens[several])
        is_open = reasons == 0
        self._open_gaps = rows[is_open], gaps_us[is_open], tokens[is_open]
        self._ended.clear()

    def _measure_messages(self) -> tuple[Rows, Float64s, Int32s]:
        """Order the messages by request and time, measure them, and drop them.

        Returns: for each entry with a gap the row of its request, the gap per token in us, and its new tokens.
        """
        messages = len(self._sent_messages)
        rows, members, number = self._members()
        offsets = np.concatenate([message.offsets for message in self._sent_messages])
        counts = np.concatenate([message.token_counts for message in self._sent_messages])
        order = np.argsort(members, kind="stable")  # time never decreases, so this orders by request, then time
        members, number, offsets, counts = members[order], number[order], offsets[order], counts[order]
        message_us = np.array(self._message_us, np.int64)
        self._results_max = 3 * min(
            max(messages * COMPACT_ENTRIES // len(order) if len(order) else 0, COMPACT_RESULTS_MIN), COMPACT_RESULTS_MAX
        )
        self._message_us = array("q")
        self._sent_messages.clear()

        # A token that a client received twice counts once.
        starts = np.flatnonzero(is_first(members))
        sent = np.frombuffer(self._sent, np.int32)
        owners = rows[members[starts]]
        new_tokens = count_new_tokens(members, offsets, counts, sent[owners].astype(np.int64))
        if len(starts):
            sent[owners] = np.maximum(sent[owners], np.maximum.reduceat(offsets + counts, starts))
        if not new_tokens.all():
            kept = new_tokens > 0
            members, number, new_tokens = members[kept], number[kept], new_tokens[kept]
            starts = np.flatnonzero(is_first(members))
            owners = rows[members[starts]]

        sizes = np.bincount(number, new_tokens, messages).astype(np.int64)
        self._messages.add_columns(message_us[sizes > 0], sizes[sizes > 0])

        time_us = message_us[number]
        first_us = np.frombuffer(self._first_message_us, np.int64)
        last_us = np.frombuffer(self._last_message_us, np.int64)
        output_tokens, itl_us_max = np.frombuffer(self._output_tokens, np.int32), np.frombuffer(self._itl_us_max)
        before_us = np.append(0, time_us[:-1])[: len(time_us)]
        before_us[starts] = last_us[owners]
        gaps = gaps_us(time_us, before_us, new_tokens)
        if len(starts):
            first_us[owners] = np.where(first_us[owners] < 0, time_us[starts], first_us[owners])
            last_us[owners] = time_us[np.append(starts[1:], len(time_us)) - 1]
            output_tokens[owners] += np.add.reduceat(new_tokens, starts, dtype=np.int32)
            itl_us_max[owners] = np.fmax(itl_us_max[owners], np.fmax.reduceat(gaps, starts))  # fmax ignores NaN
        real = before_us >= 0
        return rows[members[real]].astype(np.uint32), gaps[real], new_tokens[real].astype(np.int32)

    def _members(self) -> tuple[Int64s, Rows, Int64s]:
        """Find the request of each entry of each message.

        Returns: the rows of requests that were open since the last `compact`, by request id; for each entry of each
            message the index of its request in that array, in the smallest type that holds it (numpy sorts 16 bits ten
            times faster); and for each entry the number of its message.
        """
        open_, ended = self._row_of, self._ended
        known = np.fromiter(chain(open_, ended), np.int64, len(open_) + len(ended))
        rows = np.fromiter(chain(open_.values(), (row for row, _ in ended.values())), np.int64, len(known))
        until = np.full(len(known), len(self._sent_messages), np.int64)  # no message follows the end of a request
        until[len(open_) :] = [messages for _, messages in ended.values()]
        order = np.argsort(known)
        known, rows, until = known[order], rows[order], until[order]

        # Consecutive decodes send to the same requests, in the same array object.
        running_batches: list[Int64s] = []
        batch_of: list[int] = []
        for message in self._sent_messages:
            if not running_batches or message.request_ids is not running_batches[-1]:
                running_batches.append(message.request_ids)
            batch_of.append(len(running_batches) - 1)
        ids = np.concatenate(running_batches)
        found = np.searchsorted(known, ids).astype(np.min_scalar_type(len(known)))
        unknown = ids[np.append(known, -1)[found] != ids] if len(known) else ids
        if len(unknown):
            raise ContractError(_no_such_request(int(unknown[0])))
        parts = np.split(found, np.cumsum([len(running_batch) for running_batch in running_batches])[:-1])
        members = np.concatenate([parts[running_batch] for running_batch in batch_of])
        number = np.repeat(np.arange(len(batch_of)), [len(parts[running_batch]) for running_batch in batch_of])
        late = np.flatnonzero(number >= until[members])
        if len(late):
            raise ContractError(_no_such_request(int(known[members[late[0]]])))
        return rows, members, number

    def _settle_batches(self) -> None:
        """Join launches with results. Batches are settled in launch order, once their results have arrived.

        A batch without a result is settled without times once more than COMPACT_RESULTS_MAX launches follow it. A later
        result still amends it.
        """
        batches = np.concatenate((self._open_batches, self._launched()), axis=1)
        results = np.array(self._results, np.int64).reshape(-1, 3)
        del self._results[:]
        has_come = np.zeros(batches.shape[1], np.bool_)
        started_us, finished_us = batches[STARTED], batches[FINISHED]
        if batches.shape[1]:
            order = np.argsort(batches[BATCH_ID], kind="stable")
            place = np.searchsorted(batches[BATCH_ID], results[:, 0], side="right", sorter=order) - 1
            # newest launch with that batch id; a place of -1 selects some batch, which does not match
            index = order[place]
            mine = batches[BATCH_ID][index] == results[:, 0]
            has_come[index[mine]] = True
            timed = mine & (results[:, 2] > 0)  # a host without a device clock reports 0
            started_us[index[timed]], finished_us[index[timed]] = results[timed, 1], results[timed, 2]
            results = results[~mine]
        for batch_id, start_us, stop_us in results.tolist():
            if batch_id in self._lost_batches and stop_us > 0:
                self._batches.amend(self._lost_batches.pop(batch_id), started_us=start_us, finished_us=stop_us)
        waiting = np.flatnonzero(~has_come)
        settled = int(waiting[0]) if len(waiting) else len(has_come)
        if len(has_come) - settled > COMPACT_RESULTS_MAX:
            settled = len(has_come) - COMPACT_RESULTS_MAX
            for index in waiting[waiting < settled].tolist():
                self._lost_batches[int(batches[BATCH_ID, index])] = len(self._batches) + index
        self._batches.add_columns(*batches[:, :settled])
        self._open_batches = batches[:, settled:].copy()

    def _launched(self) -> NDArray[np.int64]:
        """Return the launches since the last `compact`, as BATCH_COLUMNS."""
        launches = self._launches
        columns = np.full((len(BATCH_COLUMNS), len(launches)), -1, np.int64)
        if not launches:
            return columns
        launched_us, batch_id, modes, extend_rows, starts, stops = zip(*launches, strict=True)
        rows = np.fromiter(map(len, stops), np.int64, len(launches))
        kv_tokens = sums_of(stops, rows)
        new_tokens = kv_tokens - sums_of(starts, rows)
        only_decodes = np.array([mode in DECODING for mode in modes], np.bool_)
        values: dict[str, Any] = {
            "batch_id": batch_id,
            "mode": [self._modes[mode] for mode in modes],
            "launched_us": launched_us,
            "rows": rows,
            "new_tokens": new_tokens,
            "prefill_tokens": np.where(only_decodes, 0, new_tokens - (rows - np.array(extend_rows, np.int64))),
            "kv_tokens": kv_tokens,
        }
        for name, column in values.items():
            columns[BATCH_COLUMNS.index(name)] = column
        launches.clear()
        return columns

    def late(self, slos: Sequence[Slo]) -> list[int]:
        """Count for each SLO the requests that already miss its bound, because they are late or failed.

        The count of an SLO on gaps (`itl`) or on calls is 0, because these are not requests.
        """
        self.compact()
        requests = self._measured_requests()
        is_open = requests.finish_reason == ""
        failed = int((requests.failed & ~is_open).sum())
        waited_us = self._last_us - requests.arrival_us
        counts = []
        for slo in slos:
            if slo.metric in ("itl", "call"):
                counts.append(0)
                continue
            beyond = requests.completed & (per_request(slo.metric, requests) > slo.bound_us)
            if slo.metric == "ttft":
                beyond |= is_open & (np.where(requests.ttft_us < 0, waited_us, requests.ttft_us) > slo.bound_us)
            elif slo.metric == "e2e":
                beyond |= is_open & (waited_us > slo.bound_us)
            counts.append(int(beyond.sum()) + failed)
        return counts

    def _describe_samples(self) -> Summary:
        whole = self._requests()
        first_us = np.array(self._first_message_us, np.int64)
        return measure_samples(self._sampled, whole.arrival_us, first_us, whole.ended_us, whole.completed)

    def _measured_requests(self) -> Requests:
        """Return the requests after the warm-up."""
        requests = self._requests()
        if not self._warm_up:
            return requests
        counts = requests.request_id >= self._warm_up
        return Requests(**{name: column[counts] for name, column in requests.columns().items()})

    def _requests(self) -> Requests:
        arrival_us = np.array(self._arrival_us, np.int64)
        admitted_us = np.array(self._admitted_us, np.int64)
        ended_us = np.array(self._ended_us, np.int64)
        codes = np.array(self._finish_codes, np.uint16)
        rejected = np.array([is_rejection(reason) for reason in self._finish_reasons], np.bool_)[codes]
        first_us, last_us = np.array(self._first_message_us, np.int64), np.array(self._last_message_us, np.int64)
        output_tokens = np.array(self._output_tokens, np.int64)
        return Requests(
            request_id=np.array(self._request_ids, np.int64),
            arrival_us=arrival_us,
            queue_us=np.where(admitted_us < 0, -1, admitted_us - arrival_us),
            ttft_us=ttft_us(arrival_us, first_us),
            tpot_us=tpot_us(first_us, last_us, output_tokens),
            itl_us_max=np.array(self._itl_us_max, np.float64),
            e2e_us=np.where((ended_us < 0) | rejected, -1, ended_us - arrival_us),
            ended_us=ended_us,
            prompt_tokens=np.array(self._prompt_tokens, np.int64),
            cached_tokens=np.array(self._cached_tokens, np.int64),
            output_tokens=output_tokens,
            retractions=np.array(self._retractions, np.int64),
            finish_reason=objects(list(self._finish_reasons))[codes],
            label=np.concatenate([*self._labels, texts(self._recent_labels)]),
            tenant=objects(list(self._tenants))[np.array(self._tenant_codes, np.uint32)],
        )

    # ------------------------------------------------------------------------------------------------ summarising

    def _count_requests(self, requests: Requests) -> Summary:
        reasons = Counter(requests.finish_reason.tolist())
        rejected = {reason.removeprefix("rejected_"): n for reason, n in reasons.items() if is_rejection(reason)}
        finished = {reason: n for reason, n in reasons.items() if reason and not is_rejection(reason)}
        return {
            "arrived": len(requests.request_id),
            "completed": int(requests.completed.sum()),
            "failed": int(requests.failed.sum()),
            "cancelled": finished.get("cancelled", 0),
            "rejected": sum(rejected.values()),
            "rejected_too_long": rejected.get("too_long", 0),
            "unfinished": reasons[""],
            "by_finish_reason": dict(sorted(finished.items())),
            "by_reject_reason": dict(sorted(rejected.items())),
        }

    def _describe_cache(self, requests: Requests) -> Summary:
        admitted = requests.cached_tokens >= 0
        prompt_tokens = int(requests.prompt_tokens[admitted].sum())
        cached_tokens = int(requests.cached_tokens[admitted].sum())
        return {
            "prompt_tokens_admitted": prompt_tokens,
            "prompt_tokens_cached": cached_tokens,
            "hit_ratio": ratio(cached_tokens, prompt_tokens),
            "pages_evicted": self._tallies.total("pages_evicted"),
            "pages_evicted_by_reason": self._tallies.parts("pages_evicted"),
            **{f"{BLOCKS[kind]}_evicted": count for kind, count in self._tallies.parts("blocks_evicted").items()},
            **(self._tiers.describe(self._tallies.total("host_pages_evicted")) if self._tiers is not None else {}),
        }

    def _describe_scheduler(self, requests: Requests, gauges: Levels) -> Summary:
        return {
            "retractions": self._tallies.total("retractions"),
            "retractions_by_reason": self._tallies.parts("retractions"),
            "requests_retracted": int(np.count_nonzero(requests.retractions)),
            "tokens_discarded": self._tallies.total("tokens_discarded"),
            "decodes_skipped": self._tallies.total("decodes_skipped"),
            "admissions_deferred": self._tallies.total("deferred"),
            "admissions_deferred_by_reason": self._tallies.parts("deferred"),
            "waiting_mean": gauges.mean("waiting"),
            "waiting_max": gauges.max("waiting"),
            "running_mean": gauges.mean("running"),
            "running_max": gauges.max("running"),
        }

    def _describe_device(self, requests: Requests, device: DeviceUse) -> Summary:
        """Return the busy and idle times of the device; all None for a host that reports no device times.

        A bubble is time in which the device was idle although a request was open.
        """
        working = at_work(requests, self._last_us)
        work_us, busy = working.total_us(), device.busy
        measured = len(busy.starts) > 0
        busy_at_work_us = float(np.sum(busy.covered_us(working.stops) - busy.covered_us(working.starts)))
        bubble_us = round(work_us - busy_at_work_us) if measured else None
        start_us, stop_us = makespan(requests) or (0, 0)
        busy_us = np.diff(busy.covered_us(np.array([start_us, stop_us])))[0]
        gaps_us = round(device.decode_gaps_us.sum())
        return {
            "batches": sum(device.batches_by_mode.values()),
            "batches_by_mode": device.batches_by_mode,
            "busy_us": busy.total_us() if measured else None,
            "busy_fraction": ratio(float(busy_us), stop_us - start_us) if measured else None,
            "bubble_us": bubble_us,
            "bubble_share": ratio(bubble_us, work_us) if bubble_us is not None else None,
            **describe("decode_gap", device.decode_gaps_us),
            "decode_gap_share": ratio(gaps_us, gaps_us + device.busy_after_decode_us),
        }


_LEARNT: dict[type[Decided], Callable[[MetricsFold, Any], None]] = {
    RequestAdmitted: MetricsFold._admitted,
    RequestFinished: MetricsFold._finished,
    RequestRejected: MetricsFold._rejected,
    RequestRetracted: MetricsFold._retracted,
    AdmissionDeferred: MetricsFold._deferred,
    TurnStarted: MetricsFold._of_session,
    SessionYielded: MetricsFold._of_session,
    SessionClosed: MetricsFold._of_session,
    ExpertsPlaced: MetricsFold._placed,
    TierOperationEnded: MetricsFold._tier_ended,
}
"""What the metrics take from a decided event beyond its tallies, by type."""


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def sums_of(parts: Sequence[Int32s], sizes: Int64s) -> Int64s:
    """Return the sum of each part; empty parts sum to 0."""
    totals = np.append(0, np.cumsum(_joined(parts, np.int32), dtype=np.int64))
    stops = np.cumsum(sizes)
    sums: Int64s = totals[stops] - totals[stops - sizes]
    return sums


def _no_such_request(request_id: RequestId) -> str:
    return (
        f"request {request_id} has an event but never arrived, or has ended\n"
        "hint: fold a journal from its first record, each record once"
    )
