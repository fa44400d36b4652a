"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, for text.

Events of a stream: message_start, content_block_start, ping, content_block_delta ..., content_block_stop,
message_delta (why it ended, and what was used), message_stop; or error.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from lockstep.api.errors import failure
from lockstep.api.generation import Choice, Generation, Prompt, Usage, Wanted, check_sampling
from lockstep.api.http import JsonResponse, named_event, unless_left
from lockstep.api.openai_api import conversation, streamed
from lockstep.api.responses_api import text_parts
from lockstep.api.schemas import ChatMessage, CountBody, MessageBody, Sampling
from lockstep.api.server import Call, Server


async def messages(server: Server, call: Call[MessageBody]) -> Response:
    """Answer a conversation."""
    body = call.body
    name = server.model(body.model)
    sampling = Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences)
    check_sampling(sampling, server.about(), server.limits, stop_field="stop_sequences")
    prompt = await _prompt(server, body)
    wanted = Wanted(
        sampling=sampling,
        max_tokens=body.max_tokens,
        prompt_field="messages",
        stream=bool(body.stream),
        label=f"msg_{secrets.token_hex(16)}",
        tenant=call.tenant,
    )
    generation = server.generate(call, wanted, [prompt])
    shape = MessageShape(name, wanted.label)
    if body.stream:
        return await streamed(server, call, generation, _stream(generation, shape))
    try:
        ((choice, text),) = await unless_left(call.request, generation.whole())
        return JsonResponse(shape.whole(generation, choice, text))
    finally:
        generation.cancel()


async def count_tokens(server: Server, call: Call[CountBody]) -> Response:
    """How many tokens a conversation has, as the model's template writes it."""
    server.model(call.body.model)
    prompt = await _prompt(server, call.body)
    return JsonResponse({"input_tokens": len(prompt.ids)})


async def _prompt(server: Server, body: CountBody) -> Prompt:
    """The conversation in tokens; where the assistant spoke last, the answer goes on with what it said."""
    told = []
    if body.system:
        told.append(ChatMessage(role="system", content=text_parts(body.system, "system", ("text",))))
    for i, one in enumerate(body.messages):
        content = text_parts(one.content, f"messages.{i}.content", ("text",))
        told.append(ChatMessage(role=one.role, content=content))
    go_on = told[-1].role == "assistant"
    return await conversation(server, told, None, generation_prompt=not go_on, go_on=go_on)


async def _stream(generation: Generation, shape: MessageShape) -> AsyncGenerator[bytes, None]:
    """Events, up to the last."""
    yield named_event({"type": "message_start", "message": shape.message(generation.usage())})
    yield named_event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    yield named_event({"type": "ping"})
    async for new in generation.pieces():
        for piece in new:
            if piece.text:
                delta = {"type": "text_delta", "text": piece.text}
                yield named_event({"type": "content_block_delta", "index": 0, "delta": delta})
            if piece.ended is None:
                continue
            if (error := failure(piece.ended)) is not None:
                yield named_event(error.anthropic())
                return
            yield named_event({"type": "content_block_stop", "index": 0})
            stopped, usage = shape.stopped(piece.choice), shape.usage(generation.usage())
            yield named_event({"type": "message_delta", "delta": stopped, "usage": usage})
            yield named_event({"type": "message_stop"})


class MessageShape:
    """How messages look."""

    def __init__(self, model: str, label: str) -> None:
        self._model, self._label = model, label

    def message(self, usage: Usage) -> dict[str, Any]:
        """One that has just begun."""
        return {
            "id": self._label,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(usage),
        }

    def whole(self, generation: Generation, choice: Choice, text: str) -> dict[str, Any]:
        """One that is whole."""
        content = [{"type": "text", "text": text}]
        return self.message(generation.usage()) | {"content": content} | self.stopped(choice)

    def stopped(self, choice: Choice) -> dict[str, Any]:
        """Why it ended."""
        ended, at = choice.reply.ended, choice.answer.stop_reason
        assert ended is not None
        if ended.reason == "text_stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": at}
        return {"stop_reason": "max_tokens" if ended.reason == "length" else "end_turn", "stop_sequence": None}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Tokens of the prompt that were found in the cache are counted apart from those that were not."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
