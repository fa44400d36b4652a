"""The trial of a grammar: it is followed for some tokens, so that limits are reached before an answer begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.host.batches import Int32s
from lockstep.host.grammar_trial import WALK_TOKENS, try_out
from lockstep.host.grammars import GrammarError


class Limited:
    """A grammar of any tokens below 64 that reaches a limit after some of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def matcher(self) -> LimitedMatcher:
        return LimitedMatcher(self.limit)


class LimitedMatcher:
    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    def fill(self, mask: Int32s) -> None:
        if self.taken >= self.limit:
            raise GrammarError("a limit")
        mask[:] = -1

    def accept(self, token: int) -> bool:
        assert 0 <= token < 64
        self.taken += 1
        return True

    def is_done(self) -> bool:
        return False

    def rollback(self, tokens: int) -> None:
        self.taken -= tokens

    def forced(self) -> Sequence[int]:
        return ()


class Nothing(LimitedMatcher):
    def fill(self, mask: Int32s) -> None:
        mask[:] = np.int32(0)


def test_a_limit_within_the_first_tokens_is_an_error() -> None:
    with pytest.raises(GrammarError, match="a limit"):
        try_out(Limited(14), 2)
    try_out(Limited(WALK_TOKENS), 2)


def test_a_grammar_without_any_token_is_an_error() -> None:
    class Empty(Limited):
        def matcher(self) -> LimitedMatcher:
            return Nothing(1)

    with pytest.raises(GrammarError, match="it admits no token"):
        try_out(Empty(1), 2)
