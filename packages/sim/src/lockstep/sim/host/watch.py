"""A text line per step on standard error, and more text with higher levels of LOCKSTEP_DEBUG."""

from __future__ import annotations

import sys
from typing import TextIO

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import Observed
from lockstep.core.contract.render import Names
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.state_text import debug_header, debug_text
from lockstep.sim.metrics.fold import MetricsFold

LEVELS = range(5)  # 0: nothing; 1: a line per step; 2: also decisions; 3: also tables; 4: also pages


class WatchedMetrics(MetricsFold):
    """Metrics that also print each step. A host with `decode_runs` takes stretches in one go and prints fewer steps."""

    def __init__(self, engine: Engine, level: int, out: TextIO | None = None, *, warm_up: int = 0) -> None:
        super().__init__(kv_pages=engine.config.pages, warm_up=warm_up, needs_media=engine.config.role != "decode")
        self._engine = engine
        self._level = level
        self._out = out if out is not None else sys.stderr
        self._names = Names()
        self._header = ""

    def observe(self, event: Observed, step: Step) -> None:
        """Measure the step, and print it."""
        super().observe(event, step)
        self._names.observe(event)
        header = debug_header(self._engine, step)
        if header != self._header:
            self._header = header
            print(header, file=self._out)
        for line in debug_text(self._engine, event, step, self._names, self._level):
            print(line, file=self._out)
