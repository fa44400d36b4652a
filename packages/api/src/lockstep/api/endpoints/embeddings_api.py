"""POST /v1/embeddings: a vector for each input, by the model's pooling."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.responses import Response

from lockstep.api.endpoints.chat_tools import tools_of
from lockstep.api.endpoints.errors import ApiError, failure
from lockstep.api.endpoints.generation import GenerationRequest, Prompt, check_answers, prompts_of
from lockstep.api.endpoints.http import JsonResponse, unless_left
from lockstep.api.endpoints.openai_api import chat_prompt, truncated
from lockstep.api.endpoints.schemas import EmbeddingBody, Sampling
from lockstep.api.endpoints.server import GENERATION, Call, Server
from lockstep.api.processes.wire import EngineInfo
from lockstep.core.contract.events import RequestKind
from lockstep.host.batches import Float32s

NOTHING = Sampling()
NO_TOOLS = tools_of((), None, parallel=None)


async def embeddings(server: Server, call: Call[EmbeddingBody]) -> Response:
    """Compute a vector for each input."""
    body, info = call.body, server.info()
    if (body.input is None) == (body.messages is None):
        why = "`input` is missing; it must have at least one text" if body.input is None else "both are given"
        raise ApiError(400, f"{why}; give either `input` or `messages`", "input")
    name = server.model(body.model)
    if not info.vector_size:
        raise ApiError(400, "an emulated engine has no hidden states, so it has no embeddings", "model")
    check_dimensions(body.dimensions, info)
    field = "input" if body.messages is None else "messages"
    if body.input is None:
        prompts = [await chat_prompt(server, call, NO_TOOLS)]
    else:
        given = prompts_of(body.input, "input")
        check_answers(len(given), 1, server.limits, "input")
        prompts = [await prompt_of(server, one, "input", special=body.add_special_tokens) for one in given]
    vectors, tokens = await pooled(server, call, prompts, "embed", field)
    weights = call.request.scope[GENERATION].weights()
    found = [
        {"object": "embedding", "index": number, "embedding": written(vector, body.encoding_format)}
        for number, vector in enumerate(shortened(one, body.dimensions) for one in vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JsonResponse({"object": "list", "data": found, "model": name, "usage": usage, **weights})


async def prompt_of(server: Server, given: str | Sequence[int], field: str, *, special: bool = True) -> Prompt:
    """Make a prompt from a text or token ids. Raises ApiError."""
    if isinstance(given, str):
        return Prompt(await server.encode(f"`{field}`", given, special=special), given)
    return Prompt(given)


async def pooled(
    server: Server, call: Call[Any], prompts: list[Prompt], kind: RequestKind, field: str
) -> tuple[list[Float32s], int]:
    """Return the result of each prompt, and the number of tokens of all prompts.

    Args:
        kind: embed for vectors [hidden], score for the logits [vocabulary] after each prompt.
        field: the client's name of the prompts, for errors.
    Raises: ApiError for the first prompt that fails, ClientLeft.
    """
    parameters = GenerationRequest(
        sampling=NOTHING,
        max_tokens=0,
        kind=kind,
        prompt_field=field,
        tenant=call.tenant,
        priority=call.body.priority,
    )
    most = call.body.truncate_prompt_tokens
    prompts = [replace(one, ids=truncated(one.ids, most, server.info())) for one in prompts]
    if any(one.media is not None and len(one.ids) < len(one.media.ids) for one in prompts):
        message = "`truncate_prompt_tokens` would cut a prompt with media or embeddings"
        raise ApiError(400, message, "truncate_prompt_tokens")
    generation = server.generate(call, parameters, prompts)
    try:
        await unless_left(call.request, generation.whole())
    finally:
        generation.cancel()
    found = []
    for choice in generation.choices:
        ended = choice.reply.ended
        assert ended is not None
        if (error := failure(ended)) is not None:
            raise error
        if not ended.vector:
            raise ApiError(500, f"`{field}` {choice.index} ended with reason {ended.reason}, without a vector")
        found.append(np.frombuffer(ended.vector, "<f4"))
    return found, generation.usage().prompt_tokens


def check_dimensions(requested: int | None, info: EngineInfo) -> None:
    """Check that `dimensions` is the size of the model's vectors or one that it was trained for. Raises ApiError."""
    if requested in (None, info.vector_size):
        return
    if info.matryoshka is None:
        message = f"`dimensions` is {requested}, but this model's vectors have {info.vector_size} and cannot be cut"
        raise ApiError(400, f"{message}: its config.json names no `matryoshka_dimensions`", "dimensions")
    if requested not in info.matryoshka if info.matryoshka else requested > info.vector_size:
        sizes = ", ".join(map(str, info.matryoshka)) or f"1 to {info.vector_size}"
        raise ApiError(400, f"`dimensions` is {requested}, but this model's vectors can have {sizes}", "dimensions")


def shortened(vector: Float32s, dimensions: int | None) -> Float32s:
    """Return the first `dimensions` of a vector, scaled to length 1, as OpenAI does; the vector itself for None."""
    if dimensions is None or dimensions == len(vector):
        return vector
    front = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(front))
    return (front / length if length > 0.0 else front).astype(np.float32)


def written(vector: Float32s, encoding: str | None) -> list[float] | str:
    """Return a vector as JSON: numbers, or base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    return [float(value) for value in vector]
