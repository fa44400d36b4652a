"""Engines: what an engine adds to the kernels of the roofline, fitted to public serving points, with its errors.

engine = load_engine("vllm")                                       # lockstep.sim.catalogue
calibration = engine.calibration(model, "H200-SXM", "bf16")        # for one model, GPU and precision of weights
cost = calibration.cost_model(roofline_model(model, gpu))          # an EngineModel: a list of cost terms
calibration.interval("ttft")                            # the spread of predictions that were left out of a fit

An engine has few costs (`EngineCosts`). Factors scale the terms of the roofline; the others are terms of their own,
`engine_*` in a breakdown. Costs that differ between releases, GPUs, models or precisions of weights are conditions
(`CostsWhen`), whose factors multiply. Residuals are the ratios of measured to predicted times of points that were left
out of the fit, by what the fit lacked (`Unseen`). docs/cost-models.md, section 15, describes both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import msgspec

from lockstep.sim.cost.calibration import (
    UNCALIBRATED,
    Calibration,
    CalibrationSource,
    Case,
    Correction,
    Gap,
    Metric,
    Residuals,
)
from lockstep.sim.cost.errors import CalibrationError
from lockstep.sim.cost.hardware import Constant
from lockstep.sim.cost.model import BatchShape, CostModel
from lockstep.sim.cost.models import ModelSpec
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import BaseModel
from lockstep.sim.cost.terms import Constants, CostTerm, TermSum, TermUs, never

FORMAT = "lockstep-engine"
VERSION = 5
NONE = "none"  # the name under which `--engine` has no engine: the lower bound
DEFAULT = "vllm"  # the engine where none is named
ROW_BYTES = 7.5
"""Bytes moved for one row of an expert and one column of the hidden state: gathering, quantising, adding up.

Public operator tables (SGLang 0.5.10 and 0.5.14; grouped products of 4,096 to 16,384 tokens) are sums of a compute time
and of 2.5 us (bf16), 2.8 (fp8), 3.1 (mxfp4) and 3.9 (4-bit integers) per million of these on H100, 1.8 to 3.6 on H200,
3.5 to 4.9 on A100 and 7.8 to 14 on L40S: 5 to 11 bytes at the rate of weights, for any precision.
"""
PROMPTS_BEYOND = 2.0  # times the longest measured prompts, from which mean prompts are beyond what was measured
LARGE_GPU_BYTES = 70 * 2**30  # from this memory on, vLLM and TensorRT-LLM take more new tokens in a pass
Unseen = Literal["points", "cell", "model", "gpu", "engine"]
"""What a fit lacked when it predicted the points of some residuals.

points   other points of the model in the same precision on the GPU were in the fit, but none with its degree of
         parallelism
cell     points of the model and points of the GPU, but none of both together in this precision, by this engine
model    no point of the model, or none of the precision
gpu      no point of the GPU
engine   no point of the engine: the costs are those of other engines
"""


class EngineCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The costs of an engine. No cost is negative, so that more work never takes less time.

    Factors are of the roofline's time: 1 is no change. Rows of experts are gathered before grouped products and added
    up after them, which takes as long for narrow experts as for wide ones: `experts_prefill` is a factor of that time.
    """

    dense: float = 1.0  # factor of dense products, norms, sampling and linear attention
    attention: float = 1.0  # factor of attention
    experts: float = 1.0  # factor of grouped products
    experts_prefill: float = 0.0  # added per new token of a prompt: factor of the time to move its rows of experts
    collectives: float = 1.0  # factor of collectives
    collective_us: float = 0.0  # per collective: the wait for the slowest rank
    step_us: float = 0.0  # per pass: scheduling, sampling, output, while the GPU is idle
    row_layer_us: float = 0.0  # per request of a pass and layer: writing KV, starting attention, sampling
    prefill_us: float = 0.0  # per pass with a prompt: it is not replayed from one graph
    moe_layer_us: float = 0.0  # per layer with experts in a pass: routing, sorting, small grouped products
    frontend_layer_us: float = 0.0  # per request and layer, outside of its passes; TTFT only

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            least = 0.01 if field in ("dense", "attention", "experts") else 0.0
            if not least <= value < math.inf:
                raise CalibrationError(f"`costs.{field}` must be at least {least:g} and finite, got `{value}`")


