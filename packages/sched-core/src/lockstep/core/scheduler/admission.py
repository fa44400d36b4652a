"""Which waiting request may start, and how much of its prompt the next extend takes.

Admission is a loop over resources (`RESOURCES`, docs/scheduling.md). A resource either fits, perhaps with fewer tokens,
or defers the request with a reason. The order is part of the contract: the reason of the first resource that does not
fit is reported, and digests cover it. The loop has only the resources that the settings name.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import AdmissionDeferred, DeferReason, RequestId
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.resource import AdmissionView, ExtendShare, Resource, overrides
from lockstep.core.requests.budget import (
    Deferral,
    PrefillBudget,
    aligned,
    ceil_to,
    chunk_tokens,
    counts_on_ends,
    lasts_with,
)
from lockstep.core.requests.rules import CONTINUE, NO_TOKENS
from lockstep.core.requests.table import Int32s, Request


class RunningLimit(Resource):
    """`max_running_requests`: requests with rows at once, without those whose KV only has to be sent yet."""

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether one more request may run."""
        view = share.view
        limit = view.config.max_running_requests
        if view.active < limit or view.active - view.sending < limit:
            return None
        return Deferral("running_limit", limit=limit, lasts=True)


class MicrobatchPlaces(Resource):
    """Places in the microbatch whose launch is planned."""

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self.taken = Deferral("microbatch", limit=view.microbatches.size, lasts=True)

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether microbatches have a limit of places."""
        return config.pp_max_micro_batch_size is not UNSET

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether the microbatch has a place."""
        return None if share.view.place_available() else self.taken


class RequestRows(Resource):
    """Rows of the request table, `rows_max`."""

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self.taken = Deferral("rows", limit=view.config.rows_max, lasts=True)

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether a row is free."""
        return None if share.view.row_available() else self.taken


class ExtendBudget(Resource):
    """The requests and tokens that one extend may take. Admitted requests are charged to its budget."""

    no_tokens = Deferral("kv_budget", lasts=True)
    spent = Deferral("prefill_budget")

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether the extend may take another request."""
        most = share.view.config.prefill_max_requests
        if most is not None and share.parts >= most:
            return self.spent
        verdict = share.budget.verdict()
        if verdict == CONTINUE:
            return None
        return self.no_tokens if verdict == NO_TOKENS else self.spent

    def reserve(self, share: ExtendShare) -> None:
        """Charge the tokens of the extend, and by the reserve policy those that the request needs until it ends."""
        budget, request = share.budget, share.request
        budget.newcomers.append(request)
        if share.locked_pages:
            budget.hold(share.locked_pages * budget.page_size)
        if budget.policy == "full":
            budget.promise(share.new_tokens, request.max_new_tokens - request.outputs)
        budget.charge(share.take, request.max_new_tokens if share.take == share.new_tokens else 0)


class AdapterSlots(Resource):
    """Slots of LoRA adapters on the device, `max_loras`."""

    absent = Deferral("adapter", own=True)

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether LoRA is on."""
        return bool(config.max_loras)

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether the adapter of the request is loaded, and few enough adapters are in use."""
        return None if self.memory.adapters.has_place_for(share.request.adapter) else self.absent

    def take(self, row: int, request: Request) -> None:
        """Count the row as a user of the adapter of its request."""
        self.memory.adapters.take(row, request.adapter)

    def release(self, row: int) -> None:
        """End the use of an adapter by the row."""
        self.memory.adapters.release(row)

    def void(self) -> None:
        """Free all slots."""
        self.memory.adapters.void()


class TierMoves(Resource):
    """Loads from host memory and prefetches from storage for which a request waits."""

    loading = Deferral("load", own=True)
    fetching = Deferral("prefetch", own=True)

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether there are tiers below the device."""
        return config.tiers is not UNSET

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether the request waits for no operation, or its wait is over."""
        reason = self.memory.tiers.deferral_reason(share.request, share.view.now_us)
        if not reason:
            return None
        return self.loading if reason == "load" else self.fetching


