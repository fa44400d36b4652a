"""The JSON of every command has the fields and types of its schema in docs/schemas, and no field beyond them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("jsonschema", reason="what validates JSON is not installed")
pytest.importorskip("lockstep.tools.journal", reason="the tools are not installed")

from jsonschema import Draft202012Validator

from tests.json_schemas import FOLDER, OUTPUTS, output_of, prepared, schema_of

PAGE = FOLDER.parent / "command-line.md"


def closed(schema: Any) -> Any:
    """Return a schema under which no object has a field that is not named."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            closed(part)
    elif isinstance(schema, list):
        for part in schema:
            closed(part)
    return schema


@pytest.fixture(scope="module", autouse=True)
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with prepared(tmp_path_factory.mktemp("outputs")):
        yield


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_has_the_fields_of_its_schema(name: str) -> None:
    stored = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(stored)
    strict = Draft202012Validator(closed(copy.deepcopy(stored)))
    for line in OUTPUTS[name].lines:
        problems = [f"{error.json_path}: {error.message[:200]}" for error in strict.iter_errors(output_of(line))]
        assert not problems, f"lockstep {line}: {problems[:5]}; if deliberate: python -m tests.json_schemas"


def test_a_missing_field_an_unknown_one_and_another_type_are_found() -> None:
    schema = closed(schema_of("diff", [{"equal": True, "about": {"n": 1}}, {"equal": False, "about": {"n": None}}]))
    check = Draft202012Validator(schema)
    assert check.is_valid({"equal": True, "about": {"n": 2.5}})
    for wrong in ({"equal": True}, {"equal": True, "about": {"n": 1}, "more": 1}, {"equal": 1, "about": {"n": "x"}}):
        assert not check.is_valid(wrong)


def test_each_schema_is_on_the_page_with_a_description_of_its_fields() -> None:
    linked = set(re.findall(r"\(schemas/([a-z-]+)\.json\)", PAGE.read_text("utf-8")))
    assert linked == set(OUTPUTS) == {path.stem for path in FOLDER.glob("*.json")}
    for name in OUTPUTS:
        schema = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
        undescribed = [key for key, part in schema.get("properties", {}).items() if not part.get("description")]
        assert not undescribed, f"{name}: describe {undescribed} in tests/json_schemas.py"
