"""The kernel of the fast path: engines, their CPU lanes and devices, and a router, as numbers in arrays.

It repeats the decisions of the core and the work of host and cluster, for runs with only arrivals, chunks, decodes and
ends. `run/fast_runs.py` defines these runs, and `fast_path.py` drives the kernel. All state is numbers in arrays, so
`machine_code.py` can compile the kernel to code that takes a few microseconds instead of the core's hundreds. The
kernel adds no decisions of its own: tests compare each launch, message, gauge and end of random runs with those of the
core. In a situation that the kernel does not handle (LOST), the core simulates the run from the beginning.

Names are those of the core. A request is a row of `requests`, and its number is its id. Memory is counts of pages: no
two prompts share a prefix, so each request leaves a path in the radix cache that no other request uses. Paths are
evicted in the order of their last use, each from its end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = Any  # numba infers the types; the annotations are documentation only
Record = Any  # one row of an array, written through

NEVER_US = 2**62
NONE = -1
NO_LIMIT = 2**62
CLIP_MAX_NEW_TOKENS = 4096  # equal to the core's; a copy, because only changes of this file replace stored machine code

RATIO, ON_DEMAND, FULL = range(3)  # SchedConfig.reserve
PREFILL_FIRST, MIXED, RUNNING_FIRST = range(3)  # SchedConfig.batching
EXTEND, DECODE, BOTH = range(3)  # batch modes; BOTH is mixed
ARRIVAL, PLAN, RESULTS = range(3)  # kinds of work of the CPU lane
RUNNING_LIMIT, KV_BUDGET, PREFILL_BUDGET, PAGES = range(4)  # deferral reasons of the head of the waiting queue
IN_TURN, LEAST_REQUESTS, LEAST_TOKENS, LEAST_PROMPTS, BOUNDED, GIVEN = range(6)  # rules of a router
PRICED, FLUSH, ASKED, DONE, LOST, PAUSED = range(6)  # reasons for which `advance` and `_advance` return

ENGINE = np.dtype(
    [
        # settings
        ("page_size", np.int64),
        ("evict_ahead", np.int64),  # least pages per eviction
        ("radix_cache", np.int64),
        ("same_step_sharing", np.int64),
        ("reserve", np.int64),
        ("batching", np.int64),
        ("slots", np.int64),  # most batches in flight
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
        ("frontend_us", np.int64),  # time of a request from its client to the engine
        # the lane and the device
        ("now_us", np.int64),
        ("last_us", np.int64),  # time of the last event
        ("device_free_us", np.int64),
        ("nothing_new", np.int64),  # 1: no event since the last LaneReady that launched nothing
        # the engine
        ("sent", np.int64),  # the last request that the router sent here; requests arrive in the order of sending
        ("coming", np.int64),  # the first request that has not arrived here; `next` links to the one after it
        ("head", np.int64),  # the first waiting request
        ("waiting", np.int64),
        ("arrived", np.int64),
        ("ended", np.int64),
        ("active", np.int64),
        ("decoding", np.int64),  # requests of the running batch
        ("prefilling", np.int64),
        ("batch_is_full", np.int64),
        ("deferred", np.int64),  # the request that was deferred last
        ("deferred_reason", np.int64),  # its reason
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
        ("least_used", np.int64),  # request with the path that is evicted first; `newer` links to the next
        ("last_used", np.int64),
        # counts for the metrics
        ("evicted_by_admission", np.int64),
        ("evicted_by_decode", np.int64),
        ("deferred_running_limit", np.int64),
        ("deferred_kv_budget", np.int64),
        ("deferred_prefill_budget", np.int64),
        ("deferred_pages", np.int64),
        ("decodes_skipped", np.int64),
        # numbers of rows that wait for a flush
        ("launches", np.int64),
        ("gauges", np.int64),
        ("works", np.int64),
        ("messages", np.int64),
        ("gaps", np.int64),
        # counts of the router
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
        ("arrival_us", np.int64),  # at the router; `hop_us` later at its engine
        ("admitted_us", np.int64),
        ("first_us", np.int64),  # time of its first message; -1: none yet
        ("last_us", np.int64),  # time of its last message
        ("ended_us", np.int64),
        ("itl_us_max", np.int64),
        ("tick", np.int64),  # last use of its path in the radix cache
        ("open_tokens", np.int64),  # tokens by the count of the router
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),  # final number of output tokens
        ("outputs", np.int32),  # output tokens so far
        ("position", np.int32),  # next position; KV of all positions before it is launched
        ("cached_pages", np.int32),  # its pages in the radix cache, while it runs or after its end
        ("engine", np.int32),  # NONE: not sent yet; with GIVEN: the engine to which it will be sent
        ("next", np.int32),  # the request that was sent next to the same engine
        ("older", np.int32),  # among unreferenced paths in the radix cache: the path used just before its own
        ("newer", np.int32),  # the path used just after its own
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
        ("priced", np.int64),  # 1: the time of the newest batch in flight is known
        ("until_us", np.int64),  # engines do all work that is due before this time
        ("engine", np.int64),  # the engine that is advanced to `until_us`; engines before it are there
        ("next_request", np.int64),  # the next request to be routed
        ("until_question", np.int64),  # requests before the next return of ASKED; negative: never
        ("asks", np.int64),  # 1: `advance` returns ASKED when all engines are at `until_us`
        ("hop_us", np.int64),  # time from the router to an engine, and from an engine to the router
        # the router
        ("routes", np.int64),  # 1: there is a router
        ("routing_rule", np.int64),  # rule of the router, such as IN_TURN
        ("load_bound", np.float64),
        ("load_floor", np.int64),
        ("ended", np.int64),  # ends that have reached the router
        ("output_tokens", np.int64),  # output tokens of these ended requests
        ("first_guess", np.int64),  # tokens of an answer that the router expects at the start
        ("unseen", np.int64),  # ends that have not reached the router yet
    ],
    align=True,
)


class Arrays(NamedTuple):
    """The state of a run. The last six arrays have rows for the next flush; ENGINE has their numbers by engine."""

    run: Array  # RUN [1]
    engines: Array  # ENGINE [engines]
    requests: Array  # REQUEST [requests], by arrival
    running_batch: Array  # int64 [engines, rows]: requests that decode
    flights: Array  # FLIGHT [engines, slots]: batches in flight
    samplers: Array  # int64 [engines, slots, rows]: requests that get a token from each batch in flight
    parts: Array  # int64 [engines, slots, rows, 3]: request, start and stop of each chunk of each batch in flight
    unseen: Array  # int64 [ends, 2]: time at which an end reaches the router, and its request
    shape: Array  # SHAPE [1]: shape of the batch whose time is to be computed
    launches: Array  # int64 [engines, rows, len(BATCH_COLUMNS)]
    gauges: Array  # int64 [engines, rows, 5]
    works: Array  # int64 [engines, rows, 3]
    messages: Array  # int64 [engines, rows, 2]
    gap_requests: Array  # int64 [engines, rows]: request of each gap between two messages
    gaps: Array  # int64 [engines, rows]: length of each gap in us


def advance(a: Arrays, took_us: float) -> int:
    """Advance the run until the caller must act, or the run is done.

    Args:
        took_us: if the last call returned PRICED, the time of the batch in `shape`.
    Returns: PRICED: the time of a batch is needed; FLUSH: rows must be flushed; ASKED: the caller may end the run;
        LOST: only the core can simulate the run; DONE.
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
        if run.until_question == 0:  # the caller sets `until_question` for the next ASKED
            run.asks, run.until_question = 1, NONE
            run.until_us = now_us + run.hop_us  # requests that are sent later arrive later
        else:
            run.until_us = _next_us(a, run)


