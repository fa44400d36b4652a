"""A copy of a journal without a tenant's content: equal decisions, and none of its tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalError
from lockstep.core.journal.replay import replay
from lockstep.tools.forget import MARK, forget
from lockstep.tools.journal import journal

GOLDEN = Path(__file__).parents[1] / "golden"


def tenants(run: Path) -> set[str]:
    return {one.event.tenant for one in read_journal(run).events() if isinstance(one.event, RequestArrived)}


RUNS = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/journal")
    if read_journal(path).header.content == "full" and not read_journal(path).first_step and "handover" not in str(path)
)


REFUSED = {"sessions", "sessions-branch", "sessions-yield", "media", "tiers", "hybrid-storage"}
"""Runs in which a prompt may repeat the tokens of a session, or KV is known by a hash of its content."""


@pytest.mark.parametrize("name", RUNS)
def test_a_copy_decides_alike_and_has_no_prompt_of_the_tenant(name: str, tmp_path: Path) -> None:
    several = tenants(GOLDEN / name)
    for number, tenant in enumerate(sorted(several)):
        out = tmp_path / str(number)
        if len(several) > 1 or name in REFUSED:
            try:
                forget(GOLDEN / name, tenant, out)
            except JournalError:
                assert not out.exists()
                continue
        else:
            assert forget(GOLDEN / name, tenant, out)
        replay(out)
        for record in read_journal(out).events():
            event = record.event
            if not isinstance(event, RequestArrived) or event.tenant != tenant:
                continue
            assert not event.label
            if isinstance(event.prompt, TokenIds):
                assert (np.frombuffer(event.prompt.ids, np.int32) >= MARK).all()


def test_the_command_names_what_it_left_out(tmp_path: Path) -> None:
    arguments = ["forget", str(GOLDEN / "served"), "--tenant", "", "--out", str(tmp_path / "copy")]
    done = CliRunner().invoke(journal, arguments)
    assert done.exit_code == 0, done.output
    assert "without the content of" in done.output
    assert CliRunner().invoke(journal, arguments).exit_code != 0
