"""The OpenAI endpoints: /v1/models, /v1/completions, /v1/chat/completions.

Answers have the form that the official client and clients of other servers expect. Additions are `stop_reason`,
`token_ids` (on request, as in vLLM) and sentences in errors.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.responses import Response

from lockstep.api.endpoints.answer_run import created_s, new_hex
from lockstep.api.endpoints.beam_search import BeamShape, beam_parameters, beams_of, check_beams
from lockstep.api.endpoints.chat_tools import Reading, Tools, reading_of, template_options, tools_of
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import (
    Choice,
    ChoiceDelta,
    Generation,
    GenerationRequest,
    Prompt,
    check_answers,
    check_logprobs,
    check_sampling,
    embedded_prompts,
    finish_reason,
    prompts_of,
    request_of,
    seed_of,
    tokens_of,
    weights_of,
)
from lockstep.api.endpoints.http import DONE, EventStream, JsonResponse, event, in_process, unless_left
from lockstep.api.endpoints.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    EmbeddingBody,
    GenerateBody,
    OpenAI,
    ResponseBody,
    TokenizeBody,
)
from lockstep.api.endpoints.server import AT_ONCE_CHARACTERS, Call, Server
from lockstep.api.endpoints.structured_output import bad_words, requested_grammar
from lockstep.api.processes.wire import EngineInfo
from lockstep.api.settings import Limits
from lockstep.api.text.chat_formats.driver import (
    CallArguments,
    CallBegan,
    CallBroken,
    CallEnded,
    ContentDelta,
    Event,
    Thought,
)
from lockstep.api.text.rendering import Conversation, NamedMedium, RenderingError, characters_of, media_of
from lockstep.host.media.kinds import KINDS

MARK = "\ue000here\ue000"  # a text that occurs in no model name or id
Shaped = TypeVar("Shaped")
SHAPED_AT_ONCE_CHARACTERS = 16384
"""Whole answers up to this length are parsed in the event loop, in a few milliseconds; longer answers in a thread."""

NEEDS_NONE_CONTENT = re.compile(r"content['\"]?\]?\s+is\s+(?:not\s+)?none")
"""Chat templates that recognise a call by null content. Other templates would render it as `None`, or fail."""

AT_ONCE_MESSAGES = 64
"""Conversations up to this number of messages and tools are rendered in the event loop, longer ones in a process."""

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. Chats have no default: the context is the limit."""

# --------------------------------------------------------------------------------------------------------------- models


async def models(server: Server, call: Call[None]) -> Response:
    """List the served models."""
    names = (*server.models(), *server.bridge.adapters)
    return JsonResponse({"object": "list", "data": [_model(server, name) for name in names]})


async def model(server: Server, call: Call[None]) -> Response:
    """Describe one of the served models."""
    return JsonResponse(_model(server, server.model(call.request.path_params["name"])))


def _model(server: Server, name: str) -> dict[str, Any]:
    adapter = server.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": server.started_s,
        "owned_by": "lockstep",
        "root": Path(server.bridge.adapters[adapter]).name if adapter else server.info().model,
        "parent": server.models()[0] if adapter else None,
        "max_model_len": server.info().request_tokens_max,
    }


# ---------------------------------------------------------------------------------------------------------- completions


async def completions(server: Server, call: Call[CompletionBody]) -> Response:
    """Generate continuations of prompts."""
    body, info, limits = call.body, server.info(), server.limits
    name = server.model(body.model)
    samples = body.n or 1
    drawn = samples if body.best_of is None else body.best_of
    given = _prompts(body)
    check_answers(len(given), drawn, limits, samples_field="n" if drawn == samples else "best_of")
    check_best_of(body, samples, info)
    check_sampling(body, info, limits)
    if body.logprobs is not None:
        check_logprobs(body.logprobs, "logprobs", info, limits)
    if body.echo and body.logprobs is not None and body.stream:
        raise ApiError(
            400, "`logprobs` of an echoed prompt are known at the end only, and cannot be in a `stream`", "logprobs"
        )
    check_prompt_logprobs(body, info, limits)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if check_beams(server, call):
        return await _beams(server, call, await _made(server, given, body), name, max_tokens)
    if not max_tokens and not body.echo:
        raise ApiError(400, "`max_tokens` is 0, so the answer is empty without `echo`", "max_tokens")
    judged = (body.echo and body.logprobs is not None) or body.prompt_logprobs is not None
    parameters = _parameters(
        server,
        body,
        call.tenant,
        label_of(body, "cmpl"),
        max_tokens=max_tokens,
        samples=drawn,
        tops=0 if body.logprobs is None and drawn > samples else body.logprobs,
        prompt_logprobs_from=0 if judged else None,
        prompt_tops=max(body.prompt_logprobs or 0, (body.logprobs or 0) if body.echo else 0),
    )
    prompts = await _made(server, given, body)
    generation = server.generate(call, parameters, prompts)
    shape = CompletionShape(server, body, name, parameters.label, best=(samples, drawn))
    return await _answer(server, call, generation, shape)


