"""Entries of `host` in a journal's header are declared in one place, and every host and reader uses the declaration."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.core.contract.config import SchedConfig
from lockstep.core.journal.records import JournalHeader
from lockstep.host.host_header import SIMULATOR, HostHeader

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*ROOT.glob("packages/*/src/lockstep/**/*.py"), *ROOT.glob("tools/src/lockstep/**/*.py")]
BY_NAME = re.compile(r"""header\.host(\[|\.get\()|host=\{\s*["*]""")
"""Entries that are read or written by a name in the code, past the declaration."""


def test_entries_come_back_from_a_header_in_order() -> None:
    host = HostHeader(kind=SIMULATOR, model="m", tp=2, layout={"ep": 2}, workload="w", engine=0, engines=3)
    entries = host.entries()
    assert list(entries) == ["kind", "model", "tp", "ep", "workload", "engine", "engines"]
    assert HostHeader.of(JournalHeader(config=SchedConfig(), host=entries)) == host


def test_no_module_reads_or_writes_an_entry_past_the_declaration() -> None:
    assert SOURCES
    assert [path for path in SOURCES if BY_NAME.search(path.read_text(encoding="utf-8"))] == []
