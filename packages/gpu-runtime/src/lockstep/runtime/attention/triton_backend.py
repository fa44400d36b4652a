"""Attention by our own Triton kernels: any page size, any number of heads per KV head, head dims up to 256."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import torch
import triton
from torch import Tensor

from lockstep.host.engine_options import Numerics
from lockstep.runtime.attention import kernels
from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool

LOG2_E = log2(2.718281828459045)
PIECE = 1024  # positions per separately summed piece with `numerics="invariant"`; a multiple of every BLOCK_N
PROGRAMS_PER_SM = 4  # a decode is split into this many programs, because each has few bytes of loads in flight
PROGRAMS_PER_ROW_MAX = 64
AHEAD = 8  # pieces that `merge` loads at a time


@dataclass(frozen=True, slots=True)
class Tiling:
    """Block sizes and resources of one launch; see the picture in `kernels`."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def positions_per_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Return BLOCK_N. All kernels use the same, since the order of additions depends on it."""
    wide = head_dim > 128
    if dtype.itemsize > 2:
        return 16 if wide else 32
    return 32 if wide else 64


def decode_tiling(head_dim: int, dtype: torch.dtype, group: int) -> Tiling:
    """Return the tiling of a decode: small tiles and several stages of loads, so that programs share an SM.

    A decode is bound by memory bandwidth.
    """
    block_m = max(16, triton.next_power_of_2(group))
    return Tiling(block_m, positions_per_tile(head_dim, dtype), 4, 3 if dtype.itemsize == 2 else 2)


def extend_tiling(head_dim: int, dtype: torch.dtype, group: int, most_new: int, numerics: Numerics) -> Tiling:
    """Return the tiling of an extend, which arithmetic bounds: as many query rows as registers hold and tokens fill.

    From 64 rows on, Hopper and Blackwell use other tensor-core instructions. With `invariant` numerics an extend keeps
    to those of a decode, so that a token has the same bits whether it was decoded or extended.
    """
    block_n = positions_per_tile(head_dim, dtype)
    if dtype.itemsize > 2:  # no tensor cores in full fp32: registers are the limit
        return decode_tiling(head_dim, dtype, group)
    if numerics == "invariant":
        return Tiling(max(32, triton.next_power_of_2(group)), block_n, 4, 2)
    block_m = min(max(16, triton.next_power_of_2(most_new * group)), 64 if head_dim > 128 else 128)
    return Tiling(block_m, block_n, 8 if block_m == (64 if head_dim > 128 else 128) else 4, 3)


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
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.block_d = max(16, triton.next_power_of_2(pool.head_dim))
        # A graph reads the workspace at its address at capture, so workspaces planned for graphs are never freed.
        self.workspace = torch.empty(0, dtype=torch.float32, device=device)
        self.graph_workspaces: list[Tensor] = []
        self.programs = self.most = 1

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Choose the number of programs per decoding row, and make the workspace for their results large enough.

        Raises: ValueError if `graph` is set and rows extend.
        """
        if graph and batch.extend_rows:
            raise ValueError(f"a CUDA graph holds decodes only, got {batch.extend_rows} rows that extend")
        rows = batch.count - batch.extend_rows
        # A graph is replayed with any lengths that fit the page table.
        longest = batch.page_table.shape[1] * self.pool.page_size if graph else batch.longest
        unit = self.piece or positions_per_tile(self.pool.head_dim, self.pool.keys[0].dtype)
        units = -(-longest // unit)
        # Rounded down to what runs at once: rounded up, the last few programs would form a second wave.
        wanted = PROGRAMS_PER_SM * self.sms // max(rows * self.pool.kv_heads, 1)
        self.programs = max(1, min(wanted, units, PROGRAMS_PER_ROW_MAX))
        if self.programs > 1:
            self.most = units if self.piece else self.programs
            needed = rows * self.heads * self.most * (self.pool.head_dim + 2)
            if self.workspace.numel() < needed:
                self.workspace = torch.empty(needed, dtype=torch.float32, device=self.workspace.device)
            if graph and not any(self.workspace is kept for kept in self.graph_workspaces):
                self.graph_workspaces.append(self.workspace)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend; see `AttentionBackend.run`."""
        if not batch.tokens:
            return query
        self._write(layer, key, value, batch)
        query = query if query.stride(2) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if batch.extend_rows:
            self._extend(layer, query, out, batch)
        if batch.extend_rows < batch.count:
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

    def _extend(self, layer: int, query: Tensor, out: Tensor, batch: ForwardBatch) -> None:
        count = batch.extend_rows
        most_new = int((batch.lengths_host[:count] - batch.starts_host[:count]).max())
        tiling = extend_tiling(self.pool.head_dim, query.dtype, self.group, most_new, self.numerics)
        grid = (-(-most_new * self.group // tiling.BLOCK_M), self.pool.kv_heads, count)
        view = self.pool.view(layer, batch)
        kernels.extend[grid](
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            out,
            view.page_table,
            view.rows,
            batch.indptr,
            batch.lengths,
            *query.stride()[:2],
            view.page_table.stride(0),
            *self._scales(layer),
            *self._bounds(layer),
            FP8=self.pool.fp8,
            SINKS=self.rules[layer].sinks is not None,
            **self._constants(layer, query.dtype, tiling),
        )

    def _decode(self, layer: int, query: Tensor, out: Tensor, batch: ForwardBatch) -> None:
        tiling = decode_tiling(self.pool.head_dim, query.dtype, self.group)
        constants = self._constants(layer, query.dtype, tiling)
        first, count = batch.extend_rows, batch.count - batch.extend_rows
        view = self.pool.view(layer, batch)
        strides = (*query.stride()[:2], view.page_table.stride(0))
        where = (view.page_table, view.rows, batch.indptr, batch.lengths, first, *strides)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        scale, value_scale = self._scales(layer)
        cap, sinks = self._bounds(layer)
        rule, fp8 = self.rules[layer], self.pool.fp8
        kinds = {"FP8": fp8, "SINKS": rule.sinks is not None}
        programs = self.programs
        if rule.window is not None:  # one more than whole units, because the window may begin inside of one
            programs = min(programs, -(-rule.window // (self.piece or tiling.BLOCK_N)) + 1)
        if programs == 1:
            grid = (self.pool.kv_heads, count)
            kernels.decode[grid](query, keys, values, out, *where, scale, value_scale, cap, sinks, **kinds, **constants)
            return
        cells = count * self.heads * self.most
        room = cells * self.pool.head_dim
        parts, sums = self.workspace[:room], self.workspace[room : room + cells * 2]
        kernels.decode_split[(self.pool.kv_heads, programs, count)](
            query, keys, values, parts, sums, *where, scale, cap, self.most, **constants
        )
        kernels.merge[(self.heads, count)](
            parts,
            sums,
            out,
            batch.indptr,
            batch.lengths,
            first,
            programs,
            self.most,
            value_scale,
            sinks,
            HEADS=self.heads,
            D=self.pool.head_dim,
            BLOCK_D=self.block_d,
            BLOCK_N=tiling.BLOCK_N,
            SPLIT=self.piece,
            AHEAD=AHEAD,
            WINDOW=constants["WINDOW"],
            **kinds,
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

    def _constants(self, layer: int, dtype: torch.dtype, tiling: Tiling) -> dict[str, int | str | bool]:
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
            "enable_fp_fusion": self.numerics == "fast",
        }
