"""Sequences of events and commands written by hand, field by field.

    config page_size=2 pages=16                              and for one of several engines: @prefill role=prefill
    # The subject of the sequence.
    @decode                                                  the engine of what follows; a single one needs no name
    BatchFinished(time_us=300, batch_id=1, tokens=ids(7, 8), accepted=ids(2))
    ----
    StreamTokens(request_ids=[0], offsets=[1], token_counts=[2], tokens=[7, 8])

Above the rule are observed events, below it the contents that the Steps must have, of all events together. Every line
becomes a value of the contract's own types, field by field, so a field that is missing, misspelt or of another type is
an error. `check` checks what needs no engine: times, batch numbers, and which answer belongs to which order.
`play` passes the events to an engine with the config of the first line, and compares its Steps with the sequence.
"""

from __future__ import annotations

import ast
import typing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract import commands, events
from lockstep.core.contract.commands import BatchPlan, LaunchBatch, ProposeBatch, SampleBatch, StartTransfer
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchFinished, Decided, LaneReady, Observed, RanksAgreed, TransferAdvanced
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.scenario import RULE, config_of, parse

CONFIG = "config "

TYPES: dict[str, type[msgspec.Struct]] = {
    name: value
    for module in (events, commands)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, msgspec.Struct)
}


@dataclass
class Exchange:
    """Some observed events of one engine, and the resulting Steps."""

    engine: str
    observed: list[Observed]
    decided: list[Decided] = field(default_factory=list)
    commands: list[msgspec.Struct] = field(default_factory=list)


@dataclass
class Sequence:
    configs: dict[str, SchedConfig]  # by engine; "" for those without one of their own
    exchanges: list[Exchange]


def read(text: str) -> Sequence:
    """The sequence in a file. Raises ValueError or TypeError, naming the line, for an invalid value."""
    first, _, rest = text.partition("\n")
    if not is_spelt_out(text):
        raise ValueError(f"the first line must be `{CONFIG}NAME=VALUE ...`, got `{first}`")
    configs = _configs(first.split()[1:])
    exchanges = []
    engine = ""
    for block in parse(rest):
        observed: list[Observed] = []
        for line in block.head:
            if line.startswith("@"):
                engine = line[1:].strip()
            elif not line.startswith("#"):
                value = record(line)
                if not isinstance(value, Observed):
                    raise TypeError(f"only observed events stand above `{RULE}`: {line}")
                observed.append(value)
        if not observed:
            continue
        exchange = Exchange(engine, observed)
        for line in block.expected:
            if line.startswith("#"):
                continue
            value = record(line)
            if isinstance(value, Decided):
                exchange.decided.append(value)
            else:
                exchange.commands.append(value)
        exchanges.append(exchange)
    return Sequence(configs, exchanges)


def _configs(words: list[str]) -> dict[str, SchedConfig]:
    """By engine: the words before the first @name, and those after its own."""
    parts: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("@"):
            name = word[1:]
            parts[name] = list(parts[""])
        else:
            parts[name].append(word)
    return {name: config_of(part) for name, part in parts.items() if name or len(parts) == 1}


def is_spelt_out(text: str) -> bool:
    """Whether a file is such a sequence; a scenario opens with a comment."""
    return text.startswith(CONFIG)


def play(sequence: Sequence) -> None:
    """Play a sequence; the engine is restored every time. Raises: AssertionError at the first Step that differs."""
    engines: dict[str, Engine] = {}
    for exchange in sequence.exchanges:
        decided, ordered = [], []
        name = exchange.engine if exchange.engine in sequence.configs else ""
        engine = engines.get(exchange.engine) or Engine(sequence.configs[name])
        for event in exchange.observed:
            engine = snapshot.restore(snapshot.dump(engine))
            step = engine.step(event)
            decided += step.decided
            ordered += step.commands
            invariants.check(engine)
        engines[exchange.engine] = engine
        for got, expected in ((decided, exchange.decided), (ordered, exchange.commands)):
            for one, other in zip_longest(map(_plain, got), map(_plain, expected)):
                assert one == other, f"after {exchange.observed[-1]}:\n  got       {one}\n  expected  {other}"


def _plain(value: msgspec.Struct) -> Any:
    return type(value).__name__, msgspec.to_builtins(value, enc_hook=lambda array: array.tolist())


def record(line: str) -> msgspec.Struct:
    """One value of the contract's types from `Type(field=value, ...)`."""
    try:
        value = _value(ast.parse(line, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, msgspec.ValidationError) as error:
        error.add_note(line)
        raise
    if not isinstance(value, msgspec.Struct):
        raise TypeError(f"expected Type(field=value, ...), got {line}")
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id="ids"), args=args, keywords=[]):
            return np.array([_value(arg) for arg in args], np.int32).tobytes()
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            if name not in TYPES:
                raise ValueError(f"the contract has no type `{name}`")
            return _struct(TYPES[name], {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg})
        case ast.Tuple(elts=elements):
            return tuple(_value(element) for element in elements)
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
    return ast.literal_eval(node)


