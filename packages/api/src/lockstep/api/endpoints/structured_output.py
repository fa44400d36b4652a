"""Conversion of fields of a request to the grammar of its answer. Pure functions; nothing is compiled here.

    response_format, structured_outputs, guided_*, json_schema, regex, ebnf, structural_tag, text.format
        ──requested_grammar──> OutputConstraint(field, grammar) ──> GenerationRequest.grammar
        ──> RequestArrived.grammar ──> the engine compiles

Other code that constrains the answer, for example to a call of a named tool, makes a grammar with `json_schema`,
`regex`, `choice`, `ebnf` or `structural_tag` and sets `GenerationRequest.grammar`. Size and depth are checked here,
before the request is sent. The engine compiles the grammar in a process that can be killed, and reports whether it
compiles: `lockstep.host.grammar_compiler`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.schemas import empty
from lockstep.api.settings import Limits
from lockstep.core.contract.events import Grammar
from lockstep.host.grammars import make_grammar

ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`."""

SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """The grammar of an answer, and the field that requested it."""

    field: str
    grammar: Grammar


# ------------------------------------------------------------------------------------------------- grammars, one by one


def json_schema(schema: dict[str, Any] | bool) -> Grammar:
    """Return the grammar of JSON that validates against a schema. Properties have the order of the schema."""
    return make_grammar("json_schema", _json({} if schema is True else schema))


def json_object() -> Grammar:
    """Return the grammar of any JSON object."""
    return json_schema(ANY_OBJECT)


def regex(pattern: str) -> Grammar:
    """Return the grammar of text that a regular expression matches as a whole."""
    return make_grammar("regex", pattern)


def choice(texts: list[str]) -> Grammar:
    """Return the grammar of one of these texts."""
    return regex("|".join(SPECIAL.sub(r"\\\g<0>", text) for text in texts))


def ebnf(source: str) -> Grammar:
    """Return the grammar of a source text: GBNF, as in llama.cpp and xgrammar, or Lark, as in llguidance."""
    return make_grammar("ebnf", source)


def structural_tag(tag: dict[str, Any]) -> Grammar:
    """Return the grammar of free text with parts that match a schema, each started by a trigger.

    Args:
        tag: {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}, and, beyond other servers,
            "at_least_one": the answer has at least one such part; "stop_after_first": it ends after the first part.
    """
    return make_grammar("structural_tag", _json({name: value for name, value in tag.items() if name != "type"}))


def bad_words(words: Sequence[str], limits: Limits, encode: Callable[[str], Sequence[int]]) -> OutputConstraint | None:
    """Return the constraint that forbids these texts; None without texts. Raises ApiError.

    A word is forbidden as the tokens that it has at the start of a text and, where these differ in the first token
    only, as those that it has after a space. A word in other tokens, as a part of a longer one, is not found.

    Args:
        encode: tokenises a text, without special tokens.
    Source: vLLM's `SamplingParams.bad_words`.
    """
    if not words:
        return None
    if len(words) > limits.bad_words_max:
        raise ApiError(
            400, f"`bad_words` has {len(words)} texts, at most {limits.bad_words_max} are allowed", "bad_words"
        )
    sequences: list[list[int]] = []
    for word in words:
        if not word.strip():
            raise ApiError(400, "`bad_words` has an empty text; leave it out", "bad_words")
        if len(word) > limits.stop_characters_max:
            message = f"`bad_words` has a text of {len(word)} characters, at most {limits.stop_characters_max}"
            raise ApiError(400, f"{message} are allowed", "bad_words")
        plain, spaced = (list(map(int, encode(before + word.lstrip()))) for before in ("", " "))
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return OutputConstraint("bad_words", make_grammar("bad_words", _json(sequences)))


# ---------------------------------------------------------------------------------------------- the fields of a request


# mechanism: bad-words (executed)
def requested_grammar(fields: Mapping[str, Any], limits: Limits, *, inside: str = "") -> OutputConstraint | None:
    """Return the grammar that the fields of a request define; None for free text.

    Args:
        fields: values by name; names in READERS are read. Null, false, empty texts and objects count as absent.
        inside: prefix of the names of fields in errors.
    Raises: ApiError for an invalid field, for two fields that are set, and for values beyond the limits.
    """
    found: list[OutputConstraint] = []
    for name, reader in READERS.items():
        value = fields.get(name)
        where = f"{inside}{name}"
        if value == []:
            raise ApiError(400, f"`{where}` is empty, so no answer is allowed; leave it out", where)
        if empty(value):
            continue
        grammar = reader(value, where, limits)
        if grammar is not None:
            found.append(OutputConstraint(where, grammar))
    if len(found) > 1:
        message = f"`{found[0].field}` and `{found[1].field}` both constrain the answer; give one of them"
        raise ApiError(400, message, found[1].field)
    return found[0] if found else None


def _response_format(value: Any, where: str, limits: Limits) -> Grammar | None:
    """Read OpenAI's `response_format`, such as {"type": "json_schema", "json_schema": {"schema": ...}}."""
    given = _object(value, where)
    kind = given.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return json_object()
        case "json_schema":
            described = _object(given.get("json_schema"), f"{where}.json_schema")
            return _schema(described.get("schema"), f"{where}.json_schema.schema", limits)
        case "structural_tag":
            return _structural_tag(given, where, limits)
        case _:
            known = "text, json_object, json_schema or structural_tag"
            raise ApiError(400, f"`{where}.type` must be {known}, got {_short(kind)}", f"{where}.type")


