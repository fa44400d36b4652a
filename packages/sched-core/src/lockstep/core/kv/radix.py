"""The radix cache: a prefix tree whose nodes own the KV pages of tokens computed before.

    root ""                     one root per namespace: tokens mean the same KV only within it
     `- [A A B B]  pages 4 5    an edge is whole pages; here a page is two tokens
         |- [C C]  page 6       siblings differ in their first page
         `- [D E]  page 9

Tokens are `bytes`, int32 little-endian, 4 bytes each, and are compared exactly: no hash is trusted.

**States of a page in the tree.** A page is *locked* if a handle lies at its node or below it; a locked page stays in
the tree. Other pages are *evictable*. `lock`, `lock_node` and `unlock` move pages between the two states, `insert` adds
evictable pages, `evict` removes them. A handle is a node and means the whole path from the root to its end. When a node
is split, the existing object stays the *lower* part, so that every handle still means the same path.

**Recency.** Each `lock(match)` and each `insert` is one tick, stamped on every node of its path; `match` changes
nothing. So a parent is at least as recent as its children, and nodes with equal ticks lie on one path: the oldest leaf
is unique. Evicting the tail page of the oldest leaf, again and again, is exact LRU over pages in which a parent
outlives its children, and `evict(a)` then `evict(b)` gives the pages of `evict(a + b)`.

**Remembering a match.** The end of a match depends on one node alone. `find` returns that node with its `version`,
which rises when the node gains a child, is split, shortened or removed. While the version is unchanged, the match is
valid, whatever else changes in the tree. A match in a namespace without a root ends in `no_node`, and the version of
`no_node` rises with each new root.

**What must hold** (`check`):
- a node has key bytes for exactly its pages, at least one, and owns both; a page is in the tree once;
- `lock_count` of a node = handles at it and below it, so locked nodes form whole paths from the root;
- the counters equal a recount, and all evictable pages can in fact be evicted;
- a root lives only while it has children or handles.

**The queue of leaves** is a heap of (tick, number, node) with at most one entry per node, so it never outgrows the
tree. An entry may be outdated: stamping a node does not move it. Ticks only rise, so an outdated entry reaches the top
too early, never too late. It is then queued again or, if the node is locked or has children, dropped. Every evictable
leaf has an entry. (Queueing again costs 0.5 us, once per use; rebuilding the heap instead saves half of that.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lockstep.core.contract.errors import InvariantError, LockstepError
from lockstep.core.requests.radix_node import Found, RadixNode

TOKEN_BYTES = 4


class LockError(LockstepError, RuntimeError):
    """A lock or unlock that is not possible: a stale match, an evicted node, an unlock without a lock."""


class Match(NamedTuple):
    """The longest cached prefix of some tokens. It is not protected from eviction until it is locked."""

    namespace: str
    node: RadixNode | None  # the node in which the match ends; None if nothing matched
    pages: int  # matched pages, from the root
    edge_pages: int  # of these, pages that belong to `node`; fewer than it has if the match ends inside its edge
    evictable_pages: int  # matched pages that are not locked: locking this match takes them from the evictable


NO_MATCH = Match("", None, 0, 0, 0)


class Inserted(Struct, frozen=True):
    """The result of an insert."""

    node: RadixNode  # ends exactly where the inserted tokens end
    already: int  # leading pages that the tree had before; the copies of the caller stay with the caller


class RadixCache:
    """Match, insert, lock and evict pages by token prefix."""

    present: ClassVar[bool] = True  # False: the engine has no radix cache
    evicted_of: tuple[tuple[str, int], ...] = ()  # pages of the last `evict` by tenant, where tenants have parts

    __slots__ = (
        "_next_number",
        "_page_bytes",
        "_queue",
        "_roots",
        "_tick",
        "capacity_pages",
        "epoch",
        "locked_pages",
        "no_node",
        "on_evict",
        "page_tokens",
        "total_pages",
    )

    def __init__(self, page_tokens: int, capacity_pages: int | None = None) -> None:
        """Create an empty cache with pages of `page_tokens` tokens. `capacity_pages`: the limit of `trim`, if any."""
        self.page_tokens = page_tokens
        self.capacity_pages = capacity_pages
        self.epoch = 0  # rises with every change that can alter the result of a match
        self.total_pages = 0
        self.locked_pages = 0
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._roots: dict[str, RadixNode] = {}
        self._queue: list[tuple[int, int, RadixNode]] = []
        self._tick = 0
        self._next_number = 0
        self.no_node = RadixNode(-1, None, "", b"", np.empty(0, dtype=np.int32))  # in no tree
        self.on_evict: Callable[[RadixNode], object] | None = None  # called before `evict` takes pages of a leaf

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` can take now."""
        return self.total_pages - self.locked_pages

    # ---- look up

    # mechanism: prefix-cache (decided)
    def match(self, namespace: str, tokens: bytes, max_pages: int) -> Match:
        """Find the longest cached prefix of `tokens`, at most `max_pages` long. Changes nothing in the cache."""
        root = self._roots.get(namespace)
        if root is None:
            return Match(namespace, None, 0, 0, 0)
        node, pages = self._descend(root, tokens, min(max_pages, len(tokens) // self._page_bytes))
        if node.parent is None:
            return Match(namespace, None, 0, 0, 0)
        locked = node
        while not locked.lock_count and locked.parent is not None:
            locked = locked.parent
        return Match(namespace, node, pages, pages - node.parent.stop, pages - min(pages, locked.stop))

    def find(self, namespace: str, tokens: bytes, max_pages: int, known: Found | None = None) -> Found:
        """Return where the longest cached prefix of `tokens` ends, at most `max_pages` from the root. Changes nothing.

        `known`: an earlier result for the same arguments. The search continues from there if that node is still valid.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Found(self.no_node, self.no_node.version, 0)
        start = root
        if (
            known is not None
            and known.node.stop == known.pages
            and known.node.parent is not None
            and not known.node.invalidated
        ):
            start = known.node  # still in the tree, with the same path above it
        node, pages = self._descend(start, tokens, min(max_pages, len(tokens) // self._page_bytes))
        return Found(node, node.version, pages)

    def pages_of(self, node: RadixNode) -> NDArray[np.int32]:
        """Return a copy of the pages of the path from the root to the end of `node`, int32 [node.stop], in order."""
        parts = [node.pages]
        while (parent := node.parent) is not None:
            parts.append(parent.pages)
            node = parent
        parts.reverse()
        return np.concatenate(parts)

    def walk(self) -> Iterator[RadixNode]:
        """Yield every node, roots included: parents before children, siblings in insertion order."""
        for root in self._roots.values():
            yield from _below(root)

    # ---- hold

    def lock(self, match: Match) -> RadixNode:
        """Keep the pages of `match` in the tree, as used just now, until `unlock` of the node returned.

        A match of no pages returns the root of its namespace, which has no pages and still must be unlocked.
        A match is valid while `epoch` stays the same.
        Raises: LockError if its pages have been evicted since.
        """
        node = match.node
        if node is None:
            node = self._root(match.namespace)
        elif node.parent is None or node.stop < match.pages:
            raise LockError(f"page {match.pages} of a match was evicted: {node}\nhint: match again after `epoch` rose")
        else:
            node = self._end_at(node, match.pages)
            self._stamp(node)
        self.lock_node(node)
        return node

    def hold(self, match: Match) -> RadixNode | None:
        """Lock a match as `lock` does. Without a radix cache it returns None, and nothing must be unlocked."""
        return self.lock(match)

    def lock_node(self, node: RadixNode) -> None:
        """Take a handle on a node of the tree; nothing is stamped. Raises: LockError if the node was evicted."""
        if node.parent is None and self._roots.get(node.namespace) is not node:
            raise LockError(f"{node} is no longer in the tree")
        node.handles += 1
        step: RadixNode | None = node
        while step is not None:
            if not step.lock_count:
                self.locked_pages += len(step.pages)
            step.lock_count += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Release one handle on `node`. Raises: LockError if there is none."""
        if not node.handles:
            raise LockError(f"{node} has no handle to release")
        node.handles -= 1
        step: RadixNode | None = node
        while step is not None:
            step.lock_count -= 1
            if not step.lock_count:
                self.locked_pages -= len(step.pages)
            step = step.parent
        self._settle(node)

    def move_down(self, handle: RadixNode, node: RadixNode) -> None:
        """Lock `node` and unlock `handle`, which lies above `node`, in one step. Raises: LockError."""
        if not handle.handles:
            raise LockError(f"{handle} has no handle to release")
        path = []
        step: RadixNode | None = node
        while step is not handle:
            if step is None:
                raise LockError(f"{node} does not lie below {handle}")
            path.append(step)
            step = step.parent
        handle.handles -= 1
        node.handles += 1
        for step in path:
            if not step.lock_count:
                self.locked_pages += len(step.pages)
            step.lock_count += 1

    def touch(self, node: RadixNode) -> None:
        """Count the path down to a node as used just now, if it is still in the tree."""
        if node.parent is not None:
            self._stamp(node)

    # ---- grow and shrink

    def insert(
        self, namespace: str, tokens: bytes, pages: NDArray[np.int32], behind: RadixNode | None = None
    ) -> Inserted:
        """Insert `tokens` with their KV in `pages`, as the most recently used prefix of the namespace.

        Args:
            tokens: whole pages, at least one.
            behind: a locked node of this namespace, if `tokens` begin with the path to it.
            pages: int32 [number of pages], read only; the missing tail is copied, and its pages belong to the tree.
        Returns: Inserted. The tree had the first `already` pages before and keeps its own; the caller frees its copies,
            unless they are the same pages.
        Raises: ValueError if tokens and pages do not agree.
        """
        count = len(pages)
        if not count or count * self._page_bytes != len(tokens):
            raise ValueError(f"expected {count} pages of {self.page_tokens} tokens, got {len(tokens)} bytes")
        node, already = self._descend(behind or self._root(namespace), tokens, count)
        node = self._end_at(node, already)
        if already < count:
            tail = tokens[already * self._page_bytes :]
            node = self._node(node, namespace, tail, np.array(pages[already:], dtype=np.int32))
            self.total_pages += count - already
            self.epoch += 1
        self._stamp(node)
        self._settle(node)
        return Inserted(node, already)

    def evict(self, count: int, *, by_age: bool = False) -> NDArray[np.int32]:
        """Take out the `count` least recently used evictable pages, or all of them if there are fewer.

        `by_age`: no part of a tenant counts; here none does in any case, see `radix_shares`.
        Returns: int32 [min(count, evictable_pages)], owned by the caller, last page of a leaf first.
        """
        short = wanted = min(max(count, 0), self.evictable_pages)
        queue, taken, reported = self._queue, [], None
        while short:
            tick, _, leaf = queue[0]
            if leaf.children or leaf.lock_count:
                heappop(queue)
                leaf.queued = False
            elif leaf.tick != tick:
                heapreplace(queue, (leaf.tick, leaf.number, leaf))
            elif self.on_evict is not None and reported is not leaf:
                self.on_evict(leaf)
                reported = leaf
            elif (keep := len(leaf.pages) - short) > 0:
                taken.append(self._shortened(leaf, keep))
                short = 0
            else:
                heappop(queue)
                taken.append(leaf.pages)
                short = -keep
                self._remove(leaf)
        if not wanted:
            return np.empty(0, dtype=np.int32)
        self.total_pages -= wanted
        self.epoch += 1
        taken.reverse()
        return np.concatenate(taken)[::-1]  # joined forwards and read backwards, which copies 4x faster

    def trim(self) -> NDArray[np.int32]:
        """Evict the pages beyond `capacity_pages`, as far as locks allow. Returns: see `evict`."""
        return self.evict(0 if self.capacity_pages is None else self.total_pages - self.capacity_pages)

    def reset(self) -> NDArray[np.int32]:
        """Evict everything that is not locked. Returns: see `evict`."""
        return self.evict(self.evictable_pages)

    def invalidate(self, node: RadixNode, pages: int) -> list[RadixNode]:
        """Hide the path to `node` beyond its first `pages`, and all nodes below, from every later match.

        For KV that was shared before it was computed, and was never computed. Locks stay as they are; the pages are
        freed by eviction. Returns the nodes that this call has hidden.
        """
        if node.invalidated:
            return []
        while node.parent is not None and node.parent.stop > pages:
            node = node.parent
        parent = node.parent
        assert parent is not None
        assert parent.stop == pages
        del parent.children[self._child_key(node)]  # no match that ends at the parent has used it
        nodes = list(_below(node))
        for one in nodes:
            one.invalidated = True
            one.version += 1
        parent.children[self._child_key(node)] = node
        self.epoch += 1
        return nodes

    def _child_key(self, node: RadixNode) -> bytes:
        """Return the key of a node among its siblings: its first page, or a key that no prompt matches."""
        parent = node.parent
        if node.invalidated and parent is not None and not parent.invalidated:
            return b"invalidated %d" % node.number + bytes(self._page_bytes)
        return node.key[: self._page_bytes]

    # ---- snapshot

    def dump(self) -> dict[str, Any] | None:
        """Return the state in builtins. Handles are stored as `node.number`. None: there is no cache."""
        trees: dict[str, list[tuple[int, int, int, int, bytes, bytes, bool]]] = {}
        for node in self.walk():
            parent = -1 if node.parent is None else node.parent.number
            row = (node.number, parent, node.tick, node.handles, node.key, node.pages.tobytes(), node.invalidated)
            trees.setdefault(node.namespace, []).append(row)
        return {
            "page_tokens": self.page_tokens,
            "capacity_pages": self.capacity_pages,
            "epoch": self.epoch,
            "tick": self._tick,
            "next_number": self._next_number,
            "trees": list(trees.items()),  # a codec may sort maps
        }

    @classmethod
    def empty(cls, state: dict[str, Any]) -> RadixCache:
        """Return an empty cache with the sizes of a state."""
        return cls(state["page_tokens"], state["capacity_pages"])

    @classmethod
    def load(cls, state: dict[str, Any]) -> RadixCache:
        """Return the cache that `dump` described. Equal calls have equal results on both, numbers of nodes included."""
        cache = cls.empty(state)
        nodes: dict[int, RadixNode] = {}
        for namespace, rows in state["trees"]:
            for number, parent_number, tick, handles, key, pages, invalidated in rows:
                parent = nodes.get(parent_number)
                node = RadixNode(number, parent, namespace, key, np.frombuffer(pages, dtype=np.int32).copy())
                node.tick, node.handles, node.invalidated = tick, handles, invalidated
                if parent is None:
                    cache._roots[namespace] = node
                else:
                    parent.children[cache._child_key(node)] = node
                nodes[number] = node
        for node in reversed(nodes.values()):  # children before parents
            node.lock_count = node.handles + sum(child.lock_count for child in node.children.values())
            cache.total_pages += len(node.pages)
            cache.locked_pages += len(node.pages) if node.lock_count else 0
            cache._settle(node)
        cache.epoch, cache._tick, cache._next_number = state["epoch"], state["tick"], state["next_number"]
        return cache

    # ---- parts of the operations above

    def _descend(self, node: RadixNode, tokens: bytes, limit: int) -> tuple[RadixNode, int]:
        """Return the node in which the longest cached prefix of at most `limit` pages ends, and its pages.

        The search begins behind `node`: `tokens` must begin with the path to its end.
        """
        page_bytes = self._page_bytes
        pages = node.stop
        while pages < limit:
            offset = pages * page_bytes
            child = node.children.get(tokens[offset : offset + page_bytes])
            if child is None:
                break
            node = child
            most = node.stop if node.stop < limit else limit
            key = node.key[: (most - pages) * page_bytes]  # the whole edge is not copied, a part is
            if not tokens.startswith(key, offset):
                return node, pages + self._shared_pages(key, tokens, offset)
            pages = most
        return node, pages

    def _shared_pages(self, key: bytes, tokens: bytes, offset: int) -> int:
        """Return the whole pages in which `key` equals `tokens` from byte `offset` on. Somewhere they must differ."""
        count = len(key) // TOKEN_BYTES
        edge = np.frombuffer(key, dtype=np.int32)
        differ = edge != np.frombuffer(tokens, dtype=np.int32, count=count, offset=offset)
        return int(differ.argmax()) // self.page_tokens

    def _node(self, parent: RadixNode | None, namespace: str, key: bytes, pages: NDArray[np.int32]) -> RadixNode:
        node = RadixNode(self._next_number, parent, namespace, key, pages)
        self._next_number += 1
        if parent is None:
            self.no_node.version += 1
        else:
            parent.children[key[: self._page_bytes]] = node
            parent.version += 1
        return node

    def _root(self, namespace: str) -> RadixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._node(None, namespace, b"", np.empty(0, dtype=np.int32))
        return root

    def _end_at(self, node: RadixNode, stop: int) -> RadixNode:
        """Return the node on the path to `node` that ends `stop` pages from the root. An edge is split if none does."""
        while (parent := node.parent) is not None and parent.stop >= stop:
            node = parent
        return node if node.stop == stop else self._split(node, stop)

    def _split(self, node: RadixNode, stop: int) -> RadixNode:
        """Cut an edge `stop` pages from the root; return the new upper part. `node` stays the lower part."""
        parent = node.parent
        assert parent is not None
        keep = stop - parent.stop
        cut = keep * self._page_bytes
        # The upper part has the same first page, so it replaces `node` in the order of the siblings.
        upper = self._node(parent, node.namespace, node.key[:cut], node.pages[:keep].copy())
        upper.tick, upper.lock_count = node.tick, node.lock_count
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[keep:].copy()
        node.version += 1
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _stamp(self, node: RadixNode) -> None:
        """Mark the path down to `node` as used now: one tick for all of it."""
        tick = self._tick = self._tick + 1
        step: RadixNode | None = node
        while step is not None:
            step.tick = tick
            step = step.parent

    def _shortened(self, leaf: RadixNode, keep: int) -> NDArray[np.int32]:
        """Take the pages of a leaf behind its first `keep` ones out of it. Returns them, int32 [pages]."""
        taken = leaf.pages[keep:]
        leaf.key = leaf.key[: keep * self._page_bytes]
        leaf.pages = leaf.pages[:keep].copy()
        leaf.stop -= len(taken)
        leaf.version += 1
        return taken

    def _settle(self, node: RadixNode) -> None:
        """Queue a node that can be evicted since its children or locks changed; delete a root without either."""
        if node.children or node.lock_count:
            return
        if node.parent is None:
            del self._roots[node.namespace]
            node.version += 1
        elif not node.queued:
            heappush(self._queue, (node.tick, node.number, node))
            node.queued = True

    def _remove(self, leaf: RadixNode) -> None:
        """Remove an evicted leaf from the tree and clear its links, so that no reference cycle remains."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._child_key(leaf)]
        leaf.parent = None
        leaf.version += 1
        self._settle(parent)

    # ---- invariants

    def nodes(self) -> list[RadixNode]:
        """Return every node, roots included, parents before children. Costs a third of `walk`."""
        nodes = list(self._roots.values())
        for node in nodes:  # including the nodes that this loop appends
            if node.children:
                nodes += node.children.values()
        return nodes

    def check(self, handles: Iterable[RadixNode] | None = None, nodes: list[RadixNode] | None = None) -> None:
        """Recompute everything that is kept incrementally. With `handles`, compare the locks with these live handles.

        `nodes`: the present result of `nodes()`; then the caller checks that no page occurs twice.
        Raises: InvariantError naming the node and both numbers. Costs a walk over all nodes; for tests.
        """
        if nodes is None:
            nodes = self.nodes()
            held = np.concatenate([np.empty(0, dtype=np.int32), *(node.pages for node in nodes)])
            if twice := len(held) - len(np.unique(held)):
                raise InvariantError(f"S10: {twice} of {len(held)} pages are in the tree more than once")
        pages = locked = 0
        recorded: dict[int, int] = {}
        queued: dict[int, RadixNode] = {}
        for node in nodes:
            self._check_node(node)
            if node.handles:
                recorded[node.number] = node.handles
            if node.queued:
                queued[node.number] = node
            pages += len(node.pages)
            if node.lock_count:
                locked += len(node.pages)
        if handles is not None and recorded != (live := Counter(node.number for node in handles)):
            raise InvariantError(f"S9: handles by node are recorded as {recorded}, live are {dict(live)}")
        if (self.total_pages, self.locked_pages) != (pages, locked):
            counted = f"{self.total_pages} pages, {self.locked_pages} locked"
            raise InvariantError(f"S9: counters say {counted}; recount {pages}, {locked} locked")
        entries = self._entries()
        filed = {number: tick for tick, number, _ in entries}
        if len(filed) != len(entries) or filed.keys() != queued.keys():
            raise InvariantError(f"S11: {len(entries)} entries for {len(filed)} nodes, {len(queued)} are marked")
        for number, tick in filed.items():
            if tick > queued[number].tick:
                raise InvariantError(f"S11: {queued[number]} is filed under {tick}, which is too late")

    def _entries(self) -> list[tuple[int, int, RadixNode]]:
        """Return the entries of the queue of leaves."""
        return self._queue

    def _check_node(self, node: RadixNode) -> None:
        """Check the shape of a node, its links to parent and children, and its locks."""
        parent, count, locks, page_bytes = node.parent, len(node.pages), node.handles, self._page_bytes
        for first, child in node.children.items():
            locks += child.lock_count
            own = self._child_key(child) if child.invalidated else child.key[:page_bytes]
            if child.parent is not node or own != first:
                raise InvariantError(f"S10: {child} is not filed under {node} where it belongs")
            if node.invalidated and not child.invalidated:
                raise InvariantError(f"S10: {child} has been inserted below {node}, which no match finds any more")
        if node.lock_count != locks:
            raise InvariantError(f"S9: {node} has {locks} handles in its subtree")
        if len(node.key) != count * page_bytes:
            raise InvariantError(f"S10: {node} has {len(node.key)} key bytes for {count} pages")
        if node.pages.base is not None:
            raise InvariantError(f"S10: the {count} pages of {node} are a view of another array")
        if parent is None:
            if self._roots[node.namespace] is not node or count or node.stop:
                raise InvariantError(f"S10: root {node} of {node.namespace!r} has {count} pages or a double")
            if not locks and not node.children:
                raise InvariantError(f"S10: root {node} of {node.namespace!r} has neither child nor handle")
        else:
            if not count or node.stop != parent.stop + count:
                raise InvariantError(f"S10: {node} has {count} pages after {parent}")
            if parent.tick < node.tick:
                raise InvariantError(f"S10: {node} is more recent than its parent {parent}")
            if not locks and not node.queued and not node.children:
                raise InvariantError(f"S11: evictable leaf {node} is not queued")


class NoRadixCache(RadixCache):
    """The radix cache of an engine without one: nothing is inserted, so nothing matches, and nothing is locked."""

    __slots__ = ()
    present = False

    def __init__(self) -> None:
        super().__init__(1)

    def hold(self, match: Match) -> None:
        """Return no handle: there is nothing to lock."""

    def dump(self) -> None:
        """Return None: a snapshot has no radix cache."""


def _below(node: RadixNode) -> Iterator[RadixNode]:
    """Yield a node and all nodes below it: parents before children, siblings in insertion order."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))
