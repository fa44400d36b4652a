"""The parts of a snapshot of an engine, and how requests, batches and media are stored in it and laid out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from lockstep.core.admin.control import Pace
from lockstep.core.admin.maintenance import MaintenanceImage
from lockstep.core.cluster.expert_placement import ExpertLoads
from lockstep.core.contract.commands import (
    AfterBatch,
    BatchPlan,
    MediaSpan,
    Mode,
    PageDeltas,
    Ranks,
    RowTaken,
    Speculation,
    SpeculationMethod,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DeferReason, Grammar, RequestId, SamplingParams
from lockstep.core.contract.stats import Counts
from lockstep.core.features.data_parallel import RoundsImage
from lockstep.core.features.disaggregation import TransfersImage
from lockstep.core.features.media import Content, EncoderCache, EncoderEntry, Placeholders
from lockstep.core.features.sessions import SessionImage
from lockstep.core.features.speculation import Chances
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.memory import DeferredFree
from lockstep.core.kv.radix import RadixNode
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.microbatches import MicrobatchesImage
from lockstep.core.requests.table import (
    BASE,
    EMPTY_BATCH,
    Adapter,
    Extras,
    Request,
    RequestState,
    RequestTable,
    RunningBatch,
)


class RequestImage(msgspec.Struct, forbid_unknown_fields=True):
    """A request, its row's tokens included when it has one."""

    request_id: int
    label: str
    namespace: str
    arrived_us: int
    waiting_since_us: int
    deadline_us: int | None
    finish_by_us: int | None
    max_new_tokens: int
    min_new_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams | None
    session: str
    session_start: int | None
    grammar: Grammar | None
    grammar_due_us: int | None
    grammar_outputs: int
    watches_text: bool
    sent: int
    streams: bool
    stream_every: int
    tokens: bytes
    prompt_tokens: int
    outputs: int
    state: int
    holds: int
    epoch: int
    row: int
    computed: int
    chunks: int
    handle: int | None  # number of the radix node
    protected_pages: int
    cached_tokens: int
    row_pages: bytes
    row_outputs: bytes
    tenant: str = ""
    routing_key: str = ""
    priority: int | None = None
    prefilled_before: int = 0
    bypassed: int = 0
    behind: int = -1
    extras: Extras | None = None
    adapter: Adapter = BASE
    deferred: DeferReason | None = None


class DeferredFreeImage(msgspec.Struct, forbid_unknown_fields=True, rename={"free_after": "fence"}):
    free_after: int
    row: int
    namespace: str
    tokens: bytes
    prompt_tokens: int
    handle: int | None
    protected_pages: int
    computed: int
    publish: bool
    row_pages: bytes
    row_outputs: bytes
    known: int | None = None


class VerifyImage(msgspec.Struct, forbid_unknown_fields=True):
    """What a batch in flight verifies, and where its samplers stand as far as results say."""

    draft_tokens: int
    draft_lengths: bytes
    method: SpeculationMethod
    starts_after: tuple[AfterBatch, ...]
    sampled_at: bytes
    forced_lengths: bytes | msgspec.UnsetType = msgspec.UNSET
    forced_tokens: bytes | msgspec.UnsetType = msgspec.UNSET


class BatchImage(msgspec.Struct, forbid_unknown_fields=True):
    """A batch in flight. Requests are named by id; those that have ended since are dead in it and never looked at."""

    batch_id: int
    mode: Mode
    generation: int
    extend_rows: int
    steps: int
    rows: bytes
    request_ids: bytes
    starts: bytes
    stops: bytes
    token_ids: bytes
    sample_rows: bytes
    delta_pages: bytes
    delta_runs: bytes
    opened_rows: bytes
    opened_index: bytes
    rows_taken: tuple[RowTaken, ...]
    sample_after: int | None
    ending: list[int]
    dead: list[int]
    sampler_facts: bytes
    stop_tokens: bytes
    stops_per_row: int
    pooled_rows: bytes = b""
    media_spans: tuple[MediaSpan, ...] = ()
    verifies: VerifyImage | None = None
    ranks: Ranks | msgspec.UnsetType = msgspec.UNSET  # what data-parallel ranks agreed on
    microbatch: int | msgspec.UnsetType = msgspec.UNSET  # where it is not the first


