"""The waiting queue: the order in which requests are considered for admission, and which may be bypassed.

The *queue* is `Engine.waiting`: requests in order of arrival, retracted ones where they were requeued. A *policy* is a
pure function of a `WaitingQueue`, which has the queue as columns. It returns positions in the order in which the
requests are considered. The policies of the core are at the end of this file; installed packages add others
(docs/policies.md).

Under every policy:

**Bounded bypass.** A waiting request counts the later requests of the queue that were admitted before it. After
`bypass_limit` of them it is *urgent*: it is considered before all others, in queue order, and no later request is
considered unless it is admitted. So no request is bypassed more than `bypass_limit` times. The counts are updated when
a pass ends. A pass also determines after how many admissions a request may become urgent; after that many it updates
the counts and the order before it continues.

**De-duplication** (`prefix_deduplication`). Requests that share a long prefix which is not cached yet would all compute
it. With "last", all of them but the first in the queue are considered after all other requests. With "defer", a request
is deferred while an admitted request computes the pages that it needs next. It is considered again once these pages are
published, or once the other request has left. A deferred request waits for a running one, so there is always progress.

**Caching.** The order of the last pass is kept until one of its inputs has changed: the queue, or what the policy has
read, which its view records (prefix matches, the clock, work done, running requests). A match is looked up again only
if the part of the tree that it depends on has changed (`radix_node.Found`). A restored engine starts without these
caches and decides the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import index

import numpy as np
from msgspec import Struct

from lockstep.core.contract.checks import fail
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import PolicyError
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.radix import RadixCache
from lockstep.core.requests.radix_node import Found
from lockstep.core.requests.rules import (
    DUPLICATE_SHARED_TOKENS_MIN,
    are_few,
    awaited_pages,
    may_be_duplicate,
    may_bypass,
    response_ratio,
)
from lockstep.core.requests.table import Request, RequestState, RunningBatch

REFRESHED_REQUESTS = 128  # from the head of the queue: their cached prefixes are refreshed (limit of SGLang)
ENDLESS = 1 << 62

WAITING = RequestState.WAITING
TOKEN_BYTES = 4


class RequestColumns:
    """Some requests as columns, read only. A column is gathered at each access, so keep it in a variable."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Ids of the host, rising in order of arrival."""
        return tuple([request.request_id for request in self._requests])

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return tuple([request.prompt_tokens for request in self._requests])

    @property
    def max_new_tokens(self) -> tuple[int, ...]:
        """The most output tokens of each."""
        return tuple([request.max_new_tokens for request in self._requests])

    @property
    def priority(self) -> tuple[int | None, ...]:
        """The priority that each arrived with; None without one."""
        return tuple([request.priority for request in self._requests])

    @property
    def tenant(self) -> tuple[str, ...]:
        return tuple([request.tenant for request in self._requests])

    @property
    def routing_key(self) -> tuple[str, ...]:
        return tuple([request.routing_key for request in self._requests])


