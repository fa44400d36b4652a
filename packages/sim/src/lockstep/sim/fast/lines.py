"""Lines by which the kernel computes the times of most batches, without a call of the cost model for each.

For decodes of a fixed number of rows, and for extends of one prompt by a fixed number of tokens, a cost model with
`ContextBends` is convex in the context between two bends. A convex function lies below its chord, and if it is within e
of the middle of the chord, it is within 2 e of all of it. So three times of the cost model itself show over which
contexts a line is the cost model, up to LINE_ERROR_US.

    time |           .-'      line    low, high   contexts for which it holds
         |        .-'                 us at low
         |     .-'                    us per token of context
         +----low--------high---      tokens      of an extend; 0: decodes

Times are rounded to microseconds, and a line that is nearly exact rounds like the cost model except beside the middle
of two microseconds. There the cost model is called. So a run is equal to the core's, to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost import BatchShape, ContextBends, CostModel, extend_shape
from lockstep.sim.fast.state import LINE_ERROR_US

CHUNK = 0  # the place of the line for extends; that for decodes is their number of rows
NEVER = -2.0  # as `high`: no line was found, and none is looked for again
Bounds = tuple[float, float, float, float]


def no_lines(engines: int, rows: int) -> NDArray[np.float64]:
    """Return the lines before the first batch, float64 [engines, rows + 1, 5]."""
    return np.tile((0.0, -1.0, 0.0, 0.0, 0.0), (engines, rows + 1, 1))


def line_for(cost: CostModel, lines: NDArray[np.float64], shape: BatchShape, longest: int) -> None:
    """Replace the line for a batch of this shape if it does not hold for its context.

    Args:
        lines: of one engine, float64 [rows + 1, 5].
        longest: tokens of the longest request.
    """
    rows, tokens = shape.decode_rows, shape.extend_tokens
    if not shape.extend_rows:
        _replace(cost, lines[rows], shape.decode_context_tokens, rows * longest, rows, 0)
    elif shape.extend_rows == 1 and not rows and not shape.sampled_rows:
        line = lines[CHUNK]
        if line[4] != tokens:
            line[:] = 0.0, -1.0, 0.0, 0.0, tokens  # the next extend by as many tokens has a line
        else:
            _replace(cost, line, shape.extend_context_tokens, longest, 0, tokens)


def _replace(
    cost: CostModel, line: NDArray[np.float64], context_tokens: int, most: int, rows: int, tokens: int
) -> None:
    """Replace a line of decodes of `rows` requests, or of an extend by `tokens`, unless it holds for a context."""
    if line[0] <= context_tokens <= line[1] or line[1] == NEVER:
        return
    line[1] = NEVER
    if isinstance(cost, ContextBends):
        bends = cost.decode_bends(rows) if rows else cost.chunk_bends(tokens)
        if bends is not None:
            line[:4] = _line_at(lambda context: _us(cost, rows, tokens, context), bends, context_tokens, most)


def _us(cost: CostModel, rows: int, tokens: int, context_tokens: int) -> float:
    if rows:
        shape = BatchShape(decode_rows=rows, decode_context_tokens=context_tokens, sampled_rows=rows)
    else:
        shape = extend_shape(tokens, context_tokens, sampled=False)
    return cost.batch_us(shape).mean_us


def _line_at(us: Callable[[int], float], bends: tuple[int, ...], context_tokens: int, most: int) -> Bounds:
    """Return a line that holds for a context, over the longest of the tried ranges; with NEVER if there is none."""
    low = max((bend for bend in bends if 0 <= bend <= context_tokens), default=0)
    high = min((bend for bend in bends if bend > context_tokens), default=max(most, context_tokens + 1))
    while high - low > 1:
        middle = (low + high) // 2
        at_low, at_middle, at_high = us(low), us(middle), us(high)
        slope = (at_high - at_low) / (high - low)
        if abs(at_low + slope * (middle - low) - at_middle) < LINE_ERROR_US / 8:
            return float(low), float(high), at_low, slope
        low, high = (low, middle) if context_tokens <= middle else (middle, high)
    return 0.0, NEVER, 0.0, 0.0
