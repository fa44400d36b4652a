"""Drafts of a row's next tokens, guessed on the device where the row stands, and which of them were right.

A drafter is informed of each pass before it runs (`saw`), and drafts for the rows that verify some (`draft`).

    position      .. 4   5   6   7   8   9 |10  11  12  13      the row stands at 10: its newest token is there
    token         .. a   b   c   d   a   b | c   d   a   b      drafts: what followed the last "a b c" before, d a b
                         `-- the longest suffix found before, of several places the latest

n-grams (prompt lookup) need no model: the row's own tokens are searched for the latest of the longest suffixes of what
it has so far. The tokens of each KV slot are kept beside the KV: a row's own are wherever its page table leads, those
of a prefix found in the radix cache among them, and nothing has to be undone when a row is retracted, moved back, or
fails.

Any guess will do: the model decides whether it is right, and a wrong one costs what no guess would have cost, since the
plan has room for it. So a row that finds no suffix repeats its newest token.

Which drafts count (`right_ones`): behind each verified token the model's own token is drawn as it always is, by the
row's seed and the token's position. A draft is right if it is that token, and all before it were. Of a draft that was
made without chance this is rejection sampling as Leviathan et al. (2023) have it: the draft is accepted with the
probability that the model gives it, and otherwise the token comes from what remains of the model's distribution. Drawn
in this way it is more: each token is the one that is drawn without drafts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.requests.delivery import step_numbers
from lockstep.runtime.forward import ForwardBatch

Int32s = NDArray[np.int32]

NGRAM_MAX = 8  # a longer suffix found before adds no information
WINDOW = 8192  # newest tokens of a row that are searched


class Drafter(Protocol):
    """Guesses tokens. Everything runs on the stream of the passes."""

    def saw(self, batch: ForwardBatch) -> None:
        """This pass runs next, with the drafts that it verifies."""

    def draft(
        self,
        rows: Tensor,
        stands: Tensor,
        newest: Tensor,
        page_table: Tensor,
        drafts: Int32s,
        reach: Tensor,
        stands_host: Int32s,
    ) -> Tensor:
        """Guess what follows the newest token of each row.

        Args:
            rows: int64 [rows], of `page_table`, int32 [table rows, width].
            stands: int64 [rows], positions of the newest tokens; `stands_host` the most that they can be, exact where
                the attention backend needs that.
            newest: int64 [rows]; `saw` does not receive them before.
            drafts: int32 [rows], how many are wanted of each; of one at least one.
            reach: int64 [rows], the last position that a row has a page for, its last draft's.
        Returns: int64 [rows, most drafts]; what is not wanted means nothing.
        """


class NgramDrafter:
    """What followed the latest of the longest suffixes of a row's own tokens.

    Args:
        slots: of the pool, its scratch page included.
        page_size: a power of two.
    """

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        self.page_shift, self.page_mask = page_size.bit_length() - 1, page_size - 1
        self.tokens = torch.zeros(slots, dtype=torch.int32, device=device)  # of each slot

    @staticmethod
    def bytes_of(slots: int) -> int:
        """Device memory for the tokens of so many slots."""
        return 4 * slots

    def saw(self, batch: ForwardBatch) -> None:
        """Keep the token of each slot."""
        self.tokens.index_copy_(0, batch.slots, batch.token_ids.to(torch.int32))

    def draft(
        self,
        rows: Tensor,
        stands: Tensor,
        newest: Tensor,
        page_table: Tensor,
        drafts: Int32s,
        reach: Tensor,
        stands_host: Int32s,
    ) -> Tensor:
        """See `Drafter`. Time and memory go with rows x the longest row, or WINDOW."""
        width = min(int(stands_host.max()), WINDOW) + 1
        # Column c is position first + c; the newest token is in the last column, where it may not be in its slot yet.
        positions = (stands - (width - 1))[:, None] + torch.arange(width, device=rows.device)
        known = positions >= 0
        at = positions.clamp(min=0)
        pages = page_table.index_select(0, rows).gather(1, at >> self.page_shift).to(torch.int64)
        slots = (pages << self.page_shift) + (at & self.page_mask)
        tokens = torch.where(known, self.tokens[slots].to(torch.int64), -1)
        tokens[:, -1] = newest
        # lengths[c]: how many tokens up to column c are those up to the last column.
        going = torch.ones_like(known)
        lengths = torch.zeros(tokens.shape, dtype=torch.int64, device=rows.device)
        for back in range(min(NGRAM_MAX, width - 1)):
            going[:, :back] = False
            last = tokens[:, width - 1 - back]
            going[:, back:] &= (tokens[:, : width - back] == last[:, None]) & (last >= 0)[:, None]
            lengths += going
        lengths[:, -1] = -1
        columns = torch.arange(width, device=rows.device)
        found = (lengths * width + columns).argmax(1)  # the longest, of these the latest
        # What follows goes round: behind the newest token comes again what followed the place found.
        period = (width - 1 - found).clamp(min=1)
        numbers = torch.arange(int(drafts.max()), device=rows.device)
        behind = found[:, None] + 1 + numbers % period[:, None]
        return tokens.gather(1, torch.where(lengths.gather(1, found[:, None]) > 0, behind, width - 1))


def right_ones(tokens: Tensor, invalid: Tensor, fed: Tensor, places: Tensor, there: Tensor) -> Tensor:
    """How many tokens each sampler got: one, and one more for each draft that was right.

    Args:
        tokens: int32 [samples] drawn; invalid: bool [samples], where none could be. Such a place counts as a wrong
            draft: it is drawn once more when the row stands there, and is invalid then.
        fed: int64 [samples], the token behind which each was drawn: the newest one or a draft.
        places: int64 [samplers, most], which samples are a sampler's, in order; there: bool, where it has so many.
    Returns: int64 [samplers].
    """
    drawn = tokens.to(torch.int64)[places]
    right = (fed[places[:, 1:]] == drawn[:, :-1]) & there[:, 1:] & ~invalid[places[:, 1:]]
    return 1 + right.to(torch.int64).cumprod(1).sum(1)


def places_of(samples: Int32s) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For samplers with so many samples each, end to end: the samples of each sampler. int64 and bool [samplers, most].

    Where a sampler has no more, its last.
    """
    numbers = np.arange(int(samples.max(initial=1)))
    firsts = np.cumsum(samples, dtype=np.int64) - samples
    there = numbers < samples[:, None]
    return firsts[:, None] + np.minimum(numbers, samples[:, None] - 1), there


def kept_samples(samples: Int32s, accepted: Int32s) -> NDArray[np.bool_]:
    """Which samples count: the first `accepted` of each sampler. bool [samples]"""
    return step_numbers(samples) < accepted.repeat(samples)
