"""Budgets of admission, compared with arithmetic where a scenario would show less."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.core.requests.budget import IGNORE_EOS_RESERVE_TOKENS, lasts

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
@example([(9, 0), (9, 0)], 12)  # enough for the last request alone, but not while both run
@example([(1, 0), (9, 0), (9, 0)], 21)  # tokens that the first request wrote are freed too
def test_memory_lasts_if_every_end_leaves_a_token_each_over(requests: Requests, free: int) -> None:
    left = np.array([left for left, _ in requests], np.float64)
    held = np.array([held for _, held in requests], np.int32)
    ends = any(left > 0 for left, _ in requests)
    assert lasts(left, held, free) == (not ends or least_left_over(requests, free) > 0)
