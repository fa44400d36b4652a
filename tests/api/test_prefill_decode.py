"""Prefill and decode engines of one server: pairs that the router picks, every answer that of one engine, and deaths.

The rules of the router are those of the simulator; its journals replay to the same decisions.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.api.processes.pair_routing import PairRouting  # noqa: E402
from lockstep.api.processes.wire import (  # noqa: E402
    EngineHere,
    EngineLost,
    Offer,
    OfferClosed,
    PromptOver,
    Routed,
    WorkerLost,
)
from lockstep.api.settings import read_settings  # noqa: E402
from lockstep.core.cluster.router import RouterConfig  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.router_check import verify_router  # noqa: E402
from lockstep.tools.journal import journal  # noqa: E402
from tests.support.kills import campaign  # noqa: E402
from tests.support.live_server import LiveServer, metric, serving  # noqa: E402

# --------------------------------------------------------------------------------------------------------- the router


def routing(prefills: int = 2, decodes: int = 2, run: Path | None = None) -> tuple[PairRouting, list[Routed]]:
    answers: list[Routed] = []
    made = PairRouting(prefills, decodes, RouterConfig(policy="least_requests"), answers.append, run=run)
    for engine in range(prefills + decodes):
        made.handle(EngineHere(engine, 0, 1000, (), False))
    return made, answers


def test_an_offer_gets_a_prefill_and_a_decode_engine(tmp_path: Path) -> None:
    made, answers = routing(run=tmp_path)
    for number, tokens in enumerate((500, 10, 10)):
        made.handle(Offer(0, number, tokens))
    assert [(one.prefill, one.engine, one.room) for one in answers] == [(0, 2, 0), (1, 3, 1), (0, 3, 2)]
    made.handle(PromptOver(0))
    made.handle(PromptOver(2))
    made.handle(Offer(0, 3, 10))
    assert (answers[-1].prefill, answers[-1].engine) == (0, 3), "0 has no prompt left, and 2 has 500 tokens"
    made.handle(OfferClosed(0, 0, 7))
    made.handle(PromptOver(0))  # late: its request has ended
    made.handle(Offer(0, 4, 10, samples=3))
    made.handle(Offer(0, 5, 10))
    assert [one.room for one in answers[-2:]] == [4, 7], "samples have consecutive rooms"
    made.close()
    for folder in (tmp_path, tmp_path / "decode"):
        verify_router(folder)


def test_a_request_without_output_is_computed_by_its_prefill_engine() -> None:
    made, answers = routing()
    made.handle(Offer(0, 0, 10, output=False))
    assert (answers[0].engine, answers[0].prefill, answers[0].room) == (0, -1, -1)
    made.handle(OfferClosed(0, 0, 0))
    made.handle(Offer(0, 1, 10))
    assert (answers[1].prefill, answers[1].engine) == (1, 2)


def test_an_offer_waits_until_both_sides_have_an_engine() -> None:
    made, answers = routing(1, 1)
    made.handle(EngineLost(0, 1))
    made.handle(Offer(0, 0, 10))
    made.handle(Offer(1, 0, 10))
    assert not answers
    made.handle(WorkerLost(1))
    made.handle(EngineHere(0, 1, 1000, (), False))
    assert [(one.worker, one.prefill, one.engine) for one in answers] == [(0, 0, 1)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill_engines": 1}, "`prefill_engines` is 1 and `decode_engines` is 0: requests need one of each"),
        ({"prefill_engines": 1, "decode_engines": 1, "dp": 2}, "`dp` is 2, and there are prefill and decode engines"),
        ({"prefill_engines": 1, "decode_engines": 1, "admission": "open=4"}, "`admission` is given"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "prefill_pp": 2, "swa_full_tokens_ratio": 0.5},
            "`swa_full_tokens_ratio` is 0.5, but `pp` is 2",
        ),
        ({"prefill_tp": 2}, "`prefill_tp` is 2; it must be at least 1, and is for prefill and decode engines"),
        ({"prefill_engines": 1, "decode_engines": 1, "decode_pp": 0}, "`decode_pp` is 0; it must be at least 1"),
        ({"decode_pp": 2}, "`decode_pp` is 2; it must be at least 1, and is for prefill and decode engines"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "prefill_tp": 2, "draft_model": "demo"},
            "`draft_model` is demo, but `tp` is 2: a draft model is not split",
        ),
        (
            {"emulate": "qwen3-8b@h200", "prefill_engines": 1, "decode_engines": 1, "prefill_pp": 2},
            "`prefill_pp` is for a model, and an emulated engine has none",
        ),
        ({"prefill_attention_dp": 2}, "`prefill_attention_dp` is 2; it must be at least 1, and is for prefill and"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "decode_attention_dp": 2, "decode_tp": 2},
            "`attention_dp` is 2, but `rank_schedulers` is off",
        ),
        (
            {"prefill_engines": 1, "decode_engines": 1, "decode_attention_dp": 2, "rank_schedulers": True},
            "`attention_dp` is 2 and `tp` is 1: each rank has the attention of one GPU",
        ),
        (
            {"prefill_engines": 1, "decode_engines": 1, "prefill_attention_dp": 1, "rank_schedulers": True},
            "`rank_schedulers` is on, but `attention_dp` is 1",
        ),
        (
            {"emulate": "qwen3-8b@h200", "prefill_engines": 1, "decode_engines": 1, "decode_attention_dp": 1},
            "`decode_attention_dp` is for a model, and an emulated engine has none",
        ),
        ({"transfer_transport": "tcp"}, "`transfer_transport` is for prefill and decode engines"),
        ({"set": {"role": "decode"}}, "the roles of a server's engines follow from their numbers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_settings(None, given)


def test_each_kind_of_engine_has_its_own_split() -> None:
    roles = {"prefill_engines": 2, "decode_engines": 1}
    settings = read_settings(None, {**roles, "tp": 4, "prefill_tp": 1, "prefill_pp": 3, "decode_pp": 2})
    assert [(settings.tp_of(engine), settings.pp_of(engine)) for engine in range(3)] == [(1, 3), (1, 3), (4, 2)]
    assert [settings.gpus_of(engine) for engine in range(3)] == [3, 3, 8]


RANKS = {"prefill_engines": 2, "decode_engines": 1, "rank_schedulers": True}


def test_data_parallel_ranks_may_be_of_one_kind() -> None:
    settings = read_settings(None, {**RANKS, "prefill_tp": 2, "prefill_attention_dp": 2, "decode_tp": 3})
    assert [settings.role_of(engine) for engine in range(settings.engines)] == [*["prefill"] * 4, "decode"]
    assert [settings.rank_of(engine) for engine in range(5)] == [0, 1, 0, 1, 0]
    assert [settings.gpus_of(engine) for engine in range(5)] == [1, 1, 1, 1, 3]
    assert [settings.layout_of(engine)["rank_schedulers"] for engine in range(5)] == [True] * 4 + [False]
    other = read_settings(None, {**RANKS, "tp": 2, "attention_dp": 2, "prefill_attention_dp": 1, "prefill_pp": 3})
    assert [other.role_of(engine) for engine in range(other.engines)] == ["prefill", "prefill", "decode", "decode"]
    assert [other.rank_of(engine) for engine in range(4)] == [0, 0, 0, 1]
    assert [other.gpus_of(engine) for engine in range(4)] == [6, 6, 1, 1]
    both = read_settings(None, {**RANKS, "prefill_tp": 2, "prefill_attention_dp": 2, "decode_tp": 3} | {
        "decode_attention_dp": 3,
    })  # fmt: skip
    assert [both.rank_of(engine) for engine in range(both.engines)] == [0, 1, 0, 1, 0, 1, 2]


# -------------------------------------------------------------------------------------------------------- a live server

BODIES: list[dict[str, Any]] = [
    {"prompt": "def main(self, x):\n    return ", "max_tokens": 24, "logprobs": 2},
    {"prompt": "import numpy as np\nimport ", "max_tokens": 24, "n": 2},
    {"prompt": "import numpy as np\nimport ", "max_tokens": 24, "stop": ["e"]},
    {"prompt": "class A:\n    " * 60, "max_tokens": 24},
    {"prompt": "x = ", "max_tokens": 1},
    {"prompt": "The value is ", "max_tokens": 24, "temperature": 0.9, "seed": 4},
]


def texts(server: LiveServer, bodies: list[dict[str, Any]]) -> list[Any]:
    """The texts, ends and logprobs of completions that are sent at the same time."""
    found: list[Any] = [None] * len(bodies)

    def ask(number: int) -> None:
        body = {"temperature": 0, **bodies[number]}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120.0).json()
        choices = answer["choices"]
        logprobs = [[round(x, 3) for x in one["logprobs"]["token_logprobs"]] for one in choices if one["logprobs"]]
        found[number] = [[one["text"], one["finish_reason"]] for one in choices], logprobs, answer["usage"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def kill(server: LiveServer, name: str) -> None:
    """Kill an engine of a server."""
    os.kill(server.children()[name], signal.SIGKILL)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    with serving(tmp_path_factory.mktemp("plain") / "log") as server:
        return texts(server, BODIES)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_with_roles_answers_as_one_engine(transport: str, plain: list[Any], run: Path, tmp_path: Path) -> None:
    roles = ("--prefill-engines", "1", "--decode-engines", "2", "--journal", str(run))
    with serving(tmp_path / "log", *roles, "--transfer-transport", transport, "--transfer-checksums") as server:
        assert texts(server, BODIES) == plain
        assert metric(server, "lockstep_transfers_total") == 7, "one of each answer"
        vector = httpx2.post(f"{server.url}/v1/embeddings", json={"input": "hello"}, timeout=60.0).json()
        assert len(vector["data"][0]["embedding"]) > 8
        assert server.end() == 0
    verified = CliRunner().invoke(journal, ["verify", str(run)])
    assert verified.exit_code == 0, verified.output
    assert verified.output.count("equal") == 5, "three engines, two routers"


@pytest.mark.parametrize(
    ("split", "engines"),
    [
        (("--tp", "2", "--attention-dp", "2", "--rank-schedulers"), 4),
        (("--prefill-pp", "2"), 2),
        (("--prefill-tp", "2", "--prefill-attention-dp", "2", "--rank-schedulers"), 3),
        (("--decode-tp", "2", "--decode-attention-dp", "2", "--rank-schedulers"), 3),
    ],
    ids=["ranks", "stages", "ranks of prefill", "ranks of decode"],
)
def test_engines_of_ranks_or_stages_answer_as_one(
    split: tuple[str, ...], engines: int, plain: list[Any], run: Path, tmp_path: Path
) -> None:
    roles = ("--prefill-engines", "1", "--decode-engines", "1", "--journal", str(run))
    with serving(tmp_path / "log", *roles, *split) as server:
        assert texts(server, BODIES) == plain
        assert metric(server, "lockstep_transfers_total") == 7, "one of each answer"
        assert len([name for name in server.children() if name.startswith("engine")]) == engines
        assert server.end() == 0
    verified = CliRunner().invoke(journal, ["verify", str(run)])
    assert verified.exit_code == 0, verified.output
    assert verified.output.count("equal") == engines + 2, "all engines, two routers"


@pytest.mark.parametrize(
    ("name", "options"),
    [("Gemma 3", ("--swa-full-tokens-ratio", "0.5")), ("LFM2", ("--mamba-track-interval", "16"))],
)
def test_windows_and_states_go_from_process_to_process(
    name: str, options: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="models with windows and states run by transformers' code")
    from lockstep.runtime.llm import demo_folder
    from tests.support.architectures import save_architecture

    model = tmp_path / "model"
    save_architecture(model, name, vocab_size=2048, max_position_embeddings=512)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / file, model / file)
    pools = {"pages": 300, "chunked_prefill_size": 32}
    given = ("--model", str(model), *options, *(f"--set={name}={value}" for name, value in pools.items()))
    bodies = [{**body, "prompt": body["prompt"][:400]} for body in BODIES]
    with serving(tmp_path / "alone", *given) as server:
        alone = texts(server, bodies)
    roles = ("--prefill-engines", "1", "--decode-engines", "1", "--journal", str(run), "--transfer-checksums")
    with serving(tmp_path / "log", *given, *roles) as server:
        assert texts(server, bodies) == alone
        assert metric(server, "lockstep_transfers_total") == 7, "one of each answer"
        assert server.end() == 0
    verified = CliRunner().invoke(journal, ["verify", str(run)])
    assert verified.exit_code == 0, verified.output
    assert verified.output.count("equal") == 4, "two engines, two routers"


def test_streams_continue_when_either_engine_is_killed(plain: list[Any], run: Path, tmp_path: Path) -> None:
    roles = ("--prefill-engines", "1", "--decode-engines", "1", "--restarts", "20")
    long = [{**body, "max_tokens": 120} for body in BODIES[:1] + BODIES[3:4]] * 3
    rng = random.Random(5)
    with serving(tmp_path / "log", *roles) as server:
        right = [one[0] for one in texts(server, long)]
        for name in ("engine 0", "engine 1", "engine 0", "engine 1"):
            killer = threading.Timer(rng.uniform(0.05, 0.5), partial(kill, server, name))
            killer.start()
            assert [one[0] for one in texts(server, long)] == right
            killer.join()
            until = time.monotonic() + 60.0
            while name not in server.children() and time.monotonic() < until:
                time.sleep(0.05)


def test_killed_at_random_instants(tmp_path: Path) -> None:
    """A short run of `make kill-campaign ARGS="--prefill 2 --decode 2"`, on emulated engines."""
    arguments = ("--emulate", "qwen3-0.6b@h200", "--answer-tokens", "60", "--shutdown-s", "1", "--speed", "0.1")
    roles = ("--prefill-engines", "1", "--decode-engines", "2", "--restarts", "20", "--snapshot-s", "2")
    with serving(tmp_path / "log", *arguments, *roles) as server:
        outcome = campaign(server, seed=3, kills=8, streams=8, gap_s=(0.05, 0.6), prefills=1)
    assert not outcome.tally.faults, outcome.text()
    assert outcome.tally.requests > 8
