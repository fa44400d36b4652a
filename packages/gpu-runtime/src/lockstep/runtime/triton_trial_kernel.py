"""The smallest kernel, which is compiled and run to test whether Triton works."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16


@triton.jit
def add_one_kernel(numbers, sums, SIZE, BLOCK: tl.constexpr):
    """Add one to each number. One program."""
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    tl.store(sums + at, tl.load(numbers + at, mask=inside, other=0.0) + 1.0, mask=inside)


def add_one(numbers: Tensor) -> Tensor:
    """Add one to each number, float32 [up to BLOCK], contiguous."""
    assert len(numbers) <= BLOCK, numbers.shape
    sums = numbers.new_empty(len(numbers))
    add_one_kernel[(1,)](numbers, sums, len(numbers), BLOCK=BLOCK)
    return sums
