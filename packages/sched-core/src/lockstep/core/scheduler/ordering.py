"""The waiting queue: the order in which requests are considered for admission, and which may be bypassed.

The *queue* is `Engine.waiting`: requests as they came, retracted ones where they were requeued. A *policy* is a pure
function of a `WaitingQueue`, which shows the queue as columns, and returns positions in the order in which they are to
be considered. Those of the core are at the end of this file; installed packages bring others (docs/policies.md).

What holds under every policy:

**Bounded bypass.** A waiting request counts the requests that stood behind it in the queue and were admitted before it.
Once there are `bypass_limit` of them it goes first, in queue order, ahead of the policy's order, and no request behind
it is considered unless it is admitted. So no request is ever bypassed more than `bypass_limit` times, under any policy.
The counts are brought up to date when a pass ends; but a pass also has its *aging limit*, the admissions after which
a request may have reached the limit, and when they have happened it counts and puts the order right before it goes on.

**De-duplication** (`prefix_deduplication`). Requests that share a long prefix which is not cached yet would all compute
it. "last": all but the first of them in the queue go behind all others. "defer": a request is deferred while another
one, already admitted, computes the very pages that it needs next; it is considered again once these are published, or
once the other has left. A deferred request waits for one that runs, so something always moves.

**Nothing is done twice.** The order of the last pass is kept until something it was made from has changed: the queue,
or what the policy looked at, which its view noted (prefix matches, the clock, work done, running requests). A match is
looked up again only when the part of the tree it depends on has changed (`radix.Found`). All this is a cache: a
restored engine starts without it and decides the same.
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
from lockstep.core.requests.table import Request, RequestState, RunningBatch

LPM_FALLBACK_WAITING = 128  # above this many waiting, matching each costs more than it gains (SGLang's threshold)
DUPLICATE_CACHED_TOKENS_MAX = 32  # a request with more cached is no duplicate (SGLang: IN_BATCH_PREFIX_CACHING_CHECK)
DUPLICATE_SHARED_TOKENS_MIN = 32  # tokens two prompts must share to be duplicates (SGLang: ..._DEPRIORITIZE)
REFRESHED_REQUESTS = 128  # of the queue, whose cached prefixes are refreshed (SGLang's limit)
ENDLESS = 1 << 62

WAITING = RequestState.WAITING
TOKEN_BYTES = 4


class RequestColumns:
    """Some requests as columns, read only. A column is gathered each time it is asked for: keep it in a variable."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Made by the host, rising in order of arrival."""
        return tuple([request.request_id for request in self._requests])

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return tuple([request.prompt_tokens for request in self._requests])

    @property
    def max_new_tokens(self) -> tuple[int, ...]:
        """The most output tokens each may have."""
        return tuple([request.max_new_tokens for request in self._requests])

    @property
    def priority(self) -> tuple[int | None, ...]:
        """As it came with the request; None if it came with none."""
        return tuple([request.priority for request in self._requests])

    @property
    def tenant(self) -> tuple[str, ...]:
        return tuple([request.tenant for request in self._requests])

    @property
    def routing_key(self) -> tuple[str, ...]:
        return tuple([request.routing_key for request in self._requests])


