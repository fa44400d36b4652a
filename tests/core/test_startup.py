"""Startup of an engine with a journal: what it continues, and answers that ended before the newest snapshot."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    BatchFinished,
    ControlRequested,
    EngineRestarted,
    LaneReady,
    LoadAdapterControl,
    ObservedEvent,
    RequestArrived,
    TokenIds,
    UnloadAdapterControl,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalError, JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host import durable, startup
from lockstep.host.adapters import AdaptersLog
from lockstep.host.durable import Retention
from lockstep.host.recovery import recover
from lockstep.host.services import EarlierGeneration
from lockstep.host.startup import Keeper
from lockstep.host.weights import WeightsLog

HEADER = JournalHeader(config=SchedConfig(pages=64, page_size=2))
WITH_ADAPTERS = JournalHeader(config=SchedConfig(pages=64, page_size=2, max_loras=3))


class Life:
    """An engine from its start to its end without notice. The images of weights and adapters are those of a host."""

    def __init__(self, keeper: Keeper, header: JournalHeader = HEADER) -> None:
        self.engine, self.journal = keeper.begin(header)
        self.controls = 0

    def fold(self, *events: ObservedEvent) -> None:
        for event in events:
            self.journal.append(event, self.engine.step(event).digest)
            self.journal.image.weights.fold(self.engine, event)
            if self.journal.image.adapters is not msgspec.UNSET:
                self.journal.image.adapters.fold(self.engine, event)

    def ask(self, *controls: Any) -> None:
        for control in controls:
            self.fold(ControlRequested(self.engine.now_us + 1, self.controls, control))
            self.controls += 1

    def answer(self, origin: str, token: int, samples: int = 1) -> int:
        """Serve a request for one token, with this token in each sample. Returns its id."""
        first = self.engine.last_request_id + 1
        prompt = TokenIds(bytes(16))
        now_us = self.engine.now_us
        self.fold(
            RequestArrived(
                now_us, request_id=first, prompt=prompt, max_new_tokens=1, origin=origin, parallel_samples=samples
            )
        )
        while self.engine.requests:
            self.fold(LaneReady(now_us))
            plan = self.engine.in_flight[0].plan
            tokens = np.full(len(plan.sample_rows), token, "<i4").tobytes()
            self.fold(BatchFinished(now_us, plan.batch_id, tokens))
        return first

    def die(self) -> None:
        self.journal.flush()
        self.journal.writer._release()


def segments_of(run: Path) -> list[Path]:
    return sorted((run / "journal").glob("*.log"))


def drop_segments(run: Path, below: int) -> None:
    """Remove the segments before this one, as if they had expired."""
    for path in segments_of(run)[:below]:
        path.unlink()


@pytest.fixture(autouse=True)
def nothing_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "RECENT_S", 0.0)


# ------------------------------------------------------------------------------------------- a journal without content


def test_a_journal_without_content_is_gone_on_with(tmp_path: Path) -> None:
    """Ids and the time go on, and weights and adapters are named by their sources."""
    life = Life(Keeper(tmp_path, content="digests"), WITH_ADAPTERS)
    life.answer("server/0/0", 41, samples=3)
    life.ask(UpdateWeights(4, "/w4"))
    life.fold(WeightsSwapped(life.engine.now_us + 1, 4))
    life.ask(UpdateWeights(4, "/again"), UpdateWeights(3, "/older"), UpdateWeights(5, "/w5"))
    life.fold(WeightsSwapped(life.engine.now_us + 1, 5, "no such file"))
    life.ask(
        LoadAdapterControl("law", 1, source="/a1"),
        LoadAdapterControl("art", 2, source="/b2"),
        LoadAdapterControl("art", 3, source="/b3"),
        LoadAdapterControl("old", 1, source="/c1"),
        UnloadAdapterControl("law"),
        UnloadAdapterControl("old"),
        LoadAdapterControl("law", 2, source="/a2"),
    )
    ended_us = life.engine.now_us
    life.die()
    newest = segments_of(tmp_path)[-1]
    with newest.open("ab") as file:
        file.write(b"torn")

    keeper = Keeper(tmp_path, content="digests", death="killed")
    assert keeper.recovered is None
    assert (keeper.start_us, keeper.last_request_id) == (ended_us, 2)
    assert keeper.weights == WeightsLog(4, "/w4", {5: "/w5"})
    assert keeper.adapters.newest() == {"law": (2, "/a2"), "art": (3, "/b3")}
    assert keeper.adapters.sources["law"] == {2: "/a2"}
    assert keeper.adapters.sources["art"] == {2: "/b2", 3: "/b3"}
    engine, journal = keeper.begin(WITH_ADAPTERS)
    restart = EngineRestarted(ended_us, 1)
    assert [one.event for one in read_journal(tmp_path).events()][-1] == restart
    assert (engine.generation, engine.now_us, engine.last_request_id) == (1, ended_us, 2)
    assert engine.memory.weights_version == 4
    assert journal.image.weights == keeper.weights
    assert keeper.earlier_generation() == EarlierGeneration(keeper.weights, keeper.adapters, ())
    keeper.settled()
    journal.close()


def test_an_answer_of_the_loader_from_before_a_restart_changes_no_weights(tmp_path: Path) -> None:
    life = Life(Keeper(tmp_path, content="digests"))
    life.ask(UpdateWeights(4, "/w4"))
    swapped = WeightsSwapped(life.engine.now_us + 1, 4)
    life.fold(swapped, EngineRestarted(life.engine.now_us + 1, 1), swapped)
    life.die()
    assert Keeper(tmp_path, content="digests").weights == WeightsLog(4, "/w4")


# ---------------------------------------------------------------------------------------------- a journal with content


@pytest.mark.parametrize(("age_s", "later_us"), [(5, 5_000_000), (0.25, 250_000), (0, 0), (-7, 0)])
def test_the_time_goes_on_from_the_newest_segment(
    age_s: float, later_us: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may have been set back meanwhile."""
    life = Life(Keeper(tmp_path))
    life.fold(LaneReady(1000))
    life.journal.begin_segment()
    life.fold(LaneReady(2000))
    life.die()
    now_s, readings_s = 2_000_000_000.0, iter((10.0, 12.5))
    for path, one in zip(segments_of(tmp_path), (900, age_s), strict=True):
        os.utime(path, (now_s - one, now_s - one))
    monkeypatch.setattr(startup, "time", SimpleNamespace(time=lambda: now_s, monotonic=lambda: next(readings_s)))
    keeper = Keeper(tmp_path)
    assert keeper.start_us == 2000 + later_us
    assert keeper.took_s == 2.5


