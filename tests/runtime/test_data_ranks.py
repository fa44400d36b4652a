"""Data-parallel ranks on tensors: the tokens of one plain engine, and one end for all ranks when one is lost.

Ranks are engines in threads of this process. They agree over sockets and sum over gloo, as in processes of their own.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")


from lockstep.core.contract.commands import LaunchBatch, ProposeBatch, StartTransfer  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestRetracted  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.errors import EngineStopped, killed_from_outside  # noqa: E402
from lockstep.host.handover.decode import DecodeSide  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.forward import RankTokens  # noqa: E402
from lockstep.runtime.models.layers import SharedRows  # noqa: E402
from tests.support.feature_campaign import most_in_flight  # noqa: E402
from tests.support.live_server import until  # noqa: E402
from tests.support.model_engines import (  # noqa: E402
    CPU,
    DENSE,
    EXPERTS,
    KINDS,
    OF_ENGINE,
    answered_alike,
    ranks_in_roles,
    ranks_of,
)
from tests.support.small_llm import requests_with_shared_beginnings, write_weights  # noqa: E402

COUNTS = {"dense, overlap": 200}  # of requests; of the others 60, since they take as long
SETS: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    "dense, overlap": (DENSE, 2, {}, {"overlap_depth": 1, "retract_every": 7}),
    "experts on ranks, delayer": (
        EXPERTS,
        3,
        {"ep": 3, "debug": True},
        {"prefill_delayer": True, "prefill_delayer_max_delay_passes": 4, "retract_every": 9},
    ),
    "experts by all-to-all, drafts": (
        EXPERTS,
        2,
        {"ep": 2, "moe_a2a": True},
        {"speculative_method": "ngram", "num_speculative_tokens": 3, "overlap_depth": 1, "batching": "mixed"},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models, large enough that tokens differ, by model type."""
    configs = (DENSE, EXPERTS)
    return {config["model_type"]: write_weights(tmp_path_factory.mktemp("model"), config) for config in configs}


REQUESTS = requests_with_shared_beginnings(200, KINDS)


@pytest.mark.parametrize("name", SETS)
def test_requests_on_ranks_equal_one_engine(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model, ranks, options, sched = SETS[name]
    folder, rng, asked = folders[model["model_type"]], random.Random(4), REQUESTS[: COUNTS.get(name, 60)]
    with LLM(folder, **CPU, **OF_ENGINE) as single:
        expected = single.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    with ranks_of(folder, ranks, tmp_path, options, sched) as llms:
        used = [min(rng.randrange(2 * ranks), ranks - 1) for _ in asked]  # most of them on the last rank
        found = answered_alike(llms, used, asked, expected, rng)
        for ours, theirs in zip(found, expected, strict=True):
            if ours.finish_reason != "cancelled":
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
        assert len({tuple(answer.token_ids) for answer in found}) > len(asked) // 2, (
            "of tokens that are all alike little is learnt"
        )
    plans, retracted, deepest = [], 0, 0
    for rank, llm in enumerate(llms):
        steps = list(fold(tmp_path / f"rank{rank}"))
        assert replay(tmp_path / f"rank{rank}").digest == llm.host.engine.digest
        plans.append([one.plan for _, step in steps for one in step.commands if isinstance(one, LaunchBatch)])
        deepest = max(deepest, most_in_flight(steps))
        retracted += sum(isinstance(event, RequestRetracted) for _, step in steps for event in step.decided)
    assert bool(retracted) == ("retract_every" in sched)
    assert deepest == 1 + sched.get("overlap_depth", 0)
    fewest = min(map(len, plans))  # ranks are stopped at different times
    assert [plan.ranks for plan in plans[0][:fewest]] == [plan.ranks for plan in plans[-1][:fewest]]
    modes, paddings = (
        Counter(plan.mode for one in plans for plan in one),
        {plan.ranks.padding for plan in plans[0] if plan.ranks},
    )
    assert modes["idle"] > 0
    assert paddings == ({"sum_length"} if "speculative_method" in sched else {"max_length", "sum_length"})


