"""Trees of drafts on the device: masks, right paths, moved KV, and that no answer changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import BatchFinished, RequestRetracted, SamplingParams  # noqa: E402
from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from lockstep.host.drafts import DraftCounts  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.attention.cpu import CpuAttention  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.attention.rules import LayerRules  # noqa: E402
from lockstep.runtime.demo_model import demo_model_folder  # noqa: E402
from lockstep.runtime.draft_tree import TreeRows, TreeShape, moves_of, part_of, right_paths, shape_of  # noqa: E402
from lockstep.runtime.drafting import DraftingRows, places_of  # noqa: E402
from lockstep.runtime.forward import ForwardBatch  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from tests.runtime.test_drafting import random_requests  # noqa: E402
from tests.support.heads import saved_head, saved_with_mtp  # noqa: E402
from tests.support.markov import statistic_of_pairs  # noqa: E402
from tests.support.small_runtime import CPU, ForeseeingTree, SmallRuntime, alone, small_config  # noqa: E402

TREE: dict[str, Any] = {"speculative_method": "eagle", "speculative_topk": 3, "num_speculative_tokens": 7}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 0": {"overlap_depth": 0},
    "depth 2": {"overlap_depth": 2},
    "wide": {"num_speculative_tokens": 12, "speculative_topk": 6, "speculative_num_steps": 2},
    "deep": {"num_speculative_tokens": 12, "speculative_topk": 2, "speculative_num_steps": 8},
    "fewer where they are wrong": {"speculative_min_chance": 0.2},
    "mixed": {"batching": "mixed", "chunked_prefill_size": 8},
    "retractions": {"retract_every": 3, "overlap_depth": 1},
    "short of pages": {"pages": 20, "reserve": "on_demand"},
    "small pages": {"page_size": 1, "pages": 200, "chunked_prefill_size": 5},
}


def paths_of(runtime: SmallRuntime) -> list[list[int]]:
    """The numbers of the right drafts of each batch."""
    found = []
    plans = {plan.batch_id: plan for plan in runtime.plans}
    for event, _ in runtime.steps:
        if isinstance(event, BatchFinished) and event.accepted:
            samplers = len(plans[event.batch_id].sample_rows)
            found.append(np.frombuffer(event.accepted, np.int32)[samplers:].tolist())
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_is_answered_as_if_there_were_no_drafts(name: str) -> None:
    runtime = SmallRuntime(
        run_at="launch" if len(name) % 2 else "collection",
        canary=False,
        drafter=ForeseeingTree,
        eos_token_ids=(5,),
        **{**TREE, **SETTINGS[name]},
    )
    requests = random_requests(len(name), 14)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    for answer, (prompt, count) in zip(answers, requests, strict=True):
        assert answer.tokens == alone(prompt, count, stops=(5,))
    paths = paths_of(runtime)
    assert any(path != sorted(set(range(1, 1 + len(path)))) for path in paths), "all right paths are first ones"
    if "retractions" in name:
        assert runtime.decided(RequestRetracted)
    if runtime.config.overlap_depth:
        assert any(plan.starts_after for plan in runtime.plans)


def test_a_journal_with_trees_replays_strictly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TREE, "overlap_depth": 1, "retract_every": 4}
    with JournalWriter.create(
        tmp_path, JournalHeader(config=small_config(**settings), host={"kind": "runtime"})
    ) as journal:
        runtime = SmallRuntime(journal=journal, canary=False, drafter=ForeseeingTree, **settings)
        for prompt, count in random_requests(8, 12):
            runtime.submit(prompt, count)
        runtime.run()
    assert replay(tmp_path).digest == runtime.engine.digest


@pytest.mark.parametrize("depth", [0, 1])
def test_logprobs_and_hidden_states_are_those_without_drafts(depth: int) -> None:
    def run(**settings: Any) -> list[Any]:
        runtime = SmallRuntime(canary=False, drafter=ForeseeingTree, **settings)
        wanted = {"sampling": SamplingParams(top_logprobs=1), "return_hidden_states": True}
        answers = [runtime.submit(prompt, count, **wanted) for prompt, count in random_requests(3, 8)]
        runtime.run()
        return [(one.tokens, one.logprobs, one.extras.hidden_states) for one in answers if one.extras is not None]

    plain, drafted = run(overlap_depth=0), run(overlap_depth=depth, **TREE)
    for (tokens, logprobs, states), (same_tokens, same_logprobs, same_states) in zip(plain, drafted, strict=True):
        assert tokens == same_tokens
        assert str(logprobs) == str(same_logprobs)
        assert states.keys() == same_states.keys()
        assert all(np.array_equal(state, same_states[position]) for position, state in states.items())


def test_the_right_path_is_that_of_the_drawn_tokens() -> None:
    shape = shape_of(np.array([0, 0, 1, 2, 2, 4], np.int32))
    places_host, there_host = places_of(np.array([7, 3, 1, 7], np.int32))
    places, there = torch.from_numpy(places_host), torch.from_numpy(there_host)
    # number          0   1   2   3   4   5   6 |  0   1   2 |  0 |  0   1   2   3   4   5   6
    fed = torch.tensor([9, 10, 11, 12, 13, 14, 15, 9, 20, 21, 9, 9, 30, 30, 31, 32, 33, 34])
    drawn = torch.tensor([11, 0, 14, 0, 0, 50, 0, 20, 51, 0, 52, 30, 31, 32, 53, 0, 0, 0], dtype=torch.int32)
    parents, deepest = part_of(shape, 7)
    above, real = torch.from_numpy(parents), torch.from_numpy(np.flatnonzero(there_host))
    found = right_paths(above, deepest, drawn, torch.zeros(18, dtype=torch.bool), fed, places, there, real)
    assert found.path.tolist() == [[2, 5, 0], [1, 0, 0], [0, 0, 0], [1, 3, 0]]  # of two equal drafts the first
    assert found.accepted.tolist() == [3, 2, 1, 3]
    assert drawn[found.last].tolist() == [50, 51, 52, 53]
    assert found.order.tolist()[:3] == [0, 2, 5]
    assert sorted(found.order.tolist()) == list(range(18))
    source, target = moves_of(found, places, torch.arange(18) + 100)
    moved = {(int(a), int(b)) for a, b in zip(source, target, strict=True) if a != b}
    assert moved == {(102, 101), (105, 102), (114, 113)}
    invalid = torch.zeros(18, dtype=torch.bool)
    invalid[5] = True  # behind draft 5 nothing can be drawn: it counts as wrong
    assert right_paths(above, deepest, drawn, invalid, fed, places, there, real).accepted.tolist() == [2, 2, 1, 3]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_a_draft_attends_to_its_path_only(backend: Any, window: int | None) -> None:
    """Each token's result is that of a row with the tokens of its path, in order."""
    torch.manual_seed(3)
    shape, stand, size = shape_of(np.array([0, 0, 1, 2, 4], np.int32)), 9, 4
    new = 1 + len(shape.parents)
    rule = (LayerRules(0.5, window=window),)
    key, value = torch.randn(2, stand + new, 2, 8)
    query = torch.randn(stand + new, 4, 8)

    def run(places: list[int], start: int, tree: TreeRows | None) -> Any:
        pool = KvPool(1, 8, size, 2, 8, torch.float32, CPU)
        attention = backend(pool, rules=rule)
        out = None
        for first, stop in ((0, start), (start, len(places))):
            at = torch.arange(first, stop)
            mine = torch.tensor(places[first:stop])
            batch = ForwardBatch(
                token_ids=at, positions=at, slots=at, rows=torch.zeros(1, dtype=torch.int32),
                indptr=torch.tensor([0, stop - first], dtype=torch.int32),
                lengths=torch.tensor([stop], dtype=torch.int32),
                page_table=torch.arange(8, dtype=torch.int32)[None], logits_at=at, extend_rows=1,
                starts_host=np.array([first], np.int32), lengths_host=np.array([stop], np.int32),
                tree=tree if first else None,
            )  # fmt: skip
            attention.plan(batch)
            out = attention.run(0, query[mine], key[mine], value[mine], batch)
        return out

    rows = TreeRows(0, np.array([stand], np.int32), np.arange(new, dtype=np.int32), shape)
    found = run(list(range(stand + new)), stand, rows)
    for number in range(new):
        path = np.flatnonzero(shape.sees[number]).tolist()
        alone = run([*range(stand), *(stand + one for one in path)], stand, None)
        assert torch.allclose(found[number], alone[-1], atol=1e-5), number


