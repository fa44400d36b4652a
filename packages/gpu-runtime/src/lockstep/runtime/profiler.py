"""Traces of CPU and GPU by torch.profiler, between two launches: files for chrome://tracing and Perfetto.

The core orders start and stop (`StartProfile`, `StopProfile`), so that the journal has the moment. Options are set
before.

    launches   0   1   2   3   4   5   6   7 ...       start_step=2, steps=3
    recorded           [===========]                   trace-01
    by stage           [E ][D  D   D ]  [E  E ]        extend-01, decode-01, extend-02: `steps` launches of each stage

Each launch is a span named for its batch: "extend b12: 3 rows, 512 new tokens". A recording ends after all work
launched in it; on a GPU the host waits for that. While nothing is recorded, the profiler costs nothing.

Any error here, such as a full disk or a tracer that cannot start, is logged and stored in `error`; serving continues.
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
    """Options of a profile.

    Args:
        folder: where traces are written; made if missing.
        start_step: launches before the first that is recorded.
        steps: launches to record, with `by_stage` of each stage; None: until the profile is stopped.
        activities: processors to record; empty: all.
        record_shapes: record the shapes of the operators' inputs. Slower.
        with_stack: record the Python lines that called the operators. Much slower.
        by_stage: write extends (mixed batches included) and decodes to separate files.
    """

    folder: Path
    start_step: int = 0
    steps: int | None = None
    activities: tuple[Activity, ...] = ()
    record_shapes: bool = False
    with_stack: bool = False
    by_stage: bool = False

    def check(self, device: torch.device) -> None:
        """Raise ConfigError, with the field, for options that this device does not support."""
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
    """A `host.Profiler` over torch.profiler. All methods except `configure` are called in the host's thread.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.files: list[Path] = []  # of the newest profile, in the order they were written
        self.error = ""  # why the newest profile has no files, or not all
        self._options: ProfileOptions | None = None
        self._on = False
        self._launches = 0  # since the start
        self._recorded: dict[str, int] = {}  # launches by stage
        self._running: profile | None = None
        self._stage = ""  # stage of the running recording

    def configure(self, options: ProfileOptions) -> None:
        """Set the options of the next profile. Raises ConfigError, also while a profile runs."""
        options.check(self.device)
        if self._on:
            raise ConfigError("a profile is running already\nhint: stop it first")
        self._options = options

    @property
    def over(self) -> bool:
        """Return whether a profile is on and has recorded all requested launches."""
        options = self._options
        if options is None or options.steps is None or not self._on:
            return False
        stages = ("extend", "decode") if options.by_stage else ("trace",)
        return all(self._recorded.get(stage, 0) >= options.steps for stage in stages)

    def start(self) -> None:
        """Start the profile with the next launch."""
        self.files, self.error = [], ""
        if self._options is None:
            self.error = "no folder for traces was configured"
            log.error("no profile: %s", self.error)
            return
        self._launches, self._recorded, self._on = 0, {}, True

    def stop(self) -> None:
        """End the recording after all batches launched so far, and write it. Does nothing if no profile is on."""
        self._end()
        self._on = False

    @contextmanager
    def batch(self, plan: BatchPlan) -> Iterator[None]:
        """Record the launch inside this context, if it belongs to the profile."""
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
        """Return whether to record this launch; starts and ends recordings as needed."""
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
            self._wait()  # earlier launches are not part of it
            running = profile(activities=activities, record_shapes=options.record_shapes, with_stack=options.with_stack)
            running.start()
        except Exception as error:
            self._fail("cannot record", error)
            return False
        self._running, self._stage = running, stage
        return True

    def _end(self) -> None:
        """End the running recording, and write it."""
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
    """Return a path that does not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (path := folder / f"{stage}-{number:02}.json.gz").exists():
        number += 1
    return path


def options_of(folder: str | Path, **given: Any) -> ProfileOptions:
    """Return options from keywords; missing ones have their default. Raises ConfigError for an unknown one."""
    for name in given:
        if name not in ProfileOptions.__dataclass_fields__:
            raise ConfigError(f"there is no option `{name}` of a profile")
    return ProfileOptions(folder=Path(folder), **given)
