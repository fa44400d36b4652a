"""docs/parity.md is what marks and rows make of it, and every place, option and test in it exists.

`python -m tests.parity` writes the page. `make parity` checks that each test fails without its mechanism.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import click
import msgspec
import pytest

from lockstep.core.contract.config import SchedConfig
from tests import parity
from tests.parity import PLACES, ROOT, Mechanism, marks_of, mechanisms, page, taken_out, typed

ALL = list(mechanisms().values())
EVERY = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)


def test_the_page_is_what_marks_and_rows_make_of_it() -> None:
    assert parity.PAGE.read_text(encoding="utf-8") == page()


@EVERY
def test_a_mechanism_has_every_place_or_the_reason_for_which_it_has_none(one: Mechanism) -> None:
    assert one.places["decided"], f"no mark `# mechanism: {one.name} (decided)`"
    for where in PLACES[1:]:
        reason = getattr(one, where)
        assert bool(one.places.get(where)) != bool(reason), f"{where}: a mark, or a reason in parity.toml, not both"


@EVERY
def test_what_a_mechanism_is_taken_out_by_is_a_statement_of_its_function(one: Mechanism) -> None:
    at = one.removed
    text = (ROOT / at.path).read_text(encoding="utf-8")
    without = taken_out(text, at.symbol, one.out)
    ast.parse(without)
    assert len(without.splitlines()) == len(text.splitlines()) + 1


@EVERY
def test_the_test_of_a_mechanism_exists(one: Mechanism) -> None:
    path, _, name = one.test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    if not name:
        assert "\ndef test_" in text
        return
    function, _, case = name.partition("[")
    assert re.search(rf"^ *def {re.escape(function)}\(", text, re.MULTILINE), one.test
    if path == "tests/test_scenarios.py":
        assert (ROOT / "tests" / "scenarios" / f"{case.rstrip(']')}.txt").exists()


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return every flag of a command of `lockstep`."""
    found = parity.command_of(command)
    return frozenset(
        flag for given in found.get_params(click.Context(found)) for flag in (*given.opts, *given.secondary_opts)
    )


@EVERY
def test_the_options_of_a_command_exist(one: Mechanism) -> None:
    served, request = parity.served_options(one.command)
    if request == one.command and "curl" not in request:
        words = shlex.split(typed(one.command))
        assert words[0] == "lockstep"
        command, words = words[1], words[2:]
    else:
        assert "curl" in request
        command, words = "serve", served
    if command == "serve":
        pytest.importorskip("lockstep.api.serve", reason="the server is not installed")
    known = flags_of(command)
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}
    settings = {field.name for field in msgspec.structs.fields(SchedConfig)}
    given = [words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--set"]
    assert set(given) <= settings


@EVERY
def test_a_command_has_a_line_that_it_printed(one: Mechanism) -> None:
    printed = msgspec.json.decode(parity.PRINTED.read_bytes())
    assert re.search(one.shows, printed[one.name]), "python -m tests.parity --commands " + one.name


def test_a_mark_above_nothing_and_a_misspelt_mark_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "ROOT", tmp_path)
    file = tmp_path / "some.py"
    for text, message in (
        ("# mechanism: a (decided)\nx = 1\n", "above no function"),
        ("# mechanism: a (decides)\ndef f() -> None: ...\n", "not a mark"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            list(marks_of(file))
    file.write_text(
        "class A:\n    # mechanism: a (decided)\n    # mechanism: b (executed)\n    @property\n    def f(self): ...\n"
    )
    assert [(name, where, place.symbol) for name, where, place in marks_of(file)] == [
        ("a", "decided", "A.f"),
        ("b", "executed", "A.f"),
    ]


def test_a_function_that_is_taken_out_keeps_its_docstring() -> None:
    source = 'class A:\n    def f(self):\n        """Do it."""\n        return 1\n\n\ndef f():\n    return 2\n'
    assert taken_out(source, "A.f", "return 0") == source.replace(
        "        return 1", "        return 0\n        return 1"
    )
    assert taken_out(source, "f", "return 0").endswith("def f():\n    return 0\n    return 2\n")
    with pytest.raises(ValueError, match="there is no g"):
        taken_out(source, "g", "return 0")
    with pytest.raises(ValueError, match="A is no function"):
        taken_out(source, "A", "return 0")
