"""A real model behind a server with an engine that is killed: the same texts, tokens and logprobs as without a kill."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("torch", reason="the GPU runtime is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.host.router_check import verify_router  # noqa: E402
from lockstep.runtime.demo_model import demo_model_folder  # noqa: E402
from tests.support.kills import campaign  # noqa: E402
from tests.support.live_server import LiveServer, serving, until  # noqa: E402
from tests.support.model_streams import DEMO, KINDS, ModelStreams, requests_of  # noqa: E402
from tests.support.routed import facts  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def some_embeddings() -> str:
    """Rows of the size of the demo model's embeddings, base64 of a .npy file."""
    size = json.loads((demo_model_folder() / "config.json").read_bytes())["hidden_size"]
    file = io.BytesIO()
    np.save(file, np.random.default_rng(3).normal(0.0, 0.05, (24, size)).astype(np.float32))
    return base64.b64encode(file.getvalue()).decode()


COMMON = {"stream": True, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "logprobs": 2},
    {"prompt": "import ", "max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1},
    {"prompt": "class A", "max_tokens": 60, "temperature": 0.8, "seed": 9, "stop": ["\n\n"], "min_tokens": 30},
    {"prompt": "return", "max_tokens": 30, "temperature": 0.9, "seed": 1, "presence_penalty": 1.0, "top_k": 20},
    {"prompt_embeds": some_embeddings(), "max_tokens": 40, "temperature": 0},
]


class Reader:
    """Streams of all bodies at once: by body and sample the text, the finish reason, tokens and logprobs."""

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

    def ended(self) -> bool:
        """Whether all streams have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The results, when all streams have ended."""
        for thread in self._threads:
            thread.join(300)
        return self.found


Found = dict[tuple[int, int], dict[str, Any]]
SETTINGS = DEMO


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    with serving(tmp_path_factory.mktemp("undisturbed") / "log", *SETTINGS) as server:
        return Reader(server).wait()


def equal(found: Found, wanted: Found) -> None:
    assert set(found) == set(wanted) == {(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)}
    for key, one in found.items():
        for name in ("text", "end", "tokens", "tops"):
            assert one[name] == wanted[key][name], (key, name)
        assert one["logprobs"] == pytest.approx(wanted[key]["logprobs"], abs=1e-4)  # a CPU's sums depend on the batch


def test_killed_twice_at_any_instant_a_model_gives_its_undisturbed_answers(undisturbed: Found, tmp_path: Path) -> None:
    with serving(tmp_path / "log", *SETTINGS) as server:
        reader = Reader(server)
        for kill in range(2):
            before = reader.tokens
            until(lambda before=before: reader.tokens > before + 8 or reader.ended())
            os.kill(server.children()["engine"], signal.SIGKILL)
            until(lambda kill=kill: f"engine {kill + 1} serves" in server.text())
        equal(reader.wait(), undisturbed)


def test_killed_at_random_instants_a_model_gives_its_undisturbed_answers(tmp_path: Path) -> None:
    """Chats, logprobs, usage and grammars, of requests of all kinds: `make kill-campaign ARGS=--demo-model`."""
    seed = random.SystemRandom().randrange(2**31)
    with serving(tmp_path / "log", *SETTINGS, "--restarts", "1000") as server:
        expected = ModelStreams(server, requests_of(seed, len(KINDS)))
        outcome = campaign(server, seed=seed, kills=5, streams=6, client=expected.client)
        told = f"python -m tests.campaigns.kills --demo-model --seed {seed} --kills 5 --streams 6"
        told += f" --requests {len(KINDS)}\n{outcome.text()}\n{server.text()[-2000:]}"
    assert not outcome.tally.faults, told
    assert outcome.kills == 5, told
    assert outcome.tally.requests >= 6, told


def test_logprobs_that_were_written_and_not_sent_are_sent_by_the_next_engine(
    undisturbed: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "written:9:3:BatchFinished")
    with serving(tmp_path / "log", *SETTINGS) as server:
        equal(Reader(server).wait(), undisturbed)
        assert server.text().count(" s after the end of the previous generation") == 3


def test_with_one_of_two_engines_killed_answers_equal_the_undisturbed_ones(undisturbed: Found, tmp_path: Path) -> None:
    """The demo model behind a router: each engine has some of the requests, and one is restarted."""
    run = tmp_path / "run"
    two = ("--dp", "2", "--router", "least_tokens", "--journal", str(run))
    with serving(tmp_path / "log", *SETTINGS, *two) as server:
        reader = Reader(server)
        until(lambda: reader.tokens > 12)
        os.kill(server.children()["engine 1"], signal.SIGKILL)
        until(lambda: "engine 1, generation 1, serves" in server.text())
        equal(reader.wait(), undisturbed)
        assert "engine 0, generation" not in server.text()
        about = httpx2.get(f"{server.url}/get_model_info", timeout=120).json()
        assert about["device"] == "2 engines on cpu"
    homes = [record.routed.engine for record in facts(run) if record.routed is not None]
    assert (len(homes), set(homes)) == (len(BODIES), {0, 1})
    for engine in (0, 1):
        assert replay(run / "engines" / str(engine)).batches > 0
    assert verify_router(run)[1] == len(BODIES)


def test_vectors_and_scores_are_computed_again_by_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies after the first batch that it computes, before any answer is sent."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "written:1:1:BatchFinished")
    run = tmp_path / "run"
    vectors = ("/v1/embeddings", {"input": ["a list", "a number", "zebra"], "encoding_format": "float"})
    scores = ("/v1/score", {"query": "Return the", "items": [" number", " name"], "label_token_ids": [300, 301]})
    with serving(tmp_path / "log", *SETTINGS, "--journal", str(run)) as server:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            found = [client.post(path, json=body).raise_for_status().json() for path, body in (vectors, scores)]
            assert server.text().count(" s after the end of the previous generation") == 1
            again = [client.post(path, json=body).raise_for_status().json() for path, body in (vectors, scores)]
        assert server.end() == 0
    for one, other in zip(found[0]["data"], again[0]["data"], strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
    for mine, others in zip(found[1]["scores"], again[1]["scores"], strict=True):
        assert mine == pytest.approx(others, rel=1e-4)
    assert replay(run).digest


def test_drafts_change_no_text_and_are_counted(
    undisturbed: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after tokens and logprobs were written and before they were sent, among verified drafts."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "written:9:1:BatchFinished")
    run = tmp_path / "run"
    drafting = ("--set", "speculative_method=ngram", "--metrics-compat", "vllm", "--journal", str(run))
    with serving(tmp_path / "log", *SETTINGS, *drafting) as server:
        equal(Reader(server).wait(), undisturbed)
        assert server.text().count(" s after the end of the previous generation") == 1
        figures = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in httpx2.get(f"{server.url}/metrics", timeout=120).text.splitlines()
            if "{" in line
        }
        verified, right = (
            figures["lockstep_spec_decode_num_drafts_total"],
            figures["vllm:spec_decode_num_accepted_tokens_total"],
        )
        assert figures["lockstep_spec_decode_num_draft_tokens_total"] > right > 0
        assert figures["lockstep_accepted_length_mean"] == pytest.approx(1 + right / verified)
        assert "vllm:accepted_length_mean" not in figures
    for life in sorted(set(run.iterdir()) - {run / "answers"}):
        assert replay(life).digest
