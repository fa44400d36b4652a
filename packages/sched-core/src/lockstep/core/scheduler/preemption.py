"""Priority preemption: which requests are retracted for a more important one.

A request that waits has its turn and lacks memory, a row or a place among those that run. Then requests that decode and
are less important by more than `priority_preemption_threshold` are retracted, if that is enough for it to start; if
not, nothing happens. Pages, rows and places that are coming back anyway are counted first, so none is retracted while
the request waits for what others gave up before.

**No retraction in circles.** A victim is strictly less important than the request it made room for, so it is
considered after it, and it never makes room for it again once that has started. So each time a request is preempted,
one that is more important by more than the threshold starts. (Or has been passed by `bypass_limit` times meanwhile by
still more important ones, and goes first for that reason.)

**Microbatches.** Any decoding request may be retracted, in any microbatch; only a place belongs to a microbatch. A
request starts where a place is free, when that is launched. Where none is and none comes free, it gets the place of the
least important of all decoding ones: none is retracted for a place before the microbatch of that one is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lockstep.core.contract.commands import NO_ROWS, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DeferReason
from lockstep.core.kv.hybrid import Hybrid
from lockstep.core.kv.radix import Match
from lockstep.core.requests.budget import PrefillBudget, aligned, chunk_tokens, counts_on_ends, lasts_with
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.table import ONE, Int32s, Request, RunningBatch
from lockstep.core.scheduler.state import SchedulerState

SHORTAGES: frozenset[DeferReason] = frozenset(
    {"running_limit", "microbatch", "rows", "kv_budget", "pages", "window", "state"}
)
"""What a request may lack that others can give it."""


def candidates(request: Request, running_batch: RunningBatch, config: SchedConfig) -> list[int]:
    """Members of the cohort that may have to make room for the request: the least important first, then the newest."""
    least = importance(request, config) - config.priority_preemption_threshold
    ranked = [
        (rank, -member.request_id, i)
        for i, member in enumerate(running_batch.requests)
        if (rank := importance(member, config)) < least
    ]
    return [i for _, _, i in sorted(ranked)]


def fewest(ranked: list[int], enough: Callable[[list[int]], bool]) -> list[int]:
    """The shortest beginning of `ranked` that is enough, without those it can do without, the last ranked spared first.

    `enough` stays true when more are taken. Returns: [] if not even all are enough.
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


def make_room(
    state: SchedulerState, request: Request, lacks: DeferReason, budget: PrefillBudget, parts: int, step: Step
) -> list[Request]:
    """Retract members so that the request can start, now or once work in flight has given their pages back.

    No request is retracted when that is not enough, when what it lacks is coming back anyway, or while it waits for its
    adapter or for a tier.

    Args:
        budget: of the extend that is being put together; it regains what comes free at once.
        parts: requests in that extend so far.
    Returns: the retracted requests; they are not in the waiting queue yet.
    """
    config, memory = state.config, state.memory
    if not config.enable_priority_preemption or lacks not in SHORTAGES:
        return []
    all_running, _ = state.all_running
    ranked = candidates(request, all_running, config)
    if not ranked or not memory.adapters.has_place_for(request.adapter):
        return []
    if memory.tiers.holds_back(request, state.now_us):
        return []
    need = AdmissionNeed.of(state, request, budget, parts)
    if need is None or need.is_met(state, budget, []):
        return []
    if not state.microbatches.has_place_for_newcomer(state.in_flight, all_running.requests[ranked[0]]):
        return []
    victims = [all_running.requests[i] for i in fewest(ranked, lambda some: need.is_met(state, budget, some))]
    if not victims:
        return []
    available, reserved = memory.available_pages, tokens_kept_free(state)
    state.leave_running(victims)
    for victim in victims:
        state.retract(victim, "preempted", step, beneficiary=request.request_id)
    back = (memory.available_pages - available) * config.page_size
    unreserved = reserved - tokens_kept_free(state)
    budget.regain(back, unreserved, state.set_aside(state.running_batch, state.positions))
    return victims


def make_room_for_split(
    state: SchedulerState, request: Request, take: int, budget: PrefillBudget, step: Step
) -> list[Request]:
    """The same for the prompt that is split, which has all its full pages, but lacks window pages to go on with.

    `take`: tokens of its next chunk, as far as full pages go.
    """
    config, hybrid = state.config, state.memory.hybrid
    if not config.enable_priority_preemption or hybrid.window is None or take <= 0:
        return []
    if not config.overlap_consecutive_prefills and state.in_flight and state.in_flight[-1].plan.extend_rows:
        return []
    span, (running_batch, positions) = (request.computed, take), state.all_running

    def enough(leaving: list[int]) -> bool:
        back = state.memory.back_once_delivered([(running_batch.requests[i], int(positions[i])) for i in leaving], None)
        staying = np.delete(np.arange(running_batch.size), leaving)
        then = np.minimum(positions[staying] + back.launches * state.moves_by, running_batch.limits[staying] - ONE)
        return _goes_on(hybrid, state, request, span, NO_ROWS, budget, leaving, then)

    ranked = candidates(request, running_batch, config)
    if not ranked or enough([]):
        return []
    victims = [running_batch.requests[i] for i in fewest(ranked, enough)]
    state.leave_running(victims)
    for victim in victims:
        state.retract(victim, "preempted", step, beneficiary=request.request_id)
    return victims


