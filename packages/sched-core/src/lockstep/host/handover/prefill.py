"""The prefill engine's side: requests arrive from decode engines, and the KV of their prompts is sent part by part.

    decode engine ──Prefill──> submitted to the host, with a sink for its first token
                  ──Accept───> `accepted` for the core
    StartTransfer(send) ─────> a part, which waits for its batch, for `Accept`, and for free slots
    its batch is collected ──> pages are copied into slots of staging memory, and announced; windows and a state behind
                               them
    the last part ───────────> PromptDone behind its pages
                  ──Outcome──> `done` or `failed` for the core, once no copy reads pages of the room any more

The slots of a decode engine are its own, so one that reads nothing stops no other.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from lockstep.core.contract.commands import NO_ROWS, CancelTransfer, StartTransfer, Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchId, ObservedEvent, RequestArrived, RequestId, TransferAdvanced
from lockstep.core.contract.samples import sample_count
from lockstep.host.errors import EngineStopped
from lockstep.host.handover.kv import Int32s, KvSender, KvTransport, PagesStaged, blocks_of
from lockstep.host.handover.link import Listener, PeerLink
from lockstep.host.handover.results import PromptSink, packed
from lockstep.host.handover.wire import (
    PROTOCOL,
    Accept,
    LinkError,
    Offered,
    Outcome,
    PagesRead,
    PagesReady,
    PeerHello,
    PeerWelcome,
    Prefill,
    PromptDone,
    Stop,
    read_from_decode,
)
from lockstep.host.media.content import EncoderInput

if TYPE_CHECKING:
    from lockstep.host.batches import BatchResult
    from lockstep.host.loop import RuntimeHost

log = logging.getLogger("lockstep.host")

Status = Literal["accepted", "done", "failed", "link_down"]


@dataclass(slots=True)
class _Pages:
    """Pages to be copied into a slot; none: only the end of the prompt is announced behind the pages before.

    Windows of pages have the numbers of these pages; a state is page 0.
    """

    room: _SendingRoom
    first_page: int
    pages: Int32s
    ending: PromptDone | None = None  # sent behind these pages
    block: int = 0  # kind of the blocks, as `PagesReady` numbers them


@dataclass(slots=True)
class _SendingRoom:
    """One transfer. Guarded by the lock of its side."""

    number: int
    request_id: RequestId
    peer: _DecodePeer
    sink: PromptSink
    accept: Accept | None = None
    parts: deque[StartTransfer] = field(default_factory=deque)  # parts that were not queued for slots
    ready: int = 0  # number of leading parts whose batches were collected
    ending: PromptDone | None = None  # known once the batch of the last part was collected
    copying: int = 0  # copies under way that read its pages
    slots: set[int] = field(default_factory=set)  # announced, and not read yet
    stopping: bool = False  # nothing more is sent
    status: Literal["", "done", "failed", "link_down"] = ""  # the outcome, once it is known


@dataclass(eq=False, slots=True)
class _DecodePeer:
    """One decode engine, by one connection."""

    name: str
    link: PeerLink
    sender: KvSender | None = None
    free: list[int] = field(default_factory=list)  # slots
    waiting: deque[_Pages] = field(default_factory=deque)
    copying: int = 0
    lost: bool = False


# mechanism: prefill-and-decode-engines (executed)
class PrefillSide:
    """Transfers of a prefill engine: `lockstep.host.loop.Handover`.

    Args:
        kv: moves the pages.
        address: where decode engines connect; None: nowhere, links are added by `accept`.
        number: of this engine in its server.
    """

    def __init__(self, kv: KvTransport, address: str | None = None, *, number: int = 0, secret: bytes = b"") -> None:
        self._kv, self._number = kv, number
        self._host: RuntimeHost | None = None
        self._lock = threading.RLock()
        self._peers: list[_DecodePeer] = []
        self._rooms: dict[int, _SendingRoom] = {}
        self._of_request: dict[RequestId, _SendingRoom] = {}
        self._behind: dict[BatchId, list[_SendingRoom]] = {}
        self._seq = 0
        self.ended: Callable[[int], object] | None = None  # called with each room that has ended, from any thread
        self._address, self._secret = address, secret
        self._listener: Listener | None = None

    @property
    def address(self) -> str:
        """Where decode engines connect, once the host is attached."""
        assert self._listener is not None
        return self._listener.address

    @property
    def busy(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self._rooms)

    def attach(self, host: RuntimeHost) -> None:
        """Begin to accept links, for this host."""
        self._host = host
        if self._address is not None:
            self._listener = Listener(self._address, self._secret, self.accept)

    def accept(self, sock: socket.socket) -> None:
        """Serve a connection of a decode engine."""
        link = PeerLink("decode", lambda: sock, self._received, self._lost)
        link.start()

    def end_links(self) -> None:
        """End all links, and accept no more."""
        if self._listener is not None:
            self._listener.close()
        for peer in list(self._peers):
            peer.link.close()

    def close(self) -> None:
        """End all links, and what they move."""
        self.end_links()
        for peer in list(self._peers):
            peer.link.join(1.0)
        self._kv.close()

    # --------------------------------------------------------------------------------------- for the host's thread

    def arriving(self, event: RequestArrived, contents: Sequence[EncoderInput] = ()) -> None:
        """Do nothing: the rooms of a request are made when it is submitted."""

    def decided(self, step: Step) -> None:
        """Do nothing: a prefill engine has no sessions."""

    def arrived(self, event: RequestArrived, requests: list[RequestId]) -> None:
        """Do nothing: this request came from a decode engine."""

    def perform(self, command: StartTransfer | CancelTransfer) -> None:
        """Carry out a command of the core."""
        with self._lock:
            room = self._of_request.get(command.transfer_id)
            if room is None:
                return
            if isinstance(command, CancelTransfer):
                self._stop(room, "")
                return
            assert command.direction == "send", command
            assert command.after_batch is not None, command
            room.parts.append(command)
            self._behind.setdefault(command.after_batch, []).append(room)
            if command.last:
                room.peer.link.send(Offered(room.number))

    def collected(self, result: BatchResult) -> None:
        """Release the parts behind a batch. Called when its result was folded."""
        with self._lock:
            for room in self._behind.pop(result.plan.batch_id, ()):
                if result.error or room.stopping:
                    continue
                room.ready += 1
                if room.parts[room.ready - 1].last:
                    self._end_of_prompt(room, room.parts[room.ready - 1], result)
                self._queue(room)

    def _end_of_prompt(self, room: _SendingRoom, part: StartTransfer, result: BatchResult) -> None:
        """Store the first token of a room, and the results of its prompt."""
        plan = result.plan
        ids = plan.request_ids[plan.sample_rows]
        (found,) = np.flatnonzero(ids == room.request_id)
        assert self._host is not None
        room.ending = PromptDone(
            room.number,
            int(result.tokens[result.firsts()[found]]),
            part.weights_version,
            part.cached_tokens,
            int(found) in result.grammar_ended,
            packed(room.sink.logprobs, self._host.extras_of(room.request_id)),
        )

    # ------------------------------------------------------------------------------------------ pages and slots

    def _queue(self, room: _SendingRoom) -> None:
        """Queue the pages of parts that can be sent."""
        if room.accept is None or room.stopping or room.peer.sender is None:
            return
        sender, layout = room.peer.sender, self._kv.layout
        while room.ready:
            part = room.parts.popleft()
            room.ready -= 1
            if part.adapter_version != room.accept.adapter_version:
                self._stop(room, "the engines have different versions of the adapter")
                return
            there = room.accept.start_tokens // layout.page_size
            for number, (first, pages) in enumerate(blocks_of(part, layout, there)):
                most = sender.beside_per_slot[number - 1] if number else sender.pages_per_slot
                for at in range(0, len(pages), most):
                    room.peer.waiting.append(_Pages(room, first + at, pages[at : at + most], block=number))
            if part.last:
                room.peer.waiting.append(_Pages(room, 0, NO_ROWS, room.ending))
        self._fill(room.peer)

    def _fill(self, peer: _DecodePeer) -> None:
        """Copy waiting pages into free slots, in order."""
        while peer.waiting and peer.sender is not None and not peer.lost:
            pages = peer.waiting[0]
            if pages.room.stopping:
                peer.waiting.popleft()
            elif pages.ending is not None:
                if pages.room.copying:
                    return  # it follows the announcement of the room's last pages
                peer.waiting.popleft()
                peer.link.send(pages.ending)
            elif peer.free:
                peer.waiting.popleft()
                slot = peer.free.pop()
                pages.room.copying += 1
                peer.copying += 1
                peer.sender.stage(slot, pages.pages, partial(self._staged, pages, slot), pages.block)
            else:
                return

    def _staged(self, pages: _Pages, slot: int, staged: PagesStaged | BaseException) -> None:
        """Announce pages in a slot. Called from any thread."""
        room, peer = pages.room, pages.room.peer
        if isinstance(staged, BaseException):  # the content of the device is unknown
            assert self._host is not None
            self._host.put_fact(partial(_raise, staged))
            return
        with self._lock:
            room.copying -= 1
            peer.copying -= 1
            if room.stopping:
                peer.free.append(slot)
            else:
                room.slots.add(slot)
                count = len(pages.pages)
                peer.link.send(PagesReady(room.number, slot, pages.first_page, count, staged.checksums, pages.block))
            self._conclude(room)
            self._fill(peer)
            self._release(peer)

    # ------------------------------------------------------------------------------------------------- the end

    def _stop(self, room: _SendingRoom, reason: str) -> None:
        """Send nothing more of a room. The decode engine decides whether everything had arrived before."""
        if room.status:
            return
        room.stopping = True
        room.parts.clear()
        room.ready = 0
        room.peer.link.send(Stop(room.number, reason))

    def _conclude(self, room: _SendingRoom) -> None:
        """Report the end of a room, once it is known and no copy reads its pages."""
        if not room.status or room.copying or self._rooms.get(room.number) is not room:
            return
        del self._rooms[room.number]
        del self._of_request[room.request_id]
        room.peer.free += room.slots
        self._tell(room, room.status)
        if self.ended is not None:
            self.ended(room.number)

    def _tell(self, room: _SendingRoom, status: Status, start_tokens: int = 0) -> None:
        """Send the core a fact about a room."""
        assert self._host is not None

        def make(now_us: int) -> ObservedEvent:
            self._seq += 1
            about = (now_us, room.request_id, room.peer.name, 0, self._seq, status)
            return TransferAdvanced(*about, start_tokens=start_tokens)

        self._host.put_fact(make)

    # ------------------------------------------------------------------------------------- from the links' threads

    def _received(self, link: PeerLink, frame: bytes) -> None:
        message = read_from_decode(frame)
        if isinstance(message, PeerHello):
            self._hello(link, message)
            return
        with self._lock:
            peer = next((one for one in self._peers if one.link is link), None)
            if peer is None:
                raise LinkError(f"{type(message).__name__} came before PeerHello")
            match message:
                case Prefill():
                    self._prefill(peer, message)
                case Accept(number):
                    if (room := self._rooms.get(number)) is not None and room.accept is None and not room.stopping:
                        room.accept = message
                        self._tell(room, "accepted", message.start_tokens)
                        self._queue(room)
                case PagesRead(slot):
                    holder = next((one for one in self._rooms.values() if one.peer is peer and slot in one.slots), None)
                    if holder is not None:
                        holder.slots.discard(slot)
                        peer.free.append(slot)
                        self._fill(peer)
                case Outcome(number, status):
                    if (room := self._rooms.get(number)) is not None and not room.status:
                        room.status, room.stopping = status, True
                        self._conclude(room)
                        self._fill(peer)

    def _hello(self, link: PeerLink, message: PeerHello) -> None:
        """Take in a new link. Staging memory is made without the lock: other ranks may wait for the host's thread."""
        name, refused = f"engine{message.number}", ""
        peer = _DecodePeer(name, link)
        if message.protocol != PROTOCOL:
            refused = f"the decode engine uses protocol {message.protocol}, the prefill engine {PROTOCOL}"
        else:
            try:
                peer.sender = self._kv.sender(name)
                peer.free = list(range(peer.sender.places[0].slots))
            except ConfigError as error:
                refused = str(error)
        places = () if peer.sender is None else peer.sender.places
        with self._lock:
            for earlier in [one for one in self._peers if one.name == name]:
                earlier.link.close()
                self._drop(earlier)  # a new process of the same engine: nothing of the earlier one is under way
            self._peers.append(peer)
        link.send(PeerWelcome(PROTOCOL, self._number, self._kv.layout, places, refused))

    def _prefill(self, peer: _DecodePeer, message: Prefill) -> None:
        """Submit a request of a decode engine to the host."""
        request, host = message.request, self._host
        assert host is not None
        assert request.transfer_room is not None
        numbers = range(request.transfer_room, request.transfer_room + sample_count(request))
        taken = [number for number in numbers if number in self._rooms]
        if taken:
            for number in numbers:
                peer.link.send(Stop(number, f"room {taken[0]} is in use"))
            return
        sinks = [PromptSink(partial(self._refused, number)) for number in numbers]
        try:
            first_id = host.submit(msgspec.structs.replace(request, request_id=-1), *sinks, contents=message.contents)
        except EngineStopped as error:
            for number in numbers:
                peer.link.send(Stop(number, str(error)))
            return
        for offset, (number, sink) in enumerate(zip(numbers, sinks, strict=True)):
            room = _SendingRoom(number, first_id + offset, peer, sink)
            self._rooms[number] = self._of_request[room.request_id] = room

    def _refused(self, number: int, reason: str) -> None:
        with self._lock:
            if (room := self._rooms.get(number)) is not None:
                self._stop(room, reason)

    def _lost(self, link: PeerLink, reason: str) -> None:
        with self._lock:
            for peer in [one for one in self._peers if one.link is link]:
                log.info("the link to %s ended: %s", peer.name, reason)
                self._drop(peer)

    def _drop(self, peer: _DecodePeer) -> None:
        """End all transfers with a decode engine whose link has ended."""
        if peer.lost:
            return
        peer.lost = True
        self._peers.remove(peer)
        peer.waiting.clear()
        for room in [one for one in self._rooms.values() if one.peer is peer]:
            room.stopping = True
            room.status = room.status or "link_down"
            self._cancel_unsent(room)
            self._conclude(room)
        self._release(peer)

    def _cancel_unsent(self, room: _SendingRoom) -> None:
        """Cancel the request of a room whose decode engine has ended, whether or not it has a transfer."""
        assert self._host is not None
        self._host.cancel(room.request_id)

    def _release(self, peer: _DecodePeer) -> None:
        """Release the staging memory of a lost peer, once no copy writes it."""
        if peer.lost and not peer.copying and peer.sender is not None:
            peer.sender.close()
            peer.sender = None


def _raise(error: BaseException, now_us: int) -> ObservedEvent:
    raise error
