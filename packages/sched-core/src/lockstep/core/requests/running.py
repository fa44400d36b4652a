"""The changing state of a running batch, of an engine or of one of its microbatches.

`RunningBatch` (table.py) holds the requests that decode together and their facts that do not change meanwhile.
`RunningState` holds the next position of each of them, and the counts of this batch's launches. An engine has one per
microbatch, and a single one without pipeline stages (microbatches.py).
"""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import NO_ROWS
from lockstep.core.requests import rules
from lockstep.core.requests.table import EMPTY_BATCH, Int32s, Request, RequestTable, RunningBatch


class RunningState:
    """A running batch, the next position of each member, and the counts of its launches."""

    __slots__ = (
        "batch",
        "decode_launches",
        "decode_owed",
        "extended_at",
        "forced_at",
        "horizon",
        "positions",
    )

    def __init__(self, prefill_decode_interval: int) -> None:
        self.batch: RunningBatch = EMPTY_BATCH
        self.positions: Int32s = NO_ROWS  # per member: the next position to compute
        self.horizon = 0  # decode launches until a member ends by length or outgrows the tables
        self.decode_owed = False  # its next decode goes before any prefill, after a retraction or a wait for pages
        self.decode_launches = 0
        self.extended_at = -prefill_decode_interval  # value of `decode_launches` at the last extend
        self.forced_at = -1  # value of `decode_launches` at the last forced retraction

    def place(self, batch: RunningBatch, positions: Int32s, table: RequestTable) -> None:
        """Replace the members, and widen the tables for the next decode of each.

        Args:
            positions: int32 [members], the next position of each.
        """
        self.batch = batch
        self.positions = positions
        if not batch.size:
            return
        outputs_had, to_come = positions - batch.prompts, batch.limits - positions
        # argmax and one access cost a quarter of `max`
        furthest, outputs = int(positions[positions.argmax()]), int(outputs_had[outputs_had.argmax()])
        table.reserve(furthest // table.page_size + 1, outputs + 2)
        to_length = int(to_come[to_come.argmin()]) - 1
        to_width = min(table.pages.shape[1] * table.page_size - furthest, table.outputs.shape[1] - 1 - outputs)
        self.horizon = min(to_length, to_width)

    def join(self, prefilled: RunningBatch, positions: Int32s, table: RequestTable) -> list[int]:
        """Add requests with a completely launched prompt: each decodes next, from its position on.

        Args:
            positions: int32 [prefilled], the next position of each.
        Returns: indices into `prefilled` of requests that end with their first token and so do not join.
        """
        ends = rules.ends_by_length(positions, prefilled.limits)
        ending: list[int] = ends.nonzero()[0].tolist()
        if ending:
            staying = (~ends).nonzero()[0]
            prefilled, positions = prefilled.only(staying), positions.take(staying)
        if prefilled.size:
            self.admit(prefilled, positions, table)
        return ending

    def admit(self, members: RunningBatch, positions: Int32s, table: RequestTable) -> None:
        """Add members at these positions, int32 [members], whatever their lengths."""
        for request in members.requests:
            request.decodes = True
        self.place(self.batch.joined_by(members), np.concatenate((self.positions, positions)), table)

    def remove(self, rows: list[int], table: RequestTable) -> None:
        """Remove the members in these rows, and store the next position of each in its request."""
        batch, positions = self.batch, self.positions
        goes = batch.rows == rows[0] if len(rows) == 1 else np.isin(batch.rows, rows)
        for i in goes.nonzero()[0].tolist():
            batch.requests[i].computed = int(positions[i])
            batch.requests[i].decodes = False
        staying = (~goes).nonzero()[0]
        self.place(batch.only(staying), positions.take(staying), table)

    def remove_ending(self, batch: RunningBatch, stops: Int32s, table: RequestTable) -> list[int]:
        """Move the members of `batch` on to `stops`, and remove those that end by length with this launch.

        No further forward is spent on a removed member.

        Args:
            stops: int32 [members], the next position of each.
        Returns: indices of the members that end.
        """
        ended = rules.ends_by_length(stops, batch.limits)
        ending: list[int] = ended.nonzero()[0].tolist()
        for i in ending:
            batch.requests[i].computed = int(stops[i])
            batch.requests[i].decodes = False
        if ending:
            staying = (~ended).nonzero()[0]
            batch, stops = batch.only(staying), stops.take(staying)
        self.place(batch, stops, table)
        return ending

    def advance(self, stops: Int32s, table: RequestTable) -> list[int]:
        """Move every member on by one position, to `stops`. Returns: indices of members that end by length."""
        self.positions = stops
        self.horizon -= 1
        return self.remove_ending(self.batch, stops, table) if self.horizon <= 0 else []

    def move_to(self, positions: Int32s) -> None:
        """Set the next position of each member, int32 [members]. Ends are not decided here but by results."""
        self.positions = positions

    def advanced_by(self, launches: int, positions: Int32s) -> None:
        """Record `launches` decode launches of one token of every member, which end at `positions`."""
        self.positions = positions
        self.horizon -= launches
        self.decode_launches += launches

    def position_of(self, request: Request) -> int:
        """Return the next position of a member."""
        return int(self.positions[(self.batch.rows == request.row).argmax()])

    def load(self, requests: list[Request], positions: bytes, numbers: tuple[int, bool, int, int, int]) -> None:
        """Restore the members, packed int32 positions, and counts in the order of `numbers` from a snapshot."""
        self.batch = RunningBatch.of(requests)
        self.positions = np.frombuffer(positions, np.int32)
        self.horizon, self.decode_owed, self.decode_launches, self.extended_at, self.forced_at = numbers
        for request in requests:
            request.decodes = True

    @property
    def numbers(self) -> tuple[int, bool, int, int, int]:
        """The counts that a snapshot stores beside members and positions, in the order that `load` expects."""
        return self.horizon, self.decode_owed, self.decode_launches, self.extended_at, self.forced_at