class Alternatives(ForeseeingTree):
    """Drafts tokens 0, 1, 2, ... behind each token."""

    def draft_tree(self, drafting: DraftingRows, shape: TreeShape) -> Any:
        guesses = []
        seen: dict[int, int] = {}
        for parent in shape.parents.tolist():
            seen[parent] = seen.get(parent, -1) + 1
            guesses.append(seen[parent])
        return torch.tensor([guesses] * len(drafting.rows))


def test_drawn_tokens_have_the_models_chances() -> None:
    """Chi-square over 1,000 seeds: of each pair of consecutive tokens, with many right drafts."""
    runtime = SmallRuntime(
        check=False, canary=False, max_running_requests=200, pages=4000, overlap_depth=1, chunked_prefill_size=800,
        drafter=Alternatives, **TREE,
    )  # fmt: skip
    statistic = statistic_of_pairs(runtime, 1000)
    assert statistic < 32.9  # of 12 degrees of freedom: exceeded by chance once in a thousand
    assert runtime.host.drafts.right > 2500
    assert runtime.host.drafts.accepted_length_mean > 1.4


# ------------------------------------------------------------------------------------------------------ a real model


PROMPTS = ["The scheduler writes a", "A page is held. A", "def"]
EACH = [Params(max_new_tokens=10, ignore_eos=True)] * 2
EACH += [Params(max_new_tokens=10, temperature=0.5, seed=3, frequency_penalty=0.2, ignore_eos=True)]


