"""Snapshots: the whole state of an engine as bytes, so that recovery need not fold a journal from its first event.

`restore(dump(engine))` behaves exactly like `engine`, including page ids, and dumps to the same bytes. A snapshot is
used only if its digest equals the one that the journal recorded for the same event.
"""

from __future__ import annotations

import msgspec

from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.image import EngineImage, SchedulerPart, part_of

SNAPSHOT_FORMAT = 1

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(EngineImage).decode


class _HostPart(msgspec.Struct):
    """The field of a snapshot that belongs to its host."""

    host: bytes = b""


def host_part(data: bytes) -> bytes:
    """Return the bytes that the host passed to `dump`. Raises ValueError for bytes that are no snapshot."""
    try:
        return msgspec.msgpack.decode(data, type=_HostPart).host
    except msgspec.DecodeError as error:
        raise ValueError(f"not a snapshot of an engine: {error}") from error


def dump(engine: Engine, host: bytes = b"") -> bytes:
    """Return a snapshot of the engine's state between two steps, with the bytes `host` of its host."""
    return _encode(engine.image(SNAPSHOT_FORMAT, host))


def restore(data: bytes) -> Engine:
    """Return the engine of a snapshot. Raises ValueError for bytes that are no snapshot of this format."""
    try:
        image = _decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a snapshot of an engine: {error}") from error
    own = part_of(image, SchedulerPart)
    if own.format != SNAPSHOT_FORMAT:
        raise ValueError(f"snapshot format {own.format}, this version reads {SNAPSHOT_FORMAT}")
    engine = Engine(own.config)
    engine.load(image)
    return engine
