"""What HTTP costs for each streamed token, beside the least that FastAPI can do.

    bare     a FastAPI endpoint that sends one fixed event to each of its streams, every so many milliseconds
    worker   an API worker of `lockstep serve`: takes the step's message, spells the tokens, writes the events
    engine   its engine process, with an executor that computes nothing

S streams of completions decode together; steps come at the same pace in both servers, slowly enough that each token is
an event of its own (`chunks` counts the tokens that held). Figures are CPU us per token, user and system, of the
process, from its first token to its last; client and servers share the machine, so times are not given. Bar: the worker
costs at most twice the bare endpoint.

    python benchmarks/http_overhead.py [--streams 256] [--tokens 200] [--rounds 3] [--json FILE]

Needs Linux, for /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from live_server import serving, wait_ready

STEP_S = 0.080
BAR = 2.0
BARE = """
import asyncio, json, sys
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

app = FastAPI()
EVENT = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1795337305,' \\
    b'"model":"qwen3-8b","choices":[{"index":0,"finish_reason":null,"text":" w123456","logprobs":null}]}\\n\\n'
ticked = asyncio.Condition()
step = 0

async def tick():
    global step
    while True:
        await asyncio.sleep(STEP_S)
        async with ticked:
            step += 1
            ticked.notify_all()

@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def completions(body: dict):
    if body.get("stream") is False:
        return json.loads(EVENT[6:])

    async def events():
        for _ in range(body["max_tokens"]):
            async with ticked:
                await ticked.wait()
            yield EVENT
        yield b"data: [DONE]\\n\\n"
    return StreamingResponse(events(), media_type="text/event-stream")

@app.get("/ready")
async def ready():
    return {}

async def main():
    server = uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[1]), http="httptools", log_level="warning"))
    ticking = asyncio.create_task(tick())
    await server.serve()

asyncio.run(main())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"bare": [], "worker": [], "engine": []}
    chunks = []
    with bare() as (bare_url, bare_pids), served(arguments.streams) as (url, pids):
        for server, roles in ((bare_url, bare_pids), (url, pids)):
            measure(server, roles, arguments.streams, 20)  # what is done once
        for _ in range(arguments.rounds):
            figures, _ = measure(bare_url, bare_pids, arguments.streams, arguments.tokens)
            found["bare"].append(figures["bare"])
            figures, share = measure(url, pids, arguments.streams, arguments.tokens)
            found["worker"].append(figures["worker"])
            found["engine"].append(figures["engine"])
            chunks.append(share)
    medians = {role: statistics.median(values) for role, values in found.items()}
    ratio = medians["worker"] / medians["bare"]
    print(f"CPU us per token, {arguments.streams} streams of {arguments.tokens} tokens, median of {arguments.rounds}")
    for role, value in medians.items():
        print(f"  {role:8}{value:8.1f}   {' '.join(f'{one:.1f}' for one in found[role])}")
    print(f"  worker / bare {ratio:.2f} (bar {BAR}), tokens with a chunk of their own {statistics.median(chunks):.0%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cpu_us_per_token": found, "ratio": ratio, "chunks": chunks}, indent=1))
    return int(ratio > BAR)


@contextlib.contextmanager
def bare(step_s: float = STEP_S) -> Iterator[tuple[str, dict[str, int]]]:
    """The bare endpoint, which sends an event to each stream every `step_s` seconds."""
    port = 18_000 + os.getpid() % 2000
    process = subprocess.Popen([sys.executable, "-c", f"STEP_S = {step_s}\n{BARE}", str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        yield url, {"bare": process.pid}
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def served(streams: int) -> Iterator[tuple[str, dict[str, int]]]:
    """`lockstep serve` with an emulated model, at the pace of the bare endpoint."""
    pace_us = decode_us(streams)
    emulated = ("--emulate", "qwen3-8b@h200", "--engine", "none")  # the costs of `decode_us`
    with serving(*emulated, "--speed", str(pace_us / 1e6 / STEP_S)) as (url, pid):
        yield url, children(pid)


def decode_us(rows: int) -> float:
    """How long a decode of so many rows takes by the cost model."""
    from lockstep.sim.catalogue import load_gpu, load_model
    from lockstep.sim.cost import decode_shape, roofline_model

    return roofline_model(load_model("qwen3-8b"), load_gpu("h200")).batch_us(decode_shape(rows, 100)).mean_us


def children(pid: int) -> dict[str, int]:
    """The processes of a server by role: a worker is the launcher's child, the engine a child of its fork server."""
    table: dict[int, tuple[int, list[str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                table[int(folder.name)] = parent, words
    own = {module: child for child, (parent, words) in table.items() if parent == pid for module in words[2:3]}
    fork_server = own["lockstep.api.processes.fork_server"]
    engine = next(child for child, (parent, _) in table.items() if parent == fork_server)
    return {"worker": own["lockstep.api.worker"], "engine": engine}


def cpu_us(pid: int) -> float:
    """User and system time of a process, by the scheduler's clock: that of /proc/PID/stat counts ticks of 10 ms."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1000


def measure(url: str, pids: dict[str, int], streams: int, tokens: int) -> tuple[dict[str, float], float]:
    """CPU us per token by role, and the share of tokens that came in a chunk of their own."""
    return asyncio.run(_measure(url, pids, streams, tokens))


async def _measure(url: str, pids: dict[str, int], streams: int, tokens: int) -> tuple[dict[str, float], float]:
    host, port = url.removeprefix("http://").split(":")
    all_there, there = asyncio.Event(), 0
    events = 0

    async def listen(number: int) -> None:
        nonlocal there, events
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = {"prompt": f"stream {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        first = True
        while data := await reader.read(65536):
            events += data.count(b"data: {")
            if first and b"data: {" in data:
                first = False
                there += 1
                if there == streams:
                    all_there.set()
        writer.close()

    tasks = [asyncio.create_task(listen(number)) for number in range(streams)]
    await all_there.wait()
    before, seen = {role: cpu_us(pid) for role, pid in pids.items()}, events
    await asyncio.gather(*tasks)
    used = {role: cpu_us(pid) - before[role] for role, pid in pids.items()}
    left = streams * tokens - seen  # those that came together count as the tokens they are
    return {role: value / left for role, value in used.items()}, events / (streams * tokens)


if __name__ == "__main__":
    sys.exit(main())
