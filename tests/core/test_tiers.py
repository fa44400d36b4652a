"""The tiers of an engine: what it orders from storage, and what it reports of an admission behind them."""

from __future__ import annotations

import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import BlockFetch, LoadFromHost, PrefetchFromStorage, Step, WriteToStorage
from lockstep.core.contract.config import CacheTiers, SchedConfig
from lockstep.core.contract.events import (
    BlocksFound,
    HostCopyFinished,
    LaneReady,
    PrefetchFinished,
    RequestAdmitted,
    RequestArrived,
    TokenIds,
)
from lockstep.core.kv.block_tiers import block_key, in_storage
from lockstep.core.kv.operations import MovedBlocks, Operation, Operations
from lockstep.core.kv.tiers import page_keys
from lockstep.core.requests.table import Int32s
from lockstep.core.scheduler.engine import Engine
from tests.support.scenario import Run, parse, play

PAGES = 40  # more than the page table of an engine has columns before its first request


def _only(step: Step, kind: type) -> object:
    (found,) = [one for one in step.commands if isinstance(one, kind)]
    return found


def test_a_first_request_may_start_behind_more_pages_than_the_tables_are_wide() -> None:
    tiers = CacheTiers(host_pages=128, storage=True, prefetch_tokens_min=4)
    engine = Engine(SchedConfig(page_size=4, pages=64, context_tokens_max=256, tiers=tiers))
    assert engine.memory.table.pages.shape[1] < PAGES
    prompt = np.arange(4 * PAGES + 2, dtype=np.int32)
    step = engine.step(RequestArrived(1, request_id=0, prompt=TokenIds(prompt.tobytes()), max_new_tokens=2))
    order = _only(step, PrefetchFromStorage)
    assert isinstance(order, PrefetchFromStorage)
    assert (order.blocks, order.reached) == ((), 0), "without windows and states, a prefetch is of pages only"
    engine.step(PrefetchFinished(2, order.prefetch_id, len(order.keys)))
    load = _only(engine.step(LaneReady(3)), LoadFromHost)
    assert isinstance(load, LoadFromHost)
    assert len(load.device_pages) == PAGES
    engine.step(HostCopyFinished(4, load.copy_id, PAGES))
    plan = engine.step(LaneReady(5)).launched()
    assert plan is not None
    assert plan.starts.tolist() == [4 * PAGES]
    invariants.check(engine)


def _blocks(*numbers: int) -> Int32s:
    return np.array(numbers, np.int32)


def test_blocks_on_the_way_are_counted_by_kind_for_loads_only() -> None:
    """A write reads the blocks of the device, which are counted only as far as it locks them."""
    moved = [
        MovedBlocks("window", _blocks(2, 3), _blocks(12, 13), _blocks(0, 1)),
        MovedBlocks("state", _blocks(3), _blocks(7), _blocks(0)),
    ]
    load = Operation(0, "load", "", b"", 0, 4, _blocks(0, 1, 2, 3), _blocks(0, 1, 2, 3), blocks=moved)
    written = [
        MovedBlocks("window", _blocks(0, 1, 2), _blocks(4, 5, 6), _blocks(2, 3, 4)),
        MovedBlocks("state", _blocks(2), _blocks(8), _blocks(1)),
    ]
    write = Operation(1, "write", "", b"", 0, 3, _blocks(4, 5, 6), _blocks(4, 5, 6), blocks=written)
    assert (Operations({1: write}).windows_loading, Operations({1: write}).slots_moving) == (0, 0)
    assert (Operations({0: load, 1: write}).windows_loading, Operations({0: load, 1: write}).slots_moving) == (2, 1)
    write.slots_locked = _blocks(8, 7)
    assert Operations({0: load, 1: write}).slots_moving == 2
    assert (Operations().windows_loading, Operations().slots_moving) == (0, 0)


def test_one_more_page_behind_which_a_request_can_continue_is_fetched() -> None:
    keys = tuple(page_keys("", bytes(32), 2, 4))
    states = tuple(block_key("state", key) for key in keys)
    room = np.zeros(1, np.int32)

    def found(reached: int) -> tuple[int, tuple[BlocksFound, ...]]:
        fetch = BlockFetch("state", states, (False, False), 1, room)
        order = PrefetchFromStorage(0, keys[reached:], room, 0, (fetch,), reached)
        return in_storage(order, {keys[0], keys[1], states[1]}.__contains__)

    assert found(1) == (1, (BlocksFound("state", (1,)),))
    assert found(2) == (0, ()), "a request can continue there without the prefetch"


def test_a_store_names_the_page_in_front_of_it() -> None:
    run = Run()
    play(
        parse("""
config page_size=2 pages=16 overlap_depth=0 tiers.host_pages=20 tiers.storage=yes

add a prompt=1..6 max_new=1
run
moved
moved
add b prompt=1..10 max_new=1
run
"""),
        run,
    )
    assert run.tiers is not None
    prompt = np.arange(1, 11, dtype=np.int32).tobytes()
    keys = tuple(page_keys("", prompt, 5, 2))
    assert set(run.tiers.storage) == set(keys[:3])
    (write,) = run.tiers.moves.values()
    step = run.fold(run.tiers.answer(write, run.now_us))
    store = _only(step, WriteToStorage)
    assert isinstance(store, WriteToStorage)
    assert (store.keys, store.after) == (keys[3:], keys[2])


def test_a_first_store_has_no_page_in_front_of_it() -> None:
    run = Run()
    play(
        parse("config page_size=2 overlap_depth=0 tiers.host_pages=20 tiers.storage=yes\nadd a prompt=1..6\nrun\n"), run
    )
    assert run.tiers is not None
    store = _only(run.fold(run.tiers.answer(next(iter(run.tiers.moves.values())), run.now_us)), WriteToStorage)
    assert isinstance(store, WriteToStorage)
    assert (len(store.keys), store.after) == (3, b"")


def test_the_wait_for_tiers_begins_with_the_prefetch_and_ends_with_the_load() -> None:
    run = Run()
    play(
        parse("""
config page_size=1 pages=12 overlap_depth=0 tiers.host_pages=12 tiers.load_tokens_min=1 tiers.storage=yes \
tiers.prefetch_tokens_min=1

add a prompt=1..5 max_new=1
moved
run
moved
moved
restart
add b prompt=1..5 max_new=1
at 3ms
moved
at 4ms
step
at 9ms
moved
at 10ms
step
"""),
        run,
    )
    *_, admitted = (one for one in run.decisions if isinstance(one, RequestAdmitted))
    assert (admitted.host_tokens, admitted.storage_tokens) == (4, 4)
    assert (admitted.waited_us, admitted.load_wait_us) == (10_000, 9_000)


def test_a_request_that_preempts_another_starts_with_nothing_from_the_host() -> None:
    run = Run()
    play(
        parse("""
config page_size=1 pages=16 overlap_depth=0 schedule_policy=priority enable_priority_preemption=yes \
retraction_policy=priority max_running_requests=1 tiers.host_pages=20 tiers.load_tokens_min=1

add a prompt=1..4 max_new=8
step
finish
add b prompt=11..14 max_new=1 priority=20
finish
"""),
        run,
    )
    *_, admitted = (one for one in run.decisions if isinstance(one, RequestAdmitted))
    assert admitted.request_id == 1
    assert (admitted.host_tokens, admitted.storage_tokens, admitted.load_wait_us) == (0, 0, 0)
