"""Cache tiers below the device: moves between them, and window and state blocks that go with pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lockstep.core.contract.commands import CopyToHost, LoadFromHost, Step, WriteToStorage
from lockstep.core.contract.events import Observed, PrefetchFinished, RequestAdmitted, TierOperationEnded
from tests.support.driver.piece import Piece


class TierPiece(Piece):
    """Moves between device, host memory and storage. Without tiers its actions do nothing."""

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
