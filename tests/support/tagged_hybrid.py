"""Windows and states of a `TaggedKv`: what sliding layers and linear attention would read, held against what is due.

A window page has cells like any other page, and a row reads those of the window in front of its new tokens. A slot of
state holds the prefix id of the last token that went into it, or `ZEROS`; a row's slot must hold that of the token
right in front of it. So a window page that was evicted, given to somebody else or never written shows as another prefix
where a batch reads it, and so does a copy of the wrong checkpoint, or of one that was written again.

Changes come with the plan and hold from it on; what a plan reads is where it was when the plan was launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.core.commands import BatchPlan, HybridChanges
from lockstep.core.config import HybridMemory

NOTHING, GARBAGE, ZEROS = -1, -2, -3
NO_CHANGES = HybridChanges()


class HybridError(AssertionError):
    """A plan reads or writes a window or a state that cannot be right."""


@dataclass
class Placed:
    """Where the layers of one launched plan find what they need."""

    windows: dict[int, list[int]] = field(default_factory=dict)  # by row: window page by page index; NOTHING: none
    touched: dict[int, set[int]] = field(default_factory=dict)  # by row: window pages that it reads or writes
    written: dict[int, set[int]] = field(default_factory=dict)  # by row: those that it writes
    slots: dict[int, int] = field(default_factory=dict)  # by row: its slot of state
    copies: list[tuple[int, int]] = field(default_factory=list)  # source or NOTHING, target
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)  # by place in the plan: position, slot

    @property
    def slots_written(self) -> set[int]:
        return {*self.slots.values(), *(slot for _, slot in self.checkpoints.values())}

    @property
    def slots_used(self) -> set[int]:
        return self.slots_written | {source for source, _ in self.copies if source != NOTHING}


class TaggedHybrid:
    """The pools beside full attention of one device. Its `TaggedKv` calls it plan by plan."""

    def __init__(self, settings: HybridMemory, page_size: int) -> None:
        self.settings = settings
        self.page_size = page_size
        self.behind = settings.window_tokens - 1
        self.placed: dict[int, Placed] = {}  # by batch id
        self.clear()

    def clear(self) -> None:
        """All of it is lost."""
        self.window_of: dict[int, int] = {}  # by full page
        self.full_of: dict[int, int] = {}  # by window page
        self.cells = [[NOTHING] * self.page_size for _ in range(self.settings.window_pages)]
        self.states = [NOTHING] * self.settings.state_slots
        self.slot_of: dict[int, int] = {}  # by row
        self.placed.clear()

    # ---- launch

    def launch(self, plan: BatchPlan, tables: dict[int, list[int]], stream: list[int]) -> None:
        """Fold what changes with a plan. `stream`: the batches in front of it that are not delivered."""
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
                raise HybridError(f"{name} gives row {row} slot {slot}, but nobody takes that row")
            self.slot_of[row] = slot
            placed.copies.append((source, slot))
        kept = zip(changes.checkpoint_index, changes.checkpoint_positions, changes.checkpoint_slots, strict=True)
        placed.checkpoints = {int(i): (int(position), int(slot)) for i, position, slot in kept}
        for row, start, stop in zip(plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist(), strict=True):
            self._place(placed, name, row, tables[row], start, stop)
        for i, (position, _) in placed.checkpoints.items():
            if not int(plan.starts[i]) < position <= int(plan.stops[i]):
                raise HybridError(f"{name} leaves a checkpoint at {position}, where row {plan.rows[i]} does not pass")
        self._check_writers(name, placed, [self.placed[batch] for batch in stream])
        self.placed[plan.batch_id] = placed

    def _place(self, placed: Placed, name: str, row: int, table: list[int], start: int, stop: int) -> None:
        if self.settings.state_slots:
            if row not in self.slot_of:
                raise HybridError(f"{name} runs row {row}, which has no slot of state")
            placed.slots[row] = self.slot_of[row]
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
        """Nothing that a plan writes is another row's: of the same plan, or of plans in flight."""
        for row, written in placed.written.items():
            for other in (placed, *before):
                for other_row, touched in other.touched.items():
                    if other_row != row and (shared := written & touched):
                        raise HybridError(f"{name}: row {row} writes window pages {sorted(shared)} of row {other_row}")
        mine = [*placed.slots.values(), *(slot for _, slot in placed.checkpoints.values())]
        sources = {source for source, _ in placed.copies}
        if len(set(mine)) != len(mine) or sources & set(mine):
            raise HybridError(f"{name} writes slots {mine}, some twice, or some that it copies: {sorted(sources)}")
        for other in before:
            theirs = other.slots_used - {slot for row, slot in other.slots.items() if placed.slots.get(row) == slot}
            if shared := placed.slots_written & theirs:
                raise HybridError(f"{name} writes slots {sorted(shared)}, which a batch in flight uses")

    # ---- run

    def begin(self, plan: BatchPlan) -> None:
        """The batch runs: copy states."""
        for source, target in self.placed[plan.batch_id].copies:
            self.states[target] = ZEROS if source == NOTHING else self.states[source]

    def read(self, plan: BatchPlan, row: int, start: int, expected: list[int], live: bool) -> bool:
        """A row has in front of it what it must. `expected`: its prefix ids up to `start`.

        Returns: whether it reads what a failed batch left, which only a row whose request has left may do.
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
            found.append((self.states[placed.slots[row]], due, f"the state at {start} in slot {placed.slots[row]}"))
        for got, due, what in found:
            if got != due:
                if got == GARBAGE and not live:
                    return True
                raise HybridError(f"{name} reads {what}, which holds {got}, not {due}")
        return False

    def write(self, plan: BatchPlan, index: int, row: int, start: int, ids: list[int]) -> None:
        """A row computed positions from `start` on: prefix ids, or garbage."""
        placed = self.placed[plan.batch_id]
        if self.settings.window_tokens:
            for position, prefix_id in enumerate(ids, start):
                self.cells[placed.windows[row][position // self.page_size]][position % self.page_size] = prefix_id
        if self.settings.state_slots:
            self.states[placed.slots[row]] = ids[-1]
            if index in placed.checkpoints:
                position, slot = placed.checkpoints[index]
                self.states[slot] = ids[position - 1 - start]
