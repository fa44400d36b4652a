"""Control requests: requests about the engine itself. Each is answered exactly once, most of them at once.

running --Pause--> paused --Resume--> running      a second Pause applies its own mode to the requests that are left;
                                                   mode "admission" stops admission, and launches go on
open --Drain--> draining --the engine is idle--> answered with ok=True
                         --Resume, or a Pause that keeps requests--> answered with ok=False
UpdateWeights, ReleaseMemory, ResumeMemory         answered after the device has done it: see `maintenance`
OpenSession, CloseSession                          see `sessions`
LoadAdapterControl, UnloadAdapterControl           see `adapters`; an unload is answered once no request uses it

Dispatch is by the class of the control. A handler returns the reason of a refusal, DONE (""), or LATER (None) if the
answer follows later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from lockstep.core.admin.maintenance import Job, Maintenance
from lockstep.core.contract.commands import ControlAnswered, FreezeHeap, StartProfile, Step, StopProfile
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    CancelAll,
    CancelMany,
    ChangeRole,
    CloseSession,
    ControlRequested,
    Drain,
    Flush,
    FlushUnused,
    FreezeGc,
    GetState,
    LoadAdapterControl,
    OpenSession,
    Pause,
    Profile,
    ReleaseMemory,
    Resume,
    ResumeMemory,
    SetState,
    SlowDown,
    SwitchRole,
    UnloadAdapterControl,
    UpdateWeights,
)
from lockstep.core.features.disaggregation import Transfers
from lockstep.core.features.sessions import Sessions
from lockstep.core.features.view import AdminView
from lockstep.core.kv.component import Component, Restored

LATER = None
DONE = ""

SETTABLE = (
    "schedule_conservativeness",
    "max_running_requests",
    "max_queued_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "stream_interval",
    "force_stream_interval",
)
"""Settings that may change at run time. Changed intervals apply to requests that arrive later."""

MAY_BE_UNSET = ("max_queued_requests", "chunked_prefill_size")


class Pace(msgspec.Struct):
    """Operators' settings for launches: the gap between two launches, and the profile that is running."""

    gap_us: int = 0
    not_before_us: int = 0  # earliest time of the next launch, while there is a gap
    profiling: bool = False
    profile_launches_left: int | None = None  # None: until it is stopped

    @property
    def watches(self) -> bool:
        """Whether launches must be reported by `launched`."""
        return self.profiling or self.gap_us > 0

    def launched(self, now_us: int, step: Step) -> None:
        """Start the gap after a launch, and end a profile with its last launch."""
        self.not_before_us = now_us + self.gap_us
        if self.profile_launches_left is not None:
            self.profile_launches_left -= 1
            if not self.profile_launches_left:
                self.end_profile(step)

    def restarted(self) -> None:
        """Forget a running profile, which ended with the device."""
        self.profiling, self.profile_launches_left = False, None

    def end_profile(self, step: Step) -> None:
        """Order the host to stop the profiler."""
        self.profiling = False
        self.profile_launches_left = None
        step.commands.append(StopProfile())


NO_LORA = "LoRA is off (`max_loras` is not set)"


class ControlsPart(msgspec.Struct):
    """Pause, drains and pace in a snapshot."""

    paused: bool
    draining: bool
    drains: list[int]
    pace: Pace
    admits: bool | msgspec.UnsetType = msgspec.UNSET  # false: an operator paused admission


