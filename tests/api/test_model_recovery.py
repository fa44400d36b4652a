"""A real model behind a server whose engine is killed: the same texts, tokens and logprobs as without."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("torch", reason="the GPU runtime is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import LiveServer, serving, until  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

COMMON = {"stream": True, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "logprobs": 2},
    {"prompt": "import ", "max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1},
    {"prompt": "class A", "max_tokens": 60, "temperature": 0.8, "seed": 9, "stop": ["\n\n"], "min_tokens": 30},
    {"prompt": "return", "max_tokens": 30, "temperature": 0.9, "seed": 1, "presence_penalty": 1.0, "top_k": 20},
]


class Reader:
    """Streams of all bodies at once: by body and sample the text, why it ended, tokens and logprobs."""

    def __init__(self, server: LiveServer) -> None:
        self.found: dict[tuple[int, int], dict[str, Any]] = {}
        self.tokens = 0
        self._threads = [
            threading.Thread(target=self._read, args=(server.url, number)) for number in range(len(BODIES))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, url: str, number: int) -> None:
        body = {**COMMON, **BODIES[number]}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line[6:])
                assert "error" not in said, said
                for choice in said["choices"]:
                    key = (number, choice["index"])
                    one = self.found.setdefault(
                        key, {"text": "", "end": None, "tokens": [], "logprobs": [], "tops": []}
                    )
                    one["text"] += choice["text"]
                    one["end"] = choice["finish_reason"] or one["end"]
                    beside = choice.get("logprobs") or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
                    one["tokens"] += beside["tokens"]
                    one["logprobs"] += beside["token_logprobs"]
                    one["tops"] += [sorted(tops) for tops in beside["top_logprobs"]]
                    self.tokens += 1

    def wait(self) -> dict[tuple[int, int], dict[str, Any]]:
        """What came, when all have ended."""
        for thread in self._threads:
            thread.join(300)
        return self.found


def test_killed_twice_a_model_says_what_it_says_undisturbed(tmp_path: Path) -> None:
    settings = ("--device", "cpu", "--numerics", "invariant", "--shutdown-s", "1")
    with serving(tmp_path / "log", *settings) as server:
        undisturbed = Reader(server).wait()
        reader = Reader(server)
        for kill in range(2):
            before = reader.tokens
            until(lambda before=before: reader.tokens > before + 8, 120)
            os.kill(server.children()["engine"], signal.SIGKILL)
            until(lambda kill=kill: f"engine {kill + 1} serves" in server.text(), 120)
        found = reader.wait()
        assert "recovered 0 requests" not in server.text()
    assert set(found) == set(undisturbed) == {(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)}
    for key, one in found.items():
        wanted = undisturbed[key]
        for name in ("text", "end", "tokens", "tops"):
            assert one[name] == wanted[name], (key, name)
        assert one["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)  # a CPU's sums depend on the batch
