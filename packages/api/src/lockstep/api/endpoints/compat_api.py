"""Endpoints with which clients of vLLM and SGLang look at a server, and names of theirs for endpoints of this one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, ClassVar

from starlette.responses import Response

from lockstep.api.endpoints import embeddings_api, generate_api, openai_api, responses_api, schemas, scoring_api
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.fields import ignored_by, unserved_fields
from lockstep.api.endpoints.generation import Prompt, check_answers, embedded_prompts, unavailable
from lockstep.api.endpoints.http import JsonResponse, checked_body
from lockstep.api.endpoints.schemas import AbortManyBody, AnyBody, Body, EncodeBody, ResponseBody
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.processes.bridge import Bridge, EngineUnavailable
from lockstep.api.text.plain_text import PlainText

# ----------------------------------------------------------------------------------------------------------- properties


async def tokenizer_info(server: Server, call: Call[None]) -> Response:
    """Return the tokenizer's configuration with the chat template, as in vLLM; without paths of files."""
    text = server.needs_text("the tokenizer's configuration")
    found: dict[str, Any] = {} if isinstance(text, PlainText) else dict(getattr(text, "settings", {}))
    found = {name: value for name, value in found.items() if not name.endswith("_file") and name != "name_or_path"}
    found.setdefault("tokenizer_class", type(text).__name__)
    if text.chat_template is not None:
        found["chat_template"] = text.chat_template
    return JsonResponse(found)


async def server_info(server: Server, call: Call[None]) -> Response:
    """Describe the server as SGLang does, without its settings, which are for operators."""
    info = server.info()
    states = [_load_of(one) for one in server.bridge.engines]
    return JsonResponse(
        {
            "model_path": info.model,
            "served_model_name": server.models()[0],
            "version": version("lockstep-api"),
            "device": info.device,
            "dp_size": len(states),
            "context_length": info.request_tokens_max,
            "max_req_input_len": info.prompt_tokens_max,
            "internal_states": states,
        }
    )


async def loads(server: Server, call: Call[None]) -> Response:
    """Report the load of each engine as SGLang does; the engines receive no message."""
    info, wanted = server.info(), call.request.query_params.get("dp_rank")
    found = [_load_of(one) for one in server.bridge.engines]
    if wanted is not None:
        if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 6 and int(wanted) < len(found)):
            raise ApiError(400, f"`dp_rank` must be 0 to {len(found) - 1}, got {wanted[:20]!r}", "dp_rank")
        found = [found[int(wanted)]]
    about = {"timestamp": datetime.now(UTC).isoformat(), "version": version("lockstep-api")}
    return JsonResponse({**about, "accelerator": info.device, "dp_rank_count": len(found), "loads": found})


def _load_of(engine: Bridge) -> dict[str, Any]:
    found: dict[str, Any] = {"dp_rank": engine.number, "num_total_reqs": engine.open_answers}
    if (gauges := engine.gauges) is not None:
        prompt_tokens = gauges.cached_tokens + gauges.new_tokens
        found |= {
            "num_running_reqs": gauges.running,
            "num_waiting_reqs": gauges.waiting,
            "token_usage": gauges.token_usage,
            "max_total_num_tokens": gauges.pages * gauges.page_size,
            "cache_hit_rate": gauges.cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        }
    return found


# ------------------------------------------------------------------------------------------------------------- requests


async def abort_requests(server: Server, call: Call[AbortManyBody]) -> Response:
    """Cancel requests by their ids, as in vLLM. Unknown ids have no effect."""
    check_answers(len(call.body.request_ids), 1, server.limits, "request_ids")
    try:
        for name in call.body.request_ids:
            server.bridge.cancel_label(name, call.tenant)
    except EngineUnavailable as error:
        raise unavailable(error) from error
    return Response(status_code=200)


async def encode(server: Server, call: Call[EncodeBody]) -> Response:
    """Compute vectors of texts or token ids, as SGLang's endpoint does."""
    body = call.body
    if [body.text, body.input_ids, body.input_embeds].count(None) != 2:
        raise ApiError(400, "give one of `text`, `input_ids` and `input_embeds`", "text")
    if not server.info().vector_size:
        raise ApiError(400, "an emulated engine has no hidden states, so it has no embeddings", "text")
    if body.input_embeds is not None:
        check_answers(len(body.input_embeds.prompts), 1, server.limits, "input_embeds")
        made = await embedded_prompts(body.input_embeds, "input_embeds", server.info())
        return await _vectors(server, call, made, "input_embeds", several=body.input_embeds.several)
    given: Any = body.text if body.text is not None else body.input_ids
    field = "text" if body.text is not None else "input_ids"
    several = not isinstance(given, str) and bool(given) and not isinstance(given[0], int)
    prompts = given if several else [given]
    if not given:
        raise ApiError(400, f"`{field}` is empty", field)
    check_answers(len(prompts), 1, server.limits, field)
    made = [await embeddings_api.prompt_of(server, one, field) for one in prompts]
    return await _vectors(server, call, made, field, several=several)


async def _vectors(
    server: Server, call: Call[EncodeBody], made: list[Prompt], field: str, *, several: bool
) -> Response:
    """Return the vectors of prompts in SGLang's form. Raises ApiError."""
    vectors, _ = await embeddings_api.pooled(server, call, made, "embed", field)
    found = [
        {"embedding": vector.tolist(), "meta_info": {"prompt_tokens": len(prompt.ids)}}
        for prompt, vector in zip(made, vectors, strict=True)
    ]
    return JsonResponse(found if several else found[0])


async def count_input_tokens(server: Server, call: Call[ResponseBody]) -> Response:
    """Count the tokens of a response's input, with its instructions, tools and earlier answers."""
    prompt = await responses_api.prompt_of_response(server, call)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


Target = tuple[str, Callable[[Server, Any], Awaitable[Response]], type[Body]]

INVOCATIONS: tuple[Target, ...] = (
    ("messages", openai_api.chat, schemas.ChatBody),
    ("prompt", openai_api.completions, schemas.CompletionBody),
    ("input", embeddings_api.embeddings, schemas.EmbeddingBody),
    ("documents", scoring_api.rerank, schemas.RerankBody),
    ("text_1", scoring_api.score, schemas.ScoreBody),
    ("items", scoring_api.score, schemas.ScoreBody),
    ("text", generate_api.generate, schemas.GenerateBody),
    ("input_ids", generate_api.generate, schemas.GenerateBody),
    ("input_embeds", generate_api.generate, schemas.GenerateBody),
    ("prompt_embeds", openai_api.completions, schemas.CompletionBody),
)
"""The field that a body has -> the endpoint that it is for. `input` is an embedding's, as in vLLM."""


class InvocationBody(AnyBody):
    """POST /invocations: a body of one of these endpoints"""

    PASSED_TO: ClassVar[tuple[type[Body], ...]] = tuple(dict.fromkeys(schema for *_, schema in INVOCATIONS))


async def invocations(server: Server, call: Call[InvocationBody]) -> Response:
    """Pass a body to the endpoint that its fields are for: the one endpoint of models on SageMaker."""
    given = call.body.model_extra or {}
    for name, handler, schema in INVOCATIONS:
        if name in given:
            body = checked_body(schema, given)
            ignored_by(call.request).extend(unserved_fields(body, strict=server.settings.strict))
            return await handler(server, Call(call.request, body, call.tenant, call.arrived_s))
    known = ", ".join(f"`{name}`" for name, *_ in INVOCATIONS)
    raise ApiError(400, f"the body has none of the fields by which an endpoint is chosen: {known}")
