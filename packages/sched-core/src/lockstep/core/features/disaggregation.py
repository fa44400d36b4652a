"""Prefill and decode on different engines: the course of a request with KV computed here and used there.

A request of a *room* comes to two engines. The prefill engine computes its prompt and draws its first token, and sends
the KV part by part, behind the batches that compute it. The decode engine gives pages to the writer, waits until all of
it is there, and goes on from the first token as if it had computed the prompt itself.

    prefill   bootstrap -> waiting (the line, its chunks) -> sending -> in flight -> over
    decode    preallocating -> receiving -> ready -> over: it runs

Each side has a table, `SENDER` and `RECEIVER`: the state of a transfer, what happened, the state that follows. The code
moves along them and nowhere else; docs/distributed.md shows them. A transfer is named by the request's id on its
engine, which is never used twice: so facts about a transfer that is over are known to be late, and ignored.

**Shared pages.** Pages that a writer or reader elsewhere may touch belong to the transfer until it has *ended* on
this side: done, failed or link_down, of which the host tells exactly once. A request that goes before that leaves them
in quarantine. On the decode side these are the pages given to the writer; on the prefill side the row of the request,
which `Memory.lent` pins.

**No request waits for pages while holding some.** A transfer is given all pages up to and with the one its first decode
writes, or none; a ready request therefore needs a row and no page. It can be made to give its pages back, and
a receiving one ends by itself. The reserve (`_fits`) is SGLang's: `num_reserved_decode_tokens` for each request
that runs or will, or what the largest of those that run still needs, whichever is more.

**A waiting dependant blocks no request.** A sample that follows another and a turn that may not start take neither slot
nor pages; encoding begins once both sides are sure; a ready request, which holds pages, gets its adapter before the
queue.

**A change of the role** (`RoleChange`) admits no request, ends those left when its time is over, and happens when
nothing of the old role is left: no request, no batch, no transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from lockstep.core.contract.checks import fail, same
from lockstep.core.contract.commands import NO_ROWS, CancelTransfer, ControlAnswered, StartTransfer, Step, StreamTokens
from lockstep.core.contract.config import TRANSFER_SETTINGS, Role, SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError, InvariantError
from lockstep.core.contract.events import (
    FinishReason,
    PrefillCompleted,
    RequestAdmitted,
    RequestArrived,
    RequestId,
    TransferAdvanced,
    TransferCause,
    TransferMoved,
    TransferState,
)
from lockstep.core.features.prerequisites import Prerequisites
from lockstep.core.features.sessions import Sessions
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.radix import Match
from lockstep.core.requests import delivery, extras
from lockstep.core.requests.batching import ExtendPart, InFlight
from lockstep.core.requests.budget import CLIP, CLIP_MAX_NEW_TOKENS
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.table import NO_REQUEST, Adapter, Int32s, Request
from lockstep.core.requests.validation import RequestRefused

Table = dict[tuple[TransferState, TransferCause], TransferState]

SENDER: Table = {
    ("bootstrap", "accepted"): "accepted",
    ("accepted", "joined"): "waiting",
    ("waiting", "part_given"): "sending",
    ("waiting", "all_given"): "in_flight",
    ("sending", "part_given"): "sending",
    ("sending", "all_given"): "in_flight",
    ("in_flight", "done"): "over",
    ("bootstrap", "failed"): "over",
    ("accepted", "failed"): "over",
    ("waiting", "failed"): "over",
    ("sending", "failed"): "over",
    ("in_flight", "failed"): "over",
    ("bootstrap", "abandoned"): "over",
    ("accepted", "abandoned"): "over",
    ("waiting", "abandoned"): "over",
    ("sending", "abandoned"): "quarantined",
    ("in_flight", "abandoned"): "quarantined",
    ("quarantined", "done"): "over",
    ("quarantined", "failed"): "over",
}
"""The prefill engine's side."""

RECEIVER: Table = {
    ("awaited", "offered"): "preallocating",
    ("preallocating", "allocated"): "receiving",
    ("receiving", "done"): "ready",
    ("ready", "joined"): "over",
    ("awaited", "failed"): "over",
    ("preallocating", "failed"): "over",
    ("receiving", "failed"): "over",
    ("awaited", "abandoned"): "over",
    ("preallocating", "abandoned"): "over",
    ("receiving", "abandoned"): "quarantined",
    ("ready", "abandoned"): "over",
    ("quarantined", "done"): "over",
    ("quarantined", "failed"): "over",
}
"""The decode engine's side."""

MEANINGS: dict[TransferState, str] = {
    "bootstrap": "held: the decode engine has not given pages yet",
    "accepted": "held: no metadata slot is free",
    "waiting": "in the line, or its prompt is being computed; nothing was sent",
    "sending": "parts are sent while the prompt is being computed",
    "in_flight": "the whole prompt is being sent",
    "awaited": "held: the prefill engine has not computed the prompt (allocation prefill_complete)",
    "preallocating": "held: it has no pages yet",
    "receiving": "held: its pages are the writer's",
    "ready": "held: its KV is there, and a row is all it needs",
    "quarantined": "the request has gone on without it, or ended; pages and slot wait for the other side",
    "over": "nothing is held for it any more",
}

