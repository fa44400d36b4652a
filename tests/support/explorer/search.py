"""Go through every state of a small world, and check each one and the graph that they make.

In each state all invariants, the tagged devices and, of one engine, the obligations of the driver hold, as in the
swarm. On the graph:

    from every state an idle one is reached by steps of the host alone (nothing is stuck), and
    no cycle consists of steps alone (nothing goes on for ever without progress). Launch slots that are offered in vain
    do not count.

Depth first, so that few states are stored whole; a schedule that breaks something is shortened by the driver's own
means before it is shown.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.driver.actions import Action
from tests.support.explorer.play import AnyWorld, play_of
from tests.support.explorer.world import Left, Move

COMPARED_SHARE = 1 / 64  # of the states that were met again, whose futures are compared
ROOT = 0


@dataclass
class Found:
    """What an exploration found."""

    world: AnyWorld
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0  # of CPU
    is_whole: bool = True  # no limit ended it
    compared: int = 0  # pairs of states that were taken for one, and had the same futures
    marks: set[str] = field(default_factory=set)
    failure: str = ""
    actions: list[Action] = field(default_factory=list)  # that lead to it


@dataclass
class _Frame:
    """A state on the way, and what is left to try from it."""

    state: int
    saved: Any
    left: Left
    rest: Iterator[Move]


class Failed(Exception):
    """A state broke a check; `args` is the message."""


class Explorer:
    """One exploration of a world."""

    def __init__(self, world: AnyWorld, *, seed: int = 0) -> None:
        self.world = world
        self.play = play_of(world)
        self._random = Random(seed)
        self._states: dict[bytes, int] = {}
        self._came_from = array("q")
        self._came_by: list[Action] = []
        self._sources, self._targets, self._are_steps = array("I"), array("I"), array("B")
        self._are_fruitless = array("B")  # slots in which nothing was launched: a host offers them again and again
        self._idle = array("B")
        self._pairs: list[tuple[int, frozenset[bytes]]] = []

    def run(self, *, transitions_max: int | None = None) -> Found:
        """Explore the whole world, or so many transitions of it."""
        found = Found(self.world)
        begun = time.process_time()
        try:
            self._explore(found, transitions_max)
            if found.is_whole:
                found.compared = self._compare_futures()
                self._check_liveness()
        except Failed as failed:
            found.failure = str(failed.args[0])
            found.actions = failed.args[1]
        found.states, found.seconds = len(self._states), time.process_time() - begun
        found.marks = set(self.play.marks)
        return found

    # ------------------------------------------------------------------------------------------------------ the search

    def _explore(self, found: Found, transitions_max: int | None) -> None:
        left = self.play.left()
        path = [self._enter(ROOT, (), left)]
        self._states[self.play.key(left)] = ROOT
        stands = ROOT  # the state that the play is in; -1: a copy of another one
        while path:
            frame = path[-1]
            found.depth = max(found.depth, len(path) - 1)
            move = next(frame.rest, None)
            if move is None:
                path.pop()
                continue
            if found.transitions == transitions_max:
                found.is_whole = False
                return
            if stands != frame.state:
                self.play.restore(frame.saved)
            left = frame.left.after(move)
            found.transitions += 1
            name = self._follow(frame.state, move, left)
            fruitless = self.play.is_fruitless(move)
            known = self._states.get(name)
            if known is None:
                known = self._states[name] = len(self._states)
                path.append(self._enter(frame.state, move.action, left))
                stands = known
            else:
                stands = -1
                if self._random.random() < COMPARED_SHARE:
                    self._pairs.append((known, self._futures(left)))
            if known != frame.state:
                self._sources.append(frame.state)
                self._targets.append(known)
                self._are_steps.append(move.is_step)
                self._are_fruitless.append(fruitless)

    def _enter(self, came_from: int, came_by: Action, left: Left) -> _Frame:
        """Add the state of the play to the graph."""
        number = len(self._came_from)
        self._came_from.append(came_from)
        self._came_by.append(came_by)
        idle = self.play.is_idle
        self._idle.append(idle)
        if idle:
            try:
                self.play.check_at_rest()
            except AssertionError as error:
                raise Failed(str(error), self._way_to(number)) from error
        return _Frame(number, self.play.save(), left, iter(list(self.play.moves(left))))

    def _follow(self, state: int, move: Move, left: Left) -> bytes:
        """Make a move. Returns the name of the state that it leads to."""
        try:
            self.play.do(move.action)
            return self.play.key(left)
        except Exception as error:  # a traceback of the core is a finding like a broken invariant
            message = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise Failed(message, [*self._way_to(state), move.action]) from error

    def _way_to(self, state: int) -> list[Action]:
        way: list[Action] = []
        while state != ROOT:
            way.append(self._came_by[state])
            state = self._came_from[state]
        return way[::-1]

    # ------------------------------------------------------------------------------------------- states taken for one

    def _futures(self, left: Left) -> frozenset[bytes]:
        """Return the names of the states that follow the play's, which is left in some other state."""
        saved, found = self.play.save(), set()
        for move in list(self.play.moves(left)):
            self.play.restore(saved)
            rest = left.after(move)
            self.play.do(move.action)
            found.add(self.play.key(rest))
        return frozenset(found)

    def _compare_futures(self) -> int:
        names = list(self._states)
        follow: dict[int, set[bytes]] = {state: set() for state, _ in self._pairs}
        for source, target in zip(self._sources, self._targets, strict=True):
            if source in follow:
                follow[source].add(names[target])
        for state, futures in self._pairs:
            own = names[state]
            if futures - {own} != follow[state]:
                raise Failed("two states that are taken for one have different futures", self._way_to(state))
        return len(self._pairs)

    # ------------------------------------------------------------------------------------------------------- liveness

    def _check_liveness(self) -> None:
        before: list[list[int]] = [[] for _ in self._came_from]
        fruitful: list[list[int]] = [[] for _ in self._came_from]
        edges = zip(self._sources, self._targets, self._are_steps, self._are_fruitless, strict=True)
        for source, target, is_step, is_fruitless in edges:
            if is_step:
                before[target].append(source)
                if not is_fruitless:
                    fruitful[source].append(target)
        self._check_none_is_stuck(before)
        if self.play.ends:
            self._check_no_cycle(fruitful)

    def _check_none_is_stuck(self, before: list[list[int]]) -> None:
        ends = [state for state, idle in enumerate(self._idle) if idle]
        reached = bytearray(len(self._came_from))
        for state in ends:
            reached[state] = 1
        while ends:
            for state in before[ends.pop()]:
                if not reached[state]:
                    reached[state] = 1
                    ends.append(state)
        stuck = reached.find(0)
        if stuck >= 0:
            raise Failed("from here no idle state is reached by steps of the host", self._way_to(stuck))

    def _check_no_cycle(self, steps: list[list[int]]) -> None:
        """Take out states that no steps lead on from, again and again; what is left is on cycles, or before them."""
        before: list[list[int]] = [[] for _ in steps]
        for source, targets in enumerate(steps):
            for target in targets:
                before[target].append(source)
        on = array("I", map(len, steps))
        ends = [state for state, count in enumerate(on) if not count]
        left = len(on)
        while ends:
            left -= 1
            for state in before[ends.pop()]:
                on[state] -= 1
                if not on[state]:
                    ends.append(state)
        if not left:
            return
        state, seen = next(state for state, count in enumerate(on) if count), set()
        while state not in seen:
            seen.add(state)
            state = next(one for one in steps[state] if on[one])
        raise Failed("steps of the host lead in a cycle from here", self._way_to(state))
