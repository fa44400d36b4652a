"""Autoscaling: the number of replicas, and which of them start and stop. A pure function of the load at a router.

    scaler = Autoscaler(ScalingConfig(target=24, maximum=8))
    for changed in scaler.step(LoadObserved(time_us=15_000_000, open=(30, 0), open_tokens=90_000, arrived=41)):
        router.step(changed)                     # an EngineChanged: up, draining, down

    off -> starting -> up -> draining -> off     paid for from `starting` on until `off`
    starting -> off                              no longer needed before it was ready
    draining -> up                               needed again: it takes requests at once

`target_replicas` is the policy: the load divided by the target of one replica. The rules around it are those of the
Horizontal Pod Autoscaler of Kubernetes. Within a tolerance nothing changes. The largest answer of the last
`cooldown_us` counts, so replicas start at once and stop late. A draining replica gets no new request and stops when its
last request has ended, so no request is ever aborted. Replicas with the fewest requests drain first, of equals those
with the highest numbers.
"""

from __future__ import annotations

from collections import deque
from math import ceil, isfinite
from typing import Literal, get_args

import msgspec

from lockstep.core.cluster.router import ENGINES_MAX, EngineChanged
from lockstep.core.contract.errors import ConfigError, ContractError

ScalingPolicy = Literal["open_requests", "open_tokens", "arrival_rate"]
SCALING_POLICIES: tuple[ScalingPolicy, ...] = get_args(ScalingPolicy)
"""The unit of `target` for one replica: open requests, tokens of open requests, or arriving requests per second."""

