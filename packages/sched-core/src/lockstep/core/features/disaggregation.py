"""Disaggregated serving: the KV of a prompt is computed on a prefill engine and used on a decode engine.

A request with a *room* arrives at two engines. The prefill engine computes its prompt, draws its first token and sends
the KV in parts, each behind the batch that computes it. The decode engine allocates pages for the sender to write,
waits until all KV has arrived, and continues from the first token as if it had computed the prompt itself.

    prefill   bootstrap -> waiting (the waiting queue, its chunks) -> sending -> in flight -> over
    decode    preallocating -> receiving -> ready -> over: it runs

Each side has a state table, `SENDER` and `RECEIVER`: the next state by the state of a transfer and a cause. The state
changes only along these tables; docs/distributed.md contains them. A transfer is named by the request's id on its
engine, which is never reused. So an event about a transfer that is over is recognised as late and ignored.

**Shared pages.** Pages that the other engine may read or write belong to the transfer until it has *ended* on this
side: done, failed or link_down, which the host reports exactly once. If the request ends before that, the pages stay
in quarantine. On the decode side these are the pages that the sender writes; on the prefill side they are the pages of
the request's row, which `Memory.lent` pins.

**No request waits for pages while holding some.** A transfer receives all pages up to and including the one that its
first decode writes, or none. A ready request therefore needs a row and no page. The pages of a ready request can be
taken back, and a receiving transfer ends by itself. The reserve (`_fits`) is SGLang's: `num_reserved_decode_tokens` for
each running or arriving request, or the remaining need of the largest running request, whichever is more.

**A waiting dependent blocks no other request.** A sample that follows its leader and a turn that may not start take
neither a slot nor pages. Encoding begins only once the transfer decides that the prompt is computed here. A ready
request, which holds pages, receives its adapter before the waiting queue.

**A change of the role** (`RoleChange`) rejects new requests and ends the remaining ones when its time is over. It takes
place when nothing of the old role is left: no request, no batch, no transfer.
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
    BatchId,
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
from lockstep.core.requests.budget import CLIP_MAX_NEW_TOKENS, PrefillBudget
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.rules import clipped_output
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
"""State table of the prefill engine's side: (state, cause) -> next state."""

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
"""State table of the decode engine's side: (state, cause) -> next state."""

MEANINGS: dict[TransferState, str] = {
    "bootstrap": "held: the decode engine has not allocated pages yet",
    "accepted": "held: no metadata slot is free",
    "waiting": "in the waiting queue, or its prompt is being computed; nothing was sent",
    "sending": "parts are sent while the prompt is being computed",
    "in_flight": "the whole prompt is being sent",
    "awaited": "held: the prefill engine has not computed the prompt (allocation prefill_complete)",
    "preallocating": "held: it has no pages yet",
    "receiving": "held: the sender may write its pages",
    "ready": "held: its KV has arrived, and it needs only a row",
    "quarantined": "the request has gone on without it, or ended; pages and slot wait for the other side",
    "over": "nothing is held for it any more",
}
"""Meanings of the states. A request is *held* while it may not join the waiting queue."""

FIRST: dict[tuple[str, str], TransferState] = {
    ("prefill", "early"): "bootstrap",
    ("prefill", "prefill_complete"): "accepted",
    ("decode", "early"): "preallocating",
    ("decode", "prefill_complete"): "awaited",
}
"""The first state of a transfer, by the engine's role and `transfer_allocation`."""

REPEATABLE: frozenset[TransferCause] = frozenset({"accepted", "offered"})
"""Causes that may be repeated or late. They are ignored in states for which the table has no entry."""

TOUCHED: frozenset[TransferState] = frozenset({"sending", "in_flight", "receiving", "quarantined"})
"""States in which the other side may read or write pages."""

HELD: frozenset[TransferState] = frozenset({"bootstrap", "accepted", "awaited", "preallocating", "receiving", "ready"})
"""States in which the request is held for its transfer."""

CAUSES: dict[str, TransferCause | None] = {
    "accepted": "accepted",
    "offered": "offered",
    "moving": None,
    "done": "done",
    "failed": "failed",
    "link_down": "failed",
}
"""The cause in the state tables, by the status of a TransferAdvanced; None: no cause."""