@pytest.mark.parametrize("prompts", ["tokens", "given embeddings"])
def test_a_request_ends_between_proposal_and_agreement(
    prompts: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is cancelled after the batch with its first row was proposed, and before that batch is launched."""
    folder, asked, rng = folders["qwen3"], [*REQUESTS[:12]], np.random.default_rng(8)
    if prompts == "given embeddings":
        asked = [(rng.standard_normal((len(ids), DENSE["hidden_size"])), params) for ids, params in asked]
    with LLM(folder, **CPU, **OF_ENGINE) as single:
        expected = single.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    cancelled: list[int] = []
    with ranks_of(folder, 2, tmp_path, {}, {"overlap_depth": 1}) as llms:
        host = llms[0].host
        agreement, rounds = host._agreement, host.engine.ranks
        assert agreement is not None
        assert rounds is not None
        propose = agreement.propose

        def cancel_and_propose(command: ProposeBatch) -> None:
            if rounds.held is not None and len(cancelled) < 2:
                ids = [taken.request_id for taken in rounds.held.plan.rows_taken if taken.request_id not in cancelled]
                for request_id in ids[:1]:
                    cancelled.append(request_id)
                    host.cancel(request_id)  # received before what the other rank answers
            propose(command)

        monkeypatch.setattr(agreement, "propose", cancel_and_propose)
        pending = [llms[number % 2].ask(*one) for number, one in enumerate(asked)]
        found = [llms[number % 2].wait(one) for number, one in enumerate(pending)]
    assert len(cancelled) == 2
    assert [one.finish_reason for one in found].count("cancelled") == 2
    for ours, theirs in zip(found, expected, strict=True):
        if ours.finish_reason == "cancelled":
            assert ours.token_ids == []
        else:
            assert (ours.finish_reason, ours.token_ids) == (theirs.finish_reason, theirs.token_ids)


@pytest.mark.parametrize(("prefills", "decodes"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_hand_requests_over(prefills: int, decodes: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """From each rank of a prefill engine to each rank of a decode engine; with 1 the engine has no ranks."""
    folder, rng, asked = folders["qwen3"], random.Random(6), REQUESTS[:60]
    with LLM(folder, **CPU, **OF_ENGINE) as single:
        expected = single.generate([prompt for prompt, _ in asked], [params for _, params in asked])

    both = {"overlap_depth": 1, "num_reserved_decode_tokens": 16, "transfer_failure": "fail"}
    sides = (both, {**both, "retract_every": 3})  # few requests may run together at a time
    with ranks_in_roles(folder, (prefills, decodes), tmp_path, {"debug": True}, *sides) as (firsts, llms):
        used = [rng.randrange(decodes) for _ in asked]
        answered_alike(llms, used, asked, expected, rng)
        counts = [side.counts for llm in llms if isinstance(side := llm.handover, DecodeSide)]
        assert sum(one.done for one in counts) >= len(asked) - len(asked) // 10
        assert all(one.pages for one in counts)
    retracted, sent = 0, set()
    for side, made in (("prefill", firsts), ("decode", llms)):
        for rank, llm in enumerate(made):
            steps = list(fold(tmp_path / side / f"rank{rank}"))
            assert replay(tmp_path / side / f"rank{rank}").digest == llm.host.engine.digest
            retracted += sum(isinstance(event, RequestRetracted) for _, step in steps for event in step.decided)
            if side == "prefill" and any(isinstance(one, StartTransfer) for _, step in steps for one in step.commands):
                sent.add(rank)
    assert retracted
    assert sent == set(range(prefills))


def test_ranks_with_nothing_to_run_are_quiet(folders: dict[str, Path], tmp_path: Path) -> None:
    """A round in which no rank runs anything is followed by no other round until something happens."""
    with ranks_of(folders["qwen3"], 2, tmp_path, {}, {}) as llms:

        def rounds() -> list[int]:
            return [one.round for llm in llms if (one := llm.host.engine.ranks) is not None]

        for llm in llms:
            assert len(llm.generate([[5, 6, 7]], Params(max_new_tokens=3, ignore_eos=True))[0].token_ids) == 3
        before = rounds()
        until(lambda: not any(one.agreement.pending for llm in llms if (one := llm.data_ranks) is not None), 60)
        turns = [llm.host.turns for llm in llms]
        until(lambda: all(llm.host.turns > turn for llm, turn in zip(llms, turns, strict=True)), 60)
        now = rounds()
        assert now[0] == now[1]
        assert max(now) <= max(before) + 3


def test_the_end_of_a_rank_ends_all_of_them(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks_of(folders["qwen3"], 2, tmp_path, {}, {}) as llms:
        pending = [llm.ask([5, 6, 7], Params(max_new_tokens=100, ignore_eos=True)) for llm in llms]
        until(lambda: all(one.answer.token_ids for one in pending), 120)

        def broken(*args: Any) -> Any:
            raise ValueError("a fault")

        monkeypatch.setattr(llms[1].model, "forward", broken)
        for one in pending:
            assert one.over.wait(120)
        until(lambda: all(llm.host.failure for llm in llms), 120)
        assert "a fault" in llms[1].host.failure
        with pytest.raises(EngineStopped):
            llms[0].generate([[5]], Params(max_new_tokens=1))
        assert killed_from_outside(llms[0].host.error), "requests of the other ranks are not suspects"


def test_weights_that_ranks_share_are_not_changed(folders: dict[str, Path], tmp_path: Path) -> None:
    with ranks_of(folders["qwen3"], 2, tmp_path, {}, {}) as llms:
        with pytest.raises(ConfigError, match="not changed while data-parallel ranks share them"):
            llms[0].update_weights(folders["qwen3"])
        with pytest.raises(ConfigError, match="not released while data-parallel ranks share them"):
            llms[1].release_memory("weights")
        assert llms[1].generate([[5, 6]], Params(max_new_tokens=2, ignore_eos=True))[0].finish_reason == "length"


def test_rows_of_ranks_lie_where_their_layout_says() -> None:
    """Rank 1 of three has two rows, rank 0 one, rank 2 none."""
    counts, own = (1, 2, 0), torch.tensor([[3.0], [4.0]])
    sent: list[Any] = []

    def gather(rows: Any) -> Any:
        sent.append(rows)
        return torch.cat((rows * 10, rows, rows * 0))

    shared = SharedRows(1, gather, lambda one: one + 1)
    padded = RankTokens(counts, padded=True)
    assert shared.apply(lambda rows: rows * 2, own, padded).tolist() == [[6.0], [8.0]]
    assert sent[0].shape == (2, 1)
    assert padded.total == 6
    end_to_end = RankTokens(counts, padded=False)
    assert shared.gathered(own, end_to_end).tolist() == [[1.0], [4.0], [5.0]]
    assert end_to_end.own(2) == slice(3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_dp": 2, "tp": 2}, "`rank_schedulers` is off"),
        ({"attention_dp": 2, "rank_schedulers": True}, "each rank has the attention of one GPU"),
        ({"rank_schedulers": True}, "there is one rank"),
        ({"attention_dp": 2, "tp": 2, "rank_schedulers": True, "pp": 2}, "`pp` is 2"),
        ({"attention_dp": 2, "tp": 2, "rank_schedulers": True, "cuda_graphs": "eager"}, "graphs do not read the rows"),
        ({"attention_dp": 2, "tp": 2, "rank_schedulers": True, "max_loras": 2}, "adapters are of the requests of one"),
        ({"attention_dp": 2, "tp": 2, "rank_schedulers": True}, "this is one engine in one process"),
        ({"prefill_delayer": True}, "the engine has one"),
        ({"dp_ranks": 2}, "follows from the data-parallel ranks"),
    ],
)
def test_layouts_that_ranks_do_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**CPU, **options)
