"""Lines by which the kernel computes the time of decodes, so that it need not ask the cost model for each batch.

For a fixed number of rows, a cost model with `decode_bends` is convex in the context between two bends. A convex
function lies below its chord, and if it is within e of the middle of the chord, it is within 2 e of all of it. So three
times of the cost model itself show over which contexts a line is the cost model, up to LINE_ERROR_US.

    time |           .-'      line    low, high   contexts for which it holds
         |        .-'                 us at low
         |     .-'                    us per token of context
         +----low--------high---

Times are rounded to microseconds, and a line that is nearly exact rounds like the cost model except beside the middle
of two microseconds. There the kernel asks the cost model. So a run is equal to the core's, to the last digit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost import BatchShape, CostModel, DecodeBends
from lockstep.sim.fast.state import LINE_ERROR_US

Line = tuple[float, float, float, float]
NO_LINE: Line = (0.0, -1.0, 0.0, 0.0)  # not looked for yet
NEVER: Line = (0.0, -2.0, 0.0, 0.0)  # none was found


def no_lines(engines: int, rows: int) -> NDArray[np.float64]:
    """Return the lines before the first batch, float64 [engines, rows + 1, 4]."""
    return np.tile(NO_LINE, (engines, rows + 1, 1))


def line_for(cost: CostModel, line: NDArray[np.float64], rows: int, context_tokens: int, longest: int) -> None:
    """Replace the line of decodes of `rows` requests if it does not hold for the present context.

    Args:
        context_tokens: of all rows together.
        longest: tokens of the longest request.
    """
    if line[0] <= context_tokens <= line[1] or line[1] == NEVER[1]:
        return
    bends = cost.decode_bends(rows) if isinstance(cost, DecodeBends) else None
    line[:] = NEVER if bends is None else _line_at(cost, bends, rows, context_tokens, rows * longest)


def _line_at(cost: CostModel, bends: tuple[int, ...], rows: int, context_tokens: int, most: int) -> Line:
    """Return a line that holds for a context, over the longest of the tried ranges; NEVER if there is none."""

    def us(context: int) -> float:
        shape = BatchShape(decode_rows=rows, decode_context_tokens=context, sampled_rows=rows)
        return cost.batch_us(shape).mean_us

    low = max((bend for bend in bends if bend <= context_tokens), default=0)
    high = min((bend for bend in bends if bend > context_tokens), default=max(most, context_tokens + 1))
    while high - low > 1:
        middle = (low + high) // 2
        at_low, at_middle, at_high = us(low), us(middle), us(high)
        slope = (at_high - at_low) / (high - low)
        if abs(at_low + slope * (middle - low) - at_middle) < LINE_ERROR_US / 8:
            return float(low), float(high), at_low, slope
        low, high = (low, middle) if context_tokens <= middle else (middle, high)
    return NEVER
