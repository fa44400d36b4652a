"""Single requests and connections made to cost as much as they can: `python3 dev.py attacks`, or `make attacks`.

A bystander reads a stream of a token every few milliseconds. At the same time the campaign sends, one after another,
200 hostile requests and 50 hostile connections, each of a kind of its own size, drawn from a seed: megabytes of lists,
token ids, texts, messages, schemas, stop texts, names and numbers; heads, chunks and pipelines without end; readers
that do not read.

Measured: the longest gap between two tokens of the bystander during each attack, against that of a quiet phase.
Required: no gap of more than `--worst-ms` above the quiet phase, no status 500, a healthy server afterwards, and memory
of the workers back within bounds. The exit status is 1 if a requirement is violated.

    python -m tests.campaigns.attacks [--requests 200] [--connections 50] [--seed N] [--worst-ms 50]
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
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from tests.support.bystander import Bystander, bystander
from tests.support.live_server import EMULATED, LiveServer, serving

TOKENIZER = Path(__file__).parents[2] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
QUIET_S = 10.0
MIB = 2**20

Made = tuple[str, bytes]
"""Path and body of a request."""


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
    return "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 40, **fields}).encode()


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
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
        return "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1}).encode()
    return "/tokenize", json.dumps({"prompt": text[:MIB], "return_token_strs": True}).encode()


REQUESTS: tuple[Callable[[random.Random, int], Made], ...] = (
    *(many_items, many_items, many_items, long_text, long_text, nested, many_names, hard_grammar, hard_stops),
    large_requests,
)


def connections(draw: random.Random) -> bytes:
    """Bytes of connections that no valid client sends."""
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


def send(url: str, path: str, body: bytes) -> int:
    """Send a request; return its status, 0 if the connection was closed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
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

    def __init__(self, server: LiveServer, stream: Bystander) -> None:
        self.server, self.stream = server, stream
        self.rows: list[tuple[float, float, str]] = []  # worst gap ms, duration s, name
        self.statuses: Counter[int] = Counter()

    def attack(self, name: str, work: Callable[[], int]) -> None:
        time.sleep(0.1)  # making the body delayed this process, the bystander included
        began_s = time.monotonic()
        status = work()
        self.statuses[status] += 1
        took_s = time.monotonic() - began_s
        time.sleep(0.05)
        self.rows.append((1000 * self.stream.worst_s(began_s), took_s, f"{name} -> {status}"))


def main() -> int:
    """Run the campaign. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst-ms", type=float, default=50.0, help="longest delay above the quiet phase")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    print(f"seed {given.seed}")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", *EMULATED, "--tokenizer", str(TOKENIZER), "--shutdown-s", "1") as server,
        bystander(server.url) as stream,
    ):
        began_s = time.monotonic()
        time.sleep(QUIET_S)
        gaps = sorted(1000 * gap for ended_s, gap in stream.gaps if ended_s - gap >= began_s)
        quiet_ms = gaps[-1]
        before_mb = memory_mb(server)
        print(f"quiet: {len(gaps)} gaps, median {median(gaps):.1f} ms, longest {quiet_ms:.1f} ms")
        campaign = Campaign(server, stream)
        for number in range(given.requests):
            make = draw.choice(REQUESTS)
            size = draw.choice((200_000, MIB, 8 * MIB, 31 * MIB))
            path, body = make(draw, size)
            name = f"{number} {make.__name__} {path} {len(body) / MIB:.1f} MiB"
            campaign.attack(name, lambda path=path, body=body: send(server.url, path, body))  # type: ignore[misc]
        for number in range(given.connections):
            sent = connections(draw)
            name = f"{number} connection {sent[:40]!r} {len(sent) / MIB:.1f} MiB"
            campaign.attack(name, lambda sent=sent: connect(server.url, sent))  # type: ignore[misc]
        time.sleep(2.0)
        after_mb = memory_mb(server)
        log = server.text()
    worst = sorted(campaign.rows, reverse=True)[:8]
    print(f"statuses: {dict(sorted(campaign.statuses.items()))}")
    print(f"memory of the worker: {before_mb:.0f} MB before, {after_mb:.0f} MB after")
    print("longest gaps of the bystander:")
    for gap_ms, took_s, name in worst:
        print(f"  {gap_ms:8.1f} ms  during {took_s:6.2f} s of {name}")
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
