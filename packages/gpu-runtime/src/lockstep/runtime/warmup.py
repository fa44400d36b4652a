"""A few requests before the first real one, so that no client waits while kernels are compiled.

Triton compiles a kernel at its first launch, which takes seconds, and again for each specialisation: by the size of a
tile, by whether a number is 1 or a multiple of 16. Therefore the warm-up runs what serving will run, through the real
executor: extends of every tile size, decodes of one row, few and many, and every step of sampling. It has its own
engine, without a journal. Its state in tables and pool is never read, because a row is reset when it is taken and a
slot is written before it is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestArrived, SamplingParams, TokenIds
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import BatchExecutor
from lockstep.host.loop import HostClock, ResultExtras, RuntimeHost, TokenLogprobs

log = logging.getLogger("lockstep.runtime")

NEW_TOKENS = 4  # of each request: an extend and decodes
PROMPT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # an extend's tile is a power of two of tokens x heads per KV head
ROWS = (1, 3, 16, 40)  # Triton distinguishes 1, multiples of 16 and other numbers; many rows decode without splitting
LOGIT_BIAS = ((0, 0.5), (1, -0.5), (2, 0.25))
ALLOWED = (0, 1, 2, 3)

SHAPING = (
    "page_size pages context_tokens_max max_running_requests request_rows max_prefill_tokens chunked_prefill_size "
    "chunk_unit truncation_align_size batching overlap_depth decode_steps_per_launch speculative_method "
    "num_speculative_tokens speculative_max_batch_size speculative_topk speculative_num_steps"
).split()
"""Settings that determine the shape of a batch."""

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=1)
LIMITED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2, top_logprobs=2)
EDITED = SamplingParams(
    temperature=1.0,
    seed=3,
    logit_bias=LOGIT_BIAS,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    allowed_token_ids=ALLOWED,
)
KINDS = (GREEDY, SAMPLED, LIMITED, EDITED)


@dataclass(slots=True)
class WarmUp:
    """The extent of a warm-up."""

    requests: int = 0
    batches: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)  # requests by the error that they ended with


@dataclass(slots=True)
class _Ended:
    """A sink that stores how its request ended."""

    failure: str = field(default="the engine stopped")

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Ignore the tokens."""

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """Store the error if a batch failed; logits that are not numbers are not an error of kernels."""
        self.failure = extras.error if end.reason == "error" else ""

    def rejected(self, end: RejectRequest) -> None:
        """Store the rejection of a request that is too long for this engine."""
        self.failure = end.message

    def failed(self, message: str) -> None:
        """Store the engine's error."""
        self.failure = message


def warm_up(executor: BatchExecutor, config: SchedConfig, clock: HostClock, vocab: int) -> WarmUp:
    """Run every kernel that serving will run; logs the duration.

    Args:
        executor: idle. clock: the clock of its lane.
        vocab: vocabulary of the model; prompts use all its ids.
    Raises: ConfigError if every request fails. If only some do, a step of sampling perhaps, other requests can be
        served: the log has the errors.
    """
    began_s, done = time.monotonic(), WarmUp()
    shapes = SchedConfig(**{name: getattr(config, name) for name in SHAPING})  # no policy, limit or timeout
    host = RuntimeHost(Engine(shapes), executor, NoJournal(), clock)
    for wave in _waves(shapes, vocab):
        ends = [_Ended() for _ in wave]
        for request, end in zip(wave, ends, strict=True):
            host.submit(request, end)
        host.run(until_idle=True)
        done.requests += len(wave)
        for end in ends:
            if end.failure:
                done.failures[end.failure] = done.failures.get(end.failure, 0) + 1
    if done.requests == sum(done.failures.values()):
        errors = "; ".join(done.failures)
        raise ConfigError(f"the warm-up failed: {errors}\nhint: another --attention-backend may run here")
    for error, requests in done.failures.items():
        log.error("warm-up: %d of %d requests failed, and others like them will: %s", requests, done.requests, error)
    done.batches, done.seconds = host.batches, time.monotonic() - began_s
    log.info("warm-up: %d batches of %d requests took %.1f s", done.batches, done.requests, done.seconds)
    return done


def _waves(config: SchedConfig, vocab: int) -> Iterator[list[RequestArrived]]:
    """Yield lists of requests that run together."""
    most = config.request_tokens_max - NEW_TOKENS
    longest = (config.chunked_prefill_size or config.max_prefill_tokens) + 1
    number = 0

    def request(tokens: int) -> RequestArrived:
        nonlocal number
        number += 1
        ids = (np.arange(tokens, dtype=np.int64) * 31 + number * 7919) % vocab
        return RequestArrived(
            0,
            request_id=-1,
            prompt=TokenIds(ids.astype(np.int32).tobytes()),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            stop_token_ids=(0,),  # banned for so long, which needs its own kernel
            sampling=KINDS[number % len(KINDS)],
        )

    for tokens in (*PROMPT_TOKENS, longest):  # each alone, for its tiles; the longest in two chunks
        if 0 < tokens <= most:
            yield [request(tokens)]
    for _ in KINDS:  # one row of each kind
        yield [request(1)]
    for rows in ROWS:  # all kinds together
        if rows <= config.max_running_requests:
            yield [request(3 + i % 5) for i in range(rows)]
