"""Store of finished trials by key, in memory and, with a folder, on disk. An interrupted plan continues from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.plan.trial import Trial, TrialResult

FOLDER = "simulations"
MARK = "lockstep-plan"  # file that marks the folder of a plan


class _TrialFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stored file: the result, and the trial for people and against collisions of keys."""

    trial: dict[str, Any]  # as returned by `Trial.record`
    result: TrialResult


class TrialStore:
    """Store of results, searched before a trial runs. An unreadable file counts as missing."""

    def __init__(self, folder: Path | None) -> None:
        self.reused = 0
        self.cpu_s = 0.0  # of the trials run for this plan, without those found in the store
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
        """Return the result of a trial; None if it is not stored."""
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
        """Store a result. Files are written atomically."""
        self._known[trial.key] = result
        self.run += 1
        self.cpu_s += result.cpu_s
        if self._folder is not None:
            path = self._folder / f"{trial.key}.json"
            part = path.with_suffix(f".part-{os.getpid()}")
            part.write_bytes(msgspec.json.encode(_TrialFile(trial=trial.record(), result=result)))
            part.replace(path)
