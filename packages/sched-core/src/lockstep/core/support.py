"""What an arriving request must satisfy, and which parts of the contract this engine does not serve yet."""

from __future__ import annotations

import numpy as np

from lockstep.core.config import SchedConfig
from lockstep.core.errors import LockstepError
from lockstep.core.events import RejectReason, RequestArrived, TokenDigest
from lockstep.core.memory import VERSION_MARK
from lockstep.core.requests import TOKEN_IDS, prompt_bytes, prompt_length

STOP_TOKENS_MAX = 64
"""Stop tokens one request may have; each is a column of every decode step's comparison."""


class Refused(LockstepError):
    """A request that can never run here. The message names the field, its value and the limit."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason: RejectReason = reason
        self.message = message


def accepted_prompt(event: RequestArrived, config: SchedConfig) -> bytes:
    """The prompt's ids as packed int32, if everything asked for is valid, supported and fits. Raises Refused."""
    _refuse_unsupported(event)
    try:
        length = prompt_length(event.prompt)
    except ValueError as error:
        raise Refused("bad_request", f"`prompt` is malformed: {error}") from error
    if not length:
        raise Refused("bad_request", "`prompt` is empty; it must have at least one token")
    _refuse_multi_step(event, config)
    _refuse_malformed(event)
    refuse_too_long(length, config)
    tokens = prompt_bytes(event.prompt)  # only now: nothing is spelled out that is too long to run
    if int(np.frombuffer(tokens, np.int32).min()) < 0:
        raise Refused("bad_request", "`prompt` holds a negative token id")
    return tokens


def _refuse_unsupported(event: RequestArrived) -> None:
    asked = (
        ("kind", event.kind != "generate"),
        ("adapter", event.adapter),
        ("spans", event.spans),
        ("parallel_samples", event.parallel_samples != 1),
        ("logprob_start", event.logprob_start is not None),
        ("transfer_room", event.transfer_room is not None),
        ("prompt", isinstance(event.prompt, TokenDigest)),
    )
    for field, is_asked in asked:
        if is_asked:
            value = getattr(event, field)
            raise Refused("unsupported", f"`{field}` is {value!r}, which this engine does not support yet")


def _refuse_multi_step(event: RequestArrived, config: SchedConfig) -> None:
    steps = config.decode_steps_per_launch
    if steps > 1 and event.stop_texts:
        message = f"`stop_texts` must be looked for after every token, but `decode_steps_per_launch` is {steps}"
        raise Refused("unsupported", message)
    if steps > 1 and event.grammar is not None:
        message = f"`grammar` must see every token before the next, but `decode_steps_per_launch` is {steps}"
        raise Refused("unsupported", message)


def _refuse_malformed(event: RequestArrived) -> None:
    if VERSION_MARK in event.namespace:
        raise Refused("bad_request", "`namespace` holds a zero character, which separates it from what the core adds")
    most = event.max_new_tokens
    if most < 1:
        raise Refused("bad_request", f"`max_new_tokens` must be at least 1, got {most}")
    if not 0 <= event.min_new_tokens <= most:
        raise Refused("bad_request", f"`min_new_tokens` must be between 0 and {most}, got {event.min_new_tokens}")
    if event.grammar is not None and not event.grammar.digest:
        raise Refused("bad_request", "`grammar` has no digest, by which it is known; take one of its source")
    if len(event.stop_token_ids) > STOP_TOKENS_MAX:
        given = len(event.stop_token_ids)
        raise Refused("bad_request", f"`stop_token_ids` has {given} ids, at most {STOP_TOKENS_MAX} are allowed")
    for token in event.stop_token_ids:
        if not 0 <= token < TOKEN_IDS:
            raise Refused("bad_request", f"`stop_token_ids` holds {token}, which is no token id (0 to {TOKEN_IDS - 1})")


def refuse_too_long(tokens: int, config: SchedConfig) -> None:
    """Raise Refused for a prompt that leaves no room for one token of output."""
    most = config.request_tokens_max
    if tokens < most:
        return
    if most == config.context_tokens_max:
        limit = f"the context of {most} tokens"
    else:
        limit = f"the KV pool of {config.pool_tokens} tokens"
    raise Refused("too_long", f"the prompt has {tokens} tokens and needs room for one more, more than {limit} holds")
