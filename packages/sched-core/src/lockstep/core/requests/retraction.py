"""Which request gives pages back when the next decode does not fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests.table import ZERO, Int32s, Request, RunningBatch

LEAST = -(2**63)
"""The importance of a request without a priority."""


def importance(request: Request, config: SchedConfig) -> int:
    """What requests are ordered by under policy priority; the larger goes first."""
    value = request.priority if request.priority is not None else config.default_priority_value
    if value is None:
        return LEAST
    return -value if config.schedule_low_priority_values_first else value


def choose_victim(config: SchedConfig, running_batch: RunningBatch, positions: Int32s) -> int:
    """The member to retract. Index into the cohort, which must have at least two members: one always runs on.

    length    fewest output tokens first (least work lost), then the longest prompt (most pages back), then the newest
    newest    the latest to join, as vLLM: those before it keep their places
    priority  the least important first, and of these as under length
    """
    if config.retraction_policy == "newest":
        return running_batch.size - 1
    by_length: list[int] = np.lexsort(
        (-running_batch.request_ids, -running_batch.prompts, positions - running_batch.prompts)
    ).tolist()
    if config.retraction_policy == "length":
        return by_length[0]
    return min(by_length, key=lambda i: importance(running_batch.requests[i], config))


def goes_before(split: Request, running_batch: RunningBatch, config: SchedConfig) -> bool:
    """Whether the request whose prompt is split is to be retracted before any member of the cohort."""
    if config.retraction_policy == "priority":
        return importance(split, config) < min(importance(member, config) for member in running_batch.requests)
    return config.retraction_policy == "newest"


def pages_ahead(
    running_batch: RunningBatch, positions: Int32s, page_size: int, steps: int, spare: Int32s | None = None
) -> int:
    """Pages that the next `steps` decodes open, of each member only as far as its last token needs.

    `spare`: pages that each member holds already behind those of its positions, int32 [members]; None: none.
    """
    reach = np.minimum(positions + steps, running_batch.limits - 1)
    opening = -(-reach // page_size) + (-positions // page_size)
    if spare is not None:
        opening = np.maximum(opening - spare, 0)
    return int(opening.sum())


def pages_to_come(positions: Int32s, limits: Int32s, page_size: int) -> int:
    """Pages that these requests will still open if they run to their limits. int32 [n] both; columns of a cohort."""
    return int((-(-(limits - 1) // page_size) + (-positions // page_size)).sum())


def members_growing(positions: Int32s, page_mask: Int32s) -> NDArray[np.intp]:
    """Members whose next token opens a new page: every one whose last page is exactly full. Indices into the cohort.

    `page_mask` is one less than the page size, without dimensions.
    """
    growing: NDArray[np.intp] = (positions & page_mask == ZERO).nonzero()[0]
    return growing
