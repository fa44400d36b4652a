"""Cache tiers below the device: moves between them, and window and state blocks that go with pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lockstep.core.contract.commands import CopyToHost, LoadFromHost, Step, WriteToStorage
from lockstep.core.contract.events import (
    EngineRestarted,
    Observed,
    PrefetchFinished,
    RequestAdmitted,
    StorageWritten,
    TierOperationEnded,
)
from lockstep.core.kv.operations import NO_OPERATION
from tests.support.driver.piece import Piece, Subject


class TierPiece(Piece):
    """Moves between device, host memory and storage. Without tiers its actions do nothing."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._waits: dict[tuple[int, int], int] = {}  # by request and load: the step in us since which it waits
        self._dues: dict[int, tuple[int, int]] = {}  # by request: the load it waits for, and the latest end in us
        self._overdue: set[int] = set()  # waiting requests for which a load has lasted too long

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"move": self.move, "late_move": self.late_move}

    @property
    def moving(self) -> bool:
        """Whether a move is under way."""
        return self.subject.tiers is not None and bool(self.subject.tiers.moves)

    def move(self, choice: int, share: float = 1.0, error: str = "") -> None:
        """A move ends, not necessarily the oldest, with a share of its pages moved."""
        tiers = self.subject.tiers
        if tiers is not None and tiers.moves:
            move = list(tiers.moves.values())[choice % len(tiers.moves)]
            cut = not error and choice % 2 == 1 and tiers.cut_short(move)
            answer = tiers.answer(move, self.subject.now_us, int(share * tiers.found(move)), error, cut=cut)
            self.subject.fold(answer)

    def late_move(self) -> None:
        """A move from before a restart ends after all; the answer is void."""
        tiers = self.subject.tiers
        if tiers is not None and tiers.voided:
            self.mark("move of an older generation ignored")
            self.subject.fold(msgspec.structs.replace(tiers.voided.pop(0), time_us=self.subject.now_us))

    # ---------------------------------------------------------------------------------------------------------- checks

    def stepped(self, event: Observed, step: Step) -> None:
        if isinstance(event, PrefetchFinished) and event.blocks and event.generation == self.engine.generation:
            self.mark("blocks fetched" if event.pages_done else "blocks alone fetched")

    def checked(self, event: Observed, step: Step) -> None:
        """L7: a request waits for a load at most `load_timeout_us`, and no second time for the same one."""
        tiers = self.engine.memory.tiers
        if not tiers.present:
            return
        most, waits = tiers.settings.load_timeout_us, dict[tuple[int, int], int]()
        for request_id, candidate in tiers.candidates.items():
            number = candidate.operation
            if number in tiers.operations and tiers.operations[number].kind == "load":
                since_us = waits[request_id, number] = self._waits.get((request_id, number), event.time_us)
                waited_us = event.time_us - since_us
                assert most is None or waited_us < most, (
                    f"L7: r{request_id} waits for load {number} for {waited_us} us, at most {most}"
                )
        self._waits = waits
        self._check_overdue(event)
        if isinstance(event, StorageWritten):
            self._check_stored()

    def _check_overdue(self, event: Observed) -> None:
        """L7: a request for which a load has lasted longer than `load_timeout_us` waits for no other load."""
        if isinstance(event, EngineRestarted):
            self._dues, self._overdue = {}, set()  # loads are void, and waits begin again
        tiers, dues = self.engine.memory.tiers, dict[int, tuple[int, int]]()
        for request_id, candidate in tiers.candidates.items():
            operation = tiers.operations.get(candidate.operation)
            if operation is not None and operation.kind == "load" and candidate.due_us is not None:
                dues[request_id] = operation.number, candidate.due_us
        for request_id, (number, due_us) in self._dues.items():
            if due_us <= event.time_us and dues.get(request_id, (NO_OPERATION, 0))[0] != number:
                self.mark("load lasted too long")
                self._overdue.add(request_id)
        self._dues, self._overdue = dues, self._overdue.intersection(tiers.candidates)
        again = self._overdue.intersection(dues)
        assert not again, f"L7: {sorted(again)} wait for a load again, after another one has lasted too long"

    def _check_stored(self) -> None:
        """Host pages that count as stored are in storage, or a store of them is under way."""
        tiers, tagged = self.engine.memory.tiers, self.subject.tiers
        assert tagged is not None
        in_storage = {tuple(cells) for cells in tagged.storage.values() if isinstance(cells, list)}
        storing = {page for one in tiers.operations.values() if one.kind == "store" for page in one.host_pages.tolist()}
        for page in tiers.stored.nonzero()[0].tolist():
            stored = page in storing or tuple(tagged.host[page]) in in_storage
            assert stored, f"host page {page} counts as stored, and storage does not have {tagged.host[page]}"

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        return {TierOperationEnded: self._ended, RequestAdmitted: self._admitted}

    def _ended(self, event: TierOperationEnded, step: Step) -> None:
        self.mark(f"{event.kind} {event.outcome}")

    def _admitted(self, event: RequestAdmitted, step: Step) -> None:
        if event.host_tokens:
            self.mark("started behind loaded pages")

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {
            CopyToHost: lambda command: self._copied(command, "written"),
            LoadFromHost: lambda command: self._copied(command, "loaded"),
            WriteToStorage: self._stored,
        }

    def _copied(self, command: CopyToHost | LoadFromHost, done: str) -> None:
        if command.blocks:
            self.mark(f"blocks{'' if command.host_pages.size else ' alone'} {done}")

    def _stored(self, command: WriteToStorage) -> None:
        if command.blocks:
            self.mark("blocks stored" if command.keys else "blocks alone stored")

    def at_rest(self) -> None:
        tiers = self.engine.memory.tiers
        if self.subject.check:
            if tiers.present:
                assert tiers.pool.free_count == tiers.pool.total, "L9: a flush leaves host pages behind"
