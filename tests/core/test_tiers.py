"""The tiers of an engine that starts with a warm storage."""

from __future__ import annotations

import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import LoadFromHost, PrefetchFromStorage, Step
from lockstep.core.contract.config import CacheTiers, SchedConfig
from lockstep.core.contract.events import HostCopyFinished, LaneReady, PrefetchFinished, RequestArrived, TokenIds
from lockstep.core.kv.operations import MovedBlocks, Operation, Operations
from lockstep.core.requests.table import Int32s
from lockstep.core.scheduler.engine import Engine

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
