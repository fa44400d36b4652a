"""The router of a cluster on the fast path."""

from __future__ import annotations

import numpy as np

from lockstep.sim.fast.following import next_number, take
from lockstep.sim.fast.state import (
    BOUNDED,
    GIVEN,
    IN_TURN,
    LEAST_PROMPTS,
    LEAST_TOKENS,
    NONE,
    STICKY,
    Array,
    Arrays,
    Record,
)

HASH_FACTOR = 2_654_435_761  # 2**32 by the golden ratio: neighbouring keys are spread over the buckets


def route_due(a: Arrays, run: Record) -> None:
    """Count ends that reach the router before `until_us`, and route its arrivals of that time, like `Cluster.run`."""
    now_us = run.until_us
    left = 0
    for i in range(run.unseen):
        seen_us, number = a.unseen[i, 0], a.unseen[i, 1]
        if seen_us < now_us:
            request = a.requests[number]
            s = a.engines[request.engine]
            s.open_requests -= 1
            s.open_tokens -= request.open_tokens
            run.ended += 1
            if request.admitted_us >= 0:  # else it was rejected
                run.output_tokens += request.asked_tokens
        else:
            a.unseen[left, 0], a.unseen[left, 1] = seen_us, number
            left += 1
    run.unseen = left
    while True:
        if run.loops:
            number = next_number(a, run)
        else:
            number = run.next_request if run.next_request < a.requests.size else NONE
        if number == NONE or a.requests[number].arrival_us != now_us:
            break
        if run.loops:
            take(a, run, number)
        else:
            run.next_request += 1
        request = a.requests[number]
        expected = (run.output_tokens + run.first_guess) // (run.ended + 1)
        request.open_tokens = request.prompt_tokens + expected
        engine = _engine_for(a, run, request)
        s = a.engines[engine]
        s.open_requests += 1
        s.open_tokens += request.open_tokens
        s.last_chosen = request.id
        request.engine = engine
        request.next = NONE
        if s.coming == NONE:
            s.coming = number
            a.due_us[engine] = min(a.due_us[engine], now_us + run.hop_us)
        if s.sent != NONE:
            a.requests[s.sent].next = number
        s.sent = number
        if run.until_question > 0:
            run.until_question -= 1


def _engine_for(a: Arrays, run: Record, request: Record) -> int:
    """Return the engine for a request, like `Router._chosen` with all engines up."""
    engines = a.engines
    if run.routing_rule == GIVEN:
        return a.requests[request.id].room
    if run.routing_rule == STICKY and a.requests[request.session].engine != NONE:
        run.routed_by_session += 1
        return a.requests[request.session].engine
    if run.routing_rule == IN_TURN:
        weights = 0.0
        for engine in range(engines.size):
            engines[engine].credit += engines[engine].weight
            weights += engines[engine].weight
        best = 0
        for engine in range(1, engines.size):
            if engines[engine].credit > engines[best].credit:
                best = engine
        engines[best].credit -= weights
        return best
    if run.routing_rule == BOUNDED:
        return _by_prefix(a, run, request)
    best, least, chosen = NONE, 0.0, 0
    for engine in range(engines.size):
        s = engines[engine]
        if run.routing_rule == LEAST_TOKENS:
            load = s.open_tokens + request.open_tokens
        elif run.routing_rule == LEAST_PROMPTS:
            load = s.open_tokens + request.prompt_tokens
        else:
            load = s.open_requests + 1
        share = load / s.weight
        if best == NONE or share < least or (share == least and s.last_chosen < chosen):
            best, least, chosen = engine, share, s.last_chosen
    return best


# ------------------------------------------------------------------------------------------------------ prefix affinity


