"""How weights, activations, graphs and KV share a device's memory, and how many pages the pool gets.

| other processes | weights | activations of the largest pass | CUDA graphs |       KV pages        |  left alone  |
|<--------------------------------- mem_fraction of the device ----------------------------------->|
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.core.contract.errors import ConfigError

CPU_KV_BYTES = 256 << 20  # if no number of pages is given
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on one device."""

    total: int  # memory of the device; 0 for the CPU
    others: int  # in use before this process, the driver's own included
    weights: int
    activations: int  # of the largest pass, as measured, with the workspace of the attention backend
    graphs: int  # CUDA graphs, extrapolated from the two largest
    page: int  # one KV page, in all layers
    pages: int

    @property
    def kv(self) -> int:
        """Bytes of all pages, the scratch page included."""
        return (self.pages + 1) * self.page

    def table(self) -> str:
        """Return the budget as a table in text, for the log."""
        rows = [("weights", self.weights), ("activations", self.activations), ("KV pages", self.kv)]
        if self.total:
            rows.insert(2, ("CUDA graphs", self.graphs))
            left = self.total - self.others - sum(size for _, size in rows)
            rows = [("other processes", self.others), *rows, ("left alone", left), ("the device", self.total)]
        lines = [f"{name:16}{size / MIB:10,.0f} MiB" for name, size in rows]
        return "\n".join([*lines, f"{self.pages:,} pages of {self.page / 1024:,.1f} KiB"])


def taken_bytes(device: torch.device) -> int:
    """Return the used bytes of a GPU, by all processes, with torch's cache emptied; 0 for the CPU.

    Waits for the device.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def free_bytes_of(device: torch.device) -> int | None:
    """Return the free bytes of a device's memory; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


MEMORY_ERROR_TEXTS = (
    "out of memory",  # CUDA's own, for memory that torch does not allocate
    "can't allocate memory",  # torch's allocator on a CPU
    "ALLOC_FAILED",  # cuBLAS, cuDNN and others, which keep a workspace
    "Storage size calculation overflowed",
)
"""Texts that mark a lack of memory in a RuntimeError that is not an OutOfMemoryError."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_ERROR_TEXTS)


@contextmanager
def explained(what: str, device: torch.device, hint: str) -> Iterator[None]:
    """Turn a lack of memory at start into a ConfigError with the numbers.

    Args:
        what: what needs the memory, e.g. `the weights`.
        hint: what to change.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        numbers = ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            ours = torch.cuda.memory_allocated(device)
            numbers = (
                f": of {total / MIB:,.0f} MiB of {device}, {ours / MIB:,.0f} were ours by then and "
                f"{free / MIB:,.0f} free; the rest is other processes' and kept by the allocator"
            )
        elif (free_bytes := free_bytes_of(device)) is not None:
            numbers = f": {free_bytes / MIB:,.0f} MiB of memory are free"
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"there is no room for {what}{numbers}\n{reason}\nhint: {hint}") from error


def size_pool(
    *,
    page_bytes: int,
    weight_bytes: int,
    device: torch.device,
    mem_fraction: float,
    largest_pass: Callable[[], object],
    graphs: Callable[[], int],
    pages_least: int,
    pages: int | None = None,
) -> MemoryBudget:
    """Return how many pages fit, and the sizes of everything else.

    Args:
        mem_fraction: share of the device's memory that may be used in all, other processes included.
        largest_pass: runs the largest pass, whose peak is measured; called on CUDA devices only, like `graphs`.
        graphs: returns the expected bytes of CUDA graphs.
        pages_least: pages of one request of the largest length.
        pages: the requested number; the other sizes are measured all the same.
    Raises: ConfigError with the numbers if `pages_least` pages do not fit, or the requested `pages`.
    """
    if not 0.0 < mem_fraction <= 1.0:
        raise ConfigError(f"`mem_fraction` must be above 0 and at most 1, got `{mem_fraction}`\nhint: 0.9 is usual")
    if device.type != "cuda":
        here = max(pages_least, CPU_KV_BYTES // page_bytes - 1) if pages is None else pages
        budget = MemoryBudget(0, 0, weight_bytes, 0, 0, page_bytes, here)
        free_bytes = free_bytes_of(device)
        if free_bytes is not None and budget.kv > free_bytes:  # the system may overcommit
            what = "the longest request" if pages is None else f"`pages` {pages:,}"
            hint = (
                "a shorter context_tokens_max"
                if pages is None
                else f"{max(free_bytes // page_bytes - 1, 0):,} would fit"
            )
            raise ConfigError(
                f"{what} needs {budget.kv / MIB:,.0f} MiB of KV, but {free_bytes / MIB:,.0f} MiB of memory are free\n"
                f"{budget.table()}\nhint: {hint}"
            )
        return budget
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with explained("the largest pass", device, "a smaller chunked_prefill_size or max_running_requests"):
        largest_pass()
        torch.cuda.synchronize(device)
        activations = torch.cuda.max_memory_allocated(device) - before
        graph_bytes = graphs()
    taken = taken_bytes(device)
    _, total = torch.cuda.mem_get_info(device)
    others = taken - torch.cuda.memory_reserved(device)
    use = Use(taken, others, weight_bytes, activations, graph_bytes)
    if pages is not None:
        return as_asked(use, int(total), page_bytes, pages, str(device))
    return fitted(use, int(total), mem_fraction, page_bytes, pages_least, str(device))


@dataclass(frozen=True, slots=True)
class Use:
    """Measured bytes of a device before the pool is made."""

    taken: int  # by all processes, weights included
    others: int  # by other processes
    weights: int
    activations: int  # not allocated yet
    graphs: int  # not allocated yet


def fitted(use: Use, total: int, mem_fraction: float, page_bytes: int, pages_least: int, device: str) -> MemoryBudget:
    """Return a budget with the rest of `mem_fraction` of `total` bytes as pages; one of them is scratch.

    Raises: ConfigError with the numbers if `pages_least` do not fit.
    """
    room = int(total * mem_fraction) - use.taken - use.activations - use.graphs
    pages = max(room // page_bytes - 1, 0)
    budget = MemoryBudget(total, use.others, use.weights, use.activations, use.graphs, page_bytes, pages)
    if pages < pages_least:
        lacking = (pages_least + 1) * page_bytes - room
        raise ConfigError(
            f"`mem_fraction` {mem_fraction} of {device} leaves {pages:,} KV pages, but the longest request needs "
            f"{pages_least:,}: {lacking / MIB:,.0f} MiB are lacking\n{budget.table()}\n"
            "hint: a larger mem_fraction, a shorter context_tokens_max, fewer graphs (cuda_graph_max_batch, "
            "piecewise_graph_max_tokens), or a "
            "smaller model"
        )
    return budget


def as_asked(use: Use, total: int, page_bytes: int, pages: int, device: str) -> MemoryBudget:
    """Return a budget with the requested number of pages, out of all `total` bytes of the device.

    Raises: ConfigError with the numbers if they do not fit.
    """
    budget = MemoryBudget(total, use.others, use.weights, use.activations, use.graphs, page_bytes, pages)
    room = total - use.taken - use.activations - use.graphs
    if budget.kv > room:
        raise ConfigError(
            f"`pages` {pages:,} do not fit on {device}: {(budget.kv - room) / MIB:,.0f} MiB are lacking\n"
            f"{budget.table()}\nhint: {max(room // page_bytes - 1, 0):,} would; without `pages` as many are made as fit"
        )
    return budget
