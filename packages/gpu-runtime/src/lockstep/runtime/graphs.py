"""Decodes in CUDA graphs: one graph per batch size of a short list; a batch is padded to the next size and replayed.

    a batch of 5 decodes, graphs of 1, 2, 4, 8, 16, ... rows: it is padded up to 8

    rows        [  7   2   9   4   0 | pad pad pad ]    pad: the row behind the last; all its pages are the scratch page
    lengths     [ 81   9  30  12   5 |  1   1   1  ]
    ----------- filled before each replay, by two launches; the lines below are in the graph -------------------------
    positions   = lengths - 1
    token ids   = newest[rows]                          sampled by the previous batch, on the same stream
    slots       = page_table[rows, position's page]     padding writes to the scratch page, which is never read
    hidden      = the model, up to its last norm        [ 5 rows of results | not read ]

Logits and sampling stay outside: they need few launches, and logits of all sizes would take gigabytes.

What must hold, and how it is ensured:

- All memory that a graph reads has the address that it had at capture. Inputs and `hidden` are buffers of this file.
  The page table is made with its largest width (`DeviceTables(context_tokens=...)`); if it is replaced all the same,
  decodes run without graphs. Backends keep their workspaces (attention/base.py).
- The launches depend only on the number of rows. `plan(batch, graph=True)` ensures that, before each replay.
- No library compiles or allocates during a capture: the same pass ran before it, on the same stream.
- All graphs share one memory pool, so a replay overwrites the results of the previous one there. Batches run one after
  another on one stream, and `hidden` is outside of the pool. It is read before the next replay, on the same stream.
- The largest graph is captured first: the smaller ones then fit into its pool.

On the CPU `EagerGraphs` takes their place: the same padded pass over the same buffers, without a capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import GraphMode
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.memory import MIB, taken_bytes
from lockstep.runtime.overlap import StreamLane
from lockstep.runtime.tables import DeviceTables, ForwardPass, PassTensors

Int32s = NDArray[np.int32]
Kind = TypeVar("Kind")

log = logging.getLogger("lockstep.runtime")


ROWS_MAX = 512  # rows of the largest graph, by default; larger batches keep a GPU busy without graphs


def graph_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the batch sizes that get a graph, up to and including `rows_max`.

    The steps are those of vLLM and SGLang.
    """
    if rows_max < 1:
        raise ConfigError(f"`cuda_graph_max_batch` must be 1 or more, got `{rows_max}`\nhint: cuda_graphs=off for none")
    usual = (1, 2, 4, *range(8, 256, 8), *range(256, rows_max, 16))
    return (*(size for size in usual if size < rows_max), rows_max)


def check_graph_mode(
    mode: str, device: torch.device, rows_max: int | None = None, piece_tokens_max: int | None = None
) -> None:
    """Raise ConfigError for an unknown mode, or one that does not fit the device, `rows_max` or `piece_tokens_max`."""
    if mode not in get_args(GraphMode):
        raise ConfigError(f"`cuda_graphs` must be one of {', '.join(get_args(GraphMode))}, got `{mode}`")
    if mode == "on" and device.type != "cuda":
        raise ConfigError(f"`cuda_graphs` is on, which needs a CUDA device, this is `{device}`\nhint: auto, or eager")
    if piece_tokens_max is not None and piece_tokens_max < 0:
        raise ConfigError(f"`piecewise_graph_max_tokens` must be 0 (none) or more, got `{piece_tokens_max}`")
    for name, given in (("cuda_graph_max_batch", rows_max), ("piecewise_graph_max_tokens", piece_tokens_max or None)):
        if given is not None and (mode == "off" or (mode == "auto" and device.type != "cuda")):
            why = "`cuda_graphs` is off" if mode == "off" else f"there are no CUDA graphs on `{device}`"
            raise ConfigError(f"`{name}` is {given}, but {why}\nhint: leave it out")


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Which graphs are requested.

    Args:
        rows_max: of the largest graph of decodes; None: ROWS_MAX.
        piece_tokens_max: of the largest pass that runs in pieces (pieces.py); 0: none does, None: pieces.TOKENS_MAX.
        decodes: whether passes of decodes may be replayed whole.
    """

    mode: GraphMode = "off"
    rows_max: int | None = None
    piece_tokens_max: int | None = None
    decodes: bool = True


class CapturedModel(Protocol):
    """The part of a model that is captured."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the normed hidden states of the last layer for the new tokens: [tokens, hidden]."""


