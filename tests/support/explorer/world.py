"""A small world: settings of an engine, a few events that may come at any moment, and all moves in each of its states.

Moves are actions of a `Driver`. *Inputs* come from outside, each as often as the world allows: arrivals, cancels,
failures, commands of an operator. *Steps* are what a working host does sooner or later: it offers launch slots,
delivers results in order, answers commands. Liveness is about steps alone: when inputs stop, everything must end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import Control, Resume, ResumeMemory
from tests.support.driver.actions import CONTROLS, Action
from tests.support.driver.driver import Driver
from tests.support.explorer.canonical import key_of
from tests.support.tagged_layers import oldest

RESUME = CONTROLS.index(Resume())
RESUME_MEMORY = CONTROLS.index(ResumeMemory(("weights", "kv_cache")))
COUNTED = ("cancels", "batch_errors", "odd_rows", "refusals", "restarts")


@dataclass(frozen=True)
class World:
    """A world to explore."""

    name: str
    config: SchedConfig
    arrivals: tuple[Action, ...]  # each comes once, in any order
    cancels: int = 0
    batch_errors: int = 0
    odd_rows: int = 0  # results with a row without a valid token, or with the end of a stop text
    refusals: int = 0  # grammars, media, adapters and moves that fail
    restarts: int = 0
    controls: tuple[Control, ...] = ()  # each comes once, in any order
    commands: tuple[Action, ...] = ()  # other actions from outside, the same
    timed: bool = False  # time goes on to the next due time


@dataclass(frozen=True)
class Move:
    """One way on from a state."""

    action: Action
    spends: str = ""  # the input of which one less is left; none: a step

    @property
    def is_step(self) -> bool:
        """Whether a working host does this by itself, however often."""
        return not self.spends


@dataclass
class Left:
    """The inputs that may still come."""

    arrivals: tuple[int, ...]  # their indices
    controls: tuple[int, ...]
    commands: tuple[int, ...]
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def all_of(cls, world: World) -> Left:
        """Everything that a world has."""
        counts = {name: getattr(world, name) for name in COUNTED}
        return cls(
            tuple(range(len(world.arrivals))),
            tuple(range(len(world.controls))),
            tuple(range(len(world.commands))),
            {name: count for name, count in counts.items() if count},
        )

    def after(self, move: Move) -> Left:
        """What is left when a move is done."""
        kind, _, number = move.spends.partition(" ")
        if not kind:
            return self
        if number:
            rest = tuple(one for one in getattr(self, kind) if one != int(number))
            return Left(**{**vars(self), kind: rest})
        return Left(**{**vars(self), "counts": {**self.counts, kind: self.counts[kind] - 1}})

    def has(self, name: str) -> bool:
        """Whether an input of a kind may still come."""
        return self.counts.get(name, 0) > 0


def moves(world: World, driver: Driver, left: Left) -> Iterator[Move]:
    """Yield every move that is possible in a state, inputs first."""
    yield from _inputs(world, driver, left)
    yield from _steps(world, driver)


def _inputs(world: World, driver: Driver, left: Left) -> Iterator[Move]:
    seen: list[Action] = []
    for index in left.arrivals:
        if (arrival := world.arrivals[index]) not in seen:  # of equal requests any is the next
            seen.append(arrival)
            yield Move(arrival, f"arrivals {index}")
    live, stream = len(driver.engine.requests), driver.kv.stream
    if left.has("cancels"):
        yield from (Move(("cancel", number), "cancels") for number in range(live))
    if left.has("batch_errors") and stream:
        yield Move(("finish", "error"), "batch_errors")
        yield from (Move(("finish", "error", 0, number), "batch_errors") for number in range(1, len(oldest(stream))))
    if left.has("odd_rows") and stream:
        for number, row in enumerate(stream[0].plan.request_ids[stream[0].plan.sample_rows].tolist()):
            yield Move(("finish", "invalid", number), "odd_rows")
            if driver.records[row].watches_text:
                yield Move(("finish", "text_stop", number), "odd_rows")
    if left.has("refusals"):
        yield from (Move((*move.action, *refusal), "refusals") for move, refusal in _refusals(driver))
    if left.has("restarts"):
        yield Move(("restart",), "restarts")
    if driver.recovery.voided:
        yield Move(("late",))
    for index in left.controls:
        yield Move(("control", CONTROLS.index(world.controls[index])), f"controls {index}")
    for index in left.commands:
        yield Move(world.commands[index], f"commands {index}")


def _refusals(driver: Driver) -> Iterator[tuple[Move, Action]]:
    for move in _answers(driver):
        match move.action:
            case ("compiled", *_):
                yield move, ("unbalanced",)
            case ("encode", *_):
                yield move, (True,)
            case ("adapter_loaded", *_) | ("order_done", *_):
                yield move, ("no room",)
            case ("move", *_):
                yield move, (0.0, "lost")


def _answers(driver: Driver) -> Iterator[Move]:
    """What the host answers of what it was asked."""
    yield from (Move(("compiled", number)) for number in range(len(driver.grammars.compiling)))
    if driver.media.encoding:
        yield Move(("encode",))
    yield from (Move(("adapter_loaded", number)) for number in range(len(driver.kv.loads)))
    if driver.tiers is not None:
        yield from (Move(("move", 2 * number)) for number in range(len(driver.tiers.moves)))
    if driver.control.orders:
        yield Move(("order_done",))


def _steps(world: World, driver: Driver) -> Iterator[Move]:
    engine = driver.engine
    yield from (Move(("lane", microbatch)) for microbatch in range(engine.config.microbatches))
    if driver.kv.stream:
        yield Move(("finish",))
        yield from (Move(("finish", "", 0, number)) for number in range(1, len(oldest(driver.kv.stream))))
    yield from _answers(driver)
    if engine.controls.paused or not engine.admits:
        yield Move(("control", RESUME))
    if engine.maintenance.released and not engine.maintenance.jobs:
        yield Move(("control", RESUME_MEMORY))
    if world.timed and (due_us := _next_due(driver)) is not None:
        yield Move(("clock", due_us - driver.now_us))


def _next_due(driver: Driver) -> int | None:
    """The next date at which something is due, of requests or of features."""
    engine = driver.engine
    dues = [due_us for component in engine.components for due_us, _ in component.due_times()]
    for request in engine.requests.values():
        dues += [due for due in (request.finish_by_us, request.grammar_due_us) if due is not None]
        if request.deadline_us is not None and not request.ran:
            dues.append(request.deadline_us)
    return min(dues, default=None)


def key(driver: Driver, left: Left) -> bytes:
    """Return the name of a state of the world."""
    return key_of(driver.engine, (left.arrivals, left.controls, left.commands, left.counts, _of_host(driver)))


def _of_host(driver: Driver) -> tuple[object, ...]:
    """What the host and its devices have that the engine does not, and that further moves depend on."""
    kv, tiers = driver.kv, driver.tiers
    return (
        driver.grammars.compiling,
        [command.digest for command in driver.media.encoding],
        [(load.adapter, load.version) for load in kv.loads],
        [type(order).__name__ for order in driver.control.orders],
        driver.control.next_id,
        [plan.batch_id - driver.engine.next_batch_id for plan in driver.recovery.voided],
        [launched.may_sample for launched in kv.stream],
        None if tiers is None else (sorted(tiers.storage), list(tiers.moves), sorted(tiers.cancelled)),
        msgspec.to_builtins(sorted(kv.versions.items())),
    )
