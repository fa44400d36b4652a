"""The arithmetic of scheduling decisions: one source for the scheduler and for the simulator's fast path.

Every function here takes numbers and returns numbers, reads no state, allocates nothing and raises nothing. The
scheduler calls them in Python. `lockstep.sim.fast` calls the same functions from its kernel, where numba compiles them.
So a change here changes both, and a decision that is not here is a decision that the kernel would have to repeat.

A function that is marked as *elementwise* also takes columns, arrays of one number for each request: the scheduler
passes columns, the kernel single numbers. Policies are numbers here, in the order of their names in the settings.

Write only what numba compiles: numbers, tuples, `min` and `max`, no strings, no None. NO_LIMIT stands for a limit that
is not set.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NO_LIMIT = 2**62

NEW_TOKEN_RATIO_INIT = 0.7  # SGLang: SGLANG_INIT_NEW_TOKEN_RATIO
NEW_TOKEN_RATIO_MIN_FACTOR = 0.14  # the floor, as a share of the initial ratio
NEW_TOKEN_RATIO_DECAY_STEPS = 600  # decode launches from the initial ratio to the floor
RETRACT_DECODE_STEPS = 20  # decode steps for which the ratio set by a retraction leaves room
CLIP_MAX_NEW_TOKENS = 4096  # a longer output is reserved as this many tokens
LPM_FALLBACK_WAITING = 128  # with more waiting requests, matching costs more than it saves (threshold of SGLang)
DUPLICATE_CACHED_TOKENS_MAX = 32  # a request with more cached is no duplicate (SGLang: IN_BATCH_PREFIX_CACHING_CHECK)
DUPLICATE_SHARED_TOKENS_MIN = 32  # tokens two prompts must share to be duplicates (SGLang: ..._DEPRIORITIZE)
EVICT_AHEAD_SHARE = 256  # evict at least 1/256 of the pages at once, so that not every decode of a full cache evicts

RATIO, ON_DEMAND, FULL = range(3)
RESERVES = {"ratio": RATIO, "on_demand": ON_DEMAND, "full": FULL}
PREFILL_FIRST, MIXED, RUNNING_FIRST = range(3)
BATCHINGS = {"prefill_first": PREFILL_FIRST, "mixed": MIXED, "running_first": RUNNING_FIRST}
CONTINUE, NO_TOKENS, BUDGET_SPENT = range(3)  # verdicts on a budget

# Operands for columns: arrays without dimensions. NumPy converts a Python scalar at every use, which costs more than
# the addition itself.
ZERO = np.array(0, np.int32)
ONE = np.array(1, np.int32)
CLIP = np.array(CLIP_MAX_NEW_TOKENS, np.int32)
ZERO.flags.writeable = ONE.flags.writeable = CLIP.flags.writeable = False

Number = Any  # an int or a float; where a function is elementwise, also a column


# ---------------------------------------------------------------------------------------------------------------- pages


def ceil_to(tokens: int, unit: int) -> int:
    """Return `tokens` rounded up to a multiple of `unit`."""
    return -(-tokens // unit) * unit


def aligned(start: int, limit: int, align: int) -> int:
    """Return the most tokens from `start` on, up to `limit`, that end at a multiple of `align`; 0 if there is none."""
    return max((start + limit) // align * align - start, 0)


def pages_between(start: Number, stop: Number, page_size: int) -> Number:
    """Return the pages that positions [start:stop) open, if positions before `start` have theirs. Elementwise."""
    return -(-stop // page_size) + (-start // page_size)


def opens_page(position: Number, page_mask: Number) -> Number:
    """Return whether the token at `position` opens a page; `page_mask` is the page size minus 1. Elementwise."""
    return position & page_mask == ZERO


def ends_by_length(position: Number, limit: Number) -> Number:
    """Return whether a request has launched its last forward once `position` is its next one. Elementwise.

    The last output token is never fed back, so a request with `limit` tokens computes one position less.
    """
    return position + ONE >= limit


def decodes_before_end(position: int, limit: int) -> int:
    """Return how many decodes a request launches before the one after which `ends_by_length` holds."""
    return max(limit - position - 2, 0)


def pages_to_evict(missing: int, pool_pages: int) -> int:
    """Return the pages to evict if `missing` pages lack on the free list of a pool of `pool_pages`."""
    return max(missing, pool_pages // EVICT_AHEAD_SHARE)


# -------------------------------------------------------------------------------------------------------------- reserve


def clipped_output(tokens: Number) -> Number:
    """Return the output tokens that the reserve by ratio counts for an output of `tokens`. Elementwise."""
    return np.minimum(tokens, CLIP)


def reserved_by_ratio(certain: int, estimated: int, ratio: float) -> int:
    """Return the tokens to reserve: `certain` in full, and the share `ratio` of the `estimated` ones."""
    return certain + int(estimated * ratio)


def ratio_after_decode(ratio: float, decay: float, floor: float) -> float:
    """Return the new-token ratio after a decode that needed no retraction."""
    return max(ratio - decay, floor)


def ratio_after_retraction(outputs: int, max_new_tokens: int, survivors: int) -> float:
    """Return the new-token ratio after a retraction, see `NewTokenRatio.retracted`."""
    return min(1.0, (outputs + RETRACT_DECODE_STEPS * survivors) / (max_new_tokens + 1))


# ------------------------------------------------------------------------------------------------- budgets of an extend


def beside_decodes(limit: int, decodes: int, page_size: int) -> int:
    """Return what `decodes` in the same pass leave of a limit of new tokens: at least a page, so prompts progress."""
    return max(limit - decodes, page_size)


def shortened(chunk: int, tokens: int, align: int) -> int:
    """Return a chunk of at most `tokens`, a multiple of `align` and at least that; `chunk` if it is shorter."""
    return min(chunk, max(tokens // align * align, align))


# mechanism: chunk-by-load (decided)
def chunk_by_load(chunk: int, least: int, decodes: int, most: int) -> int:
    """Return the chunk beside `decodes` requests: from `chunk` beside none to `least` beside `most`, in proportion."""
    return chunk - max(chunk - least, 0) * min(decodes, most) // most


def verdict(total: int, current: int, input_tokens: int, chunk: int) -> int:
    """Return whether another candidate may be considered with these budgets: CONTINUE, NO_TOKENS or BUDGET_SPENT."""
    if total <= 0 or current <= 0:
        return NO_TOKENS
    return BUDGET_SPENT if input_tokens <= 0 or chunk <= 0 else CONTINUE


# mechanism: reserve (decided)
def wanted(reserve: int, new_tokens: int, remaining_output: int, page_size: int, beyond: int) -> int:
    """Return the tokens of the total budget that a candidate needs to start: its prompt, and output by the policy.

    Args:
        beyond: tokens that must fit beyond the token being computed, under ON_DEMAND.
    """
    if reserve == RATIO:
        return new_tokens + page_size + min(remaining_output, CLIP_MAX_NEW_TOKENS)
    fed_back = max(remaining_output - 1, 0)  # the last output token is never fed back
    return ceil_to(new_tokens + (fed_back if reserve == FULL else min(beyond, fed_back)), page_size)


def covers(reserve: int, left: int, needed: int) -> bool:
    """Return whether `left` tokens of the total budget cover the `needed` ones."""
    return needed < left if reserve == RATIO else needed <= left  # an estimate must leave a token unused


def charged_total(reserve: int, new_tokens: int, output_tokens: int, page_size: int) -> int:
    """Return what an extend of `new_tokens` takes of the total budget, with the output behind it (0: none yet).

    Under FULL, admission has charged the whole request before, see `wanted`.
    """
    charged = 0 if reserve == FULL else ceil_to(new_tokens, page_size)
    if output_tokens and reserve == RATIO:
        charged += page_size + min(output_tokens, CLIP_MAX_NEW_TOKENS)
    return charged


# mechanism: chunks (decided)
def chunk_tokens(
    start: int,
    new_tokens: int,
    input_tokens: int,
    chunk: int,
    unit: int,
    align: int,
    first: bool,
    may_split: bool,
) -> int:
    """Return how many of a prompt's new tokens, from `start` on, the next extend takes.

    It takes all of them, or those up to a position that is a multiple of `align`, or 0.

    Args:
        input_tokens: new tokens that the extend may still take, charged in multiples of `unit`.
        chunk: new tokens that it may still take before a prompt is split; NO_LIMIT: prompts are never split.
        first: whether the batch is still empty.
        may_split: whether no other request of the batch is split.
    """
    whole = ceil_to(new_tokens, unit)
    if chunk == NO_LIMIT:
        return new_tokens if first or whole <= input_tokens else 0
    limit = min(chunk, input_tokens)
    if whole <= limit:
        return new_tokens
    return aligned(start, limit, align) if may_split else 0


def next_chunk(take: int, start: int, pages: int, page_size: int, align: int) -> int:
    """Return how many of `take` tokens fit into `pages` more pages and the last page of a prompt up to `start`."""
    room = pages * page_size + -start % page_size
    return take if take <= room else aligned(start, room, align)


# ------------------------------------------------------------------------------------------------------- waiting queue


def are_few(waiting: int) -> bool:
    """Return whether so few requests wait that cached prefixes are looked up to order them."""
    return waiting <= LPM_FALLBACK_WAITING


def response_ratio(age: int, uncached_tokens: int) -> float:
    """Return the response ratio of policy hrrn: the tokens prefilled for others since an arrival, per uncached one."""
    return age / uncached_tokens


def may_be_duplicate(tokens: int, cached_tokens: int) -> bool:
    """Return whether a request may be a duplicate of an earlier one: it is long enough, and not cached already."""
    return tokens >= DUPLICATE_SHARED_TOKENS_MIN and cached_tokens <= DUPLICATE_CACHED_TOKENS_MAX


def awaited_pages(cached_pages: int, page_size: int) -> int:
    """Return the pages from the beginning of a prompt for which it waits if another request computes them."""
    return cached_pages + -(-DUPLICATE_SHARED_TOKENS_MIN // page_size)


def may_bypass(bypassed: int, limit: int) -> bool:
    """Return whether a request that later ones have bypassed `bypassed` times may be bypassed again."""
    return bypassed < limit


# -------------------------------------------------------------------------------------------------------------- decodes


def decode_goes_first(owed: bool, batching: int, lacking_pages: int, decodes_since_extend: int, interval: int) -> bool:
    """Return whether a decode goes before any prefill: one is owed, or its pages lack, or an extend came too recently.

    Args:
        lacking_pages: pages that the next decode needs beyond the available ones; read under RUNNING_FIRST only.
    """
    return owed or (batching == RUNNING_FIRST and lacking_pages > 0) or decodes_since_extend < interval


def length_key(outputs: Number, prompt_tokens: Number, request_id: Number) -> tuple[Number, Number, Number]:
    """Return the key by which retraction policy `length` orders victims, the least first. Elementwise.

    Fewest output tokens first (least work lost), then the longest prompt (most pages freed), then the newest.
    """
    return outputs, -prompt_tokens, -request_id
