"""Requests: what the scheduler keeps of each, and a vLLM request as an event of the core."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from lockstep.core.contract.events import Grammar, PromptSpan, RequestArrived, RequestId, TokenIds, TokenRuns
from lockstep.vllm.groups import NO_STATE
from vllm.v1.core.sched.utils import check_sequence_repetition

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.request import Request

PRIVATE = "\2"
"""First character of the namespace of a request that neither reads nor fills the prefix cache of others."""


class Tracked:
    """A request of vLLM that has not ended, with its number in the core."""

    __slots__ = (
        "blocks",
        "core_id",
        "detects",
        "outputs",
        "prompt_logprobs",
        "prompt_tokens",
        "request",
        "sent",
        "state",
        "tokens",
        "windows",
    )

    def __init__(self, request: Request, core_id: RequestId) -> None:
        self.request = request
        self.core_id = core_id
        self.prompt_tokens: int = request.num_prompt_tokens
        self.blocks: list[int] = []  # its block table, as the workers have it
        self.windows: list[int] = []  # the window page of each of its blocks, where layers have windows
        self.state: int = NO_STATE  # its state slot, where layers have recurrent state
        self.prompt_logprobs: LogprobsTensors | None = None  # computed, and not sent to the client yet
        params = request.sampling_params
        self.detects = params is not None and params.repetition_detection is not None
        self.sent = False  # whether the workers have the request
        self.outputs = request._output_token_ids  # delivered output tokens; the list that vLLM's views read
        self.tokens = request._all_token_ids  # prompt and delivered output tokens, likewise


REPETITION = ("repetition_detection",)
"""`stop_texts` of a request whose output this package searches for repetitions; it reports them as `text_stops`."""


def arrival(
    request: Request,
    core_id: RequestId,
    time_us: int,
    *,
    reads_tokens: bool,
    adapter: str = "",
    spans: tuple[PromptSpan, ...] = (),
) -> RequestArrived:
    """Return the event by which a vLLM request enters the core.

    `min_tokens` is left out: the workers mask stop tokens until then, and vLLM ends a request at any that is drawn.

    Args:
        reads_tokens: whether prompts are compared, as the prefix cache does; otherwise only their length counts.
        adapter: the core's name of the request's LoRA adapter; empty: the base model.
        spans: its multimodal items.
    """
    params = request.sampling_params
    stops: tuple[int, ...] = ()
    grammar: Grammar | None = None
    stop_texts: tuple[str, ...] = ()
    if params is not None:
        stop_texts = REPETITION if params.repetition_detection is not None else ()
        stops = tuple(params.stop_token_ids or ())
        if params.eos_token_id is not None and params.eos_token_id not in stops:
            stops = (*stops, params.eos_token_id)
        if request.use_structured_output:
            grammar = grammar_of(request.request_id)
    ids = request.prompt_token_ids
    prompt: TokenIds | TokenRuns
    if ids is None or not reads_tokens:
        prompt = TokenRuns((0, request.num_prompt_tokens))
    else:
        prompt = TokenIds(np.asarray(ids, np.int32).tobytes())
    return RequestArrived(
        time_us=time_us,
        request_id=core_id,
        prompt=prompt,
        max_new_tokens=request.max_tokens if request.pooling_params is None else 0,
        stop_token_ids=stops,
        stop_texts=stop_texts,
        adapter=adapter,
        spans=spans,
        ignore_eos=True,  # the end token is among `stop_token_ids` where it ends the request
        label=request.request_id[:LABEL_MAX],
        priority=request.priority,
        namespace=namespace_of(request),
        kind="embed" if request.pooling_params is not None else "generate",
        grammar=grammar,
    )


LABEL_MAX = 200


def namespace_of(request: Request) -> str:
    """Return the namespace inside which the request shares prefixes: its cache salt, or one of its own."""
    if request.skip_reading_prefix_cache or request.prompt_embeds is not None:
        return PRIVATE + request.request_id
    return request.cache_salt or ""


def grammar_of(request_id: str) -> Grammar:
    """Return the grammar of a request as the core identifies it.

    vLLM compiles one grammar per request, so each has a digest of its own. Its source stays with vLLM.
    """
    return Grammar("structural_tag", "", sha256(request_id.encode()).digest())


def repeats(entry: Tracked, tokens: list[int]) -> bool:
    """Whether a request ends because its newest token completes a repetition.

    Stop tokens and the length limits go before repetitions, and `min_tokens` delays them, as in vLLM.

    Args:
        tokens: the tokens that a pass sampled for it; one, since such a request has no drafts.
    """
    request = entry.request
    params = request.sampling_params
    assert params is not None
    assert params.repetition_detection is not None
    outputs = [*entry.outputs, *tokens]
    ended = tokens[-1] == params.eos_token_id or tokens[-1] in (params.stop_token_ids or ())
    if ended or len(outputs) >= request.max_tokens or len(outputs) < params.min_tokens:
        return False
    return check_sequence_repetition(outputs, params.repetition_detection)


def stop_reason(params: SamplingParams | None, token: int) -> int | None:
    """Return the stop token that ended an answer as vLLM reports it: None for the end token."""
    if params is None or token == params.eos_token_id:
        return None
    return token
