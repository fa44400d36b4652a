"""Prefill and decode engines of data-parallel ranks, random histories with faults, and planted bugs that they find.

Every engine's invariants are checked after every event (`tests/support/fleet/`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, InvariantError
from lockstep.core.contract.events import (
    LaneReady,
)
from lockstep.core.features import disaggregation
from lockstep.core.kv.memory import Memory
from tests.support.fleet.histories import run_history
from tests.support.handover import asked, fleet, hear, offer, ranks, state, to_receiving


def test_ranks_hand_requests_over_to_ranks() -> None:
    """Each prefill rank sends to the decode rank to which a request was routed; all ranks of an engine run a pass."""
    made = ranks(chunked_prefill_size=4)
    requests = [asked(key, prompt=3 + 2 * key, max_new=3 + key) for key in range(6)]
    for key, one in enumerate(requests):
        made.arrive(one, f"p{key % 2}", f"d{key // 2 % 2}")
    made.settle()
    assert made.answers == {one.key: one.answer for one in requests}
    assert made.marks["d ran prebuilt in a pass of all"]
    made.replay()


def test_part_follows_its_batch_which_follows_the_agreement() -> None:
    """KV of a batch that is only proposed is not sent, nor that of a request that left between proposal and launch."""
    made = ranks()
    stays, leaves = made.arrive(asked(0), "p0", "d0"), made.arrive(asked(1), "p1", "d1")
    hear(made, "accepted", "p0")
    hear(made, "accepted", "p1")
    made.ready("p0")
    made.ready("p1")
    assert not stays.parts
    made.cancel(leaves, "p1")
    assert offer(made, "p") == ["extend", "extend"]
    assert [part.command.last for part in stays.parts] == [True]
    assert not leaves.parts
    made.settle()
    assert made.answers[0] == asked(0).answer


def test_rows_whose_kv_came_decode_with_the_others() -> None:
    """A decode rank whose request joins runs no extend: no other rank has to, and a graph can run."""
    made = ranks(overlap_depth=0)
    made.arrive(asked(0, max_new=20), "p0", "d0")
    made.settle_until(lambda: made.members["d0"].engine.running_batch.size == 1)
    while made.hear("d1") or made.finish("d0") or made.finish("d1"):
        pass
    made.arrive(asked(1), "p1", "d1")
    made.settle_until(lambda: bool(made.members["d1"].engine.transfers.ready))  # type: ignore[union-attr]
    while made.hear("d0") or made.hear("d1") or made.finish("d0") or made.finish("d1"):
        pass
    assert offer(made, "d") == ["decode", "prebuilt"]
    agreed = made.exchanges["d0"].launched["d0"][-1]
    assert (agreed.tokens, agreed.extends, agreed.use_graph) == ((1, 1), False, True)
    made.settle()
    assert made.answers[1] == asked(1).answer
    made.replay()


@pytest.mark.parametrize("moment", ["before the pass", "proposed", "in flight"])
@pytest.mark.parametrize("first", ["p0", "p1"])
def test_f6_failed_on_one_rank(first: str, moment: str) -> None:
    """SG#27028: transfers of two ranks fail; one rank polls at once and removes its request, the other polls late.

    Each rank has the requests that were routed to it, so none is removed before its own rank was informed; passes of
    both continue in between. Both ends of both are informed once, and no request is left.
    """
    made = ranks(transfer_slots=2)
    other = "p1" if first == "p0" else "p0"
    for key, rank in enumerate(("p0", "p1")):
        made.arrive(asked(key, prompt=6), rank, f"d{key}")
        hear(made, "accepted", rank)
    if moment == "proposed":
        made.ready(first)
    elif moment == "in flight":
        assert offer(made, "p") == ["extend", "extend"]
    for decode in ("d0", "d1"):
        made.link_down("p0", decode)
        made.link_down("p1", decode)
    hear(made, "link_down", first)
    mine = made.wires[first == "p1"]
    theirs = made.wires[first != "p1"]
    assert mine.ids[first] not in made.members[first].engine.requests
    assert theirs.ids[other] in made.members[other].engine.requests
    made.ready(first)
    made.ready(other)
    while made.hear(first) or made.hear(other) or made.finish(first) or made.finish(other):
        pass
    hear(made, "link_down", other)
    made.settle()
    assert [made.answers[key].reason for key in (0, 1)] == ["transfer"] * 2
    for member in made.members.values():
        assert not member.engine.requests
        assert member.engine.transfers.hands_over
        assert sorted(member.engine.transfers.free_slots) == [0, 1]
    made.replay()


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_f6_failed_while_both_stages_have_a_batch(heard: int) -> None:
    """SG#27028 with its two stages: one core decides for both, so a request that failed is gone from both at once."""
    made = fleet(pp_size=2, overlap_depth=0, chunked_prefill_size=4, transfer_slots=2)
    for key in (0, 1):
        made.arrive(asked(key, prompt=8))
        hear(made, "accepted", "p0")
    while made.ready("p0"):
        pass
    assert len({batch.plan.microbatch for batch in made.members["p0"].engine.in_flight}) == 2
    for _ in range(heard):
        made.finish("p0")
    made.drop(made.wires[0])
    hear(made, "link_down", "p0")
    assert made.answers.keys() == set()
    hear(made, "link_down", "d0")
    assert made.answers[0].reason == "transfer"
    made.settle()
    assert made.answers[1] == asked(1).answer
    for member in made.members.values():
        assert not member.engine.requests
        assert member.engine.transfers.hands_over
        assert sorted(member.engine.transfers.free_slots) == [0, 1]
    made.replay()


