"""Placing experts by their load: properties of every placement, and its distance from the optimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.cluster.expert_placement import (
    _copies,
    _fullest,
    _heaviest_first,
    _in_rounds,
    _packed,
    balance,
    fetched,
    gpu_loads,
    settled,
    unbalanced,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import ExpertLoadMeasured
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    """Loads with ties and zeros, and a layout that fits them: loads, slots, gpus, nodes, groups."""
    nodes = draw(st.sampled_from([1, 1, 2, 3]))
    gpus = nodes * draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    least = -(-experts // gpus)
    per_gpu = draw(st.integers(least, max(least, experts // nodes)))
    number = st.one_of(st.integers(0, 4), st.integers(0, 10_000))
    rows = draw(st.lists(st.lists(number, min_size=experts, max_size=experts), min_size=1, max_size=3))
    return np.array(rows, np.int64), gpus * per_gpu, gpus, nodes, groups


@settings(max_examples=60, deadline=None)
@given(cases())
def test_of_every_placement(case: tuple[np.ndarray, int, int, int, int]) -> None:
    """Slots are filled, no expert is left out, groups stay on a node, no layer is worse off; results are repeatable."""
    loads, slots, gpus, nodes, groups = case
    experts = loads.shape[1]
    placement = balance(loads, slots=slots, gpus=gpus, nodes=nodes, groups=groups)
    assert placement.shape == (len(loads), slots)
    assert all(set(row) == set(range(experts)) for row in placement.tolist())
    assert (placement == balance(loads.copy(), slots=slots, gpus=gpus, nodes=nodes, groups=groups)).all()
    totals = gpu_loads(loads, placement, gpus)
    np.testing.assert_allclose(totals.sum(1), loads.sum(1))
    if experts % gpus == 0:
        plain = unbalanced(experts, slots=slots, gpus=gpus, layers=len(loads))
        np.testing.assert_allclose(gpu_loads(loads, plain, gpus), loads.reshape(len(loads), gpus, -1).sum(2), atol=1e-9)
        assert (totals.max(1) <= gpu_loads(loads, plain, gpus).max(1)).all()
    if nodes > 1:
        node_of_slot = np.arange(slots) // (slots // nodes)
        for row in placement:
            homes: dict[int, set[int]] = {}
            for expert, node in zip(row.tolist(), node_of_slot.tolist(), strict=True):
                homes.setdefault(expert // (experts // groups), set()).add(node)
            assert all(len(found) == 1 for found in homes.values())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(2, 3),
)
def test_the_heaviest_copy_is_as_light_as_any_numbers_of_copies_make_it(
    loads: list[int], spare: int, copies_max: int
) -> None:
    experts = len(loads)
    slots = min(experts + spare, experts * copies_max)
    weights = np.array([loads], np.float64)
    found = _copies(weights, slots, copies_max)[0]
    assert found.sum() == slots
    assert found.min() >= 1
    assert found.max() <= copies_max
    best = min(
        max(load / count for load, count in zip(loads, counts, strict=True))
        for counts in itertools.product(range(1, copies_max + 1), repeat=experts)
        if sum(counts) == slots
    )
    assert (weights[0] / found).max() == pytest.approx(best)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_packing_is_within_its_bound_of_the_best_there_is(items: list[int], packs: int) -> None:
    """Every partition of six items into packs of equal size is tried."""
    weights = np.array([items], np.float64)
    pack = _packed(weights, packs)[0]
    assert np.bincount(pack, minlength=packs).tolist() == [6 // packs] * packs
    most = max(float(weights[0][pack == one].sum()) for one in range(packs))
    each = [one for one in range(packs) for _ in range(6 // packs)]
    best = min(
        max(sum(item for item, of in zip(items, way, strict=True) if of == one) for one in range(packs))
        for way in set(itertools.permutations(each))
    )
    assert best <= most <= (2 - 1 / packs) * best
    ways = (_heaviest_first(weights, packs), _in_rounds(weights, packs))
    assert most == min(_fullest(weights, way, packs)[0] for way in ways)


def test_a_layer_for_which_packing_is_no_better_stays_as_it_would_be_without() -> None:
    loads = np.array([[3, 9, 8, 7, 8, 6]])  # packed: 22 and 19
    assert gpu_loads(loads, balance(loads, slots=6, gpus=2), 2).tolist() == [[20, 21]]


def test_experts_are_packed_in_the_better_of_two_ways() -> None:
    loads = np.array([[8, 4, 3, 3, 1, 1, 1, 1]])  # in order: 18 and 4; in rounds of one expert for each GPU: 13 and 9
    assert gpu_loads(loads, balance(loads, slots=8, gpus=2), 2).tolist() == [[11, 11]]


def test_a_hot_expert_is_copied_and_its_copies_are_spread() -> None:
    loads = np.array([[90, 10, 10, 10, 10, 10, 10, 10]])
    placement = balance(loads, slots=12, gpus=4)
    copies = np.bincount(placement[0], minlength=8)
    assert copies.tolist() == [4, 2, 1, 1, 1, 1, 1, 1]  # on every GPU, and no more
    assert gpu_loads(loads, placement, 4).max() <= 45  # unbalanced: 100


def test_every_gpu_may_have_every_expert() -> None:
    placement = balance(np.ones((1, 8)), slots=16, gpus=2)
    assert np.sort(placement.reshape(2, 8), axis=1).tolist() == [list(range(8))] * 2


def test_renamed_gpus_fetch_no_more_and_nothing_if_nothing_changed() -> None:
    random = np.random.Generator(np.random.Philox(3))
    loads = random.gamma(1.0, size=(6, 32))
    before = balance(loads, slots=40, gpus=4)
    changed = loads.copy()
    changed[:, :4] = random.gamma(1.0, size=(6, 4))
    after = balance(changed, slots=40, gpus=4)
    renamed = settled(before, after, 4)
    assert fetched(before, renamed, 4).sum() <= fetched(before, after, 4).sum()
    assert gpu_loads(changed, renamed, 4).max() == gpu_loads(changed, after, 4).max()
    shuffled = before.reshape(6, 4, -1)[:, [2, 0, 3, 1]].reshape(6, -1)
    assert (settled(before, shuffled, 4) == before).all()
    assert fetched(before, before, 4).sum() == 0
    inside = settled(before, shuffled, 4, nodes=2)  # GPUs stay on their node
    assert (np.sort(inside[:, :20], 1) == np.sort(shuffled[:, :20], 1)).all()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"slots": 9, "gpus": 2}, "`slots` must be as many on each of 2 GPUs, got `9`"),
        ({"slots": 6, "gpus": 2}, "`slots` must be at least the 8 experts, got `6`"),
        ({"slots": 18, "gpus": 2}, "`slots` must be at most 16"),
        ({"slots": 8, "gpus": 2, "nodes": 4}, "`nodes` 4 does not divide the 2 GPUs"),
        ({"slots": 8, "gpus": 2, "nodes": 2, "groups": 3}, "`groups` must divide the 8 experts"),
        ({"slots": 8, "gpus": 0}, "`gpus` must be at least 1, got `0`"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance(np.ones((1, 8)), **layout)


def test_loads_that_cannot_be_are_refused() -> None:
    for loads in (np.array([[1.0, -1.0]]), np.array([[np.nan, 1.0]]), np.ones(4)):
        with pytest.raises(ConfigError, match="`loads` must be finite numbers"):
            balance(loads, slots=2, gpus=1)


# ---------------------------------------------------------------------------------------------------------- the counts


def report(time_us: int, counts: list[list[int]]) -> ExpertLoadMeasured:
    return ExpertLoadMeasured(time_us, len(counts), np.array(counts, np.int64).tobytes())


def test_an_engine_adds_reports_up_decides_nothing_and_remembers_them_in_snapshots() -> None:
    engine = Engine(SchedConfig(pages=16, page_size=16, context_tokens_max=128))
    without = snapshot.dump(engine)
    assert b"expert_loads" not in without
    step = engine.step(report(5, [[1, 2], [3, 4]]))
    assert (step.decided, step.commands) == ([], [])
    engine.step(report(9, [[10, 0], [0, 1]]))
    assert engine.experts.loads is not None
    assert engine.experts.loads.counts.tolist() == [[11, 2], [3, 5]]
    assert engine.experts.loads.reports == 2
    again = snapshot.restore(snapshot.dump(engine))
    assert snapshot.dump(again) == snapshot.dump(engine)
    again.step(report(10, [[1, 1], [1, 1]]))
    assert again.experts.loads is not None
    assert again.experts.loads.counts.tolist() == [[12, 3], [4, 6]]
    for impossible in (report(11, [[1, 2, 3]]), report(11, [[-1, 0], [0, 0]]), ExpertLoadMeasured(11, 2, b"123")):
        before = snapshot.dump(again)
        with pytest.raises(ContractError, match="experts"):
            again.step(impossible)
        assert snapshot.dump(again) == before


def test_a_model_may_have_one_layer_with_experts() -> None:
    engine = Engine(SchedConfig(pages=16, page_size=16, context_tokens_max=128))
    engine.step(report(5, [[1, 2]]))
    assert engine.experts.loads is not None
    assert engine.experts.loads.counts.tolist() == [[1, 2]]
