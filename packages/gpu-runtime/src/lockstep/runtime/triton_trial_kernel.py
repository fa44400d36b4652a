"""The smallest kernel: what is compiled and run to see whether Triton works here at all."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16


@triton.jit
def add_one_kernel(numbers, sums, SIZE, BLOCK: tl.constexpr):
    """One program."""
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    tl.store(sums + at, tl.load(numbers + at, mask=inside, other=0.0) + 1.0, mask=inside)


def add_one(numbers: Tensor) -> Tensor:
    """float32 [up to BLOCK], contiguous; the same plus one."""
    assert len(numbers) <= BLOCK, numbers.shape
    sums = numbers.new_empty(len(numbers))
    add_one_kernel[(1,)](numbers, sums, len(numbers), BLOCK=BLOCK)
    return sums
