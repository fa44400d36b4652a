"""The tokens routed to each expert: counted once each, on every layout of ranks, for every family with experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import ExpertRecord  # noqa: E402
from lockstep.core.contract.config import SchedConfig  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import ExpertLoadMeasured  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.expert_load import ExpertCounter, counter_for  # noqa: E402
from lockstep.runtime.forward import RankTokens  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.models.experts import Experts  # noqa: E402
from lockstep.runtime.models.stage import ExpertSplit  # noqa: E402
from tests.runtime.test_models import Ranks  # noqa: E402
from tests.support.architectures import ARCHITECTURES, HYBRIDS, save_architecture  # noqa: E402
from tests.support.model_engines import DENSE, EXPERTS, ranks_of  # noqa: E402
from tests.support.model_passes import Passes  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402

COUNTED: dict[str, Any] = {
    "device": "cpu", "grammar_backend": "none", "page_size": 4, "pages": 600, "chunked_prefill_size": 48,
    "max_running_requests": 12, "expert_load_interval": 3,
}  # fmt: skip
RNG = random.Random(9)
PROMPTS = [[RNG.randrange(3, 300) for _ in range(RNG.randrange(5, 40))] for _ in range(10)]
OUTPUTS = Params(max_new_tokens=6, ignore_eos=True)
COMPUTED = sum(len(prompt) + 5 for prompt in PROMPTS)  # tokens; the last one that is drawn is not computed
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "padded decodes": {"cuda_graphs": "eager"},
    "overlap": {"overlap_depth": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("model"), EXPERTS)


@pytest.fixture(scope="module")
def routed(folder: Path) -> np.ndarray:
    """Tokens of each expert, from the choices of the router itself: [layers, experts]."""
    found: list[tuple[int, Any]] = []
    plain = Experts.route

    def seen(self: Experts, hidden: Any) -> Any:
        weights, experts = plain(self, hidden)
        found.append((id(self), experts.clone()))
        return weights, experts

    with LLM(folder, **{**COUNTED, "expert_load_interval": 0}) as llm, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Experts, "route", seen)
        llm.generate(PROMPTS, OUTPUTS)
        layers = [id(layer) for layer in llm.model.expert_layers()]
    counts = np.zeros((len(layers), EXPERTS["num_experts"]), np.int64)
    for layer, experts in found:
        counts[layers.index(layer)] += np.bincount(experts.flatten().numpy(), minlength=counts.shape[1])
    assert counts.sum(1).tolist() == [COMPUTED * EXPERTS["num_experts_per_tok"]] * 2
    return counts


def recorded(llm: LLM) -> ExpertRecord:
    llm.start_expert_record()
    llm.generate(PROMPTS, OUTPUTS)
    llm.stop_expert_record()
    return llm.expert_record()


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_token_is_counted_once_on_every_layout(
    name: str, folder: Path, routed: np.ndarray, tmp_path: Path
) -> None:
    """Also by the journal, which has a report for each interval."""
    with LLM(folder, **{**COUNTED, **LAYOUTS[name]}, journal=tmp_path / "journal", warm_up=True) as llm:
        record = recorded(llm)
    assert record.counts.tolist() == routed.tolist()
    assert not record.recording
    assert record.batches >= 10
    reports = [event for event, _ in fold(tmp_path / "journal") if isinstance(event, ExpertLoadMeasured)]
    assert len(reports) >= record.batches // 3
    assert sum(np.frombuffer(one.counts, np.int64).sum() for one in reports) == routed.sum()
    assert replay(tmp_path / "journal").digest == llm.host.engine.digest


@pytest.mark.parametrize("ep", [1, 2])
def test_the_first_of_several_ranks_counts_for_all(ep: int, folder: Path) -> None:
    meeting, prompt = Ranks(2), PROMPTS[0]
    alone = build_model(folder, torch.float32)

    def count(model: Any) -> Any:
        counter = counter_for(model, SchedConfig(expert_load_interval=1), 64)
        if counter is not None:
            counter.begin(len(prompt), None)
        Passes(model, pages_each=16).run({0: prompt})
        return None if counter is None else counter.take().tolist()

    def of_rank(rank: int) -> Any:
        parallel = replace(meeting.parallel(rank), experts=ExpertSplit(ep))
        return count(build_model(folder, torch.float32, parallel=parallel))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(of_rank, range(2))) == [count(alone), None]


@pytest.mark.parametrize("options", [{"ep": 2}, {"ep": 2, "moe_a2a": True}], ids=["gathered", "all-to-all"])
def test_data_parallel_ranks_count_the_tokens_of_their_own_requests(
    options: dict[str, Any], folder: Path, routed: np.ndarray, tmp_path: Path
) -> None:
    with ranks_of(folder, 2, tmp_path, options, {"expert_load_interval": 2}) as llms:
        for llm in llms:
            llm.start_expert_record()
        pending = [llms[number % 2].ask(prompt, OUTPUTS) for number, prompt in enumerate(PROMPTS)]
        for number, one in enumerate(pending):
            llms[number % 2].wait(one)
        records = [llm.expert_record() for llm in llms]
    assert sum(one.counts for one in records).tolist() == routed.tolist()
    own = [sum(len(prompt) + 5 for prompt in PROMPTS[rank::2]) for rank in range(2)]
    assert [int(one.counts.sum()) for one in records] == [2 * 2 * tokens for tokens in own]


def test_a_record_is_refused_where_there_is_none(folder: Path) -> None:
    with LLM(folder, **COUNTED) as llm:
        for ask in (llm.stop_expert_record, llm.expert_record):
            with pytest.raises(ConfigError, match="not being recorded; start a record first"):
                ask()
        llm.start_expert_record()
        llm.generate(PROMPTS[:1], OUTPUTS)
        assert llm.expert_record().recording
        llm.start_expert_record()
        assert llm.expert_record().counts.sum() == 0
    without = {**COUNTED, "expert_load_interval": 0}
    with LLM(folder, **without) as llm, pytest.raises(ConfigError, match="not measured; set expert_load_interval"):
        llm.start_expert_record()


def test_models_and_layouts_that_cannot_count_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`expert_load_interval` is 3, but Qwen3ForCausalLM has no experts"):
        LLM(write_weights(tmp_path, DENSE), **COUNTED)
    with pytest.raises(ConfigError, match="`expert_load_interval` is 3, but `pp` is 2"):
        LLM(folder, **COUNTED, pp=2)
    with pytest.raises(ConfigError, match="`expert_load_interval` must be a whole number of batches, or 0"):
        SchedConfig(expert_load_interval=-1)


# --------------------------------------------------------------------------------------------------------- transformers


def families_with_experts() -> Iterator[str]:
    for name, (_, special) in (ARCHITECTURES | HYBRIDS).items():
        if {"num_experts_per_tok", "moe_k"} & special.keys() and name != "Qwen3.5":  # which is dense
            yield name


@pytest.mark.parametrize("name", list(families_with_experts()))
def test_every_family_of_transformers_with_experts_is_counted(name: str, tmp_path: Path) -> None:
    save_architecture(tmp_path, name)
    model = build_model(tmp_path, torch.float32, backend="transformers")
    counter = counter_for(model, SchedConfig(expert_load_interval=1), 64)
    assert counter is not None
    counter.begin(9, None)
    Passes(model).run({0: list(range(3, 12))})
    counts = counter.take()
    assert len(counts) >= 1
    assert counts.sum(1).tolist() == [9 * 2] * len(counts)
    assert counts.shape[1] == 4


# ------------------------------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize("gathered", [None, 1])
def test_a_scatter_of_weights_counts_as_a_bincount(gathered: int | None) -> None:
    """As on a GPU: padding and rows of other ranks have weight 0. Numbers beyond the experts are not counted."""
    draw = torch.Generator().manual_seed(1)
    experts = torch.randint(0, 8, (3, 24, 2), generator=draw)  # layers, rows, experts per token
    ranks = RankTokens((5, 7, 2), padded=True)
    counters = [
        ExpertCounter(3, 7, torch.device("cpu"), 24, gathered=gathered, by_weights=scatter) for scatter in (False, True)
    ]
    for _ in range(2):
        for counter in counters:
            counter.begin(7, ranks)
            for layer in range(3):
                counter.counts(layer)(experts[layer])
    one, other = (counter.take() for counter in counters)
    rows = slice(7, 14) if gathered else slice(0, 7)
    expected = [torch.bincount(experts[layer, rows].flatten(), minlength=8)[:7] * 2 for layer in range(3)]
    assert one.tolist() == other.tolist() == torch.stack(expected).tolist()
    assert counters[1].take().sum() == 0