class MediaImage(msgspec.Struct, forbid_unknown_fields=True, rename={"deferred": "fenced"}):
    """Placeholders and the encoder cache. Lists of pairs, because the order in them decides."""

    numbers: list[tuple[Content, int]]
    next: int
    encodings: list[tuple[bytes, EncoderEntry]]
    pins: list[int]
    line: list[int]
    deferred: list[tuple[int, list[bytes]]]
    queued: list[bytes] | msgspec.UnsetType = msgspec.UNSET  # of an encoder with a budget, where anything is
    dropping: list[bytes] | msgspec.UnsetType = msgspec.UNSET


_ENGINE_KEYS = {"running_batch": "cohort", "deferred_frees": "leases", "deferred_pages": "fenced_pages"}  # in snapshots


class EngineImage(msgspec.Struct, forbid_unknown_fields=True, rename=_ENGINE_KEYS):
    format: int
    config: SchedConfig
    now_us: int
    generation: int
    digest: bytes
    pool: dict[str, Any]
    radix: dict[str, Any] | None
    rows: int
    free_rows: list[int]
    pages_width: int
    outputs_width: int
    requests: list[RequestImage]
    waiting: list[int]
    held: list[int]
    grammars: list[tuple[bytes, str | None, int, list[int]]]
    prefilling: int | None
    running_batch: list[int]
    positions: bytes
    in_flight: list[BatchImage]
    deferred_frees: list[DeferredFreeImage]
    deferred_pages: list[tuple[int, bytes]]
    rewrites: list[tuple[int, int, bytes]]
    pending: list[tuple[int, int, int]]
    ratio: float
    latency: list[float]
    batch_is_full: bool
    decode_owed: bool
    deferred: tuple[int, DeferReason] | None
    launch_found_nothing: bool
    horizon: int
    decode_launches: int
    extended_at: int
    refreshed_at: int
    forced_at: int
    next_batch_id: int
    last_request_id: int
    timers: list[tuple[int, int]]
    paused: bool
    draining: bool
    drains: list[int]
    tokens_discarded: int
    prefilled_tokens: int
    weights_version: int
    maintenance: MaintenanceImage
    pace: Pace
    counts: Counts
    sessions: list[SessionImage]
    session_uses: int
    sessions_unsettled: list[tuple[int, str]]
    media: MediaImage | None = None
    adapters: dict[str, Any] | None = None
    chances: Chances | msgspec.UnsetType = msgspec.UNSET  # of drafts, where they are counted
    forced: list[tuple[int, int, bytes]] | msgspec.UnsetType = msgspec.UNSET  # output to come: request, first, ids
    admits: bool | msgspec.UnsetType = msgspec.UNSET  # false: an operator paused admission
    spare: bytes | msgspec.UnsetType = msgspec.UNSET  # int32 by row: pages kept for its next positions
    host: bytes = b""  # what the host keeps beside it, opaque to the engine
    transfers: TransfersImage | None = None
    tiers: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    expert_loads: tuple[int, int, bytes] | msgspec.UnsetType = msgspec.UNSET  # layers, reports, counts
    hybrid: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    ranks: RoundsImage | msgspec.UnsetType = msgspec.UNSET  # of one of several data-parallel ranks
    microbatches: MicrobatchesImage | msgspec.UnsetType = msgspec.UNSET  # where there are several
    resources: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # of those that are not stored above, by name


def expert_loads_image(loads: ExpertLoads | None) -> tuple[int, int, bytes] | msgspec.UnsetType:
    """Layers, reports and counts."""
    return msgspec.UNSET if loads is None else (len(loads.counts), loads.reports, loads.counts.tobytes())


def media_image(media: EncoderCache, placeholders: Placeholders) -> MediaImage | None:
    """Placeholders and encoder cache; None for an engine that never had a request with media."""
    if not placeholders.numbers:
        return None
    return MediaImage(
        numbers=list(placeholders.numbers.items()),
        next=placeholders.next,
        encodings=list(media.encodings.items()),
        pins=list(media.pins),
        line=list(media.line),
        deferred=list(media.deferred),
        queued=list(media.queued) or msgspec.UNSET,
        dropping=list(media.dropping) or msgspec.UNSET,
    )


