"""Attention by FlashInfer: its paged prefill wrapper for rows that extend, its decode wrapper for the others.

Launches are planned from lengths on the host; only the page numbers are gathered on the device. Facts that shaped this
file (read in flashinfer/prefill.py, decode.py and attention/scheduler.cuh of 0.6.18.post1 and 0.7.2.post1):

- `plan` takes q_data_type float16 by default, and every argument after `page_size` by keyword only.
- `plan` fills a pinned buffer and copies it to the device without waiting. The next `plan` would overwrite the buffer
  while its copy still waits behind a running pass. `PinnedRing` prevents that.
- A wrapper for CUDA graphs belongs to one number of rows; its buffers, split workspace included, keep their addresses.
- With tensor cores the `plan` of a decode in 0.6.18 loops over the rows' lengths in Python, a microsecond and a half
  per row; in 0.7 it does not. Overlap hides this CPU time; at depth 0 it adds to the step.
- `plan` of a prefill copies lengths to the device. Those that it computes itself are not in pinned memory, so they are
  given (`seq_lens`).
- `backend="auto"` is FA3 on Hopper, and FA2 elsewhere; it never selects TensorRT-LLM's kernels. FA3 does not split the
  positions of a row, so decodes and short extends, such as drafts to verify, name FA2.
- The decode kernels without tensor cores support few group sizes, and no fixed split size.
- Rows with trees of drafts have a mask in bits, which only FA2 reads; FA3, TensorRT-LLM, cuDNN and cute-dsl have none.
  The `plan` of a prefill waits for the device to pack a `custom_mask`. With a `packed_custom_mask` it counts in
  elements where the mask of each row begins, and the kernel reads bytes: right for one row only. It also copies these
  numbers from pageable memory. So mask and beginnings are set behind `plan`, in the attributes that `run` reads.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.host.engine_options import Numerics
from lockstep.runtime.attention.tree_masks import packed_mask
from lockstep.runtime.draft_tree import shape_of, tree_rows
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.memory import MIB

WORKSPACE_BYTES_MIN = 256 << 20  # partial results of split KV; FlashInfer recommends 128 MiB or more
PLANS_IN_FLIGHT = 4  # plans made and not yet copied, unless a limit is given; a further plan waits for the device
TRIAL_ROWS = 2
NO_TENSOR_CORES_GROUP_MAX = 2  # heads per KV head up to which a decode is faster without tensor cores
SHORT_TILE_MAX = 64  # query rows of a KV head, of the row with the most, up to which an extend is split by positions


class FlashInferAttention:
    """FlashInfer's wrappers behind `AttentionBackend`."""

    name = "flashinfer"
    graphs = True
    exact_lengths = True  # its plan splits the pages of each row on the CPU

    def __init__(
        self,
        pool: KvPool,
        heads: int,
        scale: float | None = None,
        numerics: Numerics = "fast",
        graph_rows: int = 0,
        plans_in_flight: int = PLANS_IN_FLIGHT,
        workspace_bytes: int | None = None,
    ) -> None:
        """Args:
        heads: query heads, a multiple of the pool's KV heads.
        scale: factor of the scores before the softmax; head_dim ** -0.5 unless given.
        numerics: with `invariant` a decode has the same bits in every batch, because no row is split at all: pieces of
            a fixed size cannot be captured, and in a long prompt they need gigabytes of partial results. An extend has
            the same bits as long as the average number of new tokens in a batch selects the same query tile of
            FlashInfer. The Triton backend has pieces of a fixed size and no such condition.
        graph_rows: rows of the largest graph; 0 for none.
        plans_in_flight: two for each pass that extends, one for each other, over all batches in flight at a time.
        workspace_bytes: device memory for partial results; None: as much as these settings need.
        """
        import flashinfer

        self.pool, self.heads = pool, heads
        self.device = pool.keys[0].device
        self.flashinfer = flashinfer
        if workspace_bytes is None:
            needed = workspace_needed(heads, pool.kv_heads, pool.head_dim, graph_rows, multiprocessors(self.device))
            workspace_bytes = max(WORKSPACE_BYTES_MIN, needed)
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self.device)
        self.tensor_cores = numerics == "invariant" or heads // pool.kv_heads > NO_TENSOR_CORES_GROUP_MAX
        self.options: dict[str, Any] = {
            "sm_scale": pool.head_dim**-0.5 if scale is None else scale,
            "q_data_type": pool.dtype,
            "kv_data_type": pool.keys[0].dtype,
        }
        if numerics == "invariant":
            self.options["disable_split_kv"] = True
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self.prefill = self.short = prefill(self.workspace, "NHD", backend="fa2")
        if numerics == "fast":
            self.prefill = prefill(self.workspace, "NHD", backend="auto")
        self.extending = self.prefill
        self.masked: Any = None  # of rows with trees of drafts; made on first use
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=self.tensor_cores, backend="fa2"
        )
        self.decode_graphs: dict[int, Any] = {}  # by number of rows
        self.active = self.decode
        self.ring = PinnedRing(self.decode._pin_memory_int_workspace_buffer, plans_in_flight)

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Plan the prefill wrapper for the rows that extend, and the decode wrapper for the others.

        Raises: ValueError if `graph` is set and rows extend.
        """
        if graph and batch.extend_rows:
            raise ValueError(f"a CUDA graph holds decodes only, got {batch.extend_rows} rows that extend")
        heads = (self.heads, self.pool.kv_heads, self.pool.head_dim, self.pool.page_size)
        count = batch.extend_rows if batch.tree is None else batch.tree.first
        if count:
            spans = self._extends(batch, 0, count)
            new = batch.lengths_host[:count] - batch.starts_host[:count]
            short = int(new.max()) * self.heads // self.pool.kv_heads <= SHORT_TILE_MAX
            self.extending = self.short if short else self.prefill
            self.ring.plan(self.extending, *spans[0], *heads, causal=True, seq_lens=spans[1], **self.options)
        if batch.tree is not None:
            self._plan_trees(batch, heads)
        count = batch.extend_rows
        if count < batch.count:
            self.active = self._for_graph(batch) if graph else self.decode
            self.ring.plan(self.active, *self._pages(batch, count, batch.count), *heads, **self.options)

    def _plan_trees(self, batch: ForwardBatch, heads: tuple[int, ...]) -> None:
        """Plan the rows with trees, each with its mask."""
        assert batch.tree is not None
        if self.masked is None:
            prefill = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self.masked = prefill(self.workspace, "NHD", backend="fa2")
        spans, lengths = self._extends(batch, batch.tree.first, batch.count)
        self.ring.plan(self.masked, *spans, *heads, causal=False, seq_lens=lengths, **self.options)
        self.masked._custom_mask_buf, self.masked._mask_indptr_buf = packed_mask(batch)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend; see `AttentionBackend.run`."""
        self.pool.write(layer, key, value, batch)
        paged = (self.pool.keys[layer], self.pool.values[layer])
        query = query.contiguous()
        out = torch.empty_like(query)
        decodes = batch.count - batch.extend_rows
        first = batch.tokens - decodes  # the first token of rows that decode
        scales: dict[str, float] = {}
        if self.pool.fp8:
            scales["k_scale"], scales["v_scale"] = self.pool.scales[layer]
        trees = first if batch.tree is None else first - len(batch.tree.numbers)
        if trees:
            self.extending.run(query[:trees], paged, out=out[:trees], **scales)
        if trees < first:
            self.masked.run(query[trees:first], paged, out=out[trees:first], **scales)
        if decodes:
            self.active.run(query[first:], paged, out=out[first:], **scales)
        return out

    def _for_graph(self, batch: ForwardBatch) -> Any:
        """Return the decode wrapper for graphs of this number of rows; made on first use."""
        count = batch.count
        if count not in self.decode_graphs:
            ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
            self.decode_graphs[count] = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self.tensor_cores,
                paged_kv_indptr_buffer=torch.zeros(count + 1, **ints),
                paged_kv_indices_buffer=torch.zeros(count * batch.page_table.shape[1], **ints),
                paged_kv_last_page_len_buffer=torch.zeros(count, **ints),
                backend="fa2",
            )
        return self.decode_graphs[count]

    def _extends(self, batch: ForwardBatch, first: int, stop: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the first token and the pages of rows [first:stop) in FlashInfer's layout, and their lengths."""
        new = batch.lengths_host[first:stop] - batch.starts_host[first:stop]
        indptr = self._pinned(np.concatenate([[0], np.cumsum(new)]))
        return (indptr, *self._pages(batch, first, stop)), self._pinned(batch.lengths_host[first:stop])

    def _pages(self, batch: ForwardBatch, first: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pages of rows [first:stop) in FlashInfer's layout.

        Returns: indptr [rows + 1] on the CPU; page numbers on the device; used slots of last pages [rows] on the CPU.
            All int32.
        """
        lengths = batch.lengths_host[first:stop]
        counts = -(-lengths // self.pool.page_size)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        last = (lengths - 1) % self.pool.page_size + 1
        # For each page: its row and its index in that row, flat over the page table. Only the rows of the table are not
        # on the host.
        total = int(indptr[-1])
        lengths_there = batch.lengths[first:stop]
        counts_there = (lengths_there + (self.pool.page_size - 1)) // self.pool.page_size
        row = torch.repeat_interleave(counts_there, output_size=total)  # with the size given, the device is not queried
        before = torch.cumsum(counts_there, 0) - counts_there
        place = torch.arange(total, device=self.device) - before[row]
        pages = batch.page_table[batch.rows[first:stop][row], place]
        return self._pinned(indptr), pages, self._pinned(last)

    def _pinned(self, numbers: NDArray[np.integer]) -> Tensor:
        """Return int32 numbers on the CPU in pinned memory: a copy from pageable memory may wait for the stream."""
        tensor = torch.from_numpy(numbers.astype(np.int32))
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


def multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a device; 1 for the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def workspace_needed(heads: int, kv_heads: int, head_dim: int, graph_rows: int, sms: int) -> int:
    """Return the bytes of partial results that a plan may need.

    Each piece of a split, a tile of query heads and tokens with a part of the positions, stores [tile, head_dim] values
    and a sum for each of its rows, in fp32. Without a graph there are at most as many pieces as fill the device twice.
    In a graph there are as many as the tiles of any lengths of the rows could need.

    Args:
        graph_rows: rows of the largest graph; 0 for none.
        sms: streaming multiprocessors of the device.
    Source: PrefillSplitQOKVIndptr and PrefillPlan in FlashInfer's scheduler.cuh.
    """
    group = heads // kv_heads
    filling = max(1, 2 * sms // kv_heads)

    def pieces_bytes(pieces: int, tile: int) -> int:
        return heads * pieces * tile * (head_dim + 1) * 4 + 2 * 16  # both arrays begin at multiples of 16

    needed = pieces_bytes(filling, 128)
    if graph_rows:
        tile = 16 if group <= 16 else 64 if group <= 64 else 128
        tiles = -(-graph_rows * group // tile) + graph_rows - 1
        needed = max(needed, pieces_bytes(max(filling, tiles), tile))
    return -(-needed // MIB) * MIB


class PinnedRing:
    """Pinned buffers for plans that are being copied to the device.

    Hazard: `plan` n + 1 writes the pinned buffer that the copy of plan n, behind a running pass, has still to read.
    Closed by a ring of buffers: a buffer is used again only after the event behind its last copy.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        self.buffers = [torch.empty_like(like, pin_memory=like.is_pinned()) for _ in range(count)]
        self.copied = [torch.cuda.Event() for _ in self.buffers]
        self.turn = 0

    def plan(self, wrapper: Any, *args: Any, **options: Any) -> None:
        """Run `wrapper.plan` with the next buffer of the ring."""
        self.turn = (self.turn + 1) % len(self.buffers)
        self.copied[self.turn].synchronize()  # returns at once if nothing was recorded
        wrapper._pin_memory_int_workspace_buffer = self.buffers[self.turn]
        wrapper.plan(*args, **options)
        self.copied[self.turn].record()


def try_out(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    group: int,
    numerics: Numerics,
    graphs: bool,
    fp8: bool = False,
) -> bool:
    """Load every kernel that a model of this kind needs, and run each once: an extend beside a decode, then decodes.

    Args:
        group: query heads of the one KV head.
        graphs: also plan as for a CUDA graph; nothing is captured.
        fp8: whether KV is stored in fp8.
    Returns: whether all results are right.
    Raises: any exception of FlashInfer.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        pool = KvPool(1, 4, page_size, 1, head_dim, dtype, device, [(0.5, 0.25)] if fp8 else None)
        workspace = workspace_needed(group, 1, head_dim, TRIAL_ROWS, multiprocessors(device))
        backend = FlashInferAttention(pool, group, numerics=numerics, workspace_bytes=workspace)
        for new, graph in ((2, False), (1, False), *([(1, True)] if graphs else [])):
            batch = _two_rows(np.array([new, 1], np.int32), page_size, device)
            ones = torch.ones(batch.tokens, 1, head_dim, dtype=dtype, device=device)
            backend.plan(batch, graph)
            out = backend.run(0, ones.expand(-1, group, -1), ones, ones, batch)
            if not torch.equal(out, torch.ones_like(out)):  # all values are one, so every weighted mean is one
                return False
    return True


def masks_hold(
    device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int, group: int, fp8: bool = False
) -> bool:
    """Return whether two rows with trees of drafts attend to their paths; arguments are those of `try_out`.

    Values are numbers of slots, so that each result is the mean of the slots on a path.
    """
    counts = np.array([5, 4], np.int32)
    pages = -(-int(counts.max()) // page_size)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        pool = KvPool(1, 2 * pages, page_size, 1, head_dim, dtype, device, [(0.5, 0.25)] if fp8 else None)
        workspace = workspace_needed(group, 1, head_dim, TRIAL_ROWS, multiprocessors(device))
        backend = FlashInferAttention(pool, group, workspace_bytes=workspace)
        batch = _two_rows(counts, page_size, device)
        batch.tree = tree_rows(0, np.zeros(2, np.int32), counts, shape_of(np.array([0, 0, 1, 2], np.int32)))
        sees = batch.tree.shape.sees[batch.tree.numbers]
        means = (sees * np.arange(sees.shape[1])).sum(1) / sees.sum(1)
        value = torch.tensor(batch.tree.numbers.tolist(), dtype=dtype, device=device)[:, None, None]
        value = value.expand(-1, 1, head_dim).contiguous()
        backend.plan(batch)
        found = backend.run(0, torch.ones_like(value).expand(-1, group, -1), torch.zeros_like(value), value, batch)
        expected = torch.tensor(means.tolist(), dtype=torch.float64, device=device)[:, None, None]
        return bool(torch.allclose(found.double(), expected.expand_as(found), atol=0.02, rtol=0.01))


def _two_rows(counts: NDArray[np.int32], page_size: int, device: torch.device) -> ForwardBatch:
    """Return a batch of two rows with these numbers of new tokens, each from position 0 and on its own pages.

    A row with one token decodes if it is the second.
    """
    pages = -(-int(counts.max()) // page_size)
    positions = torch.cat([torch.arange(count, device=device) for count in counts.tolist()])
    slots = positions.clone()
    slots[int(counts[0]) :] += pages * page_size
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return ForwardBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=slots,
        rows=torch.arange(2, **ints),
        indptr=torch.tensor([0, *np.cumsum(counts)], **ints),
        lengths=torch.tensor(counts.tolist(), **ints),
        page_table=torch.arange(2 * pages, **ints).view(2, pages),
        logits_at=positions[:0],
        extend_rows=int((counts > 1).sum()),
        starts_host=np.zeros(2, np.int32),
        lengths_host=counts,
    )
