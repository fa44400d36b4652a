"""What weights, activations and KV take of a device, and how many pages the pool gets.

| other processes | weights | activations of the largest pass |       KV pages        |  left alone  |
|<-------------------------- mem_fraction of the device --------------------------->|
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.core.errors import ConfigError

CPU_KV_BYTES = 256 << 20  # where nobody says how many pages there shall be
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on one device."""

    total: int  # of the device; 0 for the CPU
    others: int  # in use before anything of ours
    weights: int
    activations: int  # of the largest pass, as measured
    page: int  # of one KV page, in all layers
    pages: int

    @property
    def kv(self) -> int:
        """All pages, the scratch page with them."""
        return (self.pages + 1) * self.page

    def table(self) -> str:
        """For a person, at start."""
        rows = [("weights", self.weights), ("activations", self.activations), ("KV pages", self.kv)]
        if self.total:
            left = self.total - self.others - sum(size for _, size in rows)
            rows = [("other processes", self.others), *rows, ("left alone", left)]
        lines = [f"{name:16}{size / MIB:10,.0f} MiB" for name, size in rows]
        return "\n".join([*lines, f"{self.pages:,} pages of {self.page / 1024:,.1f} KiB"])


def size_pool(
    *,
    page_bytes: int,
    weight_bytes: int,
    device: torch.device,
    mem_fraction: float,
    largest_pass: Callable[[], object],
    pages_least: int,
) -> MemoryBudget:
    """How many pages fit.

    Args:
        mem_fraction: of the device's memory that may be taken in all, other processes included.
        largest_pass: runs one, so that its peak can be seen; called on CUDA devices only.
        pages_least: what one request of the longest kind needs.
    Raises: ConfigError with the numbers if not even that fits.
    """
    if not 0.0 < mem_fraction <= 1.0:
        raise ConfigError(f"`mem_fraction` must be above 0 and at most 1, got `{mem_fraction}`\nhint: 0.9 is usual")
    if device.type != "cuda":
        return MemoryBudget(0, 0, weight_bytes, 0, page_bytes, max(pages_least, CPU_KV_BYTES // page_bytes - 1))
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest_pass()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    others = total - free - ours
    room = int(total * mem_fraction) - others - ours - activations
    budget = MemoryBudget(total, others, weight_bytes, activations, page_bytes, max(room // page_bytes - 1, 0))
    if budget.pages < pages_least:
        raise ConfigError(
            f"`mem_fraction` {mem_fraction} of {device} leaves {budget.pages:,} KV pages, but the longest request "
            f"needs {pages_least:,}\n{budget.table()}\n"
            "hint: a larger mem_fraction, a shorter context_tokens_max, or a smaller model"
        )
    return budget
