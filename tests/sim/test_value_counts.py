"""Counted values have the statistics of the full list, with any sizes of portions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sim.metrics import value_counts
from lockstep.sim.metrics.value_counts import ValueCounts, ValueCountsBuilder

VALUES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 10**9), st.sampled_from([0.5, 10 / 3, 1e6 / 7])))


@given(portions=st.lists(st.tuples(VALUES, st.integers(1, 3), st.booleans()), max_size=6), merge=st.integers(1, 20))
def test_the_list_is_the_same_in_any_portions(portions: list[tuple[list[float], int, bool]], merge: int) -> None:
    builder, everything = ValueCountsBuilder(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_counts, "MERGE_ENTRIES_MIN", merge)
        for values, times, look in portions:
            builder.add(np.array(values, np.float64), np.full(len(values), times) if times > 1 else None)
            everything += values * times
            if look:
                builder.build()
    counted, at_once = builder.build(), ValueCounts.of(np.array(everything, np.float64))
    assert counted.expand().tolist() == sorted(everything)
    assert counted.values.tolist() == at_once.values.tolist() == sorted(set(everything))
    assert counted.counts.tolist() == at_once.counts.tolist()
    assert counted.size == len(everything)


@given(st.lists(st.lists(st.one_of(st.integers(-5, 40), st.integers(-(10**12), 10**12)), max_size=30), max_size=5))
def test_whole_numbers_are_counted_alike(portions: list[list[int]]) -> None:
    counted, floats = ValueCountsBuilder(), ValueCountsBuilder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_counts, "SORTED", 3)
        patch.setattr(value_counts, "COUNTED_MIN", 8)
        for values in portions:
            counted.add(np.array(values, np.int64))
            floats.add(np.array(values, np.float64))
    assert counted.build().values.tolist() == floats.build().values.tolist()
    assert counted.build().counts.tolist() == floats.build().counts.tolist()


@given(values=VALUES.filter(bool), percentile=st.one_of(st.sampled_from([50, 90, 95, 99]), st.floats(0, 100)))
def test_percentiles_are_those_of_numpy(values: list[float], percentile: float) -> None:
    counted = ValueCounts.of(np.array(values, np.float64))
    assert counted.percentile(percentile) == np.percentile(np.array(values, np.float64), percentile)  # to the last bit
    assert counted.mean() == pytest.approx(np.mean(values))
    assert counted.at(range(len(values))).tolist() == sorted(values)


def test_an_empty_list_has_no_size() -> None:
    assert ValueCountsBuilder().build().size == ValueCounts.of(np.empty(0)).size == 0
