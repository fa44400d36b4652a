"""What a section writes while it runs: figures, checks, what was skipped and what failed, on disk after each entry."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.attention import WRONG


@dataclass(slots=True)
class Check:
    """Something that must hold."""

    name: str
    ok: bool
    detail: str


@dataclass
class Section:
    """The findings of one section.

    Args:
        out: the folder of the whole run, for files beside the JSON.
        part: where the findings go.
        limit_s: seconds it may take; `left_s` counts down.
        small: sizes at which no figure means anything, for a try without a GPU.
    """

    name: str
    device: torch.device
    small: bool
    out: Path
    part: Path
    limit_s: float
    began: float = field(default_factory=time.monotonic)
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    current: str = "starting"

    @property
    def gpu(self) -> bool:
        """Whether there is one."""
        return str(self.device.type) == "cuda"

    def left_s(self) -> float:
        """Seconds of the limit that are left."""
        return self.limit_s - (time.monotonic() - self.began)

    def put(self, name: str, value: Any) -> None:
        """Keep a figure; dots in the name make levels."""
        *path, last = name.split(".")
        level = self.figures
        for step in path:
            level = level.setdefault(step, {})
        level[last] = value
        self.save()

    def check(self, name: str, ok: bool, detail: str) -> None:
        """Keep whether something holds."""
        self.checks.append(Check(name, bool(ok), detail))
        self.save()

    def skip(self, name: str, reason: str) -> None:
        """Report what was not done."""
        self.skipped[name] = reason.partition("\n")[0]
        self.save()

    def refused(self, name: str, refusal: ConfigError) -> None:
        """Something cannot run here, which is skipped with the reason; if because it computes nonsense, that failed."""
        if WRONG in str(refusal):
            self.check(name, False, str(refusal).partition("\n")[0])
        else:
            self.skip(name, str(refusal))

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Go on with what comes behind if this fails, or if there is no time for it: see `needs`."""
        self.current = name
        self.save()
        try:
            yield
        except Late as late:
            self.skip(name, str(late))
        except Exception as error:  # whatever it was, it is a finding
            where = traceback.format_exc().strip().splitlines()
            self.failures[name] = "\n".join([f"{type(error).__name__}: {error}", *where[-9:]])
            self.save()

    def needs(self, seconds: float) -> None:
        """Leave a `trying` that cannot end in time."""
        if self.left_s() < seconds:
            raise Late(f"no time: {self.left_s():.0f} s were left, it takes about {seconds:.0f} s")

    def save(self) -> None:
        """Write everything."""
        findings = {
            "section": self.name,
            "seconds": round(time.monotonic() - self.began, 2),
            "doing": self.current,
            "figures": self.figures,
            "checks": [{"name": one.name, "ok": one.ok, "detail": one.detail} for one in self.checks],
            "skipped": self.skipped,
            "failures": self.failures,
        }
        write_json(self.part, findings)


class Late(Exception):
    """There is no time for it any more."""


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one go."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