def _struct(kind: type[msgspec.Struct], fields: dict[str, Any]) -> msgspec.Struct:
    """Make a struct and check the type of every field; lists become arrays of int32 or int64 where declared."""
    hints = typing.get_type_hints(kind)
    unknown = fields.keys() - set(kind.__struct_fields__)
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    values = {}
    for name, value in fields.items():
        hint = hints[name]
        if hint in (commands.Int32s, commands.Int64s):
            values[name] = np.array(value, np.int64 if hint == commands.Int64s else np.int32)
        elif _holds_arrays(value):
            values[name] = value  # its own fields were checked when it was built
        else:
            values[name] = msgspec.convert(msgspec.to_builtins(value, builtin_types=(bytes,)), hint)
    return kind(**values)


def _holds_arrays(value: Any) -> bool:
    return isinstance(value, msgspec.Struct) and any(
        isinstance(part, np.ndarray) or _holds_arrays(part) for part in msgspec.structs.astuple(value)
    )


@dataclass
class Orders:
    """The commands to one engine's host that are not answered yet."""

    now_us: int = 0
    next_batch: int = 0
    in_flight: dict[int, BatchPlan] = field(default_factory=dict)
    unsampled: set[int] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)
    transfers: set[int] = field(default_factory=set)


def check(sequence: Sequence) -> None:
    """Raise AssertionError unless answers follow orders, times do not fall and plans are whole."""
    engines: dict[str, Orders] = {}
    for exchange in sequence.exchanges:
        orders = engines.setdefault(exchange.engine, Orders())
        ready = False
        for event in exchange.observed:
            assert event.time_us >= orders.now_us, f"time falls at {event}"
            orders.now_us = event.time_us
            ready |= isinstance(event, LaneReady | RanksAgreed)
            _answer(event, orders)
        for decided in exchange.decided:
            assert decided.time_us == orders.now_us, f"decided at another time than now: {decided}"
        for command in exchange.commands:
            if isinstance(command, LaunchBatch):
                assert ready, f"only LaneReady, or RanksAgreed after it, launches: {command.plan.batch_id}"
            _order(command, orders)
    for name, orders in engines.items():
        assert not orders.in_flight, f"{name} leaves batches {sorted(orders.in_flight)} unanswered"
        assert not orders.unsampled, f"{name} never samples batches {sorted(orders.unsampled)}"
        assert not orders.rounds, f"{name} leaves rounds {sorted(orders.rounds)} without agreement"
        assert not orders.transfers, f"{name} leaves transfers {sorted(orders.transfers)} without an end"


def _answer(event: Observed, orders: Orders) -> None:
    match event:
        case BatchFinished(batch_id=batch_id):
            assert batch_id in orders.in_flight, f"b{batch_id} finished, but was not launched"
            assert batch_id not in orders.unsampled, f"b{batch_id} finished, but was never sampled"
            plan = orders.in_flight.pop(batch_id)
            older = [b for b, other in orders.in_flight.items() if b < batch_id and other.microbatch == plan.microbatch]
            assert not older, f"b{batch_id} finished before {older} of its microbatch"
            samples = len(plan.sample_rows)
            accepted = np.frombuffer(event.accepted, np.int32)
            if plan.speculation is not None and plan.speculation.parents.size:  # the numbers of right drafts follow
                accepted = accepted[:samples]
            expected = int(accepted.sum()) if accepted.size else samples
            assert len(event.tokens) == 4 * expected, f"b{batch_id} has {len(event.tokens) // 4} tokens, not {expected}"
            assert accepted.size in (0, samples), f"b{batch_id} has {accepted.size} accepted counts"
        case RanksAgreed(round=number):
            assert number in orders.rounds, f"round {number} was agreed, but not proposed"
            orders.rounds.remove(number)
        case TransferAdvanced(transfer_id=transfer, status="done" | "failed" | "link_down"):
            orders.transfers.discard(transfer)


def _order(command: msgspec.Struct, orders: Orders) -> None:
    match command:
        case LaunchBatch(plan, sample):
            assert plan.batch_id == orders.next_batch, f"b{plan.batch_id} is launched, expected b{orders.next_batch}"
            orders.next_batch += 1
            orders.in_flight[plan.batch_id] = plan
            if sample == "deferred":
                orders.unsampled.add(plan.batch_id)
            _whole(plan)
        case SampleBatch(batch_id=batch_id):
            assert batch_id in orders.unsampled, f"b{batch_id} is sampled twice, or was not deferred"
            orders.unsampled.remove(batch_id)
        case ProposeBatch(round=number):
            orders.rounds.add(number)
        case StartTransfer(transfer_id=transfer):
            orders.transfers.add(transfer)


def _whole(plan: BatchPlan) -> None:
    rows = len(plan.rows)
    columns = (plan.request_ids, plan.starts, plan.stops)
    assert all(len(column) == rows for column in columns), f"b{plan.batch_id} has columns of different lengths"
    assert (plan.stops > plan.starts).all(), f"b{plan.batch_id} has an empty row"
    new_tokens = int((plan.stops - plan.starts)[: plan.extend_rows].sum())
    assert len(plan.token_ids) == new_tokens, f"b{plan.batch_id} has {len(plan.token_ids)} ids, not {new_tokens}"
    assert all(0 <= after.index < rows for after in plan.starts_after), f"b{plan.batch_id} waits for a row it lacks"
