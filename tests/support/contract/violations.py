"""Violations of the contract, planted in host or core, each of which must be refused by a rule of its machine.

A violation of the host is a *twist* of a history; one of the core replaces `Engine.step` or a part of the core. A fact
that is impossible by the core's own state must be refused by the core, too, which stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import numpy as np

from lockstep.core.contract.commands import (
    BatchPlan,
    CancelTransfer,
    FinishRequest,
    LaunchBatch,
    ProposeBatch,
    StartTransfer,
    Step,
    StreamTokens,
)
from lockstep.core.contract.events import (
    BatchFinished,
    EngineRestarted,
    LaneReady,
    Observed,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    TokenRuns,
)
from lockstep.core.features.disaggregation import RECEIVER, SENDER
from lockstep.core.scheduler.engine import Engine
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.prefill import PrefillSide
from tests.support.contract.engine_host import EngineHost
from tests.support.contract.handover_host import HandoverHost
from tests.support.contract.histories import RUNS, Twist
from tests.support.contract.machine import Forbidden, Unsafe
from tests.support.contract.rank_host import RankHost
from tests.support.contract.transfer_host import DECODE, TransferHost
from tests.support.plants import discard_is_a_flag, early_free, no_epoch_check, published_at_launch

SEEDS_MAX = 120
Plant = Callable[[], AbstractContextManager[Any]]
Mutation = Callable[[Engine, Observed, Step], Step]
UNSAFE = "unsafe"
"""In place of a rule: the step is allowed as far as rules see it, and the state behind it is unsafe."""


@dataclass(frozen=True)
class Violation:
    """One way to break the contract."""

    machine: Literal["engine", "transfers", "handover", "ranks"]
    side: Literal["host", "core"]
    what: str
    rules: tuple[str, ...]  # any of these refuses it
    twist: Twist | None = None
    plant: Plant = nullcontext
    by_core: bool = False  # impossible by the core's own state: it refuses the fact, too


@dataclass(frozen=True)
class Refusal:
    """How a violation was found."""

    seed: int
    rule: str
    message: str
    by_core: bool  # the core refused it, too, and stayed as it was


def refusal_of(violation: Violation, *, seeds: int = SEEDS_MAX) -> Refusal | None:
    """Run histories by seed until the violation is refused; None if it survives."""
    run = RUNS[violation.machine]
    with violation.plant():
        for seed in range(seeds):
            with TemporaryDirectory() as folder:
                try:
                    run(seed, Path(folder), violation.twist or _no_twist)
                except Forbidden as error:
                    by_core = error.__context__ is not None
                    return Refusal(seed, error.rule, str(error), by_core)
                except Unsafe as error:
                    return Refusal(seed, UNSAFE, str(error), by_core=False)
                except AssertionError:  # a check of the product's own came first
                    continue
    return None


def _no_twist(host: Any, rng: random.Random) -> bool:
    return False


# ------------------------------------------------------------------------------------------------ the host of an engine


def _result_twice(host: EngineHost, rng: random.Random) -> bool:
    host.perform_all()
    if not host.device:
        return False
    plan = host.device[0]
    host.result()
    event = BatchFinished(host.now_us, plan.batch_id, host._draw(plan, 0), generation=plan.generation)
    host.fold(event, ("result", plan.batch_id, plan.generation, False))
    return True


def _result_out_of_order(host: EngineHost, rng: random.Random) -> bool:
    host.perform_all()
    alike = [plan.generation for plan in host.device]
    return len(alike) > 1 and alike[0] == alike[1] and host.result(at=1)


def _restart_in_its_generation(host: EngineHost, rng: random.Random) -> bool:
    host.perform_all()
    host.do(("lose",))
    host.restart(rise=0)
    return True


def _no_restart(host: EngineHost, rng: random.Random) -> bool:
    host.perform_all()
    host.do(("lose",))
    host.slot()
    return True


def _commands_before_the_record(host: EngineHost, rng: random.Random) -> bool:
    if host._unwritten is None or not host._pending:
        return False
    host.perform()
    return True


def _commands_out_of_order(host: EngineHost, rng: random.Random) -> bool:
    if len(host._pending) < 2:
        return False
    if host._unwritten is not None:
        host.write()
    host.perform(len(host._pending) - 1)
    return True


def _next_event_first(host: EngineHost, rng: random.Random) -> bool:
    if not host._pending:
        return False
    host.machine.after(host.state, ("fold", ("slot",), (), ()))
    return True


def _id_again(host: EngineHost, rng: random.Random) -> bool:
    if not host.clients:
        return False
    event = RequestArrived(time_us=host.now_us, request_id=0, prompt=TokenRuns((1, 2)), max_new_tokens=2)
    host.fold(event, ("arrive", 0, 0, 2, 2))
    return True


# -------------------------------------------------------------------------------------------------- hosts of a transfer


def _part_before_its_row(host: TransferHost, rng: random.Random) -> bool:
    return _move_first(host, lambda wire: wire.receive is not None and not wire.parts[wire.moved].ready)


def _part_into_no_pages(host: TransferHost, rng: random.Random) -> bool:
    return _move_first(host, lambda wire: wire.receive is None and wire.parts[wire.moved].ready)


def _move_first(host: TransferHost, is_wrong: Callable[[Any], bool]) -> bool:
    for wire in host.open:
        if wire.moved < len(wire.parts) and is_wrong(wire):
            host.move(wire)
            return True
    return False


def _part_out_of_order(host: TransferHost, rng: random.Random) -> bool:
    for wire in host.open:
        later = wire.moved + 1
        if wire.receive is not None and later < len(wire.parts) and wire.parts[later].ready:
            host.follow(("stage", wire.room, later))
            return True
    return False


def _part_behind_the_end(host: TransferHost, rng: random.Random) -> bool:
    for wire in host.wires:
        if wire.outcome in ("failed", "link_down") and wire.receive is not None and wire.moved < len(wire.parts):
            host.move(wire)
            return True
    return False


def _end_twice(host: TransferHost, rng: random.Random) -> bool:
    for name, event in host.heard:
        if event.status in ("done", "failed", "link_down"):
            host.fold(host.members[name], msgspec.structs.replace(event, time_us=host.now_us))
            return True
    return False


def _done_before_the_end(host: TransferHost, rng: random.Random) -> bool:
    for wire in host.open:
        if wire.receive is not None and wire.moved < len(wire.parts):
            host.follow(("done", wire.room))
            return True
    return False


def _links_of_a_lost_engine(host: TransferHost, rng: random.Random) -> bool:
    """The hosts go on moving KV into an engine that restarted."""
    movable = [wire for wire in host.movable() if wire.receive is not None]
    if not movable:
        return False
    host.restart(DECODE)
    movable[0].outcome = None
    host.move(movable[0])
    return True


# ------------------------------------------------------------------------------------------------------- hosts of ranks


def _skips_a_round(host: RankHost, rng: random.Random) -> bool:
    """A host that sleeps although another rank has proposed."""
    for rank, view in enumerate(host.state.ranks):
        agreement, seat = host.seats[rank].agreement, host.seats[rank]
        assert agreement is not None
        has_room = len(seat.engine.in_flight) <= seat.engine.config.overlap_depth
        if view.wanted and agreement._wanted >= agreement._round and has_room and not agreement.pending:
            agreement.take_wanted()
            host.do(("fold", rank, ("sleep",), ()))
            return True
    return False


def _agreed_otherwise(host: RankHost, rng: random.Random) -> bool:
    """One rank receives other counts of another rank than all."""
    return _fold_agreement(host, lambda rank, at: at != rank)


def _own_entry_changed(host: RankHost, rng: random.Random) -> bool:
    return _fold_agreement(host, lambda rank, at: at == rank)


def _fold_agreement(host: RankHost, changes: Callable[[int, int], bool]) -> bool:
    for rank, seat in enumerate(host.seats):
        for event in seat.facts[:1]:
            assert isinstance(event, RanksAgreed)
            counts = tuple((one[0] + 1, *one[1:]) if changes(rank, at) else one for at, one in enumerate(event.counts))
            seat.facts[0] = msgspec.structs.replace(event, counts=counts)
            host.hear(rank)
            return True
    return False


def _agreed_twice(host: RankHost, rng: random.Random) -> bool:
    for rank, seat in enumerate(host.seats):
        if seat.facts:
            event = seat.facts[0]
            host.hear(rank)
            seat.facts.insert(0, event)
            host.hear(rank)
            return True
    return False


def _pass_ends_early(host: RankHost, rng: random.Random) -> bool:
    """A rank's result of a pass that another rank has not launched."""
    for rank, view in enumerate(host.state.ranks):
        if any(len(other.passes) <= view.delivered for other in host.state.ranks) and host.seats[rank].device:
            plan = host.seats[rank].device.pop(0)
            tokens = np.full(len(plan.sample_rows), 1_000_000, np.int32).tobytes()
            event = BatchFinished(host.seats[rank].engine.now_us, plan.batch_id, tokens, generation=plan.generation)
            host.fold(rank, event, ("result", False))
            return True
    return False