class WaitingQueue(RequestColumns):
    """What a policy sees of an engine: the requests that wait, in queue order, the time, and the requests that run.

    It notes what was looked at beyond the requests themselves, so that the order is made again when that changes.
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
        """Host time since the journal began."""
        self._saw_time = True
        return self._scheduler.now_us

    @property
    def running(self) -> RequestColumns:
        """The requests that are being prefilled or decoded, in no meaningful order."""
        self._saw_running = True
        return RequestColumns(_running(self._scheduler))

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Output each already has, because it ran before and was retracted."""
        return tuple([request.outputs for request in self._requests])

    @property
    def waiting_since_us(self) -> tuple[int, ...]:
        """When each last began to wait: its arrival, or its retraction."""
        return tuple([request.waiting_since_us for request in self._requests])

    @property
    def waited_us(self) -> tuple[int, ...]:
        """For how long each has waited since then."""
        now = self.now_us
        return tuple([now - request.waiting_since_us for request in self._requests])

    @property
    def admitted_before(self) -> tuple[bool, ...]:
        """Whether it ran before and was retracted."""
        return tuple([request.cached_tokens >= 0 for request in self._requests])

    @property
    def bypassed(self) -> tuple[int, ...]:
        """Requests admitted before each, though they stood behind it."""
        return tuple([request.bypassed for request in self._requests])

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens of each with KV in the radix cache now, as far as each may use it; looked up if need be."""
        page_size = self.config.page_size
        if not self.config.radix_cache:
            return (0,) * len(self)
        return tuple([found.pages * page_size for found in self._found()])

    @property
    def uncached_tokens(self) -> tuple[int, ...]:
        """Tokens an extend of each would compute: prompt and kept output, less what is cached. At least 1."""
        cached = self.cached_tokens
        return tuple([len(r.tokens) // TOKEN_BYTES - c for r, c in zip(self._requests, cached, strict=True)])

    @property
    def prefilled_since_arrival(self) -> tuple[int, ...]:
        """Tokens the engine has extended, for others, since each arrived: its age in work done."""
        self._saw_work = True
        done = self._prefilled_tokens
        return tuple([done - request.prefilled_before for request in self._requests])

    def _found(self) -> list[Found]:
        """Where the cached prefix of each ends."""
        self._saw_tree = True
        radix = self._scheduler.memory.radix
        return [matched(request, radix) for request in self._requests] if radix.present else []


Policy = Callable[[WaitingQueue], Sequence[int]]


def matched(request: Request, radix: RadixCache) -> Found:
    """Where its prefix in the radix cache ends, as far as it may use it; looked up only if that has changed."""
    found = request.matched
    if found is None or found.node.version != found.version:
        most = request.cacheable_tokens // radix.page_tokens
        found = request.matched = radix.find(request.namespace, request.tokens, most, found)
    return found


def refresh_prefixes(waiting: list[Request], radix: RadixCache) -> None:
    """Count the cached prefixes of those first in the queue as used just now, the head's last of all.

    So they outlive what no request waits for, however long the queue moves on nothing else. SGLang does so for policies
    that do not look at the cache; here it is for any.
    """
    for request in reversed(waiting[:REFRESHED_REQUESTS]):
        radix.touch(matched(request, radix).node)


class OrderingPart(Struct):
    """The waiting queue in a snapshot."""

    waiting: list[int]
    prefilled_tokens: int


class Ordering(Component):
    """One engine's passes over its waiting queue: `turn`, for each request `writer_of_prefix`, then `close`."""

    PART = OrderingPart
    EMPTY_AT_REST = ("waiting",)

    def __init__(self, config: SchedConfig) -> None:
        self._config = config
        self.waiting: list[Request] = []  # in the order in which they began to wait
        self.prefilled_tokens = 0  # new tokens of all extends; what waiting requests age by under policy hrrn
        own = POLICIES.get(config.schedule_policy)
        if own is None:
            from lockstep.core.contract.policies import load  # looks at what is installed; only for policies of others

            own = load(config.schedule_policy, config.schedule_policy_version)
        self._policy: Policy = own
        self._installed = config.schedule_policy not in POLICIES  # by an installed package: what it returns is checked
        self._limit = ENDLESS if config.bypass_limit is None else config.bypass_limit
        self._defers = config.prefix_deduplication == "defer"
        self._moves_duplicates = config.prefix_deduplication == "last"
        self._plain = (
            own is fcfs and config.prefix_deduplication == "off"
        )  # then only deferrals of a request's own let others pass
        self._passed_by: list[Request] = []  # of the plain pass that is on: those that were not admitted
        self._may_be_urgent = True  # a request may have been bypassed often enough: false spares a look at all
        self._next_pages = -(-DUPLICATE_SHARED_TOKENS_MIN // config.page_size)

        # the order of the last pass, and what it was made from
        self._order: list[Request] = []
        self._queue: list[Request] = []
        self._view: WaitingQueue | None = None
        self._made_from: tuple[object, ...] = ()
        self._epoch = -1

        # the current pass: which request computes what, by where it begins and what follows there
        self._writers: list[Request] = []
        self._written: dict[int, dict[tuple[str, bytes], Request]] = {}
        self._deferred_for_prefix = False

    # -------------------------------------------------------------------------------------- snapshot and invariants

    def part(self) -> OrderingPart:
        """Return the state for a snapshot. What the order was made from is not stored: it is made again."""
        return OrderingPart([request.request_id for request in self.waiting], self.prefilled_tokens)

    def load(self, part: OrderingPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        self.waiting = [restored.requests[request_id] for request_id in part.waiting]
        self.prefilled_tokens = part.prefilled_tokens

    def check_state(self, facts: Facts) -> None:
        """L5, S14: no waiting request was bypassed too often; a remembered match is what the tree would return now."""
        limit, radix = facts.config.bypass_limit, facts.radix
        for request in self.waiting:
            if limit is not None and request.bypassed > limit:
                fail(f"L5: {request.name} was passed by {request.bypassed} times, bypass_limit {limit}")
            found = request.matched
            if radix.present and found is not None and found.node.version == found.version:
                most = request.cacheable_tokens // facts.config.page_size
                pages = radix.match(request.namespace, request.tokens, most).pages
                if found.pages != pages:
                    fail(f"S14: {request.name} remembers {found.pages} pages, the tree has {pages}")

    # ------------------------------------------------------------------------------------------------------- the pass

    def turn(self, scheduler: SchedulerView) -> Iterator[Request]:
        """The waiting requests, in the order in which to consider them.

        A request that no longer waits when the next one is taken was admitted. The queue keeps it until `close`.
        """
        return self._plain_turn(self.waiting) if self._plain else self._policy_turn(scheduler)

    def _policy_turn(self, scheduler: SchedulerView) -> Iterator[Request]:
        """In the policy's order, but requests that were bypassed often enough first."""
        order, at, admitted, admissions_left = self._ordered(scheduler), 0, 0, -1
        if self._defers:
            self._begin_writers(scheduler)
        while at < len(order):
            request = order[at]
            at += 1
            yield request
            if request.state is WAITING:
                if request.bypassed >= self._limit:
                    return  # it may not be bypassed any more
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
        """The queue as it stands. It stops where a request that had to stay behind may be bypassed no more."""
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
        """The first so many to be considered. Begins no pass."""
        plain = self._plain or not self.waiting
        return (self.waiting if plain else self._ordered(scheduler))[:count]

    def writer_of_prefix(self, request: Request, scheduler: SchedulerView) -> Request | None:
        """Under "defer": the request that computes, already or in this pass, the pages needed next. Else None."""
        if not self._defers:
            return None
        radix = scheduler.memory.radix
        if not radix.present or request.bypassed >= self._limit:
            return None
        pages, page_bytes = matched(request, radix).pages, radix.page_tokens * TOKEN_BYTES
        start, stop = pages * page_bytes, (pages + self._next_pages) * page_bytes
        if stop > request.cacheable_tokens * TOKEN_BYTES:
            return None  # it could not use all of them: at least its last token is computed in any case
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
        """Empty the queue. Returns what it had."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def prefilled(self, tokens: int) -> None:
        """Count new tokens of an extend: waiting requests age by them under policy hrrn."""
        self.prefilled_tokens += tokens

    def joins(self, request: Request) -> None:
        """A request joined the queue: it may have waited before, and been bypassed often enough then."""
        if request.bypassed >= self._limit:
            self._may_be_urgent = True

    def close(self) -> bool:
        """End the pass: admitted requests leave the queue, and the requests that they passed by count it.

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
            retry = True  # a request that waits for another may fit as soon as its prefix is cached
        self._writers, self._written = [], {}
        return retry

    # ----------------------------------------------------------------------------------------------------- the order

    def _ordered(self, scheduler: SchedulerView) -> list[Request]:
        """The queue in the order to be considered: as the last pass had it, if nothing has changed since."""
        if not self._order_is_current(scheduler):
            queue = self.waiting.copy()
            view = WaitingQueue(queue, scheduler, self.prefilled_tokens)
            positions = self._checked_positions(view) if self._installed else self._policy(view)
            order = [queue[position] for position in positions]
            if self._moves_duplicates and len(queue) <= LPM_FALLBACK_WAITING:
                order = self._duplicates_last(order, view)
            self._order, self._queue, self._view = self._urgent_first(order, queue), queue, view
            self._made_from = self._inputs(view, scheduler)
            self._epoch = scheduler.memory.radix.epoch
        return self._order

    def _order_is_current(self, scheduler: SchedulerView) -> bool:
        """Whether the order of the last pass, which admitted no request, would come out again."""
        view = self._view
        return (
            view is not None
            and self._queue == self.waiting
            and self._made_from == self._inputs(view, scheduler)
            and (not view._saw_tree or self._matches_are_current(scheduler.memory.radix))
        )

    def _inputs(self, view: WaitingQueue, scheduler: SchedulerView) -> tuple[object, ...]:
        """What the policy looked at beside queue and tree, as it is now."""
        return (
            scheduler.now_us if view._saw_time else None,
            self.prefilled_tokens if view._saw_work else None,
            (_running_batches(scheduler), scheduler.prefilling) if view._saw_running else None,
        )

    def _matches_are_current(self, radix: RadixCache) -> bool:
        """Whether all matches are what they were; those that the tree has moved under are looked up again."""
        if self._epoch == radix.epoch or not radix.present:
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
        """What a policy of an installed package says. Raises PolicyError unless it names each position once."""
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
        """Those that begin like one ahead of them in the queue go behind all others, in queue order."""
        span = DUPLICATE_SHARED_TOKENS_MIN * TOKEN_BYTES
        seen: dict[tuple[str, bytes], Request] = {}
        last: dict[int, Request] = {}
        for request, cached in zip(view._requests, view.cached_tokens, strict=True):
            if cached <= DUPLICATE_CACHED_TOKENS_MAX and len(request.tokens) >= span:
                first = seen.setdefault((request.namespace, request.tokens[:span]), request)
                if first is not request:
                    last[request.request_id] = request
        return [request for request in order if request.request_id not in last] + list(last.values())

    # --------------------------------------------------------------------------------------------------------- bypass

    def _urgent_first(self, order: list[Request], queue: list[Request]) -> list[Request]:
        """Those that were passed by often enough, in queue order, then the others in the order given."""
        if not self._may_be_urgent:
            return order
        limit = self._limit
        urgent = [request for request in queue if request.bypassed >= limit]
        self._may_be_urgent = bool(urgent)
        return urgent + [request for request in order if request.bypassed < limit] if urgent else order

    def _admissions_left(self, queue: list[Request]) -> int:
        """How many may be admitted until a request may have been bypassed `bypass_limit` times."""
        limit = self._limit
        return min([limit - request.bypassed for request in queue if request.bypassed < limit], default=ENDLESS)

    def _count(self) -> None:
        """Take the admitted out of the queue; all requests ahead of one of them were bypassed."""
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
        """The requests that compute a prompt now: what is launched is published when its batch comes back."""
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
        """Note what a writer computes from byte `start` of its tokens on. The first writer is the one to wait for."""
        stop = start + self._next_pages * self._config.page_size * TOKEN_BYTES
        written.setdefault((writer.namespace, writer.tokens[start:stop]), writer)


def _running(scheduler: SchedulerView) -> list[Request]:
    split, decoding = scheduler.prefilling, scheduler.all_running[0].requests
    return decoding if split is None else [*decoding, split]


def _running_batches(scheduler: SchedulerView) -> tuple[RunningBatch, ...]:
    return tuple([running.batch for running in scheduler.microbatches.states])


# ------------------------------------------------------------------------------------------------------- the policies


def fcfs(queue: WaitingQueue) -> Sequence[int]:
    """First come, first served: the queue as it stands."""
    return range(len(queue))


def lpm(queue: WaitingQueue) -> Sequence[int]:
    """Longest cached prefix first, ties as they wait; fcfs when the queue is long (LPM_FALLBACK_WAITING)."""
    if len(queue) > LPM_FALLBACK_WAITING:
        return fcfs(queue)
    return _highest_first(queue.cached_tokens)


def dfs_weight(queue: WaitingQueue) -> Sequence[int]:
    """Branch by branch of the radix tree, the branch with the most waiting requests first; deepest first inside a
    branch.

    Ties as the first of each branch waits. Requests with nothing cached come last.
    """
    top = -1  # stands for all roots
    weights: Counter[int] = Counter()
    branches: dict[int, dict[int, None]] = {}  # below each node, those with waiting requests
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
    backwards: list[int] = []  # a node, then its branches from the lightest: read from behind, branches come first
    stack = [top]
    while stack:
        number = stack.pop()
        here = sorted(ending.get(number, ()), key=lambda end: -end[0])
        backwards += [position for _, position in reversed(here)]
        stack += sorted(branches.get(number, ()), key=lambda branch: -weights[branch])
    backwards.reverse()
    return backwards


def lof(queue: WaitingQueue) -> Sequence[int]:
    """Longest output first, by what the request may produce."""
    return _highest_first(queue.max_new_tokens)


def shuffled(queue: WaitingQueue) -> Sequence[int]:
    """In an order drawn from `schedule_seed` and each request's id, the same for as long as it waits."""
    order: list[int] = _mixed(queue.request_ids, queue.config.schedule_seed).argsort(kind="stable").tolist()
    return order


def routing_key(queue: WaitingQueue) -> Sequence[int]:
    """Keys that most running requests have first, then all others, alphabetically, so that equal ones are neighbours.

    As the queue stands if no running request has a key.
    """
    running = Counter(key for key in queue.running.routing_key if key)
    if not running:
        return fcfs(queue)
    keys = [(-running[key], key) for key in queue.routing_key]
    return sorted(range(len(queue)), key=keys.__getitem__)


def priority(queue: WaitingQueue) -> Sequence[int]:
    """Highest priority first, or lowest if `schedule_low_priority_values_first`; ties as they wait.

    A request without a priority has `default_priority_value`; if that is unset, it comes after all others.
    """
    sign = 1 if queue.config.schedule_low_priority_values_first else -1
    default = queue.config.default_priority_value
    worst = (1, 0) if default is None else (0, sign * default)
    keys = [worst if value is None else (0, sign * value) for value in queue.priority]
    return sorted(range(len(queue)), key=keys.__getitem__)


def hrrn(queue: WaitingQueue) -> Sequence[int]:
    """Highest response ratio next: tokens prefilled for others since it arrived, per token it lacks; else as they wait.

    Short ones go first, and long ones age until they do. Falls back to fcfs when the queue is long, like lpm.
    """
    if len(queue) > LPM_FALLBACK_WAITING:
        return fcfs(queue)
    ages, lacking = queue.prefilled_since_arrival, queue.uncached_tokens
    return _highest_first([age / tokens for age, tokens in zip(ages, lacking, strict=True)])


def shortest_prefill_first(queue: WaitingQueue) -> Sequence[int]:
    """Fewest uncached tokens first, ties as they wait."""
    return sorted(range(len(queue)), key=queue.uncached_tokens.__getitem__)


def _highest_first(keys: Sequence[float]) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)  # reverse keeps ties in order


def _mixed(request_ids: Sequence[int], seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A number per request that looks random and depends on seed and id only: splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = np.array(request_ids, np.uint64) + np.uint64(seed)
    for _ in range(2):  # the second round parts seeds that lie close together
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
