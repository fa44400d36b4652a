"""Startup of an engine with a journal: a new engine, or the continuation of the one recorded in the same folder.

keeper = Keeper(run, death="killed")            reads the journal of the folder, if there is one
clock = HostClock(start_us=keeper.start_us)     continues the time
engine, journal = keeper.begin(header)          folds EngineRestarted, and takes a snapshot
keeper.recovered.find(...), keeper.verdict      for clients with open requests
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lockstep.core.contract.commands import Command
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    ControlRequested,
    EngineRestarted,
    LoadAdapterControl,
    RequestArrived,
    RequestId,
    UnloadAdapterControl,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import Durability, JournalCorrupt, JournalError, JournalHeader
from lockstep.core.journal.segments import find_journal
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import AdaptersLog
from lockstep.host.durable import Content, DurableJournal, HostImage, Retention
from lockstep.host.recovery import Death, Recovered, Verdict, judge, recover
from lockstep.host.services import EarlierGeneration
from lockstep.host.weights import WeightsLog

log = logging.getLogger("lockstep.host")

Started = tuple[Engine, DurableJournal]


@dataclass(slots=True)
class Keeper:
    """The journal of a run folder: the recorded one, recovered, and its continuation.

    Args:
        death: how the previous engine ended; None: unknown, as after a restart of the whole server.
    Raises: JournalError, JournalCorrupt, Divergence for a journal that cannot be continued; ConfigError for another
        `content` than the journal's.
    """

    run: Path
    content: Content = "full"
    durability: Durability = "none"
    retention: Retention = field(default_factory=Retention)
    death: Death | None = None
    recovered: Recovered | None = None  # None: a new journal, or a journal of digests
    verdict: Verdict = field(default_factory=Verdict)
    before: JournalHeader | None = None  # header of the recorded journal
    start_us: int = 0
    last_request_id: int = -1  # in a journal without content
    took_s: float = 0.0  # time of the recovery
    journal: DurableJournal | None = None  # the recorded journal, once it is continued
    orders: tuple[Command, ...] = ()  # commands of the step at the restart, which the host performs first
    weights: WeightsLog = field(default_factory=WeightsLog)  # for the host
    adapters: AdaptersLog = field(default_factory=AdaptersLog)  # for the host; empty without adapter slots

    def __post_init__(self) -> None:
        if not any((self.run / "journal").glob("*.log")):
            return
        try:
            self._read()
        except JournalCorrupt as error:
            raise JournalError(
                f"{error}\nhint: `lockstep journal salvage {self.run} --out DIR` copies everything before it; "
                "`--journal DIR` continues the copy"
            ) from error

    def _read(self) -> None:
        """Read the recorded journal."""
        began_s = time.monotonic()
        folder = find_journal(self.run)
        newest = max(folder.glob("*.log")).stat().st_mtime
        if (header := read_journal(folder, first_segment=_first_whole(folder)).header).content != self.content:
            raise ConfigError(
                f"`journal_content` is {self.content}, but the journal in {self.run} has {header.content}\n"
                "hint: choose another folder"
            )
        self.before = header
        if self.content == "full":
            self.recovered = recover(folder)
            self.weights = self.recovered.image.weights
            if self.recovered.image.adapters is not msgspec.UNSET:
                self.adapters = self.recovered.image.adapters
            self.start_us = self.recovered.engine.now_us + max(0, round((time.time() - newest) * 1e6))
            for why in self.recovered.refused:
                log.warning("recovery began at an older snapshot: %s", why)
        else:
            self._read_ids(folder)
        self.took_s = time.monotonic() - began_s

    @property
    def config(self) -> SchedConfig | None:
        """The settings in the header of the recorded journal; None without one."""
        return None if self.before is None else self.before.config

    def suspects(self) -> dict[RequestId, int]:
        """Return the suspects, by request id. The caller removes cleared ones; the next snapshot stores the rest."""
        return {} if self.recovered is None else self.recovered.image.suspects

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return all settings of the scheduler in the journal, so that sizes derived from device memory stay the same.

        Args:
            given: settings that were set explicitly.
        Raises: ConfigError if a given setting differs from the journal's.
        """
        assert self.config is not None
        self.check(msgspec.structs.replace(self.config, **given))
        names = [one.name for one in msgspec.structs.fields(SchedConfig)]
        return {name: value for name in names if (value := getattr(self.config, name)) is not msgspec.UNSET}

    def check(self, config: SchedConfig) -> None:
        """Raise ConfigError if settings differ from those of the recorded journal."""
        if self.config is None or config == self.config:
            return
        names = [one.name for one in msgspec.structs.fields(SchedConfig)]
        other = [name for name in names if getattr(config, name) != getattr(self.config, name)]
        differing = ", ".join(f"`{name}` {getattr(config, name)} (was {getattr(self.config, name)})" for name in other)
        raise ConfigError(
            f"the journal in {self.run} was begun with other settings: {differing}\n"
            "hint: a journal belongs to one engine; use these settings again, or another folder"
        )

    def begin(self, header: JournalHeader) -> Started:
        """Return the engine and its journal, ready for the next event. Raises ConfigError, JournalError."""
        header = msgspec.structs.replace(header, content=self.content)
        self.check(header.config)
        if self.before is None:
            writer = JournalWriter.create(self.run, header, durability=self.durability)
            engine = Engine(header.config)
            image = HostImage(weights=self.weights)
            if header.config.max_loras:
                image.adapters = self.adapters
            return engine, DurableJournal(writer, engine, self.retention, image=image)
        if self.recovered is None:
            return self._begin_without_content(header)
        recovered = self.recovered
        engine, image = recovered.engine, recovered.image
        if self.death is not None:
            self.verdict = judge(recovered, self.death)
        writer = JournalWriter.go_on(recovered.journal, durability=self.durability)
        image.suspects, image.origins = dict(self.verdict.suspects), dict(recovered.origins)
        if image.suspects and image.running_max is None:
            image.running_max = engine.config.max_running_requests
        journal = DurableJournal(writer, engine, self.retention, image=image)
        event = EngineRestarted(self.start_us, engine.generation + 1)
        step = engine.step(event)
        journal.append(event, step.digest)
        journal.flush()
        journal.begin_segment(expire=False)  # clients may still need requests that ended
        self.journal, self.orders = journal, tuple(step.commands)
        return engine, journal

    def earlier_generation(self) -> EarlierGeneration:
        """Return the state that the host continues. Call it after `begin`."""
        return EarlierGeneration(self.weights, self.adapters, self.orders)

    def settled(self) -> None:
        """Let old segments expire. Call it once no client needs requests that ended before the restart."""
        if self.journal is not None:
            self.journal.expire()

    def _read_ids(self, folder: Path) -> None:
        """Read the newest time and request id, the weights and the adapters from a journal without content."""
        for record in read_journal(folder, repair=True).events():
            self.start_us = record.event.time_us
            match record.event:
                case RequestArrived() as arrived:
                    self.last_request_id = arrived.request_id + sample_count(arrived) - 1
                case ControlRequested(control=UpdateWeights(version, source)) if version > self.weights.version:
                    self.weights.requested[version] = source
                case ControlRequested(control=LoadAdapterControl(adapter=name, version=version, source=source)):
                    self.adapters.sources.setdefault(name, {})[version] = source
                case ControlRequested(control=UnloadAdapterControl(name)):
                    self.adapters.sources[name] = {}
                case WeightsSwapped(version=version, error="") if version > self.weights.version:
                    self.weights = WeightsLog(version, self.weights.requested.get(version, ""))

    def _begin_without_content(self, header: JournalHeader) -> Started:
        """Return an empty engine that continues a journal of digests. Its ids continue, so that none is used twice."""
        engine = Engine(header.config)
        engine.now_us, engine.last_request_id = self.start_us, self.last_request_id
        engine.memory.weights_version = self.weights.version
        writer = JournalWriter.go_on(read_journal(self.run), durability=self.durability)
        kept = DurableJournal(writer, engine, self.retention, image=HostImage(weights=self.weights))
        event = EngineRestarted(engine.now_us, engine.generation + 1)
        kept.append(event, engine.step(event).digest)
        kept.flush()
        return engine, kept


def _first_whole(folder: Path) -> int:
    """Return the number of the newest segment with a complete header. All segments have the same settings."""
    segments = sorted(folder.glob("*.log"))
    newest = segments[-1]
    if newest.stat().st_size < 4096 and len(segments) > 1:  # it may be torn within its header
        newest = segments[-2]
    return int(newest.stem)
