"""Matrices in the layout of this processor's products, packed once instead of in every product.

oneDNN reads a plain bfloat16 matrix column by column into blocks before it multiplies: with one row that takes as long
as the product itself. Packed matrices lie beside the plain ones, which updates of weights, adapters and embeddings use;
so they need the size of the matrices once more. Whatever changes the plain ones calls `pack` again.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from lockstep.runtime.memory import MIB, free_bytes_of
from lockstep.runtime.processor import multiplies_bfloat16

log = logging.getLogger("lockstep.runtime")

ROWS = 32  # for which oneDNN chooses the layout; others of one row to a thousand are as fast with it
SHARE = 0.25  # of the free memory that packed matrices may take


class PackedMatrix:
    """A matrix [outputs, inputs], multiplied from its packed copy if there is one."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._packed: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the packed copy; 0 without."""
        return 0 if self._packed is None else self.weight.numel() * self.weight.element_size()

    def pack(self) -> None:
        """Make the packed copy of the present values."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def unpack(self) -> None:
        """Drop the packed copy."""
        self._packed = None

    def linear(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply, [tokens, inputs] to [tokens, outputs]."""
        if self._packed is None or not len(hidden):
            return nn.functional.linear(hidden, self.weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, bias, "none", [], "")
        return out


def pack_matrices(model: nn.Module) -> int:
    """Pack the matrices of a model, if it runs on this processor in bfloat16 and the memory suffices.

    Called again after weights were changed. Returns the bytes of all packed copies.
    """
    found = _matrices(model)
    of_kind = [one for one in found if one.weight.dtype == torch.bfloat16 and one.weight.device.type == "cpu"]
    if not of_kind or not multiplies_bfloat16():
        return 0
    needed = sum(one.weight.numel() * one.weight.element_size() for one in of_kind)
    free = free_bytes_of(torch.device("cpu"))
    if not any(one.bytes for one in of_kind) and free is not None and needed > free * SHARE:
        log.info("matrices are not packed: %.0f MiB more, and %.0f MiB of memory are free", needed / MIB, free / MIB)
        return 0
    with torch.no_grad():
        for one in of_kind:
            one.pack()
    return packed_bytes(model)


def unpack_matrices(model: nn.Module) -> bool:
    """Drop the packed copies. Returns whether there were any."""
    there = packed_bytes(model) > 0
    for one in _matrices(model):
        one.unpack()
    return there


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's packed copies."""
    return sum(one.bytes for one in _matrices(model))


def _matrices(model: nn.Module) -> list[PackedMatrix]:
    found = (getattr(module, "packed", None) for module in model.modules())
    return [one for one in found if isinstance(one, PackedMatrix)]
