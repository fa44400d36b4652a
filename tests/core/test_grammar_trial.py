"""The trial of a grammar: it is followed for some tokens, so that limits are reached before an answer begins."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from lockstep.core.contract.commands import RowTaken
from lockstep.core.contract.events import Grammar
from lockstep.host import grammar_compiler, grammar_trial
from lockstep.host.batches import Int32s
from lockstep.host.grammar_trial import WALK_TOKENS, try_out
from lockstep.host.grammars import CompiledGrammars, GrammarError, GrammarMatchers, make_grammar


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


class Clock:
    """CPU time that only masks take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("time.thread_time", lambda: self.now_s)


class Slow(LimitedMatcher):
    """A matcher of a slow grammar; its first masks take `first_s`."""

    def __init__(self, clock: Clock, first_s: float, mask_s: float) -> None:
        super().__init__(1000)
        self.clock, self.first_s, self.mask_s = clock, first_s, mask_s

    def matcher(self) -> Slow:
        return Slow(self.clock, self.first_s, self.mask_s)

    def fill(self, mask: Int32s) -> None:
        self.clock.now_s += self.mask_s if self.taken else self.first_s
        super().fill(mask)


def test_masks_that_take_long_on_average_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    try_out(Slow(clock, 0.04, 0.001), 2)
    with pytest.raises(GrammarError, match="take 3 ms to find at each place of an answer, more than 2 ms"):
        try_out(Slow(clock, 0.001, 0.003), 2)
    with pytest.raises(GrammarError, match=r"take 0\.06 s to find"):
        try_out(Slow(clock, 0.06, 0.001), 2)


def test_a_mask_that_is_slow_once_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loses its processor's caches takes longer once, at any place of an answer."""
    clock = Clock(monkeypatch)

    class SlowOnce(Slow):
        left: ClassVar = [1]  # of all matchers

        def matcher(self) -> Slow:
            return SlowOnce(self.clock, self.first_s, self.mask_s)

        def fill(self, mask: Int32s) -> None:
            if self.taken == 3 and self.left[0]:
                self.left[0] -= 1
                self.clock.now_s += 0.2
            super().fill(mask)

    try_out(SlowOnce(clock, 0.001, 0.001), 2)
    assert SlowOnce.left == [0]


def test_slow_masks_of_one_grammar_end_its_rows_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for 64 samples under a grammar with masks of 11 ms delays the others by 55 ms, once."""
    clock = Clock(monkeypatch)

    class Library:
        name = "slow"

        def compile(self, grammar: Grammar) -> Slow:
            return Slow(clock, *((0.011, 0.011) if grammar.source == "slow" else (0.0002, 0.0002)))

    matchers = GrammarMatchers(CompiledGrammars(Library), 64, ())
    for row in range(128):
        grammar = make_grammar("regex", "quick" if row % 2 else "slow")
        matchers.take_row(RowTaken(row, row, 1, grammar=grammar))
    masks = matchers.allowed(np.arange(128, dtype=np.int32))
    assert masks is not None
    assert clock.now_s < 0.08
    assert masks[1::2].all()
    assert masks[:10:2].all()
    assert not masks[10::2].any()
    assert matchers.allowed(np.arange(128, dtype=np.int32)) is not None
    assert clock.now_s < 0.16


def test_a_grammar_without_any_token_is_an_error() -> None:
    class Empty(Limited):
        def matcher(self) -> LimitedMatcher:
            return Nothing(1)

    with pytest.raises(GrammarError, match="it admits no token"):
        try_out(Empty(1), 2)


class Ending(LimitedMatcher):
    """A matcher of a grammar that ends, or takes nothing, behind some tokens; later masks are errors."""

    def __init__(self, limit: int, ends: bool) -> None:
        super().__init__(limit)
        self.ends = ends

    def matcher(self) -> Ending:
        return Ending(self.limit, self.ends)

    def accept(self, token: int) -> bool:
        super().accept(token)
        return self.ends or self.taken < self.limit

    def is_done(self) -> bool:
        return self.ends and self.taken >= self.limit


@pytest.mark.parametrize("ends", [False, True])
def test_an_answer_is_followed_to_its_end(ends: bool) -> None:
    try_out(Ending(3, ends), 2)


class OnlyEnd(LimitedMatcher):
    """A matcher that admits token 5 behind two others. That place is looked at once."""

    looked = False

    def matcher(self) -> OnlyEnd:
        return OnlyEnd(self.limit)

    def fill(self, mask: Int32s) -> None:
        super().fill(mask)
        if self.taken == 2:
            assert not self.looked
            self.looked = True
            mask[:] = (1 << 5, 0)

    def accept(self, token: int) -> bool:
        assert token != 5
        return super().accept(token)


def test_tokens_that_end_an_answer_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the masks are no tokens of this model."""
    Clock(monkeypatch)
    try_out(OnlyEnd(WALK_TOKENS), 2, (5, 64, 100))


