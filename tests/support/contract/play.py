"""A machine of the contract as a world of the explorer: its graph code, canonical forms and liveness serve both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from tests.support.contract.machine import Forbidden, Machine
from tests.support.driver.actions import Action
from tests.support.explorer.world import Left, Move

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


@dataclass(frozen=True)
class ContractWorld:
    """A machine with its bounds, of which every state is gone through."""

    name: str
    machine: Machine


class ContractPlay:
    """A machine in some state."""

    def __init__(self, world: ContractWorld) -> None:
        self.world, self.machine = world, world.machine
        self.ends = self.machine.ends
        self.state = self.machine.first()
        self._changed = False

    @property
    def marks(self) -> Iterable[str]:
        """Branches that were reached: none are named."""
        return ()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return self.machine.is_idle(self.state)

    def left(self) -> Left:
        """Return all inputs of the world."""
        return Left((), (), (), {name: count for name, count in self.machine.inputs().items() if count})

    def moves(self, left: Left) -> Iterator[Move]:
        """Yield every step that the contract allows now."""
        for move in self.machine.moves(self.state, left):
            try:
                self.machine.after(self.state, move.action)
            except Forbidden:
                continue
            yield move

    def do(self, action: Action) -> None:
        """Make a step. Raises AssertionError if the state behind it is unsafe."""
        before = self.state
        self.state = self.machine.after(before, action)
        self._changed = self.state != before
        wrong = self.machine.unsafe(self.state)
        assert not wrong, wrong

    def key(self, left: Left) -> bytes:
        """Return the name of the state."""
        return blake2b(_encode((self.machine.canonical(self.state), left.counts)), digest_size=16).digest()

    def save(self) -> Any:
        """Return the state, which is a value."""
        return self.state

    def restore(self, saved: Any) -> None:
        """Return to a state."""
        self.state = saved

    def check_at_rest(self) -> None:
        """Check what must hold where nothing is left to do."""
        wrong = self.machine.at_rest(self.state)
        assert not wrong, wrong

    def is_fruitless(self, move: Move) -> bool:
        """Whether the step has changed nothing."""
        return not self._changed
