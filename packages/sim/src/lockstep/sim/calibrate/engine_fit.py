"""Fits of an engine's costs to serving points, and the errors of points that were left out of a fit.

trial = EngineTrial.of(points, folder)               # every point simulated once; schedules are kept in `folder`
fit = fit_engine(trial, trial.rows("vllm"))          # costs of one engine, shrunk towards those of the other engines
fit.tpot_us(trial, rows), fit.ttft_us(trial, rows)   # predictions, for rows the fit need not have seen
spec = engine_of(trial, "vllm", date="2026-11-26", ...)   # an entry of the catalogue, with left-out errors

A time is linear in the costs (cost/engines.py), so a fit is a nonnegative least squares of relative errors of TPOT and
TTFT together, with Huber weights. Costs are shrunk twice: the pooled costs of all engines towards PRIORS, those of an
engine towards the pool of the other engines. Few points change a cost little, and an engine that was never measured has
the pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.sim.calibrate.schedules import Schedule, record
from lockstep.sim.calibrate.serving_points import CLIENTS, FRONTEND_US, LoadGenerator, ServingPoint, base_of
from lockstep.sim.cost.calibration import UNCALIBRATED, CalibrationSource, Metric, Residuals
from lockstep.sim.cost.engines import (
    CostsWhen,
    EngineCosts,
    EngineResiduals,
    EngineSpec,
    Unseen,
    expert_token_us,
    release_key,
)
from lockstep.sim.cost.fit import nonnegative_least_squares
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.cost.tables import BaseModel
from lockstep.sim.cost.terms import CostTerm

Float64s = NDArray[np.float64]
Rows = NDArray[np.int64]


class Column(NamedTuple):
    """A weight of a fit: a cost of EngineCosts, or an addition to one under a condition."""

    cost: str
    mean: float  # before any point: the prior
    deviation: float
    engine: str = ""  # only of this engine; empty: of all
    precisions: tuple[str, ...] = ()  # only with weights of these precisions; empty: with all
    before: str = ""  # only for releases before this one; empty: for all

    @property
    def is_addition(self) -> bool:
        return bool(self.precisions or self.before)

    def applies(self, point: ServingPoint) -> bool:
        """Whether the column is part of the time of a point."""
        older = not self.before or (
            not point.overlaps and release_key(point.engine_version) < release_key(self.before)
        )
        return (
            self.engine in ("", point.engine)
            and older
            and (not self.precisions or point.weights_dtype in self.precisions)
        )


PRIORS: tuple[Column, ...] = (
    Column("dense", 1.0, 0.07),  # the roofline's rates are medians over shapes of a table
    Column("attention", 1.0, 0.12),
    Column("experts", 1.0, 0.15),  # tables of three engines: 0.75 to 1.3 times the roofline from 16 to 256 tokens
    Column("experts_prefill", 0.5, 0.5),  # the same tables, 4,096 tokens and more, over two and more ranks: 1.0 to 2.5
    Column("collectives", 1.2, 0.4),  # measured back to back in a loop; between kernels, ranks also wait for each other
    Column("collective_us", 3.0, 3.0),  # a kernel's launch
    Column("step_us", 900.0, 500.0),  # loops of engines take 0.1 to 3 ms
    Column("row_us", 8.0, 8.0),  # 0.3 to 17 us a row were measured (docs/cost-models.md, section 4)
    Column("prefill_us", 0.0, 2000.0),
    Column("moe_layer_us", 15.0, 15.0),  # tables of three engines, 1 to 16 tokens: 5 to 100 us above the roofline
    Column("frontend_us", 25e3, 40e3),
    # Before 0.14 the scheduler of vLLM does not run beside the GPU by default.
    Column("row_us", 20.0, 20.0, engine="vllm", before="0.14"),
)
"""The weights of a fit, with what is known before any point: mean and standard deviation."""

MEANS = np.array([column.mean for column in PRIORS])
DEVIATIONS = np.array([column.deviation for column in PRIORS])
TPOT_ERROR, TTFT_ERROR = 0.06, 0.15  # typical relative errors of a point that costs cannot explain
HUBER = 1.5  # typical errors beyond which a point counts less
ROUNDS = 10  # rounds of reweighting


# ----------------------------------------------------------------------------------------------------------- features


NEARLY_FIXED = LoadGenerator("nearly fixed", 10, 0.03, "outputs vary by a thirtieth, so its users get out of step")
"""The client of points whose lengths are not stated. With fixed lengths SGLang's users stay in step, as measured: it
computes all waiting prompts before any decode. Those of vLLM and TensorRT-LLM do not, although their prompts are the
same; TTFT at 64 and 128 users is between that of outputs that vary by 2 and by 5 %.
"""


def client_of(point: ServingPoint) -> LoadGenerator:
    """Return the client of a point: of unknown lengths, or of the stated ones."""
    if point.lengths_known:
        return CLIENTS["spread"]
    return CLIENTS["waves"] if point.engine == "sglang" else NEARLY_FIXED


def batch_columns(base: BaseModel, shapes: Sequence[BatchShape], point: ServingPoint) -> Float64s:
    """Return the summand of every column per unit of its weight, float64 [batches, columns]."""
    model, kinds = base.model, {"attention_decode": "attention", "attention_prefill": "attention", "experts": "experts"}
    names = EngineCosts.__struct_fields__
    place = {name: i for i, name in enumerate(names)}
    found = np.zeros((len(shapes), len(names)))
    token_us = expert_token_us(base) if model.moe_layers else 0.0
    by_tokens: dict[tuple[int, int], Float64s] = {}
    by_rows: dict[tuple[int, int], Float64s] = {}
    varying = {scope: [term for term in base.terms if term.scope == scope] for scope in ("decode", "extend", "rows")}

    def summed(terms: Sequence[CostTerm], shape: BatchShape) -> Float64s:
        parts = np.zeros(len(names))
        for term in terms:
            kind = "collectives" if term.is_collective else kinds.get(term.name, "dense")
            parts[place[kind]] += term.us(shape, shape)
        return parts

    fixed = [term for term in base.terms if term.scope == "tokens"]
    of_samples = [term for term in base.terms if term.scope == "sampled"]
    for row, shape in zip(found, shapes, strict=True):
        tokens = shape.extend_tokens + shape.decode_rows, shape.sampled_rows
        if tokens not in by_tokens:
            by_tokens[tokens] = summed([*fixed, *(of_samples if shape.sampled_rows else ())], shape)
        row += by_tokens[tokens]
        if shape.decode_rows:
            rows = shape.decode_rows, _coarse(shape.decode_context_tokens)
            if rows not in by_rows:
                coarse = BatchShape(decode_rows=rows[0], decode_context_tokens=rows[1], sampled_rows=rows[0])
                by_rows[rows] = summed(varying["decode"], coarse)
            row += by_rows[rows]
        if shape.extend_tokens:
            row += summed(varying["extend"], shape)
        if varying["rows"]:
            row += summed(varying["rows"], shape)
        row[place["dense"]] += base.launching.added_us(shape, float(row.sum()))
        row[place["experts_prefill"]] = shape.extend_tokens * token_us
        row[place["collective_us"]] = base.collectives
        row[place["step_us"]] = 1.0
        row[place["row_us"]] = shape.extend_rows + shape.decode_rows
        row[place["prefill_us"]] = float(shape.extend_tokens > 0)
        row[place["moe_layer_us"]] = model.moe_layers
    columns = [found[:, place[column.cost]] * column.applies(point) for column in PRIORS]
    return np.column_stack(columns)


def _coarse(context_tokens: int) -> int:
    """Return a number of tokens of KV to two hundredths: terms of decodes are evaluated once for similar batches."""
    step = 1 << max(0, context_tokens.bit_length() - 7)
    return (context_tokens + step // 2) // step * step


@dataclass(frozen=True, eq=False)
class EngineTrial:
    """Serving points with the features of their TPOT and TTFT."""

    points: Sequence[ServingPoint]
    tpot_columns: Float64s  # float64 [points, columns]
    ttft_columns: Float64s
    kernels_tpot_us: Float64s  # float64 [points], of the roofline alone
    kernels_ttft_us: Float64s

    @classmethod
    def of(
        cls, points: Sequence[ServingPoint], folder: Path | None = None, *, on_point: Callable[[], None] | None = None
    ) -> EngineTrial:
        """Simulate the points, each once.

        Args:
            folder: where schedules are kept; a schedule that is there already is not simulated again.
        """
        tpot, ttft, kernels = [], [], []
        front = [i for i, column in enumerate(PRIORS) if column.cost == "frontend_us"]
        for point in points:
            base, schedule = base_of(point), schedule_of(point, folder)
            shapes = schedule.batch_shapes()
            values = batch_columns(base, shapes, point)
            tpot.append(schedule.tpot(values))
            first = schedule.ttft(values)
            first[front] = 1.0
            ttft.append(first)
            alone = np.array([[base.batch_us(shape).mean_us] for shape in shapes])
            kernels.append((schedule.tpot(alone)[0], schedule.ttft(alone)[0]))
            if on_point is not None:
                on_point()
        alone_tpot, alone_ttft = np.array(kernels).T
        return cls(points, np.array(tpot), np.array(ttft), alone_tpot, alone_ttft)

    def rows(self, engine: str) -> Rows:
        """Return the indices of an engine's points."""
        return np.array([i for i, point in enumerate(self.points) if point.engine == engine], np.int64)

    @property
    def engines(self) -> list[str]:
        """Names of the engines, in order of appearance."""
        return list(dict.fromkeys(point.engine for point in self.points))

    def measured_us(self, metric: Metric, rows: Rows) -> Float64s:
        """Return measured TPOT (`time`) or TTFT, float64 [rows]."""
        return np.array(
            [self.points[i].tpot_us if metric == "time" else self.points[i].ttft_us for i in rows], np.float64
        )