def _one_rank_restarts(host: RankHost, rng: random.Random) -> bool:
    host.do(("lost",))
    engine = host.seats[0].engine
    host.fold(0, EngineRestarted(engine.now_us, engine.generation + 1), ("restart", engine.generation + 1))
    host.fold(1, LaneReady(host.seats[1].engine.now_us), ("slot",))
    return True


# ---------------------------------------------------------------------------------------------------------------- cores


@contextmanager
def _stepping(mutation: Mutation) -> Iterator[None]:
    """Every engine's Steps are changed on their way to the host."""
    original = Engine.step

    def step(engine: Engine, event: Observed) -> Step:
        return mutation(engine, event, original(engine, event))

    Engine.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.step = original  # type: ignore[method-assign]


def _changed(change: Callable[[Any], Any], kind: type) -> Plant:
    """Commands of one kind are changed: to another one, to a list, or, by None, to nothing."""

    def mutation(engine: Engine, event: Observed, step: Step) -> Step:
        commands: list[Any] = []
        for command in step.commands:
            made = change(command) if isinstance(command, kind) else command
            commands += made if isinstance(made, list) else [made] if made is not None else []
        return msgspec.structs.replace(step, commands=commands)

    return lambda: _stepping(mutation)


def _replanned(change: Callable[[BatchPlan], BatchPlan | None]) -> Plant:
    """Launched plans are changed."""

    def changed(command: LaunchBatch) -> LaunchBatch | None:
        plan = change(command.plan)
        return None if plan is None else msgspec.structs.replace(command, plan=plan)

    return _changed(changed, LaunchBatch)


