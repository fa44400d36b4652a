"""The simulator's model of speculative decoding: the number of right drafts, and the time of drafting.

    acceptance = Acceptance.of("mtp", rates=None, spread=0.0, seed=7)
    right = acceptance.right(...)                            # a pure function of (seed, request, position)
    drafter = head_of(cost, layers)
    drafter.draft_us(shape, drafts)                          # added to the time of the verification

**Right drafts.** If all drafts before it were right, draft j after a token is right with the chance `rates[j]`; the
last rate holds for all later drafts. Each request shifts the log-odds of its chances by a normal draw times `spread`. A
uniform number, a hash of seed, request and position, decides. So a run does not depend on the order of its batches.

**Trees.** Behind each token of a tree the alternative of rank r is right with the chance `alternatives[j][r - 1]`; at
most one is right. One uniform number for each request and position decides which. A request with better first drafts
has proportionally fewer tokens left for the alternatives.

**Drafting.** An n-gram drafter searches the text of a row. Other drafters run passes one after another: the first over
all tokens since its last pass (prompts included), each further pass over one token per row. A draft model is a model of
its own. A head (EAGLE, MTP) counts as one average layer of the verifying model, with that model's embedding and logits.
In a pipeline the last stage drafts, because it has the tokens and the hidden states: it runs the whole draft model, or
a head that counts as one of the stage's own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.commands import BatchPlan, Int32s, Speculation, depths_of
from lockstep.core.contract.config import SchedConfig, SpeculativeMethod
from lockstep.core.contract.errors import ConfigError
from lockstep.core.features.data_parallel import draft_passes_of
from lockstep.core.features.draft_trees import ranks_of
from lockstep.sim.cost import UNCALIBRATED, BatchShape, CostModel
from lockstep.sim.cost.stages import PipelineModel

DEFAULT_RATES: dict[str, tuple[float, ...]] = {
    "mtp": (0.85, 0.75, 0.65),
    "eagle": (0.75,),
    "draft_model": (0.7,),
    "ngram": (0.3, 0.7),
}
"""Chances of draft 1, 2, ... each given the ones before it."""

RATES_SOURCES = {
    "mtp": "DeepSeek-V3 report (arXiv 2412.19437), 5.4.3: 85 to 90 % of second tokens; those behind: estimates",
    "eagle": "estimate after EAGLE (arXiv 2401.15077), which reports 0.7 to 0.8 at each place of a chain",
    "draft_model": "estimate after Leviathan et al. (arXiv 2211.17192), who report 0.5 to 0.9",
    "ngram": "estimate: a match is rare and goes on once there is one; text that repeats its prompt does far better",
}

ALTERNATIVE, FURTHER = 0.4, 0.6
"""Chance of the second alternative, of the tokens that the first one misses; of each further one relative to it.
Estimates: no public measurement by rank was found. Trees of EAGLE-2 (arXiv 2406.16858) have 60 drafts in all."""

NGRAM_FIXED_US, NGRAM_ROW_US = 20.0, 0.2  # estimates: one kernel that compares the newest tokens with each row's text
DRAFT_PASS_US = 10.0  # estimate: replaying one graph, as FORWARD_FIXED_US of the roofline

UInt64s = NDArray[np.uint64]
Float64s = NDArray[np.float64]


def parse_rates(text: str) -> tuple[tuple[float, ...], ...]:
    """Parse chances of draft 1, 2, ..., such as `0.85,0.75`; with alternatives of a tree, `0.7/0.15/0.05,0.6/0.2`.

    Raises: ConfigError.
    """
    try:
        rates = tuple(tuple(float(part) for part in depth.split("/")) for depth in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 <= rate <= 1.0 for depth in rates for rate in depth):
        raise ConfigError(
            f"`acceptance` must be chances from 0 to 1 with commas between them, got `{text}`\n"
            "hint: 0.85,0.7 is the chance of the first draft, and of every later one if those before it were right"
        )
    if any(sum(depth) > 1.0 + 1e-9 for depth in rates):
        raise ConfigError(
            f"`acceptance` has alternatives with chances above 1 together, got `{text}`\n"
            "hint: 0.7/0.15 are the chances of the first and of the second alternative, of which one is right at most"
        )
    return rates


# mechanism: fewer-drafts (simulated)
@dataclass(frozen=True)
class Acceptance:
    """The distribution of right drafts."""

    rates: tuple[float, ...]  # chance of draft 1, 2, ..., each given that all before it were right
    spread: float  # standard deviation of the log-odds over requests
    seed: int
    source: str
    # by depth: chances of the second, third, ... alternative; further ones, and those of further depths, are estimates
    alternatives: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, method: SpeculativeMethod, rates: str | None, spread: float, seed: int) -> Acceptance:
        """Build the distribution of a method; `rates` None: DEFAULT_RATES.

        Raises: ConfigError for rates that cannot be parsed, or a spread out of range.
        """
        if not 0.0 <= spread <= 10.0:
            raise ConfigError(f"`acceptance_spread` must be from 0 (all requests alike) to 10, got `{spread}`")
        if rates is None:
            return cls(DEFAULT_RATES[method], spread, seed, RATES_SOURCES[method])
        given = parse_rates(rates)
        alternatives = tuple(depth[1:] for depth in given) if any(len(depth) > 1 for depth in given) else ()
        return cls(tuple(depth[0] for depth in given), spread, seed, "given", alternatives)

    def chances(self, request: int, drafts: int) -> Float64s:
        """Return for j = 1, 2, ... the chance that the first j drafts of a request are right: float64 [drafts]."""
        return np.cumprod(self._rates_of(request, drafts), dtype=np.float64)

    def _rates_of(self, request: int, drafts: int) -> Float64s:
        """Return the chance of draft 1, 2, ... of a request, each given that those before it are right."""
        rates = np.array([self.rates[min(j, len(self.rates) - 1)] for j in range(drafts)])
        if self.spread:
            shift = self.spread * _normal(mixed(np.array([request], np.uint64), self.seed))
            with np.errstate(divide="ignore"):
                odds = rates / (1.0 - rates) * np.exp(shift)
            rates = np.where(rates < 1.0, odds / (1.0 + np.where(np.isinf(odds), 0.0, odds)), 1.0)
        return rates.astype(np.float64, copy=False)

    def tree_chances(self, request: int, depths: int, ranks: int) -> Float64s:
        """Return for each depth the chance that one of the first 1, 2, ... alternatives is right.

        Returns: float64 [depths, ranks], each given that the draft before is right.
        """
        rates, chances = self._rates_of(request, depths), np.empty((depths, ranks))
        for depth in range(depths):
            place = min(depth, len(self.rates) - 1)
            usual, rate = self.rates[place], float(rates[depth])
            others = list(self.alternatives[place][: ranks - 1]) if self.alternatives else []
            while len(others) < ranks - 1:
                others.append(others[-1] * FURTHER if others else (1.0 - usual) * ALTERNATIVE)
            scale = (1.0 - rate) / (1.0 - usual) if usual < 1.0 else 0.0
            chances[depth] = np.minimum(np.cumsum([rate, *(scale * one for one in others)]), 1.0)
        return chances

    def right(self, requests: UInt64s, positions: Int32s, chances: Float64s, drafts: Int32s) -> Int32s:
        """Return how many drafts of each row after `positions` are right, int32 [rows].

        Args:
            chances: float64 [rows, drafts of the longest row], results of `chances`.
            drafts: int32 [rows], number of drafts.
        """
        keys = requests * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        uniform = uniform_of(mixed(keys, self.seed + 1))
        right: Int32s = (uniform[:, None] < chances).sum(axis=1).astype(np.int32)
        return np.minimum(right, drafts)

    def describe(self) -> dict[str, Any]:
        """Return rates, spread and source, for metrics.json."""
        others = {"alternatives": [list(depth) for depth in self.alternatives]} if self.alternatives else {}
        return {"rates": list(self.rates), **others, "spread": self.spread, "source": self.source}


class DraftCost(Protocol):
    """The time of drafting."""

    def draft_us(self, shape: BatchShape, drafts: int, widths: Sequence[int] = ()) -> float:
        """Return the time that drafting adds to a batch of this shape, in which a row verifies at most `drafts`.

        Args:
            drafts: of a tree, those of its longest path.
            widths: of a tree, the tokens of a row that the second, third, ... pass computes; empty: one each.
        """
        ...

    def slowed(self, factor: float) -> DraftCost:
        """Return a copy with every time multiplied by `factor`."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return kind and constants, for metrics.json."""
        ...


