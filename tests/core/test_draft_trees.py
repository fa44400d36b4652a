"""Trees of drafts: which drafts they have, what a result must report, and how they follow from results."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from lockstep.core.contract.commands import BatchPlan, Int32s, Speculation, depths_of
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestArrived, TokenRuns
from lockstep.core.features.draft_trees import DraftTree, TreeChances, best_parents, counts_by_rank, ranks_of
from lockstep.core.invariants import check
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.draw import with_trees
from tests.support.driver.run import run_actions

TREE: dict[str, Any] = {"speculative_method": "eagle", "speculative_topk": 2, "num_speculative_tokens": 6}


def config(**settings: Any) -> SchedConfig:
    return SchedConfig(**{"page_size": 4, "pages": 64, "overlap_depth": 1} | TREE | settings)


def ids(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def started(settings: SchedConfig) -> tuple[Engine, BatchPlan]:
    """An engine with one running request, and the plan of its first tree."""
    engine = Engine(settings)
    engine.step(RequestArrived(0, request_id=0, prompt=TokenRuns((7, 6)), max_new_tokens=40))
    engine.step(LaneReady(0))
    engine.step(BatchFinished(1, 0, ids(100)))
    plan = engine.step(LaneReady(1)).launched()
    assert plan is not None
    assert plan.speculation is not None
    return engine, plan


def children(parents: Int32s) -> Counter[int]:
    return Counter(parents.tolist())


def test_the_first_drafts_of_a_tree_are_a_tree_with_the_likeliest_drafts() -> None:
    chances = TreeChances([[100.0] * 3] * 4, [[60.0, 20.0, 10.0]] * 4)
    parents = best_parents(chances, 9, topk=3, steps=4)
    assert parents.tolist() == [0, 1, 2, 0, 3, 1, 4, 0, 2]
    assert depths_of(parents).tolist() == [0, 1, 2, 3, 1, 4, 2, 2, 1, 3]
    assert ranks_of(parents) == [0, 0, 0, 1, 0, 1, 0, 2, 1]
    for drafts in range(1, 9):
        assert best_parents(chances, drafts, topk=3, steps=4).tolist() == parents[:drafts].tolist()


@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (2, 1), (3, 2), (8, 8)])
def test_no_tree_is_wider_or_deeper_than_the_settings(topk: int, steps: int) -> None:
    rng = random.Random(f"{topk} {steps}")
    for _ in range(50):
        shares = [[rng.random() / (rank + 1) for rank in range(topk)] for _ in range(rng.randint(0, steps))]
        chances = TreeChances([[10.0] * topk for _ in shares], [[10 * one for one in depth] for depth in shares])
        parents = best_parents(chances, 12, topk, steps)
        assert max(children(parents).values()) <= topk
        assert max(depths_of(parents)) <= steps
        assert (parents < np.arange(1, len(parents) + 1)).all()


def test_a_tree_of_one_alternative_is_a_chain() -> None:
    assert best_parents(TreeChances(), 5, topk=1, steps=5).tolist() == [0, 1, 2, 3, 4]
    assert config(speculative_topk=1, num_speculative_tokens=3) == config(
        speculative_topk=UNSET, num_speculative_tokens=3
    )


def test_drafts_below_the_least_chance_are_left_out_but_the_first() -> None:
    chances = TreeChances([[100.0, 100.0]], [[50.0, 10.0]])
    assert best_parents(chances, 9, topk=2, steps=2, least=0.2).tolist() == [0, 1]
    assert best_parents(chances, 9, topk=2, steps=2, least=0.25).tolist() == [0, 1]  # its chance is 0.25 exactly
    assert best_parents(chances, 9, topk=2, steps=2, least=0.9).tolist() == [0]


def test_a_row_with_little_room_verifies_the_first_drafts() -> None:
    tree = DraftTree(config(num_speculative_tokens=8, speculative_num_steps=3))
    longest = np.maximum.accumulate(depths_of(tree.parents))
    for path in range(4):
        (drafts,) = tree.lengths(np.array([path], np.int32), np.array([99], np.int32), 1).tolist()
        assert longest[drafts] <= path
        assert drafts == 8 or longest[drafts + 1] > path
    assert tree.lengths(np.array([3], np.int32), np.array([2], np.int32), 1).tolist() == [2]


def test_a_plan_has_the_tree_and_the_bounds_of_its_longest_path() -> None:
    _, plan = started(config(num_speculative_tokens=7, speculative_num_steps=2))
    assert plan.speculation is not None
    assert plan.speculation.draft_lengths.tolist() == [6]  # all places of two depths with two alternatives
    assert sorted(children(plan.speculation.parents).values()) == [2, 2, 2]
    assert (plan.starts.tolist(), plan.stops.tolist()) == ([6], [9])
    assert plan.deltas.pages.size == 2  # for positions 8 to 12: the slots of six drafts behind position 6


def test_shares_follow_from_results_by_depth_and_rank() -> None:
    parents = np.array([0, 0, 1, 1, 2], np.int32)
    drafts = Speculation(5, np.array([5, 5, 2], np.int32), "eagle", parents=parents)
    offered, right = counts_by_rank(drafts, np.array([2, 1, 0], np.int32), np.array([1, 4, 2], np.int32))
    # three rows had drafts 1 and 2; behind draft 1, right in the first row, drafts 3 and 4; behind 2 only draft 5
    assert offered.tolist() == [[3, 3], [2, 1]]
    assert right.tolist() == [[1, 1], [0, 1]]


def test_a_tree_grows_where_its_drafts_are_right() -> None:
    engine, plan = started(config(overlap_depth=0))
    first = plan.speculation
    assert first is not None
    second = int(np.flatnonzero(first.parents == 0)[1]) + 1
    for turn in range(12):
        engine.step(BatchFinished(2 + turn, plan.batch_id, ids(101, 102), accepted=ids(2, second)))
        check(engine)
        launched = engine.step(LaneReady(2 + turn)).launched()
        assert launched is not None
        assert launched.speculation is not None
        plan, parents = launched, launched.speculation.parents
        second = int(np.flatnonzero(parents == 0)[1]) + 1
    assert engine.speculation.tree is not None
    assert engine.speculation.tree.chances.share(1, 1) == 1.0
    assert engine.speculation.tree.chances.share(1, 0) == 0.0


@pytest.mark.parametrize(
    ("accepted", "says"),
    [
        (ids(2), "names 0 right drafts of its tree, expected 1"),
        (ids(2, 1, 1), "names 2 right drafts of its tree, expected 1"),
        (ids(2, 7), "draft 7 of sampling row 0 is right behind draft 0"),
        (ids(2, 0), "draft 0 of sampling row 0 is right behind draft 0"),
        (ids(3, 1, 1), "draft 1 of sampling row 0 is right behind draft 1"),
        (ids(9, *range(8)), "reports 9 tokens of sampling row 0"),
    ],
)
def test_right_drafts_that_are_no_path_are_refused(accepted: bytes, says: str) -> None:
    engine, plan = started(config())
    tokens = ids(*range(np.frombuffer(accepted, np.int32)[0]))
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=says):
        engine.step(BatchFinished(2, plan.batch_id, tokens, accepted=accepted))
    assert snapshot.dump(engine) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculative_method": "ngram"}, "n-grams propose one continuation"),
        ({"speculative_topk": 17}, "`speculative_topk` must be a whole number from 1 to 16"),
        ({"speculative_topk": 1, "speculative_num_steps": 2}, "drafts are chains"),
        ({"num_speculative_tokens": 3, "speculative_num_steps": 4}, "a tree has `num_speculative_tokens` 3"),
        ({"jump_forward_tokens": 4}, "beside forced tokens"),
        ({"speculative_method": UNSET, "num_speculative_tokens": UNSET}, "there are no drafts"),
        ({"role": "prefill"}, "not supported with `role`"),
    ],
)
def test_settings_that_trees_cannot_have_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**settings)


def test_defaults_of_a_tree() -> None:
    trees = SchedConfig(page_size=4, pages=64, speculative_method="mtp", speculative_topk=4)
    assert (trees.drafts_max, trees.path_max, trees.drafts_trees) == (8, 4, True)
    small = SchedConfig(page_size=4, pages=64, speculative_method="mtp", speculative_topk=4, num_speculative_tokens=2)
    assert small.path_max == 2


def test_histories_with_trees_replay_and_survive_snapshots() -> None:
    """Faults, cancels, restarts and snapshots between any two events; the replayed digests are equal."""
    from tests.swarm import history

    marks, seed = Counter[str](), 0
    while marks["histories"] < 4:
        settings, actions = history(seed)
        seed += 1
        if not settings.speculates or settings.jumps or settings.hybrid is not UNSET or settings.hands_over:
            continue
        settings = replace(with_trees(settings, random.Random(seed)), tables_append_only=seed % 2 == 0 or UNSET)
        marks.update(run_actions(settings, actions, replay=True).marks)
        marks["histories"] += 1
    assert marks["verify batch with a tree"], marks


def test_branches_of_a_tree_cause_no_retraction() -> None:
    """With the full reserve two requests fill the pool to the last page; a tree reaches behind the end of its row."""
    settings = SchedConfig(
        page_size=4,
        pages=17,
        chunked_prefill_size=8,
        schedule_policy="lof",
        batching="running_first",
        reserve="full",
        speculative_method="eagle",
        num_speculative_tokens=19,
        speculative_topk=3,
        speculative_num_steps=4,
    )
    prompts = ((1, 10, 36), (3, 3, 17), (2, 6, 29), (3, 3, 15), (2, 3, 27))
    driver = run_actions(settings, [("arrive", base, length, outputs, {}) for base, length, outputs in prompts])
    assert "verify batch with a tree" in driver.marks
    assert "retracted (pages)" not in driver.marks
