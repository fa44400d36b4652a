"""A journal that begins segments with snapshots: from any torn tail, the engine is restored to its state there."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    BatchFinished,
    CancelMany,
    Control,
    ControlRequested,
    EngineRestarted,
    LaneReady,
    ObservedEvent,
    RequestArrived,
    SamplingParams,
    SetState,
    TokenIds,
)
from lockstep.core.journal import snapshot
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalCorrupt, JournalError, JournalHeader
from lockstep.core.journal.replay import fold, replay
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host import durable, startup
from lockstep.host.durable import DurableJournal, Retention
from lockstep.host.recovery import Probation, recover
from lockstep.host.startup import Keeper
from tests.support.driver.draw import pressed_actions, pressed_config
from tests.support.driver.driver import Driver


def record(run: Path, seed: int, actions: int = 150, bytes_max: int = 1 << 30, every: int = 25) -> list[bytes]:
    """Run a history with a snapshot every so many events. Returns the engine's state behind each event."""
    rng = random.Random(seed)
    driver = Driver(pressed_config(rng))
    clock = count()
    header = JournalHeader(config=driver.engine.config)
    states = []
    with JournalWriter.create(run, header) as writer:
        retention = Retention(snapshot_s=0.0, bytes_max=bytes_max)
        journal = DurableJournal(writer, Engine(header.config), retention, now_s=lambda: float(next(clock)))
        for action in pressed_actions(rng, actions):
            before = len(driver.events)
            driver.do(action)
            for event, digest in driver.events[before:]:
                assert journal.engine.step(event).digest == digest
                journal.append(event, digest)
                states.append(snapshot.dump(journal.engine))
                if len(states) % every == 0:
                    journal.begin_segment()
    return states


@pytest.fixture(autouse=True)
def nothing_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "RECENT_S", 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_recovered_from_wherever_it_breaks_off(seed: int, tmp_path: Path) -> None:
    """The last segment is cut at random places, within its header and snapshot record as well."""
    states = record(tmp_path, seed)
    newest = max((tmp_path / "journal").glob("*.log"))
    data, rng = newest.read_bytes(), random.Random(seed)
    for size in sorted(rng.sample(range(len(data)), 30), reverse=True):
        newest.write_bytes(data[:size])
        told = recover(tmp_path)
        steps = told.journal.tail.steps
        assert snapshot.dump(told.engine) == states[steps - 1], (seed, size)
        assert told.steps <= 50
        newest.write_bytes(b"")


