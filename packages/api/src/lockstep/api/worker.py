"""An API worker: HTTP, tokenisation, text. `python -m lockstep.api.worker FOLDER NUMBER LISTENER [ADMIN]`.

LISTENER and ADMIN are file descriptors of sockets that the launcher opened, so a worker that comes later listens where
the one before did, and nothing is lost in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from lockstep.api import children
from lockstep.api.app import ADMIN_ROUTES, make_app
from lockstep.api.bridge import Bridge
from lockstep.api.cluster_bridge import ClusterBridge, Engines
from lockstep.api.engines import text_of
from lockstep.api.keys import read_keys
from lockstep.api.metrics import Metrics
from lockstep.api.protocol import bounded_by
from lockstep.api.server import Server
from lockstep.api.settings import ServeSettings
from lockstep.api.spans import Spans
from lockstep.api.usage import Usage
from lockstep.core.errors import LockstepError

log = logging.getLogger("lockstep.worker")


class HttpServer(uvicorn.Server):
    """uvicorn, without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The worker decides when to stop."""
        yield


async def serve(settings: ServeSettings, folder: Path, number: int, listener: int, admin: int | None) -> None:
    """Serve until SIGTERM. Raises WireError."""
    text = text_of(settings)
    keys = read_keys(Path(settings.api_keys)) if settings.api_keys is not None else None
    bridge: Engines = Bridge(folder, number)
    if settings.dp > 1:
        bridge = ClusterBridge(
            folder, number, settings.dp, settings.router_config(), tenants_apart=settings.tenants_apart
        )
    usage = (
        None if keys is None else Usage(folder / "usage" if settings.usage_dir is None else Path(settings.usage_dir))
    )
    server = Server(settings, bridge, text, keys, Metrics(settings.metrics_compat), usage)
    server.told.append(lambda: children.say_ready(folder, number))
    log.info("calls of tools are read as %s, thoughts as %s", *server.formats.names())
    spans = None if settings.otlp_endpoint is None else Spans(settings.otlp_endpoint, lambda: server.models()[0])
    if spans is not None:
        server.watchers.append(spans.add)
    servers = [(_http(make_app(server), settings), socket.socket(fileno=listener))]
    if admin is not None:
        servers.append((_http(make_app(server, ADMIN_ROUTES), settings), socket.socket(fileno=admin)))

    def stop() -> None:
        server.draining = True
        for one, _ in servers:
            one.should_exit = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    reading = asyncio.create_task(bridge.run())
    serving = asyncio.gather(*(one.serve(sockets=[at]) for one, at in servers))
    try:
        await asyncio.wait((reading, serving), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():  # of itself it never ends
            stop()
            reading.result()
    finally:
        await serving
        reading.cancel()
        bridge.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)


def _http(app: Any, settings: ServeSettings) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            http=bounded_by(settings.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(settings.shutdown_s),
        )
    )


def main(arguments: list[str]) -> int:
    """Serve as one worker. Returns the exit status."""
    folder, number = Path(arguments[0]), int(arguments[1])
    descriptors = [int(one) for one in arguments[2:]]
    settings = children.begin(folder, f"worker {number}")
    try:
        asyncio.run(serve(settings, folder, number, descriptors[0], descriptors[1] if len(descriptors) > 1 else None))
    except LockstepError as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
