"""A journal that `lockstep serve` wrote under load is replayed to the last digest, also when the server was killed."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("zmq", reason="the server is not installed")

from lockstep.core.contract.events import RequestArrived, RequestCancelled, RequestFinished, RequestRetracted
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold, replay
from lockstep.sim.rerun.rerun import rerun
from tests.support.live_server import EMULATED, LiveServer, serving, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

CLIENTS = 6
REQUESTS = 4  # of each client
TIGHT = [f"--set={setting}" for setting in ("reserve=on_demand", "max_running_requests=8", "chunked_prefill_size=64")]
KINDS = {
    "emulated": ("qwen3-0.6b", (*EMULATED, "--speed", "0.5", "--set=pages=36")),
    "model": ("demo", ("--device", "cpu", "--set=pages=20")),
}


class Load:
    """Clients that send one request after another until they are done or the server is gone. Some disconnect early.

    With `endless` they are done when the load is closed.
    """

    def __init__(self, url: str, model: str, tokens: int, *, endless: bool = False) -> None:
        self._url, self._model, self._tokens, self._endless = url, model, tokens, endless
        self.ended: list[str] = []  # how each request ended
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive()

    def _client(self, client: int) -> None:
        for number in itertools.count():
            if self._over.is_set() if self._endless else number == REQUESTS:
                break
            try:
                self.ended.append(self._ask(client, number))
            except (OSError, http.client.HTTPException) as error:
                self.ended.append(f"lost: {error}")

    def leave_one(self) -> None:
        """One more client that disconnects in the middle, or, if it is late, after the end."""
        self.ended.append(self._ask(CLIENTS - 1, 2))

    def _ask(self, client: int, number: int) -> str:
        content = {
            "model": self._model,
            "prompt": "Return the sum of " + "one and " * (10 * (number % REQUESTS)) + f"{client}",
            "max_tokens": self._tokens + 10 * client,
            "stream": True,
            "temperature": 0.7,
            "seed": client,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            for seen, line in enumerate(answer):
                if number % 3 == 2 and seen > 8:
                    return "left"
                if line.startswith(b'data: {"error":'):  # and not a token of the model's text
                    return line.decode()
        return "answered"


def steps_of(run: Path) -> int:
    """Number of events on disk; a writer may be active."""
    with contextlib.suppress(Exception):
        return read_journal(run).tail.steps
    return 0


def under_way(run: Path) -> int:
    """Requests of a journal that have arrived and not ended."""
    arrived = sum(isinstance(event, RequestArrived) for event, _ in fold(run))
    return arrived - sum(isinstance(one, RequestFinished) for _, step in fold(run) for one in step.decided)


def cancelled(run: Path) -> bool:
    """Whether the cancel of a client that disconnected is on disk; a writer may be active."""
    with contextlib.suppress(Exception):
        return any(isinstance(record.event, RequestCancelled) for record in read_journal(run).events())
    return False


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LiveServer, str, Path]]:
    """A server with a pool that is too small for the load, the name of its model, its run folder."""
    if request.param == "model":
        pytest.importorskip("torch", reason="the GPU runtime is not installed")
    model, arguments = KINDS[request.param]
    run = tmp_path / "run"
    with serving(tmp_path / "log", *arguments, *TIGHT, "--journal", str(run), "--shutdown-s", "1") as server:
        yield server, model, run


def test_a_served_journal_under_load_replays_strictly(loaded: tuple[LiveServer, str, Path]) -> None:
    server, model, run = loaded
    with Load(server.url, model, tokens=60) as load:
        pass
    ends_s = time.monotonic() + 300
    while not cancelled(run):  # all clients that disconnected may have been so late that nothing was left to cancel
        assert time.monotonic() < ends_s, "no client's leaving is noticed"
        load.leave_one()
    ended = Counter(load.ended)
    assert ended["answered"] >= CLIENTS
    assert ended.keys() <= {"answered", "left"}
    assert server.end() == 0
    done = replay(run)
    assert done.tail is not None
    assert done.tail.verdict == "clean"
    assert done.steps > 200
    kinds = Counter(type(event).__name__ for event, _ in fold(run))
    assert kinds["RequestArrived"] == len(load.ended)
    assert kinds["RequestCancelled"] >= 1
    assert any(isinstance(one, RequestRetracted) for _, step in fold(run) for one in step.decided)
    simulated = rerun(run)
    assert simulated.difference is None
    assert simulated.given == {name: kinds[name] for name in ("RequestArrived", "RequestCancelled")}


def test_a_journal_whose_engine_was_killed_replays_to_its_last_whole_record(
    loaded: tuple[LiveServer, str, Path], tmp_path: Path
) -> None:
    server, model, run = loaded
    dead = tmp_path / "dead"
    with Load(server.url, model, tokens=150, endless=True):
        engine = server.children()["engine"]

        def stopped_in_the_middle() -> bool:
            """No process writes during the copy: a kill would leave exactly these files."""
            if steps_of(run) <= 150:
                return False
            os.kill(engine, signal.SIGSTOP)
            until(lambda: Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0] == "T", 120)
            shutil.rmtree(dead, ignore_errors=True)
            shutil.copytree(run, dead)
            if steps_of(dead) > 150 and under_way(dead) > 0:
                return True
            os.kill(engine, signal.SIGCONT)  # all have their answers, and no next one is requested yet
            return False

        until(stopped_in_the_middle, 300)
        os.kill(engine, signal.SIGKILL)
    server.end()

    done = replay(dead)
    assert done.tail is not None
    assert done.tail.closed is False
    assert done.steps > 150
    assert done.batches > 50
    assert under_way(dead) > 0  # the engine died with open requests
    assert rerun(dead).difference is None
    assert replay(run).steps >= done.steps  # replay continues to the point that the server reached
