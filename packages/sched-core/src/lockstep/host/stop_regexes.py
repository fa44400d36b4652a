r"""Regular expressions that end an answer, matched as its text arrives.

    pattern     \n(User|System):
    text        the answer . . . . \nUs          from "\n" on the text may begin a match: its tokens are held back
    a match     is complete at the first character at which any match ends; of several the one that begins first

The pattern becomes a nondeterministic automaton without backtracking: each character costs at most one look at each of
its states, whatever the pattern and the text are. Each state keeps the place at which its match began, as in a Pike
machine. Text is searched, not matched as a whole.
"""

from __future__ import annotations

import re
import re._constants as c  # type: ignore[import-not-found,unused-ignore]  # re's own syntax tree; typeshed lacks both
import re._parser as parser  # type: ignore[import-not-found,unused-ignore]
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestArrived
from lockstep.host.stop_texts import Spelling, StopTexts, tokens_behind

STATES_MAX = 512
"""Most states of one automaton, which bound the cost of a character. A repetition counts once per repeat."""

VISITS_MAX = 4096
"""Most items of a pattern, repetitions unrolled. An item without a state, such as an empty group, counts only here."""

REMEMBERED = 4096  # characters whose first states are remembered by an automaton

Accepts = Callable[[str], bool]
CATEGORIES = {
    c.CATEGORY_DIGIT: r"\d",
    c.CATEGORY_NOT_DIGIT: r"\D",
    c.CATEGORY_SPACE: r"\s",
    c.CATEGORY_NOT_SPACE: r"\S",
    c.CATEGORY_WORD: r"\w",
    c.CATEGORY_NOT_WORD: r"\W",
}
UNSUPPORTED = {
    c.ASSERT: "a lookahead or lookbehind",
    c.ASSERT_NOT: "a negative lookahead or lookbehind",
    c.GROUPREF: "a reference to a group",
    c.GROUPREF_EXISTS: "a condition on a group",
    c.ATOMIC_GROUP: "an atomic group",
    c.POSSESSIVE_REPEAT: "a possessive repetition",
}


@dataclass(slots=True)
class _State:
    """One state. Either it reads a character (`accepts`), or it passes on without reading one."""

    accepts: Accepts | None = None
    then: list[int] = field(default_factory=list)
    at_start: bool = False  # passes on at the start of the text only; of a line, if the pattern has the flag m