class WaitingQueue(RequestColumns):
    """The input of a policy: the waiting requests in queue order, the time, and the running requests.

    It records which inputs beyond the requests were read, so that the order is made again when one of them changes.
    """

    __slots__ = ("_prefilled_tokens", "_saw_running", "_saw_time", "_saw_tree", "_saw_work", "_scheduler", "config")

    def __init__(self, requests: list[Request], scheduler: SchedulerView, prefilled_tokens: int) -> None:
        super().__init__(requests)
        self._scheduler = scheduler
        self._prefilled_tokens = prefilled_tokens
        self.config = scheduler.config
        self._saw_tree = self._saw_time = self._saw_work = self._saw_running = False

    @property
    def now_us(self) -> int:
        """Host time since the journal began, microseconds."""
        self._saw_time = True
        return self._scheduler.now_us

    @property
    def running(self) -> RequestColumns:
        """The requests that are being prefilled or decoded, in no particular order."""
        self._saw_running = True
        return RequestColumns(_running(self._scheduler))

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Output tokens of each from before a retraction."""
        return tuple([request.outputs for request in self._requests])

    @property
    def waiting_since_us(self) -> tuple[int, ...]:
        """Time at which each last began to wait: its arrival or its retraction, microseconds."""
        return tuple([request.waiting_since_us for request in self._requests])

    @property
    def waited_us(self) -> tuple[int, ...]:
        """Time that each has waited since then, microseconds."""
        now = self.now_us
        return tuple([now - request.waiting_since_us for request in self._requests])

    @property
    def admitted_before(self) -> tuple[bool, ...]:
        """Whether each was admitted before and retracted."""
        return tuple([request.cached_tokens >= 0 for request in self._requests])

    @property
    def bypassed(self) -> tuple[int, ...]:
        """Later requests of the queue that were admitted before each."""
        return tuple([request.bypassed for request in self._requests])

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens of each with KV in the radix cache now, as far as each may use it."""
        page_size = self.config.page_size
        if not self.config.radix_cache:
            return (0,) * len(self)
        return tuple([found.pages * page_size for found in self._found()])

    @property
    def uncached_tokens(self) -> tuple[int, ...]:
        """Tokens that an extend of each would compute: prompt and kept output without the cached ones. At least 1."""
        cached = self.cached_tokens
        return tuple([len(r.tokens) // TOKEN_BYTES - c for r, c in zip(self._requests, cached, strict=True)])

    @property
    def prefilled_since_arrival(self) -> tuple[int, ...]:
        """Tokens that the engine has extended for other requests since each arrived: its age in work done."""
        self._saw_work = True
        done = self._prefilled_tokens
        return tuple([done - request.prefilled_before for request in self._requests])

    def _found(self) -> list[Found]:
        """Return the end of the cached prefix of each."""
        self._saw_tree = True
        radix = self._scheduler.memory.radix
        return [matched(request, radix) for request in self._requests] if radix.present else []


Policy = Callable[[WaitingQueue], Sequence[int]]


def matched(request: Request, radix: RadixCache) -> Found:
    """Return the end of the cached prefix of a request, as far as it may use it. Looked up only if it has changed."""
    found = request.matched
    if found is None or found.node.version != found.version:
        most = request.cacheable_tokens // radix.page_tokens
        found = request.matched = radix.find(request.namespace, request.tokens, most, found)
    return found


class OrderingPart(Struct):
    """The waiting queue in a snapshot."""

    waiting: list[int]
    prefilled_tokens: int


class Ordering(Component):
    """The waiting queue of one engine, and the passes over it: `turn`, `writer_of_prefix` per request, `close`."""

    PART = OrderingPart
    EMPTY_AT_REST = ("waiting",)

    def __init__(self, config: SchedConfig) -> None:
        self._config = config
        self.waiting: list[Request] = []  # in the order in which they began to wait
        self.prefilled_tokens = 0  # new tokens of all extends: the age of waiting requests under policy hrrn
        own = POLICIES.get(config.schedule_policy)
        if own is None:
            from lockstep.core.contract.policies import load  # reads the installed packages

            own = load(config.schedule_policy, config.schedule_policy_version)
        self._policy: Policy = own
        self._installed = config.schedule_policy not in POLICIES  # of an installed package: its result is checked
        self._limit = ENDLESS if config.bypass_limit is None else config.bypass_limit
        self._defers = config.prefix_deduplication == "defer"
        self._moves_duplicates = config.prefix_deduplication == "last"
        # A request then passes another one only if that was deferred for a reason of its own.
        self._plain = own is fcfs and config.prefix_deduplication == "off"
        self._passed_by: list[Request] = []  # requests of the present plain pass that were not admitted
        self._may_be_urgent = True  # whether a request may be urgent; if not, none is examined
        self._next_pages = awaited_pages(0, config.page_size)

        # the order of the last pass, and its inputs
        self._order: list[Request] = []
        self._queue: list[Request] = []
        self._view: WaitingQueue | None = None
        self._made_from: tuple[object, ...] = ()
        self._epoch = -1

        # the present pass: the requests that compute prefixes, by the byte at which they begin and the tokens there
        self._writers: list[Request] = []
        self._written: dict[int, dict[tuple[str, bytes], Request]] = {}
        self._deferred_for_prefix = False

    # -------------------------------------------------------------------------------------- snapshot and invariants

    def part(self) -> OrderingPart:
        """Return the state for a snapshot. The order and its inputs are not stored: they are made again."""
        return OrderingPart([request.request_id for request in self.waiting], self.prefilled_tokens)

    def load(self, part: OrderingPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        self.waiting = [restored.requests[request_id] for request_id in part.waiting]
        self.prefilled_tokens = part.prefilled_tokens

    def check_state(self, facts: Facts) -> None:
        """L5, S14: no waiting request was bypassed too often; a stored match equals the match of the tree."""
        limit, radix = facts.config.bypass_limit, facts.radix
        for request in self.waiting:
            if limit is not None and request.bypassed > limit:
                fail(f"L5: {request.name} was bypassed {request.bypassed} times, bypass_limit {limit}")
            found = request.matched
            if radix.present and found is not None and found.node.version == found.version:
                most = request.cacheable_tokens // facts.config.page_size
                pages = radix.match(request.namespace, request.tokens, most).pages
                if found.pages != pages:
                    fail(f"S14: {request.name} has a match of {found.pages} pages, the tree has {pages}")

    # ------------------------------------------------------------------------------------------------------- the pass

    def turn(self, scheduler: SchedulerView) -> Iterator[Request]:
        """Yield the waiting requests in the order in which they are considered.

        A request that does not wait any more when the next one is taken was admitted. The queue keeps it until `close`.
        """
        return self._plain_turn(self.waiting) if self._plain else self._policy_turn(scheduler)

    def _policy_turn(self, scheduler: SchedulerView) -> Iterator[Request]:
        """Yield urgent requests, then the others in the order of the policy."""
        order, at, admitted, admissions_left = self._ordered(scheduler), 0, 0, -1
        if self._defers:
            self._begin_writers(scheduler)
        while at < len(order):
            request = order[at]
            at += 1
            yield request
            if request.state is WAITING:
                if not may_bypass(request.bypassed, self._limit):
                    return  # it must not be bypassed again
                continue
            self._view = None
            if self._defers:
                self._add_writer(request)
            if admissions_left < 0:
                admissions_left = self._admissions_left(self.waiting)
            admitted += 1
            if admitted == admissions_left:
                self._count()
                order, at, admitted, admissions_left = self._urgent_first(order[at:], self.waiting), 0, 0, -1

    def _plain_turn(self, queue: list[Request]) -> Iterator[Request]:
        """Yield the queue in its order, up to the point at which a deferred request must not be bypassed again."""
        passed_by = self._passed_by = []
        admissions_left = ENDLESS
        for request in queue:
            yield request
            if request.state is WAITING:
                admissions_left = min(admissions_left, self._limit - request.bypassed)
                passed_by.append(request)
            elif passed_by:
                admissions_left -= 1
            if admissions_left <= 0:
                return

    def first(self, scheduler: SchedulerView, count: int) -> list[Request]:
        """Return the first `count` requests in the order in which they are considered. Begins no pass."""
        plain = self._plain or not self.waiting
        return (self.waiting if plain else self._ordered(scheduler))[:count]

    # mechanism: de-duplication (decided)
    def writer_of_prefix(self, request: Request, scheduler: SchedulerView) -> Request | None:
        """Return the request that computes the pages that this one needs next, under "defer"; otherwise None."""
        if not self._defers:
            return None
        radix = scheduler.memory.radix
        if not radix.present or request.bypassed >= self._limit:
            return None
        pages, page_bytes = matched(request, radix).pages, radix.page_tokens * TOKEN_BYTES
        start, stop = pages * page_bytes, (pages + self._next_pages) * page_bytes
        if stop > request.cacheable_tokens * TOKEN_BYTES:
            return None  # it could not use all of them: its last token is always computed
        written = self._written.get(start)
        if written is None:
            written = self._written[start] = {}
            for writer in self._writers:
                self._write(written, start, writer)
        writer_ahead = written.get((request.namespace, request.tokens[start:stop]))
        if writer_ahead is None or not request.tokens.startswith(writer_ahead.tokens[:start]):
            return None
        self._deferred_for_prefix = True
        return writer_ahead

    def take_all(self) -> list[Request]:
        """Empty the queue. Returns its requests."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def refresh(self, radix: RadixCache) -> None:
        """Count the cached prefixes of the first requests of the queue as used now, that of the head last.

        So these prefixes are evicted after those for which no request waits. SGLang does this for policies that ignore
        the cache; here it is done for every policy.
        """
        if self._view is not None and self._view._saw_tree and not self._matches_are_current(radix):
            self._view = None  # the look-ups below would hide from the next pass that matches have changed
        for request in reversed(self.waiting[:REFRESHED_REQUESTS]):
            radix.touch(matched(request, radix).node)

    def prefilled(self, tokens: int) -> None:
        """Count new tokens of an extend, by which waiting requests age under policy hrrn."""
        self.prefilled_tokens += tokens

    def joins(self, request: Request) -> None:
        """Note a request that joined the queue: it may have waited before, and may be urgent."""
        if request.bypassed >= self._limit:
            self._may_be_urgent = True

    def close(self) -> bool:
        """End the pass: admitted requests leave the queue, and the requests that they bypassed count it.

        Returns: whether admission may be tried again although it ran out of memory.
        """
        retry = False
        if self._plain and not self._passed_by:
            queue, admitted = self.waiting, 0
            while admitted < len(queue) and queue[admitted].state is not WAITING:
                admitted += 1
            del queue[:admitted]
            return False
        if self._view is None or self._plain:
            self._count()
        if self._deferred_for_prefix:
            self._deferred_for_prefix = False
            retry = True  # a request that waits for a prefix may fit as soon as it is cached
        self._writers, self._written = [], {}
        return retry

    # ----------------------------------------------------------------------------------------------------- the order

    def _ordered(self, scheduler: SchedulerView) -> list[Request]:
        """Return the queue in the order in which it is considered: that of the last pass if no input has changed."""
        if not self._order_is_current(scheduler):
            queue = self.waiting.copy()
            view = WaitingQueue(queue, scheduler, self.prefilled_tokens)
            positions = self._checked_positions(view) if self._installed else self._policy(view)
            order = [queue[position] for position in positions]
            if self._moves_duplicates and are_few(len(queue)):
                order = self._duplicates_last(order, view)
            self._order, self._queue, self._view = self._urgent_first(order, queue), queue, view
            self._made_from = self._inputs(view, scheduler)
            self._epoch = scheduler.memory.radix.epoch
        return self._order

    def _order_is_current(self, scheduler: SchedulerView) -> bool:
        """Whether the order of the last pass, which admitted no request, is still valid."""
        view = self._view
        return (
            view is not None
            and self._queue == self.waiting
            and self._made_from == self._inputs(view, scheduler)
            and (not view._saw_tree or self._matches_are_current(scheduler.memory.radix))
        )

    def _inputs(self, view: WaitingQueue, scheduler: SchedulerView) -> tuple[object, ...]:
        """Return the present values of the inputs that the policy has read beside queue and tree."""
        return (
            scheduler.now_us if view._saw_time else None,
            self.prefilled_tokens if view._saw_work else None,
            (_running_batches(scheduler), scheduler.prefilling) if view._saw_running else None,
        )

    def _matches_are_current(self, radix: RadixCache) -> bool:
        """Whether all matches are unchanged. A match is looked up again if its part of the tree has changed."""
        if self._epoch == radix.epoch:
            return True
        same = True
        for request in self._queue:
            before = request.matched
            if before is None or before.node.version != before.version:
                after = matched(request, radix)
                same = same and before is not None and before.node is after.node and before.pages == after.pages
        self._epoch = radix.epoch
        return same

    def _checked_positions(self, view: WaitingQueue) -> list[int]:
        """Return the order of an installed policy. Raises PolicyError unless it has each position once."""
        name = f"policy `{self._config.schedule_policy}` {self._config.schedule_policy_version}"
        waiting = len(view)
        try:
            positions = self._policy(view)
        except Exception as error:
            raise PolicyError(f"{name} failed on {waiting} waiting requests: {error!r}") from error
        try:
            order = [index(position) for position in positions]
        except TypeError:
            order = []
        if sorted(order) != list(range(waiting)):
            given = repr(positions)
            raise PolicyError(
                f"{name} returned {given if len(given) <= 80 else given[:77] + '...'} for {waiting} waiting requests; "
                f"expected each position from 0 to {waiting - 1} once"
            )
        return order

    def _duplicates_last(self, order: list[Request], view: WaitingQueue) -> list[Request]:
        """Move requests with the prefix of an earlier request behind all others, in queue order."""
        span = DUPLICATE_SHARED_TOKENS_MIN * TOKEN_BYTES
        seen: dict[tuple[str, bytes], Request] = {}
        last: dict[int, Request] = {}
        for request, cached in zip(view._requests, view.cached_tokens, strict=True):
            if may_be_duplicate(len(request.tokens) // TOKEN_BYTES, cached):
                first = seen.setdefault((request.namespace, request.tokens[:span]), request)
                if first is not request:
                    last[request.request_id] = request
        return [request for request in order if request.request_id not in last] + list(last.values())

    # --------------------------------------------------------------------------------------------------------- bypass

    # mechanism: bypass-limit (decided)
    def _urgent_first(self, order: list[Request], queue: list[Request]) -> list[Request]:
        """Return the urgent requests in queue order, then the others in the given order."""
        if not self._may_be_urgent:
            return order
        limit = self._limit
        urgent = [request for request in queue if not may_bypass(request.bypassed, limit)]
        self._may_be_urgent = bool(urgent)
        return urgent + [request for request in order if request.bypassed < limit] if urgent else order

    def _admissions_left(self, queue: list[Request]) -> int:
        """Return the admissions after which a request may have been bypassed `bypass_limit` times."""
        limit = self._limit
        return min([limit - request.bypassed for request in queue if request.bypassed < limit], default=ENDLESS)

    def _count(self) -> None:
        """Remove admitted requests from the queue; requests ahead of one of them were bypassed."""
        behind, staying = 0, []
        for request in reversed(self.waiting):
            if request.state is WAITING:
                request.bypassed += behind
                if request.bypassed >= self._limit:
                    self._may_be_urgent = True
                staying.append(request)
            else:
                behind += 1
        staying.reverse()
        self.waiting = staying

    # -------------------------------------------------------------------------------------------------------- writers

    def _begin_writers(self, scheduler: SchedulerView) -> None:
        """Collect the requests that compute a prompt now; it is published when their batch is collected."""
        self._writers = [scheduler.prefilling] if scheduler.prefilling is not None else []
        for batch in scheduler.in_flight:
            rows = batch.plan.rows[: batch.plan.extend_rows].tolist()
            for request, row in zip(batch.requests, rows, strict=False):
                if request.row == row and row not in batch.dead:
                    self._writers.append(request)

    def _add_writer(self, request: Request) -> None:
        self._writers.append(request)
        for start, written in self._written.items():
            self._write(written, start, request)

    def _write(self, written: dict[tuple[str, bytes], Request], start: int, writer: Request) -> None:
        """Note the tokens that a writer computes from byte `start` on. Other requests wait for the first writer."""
        stop = start + self._next_pages * self._config.page_size * TOKEN_BYTES
        written.setdefault((writer.namespace, writer.tokens[start:stop]), writer)


def _running(scheduler: SchedulerView) -> list[Request]:
    split, decoding = scheduler.prefilling, scheduler.all_running[0].requests
    return decoding if split is None else [*decoding, split]


def _running_batches(scheduler: SchedulerView) -> tuple[RunningBatch, ...]:
    return tuple([running.batch for running in scheduler.microbatches.states])


# ------------------------------------------------------------------------------------------------------- the policies


def fcfs(queue: WaitingQueue) -> Sequence[int]:
    """First come, first served: the order of the queue."""
    return range(len(queue))


# mechanism: order-of-the-queue (decided)
def lpm(queue: WaitingQueue) -> Sequence[int]:
    """Longest cached prefix first, ties in queue order; fcfs if the queue is long (LPM_FALLBACK_WAITING)."""
    if not are_few(len(queue)):
        return fcfs(queue)
    return _highest_first(queue.cached_tokens)


def dfs_weight(queue: WaitingQueue) -> Sequence[int]:
    """One branch of the radix tree after the other, that with the most waiting requests first; deepest first inside.

    Ties are in the queue order of the first request of each branch. Requests without a cached prefix are last.
    """
    top = -1  # stands for all roots
    weights: Counter[int] = Counter()
    branches: dict[int, dict[int, None]] = {}  # below each node, the branches with waiting requests
    ending: dict[int, list[tuple[int, int]]] = {}  # at each node: (pages, position)
    for position, found in enumerate(queue._found()):
        node = found.node
        number = node.number if node.parent is not None else top
        ending.setdefault(number, []).append((found.pages, position))
        weights[number] += 1
        while (parent := node.parent) is not None:
            above = parent.number if parent.parent is not None else top
            weights[above] += 1
            branches.setdefault(above, {})[number] = None
            node, number = parent, above
    backwards: list[int] = []  # each node, then its branches, the lightest first; reversed at the end
    stack = [top]
    while stack:
        number = stack.pop()
        here = sorted(ending.get(number, ()), key=lambda end: -end[0])
        backwards += [position for _, position in reversed(here)]
        stack += sorted(branches.get(number, ()), key=lambda branch: -weights[branch])
    backwards.reverse()
    return backwards


def lof(queue: WaitingQueue) -> Sequence[int]:
    """Longest output first, by the most tokens that the request may produce."""
    return _highest_first(queue.max_new_tokens)


def shuffled(queue: WaitingQueue) -> Sequence[int]:
    """Random order, drawn from `schedule_seed` and the id of each request; constant while a request waits."""
    order: list[int] = _mixed(queue.request_ids, queue.config.schedule_seed).argsort(kind="stable").tolist()
    return order


def routing_key(queue: WaitingQueue) -> Sequence[int]:
    """Most frequent keys of running requests first, then other keys alphabetically, so that equal keys are adjacent.

    Queue order if no running request has a key.
    """
    running = Counter(key for key in queue.running.routing_key if key)
    if not running:
        return fcfs(queue)
    keys = [(-running[key], key) for key in queue.routing_key]
    return sorted(range(len(queue)), key=keys.__getitem__)


def priority(queue: WaitingQueue) -> Sequence[int]:
    """Highest priority first, or lowest if `schedule_low_priority_values_first`; ties in queue order.

    A request without a priority has `default_priority_value`; if that is unset, it is last.
    """
    sign = 1 if queue.config.schedule_low_priority_values_first else -1
    default = queue.config.default_priority_value
    worst = (1, 0) if default is None else (0, sign * default)
    keys = [worst if value is None else (0, sign * value) for value in queue.priority]
    return sorted(range(len(queue)), key=keys.__getitem__)


def hrrn(queue: WaitingQueue) -> Sequence[int]:
    """Highest response ratio next: tokens prefilled for other requests since the arrival, per uncached token.

    Short requests are first, and long ones age. Ties are in queue order. fcfs if the queue is long, as in lpm.
    """
    if not are_few(len(queue)):
        return fcfs(queue)
    ages, lacking = queue.prefilled_since_arrival, queue.uncached_tokens
    return _highest_first([response_ratio(age, tokens) for age, tokens in zip(ages, lacking, strict=True)])


def shortest_prefill_first(queue: WaitingQueue) -> Sequence[int]:
    """Fewest uncached tokens first, ties in queue order."""
    return sorted(range(len(queue)), key=queue.uncached_tokens.__getitem__)


def _highest_first(keys: Sequence[float]) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)  # reverse keeps ties in order


def _mixed(request_ids: Sequence[int], seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return a pseudo-random number per request, from seed and id only: splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = np.array(request_ids, np.uint64) + np.uint64(seed)
    for _ in range(2):  # the second round separates seeds that are close together
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "lpm": lpm,
    "dfs-weight": dfs_weight,
    "lof": lof,
    "random": shuffled,
    "routing-key": routing_key,
    "priority": priority,
    "hrrn": hrrn,
    "spf": shortest_prefill_first,
}
