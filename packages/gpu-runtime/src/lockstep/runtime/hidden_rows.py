"""Which new tokens of a pass have requested hidden states."""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import BatchPlan, HiddenSpan
from lockstep.runtime.tables import DeviceTables, ForwardPass


def hidden_wanted(plan: BatchPlan, one: ForwardPass, tables: DeviceTables) -> list[tuple[int, int, int]]:
    """Return the rows of a pass with requested hidden states, as (row, first token, stop) in the pass's new tokens."""
    decodes_from = one.extend_rows - (0 if one.verifying is None else len(one.verifying.rows))
    decoding = tables.with_hidden_states[one.rows[decodes_from:]]
    if not plan.hidden_spans and not decoding.any():
        return []
    indptr = one.indptr
    spans: tuple[HiddenSpan, ...] = plan.hidden_spans
    found = [
        (span.index, int(indptr[span.index]) + span.start - int(one.starts[span.index]), int(indptr[span.index + 1]))
        for span in spans
    ]
    found += [(i, int(indptr[i]), int(indptr[i + 1])) for i in (np.flatnonzero(decoding) + decodes_from).tolist()]
    return found
