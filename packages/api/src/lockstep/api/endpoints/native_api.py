"""Endpoints other than OpenAI's: /generate and others, as in SGLang and vLLM, and health.

Streams of /generate are cumulative: every event contains the whole text so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from lockstep.api.endpoints.chat_tools import tools_of
from lockstep.api.endpoints.control_api import weight_version
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    unavailable,
)
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.openai_api import chat_prompt, truncated
from lockstep.api.endpoints.schemas import AbortBody, AnyBody, DetokenizeBody, Sampling, TokenizeBody
from lockstep.api.endpoints.server import AT_ONCE_TOKENS, Call, Server
from lockstep.api.processes.bridge import Bridge, EngineUnavailable
from lockstep.api.processes.cluster_bridge import Engines
from lockstep.core.contract.events import RequestKind

PROBE_S = 20.0  # time in which a probe must generate its token
PROBE_HOLDS_S = 1.0  # time for which the result of a probe is reused

OF_A_CONVERSATION = ("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
"""Fields that are used by chat templates only."""

# ------------------------------------------------------------------------------------------------------ cancellation


async def abort_request(server: Server, call: Call[AbortBody]) -> Response:
    """Cancel a request by its id, set by the client or read from the answer. An unknown id has no effect."""
    try:
        server.bridge.cancel_label(call.body.rid, call.tenant)
    except EngineUnavailable as error:
        raise unavailable(error) from error
    return JsonResponse({"success": True})


# ----------------------------------------------------------------------------------------------------------------- text


async def tokenize(server: Server, call: Call[TokenizeBody]) -> Response:
    """Tokenise a prompt, several prompts, or a conversation."""
    body = call.body
    server.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either `prompt` or `messages`", "prompt")
    if isinstance(body.prompt, list):
        _at_most(server, "prompt", len(body.prompt))
    if body.prompt is not None:
        for name in OF_A_CONVERSATION:
            if getattr(body, name):
                raise ApiError(400, f"`{name}` applies to a conversation; give `messages`, or leave it out", name)
        texts, special = [body.prompt] if isinstance(body.prompt, str) else body.prompt, body.add_special_tokens
        found = [await server.encode("`prompt`", text, special=special is not False) for text in texts]
    else:
        if body.add_special_tokens:
            message = (
                "`add_special_tokens` applies to a `prompt`; a conversation has the special tokens of its template"
            )
            raise ApiError(400, message, "add_special_tokens")
        found = [(await chat_prompt(server, call, tools_of(body.tools or (), None, parallel=None))).ids]
    found = [truncated(ids, body.truncate_prompt_tokens, server.info()) for ids in found]
    several = isinstance(body.prompt, list)
    result: dict[str, Any] = {
        "tokens": [list(ids) for ids in found] if several else list(found[0]),
        "count": [len(ids) for ids in found] if several else len(found[0]),
        "max_model_len": server.info().request_tokens_max,
    }
    if body.return_token_strs:
        written = [await _names(server, ids) for ids in found]
        result["token_strs"] = written if several else written[0]
    return JsonResponse(result)


async def _names(server: Server, ids: Sequence[int]) -> list[str]:
    """Return the texts of tokens, in parts, between which other requests proceed."""
    names: list[str] = []
    for at in range(0, len(ids), AT_ONCE_TOKENS):
        names += [server.names.of(token)[0] for token in ids[at : at + AT_ONCE_TOKENS]]
        await asyncio.sleep(0)
    return names


def _at_most(server: Server, name: str, given: int) -> None:
    if given > server.limits.prompts_max:
        message = f"`{name}` has {given} texts, at most {server.limits.prompts_max} are allowed"
        raise ApiError(400, message, name)


async def detokenize(server: Server, call: Call[DetokenizeBody]) -> Response:
    """Convert tokens to text, by default without special tokens. It is returned under the names of vLLM and SGLang."""
    body = call.body
    server.model(body.model)
    several = bool(body.tokens) and not isinstance(body.tokens[0], int)
    lists: Sequence[Sequence[int]] = body.tokens if several else [body.tokens]
    _at_most(server, "tokens", len(lists))
    count, most = sum(map(len, lists)), server.limits.detokenize_max
    if count > most:
        raise ApiError(400, f"`tokens` has {count} tokens, at most {most} are allowed (detokenize_max)", "tokens")
    vocabulary = server.info().vocabulary
    largest = max((int(np.asarray(ids, np.int64).max(initial=0)) for ids in lists), default=0)
    if largest >= vocabulary:
        raise ApiError(400, f"`tokens` holds {largest}, but the model has {vocabulary} tokens", "tokens")
    verbatim = body.skip_special_tokens is False
    texts = [await server.decode("detokenisation", ids, verbatim=verbatim) for ids in lists]
    return JsonResponse({"prompt": texts, "text": texts} if several else {"prompt": texts[0], "text": texts[0]})


# --------------------------------------------------------------------------------------------------------------- health


async def health(server: Server, call: Call[None]) -> Response:
    """Report health: 200 while the engine exists and makes progress. The engine receives no message."""
    well = not (server.bridge.gone or server.bridge.info is None or server.bridge.stalled(server.settings.stalled_s))
    return Response(status_code=200 if well else 503)


async def ready(server: Server, call: Call[None]) -> Response:
    """Report readiness: 200 while new requests are accepted."""
    able = server.bridge.info is not None and not (server.bridge.gone or server.draining)
    able = able and any(_takes(one) for one in server.bridge.engines)
    return Response(status_code=200 if able else 503)


def _takes(engine: Bridge) -> bool:
    """Return whether an engine accepts requests, also if they wait for its restart."""
    return not (engine.gone or engine.blocked) and (engine.gauges is None or engine.gauges.accepting)


async def health_generate(server: Server, call: Call[None]) -> Response:
    """Probe health: 200 if each engine generates a token. An engine with open requests is not probed.

    If all engines have open requests, the answer is that of `health`. Concurrent calls share one probe; its result is
    valid for PROBE_HOLDS_S.
    """
    bridge = server.bridge
    if bridge.gone or bridge.info is None or all(one.tickets or one.gone for one in bridge.engines):
        return await health(server, call)
    if server.probe is None or (server.probe.done() and time.monotonic() - server.probed_s > PROBE_HOLDS_S):
        server.probe = asyncio.ensure_future(_probe(server))
    return Response(status_code=200 if await asyncio.shield(server.probe) else 503)


async def _probe(server: Server) -> bool:
    """Return whether every idle engine generates a token."""
    idle = [one for one in server.bridge.engines if not (one.tickets or one.gone)]
    try:
        return all(await asyncio.gather(*(_probe_one(server, one) for one in idle)))
    finally:
        server.probed_s = time.monotonic()


async def _probe_one(server: Server, engine: Bridge) -> bool:
    info = server.info()
    kind: RequestKind = "generate" if info.generates else "embed"
    parameters = GenerationRequest(
        sampling=Sampling(ignore_eos=True), max_tokens=int(info.generates), kind=kind, label="health"
    )
    generation = Generation(engine, server.metrics, parameters, time.monotonic())
    try:
        generation.start([Prompt([0])], None, server.limits)
        async with asyncio.timeout(PROBE_S):
            await generation.whole()
    except (ApiError, TimeoutError):
        return False
    finally:
        generation.cancel()
    return True


async def load(server: Server, call: Call[None]) -> Response:
    """Report the load of the engines as last reported by them. The engines receive no message."""
    result = _load(server.bridge)
    if len(server.bridge.engines) > 1:
        loads = [_load(one) for one in server.bridge.engines]
        result |= {name: sum(one.get(name, 0) for one in loads) for name in ("num_reqs", "num_waiting_reqs")}
        rows = zip(server.bridge.engines, loads, strict=True)
        return JsonResponse(
            {**result, "engines": [{"engine": one.number, "state": _state(one), **load} for one, load in rows]}
        )
    return JsonResponse(result)


def _load(bridge: Engines) -> dict[str, int]:
    result = {"server_load": bridge.open_answers, "waiting_prompt_tokens": bridge.waiting_tokens}
    result["waiting_answers"] = bridge.waiting_answers
    if isinstance(bridge, Bridge) and (gauges := bridge.gauges) is not None:
        result |= {"num_reqs": gauges.running + gauges.waiting, "num_waiting_reqs": gauges.waiting}
    return result


def _state(engine: Bridge) -> str:
    """Return the state of an engine in the router's terms."""
    if engine.gone:
        return "down"
    if engine.blocked:
        return "blocked"
    if engine.restarting or engine.info is None:
        return "recovering"
    return "up" if _takes(engine) else "draining"


