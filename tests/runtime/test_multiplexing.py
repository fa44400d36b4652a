"""PD multiplexing on tensors: prompts some layers at a time beside decodes, with the tokens of one plain engine."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import BatchPlan  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.engine_options import RankOptions  # noqa: E402
from lockstep.runtime import LLM  # noqa: E402
from lockstep.runtime.errors import PlanError  # noqa: E402
from lockstep.runtime.models import read_settings  # noqa: E402
from lockstep.runtime.multiplexing import LayerParts, multiplexing_of  # noqa: E402
from lockstep.runtime.plan_checks import refuse_unknown  # noqa: E402
from tests.runtime.test_two_batch import assert_equal  # noqa: E402
from tests.support.model_engines import CPU, DENSE, EXPERTS, KINDS, OF_ENGINE  # noqa: E402
from tests.support.small_llm import requests_with_shared_beginnings, write_weights  # noqa: E402

REQUESTS = requests_with_shared_beginnings(200, KINDS)
PDMUX: dict[str, Any] = {"pdmux": True, "pdmux_token_budget": 24, "debug": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {one["model_type"]: write_weights(tmp_path_factory.mktemp("model"), one) for one in (DENSE, EXPERTS)}


@pytest.mark.parametrize(
    ("model", "count", "options"),
    [
        ("qwen3", 200, {"overlap_depth": 1, "retract_every": 9}),
        ("qwen3_moe", 60, {"overlap_depth": 0, "chunked_prefill_size": 12}),
        ("qwen3", 40, {"tp": 2, "rank_timeout_s": 300, "overlap_depth": 2}),
    ],
    ids=["dense", "experts", "two ranks"],
)
def test_tokens_are_those_of_one_plain_engine(
    model: str, count: int, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    asked = REQUESTS[:count]
    with LLM(folders[model], **CPU, **OF_ENGINE) as llm:
        expected = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    with LLM(folders[model], journal=tmp_path, **{**CPU, **OF_ENGINE, **PDMUX, **options}) as llm:
        pending = [llm.ask(*one) for one in asked]
        for number in random.Random(3).sample(range(count), count // 20):
            llm.host.cancel(pending[number].answer.request_id)
        assert_equal([llm.wait(one) for one in pending], expected)
    assert replay(tmp_path).digest == llm.host.engine.digest
    plans = [plan for _, step in fold(tmp_path) if (plan := step.launched()) is not None]
    kinds = Counter(plan.mode for plan in plans)
    assert set(kinds) == {"split_prefill", "decode"}
    parts = Counter(plan.layers for plan in plans if plan.layers is not None)
    assert len(parts) > 2, "prompts run by layers"
    assert all(plan.sms is None for plan in plans), "a CPU is not divided"


# --------------------------------------------------------------------------------------------------------------- parts


def part(number: int, rows: list[int], counts: list[int], layers: tuple[int, int]) -> BatchPlan:
    stops = np.array(counts, np.int32)
    return BatchPlan(
        batch_id=number,
        mode="split_prefill",
        rows=np.array(rows, np.int32),
        request_ids=np.array(rows, np.int64),
        starts=np.zeros(len(rows), np.int32),
        stops=stops,
        extend_rows=len(rows),
        token_ids=np.zeros(int(stops.sum()), np.int32),
        layers=layers,
    )


def test_the_next_part_gets_the_states_of_the_rows_that_are_left() -> None:
    parts, hidden = LayerParts(4), torch.arange(24.0).reshape(2, 6, 2)
    assert parts.before(part(0, [7, 3, 5], [2, 3, 1], (0, 1))) is None
    assert parts.keeps(part(0, [7, 3, 5], [2, 3, 1], (0, 1)), hidden)
    left = part(1, [7, 5], [2, 1], (1, 3))
    found = parts.before(left)
    assert found is not None
    assert torch.equal(found, hidden[:, [0, 1, 5]])
    assert parts.keeps(left, found + 1)
    last = part(2, [5], [1], (3, 4))
    found = parts.before(last)
    assert found is not None
    assert torch.equal(found, hidden[:, [5]] + 1)
    assert not parts.keeps(last, found)


def test_a_part_that_does_not_follow_is_refused() -> None:
    parts = LayerParts(4)
    assert parts.keeps(part(0, [7], [2], (0, 1)), torch.zeros(2, 2, 2))
    with pytest.raises(PlanError, match=r"batch 1 begins at layer 2 of rows \[7\]; computed are 1 layers"):
        parts.before(part(1, [7], [2], (2, 4)))
    assert parts.keeps(part(2, [7], [2], (0, 1)), torch.zeros(2, 2, 2))
    with pytest.raises(PlanError, match=r"of rows \[8\]"):
        parts.before(part(3, [8], [2], (1, 4)))


def test_executors_without_parts_refuse_layers() -> None:
    with pytest.raises(PlanError, match="has mode 'split_prefill'"):
        refuse_unknown(part(0, [7], [2], (0, 1)))
    refuse_unknown(part(0, [7], [2], (0, 1)), layers=True)


# ------------------------------------------------------------------------------------------------------------- options


def test_a_gpu_and_code_of_transformers_are_refused(folders: dict[str, Path]) -> None:
    given, model = RankOptions(pdmux=True), read_settings(folders["qwen3"])
    with pytest.raises(ConfigError, match="`pdmux` is on, but the device is cuda"):
        multiplexing_of(given, model, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="runs by transformers' code"):
        LLM(folders["qwen3"], model_backend="transformers", **{**CPU, **OF_ENGINE, **PDMUX})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pdmux_token_budget": 9}, "`pdmux_token_budget` is 9, but `pdmux` is off"),
        ({"pdmux": True, "pdmux_token_budget": 0}, "`multiplexing.token_budget` must be a whole number of at least 1"),
        ({"pdmux": True, "batching": "mixed"}, "`multiplexing` is set and `batching` is mixed"),
        ({"pdmux": True, "speculative_method": "ngram"}, "`multiplexing` is set and `speculative_method` is ngram"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(folders["qwen3"], **{**CPU, **OF_ENGINE, **options})
    assert message in str(refused.value)
