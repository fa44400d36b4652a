"""The device's state by request row, as a fold over plans: page tables and newest tokens.

    rows_taken   a request takes a row: its page table and newest token are reset
    deltas       table[rows, index] = pages; of two entries for one place the later applies
    sampled      newest[row] = token

A plan is copied to the device as one array of packed integers, `PackedPlan`. Its fold needs one launch for the rows
taken, one for the pages and none for what does not change. All launches here are on the stream of the forward passes,
so that a table changes only behind the batches that read its previous content.

    flat     | taken | places | page places | offsets | tokens | ... |  rows | indptr | lengths | pages |
             |<----------- used as int64, converted in one launch --->|<----- used as int32 ----------->|

While a batch that verifies drafts is in flight, only the device has the position of a row's newest token (`stands`). A
plan has its least and its largest value, and the fold computes positions, slots and lengths from the actual one.

The request of each row is stored on the CPU as well (`holders`). With `debug`, each plan is checked against that and a
copy of the page tables before it is launched, and an impossible one is refused with a PlanError that names the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan, HybridChanges, PageDeltas, RowTaken
from lockstep.core.contract.errors import ConfigError
from lockstep.core.requests.delivery import step_numbers
from lockstep.runtime.draft_tree import TreeShape, shape_of
from lockstep.runtime.errors import PlanError
from lockstep.runtime.forward import WindowedPages, WindowView

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ENTRIES_MAX = 2**31  # of a page table: indices of its entries are copied as int32
FIRST_WIDTH = 16  # initial pages of a row, before the table grows
NO_HOLDER = -1
NONE: Int32s = np.empty(0, np.int32)


@dataclass(slots=True)
class VerifyRows:
    """Rows that compute their newest token and drafts behind it, the last ones of a pass.

    All fields are int32 [rows].
    """

    rows: Int32s
    least: Int32s  # least position of a row's newest token ...
    most: Int32s  # ... and the most it can be
    drafts: Int32s
    forced: Int32s = field(default_factory=lambda: NONE)  # drafts that a grammar forces; empty if none
    forced_tokens: Int32s = field(default_factory=lambda: NONE)  # end to end
    tree: TreeShape | None = None  # of the drafts; None: chains

    @property
    def counts(self) -> Int32s:
        """New tokens of each row."""
        return self.drafts + np.int32(1)

    @property
    def exact(self) -> bool:
        """Whether the positions are known on the CPU."""
        return np.array_equal(self.least, self.most)


@dataclass(slots=True)
class ForwardPass:
    """One forward pass of a plan, on the CPU. A plan has one, or one for each of its `steps`.

    Extend rows come first, in the rows and in the new tokens.
    """

    rows: Int32s  # [rows], rows of the tables
    starts: Int32s  # [rows]
    stops: Int32s  # [rows]
    extend_rows: int
    token_ids: Int32s  # new tokens of the extend rows, end to end
    sample_rows: Int32s  # indices in `rows`
    logprob_at: Int32s = field(default_factory=lambda: NONE)  # new tokens before each logprob target
    logprob_targets: Int32s = field(default_factory=lambda: NONE)  # tokens with requested logprobs
    adapter_slots: Int32s | None = None  # [rows], -1 for the model alone; None if all are
    verifying: VerifyRows | None = None  # its last rows; they count among `extend_rows`, and `starts` has their most
    samples: Int32s | None = None  # [samplers], samples of each; None: one each

    @property
    def indptr(self) -> Int32s:
        """First new token of each row, and the number of new tokens."""
        if not self.extend_rows:  # one each
            return np.arange(len(self.rows) + 1, dtype=np.int32)
        return np.concatenate((np.zeros(1, np.int32), np.cumsum(self.stops - self.starts, dtype=np.int32)))


@dataclass(slots=True)
class VerifyingTensors:
    """The verifying rows of a pass on the device. All fields are int64."""

    rows: Tensor  # [rows]
    stands: Tensor  # [rows], position of the newest token
    members: Tensor  # [new tokens of these rows]: the row of each
    numbers: Tensor  # [new tokens]: 0 for the newest token, then 1, 2, ... for the drafts
    depths: Tensor | None = None  # [new tokens]: how far each is behind the newest token; None: `numbers`, in chains


@dataclass(slots=True)
class PassTensors:
    """A forward pass on the device."""

    rows: Tensor  # int32 [rows]
    indptr: Tensor  # int32 [rows + 1]
    lengths: Tensor  # int32 [rows]
    positions: Tensor  # int64 [tokens]
    slots: Tensor  # int64 [tokens]
    given_ids: Tensor  # int64 [tokens of extend rows]
    decode_rows: Tensor  # int64 [decode rows], each computes its newest token
    logits_at: Tensor  # int64 [samples + logprobs]
    sample_rows: Tensor  # int32 [samples], rows
    sampled_rows: Tensor  # int64, the same
    sampled_positions: Tensor  # int64 [samples], of the tokens to draw
    logprob_targets: Tensor  # int64 [logprobs]
    verifying: VerifyingTensors | None = None


@dataclass(slots=True)
class PackedPlan:
    """A plan as one array of integers, with the sizes of its parts."""

    flat: Int32s
    longs: int  # this many numbers at the start are used as int64
    sizes: list[int]  # of the parts, in order
    long_parts: int  # this many parts are used as int64
    passes: list[ForwardPass]
    taken: int  # rows that new requests take
    width: int  # of the page table for which places were computed
    windows: bool = False  # the last two parts that are used as int64 are full pages and their window pages


def verifies(plan: BatchPlan) -> bool:
    """Return whether rows of a plan verify drafts, or have positions that only the device has.

    Other rows only decode.
    """
    return plan.speculation is not None and bool(plan.starts_after or plan.speculation.draft_lengths.any())


def passes_of(plan: BatchPlan) -> list[ForwardPass]:
    """Return the forward passes of a plan: one, or one for each step of a plan that decodes several times."""
    at, targets = _judged(plan)
    if verifies(plan):
        assert plan.speculation is not None
        first, drafts = plan.extend_rows, plan.speculation.draft_lengths
        most = plan.stops[first:] - np.int32(1) - plan.speculation.path_lengths()
        tree = shape_of(plan.speculation.parents) if plan.speculation.parents.size else None
        forced, tokens = plan.speculation.forced_lengths, plan.speculation.forced_tokens
        verifying = VerifyRows(plan.rows[first:], plan.starts[first:], most, drafts, forced, tokens, tree)
        stops = plan.stops  # of a tree, slots behind the span have KV too
        if tree is not None:
            stops = np.concatenate((stops[:first], most + verifying.counts))
        samples = np.ones(len(plan.rows), np.int32)
        samples[first:] += drafts
        return [
            ForwardPass(
                plan.rows,
                np.concatenate((plan.starts[:first], verifying.most)),
                stops,
                len(plan.rows),
                plan.token_ids,
                plan.sample_rows,
                at,
                targets,
                verifying=verifying,
                samples=samples[plan.sample_rows],
            )
        ]
    if plan.blocks is not None:  # the tokens of blocks are in `blocks.DeviceBlocks`
        counts = plan.stops - plan.starts
        no_ids = np.zeros(int(counts.sum()), np.int32)
        one = ForwardPass(plan.rows, plan.starts, plan.stops, len(plan.rows), no_ids, plan.sample_rows, samples=counts)
        return [one]
    if plan.steps == 1:
        return [
            ForwardPass(
                plan.rows, plan.starts, plan.stops, plan.extend_rows, plan.token_ids, plan.sample_rows, at, targets
            )
        ]
    counts = plan.stops - plan.starts
    passes = []
    for step in range(int(counts.max(initial=0))):
        going = np.flatnonzero(counts > step)
        starts = plan.starts[going] + np.int32(step)
        all_rows = np.arange(going.size, dtype=np.int32)
        passes.append(ForwardPass(plan.rows[going], starts, starts + np.int32(1), 0, NONE, all_rows))
    return passes


def _judged(plan: BatchPlan) -> tuple[Int32s, Int32s]:
    """Return the new tokens behind which logprobs are requested, and the target tokens, over all spans end to end."""
    if not plan.logprob_spans:
        return NONE, NONE
    counts = (plan.stops - plan.starts)[: plan.extend_rows]
    first = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    at = [
        np.arange(len(span.targets), dtype=np.int32) + (first[span.index] + span.start - plan.starts[span.index])
        for span in plan.logprob_spans
    ]
    return np.concatenate(at), np.concatenate([span.targets for span in plan.logprob_spans])


def check_page_table(rows: int, context_tokens: int, page_size: int) -> None:
    """Raise ConfigError if the page table of `rows` rows has more entries than int32 can index."""
    width = -(-context_tokens // page_size)
    if (rows + 1) * width > ENTRIES_MAX:
        raise ConfigError(
            f"`context_tokens_max` {context_tokens:,} with `page_size` {page_size} makes {width:,} pages a request; "
            f"for {rows:,} request rows that is a page table of more than {ENTRIES_MAX:,} places\n"
            "hint: a larger page_size, fewer max_running_requests, or a shorter context_tokens_max"
        )


class DeviceTables:
    """Page table and newest token of every request row.

    Args:
        rows: rows of the engine, `SchedConfig.rows_max`. One more is kept for the padding of CUDA graphs.
        pages: pages of the pool; the page behind the last is scratch. The same holds for pages of windows.
        context_tokens: makes tables as wide as they can ever become; without it they grow by doubling.
        debug: check every plan against the content of the rows.
        adapter_slots: adapter slots of the model, which rows may use.
        speculates: whether plans may verify drafts, so that the device stores the position of each row.
    Raises: ConfigError, see `check_page_table`.
    """

    def __init__(
        self,
        rows: int,
        pages: int | WindowedPages,
        page_size: int,
        device: torch.device,
        *,
        context_tokens: int | None = None,
        debug: bool = False,
        adapter_slots: int = 0,
        speculates: bool = False,
    ) -> None:
        check_page_table(rows, page_size if context_tokens is None else context_tokens, page_size)
        window_pages, pages = (pages.windows, pages.full) if isinstance(pages, WindowedPages) else (0, pages)
        self.count, self.page_count, self.page_size = rows, pages, page_size
        self.page_shift = page_size.bit_length() - 1
        self.width = FIRST_WIDTH if context_tokens is None else -(-context_tokens // page_size)
        self.device = device
        self.debug = debug
        self.page_table = torch.full((rows + 1, self.width), pages, dtype=torch.int32, device=device)
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.stands: Tensor | None = None  # int64 [rows + 1], position of the newest token
        if speculates:
            self.stands = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.window_page_count = window_pages
        self.window_of: Tensor | None = None  # int64 [pages + 1], window page of each page; scratch pages correspond
        if window_pages:
            self.window_of = torch.full((pages + 1,), window_pages, dtype=torch.int64, device=device)
        # The state of the rows on the CPU, as of the last plan launched.
        self.holders: Int64s = np.full(rows, NO_HOLDER, np.int64)
        self.taken: list[RowTaken | None] = [None] * rows
        self.with_logprobs = np.zeros(rows, np.bool_)
        self.with_hidden_states = np.zeros(rows, np.bool_)
        self.under_grammar = np.zeros(rows, np.bool_)
        self.adapter_slots: Int32s = np.full(rows, NO_HOLDER, np.int32)
        self._slots = adapter_slots
        self._mirror: Int32s = np.full((rows, self.width), NO_HOLDER, np.int32)  # of the page table; kept with `debug`

    # -------------------------------------------------------------------------------------------- at launch, on the CPU

    def take_in(self, plan: BatchPlan) -> PackedPlan:
        """Record the requests of rows from this plan on, and pack the plan for the device.

        Raises: PlanError, with `debug`, for an impossible plan.
        """
        for taken in plan.rows_taken:
            if not 0 <= taken.row < self.count:
                raise PlanError(
                    f"batch {plan.batch_id} takes row {taken.row}, but there are rows 0 to {self.count - 1}"
                )
            self.holders[taken.row] = taken.request_id
            self.taken[taken.row] = taken
            self.with_logprobs[taken.row] = taken.logprobs
            self.with_hidden_states[taken.row] = taken.hidden_states
            self.under_grammar[taken.row] = taken.grammar is not None
            self.adapter_slots[taken.row] = self._slot_of(plan, taken) if taken.adapter else NO_HOLDER
        rows, index, pages = last_entries(plan.deltas)
        needed = max(int(index.max(initial=0)), (int(plan.stops.max(initial=1)) - 1) >> self.page_shift) + 1
        if needed > self.width:
            self.width = self._wider(plan, needed)
        if self.debug:
            self._check(plan, rows, index, pages)
        return self._packed(plan, rows, index, pages)

    def _slot_of(self, plan: BatchPlan, taken: RowTaken) -> int:
        if not 0 <= taken.adapter_slot < self._slots:
            raise PlanError(
                f"batch {plan.batch_id} runs r{taken.request_id} on the adapter {taken.adapter!r} in slot "
                f"{taken.adapter_slot}, but this executor has {self._slots} slots"
            )
        return taken.adapter_slot

    def _wider(self, plan: BatchPlan, needed: int) -> int:
        """Return the width doubled until it suffices, at most the limit of entries."""
        most, width = ENTRIES_MAX // (self.count + 1), self.width
        if needed > most:
            raise PlanError(f"batch {plan.batch_id} needs {needed:,} pages of a row, but tables have {most:,} at most")
        while width < needed:
            width *= 2
        return min(width, most)

    def _packed(self, plan: BatchPlan, rows: Int32s, index: Int32s, pages: Int32s) -> PackedPlan:
        width, mask = np.int32(self.width), np.int32(self.page_size - 1)
        passes = passes_of(plan)
        if self._slots:
            for one in passes:
                slots = self.adapter_slots[one.rows]
                one.adapter_slots = slots if (slots != NO_HOLDER).any() else None
        longs: list[Int32s] = [np.array([taken.row for taken in plan.rows_taken], np.int32), rows * width + index]
        ints: list[Int32s] = [pages]
        for one in passes:
            token_rows, positions, indptr = one.rows, one.starts, one.indptr
            if one.extend_rows:  # otherwise one new token for each row
                counts = one.stops - one.starts
                token_rows, positions = one.rows.repeat(counts), one.starts.repeat(counts) + step_numbers(counts)
            sampling, behind = one.rows[one.sample_rows], indptr[one.sample_rows + 1] - np.int32(1)
            stops = one.stops[one.sample_rows]
            if one.samples is not None:
                back = step_numbers(one.samples) + np.int32(1) - one.samples.repeat(one.samples)
                sampling, behind = sampling.repeat(one.samples), behind.repeat(one.samples) + back
                stops = stops.repeat(one.samples) + back
            longs += (
                positions,
                token_rows * width + (positions >> self.page_shift),
                positions & mask,
                one.token_ids,
                one.rows[one.extend_rows :],
                np.concatenate((behind, one.logprob_at)),
                sampling,
                stops,
                one.logprob_targets,
            )
            ints += (one.rows, indptr, one.stops, sampling)
        if (drafted := passes[0].verifying if passes else None) is not None:
            counts = drafted.counts
            members = np.arange(len(counts), dtype=np.int32).repeat(counts)
            longs += (drafted.rows, drafted.least, drafted.most, members, (numbers := step_numbers(counts)))
            if drafted.tree is not None:
                longs.append(drafted.tree.depths[numbers])
        if windows := plan.hybrid is not None and bool(plan.hybrid.pages.size):
            assert plan.hybrid is not None
            longs += last_windows(plan.hybrid)
        parts = longs + ints
        return PackedPlan(
            np.concatenate(parts).astype(np.int32, copy=False),
            sum(map(len, longs)),
            [len(part) for part in parts],
            len(longs),
            passes,
            len(plan.rows_taken),
            self.width,
            windows,
        )

    def _check(self, plan: BatchPlan, rows: Int32s, index: Int32s, pages: Int32s) -> None:
        """Raise PlanError for rows without a request, pages that do not exist, or positions without a page."""
        name = f"batch {plan.batch_id}"
        all_rows = np.concatenate((plan.rows, rows))
        if all_rows.size and (int(all_rows.min()) < 0 or int(all_rows.max()) >= self.count):
            raise PlanError(f"{name} names rows outside 0 to {self.count - 1}: {_few(all_rows)}")
        for i in np.flatnonzero(self.holders[plan.rows] != plan.request_ids).tolist():
            row, holder = int(plan.rows[i]), int(self.holders[plan.rows[i]])
            holding = "no request holds" if holder == NO_HOLDER else f"r{holder} holds"
            raise PlanError(f"{name} runs r{int(plan.request_ids[i])} in row {row}, which {holding}")
        if np.unique(plan.rows).size != plan.rows.size:
            raise PlanError(f"{name} names a row twice: {_few(plan.rows)}")
        for row in rows[self.holders[rows] == NO_HOLDER].tolist():
            raise PlanError(f"{name} changes the page table of row {row}, which no request holds")
        wrong = (pages < 0) | (pages >= self.page_count)
        if wrong.any():
            raise PlanError(f"{name} gives out pages outside 0 to {self.page_count - 1}: {_few(pages[wrong])}")
        if plan.hybrid is not None and (windows := plan.hybrid.window_pages).size:
            wrong = (windows < 0) | (windows >= self.window_page_count)
            if wrong.any():
                raise PlanError(
                    f"{name} gives out window pages outside 0 to {self.window_page_count - 1}: {_few(windows[wrong])}"
                )
        spans = plan.stops - plan.starts
        if (spans <= 0).any() or (plan.starts < 0).any():
            raise PlanError(f"{name} has an empty span: {_few(plan.starts)} to {_few(plan.stops)}")
        if plan.speculation is not None:
            drafts, forced = plan.speculation.draft_lengths, plan.speculation.forced_lengths
            if len(drafts) != len(plan.rows) - plan.extend_rows or (drafts < 0).any():
                raise PlanError(f"{name} verifies {_few(drafts)} drafts of {len(plan.rows) - plan.extend_rows} rows")
            if forced.size and (len(forced) != len(drafts) or (forced > drafts).any() or (forced < 0).any()):
                raise PlanError(f"{name} has {_few(forced)} forced tokens among {_few(drafts)} drafts")
            if int(forced.sum()) != len(plan.speculation.forced_tokens):
                given = len(plan.speculation.forced_tokens)
                raise PlanError(f"{name} has {given} of {int(forced.sum())} forced tokens")
            parents = plan.speculation.parents
            if parents.size and (
                int(drafts.max(initial=0)) > len(parents)
                or (parents < 0).any()
                or (parents > np.arange(len(parents))).any()
            ):
                raise PlanError(f"{name} verifies {_few(drafts)} drafts of a tree with parents {_few(parents)}")
            spare = spans[plan.extend_rows :] - np.int32(1) - plan.speculation.path_lengths()
            open_ones = np.zeros(len(plan.rows), np.bool_)
            open_ones[[after.index for after in plan.starts_after]] = True
            if (spare < 0).any() or spare[~open_ones[plan.extend_rows :]].any():
                raise PlanError(f"{name} has spans of {_few(spans[plan.extend_rows :])} for {_few(drafts)} drafts")
        elif plan.blocks is None and (spans[plan.extend_rows :] > plan.steps).any():
            raise PlanError(f"{name} decodes more than {plan.steps} tokens of a row: {_few(spans[plan.extend_rows :])}")
        new_tokens = int((spans[: plan.extend_rows] if plan.blocks is None else plan.blocks.given).sum())
        if new_tokens != len(plan.token_ids):
            raise PlanError(f"{name} has {len(plan.token_ids)} token ids for {new_tokens} new tokens")
        if self._mirror.shape[1] < self.width:
            wider: Int32s = np.full((self.count, self.width), NO_HOLDER, np.int32)
            wider[:, : self._mirror.shape[1]] = self._mirror
            self._mirror = wider
        for taken in plan.rows_taken:
            self._mirror[taken.row] = NO_HOLDER
        self._mirror[rows, index] = pages
        stops = plan.stops
        if plan.speculation is not None and plan.speculation.parents.size:
            stops = stops.copy()
            stops[plan.extend_rows :] += plan.speculation.draft_lengths - plan.speculation.path_lengths()
        for row, stop in zip(plan.rows.tolist(), stops.tolist(), strict=True):
            if (self._mirror[row, : -(-stop // self.page_size)] == NO_HOLDER).any():
                raise PlanError(f"{name} reads row {row} up to position {stop}, where its table has no page")

    # ------------------------------------------------------------------------------------------------- on the device

    def fold(self, packed: PackedPlan, flat: Tensor) -> list[PassTensors]:
        """Apply a plan's changes, and return the tensors of its passes. Called once per plan, in launch order.

        Args:
            flat: int32, `packed.flat` on the device.
        Returns: the tensors of each pass. The tokens of its decode rows are read before each pass, see `token_ids`.
        """
        longs = flat[: packed.longs].to(torch.int64)
        parts = list(torch.split(longs, packed.sizes[: packed.long_parts]))
        parts += torch.split(flat[packed.longs :], packed.sizes[packed.long_parts :])
        if packed.width > self.page_table.shape[1]:
            wider = torch.full((self.count + 1, packed.width), self.page_count, dtype=torch.int32, device=self.device)
            wider[:, : self.page_table.shape[1]] = self.page_table
            self.page_table = wider
        taken, places, pages = parts[0], parts[1], parts[packed.long_parts]
        if packed.taken:
            self.page_table.index_fill_(0, taken, self.page_count)
            self.newest.index_fill_(0, taken, 0)
            if self.stands is not None:
                self.stands.index_fill_(0, taken, 0)
        if len(places):
            self.page_table.view(-1).index_copy_(0, places, pages)
        if packed.windows:
            assert self.window_of is not None
            self.window_of.index_copy_(0, *parts[packed.long_parts - 2 : packed.long_parts])
        table = self.page_table.view(-1)
        laid = []
        for number in range(len(packed.passes)):
            at = 2 + 9 * number
            positions, page_places, offsets, ids, decoding, logits_at, rows, drawn, targets = parts[at : at + 9]
            at = packed.long_parts + 1 + 4 * number
            of_rows, indptr, lengths, sample_rows = parts[at : at + 4]
            slots = table.index_select(0, page_places).to(torch.int64) * self.page_size + offsets
            given = (of_rows, indptr, lengths, positions, slots, ids, decoding, logits_at)
            laid.append(PassTensors(*given, sample_rows, rows, drawn, targets))
        if packed.passes and packed.passes[0].verifying is not None:
            self._place(laid[0], *parts[11 : 16 if packed.passes[0].verifying.tree is None else 17])
        return laid

    def _place(
        self,
        tensors: PassTensors,
        rows: Tensor,
        least: Tensor,
        most: Tensor,
        members: Tensor,
        numbers: Tensor,
        depths: Tensor | None = None,
    ) -> None:
        """Compute positions of the verifying rows of a pass. After a failed batch they are any in the allowed range."""
        assert self.stands is not None
        stands = torch.minimum(torch.maximum(self.stands.index_select(0, rows), least), most)
        tensors.verifying = VerifyingTensors(rows, stands, members, numbers, depths)
        others, moved = len(tensors.rows) - len(rows), (most - stands).to(torch.int32)
        tensors.lengths = torch.cat((tensors.lengths[:others], tensors.lengths[others:] - moved))
        positions = stands.index_select(0, members) + numbers
        given = len(tensors.given_ids)
        tensors.positions = torch.cat((tensors.positions[:given], positions))
        pages = self.page_table[rows.index_select(0, members), positions >> self.page_shift].to(torch.int64)
        slots = pages * self.page_size + (positions & (self.page_size - 1))
        tensors.slots = torch.cat((tensors.slots[:given], slots))
        if depths is not None:  # slots are those of numbers, positions those of depths
            tensors.positions = torch.cat((tensors.positions[:given], stands.index_select(0, members) + depths))
        samples = len(tensors.sampled_rows)
        tensors.sampled_positions = tensors.positions.index_select(0, tensors.logits_at[:samples]) + 1

    def window_view(self, rows: Tensor, slots: Tensor) -> WindowView | None:
        """Return where layers with windows find the positions of a pass; None if they have no pages of their own.

        Args: rows: int32 [rows], rows of the page table; slots: int64 [tokens], in the pages of all layers.
        """
        if self.window_of is None:
            return None
        pages = self.page_table.index_select(0, rows)
        table = self.window_of.index_select(0, pages.view(-1)).view_as(pages).to(torch.int32)
        own = self.window_of.index_select(0, slots >> self.page_shift)
        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        return WindowView(order, table, own * self.page_size + (slots & (self.page_size - 1)))

    def token_ids(self, tensors: PassTensors) -> Tensor:
        """Return the new tokens of a pass, int64 [tokens]: given ones first, then the newest of each decode row.

        Called right before the pass, after the sampling of everything before it, when the newest tokens are drawn.
        """
        if not len(tensors.decode_rows):
            return tensors.given_ids
        newest = self.newest.index_select(0, tensors.decode_rows)
        return torch.cat((tensors.given_ids, newest)) if len(tensors.given_ids) else newest

    def sampled(self, tensors: PassTensors, tokens: Tensor) -> None:
        """Store each token, int32 [samples], as the newest of its row."""
        self.newest.index_copy_(0, tensors.sampled_rows, tokens.to(torch.int64))
        if self.stands is not None:
            self.stands.index_copy_(0, tensors.sampled_rows, tensors.sampled_positions)

    def verified(self, tensors: PassTensors, tokens: Tensor, last: Tensor) -> None:
        """Store the last accepted token of each sampler as its row's newest.

        Args: tokens: int32 [samples]; last: int64 [samplers], the indices of these tokens.
        """
        assert self.stands is not None
        rows = tensors.sampled_rows.index_select(0, last)
        self.newest.index_copy_(0, rows, tokens.index_select(0, last).to(torch.int64))
        self.stands.index_copy_(0, rows, tensors.sampled_positions.index_select(0, last))


def last_entries(deltas: PageDeltas) -> tuple[Int32s, Int32s, Int32s]:
    """Return rows, indices and pages of a plan's changes, without entries that a later one of the same plan overwrites.

    A scatter with two entries for one place may keep either, so duplicates must be removed.
    """
    rows, index, pages = deltas.rows, deltas.index, deltas.pages
    if len(deltas.runs) > 3 or (len(deltas.runs) and len(deltas.opened_rows)):
        places = rows.astype(np.int64) << 32 | index
        _, last = np.unique(places[::-1], return_index=True)
        if last.size < places.size:
            keep = np.sort(places.size - 1 - last)
            rows, index, pages = rows[keep], index[keep], pages[keep]
    return rows, index, pages


def last_windows(changes: HybridChanges) -> tuple[Int32s, Int32s]:
    """Return full pages and their window pages, without entries that a later one for the same page overwrites."""
    pages = changes.pages
    _, last = np.unique(pages[::-1], return_index=True)
    keep = np.sort(pages.size - 1 - last)
    return pages[keep], changes.window_pages[keep]


def _few(values: Sequence[int] | Int32s) -> str:
    """Return some of the numbers, for a message."""
    listed = [int(value) for value in values[:8]]
    return ", ".join(map(str, listed)) + (", ..." if len(values) > 8 else "")
