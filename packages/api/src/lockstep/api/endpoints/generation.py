"""Conversion of a client's parameters to requests of the engine, and of its results to pieces of the answer.

    body ──limits──> prompts ──tokens──> RequestArrived per prompt ──bridge──> replies ──AnswerText──> pieces

All prompts are checked before the first one is sent, so a request with several prompts runs whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from lockstep.api.endpoints.answer_run import RUN, AnswerRun, Cut, new_seed
from lockstep.api.endpoints.errors import ApiError, failure
from lockstep.api.endpoints.schemas import Sampling
from lockstep.api.observability.metrics import CountedAnswer, Metrics
from lockstep.api.processes.bridge import EngineUnavailable, Reply, Ticket
from lockstep.api.processes.cluster_bridge import Engines
from lockstep.api.processes.wire import MESSAGE_BYTES_MAX, EngineInfo, SampleEnded
from lockstep.api.settings import Limits
from lockstep.api.text.answer_text import AnswerText
from lockstep.api.text.plain_text import Texts
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Grammar, RequestArrived, RequestKind, SamplingParams, TokenIds
from lockstep.core.requests.validation import STOP_TOKENS_MAX
from lockstep.host.media.content import MediaPrompt
from lockstep.host.media.given import GivenRows, embedded_prompt, embedded_size
from lockstep.host.stop_regexes import compiled

REFUSED_WITHIN_S = 0.5
"""Seconds to wait for a refusal, which the engine sends within a step; after that the stream begins."""

HASHED_AT_ONCE_BYTES = 2**20
"""Given embeddings up to this size are hashed in the event loop, in a few milliseconds."""

FEW_TOKENS = 64
"""Up to this number of tokens Python's own maximum is found sooner than numpy's."""

COMPILED_WITHIN_S = 5.0
"""The same limit for a request with a grammar, which is refused only after the grammar was compiled."""

MEASURED_AT_ONCE = 16
"""Messages with tokens of an answer between two updates of the metrics, not counting the first and the last message."""

REGEX_WORK = 4096
"""Tokens, times states of stop expressions, that one choice reads before other tasks get their turn: a few ms."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and as text if the client sent text."""

    ids: Sequence[int]  # a list, or an array of int32
    text: str | None = None
    types: bytes = b""  # types of its tokens, one byte each; empty: all are 0
    media: MediaPrompt | None = None  # for a prompt with media, or of given embeddings

    @property
    def is_embedded(self) -> bool:
        """Whether the prompt is given embeddings, and so has no tokens."""
        return self.media is not None and embedded_size(self.media) is not None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checked parameters of the answers to each prompt."""

    sampling: Sampling
    max_tokens: int | None  # None: as many as the context allows
    min_tokens: int = 0
    samples: int = 1
    tops: int | None = None  # number of likeliest tokens with each logprob; None: no logprobs
    listed: tuple[int, ...] = ()  # tokens with logprobs of their own beside each token
    prompt_logprobs_from: int | None = None  # first prompt position with logprobs
    seed: int | None = None
    stream: bool = False
    label: str = ""
    tenant: str = ""
    salt: str = ""
    priority: int | None = None
    max_tokens_field: str = "max_tokens"
    prompt_field: str = "prompt"
    kind: RequestKind = "generate"
    prompt_tops: int = 0  # number of likeliest tokens with each logprob of the prompt
    session: str = ""
    session_start: int | None = None  # as in RequestArrived
    session_after: str = ""
    grammar: Grammar | None = None  # grammar of each answer; made by `structured_output`
    adapter: str = ""  # name of a loaded adapter
    grammar_field: str = "grammar"  # the client's field of the grammar
    routing_key: str = ""
    hidden_states: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return _texts(self.sampling.stop)

    @property
    def regexes(self) -> tuple[str, ...]:
        return _texts(self.sampling.stop_regex)


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the texts of a field that has one or several, without empty ones."""
    return (given,) if isinstance(given, str) and given else tuple(one for one in given or () if one)


