"""What the search needs of a world: moves, names of states, and a way back to a state.

An engine is played by its driver (`tests/support/driver`), several engines by `groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from lockstep.core import invariants
from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import AdmissionDeferred, DecodeSkipped
from tests.support.contract.play import ContractPlay, ContractWorld
from tests.support.driver.actions import Action
from tests.support.driver.driver import Driver
from tests.support.explorer.copies import Saved, restore, save
from tests.support.explorer.groups import FleetPlay, FleetWorld, RankPlay, RankWorld
from tests.support.explorer.world import Left, Move, World, key, moves

AnyWorld = World | FleetWorld | RankWorld | ContractWorld


class Play(Protocol):
    """A world in some state."""

    ends: bool  # whether steps of the host alone come to an end; idle ranks agree on rounds for ever

    @property
    def marks(self) -> Iterable[str]:
        """Branches that were reached."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""

    def left(self) -> Left:
        """Return all inputs of the world."""

    def moves(self, left: Left) -> Iterator[Move]:
        """Yield every move that is possible now."""

    def do(self, action: Action) -> None:
        """Make a move. Raises AssertionError if a check fails."""

    def key(self, left: Left) -> bytes:
        """Return the name of the state."""

    def save(self) -> Any:
        """Return the state, for `restore`."""

    def restore(self, saved: Any) -> None:
        """Return to a state."""

    def check_at_rest(self) -> None:
        """Check what must hold where nothing is left to do."""

    def is_fruitless(self, move: Move) -> bool:
        """Whether the move that was made last has changed nothing that a host would not repeat at once."""


class EnginePlay:
    """One engine."""

    ends = True

    def __init__(self, world: World) -> None:
        self.world, self.driver = world, Driver(world.config)

    @property
    def marks(self) -> set[str]:
        """Branches that were reached."""
        return self.driver.marks

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return invariants.is_idle(self.driver.engine)

    def left(self) -> Left:
        """Return all inputs of the world."""
        return Left.all_of(self.world)

    def moves(self, left: Left) -> Iterator[Move]:
        """Yield every move that is possible now."""
        return moves(self.world, self.driver, left)

    def do(self, action: Action) -> None:
        """Make a move. Raises AssertionError if a check fails."""
        self.driver.do(action)

    def key(self, left: Left) -> bytes:
        """Return the name of the state."""
        return key(self.driver, left)

    def save(self) -> Saved:
        """Return the state, for `restore`."""
        return save(self.driver)

    def restore(self, saved: Saved) -> None:
        """Return to a state."""
        restore(self.driver, saved)

    def check_at_rest(self) -> None:
        """Check what must hold where nothing is left to do."""
        invariants.check_quiescent(self.driver.engine)

    def is_fruitless(self, move: Move) -> bool:
        """Whether a launch slot was offered in vain."""
        return move.action[0] == "lane" and _is_fruitless(self.driver.step)


def _is_fruitless(step: Step) -> bool:
    return not step.commands and all(isinstance(one, (AdmissionDeferred, DecodeSkipped)) for one in step.decided)


def play_of(world: AnyWorld) -> Play:
    """Return a world in its first state."""
    if isinstance(world, FleetWorld):
        return FleetPlay(world)
    if isinstance(world, ContractWorld):
        return ContractPlay(world)
    return RankPlay(world) if isinstance(world, RankWorld) else EnginePlay(world)
