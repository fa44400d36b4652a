"""Data-parallel ranks exchange their proposals: every rank is an engine process, and the first one has the hub.

    rank 0..N-1 ──RankJoins──────────> hub       once, when the engine is made
                <──RanksBegin─────────           all have joined; where their collectives meet
                ──RankProposes───────>           what the rank will run in a round (ProposeBatch)
                <──ProposalWanted─────           another rank has proposed: offer a slot, even with nothing to run
                <──AllProposed────────           the proposals of all ranks, which each host folds as RanksAgreed
                ──RankLeaves─────────>           the server stops
                <──RanksEnd───────────           a rank has ended: no rank can run a pass any more

A rank that ends without RankLeaves ends all ranks, because their collectives are out of step. All of them are started
again, meet anew, and count rounds from 0. Until all have joined, a rank may leave and come back.

**Rounds in which no rank has anything to run** launch nothing. A host offers no further slot after such a round, unless
it folded another fact since it proposed (`fold`), or another rank proposes (`take_wanted`). While prompts wait for
those of other ranks (`prefill_delayer`), hosts go on offering slots, because the wait is counted in rounds.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from lockstep.core.contract.commands import ProposeBatch, Step
from lockstep.core.contract.events import LaneReady, ObservedEvent, PrefillNegotiated, RanksAgreed, Wish
from lockstep.host.errors import PeerRankLost
from lockstep.host.handover.link import Listener, PeerLink, connect
from lockstep.host.handover.wire import LinkError, LinkMessage

log = logging.getLogger("lockstep.host")

RETRY_S = 0.1  # between two tries to reach the hub
JOIN_S = 2.0  # limit for a link's thread to end

T = TypeVar("T")


class RankJoins(LinkMessage, frozen=True):
    """A rank is there. The numbers of the ranks of all must be the same."""

    rank: int
    ranks: int


class RanksBegin(LinkMessage, frozen=True):
    """All ranks are there.

    Args:
        store: path of the file by which their collectives meet.
    """

    store: str


class RankProposes(LinkMessage, frozen=True):
    """The proposal of a rank: see `ProposeBatch`."""

    round: int
    counts: tuple[int, ...]
    wish: Wish | None = None


class ProposalWanted(LinkMessage, frozen=True):
    """Another rank has proposed for this round."""

    round: int


class AllProposed(LinkMessage, frozen=True):
    """The proposals of all ranks for a round: see `RanksAgreed`."""

    round: int
    counts: tuple[tuple[int, ...], ...]
    wishes: tuple[Wish, ...] = ()


class RankLeaves(LinkMessage, frozen=True):
    """The rank ends because its engine is stopped."""


class RanksEnd(LinkMessage, frozen=True):
    """A rank has ended; `reason` names it. Empty: its engine was stopped."""

    reason: str = ""


_to_hub: msgspec.msgpack.Decoder[RankJoins | RankProposes | RankLeaves]
_to_hub = msgspec.msgpack.Decoder(RankJoins | RankProposes | RankLeaves)
_to_rank: msgspec.msgpack.Decoder[RanksBegin | ProposalWanted | AllProposed | RanksEnd]
_to_rank = msgspec.msgpack.Decoder(RanksBegin | ProposalWanted | AllProposed | RanksEnd)


def _read(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"an unreadable message of a rank: {error}") from error


class RankHub:
    """Gathers the proposals of all ranks. Runs in threads of the first rank's process.

    Args:
        address: unix:PATH, or tcp:HOST:PORT.
        store: makes the place where the collectives meet; called when all ranks have joined.
    Raises: ConfigError if the address cannot be listened on.
    """

    def __init__(self, address: str, ranks: int, store: Callable[[], str], secret: bytes = b"") -> None:
        self.ranks = ranks
        self._store = store
        self._lock = threading.Lock()  # guards the fields below
        self._links: dict[int, PeerLink] = {}
        self._ends: set[PeerLink] = set()  # links of ranks that left, or whose end is known
        self._begun = False
        self._over = False
        self._proposals: dict[int, RankProposes] = {}
        self._listener = Listener(address, secret, self._accept)
        self.address = self._listener.address

    def close(self, *, leaving: bool = False) -> None:
        """End all links; the other ranks end, too, unless this one is stopped (`leaving`)."""
        self._listener.close()
        with self._lock:
            self._over = True
            links = list(self._links.values())
            if leaving:
                self._tell(RanksEnd())
        for link in links:
            if leaving:
                link.end()
                link.join(JOIN_S)
            link.close()

    def _accept(self, sock: socket.socket) -> None:
        PeerLink("rank", partial(_given, sock), self._received, self._lost).start()

    def _received(self, link: PeerLink, frame: bytes) -> None:
        message = _read(_to_hub, frame)
        with self._lock:
            match message:
                case RankJoins(rank, ranks):
                    self._join(link, rank, ranks)
                case RankProposes():
                    self._propose(link, message)
                case RankLeaves():
                    self._ends.add(link)
                    self._tell(RanksEnd(), but=link)

    def _join(self, link: PeerLink, rank: int, ranks: int) -> None:
        if ranks != self.ranks or not 0 <= rank < ranks:
            raise LinkError(f"rank {rank} of {ranks} joins an engine of {self.ranks} ranks")
        if self._begun:
            raise LinkError(f"rank {rank} joins, but all ranks have begun")
        if (before := self._links.get(rank)) is not None:
            before.close()  # of an earlier generation that ended
        self._links[rank] = link
        if len(self._links) == self.ranks:
            self._begun = True
            self._tell(RanksBegin(self._store()))

    def _propose(self, link: PeerLink, proposal: RankProposes) -> None:
        rank = next((number for number, one in self._links.items() if one is link), None)
        if rank is None or not self._begun:
            raise LinkError("a rank proposes that has not joined")
        if any(one.round != proposal.round for one in self._proposals.values()):
            expected = next(iter(self._proposals.values())).round
            raise LinkError(f"rank {rank} proposes for round {proposal.round}, and other ranks for {expected}")
        self._proposals[rank] = proposal
        if len(self._proposals) < self.ranks:
            if len(self._proposals) == 1:
                self._tell(ProposalWanted(proposal.round), but=link)
            return
        proposals = [self._proposals[number] for number in range(self.ranks)]
        self._proposals = {}
        wishes = tuple([one.wish for one in proposals if one.wish is not None])
        self._tell(AllProposed(proposal.round, tuple([one.counts for one in proposals]), wishes))

    def _tell(self, message: LinkMessage, but: PeerLink | None = None) -> None:
        for link in self._links.values():
            if link is not but:
                link.send(message)

    def _lost(self, link: PeerLink, reason: str) -> None:
        with self._lock:
            rank = next((number for number, one in self._links.items() if one is link), None)
            if rank is None or self._over:
                return
            if not self._begun:
                del self._links[rank]
            elif link not in self._ends:
                self._ends.add(link)
                self._tell(RanksEnd(f"rank {rank} of {self.ranks} ended: {reason}"), but=link)


class Woken(Protocol):
    """What the agreement needs of a `RuntimeHost`."""

    def put_fact(self, make: Callable[[int], ObservedEvent]) -> None: ...
    def wake(self) -> None: ...


# mechanism: prefill-delayer (executed)
class RankAgreement:
    """One rank's end of the exchange.

    Args:
        address: of the hub.
        timeout_s: limit for all ranks to join.
    Attributes:
        store: where the collectives of the ranks meet.
        pending: the rank has proposed, and the other ranks have not all done so.
        ended: set once no rank can run a pass any more; `reason` is the cause. It is empty if the engine of a
            rank was stopped.
    Raises: ConfigError; PeerRankLost if the other ranks do not join in time.
    """

    def __init__(self, address: str, rank: int, ranks: int, timeout_s: float, secret: bytes = b"") -> None:
        self.rank, self.ranks = rank, ranks
        self.store = ""
        self.pending = False
        self.ended, self.reason = threading.Event(), ""
        self._lock = threading.Lock()
        self._host: Woken | None = None
        self._generation: Callable[[], int] = lambda: 0
        self._news = False  # a fact was folded since the last proposal
        self._microbatch = 0  # of the newest proposal
        # microbatches in which prompts wait for those of other ranks: whether that was decided in their newest round
        self._delayed: dict[int, bool] = {}
        self._round = 0  # that is proposed next
        self._wanted = -1  # the newest round for which another rank has proposed
        self._begun = threading.Event()
        self._closed = False
        self._link: PeerLink | None = None
        self._join(address, timeout_s, secret)

    def _join(self, address: str, timeout_s: float, secret: bytes) -> None:
        """Join until all ranks have. A hub that is not there yet, or ends before that, is tried again."""
        until = time.monotonic() + timeout_s
        while not self._begun.is_set():
            if time.monotonic() > until:
                raise PeerRankLost(f"rank {self.rank}: not all {self.ranks} ranks were there within {timeout_s:g} s")
            try:
                sock = connect(address, secret)
            except OSError:
                time.sleep(RETRY_S)
                continue
            gone = threading.Event()
            self._link = PeerLink(f"rank-{self.rank}", partial(_given, sock), self._received, partial(self._lost, gone))
            self._link.send(RankJoins(self.rank, self.ranks))
            self._link.start()
            while not self._begun.wait(RETRY_S) and not gone.is_set() and time.monotonic() < until:
                pass
            if not self._begun.is_set():
                self._link.close()

    def attach(self, host: Woken, generation: Callable[[], int]) -> None:
        """Connect the host that folds the agreements. `generation` returns the generation of its engine."""
        with self._lock:
            self._host, self._generation = host, generation
            reason = self.reason
        if reason:
            host.put_fact(partial(_raise, PeerRankLost(reason)))

    def close(self, *, leaving: bool) -> None:
        """Leave the other ranks.

        Args:
            leaving: the engine is stopped; otherwise the other ranks end, too.
        """
        with self._lock:
            self._closed = True
        if self._link is not None:
            if leaving:
                self._link.send(RankLeaves())
            self._link.end()
            self._link.join(JOIN_S)

    # ------------------------------------------------------------------------------------------- in the host's thread

    def propose(self, command: ProposeBatch) -> None:
        """Send the proposal of this rank."""
        assert self._link is not None
        self.pending, self._round, self._microbatch = True, command.round, command.microbatch
        self._link.send(RankProposes(command.round, command.counts, command.wish))

    def fold(self, event: ObservedEvent, step: Step) -> bool:
        """Fold an event and its Step, before the commands are performed.

        Returns: whether another slot would find nothing new: all ranks had nothing to run, and nothing has happened
            here since, and no prompt waits for another round.
        """
        proposes = any(isinstance(command, ProposeBatch) for command in step.commands)
        if isinstance(event, LaneReady | RanksAgreed):
            if isinstance(event, RanksAgreed):
                self.pending, self._round = False, event.round + 1
                self._note_delay(step)
            if proposes:
                self._news = False
                return False
            if isinstance(event, LaneReady):
                return False
            return step.launched() is None and not self._news and not self._delayed
        self._news = True
        return False

    def _note_delay(self, step: Step) -> None:
        """Note whether prompts wait in a microbatch. They wait until a round of it without such a decision.

        The round directly behind the decision is that of the same proposals without prompts, and decides nothing.
        """
        verdicts = [one.allowed for one in step.decided if isinstance(one, PrefillNegotiated)]
        if verdicts and not verdicts[0]:
            self._delayed[self._microbatch] = True
        elif not verdicts and self._delayed.get(self._microbatch):
            self._delayed[self._microbatch] = False
        else:
            self._delayed.pop(self._microbatch, None)

    def take_wanted(self) -> bool:
        """Return, once for each request of another rank, whether a slot is to be offered though nothing is new."""
        if self._wanted < 0:
            return False
        with self._lock:
            wanted, self._wanted = self._wanted, -1
        return wanted >= self._round

    # ------------------------------------------------------------------------------------------- in the link's thread

    def _received(self, link: PeerLink, frame: bytes) -> None:
        message = _read(_to_rank, frame)
        with self._lock:
            host = self._host
        match message:
            case RanksBegin(store):
                self.store = store
                self._begun.set()
            case ProposalWanted(number):
                with self._lock:
                    self._wanted = number
                if host is not None:
                    host.wake()
            case AllProposed():
                assert host is not None  # every rank has proposed
                host.put_fact(partial(self._agreed, message))
            case RanksEnd(reason):
                self._end(reason)

    def _agreed(self, message: AllProposed, now_us: int) -> RanksAgreed:
        return RanksAgreed(now_us, message.round, message.counts, message.wishes, self._generation())

    def _lost(self, gone: threading.Event, link: PeerLink, reason: str) -> None:
        gone.set()
        if self._begun.is_set():
            self._end(f"rank 0 of {self.ranks} ended: {reason}")

    def _end(self, reason: str) -> None:
        """Record that no rank can run a pass any more; the host ends, unless the engine of a rank was stopped."""
        with self._lock:
            if self.ended.is_set() or self._closed:
                return
            self.reason, host = reason, self._host
            self.ended.set()
        if reason and host is not None:
            host.put_fact(partial(_raise, PeerRankLost(reason)))


def _given(sock: socket.socket) -> socket.socket:
    return sock


def _raise(error: BaseException, now_us: int) -> ObservedEvent:
    """Raise an error in the host's thread."""
    raise error
