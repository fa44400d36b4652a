"""What a driver can do next: names, constants and the tokens that requests sample.

An action is a tuple of a name and its values. An action that is impossible at the moment does nothing, so every list of
actions is a legal history, and a failing list stays legal while it is cut down.
"""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.events import (
    CancelAll,
    Control,
    Drain,
    Flush,
    FreezeGc,
    GetState,
    Pause,
    Profile,
    ReleaseMemory,
    Resume,
    ResumeMemory,
    SetState,
    SlowDown,
    SwitchRole,
    UpdateWeights,
)

Action = tuple[Any, ...]

STOP_TOKEN = 7
TOKEN_BASE = 1_000_000
CONTROLS: tuple[Control, ...] = (
    Flush(),
    Pause("in_place"),
    Pause("retract"),
    Pause("cancel"),
    Resume(),
    Drain(),
    CancelAll(),
    UpdateWeights(0, "w", "wait"),  # the driver gives versions
    UpdateWeights(0, "w", "retract"),
    UpdateWeights(0, "w", "cancel"),
    UpdateWeights(0, "w", "in_place"),
    ReleaseMemory(("kv_cache",)),
    ReleaseMemory(("weights", "kv_cache")),
    ResumeMemory(("weights", "kv_cache")),
    ResumeMemory(("weights",)),
    Profile("start", 2),
    Profile("stop"),
    FreezeGc(),
    GetState(),
    SetState("max_running_requests", 1),
    SetState("max_running_requests", 2),
    SetState("schedule_conservativeness", 0.02),
    SetState("page_size", 8),
    SlowDown(7),
    SlowDown(0),
    SwitchRole("mixed"),
)
LETTING_GO = [CONTROLS.index(c) for c in (Resume(), ResumeMemory(("weights", "kv_cache")), SlowDown(0))]
SESSIONS = ("s", "t", "u")
ADAPTERS = ("law", "med", "poem")
PRIORITIES = (None, 0, 3, 5, 11, 20, 100)
QUIESCENCE_STEPS_MAX = 20_000
GRAMMARS = 8  # different grammars of requests


def output_token(request_id: int, number: int, stops_at: int | None) -> int:
    """Return output `number` of a request: a pure function, so that every schedule must stream equal text."""
    if stops_at is not None and number == stops_at:
        return STOP_TOKEN
    return TOKEN_BASE + (request_id * 7919 + number * 104729) % 900_000
