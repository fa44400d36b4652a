"""The kernel of the fast path: engines, their CPU lanes and devices, and a router, as numbers in arrays.

It repeats the decisions of the core and the work of host and cluster, for runs with nothing but arrivals, chunks,
decodes and ends: `run/fast_runs.py` defines which, `fast_path.py` drives the kernel. Everything is a number in an
array, so `machine_code.py` can compile it to code that takes a few microseconds where the core takes hundreds. The
kernel decides nothing that the core does not decide: tests compare each launch, message, gauge and end of random runs
with those of the core, and a situation that the kernel does not handle (LOST) is left to the core, from the beginning.

Names are those of the core. A request is a row of `requests`, and its number is its id. Memory is counts of pages,
since no two prompts begin alike: a request leaves one path in the radix cache that no other request uses, evicted from
its end, and all of it before any path that was used later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = Any  # numba infers the types; annotations are for the reader
Record = Any  # one row of an array, written through

NEVER_US = 2**62
NONE = -1
NO_LIMIT = 2**62
CLIP_MAX_NEW_TOKENS = 4096  # as `admission` has it; stored machine code is replaced after changes of this file only

RATIO, ON_DEMAND, FULL = range(3)  # SchedConfig.reserve
PREFILL_FIRST, MIXED, RUNNING_FIRST = range(3)  # SchedConfig.batching
EXTEND, DECODE, BOTH = range(3)  # a batch's mode
ARRIVAL, PLAN, RESULTS = range(3)  # what the CPU lane does
RUNNING_LIMIT, KV_BUDGET, PREFILL_BUDGET, PAGES = range(4)  # why the head of the waiting queue waits
IN_TURN, LEAST_REQUESTS, LEAST_TOKENS, LEAST_PROMPTS, BOUNDED, GIVEN = range(6)  # what a router goes by
PRICED, FLUSH, ASKED, DONE, LOST, PAUSED = range(6)  # why `advance` returns, and `_advance` of one engine

ENGINE = np.dtype(
    [
        # settings
        ("page_size", np.int64),
        ("evict_ahead", np.int64),  # pages that are evicted at once, at least
        ("radix_cache", np.int64),
        ("same_step_sharing", np.int64),
        ("reserve", np.int64),
        ("batching", np.int64),
        ("slots", np.int64),  # batches in flight at once
        ("max_running_requests", np.int64),
        ("prefill_max_requests", np.int64),
        ("prefill_decode_interval", np.int64),
        ("max_prefill_tokens", np.int64),
        ("chunked_prefill_size", np.int64),
        ("align", np.int64),
        ("unit", np.int64),
        ("ratio_initial", np.float64),
        ("ratio_floor", np.float64),
        ("ratio_decay", np.float64),
        ("plan_fixed_us", np.float64),
        ("plan_row_us", np.float64),
        ("result_fixed_us", np.float64),
        ("result_row_us", np.float64),
        ("arrival_us", np.float64),
        ("frontend_us", np.int64),  # from a client to the engine
        # the lane and the device
        ("now_us", np.int64),
        ("last_us", np.int64),  # of the last event
        ("device_free_us", np.int64),
        ("nothing_new", np.int64),  # since the last LaneReady that launched nothing
        # the engine
        ("sent", np.int64),  # the last one that the router sent here; they arrive in the order of sending
        ("coming", np.int64),  # the first of these that has not arrived; `next` leads on
        ("head", np.int64),  # the first that waits
        ("waiting", np.int64),
        ("arrived", np.int64),
        ("ended", np.int64),
        ("active", np.int64),
        ("decoding", np.int64),  # requests of the running batch
        ("prefilling", np.int64),
        ("batch_is_full", np.int64),
        ("deferred", np.int64),  # the request that was last deferred ...
        ("deferred_reason", np.int64),
        ("decode_owed", np.int64),
        ("decode_launches", np.int64),
        ("extended_at", np.int64),
        ("next_batch_id", np.int64),
        ("oldest", np.int64),  # slot of the batch in flight that ends first
        ("in_flight", np.int64),
        ("ratio", np.float64),
        # memory
        ("free_pages", np.int64),
        ("evictable_pages", np.int64),
        ("tick", np.int64),
        ("least_used", np.int64),  # request whose path in the radix cache is evicted first; `newer` leads on
        ("last_used", np.int64),
        # counts for the metrics
        ("evicted_by_admission", np.int64),
        ("evicted_by_decode", np.int64),
        ("deferred_running_limit", np.int64),
        ("deferred_kv_budget", np.int64),
        ("deferred_prefill_budget", np.int64),
        ("deferred_pages", np.int64),
        ("decodes_skipped", np.int64),
        # rows that wait to be measured
        ("launches", np.int64),
        ("gauges", np.int64),
        ("works", np.int64),
        ("messages", np.int64),
        ("gaps", np.int64),
        # as the router sees it
        ("weight", np.float64),
        ("credit", np.float64),
        ("open_requests", np.int64),
        ("open_tokens", np.int64),
        ("last_chosen", np.int64),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("arrival_us", np.int64),  # at the router; at its engine a hop later
        ("admitted_us", np.int64),
        ("first_us", np.int64),  # of its first message; -1: none yet
        ("last_us", np.int64),
        ("ended_us", np.int64),
        ("itl_us_max", np.int64),
        ("tick", np.int64),  # when its path in the radix cache was used last
        ("open_tokens", np.int64),  # as the router counts it
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),  # that it will have
        ("outputs", np.int32),  # that it has
        ("position", np.int32),  # the next one; KV in front of it is launched
        ("cached_pages", np.int32),  # of its row, or that it has left behind, in the radix cache
        ("engine", np.int32),  # NONE: not sent yet; GIVEN routers: where it must go
        ("next", np.int32),  # sent to the same engine behind it
        ("older", np.int32),  # of unreferenced paths in the radix cache: used just before it ...
        ("newer", np.int32),  # ... and just after it
    ],
    align=True,
)

FLIGHT = np.dtype(
    [
        ("batch_id", np.int64),
        ("mode", np.int64),
        ("launched_us", np.int64),
        ("started_us", np.int64),
        ("finished_us", np.int64),
        ("rows", np.int64),
        ("new_tokens", np.int64),
        ("prefill_tokens", np.int64),
        ("kv_tokens", np.int64),
        ("handed_over_us", np.int64),
        ("samplers", np.int64),
        ("parts", np.int64),
    ],
    align=True,
)

SHAPE = np.dtype(
    [
        ("extend_rows", np.int64),
        ("extend_tokens", np.int64),
        ("extend_context_tokens", np.int64),
        ("extend_pairs", np.int64),
        ("decode_rows", np.int64),
        ("decode_context_tokens", np.int64),
        ("sampled_rows", np.int64),
        ("batch_id", np.int64),
        ("engine", np.int64),
    ],
    align=True,
)

RUN = np.dtype(
    [
        ("priced", np.int64),  # whether the newest batch in flight has its time
        ("until_us", np.int64),  # engines do everything that is due before
        ("engine", np.int64),  # that is brought there; those before it are there
        ("next_request", np.int64),  # to be routed
        ("until_question", np.int64),  # requests before the next ASKED; negative: never
        ("asks", np.int64),  # ASKED, once all engines are at `until_us`
        ("hop_us", np.int64),  # from the router to an engine, and as long back
        # the router
        ("routes", np.int64),  # whether there is one
        ("goes_by", np.int64),
        ("load_bound", np.float64),
        ("load_floor", np.int64),
        ("ended", np.int64),
        ("output_tokens", np.int64),  # of these
        ("first_guess", np.int64),  # of the tokens of an answer
        ("unseen", np.int64),  # ends that are on their way to it
    ],
    align=True,
)


class Arrays(NamedTuple):
    """All there is. The last six are what is to be measured, as many rows of each engine as that says."""

    run: Array  # RUN [1]
    engines: Array  # ENGINE [engines]
    requests: Array  # REQUEST [requests], by arrival
    running_batch: Array  # int64 [engines, rows]: requests that decode
    flights: Array  # FLIGHT [engines, slots]: batches in flight
    samplers: Array  # int64 [engines, slots, rows]: requests that get a token of each
    parts: Array  # int64 [engines, slots, rows, 3]: request, start and stop of each chunk in it
    unseen: Array  # int64 [ends, 2]: when the router sees an end, and of which request
    shape: Array  # SHAPE [1]: of the batch that waits for its time
    launches: Array  # int64 [engines, rows, len(BATCH_COLUMNS)]
    gauges: Array  # int64 [engines, rows, 5]
    works: Array  # int64 [engines, rows, 3]
    messages: Array  # int64 [engines, rows, 2]
    gap_requests: Array  # int64 [engines, rows]: request of a gap between two messages ...
    gaps: Array  # int64 [engines, rows]: ... how long it was


def advance(a: Arrays, took_us: float) -> int:
    """Go on until a batch needs its time (then `took_us` of the next call is that), or nothing is left to do.

    Returns: PRICED; FLUSH: what is to be measured must be taken; ASKED: the caller may give up now; DONE;
        or LOST.
    """
    run = a.run[0]
    if not run.priced:
        engine = a.shape[0].engine
        _hand_over(a.engines[engine], a.flights[engine], took_us)
        run.priced = 1
    while True:
        while run.engine < a.engines.size:
            why = _advance(a, run, run.engine)
            if why != PAUSED:
                return why
            run.engine += 1
        if run.next_request == a.requests.size and run.until_us == NEVER_US:
            return DONE
        if run.asks:
            run.asks = 0
            run.until_us = _next_us(a, run)
            run.engine = 0
            return ASKED
        now_us = run.until_us
        _route_due(a, run)
        run.engine = 0
        if run.until_question == 0:  # the caller sets when the next one is
            run.asks, run.until_question = 1, NONE
            run.until_us = now_us + run.hop_us  # nothing that is sent from here on arrives before
        else:
            run.until_us = _next_us(a, run)


def _next_us(a: Arrays, run: Record) -> int:
    """When the next request comes to the router."""
    return a.requests[run.next_request].arrival_us if run.next_request < a.requests.size else NEVER_US


# ----------------------------------------------------------------------------------------------------------- one engine


def _advance(a: Arrays, run: Record, engine: int) -> int:
    """Let one engine do everything that is due before `until_us`: `EngineHost.run`."""
    s, flights, requests = a.engines[engine], a.flights[engine], a.requests
    while True:
        while s.now_us < run.until_us:
            if not _room_to_measure(a, run, s):
                return FLUSH
            if s.coming != NONE and requests[s.coming].arrival_us + run.hop_us <= s.now_us:
                _arrive(a, run, s, engine)
            elif s.in_flight and flights[s.oldest].finished_us <= s.now_us:
                _collect(a, run, s, engine)
            else:
                break
        if s.now_us >= run.until_us:
            return PAUSED
        if s.in_flight < s.slots and not s.nothing_new:
            s.last_us = s.now_us
            why = _launch(a, run, s, engine)
            if why != PAUSED:
                return why
            s.nothing_new = 1
        next_us = requests[s.coming].arrival_us + run.hop_us if s.coming != NONE else NEVER_US
        if s.in_flight and flights[s.oldest].finished_us < next_us:
            next_us = flights[s.oldest].finished_us
        if next_us >= run.until_us:
            return PAUSED
        s.now_us = max(s.now_us, next_us)


def _room_to_measure(a: Arrays, run: Record, s: Record) -> bool:
    """Whether one more event finds room: for a launch, its gauge and its result, and for all that come with it."""
    return (
        s.gaps + a.running_batch.shape[1] <= a.gaps.shape[1]
        and s.works + 2 <= a.works.shape[1]
        and s.launches < a.launches.shape[1]
        and s.messages < a.messages.shape[1]
        and s.gauges < a.gauges.shape[1]
        and run.unseen + a.running_batch.shape[1] <= a.unseen.shape[0]
    )


def _arrive(a: Arrays, run: Record, s: Record, engine: int) -> None:
    """RequestArrived: it waits."""
    number = s.coming
    request = a.requests[number]
    s.last_us = request.arrival_us + run.hop_us - s.frontend_us
    s.coming = request.next
    if not s.waiting:
        s.head = number
    s.waiting += 1
    s.arrived += 1
    s.nothing_new = 0
    _spend(s, a.works[engine], s.arrival_us, ARRIVAL)


def _spend(s: Record, works: Array, cost_us: float, what: int) -> None:
    """Keep the CPU lane busy."""
    took_us = np.int64(np.rint(cost_us))
    if took_us > 0:
        work = works[s.works]
        work[0], work[1], work[2] = s.now_us, took_us, what
        s.works += 1
        s.now_us += took_us


def _hand_over(s: Record, flights: Array, took_us: float) -> None:
    """Let the device run the newest batch, which takes so long."""
    flight = flights[(s.oldest + s.in_flight - 1) % flights.size]
    flight.started_us = max(s.device_free_us, flight.handed_over_us)
    flight.finished_us = flight.started_us + max(1, np.int64(np.rint(took_us)))
    s.device_free_us = flight.finished_us


# ------------------------------------------------------------------------------------------------------------- launches


def _launch(a: Arrays, run: Record, s: Record, engine: int) -> int:
    """LaneReady: prompts first, then decodes, see `Engine._plan_pass`.

    Returns: PRICED if there was anything to launch, PAUSED if not, or LOST.
    """
    slot = (s.oldest + s.in_flight) % a.flights.shape[1]
    running_batch, flight, shape = a.running_batch[engine], a.flights[engine, slot], a.shape[0]
    samplers, parts = a.samplers[engine, slot], a.parts[engine, slot]
    taken = 0
    growing = _growing(s, a.requests, running_batch)
    if not s.decoding or not (
        s.decode_owed
        or (s.batching == RUNNING_FIRST and growing > s.free_pages + s.evictable_pages)
        or s.decode_launches - s.extended_at < s.prefill_decode_interval
    ):
        taken = _extend(s, a.requests, running_batch, parts, growing)
    launches = taken > 0 or s.decoding > 0
    if taken:
        flight.parts = taken
        _extend_batch(s, a.requests, running_batch, flight, samplers, parts, shape, growing)
        if s.same_step_sharing:
            _publish(s, a.requests, parts, taken)
        s.extended_at = s.decode_launches
    elif s.decoding:
        if growing > s.free_pages + s.evictable_pages:
            return LOST  # a request is to be retracted
        _decode_batch(s, a.requests, running_batch, flight, samplers, shape, growing)
    else:
        s.decode_owed = 0
    gauge = a.gauges[engine, s.gauges]
    gauge[0], gauge[1], gauge[2] = s.now_us, s.waiting, s.active
    gauge[3], gauge[4] = s.free_pages, s.evictable_pages
    s.gauges += 1
    if not launches:
        return PAUSED
    flight.batch_id = s.next_batch_id
    flight.launched_us = s.now_us
    s.next_batch_id += 1
    s.in_flight += 1
    _spend(s, a.works[engine], s.plan_fixed_us + s.plan_row_us * flight.rows, PLAN)
    flight.handed_over_us = s.now_us
    shape.batch_id, shape.engine = flight.batch_id, engine
    run.priced = 0
    return PRICED


def _growing(s: Record, requests: Array, running_batch: Array) -> int:
    """Count requests of the running batch whose next token opens a page."""
    growing = 0
    for i in range(s.decoding):
        growing += not requests[running_batch[i]].position & (s.page_size - 1)
    return growing


def _extend(s: Record, requests: Array, running_batch: Array, parts: Array, growing: int) -> int:
    """The next chunk of the split prompt, then arrivals, as far as the budgets go: `Engine._plan_extend`.

    Args:
        growing: pages that decodes open next.
    Returns: parts of the extend.
    """
    admitting = s.waiting > 0 and not s.batch_is_full
    if s.prefilling == NONE and not admitting:
        return 0
    page_size = s.page_size
    current = (s.free_pages + s.evictable_pages) * page_size
    total = current - (_reserved(s, requests, running_batch) if s.waiting and s.active else 0)
    tokens, chunk = s.max_prefill_tokens, s.chunked_prefill_size
    set_aside = 0
    if s.batching != PREFILL_FIRST and s.decoding:
        if s.reserve == RATIO:
            total -= s.decoding
            current -= s.decoding
        tokens = max(tokens - s.decoding, page_size)
        if chunk != NO_LIMIT:
            chunk = max(chunk - s.decoding, page_size)
        if s.batching == RUNNING_FIRST:
            set_aside = growing
    taken = 0
    if s.prefilling != NONE:
        number = s.prefilling
        request = requests[number]
        start, new = request.position, request.prompt_tokens - request.position
        take = _chunk_tokens(s, start, new, tokens, chunk, True, True)
        room = (s.free_pages + s.evictable_pages - set_aside) * page_size + -start % page_size
        if take > room:
            take = _aligned(start, room, s.align)
        if take > 0:
            _extend_to(s, requests, number, start + take, parts[0])
            taken = 1
            pages = _ceil_to(take, page_size)
            if s.reserve != FULL:
                total -= pages
            if s.prefilling == NONE and s.reserve == RATIO:
                total -= page_size + min(request.output_tokens, CLIP_MAX_NEW_TOKENS)
            current -= pages
            tokens -= _ceil_to(take, s.unit)
            chunk -= _ceil_to(take, s.unit)
        else:
            admitting = False
    while admitting and s.waiting:
        number = s.head
        request = requests[number]
        new = request.prompt_tokens
        take = 0
        if s.active >= s.max_running_requests:
            reason = RUNNING_LIMIT
        elif taken >= s.prefill_max_requests:
            reason = PREFILL_BUDGET
        elif total <= 0 or current <= 0:
            reason = KV_BUDGET
        elif tokens <= 0 or chunk <= 0:
            reason = PREFILL_BUDGET
        elif s.active and not _has(s, total, new, request.output_tokens):
            reason = KV_BUDGET
        else:
            take = _chunk_tokens(s, 0, new, tokens, chunk, not taken, s.prefilling == NONE)
            reason = PREFILL_BUDGET
            if take > 0 and -(-take // page_size) > s.free_pages + s.evictable_pages - set_aside:
                take, reason = 0, PAGES
        if take <= 0:
            _defer(s, number, reason)
            break
        s.head = request.next
        s.waiting -= 1
        s.active += 1
        if s.deferred == number:
            s.deferred = NONE
        request.admitted_us = s.now_us
        pages = _ceil_to(take, page_size)
        if s.reserve == FULL:
            total -= _wanted(s, new, request.output_tokens)
        else:
            total -= pages
        if take == new and s.reserve == RATIO:
            total -= page_size + min(request.output_tokens, CLIP_MAX_NEW_TOKENS)
        current -= pages
        tokens -= _ceil_to(take, s.unit)
        chunk -= _ceil_to(take, s.unit)
        _extend_to(s, requests, number, take, parts[taken])
        taken += 1
    return taken


def _defer(s: Record, number: int, reason: int) -> None:
    """Count why the head of the waiting queue waits, once; if it is memory, until the next request leaves."""
    if reason in (KV_BUDGET, RUNNING_LIMIT) and s.active:
        s.batch_is_full = 1
    if s.deferred == number and s.deferred_reason == reason:
        return
    s.deferred, s.deferred_reason = number, reason
    if reason == RUNNING_LIMIT:
        s.deferred_running_limit += 1
    elif reason == KV_BUDGET:
        s.deferred_kv_budget += 1
    elif reason == PREFILL_BUDGET:
        s.deferred_prefill_budget += 1
    else:
        s.deferred_pages += 1


def _extend_to(s: Record, requests: Array, number: int, stop: int, part: Array) -> None:
    """Give the request pages up to `stop` and make that its part of the extend: `Engine._extend_to`."""
    request = requests[number]
    pages = -(-stop // s.page_size) - -(-request.position // s.page_size)
    s.evicted_by_admission += _alloc(s, requests, pages)
    part[0], part[1], part[2] = number, request.position, stop
    request.position = stop
    if stop < request.prompt_tokens:
        s.prefilling = number
    elif s.prefilling == number:
        s.prefilling = NONE


def _extend_batch(
    s: Record,
    requests: Array,
    running_batch: Array,
    flight: Record,
    samplers: Array,
    parts: Array,
    shape: Record,
    growing: int,
) -> None:
    """Launch the parts, and decodes with them where they are mixed: `Engine._extend_batch`."""
    tokens = context_tokens = pairs = sampling = 0
    for i in range(flight.parts):
        number, start, stop = parts[i, 0], parts[i, 1], parts[i, 2]
        new = stop - start
        tokens += new
        context_tokens += start
        pairs += new * start + new * (new + 1) // 2
        if stop == requests[number].prompt_tokens:
            samplers[sampling] = number
            sampling += 1
    along = decoded_tokens = 0
    if s.batching != PREFILL_FIRST and s.decoding:
        if growing > s.free_pages + s.evictable_pages:
            s.decode_owed = 1
            s.decodes_skipped += 1
        else:
            along = s.decoding
            decoded_tokens = _move_on(s, requests, running_batch, samplers[sampling:], growing)
    for i in range(sampling):  # a request at the end of its prompt decodes next
        if requests[samplers[i]].output_tokens > 1:
            running_batch[s.decoding] = samplers[i]
            s.decoding += 1
    flight.mode = BOTH if along else EXTEND
    flight.rows = flight.parts + along
    flight.samplers = sampling + along
    flight.new_tokens = tokens + along
    flight.prefill_tokens = tokens
    flight.kv_tokens = context_tokens + tokens + decoded_tokens + along
    shape.extend_rows = flight.parts
    shape.extend_tokens = tokens
    shape.extend_context_tokens = context_tokens
    shape.extend_pairs = pairs
    shape.decode_rows = along
    shape.decode_context_tokens = decoded_tokens
    shape.sampled_rows = sampling + along


def _decode_batch(
    s: Record, requests: Array, running_batch: Array, flight: Record, samplers: Array, shape: Record, growing: int
) -> None:
    """Plan one more token for the whole running batch: `Engine._plan_decode`."""
    rows = s.decoding
    context_tokens = _move_on(s, requests, running_batch, samplers, growing)
    s.decode_owed = 0
    s.ratio = max(s.ratio - s.ratio_decay, s.ratio_floor)
    flight.mode = DECODE
    flight.rows = flight.samplers = flight.new_tokens = rows
    flight.parts = flight.prefill_tokens = 0
    flight.kv_tokens = context_tokens + rows
    shape.extend_rows = shape.extend_tokens = shape.extend_context_tokens = shape.extend_pairs = 0
    shape.decode_rows = shape.sampled_rows = rows
    shape.decode_context_tokens = context_tokens


def _move_on(s: Record, requests: Array, running_batch: Array, samplers: Array, growing: int) -> int:
    """Advance the running batch by one position: `Engine._advance`. Requests that end with that leave it.

    Returns: the sum of the positions where it stood.
    """
    if growing:
        s.evicted_by_decode += _alloc(s, requests, growing)
    context_tokens = staying = 0
    for i in range(s.decoding):
        number = running_batch[i]
        request = requests[number]
        samplers[i] = number
        context_tokens += request.position
        request.position += 1
        if request.position + 1 < request.prompt_tokens + request.output_tokens:
            running_batch[staying] = number
            staying += 1
    s.decoding = staying
    s.decode_launches += 1
    return context_tokens


# ------------------------------------------------------------------------------------------------------------ admission


def _reserved(s: Record, requests: Array, running_batch: Array) -> int:
    """Tokens that are not for newcomers: `Engine._reserved`."""
    page_size, reserved = s.page_size, 0
    for i in range(s.decoding):
        request = requests[running_batch[i]]
        limit = request.prompt_tokens + request.output_tokens
        if s.reserve == RATIO:
            reserved += min(limit - request.position - 1, CLIP_MAX_NEW_TOKENS)
        elif s.reserve == FULL:
            reserved += -(-(limit - 1) // page_size) - -(-request.position // page_size)
        else:
            reserved += not request.position & (page_size - 1)
    if s.reserve == RATIO:
        return int(reserved * s.ratio)
    if s.reserve == FULL and s.prefilling != NONE:
        split = requests[s.prefilling]
        reach = max(split.prompt_tokens + split.output_tokens - 1, split.prompt_tokens)
        reserved += -(-reach // page_size) - -(-split.position // page_size)
    return reserved * page_size


def _wanted(s: Record, new: int, outputs: int) -> int:
    """Tokens of the total budget that a candidate needs to start: `PrefillBudget.wanted`."""
    if s.reserve == ON_DEMAND:
        return _ceil_to(new, s.page_size)
    if s.reserve == FULL:
        return _ceil_to(new + max(outputs - 1, 0), s.page_size)
    return new + s.page_size + min(outputs, CLIP_MAX_NEW_TOKENS)


def _has(s: Record, total: int, new: int, outputs: int) -> bool:
    wanted = _wanted(s, new, outputs)
    return wanted < total if s.reserve == RATIO else wanted <= total


def _chunk_tokens(s: Record, start: int, new: int, tokens: int, chunk: int, first: bool, may_split: bool) -> int:
    """How many of a prompt's new tokens the next extend takes: `admission.chunk_tokens`."""
    whole = _ceil_to(new, s.unit)
    if s.chunked_prefill_size == NO_LIMIT:
        return new if first or whole <= tokens else 0
    limit = min(chunk, tokens)
    if whole <= limit:
        return new
    return _aligned(start, limit, s.align) if may_split and limit > 0 else 0