@dataclass(frozen=True)
class NgramDraftCost:
    """The time of a drafter that searches the text of each row for its newest tokens."""

    factor: float = 1.0

    def draft_us(self, shape: BatchShape, drafts: int, widths: Sequence[int] = ()) -> float:
        """Return the time of one search per decode row; 0 without drafts."""
        return self.factor * (NGRAM_FIXED_US + NGRAM_ROW_US * shape.decode_rows) if drafts else 0.0

    def slowed(self, factor: float) -> NgramDraftCost:
        """Return a copy with every time multiplied by `factor`."""
        return NgramDraftCost(self.factor * factor)

    def describe(self) -> dict[str, Any]:
        """Return kind and constants, for metrics.json."""
        return {"kind": "ngram", "fixed_us": NGRAM_FIXED_US, "row_us": NGRAM_ROW_US, "source": "estimate"}


@dataclass(frozen=True)
class ModelDraftCost:
    """The time of a drafter that runs passes: of a whole model, or of a head that counts as one of `layers` layers."""

    cost: CostModel
    layers: int = 1  # 1: the whole model drafts; n: a head costs 1 / n of the model's layers
    name: str = ""

    def draft_us(self, shape: BatchShape, drafts: int, widths: Sequence[int] = ()) -> float:
        """Return the time of one pass over all new tokens and, per further draft, one pass over a token per row.

        In a tree, a further pass computes all drafts of a depth that others follow.
        """
        rows = shape.decode_rows
        if not drafts:
            return self._pass_us(replace(shape, draft_tokens=0, sampled_rows=0)) if shape.extend_tokens else 0.0
        us = self._pass_us(replace(shape, sampled_rows=rows))
        for further in range(1, drafts):
            width = widths[further - 1] if further <= len(widths) else 1
            on = _tokens_on(shape, further)
            if width > 1:
                on = replace(on, draft_tokens=(width - 1) * rows)
            us += self._pass_us(replace(on, sampled_rows=width * rows))
        return us

    def _pass_us(self, shape: BatchShape) -> float:
        if shape.adapter_tokens:  # adapters belong to the verifying model
            shape = replace(shape, adapter_tokens=0, adapters=0)
        layers_us = self.cost.batch_us(replace(shape, sampled_rows=0)).mean_us
        logits_us = self.cost.batch_us(shape).mean_us - layers_us if shape.sampled_rows else 0.0
        return layers_us / self.layers + logits_us + (DRAFT_PASS_US if self.layers > 1 else 0.0)

    def slowed(self, factor: float) -> ModelDraftCost:
        """Return a copy with every time multiplied by `factor`."""
        return ModelDraftCost(UNCALIBRATED.cost_model(self.cost, factor), self.layers, self.name)

    def describe(self) -> dict[str, Any]:
        """Return kind and constants, for metrics.json."""
        if self.layers == 1:
            return {"kind": "model", "model": self.name}
        return {"kind": "head", "layers": 1, "of_layers": self.layers, "pass_us": DRAFT_PASS_US, "source": "estimate"}


