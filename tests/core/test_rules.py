"""The arithmetic of scheduling decisions where it changes: at the limits themselves, and one beyond."""

from __future__ import annotations

import pytest

from lockstep.core.requests.rules import (
    BUDGET_SPENT,
    CONTINUE,
    DUPLICATE_CACHED_TOKENS_MAX,
    DUPLICATE_SHARED_TOKENS_MIN,
    LPM_FALLBACK_WAITING,
    MIXED,
    NO_LIMIT,
    NO_TOKENS,
    PREFILL_FIRST,
    RUNNING_FIRST,
    are_few,
    beside_decodes,
    chunk_tokens,
    decode_goes_first,
    decodes_before_end,
    ends_by_length,
    may_be_duplicate,
    may_bypass,
    next_chunk,
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


@pytest.mark.parametrize(
    ("take", "start", "pages", "expected"),
    [
        (4, 8, 1, 4),  # fills its only page, and ends at no multiple of 8: it is the last chunk
        (5, 8, 1, 0),
        (9, 8, 2, 8),
        (7, 9, 1, 7),  # the page of the token before has room for three more
        (8, 9, 1, 7),
        (3, 9, 0, 3),
    ],
)
def test_a_chunk_takes_the_pages_that_are_left_and_the_rest_of_its_last_page(
    take: int, start: int, pages: int, expected: int
) -> None:
    """Pages of four tokens; a prompt is split at multiples of eight."""
    assert next_chunk(take, start, pages, 4, 8) == expected


@pytest.mark.parametrize(
    ("owed", "batching", "lacking_pages", "decodes_since_extend", "expected"),
    [
        (False, RUNNING_FIRST, 0, 2, False),
        (False, RUNNING_FIRST, 1, 2, True),
        (False, MIXED, 1, 2, False),
        (False, PREFILL_FIRST, 1, 2, False),
        (False, PREFILL_FIRST, 0, 1, True),
        (True, PREFILL_FIRST, 0, 2, True),
    ],
)
def test_a_decode_goes_first_if_it_is_owed_or_lacks_pages_or_an_extend_was_just_before(
    owed: bool, batching: int, lacking_pages: int, decodes_since_extend: int, expected: bool
) -> None:
    """Two decodes are launched between extends."""
    assert decode_goes_first(owed, batching, lacking_pages, decodes_since_extend, 2) == expected


@pytest.mark.parametrize("limit", [4, 5, 6, 7, 9])
def test_a_request_launches_so_many_decodes_before_its_last(limit: int) -> None:
    """A decode of the request at position 4 ends it if `ends_by_length` holds behind it."""
    position, before = 4, 0
    while not ends_by_length(position + 1, limit):
        position, before = position + 1, before + 1
    assert decodes_before_end(4, limit) == before


def test_limits_belong_to_what_they_limit() -> None:
    assert (are_few(LPM_FALLBACK_WAITING), are_few(LPM_FALLBACK_WAITING + 1)) == (True, False)
    assert may_be_duplicate(DUPLICATE_SHARED_TOKENS_MIN, DUPLICATE_CACHED_TOKENS_MAX)
    assert not may_be_duplicate(DUPLICATE_SHARED_TOKENS_MIN - 1, DUPLICATE_CACHED_TOKENS_MAX)
    assert not may_be_duplicate(DUPLICATE_SHARED_TOKENS_MIN, DUPLICATE_CACHED_TOKENS_MAX + 1)
    assert (may_bypass(2, 3), may_bypass(3, 3)) == (True, False)
    assert (beside_decodes(20, 16, 4), beside_decodes(20, 17, 4)) == (4, 4)
    assert (ratio_after_retraction(10, 99, 2), ratio_after_retraction(100, 99, 2)) == (0.5, 1.0)
    assert (pages_to_evict(3, 1024), pages_to_evict(5, 1024)) == (4, 5)
