"""POST /v1/responses: OpenAI's newer endpoint, for text. Nothing is stored, so a conversation is sent whole each time.

Events of a stream, each with a `sequence_number`:

    response.created  response.in_progress
    for each item, which is thoughts, a message, or a call:
        response.output_item.added  response.content_part.added (not for a call)
            response.{reasoning_text,output_text,function_call_arguments}.delta ...
        response.{...}.done  response.content_part.done  response.output_item.done
    response.completed | response.incomplete (cut off by `max_output_tokens`) | response.failed
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from typing import Any, Literal

from starlette.responses import Response

from lockstep.api.chat_tools import (
    Block,
    Blocks,
    Reading,
    Tools,
    blocks_of,
    check_tools,
    chosen,
    reading_of,
    template_options,
)
from lockstep.api.errors import ApiError, failure
from lockstep.api.generation import Choice, Generation, Prompt, Wanted, check_sampling, finish_reason, seed_of
from lockstep.api.http import JsonResponse, named_event, unless_left
from lockstep.api.openai_api import conversation, shaped, streamed
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
    tools = _tools(body)
    obliged = tools.grammar(server.limits)
    if asked is not None:
        if obliged:
            message = f"`{asked.field}` and `tool_choice` both say what the answer must be; give one of them"
            raise ApiError(400, message, asked.field)
        obliged = {"grammar": asked.grammar, "grammar_field": asked.field}
    prompt = await _prompt(server, body, tools)
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
        **obliged,
    )
    generation = server.generate(call, wanted, [prompt])
    shape = ResponseShape(
        body, name, wanted.label, reading_of(server.formats, tools, prompt.text, grammar=wanted.grammar)
    )
    if body.stream:
        return await streamed(server, call, generation, _stream(generation, shape))
    try:
        ((choice, text),) = await unless_left(call.request, generation.whole())
        blocks = await shaped(lambda: blocks_of(shape.reading.whole(0, text)), len(text))
        return JsonResponse(shape.ended(generation, choice, blocks))
    finally:
        generation.cancel()


def _tools(body: ResponseBody) -> Tools:
    """Tools as chat completions have them: here their fields lie one level up. Raises ApiError."""
    nested: list[dict[str, Any]] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            where = f"tools.{i}.type"
            raise ApiError(400, f"`{where}` must be function, got {str(tool.get('type'))[:40]!r}", where)
        names = ("name", "description", "parameters")
        nested.append({"type": "function", "function": {name: tool[name] for name in names if name in tool}})
    check_tools([one["function"] for one in nested], "tools.{}", "parameters")
    return chosen(nested, body.tool_choice, parallel=body.parallel_tool_calls)


async def _prompt(server: Server, body: ResponseBody, tools: Tools) -> Prompt:
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += _messages(body.input)
    template = None if server.text is None else server.text.chat_template
    effort = None if body.reasoning is None else body.reasoning.effort
    options = template_options(body.chat_template_kwargs, effort, template, "reasoning.effort")
    return await conversation(server, messages, tools.shown, field="input", options=options)


def _messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Messages for the template: thoughts and calls of one turn belong to one message. Raises ApiError."""
    messages: list[ChatMessage] = []
    turn: dict[str, Any] = {}  # of the assistant, that is not over

    def over() -> None:
        if turn:
            messages.append(ChatMessage(role="assistant", **{"content": None, **turn}))
            turn.clear()

    for i, item in enumerate(items):
        match item.type:
            case "reasoning":
                if turn.keys() - {"reasoning_content"}:
                    over()
                thought = text_parts(item.content or [], f"input.{i}.content", ("reasoning_text",))
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "function_call":
                name, arguments = _needs(item, i, "name"), _needs(item, i, "arguments")
                function = {"name": name, "arguments": arguments}
                call = {"id": _needs(item, i, "call_id"), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                over()
                output = text_parts(_needs(item, i, "output"), f"input.{i}.output", TEXTS)
                messages.append(ChatMessage(role="tool", tool_call_id=_needs(item, i, "call_id"), content=output))
            case _:
                message = _message(item, i)
                if message.role == "assistant":
                    if turn.keys() - {"reasoning_content"}:
                        over()
                    turn["content"] = message.content
                else:
                    over()
                    messages.append(message)
    over()
    return messages


def _needs(item: InputItem, index: int, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"`input.{index}.{name}` is missing", f"input.{index}.{name}")
    return value


def _message(item: InputItem, index: int) -> ChatMessage:
    """A message for the template. Raises ApiError."""
    if item.type != "message":
        where, known = f"input.{index}.type", "message, reasoning, function_call or function_call_output"
        raise ApiError(400, f"`{where}` must be {known}, got {item.type[:40]!r}", where)
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
    blocks = Blocks(shape.reading, first=shape.reading.form is None)
    for first in blocks.begin():
        for kind, fields in shape.told(*first):
            yield told(kind, **fields)
    async for new in generation.pieces():
        for piece in new:
            ended = piece.ended
            if ended is not None and (error := failure(ended)) is not None:
                failed = shape.response("failed") | {"error": {"code": "server_error", "message": error.message}}
                yield told("failed", response=failed)
                return
            if ended is not None:
                shape.cut = finish_reason(ended) != "stop"
            for step, block, text in blocks.take(piece.text, over=ended is not None):
                for kind, fields in shape.told(step, block, text, last=block is blocks.all[-1]):
                    yield told(kind, **fields)
            if ended is not None:
                whole = shape.ended(generation, piece.choice, blocks.all)
                yield told(whole["status"], response=whole)


class ResponseShape:
    """How responses look."""

    def __init__(self, body: ResponseBody, model: str, label: str, reading: Reading) -> None:
        self._body, self._model, self._label, self.reading = body, model, label, reading
        self._created = time.time()
        self.cut = False  # before it was over

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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if body.text is None else body.text.format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def ended(self, generation: Generation, choice: Choice, blocks: Sequence[Block]) -> dict[str, Any]:
        """One that is."""
        assert choice.reply.ended is not None
        reason = finish_reason(choice.reply.ended)
        status = {"stop": "completed", "length": "incomplete"}.get(reason, "cancelled")
        usage, self.cut = generation.usage(), status != "completed"
        said = self.response(status) | {
            "output": [self.item(block, last=block is blocks[-1]) for block in blocks],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reading.thought_tokens(generation)},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        said |= generation.weights()
        if status == "completed":
            said["completed_at"] = time.time()
        if reason == "length":
            said["incomplete_details"] = {"reason": "max_output_tokens"}
        return said

    def told(
        self, step: Literal["open", "more", "close"], block: Block, text: str, *, last: bool = False
    ) -> list[tuple[str, dict[str, Any]]]:
        """A step of a stream as events; `last` if no block comes behind this one, as far as anybody knows."""
        name, at = DELTAS[block.kind], {"output_index": block.number}
        if step == "open":
            added = ("output_item.added", at | {"item": self.item(block, begun=True)})
            place = {"item_id": block.id, **at}
            part = ("content_part.added", place | {"content_index": 0, "part": self.part(block)})
            return [added] if block.kind == "call" else [added, part]
        place = {"item_id": block.id, **at} | ({} if block.kind == "call" else {"content_index": 0})
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        if step == "more":
            return [(f"{name}.delta", place | {"delta": text} | more)]
        done = ("output_item.done", at | {"item": self.item(block, last=last)})
        if block.kind == "call":
            return [(f"{name}.done", place | {"name": block.name, "arguments": block.text}), done]
        return [
            (f"{name}.done", place | {"text": block.text} | more),
            ("content_part.done", place | {"part": self.part(block)}),
            done,
        ]

    def item(self, block: Block, *, begun: bool = False, last: bool = False) -> dict[str, Any]:
        """A block as an item.

        Args:
            begun: nothing of it is there yet.
            last: it is the one at which an answer that was cut off stopped.
        """
        block.id = block.id or f"{PREFIXES[block.kind]}_{secrets.token_hex(24)}"
        status = "in_progress" if begun else "incomplete" if (last and self.cut) or not block.whole else "completed"
        content = [] if begun else [self.part(block)]
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"id": block.id, "type": "function_call", "status": status, **call}
        if block.kind == "thought":
            return {"id": block.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": block.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, block: Block) -> dict[str, Any]:
        """Its text."""
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


DELTAS = {"thought": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
PREFIXES = {"thought": "rs", "content": "msg", "call": "fc"}
