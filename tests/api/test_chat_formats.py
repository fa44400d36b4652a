"""Calls and thoughts in a model's output: every cutting of a text has the same result, and no text is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.api.text.chat_formats.driver import (
    AnswerParser,
    CallArguments,
    CallBegan,
    CallBroken,
    CallEnded,
    ContentDelta,
    Event,
    ParsedAnswer,
    Thought,
)
from lockstep.api.text.chat_formats.literals import JSON, PYTHON, SPACE, as_json
from lockstep.api.text.chat_formats.tables import (
    REQUIRED,
    THOUGHTS,
    TOOL_FORMATS,
    Format,
    Opening,
    with_thoughts,
)

Call = tuple[str, dict[str, Any]]
FORMATS = {**TOOL_FORMATS, "required": REQUIRED}
TOOLS: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "number"},
            "flag": {"type": ["boolean", "null"]},
            "list": {"type": "array"},
            "object": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
    }
    for name in ("now", "get_weather", "ns.search-2")
}


# --------------------------------------------------------------------------------- how models write calls, written anew


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def python(value: Any) -> str:
    """A value as a Python literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{one!r}: {python(other)}" for one, other in value.items()) + "}"
    return "[" + ", ".join(map(python, value)) + "]" if isinstance(value, list) else repr(value)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Sequence[Call]) -> str:
    objects = (dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: Sequence[Call]) -> str:
    if len(calls) % 2:
        return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{dumps(arguments)}" for name, arguments in calls)
    objects = [{"name": name, "arguments": arguments, "id": "abcdefghi"} for name, arguments in calls]
    return f"[TOOL_CALLS] {dumps(objects)}"