def prompts_of(given: str | Sequence[Any], field_name: str) -> Sequence[str | Sequence[int]]:
    """Return one prompt or several as a list. Raises ApiError if there is none."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise ApiError(400, f"`{field_name}` is empty", field_name)
    return given


async def embedded_prompts(given: GivenRows, field_name: str, info: EngineInfo) -> list[Prompt]:
    """Return prompts of given embeddings. Raises ApiError for embeddings that this model does not take."""
    if not info.embedding_size:
        raise ApiError(400, f"`{field_name}` has embeddings, but {info.no_embeddings}", field_name)
    for rows in given.prompts:
        if (size := rows.shape[1]) != info.embedding_size:
            message = f"`{field_name}` has rows of {size} numbers, but embeddings of this model have"
            raise ApiError(400, f"{message} {info.embedding_size}", field_name)
    bytes_ = sum(len(rows.data) for rows in given.prompts)
    if bytes_ <= HASHED_AT_ONCE_BYTES:
        made = [embedded_prompt(rows.numpy()) for rows in given.prompts]
    else:  # hashes release the interpreter
        made = await asyncio.to_thread(lambda: [embedded_prompt(rows.numpy()) for rows in given.prompts])
    return [Prompt(one.ids, media=one) for one in made]


def check_sampling(sampling: Sampling, info: EngineInfo, limits: Limits, *, stop_field: str = "stop") -> None:
    """Check sampling parameters against the limits, before they are processed. Raises ApiError."""
    stops = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
    _at_most(stop_field, "texts", len(stops), limits.stops_max)
    _at_most(stop_field, "characters in one text", max(map(len, stops), default=0), limits.stop_characters_max)
    regexes = _texts(sampling.stop_regex)
    _at_most("stop_regex", "expressions", len(regexes), limits.stops_max)
    for one in regexes:
        _at_most("stop_regex", "characters in one expression", len(one), limits.stop_characters_max)
        try:
            compiled(one)
        except ConfigError as error:
            raise ApiError(400, f"`stop_regex`: {error}", "stop_regex") from None
    _at_most("stop_token_ids", "ids", len(sampling.stop_token_ids or ()), STOP_TOKENS_MAX)
    _at_most("logit_bias", "entries", len(sampling.logit_bias or ()), limits.logit_bias_max)
    for token in sampling.stop_token_ids or ():
        if token >= info.vocabulary:
            message = f"`stop_token_ids` holds {token}, but the model has {info.vocabulary} tokens"
            raise ApiError(400, message, "stop_token_ids")
    for name in sampling.logit_bias or ():
        if not (name.isascii() and name.isdigit() and int(name[:12]) < info.vocabulary):
            message = f"`logit_bias` holds {name[:20]!r}, which is no token id (0 to {info.vocabulary - 1})"
            raise ApiError(400, message, "logit_bias")

    _check_draws(sampling, info, limits)


def _check_draws(sampling: Sampling, info: EngineInfo, limits: Limits) -> None:
    """Check the fields that restrict or bias the tokens to draw. Raises ApiError."""
    allowed, requested = sampling.allowed_token_ids, sampling.logit_processors
    for name, value in (("allowed_token_ids", allowed), ("logit_processors", requested)):
        if value and not info.logprobs:
            raise ApiError(400, f"`{name}` is set, but an emulated engine has no logits", name)
    if allowed is not None:
        if not allowed:
            message = "`allowed_token_ids` is empty, so no token is allowed; leave it out to allow every token"
            raise ApiError(400, message, "allowed_token_ids")
        _at_most("allowed_token_ids", "ids", len(allowed), limits.allowed_tokens_max)
        if max(allowed) >= info.vocabulary:
            message = f"`allowed_token_ids` holds {max(allowed)}, but the model has {info.vocabulary} tokens"
            raise ApiError(400, message, "allowed_token_ids")
    _at_most("logit_processors", "names", len(requested or ()), limits.processors_max)
    for name in requested or ():
        if name not in info.logit_processors:
            enabled = ", ".join(info.logit_processors) or "none"
            message = f"`logit_processors` names {name[:60]!r}, which is not enabled here; enabled: {enabled}"
            raise ApiError(400, message, "logit_processors")


def _at_most(field_name: str, what: str, given: int, most: int) -> None:
    if given > most:
        raise ApiError(400, f"`{field_name}` has {given} {what}, at most {most} are allowed", field_name)


def check_answers(
    prompts: int, samples: int, limits: Limits, field_name: str = "prompt", *, samples_field: str = "n"
) -> None:
    """Check the numbers of prompts and samples of a request against the limits. Raises ApiError."""
    _at_most(field_name, "prompts", prompts, limits.prompts_max)
    if samples > limits.samples_max:
        message = f"`{samples_field}` is {samples}, at most {limits.samples_max} are allowed"
        raise ApiError(400, message, samples_field)
    if prompts * samples > limits.answers_max:
        message = (
            f"`{samples_field}` is {samples} for {prompts} prompts, at most {limits.answers_max} answers are allowed "
            "in all"
        )
        raise ApiError(400, message, samples_field)


def check_regexes(requests: Sequence[GenerationRequest], limits: Limits) -> None:
    """Check what each new character of all answers to these requests costs their stop expressions. Raises ApiError."""
    states = sum(one.samples * sum(compiled(regex).size for regex in one.regexes) for one in requests if one.regexes)
    if states > limits.regex_states_max:
        message = (
            f"`stop_regex` has {states} states over all answers, at most {limits.regex_states_max} are allowed; "
            "write it shorter, or ask for fewer answers at once"
        )
        raise ApiError(400, message, "stop_regex")


def check_grammars(requests: Sequence[GenerationRequest], limits: Limits) -> None:
    """Check what the first tokens of all answers to these requests cost under their grammars. Raises ApiError."""
    work = sum(one.samples * len(one.grammar.source) for one in requests if one.grammar is not None)
    under = next((one for one in requests if one.grammar is not None), None)
    if under is not None and work > limits.grammar_work_max:
        message = (
            f"`{under.grammar_field}` has {work} characters over all answers, at most {limits.grammar_work_max} are "
            "allowed; write it shorter, or ask for fewer answers at once"
        )
        raise ApiError(400, message, under.grammar_field)


def check_logprobs(tops: int, name: str, info: EngineInfo, limits: Limits) -> None:
    """Check that the engine supports logprobs, and that their number is within the limit. Raises ApiError."""
    if not info.logprobs:
        raise ApiError(400, f"`{name}` is set, but an emulated engine has no logits", name)
    if tops > limits.logprobs_max:
        raise ApiError(400, f"`{name}` is {tops}, at most {limits.logprobs_max} are allowed", name)


# mechanism: namespaces (executed)
def request_of(prompt: Prompt, parameters: GenerationRequest, info: EngineInfo) -> RequestArrived:
    """Return the engine's request for one prompt. Raises ApiError for a request that can never run."""
    ids, length, prompt_field = prompt.ids, len(prompt.ids), parameters.prompt_field
    if parameters.kind == "generate" and not info.generates:
        served = "labels, by /v1/score, /v1/rerank and /classify" if info.labels else "vectors, by /v1/embeddings"
        raise ApiError(400, f"this model serves {served}, and has no head that generates tokens", "model")
    if not length:
        raise ApiError(400, f"`{prompt_field}` is empty; it must have at least one token", prompt_field)
    tokens = np.array(ids, "<i4") if isinstance(ids, list) else np.asarray(ids, "<i4")
    few = isinstance(ids, list) and length <= FEW_TOKENS
    if (largest := max(ids) if few else int(tokens.max())) >= info.vocabulary:
        message = f"`{prompt_field}` holds token {largest}, but the model has {info.vocabulary} tokens"
        raise ApiError(400, message, prompt_field)
    most = parameters.max_tokens
    room = info.request_tokens_max - length
    if length > info.prompt_tokens_max or (most is not None and most > room):
        requested = f" and {most} in the answer ({parameters.max_tokens_field})" if most else ""
        raise ApiError(
            400,
            f"This model's maximum context length is {info.request_tokens_max} tokens. However, you requested "
            f"{length} tokens in the prompt{requested}. Please reduce the length of either.",
            prompt_field if length > info.prompt_tokens_max else parameters.max_tokens_field,
        )
    max_tokens = room if most is None else most
    if parameters.min_tokens > max_tokens:
        message = f"`min_tokens` must be at most {max_tokens}, the limit of the answer, got {parameters.min_tokens}"
        raise ApiError(400, message, "min_tokens")
    if not max_tokens and parameters.samples > 1:
        message = (
            f"`n` is {parameters.samples}, but {parameters.max_tokens_field} 0 allows one answer only, which is empty"
        )
        raise ApiError(400, message, "n")
    if parameters.grammar is not None:
        _check_grammar(parameters, info, max_tokens)
    sampling = parameters.sampling
    logprob_start = parameters.prompt_logprobs_from
    if logprob_start is None and parameters.tops is not None:
        logprob_start = length
    if prompt.media is not None:
        _check_media(prompt.media, parameters, info)
    return RequestArrived(
        0,
        request_id=-1,
        spans=() if prompt.media is None else prompt.media.spans,
        token_type_ids=prompt.types,
        prompt=TokenIds(tokens.tobytes()),
        max_new_tokens=max_tokens,
        min_new_tokens=parameters.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        ignore_eos=bool(sampling.ignore_eos),
        stream=parameters.stream,
        label=parameters.label,
        tenant=parameters.tenant,
        priority=parameters.priority,
        kind=parameters.kind,
        session=parameters.session,
        session_start=parameters.session_start,
        session_after=parameters.session_after,
        namespace=sha256(parameters.salt.encode()).hexdigest() if parameters.salt else "",
        grammar=parameters.grammar,
        adapter=parameters.adapter,
        sampling=SamplingParams(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=max(0, sampling.top_k or 0),
            min_p=sampling.min_p or 0.0,
            frequency_penalty=sampling.frequency_penalty or 0.0,
            presence_penalty=sampling.presence_penalty or 0.0,
            repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
            seed=new_seed() if parameters.seed is None else parameters.seed,
            logit_bias=tuple(sorted((int(name), bias) for name, bias in (sampling.logit_bias or {}).items())),
            top_logprobs=parameters.tops or 0,
            allowed_token_ids=tuple(sorted(set(sampling.allowed_token_ids or ()))),
            logit_processors=_processors(sampling),
            prompt_top_logprobs=parameters.prompt_tops,
            logprob_token_ids=parameters.listed,
        ),
        stop_texts=parameters.stops,
        stop_regexes=parameters.regexes,
        routing_key=parameters.routing_key,
        return_hidden_states=parameters.hidden_states,
        parallel_samples=parameters.samples,
        logprob_start=logprob_start,
    )


