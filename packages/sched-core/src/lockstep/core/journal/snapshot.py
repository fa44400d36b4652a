"""The whole state of an engine as bytes, so that recovery need not fold a journal from its first event.

`restore(dump(engine))` behaves as `engine` does, to the last page id, and dumps to the same bytes. A snapshot is
trusted only beside the digest that the journal recorded for the same event.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from lockstep.core.admin.control import Pace
from lockstep.core.admin.maintenance import Maintenance
from lockstep.core.admin.stats import Counts
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
from lockstep.core.contract.events import DeferReason, Grammar, SamplingParams
from lockstep.core.features.data_parallel import RoundsImage
from lockstep.core.features.disaggregation import TransfersImage
from lockstep.core.features.grammars import GrammarEntry
from lockstep.core.features.jump_forward import Forced
from lockstep.core.features.media import Content, EncoderEntry
from lockstep.core.features.microbatches import MicrobatchesImage
from lockstep.core.features.sessions import SessionImage
from lockstep.core.features.speculation import Chances
from lockstep.core.kv.adapters import adapters_of
from lockstep.core.kv.memory import DeferredFree, Lent, Pending, Rewrite
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import RadixNode, radix_cache_of
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import (
    BASE,
    EMPTY_BATCH,
    NO_REQUEST,
    Adapter,
    Extras,
    Request,
    RequestState,
    RequestTable,
    RunningBatch,
)
from lockstep.core.scheduler.engine import Engine

SNAPSHOT_FORMAT = 1


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
    deferred: tuple[int, str] | None
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
    maintenance: Maintenance
    pace: Pace
    counts: Counts
    sessions: list[SessionImage]
    session_uses: int
    sessions_unsettled: list[tuple[int, str]]
    media: MediaImage | None = None
    adapters: dict[str, Any] | None = None
    chances: Chances | msgspec.UnsetType = msgspec.UNSET  # of drafts, where they are counted
    forced: list[tuple[int, int, bytes]] | msgspec.UnsetType = msgspec.UNSET  # output to come: request, first, ids
    host: bytes = b""  # what the host keeps beside it, of which the engine knows nothing
    transfers: TransfersImage | None = None
    tiers: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    expert_loads: tuple[int, int, bytes] | msgspec.UnsetType = msgspec.UNSET  # layers, reports, counts
    hybrid: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    ranks: RoundsImage | msgspec.UnsetType = msgspec.UNSET  # of one of several data-parallel ranks
    microbatches: MicrobatchesImage | msgspec.UnsetType = msgspec.UNSET  # where there are several
    resources: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # of those that are not stored above, by name


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(EngineImage).decode


class _HostPart(msgspec.Struct):
    """What is read of a snapshot for its host."""

    host: bytes = b""


def host_part(data: bytes) -> bytes:
    """What the host gave to `dump`. Raises ValueError for bytes that are no snapshot."""
    try:
        return msgspec.msgpack.decode(data, type=_HostPart).host
    except msgspec.DecodeError as error:
        raise ValueError(f"not a snapshot of an engine: {error}") from error


def dump(engine: Engine, host: bytes = b"") -> bytes:
    """The engine's state between two steps, and beside it whatever its host wants to find again."""
    memory = engine.memory
    image = EngineImage(
        format=SNAPSHOT_FORMAT,
        config=engine.config,
        now_us=engine.now_us,
        generation=engine.generation,
        digest=engine.digest,
        pool=memory.pool.dump(),
        radix=memory.radix.dump(),
        rows=len(memory.table.holders),
        free_rows=list(memory.table.free_rows),
        pages_width=memory.table.pages.shape[1],
        outputs_width=memory.table.outputs.shape[1],
        requests=[_request_image(engine, request) for request in engine.requests.values()],
        waiting=[request.request_id for request in engine.waiting],
        held=list(engine.held),
        grammars=[
            (digest, known.error, known.users, list(known.waiting)) for digest, known in engine.grammars.known.items()
        ],
        prefilling=engine.prefilling.request_id if engine.prefilling is not None else None,
        running_batch=[request.request_id for request in engine.running_batch.requests],
        positions=engine.positions.tobytes(),
        in_flight=[_batch_image(batch) for batch in engine.in_flight],
        deferred_frees=[_deferred_free_image(engine, deferred) for deferred in memory.deferred_frees],
        deferred_pages=[(free_after, pages.tobytes()) for free_after, pages in memory.deferred_pages],
        rewrites=[(rewrite.row, rewrite.first, rewrite.pages.tobytes()) for rewrite in memory.rewrites],
        pending=[(pending.batch_id, pending.node.number, pending.pages) for pending in memory.pending],
        ratio=engine.ratio.value,
        latency=engine.latency.sums,
        batch_is_full=engine.batch_is_full,
        decode_owed=engine.microbatches.current.decode_owed,
        deferred=engine.admission.reported,
        launch_found_nothing=engine.launch_found_nothing,
        horizon=engine.microbatches.current.horizon,
        decode_launches=engine.microbatches.current.decode_launches,
        extended_at=engine.microbatches.current.extended_at,
        refreshed_at=engine.refreshed_at,
        forced_at=engine.microbatches.current.forced_at,
        next_batch_id=engine.next_batch_id,
        last_request_id=engine.last_request_id,
        timers=list(engine.timers),
        paused=engine.paused,
        draining=engine.draining,
        drains=list(engine.drains),
        tokens_discarded=engine.tokens_discarded,
        prefilled_tokens=engine.prefilled_tokens,
        weights_version=memory.weights_version,
        maintenance=engine.maintenance,
        pace=engine.pace,
        counts=engine.counts,
        sessions=engine.sessions.images(),
        session_uses=engine.sessions.uses,
        sessions_unsettled=list(engine.sessions.unsettled),
        media=_media_image(engine),
        adapters=memory.adapters.dump(),
        chances=engine.chances if engine.chances.offered else msgspec.UNSET,
        forced=[(request_id, one.first, one.tokens.tobytes()) for request_id, one in engine.forced.items()]
        or msgspec.UNSET,
        host=host,
        transfers=engine.transfers.image(memory.lent) if engine.transfers is not None else None,
        tiers=memory.tiers.dump() or msgspec.UNSET,
        expert_loads=_expert_loads_image(engine),
        hybrid=memory.hybrid.dump() or msgspec.UNSET,
        ranks=engine.ranks.image() if engine.ranks is not None else msgspec.UNSET,
        microbatches=engine.microbatches.image() if engine.microbatches.several else msgspec.UNSET,
        resources={one.name: one.dump() for one in engine.admission.resources if one.name} or msgspec.UNSET,
    )
    return _encode(image)