class Recorder(Protocol):
    """Turns a function over static buffers into a replayable one."""

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        """Return a function with the effect of `run`, which takes no arguments and was not called before."""


class EagerGraphs:
    """No capture: a replay is a call."""

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        """Return the function itself."""
        return run


class CudaGraphs:
    """torch's CUDA graphs, all in one memory pool. Used on the stream on which they are replayed later."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        """Run twice, so that everything is compiled and allocated, then capture.

        The current stream must not be the default stream. With `thread_local`, CUDA calls of other threads, such as
        NCCL's watchdog, do not invalidate the capture.
        """
        stream = torch.cuda.current_stream()
        for _ in range(2):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


def record_all(lane: StreamLane, kinds: Sequence[Kind], record: Callable[[Kind], None], named: str) -> list[int]:
    """Record graphs one after another, the largest first.

    Args:
        record: records the graph of one kind.
        named: the error for a failure, with places for `{kind}`, the number `{done}` before it, and the reason `{why}`.
    Returns: bytes of device memory that each took, in that order; zeros on a CPU.
    Raises: ConfigError if a capture fails.
    """
    grown: list[int] = []
    with lane.stream(), torch.inference_mode():
        for done, kind in enumerate(kinds):
            before = taken_bytes(lane.device)
            try:
                record(kind)
            except Exception as error:  # of the model, a kernel, the driver, or memory: there is no graph then
                why = f": {type(error).__name__}: {error}".partition("\n")[0]
                if lane.device.type == "cuda":
                    free, total = torch.cuda.mem_get_info(lane.device)
                    why = f"; {free / MIB:,.0f} of {total / MIB:,.0f} MiB of {lane.device} are free{why}"
                raise ConfigError(named.format(kind=kind, done=done, why=why)) from error
            grown.append(taken_bytes(lane.device) - before)
    return grown


class DecodeGraphs:
    """The decodes of one executor as graphs.

    Args:
        tables: made with `context_tokens`, so that the page table keeps its address.
        sizes: batch sizes in rows, rising; see `graph_sizes`.
        recorder: CudaGraphs, or EagerGraphs without a GPU.
    """

    def __init__(
        self,
        model: CapturedModel,
        attention: AttentionBackend,
        tables: DeviceTables,
        sizes: Sequence[int],
        recorder: Recorder,
    ) -> None:
        self.model, self.attention, self.tables, self.recorder = model, attention, tables, recorder
        self.sizes: Int32s = np.array(sizes, np.int32)
        self.replays = 0
        self.bytes = 0  # device memory that the captures took, as far as it can be measured
        most, device = int(self.sizes[-1]), tables.device
        self._rows = torch.full((most,), tables.count, dtype=torch.int32, device=device)
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._indptr = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._places = torch.arange(most, dtype=torch.int64, device=device)
        self._hidden: Tensor | None = None  # [most, hidden], after the first pass
        self._page_table = tables.page_table
        self._stale = False  # the page table was replaced
        self._filled = 0  # rows of the buffers that are not padding
        self._batches = {size: self._padded(size) for size in self.sizes.tolist()}
        self._replay: dict[int, Callable[[], object]] = {}

    def _padded(self, size: int) -> ForwardBatch:
        """Return a pass of the first `size` rows of the buffers."""
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            rows=self._rows[:size],
            indptr=self._indptr[: size + 1],
            lengths=self._lengths[:size],
            page_table=self._page_table,
            logits_at=self._places[:size],
            extend_rows=0,
            starts_host=np.zeros(size, np.int32),
            lengths_host=np.ones(size, np.int32),
        )

    # --------------------------------------------------------------------------------------------------- at start

    def prepare(self, lane: StreamLane) -> list[int]:
        """Record all sizes, the largest first.

        Returns: bytes of device memory that each took, in that order; zeros on a CPU.
        Raises: ConfigError if a capture fails, with the numbers and options to change.
        """
        grown = record_all(
            lane,
            self.sizes.tolist()[::-1],
            self._record,
            f"the CUDA graph of {{kind}} rows could not be captured ({{done}} of {len(self.sizes)} were, up to "
            f"{self.sizes[-1]} rows){{why}}\n"
            "hint: --cuda-graph-max-batch N captures fewer, a smaller --mem-fraction leaves them more room, "
            "--no-cuda-graphs does without",
        )
        self.bytes = sum(grown)
        return grown

    def _record(self, size: int) -> None:
        self._plan(self._batches[size])
        self._replay[size] = self.recorder.record(partial(self._run, self._batches[size]))

    # --------------------------------------------------------------------------------------------------- the passes

    def holds(self, one: ForwardPass) -> bool:
        """Return whether a pass can be replayed: decodes only, and at most as many rows as the largest graph."""
        if one.extend_rows or not 0 < len(one.rows) <= self.sizes[-1]:
            return False
        if self.tables.page_table is not self._page_table and not self._stale:
            self._stale = True
            log.warning("the page table grew to %s pages a row; decodes run without graphs", self.tables.width)
        return not self._stale

    def run(self, one: ForwardPass, tensors: PassTensors) -> Tensor:
        """Replay a pass.

        Returns: hidden states of its rows, [rows, hidden]; valid on this stream until the next call.
        """
        count = len(one.rows)
        batch = self._batches[int(self.sizes[np.searchsorted(self.sizes, count)])]
        self._fill(tensors, count)
        batch.starts_host[:count], batch.lengths_host[:count] = one.starts, one.stops
        batch.starts_host[count:], batch.lengths_host[count:] = 0, 1
        self._plan(batch)
        self._replay[batch.count]()
        self.replays += 1
        assert self._hidden is not None
        return self._hidden[:count]

    def _fill(self, tensors: PassTensors, count: int) -> None:
        """Copy a pass into the buffers, and reset the rows behind it to padding."""
        self._rows[:count].copy_(tensors.rows)
        self._lengths[:count].copy_(tensors.lengths)
        if self._filled > count:
            self._rows[count : self._filled].fill_(self.tables.count)
            self._lengths[count : self._filled].fill_(1)
        self._filled = count

    def _plan(self, batch: ForwardBatch) -> None:
        if self.attention.graphs:
            self.attention.plan(batch, graph=True)
        else:
            self.attention.plan(batch)

    def _run(self, batch: ForwardBatch) -> None:
        """Run the captured part of a pass."""
        width, shift, mask = self._page_table.shape[1], self.tables.page_shift, self.tables.page_size - 1
        torch.sub(batch.lengths, 1, out=batch.positions)
        torch.index_select(self.tables.newest, 0, batch.rows, out=batch.token_ids)
        places = batch.rows.to(torch.int64) * width + (batch.positions >> shift)
        pages = self._page_table.view(-1).index_select(0, places).to(torch.int64)
        torch.add(pages * self.tables.page_size, batch.positions & mask, out=batch.slots)
        hidden = self.model.forward(batch, self.attention)
        if self._hidden is None:  # the first pass is the largest, and runs before its capture
            self._hidden = hidden.new_zeros((int(self.sizes[-1]), hidden.shape[1]))
        self._hidden[: batch.count].copy_(hidden)


def expected_bytes(grown: Sequence[int], count: int) -> int:
    """Estimate the bytes of `count` graphs from `grown`, the bytes of the largest and the next smaller ones.

    The first includes the memory pool, which all graphs share. Each of the others adds its launches and the buffers of
    a backend.
    """
    first, *others = grown
    return first + (count - 1) * max(others, default=0)
