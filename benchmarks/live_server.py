"""`lockstep serve` in a process of its own, for benchmarks that are its clients."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

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
