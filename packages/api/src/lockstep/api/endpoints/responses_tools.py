"""Tools of /v1/responses: functions, namespaces of functions, free-form tools, and tools that the server would run.

    function                {"name", "parameters"}           as in chat completions
    namespace               {"name", "tools": [function]}    the model sees each function as NAMESPACE.NAME
    custom                  {"name", "format"}               the model sees a function with one text, `input`
    web_search, ...         run by OpenAI's servers          dropped and named, as the model may answer without them

Calls are returned under the client's names, as items of the kind of their tool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from lockstep.api.endpoints.chat_tools import Tools, check_tools, chosen
from lockstep.api.endpoints.errors import ApiError

OPTIONAL = ("web_search", "image_generation", "code_interpreter", "tool_search")
"""Kinds of tools that OpenAI's servers run and that a model may leave unused; a version may follow the name."""

INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Schema of the arguments of a free-form tool."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's name of a tool."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str = ""


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a response, and by the model's name of each the client's."""

    tools: Tools
    names: dict[str, ToolName] = field(default_factory=dict)


def is_optional(kind: Any) -> bool:
    """Return whether a tool is one that the server would run, and that the model may leave unused."""
    return isinstance(kind, str) and any(kind == one or kind.startswith(f"{one}_") for one in OPTIONAL)


def response_tools(
    given: Sequence[dict[str, Any]],
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool | None,
    ignore: Callable[[str], object],
) -> ResponseTools:
    """Read the tools of a response.

    Args:
        ignore: called with the name of each field that has no effect.
    Raises: ApiError for an invalid tool, a kind that is not served, or an impossible choice.
    """
    functions: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    for i, tool in enumerate(given):
        kind, where = tool.get("type"), f"tools.{i}"
        if kind == "function":
            _add(functions, names, tool, where)
        elif kind == "custom":
            _add_custom(functions, names, tool, where, ignore)
        elif kind == "namespace":
            _add_namespace(functions, names, tool, where)
        elif is_optional(kind):
            ignore(f"{where}.{kind}")
        else:
            known = "function, custom or namespace"
            raise ApiError(400, f"`{where}.type` must be {known}, got {str(kind)[:40]!r}", f"{where}.type")
    shown = [{"type": "function", "function": one} for one in functions]
    return ResponseTools(chosen(shown, _choice(choice, names), parallel=parallel), names)


def _add(
    functions: list[dict[str, Any]],
    names: dict[str, ToolName],
    tool: dict[str, Any],
    where: str,
    namespace: str = "",
) -> None:
    check_tools([tool], where, "parameters")
    name = f"{namespace}.{tool['name']}" if namespace else tool["name"]
    described = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    _put(functions, names, {**described, "name": name}, ToolName("function", tool["name"], namespace), where)


def _add_custom(
    functions: list[dict[str, Any]],
    names: dict[str, ToolName],
    tool: dict[str, Any],
    where: str,
    ignore: Callable[[str], object],
) -> None:
    check_tools([tool], where, "parameters")
    description, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        ignore(f"{where}.format")  # the grammar is part of the description, and constrains nothing
        description += f"\nThe input has this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    function = {"name": tool["name"], "description": description, "parameters": INPUT}
    _put(functions, names, function, ToolName("custom", tool["name"]), where)


def _add_namespace(
    functions: list[dict[str, Any]], names: dict[str, ToolName], tool: dict[str, Any], where: str
) -> None:
    check_tools([tool], where, "parameters")
    inside = tool.get("tools")
    if not isinstance(inside, list):
        raise ApiError(400, f"`{where}.tools` must be a list of functions", f"{where}.tools")
    for i, one in enumerate(inside):
        at = f"{where}.tools.{i}"
        if not isinstance(one, dict) or one.get("type") != "function":
            kind = one.get("type") if isinstance(one, dict) else one
            raise ApiError(400, f"`{at}.type` must be function, got {str(kind)[:40]!r}", f"{at}.type")
        _add(functions, names, one, at, tool["name"])


def _put(
    functions: list[dict[str, Any]],
    names: dict[str, ToolName],
    function: dict[str, Any],
    named: ToolName,
    where: str,
) -> None:
    name = function["name"]
    if name in names:
        raise ApiError(400, f"`{where}.name` is {name!r}, which is the name of another tool", f"{where}.name")
    names[name] = named
    functions.append(function)


def _choice(choice: str | dict[str, Any] | None, names: dict[str, ToolName]) -> str | dict[str, Any] | None:
    """Return a choice with the model's name of the tool. Raises ApiError for a choice of a tool that was dropped."""
    if not isinstance(choice, dict):
        return choice
    if is_optional(choice.get("type")):
        message = f"`tool_choice` is {choice['type']}, which this server does not run; leave it out"
        raise ApiError(400, message, "tool_choice")
    if choice.get("type") == "custom":
        return {"type": "function", "name": choice.get("name")}
    if namespace := choice.get("namespace"):
        return {**choice, "name": f"{namespace}.{choice.get('name')}"}
    return choice


def input_of(arguments: str) -> str:
    """Return the text of a free-form call from its arguments; text that is no object with `input` is returned whole."""
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    value = given.get("input") if isinstance(given, dict) else None
    return value if isinstance(value, str) else arguments


def arguments_of(text: str) -> str:
    """Return the arguments of a free-form call with this text."""
    return msgspec.json.encode({"input": text}).decode()
