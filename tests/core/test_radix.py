"""The radix cache: one short test for each rule, then any history against a model of single pages."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from lockstep.core.contract.errors import InvariantError
from lockstep.core.kv.radix import LockError, Match, RadixCache
from lockstep.core.kv.radix_shares import SharedRadixCache
from lockstep.core.requests.radix_node import Found, RadixNode

ALL = 1 << 30  # more pages than any prompt here has


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


def pages(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def cache_of(*prompts: bytes, page_tokens: int = 1) -> RadixCache:
    """A cache of these prompts, inserted in order; their pages are numbered from 0 without a gap."""
    cache = RadixCache(page_tokens)
    for prompt in prompts:
        count = len(prompt) // (4 * page_tokens)
        known = cache.match("", prompt, ALL).pages
        first = cache.total_pages - known
        cache.insert("", prompt, np.arange(first, first + count, dtype=np.int32))
    cache.check([])
    return cache


def lock(cache: RadixCache, prompt: bytes) -> RadixNode:
    return cache.lock(cache.match("", prompt, ALL))


# ---- match


def test_the_longest_whole_page_prefix_matches() -> None:
    cache = cache_of(tokens(1, 1, 2, 2, 3, 3), page_tokens=2)
    assert cache.match("", tokens(1, 1, 2, 2, 9, 9), ALL).pages == 2
    assert cache.match("", tokens(1, 1, 2, 9), ALL).pages == 1  # the second page differs in its second token
    assert cache.match("", tokens(1, 1, 2), ALL).pages == 1  # half a page is no page
    assert cache.match("", tokens(1), ALL).pages == 0


def test_a_match_is_never_longer_than_asked_for() -> None:
    cache = cache_of(tokens(1, 2, 3))
    assert [cache.match("", tokens(1, 2, 3), cap).pages for cap in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 3]
    assert [cache.find("", tokens(1, 2, 3), cap).pages for cap in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 3]


def test_a_match_ends_where_the_tokens_end() -> None:
    cache = cache_of(tokens(1, 2, 3))
    assert cache.match("", tokens(1, 2), ALL).pages == 2
    assert cache.find("", tokens(1, 2), ALL).pages == 2


def test_a_match_of_nothing_ends_in_no_node_and_has_no_pages() -> None:
    cache = cache_of(tokens(1, 2))
    assert cache.match("", tokens(9), ALL) == Match("", None, 0, 0, 0)
    assert cache.match("another tenant", tokens(1, 2), ALL) == Match("another tenant", None, 0, 0, 0)


def test_a_match_has_its_end_inside_an_edge() -> None:
    cache = cache_of(tokens(1, 2, 3, 4), tokens(1, 2, 5, 6, 7))
    match = cache.match("", tokens(1, 2, 5, 6, 8), ALL)
    assert (match.pages, match.edge_pages) == (4, 2)


def test_a_match_leaves_no_trace() -> None:
    cache = cache_of(tokens(1, 2), tokens(3, 4))
    before = cache.dump()
    cache.match("", tokens(1, 9), ALL)
    cache.match("another tenant", tokens(1, 2), ALL)
    assert cache.dump() == before


def test_equal_tokens_of_another_namespace_do_not_match() -> None:
    cache = cache_of(tokens(1, 2))
    assert cache.match("another tenant", tokens(1, 2), ALL).pages == 0
    cache.insert("another tenant", tokens(1, 2), pages(7, 8))
    assert cache.pages_of(cache.lock(cache.match("another tenant", tokens(1, 2), ALL))).tolist() == [7, 8]


def test_a_match_counts_its_pages_without_a_lock() -> None:
    cache = cache_of(tokens(1, 2, 3, 4))
    lock(cache, tokens(1, 2))
    assert cache.match("", tokens(1, 2, 3), ALL).evictable_pages == 1
    assert cache.match("", tokens(1), ALL).evictable_pages == 0


# ---- remember a match


def insert(cache: RadixCache, *ids: int) -> RadixNode:
    return cache.insert("", tokens(*ids), np.array(ids, dtype=np.int32)).node


def lose(cache: RadixCache, count: int) -> None:
    assert len(cache.evict(count)) == count


def hide(cache: RadixCache, *ids: int, behind: int) -> None:
    node = cache.match("", tokens(*ids), ALL).node
    assert node is not None
    cache.invalidate(node, behind)


Change = Callable[[RadixCache], object]
CHANGES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Change, ...], int]] = {
    "it goes on": ((1, 2), (1, 2, 3), (lambda cache: insert(cache, 1, 2, 3),), 3),
    "its tail is evicted": ((1, 2), (1, 2, 3), (lambda cache: lose(cache, 1),), 1),
    "all of it is evicted": ((1, 2), (1, 2, 3), (lambda cache: lose(cache, 2),), 0),
    "it goes on for a while, then its tail is evicted": (
        (1, 2),
        (1, 2, 3),
        (lambda cache: insert(cache, 1, 2, 3), lambda cache: lose(cache, 2)),
        1,
    ),
    "it goes on from inside an edge": ((1, 2, 3, 4), (1, 2, 9), (lambda cache: insert(cache, 1, 2, 9),), 3),
    "it goes on from inside an edge that has got longer": (
        (1, 2, 3, 4),
        (1, 2, 9),
        (
            lambda cache: insert(cache, 1, 2),
            lambda cache: insert(cache, 1, 2, 3, 4, 5),
            lambda cache: insert(cache, 1, 2, 9),
        ),
        3,
    ),
    "the first page of a namespace is cached": ((), (5,), (lambda cache: insert(cache, 5),), 1),
    "the namespace was empty in between": (
        (1,),
        (5,),
        (lambda cache: lose(cache, 1), lambda cache: insert(cache, 5)),
        1,
    ),
    "the namespace was fuller, then empty in between": (
        (1,),
        (5,),
        (lambda cache: insert(cache, 2), lambda cache: lose(cache, 2), lambda cache: insert(cache, 5)),
        1,
    ),
    "it is hidden": ((1, 2), (1, 2, 3), (lambda cache: hide(cache, 1, 2, behind=0),), 0),
    "its end is hidden": (
        (1, 2),
        (1, 2, 3),
        (lambda cache: insert(cache, 1), lambda cache: hide(cache, 1, 2, behind=1)),
        1,
    ),
    "it is hidden with what lies below": (
        (1, 2),
        (1, 2, 3),
        (lambda cache: insert(cache, 1, 2, 3), lambda cache: hide(cache, 1, 2, 3, behind=0)),
        0,
    ),
}


@pytest.mark.parametrize("shared", [False, True], ids=["lru", "parts"])
@pytest.mark.parametrize(("cached", "prompt", "changes", "then"), CHANGES.values(), ids=CHANGES)
def test_a_remembered_match_is_void_once(
    cached: tuple[int, ...], prompt: tuple[int, ...], changes: tuple[Change, ...], then: int, shared: bool
) -> None:
    cache = SharedRadixCache(1, None, 4) if shared else RadixCache(1)
    if cached:
        insert(cache, *cached)
    found = cache.find("", tokens(*prompt), ALL)
    assert found.node.version == found.version
    for change in changes:
        change(cache)
        cache.check([])
    assert found.node.version != found.version
    assert cache.find("", tokens(*prompt), ALL).pages == then
    assert cache.find("", tokens(*prompt), ALL, found) == cache.find("", tokens(*prompt), ALL)


# ---- insert


def test_insert_adds_the_missing_tail_and_returns_the_part_present() -> None:
    cache = cache_of(tokens(1, 2))
    inserted = cache.insert("", tokens(1, 2, 3, 4), pages(50, 51, 52, 53))
    assert inserted.already == 2
    assert cache.pages_of(inserted.node).tolist() == [0, 1, 52, 53]
    assert cache.total_pages == 4


def test_siblings_differ_in_their_first_page() -> None:
    cache = cache_of(tokens(1, 1, 2, 2), tokens(1, 1, 2, 3), page_tokens=2)
    shape = [np.frombuffer(node.key, dtype=np.int32).tolist() for node in cache.walk()]
    assert shape == [[], [1, 1], [2, 2], [2, 3]]


def test_insert_of_half_a_page_or_of_nothing_is_refused() -> None:
    cache = RadixCache(2)
    with pytest.raises(ValueError, match="expected 1 pages of 2 tokens, got 12 bytes"):
        cache.insert("", tokens(1, 2, 3), pages(0))
    with pytest.raises(ValueError, match="got 0 bytes"):
        cache.insert("", b"", pages())
    assert list(cache.walk()) == []


def test_changing_the_callers_array_afterwards_leaves_the_tree_unchanged() -> None:
    cache, row = RadixCache(1), pages(7, 8, 9, 10)
    node = cache.insert("", tokens(1, 2, 3, 4), row).node
    row[:] = -1
    cache.pages_of(node)[:] = -2
    cache.check()
    assert cache.pages_of(node).tolist() == [7, 8, 9, 10]


# ---- lock


def test_a_wholly_locked_prompt_frees_nothing() -> None:
    prompt = tokens(1, 2, 3, 4, 5, 6, 7, 8)
    cache = cache_of(prompt)
    handle = lock(cache, prompt)
    assert handle.stop == 8
    assert cache.evict(8).tolist() == []
    cache.unlock(handle)
    assert cache.evict(8).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_lock_inside_an_edge_leaves_the_rest_evictable() -> None:
    cache = cache_of(tokens(1, 2, 3, 4))
    handle = lock(cache, tokens(1, 2, 9))
    assert (cache.locked_pages, cache.evictable_pages) == (2, 2)
    assert cache.evict(4).tolist() == [3, 2]
    assert cache.pages_of(handle).tolist() == [0, 1]


def test_a_handle_means_the_same_path_after_a_split() -> None:
    cache = cache_of(tokens(1, 2, 3, 4))
    long = lock(cache, tokens(1, 2, 3, 4))
    short = lock(cache, tokens(1, 2))
    assert cache.pages_of(long).tolist() == [0, 1, 2, 3]
    cache.check([long, short])
    cache.unlock(long)
    cache.check([short])
    assert (cache.locked_pages, cache.evictable_pages) == (2, 2)


def test_a_match_is_still_good_after_a_split_of_its_node() -> None:
    cache = cache_of(tokens(1, 2, 3, 4))
    matches = [cache.match("", tokens(1, 2, 3, 4), cap) for cap in (3, 2, 1)]
    handles = [lock(cache, tokens(1, 2)), *(cache.lock(match) for match in matches)]
    assert [handle.stop for handle in handles] == [2, 3, 2, 1]
    cache.check(handles)
    assert cache.epoch == 1  # only the insert


def test_a_match_whose_pages_were_evicted_cannot_be_locked() -> None:
    for evicted in (1, 2):  # the end of its node, the whole node
        cache = cache_of(tokens(1, 2), tokens(3))
        match = cache.match("", tokens(1, 2), ALL)
        cache.evict(evicted)
        with pytest.raises(LockError, match="was evicted"):
            cache.lock(match)
        cache.check([])


def test_the_root_can_be_locked_and_is_removed_without_use() -> None:
    cache = RadixCache(1)
    handle = cache.lock(cache.match("tenant", tokens(1), ALL))
    assert cache.pages_of(handle).tolist() == []
    cache.check([handle])
    cache.unlock(handle)
    assert list(cache.walk()) == []
    with pytest.raises(LockError, match="no longer in the tree"):
        cache.lock_node(handle)


def test_each_handle_is_given_back_once() -> None:
    cache = cache_of(tokens(1, 2, 3))
    upper, lower = lock(cache, tokens(1)), lock(cache, tokens(1, 2, 3))
    cache.lock_node(lower)
    cache.unlock(upper)
    with pytest.raises(LockError, match="no handle"):
        cache.unlock(upper)  # the locks below belong to other handles
    cache.check([lower, lower])


# ---- evict


def test_a_lock_moved_down_holds_all_of_its_new_path_and_nothing_twice() -> None:
    cache = cache_of(tokens(1, 2), tokens(7))
    handle = lock(cache, tokens(1, 2))
    below = cache.insert("", tokens(1, 2, 3, 4, 5), pages(0, 1, 3, 4, 5), behind=handle).node
    cache.move_down(handle, below)
    cache.check([below])
    assert (cache.locked_pages, cache.evictable_pages) == (5, 1)
    with pytest.raises(LockError, match="has no handle to release"):
        cache.move_down(handle, below)
    with pytest.raises(LockError, match="does not lie below"):
        cache.move_down(below, lock(cache, tokens(7)))
    cache.unlock(below)
    assert cache.locked_pages == 1


def test_the_least_recently_used_leaf_goes_first_from_its_tail() -> None:
    cache = cache_of(tokens(1, 2), tokens(3, 4), tokens(5, 6))
    cache.unlock(lock(cache, tokens(1, 2)))
    assert cache.evict(3).tolist() == [3, 2, 5]
    assert cache.match("", tokens(5, 6), ALL).pages == 1


def test_a_parent_outlives_its_children() -> None:
    cache = cache_of(tokens(1, 2, 3), tokens(9), tokens(1, 2, 4))
    assert cache.evict(5).tolist() == [2, 3, 4, 1, 0]  # 3; 9; then 4 and only then its parent


def test_only_the_used_part_of_an_edge_becomes_recent() -> None:
    cache = cache_of(tokens(1, 2, 3), tokens(9))
    cache.insert("", tokens(1), pages(0))
    assert cache.evict(4).tolist() == [2, 1, 3, 0]


def test_the_epoch_rises_only_when_a_match_can_change() -> None:
    cache = cache_of(tokens(1, 2))
    epoch = cache.epoch
    cache.unlock(lock(cache, tokens(1)))
    cache.insert("", tokens(1, 2), pages(0, 1))
    cache.trim()
    assert cache.epoch == epoch
    cache.evict(1)
    assert cache.epoch == epoch + 1
    cache.insert("", tokens(1, 5), pages(0, 5))
    assert cache.epoch == epoch + 2


@pytest.mark.parametrize("shared", [False, True], ids=["lru", "parts"])
def test_each_leaf_is_reported_once_before_its_pages_are_taken(shared: bool) -> None:
    cache = SharedRadixCache(1, None, 4) if shared else RadixCache(1)
    insert(cache, 1, 2, 3)
    insert(cache, 7, 8)
    reported: list[list[int]] = []
    cache.on_evict = lambda leaf: reported.append(cache.pages_of(leaf).tolist())
    assert cache.evict(4).tolist() == [3, 2, 1, 8]
    assert reported == [[1, 2, 3], [7, 8]]
    assert cache.evict(1).tolist() == [7]
    assert reported == [[1, 2, 3], [7, 8], [7]]


def test_trim_holds_the_cache_to_its_capacity_as_far_as_locks_allow() -> None:
    cache = RadixCache(1, capacity_pages=2)
    node = cache.insert("", tokens(1, 2, 3), pages(0, 1, 2)).node
    cache.lock_node(node)
    cache.insert("", tokens(7, 8), pages(7, 8))
    assert cache.trim().tolist() == [8, 7]
    assert cache.trim().tolist() == []
    cache.unlock(node)
    assert cache.trim().tolist() == [2]


def test_reset_keeps_only_locked_paths() -> None:
    cache = cache_of(tokens(1, 2), tokens(3, 4))
    handle = lock(cache, tokens(3))
    assert sorted(cache.reset().tolist()) == [0, 1, 3]
    cache.check([handle])


def test_nothing_of_evicted_nodes_stays_in_memory() -> None:
    cache = RadixCache(1)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for i in range(20_000):
            cache.insert(f"tenant {i % 3}", tokens(i % 7, i, i + 1), pages(3 * i, 3 * i + 1, 3 * i + 2))
            cache.evict(3 if i % 2 else 1)
        cache.reset()
        assert abs(len(gc.get_objects()) - before) < 20
    finally:
        gc.enable()


# ---- check


def test_check_names_what_is_broken_with_its_numbers() -> None:
    cache = cache_of(tokens(1, 2))
    handle = lock(cache, tokens(1, 2))
    with pytest.raises(InvariantError, match=r"S9: handles by node are recorded as \{1: 1\}, live are \{\}"):
        cache.check([])
    cache.locked_pages = 1
    with pytest.raises(InvariantError, match="S9: counters say 2 pages, 1 locked; recount 2, 2 locked"):
        cache.check([handle])
    cache.locked_pages = 2
    handle.pages = pages(4, 4)
    with pytest.raises(InvariantError, match="S10: 1 of 2 pages are in the tree more than once"):
        cache.check([handle])
    handle.pages = pages(1, 2, 3)[:2]
    with pytest.raises(InvariantError, match=r"S10: .* a view"):
        cache.check([handle])


def test_check_names_a_root_with_pages_and_a_visible_node_below_a_hidden_one() -> None:
    cache = cache_of(tokens(1), tokens(1, 2))
    below = cache.match("", tokens(1, 2), ALL).node
    assert below is not None
    cache.invalidate(below, 0)
    cache.check([])
    below.invalidated = False
    with pytest.raises(InvariantError, match=r"S10: .* has been inserted below .*, which no match finds any more"):
        cache.check([])
    below.invalidated = True
    root = next(cache.walk())
    root.key, root.pages = tokens(9), pages(9)
    with pytest.raises(InvariantError, match=r"S10: root .* of '' has 1 pages or a double"):
        cache.check([])


# ---- any history

NAMESPACES = ("", "tenant")


@dataclass
class Held:
    """A handle and the keys of the pages that it must keep: one key per page, the whole prefix up to the page's end."""

    number: int
    path: list[tuple[str, bytes]]