FIRST: dict[tuple[str, str], TransferState] = {
    ("prefill", "early"): "bootstrap",
    ("prefill", "prefill_complete"): "accepted",
    ("decode", "early"): "preallocating",
    ("decode", "prefill_complete"): "awaited",
}
"""Where a transfer begins, by the engine's role and `transfer_allocation`."""

REPEATABLE: frozenset[TransferCause] = frozenset({"accepted", "offered"})
"""What may be said again, or too late; where the table has no row for it, nothing happens."""

TOUCHED: frozenset[TransferState] = frozenset({"sending", "in_flight", "receiving", "quarantined"})
"""States in which the other side may read or write pages."""

HELD: frozenset[TransferState] = frozenset({"bootstrap", "accepted", "awaited", "preallocating", "receiving", "ready"})
"""States in which the request is held for it."""

CAUSES: dict[str, TransferCause | None] = {
    "accepted": "accepted",
    "offered": "offered",
    "moving": None,
    "done": "done",
    "failed": "failed",
    "link_down": "failed",
}
"""What a TransferAdvanced of this status is to the tables; None: nothing."""

QUEUED: tuple[TransferState, ...] = ("accepted", "preallocating", "ready")
"""States in which a transfer waits for a slot, for pages or for a row, in a queue."""

NO_SLOT = -1


class Transfer(msgspec.Struct):
    """One request's transfer, on one side of it."""

    request_id: RequestId
    room: int
    state: TransferState
    slot: int = NO_SLOT  # of the metadata
    start_tokens: int = 0  # positions before are on the decode engine already
    due_us: int | None = None  # when it is given up, in this state
    weights: int = 0  # version of the weights whose KV it is
    given_tokens: int = 0  # sender: positions before were handed to the host, or need not be sent
    ends: FinishReason | None = None  # sender: how the first token ended it there, once that was delivered
    cached_tokens: int = 0  # receiver: of its prompt, which the prefill engine found cached
    namespace: str = ""  # receiver: of the path that it locks
    pages: Int32s = NO_ROWS  # receiver: behind that path, for all positions up to its first decode's
    handle: RadixNode | None = None  # receiver: its lock on what this engine had of the prompt


class RoleChange(msgspec.Struct):
    """What the engine is to become once all it has taken has ended."""

    control_id: int
    role: Role
    due_us: int  # requests left then end


class TransferImage(msgspec.Struct, forbid_unknown_fields=True):
    """A transfer in a snapshot."""

    request_id: int
    room: int
    state: TransferState
    slot: int
    start_tokens: int
    due_us: int | None
    weights: int
    given_tokens: int
    ends: FinishReason | None
    cached_tokens: int
    namespace: str
    pages: bytes
    handle: int | None


class TransfersImage(msgspec.Struct, forbid_unknown_fields=True):
    """All transfers of an engine in a snapshot, in their order."""

    transfers: list[TransferImage]
    line: list[int]
    ready: list[int]
    free_slots: list[int]
    lent: list[tuple[int, int, list[bytes]]]
    change: RoleChange | msgspec.UnsetType = msgspec.UNSET


class TransferSettings(NamedTuple):
    """What SchedConfig says of transfers, for an engine that has any."""

    role: str
    allocation: str
    recompute: bool  # a prompt whose KV does not come
    reserved_tokens: int
    slots: int
    bootstrap_timeout_us: int | None
    transfer_timeout_us: int | None

    @staticmethod
    def of(config: SchedConfig) -> TransferSettings:
        """Of a prefill or a decode engine, all of whose transfer settings have values."""
        known: Any = config
        return TransferSettings(
            known.role,
            known.transfer_allocation,
            known.transfer_failure == "recompute",
            known.num_reserved_decode_tokens,
            known.transfer_slots,
            known.bootstrap_timeout_us,
            known.transfer_timeout_us,
        )


NO_TRANSFERS = TransferSettings("mixed", "", False, 0, 0, None, None)
"""The settings of an engine that computes prompts and answers itself."""


class TransfersPart(msgspec.Struct):
    """Transfers in a snapshot; None: the engine hands nothing over."""

    transfers: TransfersImage | None = None


