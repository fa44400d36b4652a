"""Receivers of answers, and the results of a request that a host keeps until they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.contract.events import RequestArrived
from lockstep.host.batches import Float32s, Int32s, Pooled

Kept = tuple[float, Int32s | None, Float32s | None]
"""The logprob of a token, and ids and logprobs of the likeliest tokens in its place."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of consecutive output tokens of one request."""

    logprobs: Float32s  # [tokens]
    top_ids: Int32s | None = None  # [tokens, logprobs_beside of the request]
    top_logprobs: Float32s | None = None


class Sink(Protocol):
    """Receiver of a request's answer. Called in the host's thread; must not block. The last call is one of the ends.

    A sink that raises gets no further call, and its request is cancelled; other requests are not affected.
    """

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Receive output tokens from number `offset` on; numbers received before are repeats.

        `logprobs` is None unless requested.
        """

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """The request finished with `end.reason`; no tokens follow."""

    def rejected(self, end: RejectRequest) -> None:
        """The request was rejected before it ran."""

    def failed(self, message: str) -> None:
        """The engine ended before the request did. Another thread may call this: the one that ends the engine."""


@dataclass(slots=True)
class ResultExtras:
    """Results of a request beside its tokens, in the order of the batches that computed them."""

    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position of the token, for requested ones
    prompt_top_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)  # by position, likeliest first
    hidden_states: dict[int, Float32s] = field(default_factory=dict)  # [hidden], by position
    pooled: Pooled | None = None
    error: str = ""  # of the batch that failed, where the request ends with reason "error"
    weights: tuple[tuple[int, int], ...] = ()  # at the end: (first output token, version of the weights) of each span


@dataclass(slots=True)
class UnsentOutput:
    """The part of a request's answer that its sink has not received when the request is resumed after a restart."""

    offset: int  # number of the first of these tokens
    tokens: list[int]
    logprobs: dict[int, Kept]  # by output number, from `offset` on
    end: FinishRequest | RejectRequest | None = None
    weights: tuple[tuple[int, int], ...] = ()  # as in ResultExtras, if there is an end


def drop_behind_the_end(extras: ResultExtras, end: FinishRequest) -> None:
    """Drop positions that several decodes in one launch computed after a request's last token."""
    stop = end.prompt_tokens + max(end.output_tokens - 1, 0)  # the last token is never computed
    for position in [position for position in extras.hidden_states if position >= stop]:
        del extras.hidden_states[position]


def with_logprobs(event: RequestArrived) -> bool:
    """Whether a request requires logprobs of its output."""
    return event.logprob_start is not None or (event.sampling is not None and event.sampling.logprobs_beside > 0)


def taken_from(kept: dict[int, Kept], offset: int, count: int) -> TokenLogprobs | None:
    """Remove and return the logprobs of output tokens [offset:offset + count); None unless all are there."""
    if not all(number in kept for number in range(offset, offset + count)):
        return None
    entries = [kept.pop(number) for number in range(offset, offset + count)]
    logprobs = np.array([logprob for logprob, _, _ in entries], np.float32)
    ids = [ids for _, ids, _ in entries if ids is not None]
    tops = [tops for _, _, tops in entries if tops is not None]
    if len(ids) < count:
        return TokenLogprobs(logprobs)
    return TokenLogprobs(logprobs, np.stack(ids), np.stack(tops))
