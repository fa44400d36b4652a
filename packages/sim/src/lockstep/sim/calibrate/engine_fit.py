"""Fits of engines' costs to serving points, and the errors of points that were left out of a fit.

trial = EngineTrial.of(points, folder)      # every point simulated once; schedules are kept in `folder`
fit = fit_trial(trial, rows)                # costs of all engines, GPUs and models at once (levels.py)
predicted_us(fit, trial, rows, "ttft")      # for rows the fit need not have seen
spec = engine_of(trial, "vllm", facts, date="2026-11-26", ...)   # an entry of the catalogue, with left-out errors

A time is a sum of features times costs (cost/engines.py). Costs are fitted in levels: common to all points, of an
engine, of an architecture, of a GPU, of an engine on a GPU, of a release, of a model, of a precision of weights, and so
on. LEVELS states how far a cost may deviate in each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.sim.calibrate.levels import Cost, Level, LevelFit, Measured, PointGroup, fit_levels
from lockstep.sim.calibrate.schedules import Schedule, record
from lockstep.sim.calibrate.serving_points import CLIENTS, FRONTEND_US, LoadGenerator, ServingPoint, base_of
from lockstep.sim.catalogue import gpu_names, load_gpu
from lockstep.sim.cost.calibration import UNCALIBRATED, CalibrationSource, Metric, Residuals
from lockstep.sim.cost.engines import (
    CostsWhen,
    EngineCosts,
    EngineResiduals,
    EngineSpec,
    GpuCard,
    Unseen,
    expert_rows_us,
    release_key,
)
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.cost.tables import BaseModel
from lockstep.sim.cost.terms import CostTerm

Float64s = NDArray[np.float64]
Rows = NDArray[np.int64]


COSTS: tuple[Cost, ...] = (
    Cost("dense", 1.0, 0.07),  # the roofline's rates are medians over shapes of a table
    Cost("attention", 1.0, 0.12),
    Cost("experts", 1.0, 0.15),  # tables of three engines: 0.75 to 1.3 times the roofline from 16 to 256 tokens
    Cost("experts_prefill", 1.0, 0.3),  # the same tables, 4,096 tokens and more: cost/engines.py, ROW_BYTES
    Cost("collectives", 1.2, 0.35),  # measured back to back in a loop; between kernels, ranks also wait for each other
    Cost("collective_us", 4.0, 0.8),  # a kernel's launch
    Cost("step_us", 600.0, 0.8),  # loops of engines take 0.1 to 3 ms
    Cost("row_layer_us", 0.2, 0.8),  # 0.3 to 17 us a row were measured (docs/cost-models.md, section 4)
    Cost("prefill_us", 1500.0, 0.8),
    Cost("moe_layer_us", 15.0, 0.7),  # tables of three engines, 1 to 16 tokens: 5 to 100 us above the roofline
    Cost("frontend_layer_us", 300.0, 1.0),
)
"""The costs of a fit, with what is known before any point."""

FEW = {"step_us": 0.5, "row_layer_us": 0.5, "prefill_us": 0.5, "frontend_layer_us": 0.6}  # of the CPU


def _deviations(kernels: Sequence[float], cpu: float, *, by_gpu: bool = False) -> dict[str, float]:
    """Return deviations of a level.

    Args:
        kernels: of dense, attention, experts, experts_prefill, collectives, collective_us and moe_layer_us.
        cpu: of the costs of the CPU, as a share of FEW.
        by_gpu: the groups of the level are those of a GPU, on which the front end does not depend.
    """
    names = ("dense", "attention", "experts", "experts_prefill", "collectives", "collective_us", "moe_layer_us")
    found = {**dict(zip(names, kernels, strict=True)), **{name: cpu * value for name, value in FEW.items()}}
    if by_gpu:
        del found["frontend_layer_us"]
    return found


RELEASES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "vllm": (("", "0.14"),),
    "trtllm": (("", "1.1"), ("1.1", "1.2")),
}
"""By engine, the releases whose costs are a group of their own: from one on, before another.

