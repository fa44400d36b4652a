"""Parses an answer by the table of its format while it comes: content, thoughts, and tool calls.

    input    | I look. <tool | _call>{"name": "f", "argu | ments": {"city": "Zü | rich"}}</tool_call>
    output   | I look.       |                           | f   {"city": "Zü      | rich"}

The result never depends on how the text was cut into pieces. Text that may still become a call is withheld; text that
turns out not to be one is returned as content, white space included. A call is emitted once its function is certain and
its arguments begin. A call that breaks off after that emits `CallBroken`: in a stream the part that was emitted stays
and the rest is content; a whole answer has all of it as content. White space before a call or between two calls belongs
to the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.api.text.chat_formats.literals import PYTHON, SPACE, Literal, Members, as_json
from lockstep.api.text.chat_formats.tables import Format, Rule, State

NAME = re.compile(r"\s{0,8}[\w.:/-]{1,128}\s{0,8}")
NAME_SO_FAR = re.compile(r"\s{0,8}(?:[\w.:/-]{1,128}\s{0,8})?")
KEY = re.compile(r"\s{0,8}[^\s<>=(){}\[\],\"']{1,128}\s{0,8}")
KEY_SO_FAR = re.compile(r"\s{0,8}(?:[^\s<>=(){}\[\],\"']{1,128}\s{0,8})?")
SPACES = re.compile(f"[{SPACE}]*")


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """More of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A tool call begins; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments, in JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of a call are complete, and are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that was emitted turned out not to be one.

    Args:
        raw: its whole text, as the model wrote it.
        rest: the part of it that was not emitted as arguments.
    """

    index: int
    raw: str
    rest: str


Event = ContentDelta | Thought | CallBegan | CallArguments | CallEnded | CallBroken


@dataclass(slots=True)
class Called:
    """A call, as far as it came."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer: its content, thoughts and calls."""

    content: str = ""
    thought: str = ""
    calls: list[Called] = field(default_factory=list)
    order: list[str | Called] = field(default_factory=list)  # content and calls in order

    @classmethod
    def of(cls, events: list[Event]) -> ParsedAnswer:
        """The answer that a list of events makes up."""
        contents: list[str] = []
        thoughts: list[str] = []
        open_calls: dict[int, tuple[Called, list[str]]] = {}
        answer = cls()

        def add(text: str) -> None:
            contents.append(text)
            if answer.order and isinstance(answer.order[-1], str):
                answer.order[-1] += text
            elif text:
                answer.order.append(text)

        for event in events:
            match event:
                case ContentDelta():
                    add(event.text)
                case Thought():
                    thoughts.append(event.text)
                case CallBegan():
                    open_calls[event.index] = Called(event.call_id, event.name), []
                case CallArguments():
                    open_calls[event.index][1].append(event.text)
                case CallEnded():
                    called, parts = open_calls.pop(event.index)
                    called.arguments = "".join(parts)
                    answer.calls.append(called)
                    answer.order.append(called)
                case CallBroken():
                    add(event.raw)
        answer.content, answer.thought = "".join(contents), "".join(thoughts)
        return answer


# --------------------------------------------------------------------------------------------------------------- driver