async def _beams(
    server: Server, call: Call[Any], prompts: Sequence[Prompt], name: str, max_tokens: int | None
) -> Response:
    """Return the answer of a beam search."""
    body, info, chats = call.body, server.info(), isinstance(call.body, ChatBody)
    if any(one.media is not None for one in prompts):
        raise ApiError(400, "`use_beam_search` takes texts or token ids as prompts", "use_beam_search")
    label = label_of(body, "chatcmpl" if chats else "cmpl")
    shape = BeamShape(server, body, name, label, int(created_s()), chats)
    for prompt in prompts:  # all are checked before the first one runs
        request_of(prompt, GenerationRequest(sampling=body, max_tokens=max_tokens), info)
    parameters = beam_parameters(server, call, salt_of(body), label)
    found = [(one, await beams_of(server, call, one, max_tokens, parameters)) for one in prompts]
    return JsonResponse(await shape.whole(found))


# mechanism: samples (executed)
def check_best_of(body: CompletionBody, samples: int, info: EngineInfo) -> None:
    """Check that `best_of` is at least `n`, and supported. Raises ApiError."""
    if body.best_of is None or body.best_of == samples:
        return
    if body.best_of < samples:
        raise ApiError(400, f"`best_of` is {body.best_of}, but must be at least `n`, which is {samples}", "best_of")
    if body.stream:
        raise ApiError(
            400, "the best answers are known at the end only, so `best_of` cannot be in a `stream`", "best_of"
        )
    if not info.logprobs:
        raise ApiError(400, "`best_of` is set, but an emulated engine has no logprobs to compare answers", "best_of")


def _prompts(body: CompletionBody) -> Sequence[Any]:
    """Return the prompts of a body, of which none is made yet. Raises ApiError."""
    if (body.prompt is None) == (body.prompt_embeds is None):
        raise ApiError(400, "give either `prompt` or `prompt_embeds`", "prompt")
    if body.prompt is not None:
        return prompts_of(body.prompt, "prompt")
    assert body.prompt_embeds is not None
    if body.echo:
        raise ApiError(400, "`echo` needs a prompt of tokens, and `prompt_embeds` has embeddings", "echo")
    return body.prompt_embeds.prompts


async def _made(server: Server, given: Sequence[Any], body: CompletionBody) -> list[Prompt]:
    """Return the prompts of a body. Raises ApiError."""
    if body.prompt_embeds is not None:
        return await embedded_prompts(body.prompt_embeds, "prompt_embeds", server.info())
    return [await _prompt(server, one, body) for one in given]


async def _prompt(server: Server, given: str | Sequence[int], body: CompletionBody) -> Prompt:
    text: str | None
    ids: Sequence[int]
    if isinstance(given, str):
        text, ids = given, await server.encode("`prompt`", given, special=body.add_special_tokens)
    else:
        text, ids = None, given
    kept = truncated(ids, body.truncate_prompt_tokens, server.info())
    if len(kept) < len(ids):
        ids, text = kept, None
    if text is None and body.echo:
        text = await server.decode("`echo`", ids)
    return Prompt(ids, text)


# ----------------------------------------------------------------------------------------------------------------- chat


