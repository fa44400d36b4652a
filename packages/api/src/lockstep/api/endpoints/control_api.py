"""Endpoints about the engine itself: sessions, for users, and operations for operators only.

Each is a control request of `lockstep.core.admin.control`, sent by the bridge, or a message of its own if the scheduler
is not involved. With several engines an operator's request is sent to all of them, or with `?engine=N` to one. An
operation that the runtime does not support is refused by name with status 501, before any change.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from lockstep.api.endpoints.control_schemas import (
    CloseSessionBody,
    JoinGroupBody,
    LeaveGroupBody,
    LoadLoraBody,
    MemoryBody,
    OpenSessionBody,
    PauseBody,
    ProfileBody,
    RpcBody,
    SlowDownBody,
    StateBody,
    UnloadLoraBody,
    WeightsBody,
    WeightsByNameBody,
    WeightsFromDiskBody,
    WeightsFromGroupBody,
    WeightsFromTensorBody,
)
from lockstep.api.endpoints.errors import ApiError, for_clients, session_name
from lockstep.api.endpoints.generation import unavailable
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.processes.bridge import Bridge, EngineUnavailable
from lockstep.api.processes.wire import Answered
from lockstep.core.admin.maintenance import MEMORY_TAGS
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    CancelAll,
    CloseSession,
    Control,
    Drain,
    Flush,
    FreezeGc,
    GetState,
    OpenSession,
    Pause,
    ReleaseMemory,
    Resume,
    ResumeMemory,
    SetState,
    SlowDown,
    UpdateWeights,
)
from lockstep.host.weights import Folder, Group, SharedMemory, Source, stamp_of, write_source

MODES: dict[str, Any] = {"keep": "in_place", "abort": "cancel"}
"""vLLM's names for the treatment of running requests -> Lockstep's."""

# ------------------------------------------------------------------------------------------------------------- sessions


# mechanism: sessions (executed)
async def open_session(server: Server, call: Call[OpenSessionBody]) -> Response:
    """Open a session: its tokens are kept between turns, and their KV as far as memory allows."""
    body, limits = call.body, server.limits
    given = secrets.token_hex(16) if body.session_id is None else body.session_id
    if not given or "\0" in given:
        raise ApiError(400, "`session_id` must be a text, without zero characters", "session_id")
    if body.capacity_of_str_len > limits.session_tokens_max:
        message = (
            f"`capacity_of_str_len` is {body.capacity_of_str_len}, at most {limits.session_tokens_max} are allowed"
        )
        raise ApiError(400, message, "capacity_of_str_len")
    idle_s = limits.session_idle_s if body.timeout is None else body.timeout
    if idle_s > limits.session_idle_s:
        raise ApiError(400, f"`timeout` is {idle_s:g} s, at most {limits.session_idle_s:g} are allowed", "timeout")
    name, parent = session_name(call.tenant, given), session_name(call.tenant, body.parent) if body.parent else ""
    engine, refused = await _waited(server.bridge.engine_to_open(name, parent))
    control = OpenSession(name, body.capacity_of_str_len, round(idle_s * 1e6), parent, body.parent_tokens)
    try:
        _answer([(engine, await _waited(engine.ask(control)))])
    except ApiError:
        refused()
        raise
    return JsonResponse(given)


async def close_session(server: Server, call: Call[CloseSessionBody]) -> Response:
    """Close a session; a running turn continues."""
    name = session_name(call.tenant, call.body.session_id)
    engine, closed = await _waited(server.bridge.engine_to_close(name))
    answer = _answer([(engine, await _waited(engine.ask(CloseSession(name))))])
    closed()
    return answer


# ------------------------------------------------------------------------------------------------------------- operator


async def flush_cache(server: Server, call: Call[None]) -> Response:
    """Empty the radix cache; refused while anything runs."""
    return await _control(server, call, Flush())


# mechanism: pause (executed)
async def pause(server: Server, call: Call[PauseBody]) -> Response:
    """Stop launching. Running requests are kept in place, retracted or cancelled, by `mode`."""
    return await _control(server, call, Pause(MODES.get(call.body.mode, call.body.mode)))


async def resume(server: Server, call: Call[None]) -> Response:
    """Continue after a pause or a drain."""
    answer = await _control(server, call, Resume())
    for engine in _chosen(server, call):
        server.bridge.drained(engine, draining=False)
    return answer


async def is_paused(server: Server, call: Call[None]) -> Response:
    """Report whether the engine is paused."""
    paused = [one.stats is not None and one.stats.paused for _, one in await _answers_to(server, call, GetState())]
    return JsonResponse({"is_paused": all(paused)} | ({"engines": paused} if len(paused) > 1 else {}))


async def is_sleeping(server: Server, call: Call[None]) -> Response:
    """Report whether the engine's memory, or part of it, is released."""
    states = await _answers_to(server, call, GetState())
    sleeping = [one.stats is not None and bool(one.stats.memory_released) for _, one in states]
    return JsonResponse({"is_sleeping": all(sleeping)} | ({"engines": sleeping} if len(sleeping) > 1 else {}))


