"""Outputs of requests: whole, in deltas, scored; and the sink of an open request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.host.batches import Float32s
from lockstep.host.loop import ResultExtras, TokenLogprobs
from lockstep.host.stop_texts import TextEnd
from lockstep.host.text import Text


@dataclass(slots=True)
class RequestOutput:
    """The result of one request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None  # None without a tokenizer
    finish_reason: str = ""  # the core's reason: length, stop, text_stop, computed, ...; or why it was rejected
    error: str = ""  # a sentence if the request was rejected or failed
    cached_tokens: int = 0  # prompt tokens from the cache
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position; the first has none
    prompt_top_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)  # [position][token], likeliest first
    hidden_states: Float32s | None = None  # [positions, hidden]
    vector: Float32s | None = None  # [hidden] or, for kind score, [vocabulary]
    weights: tuple[tuple[int, int], ...] = ()  # (first output token, version of the weights from there on)
    others: list[RequestOutput] = field(default_factory=list)  # further answers to the same prompt, with `Params.n` > 1


@dataclass(frozen=True, slots=True)
class Scored:
    """The logprobs of the labels behind one prompt."""

    prompt_token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)  # of each label as a whole, given the prompt
    token_logprobs: list[list[float]] = field(default_factory=list)  # of each label's tokens
    error: str = ""  # a sentence if the prompt was rejected or failed


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """A new part of an answer."""

    text: str
    token_ids: list[int]
    answer: RequestOutput | None = None  # the whole answer, with the last delta


FAILURES = {"invalid": "the model's logits were no numbers, or no token was allowed"}


class PendingRequest:
    """Handle of a submitted request: returned by `LLM.ask`, consumed by `LLM.wait`. It is the request's sink.

    The host's thread only stores tokens. Their text is decoded by the thread that reads it.
    """

    def __init__(
        self,
        answer: RequestOutput,
        text: Text | None,
        stops: Sequence[str],
        tokens: SimpleQueue[list[int] | None] | None,
    ) -> None:
        self.answer = answer
        self.samples = [self]  # this answer and the others to the same prompt, in order
        self.over = threading.Event()
        self.failure = ""
        self._tokens = tokens
        self._step = text.stream(answer.prompt_token_ids) if text is not None else None
        self._text_end = TextEnd(stops)
        self._stopped = False  # whether a stop text was found
        self._parts: list[str] = []  # of the answer's text
        self._spelled = 0  # tokens decoded so far

    # ------------------------------------------------------------------------------------------ in the host's thread

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Store new tokens; tokens that were received before are skipped."""
        ids = self.answer.token_ids
        repeats = len(ids) - offset
        new = tokens[repeats:] if repeats else tokens
        ids += new
        if logprobs is not None:
            self.answer.logprobs += logprobs.logprobs.tolist()[repeats:]
            if logprobs.top_ids is not None and logprobs.top_logprobs is not None:
                pairs = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
                self.answer.top_logprobs += [dict(zip(ids, values, strict=True)) for ids, values in pairs][repeats:]
        if self._tokens is not None:
            self._tokens.put(new)

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """Store the end of the request and its extra results."""
        answer = self.answer
        answer.finish_reason, answer.cached_tokens = end.reason, end.cached_tokens
        answer.error = extras.error if end.reason == "error" else FAILURES.get(end.reason, "")
        answer.prompt_logprobs = dict(sorted(extras.prompt_logprobs.items()))
        answer.prompt_top_logprobs = dict(sorted(extras.prompt_top_logprobs.items()))
        if extras.hidden_states:
            answer.hidden_states = np.stack([extras.hidden_states[p] for p in sorted(extras.hidden_states)])
        if extras.pooled is not None:
            answer.vector = extras.pooled.values
        answer.weights = extras.weights
        self._end()

    def rejected(self, end: RejectRequest) -> None:
        """Store that the request was rejected."""
        self.answer.finish_reason, self.answer.error = end.reason, end.message
        self._end()

    def failed(self, message: str) -> None:
        """Store that the engine ended."""
        self.failure = message
        self._end()

    def _end(self) -> None:
        self.over.set()
        if self._tokens is not None:
            self._tokens.put(None)

    # --------------------------------------------------------------------------------- in the waiting thread

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text that the next tokens add to what was returned before, up to a stop text."""
        if self._step is None:
            return ""
        self._spelled += len(tokens)
        new = "" if self._stopped else "".join(map(self._step, tokens))
        if new:
            self._text_end.add(new)
            if (found := self._text_end.stop()) is not None:
                self._stopped = True
                new = new[: max(0, found[0] - self._text_end.characters + len(new))]
        self._parts.append(new)
        return new

    def spell_rest(self) -> None:
        """Store the text of the whole answer."""
        if self._step is not None:
            self.spell(self.answer.token_ids[self._spelled :])
            self.answer.text = "".join(self._parts)


def scored_at_once(answer: RequestOutput, tokens: list[int]) -> Scored:
    """Return the logprobs of tokens by the logits at a prompt's last position."""
    if answer.error or answer.vector is None:
        return Scored(answer.prompt_token_ids, error=answer.error or f"it ended with reason {answer.finish_reason}")
    logits = answer.vector.astype(np.float64)
    largest = logits.max()
    logprobs = (logits[tokens] - largest - np.log(np.exp(logits - largest).sum())).tolist()
    return Scored(answer.prompt_token_ids, logprobs, [[one] for one in logprobs])


def scored_by_label(prompt: list[int], answers: Sequence[RequestOutput]) -> Scored:
    """Return the logprobs of the labels of one prompt, each from a request with prompt and label."""
    for answer in answers:
        missing = len(answer.prompt_token_ids) - len(prompt) - len(answer.prompt_logprobs)
        if answer.error or missing:
            return Scored(prompt, error=answer.error or f"a label ended with reason {answer.finish_reason}")
    tokens = [list(answer.prompt_logprobs.values()) for answer in answers]
    return Scored(prompt, [sum(one) for one in tokens], tokens)
