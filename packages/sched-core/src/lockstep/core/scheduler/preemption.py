"""Priority preemption: which requests are retracted for a more important one.

If the next waiting request lacks memory, a row or a place, decoding requests that are less important by more than
`priority_preemption_threshold` are retracted, provided that this lets it start. Otherwise nothing happens. Pages, rows
and places that work in flight frees are counted first, so no request is retracted if that is enough.

Whether it is enough is decided by the resources of admission: they examine the request in a `Projection` of the
scheduler, in which everything in flight is delivered and the victims have left. No rule of admission is stated twice.

**No retraction in circles.** A victim is strictly less important than the request that it made room for. So it is
considered after that request, and never makes room for it again once that has started. Each time a request is
preempted, one that is more important by more than the threshold starts. (Or that one has been bypassed `bypass_limit`
times meanwhile by still more important requests, and is urgent.)

**Microbatches.** Any decoding request of any microbatch may be retracted; only a place belongs to a microbatch. A
request starts in a microbatch with a free place, when that is launched. If no place is free or comes free, it gets the
place of the least important decoding request: no request is retracted for a place before the microbatch of that one is
launched.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np

from lockstep.core.contract.commands import NO_ROWS, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DeferReason
from lockstep.core.kv.radix import NO_MATCH, Match
from lockstep.core.kv.resource import ExtendShare
from lockstep.core.requests.budget import PrefillBudget
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.table import ONE, Int32s, Request, RunningBatch
from lockstep.core.scheduler.admission import within_windows
from lockstep.core.scheduler.state import SchedulerState

SHORTAGES: frozenset[DeferReason] = frozenset(
    {"running_limit", "microbatch", "rows", "kv_budget", "pages", "window", "state"}
)
"""Deferral reasons that a retraction can remove."""


def candidates(request: Request, running_batch: RunningBatch, config: SchedConfig) -> list[int]:
    """Return the indices of members that may be retracted for the request: least important first, then newest."""
    least = importance(request, config) - config.priority_preemption_threshold
    ranked = [
        (rank, -member.request_id, i)
        for i, member in enumerate(running_batch.requests)
        if (rank := importance(member, config)) < least
    ]
    return [i for _, _, i in sorted(ranked)]


def fewest(ranked: list[int], enough: Callable[[list[int]], bool]) -> list[int]:
    """Return a minimal set of members that is enough: the shortest beginning of `ranked`, then without unneeded ones.

    Of unneeded members the last ranked ones are spared first. `enough` stays true when members are added.
    Returns: [] if not even all members are enough.
    """
    if not enough(ranked):
        return []
    least, most = 1, len(ranked)
    while least < most:
        middle = (least + most) // 2
        if enough(ranked[:middle]):
            most = middle
        else:
            least = middle + 1
    chosen = ranked[:most]
    for one in reversed(chosen[:-1]):
        others = [other for other in chosen if other != one]
        if enough(others):
            chosen = others
    return chosen


# mechanism: preemption (decided)
def make_room(
    state: SchedulerState, request: Request, lacks: DeferReason, budget: PrefillBudget, parts: int, step: Step
) -> list[Request]:
    """Retract members so that the request can start, now or once work in flight has freed their pages.

    No request is retracted if that is not enough, if work in flight frees enough, or while the request waits for its
    adapter or for a tier.

    Args:
        lacks: the reason for which admission has deferred the request.
        budget: of the planned extend; it regains what is freed at once.
        parts: requests in that extend so far.
    Returns: the retracted requests; they are not in the waiting queue yet.
    """
    config, memory = state.config, state.memory
    if not config.enable_priority_preemption or lacks not in SHORTAGES:
        return []
    if not config.overlap_consecutive_prefills and state.in_flight and state.in_flight[-1].plan.extend_rows:
        return []  # this extend may not follow the one in flight
    all_running, _ = state.all_running
    ranked = candidates(request, all_running, config)
    if not ranked:
        return []
    match, may_split = memory.match(request), state.prefilling is None

    def enough(leaving: list[int]) -> bool:
        projection = Projection(state, match, leaving)
        share = state.admission.examine(projection, request, projection.budget_from(budget), parts, may_split)
        return isinstance(share, ExtendShare)

    if enough([]) or not state.microbatches.has_place_for_newcomer(state.in_flight, all_running.requests[ranked[0]]):
        return []
    victims = [all_running.requests[i] for i in fewest(ranked, enough)]
    if not victims:
        return []
    _preempt(state, victims, request, budget, step)
    return victims


def _preempt(
    state: SchedulerState, victims: list[Request], beneficiary: Request, budget: PrefillBudget, step: Step
) -> None:
    """Retract members of a running batch for a request, and add their tokens to the budget of its extend."""
    available, reserved = state.memory.available_pages, tokens_kept_free(state)
    for victim in victims:
        state.retract(victim, "preempted", step, beneficiary=beneficiary.request_id)
    back = (state.memory.available_pages - available) * state.config.page_size
    unreserved = reserved - tokens_kept_free(state)
    running = state.microbatches.current
    budget.regain(back, unreserved, state.set_aside(running.batch, running.positions))


def make_room_for_chunked(
    state: SchedulerState, request: Request, take: int, budget: PrefillBudget, step: Step
) -> list[Request]:
    """Retract members so that the chunked request, which has its full pages, gets window pages for its next chunk.

    Args:
        take: tokens of that chunk, as far as full pages suffice.
    Returns: the retracted requests; they are not in the waiting queue yet.
    """
    config, hybrid = state.config, state.memory.hybrid
    if not config.enable_priority_preemption or hybrid.window is None or take <= 0:
        return []
    if not config.overlap_consecutive_prefills and state.in_flight and state.in_flight[-1].plan.extend_rows:
        return []
    running_batch, _ = state.all_running

    def enough(leaving: list[int]) -> bool:
        view = Projection(state, NO_MATCH, leaving)
        return within_windows(view, request, request.computed, take, NO_ROWS, budget, may_split=True) > 0

    ranked = candidates(request, running_batch, config)
    if not ranked or enough([]):
        return []
    victims = [running_batch.requests[i] for i in fewest(ranked, enough)]
    _preempt(state, victims, request, budget, step)
    return victims


def waits_for_chunked(state: SchedulerState, request: Request) -> bool:
    """Whether a waiting request must not start before the chunked request is computed.

    It would be retracted again if the chunked request, which is more important, lacks window pages.
    """
    chunked, hybrid = state.prefilling, state.memory.hybrid
    if chunked is None or hybrid.window is None or not state.config.enable_priority_preemption:
        return False
    least = importance(chunked, state.config) - state.config.priority_preemption_threshold
    return importance(request, state.config) < least


def tokens_kept_free(state: SchedulerState) -> int:
    """Return the tokens of the total budget that running requests take: their reserve, and decodes of the same pass."""
    return state.reserve_of(*state.all_running) + _tokens_along(state, state.running_batch.size)


def _tokens_along(state: SchedulerState, members: int) -> int:
    """Return the tokens of the total budget that decodes of so many members in the same pass take."""
    config = state.config
    along = config.reserve == "ratio" and config.batching != "prefill_first"
    return members if along else 0


class Projection:
    """The scheduler once all batches in flight are delivered and some decoding requests have left.

    Until the last of these batches is delivered, the other members decode and open pages, which are subtracted from the
    pages that come free. Resources read a projection through `ExtendShare.view`, as they read the scheduler itself.
    """

    transfers_hold_pages = False  # pages of transfers are ignored: they end without a retraction
    sending = 0  # conservative: a request whose KV is being sent counts as a running one

    def __init__(self, state: SchedulerState, match: Match, leaving: list[int]) -> None:
        """Project the present state.

        Args:
            match: the cached prefix of the request that is to start.
            leaving: indices of the requests that leave, into all decoding requests.
        """
        running_batch, positions = state.all_running
        memory, page_size = state.memory, state.config.page_size
        back = memory.returning_once_delivered([(running_batch.requests[i], int(positions[i])) for i in leaving], match)
        stay = np.ones(running_batch.size, np.bool_)
        stay[leaving] = False
        staying, now = running_batch.only(stay.nonzero()[0]), positions[stay]
        then: Int32s = np.minimum(now + np.int32(back.launches * state.moves_by), staying.limits - ONE)
        pages = back.pages - int((-(-then // page_size) + -now // page_size).sum())
        self._state = state
        self._match = match._replace(evictable_pages=match.evictable_pages + back.matched)
        self._leaving = leaving
        self._leaving_requests = [running_batch.requests[i] for i in leaving]
        self._rows = back.rows
        self._pages = pages
        self._then = then
        self.config, self.memory, self.microbatches = state.config, memory, state.microbatches
        self.now_us, self.ratio, self.page_mask = state.now_us, state.ratio, state.page_mask
        self.requests, self.in_flight = state.requests, ()
        self.active = state.active - back.places - len(leaving)
        self.all_running = staying, then
        self.running_batch, self.positions = staying, then  # members that decode in the planned pass
        if state.microbatches.several:
            mine = state.microbatches.of_current()[stay].nonzero()[0]
            self.running_batch, self.positions = staying.only(mine), then[mine]
        self.available_pages = memory.available_pages + pages

    def budget_from(self, budget: PrefillBudget) -> PrefillBudget:
        """Return a copy of the budget of an extend, with the tokens that come free or are not reserved any more."""
        state, later = self._state, copy(budget)
        kept_free = state.reserve_of(*self.all_running) + _tokens_along(state, self.running_batch.size)
        set_aside = state.set_aside(self.running_batch, self.positions)
        later.regain(self._pages * self.config.page_size, tokens_kept_free(state) - kept_free, set_aside)
        return later

    def row_available(self) -> bool:
        """Whether a row is free by then."""
        return bool(self._rows) or self.memory.table.row_available()

    def place_available(self) -> bool:
        """Whether the microbatch whose launch is planned has a free place by then."""
        return self.microbatches.free_places(self._state.in_flight, self._leaving_requests) > 0

    def match(self, request: Request) -> Match:
        """Return the cached prefix, with the pages that have no lock by then."""
        return self._match

    def lacks_state(self, path: Int32s) -> bool:
        """Whether no state slot is available by then."""
        return self.memory.hybrid.would_lack_state(self._state, path, self._leaving)

    def window_room(self, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget) -> int:
        """Return how many of `take` tokens sliding windows have pages for by then."""
        hybrid = self.memory.hybrid
        return hybrid.would_have_room(self._state, request, start, take, path, budget, self._leaving, self._then)
