"""Clients that never read their answers: others do not notice them, their memory is bounded, and they are cut off."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.endpoints.protocol import READ_BYTES_MIN, BoundedProtocol
from tests.support.bystander import bystander
from tests.support.live_server import EMULATED, LiveServer, running, serving, until

CLIENTS = 200
MIB = 2**20
GROWTH_MIB_MAX = 1.0 * CLIENTS
"""Bound of what these clients cost the worker while they wait; streams alone cost 2.9 MB each."""
LEFT_MIB_MAX = 60.0
"""Bound of what is left of it afterwards."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    arguments = (*EMULATED, "--speed", "10", "--slow-reader-s", "4", "--shutdown-s", "1")
    with serving(tmp_path_factory.mktemp("slow") / "log", *arguments) as made:
        yield made


def request(*, close: bool = False, **fields: object) -> bytes:
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n" if close else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


WHOLE = {"prompt": list(range(10_000, 16_000)), "max_tokens": 1, "n": 12, "return_token_ids": True}
KINDS = {
    "a stream": request(prompt="a", max_tokens=20_000, ignore_eos=True, stream=True),
    "an answer, after which the connection is to be closed": request(**WHOLE, close=True),
    "several answers, one after another": request(**WHOLE) * 4,
}


def memory_mib(worker: int, what: str) -> float:
    """Resident memory of the worker (VmRSS), or the most since the mark was set (VmHWM)."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{worker}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def silent_client(server: LiveServer, sent: bytes, opened: contextlib.ExitStack) -> socket.socket:
    """A connection with a request whose answer is not read, of which little fits into the client's kernel."""
    host, port = server.url.removeprefix("http://").split(":")
    made = opened.enter_context(socket.socket())
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect((host, int(port)))
    made.sendall(sent)
    return made


def rest_of(connection: socket.socket) -> bytes:
    """All bytes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_clients_that_never_read_cost_little_and_are_cut_off(server: LiveServer) -> None:
    worker = server.children()["worker 0"]
    before_mib = memory_mib(worker, "VmRSS")
    Path(f"/proc/{worker}/clear_refs").write_text("5")  # resets the mark of the highest memory use
    with contextlib.ExitStack() as opened, bystander(server.url) as stream:
        silent = [silent_client(server, sent, opened) for sent in islice(cycle(KINDS.values()), CLIENTS)]
        seen = len(stream.gaps)
        until(lambda: server.text().count("disconnected") >= CLIENTS)
        assert len(stream.gaps) > seen, "the stream of a client that reads went on meanwhile"
        assert memory_mib(worker, "VmHWM") - before_mib < GROWTH_MIB_MAX
        for connection in silent:
            answer = rest_of(connection)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"[DONE]" not in answer
    until(lambda: running(server) == 0)
    until(lambda: memory_mib(worker, "VmRSS") - before_mib < LEFT_MIB_MAX)
    assert "without completing response" not in server.text()


class Unsent:
    """A transport with a number of unsent bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.aborted = size, False

    def get_write_buffer_size(self) -> int:
        return self.size

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("sizes", "aborted"),
    [
        ((MIB, MIB - READ_BYTES_MIN, MIB - 2 * READ_BYTES_MIN, 0), False),
        ((MIB, MIB - READ_BYTES_MIN, MIB - 2 * READ_BYTES_MIN + 1), True),  # a byte too few
        ((100, 100), True),
        ((100, 0), False),
    ],
)
def test_unsent_bytes_are_looked_at_until_they_are_read(sizes: tuple[int, ...], aborted: bool) -> None:
    later: list[Callable[[], object]] = []
    transport = Unsent(sizes[0])
    protocol: Any = BoundedProtocol.__new__(BoundedProtocol)
    protocol.transport = transport
    protocol.flow = SimpleNamespace(write_paused=False)
    protocol.loop = SimpleNamespace(call_later=lambda _seconds, call, *given: later.append(partial(call, *given)))
    protocol._watch_reader()
    for size in sizes[1:]:
        transport.size = size
        later.pop()()
    assert (transport.aborted, later) == (aborted, [])