async def drain(server: Server, call: Call[None]) -> Response:
    """Refuse new requests; answered once all accepted requests have ended."""
    for engine in _chosen(server, call):
        server.bridge.drained(engine, draining=True)
    return await _control(server, call, Drain())


async def abort_all(server: Server, call: Call[None]) -> Response:
    """Cancel all requests."""
    return await _control(server, call, CancelAll())


async def server_info(server: Server, call: Call[None]) -> Response:
    """Report the settings, and the state of the engine."""
    answered = await _answers_to(server, call, GetState())
    result = {
        "version": version_of("lockstep-api"),
        "settings": msgspec.to_builtins(server.settings),
        "scheduler": server.info().settings,
        "weight_version": weight_version(server),
    }
    states = [{"engine": engine.number, "state": msgspec.to_builtins(one.stats)} for engine, one in answered]
    return JsonResponse(result | ({"engines": states} if len(states) > 1 else {"state": states[0]["state"]}))


def weight_version(server: Server) -> str:
    """Return the weights version of the engines; if they differ, all versions separated by commas."""
    return ",".join(dict.fromkeys(str(engine.weights_version) for engine in server.bridge.engines))


async def set_internal_state(server: Server, call: Call[StateBody]) -> Response:
    """Change settings of the scheduler in order, up to the first change that is refused."""
    for name, value in call.body.server_args.items():
        await _control(server, call, SetState(name, value))
    return JsonResponse({"updated": True, "server_args": call.body.server_args})


async def slow_down(server: Server, call: Call[SlowDownBody]) -> Response:
    """Set the least time between two launches in seconds, for tests; null or 0: none."""
    return await _control(server, call, SlowDown(round((call.body.forward_sleep_time or 0.0) * 1e6)))


async def freeze_gc(server: Server, call: Call[None]) -> Response:
    """Exclude the engine's current objects from garbage collection."""
    return await _control(server, call, FreezeGc())


async def start_profile(server: Server, call: Call[ProfileBody]) -> Response:
    """Record the activity of CPU and GPU into files of `--profile-dir`."""
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
    given = {name: one for name, one in options.items() if one is not None}
    return _answer(await _of_each(server, call, lambda engine: engine.trace(given)))


async def stop_profile(server: Server, call: Call[None]) -> Response:
    """End the profile, and write its files."""
    _needs(server, "profile", "traces are taken of a model, with --profile-dir")
    return _answer(await _of_each(server, call, lambda engine: engine.trace(None)))


async def load_adapter(server: Server, call: Call[LoadLoraBody]) -> Response:
    """Load a LoRA adapter: read it, check it, and make it available to requests."""
    body = call.body
    if body.lora_name in server.models():
        raise ApiError(400, f"`lora_name` is {body.lora_name[:60]!r}, which is the model's own name", "lora_name")
    if "\0" in body.lora_name:
        raise ApiError(400, "`lora_name` holds a zero character", "lora_name")
    chosen = _chosen(server, call)
    if not body.load_inplace and all(body.lora_name in one.adapters for one in chosen):
        message = f"`lora_name` {body.lora_name[:60]!r} is loaded already; `load_inplace` loads a newer version of it"
        raise ApiError(400, message, "lora_name")
    if server.info().kind != "emulated" and not Path(body.lora_path).is_absolute():
        raise ApiError(400, f"`lora_path` must begin with /, got {body.lora_path[:200]!r}", "lora_path")

    def load(engine: Bridge) -> Awaitable[Answered]:
        return engine.load_lora(body.lora_name, body.lora_path, pinned=body.pinned)

    return _loaded(server, await _of_each(server, call, load))


async def unload_adapter(server: Server, call: Call[UnloadLoraBody]) -> Response:
    """Unload a LoRA adapter; answered once no request uses it. Other requests continue."""
    name = call.body.lora_name
    if not any(name in one.adapters for one in _chosen(server, call)):
        raise ApiError(404, f"`lora_name` {name[:60]!r} is not loaded", "lora_name")
    return _loaded(server, await _of_each(server, call, lambda engine: engine.unload_lora(name)))


