"""The longest chunk with which a pass stays under a latency target.

The duration of a pass with prompts is fitted online to the reported durations of earlier passes:

    us = a + b x new tokens + c x pairs        pairs: (query, key) pairs that attention computes

by least squares in which older passes fade. Sums are stored, not samples. They are plain floats, added in the order of
the journal, so that equal journals have equal fits on any machine.
"""

from __future__ import annotations

from math import sqrt

from lockstep.core.contract.commands import BatchPlan, Int32s

FADE = 0.99  # weight of a pass relative to the one after it
PASSES_MIN = 8  # passes observed before the fit is trusted
TOKENS, PAIRS = 1024.0, 1024.0 * 1024.0  # units of the fit, so that its numbers have similar sizes

Sums = list[float]  # sums of 1, n, p, nn, np, pp, y, ny, py, and the number of passes


class ExtendLatency:
    """An online fit of the duration of passes with prompts. All state is in `sums`."""

    def __init__(self) -> None:
        self.sums: Sums = [0.0] * 10

    def observe(self, plan: BatchPlan, us: int) -> None:
        """Take in the duration of a pass."""
        n, p = int(new_tokens_of(plan).sum()) / TOKENS, pairs_of(plan) / PAIRS
        new = (1.0, n, p, n * n, n * p, p * p, float(us), n * us, p * us)
        *sums, passes = self.sums
        self.sums = [old * FADE + value for old, value in zip(sums, new, strict=True)] + [passes + 1.0]

    # mechanism: chunk-target (decided)
    def tokens_within(
        self, target_us: int, context_tokens: int, decodes: int, decode_context_tokens: int
    ) -> int | None:
        """Return the longest chunk behind `context_tokens` that keeps a pass under the target, beside so many decodes.

        0 if even a pass without the chunk exceeds the target. None while the fit is undetermined: too few passes, or
        passes too similar to separate the terms.
        """
        fit = self._fit()
        if fit is None:
            return None
        base, per_token, per_pair = fit
        base += per_token * decodes / TOKENS + per_pair * decode_context_tokens / PAIRS
        # per_pair/2 n^2 + (per_token + per_pair context) n + base - target = 0, with n in tokens
        square = per_pair / PAIRS / 2
        linear = per_token / TOKENS + per_pair / PAIRS * context_tokens
        left = target_us - base
        if left <= 0:
            return 0
        return int(2 * left / (linear + sqrt(linear * linear + 4 * square * left)))

    # mechanism: chunk-of-equal-cost (decided)
    def tokens_like_first(self, first_tokens: int, context_tokens: int) -> int | None:
        """Return the chunk behind `context_tokens` that takes as long as a first chunk of `first_tokens`, as fitted.

        The constant is part of both, so only the other two terms count. None while the fit is undetermined. If pairs
        have no cost of their own, all chunks of one size take the same time.
        Source: SGLang's dynamic chunking, f(history + chunk) - f(history) = f(first chunk), without its smoothing.
        """
        fit = self._fit_by_tokens()
        if fit is None:
            return None
        per_token, per_pair = fit
        # square n^2 + (straight + 2 square context) n = square first^2 + straight first
        square, straight = per_pair / PAIRS / 2, per_token / TOKENS + per_pair / PAIRS / 2
        linear, target = straight + 2 * square * context_tokens, (square * first_tokens + straight) * first_tokens
        return int(2 * target / (linear + sqrt(linear * linear + 4 * square * target)))

    def _fit_by_tokens(self) -> tuple[float, float] | None:
        """Return b and c, to compare chunks by; None if undetermined.

        Chunks of one size do not separate the constant from the cost of tokens, and chunks of one duration separate
        nothing. Then the constant counts as part of the tokens: least squares without a constant.
        """
        one, _, _, nn, np_, pp, y, ny, py, passes = self.sums
        fit = self._fit()
        if fit is not None and fit[2] > 0.0 and fit[0] * one <= y / 2:
            return fit[1], fit[2]
        determinant = nn * pp - np_ * np_
        if passes < PASSES_MIN or determinant <= 1e-6 * nn * pp:
            return None
        b, c = (ny * pp - py * np_) / determinant, (py * nn - ny * np_) / determinant
        return (b, c) if b > 0.0 and c >= 0.0 else None

    def _fit(self) -> tuple[float, float, float] | None:
        """Return a, b and c of the fit; None if undetermined. c is 0 while pairs do not separate from tokens."""
        one, n, p, nn, np_, pp, y, ny, py, passes = self.sums
        if passes < PASSES_MIN:
            return None
        # Centred, so that the constant drops out: two equations for b and c.
        vnn, vnp, vpp = nn - n * n / one, np_ - n * p / one, pp - p * p / one
        vny, vpy = ny - n * y / one, py - p * y / one
        if vnn <= 1e-9 * one:
            return None
        determinant = vnn * vpp - vnp * vnp
        if vpp > 1e-9 * one and determinant > 1e-6 * vnn * vpp:
            b, c = (vny * vpp - vpy * vnp) / determinant, (vpy * vnn - vny * vnp) / determinant
            if b > 0.0 and c >= 0.0:
                return (y - b * n - c * p) / one, b, c
        b = vny / vnn
        return ((y - b * n) / one, b, 0.0) if b > 0.0 else None


def new_tokens_of(plan: BatchPlan) -> Int32s:
    """Return the positions that each row computes, int32 [rows]; of a row with drafts, fewer than its span has."""
    new_tokens: Int32s = plan.stops - plan.starts
    if plan.speculation is not None:
        new_tokens[plan.extend_rows :] = plan.speculation.draft_lengths + 1
    return new_tokens


def pairs_of(plan: BatchPlan) -> int:
    """Return the (query, key) pairs that attention computes in a pass."""
    stops = plan.stops.astype("int64")
    starts = stops - new_tokens_of(plan)
    return int((stops * (stops + 1) - starts * (starts + 1)).sum()) // 2
