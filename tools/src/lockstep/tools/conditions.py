"""Conditions over decided events at which a replay stops: a small language and its parser.

    RequestRetracted                                  a request was retracted
    RequestRetracted and request == r17               r17 was retracted
    AdmissionDeferred and reason == kv_budget and needed_tokens > 8000
    (DecodeSkipped or PagesEvicted) and not mode == decode
    waiting > 50 and free_pages < 10

A condition holds in a step if it holds for one of its decided events. A step without decided events has only FACTS.
Names are types of decided events, their fields, and FACTS. `request`, `behind` and `beneficiary` are compared with a
label, an id, or r and an id. A comparison with a field that an event does not have is false.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Decided, ObservedEvent, decided_types
from lockstep.core.contract.render import Names
from lockstep.core.scheduler.engine import Engine

TYPES: dict[str, type[Decided]] = {type_.__name__: type_ for type_ in decided_types()}
FIELDS = {field.name for type_ in TYPES.values() for field in msgspec.structs.fields(type_)} - {"time_us", "request_id"}
FACTS = {
    "event": "type of the observed event",
    "step": "number of the step, from 0",
    "time_ms": "host time of the event, in milliseconds",
    "mode": "mode of the launched batch: extend, decode, mixed; none without a launch",
    "rows": "rows of the launched batch",
    "waiting": "requests in the waiting queue after the step",
    "running": "requests with a row",
    "in_flight": "batches launched and not delivered",
    "free_pages": "pages on the free list",
    "available_pages": "free pages and evictable cached pages",
}
REQUEST_FIELDS = ("request", "behind", "beneficiary")
NAMES = {"request", *FIELDS, *FACTS}

_TOKEN = re.compile(r"""\s*(?:(<=|>=|==|!=|<|>|\(|\))|"([^"]*)"|([A-Za-z0-9_.:/#@+-]+))""")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_DEEPEST = 50


class Moment(NamedTuple):
    """The values for one evaluation of a condition: the facts of a step and one of its decided events."""

    facts: Mapping[str, Any]
    decided: Decided | None
    names: Names


Test = Callable[[Moment], bool]


class Condition:
    """A parsed condition. Raises ConfigError for text that cannot be parsed, with the place of the error."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0
        self._test = self._either()
        if self._at < len(self._tokens):
            raise self._error("expected `and`, `or` or the end")

    def holds(self, number: int, event: ObservedEvent, step: Step, engine: Engine, names: Names) -> bool:
        """Whether the condition holds in a step. `engine` is in its state after the step."""
        plan = step.launched()
        facts = {
            "event": type(event).__name__,
            "step": number,
            "time_ms": event.time_us / 1000,
            "mode": plan.mode if plan is not None else "none",
            "rows": len(plan.rows) if plan is not None else 0,
            "waiting": len(engine.waiting),
            "running": engine.active,
            "in_flight": len(engine.in_flight),
            "free_pages": engine.memory.pool.free_count,
            "available_pages": engine.memory.available_pages,
        }
        if not step.decided:
            return self._test(Moment(facts, None, names))
        return any(self._test(Moment(facts, decided, names)) for decided in step.decided)

    # Precedence: or < and < not < a comparison, a name or brackets.

    def _either(self) -> Test:
        found = self._both()
        while self._takes("or"):
            found = _or(found, self._both())
        return found

    def _both(self) -> Test:
        found = self._one()
        while self._takes("and"):
            found = _and(found, self._one())
        return found

    def _one(self) -> Test:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"expected at most {_DEEPEST} brackets and nots inside each other")
        try:
            if self._takes("not"):
                inner = self._one()
                return lambda moment: not inner(moment)
            if self._takes("("):
                inner = self._either()
                if not self._takes(")"):
                    raise self._error("expected `)`")
                return inner
            return self._named()
        finally:
            self._depth -= 1

    def _named(self) -> Test:
        name, _ = self._next("the name of a decided event or of a field")
        if name in TYPES:
            wanted = TYPES[name]
            return lambda moment: isinstance(moment.decided, wanted)
        if name not in NAMES:
            near = get_close_matches(name, [*TYPES, *NAMES], n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"names are {', '.join([*TYPES, *sorted(NAMES)])}"
            raise ConfigError(f"`{name}` in the condition `{self.text}` is not a name\nhint: {hint}")
        sign, place = self._next("a comparison")
        if sign not in _COMPARE:
            self._at -= 1
            raise self._error("expected ==, !=, <, <=, > or >=", place)
        word, _ = self._next("a value")
        return _comparison(name, _COMPARE[sign], word, self)

    def _takes(self, word: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at][0] == word:
            self._at += 1
            return True
        return False

    def _next(self, expected: str) -> tuple[str, int]:
        if self._at >= len(self._tokens):
            raise self._error(f"expected {expected}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _error(self, expected: str, place: int | None = None) -> ConfigError:
        if place is None:
            place = self._tokens[self._at][1] if self._at < len(self._tokens) else len(self.text)
        got = self.text[place:].strip() or "the end"
        return ConfigError(
            f"the condition `{self.text}` {expected} at `{got}`\n"
            "hint: such as `RequestRetracted and request == r17`, or `waiting > 50`"
        )


def _tokens(text: str) -> list[tuple[str, int]]:
    found, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ConfigError(
                f"the condition `{text}` has `{text[at:].strip()[0]}` where no name or value begins\n"
                'hint: text with other characters goes in quotes: request == "a b"'
            )
        found.append((match[match.lastindex or 0], match.start(match.lastindex or 0)))
        at = match.end()
    return found


def _comparison(name: str, compare: Callable[[Any, Any], bool], word: str, condition: Condition) -> Test:
    number = float(word) if re.fullmatch(r"-?\d+(\.\d+)?", word) else None
    ordered = compare not in (operator.eq, operator.ne)
    if ordered and number is None:
        raise ConfigError(
            f"`{name}` in the condition `{condition.text}` is compared with `{word}`, which is not a number\n"
            "hint: words are compared by == and !="
        )

    def test(moment: Moment) -> bool:
        if name in REQUEST_FIELDS:
            field = "request_id" if name == "request" else name
            request_id = getattr(moment.decided, field, None)
            if request_id is None or ordered:
                return False
            equal = word in (moment.names.request(request_id), f"r{request_id}", str(request_id))
            return equal if compare is operator.eq else not equal
        value = moment.facts[name] if name in moment.facts else getattr(moment.decided, name, None)
        if value is None:
            return False
        if isinstance(value, str):
            return not ordered and compare(value, word)
        return number is not None and compare(value, number)

    return test


def _or(first: Test, other: Test) -> Test:
    return lambda moment: first(moment) or other(moment)


def _and(first: Test, other: Test) -> Test:
    return lambda moment: first(moment) and other(moment)