async def chat(server: Server, call: Call[ChatBody]) -> Response:
    """Answer a conversation."""
    body, info, limits = call.body, server.info(), server.limits
    name = server.model(body.model)
    samples = body.n or 1
    check_answers(1, samples, limits)
    check_sampling(body, info, limits)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    if body.logprobs:
        check_logprobs(body.top_logprobs or 0, "top_logprobs" if body.top_logprobs else "logprobs", info, limits)
    check_prompt_logprobs(body, info, limits)
    tools = tools_of(body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls)
    prompt = await chat_prompt(server, call, tools)
    kept = truncated(prompt.ids, body.truncate_prompt_tokens, info)
    if prompt.media is not None and len(kept) < len(prompt.ids):
        raise ApiError(400, "`truncate_prompt_tokens` would cut a prompt with media", "truncate_prompt_tokens")
    prompt = replace(prompt, ids=kept)
    completion = body.max_completion_tokens
    if check_beams(server, call):
        return await _beams(server, call, [prompt], name, body.max_tokens if completion is None else completion)
    parameters = _parameters(
        server,
        body,
        call.tenant,
        label_of(body, "chatcmpl"),
        max_tokens=body.max_tokens if completion is None else completion,
        max_tokens_field="max_tokens" if completion is None else "max_completion_tokens",
        samples=samples,
        tops=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs_from=None if body.prompt_logprobs is None else 0,
        prompt_tops=body.prompt_logprobs or 0,
        **tools.grammar(limits),
    )
    if parameters.max_tokens == 0:
        raise ApiError(400, f"`{parameters.max_tokens_field}` must be at least 1, got 0", parameters.max_tokens_field)
    reading = reading_of(
        server.formats,
        tools,
        prompt.text,
        separate=body.separate_reasoning is not False,
        continues=body.continue_final_message,
        grammar=parameters.grammar,
    )
    generation = server.generate(call, parameters, [prompt])
    return await _answer(server, call, generation, ChatShape(server, body, name, parameters.label, reading))


async def chat_prompt(server: Server, call: Call[Any], tools: Tools) -> Prompt:
    """Render the conversation of a body by the chat template, and tokenise it. Raises ApiError."""
    body: ChatBody | TokenizeBody | EmbeddingBody = call.body
    effort = None if isinstance(body, EmbeddingBody) else body.reasoning_effort
    template = None if server.text is None else server.text.chat_template
    return await conversation(
        server,
        body.messages or (),
        tools.shown,
        generation_prompt=body.add_generation_prompt,
        go_on=body.continue_final_message,
        options=template_options(body.chat_template_kwargs, effort, template, call.ignore),
    )


async def conversation(
    server: Server,
    given: Sequence[ChatMessage],
    tools: list[dict[str, Any]] | None,
    *,
    generation_prompt: bool = True,
    go_on: bool = False,
    field: str = "messages",
    options: dict[str, Any] | None = None,
    media: Sequence[NamedMedium] | None = None,
) -> Prompt:
    """Render messages by the chat template, and tokenise them.

    Args:
        media: each medium with the client's name of it; None: as in chat completions.
        options: further variables of the template.
        go_on: the last message is incomplete, and the answer continues it.
        field: the client's name of the messages, for errors.
    Raises: ApiError.
    """
    if len(given) > server.limits.messages_max:
        message = f"`{field}` has {len(given)} messages, at most {server.limits.messages_max} are allowed"
        raise ApiError(400, message, field)
    if go_on and generation_prompt:
        message = "`continue_final_message` continues the last message; set `add_generation_prompt` to false"
        raise ApiError(400, message, "continue_final_message")
    text = server.needs_text("a conversation")
    none = NEEDS_NONE_CONTENT.search(text.chat_template or "") is not None
    messages = [one.model_dump(exclude_unset=True) for one in given]
    characters = sum(map(characters_of, messages))
    server.check_length(f"`{field}`", characters)
    variables: dict[str, Any] = {**(options or {}), "tools": tools, "add_generation_prompt": generation_prompt}
    variables |= {"seconds": server.limits.template_s, "characters_max": server.characters_max()}
    named = media_of(messages, field) if media is None else tuple(media)
    _check_media(server, named, field)
    names = tuple(one.name for one in named)
    chat = Conversation(messages, variables, field, go_on, nothing=None if none else "", media=names)
    if named:
        found = await in_process(server.processes.media(chat))
        return Prompt(found.ids, found.text, media=found)
    if characters <= AT_ONCE_CHARACTERS and len(messages) + len(tools or ()) <= AT_ONCE_MESSAGES:
        try:
            written, ids = chat.rendered(text)
        except RenderingError as error:
            raise ApiError(400, error.message, error.field) from None
        return Prompt(ids, written)
    written, tokens = await in_process(server.processes.chat(chat))
    return Prompt(tokens, written)