def head_of(cost: CostModel, layers: int) -> ModelDraftCost:
    """Return the cost of a head on a model with `layers` layers and the cost model `cost`.

    The head of a pipeline is on its last stage, and costs as much as one average layer of that stage.
    """
    if isinstance(cost, PipelineModel):
        last = cost.stages[-1]
        return ModelDraftCost(last, last.model.layers)
    return ModelDraftCost(cost, layers)


def _tokens_on(shape: BatchShape, further: int) -> BatchShape:
    """Return the shape of one token per decode row, `further` positions after the rows' newest tokens."""
    rows = shape.decode_rows
    return BatchShape(
        decode_rows=rows,
        decode_context_tokens=shape.decode_context_tokens + further * rows,
        own=None if shape.own is None else _tokens_on(shape.own, further),
    )


@dataclass(frozen=True)
class Drafting:
    """The acceptance of a run's drafts, and their cost."""

    acceptance: Acceptance
    drafter: DraftCost

    def for_engine(self, config: SchedConfig) -> SpeculationModel:
        """Return a new model of drafts for the device of one engine."""
        ranks = config.speculative_topk if config.speculative_topk is not UNSET else 0
        return SpeculationModel(self.acceptance, self.drafter, config.path_max, config.rows_max, ranks)

    def slowed(self, factor: float) -> Drafting:
        """Return a copy with every time multiplied by `factor`."""
        return Drafting(self.acceptance, self.drafter.slowed(factor))

    def describe(self) -> dict[str, Any]:
        """Return acceptance and drafter, for metrics.json."""
        return {"acceptance": self.acceptance.describe(), "drafter": self.drafter.describe()}