def part_of(trial: EngineTrial, rows: Rows) -> EngineTrial:
    """Return the trial of some of the points."""
    return EngineTrial(
        [trial.points[i] for i in rows],
        trial.tpot_columns[rows],
        trial.ttft_columns[rows],
        trial.kernels_tpot_us[rows],
        trial.kernels_ttft_us[rows],
    )


def schedule_of(point: ServingPoint, folder: Path | None) -> Schedule:
    """Return the schedule of a point under the uncorrected roofline, from `folder` if it is there."""
    client = client_of(point)
    digest = hashlib.sha256(repr((point.key, point.kv_dtype, client, FRONTEND_US)).encode()).hexdigest()[:20]
    path = None if folder is None else folder / f"{digest}.npz"
    if path is not None and path.is_file():
        return Schedule.load(path)
    schedule = record(point, client, UNCALIBRATED.cost_model(base_of(point)))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        schedule.save(path)
    return schedule


# ---------------------------------------------------------------------------------------------------------------- fits


@dataclass(frozen=True, eq=False)
class EngineFit:
    """The weights of PRIORS."""

    weights: Float64s

    def tpot_us(self, trial: EngineTrial, rows: Rows) -> Float64s:
        """Return the predicted mean TPOT of points, float64 [rows]."""
        found: Float64s = trial.tpot_columns[rows] @ self.weights
        return found

    def ttft_us(self, trial: EngineTrial, rows: Rows) -> Float64s:
        """Return the predicted mean TTFT of points, float64 [rows]."""
        found: Float64s = trial.ttft_columns[rows] @ self.weights
        return found

    def costs(self) -> EngineCosts:
        """Return the costs without additions, rounded."""
        values = {c.cost: _rounded(w) for c, w in zip(PRIORS, self.weights, strict=True) if not c.is_addition}
        return EngineCosts(**values)

    def when(self, engine: str, why: str) -> tuple[CostsWhen, ...]:
        """Return the additions that apply to `engine`, as costs under conditions."""
        plain = self.costs()
        by_condition: dict[tuple[str, tuple[str, ...]], dict[str, float]] = {}
        for column, weight in zip(PRIORS, self.weights, strict=True):
            if column.is_addition and column.engine in ("", engine):
                total = _rounded(getattr(plain, column.cost) + weight)
                by_condition.setdefault((column.before, column.precisions), {})[column.cost] = total
        return tuple(
            CostsWhen(releases=("", before), precisions=precisions, costs=costs, why=why)
            for (before, precisions), costs in by_condition.items()
        )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def fit_weights(trial: EngineTrial, rows: Rows, means: Float64s = MEANS) -> Float64s:
    """Return the weights of PRIORS that explain TPOT and TTFT of `rows`, near `means`; float64 [columns]."""
    if not len(rows):
        return means
    blocks, errors = [], []
    kinds: tuple[tuple[Metric, Float64s, float], ...] = (
        ("time", trial.tpot_columns, TPOT_ERROR), ("ttft", trial.ttft_columns, TTFT_ERROR)
    )  # fmt: skip
    for metric, columns, error in kinds:
        measured = trial.measured_us(metric, rows)
        blocks.append(columns[rows] / measured[:, None] / error)
        errors.append(np.full(len(rows), 1.0 / error))
    matrix, target = np.vstack(blocks), np.concatenate(errors)
    counts, weights = np.ones(len(target)), means
    for _ in range(ROUNDS):
        rows_of = np.vstack([matrix * counts[:, None], np.diag(1.0 / DEVIATIONS)])
        wanted = np.concatenate([target * counts, means / DEVIATIONS])
        weights = nonnegative_least_squares(rows_of * DEVIATIONS, wanted) * DEVIATIONS
        misses = np.abs(matrix @ weights - target)
        counts = 1.0 / np.sqrt(np.maximum(1.0, misses / HUBER))
    return weights


