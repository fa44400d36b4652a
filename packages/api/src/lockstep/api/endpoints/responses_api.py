"""/v1/responses: OpenAI's newer endpoint, for text.

Answers are stored for a limited time (`stored_responses`): they can be fetched again, and `previous_response_id`
continues one. With `background` the request returns at once, and the answer is generated without a waiting client.

Events of a stream, each with a `sequence_number`:

    response.created  response.in_progress
    for each item, which is thoughts, a message, or a call:
        response.output_item.added  response.content_part.added (not for a call)
            response.{reasoning_text,output_text,function_call_arguments}.delta ...
        response.{...}.done  response.content_part.done  response.output_item.done
    response.completed | response.incomplete (cut off by `max_output_tokens`) | response.failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

from starlette.responses import Response

from lockstep.api.endpoints.answer_run import RUN, created_s, new_hex
from lockstep.api.endpoints.chat_tools import (
    Block,
    Blocks,
    Reading,
    Tools,
    blocks_of,
    reading_of,
    template_options,
)
from lockstep.api.endpoints.conversations_api import listed
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import (
    Choice,
    Generation,
    GenerationRequest,
    Prompt,
    check_logprobs,
    check_sampling,
    finish_reason,
    seed_of,
    unavailable,
)
from lockstep.api.endpoints.http import EventStream, JsonResponse, named_event, unless_left
from lockstep.api.endpoints.openai_api import conversation, salt_of, shaped, streamed
from lockstep.api.endpoints.responses_tools import ToolName, arguments_of, input_of, response_tools
from lockstep.api.endpoints.resumable import after_of, reply
from lockstep.api.endpoints.schemas import ChatMessage, InputItem, ResponseBody
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.stored_responses import StoredResponse, StoredResponses
from lockstep.api.endpoints.structured_output import requested_grammar
from lockstep.api.processes.bridge import EngineUnavailable

log = logging.getLogger("lockstep.worker")

TEXTS, IMAGE = ("input_text", "output_text", "text"), "input_image"
LOGPROBS = "message.output_text.logprobs"
NONE_STORED = "this server stores no answers (--stored-responses 0)"
CANCELLED_WITHIN_S, CANCELLED_LOOK_S = 5.0, 0.02
"""Seconds for a cancelled answer to end with its partial output, and between checks; later it ends without output."""

Keep = Callable[[dict[str, Any]], object]
"""Called with an answer that has ended, to store it."""


async def responses(server: Server, call: Call[ResponseBody]) -> Response:
    """Answer an input."""
    body = call.body
    name = server.model(body.model)
    check_sampling(body, server.info(), server.limits)
    requested = None if body.text is None else requested_grammar(vars(body.text), server.limits, inside="text.")
    for one in body.include or ():
        if one != LOGPROBS:
            call.ignore(f"include.{one[:60]}")
    named = response_tools(body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls, ignore=call.ignore)
    tools = named.tools
    obliged = tools.grammar(server.limits)
    if requested is not None:
        if obliged:
            message = f"`{requested.field}` and `tool_choice` both constrain the answer; give one of them"
            raise ApiError(400, message, requested.field)
        obliged = {"grammar": requested.grammar, "grammar_field": requested.field}
    kept = _kept(server, body)
    before = _before(server, call)
    tops = body.top_logprobs if LOGPROBS in (body.include or ()) or body.top_logprobs else None
    if LOGPROBS in (body.include or ()):
        tops = tops or 0
    if tops is not None:
        check_logprobs(tops, "top_logprobs" if tops else "include", server.info(), server.limits)
    prompt = await _prompt(server, call, tools, before)
    parameters = GenerationRequest(
        sampling=body,
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        min_tokens=body.min_tokens or 0,
        prompt_field="input",
        seed=None if body.seed is None else seed_of(body.seed),
        stream=bool(body.stream),
        label=f"resp_{new_hex(24, 'response')}",
        tenant=call.tenant,
        salt=salt_of(body),
        priority=body.priority,
        tops=tops,
        **obliged,
    )
    generation = server.generate(call, parameters, [prompt])
    reading = reading_of(server.formats, tools, prompt.text, grammar=parameters.grammar)
    shape = ResponseShape(server, body, name, parameters, reading, kept=kept, tools=named.names)
    if body.background and RUN.get() is not None:
        return await _kept_background(server, call, generation, shape, before)
    if body.background:
        return await _begun(server, call, generation, shape, before)

    def keep(result: dict[str, Any]) -> None:
        _extend(server, call, result)
        if kept and server.responses is not None:
            result["store"] = not server.responses.put(call.tenant, result, _items(body, before), over=True)

    if body.stream:
        return await streamed(server, call, generation, _stream(generation, shape, keep))
    try:
        result = await unless_left(call.request, _whole(generation, shape))
        keep(result)
        return JsonResponse(result)
    finally:
        generation.cancel()


async def _whole(generation: Generation, shape: ResponseShape) -> dict[str, Any]:
    ((choice, text),) = await generation.whole()
    if shape.reading.form is None:
        shape.judge(choice, 0, len(choice.reply.tokens))
    blocks = await shaped(lambda: blocks_of(shape.reading.whole(0, text)), len(text))
    return shape.ended(generation, choice, blocks)


# ----------------------------------------------------------------------------------------------------- stored answers


def _kept(server: Server, body: ResponseBody) -> bool:
    """Return whether the answer is stored, by default true. Raises ApiError for fields that contradict it."""
    if server.responses is None:
        for name in ("store", "background", "previous_response_id"):
            if getattr(body, name):
                raise ApiError(400, f"`{name}`: {NONE_STORED}; leave it out, and send the whole conversation", name)
        return False
    if body.background and body.store is False:
        raise ApiError(400, "`background` answers are fetched later, so `store` must not be false", "background")
    if body.background and body.stream and server.answers is None:
        message = "`background` with `stream` needs kept answers, and this server keeps none (--kept-answers 0)"
        raise ApiError(400, message, "background")
    return body.store is not False


def _before(server: Server, call: Call[ResponseBody]) -> list[dict[str, Any]]:
    """Return the conversation that an input continues, as items. Raises ApiError."""
    name, conversation = call.body.previous_response_id, conversation_of(call.body)
    if name and conversation:
        message = "`conversation` and `previous_response_id` both name what the input continues; give one of them"
        raise ApiError(400, message, "conversation")
    if conversation:
        if server.conversations is None:
            raise ApiError(
                400, "`conversation`: this server stores no conversations (--stored-responses 0)", "conversation"
            )
        if server.conversations.find(call.tenant, conversation) is None:
            message = f"`conversation`: there is no conversation {conversation[:80]!r} here, or it has expired"
            raise ApiError(400, message, "conversation")
        return server.conversations.items(call.tenant, conversation)
    if not name:
        return []
    stored = None if server.responses is None else server.responses.get(call.tenant, name)
    if stored is None:
        message = f"`previous_response_id`: there is no response {name[:80]!r} here, or it has expired"
        raise ApiError(400, message, "previous_response_id")
    if stored.response["status"] not in ("completed", "incomplete"):
        status = stored.response["status"]
        message = f"`previous_response_id`: response {name[:80]!r} is {status}; only an answer can be continued"
        raise ApiError(400, message, "previous_response_id")
    return [*stored.input, *stored.response["output"]]


def conversation_of(body: ResponseBody) -> str:
    """Return the id of the conversation of a response; "" for none. Raises ApiError."""
    given = body.conversation
    name = given.get("id") if isinstance(given, dict) else given
    if given is not None and (not isinstance(name, str) or not name):
        raise ApiError(400, '`conversation` must be an id, or {"id": ...}', "conversation")
    return name or ""


def _extend(server: Server, call: Call[ResponseBody], result: dict[str, Any]) -> None:
    """Add input and output of an answer that has ended to its conversation."""
    name = conversation_of(call.body)
    if not name or server.conversations is None or result["status"] not in ("completed", "incomplete"):
        return
    if server.conversations.find(call.tenant, name) is not None:  # not deleted meanwhile
        server.conversations.add(call.tenant, name, [*_items(call.body, []), *result["output"]])


def _items(body: ResponseBody, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the whole input of an answer, as items with ids."""
    given: list[dict[str, Any]]
    if isinstance(body.input, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        given = [{"type": one.type, **one.model_dump(exclude_unset=True)} for one in body.input]
    return [*before, *({"id": f"item_{new_hex(24)}", **one} for one in given)]


async def _begun(
    server: Server,
    call: Call[ResponseBody],
    generation: Generation,
    shape: ResponseShape,
    before: list[dict[str, Any]],
) -> Response:
    """Store the answer as queued, return it, and generate it in the background. Raises ApiError if it was refused."""
    store = server.responses
    assert store is not None
    try:
        await unless_left(call.request, generation.accepted())
        result = shape.response("queued")
        if why := store.put(call.tenant, result, _items(call.body, before), over=False):
            raise ApiError(503, f"`background`: the answer could not be stored: {why}", "background")
    except BaseException:
        generation.cancel()
        raise
    task = asyncio.ensure_future(_in_background(store, call.tenant, generation, shape))
    server.background.add(task)
    task.add_done_callback(server.background.discard)
    return JsonResponse(result)


async def _kept_background(
    server: Server,
    call: Call[ResponseBody],
    generation: Generation,
    shape: ResponseShape,
    before: list[dict[str, Any]],
) -> Response:
    """Return the stream of an answer in the background, which is kept; every state of the answer is stored, too."""
    store, tenant = server.responses, call.tenant
    assert store is not None
    try:
        await generation.accepted()
        queued = shape.response("queued")
        if why := store.put(tenant, queued, _items(call.body, before), over=False, lasting=True):
            raise ApiError(503, f"`background`: the answer could not be stored: {why}", "background")
    except BaseException:
        generation.cancel()
        raise

    def keep(result: dict[str, Any]) -> None:
        _extend(server, call, result)
        store.change(tenant, result, over=True)

    async def events() -> AsyncGenerator[bytes, None]:
        store.change(tenant, shape.response("in_progress"), over=False)
        async for one in _stream(generation, shape, keep):
            yield one

    return EventStream(events(), over=generation.cancel)


async def _in_background(store: StoredResponses, tenant: str, generation: Generation, shape: ResponseShape) -> None:
    """Generate an answer in the background, and store each of its states."""
    try:
        await generation.began()
        store.change(tenant, shape.response("in_progress"), over=False)
        result = await _whole(generation, shape)
        store.change(tenant, result, over=True)
    except ApiError as error:
        store.change(tenant, shape.failed(error.message), over=True)
    except Exception:  # an error of one request; other requests continue
        log.exception("a response in the background failed")
        store.change(tenant, shape.failed("the server failed; its log has the cause"), over=True)
    finally:
        generation.cancel()


def _found(server: Server, call: Call[None]) -> tuple[StoredResponses, str, StoredResponse]:
    """Return the store, and id and answer of the request's path. Raises ApiError, 404."""
    name = str(call.request.path_params["response_id"])
    if server.responses is None:
        raise ApiError(404, NONE_STORED)
    stored = server.responses.get(call.tenant, name)
    if stored is None:
        raise ApiError(404, f"there is no response {name[:80]!r} here, or it has expired")
    return server.responses, name, stored


async def response(server: Server, call: Call[None]) -> Response:
    """Return a stored answer, also while it is in progress; with `stream`, the events of one in the background."""
    query = call.request.query_params
    _, name, stored = _found(server, call)
    if query.get("stream", "false").lower() in ("false", "0", ""):
        return JsonResponse(stored.response)
    path = None if server.answers is None else server.answers.find(call.tenant, name)
    if server.answers is None or path is None:
        message = "`stream`: only the events of a response in the background are kept; it is returned whole"
        raise ApiError(400, message, "stream")
    after = after_of(call.request)
    following = reply(server, server.answers.follow(path), name, after, always_stream=True)
    return await unless_left(call.request, following)


async def delete_response(server: Server, call: Call[None]) -> Response:
    """Delete an answer. An answer in progress is cancelled."""
    store, name, stored = _found(server, call)
    if not stored.over:
        _cancel(server, call, name)
    store.remove(call.tenant, name)
    if server.answers is not None and (path := server.answers.find(call.tenant, name)) is not None:
        server.answers.remove(path)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def cancel_response(server: Server, call: Call[None]) -> Response:
    """Cancel an answer in the background. Its partial output is kept. An answer that has ended does not change."""
    store, name, stored = _found(server, call)
    if not stored.response["background"]:
        raise ApiError(400, f"response {name[:80]!r} is not made in the background; close its connection to end it")
    if stored.over:
        return JsonResponse(stored.response)
    _cancel(server, call, name)
    until_s = time.monotonic() + CANCELLED_WITHIN_S
    # the worker that generates the answer stores its end; it may be another worker than this one
    while not stored.over and time.monotonic() < until_s:
        await asyncio.sleep(CANCELLED_LOOK_S)
        stored = _found(server, call)[2]
    if not stored.over:
        store.change(call.tenant, stored.response | {"status": "cancelled"}, over=True)
        stored = _found(server, call)[2]
    return JsonResponse(stored.response)


def _cancel(server: Server, call: Call[None], name: str) -> None:
    try:
        server.bridge.cancel_label(name, call.tenant)
    except EngineUnavailable as error:
        raise unavailable(error) from error


async def input_items(server: Server, call: Call[None]) -> Response:
    """List the input of an answer, newest first or by `order`, at most `limit` items from the item `after` on."""
    items = _found(server, call)[2].input
    return JsonResponse(listed(items, call))


# ---------------------------------------------------------------------------------------------------------------- input


async def _prompt(server: Server, call: Call[ResponseBody], tools: Tools, before: list[dict[str, Any]]) -> Prompt:
    """Render the conversation, and tokenise it. With `truncation` auto, the oldest turns are dropped as needed."""
    body = call.body
    fixed = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    given = body.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    messages = _messages([*map(InputItem.model_validate, before), *items], len(before))
    template = None if server.text is None else server.text.chat_template
    effort = None if body.reasoning is None else body.reasoning.effort
    options = template_options(body.chat_template_kwargs, effort, template, call.ignore, "reasoning.effort")

    async def render(kept: list[ChatMessage]) -> Prompt:
        return await conversation(server, [*fixed, *kept], tools.shown, field="input", options=options)

    if body.truncation != "auto":
        return await render(messages)
    info = server.info()
    room = min(info.prompt_tokens_max, info.request_tokens_max - (body.max_output_tokens or 1))
    while messages and messages[0].role == "system":
        fixed.append(messages.pop(0))
    return await newest_turns(messages, room, render)


async def prompt_of_response(server: Server, call: Call[ResponseBody]) -> Prompt:
    """Return the prompt that a response would have. Raises ApiError."""
    body = call.body
    server.model(body.model)
    tools = response_tools(body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls, ignore=call.ignore)
    return await _prompt(server, call, tools.tools, _before(server, call))


async def newest_turns(
    messages: list[ChatMessage], room: int, render: Callable[[list[ChatMessage]], Awaitable[Prompt]]
) -> Prompt:
    """Return the prompt of as many of the newest turns as fit; a turn begins with a message of the user.

    Args:
        room: most tokens of the prompt.
        render: returns the prompt of some messages. It is called a logarithmic number of times.
    Raises: ApiError if not even the newest turn can be rendered.
    """
    starts = [0, *(at for at, one in enumerate(messages) if at and one.role == "user")]
    low, high, best = 0, len(starts) - 1, None
    while low < high:
        middle = (low + high) // 2
        try:
            prompt: Prompt | None = await render(messages[starts[middle] :])
        except ApiError:  # longer than any prompt: refused without being tokenised
            prompt = None
        if prompt is not None and len(prompt.ids) <= room:
            best, high = prompt, middle
        else:
            low = middle + 1
    return best if best is not None else await render(messages[starts[low] :])


def _messages(items: Sequence[InputItem], before: int = 0) -> list[ChatMessage]:
    """Convert items to messages for the template. Thoughts and calls of one turn become one message. Raises ApiError.

    Args:
        before: number of leading items from earlier answers. Item numbers in errors start after them.
    """
    messages: list[ChatMessage] = []
    turn: dict[str, Any] = {}  # fields of the assistant's incomplete message

    def over() -> None:
        if turn:
            messages.append(ChatMessage(role="assistant", **{"content": None, **turn}))
            turn.clear()

    for i, item in enumerate(items, -before):
        match item.type:
            case "reasoning":
                if turn.keys() - {"reasoning_content"}:
                    over()
                thought = text_parts(item.content or [], f"input.{i}.content", ("reasoning_text",))
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "function_call" | "custom_tool_call":
                name, more = _needs(item, i, "name"), item.model_extra or {}
                if item.type == "custom_tool_call":
                    arguments = arguments_of(str(more.get("input") or ""))
                else:
                    arguments = _needs(item, i, "arguments")
                function = {"name": f"{more['namespace']}.{name}" if more.get("namespace") else name}
                function["arguments"] = arguments
                call = {"id": _needs(item, i, "call_id"), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
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
    """Convert an item to a message for the template. Raises ApiError."""
    if item.type != "message":
        where, known = f"input.{index}.type", "message, reasoning, or a call of a tool or its output"
        raise ApiError(400, f"`{where}` must be {known}, got {item.type[:40]!r}", where)
    if item.role is None or item.content is None:
        where = f"input.{index}.{'role' if item.role is None else 'content'}"
        raise ApiError(400, f"`{where}` is missing", where)
    role = "system" if item.role == "developer" else item.role
    where = f"input.{index}.content"
    if not isinstance(item.content, list) or role != "user" or all(one.get("type") != IMAGE for one in item.content):
        return ChatMessage(role=role, content=text_parts(item.content, where, TEXTS))
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(item.content):
        if part.get("type") != IMAGE:
            parts.append({"type": "text", "text": text_parts([part], where, TEXTS)})
        elif isinstance(url := part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            at = f"{where}.{i}.image_url"
            raise ApiError(400, f"`{at}` must be a URL; files of clients are not read as images", at)
    return ChatMessage(role=role, content=parts)


def text_parts(content: str | list[dict[str, Any]], where: str, kinds: tuple[str, ...]) -> str:
    """Return the parts of a message as one text, on separate lines. Raises ApiError for a part that is not text."""
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


# --------------------------------------------------------------------------------------------------------------- output


async def _stream(generation: Generation, shape: ResponseShape, keep: Keep) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    numbers = count()

    def sent(kind: str, **more: Any) -> bytes:
        return named_event({"type": f"response.{kind}", "sequence_number": next(numbers), **more})

    yield sent("created", response=shape.response("in_progress"))
    yield sent("in_progress", response=shape.response("in_progress"))
    blocks = Blocks(shape.reading, first=shape.reading.form is None)
    for first in blocks.begin():
        for kind, fields in shape.events(*first):
            yield sent(kind, **fields)
    async for new in generation.pieces():
        for piece in new:
            ended = piece.ended
            if ended is not None and (error := generation.failure(piece.choice)) is not None:
                failed = shape.failed(error.message)
                keep(failed)
                yield sent("failed", response=failed)
                return
            if ended is not None:
                shape.cut = finish_reason(ended) != "stop"
            if shape.reading.form is None:
                shape.judge(piece.choice, piece.first, piece.stop)
            for step, block, text in blocks.take(piece.text, over=ended is not None):
                for kind, fields in shape.events(step, block, text, last=block is blocks.all[-1]):
                    yield sent(kind, **fields)
            if ended is not None:
                whole = shape.ended(generation, piece.choice, blocks.all)
                keep(whole)
                yield sent(whole["status"], response=whole)


class ResponseShape:
    """Builds responses."""

    def __init__(
        self,
        server: Server,
        body: ResponseBody,
        model: str,
        parameters: GenerationRequest,
        reading: Reading,
        *,
        kept: bool = False,
        tools: Mapping[str, ToolName] | None = None,
    ) -> None:
        self._body, self._model, self._label, self.reading, self._kept = body, model, parameters.label, reading, kept
        self._names, self._tops, self._tools = server.names, parameters.tops, tools or {}
        self._logprobs: list[dict[str, Any]] = []  # of the whole text so far, if the answer is one text
        self._created = created_s()
        self.cut = False  # whether the answer was cut off

    def response(self, status: str) -> dict[str, Any]:
        """Return a response without output, in this status."""
        body = self._body
        return {
            "id": self._label,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "conversation": {"id": conversation_of(body)} if body.conversation else None,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self._kept,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if body.text is None else body.text.format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": self._tops or 0,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }

    def failed(self, message: str) -> dict[str, Any]:
        """Return a response that failed with this message."""
        return self.response("failed") | {"error": {"code": "server_error", "message": message}}

    def ended(self, generation: Generation, choice: Choice, blocks: Sequence[Block]) -> dict[str, Any]:
        """Return a response that has ended."""
        assert choice.reply.ended is not None
        reason = finish_reason(choice.reply.ended)
        status = {"stop": "completed", "length": "incomplete"}.get(reason, "cancelled")
        usage, self.cut = generation.usage(), status != "completed"
        self.judge(choice, 0, len(choice.reply.tokens), blocks)
        result = self.response(status) | {
            "output": [self.item(block, last=block is blocks[-1]) for block in blocks],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reading.thought_tokens(generation)},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        result |= generation.weights()
        if status == "completed":
            result["completed_at"] = time.time()
        if reason == "length":
            result["incomplete_details"] = {"reason": "max_output_tokens"}
        return result

    def events(
        self, step: Literal["open", "more", "close"], block: Block, text: str, *, last: bool = False
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of one step of a stream. `last`: the block is the last one so far."""
        name, at = DELTAS[block.kind], {"output_index": block.number}
        if step == "open":
            added = ("output_item.added", at | {"item": self.item(block, begun=True)})
            place = {"item_id": block.id, **at}
            part = ("content_part.added", place | {"content_index": 0, "part": self.part(block)})
            return [added] if block.kind == "call" else [added, part]
        place = {"item_id": block.id, **at} | ({} if block.kind == "call" else {"content_index": 0})
        if block.kind == "call" and self._named(block).kind == "custom":
            return self._custom_events(step, block, place, last=last)
        more: dict[str, Any] = {"logprobs": self.delta_logprobs} if block.kind == "content" else {}
        if step == "more":
            return [(f"{name}.delta", place | {"delta": text} | more)]
        done = ("output_item.done", at | {"item": self.item(block, last=last)})
        if block.kind == "call":
            return [(f"{name}.done", place | {"name": block.name, "arguments": block.text}), done]
        more = {"logprobs": self._logprobs} if block.kind == "content" else {}
        return [
            (f"{name}.done", place | {"text": block.text} | more),
            ("content_part.done", place | {"part": self.part(block)}),
            done,
        ]

    def _custom_events(
        self, step: Literal["open", "more", "close"], block: Block, place: dict[str, Any], *, last: bool
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a free-form call. Its text is part of JSON, so it is sent once the call is complete."""
        if step != "close":
            return []
        text = input_of(block.text)
        return [
            ("custom_tool_call_input.delta", place | {"delta": text}),
            ("custom_tool_call_input.done", place | {"input": text}),
            ("output_item.done", {"output_index": block.number, "item": self.item(block, last=last)}),
        ]

    def _named(self, block: Block) -> ToolName:
        """Return the client's name of the tool of a call."""
        return self._tools.get(block.name) or ToolName("function", block.name)

    @property
    def delta_logprobs(self) -> list[dict[str, Any]]:
        """Logprobs of the newest piece; they are known by piece only where the whole answer is one text."""
        return self._logprobs[self._judged :] if self.reading.form is None else []

    _judged = 0

    def judge(self, choice: Choice, first: int, stop: int, blocks: Sequence[Block] = ()) -> None:
        """Add the logprobs of output tokens [first:stop), if they were requested.

        Args:
            blocks: of a complete answer. With one text and without calls, the tokens behind its thoughts are its own.
        """
        if self._tops is None:
            return
        if self.reading.form is not None:
            if [one.kind for one in blocks if one.kind != "thought"] != ["content"]:
                return
            first = self.reading.first_content_token(choice)
        elif blocks:
            return
        reply, self._judged = choice.reply, len(self._logprobs)
        for number in range(first, stop):
            entry = self._logprob(reply.tokens[number], reply.logprobs[number])
            tops = reply.tops[number][: self._tops] if reply.tops else []
            self._logprobs.append(entry | {"top_logprobs": [self._logprob(*pair) for pair in tops]})

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        written, raw = self._names.of(token)
        return {"token": written, "logprob": value, "bytes": list(raw)}

    def item(self, block: Block, *, begun: bool = False, last: bool = False) -> dict[str, Any]:
        """Return a block as an item.

        Args:
            begun: the item has no content yet.
            last: the item is the last one; it is incomplete if the answer was cut off.
        """
        block.id = block.id or f"{PREFIXES[block.kind]}_{new_hex(24)}"
        status = "in_progress" if begun else "incomplete" if (last and self.cut) or not block.whole else "completed"
        content = [] if begun else [self.part(block)]
        if block.kind == "call":
            named = self._named(block)
            call = {"id": block.id, "status": status, "call_id": block.call_id, "name": named.name}
            if named.kind == "custom":
                return call | {"type": "custom_tool_call", "input": "" if begun else input_of(block.text)}
            if named.namespace:
                call["namespace"] = named.namespace
            return call | {"type": "function_call", "arguments": block.text}
        if block.kind == "thought":
            return {"id": block.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": block.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, block: Block) -> dict[str, Any]:
        """Return the content part of a block."""
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs}


DELTAS = {"thought": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
PREFIXES = {"thought": "rs", "content": "msg", "call": "fc"}
