"""The delayer's table: docs/distributed.md prints the table that the code reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lockstep.core.contract.events import DelaySituation
from lockstep.core.features.data_parallel import DELAYER, SITUATIONS, diagram, table_text

GUIDE = Path(__file__).parents[2] / "docs" / "distributed.md"


def told() -> str:
    """The text that the guide must contain."""
    return f"<!-- DELAYER -->\n{table_text()}\n\n```mermaid\n{diagram()}\n```\n"


def test_guide_shows_the_table_that_the_code_reads(request: pytest.FixtureRequest) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    shown = re.compile(r"<!-- DELAYER -->\n(?:.*?```\n)?", re.DOTALL)
    if request.config.getoption("--update"):
        text = shown.sub(lambda _: told(), text)
        GUIDE.write_text(text, encoding="utf-8")
    found = shown.search(text)
    assert found is not None
    assert found.group() == told(), "pytest tests/core/test_data_parallel.py --update writes it"


def test_every_situation_has_a_meaning_and_a_row() -> None:
    assert set(SITUATIONS) == set(get_args(DelaySituation)) == {situation for _, situation in DELAYER}