def said(model: Path | None = None, **settings: Any) -> tuple[list[list[int]], DraftCounts]:
    with LLM(model, device="cpu", max_running_requests=4, dtype="float32", page_size=4, pages=64, **settings) as llm:
        return [answer.token_ids for answer in llm.generate(PROMPTS, EACH)], llm.stats().drafts


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return said()[0]


TREES: dict[str, Any] = {"speculative_topk": 3, "num_speculative_tokens": 9, "overlap_depth": 1, "retract_every": 6}


@pytest.mark.parametrize("kind", ["eagle, chains", "eagle, part of the tokens", "mtp"])
def test_random_heads_change_no_token(kind: str, tmp_path: Path, plain: list[list[int]]) -> None:
    """Greedy, and drawn with penalties; 200 requests: benchmarks/draft_heads.py."""
    if kind == "mtp":
        drafted, counts = said(saved_with_mtp(tmp_path / "model", 1), speculative_method="mtp", **TREES)
    else:
        head = saved_head(tmp_path / "head", 2, draft_vocab=1024 if "part" in kind else 0)
        drafted, counts = said(draft_model=head, **({} if "chains" in kind else TREES))
    assert drafted == plain
    assert counts.verifications
    assert counts.drafts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_model": demo_model_folder(), "speculative_topk": 2}, "a draft model drafts chains here"),
        ({"speculative_method": "eagle", "draft_model": demo_model_folder()}, "needs a head of EAGLE-3"),
        ({"speculative_method": "ngram", "speculative_topk": 2}, "n-grams propose one continuation"),
    ],
)
def test_trees_that_cannot_be_drafted_are_one_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", **settings)


def test_trees_and_the_canary_are_one_error(tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", 1)
    with pytest.raises(ConfigError, match="`debug` compares the KV of each position"):
        LLM(device="cpu", draft_model=head, speculative_topk=2, debug=True)


def test_a_head_for_another_model_is_one_error(tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", 1)
    config = json.loads((head / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 99}, "has 99 tokens, the model 2,048"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 9]}}, "the model has 4"),
    ):
        (head / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=message):
            LLM(device="cpu", draft_model=head)
