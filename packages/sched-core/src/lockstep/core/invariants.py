"""Equations that always hold, checked from scratch: `check(engine)` after any step.

Each check names the property it guards (S1, S5, ... of docs/invariants.md). Pools are compared as sets of ids, never
as sums: a double free and a leak cancel in a sum. Tests and simulations switch it on; random histories spend most of
their time here, so what several equations ask about is gathered once (`Facts`), and names are spelt out for a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from msgspec import UNSET

from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import TransferState
from lockstep.core.features import speculation
from lockstep.core.features.data_parallel import IDLE, OF_THE_PASS, counts_of, draft_passes_of
from lockstep.core.features.disaggregation import TOUCHED
from lockstep.core.kv.adapters import NO_SLOT
from lockstep.core.kv.running_view import all_running
from lockstep.core.requests.table import BASE, Request, RequestState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lockstep.core.kv.radix import RadixNode
    from lockstep.core.kv.state_pool import StatePool
    from lockstep.core.kv.tiers import Operation, Tiers
    from lockstep.core.kv.window_pool import WindowPool
    from lockstep.core.scheduler.engine import Engine


HOLDING: tuple[TransferState, ...] = ("bootstrap", "accepted", "awaited", "preallocating", "receiving", "ready")
LINED_UP: tuple[TransferState, ...] = ("accepted", "preallocating", "ready")


def check(engine: Engine) -> None:
    """Raise InvariantError, with the numbers, for the first equation that does not hold."""
    facts = Facts(engine)
    _containers(engine)
    _rows(engine, facts)
    _spans(engine, facts)
    _pages(engine, facts)
    _reserve(engine, facts)
    _locks(engine, facts)
    _in_flight(engine, facts)
    _grammars(engine)
    _line(engine)
    _sessions(engine, facts)
    _held(engine)
    _adapters(engine, facts)
    _resources(engine, facts)
    _transfers(engine, facts)
    _tiers(engine, facts)
    _hybrid(engine, facts)
    _progress(engine)
    _speculation(engine)
    _ranks(engine)
    _microbatches(engine, facts)


class Facts:
    """What several equations ask about one state of an engine, gathered once. None of it outlives the check."""

    __slots__ = ("_paths", "cached", "computed", "free", "holders", "positions")

    def __init__(self, engine: Engine) -> None:
        radix, (running_batch, positions) = engine.memory.radix, engine.all_running
        self.free = engine.memory.pool.free_ids()
        self.cached = radix.nodes()
        self.holders = [  # of rows
            request for request in engine.requests.values() if request.state is not RequestState.WAITING
        ]
        self.positions: list[int] = positions.tolist()  # the next position of each decoding request
        stands = dict(zip(running_batch.rows.tolist(), self.positions, strict=True))
        self.computed = [  # by holder: positions with launched KV, as Engine.computed_of gives them
            stands.get(request.row, request.computed) if request.state is RequestState.RUNNING else request.computed
            for request in self.holders
        ]
        self._paths: dict[RadixNode, tuple[bytes, bytes]] = {}

    def path(self, handle: RadixNode) -> tuple[bytes, bytes]:
        """The path that a handle stands for: its page ids and its tokens, both packed int32."""
        found = self._paths.get(handle)
        if found is None:
            pages, tokens, node = [handle.pages.tobytes()], [handle.key], handle
            while (parent := node.parent) is not None:
                pages.append(parent.pages.tobytes())
                tokens.append(parent.key)
                node = parent
            found = self._paths[handle] = b"".join(reversed(pages)), b"".join(reversed(tokens))
        return found


def is_idle(engine: Engine) -> bool:
    """Nothing waits, runs, is in flight or on its way between engines (S34: the one definition)."""
    return not engine.requests and not engine.in_flight and not engine.transfers.all


def self_check(engine: Engine) -> None:
    """What a host calls to look after itself: `check`, and at rest `check_quiescent`."""
    if is_idle(engine):
        check_quiescent(engine)
    else:
        check(engine)


def check_quiescent(engine: Engine) -> None:
    """At rest everything is back: rows, pages, maps (L9); only sessions hold KV. Call when `is_idle`."""
    check(engine)
    tiers = engine.memory.tiers
    cached = engine.memory.radix.total_pages
    cached += tiers.loading_pages
    locked = engine.memory.radix.locked_pages
    free_rows = len(engine.memory.table.free_rows)
    _same("L9 free pages and cached pages", engine.memory.pool.free_count + cached, engine.config.pages)
    if not tiers.device_busy:
        _same("L9 locked pages", locked, engine.sessions.pages_held_alone())
    _same("L9 free rows", free_rows, len(engine.memory.table.holders))
    owners = (
        (engine, "waiting held in_flight"),
        (engine.prerequisites, "followers"),
        (engine.controls, "drains"),
        (engine.memory, "deferred_frees deferred_pages rewrites rows_taken pending lent"),
        (engine.media, "pins line deferred queued"),
    )
    for owner, names in owners:
        for name in names.split():
            if getattr(owner, name):
                _fail(f"L9: `{name}` is not empty at rest: {getattr(owner, name)}")
    _same("L9 active", engine.active, 0)
    hybrid = engine.memory.hybrid
    at_rest = not tiers.device_busy
    if hybrid.window is not None and at_rest:
        _same("L9 locked window pages", int(hybrid.window.locks.sum()), 0)
    if hybrid.states is not None and at_rest:
        states = hybrid.states
        _same("L9 slots of state", states.pool.free_count + int((states.page_of >= 0).sum()), states.pool.total)


def _containers(engine: Engine) -> None:
    """S15, S16, S34: each live request is in exactly one container, the one its state names."""
    live = engine.requests
    waiting = [request.request_id for request in (*engine.waiting, *engine.held.values())]
    running_batch = [request.request_id for request in engine.all_running[0].requests]
    prefilling = [engine.prefilling.request_id] if engine.prefilling is not None else []
    ending = [request.request_id for batch in engine.in_flight for request in batch.ending_requests()]
    sent = [one.request_id for one in engine.transfers.all.values() if one.ends]
    contained = [*waiting, *running_batch, *prefilling, *ending, *sent]
    if len(contained) != len(live) or live.keys() != set(contained):
        _fail(
            f"S15: waiting {waiting}, prefilling {prefilling}, decoding {running_batch}, ending {ending} "
            f"do not partition the live requests {list(live)}"
        )
    _same(
        "S16 who decodes", sorted(running_batch), [request.request_id for request in live.values() if request.decodes]
    )
    running = running_batch + ending + sent
    _same("S33 sending", engine.transfers.sending, len(sent))
    for state, ids in (
        (RequestState.WAITING, waiting),
        (RequestState.PREFILLING, prefilling),
        (RequestState.RUNNING, running),
    ):
        for request_id in ids:
            if live[request_id].state is not state:
                _fail(f"S16: r{request_id} is in the container of {state.name} but its state is not")
    newcomers = [request.request_id for request in engine.waiting if not request.ran]
    if newcomers != sorted(newcomers):
        _fail(f"L5: requests that never ran wait in the order {newcomers}, not as they came")
    _same("S33 active", engine.active, len(prefilling) + len(running))


def _rows(engine: Engine, facts: Facts) -> None:
    """S2, S6: a row is free, held by one request, or leased; row and request point at each other."""
    table = engine.memory.table
    held = [request.row for request in facts.holders]
    deferred_rows = [deferred.row for deferred in engine.memory.deferred_frees]
    if sorted((*table.free_rows, *held, *deferred_rows)) != list(range(len(table.holders))):
        _misowned("S6 rows", len(table.holders), {"free": table.free_rows, "held": held, "deferred": deferred_rows})
    for request in engine.requests.values():
        if request.state is RequestState.WAITING:
            if request.row != -1 or request.handle is not None:
                _fail(f"S6: {request.name} waits but holds row {request.row}")
        elif table.holders[request.row] is not request:
            _fail(f"S6: row {request.row} does not point back at {request.name}")
    if any(map(table.holders.__getitem__, table.free_rows)):
        _fail(f"S6: of the free rows {table.free_rows} some still have a holder: {table.holders}")
    running_batch, _ = engine.all_running
    _same("S6 cohort rows", running_batch.rows.tolist(), [request.row for request in running_batch.requests])


def _spans(engine: Engine, facts: Facts) -> None:
    """S7, S14, S18: protected <= computed <= the limit; chunks end where a prompt may be split, before its end."""
    page_size, align, (running_batch, _) = engine.config.page_size, engine.config.split_tokens, engine.all_running
    for request in engine.requests.values():
        if len(request.tokens) != 4 * (request.prompt_tokens + request.outputs):
            _fail(
                f"S20: {request.name} has {len(request.tokens)} bytes for {request.prompt_tokens} tokens of its prompt "
                f"and {request.outputs} of output"
            )
        if request.sent and not 0 <= request.sent <= (engine.outputs_of(request) if request.watches_text else 0):
            _fail(f"S20: {request.name} was sent {request.sent} of {engine.outputs_of(request)} tokens")
    for request, computed in zip(facts.holders, facts.computed, strict=True):
        if not 0 <= request.protected_pages * page_size <= computed <= request.reach:
            _fail(
                f"S7: {request.name}: protected {request.protected_pages} pages of {page_size}, computed {computed}, "
                f"limit {request.limit}"
            )
        if request.state is RequestState.PREFILLING and (
            computed % align or computed >= request.prompt_tokens + request.outputs
        ):
            _fail(f"S18: {request.name} stopped its chunk at {computed} of {request.prompt_tokens + request.outputs}")
    for request, position in zip(running_batch.requests, facts.positions, strict=True):
        most = position + (not engine.config.speculates)  # with drafts it may stand at its end with what is in flight
        if most >= request.limit or position < request.prompt_tokens:
            _fail(f"S7: {request.name} decodes at {position}, prompt {request.prompt_tokens}, limit {request.limit}")
    if engine.running_batch.size and not engine.config.speculates:
        running_batch, positions = engine.running_batch, engine.positions.tolist()
        left = min(limit - position for limit, position in zip(running_batch.limits.tolist(), positions, strict=True))
        if not 1 <= engine.microbatches.current.horizon < left:
            _fail(f"S7: horizon {engine.microbatches.current.horizon} passes the end of a member")


def _pages(engine: Engine, facts: Facts) -> None:
    """S1, S2, S3: every page has exactly one owner: the pool, the radix cache, one row, one lease or one fence."""
    memory, table = engine.memory, engine.memory.table.pages
    spare = memory.table.spare
    if spare.any() and (not engine.config.keeps_draft_pages or spare.min() < 0 or spare[memory.table.free_rows].any()):
        _fail(f"S1: rows keep pages for their next positions: {spare.tolist()}")
    owned = [facts.free]
    owned += [node.pages for node in facts.cached]
    owned += [
        table[request.row, request.protected_pages : memory.table.held_pages(request.row, computed)]
        for request, computed in zip(facts.holders, facts.computed, strict=True)
    ]
    owned += [
        table[one.row, one.protected_pages : memory.table.held_pages(one.row, one.computed)]
        for one in memory.deferred_frees
    ]
    owned += [pages for _, pages in memory.deferred_pages]
    transfers = list(engine.transfers.all.values())
    owned += [transfer.pages for transfer in transfers]
    given_up = [(row, pages) for row, lent in memory.lent.items() for pages in lent.pages]
    owned += [pages for _, pages in given_up]
    loads = [one for one in memory.tiers.operations.values() if one.kind == "load"]
    owned += [one.device_pages for one in loads]
    ids = np.concatenate(owned, dtype=np.int32)
    ids.sort()
    if ids.tobytes() == _all_pages(engine.config.pages):
        return
    names = ["free", *(f"the radix cache ({node})" for node in facts.cached)]
    names += [f"{request.name} in row {request.row}" for request in facts.holders]
    names += [f"lease of row {deferred.row}" for deferred in memory.deferred_frees]
    names += [f"fence {i} of batch {free_after}" for i, (free_after, _) in enumerate(memory.deferred_pages)]
    names += [f"the transfer of r{transfer.request_id}" for transfer in transfers]
    names += [f"given up by row {row}, number {i}" for i, (row, _) in enumerate(given_up)]
    names += [f"load {one.number}" for one in loads]
    _misowned("S1 pages", engine.config.pages, dict(zip(names, (pages.tolist() for pages in owned), strict=True)))


@lru_cache(maxsize=16)
def _all_pages(pages: int) -> bytes:
    """The ids of all pages in order, packed int32."""
    return np.arange(pages, dtype=np.int32).tobytes()


def _reserve(engine: Engine, facts: Facts) -> None:
    """S24: where all output is reserved, what active requests hold and may still open is no more than there is."""
    if engine.config.reserve != "full":
        return
    page_size, to_come, held = engine.config.page_size, 0, [np.empty(0, np.int32)]
    for request, computed in zip(facts.holders, facts.computed, strict=True):
        pages = engine.memory.table.held_pages(request.row, computed)
        held.append(engine.memory.table.pages[request.row, :pages])
        to_come += -(-request.reach // page_size) - pages
    taken = len(set(np.concatenate(held).tolist()))
    if taken + to_come > engine.config.pages:
        _fail(f"S24: {taken} pages held and {to_come} promised, of {engine.config.pages}")


def _locks(engine: Engine, facts: Facts) -> None:
    """S9, S10, S11, S14: locks equal live handles; a row's leading pages are its handle's path, token for token."""
    radix, table = engine.memory.radix, engine.memory.table
    if not radix.present:
        return
    handles = [request.handle for request in facts.holders if request.handle is not None]
    handles += [deferred.handle for deferred in engine.memory.deferred_frees if deferred.handle is not None]
    handles += engine.sessions.handles()
    handles += [one.handle for one in engine.transfers.all.values() if one.handle is not None]
    if engine.memory.tiers.present:
        moves = engine.memory.tiers.operations.values()
        handles += [one.device_handle for one in moves if one.device_handle is not None]
    radix.check(handles, facts.cached)
    for request in facts.holders:
        if request.handle is None:
            if request.protected_pages:
                _fail(f"S14: {request.name} has {request.protected_pages} protected pages without a handle")
            continue
        pages, tokens = facts.path(request.handle)
        if len(pages) != 4 * request.protected_pages:
            _fail(f"S14: {request.name} locks {len(pages) // 4} pages, and {request.protected_pages} are protected")
        if table.pages[request.row, : request.protected_pages].tobytes() != pages:
            _fail(f"S14: {request.name}'s page table differs from the path it locks")
        shared = request.protected_pages * engine.config.page_size
        if table.first_tokens(request.row, request.tokens, request.prompt_tokens, shared) != tokens:
            _fail(f"S13: {request.name} shares pages computed from other tokens")


def _sessions(engine: Engine, facts: Facts) -> None:
    """S1, S13, S15: a session holds a path of its own tokens; its turns are live, those behind the first are held.

    KV of weights that were replaced is cached only as long as it is locked.
    """
    sessions, memory = engine.sessions, engine.memory
    turns: list[int] = []
    for session in sessions.open.values():
        turns += [*session.queue] if session.turn is None else [session.turn, *session.queue]
        if session.handle is not None and not session.tokens.startswith(facts.path(session.handle)[1]):
            _fail(f"S13: session {session.name!r} holds KV of other tokens than its own")
        for request_id in session.queue:
            if request_id not in engine.held:
                _fail(f"S15: r{request_id} stands behind a turn of session {session.name!r}, but is not held")
    _same("S15 turns of sessions", sorted(turns), sorted(r.request_id for r in engine.requests.values() if r.session))
    _same("S15 sessions that came free", sessions.free, [])
    stale = {namespace for namespace in {node.namespace for node in facts.cached} if memory.is_stale(namespace)}
    if stale:
        for node in facts.cached:
            if node.namespace in stale and not node.lock_count:
                _fail(
                    f"S13: {node} of namespace {node.namespace!r} is cached, the weights are {memory.weights_version}"
                )


def _in_flight(engine: Engine, facts: Facts) -> None:
    """S5, S24: at most depth + 1 batches; what a batch in flight touches still belongs to a row, lease or fence."""
    config, table = engine.config, engine.memory.table
    if len(engine.in_flight) > config.launches_max:
        _fail(f"S24: {len(engine.in_flight)} batches in flight at overlap depth {config.overlap_depth}")
    if not engine.in_flight:
        return
    free = set(facts.free.tolist())
    deferred_rows = {deferred.row: deferred for deferred in engine.memory.deferred_frees}
    for batch in engine.in_flight:
        plan = batch.plan
        rows, starts, stops = plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist()
        if batch.verifies:
            stops = speculation.stops_of(batch).tolist()
        if (not rows) != (plan.mode == "idle") or len(rows) != len(set(rows)):
            _fail(f"S24: batch {plan.batch_id} has no rows, or one twice: {rows}")
        new_tokens = 0
        for i, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True)):
            if stop <= start:
                _fail(f"S24: batch {plan.batch_id} has an empty row: {starts} to {stops}")
            if i < plan.extend_rows:
                new_tokens += stop - start
            if table.holders[row] is None:
                _fail(f"S5: row {row} was freed while batch {plan.batch_id} is in flight")
            if row in batch.dead and (row not in deferred_rows or deferred_rows[row].free_after < plan.batch_id):
                _fail(f"S5: row {row} is dead in batch {plan.batch_id} but no lease waits for it")
            pages = table.pages[row, : -(-stop // config.page_size)].tolist()
            if not free.isdisjoint(pages):
                _fail(f"S5: batch {plan.batch_id} in flight uses free pages {sorted(free & set(pages))} of row {row}")
        if len(plan.token_ids) != new_tokens:
            _fail(f"S24: batch {plan.batch_id} carries {len(plan.token_ids)} ids for its extend rows")


def _speculation(engine: Engine) -> None:
    """S7, S23: a row that may stand at its end waits for a result; no drafts where every token is looked at."""
    if not engine.computes_ahead:
        return
    for request_id, known in engine.jump_forward.forced.items():
        holder = engine.requests.get(request_id)
        if holder is None or holder.row < 0 or holder.grammar is None or holder.watches_text:
            _fail(f"S23: {known} is forced of r{request_id}, which does not run under a grammar")
        if known.stop <= engine.outputs_of(holder):
            _fail(f"S23: {known} of {holder.name} was delivered and is still to come")
    running_batch, positions = engine.all_running
    slack, _ = speculation.uncertainty(engine.in_flight, running_batch.rows, len(engine.memory.table.holders))
    for request, most, wrong in zip(running_batch.requests, positions.tolist(), slack.tolist(), strict=True):
        awaited = not engine.config.speculates or any(batch.names(request.row) for batch in engine.in_flight)
        if most + 1 >= request.limit and not awaited:
            _fail(f"S7: {request.name} stands at its end {most}, limit {request.limit}, and decodes on")
        if most - wrong < request.prompt_tokens:
            _fail(f"S7: {request.name} may stand at {most - wrong}, within its prompt of {request.prompt_tokens}")
    for batch in engine.in_flight:
        if batch.verifies:
            assert batch.steps is not None
            drafts = (batch.steps - batch.least).tolist()
            for request, row, tokens in zip(batch.samplers.requests, batch.samplers.rows.tolist(), drafts, strict=True):
                if tokens and request.row == row and (request.grammar is not None or request.watches_text):
                    _fail(f"S23: batch {batch.plan.batch_id} verifies drafts of {request.name}, token by token wanted")


def _grammars(engine: Engine) -> None:
    """S15, S23: a request without its grammar waits outside the queue, a running one has it; deferred batches wait for
    older ones."""
    known = engine.grammars.known
    users: dict[bytes, int] = {}
    for request in engine.requests.values():
        grammar = request.grammar
        if grammar is not None:
            users[grammar.digest] = users.get(grammar.digest, 0) + 1
            if request.row >= 0 and known[grammar.digest].error != "":
                _fail(f"S23: {request.name} runs, but its grammar did not compile")
    if known or users:
        _same("S15 requests per grammar", {digest: one.users for digest, one in known.items() if one.users}, users)
    for digest, one in known.items():
        if one.error is not None and one.waiting:
            _fail(f"S15: {list(one.waiting)} wait for the grammar {digest.hex()}, which was answered")
        for request_id in one.waiting:
            held = engine.held.get(request_id)
            if held is None or held.grammar is None or held.grammar.digest != digest:
                _fail(f"S15: r{request_id} waits for the grammar {digest.hex()} but is not held for it")
    for batch in engine.in_flight:
        after = batch.plan.sample_after
        if after is not None and after >= batch.plan.batch_id:
            _fail(f"S23: batch {batch.plan.batch_id} waits for batch {after}, which was not launched before it")


def _line(engine: Engine) -> None:
    """L5, S14: no waiting request was bypassed too often; a remembered match is what the tree would give now."""
    limit, radix = engine.config.bypass_limit, engine.memory.radix
    for request in engine.waiting:
        if limit is not None and request.bypassed > limit:
            _fail(f"L5: {request.name} was passed by {request.bypassed} times, bypass_limit {limit}")
        found = request.matched
        if radix.present and found is not None and found.node.version == found.version:
            most = request.cacheable_tokens // engine.config.page_size
            pages = radix.match(request.namespace, request.tokens, most).pages
            if found.pages != pages:
                _fail(f"S14: {request.name} remembers {found.pages} pages, the tree has {pages}")


def _held(engine: Engine) -> None:
    """S15, D11: a request has as many open prerequisites as it waits for: turn, grammar, leading sample, media."""
    engine.media.check()
    followers = [request.request_id for those in engine.prerequisites.followers.values() for request in those]
    media = [
        request.request_id
        for request in engine.requests.values()
        if request.extras is not None and request.extras.awaits_media
    ]
    turns = [request_id for session in engine.sessions.open.values() for request_id in session.queue]
    grammars = [request_id for known in engine.grammars.known.values() for request_id in known.waiting]
    transfers = [one.request_id for one in engine.transfers.in_state(*HOLDING)]
    holds = {request_id: request.holds for request_id, request in engine.held.items()}
    awaited = _counts(chain(followers, media, turns, grammars, transfers))
    _same("S15 things that held requests wait for", awaited, holds)
    for request_id in media:
        if not engine.media.knows(request_id) or engine.media.has_all(request_id):
            _fail(f"D11: r{request_id} is held for media, which it does not wait for")
    for leader, those in engine.prerequisites.followers.items():
        if leader not in engine.requests or leader in followers:
            _fail(f"L1: {len(those)} samples follow r{leader}, which has ended or follows itself")
        for request in those:
            if request.extras is None or request.extras.leader != leader:
                _fail(f"S15: {request.name} does not know that it follows r{leader}")
    for request_id in (*engine.media.pins, *engine.media.line):
        if request_id not in engine.requests:
            _fail(f"D11: r{request_id} has ended and holds encoder output, or waits for it")


def _adapters(engine: Engine, facts: Facts) -> None:
    """S25, L8: what rows run on is on the device and not too much of it; a withdrawal waits for a request."""
    adapters = engine.memory.adapters
    if not adapters.present:
        return
    live = {request.row: request.adapter for request in facts.holders}
    for deferred in engine.memory.deferred_frees:
        live[deferred.row] = adapters.rows.get(deferred.row, BASE)
    _same("S25 adapters by row", dict(sorted(adapters.rows.items())), dict(sorted(live.items())))
    counted = [adapter for adapter in live.values() if adapters.counts(adapter)]
    _same("S25 users of adapters", adapters.users, _counts(counted))
    if len(adapters.users) > len(adapters.slots):
        _fail(f"S25: {list(adapters.users)} are in use, max_loras {len(adapters.slots)}")
    for adapter in adapters.users:
        if adapter != BASE and adapters.slot_of(adapter) == NO_SLOT:
            _fail(f"S25: {adapter} is in use but on no slot of the device")
    held = [slot.adapter for slot in adapters.slots if slot.adapter is not None]
    _same("S25 adapters on the device", len(set(held)), len(held))
    awaited = {request.adapter.name for request in engine.requests.values()}
    awaited |= {adapter.name for adapter in adapters.users}
    awaited |= {slot.adapter.name for slot in adapters.slots if slot.adapter is not None and slot.loading}
    for name in adapters.withdrawals:
        if name not in awaited:
            _fail(f"L8: nothing needs {name!r} any more, but its withdrawal was not answered")


def _resources(engine: Engine, facts: Facts) -> None:
    """S37: what each resource has given out follows from the rows that are not free."""
    rows: dict[int, Request | None] = {request.row: request for request in facts.holders}
    rows |= dict.fromkeys(deferred.row for deferred in engine.memory.deferred_frees)
    for resource in engine.admission.resources:
        resource.check(rows)


def _transfers(engine: Engine, facts: Facts) -> None:
    """S1, S5, S31, L2, L6: slots have one holder; what the other side may touch is kept; a request that could go on
    does."""
    transfers, memory = engine.transfers, engine.memory
    if not transfers.hands_over:
        _same("S31 rows that are read from elsewhere", memory.lent, {})
        _same("S33 sending", transfers.sending, 0)
        return
    everyone = list(transfers.all.values())
    slots = [*transfers.free_slots, *(one.slot for one in everyone if one.slot != NO_SLOT)]
    _same("S1 metadata slots", sorted(slots), list(range(transfers.settings.slots)))
    _same("S31 rooms", transfers.rooms, {one.room: one.request_id for one in everyone})
    lines = [*transfers.line, *transfers.ready]
    _same("S15 lines of transfers", sorted(lines), sorted(one.request_id for one in transfers.in_state(*LINED_UP)))
    lent = {one.request_id: row for row, one in memory.lent.items()}
    left = [deferred.row for deferred in memory.deferred_frees]
    for one in everyone:
        if (one.request_id in engine.requests) != (one.state != "quarantined") and transfers.sends:
            _fail(f"S16: the transfer of r{one.request_id} is {one.state}, but its request is not there, or still is")
        touched = transfers.sends and one.state in TOUCHED
        if touched != (one.request_id in lent):
            _fail(f"S31: the transfer of r{one.request_id} is {one.state}, but the rows {lent} are read from elsewhere")
        request = engine.requests.get(one.request_id)
        if touched and lent[one.request_id] not in left and (request is None or request.row != lent[one.request_id]):
            _fail(f"S31: row {lent[one.request_id]} is read by the transfer of r{one.request_id} and nobody holds it")
        if not transfers.sends and one.state in ("receiving", "ready") and request is not None:
            held = one.start_tokens // engine.config.page_size + one.pages.size
            if held * engine.config.page_size < min(request.prompt_tokens + 1, request.reach):
                _fail(f"L6: {request.name} is given {held} pages, and would wait for more while it holds them")
    if engine.launch_found_nothing and not engine.in_flight and not engine.paused and not engine.maintenance.still:
        able = [one for one in transfers.ready if engine.requests[one].holds == 1]
        groups = engine.microbatches
        owed = groups.owes_elsewhere() or groups.current.decode_owed
        if groups.several and (owed or not groups.has_place()):
            able = []  # another microbatch may have a place, or goes first, or has the pages that all of this one gave
        able = [one for one in able if memory.adapters.has_place_for(engine.requests[one].adapter)]
        if able and engine.active < engine.config.max_running_requests:
            _fail(f"L2: {able} have all their KV, nothing is in flight, and nothing was launched")
    alone = not engine.active and not transfers.holds_pages and not engine.in_flight and not engine.waiting
    if memory.tiers.device_busy:
        alone = False  # a move locks pages, and its answer gives them
    if any(one.slot != NO_SLOT for one in everyone):
        alone = False  # a request with one waits for a grammar or for media
    first = [one for one in transfers.line if not transfers.comes_after_another(engine.requests[one])]
    if alone and first and not engine.paused and engine.admits:
        _fail(f"L2: {first} wait for pages or slots, which nobody has")
    change = transfers.change
    if change is not None and engine.requests and engine.now_us >= change.due_us:
        _fail(f"L1: {list(engine.requests)} are here {engine.now_us - change.due_us} us after the role was to change")
    if change is not None and is_idle(engine):
        _fail(f"L1: nothing is left, and it is not {change.role} yet")


def _tiers(engine: Engine, facts: Facts) -> None:
    """S1, S9, S32 of the tiers below: each host page has one owner; locks and marks are those of what is under way."""
    tiers = engine.memory.tiers
    if not tiers.present:
        return
    moves = list(tiers.operations.values())
    nodes, arriving = tiers.host.nodes(), [one for one in moves if one.kind in ("write", "prefetch")]
    owned = [tiers.pool.free_ids(), *(node.pages for node in nodes), *(one.host_pages for one in arriving)]
    ids = np.concatenate(owned, dtype=np.int32)
    ids.sort()
    if ids.tobytes() != _all_pages(tiers.pool.total):
        names = ["free", *(f"the host's cache ({node})" for node in nodes)]
        names += [f"{one.kind} {one.number}" for one in arriving]
        _misowned("S1 host pages", tiers.pool.total, dict(zip(names, (p.tolist() for p in owned), strict=True)))
    tiers.host.check([one.host_handle for one in moves if one.host_handle is not None], nodes)
    cached = np.zeros(engine.config.pages, np.bool_)
    for node in facts.cached:
        cached[node.pages] = True
    marked = {page: int(tiers.writing[page]) for page in (tiers.writing >= 0).nonzero()[0].tolist()}
    for one in moves:
        page_bytes = 4 * engine.config.page_size
        if len(one.tokens) != one.stop * page_bytes or len(one.host_pages) != one.pages:
            _fail(f"S32: {one.kind} {one.number} has {len(one.tokens)} bytes of tokens for {one.stop} pages")
        if one.kind == "write" and one.device_handle is not None:
            for page in one.device_pages.tolist():
                if marked.get(page) != one.number:
                    _fail(f"S32: device page {page} is being written by {one.number}, marked {marked.get(page)}")
        if one.kind in ("load", "store"):
            assert one.host_handle is not None
            path = tiers.host.pages_of(one.host_handle)[one.start : one.stop]
            if path.tolist() != one.host_pages.tolist():
                _fail(f"S5: {one.kind} {one.number} reads host pages {one.host_pages.tolist()}, its path has {path}")
    for page, number in marked.items():
        if not cached[page] or number not in tiers.operations:
            _fail(f"S32: device page {page} is marked as being written by {number}")
    if tiers.uses[~cached].any():
        _fail(f"S33: device pages that are not cached have uses: {(tiers.uses * ~cached).nonzero()[0].tolist()}")
    for page in (tiers.loading >= 0).nonzero()[0].tolist():
        if not any(one.number == tiers.loading[page] and page in _read_by(tiers, one) for one in moves):
            _fail(f"S32: host page {page} is marked as being read by {tiers.loading[page]}")
    if tiers.blocks is not None:
        _host_blocks(tiers, moves, nodes)
    for request_id, candidate in tiers.candidates.items():
        request = engine.requests.get(request_id)
        if request is None or request.state is not RequestState.WAITING:
            _fail(f"S15: r{request_id} does not wait, but is a candidate of the tiers")
        if candidate.operation >= 0 and candidate.operation not in tiers.operations:
            _fail(f"L7: r{request_id} waits for operation {candidate.operation}, which has ended")


def _read_by(tiers: Tiers, load: Operation) -> NDArray[np.int32]:
    """Host pages of which a load reads something."""
    assert load.host_handle is not None
    path = tiers.host.pages_of(load.host_handle)
    return np.concatenate((load.host_pages, *(path[moved.index] for moved in load.blocks)))


def _host_blocks(tiers: Tiers, moves: list[Operation], nodes: list[RadixNode]) -> None:
    """S1, S9 of blocks in host memory: each is free, on its way, or of one cached host page; readers lock."""
    assert tiers.blocks is not None
    cached = np.zeros(tiers.pool.total, np.bool_)
    for node in nodes:
        cached[node.pages] = True
    for kind, pool in tiers.blocks.pools.items():
        with_one = (pool.of >= 0).nonzero()[0]
        of_kind = [(one, moved) for one in moves for moved in one.blocks if moved.kind == kind]
        arriving = [moved.host for one, moved in of_kind if one.kind in ("write", "prefetch")]
        ids = np.sort(np.concatenate((pool.pool.free_ids(), pool.of[with_one], *arriving)))
        if ids.tobytes() != _all_pages(pool.pool.total):
            owners = {"free": pool.pool.free_ids().tolist(), "of pages": pool.of[with_one].tolist()}
            owners |= {"on their way": [number for one in arriving for number in one.tolist()]}
            _misowned(f"S1 {kind}s of the host", pool.pool.total, owners)
        if (stray := with_one[~cached[with_one]]).size:
            _fail(f"S1: host pages {stray.tolist()} have a {kind}, but are not cached")
        locks = np.zeros_like(pool.locks)
        for one, moved in of_kind:
            if one.kind in ("load", "store"):
                assert one.host_handle is not None
                source = tiers.host.pages_of(one.host_handle)[moved.index]
                np.add.at(locks, source, 1)
                if pool.of[source].tolist() != moved.host.tolist():
                    _fail(f"S5: {one.kind} {one.number} reads the {kind}s {moved.host.tolist()}, its pages have others")
            if one.kind == "prefetch":
                assert one.host_handle is not None
                source = tiers.host.pages_of(one.host_handle)[moved.counted]
                np.add.at(locks, source, 1)
                if (pool.of[source] < 0).any():
                    _fail(f"S5: prefetch {one.number} counts on {kind}s of host pages {source.tolist()}")
        if locks.tobytes() != pool.locks.tobytes():
            _fail(f"S9: {kind}s of the host are locked {pool.locks.tolist()}, moves count on {locks.tolist()}")
        if (strays := (pool.stored & (pool.of < 0)).nonzero()[0]).size:
            _fail(f"S33: host pages {strays.tolist()} have no {kind}, but it is marked as stored")


def _hybrid(engine: Engine, facts: Facts) -> None:
    """S1, S3, S5, S9, S10 of the pools beside full attention: see `_window` and `_states`."""
    hybrid = engine.memory.hybrid
    if not hybrid.present:
        return
    holders = [
        (request.name, request.row, computed) for request, computed in zip(facts.holders, facts.computed, strict=True)
    ]
    holders += [
        (f"the lease of row {deferred.row}", deferred.row, deferred.computed)
        for deferred in engine.memory.deferred_frees
    ]
    cached = np.zeros(engine.config.pages, np.bool_)
    for node in facts.cached:
        cached[node.pages] = True
    if hybrid.window is not None:
        _window(engine, hybrid.window, holders, cached)
    if hybrid.states is not None:
        _states(engine, hybrid.states, holders, cached)
    everyone = engine.transfers.all.values() if not engine.transfers.sends else ()
    coming = sorted(one.request_id for one in everyone if one.state in ("receiving", "ready"))
    given_up = sorted(one.request_id for one in everyone if one.state == "quarantined")
    if (window := hybrid.window) is not None:
        _same("S31 windows that will come", (sorted(window.coming), sorted(window.quarantined)), (coming, given_up))
    if (states := hybrid.states) is not None:
        _same("S31 states that will come", sorted(states.coming), sorted(coming + given_up))


def _window(engine: Engine, window: WindowPool, holders: list[tuple[str, int, int]], cached: NDArray[np.bool_]) -> None:
    """A window page is free or belongs to one full page in use; what may be read is there and locked."""
    memory, page_size = engine.memory, engine.config.page_size
    with_one = (window.window_of >= 0).nonzero()[0]
    moves = list(memory.tiers.operations.values())
    loads = [moved for one in moves if one.kind == "load" for moved in one.blocks if moved.kind == "window"]
    ids = np.sort(np.concatenate((window.pool.free_ids(), window.window_of[with_one], *(one.device for one in loads))))
    if ids.tobytes() != _all_pages(window.pool.total):
        blocks = {f"page {page}": [int(window.window_of[page])] for page in with_one.tolist()}
        _misowned("S1 window pages", window.pool.total, {"free": window.pool.free_ids().tolist(), **blocks})
    locks = np.zeros(engine.config.pages, np.int32)
    for name, row, computed in holders:
        first = int(window.first[row])
        held = memory.table.pages[row, first : -(-computed // page_size)]
        np.add.at(locks, held, 1)
        if (lost := held[window.window_of[held] < 0]).size:
            _fail(f"S5: {name} may read the window of pages {lost.tolist()}, which is gone")
        starts = [int(batch.starts[batch.plan.rows == row][0]) for batch in memory.in_flight if batch.names(row)]
        reads = max(min([*starts[:1], computed]) - window.behind, 0) // page_size
        if first > min(reads, int(window.first_seen(computed // page_size))):
            _fail(f"S5: {name} let go of what is below page {first}; it stands at {computed}, {starts} are in flight")
    for request_id, coming in window.coming.items():
        np.add.at(locks, coming.pages, 1)
        if (lost := coming.pages[window.window_of[coming.pages] < 0]).size:
            _fail(f"S5: r{request_id} is to read the window of pages {lost.tolist()}, which is gone")
    for pages in window.quarantined.values():
        np.add.at(locks, pages, 1)
    moving = np.zeros_like(locks)
    for one in moves:
        np.add.at(moving, one.windows_locked, 1)
        if (lost := one.windows_locked[window.window_of[one.windows_locked] < 0]).size:
            _fail(f"S5: {one.kind} {one.number} counts on the window of pages {lost.tolist()}, which is gone")
    held_by_moves = int(np.count_nonzero((moving > 0) & (locks == 0)))
    locks += moving
    deferred = np.concatenate([np.empty(0, np.int32), *(pages for _, pages in memory.deferred_pages)])
    locks[deferred] = window.locks[deferred]
    if locks.tobytes() != window.locks.tobytes():
        wrong = (locks != window.locks).nonzero()[0].tolist()
        _fail(f"S9: locks of windows of pages {wrong} are {window.locks[wrong].tolist()}, held {locks[wrong].tolist()}")
    unlocked = (window.window_of >= 0) & (window.locks == 0)
    if (stray := (unlocked & ~cached).nonzero()[0]).size:
        _fail(f"S1: pages {stray.tolist()} have windows, but nobody holds them and they are not cached")
    coming_back = int(np.count_nonzero(window.window_of[deferred] >= 0))
    coming_back += held_by_moves + sum(one.index.size for one in loads)
    if engine.config.reserve == "full" and (left := window.unpromised(all_running(engine)) + coming_back) < 0:
        _fail(f"S24: {-left} window pages more are held and promised than there are")
    _same("S9 evictable window pages", window.evictable, int(np.count_nonzero(unlocked)))


def _states(engine: Engine, states: StatePool, holders: list[tuple[str, int, int]], cached: NDArray[np.bool_]) -> None:
    """A slot is free, a row's, or a checkpoint: of a row still, or of one cached page. A copy locks it."""
    checkpoints = (states.page_of >= 0).nonzero()[0]
    tiers = engine.memory.tiers
    moves = list(tiers.operations.values())
    loads = [moved for one in moves if one.kind == "load" for moved in one.blocks if moved.kind == "state"]
    owners = {
        "on their way": [slot for one in loads for slot in one.device.tolist()],
        "free": states.pool.free_ids().tolist(),
        "checkpoints": checkpoints.tolist(),
        **{name: [int(states.slot_of[row]), *states.behind_drafts.get(row, ())] for name, row, _ in holders},
        **{f"left by row {row}": [slot for _, slot, _ in kept] for row, kept in states.left.items()},
        **{f"the transfer of r{request_id}": slots for request_id, slots in states.coming.items()},
    }
    if sorted(chain.from_iterable(owners.values())) != list(range(states.pool.total)):
        _misowned("S1 slots of state", states.pool.total, owners)
    pages = states.page_of[checkpoints]
    if not cached[pages].all() or (states.checkpoint_of[pages] != checkpoints).any():
        _fail(f"S3: checkpoints {checkpoints.tolist()} are of pages {pages.tolist()}, not all cached or not theirs")
    _same("S3 pages with a checkpoint", int((states.checkpoint_of >= 0).sum()), checkpoints.size)
    taken = {row: name for name, row, _ in holders}
    if strays := [row for row in (*states.reading, *states.left) if row not in taken]:
        _fail(f"S1: rows {strays} read or left checkpoints, and nobody has them")
    moving = [slot for one in moves for slot in one.slots_locked.tolist()]
    locked = np.array([*states.reading.values(), *states.unwritten, *moving], np.intp)
    locks = np.bincount(locked, minlength=states.pool.total)
    writers = {batch.plan.batch_id for batch in engine.in_flight}
    if orphans := [slot for slot, batch_id in states.unwritten.items() if batch_id not in writers]:
        _fail(f"S9: checkpoints {orphans} are being written by batches that are not in flight")
    if (locks != states.locks).any() or (states.page_of[locks > 0] < 0).any():
        _fail(f"S9: slots are locked {states.locks.tolist()}, they are being copied {locks.tolist()}")