def _next_us(a: Arrays, run: Record) -> int:
    """Return the time at which the next request arrives at the router; NEVER_US if there is none."""
    return a.requests[run.next_request].arrival_us if run.next_request < a.requests.size else NEVER_US


# ----------------------------------------------------------------------------------------------------------- one engine


def _advance(a: Arrays, run: Record, engine: int) -> int:
    """Let one engine do all work that is due before `until_us`, like `EngineHost.run`."""
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
    """Return whether the arrays have room for the rows of one more event: a launch, its gauge, or its result."""
    return (
        s.gaps + a.running_batch.shape[1] <= a.gaps.shape[1]
        and s.works + 2 <= a.works.shape[1]
        and s.launches < a.launches.shape[1]
        and s.messages < a.messages.shape[1]
        and s.gauges < a.gauges.shape[1]
        and run.unseen + a.running_batch.shape[1] <= a.unseen.shape[0]
    )


def _arrive(a: Arrays, run: Record, s: Record, engine: int) -> None:
    """RequestArrived: the request joins the waiting queue."""
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
    """Account for `cost_us` of work of the CPU lane."""
    took_us = np.int64(np.rint(cost_us))
    if took_us > 0:
        work = works[s.works]
        work[0], work[1], work[2] = s.now_us, took_us, what
        s.works += 1
        s.now_us += took_us


def _hand_over(s: Record, flights: Array, took_us: float) -> None:
    """Hand the newest batch, which takes `took_us`, to the device."""
    flight = flights[(s.oldest + s.in_flight - 1) % flights.size]
    flight.started_us = max(s.device_free_us, flight.handed_over_us)
    flight.finished_us = flight.started_us + max(1, np.int64(np.rint(took_us)))
    s.device_free_us = flight.finished_us


