"""What a conversation asks beside words: which tools there are, whether one must be called, whether thoughts are told.

tools, tool_choice, reasoning ──> Asked ──┬──> what the chat template is told
                                          └──> Reading ──AnswerParser per answer──> content, thoughts, calls
"""

from __future__ import annotations

import re
import secrets
import string
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.api.chat_formats.driver import Answer, AnswerParser
from lockstep.api.chat_formats.tables import PLAIN, REQUIRED, ChatFormats, Format, opening, with_thoughts
from lockstep.api.errors import ApiError
from lockstep.api.generation import Generation
from lockstep.api.schemas import TemplateOptions

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Tools:
    """Tools as a request has them, checked.

    Args:
        given: as chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}.
        choice: auto, none, required, or the name of the one that must be called.
        parallel: whether an answer may have more than one call.
    """

    given: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    named: bool = False
    parallel: bool = True

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """What the chat template is told: where no tool may be called, there is none."""
        return [dict(one) for one in self.given] if self.given and (self.named or self.choice != "none") else None

    @property
    def obliged(self) -> bool:
        """Whether the answer must be a call."""
        return self.named or self.choice == "required"

    def schemas(self) -> dict[str, Any]:
        """Of their arguments, by name."""
        return {one["function"]["name"]: one["function"].get("parameters") for one in self.given}


def tools_of(
    given: Sequence[Any], choice: str | Mapping[str, Any] | None, *, parallel: bool | None, where: str = "tools"
) -> Tools:
    """Tools of a chat completion. Raises ApiError for what is none, and for a choice that cannot be."""
    names: set[str] = set()
    for i, one in enumerate(given):
        if not isinstance(one, dict) or one.get("type") != "function":
            kind = one.get("type") if isinstance(one, dict) else one
            raise ApiError(400, f"`{where}.{i}.type` must be function, got {str(kind)[:40]!r}", f"{where}.{i}.type")
        function = one.get("function")
        if not isinstance(function, dict):
            raise ApiError(400, f"`{where}.{i}.function` must be an object", f"{where}.{i}.function")
        check_tool(function, f"{where}.{i}.function", "parameters", names)
    return chosen(list(given), choice, parallel=parallel)


def check_tool(tool: Mapping[str, Any], where: str, schema_field: str, names: set[str]) -> None:
    """Refuse a tool without a name that can be called, or whose arguments are no object. Adds the name."""
    name, schema = tool.get("name"), tool.get(schema_field)
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        message = f"`{where}.name` must be 1 to 128 letters, digits and any of _ . : -, got {str(name)[:40]!r}"
        raise ApiError(400, message, f"{where}.name")
    if name in names:
        raise ApiError(400, f"`{where}.name` is {name!r}, which another tool is called already", f"{where}.name")
    if schema is not None and not isinstance(schema, dict):
        raise ApiError(400, f"`{where}.{schema_field}` must be a JSON schema", f"{where}.{schema_field}")
    names.add(name)


def chosen(
    given: list[dict[str, Any]], choice: str | Mapping[str, Any] | None, *, parallel: bool | None = None
) -> Tools:
    """Tools with OpenAI's `tool_choice`: a word, or the name of one. Raises ApiError."""
    tools = Tools(given, parallel=parallel is not False)
    if choice is None:
        return tools
    names = tools.schemas()
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise ApiError(400, "`tool_choice` is required, but there are no `tools`", "tool_choice")
        return Tools(given, choice, parallel=tools.parallel)
    inside = choice.get("function")
    name = inside.get("name") if isinstance(inside, dict) else choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        message = '`tool_choice` must be none, auto, required, or {"type": "function", "function": {"name": ...}}'
        raise ApiError(400, message, "tool_choice")
    if name not in names:
        raise ApiError(400, f"`tool_choice` names {name[:60]!r}, which is none of `tools`", "tool_choice")
    return Tools(given, name, named=True, parallel=tools.parallel)


# ------------------------------------------------------------------------------------------------------------ templates

EFFORT = "reasoning_effort"


def template_options(options: TemplateOptions | None, effort: str | None, template: str | None) -> dict[str, Any]:
    """What a chat template is told beside messages and tools. Raises ApiError for what it does not look at."""
    asked: dict[str, tuple[str, Any]] = {}
    if options is not None:
        for name in options.model_extra or {}:
            known = ", ".join(TemplateOptions.model_fields)
            where = f"chat_template_kwargs.{name[:60]}"
            raise ApiError(400, f"`{where}` is none of those that are taken: {known}", where)
        for name in TemplateOptions.model_fields:
            if (value := getattr(options, name)) is not None:
                asked[name] = f"chat_template_kwargs.{name}", value
    if effort is not None:
        asked.setdefault(EFFORT, (EFFORT, effort))
    for name, (where, _) in asked.items():
        if re.search(rf"\b{name}\b", template or "") is None:
            raise ApiError(400, f"`{where}` changes nothing: the model's chat template does not read `{name}`", where)
    return {name: value for name, (_, value) in asked.items()}


# ----------------------------------------------------------------------------------------------------------- what comes


@dataclass
class Reading:
    """How the answers to one request are read.

    Args:
        form: the format; None for plain text, of which nothing is to be found out.
        thinks: whether thoughts are told apart.
    """

    form: Format | None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False
    calls_max: int | None = None
    id_prefix: str = "call_"
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)

    def parser(self, index: int) -> AnswerParser:
        """Of one answer, by its number."""
        parser = self._parsers.get(index)
        if parser is None:
            assert self.form is not None
            parser = self._parsers[index] = AnswerParser(
                self.form, tools=self.schemas, make_id=self._make_id, calls_max=self.calls_max
            )
        return parser

    def whole(self, index: int, text: str) -> Answer:
        """One answer, all of which came."""
        if self.form is None:
            return Answer(content=text, order=[text])
        parser = self.parser(index)
        return Answer.of(parser.feed(text) + parser.finish())

    def called(self, index: int) -> bool:
        """Whether an answer has a whole call."""
        return index in self._parsers and self._parsers[index].calls > 0

    def _make_id(self) -> str:
        if self.form is not None and self.form.id_characters:
            return "".join(secrets.choice(LETTERS) for _ in range(self.form.id_characters))
        return self.id_prefix + secrets.token_hex(12)

    def thought_tokens(self, generation: Generation) -> int:
        """How many tokens thoughts had so far, over all answers, tags and all."""
        return sum(
            bisect_left(choice.answer.starts, self._parsers[choice.index].thought_stop)
            for choice in generation.choices
            if choice.index in self._parsers
        )


def reading_of(
    formats: ChatFormats,
    tools: Tools,
    prompt: str | None,
    *,
    separate: bool = True,
    going_on: bool = False,
    id_prefix: str = "call_",
) -> Reading:
    """How answers to a prompt are read.

    Args:
        separate: whether thoughts are to be told apart.
        going_on: the answer goes on with a message that was begun, and whose thoughts are over unless they are open.
    """
    form = PLAIN
    if tools.obliged:
        form = REQUIRED
    elif tools.shown and formats.tools is not None:
        form = formats.tools
    plain, thinks = form is PLAIN, False
    if separate and formats.thoughts is not None and not tools.obliged:
        how = opening(formats.thoughts, prompt or "", going_on=going_on)
        form, thinks = with_thoughts(form, formats.thoughts, how), True
        plain = plain and how == "closed"
    alone = tools.named or not tools.parallel
    return Reading(
        None if plain else form,
        tools.schemas(),
        thinks,
        calls_max=1 if alone else None,
        id_prefix=id_prefix,
    )
