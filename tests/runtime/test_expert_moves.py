"""Experts that move between ranks while requests run: tokens of one engine, and one end if a rank is lost."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.cluster.expert_placement import balance, unbalanced  # noqa: E402
from lockstep.core.contract.commands import MoveExperts  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.host.errors import EngineStopped  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.models.expert_slots import ExpertSlots, move_experts  # noqa: E402
from tests.support.model_engines import EXPERTS, OF_ENGINE  # noqa: E402
from tests.support.small_llm import requests_with_shared_beginnings, write_weights  # noqa: E402

PLAIN: dict[str, Any] = {"device": "cpu", "grammar_backend": "none", **OF_ENGINE}
MOVING: dict[str, Any] = {"tp": 2, "ep": 2, "eplb": True, "redundant_experts": 4, "eplb_interval": 4}
REQUESTS = requests_with_shared_beginnings(200, [{}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("model"), EXPERTS)


def test_requests_equal_one_engine_while_experts_move_and_a_rank_lost_in_a_move_ends_the_engine(
    folder: Path, tmp_path: Path
) -> None:
    """With chunks, cached prefixes and forced retraction. The journal replays to the same decisions."""
    prompts, params = [prompt for prompt, _ in REQUESTS], [one for _, one in REQUESTS]
    with LLM(folder, **PLAIN) as single:
        expected = [answer.token_ids for answer in single.generate(prompts, params)]
    run = tmp_path / "run"
    with LLM(folder, **PLAIN, **MOVING, expert_load_interval=2, retract_every=9, journal=run) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == expected
        placement = llm.host.engine.experts.placer.placement
        with pytest.raises(ConfigError, match="weights are not changed while experts move between ranks"):
            llm.update_weights(folder)
        llm.release_memory("kv_cache")  # of both ranks
        llm.resume_memory("kv_cache")
        llm.host.journal.flush()
        moves = [one for _, step in fold(run) for one in step.commands if isinstance(one, MoveExperts)]
        assert len(moves) > 10
        assert placement.tolist() != unbalanced(6, slots=10, gpus=2, layers=2).tolist()
        killed = threading.Event()

        def kill(event: Any, step: Any) -> None:
            if any(isinstance(one, MoveExperts) for one in step.commands) and not killed.is_set():
                killed.set()
                assert llm.group is not None
                os.kill(llm.group._workers[0].process.pid, signal.SIGKILL)

        llm.host.observe = kill
        endless = Params(max_new_tokens=400, ignore_eos=True)  # experts move before its end
        with pytest.raises(EngineStopped, match=r"rank 1 .* was ended by SIGKILL"):
            llm.generate([[7, *prompt] for prompt in prompts[:12]], endless)
        assert killed.is_set()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_slots_of_every_rank_get_their_experts(ranks: int) -> None:
    """Random placements one after another; each expert's weights are its number."""
    experts, slots = 6, 6 + 2 * ranks
    rng, met = np.random.default_rng(ranks), threading.Barrier(ranks, timeout=60)
    parts: list[Any] = [None] * ranks
    placements = [balance(rng.random((1, experts)) ** 4, slots=slots, gpus=ranks)[0] for _ in range(12)]

    def run(rank: int) -> list[list[int]]:
        def all_to_all(rows: Any, sends: list[int], receives: list[int]) -> Any:
            parts[rank] = rows.split(sends)
            met.wait()
            got = torch.cat([parts[other][rank] for other in range(ranks)])
            met.wait()
            assert len(got) == sum(receives)
            return got

        of = ExpertSlots(experts, slots, rank, ranks, torch.device("cpu"))
        weights = [torch.tensor(of.own).float()[:, None, None].expand(-1, 2, width).clone() for width in (3, 5)]
        found = []
        for placement in placements:
            move_experts(of, placement, weights, all_to_all)
            assert all((one == one[:, :1, :1]).all() for one in weights)
            assert weights[0][:, 0, 0].tolist() == weights[1][:, 0, 0].tolist()
            found.append(weights[0][:, 0, 0].int().tolist())
        return found

    with ThreadPoolExecutor(ranks) as pool:
        by_rank = list(pool.map(run, range(ranks)))
    for number, placement in enumerate(placements):
        assert [one for found in by_rank for one in found[number]] == placement.tolist()


def test_tokens_are_spread_over_the_copies_of_an_expert() -> None:
    of = ExpertSlots(4, 6, 0, 2, torch.device("cpu"))
    of.use(np.array([0, 1, 2, 3, 2, 2], np.int32))
    chosen = of.slots_of(torch.tensor([[0, 2], [2, 3], [2, 1], [1, 2]]))
    assert chosen.tolist() == [[0, 2], [4, 3], [5, 1], [1, 2]]
    assert of.slots_of(torch.tensor([[2, 0]]), first=4).tolist() == [[4, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eplb": True}, "`eplb` moves experts between ranks, but `ep` is 1"),
        ({"redundant_experts": 2}, "`redundant_experts` is 2, but `eplb` is off"),
        ({"eplb_interval": 5}, "`eplb_interval` is 5, but `eplb` is off"),
        ({**MOVING, "redundant_experts": 3}, "`redundant_experts` must be a multiple of `ep` 2, got `3`"),
        ({**MOVING, "eplb_interval": 0}, "`eplb_interval` must be at least 1 batch, got `0`"),
        ({"eplb_imbalance_min": 1.5}, "`eplb_imbalance_min` is 1.5, but `eplb` is off"),
        (
            {**MOVING, "eplb_imbalance_min": 0.5},
            r"`eplb_imbalance_min` must be at least 1 \(the mean load\), got `0.5`",
        ),
        ({**MOVING, "pp": 2}, "`eplb` is on, but `pp` is 2"),
        ({**MOVING, "expert_load_interval": 0}, "`eplb` needs the load of experts, but `expert_load_interval` is 0"),
        ({"experts": 3}, "`experts` .* follows from the model and from options"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(
    options: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **{**PLAIN, **options})
