"""Logarithm and exponential with equal results, bit for bit, on every backend.

A token is the argmax of floats, so backends draw the same token only if they compute the same floats. The log and exp
of libraries differ in the last bits between processors, and a sum depends on its order. Therefore

- log and exp are polynomials of additions and multiplications, each rounded separately (IEEE 754, to nearest). Eager
  torch computes them so; the kernels are compiled without contraction to fused multiply-adds;
- sums over the vocabulary are integers: probabilities in units of 2**-40 of the largest one. The sum of integers does
  not depend on the order, so a nucleus does not depend on the batch, on block sizes or on the number of threads.

The coefficients are least squares at Chebyshev nodes, rounded to float32. Relative errors, measured over 200 001 points
against float64: -log(1 - t) 8e-8 for |t| <= 1/3, 2**x 8e-8 for x in [0, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_TAIL = (
    0.5, 0.33333271741867065, 0.24999839067459106, 0.2000732272863388, 0.16678093373775482, 0.1405421793460846,
    0.12219617515802383, 0.13756538927555084, 0.12734152376651764,
)  # fmt: skip
"""-log(1 - t) = t + t * t * (LOG_TAIL[0] + LOG_TAIL[1] * t + ...)."""

EXP2 = (
    1.0, 0.6931469440460205, 0.2402305006980896, 0.05548042804002762, 0.009684580378234386, 0.0012387821916490793,
    0.00021877505059819669,
)  # fmt: skip
"""2**x = EXP2[0] + EXP2[1] * x + ..."""

LN2 = 0.6931471824645996  # to float32
LOG2E = 1.4426950216293335
TWO_THIRDS_BITS = 0x3F2AAAAB  # of the float32 2/3: mantissas are taken from [2/3, 4/3)
THIRD_WORD = 0x55555555  # a third of 2**32
UNIT = 2.0**-32

MASS_BITS = 40
"""A probability equal to the largest is the integer 2**40; below 2**-40 of the largest it is 0."""
MANTISSA_BITS = 22
MASS_EXPONENT_MIN = -60.0  # below, the mass is 0 and a shift would be too long
SHARE_BITS = 24
"""top_p is stored as an integer number of 2**-24, the resolution of float32 below 1."""

GUMBEL_MAX = 22.9  # the largest number drawn: -log(-log(1 - 2**-33))


def log_polynomial(t: Tensor) -> Tensor:
    """Return -log(1 - t), |t| <= 1/3, float32."""
    tail = torch.full_like(t, LOG_TAIL[-1])
    for coefficient in LOG_TAIL[-2::-1]:
        tail = tail * t + coefficient
    return t * t * tail + t


def negative_log(x: Tensor) -> Tensor:
    """Return -log(x) of float32 x > 0, not denormal."""
    bits = x.view(torch.int32)
    exponent = (bits - TWO_THIRDS_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return log_polynomial(1.0 - mantissa) - exponent.to(torch.float32) * LN2


def gumbel(words: Tensor) -> Tensor:
    """Return standard Gumbel numbers, float32, from uniform words in [0:2**32), int64.

    With v = (word + 1/2) / 2**32 a number is -log(-log(1 - v)). Large numbers, which decide an argmax, result from
    small v, for which a float has the finest resolution.
    """
    v = (words.to(torch.float32) + 0.5) * UNIT
    rest = ((0xFFFFFFFF - words).to(torch.float32) + 0.5) * UNIT  # 1 - v, but not rounded to 0 where v is near 1
    small = words < THIRD_WORD
    return negative_log(torch.where(small, log_polynomial(torch.where(small, v, 0.0)), negative_log(rest)))


def mass(z: Tensor) -> Tensor:
    """Return exp(z) of z <= 0 in units of 2**-40, int64."""
    power = (z * LOG2E).clamp(min=MASS_EXPONENT_MIN)
    whole = power.floor()
    fraction = power - whole
    mantissa = torch.full_like(fraction, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        mantissa = mantissa * fraction + coefficient
    fixed = (mantissa * float(1 << MANTISSA_BITS)).to(torch.int64)
    return (fixed << (MASS_BITS - MANTISSA_BITS)) >> (-whole).to(torch.int64)


def share_of(total: Tensor, share: Tensor) -> Tensor:
    """Return floor(total * share / 2**24), at least 1, within int64: totals are below 2**59."""
    low = total & ((1 << SHARE_BITS) - 1)
    return ((total >> SHARE_BITS) * share + ((low * share) >> SHARE_BITS)).clamp(min=1)
