"""A journal that `lockstep serve` wrote under load is decided again to the last digest, also when it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("zmq", reason="the server is not installed")

from lockstep.core.events import RequestArrived, RequestCancelled, RequestFinished, RequestRetracted
from lockstep.core.journal import read_journal
from lockstep.core.replay import fold, replay
from tests.support.live_server import EMULATED, LiveServer, serving, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

CLIENTS = 6
REQUESTS = 4  # of each
TIGHT = [f"--set={setting}" for setting in ("reserve=on_demand", "max_running_requests=8", "chunked_prefill_size=64")]
KINDS = {
    "emulated": ("qwen3-0.6b", (*EMULATED, "--speed", "0.5", "--set=pages=36")),
    "model": ("demo", ("--device", "cpu", "--set=pages=20")),
}


class Load:
    """Clients that ask one thing after another until they are done or the server is gone. Some leave in the middle."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        self._url, self._model, self._tokens = url, model, tokens
        self.ended: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _client(self, client: int) -> None:
        for number in range(REQUESTS):
            try:
                self.ended[self._ask(client, number)] += 1
            except (OSError, urllib.error.HTTPError):
                self.ended["lost"] += 1

    def _ask(self, client: int, number: int) -> str:
        content = {
            "model": self._model,
            "prompt": "Return the sum of " + "one and " * (10 * number) + f"{client}",
            "max_tokens": self._tokens + 10 * client,
            "stream": True,
            "temperature": 0.7,
            "seed": client,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            for seen, line in enumerate(answer):
                if number % 3 == 2 and seen > 8:
                    return "left"
                if b'"error"' in line:
                    return "error"
        return "answered"


def steps_of(run: Path) -> int:
    """Events that are on disk; a writer may be at work."""
    with contextlib.suppress(Exception):
        return read_journal(run).tail.steps
    return 0


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LiveServer, str, Path]]:
    """A server with a pool that is too small for what is to come, its model's name, its run folder."""
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
    assert load.ended["answered"] >= CLIENTS
    assert load.ended["left"] >= 1
    assert server.end() == 0
    done = replay(run)
    assert done.tail is not None
    assert done.tail.verdict == "clean"
    assert done.steps > 200
    kinds = Counter(type(event) for event, _ in fold(run))
    assert kinds[RequestArrived] == CLIENTS * REQUESTS
    assert kinds[RequestCancelled] >= 1
    assert any(isinstance(one, RequestRetracted) for _, step in fold(run) for one in step.decided)


def test_a_journal_whose_engine_was_killed_replays_to_its_last_whole_record(
    loaded: tuple[LiveServer, str, Path], tmp_path: Path
) -> None:
    server, model, run = loaded
    dead = tmp_path / "dead"
    with Load(server.url, model, tokens=150):
        until(lambda: steps_of(run) > 150, 60)
        engine = server.children()["engine"]
        os.kill(engine, signal.SIGSTOP)  # nobody writes while it is copied: what a kill leaves is what lies there now
        shutil.copytree(run, dead)
        os.kill(engine, signal.SIGKILL)
    server.end()

    done = replay(dead)
    assert done.tail is not None
    assert done.tail.closed is False
    assert done.steps > 150
    assert done.batches > 50
    arrived = sum(isinstance(event, RequestArrived) for event, _ in fold(dead))
    finished = sum(isinstance(one, RequestFinished) for _, step in fold(dead) for one in step.decided)
    assert arrived > finished  # it died in the middle
    assert replay(run).steps >= done.steps  # and so it stands where the server left it
