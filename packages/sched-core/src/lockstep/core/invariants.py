"""Invariants: equations that always hold, checked from scratch by `check(engine)` after any step.

Each check names the property that it guards (S1, S5, ... of docs/invariants.md). Pools are compared as sets of ids,
never as sums, since a double free and a leak cancel in a sum. Tests and simulations can enable the checks. Random
histories spend most of their time here. So facts that several equations use are gathered once (`Facts`), and names for
messages are built only after a failure.

A component checks itself (`Component.check_state`). This module has the equations over requests, rows, pages and
batches of the scheduler, which take in all components.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from lockstep.core.contract.checks import all_ids, counts_of, fail, misowned, same
from lockstep.core.features import diffusion, speculation
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.table import Request, RequestState

if TYPE_CHECKING:
    from lockstep.core.contract.commands import Step
    from lockstep.core.scheduler.engine import Engine


def check(engine: Engine) -> None:
    """Raise InvariantError, with the numbers, for the first equation that does not hold."""
    memory = engine.memory
    facts = Facts(
        engine, memory.radix, memory.pool.free_ids(), engine.blocked, launch_found_nothing=engine.launch_found_nothing
    )
    _containers(engine)
    _rows(engine, facts)
    _spans(engine, facts)
    _pages(engine, facts)
    _reserve(engine, facts)
    _locks(engine, facts)
    _in_flight(engine, facts)
    _held(engine)
    for component in engine.components:
        component.check_state(facts)
    _progress(engine)
    _places(engine, facts)


def is_idle(engine: Engine) -> bool:
    """Return whether nothing is under way in an engine (S34): `Engine.idle`."""
    return engine.idle


def self_check(engine: Engine) -> None:
    """Run `check`, or `check_quiescent` if the engine is idle. Hosts call it to check their engine."""
    if is_idle(engine):
        check_quiescent(engine)
    else:
        check(engine)


def check_wake(engine: Engine, step: Step) -> None:
    """Check the wake-up time of the step that was just made, which is in no digest, against all due times (L7).

    Raises: InvariantError if the engine would sleep past a due time or has let one pass, or if a wait has no due time
        although the settings limit it.
    """
    dues = [due for request in engine.requests.values() for due in _dues_of(request)]
    for component in engine.components:
        dues += component.due_times()
    wake_at_us = step.wake_at_us
    for due_us, what in dues:
        if due_us <= engine.now_us:
            fail(f"L7: at {engine.now_us} us, {what}, which was due at {due_us} us")
        if wake_at_us is None or wake_at_us > due_us:
            fail(f"L7: {what} at {due_us} us, but the engine wakes at {wake_at_us} us")


def _dues_of(request: Request) -> Iterator[tuple[int, str]]:
    if request.finish_by_us is not None:
        yield request.finish_by_us, f"{request.name} must have finished"
    if request.deadline_us is not None and not request.ran:
        yield request.deadline_us, f"{request.name} must have been admitted"
    if request.grammar_due_us is not None:
        yield request.grammar_due_us, f"{request.name} must have its grammar"


def check_quiescent(engine: Engine) -> None:
    """Check that all rows, pages and maps of an idle engine are free or empty (L9); only sessions may hold KV.

    To be called when `is_idle`.
    """
    check(engine)
    for component in engine.components:
        component.check_at_rest()
    if not engine.memory.operations.device_busy:
        same("L9 locked pages", engine.memory.radix.locked_pages, engine.sessions.pages_held_alone())
    for name, left in (("waiting", engine.waiting), ("blocked", engine.blocked), ("in_flight", engine.in_flight)):
        if left:
            fail(f"L9: `{name}` is not empty at rest: {left}")
    same("L9 active", engine.active, 0)


def _containers(engine: Engine) -> None:
    """S15, S16, S34: each live request is in exactly one container, the one of its state."""
    live = engine.requests
    waiting = [request.request_id for request in (*engine.waiting, *engine.blocked.values())]
    running_batch = [request.request_id for request in engine.all_running[0].requests]
    prefilling = [request.request_id for request in engine.multiplexer.prefilling()]
    ending = [request.request_id for batch in engine.in_flight for request in batch.ending_requests()]
    ending += engine.multiplexer.joining()[0].request_ids.tolist()
    sent = [one.request_id for one in engine.transfers.all.values() if one.ends]
    contained = [*waiting, *running_batch, *prefilling, *ending, *sent]
    if len(contained) != len(live) or live.keys() != set(contained):
        fail(
            f"S15: waiting {waiting}, prefilling {prefilling}, decoding {running_batch}, ending {ending} "
            f"do not partition the live requests {list(live)}"
        )
    same(
        "S16 decoding requests",
        sorted(running_batch),
        [request.request_id for request in live.values() if request.decodes],
    )
    running = running_batch + ending + sent
    same("S33 sending", engine.transfers.sending, len(sent))
    for state, ids in (
        (RequestState.WAITING, waiting),
        (RequestState.PREFILLING, prefilling),
        (RequestState.RUNNING, running),
    ):
        for request_id in ids:
            if live[request_id].state is not state:
                fail(f"S16: r{request_id} is in the container of {state.name} but its state is not")
    newcomers = [request.request_id for request in engine.waiting if not request.ran]
    if newcomers != sorted(newcomers):
        fail(f"L5: requests that never ran wait in the order {newcomers}, not in order of arrival")
    same("S33 active", engine.active, len(prefilling) + len(running))


def _rows(engine: Engine, facts: Facts) -> None:
    """S2, S6: a row is free, held by one request, or in a deferred free; row and request refer to each other."""
    table = engine.memory.table
    held = [request.row for request in facts.holders]
    deferred_rows = [deferred.row for deferred in engine.memory.deferred.rows]
    if sorted((*table.free_rows, *held, *deferred_rows)) != list(range(len(table.holders))):
        misowned("S6 rows", len(table.holders), {"free": table.free_rows, "held": held, "deferred": deferred_rows})
    for request in engine.requests.values():
        if request.state is RequestState.WAITING:
            if request.row != -1 or request.handle is not None or request.computed or request.protected_pages:
                fail(f"S6: {request.name} waits but holds row {request.row}, {request.computed} positions computed")
        elif table.holders[request.row] is not request:
            fail(f"S6: row {request.row} does not refer to {request.name}")
    if any(map(table.holders.__getitem__, table.free_rows)):
        fail(f"S6: of the free rows {table.free_rows} some still have a holder: {table.holders}")
    running_batch, _ = engine.all_running
    same("S6 rows that decode", running_batch.rows.tolist(), [request.row for request in running_batch.requests])


def _spans(engine: Engine, facts: Facts) -> None:
    """S7, S14, S18: protected <= computed <= limit; chunks end before the prompt's end, at a multiple of the unit."""
    page_size, align, (running_batch, _) = engine.config.page_size, engine.config.split_tokens, engine.all_running
    for request in engine.requests.values():
        if len(request.tokens) != 4 * (request.prompt_tokens + request.outputs):
            fail(
                f"S20: {request.name} has {len(request.tokens)} bytes for {request.prompt_tokens} tokens of its prompt "
                f"and {request.outputs} of output"
            )
        if request.sent and not 0 <= request.sent <= (engine.outputs_of(request) if request.watches_text else 0):
            fail(f"S20: {request.name} was sent {request.sent} of {engine.outputs_of(request)} tokens")
    size = engine.config.block_tokens
    for request, computed in zip(facts.holders, facts.computed, strict=True):
        reach = diffusion.end_of(request, size) if size else request.reach
        if not 0 <= request.protected_pages * page_size <= computed <= reach:
            fail(
                f"S7: {request.name}: protected {request.protected_pages} pages of {page_size}, computed {computed}, "
                f"limit {request.limit}"
            )
        if request is engine.prefilling and (computed % align or computed >= request.prompt_tokens + request.outputs):
            fail(f"S18: {request.name} stopped its chunk at {computed} of {request.prompt_tokens + request.outputs}")
    for request, position in zip(running_batch.requests, facts.positions, strict=True):
        most = position + (not engine.config.speculates)  # with drafts the upper bound may reach the end
        if size:
            most = position - size  # where its block begins
        if most >= request.limit or position < request.prompt_tokens:
            fail(f"S7: {request.name} decodes at {position}, prompt {request.prompt_tokens}, limit {request.limit}")
    current = engine.microbatches.current
    if current.batch.size and not engine.config.speculates and not size:
        running_batch, positions = current.batch, current.positions.tolist()
        left = min(limit - position for limit, position in zip(running_batch.limits.tolist(), positions, strict=True))
        if not 1 <= current.horizon < left:
            fail(f"S7: horizon {current.horizon} passes the end of a member")


