"""Triton kernels of sampling. Each does what its namesake in reference.py does, to the bit.

Logits are float32 [samples, vocab], row-major; settings are columns by request row (table.py), looked up in the kernel,
so that a sample costs no gather. Kernels that touch every logit run on a grid of (sample, block of the vocabulary):

    edit       one program per sample, over its list of biased and banned ids
    mask       bit t % 32 of word t // 32 allows token t
    penalise   reads `seen` of rows that have a slot
    pivot      one program per sample: binary search, by two bits of the float at a time, for the smallest logit that
               top-k and top-p let through. 16 passes over the row for each of the two instead of a sort.
    draw       scaled logit plus Gumbel noise, argmax of a block; then `pick`, argmax over the blocks

Nothing depends on a block size: maxima have one value in whatever order, counts and masses are integers, and all float
arithmetic is compiled with `enable_fp_fusion=False`, because a fused multiply-add would round differently from torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.runtime.sampling import numerics, philox, reference, table
from lockstep.runtime.sampling.table import Columns

VOCAB_BLOCK = 1024
PIVOT_BLOCK = 2048
EDIT_BLOCK = 32

REALS: tl.constexpr = tl.constexpr(table.REALS)
TEMPERATURE: tl.constexpr = tl.constexpr(table.TEMPERATURE)
INVERSE_TEMPERATURE: tl.constexpr = tl.constexpr(table.INVERSE_TEMPERATURE)
LOG_MIN_P: tl.constexpr = tl.constexpr(table.LOG_MIN_P)
FREQUENCY: tl.constexpr = tl.constexpr(table.FREQUENCY)
PRESENCE: tl.constexpr = tl.constexpr(table.PRESENCE)
REPETITION: tl.constexpr = tl.constexpr(table.REPETITION)
INTS: tl.constexpr = tl.constexpr(table.INTS)
KEY_LOW: tl.constexpr = tl.constexpr(table.KEY_LOW)
KEY_HIGH: tl.constexpr = tl.constexpr(table.KEY_HIGH)
TOP_K: tl.constexpr = tl.constexpr(table.TOP_K)
TOP_P: tl.constexpr = tl.constexpr(table.TOP_P)
EDITS: tl.constexpr = tl.constexpr(table.EDITS)
EDIT_COUNT: tl.constexpr = tl.constexpr(table.EDIT_COUNT)
SEEN: tl.constexpr = tl.constexpr(table.SEEN)
IN_PROMPT: tl.constexpr = tl.constexpr(table.IN_PROMPT)
SHARE_ALL: tl.constexpr = tl.constexpr(table.SHARE_ALL)
SHARE_BITS: tl.constexpr = tl.constexpr(numerics.SHARE_BITS)
BANNED: tl.constexpr = tl.constexpr(reference.BANNED)

MULTIPLIER_A: tl.constexpr = tl.constexpr(philox.MULTIPLIER_A)
MULTIPLIER_B: tl.constexpr = tl.constexpr(philox.MULTIPLIER_B)
WEYL_A: tl.constexpr = tl.constexpr(philox.WEYL_A)
WEYL_B: tl.constexpr = tl.constexpr(philox.WEYL_B)
WORD: tl.constexpr = tl.constexpr(philox.WORD)
ROUNDS: tl.constexpr = tl.constexpr(philox.ROUNDS)
STREAM: tl.constexpr = tl.constexpr(philox.STREAM_TOKENS)

LN2: tl.constexpr = tl.constexpr(numerics.LN2)
LOG2E: tl.constexpr = tl.constexpr(numerics.LOG2E)
TWO_THIRDS: tl.constexpr = tl.constexpr(numerics.TWO_THIRDS_BITS)
THIRD_WORD: tl.constexpr = tl.constexpr(numerics.THIRD_WORD)
UNIT: tl.constexpr = tl.constexpr(numerics.UNIT)
MASS_SHIFT: tl.constexpr = tl.constexpr(numerics.MASS_BITS - numerics.MANTISSA_BITS)
MANTISSA_ONE: tl.constexpr = tl.constexpr(float(1 << numerics.MANTISSA_BITS))
MASS_EXPONENT_MIN: tl.constexpr = tl.constexpr(numerics.MASS_EXPONENT_MIN)
LOG0, LOG1, LOG2, LOG3, LOG4, LOG5, LOG6, LOG7, LOG8 = (tl.constexpr(c) for c in numerics.LOG_TAIL)
EXP0, EXP1, EXP2, EXP3, EXP4, EXP5, EXP6 = (tl.constexpr(c) for c in numerics.EXP2)

KEY_LEAST: tl.constexpr = tl.constexpr(-(2**31))
KEY_OF_MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001)


# ---------------------------------------------------------------------------------------------------------- arithmetic


@triton.jit
def _log_polynomial(t):
    tail = LOG8
    tail = tail * t + LOG7
    tail = tail * t + LOG6
    tail = tail * t + LOG5
    tail = tail * t + LOG4
    tail = tail * t + LOG3
    tail = tail * t + LOG2
    tail = tail * t + LOG1
    tail = tail * t + LOG0
    return t * t * tail + t


@triton.jit
def _negative_log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - TWO_THIRDS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return _log_polynomial(1.0 - mantissa) - exponent.to(tl.float32) * LN2


@triton.jit
def _gumbel(words):
    v = (words.to(tl.float32) + 0.5) * UNIT
    rest = ((words ^ WORD).to(tl.float32) + 0.5) * UNIT
    small = words < THIRD_WORD
    return _negative_log(tl.where(small, _log_polynomial(tl.where(small, v, 0.0)), _negative_log(rest)))


@triton.jit
def _philox(a, b, c, d, key_a, key_b):
    for _ in tl.static_range(ROUNDS):
        old_a, old_c = a, c
        a = tl.umulhi(old_c, tl.full(old_c.shape, MULTIPLIER_B, tl.uint32)) ^ b ^ key_a
        c = tl.umulhi(old_a, tl.full(old_a.shape, MULTIPLIER_A, tl.uint32)) ^ d ^ key_b
        b = tl.mul(old_c, MULTIPLIER_B, sanitize_overflow=False)
        d = tl.mul(old_a, MULTIPLIER_A, sanitize_overflow=False)
        key_a = tl.add(key_a, WEYL_A, sanitize_overflow=False)
        key_b = tl.add(key_b, WEYL_B, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def _mass(z):
    power = tl.maximum(z * LOG2E, MASS_EXPONENT_MIN)
    whole = tl.floor(power)
    fraction = power - whole
    mantissa = EXP6
    mantissa = mantissa * fraction + EXP5
    mantissa = mantissa * fraction + EXP4
    mantissa = mantissa * fraction + EXP3
    mantissa = mantissa * fraction + EXP2
    mantissa = mantissa * fraction + EXP1
    mantissa = mantissa * fraction + EXP0
    fixed = (mantissa * MANTISSA_ONE).to(tl.int64)
    return (fixed << MASS_SHIFT) >> (-whole).to(tl.int64)


@triton.jit
def _scaled(logits, largest, inverse):
    return tl.where(logits == largest, 0.0, (logits - largest) * inverse)


@triton.jit
def _load_logits(logits_ptr, ids, vocab):
    """Logits with -inf for a NaN, and behind the vocabulary."""
    logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


# ------------------------------------------------------------------------------------------------------------- changes


@triton.jit
def _edit_kernel(
    logits_ptr, rows_ptr, positions_ptr, ints_ptr, ids_ptr, bias_ptr, until_ptr, width, vocab, BLOCK: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    slot = tl.load(ints_ptr + row * INTS + EDITS)
    count = tl.load(ints_ptr + row * INTS + EDIT_COUNT)
    position = tl.load(positions_ptr + sample)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        here = entry < count
        at = slot * width + entry
        ids = tl.load(ids_ptr + at, mask=here, other=0)
        bias = tl.load(bias_ptr + at, mask=here, other=0.0)
        until = tl.load(until_ptr + at, mask=here, other=0)
        where = logits_ptr + sample * vocab + ids
        after = tl.load(where, mask=here, other=0.0) + bias
        # Not minimum(): it would make a NaN of the model a number.
        after = tl.where((position < until) & (after > BANNED), BANNED, after)
        tl.store(where, after, mask=here)


@triton.jit
def _mask_kernel(logits_ptr, allowed_ptr, vocab, words, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = ids < vocab
    word = tl.load(allowed_ptr + sample * words + ids // 32, mask=here, other=0)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    infinite = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + sample * vocab + ids, infinite, mask=here & forbidden)


@triton.jit
def _penalise_kernel(logits_ptr, rows_ptr, reals_ptr, ints_ptr, seen_ptr, vocab, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    slot = tl.load(ints_ptr + row * INTS + SEEN)
    if slot > 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        seen = tl.load(seen_ptr + slot * vocab + ids, mask=ids < vocab, other=0)
        here = seen > 0
        repetition = tl.load(reals_ptr + row * REALS + REPETITION)
        frequency = tl.load(reals_ptr + row * REALS + FREQUENCY)
        presence = tl.load(reals_ptr + row * REALS + PRESENCE)
        produced = (seen & (IN_PROMPT - 1)).to(tl.float32)
        where = logits_ptr + sample * vocab + ids
        logits = tl.load(where, mask=here, other=0.0)
        after = tl.where(logits > 0, tl.div_rn(logits, tl.zeros_like(logits) + repetition), logits * repetition)
        after = after - produced * frequency
        after = after - tl.where(produced > 0, presence, 0.0)
        tl.store(where, after, mask=here)


# --------------------------------------------------------------------------------------------------- top-k and top-p


@triton.jit
def _keys(logits):
    """int32 in the order of the floats; -0.0 is 0.0."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _smallest_kept(
    logits_ptr, vocab, largest, inverse, least_key, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The least key t for which tokens with keys above t, of those from `least_key` on, count or weigh below `wanted`.

    Two bits a pass: of four equal parts of what is left, the one with t in it is told by what lies above the first
    three. The count above a part's last key falls from part to part.
    """
    base = least_key * 0 + KEY_LEAST
    step = base * 0 + (1 << 30)
    for _ in range(16):
        first = base + step
        second = first + step
        third = second + step
        above_first = tl.zeros((BLOCK,), tl.int64)
        above_second = tl.zeros((BLOCK,), tl.int64)
        above_third = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logits = _load_logits(logits_ptr, ids, vocab)
            keys = _keys(logits)
            if BY_MASS:
                weight = _mass(_scaled(logits, largest, inverse))
            else:
                weight = tl.full((BLOCK,), 1, tl.int64)
            weight = tl.where((ids < vocab) & (keys >= least_key), weight, 0)
            above_first += tl.where(keys >= first, weight, 0)
            above_second += tl.where(keys >= second, weight, 0)
            above_third += tl.where(keys >= third, weight, 0)
        base = tl.where(tl.sum(above_first) >= wanted, first, base)
        base = tl.where(tl.sum(above_second) >= wanted, second, base)
        base = tl.where(tl.sum(above_third) >= wanted, third, base)
        step = step >> 2
    return base


@triton.jit
def _pivot_kernel(
    pivots_ptr, logits_ptr, maxima_ptr, rows_ptr, reals_ptr, ints_ptr, vocab, BLOCK: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    temperature = tl.load(reals_ptr + row * REALS + TEMPERATURE)
    inverse = tl.load(reals_ptr + row * REALS + INVERSE_TEMPERATURE)
    top_k = tl.load(ints_ptr + row * INTS + TOP_K)
    top_p = tl.load(ints_ptr + row * INTS + TOP_P)
    largest = tl.load(maxima_ptr + sample)
    logits_ptr += sample * vocab
    key = tl.full((), KEY_OF_MINUS_INFINITY, tl.int32)
    # Rows without an answer (NaN, or nothing allowed) are not searched: their token is 0 anyway.
    if (temperature > 0) & (largest > float("-inf")):
        if top_k < vocab:
            key = _smallest_kept(logits_ptr, vocab, largest, inverse, key, top_k, False, BLOCK)
            key = tl.maximum(key, KEY_OF_MINUS_INFINITY)
        if top_p < SHARE_ALL:
            masses = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                logits = _load_logits(logits_ptr, ids, vocab)
                masses += tl.where(_keys(logits) >= key, _mass(_scaled(logits, largest, inverse)), 0)
            total = tl.sum(masses)
            low = total & (SHARE_ALL - 1)
            wanted = tl.maximum((total >> SHARE_BITS) * top_p + ((low * top_p) >> SHARE_BITS), 1)
            by_mass = _smallest_kept(logits_ptr, vocab, largest, inverse, key, wanted, True, BLOCK)
            key = tl.maximum(key, by_mass)
    pivot = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(pivots_ptr + sample, pivot)


# --------------------------------------------------------------------------------------------------------------- draw


@triton.jit
def _draw_kernel(
    best_ptr,
    token_ptr,
    logits_ptr,
    maxima_ptr,
    pivots_ptr,
    rows_ptr,
    positions_ptr,
    reals_ptr,
    ints_ptr,
    vocab,
    blocks,
    LIMITED: tl.constexpr,
    RANDOM: tl.constexpr,
    GROUPS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    groups = block * GROUPS + tl.arange(0, GROUPS)
    number = tl.arange(0, 4)[None, :]
    ids = groups[:, None] * 4 + number
    score = _load_logits(logits_ptr + sample * vocab, ids, vocab)
    if RANDOM:
        row = tl.load(rows_ptr + sample).to(tl.int64)
        if tl.load(reals_ptr + row * REALS + TEMPERATURE) > 0:
            inverse = tl.load(reals_ptr + row * REALS + INVERSE_TEMPERATURE)
            log_min_p = tl.load(reals_ptr + row * REALS + LOG_MIN_P)
            z = _scaled(score, tl.load(maxima_ptr + sample), inverse)
            kept = (z >= log_min_p) & (ids < vocab)
            if LIMITED:
                kept = kept & (score >= tl.load(pivots_ptr + sample))
            position = tl.load(positions_ptr + sample)
            counter = groups.to(tl.uint32)
            zeros = counter * 0
            a, b, c, d = _philox(
                counter,
                zeros + position.to(tl.uint32),
                zeros + (position >> 32).to(tl.uint32),
                zeros + STREAM,
                tl.load(ints_ptr + row * INTS + KEY_LOW).to(tl.uint32),
                tl.load(ints_ptr + row * INTS + KEY_HIGH).to(tl.uint32),
            )
            left = tl.where(number == 0, a[:, None], b[:, None])
            right = tl.where(number == 2, c[:, None], d[:, None])
            words = tl.where(number < 2, left, right)
            score = tl.where(kept, z + _gumbel(words), float("-inf"))
    best = tl.max(tl.max(score, axis=1), axis=0)
    token = tl.min(tl.min(tl.where(score == best, ids, vocab), axis=1), axis=0)
    tl.store(best_ptr + sample * blocks + block, best)
    tl.store(token_ptr + sample * blocks + block, token)


@triton.jit
def _pick_kernel(tokens_ptr, best_ptr, token_ptr, maxima_ptr, vocab, blocks, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    at = sample * blocks + block
    score = tl.load(best_ptr + at, mask=block < blocks, other=float("-inf"))
    token = tl.load(token_ptr + at, mask=block < blocks, other=vocab)
    token = tl.min(tl.where(score == tl.max(score, axis=0), token, vocab), axis=0)
    tl.store(tokens_ptr + sample, tl.where(tl.load(maxima_ptr + sample) > float("-inf"), token, 0))


# ----------------------------------------------------------------------------------------------------------- launchers


def _shape(logits: Tensor) -> tuple[int, int]:
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.is_contiguous(), logits.stride()
    samples, vocab = logits.shape
    return samples, vocab


def edit_(logits: Tensor, rows: Tensor, positions: Tensor, columns: Columns) -> None:
    """See reference.edit_."""
    samples, vocab = _shape(logits)
    width = columns.edit_ids.shape[1]
    _edit_kernel[(samples,)](
        logits, rows, positions, columns.ints, columns.edit_ids, columns.edit_bias, columns.edit_until, width, vocab,
        BLOCK=EDIT_BLOCK, num_warps=1,
    )  # fmt: skip


def mask_(logits: Tensor, allowed: Tensor) -> None:
    """See reference.mask_."""
    samples, vocab = _shape(logits)
    assert allowed.dtype == torch.int32, allowed.dtype
    assert allowed.is_contiguous(), allowed.stride()
    grid = (samples, triton.cdiv(vocab, VOCAB_BLOCK))
    _mask_kernel[grid](logits, allowed, vocab, allowed.shape[1], BLOCK=VOCAB_BLOCK)


def penalise_(logits: Tensor, rows: Tensor, columns: Columns) -> None:
    """See reference.penalise_."""
    samples, vocab = _shape(logits)
    grid = (samples, triton.cdiv(vocab, VOCAB_BLOCK))
    _penalise_kernel[grid](
        logits, rows, columns.reals, columns.ints, columns.seen, vocab, BLOCK=VOCAB_BLOCK, enable_fp_fusion=False
    )


def pivots(logits: Tensor, rows: Tensor, columns: Columns, maxima: Tensor) -> Tensor:
    """See reference.pivots."""
    samples, vocab = _shape(logits)
    found = torch.empty(samples, dtype=torch.float32, device=logits.device)
    _pivot_kernel[(samples,)](
        found, logits, maxima, rows, columns.reals, columns.ints, vocab,
        BLOCK=PIVOT_BLOCK, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def draw(
    logits: Tensor, rows: Tensor, positions: Tensor, columns: Columns, maxima: Tensor, floor: Tensor | None, random: bool
) -> Tensor:
    """See reference.draw."""
    samples, vocab = _shape(logits)
    blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    best = torch.empty((samples, blocks), dtype=torch.float32, device=logits.device)
    token = torch.empty((samples, blocks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(samples, dtype=torch.int32, device=logits.device)
    _draw_kernel[(samples, blocks)](
        best, token, logits, maxima, maxima if floor is None else floor, rows, positions, columns.reals, columns.ints,
        vocab, blocks, LIMITED=floor is not None, RANDOM=random, GROUPS=VOCAB_BLOCK // 4, enable_fp_fusion=False,
    )  # fmt: skip
    _pick_kernel[(samples,)](
        tokens, best, token, maxima, vocab, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1
    )
    return tokens

