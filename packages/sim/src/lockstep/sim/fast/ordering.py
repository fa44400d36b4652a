"""The order in which waiting requests are considered for admission on the fast path, like `core/scheduler/ordering.py`.

A pass begins with `begin_pass`. `next_in_pass` returns one request after the other, `admitted` notes that the last one
was admitted, `waits` that it was not, and `close_pass` ends the pass. An admitted request stays in the linked queue
until bypasses are counted, so that requests ahead of it count it.

Urgent requests are considered first, in the order of the queue; then the others by `rank`, the least first and equal
ones in the order of the queue; then duplicates, in the order of the queue. If all ranks are equal and there are no
duplicates, a cursor moves along the queue and no request is looked at twice.

Two programs decide the order. What they have in common are the functions of `core/requests/rules.py`: how a response
ratio is computed, which requests may be duplicates, what one of them waits for, which may be bypassed again. The core
keeps its queue in Python lists, orders columns of it by stable sorts, and compares tokens; here a linked list is
searched for the least rank, and one token identifies a prefix. One program for both would make the core several times
slower (docs/decisions/0111). That the two are equal is tested, not constructed: by random runs over every policy,
de-duplication and limit (`tests/sim/test_fast_path.py`, `make fast-path-campaign`), and by mutants of each line here
(`make kernel-mutants`).
"""

from __future__ import annotations

from lockstep.core.requests.rules import (
    DUPLICATE_SHARED_TOKENS_MIN,
    NO_LIMIT,
    are_few,
    awaited_pages,
    may_be_duplicate,
    may_bypass,
    response_ratio,
)
from lockstep.sim.fast.memory import Cache, match, token_at
from lockstep.sim.fast.state import (
    DEFERS,
    FEWEST_UNCACHED,
    LAST,
    LONGEST_CACHED,
    LONGEST_OUTPUT,
    NONE,
    RESPONSE_RATIO,
    SHUFFLED,
    Array,
    Record,
)


def joins(s: Record, c: Cache, number: int, shuffled: Array) -> None:
    """Prepare a request that joins the waiting queue for the passes over it."""
    request = c.requests[number]
    request.bypassed = request.turn = 0
    if s.policy == LONGEST_OUTPUT:
        request.rank = -request.output_tokens
    elif s.policy == SHUFFLED:
        request.rank = shuffled[request.id]
    else:
        request.rank = 0.0
    s.urgent += not may_bypass(0, s.bypass_limit)


# mechanism: order-of-the-queue (simulated)
def begin_pass(s: Record, c: Cache, scratch: Array) -> None:
    """Begin a pass: rank the waiting requests, unless their ranks are constant."""
    few = are_few(s.waiting)
    s.by_rank = s.policy == LONGEST_OUTPUT or s.policy == SHUFFLED
    s.pass_number += 1
    s.cursor = NONE
    s.split_before = s.prefilling
    s.considered = s.admitted = s.waits_for_prefix = 0
    s.admissions_left = NO_LIMIT
    if s.policy == FEWEST_UNCACHED or (few and (s.policy == LONGEST_CACHED or s.policy == RESPONSE_RATIO)):
        s.by_rank = 1
        number = s.head
        while number != NONE:
            request = c.requests[number]
            _, pages, _ = match(s, c, number)
            lacking = request.prompt_tokens + request.kept - pages * s.page_size
            if s.policy == LONGEST_CACHED:
                request.rank = -pages
            elif s.policy == RESPONSE_RATIO:
                request.rank = -response_ratio(s.prefilled_tokens - request.prefilled_before, lacking)
            else:
                request.rank = lacking
            number = request.behind
    if s.deduplication == LAST and few:
        _duplicates_last(s, c, scratch)


def _duplicates_last(s: Record, c: Cache, scratch: Array) -> None:
    """Move requests with the prefix of an earlier request behind all others, like `Ordering._duplicates_last`."""
    number, prefixes = s.head, 0
    while number != NONE:
        request = c.requests[number]
        _, pages, _ = match(s, c, number)
        if may_be_duplicate(request.prompt_tokens + request.kept, pages * s.page_size):
            token, known = token_at(c, number, DUPLICATE_SHARED_TOKENS_MIN - 1), 0
            while known < prefixes and scratch[known] != token:
                known += 1
            if known == prefixes:
                scratch[prefixes] = token
                prefixes += 1
            else:
                request.duplicate_in = s.pass_number
                s.by_rank = 1
        number = request.behind