def _check_media(media: MediaPrompt, parameters: GenerationRequest, info: EngineInfo) -> None:
    """Check what a prompt with media, or of given embeddings, may not have. Raises ApiError."""
    size, what = embedded_size(media), "media"
    if size is not None:
        what = "embeddings"
    if not info.media if size is None else size != info.embedding_size:  # the engine was replaced meanwhile
        why = info.no_media if size is None else info.no_embeddings
        raise ApiError(400, f"`{parameters.prompt_field}` has {what}, but {why}", parameters.prompt_field)
    if parameters.prompt_logprobs_from is not None:
        raise ApiError(400, f"`prompt_logprobs` are of tokens, and this prompt has {what}", "prompt_logprobs")
    if parameters.session:
        raise ApiError(400, f"a prompt in a session may have no {what}; send the whole conversation", "session_params")


def _check_grammar(parameters: GenerationRequest, info: EngineInfo, max_tokens: int) -> None:
    """Check that the engine supports structured output, and that the answer has tokens. Raises ApiError."""
    name = parameters.grammar_field
    if not info.grammars:
        raise ApiError(400, f"`{name}` requests structured output: {info.no_grammars}", name)
    if not max_tokens:
        raise ApiError(400, f"`{name}` constrains the answer, which {parameters.max_tokens_field} 0 leaves empty", name)


