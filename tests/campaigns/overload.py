"""More load of every kind than a server can serve: `python3 dev.py overload`, or `make overload`.

An emulated engine serves a closed loop of clients that keeps its batch full in every phase. The phases follow one
another: ten times as many requests as the engine can answer; readers that take a byte a second; clients that disconnect
at any point; bodies and bytes that are no requests. Measured in each phase, and required:

    CPU time of the engine per step     within 10 % of that in the quiet phases before and after it, or between waves of
                                        clients
    memory of the processes             bounded, and back afterwards
    answers                             200, or a 4xx or 503 with a reason; never a 500
    health                              200 while the engine works; 503 while it is stopped with work to do
    at the end                          no open or waiting request, all pages available, a request as fast as before

Prints its seed, and a line of figures for each phase. The exit status is 1 if a requirement is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.campaigns import hostile
from tests.support.live_server import LiveServer, ask_operator, serving

KEY = "sk-a-key-of-an-operator"
ROWS = 64
TOKENS = 160  # of an answer: the batch is replaced in about two seconds
CONFIG = f"""
emulate = "qwen3-0.6b@h200"
speed = 0.12
slow_reader_s = 45.0
stalled_s = {{stalled_s}}
shutdown_s = 1.0

[limits]
requests_max = 2048
waiting_max = 96
connections_max = 4096
head_s = 5.0
body_s = 5.0

[set]
max_running_requests = {ROWS}
"""
FINE = frozenset({200, 307, 400, 401, 404, 405, 408, 413, 415, 429, 501, 503})
READ_S = 300.0  # until an answer has begun
READERS_S = 600.0  # for all slow readers to be accepted, one after another
REFUSED_S = 120.0  # for ten times the rate to be too much: the rate may have been measured on an idle machine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes and durations of the campaign."""

    seconds: float = 60.0  # of the phase at ten times the sustainable rate
    quiet_s: float = 10.0  # before each phase, and after the last
    readers: int = 1000
    leavers: int = 1000
    bodies: int = 4000
    tolerance: float = 0.1  # of the engine's CPU time per step; infinite: times are not compared
    waves: int = 12  # of the phases with clients that disconnect and with invalid requests
    stalled_s: float = 3.0  # an engine without progress for this long is reported as unhealthy
    seed: int = 0


SHORT = Plan(seconds=2.0, quiet_s=1.0, readers=30, leavers=40, bodies=120, tolerance=math.inf, waves=2, stalled_s=15.0)
"""Sizes for tests on busy machines: times of such short phases are not compared, and processes may pause a while."""


@dataclass
class Phase:
    """Measurements of one phase."""

    name: str
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    engine_us: float = 0.0  # CPU time per step: the median over its seconds or waves,
    between_us: float = 0.0  # and between the waves
    worker_share: float = 0.0  # of a core
    engine_bytes: int = 0  # the maximum of the process
    worker_bytes: int = 0
    healthy: int = 0  # checks of /health with status 200, of all `looks`
    looks: int = 0
    slowest_look_s: float = 0.0
    slow: int = 0  # slow readers that were accepted in all,
    slow_now: int = 0
    slow_most: int = 0  # and at the same time

    def line(self) -> str:
        answers = " ".join(f"{status}x{count}" for status, count in sorted(self.statuses.items()))
        slow = f"; {self.slow} slow, {self.slow_most} at once" if self.slow else ""
        return (
            f"{self.name:12} {self.seconds:6.1f} {self.steps:7} {self.engine_us:9.1f} {self.worker_share:7.2f} "
            f"{self.engine_bytes / 1e6:9.1f} {self.worker_bytes / 1e6:9.1f} {self.healthy:4}/{self.looks:<4} "
            f"{self.slowest_look_s * 1e3:7.0f}  {answers}{slow}"
        )


HEAD = (
    "phase          s       steps  us/step  worker   engine MB worker MB health  slowest  answers\n"
    + " " * 44
    + ("cores                                ms")
)


