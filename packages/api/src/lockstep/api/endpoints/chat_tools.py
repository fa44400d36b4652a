"""Tools and thoughts of a conversation: the tools, the choice of a tool, and the parsing of answers.

tools, tool_choice, reasoning ──> Tools ──┬──> variables of the chat template
                                          └──> Reading ──AnswerParser per answer──> content, thoughts, calls
"""

from __future__ import annotations

import re
import string
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.api.endpoints.answer_run import new_hex
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import Choice, Generation
from lockstep.api.endpoints.schemas import TemplateOptions
from lockstep.api.endpoints.structured_output import READERS
from lockstep.api.settings import Limits
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
from lockstep.api.text.chat_formats.tables import PLAIN, REQUIRED, ChatFormats, Format, opening, with_thoughts
from lockstep.core.contract.events import Grammar

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Tools:
    """The tools of a request, checked.

    Args:
        given: in the form of chat templates: {"type": "function", "function": {"name", "description", "parameters"}}.
        choice: auto, none, required, or the name of the tool that must be called.
        named: whether `choice` is the name of a tool.
        parallel: whether an answer may have more than one call.
    """

    given: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    named: bool = False
    parallel: bool = True

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if no tool may be called."""
        return [dict(one) for one in self.given] if self.given and (self.named or self.choice != "none") else None

    @property
    def obliged(self) -> bool:
        """Whether the answer must be a call."""
        return self.named or self.choice == "required"

    def schemas(self) -> dict[str, Any]:
        """Return the schemas of the arguments, by name of the tool."""
        return {one["function"]["name"]: one["function"].get("parameters") for one in self.given}

    def grammar(self, limits: Limits) -> dict[str, Any]:
        """Return the grammar of an answer that must be a call, as fields of `GenerationRequest`; else an empty dict.

        Raises: ApiError for schemas beyond the limits.
        """
        if not self.obliged:
            return {}
        schema = required_calls(
            {name: one for name, one in self.schemas().items() if not self.named or name == self.choice},
            alone=self.named or not self.parallel,
        )
        return {"grammar": READERS["json_schema"](schema, "tool_choice", limits), "grammar_field": "tool_choice"}


def required_calls(schemas: Mapping[str, Any], *, alone: bool) -> dict[str, Any]:
    """Return the schema of an answer that consists of calls, for the format REQUIRED: [{"name", "parameters"}, ...].

    A schema with references becomes a definition of its own, and its references are resolved within it.
    """
    definitions: dict[str, Any] = {}
    ways = []
    for number, (name, given) in enumerate(schemas.items()):
        schema: dict[str, Any] = NO_ARGUMENTS if given is None else {"type": "object", **given}
        if _refers(schema):
            place = f"tool{number}"
            definitions[place] = _moved(schema, f"#/$defs/{place}")
            schema = {"$ref": f"#/$defs/{place}"}
        ways.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": ways} if len(ways) > 1 else ways[0]}
    return calls | ({"maxItems": 1} if alone else {}) | ({"$defs": definitions} if definitions else {})


NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _refers(schema: Any) -> bool:
    """Return whether a schema contains a reference at any depth."""
    level = [schema]
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if isinstance(one.get("$ref"), str):
                    return True
                below += one.values()
            elif isinstance(one, list):
                below += one
        level = below
    return False


def _moved(schema: Any, place: str, depth: int = 64) -> Any:
    """Return a schema with references into itself moved to `place`. Raises ApiError if it is nested too deeply."""
    if not depth:
        raise ApiError(400, "`tools` have a schema that is nested more than 64 levels deep", "tools")
    if isinstance(schema, list):
        return [_moved(one, place, depth - 1) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one, place, depth - 1) for name, one in schema.items()}
    of = schema.get("$ref")
    if isinstance(of, str) and of.startswith("#"):
        moved["$ref"] = place + of[1:]
    return moved


def tools_of(
    given: Sequence[Any], choice: str | Mapping[str, Any] | None, *, parallel: bool | None, where: str = "tools"
) -> Tools:
    """Read the tools of a chat completion. Raises ApiError for an invalid tool or an impossible choice."""
    functions = []
    for i, one in enumerate(given):
        if not isinstance(one, dict) or one.get("type") != "function":
            kind = one.get("type") if isinstance(one, dict) else one
            raise ApiError(400, f"`{where}.{i}.type` must be function, got {str(kind)[:40]!r}", f"{where}.{i}.type")
        if not isinstance(one.get("function"), dict):
            raise ApiError(400, f"`{where}.{i}.function` must be an object", f"{where}.{i}.function")
        functions.append(one["function"])
    check_tools(functions, where + ".{}.function", "parameters")
    return chosen(list(given), choice, parallel=parallel)


def check_tools(tools: Sequence[Mapping[str, Any]], place: str, schema_field: str) -> None:
    """Check names and schemas of tools. Raises ApiError.

    Args:
        place: path of a tool in the client's body, with {} for its number.
    """
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where, name, schema = place.format(i), tool.get("name"), tool.get(schema_field)
        if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
            message = f"`{where}.name` must be 1 to 128 letters, digits and any of _ . : -, got {str(name)[:40]!r}"
            raise ApiError(400, message, f"{where}.name")
        if name in names:
            raise ApiError(400, f"`{where}.name` is {name!r}, which is the name of another tool", f"{where}.name")
        if schema is not None and not isinstance(schema, dict):
            raise ApiError(400, f"`{where}.{schema_field}` must be a JSON schema", f"{where}.{schema_field}")
        names.add(name)


def chosen(
    given: list[dict[str, Any]], choice: str | Mapping[str, Any] | None, *, parallel: bool | None = None
) -> Tools:
    """Combine tools with OpenAI's `tool_choice`: a keyword, or the name of a tool. Raises ApiError."""
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
        raise ApiError(400, f"`tool_choice` names {name[:60]!r}, which is not one of `tools`", "tool_choice")
    return Tools(given, name, named=True, parallel=tools.parallel)


