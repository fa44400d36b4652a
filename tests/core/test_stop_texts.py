"""The search for stop texts: equal to a plain search of the whole text, at a cost that does not grow with the stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.host.stop_texts import StopSearch, StopTexts, TextEnd

pieces = st.lists(st.text("aab\n", max_size=4), max_size=30)
stops = st.lists(st.text("aab\n", min_size=1, max_size=6), min_size=1, max_size=5)


class Letters:
    """A decoder whose tokens are texts of a list."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        return lambda token: self.texts[token]


def held_characters(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that begin a stop text, by trying each."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


@given(pieces, stops)
def test_the_search_finds_what_a_search_of_the_whole_text_finds(pieces: list[str], stops: list[str]) -> None:
    search, text = StopSearch(stops), ""
    for piece in pieces:
        before, text = len(text), text + piece
        found = search.follow(piece)
        ends = {at for stop in stops for at in range(before + 1, len(text) + 1) if text[:at].endswith(stop)}
        assert found == bool(ends)
        assert len(search.state) == held_characters(text, stops)


@given(pieces, stops)
def test_held_tokens_are_those_that_may_begin_a_stop_text(pieces: list[str], stops: list[str]) -> None:
    watch, text = StopTexts(Letters(pieces), [], stops), ""
    ends: list[int] = []
    for number, piece in enumerate(pieces):
        text += piece
        ends.append(len(text))
        stopped, held = watch.push(number, number)
        if stopped:
            assert held == 0
            return
        free = len(text) - held_characters(text, stops)
        sent = ends[: len(ends) - held]
        assert all(end <= free for end in sent)
        assert watch.push(number, number) == (stopped, held), "a number from before resets the text to that place"


def test_a_suppressed_stop_text_may_begin_a_longer_one() -> None:
    watch = StopTexts(Letters(["ab", "c", "d"]), [], ["ab", "abcd"])
    assert [watch.push(number, number) for number in range(3)] == [(True, 0), (False, 2), (True, 0)]


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("length", [1, 500])
def test_work_per_token_depends_on_neither_number_nor_length_of_stop_texts(count: int, length: int) -> None:
    """Stop texts with which a text nearly agrees everywhere are the worst case."""
    text = "a" * 20_000
    search = StopSearch(["a" * length + chr(200 + number) for number in range(count)])
    search.follow(text)
    assert search.steps <= 2 * len(text)


@given(st.text("ab", max_size=20), stops, st.integers(0, 20))
def test_the_end_of_a_text_has_its_stop(text: str, stops: list[str], cut: int) -> None:
    end = TextEnd(stops)
    for piece in (text[:cut], text[cut:]):
        end.add(piece)
    whole = {
        (at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > min(cut, len(text))
    }
    found = end.stop()
    assert (found is None) == (not whole)
    assert found is None or found[0] == min(at for at, _ in whole)
