"""Random JSON schemas, and answers of a model that must validate against them.

The generator is hypothesis-jsonschema: what it draws are values of a schema, here of one that describes schemas.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator, FormatChecker

from lockstep.runtime import LLM, Params

NAMES = ["a", "b", "some name", "ü", "x_1"]
PATTERNS = ["^[a-z]{1,8}$", "^(red|green|blue)$", r"^\d{3}-\d{4}$", "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$", "[0-9]"]
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "hostname"]
VALUES = {
    "anyOf": [{"enum": ["", "one", 'q"\\', "漢字", 0, -3, 1.5, True, None]}, {"type": "integer", "maximum": 10**6}]
}


def _of(kind: str, required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Schemas of one type, with some of these keywords and always those required."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **fields},
        "required": ["type", *required],
        "additionalProperties": False,
    }


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def schema_of_schemas(depth: int) -> dict[str, Any]:
    """A schema whose values are schemas, nested so deeply."""
    flat: list[dict[str, Any]] = [
        _of("string", ("maxLength",), minLength=_whole(0, 3), maxLength=_whole(3, 12)),
        _of("string", ("pattern",), pattern={"enum": PATTERNS}),
        _of("string", ("format",), format={"enum": FORMATS}),
        _of("string"),
        _of("integer", minimum=_whole(-100, 0), maximum=_whole(0, 10**6)),
        _of("integer", multipleOf=_whole(1, 12), exclusiveMinimum=_whole(-5, 5)),
        _of("number", minimum=_whole(-10, 0), exclusiveMaximum=_whole(1, 100)),
        _of("boolean"),
        _of("null"),
        {"type": "object", "properties": {"const": VALUES}, "required": ["const"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"enum": {"type": "array", "items": VALUES, "minItems": 1, "maxItems": 4}},
            "required": ["enum"],
            "additionalProperties": False,
        },
    ]
    if not depth:
        return {"anyOf": flat}
    inner = schema_of_schemas(depth - 1)
    members = {
        "type": "object",
        "properties": dict.fromkeys(NAMES, inner),
        "additionalProperties": False,
    }
    names = {"type": "array", "items": {"enum": NAMES}, "uniqueItems": True, "maxItems": 3}
    nested = [
        _of(
            "object",
            ("properties", "required"),
            properties=members,
            required=names,
            additionalProperties={"anyOf": [{"const": False}, inner]},
        ),
        _of("array", ("items", "maxItems"), items=inner, minItems=_whole(0, 2), maxItems=_whole(2, 4)),
        _of("array", ("prefixItems",), prefixItems={"type": "array", "items": inner, "minItems": 1, "maxItems": 3},
            items={"const": False}),
        {
            "type": "object",
            "properties": {"anyOf": {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}},
            "required": ["anyOf"],
            "additionalProperties": False,
        },
    ]  # fmt: skip
    return {"anyOf": [*nested, *nested, {"anyOf": flat}]}


def draw_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """So many different schemas."""
    found: dict[str, dict[str, Any]] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(from_schema(schema_of_schemas(2)))
    def collect(schema: dict[str, Any]) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    collect()
    return list(found.values())[:count]


@dataclass
class Outcome:
    """What became of the schemas."""

    schemas: int
    valid: int = 0
    cut: int = 0  # by the length that an answer may have
    refused: Counter[str] = field(default_factory=Counter)  # by the sentence that said why
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        """In words."""
        refused = sum(self.refused.values())
        first = (
            f"{self.schemas} schemas in {self.seconds:.0f} s: {self.valid} answers validate, {self.cut} were cut off"
        )
        lines = [f"{first}, {refused} schemas refused, {len(self.faults)} faults; {self.tokens:,} tokens"]
        lines += [f"  {count} refused: {why}" for why, count in self.refused.most_common(8)]
        return "\n".join([*lines, *self.faults[:10]])


def judge(llm: LLM, schemas: list[dict[str, Any]], *, tokens: int, seed: int) -> Outcome:
    """Have a model answer under each schema, and hold the answers against them."""
    outcome, began_s = Outcome(len(schemas)), time.monotonic()
    params = [
        Params(max_new_tokens=tokens, temperature=1.0, seed=seed + i, grammar=("json_schema", json.dumps(schema)))
        for i, schema in enumerate(schemas)
    ]
    for schema, answer in zip(schemas, llm.generate(["Answer in JSON: "] * len(schemas), params), strict=True):
        outcome.tokens += len(answer.token_ids)
        if answer.error:
            mark = "`grammar` did not compile: "
            if answer.error.startswith(mark):
                outcome.refused[answer.error.removeprefix(mark)[:90]] += 1
            else:
                outcome.faults.append(f"{answer.error} for {json.dumps(schema)}")
            continue
        if answer.finish_reason == "length":
            outcome.cut += 1
            continue
        try:
            Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(answer.text or ""))
            outcome.valid += 1
        except Exception as error:  # of the parser or of the validator: a fault either way
            why = str(error).partition("\n")[0]
            outcome.faults.append(f"{answer.text!r} ({answer.finish_reason}) for {json.dumps(schema)}: {why}")
    outcome.seconds = time.monotonic() - began_s
    return outcome
