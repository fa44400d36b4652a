"""The whole state of an engine as bytes, so that recovery need not fold a journal from its first event.

`restore(dump(engine))` behaves as `engine` does, to the last page id, and dumps to the same bytes. A snapshot is
trusted only beside the digest that the journal recorded for the same event.
"""

from __future__ import annotations

import msgspec

from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.image import EngineImage, SchedulerPart, part_of

SNAPSHOT_FORMAT = 1

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
    """The engine's state between two steps, and beside it whatever its host stores."""
    return _encode(engine.image(SNAPSHOT_FORMAT, host))


def restore(data: bytes) -> Engine:
    """The engine that `dump` described. Raises ValueError for bytes that are no snapshot of this format."""
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
