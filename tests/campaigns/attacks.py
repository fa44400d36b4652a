"""Single requests and connections made to cost as much as they can: `python3 dev.py attacks`, or `make attacks`.

A bystander reads a stream of a token every few milliseconds. At the same time the campaign sends, one after another,
200 hostile requests and 50 hostile connections, each of a kind of its own size, drawn from a seed: megabytes of lists,
token ids, texts, messages, schemas, stop texts, names and numbers; heads, chunks and pipelines without end; readers
that do not read.

Measured: the longest gap between two tokens of the bystander during each attack, against that of a quiet phase. Beside
it stands how late a process that only sleeps was woken: what other programs of the machine did at that time.
Required: no gap of more than `--worst-ms` above the quiet phase, no status 500, a healthy server afterwards, and memory
of the workers back within bounds. The exit status is 1 if a requirement is violated.

    python -m tests.campaigns.attacks [--requests 200] [--connections 50] [--seed N] [--worst-ms 50]
    python -m tests.campaigns.attacks --kind hard_regexes --requests 5      requests of one kind only
    python -m tests.campaigns.attacks --quiet-only                         the control: as long, and without attacks
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.support.bystander import Bystander, Sleeper, bystander
from tests.support.live_server import EMULATED, LiveServer, serving

TOKENIZER = Path(__file__).parents[2] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
QUIET_S = 10.0
MIB = 2**20
JSON = "application/json"

SPEED = "2"
"""Speed of the emulated device, whose own time is part of a gap: 64 answers behind a prompt of 30,000 tokens take an
H200 57 ms for a token, and a device of this speed half of that."""

READ_S = 8.0  # longest time for which an answer is read; then its connection is closed


class Hostile(NamedTuple):
    """A request."""

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = MappingProxyType({})


Made = Hostile | tuple[str, bytes]
"""A request, or the path and the JSON body of one."""


def repeated(opening: str, item: str, closing: str, size: int) -> bytes:
    """A body of about this size with many equal items."""
    count = max(1, (size - len(opening) - len(closing)) // (len(item) + 1))
    return (opening + ",".join([item] * count) + closing).encode()


ITEMS = (
    *(
        "[]",
        "{}",
        "[[]]",
        '""',
        "0",
        "17",
        "-1",
        "1e308",
        "9" * 400,
        "null",
        "true",
        '"a"',
        '"\\u0000"',
        '"\\ud83d\\ude42"',
    ),
    *('{"a":1}', '{"role":"user","content":"a"}', '{"type":"text","text":"a"}', '["a","b"]', "[1,2,3]", '{"":{"":{}}}'),
)
FIELDS = {
    "/v1/completions": ("prompt", "x", "stop", "logit_bias", "stop_token_ids", "allowed_token_ids", "user", "suffix"),
    "/v1/chat/completions": ("messages", "tools", "stop", "x", "response_format", "logit_bias", "model"),
    "/v1/responses": ("input", "tools", "metadata", "instructions", "x"),
    "/v1/messages": ("messages", "system", "tools", "stop_sequences", "x"),
    "/v1/messages/count_tokens": ("messages", "system"),
    "/v1/embeddings": ("input", "x"),
    "/generate": ("text", "input_ids", "sampling_params", "x"),
    "/tokenize": ("prompt", "messages", "x"),
    "/detokenize": ("tokens", "x"),
    "/score": ("query", "items", "label_token_ids", "text_1"),
    "/rerank": ("documents", "query"),
    "/abort_request": ("rid", "x"),
}
PLAIN = {
    "/v1/completions": '"prompt":"a","max_tokens":1',
    "/v1/chat/completions": '"messages":[{"role":"user","content":"a"}],"max_tokens":1',
    "/v1/responses": '"input":"a","max_output_tokens":1',
    "/v1/messages": '"messages":[{"role":"user","content":"a"}],"max_tokens":1',
    "/generate": '"text":"a","sampling_params":{"max_new_tokens":1}',
}


def many_items(draw: random.Random, size: int) -> Made:
    path = draw.choice(sorted(FIELDS))
    field, item = draw.choice(FIELDS[path]), draw.choice(ITEMS)
    opening, closing = draw.choice((("[", "]"), ("[[", "]]"), ('{"a":[', "]}")))
    before = PLAIN.get(path, '"y":1')
    return path, repeated(f'{{{before},"{field}":{opening}', item, closing + "}", size)


def long_text(draw: random.Random, size: int) -> Made:
    path = draw.choice(sorted(FIELDS))
    unit = draw.choice(("a", "ab cd ", "\\n", "🙂", "\\u0416", " ", "x" * 97 + " ", "((((", "日本語"))
    before = PLAIN.get(path, '"y":1')
    field = draw.choice(FIELDS[path])
    return path, f'{{{before},"{field}":"{unit * (size // len(unit.encode()))}"}}'.encode()


def nested(draw: random.Random, size: int) -> Made:
    path, (left, right) = draw.choice(sorted(PLAIN)), draw.choice((("[", "]"), ('{"a":', "}")))
    depth = draw.choice((100, 1000, size // len(left)))
    inner = "1" if right == "}" else ""
    return path, f'{{{PLAIN[path]},"x":{left * depth}{inner}{right * depth}}}'.encode()


def many_names(draw: random.Random, size: int) -> Made:
    path = draw.choice(sorted(PLAIN))
    names = ",".join(f'"n{number}":{draw.randrange(9)}' for number in range(size // 14))
    return path, draw.choice((f"{{{PLAIN[path]},{names}}}", f'{{{PLAIN[path]},"x":{{{names}}}}}')).encode()


def hard_grammar(draw: random.Random, size: int) -> Made:
    pattern = draw.choice(
        (
            "(((a{1,100}){1,100}){1,100}){1,100}",
            "(.*a){200}",
            "(a|b)*a(a|b){400}",
            "a{1000000}",
            "|".join(f"w{number}" for number in range(20_000)),
            "(" * 5000 + "a" + ")" * 5000,
            "[^\\s\\S]",
        )
    )
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": dict.fromkeys("ab", deep)}
    fields: dict[str, Any] = draw.choice(
        (
            {"regex": pattern},
            {"json_schema": {"$ref": "#"}},
            {"ebnf": "root ::= root"},
            {"ebnf": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
            {"json_schema": {"enum": [f"value {number}" for number in range(8000)]}},
            {"json_schema": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4000)}}},
        )
    )
    return "/v1/completions", json.dumps(
        {"prompt": "a", "max_tokens": 40, "n": draw.choice((1, 1, 64)), **fields}
    ).encode()


def hard_stops(draw: random.Random, size: int) -> Made:
    unit = draw.choice((" w", "a", "\n", " w1"))
    stops = [(unit * 512)[:500] + chr(97 + number) for number in range(16)]
    return "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2000, "n": 8, "stop": stops}).encode()


def large_requests(draw: random.Random, size: int) -> Made:
    """Large requests of the kinds that ordinary clients send."""
    text = "def f(x):\n    return [x, {}]\n" * (size // 30)
    kind = draw.randrange(5)
    if kind == 0:
        return "/v1/completions", json.dumps({"prompt": [text[:4000]] * 250, "max_tokens": 1}).encode()
    if kind == 1:
        messages = [{"role": ("user", "assistant")[n % 2], "content": text[n : n + 400]} for n in range(4001)]
        return "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1}).encode()
    if kind == 2:
        return "/v1/completions", json.dumps({"prompt": [[17] * 30_000] * 100, "max_tokens": 1}).encode()
    if kind == 3:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 30_000 + "[]]"}}]
        asked: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
        return "/v1/chat/completions", json.dumps({"messages": asked, "max_tokens": 1}).encode()
    return "/tokenize", json.dumps({"prompt": text[:MIB], "return_token_strs": True}).encode()


def hard_regexes(draw: random.Random, size: int) -> Made:
    """Stop expressions with many states that stay alive, which are matched for each sample."""
    unit = draw.choice((".{480}x", "(.|..|...){150}x", "(a|b|.)*x{200}", "(w\\d+ ?){1,60}x", "(.{1,20}){1,20}x"))
    stops = [unit + chr(97 + number) for number in range(draw.choice((1, 4, 16)))]
    fields = {"prompt": "a", "max_tokens": 600, "n": draw.choice((1, 8, 64)), "stop_regex": stops}
    return "/v1/completions", json.dumps(fields | {"stream": draw.random() < 0.5}).encode()


def wide_answers(draw: random.Random, size: int) -> Made:
    """Long prompts that many choices repeat."""
    ids, text = [draw.randrange(3, 250) for _ in range(30_000)], "ab cd " * 5000
    fields = draw.choice(
        (
            {"prompt": ids, "return_token_ids": True},
            {"prompt": ids, "return_token_ids": True, "stream": True},
            {"prompt": text, "echo": True},
            {"prompt": text, "echo": True, "stream": True},
            {"prompt": [ids[:4000]] * 16, "return_token_ids": True, "n": 4},
        )
    )
    return "/v1/completions", json.dumps({"max_tokens": 1, "n": 64} | fields).encode()


def cumulative_streams(draw: random.Random, size: int) -> Made:
    """Streams of which every event has all tokens so far."""
    params = {"max_new_tokens": 6000, "ignore_eos": True, "n": draw.choice((8, 64))}
    return "/generate", json.dumps({"text": "a", "stream": True, "sampling_params": params}).encode()


def many_parameters(draw: random.Random, size: int) -> Made:
    """Many prompts, with parameters of their own."""
    count = draw.choice((64, 250, 2000))
    params: dict[str, Any] = {
        "max_new_tokens": 1,
        "stop": ["x" * 100] * 4,
        "logit_bias": {str(n): 1 for n in range(50)},
    }
    fields: dict[str, Any] = {"text": ["a"] * count, "sampling_params": [params] * count}
    fields["rid"] = [f"r{number}" for number in range(count)]
    return "/generate", json.dumps(fields).encode()


def hard_tools(draw: random.Random, size: int) -> Made:
    """Tools with large schemas, one of which must be called."""
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "a{1,9}"} for n in range(400)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(draw.choice((8, 40))):
        deep = (
            {"type": "object", "properties": {"a": deep, "b": {"anyOf": [deep, {"type": "null"}]}}}
            if _ < 8
            else {
                "type": "array",
                "items": deep,
            }
        )
    schema = draw.choice((wide, deep, {"enum": ["v" * 100] * 500}, {"allOf": [wide] * 20}))
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}
        for number in range(draw.choice((1, 20, 128)))
    ]
    fields = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "tools": tools}
    return "/v1/chat/completions", json.dumps(fields | {"tool_choice": draw.choice(("required", "auto"))}).encode()


def template_values(draw: random.Random, size: int) -> Made:
    """Variables of the chat template, and names, that are as large as a body may be."""
    value = draw.choice(("a" * (size // 2), ["a"] * (size // 8), {"a" * 50 + str(n): n for n in range(size // 80)}))
    name = draw.choice(("chat_template_kwargs", "metadata", "documents", "reasoning_effort", "user", "cache_salt"))
    inside = {"enable_thinking": value} if name == "chat_template_kwargs" else value
    messages = [{"role": "user", "content": "a", "name": "b" * draw.choice((1, 70_000))}]
    return "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1, name: inside}).encode()


def kept_answers(draw: random.Random, size: int) -> Made:
    """Answers that are written to a file as they come."""
    fields = {"prompt": "a" * draw.choice((1, 4000)), "max_tokens": 400, "n": 64, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": JSON, "Idempotency-Key": draw.randbytes(8).hex()}
    return Hostile("/v1/completions", json.dumps(fields).encode(), headers=headers)


def stored_items(draw: random.Random, size: int) -> Made:
    """Items of conversations and inputs of responses."""
    item = draw.choice(
        (
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 40},
            {"type": "function_call_output", "call_id": "c", "output": "[" * 2000},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}] * 40},
        )
    )
    count = min(size, 4 * MIB - 100) // (len(json.dumps(item)) + 2)
    path, name = draw.choice((("/v1/conversations", "items"), ("/v1/responses", "input")))
    return path, json.dumps({name: [item] * count, "metadata": {f"k{n}": "v" * 500 for n in range(16)}}).encode()


def forms(draw: random.Random, size: int) -> Made:
    """Uploads whose content resembles the border of its parts."""
    border = draw.choice((b"b", b"-" * 60, b"a" * 69))
    unit = draw.choice((b"\r", b"\r\n", b"\r\n--" + border[:-1], b"--" + border, b"\n", b"-"))
    head = b"--" + border + b'\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    parts = draw.choice(
        (
            head + unit * (size // len(unit)),
            (b"--" + border + b'\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n') * (size // 60),
            b"--" + border + b"\r\n" + b"X: y\r\n" * (size // 6),
            b"--" + border + b"\r\nContent-Disposition: form-data" + b"; a=b" * (size // 5),
        )
    )
    kind = f"multipart/form-data; boundary={border.decode()}"
    return Hostile("/v1/files", parts + b"\r\n--" + border + b"--\r\n", headers={"Content-Type": kind})


def costly_pages(draw: random.Random, size: int) -> Made:
    """Pages that are made for each request, and paths and headers of the longest kind."""
    path = draw.choice(
        (
            *("/openapi.json", "/metrics", "/tokenizer_info", "/v1/loads", "/ui/requests", "/server_info", "/v1/files"),
            *("/v1/batches?limit=9999999999", "/v1/models/" + "a/" * 15_000, "/v1/streams/" + "%2e" * 10_000),
            "/v1/files?" + "&".join(f"a{n}=b" for n in range(8000)),
        )
    )
    name = draw.choice(("Authorization", "X-Session-Id", "Origin", "Accept", "X-Request-Id", "Last-Event-ID"))
    return Hostile(path, method="GET", headers={name: draw.choice(("a", "9" * 30_000, "a, " * 10_000))})


REQUESTS: tuple[Callable[[random.Random, int], Made], ...] = (
    *(many_items, many_items, many_items, long_text, long_text, nested, many_names, hard_grammar, hard_stops),
    *(large_requests, hard_regexes, wide_answers, cumulative_streams, many_parameters, hard_tools, template_values),
    *(kept_answers, stored_items, forms, costly_pages),
)


def connections(draw: random.Random) -> bytes:
    """Bytes of connections that no valid client sends."""
    return odd_connections(draw) if draw.random() < 0.5 else long_connections(draw)


def odd_connections(draw: random.Random) -> bytes:
    """Bytes of other protocols, ambiguous heads, and pipelines of requests that cost."""
    host = b"Host: 127.0.0.1\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n"
    body = b'{"prompt":"a","max_tokens":1}'
    sized = head + b"Content-Length: 29\r\n"
    return draw.choice(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(20_000),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(60_000),
            b"GET /\r\n",
            b"CONNECT evil.com:443 HTTP/1.1\r\n" + host + b"\r\n" + draw.randbytes(20_000),
            b"OPTIONS * HTTP/1.1\r\n"
            + host
            + b"Origin: http://evil.com\r\nAccess-Control-Request-Method: POST\r\n\r\n",
            b"GET http://evil.com/v1/models HTTP/1.1\r\n" + host + b"\r\n",
            b"A" * 60_000 + b" / HTTP/1.1\r\n" + host + b"\r\n",
            sized + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\n\r\n" + body,
            sized + b"Content-Length: 5\r\n\r\n" + body,
            head + b"Transfer-Encoding: xchunked\r\n\r\n" + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n" + body,
            head + b"Content-Length: +29\r\n\r\n" + body,
            sized + b"X: a\r\n folded: b\r\n\r\n" + body,
            sized + b"X : a\r\n\r\n" + body,
            sized + b"X: a\x00b\r\n\r\n" + body,
            sized.replace(b"\r\n", b"\n") + b"\n" + body,
            sized + b"Expect: 100-continue\r\n\r\n",
            sized + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: YQ==\r\n\r\n" + body,
            sized + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n\r\n" + body,
            (sized + b"\r\n" + body) * 500,
            (b"GET /metrics HTTP/1.1\r\n" + host + b"\r\n") * 400,
            (b"GET /openapi.json HTTP/1.1\r\n" + host + b"\r\n") * 40,
            (b"GET /v1/models/%ff%fe HTTP/1.1\r\n" + host + b"\r\n") * 500,
            (b"HEAD /health HTTP/1.1\r\n" + host + b"\r\n") * 1000,
            (b"BREW /v1/completions HTTP/1.1\r\n" + host + b"\r\n") * 100,
            (head + b"Content-Length: 3\r\n\r\n{]}") * 500,
            b"DELETE /v1/files/..%2f..%2fetc HTTP/1.1\r\n" + host + b"\r\n",
            head + b"Content-Length: 1048576\r\n\r\n" + b'"' * 1000,
        )
    )


def long_connections(draw: random.Random) -> bytes:
    """Bytes of connections with heads, chunks and pipelines that are too long."""
    host = b"Host: 127.0.0.1\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n"
    size = draw.choice((10_000, 70_000, MIB, 8 * MIB))
    kinds = (
        b"GET /v1/models HTTP/1.1\r\n" + host + b"X: " + b"a" * size + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + host + b"X: b\r\n" * (size // 6) + b"\r\n",
        b"GET /" + b"%41" * (size // 3) + b" HTTP/1.1\r\n" + host + b"\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * size + b"\r\n{\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * (size // 6) + b"0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: b\r\n" * (size // 6) + b"\r\n",
        (b"GET /health HTTP/1.1\r\n" + host + b"\r\n") * (size // 50),
        (head + b'Content-Length: 30\r\n\r\n{"prompt":"a","max_tokens":100}'[:-1]) * 200,
        head + b"Content-Length: 99999999999\r\n\r\n" + b" " * size,
        draw.randbytes(min(size, MIB)),
        b"GET /v1/models HTTP/1.1\r\n" + host + host + b"\r\n",
        b"\r\n" * (size // 2),
        b"GET /v1/models HTTP/1.1\r\nHost: [::1].evil.com\r\n\r\n",
    )
    return draw.choice(kinds)


def send(url: str, asked: Hostile) -> int:
    """Send a request and read up to READ_S of the response; return its status, 0 if the connection was closed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    until_s = time.monotonic() + READ_S
    try:
        connection.request(asked.method, asked.path, asked.body or None, {"Content-Type": JSON} | dict(asked.headers))
        answer = connection.getresponse()
        while answer.read1(65536) and time.monotonic() < until_s:
            pass
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def connect(url: str, sent: bytes) -> int:
    """Send bytes, read a little, and close the connection; return the status of the first answer."""
    host, port = urlsplit(url).netloc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=15) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        try:
            found = re.match(rb"HTTP/1\.1 (\d+)", connection.recv(4096))
        except OSError:
            found = None
    return int(found[1]) if found else 0


