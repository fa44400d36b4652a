"""Small worlds of several engines: a prefill and a decode engine on a network, and data-parallel ranks.

The moves are those of `fleet.Fleet` and `rank_group.RankGroup`, the checks theirs: what moves between engines belongs
to one transfer, all ranks decide alike, and each answer is the one that a plain engine gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from lockstep.core import invariants
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RanksAgreed, UpdateWeights
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import Action
from tests.support.explorer.canonical import canonical
from tests.support.explorer.copies import SHARED, Memo, copied, copies_by
from tests.support.explorer.world import Left, Move
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.wires import Told, Wire
from tests.support.rank_group import RankGroup
from tests.support.served import Asked
from tests.support.tagged_kv import COMPLETED

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
PREFILL, DECODE = "p0", "d0"
ENDS = ("cancelled", "transfer", "error")  # of answers that are not whole
KEPT_OF_GROUP = ("marks", "events", "steps")
"""Attributes that stay shared between states: what was counted, and what only a replay reads."""


@dataclass(frozen=True)
class FleetWorld:
    """A prefill and a decode engine, requests, and what may go wrong between them."""

    name: str
    prefill: SchedConfig
    decode: SchedConfig
    arrivals: tuple[Asked, ...]
    cancels: int = 0
    batch_errors: int = 0
    link_downs: int = 0
    lost: int = 0  # facts that never arrive
    restarts: int = 0
    weights: int = 0  # changes of the weights of one engine

    @property
    def config(self) -> SchedConfig:
        """The settings of the decode engine, for reports."""
        return self.decode


@dataclass(frozen=True)
class RankWorld:
    """Two data-parallel ranks and their requests: of each its rank."""

    name: str
    config: SchedConfig
    arrivals: tuple[tuple[int, Asked], ...]
    cancels: int = 0
    batch_errors: int = 0
    restarts: int = 0


FLEET_COUNTS = ("cancels", "batch_errors", "link_downs", "lost", "restarts", "weights")
RANK_COUNTS = ("cancels", "batch_errors", "restarts")


@dataclass(frozen=True)
class Saved:
    """A state of several engines."""

    engines: tuple[bytes, ...]
    owners: tuple[dict[str, Any], ...]
    answered: frozenset[int]
    lost: int


copies_by(Told, lambda value, memo: Told(copied(value.wire, memo), value.to, value.status))


class GroupPlay:
    """What plays of several engines share: the way back to a state, and its name."""

    ends = True

    def __init__(self, group: Fleet | RankGroup, counts: dict[str, int], arrivals: int) -> None:
        self.group, self._counts, self._arrivals = group, counts, arrivals
        self.answered: frozenset[int] = frozenset()  # requests whose answers were checked
        self.lost = 0  # facts that will not arrive

    @property
    def marks(self) -> Counter[str]:
        """Branches that were reached."""
        return self.group.marks

    @property
    def is_idle(self) -> bool:
        """Whether no engine has anything left to do."""
        return self.group.idle

    def left(self) -> Left:
        """Return all inputs of the world."""
        return Left(
            tuple(range(self._arrivals)), (), (), {name: count for name, count in self._counts.items() if count}
        )

    def members(self) -> list[Any]:
        """Return the members of the group, in order."""
        members = self.group.members
        return list(members.values()) if isinstance(members, dict) else list(members)

    def engines(self) -> list[Engine]:
        """Return the engines, in order."""
        return [member.engine for member in self.members()]

    def _owners(self) -> list[Any]:
        members = self.members()
        owners: list[Any] = [self.group, *members, *(member.kv for member in members)]
        owners += [member.tiers for member in members if member.tiers is not None]
        return owners

    def save(self) -> Saved:
        """Return the state, for `restore`."""
        owners = self._owners()
        memo: Memo = {id(one): one for one in owners}
        attributes = tuple(
            {name: copied(value, memo) for name, value in vars(one).items() if name not in _shared_of(one, self.group)}
            for one in owners
        )
        return Saved(tuple(snapshot.dump(engine) for engine in self.engines()), attributes, self.answered, self.lost)

    def restore(self, saved: Saved) -> None:
        """Return to a state."""
        owners = self._owners()
        memo: Memo = {id(one): one for one in owners}
        for owner, attributes in zip(owners, saved.owners, strict=True):
            vars(owner).update({name: copied(value, memo) for name, value in attributes.items()})
        for member, data in zip(self.members(), saved.engines, strict=True):
            member.engine = snapshot.restore(data)
            member.events.clear()
            member.kv.launched.clear()
        self.answered, self.lost = saved.answered, saved.lost

    def check_at_rest(self) -> None:
        """Check what must hold where nothing is left to do."""
        for engine in self.engines():
            invariants.check_quiescent(engine)

    def key(self, left: Left) -> bytes:
        """Return the name of the state."""
        engines = [canonical(engine) for engine in self.engines()]
        state = _encode((engines, left.arrivals, left.counts, self._of_hosts()))
        return blake2b(state, digest_size=16).digest()

    def _of_hosts(self) -> object:
        raise NotImplementedError


def _shared_of(owner: Any, group: object) -> tuple[str, ...]:
    if owner is group:
        return KEPT_OF_GROUP
    return (*KEPT_OF_GROUP, "engine") if hasattr(owner, "engine") else SHARED


class FleetPlay(GroupPlay):
    """A prefill and a decode engine."""

    group: Fleet

    def __init__(self, world: FleetWorld) -> None:
        self.world = world
        counts = {name: getattr(world, name) for name in FLEET_COUNTS}
        super().__init__(Fleet([world.prefill], [world.decode]), counts, len(world.arrivals))

    def moves(self, left: Left) -> Iterator[Move]:
        """Yield every move that is possible now, inputs first."""
        fleet = self.group
        for index in left.arrivals:
            yield Move(("arrive", index), f"arrivals {index}")
        names = (PREFILL, DECODE)
        if left.has("cancels"):
            for wire in fleet.wires:
                live = [name for name in names if wire.ids[name] in fleet.members[name].engine.requests]
                yield from (Move(("cancel", wire.room, name), "cancels") for name in live)
        if left.has("batch_errors"):
            running = [name for name in names if fleet.members[name].kv.stream]
            yield from (Move(("finish", name, "the device says no"), "batch_errors") for name in running)
        if left.has("link_downs") and fleet.open:
            yield Move(("link_down",), "link_downs")
        if left.has("lost"):
            facts = [i for i, told in enumerate(fleet.told) if told.status in ("accepted", "offered")]
            yield from (Move(("lose", number), "lost") for number in facts)
        if left.has("restarts"):
            yield from (Move(("restart", name), "restarts") for name in names)
        if left.has("weights"):
            yield from (Move(("weights", name), "weights") for name in names)
        for name in names:
            yield Move(("ready", name))
            if fleet.members[name].kv.stream:
                yield Move(("finish", name, ""))
        yield from (Move(("tell", number)) for number, told in enumerate(fleet.told) if _may_tell(told))
        yield from (Move(("stop", wire.room)) for wire in fleet.stops)
        yield from (Move(("move", wire.room)) for wire in fleet.movable())
        if self.lost:
            yield Move(("link_down",))  # what was lost ends by the host's own time-out

    def do(self, action: Action) -> None:
        """Make a move. Raises AssertionError if a check fails."""
        fleet, (name, *values) = self.group, action
        match name:
            case "arrive":
                fleet.arrive(self.world.arrivals[values[0]])
            case "cancel":
                fleet.cancel(fleet.wires[values[0]], values[1])
            case "finish":
                fleet.finish(*values)
            case "link_down":
                fleet.link_down(PREFILL, DECODE)
            case "lose":
                fleet.told.pop(values[0])
                self.lost += 1
            case "restart":
                fleet.restart(values[0])
            case "weights":
                version = 1 + fleet.members[values[0]].engine.maintenance.newest_version()
                fleet.control(values[0], UpdateWeights(version, "w", "wait"))
            case "ready":
                fleet.ready(values[0])
            case "tell":
                fleet.tell(fleet.told[values[0]])
            case "stop":
                fleet.stop(fleet.wires[values[0]])
            case "move":
                fleet.move(fleet.wires[values[0]])
        self._check_answers()

    def _check_answers(self) -> None:
        for wire in self.group.wires:
            got = self.group.answers.get(wire.asked.key)
            if got is None or wire.room in self.answered:
                continue
            self.answered |= {wire.room}
            if got.reason in COMPLETED:
                assert got == wire.wanted, f"room {wire.room} got {got}, wanted {wire.wanted}"
            else:
                assert got.reason in ENDS, got
                assert got.tokens == wire.wanted.tokens[: len(got.tokens)], f"room {wire.room} got {got}"

    def is_fruitless(self, move: Move) -> bool:
        """Whether a launch slot was offered in vain."""
        return bool(move.action[0] == "ready")

    def _of_hosts(self) -> object:
        fleet = self.group
        next_ids = {name: member.engine.next_batch_id for name, member in fleet.members.items()}
        return (
            [_of_wire(wire, next_ids[PREFILL], fleet) for wire in fleet.wires],
            sorted((told.wire.room, told.to, told.status) for told in fleet.told),
            sorted(wire.room for wire in fleet.stops),
            bool(self.lost),
            [(len(member.orders), len(member.kv.stream)) for member in fleet.members.values()],
        )


def _may_tell(told: Told) -> bool:
    """Whether the host takes a fact now: the end of a transfer arrives after the first token of its prompt."""
    return not (told.status == "done" and told.to == PREFILL and told.wire.first_token is None)


def _of_wire(wire: Wire, next_batch: int, fleet: Fleet) -> tuple[object, ...]:
    parts = [
        (part.command.start_tokens, part.command.stop_tokens, part.ready, (part.command.after_batch or 0) - next_batch)
        for part in wire.parts
    ]
    receive = None if wire.receive is None else wire.receive.start_tokens
    stale = wire.generation != fleet.members[DECODE].engine.generation
    return wire.room, wire.asked.key, parts, wire.moved, receive, stale, wire.outcome, wire.first_token, wire.cancelled


class RankPlay(GroupPlay):
    """Two data-parallel ranks."""

    group: RankGroup
    ends = False

    def __init__(self, world: RankWorld) -> None:
        self.world = world
        counts = {name: getattr(world, name) for name in RANK_COUNTS}
        super().__init__(RankGroup([world.config] * 2), counts, len(world.arrivals))

    def moves(self, left: Left) -> Iterator[Move]:
        """Yield every move that is possible now, inputs first."""
        group = self.group
        for index in left.arrivals:
            yield Move(("arrive", index), f"arrivals {index}")
        for member in group.members:
            if left.has("cancels"):
                live = sorted(member.engine.requests)
                yield from (Move(("cancel", member.rank, number), "cancels") for number in live)
            done = member.delivered < len(member.launched) and group._is_done(member.delivered)
            if left.has("batch_errors") and done:
                yield Move(("finish", member.rank, "the device says no"), "batch_errors")
            if done:
                yield Move(("finish", member.rank, ""))
            yield Move(("ready", member.rank))
            if member.agreed:
                yield Move(("hear", member.rank))
        if left.has("restarts"):
            yield Move(("restart",), "restarts")

    def restore(self, saved: Saved) -> None:
        """Return to a state."""
        super().restore(saved)
        for member in self.group.members:
            if member.on_device is not None:
                member.on_device = member.rounds.held

    def do(self, action: Action) -> None:
        """Make a move. Raises AssertionError if a check fails."""
        group, (name, *values) = self.group, action
        match name:
            case "arrive":
                group.arrive(*self.world.arrivals[values[0]])
            case "cancel":
                group.cancel(*values)
            case "finish":
                group.finish(*values)
            case "ready":
                group.ready(values[0])
            case "hear":
                group.hear(values[0])
            case "restart":
                group.restart()
        for member in group.members:
            for asked in member.asked:
                got = group.answers.get(asked.key)
                if got is None or asked.key in self.answered:
                    continue
                self.answered |= {asked.key}
                if got.reason in COMPLETED:
                    assert got == asked.answer, f"{asked.key} got {got}, wanted {asked.answer}"
                else:
                    assert got.reason in ENDS, got
                    assert got.tokens == asked.answer.tokens[: len(got.tokens)], f"{asked.key} got {got}"

    def is_fruitless(self, move: Move) -> bool:
        """Ranks without work go on agreeing; no cycle of them counts."""
        return bool(move.action[0] != "finish")

    def _of_hosts(self) -> object:
        group = self.group
        return (
            [(rank, one.counts, one.wish) for rank, one in sorted(group.proposals.items())],
            [
                (
                    [_of_agreement(one, group) for one in member.agreed],
                    [launched.may_sample for launched in member.kv.stream],
                    len(member.launched) - member.delivered,
                    len(group.passes) - len(member.launched),
                    sorted(asked.key for asked in member.asked),
                )
                for member in group.members
            ],
        )


def _of_agreement(event: RanksAgreed, group: RankGroup) -> tuple[object, ...]:
    """Return the content of an agreement that is still under way; that of an older generation has none."""
    if event.generation != group.generation:
        return ()
    return event.round - group.round, event.counts, event.wishes
