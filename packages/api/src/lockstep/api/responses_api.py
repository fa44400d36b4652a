"""POST /v1/responses: OpenAI's newer endpoint, for text. Nothing is stored, so a conversation is sent whole each time.

Events of a stream, each with a `sequence_number`:

    response.created  response.in_progress  response.output_item.added  response.content_part.added
        response.output_text.delta ...
    response.output_text.done  response.content_part.done  response.output_item.done
    response.completed | response.incomplete (cut off by `max_output_tokens`) | response.failed
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

from starlette.responses import Response

from lockstep.api.errors import ApiError, failure
from lockstep.api.generation import Choice, Generation, Prompt, Wanted, check_sampling, finish_reason, seed_of
from lockstep.api.http import JsonResponse, named_event, unless_left
from lockstep.api.openai_api import conversation, streamed
from lockstep.api.schemas import ChatMessage, InputItem, ResponseBody
from lockstep.api.server import Call, Server
from lockstep.api.structured_output import grammar_asked

TEXTS = ("input_text", "output_text", "text")


async def responses(server: Server, call: Call[ResponseBody]) -> Response:
    """Answer an input."""
    body = call.body
    name = server.model(body.model)
    check_sampling(body, server.about(), server.limits)
    asked = None if body.text is None else grammar_asked(vars(body.text), server.limits, inside="text.")
    prompt = await _prompt(server, body)
    wanted = Wanted(
        sampling=body,
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        min_tokens=body.min_tokens or 0,
        prompt_field="input",
        seed=None if body.seed is None else seed_of(body.seed),
        stream=bool(body.stream),
        label=f"resp_{secrets.token_hex(24)}",
        tenant=call.tenant,
        salt=body.cache_salt or "",
        priority=body.priority,
        grammar=None if asked is None else asked.grammar,
        grammar_field="" if asked is None else asked.field,
    )
    generation = server.generate(call, wanted, [prompt])
    shape = ResponseShape(body, name, wanted.label)
    if body.stream:
        return await streamed(server, call, generation, _stream(generation, shape))
    try:
        ((choice, text),) = await unless_left(call.request, generation.whole())
        return JsonResponse(shape.ended(generation, choice, text))
    finally:
        generation.cancel()


async def _prompt(server: Server, body: ResponseBody) -> Prompt:
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += [_message(item, i) for i, item in enumerate(body.input)]
    return await conversation(server, messages, None, field="input")


def _message(item: InputItem, index: int) -> ChatMessage:
    """A message for the template. Raises ApiError."""
    if item.type != "message":
        where = f"input.{index}.type"
        raise ApiError(400, f"`{where}` must be message, got {item.type[:40]!r}: this server has no other items", where)
    if item.role is None or item.content is None:
        where = f"input.{index}.{'role' if item.role is None else 'content'}"
        raise ApiError(400, f"`{where}` is missing", where)
    role = "system" if item.role == "developer" else item.role
    return ChatMessage(role=role, content=text_parts(item.content, f"input.{index}.content", TEXTS))


def text_parts(content: str | list[dict[str, Any]], where: str, kinds: tuple[str, ...]) -> str:
    """Parts of a message as one text. Raises ApiError for what is none."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            at = f"{where}.{i}.type"
            expected, came = " or ".join(kinds), str(part.get("type"))[:40]
            raise ApiError(400, f"`{at}` must be {expected}, with a text, got {came!r}", at)
        texts.append(part["text"])
    return "\n".join(texts)


async def _stream(generation: Generation, shape: ResponseShape) -> AsyncGenerator[bytes, None]:
    """Events, up to the last."""
    numbers = count()

    def told(kind: str, **more: Any) -> bytes:
        return named_event({"type": f"response.{kind}", "sequence_number": next(numbers), **more})

    yield told("created", response=shape.response("in_progress"))
    yield told("in_progress", response=shape.response("in_progress"))
    yield told("output_item.added", output_index=0, item=shape.item("in_progress", None))
    place = {"item_id": shape.item_id, "output_index": 0, "content_index": 0}
    yield told("content_part.added", **place, part=shape.part(""))
    text = ""
    async for new in generation.pieces():
        for piece in new:
            text += piece.text
            if piece.text:
                yield told("output_text.delta", **place, delta=piece.text, logprobs=[])
            if piece.ended is None:
                continue
            if (error := failure(piece.ended)) is not None:
                failed = shape.response("failed") | {"error": {"code": "server_error", "message": error.message}}
                yield told("failed", response=failed)
                return
            whole = shape.ended(generation, piece.choice, text)
            yield told("output_text.done", **place, text=text, logprobs=[])
            yield told("content_part.done", **place, part=shape.part(text))
            yield told("output_item.done", output_index=0, item=whole["output"][0])
            yield told(whole["status"], response=whole)


class ResponseShape:
    """How responses look."""

    def __init__(self, body: ResponseBody, model: str, label: str) -> None:
        self._body, self._model, self._label = body, model, label
        self._created = time.time()
        self.item_id = f"msg_{secrets.token_hex(24)}"

    def response(self, status: str) -> dict[str, Any]:
        """One that is not whole yet."""
        body = self._body
        return {
            "id": self._label,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if body.text is None else body.text.format or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def ended(self, generation: Generation, choice: Choice, text: str) -> dict[str, Any]:
        """One that is."""
        assert choice.reply.ended is not None
        reason = finish_reason(choice.reply.ended)
        status = {"stop": "completed", "length": "incomplete"}.get(reason, "cancelled")
        usage = generation.usage()
        said = self.response(status) | {
            "output": [self.item("completed" if status == "completed" else "incomplete", text)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if status == "completed":
            said["completed_at"] = time.time()
        if reason == "length":
            said["incomplete_details"] = {"reason": "max_output_tokens"}
        return said

    def item(self, status: str, text: str | None) -> dict[str, Any]:
        """The message; None: nothing of it is there yet."""
        content = [] if text is None else [self.part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        """Its text."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
