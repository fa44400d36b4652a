"""Triton kernels of sampling. Each has the same results, to the bit, as the function of that name in reference.py.

Logits are float32 [samples, vocab], row-major. Settings are columns by request row (table.py), which the kernels read
directly, so that a sample needs no gather. Kernels over all logits run on a grid of (sample, block of the vocabulary):

    edit       one program per sample, over its list of biased and banned ids
    mask       bit t % 32 of word t // 32 allows token t
    penalise   reads `seen` of rows that have a slot
    pivot      one program per sample: the smallest logit that top-k and top-p keep, without a sort. One pass over
               the row collects its candidates, those at least exp(-10) as likely as the likeliest. A binary search
               by two bits of the float at a time, 16 passes for each of the two, then reads only these. If they are
               too many, or too few to contain the answer, it reads the whole row.
    draw       scaled logit plus Gumbel noise, argmax of a block; then `pick`, argmax over the blocks

No result depends on a block size: maxima do not depend on the order, counts and masses are integers, and all float
arithmetic is compiled with `enable_fp_fusion=False`, because a fused multiply-add would round differently from torch.
"""

# Upper case names are compile-time constants, as in Triton's own kernels. mypy cannot check the types of kernels.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.runtime.sampling import numerics, philox, reference, table
from lockstep.runtime.sampling.table import SamplingColumns

VOCAB_BLOCK = 1024
PIVOT_BLOCK = 2048
CANDIDATES_MAX = 16384
"""Candidates stored of one row, 64 KiB."""
EDIT_BLOCK = 32

ANYWHERE = ["rows_ptr", "positions_ptr"]
"""Parts of a packed plan, which begin at any address: see attention/kernels.py."""

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

CANDIDATE_Z: tl.constexpr = tl.constexpr(-10.0)
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
    """Return logits, with -inf for NaN and behind the vocabulary."""
    logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