class Overload:
    """One run against one server."""

    def __init__(self, server: LiveServer, plan: Plan) -> None:
        self.server, self.plan = server, plan
        host, port = server.url.removeprefix("http://").split(":")
        self.where = host, int(port)
        self.children = server.children()
        self.worker = self.children["worker 0"]
        self.phases: list[Phase] = []
        self.problems: list[str] = []
        self.now = Phase("start")  # the current phase
        self.answered = 0  # requests of the closed loop

    # ----------------------------------------------------------------------------------------------------- the campaign

    async def run(self) -> None:
        """Run all phases. Violated requirements are added to `problems`."""
        plan = self.plan
        before = await self.at_rest()
        async with self.closed_loop():
            await asyncio.sleep(min(plan.quiet_s, 5.0))  # until the batch is full
            begun, began_s = self.answered, time.monotonic()
            await self.phase("quiet", self.some_answers)
            rate = (self.answered - begun) / (time.monotonic() - began_s)
            print(f"sustainable: {rate:.1f} requests/s of {TOKENS} tokens", flush=True)
            phases: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
                ("10x", lambda: self.open_loop(10.0 * rate, plan.seconds)),
                ("slow readers", lambda: self.crowd(self.slow_reader, plan.readers, plan.seconds / 6)),
                ("leavers", lambda: self.waves(self.leaver, plan.leavers, plan.seconds)),
                ("bodies", lambda: self.waves(self.bad_body, plan.bodies, plan.seconds)),
                ("bytes", lambda: self.waves(self.bad_bytes, plan.bodies // 2, plan.seconds / 2)),
            )
            for name, do in phases:
                await self.phase(name, do)
                await asyncio.sleep(min(plan.quiet_s, 3.0))  # the work that the phase left behind is done by then
                await self.phase("quiet", lambda: asyncio.sleep(plan.quiet_s))
            await self.stopped_engine()
        after = await self.at_rest(before)
        self.judge(before, after)

    async def phase(self, name: str, do: Callable[[], Awaitable[None]]) -> None:
        """Run one action, and measure the server meanwhile."""
        self.now = phase = Phase(name)
        self.phases.append(phase)
        steps, worker_s = self.steps(), cpu_s(self.worker)
        began_s = time.monotonic()
        per_step: list[float] = []
        watching = [asyncio.create_task(self.watch(phase)), asyncio.create_task(self.weigh(per_step))]
        try:
            await do()
        finally:
            for one in watching:
                one.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        phase.seconds = time.monotonic() - began_s
        phase.steps = self.steps() - steps
        phase.engine_us = phase.engine_us or (median(per_step) if per_step else 0.0)
        phase.worker_share = (cpu_s(self.worker) - worker_s) / phase.seconds
        print(phase.line(), flush=True)

    async def watch(self, phase: Phase) -> None:
        """Read health and memory, twice a second."""
        while True:
            phase.engine_bytes = max(phase.engine_bytes, resident_bytes(self.children["engine"]))
            phase.worker_bytes = max(phase.worker_bytes, resident_bytes(self.worker))
            began_s = time.monotonic()
            status = await self.get("/health")
            phase.looks += 1
            phase.healthy += status == 200
            phase.slowest_look_s = max(phase.slowest_look_s, time.monotonic() - began_s)
            await asyncio.sleep(0.5)

    async def weigh(self, per_step: list[float]) -> None:
        """Record CPU time of the engine per step for each second; a last interval of over half a second counts too."""
        while True:
            steps, used_s, began_s = self.steps(), cpu_s(self.children["engine"]), time.monotonic()
            try:
                await asyncio.sleep(1.0)
            finally:
                new = self.steps() - steps
                if new and time.monotonic() - began_s > 0.5:
                    per_step.append((cpu_s(self.children["engine"]) - used_s) / new * 1e6)

    async def waves(self, one: Callable[[int], Awaitable[None]], count: int, over_s: float) -> None:
        """Send a number of requests of one kind, in waves.

        Each wave is as long as the rest before it, with which it is compared. On shared cores one quarter of a minute
        may be a fifth slower than the next, whatever the load.
        """
        waves, engine = self.plan.waves, self.children["engine"]
        size, found = -(-count // waves), list[tuple[float, float]]()

        async def per_step(do: Awaitable[None]) -> float:
            steps, used_s = self.steps(), cpu_s(engine)
            await do
            return (cpu_s(engine) - used_s) / max(1, self.steps() - steps) * 1e6

        for first in range(0, count, size):
            rest = await per_step(asyncio.sleep(over_s / waves))
            found.append((rest, await per_step(self.crowd(one, min(size, count - first), over_s / waves, first))))
        self.now.between_us, self.now.engine_us = (median(column) for column in zip(*found, strict=True))

    def judge(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Compare the measurements with the requirements."""
        for number, phase in enumerate(self.phases):
            found = list(phase.problems)
            if phase.name != "quiet" and phase.engine_us:
                quiet = (self.phases[number - 1].engine_us + self.phases[number + 1].engine_us) / 2
                around = phase.between_us or quiet
                more = phase.engine_us / around - 1.0
                print(f"{phase.name:12} {phase.engine_us:7.1f} us of CPU per step, {more:+.1%} of {around:.1f}")
                if more > self.plan.tolerance:
                    found.append(f"{more:+.1%} of CPU time per step, expected at most {self.plan.tolerance:+.0%}")
            if bad := {status: count for status, count in phase.statuses.items() if status not in FINE}:
                found.append(f"answers with status {bad}")
            if phase.healthy < phase.looks:
                found.append(f"health was well only {phase.healthy} of {phase.looks} times")
            self.problems += [f"{phase.name}: {one}" for one in found]
        if not self.phases[1].statuses[503]:
            self.problems.append("10x: nothing was refused, so it was no overload")
        grown = max(one.worker_bytes for one in self.phases) - before["worker_bytes"]
        bound = 150e6 + 0.4e6 * self.plan.readers
        if grown > bound:
            self.problems.append(f"the worker grew by {grown / 1e6:.0f} MB, expected at most {bound / 1e6:.0f}")
        print(f"at rest, before: {before}\nat rest, after:  {after}")
        for name in risen(before, after):
            self.problems.append(f"at the end: {name} {after[name]}, before {before[name]}")
        if after["alone_s"] > 2.0 * before["alone_s"] + 0.2 and self.plan.tolerance < math.inf:
            took_s = f"{after['alone_s']:.2f} s, before {before['alone_s']:.2f}"
            self.problems.append(f"at the end a request takes {took_s}")

    # ---------------------------------------------------------------------------------------------------------- clients

    async def some_answers(self) -> None:
        """Wait as long as planned, and until there are answers to count."""
        enough = self.answered + ROWS // 4
        await asyncio.sleep(self.plan.quiet_s)
        while self.answered < enough:
            await asyncio.sleep(0.1)

    @asynccontextmanager
    async def closed_loop(self) -> AsyncIterator[None]:
        """Run somewhat more clients than rows, each with one request at a time."""

        async def client(number: int) -> None:
            draw = random.Random(f"{self.plan.seed} closed {number}")
            while True:
                status = await self.complete(f"{draw.random()}", stream=number % 2 == 0)
                self.answered += status == 200
                if status != 200:
                    await asyncio.sleep(0.2 + draw.random() * 0.3)

        clients = [asyncio.create_task(client(number)) for number in range(ROWS + 16)]
        try:
            yield
            if died := [one for one in clients if one.done()]:
                self.problems.append(f"{len(died)} clients of the closed loop ended: {died[0]}")
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def open_loop(self, rate: float, seconds: float) -> None:
        """Send requests at a rate, without waiting for their answers, for this time and until one is refused."""
        draw = random.Random(f"{self.plan.seed} open")
        asked: set[asyncio.Task[int]] = set()
        due_s = time.monotonic()
        until_s = due_s + seconds
        while due_s < until_s or (not self.now.statuses[503] and due_s < until_s + REFUSED_S):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s += draw.expovariate(rate)
            task = asyncio.create_task(self.complete(f"{draw.random()}", stream=draw.random() < 0.5))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)

    async def crowd(self, one: Callable[[int], Awaitable[None]], count: int, over_s: float, first: int = 0) -> None:
        """Start this number of clients of one kind, numbered from `first` on, spread over this time."""
        draw = random.Random(f"{self.plan.seed} {one.__name__} {first}")

        async def enter(number: int, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await one(number)

        await asyncio.gather(*(enter(number, draw.random() * over_s) for number in range(first, first + count)))

    async def complete(self, prompt: str, *, stream: bool) -> int:
        """Send a valid request. Returns its status."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
        said = await self.exchange("/v1/completions", json.dumps(body).encode())
        return self.note(said, whole=True)

    async def slow_reader(self, number: int) -> None:
        """Request a stream in which each event repeats the whole answer so far, and read a byte a second."""
        params = {"max_new_tokens": TOKENS, "ignore_eos": True, "n": 2}
        body = json.dumps({"text": f"slow {number}", "sampling_params": params, "stream": True}).encode()
        until_s = time.monotonic() + READERS_S
        while time.monotonic() < until_s:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, self.where)
            reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
            try:
                writer.write(request("/generate", body))
                first = await within(READ_S, reader.readexactly(12))
                self.now.statuses[int(first[9:12])] += 1
                if first[9:12] == b"503":
                    await asyncio.sleep(1.0 + number % 70 / 70)  # as the server requires
                    continue
                await self.read_slowly(reader)
            except (OSError, asyncio.IncompleteReadError):
                pass  # closed by the server
            except TimeoutError:
                self.now.problems.append("a slow reader was not answered")
            finally:
                writer.transport.abort()
            return
        self.now.problems.append("a slow reader was never let in")

    async def read_slowly(self, reader: asyncio.StreamReader) -> None:
        """Read a byte a second, for a minute or until the server closes the connection."""
        phase = self.now
        phase.slow_now += 1
        phase.slow_most = max(phase.slow_most, phase.slow_now)
        phase.slow += 1
        try:
            for _ in range(round(self.plan.seconds)):
                await reader.readexactly(1)
                await asyncio.sleep(1.0)
        finally:
            phase.slow_now -= 1

    async def leaver(self, number: int) -> None:
        """Disconnect somewhere between connecting and the middle of an answer."""
        draw = random.Random(f"{self.plan.seed} leaver {number}")
        body = json.dumps({"prompt": "leave", "max_tokens": 30_000, "ignore_eos": True, "stream": True}).encode()
        raw = request("/v1/completions", body)
        reader, writer = await asyncio.open_connection(*self.where)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            stay = draw.randrange(4)
            writer.write(raw[: draw.randrange(len(raw))] if stay == 1 else raw if stay else b"")
            if stay == 3:
                first = await within(20.0, reader.readexactly(12))
                self.now.statuses[int(first[9:12])] += 1
                await within(20.0, reader.read(draw.randrange(1, 4000)))
            else:
                await asyncio.sleep(draw.random() * 0.2)
        if draw.random() < 0.5:
            writer.transport.abort()  # without closing it properly
        else:
            writer.close()

    async def bad_body(self, number: int) -> None:
        """A request with a body that is most likely not valid."""
        path, body = hostile.body(random.Random(f"{self.plan.seed} body {number}"))
        said = await self.exchange(path, body)
        if self.note(said) >= 500 and status_of(said) not in (501, 503, 504):
            self.now.problems.append(f"body {number}, {path}: {said[:80]!r}")

    async def bad_bytes(self, number: int) -> None:
        """Open a connection with bytes that may be HTTP, whole or piece by piece."""
        draw = random.Random(f"{self.plan.seed} bytes {number}")
        raw = hostile.http(draw)
        reader, writer = await asyncio.open_connection(*self.where)
        said = b""
        try:
            step = draw.choice((len(raw), len(raw), 1 + len(raw) // 7, 1 + len(raw) // 50))
            for at in range(0, len(raw), step):
                writer.write(raw[at : at + step])
                await writer.drain()
                if step < len(raw):
                    await asyncio.sleep(0)
            writer.write_eof()
            said = await within(30.0, reader.read())
        except TimeoutError:
            self.now.problems.append(f"bytes {number}: neither an answer nor an end")
        except OSError:
            pass
        finally:
            writer.transport.abort()
        if said:
            self.note(said)
            if not said.startswith(b"HTTP/1.1 "):
                self.now.problems.append(f"bytes {number}: {said[:60]!r}")

    # ----------------------------------------------------------------------------------------------------- measurements

    async def exchange(self, path: str, body: bytes) -> bytes:
        """The whole response to a request; empty if the server closed the connection at once."""
        try:
            reader, writer = await asyncio.open_connection(*self.where)
        except OSError:
            return b""
        try:
            writer.write(request(path, body))
            return await within(READ_S, reader.read())
        except TimeoutError:
            self.now.problems.append(f"{path} was not answered within {READ_S:g} s")
            return b""
        except OSError:
            return b""
        finally:
            writer.transport.abort()

    def note(self, said: bytes, *, whole: bool = False) -> int:
        """Count an answer, and check it. Returns its status; 0 for none."""
        status = status_of(said)
        self.now.statuses[status] += 1
        if status == 503 and b"\r\nretry-after: " not in said.lower():
            self.now.problems.append(f"503 without Retry-After: {said[:100]!r}")
        if whole and status == 200 and not said.rstrip().endswith((b"0", b"}")):
            self.now.problems.append(f"an answer broke off: {said[-60:]!r}")
        if not status:
            self.now.problems.append("a connection was closed without an answer")
        return status

    async def get(self, path: str) -> int:
        """The status of a GET; 0 if no answer comes in time."""
        try:
            async with asyncio.timeout(120):
                reader, writer = await asyncio.open_connection(*self.where)
                writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
                said = await reader.read()
                writer.close()
                return status_of(said)
        except (OSError, TimeoutError):
            return 0

    def state(self) -> Any:
        """The state that the engine reports."""
        return ask_operator(self.server.log.parent / "admin", "/get_server_info", KEY)[1]["state"]

    def steps(self) -> int:
        """Batches that the engine has launched so far."""
        return int(self.state()["launches"])

    async def at_rest(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Resources of the server without requests. With `before` the server has some time to return to those."""
        ends_s = time.monotonic() + 120.0
        while True:
            found = await self.at_rest_now()
            if before is None or not risen(before, found) or time.monotonic() > ends_s:
                return found

    async def at_rest_now(self) -> dict[str, Any]:
        """Resources of the server now, or as soon as the engine is idle."""
        ends_s = time.monotonic() + 120.0
        while not self.state()["idle"] and time.monotonic() < ends_s:
            await asyncio.sleep(0.1)
        await asyncio.sleep(7.0)  # idle connections are closed after five seconds
        began_s = time.monotonic()
        for number in range(3):
            await self.exchange("/v1/completions", json.dumps({"prompt": f"alone {number}", "max_tokens": 4}).encode())
        alone_s = (time.monotonic() - began_s) / 3
        state = self.state()
        load = json.loads((await self.exchange_get("/load")).partition(b"\r\n\r\n")[2])
        return {
            "answers": load["server_load"],
            "waiting": load["waiting_answers"],
            "running": state["running"],
            "pages in use": state["pages"] - state["pages_free"] - state["pages_cached"],
            "open files of the worker": len(list(Path(f"/proc/{self.worker}/fd").iterdir())),
            "worker_bytes": resident_bytes(self.worker),
            "engine_bytes": resident_bytes(self.children["engine"]),
            "alone_s": round(alone_s, 3),
        }

    async def exchange_get(self, path: str) -> bytes:
        """The whole response to a GET."""
        reader, writer = await asyncio.open_connection(*self.where)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        said = await reader.read()
        writer.close()
        return said

    async def stopped_engine(self) -> None:
        """Check that an engine which is stopped with work to do is reported as unhealthy, and as healthy afterwards."""
        os.kill(self.children["engine"], signal.SIGSTOP)
        try:
            ends_s = time.monotonic() + self.plan.stalled_s + 120.0
            while (status := await self.get("/health")) != 503 and time.monotonic() < ends_s:
                await asyncio.sleep(0.5)
            if status != 503:
                self.problems.append(f"/health says {status} while the engine is stopped")
        finally:
            os.kill(self.children["engine"], signal.SIGCONT)
        ends_s = time.monotonic() + 120.0
        while time.monotonic() < ends_s:
            if await self.get("/health") == 200:
                return
            await asyncio.sleep(0.1)
        self.problems.append("/health is not 200 two minutes after the engine went on")


async def within(seconds: float, read: Awaitable[bytes]) -> bytes:
    """The result of reading, if it comes in time.

    Raises TimeoutError. (asyncio.wait_for loses a cancel that comes with the last byte.)
    """
    async with asyncio.timeout(seconds):
        return await read


def request(path: str, body: bytes) -> bytes:
    """The HTTP text of a POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def status_of(said: bytes) -> int:
    """The status of an answer; 0 for none."""
    return int(said[9:12]) if said.startswith(b"HTTP/1.1 ") and said[9:12].isdigit() else 0


def risen(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the resources that exceed those at rest."""
    names = ("answers", "waiting", "open files of the worker", "running", "pages in use")
    return [name for name in names if after[name] > before[name] + (4 if name.startswith("open") else 0)]


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def overload(plan: Plan, folder: Path) -> list[str]:
    """Run the campaign. Returns the violated requirements."""
    (folder / "serve.toml").write_text(CONFIG.format(stalled_s=plan.stalled_s))
    (folder / "keys.toml").write_text(f"[[keys]]\ntenant = 'operator'\nkey = '{KEY}'\nadmin = true\n")
    arguments = ("--config", folder / "serve.toml", "--api-keys", folder / "keys.toml")
    arguments += ("--admin-socket", folder / "admin", "--log-level", "warning")
    with serving(folder / "log", *map(str, arguments)) as server:
        run = Overload(server, plan)
        print(f"seed {plan.seed}; {ROWS} rows\n{HEAD}", flush=True)
        asyncio.run(run.run())
        if errors := [line for line in server.text().splitlines() if "Traceback" in line or " ERROR " in line]:
            run.problems.append(f"the log has {len(errors)} errors: {errors[0]}")
    return run.problems


def main(arguments: list[str]) -> int:
    """Parse the arguments, run the campaign, print the result."""
    parser = argparse.ArgumentParser(prog="overload", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="half a minute instead of five")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the server's log there")
    given = parser.parse_args(arguments)
    shape = SHORT if given.short else Plan()
    plan = Plan(**{**shape.__dict__, "seed": given.seed})
    with tempfile.TemporaryDirectory(prefix="overload-") as name:
        problems = overload(plan, Path(name))
        if given.log is not None:
            shutil.copy(Path(name) / "log", given.log)
    print("\n".join(problems) if problems else "everything holds")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
