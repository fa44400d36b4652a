"""The pool of window pages, where a scenario would be too large."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import BlocksEvicted
from lockstep.core.scheduler.engine import Engine


@pytest.mark.parametrize("count", [1, 2, 7, 299, 300])
def test_windows_that_were_unlocked_longest_ago_are_evicted(count: int) -> None:
    windows = HybridMemory(window_tokens=2, window_pages=300)
    engine = Engine(SchedConfig(page_size=1, pages=300, chunked_prefill_size=100, hybrid=windows))
    pool, step = engine.memory.hybrid.window, Step()
    assert pool is not None
    pool.open(np.arange(300, dtype=np.int32), step)
    unlocked = np.random.default_rng(0).permutation(300).astype(np.int32)
    pool.unlock(unlocked)
    pool.take(count, step)
    assert (pool.window_of < 0).nonzero()[0].tolist() == sorted(unlocked[:count].tolist())
    assert step.decided == [BlocksEvicted(0, "window", count)]