# ------------------------------------------------------------------------------------------------------------ templates

EFFORT = "reasoning_effort"


def reads(template: str, name: str) -> bool:
    """Return whether a chat template contains a name as a word."""
    return re.search(rf"\b{name}\b", template) is not None


def template_options(
    options: TemplateOptions | None,
    effort: str | None,
    template: str | None,
    ignore: Callable[[str], object],
    effort_field: str = EFFORT,
) -> dict[str, Any]:
    """Return the variables for a chat template besides messages and tools.

    Args:
        ignore: called with the field of each variable that the template does not read, which has no effect.
    Raises: ApiError for a variable that no template may receive.
    """
    requested: dict[str, tuple[str, Any]] = {}
    if options is not None:
        for name in options.model_extra or {}:
            known = ", ".join(TemplateOptions.model_fields)
            where = f"chat_template_kwargs.{name[:60]}"
            raise ApiError(400, f"`{where}` is not supported; supported are {known}", where)
        for name in TemplateOptions.model_fields:
            if (value := getattr(options, name)) is not None:
                requested[name] = f"chat_template_kwargs.{name}", value
    if effort is not None:
        requested.setdefault(EFFORT, (effort_field, effort))
    unread = [name for name in requested if not reads(template or "", name)]
    for name in unread:
        ignore(requested[name][0])
    return {name: value for name, (_, value) in requested.items() if name not in unread}


# ------------------------------------------------------------------------------------------------------- parsed answers


@dataclass
class Reading:
    """The parsing of all answers to one request.

    Args:
        form: the format; None for plain text, which is not parsed.
        schemas: schemas of the arguments, by name of the tool.
        thinks: whether thoughts are split off.
        calls_max: number of calls in an answer; further calls are dropped. None: no limit.
    """

    form: Format | None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False
    calls_max: int | None = None
    id_prefix: str = "call_"
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)

    def parser(self, index: int) -> AnswerParser:
        """Return the parser of an answer, by the number of the answer; made on first use."""
        parser = self._parsers.get(index)
        if parser is None:
            assert self.form is not None
            parser = self._parsers[index] = AnswerParser(
                self.form, tools=self.schemas, make_id=self._make_id, calls_max=self.calls_max
            )
        return parser

    def whole(self, index: int, text: str) -> ParsedAnswer:
        """Parse one complete answer."""
        if self.form is None:
            return ParsedAnswer(content=text, order=[text])
        parser = self.parser(index)
        return ParsedAnswer.of(parser.feed(text) + parser.finish())

    def called(self, index: int) -> bool:
        """Return whether an answer has a complete call."""
        return index in self._parsers and self._parsers[index].calls > 0

    def _make_id(self) -> str:
        if self.form is not None and self.form.id_characters:
            drawn = bytes.fromhex(new_hex(self.form.id_characters))
            return "".join(LETTERS[one % len(LETTERS)] for one in drawn)
        return self.id_prefix + new_hex(12)

    def first_content_token(self, choice: Choice) -> int:
        """Return the number of the first token behind the thoughts of an answer."""
        parser = self._parsers.get(choice.index)
        return 0 if parser is None else bisect_left(choice.answer.starts, parser.thought_stop)

    def thought_tokens(self, generation: Generation) -> int:
        """Return the number of tokens of thoughts so far, over all answers, tags included."""
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
    continues: bool = False,
    grammar: Grammar | None = None,
    id_prefix: str = "call_",
) -> Reading:
    """Return the parsing of the answers to a prompt.

    Args:
        separate: whether thoughts are split off.
        grammar: grammar of the answer from its first token on. Most kinds exclude thoughts.
        continues: the answer continues a message; its thoughts have ended unless they are open.
    """
    form = PLAIN
    if tools.obliged:
        form = REQUIRED
    elif tools.shown and formats.tools is not None:
        form = formats.tools
    plain, thinks = form is PLAIN, False
    free = grammar is None or grammar.kind in ("structural_tag", "bad_words")
    if separate and free and formats.thoughts is not None:
        how = opening(formats.thoughts, prompt or "", continues=continues)
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