def _check_media(server: Server, media: Sequence[NamedMedium], field: str) -> None:
    """Check that the model takes media of these kinds, and so many. Raises ApiError."""
    for one in media:
        if why := server.info().why_no(one.kind):
            raise ApiError(
                400,
                f"`{one.name}` is {KINDS[one.kind].one}, but {why}",
                one.name,
            )
    limits = server.limits
    most = {"image": limits.images_max, "audio": limits.audios_max, "video": limits.videos_max}
    for kind, limit in most.items():
        if (count := sum(one.kind == kind for one in media)) > limit:
            several = KINDS[kind].several
            raise ApiError(400, f"`{field}` has {count} {several}, at most {limit} are allowed ({kind}s_max)", field)


# --------------------------------------------------------------------------------------------------------------- shared


def check_prompt_logprobs(body: OpenAI, info: EngineInfo, limits: Limits) -> None:
    """Check that `prompt_logprobs` is supported, and within the limit. Raises ApiError."""
    if body.prompt_logprobs is None:
        return
    check_logprobs(body.prompt_logprobs, "prompt_logprobs", info, limits)
    if body.stream:
        raise ApiError(
            400, "`prompt_logprobs` are known at the end only, and cannot be in a `stream`", "prompt_logprobs"
        )


def _shown_ids(prompt: Prompt) -> list[int] | None:
    """Return the token ids of a prompt; None for given embeddings, which have none."""
    return None if prompt.is_embedded else list(prompt.ids)


def label_of(body: OpenAI, kind: str) -> str:
    """Return the id of an answer, set by the client or random. Raises ApiError."""
    if body.rid and body.request_id:
        raise ApiError(400, "`rid` and `request_id` both set the id of the request; give one of them", "rid")
    return body.rid or f"{kind}-{body.request_id or new_hex(16)}"


def salt_of(body: OpenAI | GenerateBody | ResponseBody) -> str:
    """Return what separates the cached prefixes of a request from those of others; "" for nothing."""
    return (body.cache_salt or "") + (f"\0{body.extra_key}" if body.extra_key else "")


def truncated(ids: Sequence[int], most: int | None, info: EngineInfo) -> Sequence[int]:
    """Return the last `most` tokens of a prompt; -1: as many as fit, None: all of them."""
    if most is None:
        return ids
    return ids[max(0, len(ids) - (info.prompt_tokens_max if most < 0 else most)) :]


def _parameters(server: Server, body: OpenAI, tenant: str, label: str, **more: Any) -> GenerationRequest:
    requested = requested_grammar(vars(body), server.limits)
    if body.bad_words:
        text = server.needs_text("`bad_words`")
        if not server.info().logprobs:
            raise ApiError(400, "`bad_words` is set, but an emulated engine has no logits", "bad_words")
        if requested is not None:
            message = f"`bad_words` and `{requested.field}` both constrain the answer; give one of them"
            raise ApiError(400, message, "bad_words")
        requested = bad_words(body.bad_words, server.limits, partial(text.encode, special=False))
    if requested is not None and "grammar" in more:
        message = f"`{requested.field}` and `{more['grammar_field']}` both constrain the answer; give one of them"
        raise ApiError(400, message, requested.field)
    if requested is not None:
        more |= {"grammar": requested.grammar, "grammar_field": requested.field}
    return GenerationRequest(
        sampling=body,
        min_tokens=body.min_tokens or 0,
        seed=None if body.seed is None else seed_of(body.seed),
        stream=bool(body.stream),
        label=label,
        tenant=tenant,
        salt=salt_of(body),
        priority=body.priority,
        **more,
    )


async def _answer(server: Server, call: Call[Any], generation: Generation, shape: CompletionShape) -> Response:
    """Return the answer as one object, or as a stream."""
    if shape.body.stream:
        return await streamed(server, call, generation, _stream(generation, shape))
    try:
        texts = await unless_left(call.request, generation.whole())
        return JsonResponse(await _whole(generation, shape, texts))
    finally:
        generation.cancel()