def _again(command: Any) -> list[Any]:
    return [command, command]


def _dropped(command: Any) -> None:
    return None


def _span_with_a_hole(plan: BatchPlan) -> BatchPlan:
    starts = plan.starts.copy()
    wide = plan.stops - starts > 1
    starts[wide] += 1
    return msgspec.structs.replace(plan, starts=starts)


def _never_samples(plan: BatchPlan) -> BatchPlan:
    return msgspec.structs.replace(plan, sample_rows=plan.sample_rows[:0])


def _cancel_without_an_end(engine: Engine, event: Observed, step: Step) -> Step:
    if not isinstance(event, RequestCancelled):
        return step
    kept = [command for command in step.commands if not isinstance(command, FinishRequest)]
    return msgspec.structs.replace(step, commands=kept)


def _launches_behind_results() -> AbstractContextManager[None]:
    """A result is followed by a launch in the same Step."""
    original = Engine.step

    def mutation(engine: Engine, event: Observed, step: Step) -> Step:
        if not isinstance(event, BatchFinished):
            return step
        more = original(engine, LaneReady(event.time_us))
        return msgspec.structs.replace(step, commands=[*step.commands, *more.commands])

    return _stepping(mutation)


def _leaves_at_once(table: dict[Any, Any], *states: str) -> Plant:
    """A transfer that is given up in these states is over, although the other side still uses its pages."""
    return lambda: patch.dict(table, {(state, "abandoned"): "over" for state in states})


def _ends_while_reading(host: HandoverHost, rng: random.Random) -> bool:
    """A request is cancelled while its pages are being read, and all of that arrives before the copy ends."""
    if not host.loops["p"].copies.due:
        return False
    host.cancel("d", rng.randrange(9))
    host.take("d", all_of=True)
    while host.deliver(0):
        pass
    host.take("p", all_of=True)
    return True


def _copies_forgotten(owner: type, count: str) -> Plant:
    """A side of a handover reports the end of a transfer although copies are under way."""
    conclude = owner._conclude  # type: ignore[attr-defined]

    def bug(side: Any, room: Any) -> None:
        under_way = getattr(room, count)
        setattr(room, count, 0)
        conclude(side, room)
        setattr(room, count, under_way)

    return lambda: patch.object(owner, "_conclude", bug)


