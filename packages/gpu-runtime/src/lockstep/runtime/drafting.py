"""Drafts: guesses of a row's next tokens, made on the device, and the check which of them were right.

A drafter receives each pass before it runs (`observe_batch`), and drafts for the rows that verify some (`draft`).

    position      .. 4   5   6   7   8   9 |10  11  12  13      the newest token is at position 10
    token         .. a   b   c   d   a   b | c   d   a   b      drafts: the tokens after the last "a b c": d a b
              `-- the longest suffix that occurred before, at its latest occurrence

n-grams (prompt lookup) need no model: the row's own tokens are searched for the latest occurrence of their longest
suffix. The token of each KV slot is stored beside the KV. The page table therefore leads to a row's tokens, including
those of a prefix from the radix cache, and nothing has to be undone when a row is retracted, moved back, or fails.

Any guess is valid: the model decides whether it is right, and a wrong guess costs as much as no guess, since the plan
has room for it. So a row without an earlier occurrence repeats its newest token.

Which drafts count (`right_ones`): behind each verified token the model's own token is drawn as usual, by the row's seed
and the token's position. A draft is right if it equals that token and all drafts before it are right. For deterministic
drafts this is the rejection sampling of Leviathan et al. (2023): the draft is accepted with the probability that the
model assigns to it, and otherwise the token comes from the rest of the model's distribution. Here moreover each token
equals the token that is drawn without drafts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.requests.delivery import step_numbers
from lockstep.runtime.draft_tree import TreeShape
from lockstep.runtime.forward import ForwardBatch

Int32s = NDArray[np.int32]

NGRAM_MAX = 8  # a longer suffix adds no information
WINDOW = 8192  # newest tokens of a row that are searched


class DraftingRows(NamedTuple):
    """The rows that draft, and where they stand.

    Args:
        rows: int64 [rows], indices of `page_table`, int32 [table rows, width].
        stands: int64 [rows], positions of the newest tokens; `stands_host`: upper bounds of them, exact if the
            attention backend requires exact lengths.
        rope_offsets: int64 [3, rows], what tokens behind the prompts add to their positions; None: nothing.
        newest: int64 [rows], the newest tokens; `observe_batch` has not received them yet.
        drafts: int32 [rows], requested drafts of each row; at least one row has at least one.
        reach: int64 [rows], the last position for which a row has a page, that of its last draft.
    """

    rows: Tensor
    stands: Tensor
    newest: Tensor
    page_table: Tensor
    drafts: Int32s
    reach: Tensor
    stands_host: Int32s
    rope_offsets: Tensor | None = None


class Drafter(Protocol):
    """The interface of a drafter. All its work runs on the stream of the passes."""

    reads_layers: bool  # whether it reads what a model computes, so that decodes run in pieces (pieces.py)

    def observe_batch(self, batch: ForwardBatch) -> None:
        """Take in the pass that runs next, with the drafts that it verifies."""

    def computed(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Take in what the model computed for this pass; `hidden`: what its `forward` returned."""

    def moved(self, source: Tensor, target: Tensor) -> None:
        """Move what belongs to the tokens of some slots, as their KV: int64 [n] both."""

    def draft(self, drafting: DraftingRows) -> Tensor:
        """Guess the tokens behind the newest token of each row.

        Returns: int64 [rows, most drafts]; values beyond a row's `drafts` have no meaning.
        """


class TreeDrafter(Drafter, Protocol):
    """A drafter that also drafts trees."""

    def draft_tree(self, drafting: DraftingRows, shape: TreeShape) -> Tensor:
        """Guess the tokens of a tree. Rows have slots for `drafts` drafts.

        Returns: int64 [rows, drafts of the shape]; behind each token the likeliest first.
        """


