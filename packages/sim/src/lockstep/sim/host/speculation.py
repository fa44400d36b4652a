"""Speculative decoding as the simulator sees it: how many drafts are right, and what drafting costs.

    acceptance = Acceptance.of("mtp", rates=None, spread=0.0, seed=7)
    right = acceptance.right(...)                            # a pure function of (seed, request, position)
    drafter = drafter_of("eagle", cost, layers)
    drafter.draft_us(shape, drafts)                          # beside the verification, which is a pass of the model

**Right drafts.** Draft j behind a token is right, if all before it were, with the chance `rates[j]` (the last one holds
for all behind it). Requests differ: each shifts the log-odds of its chances by a normal draw times `spread`. One
uniform number, a hash of seed, request and position, decides, so a run does not depend on the order of its batches.

**Drafting.** An n-gram drafter looks into the text. The others run passes one after another: the first over all that is
new since the last one (prompts included), the others over a token of each row. A draft model is a model; a head (EAGLE,
MTP) is taken as one average layer of the model it drafts for, with that model's embedding and logits. In a pipeline the
last stage drafts, which has the tokens and the hidden states: all of the draft model, or one of its own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.commands import BatchPlan, Int32s
from lockstep.core.contract.config import SchedConfig, SpeculativeMethod
from lockstep.core.contract.errors import ConfigError
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

NGRAM_FIXED_US, NGRAM_ROW_US = 20.0, 0.2  # estimates: one kernel that compares the newest tokens with each row's text
DRAFT_PASS_US = 10.0  # estimate: replaying one graph, as FORWARD_FIXED_US of the roofline

UInt64s = NDArray[np.uint64]
Float64s = NDArray[np.float64]


def parse_rates(text: str) -> tuple[float, ...]:
    """Read `0.85,0.75`: chances of draft 1, 2, ... Raises ConfigError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(
            f"`acceptance` must be chances from 0 to 1 with commas between them, got `{text}`\n"
            "hint: 0.85,0.7 is the chance of the first draft, and of every later one if those before it were right"
        )
    return rates


@dataclass(frozen=True)
class Acceptance:
    """How many drafts are right."""

    rates: tuple[float, ...]
    spread: float  # of a request's log-odds, one standard deviation
    seed: int
    source: str

    @classmethod
    def of(cls, method: SpeculativeMethod, rates: str | None, spread: float, seed: int) -> Acceptance:
        """Raises ConfigError for rates or a spread that cannot be."""
        if not 0.0 <= spread <= 10.0:
            raise ConfigError(f"`acceptance_spread` must be from 0 (all requests alike) to 10, got `{spread}`")
        if rates is None:
            return cls(DEFAULT_RATES[method], spread, seed, RATES_SOURCES[method])
        return cls(parse_rates(rates), spread, seed, "given")

    def chances(self, request: int, drafts: int) -> Float64s:
        """That so many drafts of a request are right, and all before them: float64 [drafts], falling."""
        rates = np.array([self.rates[min(j, len(self.rates) - 1)] for j in range(drafts)])
        if self.spread:
            shift = self.spread * _normal(mixed(np.array([request], np.uint64), self.seed))
            with np.errstate(divide="ignore"):
                odds = rates / (1.0 - rates) * np.exp(shift)
            rates = np.where(rates < 1.0, odds / (1.0 + np.where(np.isinf(odds), 0.0, odds)), 1.0)
        return np.cumprod(rates)

    def right(self, requests: UInt64s, positions: Int32s, chances: Float64s, drafts: Int32s) -> Int32s:
        """How many of each row's drafts behind `positions` are right.

        Args:
            chances: float64 [rows, most drafts], as `chances` has them.
            drafts: int32 [rows], how many there are.
        """
        keys = requests * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        uniform = uniform_of(mixed(keys, self.seed + 1))
        right: Int32s = (uniform[:, None] < chances).sum(axis=1).astype(np.int32)
        return np.minimum(right, drafts)

    def describe(self) -> dict[str, Any]:
        """For metrics.json."""
        return {"rates": list(self.rates), "spread": self.spread, "source": self.source}


class DraftCost(Protocol):
    """What drafting costs."""

    def draft_us(self, shape: BatchShape, drafts: int) -> float:
        """The time beside a batch of this shape, of which a row verifies at most so many drafts."""
        ...

    def slowed(self, factor: float) -> DraftCost:
        """The same with every time multiplied."""
        ...

    def describe(self) -> dict[str, Any]:
        """For metrics.json."""
        ...


@dataclass(frozen=True)
class NgramDraftCost:
    """Looks for the newest tokens in the text before them."""

    factor: float = 1.0

    def draft_us(self, shape: BatchShape, drafts: int) -> float:
        """A look-up for each row."""
        return self.factor * (NGRAM_FIXED_US + NGRAM_ROW_US * shape.decode_rows) if drafts else 0.0

    def slowed(self, factor: float) -> NgramDraftCost:
        """The same with every time multiplied."""
        return NgramDraftCost(self.factor * factor)

    def describe(self) -> dict[str, Any]:
        """For metrics.json."""
        return {"kind": "ngram", "fixed_us": NGRAM_FIXED_US, "row_us": NGRAM_ROW_US, "source": "estimate"}


