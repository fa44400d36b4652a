"""Passes in pieces: what lies between two attentions is a CUDA graph, attention is launched with the real batch.

    pass of 21 tokens, padded to 32        kept in buffers of 32 tokens: embeddings (or ids), positions, adapters

    piece 0        embeddings, norm, q k v of layer 0              a graph of 32 tokens
    attention 0    KV of 21 tokens, attention of 21 tokens         launched: any mixture of rows, drafts, windows
    piece 1        output of layer 0, MLP, q k v of layer 1        a graph of 32 tokens
    attention 1    ...
    piece L        output of layer L - 1, MLP, last norm           -> hidden states, 21 rows are read

graphs.py replays a whole pass of decodes. Its launches depend on the number of rows only; those of an extend, a mixed
batch or a verification do not, because of their attention. All other launches depend on the number of tokens. So the
model's forward runs once under capture. Where a layer calls its backend, the capture ends, the call is recorded (layer,
and the memory of its tensors), and the next capture begins. A replay alternates between graphs and calls.

What must hold, and how it is ensured:

- Padding writes no KV, and is not attended to: a backend receives the tensors of the real tokens only. Results behind
  these are any numbers. Tokens are computed apart from each other between attentions, so no real token reads them. With
  `cuda_graphs="eager"` they are NaN, which every token that reads them would become.
- A piece reads what an earlier one wrote: tensors of the memory pool keep their place from piece to piece, because the
  model holds them while it is captured. The recorded calls do not: they keep addresses (`Borrowed`), so that the
  memory of one layer's queries is used again by the next layers. Capture and replay have the same order.
- The result of attention has memory of the pool, too, allocated at the beginning of the piece that reads it.
- Buffers are filled on the stream of the passes, behind the replay before. Hidden states are outside of the pool and
  are read before the next replay, on the same stream.
- All pieces of all sizes, and the graphs of decodes, share one pool: batches run one after another on one stream.
- Both kinds of passes, with adapters and without, are captured, as an adapter's products would take time in all passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.runtime import triton_trial
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.graphs import CapturedModel, CudaGraphs, Recorder, record_all
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.lora.batch import FixedLayout
from lockstep.runtime.memory import MIB
from lockstep.runtime.models.language_model import LanguageModel
from lockstep.runtime.overlap import StreamLane

Int32s = NDArray[np.int32]

log = logging.getLogger("lockstep.runtime")

TOKENS_MAX = 512  # new tokens of the largest pass in pieces, by default; larger ones keep a GPU busy without graphs
POWERS_MAX, STEP = 256, 64  # of sizes: powers of two, then steps, as padding costs time where products fill the GPU

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Attends in a layer: query, key and value of the padded pass, and where the results of its real tokens go."""

Cut: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""What takes the place of attention while the model runs: layer, query, key and value to the result."""


def piece_sizes(tokens_max: int) -> tuple[int, ...]:
    """Return the numbers of tokens to which passes are padded, up to and including `tokens_max`; 0: none."""
    if not tokens_max:
        return ()
    usual = (4, 8, 16, 32, 64, 128, POWERS_MAX, *range(POWERS_MAX + STEP, tokens_max, STEP))
    return (*(size for size in usual if size < tokens_max), tokens_max)


class CutAttention:
    """The backend that a model is given while its pass is cut into pieces."""

    name, graphs, exact_lengths = "pieces", False, False

    def __init__(self, pool: KvPool, cut: Cut) -> None:
        self.pool, self._cut = pool, cut

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Raise: the backend that attends is planned."""
        raise AssertionError("a pass in pieces was planned as a whole")

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """End the piece, attend, and begin the next one."""
        return self._cut(layer, query, key, value)


class PieceRecorder(Protocol):
    """Turns a pass over static buffers into a replayable one."""

    def record(self, run: Callable[[Cut], None]) -> Callable[[Attend], None]:
        """Return a function with the effect of `run`, which attends by its argument."""


