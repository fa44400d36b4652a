"""Messages about engine generations, between the launcher, the fork server and the engine itself."""

from __future__ import annotations

import msgspec

from lockstep.host.recovery import Death

MESSAGE_BYTES_MAX = 4096


class ToForkServer(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message from the launcher about one engine generation."""

    generation: int


class Begin(ToForkServer, frozen=True):
    """Fork an engine. `death`: how the previous generation ended, None for the first. `workers`: running workers."""

    death: Death | None
    workers: tuple[int, ...] = ()


class KillEngine(ToForkServer, frozen=True):
    """Kill the engine of this generation."""


class FromForkServer(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message to the launcher about one engine generation."""

    generation: int


class Began(FromForkServer, frozen=True):
    """The engine process was forked and has this process id."""

    pid: int


class EngineExited(FromForkServer, frozen=True):
    """The engine process ended with this exit status; a negative one is the number of a signal."""

    status: int


class Alive(FromForkServer, frozen=True):
    """Sent by an engine that serves, several times a second while it makes progress."""


Command = Begin | KillEngine
Report = Began | EngineExited | Alive

encode = msgspec.msgpack.Encoder().encode
read_command = msgspec.msgpack.Decoder[Command](Command).decode
read_report = msgspec.msgpack.Decoder[Report](Report).decode
