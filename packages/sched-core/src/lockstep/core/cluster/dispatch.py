"""The router's waiting queue: which requests wait, which is sent next, and which are sent again after an engine's loss.

    dispatcher = Dispatcher(DispatchConfig(open_max=64), RouterConfig(), (EngineShare(), EngineShare()))
    for routed in dispatcher.step(RequestOffered(time_us=5, request_id=0, prompt_tokens=900, tenant="a")):
        routed.engine                            # None and reason "waits": a later step has its engine

One fact may decide about several requests: a request ends and two waiting ones are sent, or an engine is lost and all
its requests are sent again. At every moment a request is open on exactly one engine, waits here, or has ended. Like the
router, the dispatcher is a pure function of its facts.

**Fair share.** Each tenant has a queue and a count of charged tokens per weight: those of prompts, and the expected
ones of answers. The difference between expected and real tokens is charged or credited to the tenant's next request.
While there is room, a request of the waiting tenant with the lowest count is sent, so no request waits while there is
room. A tenant that returns keeps no credit: its count begins no lower than that of the tenant sent last. This is
start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over the tokens of Virtual Token Counter (Sheng et al.,
OSDI 2024): for two tenants that wait all the time, the charges per weight differ by at most one request of each.

**Order.** A tenant's queue is first come, first served. With `order` priority the highest priority is first, requests
without a priority are last, and equals are in order of arrival. The shares of tenants do not depend on it.

**Bounds.** All queues together hold `waiting_max` requests. When they are full, the newest request of the tenant with
the most waiting requests per weight is refused, so that no tenant can fill the queue of others. The requests of a lost
engine go to the front of their tenants' queues, in order of arrival, at most `resends_max` times each.

**Health.** The host probes engines and reports the answers. After `unhealthy_after` consecutive failures an engine is
down, and its requests are sent again; after `healthy_after` consecutive successes it is up. An engine that was taken
down by an EngineChanged stays down.
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
    """Bounds of the router's waiting queue, of resends and of probes. Raises ConfigError for invalid values."""

    open_max: int | None = None  # open requests per engine of weight 1, summed over engines; None: no limit
    waiting_max: int = WAITING_MAX  # waiting requests; with one more, one of them is refused
    tenant_weights: dict[str, float] = {}  # weights of tenants; 1 for tenants without an entry
    resends_max: int = 2  # times that a request is sent again after its engine was lost
    unhealthy_after: int = 3  # consecutive failed probes after which an engine is down (SGLang's gateway: 3)
    healthy_after: int = 2  # consecutive successful probes after which it is up again (SGLang's gateway: 2)
    order: Literal["fcfs", "priority"] | msgspec.UnsetType = msgspec.UNSET  # within a tenant's queue; UNSET: fcfs

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
    """An engine answered a health probe, or failed to."""

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
    """A router with a waiting queue. It must receive every fact in order."""

    def __init__(self, config: DispatchConfig, router: RouterConfig, engines: tuple[EngineShare, ...]) -> None:
        self.config = config
        self.router = Router(router, engines)
        self.waiting = 0
        self.queues: dict[str, deque[RequestOffered]] = {}  # by tenant, of waiting requests
        self.given: dict[str, float] = {}  # charged tokens per weight, by tenant
        # tokens per weight by which the tenant's next request is charged more or, below 0, less
        self._owed: dict[str, float] = {}
        self._sent: dict[int, _Sent] = {}  # requests that are open on an engine, by id
        self._sends: dict[int, int] = {}  # times that a waiting request was sent before its engine was lost, by id
        self._waiting_ids: dict[int, str] = {}  # tenant of each waiting request, by id
        self._given_last = 0.0  # `given` of the tenant of the request sent last, before that request
        self._last_request_id = -1
        self.digest = bytes(16)  # chained over all decisions
        self._forget_at = TENANTS_REMEMBERED
        self._probes: list[int] = [0] * len(engines)  # consecutive answers: successes above 0, failures below 0
        self._unwell = [False] * len(engines)  # whether failed probes took the engine down

    def step(self, fact: DispatchFact) -> tuple[RequestRouted, ...]:
        """Take in one fact; return every decision that follows, in order.

        Raises: ContractError for an impossible fact, like `Router.step`.
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
            decision = f"{routed.request_id} {engine} {routed.reason} {routed.matched_tokens}"
            self.digest = blake2b(self.digest + decision.encode(), digest_size=16).digest()
        return tuple(out)

    # -------------------------------------------------------------------------------------------------- arrivals

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
        queue = self.queues.get(tenant)
        if queue is None:
            queue = self.queues[tenant] = deque()
            self.given[tenant] = max(self.given.pop(tenant, 0.0), self._given_last)
            if len(self.given) > self._forget_at:
                self._forget_tenants()
        if self.config.order == "priority":
            place = bisect_left if front else bisect_right
            queue.insert(place(queue, _rank(offered), key=_rank), offered)
        elif front:
            queue.appendleft(offered)
        else:
            queue.append(offered)
        self._waiting_ids[offered.request_id] = tenant
        self.waiting += 1

    def _forget_tenants(self) -> None:
        """Drop counts without effect: tenants without requests and with a count of at most `_given_last`."""
        active = {*self.queues, *(sent.offered.tenant for sent in self._sent.values())}
        self.given = {t: given for t, given in self.given.items() if t in active or given > self._given_last}
        self._owed = {t: owed for t, owed in self._owed.items() if t in self.given}
        self._forget_at = max(2 * len(self.given), TENANTS_REMEMBERED)

    def _weight(self, tenant: str) -> float:
        return self.config.tenant_weights.get(tenant, 1.0)

    # mechanism: queue-at-the-router (decided)
    def _refuse_one(self, out: list[RequestRouted]) -> None:
        """Refuse the newest request of the tenant with the most waiting requests per weight.

        Of equal tenants, the one with the newest queue is chosen.
        """
        longest = max(reversed(self.queues), key=lambda tenant: len(self.queues[tenant]) / self._weight(tenant))
        self._drop(self.queues[longest][-1].request_id, "line_full", out)

    def _drop(self, request_id: int, reason: RouteReason, out: list[RequestRouted]) -> None:
        self._leave_queue(request_id)
        out.append(RequestRouted(request_id=request_id, engine=None, reason=reason))

    def _leave_queue(self, request_id: int) -> None:
        tenant = self._waiting_ids.pop(request_id)
        queue = self.queues[tenant]
        if queue[0].request_id == request_id:
            queue.popleft()
        elif queue[-1].request_id == request_id:
            queue.pop()
        else:
            self.queues[tenant] = queue = deque(each for each in queue if each.request_id != request_id)
        if not queue:
            del self.queues[tenant]
        self._sends.pop(request_id, None)
        self.waiting -= 1

    # ------------------------------------------------------------------------------------------------------ sending

    @property
    def room(self) -> float:
        """Requests that may be sent until the limit of open ones; infinite without a limit, 0 with no engine up."""
        router, limit = self.router, self.config.open_max
        up = [engine for engine, state in enumerate(router.state) if state == "up"]
        if not up:
            return 0
        if limit is None:
            return inf
        most = sum(max(int(limit * router.engines[engine].weight), 1) for engine in up)
        return most - sum(router.open_requests[engine] for engine in up)

    def _send_all(self, now_us: int, out: list[RequestRouted]) -> None:
        """While there is room, send a request of the tenant with the lowest count; of equals, of the oldest queue."""
        room = self.room if self.queues else 0
        while self.queues and room > 0:
            tenant = min(self.queues, key=self.given.__getitem__)
            offered = self.queues[tenant][0]
            sends = self._sends.get(offered.request_id, 0) + 1
            self._leave_queue(offered.request_id)
            routed = self.router.place(offered, now_us)
            out.append(routed)
            if routed.engine is None:
                continue
            room -= 1
            expected = self.router.open[offered.request_id].tokens / self._weight(tenant)
            self._sent[offered.request_id] = _Sent(offered, expected, sends)
            self._given_last = max(self._given_last, self.given[tenant])
            cost = expected + self._owed.pop(tenant, 0.0)
            self.given[tenant] += max(cost, 0.0)
            if cost < 0.0:
                self._owed[tenant] = cost

    # ----------------------------------------------------------------------------------------------- ends and changes

    def _end(self, fact: RequestEnded) -> None:
        self._at(fact.time_us)
        if fact.request_id in self._waiting_ids:  # the client left
            self._leave_queue(fact.request_id)
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
            self._owe(sent.offered.tenant, -sent.expected)  # the charge of a lost answer is credited
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


def _rank(offered: RequestOffered) -> float:
    """Return the sort key of a request by priority: the highest first, requests without a priority last."""
    return inf if offered.priority is None else -offered.priority