Before 0.14 the scheduler of vLLM does not run beside the GPU by default. Points of TensorRT-LLM before 1.1 are those of
one release candidate; from 1.2 on a pass takes less time.
"""
UNSTATED: Mapping[str, str] = {"trtllm": "1.1"}
"""The release of an engine's points that state none: that of the campaign in the month of their measurement."""


def release_of(point: ServingPoint) -> str:
    """Return the release of a point as costs depend on it; empty for the usual one."""
    if point.overlaps:
        return ""
    return point.engine_version if release_key(point.engine_version) else UNSTATED.get(point.engine, "")


def _release(point: ServingPoint) -> PointGroup | None:
    number = release_key(release_of(point))
    for since, before in RELEASES.get(point.engine, ()) if number else ():
        if release_key(since) <= number < release_key(before):
            return PointGroup(engine=point.engine, releases=(since, before))
    return None


@cache
def same_architecture(arch: str) -> tuple[str, ...]:
    """Return the GPUs of the catalogue with the kernels of an architecture, such as `Hopper sm90`: equal tens of sm."""
    gpus = [load_gpu(name) for name in gpu_names()]
    return tuple(sorted(gpu.name for gpu in gpus if gpu.arch[:-1] == arch[:-1]))


LEVELS: tuple[Level, ...] = (
    Level(
        "engine",
        lambda p: PointGroup(engine=p.engine),
        {**_deviations((0.035, 0.07, 0.07, 0.13, 0.14, 0.35, 0.28), 0.42), "frontend_layer_us": 0.6},
    ),
    Level(
        "architecture",
        lambda p: PointGroup(gpus=same_architecture(p.gpu.arch)),
        _deviations((0.06, 0.10, 0.15, 0.18, 0.4, 0.4, 0.3), 0.3, by_gpu=True),
    ),
    Level(
        "gpu",
        lambda p: PointGroup(gpu=p.gpu.name),
        _deviations((0.03, 0.05, 0.075, 0.09, 0.2, 0.2, 0.15), 0.15, by_gpu=True),
    ),
    Level(
        "engine and gpu",
        lambda p: PointGroup(engine=p.engine, gpu=p.gpu.name),
        _deviations((0.03, 0.05, 0.08, 0.12, 0.2, 0.2, 0.2), 0.3, by_gpu=True),
    ),
    Level("release", _release, _deviations((0.04, 0.05, 0.10, 0.12, 0.1, 0.3, 0.3), 0.6)),
    Level(
        "model", lambda p: PointGroup(model=p.model.name), _deviations((0.03, 0.08, 0.12, 0.18, 0.05, 0.05, 0.3), 0.15)
    ),
    Level(
        "precision",
        lambda p: PointGroup(precision=p.weights_dtype),
        _deviations((0.03, 0.02, 0.07, 0.07, 0.0, 0.0, 0.12), 0.0),
    ),
    Level(
        "architecture and precision",
        lambda p: PointGroup(gpus=same_architecture(p.gpu.arch), precision=p.weights_dtype),
        _deviations((0.07, 0.04, 0.21, 0.25, 0.0, 0.0, 0.42), 0.0, by_gpu=True),
    ),
    Level(
        "gpu and precision",
        lambda p: PointGroup(gpu=p.gpu.name, precision=p.weights_dtype),
        _deviations((0.025, 0.015, 0.075, 0.09, 0.0, 0.0, 0.15), 0.0, by_gpu=True),
    ),
    Level(
        "engine and model",
        lambda p: PointGroup(engine=p.engine, model=p.model.name),
        _deviations((0.03, 0.06, 0.12, 0.18, 0.1, 0.2, 0.3), 0.3),
    ),
    Level(
        "cell",
        lambda p: PointGroup(p.engine, p.gpu.name, p.model.name, p.weights_dtype),
        _deviations((0.055, 0.11, 0.28, 0.34, 0.42, 0.42, 0.7), 0.56, by_gpu=True),
    ),
)
"""The levels of a fit. Widths are guesses of how far engines, GPUs and models differ, scaled in a few choices by errors
of families, GPUs, engines and precisions left out: docs/decisions/0112-rows-in-every-layer.md (costs of the CPU) and
0119-first-tokens-by-layer.md (engines narrower, precisions narrower, cells wider) and 0120-kernels-by-architecture.md.
Front ends of engines are as wide as their points make most likely: 0167-front-ends-of-unseen-engines.md.
"""


