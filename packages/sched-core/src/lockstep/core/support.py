"""What an arriving request must satisfy, and which parts of the contract this engine does not serve yet."""

from __future__ import annotations

import numpy as np

from lockstep.core.config import SchedConfig
from lockstep.core.events import RejectReason, RequestArrived, TokenDigest
from lockstep.core.requests import prompt_bytes

Refusal = tuple[RejectReason, str]


def refusal(event: RequestArrived, config: SchedConfig) -> Refusal | None:
    """Why a request can never run here, or None. The message names the field, its value and the limit."""
    return _unsupported(event) or _malformed(event) or _too_long(event, config)


def _unsupported(event: RequestArrived) -> Refusal | None:
    asked = {
        "kind": event.kind != "generate",
        "grammar": event.grammar is not None,
        "adapter": bool(event.adapter),
        "session": bool(event.session),
        "spans": bool(event.spans),
        "parallel_samples": event.parallel_samples != 1,
        "priority": event.priority is not None,
        "logprob_start": event.logprob_start is not None,
        "transfer_room": event.transfer_room is not None,
        "prompt": isinstance(event.prompt, TokenDigest),
    }
    for field, is_asked in asked.items():
        if is_asked:
            return "unsupported", f"`{field}` is {getattr(event, field)!r}, which this engine does not support yet"
    return None


def _malformed(event: RequestArrived) -> Refusal | None:
    try:
        tokens = prompt_bytes(event.prompt)
    except ValueError as error:
        return "bad_request", f"`prompt` is malformed: {error}"
    if not tokens:
        return "bad_request", "`prompt` is empty; it must have at least one token"
    if int(np.frombuffer(tokens, np.int32).min()) < 0:
        return "bad_request", "`prompt` holds a negative token id"
    if event.max_new_tokens < 1:
        return "bad_request", f"`max_new_tokens` must be at least 1, got {event.max_new_tokens}"
    if not 0 <= event.min_new_tokens <= event.max_new_tokens:
        most = event.max_new_tokens
        return "bad_request", f"`min_new_tokens` must be between 0 and {most}, got {event.min_new_tokens}"
    for token in event.stop_token_ids:
        if token < 0:
            return "bad_request", f"`stop_token_ids` holds a negative token id, {token}"
    return None


def _too_long(event: RequestArrived, config: SchedConfig) -> Refusal | None:
    tokens, most = len(prompt_bytes(event.prompt)) // 4, config.request_tokens_max
    if tokens < most:
        return None
    if most == config.context_tokens_max:
        limit = f"the context of {most} tokens"
    else:
        limit = f"the KV pool of {config.pool_tokens} tokens"
    return "too_long", f"the prompt has {tokens} tokens and needs at least one output token, more than {limit} holds"