def _parts_at_once() -> AbstractContextManager[Any]:
    """A prefill engine's side sends a part as soon as it was ordered."""
    perform = PrefillSide.perform

    def bug(side: PrefillSide, command: StartTransfer | CancelTransfer) -> None:
        perform(side, command)
        room = side._of_request.get(command.transfer_id)
        if room is not None and isinstance(command, StartTransfer) and not command.last:
            side._behind.clear()
            room.ready += 1
            side._queue(room)

    return patch.object(PrefillSide, "perform", bug)


def _accepts_twice() -> AbstractContextManager[Any]:
    """A prefill engine's side reports each end a second time."""
    conclude = PrefillSide._conclude

    def bug(side: PrefillSide, room: Any) -> None:
        known = side._rooms.get(room.number) is room
        conclude(side, room)
        if known and side._rooms.get(room.number) is not room:
            side._tell(room, room.status)

    return patch.object(PrefillSide, "_conclude", bug)


def _other_pages(command: StartTransfer) -> StartTransfer:
    return command if command.direction == "receive" else msgspec.structs.replace(command, pages=command.pages[::-1])


def _of_the_next_round(command: ProposeBatch) -> ProposeBatch:
    return msgspec.structs.replace(command, round=command.round + 1)


def _idle_is_left_out(plan: BatchPlan) -> BatchPlan | None:
    return None if plan.mode == "idle" else plan


def _of_another_round(plan: BatchPlan) -> BatchPlan:
    return msgspec.structs.replace(plan, ranks=msgspec.structs.replace(plan.ranks, round=plan.ranks.round + 1))


def _all_rows_dropped(plan: BatchPlan) -> BatchPlan:
    none = plan.rows[:0]
    return msgspec.structs.replace(plan, rows=none, request_ids=plan.request_ids[:0], starts=none, stops=none)


def _proposes_twice(engine: Engine, event: Observed, step: Step) -> Step:
    proposals = [command for command in step.commands if isinstance(command, ProposeBatch)]
    return msgspec.structs.replace(step, commands=[*step.commands, *proposals])


