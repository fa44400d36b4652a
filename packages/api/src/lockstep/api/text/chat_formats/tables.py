"""Formats of tool calls and thoughts: one table of states per format, which `driver.py` interprets.

    HERMES       content ──"<tool_call>"──> call ──(the object ends)──> close ──"</tool_call>"──> content

A state defines the meaning of its text (`kind`) and the texts at which it ends (`rules`). Text that no rule allows is
not a call: the part of it that was taken becomes content. A new format is a new table, its name in TOOL_FORMATS, and a
line in SIGNS if chat templates identify it.

Sources: the chat templates of the published models; for Llama 3.1 Meta's description of its prompt format, for Mistral
the documentation of its tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

Kind = Literal["content", "thought", "space", "name", "skip", "key", "value", "literal", "arguments", "call"]
"""The meaning of a state's text.

    content    text for the user                  name       of the function
    thought    the model's thoughts               key        name of an argument
    space      white space, then a rule           value      of an argument: plain text, in the type of its schema
    skip       ignored                            literal    of an argument: a Python literal
    call       an object with name and arguments  arguments  an object with the arguments
"""

MarkerAction = Literal["", "open", "argument", "end"]
"""The action of a rule, besides the change of state.

    open       a call may begin here: the following text is withheld until that is certain
    argument   the name of an argument ended, its value follows
    end        the last argument ended, and the call with it
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A text that leads to another state.

    Args:
        takes: whether the text belongs to the format; otherwise the next state reads it.
    """

    text: str
    to: str
    does: MarkerAction = ""
    takes: bool = True


@dataclass(frozen=True)
class State:
    """One state of a format.

    Args:
        then: next state after a value that ends by itself.
        other: for "space": next state for text that matches no rule; "" if a rule must match.
        trims: which white space belongs to the format. For "space": that before `other`; for "thought": that at both
            ends; for "value": one line end at each end.
    """

    kind: Kind
    rules: tuple[Rule, ...] = ()
    then: str = ""
    other: str = ""
    trims: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """Pattern of the texts of all rules; None without rules."""
        if not self.rules:
            return None
        longest_first = sorted((rule.text for rule in self.rules), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def by_text(self) -> Mapping[str, Rule]:
        return {rule.text: rule for rule in self.rules}

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """Proper prefixes of the texts of the rules."""
        return frozenset(rule.text[:stop] for rule in self.rules for stop in range(1, len(rule.text)))

    @cached_property
    def longest(self) -> int:
        """Length of the longest beginning, in characters."""
        return max(map(len, self.beginnings), default=0)


@dataclass(frozen=True)
class Format:
    """States by name. The state "content" always exists; after text that is not a call, it is entered.

    Args:
        start: state at the beginning of an answer.
        argument_names: names that the member with the arguments of a call may have.
        marked: calls are enclosed in texts that occur nowhere else. Otherwise only an object with the name of one of
            the request's tools and with arguments is a call.
        id_characters: length of the call ids (letters and digits) that the model's template accepts; 0: any length.
    """

    states: Mapping[str, State]
    start: str = "content"
    argument_names: tuple[str, ...] = ("arguments", "parameters")
    marked: bool = True
    id_characters: int = 0

    def texts(self) -> frozenset[str]:
        """Return the texts of all rules. Tokens with these texts must be decoded even if they are special tokens."""
        return frozenset(rule.text for state in self.states.values() for rule in state.rules)


PLAIN = Format({"content": State("content")})
"""The format without calls."""

HERMES = Format(
    {
        "content": State("content", (Rule("<tool_call>", "call", "open"),)),
        "call": State("call", then="close"),
        "close": State("space", (Rule("</tool_call>", "content"),)),
    }
)
"""`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`: Hermes 2 and 3, Qwen 2.5, Qwen 3."""

LLAMA3 = Format(
    {
        "start": State(
            "space",
            (Rule("<|python_tag|>", "call", "open"), Rule("{", "call", "open", takes=False)),
            other="content",
        ),
        "call": State("call", then="more"),
        "more": State(
            "space",
            (Rule(";", "call", "open"), Rule("<|python_tag|>", "call", "open")),
            other="content",
        ),
        "content": State("content", (Rule("<|python_tag|>", "call", "open"),)),
    },
    start="start",
    marked=False,
)
"""`{"name": "f", "parameters": {...}}; {...}`, the whole answer, optionally after <|python_tag|>: Llama 3.1 to 3.3."""

MISTRAL = Format(
    {
        "content": State("content", (Rule("[TOOL_CALLS]", "calls", "open"),)),
        "calls": State("space", (Rule("[", "call"),), other="name"),
        "call": State("call", then="more"),
        "more": State("space", (Rule(",", "call", "open"), Rule("]", "content"))),
        "name": State(
            "name",
            (Rule("[ARGS]", "arguments"), Rule("[CALL_ID]", "id"), Rule("{", "arguments", takes=False)),
        ),
        "id": State("skip", (Rule("[ARGS]", "arguments"),)),
        "arguments": State("arguments", then="content"),
    },
    id_characters=9,
)
"""`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, and since version 11 of the tokenizer
`[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`, once for each call."""

PYTHONIC = Format(
    {
        "start": State("space", (Rule("<|python_start|>", "list", "open"), Rule("[", "name", "open")), other="content"),
        "list": State("space", (Rule("[", "name"),)),
        "name": State("name", (Rule("(", "key"),)),
        "key": State("key", (Rule("=", "value", "argument"), Rule(")", "more", "end"))),
        "value": State("literal", then="next"),
        "next": State("space", (Rule(",", "key"), Rule(")", "more", "end"))),
        "more": State("space", (Rule(",", "name", "open"), Rule("]", "after"))),
        "after": State("space", (Rule("<|python_end|>", "content"),), other="content"),
        "content": State("content", (Rule("<|python_start|>", "list", "open"),)),
    },
    start="start",
    marked=False,
)
"""`[f(city="Paris", days=3), g()]`, the whole answer: Llama 3.2 and 4, ToolACE."""

QWEN3_CODER = Format(
    {
        "content": State("content", (Rule("<tool_call>", "call", "open"), Rule("<function=", "name", "open"))),
        "call": State("space", (Rule("<function=", "name"),)),
        "name": State("name", (Rule(">", "arguments"),)),
        "arguments": State("space", (Rule("<parameter=", "key"), Rule("</function>", "close", "end"))),
        "key": State("key", (Rule(">", "value", "argument"),)),
        "value": State("value", (Rule("</parameter>", "arguments"),), trims=True),
        "close": State("space", (Rule("</tool_call>", "content"),), other="content"),
    }
)
"""`<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>`: Qwen 3 Coder."""

GLM = Format(
    {
        "content": State("content", (Rule("<tool_call>", "name", "open"),)),
        "name": State("name", (Rule("<arg_key>", "key"), Rule("</tool_call>", "content", "end"))),
        "key": State("key", (Rule("</arg_key>", "between"),)),
        "between": State("space", (Rule("<arg_value>", "value", "argument"),)),
        "value": State("value", (Rule("</arg_value>", "next"),)),
        "next": State("space", (Rule("<arg_key>", "key"), Rule("</tool_call>", "content", "end"))),
    }
)
"""`<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>`: GLM 4.5."""

_CALL, _CALLS = "<｜tool▁call▁{}｜>", "<｜tool▁calls▁{}｜>"  # noqa: RUF001 - these models use full-width bars
_SEP = "<｜tool▁sep｜>"  # noqa: RUF001

DEEPSEEK = Format(
    {
        "content": State("content", (Rule(_CALLS.format("begin"), "calls", "open"),)),
        "calls": State("space", (Rule(_CALL.format("begin"), "kind"),)),
        "kind": State("name", (Rule(_SEP, "behind kind"),)),
        "behind kind": State("space", (Rule("{", "arguments", takes=False),), other="name"),
        "name": State("name", (Rule("```json", "arguments"),)),
        "arguments": State("arguments", then="behind"),
        "behind": State("space", (Rule("```", "close"), Rule(_CALL.format("end"), "next"))),
        "close": State("space", (Rule(_CALL.format("end"), "next"),)),
        "next": State("space", (Rule(_CALL.format("begin"), "kind", "open"), Rule(_CALLS.format("end"), "content"))),
    }
)
"""DeepSeek V3.1: `f<｜tool▁sep｜>{...}` between begin and end of each call, and of all of them together. V3 and R1 have
the word `function` in place of f, the name after <｜tool▁sep｜>, and the object in a code fence.
"""  # noqa: RUF001

