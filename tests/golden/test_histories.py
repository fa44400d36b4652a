"""Recorded random histories: every feature in combination, decided today as when they were recorded.

Journals of single features are in this folder too, with the words of their decisions. `histories.bin` has what engines
of random histories observed, and digests of what they decided. These recordings have no header and so no behaviour
flags (docs/journal.md): with a deliberate change of behaviour, which golden journals replay under its flag, and with
new features they are recorded anew:

    python benchmarks/history_digests.py --histories 150 --record tests/golden/histories.bin
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.core.scheduler import ordering
from tests.support.recorded_histories import Recording, difference, read

PATH = Path(__file__).parent / "histories.bin"
RECORDINGS = read(PATH)
KINDS_MIN = {"plain": 50, "tiers": 10, "hybrid": 10, "drafts": 10, "microbatches": 10, "ranks": 10, "fleet": 10}
BYTES_MAX = 700_000


@pytest.mark.parametrize("recording", RECORDINGS, ids=[f"{one.seed}-{one.kind}-{one.engine}" for one in RECORDINGS])
def test_is_decided_as_it_was_recorded(recording: Recording) -> None:
    assert difference(recording, snapshots=False) == ""


def test_every_kind_of_history_is_recorded_and_the_file_is_small() -> None:
    kinds = [word for one in RECORDINGS for word in one.kind.split("+")]
    assert {kind: kinds.count(kind) for kind in KINDS_MIN if kinds.count(kind) < KINDS_MIN[kind]} == {}
    assert PATH.stat().st_size < BYTES_MAX


def test_a_changed_tie_break_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_of_equals_first(keys: Sequence[float]) -> list[int]:
        return sorted(range(len(keys)), key=lambda at: (keys[at], at), reverse=True)

    monkeypatch.setattr(ordering, "_highest_first", last_of_equals_first)
    assert any(difference(one, snapshots=False) for one in RECORDINGS)
