"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, for text, thoughts and tool calls.

Events of a stream: message_start, ping; for each block, which is thinking, text or tool_use, content_block_start,
content_block_delta ..., content_block_stop; message_delta (reason of the end, token counts), message_stop; or error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from lockstep.api.endpoints.answer_run import new_hex
from lockstep.api.endpoints.chat_tools import (
    EFFORT,
    Block,
    Blocks,
    Reading,
    Tools,
    blocks_of,
    check_tools,
    chosen,
    reading_of,
    reads,
)
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import Choice, Generation, GenerationRequest, Prompt, Usage, check_sampling
from lockstep.api.endpoints.http import JsonResponse, named_event, unless_left
from lockstep.api.endpoints.openai_api import conversation, shaped, streamed
from lockstep.api.endpoints.responses_api import text_parts
from lockstep.api.endpoints.responses_tools import is_optional
from lockstep.api.endpoints.schemas import ChatMessage, CountBody, MessageBody, MessageItem, Sampling
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.structured_output import requested_grammar
from lockstep.api.text.rendering import NamedMedium


async def messages(server: Server, call: Call[MessageBody]) -> Response:
    """Answer a conversation."""
    body = call.body
    name = server.model(body.model)
    sampling = Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences)
    check_sampling(sampling, server.info(), server.limits, stop_field="stop_sequences")
    tools = _tools(call)
    prompt = await _prompt(server, call, tools)
    parameters = GenerationRequest(
        sampling=sampling,
        max_tokens=body.max_tokens,
        prompt_field="messages",
        stream=bool(body.stream),
        label=f"msg_{new_hex(16)}",
        tenant=call.tenant,
        salt=body.cache_salt or "",
        priority=body.priority,
        **_constraint(server, body, tools),
    )
    generation = server.generate(call, parameters, [prompt])
    reading = reading_of(
        server.formats,
        tools,
        prompt.text,
        continues=body.messages[-1].role == "assistant",
        grammar=parameters.grammar,
        id_prefix="toolu_",
    )
    shape = MessageShape(name, parameters.label, reading)
    if body.stream:
        return await streamed(server, call, generation, _stream(generation, shape))
    try:
        ((choice, text),) = await unless_left(call.request, generation.whole())
        return JsonResponse(await shaped(lambda: shape.whole(generation, choice, text), len(text)))
    finally:
        generation.cancel()


async def count_tokens(server: Server, call: Call[CountBody]) -> Response:
    """Count the tokens of a conversation, as rendered by the chat template."""
    server.model(call.body.model)
    prompt = await _prompt(server, call, _tools(call))
    return JsonResponse({"input_tokens": len(prompt.ids)})


def _constraint(server: Server, body: MessageBody, tools: Tools) -> dict[str, Any]:
    """Return the grammar of the answer as fields of `GenerationRequest`; {} for free text. Raises ApiError."""
    obliged = tools.grammar(server.limits)
    configured = None if body.output_config is None else body.output_config.format
    name = "output_format" if configured is None else "output_config.format"
    given = body.output_format if configured is None else configured
    if configured is not None and body.output_format is not None:
        message = "`output_config.format` and `output_format` both constrain the answer; give one of them"
        raise ApiError(400, message, name)
    requested = requested_grammar({"format": given}, server.limits, inside=name.removesuffix("format"))
    if requested is None:
        return obliged
    if obliged:
        message = f"`{name}` and `tool_choice` both constrain the answer; give one of them"
        raise ApiError(400, message, name)
    return {"grammar": requested.grammar, "grammar_field": name}


