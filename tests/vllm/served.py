"""A vLLM server of the demo model under Lockstep's scheduler, in processes of its own, for tests that break it.

with serving(tmp_path, {"journal": str(tmp_path / "run")}) as server:
    server.stream("one", max_tokens=400)
    server.engine().kill()
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.vllm.support import DEMO, ROOT

START_S = 240.0  # the most that a start may take
PACKAGES = ("packages/sched-core", "packages/sim", "packages/vllm-scheduler", "tools")


class Server:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"
        self.streamed: dict[str, int] = {}  # messages with text that each stream had
        self._threads: list[threading.Thread] = []

    def stream(self, name: str, **fields: Any) -> None:
        """Begin a streamed completion under this name, on a thread of its own."""
        self.streamed[name] = 0
        thread = threading.Thread(target=self._stream, args=(name, fields), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _stream(self, name: str, fields: Mapping[str, Any]) -> None:
        body = {"model": "demo", "prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "temperature": 0, **fields}
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with suppress(OSError, urllib.error.HTTPError), urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {") and b'"text"' in line:
                    self.streamed[name] += 1

    def join(self, seconds: float = 120.0) -> None:
        """Wait until every stream has ended. Raises AssertionError if one has not in time."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), f"a stream has not ended within {seconds:.0f} s"

    def engine(self) -> Any:
        """Return the process of the engine core, a psutil.Process."""
        import psutil

        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "EngineCore" in "".join(child.cmdline()):
                return child
        raise AssertionError(f"no engine core: {self.text()}")

    def text(self) -> str:
        """Return what the server has logged."""
        return self.log.read_text("utf-8", "replace")

    def get(self, path: str) -> bytes:
        """Return the content of a route."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            content: bytes = answer.read()
        return content


def await_that(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until a condition holds. Raises AssertionError if it does not in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


@contextmanager
def serving(folder: Path, settings: Mapping[str, Any], *options: str) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop it at the end.

    Args:
        folder: gets server.log; modules in it can be imported by the server.
        settings: of Lockstep.
        options: further options of the server.
    Raises: AssertionError with the log if it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO), "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--block-size", "32",
        "--scheduler-cls", "lockstep.vllm.Scheduler", "--additional-config", json.dumps({"lockstep": dict(settings)}),
        *options,
    ]  # fmt: skip
    paths = [*(str(ROOT / package / "src") for package in PACKAGES), str(folder)]
    own = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=file)
    server = Server(process, port, log)
    try:
        until = time.monotonic() + START_S
        while True:
            assert process.poll() is None, server.text()[-6000:]
            with suppress(OSError):
                server.get("/health")
                break
            assert time.monotonic() < until, server.text()[-6000:]
            time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
