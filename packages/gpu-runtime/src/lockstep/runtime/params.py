"""Parameters of a request, their checks, and their form for the engine; prompts as lists of token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Integral
from operator import index
from typing import Annotated, Any, TypeAlias, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    SamplingParams,
)
from lockstep.core.contract.samples import SAMPLES_MAX
from lockstep.host.grammars import Kind
from lockstep.host.media.content import MediaPrompt
from lockstep.host.media.given import BadEmbeddings, embedded_prompt, embedded_size
from lockstep.runtime.sampling.processors import Arguments

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""The range of integers in a journal."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Parameters of one request. Names and meanings are those of vLLM and SGLang, if they have the parameter."""

    n: Int64 = 1  # answers to the prompt, which share its KV; answer k is drawn with seed + k
    max_new_tokens: Int64 = 128
    min_new_tokens: Int64 = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[Int64, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[Int64] | None = None  # only these are drawn; None: all tokens
    seed: Int64 | None = None  # None: derived from the LLM's seed
    stop: Sequence[str] = ()  # texts; the answer ends before the first that occurs
    stop_token_ids: Sequence[Int64] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = (
        None  # of each output token, and of this many of the likeliest tokens
    )
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = (
        None  # of each prompt token, and of this many of the likeliest tokens in its place
    )
    hidden_states: bool = False
    priority: Int64 | None = None
    logit_processors: Mapping[str, Arguments] = field(default_factory=dict)  # arguments by name of the processor
    adapter: str = ""  # name of a loaded adapter; "": the model alone
    grammar: tuple[Kind, str] | None = None  # constraint of the answer: ("json_schema", '{"type": "object"}')


Prompt: TypeAlias = "str | Sequence[int] | MediaPrompt | NDArray[Any] | Tensor"
"""Text, token ids, a conversation with images, or given embeddings: floats [positions, hidden], of numpy or torch."""


ClassifiedPrompt: TypeAlias = "Prompt | tuple[str, str]"
"""A prompt, or a pair of texts in one prompt."""


def types_of(types: Sequence[int], known: int) -> bytes:
    """Return the types of a prompt's tokens as a request has them; empty if all are 0, or the model has one type."""
    return bytes(types) if known > 1 and any(types) else b""


def seed_of(seed: int, number: int) -> int:
    """Return the 63-bit seed of request `number` of an LLM with seed `seed`."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1


def sampling_of(params: Params) -> SamplingParams:
    """Return the sampling parameters for the engine. Integers become floats, because they are read back as floats."""
    return SamplingParams(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=params.top_k,
        min_p=float(params.min_p),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        repetition_penalty=float(params.repetition_penalty),
        seed=params.seed or 0,
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in params.logit_bias.items())),
        top_logprobs=params.logprobs or 0,
        logit_processors=tuple((name, _json(name, given)) for name, given in sorted(params.logit_processors.items())),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        prompt_top_logprobs=params.prompt_logprobs or 0,
    )


def _json(name: str, arguments: Arguments) -> str:
    """Return the arguments of a logit processor as JSON, for the journal."""
    try:
        return json.dumps(arguments, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`logit_processors`: the arguments of `{name}` must be a JSON object: {error}") from error


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return one prompt or several as a sequence.

    A text, a sequence that begins with a number, and an array with two dimensions are one prompt.
    """
    if isinstance(prompts, np.ndarray | Tensor):
        one = prompts.ndim < 3
    else:
        one = isinstance(prompts, str | MediaPrompt) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def with_embeddings(prompt: Prompt, size: int, why_not: str) -> str | Sequence[int] | MediaPrompt:
    """Return a prompt with an array of given embeddings as media. Raises ConfigError for embeddings of another shape.

    Args:
        size: numbers of an embedding of the model; why_not: why it takes none, or "".
    """
    if not isinstance(prompt, np.ndarray | Tensor):
        return prompt
    if prompt.ndim == 1:
        return cast("Sequence[int]", prompt.tolist())  # token ids
    if why_not:
        raise ConfigError(f"`prompt` has embeddings, but {why_not}")
    rows = prompt.detach().to("cpu", torch.float32).numpy() if isinstance(prompt, Tensor) else prompt
    try:
        made = embedded_prompt(rows)
    except BadEmbeddings as error:
        raise ConfigError(f"`prompt` {error}") from error
    if (given := embedded_size(made)) != size:
        raise ConfigError(f"`prompt` has embeddings of {given} numbers, but those of this model have {size}")
    return made


def token_ids_of(prompt: Sequence[int]) -> list[int]:
    """Return the ids of a prompt. Raises ConfigError for an invalid id; the model's vocabulary is checked later."""
    ids = []
    for token in prompt:
        try:
            ids.append(index(token))
        except TypeError as error:
            raise ConfigError(f"`prompt` holds {token!r}, which is no token id") from error
        if not 0 <= ids[-1] < 2**31:
            raise ConfigError(f"`prompt` holds {token}, which is no token id")
    return ids


def check_params(params: Params) -> None:
    """Raise ConfigError, with the field, for values of a wrong type, or beyond the range of a journal."""
    try:
        msgspec.convert(vars(params), Params)
    except msgspec.ValidationError as error:
        expected, _, where = str(error).partition(" - at ")
        name = where.partition("$.")[2].rstrip("`").partition("[")[0]
        raise ConfigError(f"`{name}` is {getattr(params, name)!r}: {expected[:1].lower()}{expected[1:]}") from error
    if not 1 <= params.n <= SAMPLES_MAX:
        raise ConfigError(f"`n` must be 1 to {SAMPLES_MAX}, got `{params.n}`")
    if not all(params.stop):
        raise ConfigError("`stop` holds an empty text, which is in front of every answer\nhint: leave it out")
    if params.allowed_token_ids is not None and not len(params.allowed_token_ids):
        raise ConfigError(
            "`allowed_token_ids` is empty, so that no token could be drawn\nhint: None allows every token"
        )


def params_of_each(params: Params | Sequence[Params] | None, count: int) -> Sequence[Params]:
    """Return the parameters of each of `count` prompts."""
    if params is None or isinstance(params, Params):
        return [params or Params()] * count
    if len(params) != count:
        raise ConfigError(f"`params` must be one for all or one for each of {count} prompts, got {len(params)}")
    return params
