"""Experts whose copies lie in slots on ranks: which slot computes a token, and moves of weights between ranks.

    expert      0    1    2    3          2 ranks with 3 slots each; the load of expert 2 is shared by two copies
    slots       0    1    3 5  4 2        token t of expert e goes to copy t modulo the copies of e

The tables are tensors with a fixed address, so that CUDA graphs read the placement that is in force. Moves go to the
stream of the passes, behind the launched ones: a pass sees a layer before its move or behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.cluster.expert_placement import unbalanced
from lockstep.runtime.models.layers import AllToAll

Int32s = NDArray[np.int32]


class ExpertSlots:
    """The placement of one layer's experts, as one rank sees it.

    Args:
        slots: of all ranks.
    """

    def __init__(self, experts: int, slots: int, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.experts, self.each = rank, ranks, experts, slots // ranks
        self.placement: Int32s = unbalanced(experts, slots=slots, gpus=ranks)[0]
        self._copies = torch.zeros(experts, dtype=torch.int64, device=device)
        self._slots = torch.zeros((experts, slots - experts + 1), dtype=torch.int64, device=device)
        self.use(self.placement)

    @property
    def own(self) -> Int32s:
        """The expert in each slot of this rank."""
        return self.placement[self.rank * self.each : (self.rank + 1) * self.each]

    def use(self, placement: Int32s) -> None:
        """Route tokens by this placement from now on, int32 [slots]."""
        self.placement = placement
        slots = np.zeros(tuple(self._slots.shape), np.int64)
        copies = np.zeros(self.experts, np.int64)
        for slot, expert in enumerate(placement.tolist()):
            slots[expert, copies[expert]] = slot
            copies[expert] += 1
        device = self._slots.device
        self._slots.copy_(_sent(slots, device))
        self._copies.copy_(_sent(copies, device))

    def slots_of(self, experts: Tensor, first: int = 0) -> Tensor:
        """Return the slot that computes each expert of each token, int64 [tokens, k], among those of all ranks.

        Args:
            first: number of the first token, if the tokens are a share of more.
        """
        tokens = torch.arange(first, first + len(experts), device=experts.device)[:, None]
        return self._slots[experts, tokens % self._copies[experts]]


def move_experts(slots: ExpertSlots, placement: Int32s, weights: Sequence[Tensor], all_to_all: AllToAll) -> None:
    """Bring this rank's experts into the slots of a new placement. All ranks call it at the same place of the stream.

    An expert comes from a slot of this rank, if one has it; otherwise from the rank of its first copy.

    Args:
        placement: int32 [slots].
        weights: of this rank, [slots of a rank, ...] each; their content is replaced.
    """
    each, ranks = slots.each, slots.ranks
    had = slots.placement.reshape(ranks, each)
    wanted = placement.reshape(ranks, each)
    first = {int(expert): slot // each for slot, expert in reversed(list(enumerate(slots.placement)))}
    lacks = [[one for one in dict.fromkeys(wanted[rank].tolist()) if one not in had[rank]] for rank in range(ranks)]
    places = {int(expert): place for place, expert in reversed(list(enumerate(had[slots.rank])))}
    sent = [[places[one] for one in lacks[rank] if first[one] == slots.rank] for rank in range(ranks)]
    from_ranks = [[one for one in lacks[slots.rank] if first[one] == rank] for rank in range(ranks)]
    sends, receives = [len(one) for one in sent], [len(one) for one in from_ranks]
    at = _sent(np.array([place for one in sent for place in one], np.int64), weights[0].device)
    came = {one: number for number, one in enumerate(one for part in from_ranks for one in part)}
    changed = [place for place in range(each) if had[slots.rank][place] != wanted[slots.rank][place]]
    for weight in weights:
        got = all_to_all(weight.index_select(0, at).flatten(1), sends, receives)
        kept = weight.clone() if changed else weight  # slots are written that others are copied from
        for place in changed:
            expert = int(wanted[slots.rank][place])
            source = got[came[expert]].view_as(weight[place]) if expert in came else kept[places[expert]]
            weight[place].copy_(source)
    slots.use(placement)


def _sent(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return an array on a device, behind the launched work and without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
