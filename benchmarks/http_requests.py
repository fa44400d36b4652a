"""What a request costs for which hardly a token is computed: many requests of one token, and a burst of streams.

    requests   C connections send one request after the other, for one token: requests per second, CPU us per request
    burst      S streams of a few tokens begin at once: time to the first token, median and 99th percentile

The server emulates its model, at a speed at which batches take next to no time. Beside it stands the bare endpoint of
http_overhead.py, which checks nothing and computes nothing. CPU time is that of each process; client and servers share
the machine, and the cores that other programs used in each round are printed, since they change the rates. Bars: half
as many requests per second as the bare endpoint, 1.3 times its time to the first token.

    python benchmarks/http_requests.py [--rounds 3] [--seconds 5] [--connections 64] [--streams 1000] [--chat]

Needs Linux, for /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

from http_overhead import bare, children, cpu_us
from live_server import OtherPrograms, serving

RATE_BAR, TTFT_BAR = 0.5, 1.3
BURST_TOKENS = 4
BARE_STEP_S = 0.005
SPEED = "200"
TOKENIZER = Path(__file__).parents[1] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"


def request_of(url: str, path: str, fields: dict[str, object], *, keep: bool) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\nContent-Type: application/json\r\n"
    last = "" if keep else "Connection: close\r\n"
    return f"{head}{last}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def one_after_the_other(url: str, connections: int, seconds: float, *, chat: bool) -> int:
    """Send one-token requests on so many connections; return how many were answered."""
    host, port = url.removeprefix("http://").split(":")
    path, fields = "/v1/completions", {"prompt": "What is it?", "max_tokens": 1, "stream": False}
    if chat:
        path = "/v1/chat/completions"
        fields = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 1, "stream": False}
    sent = request_of(url, path, fields, keep=True)
    until_s = time.monotonic() + seconds
    answered = 0

    async def ask() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.monotonic() < until_s:
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
            answered += 1
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
    return answered


async def burst(url: str, streams: int) -> list[float]:
    """Begin so many streams at once; return the sorted times to their first tokens, in seconds."""
    host, port = url.removeprefix("http://").split(":")
    found: list[float] = []

    async def listen(number: int, began_s: float) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        fields = {"prompt": f"stream {number}", "max_tokens": BURST_TOKENS, "ignore_eos": True, "stream": True}
        writer.write(request_of(url, "/v1/completions", fields, keep=False))
        seen = b""
        while data := await reader.read(65536):
            if seen is not None:
                seen += data
                if b"data: {" in seen:
                    found.append(time.monotonic() - began_s)
                    seen = None
        writer.close()

    began_s = time.monotonic()
    await asyncio.gather(*(listen(number, began_s) for number in range(streams)))
    assert len(found) == streams
    return sorted(found)


def main() -> int:
    """Print the figures. Returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--chat", action="store_true", help="conversations instead of prompts")
    given = parser.parse_args()
    rates: dict[str, list[float]] = {"bare": [], "lockstep": []}
    firsts: dict[str, list[list[float]]] = {"bare": [], "lockstep": []}
    cpu: dict[str, list[float]] = {}
    others: list[float] = []
    emulated = ("--emulate", "qwen3-0.6b@h200", "--speed", SPEED, "--tokenizer", str(TOKENIZER))
    with bare(BARE_STEP_S) as (bare_url, bare_pids), serving(*emulated) as (url, pid):
        servers = {"bare": (bare_url, bare_pids), "lockstep": (url, children(pid))}
        for address, _ in servers.values():
            asyncio.run(one_after_the_other(address, given.connections, 1.0, chat=given.chat))
        for _ in range(given.rounds):
            for name, (address, pids) in servers.items():
                before = {role: cpu_us(one) for role, one in pids.items()}
                began_s = time.monotonic()
                with OtherPrograms() as beside:
                    answered = asyncio.run(
                        one_after_the_other(address, given.connections, given.seconds, chat=given.chat)
                    )
                rates[name].append(answered / (time.monotonic() - began_s))
                others.append(beside.cores)
                for role, one in pids.items():
                    cpu.setdefault(role, []).append((cpu_us(one) - before[role]) / answered)
                if given.streams:
                    firsts[name].append(asyncio.run(burst(address, given.streams)))
    rate = {name: statistics.median(found) for name, found in rates.items()}
    print(f"requests of one token, {given.connections} connections, median of {given.rounds} rounds")
    for name, value in rate.items():
        print(f"  {name:10}{value:8.0f} requests/s   {' '.join(f'{one:.0f}' for one in rates[name])}")
    for role, found in cpu.items():
        print(f"  {role:10}{statistics.median(found):8.0f} CPU us/request   {' '.join(f'{one:.0f}' for one in found)}")
    print(f"  lockstep / bare {rate['lockstep'] / rate['bare']:.2f} (bar {RATE_BAR})")
    print(f"  cores of other programs meanwhile: {' '.join(f'{one:.2f}' for one in others)}")
    missed = rate["lockstep"] < RATE_BAR * rate["bare"]
    if given.streams:
        print(f"time to the first token, {given.streams} streams that begin at once")
        medians = {}
        for name, runs in firsts.items():
            medians[name] = statistics.median(run[len(run) // 2] for run in runs)
            last = statistics.median(run[int(0.99 * len(run))] for run in runs)
            print(f"  {name:10}p50 {1000 * medians[name]:8.0f} ms   p99 {1000 * last:8.0f} ms")
        print(f"  lockstep / bare {medians['lockstep'] / medians['bare']:.2f} (bar {TTFT_BAR})")
        missed |= medians["lockstep"] > TTFT_BAR * medians["bare"]
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
