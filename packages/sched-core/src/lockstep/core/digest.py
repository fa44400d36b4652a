"""The digest of a Step: a chain over logical decisions, equal wherever the same journal is folded.

Covered: every decided event (without its time), every launched plan (rows, spans, page-table changes, sampling rows)
and which output numbers were streamed to whom. Not covered: token ids, which are observed, and how anything is encoded
on disk or wire. A field added to a decided event later leaves old digests alone as long as it holds its default.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

import msgspec

from lockstep.core.commands import BatchPlan, ControlAnswered, LaunchBatch, Step, StreamTokens
from lockstep.core.events import Decided

DIGEST_BYTES = 16
EMPTY_DIGEST = bytes(DIGEST_BYTES)

_encode = msgspec.msgpack.Encoder().encode
_plan_head = Struct("<cqqiiiii").pack
_stream_head = Struct("<ci").pack


def step_digest(previous: bytes, step: Step) -> bytes:
    """The chain value after this Step: BLAKE2b-128 of the one before and the Step's decisions. 16 bytes."""
    parts = [previous]
    for event in step.decided:
        parts.append(_decided_bytes(event))
    for command in step.commands:
        if isinstance(command, StreamTokens):
            parts.append(_stream_head(b"s", len(command.offsets)))
            parts.append(command.request_ids.tobytes())
            parts.append(command.offsets.tobytes())
            parts.append(command.token_counts.tobytes())
        elif isinstance(command, LaunchBatch):
            _add_plan(parts, command.plan)
        elif isinstance(command, ControlAnswered):
            parts.append(_encode(("answer", command.control_id, command.ok)))
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def _add_plan(parts: list[bytes], plan: BatchPlan) -> None:
    deltas = plan.deltas
    parts.append(
        _plan_head(
            b"b",
            plan.batch_id,
            plan.generation,
            plan.microbatch,
            len(plan.rows),
            plan.extend_rows,
            len(plan.sample_rows),
            len(deltas.rows),
        )
    )
    parts.append(plan.mode.encode())
    parts.append(plan.rows.tobytes())
    parts.append(plan.request_ids.tobytes())
    parts.append(plan.starts.tobytes())
    parts.append(plan.stops.tobytes())
    if len(plan.sample_rows) != len(plan.rows):
        parts.append(plan.sample_rows.tobytes())
    if len(deltas.rows):
        parts.append(deltas.rows.tobytes())
        parts.append(deltas.index.tobytes())
        parts.append(deltas.pages.tobytes())


def _decided_bytes(event: Decided) -> bytes:
    values = list(msgspec.structs.astuple(event))
    defaults = event.__struct_defaults__
    required = len(values) - len(defaults)
    while len(values) > required and values[-1] == defaults[len(values) - required - 1]:
        values.pop()
    return _encode((type(event).__name__, *values[1:]))
