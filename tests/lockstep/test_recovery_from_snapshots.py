"""A journal is resumed from its newest snapshot: the restored engine makes the same decisions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lockstep.core.journal import snapshot
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.replay import replay
from lockstep.core.journal.writer import JournalWriter
from tests.support.driver.draw import pressed_actions, pressed_config
from tests.support.driver.driver import Driver


def record(folder: Path, seed: int, snapshots_at: tuple[int, ...]) -> int:
    """Run a history and write its journal, with snapshots after some of its steps. Returns the number of steps."""
    rng = random.Random(seed)
    driver = Driver(pressed_config(rng))
    actions = pressed_actions(rng, 200)
    with JournalWriter.create(folder, JournalHeader(config=driver.engine.config)) as journal:
        for action in actions:
            before = len(driver.events)
            driver.do(action)
            for event, digest in driver.events[before:]:
                journal.append(event, digest)
                if len(driver.events) in snapshots_at:
                    journal.snapshot(snapshot.dump(driver.engine), driver.engine.digest)
        return len(driver.events)


@pytest.mark.parametrize("seed", range(5))
def test_replay_goes_on_from_the_newest_snapshot(seed: int, tmp_path: Path) -> None:
    steps = record(tmp_path, seed, snapshots_at=(20, 90))
    whole = replay(tmp_path)
    recovered = replay(tmp_path, restore=lambda header, data: snapshot.restore(data))
    assert recovered.snapshot is not None
    assert (recovered.events, recovered.steps) == (steps, steps - recovered.snapshot.steps)
    assert recovered.steps < whole.steps
    assert recovered.digest == whole.digest


def test_altered_snapshot_is_refused_and_replay_starts_at_the_beginning(tmp_path: Path) -> None:
    steps = record(tmp_path, 1, snapshots_at=(50,))
    journal = read_journal(tmp_path)
    (image,) = [path for path in journal.folder.iterdir() if path.suffix != ".log"]
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    recovered = replay(tmp_path, restore=lambda header, data: snapshot.restore(data))
    assert recovered.snapshot is None
    assert recovered.snapshot_refused is not None
    assert recovered.steps == steps
