"""Local sockets of a server: ZeroMQ over ipc, in a fresh folder with mode 0700. A server has no other internal sockets.

    DIR/engine      read by the engine; every process writes
    DIR/worker-N    read by worker N; the engine and the launcher write
    DIR/router      with several engines, read by the router, which writes to `worker-N`; each engine has the other
                    sockets in a folder of its own in DIR

Each socket has one reader and one direction, so the end of a process loses no answer that another process waits for.
The launcher, parent of all processes, reports the end of each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import zmq

from lockstep.api.processes.wire import MESSAGE_BYTES_MAX
from lockstep.core.contract.errors import ConfigError

PATH_BYTES_MAX = 100  # of the 107 bytes that Linux allows for the path of a socket, 103 elsewhere
RECONNECT_MS = 5  # first interval between attempts to reach a reader that is not there yet
MESSAGES_MAX = 10_000  # kept for a reader that does not read; about as many steps of an engine


def fresh_folder() -> Path:
    """A new folder with mode 0700. Raises ConfigError if the path of the system's temporary folder is too long."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
    if len(bytes(engine_folder(folder, 999, 1000) / "worker-9999")) > PATH_BYTES_MAX:
        folder.rmdir()
        raise ConfigError(f"`{folder}` is too long a path for local sockets\nhint: set TMPDIR to a short one")
    return folder


def engine_folder(folder: Path, engine: int, engines: int) -> Path:
    """The folder of an engine's sockets. Its name is unique among servers and stands in the journal: see `Claims`."""
    return folder if engines == 1 else folder / f"{folder.name.removeprefix('lockstep-')}-{engine}"


def router_address(folder: Path) -> str:
    """The address that the router reads."""
    return f"ipc://{folder / 'router'}"


def engine_address(folder: Path) -> str:
    """The address that the engine reads."""
    return f"ipc://{folder / 'engine'}"


def worker_address(folder: Path, worker: int) -> str:
    """The address that a worker reads."""
    return f"ipc://{folder / f'worker-{worker}'}"


def reader_options(socket: zmq.Socket[Any]) -> None:
    """Set the limits of a socket to read from: number of waiting messages and bytes of one message."""
    socket.set(zmq.SocketOption.RCVHWM, MESSAGES_MAX)
    socket.set(zmq.SocketOption.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.set(zmq.SocketOption.LINGER, 0)


def writer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket that writes to an address; its reader may appear later. The number of unread messages is bounded."""
    socket = context.socket(zmq.SocketType.PUSH)
    socket.set(zmq.SocketOption.SNDHWM, MESSAGES_MAX)
    socket.set(zmq.SocketOption.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.SocketOption.RECONNECT_IVL_MAX, 16 * RECONNECT_MS)
    socket.set(zmq.SocketOption.LINGER, 500)
    socket.connect(address)
    return socket


def reader(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket that reads from this address and creates it."""
    socket = context.socket(zmq.SocketType.PULL)
    reader_options(socket)
    socket.bind(address)
    return socket