def _pages(engine: Engine, facts: Facts) -> None:
    """S1, S2, S3: every page has exactly one owner: pool, radix cache, row, deferred free, transfer or load."""
    table = engine.memory.table
    spare = table.spare
    if spare.any() and (not engine.config.keeps_draft_pages or spare.min() < 0 or spare[table.free_rows].any()):
        fail(f"S1: rows keep pages for their next positions: {spare.tolist()}")
    of_components = [owned for component in engine.components for owned in component.owned_pages()]
    owned = [facts.free, *(node.pages for node in facts.cached)]
    owned += [
        table.pages[request.row, request.protected_pages : table.held_pages(request.row, computed)]
        for request, computed in zip(facts.holders, facts.computed, strict=True)
    ]
    owned += [pages for _, pages in of_components]
    ids = np.concatenate(owned, dtype=np.int32)
    ids.sort()
    if ids.tobytes() == all_ids(engine.config.pages):
        return
    names = ["free", *(f"the radix cache ({node})" for node in facts.cached)]
    names += [f"{request.name} in row {request.row}" for request in facts.holders]
    names += [name for name, _ in of_components]
    misowned("S1 pages", engine.config.pages, dict(zip(names, (pages.tolist() for pages in owned), strict=True)))


def _reserve(engine: Engine, facts: Facts) -> None:
    """S24: with `reserve` full, the pages that active requests hold or may still open do not exceed the pool."""
    if engine.config.reserve != "full":
        return
    page_size, to_come, held = engine.config.page_size, 0, [np.empty(0, np.int32)]
    for request, computed in zip(facts.holders, facts.computed, strict=True):
        pages = engine.memory.table.held_pages(request.row, computed)
        held.append(engine.memory.table.pages[request.row, :pages])
        to_come += -(-request.reach // page_size) - pages
    taken = len(set(np.concatenate(held).tolist()))
    if taken + to_come > engine.config.pages:
        fail(f"S24: {taken} pages held and {to_come} promised, of {engine.config.pages}")


def _locks(engine: Engine, facts: Facts) -> None:
    """S9, S10, S11, S14: locks equal live handles; a row's leading pages and tokens are the path of its handle."""
    radix, table = engine.memory.radix, engine.memory.table
    if not radix.present:
        return
    handles = [request.handle for request in facts.holders if request.handle is not None]
    handles += chain.from_iterable(component.handles() for component in engine.components)
    radix.check(handles, facts.cached)
    for request in facts.holders:
        if request.handle is None:
            if request.protected_pages:
                fail(f"S14: {request.name} has {request.protected_pages} protected pages without a handle")
            continue
        pages, tokens = facts.path(request.handle)
        if len(pages) != 4 * request.protected_pages:
            fail(f"S14: {request.name} locks {len(pages) // 4} pages, and {request.protected_pages} are protected")
        if table.pages[request.row, : request.protected_pages].tobytes() != pages:
            fail(f"S14: {request.name}'s page table differs from the path it locks")
        shared = request.protected_pages * engine.config.page_size
        if table.first_tokens(request.row, request.tokens, request.prompt_tokens, shared) != tokens:
            fail(f"S13: {request.name} shares pages computed from other tokens")


def _in_flight(engine: Engine, facts: Facts) -> None:
    """S5, S24: at most depth + 1 batches are in flight; the pages of their rows are not free."""
    config, table = engine.config, engine.memory.table
    if len(engine.in_flight) > config.launches_max:
        fail(f"S24: {len(engine.in_flight)} batches in flight at overlap depth {config.overlap_depth}")
    if not engine.in_flight:
        return
    free = set(facts.free.tolist())
    deferred_rows = {deferred.row: deferred for deferred in engine.memory.deferred.rows}
    for batch in engine.in_flight:
        plan = batch.plan
        rows, starts, stops = plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist()
        if batch.verifies:
            stops = speculation.stops_of(batch).tolist()
        if (not rows) != (plan.mode == "idle") or len(rows) != len(set(rows)):
            fail(f"S24: batch {plan.batch_id} has no rows, or one twice: {rows}")
        new_tokens = 0
        for i, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True)):
            if stop <= start:
                fail(f"S24: batch {plan.batch_id} has an empty row: {starts} to {stops}")
            if i < plan.extend_rows:
                new_tokens += stop - start
            if table.holders[row] is None:
                fail(f"S5: row {row} was freed while batch {plan.batch_id} is in flight")
            if row in batch.dead and (row not in deferred_rows or deferred_rows[row].free_after < plan.batch_id):
                fail(f"S5: row {row} is dead in batch {plan.batch_id} but has no deferred free")
            pages = table.pages[row, : -(-stop // config.page_size)].tolist()
            if not free.isdisjoint(pages):
                fail(f"S5: batch {plan.batch_id} in flight uses free pages {sorted(free & set(pages))} of row {row}")
        if plan.blocks is not None:
            new_tokens += int(plan.blocks.given.sum())
        if len(plan.token_ids) != new_tokens:
            fail(f"S24: batch {plan.batch_id} carries {len(plan.token_ids)} ids for its extend rows")


def _held(engine: Engine) -> None:
    """S15: a request has as many open prerequisites as components keep it waiting for."""
    awaited = counts_of(chain.from_iterable(component.blocked_requests() for component in engine.components))
    holds = {request_id: request.open_prerequisites for request_id, request in engine.blocked.items()}
    same("S15 open prerequisites of held requests", awaited, holds)


def _progress(engine: Engine) -> None:
    """L2: a launch opportunity never leaves requests waiting on an idle device."""
    if engine.memory.tiers.awaited:
        return
    if engine.memory.adapters.loading:
        return
    if engine.transfers.holds_pages:
        return  # the end of the transfer frees the pages
    awaited = len(engine.blocked)  # these requests wait for a prerequisite
    jobs, released = engine.maintenance.jobs, engine.maintenance.released
    same("S33 maintenance admits", engine.maintenance.admits, not jobs and not released)
    stuck = (
        engine.launch_found_nothing and not engine.in_flight and not engine.paused and len(engine.requests) > awaited
    )
    if stuck and not engine.admits and not engine.active:
        stuck = False  # an operator paused admission, and nothing runs
    if stuck and engine.microbatches.several:
        stuck = not any(running.batch.size for running in engine.microbatches.states)  # another one may decode
    if stuck:
        fail(f"L2: {len(engine.waiting)} wait, {engine.active} are active, nothing is in flight, nothing was launched")


def _places(engine: Engine, facts: Facts) -> None:
    """S18, S24, S30: see `Microbatches.check_state`; admission is full only if a microbatch is."""
    sent = [one.request_id for one in engine.transfers.all.values() if one.ends]
    holders = [request.request_id for request in facts.holders if request.request_id not in sent]
    most = engine.config.launches_max // engine.config.microbatches
    engine.microbatches.check_state(engine.in_flight, holders, most)
    if engine.microbatches.several:
        same("S33 any full", engine.batch_is_full and not engine.microbatches.full, False)
