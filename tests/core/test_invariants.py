"""Each kind of damage to an engine is found by `invariants.check`, with the name of the violated property."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.core import invariants
from lockstep.core.contract.config import CacheTiers, HybridMemory, SchedConfig
from lockstep.core.contract.errors import ContractError, InvariantError
from lockstep.core.contract.events import BlocksFound, PrefetchFinished
from lockstep.core.journal import snapshot
from lockstep.core.kv.block_tiers import HostPool
from lockstep.core.kv.radix import RadixCache
from lockstep.core.kv.state_pool import StatePool
from lockstep.core.kv.window_pool import WindowPool
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.ordering import matched
from tests.support.driver.driver import Driver

Damage = Callable[[Engine], None]


def engine_at_work() -> Engine:
    """One request decodes on a prefix that another left in the cache, one waits, a third prompt is cached unused."""
    driver = Driver(SchedConfig(page_size=2, pages=32, max_running_requests=1))
    arrivals = [(1, 8, 4), (500, 6, 1), (1, 10, 8), (900, 4, 4)]
    for base, tokens, max_new in arrivals[:2]:
        driver.requests.arrive(base, tokens, max_new, {})
        for _ in range(max_new):
            driver.batches.ready()
            driver.batches.finish()
    for base, tokens, max_new in arrivals[2:]:
        driver.requests.arrive(base, tokens, max_new, {})
    for _ in range(2):
        driver.batches.ready()
        driver.batches.finish()
    driver.batches.ready()
    return driver.engine


def tree(engine: Engine) -> RadixCache:
    return engine.memory.radix


def locked(engine: Engine) -> RadixNode:
    handle = engine.running_batch.requests[0].handle
    assert handle is not None
    return handle


def unused(engine: Engine) -> RadixNode:
    return next(node for node in tree(engine).walk() if node.queued and not node.lock_count)


def filed_too_late(engine: Engine) -> None:
    radix = tree(engine)
    radix._queue[:] = [(tick + 100, number, node) for tick, number, node in radix._queue]


def filed_elsewhere(engine: Engine) -> None:
    root = locked(engine)
    while root.parent is not None:
        root = root.parent
    root.children = {first[::-1]: child for first, child in root.children.items()}


def handle_too_many(engine: Engine) -> None:
    locked(engine).handles += 1
    node: RadixNode | None = locked(engine)
    while node is not None:
        node.lock_count += 1
        node = node.parent


def key_cut_short(engine: Engine) -> None:
    unused(engine).key = unused(engine).key[:-4]


def pages_are_a_view(engine: Engine) -> None:
    unused(engine).pages = unused(engine).pages[:]


def newer_than_its_parent(engine: Engine) -> None:
    parent = unused(engine).parent
    assert parent is not None
    unused(engine).tick = parent.tick + 1


def end_moved(engine: Engine) -> None:
    unused(engine).stop += 1


def lock_miscounted(engine: Engine) -> None:
    unused(engine).lock_count += 1


def counter_drifts(engine: Engine) -> None:
    tree(engine).locked_pages += 1


def leaf_not_queued(engine: Engine) -> None:
    unused(engine).queued = False


def queue_forgets(engine: Engine) -> None:
    tree(engine)._queue.clear()


IN_THE_TREE: list[tuple[str, Damage]] = [
    ("S9", handle_too_many),
    ("S9", lock_miscounted),
    ("S9", counter_drifts),
    ("S10", filed_elsewhere),
    ("S10", key_cut_short),
    ("S10", pages_are_a_view),
    ("S10", newer_than_its_parent),
    ("S10", end_moved),
    ("S11", leaf_not_queued),
    ("S11", queue_forgets),
    ("S11", filed_too_late),
]


@pytest.mark.parametrize(("property_id", "damage"), IN_THE_TREE, ids=lambda one: getattr(one, "__name__", one))
def test_damage_to_the_tree_is_seen_by_the_cache_itself_too(property_id: str, damage: Damage) -> None:
    engine = engine_at_work()
    radix, handles = tree(engine), [locked(engine)]
    invariants.check(engine)
    radix.check(handles)
    damage(engine)
    with pytest.raises(InvariantError, match=f"^{property_id}:"):
        invariants.check(engine)
    with pytest.raises(InvariantError, match=f"^{property_id}:"):
        radix.check(handles)


def page_lost(engine: Engine) -> None:
    engine.memory.pool.free_count -= 1


def page_freed_twice_and_another_lost(engine: Engine) -> None:
    pool = engine.memory.pool
    pool._stack[-1] = pool._stack[-2]


def page_beyond_the_pool(engine: Engine) -> None:
    engine.memory.pool._stack[-1] = 32


def row_freed_while_held(engine: Engine) -> None:
    engine.memory.table.free_rows.append(engine.running_batch.requests[0].row)


def free_row_with_a_holder(engine: Engine) -> None:
    table = engine.memory.table
    table.holders[table.free_rows[0]] = engine.running_batch.requests[0]


def table_differs_from_the_path(engine: Engine) -> None:
    pages = engine.memory.table.pages[engine.running_batch.requests[0].row]
    pages[[0, 1]] = pages[[1, 0]]


def tokens_differ_from_the_path(engine: Engine) -> None:
    request = engine.running_batch.requests[0]
    request.tokens = b"\1\1\1\1" + request.tokens[4:]


def output_forgotten(engine: Engine) -> None:
    request = engine.waiting[0]
    request.tokens = request.tokens[:-4]


def gauge_drifts(engine: Engine) -> None:
    engine.active += 1


def forgotten_by_the_line(engine: Engine) -> None:
    engine.waiting.clear()


def bypassed_too_often(engine: Engine) -> None:
    assert engine.config.bypass_limit is not None
    engine.waiting[0].bypassed = engine.config.bypass_limit + 1


def match_of_another_length(engine: Engine) -> None:
    found = matched(engine.waiting[0], tree(engine))
    engine.waiting[0].matched = replace(found, pages=found.pages + 1)


def horizon_beyond_the_end(engine: Engine) -> None:
    engine.microbatches.current.horizon += 100


def row_without_new_positions(engine: Engine) -> None:
    plan = engine.in_flight[0].plan
    plan.stops[:] = plan.starts


@pytest.mark.parametrize(
    ("said", "damage"),
    [
        ("S1 pages: .*expected 32; without an owner", page_lost),
        ("S1 pages: .* belongs to", page_freed_twice_and_another_lost),
        ("S1 pages: free has 32, which does not exist", page_beyond_the_pool),
        ("S6 rows: .* belongs to free and to held", row_freed_while_held),
        ("S6: of the free rows", free_row_with_a_holder),
        ("S14: r2's page table differs", table_differs_from_the_path),
        ("S13: r2 shares pages computed from other tokens", tokens_differ_from_the_path),
        ("S20: r3 has 12 bytes for 4 tokens", output_forgotten),
        ("S33 active: 2, expected 1", gauge_drifts),
        ("S15: waiting \\[\\], ", forgotten_by_the_line),
        ("L5: r3 was bypassed ", bypassed_too_often),
        ("S14: r3 has a match of 1 pages, the tree has 0$", match_of_another_length),
        ("S7: horizon", horizon_beyond_the_end),
        ("S24: batch .* has an empty row", row_without_new_positions),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_damage_is_named(said: str, damage: Damage) -> None:
    engine = engine_at_work()
    invariants.check(engine)
    damage(engine)
    with pytest.raises(InvariantError, match=f"^{said}"):
        invariants.check(engine)


def test_damage_at_work_is_found_by_the_check_of_hosts() -> None:
    engine = engine_at_work()
    invariants.self_check(engine)
    page_lost(engine)
    with pytest.raises(InvariantError, match=r"^S1 pages: .*expected 32; without an owner"):
        invariants.self_check(engine)


def assert_named(engine: Engine, damage: Damage, said: str) -> None:
    damage(engine)
    with pytest.raises(InvariantError) as error:
        invariants.check(engine)
    assert str(error.value).startswith(said)


def engine_with_blocks() -> Engine:
    """Two requests decode, with windows and states; a prompt that has ended is cached with its checkpoint."""
    hybrid = HybridMemory(window_tokens=5, window_pages=30, state_slots=9, checkpoint_tokens=2)
    driver = Driver(SchedConfig(page_size=2, pages=40, hybrid=hybrid))
    for base, tokens, max_new in ((500, 7, 1), (1, 9, 30), (900, 5, 30)):
        driver.requests.arrive(base, tokens, max_new, {})
        for _ in range(4):
            driver.batches.ready()
            driver.batches.finish()
    invariants.check(driver.engine)
    return driver.engine


def window(engine: Engine) -> WindowPool:
    assert engine.memory.hybrid.window is not None
    return engine.memory.hybrid.window


def states(engine: Engine) -> StatePool:
    assert engine.memory.hybrid.states is not None
    return engine.memory.hybrid.states


def window_page_lost(engine: Engine) -> None:
    window(engine).pool.alloc(1)


def window_evicted_in_use(engine: Engine) -> None:
    pool = window(engine)
    page = int((pool.locks > 0).nonzero()[0][0])
    pool.pool.free(pool.window_of[page : page + 1])
    pool.window_of[page] = -1


def window_lock_miscounted(engine: Engine) -> None:
    window(engine).locks[(window(engine).locks > 0).nonzero()[0][0]] += 1


def window_let_go_too_early(engine: Engine) -> None:
    rows = engine.running_batch.rows[:1]
    window(engine).slide(rows, window(engine).first[rows] + 2)


def evictable_windows_drift(engine: Engine) -> None:
    window(engine).evictable += 1


def slot_lost(engine: Engine) -> None:
    states(engine).pool.alloc(1)


def slot_shared(engine: Engine) -> None:
    first, second = engine.running_batch.requests
    states(engine).slot_of[first.row] = states(engine).slot_of[second.row]


def checkpoint_without_owner(engine: Engine) -> None:
    pool = states(engine)
    slot = int((pool.page_of >= 0).nonzero()[0][0])
    pool.checkpoint_of[pool.page_of[slot]] = -1


def checkpoint_locked_for_ever(engine: Engine) -> None:
    states(engine).locks[(states(engine).page_of >= 0).nonzero()[0][0]] += 1


@pytest.mark.parametrize(
    ("said", "damage"),
    [
        ("S1 window pages", window_page_lost),
        ("S5", window_evicted_in_use),
        ("S9: locks of windows", window_lock_miscounted),
        ("S5", window_let_go_too_early),
        ("S9 evictable window pages", evictable_windows_drift),
        ("S1 slots of state", slot_lost),
        ("S1 slots of state", slot_shared),
        ("S3", checkpoint_without_owner),
        ("S9: slots are locked", checkpoint_locked_for_ever),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_damage_to_windows_and_states_is_named(said: str, damage: Damage) -> None:
    assert_named(engine_with_blocks(), damage, said)


def engine_storing_blocks() -> Engine:
    """A prompt with its checkpoint is on the host and is being stored; another is searched for in storage."""
    hybrid = HybridMemory(state_slots=9, checkpoint_tokens=2)
    tiers = CacheTiers(host_pages=20, storage=True, prefetch_tokens_min=1, prefetch_policy="wait_complete")
    driver = Driver(SchedConfig(page_size=2, pages=40, hybrid=hybrid, tiers=tiers))
    driver.requests.arrive(500, 7, 1, {})
    driver.moves.move(0)
    for _ in range(4):
        driver.batches.ready()
        driver.batches.finish()
    driver.moves.move(0)
    driver.requests.arrive(900, 7, 1, {})
    assert [one.kind for one in driver.engine.memory.tiers.operations.values()] == ["store", "prefetch"]
    invariants.check(driver.engine)
    return driver.engine


def host_states(engine: Engine) -> HostPool:
    assert engine.memory.tiers.blocks is not None
    return engine.memory.tiers.blocks.pools["state"]


def host_state_lost(engine: Engine) -> None:
    host_states(engine).pool.alloc(1)


def host_state_without_owner(engine: Engine) -> None:
    pool = host_states(engine)
    page = int((pool.of >= 0).nonzero()[0][0])
    pool.of[page], pool.of[19] = -1, pool.of[page]


def host_state_evicted_while_stored(engine: Engine) -> None:
    pool = host_states(engine)
    pool.locks[:] = 0
    pool.drop(np.arange(20, dtype=np.int32))


def host_state_unlocked(engine: Engine) -> None:
    host_states(engine).locks[:] = 0


def stored_without_a_state(engine: Engine) -> None:
    host_states(engine).stored[19] = True


def room_for_a_state_given_back(engine: Engine) -> None:
    (prefetch,) = (one for one in engine.memory.tiers.operations.values() if one.kind == "prefetch")
    host_states(engine).pool.free(prefetch.blocks[0].host)


@pytest.mark.parametrize(
    ("said", "damage"),
    [
        ("S1 states of the host", host_state_lost),
        ("S1: host pages [19] have a state, but are not cached", host_state_without_owner),
        ("S5: store", host_state_evicted_while_stored),
        ("S9: states of the host are locked", host_state_unlocked),
        ("S33: host pages [19] have no state", stored_without_a_state),
        ("S1 states of the host", room_for_a_state_given_back),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_damage_to_what_the_host_has_of_them_is_named(said: str, damage: Damage) -> None:
    assert_named(engine_storing_blocks(), damage, said)


FETCHED = {
    "a prefetch brought states twice, or without a request": (BlocksFound("state", (0,)), BlocksFound("state", ())),
    "a prefetch brought windows twice, or without a request": (BlocksFound("window", (0,)),),
    "a prefetch brought states at [0, 1]: 1 had room": (BlocksFound("state", (0, 1)),),
    "a prefetch brought states at [2]: 1 had room, ascending, below 2": (BlocksFound("state", (2,)),),
    "a prefetch brought states at [-1]": (BlocksFound("state", (-1,)),),
}


@pytest.mark.parametrize("said", FETCHED)
def test_blocks_that_were_not_ordered_are_refused_and_change_nothing(said: str) -> None:
    """Two of three pages have arrived; there is room for one state."""
    engine = engine_storing_blocks()
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=f"^{re.escape(said)}"):
        engine.step(PrefetchFinished(engine.now_us, 3, 2, blocks=FETCHED[said]))
    assert snapshot.dump(engine) == before