# --------------------------------------------------------------------------------------- an answer as a list of blocks


@dataclass(slots=True)
class Block:
    """A part of an answer: thoughts, text, or a call, with its arguments as the text.

    Args:
        number: position in the answer.
        whole: whether a call is complete; always true for other kinds.
    """

    kind: Literal["thought", "content", "call"]
    number: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    whole: bool = True
    id: str = ""  # set by endpoints that have block ids


Step = tuple[Literal["open", "more", "close"], Block, str]


class Blocks:
    """Builds the blocks of an answer piece by piece.

    Args:
        first: open a text block at once, for answers that cannot begin with another kind.
    """

    def __init__(self, reading: Reading, *, first: bool = False) -> None:
        self._reading = reading
        self.all: list[Block] = []
        self._open: Block | None = None
        self._parts: list[str] = []
        self._first = first

    def begin(self) -> list[Step]:
        """Return the steps before any text."""
        return self._to("content") if self._first else []

    def take(self, text: str, *, over: bool) -> list[Step]:
        """Parse the next piece of the answer. At the end (`over`) there is at least one block, and none is open."""
        if self._reading.form is None:
            events: list[Event] = [ContentDelta(text)] if text else []
        else:
            parser = self._reading.parser(0)
            events = parser.feed(text) + (parser.finish() if over else [])
        steps: list[Step] = []
        for event in events:
            steps += self._take(event)
        if over:
            steps += self._to("content") if not self.all else []
            steps += self._close()
        return steps

    def _take(self, event: Event) -> list[Step]:
        match event:
            case Thought():
                return [*self._to("thought"), self._more(event.text)]
            case ContentDelta():
                return [*self._to("content"), self._more(event.text)]
            case CallBegan():
                return [*self._close(), self._begin(Block("call", len(self.all), "", event.call_id, event.name))]
            case CallArguments():
                return [self._more(event.text)]
            case CallEnded():
                return self._close()
            case CallBroken():
                assert self._open is not None
                self._open.whole = False
                steps = self._close()
                return [*steps, *self._to("content"), self._more(event.rest)] if event.rest else steps

    def _to(self, kind: Literal["thought", "content"]) -> list[Step]:
        """Return the steps after which a block of this kind is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        return [*self._close(), self._begin(Block(kind, len(self.all)))]

    def _begin(self, block: Block) -> Step:
        self.all.append(block)
        self._open = block
        return "open", block, ""

    def _more(self, text: str) -> Step:
        assert self._open is not None
        self._parts.append(text)
        return "more", self._open, text

    def _close(self) -> list[Step]:
        block, self._open = self._open, None
        if block is None:
            return []
        block.text = "".join(self._parts)
        self._parts = []
        return [("close", block, "")]


def blocks_of(answer: ParsedAnswer) -> list[Block]:
    """Return the blocks of a complete answer, at least one."""
    blocks = [Block("thought", 0, answer.thought)] if answer.thought else []
    for one in answer.order or ([] if blocks else [""]):
        number = len(blocks)
        if isinstance(one, str):
            blocks.append(Block("content", number, one))
        else:
            blocks.append(Block("call", number, one.arguments, one.call_id, one.name))
    return blocks