# ------------------------------------------------------------------------------------------------------------- launches


def _launch(a: Arrays, run: Record, s: Record, engine: int) -> int:
    """LaneReady: plan a pass, prompts first, then decodes, like `Engine._plan_pass`.

    Returns: PRICED if a batch was launched, PAUSED if not, or LOST.
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
            return LOST  # a request would be retracted
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
    """Return the number of requests of the running batch whose next token needs a new page."""
    growing = 0
    for i in range(s.decoding):
        growing += not requests[running_batch[i]].position & (s.page_size - 1)
    return growing


def _extend(s: Record, requests: Array, running_batch: Array, parts: Array, growing: int) -> int:
    """Plan the next chunk of the split prompt, then waiting requests within the budgets.

    See `PrefillPlanner.plan_extend`.

    Args:
        growing: new pages of the next decode.
    Returns: the number of parts of the extend.
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
    """Count the deferral of the head of the waiting queue, once per request and reason.

    After a deferral for memory or for the running limit, no request is admitted until a running one ends.
    """
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
    """Allocate pages of a request up to `stop` and write its part of the extend, like `PrefillPlanner._extend_to`."""
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
    """Write the batch of the parts, with decodes in a mixed batch, like `PrefillPlanner._extend_batch`."""
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
    """Write a batch with one more token for the whole running batch, like `DecodePlanner.plan`."""
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
    """Advance the running batch by one position, like `DecodePlanner._advance`; requests at their last token leave.

    Returns: the sum of the positions before.
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
    """Return the tokens that are reserved for running requests, like `PrefillPlanner._reserved`."""
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
    """Return the tokens of the total budget that a candidate needs to start, like `PrefillBudget.wanted`."""
    if s.reserve == ON_DEMAND:
        return _ceil_to(new, s.page_size)
    if s.reserve == FULL:
        return _ceil_to(new + max(outputs - 1, 0), s.page_size)
    return new + s.page_size + min(outputs, CLIP_MAX_NEW_TOKENS)


def _has(s: Record, total: int, new: int, outputs: int) -> bool:
    wanted = _wanted(s, new, outputs)
    return wanted < total if s.reserve == RATIO else wanted <= total


def _chunk_tokens(s: Record, start: int, new: int, tokens: int, chunk: int, first: bool, may_split: bool) -> int:
    """Return how many of a prompt's new tokens the next extend computes, like `budget.chunk_tokens`."""
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
    """BatchFinished: deliver a token per sampler, end requests and publish prompts, like `Results.collect`."""
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
                unseen[0], unseen[1] = now_us + s.frontend_us + run.hop_us, number
                run.unseen += 1
    s.gaps = at
    _publish(s, a.requests, parts, flight.parts)
    if s.ended == s.arrived:
        s.ratio = s.ratio_initial
        s.decode_owed = 0
    _spend(s, a.works[engine], s.result_fixed_us + s.result_row_us * flight.rows, RESULTS)


# --------------------------------------------------------------------------------------------------------------- memory


def _publish(s: Record, requests: Array, parts: Array, count: int) -> None:
    """Add the computed pages of chunks to the radix cache, like `Memory.publish`."""
    for i in range(count if s.radix_cache else 0):
        request = requests[parts[i, 0]]
        pages = parts[i, 2] // s.page_size
        if request.ended_us < 0 and pages > request.cached_pages:
            s.tick += 1
            request.tick = s.tick
            request.cached_pages = pages


def _alloc(s: Record, requests: Array, pages: int) -> int:
    """Take pages from the pool; evict cached pages if too few are free. Return the number of evicted pages."""
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
    """Release an ended request: its full pages stay in the radix cache, the other pages are freed."""
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
    """Insert a path into the list of evictable paths, which is ordered by last use.

    The search begins at the newest path, because the place is nearly always near it.
    """
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
    """Return the engine for a request, like `Router._chosen` with all engines up and no shared prefixes."""
    engines = a.engines
    if run.routing_rule == GIVEN:
        return request.engine
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
    total, weights = 1, 0.0
    if run.routing_rule == BOUNDED:
        for engine in range(engines.size):
            total += engines[engine].open_requests
            weights += engines[engine].weight
    best, least, chosen = NONE, 0.0, 0
    for engine in range(engines.size):
        s = engines[engine]
        if run.routing_rule == BOUNDED:
            fair = np.int64(np.ceil(run.load_bound * total * s.weight / weights))
            if s.open_requests >= max(run.load_floor, fair):
                continue
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