class Transfers(Component):
    """The transfers of one engine, prefill or decode."""

    PART = TransfersPart

    def __init__(
        self, config: SchedConfig, scheduler: SchedulerView, sessions: Sessions, prerequisites: Prerequisites
    ) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._prerequisites = prerequisites
        self.all: dict[RequestId, Transfer] = {}  # that are not over, in the order of their arrival
        self.rooms: dict[int, RequestId] = {}
        self.line: list[
            RequestId
        ] = []  # requests that wait for a slot ("accepted"), or for pages too ("preallocating")
        self.ready: list[RequestId] = []  # requests that wait for a row, as their KV arrived
        self.change: RoleChange | None = None
        self.sending = 0  # requests whose prompt is computed and only has to be sent yet
        self._take_role(config)

    def _take_role(self, config: SchedConfig) -> None:
        """Serve the role of these settings. A mixed engine has no transfers: then nothing is ever in `all`."""
        self.hands_over = config.hands_over
        self.settings = settings = TransferSettings.of(config) if config.hands_over else NO_TRANSFERS
        self.sends = settings.role == "prefill"
        self.table = SENDER if self.sends else RECEIVER
        self.first = FIRST.get((settings.role, settings.allocation), "bootstrap")
        self.free_slots: list[int] = list(range(settings.slots - 1, -1, -1))

    # -------------------------------------------------------------------------------------------------------------- ask

    def in_state(self, *states: TransferState) -> list[Transfer]:
        """The transfers in one of these states, by arrival."""
        return [transfer for transfer in self.all.values() if transfer.state in states]

    @property
    def holds_pages(self) -> bool:
        """Whether any transfer keeps pages, beside the rows of running requests."""
        return any(transfer.state in TOUCHED or transfer.state == "ready" for transfer in self.all.values())

    @property
    def quiet(self) -> bool:
        """Whether nothing about transfers is to be decided while only decodes go on."""
        return not self.line and not self.ready and self.change is None

    def due_of(self, request_id: RequestId) -> int | None:
        """When the transfer of a request is given up."""
        transfer = self.all.get(request_id)
        return transfer.due_us if transfer is not None else None

    def holds(self, request: Request) -> bool:
        """Whether it waits for its transfer: until its prompt may be computed here, or has come."""
        transfer = self.all.get(request.request_id)
        return transfer is not None and transfer.state in HELD

    def ready_on(self, adapter: Adapter) -> list[Request]:
        """The ready requests that run on this adapter."""
        ready = [self._scheduler.requests[request_id] for request_id in self.ready]
        return [request for request in ready if request.adapter == adapter]

    def adapters_wanted(self) -> list[Adapter]:
        """Adapters of ready requests, as long as they may start: they hold pages, so they go before the waiting
        queue."""
        if self._scheduler.launches_blocked:
            return []
        return [self._scheduler.requests[request_id].adapter for request_id in self.ready]

    def is_sent(self, request: Request) -> bool:
        """Whether its prompt is computed and it only waits until it was sent."""
        transfer = self.all.get(request.request_id)
        return transfer is not None and transfer.ends is not None

    def is_given(self, request: Request) -> bool:
        """Whether any of its KV was handed to the host to be sent."""
        transfer = self.all.get(request.request_id)
        return transfer is not None and transfer.state in ("sending", "in_flight")

    # --------------------------------------------------------------------------------------------------- come and leave

    def check(self, event: RequestArrived, samples: int) -> None:
        """Raise Refused for an arrival that this engine cannot serve its half of. Samples have consecutive rooms."""
        if self.change is not None:
            raise RequestRefused("draining", f"the engine is becoming {self.change.role} and takes no new requests")
        if event.transfer_room is None:
            if self.sends and not event.max_new_tokens:
                return  # its prompt is all there is to it
            raise RequestRefused("bad_request", f"`transfer_room` is missing: this is a {self.settings.role} engine")
        for room in range(event.transfer_room, event.transfer_room + samples):
            if room in self.rooms:
                raise RequestRefused(
                    "bad_request", f"`transfer_room` is {room}, which is the room of r{self.rooms[room]}"
                )
        if not event.max_new_tokens:
            raise RequestRefused("bad_request", "`max_new_tokens` is 0: with no output there is nothing to hand over")

    def take_in(self, request: Request, event: RequestArrived, step: Step) -> None:
        """An accepted request is held: until the other side is there, or for pages."""
        if event.transfer_room is None:
            return
        transfer = Transfer(request.request_id, event.transfer_room, self.first)
        self.all[request.request_id] = transfer
        self.rooms[transfer.room] = request.request_id
        self._scheduler.add_prerequisite(request)
        self._enter(transfer, step)

    def turn_began(self, request: Request, step: Step) -> None:
        """A turn has its prompt now: the prefill engine may be told, and has so long to be heard of."""
        transfer = self.all.get(request.request_id)
        if transfer is not None and transfer.state == "awaited":
            self._set_due(transfer, self.settings.bootstrap_timeout_us, step)

    def ended(self, request: Request, step: Step) -> None:
        """A request ends while its transfer goes on: the other side is told, and what it touches is kept for it."""
        transfer = self.all.get(request.request_id)
        if transfer is not None and transfer.state != "quarantined":
            self._abandon(transfer, step)

    def expired(self, request: Request, step: Step) -> None:
        """A transfer took too long in its state."""
        self._abandon(self.all[request.request_id], step)
        self._lost(request, step)

    def weights_changed(self, step: Step) -> None:
        """KV of the weights before is no good with these: what arrived is computed again, what is half sent fails.

        Nothing is in flight. What was computed to its end before goes on being sent, with its version.
        """
        for transfer in self.in_state("waiting", "sending", "ready"):
            request = self._scheduler.requests[transfer.request_id]
            if transfer.state == "ready":
                self.give_up(request, step)
            elif request.row >= 0:
                self._scheduler.finish(request, "transfer", step)

    def restarted(self, step: Step) -> None:
        """The device is gone, and with it all that was on its way from it or to it, and the requests concerned."""
        for transfer in list(self.all.values()):
            request = self._scheduler.requests.get(transfer.request_id)
            if transfer.state != "quarantined":
                self._abandon(transfer, step)
                assert request is not None
                self._lost(request, step, asks=False)
            if transfer.state == "quarantined":
                self._move(transfer, "failed", step)

    def give_up(self, request: Request, step: Step) -> None:
        """Take the pages of a request that is ready back: it joins the line and is computed here."""
        self._abandon(self.all[request.request_id], step)
        self._compute_here(request, step)

    def makes_way(self, step: Step) -> bool:
        """Take windows back for the chunked request, if no other request will give any: of the newest without a row.

        Full pages were all there when it was admitted, window pages for a chunk only. Returns: whether any came back.
        """
        held_up = (
            self._scheduler.memory.hybrid.present
            and not self._scheduler.in_flight
            and not self._scheduler.all_running[0].size
        )
        if held_up and self.ready:
            self.give_up(self._scheduler.requests[self.ready[-1]], step)
            return True
        return False

    def give_up_all(self, step: Step) -> None:
        """Take back the pages of all ready requests."""
        for transfer in self.in_state("ready"):
            self.give_up(self._scheduler.requests[transfer.request_id], step)

    def _lost(self, request: Request, step: Step, *, asks: bool = True) -> None:
        """The KV of a request will not come, or not go: it is computed here if that is wanted, or the request ends.

        `asks`: for its media now; in a restart all requests do that later.
        """
        if self.sends or not self.settings.recompute:
            self._scheduler.finish(request, "transfer", step, flush=True)
        elif asks:
            self._compute_here(request, step)
        else:
            self._scheduler.join_queue(request)

    def _compute_here(self, request: Request, step: Step) -> None:
        """Its prompt is computed on this engine: it joins the line, once an encoder has seen its media."""
        if self._prerequisites.lost_media(request):
            self._prerequisites.await_media(request, step)
        self._scheduler.join_queue(request)

    def _abandon(self, transfer: Transfer, step: Step) -> None:
        """This side gives a transfer up."""
        if transfer.state != "ready":
            step.commands.append(CancelTransfer(transfer.request_id))
        self._forget_sent(transfer)
        self._move(transfer, "abandoned", step)

    def _forget_sent(self, transfer: Transfer) -> FinishReason:
        """Its request is no longer one that only waits until it was sent. Returns how its first token ended it."""
        ends = transfer.ends or "transfer"
        if transfer.ends is not None:
            self.sending -= 1
            transfer.ends = None
        return ends

    # -------------------------------------------------------------------------------------------------- along the table

    def _move(self, transfer: Transfer, cause: TransferCause, step: Step) -> None:
        """Move along the table. Raises InvariantError for a pair that it does not have."""
        following = self.table.get((transfer.state, cause))
        if following is None:
            raise InvariantError(f"the transfer of r{transfer.request_id} is {transfer.state}: no {cause} from there")
        for waiting in (self.line, self.ready):
            if transfer.request_id in waiting:
                waiting.remove(transfer.request_id)
        if following != transfer.state:
            step.decided.append(TransferMoved(self._scheduler.now_us, transfer.request_id, following, cause))
        transfer.state = following
        self._enter(transfer, step)

    def _enter(self, transfer: Transfer, step: Step) -> None:
        """What comes with being in a state: a place in a line, a time by which it must end, what is given back."""
        timeout_us = None
        match transfer.state:
            case "bootstrap" | "awaited":
                if not self._scheduler.waits_for_turn(self._scheduler.requests[transfer.request_id]):
                    timeout_us = self.settings.bootstrap_timeout_us
            case "receiving" | "in_flight":
                timeout_us = self.settings.transfer_timeout_us
            case "accepted" | "preallocating":
                self.line.append(transfer.request_id)
            case "ready":
                self.ready.append(transfer.request_id)
                self._free_slot(transfer)
            case "quarantined":
                self._unlock(transfer, step)
            case "over":
                self._unlock(transfer, step)
                self._free_slot(transfer)
                self._scheduler.memory.end_lending(transfer.request_id, transfer.pages, step)
                self._scheduler.retry_admission()
                del self.all[transfer.request_id]
                del self.rooms[transfer.room]
        self._set_due(transfer, timeout_us, step)

    def _set_due(self, transfer: Transfer, timeout_us: int | None, step: Step) -> None:
        transfer.due_us = self._scheduler.now_us + timeout_us if timeout_us is not None else None
        if transfer.due_us is not None:
            self._scheduler.set_timer(transfer.due_us, transfer.request_id)
            step.wake_by(transfer.due_us)

    def _unlock(self, transfer: Transfer, step: Step) -> None:
        self._scheduler.memory.hybrid.quarantine(transfer.request_id)
        if transfer.handle is not None:
            self._scheduler.memory.unlock_path(transfer.handle, transfer.namespace, step)
            transfer.handle = None

    def _free_slot(self, transfer: Transfer) -> None:
        if transfer.slot != NO_SLOT:
            self.free_slots.append(transfer.slot)
            transfer.slot = NO_SLOT

    # ----------------------------------------------------------------------------------------------- what the host says

    def advanced(self, event: TransferAdvanced, step: Step) -> None:
        """Take in how a transfer stands. Late and repeated facts are ignored.

        Raises ContractError, changing nothing, for one that cannot be.
        """
        transfer, cause = self.all.get(event.transfer_id), CAUSES[event.status]
        following = self.table.get((transfer.state, cause)) if transfer is not None and cause is not None else None
        if transfer is None or cause is None or following is None:
            if transfer is not None and cause not in REPEATABLE and cause is not None and transfer.state != "ready":
                raise ContractError(
                    f"transfer {event.transfer_id} is {event.status}, but it is {transfer.state} on this side"
                )
            return
        request = self._scheduler.requests.get(event.transfer_id)
        self._refuse_impossible(event, transfer, request)
        if request is None or transfer.state == "quarantined":  # no request waits for it any more
            self._move(transfer, cause, step)
        elif cause == "accepted":
            transfer.start_tokens = transfer.given_tokens = event.start_tokens
            self._move(transfer, cause, step)
        elif self.sends and cause == "done":
            ends = self._forget_sent(transfer)
            self._move(transfer, cause, step)
            self._scheduler.finish(request, ends, step)
        elif cause == "done" and transfer.weights == event.weights_version == self._scheduler.memory.weights_version:
            transfer.cached_tokens = min(event.cached_tokens, request.prompt_tokens)
            self._move(transfer, cause, step)
            extras.delivered(request, request.prompt_tokens)  # its host has the results of the prompt from over there
            self._begin_output(request, event, step)
        elif cause in ("failed", "done"):  # done with other weights is no good either
            self._forget_sent(transfer)
            self._move(transfer, "failed", step)
            self._lost(request, step)
        else:
            self._move(transfer, cause, step)

    def _refuse_impossible(self, event: TransferAdvanced, transfer: Transfer, request: Request | None) -> None:
        if event.status == "done" and self.sends and transfer.state == "in_flight" and transfer.ends is None:
            raise ContractError(f"transfer {event.transfer_id} is done before the result of its prompt was delivered")
        if event.status == "done" and not self.sends and (event.first_token is None or event.first_token < 0):
            raise ContractError(f"transfer {event.transfer_id} is done with the first token {event.first_token}")
        if event.status == "accepted" and request is not None and not 0 <= event.start_tokens < request.prompt_tokens:
            start = event.start_tokens
            raise ContractError(f"transfer {event.transfer_id} starts at {start} of {request.prompt_tokens} tokens")

    def _begin_output(self, request: Request, event: TransferAdvanced, step: Step) -> None:
        """The first token is there: send it, and end the request if it ends it, by the same precedence as any other
        token."""
        assert event.first_token is not None
        token = np.array([event.first_token], np.int32)
        request.tokens += token.tobytes()
        request.outputs = 1
        if event.grammar_ended:
            request.grammar_outputs = 1
        ends: FinishReason | None = "length" if request.max_new_tokens == 1 else None
        if request.min_new_tokens <= 1:
            if event.text_stop:
                ends = "text_stop"
            elif event.first_token in request.stop_token_ids:
                ends = "stop"
            elif event.grammar_ended:
                ends = "grammar"
        due = delivery.first_sent(request, event.text_held) if ends is None else 1
        if request.watches_text:
            request.sent = due
        if due:
            ids, offsets = np.array([request.request_id], np.int64), np.array([0], np.int32)
            step.commands.append(StreamTokens(ids, offsets, np.array([1], np.int32), token))
        if ends is not None:
            self._scheduler.finish(request, ends, step)

    # -------------------------------------------------------------------------------------------------- slots and pages

    def settle(self, step: Step) -> None:
        """Give waiting requests what is available now. Called after every event."""
        if self.change is not None:
            self._change_role(self.change, step)
        if not self.line or self._scheduler.paused or not self._scheduler.admits:
            return
        line = self.line
        if self._scheduler.config.schedule_policy == "priority":
            line = sorted(line, key=lambda one: -importance(self._scheduler.requests[one], self._scheduler.config))
        for request_id in list(line):
            transfer, request = self.all[request_id], self._scheduler.requests[request_id]
            if not self.free_slots:
                return
            if self.comes_after_another(request):
                continue  # and takes no slot, for which that one may wait
            if self.sends:
                transfer.slot = self.free_slots.pop()
                self._move(transfer, "joined", step)
                self._compute_here(request, step)
            elif not self._allocate(transfer, request, step):
                return

    def _change_role(self, change: RoleChange, step: Step) -> None:
        """End overdue requests; when none is left, here or on the other sides, take the new role."""
        if self._scheduler.requests and change.due_us <= self._scheduler.now_us:
            left = list(self._scheduler.requests.values())
            self._scheduler.leave_running(left)
            for request in left:
                self._scheduler.finish(request, "transfer", step, flush=True)
        if self._scheduler.requests:
            step.wake_by(change.due_us)
        elif not self._scheduler.in_flight and not self.all:
            self.change = None
            refused = self.switch_role(change.role)
            step.commands.append(ControlAnswered(change.control_id, not refused, refused))

    def _allocate(self, transfer: Transfer, request: Request, step: Step) -> bool:
        """Give the writer pages, if they can be had; the cached beginning of the prompt need not come."""
        if self._scheduler.waiting or self._scheduler.prefilling is not None:
            return False  # requests that lost their pages go first
        memory, page_size = self._scheduler.memory, self._scheduler.config.page_size
        if self._sessions.open:
            self._sessions.yield_until(memory, lambda: self._fits(request, memory.match_to_receive(request)), step)
        match = memory.match_to_receive(request)
        cached = match.pages
        pages = self._pages_of(request, match)
        if not self._fits(request, match):
            return False
        path = memory.path_of(match)
        transfer.handle = memory.radix.hold(match)
        if transfer.handle is not None:
            transfer.namespace = request.namespace
        transfer.pages = memory.alloc(pages, "admission", step)
        memory.hybrid.receive(request, path, transfer.pages, self._first_stop(request), step)
        transfer.start_tokens, transfer.weights = cached * page_size, memory.weights_version
        transfer.slot = self.free_slots.pop()
        self._move(transfer, "allocated", step)
        written = -(-request.prompt_tokens // page_size) - cached
        start = StartTransfer(
            transfer.request_id,
            transfer.room,
            "",
            "receive",
            transfer.pages[:written].copy(),
            transfer.start_tokens,
            stop_tokens=request.prompt_tokens,
            slot=transfer.slot,
            weights_version=transfer.weights,
            adapter_version=request.adapter.version,
            hybrid=memory.hybrid.to_receive(request, transfer.pages[:written]),
        )
        step.commands.append(start)
        return True

    @staticmethod
    def _first_stop(request: Request) -> int:
        """Positions that are computed once it has decoded for the first time."""
        return min(request.prompt_tokens + 1, request.reach)

    def _pages_of(self, request: Request, match: Match | None) -> int:
        """Pages that a request is given, beside those of a match."""
        return -(-self._first_stop(request) // self._scheduler.config.page_size) - (
            match.pages if match is not None else 0
        )

    def _fits(self, request: Request, match: Match | None) -> bool:
        """Whether a request may be given its pages, beside those of a match, and what is left is enough for all."""
        (running_batch, positions), memory = self._scheduler.all_running, self._scheduler.memory
        pages = self._pages_of(request, match)
        locking = match.evictable_pages if match is not None else 0
        free = memory.available_pages - locking
        coming = len(self.in_state("receiving", "ready"))
        alone = not self._scheduler.active and not coming
        page_size, reserved = self._scheduler.config.page_size, self.settings.reserved_tokens
        if pages > free:
            return False
        path, stop = memory.path_of(match), self._first_stop(request)
        if not memory.hybrid.has_room_to_receive(self._scheduler, request, path, stop, None if alone else reserved):
            return False
        if alone:
            return True  # the pool is its own: what passed the entry check fits
        if self._scheduler.config.reserve == "full":
            cached = match.pages if match is not None else 0
            promised = self._scheduler.reserve_of(running_batch, positions) // page_size + self.promised_pages()
            return -(-request.reach // page_size) - cached <= free - promised
        retractable = int(positions.sum())
        largest = 0
        if running_batch.size:
            whole = running_batch.prompts + np.minimum(running_batch.limits - running_batch.prompts, CLIP)
            largest = int(whole.max()) - retractable
        left = free * page_size - max(reserved * (self._scheduler.active + coming), largest)
        cached = match.pages * page_size if match is not None else 0
        whole_need = request.prompt_tokens + min(request.max_new_tokens, CLIP_MAX_NEW_TOKENS) - cached
        return max(pages * page_size + reserved, whole_need - retractable) <= left

    def promised_pages(self) -> int:
        """Pages that requests whose KV is coming, or has come, will open beside those they were given."""
        page_size = self._scheduler.config.page_size
        return sum(
            -(-self._scheduler.requests[one.request_id].reach // page_size)
            - one.start_tokens // page_size
            - one.pages.size
            for one in self.in_state("receiving", "ready")
        )

    # ------------------------------------------------------------------------------------------------ launch and result

    def give_parts(self, batch: InFlight, step: Step) -> None:
        """A batch that computes prompts was launched: its positions are sent behind it."""
        plan, page_size, hybrid = batch.plan, self._scheduler.config.page_size, self._scheduler.memory.hybrid
        for i in range(plan.extend_rows):
            request, stop = batch.requests[i], int(plan.stops[i])
            if batch.dead and plan.rows[i] in batch.dead:
                continue  # it left a rank between proposal and launch
            transfer = self.all.get(request.request_id)
            if not self.sends or transfer is None or stop <= transfer.given_tokens:
                continue
            start, last = transfer.given_tokens, stop >= request.prompt_tokens
            if transfer.state == "waiting":
                transfer.weights = self._scheduler.memory.weights_version
                self._scheduler.memory.lend(request.row, request.request_id)
            pages = self._scheduler.memory.table.pages[request.row, start // page_size : -(-stop // page_size)].copy()
            part = StartTransfer(
                transfer.request_id,
                transfer.room,
                "",
                "send",
                pages,
                start,
                plan.batch_id,
                last,
                stop_tokens=stop,
                slot=transfer.slot,
                weights_version=transfer.weights,
                cached_tokens=max(request.cached_tokens, 0),
                adapter_version=request.adapter.version,
                hybrid=hybrid.to_send(request, start, pages, last=last),
            )
            step.commands.append(part)
            transfer.given_tokens = stop
            self._move(transfer, "all_given" if last else "part_given", step)

    def keeps(self, request: Request, reason: FinishReason) -> bool:
        """Its first token ends a request here, but it stays until all of its KV was sent."""
        transfer = self.all.get(request.request_id)
        if transfer is None or transfer.state != "in_flight":
            return False
        transfer.ends = reason
        self.sending += 1
        self._scheduler.retry_admission()
        self._scheduler.give_place(request)
        return True

    def take_rows(self, step: Step) -> list[ExtendPart]:
        """Ready requests take a row with all their pages; the first token is their part of the next batch."""
        parts, adapters = [], self._scheduler.memory.adapters
        for request_id in list(self.ready):
            transfer, request = self.all[request_id], self._scheduler.requests[request_id]
            if (
                self._scheduler.active >= self._scheduler.config.max_running_requests
                or not self._scheduler.memory.table.row_available()
            ):
                break
            if not self._scheduler.microbatches.has_place():
                break
            if request.open_prerequisites > 1 or not adapters.has_place_for(request.adapter):
                continue  # for its grammar, or its adapter
            start, stop = request.prompt_tokens, request.prompt_tokens + 1
            row = self._scheduler.memory.adopt_row(request, transfer.handle, transfer.pages, stop)
            transfer.handle, transfer.pages = None, NO_ROWS
            self._scheduler.meet_prerequisite(request)
            request.cached_tokens = transfer.cached_tokens
            request.chunks = 1
            self._scheduler.occupy(request)
            sent = request.prompt_tokens - transfer.start_tokens
            waited_us = self._scheduler.now_us - request.waiting_since_us
            admitted = RequestAdmitted(
                self._scheduler.now_us, request_id, row, transfer.start_tokens, 1, waited_us, sent
            )
            completed = PrefillCompleted(self._scheduler.now_us, request_id, 1)
            for decided in (admitted, completed):
                request.advance(decided)
                step.decided.append(decided)
            self._move(transfer, "joined", step)
            parts.append(ExtendPart(request, start, stop))
        return parts

    # --------------------------------------------------------------------------------------------------------- the role

    def switch_role(self, role: Role, *, tried: bool = False) -> str:
        """Make an idle engine one of this role; if `tried`, only check whether it could be.

        Returns: why not, or nothing.
        """
        unset = dict.fromkeys(TRANSFER_SETTINGS, msgspec.UNSET) if role == "mixed" else {}
        try:
            config = msgspec.structs.replace(self._scheduler.config, role=role, **unset)
        except ConfigError as error:
            return str(error).replace("\n", "; ")
        if role == "prefill" and self._sessions.open:
            return f"{len(self._sessions.open)} sessions are open, and prefill engines have none; close them first"
        if not tried:
            self._scheduler.reconfigure(config)
            self._take_role(config)
        return ""

    def change_role(self, control_id: int, role: Role, within_us: int) -> None:
        """Take no new requests; become `role` once nothing is left, and end what is left after `within_us`."""
        self.change = RoleChange(control_id, role, self._scheduler.now_us + within_us)

    def keep_role(self, step: Step) -> None:
        """Give up a change of the role that has not taken place."""
        if self.change is not None:
            changing, self.change = self.change, None
            answer = ControlAnswered(changing.control_id, False, "resumed before everything had ended")
            step.commands.append(answer)

    def comes_after_another(self, request: Request) -> bool:
        """Whether a request is a turn whose prompt is not known yet, or a sample that follows its leader.

        Behind the leader less of its prompt is computed and sent.
        """
        follows = request.extras is not None and request.extras.leader != NO_REQUEST
        return self._scheduler.waits_for_turn(request) or follows

    # --------------------------------------------------------------------------------------------------------- snapshot

    def part(self) -> TransfersPart:
        """Return the state for a snapshot, with the rows that transfers read."""
        if not self.hands_over:
            return TransfersPart()
        images = []
        for transfer in self.all.values():
            values = {name: getattr(transfer, name) for name in TransferImage.__struct_fields__}
            values["pages"] = transfer.pages.tobytes()
            values["handle"] = transfer.handle.number if transfer.handle is not None else None
            images.append(TransferImage(**values))
        lent = self._scheduler.memory.deferred.lent_images()
        change = self.change if self.change is not None else msgspec.UNSET
        queues = list(self.line), list(self.ready), list(self.free_slots)
        return TransfersPart(TransfersImage(images, *queues, lent, change))

    def load(self, part: TransfersPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        image = part.transfers
        if image is None:
            return
        for one in image.transfers:
            values = {name: getattr(one, name) for name in TransferImage.__struct_fields__}
            values["pages"] = np.frombuffer(one.pages, np.int32)
            values["handle"] = restored.nodes[one.handle] if one.handle is not None else None
            self.all[one.request_id] = Transfer(**values)
            self.rooms[one.room] = one.request_id
        self.line, self.ready, self.free_slots = list(image.line), list(image.ready), list(image.free_slots)
        self.change = image.change if isinstance(image.change, RoleChange) else None
        self.sending = sum(transfer.ends is not None for transfer in self.all.values())
        self._scheduler.memory.deferred.load_lent(image.lent)

    # ------------------------------------------------------------------------------------------------------ invariants

    def handles(self) -> list[RadixNode]:
        """Return the locks on what this engine has of prompts whose KV will come."""
        return [one.handle for one in self.all.values() if one.handle is not None]

    def owned_pages(self) -> Iterator[tuple[str, Int32s]]:
        """Yield the pages that transfers write, by request."""
        for one in self.all.values():
            yield f"the transfer of r{one.request_id}", one.pages

    def blocked_requests(self) -> list[RequestId]:
        """Return the requests that are held for their transfers."""
        return [one.request_id for one in self.in_state(*sorted(HELD))]

    def check_state(self, facts: Facts) -> None:
        """S1, S5, S31, L2, L6: slots have one holder; what the other side may touch is kept; a request that can go on
        does."""
        scheduler, memory = self._scheduler, self._scheduler.memory
        if not self.hands_over:
            same("S31 rows that are read from elsewhere", memory.deferred.lent, {})
            same("S33 sending", self.sending, 0)
            return
        everyone = list(self.all.values())
        slots = [*self.free_slots, *(one.slot for one in everyone if one.slot != NO_SLOT)]
        same("S1 metadata slots", sorted(slots), list(range(self.settings.slots)))
        same("S31 rooms", self.rooms, {one.room: one.request_id for one in everyone})
        lines = [*self.line, *self.ready]
        same("S15 lines of transfers", sorted(lines), sorted(one.request_id for one in self.in_state(*QUEUED)))
        lent = {one.request_id: row for row, one in memory.deferred.lent.items()}
        left = [deferred.row for deferred in memory.deferred.rows]
        for one in everyone:
            if (one.request_id in facts.requests) != (one.state != "quarantined") and self.sends:
                fail(
                    f"S16: the transfer of r{one.request_id} is {one.state}, but its request is not there, or still is"
                )
            touched = self.sends and one.state in TOUCHED
            if touched != (one.request_id in lent):
                fail(f"S31: the transfer of r{one.request_id} is {one.state}, but rows {lent} are read from elsewhere")
            request = facts.requests.get(one.request_id)
            if (
                touched
                and lent[one.request_id] not in left
                and (request is None or request.row != lent[one.request_id])
            ):
                fail(f"S31: row {lent[one.request_id]} is read by the transfer of r{one.request_id} and has no holder")
            if not self.sends and one.state in ("receiving", "ready") and request is not None:
                held = one.start_tokens // facts.config.page_size + one.pages.size
                if held * facts.config.page_size < min(request.prompt_tokens + 1, request.reach):
                    fail(f"L6: {request.name} is given {held} pages, and would wait for more while it holds them")
        if (
            facts.launch_found_nothing
            and not facts.in_flight
            and not scheduler.paused
            and not scheduler.launches_blocked
        ):
            able = [one for one in self.ready if facts.requests[one].open_prerequisites == 1]
            groups = scheduler.microbatches
            owed = groups.owes_elsewhere() or groups.current.decode_owed
            if groups.several and (owed or not groups.has_place()):
                able = []  # another microbatch goes first, or has a place or the pages
            able = [one for one in able if memory.adapters.has_place_for(facts.requests[one].adapter)]
            if able and scheduler.active < facts.config.max_running_requests:
                fail(f"L2: {able} have all their KV, nothing is in flight, and nothing was launched")
        alone = not scheduler.active and not self.holds_pages and not facts.in_flight and not scheduler.waiting
        if memory.operations.device_busy:
            alone = False  # a move locks pages, and its answer gives them
        if any(one.slot != NO_SLOT for one in everyone):
            alone = False  # a request with one waits for a grammar or for media
        first = [one for one in self.line if not self.comes_after_another(facts.requests[one])]
        if alone and first and not scheduler.paused and scheduler.admits:
            fail(f"L2: {first} wait for pages or slots, which are all available")
        change = self.change
        if change is not None and facts.requests and scheduler.now_us >= change.due_us:
            fail(f"L1: {list(facts.requests)} are live {scheduler.now_us - change.due_us} us after the role was due")
        if change is not None and not facts.requests and not facts.in_flight and not self.all:
            fail(f"L1: nothing is left, and it is not {change.role} yet")
        self._check_hybrid(everyone)

    def _check_hybrid(self, everyone: list[Transfer]) -> None:
        """S31: blocks of layers without full attention are reserved for the requests whose KV will come."""
        hybrid = self._scheduler.memory.hybrid
        receiving = everyone if not self.sends else []
        coming = sorted(one.request_id for one in receiving if one.state in ("receiving", "ready"))
        given_up = sorted(one.request_id for one in receiving if one.state == "quarantined")
        if (window := hybrid.window) is not None:
            same(
                "S31 windows that will come", (sorted(window.incoming), sorted(window.quarantined)), (coming, given_up)
            )
        if (states := hybrid.states) is not None:
            same("S31 states that will come", sorted(states.incoming), sorted(coming + given_up))


def diagram(table: Table) -> str:
    """A state diagram of a table, in Mermaid; what docs/distributed.md shows."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, cause), following in table.items():
        arrows.setdefault((state, following), []).append(cause)
    lines = [f"    {state} --> {following}: {', '.join(causes)}" for (state, following), causes in arrows.items()]
    return "\n".join(("stateDiagram-v2", *lines))


def table_text(table: Table) -> str:
    """A table in Markdown; what docs/distributed.md shows."""
    causes = [cause for cause in get_args(TransferCause) if any(told == cause for _, told in table)]
    states = [state for state in get_args(TransferState) if any(state in (was, to) for (was, _), to in table.items())]
    rows = [["state", "means", *causes], ["---"] * (len(causes) + 2)]
    rows += [
        [
            f"`{state}`",
            MEANINGS[state],
            *(f"`{table[state, cause]}`" if (state, cause) in table else "" for cause in causes),
        ]
        for state in states
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