QUEUED: tuple[TransferState, ...] = ("accepted", "preallocating", "ready")
"""States in which a transfer waits for a slot, for pages or for a row, in a queue."""

NO_SLOT = -1


class Transfer(msgspec.Struct):
    """The transfer of one request, on one of its two sides."""

    request_id: RequestId
    room: int
    state: TransferState
    slot: int = NO_SLOT  # its metadata slot
    start_tokens: int = 0  # positions before this one are on the decode engine already
    due_us: int | None = None  # time at which it is abandoned in this state
    weights: int = 0  # version of the weights that computed the KV
    given_tokens: int = 0  # sender: positions before this one were passed to the host, or need not be sent
    ends: FinishReason | None = None  # sender: the finish reason of its first token, once that was delivered
    cached_tokens: int = 0  # receiver: cached tokens of its prompt on the prefill engine
    namespace: str = ""  # receiver: namespace of the path that it locks
    pages: Int32s = NO_ROWS  # receiver: pages behind that path, up to the position of its first decode
    handle: RadixNode | None = None  # receiver: its lock on the part of the prompt that this engine has cached


class RoleChange(msgspec.Struct):
    """A pending change of the engine's role, which takes place once all accepted requests have ended."""

    control_id: int
    role: Role
    due_us: int  # time at which the remaining requests are ended


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
    """The fields of SchedConfig for transfers, of an engine that has transfers."""

    role: str
    allocation: str
    recompute: bool  # whether a prompt is computed here if its KV does not arrive
    reserved_tokens: int
    slots: int
    bootstrap_timeout_us: int | None
    transfer_timeout_us: int | None

    @staticmethod
    def of(config: SchedConfig) -> TransferSettings:
        """Return the settings of a prefill or a decode engine; all its transfer settings have values."""
        values: Any = config
        return TransferSettings(
            values.role,
            values.transfer_allocation,
            values.transfer_failure == "recompute",
            values.num_reserved_decode_tokens,
            values.transfer_slots,
            values.bootstrap_timeout_us,
            values.transfer_timeout_us,
        )


NO_TRANSFERS = TransferSettings("mixed", "", False, 0, 0, None, None)
"""The settings of a mixed engine, which has no transfers."""


class TransfersPart(msgspec.Struct):
    """Transfers in a snapshot; None: the engine hands nothing over."""

    transfers: TransfersImage | None = None


