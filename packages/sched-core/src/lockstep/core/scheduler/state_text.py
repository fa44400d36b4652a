"""The state of an engine as text: pages, table, queue, batches in flight, radix tree, and the line of a debug print.

`debug_line` is what a host prints under LOCKSTEP_DEBUG=1: one line per step, one letter per request.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import BatchPlan, Step
from lockstep.core.contract.events import (
    Observed,
    RequestFinished,
    RequestId,
    RequestRejected,
    RequestRetracted,
)
from lockstep.core.contract.render import Names, decided_line, observed_line, plan_text
from lockstep.core.contract.text import count, runs, shown
from lockstep.core.kv.adapters import Adapters
from lockstep.core.kv.block_tiers import HostBlocks
from lockstep.core.kv.hybrid import Hybrid
from lockstep.core.kv.radix import RadixCache
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import VERSION_MARK, Request, RequestState
from lockstep.core.requests.validation import PARTS_MARK
from lockstep.core.scheduler.engine import Engine

PAGES_SHOWN = 16  # of one row, one by one; more pages are shown as runs
REQUESTS_SHOWN = 40  # columns of a debug line; more requests are counted
BAR_WIDTH = 8  # characters of the pages bar


def pages_line(engine: Engine) -> str:
    """Free pages of the pool. Cached pages are unreferenced pages of the radix cache, which are available at once."""
    cached = engine.memory.radix.evictable_pages
    text = f"pages {engine.memory.pool.free_count}/{engine.config.pages} free"
    if cached:
        text += f", {cached} cached"
    by_sessions = engine.sessions.pages_held_alone()
    return f"{text}, {by_sessions} held by sessions" if by_sessions else text


def session_lines(engine: Engine, names: Names) -> list[str]:
    """Every session: its tokens and held tokens, the request of its current turn, and the requests of later turns."""
    lines, page_size = [], engine.config.page_size
    for session in engine.sessions.open.values():
        text = f"session {shown(session.name)}: {session.length} of {session.capacity_tokens} tokens"
        if session.handle is not None:
            text += f", {session.handle.stop * page_size} held"
        if session.turn is not None:
            text += f", turn {names.request(session.turn)}"
        if session.queue:
            text += ", then " + " ".join(map(names.request, session.queue))
        lines.append(text)
    return lines or ["sessions none"]


def page_owner_lines(engine: Engine, names: Names) -> list[str]:
    """Every page by its owner: the pool, the radix cache, a request, or work in flight."""
    owners: dict[str, list[int]] = {"free": engine.memory.pool.free_ids().tolist(), "radix cache": []}
    owners["radix cache"] = [page for node in engine.memory.radix.walk() for page in node.pages.tolist()]
    for request in _with_rows(engine):
        held = engine.memory.table.held_pages(request.row, engine.computed_of(request))
        private = engine.memory.table.pages[request.row, request.protected_pages : held].tolist()
        owners[names.request(request.request_id)] = private
    for deferred in engine.memory.deferred.rows:
        held = engine.memory.table.held_pages(deferred.row, deferred.computed)
        private = engine.memory.table.pages[deferred.row, deferred.protected_pages : held].tolist()
        owners[f"left behind in row {deferred.row} until b{deferred.free_after}"] = private
    for free_after, pages in engine.memory.deferred.pages:
        owners.setdefault(f"duplicates until b{free_after}", []).extend(pages.tolist())
    loads = [one for one in engine.memory.tiers.operations.values() if one.kind == "load"]
    owners |= {f"load {load.number}": load.device_pages.tolist() for load in loads}
    return [f"pages of {owner}: {runs(sorted(pages))}" for owner, pages in owners.items() if pages]


def table_lines(engine: Engine, names: Names) -> list[str]:
    """The request table: one line per row in use. `*` marks pages that the radix cache owns, `cached` a run of them."""
    page_size, lines = engine.config.page_size, []
    for request in sorted(_with_rows(engine), key=lambda request: request.row):
        computed = engine.computed_of(request)
        table = engine.memory.table.pages[request.row, : -(-computed // page_size)].tolist()
        lines.append(
            f"row {request.row} {names.request(request.request_id)} {request.state.name.lower()} "
            f"computed {computed} outputs {engine.outputs_of(request)} pages {_pages(table, request.protected_pages)}"
        )
    for deferred in sorted(engine.memory.deferred.rows, key=lambda deferred: deferred.row):
        lines.append(f"row {deferred.row} left behind until b{deferred.free_after}, computed {deferred.computed}")
    return lines or ["table is empty"]


def queue_line(engine: Engine, names: Names) -> str:
    """The waiting queue in the order of admission; then the accepted requests with an open prerequisite."""
    waiting = [names.request(request.request_id) for request in engine.waiting]
    held = [names.request(request_id) for request_id in engine.blocked]
    return "waiting " + (" ".join(waiting) or "none") + (f", held {' '.join(held)}" if held else "")


def adapter_lines(adapters: Adapters) -> list[str]:
    """The adapter slots of the device, and the adapters that are being unloaded."""
    if not adapters.present:
        return ["adapters are off"]
    lines = []
    for i, slot in enumerate(adapters.slots):
        if slot.adapter is None:
            lines.append(f"slot {i} free")
            continue
        rows = adapters.users.get(slot.adapter, 0)
        use = "loading" if slot.loading else f"used by {count(rows, 'row')}" if rows else "idle"
        lines.append(f"slot {i} {slot.adapter.name} version {slot.adapter.version}, {use}")
    return lines + [f"{name} is being unloaded" for name in adapters.withdrawals]


def in_flight_lines(engine: Engine, names: Names) -> list[str]:
    """Batches launched and not collected, oldest first; rows whose request has left are named dead."""
    lines = []
    for batch in engine.in_flight:
        ids, rows = batch.plan.request_ids.tolist(), batch.plan.rows.tolist()
        dead = [names.request(ids[i]) for i, row in enumerate(rows) if row in batch.dead]
        lines.append(f"in flight {plan_text(batch.plan, names)}" + (f", dead {' '.join(dead)}" if dead else ""))
    return lines or ["in flight nothing"]


def tree_lines(radix: RadixCache) -> list[str]:
    """The radix tree: tokens, pages and locks of each edge, one level of indent per node."""
    if not radix.present:
        return ["tree is off"]
    lines: list[str] = []
    roots = [node for node in radix.walk() if node.parent is None]
    for root in roots:
        if len(roots) > 1 or root.namespace:
            namespace, _, version = root.namespace.partition(VERSION_MARK)
            namespace = namespace.removeprefix(PARTS_MARK)
            lines.append(f"namespace {namespace!r}" + (f", weights {version}" if version else ""))
        _tree(root, 0, lines)
    return lines or ["tree is empty"]


def _tree(node: RadixNode, depth: int, lines: list[str]) -> None:
    if node.parent is not None:
        tokens = np.frombuffer(node.key, np.int32).tolist()
        held = f", held {node.lock_count}" if node.lock_count else ""
        hidden = ", hidden" if node.invalidated else ""
        lines.append(f"{'  ' * (depth - 1)}[{runs(tokens)}] pages {runs(node.pages.tolist())}{held}{hidden}")
    for child in node.children.values():
        _tree(child, depth + 1, lines)


def _with_rows(engine: Engine) -> list[Request]:
    return [request for request in engine.requests.values() if request.state is not RequestState.WAITING]


# ------------------------------------------------------------------------------------------------ debug output of a
# step


def debug_header(engine: Engine, step: Step) -> str:
    """The header of `debug_line` for the same step. Print it first, and again when it changes."""
    letters = _letters(engine, step, None)
    named = {request_id: request.name[:1] for request_id, request in engine.requests.items()}
    columns = " ".join(named.get(request_id, "-") for request_id in letters)
    return f"{'t_ms':>8}  {'batch':<18} {columns if len(letters) <= REQUESTS_SHOWN else 'requests':<9}  pages free"


def debug_line(engine: Engine, event: Observed, step: Step) -> str:
    """One step in one line: time, the batch launched, a letter per request in the order of their ids, and the pages.

    w waiting, E extending, D decoding, : running and not in this batch, r retracted by this step, . ended by it.
    The bar shows pages in use as #, cached as =, free as a dot. With many requests the letters become counts.
    """
    plan = step.launched()
    batch = ""
    if plan is not None:
        batch = f"b{plan.batch_id} {plan.mode} {int((plan.stops - plan.starts).sum())}t"
        batch += f" m{plan.microbatch}" if plan.microbatch else ""
    letters = list(_letters(engine, step, plan).values())
    if len(letters) > REQUESTS_SHOWN:
        text = " ".join(f"{letter}{letters.count(letter)}" for letter in "EDw:r." if letter in letters)
    else:
        text = " ".join(letters)
    free, total = engine.memory.pool.free_count, engine.config.pages
    return f"{event.time_us / 1000:8.1f}  {batch:<18} {text:<9}  {_bar(engine)} {free}/{total}"


def debug_text(engine: Engine, event: Observed, step: Step, names: Names, level: int) -> list[str]:
    """The output of LOCKSTEP_DEBUG for a step: 1 the line, 2 adds decisions, 3 the tables, 4 the pages."""
    lines = [debug_line(engine, event, step)]
    if level >= 2:
        lines += [f"          {observed_line(event, names)}"]
        lines += [f"          {decided_line(decided, names)}" for decided in step.decided]
    if level >= 3:
        lines += [f"          {queue_line(engine, names)}"]
        lines += [f"          {line}" for line in table_lines(engine, names) + in_flight_lines(engine, names)]
        if engine.memory.adapters.present:
            lines += [f"          {line}" for line in adapter_lines(engine.memory.adapters)]
    if level >= 4:
        lines += [f"          {line}" for line in page_owner_lines(engine, names) + tree_lines(engine.memory.radix)]
    return lines


def _letters(engine: Engine, step: Step, plan: BatchPlan | None) -> dict[RequestId, str]:
    """A letter for every request that is open or ended in this step, in the order of their ids."""
    letters: dict[RequestId, str] = {}
    for request_id, request in engine.requests.items():
        letters[request_id] = "w" if request.state is RequestState.WAITING else ":"
    if plan is not None:
        for i, request_id in enumerate(plan.request_ids.tolist()):
            letters[request_id] = "E" if i < plan.extend_rows else "D"
    for decided in step.decided:
        match decided:
            case RequestRetracted():
                letters[decided.request_id] = "r"
            case RequestFinished() | RequestRejected():
                letters[decided.request_id] = "."
    return dict(sorted(letters.items()))


def _bar(engine: Engine) -> str:
    total = engine.config.pages
    cached = engine.memory.radix.evictable_pages
    used = total - engine.memory.pool.free_count - cached
    width = min(BAR_WIDTH, total)
    full = -(-used * width // total)
    kept = min(-(-cached * width // total), width - full)
    return ("#" * full + "=" * kept).ljust(width, ".")


def hybrid_lines(hybrid: Hybrid) -> list[str]:
    """Window blocks and state blocks of the device by their full page, and the free ones."""
    lines = []
    if (window := hybrid.window) is not None:
        have = (window.window_of >= 0).nonzero()[0].tolist()
        shown = " ".join(f"{page}:{window.window_of[page]}" + "*" * bool(window.locks[page]) for page in have)
        free = f"window pages {window.pool.free_count}/{window.pool.total} free, {window.evictable} evictable"
        lines += [f"windows of pages {shown or 'none'}", free]
    if (states := hybrid.states) is not None:
        have = (states.checkpoint_of >= 0).nonzero()[0].tolist()
        shown = " ".join(f"{page}:{states.checkpoint_of[page]}" for page in have)
        lines += [f"checkpoints of pages {shown or 'none'}", f"slots {states.pool.free_count}/{states.pool.total} free"]
    return lines


def block_lines(blocks: HostBlocks) -> list[str]:
    """Window blocks and state blocks of host memory by their page, and the free ones."""
    lines = []
    for kind, pool in blocks.pools.items():
        have = (pool.of >= 0).nonzero()[0].tolist()
        shown = " ".join(f"{page}:{pool.of[page]}" + "*" * bool(pool.locks[page]) for page in have)
        free = f"{kind}s of the host {pool.pool.free_count}/{pool.pool.total} free"
        lines += [f"{kind}s of host pages {shown or 'none'}", free]
    return lines


def _pages(table: list[int], cached: int) -> str:
    """Pages in their order, of which the radix cache owns the first `cached`."""
    if len(table) > PAGES_SHOWN:
        parts = (f"{runs(table[:cached])} cached" if cached else "", runs(table[cached:]))
        return ", ".join(filter(None, parts))
    return " ".join(f"{page}*" if i < cached else f"{page}" for i, page in enumerate(table)) or "none"