# ----------------------------------------------------------------------------------------------------------- features


NEARLY_FIXED = LoadGenerator("nearly fixed", 10, 0.0, "outputs vary by 32 tokens, so its users get out of step", 32)
"""The client of points whose lengths are not stated. With fixed lengths SGLang's users stay in step, as measured: it
computes all waiting prompts before any decode. Those of vLLM and TensorRT-LLM do not, although their prompts are the
same. How far out of step they are shows in TTFT under load, which does not depend on the length of answers: Qwen3-32B
under vLLM 0.12 on two H100 with 128 users has 692, 682 and 652 ms with answers of 128, 512 and 1,024 tokens. With 32
tokens either way it is 706, 690 and 693 ms; with 16, 839 to 845; with 60, 622 to 682; a share of 3 %, 1,320 to 699.
"""


def client_of(point: ServingPoint) -> LoadGenerator:
    """Return the client of a point: of unknown lengths, or of the stated ones."""
    if point.lengths_known:
        return CLIENTS["spread"]
    return CLIENTS["waves"] if point.engine == "sglang" else NEARLY_FIXED


def batch_columns(base: BaseModel, shapes: Sequence[BatchShape]) -> Float64s:
    """Return the summand of each of COSTS per unit of it, float64 [batches, costs]."""
    model, kinds = base.model, {"attention_decode": "attention", "attention_prefill": "attention", "experts": "experts"}
    names = EngineCosts.__struct_fields__
    place = {name: i for i, name in enumerate(names)}
    found = np.zeros((len(shapes), len(names)))
    token_us = expert_rows_us(base) if model.moe_layers else 0.0
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
        row[place["row_layer_us"]] = model.layers * (shape.extend_rows + shape.decode_rows)
        row[place["prefill_us"]] = float(shape.extend_tokens > 0)
        row[place["moe_layer_us"]] = model.moe_layers
    return found[:, [place[cost.name] for cost in COSTS]]


