"""Matchers by row, with grammars that admit one chain of tokens: what is allowed, forced, and ends an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.core.contract.commands import RowTaken
from lockstep.core.contract.events import Grammar
from lockstep.host import grammars
from lockstep.host.batches import Int32s
from lockstep.host.grammars import FORCED_MAX, PASS_S, CompiledGrammars, GrammarError, GrammarMatchers, short

VOCABULARY, END = 70, 2  # three words of a mask


class TokenChain:
    """A grammar that admits these tokens in this order, and its matcher."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.at = 0

    def matcher(self) -> TokenChain:
        return TokenChain(self.tokens)

    def accept(self, token: int) -> bool:
        admitted = not self.is_done() and self.tokens[self.at] == token
        self.at += admitted
        return admitted

    def rollback(self, tokens: int) -> None:
        self.at -= tokens

    def fill(self, mask: Int32s) -> None:
        mask[:] = 0
        if not self.is_done():
            mask[self.tokens[self.at] // 32] = 1 << self.tokens[self.at] % 32

    def is_done(self) -> bool:
        return self.at == len(self.tokens)

    def forced(self) -> Sequence[int]:
        return self.tokens[self.at :]


class ChainLibrary:
    """A library whose grammars are numbers, separated by spaces. "x" does not compile."""

    name = "chains"

    def compile(self, grammar: Grammar) -> TokenChain:
        if grammar.source == "x":
            raise GrammarError("x is no number")
        return TokenChain([int(word) for word in grammar.source.split()])


def rows_of(*sources: str, lenient: bool = False, end_tokens: Sequence[int] = (END,)) -> GrammarMatchers:
    """Return matchers with a row for each grammar, in order; the request of row n is 100 + n. "": without a grammar."""
    made = GrammarMatchers(CompiledGrammars(ChainLibrary), VOCABULARY, end_tokens, lenient=lenient)
    for row, source in enumerate(sources):
        grammar = grammars.make_grammar("regex", source) if source else None
        made.take_row(RowTaken(row, 100 + row, 1, grammar=grammar))
    return made


def masks(matchers: GrammarMatchers, *rows: int) -> list[set[int]]:
    """Return the tokens that each row allows."""
    found = matchers.allowed(np.array(rows, np.int32))
    assert found is not None
    assert found.shape == (len(rows), 3)
    bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


EVERY_TOKEN = set(range(96))


def test_each_row_allows_what_its_grammar_admits_next() -> None:
    matchers = rows_of("5 6", "", "40 41 65")
    matchers.advance(102, 1, [40, 41])
    assert masks(matchers, 2, 1, 0, 3) == [{65}, EVERY_TOKEN, {5}, EVERY_TOKEN]
    matchers.advance(102, 0, [65])  # of an older epoch
    matchers.advance(102, 2, [65])
    matchers.advance(99, 1, [65])
    assert masks(matchers, 2) == [{65}]
    matchers.advance(102, 1, [65, 3, 3])
    assert masks(matchers, 2, 0) == [EVERY_TOKEN, {5}]  # it is over: nothing is checked behind its end


def test_a_row_belongs_to_the_request_that_took_it_last() -> None:
    matchers = rows_of("5 6", "7 8")
    grammar = grammars.make_grammar("regex", "9 8")
    matchers.take_row(RowTaken(1, 100, 2, grammar=grammar))  # request 100 moves from row 0 to row 1
    matchers.advance(101, 1, [7])
    assert masks(matchers, 1) == [{9}]
    matchers.advance(100, 2, [9])
    assert masks(matchers, 1) == [{8}]
    matchers.take_row(RowTaken(0, 103, 1))  # without a grammar; request 100 stays in row 1
    assert masks(matchers, 0, 1) == [EVERY_TOKEN, {8}]
    matchers.advance(100, 2, [8])
    assert masks(matchers, 1) == [EVERY_TOKEN]
    matchers.take_row(RowTaken(1, 104, 1))
    matchers.advance(100, 2, [8])
    assert masks(matchers, 1) == [EVERY_TOKEN]


def test_a_token_that_is_not_admitted_ends_its_request_as_invalid() -> None:
    matchers = rows_of("5 6", "5 6", "5 6")
    matchers.advance(100, 1, [6])
    matchers.advance(101, 1, [END, 9])
    assert masks(matchers, 0, 1, 2) == [set(), EVERY_TOKEN, {5}]
    assert not matchers.ended(0, END)
    assert matchers.ended(1, 6)
    matchers.advance(100, 1, [5])
    assert masks(matchers, 0) == [set()]


@pytest.mark.parametrize(("lenient", "allows"), [(False, set()), (True, EVERY_TOKEN)])
def test_a_grammar_that_does_not_compile_admits_nothing_or_if_lenient_everything(
    lenient: bool, allows: set[int]
) -> None:
    matchers = rows_of("x", "5", lenient=lenient)
    matchers.advance(100, 1, [5])
    assert masks(matchers, 0, 1) == [allows, {5}]
    assert not matchers.ended(0, 5)
    assert matchers.forced(0, 5) == []


def test_an_answer_ends_with_an_end_token_or_with_its_grammar() -> None:
    matchers = rows_of("5 6", "")
    assert [matchers.ended(0, token) for token in (5, 6, END)] == [False, False, True]
    matchers.advance(100, 1, [5])
    assert [matchers.ended(0, token) for token in (5, 6, END)] == [False, True, True]
    assert masks(matchers, 0) == [{6}]  # it was not moved
    assert not matchers.ended(1, END)
    assert not matchers.ended(7, END)
    matchers.advance(100, 1, [6])
    assert matchers.ended(0, 5)


@pytest.mark.parametrize(
    ("chain", "token", "forced"),
    [
        ("5 6 7 8", 5, [6, 7]),  # 8 ends the grammar
        ("5 6", 5, []),
        ("5", 5, []),
        ("5 6 7 8", 6, []),
        (f"{END} 6 7 8", END, []),
        (f"5 6 {END} 7 8", 5, [6]),
        (f"5 6 {VOCABULARY} 7 8", 5, [6]),
        (f"5 6 {VOCABULARY - 1} 7 8", 5, [6, VOCABULARY - 1, 7]),
        ("5 " + "6 " * (FORCED_MAX - 1) + "7", 5, [6] * (FORCED_MAX - 1)),
        ("5 " + "6 " * (FORCED_MAX + 1) + "7", 5, [6] * FORCED_MAX),
    ],
)
def test_tokens_that_a_grammar_forces_end_before_its_end(chain: str, token: int, forced: list[int]) -> None:
    matchers = rows_of(chain)
    before = masks(matchers, 0)
    assert matchers.forced(0, token) == forced
    assert masks(matchers, 0) == before


def test_without_a_grammar_or_behind_its_end_nothing_is_forced() -> None:
    matchers = rows_of("", "5 6 7 8")
    assert matchers.forced(0, 5) == []
    assert matchers.forced(9, 5) == []
    matchers.advance(101, 1, [END])
    assert matchers.forced(1, 5) == []


@pytest.mark.parametrize(("took_s", "failed"), [(PASS_S / 2, False), (PASS_S / 2 + 0.001, True)])
def test_rows_of_a_grammar_with_slow_masks_fail_once_they_have_taken_a_batch_long(
    took_s: float, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of rows 0, 1 and 3 take so long. The other grammar is not affected, and a pass counts anew."""
    matchers = rows_of("5 6", "5 6", "7 8", "5 6")
    now_s = [0.0]
    fill = TokenChain.fill

    def slow_fill(matcher: TokenChain, mask: Int32s) -> None:
        now_s[0] += took_s if matcher.tokens[0] == 5 else 0.0
        fill(matcher, mask)

    monkeypatch.setattr(TokenChain, "fill", slow_fill)
    monkeypatch.setattr(grammars.time, "thread_time", lambda: now_s[0])
    for _ in range(2):
        now_s[0] = 0.0
        assert masks(matchers, 0, 1, 2, 3) == [{5}, {5}, {7}, set() if failed else {5}]
    assert masks(matchers, 3) == [set() if failed else {5}]


def test_sources_of_dropped_grammars_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of three characters, of which ten are kept: three grammars, those used last."""
    monkeypatch.setattr(grammars, "SOURCE_BYTES_MAX", 10)
    compiled = CompiledGrammars(ChainLibrary)
    made = [grammars.make_grammar("regex", f"{number} 9") for number in range(7)]
    for grammar in made:
        compiled.get(grammar)
        compiled.get(made[0])
        assert len(compiled) <= 3
    assert [one.digest in compiled for one in made] == [True, False, False, False, False, True, True]
    monkeypatch.setattr(grammars, "SOURCE_BYTES_MAX", 2)
    compiled.get(grammars.make_grammar("regex", "1 2 3"))
    assert len(compiled) == 1  # the newest is kept, however long it is


def test_a_long_message_is_cut_to_one_line() -> None:
    longest = grammars.LONGEST_ERROR
    assert short("a\n  b") == "a b"
    assert short("a" * longest) == "a" * longest
    assert short("a" * (longest + 1)) == "a" * (longest - 3) + "..."
