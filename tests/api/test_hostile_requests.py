"""Requests that are made to cost: none delays the tokens of another stream, and each gets a status of its own.

Delays are compared with what one such request cost before it was read in a process of its own: 3 to 17 s.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.processes.text_processes import JOB_S
from tests.support.bystander import bystander
from tests.support.live_server import EMULATED, LiveServer, serving

TOKENIZER = Path(__file__).parents[2] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
DELAY_S = 1.0  # on a machine with other work; `tests/campaigns/attacks.py` measures delays


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    arguments = (*EMULATED, "--shutdown-s", "1", "--tokenizer", str(TOKENIZER))
    with serving(tmp_path_factory.mktemp("hostile") / "log", *arguments) as made:
        yield made


def post(url: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def npy(numbers: int) -> bytes:
    """A .npy file of rows of four numbers."""
    file = io.BytesIO()
    np.save(file, np.zeros((numbers // 4, 4), np.float32))
    return file.getvalue()


def of_size(opening: bytes, item: bytes, closing: bytes, size: int) -> bytes:
    """A body of about this size with many equal items."""
    count = (size - len(opening) - len(closing)) // (len(item) + 1)
    return opening + (item + b",") * (count - 1) + item + closing


MIB = 2**20
PARTS = of_size(b"", b'{"type": "text", "text": "a"}', b"", 180 * 30)
COSTLY = {
    "many samples under a slow grammar": (
        "/v1/completions",
        json.dumps(
            {
                "prompt": "a",
                "max_tokens": 20,
                "n": 64,
                "json_schema": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4000)}},
            }
        ).encode(),
        *(400, "`json_schema`"),
    ),
    "a stop expression of empty groups": (
        "/v1/completions",
        json.dumps({"prompt": "a", "max_tokens": 1, "stop_regex": "(((()){512}){512}){512}x"}).encode(),
        *(400, "repeats too much"),
    ),
    "stop expressions of many samples": (
        "/v1/completions",
        json.dumps({"prompt": "a", "n": 64, "stop_regex": [".{480}" + chr(97 + n) for n in range(16)]}).encode(),
        *(400, "states over all answers"),
    ),
    "a message that is too long": (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "' + b"a" * 31 * MIB + b'"}]}',
        *(400, "`messages` has 32505856 characters, and at most"),
    ),
    "an unknown field of empty lists": (
        *("/v1/completions", of_size(b'{"prompt": "a", "x": [', b"[]", b"]}", 31 * MIB)),
        *(200, ""),
    ),
    "a list of lists for a prompt": (
        *("/v1/completions", of_size(b'{"prompt": [', b"[]", b"]}", 31 * MIB)),
        *(400, "`prompt` has too many values"),
    ),
    "token ids": ("/v1/completions", of_size(b'{"prompt": [', b"17", b"]}", 31 * MIB), 400, "4194304 token ids"),
    "numbers of given embeddings": (
        *("/generate", of_size(b'{"input_embeds": [[', b"0.5", b"]]}", 31 * MIB)),
        *(400, "`input_embeds` has more than 4194304 numbers"),
    ),
    "rows of given embeddings": (
        *("/generate", of_size(b'{"input_embeds": [', b"[0.5, 0.25, 0.125, 1]", b"]}", 8 * MIB)),
        *(400, "an emulated engine takes tokens only"),
    ),
    "a file of given embeddings": (
        *("/v1/completions", b'{"prompt_embeds": "' + base64.b64encode(npy(3 * MIB)) + b'"}'),
        *(400, "an emulated engine takes tokens only"),
    ),
    "a file that claims to be larger": (
        *("/v1/completions", b'{"prompt_embeds": "' + base64.b64encode(npy(64)[:-1]) + b'"}'),
        *(400, "255 bytes for float32 of shape [16, 4]"),
    ),
    "tokens to detokenise": (
        *("/detokenize", of_size(b'{"tokens": [', b"17", b"]}", 4 * MIB)),
        *(400, "at most 1048576 are allowed (detokenize_max)"),
    ),
    "lists of tokens to detokenise": (
        *("/v1/detokenize", of_size(b'{"tokens": [[' + b"17," * MIB + b"17], [", b"17", b"]]}", 4 * MIB)),
        *(400, "at most 1048576 are allowed (detokenize_max)"),
    ),
    "many lists to detokenise": (
        *("/detokenize", of_size(b'{"tokens": [', b"[17]", b"]}", 4 * MIB)),
        *(400, "at most 256 are allowed"),
    ),
    "values for any endpoint": (
        *("/invocations", of_size(b'{"prompt": [', b"[]", b"]}", 31 * MIB)),
        *(400, "`prompt` has too many values"),
    ),
    "token ids for any endpoint": (
        *("/invocations", of_size(b'{"input_ids": [', b"17", b"]}", 31 * MIB)),
        *(400, "4194304 token ids"),
    ),
    "items of a conversation": (
        *("/v1/conversations", of_size(b'{"items": [', b'{"role": "user", "content": "a"}', b"]}", 5 * MIB)),
        *(413, "4194304 bytes"),
    ),
    "ids of requests": ("/abort_requests", of_size(b'{"request_ids": [', b'"a"', b"]}", MIB), 413, "65536 bytes"),
    "a megabyte to tokenise": ("/tokenize", of_size(b'{"prompt": "', b"ab cd", b'"}', MIB), 200, ""),
    "a prompt of a megabyte": (
        *("/v1/completions", of_size(b'{"prompt": "', b"ab cd", b'"}', MIB)),
        *(400, "maximum context length"),
    ),
    "messages of many parts": (
        "/v1/chat/completions",
        of_size(b'{"messages": [', b'{"role": "user", "content": [' + PARTS + b"]}", b"]}", 30 * MIB),
        *(400, "`messages` has too many values"),
    ),
    "arguments of a call": (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1", "type": '
        b'"function", "function": {"name": "f", "arguments": "' + of_size(b"[", b"[]", b"]", 6 * MIB) + b'"}}]}]}',
        *(400, "characters, and at most"),
    ),
    "nesting": ("/v1/completions", b'{"prompt": ' + b"[" * MIB + b"]" * MIB + b"}", 400, "Invalid JSON"),
    "a long name": ("/v1/completions", b'{"' + b"x" * (31 * MIB) + b'": 1, "prompt": "a"}', 200, ""),
    "many prompts": ("/v1/completions", of_size(b'{"prompt": [', b'"' + b"ab cd " * 600 + b'"', b"]}", MIB), 400, ""),
    "a large body for a small route": ("/abort_request", of_size(b'{"rid": "', b"a", b'"}', MIB), 413, "65536 bytes"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_request_does_not_delay_another_stream(server: LiveServer, name: str) -> None:
    path, body, status, message = COSTLY[name]
    with bystander(server.url) as stream:
        began_s = time.monotonic()
        got, answer = post(server.url, path, body)
        took_s, worst_s = time.monotonic() - began_s, stream.worst_s(began_s)
    assert got == status, answer
    # a busy machine may take so long
    if f"longer than {JOB_S:g} s of processor time to read" not in str(answer):
        assert message in str(answer)
    else:
        assert took_s > JOB_S
    assert worst_s < DELAY_S


def test_a_large_request_is_answered_as_a_small_one(server: LiveServer) -> None:
    """Token ids, texts and conversations that are read in another process give the same answers."""
    ids = list(range(300, 310)) * 10
    asked: dict[str, Any] = {"prompt": ids, "seed": 3, "max_tokens": 5}
    small = post(server.url, "/v1/completions", json.dumps(asked).encode())
    large = post(server.url, "/v1/completions", json.dumps(asked | {"user": "", "x": " " * 100_000}).encode())
    assert small[0] == large[0] == 200
    assert small[1]["choices"] == large[1]["choices"]
    assert small[1]["usage"]["prompt_tokens"] == large[1]["usage"]["prompt_tokens"] == 100
    both = post(server.url, "/v1/completions", json.dumps(asked | {"prompt": [ids, ids], "x": " " * 100_000}).encode())
    assert [one["text"] for one in both[1]["choices"]] == [small[1]["choices"][0]["text"]] * 2
    text = "def f(x):\n    return [x, {}]\n" * 300
    status, found = post(server.url, "/tokenize", json.dumps({"prompt": text}).encode())
    assert status == 200
    parts = [post(server.url, "/tokenize", json.dumps({"prompt": text[:4000]}).encode())[1]["tokens"]]
    assert found["tokens"][:500] == parts[0][:500]
    assert post(server.url, "/detokenize", json.dumps({"tokens": found["tokens"]}).encode())[1]["text"] == text
    strict = post(server.url, "/v1/completions", json.dumps(asked | {"suffix": "x" * 100_000}).encode())
    assert strict[0] == 400
    assert "`suffix`" in strict[1]["error"]["message"]
    wrong = post(server.url, "/v1/completions", json.dumps({"prompt": [-1] * 50_000}).encode())
    assert (wrong[0], "Token ids should be 0" in wrong[1]["error"]["message"]) == (400, True)


# ------------------------------------------------------------------------------------------------------------ the head


def exchange(url: str, sent: bytes, timeout_s: float = 20.0) -> bytes:
    """The first bytes of the answer to some bytes; empty if the server closed the connection."""
    host, port = urlsplit(url).netloc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        with contextlib.suppress(OSError):  # the server may refuse it before all was sent
            connection.sendall(sent)
        try:
            return connection.recv(4096)
        except OSError:
            return b""


def whole_exchange(url: str, sent: bytes, timeout_s: float = 20.0) -> bytes:
    """Everything that the server answers to some bytes until it closes the connection."""
    host, port = urlsplit(url).netloc.rsplit(":", 1)
    answers = []
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        with contextlib.suppress(OSError):  # the server may refuse it before all was sent
            connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answers.append(part)
    return b"".join(answers)


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    "host", ["[::1].evil.com", "[::1]evil.com", "127.0.0.1.evil.com", "evil.com", "a@localhost", ""]
)
def test_a_foreign_host_is_refused(server: LiveServer, host: str) -> None:
    answer = exchange(server.url, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert status_of(answer) == 403


@pytest.mark.parametrize("host", ["[::1]", "[::1]:80", "127.0.0.1", "localhost:8000", "127.0.0.2"])
def test_this_machine_is_served_under_all_its_names(server: LiveServer, host: str) -> None:
    answer = exchange(server.url, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert status_of(answer) == 200


HOST = b"Host: 127.0.0.1\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\n"
    + HOST
    + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
HEADS = {
    "a header of 70,000 bytes": b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "many headers": b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X: aaaaaaaa\r\n" * 6000 + b"\r\n",
    "a long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a second request with a large head": b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "a chunk extension of 200 kB": CHUNKED + b"1;" + b"a" * 200_000 + b"\r\n{\r\n0\r\n\r\n",
    "trailers of 200 kB": CHUNKED + b"1\r\n{\r\n0\r\n" + b"X: aaaaaaaa\r\n" * 15_000 + b"\r\n",
    "100,000 chunks of a byte": CHUNKED + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_beyond_its_limits_is_refused(server: LiveServer, name: str) -> None:
    sent = HEADS[name]
    answer = exchange(server.url, sent)
    if name.startswith("a second"):
        answer = answer.partition(b"\r\n\r\n")[2] or answer
        assert b"HTTP/1.1 200 OK\r\n" not in answer.partition(b"HTTP/1.1 400")[2]
        return
    assert status_of(answer) == 400, answer[:200]


def test_requests_that_wait_on_a_connection_are_limited(server: LiveServer) -> None:
    one = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert whole_exchange(server.url, one * 20 + last).count(b" 200 OK") == 21
    answer = whole_exchange(server.url, one * 20_000)
    assert b"HTTP/1.1 400" in answer
    assert answer.count(b" 200 OK") < 20_000


def test_chunks_of_usual_sizes_are_a_body(server: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "x": "' + b"y" * 20_000 + b'"}'
    for size in (1, 7, 4096):
        chunks = b"".join(
            b"%x\r\n%s\r\n" % (len(part), part) for at in range(0, len(body), size) for part in [body[at : at + size]]
        )
        assert status_of(exchange(server.url, CHUNKED + chunks + b"0\r\n\r\n")) == 200


# ------------------------------------------------------------------------------------------------------------- the end


def test_a_draining_server_refuses_new_requests_at_once(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "log", *EMULATED, "--shutdown-s", "8") as server,
        bystander(server.url, max_tokens=20_000) as stream,
    ):
        server.process.terminate()
        time.sleep(0.5)
        for path, sent in (("/ready", b""), ("/v1/completions", b'{"prompt": "a"}')):
            method = b"POST" if sent else b"GET"
            head = b"%s %s HTTP/1.1\r\n%sContent-Type: application/json\r\n" % (method, path.encode(), HOST)
            began_s = time.monotonic()
            answer = exchange(server.url, head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent, 3.0)
            assert status_of(answer) == 503, answer
            assert time.monotonic() - began_s < 2.0
            if sent:
                assert b"retry-after" in answer.lower()
                assert b"connection: close" in answer.lower()
        assert stream.worst_s() < 3.0, "open streams continue"
