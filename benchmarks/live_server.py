"""`lockstep serve` in a process of its own, for benchmarks that are its clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

RUN = "import sys; from lockstep.core.command import main; sys.exit(main(sys.argv[1:]))"
READY_S = 120.0


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server on a port of its own, ready: its address and process id. `arguments` are those of `lockstep serve`."""
    command = [sys.executable, "-c", RUN, "serve", "--port", "0", "--log-level", "warning", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving at (http://\S+)\n", line)
        if found is None:
            raise SystemExit(f"no server: {line!r}")
        wait_ready(found[1])
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_ready(url: str) -> None:
    """Return once a server takes requests."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/ready", timeout=5):
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not get ready")


class OtherPrograms:
    """A context that measures how many cores programs other than this one and its children use: `cores`."""

    def __enter__(self) -> OtherPrograms:
        self.cores = 0.0
        self._began_s, self._used_s = time.monotonic(), _used_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cores = max(0.0, _used_s() - self._used_s) / (time.monotonic() - self._began_s)


def _used_s() -> float:
    """CPU seconds so far of all programs but this one and its children. The children must not end meanwhile."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    parents, used = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    own = 0
    for pid, ticks in used.items():
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        own += ticks if pid else 0
    return (user + nice + system + sum(interrupts) - own) / tick
