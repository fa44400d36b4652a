"""A debug mode in which every KV slot has a tag, verified before each pass for every slot that the pass reads.

The tag of a slot identifies its KV by the prefix and the position. Requests share the KV of equal prefixes, so a tag
does not name a request. It is a sum over the prefix that changes with any token at any position, except by a chance of
2**-64. The version of the weights is in the namespace.

    tag(request, position) = seed(namespace) + sum over j <= position of mix(token j, j)      modulo 2**64

`chains` stores the expected tags of each row by position. For the prefix that a row finds in the radix cache they
follow from the row's tokens, which the CPU has. For positions that the row computes they follow from the tokens of the
pass. Both are independent of the pool. A pass writes the tags of its new tokens and then compares all tags that it
reads. A page that was given to two requests, freed too early, never written, written by a batch that failed, or left by
older weights is found before attention reads it.

At positions of media an engine has numbers that it gives contents in order of arrival, and pages may come from another
engine. Their tags are made of the content's digest and the place in it instead: `take_row` stores what a pass adds.

A slot of states has the tag of the last token that its state includes, or that of an empty state, and is copied with
it. So a row that would begin with another state than that of its prefix is found likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import PromptSpan
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.states.view import StateView

EMPTY = -1  # the tag of a slot that was never written
SPOILED = -2  # the tag of a slot that a failed batch wrote
CLEARED = -3  # the tag of a state before the first token


class CanaryError(InvariantError):
    """A pass was about to read KV that does not belong to its request."""


class Canary:
    """Tags of all slots of a pool.

    Args:
        pages: pages of the pool; its scratch page is tagged as well and never read.
        context_tokens: tokens of the longest request.
        window_tokens: positions that layers with windows attend to.
        window_pages: pages of these layers; 0: none of their own.
        state_slots: slots of layers with states.
    """

    def __init__(
        self,
        rows: int,
        pages: int,
        page_size: int,
        context_tokens: int,
        device: torch.device,
        window_tokens: int = 0,
        window_pages: int = 0,
        state_slots: int = 0,
    ) -> None:
        self.page_size, self.window_tokens = page_size, window_tokens
        window_slots = (window_pages + 1) * page_size if window_pages else 0
        self.window_tags = torch.full((window_slots,), EMPTY, dtype=torch.int64, device=device)
        self.state_tags = torch.full((state_slots,), EMPTY, dtype=torch.int64, device=device)
        self.tags = torch.full(((pages + 1) * page_size,), EMPTY, dtype=torch.int64, device=device)
        self.chains = torch.zeros((rows + 1, context_tokens + page_size), dtype=torch.int64, device=device)
        self.seeds = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.of_media: Tensor | None = None  # as `chains`: added to the bits of placeholders; None: no row had media
        self.slots_verified = 0

    @staticmethod
    def bytes_per_page(page_size: int) -> int:
        """Return the bytes of the tags of one page."""
        return page_size * torch.int64.itemsize

    def forget(self) -> None:
        """Clear all tags, after the content of the pool was lost."""
        self.tags.fill_(EMPTY)
        self.window_tags.fill_(EMPTY)
        self.state_tags.fill_(EMPTY)

    def take_row(self, row: int, namespace: str, tokens: NDArray[np.int32], spans: Sequence[PromptSpan] = ()) -> None:
        """Store the expected tags of a row's new request, as far as its tokens are known.

        Args:
            spans: media among the tokens.
        """
        seed = int.from_bytes(blake2b(namespace.encode(), digest_size=8).digest(), "little", signed=True)
        self.seeds[row] = seed
        ids = torch.from_numpy(tokens.astype(np.int64))
        bits = mix(ids, torch.arange(len(ids)))
        if spans and self.of_media is None:
            self.of_media = torch.zeros_like(self.chains)
        if self.of_media is not None:
            shift = mix(_by_content(ids, spans), torch.arange(len(ids))) - bits
            bits = bits + shift
            self.of_media[row] = 0
            self.of_media[row, : len(ids)] = shift.to(self.of_media.device)
        self.chains[row, : len(ids)] = (seed + bits.cumsum(0)).to(self.chains.device)

    def check(self, batch: ForwardBatch) -> Tensor:
        """Write the tags of the pass's new slots, and compare the tags of all slots that it reads.

        Returns: int64 [1, 7]: the number of wrong slots; the number of them that a failed batch did not write; for the
            first such slot, or else the first wrong one, the index of its row in the batch, and its position; the same
            of rows with a wrong state, without a position.
        """
        rows = batch.rows.to(torch.int64)
        counts = torch.from_numpy((batch.lengths_host - batch.starts_host).astype(np.int64)).to(rows.device)
        of_row = torch.arange(batch.count, device=rows.device).repeat_interleave(counts, output_size=batch.tokens)
        first = batch.indptr[:-1].to(torch.int64)
        starts = torch.from_numpy(batch.starts_host.astype(np.int64)).to(rows.device)

        new = mix(batch.token_ids, batch.positions)
        if self.of_media is not None:
            new = new + self.of_media[rows[of_row], batch.positions]
        total = new.cumsum(0)
        behind = self.chains[rows, (starts - 1).clamp(min=0)]
        base = torch.where(starts > 0, behind, self.seeds[rows])
        chain = total + (base - total[first] + new[first])[of_row]
        self.chains[rows[of_row], batch.positions] = chain
        self.tags[batch.slots] = chain

        positions = torch.arange(batch.longest, device=rows.device)
        pages = batch.page_table[rows][:, positions // self.page_size].to(torch.int64)
        found = self.tags[pages * self.page_size + positions % self.page_size]
        read = positions < batch.lengths.to(torch.int64)[:, None]
        right = self.chains[rows, : batch.longest]
        wrong = (found != right) & read
        foreign = wrong & (found != SPOILED)
        if (windows := batch.windows) is not None:
            self.window_tags[windows.slots] = chain
            pages = windows.page_table[:, positions // self.page_size].to(torch.int64)
            found = self.window_tags[pages * self.page_size + positions % self.page_size]
            here = read & (positions > starts[:, None] - self.window_tokens) & (found != right)
            wrong, foreign = wrong | here, foreign | (here & (found != SPOILED))
        # KV that is computed from wrong KV is wrong as well.
        all_wrong, of_states = wrong.any(1), torch.zeros(3, dtype=torch.int64, device=rows.device)
        if (states := batch.states) is not None:
            tags = self.state_tags.index_select(0, states.begins)
            off = tags != torch.where(starts > 0, behind, CLEARED)
            other = off & (tags != SPOILED)
            first_off = torch.where(other.any(), other, off).to(torch.int8).argmax()
            all_wrong, of_states = all_wrong | off, torch.stack((off.sum(), other.sum(), first_off))
        kept = torch.where(all_wrong[of_row], SPOILED, chain)
        if states is not None:
            self._tag_states(states, kept)
        self.tags[batch.slots] = kept
        if windows is not None:
            self.window_tags[windows.slots] = kept
        self.slots_verified += int(batch.lengths_host.sum())
        seen = torch.where(foreign.any(), foreign, wrong)
        place = seen.view(-1).to(torch.int8).argmax()
        found = torch.stack((wrong.sum(), foreign.sum(), place // batch.longest, place % batch.longest))
        return torch.cat((found, of_states))[None]

    def _tag_states(self, states: StateView, chain: Tensor) -> None:
        """Write the tags of the states that a pass stores. `chain`: int64 [tokens], of the pass's new tokens."""
        for group in states.groups:
            tokens = chain if group.tokens is None else chain.index_select(0, group.tokens)
            last = tokens.view(-1, group.length)[:, -1]
            self.state_tags[group.writes] = last
            if group.kept is not None and group.kept_in is not None:
                self.state_tags[group.kept_in] = last.index_select(0, group.kept)
        if states.copies is not None:
            self.state_tags[states.copies[1]] = self.state_tags[states.copies[0]]

    def take_states(self, cleared: Tensor | None, copied: tuple[Tensor, Tensor] | None) -> None:
        """Note slots of states that were cleared or copied before a batch; see `RowSlots.fold`."""
        if cleared is not None:
            self.state_tags[cleared] = CLEARED
        if copied is not None:
            self.state_tags[copied[1]] = self.state_tags[copied[0]]

    def spoil_states(self, slots: Tensor) -> None:
        """Mark slots of states as written by a failed batch."""
        self.state_tags[slots] = SPOILED

    def spoil(self, slots: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Mark the slots of a failed batch as not written: of each pass, in all pages and in those of windows."""
        for some, of_windows in slots:
            self.tags[some] = SPOILED
            if of_windows is not None:
                self.window_tags[of_windows] = SPOILED

    def judge(self, plan: BatchPlan, found: NDArray[np.int64], *, behind_failure: bool = False) -> None:
        """Raise CanaryError if any pass of a batch read KV that is not its own.

        A batch that was launched before the failure of an earlier one was known (`behind_failure`) may read slots of
        the failed batch: its rows are dead by then, or are retracted.
        """
        for number, (wrong, foreign, i, position, off, other, of_row) in enumerate(found.tolist()):
            of_pass = np.flatnonzero(plan.stops - plan.starts > number) if plan.steps > 1 else np.arange(len(plan.rows))
            if other or (off and not behind_failure):
                i = int(of_pass[of_row])
                what = "which is not that of its tokens" if other else "which a failed batch wrote"
                raise CanaryError(
                    f"batch {plan.batch_id}: r{int(plan.request_ids[i])} in row {int(plan.rows[i])} begins with a "
                    f"state {what} ({off} such rows)"
                )
            if foreign or (wrong and not behind_failure):
                i = int(of_pass[i])
                what = "which is not its KV" if foreign else "which a failed batch wrote"
                raise CanaryError(
                    f"batch {plan.batch_id}: r{int(plan.request_ids[i])} in row {int(plan.rows[i])} reads position "
                    f"{position}, in page {position // self.page_size} of its table, {what} ({wrong} such slots)"
                )


def _by_content(ids: Tensor, spans: Sequence[PromptSpan]) -> Tensor:
    """Return tokens with the digest of the content plus the place in it at positions of media, int64."""
    found = ids.clone()
    for span in spans:
        first = int.from_bytes(span.digest[:8].ljust(8, b"\0"), "little", signed=True)
        part = found[span.start : span.stop]
        part.copy_(torch.arange(len(part)) + first)
    return found


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return 64 bits for each (token, position), int64; their sums identify sequences."""
    bits = (tokens + 1) * -7046029254386353131 + (positions + 1) * -4417276706812531889
    bits = (bits ^ (bits >> 30)) * -4658895280553007687
    bits = (bits ^ (bits >> 27)) * -7723592293110705685
    return bits ^ (bits >> 31)