class CostsWhen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Factors of costs under a condition; factors of several conditions multiply. An empty condition always holds."""

    releases: tuple[str, str] = ("", "")  # from this release on, before that release; empty: unbounded
    precisions: tuple[str, ...] = ()  # of weights
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    factors: dict[str, float]
    spreads: dict[str, float] = {}  # standard deviations of the logarithms of the factors
    why: str  # what the values were fitted to

    def __post_init__(self) -> None:
        for name, factor in self.factors.items():
            if name not in EngineCosts.__struct_fields__:
                known = ", ".join(EngineCosts.__struct_fields__)
                raise CalibrationError(f"`when.factors` has `{name}`, which is not a cost of an engine: {known}")
            if not 0.0 < factor < math.inf:
                raise CalibrationError(f"`when.factors.{name}` must be above 0 and finite, got `{factor}`")

    def holds(self, release: str, precision: str, model: str, gpu: str) -> bool:
        """Whether the condition holds. `release` is a version such as `0.18.0`."""
        since, before = self.releases
        number = release_key(release)
        inside = (not since or number >= release_key(since)) and (not before or number < release_key(before))
        named = ((self.precisions, precision), (self.models, model), (self.gpus, gpu))
        return inside and all(not values or value in values for values, value in named)


class EngineResiduals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The errors of predictions that were left out of a fit: quantiles of measured / predicted."""

    metric: Metric
    unseen: Unseen
    method: str
    count: int
    probabilities: tuple[float, ...]
    ratios: tuple[float, ...]

    def beside(self, other: EngineResiduals) -> EngineResiduals:
        """Return the errors of both causes together: their distances from the median, in quadrature."""
        centre = len(self.ratios) // 2

        def distances(one: EngineResiduals) -> list[float]:
            return [math.log(ratio / one.ratios[centre]) for ratio in one.ratios]

        both = zip(distances(self), distances(other), strict=True)
        logs = [math.copysign(math.hypot(a, b), a) for a, b in both]
        ratios = tuple(round(self.ratios[centre] * math.exp(log), 5) for log in logs)
        return msgspec.structs.replace(self, method=f"{self.method}; {other.method}", ratios=ratios)

    def residuals(self) -> Residuals:
        """Return the residuals as those of a calibration, of the population `seen`."""
        return Residuals(
            metric=self.metric,
            population="seen",
            method=self.method,
            count=self.count,
            probabilities=self.probabilities,
            ratios=self.ratios,
        )


class GpuCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of an engine on one GPU, in a sentence each."""

    gpu: str
    fitted_on: str
    errors: str
    not_for: str


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine of the catalogue: costs, errors and their card."""

    format: str = FORMAT
    version: int = VERSION
    engine: str
    title: str
    profile: str  # scheduler settings that the engine implies: docs/profiles.md
    settings: dict[str, Any] = {}  # scheduler settings beyond the profile
    large_gpu_settings: dict[str, Any] = {}  # further settings on GPUs with at least LARGE_GPU_BYTES
    release: str  # the release that is meant where none is named
    date: str  # of the fit, given by its author
    cpu: Literal["separate", "included"] = "included"  # included: `costs` have the engine's CPU time
    costs: EngineCosts = EngineCosts()
    spreads: dict[str, float] = {}  # standard deviations of the logarithms of `costs`, by the fit
    when: tuple[CostsWhen, ...] = ()
    fitted: tuple[tuple[str, str, str], ...] = ()  # model, GPU and precision of weights in the fit's data, together
    releases: tuple[str, ...] = ()  # stated in the fit's data
    prompt_tokens: tuple[int, int] = (0, 0)  # of the shortest and the longest prompts in the fit's data
    residuals: tuple[EngineResiduals, ...]
    card: dict[str, str]  # fitted_on, errors, not_for: one sentence each
    gpus: tuple[GpuCard, ...] = ()  # the same for single GPUs
    sources: tuple[CalibrationSource, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT or self.version != VERSION:
            raise CalibrationError(f"`format` and `version` must be {FORMAT} and {VERSION}")
        found = [(r.metric, r.unseen) for r in self.residuals]
        if len(set(found)) != len(found) or not {("time", "engine"), ("ttft", "engine")} <= set(found):
            raise CalibrationError("`residuals` must have each metric and population once, and those of `engine`")

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> EngineSpec:
        """Parse the bytes of an engine's file. Raises CalibrationError, which names `path`."""
        try:
            return msgspec.json.decode(data, type=cls, strict=True)
        except (CalibrationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CalibrationError(f"{path}: not an engine of the catalogue: {error}") from error

    def to_json(self) -> str:
        """Return the text of the file: equal engines give equal bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def costs_of(self, precision: str, release: str = "", *, model: str = "", gpu: str = "") -> EngineCosts:
        """Return the costs for a precision of weights, a model, a GPU and a release; an empty one is `self.release`."""
        costs = msgspec.structs.asdict(self.costs)
        for when in self.when:
            if when.holds(release or self.release, precision, model, gpu):
                for name, factor in when.factors.items():
                    costs[name] *= factor
        return EngineCosts(**{name: float(f"{cost:.4g}") for name, cost in costs.items()})

    def card_of(self, gpu: str) -> dict[str, str]:
        """Return the engine's card, with what is known of it on a GPU."""
        own = next((card for card in self.gpus if card.gpu == gpu), None)
        if own is None:
            return self.card
        texts = {"fitted_on": own.fitted_on, "errors": own.errors, "not_for": own.not_for}
        return {**self.card, **{f"{name} {gpu}": text for name, text in texts.items()}}

    def unseen(self, model: str, gpu: str, precision: str) -> Unseen:
        """Return what the fit lacked for a model on a GPU; `engine` if it has no data at all.

        A precision that no model had is like a model that the fit lacked: its costs are those of the other precisions.
        """
        if not self.fitted:
            return "engine"
        if (model, gpu, precision) in self.fitted:
            return "points"
        models, gpus, precisions = (set(column) for column in zip(*self.fitted, strict=True))
        if gpu not in gpus:
            return "gpu"
        return "cell" if model in models and precision in precisions else "model"

    def is_measured(self, release: str) -> bool:
        """Return whether a release, such as `0.12` or `0.12.0`, is one of the fit's data."""
        number = release_key(release)
        return any(release_key(one)[: len(number)] == number for one in self.releases if one[0].isdecimal())

    def calibration(self, model: ModelSpec, gpu: str, precision: str, release: str = "") -> EngineCalibration:
        """Return the calibration of one model, GPU and precision of weights.

        Its residuals are those of the population that the model and the GPU belong to (`unseen`), or of the next one,
        which lacked more, if this engine has none. For a model that the fit lacks on a GPU that it lacks too, the
        errors of both are added in quadrature.
        """
        unseen = self.unseen(model.name, gpu, precision)
        by_key = {(one.metric, one.unseen): one for one in self.residuals}
        order: tuple[Unseen, ...] = ("gpu", "engine") if unseen == "gpu" else ("points", "cell", "model", "engine")
        lacked = order[order.index(unseen) :]
        metrics: tuple[Metric, ...] = ("time", "ttft")
        found = [next(by_key[metric, one] for one in lacked if (metric, one) in by_key) for metric in metrics]
        if unseen == "gpu" and model.name not in {fitted for fitted, _, _ in self.fitted}:
            found = [
                one.beside(by_key[one.metric, "model"]) if (one.metric, "model") in by_key else one for one in found
            ]
        costs = self.costs_of(precision, release, model=model.name, gpu=gpu)
        return EngineCalibration(
            engine=self.engine,
            engine_version=release or self.release,
            gpu=gpu,
            models=(model.name,),
            date=self.date,
            cpu=self.cpu,
            correction=Correction(frontend_us=round(costs.frontend_layer_us * model.layers, 1)),
            costs=costs,
            unseen=unseen,
            weights_dtype=precision,
            has_model=model.name in {fitted for fitted, _, _ in self.fitted},
            has_release=not release or not self.fitted or self.is_measured(release),
            prompt_tokens=self.prompt_tokens,
            residuals=tuple(one.residuals() for one in found),
            sources=self.sources,
            notes=tuple(f"{name.replace('_', ' ')}: {text}" for name, text in self.card_of(gpu).items()),
        )


class EngineCalibration(Calibration, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A calibration that is the costs of an engine of the catalogue."""

    costs: EngineCosts
    unseen: Unseen
    weights_dtype: str
    has_model: bool  # the model is in the fit's data, in any precision and on any GPU
    has_release: bool  # the release that is named, if any, is in the fit's data
    prompt_tokens: tuple[int, int]  # of the shortest and the longest prompts in the fit's data

    @property
    def title(self) -> str:
        """Engine, release and date in one line."""
        return f"engine {self.engine} {self.engine_version}, fitted {self.date}"

    def covers(self, case: Case) -> bool:
        """Return whether models, GPUs or engines like those of a simulation were left out of a fit and counted.

        GPUs were left out, too, but they are few: an interval for another one is called a range.
        """
        return self.unseen != "gpu" and not self.gaps(case)

    def gaps(self, case: Case) -> list[Gap]:
        """Return the respects in which a simulation goes beyond what was left out of fits and counted."""
        clauses = []
        layout = [name for name in case.split.describe() if name not in ("ep", "expert_cv")]
        if layout:
            clauses.append(f"engine {self.engine} was measured without {', '.join(layout)}")
        if not self.has_release:
            clauses.append(f"release {self.engine_version} of {self.engine} was not measured")
        if self.prompt_tokens[1] and case.prompt_tokens > PROMPTS_BEYOND * self.prompt_tokens[1]:
            least, most = self.prompt_tokens
            clauses.append(
                f"engine {self.engine} was measured with prompts of {least:,} to {most:,} tokens, these have "
                f"{case.prompt_tokens:,.0f} on average"
            )
        return [Gap(clause, "intervals do not cover that", "") for clause in clauses]

    @property
    def line(self) -> str:
        """The title, as commands print it."""
        return self.title.replace("engine ", "engine: ", 1)

    def cost_model(self, base: CostModel, factor: float = 1.0) -> CostModel:
        """Return `base` with the engine's costs, and every time multiplied by `factor`."""
        if not 0.0 < factor < math.inf:
            raise CalibrationError(f"`factor` must be above 0 and finite, got `{factor}`")
        if self.costs == EngineCosts():
            with_engine: CostModel = base
        elif isinstance(base, PipelineModel):
            later = msgspec.structs.replace(self.costs, step_us=0.0)  # one scheduler for all stages
            with_engine = base.mapped(
                lambda stage, number: EngineModel(stage, later if number else self.costs, self.title)  # type: ignore[arg-type]
            )
        else:
            with_engine = EngineModel(base, self.costs, self.title)  # type: ignore[arg-type]
        return with_engine if factor == 1.0 else UNCALIBRATED.cost_model(with_engine, factor)

    def doubts(self, case: Case, overlap_depth: int, *, has_intervals: bool = True) -> list[str]:
        """Return the respects in which a simulation goes beyond the measurements, one sentence each."""
        lines = []
        model = f"{case.model} in {self.weights_dtype}" if self.has_model else case.model
        lacks = {
            "engine": ("never measured on a GPU", "engines"),
            "gpu": (f"not measured on {case.gpu}", "GPUs"),
            "model": (f"not measured with {model}", "models"),
            "cell": (f"not measured with {model} on {case.gpu}", "models on one GPU"),
        }
        if self.unseen in lacks:
            lack, of = lacks[self.unseen]
            interval = f"; intervals are those of {of} left out of the fit" if has_intervals else ""
            lines.append(f"engine {self.engine} was {lack}{interval}")
        lines += [gap.sentence(has_intervals) for gap in self.gaps(case)]
        if self.cpu == "included" and overlap_depth != 1 and case.split.pp == 1:
            lines.append(
                f"the costs of {self.engine} have CPU time in its batches: what overlap_depth {overlap_depth} does is "
                "not seen"
            )
        return lines


class EngineModel(TermSum):
    """The cost of a batch under an engine: the terms of the roofline or of measured tables, scaled, and its own."""

    def __init__(self, base: BaseModel, costs: EngineCosts, source: str) -> None:
        self.base, self.costs = base, costs
        self.model, self.gpu, self.split, self.tp, self.lora = base.model, base.gpu, base.split, base.tp, base.lora
        terms = [*(_scaled(term, costs) for term in base.terms), *self._added(source)]
        super().__init__(terms, base.shards, base.launching)
        self.collectives = base.collectives

    def _added(self, source: str) -> Iterator[CostTerm]:
        """Yield the terms of the engine itself; a cost of 0 has no term."""
        costs, base = self.costs, self.base

        def constant(name: str) -> dict[str, Constant]:
            return {f"engine_{name}": Constant(getattr(costs, name), source)}

        def fixed(us: float) -> TermUs:
            return lambda batch, own: us

        if costs.step_us:
            yield CostTerm("engine_step", "tokens", fixed(costs.step_us), constant("step_us"))
        if costs.row_layer_us:
            row_us = costs.row_layer_us * base.model.layers

            def rows_us(batch: BatchShape, own: BatchShape) -> float:
                return row_us * (own.extend_rows + own.decode_rows)

            yield CostTerm(
                "engine_rows", "rows", rows_us, constant("row_layer_us"), decode_bends=never, chunk_bends=never
            )
        if costs.prefill_us:
            yield CostTerm(
                "engine_prefill", "extend", fixed(costs.prefill_us), constant("prefill_us"), chunk_bends=never
            )
        if costs.moe_layer_us and base.model.moe_layers:
            us = costs.moe_layer_us * base.model.moe_layers
            yield CostTerm("engine_experts", "tokens", fixed(us), constant("moe_layer_us"))
        if costs.experts_prefill and base.model.moe_layers:
            token_us = costs.experts_prefill * expert_rows_us(base)

            def prefill_us(batch: BatchShape, own: BatchShape) -> float:
                return token_us * batch.extend_tokens

            yield CostTerm(
                "engine_experts_prefill", "extend", prefill_us, constant("experts_prefill"), chunk_bends=never
            )
        if costs.collective_us and base.collectives:
            us = costs.collective_us * base.collectives
            yield CostTerm("engine_waits", "tokens", fixed(us), constant("collective_us"))

    def describe(self) -> dict[str, Any]:
        """Return the description of the base, with the engine's costs and their constants."""
        described = self.base.describe()
        own = [term for term in self.terms if term.name.startswith("engine_")]
        constants = {name: {"value": c.value, "source": c.source} for term in own for name, c in term.constants.items()}
        return {
            **described,
            "kind": f"{described['kind']}, engine",
            "engine_costs": msgspec.to_builtins(self.costs),
            "constants": dict(sorted({**described["constants"], **constants}.items())),
        }


def _scaled(term: CostTerm, costs: EngineCosts) -> CostTerm:
    """Return a term of the base with the engine's factor."""
    if term.is_collective:
        factor = costs.collectives
    elif term.name == "experts":
        factor = costs.experts
    elif term.name in ("attention_decode", "attention_prefill"):
        factor = costs.attention
    elif term.scope == "adapters" or term.name == "expert_moves":
        factor = 1.0
    else:
        factor = costs.dense
    if factor == 1.0:
        return term
    us = term.us
    return replace(term, us=lambda batch, own: factor * us(batch, own))


def expert_rows_us(base: BaseModel) -> float:
    """Return the time in which a rank moves the rows that one token has in the experts of all layers (ROW_BYTES)."""
    model = base.model
    assert model.experts is not None
    rows = model.moe_layers * model.experts.per_token / base.split.ep
    return rows * model.hidden * ROW_BYTES / Constants(base.gpu).us_rate("weight_read_gbs", 1e3)


def release_key(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare releases: `0.18.0` is (0, 18, 0), `1.0.0rc3` is (1, 0, 0, 3)."""
    numbers, digits = [], ""
    for character in release + ".":
        if character.isdecimal():
            digits += character
        elif digits:
            numbers.append(int(digits))
            digits = ""
    return tuple(numbers)
