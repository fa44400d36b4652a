"""The digest of a Step: a chain over logical decisions, equal on every host that folds the same journal.

Covered are every decided event (without its time), every launched plan (requests, spans, page-table changes, sampling
rows, whether it samples later), the numbers of streamed output tokens by request, compilations of grammars, lengths of
matcher moves, answers to control requests, loads of adapters and moves between cache tiers. Not covered are token ids,
which are observed, encodings on disk or wire, and values that follow from covered ones: the row of a request, which its
admission contains, and token counts of 1.

From `MANY` requests on, their ids enter as a digest, which a running batch computes once for all its steps. A field
added to a decided event later does not change old digests as long as it has its default. Fields declared as informative
are omitted: they are numbers of the state, which the digests of earlier steps cover.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from struct import Struct
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    BatchPlan,
    BlockCopy,
    CancelTransfer,
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    MeasureExpertLoad,
    Mode,
    MoveExperts,
    PrefetchFromStorage,
    ProposeBatch,
    SampleBatch,
    StartTransfer,
    Step,
    StreamTokens,
    WriteToStorage,
)
from lockstep.core.contract.declarations import DECLARATIONS
from lockstep.core.contract.events import Decided

DIGEST_BYTES = 16
MANY = 128  # requests of a plan or message
EMPTY_DIGEST = bytes(DIGEST_BYTES)
MODES = {mode: number for number, mode in enumerate(get_args(Mode))}  # a new mode is only ever appended at the end

_encode = msgspec.msgpack.Encoder().encode
_plan_head = Struct("<cBqqiiiii").pack
_stream_head = Struct("<cii").pack
_fresh = blake2b(digest_size=DIGEST_BYTES).copy  # a copy costs a third of the constructor


def step_digest(previous: bytes, step: Step) -> bytes:
    """Return the chain value after this Step: BLAKE2b-128 of the previous one and the Step's decisions. 16 bytes."""
    pieces: list[Any] = [previous]  # bytes and arrays, in native layout
    add = pieces.append
    for event in step.decided:
        add(_decided_bytes(event))
    for command in step.commands:
        if type(command) is StreamTokens:
            count, tokens = len(command.offsets), len(command.tokens)
            ids = command.request_ids if count < MANY else command.ids_digest or ids_digest(command.request_ids)
            add(_stream_head(b"s", count, tokens))
            add(ids)
            add(command.offsets)
            if tokens != count:
                add(command.token_counts)
        elif type(command) is LaunchBatch:
            _add_plan(add, command.plan)
            if command.sample == "deferred":
                add(_encode(("deferred", command.plan.sample_after)))
        elif type(command) is SampleBatch:
            moves = [(request_id, epoch, len(tokens)) for request_id, epoch, tokens in command.grammar_advance]
            add(_encode(("sample", command.batch_id, moves)))
        elif type(command) is ProposeBatch:
            where = (command.microbatch,) if command.microbatch else ()
            add(_encode(("propose", command.round, command.counts, command.wish, *where)))
        elif type(command) is CompileGrammar:
            add(_encode(("compile", command.grammar.digest)))
        elif type(command) is ControlAnswered:
            add(_encode(("answer", command.control_id, command.ok)))
        elif type(command) is MeasureExpertLoad:
            add(_encode(("measure experts",)))
        elif type(command) is MoveExperts:
            add(_encode(("move experts", command.move_id, command.layers)))
            add(command.placement)
        elif type(command) is LoadAdapter:
            add(_encode(("load", command.adapter, command.version, command.slot)))
        elif type(command) is StartTransfer:
            about = (command.room, command.direction, command.start_tokens, command.stop_tokens, command.last)
            add(_encode(("transfer", command.transfer_id, command.slot, *about, command.pages.tobytes())))
            if command.hybrid is not None:
                add(_encode(("hybrid", command.hybrid.window_pages.tobytes(), command.hybrid.state_slot)))
        elif type(command) is CancelTransfer:
            add(_encode(("cancel transfer", command.transfer_id)))
        elif type(command) is CopyToHost:
            add(_encode(("write", command.copy_id, command.given_up)))
            add(command.device_pages)
            add(command.host_pages)
            _add_blocks(add, command.blocks)
        elif type(command) is LoadFromHost:
            add(_encode(("from host", command.copy_id)))
            add(command.host_pages)
            add(command.device_pages)
            _add_blocks(add, command.blocks)
        elif type(command) is PrefetchFromStorage:
            add(_encode(("prefetch", command.prefetch_id, *command.keys[-1:])))
            add(command.host_pages)
            for one in command.blocks:
                add(_encode((one.kind, one.seen, one.there, command.reached, *one.keys[-1:])))
                add(one.host)
        elif type(command) is WriteToStorage:
            add(_encode(("store", command.write_id, *command.keys[-1:])))
            add(command.host_pages)
            for stored in command.blocks:
                add(_encode((stored.kind, stored.keys)))
                add(stored.host)
    chain = _fresh()
    chain.update(b"".join(pieces))
    return chain.digest()