class Controls(Component):
    """Applies control requests, and holds the state that operators set: pause, drain, the pace of launches."""

    PART = ControlsPart
    EMPTY_AT_REST = ("drains",)

    def __init__(
        self, scheduler: AdminView, sessions: Sessions, transfers: Transfers, maintenance: Maintenance
    ) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._transfers = transfers
        self._maintenance = maintenance
        self._ranks = 1 if scheduler.config.dp_ranks is msgspec.UNSET else scheduler.config.dp_ranks
        self.paused = False
        self.admits = True  # false: an operator paused admission, and running requests go on
        self.draining = False
        self.drains: list[int] = []  # control ids that are answered once everything has ended
        self.pace = Pace()

    def part(self) -> ControlsPart:
        """Return the state for a snapshot."""
        admits = msgspec.UNSET if self.admits else False
        return ControlsPart(self.paused, self.draining, list(self.drains), self.pace, admits)

    def load(self, part: ControlsPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        self.paused, self.draining, self.drains, self.pace = part.paused, part.draining, part.drains, part.pace
        self.admits = part.admits is msgspec.UNSET

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield the end of the gap between two launches."""
        pace, scheduler = self.pace, self._scheduler
        if pace.gap_us and scheduler.requests and pace.not_before_us > scheduler.now_us:
            yield pace.not_before_us, "the next launch may be made"

    def apply(self, event: ControlRequested, step: Step) -> None:
        """Carry out a control request, or answer it with the reason of the refusal."""
        control = event.control
        if isinstance(control, GetState):
            step.commands.append(ControlAnswered(event.control_id, True, stats=self._scheduler.stats()))
            return
        refused = HANDLERS[type(control)](self, event.control_id, control, step)
        if refused is not LATER:
            step.commands.append(ControlAnswered(event.control_id, not refused, refused))

    def answer_drains(self, step: Step, *, ok: bool, message: str = "") -> None:
        """Answer all pending drains."""
        for control_id in self.drains:
            step.commands.append(ControlAnswered(control_id, ok, message))
        self.drains = []

    # ----------------------------------------------------------------------------------- pause, drain, flush and cancel

    def _flush(self, control_id: int, control: Flush, step: Step) -> str | None:
        if self._scheduler.requests or self._scheduler.in_flight:
            waiting = len(self._scheduler.waiting) + len(self._scheduler.blocked)
            running = len(self._scheduler.requests) - waiting
            return f"not idle: {waiting} waiting, {running} running, {len(self._scheduler.in_flight)} in flight"
        if self._transfers.all:
            return f"not idle: {len(self._transfers.all)} transfers are open"
        moves = len(self._scheduler.memory.operations)
        if moves:
            return f"not idle: pages move between cache tiers, in {moves} operations"
        self._scheduler.void_kv()
        self._scheduler.memory.empty_cache("flush", step)
        return DONE

    def _flush_unused(self, control_id: int, control: FlushUnused, step: Step) -> str | None:
        running = sum(request.row >= 0 for request in self._scheduler.requests.values())
        if running or self._scheduler.in_flight:
            return f"not idle: {running} running, {len(self._scheduler.in_flight)} in flight"
        tiers = self._scheduler.memory.tiers
        if tiers.operations:
            return f"not idle: pages move between cache tiers, in {len(tiers.operations)} operations"
        self._scheduler.void_kv()
        self._scheduler.memory.empty_cache("flush", step)
        return DONE

    # mechanism: pause (decided)
    def _pause(self, control_id: int, control: Pause, step: Step) -> str | None:
        if control.mode == "admission":
            self.admits = False
        else:
            self.paused = True
        if control.mode == "cancel":
            self._scheduler.cancel_all(list(self._scheduler.requests.values()), step)
        elif control.mode == "retract":
            self._scheduler.retract_all("pause", step)
        if self._scheduler.requests:
            self.answer_drains(step, ok=False, message="paused before everything had ended")
        return DONE

    def _resume(self, control_id: int, control: Resume, step: Step) -> str | None:
        self.paused = False
        self.admits = True
        self.draining = False
        self.answer_drains(step, ok=False, message="resumed before everything had ended")
        self._transfers.keep_role(step)
        return DONE

    def _drain(self, control_id: int, control: Drain, step: Step) -> str | None:
        if self.paused and self._scheduler.requests:
            return f"paused with {len(self._scheduler.requests)} requests unfinished; resume first"
        self.draining = True
        self.drains.append(control_id)  # answered by the engine once it is idle, perhaps in this step
        return LATER

    def _cancel_many(self, control_id: int, control: CancelMany, step: Step) -> str | None:
        ids = dict.fromkeys(control.request_ids)
        self._scheduler.cancel_all(
            [self._scheduler.requests[request_id] for request_id in ids if request_id in self._scheduler.requests], step
        )
        return DONE

    def _cancel_all(self, control_id: int, control: CancelAll, step: Step) -> str | None:
        self._scheduler.cancel_all(list(self._scheduler.requests.values()), step)
        return DONE

    # ------------------------------------------------------------------------------------------------------- the device

    def _maintain(
        self, control_id: int, control: UpdateWeights | ReleaseMemory | ResumeMemory, step: Step
    ) -> str | None:
        refused = self._maintenance.objection(control)
        if refused:
            return refused
        self._maintenance.jobs.append(Job(control_id, control))
        return LATER

    def _profile(self, control_id: int, control: Profile, step: Step) -> str | None:
        pace = self.pace
        if control.action == "stop":
            if not pace.profiling:
                return "no profile is running"
            pace.end_profile(step)
            return DONE
        if pace.profiling:
            return "a profile is running already; stop it first"
        if control.launches is not None and control.launches < 1:
            return f"`launches` must be at least 1 or left out, got {control.launches}"
        pace.profiling = True
        pace.profile_launches_left = control.launches
        step.commands.append(StartProfile())
        return DONE

    def _freeze(self, control_id: int, control: FreezeGc, step: Step) -> str | None:
        step.commands.append(FreezeHeap())
        return DONE

    # --------------------------------------------------------------------------------------------------------- settings

    def _slow_down(self, control_id: int, control: SlowDown, step: Step) -> str | None:
        if control.gap_us < 0:
            return f"`gap_us` must be 0 or more, got {control.gap_us}"
        self.pace.gap_us = control.gap_us
        self.pace.not_before_us = self._scheduler.now_us + control.gap_us
        return DONE

    def _set_state(self, control_id: int, control: SetState, step: Step) -> str | None:
        name, value = control.name, control.value
        if name not in SETTABLE:
            return f"`{name}` cannot change at run time; what can: {', '.join(SETTABLE)}"
        if value is None and name not in MAY_BE_UNSET:
            return f"`{name}` must be a number, got none"
        if isinstance(value, float) and name != "schedule_conservativeness":
            return f"`{name}` must be a whole number, got `{value}`"
        rows = self._scheduler.memory.table.rows_max
        try:
            config = msgspec.structs.replace(self._scheduler.config, **{name: value, "request_rows": rows})
        except ConfigError as error:
            return str(error).replace("\n", "; ")
        self._scheduler.reconfigure(config)
        if name == "schedule_conservativeness":
            self._scheduler.reset_ratio()
        self._scheduler.retry_admission()
        return DONE

    def _switch_role(self, control_id: int, control: SwitchRole, step: Step) -> str | None:
        if not self._scheduler.idle:
            requests, batches = len(self._scheduler.requests), len(self._scheduler.in_flight)
            moves = len(self._scheduler.memory.operations)
            more = f", {moves} moves between cache tiers" if moves else ""
            transfers = len(self._transfers.all)
            return (
                f"not idle: {requests} requests, {batches} batches in flight, {transfers} transfers{more}; drain first"
            )
        if self._ranks > 1:
            return self._refusal_of_rank()
        return self._transfers.switch_role(control.role)

    def _refusal_of_rank(self) -> str:
        return f"this is one of {self._ranks} data-parallel ranks, which cannot change their role one at a time"

    def _change_role(self, control_id: int, control: ChangeRole, step: Step) -> str | None:
        transfers = self._transfers
        if not transfers.hands_over:
            return "this is no prefill or decode engine: drain it, then switch its role"
        if self._ranks > 1:
            return self._refusal_of_rank()
        if transfers.change is not None:
            return f"its role is being changed to {transfers.change.role} already"
        if control.within_us < 0:
            return f"`within_us` must be 0 or more, got {control.within_us}"
        if control.role == self._scheduler.config.role:
            return DONE
        refused = transfers.switch_role(control.role, tried=True)
        if refused:
            return refused
        transfers.change_role(control_id, control.role, control.within_us)
        return LATER

    # --------------------------------------------------------------------------------------------------------- sessions

    def _open_session(self, control_id: int, control: OpenSession, step: Step) -> str | None:
        transfers = self._transfers
        if transfers.sends:
            return (
                "this is a prefill engine: sessions are kept by decode engines, which send their turns as whole prompts"
            )
        if transfers.change is not None:
            return f"the role is being changed to {transfers.change.role}; open the session on another engine"
        return self._sessions.begin(control)

    def _close_session(self, control_id: int, control: CloseSession, step: Step) -> str | None:
        return self._sessions.end(control.session, "closed", step)

    # --------------------------------------------------------------------------------------------------------- adapters

    def _load_adapter(self, control_id: int, control: LoadAdapterControl, step: Step) -> str | None:
        adapters = self._scheduler.memory.adapters
        return adapters.register(control) if adapters.present else NO_LORA

    def _unload_adapter(self, control_id: int, control: UnloadAdapterControl, step: Step) -> str | None:
        adapters = self._scheduler.memory.adapters
        if not adapters.present:
            return NO_LORA
        return adapters.withdraw(control.adapter, control_id) or LATER


HANDLERS: dict[type, Callable[[Controls, int, Any, Step], str | None]] = {
    Flush: Controls._flush,
    FlushUnused: Controls._flush_unused,
    Pause: Controls._pause,
    Resume: Controls._resume,
    Drain: Controls._drain,
    CancelMany: Controls._cancel_many,
    CancelAll: Controls._cancel_all,
    UpdateWeights: Controls._maintain,
    ReleaseMemory: Controls._maintain,
    ResumeMemory: Controls._maintain,
    Profile: Controls._profile,
    FreezeGc: Controls._freeze,
    SetState: Controls._set_state,
    SlowDown: Controls._slow_down,
    SwitchRole: Controls._switch_role,
    ChangeRole: Controls._change_role,
    OpenSession: Controls._open_session,
    CloseSession: Controls._close_session,
    LoadAdapterControl: Controls._load_adapter,
    UnloadAdapterControl: Controls._unload_adapter,
}
"""The handler of each control request. A handler returns the reason of a refusal, DONE or LATER."""
