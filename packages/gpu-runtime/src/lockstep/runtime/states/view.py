"""The states of one pass: where rows begin, and where they store what they leave.

A row's new tokens are computed in segments. A segment ends where the row stores a checkpoint, and a row that verifies
drafts has one for each token. Segments of equal length that nothing orders are computed together, as a group.

    row 0   a a a a|a a           a checkpoint behind its fourth token: segments of 4 and 2 tokens
    row 1   b b b b               4
    row 2   c                     1                        groups: (row 2), (rows 0 and 1), then (row 0 again)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.runtime.states.pool import StateTensors


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Segments that are computed together.

    Args:
        length: tokens of each segment.
        tokens: int64 [segments * length], their new tokens in the pass, segment by segment; None: all, in order.
        reads: int64 [segments], slots of the states in front of them.
        writes: int64 [segments], slots of the states behind them.
        fresh: the segments begin requests: the states in `reads` are zeros.
        kept: int64 [k], segments whose state is stored a second time, ...
        kept_in: int64 [k], ... in these slots.
    """

    length: int
    tokens: Tensor | None
    reads: Tensor
    writes: Tensor
    fresh: bool = False
    kept: Tensor | None = None
    kept_in: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateView:
    """The states of one pass.

    Args:
        begins: int64 [rows], slots of the states with which the rows begin.
        groups: in the order in which they are computed.
        copies: sources and targets, int64 [n] each, of copies behind the pass: checkpoints of rows that verify drafts.
    """

    pool: StateTensors
    begins: Tensor
    groups: list[StateGroup] = field(default_factory=list)
    copies: tuple[Tensor, Tensor] | None = None
