"""Clients that take up their answers again, below a server of which every process is killed.

Each request has an `Idempotency-Key`, so its answer is kept. A client whose connection breaks or stream ends
with an error, comes back: with `GET /v1/streams/{id}` and `Last-Event-ID` if it has the id of its stream, with the
same request otherwise. The events that it receives over all connections must have consecutive numbers, and their text
is compared with what the answer must be. Clients also leave by themselves.

    engine      the next generation continues
    worker      the worker in its place continues the answers that it made
    launcher    its children end; the server is started again on the same journal and port
    server      all processes at once; the server is started again, and sometimes killed while it starts
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.api.processes.children import is_ready
from tests.support.kills import ARGUMENTS, Tally, ask, difference_of
from tests.support.live_server import LiveServer, launcher_of_journal, processes

KINDS = ("engine", "worker", "launcher", "server")
WEIGHTS = (55, 30, 7, 8)
GIVEN_UP_S = 900.0  # after the last event of a request; the campaign may be stopped (SIGSTOP) for minutes
LEAVES = 0.004  # probability, per event, that a client closes its connection
READ_AGAIN = 0.1  # part of the ended streams that are read a second time, from their first event on
STREAMED = 0.85  # part of the requests
OTHER_PATHS = 0.3
UNREADY_IN_A_ROW = 2  # workers killed before they were ready; five in a row end the server
IN_A_ROW = 10  # kills without an event between them; a starved machine could otherwise complete nothing for minutes
START_TRIES = 30
START_DELAY_S = 0.3
KILLED_WHILE_STARTING = 0.25
GAP_S = (0.05, 2.0)  # between two kills


@dataclass
class Returned(Tally):
    """What became of the requests, and how clients came back."""

    broken: int = 0  # connections that ended early, answers with 503 and streams that ended with an error
    taken_up: int = 0  # GET /v1/streams/{id}
    repeated: int = 0  # the same request again
    left: int = 0  # connections that clients closed
    read_again: int = 0
    back_s: list[float] = field(default_factory=list)  # from the end of a connection to the next event


@dataclass
class Place:
    """Where the server is now."""

    address: str


@dataclass(frozen=True, kw_only=True)
class Known:
    """A request, and the texts and ends of its choices."""

    path: str
    body: dict[str, Any]
    texts: list[str]
    reasons: list[str]


class Reading:
    """What a client has of one answer, over all its connections.

    Args:
        path: of the request.
        choices: number of choices.
    """

    def __init__(self, path: str, choices: int) -> None:
        self.path = path
        self.texts, self.reasons = [""] * choices, [""] * choices
        self.events: list[bytes] = []
        self.over = False

    def take(self, data: bytes) -> None:
        """Add the data of the next event."""
        self.events.append(data)
        if data == b"[DONE]":
            self.over = True
            return
        message = json.loads(data)
        if self.path == "/generate":
            self.texts[0] = message["text"]
            self.reasons[0] = (message["meta_info"]["finish_reason"] or {}).get("type", "")
        elif self.path == "/v1/messages":
            if message["type"] == "content_block_delta":
                self.texts[0] += message["delta"]["text"]
            elif message["type"] == "message_delta":
                self.reasons[0] = message["delta"]["stop_reason"]
            self.over |= message["type"] == "message_stop"
        elif self.path == "/v1/responses":
            if message["type"] == "response.output_text.delta":
                self.texts[0] += message["delta"]
            elif message["type"] in ("response.completed", "response.incomplete"):
                self.reasons[0], self.over = message["response"]["status"], True
        else:
            self._take_choices(message["choices"])

    def take_whole(self, data: bytes) -> None:
        """Add an answer that is no stream."""
        self._take_choices(json.loads(data)["choices"])
        self.over = True

    def _take_choices(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            index = choice["index"]
            said = choice["text"] if "text" in choice else choice.get("delta", {}).get("content")
            self.texts[index] += said or ""
            self.reasons[index] = choice["finish_reason"] or self.reasons[index]


class Left(Exception):
    """Raised when a client closes its connection by itself."""


def events_of(answer: http.client.HTTPResponse) -> Iterator[tuple[int | None, bytes]]:
    """Yield number and data of the events that arrive whole; None: an event without a number."""
    number: int | None = None
    data = b""
    while line := answer.readline():
        if line.startswith(b"id: "):
            number = int(line[4:])
        elif line.startswith(b"data: "):
            data = line[6:].rstrip(b"\n")
        elif line == b"\n" and data:
            yield number, data
            number, data = None, b""


@dataclass
class ReturningClient:
    """One request until its answer is complete.

    Args:
        place: of the server.
        known: the request, and what its answer must be.
        key: the `Idempotency-Key`.
        rng: when the client leaves, and how long it stays away.
        until: the request is given up when it returns True.
    """

    place: Place
    known: Known
    key: str
    rng: random.Random
    tally: Returned
    until: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.reading = Reading(self.known.path, len(self.known.texts))
        self.stream_id = ""
        self.broken_s: float | None = None
        self.heard_s = time.monotonic()

    def run(self) -> None:
        """Read the answer, over as many connections as needed, and compare it."""
        try:
            while not self.reading.over:
                if time.monotonic() - self.heard_s > GIVEN_UP_S:
                    self._fault("lost", f"no event for {GIVEN_UP_S:g} s")
                    return
                if self.until():
                    return
                try:
                    self._connect()
                except Left:
                    self.tally.left += 1
                except (OSError, http.client.HTTPException):
                    self._break()
            self._compare()
        except (KeyError, ValueError, IndexError) as error:
            self._fault("wrong", f"{type(error).__name__}: {error}")
        except _Faulty:
            pass

    def _fault(self, kind: str, what: str) -> None:
        self.tally.fault(kind, f"{what}; {self.known.path} {self.key} {self.stream_id} {self.known.body}")

    def _break(self) -> None:
        if self.broken_s is None:
            self.broken_s = time.monotonic()
        with self.tally.lock:
            self.tally.broken += 1
        time.sleep(self.rng.uniform(0.02, 0.3))

    def _connect(self) -> None:
        connection = http.client.HTTPConnection(self.place.address, timeout=GIVEN_UP_S)
        with contextlib.closing(connection):
            if self.stream_id:
                last = len(self.reading.events) - 1
                headers = {} if last < 0 else {"Last-Event-ID": str(last)}
                connection.request("GET", f"/v1/streams/{self.stream_id}", headers=headers)
            else:
                headers = {"Content-Type": "application/json", "Idempotency-Key": self.key}
                connection.request("POST", self.known.path, json.dumps(self.known.body), headers)
            answer = connection.getresponse()
            if answer.status == 503:
                answer.read()
                self._break()
                return
            if answer.status != 200:
                said = answer.read()[:300]
                self._fault("lost" if answer.status == 404 else "refused", f"{answer.status} {said!r}")
                raise _Faulty
            with self.tally.lock:
                if self.stream_id:
                    self.tally.taken_up += 1
                elif self.broken_s is not None:
                    self.tally.repeated += 1
            if not self.known.body.get("stream"):
                self.reading.take_whole(answer.read())
                self._heard()
                return
            self.stream_id = answer.headers["X-Stream-Id"]
            self._read(answer)

    def _read(self, answer: http.client.HTTPResponse) -> None:
        for number, data in events_of(answer):
            if number is None:  # an error of this connection, and no event of the answer
                if "error" not in json.loads(data):
                    self._fault("wrong", f"an event without a number: {data[:200]!r}")
                    raise _Faulty
                break
            expected = len(self.reading.events)
            if number != expected:
                self._fault("lost" if number > expected else "doubled", f"event {number} after {expected - 1}")
                raise _Faulty
            self.reading.take(data)
            self._heard()
            if self.reading.over:
                return
            if self.rng.random() < LEAVES:
                raise Left
        self._break()

    def _heard(self) -> None:
        self.heard_s = self.tally.heard_s = time.monotonic()
        if self.broken_s is not None:
            with self.tally.lock:
                self.tally.back_s.append(self.heard_s - self.broken_s)
            self.broken_s = None

    def _compare(self) -> None:
        known, found = self.known, self.reading
        with self.tally.lock:
            self.tally.requests += 1
            self.tally.tokens += sum(text.count(" w") for text in known.texts)
        for index, (got, wanted) in enumerate(zip(found.texts, known.texts, strict=True)):
            if got != wanted:
                kind, what = difference_of(got, wanted)
                self._fault(kind, f"choice {index}: {what}")
            elif found.reasons[index] != known.reasons[index]:
                self._fault("reason", f"{found.reasons[index]}, not {known.reasons[index]}")
        if self.stream_id and self.rng.random() < READ_AGAIN:
            self._read_again()

    def _read_again(self) -> None:
        """Read the ended stream from its first event on: every event must be as it was."""
        wanted = list(enumerate(self.reading.events))
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(self.place.address, timeout=GIVEN_UP_S)
            with contextlib.closing(connection):
                connection.request("GET", f"/v1/streams/{self.stream_id}")
                answer = connection.getresponse()
                if answer.status != 200:
                    if answer.status != 503:
                        self._fault("lost", f"read again: {answer.status} {answer.read()[:200]!r}")
                    return
                again = list(events_of(answer))[: len(wanted)]
                whole = len(again) == len(wanted)
                if any(one != other for one, other in zip(again, wanted, strict=False) if one[0] is not None):
                    self._fault("wrong", "read again: other events")
                with self.tally.lock:
                    self.tally.read_again += whole


class _Faulty(Exception):
    """The request ended with a fault, which is in the tally."""


# ------------------------------------------------------------------------------------------------------------ requests


def known_completion(rng: random.Random, name: str, tokens: tuple[int, int]) -> Known:
    """Return a completion whose answer is computed here."""
    asked = ask(rng, name, tokens)
    body = {**asked.body, "stream": rng.random() < STREAMED}
    return Known(path="/v1/completions", body=body, texts=asked.texts, reasons=asked.reasons)


def other_requests(address: str, seed: int, count: int, tokens: tuple[int, int]) -> list[Known]:
    """Return streams of the other endpoints, with the answers that a server gives that is not disturbed."""
    rng, found = random.Random(f"{seed} other"), []
    for number in range(count):
        text, most = f"{seed} {number} {'y' * rng.randrange(100)}", rng.randint(*tokens)
        drawn = {"temperature": 1.0, "seed": rng.randrange(2**31)} if number % 3 else {"temperature": 0.0}
        messages = [{"role": "user", "content": text}]
        path, body = (
            ("/v1/chat/completions", {"messages": messages, "max_tokens": most, "ignore_eos": True, **drawn}),
            ("/v1/messages", {"messages": messages, "max_tokens": most, "temperature": 0.0}),
            ("/v1/responses", {"input": text, "max_output_tokens": most, "store": False, **drawn}),
            ("/generate", {"text": text, "sampling_params": _native(most, drawn)}),
        )[number % 4]
        body["stream"] = True
        plain = Known(path=path, body=body, texts=[""], reasons=[""])
        reading, tally = Reading(path, 1), Returned()
        client = ReturningClient(Place(address), plain, f"other-{seed}-{number}", random.Random(0), tally)
        client.reading = reading
        while not reading.over:
            with contextlib.suppress(Left):
                client._connect()
        found.append(Known(path=path, body=body, texts=reading.texts, reasons=reading.reasons))
    return found


def _native(most: int, drawn: dict[str, Any]) -> dict[str, Any]:
    renamed = {"sampling_seed" if name == "seed" else name: value for name, value in drawn.items()}
    return {"max_new_tokens": most, "ignore_eos": True, **renamed}


# ------------------------------------------------------------------------------------------------------------ campaign


@dataclass
class Outcome:
    """A campaign, as figures."""

    kills: Counter[str]
    seconds: float
    tally: Returned
    starts: int
    failed_starts: int

    def text(self) -> str:
        """Return the figures in words."""
        tally, back = self.tally, sorted(self.tally.back_s)
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kills.items())
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.faults.items()))
        shown = [
            f"{self.kills.total()} kills ({kinds}) in {self.seconds:.0f} s",
            f"{tally.requests} requests, {tally.tokens:,} tokens",
            f"FAULTS: {faults}" if faults else "0 lost, 0 doubled, 0 wrong, every answer complete",
            (
                f"{tally.broken} broken connections, {tally.left} left, {tally.taken_up} streams taken up, "
                f"{tally.repeated} requests repeated, {tally.read_again} ended streams read again"
            ),
            f"{self.starts} starts of the server, {self.failed_starts} of them failed or were killed",
        ]
        if back:
            p99 = back[round(0.99 * (len(back) - 1))]
            shown.append(f"away: median {back[len(back) // 2]:.3f} s, p99 {p99:.3f}, max {back[-1]:.3f}")
        return "\n".join([*shown, *tally.first])


class Supervised:
    """A server that is started again on the same journal and port whenever it ended, as by a service manager.

    Args:
        folder: of journal and logs.
        arguments: of `lockstep serve`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.place = Place(f"127.0.0.1:{port}")
        self.folder, self.journal = folder, str(folder / "run")
        self.arguments = (*arguments, "--journal", self.journal, "--port", str(port))
        self.starts = self.failed = 0
        self.server = self._start()

    def _start(self) -> LiveServer:
        self.starts += 1
        return LiveServer(*self.arguments, log=self.folder / f"log{self.starts}")

    def start_again(self, killed_after_s: float | None = None) -> None:
        """Start the server. Raises AssertionError if it does not start.

        Args:
            killed_after_s: all processes are killed that long after the first try; None: they are not.
        """
        if killed_after_s is not None:
            timer = threading.Timer(killed_after_s, self._kill_starting)
            timer.start()
        for left in reversed(range(START_TRIES)):
            try:
                self.server = self._start()
            except AssertionError:
                self.failed += 1
                if not left:
                    raise
                time.sleep(START_DELAY_S)
            else:
                break
        if killed_after_s is not None:
            timer.cancel()
            timer.join()
            if self.server.process.poll() is not None:  # killed at the moment when it was ready
                self.start_again()

    def _kill_starting(self) -> None:
        if launcher := launcher_of_journal(self.journal):
            kill_tree(launcher)

    def kill_all(self) -> None:
        """Kill every process of the server."""
        kill_tree(self.server.process.pid)
        self.server.end()

    def kill_launcher(self) -> None:
        """Kill the launcher alone."""
        self.server.end(signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it."""
    found, table = [pid], processes()
    for one in found:
        found += [child for child, (parent, _) in table.items() if parent == one]
    for one in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def campaign(
    supervised: Supervised,
    *,
    seed: int,
    kills: int,
    streams: int = 32,
    gap_s: tuple[float, float] = GAP_S,
    tokens: tuple[int, int] = (20, 150),
    kinds: tuple[str, ...] = KINDS,
    weights: tuple[int, ...] = WEIGHTS,
    progress: Callable[[str], object] = lambda _: None,
) -> Outcome:
    """Kill processes at random instants, below clients that send one request after another and come back.

    Args:
        streams: number of clients.
        gap_s: shortest and longest time between two kills, in seconds.
        tokens: fewest and most tokens of a request.
        kinds, weights: what is killed, and how often.
    """
    rng, tally, enough = random.Random(seed), Returned(), threading.Event()
    others = other_requests(supervised.place.address, seed, 24, tokens)
    failed = threading.Event()  # the server does not start any more

    def repeat(number: int) -> None:
        own, count = random.Random(f"{seed} {number}"), 0
        while not enough.is_set():
            name = f"{seed}-{number}-{count}"
            known = own.choice(others) if own.random() < OTHER_PATHS else known_completion(own, name, tokens)
            ReturningClient(supervised.place, known, name, own, tally, failed.is_set).run()
            count += 1

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    victims = _Victims(supervised, rng, tally)
    done = Counter[str]()
    try:
        while done.total() < kills and not tally.faults:
            time.sleep(rng.uniform(*gap_s))
            kind = rng.choices(kinds, weights)[0]
            if victims.kill(kind):
                done[kind] += 1
                if done.total() % 20 == 0:
                    progress(f"{done.total()} kills, {tally.requests} requests, {tally.taken_up} taken up")
            if supervised.server.process.poll() is not None:
                failed.set()
                tally.fault("server", f"it ended with {supervised.server.process.returncode}")
    except AssertionError as error:
        failed.set()
        tally.fault("server", f"it does not start: {str(error)[-1500:]}")
    enough.set()
    for thread in threads:
        thread.join()
    return Outcome(done, time.monotonic() - began_s, tally, supervised.starts, supervised.failed)


class _Victims:
    """Kills of each kind, with what must be true before."""

    def __init__(self, supervised: Supervised, rng: random.Random, tally: Returned) -> None:
        self._supervised, self._rng, self._tally = supervised, rng, tally
        self._killed = set[int]()
        self._unready = self._in_a_row = 0
        self._heard_s = 0.0

    def kill(self, kind: str) -> bool:
        """Kill something of a kind. Returns whether there was something to kill."""
        supervised = self._supervised
        if self._tally.heard_s > self._heard_s:
            self._heard_s, self._in_a_row = self._tally.heard_s, 0
        if self._in_a_row >= IN_A_ROW:
            return False
        if kind == "launcher":
            supervised.kill_launcher()
            supervised.start_again(self._while_starting())
        elif kind == "server":
            supervised.kill_all()
            supervised.start_again(self._while_starting())
        else:
            killed = self._kill_child(kind)
            self._in_a_row += killed
            return killed
        self._unready = 0
        self._in_a_row += 1
        return True

    def _while_starting(self) -> float | None:
        return self._rng.uniform(0.2, 4.0) if self._rng.random() < KILLED_WHILE_STARTING else None

    def _kill_child(self, kind: str) -> bool:
        server = self._supervised.server
        found = sorted((name, pid) for name, pid in server.children().items() if name.split()[0] == kind)
        found = [one for one in found if one[1] not in self._killed]
        if not found:
            return False
        name, pid = self._rng.choice(found)
        if kind == "worker":
            ready = is_ready(server.folder(), int(name.split()[1]))
            if not ready and self._unready >= UNREADY_IN_A_ROW:
                return False
            self._unready = 0 if ready else self._unready + 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        return True


def supervised(
    folder: Path, *, speed: float = 0.1, snapshot_s: float = 2.0, workers: int = 2, restarts: int = 10_000, dp: int = 1
) -> Supervised:
    """Start an emulated server for a campaign."""
    given = ("--speed", str(speed), "--snapshot-s", str(snapshot_s), "--api-workers", str(workers))
    given += ("--restarts", str(restarts), "--dp", str(dp), "--kept-answers", "1000")
    return Supervised(folder, *ARGUMENTS, *given)
