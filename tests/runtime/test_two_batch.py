"""Two-batch overlap on tensors: halves take turns at collectives, and tokens are those of one plain engine."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import BatchPlan, Halves  # noqa: E402
from lockstep.core.contract.config import SchedConfig  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.loop import HostClock  # noqa: E402
from lockstep.runtime import LLM  # noqa: E402
from lockstep.runtime.errors import PlanError  # noqa: E402
from lockstep.runtime.forward import ForwardBatch, RankTokens  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from lockstep.runtime.turns import TurnTaking  # noqa: E402
from lockstep.runtime.two_batch import check_two_batch, divided_batch, halves_of_ranks  # noqa: E402
from tests.support.model_engines import CPU, DENSE, EXPERTS, HALVES, KINDS, OF_ENGINE, ranks_of  # noqa: E402
from tests.support.small_llm import requests_with_shared_beginnings, write_weights  # noqa: E402
from tests.support.small_runtime import make_executor  # noqa: E402

REQUESTS = requests_with_shared_beginnings(100, KINDS)  # 200 were tried, which take twice as long


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {one["model_type"]: write_weights(tmp_path_factory.mktemp("model"), one) for one in (DENSE, EXPERTS)}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[Any]]:
    """The answers of one plain engine, by model type."""
    found = {}
    for name, folder in folders.items():
        with LLM(folder, **CPU, **OF_ENGINE) as llm:
            found[name] = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    return found


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours.finish_reason == "cancelled":
            assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)], number
            continue
        assert (ours.finish_reason, ours.token_ids) == (theirs.finish_reason, theirs.token_ids), number
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
    assert len({tuple(answer.token_ids) for answer in found}) > len(found) // 2


def launched(folder: Path) -> list[BatchPlan]:
    return [plan for _, step in fold(folder) if (plan := step.launched()) is not None]


def test_two_ranks_with_experts_give_in_halves_what_one_gives(
    folders: dict[str, Path], expected: dict[str, list[Any]], tmp_path: Path
) -> None:
    options = {**CPU, **OF_ENGINE, **HALVES, "debug": True, "retract_every": 9, "overlap_depth": 1}
    with LLM(folders["qwen3_moe"], tp=2, ep=2, journal=tmp_path, rank_timeout_s=300, **options) as llm:
        pending = [llm.ask(*one) for one in REQUESTS]
        for number in random.Random(3).sample(range(len(REQUESTS)), 10):
            llm.host.cancel(pending[number].answer.request_id)
        assert_equal([llm.wait(one) for one in pending], expected["qwen3_moe"])
    assert replay(tmp_path).digest == llm.host.engine.digest
    kinds = Counter(
        (plan.mode, plan.halves is not None and plan.halves.cut > 0) for plan in launched(tmp_path) if plan.halves
    )
    assert {mode for mode, _ in kinds} >= {"extend", "decode"}
    assert kinds["extend", True] > 5, "prompts are cut"


@pytest.mark.parametrize(
    ("model", "options", "sched"),
    [("qwen3", {}, {"overlap_depth": 1}), ("qwen3_moe", {"ep": 2, "moe_a2a": True}, {"batching": "mixed"})],
    ids=["dense", "experts by all-to-all"],
)
def test_data_parallel_ranks_give_in_halves_what_one_engine_gives(
    model: str,
    options: dict[str, Any],
    sched: dict[str, Any],
    folders: dict[str, Path],
    expected: dict[str, list[Any]],
    tmp_path: Path,
) -> None:
    count = 60
    with ranks_of(folders[model], 2, tmp_path, options, {**sched, **HALVES}) as llms:
        rng = random.Random(4)
        used = [min(rng.randrange(4), 1) for _ in range(count)]  # most of them on the last rank
        pending = [llms[rank].ask(*one) for rank, one in zip(used, REQUESTS, strict=False)]
        found = [llms[rank].wait(one) for rank, one in zip(used, pending, strict=True)]
        assert_equal(found, expected[model][:count])
    plans = [launched(tmp_path / f"rank{rank}") for rank in range(2)]
    kinds = Counter(plan.mode for one in plans for plan in one if plan.halves is not None)
    assert kinds["idle"] > 0
    assert sum(kinds.values()) > kinds["idle"]
    paddings = {plan.ranks.padding for one in plans for plan in one if plan.halves and plan.ranks}
    assert paddings == ({"max_length", "sum_length"} if model == "qwen3" else paddings)


# --------------------------------------------------------------------------------------------------------------- parts


def test_functions_take_turns() -> None:
    turns, said = TurnTaking(), []

    def half(name: str, steps: int) -> str:
        for step in range(steps):
            said.append(f"{name}{step}")
            turns.pass_on()
        return name

    assert turns.run([lambda: half("a", 3), lambda: half("b", 5)]) == ["a", "b"]
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2", "b3", "b4"]
    turns.pass_on()  # where nothing takes turns it does nothing
    assert not turns.taken


def test_an_error_of_one_half_ends_the_other() -> None:
    turns, ended = TurnTaking(), []

    def endless() -> None:
        try:
            while True:
                turns.pass_on()
        finally:
            ended.append("endless")

    def raises() -> None:
        turns.pass_on()
        raise ZeroDivisionError("in one half")

    for order in ((endless, raises), (raises, endless)):
        with pytest.raises(ZeroDivisionError, match="in one half"):
            turns.run(order)
        assert not turns.taken
    assert ended == ["endless"] * 2


def batch_of(counts: list[int], extend_rows: int) -> ForwardBatch:
    """A batch with so many new tokens in each row; row i has 10 i positions before them."""
    starts = np.arange(len(counts), dtype=np.int32) * 10
    stops = starts + np.array(counts, np.int32)
    positions = np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
    tokens = torch.arange(sum(counts))
    return ForwardBatch(
        token_ids=tokens,
        positions=torch.from_numpy(positions),
        slots=tokens + 100,
        rows=torch.arange(len(counts), dtype=torch.int32) + 5,
        indptr=torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)),
        lengths=torch.from_numpy(stops.copy()),
        page_table=torch.zeros((9, 9), dtype=torch.int32),
        logits_at=tokens[-1:],
        extend_rows=extend_rows,
        starts_host=starts,
        lengths_host=stops,
    )


@pytest.mark.parametrize(
    ("counts", "extend_rows", "halves"),
    [
        ([7, 3, 1, 1], 2, Halves(1)),
        ([7, 3, 1, 1], 2, Halves(0, 6)),
        ([7, 3, 1, 1], 2, Halves(1, 2)),
        ([1, 1, 1], 0, Halves(1)),
        ([4], 1, Halves(0, 1)),
    ],
    ids=str,
)
def test_halves_of_a_batch_hold_its_tokens_in_order(counts: list[int], extend_rows: int, halves: Halves) -> None:
    batch = batch_of(counts, extend_rows)
    lengths, starts, stops = batch.lengths.clone(), batch.starts_host.copy(), batch.lengths_host.copy()
    slots = np.array([0, -1, 1, 0][: len(counts)], np.int32)
    both = divided_batch(batch, halves, slots, torch.from_numpy)
    for name in ("token_ids", "positions", "slots"):
        joined = torch.cat([getattr(half, name) for half in both])
        assert torch.equal(joined, getattr(batch, name)), name
    first_token = 0
    for half in both:
        new = half.lengths_host - half.starts_host
        assert half.indptr.tolist() == [0, *np.cumsum(new).tolist()]
        assert half.lengths.tolist() == half.lengths_host.tolist()
        assert len(half.rows) == half.count
        assert half.tokens == int(new.sum())
        ends = half.indptr[1:].long() - 1
        assert half.positions[ends].tolist() == (half.lengths_host - 1).tolist()
        assert half.extend_rows == sum(row < extend_rows for row in (half.rows - 5).tolist())
        on = [slots[row] for row, n in zip((half.rows - 5).tolist(), new.tolist(), strict=True) for _ in range(n)]
        found = (
            {}
            if half.adapters is None
            else {slot: sorted(half.adapters.tokens[first:stop].tolist()) for slot, first, stop in half.adapters.groups}
        )
        assert found == {slot: [i for i, one in enumerate(on) if one == slot] for slot in set(on) if slot >= 0}
        first_token += half.tokens
    assert first_token == sum(counts)
    assert torch.equal(batch.lengths, lengths)
    assert (batch.starts_host.tolist(), batch.lengths_host.tolist()) == (starts.tolist(), stops.tolist())


def test_ranks_know_the_halves_of_the_others() -> None:
    first, second = halves_of_ranks(RankTokens((7, 0, 1, 4), padded=True))
    assert (first.counts, second.counts) == ((3, 0, 0, 2), (4, 0, 1, 2))
    assert first.padded


# ------------------------------------------------------------------------------------------------------------- refusals


def test_halves_without_communication_and_models_of_transformers_are_refused(folders: dict[str, Path]) -> None:
    for options, message in (({}, "`tp` is 1"), ({"tp": 2, "pp": 2, "pp_size": 1}, "`pp` is 2")):
        with pytest.raises(ConfigError, match=f"`two_batch_overlap` is on, but {message}"):
            LLM(folders["qwen3"], **CPU, **OF_ENGINE, **HALVES, **options)
    from lockstep.runtime.models import read_settings

    settings = read_settings(folders["qwen3"])
    check_two_batch(settings)
    object.__setattr__(settings, "backend", "transformers")
    with pytest.raises(ConfigError, match="runs by transformers' code"):
        check_two_batch(settings)


def test_an_executor_without_halves_refuses_them() -> None:
    ints = np.arange(4, dtype=np.int32)
    plan = BatchPlan(
        batch_id=0,
        mode="decode",
        rows=ints,
        request_ids=ints.astype(np.int64),
        starts=ints,
        stops=ints + np.int32(1),
        sample_rows=ints,
        halves=Halves(2),
    )
    with pytest.raises(PlanError, match="batch 0 has `halves`"):
        make_executor(SchedConfig(pages=8, page_size=4), CpuLane(HostClock())).launch(plan)