def fit_engine(trial: EngineTrial, rows: Rows, engine: str) -> EngineFit:
    """Fit the costs of one engine to its points in `rows`, shrunk towards a fit to the other engines' points."""
    own = np.array([trial.points[i].engine == engine for i in rows], np.bool_)
    pool = fit_weights(trial, rows[~own])
    return EngineFit(fit_weights(trial, rows[own], pool) if own.any() else pool)


def left_out(trial: EngineTrial, group_of: Callable[[ServingPoint], Hashable]) -> dict[str, Float64s]:
    """Predict every point by a fit without the points of its group, whatever their engine.

    Returns: `time` and `ttft`, measured / predicted of each point, float64 [points].
    """
    groups = [group_of(point) for point in trial.points]
    everything = np.arange(len(trial.points))
    found = {"time": np.empty(len(groups)), "ttft": np.empty(len(groups))}
    for group in dict.fromkeys(groups):
        held = np.array([g == group for g in groups], np.bool_)
        for engine in dict.fromkeys(trial.points[i].engine for i in everything[held]):
            rows = np.array([i for i in everything[held] if trial.points[i].engine == engine], np.int64)
            fit = fit_engine(trial, everything[~held], engine)
            found["time"][rows] = trial.measured_us("time", rows) / fit.tpot_us(trial, rows)
            found["ttft"][rows] = trial.measured_us("ttft", rows) / fit.ttft_us(trial, rows)
    return found