VIOLATIONS: tuple[Violation, ...] = (
    Violation("engine", "host", "a result is delivered twice", ("results once",), _result_twice, by_core=True),
    Violation(
        "engine",
        "host",
        "a result comes before an older one",
        ("results in launch order",),
        _result_out_of_order,
        by_core=True,
    ),
    Violation(
        "engine",
        "host",
        "a restart without a new generation",
        ("restart generation rises",),
        _restart_in_its_generation,
        by_core=True,
    ),
    Violation("engine", "host", "a lost device without a restart", ("restart after a loss",), _no_restart),
    Violation(
        "engine",
        "host",
        "commands before the record is written",
        ("record before commands",),
        _commands_before_the_record,
    ),
    Violation("engine", "host", "the last command first", ("commands in order",), _commands_out_of_order),
    Violation(
        "engine", "host", "the next event before the commands", ("commands before the next event",), _next_event_first
    ),
    Violation("engine", "host", "an id for a second request", ("ids rise",), _id_again, by_core=True),
    Violation("engine", "core", "tokens are streamed twice", ("streams follow",), plant=_changed(_again, StreamTokens)),
    Violation(
        "engine",
        "core",
        "tokens are not streamed",
        ("sent before the end", "streams follow"),
        plant=_changed(_dropped, StreamTokens),
    ),
    Violation("engine", "core", "a request ends twice", ("ends once",), plant=_changed(_again, FinishRequest)),
    Violation(
        "engine",
        "core",
        "a request never ends",
        ("length ends", "cancel closes", UNSAFE),
        plant=_changed(_dropped, FinishRequest),
    ),
    Violation(
        "engine", "core", "a cancel closes nothing", ("cancel closes",), plant=lambda: _stepping(_cancel_without_an_end)
    ),
    Violation("engine", "core", "a result launches", ("only a slot launches",), plant=_launches_behind_results),
    Violation(
        "engine",
        "core",
        "a plan of the generation before",
        ("plans name their generation",),
        plant=_replanned(lambda plan: msgspec.structs.replace(plan, generation=plan.generation - 1)),
    ),
    Violation(
        "engine",
        "core",
        "a batch id is left out",
        ("batch ids rise",),
        plant=_replanned(lambda plan: msgspec.structs.replace(plan, batch_id=plan.batch_id + 1)),
    ),
    Violation("engine", "core", "a span leaves out a position", ("spans follow",), plant=_replanned(_span_with_a_hole)),
    Violation(
        "engine", "core", "the newest position does not sample", ("newest samples",), plant=_replanned(_never_samples)
    ),
    Violation("engine", "core", "pages are free while a batch writes them", ("deferred frees",), plant=early_free),
    Violation(
        "engine",
        "core",
        "KV is shared at its launch",
        ("delivered KV is shared", "one owner"),
        plant=published_at_launch,
    ),
    Violation(
        "engine",
        "core",
        "late tokens are kept",
        ("streams follow", "length ends", "spans follow"),
        plant=no_epoch_check,
    ),
    Violation(
        "engine",
        "core",
        "one late token of several is dropped",
        ("streams follow", "length ends", "spans follow"),
        plant=discard_is_a_flag,
    ),
    Violation(
        "transfers",
        "host",
        "a part moves before its row is computed",
        ("parts behind their batch",),
        _part_before_its_row,
    ),
    Violation(
        "transfers", "host", "a part moves to an engine without pages", ("parts into pages",), _part_into_no_pages
    ),
    Violation("transfers", "host", "a later part moves first", ("parts in order",), _part_out_of_order),
    Violation(
        "transfers", "host", "a part moves behind the end", ("nothing moves behind the end",), _part_behind_the_end
    ),
    Violation("transfers", "host", "a side receives the end twice", ("facts arrive once",), _end_twice),
    Violation("transfers", "host", "done before the last part", ("done is the last part",), _done_before_the_end),
    Violation(
        "transfers",
        "host",
        "KV moves into an engine that restarted",
        ("nothing moves behind the end",),
        _links_of_a_lost_engine,
    ),
    Violation(
        "transfers",
        "core",
        "a transfer is given up in silence",
        ("abandons are cancelled",),
        plant=_changed(_dropped, CancelTransfer),
    ),
    Violation(
        "transfers",
        "core",
        "pages are free while the sender writes them",
        ("quarantine of the receiver",),
        plant=_leaves_at_once(RECEIVER, "receiving"),
    ),
    Violation(
        "transfers",
        "core",
        "pages are free while the sender reads them",
        ("quarantine of the sender",),
        plant=_leaves_at_once(SENDER, "sending", "in_flight"),
    ),
    Violation(
        "transfers",
        "core",
        "a part names its pages in reverse",
        ("parts are computed",),
        plant=_changed(_other_pages, StartTransfer),
    ),
    Violation(
        "handover", "host", "a part is sent before its batch", ("parts behind their batch",), plant=_parts_at_once
    ),
    Violation(
        "handover",
        "host",
        "done while pages are being written",
        ("done is the last part",),
        plant=_copies_forgotten(DecodeSide, "fetching"),
    ),
    Violation(
        "handover",
        "host",
        "the end while pages are being read",
        ("nothing moves behind the end",),
        twist=_ends_while_reading,
        plant=_copies_forgotten(PrefillSide, "copying"),
    ),
    Violation("handover", "host", "an end is reported twice", ("facts arrive once",), plant=_accepts_twice),
    Violation(
        "handover",
        "core",
        "a cancel reaches no host",
        ("abandons are cancelled",),
        plant=_changed(_dropped, CancelTransfer),
    ),
    Violation("ranks", "host", "a rank skips a round", ("joins a round",), _skips_a_round),
    Violation("ranks", "host", "a rank receives other counts", ("the same on every rank",), _agreed_otherwise),
    Violation("ranks", "host", "a rank's own entry is another", ("own entry",), _own_entry_changed, by_core=True),
    Violation("ranks", "host", "an agreement is folded twice", ("agreements in order",), _agreed_twice, by_core=True),
    Violation("ranks", "host", "a pass ends before all have launched it", ("passes end on all",), _pass_ends_early),
    Violation("ranks", "host", "one rank restarts alone", ("all ranks restart",), _one_rank_restarts),
    Violation(
        "ranks",
        "core",
        "a rank with nothing to run launches nothing",
        ("launches on all or none",),
        plant=_replanned(_idle_is_left_out),
    ),
    Violation(
        "ranks",
        "core",
        "a proposal of the next round",
        ("rounds count",),
        plant=_changed(_of_the_next_round, ProposeBatch),
    ),
    Violation("ranks", "core", "a second proposal", ("one proposal",), plant=lambda: _stepping(_proposes_twice)),
    Violation("ranks", "core", "a pass of another round", ("names the pass",), plant=_replanned(_of_another_round)),
    Violation("ranks", "core", "a proposal is taken back", ("a proposal binds",), plant=_replanned(_all_rows_dropped)),
)