def _progress(engine: Engine) -> None:
    """L2: never does a launch opportunity leave waiting work alone on an idle device."""
    if engine.memory.tiers.awaited:
        return
    if engine.memory.adapters.loading:
        return
    if engine.transfers.holds_pages:
        return  # which come back when it ends
    awaited = len(engine.held)  # something outside the engine comes first
    jobs, released = engine.maintenance.jobs, engine.maintenance.released
    _same("S33 maintenance admits", engine.maintenance.admits, not jobs and not released)
    stuck = (
        engine.launch_found_nothing and not engine.in_flight and not engine.paused and len(engine.requests) > awaited
    )
    if stuck and not engine.admits and not engine.active:
        stuck = False  # an operator paused admission, and nothing runs
    if stuck and engine.microbatches.several:
        stuck = not any(running.batch.size for running in engine.microbatches.states)  # others may decode
    if stuck:
        _fail(f"L2: {len(engine.waiting)} wait, {engine.active} are active, nothing is in flight, nothing was launched")


def _ranks(engine: Engine) -> None:
    """S5, S29 of one of several ranks: it runs what it proposed, and the branch that follows from what all did."""
    rounds = engine.ranks
    if rounds is None:
        return
    for batch in engine.in_flight:
        ranks, plan = batch.plan.ranks, batch.plan
        if (ranks is None) != (batch is rounds.held):
            _fail(f"S29: batch {plan.batch_id} is {'not ' * (ranks is None)}agreed upon, held is {rounds.held}")
        if ranks is None:
            continue
        own = counts_of(batch)
        if (ranks.tokens[rounds.rank], ranks.logit_rows[rounds.rank]) != own[:2]:
            _fail(f"S29: batch {plan.batch_id} has counts {own}, the ranks agreed on {ranks}")
        if ranks.draft_passes is not UNSET and ranks.draft_passes < draft_passes_of(plan):
            _fail(f"S29: batch {plan.batch_id} needs {draft_passes_of(plan)} passes of the drafter, {ranks} are agreed")
        if ranks.extends and plan.mode in ("decode", "verify"):
            _fail(f"S29: batch {plan.batch_id} is {plan.mode}, but a rank extends in round {ranks.round}")
    if rounds.held is not None and engine.in_flight[-1] is not rounds.held:
        _fail("S29: what is proposed is not the newest in flight")
    said = rounds.proposed[:OF_THE_PASS] if rounds.proposed is not None else None
    if said is not None and said != (IDLE if rounds.held is None else counts_of(rounds.held)):
        _fail(f"S5: the plan of round {rounds.round} is not what was proposed, {rounds.proposed}")
    config = engine.config
    limits = (config.prefill_delayer_max_delay_passes, config.prefill_full_skip_passes)
    most = sum(limit for limit in limits if isinstance(limit, int))
    longest = max(delay.passes for delay in rounds.delays)
    if longest > most:
        _fail(f"L5: prompts wait for {longest} passes, at most {most} are allowed")