@pytest.mark.parametrize(("name", "value"), [("prefill_delayer", True), ("prefill_full_skip_passes", 2)])
def test_ranks_of_a_role_delay_nothing(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is {value}, but `role` is decode"):
        SchedConfig(dp_ranks=2, role="decode", **{name: value})


@pytest.mark.parametrize("first", [0, 5])
def test_random_histories_with_faults(first: int) -> None:
    for seed in range(first, first + 5):
        run_history(seed, 250).replay()


@pytest.mark.parametrize("seed", [2, 11, 26])
def test_random_histories_of_ranks_with_faults(seed: int) -> None:
    """A prefill and a decode engine of two data-parallel ranks each; a rank that restarts restarts the others too."""
    run_history(seed, 250, ranks=True).replay()


@pytest.mark.parametrize(
    ("seed", "steps", "drawn"),
    [
        (137, 300, {"plain": True}),  # reserve full: a decode engine allocated pages that were promised to others
        (30055, 400, {"plain": True}),  # likewise one that computes a prompt, beside KV that is being received
        (20086, 400, {"plain": True}),  # a transfer ends while weights change, its prompt written to the host
        (20097, 400, {"plain": True}),  # pages that a write to the host locks are no leak
        (564034194097, 400, {}),  # a restart ends transfers, whose prompts are copied to a host that is gone
        (371404835514, 400, {}),  # the last of a microbatch frees its pages for another one: none was found
        (87027686535, 400, {}),  # received KV waits for the decode of another microbatch, which is owed pages
        (366, 400, {}),  # a prompt in chunks lacks pages of a transfer, which lacks the row of the prompt
        (378200467573, 400, {"hybrid": True}),  # a session was rewound into an image
        (359252196661, 400, {"hybrid": True}),  # the end of a page behind a received state was passed by drafts
        (487667364333, 400, {"hybrid": True}),  # received KV was given up for new weights before its first decode
    ],
)
def test_history_that_found_something(seed: int, steps: int, drawn: dict[str, bool]) -> None:
    run_history(seed, steps, **drawn)


def test_decode_steps_launched_uniformly_are_the_same() -> None:
    """A stretch of decodes taken in one go stops where a transfer needs a decision."""
    from lockstep.core.scheduler.decode_run import DecodeRun

    made = fleet(restores=False, bootstrap_timeout_us=None, transfer_timeout_us=None, pages=64)
    made.arrive(asked(0, max_new=20))
    made.settle_until(lambda: len(made.sent[0]) >= 3)
    engine = made.members["d0"].engine
    while len(engine.in_flight) <= engine.config.overlap_depth:
        made.fold(made.members["d0"], LaneReady(made.now_us))
    assert DecodeRun.begin(engine) is not None
    made.arrive(asked(1, prompt=10, max_new=99))
    made.arrive(asked(2, prompt=10, max_new=99))
    made.arrive(asked(3, prompt=10, max_new=99))
    assert state(made, "d0", 3) == "preallocating"
    assert DecodeRun.begin(engine) is None
    assert np.any(engine.positions)


# --------------------------------------------------------------------------------------------------------- planted bugs


def _quarantine_of_the_decode_side_ends_with_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(disaggregation.RECEIVER, ("receiving", "abandoned"), "over")


def _quarantine_of_the_prefill_side_ends_with_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(disaggregation.SENDER, ("in_flight", "abandoned"), "over")


def _rows_that_are_read_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "lend", lambda *_: None)


def _no_page_for_the_first_decode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disaggregation.Transfers, "_first_stop", staticmethod(lambda request: request.prompt_tokens))


def _slots_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disaggregation.Transfers, "_free_slot", lambda *_: None)


PLANTED = {
    _quarantine_of_the_decode_side_ends_with_the_request: "d0",
    _quarantine_of_the_prefill_side_ends_with_the_request: "p0",
    _rows_that_are_read_are_not_pinned: "p0",
    _no_page_for_the_first_decode: "d0",
    _slots_are_lost: "d0",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that is cancelled during its transfer, with a late writer, shows each of them."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantError), match=r"S31|L6|S1"):
        _cancelled_on_its_way(PLANTED[plant])


def test_nothing_is_found_without_a_planted_bug() -> None:
    for name in ("p0", "d0"):
        _cancelled_on_its_way(name)


def _cancelled_on_its_way(name: str) -> None:
    made = fleet(restores=False)
    to_receiving(made, asked(0))
    made.cancel(made.wires[0], name)
    made.move(made.wires[0])
    made.settle()