class AnswerParser:
    """Parses an answer piece by piece.

    Args:
        tools: schemas of the arguments, by name of the tool. Formats without marks recognise calls of these tools only.
        make_id: returns the id of the next call.
        calls_max: number of calls to emit; further ones are dropped.
    """

    def __init__(
        self,
        format: Format,  # noqa: A002 - it is one
        *,
        tools: Mapping[str, Any],
        make_id: Callable[[], str],
        calls_max: int | None = None,
    ) -> None:
        self._format, self._tools, self._make_id, self._calls_max = format, tools, make_id, calls_max
        self._events: list[Event] = []
        self._buffer, self._at = "", 0  # unread input, and the next position in it
        self._gone = 0  # number of characters removed from the front of the buffer
        self._state = format.states[format.start]
        self._readers: dict[str, Callable[[State], bool]] = {
            "content": self._spoken,
            "thought": self._spoken,
            "space": self._space,
            "name": self._word,
            "key": self._word,
            "skip": self._skipped,
            "value": self._value,
            "literal": self._literal,
            "arguments": self._arguments,
            "call": self._call,
        }
        self._gap = ""  # white space that may belong to the format
        self._withheld: list[str] = []  # text taken since the last recorded event
        self._raw: list[str] = []  # text of the open call
        self._withholding = False  # whether a call may have begun
        self._calls_inside = 0  # calls since that point
        self._spoke = False  # whether this state has produced text
        self._after_call = False
        self._index = -1  # of the newest call emitted
        self._begun = False  # a call is emitted and not complete
        self._name = ""
        self._keys: set[str] = set()  # argument names of the open call, where they come one by one
        self._value_of, self._members = Literal(), Members()
        self._kept: list[str] = []  # JSON that waits for the function's name, or the text of one value
        self._name_text: list[str] = []
        self._done = False  # the arguments of this object are complete
        self._shape = ""  # first character of the arguments
        self._key = ""  # newest argument, where they come one by one
        self._streams = False  # whether its value is emitted as it comes, being text
        self._newline = ""  # a line end that may be the last of that text, and then belongs to the format
        self.calls = 0
        """Number of calls emitted and complete."""
        self.thought_stop = 0
        """Number of characters up to the end of the thoughts, tags included."""

    def feed(self, text: str) -> list[Event]:
        """Take in more of the answer. Returns the new events."""
        if self._at:
            self._gone += self._at
            self._buffer, self._at = self._buffer[self._at :], 0
        self._buffer += text
        while self._readers[self._state.kind](self._state):
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        """Take in the end of the answer. Returns the events of the text that was withheld."""
        while self._state.kind == "space" and self._state.other:
            self._pass(self._state)
        state = self._state
        rest, self._buffer, self._at = self._buffer[self._at :], "", 0
        self._gone += len(rest)
        if state.kind in ("content", "thought"):
            self._utter(state, rest)
            if self._gap and not (state.kind == "content" and self._after_call):
                self._emit(ContentDelta(self._gap) if state.kind == "content" else Thought(self._gap))
            if state.kind == "thought":
                self.thought_stop = self._gone
        else:
            if not rest and not self._withheld and self._after_call:
                self._gap = ""
            self._withheld += [self._gap, rest]
            if self._begun:
                self._raw += [self._gap, rest]
            self._give_back()
        self._gap = ""
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ----------------------------------------------------------------------------------------------------------- output

    def _emit(self, event: Event) -> None:
        """Record an event, merged with the previous one if both are of one kind."""
        last = self._events[-1] if self._events else None
        match event, last:
            case ContentDelta(text), ContentDelta(before):
                self._events[-1] = ContentDelta(before + text)
            case Thought(text), Thought(before):
                self._events[-1] = Thought(before + text)
            case CallArguments(index, text), CallArguments(of, before) if index == of:
                self._events[-1] = CallArguments(index, before + text)
            case _:
                self._events.append(event)

    def _utter(self, state: State, text: str) -> None:
        """Record content or thoughts, except for white space at their end."""
        if state.trims and not self._spoke:
            self._gap, text = "", text.lstrip(SPACE)
        body = text.rstrip(SPACE) if state.rules else text
        if body:
            front = self._gap
            self._emit(ContentDelta(front + body) if state.kind == "content" else Thought(front + body))
            self._gap, self._spoke = "", True
            if state.kind == "content":
                self._after_call = False
        self._gap += text[len(body) :]

    def _emit_call(self, event: CallBegan | CallArguments | CallEnded | CallBroken) -> None:
        if self._calls_max is None or event.index < self._calls_max:
            self._emit(event)

    def _begin(self) -> None:
        self._index += 1
        self._begun = True
        self._raw = list(self._withheld)
        self._emit_call(CallBegan(self._index, self._make_id(), self._name))

    def _argue(self, piece: str, pending: str = "") -> None:
        """Record more of the arguments: all that was taken except for `pending`."""
        if not self._begun:
            self._begin()
        if piece:
            self._emit_call(CallArguments(self._index, piece))
            self._withheld = [pending] if pending else []

    def _end(self) -> None:
        self._emit_call(CallEnded(self._index))
        self._begun, self._after_call, self._withheld, self._raw = False, True, [], []
        self._calls_inside += 1
        self.calls += self._calls_max is None or self._index < self._calls_max
        self._keys = set()

    def _take(self, text: str) -> None:
        """Withhold text that belongs to the format, or to a possible call."""
        if self._withholding:
            self._withheld.append(text)
            if self._begun:
                self._raw.append(text)

    def _give_back(self) -> None:
        """Record the withheld text as content: it is not a call, or a call beyond the limit."""
        rest = "".join(self._withheld)
        if self._begun:
            self._emit_call(CallBroken(self._index, "".join(self._raw), rest))
            self._after_call = False
        elif rest:
            self._emit(ContentDelta(rest))
            self._after_call = False
        self._begun, self._withholding, self._withheld, self._raw, self._keys = False, False, [], [], set()

    def _fail(self) -> bool:
        """Handle text that no rule allows. Returns whether parsing goes on."""
        self._give_back()
        self._enter("content")
        return True

    def _enter(self, name: str) -> None:
        state = self._state = self._format.states[name]
        self._spoke = False
        if state.kind in ("content", "thought") and self._withholding:
            if not self._calls_inside:
                self._give_back()
            self._withholding, self._withheld = False, []
        elif state.kind in ("literal", "arguments"):
            self._value_of = Literal(PYTHON) if state.kind == "literal" else Literal()
        elif state.kind == "call":
            self._members, self._name, self._done, self._shape = Members(), "", False, ""
            self._name_text, self._kept = [], []
        elif state.kind == "value":
            self._kept, self._newline = [], ""
            self._streams = is_text(self._tools.get(self._name), self._key)
            if self._streams:
                self._argue('"')

    def _follow(self, rule: Rule, taken: str) -> bool:
        """Apply a rule: perform its action and go to its state."""
        if rule.does == "open" and not self._withholding:
            self._withholding, self._calls_inside = True, 0
        self._take(self._gap + taken + (rule.text if rule.takes else ""))
        self._gap = ""
        if rule.does == "argument":
            self._argue((", " if self._keys else "{") + json.dumps(self._key, ensure_ascii=False) + ": ")
            self._keys.add(self._key)
        elif rule.does == "end":
            self._argue("}" if self._keys else "{}")
            self._end()
        self._enter(rule.to)
        return True

    # ----------------------------------------------------------------------- readers: False when there is nothing to do

    def _find(self, state: State) -> tuple[str, Rule | None]:
        """The text before the first match of a rule, or the part of it that certainly matches none; and the rule."""
        found = None if state.pattern is None else state.pattern.search(self._buffer, self._at)
        if found is not None:
            rule = state.by_text[found[0]]
            before = self._buffer[self._at : found.start()]
            self._at = found.end() if rule.takes else found.start()
            return before, rule
        stop = len(self._buffer)
        for length in range(min(state.longest, stop - self._at), 0, -1):
            if self._buffer[stop - length :] in state.beginnings:
                stop -= length
                break
        before, self._at = self._buffer[self._at : stop], stop
        return before, None

    def _spoken(self, state: State) -> bool:
        before, rule = self._find(state)
        self._utter(state, before)
        if rule is None:
            return False
        if state.kind == "thought":
            self.thought_stop, self._gap = self._gone + self._at, ""
        return self._follow(rule, "")

    def _space(self, state: State) -> bool:
        spaces = SPACES.match(self._buffer, self._at)
        assert spaces is not None
        self._gap += spaces[0]
        self._at = spaces.end()
        if self._at == len(self._buffer):
            return False
        found = None if state.pattern is None else state.pattern.match(self._buffer, self._at)
        if found is not None:
            rule = state.by_text[found[0]]
            self._at = found.end() if rule.takes else found.start()
            return self._follow(rule, "")
        if self._buffer[self._at :] in state.beginnings:
            return False
        if not state.other:
            return self._fail()
        self._pass(state)
        return True

    def _pass(self, state: State) -> None:
        """Go to the other state, since no rule of this one matches."""
        spoken = self._format.states[state.other].kind in ("content", "thought")
        if self._withholding and not spoken:
            self._take(self._gap)
        if state.trims or (self._withholding and not spoken):
            self._gap = ""
        self._enter(state.other)

    def _word(self, state: State) -> bool:
        """Read the name of a function or of an argument, up to a rule."""
        whole, so_far = (NAME, NAME_SO_FAR) if state.kind == "name" else (KEY, KEY_SO_FAR)
        at = self._at
        before, rule = self._find(state)
        if rule is None:
            self._at = at  # read again with the next piece
            return so_far.fullmatch(before) is None and self._fail()
        word = before.strip(SPACE)
        if rule.does == "end" and state.kind == "key":  # after the last argument
            allowed = not word and len(before) <= 8
        elif state.kind == "key":
            allowed = whole.fullmatch(before) is not None and word not in self._keys
            self._key = word
        else:
            allowed = whole.fullmatch(before) is not None and self._may_call(word)
            self._name = word
        if not allowed:
            self._at = at
            return self._fail()
        return self._follow(rule, before)

    def _may_call(self, name: str) -> bool:
        return self._format.marked or name in self._tools

    def _skipped(self, state: State) -> bool:
        before, rule = self._find(state)
        self._take(before)
        return rule is not None and self._follow(rule, "")

    def _value(self, state: State) -> bool:
        """Read an argument as plain text: a text value is emitted as it comes, any other value at its end."""
        text, rule = self._find(state)
        self._take(text)
        if not self._streams:
            self._kept.append(text)
            if rule is None:
                return False
            whole = "".join(self._kept)
            if state.trims:
                whole = whole.removeprefix("\n").removesuffix("\n")
            self._argue(typed(whole, schema_of(self._tools.get(self._name), self._key)))
            return self._follow(rule, "")
        text = self._newline + text
        if state.trims and text and not self._spoke:
            self._spoke, text = True, text.removeprefix("\n")
        self._newline = "\n" if state.trims and text.endswith("\n") else ""
        self._argue(json.dumps(text.removesuffix(self._newline), ensure_ascii=False)[1:-1], self._newline)
        if rule is None:
            return False
        self._argue('"')
        return self._follow(rule, "")

    def _literal(self, state: State) -> bool:
        return self._follow_value(state, self._at)

    def _arguments(self, state: State) -> bool:
        if not self._value_of.depth and self._value_of.state == "value":
            spaces = SPACES.match(self._buffer, self._at)
            assert spaces is not None
            self._take(spaces[0])
            self._at = spaces.end()
            if self._at == len(self._buffer):
                return False
            if self._buffer[self._at] != "{" or not self._may_call(self._name):
                return self._fail()
        return self._follow_value(state, self._at)

    def _follow_value(self, state: State, at: int) -> bool:
        """Emit a value that ends by itself as it comes."""
        literal, written = self._value_of, []
        while at < len(self._buffer) and literal.state not in ("whole", "bad"):
            at, piece = literal.run(self._buffer, at)
            written.append(piece)
        self._take(self._buffer[self._at : at])
        self._at = at
        self._argue("".join(written), literal.pending)
        if literal.state == "bad":
            return self._fail()
        if literal.state != "whole":
            return False
        if state.kind == "arguments":
            self._end()
        self._enter(state.then)
        return True

    def _call(self, state: State) -> bool:
        """Read an object that names a function and has its arguments."""
        members = self._members
        while self._at < len(self._buffer):
            stop = members.run(self._buffer, self._at)
            self._take(self._buffer[self._at : stop])
            self._at = stop
            if members.literal.state == "bad":
                return self._fail()
            if members.literal.state == "whole":
                if not self._done and self._name and self._format.marked:
                    self._argue("{}")
                    self._end()
                    self._done = True
                if not (self._done and self._name):
                    return self._fail()
                self._withheld = []  # members after the arguments are not text
                self._enter(state.then)
                return True
            if (members.piece or members.over) and not self._member(members):
                return self._fail()
        return False

    def _member(self, members: Members) -> bool:
        """Read more of the value of one member of an object. False if the value is not possible there."""
        if members.key == "name":
            if self._name:
                return False
            self._name_text.append(members.piece)
            if not members.over:
                return True
            written = "".join(self._name_text)
            name = json.loads(written) if written.startswith('"') else ""
            if NAME.fullmatch(name) is None or name != name.strip() or not self._may_call(name):
                return False
            self._name = name
        elif members.key in self._format.argument_names:
            if self._done:
                return False
            self._shape = self._shape or members.piece[:1]
            if self._shape not in ("{", '"', "n"):
                return False
            self._kept.append(members.piece)
            self._done = members.over
            if self._done and self._shape != "{":  # a string that contains the object, or null for none
                whole = as_json(LONE.sub(lambda one: f"\\u{ord(one[0]):04x}", json.loads("".join(self._kept)) or "{}"))
                if whole is None or not whole.startswith("{"):
                    return False
                self._kept = [whole]
        else:
            return True
        if self._name and self._kept and (self._shape == "{" or self._done):
            self._argue("".join(self._kept), members.literal.pending)
            self._kept = []
            if self._done:
                self._end()
        return True