def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    states = record(tmp_path, 1)
    newest = max((tmp_path / "journal").glob("snapshot-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    told = recover(tmp_path)
    assert snapshot.dump(told.engine) == states[-1]
    assert len(told.refused) == 1
    assert told.steps > 25


def test_expired_segments_are_deleted_and_the_rest_replays(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    states = record(whole, 2)
    assert record(part, 2, bytes_max=40_000) == states
    kept = read_journal(part)
    assert kept.first_step > 0
    assert sum(path.stat().st_size for path in kept.folder.iterdir()) < 80_000
    assert replay(part).digest == replay(whole).digest
    assert replay(part).steps == len(states) - kept.first_step
    assert [step.digest for _, step in fold(part)] == [step.digest for _, step in fold(whole)][kept.first_step :]
    assert snapshot.dump(recover(part).engine) == states[-1]
    with pytest.raises(JournalError, match="have expired, so that it can only be replayed with its own settings"):
        list(fold(part, lambda header: Engine(header.config), strict=False))


def test_a_first_segment_without_a_snapshot_lacks_the_records_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with JournalWriter.create(run, JournalHeader(config=SchedConfig(pages=8)), segment_bytes=200) as writer:
        engine = Engine(SchedConfig(pages=8))
        for time_us in range(20):
            event = LaneReady(time_us)
            writer.append(event, engine.step(event).digest)
            writer.flush()
    (run / "journal" / "00000000.log").unlink()
    with pytest.raises(JournalCorrupt, match="missing segment"):
        read_journal(run)


def test_an_engine_begins_where_the_one_before_stopped(tmp_path: Path) -> None:
    config = SchedConfig(pages=64, page_size=2)
    header = JournalHeader(config=config)
    keeper = Keeper(tmp_path)
    engine, journal = keeper.begin(header)
    arrival = RequestArrived(
        5, request_id=0, prompt=TokenIds(bytes(16)), max_new_tokens=4, origin="server/0/7", parallel_samples=2
    )
    for event in (arrival, LaneReady(6)):
        journal.append(event, engine.step(event).digest)
    journal.flush()
    journal.writer._release()  # the process dies

    keeper = Keeper(tmp_path, death="crashed")
    again, _ = keeper.begin(header)
    assert keeper.recovered is not None
    assert keeper.recovered.find("server/0/7", [0, 1]) == 0
    assert keeper.recovered.find("server/0/8", [0]) is None
    assert keeper.verdict.suspects == {0: 0}  # the other sample waits for the first one's prompt
    assert again.generation == 1
    assert [request.request_id for request in again.requests.values()] == [0, 1]
    assert isinstance(list(read_journal(tmp_path).events())[-1].event, EngineRestarted)
    with pytest.raises(ConfigError, match="`page_size` 4 \\(was 2\\)"):
        keeper.check(SchedConfig(pages=64, page_size=4))


@dataclass
class Asked:
    """The part of a host that `Probation` uses; its requests are carried out at once."""

    engine: Engine
    journal: DurableJournal

    def fold(self, *events: ObservedEvent) -> None:
        for event in events:
            self.journal.append(event, self.engine.step(event).digest)
        self.journal.flush()

    def ask(self, control: Control) -> None:
        self.fold(ControlRequested(self.engine.now_us + 1, 0, control))


def test_suspects_that_leave_before_they_are_tried_leave_the_limit_as_it_was(tmp_path: Path) -> None:
    """The engine was killed while it ran one request at a time; its suspects were cancelled, and the limit stayed."""
    header = JournalHeader(config=SchedConfig(pages=64, page_size=2))
    arrivals = [
        RequestArrived(5, request_id=number, prompt=TokenIds(bytes(16)), max_new_tokens=4, origin=f"server/0/{number}")
        for number in range(2)
    ]
    host = Asked(*Keeper(tmp_path).begin(header))
    at_once = host.engine.config.max_running_requests
    assert at_once > 1
    host.ask(SetState("max_running_requests", at_once - 1))  # the limit set by an operator
    host.fold(*arrivals, LaneReady(6))
    host.journal.writer._release()  # the process dies

    for _ in range(2):
        keeper = Keeper(tmp_path, death="crashed")
        host = Asked(*keeper.begin(header))
        assert set(keeper.suspects()) == {0, 1}
        assert not Probation(cast(Any, host), keeper.recovered.image).over  # type: ignore[union-attr]  # there is one
        assert host.engine.config.max_running_requests == 1
        host.journal.writer._release()
    host = Asked(*Keeper(tmp_path, death="killed").begin(header))
    host.ask(CancelMany((0, 1)))
    host.journal.writer._release()
    keeper = Keeper(tmp_path, death="killed")
    host = Asked(*keeper.begin(header))
    assert keeper.recovered is not None
    assert Probation(cast(Any, host), keeper.recovered.image).over
    assert host.engine.config.max_running_requests == at_once - 1


def test_an_answer_that_ended_before_the_snapshot_is_found_again(tmp_path: Path) -> None:
    """Two restarts in a row before the client received the end. A request that never arrived is reported as unknown."""
    header = JournalHeader(config=SchedConfig(pages=64, page_size=2))
    keeper = Keeper(tmp_path)
    engine, journal = keeper.begin(header)
    events: list[ObservedEvent] = [
        RequestArrived(5, request_id=0, prompt=TokenIds(bytes(16)), max_new_tokens=1, origin="server/0/7"),
        LaneReady(6),
        BatchFinished(7, 0, np.array([41], "<i4").tobytes()),
        RequestArrived(8, request_id=1, prompt=TokenIds(bytes(16)), max_new_tokens=9, origin="server/0/9"),
    ]
    for event in events:
        journal.append(event, engine.step(event).digest)
    journal.flush()
    journal.writer._release()
    for _ in range(2):
        keeper = Keeper(tmp_path, death="killed")
        _, journal = keeper.begin(header)
        journal.writer._release()
    told = recover(tmp_path)
    assert told.find("server/0/7", [0]) == 0
    assert told.answers[0].tokens == [41]
    assert told.answers[0].end is not None
    assert told.find("server/0/9", [0]) == 1
    assert told.find("server/0/8", [0]) is None
    assert told.find("server/1/0", [0]) is None


GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/journal")))
def test_journals_of_every_version_and_feature_are_gone_on_with(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name / "journal", tmp_path / "journal")
    before = replay(tmp_path)
    keeper = Keeper(tmp_path, death="killed")
    assert keeper.recovered is not None
    assert keeper.recovered.steps == before.steps
    engine, journal = keeper.begin(before.header)
    journal.close()
    assert replay(tmp_path).digest == engine.digest
    assert not engine.in_flight
    assert all(request.row < 0 for request in engine.requests.values())


def test_a_snapshot_of_another_format_is_passed_over_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = record(tmp_path, 1)
    monkeypatch.setattr(snapshot, "SNAPSHOT_FORMAT", 2)
    told = recover(tmp_path)
    assert told.journal.first_step == 0
    assert told.steps == len(states)
    assert all("snapshot format 1, this version reads 2" in why for why in told.refused)
    expired = tmp_path / "expired"
    monkeypatch.setattr(snapshot, "SNAPSHOT_FORMAT", 1)
    record(expired, 2, bytes_max=40_000)
    monkeypatch.setattr(snapshot, "SNAPSHOT_FORMAT", 2)
    with pytest.raises(JournalError, match=r"holds nothing to begin with: .*snapshot format 1, this version reads 2"):
        recover(expired)


def test_a_snapshot_is_taken_once_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at after every third event."""
    monkeypatch.setattr(durable, "LOOK_EVERY", 3)
    now_s = [0.0]
    engine = Engine(SchedConfig(pages=8))
    writer = JournalWriter.create(tmp_path, JournalHeader(config=engine.config))
    journal = DurableJournal(writer, engine, Retention(snapshot_s=10.0), now_s=lambda: now_s[0])
    segments = []
    for time_us, now in enumerate((0, 0, 9.5, 10, 10, 10, 19, 19, 19, 20, 20, 20)):
        now_s[0] = now
        event = LaneReady(time_us)
        journal.append(event, engine.step(event).digest)
        segments.append(len(list((tmp_path / "journal").glob("*.log"))))
    journal.close()
    assert segments == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3]


def test_the_newest_segment_that_cannot_be_torn_within_its_header(tmp_path: Path) -> None:
    for sizes, number in (((10,), 0), ((5000, 10), 0), ((5000, 4095), 0), ((5000, 4096), 1), ((5000, 5000, 10), 1)):
        for place, size in enumerate(sizes):
            (tmp_path / f"{place:08}.log").write_bytes(bytes(size))
        assert startup._first_whole(tmp_path) == number


def test_logprobs_of_recorded_batches_are_kept_for_requests_that_have_them(tmp_path: Path) -> None:
    """Two requests in each batch: the first with logprobs of two likely tokens, the second without, the third alone."""
    engine, writer = Engine(SchedConfig(pages=64, page_size=2)), None
    writer = JournalWriter.create(tmp_path, JournalHeader(config=engine.config))
    prompt = TokenIds(np.arange(4, dtype="<i4").tobytes())
    events: list[ObservedEvent] = [
        RequestArrived(1, request_id=0, prompt=prompt, max_new_tokens=9),
        RequestArrived(1, request_id=1, prompt=prompt, max_new_tokens=9, logprob_start=3,
                       sampling=SamplingParams(top_logprobs=2)),
        RequestArrived(1, request_id=2, prompt=prompt, max_new_tokens=9, logprob_start=3),
    ]  # fmt: skip
    with writer:
        for event in events:
            writer.append(event, engine.step(event).digest)
        for number in range(2):
            step = engine.step(LaneReady(2 + 2 * number))
            writer.append(LaneReady(2 + 2 * number), step.digest)
            plan = step.launched()
            assert plan is not None
            ids = plan.request_ids[plan.sample_rows].tolist()
            assert sorted(ids) == [0, 1, 2]
            tops = np.array([[one, 50 + one] for one in ids], "<i4")
            finished = BatchFinished(
                3 + 2 * number,
                plan.batch_id,
                np.array([40 + one for one in ids], "<i4").tobytes(),
                logprobs=np.array([-1.0 - one - number for one in ids], "<f4").tobytes(),
                top_ids=tops.tobytes(),
                top_logprobs=(tops * -0.5).astype("<f4").tobytes(),
            )
            writer.append(finished, engine.step(finished).digest)
    answers = recover(tmp_path).answers
    assert not answers[0].logprobs
    found = {number: (kept[0], None if kept[1] is None else kept[1].tolist(), None if kept[2] is None else
                      kept[2].tolist()) for number, kept in answers[1].logprobs.items()}  # fmt: skip
    assert found == {0: (-2.0, [1, 51], [-0.5, -25.5]), 1: (-3.0, [1, 51], [-0.5, -25.5])}
    assert answers[2].logprobs == {0: (-3.0, None, None), 1: (-4.0, None, None)}