class PageModel:
    """The cache as a plain dictionary of single pages. Slow, and obviously correct."""

    def __init__(self, page_tokens: int) -> None:
        self.page_bytes = 4 * page_tokens
        self.cached: dict[tuple[str, bytes], int] = {}  # (namespace, prefix up to the end of the page) -> page id
        self.used: dict[tuple[str, bytes], int] = {}  # ... -> tick
        self.tick = 0

    def path(self, namespace: str, prompt: bytes) -> list[tuple[str, bytes]]:
        """The keys of the pages of a prompt, as far as they are cached."""
        ends = range(self.page_bytes, len(prompt) + 1, self.page_bytes)
        keys = [(namespace, prompt[:end]) for end in ends]
        return keys[: next((i for i, key in enumerate(keys) if key not in self.cached), len(keys))]

    def stamp(self, path: list[tuple[str, bytes]]) -> None:
        if path:
            self.tick += 1
            self.used.update(dict.fromkeys(path, self.tick))

    def insert(self, namespace: str, prompt: bytes, ids: list[int]) -> int:
        already = len(self.path(namespace, prompt))
        for i in range(already, len(ids)):
            self.cached[namespace, prompt[: (i + 1) * self.page_bytes]] = ids[i]
        self.stamp(self.path(namespace, prompt))
        return already

    def evict(self, count: int, held: list[Held]) -> list[int]:
        locked = {key for handle in held for key in handle.path}
        taken: list[int] = []
        while len(taken) < count:
            parents = {(namespace, prefix[: -self.page_bytes]) for namespace, prefix in self.cached}
            leaves = [key for key in self.cached if key not in parents and key not in locked]
            if not leaves:
                break
            oldest = min(leaves, key=lambda key: self.used[key])
            assert sum(self.used[key] == self.used[oldest] for key in leaves) == 1
            taken.append(self.cached.pop(oldest))
            del self.used[oldest]
        return taken