def stays_behind(state: SchedulerState, request: Request) -> bool:
    """Whether a waiting request would have to make room for the chunked request, for lack of window pages.

    It does not start before that is computed: it would be retracted again.
    """
    split, hybrid = state.prefilling, state.memory.hybrid
    if split is None or hybrid.window is None or not state.config.enable_priority_preemption:
        return False
    least = importance(split, state.config) - state.config.priority_preemption_threshold
    return importance(request, state.config) < least


def _goes_on(
    hybrid: Hybrid,
    state: SchedulerState,
    request: Request,
    span: tuple[int, int],
    path: Int32s,
    budget: PrefillBudget,
    leaving: list[int],
    then: Int32s,
) -> bool:
    """Whether pools beside full attention have room for a chunk of the span, see `Hybrid.would_start`."""
    room = hybrid.would_start(state, request, span, path, budget, leaving, then)
    may_split = state.prefilling is None or state.prefilling is request
    return span[1] <= room or (may_split and aligned(span[0], room, budget.align) > 0)


def tokens_kept_free(state: SchedulerState) -> int:
    """Tokens of the total budget that running requests take: their reserve, and what decodes in the same pass."""
    return state.reserve_of(*state.all_running) + _tokens_along(state, state.running_batch.size)


def _tokens_along(state: SchedulerState, members: int) -> int:
    """Tokens of the total budget that so many take which decode in the same pass."""
    config = state.config
    along = config.reserve == "ratio" and config.batching != "prefill_first"
    return members * state.tokens_per_decode if along else 0


class AdmissionNeed(NamedTuple):
    """What a request needs to start, in the terms of its admission."""

    request: Request
    match: Match | None
    matched_pages: int  # of its prefix, unlocked so far: not available for anything else
    wanted: int  # tokens of the total budget
    new_pages: int  # that its whole prompt needs
    pages: int  # of its first extend
    span: tuple[int, int]  # of that: where it begins, and how many tokens

    @staticmethod
    def of(state: SchedulerState, request: Request, budget: PrefillBudget, parts: int) -> AdmissionNeed | None:
        """None if it is not memory that it lacks: this extend is full, or may not follow the one in flight."""
        config = state.config
        page_size = config.page_size
        if config.prefill_max_requests is not None and parts >= config.prefill_max_requests:
            return None
        if not config.overlap_consecutive_prefills and state.in_flight and state.in_flight[-1].plan.extend_rows:
            return None
        match = state.memory.match(request)
        cached, locking = (match.pages * page_size, match.evictable_pages)
        new_tokens = len(request.tokens) // 4 - cached
        take = chunk_tokens(cached, new_tokens, budget, first=not parts, may_split=state.prefilling is None)
        if take <= 0 or budget.input <= 0 or (budget.chunk is not None and budget.chunk <= 0):
            return None
        wanted = budget.wanted(new_tokens, request.max_new_tokens - request.outputs)
        pages = -(-take // page_size)
        return AdmissionNeed(request, match, locking, wanted, -(-new_tokens // page_size), pages, (cached, take))

    def is_met(self, state: SchedulerState, budget: PrefillBudget, leaving: list[int]) -> bool:
        """Whether it can start once all in flight is delivered and these have left: `Engine._examine` then.

        Until that has come back the others go on, and open pages. `leaving`: indices into all decoding requests.
        """
        config, memory, (running_batch, positions) = state.config, state.memory, state.all_running
        page_size, microbatches = config.page_size, state.microbatches
        back = memory.back_once_delivered([(running_batch.requests[i], int(positions[i])) for i in leaving], self.match)
        active = state.active - back.places - len(leaving)
        if active >= config.max_running_requests or not (memory.table.row_available() or back.rows):
            return False
        if microbatches.free_places(state.in_flight, [running_batch.requests[i] for i in leaving]) <= 0:
            return False
        stay = np.ones(running_batch.size, np.bool_)
        stay[leaving] = False
        staying, now = running_batch.only(stay.nonzero()[0]), positions[stay]
        then = np.minimum(now + np.int32(back.launches * state.moves_by), staying.limits - ONE)
        along, along_then = staying, then  # those of the same pass
        if microbatches.several:
            mine = microbatches.of_current()[stay].nonzero()[0]
            along, along_then = staying.only(mine), then[mine]
        pages = back.pages - int((-(-then // page_size) + -now // page_size).sum())
        gained = pages * page_size
        gained += tokens_kept_free(state) - state.reserve_of(staying, then) - _tokens_along(state, along.size)
        if budget.total + gained <= 0 or budget.current + pages * page_size <= 0:
            return False
        locking = self.matched_pages + back.matched
        if active and counts_on_ends(state.config, self.request):
            free = budget.current + pages * page_size - self.new_pages * page_size
            if not lasts_with(staying, then, [*budget.newcomers, self.request], state.ratio.value, free):
                return False
        elif active and not budget.has(self.wanted, locking * page_size - gained):
            return False
        if self.pages > memory.available_pages + pages - state.set_aside(along, along_then) - locking:
            return False
        path = memory.path_of(self.match)
        return _goes_on(memory.hybrid, state, self.request, self.span, path, budget, leaving, then)
