"""Budgets of admission, compared with arithmetic where a scenario would show less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.core.requests.budget import IGNORE_EOS_RESERVE_TOKENS, NewTokenRatio, lasts

Requests = list[tuple[int, int]]  # tokens left to sample, tokens held


def least_left_over(requests: Requests, free: int) -> int:
    """Free tokens at the scarcest end, less one per remaining request: each writes a token at a time and frees all."""
    running = [[left, held] for left, held in requests if left > 0]
    least = free
    while running:
        free -= len(running)
        running = [[left - 1, held + 1] for left, held in running]
        if any(left == 0 for left, _ in running):
            least = min(least, free - IGNORE_EOS_RESERVE_TOKENS * len(running))
        free += sum(held for left, held in running if left == 0)
        running = [one for one in running if one[0]]
    return least


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 12)), min_size=1, max_size=8), st.integers(-5, 120))
@example([(0, 7)], -3)
@example([(3, 1), (3, 1), (9, 4)], 20)
@example([(1, 0)], 2)  # one token would be left over, which is the one that must stay free
@example([(9, 0), (9, 0)], 20)  # a token is left over for each of two that run
@example([(9, 0), (9, 0)], 12)  # enough for the last request alone, but not while both run
@example([(1, 0), (9, 0), (9, 0)], 21)  # tokens that the first request wrote are freed too
def test_memory_lasts_if_every_end_leaves_a_token_each_over(requests: Requests, free: int) -> None:
    left = np.array([left for left, _ in requests], np.float64)
    held = np.array([held for _, held in requests], np.int32)
    ends = any(left > 0 for left, _ in requests)
    assert lasts(left, held, free) == (not ends or least_left_over(requests, free) > 0)


@pytest.mark.parametrize(("conservativeness", "initial", "floor"), [(1.0, 0.7, 0.098), (2.0, 1.0, 0.14)])
def test_the_new_token_ratio_falls_to_its_floor_over_600_decodes(
    conservativeness: float, initial: float, floor: float
) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert ratio.value == pytest.approx(initial)
    ratio.decoded()
    assert ratio.value == pytest.approx(initial - (initial - floor) / 600)
    ratio.decoded(299)
    assert ratio.value == pytest.approx((initial + floor) / 2)
    ratio.decoded(301)
    assert ratio.value == ratio.floor == pytest.approx(floor)
    ratio.idle()
    assert ratio.value == pytest.approx(initial)
