"""Validation of arriving requests: what they must satisfy, and which parts of the contract are not supported yet."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from msgspec import UNSET

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import (
    PromptSpan,
    RejectReason,
    RequestArrived,
    SamplingParams,
    TokenDigest,
    TokenIds,
)
from lockstep.core.contract.samples import SAMPLES_MAX
from lockstep.core.requests.table import (
    BASE,
    TOKEN_IDS,
    VERSION_MARK,
    Accepted,
    Adapter,
    Extras,
    prompt_bytes,
    prompt_length,
)

STOP_TOKENS_MAX = 64
"""The most stop tokens of one request. Each adds a column to the comparison of every decode step."""

PARTS_MARK = "\1"  # first character of a namespace that is made of parts
TENANT_FIRST = f"{PARTS_MARK}tenant "  # beginning of a namespace with a tenant


class RequestRefused(LockstepError):
    """A request that can never run here. The message names the field, its value and the limit."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason: RejectReason = reason
        self.message = message


def accepted(event: RequestArrived, adapter: Adapter, config: SchedConfig) -> Accepted:
    """Validate an arrival that runs on this adapter and return the parts that are stored.

    Raises: RequestRefused for an arrival that is malformed, not supported or too long.
    """
    _refuse_unsupported(event, config)
    if event.adapter and not config.max_loras:
        raise RequestRefused("unsupported", f"`adapter` is {event.adapter!r}, but LoRA is off (`max_loras` is not set)")
    try:
        length = prompt_length(event.prompt)
    except ValueError as error:
        raise RequestRefused("bad_request", f"`prompt` is malformed: {error}") from error
    if not length:
        raise RequestRefused("bad_request", "`prompt` is empty; it must have at least one token")
    _refuse_multi_step(event, config)
    if config.diffusion is not UNSET:
        _refuse_in_blocks(event)
    _refuse_malformed(event)
    _refuse_inconsistent(event, length, config)
    most = _fitting_tokens(event, length, config)
    tokens = prompt_bytes(event.prompt)  # after the checks of length, so that no prompt too long to run is expanded
    if isinstance(event.prompt, TokenIds) and np.minimum.reduce(np.frombuffer(tokens, np.int32)) < 0:
        raise RequestRefused("bad_request", "`prompt` holds a negative token id")
    if most < length:
        tokens = tokens[-4 * most :] if config.truncate_input == "left" else tokens[: 4 * most]
    room = config.request_tokens_max - most
    if config.role == "prefill":
        room = min(room, 1)  # the decode engine draws all further tokens
    return Accepted(
        tokens,
        cache_namespace(event, adapter, config),
        adapter,
        min(event.max_new_tokens, room),
        length - most,
        _extras(event, most),
    )


def stop_tokens_of(event: RequestArrived, config: SchedConfig) -> tuple[int, ...]:
    """Return the tokens that end a request: its own, and the model's unless the request ignores them."""
    return event.stop_token_ids if event.ignore_eos else (*config.eos_token_ids, *event.stop_token_ids)


# mechanism: namespaces (decided)
def cache_namespace(event: RequestArrived, adapter: Adapter, config: SchedConfig) -> str:
    """Return the namespace within which prefixes are shared.

    It consists of the host's namespace and of everything that makes the KV of equal tokens differ. Every part contains
    its length. Only a text made of parts starts with PARTS_MARK, so two different namespaces never coincide.
    """
    parts: list[tuple[str, str]] = []
    if config.isolate_tenants:
        parts.append(("tenant", event.tenant))
    if event.token_type_ids:
        parts.append(("types", sha256(event.token_type_ids).hexdigest()))
    if adapter != BASE:
        parts.append(("adapter", f"{adapter.name}@{adapter.version}"))
    if not parts and not event.namespace.startswith(PARTS_MARK):
        return event.namespace
    parts.append(("host", event.namespace))
    return PARTS_MARK + "".join(f"{name} {len(value)} {value} " for name, value in parts)


def tenant_of(namespace: str) -> str:
    """Return the tenant in a namespace of `cache_namespace`; empty if tenants share prefixes."""
    if not namespace.startswith(TENANT_FIRST):
        return ""
    size, _, rest = namespace[len(TENANT_FIRST) :].partition(" ")
    return rest[: int(size)]