class Automaton:
    """A compiled pattern. Raises ConfigError for a pattern that is invalid, not supported, or too large."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"`{pattern[:60]}` is no regular expression: {error}") from None
        flags = tree.state.flags
        self._ignore_case, self._dot_all = bool(flags & re.IGNORECASE), bool(flags & re.DOTALL)
        self._multiline, self._ascii = bool(flags & re.MULTILINE), bool(flags & re.ASCII)
        self._states = [_State()]
        self._visits = 0
        self._accept = 0
        first = self._sequence(list(tree), self._accept)
        self._closures: dict[tuple[int, bool], tuple[tuple[int, ...], bool]] = {}
        self._first = first
        if any(self.closure(first, start)[1] for start in (False, True)):
            raise ConfigError(f"`{pattern[:60]}` matches an empty text, so it would end every answer at once")
        self._begins: dict[tuple[str, bool], tuple[int, ...]] = {}

    @property
    def size(self) -> int:
        """Number of states: a character costs at most one look at each."""
        return len(self._states)

    # ------------------------------------------------------------------------------------------------- construction

    def _add(self, state: _State) -> int:
        if len(self._states) >= STATES_MAX:
            raise ConfigError(f"`{self.pattern[:60]}` has more than {STATES_MAX} states; write it shorter")
        self._states.append(state)
        return len(self._states) - 1

    def _sequence(self, items: Iterable[Any], then: int) -> int:
        """Return the first state of items in a row, which continue with the state `then`."""
        self._visits += 1
        if self._visits > VISITS_MAX:
            raise ConfigError(f"`{self.pattern[:60]}` repeats too much: more than {VISITS_MAX} items; write it shorter")
        for op, value in reversed(list(items)):
            then = self._item(op, value, then)
        return then

    def _item(self, op: Any, value: Any, then: int) -> int:
        if op is c.SUBPATTERN:
            _, add, remove, inside = value
            if (add | remove) & (re.IGNORECASE | re.DOTALL | re.MULTILINE):
                raise self._unsupported("flags inside the pattern; put them in front of it")
            return self._sequence(inside, then)
        if op is c.BRANCH:
            return self._add(_State(then=[self._sequence(one, then) for one in value[1]]))
        if op in (c.MAX_REPEAT, c.MIN_REPEAT):
            least, most, inside = value
            return self._repeat(least, most, inside, then)
        if op is c.AT:
            if value not in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
                raise self._unsupported("an end or a boundary of a word, which the next token decides")
            return self._add(_State(then=[then], at_start=True))
        if op in UNSUPPORTED:
            raise self._unsupported(UNSUPPORTED[op])
        return self._add(_State(accepts=self._character(op, value), then=[then]))

    def _repeat(self, least: int, most: Any, inside: Any, then: int) -> int:
        if most is c.MAXREPEAT:
            loop = self._add(_State())
            self._states[loop].then = [self._sequence(inside, loop), then]
            then = loop
        else:
            if int(most) - least > STATES_MAX:
                raise ConfigError(f"`{self.pattern[:60]}` repeats {most} times, at most {STATES_MAX} are allowed")
            after = then
            for _ in range(int(most) - least):
                then = self._add(_State(then=[self._sequence(inside, then), after]))
        if least > STATES_MAX:
            raise ConfigError(f"`{self.pattern[:60]}` repeats {least} times, at most {STATES_MAX} are allowed")
        for _ in range(least):
            then = self._sequence(inside, then)
        return then

    def _unsupported(self, what: str) -> ConfigError:
        return ConfigError(f"`{self.pattern[:60]}` has {what}, which is not supported while text arrives")

    def _character(self, op: Any, value: Any) -> Accepts:
        """Return the test of one character."""
        if op is c.ANY:
            return (lambda one: True) if self._dot_all else (lambda one: one != "\n")
        if op is c.IN:
            negate = value[0][0] is c.NEGATE
            tests = [self._member(*one) for one in value[negate:]]
            inside = self._cased(lambda one: any(test(one) for test in tests))
            return (lambda one: not inside(one)) if negate else inside
        if op is c.NOT_LITERAL:
            named = self._cased(self._member(c.LITERAL, value))
            return lambda one: not named(one)
        return self._cased(self._member(op, value))

    def _member(self, op: Any, value: Any) -> Accepts:
        if op is c.LITERAL:
            literal = chr(value)
            return lambda one: one == literal
        if op is c.RANGE:
            low, high = chr(value[0]), chr(value[1])
            return lambda one: low <= one <= high
        if op is c.CATEGORY and value in CATEGORIES:
            matches = re.compile(CATEGORIES[value], re.ASCII if self._ascii else 0).match
            return lambda one: matches(one) is not None
        raise self._unsupported(f"{str(op).lower()}")

    def _cased(self, test: Accepts) -> Accepts:
        if not self._ignore_case:
            return test
        return lambda one: test(one) or test(one.lower()) or test(one.upper())

    # ------------------------------------------------------------------------------------------------------ the run

    def closure(self, state: int, at_start: bool) -> tuple[tuple[int, ...], bool]:
        """Return the states that read the next character from a state on, and whether a match is complete there."""
        found = self._closures.get((state, at_start))
        if found is None:
            seen, todo, complete = set[int](), [state], False
            reading = []
            while todo:
                one = todo.pop()
                if one in seen:
                    continue
                seen.add(one)
                complete = complete or one == self._accept
                about = self._states[one]
                if about.accepts is not None:
                    reading.append(one)
                elif at_start or not about.at_start:
                    todo += about.then
            found = self._closures[state, at_start] = tuple(sorted(reading)), complete
        return found

    def step(self, threads: dict[int, int], character: str, index: int, before: str) -> tuple[dict[int, int], int]:
        """Read one character.

        Args:
            threads: for each state the index at which its match began.
            index: of the character in the text; `before`: the character before it, "" at the start.
        Returns: the states behind the character, and the index at which a match that ends here began; -1: none ends.
        """
        new: dict[int, int] = {}
        began = -1
        line = self._multiline and character == "\n"
        starts = not before or (self._multiline and before == "\n")
        begins = [(state, index) for state in self._begin(character, starts)]
        for state, start in (*threads.items(), *begins) if threads else begins:
            about = self._states[state]
            assert about.accepts is not None
            if not about.accepts(character):
                continue
            reading, complete = self.closure(about.then[0], line)
            if complete and (began < 0 or start < began):
                began = start
            for one in reading:
                if new.get(one, index + 1) > start:
                    new[one] = start
        return new, began

    def _begin(self, character: str, starts: bool) -> tuple[int, ...]:
        """Return the states at which a match may begin with this character."""
        found = self._begins.get((character, starts))
        if found is None:
            first, _ = self.closure(self._first, starts)
            accepting = [one for one in first if (test := self._states[one].accepts) is not None and test(character)]
            found = tuple(accepting)
            if len(self._begins) < REMEMBERED:
                self._begins[character, starts] = found
        return found


@lru_cache(256)
def compiled(pattern: str) -> Automaton:
    """Return the automaton of a pattern. Raises ConfigError."""
    return Automaton(pattern)


def watched_field(event: RequestArrived) -> str:
    """Return the field by which the text of a request is searched; "" if it is not searched."""
    return "stop_texts" if event.stop_texts else "stop_regexes" if event.stop_regexes else ""


@dataclass(frozen=True, slots=True)
class RegexMatch:
    """A match that ended an answer: characters [start:stop) of its text, by the pattern, in output token `number`."""

    start: int
    stop: int
    pattern: str
    number: int


class StopRegexes:
    """The text of one request, searched for regular expressions; see `StopTexts` for `push` and its numbers."""

    def __init__(self, text: Spelling, prompt_ids: Sequence[int], patterns: Sequence[str]) -> None:
        self._text, self._prompt_ids = text, list(prompt_ids)
        self._automata = [compiled(one) for one in patterns]
        self._begin()

    def _begin(self) -> None:
        self.match: RegexMatch | None = None  # found last
        self.ends: list[int] = []  # characters of the text up to the end of each token
        self._tokens: list[int] = []
        self._characters = 0
        self._before = ""
        self._threads: list[dict[int, int]] = [{} for _ in self._automata]
        self._step = self._text.stream(self._prompt_ids)

    # mechanism: stop-regexes (decided)
    def push(self, number: int, token: int) -> tuple[bool, int]:
        """Append output token `number`.

        Returns: whether a match ends in its text, and how many of the newest tokens may begin one.
        """
        if number < len(self._tokens):
            kept = self._tokens[:number]
            self._begin()
            for one in kept:
                self._append(one)
        if self._append(token):
            return True, 0
        free = min((start for threads in self._threads for start in threads.values()), default=self._characters)
        return False, tokens_behind(self.ends, free)

    def _append(self, token: int) -> bool:
        """Append a token. Returns whether a match ends in its text; the search begins anew behind a match."""
        number = len(self._tokens)
        self._tokens.append(token)
        matched = False
        for character in self._step(token):
            found: RegexMatch | None = None
            for i, automaton in enumerate(self._automata):
                threads, start = automaton.step(self._threads[i], character, self._characters, self._before)
                self._threads[i] = threads
                if start >= 0 and (found is None or start < found.start):
                    found = RegexMatch(start, self._characters + 1, automaton.pattern, number)
            self._characters += 1
            self._before = character
            if found is not None:
                if not matched:
                    self.match = found
                matched = True
                self._threads = [{} for _ in self._automata]
        self.ends.append(self._characters)
        return matched


class Both:
    """Stop texts and stop regexes of one request."""

    def __init__(self, texts: StopTexts, regexes: StopRegexes) -> None:
        self._texts, self._regexes = texts, regexes

    def push(self, number: int, token: int) -> tuple[bool, int]:
        """Append output token `number`; see `StopTexts.push`."""
        stopped, behind = self._texts.push(number, token)
        matched, held = self._regexes.push(number, token)
        return (True, 0) if stopped or matched else (False, max(behind, held))


Watch = StopTexts | StopRegexes | Both


def watch_of(text: Spelling, prompt_ids: Sequence[int], stops: Sequence[str], regexes: Sequence[str]) -> Watch:
    """Return the search of one request's text for its stop texts and regular expressions."""
    if not regexes:
        return StopTexts(text, prompt_ids, stops)
    found = StopRegexes(text, prompt_ids, regexes)
    return Both(StopTexts(text, prompt_ids, stops), found) if stops else found