def _coarse(context_tokens: int) -> int:
    """Return a number of tokens of KV to two hundredths: terms of decodes are evaluated once for similar batches."""
    step = 1 << max(0, context_tokens.bit_length() - 7)
    return (context_tokens + step // 2) // step * step


@dataclass(frozen=True, eq=False)
class EngineTrial:
    """Serving points with the features of their TPOT and TTFT."""

    points: Sequence[ServingPoint]
    tpot_columns: Float64s  # float64 [points, costs], per unit of each of COSTS
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
        front = [cost.name for cost in COSTS].index("frontend_layer_us")
        for point in points:
            base, schedule = base_of(point), schedule_of(point, folder)
            shapes = schedule.batch_shapes()
            values = batch_columns(base, shapes)
            tpot.append(schedule.tpot(values))
            first = schedule.ttft(values)
            first[front] = base.model.layers
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


def fit_trial(trial: EngineTrial, rows: Rows, start: LevelFit | None = None) -> LevelFit:
    """Return the costs that explain TPOT and TTFT of some points; of no points, those known before any."""
    points = [trial.points[i] for i in rows]
    measured = [
        Measured(trial.tpot_columns[rows], trial.measured_us("time", rows)),
        Measured(trial.ttft_columns[rows], trial.measured_us("ttft", rows)),
    ]
    return fit_levels(points, measured, COSTS, LEVELS, start)


def predicted_us(fit: LevelFit, trial: EngineTrial, rows: Rows, metric: Metric) -> Float64s:
    """Return the predicted mean TPOT (`time`) or TTFT of points, float64 [rows]."""
    columns = trial.tpot_columns if metric == "time" else trial.ttft_columns
    found: Float64s = (columns[rows] * fit.weights([trial.points[i] for i in rows])).sum(axis=1)
    return found


Ratios = dict[Metric, Float64s]


def left_out(trial: EngineTrial, group_of: Callable[[ServingPoint], Hashable], whole: LevelFit) -> Ratios:
    """Return measured / predicted TPOT and TTFT of every point, by a fit without the points of its group.

    Many groups are left out together, as FOLDS_MAX sets of groups.

    Args:
        whole: a fit to all points, from which the other fits begin.
    """
    groups = [group_of(point) for point in trial.points]
    order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    folds = np.array([order[group] % FOLDS_MAX for group in groups])
    everything = np.arange(len(groups))
    found: Ratios = {"time": np.empty(len(groups)), "ttft": np.empty(len(groups))}
    for fold in range(min(len(order), FOLDS_MAX)):
        held = folds == fold
        fit, rows = fit_trial(trial, everything[~held], whole), everything[held]
        for metric in METRICS:
            found[metric][rows] = trial.measured_us(metric, rows) / predicted_us(fit, trial, rows, metric)
    return found


LEFT_OUT: Mapping[Unseen, tuple[str, Callable[[ServingPoint], Hashable]]] = {
    "points": (
        "all points of one model, engine, GPU and tp left out",
        lambda p: (p.model.name, p.engine, p.gpu.name, p.tp),
    ),
    "cell": ("all points of one model, engine and GPU left out", lambda p: (p.model.name, p.engine, p.gpu.name)),
    "model": ("all points of one model left out", lambda p: p.model.name),
    "gpu": ("all points of one GPU left out", lambda p: p.gpu.name),
    "engine": ("all points of one engine left out", lambda p: p.engine),
}
"""How errors are estimated, by what a fit lacks."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fit to all points of a trial, and the errors of points left out, by what the fit lacked."""

    trial: EngineTrial
    fit: LevelFit
    ratios: Mapping[Unseen, Ratios]

    @classmethod
    def of(cls, trial: EngineTrial) -> Fitted:
        """Fit all points, and the points without each group of LEFT_OUT."""
        fit = fit_trial(trial, np.arange(len(trial.points)))
        return cls(trial, fit, {unseen: left_out(trial, group_of, fit) for unseen, (_, group_of) in LEFT_OUT.items()})


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine's entry in the catalogue states besides the fit; fields as in EngineSpec."""

    title: str
    profile: str
    release: str
    settings: Mapping[str, object] = field(default_factory=dict)
    large_gpu_settings: Mapping[str, object] = field(default_factory=dict)


def engine_of(
    fitted: Fitted,
    engine: str,
    facts: EngineFacts,
    *,
    date: str,
    sources: Sequence[CalibrationSource],
    gpus: Sequence[GpuCard] = (),
) -> EngineSpec:
    """Return the catalogue's entry of an engine: costs of a fit to all points, and errors of points left out.

    An engine without points has the kernels and collectives of the other engines, and the CPU lane of the simulator.
    """
    trial, fit = fitted.trial, fitted.fit
    rows = trial.rows(engine)
    points = [trial.points[i] for i in rows]
    lengths = [point.prompt_tokens for point in points]
    residuals = engine_residuals(fitted, engine)
    own = fit.groups.get(("engine", PointGroup(engine=engine)))
    base = [0] if own is None else [0, own]
    costs, spreads = _values(fit, base), _spreads(fit, base)
    if not len(rows):
        costs |= {"step_us": 0.0, "row_layer_us": 0.0}
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
        costs=EngineCosts(**costs),
        spreads=spreads,
        when=_conditions(fit, engine, f"serving points, {date}"),
        fitted=tuple(sorted({(one.model.name, one.gpu.name, one.weights_dtype) for one in points})),
        releases=tuple(sorted({one.engine_version for one in points if one.engine_version}, key=release_key)),
        prompt_tokens=(min(lengths), max(lengths)) if lengths else (0, 0),
        residuals=residuals,
        card=card_of(trial, rows, residuals),
        gpus=tuple(gpus),
        sources=tuple(sources) if len(rows) else (),
    )


