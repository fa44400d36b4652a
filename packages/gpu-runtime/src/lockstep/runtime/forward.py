"""The input of models and attention backends for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.runtime.draft_tree import TreeRows
from lockstep.runtime.lora.batch import AdapterBatch
from lockstep.runtime.states.view import StateView

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WindowedPages:
    """Numbers of pages of a pool whose layers with sliding windows have pages of their own, numbered for themselves.

    Args:
        full: pages of all other layers.
        windows: pages of the layers in `sliding`; 0: there are none.
    """

    full: int
    windows: int = 0
    sliding: frozenset[int] = frozenset()


@dataclass(slots=True)
class WindowView:
    """Where layers with sliding windows find the positions of a pass, in the pages of their own pool.

    Entries of pages that the window has left have any page of the pool, and are not read.
    """

    rows: Tensor  # int32 [rows], rows of this page table: 0, 1, ...
    page_table: Tensor  # int32 [rows, width]
    slots: Tensor  # int64 [tokens]


@dataclass(frozen=True, slots=True)
class RankTokens:
    """New tokens of all data-parallel ranks in a pass that they run together.

    Args:
        counts: by rank.
        padded: rows are padded to the longest rank, so that every rank has as many; otherwise they lie end to end.
    """

    counts: tuple[int, ...]
    padded: bool

    @property
    def total(self) -> int:
        """Rows of all ranks together, padding included."""
        return max(self.counts) * len(self.counts) if self.padded else sum(self.counts)

    def own(self, rank: int) -> slice:
        """Return the rows of a rank among those of all ranks, without padding."""
        first = max(self.counts) * rank if self.padded else sum(self.counts[:rank])
        return slice(first, first + self.counts[rank])


@dataclass(slots=True)
class MediaRows:
    """Embeddings of media that take the place of those of tokens in one pass.

    `deeper` are added to the hidden states behind the first layers, one for each layer; empty: to none.
    """

    at: Tensor  # int64 [positions], new tokens
    embeddings: Tensor  # [positions, hidden]
    deeper: tuple[Tensor, ...] = ()  # [positions, hidden] each


@dataclass(slots=True)
class ForwardBatch:
    """One pass over `tokens` new tokens of `rows` requests: extend rows first, then rows that compute one token each.

    row        0                1          2   3   4
    tokens   [ a a a a a a a ][ b b b ][ c ][ d ][ e ]        extend_rows = 2
    indptr   0                7        10   11   12   13

    Tensors are on the device of the model. Values with a copy on the host are available without a query of the device;
    shapes and launches may depend on these only. In a CUDA graph rows are padded: a padding row has one token at
    position 0 of the scratch page, and its results are not read.
    """

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], of each new token in its request
    slots: Tensor  # int64 [tokens], slot of its KV: page * page_size + offset in the page
    rows: Tensor  # int32 [rows], rows of the page table
    indptr: Tensor  # int32 [rows + 1], first new token of each row
    lengths: Tensor  # int32 [rows], positions with KV that a row reads, its new ones included
    page_table: Tensor  # int32 [table rows, width], pages of all rows of the engine; the pass reads those in `rows`
    logits_at: Tensor  # int64 [samples], new tokens behind which a token is drawn or a logprob computed

    extend_rows: int
    starts_host: Int32s  # [rows], position of each row's first new token
    lengths_host: Int32s  # [rows]; a row's new tokens are [starts_host:lengths_host)
    adapters: AdapterBatch | None = None  # slots of tokens on adapters; None: no token is on an adapter
    windows: WindowView | None = None  # None: layers with windows use the pages of all layers
    hidden: Tensor | None = None  # [2, tokens, hidden], of the stage before; None: the pass begins at the embedding
    states: StateView | None = None  # None: no layer keeps a state; or, in a trial of memory, none is stored
    media: MediaRows | None = None  # None: all new tokens are tokens
    rope_offsets: Tensor | None = None  # int64 [3, tokens], to add to positions: time, height, width; None: all are 0
    rope_offsets_before: Tensor | None = None  # those of the tokens before, for a head that drafts
    ranks: RankTokens | None = None  # of all data-parallel ranks; None: the pass is of this rank alone
    tree: TreeRows | None = None  # rows with a tree of drafts; None: every row attends causally
    token_types: Tensor | None = None  # int64 [tokens], types of the tokens of a prompt; None: all are 0
    scores: Tensor | None = None  # float32 [rows, labels], filled by a model that classifies whole prompts
    layers: tuple[int, int] | None = None  # the pass has the layers [start:stop) only; None: all of them
    embedded: Tensor | None = None  # [tokens, hidden], looked up before the pass; None: the model does that
    taps: dict[int, Tensor | None] | None = None  # by layer, to be filled with its input, [tokens, hidden]; None: none

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.lengths_host)

    @property
    def tokens(self) -> int:
        """Number of new tokens of all rows."""
        return len(self.token_ids)

    @property
    def longest(self) -> int:
        """Positions that are read for the longest row."""
        return int(self.lengths_host.max(initial=0))