class RadixMachine(RuleBasedStateMachine):
    prompts = st.lists(st.integers(0, 1), max_size=12).map(lambda ids: tokens(*ids))
    namespaces = st.sampled_from(NAMESPACES)

    @initialize(page_tokens=st.sampled_from([1, 2, 4]), capacity=st.sampled_from([None, 0, 5]))
    def start(self, page_tokens: int, capacity: int | None) -> None:
        self.cache = RadixCache(page_tokens, capacity)
        self.model = PageModel(page_tokens)
        self.held: list[Held] = []
        self.found: dict[tuple[str, bytes, int], Found] = {}
        self.next_page = 0

    def node(self, number: int) -> RadixNode:
        return next(node for node in self.cache.walk() if node.number == number)

    @rule(namespace=namespaces, prompt=prompts, keep=st.booleans(), from_handle=st.booleans())
    def insert(self, namespace: str, prompt: bytes, keep: bool, from_handle: bool) -> None:
        prompt = prompt[: len(prompt) // self.model.page_bytes * self.model.page_bytes]
        if not prompt:
            return
        epoch, count = self.cache.epoch, len(prompt) // self.model.page_bytes
        ids = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        behind = None
        if from_handle:
            path = self.model.path(namespace, prompt)
            known = [handle for handle in self.held if handle.path == path[: len(handle.path)] and handle.path]
            behind = self.node(known[-1].number) if known else None
        inserted = self.cache.insert(namespace, prompt, ids, behind)
        node = inserted.node
        assert inserted.already == self.model.insert(namespace, prompt, ids.tolist())
        assert (self.cache.epoch > epoch) == (inserted.already < count)
        path = self.model.path(namespace, prompt)
        assert self.cache.pages_of(node).tolist() == [self.model.cached[key] for key in path]
        if keep:
            self.cache.lock_node(node)
            self.held.append(Held(node.number, path))

    @rule(namespace=namespaces, prompt=prompts, cap=st.integers(0, 12), keep=st.booleans())
    def match(self, namespace: str, prompt: bytes, cap: int, keep: bool) -> None:
        before = self.cache.dump()
        match = self.cache.match(namespace, prompt, cap)
        assert self.cache.dump() == before
        path = self.model.path(namespace, prompt)[:cap]
        locked = {key for handle in self.held for key in handle.path}
        assert match.pages == len(path)
        assert match.evictable_pages == sum(key not in locked for key in path)
        if keep:
            node = self.cache.lock(match)
            assert self.cache.epoch == before["epoch"]
            assert self.cache.pages_of(node).tolist() == [self.model.cached[key] for key in path]
            self.model.stamp(path)
            self.held.append(Held(node.number, path))

    @rule(namespace=namespaces, prompt=prompts, cap=st.integers(0, 12))
    def find(self, namespace: str, prompt: bytes, cap: int) -> None:
        known = self.found.get((namespace, prompt, cap))
        found = self.found[namespace, prompt, cap] = self.cache.find(namespace, prompt, cap, known)
        assert found == self.cache.find(namespace, prompt, cap)
        assert found.pages == len(self.model.path(namespace, prompt)[:cap])

    @rule(which=st.integers(0, 99), again=st.booleans())
    def unlock(self, which: int, again: bool) -> None:
        if self.held:
            handle = self.held[which % len(self.held)]
            if again:
                self.cache.lock_node(self.node(handle.number))
                self.cache.unlock(self.node(handle.number))
            self.cache.unlock(self.node(handle.number))
            self.held.remove(handle)

    @rule(count=st.integers(-1, 15))
    def evict(self, count: int) -> None:
        evictable = self.cache.evictable_pages
        taken = self.cache.evict(count).tolist()
        assert len(taken) == min(max(count, 0), evictable)
        assert taken == self.model.evict(count, self.held)

    @rule()
    def trim(self) -> None:
        capacity = self.cache.capacity_pages
        excess = 0 if capacity is None else len(self.model.cached) - capacity
        assert self.cache.trim().tolist() == self.model.evict(excess, self.held)

    @rule()
    def reset(self) -> None:
        assert self.cache.reset().tolist() == self.model.evict(len(self.model.cached), self.held)

    @rule()
    def restart_from_a_snapshot(self) -> None:
        state = self.cache.dump()
        self.cache = RadixCache.load(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
        assert self.cache.dump() == state
        self.found.clear()  # versions are not stored

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check([self.node(handle.number) for handle in self.held])
        locked = {key for handle in self.held for key in handle.path}
        assert self.cache.locked_pages == len(locked)
        assert self.cache.total_pages == len(self.model.cached)
        for handle in self.held:
            wanted = [self.model.cached[key] for key in handle.path]
            assert self.cache.pages_of(self.node(handle.number)).tolist() == wanted
        for (namespace, prompt, cap), found in self.found.items():
            if found.node.version == found.version:
                assert found.pages == len(self.model.path(namespace, prompt)[:cap])


TestAnyHistory = RadixMachine.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