def _extras(event: RequestArrived, prompt_tokens: int) -> Extras | None:
    """Return the extras of an arrival; None if it has none."""
    beside = event.sampling.logprobs_beside if event.sampling is not None else 0
    start, pooled = event.logprob_start, event.kind == "embed"
    wants = pooled or beside > 0 or start is not None or event.return_hidden_states
    if not (wants or event.spans or event.token_type_ids):
        return None
    return Extras(
        pooled=pooled,
        spans=event.spans,
        token_type_ids=event.token_type_ids,
        logprobs=beside > 0 or start is not None,
        logprobs_from=start if start is not None and start < prompt_tokens - 1 else None,
        hidden_from=0 if event.return_hidden_states else None,
    )


def _refuse_unsupported(event: RequestArrived, config: SchedConfig) -> None:
    unsupported = ""
    if event.transfer_room is not None and not config.hands_over:
        unsupported = f"`transfer_room` is {event.transfer_room!r}"
    elif type(event.prompt) is TokenDigest:
        unsupported = f"`prompt` is {event.prompt!r}"
    if unsupported:
        raise RequestRefused("unsupported", f"{unsupported}, which this engine does not support yet")


def _refuse_multi_step(event: RequestArrived, config: SchedConfig) -> None:
    steps = config.decode_steps_per_launch
    if steps > 1 and (event.stop_texts or event.stop_regexes):
        name = "stop_texts" if event.stop_texts else "stop_regexes"
        message = f"`{name}` must be looked for after every token, but `decode_steps_per_launch` is {steps}"
        raise RequestRefused("unsupported", message)
    if steps > 1 and event.grammar is not None:
        message = f"`grammar` must see every token before the next, but `decode_steps_per_launch` is {steps}"
        raise RequestRefused("unsupported", message)


def _refuse_in_blocks(event: RequestArrived) -> None:
    """Raise RequestRefused for a request that needs single tokens of a model that answers in blocks."""
    sampling = event.sampling if event.sampling is not None else SamplingParams()
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    for field, used in (
        ("kind", event.kind != "generate"),
        ("grammar", event.grammar is not None),
        ("stop_texts", bool(event.stop_texts)),
        ("stop_regexes", bool(event.stop_regexes)),
        ("sampling.logprobs", sampling.logprobs_beside > 0),
        ("sampling penalties", penalties != (0.0, 0.0, 1.0)),
        ("logprob_start", event.logprob_start is not None),
        ("return_hidden_states", event.return_hidden_states),
        ("spans", bool(event.spans)),
    ):
        if used:
            message = f"`{field}` is not supported by a model that answers in blocks; leave it out"
            raise RequestRefused("unsupported", message)


def _refuse_malformed(event: RequestArrived) -> None:
    if VERSION_MARK in event.namespace or VERSION_MARK in event.tenant:
        field = "namespace" if VERSION_MARK in event.namespace else "tenant"
        message = f"`{field}` holds a zero character, which separates namespaces from what the core adds"
        raise RequestRefused("bad_request", message)
    most = event.max_new_tokens
    if most < 0:
        raise RequestRefused("bad_request", f"`max_new_tokens` must be at least 0, got {most}")
    if most and event.kind != "generate":
        raise RequestRefused("bad_request", f"`max_new_tokens` must be 0 for kind {event.kind}, got {most}")
    if not 0 <= event.min_new_tokens <= most:
        raise RequestRefused(
            "bad_request", f"`min_new_tokens` must be between 0 and {most}, got {event.min_new_tokens}"
        )
    if event.grammar is not None and not event.grammar.digest:
        raise RequestRefused("bad_request", "`grammar` has no digest, by which it is known; take one of its source")
    samples = event.parallel_samples
    if not 1 <= samples <= SAMPLES_MAX:
        raise RequestRefused("bad_request", f"`parallel_samples` must be between 1 and {SAMPLES_MAX}, got {samples}")
    if samples > 1 and not most:
        raise RequestRefused(
            "bad_request", f"`parallel_samples` is {samples}, but `max_new_tokens` 0 leaves one answer"
        )
    if samples > 1 and event.session:
        raise RequestRefused(
            "bad_request", f"`parallel_samples` is {samples}, but a turn of a `session` has one answer"
        )
    if event.token_type_ids and event.session:
        raise RequestRefused("bad_request", "`token_type_ids` cannot say of what type the tokens of a `session` are")
    if event.grammar is not None and not most:
        raise RequestRefused("bad_request", "`grammar` constrains output, but `max_new_tokens` is 0")
    if len(event.stop_token_ids) > STOP_TOKENS_MAX:
        given = len(event.stop_token_ids)
        raise RequestRefused("bad_request", f"`stop_token_ids` has {given} ids, at most {STOP_TOKENS_MAX} are allowed")
    for token in event.stop_token_ids:
        if not 0 <= token < TOKEN_IDS:
            raise RequestRefused(
                "bad_request", f"`stop_token_ids` holds {token}, which is no token id (0 to {TOKEN_IDS - 1})"
            )


