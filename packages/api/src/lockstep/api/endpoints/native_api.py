"""Endpoints other than OpenAI's: /generate and others, as in SGLang and vLLM, and health.

Streams of /generate are cumulative: every event contains the whole text so far.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.responses import Response

from lockstep.api.endpoints.chat_tools import tools_of
from lockstep.api.endpoints.control_api import weight_version
from lockstep.api.endpoints.errors import ApiError, failure, session_name
from lockstep.api.endpoints.generation import (
    Choice,
    Generation,
    GenerationRequest,
    Prompt,
    check_answers,
    check_logprobs,
    check_sampling,
    seed_of,
    unavailable,
    weights_of,
)
from lockstep.api.endpoints.http import DONE, JsonResponse, event, unless_left
from lockstep.api.endpoints.openai_api import chat_prompt, prompt_logprobs, prompt_top_logprobs, streamed
from lockstep.api.endpoints.schemas import AbortBody, AnyBody, DetokenizeBody, GenerateBody, Sampling, TokenizeBody
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.structured_output import requested_grammar
from lockstep.api.processes.bridge import Bridge, EngineUnavailable
from lockstep.api.processes.cluster_bridge import Engines
from lockstep.core.contract.events import RequestKind

PROBE_S = 20.0  # time in which a probe must generate its token
PROBE_HOLDS_S = 1.0  # time for which the result of a probe is reused

OF_A_CONVERSATION = ("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
"""Fields that are used by chat templates only."""

# ------------------------------------------------------------------------------------------------------------ /generate


async def generate(server: Server, call: Call[GenerateBody]) -> Response:
    """Generate continuations of prompts, which are texts or token ids."""
    body, info, limits = call.body, server.info(), server.limits
    params = body.sampling_params
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either `text` or `input_ids`", "text")
    given, several = _prompts(body)
    check_answers(len(given), params.n, limits)
    check_sampling(params, info, limits)
    if body.return_logprob:
        check_logprobs(body.top_logprobs_num, "return_logprob", info, limits)
    elif body.top_logprobs_num or body.logprob_start_len is not None:
        name = "top_logprobs_num" if body.top_logprobs_num else "logprob_start_len"
        raise ApiError(400, f"`{name}` needs `return_logprob` to be true", name)
    start = body.logprob_start_len
    session, session_start = _session(body, call.tenant)
    prompts = [
        Prompt(await server.encode("`text`", one, special=True), one) if isinstance(one, str) else Prompt(one)
        for one in given
    ]
    if start is not None and start >= 0 and (shortest := min(len(one.ids) for one in prompts)) < start:
        raise ApiError(400, f"`logprob_start_len` is {start}, but a prompt has {shortest} tokens", "logprob_start_len")
    seed = params.sampling_seed if params.sampling_seed is not None else params.seed
    requested = requested_grammar(vars(params), limits, inside="sampling_params.")
    parameters = GenerationRequest(
        sampling=params,
        max_tokens=params.max_new_tokens,
        max_tokens_field="max_new_tokens",
        min_tokens=params.min_new_tokens or params.min_tokens or 0,
        samples=params.n,
        tops=body.top_logprobs_num if body.return_logprob else None,
        prompt_logprobs_from=start if start is not None and start >= 0 else None,
        prompt_tops=body.top_logprobs_num if start is not None and start >= 0 else 0,
        session=session,
        session_start=session_start,
        seed=None if seed is None else seed_of(seed),
        stream=body.stream,
        label=body.rid or secrets.token_hex(16),
        tenant=call.tenant,
        priority=body.priority,
        grammar=None if requested is None else requested.grammar,
        grammar_field="" if requested is None else requested.field,
    )
    generation = server.generate(call, parameters, prompts)
    several = several or params.n > 1
    if body.stream:
        return await streamed(server, call, generation, _stream(generation, body, several))
    try:
        texts = await unless_left(call.request, generation.whole())
    finally:
        generation.cancel()
    result = [_answer(generation, body, choice, text) for choice, text in texts]
    return JsonResponse(result if several else result[0])


def _session(body: GenerateBody, tenant: str) -> tuple[str, int | None]:
    """Return the session that the request continues, "" for none, and the tokens of it to keep. Raises ApiError."""
    params = body.session_params
    if params is None:
        return "", None
    several = isinstance(body.text, list) or (body.input_ids is not None and isinstance(body.input_ids[:1], list))
    if body.sampling_params.n > 1 or (several and len(_prompts(body)[0]) > 1):
        raise ApiError(400, "`session_params`: a turn of a session has one prompt and one answer", "session_params")
    if body.logprob_start_len not in (None, -1):
        message = "`logprob_start_len` counts from the start of a session, whose tokens are not sent; leave it out"
        raise ApiError(400, message, "logprob_start_len")
    offset = params.offset
    return session_name(tenant, params.id), None if offset in (None, -1) else offset


def _prompts(body: GenerateBody) -> tuple[list[str] | list[list[int]], bool]:
    """Return the prompts, and whether the field was a list of prompts. Raises ApiError."""
    given: Any = body.text if body.text is not None else body.input_ids
    if not given:
        name = "text" if body.text is not None else "input_ids"
        raise ApiError(400, f"`{name}` is empty", name)
    if isinstance(given, str) or isinstance(given[0], int):
        return [given], False
    return given, True


async def _stream(generation: Generation, body: GenerateBody, several: bool) -> AsyncGenerator[bytes, None]:
    texts = [""] * len(generation.choices)
    async for new in generation.pieces():
        for piece in new:
            index = piece.choice.index
            texts[index] += piece.text
            if piece.ended is not None and (error := failure(piece.ended)) is not None:
                yield event(error.body())
                yield DONE
                return
            result = _answer(generation, body, piece.choice, texts[index])
            yield event(result | {"index": index} if several else result)
    yield DONE


def _answer(generation: Generation, body: GenerateBody, choice: Choice, text: str) -> dict[str, Any]:
    """Return an answer as far as it was generated."""
    reply, ended = choice.reply, choice.reply.ended
    meta: dict[str, Any] = {
        "id": generation.parameters.label,
        "prompt_tokens": len(choice.prompt.ids) if ended is None or ended.rejected else ended.prompt_tokens,
        "completion_tokens": choice.taken,
        "cached_tokens": ended.cached_tokens if ended is not None else 0,
        "finish_reason": None,
    }
    if ended is not None:
        meta["finish_reason"] = _finish(choice)
        meta["e2e_latency"] = time.monotonic() - generation.arrived_s
        meta |= weights_of(ended)
    if body.return_logprob:
        tokens = reply.tokens[: choice.taken]
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(reply.logprobs, tokens, strict=False)
        ]
        if body.top_logprobs_num:
            most = body.top_logprobs_num
            meta["output_top_logprobs"] = [
                [[value, token, None] for token, value in tops[:most]] for tops in reply.tops[: choice.taken]
            ]
        if ended is not None and generation.parameters.prompt_logprobs_from is not None:
            pairs = zip(prompt_logprobs(choice), choice.prompt.ids, strict=True)
            front = generation.parameters.prompt_logprobs_from
            meta["input_token_logprobs"] = [[value, token, None] for value, token in pairs][front:]
            if body.top_logprobs_num:
                meta["input_top_logprobs"] = [
                    [[value, token, None] for token, value in tops] or None for tops in prompt_top_logprobs(choice)
                ][front:]
    return {"text": text, "output_ids": reply.tokens[: choice.taken], "meta_info": meta}


def _finish(choice: Choice) -> dict[str, Any]:
    """Return the reason of an answer's end in SGLang's form."""
    ended = choice.reply.ended
    assert ended is not None
    if ended.reason in ("length", "computed"):
        return {"type": "length", "length": len(choice.reply.tokens)}
    if ended.reason == "cancelled":
        return {"type": "abort", "message": "the request was cancelled"}
    matched = choice.answer.stop_reason
    if matched is None and choice.reply.tokens:
        matched = choice.reply.tokens[-1]
    return {"type": "stop", "matched": matched}


async def abort_request(server: Server, call: Call[AbortBody]) -> Response:
    """Cancel a request by its id, set by the client or read from the answer. An unknown id has no effect."""
    try:
        server.bridge.cancel_label(call.body.rid, call.tenant)
    except EngineUnavailable as error:
        raise unavailable(error) from error
    return JsonResponse({"success": True})


# ----------------------------------------------------------------------------------------------------------------- text


async def tokenize(server: Server, call: Call[TokenizeBody]) -> Response:
    """Tokenise a prompt or a conversation."""
    body = call.body
    server.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either `prompt` or `messages`", "prompt")
    if body.prompt is not None:
        for name in OF_A_CONVERSATION:
            if getattr(body, name):
                raise ApiError(400, f"`{name}` applies to a conversation; give `messages`, or leave it out", name)
        ids = await server.encode("`prompt`", body.prompt, special=body.add_special_tokens is not False)
    else:
        if body.add_special_tokens:
            message = (
                "`add_special_tokens` applies to a `prompt`; a conversation has the special tokens of its template"
            )
            raise ApiError(400, message, "add_special_tokens")
        ids = (await chat_prompt(server, body, tools_of(body.tools or (), None, parallel=None))).ids
    result = {"tokens": ids, "count": len(ids), "max_model_len": server.info().request_tokens_max}
    if body.return_token_strs:
        result["token_strs"] = [server.names.of(token)[0] for token in ids]
    return JsonResponse(result)


async def detokenize(server: Server, call: Call[DetokenizeBody]) -> Response:
    """Convert tokens to text, without special tokens. The text is returned under the names of vLLM and SGLang."""
    server.model(call.body.model)
    info, tokens = server.info(), call.body.tokens
    if max(tokens, default=0) >= info.vocabulary:
        raise ApiError(400, f"`tokens` holds {max(tokens)}, but the model has {info.vocabulary} tokens", "tokens")
    text = server.needs_text("detokenisation").decode(tokens)
    return JsonResponse({"prompt": text, "text": text})


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
    return not engine.gone and (engine.gauges is None or engine.gauges.accepting)


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
    text = server.metrics.exposition(*(one.gauges for one in engines), up=up)
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