ReplicaState = Literal["off", "starting", "up", "draining"]
SECOND_US = 1_000_000


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of scaling. Raises ConfigError for values that cannot work."""

    policy: ScalingPolicy = "open_requests"
    target: float  # load of one replica; its unit follows from the policy, see SCALING_POLICIES
    minimum: int = 1  # replicas
    maximum: int  # replicas
    start_us: int = 60 * SECOND_US  # time from the decision until a new replica takes requests
    interval_us: int = 15 * SECOND_US  # time between two decisions: HPA's sync period
    window_us: int = 30 * SECOND_US  # time over which the load is averaged
    cooldown_us: int = 300 * SECOND_US  # time before replicas are removed: HPA's downscale stabilization
    tolerance: float = 0.1  # share of the load within which nothing changes, as in HPA

    def __post_init__(self) -> None:
        if self.policy not in SCALING_POLICIES:
            raise ConfigError(f"`policy` must be one of {', '.join(SCALING_POLICIES)}, got `{self.policy}`")
        if not (isfinite(self.target) and self.target > 0):
            raise ConfigError(f"`target` must be above 0 and finite, got `{self.target}`")
        for name, least, most in (("minimum", 1, ENGINES_MAX), ("maximum", self.minimum, ENGINES_MAX)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"`{name}` must be a whole number from {least} to {most}, got `{value}`")
        for name, least in (("start_us", 0), ("interval_us", 1), ("window_us", 0), ("cooldown_us", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"`{name}` must be at least {least} us, got `{value}`")
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"`tolerance` must be at least 0 and below 1, got `{self.tolerance}`\nhint: 0.1 is usual")


class LoadObserved(msgspec.Struct, frozen=True, kw_only=True):
    """The load at a router at one moment."""

    time_us: int
    open: tuple[int, ...]  # open requests by replica
    open_tokens: int  # tokens of open and of waiting requests
    arrived: int  # requests that have arrived since the beginning
    waiting: int = 0  # requests that wait at the router


# mechanism: autoscaling (decided)
def target_replicas(config: ScalingConfig, load: float, replicas: int) -> int:
    """Return the number of replicas for a load in the unit of `target`, given the present number of `replicas`."""
    needed = load / config.target
    if abs(needed - replicas) <= config.tolerance * replicas:
        return min(max(replicas, config.minimum), config.maximum)
    return min(max(ceil(needed), config.minimum), config.maximum)


class Autoscaler:
    """Starts and stops replicas by load. Replicas 0 to `minimum` - 1 are up at first. Loads must be fed in order."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config = config
        up = config.minimum
        self.state: list[ReplicaState] = ["up" if replica < up else "off" for replica in range(config.maximum)]
        self.now_us = 0
        self.starts = 0  # replicas that were started
        self.most = up  # most replicas that were paid for at once
        self._ready_us = [0] * config.maximum
        self._since_us = [0] * config.maximum  # by replica: the time from which it is paid for, unless off
        self._paid_us = 0  # replica-microseconds of stopped replicas
        self._decide_us = config.interval_us
        self._samples: deque[tuple[int, float]] = deque()  # (time in us, load)
        self._arrived: deque[tuple[int, int]] = deque([(0, 0)])  # (time in us, requests so far)
        self._answers: deque[tuple[int, int]] = deque()  # (time in us, replicas by the policy)

    @property
    def next_us(self) -> int:
        """The time of the next step: the next decision, or the next replica to be ready."""
        starting = [us for us, state in zip(self._ready_us, self.state, strict=True) if state == "starting"]
        return min([self._decide_us, *starting])

    def paid_us(self, until_us: int) -> int:
        """Return the replica-microseconds paid for until a time, which must not be before the last step."""
        running = [us for us, state in zip(self._since_us, self.state, strict=True) if state != "off"]
        return self._paid_us + sum(max(until_us - us, 0) for us in running)

    def step(self, fact: LoadObserved) -> tuple[EngineChanged, ...]:
        """Take in the load; return the facts for the router. Before `next_us` only empty draining replicas are stopped.

        Raises: ContractError for time that runs backwards, and for a wrong number of replicas.
        """
        if fact.time_us < self.now_us:
            raise ContractError(f"time ran backwards: {fact.time_us} us after {self.now_us} us; the host must clamp")
        if len(fact.open) != len(self.state):
            raise ContractError(f"load of {len(fact.open)} replicas, and there are {len(self.state)}")
        now_us = self.now_us = fact.time_us
        out: list[EngineChanged] = []
        for replica, state in enumerate(self.state):
            if state == "starting" and self._ready_us[replica] <= now_us:
                self._become(replica, "up", out)
            elif state == "draining" and not fact.open[replica]:
                self._become(replica, "off", out)
        if now_us >= self._decide_us:
            self._decide_us = now_us - now_us % self.config.interval_us + self.config.interval_us
            self._follow(fact, out)
        return tuple(out)

    def _follow(self, fact: LoadObserved, out: list[EngineChanged]) -> None:
        now_us, config = fact.time_us, self.config
        active = [replica for replica, state in enumerate(self.state) if state in ("starting", "up")]
        self._answers.append((now_us, target_replicas(config, self._load(fact), len(active))))
        while self._answers[0][0] < now_us - config.cooldown_us:
            self._answers.popleft()
        newest = self._answers[-1][1]
        needed = newest if newest > len(active) else min(max(answer for _, answer in self._answers), len(active))
        for _ in range(needed - len(active)):
            self._add(now_us, out)
        if needed < len(active):
            last = sorted(active, key=lambda replica: (self.state[replica] == "up", fact.open[replica], -replica))
            for replica in last[: len(active) - needed]:
                idle = self.state[replica] == "starting" or not fact.open[replica]
                self._become(replica, "off" if idle else "draining", out)

    def _load(self, fact: LoadObserved) -> float:
        """Return the mean load over the window, in the unit of the target."""
        now_us, config = fact.time_us, self.config
        since_us = now_us - config.window_us
        if config.policy == "arrival_rate":
            while len(self._arrived) > 1 and self._arrived[1][0] <= since_us:
                self._arrived.popleft()
            then_us, arrived = self._arrived[0]
            self._arrived.append((now_us, fact.arrived))
            return (fact.arrived - arrived) / max(now_us - then_us, 1) * SECOND_US
        load = float(fact.open_tokens if config.policy == "open_tokens" else sum(fact.open) + fact.waiting)
        self._samples.append((now_us, load))
        while self._samples[0][0] < since_us:
            self._samples.popleft()
        return sum(load for _, load in self._samples) / len(self._samples)

    def _add(self, now_us: int, out: list[EngineChanged]) -> None:
        """Start one replica: the first draining one if there is any, else the first that is off."""
        for candidate in ("draining", "off"):
            for replica, state in enumerate(self.state):
                if state == candidate:
                    if state == "off":
                        self._since_us[replica] = now_us
                        self._ready_us[replica] = now_us + self.config.start_us
                        self.starts += 1
                    starts = state == "off" and self.config.start_us > 0
                    self._become(replica, "starting" if starts else "up", out)
                    self.most = max(self.most, sum(state != "off" for state in self.state))
                    return

    def _become(self, replica: int, state: ReplicaState, out: list[EngineChanged]) -> None:
        before, self.state[replica] = self.state[replica], state
        if state == "off":
            self._paid_us += self.now_us - self._since_us[replica]
            if before == "starting":
                return  # the router was never informed about this replica
        if state != "starting":
            reported = "down" if state == "off" else state
            out.append(EngineChanged(time_us=self.now_us, engine=replica, state=reported))
