"""`bad_words`: masks of a matcher, and rows whose answers such a grammar never ends."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.contract.commands import CompileGrammar, RowTaken
from lockstep.host.bad_words import BadWords
from lockstep.host.grammar_compiler import GrammarCompiler
from lockstep.host.grammars import CompiledGrammars, GrammarError, GrammarMatchers, Matcher, make_grammar

VOCABULARY, END = 70, 69


def banned(matcher: Matcher) -> list[int]:
    """The tokens that a matcher's mask leaves out."""
    mask = np.zeros(-(-VOCABULARY // 32), np.int32)
    matcher.fill(mask)
    bits = mask.view(np.uint32)
    return [token for token in range(VOCABULARY) if not bits[token // 32] >> np.uint32(token % 32) & np.uint32(1)]


def test_the_last_token_of_a_sequence_is_banned_behind_the_tokens_before_it() -> None:
    matcher = BadWords("[[5], [7, 8], [7, 8, 9], [1, 2, 31], [2, 32]]").matcher()
    assert banned(matcher) == [5]
    for token, expected in ((7, [5, 8]), (1, [5]), (2, [5, 31, 32]), (2, [5, 32]), (7, [5, 8]), (3, [5])):
        assert matcher.accept(token)
        assert banned(matcher) == expected
    matcher.rollback(1)
    assert banned(matcher) == [5, 8]
    matcher.rollback(2)
    assert banned(matcher) == [5, 31, 32]
    matcher.rollback(3)
    assert banned(matcher) == [5]


def test_ids_beyond_the_mask_ban_nothing() -> None:
    assert banned(BadWords("[[5], [100000]]").matcher()) == [5]


@pytest.mark.parametrize("source", ["", "{}", "[[]]", "[[-1]]", '[["a"]]', "[1]"])
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="bad_words"):
        BadWords(source)


def library() -> None:
    raise AssertionError("no library is needed")


def test_an_end_token_does_not_end_the_constraint() -> None:
    """With `ignore_eos` or `min_tokens` the answer continues behind an end token, and words remain forbidden."""
    matchers = GrammarMatchers(CompiledGrammars(library), VOCABULARY, [END])  # type: ignore[arg-type]
    taken = RowTaken(3, 11, 0, grammar=make_grammar("bad_words", "[[7, 8]]"))
    matchers.take_row(taken)
    matchers.advance(taken.request_id, taken.epoch, [4, END, 7])
    assert not matchers.ended(taken.row, END)
    assert not matchers.ended(taken.row, 3)
    assert matchers.forced(taken.row, 3) == []
    mask = matchers.allowed(np.array([taken.row], np.int32))
    assert mask is not None
    assert not int(mask.view(np.uint32)[0, 0]) >> 8 & 1
    assert int(mask.view(np.uint32)[0, END // 32]) >> END % 32 & 1


def test_it_is_compiled_at_once_and_without_a_process() -> None:
    answers: list[str] = []
    compiler = GrammarCompiler.__new__(GrammarCompiler)
    compiler.compiled = CompiledGrammars(library)  # type: ignore[arg-type]
    compiler(CompileGrammar(make_grammar("bad_words", "[[7, 8]]")), answers.append)
    compiler(CompileGrammar(make_grammar("bad_words", "[[]]")), answers.append)
    assert answers[0] == ""
    assert "empty sequence" in answers[1]
    with pytest.raises(GrammarError):
        compiler.compiled.get(make_grammar("bad_words", "x"))
