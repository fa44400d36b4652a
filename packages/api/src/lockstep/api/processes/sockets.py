"""Local sockets of a server: ZeroMQ over ipc, in a fresh folder that nobody else can enter. There are no others.

    DIR/engine      the engine reads here, everybody writes
    DIR/worker-N    worker N reads here; the engine and the launcher write

    DIR/router      with several engines, the router reads here, and `worker-N` is where it answers; each engine has the
                    others in a folder of its own in DIR

Each has one reader and goes one way, so a process that ends takes no answer with it that somebody waits for: who is
gone is said by the launcher, which is the parent of all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import zmq

from lockstep.api.processes.wire import MESSAGE_BYTES_MAX
from lockstep.core.contract.errors import ConfigError

PATH_BYTES_MAX = 100  # of the 107 that Linux has for the name of a socket, 103 elsewhere
RECONNECT_MS = 5  # at first, to a reader that is not there yet
MESSAGES_MAX = 10_000  # kept for a reader that does not read; steps of an engine


def fresh_folder() -> Path:
    """A new folder with mode 0700. Raises ConfigError where the system's folder for such is too deep for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
    if len(bytes(engine_folder(folder, 999, 1000) / "worker-9999")) > PATH_BYTES_MAX:
        folder.rmdir()
        raise ConfigError(f"`{folder}` is too long a path for local sockets\nhint: set TMPDIR to a short one")
    return folder


def engine_folder(folder: Path, engine: int, engines: int) -> Path:
    """The folder of an engine's sockets. No other server's has its name, which is in the journal: `Claims`."""
    return folder if engines == 1 else folder / f"{folder.name.removeprefix('lockstep-')}-{engine}"


def router_address(folder: Path) -> str:
    """Where the router reads."""
    return f"ipc://{folder / 'router'}"


def engine_address(folder: Path) -> str:
    """Where the engine reads."""
    return f"ipc://{folder / 'engine'}"


def worker_address(folder: Path, worker: int) -> str:
    """Where a worker reads."""
    return f"ipc://{folder / f'worker-{worker}'}"


def reader_options(socket: zmq.Socket[Any]) -> None:
    """For a socket to read from: how many messages wait there, and how large one can be."""
    socket.set(zmq.SocketOption.RCVHWM, MESSAGES_MAX)
    socket.set(zmq.SocketOption.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.set(zmq.SocketOption.LINGER, 0)


def writer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket to write to an address, which may come to be there later. What is not read is bounded."""
    socket = context.socket(zmq.SocketType.PUSH)
    socket.set(zmq.SocketOption.SNDHWM, MESSAGES_MAX)
    socket.set(zmq.SocketOption.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.SocketOption.RECONNECT_IVL_MAX, 16 * RECONNECT_MS)
    socket.set(zmq.SocketOption.LINGER, 500)
    socket.connect(address)
    return socket


def reader(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket to read from, made at this address."""
    socket = context.socket(zmq.SocketType.PULL)
    reader_options(socket)
    socket.bind(address)
    return socket
