"""The page pool: the pages that it allocates, and that no page is lost."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.kv.pages import PagePool, PoolExhausted


def test_a_fresh_pool_hands_out_pages_in_ascending_order() -> None:
    pool = PagePool(5)
    assert pool.alloc(2).tolist() == [0, 1]
    assert pool.alloc(3).tolist() == [2, 3, 4]
    assert (pool.free_count, pool.total) == (0, 5)


def test_pages_freed_last_are_handed_out_first_in_the_same_order() -> None:
    pool = PagePool(6)
    first, second = pool.alloc(2), pool.alloc(2)
    pool.free(second)
    pool.free(first)
    assert pool.free_ids().tolist() == [0, 1, 2, 3, 4, 5]
    assert pool.alloc(3).tolist() == [0, 1, 2]


def test_asking_for_too_many_pages_raises_and_takes_nothing() -> None:
    pool = PagePool(3)
    pool.alloc(1)
    before = pool.dump()
    with pytest.raises(PoolExhausted, match="3 pages were requested, 2 of 3 are free"):
        pool.alloc(3)
    assert pool.dump() == before
    with pytest.raises(ValueError, match="negative"):
        pool.alloc(-1)
    assert pool.dump() == before


def test_allocated_pages_are_the_callers_own_array() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    pages[:] = 99
    pool.free(np.array([0, 1], dtype=np.int32))
    assert pool.free_ids().tolist() == [0, 1, 2, 3]


def test_freeing_more_pages_than_exist_is_refused() -> None:
    pool = PagePool(2)
    pages = pool.alloc(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="freeing 1 pages with 2 of 2 free already"):
        pool.free(pages)


def test_nothing_is_allocated_and_freed_without_effect() -> None:
    pool = PagePool(0)
    pool.free(pool.alloc(0))
    assert pool.free_ids().tolist() == []


@given(st.integers(0, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=30))
def test_free_and_held_pages_are_always_the_whole_pool_and_a_loaded_pool_goes_on_alike(
    pages: int, calls: list[tuple[bool, int]]
) -> None:
    pool, held = PagePool(pages), []
    for is_alloc, count in calls:
        twin = PagePool.load(msgspec.msgpack.decode(msgspec.msgpack.encode(pool.dump())))
        if is_alloc and count <= pool.free_count:
            held.append(pool.alloc(count))
            assert twin.alloc(count).tolist() == held[-1].tolist()
        elif held:
            given_back = held.pop(count % len(held))
            pool.free(given_back)
            twin.free(given_back)
        assert twin.dump() == pool.dump()
        assert sorted(np.concatenate([pool.free_ids(), *held]).tolist()) == list(range(pages))