def _refuse_inconsistent(event: RequestArrived, length: int, config: SchedConfig) -> None:
    """Raise RequestRefused if logprob_start, token types or spans do not agree with the prompt's length."""
    start = event.logprob_start
    if start is not None and not 0 <= start <= length:
        raise RequestRefused("bad_request", f"`logprob_start` must be between 0 and {length}, got {start}")
    if event.token_type_ids and len(event.token_type_ids) != length:
        given = len(event.token_type_ids)
        raise RequestRefused("bad_request", f"`token_type_ids` has {given} bytes for a prompt of {length} tokens")
    if event.spans:
        refuse_spans(event.spans, length, config)


def refuse_spans(spans: tuple[PromptSpan, ...], length: int, config: SchedConfig) -> None:
    """Raise RequestRefused for malformed or overlapping spans, and for media that exceed the encoder cache."""
    at, sizes = 0, dict[bytes, int]()
    for span in spans:
        where = f"`spans` has [{span.start}:{span.stop})"
        if not at <= span.start < span.stop <= length:
            raise RequestRefused("bad_request", f"{where}, but spans are in order, apart and within [0:{length})")
        if len(span.digest) != sha256().digest_size:
            raise RequestRefused(
                "bad_request", f"{where} with a digest of {len(span.digest)} bytes, expected a SHA-256"
            )
        if span.encoder_tokens < 0 or (span.encoder_tokens and span.kind == "embedding"):
            raise RequestRefused(
                "bad_request", f"{where}, a given {span.kind} with {span.encoder_tokens} encoder tokens"
            )
        if sizes.setdefault(span.digest, span.encoder_tokens) != span.encoder_tokens:
            raise RequestRefused("bad_request", f"{where} and another span of its digest with other encoder tokens")
        at = span.stop
    room, needed = config.encoder_cache_tokens, sum(sizes.values())
    if room is not None and needed > room:
        raise RequestRefused("too_long", f"`spans` need {needed} encoder tokens, more than encoder_cache_tokens {room}")


# mechanism: cut-prompts (decided)
def _fitting_tokens(event: RequestArrived, tokens: int, config: SchedConfig) -> int:
    """Return how many tokens of the prompt are kept: all, or those within the limits if the prompt may be cut.

    Raises: RequestRefused for a prompt that is too long and may not be cut.
    """
    answers = event.max_new_tokens > 0
    bound = bool(event.spans or event.token_type_ids or event.session) or event.logprob_start is not None
    if config.truncate_input != "no" and not bound:
        return min(tokens, config.prompt_tokens_max(answers))
    refuse_too_long(tokens, answers, config, event.spans)
    return tokens


def refuse_too_long(tokens: int, answers: bool, config: SchedConfig, spans: tuple[PromptSpan, ...] = ()) -> None:
    """Raise RequestRefused for a prompt that is longer than the limits allow.

    Args:
        tokens: length of the prompt after the expansion of media. The message contains how many belong to spans.
        answers: whether the request has output, and so needs room for one more token.
    """
    if tokens <= config.prompt_tokens_max(answers):
        return
    has = f"the prompt has {tokens} tokens"
    if spans:
        taken = sum(span.stop - span.start for span in spans)
        has += f" ({taken} of them placeholders of {len(spans)} span{'s' if len(spans) > 1 else ''})"
    if config.max_input_tokens is not None and tokens > config.max_input_tokens:
        message = f"{has}, more than max_input_tokens {config.max_input_tokens}"
        raise RequestRefused("too_long", message)
    pool = config.pool_tokens
    if answers:
        pool_binds, needs = config.request_tokens_max != config.context_tokens_max, " and needs room for one more"
    else:
        pool_binds, needs = pool < config.context_tokens_max, ""
    limit = f"the KV pool of {pool} tokens" if pool_binds else f"the context of {config.context_tokens_max} tokens"
    raise RequestRefused("too_long", f"{has}{needs}, more than {limit} holds")