def _processors(sampling: Sampling) -> tuple[tuple[str, str], ...]:
    """Return names and arguments of logit processors in the form that a journal stores."""
    given = sorted((sampling.logit_processors or {}).items())
    return tuple((name, json.dumps(arguments, sort_keys=True, allow_nan=False)) for name, arguments in given)


SEEDS = 2**62
"""Bound of seeds. Each sample of a request adds its number to the seed; the sums stay within 63 bits."""


def seed_of(given: int) -> int:
    """Return the seed for a client's number."""
    return given % SEEDS


# -------------------------------------------------------------------------------------------------------------- answers


@dataclass(slots=True)
class Choice:
    """One answer of a generation, as far as it was received."""

    index: int
    prompt: Prompt
    ticket: Ticket
    reply: Reply
    answer: AnswerText
    counted: CountedAnswer  # by the metrics
    parameters: GenerationRequest
    interval: int = 1  # least number of tokens in a piece, except the last one
    at_once: int = 0  # tokens that are searched for stop expressions at once; 0: there are none
    taken: int = 0  # tokens that were returned in pieces
    over: bool = False  # whether its last piece was returned, or it was cancelled


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The new part of a choice: text, output tokens [first:stop), and in the last part its end."""

    choice: Choice
    text: str
    first: int
    stop: int
    ended: SampleEnded | None


@dataclass(slots=True)
class Usage:
    """Token counts over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thought_tokens: int | None = None  # part of completion_tokens; None: thoughts are not split off

    def as_json(self) -> dict[str, object]:
        """Return the counts as OpenAI's JSON object."""
        result: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.thought_tokens is not None:
            result["completion_tokens_details"] = {"reasoning_tokens": self.thought_tokens}
        return result


