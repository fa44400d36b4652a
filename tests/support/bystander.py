"""A client that reads a stream while others attack, and measures how long its tokens are delayed."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

SLEEPER = """
import sys, time
while True:
    began = time.monotonic()
    time.sleep(0.005)
    late = time.monotonic() - began - 0.005
    if late > 0.005:
        print(began + 0.005, late, flush=True)
"""


class Sleeper:
    """A process that only sleeps, and reports how late it is woken: what the machine does to a process by itself."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
        self._late: list[tuple[float, float]] = []  # (when it was to be woken, seconds late), time.monotonic
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            due, late = map(float, line.split())
            self._late.append((due, late))

    def worst_s(self, since_s: float) -> float:
        """Return the longest delay since a time; 0 for none above 5 ms."""
        return max((late for due, late in list(self._late) if due >= since_s), default=0.0)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Bystander:
    """Streams of one prompt after another, until closed. Each gap is the time between two reads with tokens."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        self._address = urlsplit(url).netloc
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._body = json.dumps(
            {"prompt": "bystander", "max_tokens": 4000, "ignore_eos": True, "stream": True} | fields
        )
        self.gaps: list[tuple[float, float]] = []  # (when it ended, seconds), time.monotonic
        self.failure = ""
        self.began = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while not self._over.is_set():
                self._stream()
        except Exception as error:  # reported by `close`
            self.failure = f"{type(error).__name__}: {error}"
            self.began.set()

    def _stream(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", self._body, self._headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()[:300]
            last = None
            while (line := answer.readline()) and not self._over.is_set():
                if not line.startswith(b"data: {"):
                    continue
                assert not line.startswith(b'data: {"error"'), line[:300]
                now = time.monotonic()
                if last is not None:
                    self.gaps.append((now, now - last))
                    self.began.set()
                last = now

    def worst_s(self, since_s: float = 0.0) -> float:
        """Return the longest gap that began after a time."""
        return max((gap for ended, gap in list(self.gaps) if ended - gap >= since_s), default=0.0)

    def close(self) -> None:
        """End the stream. Raises AssertionError if it failed."""
        self._over.set()
        self._thread.join(60)
        assert not self.failure, self.failure


@contextlib.contextmanager
def bystander(url: str, headers: dict[str, str] | None = None, **fields: Any) -> Iterator[Bystander]:
    """A stream that is being read, and must not fail."""
    made = Bystander(url, headers, **fields)
    assert made.began.wait(60), "the stream did not begin"
    try:
        yield made
    finally:
        made.close()
