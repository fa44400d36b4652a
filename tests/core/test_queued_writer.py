"""A queue in front of a file: items are written in their order, and writing ends with one report."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lockstep.core.journal.records import JournalError
from lockstep.host import queued_writer
from lockstep.host.queued_writer import QueuedWriter

LIMIT_S = 120.0  # only ends a hang


class NotedCalls:
    """A target that keeps its calls in order. `fail` is called in `write`, `flushed` is set by `flush`."""

    def __init__(self, fail: Callable[[], None] = lambda: None) -> None:
        self.calls: list[object] = []
        self.fail = fail
        self.flushed = threading.Event()

    def write(self, item: int) -> None:
        self.fail()
        self.calls.append(item)

    def flush(self) -> None:
        self.calls.append("flush")
        self.flushed.set()

    def close(self, failure: str) -> None:
        self.calls.append(f"close: {failure}")


def writer_of(target: NotedCalls, failed: list[str], items_max: int = 100) -> QueuedWriter[int]:
    return QueuedWriter("writer", target, items_max, failed.append, items="numbers")


def test_items_are_written_in_order_and_buffered_for_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_writer, "FLUSH_EVERY_S", LIMIT_S)
    target, failed = NotedCalls(), list[str]()
    writer = writer_of(target, failed)
    for number in range(50):
        writer.append(number)
    writer.close()
    assert target.calls == [*range(50), "close: "]
    assert not failed
    assert not writer.failure
    writer.close()
    assert target.calls[-1] == "close: "


def test_buffered_items_are_flushed_once_at_the_end_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_writer, "FLUSH_EVERY_S", 0.01)
    target = NotedCalls()
    writer = writer_of(target, [])
    for number in range(3):
        writer.append(number)
        assert target.flushed.wait(LIMIT_S)
        target.flushed.clear()
    writer.close()
    assert target.calls == [0, "flush", 1, "flush", 2, "flush", "close: "]


def test_a_full_queue_ends_writing_with_one_report() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert goes_on.wait(LIMIT_S)

    target, failed = NotedCalls(wait), list[str]()
    writer = writer_of(target, failed, items_max=2)
    writer.append(0)
    assert begun.wait(LIMIT_S)  # the queue is empty, and the thread is held
    writer.append(1)
    writer.append(2)
    assert not failed
    writer.close(0.0)  # no room for the end, and no time to wait for it
    for number in (3, 4):
        writer.append(number)
    assert failed == ["2 numbers wait to be written"]
    assert writer.failure == failed[0]
    goes_on.set()
    writer.close()
    assert [call for call in target.calls if call != "flush"] == [0, 1, 2, "close: "]


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (OSError("the disk is full"), "the disk is full"),
        (JournalError("a segment is missing"), "a segment is missing"),
        (ValueError("x"), "ValueError: x"),
    ],
)
def test_an_error_of_the_target_ends_writing_and_closes_it(error: Exception, report: str) -> None:
    def fail() -> None:
        raise error

    target, failed, closed = NotedCalls(fail), list[str](), threading.Event()

    def close(failure: str) -> None:
        target.calls.append(f"close: {failure}")
        closed.set()
        raise error

    target.close = close  # type: ignore[method-assign]
    writer = writer_of(target, failed)
    writer.append(0)
    assert closed.wait(LIMIT_S)
    writer.append(1)
    writer.close()
    assert failed == [report]
    assert target.calls == [f"close: {report}"]