class EagerPieces:
    """No capture: a replay is a call."""

    def record(self, run: Callable[[Cut], None]) -> Callable[[Attend], None]:
        """Return a function that runs the pass; results of padding are NaN."""

        def replay(attend: Attend) -> None:
            def cut(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                out = torch.full(query.shape, torch.nan, dtype=query.dtype, device=query.device)
                attend(layer, query, key, value, out)
                return out

            run(cut)

        return replay


class CudaPieces:
    """torch's CUDA graphs, all in one memory pool. Used on the stream on which they are replayed later."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def record(self, run: Callable[[Cut], None]) -> Callable[[Attend], None]:
        """Run twice without attention, so that everything is compiled and allocated, then capture.

        The current stream must not be the default stream.
        """
        for _ in range(2):
            run(lambda layer, query, key, value: query.new_zeros(query.shape))
        torch.cuda.current_stream().synchronize()
        captured = CapturedPieces(self.pool)
        captured.capture(run)
        return captured.replay


class Borrowed:
    """The memory of a CUDA tensor, which it does not own. The owner is the pool of a graph."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}",  # the protocol has no bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it."""
    return torch.as_tensor(Borrowed(tensor), device=tensor.device).view(tensor.dtype)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of attention between two pieces, all in memory of the pool: [padded tokens, heads, head_dim] each."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


class CapturedPieces:
    """The pieces of one pass, and the calls of attention between them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._pieces: list[torch.cuda.CUDAGraph] = []
        self._calls: list[RecordedCall] = []

    def capture(self, run: Callable[[Cut], None]) -> None:
        """Run a pass under capture. With an error the capture is ended."""
        self._begin()
        try:
            run(self._cut)
            self._pieces[-1].capture_end()
        except BaseException:
            with suppress(RuntimeError):  # of a capture that the error made invalid, or that has ended
                self._pieces[-1].capture_end()
            raise

    def _begin(self) -> None:
        """Begin the next capture; as in `CudaGraphs.record`, other threads may use CUDA meanwhile."""
        piece = torch.cuda.CUDAGraph()
        piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._pieces.append(piece)

    def _cut(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._pieces[-1].capture_end()
        read = borrowed(query), borrowed(key), borrowed(value)
        self._begin()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._calls.append(RecordedCall(layer, *read, borrowed(out)))
        return out

    def replay(self, attend: Attend) -> None:
        """Replay the pieces, with a call of attention between each two."""
        for piece, call in zip(self._pieces[:-1], self._calls, strict=True):
            piece.replay()
            attend(call.layer, call.query, call.key, call.value, call.out)
        self._pieces[-1].replay()


@dataclass(frozen=True, slots=True)
class PieceKind:
    """A pass that is recorded: its padded number of tokens, and whether some of them are on adapters."""

    tokens: int
    adapted: bool = False

    def __str__(self) -> str:
        return f"{self.tokens} tokens{' on adapters' * self.adapted}"


class PieceGraphs:
    """The passes of one executor in pieces.

    Args:
        attention: planned for, and run with, the real batch.
        sizes: numbers of tokens, rising; see `piece_sizes`.
        recorder: CudaPieces, or EagerPieces without a GPU.
        upload: copies an array to the device; see `overlap.StreamLane.upload`.
        adapter_slots: of the model; 0: passes with adapters do not run in pieces.
        taps: layers whose input a drafter reads.
    """

    def __init__(
        self,
        model: CapturedModel,
        attention: AttentionBackend,
        sizes: Sequence[int],
        recorder: PieceRecorder,
        upload: Callable[[NDArray[Any]], Tensor],
        *,
        adapter_slots: int = 0,
        taps: Sequence[int] = (),
    ) -> None:
        self.model, self.attention, self.recorder, self._upload = model, attention, recorder, upload
        self.sizes: Int32s = np.array(sizes, np.int32)
        self.replays = 0
        self.grown: list[int] = []  # bytes of device memory that each capture took, as far as it can be measured
        self.adapted = bool(adapter_slots)
        most, device = int(self.sizes[-1]), attention.pool.keys[0].device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._embed = model.embed if isinstance(model, LanguageModel) and model.embeds_apart else None
        self._embedded: Tensor | None = None  # [most, hidden], of models that embed apart, in place of token ids
        self._hidden: Tensor | None = None  # [most, hidden], after the first pass
        self._taps: dict[int, Tensor | None] = dict.fromkeys(taps)  # [most, hidden] each, after the first pass
        self._filled = 0  # tokens of the buffers that are not padding
        self._layouts = {size: FixedLayout(size, adapter_slots, device) for size in sizes if self.adapted}
        self.kinds = [
            PieceKind(size, adapted) for size in sizes for adapted in ((False, True) if self.adapted else (False,))
        ]
        self._none = torch.empty(0, dtype=torch.int32, device=device)
        self._replay: dict[PieceKind, Callable[[Attend], None]] = {}
        self._batches: dict[PieceKind, ForwardBatch] = {}

    def _padded(self, kind: PieceKind) -> ForwardBatch:
        """Return a pass of the first tokens of the buffers; its rows are empty, as only attention reads rows."""
        size, none = kind.tokens, self._none
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=none,
            rows=none,
            indptr=none,
            lengths=none,
            page_table=none,
            logits_at=none,
            extend_rows=0,
            starts_host=np.zeros(0, np.int32),
            lengths_host=np.zeros(0, np.int32),
            adapters=self._layouts[size].batch if kind.adapted else None,
            embedded=None if self._embedded is None else self._embedded[:size],
            taps=dict.fromkeys(self._taps) if self._taps else None,
        )

    # --------------------------------------------------------------------------------------------------- at start

    @property
    def bytes(self) -> int:
        """Device memory that the captures took."""
        return sum(self.grown)

    def prepare(self, lane: StreamLane) -> None:
        """Record all kinds of passes, the largest first.

        Raises: ConfigError if a capture fails, with the numbers and options to change.
        """
        self.grown = record_all(
            lane,
            self.kinds[::-1],
            self._record,
            f"the CUDA graphs of a pass of {{kind}} could not be captured ({{done}} of {len(self.kinds)} passes were, "
            f"up to {self.sizes[-1]} tokens){{why}}\n"
            "hint: --piecewise-graph-max-tokens N captures fewer and 0 none, a smaller --mem-fraction leaves them more "
            "room, --no-cuda-graphs does without any",
        )

    def _record(self, kind: PieceKind) -> None:
        if self._embed is not None and self._embedded is None:
            self._embedded = torch.zeros_like(self._embed(self._padded(kind)))
        batch = self._batches[kind] = self._padded(kind)

        def run(cut: Cut) -> None:
            self._forward(batch, cut)

        self._replay[kind] = self.recorder.record(run)

    def _forward(self, batch: ForwardBatch, cut: Cut) -> None:
        """Run the padded pass of the model, and keep its results outside of the pool."""
        hidden = self.model.forward(batch, CutAttention(self.attention.pool, cut))
        self._hidden = self._kept(self._hidden, hidden)
        for layer, found in (batch.taps or {}).items():
            assert found is not None
            self._taps[layer] = self._kept(self._taps[layer], found)
        batch.taps = dict.fromkeys(self._taps) if self._taps else None  # they would keep memory of the pool

    def _kept(self, kept: Tensor | None, found: Tensor) -> Tensor:
        """Copy results of a pass to a buffer for the most tokens, which the first pass makes."""
        if kept is None:
            kept = found.new_zeros((int(self.sizes[-1]), *found.shape[1:]))
        kept[: len(found)].copy_(found)
        return kept

    # --------------------------------------------------------------------------------------------------- the passes

    def holds(self, batch: ForwardBatch) -> bool:
        """Return whether a pass can run in pieces: by its size, and if models read only what the buffers hold."""
        return (
            0 < batch.tokens <= self.sizes[-1]
            and (batch.adapters is None or self.adapted)
            and (batch.media is None or (self._embedded is not None and not batch.media.deeper))
            and (batch.taps is None or batch.taps.keys() <= self._taps.keys())
            and all(one is None for one in (batch.rope_offsets, batch.hidden, batch.states, batch.ranks, batch.layers))
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """Run a pass in pieces, and fill `batch.taps` if it has any.

        Returns: hidden states of its tokens, [tokens, hidden]; valid on this stream until the next call.
        """
        count = batch.tokens
        size = int(self.sizes[np.searchsorted(self.sizes, count)])
        kind = PieceKind(size, batch.adapters is not None)
        padded = self._batches[kind]
        self._fill(batch, count)
        if batch.adapters is not None:
            padded.adapters = self._layouts[size].filled(batch.adapters, self._upload)
        self.attention.plan(batch)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
            found = self.attention.run(layer, query[:count], key[:count], value[:count], batch)
            out[:count].copy_(found)

        self._replay[kind](attend)
        self.replays += 1
        for layer in batch.taps or ():
            assert batch.taps is not None
            tapped = self._taps[layer]
            assert tapped is not None
            batch.taps[layer] = tapped[:count]
        assert self._hidden is not None
        return self._hidden[:count]

    def _fill(self, batch: ForwardBatch, count: int) -> None:
        """Copy a pass into the buffers, and reset the tokens behind it to padding."""
        given, buffer = batch.token_ids, self._token_ids
        if self._embed is not None and self._embedded is not None:
            given, buffer = self._embed(batch), self._embedded
        for kept, new in ((buffer, given), (self._positions, batch.positions)):
            kept[:count].copy_(new)
            if self._filled > count:
                kept[count : self._filled].zero_()
        self._filled = count


def make_pieces(
    model: LanguageModel,
    attention: AttentionBackend,
    sizes: Sequence[int],
    recorder: Recorder,
    lane: StreamLane,
    taps: Sequence[int],
) -> PieceGraphs | None:
    """Record the passes of these numbers of tokens in pieces; None without sizes.

    Args:
        recorder: of the graphs of decodes, with which they share a memory pool.
        taps: layers whose input a drafter reads.
    """
    if not sizes:
        return None
    cut: PieceRecorder = CudaPieces(recorder.pool) if isinstance(recorder, CudaGraphs) else EagerPieces()
    slots = model.adapter_slots
    why = triton_trial.unavailable_because(lane.device) if slots and lane.device.type == "cuda" else None
    if why is not None:
        log.info("passes with adapters are launched as a whole, as torch adds adapters one after another: %s", why)
    pieces = PieceGraphs(
        model, attention, sizes, cut, lane.upload, adapter_slots=0 if why is not None else slots, taps=taps
    )
    pieces.prepare(lane)
    log.info(
        "%d sizes of passes in pieces, of up to %d tokens, %.0f MiB", len(pieces.kinds), sizes[-1], pieces.bytes / MIB
    )
    return pieces