def _tools(call: Call[Any]) -> Tools:
    """Convert the tools to the form of chat completions. Raises ApiError."""
    body: CountBody = call.body
    used = []
    for i, tool in enumerate(body.tools or ()):
        if is_optional(tool.get("type")):
            call.ignore(f"tools.{i}.{tool['type']}")
            continue
        if tool.get("type") not in (None, "custom"):
            where = f"tools.{i}.type"
            raise ApiError(400, f"`{where}` must be custom, got {str(tool.get('type'))[:40]!r}", where)
        used.append(tool)
    check_tools(body.tools or (), "tools.{}", "input_schema")
    given = []
    for tool in used:
        function = {"name": tool["name"], "parameters": tool.get("input_schema")}
        if tool.get("description"):
            function["description"] = tool["description"]
        given.append({"type": "function", "function": function})
    choice = body.tool_choice
    if choice is None:
        return chosen(given, None)
    choices = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "name": choice.name}
    return chosen(given, choices.get(choice.type, named), parallel=not choice.disable_parallel_tool_use)


async def _prompt(server: Server, call: Call[Any], tools: Tools) -> Prompt:
    """Convert the conversation to tokens. If the last message is the assistant's, the answer continues it."""
    body: CountBody = call.body
    converted = []
    if body.system:
        converted.append(ChatMessage(role="system", content=text_parts(body.system, "system", ("text",))))
    media: list[NamedMedium] = []
    for i, one in enumerate(body.messages):
        converted += _converted(one, f"messages.{i}.content", media)
    go_on = converted[-1].role == "assistant"
    if go_on and converted[-1].tool_calls:
        raise ApiError(400, "`messages` end with a tool call; send its result", "messages")
    options = _template_options(server, call)
    return await conversation(
        server, converted, tools.shown, generation_prompt=not go_on, go_on=go_on, options=options, media=media
    )


def _converted(message: MessageItem, where: str, media: list[NamedMedium]) -> list[ChatMessage]:
    """Convert a message to the form of chat completions. Tool results become separate messages. Raises ApiError.

    Args:
        media: receives each image with its name.
    """
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    converted: list[ChatMessage] = []
    parts: list[dict[str, Any]] = []  # texts and images
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    allowed = {"assistant": ("text", "tool_use", "thinking"), "user": ("text", "image", "tool_result")}.get(
        message.role, ("text",)
    )
    for i, part in enumerate(message.content):
        kind, at = part.get("type"), f"{where}.{i}"
        if kind not in allowed:
            raise ApiError(400, f"`{at}.type` must be {' or '.join(allowed)}, got {str(kind)[:40]!r}", f"{at}.type")
        match kind:
            case "text":
                parts.append({"type": "text", "text": _field(part, "text", at, str)})
            case "image":
                parts.append({"type": "image_url", "image_url": {"url": _image_url(part, at)}})
                media.append(NamedMedium("image", f"{at}.source"))
            case "thinking":
                thoughts.append(_field(part, "thinking", at, str))
            case "tool_use":
                function = {"name": _field(part, "name", at, str), "arguments": _field(part, "input", at, dict)}
                calls.append({"id": _field(part, "id", at, str), "type": "function", "function": function})
            case "tool_result":
                if parts:
                    converted.append(ChatMessage(role=message.role, content=_joined(parts)))
                    parts = []
                inside = text_parts(part.get("content") or "", f"{at}.content", ("text",))
                of = _field(part, "tool_use_id", at, str)
                converted.append(ChatMessage(role="tool", tool_call_id=of, content=inside))
    more: dict[str, Any] = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if calls:
        more["tool_calls"] = calls
    if parts or more or not converted:
        converted.append(ChatMessage(role=message.role, content=_joined(parts) if parts or not more else None, **more))
    return converted


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: one text on separate lines, or with images the parts."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _image_url(part: dict[str, Any], at: str) -> str:
    """Return the source of an image as a URL. Raises ApiError."""
    source: dict[str, Any] = _field(part, "source", at, dict)
    match source.get("type"):
        case "base64":
            kind = _field(source, "media_type", f"{at}.source", str)
            return f"data:{kind};base64,{_field(source, 'data', f'{at}.source', str)}"
        case "url":
            url: str = _field(source, "url", f"{at}.source", str)
            return url
        case other:
            where = f"{at}.source.type"
            raise ApiError(400, f"`{where}` must be base64 or url, got {str(other)[:40]!r}", where)


