"""Slow connections, and too many connections: refused with an error, without effect on others."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from tests.support.live_server import EMULATED, LiveServer, running, serving, until

LIMITS = """
[limits]
connections_max = 12
head_s = 1.5
body_s = 0.6
waiting_tokens_max = 5000
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("connections")
    (folder / "serve.toml").write_text(LIMITS)
    more = ("--config", str(folder / "serve.toml"), "--shutdown-s", "0", "--set", "max_running_requests=2")
    with serving(folder / "log", *EMULATED, *more) as made:
        yield made


def connected(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def answer_to(connection: socket.socket) -> str:
    """All bytes until the server closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            said += part
    return said.decode()


def asked(server: LiveServer, request: bytes, opened: contextlib.ExitStack) -> tuple[socket.socket, bytes]:
    """A connection with this request sent, and the start of its answer; repeated if the sending process was paused."""
    while True:
        connection = opened.enter_context(connected(server))
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            first = connection.recv(4096)
            if first and not first.startswith(b"HTTP/1.1 408 "):
                return connection, first


def took_s(since_s: float) -> float:
    return time.monotonic() - since_s


def test_a_late_head_is_refused(server: LiveServer) -> None:
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
        began_s = time.monotonic()
        with connected(server) as connection:
            connection.sendall(sent)
            assert answer_to(connection).startswith("HTTP/1.1 408 ")
        assert took_s(began_s) > 1.4


def test_a_head_a_byte_at_a_time_is_refused_on_a_kept_connection_too(server: LiveServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        began_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for letter in b"GET /health HTTP/1.1\r\nX: " + b"a" * 3000:
                connection.sendall(bytes((letter,)))
                time.sleep(0.05)
        assert took_s(began_s) < 100  # the whole body would take 151


def test_a_late_body_is_refused(server: LiveServer) -> None:
    with connected(server) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Connection: close\r\nContent-Length: 99\r\n\r\n{")
        said = answer_to(connection)
        assert said.startswith("HTTP/1.1 408 ")
        assert json.loads(said.partition("\r\n\r\n")[2])["error"]["type"] == "RequestTimeoutError"


def test_one_connection_too_many_is_answered_503(server: LiveServer) -> None:
    began_s = time.monotonic()
    with contextlib.ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(connected(server))
        one_more = opened.enter_context(connected(server))
        said = answer_to(one_more)
    if took_s(began_s) < 1.5:  # otherwise the first were closed before the last arrived
        assert said.startswith("HTTP/1.1 503 ")
        assert "Retry-After: 1" in said
    until(lambda: server.status_of("/health") == 200)


def test_tokens_that_wait_are_limited(server: LiveServer) -> None:
    """Two answers run; a third prompt waits; a fourth would exceed the limit of waiting tokens."""
    body = {"prompt": "a" * 3000, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    with contextlib.ExitStack() as opened:
        for number in (1, 2, 2):  # the third one's stream begins as well, still empty
            _, first = asked(server, request, opened)
            assert first.startswith(b"HTTP/1.1 200 ")
            until(lambda number=number: running(server) == number)
        closing = request.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
        refused, first = asked(server, closing, opened)
        said = first.decode() + answer_to(refused)
        assert said.startswith("HTTP/1.1 503 ")
        assert "3000 tokens of prompts wait already" in said
        assert "retry-after: 1" in said.lower()
    until(lambda: running(server) == 0)


def test_limits_are_above_zero(tmp_path: Path) -> None:
    from lockstep.api.settings import read_settings
    from lockstep.core.contract.errors import ConfigError

    file = tmp_path / "serve.toml"
    file.write_text("emulate = 'qwen3-8b@h200'\n[limits]\nhead_s = 0\n")
    with pytest.raises(ConfigError, match=r"`limits\.head_s` must be above 0, and finite, got `0\.0`"):
        read_settings(file, {})
