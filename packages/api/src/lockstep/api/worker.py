"""An API worker: HTTP, tokenisation, text. `python -m lockstep.api.worker FOLDER NUMBER LISTENER [ADMIN]`.

LISTENER and ADMIN are file descriptors of sockets that the launcher opened. A worker that replaces another listens on
the same sockets, so no connection is lost in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import uvicorn

from lockstep.api.endpoints.app import ADMIN_ROUTES, batched_routes, keeping_routes, make_app
from lockstep.api.endpoints.batch_run import continue_batches
from lockstep.api.endpoints.kept_answers import KeptAnswers
from lockstep.api.endpoints.keys import read_keys
from lockstep.api.endpoints.protocol import bounded_by
from lockstep.api.endpoints.resumable import continue_answers
from lockstep.api.endpoints.server import Server
from lockstep.api.endpoints.stored_conversations import StoredConversations
from lockstep.api.endpoints.stored_files import StoredFiles
from lockstep.api.endpoints.stored_responses import StoredResponses
from lockstep.api.endpoints.usage import UsageCounter
from lockstep.api.engines import text_of
from lockstep.api.observability.metrics import Metrics
from lockstep.api.observability.spans import SpanExporter
from lockstep.api.processes import children
from lockstep.api.processes.bridge import Bridge
from lockstep.api.processes.cluster_bridge import ClusterBridge, Engines
from lockstep.api.processes.text_processes import TextProcesses
from lockstep.api.settings import ServeSettings
from lockstep.core.contract.errors import LockstepError

log = logging.getLogger("lockstep.worker")

STOPS = "the server stops"
CONTINUED_S = 10.0
"""Longest wait for the requests of answers in progress, which an earlier worker began, to reach the engine."""
GARBAGE_THRESHOLDS = 20_000, 20, 20
"""Collections of the worker's garbage: a burst of requests allocates much, and leaves few cycles."""

TIDY_S = 2.0
SHARED_S = 0.25  # within which other workers serve the figures of a worker
LAST_ERRORS_S = 2  # seconds after `shutdown_s` in which the last error messages reach clients


async def tidy(bridge: Engines, processes: TextProcesses, seconds: float = TIDY_S) -> None:
    """Give memory back after answers and large bodies, whenever no answer is open: Python and libc keep what is freed.

    Args:
        seconds: between two looks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    used, jobs = False, 0
    while True:
        await asyncio.sleep(seconds)
        used |= bool(bridge.open_answers) or processes.jobs != jobs
        if used and not bridge.open_answers:
            used, jobs = False, processes.jobs
            gc.collect()
            if trim is not None:
                trim(0)


async def share(metrics: Metrics, seconds: float = SHARED_S) -> None:
    """Add the figures of this worker to those that other workers read, every few moments."""
    while True:
        await asyncio.sleep(seconds)
        metrics.add_collected()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing: `serve` handles SIGTERM itself."""
        yield


