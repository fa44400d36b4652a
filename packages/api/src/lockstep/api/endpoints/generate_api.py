"""POST /generate: SGLang's endpoint, for prompts that are texts, token ids or given embeddings.

Streams are cumulative: every event contains the whole text so far. Of several prompts each may have parameters of its
own: `sampling_params`, `rid` and the fields of logprobs may be lists with a value for each prompt.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from lockstep.api.endpoints.answer_run import new_hex
from lockstep.api.endpoints.errors import ApiError, session_name
from lockstep.api.endpoints.generation import (
    Choice,
    Generation,
    GenerationRequest,
    Prompt,
    check_answers,
    check_logprobs,
    check_sampling,
    embedded_prompts,
    seed_of,
    weights_of,
)
from lockstep.api.endpoints.http import DONE, JsonResponse, event, unless_left
from lockstep.api.endpoints.openai_api import prompt_logprobs, prompt_top_logprobs, salt_of, streamed
from lockstep.api.endpoints.schemas import GenerateBody, NativeSampling
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.structured_output import requested_grammar
from lockstep.api.processes.wire import EngineInfo
from lockstep.api.text.token_names import TokenNames
from lockstep.core.contract.events import DROP_OUTPUT

HIDDEN_BYTES_MAX = 64 * 2**20
"""Most bytes of hidden states in one answer, float32. They are sent as text, which is about three times as long."""


async def generate(server: Server, call: Call[GenerateBody]) -> Response:
    """Generate continuations of prompts, which are texts, token ids or given embeddings."""
    body, info = call.body, server.info()
    if [body.text, body.input_ids, body.input_embeds].count(None) != 2:
        raise ApiError(400, "give one of `text`, `input_ids` and `input_embeds`", "text")
    given, several = _prompts(body)
    sampling: list[NativeSampling] = _of_each(body.sampling_params, "sampling_params", len(given))
    for one in {id(one): one for one in sampling}.values():
        check_answers(len(given), one.n, server.limits)
        check_sampling(one, info, server.limits)
    if len(given) > 1 and sum(one.n for one in sampling) > server.limits.answers_max:
        answers, most = sum(one.n for one in sampling), server.limits.answers_max
        message = f"`sampling_params` request {answers} answers, at most {most} are allowed in all"
        raise ApiError(400, message, "sampling_params")
    each = _parameters(server, call, sampling, info)
    if body.input_embeds is not None:
        prompts = await embedded_prompts(body.input_embeds, "input_embeds", info)
    else:
        prompts = [
            Prompt(await server.encode("`text`", one, special=True), one) if isinstance(one, str) else Prompt(one)
            for one in given
        ]
    for prompt, parameters in zip(prompts, each, strict=True):
        if (start := parameters.prompt_logprobs_from) is not None and len(prompt.ids) < start:
            message = f"`logprob_start_len` is {start}, but a prompt has {len(prompt.ids)} tokens"
            raise ApiError(400, message, "logprob_start_len")
        if parameters.hidden_states:
            _check_hidden(prompt, parameters, info)
    generation = server.generate(call, each[0], prompts, each)
    several = several or len(generation.choices) > 1
    shape = GenerateShape(server, body, generation)
    if body.stream:
        return await streamed(server, call, generation, _stream(generation, shape, several))
    try:
        texts = await unless_left(call.request, generation.whole())
        result = [shape.answer(choice, text) for choice, text in texts]
    finally:
        generation.cancel()
    return JsonResponse(result if several else result[0])


def _of_each(value: Any, name: str, prompts: int) -> list[Any]:
    """Return a value for each prompt, of a field that has one for all or a list. Raises ApiError."""
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        raise ApiError(400, f"`{name}` has {len(value)} values for {prompts} prompts; give one for each", name)
    return value


def _parameters(
    server: Server, call: Call[GenerateBody], sampling: list[NativeSampling], info: EngineInfo
) -> list[GenerationRequest]:
    """Return the parameters of each prompt. Raises ApiError."""
    body, count = call.body, len(sampling)
    session, session_start = _session(body, call.tenant, sampling)
    judged = _of_each(body.return_logprob, "return_logprob", count)
    starts = _of_each(body.logprob_start_len, "logprob_start_len", count)
    tops = _of_each(body.top_logprobs_num, "top_logprobs_num", count)
    adapters = _of_each(body.lora_path, "lora_path", count)
    listed = _listed(body, judged, starts, server)
    hidden = _of_each(body.return_hidden_states, "return_hidden_states", count)
    labels = _labels(body, count)
    each = []
    for number, one in enumerate(sampling):
        most, start = tops[number] or 0, starts[number]
        start = None if start == -1 else start
        if judged[number]:
            check_logprobs(most, "return_logprob", info, server.limits)
        elif most or start is not None:
            name = "top_logprobs_num" if most else "logprob_start_len"
            raise ApiError(400, f"`{name}` needs `return_logprob` to be true", name)
        seed = one.sampling_seed if one.sampling_seed is not None else one.seed
        requested = requested_grammar(vars(one), server.limits, inside="sampling_params.")
        parameters = GenerationRequest(
            sampling=one,
            max_tokens=one.max_new_tokens,
            max_tokens_field="max_new_tokens",
            min_tokens=one.min_new_tokens or one.min_tokens or 0,
            samples=one.n,
            tops=most if judged[number] else None,
            listed=listed[number],
            prompt_logprobs_from=start,
            prompt_tops=most if start is not None else 0,
            session=session,
            session_start=session_start,
            session_after="" if body.session_params is None else body.session_params.rid or "",
            seed=None if seed is None else seed_of(seed),
            stream=body.stream,
            label=labels[number],
            tenant=call.tenant,
            salt=salt_of(body),
            priority=body.priority,
            grammar=None if requested is None else requested.grammar,
            grammar_field="" if requested is None else requested.field,
            adapter=server.adapter(None, adapters[number]),
            hidden_states=bool(hidden[number]),
        )
        each.append(parameters)
    return each


def _listed(
    body: GenerateBody, judged: Sequence[bool | None], starts: Sequence[int | None], server: Server
) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt whose logprobs the answer lists. Raises ApiError."""
    name, given, most = "token_ids_logprob", body.token_ids_logprob, server.limits.logprobs_max
    if given is None or not len(given):
        return [()] * len(judged)
    lists = [given] * len(judged) if isinstance(given[0], int | np.integer) else _of_each(given, name, len(judged))
    for one, wanted, start in zip(lists, judged, starts, strict=True):
        if not wanted:
            raise ApiError(400, f"`{name}` needs `return_logprob` to be true", name)
        if start not in (None, -1):
            message = f"`{name}` is for the tokens of the answer; leave `logprob_start_len` out"
            raise ApiError(400, message, name)
        if len(one) > most:
            raise ApiError(400, f"`{name}` has {len(one)} ids for a prompt, at most {most} are allowed", name)
        if len(one) and int(max(one)) >= server.info().vocabulary:
            message = f"`{name}` holds {max(one)}, but the model has {server.info().vocabulary} tokens"
            raise ApiError(400, message, name)
    return [tuple(map(int, one)) for one in lists]