class CachedPrefix(Resource):
    """The cached prefix. It never defers a request; it determines the number of tokens to compute."""

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Match the prompt against the radix cache."""
        request = share.request
        match = share.match = share.view.match(request)
        share.cached_tokens = match.pages * self.memory.config.page_size
        share.locked_pages = match.evictable_pages
        share.new_tokens = len(request.tokens) // 4 - share.cached_tokens
        return None


class KvReserve(Resource):
    """KV for the prompt, and for output by the policy `reserve`, beside the reserve of running requests."""

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether the budget has that KV.

        If no other request is active, the request has the whole pool. Its arrival was accepted because it fits there,
        so admission and rejection cannot differ by a page.
        """
        view, budget, request = share.view, share.budget, share.request
        config = view.config
        if not view.active and not (config.reserve == "full" and view.transfers_hold_pages):
            return None
        wanted = budget.wanted(share.new_tokens, request.max_new_tokens - request.outputs)
        if counts_on_ends(config, request):
            free = budget.current - ceil_to(share.new_tokens, config.page_size)
            if not lasts_with(*view.all_running, [*budget.newcomers, request], view.ratio.value, free):
                return Deferral("kv_budget", wanted, max(free, 0), lasts=True)
            return None
        locked_tokens = share.locked_pages * config.page_size
        if budget.has(wanted, locked_tokens):
            return None
        return Deferral("kv_budget", wanted, budget.total - locked_tokens, lasts=True)


