"""`lockstep serve` as a process of its own, for as long as a test needs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUN = "import sys; from lockstep.core.command import main; sys.exit(main(sys.argv[1:]))"
EMULATED = ("--emulate", "qwen3-0.6b@h200")
RUN_SERVE = (sys.executable, "-c", RUN, "serve", "--port", "0")
START_S = 240.0
END_S = 120.0
FORK_SERVER = "lockstep.api.processes.fork_server"


class LiveServer:
    """A server on a free port of loopback.

    Args:
        arguments: of `lockstep serve`, without the port.
        log: a file for its log.
    """

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*RUN_SERVE, *arguments],
                stdout=subprocess.PIPE,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline().decode()
        watchdog.cancel()
        found = re.fullmatch(r"serving at (http://\S+)\n", line)
        if found is None:
            self.process.kill()
            self.process.wait(END_S)
            self.process.stdout.close()
            raise AssertionError(f"no server: {line!r}\n{self.text()}")
        self.url = found[1]

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text("utf-8", "replace")

    def status_of(self, path: str) -> int:
        """Return the status of a GET of this path; 0 without a response."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def children(self) -> dict[str, int]:
        """Process ids by name: `fork_server`, `engine`, `worker 0`, ...; with several engines `engine 1`, ..."""
        return children_of(self.process.pid)

    def folder(self) -> Path:
        """The launcher's folder, with the sockets of the engine if there is one; several have folders below it.

        Raises: LookupError without a process of an engine.
        """
        for parent, words in processes().values():
            if parent == self.process.pid and FORK_SERVER in words:
                folder = Path(words[words.index(FORK_SERVER) + 1])
                return folder.parent if is_one_of_several(folder) else folder
        raise LookupError("the server has no process of an engine")

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to end the server, and return its exit status."""
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
        try:
            return self.process.wait(END_S)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()


def is_one_of_several(folder: Path) -> bool:
    """Whether a folder is of one of several engines, below that of their launcher."""
    return folder.parent.name.startswith("lockstep-")


def children_of(launcher: int) -> dict[str, int]:
    """Process ids of the children of a launcher, by name."""
    found = {}
    table = processes()
    for pid, (parent, words) in table.items():
        if parent == launcher and FORK_SERVER in words:
            at = words.index(FORK_SERVER)
            number = f" {words[at + 3]}" if is_one_of_several(Path(words[at + 1])) else ""
            found[f"fork_server{number}"] = pid
            for child in (child for child, (grown, _) in table.items() if grown == pid):
                found[f"engine{number}"] = child
        if parent == launcher and "lockstep.api.worker" in words:
            found[f"worker {words[words.index('lockstep.api.worker') + 2]}"] = pid
    return found


def launcher_of_journal(journal: Path | str) -> int:
    """Return the process id of the server with this journal, which may be starting; 0 for none."""
    known = processes()
    return next((pid for pid, (_, words) in known.items() if str(journal) in words and "serve" in words), 0)


def children_of_journal(journal: Path | str) -> dict[str, int]:
    """Process ids by name of the children of the server with this journal, which may be starting."""
    launcher = launcher_of_journal(journal)
    return children_of(launcher) if launcher else {}


def processes() -> dict[int, tuple[int, list[str]]]:
    """All processes: their parents, and the words with which they were started."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != "Z":
                found[int(folder.name)] = (int(parent), words)
    return found


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[LiveServer]:
    """A server that takes requests, and is ended afterwards."""
    server = LiveServer(*arguments, log=log)
    try:
        assert server.status_of("/ready") == 200, f"it said that it serves, and does not\n{server.text()}"
        yield server
    finally:
        server.end()


def metric(server: LiveServer, name: str) -> float:
    """A figure of /metrics, over all labels. `name` may be a regular expression."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{| |\}})", line))


def running(server: LiveServer) -> float:
    """Return the number of requests that the engine reports as running."""
    return metric(server, "lockstep_num_requests_running")


def ask_operator(path: Path, where: str, key: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer of a POST to the operator's socket."""
    sent = b"" if body is None else json.dumps(body).encode()
    about = f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n" if sent else ""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(120)
        connection.connect(str(path))
        head = f"POST {where} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{about}\r\n"
        connection.sendall(head.encode() + sent)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    status, _, answer = raw.partition(b"\r\n\r\n")
    return int(status.split()[1]), json.loads(answer)


def until(true: object, seconds: float = 120.0) -> None:
    """Wait until a function returns True. Raises: AssertionError after `seconds`."""
    assert callable(true)
    ends_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends_s, f"not within {seconds} s"
        time.sleep(0.02)
