"""The decode engine's side: requests are sent to a prefill engine, and pages that it announces are fetched.

    the host took a request ──Prefill──> the prefill engine that the router chose
    StartTransfer(receive)  ──Accept───>
                            <─Offered─── `offered` for the core
                            <─PagesReady a slot is copied into pages, and can be filled again
                            <─PromptDone with everything copied: `done` for the core, Outcome for the other side

This side alone decides how a transfer ends, so both engines get the same end. `failed` is reported once no copy
writes pages of the room. When a link ends, all of its transfers end as link_down, and the next request connects again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from lockstep.core.contract.commands import CancelTransfer, StartTransfer, Step
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    ObservedEvent,
    RequestArrived,
    RequestId,
    TokenIds,
    TransferAdvanced,
    TurnStarted,
)
from lockstep.core.contract.samples import sample_count
from lockstep.host.cache_moves import BlockKind
from lockstep.host.handover.kv import Fetch, KvReceiver, KvTransport, given_blocks
from lockstep.host.handover.link import PeerLink, connect
from lockstep.host.handover.wire import (
    CONTENTS_BYTES_MAX,
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
    blocks_in,
    read_from_prefill,
)
from lockstep.host.media.content import EncoderInput

if TYPE_CHECKING:
    from lockstep.host.batches import BatchResult
    from lockstep.host.loop import RuntimeHost

log = logging.getLogger("lockstep.host")

Status = Literal["offered", "done", "failed", "link_down"]


@dataclass(slots=True)
class _ReceivingRoom:
    """One transfer. Guarded by the lock of its side."""

    number: int
    request_id: RequestId
    peer: _PrefillPeer
    receive: StartTransfer | None = None  # None: no pages yet
    fetching: int = 0  # slots that are copied, or wait for it
    ending: PromptDone | None = None
    stopping: bool = False  # it has failed; a copy may still be under way
    sent: bool = False  # whether Prefill was sent
    contents: tuple[EncoderInput, ...] = ()  # of its request's media, until Prefill is sent


@dataclass(eq=False, slots=True)
class _PrefillPeer:
    """One prefill engine, by one connection."""

    name: str
    link: PeerLink
    receiver: KvReceiver | None = None
    fetching: int = 0
    lost: bool = False
    rooms: dict[int, _ReceivingRoom] = field(default_factory=dict)
    kinds: tuple[BlockKind, ...] = ("page",)  # of its blocks, by their number in messages


@dataclass(slots=True)
class TransferCounts:
    """Totals since the engine started."""

    done: int = 0
    failed: int = 0
    blocks: Counter[BlockKind] = field(default_factory=Counter)  # copied into this engine's pools; a state by pieces

    @property
    def pages(self) -> int:
        """Full pages that were copied."""
        return self.blocks["page"]


class DecodeSide:
    """Transfers of a decode engine: `lockstep.host.loop.Handover`.

    Args:
        kv: moves the pages.
        address_of: returns the address of a prefill engine, by its number.
        number: of this engine in its server.
    """

    def __init__(
        self, kv: KvTransport, address_of: Callable[[int], str], *, number: int = 0, secret: bytes = b""
    ) -> None:
        self._kv, self._address_of, self._number, self._secret = kv, address_of, number, secret
        self._host: RuntimeHost | None = None
        self._lock = threading.RLock()
        self._routes: dict[int, int] = {}  # first room of a request -> its prefill engine
        self._peers: dict[int, _PrefillPeer] = {}  # by number of the prefill engine
        self._rooms: dict[int, _ReceivingRoom] = {}
        self._of_request: dict[RequestId, _ReceivingRoom] = {}
        self._turns: dict[RequestId, RequestArrived] = {}  # turns of sessions that have not begun
        self._seq = 0
        self.counts = TransferCounts()

    @property
    def busy(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self._rooms)

    def attach(self, host: RuntimeHost) -> None:
        """Serve this host."""
        self._host = host

    def route(self, room: int, prefill: int) -> None:
        """Set the prefill engine of a request, by its first room, before the request is submitted."""
        with self._lock:
            self._routes[room] = prefill

    def end_links(self) -> None:
        """End all links."""
        for peer in list(self._peers.values()):
            peer.link.close()

    def close(self) -> None:
        """End all links, and what they move."""
        self.end_links()
        for peer in list(self._peers.values()):
            peer.link.join(1.0)
        self._kv.close()

    # --------------------------------------------------------------------------------------- for the host's thread

    def arriving(self, event: RequestArrived, contents: Sequence[EncoderInput] = ()) -> None:
        """Make the rooms of a request, which keep the contents of its media until they are sent."""
        first = event.transfer_room
        if first is None:
            return
        with self._lock:
            prefill = self._routes.pop(first, None)
            if prefill is None:
                raise ContractError(f"the request in room {first} has no prefill engine")
            peer = self._peer(prefill)
            if event.session:
                self._turns[event.request_id] = event
            for number in range(sample_count(event)):
                room = _ReceivingRoom(first + number, event.request_id + number, peer, contents=tuple(contents))
                self._rooms[room.number] = self._of_request[room.request_id] = peer.rooms[room.number] = room

    def arrived(self, event: RequestArrived, requests: list[RequestId]) -> None:
        """Send a request that the engine has taken to its prefill engine.

        Args:
            requests: its samples that were not rejected.
        """
        with self._lock:
            rooms = [self._of_request.get(event.request_id + number) for number in range(sample_count(event))]
            there = [room for room in rooms if room is not None]
            for room in there:
                if room.request_id not in requests:
                    self._forget(room)
            if there and requests and not event.session:
                self._send(event, there)

    def decided(self, step: Step) -> None:
        """Send the turns of sessions that have begun, each with its whole prompt."""
        if not self._turns:
            return
        with self._lock:
            for event in step.decided:
                if isinstance(event, TurnStarted) and event.request_id in self._turns:
                    turn, room = self._turns.pop(event.request_id), self._of_request.get(event.request_id)
                    if room is not None:
                        self._send(self._whole(turn, event), [room])

    def _whole(self, turn: RequestArrived, began: TurnStarted) -> RequestArrived:
        """Return a turn as a request without a session: its prompt begins with the tokens of the session."""
        assert self._host is not None
        request = self._host.engine.requests[began.request_id]
        prompt = bytes(request.tokens[: 4 * began.prompt_tokens])
        start = turn.logprob_start
        return msgspec.structs.replace(
            turn,
            prompt=TokenIds(prompt),
            spans=() if request.extras is None else request.extras.spans,
            session="",
            session_start=None,
            session_after="",
            max_new_tokens=began.max_new_tokens,
            logprob_start=None if start is None else start + began.kept_tokens,
        )

    def _send(self, event: RequestArrived, rooms: list[_ReceivingRoom]) -> None:
        """Send a request to its prefill engine, with what the core has ordered for it so far."""
        peer, contents = rooms[0].peer, rooms[0].contents
        size = sum(one.size for one in contents)
        if size <= CONTENTS_BYTES_MAX:
            peer.link.send(Prefill(for_prefill(event), contents))
        for room in rooms:
            room.sent, room.contents = True, ()
        if size > CONTENTS_BYTES_MAX:
            log.warning("r%d is not sent to %s: its media have %d bytes", rooms[0].request_id, peer.name, size)
            for room in rooms:
                self._stop(room)
            return
        for room in rooms:
            if room.receive is not None:
                peer.link.send(_accept(room))
            self._conclude(room)

    def perform(self, command: StartTransfer | CancelTransfer) -> None:
        """Carry out a command of the core."""
        with self._lock:
            room = self._of_request.get(command.transfer_id)
            if room is None:
                return
            if isinstance(command, CancelTransfer):
                self._stop(room)
                return
            assert command.direction == "receive", command
            room.receive = command
            if room.sent:
                room.peer.link.send(_accept(room))

    def collected(self, result: BatchResult) -> None:
        """Do nothing: nothing waits for a batch of a decode engine."""

    # ------------------------------------------------------------------------------------------------------- pages

    def _fetch(self, peer: _PrefillPeer, message: PagesReady) -> None:
        """Copy the pages of a slot."""
        room = self._rooms.get(message.room)
        if room is None or room.stopping or peer.receiver is None:
            return  # the prefill engine takes its slots back with the outcome
        if room.receive is None:
            raise LinkError(f"pages of room {message.room} came before this engine had given any")
        if not 0 <= message.block < len(peer.kinds):
            raise LinkError(f"room {message.room} was sent blocks of number {message.block}, of {len(peer.kinds)}")
        kind = peer.kinds[message.block]
        given, pages = given_blocks(room.receive, kind, self._kv.layout.page_size)
        shift = message.first_page - given
        first = max(0, -shift)
        into = pages[shift + first : shift + message.pages]
        if len(into) != message.pages - first:
            named = "pages" if kind == "page" else f"blocks ({kind})"
            raise LinkError(f"room {message.room} was sent {message.pages} {named} from {message.first_page} on")
        room.fetching += 1
        peer.fetching += 1
        order = Fetch(message.slot, message.pages, first, into, message.checksums, message.block)
        peer.receiver.fetch(order, lambda: room.stopping, partial(self._fetched, room, message.slot, kind, len(into)))

    def _fetched(self, room: _ReceivingRoom, slot: int, kind: BlockKind, count: int, error: str) -> None:
        """Take in the end of a copy. Called from any thread."""
        with self._lock:
            peer = room.peer
            room.fetching -= 1
            peer.fetching -= 1
            if error and not room.stopping:
                log.error("the KV of r%d did not arrive: %s", room.request_id, error)
                self._stop(room)
            elif not room.stopping:
                self.counts.blocks[kind] += count
                peer.link.send(PagesRead(slot))
            self._conclude(room)
            self._release(peer)

    # ----------------------------------------------------------------------------------------------------- the end

    def _stop(self, room: _ReceivingRoom) -> None:
        if not room.stopping:
            room.stopping = True
            self._conclude(room)

    def _conclude(self, room: _ReceivingRoom) -> None:
        """End a transfer that has failed, or whose last page has arrived."""
        arriving = self._turns.get(room.request_id) is None and not room.sent
        unsent = arriving and not room.peer.lost
        if unsent or room.fetching or self._rooms.get(room.number) is not room or not (room.stopping or room.ending):
            return
        self._forget(room)
        failed = room.stopping
        if room.sent and not room.peer.lost:
            room.peer.link.send(Outcome(room.number, "failed" if failed else "done"))
        if failed:
            self.counts.failed += 1
            self._tell(room.request_id, room.peer.name, "link_down" if room.peer.lost else "failed")
        else:
            self.counts.done += 1
            self._tell(room.request_id, room.peer.name, "done", room.ending)

    def _forget(self, room: _ReceivingRoom) -> None:
        self._turns.pop(room.request_id, None)
        del self._rooms[room.number]
        del self._of_request[room.request_id]
        room.peer.rooms.pop(room.number, None)

    def _tell(self, request_id: RequestId, source: str, status: Status, ending: PromptDone | None = None) -> None:
        """Send the core a fact about a transfer."""
        assert self._host is not None
        host = self._host

        def make(now_us: int) -> ObservedEvent:
            self._seq += 1
            advanced = TransferAdvanced(now_us, request_id, source, 0, self._seq, status)
            if ending is None:
                return advanced
            stopped, held = host.take_first_token(request_id, ending.first_token, ending.results)
            return msgspec.structs.replace(
                advanced,
                first_token=ending.first_token,
                weights_version=ending.weights_version,
                cached_tokens=ending.cached_tokens,
                text_stop=stopped,
                text_held=held,
                grammar_ended=ending.grammar_ended,
            )

        host.put_fact(make)

    # ------------------------------------------------------------------------------------- from the links' threads

    def _peer(self, number: int) -> _PrefillPeer:
        """Return the link to a prefill engine; make one if there is none."""
        peer = self._peers.get(number)
        if peer is None:
            link = PeerLink(
                f"prefill-{number}",
                lambda: connect(self._address_of(number), self._secret),
                partial(self._received, number),
                partial(self._lost, number),
            )
            peer = self._peers[number] = _PrefillPeer(f"engine{number}", link)
            link.send(PeerHello(PROTOCOL, self._number, self._kv.layout))
            link.start()
        return peer

    def _received(self, number: int, link: PeerLink, frame: bytes) -> None:
        message = read_from_prefill(frame)
        receiver = self._welcomed(message) if isinstance(message, PeerWelcome) else None
        with self._lock:
            peer = self._peers.get(number)
            if peer is None or peer.link is not link:
                if receiver is not None:
                    receiver.close()
                return
            match message:
                case PeerWelcome(layout=layout):
                    peer.receiver, peer.kinds = receiver, tuple(one.kind for one in blocks_in(layout))
                case Offered(room):
                    if (found := self._rooms.get(room)) is not None and not found.stopping:
                        self._tell(found.request_id, peer.name, "offered")
                case PagesReady():
                    self._fetch(peer, message)
                case PromptDone(room):
                    if (found := self._rooms.get(room)) is not None and not found.stopping:
                        found.ending = message
                        self._conclude(found)
                case Stop(room, reason):
                    if (found := self._rooms.get(room)) is not None:
                        if reason:
                            log.warning("%s does not send the KV of r%d: %s", peer.name, found.request_id, reason)
                        self._stop(found)

    def _welcomed(self, message: PeerWelcome) -> KvReceiver:
        """Open the staging memory of a prefill engine, without the lock: other ranks may wait for the host's thread.

        Raises: LinkError if that is not possible.
        """
        refused = message.refused
        if not refused and message.protocol != PROTOCOL:
            refused = f"the prefill engine uses protocol {message.protocol}, the decode engine {PROTOCOL}"
        if not refused:
            try:
                return self._kv.receiver(message.layout, message.places)
            except ConfigError as error:
                refused = str(error)
        log.error("no KV can be received from engine %d: %s", message.number, refused)
        raise LinkError(refused)

    def _lost(self, number: int, link: PeerLink, reason: str) -> None:
        with self._lock:
            peer = self._peers.get(number)
            if peer is None or peer.link is not link:
                return
            log.info("the link to %s ended: %s", peer.name, reason)
            peer.lost = True
            del self._peers[number]
            for room in list(peer.rooms.values()):
                room.stopping = True
                self._conclude(room)
            self._release(peer)

    def _release(self, peer: _PrefillPeer) -> None:
        """Forget the staging memory of a lost peer, once no copy reads it."""
        if peer.lost and not peer.fetching and peer.receiver is not None:
            peer.receiver.close()
            peer.receiver = None


def _accept(room: _ReceivingRoom) -> Accept:
    assert room.receive is not None
    return Accept(room.number, room.receive.start_tokens, room.receive.adapter_version)


def for_prefill(event: RequestArrived) -> RequestArrived:
    """Return a request as the prefill engine gets it.

    The decode engine looks at texts, at deadlines, and at the client, and cancels the transfer when the request ends.
    """
    return msgspec.structs.replace(
        event,
        time_us=0,
        request_id=-1,
        stop_texts=(),
        stop_regexes=(),
        deadline_us=None,
        finish_by_us=None,
        origin="",
    )
