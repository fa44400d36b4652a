"""Windows and states of a `TaggedKv`: the reads of sliding layers and linear attention, compared with what is due.

A window page has cells like any other page, and a row reads those of the window before its new tokens. A slot of state
holds the prefix id of the last token that it includes, or `ZEROS`; a row's slot must hold that of the token right
before its new ones. A row that verifies drafts writes a state behind each of them, garbage behind a wrong one, and
continues from that behind the last right one. So a window page that was evicted, given to another request or never
written shows as another prefix where a batch reads it, and so does a copy of a wrong checkpoint, or of one that was
overwritten.

Changes come with the plan and hold from it on; a plan reads blocks at their places at its launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.core.contract.commands import BatchPlan, HybridChanges
from lockstep.core.contract.config import HybridMemory

NOTHING, GARBAGE, ZEROS = -1, -2, -3
AS_IT_IS = -2  # the source of a slot that is left unchanged
NO_CHANGES = HybridChanges()


class HybridError(AssertionError):
    """A plan reads or writes a window or a state that cannot be right."""


@dataclass
class Placed:
    """The places of the blocks that the layers of one launched plan need."""

    windows: dict[int, list[int]] = field(default_factory=dict)  # by row: window page by page index; NOTHING: none
    touched: dict[int, set[int]] = field(default_factory=dict)  # by row: window pages that it reads or writes
    written: dict[int, set[int]] = field(default_factory=dict)  # by row: those that it writes
    slots: dict[int, list[int]] = field(default_factory=dict)  # by row: its slots of state, the first of them its own
    used: dict[int, int] = field(default_factory=dict)  # by row: how many of these it writes
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # source or NOTHING, target, row
    adopted: list[int] = field(default_factory=list)  # rows whose state is in their slot already
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)  # by place in the plan: position, slot

    @property
    def slots_written(self) -> set[int]:
        mine = (slot for row, slots in self.slots.items() for slot in slots[: self.used[row]])
        return {*mine, *(slot for _, slot in self.checkpoints.values())}

    @property
    def slots_used(self) -> set[int]:
        return self.slots_written | {source for source, _, _ in self.copies if source != NOTHING}


class TaggedHybrid:
    """The pools beside full attention of one device. Its `TaggedKv` calls it plan by plan."""

    def __init__(self, settings: HybridMemory, page_size: int) -> None:
        self.settings = settings
        self.page_size = page_size
        self.behind = settings.window_tokens - 1
        self.placed: dict[int, Placed] = {}  # by batch id
        self.clear()

    def clear(self) -> None:
        """All blocks are lost."""
        self.window_of: dict[int, int] = {}  # by full page
        self.full_of: dict[int, int] = {}  # by window page
        self.cells = [[NOTHING] * self.page_size for _ in range(self.settings.window_pages)]
        self.states = [NOTHING] * self.settings.state_slots
        self.slots_of: dict[int, list[int]] = {}  # by row
        self.stands_in: dict[int, int] = {}  # by row: the one of these that has its state, according to the device
        self.placed.clear()

    # ---- launch

    def launch(self, plan: BatchPlan, tables: dict[int, list[int]], stream: list[int]) -> None:
        """Fold the changes of a plan. `stream`: the uncollected batches before it."""
        placed, changes = Placed(), plan.hybrid or NO_CHANGES
        name = f"b{plan.batch_id}"
        for page, window_page in zip(changes.pages.tolist(), changes.window_pages.tolist(), strict=True):
            if not 0 <= window_page < self.settings.window_pages:
                raise HybridError(f"{name} gives page {page} the window page {window_page}, which there is not")
            self.window_of.pop(self.full_of.pop(window_page, NOTHING), None)
            self.full_of.pop(self.window_of.pop(page, NOTHING), None)
            self.window_of[page], self.full_of[window_page] = window_page, page
        starts = zip(changes.state_rows, changes.state_slots, changes.state_sources, strict=True)
        for row, slot, source in ((int(a), int(b), int(c)) for a, b, c in starts):
            if not any(taken.row == row for taken in plan.rows_taken):
                raise HybridError(f"{name} gives row {row} slot {slot}, but no request takes that row")
            if source == AS_IT_IS:
                self.slots_of[row] = [*self.slots_of[row], slot]
                continue
            self.slots_of[row] = [slot]
            if source == slot:  # blocks of a transfer stay in place
                placed.adopted.append(row)
            else:
                placed.copies.append((source, slot, row))
        kept = zip(changes.checkpoint_index, changes.checkpoint_positions, changes.checkpoint_slots, strict=True)
        placed.checkpoints = {int(i): (int(position), int(slot)) for i, position, slot in kept}
        spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist(), strict=True)
        for i, (row, start, stop) in enumerate(spans):
            drafts = 0
            if plan.speculation is not None and i >= plan.extend_rows:
                drafts = int(plan.speculation.drafted()[i - plan.extend_rows])
            self._place(placed, name, row, tables[row], start, stop, 1 + drafts)
        for i, (position, _) in placed.checkpoints.items():
            if not int(plan.starts[i]) < position <= int(plan.stops[i]):
                raise HybridError(f"{name} leaves a checkpoint at {position}, where row {plan.rows[i]} does not pass")
        self._check_writers(name, placed, [self.placed[batch] for batch in stream])
        self.placed[plan.batch_id] = placed

    def _place(self, placed: Placed, name: str, row: int, table: list[int], start: int, stop: int, states: int) -> None:
        if self.settings.state_slots:
            if len(self.slots_of.get(row, ())) < states:
                raise HybridError(f"{name} runs row {row}, which has slots of state {self.slots_of.get(row)}")
            placed.slots[row], placed.used[row] = self.slots_of[row], states
        if self.settings.window_tokens:
            windows = [self.window_of.get(page, NOTHING) for page in table]
            first, last = max(start - self.behind, 0) // self.page_size, -(-stop // self.page_size)
            if NOTHING in windows[first:last]:
                index = first + windows[first:last].index(NOTHING)
                raise HybridError(f"{name}: row {row}[{start}:{stop}] needs the window of page {index}, it has none")
            placed.windows[row] = windows
            placed.touched[row] = set(windows[first:last])
            placed.written[row] = set(windows[start // self.page_size : last])

    def _check_writers(self, name: str, placed: Placed, before: list[Placed]) -> None:
        """Check that a plan writes nothing that belongs to another row, of the same plan or of plans in flight."""
        for row, written in placed.written.items():
            for other in (placed, *before):
                for other_row, touched in other.touched.items():
                    if other_row != row and (shared := written & touched):
                        raise HybridError(f"{name}: row {row} writes window pages {sorted(shared)} of row {other_row}")
        mine = [slot for row, slots in placed.slots.items() for slot in slots[: placed.used[row]]]
        mine += [slot for _, slot in placed.checkpoints.values()]
        sources = {source for source, _, _ in placed.copies}
        if len(set(mine)) != len(mine) or sources & set(mine):
            raise HybridError(f"{name} writes slots {mine}, some twice, or some that it copies: {sorted(sources)}")
        for other in before:
            own = {slot for row, slots in other.slots.items() if placed.slots.get(row) == slots for slot in slots}
            theirs = other.slots_used - own
            if shared := placed.slots_written & theirs:
                raise HybridError(f"{name} writes slots {sorted(shared)}, which a batch in flight uses")

    # ---- run

    def begin(self, plan: BatchPlan) -> None:
        """The batch runs: copy states."""
        for source, target, row in self.placed[plan.batch_id].copies:
            self.states[target] = ZEROS if source == NOTHING else self.states[source]
            self.stands_in[row] = 0
        for row in self.placed[plan.batch_id].adopted:
            self.stands_in[row] = 0

    def read(self, plan: BatchPlan, row: int, start: int, expected: list[int], live: bool) -> bool:
        """Check that a row has the required blocks before its new tokens. `expected`: its prefix ids up to `start`.

        Returns: whether it reads blocks of a failed batch, which only a row whose request has left may do.
        """
        placed, name = self.placed[plan.batch_id], f"b{plan.batch_id}: row {row}"
        found: list[tuple[int, int, str]] = []
        if self.settings.window_tokens:
            windows = placed.windows[row]
            for position in range(max(start - self.behind, 0), start):
                cell = self.cells[windows[position // self.page_size]][position % self.page_size]
                found.append((cell, expected[position], f"position {position} of its window"))
        if self.settings.state_slots:
            due = expected[start - 1] if start else ZEROS
            slot = placed.slots[row][self.stands_in[row]]
            found.append((self.states[slot], due, f"the state at {start} in slot {slot}"))
        for got, due, what in found:
            if got != due:
                if got == GARBAGE and not live:
                    return True
                raise HybridError(f"{name} reads {what}, which holds {got}, not {due}")
        return False

    def write(
        self, plan: BatchPlan, index: int, row: int, start: int, ids: list[int], right: int | None = None
    ) -> None:
        """A row computed positions from `start` on: prefix ids, or garbage.

        `right`: of a row that verified drafts, the number of right ones.
        """
        placed = self.placed[plan.batch_id]
        if self.settings.window_tokens:
            for position, prefix_id in enumerate(ids, start):
                self.cells[placed.windows[row][position // self.page_size]][position % self.page_size] = prefix_id
        if self.settings.state_slots:
            self._write_states(placed, row, ids, right)
            if index in placed.checkpoints:
                position, slot = placed.checkpoints[index]
                passed = 0 <= position - 1 - start < len(ids)
                self.states[slot] = ids[position - 1 - start] if passed else GARBAGE

    def _write_states(self, placed: Placed, row: int, ids: list[int], right: int | None) -> None:
        slots = placed.slots[row]
        if placed.used[row] == 1:  # forced tokens are right, and their states need no slots of their own
            self.states[slots[0]], self.stands_in[row] = ids[-1], 0
            return
        assert right is not None
        for slot, state in zip(slots, ids, strict=False):
            self.states[slot] = state
        self.stands_in[row] = right

    def narrow(self, batch_id: int, row: int, start: int, stop: int) -> None:
        """Restrict a row's window pages in a later batch to positions [start:stop), which a result has determined."""
        placed = self.placed[batch_id]
        if self.settings.window_tokens:
            first, last = max(start - self.behind, 0) // self.page_size, -(-stop // self.page_size)
            placed.touched[row] &= set(placed.windows[row][first:last])
            placed.written[row] &= set(placed.windows[row][start // self.page_size : last])

    def spoil(self, plan: BatchPlan, index: int, row: int, start: int, stop: int) -> None:
        """A batch failed: the blocks of a row of it, or of a batch behind it, are garbage."""
        placed = self.placed[plan.batch_id]
        if self.settings.window_tokens:
            for position in range(start, stop):
                self.cells[placed.windows[row][position // self.page_size]][position % self.page_size] = GARBAGE
        if self.settings.state_slots:
            for slot in placed.slots[row]:
                self.states[slot] = GARBAGE
            self.stands_in[row] = 0
            if index in placed.checkpoints:
                self.states[placed.checkpoints[index][1]] = GARBAGE
