"""Finished trials by key, in memory and, with a folder, on disk: a plan that was interrupted goes on where it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.plan.trial import Trial, TrialResult

FOLDER = "simulations"
MARK = "lockstep-plan"  # a file that marks the folder of a plan


class _TrialFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file: the trial beside its result, for people and against collisions."""

    trial: dict[str, Any]  # as `Trial.record` gives it
    result: TrialResult


class TrialStore:
    """Where results are looked up before anything is run. A file that cannot be read counts as missing."""

    def __init__(self, folder: Path | None) -> None:
        self.reused = 0
        self.cpu_s = 0.0  # of the trials run for this plan, not of those found
        self.run = 0
        self._known: dict[str, TrialResult] = {}
        self._folder = None if folder is None else folder / FOLDER
        if folder is not None:
            mark = folder / MARK
            if os.path.lexists(folder) and not mark.is_file() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(f"`{folder}` exists and does not hold a plan\nhint: choose another --out")
            try:
                (folder / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
                mark.touch()
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise ConfigError(
                    f"`out` cannot be written to, `{folder}`: {why}\nhint: choose another --out"
                ) from None

    def find(self, trial: Trial) -> TrialResult | None:
        """The result, if it is there."""
        key = trial.key
        known = self._known.get(key)
        if known is None and self._folder is not None:
            path = self._folder / f"{key}.json"
            try:
                kept = msgspec.json.decode(path.read_bytes(), type=_TrialFile)
            except (OSError, msgspec.MsgspecError):
                return None
            if kept.trial != msgspec.json.decode(msgspec.json.encode(trial.record())):
                return None
            known = self._known[key] = kept.result
            self.reused += 1
        return known

    def add(self, trial: Trial, result: TrialResult) -> None:
        """Keep a result: whole or not at all."""
        self._known[trial.key] = result
        self.run += 1
        self.cpu_s += result.cpu_s
        if self._folder is not None:
            path = self._folder / f"{trial.key}.json"
            part = path.with_suffix(f".part-{os.getpid()}")
            part.write_bytes(msgspec.json.encode(_TrialFile(trial=trial.record(), result=result)))
            part.replace(path)