def test_the_host_goes_on_with_weights_and_adapters(tmp_path: Path) -> None:
    life = Life(Keeper(tmp_path), WITH_ADAPTERS)
    life.ask(UpdateWeights(4, "/w4"))
    life.fold(WeightsSwapped(life.engine.now_us + 1, 4))
    life.ask(LoadAdapterControl("law", 1, source="/a1"))
    life.die()
    keeper = Keeper(tmp_path, death="killed")
    assert keeper.weights == WeightsLog(4, "/w4")
    assert keeper.adapters == AdaptersLog({"law": {1: "/a1"}})
    again = Life(keeper, WITH_ADAPTERS)
    assert again.journal.image.weights is keeper.weights
    assert again.journal.image.adapters is keeper.adapters
    again.die()
    Life(without := Keeper(tmp_path / "without")).die()
    assert without.earlier_generation() == EarlierGeneration(WeightsLog(), AdaptersLog(), ())
    assert Keeper(tmp_path / "without").adapters == AdaptersLog()


@pytest.mark.parametrize("header", [HEADER, WITH_ADAPTERS])
def test_the_image_of_a_new_journal_is_that_of_the_host(header: JournalHeader, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    life = Life(keeper, header)
    assert life.journal.image.weights is keeper.weights
    assert life.journal.image.adapters is (keeper.adapters if header.config.max_loras else msgspec.UNSET)
    life.die()


def test_the_settings_of_a_journal_are_those_of_its_engine(tmp_path: Path) -> None:
    Life(Keeper(tmp_path)).die()
    keeper = Keeper(tmp_path)
    settings = keeper.settings({"page_size": 2})
    assert msgspec.UNSET not in settings.values()
    assert SchedConfig(**settings) == HEADER.config
    with pytest.raises(ConfigError, match="`pages` 65 \\(was 64\\)"):
        keeper.settings({"pages": 65})
    with pytest.raises(ConfigError, match="`max_loras` 3 \\(was None\\)"):
        keeper.begin(WITH_ADAPTERS)
    assert len(segments_of(tmp_path)) == 1


def test_old_segments_stay_until_clients_need_no_ended_request(tmp_path: Path) -> None:
    life = Life(Keeper(tmp_path))
    for number in range(4):
        life.answer(f"server/0/{number}", 41)
        life.journal.begin_segment(expire=False)
    life.die()
    keeper = Keeper(tmp_path, death="killed", retention=Retention(bytes_max=0))
    life = Life(keeper)
    assert int(segments_of(tmp_path)[0].stem) == 0
    keeper.settled()
    assert int(segments_of(tmp_path)[0].stem) > 0
    life.die()


def test_a_torn_tail_is_cut_off_and_the_journal_goes_on(tmp_path: Path) -> None:
    life = Life(Keeper(tmp_path))
    life.fold(LaneReady(9))
    life.die()
    whole = segments_of(tmp_path)[-1].read_bytes()
    segments_of(tmp_path)[-1].write_bytes(whole + b"torn!")
    keeper = Keeper(tmp_path, death="killed")
    assert keeper.recovered is not None
    assert keeper.recovered.lost_bytes == 5
    assert segments_of(tmp_path)[-1].read_bytes() == whole
    Life(keeper).die()
    assert read_journal(tmp_path).tail.verdict != "torn"


def test_recovery_at_an_older_snapshot_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(Keeper(tmp_path))
    for number in range(3):
        life.answer(f"server/0/{number}", 41)
        life.journal.begin_segment()
    life.die()
    max((tmp_path / "journal").glob("snapshot-*")).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        Keeper(tmp_path)
    assert "recovery began at an older snapshot: segment 3: its snapshot is missing or altered" in caplog.text


def test_a_journal_of_rules_that_this_core_lacks_is_not_recovered(tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, behaviour_flags=("of_a_later_core",))
    with JournalWriter.create(tmp_path, header) as writer:
        event = LaneReady(1)
        writer.append(event, Engine(header.config).step(event).digest)
    with pytest.raises(JournalError, match="behaviour flags that this core does not have: of_a_later_core"):
        recover(tmp_path)


# --------------------------------------------------------------------------- answers that ended before the snapshot


def answered(run: Path, origins: Sequence[str], samples: int = 1) -> None:
    """Write a journal with an answered request in each segment, and a last segment without one.

    The tokens of request N are 40 + N.
    """
    life = Life(Keeper(run))
    for number, origin in enumerate(origins):
        life.answer(origin, 40 + number, samples)
        life.journal.begin_segment(expire=False)
    life.fold(LaneReady(life.engine.now_us))
    life.die()


def test_an_ended_answer_is_restored_from_a_snapshot_before_its_arrival(tmp_path: Path) -> None:
    """The requests of server 0 ended in the segments 1 and 2, and recovery begins with segment 4."""
    answered(tmp_path, ["server/1/0", "server/0/0", "server/0/1", "server/1/1"], samples=2)
    recovered = recover(tmp_path)
    assert recovered.journal.first_segment == 4
    assert not recovered.answers
    for origin, first, token in (("server/0/1", 4, 42), ("server/0/0", 2, 41)):
        assert recovered.find(origin, [0, 1]) == first
        assert [recovered.answers[first + sample].tokens for sample in range(2)] == [[token], [token]]
        assert all(recovered.answers[first + sample].end is not None for sample in range(2))
        assert recovered.origins[origin] == (first, 2)


def test_an_answer_in_an_expired_segment_is_an_error_and_an_unknown_request_is_none(tmp_path: Path) -> None:
    answered(tmp_path, ["server/0/0", "server/0/1", "server/0/2"])
    drop_segments(tmp_path, 1)
    recovered = recover(tmp_path)
    assert recovered.find("server/0/1", [0]) == 1
    with pytest.raises(JournalError, match="the answer of server/0/0 is in a part of the journal that has expired"):
        recovered.find("server/0/0", [0])
    assert recovered.find("server/0/3", [0]) is None
    for number in range(3):
        assert recovered.find(f"server/1/{number}", [0]) is None, "no request of this sender has arrived"


def test_of_two_requests_with_an_origin_the_newest_is_looked_for(tmp_path: Path) -> None:
    """A request that cannot go on starts anew. Its first answer is behind a damaged snapshot, the second is not."""
    answered(tmp_path, ["server/0/0", "server/0/1", "server/0/1", "server/0/2"])
    drop_segments(tmp_path, 1)
    min((tmp_path / "journal").glob("snapshot-*")).write_bytes(b"")
    recovered = recover(tmp_path)
    assert recovered.find("server/0/1", [0]) == 2
    assert recovered.answers[2].tokens == [42]


def test_an_answer_behind_a_damaged_snapshot_is_restored_from_the_one_before(tmp_path: Path) -> None:
    answered(tmp_path, ["server/0/0", "server/0/1", "server/0/2", "server/0/3"])
    drop_segments(tmp_path, 1)
    second = sorted((tmp_path / "journal").glob("snapshot-*"))[1]
    second.write_bytes(b"")
    recovered = recover(tmp_path)
    assert recovered.find("server/0/2", [0]) == 2
    assert recovered.answers[2].tokens == [42]
    min((tmp_path / "journal").glob("snapshot-*")).write_bytes(b"")
    recovered = recover(tmp_path)
    with pytest.raises(JournalError, match="the snapshots before it cannot be used"):
        recovered.find("server/0/2", [0])
