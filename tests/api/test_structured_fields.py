"""From fields to a grammar: pure functions, so limits can be tested exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.structured_output import READERS, choice, requested_grammar
from lockstep.api.settings import Limits

LIMITS = Limits(grammar_bytes_max=100, grammar_depth_max=5)


def refusal(fields: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        requested_grammar(fields, LIMITS)
    assert caught.value.status == 400
    return caught.value


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_limits_hold_to_the_byte_and_to_the_level() -> None:
    for field in ("regex", "ebnf", "guided_regex", "guided_grammar"):
        assert requested_grammar({field: "a" * 100}, LIMITS) is not None
        assert "101 bytes, at most 100" in refusal({field: "a" * 101}).message
    assert refusal({"regex": "ü" * 51}).param == "regex"  # bytes, not characters
    for given in (nested(4), json.dumps(nested(4))):
        assert requested_grammar({"json_schema": given}, LIMITS) is not None
    for given in (nested(5), json.dumps(nested(5))):
        assert "more than 5 levels" in refusal({"json_schema": given}).message
    assert "not JSON" in refusal({"json_schema": "[" * 90}).message
    assert "at most 100" in refusal({"json_schema": "[" * 101}).message


def test_equal_grammars_have_equal_digests() -> None:
    def digest(fields: dict[str, Any]) -> bytes:
        asked = requested_grammar(fields, LIMITS)
        assert asked is not None
        return asked.grammar.digest

    schema = {"type": "object"}
    assert len(digest({"json_schema": schema})) == 32
    for same in (
        {"json_schema": '{ "type": "object" }'},
        {"guided_json": schema},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True, "regex": None}},
        {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    ):
        assert digest(same) == digest({"json_schema": schema})
    assert digest({"regex": "a"}) != digest({"ebnf": "a"})
    assert choice(["a.b", "c|d", "e\\f"]).source == r"a\.b|c\|d|e\\f"


@pytest.mark.parametrize("field", READERS)
def test_empty_fields_count_as_absent_and_invalid_ones_are_refused(field: str) -> None:
    for nothing in (None, "", False, {}):
        assert requested_grammar({field: nothing}, LIMITS) is None
    for nonsense in (7, [3], [], {"type": "nothing"}):
        if field not in ("json_schema", "guided_json") or not isinstance(nonsense, dict):
            error = refusal({field: nonsense})
            assert error.param is not None
            assert error.param.startswith(field)


def test_two_of_them_are_refused() -> None:
    assert refusal({"regex": "a", "guided_choice": ["b"]}).param == "regex"
    text = {"response_format": {"type": "text"}, "regex": "a"}
    assert requested_grammar(text, LIMITS) is not None
