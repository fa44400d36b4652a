"""Stop texts: the search in a request's text as it grows, and the place at which a stop text ends an answer.

    text     | the answer begins . . . and goes on </en
    state    |                                     </en      the longest end of the text that begins a stop text
    tokens   |  0  |  1  |  2  |  3  | ...  | n-1 | n  |      n - 1 and n may belong to "</end>": 2 are held back

The search is the automaton of Aho and Corasick (CACM 18, 1975). Its states are the beginnings of stop texts. They are
found by bisection when they are entered, since a table of all states costs about 3 us per character of the stop texts,
which a client may send with every request. A step adds a character to the state, or drops characters at its front. As
no more characters can be dropped than were added, the cost of a character of text is constant on average, whatever the
number and length of the stop texts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol


class Spelling(Protocol):
    """A decoder of token streams; `lockstep.host.text.Text` implements it."""

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Return a function that decodes token by token after a prompt: it returns the text that a token completes."""


class StopSearch:
    """The position of a growing text in its stop texts.

    Attributes:
        state: the longest end of the text that begins a stop text; it may be a whole one.
        steps: states that were tried, a measure of the work.
    """

    __slots__ = ("_firsts", "_lasts", "_sorted", "state", "steps")

    def __init__(self, stops: Sequence[str]) -> None:
        self._sorted = tuple(sorted({stop for stop in stops if stop}))
        self._firsts = frozenset([stop[0] for stop in self._sorted])
        self._lasts = frozenset([stop[-1] for stop in self._sorted])
        self.state = ""
        self.steps = 0

    def follow(self, new: str) -> bool:
        """Append text. Returns whether a stop text ends in it."""
        state, ended = self.state, False
        if not state and self._firsts.isdisjoint(new):
            return False
        for character in new:
            state += character
            while state and not self._begins(state):
                state = state[1:]
            if state and character in self._lasts and state.endswith(self._sorted):
                ended = True
        self.state = state
        return ended

    def _begins(self, text: str) -> bool:
        """Whether a stop text begins with a text."""
        self.steps += 1
        at = bisect_left(self._sorted, text)  # texts that begin with `text` follow it at once
        return at < len(self._sorted) and self._sorted[at].startswith(text)


def tokens_behind(ends: Sequence[int], characters: int) -> int:
    """Return how many of the newest tokens reach beyond the first characters of a text, or begin an incomplete one.

    Args:
        ends: characters of the text up to the end of each token; a token without a complete character adds none.
    """
    first = bisect_right(ends, characters)
    while first and ends[first - 1] == (ends[first - 2] if first > 1 else 0):
        first -= 1
    return len(ends) - first


class StopTexts:
    """The text of one request, searched for its stop texts as its tokens arrive.

    A token that completes no character yet is held back with the tokens that may begin a stop text. Numbers count
    output tokens from 0. A number that was pushed before resets the text to that place, as when a request draws a token
    again after a retraction.
    """

    def __init__(self, text: Spelling, prompt_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._text, self._prompt_ids, self._stops = text, list(prompt_ids), stops
        self._begin()

    def _begin(self) -> None:
        self.search = StopSearch(self._stops)
        self._tokens: list[int] = []
        self._ends: list[int] = []  # characters of the text up to the end of each token
        self._characters = 0
        self._step = self._text.stream(self._prompt_ids)

    # mechanism: stop-texts (decided)
    def push(self, number: int, token: int) -> tuple[bool, int]:
        """Append output token `number`.

        Returns: whether a stop text ends in it, and how many of the newest tokens may begin one.
        """
        if number < len(self._tokens):
            kept = self._tokens[:number]
            self._begin()
            for one in kept:
                self._append(one)
        if self._append(token):
            return True, 0
        return False, tokens_behind(self._ends, self._characters - len(self.search.state))

    def _append(self, token: int) -> bool:
        new = self._step(token)
        self._characters += len(new)
        self._tokens.append(token)
        self._ends.append(self._characters)
        return self.search.follow(new)


class TextEnd:
    """The end of a text as it grows: as much as a stop text that ends in its newest part may need."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._end = ""
        self._before = 0  # characters before the newest part
        self.characters = 0  # of the whole text

    def add(self, new: str) -> None:
        """Append a part."""
        self._before = self.characters
        kept = self._end[-self._longest :] if self._longest else ""
        self._end = kept + new
        self.characters += len(new)

    def stop(self, checked: int = 0) -> tuple[int, str] | None:
        """Return the first stop text that ends in the newest part of the text, and its index in the whole text.

        Args:
            checked: a stop text counts if it ends behind so many characters.
        """
        before = self.characters - len(self._end)
        checked = max(checked, self._before)
        found = []
        for stop in self._stops:
            at = self._end.find(stop, max(0, checked - before - len(stop) + 1))
            if at >= 0:
                found.append((before + at, stop))
        return min(found, key=itemgetter(0), default=None)
