"""Retraction: which request loses its pages when the next decode does not fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests.rules import length_key, opens_page, pages_between
from lockstep.core.requests.table import Int32s, Request, RunningBatch

LEAST = -(2**63)
"""The importance of a request without a priority."""


def importance(request: Request, config: SchedConfig) -> int:
    """Return the key by which the policy `priority` orders requests; the larger goes first."""
    value = request.priority if request.priority is not None else config.default_priority_value
    if value is None:
        return LEAST
    return -value if config.schedule_low_priority_values_first else value


# mechanism: retraction (decided)
def choose_victim(config: SchedConfig, running_batch: RunningBatch, positions: Int32s) -> int:
    """Return the index of the member to retract. The running batch must have at least two members: one runs on.

    length    fewest output tokens first (least work lost), then the longest prompt (most pages freed), then the newest
    newest    the member that joined last, as in vLLM; the members before it keep their positions in the batch
    priority  the least important first; among equally important ones by the rule of `length`
    """
    if config.retraction_policy == "newest":
        return running_batch.size - 1
    key = length_key(positions - running_batch.prompts, running_batch.prompts, running_batch.request_ids)
    by_length: list[int] = np.lexsort(key[::-1]).tolist()
    if config.retraction_policy == "length":
        return by_length[0]
    return min(by_length, key=lambda i: importance(running_batch.requests[i], config))


def goes_before(split: Request, running_batch: RunningBatch, config: SchedConfig) -> bool:
    """Return whether the chunked request `split` is to be retracted before any member of the running batch."""
    if config.retraction_policy == "priority":
        return importance(split, config) < min(importance(member, config) for member in running_batch.requests)
    return config.retraction_policy == "newest"


def pages_ahead(
    running_batch: RunningBatch, positions: Int32s, page_size: int, steps: int, spare: Int32s | None = None
) -> int:
    """Return the pages that the next `steps` decodes open, for each member only up to its last computed position.

    Args:
        spare: int32 [members], pages that each member holds already behind those of its positions; None: none.
    """
    reach = np.minimum(positions + steps, running_batch.limits - 1)
    opening = pages_between(positions, reach, page_size)
    if spare is not None:
        opening = np.maximum(opening - spare, 0)
    return int(opening.sum())


def pages_to_come(positions: Int32s, limits: Int32s, page_size: int, spare: Int32s | None = None) -> int:
    """Return the pages that the members of a running batch open if they run to their limits.

    Args:
        positions: int32 [n], the next position of each member.
        limits: int32 [n], positions of prompt and output together at which each ends by length.
        spare: int32 [n], pages that each member holds already behind those of its positions; None: none.
    """
    opening = pages_between(positions, limits - 1, page_size)
    if spare is not None:
        opening = np.maximum(opening - spare, 0)
    return int(opening.sum())


def members_growing(positions: Int32s, page_mask: Int32s) -> NDArray[np.intp]:
    """Return the indices of members with an exactly full last page: their next token opens a new page.

    Args:
        positions: int32 [members], the next position of each member.
        page_mask: int32 [], the page size minus 1.
    """
    growing: NDArray[np.intp] = opens_page(positions, page_mask).nonzero()[0]
    return growing
