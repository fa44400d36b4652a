"""The states of all layers, by slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

StateKind = Literal["conv", "recurrent"]
StateKey = tuple[int, StateKind, int]
"""Layer, kind of state, and its number among those of its kind in the layer."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of the state of one row in one layer.

    Args:
        kind: the last inputs of a short convolution, or the sum that a recurrence carries.
        shape: of one row, on this rank.
    """

    layer: int
    kind: StateKind
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> StateKey:
        """What identifies the part in a model."""
        return self.layer, self.kind, self.number

    @property
    def bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


def slot_bytes_of(parts: Sequence[StatePart]) -> int:
    """Return the bytes of one slot: the state of one row in all layers."""
    return sum(part.bytes for part in parts)


class StateTensors:
    """States by part and slot: [slots, *shape] each. Slot numbers are those of the plans."""

    def __init__(self, parts: Sequence[StatePart], slots: int, device: torch.device) -> None:
        self.parts, self.slots = tuple(parts), slots
        self.tensors: dict[StateKey, Tensor] = {
            part.key: torch.zeros((slots, *part.shape), dtype=part.dtype, device=device) for part in parts
        }

    def clear(self, slots: Tensor) -> None:
        """Fill slots, int64 [n], with zeros: the state before the first token."""
        for tensor in self.tensors.values():
            tensor.index_fill_(0, slots, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots, int64 [n] each. No slot is both a source and a target."""
        for tensor in self.tensors.values():
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def release(self) -> None:
        """Free the memory; its content is lost."""
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocate the memory again; its content is undefined."""
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def clear_all(self) -> None:
        """Fill all slots with zeros."""
        for tensor in self.tensors.values():
            tensor.zero_()
