"""Orders of the core to move pages between tiers, and their answers, without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from lockstep.core.contract.commands import (
    CancelPrefetch,
    CopyToHost,
    LoadFromHost,
    PrefetchFromStorage,
    Step,
    WriteToStorage,
)
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    ExpertLoadMeasured,
    HostCopyFinished,
    ObservedEvent,
    PrefetchFinished,
    RequestAdmitted,
    RequestArrived,
    StorageWritten,
    TierOperationEnded,
    TokenIds,
)
from lockstep.host.adapters import AdaptersLog
from lockstep.host.cache_moves import CacheMoves, Move, MoveEnd, name_adapter
from lockstep.host.expert_load import ExpertMeasuring

DEVICE, HOST = np.array([4, 5], np.int32), np.array([7, 9], np.int32)
KEYS = (b"a" * 32, b"b" * 32)
ORDERS: list[tuple[Any, Move, Any]] = [
    (CopyToHost(3, DEVICE, HOST, True, 6), Move("write", 3, DEVICE, HOST, given_up=True), HostCopyFinished),
    (CopyToHost(3, DEVICE, HOST, False, 6), Move("write", 3, DEVICE, HOST), HostCopyFinished),
    (LoadFromHost(3, HOST, DEVICE, 6), Move("load", 3, DEVICE, HOST), HostCopyFinished),
    (PrefetchFromStorage(3, KEYS, HOST, 6), Move("prefetch", 3, host_pages=HOST, keys=KEYS), PrefetchFinished),
    (WriteToStorage(3, KEYS, HOST, 6, after=b"c"), Move("store", 3, host_pages=HOST, keys=KEYS, after=b"c"),
     StorageWritten),
]  # fmt: skip


class NotedMoves:
    """A mover that carries nothing out: the test ends each move."""

    def __init__(self) -> None:
        self.begun: list[tuple[Move, Callable[[MoveEnd], None]]] = []
        self.facts: list[Callable[[int], ObservedEvent]] = []

    def begin(self, move: Move, done: Callable[[MoveEnd], None]) -> None:
        self.begun.append((move, done))


def shown(move: Move) -> tuple[Any, ...]:
    return tuple(one.tolist() if isinstance(one, np.ndarray) else one for one in vars_of(move))


def vars_of(move: Move) -> list[Any]:
    return [getattr(move, name) for name in move.__struct_fields__]


@pytest.mark.parametrize(("command", "move", "answer"), ORDERS)
def test_an_order_is_one_move_and_its_end_one_answer(command: Any, move: Move, answer: Any) -> None:
    mover = NotedMoves()
    moves = CacheMoves(cast(Any, mover), mover.facts.append)
    moves.begin(command)
    ((begun, done),) = mover.begun
    assert shown(begun) == shown(move)
    assert moves.open == 1
    done(MoveEnd(3, 1, "the disk is full"))
    assert moves.open == 1  # until the host folds the answer
    (fact,) = mover.facts
    assert fact(50) == answer(50, 3, 1, "the disk is full", 6)
    assert moves.open == 0


def test_a_cancel_is_passed_on_and_has_no_answer() -> None:
    mover = NotedMoves()
    moves = CacheMoves(cast(Any, mover), mover.facts.append)
    moves.begin(CancelPrefetch(8))
    assert [shown(move) for move, _ in mover.begun] == [shown(Move("cancel", 8))]
    assert moves.open == 0


def test_a_failed_device_ends_the_host() -> None:
    mover = NotedMoves()
    moves = CacheMoves(cast(Any, mover), mover.facts.append)
    moves.begin(ORDERS[0][0])
    mover.begun[0][1](MoveEnd(3, 0, failure=RuntimeError("the device is gone")))
    with pytest.raises(RuntimeError, match="the device is gone"):
        mover.facts[0](50)
    assert moves.open == 0


def test_what_a_host_cannot_move_is_an_error_of_the_contract() -> None:
    with pytest.raises(ContractError, match="ordered CopyToHost, which this host does not support"):
        CacheMoves(None, lambda fact: None).begin(ORDERS[0][0])


def test_moves_and_the_tokens_that_they_brought_are_counted() -> None:
    moves, step = CacheMoves(None, lambda fact: None), Step()
    step.decided += [
        TierOperationEnded(1, 0, cast(Any, "load"), cast(Any, "complete"), 3),
        TierOperationEnded(1, 1, cast(Any, "load"), cast(Any, "complete"), 2),
        TierOperationEnded(1, 2, cast(Any, "write"), cast(Any, "failed"), 0),
        RequestAdmitted(1, 5, 0, 40, 8, 0, host_tokens=32, storage_tokens=16),
        RequestAdmitted(1, 6, 1, 8, 8, 0, host_tokens=8, storage_tokens=0),
        RequestAdmitted(1, 7, 2, 8, 8, 0),
    ]
    moves.counts.fold(step)
    moves.counts.fold(Step())
    assert moves.counts.moves == {("load", "complete"): 2, ("write", "failed"): 1}
    assert moves.counts.pages == {"load": 5, "write": 0}
    assert (moves.counts.host_tokens, moves.counts.storage_tokens) == (40, 16)


def test_storage_has_the_source_of_an_adapter_in_its_keys() -> None:
    def namespace(adapter: str, sources: dict[str, dict[int, str]]) -> str:
        event = RequestArrived(
            1, request_id=0, prompt=TokenIds(b""), max_new_tokens=1, adapter=adapter, namespace="salt"
        )
        return name_adapter(event, AdaptersLog(sources)).namespace

    assert namespace("", {"": {1: "x"}}) == "salt"
    assert namespace("law", {}) == "salt"
    assert namespace("law", {"law": {}}) == "salt"
    first, newer = namespace("law", {"law": {1: "x"}}), namespace("law", {"law": {1: "x", 2: "y"}})
    assert len({first, newer, "salt"}) == 3
    assert namespace("law", {"law": {2: "y", 1: "z"}, "art": {3: "x"}}) == newer
    assert first.startswith("salt adapter ")


class Counters:
    """Counters of a device: they are ready once they were begun."""

    def __init__(self) -> None:
        self.begun = False

    def begin(self) -> None:
        self.begun = True

    def ready(self) -> bool:
        return self.begun

    def read(self) -> Any:
        return np.array([[1, 2, 3], [4, 5, 1 << 40]], np.int64)


def test_a_measurement_is_due_from_its_order_to_its_event() -> None:
    measuring = ExpertMeasuring(Counters())
    assert (measuring.due, measuring.ready) == (False, False)
    measuring.meter.begin()  # type: ignore[union-attr]  # there is one
    assert not measuring.ready
    measuring.begin()
    assert (measuring.due, measuring.ready) == (True, True)
    counts = np.array([[1, 2, 3], [4, 5, 1 << 40]], "<i8").tobytes()
    assert measuring.event(9) == ExpertLoadMeasured(9, 2, counts)
    assert (measuring.due, measuring.ready) == (False, False)
    assert not ExpertMeasuring(None).ready
