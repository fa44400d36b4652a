"""Attention by our own Triton kernels: any page size, any number of heads per KV head, head dims up to 256."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from lockstep.host.engine_options import Numerics
from lockstep.runtime.attention import kernels
from lockstep.runtime.attention.residency import Machine, machine_of, programs_of
from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.attention.tree_masks import TreePaths, paths_of
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool

LOG2_E = log2(2.718281828459045)
PIECE = 1024  # positions per separately summed piece with `numerics="invariant"`; a multiple of every BLOCK_N
PROGRAMS_PER_SM = 4  # of `attend_split` without a GPU; with one, as many as the compiled kernel allows
ITEMS_PER_ROW_MAX = 128
AHEAD = 8  # parts that `merge` loads at a time
ROWS = 128  # rows whose items a program of `attend_split` searches at a time
REGISTERS_MAX = 255  # of a thread, on every GPU from Ampere on
SPLIT_TILE_MAX = 64  # query rows of a tile up to which an extend is split like a decode


@dataclass(frozen=True, slots=True)
class Tiling:
    """Block sizes and resources of one launch; see the picture in `kernels`."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def positions_per_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Return BLOCK_N. All kernels use the same, since the order of additions depends on it."""
    if dtype.itemsize > 2:
        return 16 if head_dim > 64 else 32  # products without tensor cores keep both operands in registers
    return 32 if head_dim > 128 else 64


def decode_tiling(head_dim: int, dtype: torch.dtype, group: int) -> Tiling:
    """Return the tiling of a decode: small tiles and several stages of loads, so that programs share an SM.

    A decode is bound by memory bandwidth.
    """
    block_m = max(16, triton.next_power_of_2(group))
    return Tiling(block_m, positions_per_tile(head_dim, dtype), 4, 3 if dtype.itemsize == 2 else 2)


def split_tiling(head_dim: int, dtype: torch.dtype, group: int, most_new: int, numerics: Numerics) -> Tiling | None:
    """Return the tiling of rows whose positions are divided; None if their new tokens do not fit one tile.

    With `invariant` numerics a row keeps the tile of the kernel that would take it undivided.
    """
    if most_new == 1:
        return decode_tiling(head_dim, dtype, group)
    if numerics == "invariant" and dtype.itemsize <= 2:
        tiling = extend_tiling(head_dim, dtype, group, most_new, numerics)
        return tiling if most_new * group <= tiling.BLOCK_M else None
    if most_new * group > (SPLIT_TILE_MAX if dtype.itemsize <= 2 else 16):
        return None
    return decode_tiling(head_dim, dtype, most_new * group)


def extend_tiling(
    head_dim: int, dtype: torch.dtype, group: int, most_new: int, numerics: Numerics, warpgroups: bool = True
) -> Tiling:
    """Return the tiling of an extend, which arithmetic bounds: as many query rows as registers hold and tokens fill.

    Args:
        warpgroups: whether the GPU multiplies by groups of warps (Hopper, B200), with operands in shared memory. On
            others they are in registers too, and tiles of 64 positions would spill.

    From 64 rows on, Hopper and Blackwell use other tensor-core instructions. With `invariant` numerics an extend keeps
    to those of a decode, so that a token has the same bits whether it was decoded or extended.
    """
    block_n = positions_per_tile(head_dim, dtype)
    if dtype.itemsize > 2:  # no tensor cores in full fp32: registers are the limit
        decode = decode_tiling(head_dim, dtype, group)
        return replace(decode, num_stages=1) if numerics == "invariant" else replace(decode, num_warps=8)
    if numerics == "invariant":
        return Tiling(max(16 if head_dim > 128 else 32, triton.next_power_of_2(group)), block_n, 4, 2)
    block_m = min(max(16, triton.next_power_of_2(most_new * group)), 64 if head_dim > 128 else 128)
    if head_dim > 64 and not warpgroups:
        block_n = min(block_n, 32)
    return Tiling(block_m, block_n, 8 if block_m == (64 if head_dim > 128 else 128) else 4, 3)