def next_in_pass(s: Record, c: Cache) -> int:
    """Return the request that is considered next; NONE: none is left."""
    requests = c.requests
    best = NONE
    if s.urgent:
        number = s.head
        while number != NONE and (requests[number].turn or may_bypass(requests[number].bypassed, s.bypass_limit)):
            number = requests[number].behind
        best = number
    if best == NONE and s.by_rank:
        number = s.head
        while number != NONE:
            if not requests[number].turn and (best == NONE or _goes_before(s, requests[number], requests[best])):
                best = number
            number = requests[number].behind
    elif best == NONE:
        best = s.head if s.cursor == NONE else requests[s.cursor].behind
        while best != NONE and requests[best].turn:
            best = requests[best].behind
        s.cursor = s.cursor if best == NONE else best
    if best != NONE:
        requests[best].turn = 1
        s.considered += 1
    return best


# mechanism: bypass-limit (simulated)
def _goes_before(s: Record, request: Record, earlier: Record) -> bool:
    """Return whether a request is considered before one that is earlier in the queue."""
    if request.duplicate_in == s.pass_number:
        return False
    return earlier.duplicate_in == s.pass_number or request.rank < earlier.rank


def admitted(s: Record, c: Cache, number: int) -> None:
    """Note that the request considered last was admitted. Bypasses are counted once a request may become urgent."""
    request = c.requests[number]
    s.urgent -= not may_bypass(request.bypassed, s.bypass_limit)
    request.bypassed, request.turn = 0, 2
    if s.bypass_limit == NO_LIMIT:
        s.admitted += 1
        return
    if not s.admitted:
        s.admissions_left = NO_LIMIT
        other = s.head
        while other != NONE:
            if may_bypass(c.requests[other].bypassed, s.bypass_limit):
                s.admissions_left = min(s.admissions_left, s.bypass_limit - c.requests[other].bypassed)
            other = c.requests[other].behind
    s.admitted += 1
    if s.admitted == s.admissions_left:
        _count_bypasses(s, c)
        number = s.head
        while s.urgent and number != NONE:  # an urgent request is considered again
            request = c.requests[number]
            if request.turn and not may_bypass(request.bypassed, s.bypass_limit):
                request.turn = 0
                s.considered -= 1
            number = request.behind


def _count_bypasses(s: Record, c: Cache) -> None:
    """Remove admitted requests from the queue; requests ahead of one of them were bypassed, like `Ordering._count`."""
    left, number, before = s.admitted, s.head, NONE
    while left:
        request = c.requests[number]
        behind = request.behind
        if request.turn == 2:
            left -= 1
            request.turn = 0
            s.considered -= 1
            if s.cursor == number:
                s.cursor = before
            if before == NONE:
                s.head = behind
            else:
                c.requests[before].behind = behind
            if behind == NONE:
                s.tail = before
            s.waiting -= 1
        else:
            urgent = not may_bypass(request.bypassed, s.bypass_limit)
            request.bypassed += left
            s.urgent += not may_bypass(request.bypassed, s.bypass_limit) and not urgent
            before = number
        number = behind
    s.admitted = 0


def close_pass(s: Record, c: Cache) -> None:
    """End the pass, like `Ordering.close`: admitted requests leave the queue, and bypassed ones count them."""
    _count_bypasses(s, c)
    number = s.head
    while s.considered:
        if c.requests[number].turn:
            c.requests[number].turn = 0
            s.considered -= 1
        number = c.requests[number].behind
    if s.waits_for_prefix:
        s.batch_is_full = 0


# mechanism: de-duplication (simulated)
def writer_of_prefix(s: Record, c: Cache, number: int, pages: int, admitted_parts: Array) -> int:
    """Return the request that computes the pages that one needs next, like `Ordering.writer_of_prefix`.

    Args:
        pages: pages of its cached prefix.
        admitted_parts: chunks of the requests that were admitted in this pass.
    Returns: NONE if there is none, or if the request must not be bypassed again.
    """
    request = c.requests[number]
    if s.deduplication != DEFERS or not may_bypass(request.bypassed, s.bypass_limit):
        return NONE
    stop = awaited_pages(pages, s.page_size) * s.page_size
    if stop > request.prompt_tokens + request.kept - 1:
        return NONE  # it could not use all of them: its last token is always computed
    token = token_at(c, number, stop - 1)
    if s.split_before != NONE and _has(c, s.split_before, stop, token):
        return s.split_before
    for i in range(s.in_flight):
        slot = (s.oldest + i) % c.flights.size
        for j in range(c.flights[slot].parts):
            writer = c.parts[slot, j, 0]
            if writer != NONE and _has(c, writer, stop, token):
                return writer
    for j in range(admitted_parts.shape[0]):
        if _has(c, admitted_parts[j, 0], stop, token):
            return admitted_parts[j, 0]
    return NONE


def _has(c: Cache, number: int, stop: int, token: int) -> bool:
    """Return whether a request has at least `stop` tokens, the last of them `token`: the same prefix up to there."""
    request = c.requests[number]
    return stop <= request.prompt_tokens + request.kept and token_at(c, number, stop - 1) == token