# mechanism: drafts (simulated)
class SpeculationModel:
    """The state of the rows of one engine that verifies drafts, with acceptance and cost of drafts."""

    def __init__(self, acceptance: Acceptance, drafter: DraftCost, drafts: int, rows_max: int, ranks: int = 0) -> None:
        """Build the state of rows with `drafts` drafts on a path at most; `ranks`: alternatives, in trees."""
        self.acceptance, self.drafter, self.drafts, self.ranks = acceptance, drafter, drafts, ranks
        # By row: number of its request, chances of right drafts, and position of its newest token.
        self._requests = np.zeros(rows_max, np.uint64)
        self._chances = np.zeros((rows_max, drafts) if not ranks else (rows_max, drafts, ranks))
        self.stands = np.zeros(rows_max, np.int32)

    def draft_us(self, plan: BatchPlan, shape: BatchShape) -> float:
        """Return the time of drafting for a plan of this shape, which is that of its row with the most drafts."""
        return self.drafter.draft_us(shape, draft_passes_of(plan), widths_of(plan.speculation))

    def take_row(self, row: int, request: int) -> None:
        """Assign a row to a request, given its number in the workload."""
        self._requests[row] = request
        if self.ranks:
            self._chances[row] = self.acceptance.tree_chances(request, self.drafts, self.ranks)
        else:
            self._chances[row] = self.acceptance.chances(request, self.drafts)

    def extended(self, rows: Int32s, stops: Int32s) -> None:
        """Record that rows have computed their prompts up to `stops`."""
        self.stands[rows] = stops

    def verify(self, rows: Int32s, drafts: Int32s, forced: Int32s) -> tuple[Int32s, Int32s]:
        """Verify drafts and advance the rows by their accepted tokens.

        Args:
            forced: int32 [rows], number of drafts forced by a grammar, which are always right; empty: none.
        Returns: the position of each row before, and the tokens that it got; int32 [rows] each.
        """
        starts: Int32s = self.stands[rows]
        accepted = self.acceptance.right(self._requests[rows], starts, self._chances[rows], drafts) + np.int32(1)
        if forced.size:
            accepted = np.where(forced > 0, forced + np.int32(1), accepted)
        self.stands[rows] = starts + accepted
        return starts, accepted

    def verify_tree(self, rows: Int32s, speculation: Speculation) -> tuple[Int32s, Int32s, Int32s]:
        """Verify trees and advance the rows by their accepted tokens.

        Returns: the position of each row before, and the tokens that it got, int32 [rows] each; the numbers of the
            right drafts of all rows, end to end.
        """
        starts: Int32s = self.stands[rows]
        keys, chances = self._requests[rows] * np.uint64(0x9E3779B97F4A7C15), self._chances[rows]
        behind = np.zeros((1 + speculation.parents.size, self.ranks), np.int32)  # by draft and rank: the draft behind
        behind[speculation.parents, ranks_of(speculation.parents)] = np.arange(1, 1 + speculation.parents.size)
        paths = np.zeros((len(rows), self.drafts), np.int32)
        at, going = np.zeros(len(rows), np.int32), np.ones(len(rows), np.bool_)
        for depth in range(self.drafts):
            positions = (starts + np.int32(depth)).astype(np.uint64)
            uniform = uniform_of(mixed(keys + positions, self.acceptance.seed + 2))
            rank = (uniform[:, None] >= chances[:, depth]).sum(axis=1)
            number = np.where(rank < self.ranks, behind[at, np.minimum(rank, self.ranks - 1)], 0)
            going &= (number > 0) & (number <= speculation.draft_lengths)
            at = np.where(going, number, at)
            paths[:, depth] = np.where(going, number, 0)
        counts = (paths > 0).sum(axis=1).astype(np.int32)
        self.stands[rows] = starts + counts + np.int32(1)
        right: Int32s = paths[paths > 0]
        return starts, counts + np.int32(1), right


def widths_of(speculation: Speculation | None) -> tuple[int, ...]:
    """Return for depth 1, 2, ... of a tree how many of its drafts others follow; empty: chains, or no drafts."""
    if speculation is None or not speculation.parents.size:
        return ()
    depths = depths_of(speculation.parents)
    inner = np.unique(speculation.parents[speculation.parents > 0])
    return tuple(np.bincount(depths[inner], minlength=2)[1:].tolist()) if inner.size else ()


def expected_tokens(rates: Sequence[float], drafts: int) -> float:
    """Return the expected tokens of a row per verification of `drafts` drafts, for a spread of 0."""
    chances = np.cumprod([rates[min(j, len(rates) - 1)] for j in range(drafts)])
    return 1.0 + float(chances.sum())


# ------------------------------------------------------------------------------------------------------------- hashes


def mixed(values: UInt64s, seed: int) -> UInt64s:
    """Return the SplitMix64 hash (Steele, Lea and Flood, 2014) of each value; each seed has an independent stream."""
    with np.errstate(over="ignore"):
        x = values + np.uint64((seed * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform_of(bits: UInt64s) -> Float64s:
    """Convert 64 random bits to numbers in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(bits: UInt64s) -> float:
    """Return a standard normal number computed from the first entry of `bits`."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(float(uniform_of(bits)[0]) * (1.0 - 2.0**-52) + 2.0**-54)