# mechanism: drafts (executed)
class NgramDrafter:
    """A drafter that repeats the tokens after the latest occurrence of the longest suffix of a row's own tokens.

    Args:
        slots: slots of the pool, its scratch page included.
        page_size: slots per page, a power of two.
    """

    reads_layers = False

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        self.page_shift, self.page_mask = page_size.bit_length() - 1, page_size - 1
        self.tokens = torch.zeros(slots, dtype=torch.int32, device=device)  # token of each slot

    @staticmethod
    def bytes_of(slots: int) -> int:
        """Return the bytes of device memory for the tokens of `slots` slots."""
        return 4 * slots

    def observe_batch(self, batch: ForwardBatch) -> None:
        """Store the token of each slot."""
        self.tokens.index_copy_(0, batch.slots, batch.token_ids.to(torch.int32))

    def computed(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Do nothing: the tokens are known before the pass."""

    def moved(self, source: Tensor, target: Tensor) -> None:
        """Move the tokens of slots."""
        self.tokens.index_copy_(0, target, self.tokens.index_select(0, source))

    def draft(self, drafting: DraftingRows) -> Tensor:
        """Draft; see `Drafter`. Time and memory are proportional to rows x the longest row, at most WINDOW."""
        rows, stands, newest, page_table, drafts, _, stands_host, _ = drafting
        width = min(int(stands_host.max()), WINDOW) + 1
        # Column c is position first + c. The newest token is in the last column, because its slot may not hold it yet.
        positions = (stands - (width - 1))[:, None] + torch.arange(width, device=rows.device)
        known = positions >= 0
        at = positions.clamp(min=0)
        pages = page_table.index_select(0, rows).gather(1, at >> self.page_shift).to(torch.int64)
        slots = (pages << self.page_shift) + (at & self.page_mask)
        tokens = torch.where(known, self.tokens[slots].to(torch.int64), -1)
        tokens[:, -1] = newest
        # lengths[c]: number of tokens up to column c that equal those up to the last column.
        going = torch.ones_like(known)
        lengths = torch.zeros(tokens.shape, dtype=torch.int64, device=rows.device)
        for back in range(min(NGRAM_MAX, width - 1)):
            going[:, :back] = False
            last = tokens[:, width - 1 - back]
            going[:, back:] &= (tokens[:, : width - back] == last[:, None]) & (last >= 0)[:, None]
            lengths += going
        lengths[:, -1] = -1
        columns = torch.arange(width, device=rows.device)
        found = (lengths * width + columns).argmax(1)  # the longest, and of equally long ones the latest
        # Drafts are periodic: at the newest token they continue with the tokens after the occurrence.
        period = (width - 1 - found).clamp(min=1)
        numbers = torch.arange(int(drafts.max()), device=rows.device)
        behind = found[:, None] + 1 + numbers % period[:, None]
        drafts_of = tokens.gather(1, torch.where(lengths.gather(1, found[:, None]) > 0, behind, width - 1))
        return drafts_of.clamp(min=0)  # placeholders of media are no tokens


def right_ones(tokens: Tensor, invalid: Tensor, fed: Tensor, places: Tensor, there: Tensor) -> Tensor:
    """Return the number of tokens of each sampler: one, and one more for each right draft.

    Args:
        tokens: int32 [samples], drawn; invalid: bool [samples], whether no token could be drawn. An invalid sample
            counts as a wrong draft: it is drawn again when its token is the newest, and is invalid then.
        fed: int64 [samples], the input token of each draw: the newest token or a draft.
        places: int64 [samplers, most], the samples of each sampler, in order; there: bool, false for padding.
    Returns: int64 [samplers].
    """
    drawn = tokens.to(torch.int64)[places]
    right = (fed[places[:, 1:]] == drawn[:, :-1]) & there[:, 1:] & ~invalid[places[:, 1:]]
    return 1 + right.to(torch.int64).cumprod(1).sum(1)


def places_of(samples: Int32s) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the samples of each sampler, for samplers with `samples` samples each, end to end.

    Returns: int64 [samplers, most], padded with the sampler's last sample; bool [samplers, most], false for padding.
    """
    numbers = np.arange(int(samples.max(initial=1)))
    firsts = np.cumsum(samples, dtype=np.int64) - samples
    there = numbers < samples[:, None]
    return firsts[:, None] + np.minimum(numbers, samples[:, None] - 1), there


def kept_samples(samples: Int32s, accepted: Int32s) -> NDArray[np.bool_]:
    """Return which samples count, the first `accepted` of each sampler: bool [samples]."""
    return step_numbers(samples) < accepted.repeat(samples)