# ------------------------------------------------------------------------------------------------------------- changes


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ANYWHERE)
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
        # Not minimum(), which would turn a NaN of the model into a number.
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


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
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
    """Return int32 in the order of the floats; -0.0 equals 0.0."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _share(total, share):
    low = total & (SHARE_ALL - 1)
    return tl.maximum((total >> SHARE_BITS) * share + ((low * share) >> SHARE_BITS), 1)


@triton.jit
def _smallest_kept(logits_ptr, vocab, largest, inverse, least_key, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least key t for which the tokens with larger keys, from `least_key` on, count or weigh below `wanted`.

    Two bits per pass: the rest is divided into four equal parts, and the part with t follows from the sums above the
    first three. The sum above a part's last key falls from part to part.
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


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _pivot_kernel(
    pivots_ptr,
    candidates_ptr,
    logits_ptr,
    maxima_ptr,
    rows_ptr,
    reals_ptr,
    ints_ptr,
    vocab,
    candidates_max,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    temperature = tl.load(reals_ptr + row * REALS + TEMPERATURE)
    inverse = tl.load(reals_ptr + row * REALS + INVERSE_TEMPERATURE)
    top_k = tl.load(ints_ptr + row * INTS + TOP_K)
    top_p = tl.load(ints_ptr + row * INTS + TOP_P)
    largest = tl.load(maxima_ptr + sample)
    logits_ptr += sample * vocab
    candidates_ptr += sample * candidates_max
    key = tl.full((), KEY_OF_MINUS_INFINITY, tl.int32)
    # Rows without an answer (NaN, or nothing allowed) are not searched: their token is 0 in any case.
    if (temperature > 0) & (largest > float("-inf")) & ((top_k < vocab) | (top_p < SHARE_ALL)):
        masses = tl.zeros((BLOCK,), tl.int64)
        near = tl.zeros((BLOCK,), tl.int64)
        found = top_p.to(tl.int32) * 0
        for start in range(0, vocab, BLOCK):
            logits = _load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab)
            z = _scaled(logits, largest, inverse)
            weight = _mass(z)
            masses += weight
            candidate = z >= CANDIDATE_Z
            near += tl.where(candidate, weight, 0)
            taken = candidate.to(tl.int32)
            at = found + tl.cumsum(taken, axis=0) - taken
            tl.store(candidates_ptr + at, logits, mask=candidate & (at < candidates_max))
            found += tl.sum(taken)
        # Other threads wrote what this thread is about to read.
        tl.debug_barrier()
        total = tl.sum(masses)
        enough = tl.where(top_k < vocab, found >= top_k, tl.sum(near) >= _share(total, top_p)) & (
            found <= candidates_max
        )
        source = tl.where(enough, candidates_ptr, logits_ptr)
        count = tl.where(enough, found, vocab)
        if top_k < vocab:
            key = _smallest_kept(source, count, largest, inverse, key, top_k, False, BLOCK)
            key = tl.maximum(key, KEY_OF_MINUS_INFINITY)
            masses = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, count, BLOCK):
                logits = _load_logits(source, start + tl.arange(0, BLOCK), count)
                masses += tl.where(_keys(logits) >= key, _mass(_scaled(logits, largest, inverse)), 0)
            total = tl.sum(masses)
        if top_p < SHARE_ALL:
            by_mass = _smallest_kept(source, count, largest, inverse, key, _share(total, top_p), True, BLOCK)
            key = tl.maximum(key, by_mass)
    pivot = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(pivots_ptr + sample, pivot)


# --------------------------------------------------------------------------------------------------------------- draw


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
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


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels support tensors of this device."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def _shape(logits: Tensor) -> tuple[int, int]:
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.is_contiguous(), logits.stride()
    samples, vocab = logits.shape
    return samples, vocab


def edit_(logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> None:
    """Launch the kernel of `reference.edit_`."""
    samples, vocab = _shape(logits)
    width = columns.edit_ids.shape[1]
    _edit_kernel[(samples,)](
        logits, rows, positions, columns.ints, columns.edit_ids, columns.edit_bias, columns.edit_until, width, vocab,
        BLOCK=EDIT_BLOCK, num_warps=1,
    )  # fmt: skip


def mask_(logits: Tensor, allowed: Tensor) -> None:
    """Launch the kernel of `reference.mask_`."""
    samples, vocab = _shape(logits)
    assert allowed.dtype == torch.int32, allowed.dtype
    assert allowed.is_contiguous(), allowed.stride()
    grid = (samples, triton.cdiv(vocab, VOCAB_BLOCK))
    _mask_kernel[grid](logits, allowed, vocab, allowed.shape[1], BLOCK=VOCAB_BLOCK)


def penalise_(logits: Tensor, rows: Tensor, columns: SamplingColumns) -> None:
    """Launch the kernel of `reference.penalise_`."""
    samples, vocab = _shape(logits)
    grid = (samples, triton.cdiv(vocab, VOCAB_BLOCK))
    _penalise_kernel[grid](
        logits, rows, columns.reals, columns.ints, columns.seen, vocab, BLOCK=VOCAB_BLOCK, enable_fp_fusion=False
    )


def pivots(logits: Tensor, rows: Tensor, columns: SamplingColumns, maxima: Tensor) -> Tensor:
    """Launch the kernel of `reference.pivots`."""
    samples, vocab = _shape(logits)
    found = torch.empty(samples, dtype=torch.float32, device=logits.device)
    kept = min(vocab, CANDIDATES_MAX)
    candidates = torch.empty((samples, kept), dtype=torch.float32, device=logits.device)
    _pivot_kernel[(samples,)](
        found, candidates, logits, maxima, rows, columns.reals, columns.ints, vocab, kept,
        BLOCK=PIVOT_BLOCK, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    maxima: Tensor,
    floor: Tensor | None,
    random: bool,
) -> Tensor:
    """Launch the kernels of `reference.draw`."""
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


# --------------------------------------------------------------------------------------------------------- as a script


def check_and_time(samples: int, vocab: int, device: str = "cuda", repeats: int = 20) -> dict[str, float]:
    """Compare each kernel with its reference, to the bit, then time it.

    Rows are a mix: greedy, plain, top-k, top-p, both with min-p; the first half have penalties and a bias, too.
    Returns: microseconds by kernel; all 0 on a CPU, where only the comparison is made.
    Raises: AssertionError with the name of the kernel that differs.
    """
    from lockstep.core.contract.events import SamplingParams

    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1, top_k=40),
        SamplingParams(temperature=1, top_p=0.95),
        SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05),
    )
    settings = table.SamplingTable(samples, vocab, device)
    for row in range(samples):
        kind = msgspec.structs.replace(kinds[row % len(kinds)], seed=row)
        if row < (samples + 1) // 2:
            kind = msgspec.structs.replace(kind, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((0, 1.0),))
        settings.take_row(row, kind, range(0, vocab, 7), range(0, vocab, 11))
    settings.flush()
    columns = settings.columns
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn((samples, vocab), generator=generator, device=device) * 3
    words = (samples, (vocab + 31) // 32)
    allowed = torch.randint(-(2**31), 2**31, words, generator=generator, device=device).to(torch.int32)
    rows = torch.arange(samples, dtype=torch.int32, device=device)
    positions = torch.arange(samples, device=device) + vocab

    changes: dict[str, Callable[[ModuleType, Tensor], None]] = {
        "edit_": lambda module, given: module.edit_(given, rows, positions, columns),
        "penalise_": lambda module, given: module.penalise_(given, rows, columns),
        "mask_": lambda module, given: module.mask_(given, allowed),
    }
    this = sys.modules[__name__]
    for name, change in changes.items():
        expected = logits.clone()
        change(reference, expected)
        change(this, logits)
        assert torch.equal(logits, expected), f"{name} differs from its reference"
    maxima = logits.amax(1)
    floor = pivots(logits, rows, columns, maxima)
    for first in range(0, samples, 16):  # the reference makes several int64 copies of the logits
        part = slice(first, first + 16)
        few, of_rows, at, largest = logits[part].contiguous(), rows[part], positions[part], maxima[part]
        wanted = reference.pivots(few, of_rows, columns, largest)
        assert torch.equal(floor[part], wanted), "pivots differ from their reference"
        token = reference.draw(few, of_rows, at, columns, largest, wanted, True)
        assert torch.equal(draw(few, of_rows, at, columns, largest, wanted, True), token), "draw differs from its own"

    timed: dict[str, Callable[[], object]] = {
        name: functools.partial(change, this, logits) for name, change in changes.items()
    }
    timed["amax"] = lambda: logits.amax(1)
    timed["pivots"] = lambda: pivots(logits, rows, columns, maxima)
    timed["draw"] = lambda: draw(logits, rows, positions, columns, maxima, floor, True)
    timed["draw greedy"] = lambda: draw(logits, rows, positions, columns, maxima, None, False)
    return {name: _microseconds(run, repeats) if device == "cuda" else 0.0 for name, run in timed.items()}


def _microseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the mean time on the device in microseconds, after one launch for compilation."""
    run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return 1000 * float(start.elapsed_time(stop)) / repeats


if __name__ == "__main__":
    if torch.cuda.is_available():
        for batch in (1, 16, 64, 256):
            times = check_and_time(batch, 151_936)
            print(batch, "samples:", ", ".join(f"{name} {us:.0f} us" for name, us in times.items()))
    else:  # TRITON_INTERPRET=1
        check_and_time(5, 1500, "cpu")
        print("5 samples: every kernel equals its reference")