# mechanism: prefix-affinity (simulated)
def _by_prefix(a: Arrays, run: Record, request: Record) -> int:
    """Return the engine within the bound that received most of the prompt before, like `Router._by_prefix`."""
    engines, keys = a.engines, a.block_keys[request.block_start : request.block_stop]
    total, weights, longest = 1, 0.0, 0
    for engine in range(engines.size):
        s = engines[engine]
        total += s.open_requests
        weights += s.weight
        s.matched = _matched(keys, request.block_shift, a, engine)
        longest = max(longest, s.matched)
    best, least = NONE, 0.0
    for engine in range(engines.size):
        s = engines[engine]
        fair = np.int64(np.ceil(run.load_bound * total * s.weight / weights))
        if s.open_requests >= max(run.load_floor, fair):
            continue
        share = (s.open_requests + 1) / s.weight
        if best != NONE:
            other = engines[best]
            if s.matched < other.matched:
                continue
            if s.matched == other.matched:
                if share > least or (share == least and s.last_chosen >= other.last_chosen):
                    continue
        best, least = engine, share
    if longest > engines[best].matched:
        run.routed_by_bound += 1
    elif longest:
        run.routed_by_prefix += 1
    _sent(engines[best], keys, request.block_shift, a.blocks[best], a.block_buckets[best])
    return best


def _matched(keys: Array, shift: int, a: Arrays, engine: int) -> int:
    """Return how many blocks of a prompt, from its beginning on, an engine received before."""
    blocks, buckets = a.blocks[engine], a.block_buckets[engine]
    for length in range(keys.size):
        if not _entry_of(keys[length] + shift, blocks, buckets):
            return length
    return keys.size


def _sent(s: Record, keys: Array, shift: int, blocks: Array, buckets: Array) -> None:
    """Record a prompt sent to an engine, like `PrefixHomes.sent`: its end is dropped before its beginning."""
    for i in range(keys.size - 1, -1, -1):
        entry = _entry_of(keys[i] + shift, blocks, buckets)
        if entry:
            _unlink(s, blocks, entry)
        else:
            entry = _new_entry(s, keys[i] + shift, blocks, buckets)
        blocks[entry].older, blocks[entry].newer = s.newest_block, 0
        if s.newest_block:
            blocks[s.newest_block].newer = entry
        else:
            s.oldest_block = entry
        s.newest_block = entry
    while s.blocks > s.blocks_max:
        entry = s.oldest_block
        _unlink(s, blocks, entry)
        _drop(s, entry, blocks, buckets)


def _bucket_of(key: int, buckets: Array) -> int:
    return (np.int64(key) * HASH_FACTOR >> 16) & (buckets.size - 1)


def _entry_of(key: int, blocks: Array, buckets: Array) -> int:
    """Return the entry of a block of an engine; 0: it has none."""
    entry = buckets[_bucket_of(key, buckets)]
    while entry and blocks[entry].key != key:
        entry = blocks[entry].following
    return entry


def _new_entry(s: Record, key: int, blocks: Array, buckets: Array) -> int:
    """Return a new entry, in the hash table and in no order yet."""
    if s.block_free:
        entry = s.block_free
        s.block_free = blocks[entry].following
    else:
        s.block_entries += 1
        entry = s.block_entries
    s.blocks += 1
    bucket = _bucket_of(key, buckets)
    blocks[entry].key, blocks[entry].following = key, buckets[bucket]
    buckets[bucket] = entry
    return entry


def _drop(s: Record, entry: int, blocks: Array, buckets: Array) -> None:
    """Remove an entry from the hash table."""
    bucket = _bucket_of(blocks[entry].key, buckets)
    other = buckets[bucket]
    if other == entry:
        buckets[bucket] = blocks[entry].following
    else:
        while blocks[other].following != entry:
            other = blocks[other].following
        blocks[other].following = blocks[entry].following
    blocks[entry].following = s.block_free
    s.block_free = entry
    s.blocks -= 1


def _unlink(s: Record, blocks: Array, entry: int) -> None:
    """Remove an entry from the order in which blocks are dropped."""
    older, newer = blocks[entry].older, blocks[entry].newer
    if older:
        blocks[older].newer = newer
    else:
        s.oldest_block = newer
    if newer:
        blocks[newer].older = older
    else:
        s.newest_block = older