def load_media(
    image: MediaImage, media: EncoderCache, placeholders: Placeholders, requests: Mapping[RequestId, Request]
) -> None:
    """Lay out what `media_image` stored."""
    placeholders.numbers, placeholders.next = dict(image.numbers), image.next
    media.encodings = dict(image.encodings)
    media.pins = {request_id: _media_of(requests, request_id) for request_id in image.pins}
    media.deferred = list(image.deferred)
    media.line = {request_id: _media_of(requests, request_id) for request_id in image.line}
    if image.queued is not msgspec.UNSET:
        media.queued = dict.fromkeys(image.queued)
    if image.dropping is not msgspec.UNSET:
        media.dropping = list(image.dropping)


def _media_of(requests: Mapping[RequestId, Request], request_id: int) -> dict[bytes, int]:
    extras = requests[request_id].extras
    assert extras is not None
    return extras.media


def request_image(scheduler: SchedulerView, request: Request) -> RequestImage:
    values = {name: getattr(request, name) for name in RequestImage.__struct_fields__ if hasattr(request, name)}
    computed = scheduler.computed_of(request)
    pages, outputs = b"", b""
    if request.row >= 0:
        pages, outputs = _row_image(scheduler, request.row, computed, scheduler.outputs_of(request))
    values.update(
        state=int(request.state),
        computed=request.computed,
        handle=request.handle.number if request.handle is not None else None,
        row_pages=pages,
        row_outputs=outputs,
    )
    return RequestImage(**values)


def deferred_free_image(scheduler: SchedulerView, deferred: DeferredFree) -> DeferredFreeImage:
    on_the_way = sum(batch.tokens_of(deferred.row) for batch in scheduler.in_flight)
    computed = max(deferred.computed - deferred.prompt_tokens, 0)  # of its outputs; no more of them will be published
    pages, outputs = _row_image(
        scheduler, deferred.row, deferred.computed, min(computed, max(computed + 1 - on_the_way, 0))
    )
    values = deferred._asdict()
    values["handle"] = deferred.handle.number if deferred.handle is not None else None
    return DeferredFreeImage(**values, row_pages=pages, row_outputs=outputs)


def _row_image(scheduler: SchedulerView, row: int, computed: int, outputs: int) -> tuple[bytes, bytes]:
    held = scheduler.memory.table.held_pages(row, computed)
    return scheduler.memory.table.pages[row, :held].tobytes(), scheduler.memory.table.outputs[row, :outputs].tobytes()


