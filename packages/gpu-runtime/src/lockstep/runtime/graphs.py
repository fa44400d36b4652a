"""Decodes in CUDA graphs: one for each of a few numbers of rows, replayed for every batch padded up to it.

    a batch of 5 decodes, graphs of 1, 2, 4, 8, 16, ... rows: it is padded up to 8

    rows        [  7   2   9   4   0 | pad pad pad ]    pad: the row behind the last; all its pages are the scratch page
    lengths     [ 81   9  30  12   5 |  1   1   1  ]
    ----------- filled in front of each replay, by two launches; what follows is in the graph ------------------------
    positions   = lengths - 1
    token ids   = newest[rows]                          sampled by the batch in front, on the same stream
    slots       = page_table[rows, position's page]     padding writes to the scratch page, which is never read
    hidden      = the model, up to its last norm        [ 5 rows of results | not looked at ]

Logits and sampling stay outside: they need few launches, and logits of all sizes would take gigabytes.

What must hold, and what keeps it:

- Whatever a graph reads lies where it lay at capture. Inputs and `hidden` are buffers of this file; the page table is
  as wide as it ever gets (`DeviceTables(context_tokens=...)`), and if it was replaced all the same, decodes run without
  graphs; backends keep their workspaces (attention/base.py).
- What is launched depends on the number of rows alone. `plan(batch, graph=True)` sees to it, before each replay.
- Nothing is compiled or allocated by a library during a capture: the same pass ran before it, on the same stream.
- All graphs share one memory pool, so a replay destroys what another left there. Batches run one after another on one
  stream, and `hidden` lies outside of the pool. It is read before the next replay, on the same stream.
- The largest is captured first: the others find room in its pool.

On the CPU `EagerGraphs` stands in: the same padded pass over the same buffers, without a capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, get_args

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

log = logging.getLogger("lockstep.runtime")


ROWS_MAX = 512  # of the largest graph, by default; more rows keep a GPU busy without


def graph_sizes(rows_max: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, up to `rows_max`, which is one of them. Steps are those of vLLM and SGLang."""
    if rows_max < 1:
        raise ConfigError(f"`cuda_graph_max_batch` must be 1 or more, got `{rows_max}`\nhint: cuda_graphs=off for none")
    usual = (1, 2, 4, *range(8, 256, 8), *range(256, rows_max, 16))
    return (*(size for size in usual if size < rows_max), rows_max)


def check_graph_mode(mode: str, device: torch.device, rows_max: int | None = None) -> None:
    """Raise ConfigError for a mode that there is not, or that does not go with the device or with `rows_max`."""
    if mode not in get_args(GraphMode):
        raise ConfigError(f"`cuda_graphs` must be one of {', '.join(get_args(GraphMode))}, got `{mode}`")
    if mode == "on" and device.type != "cuda":
        raise ConfigError(f"`cuda_graphs` is on, which needs a CUDA device, this is `{device}`\nhint: auto, or eager")
    if rows_max is not None and (mode == "off" or (mode == "auto" and device.type != "cuda")):
        why = "`cuda_graphs` is off" if mode == "off" else f"there are no CUDA graphs on `{device}`"
        raise ConfigError(f"`cuda_graph_max_batch` is {rows_max}, but {why}\nhint: leave it out")


class CapturedModel(Protocol):
    """What is captured of a model."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """The last layer's hidden states of the new tokens, normed: [tokens, hidden]."""


class Recorder(Protocol):
    """Makes something that can be replayed of a function over static buffers."""

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        """What does the same as `run`, which was not called yet and takes no arguments."""


class EagerGraphs:
    """No capture: a replay is a call."""

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        """The function itself."""
        return run


class CudaGraphs:
    """torch's CUDA graphs, all in one memory pool. To be used on the stream on which they are replayed later."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        """Run twice, so that all is compiled and allocated, then capture; the current stream must not be the default.

        `thread_local`: what other threads do with CUDA meanwhile, such as NCCL's watchdog, does not end the capture.
        """
        stream = torch.cuda.current_stream()
        for _ in range(2):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


class DecodeGraphs:
    """The decodes of one executor, as graphs.

    Args:
        tables: made with `context_tokens`, so that the page table stays where it is.
        sizes: numbers of rows, rising; see `graph_sizes`.
        recorder: CudaGraphs, or EagerGraphs where there is no GPU.
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
        self.bytes = 0  # that the captures took of the device, as far as they are known
        most, device = int(self.sizes[-1]), tables.device
        self._rows = torch.full((most,), tables.count, dtype=torch.int32, device=device)
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._indptr = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._places = torch.arange(most, dtype=torch.int64, device=device)
        self._hidden: Tensor | None = None  # [most, hidden], once the first pass ran
        self._page_table = tables.page_table
        self._stale = False  # the page table moved away
        self._filled = 0  # rows of the buffers that are not padding
        self._batches = {size: self._padded(size) for size in self.sizes.tolist()}
        self._replay: dict[int, Callable[[], object]] = {}

    def _padded(self, size: int) -> ForwardBatch:
        """So many rows of the buffers, as one pass."""
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

        Returns: bytes that each took of the device, in that order; zeros on a CPU.
        Raises: ConfigError if a capture fails, with the numbers and the way out.
        """
        grown: list[int] = []
        with lane.stream(), torch.inference_mode():
            for size in reversed(self.sizes.tolist()):
                before = taken_bytes(lane.device)
                try:
                    self._plan(self._batches[size])
                    self._replay[size] = self.recorder.record(partial(self._run, self._batches[size]))
                except Exception as error:  # of the model, a kernel, the driver, or memory: there is no graph then
                    raise ConfigError(self._refusal(size, error, lane.device)) from error
                grown.append(taken_bytes(lane.device) - before)
        self.bytes = sum(grown)
        return grown

    def _refusal(self, size: int, error: Exception, device: torch.device) -> str:
        """The message for a capture that failed."""
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        numbers = ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            numbers = f"; {free / MIB:,.0f} of {total / MIB:,.0f} MiB of {device} are free"
        return (
            f"the CUDA graph of {size} rows could not be captured ({len(self._replay)} of {len(self.sizes)} were, up "
            f"to {self.sizes[-1]} rows){numbers}: {why}\n"
            "hint: --cuda-graph-max-batch N captures fewer, a smaller --mem-fraction leaves them more room, "
            "--no-cuda-graphs does without"
        )

    # --------------------------------------------------------------------------------------------------- the passes

    def holds(self, one: ForwardPass) -> bool:
        """Whether a pass can be replayed: nothing but decodes, no more than the largest graph has rows."""
        if one.extend_rows or not 0 < len(one.rows) <= self.sizes[-1]:
            return False
        if self.tables.page_table is not self._page_table and not self._stale:
            self._stale = True
            log.warning("the page table grew to %s pages a row; decodes run without graphs", self.tables.width)
        return not self._stale

    def run(self, one: ForwardPass, tensors: PassTensors) -> Tensor:
        """Replay a pass.

        Returns: hidden states of its rows, [rows, hidden]: read them on this stream before the next call.
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
        """Put a pass into the buffers, and padding where the pass before was longer."""
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
        """What is captured."""
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
    """What `count` graphs take, of which the largest and the next took `grown`.

    The first brings the pool, which the others share; each of those adds its own launches, and a backend's buffers.
    """
    first, *others = grown
    return first + (count - 1) * max(others, default=0)