def memory_mb(server: LiveServer) -> float:
    """Return the resident memory of the API workers, MB."""
    total = 0
    for name, pid in server.children().items():
        if name.startswith("worker"):
            total += int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    return total / 1024


class Campaign:
    """Attacks on one server while one stream is read."""

    def __init__(self, server: LiveServer, stream: Bystander, sleeper: Sleeper) -> None:
        self.server, self.stream, self.sleeper = server, stream, sleeper
        # worst gap ms, duration s, name, worst delay of the process that sleeps, ms
        self.rows: list[tuple[float, float, str, float]] = []
        self.statuses: Counter[int] = Counter()

    def attack(self, name: str, work: Callable[[], int]) -> None:
        time.sleep(0.1)  # making the body delayed this process, the bystander included
        began_s = time.monotonic()
        status = work()
        self.statuses[status] += 1
        took_s = time.monotonic() - began_s
        time.sleep(0.05)
        gap_ms, late_ms = 1000 * self.stream.worst_s(began_s), 1000 * self.sleeper.worst_s(began_s)
        self.rows.append((gap_ms, took_s, f"{name} -> {status}", late_ms))


def main() -> int:
    """Run the campaign. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst-ms", type=float, default=50.0, help="longest delay above the quiet phase")
    parser.add_argument("--kind", choices=sorted({one.__name__ for one in REQUESTS}), help="requests of this kind only")
    parser.add_argument("--quiet-only", action="store_true", help="no attacks, in twelve times the quiet phase")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    arguments = (*EMULATED, "--speed", SPEED, "--tokenizer", str(TOKENIZER), "--shutdown-s", "1")
    print(f"seed {given.seed}")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", *arguments) as server,
        bystander(server.url) as stream,
        contextlib.closing(Sleeper()) as sleeper,
    ):
        began_s = time.monotonic()
        time.sleep(12 * QUIET_S if given.quiet_only else QUIET_S)
        gaps = sorted(1000 * gap for ended_s, gap in stream.gaps if ended_s - gap >= began_s)
        quiet_ms = gaps[-1]
        before_mb = memory_mb(server)
        late_ms = 1000 * sleeper.worst_s(began_s)
        print(f"quiet: {len(gaps)} gaps, median {median(gaps):.1f} ms, longest {quiet_ms:.1f} ms ({late_ms:.1f} ms)")
        campaign = Campaign(server, stream, sleeper)
        kinds = [one for one in REQUESTS if given.kind in (None, one.__name__)]
        for number in range(0 if given.quiet_only else given.requests):
            make = draw.choice(kinds)
            size = draw.choice((200_000, MIB, 8 * MIB, 31 * MIB))
            asked = Hostile(*make(draw, size))
            name = f"{number} {make.__name__} {asked.path[:40]} {len(asked.body) / MIB:.1f} MiB"
            if len(asked.body) < 400:
                name += f" {asked.body[:400]!r}"
            campaign.attack(name, lambda asked=asked: send(server.url, asked))  # type: ignore[misc]
        for number in range(0 if given.quiet_only else given.connections):
            sent = connections(draw)
            name = f"{number} connection {sent[:40]!r} {len(sent) / MIB:.1f} MiB"
            campaign.attack(name, lambda sent=sent: connect(server.url, sent))  # type: ignore[misc]
        time.sleep(2.0)
        after_mb = memory_mb(server)
        log = server.text()
    if given.quiet_only:
        above = [f"{gap:.0f}" for gap in gaps if gap > given.worst_ms]
        print(f"gaps above {given.worst_ms:g} ms without any attack: {' '.join(above) or 'none'}")
        return 0
    worst = sorted(campaign.rows, reverse=True)[: max(12, sum(row[0] > given.worst_ms for row in campaign.rows))]
    print(f"statuses: {dict(sorted(campaign.statuses.items()))}")
    print(f"memory of the worker: {before_mb:.0f} MB before, {after_mb:.0f} MB after")
    print("longest gaps of the bystander:")
    for gap_ms, took_s, name, late_ms in worst:
        print(f"  {gap_ms:8.1f} ms  (sleeper {late_ms:5.1f} ms)  during {took_s:6.2f} s of {name}")
    failed = [
        text
        for text, wrong in (
            (f"a gap of {worst[0][0]:.1f} ms", worst[0][0] > quiet_ms + given.worst_ms),
            (f"{campaign.statuses[500]} answers of status 500", bool(campaign.statuses[500])),
            (f"{after_mb:.0f} MB of memory afterwards", after_mb > before_mb + 150),
            ("an exception in the log", "Traceback" in log),
        )
        if wrong
    ]
    for text in failed:
        print(f"FAILED: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
