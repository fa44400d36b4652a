"""The inbox of a host: a wait ends in time, also after items were taken without waiting."""

import threading
from queue import Empty

import pytest

from lockstep.host.inbox import Inbox

ROUNDS = 20_000


def test_waiting_for_microseconds_ends() -> None:
    """CPython's SimpleQueue may wait without end here: a server once stopped because of it."""
    inbox: Inbox[int] = Inbox()
    over = threading.Event()

    def take() -> None:
        for number in range(ROUNDS):
            inbox.put(number)
            assert inbox.get_nowait() == number  # leaves the event set
            with pytest.raises(Empty):
                inbox.get(1e-6)
        over.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert over.wait(300), "it waits for ever"


def test_nothing_is_lost_between_threads() -> None:
    inbox: Inbox[int] = Inbox()
    found: list[int] = []

    def take() -> None:
        while len(found) < ROUNDS:
            try:
                found.append(inbox.get(0.5))
            except Empty:
                continue

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for number in range(ROUNDS):
        inbox.put(number)
    thread.join(300)
    assert found == list(range(ROUNDS))


def test_an_item_wakes_the_waiting_thread() -> None:
    inbox: Inbox[str] = Inbox()
    threading.Timer(0.05, inbox.put, ["here"]).start()
    assert inbox.get(300) == "here"
    threading.Timer(0.05, inbox.put, ["and again"]).start()
    assert inbox.wait() == "and again"
    with pytest.raises(Empty):
        inbox.get(0)
    assert inbox.empty()
    assert inbox.qsize() == 0