def pythonic(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def qwen3_coder(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        parameters = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        text += f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n"
    return text.rstrip()


def glm(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        text += f"<tool_call>{name}\n{pairs}</tool_call>\n"
    return text.rstrip()


def deepseek(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        inside = f"{name}<｜tool▁sep｜>{dumps(arguments)}"  # noqa: RUF001
        if len(calls) % 2:
            inside = f"function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"  # noqa: RUF001
        written.append(f"<｜tool▁call▁begin｜>{inside}<｜tool▁call▁end｜>")  # noqa: RUF001
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"  # noqa: RUF001


def required(calls: Sequence[Call]) -> str:
    return dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


RENDER: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": hermes,
    "llama3_json": llama3,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
    "glm45": glm,
    "deepseek_v3": deepseek,
    "required": required,
}
WHOLE_ANSWER = ("llama3_json", "pythonic", "required")
"""Formats without marks, in which an answer has no text before its calls."""


# -------------------------------------------------------------------------------------------------------------- drawing

letters = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
texts = letters | st.sampled_from(
    ['"', "\\", "\n", "\\n", "it's", "</", "<tool_", "}", "]", ")", "é\U0001f600", "'\"", "\x01"]
)
numbers = st.integers(-(10**9), 10**9) | st.sampled_from([0.5, -1e-9, 2.5e20])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "number": numbers,
        "flag": st.none() | st.booleans(),
        "list": st.lists(values, max_size=3),
        "object": st.dictionaries(texts, values, max_size=3),
    },
)
names_of_formats = st.sampled_from(sorted(FORMATS))
calls_of = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), arguments), min_size=1, max_size=3)
MARKS = sorted({text for one in FORMATS.values() for text in one.texts()})


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces: of one character, a few, or many."""
    draw = random.Random(seed)
    mean = draw.choice((1, 2, 5, 40))
    at, borders = 0, [0]
    while at < len(text):
        at += 1 if mean == 1 else draw.randint(0, 2 * mean)
        borders.append(min(at, len(text)))
    return [text[one:other] for one, other in pairwise([*borders, len(text)])]


def ids() -> Callable[[], str]:
    numbered = count()
    return lambda: f"call_{next(numbered)}"


def read(form: Format, pieces: Sequence[str], **more: Any) -> list[Event]:
    """The events of a text, events of one kind joined."""
    parser = AnswerParser(form, tools=TOOLS, make_id=ids(), **more)
    events: list[Event] = []
    for new in (*(parser.feed(piece) for piece in pieces), parser.finish()):
        events += new
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match event, last:
            case (ContentDelta(text), ContentDelta(before)) | (Thought(text), Thought(before)):
                joined[-1] = type(event)(before + text)
            case CallArguments(index, text), CallArguments(_, before):
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(event)
    assert parser.calls == sum(isinstance(event, CallEnded) for event in events)
    return joined


def told(answer: ParsedAnswer) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


# ----------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    calls_of,
    letters,
    letters,
    st.integers(0, 2**32),
    st.sampled_from(sorted(THOUGHTS)),
)
def test_calls_in_any_pieces_are_those_that_were_written(
    name: str, calls: list[Call], before: str, after: str, seed: int, thinks: str
) -> None:
    if name in ("qwen3_coder", "glm45"):  # text between tags can neither contain a tag nor end early
        for _, given_arguments in calls:
            for mark in ("<", "</", "<tool_", "\n"):
                given_arguments["text"] = given_arguments.get("text", "").replace(mark, "-")
    if name == "pythonic":
        calls = [(one.replace("-", "_").replace(".", "_"), other) for one, other in calls]
    tools = {one: TOOLS.get(one, TOOLS["now"]) for one, _ in calls}
    written = RENDER[name](calls)
    front = "" if name in WHOLE_ANSWER else before.replace("<", "-").replace("[", "-")
    behind = "" if name == "required" else after.replace("<", "-").replace("[", "-").replace(";", "-").replace(",", "-")
    if name in WHOLE_ANSWER and behind.strip()[:1] == "{":
        behind = ""
    thoughts = THOUGHTS[thinks]
    form = with_thoughts(FORMATS[name], thoughts, "neither")
    thought = "" if seed % 2 else f"{thoughts.begin}\nI look it <up>.\n{thoughts.end}\n\n"
    text = (thought or (thoughts.end + "\n" if thoughts.begun else "")) + front + written + behind
    events: list[Event] = []
    parser = AnswerParser(form, tools=tools, make_id=ids())
    for piece in cut(text, seed):
        events += parser.feed(piece)
    answer = ParsedAnswer.of(events + parser.finish())
    assert told(answer) == calls
    front = front.strip(SPACE) if thought or thoughts.begun else front.rstrip(SPACE)
    assert answer.content == front + (behind if behind.strip(SPACE) else "")
    assert answer.thought == ("I look it <up>." if thought else "")
    assert parser.calls == len(calls)


@st.composite
def tangled(draw: st.DrawFn) -> tuple[str, str]:
    """A format, and a text close to it: calls with pieces missing, doubled, or of other formats."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    other = draw(st.sampled_from(sorted(FORMATS)))
    parts = [RENDER[name](draw(calls_of)), *draw(st.lists(texts | st.sampled_from(MARKS), max_size=4))]
    if draw(st.booleans()):
        parts.append(RENDER[other](draw(calls_of)))
    text = "".join(draw(st.permutations(parts)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(texts | st.sampled_from(MARKS)) + text[at + draw(st.integers(0, 6)) :]
    return name, text


@settings(max_examples=250, deadline=None)
@given(tangled(), st.integers(0, 2**32), st.sampled_from([None, *sorted(THOUGHTS)]), st.sampled_from([None, 1]))
def test_any_text_in_any_pieces_means_the_same_and_nothing_is_lost(
    drawn: tuple[str, str], seed: int, thinks: str | None, calls_max: int | None
) -> None:
    name, text = drawn
    how: Opening = ("neither", "open", "closed")[seed % 3]  # type: ignore[assignment]
    form = FORMATS[name] if thinks is None else with_thoughts(FORMATS[name], THOUGHTS[thinks], how)
    whole = read(form, [text], calls_max=calls_max)
    assert read(form, cut(text, seed), calls_max=calls_max) == whole
    answer = ParsedAnswer.of(whole)
    for call in answer.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if thinks is None and calls_max is None:
        if not answer.calls:
            assert answer.content == text  # white space included
        following = iter(text)
        assert all(letter in following for letter in answer.content)  # in order, nothing added
        streamed = "".join(
            event.text if isinstance(event, ContentDelta) else event.rest
            for event in whole
            if isinstance(event, ContentDelta | CallBroken)
        )
        following = iter(text)
        assert all(letter in following for letter in streamed)
    if calls_max == 1:
        assert sum(isinstance(event, CallBegan) for event in whole) <= 1


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from(["", " ", "\n\t"]))
def test_values_of_python_and_json_come_out_as_json(value: Any, space: str) -> None:
    assert json.loads(as_json(space + dumps(value) + space) or "") == value
    assert as_json(dumps(value)) == dumps(value).replace("\x7f", "\x7f")
    assert json.loads(as_json(space + python(value), PYTHON) or "") == value


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}[]\",:\\truefalsn0123.eE+- \nua'", max_size=12))
def test_exactly_the_json_of_a_parser_is_accepted(text: str) -> None:
    def parse() -> Any:
        return json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)

    try:
        expected = parse()
    except (ValueError, ZeroDivisionError):
        assert as_json(text, JSON) is None
    else:
        assert json.loads(as_json(text, JSON) or "") == expected