def _expert_loads_image(engine: Engine) -> tuple[int, int, bytes] | msgspec.UnsetType:
    loads = engine.expert_loads
    return msgspec.UNSET if loads is None else (len(loads.counts), loads.reports, loads.counts.tobytes())


def restore(data: bytes) -> Engine:
    """The engine that `dump` described. Raises ValueError for bytes that are no snapshot of this format."""
    try:
        image = _decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a snapshot of an engine: {error}") from error
    if image.format != SNAPSHOT_FORMAT:
        raise ValueError(f"snapshot format {image.format}, this version reads {SNAPSHOT_FORMAT}")
    engine = Engine(image.config)
    memory = engine.memory
    memory.pool = PagePool.load(image.pool)
    memory.radix = radix_cache_of(image.radix)
    nodes = {node.number: node for node in memory.radix.walk()}

    memory.adapters = adapters_of(image.adapters)
    memory.table = RequestTable(image.config.rows_max, image.config.page_size)
    memory.table.resize(image.rows, image.pages_width, image.outputs_width)
    memory.table.free_rows = image.free_rows
    for one in image.requests:
        engine.requests[one.request_id] = _request(engine, one, nodes)
    for deferred in image.deferred_frees:
        _lay_row(memory.table, deferred.row, deferred.row_pages, deferred.row_outputs)
        memory.table.holders[deferred.row] = GONE
        memory.deferred_frees.append(
            DeferredFree(
                free_after=deferred.free_after,
                row=deferred.row,
                namespace=deferred.namespace,
                tokens=deferred.tokens,
                prompt_tokens=deferred.prompt_tokens,
                handle=nodes[deferred.handle] if deferred.handle is not None else None,
                protected_pages=deferred.protected_pages,
                computed=deferred.computed,
                publish=deferred.publish,
                known=deferred.known,
            )
        )
    engine.waiting = [engine.requests[request_id] for request_id in image.waiting]
    engine.held = {request_id: engine.requests[request_id] for request_id in image.held}
    engine.grammars.known = {
        digest: GrammarEntry(error, users, dict.fromkeys(waiting)) for digest, error, users, waiting in image.grammars
    }
    engine.prefilling = engine.requests[image.prefilling] if image.prefilling is not None else None
    if image.microbatches is not msgspec.UNSET:
        engine.microbatches.load(image.microbatches, engine.requests)
    else:
        numbers = (image.horizon, image.decode_owed, image.decode_launches, image.extended_at, image.forced_at)
        members = [engine.requests[request_id] for request_id in image.running_batch]
        engine.microbatches.current.load(members, image.positions, numbers)
    engine.active = sum(request.row >= 0 for request in engine.requests.values())
    engine.in_flight.extend(_batch(engine, batch) for batch in image.in_flight)
    memory.deferred_pages = [(free_after, np.frombuffer(pages, np.int32)) for free_after, pages in image.deferred_pages]
    memory.rewrites = [Rewrite(row, first, np.frombuffer(pages, np.int32)) for row, first, pages in image.rewrites]
    memory.pending = [Pending(batch_id, nodes[number], pages) for batch_id, number, pages in image.pending]
    engine.ratio.value = image.ratio
    engine.latency.sums = image.latency
    for name in (
        "now_us generation digest batch_is_full launch_found_nothing "
        "refreshed_at next_batch_id last_request_id timers paused draining drains "
        "tokens_discarded prefilled_tokens maintenance pace counts"
    ).split():
        setattr(engine, name, getattr(image, name))
    memory.weights_version = image.weights_version
    engine.admission.reported = image.deferred
    if image.tiers is not msgspec.UNSET:
        memory.tiers.load(image.tiers, nodes)
        engine.maintenance.tell_tiers(engine)
    memory.hybrid.table = memory.table
    if image.hybrid is not msgspec.UNSET:
        memory.hybrid.load(image.hybrid, memory.table)
        memory.pool = memory.hybrid.pool_of(memory.pool)
    if isinstance(image.expert_loads, tuple):
        layers, reports, counts = image.expert_loads
        engine.expert_loads = ExpertLoads(np.frombuffer(counts, np.int64).reshape(layers, -1), reports)
    for one in engine.admission.resources if image.resources is not msgspec.UNSET else ():
        if one.name:
            one.load(image.resources[one.name])
    engine.sessions.load(image.sessions, nodes)
    engine.sessions.uses = image.session_uses
    engine.sessions.unsettled = image.sessions_unsettled
    if image.chances is not msgspec.UNSET:
        engine.chances = image.chances
    if image.forced is not msgspec.UNSET:
        engine.forced = {
            request_id: Forced(first, np.frombuffer(ids, np.int32)) for request_id, first, ids in image.forced
        }
    if image.media is not None:
        _lay_media(engine, image.media)
    if image.transfers is not None and engine.transfers is not None:
        engine.transfers.load(image.transfers, nodes)
        engine.sending = sum(transfer.ends is not None for transfer in engine.transfers.all.values())
        for row, request_id, given_up in image.transfers.lent:
            memory.lent[row] = Lent(request_id, [np.frombuffer(pages, np.int32) for pages in given_up])
    if engine.ranks is not None and image.ranks is not msgspec.UNSET:
        engine.ranks.load(image.ranks, engine)
    if not engine.microbatches.several:
        for request in engine.requests.values():
            if request.row >= 0 and not (engine.transfers is not None and engine.transfers.is_sent(request)):
                engine.microbatches.take_place(request)
    for request in engine.held.values():
        if request.extras is not None and request.extras.leader != NO_REQUEST:
            engine.followers.setdefault(request.extras.leader, []).append(request)
    return engine


