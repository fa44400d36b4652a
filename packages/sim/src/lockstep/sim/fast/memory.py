"""Pages of an engine on the fast path: counts of free and cached pages, and a prefix tree over arrays.

The tree is that of `lockstep.core.kv.radix`: nodes own whole pages, locks keep a path, each use of a path is one tick
on all of it, and the tail of the oldest leaf without a lock is evicted first. Only counts of pages matter in a
simulation without a device, so a node has no page numbers, and its tokens are those of its `owner`, the request that
inserted it.

    root 0      node 0; a node with number 0 elsewhere means none
     `- node    pages [stop of its parent:stop) of its owner

Token ids of a workload are chained (sim/workload/token_runs.py): all occurrences of an id have the same prefix before
them. So two requests share their first n pages exactly if they agree in the last token of page n, one number identifies
a page with everything before it, and one hash table has all children of all nodes, by the last token of their first
page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.core.requests.rules import pages_between, pages_to_evict
from lockstep.sim.fast.state import NONE, Array, Arrays, Record

ROOT = 0
HASH_FACTOR = 2_654_435_761  # 2**32 by the golden ratio: neighbouring ids are spread over the buckets


class Cache(NamedTuple):
    """The arrays of one engine that this module reads and writes, see `state.Arrays`."""

    requests: Array
    run_first_token: Array
    run_stop: Array
    nodes: Array
    buckets: Array
    heap_ticks: Array
    heap_nodes: Array
    deferred_rows: Array
    deferred_pages: Array
    flights: Array
    samplers: Array
    parts: Array
    segments: Array
    running_batch: Array


def cache_of(a: Arrays, engine: int) -> Cache:
    """Return the arrays of an engine."""
    return Cache(
        a.requests,
        a.run_first_token,
        a.run_stop,
        a.nodes[engine],
        a.buckets[engine],
        a.heap_ticks[engine],
        a.heap_nodes[engine],
        a.deferred_rows[engine],
        a.deferred_pages[engine],
        a.flights[engine],
        a.samplers[engine],
        a.parts[engine],
        a.segments[engine],
        a.running_batch[engine],
    )


# --------------------------------------------------------------------------------------------------------------- tokens


def token_at(c: Cache, number: int, position: int) -> int:
    """Return the token id of a request at a position of its prompt or its output."""
    request = c.requests[number]
    if position >= request.prompt_tokens:
        return request.output_first_token + (position - request.prompt_tokens)
    low, high = request.run_start, request.run_stop - 1  # the first run that stops behind the position
    while low < high:
        middle = (low + high) // 2
        if c.run_stop[middle] > position:
            high = middle
        else:
            low = middle + 1
    return request.shift + c.run_first_token[low] + (position - (c.run_stop[low - 1] if low > request.run_start else 0))


def agree(c: Cache, one: int, other: int, pages: int, page_size: int) -> bool:
    """Return whether two requests share their first `pages` pages."""
    last = pages * page_size - 1
    return token_at(c, one, last) == token_at(c, other, last)


def bucket_of(c: Cache, token: int) -> int:
    """Return the bucket of the hash table for a token id."""
    return (np.int64(token) * HASH_FACTOR >> 16) & (c.buckets.size - 1)


def child_with(c: Cache, token: int) -> int:
    """Return the node with this last token of its first page; 0: there is none."""
    node = c.buckets[bucket_of(c, token)]
    while node and c.nodes[node].first_page_token != token:
        node = c.nodes[node].following
    return node


def enter(c: Cache, node: int) -> None:
    """Enter a node into the hash table."""
    bucket = bucket_of(c, c.nodes[node].first_page_token)
    c.nodes[node].following = c.buckets[bucket]
    c.buckets[bucket] = node


def withdraw(c: Cache, node: int) -> None:
    """Remove a node from the hash table."""
    bucket = bucket_of(c, c.nodes[node].first_page_token)
    other = c.buckets[bucket]
    if other == node:
        c.buckets[bucket] = c.nodes[node].following
        return
    while c.nodes[other].following != node:
        other = c.nodes[other].following
    c.nodes[other].following = c.nodes[node].following


# ----------------------------------------------------------------------------------------------------------------- tree


def pages_of(c: Cache, node: int) -> int:
    """Return the pages that a node owns."""
    return c.nodes[node].stop - c.nodes[c.nodes[node].parent].stop if node != ROOT else 0


def descend(s: Record, c: Cache, node: int, number: int, limit: int) -> tuple[int, int]:
    """Return the node in which the longest cached prefix of a request ends, at most `limit` pages long, and its pages.

    The search begins behind `node`: the request begins with the path to its end.
    """
    pages, page_size = c.nodes[node].stop, s.page_size
    while pages < limit:
        child = child_with(c, token_at(c, number, (pages + 1) * page_size - 1))
        if not child:
            break
        node = child
        most = min(c.nodes[node].stop, limit)
        owner = c.nodes[node].owner
        if not agree(c, owner, number, most, page_size):
            low, high = pages + 1, most - 1  # the last page in which both agree; they do in the first
            while low < high:
                middle = (low + high + 1) // 2
                if agree(c, owner, number, middle, page_size):
                    low = middle
                else:
                    high = middle - 1
            return node, low
        pages = most
    return node, pages


def new_node(s: Record, c: Cache, parent: int, owner: int, stop: int) -> int:
    """Return a new node behind `parent`, entered into the hash table."""
    if s.node_free:
        node = s.node_free
        s.node_free = c.nodes[node].following
    else:
        s.nodes += 1
        node = s.nodes
    made = c.nodes[node]
    made.parent, made.owner, made.stop = parent, owner, stop
    made.locks = made.children = made.queued = made.tick = 0
    made.first_page_token = token_at(c, owner, (c.nodes[parent].stop + 1) * s.page_size - 1)
    enter(c, node)
    return node


def end_at(s: Record, c: Cache, node: int, stop: int) -> int:
    """Return the node on the path to `node` that ends `stop` pages from the root. An edge is split if none does.

    The existing node stays the lower part, so that locks on it still mean the same path.
    """
    while node != ROOT and c.nodes[c.nodes[node].parent].stop >= stop:
        node = c.nodes[node].parent
    if c.nodes[node].stop == stop:
        return node
    lower = c.nodes[node]
    withdraw(c, node)
    upper = new_node(s, c, lower.parent, lower.owner, stop)
    c.nodes[upper].tick, c.nodes[upper].locks, c.nodes[upper].children = lower.tick, lower.locks, 1
    lower.parent = upper
    lower.first_page_token = token_at(c, lower.owner, (stop + 1) * s.page_size - 1)
    enter(c, node)
    return upper


def stamp(s: Record, c: Cache, node: int) -> None:
    """Mark the path down to a node as used now."""
    s.tick += 1
    while node != ROOT:
        c.nodes[node].tick = s.tick
        node = c.nodes[node].parent


def lock(s: Record, c: Cache, node: int, above: int) -> None:
    """Lock the path from behind `above` down to a node."""
    while node != above:
        if not c.nodes[node].locks:
            s.evictable_pages -= pages_of(c, node)
        c.nodes[node].locks += 1
        node = c.nodes[node].parent


def unlock(s: Record, c: Cache, handle: int) -> None:
    """Release a lock on the path down to a node."""
    node = handle
    while node != ROOT:
        c.nodes[node].locks -= 1
        if not c.nodes[node].locks:
            s.evictable_pages += pages_of(c, node)
        node = c.nodes[node].parent
    settle(s, c, handle)


def insert(s: Record, c: Cache, number: int, pages: int, behind: int) -> tuple[int, int]:
    """Insert the first `pages` pages of a request, as used now. The request begins with the path to `behind`.

    Returns: the node that ends there, and the pages that the tree had before.
    """
    node, already = descend(s, c, behind, number, pages)
    node = end_at(s, c, node, already)
    if already < pages:
        c.nodes[node].children += 1
        node = new_node(s, c, node, number, pages)
        s.evictable_pages += pages - already
    stamp(s, c, node)
    settle(s, c, node)
    return node, already


def evict(s: Record, c: Cache, pages: int) -> None:
    """Evict the least recently used pages; the caller checks that there are as many without a lock."""
    short = pages
    while short:
        node = c.heap_nodes[0]
        leaf = c.nodes[node]
        if leaf.children or leaf.locks:
            pop(s, c)
            leaf.queued = 0
        elif leaf.tick != c.heap_ticks[0]:
            c.heap_ticks[0] = leaf.tick
            sift_down(s, c)
        else:
            owned = pages_of(c, node)
            if owned > short:
                leaf.stop -= short
                short = 0
            else:
                short -= owned
                pop(s, c)
                leaf.queued = 0
                parent = leaf.parent
                withdraw(c, node)
                leaf.following = s.node_free
                s.node_free = node
                c.nodes[parent].children -= 1
                settle(s, c, parent)
    s.evictable_pages -= pages
    s.free_pages += pages


def settle(s: Record, c: Cache, node: int) -> None:
    """Queue a node that can be evicted since its children or locks changed."""
    one = c.nodes[node]
    if node == ROOT or one.children or one.locks or one.queued:
        return
    one.queued = 1
    place = s.heap
    s.heap += 1
    while place and c.heap_ticks[(place - 1) // 2] > one.tick:
        above = (place - 1) // 2
        c.heap_ticks[place], c.heap_nodes[place] = c.heap_ticks[above], c.heap_nodes[above]
        place = above
    c.heap_ticks[place], c.heap_nodes[place] = one.tick, node


def pop(s: Record, c: Cache) -> None:
    """Remove the top of the queue of leaves."""
    s.heap -= 1
    if s.heap:
        c.heap_ticks[0], c.heap_nodes[0] = c.heap_ticks[s.heap], c.heap_nodes[s.heap]
        sift_down(s, c)


def sift_down(s: Record, c: Cache) -> None:
    """Move the top of the queue of leaves down to its place by tick."""
    tick, node, place = c.heap_ticks[0], c.heap_nodes[0], 0
    while 2 * place + 1 < s.heap:
        below = 2 * place + 1
        if below + 1 < s.heap and c.heap_ticks[below + 1] < c.heap_ticks[below]:
            below += 1
        if c.heap_ticks[below] >= tick:
            break
        c.heap_ticks[place], c.heap_nodes[place] = c.heap_ticks[below], c.heap_nodes[below]
        place = below
    c.heap_ticks[place], c.heap_nodes[place] = tick, node


# ---------------------------------------------------------------------------------------------------- pages of requests


# mechanism: prefix-cache (simulated)
def match(s: Record, c: Cache, number: int) -> tuple[int, int, int]:
    """Return the cached prefix of a waiting request: the node in which it ends, its pages, and those without a lock.

    The last token of a request is always computed.
    """
    if not s.radix_cache:
        return ROOT, 0, 0
    request = c.requests[number]
    most = (request.prompt_tokens + request.kept - 1) // s.page_size
    node, pages = descend(s, c, ROOT, number, most)
    locked = node
    while locked != ROOT and not c.nodes[locked].locks:
        locked = c.nodes[locked].parent
    return node, pages, pages - min(pages, c.nodes[locked].stop)


def take_match(s: Record, c: Cache, number: int, node: int, pages: int) -> None:
    """Let an admitted request begin with its cached prefix, locked."""
    request = c.requests[number]
    request.handle = ROOT
    if pages:
        request.handle = end_at(s, c, node, pages)
        stamp(s, c, request.handle)
        lock(s, c, request.handle, ROOT)
    request.cached_pages = pages
    request.position = pages * s.page_size


def refresh(s: Record, c: Cache, scratch: Array) -> None:
    """Count the cached prefixes of the first waiting requests as used now, that of the head last."""
    number, count = s.head, min(s.waiting, scratch.size)
    for i in range(count):
        scratch[i] = number
        number = c.requests[number].behind
    for i in range(count - 1, -1, -1):
        node, _, _ = match(s, c, scratch[i])
        if node != ROOT:
            stamp(s, c, node)


def alloc(s: Record, c: Cache, pages: int) -> int:
    """Take pages from the pool; evict cached pages if too few are free. Return the number of evicted pages."""
    evicted = 0
    missing = pages - s.free_pages
    if missing > 0 and s.evictable_pages:
        evicted = min(pages_to_evict(missing, s.pages), s.evictable_pages)
        evict(s, c, evicted)
    s.free_pages -= pages
    return evicted


def publish(s: Record, c: Cache, number: int, stop: int) -> None:
    """Share the KV of a prompt up to `stop`, like `Memory.publish`; pages that the tree has already are given back."""
    request = c.requests[number]
    pages = stop // s.page_size
    if not s.radix_cache or pages <= request.cached_pages:
        return
    node, already = insert(s, c, number, pages, request.handle)
    if already > request.cached_pages:
        free_behind(s, c, number, already - request.cached_pages)
    lock(s, c, node, request.handle)
    request.handle, request.cached_pages = node, pages


def free_behind(s: Record, c: Cache, number: int, pages: int) -> None:
    """Free pages once the last batch in flight that names the request is collected."""
    batch_id = last_batch_of(s, c, number, False)
    if batch_id == NONE:
        s.free_pages += pages
        s.batch_is_full = 0
    else:
        deferred = c.deferred_pages[s.pages_behind]
        deferred[0], deferred[1] = batch_id, pages
        s.pages_behind += 1


def last_batch_of(s: Record, c: Cache, number: int, leaves: bool) -> int:
    """Return the id of the last batch in flight that names a request; NONE: no batch does.

    Args:
        leaves: whether the request leaves its row, so that its entries in these batches are marked as dead.
    """
    last = NONE
    for i in range(s.in_flight):
        slot = (s.oldest + i) % c.flights.size
        flight = c.flights[slot]
        if flight.in_stretch:  # it names the running batch
            for j in range(s.decoding):
                if c.running_batch[j] == number:
                    last = flight.batch_id
            continue
        for j in range(flight.samplers):
            if c.samplers[slot, j] == number:
                last = flight.batch_id
                if leaves:
                    c.samplers[slot, j] = NONE
        for j in range(flight.parts):
            if c.parts[slot, j, 0] == number:
                last = flight.batch_id
                if leaves:
                    c.parts[slot, j, 0] = NONE
    return last


def leave(s: Record, c: Cache, number: int, keeps: bool) -> None:
    """Take a request off its row, like `Memory.leave`; batches in flight may still use its pages.

    Args:
        keeps: whether its computed KV goes to the radix cache.
    """
    request = c.requests[number]
    free_after = last_batch_of(s, c, number, True)
    if free_after == NONE:
        release(s, c, number, request.handle, request.cached_pages, request.position, keeps)
    else:
        deferred = c.deferred_rows[s.rows_behind]
        deferred.free_after, deferred.number, deferred.handle = free_after, number, request.handle
        deferred.cached_pages, deferred.position, deferred.keeps = request.cached_pages, request.position, keeps
        s.rows_behind += 1
    request.handle = request.cached_pages = request.position = 0


def release(s: Record, c: Cache, number: int, handle: int, cached_pages: int, position: int, keeps: bool) -> None:
    """Free a row that nothing in flight uses, like `Memory.release`: its pages go to the radix cache or to the pool."""
    held = pages_between(0, position, s.page_size)
    kept, whole = cached_pages, position // s.page_size
    if keeps and s.radix_cache and whole > kept:
        _, already = insert(s, c, number, whole, handle)
        s.free_pages += max(already - kept, 0)
        kept = whole
    unlock(s, c, handle)
    s.free_pages += held - kept


def release_deferred(s: Record, c: Cache, batch_id: int) -> None:
    """Free the rows and pages that waited for a collected batch."""
    left = 0
    for i in range(s.rows_behind):
        one = c.deferred_rows[i]
        if one.free_after <= batch_id:
            release(s, c, one.number, one.handle, one.cached_pages, one.position, one.keeps != 0)
            s.batch_is_full = 0
        else:
            c.deferred_rows[left] = one
            left += 1
    s.rows_behind = left
    left = 0
    for i in range(s.pages_behind):
        if c.deferred_pages[i, 0] <= batch_id:
            s.free_pages += c.deferred_pages[i, 1]
            s.batch_is_full = 0
        else:
            c.deferred_pages[left, 0], c.deferred_pages[left, 1] = c.deferred_pages[i, 0], c.deferred_pages[i, 1]
            left += 1
    s.pages_behind = left


# ------------------------------------------------------------------------------------------------------------ returning


def returning_pages(s: Record, c: Cache) -> int:
    """Return the pages that become available once everything in flight is delivered, like `Memory.returning_pages`."""
    pages = 0
    for i in range(s.pages_behind):
        pages += c.deferred_pages[i, 1]
    for i in range(s.rows_behind):
        one = c.deferred_rows[i]
        pages += freed_by(s, c, one.position, one.cached_pages, one.handle)
    for i in range(s.in_flight):
        slot = (s.oldest + i) % c.flights.size
        flight = c.flights[slot]
        for j in range(flight.samplers):
            number = c.samplers[slot, j]
            if number != NONE and c.requests[number].last_batch == flight.batch_id:
                request = c.requests[number]
                pages += freed_by(s, c, request.position, request.cached_pages, request.handle)
        for j in range(flight.parts):
            number = c.parts[slot, j, 0]
            if number != NONE and not c.requests[number].output_tokens:
                request = c.requests[number]
                if request.last_batch == flight.batch_id:
                    pages += freed_by(s, c, request.position, request.cached_pages, request.handle)
    return pages


def freed_by(s: Record, c: Cache, position: int, cached_pages: int, handle: int) -> int:
    """Return the pages that the release of a row makes available: its own, and those that only it locks."""
    pages = pages_between(0, position, s.page_size) - cached_pages
    while handle != ROOT and c.nodes[handle].locks == 1:
        pages += pages_of(c, handle)
        handle = c.nodes[handle].parent
    return pages