def _loaded(server: Server, answered: list[tuple[Bridge, Answered]]) -> Response:
    response = _answer(answered)
    fields = msgspec.json.decode(bytes(response.body))
    return JsonResponse(fields | {"loaded_adapters": server.bridge.adapters})


async def update_weights_from_disk(server: Server, call: Call[WeightsFromDiskBody]) -> Response:
    """Load the weights of another folder of the same model into the running engine."""
    path = call.body.model_path
    if server.info().kind == "emulated":  # an emulated engine reads nothing
        return await _update(server, call, Folder(path))
    if not Path(path).is_absolute():
        raise ApiError(400, f"`model_path` must begin with /, got {path[:200]!r}", "model_path")
    try:
        stamp = await asyncio.to_thread(stamp_of, Path(path))
    except (ConfigError, OSError) as error:
        message = str(error).partition("\nhint: ")[0]
        raise ApiError(400, f"`model_path`: {message}", "model_path") from error
    return await _update(server, call, Folder(path, stamp))


async def update_weights_from_tensor(server: Server, call: Call[WeightsFromTensorBody]) -> Response:
    """Load some or all tensors of the model from shared memory."""
    return await _update(server, call, SharedMemory(call.body.shared_memory))


async def update_weights_from_group(server: Server, call: Call[WeightsFromGroupBody]) -> Response:
    """Load some or all tensors of the model, sent by a trainer over a group."""
    body = call.body
    shapes = tuple(tuple(shape) for shape in body.shapes)
    return await _update(server, call, Group(body.group_name, tuple(body.names), tuple(body.dtypes), shapes))


async def join_group(server: Server, call: Call[JoinGroupBody]) -> Response:
    """Join the group of a trainer that will send weights; answered once all members have joined."""
    _needs_weights(server)
    body = call.body
    engines = _chosen(server, call)
    last = body.rank_offset + max(engine.number for engine in engines)
    if last >= body.world_size:
        message = (
            f"`world_size` is {body.world_size}, but an engine would have rank {last}; the trainer is counted as well"
        )
        raise ApiError(400, message, "world_size")

    def join(engine: Bridge) -> Awaitable[Answered]:
        rank = body.rank_offset + engine.number
        place = (body.group_name, body.master_address, body.master_port, rank, body.world_size)
        return engine.join_group(*place, body.backend)

    return _answer(await _of_each(server, call, join))


async def leave_group(server: Server, call: Call[LeaveGroupBody]) -> Response:
    """Leave a trainer's group."""
    _needs_weights(server)
    return _answer(await _of_each(server, call, lambda engine: engine.leave_group(call.body.group_name)))


def _needs_weights(server: Server) -> None:
    if server.info().kind == "emulated":
        raise ApiError(501, "an emulated engine has no weights")


async def _update(server: Server, call: Call[Any], source: Source) -> Response:
    """Update the selected engines to one version. Each engine treats its running requests by its own mode."""
    body: WeightsBody = call.body
    states = [(engine, one.stats) for engine, one in await _answers_to(server, call, GetState())]
    newest = max(0 if stats is None else stats.weights_version for _, stats in states)
    version = newest + 1 if body.weight_version is None else int(body.weight_version)
    paused = {engine.number for engine, stats in states if stats is not None and stats.paused}

    def update(engine: Bridge) -> Awaitable[Answered]:
        mode = body.mode or ("cancel" if body.abort_all_requests else None)
        mode = mode or ("in_place" if engine.number in paused else "wait")
        return engine.ask(UpdateWeights(version, write_source(source), MODES.get(mode, mode)))

    several = len(_chosen(server, call)) > 1
    # otherwise engines would answer new requests by different weights meanwhile
    with server.bridge.input_blocked() if several else nullcontext():
        _answer(await _of_each(server, call, update))
    return JsonResponse({"success": True, "message": f"weights {version} are in place", "weight_version": str(version)})


async def get_weights_by_name(server: Server, call: Call[WeightsByNameBody]) -> Response:
    """Read the first rows of a tensor, by its name in a checkpoint, from the first selected engine."""
    _needs_weights(server)
    answered = await _waited(_chosen(server, call)[0].read_weights(call.body.name, call.body.truncate_size))
    if answered.weights is None:
        raise ApiError(400, for_clients(answered.message), "name")
    read = answered.weights
    return JsonResponse({"parameter": read.values, **msgspec.to_builtins(read), "version": str(read.version)})