class Transfers(Component):
    """The transfers of a prefill or decode engine."""

    PART = TransfersPart

    def __init__(
        self, config: SchedConfig, scheduler: SchedulerView, sessions: Sessions, prerequisites: Prerequisites
    ) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._prerequisites = prerequisites
        self.all: dict[RequestId, Transfer] = {}  # transfers that are not over, in order of arrival
        self.rooms: dict[int, RequestId] = {}
        # requests that wait for a slot ("accepted"), or for a slot and pages ("preallocating")
        self.line: list[RequestId] = []
        self.ready: list[RequestId] = []  # requests with arrived KV that wait for a row
        self.change: RoleChange | None = None
        self.sending = 0  # requests with a computed prompt that only wait until it has been sent
        self._take_role(config)

    def _take_role(self, config: SchedConfig) -> None:
        """Adopt the role of these settings. A mixed engine has no transfers: `all` stays empty."""
        self.hands_over = config.hands_over
        self.settings = settings = TransferSettings.of(config) if config.hands_over else NO_TRANSFERS
        self.sends = settings.role == "prefill"
        self.table = SENDER if self.sends else RECEIVER
        self.first = FIRST.get((settings.role, settings.allocation), "bootstrap")
        self.free_slots: list[int] = list(range(settings.slots - 1, -1, -1))

    # ---------------------------------------------------------------------------------------------------------- queries

    def in_state(self, *states: TransferState) -> list[Transfer]:
        """Return the transfers in one of these states, by arrival."""
        return [transfer for transfer in self.all.values() if transfer.state in states]

    @property
    def holds_pages(self) -> bool:
        """Whether any transfer holds pages beside those of running requests' rows."""
        return any(transfer.state in TOUCHED or transfer.state == "ready" for transfer in self.all.values())

    @property
    def quiet(self) -> bool:
        """Whether a stretch of decodes alone requires no decision about transfers."""
        return not self.line and not self.ready and self.change is None

    def due_of(self, request_id: RequestId) -> int | None:
        """Return the time in us at which the transfer of a request is abandoned; None: never, or no transfer."""
        transfer = self.all.get(request_id)
        return transfer.due_us if transfer is not None else None

    def holds(self, request: Request) -> bool:
        """Return whether a request waits for its transfer: until its prompt may be computed here, or has arrived."""
        transfer = self.all.get(request.request_id)
        return transfer is not None and transfer.state in HELD

    def ready_on(self, adapter: Adapter) -> list[Request]:
        """Return the ready requests that run on this adapter."""
        ready = [self._scheduler.requests[request_id] for request_id in self.ready]
        return [request for request in ready if request.adapter == adapter]

    def adapters_wanted(self) -> list[Adapter]:
        """Return the adapters of ready requests; none while launches are blocked.

        Ready requests hold pages, so their adapters are loaded before those of the waiting queue.
        """
        if self._scheduler.launches_blocked:
            return []
        return [self._scheduler.requests[request_id].adapter for request_id in self.ready]

    def is_sent(self, request: Request) -> bool:
        """Return whether a request has a computed prompt and only waits until it has been sent."""
        transfer = self.all.get(request.request_id)
        return transfer is not None and transfer.ends is not None

    def is_given(self, request: Request) -> bool:
        """Return whether any KV of a request was passed to the host to be sent."""
        transfer = self.all.get(request.request_id)
        return transfer is not None and transfer.state in ("sending", "in_flight")

    # ------------------------------------------------------------------------------------------------ arrivals and ends

    def check(self, event: RequestArrived, samples: int) -> None:
        """Raise RequestRefused for an arrival that this side cannot serve. Samples have consecutive rooms."""
        if self.change is not None:
            raise RequestRefused("draining", f"the engine is becoming {self.change.role} and takes no new requests")
        if event.transfer_room is None:
            if self.sends and not event.max_new_tokens:
                return  # a request for the prompt alone needs no other engine
            raise RequestRefused("bad_request", f"`transfer_room` is missing: this is a {self.settings.role} engine")
        for room in range(event.transfer_room, event.transfer_room + samples):
            if room in self.rooms:
                raise RequestRefused(
                    "bad_request", f"`transfer_room` is {room}, which is the room of r{self.rooms[room]}"
                )
        if not event.max_new_tokens:
            raise RequestRefused("bad_request", "`max_new_tokens` is 0: with no output there is nothing to hand over")

    def take_in(self, request: Request, event: RequestArrived, step: Step) -> None:
        """Create the transfer of an accepted request and hold the request until the other side or pages are there."""
        if event.transfer_room is None:
            return
        transfer = Transfer(request.request_id, event.transfer_room, self.first)
        self.all[request.request_id] = transfer
        self.rooms[transfer.room] = request.request_id
        self._scheduler.add_prerequisite(request)
        self._enter(transfer, step)

    def turn_began(self, request: Request, step: Step) -> None:
        """Start the bootstrap timeout of a turn: its prompt is complete, so the host may inform the prefill engine."""
        transfer = self.all.get(request.request_id)
        if transfer is not None and transfer.state == "awaited":
            self._set_due(transfer, self.settings.bootstrap_timeout_us, step)

    def ended(self, request: Request, step: Step) -> None:
        """Abandon the transfer of a request that ends. Pages that the other side may touch go into quarantine."""
        transfer = self.all.get(request.request_id)
        if transfer is not None and transfer.state != "quarantined":
            self._abandon(transfer, step)

    def expired(self, request: Request, step: Step) -> None:
        """Abandon a transfer that reached the timeout of its state."""
        self._abandon(self.all[request.request_id], step)
        self._lost(request, step)

    def weights_changed(self, step: Step) -> None:
        """Discard KV of the replaced weights: ready requests are computed again, partly computed prompts fail.

        Nothing is in flight. A prompt that was completely computed before is still sent, with its version.
        """
        for transfer in self.in_state("waiting", "sending", "ready"):
            request = self._scheduler.requests[transfer.request_id]
            if transfer.state == "ready":
                self.give_up(request, step)
            elif request.row >= 0:
                self._scheduler.finish(request, "transfer", step)

    def restarted(self, step: Step) -> None:
        """End all transfers after the loss of the device. Their requests end, or are computed here."""
        for transfer in list(self.all.values()):
            request = self._scheduler.requests.get(transfer.request_id)
            if transfer.state != "quarantined":
                self._abandon(transfer, step)
                assert request is not None
                self._lost(request, step, requests_media=False)
            if transfer.state == "quarantined":
                self._move(transfer, "failed", step)

    def give_up(self, request: Request, step: Step) -> None:
        """Free the pages of a ready request: it joins the waiting queue and is computed here."""
        self._abandon(self.all[request.request_id], step)
        self._compute_here(request, step)

    def makes_way(self, budget: PrefillBudget, step: Step) -> bool:
        """Free the pages of the newest ready request for the chunked request, if nothing else frees any.

        Admitted while no other request was active, the chunked request may lack pages that transfers hold; with windows
        it has blocks for one chunk only. The ready request waits for its row or place.
        Returns: whether any were freed; they are added to the budget of the extend.
        """
        scheduler, memory = self._scheduler, self._scheduler.memory
        blocked = bool(self.ready) and not scheduler.in_flight and not scheduler.all_running[0].size
        if blocked and not memory.hybrid.present:
            blocked = not memory.available_pages and not memory.operations.device_busy
        if blocked:
            before = memory.available_pages
            self.give_up(scheduler.requests[self.ready[-1]], step)
            budget.gain(memory.available_pages - before)
        return blocked

    def give_up_all(self, step: Step) -> None:
        """Free the pages of all ready requests."""
        for transfer in self.in_state("ready"):
            self.give_up(self._scheduler.requests[transfer.request_id], step)

    def _lost(self, request: Request, step: Step, *, requests_media: bool = True) -> None:
        """Continue a request without its transfer: it is computed here if the settings allow it, or it ends.

        Args:
            requests_media: whether its media are requested now; a restart requests those of all requests later.
        """
        if self.sends or not self.settings.recompute:
            self._scheduler.finish(request, "transfer", step, flush=True)
        elif requests_media:
            self._compute_here(request, step)
        else:
            self._scheduler.join_queue(request)

    def _compute_here(self, request: Request, step: Step) -> None:
        """Compute the prompt of a request on this engine: it joins the waiting queue once its media are encoded."""
        if self._prerequisites.lost_media(request):
            self._prerequisites.await_media(request, step)
        self._scheduler.join_queue(request)

    def _abandon(self, transfer: Transfer, step: Step) -> None:
        """Abandon a transfer on this side, and inform the other side unless all KV has arrived."""
        if transfer.state != "ready":
            step.commands.append(CancelTransfer(transfer.request_id))
        self._forget_sent(transfer)
        self._move(transfer, "abandoned", step)

    def _forget_sent(self, transfer: Transfer) -> FinishReason:
        """Remove a transfer from the count `sending`. Returns the finish reason of its first token, or "transfer"."""
        ends = transfer.ends or "transfer"
        if transfer.ends is not None:
            self.sending -= 1
            transfer.ends = None
        return ends

    # ---------------------------------------------------------------------------------------------------- state changes

    def _move(self, transfer: Transfer, cause: TransferCause, step: Step) -> None:
        """Move a transfer along the table. Raises InvariantError for a pair that is not in the table."""
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
        """Apply the effects of the transfer's new state: its queue, its timeout, and what it frees."""
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

    # ---------------------------------------------------------------------------------------------- reports of the host

    def advanced(self, event: TransferAdvanced, step: Step) -> None:
        """Take in a report about a transfer. Late and repeated reports are ignored.

        Raises: ContractError, changing nothing, for a report that contradicts the state of the transfer.
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
            extras.delivered(request, request.prompt_tokens)  # the prefill engine delivers the prompt's results
            self._begin_output(request, event, step)
        elif cause in ("failed", "done"):  # KV of other weights counts as failed
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
        """Send the first token of a received request, and end the request if this token ends it.

        The precedence of finish reasons is that of any other token.
        """
        assert event.first_token is not None
        token = np.array([event.first_token], np.int32)
        request.tokens += token.tobytes()
        request.outputs = 1
        if event.grammar_ended:
            request.grammar_outputs = 1
        stops = request.min_new_tokens <= 1
        ends: FinishReason | None = "length" if request.max_new_tokens == 1 else None
        if stops and event.text_stop:
            ends = "text_stop"
        elif stops and event.first_token in request.stop_token_ids:
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
        """Assign free slots and pages to waiting requests, in order. Called after every event."""
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
                continue  # it takes no slot, since the request before it may wait for one
            if self.sends:
                transfer.slot = self.free_slots.pop()
                self._move(transfer, "joined", step)
                self._compute_here(request, step)
            elif not self._allocate(transfer, request, step):
                return

    def _change_role(self, change: RoleChange, step: Step) -> None:
        """End the remaining requests when their time is over; take the new role once the engine is idle."""
        if self._scheduler.requests and change.due_us <= self._scheduler.now_us:
            left = list(self._scheduler.requests.values())
            self._scheduler.leave_running(left)
            for request in left:
                self._scheduler.finish(request, "transfer", step, flush=True)
        if self._scheduler.requests:
            step.wake_by(change.due_us)
        elif self._scheduler.idle:
            self.change = None
            refused = self.switch_role(change.role)
            step.commands.append(ControlAnswered(change.control_id, not refused, refused))

    # mechanism: prefill-and-decode-engines (decided)
    def _allocate(self, transfer: Transfer, request: Request, step: Step) -> bool:
        """Allocate pages for the sender to write, if there is room. The cached beginning of the prompt is not sent.

        Returns: whether the pages were allocated.
        """
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
        """Return the positions that are computed once a request has decoded for the first time."""
        return min(request.prompt_tokens + 1, request.reach)

    def _pages_of(self, request: Request, match: Match) -> int:
        """Return the pages that a request receives in addition to those of a match."""
        return -(-self._first_stop(request) // self._scheduler.config.page_size) - match.pages

    def _fits(self, request: Request, match: Match) -> bool:
        """Return whether the pages of a request are free, and the rest suffices for the reserve of all others."""
        (running_batch, positions), memory = self._scheduler.all_running, self._scheduler.memory
        pages = self._pages_of(request, match)
        free = memory.available_pages - match.evictable_pages
        coming = len(self.in_state("receiving", "ready"))
        alone = not self._scheduler.active and not coming
        page_size, reserved = self._scheduler.config.page_size, self.settings.reserved_tokens
        if pages > free:
            return False
        path, stop = memory.path_of(match), self._first_stop(request)
        if not memory.hybrid.has_room_to_receive(self._scheduler, request, path, stop, None if alone else reserved):
            return False
        if alone:
            return True  # no other request needs the pool, and the check on arrival ensures that this one fits
        if self._scheduler.config.reserve == "full":
            promised = self._scheduler.reserve_of(running_batch, positions) // page_size + self.promised_pages()
            return -(-request.reach // page_size) - match.pages <= free - promised
        retractable = int(positions.sum())
        largest = 0
        if running_batch.size:
            whole = running_batch.prompts + clipped_output(running_batch.limits - running_batch.prompts)
            largest = int(whole.max()) - retractable
        left = free * page_size - max(reserved * (self._scheduler.active + coming), largest)
        whole_need = request.prompt_tokens + min(request.max_new_tokens, CLIP_MAX_NEW_TOKENS) - match.pages * page_size
        return max(pages * page_size + reserved, whole_need - retractable) <= left

    def promised_pages(self) -> int:
        """Return the pages that receiving and ready requests will open in addition to those they have."""
        page_size = self._scheduler.config.page_size
        return sum(
            -(-self._scheduler.requests[one.request_id].reach // page_size)
            - one.start_tokens // page_size
            - one.pages.size
            for one in self.in_state("receiving", "ready")
        )

    # ------------------------------------------------------------------------------------------------ launch and result

    def give_parts(self, batch: InFlight, step: Step) -> None:
        """Order the sending of the positions that a launched batch computes, behind that batch."""
        plan, page_size, hybrid = batch.plan, self._scheduler.config.page_size, self._scheduler.memory.hybrid
        for i in range(plan.extend_rows):
            request, stop = batch.requests[i], int(plan.stops[i])
            if batch.dead and plan.rows[i] in batch.dead:
                continue  # its request left between the proposal of a data-parallel rank and the launch
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
        """Keep a request that its first token ends until all of its KV has been sent. Returns: whether it is kept."""
        transfer = self.all.get(request.request_id)
        if transfer is None or transfer.state != "in_flight":
            return False
        transfer.ends = reason
        self.sending += 1
        self._scheduler.give_place(request)
        return True

    def take_rows(self, batch_id: BatchId, step: Step) -> list[ExtendPart]:
        """Assign rows to ready requests, with all their pages. Returns the extends of batch `batch_id` by one token."""
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
                continue  # it still waits for its grammar or its adapter
            start, stop = request.prompt_tokens, request.prompt_tokens + 1
            row = self._scheduler.memory.adopt_row(request, transfer.handle, transfer.pages, stop, batch_id, step)
            transfer.handle, transfer.pages = None, NO_ROWS
            self._scheduler.meet_prerequisite(request)
            request.cached_tokens = transfer.cached_tokens
            request.chunks = 1
            self._scheduler.occupy(request)
            sent, now_us = request.prompt_tokens - transfer.start_tokens, self._scheduler.now_us
            waited_us = now_us - request.waiting_since_us
            admitted = RequestAdmitted(now_us, request_id, row, transfer.start_tokens, 1, waited_us, sent)
            completed = PrefillCompleted(now_us, request_id, 1)
            for decided in (admitted, completed):
                request.advance(decided)
                step.decided.append(decided)
            self._move(transfer, "joined", step)
            parts.append(ExtendPart(request, start, stop))
        return parts

    # --------------------------------------------------------------------------------------------------------- the role

    def switch_role(self, role: Role, *, tried: bool = False) -> str:
        """Change the role of an idle engine; if `tried`, only check whether that is possible.

        Returns: the reason against it, or "".
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
        """Begin a change to `role`: new requests are rejected, and remaining ones are ended after `within_us`."""
        self.change = RoleChange(control_id, role, self._scheduler.now_us + within_us)

    def keep_role(self, step: Step) -> None:
        """Cancel a change of the role that has not taken place."""
        if self.change is not None:
            changing, self.change = self.change, None
            answer = ControlAnswered(changing.control_id, False, "resumed before everything had ended")
            step.commands.append(answer)

    def comes_after_another(self, request: Request) -> bool:
        """Return whether a request is a turn with an incomplete prompt, or a sample that follows its leader.

        A sample behind its leader has less of its prompt to compute and to send.
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
        """Return the locks on the cached prefixes of prompts whose KV will be received."""
        return [one.handle for one in self.all.values() if one.handle is not None]

    def owned_pages(self) -> Iterator[tuple[str, Int32s]]:
        """Yield the pages that transfers write, by request."""
        for one in self.all.values():
            yield f"the transfer of r{one.request_id}", one.pages

    def blocked_requests(self) -> list[RequestId]:
        """Return the requests that wait for their transfers."""
        return [one.request_id for one in self.in_state(*sorted(HELD))]

    def check_state(self, facts: Facts) -> None:
        """S1, S5, S31, L2, L6: slots have one holder; pages that the other side may use stay; no transfer is stuck."""
        scheduler, memory = self._scheduler, self._scheduler.memory
        if not self.hands_over:
            same("S31 rows that another engine reads", memory.deferred.lent, {})
            same("S33 sending", self.sending, 0)
            return
        everyone = list(self.all.values())
        slots = [*self.free_slots, *(one.slot for one in everyone if one.slot != NO_SLOT)]
        same("S1 metadata slots", sorted(slots), list(range(self.settings.slots)))
        same("S31 rooms", self.rooms, {one.room: one.request_id for one in everyone})
        lines = [*self.line, *self.ready]
        same("S15 queues of transfers", sorted(lines), sorted(one.request_id for one in self.in_state(*QUEUED)))
        lent = {one.request_id: row for row, one in memory.deferred.lent.items()}
        left = [deferred.row for deferred in memory.deferred.rows]
        for one in everyone:
            if (one.request_id in facts.requests) != (one.state != "quarantined") and self.sends:
                present = "live" if one.request_id in facts.requests else "not live"
                fail(f"S16: the transfer of r{one.request_id} is {one.state}, but its request is {present}")
            touched = self.sends and one.state in TOUCHED
            if touched != (one.request_id in lent):
                fail(f"S31: the transfer of r{one.request_id} is {one.state}, but another engine reads the rows {lent}")
            request = facts.requests.get(one.request_id)
            if (
                touched
                and lent[one.request_id] not in left
                and (request is None or request.row != lent[one.request_id])
            ):
                fail(f"S31: row {lent[one.request_id]} is read by the transfer of r{one.request_id}, has no holder")
            if not self.sends and one.state in ("receiving", "ready") and request is not None:
                held = one.start_tokens // facts.config.page_size + one.pages.size
                if held * facts.config.page_size < min(request.prompt_tokens + 1, request.reach):
                    fail(f"L6: {request.name} has {held} pages, and would wait for more while it holds them")
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
                able = []  # another microbatch is launched first, or has a place or the freed pages
            able = [one for one in able if memory.adapters.has_place_for(facts.requests[one].adapter)]
            if able and scheduler.active < facts.config.max_running_requests:
                fail(f"L2: {able} have all their KV, nothing is in flight, and nothing was launched")
        alone = not scheduler.active and not self.holds_pages and not facts.in_flight and not scheduler.waiting
        if memory.operations.device_busy:
            alone = False  # a move locks pages, which its answer unlocks
        if any(one.slot != NO_SLOT for one in everyone):
            alone = False  # a request with a slot waits for a grammar or for media
        first = [one for one in self.line if not self.comes_after_another(facts.requests[one])]
        if alone and first and not scheduler.paused and scheduler.admits:
            fail(f"L2: {first} wait for pages or slots that no other request holds")
        change = self.change
        if change is not None and facts.requests and scheduler.now_us >= change.due_us:
            late_us = scheduler.now_us - change.due_us
            fail(f"L1: {list(facts.requests)} are live {late_us} us after the role was to change")
        if change is not None and scheduler.idle:
            fail(f"L1: the engine is idle, and its role is not {change.role} yet")
        self._check_hybrid(everyone)

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield the ends of open transfers, and of the wait for a change of the role."""
        scheduler, bootstrap_us = self._scheduler, self.settings.bootstrap_timeout_us
        limits = dict.fromkeys(("receiving", "in_flight"), self.settings.transfer_timeout_us)
        if self.change is not None and scheduler.requests:
            yield self.change.due_us, "the role changes"
        for request in filter(None, map(scheduler.requests.get, self.all)):
            transfer = self.all[request.request_id]
            meets = transfer.state in ("bootstrap", "awaited") and not scheduler.waits_for_turn(request)
            if transfer.due_us is not None:
                yield transfer.due_us, f"the transfer of {request.name} is abandoned"
            elif (bootstrap_us if meets else limits.get(transfer.state)) is not None:
                fail(f"L7: the transfer of {request.name} is {transfer.state} without a due time")

    def _check_hybrid(self, everyone: list[Transfer]) -> None:
        """S31: blocks of layers without full attention are reserved for requests whose KV will be received."""
        hybrid = self._scheduler.memory.hybrid
        receiving = everyone if not self.sends else []
        coming = sorted(one.request_id for one in receiving if one.state in ("receiving", "ready"))
        given_up = sorted(one.request_id for one in receiving if one.state == "quarantined")
        if (window := hybrid.window) is not None:
            same("S31 windows to receive", (sorted(window.incoming), sorted(window.quarantined)), (coming, given_up))
        if (states := hybrid.states) is not None:
            same("S31 states to receive", sorted(states.incoming), sorted(coming + given_up))


def diagram(table: Table) -> str:
    """Return the state diagram of a table in Mermaid, as docs/distributed.md contains it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, cause), following in table.items():
        arrows.setdefault((state, following), []).append(cause)
    lines = [f"    {state} --> {following}: {', '.join(causes)}" for (state, following), causes in arrows.items()]
    return "\n".join(("stateDiagram-v2", *lines))


def table_text(table: Table) -> str:
    """Return a state table in Markdown, as docs/distributed.md contains it."""
    causes = [cause for cause in get_args(TransferCause) if any(used == cause for _, used in table)]
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
