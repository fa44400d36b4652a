"""Requests with several samples (n, best_of): their turns, the tokens of each sample, the end of all samples.

    parse_samples("0.3x2..8")                # 0.3 of the turns with output have 2 to 8 samples, uniformly
    with_samples(turns, spec, seed=7)

As in the server, a request with n samples is n requests of the engine that share a prompt: ids [first, first + n). The
output of the first sample is the turn's own, which the session continues with. The others have the same length and
their own tokens. A session continues once all samples have ended, because its client waits for all. It breaks off if
one was rejected or cancelled.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestId
from lockstep.core.contract.samples import SAMPLES_MAX
from lockstep.sim.workload.arrivals import random_stream
from lockstep.sim.workload.token_runs import TOKEN_IDS
from lockstep.sim.workload.turns import Turn, Turns

_SPEC = re.compile(r"(?:(?P<share>[0-9.eE-]+)x)?(?P<low>[0-9]+)(?:\.\.(?P<high>[0-9]+))?")


class SampleSpec(NamedTuple):
    """Numbers of samples, and the share of turns with several."""

    share: float  # of the turns with output
    low: int
    high: int


def parse_samples(text: str) -> SampleSpec:
    """Parse `[SHAREx]LOW[..HIGH]`. Raises ConfigError."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"`samples` cannot be `{text}`: {problem}\nhint: such as --samples 4, or 0.3x2..8")

    found = _SPEC.fullmatch(text)
    if found is None:
        raise refuse("expected [SHAREx]LOW[..HIGH]")
    try:
        share, low = float(found["share"] or 1.0), int(found["low"])
        high = int(found["high"] or low)
    except ValueError as error:
        raise refuse(str(error)) from None
    if not 0.0 < share <= 1.0:
        raise refuse("the share of turns is above 0 and at most 1")
    if not 1 <= low <= high <= SAMPLES_MAX:
        raise refuse(f"a request has 1 to {SAMPLES_MAX} samples, the fewest first")
    return SampleSpec(share, low, high)


# mechanism: samples (simulated)
def with_samples(turns: Turns, spec: SampleSpec, *, seed: int) -> Turns:
    """Return the same turns, some of them with several samples. The choice does not depend on lengths."""
    has = random_stream(seed, "samples/share").random_sample(len(turns)) < spec.share
    counts = random_stream(seed, "samples/count").randint(spec.low, spec.high + 1, len(turns))
    return with_counts(turns, np.where(has & (turns.output_tokens > 0), counts, 1).astype(np.int32))


def with_counts(turns: Turns, samples: NDArray[np.int32]) -> Turns:
    """Return the same turns with these numbers of samples, int32 [n]."""
    return replace(turns, samples=samples, samples_first_token=_fresh_tokens(turns, samples))


def _fresh_tokens(turns: Turns, samples: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the first id of each turn's further samples, [n]: after all other ids, from 0 when they run out."""
    prompts = turns.run_first_token.astype(np.int64) + turns.run_tokens
    answers = turns.output_first_token.astype(np.int64) + turns.output_tokens
    at = int(max(prompts.max(initial=0), answers.max(initial=0)))
    firsts = []
    for tokens in ((samples.astype(np.int64) - 1) * turns.output_tokens).tolist():
        if at + tokens >= TOKEN_IDS:
            at = 0
        firsts.append(at)
        at += tokens
    return np.array(firsts, np.int64).astype(np.int32)


def sample_first_token(turn: Turn, sample: int) -> int:
    """Return the first token id of a turn's sample, by number."""
    if not sample:
        return turn.output_first_token
    return turn.samples_first_token + (sample - 1) * turn.output_tokens


def describe_samples(turns: Turns) -> str:
    """Return a sentence for the notes of a workload."""
    assert turns.samples is not None
    several = turns.samples[turns.samples > 1]
    return f"{len(several):,} of {len(turns):,} requests ask for several answers, {int(several.sum()):,} in all"


class OpenSamples:
    """Open requests with several samples of one engine. The source of requests uses the id of the first sample only."""

    def __init__(self) -> None:
        self._first: dict[RequestId, RequestId] = {}  # sample -> first sample, of open samples
        self._open: dict[RequestId, int] = {}  # first sample -> open samples of the request
        self._broken: set[RequestId] = set()

    def arrived(self, first: RequestId, samples: int) -> None:
        """Record a request with several samples."""
        self._first.update(dict.fromkeys(range(first, first + samples), first))
        self._open[first] = samples

    def first_of(self, request_id: RequestId) -> RequestId:
        """Return the first sample of the request that a sample belongs to."""
        return self._first.get(request_id, request_id)

    def ended(self, request_id: RequestId, *, answered: bool) -> tuple[RequestId, bool] | None:
        """Record the end of a sample. After the last one, return the first sample and whether all were answered."""
        first = self._first.pop(request_id, None)
        if first is None:
            return request_id, answered
        if not answered:
            self._broken.add(first)
        self._open[first] -= 1
        if self._open[first]:
            return None
        del self._open[first]
        whole = first not in self._broken
        self._broken.discard(first)
        return first, whole
