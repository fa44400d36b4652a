"""Who waits at the router, whose turn it is, and who is sent again: a line in front of `router.Router`.

    dispatcher = Dispatcher(DispatchConfig(open_max=64), RouterConfig(), (EngineShare(), EngineShare()))
    for routed in dispatcher.step(RequestOffered(time_us=5, request_id=0, prompt_tokens=900, tenant="a")):
        routed.engine                            # None and reason "waits": a later step will say where it goes

Any fact may decide about several requests: one ends and two that waited go, or an engine is lost and all it had is sent
again. At every moment a request is open on exactly one engine, waits here, or is over. Pure, as the router is.

**Fair share.** Each tenant has a line, and a count of the tokens it was given per weight: prompts, and what answers are
expected to have; what that was off by, once they ended, is put on the tenant's next request or taken off it. While
there is room, the waiting tenant with the least goes first, so nobody waits while there is room. A tenant that comes
back does not bring what it did not use: its count begins no lower than where that of the last one stood that was sent.
This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over the tokens of Virtual Token Counter (Sheng et
al., OSDI 2024): of two tenants that wait all the time, what one is charged per weight exceeds what the other is by no
more than one request of each.

**Order.** Within a line who came first goes first; with `order` priority who has the highest goes first, those without
one last, and of equals who came first. Shares of tenants are not touched by it.

**Bounds.** All lines together hold `waiting_max`; when they are full, the newest request of the tenant that has most
waiting per weight is refused, so that nobody can fill the line of others. What a lost engine had goes to the front of
its tenant's line, in the order in which it first came, at most `resends_max` times each.

**Health.** Whoever probes engines tells what they answer: after some failures in a row an engine is down, and what it
had is sent again; after some successes it is up. An engine that was taken out by other means stays out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from hashlib import blake2b
from math import inf, isfinite
from typing import Literal

import msgspec

from lockstep.core.cluster.router import (
    EngineChanged,
    EngineShare,
    LoadReported,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterConfig,
    RouteReason,
)
from lockstep.core.contract.errors import ConfigError, ContractError

WAITING_MAX = 10_000
TENANTS_REMEMBERED = 10_000


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What waits at the router, and for how long it is tried. Raises ConfigError for what cannot work."""

    open_max: int | None = None  # requests open per engine of weight 1, all engines together; None: as many as come
    waiting_max: int = WAITING_MAX  # requests in the line; one more and somebody is refused
    tenant_weights: dict[str, float] = {}  # of tenants that do not have the usual 1
    resends_max: int = 2  # of one request whose engine was lost
    unhealthy_after: int = 3  # probes that fail in a row: the engine is down (SGLang's gateway: 3)
    healthy_after: int = 2  # and that succeed in a row: it is up again (SGLang's gateway: 2)
    order: Literal["fcfs", "priority"] | msgspec.UnsetType = msgspec.UNSET  # within a tenant's line; UNSET: fcfs

    def __post_init__(self) -> None:
        least = {"open_max": 1, "waiting_max": 0, "resends_max": 0, "unhealthy_after": 1, "healthy_after": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if name == "open_max" and value is None:
                continue
            if type(value) is not int or value < low:
                raise ConfigError(f"`{name}` must be a whole number of at least {low}, got `{value}`")
        if self.order not in (msgspec.UNSET, "fcfs", "priority"):
            raise ConfigError(f"`order` must be fcfs or priority, got `{self.order}`")
        for tenant, weight in self.tenant_weights.items():
            if not (isfinite(weight) and weight > 0):
                raise ConfigError(f"`tenant_weights`: that of `{tenant}` must be above 0 and finite, got `{weight}`")


class ProbeAnswered(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An engine was asked whether it is well."""

    time_us: int
    engine: int
    well: bool


DispatchFact = RequestOffered | RequestEnded | EngineChanged | LoadReported | ProbeAnswered


class _Sent(msgspec.Struct):
    """A request that is open on an engine."""

    offered: RequestOffered
    expected: float  # tokens per weight
    sends: int


class Dispatcher:
    """A router with a line in front of it. Build it from both configurations; feed it every fact in order."""

    def __init__(self, config: DispatchConfig, router: RouterConfig, engines: tuple[EngineShare, ...]) -> None:
        self.config = config
        self.router = Router(router, engines)
        self.waiting = 0
        self.lines: dict[str, deque[RequestOffered]] = {}  # by tenant, of those that wait
        self.given: dict[str, float] = {}  # tokens per weight, by tenant
        self._owed: dict[str, float] = {}  # the same, by which the next request is charged more or, below 0, less
        self._sent: dict[int, _Sent] = {}  # by request id: open on an engine
        self._sends: dict[int, int] = {}  # of those that wait to be sent again: how often they were
        self._waiting_ids: dict[int, str] = {}  # to the tenant
        self._stood = 0.0  # `given` of the last tenant that was sent, before
        self._last_request_id = -1
        self.digest = bytes(16)  # over all decisions
        self._forget_at = TENANTS_REMEMBERED
        self._probes: list[int] = [0] * len(engines)  # answers in a row: above 0 well, below 0 not
        self._unwell = [False] * len(engines)  # down because of what it answered

    def step(self, fact: DispatchFact) -> tuple[RequestRouted, ...]:
        """Take in one fact; return every decision that follows, in order.

        Raises ContractError for a fact that cannot be, as `Router.step` does.
        """
        out: list[RequestRouted] = []
        match fact:
            case RequestOffered():
                self._offer(fact, out)
            case RequestEnded():
                self._end(fact)
                self._send_all(fact.time_us, out)
            case EngineChanged():
                self._change(fact, out)
            case LoadReported():
                self.router.step(fact)
            case ProbeAnswered():
                self._probe(fact, out)
        for routed in out:
            engine = -1 if routed.engine is None else routed.engine
            told = f"{routed.request_id} {engine} {routed.reason} {routed.matched_tokens}"
            self.digest = blake2b(self.digest + told.encode(), digest_size=16).digest()
        return tuple(out)

    # ------------------------------------------------------------------------------------------------- who comes in

    def _offer(self, fact: RequestOffered, out: list[RequestRouted]) -> None:
        if fact.request_id <= self._last_request_id:
            raise ContractError(f"request id {fact.request_id} does not increase after {self._last_request_id}")
        self._at(fact.time_us)
        self._last_request_id = fact.request_id
        self._enqueue(fact, front=False)
        self._send_all(fact.time_us, out)
        if self.waiting > self.config.waiting_max:
            self._refuse_one(out)
        if fact.request_id in self._waiting_ids:
            out.append(RequestRouted(request_id=fact.request_id, engine=None, reason="waits"))

    def _at(self, time_us: int) -> None:
        if time_us < self.router.now_us:
            now_us = self.router.now_us
            raise ContractError(f"time ran backwards: {time_us} us after {now_us} us; the host must clamp")

    def _enqueue(self, offered: RequestOffered, *, front: bool) -> None:
        tenant = offered.tenant
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = deque()
            self.given[tenant] = max(self.given.pop(tenant, 0.0), self._stood)
            if len(self.given) > self._forget_at:
                self._forget_tenants()
        if self.config.order == "priority":
            place = bisect_left if front else bisect_right
            line.insert(place(line, _behind(offered), key=_behind), offered)
        elif front:
            line.appendleft(offered)
        else:
            line.append(offered)
        self._waiting_ids[offered.request_id] = tenant
        self.waiting += 1

    def _forget_tenants(self) -> None:
        """Those who come back no different for it: nobody waits or is open, and others were given as much since."""
        active = {*self.lines, *(sent.offered.tenant for sent in self._sent.values())}
        self.given = {t: given for t, given in self.given.items() if t in active or given > self._stood}
        self._owed = {t: owed for t, owed in self._owed.items() if t in self.given}
        self._forget_at = max(2 * len(self.given), TENANTS_REMEMBERED)

    def _weight(self, tenant: str) -> float:
        return self.config.tenant_weights.get(tenant, 1.0)

    def _refuse_one(self, out: list[RequestRouted]) -> None:
        """The newest of the tenant with the most waiting per weight; of equals, of who has waited here the shortest."""
        longest = max(reversed(self.lines), key=lambda tenant: len(self.lines[tenant]) / self._weight(tenant))
        self._drop(self.lines[longest][-1].request_id, "line_full", out)

    def _drop(self, request_id: int, reason: RouteReason, out: list[RequestRouted]) -> None:
        self._leave_line(request_id)
        out.append(RequestRouted(request_id=request_id, engine=None, reason=reason))

    def _leave_line(self, request_id: int) -> None:
        tenant = self._waiting_ids.pop(request_id)
        line = self.lines[tenant]
        if line[0].request_id == request_id:
            line.popleft()
        elif line[-1].request_id == request_id:
            line.pop()
        else:
            self.lines[tenant] = line = deque(each for each in line if each.request_id != request_id)
        if not line:
            del self.lines[tenant]
        self._sends.pop(request_id, None)
        self.waiting -= 1

    # ------------------------------------------------------------------------------------------------------ who goes

    @property
    def room(self) -> float:
        """How many more may be open on the engines that are up; infinite without a limit, and 0 with nobody up."""
        router, limit = self.router, self.config.open_max
        up = [engine for engine, state in enumerate(router.state) if state == "up"]
        if not up:
            return 0
        if limit is None:
            return inf
        most = sum(max(int(limit * router.engines[engine].weight), 1) for engine in up)
        return most - sum(router.open_requests[engine] for engine in up)

    def _send_all(self, now_us: int, out: list[RequestRouted]) -> None:
        """While there is room, the tenant goes first that was given the least; of equals, who began to wait earlier."""
        room = self.room if self.lines else 0
        while self.lines and room > 0:
            tenant = min(self.lines, key=self.given.__getitem__)
            offered = self.lines[tenant][0]
            sends = self._sends.get(offered.request_id, 0) + 1
            self._leave_line(offered.request_id)
            routed = self.router.place(offered, now_us)
            out.append(routed)
            if routed.engine is None:
                continue
            room -= 1
            expected = self.router.open[offered.request_id].tokens / self._weight(tenant)
            self._sent[offered.request_id] = _Sent(offered, expected, sends)
            self._stood = max(self._stood, self.given[tenant])
            cost = expected + self._owed.pop(tenant, 0.0)
            self.given[tenant] += max(cost, 0.0)
            if cost < 0.0:
                self._owed[tenant] = cost

    # ----------------------------------------------------------------------------------------------- ends and changes

    def _end(self, fact: RequestEnded) -> None:
        self._at(fact.time_us)
        if fact.request_id in self._waiting_ids:  # its client left
            self._leave_line(fact.request_id)
        sent = self._sent.pop(fact.request_id, None)
        if sent is not None:
            tenant = sent.offered.tenant
            took = (sent.offered.prompt_tokens + fact.output_tokens) / self._weight(tenant)
            self._owe(tenant, took - sent.expected)
        self.router.step(fact)

    def _owe(self, tenant: str, more: float) -> None:
        if more:
            self._owed[tenant] = self._owed.get(tenant, 0.0) + more

    def _change(self, fact: EngineChanged, out: list[RequestRouted]) -> None:
        router = self.router
        lost = []
        if fact.state == "down" and 0 <= fact.engine < len(router.engines):
            lost = sorted(request_id for request_id, at in router.open.items() if at.engine == fact.engine)
        router.step(fact)
        self._probes[fact.engine], self._unwell[fact.engine] = 0, False
        for request_id in reversed(lost):
            sent = self._sent.pop(request_id)
            self._owe(sent.offered.tenant, -sent.expected)  # nobody pays for what was lost
            if sent.sends > self.config.resends_max:
                out.append(RequestRouted(request_id=request_id, engine=None, reason="lost"))
                continue
            self._enqueue(sent.offered, front=True)
            self._sends[request_id] = sent.sends
        self._send_all(fact.time_us, out)
        while self.waiting > self.config.waiting_max:
            self._refuse_one(out)
        out.extend(
            RequestRouted(request_id=request_id, engine=None, reason="waits")
            for request_id in lost
            if request_id in self._waiting_ids
        )

    def _probe(self, fact: ProbeAnswered, out: list[RequestRouted]) -> None:
        router, config = self.router, self.config
        if not 0 <= fact.engine < len(router.engines):
            raise ContractError(f"there is no engine {fact.engine}: the router has 0 to {len(router.engines) - 1}")
        self._at(fact.time_us)
        row = self._probes[fact.engine]
        row = max(row, 0) + 1 if fact.well else min(row, 0) - 1
        self._probes[fact.engine] = row
        state = router.state[fact.engine]
        if state != "down" and row <= -config.unhealthy_after:
            self._change(EngineChanged(time_us=fact.time_us, engine=fact.engine, state="down"), out)
            self._unwell[fact.engine] = True
        elif self._unwell[fact.engine] and row >= config.healthy_after:
            self._change(EngineChanged(time_us=fact.time_us, engine=fact.engine, state="up"), out)


def _behind(offered: RequestOffered) -> float:
    """How far back a request stands by its priority."""
    return inf if offered.priority is None else -offered.priority