@dataclass(frozen=True)
class ModelDraftCost:
    """Runs passes of a model, or of `1 / layers` of one."""

    cost: CostModel
    layers: int = 1  # of which one drafts; 1: the whole model
    name: str = ""

    def draft_us(self, shape: BatchShape, drafts: int) -> float:
        """One pass over what is new, then one per further draft over a token of each row."""
        rows = shape.decode_rows
        if not drafts:
            return self._pass_us(replace(shape, draft_tokens=0, sampled_rows=0)) if shape.extend_tokens else 0.0
        us = self._pass_us(replace(shape, sampled_rows=rows))
        for further in range(1, drafts):
            us += self._pass_us(replace(_tokens_on(shape, further), sampled_rows=rows))
        return us

    def _pass_us(self, shape: BatchShape) -> float:
        if shape.adapter_tokens:  # adapters are of the model that verifies
            shape = replace(shape, adapter_tokens=0, adapters=0)
        layers_us = self.cost.batch_us(replace(shape, sampled_rows=0)).mean_us
        logits_us = self.cost.batch_us(shape).mean_us - layers_us if shape.sampled_rows else 0.0
        return layers_us / self.layers + logits_us + (DRAFT_PASS_US if self.layers > 1 else 0.0)

    def slowed(self, factor: float) -> ModelDraftCost:
        """The same with every time multiplied."""
        return ModelDraftCost(UNCALIBRATED.cost_model(self.cost, factor), self.layers, self.name)

    def describe(self) -> dict[str, Any]:
        """For metrics.json."""
        if self.layers == 1:
            return {"kind": "model", "model": self.name}
        return {"kind": "head", "layers": 1, "of_layers": self.layers, "pass_us": DRAFT_PASS_US, "source": "estimate"}


def head_of(cost: CostModel, layers: int) -> ModelDraftCost:
    """A head of a model of so many layers, which costs `cost`; of one with stages it is on the last of them."""
    if isinstance(cost, PipelineModel):
        last = cost.stages[-1]
        return ModelDraftCost(last, last.model.layers)
    return ModelDraftCost(cost, layers)


def _tokens_on(shape: BatchShape, further: int) -> BatchShape:
    """A token of each row that decodes, so many positions further."""
    rows = shape.decode_rows
    return BatchShape(
        decode_rows=rows,
        decode_context_tokens=shape.decode_context_tokens + further * rows,
        own=None if shape.own is None else _tokens_on(shape.own, further),
    )


@dataclass(frozen=True)
class Drafting:
    """How a run's drafts turn out, and what they cost."""

    acceptance: Acceptance
    drafter: DraftCost

    def for_engine(self, config: SchedConfig) -> SpeculationModel:
        """What the device of one engine needs."""
        return SpeculationModel(self.acceptance, self.drafter, config.drafts_max, config.rows_max)

    def slowed(self, factor: float) -> Drafting:
        """The same with every time multiplied."""
        return Drafting(self.acceptance, self.drafter.slowed(factor))

    def describe(self) -> dict[str, Any]:
        """For metrics.json."""
        return {"acceptance": self.acceptance.describe(), "drafter": self.drafter.describe()}


class SpeculationModel:
    """What a device needs to verify drafts: how many are right, and what they cost. One for each engine."""

    def __init__(self, acceptance: Acceptance, drafter: DraftCost, drafts: int, rows_max: int) -> None:
        self.acceptance, self.drafter, self.drafts = acceptance, drafter, drafts
        # By row: its holder, its chances, and the position of its newest token.
        self._requests = np.zeros(rows_max, np.uint64)
        self._chances = np.zeros((rows_max, drafts))
        self.stands = np.zeros(rows_max, np.int32)

    def draft_us(self, plan: BatchPlan, shape: BatchShape) -> float:
        """What drafting takes for a plan of this shape: as long as for the row with the most drafts."""
        longest = int(plan.speculation.drafted().max()) if plan.speculation is not None else 0
        return self.drafter.draft_us(shape, longest)

    def take_row(self, row: int, request: int) -> None:
        """A row now belongs to this request, by its number in the workload."""
        self._requests[row] = request
        self._chances[row] = self.acceptance.chances(request, self.drafts)

    def extended(self, rows: Int32s, stops: Int32s) -> None:
        """These rows have computed their prompts, or parts of them, up to `stops`."""
        self.stands[rows] = stops

    def verify(self, rows: Int32s, drafts: Int32s, forced: Int32s) -> tuple[Int32s, Int32s]:
        """Verify drafts, and move on: where each row stood, and how many tokens it got. int32 [rows] both.

        `forced`: of the drafts, those that are right for certain; empty where none is.
        """
        starts: Int32s = self.stands[rows]
        accepted = self.acceptance.right(self._requests[rows], starts, self._chances[rows], drafts) + np.int32(1)
        if forced.size:
            accepted = np.where(forced > 0, forced + np.int32(1), accepted)
        self.stands[rows] = starts + accepted
        return starts, accepted


def expected_tokens(rates: Sequence[float], drafts: int) -> float:
    """Tokens that a row gets from one verification of so many drafts, on average over equal requests."""
    chances = np.cumprod([rates[min(j, len(rates) - 1)] for j in range(drafts)])
    return 1.0 + float(chances.sum())


# ------------------------------------------------------------------------------------------------------------- hashes


def mixed(values: UInt64s, seed: int) -> UInt64s:
    """SplitMix64 (Steele, Lea and Flood, 2014) of each value, in a stream of its own for each seed."""
    with np.errstate(over="ignore"):
        x = values + np.uint64((seed * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform_of(bits: UInt64s) -> Float64s:
    """Numbers in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(bits: UInt64s) -> float:
    """A standard normal number, of the first entry."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(float(uniform_of(bits)[0]) * (1.0 - 2.0**-52) + 2.0**-54)
