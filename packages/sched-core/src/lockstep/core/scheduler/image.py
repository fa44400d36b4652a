"""The layout of a snapshot: its parts in their order, and how requests and batches are stored and restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from lockstep.core.admin.control import ControlsPart
from lockstep.core.admin.expert_load import ExpertPart
from lockstep.core.admin.expert_moves import PlacementPart
from lockstep.core.admin.maintenance import MaintenancePart
from lockstep.core.contract.commands import (
    AfterBatch,
    BatchPlan,
    BlockPasses,
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
from lockstep.core.contract.stats import Counts
from lockstep.core.features.data_parallel import RanksPart
from lockstep.core.features.diffusion import DiffusionPart
from lockstep.core.features.disaggregation import TransfersPart
from lockstep.core.features.grammars import GrammarsPart
from lockstep.core.features.jump_forward import ForcedPart
from lockstep.core.features.media import EncoderPart
from lockstep.core.features.multiplexing import MultiplexPart
from lockstep.core.features.sessions import SessionsPart
from lockstep.core.features.speculation import SpeculationPart
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.memory import MemoryPart
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.microbatches import RunningPart
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import (
    BASE,
    EMPTY_BATCH,
    GONE,
    Adapter,
    Extras,
    Request,
    RequestState,
    RunningBatch,
)
from lockstep.core.scheduler.admission import AdmissionPart
from lockstep.core.scheduler.ordering import OrderingPart


class RequestImage(msgspec.Struct, forbid_unknown_fields=True, rename={"open_prerequisites": "holds"}):
    """A request, with the pages and outputs of its row if it has one."""

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
    open_prerequisites: int
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
    session_after: str | msgspec.UnsetType = msgspec.UNSET  # of a turn that names another one


class VerifyImage(msgspec.Struct, forbid_unknown_fields=True):
    """The drafts and forced tokens of a batch in flight, and the positions of its samplers as far as results determine
    them."""

    draft_tokens: int
    draft_lengths: bytes
    method: SpeculationMethod
    starts_after: tuple[AfterBatch, ...]
    sampled_at: bytes
    forced_lengths: bytes | msgspec.UnsetType = msgspec.UNSET
    forced_tokens: bytes | msgspec.UnsetType = msgspec.UNSET
    parents: bytes | msgspec.UnsetType = msgspec.UNSET


class BatchImage(msgspec.Struct, forbid_unknown_fields=True):
    """A batch in flight. Requests are stored by id; rows of requests that have ended are dead and never read."""

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
    ranks: Ranks | msgspec.UnsetType = msgspec.UNSET  # the agreement of data-parallel ranks
    microbatch: int | msgspec.UnsetType = msgspec.UNSET  # if it is not the first one
    blocks: tuple[bytes, bytes] | msgspec.UnsetType = msgspec.UNSET  # of a pass over blocks: `BlockPasses`
    layers: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET  # of a split prefill
    sms: int | msgspec.UnsetType = msgspec.UNSET  # if it does not have the whole device


class SchedulerPart(msgspec.Struct):
    """The part of the scheduler itself in a snapshot."""

    format: int
    config: SchedConfig
    now_us: int
    generation: int
    digest: bytes
    requests: list[RequestImage]
    blocked: list[int]
    prefilling: int | None
    in_flight: list[BatchImage]
    ratio: float
    latency: list[float]
    batch_is_full: bool
    launch_found_nothing: bool
    refreshed_at: int
    next_batch_id: int
    last_request_id: int
    timers: list[tuple[int, int]]
    tokens_discarded: int
    counts: Counts
    host: bytes = b""  # bytes that the host stores with the snapshot, opaque to the engine


PARTS: tuple[type[msgspec.Struct], ...] = (
    SchedulerPart,
    MemoryPart,
    RunningPart,
    OrderingPart,
    GrammarsPart,
    ControlsPart,
    MaintenancePart,
    SessionsPart,
    EncoderPart,
    ForcedPart,
    SpeculationPart,
    DiffusionPart,
    TransfersPart,
    AdmissionPart,
    RanksPart,
    ExpertPart,
    PlacementPart,
    MultiplexPart,
)
"""The parts of a snapshot: of the scheduler and of each component."""

LAYOUT = """
format config now_us generation digest pool radix rows free_rows pages_width outputs_width requests waiting blocked
grammars prefilling running_batch positions in_flight deferred_frees deferred_pages rewrites pending ratio latency
batch_is_full decode_owed deferred launch_found_nothing horizon decode_launches extended_at refreshed_at forced_at
next_batch_id last_request_id timers paused draining drains tokens_discarded prefilled_tokens weights_version
maintenance pace counts sessions session_uses sessions_unsettled media adapters chances forced host transfers tiers
expert_loads hybrid ranks microbatches resources spare admits tree_chances
expert_record expert_placement block_passes split_prefill
""".split()
"""The fields of all parts in the order in which a snapshot stores them. The bytes of snapshots depend on it."""

STORED_AS = {"blocked": "held", "running_batch": "cohort", "deferred_frees": "leases", "deferred_pages": "fenced_pages"}
"""Keys of a snapshot that differ from the names of their fields."""


def _snapshot_type() -> type[msgspec.Struct]:
    """Return the type of a snapshot: the fields of all parts, in the order of LAYOUT."""
    fields = {field.name: field for part in PARTS for field in msgspec.structs.fields(part)}
    assert sorted(fields) == sorted(LAYOUT), f"LAYOUT and the parts differ in {fields.keys() ^ set(LAYOUT)}"
    required = msgspec.NODEFAULT
    columns: list[tuple[str, Any] | tuple[str, Any, Any]] = [
        (name, fields[name].type)
        if fields[name].default is required
        else (name, fields[name].type, fields[name].default)
        for name in LAYOUT
    ]
    return msgspec.defstruct("EngineImage", columns, rename=STORED_AS, kw_only=True, forbid_unknown_fields=True)


EngineImage = _snapshot_type()

Part = TypeVar("Part", bound=msgspec.Struct)


def image_of(parts: Iterable[msgspec.Struct]) -> msgspec.Struct:
    """Return the snapshot that consists of these parts. Fields of parts that are absent have their defaults."""
    values: dict[str, Any] = {}
    for part in parts:
        values |= msgspec.structs.asdict(part)
    return EngineImage(**values)


def part_of(image: msgspec.Struct, kind: type[Part]) -> Part:
    """Return one part of a snapshot."""
    return kind(**{name: getattr(image, name) for name in kind.__struct_fields__})


def request_image(scheduler: SchedulerView, request: Request) -> RequestImage:
    values = {name: getattr(request, name) for name in RequestImage.__struct_fields__ if hasattr(request, name)}
    computed = scheduler.computed_of(request)
    pages, outputs = b"", b""
    if request.row >= 0:
        held = scheduler.memory.table.held_pages(request.row, computed)
        pages, outputs = scheduler.memory.table.row_image(request.row, held, scheduler.outputs_of(request))
    values.update(
        state=int(request.state),
        computed=request.computed,
        handle=request.handle.number if request.handle is not None else None,
        row_pages=pages,
        row_outputs=outputs,
        session_after=request.session_after or msgspec.UNSET,
    )
    return RequestImage(**values)


def request_of(scheduler: SchedulerView, image: RequestImage, nodes: dict[int, RadixNode]) -> Request:
    request = Request.__new__(Request)
    for name in image.__struct_fields__:
        if name not in ("state", "handle", "row_pages", "row_outputs", "session_after"):
            setattr(request, name, getattr(image, name))
    request.session_after = "" if image.session_after is msgspec.UNSET else image.session_after
    request.state = RequestState(image.state)
    request.handle = nodes[image.handle] if image.handle is not None else None
    request.matched = None
    request.decodes = False  # the running batch sets it for its members
    if request.row >= 0:
        scheduler.memory.table.load_row(request.row, request, image.row_pages, image.row_outputs)
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
        blocks=(plan.blocks.numbers.tobytes(), plan.blocks.given.tobytes())
        if plan.blocks is not None
        else msgspec.UNSET,
        layers=plan.layers if plan.layers is not None else msgspec.UNSET,
        sms=plan.sms if plan.sms is not None else msgspec.UNSET,
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
        parents=speculation.parents.tobytes() or msgspec.UNSET,
    )


def _speculation(image: VerifyImage) -> Speculation:
    return Speculation(
        image.draft_tokens,
        np.frombuffer(image.draft_lengths, np.int32),
        image.method,
        np.frombuffer(image.forced_lengths or b"", np.int32),
        np.frombuffer(image.forced_tokens or b"", np.int32),
        np.frombuffer(image.parents or b"", np.int32),
    )


def _blocks(image: tuple[bytes, bytes] | msgspec.UnsetType) -> BlockPasses | None:
    if image is msgspec.UNSET:
        return None
    return BlockPasses(*(np.frombuffer(column, np.int32) for column in image))


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
        layers=image.layers if image.layers is not msgspec.UNSET else None,
        sms=image.sms if image.sms is not msgspec.UNSET else None,
        starts_after=verifies.starts_after if verifies is not None else (),
        speculation=_speculation(verifies) if verifies is not None else None,
        blocks=_blocks(image.blocks),
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


NO_FACTS = EMPTY_BATCH.facts
