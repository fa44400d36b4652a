"""Regular expressions that end an answer: the place of a match, tokens that are held back, and the allowed patterns."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence

import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.host.stop_regexes import STATES_MAX, Automaton, StopRegexes, watch_of


class Characters:
    """A tokenizer whose tokens are code points; 0 completes no character."""

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        return lambda token: chr(token) if token else ""


def push(stops: StopRegexes, text: str) -> list[tuple[bool, int]]:
    return [stops.push(number, ord(one)) for number, one in enumerate(text)]


def test_a_match_ends_the_answer_where_it_is_complete() -> None:
    stops = StopRegexes(Characters(), (), [r"\n(User|System):"])
    said = push(stops, "hi\nUser:")
    assert [stopped for stopped, _ in said] == [False] * 7 + [True]
    assert stops.match is not None
    assert (stops.match.start, stops.match.stop, stops.match.number) == (2, 8, 7)


def test_tokens_that_may_begin_a_match_are_held_back() -> None:
    stops = StopRegexes(Characters(), (), [r"a\d+b"])
    assert [held for _, held in push(stops, "xa12ya1")] == [0, 1, 2, 3, 0, 1, 2]


def test_tokens_of_an_incomplete_character_are_held_with_it() -> None:
    stops = StopRegexes(Characters(), (), ["ab"])
    assert [stops.push(number, token) for number, token in enumerate((ord("x"), 0, ord("a")))][-1] == (False, 2)


def test_a_number_that_was_pushed_before_resets_the_text() -> None:
    stops = StopRegexes(Characters(), (), ["abc"])
    push(stops, "xab")
    assert stops.push(2, ord("y")) == (False, 0)
    assert stops.push(3, ord("c")) == (False, 0)


def test_texts_and_regexes_hold_back_what_either_needs() -> None:
    both = watch_of(Characters(), (), ["xyz"], [r"\d{3}"])
    said = [both.push(number, ord(one)) for number, one in enumerate("a12x123")]
    assert [held for _, held in said] == [0, 1, 2, 1, 1, 2, 0]
    assert said[-1][0]


def test_random_patterns_find_the_first_end_of_a_match_as_re_does() -> None:
    """The reference applies `re` to each prefix of the text, for any part that ends there."""
    rng = random.Random(5)
    parts = ["a", "b", "[ab]", ".", r"\d", "(?:a|bc)", "(ab)?", "b*", "c+", "[^a]", "a{2,3}", "(?:a|b)*?c"]
    for _ in range(300):
        pattern = "".join(rng.choice(parts) for _ in range(rng.randint(1, 4)))
        text = "".join(rng.choice("abc1\n") for _ in range(14))
        if re.fullmatch(pattern, ""):
            with pytest.raises(ConfigError, match="empty text"):
                Automaton(pattern)
            continue
        stops = StopRegexes(Characters(), (), [pattern])
        said = [stopped for stopped, _ in push(stops, text)]
        compiled = re.compile(pattern)
        ends = (
            (stop, start)
            for stop in range(1, len(text) + 1)
            for start in range(stop)
            if compiled.fullmatch(text, start, stop)
        )
        stop, start = next(ends, (0, 0))
        assert (said.index(True) + 1 if True in said else 0) == stop, (pattern, text)
        if stop:
            first = StopRegexes(Characters(), (), [pattern])
            push(first, text[:stop])
            assert first.match is not None
            assert (first.match.start, first.match.stop) == (start, stop), (pattern, text)


def test_held_text_is_what_a_match_may_begin_with() -> None:
    """A character is released only once no match can contain it, and every match is held back from its start on."""
    rng = random.Random(7)
    for _ in range(100):
        text = "".join(rng.choice("ab1") for _ in range(20))
        stops = StopRegexes(Characters(), (), [r"a[b1]{2}1"])
        released = 0
        for number, one in enumerate(text):
            stopped, held = stops.push(number, ord(one))
            if stopped:
                assert stops.match is not None
                assert released <= stops.match.start
                break
            released = number + 1 - held


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "no regular expression"),
        ("a*", "empty text"),
        ("a$", "an end"),
        (r"\bword", "an end or a boundary"),
        ("a(?=b)", "lookahead"),
        (r"(a)\1", "reference to a group"),
        ("a{600}", "at most 512"),
        ("(a{30}){30}", f"more than {STATES_MAX} states"),
        ("(((()){512}){512}){512}x", "repeats too much"),  # items without a state
        ("(?>ab)", "atomic group"),
        ("(" * 2000 + "a" + ")" * 2000, "no regular expression"),
    ],
)
def test_what_a_pattern_may_not_contain(pattern: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        Automaton(pattern)


def test_flags_in_front() -> None:
    assert [stopped for stopped, _ in push(StopRegexes(Characters(), (), ["(?i)stop"]), "a StOp")][-1]
    assert not any(stopped for stopped, _ in push(StopRegexes(Characters(), (), ["^b"]), "ab\nb"))
    assert [stopped for stopped, _ in push(StopRegexes(Characters(), (), ["(?m)^b"]), "ab\nb")][-1]
    assert [stopped for stopped, _ in push(StopRegexes(Characters(), (), ["(?s)a.b"]), "a\nb")][-1]


def test_a_pattern_that_makes_backtracking_exponential_reads_each_character_once() -> None:
    """`re` needs 2^n steps for this text; the work here is bounded by states times characters, counted by calls."""
    automaton = Automaton("(a|aa)+b")
    stops = StopRegexes(Characters(), (), ["(a|aa)+b"])
    began_s = time.process_time()
    assert not any(stopped for stopped, _ in push(stops, "a" * 3000 + "c"))
    assert len(automaton._states) < 16
    assert time.process_time() - began_s < 30.0  # `re` would not finish in any realistic time


ALPHABET = "abcABCxyz019_-. \n\t/é١ſ"


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "a",
            "[a-c]",
            "[^a-c]",
            "[^a]",
            "[a]",
            ".",
            "(?s).",
            r"\d",
            r"\D",
            r"\s",
            r"\S",
            r"\w",
            r"\W",
            r"[\d_]",
            r"[^\d_]",
        ),
        *("(?i)a", "(?i)[a-c]", "(?i)[^a-c]", "(?i)[^a]", r"(?a)\d", r"(?a)\w", r"(?a)\W", r"(?a)[^\w]", "[^\n]"),
    ],
)
def test_one_character_matches_exactly_if_it_does_in_re(pattern: str) -> None:
    automaton = Automaton(pattern)
    found = [one for one in ALPHABET if automaton.step({}, one, 0, "")[1] == 0]
    assert found == [one for one in ALPHABET if re.fullmatch(pattern, one)]
