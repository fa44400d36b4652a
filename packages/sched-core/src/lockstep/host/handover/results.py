"""The host's interface of a handover, and results of a prompt that belong to the request on the decode engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from lockstep.core.contract.commands import CancelTransfer, FinishRequest, RejectRequest, StartTransfer, Step
from lockstep.core.contract.events import RequestArrived, RequestId
from lockstep.host.batches import BatchResult
from lockstep.host.handover.wire import PromptResults
from lockstep.host.media.content import EncoderInput
from lockstep.host.sinks import Kept, ResultExtras, TokenLogprobs


class Handover(Protocol):
    """The transfers of one engine; `PrefillSide` or `DecodeSide`. Called in the host's thread."""

    @property
    def busy(self) -> bool:
        """Whether a transfer has not ended."""

    def arriving(self, event: RequestArrived, contents: Sequence[EncoderInput] = ()) -> None:
        """Take in a request that the engine steps next, so that its first commands find it.

        Args:
            contents: of its media.
        """

    def decided(self, step: Step) -> None:
        """Take in what the engine decided, before its commands are performed."""

    def arrived(self, event: RequestArrived, requests: list[RequestId]) -> None:
        """Take in what the engine did with a request; `requests` are its samples with a transfer."""

    def perform(self, command: StartTransfer | CancelTransfer) -> None:
        """Carry out a command of the core."""

    def collected(self, result: BatchResult) -> None:
        """Take in the result of a batch, once the engine has stepped it."""

    def end_links(self) -> None:
        """End all links, since the engine has ended: the other engines do not wait for it. From any thread."""

    def close(self) -> None:
        """End all links, and what they move."""


class PromptSink:
    """Receives the answer of a request on a prefill engine: its first token's logprobs. Its tokens go with the KV.

    Args:
        refused: called with the reason if the engine does not take the request.
    """

    def __init__(self, refused: Callable[[str], object]) -> None:
        self.logprobs: TokenLogprobs | None = None
        self._refused = refused

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Keep the logprobs of the first token."""
        if not offset:
            self.logprobs = logprobs

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """Do nothing: the engine cancels the transfer where that is due."""

    def rejected(self, end: RejectRequest) -> None:
        """Report the reason."""
        self._refused(end.message or end.reason)

    def failed(self, message: str) -> None:
        """Do nothing: the links end with the engine."""


def packed(first: TokenLogprobs | None, extras: ResultExtras | None) -> PromptResults:
    """Return the results of a prompt as a message contains them."""
    positions = [] if extras is None else sorted(extras.hidden_states)
    hidden = b""
    if extras is not None and positions:
        hidden = np.stack([extras.hidden_states[one] for one in positions]).astype("<f4").tobytes()
    ids = logprobs = b""
    if first is not None and first.top_ids is not None and first.top_logprobs is not None:
        ids = first.top_ids[0].astype("<i4").tobytes()
        logprobs = first.top_logprobs[0].astype("<f4").tobytes()
    return PromptResults(
        logprob=None if first is None else float(first.logprobs[0]),
        top_ids=ids,
        top_logprobs=logprobs,
        prompt_logprobs={} if extras is None else extras.prompt_logprobs,
        prompt_top_logprobs={} if extras is None else extras.prompt_top_logprobs,
        hidden_positions=np.array(positions, "<i4").tobytes(),
        hidden=hidden,
    )


def unpacked(results: PromptResults, extras: ResultExtras) -> Kept | None:
    """Add the results of a prompt to those of the request on the decode engine.

    Returns: the logprobs of the first token; None unless requested.
    """
    extras.prompt_logprobs.update(results.prompt_logprobs)
    extras.prompt_top_logprobs.update(results.prompt_top_logprobs)
    positions = np.frombuffer(results.hidden_positions, "<i4").tolist()
    if positions:
        states = np.frombuffer(results.hidden, "<f4").reshape(len(positions), -1)
        extras.hidden_states.update(zip(positions, states, strict=True))
    if results.logprob is None:
        return None
    if not results.top_ids:
        return results.logprob, None, None
    return results.logprob, np.frombuffer(results.top_ids, "<i4"), np.frombuffer(results.top_logprobs, "<f4")
