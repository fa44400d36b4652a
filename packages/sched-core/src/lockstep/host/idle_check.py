"""The check of the scheduler's invariants by an engine that has nothing to do.

A server computes all invariants (`lockstep.core.invariants`) now and then while no request is open, so that a leaked
page or a lock without an owner is reported within minutes, and not by the first request that finds no memory. The check
runs in the thread of the host, since the state is only consistent there:

    no work ──QUIET_S without a change──> check ──> counts, log          a request that arrives meanwhile waits for it

A state that was checked is not checked again until an event has changed it. A check that took t seconds is followed by
none within DUTY * t, so checks take at most 1/DUTY of the time, whatever the size of the cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core import invariants
from lockstep.core.contract.errors import InvariantError
from lockstep.core.scheduler.engine import Engine

log = logging.getLogger("lockstep.host")

QUIET_S = 0.4  # time without an event before a check; less than one sleep of the loop
DUTY = 1_000  # least ratio of the time between two checks to the time of one

SELF_CHECK: Callable[[Engine], None] = invariants.self_check


@dataclass(slots=True)
class CheckCounts:
    """Totals since the engine started."""

    checks: int = 0
    failures: int = 0
    seconds: float = 0.0


class IdleCheck:
    """Checks an engine while it is idle.

    Args:
        interval_s: least time between two checks, in seconds.
        clock_s: a monotonic clock.
        check: raises InvariantError for a state that breaks an invariant.
    Attributes:
        checked: called after each check, in the thread of the host.
    """

    def __init__(
        self,
        engine: Engine,
        interval_s: float,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        check: Callable[[Engine], None] = SELF_CHECK,
    ) -> None:
        self._engine, self._interval_s, self._clock_s, self._check = engine, interval_s, clock_s, check
        self.counts = CheckCounts()
        self.checked: Callable[[], object] = lambda: None
        self._events = -1  # events of the engine at the last look
        self._checked_events = -1  # events of the state that was checked last
        self._quiet_since_s = self._next_s = clock_s()

    # mechanism: idle-check (decided)
    def look(self, events: int) -> None:
        """Check the engine if it is due. Call it whenever the host has nothing to do.

        Args:
            events: number of events that the engine has stepped.
        """
        now_s = self._clock_s()
        if events != self._events:
            self._events, self._quiet_since_s = events, now_s
        if events == self._checked_events or now_s < self._next_s or now_s - self._quiet_since_s < QUIET_S:
            return
        try:
            self._check(self._engine)
        except InvariantError as error:
            self.counts.failures += 1
            log.error(
                "the scheduler's state breaks an invariant: %s\nhint: keep the journal of this engine, and run "
                "`lockstep journal verify` on it; a restart of the engine does not mend a state that it repeats",
                error,
            )
        took_s = self._clock_s() - now_s
        self.counts.checks += 1
        self.counts.seconds += took_s
        self._checked_events = events
        self._next_s = now_s + max(self._interval_s, DUTY * took_s)
        self.checked()