def _media_image(engine: Engine) -> MediaImage | None:
    """None for an engine that never saw any."""
    media, placeholders = engine.media, engine.placeholders
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


def _lay_media(engine: Engine, image: MediaImage) -> None:
    engine.placeholders.numbers, engine.placeholders.next = dict(image.numbers), image.next
    engine.media.encodings = dict(image.encodings)
    engine.media.pins = {request_id: _media_of(engine, request_id) for request_id in image.pins}
    engine.media.deferred = list(image.deferred)
    engine.media.line = {request_id: _media_of(engine, request_id) for request_id in image.line}
    if image.queued is not msgspec.UNSET:
        engine.media.queued = dict.fromkeys(image.queued)
    if image.dropping is not msgspec.UNSET:
        engine.media.dropping = list(image.dropping)


def _media_of(engine: Engine, request_id: int) -> dict[bytes, int]:
    extras = engine.requests[request_id].extras
    assert extras is not None
    return extras.media


def _request_image(engine: Engine, request: Request) -> RequestImage:
    values = {name: getattr(request, name) for name in RequestImage.__struct_fields__ if hasattr(request, name)}
    computed = engine.computed_of(request)
    pages, outputs = b"", b""
    if request.row >= 0:
        pages, outputs = _row_image(engine, request.row, computed, engine.outputs_of(request))
    values.update(
        state=int(request.state),
        computed=request.computed,
        handle=request.handle.number if request.handle is not None else None,
        row_pages=pages,
        row_outputs=outputs,
    )
    return RequestImage(**values)