def _text_format(value: Any, where: str, limits: Limits) -> Grammar | None:
    """Read `format` of a response's `text`: `response_format` with the schema one level up."""
    given = _object(value, where)
    if given.get("type") == "json_schema":
        return _schema(given.get("schema"), f"{where}.schema", limits)
    return _response_format(given, where, limits)


def _structured_outputs(value: Any, where: str, limits: Limits) -> Grammar | None:
    """Read vLLM's field: {"json" | "regex" | "choice" | "grammar" | "json_object" | "structural_tag": ...}."""
    given = {name: one for name, one in _object(value, where).items() if one not in (None, False)}
    readers = {
        "json": _schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _ebnf,
        "json_object": _json_object,
        "structural_tag": _structural_tag,
    }
    for name in given:
        if name not in readers:
            message = f"`{where}.{name[:60]}` is not supported by this server; supported are {', '.join(readers)}"
            raise ApiError(400, message, f"{where}.{name[:60]}")
    if len(given) != 1:
        raise ApiError(400, f"`{where}` must have one of {', '.join(readers)}, got {len(given)}", where)
    ((name, one),) = given.items()
    return readers[name](one, f"{where}.{name}", limits)


def _json_object(value: Any, where: str, limits: Limits) -> Grammar:
    if value is not True:
        raise ApiError(400, f"`{where}` must be true or false, got {_short(value)}", where)
    return json_object()


def _schema(value: Any, where: str, limits: Limits) -> Grammar:
    """Read a schema, as an object or as its text."""
    if isinstance(value, str):
        value = _decoded(value, where, limits)
    if value is not True and not isinstance(value, dict):
        raise ApiError(400, f"`{where}` must be a JSON schema, an object, got {_short(value)}", where)
    _check_depth(value, where, limits)
    return _bounded(json_schema(value), where, limits)


def _regex(value: Any, where: str, limits: Limits) -> Grammar:
    return _bounded(regex(_text(value, where)), where, limits)


def _ebnf(value: Any, where: str, limits: Limits) -> Grammar:
    return _bounded(ebnf(_text(value, where)), where, limits)


def _choice(value: Any, where: str, limits: Limits) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ApiError(400, f"`{where}` must be a list of texts, none of them empty, got {_short(value)}", where)
    return _bounded(choice(value), where, limits)


def _structural_tag(value: Any, where: str, limits: Limits) -> Grammar:
    """Read {"structures": [...], "triggers": [...]}, as an object or as its text."""
    if isinstance(value, str):
        value = _decoded(value, where, limits)
    given = _object(value, where)
    for name in given:
        if name not in ("type", "structures", "triggers", "at_least_one", "stop_after_first"):
            message = f"`{where}.{name[:60]}` is not supported by this server; supported are structures and triggers"
            raise ApiError(400, message, f"{where}.{name[:60]}")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise ApiError(400, f"`{where}.structures` must be a list of objects", f"{where}.structures")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
        message = f"`{where}.triggers` must be a list of texts, none of them empty"
        raise ApiError(400, message, f"{where}.triggers")
    for name in ("at_least_one", "stop_after_first"):
        if not isinstance(given.get(name, False), bool):
            raise ApiError(400, f"`{where}.{name}` must be true or false", f"{where}.{name}")
    for i, one in enumerate(structures):
        at = f"{where}.structures.{i}"
        begin, end = _object(one, at).get("begin"), one.get("end")
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(one.get("schema", {}), dict):
            raise ApiError(400, f"`{at}` must have the texts `begin` and `end` and an object `schema`", at)
        if not any(begin.startswith(trigger) for trigger in triggers):
            message = f"`{at}.begin` is {_short(begin)}, which must begin with one of `triggers`"
            raise ApiError(400, message, f"{at}.begin")
    _check_depth(given, where, limits)
    return _bounded(structural_tag(given), where, limits)


READERS: dict[str, Callable[[Any, str, Limits], Grammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
    "format": _text_format,
}
"""Field -> function that makes its grammar. Fields of OpenAI, vLLM (old and new), SGLang, and `text.format`."""


# -------------------------------------------------------------------------------------------------------------- helpers


def _bounded(grammar: Grammar, where: str, limits: Limits) -> Grammar:
    size = len(grammar.source.encode("utf-8", "surrogatepass"))
    if size > limits.grammar_bytes_max:
        message = f"`{where}` has {size} bytes, at most {limits.grammar_bytes_max} are allowed (grammar_bytes_max)"
        raise ApiError(400, message, where)
    return grammar


def _check_depth(value: Any, where: str, limits: Limits) -> None:
    """Check the depth of a value against the limit. Raises ApiError."""
    level: list[Any] = [value]
    for _ in range(limits.grammar_depth_max):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    message = f"`{where}` is nested more than {limits.grammar_depth_max} levels deep (grammar_depth_max)"
    raise ApiError(400, message, where)


def _decoded(text: str, where: str, limits: Limits) -> Any:
    if len(text) > limits.grammar_bytes_max:
        message = f"`{where}` has {len(text)} characters, at most {limits.grammar_bytes_max} are allowed"
        raise ApiError(400, message, where)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"`{where}` is not JSON: {error}", where) from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(400, f"`{where}` must be an object, got {_short(value)}", where)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"`{where}` must be a text that is not empty, got {_short(value)}", where)
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _short(value: Any) -> str:
    return repr(value)[:60]