def lay_row(table: RequestTable, row: int, pages: bytes, outputs: bytes) -> None:
    table.pages[row, : len(pages) // 4] = np.frombuffer(pages, np.int32)
    table.outputs[row, : len(outputs) // 4] = np.frombuffer(outputs, np.int32)


def request_of(scheduler: SchedulerView, image: RequestImage, nodes: dict[int, RadixNode]) -> Request:
    request = Request.__new__(Request)
    for name in image.__struct_fields__:
        if name not in ("state", "handle", "row_pages", "row_outputs"):
            setattr(request, name, getattr(image, name))
    request.state = RequestState(image.state)
    request.handle = nodes[image.handle] if image.handle is not None else None
    request.matched = None
    request.decodes = False  # until it is found in the cohort
    if request.row >= 0:
        scheduler.memory.table.hold(request.row, request)
        lay_row(scheduler.memory.table, request.row, image.row_pages, image.row_outputs)
    return request


def batch_image(batch: InFlight) -> BatchImage:
    plan, samplers = batch.plan, batch.samplers
    return BatchImage(
        batch_id=plan.batch_id,
        mode=plan.mode,
        generation=plan.generation,
        extend_rows=plan.extend_rows,
        steps=plan.steps,
        rows=plan.rows.tobytes(),
        request_ids=plan.request_ids.tobytes(),
        starts=plan.starts.tobytes(),
        stops=plan.stops.tobytes(),
        token_ids=plan.token_ids.tobytes(),
        sample_rows=plan.sample_rows.tobytes(),
        delta_pages=plan.deltas.pages.tobytes(),
        delta_runs=plan.deltas.runs.tobytes(),
        opened_rows=plan.deltas.opened_rows.tobytes(),
        opened_index=plan.deltas.opened_index.tobytes(),
        rows_taken=plan.rows_taken,
        sample_after=plan.sample_after,
        ending=batch.ending,
        dead=batch.dead,
        sampler_facts=samplers.facts.tobytes(),
        stop_tokens=samplers.stops.tobytes(),
        stops_per_row=samplers.stops.shape[1],
        pooled_rows=plan.pooled_rows.tobytes(),
        media_spans=plan.media_spans,
        verifies=_verify_image(batch),
        ranks=plan.ranks if plan.ranks is not None else msgspec.UNSET,
        microbatch=plan.microbatch or msgspec.UNSET,
    )


def _verify_image(batch: InFlight) -> VerifyImage | None:
    speculation = batch.plan.speculation
    if speculation is None:
        return None
    return VerifyImage(
        draft_tokens=speculation.draft_tokens,
        draft_lengths=speculation.draft_lengths.tobytes(),
        method=speculation.method,
        starts_after=batch.plan.starts_after,
        sampled_at=batch.sampled_at.tobytes(),
        forced_lengths=speculation.forced_lengths.tobytes() or msgspec.UNSET,
        forced_tokens=speculation.forced_tokens.tobytes() or msgspec.UNSET,
    )


def _speculation(image: VerifyImage) -> Speculation:
    return Speculation(
        image.draft_tokens,
        np.frombuffer(image.draft_lengths, np.int32),
        image.method,
        np.frombuffer(image.forced_lengths or b"", np.int32),
        np.frombuffer(image.forced_tokens or b"", np.int32),
    )


def batch_of(scheduler: SchedulerView, image: BatchImage) -> InFlight:
    rows, request_ids = np.frombuffer(image.rows, np.int32), np.frombuffer(image.request_ids, np.int64)
    sample_rows = np.frombuffer(image.sample_rows, np.int32)
    requests = [scheduler.requests.get(request_id, GONE) for request_id in request_ids.tolist()]
    deltas = PageDeltas(
        np.frombuffer(image.delta_pages, np.int32),
        np.frombuffer(image.delta_runs, np.int32),
        np.frombuffer(image.opened_rows, np.int32),
        np.frombuffer(image.opened_index, np.int32),
    )
    verifies = image.verifies
    plan = BatchPlan(
        batch_id=image.batch_id,
        mode=image.mode,
        generation=image.generation,
        extend_rows=image.extend_rows,
        steps=image.steps,
        rows=rows,
        request_ids=request_ids,
        starts=np.frombuffer(image.starts, np.int32),
        stops=np.frombuffer(image.stops, np.int32),
        token_ids=np.frombuffer(image.token_ids, np.int32),
        sample_rows=sample_rows,
        deltas=deltas,
        rows_taken=image.rows_taken,
        sample_after=image.sample_after,
        pooled_rows=np.frombuffer(image.pooled_rows, np.int32),
        media_spans=image.media_spans,
        ranks=image.ranks if image.ranks is not msgspec.UNSET else None,
        microbatch=image.microbatch if image.microbatch is not msgspec.UNSET else 0,
        starts_after=verifies.starts_after if verifies is not None else (),
        speculation=_speculation(verifies) if verifies is not None else None,
    )
    samplers = RunningBatch(
        [requests[i] for i in sample_rows.tolist()],
        request_ids[sample_rows],
        np.frombuffer(image.sampler_facts, np.int32).reshape(-1, len(sample_rows)) if len(sample_rows) else NO_FACTS,
        np.frombuffer(image.stop_tokens, np.int32).reshape(len(sample_rows), image.stops_per_row),
    )
    batch = InFlight(plan, requests, samplers, image.ending)
    batch.dead = image.dead
    if verifies is not None:
        batch.sampled_at = np.frombuffer(verifies.sampled_at, np.int32)
    return batch


def _gone() -> Request:
    request = Request.__new__(Request)
    request.row = -1
    request.state = RequestState.FINISHED
    request.label, request.request_id = "gone", -1
    request.streams, request.stream_every = True, 1
    request.extras = None
    request.decodes = False
    return request


NO_FACTS = EMPTY_BATCH.facts

GONE = _gone()
"""Stands for requests that ended while a batch or a lease still names their row."""