def _field(part: dict[str, Any], name: str, at: str, kind: type) -> Any:
    value = part.get(name)
    if not isinstance(value, kind):
        expected = "a text" if kind is str else "an object"
        raise ApiError(400, f"`{at}.{name}` must be {expected}", f"{at}.{name}")
    return value


def _template_options(server: Server, call: Call[Any]) -> dict[str, Any]:
    """Return the template variables for thinking and effort. Fields that the model does not support are named."""
    body: CountBody = call.body
    template = (None if server.text is None else server.text.chat_template) or ""
    options: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        if reads(template, EFFORT):
            options[EFFORT] = body.output_config.effort
        else:
            call.ignore("output_config.effort")
    if body.thinking is None:
        return options
    thinks = body.thinking.type != "disabled"
    switches: dict[str, Any] = {name: thinks for name in ("enable_thinking", "thinking") if reads(template, name)}
    if thinks and not switches and server.formats.thoughts is None:
        call.ignore("thinking")
    if thinks and body.thinking.budget_tokens:
        if reads(template, "thinking_budget"):
            switches["thinking_budget"] = body.thinking.budget_tokens
        else:
            call.ignore("thinking.budget_tokens")
    return options | switches


async def _stream(generation: Generation, shape: MessageShape) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    yield named_event({"type": "message_start", "message": shape.message(generation.usage())})
    blocks = Blocks(shape.reading, first=shape.reading.form is None)
    for step in blocks.begin():
        for one in shape.events(*step):
            yield named_event(one)
    yield named_event({"type": "ping"})
    async for new in generation.pieces():
        for piece in new:
            if piece.ended is not None and (error := generation.failure(piece.choice)) is not None:
                yield named_event(error.anthropic())
                return
            for step in blocks.take(piece.text, over=piece.ended is not None):
                for one in shape.events(*step):
                    yield named_event(one)
            if piece.ended is None:
                continue
            stopped, usage = shape.stopped(piece.choice), shape.usage(generation.usage())
            yield named_event({"type": "message_delta", "delta": stopped, "usage": usage, **generation.weights()})
            yield named_event({"type": "message_stop"})


class MessageShape:
    """Builds messages in Anthropic's form."""

    def __init__(self, model: str, label: str, reading: Reading) -> None:
        self._model, self._label, self.reading = model, label, reading

    def message(self, usage: Usage) -> dict[str, Any]:
        """Return a message without content, for the beginning of a stream."""
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
        """Return a complete message."""
        content = [self.block(block) for block in blocks_of(self.reading.whole(0, text))]
        return self.message(generation.usage()) | {"content": content} | self.stopped(choice) | generation.weights()

    def block(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        """Return a block of the answer; with `begun` without its content."""
        text = "" if begun else block.text
        if block.kind == "call":
            given = msgspec.Raw(b"{}" if begun else text.encode())
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}

    def events(self, step: Literal["open", "more", "close"], block: Block, text: str) -> list[dict[str, Any]]:
        """Return the events of one step of a stream."""
        at = {"index": block.number}
        if step == "open":
            return [{"type": "content_block_start", **at, "content_block": self.block(block, begun=True)}]
        if step == "close":
            return [{"type": "content_block_stop", **at}]
        kind, name = DELTAS[block.kind]
        return [{"type": "content_block_delta", **at, "delta": {"type": kind, name: text}}]

    def stopped(self, choice: Choice) -> dict[str, Any]:
        """Return the fields with the reason of the end."""
        ended, at = choice.reply.ended, choice.answer.stop_reason
        assert ended is not None
        if ended.reason == "text_stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": at}
        if ended.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self.reading.called(0) else "end_turn", "stop_sequence": None}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return token counts. As in Anthropic's API, `input_tokens` excludes tokens found in the radix cache."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