@dataclass
class Generation:
    """The answers to one request of a client.

    Args:
        arrived_s: arrival of the request (time.monotonic), for the time to first token.
        start_by_s, finish_by_s: time.monotonic by which it must run, or must have ended.
        over: called once at its end with the number of output tokens.
        together: key of requests that should run on the same engine; empty: none.
        named: number of the engine that the client requests; None: the router chooses it.
    """

    bridge: Engines
    metrics: Metrics
    parameters: GenerationRequest
    arrived_s: float
    start_by_s: float | None = None
    finish_by_s: float | None = None
    over: Callable[[int], object] | None = None
    together: str = ""
    named: int | None = None
    choices: list[Choice] = field(default_factory=list)
    run: AnswerRun | None = field(default_factory=RUN.get)  # of an answer that is kept
    _tickets: list[Ticket] = field(default_factory=list)
    _cuts: deque[Cut] = field(default_factory=deque)  # of earlier runs, which this run has to repeat
    _prompts: list[Prompt] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(
        self,
        prompts: Iterable[Prompt],
        text: Texts | None,
        limits: Limits,
        *,
        admit: Callable[[int, int], Callable[[int], object]] | None = None,
        each: Sequence[GenerationRequest] = (),
    ) -> None:
        """Send a request for each prompt.

        Args:
            each: parameters of each prompt, where they differ; they agree in `stream` and `tenant`.
            admit: called after all checks with the numbers of prompt tokens and answers. It returns `over`, or raises.
        Raises: ApiError; then no request runs.
        """
        if self.bridge.info is None:
            raise unavailable(EngineUnavailable(self.bridge.gone or "the engine is starting"))
        self._prompts = list(prompts)
        chosen = list(each) or [self.parameters] * len(self._prompts)
        pairs = list(zip(self._prompts, chosen, strict=True))
        requests = [request_of(prompt, parameters, self.bridge.info) for prompt, parameters in pairs]
        check_regexes(chosen, limits)
        check_grammars(chosen, limits)
        for name, used in (("stop", "stops"), ("stop_regex", "regexes")):
            if text is None and any(getattr(one, used) for one in chosen):
                raise ApiError(400, f"`{name}` needs a tokenizer, and this model has none", name)
        coming = sum(request.parallel_samples for request in requests)
        if self.bridge.open_answers + coming > limits.requests_max:
            raise ApiError(503, f"{self.bridge.open_answers} answers are open, and this server allows no more")
        prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        waiting = self.bridge.waiting_answers
        if waiting and waiting + coming > limits.waiting_max:
            raise ApiError(503, f"{waiting} answers wait already, and this server allows no more")
        waiting = self.bridge.waiting_tokens
        if waiting and waiting + prompt_tokens > limits.waiting_tokens_max:
            raise ApiError(503, f"{waiting} tokens of prompts wait already, and this server allows no more")
        media = sum(content.size for prompt in self._prompts if prompt.media for content in prompt.media.contents)
        if media > MESSAGE_BYTES_MAX // 2:
            message = f"the media are {media:,} bytes as the engine gets them, at most {MESSAGE_BYTES_MAX // 2:,} fit"
            raise ApiError(400, message, self.parameters.prompt_field)
        if media and (held := self.bridge.media_bytes) + media > limits.media_bytes_max:
            raise ApiError(503, f"{held:,} bytes of media of open requests are held, and this server allows no more")
        if admit is not None:
            self.over = admit(prompt_tokens, coming)
        try:
            for request, (prompt, parameters) in zip(requests, pairs, strict=True):
                sampling = parameters.sampling
                spelled = text if text is None or sampling.skip_special_tokens is not False else text.verbatim()
                number = len(self._tickets)
                kept = None
                if self.run is not None:
                    kept = self.run.origins[number] if number < len(self.run.origins) else ""
                ticket = self.bridge.submit(
                    *(request, self._changed, self.start_by_s, self.finish_by_s, self.together),
                    kept=kept,
                    engine=self.named,
                    contents=() if prompt.media is None else prompt.media.contents,
                )
                self._tickets.append(ticket)
                for reply in ticket.replies:
                    answer = AnswerText(
                        spelled,
                        prompt.ids,
                        parameters.stops,
                        include_stop=sampling.shows_stop,
                        stop_token_ids=request.stop_token_ids,
                        min_tokens=request.min_new_tokens,
                        regexes=parameters.regexes,
                    )
                    counted = CountedAnswer(ticket, reply, self.arrived_s, self.parameters.stream)
                    reply.measure = partial(self.metrics.observe_tokens, counted)
                    interval = sampling.stream_interval or 1
                    choice = Choice(len(self.choices), prompt, ticket, reply, answer, counted, parameters, interval)
                    if parameters.regexes:
                        choice.at_once = max(1, REGEX_WORK // sum(compiled(one).size for one in parameters.regexes))
                    self.choices.append(choice)
        except EngineUnavailable as error:
            self.cancel()
            raise unavailable(error) from error
        if self.run is not None:
            self._cuts.extend(self.run.cuts)
            self.run.submitted(tuple(ticket.submit.request.origin for ticket in self._tickets))
        for ticket, prompt in zip(self._tickets, self._prompts, strict=True):
            ticket.when_placed(partial(self.metrics.began, ticket, len(prompt.ids), self.parameters.max_tokens))

    async def accepted(self) -> None:
        """Wait briefly for the first result, so that a refusal can still determine the status of the answer.

        Raises: ApiError if the request was refused.
        """
        with contextlib.suppress(TimeoutError):
            free = all(choice.parameters.grammar is None for choice in self.choices)
            async with asyncio.timeout(REFUSED_WITHIN_S if free else COMPILED_WITHIN_S):
                await self._changed.wait()
        for choice in self.choices:
            if (error := self.failure(choice)) is not None:
                raise error

    async def began(self) -> None:
        """Wait for the first result."""
        await self._changed.wait()

    def cancel(self) -> None:
        """Cancel the rest of the answers. Must be called at the end; it cancels nothing if the answers are complete."""
        if self.run is None or not self.run.leaving():  # otherwise a later run takes the requests over
            for ticket in self._tickets:
                self.bridge.cancel(ticket)
        over, self.over = self.over, None
        if over is not None:
            over(sum(len(choice.reply.tokens) for choice in self.choices))
        for choice in self.choices:
            if not choice.over:
                self.metrics.observe_tokens(choice.counted)
                choice.over = True

    async def pieces(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Yield lists of the new parts of all choices, until all choices have ended."""
        left = [choice for choice in self.choices if not choice.over]
        while left:
            await self._changed.wait()
            self._changed.clear()
            for choice in left:
                while choice.at_once and not choice.answer.search(choice.reply.tokens, choice.at_once):
                    await asyncio.sleep(0)
            if self._cuts:
                new = self._repeated(left)
            else:
                new = [piece for choice in left if (piece := self._take(choice)) is not None]
            if any(piece.ended is not None for piece in new):
                left = [choice for choice in left if not choice.over]
            if new:
                yield new

    def _repeated(self, left: list[Choice]) -> list[ChoiceDelta]:
        """Return the pieces up to the next cut of the earlier run; none until all of them have arrived."""
        cut = self._cuts[0]
        for choice, state in zip(self.choices, cut, strict=True):
            ended = choice.reply.ended is not None
            if len(choice.reply.tokens) < state // 2 and not ended:
                return []
            if state % 2 and not ended:
                return []
        self._cuts.popleft()
        self._changed.set()  # the next part may have arrived
        pieces = (self._take(choice, cut[choice.index]) for choice in left)
        return [piece for piece in pieces if piece is not None]

    def cut(self) -> Cut:
        """Return how far the pieces of each choice are."""
        return tuple(2 * choice.taken + choice.over for choice in self.choices)

    async def whole(self) -> list[tuple[Choice, str]]:
        """Wait for the end; return every choice with its text. Raises ApiError if a choice failed."""
        texts = [""] * len(self.choices)
        async for new in self.pieces():
            for piece in new:
                texts[piece.choice.index] += piece.text
                if piece.ended is not None and (error := self.failure(piece.choice)) is not None:
                    raise error
        return list(zip(self.choices, texts, strict=True))

    def usage(self) -> Usage:
        """Return the token counts so far. A prompt counts once, regardless of its number of samples."""
        firsts = [ticket.replies[0].ended for ticket in self._tickets]
        in_session = [ended.prompt_tokens for ended in firsts if self.parameters.session and ended is not None]
        return Usage(
            sum(in_session) or sum(len(prompt.ids) for prompt in self._prompts),
            sum(len(choice.reply.tokens) for choice in self.choices),
            sum(ended.cached_tokens for ended in firsts if ended is not None),
        )

    def failure(self, choice: Choice) -> ApiError | None:
        """Return the error of an answer; None if it did not fail. It names a grammar by the client's field."""
        ended, mark, name = choice.reply.ended, "`grammar` ", choice.parameters.grammar_field
        error = None if ended is None else failure(ended)
        if ended is not None and ended.reason == "invalid" and choice.parameters.grammar is not None:
            message = (
                f"`{name}` admits no token after {ended.output_tokens} tokens of the answer: it reached a limit of the "
                "grammar library; use smaller repetitions, and do not nest them"
            )
            return ApiError(400, message, name)
        if error is None or choice.parameters.grammar is None or not error.message.startswith(mark):
            return error
        return ApiError(error.status, f"`{name}` {error.message.removeprefix(mark)}", name)

    def weights(self) -> dict[str, Any]:
        """Return the weights versions of all answers, separated by commas, as a field of a JSON object."""
        versions = [ended.weights[-1][1] for choice in self.choices if (ended := choice.reply.ended) and ended.weights]
        return {"weight_version": ",".join(dict.fromkeys(map(str, versions)))} if versions else {}

    def _take(self, choice: Choice, until: int | None = None) -> ChoiceDelta | None:
        """Return the new part of a choice; None without. `until`: its state in the cut at which the part must end."""
        if choice.over:
            return None
        reply, first = choice.reply, choice.taken
        ended, stop = reply.ended, len(reply.tokens)
        if until is not None:
            ended, stop = ended if until % 2 else None, min(stop, until // 2)
            if stop == first and ended is None:
                return None
        elif stop - first < choice.interval and ended is None:
            return None
        text = choice.answer.spell(reply.tokens if stop == len(reply.tokens) else reply.tokens[:stop], ended)
        choice.taken = stop
        choice.over = ended is not None
        if choice.over or not choice.counted.tokens or len(reply.arrivals) >= MEASURED_AT_ONCE:
            self.metrics.observe_tokens(choice.counted)
        return ChoiceDelta(choice, text, first, stop, ended)


def unavailable(error: EngineUnavailable) -> ApiError:
    """Return the error for a client when no engine is available."""
    return ApiError(503, str(error))


def weights_of(ended: SampleEnded) -> dict[str, Any]:
    """Return the weights version at the end of an answer and, if there were several, the first token of each."""
    if not ended.weights:
        return {}
    result: dict[str, Any] = {"weight_version": str(ended.weights[-1][1])}
    if len(ended.weights) > 1:
        spans = [{"first_token": first, "weight_version": str(version)} for first, version in ended.weights]
        result["weight_versions"] = spans
    return result


def finish_reason(ended: SampleEnded) -> str:
    """Return OpenAI's name for the reason of the end."""
    return {
        "length": "length",
        "computed": "length",
        "stop": "stop",
        "text_stop": "stop",
        "grammar": "stop",
        "cancelled": "abort",
    }.get(ended.reason, "error")


def tokens_of(piece: ChoiceDelta) -> Sequence[int]:
    """Return the new tokens of a piece."""
    return piece.choice.reply.tokens[piece.first : piece.stop]


def now_s() -> float:
    """Return the current time of the clock for answers (time.monotonic), seconds."""
    return time.monotonic()
