"""Guaranteed parts of the radix cache: prefixes of a tenant within its part survive any use by other tenants."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, InvariantError
from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.core.kv.radix import RadixCache
from lockstep.core.kv.radix_kinds import radix_cache_of
from lockstep.core.kv.radix_shares import SharedRadixCache
from lockstep.core.requests.validation import cache_namespace, tenant_of

CONFIG = SchedConfig(isolate_tenants=True, radix_cache=True)


def namespace(tenant: str, salt: str = "") -> str:
    event = RequestArrived(
        0, request_id=0, prompt=TokenIds(b"\1\0\0\0"), max_new_tokens=1, tenant=tenant, namespace=salt
    )
    from lockstep.core.kv.adapters import BASE

    return cache_namespace(event, BASE, CONFIG)


class Filled:
    """A cache of pages of one token, filled by prompts of tenants."""

    def __init__(self, guaranteed: int) -> None:
        self.cache = SharedRadixCache(1, None, guaranteed)
        self.next_page = 0

    def add(self, tenant: str, prompt: int, pages: int, salt: str = "") -> None:
        tokens = np.arange(1000 * prompt, 1000 * prompt + pages, dtype=np.int32)
        ids = np.arange(self.next_page, self.next_page + pages, dtype=np.int32)
        self.next_page += pages
        self.cache.insert(namespace(tenant, salt), tokens.tobytes(), ids)

    def kept(self, tenant: str, prompt: int, pages: int) -> int:
        tokens = np.arange(1000 * prompt, 1000 * prompt + pages, dtype=np.int32)
        return self.cache.match(namespace(tenant), tokens.tobytes(), pages).pages

    def evict(self, pages: int) -> None:
        assert len(self.cache.evict(pages)) == pages
        self.cache.check(())


@pytest.mark.parametrize("tenant", ["", "a", "team b", "9 x ", "\1tenant 1 x ", "é"])
def test_a_namespace_names_its_tenant(tenant: str) -> None:
    assert tenant_of(namespace(tenant)) == tenant
    assert tenant_of(namespace(tenant, salt="tenant 1 z ")) == tenant


def test_a_flood_of_one_tenant_evicts_its_own_pages() -> None:
    """40 prompts of 4 pages each into 24 pages, of which 16 are guaranteed."""
    filled = Filled(guaranteed=16)
    filled.add("a", 1, 8)
    for prompt in range(40):
        filled.add("b", 2 + prompt, 4)
        filled.evict(max(0, filled.cache.total_pages - 24))
    assert filled.kept("a", 1, 8) == 8
    assert filled.cache.pages_by == {"a": 8, "b": 16}
    assert filled.cache.evicted_of == (("b", 4),)


def test_where_parts_have_no_room_the_largest_gives_back() -> None:
    """Running requests hold the rest of the pool: no tenant is above its part."""
    filled = Filled(guaranteed=100)
    filled.add("a", 1, 8)
    for prompt in range(40):
        filled.add("b", 2 + prompt, 4)
        filled.evict(max(0, filled.cache.total_pages - 16))
    assert filled.kept("a", 1, 8) == 8
    filled.evict(6)
    assert filled.cache.pages_by == {"a": 5, "b": 5}


def test_without_a_guarantee_the_oldest_page_goes() -> None:
    filled = Filled(guaranteed=0)
    filled.add("a", 1, 8)
    filled.add("b", 2, 8)
    filled.evict(8)
    assert filled.kept("a", 1, 8) == 0


def test_a_tenant_above_its_part_gives_back_down_to_it_and_then_the_oldest_goes() -> None:
    filled = Filled(guaranteed=20)
    filled.add("a", 1, 15)
    filled.add("b", 2, 4)
    filled.evict(5)
    assert filled.cache.pages_by == {"a": 10, "b": 4}, "the part is 20 / 2"
    filled.evict(3)
    assert filled.cache.pages_by == {"a": 7, "b": 4}, "no tenant is above its part: the one with most pages"


def test_parts_grow_when_a_tenant_has_no_page_any_more() -> None:
    filled = Filled(guaranteed=12)
    filled.add("a", 1, 6)
    filled.add("b", 2, 6)
    assert filled.cache.part_pages == 6
    assert len(filled.cache.evict(6, by_age=True)) == 6
    assert filled.cache.pages_by == {"b": 6}
    assert filled.cache.part_pages == 12


def test_a_leaf_that_gives_back_twice_is_reported_once() -> None:
    """Its tenant is above its part first, then the one with most pages."""
    filled = Filled(guaranteed=20)
    filled.add("a", 1, 15)
    filled.add("b", 2, 4)
    reported: list[tuple[str, int]] = []
    filled.cache.on_evict = lambda leaf: reported.append((tenant_of(leaf.namespace), leaf.stop))
    filled.evict(8)
    assert filled.cache.pages_by == {"a": 7, "b": 4}
    assert reported == [("a", 15)]


def test_a_tenant_without_cached_pages_leaves_no_queue() -> None:
    filled = Filled(guaranteed=4)
    for number in range(9):
        filled.add(f"tenant {number}", 1, 5)
        filled.evict(filled.cache.total_pages)
    assert len(filled.cache.queues) <= 1
    assert filled.cache.pages_by == {}


def test_a_wrong_count_of_the_tree_or_of_a_tenant_is_named() -> None:
    filled = Filled(guaranteed=4)
    filled.add("a", 1, 3)
    filled.cache.locked_pages = 1
    with pytest.raises(InvariantError, match="S9: counters say 3 pages, 1 locked; recount 3, 0 locked"):
        filled.cache.check(())
    filled.cache.locked_pages = 0
    filled.cache.pages_by["a"] = 2
    with pytest.raises(InvariantError, match=r"S9: pages by tenant are {'a': 2}; recount {'a': 3}"):
        filled.cache.check(())


def test_pages_of_replaced_weights_go_by_age() -> None:
    filled = Filled(guaranteed=20)
    filled.add("a", 1, 5)
    filled.add("b", 2, 15)
    assert len(filled.cache.evict(5, by_age=True)) == 5
    assert filled.cache.pages_by == {"b": 15}


def test_locked_pages_of_a_tenant_above_its_part_stay() -> None:
    filled = Filled(guaranteed=10)
    filled.add("b", 2, 15)
    tokens = np.arange(2000, 2015, dtype=np.int32).tobytes()
    filled.cache.lock(filled.cache.match(namespace("b"), tokens, 15))
    filled.add("a", 1, 5)
    assert len(filled.cache.evict(3)) == 3
    assert filled.cache.pages_by == {"a": 2, "b": 15}


@pytest.mark.parametrize("seed", range(20))
def test_evicting_in_two_parts_takes_the_same_pages_and_a_restored_cache_goes_on_alike(seed: int) -> None:
    draw = random.Random(seed)
    one, other = Filled(draw.choice([0, 10, 30])), Filled(0)
    other.cache.guaranteed_pages = one.cache.guaranteed_pages
    for _ in range(30):
        if draw.random() < 0.6 or not one.cache.evictable_pages:
            added = draw.choice("abc"), draw.randrange(9), draw.randint(1, 9), draw.choice(["", "s"])
            one.add(*added)
            other.add(*added)
        else:
            wanted = draw.randint(1, one.cache.evictable_pages)
            first = draw.randint(0, wanted)
            whole = one.cache.evict(wanted).tolist()
            assert [*other.cache.evict(first).tolist(), *other.cache.evict(wanted - first).tolist()] == whole
            restored = radix_cache_of(other.cache.dump())
            assert isinstance(restored, SharedRadixCache)
            other.cache = restored
        one.cache.check(())
        other.cache.check(())
        assert {**(one.cache.dump() or {}), "epoch": 0} == {**(other.cache.dump() or {}), "epoch": 0}


@pytest.mark.parametrize("seed", range(10))
def test_with_one_tenant_it_is_plain_lru(seed: int) -> None:
    draw = random.Random(seed)
    shared, plain = SharedRadixCache(1, None, 7), RadixCache(1)
    for page in range(0, 200, 5):
        tokens = np.array([draw.randrange(3) for _ in range(5)], np.int32).tobytes()
        ids = np.arange(page, page + 5, dtype=np.int32)
        assert shared.insert("x", tokens, ids).already == plain.insert("x", tokens, ids).already
        if draw.random() < 0.4:
            count = draw.randint(1, 6)
            assert shared.evict(count).tolist() == plain.evict(count).tolist()


def test_settings_are_checked() -> None:
    assert SchedConfig(cache_guarantee=0.0).cache_guarantee is msgspec.UNSET
    assert SchedConfig(cache_guarantee=1, isolate_tenants=True, pages=80).guaranteed_pages == 80
    with pytest.raises(ConfigError, match=r"`cache_guarantee` must be from 0 to 1, got `1\.5`"):
        SchedConfig(cache_guarantee=1.5, isolate_tenants=True)
    needs = r"`cache_guarantee` is 0\.5, which needs `isolate_tenants` and `radix_cache`"
    with pytest.raises(ConfigError, match=needs):
        SchedConfig(cache_guarantee=0.5)
