"""The state of a run on the fast path, as numbers in arrays.

Names are those of the core. A request is a row of `requests`, and its number is the row. Requests that follow answers
have their ids in the order of arrival; other ids are the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numba infers the types; the annotations are documentation only
Record = Any  # one row of an array, written through

NEVER_US = 2**62
NONE = -1

EXTEND, DECODE, BOTH = range(3)  # batch modes; BOTH is mixed
ARRIVAL, PLAN, RESULTS = range(3)  # kinds of work of the CPU lane
RUNNING_LIMIT, ROWS, KV_BUDGET, PREFILL_BUDGET, PAGES = range(5)  # deferral reasons of the head of the waiting queue
QUEUE_ORDER, LONGEST_CACHED, LONGEST_OUTPUT, SHUFFLED, RESPONSE_RATIO, FEWEST_UNCACHED = range(6)  # waiting queue
KEEPS, LAST, DEFERS = range(3)  # what becomes of waiting requests with a prefix that another request computes
IN_TURN, LEAST_REQUESTS, LEAST_TOKENS, LEAST_PROMPTS, BOUNDED, GIVEN, STICKY = range(7)  # rules of a router
PRICED, FLUSH, ASKED, DONE, LOST, PAUSED, LAUNCHED, SETTLED = range(8)  # why `advance`, `_advance` and `_launch` return
LINE_ERROR_US = 1e-5  # a line of `lines` is nearer than this to the cost model

CACHE_LINE = 64  # bytes


def in_lines(fields: Sequence[tuple[str, Any]]) -> np.dtype[np.void]:
    """Return a record of these fields that is a whole number of cache lines long."""
    packed = np.dtype(list(fields), align=True)
    places = [packed.fields[name] for name in packed.names] if packed.fields and packed.names else []
    layout: Any = {
        "names": packed.names,
        "formats": [place[0] for place in places],
        "offsets": [place[1] for place in places],
        "itemsize": -(-packed.itemsize // CACHE_LINE) * CACHE_LINE,
    }
    record: np.dtype[np.void] = np.dtype(layout, align=True)
    return record


def zeros_in_lines(count: int, dtype: np.dtype[np.void]) -> Array:
    """Return zeros, the first at the beginning of a cache line."""
    raw = np.zeros(count * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + count * dtype.itemsize].view(dtype)


ENGINE = np.dtype(
    [
        # settings
        ("page_size", np.int64),
        ("pages", np.int64),
        ("radix_cache", np.int64),
        ("same_step_sharing", np.int64),
        ("refresh", np.int64),  # launches between two refreshes of the cached prefixes of waiting requests; 0: never
        ("reserve", np.int64),
        ("batching", np.int64),
        ("slots", np.int64),  # most batches in flight
        ("max_running_requests", np.int64),
        ("rows_max", np.int64),
        ("prompt_tokens_max", np.int64),  # a request with output is rejected if its prompt is longer
        ("prompts_only_tokens_max", np.int64),  # and one without output
        ("request_tokens_max", np.int64),  # outputs end there
        ("newest_first", np.int64),  # 1: the newest request is retracted first, else the one with fewest outputs
        ("to_front", np.int64),  # 1: a retracted request waits before those that never ran
        ("keeps_retracted", np.int64),  # 1: KV of a retracted request stays in the radix cache
        ("prefill_max_requests", np.int64),
        ("prefill_decode_interval", np.int64),
        ("max_prefill_tokens", np.int64),
        ("chunked_prefill_size", np.int64),
        ("chunked_prefill_size_min", np.int64),  # NO_LIMIT: chunks do not depend on the running batch
        ("policy", np.int64),  # order of the waiting queue, such as LONGEST_CACHED
        ("deduplication", np.int64),  # KEEPS, LAST or DEFERS
        ("passes", np.int64),  # 1: admission goes by `ordering.py`; 0: in the order of the queue, none is bypassed
        ("bypass_limit", np.int64),
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
        ("answer_us", np.int64),  # time from the end of an answer to the client, and back to the engine
        ("head", np.int64),  # the first waiting request; `behind` links to the one after it
        ("tail", np.int64),  # the last waiting request
        ("waiting", np.int64),
        ("arrived", np.int64),
        ("ended", np.int64),
        ("active", np.int64),
        ("decoding", np.int64),  # requests of the running batch
        ("prefilling", np.int64),
        ("batch_is_full", np.int64),
        # a stretch: decodes of the same requests, none of which ends; the rows have their effects at its end
        ("stretch", np.int64),  # 1: there is one
        ("moves", np.int64),  # its decodes so far
        ("moves_left", np.int64),  # further decodes before one with which a request ends
        ("context_tokens", np.int64),  # the sum of the positions of the running batch
        ("measured", np.int64),  # requests of the running batch that are measured
        ("delivered", np.int64),  # decodes whose delivery the rows do not have
        ("common_us", np.int64),  # time of the last token of every row; NONE: not the same
        ("gap_us_max", np.int64),  # the longest gap between two of these deliveries
        # the present pass over the waiting queue
        ("pass_number", np.int64),
        ("by_rank", np.int64),  # 1: requests are considered by `rank`, duplicates last; 0: in the order of the queue
        ("cursor", np.int64),  # in the order of the queue: the request considered last; NONE: none yet
        ("split_before", np.int64),  # the request whose prompt was split when the pass began
        ("considered", np.int64),  # requests of the queue whose `turn` is not 0
        ("urgent", np.int64),  # waiting requests that have been bypassed as often as they may be
        ("admitted", np.int64),  # requests admitted since bypasses were counted
        ("admissions_left", np.int64),  # number of these after which bypasses are counted
        ("waits_for_prefix", np.int64),  # 1: a request of this pass waits for a prefix
        ("prefilled_tokens", np.int64),  # tokens of all extends
        ("deferred", np.int64),  # the request that was deferred last
        ("deferred_reason", np.int64),  # its reason
        ("decode_owed", np.int64),
        ("decode_launches", np.int64),
        ("extended_at", np.int64),
        ("next_batch_id", np.int64),
        ("refreshed_at", np.int64),  # the next batch at the last refresh
        ("oldest", np.int64),  # slot of the batch in flight that ends first
        ("in_flight", np.int64),
        ("ratio", np.float64),
        # memory
        ("free_pages", np.int64),
        ("evictable_pages", np.int64),
        ("tick", np.int64),
        ("nodes", np.int64),  # the largest number of a node so far
        ("node_free", np.int64),  # the first unused node below it; `following` links to the next; 0: none
        ("heap", np.int64),  # entries of the queue of leaves
        ("rows_behind", np.int64),  # rows that are freed once a batch in flight is collected
        ("pages_behind", np.int64),  # entries of pages that are freed then
        # counts for the metrics
        ("evicted_by_admission", np.int64),
        ("evicted_by_decode", np.int64),
        ("deferred_running_limit", np.int64),
        ("deferred_rows", np.int64),
        ("deferred_kv_budget", np.int64),
        ("deferred_prefill_budget", np.int64),
        ("deferred_pages", np.int64),
        ("deferred_prefix", np.int64),
        ("decodes_skipped", np.int64),
        ("rejected", np.int64),  # requests whose prompt is too long
        ("clamped", np.int64),  # requests that may generate fewer tokens than they asked for
        ("decoded", np.int64),  # delivered batches with decodes
        ("retractions", np.int64),
        ("tokens_discarded", np.int64),
        # numbers of rows that wait for a flush
        ("launches", np.int64),
        ("gauges", np.int64),
        ("works", np.int64),
        ("messages", np.int64),
        ("gaps", np.int64),
        ("decodes", np.int64),
        ("segments", np.int64),
        # counts of the router
        ("weight", np.float64),
        ("credit", np.float64),
        ("open_requests", np.int64),
        ("open_tokens", np.int64),
        ("last_chosen", np.int64),
        ("matched", np.int64),  # blocks of the routed prompt that were sent here before, from its beginning on
        ("blocks", np.int64),  # blocks of prompts that the router counts as cached here
        ("blocks_max", np.int64),
        ("oldest_block", np.int64),  # it is dropped first; `newer` links to the next; 0: none
        ("newest_block", np.int64),
        (
            "block_free",
            np.int64,
        ),  # the first unused entry; `following` links to the next; 0: none
        ("block_entries", np.int64),  # the largest entry so far
    ],
    align=True,
)

REQUEST = in_lines(
    [
        # of each request of the running batch, read and written with each token: one line of the processor's cache
        ("last_us", np.int64),  # time of its last message
        ("itl_us_max", np.int64),
        ("last_batch", np.int64),  # the batch with which it ends by length, once that is launched
        ("ended_us", np.int64),
        ("outputs", np.int32),  # output tokens so far
        ("output_tokens", np.int32),  # final number of output tokens
        ("prompt_tokens", np.int32),
        ("position", np.int32),  # next position; KV of all positions before it is launched
        ("measured", np.int32),  # 1: it is not of the warm-up, so its gaps are counted
        ("kept", np.int32),  # output tokens from before a retraction, which are computed again like its prompt
        ("handle", np.int32),  # the node of the radix cache with the path that it locks
        ("cached_pages", np.int32),  # pages of that path
        # the rest
        ("arrival_us", np.int64),  # at the router; `hop_us` later at its engine
        ("admitted_us", np.int64),
        ("first_us", np.int64),  # time of its first message; -1: none yet
        ("joined_us", np.int64),  # time of the last token by an extend of the whole prompt
        ("joined", np.int64),  # decodes of its engine delivered before that; NONE: no such token since its retraction
        ("id", np.int64),  # in order of arrival; -1: not yet
        ("key", np.int64),  # order of requests that arrive at the same time
        ("think_us", np.int64),  # from an answer to this request, which follows it
        ("run_start", np.int64),  # its prompt is the runs [run_start:run_stop)
        ("run_stop", np.int64),
        ("open_tokens", np.int64),  # tokens by the count of the router
        ("block_start", np.int64),  # its whole blocks are `block_keys` [block_start:block_stop)
        ("block_stop", np.int64),
        ("prefilled_before", np.int64),  # `prefilled_tokens` of its engine when it arrived
        ("duplicate_in", np.int64),  # number of the last pass in which it was a duplicate
        ("rank", np.float64),  # the least is considered first; equal ones in the order of the queue
        ("output_first_token", np.int32),
        ("shift", np.int32),  # its token ids are those of its runs plus this
        ("follow", np.int32),  # the first request that follows its answer
        ("sibling", np.int32),  # the next request that follows the same answer
        ("retractions", np.int32),
        ("cached_tokens", np.int32),  # at its first admission; -1: not yet
        ("engine", np.int32),  # NONE: not sent yet
        ("next", np.int32),  # the request that was sent next to the same engine
        ("behind", np.int32),  # the request behind it in the waiting queue
        ("bypassed", np.int32),  # requests behind it in the waiting queue that were admitted before it
        ("turn", np.int32),  # in the present pass: 0 not considered, 1 considered, 2 admitted
        ("waits_for", np.int32),  # the request that computes its prefix, at its last deferral for that
        ("asked_tokens", np.int32),  # output tokens before its engine has limited them
        ("session", np.int32),  # the first request of its session
        ("block_shift", np.int32),  # keys of its blocks are those in `block_keys` plus this
        ("room", np.int32),  # with GIVEN: the engine of the request whose id is this row's number
    ],
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
        ("prompt_ends", np.int64),  # the first of the samplers, whose token follows from an extend
        ("parts", np.int64),
        ("in_stretch", np.int64),  # 1: its samplers are the running batch, and are not written
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("tick", np.int64),  # of its last use
        ("parent", np.int32),
        ("owner", np.int32),  # the request with its tokens
        ("stop", np.int32),  # pages from the root to its end
        ("locks", np.int32),  # on it or below
        ("children", np.int32),
        ("first_page_token", np.int32),  # last token of its first page
        ("following", np.int32),  # the next node of its bucket, or the next unused node
        ("queued", np.int32),  # 1: it has an entry in the queue of leaves
    ],
    align=True,
)

DEFERRED_ROW = np.dtype(
    [
        ("free_after", np.int64),  # the batch after which the row is free
        ("number", np.int32),  # its request
        ("handle", np.int32),
        ("cached_pages", np.int32),
        ("position", np.int32),
        ("keeps", np.int64),  # 1: its KV goes to the radix cache
    ],
    align=True,
)

BLOCK = np.dtype(
    [
        ("key", np.int32),
        ("older", np.int32),  # the entry that is dropped before it
        ("newer", np.int32),
        ("following", np.int32),  # the next entry of its bucket, or the next unused entry
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
        # requests that follow answers
        ("loops", np.int64),  # 1: requests follow answers; 2: sessions follow sessions, too
        ("clock", np.int64),  # the next one that is sent by the clock
        ("thinking", np.int64),  # requests whose time of arrival is known because an answer has ended
        ("begins", np.int64),  # sessions of a closed loop that will begin because another one ended
        ("upcoming", np.int64),  # sessions that have begun for that reason
        ("arrived", np.int64),  # requests that were sent, which is the next id
        ("expected", np.int64),  # requests that are sent at all
        ("lookahead_us", np.int64),  # least time from the end of an answer to the next request at the router
        # the engines
        ("until_us", np.int64),  # engines do all work that is due before this time
        ("engine", np.int64),  # the engine that is advanced to `until_us`; engines before it are there
        ("next_request", np.int64),  # the next request to be routed
        ("until_question", np.int64),  # requests before the next return of ASKED; negative: never
        ("settles", np.int64),  # 1: `advance` ends all stretches and returns SETTLED
        ("asks", np.int64),  # 1: `advance` returns ASKED when all engines are at `until_us`
        ("warm_up", np.int64),  # requests with an id below this are not measured
        ("hop_us", np.int64),  # time from the router to an engine, and from an engine to the router
        # the router
        ("routes", np.int64),  # 1: there is a router
        ("sees_ends", np.int64),  # 1: its choice depends on the requests that have ended
        ("ahead", np.int64),  # requests that are routed before engines go on, if the choice depends on no engine
        ("routing_rule", np.int64),  # rule of the router, such as IN_TURN
        ("load_bound", np.float64),
        ("load_floor", np.int64),
        ("ended", np.int64),  # ends that have reached the router
        ("output_tokens", np.int64),  # output tokens of these ended requests
        ("first_guess", np.int64),  # tokens of an answer that the router expects at the start
        ("unseen", np.int64),  # ends that have not reached the router yet
        ("routed_by_prefix", np.int64),  # requests sent to the engine with the longest beginning of their prompt
        ("routed_by_bound", np.int64),  # requests whose engine with a longer beginning is over the bound
        ("routed_by_session", np.int64),  # requests sent to the engine of their session
    ],
    align=True,
)


class Arrays(NamedTuple):
    """The state of a run. The last seven arrays have rows for the next flush; ENGINE has their numbers by engine."""

    run: Array  # RUN [1]
    engines: Array  # ENGINE [engines]
    requests: Array  # REQUEST [requests], by arrival
    due_us: Array  # int64 [engines]: an engine has no work before this time
    running_batch: Array  # int64 [engines, rows]: requests that decode
    phases: Array  # int64 [engines, page size]: requests of a stretch by its decodes before they open a page
    flights: Array  # FLIGHT [engines, slots]: batches in flight
    samplers: Array  # int64 [engines, slots, rows]: requests that get a token from each batch in flight
    parts: Array  # int64 [engines, slots, rows, 3]: request, start and stop of each chunk of each batch in flight
    run_first_token: Array  # int32 [runs]: first token of each run of consecutive ids of a prompt
    run_stop: Array  # int64 [runs]: position in the prompt at which the run stops
    nodes: Array  # NODE [engines, nodes]: the radix cache; node 0 is the root
    buckets: Array  # int32 [engines, power of two]: first node of each bucket; 0: none
    heap_ticks: Array  # int64 [engines, nodes]: queue of the leaves that may be evicted, by the tick of their last use
    heap_nodes: Array  # int32 [engines, nodes]
    deferred_rows: Array  # DEFERRED_ROW [engines, rows]
    deferred_pages: Array  # int64 [engines, entries, 2]: batch, and pages that are freed after it
    thinking: Array  # int32 [requests]: heap of requests whose time of arrival is known, by time and key
    begins: Array  # int64 [sessions in progress]: heap of times at which further sessions of a closed loop begin
    sessions: Array  # int32 [sessions]: first request of each further session of a closed loop
    scratch: Array  # int64 [requests]: numbers within one call
    shuffled: Array  # int32 [engines, requests]: rank of each id if the waiting queue is shuffled
    block_keys: Array  # int32 [blocks]: one number for all blocks with the same tokens up to their end
    blocks: Array  # BLOCK [engines, entries]: blocks of prompts by engine; entry 0 means none
    block_buckets: Array  # int32 [engines, power of two]: first entry of each bucket; 0: none
    unseen: Array  # int64 [ends, 2]: time at which an end reaches the router, and its request
    lines: Array  # float64 [engines, rows + 1, 5]: times of decodes by their rows, and of extends, see `lines.py`
    shape: Array  # SHAPE [1]: shape of the batch whose time is to be computed
    launches: Array  # int64 [engines, rows, len(BATCH_COLUMNS)]
    gauges: Array  # int64 [engines, rows, 5]
    works: Array  # int64 [engines, rows, 3]
    messages: Array  # int64 [engines, rows, 2]
    gaps: Array  # int64 [engines, rows, 2]: length in us of gaps between two tokens, and their number
    decodes_us: Array  # int64 [engines, rows]: time at which each batch with decodes was delivered
    segments: Array  # int64 [engines, rows, 4]: retracted request, `joined`, `decoded` at its retraction, `joined_us`