async def _whole(generation: Generation, shape: CompletionShape, texts: list[tuple[Choice, str]]) -> dict[str, Any]:
    """Return the answer as one object; of a large one the choices are JSON already, one by one."""
    characters = sum(len(text) + shape.repeated(choice) for choice, text in texts)
    if characters <= SHAPED_AT_ONCE_CHARACTERS:
        return shape.whole(generation, texts)

    def whole() -> dict[str, Any]:
        result = shape.whole(generation, texts)
        return result | {"choices": [msgspec.Raw(msgspec.json.encode(one)) for one in result["choices"]]}

    return await shaped(whole, characters)


async def shaped(shape: Callable[[], Shaped], characters: int) -> Shaped:
    """Call `shape`, which parses answers of `characters` characters in total; in a thread if they are long."""
    return shape() if characters <= SHAPED_AT_ONCE_CHARACTERS else await asyncio.to_thread(shape)


async def streamed(
    server: Server, call: Call[Any], generation: Generation, events: AsyncGenerator[bytes, None]
) -> EventStream:
    """Return a stream once the request was accepted. Raises ApiError if it was refused, ClientLeft."""
    try:
        await unless_left(call.request, generation.accepted())
    except BaseException:
        generation.cancel()
        raise
    return EventStream(events, over=generation.cancel)