def registers_max(tiling: Tiling, head_dim: int, dtype: torch.dtype, numerics: Numerics, *, decode: bool) -> int | None:
    """Return the registers of a thread that a kernel is compiled for; None: as many as the assembler chooses.

    With `invariant` numerics it would choose too few for some kernels and spill, so that one more program fits a
    multiprocessor. A number lets it use all of them, so the others have none: benchmarks/results/kernel_resources.csv.
    """
    if numerics == "fast" or dtype.itemsize > 2:
        return None
    if tiling.BLOCK_M > 16:
        return REGISTERS_MAX
    return 128 if decode and head_dim <= 64 else None


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a pass, [first:first + count), whose positions are divided over several programs."""

    first: int
    count: int
    most_new: int  # new tokens of the row with the most
    tiling: Tiling
    items: int  # programs for each KV head, at most
    cells: int  # parts of one KV head, at most
    divided: dict[int, Tensor]  # by window, 0 for none: what `kernels.divide` writes
    paths: TreePaths | None = None  # of rows with trees


def divide_reference(units: NDArray[np.integer], slots: int, most: int) -> tuple[int, NDArray[np.integer]]:
    """Divide rows into items of about equal size, for a GPU that runs `slots` items at once.

    Two ways are compared by a bound of the longest time, in units that one program after another reads:

      even      all items at once, none larger than necessary: the size of an item; with more rows than slots a row is
                an item, and the bound is the mean of a slot and the longest row
      smaller   two items for each slot, of equal size; a row that is shorter is one item: 3/2 of the mean of a slot

    The smaller ones are taken if they are faster by more than a fifth, since each item adds a part to merge.

    Args:
        units: [rows], tiles or pieces of each row, at least 1.
        most: items of one row.
    Returns: units of an item; [rows], items of each row.
    """
    total, longest = int(units.sum()), int(units.max(initial=1))
    if len(units) > slots:
        even, cost = longest, longest + -(-total // slots)
    else:
        even, high = -(-total // slots), longest
        while even < high:
            middle = (even + high) // 2
            if int((-(-units // middle)).sum()) <= slots:
                high = middle
            else:
                even = middle + 1
        cost = even
    each = even if cost * slots * 8 <= total * 15 else -(-total // (2 * slots))
    each = max(each, -(-longest // most), 1)
    return each, -(-units // each)


class TritonAttention:
    """The kernels of `kernels.py` as an `AttentionBackend`."""

    name = "triton"
    graphs = True
    exact_lengths = False  # only grids and tiles depend on them

    def __init__(
        self,
        pool: KvPool,
        heads: int,
        scale: float | None = None,
        numerics: Numerics = "fast",
        piece: int = PIECE,
        rules: Sequence[LayerRules] = (),
    ) -> None:
        """Args:
        heads: query heads, a multiple of the pool's KV heads.
        scale: factor of the scores before the softmax; head_dim ** -0.5 unless given.
        numerics: with `invariant` a token has the same bits in every batch, chunk and graph.
        piece: positions per piece with `invariant`, a multiple of 64.
        rules: attention of each layer, in place of `scale`; empty: all positions, with `scale`.
        """
        if heads % pool.kv_heads:
            raise ValueError(f"`heads` must be a multiple of the {pool.kv_heads} KV heads, got `{heads}`")
        if piece <= 0 or piece % 64:
            raise ValueError(f"`piece` must be a positive multiple of 64, got `{piece}`")
        self.pool, self.heads, self.numerics = pool, heads, numerics
        self.group = heads // pool.kv_heads
        self.scale = pool.head_dim**-0.5 if scale is None else scale
        self.rules = tuple(rules) or (LayerRules(self.scale),) * len(pool.keys)
        self.piece = piece if numerics == "invariant" else 0
        device = pool.keys[0].device
        self.machine: Machine | None = machine_of(device) if device.type == "cuda" else None
        self.sms = 1 if self.machine is None else self.machine.sms
        self.warpgroups = self.machine is None or self.machine.warpgroups
        self.block_d = max(16, triton.next_power_of_2(pool.head_dim))
        # A graph reads its workspace and division at their addresses at capture, so these are never freed.
        self.workspace = torch.empty(0, dtype=torch.float32, device=device)
        self.graph_workspaces: list[Tensor] = []
        self.graph_divisions: dict[tuple[int, int], Tensor] = {}  # by number of rows and window
        self.windows = sorted({rule.window or 0 for rule in self.rules})
        self.extends: Split | None = None
        self.decodes: Split | None = None
        self.trees: Split | None = None
        self.paths: TreePaths | None = None  # of the rows with trees; None: the pass has none
        self._resident: dict[tuple[Tiling, int], int] = {}

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Divide the positions of rows with few new tokens if that fills the device, with room for their parts.

        Raises: ValueError if `graph` is set and rows extend.
        """
        if graph and batch.extend_rows:
            raise ValueError(f"a CUDA graph holds decodes only, got {batch.extend_rows} rows that extend")
        self.paths = None if batch.tree is None else paths_of(batch, self.windows)
        trees = batch.extend_rows if batch.tree is None else batch.tree.first
        self.extends = self._split(batch, 0, trees, graph=False)
        self.trees = None if self.paths is None else self._split(batch, trees, batch.count, self.paths, graph=False)
        self.decodes = self._split(batch, batch.extend_rows, batch.count, graph=graph)

    def _split(
        self, batch: ForwardBatch, first: int, stop: int, paths: TreePaths | None = None, *, graph: bool
    ) -> Split | None:
        """Launch the division of rows [first:stop); None if a program for each row and KV head is as good."""
        count = stop - first
        lengths = batch.lengths_host[first:stop]
        most_new = int((lengths - batch.starts_host[first:stop]).max(initial=0))
        tiling = split_tiling(self.pool.head_dim, self.pool.dtype, self.group, most_new, self.numerics)
        if not count or tiling is None:
            return None
        unit = self.piece or tiling.BLOCK_N
        units = -(-lengths // unit)
        if graph:  # replayed with any lengths that fit the page table
            units[:] = -(-batch.page_table.shape[1] * self.pool.page_size // unit)
        total, longest = int(units.sum()), int(units.max())
        words = 0 if paths is None else paths.words
        slots = max(1, self.programs_per_sm(tiling, words) * self.sms // self.pool.kv_heads)
        if longest == 1 or (not graph and divide_reference(units, slots, ITEMS_PER_ROW_MAX)[0] >= longest):
            return None
        items = min(count + 2 * slots, total)
        # the oldest position that a row with a tree reads is that of the tree, not of the first new token
        begins, lengths_there = batch.indptr[first:] if paths is None else paths.spans, batch.lengths[first:]
        divided = {one: self._divided(begins, lengths_there, count, slots, one, graph) for one in self.windows}
        split = Split(first, count, most_new, tiling, items, total if self.piece else items, divided, paths)
        needed = split.cells * self.heads * most_new * (self.pool.head_dim + 2)
        if self.workspace.numel() < needed:
            self.workspace = torch.empty(needed, dtype=torch.float32, device=self.workspace.device)
        if graph and not any(self.workspace is kept for kept in self.graph_workspaces):
            self.graph_workspaces.append(self.workspace)
        return split

    def _divided(self, begins: Tensor, lengths: Tensor, count: int, slots: int, window: int, graph: bool) -> Tensor:
        """Launch the division of rows for layers with this window; see `kernels.divide`."""
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.workspace.device}
        kept = self.graph_divisions.get((count, window)) if graph else None
        out = torch.empty(1 + 2 * count, **ints) if kept is None else kept
        if graph:
            self.graph_divisions[count, window] = out
        kernels.divide[(1,)](
            out,
            begins,
            lengths,
            0,
            count,
            slots,
            ITEMS_PER_ROW_MAX,
            BLOCK_N=positions_per_tile(self.pool.head_dim, self.pool.dtype),
            SPLIT=self.piece,
            WINDOW=window,
            ROWS=ROWS,
            num_warps=4,
        )
        return out

    def programs_per_sm(self, tiling: Tiling, words: int = 0) -> int:
        """Return how many programs of `attend_split` a multiprocessor runs at once, by the compiled kernels.

        Args: words: of paths in trees; 0: rows have none.
        """
        if self.machine is None:
            return PROGRAMS_PER_SM
        if (tiling, words) not in self._resident:
            kinds = {(rule.window, rule.cap is not None): layer for layer, rule in enumerate(self.rules)}
            compiled = [self.compiled_split(layer, tiling, words) for layer in kinds.values()]
            self._resident[tiling, words] = min(programs_of(kernel, self.machine) for kernel in compiled)
        return self._resident[tiling, words]

    def compiled_split(self, layer: int, tiling: Tiling, words: int = 0) -> Any:
        """Return `attend_split` as it is compiled for this layer; nothing is launched."""
        pool, dtype = self.pool, self.pool.dtype
        stored, stride = pool.keys[0].dtype, self.heads * pool.head_dim
        tensors = (dtype, stored, stored, *[torch.float32] * 2, *[torch.int32] * 5)
        numbers = (0, 1, self.group, stride, pool.head_dim, 64, 0.125, 1.0)
        constants = {**self._constants(layer, dtype, tiling), "WORDS": words}
        paths = (torch.int64, torch.int32) if words else (None, None)
        return kernels.attend_split.warmup(*tensors, *numbers, *paths, ROWS=ROWS, grid=(1,), **constants)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend; see `AttentionBackend.run`."""
        if not batch.tokens:
            return query
        self._write(layer, key, value, batch)
        query = query if query.stride(2) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        trees = batch.extend_rows if self.paths is None else self.paths.first
        if self.extends is not None:
            self._attend_split(layer, query, out, batch, self.extends)
        elif trees:
            self._extend(layer, query, out, batch, 0, trees)
        if self.trees is not None:
            self._attend_split(layer, query, out, batch, self.trees)
        elif self.paths is not None:
            self._extend(layer, query, out, batch, trees, batch.count, self.paths)
        if self.decodes is not None:
            self._attend_split(layer, query, out, batch, self.decodes)
        elif batch.extend_rows < batch.count:
            self._decode(layer, query, out, batch)
        return out

    def _write(self, layer: int, key: Tensor, value: Tensor, batch: ForwardBatch) -> None:
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        block = triton.next_power_of_2(self.pool.kv_heads * self.pool.head_dim)
        kernels.write_kv[(len(key),)](
            key,
            value,
            self.pool.keys[layer],
            self.pool.values[layer],
            self.pool.view(layer, batch).slots,
            *key.stride()[:2],
            *value.stride()[:2],
            *self.pool.scales[layer],
            KV_HEADS=self.pool.kv_heads,
            D=self.pool.head_dim,
            BLOCK=block,
            FP8=self.pool.fp8,
            num_warps=max(1, min(8, block // 256)),
        )

    def _extend(
        self,
        layer: int,
        query: Tensor,
        out: Tensor,
        batch: ForwardBatch,
        first: int,
        stop: int,
        paths: TreePaths | None = None,
    ) -> None:
        """Attend from the new tokens of rows [first:stop), which have trees if there are paths."""
        most_new = int((batch.lengths_host[first:stop] - batch.starts_host[first:stop]).max())
        tiling = extend_tiling(self.pool.head_dim, query.dtype, self.group, most_new, self.numerics, self.warpgroups)
        grid = (-(-most_new * self.group // tiling.BLOCK_M), self.pool.kv_heads, stop - first)
        view = self.pool.view(layer, batch)
        of_rows = (view.rows, batch.indptr, batch.lengths)
        kernels.extend[grid](
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            out,
            view.page_table,
            *((one[first:] for one in of_rows) if first else of_rows),
            *query.stride()[:2],
            view.page_table.stride(0),
            *self._scales(layer),
            *self._bounds(layer),
            *self._paths(layer, paths),
            FP8=self.pool.fp8,
            SINKS=self.rules[layer].sinks is not None,
            WORDS=0 if paths is None else paths.words,
            **self._constants(layer, query.dtype, tiling),
        )

    def _decode(self, layer: int, query: Tensor, out: Tensor, batch: ForwardBatch) -> None:
        tiling = decode_tiling(self.pool.head_dim, query.dtype, self.group)
        first, count = batch.extend_rows, batch.count - batch.extend_rows
        view = self.pool.view(layer, batch)
        kernels.decode[self.pool.kv_heads, count](
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            out,
            view.page_table,
            view.rows,
            batch.indptr,
            batch.lengths,
            first,
            *query.stride()[:2],
            view.page_table.stride(0),
            *self._scales(layer),
            *self._bounds(layer),
            FP8=self.pool.fp8,
            SINKS=self.rules[layer].sinks is not None,
            **self._constants(layer, query.dtype, tiling, decode=True),
        )

    def _attend_split(self, layer: int, query: Tensor, out: Tensor, batch: ForwardBatch, split: Split) -> None:
        tile = self.group * split.most_new
        room = split.cells * self.pool.kv_heads * tile
        parts, sums = self.workspace.split_with_sizes(
            (room * self.pool.head_dim, self.workspace.numel() - room * self.pool.head_dim)
        )
        divided = split.divided[self.rules[layer].window or 0]
        scale, value_scale = self._scales(layer)
        cap, sinks = self._bounds(layer)
        view = self.pool.view(layer, batch)
        kernels.attend_split[self.pool.kv_heads, split.items](
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            parts,
            sums,
            divided,
            view.page_table,
            view.rows,
            batch.indptr,
            batch.lengths,
            split.first,
            split.count,
            tile,
            *query.stride()[:2],
            view.page_table.stride(0),
            scale,
            cap,
            *self._paths(layer, split.paths),
            ROWS=ROWS,
            WORDS=0 if split.paths is None else split.paths.words,
            **self._constants(layer, query.dtype, split.tiling),
        )
        kernels.merge[self.pool.kv_heads * tile, split.count](
            parts,
            sums,
            out,
            divided,
            batch.indptr,
            split.first,
            split.count,
            tile,
            value_scale,
            sinks,
            GROUP=self.group,
            KV_HEADS=self.pool.kv_heads,
            D=self.pool.head_dim,
            BLOCK_D=self.block_d,
            AHEAD=AHEAD,
            FP8=self.pool.fp8,
            SINKS=self.rules[layer].sinks is not None,
            num_warps=1 if self.block_d <= 128 else 2,
            enable_fp_fusion=self.numerics == "fast",
        )

    def _scales(self, layer: int) -> tuple[float, float]:
        """Return the scale of scores, in units of log 2, and the scale of values."""
        key_scale, value_scale = self.pool.scales[layer]
        return self.rules[layer].scale * LOG2_E * key_scale, value_scale

    def _bounds(self, layer: int) -> tuple[float, Tensor]:
        """Return the cap of scores, in units of log 2, and the sinks; without them, values that are not read."""
        rule = self.rules[layer]
        cap = 1.0 if rule.cap is None else rule.cap * LOG2_E
        return cap, self.workspace if rule.sinks is None else rule.sinks

    def _paths(self, layer: int, paths: TreePaths | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the paths of trees that a layer's window leaves, and the slots that they read; without trees, None."""
        return (None, None) if paths is None else (paths.by_window[self.rules[layer].window or 0], paths.spans)

    def _constants(
        self, layer: int, dtype: torch.dtype, tiling: Tiling, *, decode: bool = False
    ) -> dict[str, int | str | bool | None]:
        rule = self.rules[layer]
        return {
            "WINDOW": rule.window or 0,
            "CAP": rule.cap is not None,
            "GROUP": self.group,
            "KV_HEADS": self.pool.kv_heads,
            "D": self.pool.head_dim,
            "PAGE": self.pool.page_size,
            "BLOCK_M": tiling.BLOCK_M,
            "BLOCK_D": self.block_d,
            "BLOCK_N": tiling.BLOCK_N,
            "SPLIT": self.piece,
            "PRECISION": "ieee",  # exact fp32, not tf32
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            "maxnreg": registers_max(tiling, self.pool.head_dim, dtype, self.numerics, decode=decode),
            "enable_fp_fusion": self.numerics == "fast",
        }
