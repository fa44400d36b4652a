"""The prefill engine's side of a handover, message by message: slots, ends of rooms, and links that are lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockstep.core.contract.commands import BatchPlan, CancelTransfer, HybridTransfer, StartTransfer
from lockstep.core.contract.events import RequestArrived, TokenIds, TransferAdvanced
from lockstep.host.batches import BatchResult
from lockstep.host.handover.kv import PagesStaged
from lockstep.host.handover.prefill import PrefillSide
from lockstep.host.handover.wire import (
    PROTOCOL,
    Accept,
    BlockLayout,
    LinkError,
    LinkMessage,
    Offered,
    Outcome,
    PageLayout,
    PagesRead,
    PagesReady,
    PeerHello,
    Prefill,
    PromptDone,
    StagingPlace,
    Stop,
    encode,
)
from lockstep.host.media.content import EncoderInput, content_of

LAYOUT = PageLayout("small", 2, 16)
WITH_POOLS = PageLayout("small", 2, 16, beside=(BlockLayout("window", 16), *(BlockLayout("state", 16),) * 2))
SLOTS = 2


class NotedSender:
    """Staging memory for one decode engine with two slots of two pages. The test ends each copy."""

    places = (StagingPlace("memory", "here", SLOTS, 32),)
    pages_per_slot = 2
    beside_per_slot = (2, 1, 1)

    def __init__(self) -> None:
        self.copies: list[tuple[int, list[int], Callable[[Any], None]]] = []
        self.closed = 0

    def stage(self, slot: int, pages: Any, done: Callable[[Any], None], block: int = 0) -> None:
        self.copies.append((slot, pages.tolist(), done))

    def close(self) -> None:
        self.closed += 1


class PrefillBench:
    """A prefill side with the messages that it sends and the facts that its host receives."""

    def __init__(self, layout: PageLayout = LAYOUT) -> None:
        self.senders: list[NotedSender] = []
        self.facts: list[TransferAdvanced] = []
        self.cancelled: list[int] = []
        self.over: list[int] = []
        self.submitted = 0
        self.contents: list[tuple[EncoderInput, ...]] = []  # of media, by request
        kv = SimpleNamespace(layout=layout, sender=self._sender)
        self.side = PrefillSide(cast(Any, kv))
        host = SimpleNamespace(
            put_fact=lambda make: self.facts.append(make(7)),
            submit=self._submit,
            cancel=self.cancelled.append,
            extras_of=lambda request_id: None,
        )
        self.side.attach(cast(Any, host))
        self.side.ended = self.over.append

    def _sender(self, peer: str) -> NotedSender:
        self.senders.append(NotedSender())
        return self.senders[-1]

    def _submit(self, event: RequestArrived, *sinks: Any, contents: tuple[EncoderInput, ...]) -> int:
        self.submitted += 1
        self.contents.append(contents)
        return self.submitted - 1

    def link(self, number: int) -> Any:
        """Return a link to a decode engine, with its messages in `sent`, and whether it was closed."""
        sent: list[LinkMessage] = []
        link = SimpleNamespace(sent=sent, send=sent.append, closed=False)
        link.close = partial(setattr, link, "closed", True)
        self.hear(link, PeerHello(PROTOCOL, number, LAYOUT))
        del sent[:]
        return link

    def hear(self, link: Any, message: LinkMessage) -> None:
        self.side._received(link, encode(message))

    def prefill(self, link: Any, room: int, contents: tuple[EncoderInput, ...] = ()) -> None:
        """A request with six prompt tokens arrives over a link."""
        prompt = TokenIds(bytes(4 * 6))
        event = RequestArrived(0, request_id=-1, prompt=prompt, max_new_tokens=1, transfer_room=room)
        self.hear(link, Prefill(event, contents))

    def start(
        self,
        request: int,
        room: int,
        batch: int,
        pages: list[int],
        first: int,
        last: bool,
        hybrid: HybridTransfer | None = None,
    ) -> None:
        """The core starts the part of a transfer behind a batch."""
        about: dict[str, Any] = {"stop_tokens": first + 2 * len(pages), "hybrid": hybrid}
        self.side.perform(
            StartTransfer(request, room, "", "send", np.array(pages, np.int32), first, batch, last, **about)
        )

    def accepted(self, link: Any, adapter_version: int = 0) -> None:
        """Request 0 arrives for room 5, batch 0 starts its only part, page 10, and the decode engine accepts it."""
        self.prefill(link, 5)
        self.start(0, 5, 0, [10], 0, last=True)
        self.hear(link, Accept(5, 0, adapter_version))

    def collect(self, batch: int, request: int, error: str = "") -> None:
        """A batch that samples token 41 of a request has its result."""
        row = np.zeros(1, np.int32)
        ids = np.array([request], np.int64)
        plan = BatchPlan(
            batch_id=batch, mode="extend", rows=row, request_ids=ids, starts=row, stops=row + 6, sample_rows=row
        )
        self.side.collected(BatchResult(plan, error, np.array([41], np.int32)))

    @property
    def statuses(self) -> list[tuple[int, str]]:
        return [(fact.transfer_id, fact.status) for fact in self.facts]


def test_windows_and_the_state_follow_the_pages_of_their_part() -> None:
    """The decode engine has the first page. A window of a page that it has is not sent."""
    bench = PrefillBench(WITH_POOLS)
    link = bench.link(1)
    bench.prefill(link, 5)
    windows = np.array([3, 4], np.int32)
    bench.start(0, 5, 0, [10, 11], 0, last=False, hybrid=HybridTransfer(windows))
    bench.start(0, 5, 1, [12], 4, last=True, hybrid=HybridTransfer(windows[:1], 7))
    bench.hear(link, Accept(5, 2, 0))
    bench.collect(0, 0)
    bench.collect(1, 0)
    copies, sent = bench.senders[0].copies, list[tuple[list[int], int, int]]()
    while copies:  # two slots at a time, which the decode engine reads at once
        slot, blocks, done = copies.pop(0)
        done(PagesStaged())
        ready = next(one for one in reversed(link.sent) if isinstance(one, PagesReady))
        assert (ready.slot, ready.pages) == (slot, len(blocks))
        sent.append((blocks, ready.block, ready.first_page))
        bench.hear(link, PagesRead(slot))
    assert sent == [([11], 0, 1), ([4], 1, 1), ([12], 0, 2), ([3], 1, 2), ([7], 2, 0), ([7], 3, 0)]
    assert isinstance(link.sent[-1], PromptDone)


def test_contents_of_media_go_to_the_host_with_their_request() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    picture = content_of([7, 7], {"pixel_values": np.ones((4, 3)), "image_grid_thw": [[1, 2, 2]]})
    bench.prefill(link, 5, (picture,))
    bench.prefill(link, 6)
    assert bench.contents == [(picture,), ()]


def test_parts_go_through_slots_in_order_and_the_first_token_behind_them() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    bench.prefill(link, 5)
    bench.start(0, 5, 0, [10, 11], 0, last=False)
    bench.start(0, 5, 1, [12], 4, last=True)
    assert link.sent == [Offered(5)]
    bench.hear(link, Accept(5, 2, 0))  # the decode engine has the first page
    assert [(one.status, one.start_tokens, one.source) for one in bench.facts] == [("accepted", 2, "engine1")]
    bench.collect(0, 0)
    bench.collect(1, 0)
    (first_slot, first, first_done), (second_slot, second, second_done) = bench.senders[0].copies
    assert (first, second) == ([11], [12])
    assert {first_slot, second_slot} == {0, 1}
    first_done(PagesStaged())
    assert link.sent[1:] == [PagesReady(5, first_slot, 1, 1)]
    second_done(PagesStaged())
    assert link.sent[2:] == [PagesReady(5, second_slot, 2, 1), PromptDone(5, 41, 0, 0)]
    bench.hear(link, PagesRead(first_slot))
    bench.hear(link, Outcome(5, "done"))
    assert bench.statuses[1:] == [(0, "done")]
    assert bench.over == [5]
    assert not bench.side.busy
    assert sorted(bench.side._peers[0].free) == [0, 1]


def test_pages_beyond_the_slots_wait_for_one_that_was_read() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    bench.prefill(link, 5)
    bench.start(0, 5, 0, [10, 11, 12, 13, 14], 0, last=True)
    bench.hear(link, Accept(5, 0, 0))
    bench.collect(0, 0)
    sender = bench.senders[0]
    assert [pages for _, pages, _ in sender.copies] == [[10, 11], [12, 13]]
    for _, _, done in sender.copies[:2]:
        done(PagesStaged())
    assert len(sender.copies) == 2
    bench.hear(link, PagesRead(sender.copies[0][0]))
    assert sender.copies[2][:2] == (sender.copies[0][0], [14])
    assert not any(isinstance(one, PromptDone) for one in link.sent)
    sender.copies[2][2](PagesStaged())
    assert isinstance(link.sent[-1], PromptDone)


def test_a_cancelled_room_sends_nothing_more_and_ends_with_its_outcome() -> None:
    """The cancel comes before the result of the batch, and before the decode engine has accepted."""
    bench = PrefillBench()
    link = bench.link(1)
    bench.prefill(link, 5)
    bench.start(0, 5, 0, [10], 0, last=True)
    bench.side.perform(CancelTransfer(0))
    bench.hear(link, Accept(5, 0, 0))
    bench.collect(0, 0)
    assert link.sent == [Offered(5), Stop(5)]
    assert not bench.facts
    assert bench.side.busy
    bench.hear(link, Outcome(5, "failed"))
    bench.hear(link, Outcome(5, "done"))
    bench.side.perform(CancelTransfer(0))
    assert bench.statuses == [(0, "failed")]
    assert link.sent == [Offered(5), Stop(5)]
    assert not bench.senders[0].copies


def test_a_copy_of_a_stopped_room_gives_its_slot_back() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    bench.accepted(link)
    bench.collect(0, 0)
    bench.hear(link, Outcome(5, "failed"))
    assert not bench.facts[1:]  # a copy reads its pages
    bench.senders[0].copies[0][2](PagesStaged())
    assert bench.statuses[1:] == [(0, "failed")]
    assert link.sent == [Offered(5)]
    assert sorted(bench.side._peers[0].free) == [0, 1]


def test_a_batch_that_failed_releases_nothing() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    bench.accepted(link)
    bench.collect(0, 0, error="the model failed")
    assert link.sent == [Offered(5)]
    assert not bench.senders[0].copies


def test_other_versions_of_an_adapter_stop_the_transfer() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    bench.accepted(link, adapter_version=3)
    bench.collect(0, 0)
    assert link.sent[1:] == [Stop(5, "the engines have different versions of the adapter")]


def test_a_room_that_is_in_use_is_refused() -> None:
    bench = PrefillBench()
    link = bench.link(1)
    bench.prefill(link, 5)
    bench.prefill(link, 5)
    assert link.sent == [Stop(5, "room 5 is in use")]
    assert bench.submitted == 1


def test_a_lost_link_ends_its_rooms_and_frees_staging_memory_behind_the_last_copy() -> None:
    bench = PrefillBench()
    link, other = bench.link(1), bench.link(2)
    bench.prefill(link, 5)
    bench.prefill(other, 6)
    bench.prefill(link, 7)
    bench.start(0, 5, 0, [10], 0, last=True)
    bench.hear(link, Accept(5, 0, 0))
    bench.collect(0, 0)
    bench.side._lost(link, "the connection was closed")
    assert bench.cancelled == [0, 2]
    assert bench.statuses[1:] == [(2, "link_down")]
    assert [one.closed for one in bench.senders] == [0, 0]
    bench.senders[0].copies[0][2](PagesStaged())
    assert bench.statuses[1:] == [(2, "link_down"), (0, "link_down")]
    assert [one.closed for one in bench.senders] == [1, 0]
    bench.side._lost(link, "again")
    assert [one.closed for one in bench.senders] == [1, 0]
    with pytest.raises(LinkError, match="Outcome came before PeerHello"):
        bench.hear(link, Outcome(5, "done"))
    bench.hear(other, Outcome(6, "failed"))
    assert bench.statuses[-1] == (1, "failed")


def test_a_new_process_of_a_decode_engine_takes_the_place_of_the_earlier_one_only() -> None:
    bench = PrefillBench()
    first, other = bench.link(1), bench.link(2)
    bench.prefill(first, 5)
    second = bench.link(1)
    assert (first.closed, other.closed, second.closed) == (True, False, False)
    assert [one.closed for one in bench.senders] == [1, 0, 0]
    assert bench.statuses == [(0, "link_down")]
    bench.prefill(second, 5)
    bench.prefill(other, 6)
    assert bench.submitted == 3