# ------------------------------------------------------------------------------------------------- arguments by schemas

TYPE_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
LONE = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which no UTF-8 text has."""


def schema_of(tool: Any, key: str) -> Any:
    """The schema of an argument; None if there is none."""
    properties = tool.get("properties") if isinstance(tool, dict) else None
    return properties.get(key) if isinstance(properties, dict) else None


def types_of(schema: Any, depth: int = 8) -> set[str]:
    """The JSON types that a schema names; empty for any type."""
    if not isinstance(schema, dict) or not depth:
        return set()
    named = schema.get("type")
    found = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for way in ("anyOf", "oneOf", "allOf"):
        ways = schema.get(way)
        for one in ways if isinstance(ways, list) else ():
            found |= types_of(one, depth - 1)
    values = schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(one, str) for one in values):
        return {"string"}
    return found


def is_text(tool: Any, key: str) -> bool:
    """Whether an argument is a text whatever it looks like: its schema makes it one, or there is no schema."""
    schema = schema_of(tool, key)
    return schema is None or types_of(schema) == {"string"}


def typed(text: str, schema: Any) -> str:
    """Plain text as JSON, of a type that its schema allows if possible."""
    value = as_json(text.strip(SPACE)) or as_json(text.strip(SPACE), PYTHON)
    types = types_of(schema)
    if value is not None:
        kind = TYPE_OF.get(value[0], "number")
        fits = not types or kind in types or (kind == "number" and "integer" in types)
        if fits or "string" not in types:
            return value
    return json.dumps(text, ensure_ascii=False)