def _add_blocks(add: Callable[[Any], None], blocks: tuple[BlockCopy, ...]) -> None:
    for one in blocks:
        add(_encode((one.kind, len(one.device))))
        add(one.device)
        add(one.host)


def _add_plan(add: Callable[[Any], None], plan: BatchPlan) -> None:
    deltas = plan.deltas
    rows, sampling, changes = len(plan.rows), len(plan.sample_rows), len(deltas.pages)
    head = _plan_head(
        b"b",
        MODES[plan.mode],
        plan.batch_id,
        plan.generation,
        plan.microbatch,
        rows,
        plan.extend_rows,
        sampling,
        changes,
    )
    ids = plan.request_ids if rows < MANY else plan.ids_digest or ids_digest(plan.request_ids)
    add(head)
    add(ids)
    add(plan.starts)
    if plan.extend_rows or plan.steps > 1 or plan.speculation is not None:
        add(plan.stops)
    if sampling != rows:
        add(plan.sample_rows)
    if changes:
        add(deltas.runs)
        add(deltas.pages)
    if plan.pooled_rows.size:
        add(b"pooled")
        add(plan.pooled_rows)
    if plan.speculation is not None:
        add(_encode((plan.speculation.method, plan.speculation.draft_tokens, plan.starts_after)))
        add(plan.speculation.draft_lengths)
        if plan.speculation.forced_lengths.size:
            add(b"forced")
            add(plan.speculation.forced_lengths)
        if plan.speculation.parents.size:
            add(b"tree")
            add(plan.speculation.parents)
    if plan.hybrid is not None:
        add(b"hybrid")
        for column in astuple(plan.hybrid):
            add(len(column).to_bytes(4, "little"))
            add(column)
    if plan.ranks is not None:
        add(_encode(plan.ranks.recorded))
    if plan.media_spans or plan.logprob_spans or plan.hidden_spans:
        logprobs = [(span.index, span.start, len(span.targets)) for span in plan.logprob_spans]
        add(_encode((plan.media_spans, logprobs, plan.hidden_spans)))
    if plan.blocks is not None:
        add(b"blocks")
        add(plan.stops)
        add(plan.blocks.numbers)
        add(plan.blocks.given)
    if plan.halves is not None:
        add(_encode(("halves", plan.halves.rows, plan.halves.cut)))
    if plan.layers is not None or plan.sms is not None:
        add(_encode(("multiplexed", plan.layers, plan.sms)))


def ids_digest(request_ids: NDArray[np.int64]) -> bytes:
    """Return the digest that replaces the ids of `MANY` or more requests; b"" for fewer, which are hashed directly."""
    return blake2b(request_ids.data, digest_size=DIGEST_BYTES).digest() if len(request_ids) >= MANY else b""


class _Covered(NamedTuple):
    """What the digest covers of one type of decided event."""

    tag: str | int
    size: int  # fields without the informative ones, which come last
    defaults: tuple[Any, ...]  # defaults of the last ones of these fields, from the last one on


def _covered_of(type_: type[Decided]) -> _Covered:
    informative = DECLARATIONS[type_].informative
    defaults = type_.__struct_defaults__[: -informative or None]
    tag = type_.__struct_config__.tag
    assert tag is not None, "decided events have tags"
    return _Covered(tag, len(type_.__struct_fields__) - informative, defaults[::-1])


_COVERED: dict[type, _Covered] = {}


def _decided_bytes(event: Decided) -> bytes:
    covered = _COVERED.get(type(event))
    if covered is None:
        covered = _COVERED[type(event)] = _covered_of(type(event))
    tag, size, defaults = covered
    values = astuple(event)
    for default in defaults:
        if values[size - 1] != default:
            break
        size -= 1
    return _encode((tag, *values[1:size]))