async def usage(server: Server, call: Call[None]) -> Response:
    """Report usage and limits of the tenant of the request's key."""
    if server.usage is None or server.keys is None:
        raise ApiError(404, "this server has no keys, so tokens are not counted by tenant; see /metrics")
    allowance = server.keys.allowance(call.tenant)
    used = server.usage.read(call.tenant, allowance)
    return JsonResponse(
        {
            "tenant": call.tenant,
            "requests": used.requests,
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.output_tokens,
            "tokens_today": used.day_tokens,
            "limits": msgspec.to_builtins(allowance),
        }
    )


async def not_here(server: Server, call: Call[AnyBody]) -> Response:
    """Refuse an endpoint of other servers that this server does not have."""
    raise ApiError(501, f"{call.request.scope['path']} is not served here; docs/serving.md lists the routes")


async def metrics(server: Server, call: Call[None]) -> Response:
    """Return the metrics in Prometheus' text format."""
    engines = server.bridge.engines
    up = [_state(one) == "up" for one in engines] if server.bridge.info is not None else []
    text = server.metrics.exposition(
        *(one.gauges for one in engines), up=up, blocked=[bool(one.blocked) for one in engines]
    )
    return Response(text, media_type="text/plain; version=0.0.4")


async def server_version(server: Server, call: Call[None]) -> Response:
    """Return the version of the server."""
    return JsonResponse({"version": version("lockstep-api")})


async def model_info(server: Server, call: Call[None]) -> Response:
    """Describe the served model."""
    info = server.info()
    return JsonResponse(
        {
            "model_path": info.model,
            "served_model_name": server.models()[0],
            "is_generation": True,
            "max_model_len": info.request_tokens_max,
            "vocab_size": info.vocabulary,
            "eos_token_ids": info.eos_token_ids,
            "engine": info.kind,
            "device": info.device,
            "weight_version": weight_version(server),
        }
    )
