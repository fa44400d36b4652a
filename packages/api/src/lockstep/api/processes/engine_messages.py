"""What is said of the engine's lives, between the launcher, the nursery that forks engines, and the engine itself."""

from __future__ import annotations

import msgspec

from lockstep.host.recovery import Death

MESSAGE_BYTES_MAX = 4096


class ToForkServer(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """From the launcher, about one life of the engine."""

    generation: int


class Begin(ToForkServer, frozen=True):
    """Fork an engine. `death` is how the one before ended, if there was one; `workers` are those that there are."""

    death: Death | None
    workers: tuple[int, ...] = ()


class KillEngine(ToForkServer, frozen=True):
    """Kill it."""


class FromForkServer(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """To the launcher, about one life of the engine."""

    generation: int


class Began(FromForkServer, frozen=True):
    """It runs."""

    pid: int


class EngineExited(FromForkServer, frozen=True):
    """It ended; negative: by this signal."""

    status: int


class Alive(FromForkServer, frozen=True):
    """From an engine that serves, several times a second while it gets on with what it has to do."""


Command = Begin | KillEngine
Report = Began | EngineExited | Alive

encode = msgspec.msgpack.Encoder().encode
read_command = msgspec.msgpack.Decoder[Command](Command).decode
read_report = msgspec.msgpack.Decoder[Report](Report).decode
