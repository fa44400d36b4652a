"""Beam search by a worker: vLLM's `use_beam_search`. The engine gets plain requests.

    beams ──prompt and tokens of each──> requests of one token, with the likeliest 2 x width tokens
          <──the best `width` of all continuations, by the sum of their logprobs

A beam that takes an end token is complete. At the end the `width` best of all are returned, by the sum of logprobs over
(length ** length_penalty), where the length is that of prompt and answer without an end token. The prefix of a beam is
in the radix cache, so each step computes one token for each beam. Source: vLLM's `beam_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from lockstep.api.endpoints.answer_run import RUN, new_hex
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import GenerationRequest, Prompt, finish_reason
from lockstep.api.endpoints.http import unless_left
from lockstep.api.endpoints.schemas import ChatBody, CompletionBody, Sampling, empty
from lockstep.api.endpoints.server import Call, Server

STEP = Sampling(temperature=0.0, ignore_eos=True)
"""Parameters of each request: its likeliest tokens count, not the one that it draws."""

ALONE = (
    *("stream", "stop", "stop_regex", "stop_token_ids", "min_tokens", "allowed_token_ids", "logit_bias"),
    *("logit_processors", "bad_words", "frequency_penalty", "presence_penalty", "logprobs", "prompt_logprobs"),
    *("echo", "best_of", "tools", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "structural_tag"),
)
"""Fields that cannot be combined with a beam search."""
WITHOUT_EFFECT = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Fields about draws, of which a beam search makes none."""


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation of a prompt."""

    tokens: tuple[int, ...]
    logprob: float  # sum over its tokens
    reason: str = "length"
    end: int | None = None  # the end token behind `tokens`

    # mechanism: beam-search (decided)
    def score(self, prompt: int, length_penalty: float) -> float:
        """Return the value by which beams are compared. `prompt` is the number of tokens of the prompt."""
        return float(self.logprob / max(1, prompt + len(self.tokens)) ** length_penalty)


def check_beams(server: Server, call: Call[Any]) -> bool:
    """Return whether `use_beam_search` is set. Raises ApiError for fields that do not go with it."""
    body: CompletionBody | ChatBody = call.body
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise ApiError(400, "`length_penalty` is for `use_beam_search`; leave it out", "length_penalty")
        return False
    if not server.info().logprobs:
        raise ApiError(400, "`use_beam_search` is set, but an emulated engine has no logits", "use_beam_search")
    for name in ALONE:
        if not empty(getattr(body, name, None)):
            raise ApiError(400, f"`{name}` cannot be combined with `use_beam_search`; leave it out", name)
    if body.repetition_penalty not in (None, 1.0):
        message = "`repetition_penalty` cannot be combined with `use_beam_search`; leave it out"
        raise ApiError(400, message, "repetition_penalty")
    most = server.limits.logprobs_max // 2
    if (body.n or 1) > most:
        message = f"`n` is {body.n}, and a beam search needs twice as many logprobs: at most {most} (logprobs_max)"
        raise ApiError(400, message, "n")
    for name in WITHOUT_EFFECT:
        if getattr(body, name) is not None:
            call.ignore(name)
    return True


async def beams_of(
    server: Server, call: Call[Any], prompt: Prompt, max_tokens: int | None, parameters: dict[str, Any]
) -> list[Beam]:
    """Return the `n` best beams of a prompt, best first. Raises ApiError, ClientLeft.

    Args:
        max_tokens: of each beam; None: as many as the context allows.
        parameters: further fields of each step's GenerationRequest.
    """
    body, info = call.body, server.info()
    width, room = body.n or 1, info.request_tokens_max - len(prompt.ids)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if (run := RUN.get()) is not None:  # a later run begins anew: its requests depend on earlier results
        run.submitted(())
        RUN.set(None)
    asked = GenerationRequest(sampling=STEP, max_tokens=1, tops=2 * width, **parameters)
    beams, ended = [Beam((), 0.0)], list[Beam]()
    ends = frozenset(() if body.ignore_eos else info.eos_token_ids)
    for _ in range(room if max_tokens is None else max_tokens):
        found = await _step(server, call, asked, prompt, beams)
        if isinstance(found, str):
            beams = [Beam(one.tokens, one.logprob, found) for one in beams]
            break
        coming = []
        for beam, tops in zip(beams, found, strict=True):
            for token, logprob in tops:
                total = beam.logprob + logprob
                if token in ends:
                    ended.append(Beam(beam.tokens, total, "stop", token))
                else:
                    coming.append(Beam((*beam.tokens, token), total))
        beams = nlargest(width, coming, key=lambda one: one.score(len(prompt.ids), penalty))
        if not beams:
            break
    return nlargest(width, [*ended, *beams], key=lambda one: one.score(len(prompt.ids), penalty))


async def _step(
    server: Server, call: Call[Any], asked: GenerationRequest, prompt: Prompt, beams: Sequence[Beam]
) -> list[Sequence[tuple[int, float]]] | str:
    """Return for each beam the likeliest next tokens with their logprobs, or why there are none."""
    generation = server.generate(call, asked, [Prompt([*prompt.ids, *one.tokens]) for one in beams])
    try:
        await unless_left(call.request, generation.whole())
    finally:
        generation.cancel()
    found: list[Sequence[tuple[int, float]]] = []
    for choice in generation.choices:
        if not choice.reply.tops:
            assert choice.reply.ended is not None
            return finish_reason(choice.reply.ended)
        found.append(choice.reply.tops[0][: asked.tops])
    return found


@dataclass(frozen=True, slots=True)
class BeamShape:
    """Builds the answer of a beam search.

    Args:
        chat: messages instead of texts.
    """

    server: Server
    body: CompletionBody | ChatBody
    model: str
    label: str
    created_s: int
    chat: bool

    async def whole(self, found: Sequence[tuple[Prompt, list[Beam]]]) -> dict[str, Any]:
        """Return the answer as one object."""
        choices: list[dict[str, Any]] = []
        for prompt, beams in found:
            for beam in beams:
                choices.append(await self._choice(len(choices), prompt, beam))
        prompt_tokens = sum(len(prompt.ids) for prompt, _ in found)
        tokens = sum(len(beam.tokens) + (beam.end is not None) for _, beams in found for beam in beams)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        return {
            "id": self.label,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    async def _choice(self, index: int, prompt: Prompt, beam: Beam) -> dict[str, Any]:
        verbatim = self.body.skip_special_tokens is False
        text = await self.server.decode("a beam", beam.tokens, verbatim=verbatim)
        answer: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        result = answer | {"index": index, "logprobs": None, "finish_reason": beam.reason, "stop_reason": beam.end}
        if self.body.return_token_ids:
            ends = () if beam.end is None else (beam.end,)
            result |= {"token_ids": [*beam.tokens, *ends], "prompt_token_ids": list(prompt.ids)}
        return result


def beam_parameters(server: Server, call: Call[Any], salt: str, label: str) -> dict[str, Any]:
    """Return the fields of every step of a search that do not depend on its beams."""
    body: CompletionBody | ChatBody = call.body
    adapter = server.adapter(body.model, body.lora_path)
    about = {"label": label or new_hex(16), "tenant": call.tenant, "salt": salt}
    return {**about, "priority": body.priority, "adapter": adapter}
