"""The arithmetic of scheduling decisions where it changes: at the limits themselves, and one beyond."""

from __future__ import annotations

import pytest

from lockstep.core.requests.rules import (
    BUDGET_SPENT,
    CONTINUE,
    DUPLICATE_CACHED_TOKENS_MAX,
    DUPLICATE_SHARED_TOKENS_MIN,
    LPM_FALLBACK_WAITING,
    NO_LIMIT,
    NO_TOKENS,
    are_few,
    beside_decodes,
    chunk_tokens,
    may_be_duplicate,
    may_bypass,
    pages_to_evict,
    ratio_after_retraction,
    verdict,
)


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ((1, 1, 1, 1), CONTINUE),
        ((0, 1, 1, 1), NO_TOKENS),
        ((1, 0, 1, 1), NO_TOKENS),
        ((1, 1, 0, 1), BUDGET_SPENT),
        ((1, 1, 1, 0), BUDGET_SPENT),
        ((0, 0, 0, 0), NO_TOKENS),
    ],
)
def test_a_budget_is_spent_with_its_last_token(budgets: tuple[int, int, int, int], expected: int) -> None:
    assert verdict(*budgets) == expected


@pytest.mark.parametrize(
    ("what", "start", "new", "left", "chunk", "first", "may_split", "expected"),
    [
        ("fits", 4, 6, 8, 8, False, True, 6),
        ("is split", 4, 9, 8, 8, False, True, 8),
        ("is the second to be split", 4, 9, 8, 8, False, False, 0),
        ("has nothing left", 4, 9, 0, 8, False, True, 0),
        ("ends at no multiple", 4, 9, 3, 8, False, True, 0),
        ("is never split, and fits", 4, 8, 8, NO_LIMIT, False, True, 8),
        ("is never split, and is too long", 4, 9, 8, NO_LIMIT, False, True, 0),
        ("is never split, and is the first", 4, 9, 8, NO_LIMIT, True, True, 9),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_prompt_takes_what_is_left(
    what: str, start: int, new: int, left: int, chunk: int, first: bool, may_split: bool, expected: int
) -> None:
    assert chunk_tokens(start, new, left, chunk, 1, 4, first, may_split) == expected, what


def test_limits_belong_to_what_they_limit() -> None:
    assert (are_few(LPM_FALLBACK_WAITING), are_few(LPM_FALLBACK_WAITING + 1)) == (True, False)
    assert may_be_duplicate(DUPLICATE_SHARED_TOKENS_MIN, DUPLICATE_CACHED_TOKENS_MAX)
    assert not may_be_duplicate(DUPLICATE_SHARED_TOKENS_MIN - 1, DUPLICATE_CACHED_TOKENS_MAX)
    assert not may_be_duplicate(DUPLICATE_SHARED_TOKENS_MIN, DUPLICATE_CACHED_TOKENS_MAX + 1)
    assert (may_bypass(2, 3), may_bypass(3, 3)) == (True, False)
    assert (beside_decodes(20, 16, 4), beside_decodes(20, 17, 4)) == (4, 4)
    assert (ratio_after_retraction(10, 99, 2), ratio_after_retraction(100, 99, 2)) == (0.5, 1.0)
    assert (pages_to_evict(3, 1024), pages_to_evict(5, 1024)) == (4, 5)
