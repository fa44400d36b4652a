"""The running batch of an engine, or of one of its microbatches, as it moves.

`RunningBatch` (table.py) holds which requests decode together and what does not change while they do. `RunningState`
holds where each of them stands, and what the launches of this batch count and remember. An engine has a list of them:
one per microbatch, and a single one without pipeline stages (microbatches.py).
"""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import NO_ROWS
from lockstep.core.requests.table import EMPTY_BATCH, ONE, Int32s, Request, RequestTable, RunningBatch


class RunningState:
    """A running batch, the next position of each member, and what its launches count."""

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
        self.decode_owed = False  # a retraction made room for its next decode, which goes before any prefill
        self.decode_launches = 0
        self.extended_at = -prefill_decode_interval  # decode launches when an extend was last launched
        self.forced_at = -1  # decode launches when a retraction was last forced

    def place(self, batch: RunningBatch, positions: Int32s, table: RequestTable) -> None:
        """Replace the members; the tables become wide enough for the next decode of each. int32 [members]"""
        self.batch = batch
        self.positions = positions
        if not batch.size:
            return
        outputs_had, to_come = positions - batch.prompts, batch.limits - positions
        # finding the greatest is a quarter of the cost of reducing to it
        furthest, outputs = int(positions[positions.argmax()]), int(outputs_had[outputs_had.argmax()])
        table.reserve(furthest // table.page_size + 1, outputs + 2)
        to_length = int(to_come[to_come.argmin()]) - 1
        to_width = min(table.pages.shape[1] * table.page_size - furthest, table.outputs.shape[1] - 1 - outputs)
        self.horizon = min(to_length, to_width)

    def join(self, prefilled: RunningBatch, positions: Int32s, table: RequestTable) -> list[int]:
        """Add requests whose prompt is launched to its end: each decodes next, from its position on. int32 [prefilled]

        Returns: indices into `prefilled` of requests that end with their first token and so do not join.
        """
        ends = positions + ONE >= prefilled.limits
        ending: list[int] = ends.nonzero()[0].tolist()
        if ending:
            staying = (~ends).nonzero()[0]
            prefilled, positions = prefilled.only(staying), positions.take(staying)
        if prefilled.size:
            for request in prefilled.requests:
                request.decodes = True
            self.place(self.batch.joined_by(prefilled), np.concatenate((self.positions, positions)), table)
        return ending

    def remove(self, rows: list[int], table: RequestTable) -> None:
        """Take the members in these rows out, all at once; each request notes the position at which it stands."""
        batch, positions = self.batch, self.positions
        goes = batch.rows == rows[0] if len(rows) == 1 else np.isin(batch.rows, rows)
        for i in goes.nonzero()[0].tolist():
            batch.requests[i].computed = int(positions[i])
            batch.requests[i].decodes = False
        staying = (~goes).nonzero()[0]
        self.place(batch.only(staying), positions.take(staying), table)

    def remove_ending(self, batch: RunningBatch, stops: Int32s, table: RequestTable) -> list[int]:
        """Move members on to `stops`, and take out those that end by length with this launch: no forward is spent on
        them again. int32 [members]

        Returns: indices of the members that end.
        """
        ended = stops + ONE >= batch.limits
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
        """Move every member on by one position, to `stops`. Returns: indices of members that end by length with it."""
        self.positions = stops
        self.horizon -= 1
        return self.remove_ending(self.batch, stops, table) if self.horizon <= 0 else []

    def move_to(self, positions: Int32s) -> None:
        """Set where the members stand without looking for ends, which results decide. int32 [members]"""
        self.positions = positions

    def advanced_by(self, launches: int, positions: Int32s) -> None:
        """Take over that many decode launches, each of one token of every member, which end at `positions`."""
        self.positions = positions
        self.horizon -= launches
        self.decode_launches += launches

    def owe_decode(self) -> None:
        """The next launch of this batch is a decode, before any prefill."""
        self.decode_owed = True

    def position_of(self, request: Request) -> int:
        """The next position of a member."""
        return int(self.positions[(self.batch.rows == request.row).argmax()])

    def load(self, requests: list[Request], positions: bytes, numbers: tuple[int, bool, int, int, int]) -> None:
        """Become what a snapshot stored: members, packed int32 positions, and the counts in the order of NUMBERS."""
        self.batch = RunningBatch.of(requests)
        self.positions = np.frombuffer(positions, np.int32)
        self.horizon, self.decode_owed, self.decode_launches, self.extended_at, self.forced_at = numbers
        for request in requests:
            request.decodes = True

    @property
    def numbers(self) -> tuple[int, bool, int, int, int]:
        """What a snapshot stores beside members and positions, in the order that `load` expects."""
        return self.horizon, self.decode_owed, self.decode_launches, self.extended_at, self.forced_at
