"""The exchange of proposals between data-parallel ranks: over real sockets, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from lockstep.core.contract.commands import BatchPlan, LaunchBatch, ProposeBatch, Step
from lockstep.core.contract.events import (
    LaneReady,
    ObservedEvent,
    PrefillNegotiated,
    RanksAgreed,
    RequestCancelled,
    Wish,
)
from lockstep.host.errors import PeerRankLost, killed_from_outside
from lockstep.host.handover.wire import LinkError, LinkMessage
from lockstep.host.rank_agreement import AllProposed, ProposalWanted, RankAgreement, RankHub, RankJoins, RankProposes
from tests.support.live_server import until


class Host:
    """Collects the facts that a rank sends to its host."""

    def __init__(self) -> None:
        self.facts: list[ObservedEvent] = []
        self.errors: list[BaseException] = []
        self.woken = threading.Event()

    def put_fact(self, make: Callable[[int], ObservedEvent]) -> None:
        try:
            self.facts.append(make(7))
        except PeerRankLost as error:
            self.errors.append(error)

    def wake(self) -> None:
        self.woken.set()


@contextmanager
def ranks_of(folder: Path, count: int) -> Iterator[tuple[list[RankAgreement], list[Host], RankHub]]:
    address = f"unix:{folder / 'ranks'}"
    hub = RankHub(address, count, lambda: "meet here")
    with ThreadPoolExecutor(count) as pool:
        ranks = list(pool.map(lambda rank: RankAgreement(address, rank, count, 60.0), range(count)))
    hosts = [Host() for _ in ranks]
    for rank, host in zip(ranks, hosts, strict=True):
        rank.attach(host, lambda: 3)
    yield ranks, hosts, hub
    for rank in ranks:
        rank.close(leaving=True)
    hub.close()


def test_all_ranks_receive_all_proposals_in_their_order(tmp_path: Path) -> None:
    wish = Wish(wants=True, full=False, starved=False, running=2, in_flight=1, time_us=5)
    with ranks_of(tmp_path, 3) as (ranks, hosts, _):
        assert {one.store for one in ranks} == {"meet here"}
        for number in (2, 0, 1):
            ranks[number].propose(ProposeBatch(4, (number, 1, 0, 1), wish))
            assert ranks[number].pending
        until(lambda: all(host.facts for host in hosts), 60)
        counts = tuple((number, 1, 0, 1) for number in range(3))
        assert {host.facts[0] for host in hosts} == {RanksAgreed(7, 4, counts, (wish,) * 3, 3)}


def test_the_first_proposal_asks_the_other_ranks_for_theirs(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2) as (ranks, hosts, _):
        ranks[1].propose(ProposeBatch(0, (1, 1, 0, 1)))
        assert hosts[0].woken.wait(60)
        assert ranks[0].take_wanted()
        assert not ranks[0].take_wanted(), "a slot is offered once"
        assert not hosts[1].woken.is_set()
        ranks[0].propose(ProposeBatch(0, (0, 0, 0, 1)))
        until(lambda: bool(hosts[1].facts), 60)


def test_after_an_empty_round_a_slot_is_offered_only_if_something_has_happened(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 1) as ((rank,), _, _):
        proposed, nothing = Step(), Step()
        proposed.commands.append(ProposeBatch(0, (0, 0, 0, 1)))
        agreed = RanksAgreed(1, 0, ((0, 0, 0, 1),))
        assert not rank.fold(LaneReady(0), proposed)
        assert rank.fold(agreed, nothing)
        assert not rank.fold(LaneReady(0), proposed)
        assert not rank.fold(RequestCancelled(1, 5), nothing)
        assert not rank.fold(agreed, nothing), "the request came behind the proposal"
        launched = Step()
        launched.commands.append(LaunchBatch(_plan()))
        rank.fold(LaneReady(0), proposed)
        assert not rank.fold(agreed, launched)


def test_a_slot_is_offered_while_prompts_wait_for_those_of_other_ranks(tmp_path: Path) -> None:
    """The wait is counted in rounds: without further rounds it would never end."""
    with ranks_of(tmp_path, 1) as ((rank,), _, _):
        waits, nothing = Step(), Step()
        waits.decided.append(PrefillNegotiated(1, 0, "mixed", False, 2, 1, 0))
        waits.commands.append(ProposeBatch(1, (0, 0, 0, 1)))
        assert not rank.fold(RanksAgreed(1, 0, ((0, 0, 0, 1),)), waits)
        assert not rank.fold(RanksAgreed(1, 1, ((0, 0, 0, 1),)), nothing), "the prompts wait for the next round"
        assert rank.fold(RanksAgreed(1, 2, ((0, 0, 0, 1),)), nothing)


def test_a_rank_that_ends_ends_the_others_and_one_that_leaves_does_not(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3) as (ranks, hosts, _):
        ranks[2].close(leaving=True)
        until(ranks[1].ended.is_set, 60)
        assert ranks[1].reason == ""
        assert not hosts[1].errors
    with ranks_of(tmp_path, 3) as (ranks, hosts, _):
        ranks[2].close(leaving=False)
        until(lambda: bool(hosts[0].errors and hosts[1].errors), 60)
        assert "rank 2 of 3 ended" in str(hosts[1].errors[0])
        assert killed_from_outside(hosts[1].errors[0])
        assert not hosts[2].errors


def test_the_end_of_the_hub_ends_all_ranks(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2) as (ranks, hosts, hub):
        hub.close()
        until(lambda: all(one.ended.is_set() for one in ranks), 60)
        assert "rank 0 of 2 ended" in str(hosts[1].errors[0])


def test_a_hub_that_is_stopped_with_its_engine_ends_no_rank_with_an_error(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3) as (ranks, hosts, hub):
        hub.close(leaving=True)
        until(lambda: all(one.ended.is_set() for one in ranks), 60)
        assert {one.reason for one in ranks} == {""}
        assert not any(host.errors for host in hosts)


@pytest.mark.parametrize(
    ("rank", "ranks", "reason"),
    [
        (0, 3, "rank 0 of 3 joins an engine of 2 ranks"),
        (2, 2, "rank 2 of 2 joins an engine of 2 ranks"),
        (-1, 2, "rank -1 of 2 joins an engine of 2 ranks"),
    ],
)
def test_a_rank_of_another_engine_is_refused(rank: int, ranks: int, reason: str, tmp_path: Path) -> None:
    assert _ended_by(tmp_path, 2, RankJoins(rank, ranks)) == reason


def test_a_proposal_before_all_have_joined_is_refused(tmp_path: Path) -> None:
    proposal = RankProposes(0, (0, 0, 0, 1))
    assert _ended_by(tmp_path, 2, RankJoins(0, 2), proposal) == "a rank proposes that has not joined"


def _ended_by(folder: Path, ranks: int, *messages: LinkMessage) -> str:
    """Return the error with which a hub ends a link over which these messages arrive."""
    hub = RankHub(f"unix:{folder / 'ranks'}", ranks, lambda: "meet here")
    received, link = hub._received, cast(Any, SimpleNamespace(close=lambda: None, send=lambda message: None))
    *before, last = [msgspec.msgpack.encode(message) for message in messages]
    for frame in before:
        received(link, frame)
    with pytest.raises(LinkError) as caught:
        received(link, last)
    hub.close()
    return str(caught.value)


def test_a_hub_that_is_closed_reports_no_further_loss(tmp_path: Path) -> None:
    hub = RankHub(f"unix:{tmp_path / 'ranks'}", 2, lambda: "meet here")
    sent: list[list[LinkMessage]] = [[], []]
    links = [cast(Any, SimpleNamespace(close=lambda: None, send=one.append)) for one in sent]
    for rank in (0, 1):
        hub._received(links[rank], msgspec.msgpack.encode(RankJoins(rank, 2)))
    hub.close()
    hub._lost(links[1], "the connection was closed")
    assert [len(one) for one in sent] == [1, 1]  # RanksBegin


def test_ranks_are_in_step(tmp_path: Path) -> None:
    """All proposals of a round are of that round, and only ranks that have joined may propose."""
    hub = RankHub(f"unix:{tmp_path / 'ranks'}", 2, lambda: "meet here")
    sent: list[list[LinkMessage]] = [[], [], []]
    links = [cast(Any, SimpleNamespace(close=lambda: None, send=one.append)) for one in sent]
    for rank in (0, 1):
        hub._received(links[rank], msgspec.msgpack.encode(RankJoins(rank, 2)))
    assert [len(one) for one in sent] == [1, 1, 0]
    for link, message, reason in (
        (links[2], RankJoins(0, 2), "rank 0 joins, but all ranks have begun"),
        (links[2], RankProposes(0, (0,)), "a rank proposes that has not joined"),
    ):
        with pytest.raises(LinkError, match=reason):
            hub._received(link, msgspec.msgpack.encode(message))
    hub._received(links[1], msgspec.msgpack.encode(RankProposes(4, (1,))))
    with pytest.raises(LinkError, match="rank 0 proposes for round 5, and other ranks for 4"):
        hub._received(links[0], msgspec.msgpack.encode(RankProposes(5, (0,))))
    hub._received(links[0], msgspec.msgpack.encode(RankProposes(4, (0,))))
    assert sent[1][1:] == [AllProposed(4, ((0,), (1,)))]
    hub._received(links[0], msgspec.msgpack.encode(RankProposes(5, (0,))))
    assert sent[1][2:] == [ProposalWanted(5)]
    with pytest.raises(LinkError, match="an unreadable message of a rank"):
        hub._received(links[0], b"\xc1")
    hub.close()


def test_a_rank_that_leaves_before_all_have_joined_may_come_back(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'ranks'}"
    with pytest.raises(PeerRankLost, match=r"not all 2 ranks were there within 0\.3 s"):
        RankAgreement(address, 1, 2, 0.3)
    hub = RankHub(address, 2, lambda: "meet here")
    with pytest.raises(PeerRankLost):
        RankAgreement(address, 1, 2, 0.3)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: RankAgreement(address, rank, 2, 60.0), range(2)))
    for rank in ranks:
        rank.close(leaving=True)
    hub.close()


def _plan() -> BatchPlan:
    import numpy as np

    none = np.empty(0, np.int32)
    return BatchPlan(batch_id=0, mode="idle", rows=none, request_ids=np.empty(0, np.int64), starts=none, stops=none)