REQUIRED = Format(
    {
        "start": State("space", (Rule("[", "call", "open"),), other="content"),
        "call": State("call", then="more"),
        "more": State("space", (Rule(",", "call", "open"), Rule("]", "content"))),
        "content": State("content"),
    },
    start="start",
)
"""`[{"name": "f", "parameters": {...}}, ...]`: enforced by a grammar on any model, for `tool_choice` required."""

TOOL_FORMATS: Mapping[str, Format] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM,
    "deepseek_v3": DEEPSEEK,
}

SIGNS = (
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    (_CALLS.format("begin"), "deepseek_v3"),
    ("<tool_call>", "hermes"),
    ("func_name1(params_name1=", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
"""Texts in chat templates -> the format that such a template prescribes; the first match applies."""


# ------------------------------------------------------------------------------------------------------------- thoughts


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The texts around the thoughts of a model.

    Args:
        begun: answers begin within the thoughts, without `begin`, regardless of the end of the prompt.
    """

    begin: str
    end: str
    begun: bool = False


THINK = Thoughts("<think>", "</think>")
THOUGHTS: Mapping[str, Thoughts] = {
    "qwen3": THINK,
    "glm45": THINK,
    "deepseek_r1": replace(THINK, begun=True),
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "seed_oss": Thoughts("<seed:think>", "</seed:think>"),
    "kimi_vl": Thoughts("◁think▷", "◁/think▷"),
    "granite": Thoughts("Here is my thought process:", "Here is my response:"),
}


@dataclass(frozen=True)
class ChatFormats:
    """The formats of tool calls and thoughts of the served model; None: there is none, or it is unknown."""

    tools: Format | None = None
    thoughts: Thoughts | None = None

    def names(self) -> tuple[str, str]:
        """Return the names of both formats; "none" for None."""
        tools = next((name for name, one in TOOL_FORMATS.items() if one is self.tools), "none")
        return tools, next((name for name, one in THOUGHTS.items() if one == self.thoughts), "none")

    def texts(self) -> frozenset[str]:
        """Return the texts that must be decoded even if a tokenizer marks them special."""
        tools = frozenset[str]() if self.tools is None else self.tools.texts()
        return tools if self.thoughts is None else tools | {self.thoughts.begin, self.thoughts.end}


def choose(tools: str, thoughts: str, template: str | None) -> ChatFormats:
    """Return the formats of these names; "auto": by the chat template, "none": no format. Raises KeyError."""
    template = template or ""
    return ChatFormats(
        find_tools(template) if tools == "auto" else None if tools == "none" else TOOL_FORMATS[tools],
        find_thoughts(template) if thoughts == "auto" else None if thoughts == "none" else THOUGHTS[thoughts],
    )


def find_tools(template: str) -> Format | None:
    """Return the format that a chat template prescribes; None if it contains no sign of one."""
    return next((TOOL_FORMATS[name] for sign, name in SIGNS if sign in template), None)


def find_thoughts(template: str) -> Thoughts | None:
    """Return the texts around thoughts that occur in a chat template; None if there are none."""
    for thoughts in THOUGHTS.values():
        if thoughts.end in template:
            return thoughts if thoughts.begin in template else replace(thoughts, begun=True)
    return None


Opening = Literal["neither", "open", "closed"]


def opening(thoughts: Thoughts, prompt: str, *, continues: bool = False) -> Opening:
    """Return how a prompt leaves the thoughts of its answer: open, closed, or neither.

    Args:
        continues: the answer continues an incomplete message of the model.
    """
    if continues:
        return "open" if prompt.rfind(thoughts.begin) > prompt.rfind(thoughts.end) else "closed"
    written = prompt.rstrip()
    if written.endswith(thoughts.begin):
        return "open"
    return "closed" if written.endswith(thoughts.end) else "neither"


@cache
def _thinking(begin: str, end: str, goes_on: str) -> Mapping[str, State]:
    return {
        "before thoughts": State("space", (Rule(begin, "thoughts"),), other=goes_on),
        "in thoughts": State("space", (Rule(begin, "thoughts"),), other="thoughts"),
        "thoughts": State("thought", (Rule(end, "behind thoughts"),), trims=True),
        "behind thoughts": State("space", other=goes_on, trims=True),
    }


def with_thoughts(format: Format, thoughts: Thoughts, how: Opening) -> Format:  # noqa: A002 - the noun of this module
    """Return a format of answers that begin with thoughts, or within them."""
    if how == "closed":
        return format
    states = {**format.states, **_thinking(thoughts.begin, thoughts.end, format.start)}
    begun = how == "open" or thoughts.begun
    return replace(format, states=states, start="in thoughts" if begun else "before thoughts")