LEFT_OUT: Mapping[Unseen, tuple[str, Callable[[ServingPoint], Hashable]]] = {
    "points": ("all points of one model, engine and tp left out", lambda p: (p.model.name, p.engine, p.tp)),
    "model": ("all points of one model left out", lambda p: p.model.name),
    "engine": ("all points of one engine left out", lambda p: p.engine),
}
"""How errors are estimated, by what a fit lacks."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine's entry in the catalogue states besides the fit; fields as in EngineSpec."""

    title: str
    profile: str
    release: str
    settings: Mapping[str, object] = field(default_factory=dict)
    large_gpu_settings: Mapping[str, object] = field(default_factory=dict)


def engine_of(
    trial: EngineTrial, engine: str, facts: EngineFacts, *, date: str, sources: Sequence[CalibrationSource]
) -> EngineSpec:
    """Return the catalogue's entry of an engine: costs of a fit to all points, and errors of points left out.

    An engine without points has the kernels and collectives of the other engines, and the CPU lane of the simulator.
    """
    fit = fit_engine(trial, np.arange(len(trial.points)), engine)
    rows = trial.rows(engine)
    costs, residuals = fit.costs(), engine_residuals(trial, engine)
    if not len(rows):
        costs = msgspec.structs.replace(costs, step_us=0.0, row_us=0.0)
        residuals = tuple(one for one in residuals if one.unseen == "engine")
    return EngineSpec(
        engine=engine,
        title=facts.title,
        profile=facts.profile,
        settings=dict(facts.settings),
        large_gpu_settings=dict(facts.large_gpu_settings),
        release=facts.release,
        date=date,
        cpu="included" if len(rows) else "separate",
        costs=costs,
        when=fit.when(engine, f"serving points, {date}"),
        fitted=tuple(sorted({(trial.points[i].model.name, trial.points[i].gpu.name) for i in rows})),
        residuals=residuals,
        card=card_of(trial, rows, residuals),
        sources=tuple(sources) if len(rows) else (),
    )