def _values(fit: LevelFit, rows: Sequence[int]) -> dict[str, float]:
    logs = fit.logs[list(rows)].sum(axis=0)
    return {cost.name: float(f"{np.exp(log):.4g}") for cost, log in zip(fit.costs, logs, strict=True)}


def _spreads(fit: LevelFit, rows: Sequence[int]) -> dict[str, float]:
    found = fit.spreads(rows).tolist()
    return {cost.name: round(spread, 3) for cost, spread in zip(fit.costs, found, strict=True)}


def _conditions(fit: LevelFit, engine: str, why: str) -> tuple[CostsWhen, ...]:
    """Return the factors of the groups that apply to an engine; those of one GPU, model or precision together."""
    together: dict[PointGroup, list[int]] = {}
    for (name, group), row in fit.groups.items():
        if name != "engine" and group.engine in ("", engine):
            together.setdefault(group._replace(engine=""), []).append(row)
    found = []
    for group, rows in sorted(together.items()):
        values, spreads = _values(fit, rows), _spreads(fit, rows)
        factors = {name: value for name, value in values.items() if abs(value - 1.0) > LEAST_FACTOR}
        if factors:
            found.append(
                CostsWhen(
                    releases=group.releases,
                    precisions=(group.precision,) if group.precision else (),
                    gpus=(group.gpu,) if group.gpu else group.gpus,
                    models=(group.model,) if group.model else (),
                    factors=factors,
                    spreads={name: spreads[name] for name in factors},
                    why=why,
                )
            )
    return tuple(found)


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
WIDENED_MAX = 1.17  # with more, intervals of all points left out by GPU cover more than they state


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

    The points of a group have a common error, whose sign for the next group is unknown: three GPUs that were predicted
    too slow are no evidence that a fourth one will be. So the logarithms of groups' errors are taken with both signs.

    Args:
        groups: 0 for groups that a fit interpolates, such as degrees of parallelism; no error is changed then.
    """
    count = len(ratios)
    if groups:
        logs = np.log(ratios) * widened(groups)
        ratios = np.exp(np.concatenate([logs, -logs]))
    return msgspec.structs.replace(Residuals.of(ratios, metric=metric, population="seen", method=method), count=count)


def engine_residuals(fitted: Fitted, engine: str) -> tuple[EngineResiduals, ...]:
    """Return the errors of an engine's predictions by what the fit lacked.

    Errors for points and cells are those of the engine's own points where it has at least GROUPS_MIN groups, otherwise
    those of all engines. For a model, a GPU and an engine, they are those of all engines: one engine has few groups.
    """
    found, trial = [], fitted.trial
    own = trial.rows(engine)
    everything = np.arange(len(trial.points))
    for unseen, (method, group_of) in LEFT_OUT.items():
        ratios = fitted.ratios[unseen]
        several = len({group_of(trial.points[i]) for i in own}) >= GROUPS_MIN
        rows = own if unseen in ("points", "cell") and several else everything
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
LEAST_FACTOR = 0.002  # distance from 1 of the smallest factor that is stated
FOLDS_MAX = 16  # fits without groups; more groups than that are left out together
GROUPS_MIN = 3  # groups of an engine from which its errors are its own
