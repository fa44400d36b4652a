"""Requests about the engine itself. Each is answered exactly once; most of them at once.

running --Pause--> paused --Resume--> running      a second Pause changes the mode only by doing more
open --Drain--> draining --everything ended--> answered; Resume, or a Pause that keeps work, ends the wait unanswered
                                               by what was asked: it is answered with ok=False
UpdateWeights, ReleaseMemory, ResumeMemory         answered when the device did it: see `maintenance`
OpenSession, CloseSession                          see `sessions`
LoadAdapterControl, UnloadAdapterControl           see `adapters`; an unload is answered when nobody uses it any more

Dispatch is by the class of the control. A handler returns why it refuses, "" when it is done, or None when the answer
comes later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.admin.maintenance import Job, objection
from lockstep.core.admin.stats import stats
from lockstep.core.contract.commands import ControlAnswered, FreezeHeap, StartProfile, Step, StopProfile
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    CancelAll,
    CancelMany,
    ChangeRole,
    CloseSession,
    ControlRequested,
    Drain,
    EngineRestarted,
    Flush,
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
from lockstep.core.features import prerequisites
from lockstep.core.features.disaggregation import RoleChange, take_role
from lockstep.core.requests.budget import NewTokenRatio

if TYPE_CHECKING:
    from lockstep.core.features.data_parallel import Rounds
    from lockstep.core.scheduler.engine import Engine

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
"""Settings that may change at run time. Intervals hold for requests that arrive from then on."""

MAY_BE_UNSET = ("max_queued_requests", "chunked_prefill_size")


def apply(engine: Engine, event: ControlRequested, step: Step) -> None:
    """Do what was asked, or refuse with the reason."""
    engine.now_us = event.time_us
    control = event.control
    if isinstance(control, GetState):
        step.commands.append(ControlAnswered(event.control_id, True, stats=stats(engine)))
        return
    refused = HANDLERS[type(control)](engine, event.control_id, control, step)
    if refused is not LATER:
        step.commands.append(ControlAnswered(event.control_id, not refused, refused))


def answer_drains(engine: Engine, step: Step, *, ok: bool, message: str = "") -> None:
    """Answer everybody who waits for the end of a drain."""
    for control_id in engine.drains:
        step.commands.append(ControlAnswered(control_id, ok, message))
    engine.drains = []


# ------------------------------------------------------------------------------------------------- stop, empty, go on


def _flush(engine: Engine, control_id: int, control: Flush, step: Step) -> str | None:
    if engine.requests or engine.in_flight:
        waiting = len(engine.waiting) + len(engine.held)
        running = len(engine.requests) - waiting
        return f"not idle: {waiting} waiting, {running} running, {len(engine.in_flight)} in flight"
    if engine.memory.tiers.operations:
        return f"not idle: pages move between cache tiers, in {len(engine.memory.tiers.operations)} operations"
    engine.sessions.lose_kv(engine)
    engine.memory.empty_cache("flush", step)
    return DONE


def _pause(engine: Engine, control_id: int, control: Pause, step: Step) -> str | None:
    engine.paused = True
    if control.mode == "cancel":
        engine.cancel_all(list(engine.requests.values()), step)
    elif control.mode == "retract":
        engine.retract_all("pause", step)
    if engine.requests:
        answer_drains(engine, step, ok=False, message="paused before everything had ended")
    return DONE


def _resume(engine: Engine, control_id: int, control: Resume, step: Step) -> str | None:
    engine.paused = False
    engine.draining = False
    answer_drains(engine, step, ok=False, message="resumed before everything had ended")
    if engine.transfers is not None and engine.transfers.change is not None:
        changing, engine.transfers.change = engine.transfers.change, None
        step.commands.append(ControlAnswered(changing.control_id, False, "resumed before everything had ended"))
    return DONE


def _drain(engine: Engine, control_id: int, control: Drain, step: Step) -> str | None:
    if engine.paused and engine.requests:
        return f"paused with {len(engine.requests)} requests unfinished; resume first"
    engine.draining = True
    engine.drains.append(control_id)  # answered by the engine once nothing is left, perhaps in this very step
    return LATER


def _cancel_many(engine: Engine, control_id: int, control: CancelMany, step: Step) -> str | None:
    ids = dict.fromkeys(control.request_ids)
    engine.cancel_all([engine.requests[request_id] for request_id in ids if request_id in engine.requests], step)
    return DONE


def _cancel_all(engine: Engine, control_id: int, control: CancelAll, step: Step) -> str | None:
    engine.cancel_all(list(engine.requests.values()), step)
    return DONE


# ---------------------------------------------------------------------------------------------------------- the device


def _maintain(
    engine: Engine, control_id: int, control: UpdateWeights | ReleaseMemory | ResumeMemory, step: Step
) -> str | None:
    refused = objection(engine, control)
    if refused:
        return refused
    engine.maintenance.jobs.append(Job(control_id, control))
    return LATER


def _profile(engine: Engine, control_id: int, control: Profile, step: Step) -> str | None:
    pace = engine.pace
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


def _freeze(engine: Engine, control_id: int, control: FreezeGc, step: Step) -> str | None:
    step.commands.append(FreezeHeap())
    return DONE


# ------------------------------------------------------------------------------------------------------------ settings


class Pace(msgspec.Struct):
    """What operators want of launches: a gap between them, and to be told of how many the profiler saw."""

    gap_us: int = 0
    not_before_us: int = 0  # the next launch, while there is a gap
    profiling: bool = False
    profile_launches_left: int | None = None  # None: until it is stopped

    @property
    def watches(self) -> bool:
        """Whether launches matter to it."""
        return self.profiling or self.gap_us > 0

    def launched(self, now_us: int, step: Step) -> None:
        """A batch was launched."""
        self.not_before_us = now_us + self.gap_us
        if self.profile_launches_left is not None:
            self.profile_launches_left -= 1
            if not self.profile_launches_left:
                self.end_profile(step)

    def end_profile(self, step: Step) -> None:
        self.profiling = False
        self.profile_launches_left = None
        step.commands.append(StopProfile())


def _slow_down(engine: Engine, control_id: int, control: SlowDown, step: Step) -> str | None:
    if control.gap_us < 0:
        return f"`gap_us` must be 0 or more, got {control.gap_us}"
    engine.pace.gap_us = control.gap_us
    engine.pace.not_before_us = engine.now_us + control.gap_us
    return DONE


def _set_state(engine: Engine, control_id: int, control: SetState, step: Step) -> str | None:
    name, value = control.name, control.value
    if name not in SETTABLE:
        return f"`{name}` cannot change at run time; what can: {', '.join(SETTABLE)}"
    if value is None and name not in MAY_BE_UNSET:
        return f"`{name}` must be a number, got none"
    if isinstance(value, float) and name != "schedule_conservativeness":
        return f"`{name}` must be a whole number, got `{value}`"
    rows = engine.memory.table.rows_max
    try:
        config = msgspec.structs.replace(engine.config, **{name: value, "request_rows": rows})
    except ConfigError as error:
        return str(error).replace("\n", "; ")
    engine.config = config
    if name == "schedule_conservativeness":
        engine.ratio = NewTokenRatio(config.schedule_conservativeness)
    engine.batch_is_full = False
    return DONE


def _switch_role(engine: Engine, control_id: int, control: SwitchRole, step: Step) -> str | None:
    transfers = len(engine.transfers.all) if engine.transfers is not None else 0
    if engine.requests or engine.in_flight or transfers:
        requests, batches = len(engine.requests), len(engine.in_flight)
        return f"not idle: {requests} requests, {batches} batches in flight, {transfers} transfers; drain first"
    if engine.ranks is not None:
        return _of_ranks(engine.ranks)
    return take_role(engine, control.role)


def _of_ranks(rounds: Rounds) -> str:
    return f"it is one of {rounds.ranks} data-parallel ranks, whose role none of them changes alone"


def _change_role(engine: Engine, control_id: int, control: ChangeRole, step: Step) -> str | None:
    transfers = engine.transfers
    if transfers is None:
        return "it is no prefill or decode engine: drain it, then switch its role"
    if engine.ranks is not None:
        return _of_ranks(engine.ranks)
    if transfers.change is not None:
        return f"its role is being changed to {transfers.change.role} already"
    if control.within_us < 0:
        return f"`within_us` must be 0 or more, got {control.within_us}"
    if control.role == engine.config.role:
        return DONE
    refused = take_role(engine, control.role, tried=True)
    if refused:
        return refused
    transfers.change = RoleChange(control_id, control.role, engine.now_us + control.within_us)
    return LATER


# ------------------------------------------------------------------------------------------------------------ sessions


def _open_session(engine: Engine, control_id: int, control: OpenSession, step: Step) -> str | None:
    transfers = engine.transfers
    if transfers is not None and transfers.sends:
        return "this is a prefill engine: sessions live on decode engines, and their turns come here as whole prompts"
    if transfers is not None and transfers.change is not None:
        return f"its role is being changed to {transfers.change.role}; open it elsewhere"
    return engine.sessions.begin(engine, control)


def _close_session(engine: Engine, control_id: int, control: CloseSession, step: Step) -> str | None:
    return engine.sessions.end(engine, control.session, "closed", step)


# ------------------------------------------------------------------------------------------------------------ adapters

NO_LORA = "LoRA is off (`max_loras` is not set)"


def _load_adapter(engine: Engine, control_id: int, control: LoadAdapterControl, step: Step) -> str | None:
    adapters = engine.memory.adapters
    return adapters.register(control) if adapters.present else NO_LORA


def _unload_adapter(engine: Engine, control_id: int, control: UnloadAdapterControl, step: Step) -> str | None:
    adapters = engine.memory.adapters
    if not adapters.present:
        return NO_LORA
    return adapters.withdraw(control.adapter, control_id) or LATER


HANDLERS: dict[type, Callable[[Engine, int, Any, Step], str | None]] = {
    Flush: _flush,
    Pause: _pause,
    Resume: _resume,
    Drain: _drain,
    CancelMany: _cancel_many,
    CancelAll: _cancel_all,
    UpdateWeights: _maintain,
    ReleaseMemory: _maintain,
    ResumeMemory: _maintain,
    Profile: _profile,
    FreezeGc: _freeze,
    SetState: _set_state,
    SlowDown: _slow_down,
    SwitchRole: _switch_role,
    ChangeRole: _change_role,
    OpenSession: _open_session,
    CloseSession: _close_session,
    LoadAdapterControl: _load_adapter,
    UnloadAdapterControl: _unload_adapter,
}


# ------------------------------------------------------------------------------------------------------------- restart


def restart(engine: Engine, event: EngineRestarted, step: Step) -> None:
    """The device state is gone: nothing is in flight or cached, and unfinished requests wait again, first.

    Tokens delivered so far are kept; those sampled in flight are drawn again. Results of older generations are void.
    A profile ends with the device that took it. Pause, drain, sessions and their tokens stay.
    """
    if event.generation <= engine.generation:
        raise ContractError(f"restart into generation {event.generation}, but this is generation {engine.generation}")
    engine.now_us = event.time_us
    engine.generation = event.generation
    engine.media.void()  # before anybody ends below: what that lets others ask for is not to replace what is gone
    tiers, engine.memory.tiers = (
        engine.memory.tiers,
        NoTiers(engine.memory),
    )  # what is given back below is worth no copy
    if engine.transfers is not None:
        engine.transfers.restarted(engine, step)
    if engine.ranks is not None:
        engine.ranks.restarted(event.generation)
    line = engine.waiting
    engine.waiting = []
    tiers.void(event.generation, step)
    engine.retract_all("restart", step)
    engine.in_flight.clear()
    line = [request for request in line if not prerequisites.lost_media(engine, request)]
    engine.waiting = sorted(engine.waiting, key=lambda request: request.request_id) + line
    for request in list(engine.requests.values()):
        if prerequisites.lost_media(engine, request):
            prerequisites.await_media(engine, request, step)
    engine.batch_is_full = False
    engine.sessions.lose_kv(engine)
    engine.memory.void(step)
    engine.memory.tiers = tiers
    engine.maintenance.restarted()
    engine.pace.profiling, engine.pace.profile_launches_left = False, None
    engine.grammars.ask_again(engine, step)
