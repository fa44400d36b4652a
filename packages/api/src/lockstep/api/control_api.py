"""Endpoints about the engine itself: sessions, which users have, and what only an operator may do.

Each is a control request of `lockstep.core.control`, put by `bridge.ask`, or a message of its own where the scheduler
has no say in it. What this runtime has no hands for is refused by name with 501, before anything is changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.responses import Response

from lockstep.api.bridge import EngineUnavailable
from lockstep.api.errors import ApiError, for_clients, session_name
from lockstep.api.generation import unavailable
from lockstep.api.http import JsonResponse
from lockstep.api.schemas import (
    CloseSessionBody,
    OpenSessionBody,
    PauseBody,
    ProfileBody,
    SlowDownBody,
    StateBody,
)
from lockstep.api.server import Call, Server
from lockstep.api.wire import Answered
from lockstep.core.events import (
    CancelAll,
    CloseSession,
    Control,
    Drain,
    Flush,
    FreezeGc,
    GetState,
    OpenSession,
    Pause,
    Resume,
    SetState,
    SlowDown,
)

# ------------------------------------------------------------------------------------------------------------- sessions


async def open_session(server: Server, call: Call[OpenSessionBody]) -> Response:
    """Keep the tokens of a conversation between its turns, and their KV as far as there is room."""
    body, limits = call.body, server.limits
    given = secrets.token_hex(16) if body.session_id is None else body.session_id
    if not given or "\0" in given:
        raise ApiError(400, "`session_id` must be a text, without zero characters", "session_id")
    if body.capacity_of_str_len > limits.session_tokens_max:
        message = f"`capacity_of_str_len` is {body.capacity_of_str_len}, at most {limits.session_tokens_max} are kept"
        raise ApiError(400, message, "capacity_of_str_len")
    idle_s = limits.session_idle_s if body.timeout is None else body.timeout
    if idle_s > limits.session_idle_s:
        raise ApiError(400, f"`timeout` is {idle_s:g} s, at most {limits.session_idle_s:g} are allowed", "timeout")
    await _told(
        server,
        OpenSession(
            session_name(call.tenant, given),
            body.capacity_of_str_len,
            round(idle_s * 1e6),
            session_name(call.tenant, body.parent) if body.parent else "",
            body.parent_tokens,
        ),
    )
    return JsonResponse(given)


async def close_session(server: Server, call: Call[CloseSessionBody]) -> Response:
    """Forget a conversation; a turn that runs goes on."""
    return await _told(server, CloseSession(session_name(call.tenant, call.body.session_id)))


# ------------------------------------------------------------------------------------------------------------- operator


async def flush_cache(server: Server, call: Call[None]) -> Response:
    """Empty the radix cache; refused while anything runs."""
    return await _told(server, Flush())


async def pause(server: Server, call: Call[PauseBody]) -> Response:
    """Stop launching; what runs stays where it is, gives its pages back (retract), or is ended (cancel)."""
    modes: dict[str, Any] = {"keep": "in_place", "abort": "cancel"}
    return await _told(server, Pause(modes.get(call.body.mode, call.body.mode)))


async def resume(server: Server, call: Call[None]) -> Response:
    """Go on after a pause or a drain."""
    return await _told(server, Resume())


async def is_paused(server: Server, call: Call[None]) -> Response:
    """Whether it stands still."""
    answered = await _asked(server, GetState())
    return JsonResponse({"is_paused": answered.stats is not None and answered.stats.paused})


async def drain(server: Server, call: Call[None]) -> Response:
    """Take no more requests; answered once all that were accepted have ended."""
    return await _told(server, Drain())


async def abort_all(server: Server, call: Call[None]) -> Response:
    """Cancel every request there is."""
    return await _told(server, CancelAll())


async def server_info(server: Server, call: Call[None]) -> Response:
    """Settings, and how the engine stands."""
    answered = await _asked(server, GetState())
    settings = msgspec.to_builtins(server.settings)
    return JsonResponse(
        {
            "version": version("lockstep-api"),
            "settings": settings,
            "scheduler": server.about().settings,
            "state": msgspec.to_builtins(answered.stats),
        }
    )


async def set_internal_state(server: Server, call: Call[StateBody]) -> Response:
    """Change settings of the scheduler, one after another, up to the first that is refused."""
    for name, value in call.body.server_args.items():
        await _told(server, SetState(name, value))
    return JsonResponse({"updated": True, "server_args": call.body.server_args})


async def slow_down(server: Server, call: Call[SlowDownBody]) -> Response:
    """Leave at least so many seconds between two launches, for testing; none, or 0, ends it."""
    return await _told(server, SlowDown(round((call.body.forward_sleep_time or 0.0) * 1e6)))


async def freeze_gc(server: Server, call: Call[None]) -> Response:
    """Take the objects that live now out of the engine's garbage collection."""
    return await _told(server, FreezeGc())


async def start_profile(server: Server, call: Call[ProfileBody]) -> Response:
    """Record what CPU and GPU do, into files of `--profile-dir`."""
    _needs(server, "profile", "traces are taken of a model, with --profile-dir")
    body = call.body
    options = {
        "start_step": body.start_step,
        "steps": body.num_steps,
        "activities": tuple(one.lower() for one in body.activities or ()),
        "record_shapes": body.record_shapes,
        "with_stack": body.with_stack,
        "by_stage": body.profile_by_stage,
    }
    return _answer(await _waited(server.bridge.trace({name: one for name, one in options.items() if one is not None})))


async def stop_profile(server: Server, call: Call[None]) -> Response:
    """End it, and write what was seen."""
    _needs(server, "profile", "traces are taken of a model, with --profile-dir")
    return _answer(await _waited(server.bridge.trace(None)))


async def load_adapter(server: Server, call: Call[Any]) -> Response:
    """Load or unload a LoRA adapter: refused, as no runtime here has any."""
    raise ApiError(501, "this runtime has no adapters")


async def update_weights(server: Server, call: Call[Any]) -> Response:
    """Load weights from disk: refused, as no runtime here can while it runs."""
    raise ApiError(501, "this runtime cannot change its weights while it runs; start another server")


async def switch_memory(server: Server, call: Call[Any]) -> Response:
    """Give device memory back or take it again: refused, as no runtime here can while it runs."""
    raise ApiError(501, "this runtime cannot give its memory back while it runs")


# ------------------------------------------------------------------------------------------------------------------ how


def _needs(server: Server, ability: str, otherwise: str) -> None:
    """Raise ApiError for what this engine was started without."""
    if ability not in server.about().able:
        raise ApiError(501, f"this engine was started without: {otherwise}")


async def _told(server: Server, control: Control) -> Response:
    """Ask for something. Raises ApiError where it is refused."""
    return _answer(await _asked(server, control))


async def _asked(server: Server, control: Control) -> Answered:
    return await _waited(server.bridge.ask(control))


async def _waited(answer: Awaitable[Answered]) -> Answered:
    try:
        return await answer
    except EngineUnavailable as error:
        raise unavailable(error) from error


def _answer(answered: Answered) -> Response:
    message = for_clients(answered.message)
    if not answered.ok:
        raise ApiError(400, message)
    return JsonResponse({"success": True, "message": message})
