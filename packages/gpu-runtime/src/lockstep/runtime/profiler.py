"""Traces of what CPU and GPU do, by torch.profiler, between two launches: files for chrome://tracing and Perfetto.

The core orders it (`StartProfile`, `StopProfile`), so that a journal has the moment; options arrive here before.

    launches   0   1   2   3   4   5   6   7 ...       start_step=2, steps=3
    recorded           [===========]                   trace-01
    by stage           [E ][D  D   D ]  [E  E ]        extend-01, decode-01, extend-02: `steps` launches of each stage

Each launch is a span named for its batch: "extend b12: 3 rows, 512 new tokens". A recording ends behind everything that
was launched in it; on a GPU that is waited for. While nothing is recorded, it costs nothing.

Whatever goes wrong here, a full disk or a tracer that cannot start, is logged and kept in `error`; serving goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.errors import ConfigError

log = logging.getLogger("lockstep.runtime")

Activity = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to record.

    Args:
        folder: where traces are written; made if missing.
        start_step: launches that pass before the first that is recorded.
        steps: launches to record, with `by_stage` of each stage; None: until it is stopped.
        activities: of these processors; none named: of all that there are.
        record_shapes: with the shapes of what operators are given. Slower.
        with_stack: with the Python lines that called them. Much slower.
        by_stage: extends (mixed batches among them) and decodes go into files of their own.
    """

    folder: Path
    start_step: int = 0
    steps: int | None = None
    activities: tuple[Activity, ...] = ()
    record_shapes: bool = False
    with_stack: bool = False
    by_stage: bool = False

    def check(self, device: torch.device) -> None:
        """Raise ConfigError, naming the field, for what cannot be recorded on this device."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(
                f"`folder` {self.folder} of a profile is a file\nhint: name a folder; it is made if missing"
            )
        if self.start_step < 0:
            raise ConfigError(f"`start_step` must be at least 0, got `{self.start_step}`")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(
                f"`steps` must be at least 1, got `{self.steps}`\nhint: leave it out to record everything"
            )
        for name in self.activities:
            if name not in get_args(Activity):
                raise ConfigError(f"`activities` must be of {', '.join(get_args(Activity))}, got `{name}`")
            if name == "gpu" and device.type != "cuda":
                raise ConfigError(f"`activities` names gpu, but the model is on `{device}`\nhint: leave it out")


class TorchProfiler:
    """`host.Profiler` over torch.profiler. All but `configure` is called in the host's thread.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.files: list[Path] = []  # of the newest profile, in the order they were written
        self.error = ""  # why the newest profile has none, or not all
        self._options: ProfileOptions | None = None
        self._on = False
        self._launches = 0  # since the start
        self._recorded: dict[str, int] = {}  # launches by stage
        self._running: profile | None = None
        self._stage = ""  # of what runs

    def configure(self, options: ProfileOptions) -> None:
        """What the next profile shall record. Raises ConfigError; also where one is on."""
        options.check(self.device)
        if self._on:
            raise ConfigError("a profile is running already\nhint: stop it first")
        self._options = options

    @property
    def over(self) -> bool:
        """Whether it is on, and has recorded all that was requested."""
        options = self._options
        if options is None or options.steps is None or not self._on:
            return False
        stages = ("extend", "decode") if options.by_stage else ("trace",)
        return all(self._recorded.get(stage, 0) >= options.steps for stage in stages)

    def start(self) -> None:
        """From the next launch on."""
        self.files, self.error = [], ""
        if self._options is None:
            self.error = "nobody said where traces go"
            log.error("no profile: %s", self.error)
            return
        self._launches, self._recorded, self._on = 0, {}, True

    def stop(self) -> None:
        """Behind every batch launched so far; writes what was seen. Harmless where nothing is on."""
        self._end()
        self._on = False

    @contextmanager
    def batch(self, plan: BatchPlan) -> Iterator[None]:
        """Around each launch."""
        if not self._on:
            yield
            return
        recording = self._recording(plan)
        if not recording:
            yield
            return
        tokens = int((plan.stops - plan.starts).sum())
        with record_function(f"{plan.mode} b{plan.batch_id}: {len(plan.rows)} rows, {tokens} new tokens"):
            yield
        options = self._options
        if options is not None and self._recorded[self._stage] == options.steps:
            self._end()

    def _recording(self, plan: BatchPlan) -> bool:
        """Whether this launch is to be recorded; begins and ends recordings as it needs."""
        options = self._options
        assert options is not None
        self._launches += 1
        if self._launches <= options.start_step:
            return False
        stage = "trace" if not options.by_stage else "extend" if plan.extend_rows else "decode"
        done = self._recorded.get(stage, 0)
        if stage != self._stage:
            self._end()
        if options.steps is not None and done >= options.steps:
            return False
        if self._running is None and not self._begin(options, stage):
            return False
        self._recorded[stage] = done + 1
        return True

    def _begin(self, options: ProfileOptions, stage: str) -> bool:
        names = options.activities or (("cpu", "gpu") if self.device.type == "cuda" else ("cpu",))
        activities = [ProfilerActivity.CPU if name == "cpu" else ProfilerActivity.CUDA for name in names]
        try:
            self._wait()  # what was launched before is not part of it
            running = profile(activities=activities, record_shapes=options.record_shapes, with_stack=options.with_stack)
            running.start()
        except Exception as error:
            self._fail("cannot record", error)
            return False
        self._running, self._stage = running, stage
        return True

    def _end(self) -> None:
        """End what runs, and write it."""
        running, self._running = self._running, None
        stage, self._stage = self._stage, ""
        if running is None or self._options is None:
            return
        try:
            self._wait()
            running.stop()
            path = _free(self._options.folder, stage)
            running.export_chrome_trace(str(path))
        except Exception as error:
            self._fail("lost a recording", error)
            return
        self.files.append(path)
        log.info("profile written to %s", path)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _fail(self, what: str, error: Exception) -> None:
        self.error = f"{what}: {type(error).__name__}: {error}".partition("\n")[0]
        self._on = False
        log.error("profile: %s", self.error)


def _free(folder: Path, stage: str) -> Path:
    """A file that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (path := folder / f"{stage}-{number:02}.json.gz").exists():
        number += 1
    return path


def options_of(folder: str | Path, **given: Any) -> ProfileOptions:
    """Options from keywords; what is not given, or None, is the default. Raises ConfigError for an unknown one."""
    for name in given:
        if name not in ProfileOptions.__dataclass_fields__:
            raise ConfigError(f"there is no option `{name}` of a profile")
    return ProfileOptions(folder=Path(folder), **given)
