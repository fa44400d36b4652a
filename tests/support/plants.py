"""Deliberate bugs, planted behind a switch, that prove the detectors work. Never imported by the product.

Each was a bug of a real engine; its docstring names the public reference (SG sglang, VL vllm, MS mini-sglang, NV
nano-vllm, BI, as in the museum of tests/README.md). `python tests/swarm.py --plant NAME` looks for one; the proof that
all are found, most by random histories and the rest by a scenario, is tests/test_swarm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from lockstep.core.contract.commands import PageDeltas, SampleBatch, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import PagesEvicted, RequestArrived, RequestCancelled
from lockstep.core.features import grammars
from lockstep.core.features.media import EncoderCache
from lockstep.core.kv.adapters import Adapters
from lockstep.core.kv.deferred import DeferredFree
from lockstep.core.kv.hybrid import Hybrid
from lockstep.core.kv.memory import Memory
from lockstep.core.kv.radix import Inserted, RadixCache
from lockstep.core.kv.resource import ExtendShare
from lockstep.core.kv.state_pool import StatePool
from lockstep.core.kv.tiers import LoadCandidate, Tiers
from lockstep.core.kv.window_pool import WindowPool
from lockstep.core.requests import delivery
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import Deferral, PrefillBudget
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.requests.radix_node import Found, RadixNode
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import Int32s, Request, RequestTable, RunningBatch
from lockstep.core.scheduler import ordering, preemption
from lockstep.core.scheduler.admission import AdapterSlots
from lockstep.core.scheduler.decode import DecodePlanner, Decodes
from lockstep.core.scheduler.prefill import PrefillPlanner
from lockstep.core.scheduler.state import SchedulerState

Plant = AbstractContextManager[None]
Original = Callable[..., Any]


@contextmanager
def _set(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _replaced(owner: type | ModuleType, name: str, bug: Callable[..., object]) -> Plant:
    """`owner.name` calls bug(original, ...) instead."""
    original = getattr(owner, name)
    return _set(owner, name, lambda *args, **options: bug(original, *args, **options))


# ------------------------------------------------------------------------------------------------------------ admission


def gate_off_by_a_page() -> Plant:
    """Admission requires a page more than the check at entry promised: a lone request waits without end (SG#28530)."""

    def bug(
        examine: Original, planner: PrefillPlanner, request: Request, budget: PrefillBudget, parts: int
    ) -> ExtendShare | Deferral:
        found: ExtendShare | Deferral = examine(planner, request, budget, parts)
        engine = planner._state
        tokens, page_size = len(request.tokens) // 4, engine.config.page_size
        if (
            isinstance(found, ExtendShare)
            and tokens + request.max_new_tokens - request.outputs + page_size > budget.current
        ):
            return Deferral("kv_budget", lasts=True) if not engine.active else found
        return found

    return _replaced(PrefillPlanner, "_examine", bug)


def hold_forgotten() -> Plant:
    """A candidate's cached prefix still counts as evictable for candidates after it (BI#748)."""
    return _replaced(PrefillBudget, "hold", lambda original, budget, tokens: None)


def prompt_charged_on_resume() -> Plant:
    """A retracted request is charged its prompt, without the output that must be computed again (SG#7434)."""
    examining: list[Request] = []

    def remember(examine: Original, planner: PrefillPlanner, request: Request, *rest: object) -> ExtendShare | Deferral:
        examining[:] = [request]
        found: ExtendShare | Deferral = examine(planner, request, *rest)
        return found

    def bug(wanted: Original, budget: PrefillBudget, new_tokens: int, remaining_output: int) -> int:
        tokens: int = wanted(budget, max(new_tokens - examining[0].outputs, 1), remaining_output)
        return tokens

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(PrefillPlanner, "_examine", remember), _replaced(PrefillBudget, "wanted", bug):
            yield

    return both()


def edge_of_the_context() -> Plant:
    """An old reserve of two tokens is still kept at the end of the context: answers there are cut short (SG#33814)."""
    return _set(
        SchedConfig,
        "request_tokens_max",
        property(lambda config: min(config.context_tokens_max - 2, config.pool_tokens)),
    )


def skipped_reversed() -> Plant:
    """Requests that were considered and skipped return to the waiting queue in reverse (VL#32173)."""

    def bug(plan_extend: Original, planner: PrefillPlanner, running: RunningState, step: Step) -> InFlight | None:
        batch: InFlight | None = plan_extend(planner, running, step)
        engine = planner._state
        if batch is None and not engine.batch_is_full:
            engine.waiting.reverse()
        return batch

    return _replaced(PrefillPlanner, "plan_extend", bug)


def whole_prompt_matched() -> Plant:
    """The longest prefix is compared including the token that must always be computed anew (VL#53706)."""

    def bug(matched: Original, request: Request, radix: RadixCache) -> Found:
        found = radix.find(request.namespace, request.tokens, len(request.tokens) // 4 // radix.page_tokens)
        request.matched = found
        return found

    return _replaced(ordering, "matched", bug)


def row_freed_between_chunks() -> Plant:
    """A split prompt frees its row between two chunks, while the first may still be running (SG#17850)."""

    def bug(extend_to: Original, planner: PrefillPlanner, request: Request, *rest: object) -> None:
        extend_to(planner, request, *rest)
        engine = planner._state
        if engine.prefilling is request:
            engine.memory.table.free_rows.append(request.row)

    return _replaced(PrefillPlanner, "_extend_to", bug)


# ----------------------------------------------------------------------------------------------------------- retraction


def whole_batch_must_fit() -> Plant:
    """Retraction checks whether the whole batch fits, not whether the rest of it does (SG#9989)."""
    needed: list[int] = []

    def remember(make_room: Original, planner: DecodePlanner, running: RunningState, step: Step) -> bool:
        needed[:] = [planner._pages_needed(running)]
        try:
            fits: bool = make_room(planner, running, step)
        finally:
            needed.clear()
        return fits

    def bug(pages_needed: Original, planner: DecodePlanner, running: RunningState) -> int:
        return needed[0] if needed else pages_needed(planner, running)

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(DecodePlanner, "_make_room", remember), _replaced(DecodePlanner, "_pages_needed", bug):
            yield

    return both()


def lone_decoder_ended() -> Plant:
    """The only decoding request ends with out_of_kv, although a split prompt could free some pages (NV#274)."""

    def bug(make_room: Original, planner: DecodePlanner, running: RunningState, step: Step) -> bool:
        engine = planner._state
        if engine.running_batch.size == 1 and engine.prefilling is not None:
            engine.finish(engine.running_batch.requests[0], "out_of_kv", step, flush=True)
            return False
        fits: bool = make_room(planner, running, step)
        return fits

    return _replaced(DecodePlanner, "_make_room", bug)


def output_cursor_reset() -> Plant:
    """A retracted request starts over, but the outputs sent so far are no longer counted (SG#39645)."""

    def bug(retract: Original, engine: SchedulerState, request: Request, *rest: object, **options: object) -> None:
        retract(engine, request, *rest, **options)
        request.tokens, request.outputs = request.tokens[: 4 * request.prompt_tokens], 0

    return _replaced(SchedulerState, "retract", bug)


def running_counted_down_twice() -> Plant:
    """A retracted request is subtracted from the running batch twice, so that too many run afterwards (SG#13142)."""

    def bug(retract: Original, engine: SchedulerState, *rest: object, **options: object) -> None:
        retract(engine, *rest, **options)
        engine.active -= 1

    return _replaced(SchedulerState, "retract", bug)


def double_free() -> Plant:
    """Releasing the row of a retracted request frees one of its pages twice (SG#18694)."""

    def bug(release: Original, memory: Memory, deferred: DeferredFree, step: Step) -> None:
        pages = memory.table.pages[deferred.row, deferred.protected_pages : deferred.protected_pages + 1].copy()
        has_private = -(-deferred.computed // memory.config.page_size) > deferred.protected_pages
        release(memory, deferred, step)
        if has_private and not deferred.publish and memory.pool.free_count < memory.pool.total:
            memory.pool.free(pages)

    return _replaced(Memory, "release", bug)


# -------------------------------------------------------------------------------------------------------------- overlap


def no_epoch_check() -> Plant:
    """Tokens in flight of a request that left its row are still applied (SG#1860)."""

    def bug(leave: Original, memory: Memory, request: Request, *rest: object, **options: object) -> None:
        row = request.row
        leave(memory, request, *rest, **options)
        for batch in memory.in_flight:
            batch.dead = [dead for dead in batch.dead if dead != row]

    return _replaced(Memory, "leave", bug)


def discard_is_a_flag() -> Plant:
    """One late token of a request is dropped, the newest, however many are in flight (VL#42117)."""

    def bug(leave: Original, memory: Memory, request: Request, *rest: object, **options: object) -> None:
        row = request.row
        leave(memory, request, *rest, **options)
        for batch in [batch for batch in memory.in_flight if row in batch.dead][:-1]:
            batch.dead.remove(row)

    return _replaced(Memory, "leave", bug)


def early_free() -> Plant:
    """Leaving a row ignores work in flight: its pages are free while a launched batch still writes them (VL#45357)."""

    def bug(leave: Original, memory: Memory, request: Request, step: Step, **how: Any) -> None:
        leave(memory, request, step, **how)
        while memory.deferred.rows:
            memory.release(memory.deferred.rows.pop(), step)

    return _replaced(Memory, "leave", bug)


def duplicates_not_deferred() -> Plant:
    """Pages replaced by those of the cache are free while a launched batch still reads them (VA#14055)."""
    return _replaced(Memory, "_free_behind", lambda original, memory, row, pages: memory.pool.free(pages))


def plan_mutated_after_launch() -> Plant:
    """A launched plan shares its positions with the scheduler, which moves them on (SG#1712)."""

    def bug(advance: Original, planner: DecodePlanner, running: RunningState, growing: Int32s, step: Step) -> Decodes:
        engine = planner._state
        before = engine.in_flight[-1].plan.stops if engine.in_flight else None
        decodes: Decodes = advance(planner, running, growing, step)
        if before is not None:
            before += 1
        return decodes

    return _replaced(DecodePlanner, "_advance", bug)


# ------------------------------------------------------------------------------------------------------------ the cache


def published_at_launch() -> Plant:
    """A prompt's KV is shared as soon as its extend is planned: others hit KV that is not computed yet (VL#37152)."""

    def bug(
        extend_to: Original, planner: PrefillPlanner, request: Request, stop: int, parts: list[Any], step: Step
    ) -> None:
        extend_to(planner, request, stop, parts, step)
        planner._state.memory.publish(request, stop, step)

    return _replaced(PrefillPlanner, "_extend_to", bug)


def key_without_namespace() -> Plant:
    """The key of cached KV lacks the tenant's salt (VL#17045)."""

    def bug(init: Original, request: Request, *rest: object) -> None:
        init(request, *rest)
        request.namespace = ""

    return _replaced(Request, "__init__", bug)


def key_from_the_prompt_only() -> Plant:
    """A request that ends caches its prompt and not its output: the next turn computes the answer again (SG#16521)."""

    def bug(release: Original, memory: Memory, deferred: DeferredFree, step: Step) -> None:
        page_size = memory.config.page_size
        whole = max(deferred.prompt_tokens // page_size, deferred.protected_pages)
        held = -(-deferred.computed // page_size)
        if deferred.publish and held > whole:
            memory.pool.free(memory.table.pages[deferred.row, whole:held].copy())
            deferred = deferred._replace(computed=whole * page_size)
        release(memory, deferred, step)

    return _replaced(Memory, "release", bug)


def lock_leak() -> Plant:
    """Every fifth unlock of the radix cache is forgotten (SG#20049)."""
    calls = 0

    def bug(unlock: Original, radix: RadixCache, node: RadixNode) -> None:
        nonlocal calls
        calls += 1
        if calls % 5:
            unlock(radix, node)

    return _replaced(RadixCache, "unlock", bug)


def lock_skips_the_node() -> Plant:
    """Locking walks up from the parent: the matched node itself may be evicted (MS#46)."""

    def bug(lock_node: Original, radix: RadixCache, node: RadixNode) -> None:
        lock_node(radix, node)
        node.lock_count -= 1
        if not node.lock_count:
            radix.locked_pages -= len(node.pages)

    return _replaced(RadixCache, "lock_node", bug)


def dead_matcher() -> Plant:
    """Sampling a deferred batch moves the matchers of rows whose request has left, too (VL#42619)."""

    def bug(sample: Original, batch: InFlight, outputs: Int32s) -> SampleBatch:
        dead, batch.dead = batch.dead, []
        try:
            commanded: SampleBatch = sample(batch, outputs)
            return commanded
        finally:
            batch.dead = dead

    return _replaced(grammars, "_sample", bug)


def node_keeps_a_view() -> Plant:
    """A node keeps a view of the caller's array, which the caller changes later (MS#94fe255)."""

    def bug(
        insert: Original, radix: RadixCache, namespace: str, tokens: bytes, pages: Int32s, **options: object
    ) -> Inserted:
        inserted: Inserted = insert(radix, namespace, tokens, pages, **options)
        if inserted.already < len(pages):
            inserted.node.pages = pages[inserted.already :]
        return inserted

    return _replaced(RadixCache, "insert", bug)


def evictable_drifts() -> Plant:
    """The counter of evictable pages includes those above a locked node; the evictor cannot free them (SG#30532)."""

    def bug(lock_node: Original, radix: RadixCache, node: RadixNode) -> None:
        before = radix.locked_pages
        lock_node(radix, node)
        radix.locked_pages = before + (len(node.pages) if node.lock_count == 1 else 0)

    return _replaced(RadixCache, "lock_node", bug)


# ----------------------------------------------------------------------------------------- adapters and preemption


def adapter_evicted_in_use() -> Plant:
    """The slot of an adapter that only work in flight still uses is given to another (VL#47724)."""

    def bug(release: Original, adapters: Adapters, row: int) -> None:
        if row in adapters.rows:
            release(adapters, row)

    def early(leave: Original, memory: Memory, request: Request, step: Step, **how: Any) -> None:
        row = request.row
        leave(memory, request, step, **how)
        if memory.adapters.present:
            memory.adapters.release(row)

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(Adapters, "release", bug), _replaced(Memory, "leave", early):
            yield

    return both()


def preempted_for_nothing() -> Plant:
    """Preemption takes every request it may, however few are enough, and one even if all are not (SG#13361)."""

    def bug(fewest: Original, ranked: list[int], enough: Callable[..., bool]) -> list[int]:
        return ranked if enough(ranked) else ranked[:1]

    return _replaced(preemption, "fewest", bug)


def drafts_without_pages() -> Plant:
    """Pages of the next decode are counted without its drafts: one at most is opened for each row (SG#14180)."""

    def bug(open_pages: Original, memory: Memory, rows: Int32s, index: Int32s, step: Step) -> PageDeltas:
        first = np.sort(np.unique(rows, return_index=True)[1])
        deltas: PageDeltas = open_pages(memory, rows[first], index[first], step)
        return deltas

    return _replaced(Memory, "open_pages", bug)


def stop_among_drafts_missed() -> Plant:
    """Of several tokens accepted at once only the last is tested for the end (SG#28802)."""

    def bug(stopped: Original, batch: InFlight, tokens: Int32s) -> tuple[list[int], Int32s]:
        ends, counts = stopped(batch, tokens)
        assert batch.steps is not None
        return [i for i in ends if counts[i] == batch.steps[i]], batch.steps.copy()

    return _replaced(delivery, "stopped", bug)


# ---------------------------------------------------------------------------------------- windows and recurrent state


def window_let_go_to_the_token() -> Plant:
    """Windows are freed up to the token, not to the last page boundary: cached pages then end in a hole (SG#22470)."""

    def bug(first_seen: Original, window: WindowPool, pages: Any) -> Any:
        return first_seen(window, pages + 1)

    return _replaced(WindowPool, "first_seen", bug)


def tombstone_matched() -> Plant:
    """A match continues behind pages without window blocks (SG#29860)."""
    return _replaced(WindowPool, "usable", lambda original, window, path: np.ones(path.size, np.bool_))


def window_read_in_flight() -> Plant:
    """A decode that opens a page frees a window that a prompt in flight still reads (VL#45357)."""

    def bug(
        slides: Original, window: WindowPool, running_batch: RunningBatch, positions: Int32s, busy: list[Int32s]
    ) -> Any:
        return slides(window, running_batch, positions, [])

    return _replaced(WindowPool, "slides_by_growth", bug)


def window_lock_leak() -> Plant:
    """Every fifth time that a row frees windows, the last one stays locked (SG#20049)."""
    calls = 0

    def bug(unlock: Original, window: WindowPool, pages: Int32s) -> None:
        nonlocal calls
        calls += 1
        unlock(window, pages if calls % 5 else pages[:-1])

    return _replaced(WindowPool, "unlock", bug)


def window_of_headroom() -> Plant:
    """A request that starts must get a whole window of pages, even if it will open fewer (SG#32379)."""

    def bug(promised: Original, window: WindowPool, request: Request, stop: int, first: int) -> int:
        return window.row_pages_max

    return _replaced(WindowPool, "promised", bug)


def state_of_another_boundary() -> Plant:
    """A match ends at any page boundary, with or without a state there (VL#53706)."""

    def bug(continued: Original, hybrid: Hybrid, *rest: object) -> Any:
        states, hybrid.states = hybrid.states, None
        try:
            return continued(hybrid, *rest)
        finally:
            hybrid.states = states

    return _replaced(Hybrid, "continued", bug)


def checkpoint_written_again() -> Plant:
    """A request that starts from a checkpoint computes in that same slot, from which others start too (SG#23346)."""

    def bug(take_row: Original, states: StatePool, row: int, path: Int32s, step: Step) -> None:
        take_row(states, row, path, step)
        started, _, source = states.starts[-1]
        if source >= 0:
            states.starts[-1] = (started, source, source)

    return _replaced(StatePool, "take_row", bug)


def slot_of_state_leaks() -> Plant:
    """A retracted request keeps the checkpoints that it left (SG#16067)."""

    def bug(free_row: Original, states: StatePool, row: int) -> None:
        states.unpublished.pop(row, None)
        free_row(states, row)

    return _replaced(StatePool, "free_row", bug)


def other_microbatches_not_searched() -> Plant:
    """A cancelled request is searched in the microbatch that is launched next, and in no other (SG#29405)."""

    def bug(states_of: Original, several: Microbatches, requests: list[Request]) -> list[RunningState]:
        return [running for running in states_of(several, requests) if running is several.current]

    return _replaced(Microbatches, "states_of", bug)


def chunk_needs_a_place() -> Plant:
    """The next chunk of a prompt requires a place although the prompt has one (SG#23006)."""
    return _replaced(
        Microbatches, "has_place", lambda original, several, request=None: several.places[several.at] < several.size
    )


def place_kept_by_the_first() -> Plant:
    """A prompt that moves on keeps its place where it began: microbatches fill with places of no request (SG#29405)."""

    def bug(take_place: Original, several: Microbatches, request: Request) -> None:
        before = several.members.get(request.request_id)
        take_place(several, request)
        if before is not None and before != several.at:
            several.places[before] += 1

    return _replaced(Microbatches, "take_place", bug)


def checkpoint_not_passed() -> Plant:
    """The state that wrong drafts left behind is kept as the state of the right ones (VL#39273)."""
    return _replaced(StatePool, "verified", lambda original, states, batch: None)


FOUND_BY_SCENARIO: dict[str, str] = {
    # No state breaks: the engine is only slower, or waits without end where all requests run.
    "key_from_the_prompt_only": "museum/d7_second_turn_hits_prompt_and_output",
    "window_of_headroom": "museum/a7_short_resume_at_two_windows",
    # Random histories find them, but seldom.
    "layers_of_two_weights": "multiplexing/new_weights",
    "checkpoint_not_passed": "hybrid/drafts",
    "dead_matcher": "grammar/cancelled_before_sampling",
    "hold_forgotten": "admission/locked_prefix_counts_for_later_candidates",
    "lone_decoder_ended": "retraction/last_decoder_and_a_split_prompt",
    "preempted_for_nothing": "preemption/fewest_victims",
    "compiled_grammar_counts_as_held": "grammar/queue_limit",
    "uses_counted_double": "tiers/selective_three_uses",
    "stop_among_drafts_missed": "museum/g13_stop_token_among_drafts",
    "whole_batch_must_fit": "museum/b2_the_rest_must_fit_not_the_whole",
}
"""The bugs that random histories find seldom or never, and the scenario that detects each."""

OF_HYBRIDS = frozenset(
    "checkpoint_written_again slot_of_state_leaks state_of_another_boundary tombstone_matched "
    "window_let_go_to_the_token window_lock_leak window_read_in_flight "
    "state_slot_not_freed window_not_unlocked window_page_not_freed".split()
)
"""The bugs that only histories with windows or states can show."""

OF_MICROBATCHES = frozenset(
    "chunk_needs_a_place microbatch_place_not_released other_microbatches_not_searched place_kept_by_the_first".split()
)
"""The bugs that only histories with several microbatches can show."""

OF_COMMANDS = frozenset(
    "cancel_of_a_split_prompt_lost min_tokens_ignored no_preemption_for_a_place pause_leaves_a_split_prompt".split()
)
"""The bugs that histories with many commands and few places show most often."""

OF_TIERS = frozenset(("prefetch_not_cancelled",))
"""The bugs that only histories with cache tiers can show."""

SUITS: dict[str, Callable[[SchedConfig], bool]] = {
    "fenced_pages_not_counted": lambda config: config.overlap_depth > 0 and config.schedule_conservativeness < 0.1,
    "retracts_for_drafts": lambda config: config.speculates and config.schedule_conservativeness < 0.1,
}
"""Settings that a history must have to show a bug often; other histories are left out of the hunt for it."""

# --------------------------------------------------------------------------------------------------- releases left out


def row_not_freed() -> Plant:
    """The row of a request that has left stays taken."""
    return _replaced(RequestTable, "free_row", lambda original, table, row: None)


def page_not_freed() -> Plant:
    """One page of a released row is not freed."""

    def bug(release: Original, memory: Memory, deferred: DeferredFree, step: Step) -> None:
        free = memory.pool.free_count
        release(memory, deferred, step)
        if memory.pool.free_count > free:
            memory.pool.alloc(1)

    return _replaced(Memory, "release", bug)


def lock_not_released() -> Plant:
    """The cached prefix of a request that has left stays locked."""
    return _replaced(Memory, "unlock_path", lambda original, memory, handle, namespace, step: None)


def running_place_not_released() -> Plant:
    """A request that has left still counts towards `max_running_requests`."""

    def bug(leave: Original, state: SchedulerState, *rest: object, **options: object) -> None:
        leave(state, *rest, **options)
        state.active += 1

    return _replaced(SchedulerState, "leave", bug)


def microbatch_place_not_released() -> Plant:
    """A request that has left keeps its place in a microbatch."""
    return _replaced(Microbatches, "give_place", lambda original, microbatches, request: None)


def adapter_not_released() -> Plant:
    """A row that is free still counts as a user of its adapter."""
    return _replaced(AdapterSlots, "release", lambda original, slots, row: None)


def window_page_not_freed() -> Plant:
    """Full pages come back to their pool, and the window block of the last one does not."""
    return _replaced(WindowPool, "drop", lambda original, window, pages: original(window, pages[:-1]))


def window_not_unlocked() -> Plant:
    """A row that is released keeps the locks on its window blocks."""
    return _replaced(Hybrid, "unlock_windows", lambda original, hybrid, row, pages: None)


def state_slot_not_freed() -> Plant:
    """A row that is released keeps one of its slots of state."""

    def bug(free_row: Original, states: StatePool, row: int) -> None:
        free_row(states, row)
        states.pool.alloc(1)

    return _replaced(StatePool, "free_row", bug)


def host_page_not_freed() -> Plant:
    """Pages that are evicted from host memory come back to nothing."""
    return _replaced(Tiers, "_free_host_pages", lambda original, tiers, pages: original(tiers, pages[:-1]))


def tier_locks_not_released() -> Plant:
    """A copy between tiers has ended and keeps its locks."""
    return _replaced(Tiers, "_release", lambda original, tiers, operation: None)


def encoder_room_not_released() -> Plant:
    """A request that needs no encoder output any more keeps it pinned."""
    return _replaced(EncoderCache, "release", lambda original, cache, request_id, free_after=None: None)


# -------------------------------------------------------------------------- bugs that neither digest nor scenario shows


def tiers_never_wake() -> Plant:
    """A request that waits for a load or a prefetch has a due time, and the engine does not wake for it."""

    def bug(advance: Original, tiers: Tiers, requests: Any, waiting: Any, step: Step, *, admits: bool) -> bool:
        wake_at_us = step.wake_at_us
        freed: bool = advance(tiers, requests, waiting, step, admits=admits)
        step.wake_at_us = wake_at_us
        return freed

    return _replaced(Tiers, "advance", bug)


def load_waits_for_ever() -> Plant:
    """A request that waits for a load has no due time, though `load_timeout_us` is set."""

    def bug(wait: Original, tiers: Tiers, candidate: LoadCandidate, number: int, step: Step) -> bool:
        waits: bool = wait(tiers, candidate, number, step)
        candidate.due_us = None
        return waits

    return _replaced(Tiers, "_wait", bug)


def running_timeout_forgotten() -> Plant:
    """The settings limit the time of a request, and its timer is not set."""

    def bug(set_timers: Original, state: SchedulerState, request: Request) -> None:
        config = state.config
        state.config = msgspec.structs.replace(config, running_timeout_us=None)
        try:
            set_timers(state, request)
        finally:
            state.config = config

    return _replaced(SchedulerState, "_set_timers", bug)


def grammar_timeout_forgotten() -> Plant:
    """A request waits for its grammar without a time limit."""

    def bug(must_wait: Original, own: grammars.Grammars, request: Request, timeout_us: int | None, step: Step) -> bool:
        waits: bool = must_wait(own, request, None, step)
        return waits

    return _replaced(grammars.Grammars, "must_wait", bug)


def compiled_grammar_counts_as_held() -> Plant:
    """A request whose grammar is compiled is refused because other requests wait for theirs."""

    def bug(refuse: Original, own: grammars.Grammars, event: RequestArrived, *rest: Any) -> None:
        known = own.known.get(event.grammar.digest) if event.grammar is not None else None
        if known is None or known.error:
            refuse(own, event, *rest)
            return
        known.error, error = None, known.error
        try:
            refuse(own, event, *rest)
        finally:
            known.error = error

    return _replaced(grammars.Grammars, "refuse", bug)


def uses_counted_double() -> Plant:
    """A use of a cached page counts twice under write_through_selective."""

    def bug(used: Original, tiers: Tiers, match: Any) -> None:
        used(tiers, match)
        used(tiers, match)

    return _replaced(Tiers, "used", bug)


# ----------------------------------------------------------------------------------- bugs that leave every state sound


def cancel_of_a_split_prompt_lost() -> Plant:
    """The cancel of a request whose prompt is computed in chunks is ignored."""

    def bug(cancel: Original, state: SchedulerState, event: RequestCancelled, step: Step) -> None:
        if state.requests.get(event.request_id) is not state.prefilling:
            cancel(state, event, step)

    return _replaced(SchedulerState, "cancel", bug)


def pause_leaves_a_split_prompt() -> Plant:
    """A pause that retracts leaves its row to the request whose prompt is computed in chunks."""

    def bug(retract_all: Original, state: SchedulerState, reason: str, step: Step) -> None:
        split = state.prefilling
        if split is None or reason != "pause":
            retract_all(state, reason, step)
            return
        row, split.row = split.row, -1
        retract_all(state, reason, step)
        split.row = row

    return _replaced(SchedulerState, "retract_all", bug)


def no_preemption_for_a_place() -> Plant:
    """If all places of running requests are taken, no request is preempted for a more important one."""

    def bug(make_room: Original, state: SchedulerState, request: Request, lacks: str, *rest: Any) -> list[Request]:
        victims: list[Request] = [] if lacks == "running_limit" else make_room(state, request, lacks, *rest)
        return victims

    return _replaced(preemption, "make_room", bug)


def fenced_pages_not_counted() -> Plant:
    """Pages of requests that have left come back with a batch in flight, and others are still retracted."""

    def bug(returning_pages: Original, memory: Memory) -> int:
        rows, memory.deferred.rows = memory.deferred.rows, []
        try:
            pages: int = returning_pages(memory)
        finally:
            memory.deferred.rows = rows
        return pages

    return _replaced(Memory, "returning_pages", bug)


def evicts_the_whole_allocation() -> Plant:
    """An allocation evicts all the pages that it needs, not only those that the free list lacks."""

    def bug(alloc: Original, memory: Memory, pages: int, reason: Any, step: Step) -> Int32s:
        if pages > memory.pool.free_count and memory.radix.evictable_pages:
            evicted = memory.evict(pages, step)
            memory.pool.free(evicted)
            step.decided.append(PagesEvicted(step.time_us, evicted.size, reason))
        allocated: Int32s = alloc(memory, pages, reason, step)
        return allocated

    return _replaced(Memory, "alloc", bug)


def prefetch_not_cancelled() -> Plant:
    """A prefetch continues although no request waits for it any more."""
    return _replaced(Tiers, "_give_up", lambda original, tiers, number, step: None)


def retracts_for_drafts() -> Plant:
    """The retraction loop ignores that drafts may be left out: requests are retracted to make room for drafts."""
    return _replaced(
        DecodePlanner,
        "_pages_needed",
        lambda original, planner, running: planner._state.next_pages(running.batch, running.positions),
    )


def min_tokens_ignored() -> Plant:
    """A request may end before it has `min_new_tokens`."""

    def bug(init: Original, request: Request, *rest: object) -> None:
        init(request, *rest)
        request.min_new_tokens = 0

    return _replaced(Request, "__init__", bug)


PLANTS: dict[str, Callable[[], Plant]] = {
    plant.__name__: plant
    for plant in (
        adapter_evicted_in_use,
        checkpoint_not_passed,
        checkpoint_written_again,
        chunk_needs_a_place,
        dead_matcher,
        discard_is_a_flag,
        double_free,
        drafts_without_pages,
        duplicates_not_deferred,
        early_free,
        edge_of_the_context,
        evictable_drifts,
        gate_off_by_a_page,
        hold_forgotten,
        key_from_the_prompt_only,
        key_without_namespace,
        lock_leak,
        lock_skips_the_node,
        lone_decoder_ended,
        no_epoch_check,
        node_keeps_a_view,
        other_microbatches_not_searched,
        output_cursor_reset,
        place_kept_by_the_first,
        plan_mutated_after_launch,
        preempted_for_nothing,
        prompt_charged_on_resume,
        published_at_launch,
        row_freed_between_chunks,
        running_counted_down_twice,
        skipped_reversed,
        slot_of_state_leaks,
        state_of_another_boundary,
        stop_among_drafts_missed,
        tombstone_matched,
        whole_batch_must_fit,
        whole_prompt_matched,
        window_let_go_to_the_token,
        window_lock_leak,
        window_of_headroom,
        window_read_in_flight,
    )
}

RELEASES: dict[str, Callable[[], Plant]] = {
    plant.__name__: plant
    for plant in (
        adapter_not_released,
        encoder_room_not_released,
        host_page_not_freed,
        lock_not_released,
        microbatch_place_not_released,
        page_not_freed,
        row_not_freed,
        running_place_not_released,
        state_slot_not_freed,
        tier_locks_not_released,
        window_not_unlocked,
        window_page_not_freed,
    )
}
"""The release of each resource, left out: no bugs of other engines, but mistakes that a new resource invites."""

UNSEEN: dict[str, Callable[[], Plant]] = {
    plant.__name__: plant
    for plant in (
        compiled_grammar_counts_as_held,
        grammar_timeout_forgotten,
        load_waits_for_ever,
        running_timeout_forgotten,
        tiers_never_wake,
        uses_counted_double,
    )
}
"""Mistakes that an earlier version of the tests did not detect."""

OBLIGATIONS: dict[str, Callable[[], Plant]] = {
    plant.__name__: plant
    for plant in (
        cancel_of_a_split_prompt_lost,
        evicts_the_whole_allocation,
        fenced_pages_not_counted,
        min_tokens_ignored,
        no_preemption_for_a_place,
        pause_leaves_a_split_prompt,
        prefetch_not_cancelled,
        retracts_for_drafts,
    )
}
"""Mistakes that leave every state sound: only what must happen after a command, or with a decision, shows them."""
