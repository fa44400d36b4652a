"""A server that answers completions at once: `python -m tests.support.null_server`; prints its port.

An answer has `max_tokens` words. The server stores every body with its X-Request-Id, and returns them at /prompts. A
prompt that contains "fail" is refused; an answer to one with "hang" never ends; an answer to one with "crowd" waits for
CROWD requests.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CROWD = 3


def requested_of(server: str) -> list[dict[str, Any]]:
    """Return the requests that the server received, in order of arrival."""
    request = urllib.request.Request(f"{server}/prompts", data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


def await_asked(server: str, count: int) -> None:
    """Wait until the server has received this number of requests, without a limit other than that for a hang."""
    until_s = time.monotonic() + 120
    while len(requested_of(server)) < count:
        assert time.monotonic() < until_s, f"not asked {count} times within 120 s"
        time.sleep(0.05)


@contextmanager
def null_server() -> Iterator[str]:
    """The server in a process of its own: its address."""
    words = [sys.executable, "-m", "tests.support.null_server"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        try:
            yield f"http://127.0.0.1:{done.stdout.readline().strip()}"
        finally:
            done.kill()


async def serve() -> None:
    prompts: list[dict[str, object]] = []
    crowded = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")
                )
                body = await reader.readexactly(length)
                path = head.split(" ")[1]
                if path == "/v1/models":
                    answer(writer, 200, {"data": [{"id": "null"}]})
                elif path == "/prompts":
                    answer(writer, 200, prompts)
                elif path == "/v1/completions":
                    named = next(
                        (line[13:].strip() for line in head.splitlines() if line.startswith("X-Request-Id:")), ""
                    )
                    await complete(writer, json.loads(body) | {"x_request_id": named})
                else:
                    answer(writer, 404, {"error": {"message": "there is nothing"}})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def answer(writer: asyncio.StreamWriter, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def complete(writer: asyncio.StreamWriter, asked: dict[str, object]) -> None:
        prompts.append(asked)
        if "crowd" in str(asked["prompt"]):
            if len(prompts) >= CROWD:
                crowded.set()
            await crowded.wait()
        if "fail" in str(asked["prompt"]):
            answer(writer, 503, {"error": {"message": "no"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        number = len(prompts)
        for at in range(int(str(asked["max_tokens"]))):
            send(writer, {"choices": [{"text": f" w{number}x{at}"}]})
        if "hang" in str(asked["prompt"]):
            await writer.drain()
            await asyncio.Event().wait()
        send(writer, {"choices": [], "usage": {"completion_tokens": asked["max_tokens"], "prompt_tokens": 5}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def send(writer: asyncio.StreamWriter, event: object) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