def _deferred_free_image(engine: Engine, deferred: DeferredFree) -> DeferredFreeImage:
    on_the_way = sum(batch.tokens_of(deferred.row) for batch in engine.in_flight)
    computed = max(deferred.computed - deferred.prompt_tokens, 0)  # of its outputs; no more of them will be published
    pages, outputs = _row_image(
        engine, deferred.row, deferred.computed, min(computed, max(computed + 1 - on_the_way, 0))
    )
    values = deferred._asdict()
    values["handle"] = deferred.handle.number if deferred.handle is not None else None
    return DeferredFreeImage(**values, row_pages=pages, row_outputs=outputs)


def _row_image(engine: Engine, row: int, computed: int, outputs: int) -> tuple[bytes, bytes]:
    held = -(-computed // engine.config.page_size)
    return engine.memory.table.pages[row, :held].tobytes(), engine.memory.table.outputs[row, :outputs].tobytes()


def _lay_row(table: RequestTable, row: int, pages: bytes, outputs: bytes) -> None:
    table.pages[row, : len(pages) // 4] = np.frombuffer(pages, np.int32)
    table.outputs[row, : len(outputs) // 4] = np.frombuffer(outputs, np.int32)


def _request(engine: Engine, image: RequestImage, nodes: dict[int, RadixNode]) -> Request:
    request = Request.__new__(Request)
    for name in image.__struct_fields__:
        if name not in ("state", "handle", "row_pages", "row_outputs"):
            setattr(request, name, getattr(image, name))
    request.state = RequestState(image.state)
    request.handle = nodes[image.handle] if image.handle is not None else None
    request.matched = None
    request.decodes = False  # until it is found in the cohort
    if request.row >= 0:
        engine.memory.table.holders[request.row] = request
        _lay_row(engine.memory.table, request.row, image.row_pages, image.row_outputs)
    return request


def _batch_image(batch: InFlight) -> BatchImage:
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


def _batch(engine: Engine, image: BatchImage) -> InFlight:
    rows, request_ids = np.frombuffer(image.rows, np.int32), np.frombuffer(image.request_ids, np.int64)
    sample_rows = np.frombuffer(image.sample_rows, np.int32)
    requests = [engine.requests.get(request_id, GONE) for request_id in request_ids.tolist()]
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
