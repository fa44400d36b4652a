"""Random JSON schemas, and answers of a model that must validate against them. The generator is Hypothesis."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import hypothesis
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from lockstep.runtime import LLM, Params

Schemas = st.SearchStrategy[dict[str, Any]]

NAMES = st.sampled_from(["a", "b", "some name", "ü", "x_1", "日本"])
PATTERNS = ["^[a-z]{1,8}$", "^(red|green|blue)$", r"^\d{3}-\d{4}$", "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$", "[0-9]"]
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "hostname"]
VALUES = st.none() | st.booleans() | st.integers(-999, 10**6) | st.sampled_from([1.5, -0.25]) | st.text(max_size=6)


def _of(kind: str, /, *, always: dict[str, Any] | None = None, **fields: Any) -> Schemas:
    """Schemas of one type: with its required keywords, and some of the others."""
    return st.fixed_dictionaries({"type": st.just(kind), **(always or {})}, optional=fields)


FLAT = st.one_of(
    _of("string", always={"maxLength": st.integers(3, 12)}, minLength=st.integers(0, 3)),
    _of("string", always={"pattern": st.sampled_from(PATTERNS)}),
    _of("string", always={"format": st.sampled_from(FORMATS)}),
    _of("string"),
    _of("integer", minimum=st.integers(-100, 0), maximum=st.integers(0, 10**6)),
    _of("integer", multipleOf=st.integers(1, 12), exclusiveMinimum=st.integers(-5, 5)),
    _of("number", minimum=st.integers(-10, 0), exclusiveMaximum=st.integers(1, 100)),
    _of("boolean"),
    _of("null"),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)}),
    st.just({"type": ["integer", "null"]}),
)


def _nested(inner: Schemas) -> Schemas:
    """Schemas of objects, arrays and alternatives of others."""
    some = st.dictionaries(NAMES, inner, max_size=4)
    objects = st.builds(
        lambda properties, more, spare: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[: len(properties) - spare],
            "additionalProperties": more,
        },
        some,
        st.just(False) | inner,
        st.integers(0, 1),
    )
    return st.one_of(
        objects,
        objects,
        _of("array", always={"items": inner, "maxItems": st.integers(2, 4)}, minItems=st.integers(0, 2)),
        st.fixed_dictionaries(
            {"type": st.just("array"), "prefixItems": st.lists(inner, min_size=1, max_size=3), "items": st.just(False)}
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
    )


SCHEMAS = _nested(st.recursive(FLAT, _nested, max_leaves=6)) | FLAT


CHECKER = FormatChecker(formats=["uuid", "email", "ipv4"])
"""Formats of the validator, and a date that may be of the year 0, which RFC 3339 allows and Python does not."""


@CHECKER.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    return not isinstance(value, str) or bool(date.fromisoformat(value.replace("0000-", "2000-", 1)))


def draw_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """This number of different schemas."""
    found: dict[str, dict[str, Any]] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(SCHEMAS)
    def collect(schema: dict[str, Any]) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    collect()
    return list(found.values())[:count]


@dataclass
class Outcome:
    """The outcomes of the schemas."""

    schemas: int
    valid: int = 0
    cut: int = 0  # by the length limit of an answer
    refused: Counter[str] = field(default_factory=Counter)  # by the sentence with the reason
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
    """Let a model answer under each schema, and validate the answers."""
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
            Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(answer.text or ""))
            outcome.valid += 1
        except Exception as error:  # of the parser or of the validator: a fault either way
            why = str(error).partition("\n")[0]
            outcome.faults.append(f"{answer.text!r} ({answer.finish_reason}) for {json.dumps(schema)}: {why}")
    outcome.seconds = time.monotonic() - began_s
    return outcome