class Warming(Slow):
    """A matcher whose masks are slow the first time at each place."""

    at = -1

    def matcher(self) -> Warming:
        return Warming(self.clock, self.first_s, self.mask_s)

    def fill(self, mask: Int32s) -> None:
        self.clock.now_s += 0.001 if self.at == self.taken else 0.008
        self.at = self.taken
        LimitedMatcher.fill(self, mask)


def test_a_mask_is_counted_by_the_quicker_of_two_times(monkeypatch: pytest.MonkeyPatch) -> None:
    try_out(Warming(Clock(monkeypatch), 0.0, 0.0), 2)


class FirstOnly(Slow):
    """A matcher of which the first one has a slow first mask."""

    made = 0

    def matcher(self) -> Slow:
        self.made += 1
        return Slow(self.clock, self.first_s if self.made == 1 else self.mask_s, self.mask_s)


def test_masks_may_take_the_longest_time_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those at the beginning of the first answer are not counted."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(grammar_trial, "MEAN_S", 2.0**-9)
    monkeypatch.setattr(grammar_trial, "TOKEN_S", 2.0**-4)
    try_out(FirstOnly(clock, 2.0**-4, 2.0**-9), 2)
    with pytest.raises(GrammarError, match="at each place of an answer"):
        try_out(Slow(clock, 2.0**-9 * 1.005, 2.0**-9 * 1.005), 2)


class SlowAnswer(Slow):
    """A grammar whose masks are slow in the first answer, and take no time in later ones."""

    answers = 0

    def matcher(self) -> Slow:
        self.answers += 1
        mask_s = self.mask_s if self.answers == 1 else 0.0
        return Slow(self.clock, mask_s, mask_s)


def test_the_average_is_that_of_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GrammarError, match="take 5 ms to find at each place of an answer"):
        try_out(SlowAnswer(Clock(monkeypatch), 0.0, 0.01), 2)


@pytest.mark.parametrize(
    ("status", "late", "error"),
    [
        (-signal.SIGPROF, False, "it takes more than 2.5 s of CPU time to compile"),
        (-signal.SIGKILL, True, "it takes more than 2.5 s of CPU time to compile"),
        (None, False, "it takes more than 2.5 s of CPU time to compile"),
        (-signal.SIGSEGV, False, "it takes more than 64 MiB of memory to compile, or is nested too deeply"),
    ],
)
def test_a_trial_whose_process_ends_has_the_reason(
    status: int | None, late: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = grammar_compiler._Trial.__new__(grammar_compiler._Trial)
    trial._limits = grammar_compiler.CompileLimits(cpu_s=2.5, memory_bytes=64 * 2**20)
    trial._late = late
    monkeypatch.setattr(grammar_compiler._Trial, "_send", lambda trial, message: None)
    monkeypatch.setattr(grammar_compiler._Trial, "_receive", lambda trial, seconds: None)
    monkeypatch.setattr(grammar_compiler._Trial, "kill", lambda trial: status)
    assert trial.compile(make_grammar("regex", "a")).startswith(error)