class ChunkTokens(Resource):
    """Tokens of one extend, limited by `max_prefill_tokens` and `chunked_prefill_size`."""

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Take the whole prompt, or a chunk if it may be split."""
        budget, new_tokens = share.budget, share.new_tokens
        share.take = chunk_tokens(share.cached_tokens, new_tokens, budget, not share.parts, share.may_split)
        if share.take > 0:
            return None
        return Deferral("prefill_budget", new_tokens, budget.input if budget.chunk is None else budget.chunk)


class DevicePages(Resource):
    """Pages of the device for the tokens that the extend takes."""

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether these pages are available beside those of decodes in the same pass and those that the match locks."""
        page_size = self.memory.config.page_size
        room = share.view.available_pages - share.budget.set_aside - share.locked_pages
        return Deferral("pages", share.take, room * page_size) if -(-share.take // page_size) > room else None


class StateSlots(Resource):
    """Slots of recurrent state for a row."""

    absent = Deferral("state")

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether layers have recurrent state."""
        return config.hybrid is not UNSET and config.hybrid.state_slots > 0

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Whether slots are available behind the match."""
        return self.absent if share.view.lacks_state(self.memory.path_of(share.match)) else None


class WindowPages(Resource):
    """Pages of sliding-window layers."""

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether layers have sliding windows."""
        return config.hybrid is not UNSET and config.hybrid.window_tokens > 0

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Limit the tokens to those for which window pages are available.

        Beside active requests a chunk is not shortened to less than `chunk_tokens_min`. A request that started with
        less would take the pages that active requests open next, and one of these would be retracted for it.
        """
        memory, view = self.memory, share.view
        path = memory.path_of(share.match)
        room = within_windows(
            view, share.request, share.cached_tokens, share.take, path, share.budget, may_split=share.may_split
        )
        least = min(share.take, chunk_tokens_min(view.config)) if view.active else 1
        if room < max(least, 1):
            return Deferral("window", share.new_tokens, memory.hybrid.window_tokens_available)
        share.take = room
        return None


RESOURCES: tuple[type[Resource], ...] = (
    RunningLimit,
    MicrobatchPlaces,
    RequestRows,
    ExtendBudget,
    AdapterSlots,
    TierMoves,
    CachedPrefix,
    KvReserve,
    ChunkTokens,
    DevicePages,
    StateSlots,
    WindowPages,
)
"""All resources in the order of admission.

A resource before `CachedPrefix` can use the request only; one behind `ChunkTokens` also the tokens to compute.
"""


class AdmissionPart(Struct):
    """Admission in a snapshot: the shortage reported last, and the state of resources by name."""

    deferred: tuple[int, DeferReason] | None
    resources: dict[str, Any] | UnsetType = UNSET


class Admission(Component):
    """The resources of one engine, and the shortage that was last reported for the head of the waiting queue."""

    PART = AdmissionPart

    def __init__(self, view: AdmissionView) -> None:
        self._memory = view.memory
        self.resources = tuple(kind(view) for kind in RESOURCES if kind.exists(view.config))
        self.reported: tuple[RequestId, DeferReason] | None = None  # the last shortage
        self._checks = tuple(one.fits for one in self.resources if overrides(one, "fits"))
        self._reserves = tuple(one.reserve for one in self.resources if overrides(one, "reserve"))
        view.memory.serve(
            takes=tuple(one.take for one in self.resources if overrides(one, "take")),
            releases=tuple(one.release for one in self.resources if overrides(one, "release")),
            voids=tuple(one.void for one in self.resources if overrides(one, "void")),
        )

    def part(self) -> AdmissionPart:
        """Return the state for a snapshot."""
        return AdmissionPart(self.reported, {one.name: one.dump() for one in self.resources if one.name} or UNSET)

    def load(self, part: AdmissionPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        self.reported = part.deferred
        for resource in self.resources:
            if resource.name and part.resources is not UNSET:
                resource.load(part.resources[resource.name])

    def check_state(self, facts: Facts) -> None:
        """S37: what each resource has given out follows from the rows that are not free."""
        rows: dict[int, Request | None] = {request.row: request for request in facts.holders}
        rows |= dict.fromkeys(deferred.row for deferred in self._memory.deferred.rows)
        for resource in self.resources:
            resource.check(rows)

    def examine(
        self, view: AdmissionView, request: Request, budget: PrefillBudget, parts: int, may_split: bool
    ) -> ExtendShare | Deferral:
        """Return the share of an extend with which a waiting request may start, or why it may not. Changes nothing.

        Args:
            view: the scheduler, or a projection of it, to determine what would let the request start.
            budget: the budget of the extend.
            parts: requests in the extend so far.
            may_split: whether the prompt may be computed in chunks; only one prompt of an engine at a time is.
        """
        share = ExtendShare(view, request, budget, parts, may_split)
        for check in self._checks:
            deferral = check(share)
            if deferral is not None:
                return deferral
        return share

    def reserve(self, share: ExtendShare) -> None:
        """Charge the share of an admitted request to the planned extend."""
        for reserve in self._reserves:
            reserve(share)
        reported = self.reported
        if reported is not None and reported[0] == share.request.request_id:
            self.reported = None

    def report(self, request: Request, deferral: Deferral, now_us: int, step: Step) -> None:
        """Report a deferral once: a shortage once for the head of the queue, another reason once for the request."""
        reason = deferral.reason
        if deferral.own:
            if request.deferred != reason:
                request.deferred = reason
                step.decided.append(AdmissionDeferred(now_us, request.request_id, reason))
            return
        if self.reported != (request.request_id, reason):
            self.reported = (request.request_id, reason)
            needed, available = deferral.needed, max(deferral.available, 0)
            deferred = AdmissionDeferred(now_us, request.request_id, reason, needed, available, limit=deferral.limit)
            step.decided.append(deferred)


def chunk_tokens_min(config: SchedConfig) -> int:
    """Return the tokens below which a lack of window pages does not shorten a first chunk; 0: no limit."""
    least = UNSET if config.hybrid is UNSET else config.hybrid.chunk_tokens_min
    return 0 if least is UNSET else least


def within_windows(
    view: AdmissionView,
    request: Request,
    start: int,
    take: int,
    path: Int32s,
    budget: PrefillBudget,
    *,
    may_split: bool,
) -> int:
    """Return how many of `take` tokens, from position `start` on, sliding windows have pages for.

    Args:
        path: the cached pages in front of the request, if it has no row yet.
    Returns: `take`; fewer tokens, up to a position at which the prompt may be split; or 0 if it may not be split.
    """
    room = view.window_room(request, start, take, path, budget)
    return take if take <= room else aligned(start, room, budget.align) if may_split else 0
