"""Products as a GPU makes them, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest


def mend_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's `tl.dot` multiply bfloat16, and give a row the same bits at any position in its tile.

    The interpreter keeps bfloat16 in uint16, and multiplies these as integers. It passes a tile to numpy's BLAS,
    which on some processors (OPENBLAS_CORETYPE=Haswell or Zen) sums the rows at a tile's end in another order.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot
    handle = interpreter.TensorHandle

    def rows_of(tile: interpreter.TensorHandle, axis: int) -> interpreter.TensorHandle:
        data, dtype = tile.data, tile.dtype.scalar
        if dtype == tl.bfloat16:
            data, dtype = (data.astype(np.uint32) << 16).view(np.float32), tl.float32
        return handle(np.expand_dims(data, axis), dtype)

    def create_dot(self, a, b, d, *precision):
        rows = plain(self, rows_of(a, -2), rows_of(b, -3), rows_of(d, -2), *precision)
        return handle(rows.data[..., 0, :], rows.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
