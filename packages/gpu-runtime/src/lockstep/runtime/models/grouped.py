"""One product for grouped rows, each row with the matrix of its group: torch reference and kernel selection.

    rows       [ a a a ][ c c ][ d d d d ]      groups a, b, c, d end to end; b has none
    ends         3 3 5 9                        int32, on the device; not read by the CPU
    weights    [groups, outputs, inputs]

On Hopper and B200 bfloat16 uses torch's grouped product, one CUTLASS kernel. For other dtypes and GPUs torch would copy
the ends to the CPU and wait. They use our own kernel, `grouped_kernel.py`, if Triton works.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime import triton_trial

TORCH_CAPABILITIES = ((9, 0), (10, 0))  # Hopper and B200, for which it is compiled; not the RTX cards of 12.0
ALIGNED = 16  # alignment in bytes that torch's kernel requires of the rows of both operands


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row with the matrix of its group.

    Args:
        rows: [rows, inputs], groups end to end. weights: [groups, outputs, inputs].
        ends: int32 [groups], on the same device: group g is rows [ends[g - 1]:ends[g]). Rows behind the last
            end are not computed.
    Returns: [rows, outputs]; rows behind the last end have any values.
    """
    if rows.device.type != "cuda":
        return grouped_linear_reference(rows, weights, ends)
    if has_torch_kernel(rows, weights):
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    if triton_trial.unavailable_because(rows.device) is not None:
        return grouped_linear_reference(rows, weights, ends)
    from lockstep.runtime.models.grouped_kernel import grouped_linear_triton

    return grouped_linear_triton(rows, weights, ends)


def grouped_linear_reference(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute the grouped product group by group; reads the ends of the groups from the device."""
    starts = [0, *ends.tolist()]
    parts = [
        F.linear(rows[start:stop], weight)
        for weight, start, stop in zip(weights.unbind(), starts, starts[1:], strict=False)
        if start != stop
    ]
    parts.append(rows.new_zeros(len(rows) - starts[-1], weights.shape[1]))
    return torch.cat(parts)


def has_torch_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Return whether torch computes this product without a copy to the CPU."""
    aligned = all(size * rows.element_size() % ALIGNED == 0 for size in weights.shape[1:])
    here = torch.cuda.get_device_capability(rows.device)
    return rows.dtype == torch.bfloat16 and aligned and here in TORCH_CAPABILITIES