def card_of(trial: EngineTrial, rows: Rows, residuals: Sequence[EngineResiduals]) -> dict[str, str]:
    """Return the card of an engine: what it was fitted on, its errors, and where it must not be used."""
    points = [trial.points[i] for i in rows]
    errors = "; ".join(
        f"{'TPOT' if one.metric == 'time' else 'TTFT'}, {one.method}: 90 % within "
        f"{one.ratios[2]:.2f} to {one.ratios[-3]:.2f} times the prediction ({one.count} points)"
        for one in residuals
    )
    if not points:
        fitted = "no measurement: kernels and collectives of the other engines, and the CPU lane of the simulator"
        return {"fitted_on": fitted, "errors": errors, "not_for": "promises: the engine was never measured on a GPU"}
    releases = ", ".join(sorted({point.engine_version or "unstated releases" for point in points}))
    kinds = sorted({f"{point.model.name} in {point.weights_dtype} on {point.gpu.name}" for point in points})
    prompts = [point.prompt_tokens for point in points]
    users = [point.concurrency for point in points]
    return {
        "fitted_on": f"{len(points)} points of {releases}: {'; '.join(kinds)}",
        "errors": errors,
        "not_for": (
            f"prompts far from {min(prompts):,} to {max(prompts):,} tokens, more than {max(users)} requests at a time, "
            "speculative decoding, stages and attention shards: none was measured; other GPUs than those above, where "
            "rates of kernels follow the data sheet or operator tables and the costs of the engine are taken over"
        ),
    }


T_QUANTILES = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)  # of Student's t at 0.95, by degrees of freedom
NORMAL_QUANTILE = 1.645
WIDENED_MAX = 1.3  # the factor for five groups; with fewer, intervals of all points cover more than they state


def widened(groups: int) -> float:
    """Return the factor on the logarithms of errors that were estimated from few groups.

    Points of one group have a common error, so that many points of few groups are few observations: Student's t
    instead of the normal distribution, up to WIDENED_MAX.
    """
    freedom = groups - 1
    if freedom < 1:
        return WIDENED_MAX
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else NORMAL_QUANTILE + 1.6 / freedom
    return min(WIDENED_MAX, quantile / NORMAL_QUANTILE)


def residuals_of(ratios: Float64s, groups: int, *, metric: Metric, method: str) -> Residuals:
    """Return the residuals of left-out points of `groups` groups, as wide as so few groups require.

    Args:
        groups: 0 for groups that a fit interpolates, such as degrees of parallelism: these are not widened.
    """
    logs = np.log(ratios)
    centre = float(np.median(logs))
    wide = np.exp(centre + (logs - centre) * (widened(groups) if groups else 1.0))
    return Residuals.of(wide, metric=metric, population="seen", method=method)


def engine_residuals(trial: EngineTrial, engine: str) -> tuple[EngineResiduals, ...]:
    """Return the errors of an engine's predictions by what the fit lacked.

    Errors for points are those of the engine's own points where it has at least GROUPS_MIN groups, otherwise those of
    all engines. For a model and an engine, they are those of all engines, since one engine has few groups.
    """
    found = []
    own = trial.rows(engine)
    everything = np.arange(len(trial.points))
    for unseen, (method, group_of) in LEFT_OUT.items():
        ratios = left_out(trial, group_of)
        several = len({group_of(trial.points[i]) for i in own}) >= GROUPS_MIN
        rows = own if unseen == "points" and several else everything
        groups = len({group_of(trial.points[i]) for i in rows})
        for metric in METRICS:
            few = 0 if unseen == "points" else groups
            kept = residuals_of(ratios[metric][rows], few, metric=metric, method=method)
            found.append(
                EngineResiduals(
                    metric=kept.metric,
                    unseen=unseen,
                    method=f"{method}: {groups} groups{'' if rows is own else ' of any engine'}",
                    count=kept.count,
                    probabilities=kept.probabilities,
                    ratios=kept.ratios,
                )
            )
    return tuple(found)


METRICS: tuple[Metric, ...] = ("time", "ttft")
GROUPS_MIN = 3  # groups of an engine from which its errors are its own
