"""How far the engines of a cluster may be ahead of the router.

A router that balances loads sends the next requests to the engines with less load first:

    loads 3 3 4 4 5        six requests go to the first four engines before the last one may get a request

Requests of an open loop arrive at known times. So an engine is not only advanced to the present, but in one go to the
first arrival that it may get. An end of an answer lowers its load. Then it stops at the first arrival that is routed
with this end. So ends are known ahead, and the router receives them in the order of their times, as without leads.

How many arrivals go elsewhere follows from the loads: `Router.sends_elsewhere`, `Router.first_kept`. No lead passes the
arrival at which all engines must be at one time, because the run may be given up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lockstep.core.cluster.router import Router, prefix_keys
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn

LEAD_MAX = 256  # arrivals that an engine may be ahead of the router


class Leads:
    """The leads of the engines of a cluster whose requests all arrive by the clock.

    Args:
        arrival_us: int64 [requests], times of arrival at the router, ascending.
        hop_us: time from the router to an engine, and back.
    """

    def __init__(self, router: Router, arrivals: Arrivals, arrival_us: NDArray[np.int64], hop_us: int) -> None:
        self.before_question = LEAD_MAX  # arrivals before the next one at which all engines must be at one time
        self._router, self._arrivals, self._hop_us = router, arrivals, hop_us
        self._arrival_us = array("q", arrival_us.tobytes())
        self._routed = 0
        self._ends = [0] * len(router.engines)  # ends that the router has not received, by engine
        policy = router.config.policy
        self._by_prefix, self._by_session = policy == "prefix_affinity", policy == "session_sticky"
        # Of the next requests, as far as they have been read: keys of their prompts, and marks for `first_kept`.
        self._prefixes: deque[tuple[int, ...]] = deque()
        self._marks: deque[int | str] = deque()

    def take(self, turn: Turn) -> tuple[int, ...]:
        """Record that the next request is routed. Return its prefix for the router; empty if the policy has no use."""
        self._routed += 1
        if self._marks:
            self._marks.popleft()
        if not self._by_prefix:
            return ()
        return self._prefixes.popleft() if self._prefixes else self._prefix(turn)

    def until_us(self, engine: int) -> int:
        """Return the time before which the engine receives no request that is not sent yet."""
        return self._received_us(self._routed + self._lead(engine))

    def ended(self, engine: int, seen_us: int) -> int:
        """Record an end that the router receives at `seen_us`. Return the least `until_us` from then on."""
        self._ends[engine] += 1
        return self._received_us(bisect_right(self._arrival_us, seen_us, self._routed))

    def received(self, engine: int) -> None:
        """Record that the router receives the next end of an engine now."""
        self._ends[engine] -= 1

    def _received_us(self, place: int) -> int:
        """Return the time at which a request reaches its engine, by its place in the run."""
        return self._arrival_us[place] + self._hop_us if place < len(self._arrival_us) else NEVER_US

    def _lead(self, engine: int) -> int:
        """Return how many of the next requests go to other engines for certain, up to LEAD_MAX."""
        if self._ends[engine]:
            return 0  # the router still counts a load that has ended
        lead = min(self._router.sends_elsewhere(engine), self.before_question, LEAD_MAX)
        if lead and (self._by_prefix or self._by_session):
            if len(self._marks) < lead:
                self._read(lead)
            kept = self._router.first_kept(engine, islice(self._marks, lead))
            if kept is not None:
                return kept
        return lead

    def _read(self, requests: int) -> None:
        """Read the next requests, as many as there are."""
        while len(self._marks) < requests:
            turn = self._arrivals.turn_ahead(len(self._marks))
            if turn is None:
                return
            if self._by_prefix:
                prefix = self._prefix(turn)
                self._prefixes.append(prefix)
                self._marks.append(prefix[0] if prefix else "")
            else:
                self._marks.append(turn.label)

    def _prefix(self, turn: Turn) -> tuple[int, ...]:
        return prefix_keys(prompt_ids(turn.prompt), self._router.config.block_tokens, turn.tenant)