def _labels(body: GenerateBody, count: int) -> list[str]:
    """Return the id of each prompt's answers. Raises ApiError."""
    if not isinstance(body.rid, list):
        return [body.rid or new_hex(16)] * count
    labels: list[str] = _of_each(body.rid, "rid", count)
    if len(set(labels)) < len(labels) or "" in labels:
        raise ApiError(400, "`rid` must have a text of its own for each prompt", "rid")
    return labels


def _session(body: GenerateBody, tenant: str, sampling: list[NativeSampling]) -> tuple[str, int | None]:
    """Return the session that the request continues, "" for none, and the tokens of it to keep. Raises ApiError."""
    params = body.session_params
    if params is None:
        return "", None
    if len(sampling) > 1 or sampling[0].n > 1:
        raise ApiError(400, "`session_params`: a turn of a session has one prompt and one answer", "session_params")
    if body.logprob_start_len not in (None, -1, [-1], [None]):
        message = "`logprob_start_len` counts from the start of a session, whose tokens are not sent; leave it out"
        raise ApiError(400, message, "logprob_start_len")
    offset = params.offset
    if params.rid:
        for name in ("replace", "drop_previous_output", "offset"):
            if getattr(params, name) not in (None, False, -1):
                message = f"`session_params.rid` names the turn to continue from; leave `{name}` out"
                raise ApiError(400, message, f"session_params.{name}")
    if params.replace:
        if offset not in (None, -1, 0):
            message = f"`session_params.replace` keeps no token of the session, but `offset` is {offset}"
            raise ApiError(400, f"{message}; give one of them", "session_params.offset")
        offset = 0
    if params.drop_previous_output:
        if offset not in (None, -1):
            message = "`session_params.drop_previous_output` keeps all but the last output"
            field = "replace" if params.replace else "offset"
            raise ApiError(400, f"{message}; leave `{field}` out", "session_params.drop_previous_output")
        return session_name(tenant, params.id), DROP_OUTPUT
    return session_name(tenant, params.id), None if offset in (None, -1) else offset


def _prompts(body: GenerateBody) -> tuple[Sequence[Any], bool]:
    """Return the prompts, and whether the field was a list of prompts. Raises ApiError."""
    if body.input_embeds is not None:
        return body.input_embeds.prompts, body.input_embeds.several
    given: Any = body.text if body.text is not None else body.input_ids
    if not given:
        name = "text" if body.text is not None else "input_ids"
        raise ApiError(400, f"`{name}` is empty", name)
    if isinstance(given, str) or isinstance(given[0], int):
        return [given], False
    return given, True