async def _stream(generation: Generation, shape: CompletionShape) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, up to [DONE]."""
    options = shape.body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    always_usage = options is not None and bool(options.continuous_usage_stats)

    def chunk(choices: list[dict[str, Any]]) -> bytes:
        body = shape.chunk(choices)
        if always_usage:
            body["usage"] = shape.usage(generation)
        elif include_usage:
            body["usage"] = None
        return event(body)

    plain = shape.only_text and not always_usage
    for choice in generation.choices:
        first = shape.opening(choice)
        if first is not None:
            yield chunk([first])
    async for new in generation.pieces():
        for piece in new:
            if piece.ended is None and piece.text and plain:
                yield shape.plain_event(piece, chunk)
                continue
            if piece.ended is not None and (error := generation.failure(piece.choice)) is not None:
                yield event(error.body())
                yield DONE
                return
            for result in shape.deltas(piece):
                yield chunk([result])
    if include_usage:
        yield event({**shape.chunk([]), "usage": shape.usage(generation)})
    yield DONE


def best_answers(texts: list[tuple[Choice, str]], kept: int, drawn: int) -> list[tuple[Choice, str]]:
    """Return, of each `drawn` answers to one prompt, the `kept` answers with the highest mean logprob of tokens."""
    if kept == drawn:
        return texts

    def logprob(answer: tuple[Choice, str]) -> float:
        values = answer[0].reply.logprobs
        return sum(values) / len(values) if values else float("-inf")

    of_each = (texts[at : at + drawn] for at in range(0, len(texts), drawn))
    return [one for group in of_each for one in sorted(group, key=logprob, reverse=True)[:kept]]


class CompletionShape:
    """Builds completions."""

    KIND = CHUNK = "text_completion"

    def __init__(self, server: Server, body: Any, model: str, label: str, best: tuple[int, int] = (1, 1)) -> None:
        """Prepare for the answers to one request.

        Args:
            best: (kept, drawn): of `drawn` answers to a prompt the `kept` best are returned, see `best_answers`.
        """
        self._best = best
        self.body, self.names, self._model, self._label = body, server.names, model, label
        self._created = int(created_s())
        self._plain: dict[int, tuple[bytes, bytes]] = {}  # by choice: the bytes around a piece of text

    @property
    def only_text(self) -> bool:
        """Whether pieces of an answer, except for the last, contain text only."""
        no_logprobs = self.body.logprobs is None or self.body.logprobs is False  # 0 is a request for logprobs
        return no_logprobs and not self.body.return_token_ids

    def plain_event(self, piece: ChoiceDelta, chunk: Callable[[list[dict[str, Any]]], bytes]) -> bytes:
        """Return the event of a piece that contains text only, from bytes that are encoded once per choice."""
        around = self._plain.get(piece.choice.index)
        if around is None:
            result = self.delta(replace(piece, text=MARK))
            assert result is not None
            before, _, behind = chunk([result]).partition(msgspec.json.encode(MARK))
            around = self._plain[piece.choice.index] = before, behind
        return around[0] + msgspec.json.encode(piece.text) + around[1]

    def whole(self, generation: Generation, texts: list[tuple[Choice, str]]) -> dict[str, Any]:
        """Return the answer as one object."""
        return {
            "id": self._label,
            "object": self.KIND,
            "created": self._created,
            "model": self._model,
            "choices": [
                self.choice(choice, text) | {"index": number}
                for number, (choice, text) in enumerate(best_answers(texts, *self._best))
            ],
            "usage": self.usage(generation),
        }

    def usage(self, generation: Generation) -> dict[str, object]:
        """Return the token counts so far."""
        return generation.usage().as_json()

    def deltas(self, piece: ChoiceDelta) -> list[dict[str, Any]]:
        """Return a piece of an answer in a stream as choices of chunks, possibly none."""
        result = self.delta(piece)
        return [] if result is None else [result]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk of a stream."""
        return {
            "id": self._label,
            "object": self.CHUNK,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def repeated(self, choice: Choice) -> int:
        """Return the number of characters and tokens of the prompt that a whole answer repeats."""
        echoed = choice.prompt.text or "" if getattr(self.body, "echo", False) else ""
        return len(echoed) + (len(choice.prompt.ids) if self.body.return_token_ids else 0)

    def choice(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return one whole answer."""
        echoed = choice.prompt.text or "" if self.body.echo else ""
        result = self._end(choice) | {"index": choice.index, "text": echoed + text}
        tokens = choice.reply.tokens
        result["logprobs"] = self.logprobs(choice, 0, len(tokens), echo=self.body.echo)
        if self.body.return_token_ids:
            result |= {"token_ids": tokens, "prompt_token_ids": _shown_ids(choice.prompt)}
        if self.body.prompt_logprobs is not None:
            result["prompt_logprobs"] = self.likeliest_of_prompt(choice)
        return result

    def likeliest_of_prompt(self, choice: Choice) -> list[dict[str, Any] | None]:
        """Return for each prompt token the logprobs of it and of the likeliest tokens at its position, as in vLLM.

        `rank` is 1 for the likeliest token, and null for a prompt token that is not among the requested tokens.
        """
        result: list[dict[str, Any] | None] = []
        for token, value, tops in zip(
            choice.prompt.ids, prompt_logprobs(choice), prompt_top_logprobs(choice), strict=True
        ):
            if value is None:
                result.append(None)
                continue
            found: dict[int, tuple[float, int | None]]
            requested = tops[: self.body.prompt_logprobs]
            found = {one: (logprob, rank) for rank, (one, logprob) in enumerate(requested, 1)}
            found.setdefault(token, (value, None))
            result.append(
                {
                    str(one): {"logprob": logprob, "rank": rank, "decoded_token": self.names.of(one)[0]}
                    for one, (logprob, rank) in found.items()
                }
            )
        return result

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """Return the first choice in the stream of one answer; None for none."""
        if not self.body.echo:
            return None
        return {"index": choice.index, "text": choice.prompt.text or "", "logprobs": None, "finish_reason": None}

    def delta(self, piece: ChoiceDelta) -> dict[str, Any] | None:
        """Return a piece of an answer in a stream; None for a piece without visible content."""
        if not self._shows(piece):
            return None
        result = self._piece(piece) | {"text": piece.text}
        result["logprobs"] = self.logprobs(piece.choice, piece.first, piece.stop, echo=False)
        return result

    def logprobs(self, choice: Choice, first: int, stop: int, *, echo: bool) -> dict[str, Any] | None:
        """Return the logprobs of output tokens [first:stop), with `echo` preceded by those of the prompt."""
        if self.body.logprobs is None:
            return None
        reply = choice.reply
        written = [self.names.of(token)[0] for token in reply.tokens[first:stop]]
        values: list[float | None] = list(reply.logprobs[first:stop])
        offsets = choice.answer.starts[first:stop]
        tops = reply.tops[first:stop] if self.body.logprobs and reply.tops else [[] for _ in written]
        likeliest = list(map(self._likeliest, written, values, tops))
        if echo:
            front, judged = [self.names.of(token)[0] for token in choice.prompt.ids], prompt_logprobs(choice)
            likeliest = [*map(self._likeliest, front, judged, prompt_top_logprobs(choice)), *likeliest]
            written = front + written
            values = [*judged, *values]
            length = len(choice.prompt.text or "")
            ends = np.minimum(np.cumsum([len(one) for one in front]), length).tolist()
            offsets = [0, *ends[:-1], *(length + start for start in offsets)]
        return {
            "tokens": written,
            "token_logprobs": values,
            "top_logprobs": likeliest if self.body.logprobs else None,
            "text_offset": offsets,
        }

    def _likeliest(self, token: str, value: float | None, tops: Sequence[tuple[int, float]]) -> dict[str, float] | None:
        """Return the logprobs of a token and of the likeliest tokens at its position; None for a first prompt token."""
        if value is None:
            return None
        return {self.names.of(one)[0]: logprob for one, logprob in tops[: self.body.logprobs]} | {token: value}

    def _shows(self, piece: ChoiceDelta) -> bool:
        return bool(piece.text or piece.ended or self.body.return_token_ids or self.body.logprobs is not None)

    def _piece(self, piece: ChoiceDelta) -> dict[str, Any]:
        result: dict[str, Any]
        result = (
            {"index": piece.choice.index, "finish_reason": None} if piece.ended is None else self._end(piece.choice)
        )
        if self.body.return_token_ids:
            result["token_ids"] = tokens_of(piece)
            if not piece.first:
                result["prompt_token_ids"] = _shown_ids(piece.choice.prompt)
        return result

    def _end(self, choice: Choice) -> dict[str, Any]:
        assert choice.reply.ended is not None
        return {
            "index": choice.index,
            "finish_reason": finish_reason(choice.reply.ended),
            "stop_reason": choice.answer.stop_reason,
            **weights_of(choice.reply.ended),
        }


class ChatShape(CompletionShape):
    """Builds chat completions."""

    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, server: Server, body: Any, model: str, label: str, reading: Reading) -> None:
        super().__init__(server, body, model, label)
        self._reading = reading
        self._thoughts: dict[int, list[str]] = {}  # thoughts withheld until their end

    @property
    def only_text(self) -> bool:
        """Whether pieces of an answer, except for the last, contain text only."""
        return super().only_text and self._reading.form is None

    def usage(self, generation: Generation) -> dict[str, object]:
        """Return the token counts so far, with the count of thoughts as a detail."""
        used = generation.usage()
        if self._reading.thinks:
            used.thought_tokens = self._reading.thought_tokens(generation)
        return used.as_json()

    def whole(self, generation: Generation, texts: list[tuple[Choice, str]]) -> dict[str, Any]:
        """Return the answer as one object. All choices share the prompt, so its logprobs are beside the choices."""
        result = super().whole(generation, texts)
        if self.body.prompt_logprobs is not None:
            result["prompt_logprobs"] = self.likeliest_of_prompt(texts[0][0])
        return result

    def choice(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return one whole answer."""
        result: dict[str, Any] = {"message": self._message(choice, text)}
        result |= self._end(choice)
        result["logprobs"] = self.chat_logprobs(choice, 0, len(choice.reply.tokens))
        if self.body.return_token_ids:
            result |= {"token_ids": choice.reply.tokens, "prompt_token_ids": _shown_ids(choice.prompt)}
        return result

    def _message(self, choice: Choice, text: str) -> dict[str, Any]:
        answer = self._reading.whole(choice.index, text)
        instead = answer.calls or answer.thought
        result: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if instead else "")}
        if self._reading.thinks:
            result["reasoning_content"] = answer.thought if answer.thought and self._shows_thoughts else None
        if answer.calls:
            result["tool_calls"] = [
                {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in answer.calls
            ]
        return result

    @property
    def _shows_thoughts(self) -> bool:
        return self.body.include_reasoning is not False

    def _end(self, choice: Choice) -> dict[str, Any]:
        result = super()._end(choice)
        if result["finish_reason"] == "stop" and self._reading.called(choice.index):
            result["finish_reason"] = "tool_calls"
        return result

    def deltas(self, piece: ChoiceDelta) -> list[dict[str, Any]]:
        """Return a piece of an answer in a stream as choices, one per parsed event; the last has the finish reason."""
        if self._reading.form is None:
            return super().deltas(piece)
        index = piece.choice.index
        parser = self._reading.parser(index)
        events = parser.feed(piece.text) + (parser.finish() if piece.ended is not None else [])
        deltas = [result for one in events for result in self._deltas_of(index, one)]
        if piece.ended is not None:
            deltas += [*self._kept_thoughts(index), {}]
        if not deltas and (self.body.return_token_ids or self.body.logprobs):
            deltas = [{}]
        plain: dict[str, Any] = {"index": index, "finish_reason": None}
        chunks = [plain | {"delta": delta, "logprobs": None} for delta in deltas]
        if chunks:
            chunks[-1] |= self._piece(piece)
            chunks[-1]["logprobs"] = self.chat_logprobs(piece.choice, piece.first, piece.stop)
        return chunks

    def _deltas_of(self, index: int, parsed: Event) -> list[dict[str, Any]]:
        """Return a parsed event as deltas."""
        match parsed:
            case Thought():
                if not self._shows_thoughts:
                    return []
                if self.body.stream_reasoning is False:
                    self._thoughts.setdefault(index, []).append(parsed.text)
                    return []
                return [{"reasoning_content": parsed.text}]
            case ContentDelta():
                return [*self._kept_thoughts(index), {"content": parsed.text}]
            case CallBegan():
                function = {"name": parsed.name, "arguments": ""}
                began = {"index": parsed.index, "id": parsed.call_id, "type": "function", "function": function}
                return [*self._kept_thoughts(index), {"tool_calls": [began]}]
            case CallArguments():
                return [{"tool_calls": [{"index": parsed.index, "function": {"arguments": parsed.text}}]}]
            case CallBroken():
                return [{"content": parsed.rest}] if parsed.rest else []
            case CallEnded():
                return []

    def _kept_thoughts(self, index: int) -> list[dict[str, Any]]:
        kept = "".join(self._thoughts.pop(index, ()))
        return [{"reasoning_content": kept}] if kept else []

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """Return the first choice in the stream of one answer, with its role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, piece: ChoiceDelta) -> dict[str, Any] | None:
        """Return a piece of an answer in a stream; None for a piece without visible content."""
        if not (self._shows(piece) or self.body.logprobs):
            return None
        result = self._piece(piece) | {"delta": {"content": piece.text} if piece.text or piece.ended is None else {}}
        result["logprobs"] = self.chat_logprobs(piece.choice, piece.first, piece.stop)
        return result

    def _shows(self, piece: ChoiceDelta) -> bool:
        return bool(piece.text or piece.ended or self.body.return_token_ids or self.body.logprobs)

    def chat_logprobs(self, choice: Choice, first: int, stop: int) -> dict[str, Any] | None:
        """Return the logprobs of output tokens [first:stop); None if they were not requested."""
        if not self.body.logprobs:
            return None
        reply, most = choice.reply, self.body.top_logprobs or 0
        content = []
        for number in range(first, stop):
            entry = self._entry(reply.tokens[number], reply.logprobs[number])
            beside = reply.tops[number][:most] if reply.tops else []
            content.append(entry | {"top_logprobs": [self._entry(token, value) for token, value in beside]})
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        written, raw = self.names.of(token)
        return {"token": written, "logprob": logprob, "bytes": list(raw)}


def prompt_logprobs(choice: Choice) -> list[float | None]:
    """Return the logprob of each prompt token; None for the first token."""
    ended = choice.reply.ended
    assert ended is not None
    positions = np.frombuffer(ended.prompt_positions, "<i4").tolist()
    by_position = dict(zip(positions, np.frombuffer(ended.prompt_logprobs, "<f4").tolist(), strict=True))
    return [by_position.get(position) for position in range(len(choice.prompt.ids))]


def prompt_top_logprobs(choice: Choice) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens at the position of each prompt token, likeliest first; none for the first token."""
    ended = choice.reply.ended
    assert ended is not None
    positions = np.frombuffer(ended.prompt_positions, "<i4").tolist()
    if not ended.prompt_top_ids:
        return [[] for _ in choice.prompt.ids]
    ids = np.frombuffer(ended.prompt_top_ids, "<i4").reshape(len(positions), -1).tolist()
    values = np.frombuffer(ended.prompt_top_logprobs, "<f4").reshape(len(positions), -1).tolist()
    pairs = (list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    by_position = dict(zip(positions, pairs, strict=True))
    return [by_position.get(position, []) for position in range(len(choice.prompt.ids))]