# mechanism: rpc (executed)
async def collective_rpc(server: Server, call: Call[RpcBody]) -> Response:
    """Call a function of an installed package in the selected engines; the results are in the order of the engines."""
    body = call.body
    arguments = msgspec.json.encode([body.args, body.kwargs])
    try:
        async with asyncio.timeout(body.timeout):
            answered = await _of_each(server, call, lambda engine: engine.call_function(body.method, arguments))
    except TimeoutError:
        message = f"`{body.method[:60]}` took longer than its limit of {body.timeout:g} s; it goes on"
        raise ApiError(504, message, "timeout") from None
    for _, one in answered:
        if not one.ok:
            raise ApiError(400, for_clients(one.message), "method")
    return JsonResponse({"results": [msgspec.Raw(one.message.encode()) for _, one in answered]})


async def release_memory(server: Server, call: Call[MemoryBody]) -> Response:
    """Release the memory of weights and KV cache, or of those in `tags`, once no request runs. Requests then wait."""
    return await _control(server, call, ReleaseMemory(_tags(call)))


async def resume_memory(server: Server, call: Call[MemoryBody]) -> Response:
    """Allocate released memory again; requests continue."""
    return await _control(server, call, ResumeMemory(_tags(call)))


def _tags(call: Call[MemoryBody]) -> tuple[str, ...]:
    """Return the tags from the body or, as in vLLM, from the query; all tags if absent. Raises ApiError."""
    level = call.request.query_params.get("level", "1")
    if level != "1":
        raise ApiError(400, f"`level` must be 1, which keeps the weights in host memory, got {level[:20]!r}", "level")
    requested = tuple(call.body.tags or call.request.query_params.getlist("tags")) or MEMORY_TAGS
    for tag in requested:
        if tag not in MEMORY_TAGS:
            raise ApiError(400, f"`tags` has {tag[:60]!r}; allowed are {', '.join(MEMORY_TAGS)}", "tags")
    return requested


# -------------------------------------------------------------------------------------------------------------- helpers


def _needs(server: Server, ability: str, otherwise: str) -> None:
    """Raise ApiError, 501, if this engine was started without an ability. `otherwise` is the remedy."""
    if ability not in server.info().able:
        raise ApiError(501, f"this engine was started without: {otherwise}")


def _chosen(server: Server, call: Call[Any]) -> list[Bridge]:
    """Return the engine of `?engine=N`, or all engines. Raises ApiError."""
    engines, named = server.bridge.engines, call.request.query_params.get("engine")
    if named is None:
        return [one for one in engines if not one.gone] or list(engines)
    if not named.isascii() or not named.isdecimal() or int(named[:9]) >= len(engines):
        raise ApiError(400, f"`engine` must be a number from 0 to {len(engines) - 1}, got {named[:40]!r}", "engine")
    return [engines[int(named)]]


async def _control(server: Server, call: Call[Any], control: Control) -> Response:
    """Send a control request to the selected engines. Raises ApiError if one refuses it."""
    return _answer(await _answers_to(server, call, control))


async def _answers_to(server: Server, call: Call[Any], control: Control) -> list[tuple[Bridge, Answered]]:
    return await _of_each(server, call, lambda engine: engine.ask(control))


async def _of_each(
    server: Server, call: Call[Any], send: Callable[[Bridge], Awaitable[Answered]]
) -> list[tuple[Bridge, Answered]]:
    """Call `send` for each selected engine. Raises ApiError if one is unavailable; the other engines have answered."""
    engines = _chosen(server, call)
    answers = await asyncio.gather(*(send(one) for one in engines), return_exceptions=True)
    found = []
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, EngineUnavailable) and len(engines) > 1:
            raise ApiError(503, f"engine {engine.number}: {answer}; the other engines received the request") from answer
        if isinstance(answer, EngineUnavailable):
            raise unavailable(answer) from answer
        if isinstance(answer, BaseException):
            raise answer
        found.append((engine, answer))
    return found


Awaited = TypeVar("Awaited")


async def _waited(answer: Awaitable[Awaited]) -> Awaited:
    try:
        return await answer
    except EngineUnavailable as error:
        raise unavailable(error) from error


def _answer(answered: list[tuple[Bridge, Answered]]) -> Response:
    """Combine the answers of several engines. Raises ApiError if one refused; the other engines have complied."""
    answers = [(engine, one.ok, for_clients(one.message)) for engine, one in answered]
    shown = [(engine, ok, message) for engine, ok, message in answers if not ok] or answers
    messages = [message for _, _, message in shown]
    if len(answers) > 1 and (len(set(messages)) > 1 or len(shown) < len(answers)):
        messages = [f"engine {engine.number}: {message}" for engine, _, message in shown]
    message = "; ".join(dict.fromkeys(messages))
    if not all(ok for _, ok, _ in answers):
        raise ApiError(400, message)
    return JsonResponse({"success": True, "message": message})