async def serve(settings: ServeSettings, folder: Path, number: int, listener: int, admin: int | None) -> None:
    """Serve until SIGTERM. Raises WireError."""
    text = text_of(settings)
    keys = read_keys(Path(settings.api_keys)) if settings.api_keys is not None else None
    bridge: Engines = Bridge(folder, number)
    if settings.engines > 1:
        bridge = ClusterBridge(
            *(folder, number, settings.engines, settings.router_config()),
            tenants_apart=settings.tenants_apart,
            admission=settings.admission_config(),
            hands_over=settings.hands_over,
        )
    usage = (
        None
        if keys is None
        else UsageCounter(folder / "usage" if settings.usage_dir is None else Path(settings.usage_dir))
    )
    limits, most = settings.limits, settings.stored_responses
    answers_folder = settings.answers_folder(folder)
    answers_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    responses = None
    bytes_max, kept_s = limits.responses_bytes_max, limits.response_kept_s
    if most:
        responses = StoredResponses(answers_folder, most=most, bytes_max=bytes_max, kept_s=kept_s)
    conversations = None
    if most:
        conversations = StoredConversations(answers_folder, most=most, bytes_max=bytes_max, kept_s=kept_s)
    answers = None
    if settings.kept_answers:
        answers = KeptAnswers(
            answers_folder / "kept",
            most=settings.kept_answers,
            bytes_max=limits.kept_bytes_max,
            kept_s=limits.kept_s,
        )
    files = None
    if settings.stored_files:
        files = StoredFiles(
            answers_folder / "files",
            most=settings.stored_files,
            bytes_max=limits.files_bytes_max,
            kept_s=limits.file_kept_s,
        )
    processes = TextProcesses(folder, settings.text_processes)
    server = Server(
        *(settings, bridge, text, keys, Metrics(settings.metrics_compat), processes, usage),
        responses=responses,
        answers=answers,
        conversations=conversations,
        files=files,
        batched=batched_routes(),
    )
    server.on_ready.append(lambda: children.mark_ready(folder, number))
    log.info("tool calls are read as %s, thoughts as %s", *server.formats.names())
    spans = None if settings.otlp_endpoint is None else SpanExporter(settings.otlp_endpoint, lambda: server.models()[0])
    if spans is not None:
        server.watchers.append(spans.add)
    servers = [(_http(make_app(server), settings), socket.socket(fileno=listener))]
    if admin is not None:
        servers.append((_http(make_app(server, ADMIN_ROUTES), settings), socket.socket(fileno=admin)))

    loop = asyncio.get_running_loop()
    if answers is not None:
        bridge.hold_settled()
        continuing: set[asyncio.Task[None]] = set()

        async def go_on() -> None:
            try:
                await continue_answers(server, keeping_routes(), CONTINUED_S)
            finally:
                bridge.settle()

        server.on_ready.append(lambda: continuing.add(asyncio.ensure_future(go_on())))

    if files is not None:
        server.on_ready.append(lambda: continue_batches(server))

    draining: list[asyncio.Task[None]] = []  # kept, since the loop itself keeps no task

    async def drain() -> None:
        """Answer the open requests, then stop. New connections are accepted until then, and refused by status.

        Kept answers without a reader are not waited for: the next server continues them.
        """
        open_tasks = {task for one, _ in servers for task in one.server_state.tasks} | server.background
        if open_tasks:
            await asyncio.wait(open_tasks, timeout=settings.shutdown_s)
        bridge.end_all(STOPS)
        if answers is not None:
            answers.send_readers_away()
        for one, _ in servers:
            one.should_exit = True

    def stop() -> None:
        if not server.draining:
            server.draining = True
            draining.append(loop.create_task(drain()))

    loop.add_signal_handler(signal.SIGTERM, stop)
    reading = asyncio.create_task(bridge.run())
    beside = [asyncio.create_task(tidy(bridge, processes))]
    if settings.api_workers > 1:
        beside.append(asyncio.create_task(share(server.metrics)))
    serving = asyncio.gather(*(one.serve(sockets=[at]) for one, at in servers))
    try:
        await asyncio.wait((reading, serving), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():  # `bridge.run` ends only with an exception
            stop()
            reading.result()
    finally:
        await serving
        left = [task for one, _ in servers for task in one.server_state.tasks] + list(server.background)
        left += [*server.kept_runs, *server.batch_runs]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        reading.cancel()
        for task in beside:
            task.cancel()
        server.metrics.add_collected()
        bridge.close()
        await processes.close()
        for one in (responses, conversations):
            if one is not None:
                one.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)


def _http(app: Any, settings: ServeSettings) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            http=bounded_by(settings.limits, settings.slow_reader_s),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # no address of a client is used
            server_header=False,
            timeout_graceful_shutdown=ceil(settings.shutdown_s) + LAST_ERRORS_S,
        )
    )


def main(arguments: list[str]) -> int:
    """Run one worker until SIGTERM. Returns the exit status."""
    folder, number = Path(arguments[0]), int(arguments[1])
    descriptors = [int(one) for one in arguments[2:]]
    gc.collect()
    gc.freeze()  # modules and classes live until the end
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    settings = children.begin(folder, f"worker {number}")
    try:
        asyncio.run(serve(settings, folder, number, descriptors[0], descriptors[1] if len(descriptors) > 1 else None))
    except LockstepError as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    finally:
        gc.freeze()  # the process ends; a last collection would be wasted time
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
