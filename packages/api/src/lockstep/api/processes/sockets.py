"""Local sockets of a server: ZeroMQ over ipc, in a fresh folder with mode 0700. A server has no other internal sockets.

    DIR/engine      read by the engine; every process writes
    DIR/worker-N    read by worker N; the engine and the launcher write
    DIR/router      with several engines, read by the router, which writes to `worker-N`; each engine has the other
                    sockets in a folder of its own in DIR

Each socket has one reader and one direction, so the end of a process loses no answer that another process waits for.
The launcher, parent of all processes, reports the end of each.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from lockstep.api.processes.wire import MESSAGE_BYTES_MAX
from lockstep.core.contract.errors import ConfigError

PATH_BYTES_MAX = 100  # of the 107 bytes that Linux allows for the path of a socket, 103 elsewhere
RECONNECT_MS = 5  # first interval between attempts to connect to a reader that has not started yet
MESSAGES_MAX = 10_000  # unread messages kept for a reader; about one per step of an engine
READ_AT_ONCE = 16  # messages that an event loop handles before other tasks get their turn


def fresh_folder() -> Path:
    """Create a folder with mode 0700. Raises ConfigError if the path of the system's temporary folder is too long."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
    if len(bytes(engine_folder(folder, 999, 1000) / "worker-9999")) > PATH_BYTES_MAX:
        folder.rmdir()
        raise ConfigError(f"the path `{folder}` is too long for local sockets\nhint: set TMPDIR to a shorter path")
    return folder


def engine_folder(folder: Path, engine: int, engines: int) -> Path:
    """Return the folder of an engine's sockets. Its name is unique among servers and recorded in journals: `Claims`."""
    return folder if engines == 1 else folder / f"{folder.name.removeprefix('lockstep-')}-{engine}"


def router_address(folder: Path) -> str:
    """Return the address that the router reads."""
    return f"ipc://{folder / 'router'}"


def engine_address(folder: Path) -> str:
    """Return the address that the engine reads."""
    return f"ipc://{folder / 'engine'}"


def worker_address(folder: Path, worker: int) -> str:
    """Return the address that a worker reads."""
    return f"ipc://{folder / f'worker-{worker}'}"


def writer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a socket that writes to an address; its reader may start later. Unread messages are bounded in number."""
    socket = context.socket(zmq.SocketType.PUSH)
    socket.set(zmq.SocketOption.SNDHWM, MESSAGES_MAX)
    socket.set(zmq.SocketOption.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.SocketOption.RECONNECT_IVL_MAX, 16 * RECONNECT_MS)
    socket.set(zmq.SocketOption.LINGER, 500)
    socket.connect(address)
    return socket


def reader(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a socket that reads from this address and creates it."""
    socket = context.socket(zmq.SocketType.PULL)
    socket.set(zmq.SocketOption.RCVHWM, MESSAGES_MAX)
    socket.set(zmq.SocketOption.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.set(zmq.SocketOption.LINGER, 0)
    socket.bind(address)
    return socket


async def read_all(socket: zmq.Socket[bytes], handle: Callable[[bytes], object]) -> None:
    """Pass every message of a reading socket to `handle`, in the event loop, until cancelled.

    The socket of `zmq.asyncio` takes about 30 us for each message, most of it for a future and two options.
    Raises: what `handle` raises.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        for _ in range(READ_AT_ONCE):
            if over.done():
                return
            try:
                frame = socket.recv(zmq.Flag.DONTWAIT)
            except zmq.Again:  # the descriptor reports the next message
                return
            try:
                handle(frame)
            except Exception as error:
                over.set_exception(error)
        loop.call_soon(read)  # the descriptor does not report messages that have arrived already

    descriptor = socket.get(zmq.SocketOption.FD)
    assert isinstance(descriptor, int)
    loop.add_reader(descriptor, read)
    try:
        loop.call_soon(read)
        await over
    finally:
        loop.remove_reader(descriptor)
