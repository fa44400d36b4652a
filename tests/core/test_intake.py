"""When a host reads its socket, and when it holds requests back."""

from __future__ import annotations

import pytest

from lockstep.core.contract.commands import Mode
from lockstep.core.contract.errors import ConfigError
from lockstep.core.scheduler.intake import InputBlocker, ReceiveSkipper


def looks(interval: int, launched: list[Mode | None]) -> list[int]:
    """Passes in which the skipper reads the socket."""
    skipper = ReceiveSkipper(interval)
    return [i for i, mode in enumerate(launched) if skipper.due(mode)]


def test_an_interval_of_one_looks_every_time() -> None:
    assert looks(1, ["decode", "extend", None, "decode"]) == [0, 1, 2, 3]


def test_decodes_are_counted_up_to_the_interval() -> None:
    assert looks(3, ["decode"] * 9) == [2, 5, 8]


def test_an_extend_is_followed_by_a_look_and_the_count_starts_again() -> None:
    assert looks(3, ["decode", "extend", "decode", "decode", "decode"]) == [1, 4]


def test_modes_without_a_weight_of_their_own_look_at_once() -> None:
    assert looks(1000, ["verify", "mixed", "decode", "split_prefill"]) == [1, 3]


def test_an_idle_loop_still_looks() -> None:
    assert looks(5, [None] * 5) == [4]


def test_weights_can_be_given() -> None:
    skipper = ReceiveSkipper(10, weights={"decode": 5}, default_weight=1)
    assert [skipper.due(mode) for mode in ("decode", "extend", "decode", "extend")] == [False, False, True, False]


def test_an_interval_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="`receive_interval` must be at least 1, got `0`"):
        ReceiveSkipper(0)


def test_an_open_blocker_lets_everything_through() -> None:
    blocker = InputBlocker[str]()
    assert blocker.take("ab") == ["a", "b"]
    blocker.unblock()
    assert blocker.take("c") == ["c"]


def test_requests_held_while_blocked_leave_in_order_once_every_rank_opens() -> None:
    blocker = InputBlocker[str]()
    blocker.block()
    assert blocker.take("ab") == []
    assert blocker.ranks_agreed(True) == []  # this rank is still blocked
    blocker.unblock()
    assert blocker.take("c") == []
    assert blocker.ranks_agreed(False) == []
    assert blocker.ranks_agreed(True) == ["a", "b", "c"]
    assert blocker.take("d") == ["d"]


def test_a_block_while_it_opens_blocks_again() -> None:
    blocker = InputBlocker[str]()
    blocker.block()
    blocker.block()
    blocker.take("a")
    blocker.unblock()
    blocker.block()
    assert blocker.ranks_agreed(True) == []
    blocker.unblock()
    blocker.unblock()
    assert blocker.ranks_agreed(True) == ["a"]
