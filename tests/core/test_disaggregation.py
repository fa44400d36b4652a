"""The tables of transfers are complete, and docs/distributed.md prints the tables that the code reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lockstep.core.contract.events import TransferState
from lockstep.core.features.disaggregation import MEANINGS, RECEIVER, SENDER, Table, diagram, table_text

GUIDE = Path(__file__).parents[2] / "docs" / "distributed.md"
TABLES = {"SENDER": SENDER, "RECEIVER": RECEIVER}


def told(name: str) -> str:
    """The text that the guide must contain for a table."""
    return f"<!-- {name} -->\n{table_text(TABLES[name])}\n\n```mermaid\n{diagram(TABLES[name])}\n```\n"


@pytest.mark.parametrize("name", TABLES)
def test_guide_shows_the_table_that_the_code_reads(name: str, request: pytest.FixtureRequest) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    shown = re.compile(rf"<!-- {name} -->\n(?:.*?```\n)?", re.DOTALL)
    if request.config.getoption("--update"):
        text = shown.sub(lambda _: told(name), text)
        GUIDE.write_text(text, encoding="utf-8")
    found = shown.search(text)
    assert found is not None
    assert found.group() == told(name), "pytest tests/core/test_disaggregation.py --update writes it"


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_state_is_reached_and_left(table: Table) -> None:
    states = {was for was, _ in table} | set(table.values())
    firsts = states - {to for (was, _), to in table.items() if was != to}
    assert firsts <= {"bootstrap", "awaited"}
    assert states - {was for was, _ in table} == {"over"}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_transfer_can_fail_and_be_abandoned_until_it_has_ended(table: Table) -> None:
    for state in {was for was, _ in table} - {"quarantined"}:
        assert (state, "abandoned") in table
        assert (state, "failed") in table or state == "ready", "the writer has ended"
        touched = state in ("sending", "in_flight", "receiving")
        assert table[state, "abandoned"] == ("quarantined" if touched else "over")


def test_every_state_has_a_meaning() -> None:
    assert set(MEANINGS) == set(get_args(TransferState))