def _check_hidden(prompt: Prompt, parameters: GenerationRequest, info: EngineInfo) -> None:
    """Check that the engine has hidden states, and those of the answer are within the limit. Raises ApiError."""
    name = "return_hidden_states"
    if not info.vector_size:
        raise ApiError(400, f"`{name}` is set, but this engine has no hidden states", name)
    if parameters.stream:
        raise ApiError(400, f"`{name}`: hidden states are known at the end only, and cannot be in a `stream`", name)
    tokens = (len(prompt.ids) + (parameters.max_tokens or 0)) * parameters.samples
    if (size := tokens * info.vector_size * 4) > HIDDEN_BYTES_MAX:
        message = f"`{name}` of {tokens} tokens take {size} bytes, at most {HIDDEN_BYTES_MAX} are allowed"
        raise ApiError(400, message, name)


async def _stream(generation: Generation, shape: GenerateShape, several: bool) -> AsyncGenerator[bytes, None]:
    texts = [""] * len(generation.choices)
    async for new in generation.pieces():
        for piece in new:
            index = piece.choice.index
            texts[index] += piece.text
            if piece.ended is not None and (error := generation.failure(piece.choice)) is not None:
                yield event(error.body())
                yield DONE
                return
            result = shape.answer(piece.choice, texts[index])
            yield event(result | {"index": index} if several else result)
    yield DONE


class GenerateShape:
    """Builds answers in SGLang's form."""

    def __init__(self, server: Server, body: GenerateBody, generation: Generation) -> None:
        self._generation = generation
        self._names: TokenNames | None = server.names if body.return_text_in_logprobs else None

    def answer(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return an answer as far as it was generated."""
        reply, ended = choice.reply, choice.reply.ended
        meta: dict[str, Any] = {
            "id": choice.parameters.label,
            "prompt_tokens": len(choice.prompt.ids) if ended is None or ended.rejected else ended.prompt_tokens,
            "completion_tokens": choice.taken,
            "cached_tokens": ended.cached_tokens if ended is not None else 0,
            "finish_reason": None,
        }
        if ended is not None:
            meta["finish_reason"] = _finish(choice)
            meta["e2e_latency"] = time.monotonic() - self._generation.arrived_s
            meta |= weights_of(ended)
        if choice.parameters.tops is not None:
            meta |= self._logprobs(choice, choice.parameters.tops)
        if ended is not None and choice.parameters.hidden_states:
            meta["hidden_states"] = _hidden(choice)
        return {"text": text, "output_ids": reply.tokens[: choice.taken], "meta_info": meta}

    def _logprobs(self, choice: Choice, most: int) -> dict[str, Any]:
        """Return the logprobs of an answer so far, and at its end those of its prompt."""
        reply, taken, found = choice.reply, choice.taken, dict[str, Any]()
        pairs = zip(reply.logprobs[:taken], reply.tokens[:taken], strict=False)
        found["output_token_logprobs"] = [self._entry(value, token) for value, token in pairs]
        if most:
            found["output_top_logprobs"] = [
                [self._entry(value, token) for token, value in tops[:most]] for tops in reply.tops[:taken]
            ]
        if choice.parameters.listed:
            found["output_token_ids_logprobs"] = [
                [self._entry(value, token) for token, value in tops[most:]] for tops in reply.tops[:taken]
            ]
        front = choice.parameters.prompt_logprobs_from
        if reply.ended is not None and not reply.ended.rejected and front is not None:
            prompt_pairs = zip(prompt_logprobs(choice), choice.prompt.ids, strict=True)
            found["input_token_logprobs"] = [self._entry(value, token) for value, token in prompt_pairs][front:]
            if most:
                found["input_top_logprobs"] = [
                    [self._entry(value, token) for token, value in tops] or None for tops in prompt_top_logprobs(choice)
                ][front:]
        return found

    def _entry(self, value: float | None, token: int) -> list[Any]:
        """Return a logprob in SGLang's form: [logprob, token id, text if it was requested]."""
        return [value, token, None if self._names is None else self._names.of(token)[0]]


def _hidden(choice: Choice) -> list[Any]:
    """Return hidden states as SGLang does: those of the prompt in one list, then those of each further token."""
    ended = choice.reply.ended
    assert ended is not None
    if not ended.hidden:
        return []
    states = np.frombuffer(ended.hidden, "<f4").reshape(-1, ended.hidden_size)
    prompt = ended.prompt_tokens
    return [states[:prompt].tolist(), *states[prompt:].tolist()]


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