def _aligned(start: int, limit: int, align: int) -> int:
    return max((start + limit) // align * align - start, 0)


def _ceil_to(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


# -------------------------------------------------------------------------------------------------------------- results


def _collect(a: Arrays, run: Record, s: Record, engine: int) -> None:
    """BatchFinished: a token for each sampler, ends, and prompts that others may use: `Engine._collect`."""
    now_us = s.last_us = s.now_us
    flight = a.flights[engine, s.oldest]
    samplers, parts = a.samplers[engine, s.oldest], a.parts[engine, s.oldest]
    launch = a.launches[engine, s.launches]
    launch[0], launch[1], launch[2] = flight.batch_id, flight.mode, flight.launched_us
    launch[3], launch[4] = flight.started_us, flight.finished_us
    launch[5], launch[6] = flight.rows, flight.new_tokens
    launch[7], launch[8] = flight.prefill_tokens, flight.kv_tokens
    s.launches += 1
    s.in_flight -= 1
    s.oldest = (s.oldest + 1) % a.flights.shape[1]
    s.nothing_new = 0
    if flight.samplers:
        message = a.messages[engine, s.messages]
        message[0], message[1] = now_us, flight.samplers
        s.messages += 1
    at, gap_requests, gaps = s.gaps, a.gap_requests[engine], a.gaps[engine]
    for i in range(flight.samplers):
        number = samplers[i]
        request = a.requests[number]
        if request.outputs:
            gap_us = now_us - request.last_us
            gap_requests[at] = number
            gaps[at] = gap_us
            at += 1
            request.itl_us_max = max(request.itl_us_max, gap_us)
        else:
            request.first_us = now_us
        request.last_us = now_us
        request.outputs += 1
        if request.outputs == request.output_tokens:
            request.ended_us = now_us
            s.ended += 1
            s.active -= 1
            s.batch_is_full = 0
            _release(s, a.requests, number)
            if run.routes:
                unseen = a.unseen[run.unseen]
                unseen[0], unseen[1] = now_us + run.hop_us, number
                run.unseen += 1
    s.gaps = at
    _publish(s, a.requests, parts, flight.parts)
    if s.ended == s.arrived:
        s.ratio = s.ratio_initial
        s.decode_owed = 0
    _spend(s, a.works[engine], s.result_fixed_us + s.result_row_us * flight.rows, RESULTS)


# --------------------------------------------------------------------------------------------------------------- memory


def _publish(s: Record, requests: Array, parts: Array, count: int) -> None:
    """What chunks have computed is the radix cache's from now on: `Memory.publish`."""
    for i in range(count if s.radix_cache else 0):
        request = requests[parts[i, 0]]
        pages = parts[i, 2] // s.page_size
        if request.ended_us < 0 and pages > request.cached_pages:
            s.tick += 1
            request.tick = s.tick
            request.cached_pages = pages


def _alloc(s: Record, requests: Array, pages: int) -> int:
    """Take pages, evicting what the free list lacks. Returns how many were evicted."""
    evicted = 0
    missing = pages - s.free_pages
    if missing > 0:
        evicted = short = min(max(missing, s.evict_ahead), s.evictable_pages)
        while short:
            request = requests[s.least_used]
            if request.cached_pages > short:
                request.cached_pages -= short
                short = 0
            else:
                short -= request.cached_pages
                s.least_used = request.newer
        if s.least_used == NONE:
            s.last_used = NONE
        else:
            requests[s.least_used].older = NONE
        s.evictable_pages -= evicted
        s.free_pages += evicted
    s.free_pages -= pages
    return evicted


def _release(s: Record, requests: Array, number: int) -> None:
    """A request has ended: its whole pages stay in the radix cache, the others go back to the pool."""
    request = requests[number]
    held = -(-request.position // s.page_size)
    kept = 0
    if s.radix_cache:
        kept = request.position // s.page_size
        if kept > request.cached_pages:
            s.tick += 1
            request.tick = s.tick
        request.cached_pages = kept
        s.evictable_pages += kept
        if kept:
            _file(s, requests, number)
    s.free_pages += held - kept


def _file(s: Record, requests: Array, number: int) -> None:
    """One more path that may be evicted, among the others by when it was used: nearly always near the last."""
    request = requests[number]
    before = s.last_used
    while before != NONE and requests[before].tick > request.tick:
        before = requests[before].older
    after = s.least_used if before == NONE else requests[before].newer
    request.older, request.newer = before, after
    if before == NONE:
        s.least_used = number
    else:
        requests[before].newer = number
    if after == NONE:
        s.last_used = number
    else:
        requests[after].older = number


# ----------------------------------------------------------------------------------------------------------- the router


def _route_due(a: Arrays, run: Record) -> None:
    """Step the router with the ends that reach it before this moment, and send the arrivals of it: `Cluster.run`."""
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
            run.output_tokens += request.output_tokens
        else:
            a.unseen[left, 0], a.unseen[left, 1] = seen_us, number
            left += 1
    run.unseen = left
    while run.next_request < a.requests.size and a.requests[run.next_request].arrival_us == now_us:
        number = run.next_request
        request = a.requests[number]
        expected = (run.output_tokens + run.first_guess) // (run.ended + 1)
        request.open_tokens = request.prompt_tokens + expected
        engine = _engine_for(a, run, request)
        s = a.engines[engine]
        s.open_requests += 1
        s.open_tokens += request.open_tokens
        s.last_chosen = number
        request.engine = engine
        request.next = NONE
        if s.coming == NONE:
            s.coming = number
        if s.sent != NONE:
            a.requests[s.sent].next = number
        s.sent = number
        run.next_request += 1
        if run.until_question > 0:
            run.until_question -= 1


def _engine_for(a: Arrays, run: Record, request: Record) -> int:
    """Where a request goes: `Router._chosen`, of engines that are all up, with nothing sent before that it shares."""
    engines = a.engines
    if run.goes_by == GIVEN:
        return request.engine
    if run.goes_by == IN_TURN:
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
    total, weights = 1, 0.0
    if run.goes_by == BOUNDED:
        for engine in range(engines.size):
            total += engines[engine].open_requests
            weights += engines[engine].weight
    best, least, chosen = NONE, 0.0, 0
    for engine in range(engines.size):
        s = engines[engine]
        if run.goes_by == BOUNDED:
            fair = np.int64(np.ceil(run.load_bound * total * s.weight / weights))
            if s.open_requests >= max(run.load_floor, fair):
                continue
        if run.goes_by == LEAST_TOKENS:
            load = s.open_tokens + request.open_tokens
        elif run.goes_by == LEAST_PROMPTS:
            load = s.open_tokens + request.prompt_tokens
        else:
            load = s.open_requests + 1
        share = load / s.weight
        if best == NONE or share < least or (share == least and s.last_chosen < chosen):
            best, least, chosen = engine, share, s.last_chosen
    return best
