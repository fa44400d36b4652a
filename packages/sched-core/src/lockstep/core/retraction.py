"""Who gives pages back when the next decode does not fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.core.requests import Cohort, Int32s


def choose_victim(cohort: Cohort, positions: Int32s) -> int:
    """The member to retract: fewest output tokens first (least work lost), then the longest prompt (most pages back),
    then the newest. Index into the cohort, which must have at least two members: one always runs on.
    """
    outputs = positions - cohort.prompts
    return int(np.lexsort((-cohort.request_ids, -cohort.prompts, outputs))[0])


def members_growing(positions: Int32s, page_size: int) -> NDArray[np.intp]:
    """Members whose next token opens a new page: every one whose last page is exactly full. Indices into the cohort."""
    growing: NDArray[np.intp] = (positions & (page_size - 1) == 0).nonzero()[0]
    return growing
