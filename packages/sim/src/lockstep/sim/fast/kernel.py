"""The kernel of the fast path: engines, their CPU lanes and devices, and a router, as numbers in arrays.

It repeats the decisions of the core and the work of host and cluster, for runs with only arrivals, rejections of long
prompts, chunks, decodes, retractions and ends. `run/fast_runs.py` defines these runs, and `fast_path.py` drives the
kernel. All state is numbers in arrays, so `machine_code.py` can compile the kernel to code that takes a few
microseconds instead of the core's hundreds. The kernel adds no decisions of its own: tests compare each launch,
message, gauge and end of random runs with those of the core. In a situation that the kernel does not handle (LOST), the
core simulates the run from the beginning.

Arithmetic decisions are functions of the core (`core/requests/rules.py`), compiled with the kernel. `state.py` has the
arrays, `memory.py` the pages and the prefix tree, `following.py` requests that follow answers, `stretches.py` decodes
of the same requests, `routing.py` the router, `lines.py` the times of most batches.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.requests.rules import (
    CONTINUE,
    FULL,
    NO_LIMIT,
    NO_TOKENS,
    PREFILL_FIRST,
    RATIO,
    RUNNING_FIRST,
    beside_decodes,
    ceil_to,
    charged_total,
    chunk_by_load,
    chunk_tokens,
    clipped_output,
    covers,
    decode_goes_first,
    decodes_before_end,
    ends_by_length,
    length_key,
    next_chunk,
    opens_page,
    pages_between,
    ratio_after_decode,
    ratio_after_retraction,
    reserved_by_ratio,
    shortened,
    verdict,
    wanted,
)
from lockstep.sim.fast.following import answered, begin_session, look_ahead, next_us, take
from lockstep.sim.fast.memory import (
    Cache,
    alloc,
    cache_of,
    leave,
    match,
    publish,
    refresh,
    release_deferred,
    returning_pages,
    take_match,
)
from lockstep.sim.fast.ordering import admitted, begin_pass, close_pass, joins, next_in_pass, writer_of_prefix
from lockstep.sim.fast.routing import route_due
from lockstep.sim.fast.state import (
    ARRIVAL,
    ASKED,
    BOTH,
    DECODE,
    DONE,
    EXTEND,
    FLUSH,
    KV_BUDGET,
    LAUNCHED,
    LINE_ERROR_US,
    LOST,
    NEVER_US,
    NONE,
    PAGES,
    PAUSED,
    PLAN,
    PREFILL_BUDGET,
    PRICED,
    RESULTS,
    ROWS,
    RUNNING_LIMIT,
    SETTLED,
    Array,
    Arrays,
    Record,
)
from lockstep.sim.fast.stretches import begin_stretch, end_stretch

NO_ROOM_EVER = -1
STRETCH_MIN = 3  # decodes for which a stretch pays


def advance(a: Arrays, took_us: float) -> int:
    """Advance the run until the caller must act, or the run is done.

    Args:
        took_us: if the last call returned PRICED, the time of the batch in `shape`.
    Returns: PRICED: the time of a batch is needed; FLUSH: rows must be flushed; ASKED: the caller may end the run;
        LOST: only the core can simulate the run; DONE; SETTLED, if the caller has set `settles`.
    """
    run = a.run[0]
    if run.settles:
        run.settles = 0
        for engine in range(a.engines.size):
            end_stretch(a, a.engines[engine], engine)
        return SETTLED
    if not run.priced:
        engine = a.shape[0].engine
        _hand_over(a.engines[engine], a.flights[engine], took_us)
        run.priced = 1
    while True:
        while run.engine < a.engines.size:
            if a.due_us[run.engine] < run.until_us:
                why = _advance(a, run, run.engine)
                if why != PAUSED:
                    return why
            run.engine += 1
        arrives_us = _next_us(a, run)
        if arrives_us == NEVER_US and run.until_us == NEVER_US:
            return DONE
        if run.asks:
            run.asks = 0
            run.until_us = _sure_us(a, run)
            run.engine = 0
            return ASKED
        if run.until_us < arrives_us:  # an answer that ends before then may be followed by another request
            run.until_us = _sure_us(a, run)
            run.engine = 0
            continue
        now_us = run.until_us
        route_due(a, run)
        if not run.sees_ends:
            ahead = run.ahead
            while ahead > 0 and run.until_question != 0 and run.next_request < a.requests.size:
                ahead -= 1
                now_us = run.until_us = _next_us(a, run)
                route_due(a, run)
        run.engine = 0
        if run.until_question == 0:  # the caller sets `until_question` for the next ASKED
            run.asks, run.until_question = 1, NONE
            run.until_us = now_us + run.hop_us  # requests that are sent later arrive later
        else:
            run.until_us = _sure_us(a, run)


def _next_us(a: Arrays, run: Record) -> int:
    """Return the time at which the next known request arrives at the router; NEVER_US if there is none."""
    if run.loops and run.routes:
        return next_us(a, run)
    return a.requests[run.next_request].arrival_us if run.next_request < a.requests.size else NEVER_US


def _sure_us(a: Arrays, run: Record) -> int:
    """Return the time up to which engines cannot affect each other: of the next request, or of one that may follow.

    One engine alone stops by itself where a request follows, see `look_ahead`.
    """
    until_us = _next_us(a, run)
    if run.loops and a.engines.size > 1:
        for engine in range(a.engines.size):
            until_us = min(until_us, a.due_us[engine] + run.lookahead_us)
    return until_us


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
            a.due_us[engine] = s.now_us
            return PAUSED
        if s.in_flight < s.slots and not s.nothing_new:
            s.last_us = s.now_us
            why = _launch(a, run, s, engine)
            if why == LAUNCHED:
                continue
            if why != PAUSED:
                return why
            s.nothing_new = 1
        next_us = requests[s.coming].arrival_us + run.hop_us if s.coming != NONE else NEVER_US
        if s.in_flight and flights[s.oldest].finished_us < next_us:
            next_us = flights[s.oldest].finished_us
        if next_us >= run.until_us:
            a.due_us[engine] = next_us
            return PAUSED
        s.now_us = max(s.now_us, next_us)


def _room_to_measure(a: Arrays, run: Record, s: Record) -> bool:
    """Return whether the arrays have room for the rows of one more event: a launch, its gauge, or its result."""
    return (
        s.gaps + a.running_batch.shape[1] <= a.gaps.shape[1]
        and s.segments + a.running_batch.shape[1] <= a.segments.shape[1]
        and s.decodes < a.decodes_us.shape[1]
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
    if run.loops and not run.routes:
        take(a, run, number)
    else:
        s.coming = request.next
    request.measured = request.id >= run.warm_up
    request.prefilled_before = s.prefilled_tokens
    s.arrived += 1
    s.nothing_new = 0
    if request.prompt_tokens > (s.prompt_tokens_max if request.output_tokens else s.prompts_only_tokens_max):
        _reject(a, run, s, number)
    else:
        room = s.request_tokens_max - request.prompt_tokens
        if request.output_tokens > room:
            request.output_tokens = room
            s.clamped += 1
        _wait(s, a.requests, number, s.tail if s.waiting else NONE)
        if s.passes:
            joins(s, cache_of(a, engine), number, a.shuffled[engine])
    if run.loops and not run.routes:
        look_ahead(a, run, s)
    _spend(s, a.works[engine], s.arrival_us, ARRIVAL)


def _reject(a: Arrays, run: Record, s: Record, number: int) -> None:
    """End a request whose prompt is too long, at its arrival. Its session breaks off."""
    request = a.requests[number]
    request.ended_us = request.arrival_us + run.hop_us
    s.ended += 1
    s.rejected += 1
    _report_end(a, run, s, number)
    if run.loops == 2:
        begin_session(a, run, s.now_us + s.answer_us)
        look_ahead(a, run, s)


# ------------------------------------------------------------------------------------------------------- waiting, lane


def _wait(s: Record, requests: Array, number: int, before: int) -> None:
    """Put a request into the waiting queue, behind the request `before`; NONE: to the front."""
    request = requests[number]
    after = NONE
    if before == NONE:
        after = s.head if s.waiting else NONE
        s.head = number
    else:
        after = requests[before].behind
        requests[before].behind = number
    request.behind = after
    if after == NONE:
        s.tail = number
    s.waiting += 1


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


# mechanism: prefill-or-decode (simulated)
def _launch(a: Arrays, run: Record, s: Record, engine: int) -> int:
    """LaneReady: plan a pass, prompts first, then decodes, like `Engine._plan_pass`.

    Returns: LAUNCHED; PRICED if the time of the launched batch is needed; PAUSED if no batch was launched; or LOST.
    """
    slot = (s.oldest + s.in_flight) % a.flights.shape[1]
    running_batch, flight, shape = a.running_batch[engine], a.flights[engine, slot], a.shape[0]
    samplers, parts = a.samplers[engine, slot], a.parts[engine, slot]
    taken = launches = 0
    c = cache_of(a, engine)
    if s.refresh and s.waiting and s.next_batch_id >= s.refreshed_at + s.refresh:
        s.refreshed_at = s.next_batch_id
        refresh(s, c, a.scratch)
    if s.stretch:
        growing = a.phases[engine, s.moves & (s.page_size - 1)]
    else:
        growing = _growing(s, a.requests, running_batch)
    lacking = growing - s.free_pages - s.evictable_pages
    if (s.waiting or s.prefilling != NONE) and not (
        s.decoding
        and decode_goes_first(
            s.decode_owed != 0, s.batching, lacking, s.decode_launches - s.extended_at, s.prefill_decode_interval
        )
    ):
        if s.prefilling != NONE or not s.batch_is_full:
            end_stretch(a, s, engine)
        taken = _extend(s, c, running_batch, parts, growing, a.scratch)
    flight.samplers = flight.prompt_ends = flight.parts = flight.in_stretch = 0
    if taken:
        launches = 1
        flight.parts = taken
        _extend_batch(s, c, running_batch, flight, samplers, parts, shape, growing)
        s.extended_at = s.decode_launches
    elif s.decoding:
        if lacking > 0:
            end_stretch(a, s, engine)
            if _make_room(s, c, running_batch, growing, a.shuffled[engine]) == NO_ROOM_EVER:
                return LOST  # the last request cannot go on
            growing = _growing(s, a.requests, running_batch)
        if growing <= s.free_pages + s.evictable_pages:
            launches = 1
            if lacking <= 0:
                s.ratio = ratio_after_decode(s.ratio, s.ratio_decay, s.ratio_floor)
            if growing:
                s.evicted_by_decode += alloc(s, c, growing)
            if s.stretch and s.moves_left:
                flight.in_stretch = 1
                s.moves += 1
                s.moves_left -= 1
                s.decode_launches += 1
                _decode_batch(s, flight, shape, s.decoding, s.context_tokens)
                s.context_tokens += s.decoding
            else:
                end_stretch(a, s, engine)
                rows = s.decoding
                _decode_batch(s, flight, shape, rows, _move_on(s, a.requests, running_batch, samplers))
                if s.moves_left >= STRETCH_MIN:
                    begin_stretch(a, s, engine)
    else:
        s.decode_owed = 0
    if launches:
        flight.batch_id, flight.launched_us = s.next_batch_id, s.now_us
        s.next_batch_id += 1
        s.in_flight += 1
        for i in range(taken if s.same_step_sharing else 0):
            publish(s, c, parts[i, 0], parts[i, 2])
    gauge = a.gauges[engine, s.gauges]
    gauge[0], gauge[1], gauge[2] = s.now_us, s.waiting, s.active
    gauge[3], gauge[4] = s.free_pages, s.evictable_pages
    s.gauges += 1
    if not launches:
        return PAUSED
    _spend(s, a.works[engine], s.plan_fixed_us + s.plan_row_us * flight.rows, PLAN)
    flight.handed_over_us = s.now_us
    took_us = _time_by_line(a.lines[engine], shape)
    if took_us >= 0.0:
        _hand_over(s, a.flights[engine], took_us)
        return LAUNCHED
    shape.batch_id, shape.engine = flight.batch_id, engine
    run.priced = 0
    return PRICED


def _time_by_line(lines: Array, shape: Record) -> float:
    """Return the time of a batch by a line of `lines.py`, if it is certain how it is rounded.

    Returns: a negative number if the cost model must be asked: there is no line for this batch, or the time is as near
        to the middle of two microseconds as the line may differ from the cost model.
    """
    line, context_tokens = lines[shape.decode_rows], shape.decode_context_tokens
    if shape.extend_rows:
        context_tokens = shape.extend_context_tokens
        if shape.extend_rows > 1 or shape.decode_rows or shape.sampled_rows or shape.extend_tokens != line[4]:
            return -1.0
    if context_tokens < line[0] or context_tokens > line[1]:
        return -1.0
    took_us = line[2] + line[3] * (context_tokens - line[0])
    if abs(took_us - np.floor(took_us) - 0.5) < LINE_ERROR_US:
        return -1.0
    return took_us


def _growing(s: Record, requests: Array, running_batch: Array) -> int:
    """Return the number of requests of the running batch whose next token needs a new page."""
    growing = 0
    for i in range(s.decoding):
        growing += opens_page(requests[running_batch[i]].position, s.page_size - 1)
    return growing


# mechanism: chunks (simulated)
# mechanism: chunk-by-load (simulated)
def _extend(s: Record, c: Cache, running_batch: Array, parts: Array, growing: int, scratch: Array) -> int:
    """Plan the next chunk of the split prompt, then waiting requests within the budgets.

    See `PrefillPlanner.plan_extend`.

    Args:
        growing: new pages of the next decode.
    Returns: the number of parts of the extend.
    """
    admitting = s.waiting > 0 and not s.batch_is_full
    if s.prefilling == NONE and not admitting:
        return 0
    page_size, requests = s.page_size, c.requests
    current = (s.free_pages + s.evictable_pages) * page_size
    total = current - (_reserved(s, requests, running_batch) if s.waiting and s.active else 0)
    tokens, chunk = s.max_prefill_tokens, s.chunked_prefill_size
    set_aside = 0
    if s.batching != PREFILL_FIRST and s.decoding:
        if s.reserve == RATIO:
            total -= s.decoding
            current -= s.decoding
        tokens = beside_decodes(tokens, s.decoding, page_size)
        if chunk != NO_LIMIT:
            chunk = beside_decodes(chunk, s.decoding, page_size)
        if s.batching == RUNNING_FIRST:
            set_aside = growing
    if s.chunked_prefill_size_min != NO_LIMIT:
        by_load = chunk_by_load(s.chunked_prefill_size, s.chunked_prefill_size_min, s.decoding, s.max_running_requests)
        chunk = shortened(chunk, by_load, s.align)
    taken = 0
    if s.prefilling != NONE:
        number = s.prefilling
        request = requests[number]
        start, new = request.position, request.prompt_tokens + request.kept - request.position
        take = chunk_tokens(start, new, tokens, chunk, s.unit, s.align, True, True)
        take = next_chunk(take, start, s.free_pages + s.evictable_pages - set_aside, page_size, s.align)
        if take > 0:
            _extend_to(s, c, number, start + take, parts[0])
            taken = 1
            total -= charged_total(s.reserve, take, request.output_tokens if take == new else 0, page_size)
            current -= ceil_to(take, page_size)
            tokens -= ceil_to(take, s.unit)
            if chunk != NO_LIMIT:
                chunk -= ceil_to(take, s.unit)
        else:
            admitting = False
    before = taken
    if admitting and s.passes:
        begin_pass(s, c, scratch)
    while admitting and s.waiting:
        number = next_in_pass(s, c) if s.passes else s.head
        if number == NONE:
            break
        request = requests[number]
        node, cached_pages, locking = match(s, c, number)
        if s.passes:
            writer = writer_of_prefix(s, c, number, cached_pages, parts[before:taken])
            if writer != NONE:
                _defer_behind(s, request, writer)
                continue
        start = cached_pages * page_size
        new = request.prompt_tokens + request.kept - start
        remaining = request.output_tokens - request.kept
        take = 0
        answer = verdict(total, current, tokens, chunk)
        needed = wanted(s.reserve, new, remaining, page_size, 0)
        if s.active >= s.max_running_requests:
            reason = RUNNING_LIMIT
        elif s.active + s.rows_behind >= s.rows_max:
            reason = ROWS
        elif taken >= s.prefill_max_requests:
            reason = PREFILL_BUDGET
        elif answer != CONTINUE:
            reason = KV_BUDGET if answer == NO_TOKENS else PREFILL_BUDGET
        elif s.active and not covers(s.reserve, total - locking * page_size, needed):
            reason = KV_BUDGET
        else:
            take = chunk_tokens(start, new, tokens, chunk, s.unit, s.align, not taken, s.prefilling == NONE)
            reason = PREFILL_BUDGET
            room = s.free_pages + s.evictable_pages - set_aside - locking
            if take > 0 and pages_between(0, take, page_size) > room:
                take, reason = 0, PAGES
        if take <= 0:
            _defer(s, number, reason)
            break
        if s.passes:
            admitted(s, c, number)
        else:
            s.head = request.behind
            if s.head == NONE:
                s.tail = NONE
            s.waiting -= 1
        s.active += 1
        if s.deferred == number:
            s.deferred = NONE
        if request.cached_tokens < 0:
            request.admitted_us, request.cached_tokens = s.now_us, min(start, request.prompt_tokens)
        take_match(s, c, number, node, cached_pages)
        total -= locking * page_size
        current -= locking * page_size
        if s.reserve == FULL:
            total -= needed
        total -= charged_total(s.reserve, take, request.output_tokens if take == new else 0, page_size)
        current -= ceil_to(take, page_size)
        tokens -= ceil_to(take, s.unit)
        if chunk != NO_LIMIT:
            chunk -= ceil_to(take, s.unit)
        _extend_to(s, c, number, start + take, parts[taken])
        taken += 1
    if admitting and s.passes:
        close_pass(s, c)
    return taken


def _defer_behind(s: Record, request: Record, writer: int) -> None:
    """Count once that a request waits until another one has computed the pages that it needs next."""
    s.waits_for_prefix = 1
    if request.waits_for != writer:
        request.waits_for = writer
        s.deferred_prefix += 1


def _defer(s: Record, number: int, reason: int) -> None:
    """Count the deferral of the head of the waiting queue, once per request and reason.

    After a deferral for memory or for the running limit, no request is admitted until a running one ends.
    """
    if reason in (KV_BUDGET, RUNNING_LIMIT, ROWS) and s.active:
        s.batch_is_full = 1
    if s.deferred == number and s.deferred_reason == reason:
        return
    s.deferred, s.deferred_reason = number, reason
    if reason == RUNNING_LIMIT:
        s.deferred_running_limit += 1
    elif reason == ROWS:
        s.deferred_rows += 1
    elif reason == KV_BUDGET:
        s.deferred_kv_budget += 1
    elif reason == PREFILL_BUDGET:
        s.deferred_prefill_budget += 1
    else:
        s.deferred_pages += 1


def _extend_to(s: Record, c: Cache, number: int, stop: int, part: Array) -> None:
    """Allocate pages of a request up to `stop` and write its part of the extend, like `PrefillPlanner._extend_to`."""
    request = c.requests[number]
    s.evicted_by_admission += alloc(s, c, pages_between(request.position, stop, s.page_size))
    part[0], part[1], part[2] = number, request.position, stop
    s.prefilled_tokens += stop - request.position
    request.position = stop
    if stop < request.prompt_tokens + request.kept:
        s.prefilling = number
    elif s.prefilling == number:
        s.prefilling = NONE


def _extend_batch(
    s: Record,
    c: Cache,
    running_batch: Array,
    flight: Record,
    samplers: Array,
    parts: Array,
    shape: Record,
    growing: int,
) -> None:
    """Write the batch of the parts, with decodes in a mixed batch, like `PrefillPlanner._extend_batch`."""
    requests = c.requests
    tokens = context_tokens = pairs = sampling = 0
    for i in range(flight.parts):
        number, start, stop = parts[i, 0], parts[i, 1], parts[i, 2]
        new = stop - start
        tokens += new
        context_tokens += start
        pairs += new * start + new * (new + 1) // 2
        if stop == requests[number].prompt_tokens + requests[number].kept:
            if not requests[number].output_tokens:
                requests[number].last_batch = s.next_batch_id  # it ends without a token
                continue
            samplers[sampling] = number
            sampling += 1
    along = decoded_tokens = 0
    if s.batching != PREFILL_FIRST and s.decoding:
        if growing > s.free_pages + s.evictable_pages:
            s.decode_owed = 1
            s.decodes_skipped += 1
        else:
            along = s.decoding
            s.evicted_by_decode += alloc(s, c, growing)
            decoded_tokens = _move_on(s, requests, running_batch, samplers[sampling:])
    for i in range(sampling):  # a request at the end of its prompt decodes next
        request = requests[samplers[i]]
        if ends_by_length(request.position, request.prompt_tokens + request.output_tokens):
            request.last_batch = s.next_batch_id
        else:
            running_batch[s.decoding] = samplers[i]
            s.decoding += 1
    flight.mode = BOTH if along else EXTEND
    flight.rows = flight.parts + along
    flight.samplers = sampling + along
    flight.prompt_ends = sampling
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


def _decode_batch(s: Record, flight: Record, shape: Record, rows: int, context_tokens: int) -> None:
    """Write a batch with one more token for the whole running batch, like `DecodePlanner.plan`.

    Args:
        rows: requests of the running batch.
        context_tokens: the sum of their positions before.
    """
    s.decode_owed = 0
    flight.mode = DECODE
    flight.rows = flight.samplers = flight.new_tokens = rows
    flight.parts = flight.prefill_tokens = 0
    flight.kv_tokens = context_tokens + rows
    shape.extend_rows = shape.extend_tokens = shape.extend_context_tokens = shape.extend_pairs = 0
    shape.decode_rows = shape.sampled_rows = rows
    shape.decode_context_tokens = context_tokens


def _move_on(s: Record, requests: Array, running_batch: Array, samplers: Array) -> int:
    """Advance the running batch by one position, like `DecodePlanner._advance`; requests at their last token leave.

    The caller has taken the pages that the tokens open. Returns: the sum of the positions before.
    """
    context_tokens = staying = 0
    s.moves_left = NO_LIMIT
    for i in range(s.decoding):
        number = running_batch[i]
        request = requests[number]
        samplers[i] = number
        context_tokens += request.position
        request.position += 1
        limit = request.prompt_tokens + request.output_tokens
        if ends_by_length(request.position, limit):
            request.last_batch = s.next_batch_id
        else:
            running_batch[staying] = number
            staying += 1
            s.moves_left = min(s.moves_left, decodes_before_end(request.position, limit))
    s.decoding = staying
    s.decode_launches += 1
    return context_tokens


# ----------------------------------------------------------------------------------------------------------- retraction


def _make_room(s: Record, c: Cache, running_batch: Array, growing: int, shuffled: Array) -> int:
    """Retract requests until the next decode fits, or has to wait for what is in flight, like `DecodePlanner`.

    Returns: the number of retracted requests; NO_ROOM_EVER: no request could be retracted or would free a page.
    """
    retracted = 0
    while True:
        available = s.free_pages + s.evictable_pages
        if growing <= available:
            break
        if growing <= available + returning_pages(s, c):
            s.decode_owed = 1
            s.decodes_skipped += 1
            break
        if s.decoding > 1 and not (s.prefilling != NONE and s.newest_first):
            place = _victim(s, c.requests, running_batch)
            victim = running_batch[place]
            for i in range(place + 1, s.decoding):
                running_batch[i - 1] = running_batch[i]
            s.decoding -= 1
            s.tokens_discarded += c.requests[victim].position + 1 - c.requests[victim].prompt_tokens
            s.tokens_discarded -= c.requests[victim].outputs
            _retract(s, c, victim, shuffled)
        elif s.prefilling != NONE:
            victim = s.prefilling
            s.prefilling = NONE
            _retract(s, c, victim, shuffled)
        elif s.in_flight:
            s.decode_owed = 1
            s.decodes_skipped += 1
            break
        else:
            return NO_ROOM_EVER
        retracted += 1
        s.decode_owed = 1
        growing = _growing(s, c.requests, running_batch)
    if retracted:
        outputs, max_new_tokens = s.decoding, 0
        for i in range(s.decoding):
            request = c.requests[running_batch[i]]
            outputs += request.position - request.prompt_tokens
            max_new_tokens += request.output_tokens
        s.ratio = ratio_after_retraction(outputs, max_new_tokens, s.decoding)
    return retracted


# mechanism: retraction (simulated)
def _victim(s: Record, requests: Array, running_batch: Array) -> int:
    """Return the place in the running batch of the request to retract, like `choose_victim`."""
    if s.newest_first:
        return s.decoding - 1
    first = 0
    for i in range(1, s.decoding):
        one, other = requests[running_batch[i]], requests[running_batch[first]]
        key = length_key(one.position - one.prompt_tokens, one.prompt_tokens, one.id)
        if key < length_key(other.position - other.prompt_tokens, other.prompt_tokens, other.id):
            first = i
    return first


def _retract(s: Record, c: Cache, number: int, shuffled: Array) -> None:
    """Free the pages of a request, which waits again and keeps its delivered tokens, like `SchedulerState.retract`."""
    request = c.requests[number]
    request.kept = request.outputs
    if request.joined != NONE:
        segment = c.segments[s.segments]
        segment[0], segment[1], segment[2], segment[3] = number, request.joined, s.decoded, request.joined_us
        s.segments += 1
        request.joined = NONE
    request.retractions += 1
    s.retractions += 1
    s.active -= 1
    s.batch_is_full = 0
    leave(s, c, number, s.keeps_retracted != 0)
    before = s.tail if s.waiting else NONE
    if s.to_front:
        before, other = NONE, s.head if s.waiting else NONE
        while other != NONE and c.requests[other].cached_tokens >= 0 and c.requests[other].id < request.id:
            before, other = other, c.requests[other].behind
    _wait(s, c.requests, number, before)
    if s.passes:
        joins(s, c, number, shuffled)


# ------------------------------------------------------------------------------------------------------------ admission


# mechanism: reserve (simulated)
def _reserved(s: Record, requests: Array, running_batch: Array) -> int:
    """Return the tokens that are reserved for running requests, like `PrefillPlanner._reserved`."""
    page_size, reserved = s.page_size, 0
    for i in range(s.decoding):
        request = requests[running_batch[i]]
        limit = request.prompt_tokens + request.output_tokens
        if s.reserve == RATIO:
            reserved += clipped_output(limit - request.position - 1)
        elif s.reserve == FULL:
            reserved += pages_between(request.position, limit - 1, page_size)
        else:
            reserved += opens_page(request.position, page_size - 1)
    if s.reserve == RATIO:
        return reserved_by_ratio(0, reserved, s.ratio)
    if s.reserve == FULL and s.prefilling != NONE:
        split = requests[s.prefilling]
        reach = max(split.prompt_tokens + split.output_tokens - 1, split.prompt_tokens)
        reserved += pages_between(split.position, reach, page_size)
    return reserved * page_size


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
    c = cache_of(a, engine)
    for i in range(flight.parts):
        if parts[i, 0] != NONE and _ends_without_token(a.requests[parts[i, 0]], flight.batch_id):
            _end(a, run, s, c, parts[i, 0])
    tokens = equal = measured = 0
    common_us, gaps = NONE, a.gaps[engine]
    if flight.in_stretch:
        samplers = a.running_batch[engine]
    if flight.in_stretch and s.common_us != NONE:
        tokens, equal, common_us = flight.samplers, s.measured, now_us - s.common_us
        s.gap_us_max = max(s.gap_us_max, common_us)
        s.common_us = now_us
        s.delivered += 1
    for i in range(0 if tokens else flight.samplers):
        number = samplers[i]
        if number == NONE:  # retracted since
            continue
        tokens += 1
        request = a.requests[number]
        measured += request.measured
        if request.outputs:
            gap_us = now_us - request.last_us
            if request.measured:
                if gap_us != common_us:
                    _count_gaps(s, gaps, common_us, equal)
                    common_us, equal = gap_us, 0
                equal += 1
            request.itl_us_max = max(request.itl_us_max, gap_us)
        else:
            request.first_us = now_us
        if i < flight.prompt_ends:
            request.joined, request.joined_us = s.decoded, now_us
        request.last_us = now_us
        request.outputs += 1
        if request.outputs == request.output_tokens:
            _end(a, run, s, c, number)
    if flight.in_stretch and s.common_us == NONE:
        s.common_us, s.measured = now_us, measured
    _count_gaps(s, gaps, common_us, equal)
    if flight.mode != EXTEND:
        a.decodes_us[engine, s.decodes] = now_us
        s.decodes += 1
        s.decoded += 1
    if tokens:
        message = a.messages[engine, s.messages]
        message[0], message[1] = now_us, tokens
        s.messages += 1
    for i in range(flight.parts):
        if parts[i, 0] != NONE and a.requests[parts[i, 0]].ended_us < 0:
            publish(s, c, parts[i, 0], parts[i, 2])
    if s.rows_behind or s.pages_behind:
        release_deferred(s, c, flight.batch_id)
    if s.ended == s.arrived:
        s.ratio = s.ratio_initial
        s.decode_owed = 0
    _spend(s, a.works[engine], s.result_fixed_us + s.result_row_us * flight.rows, RESULTS)


def _count_gaps(s: Record, gaps: Array, gap_us: int, count: int) -> None:
    """Note that `count` gaps between two tokens were `gap_us` long. Most gaps of a batch are equal."""
    if count:
        gap = gaps[s.gaps]
        gap[0], gap[1] = gap_us, count
        s.gaps += 1


def _ends_without_token(request: Record, batch_id: int) -> bool:
    """Return whether a request without output ends with a batch, which computes the last of its prompt."""
    return request.output_tokens == 0 and request.last_batch == batch_id


def _end(a: Arrays, run: Record, s: Record, c: Cache, number: int) -> None:
    """End a request at the present time, like `SchedulerState.finish`."""
    a.requests[number].ended_us = s.now_us
    s.ended += 1
    s.active -= 1
    s.batch_is_full = 0
    leave(s, c, number, True)
    _report_end(a, run, s, number)
    if run.loops:
        answered(a, run, s, number, s.now_us + s.answer_us)


def _report_end(a: Arrays, run: Record, s: Record, number: int) -> None:
    """Send the end of a request to the router, if that needs it."""
    if run.sees_ends:
        unseen = a.unseen[run.unseen]
        unseen[0], unseen[1] = s.now_us + s.answer_us, number
        run.unseen += 1