def _microbatches(engine: Engine, facts: Facts) -> None:
    """S18, S24, S30: a running request has a place in one microbatch, where it decodes; each has its share of all in
    flight."""
    several = engine.microbatches
    sent = [one.request_id for one in engine.transfers.all.values() if one.ends]
    holders = [request.request_id for request in facts.holders if request.request_id not in sent]
    _same("S30 who has a place", sorted(several.members), sorted(holders))
    places = [list(several.members.values()).count(number) for number in range(several.count)]
    _same("S30 places", several.places, places)
    if max(places) > several.size:
        _fail(f"S24: {max(places)} requests in a microbatch of {several.size}")
    for number, running in enumerate(several.states):
        for request in running.batch.requests:
            if several.members.get(request.request_id) != number:
                _fail(f"S30: {request.name} decodes in microbatch {number}, its place is in another")
        _same(f"S30 positions of microbatch {number}", running.positions.size, running.batch.size)
        launched = [batch for batch in engine.in_flight if batch.plan.microbatch == number]
        if len(launched) > engine.config.overlap_depth + 1:
            _fail(f"S24: {len(launched)} batches of microbatch {number} in flight")
        for batch in launched:
            for request, row in zip(batch.samplers.requests, batch.samplers.rows.tolist(), strict=True):
                if (
                    request.row == row
                    and row not in batch.dead
                    and several.members.get(request.request_id, number) != number
                ):
                    _fail(f"S30: batch {batch.plan.batch_id} of microbatch {number} samples {request.name}, of another")
    if several.several:
        _same("S33 any full", engine.batch_is_full and not several.full, False)


def _misowned(what: str, total: int, owners: dict[str, list[int]]) -> NoReturn:
    """Ids below `total` do not each belong to exactly one owner: name the first that does not, and its owners."""
    owned: dict[int, str] = {}
    for owner, ids in owners.items():
        for item in ids:
            if item in owned:
                _fail(f"{what}: {item} belongs to {owned[item]} and to {owner}")
            if item not in range(total):
                _fail(f"{what}: {owner} has {item}, which does not exist")
            owned[item] = owner
    counts = ", ".join(f"{owner} {len(ids)}" for owner, ids in owners.items())
    lost = [item for item in range(total) if item not in owned]
    _fail(f"{what}: {counts} = {len(owned)}, expected {total}; nobody owns {lost[:8]}")


def _counts(items: Iterable[Any]) -> dict[Any, int]:
    """How often each comes. A Counter costs more than most of what is counted here."""
    counts: dict[Any, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def _same(what: str, got: object, expected: object) -> None:
    if got != expected:
        _fail(f"{what}: {got}, expected {expected}")


def _fail(message: str) -> NoReturn:
    raise InvariantError(message)
