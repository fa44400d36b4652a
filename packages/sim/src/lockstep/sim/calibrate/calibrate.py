"""Fits of calibrations to published serving points, to timed batches and to operator tables.

found = read_serving_points(path)
trial = PointTrials.of(points)                       # every point simulated once, under each client of CLIENTS
fit = fit_points(trial, trial.rows("vllm"))          # one parameter set for all of an engine's rows
fit.tpot_us(trial, rows), fit.ttft_us(trial, rows)   # predictions, for rows the fit need not have seen
calibration = calibration_of_points(trial, "vllm", date="2026-11-22")

A prediction keeps the schedule of the uncorrected simulation and applies corrected times to its batches. It takes a
microsecond, and differs from a new simulation by less than a percent (docs/validation.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.sim.calibrate.engine_run import Twin
from lockstep.sim.calibrate.serving_points import CLIENTS, Played, ServingPoint, parts_of, play
from lockstep.sim.calibrate.spreads import deviations, lasting_spread, spread_of
from lockstep.sim.cost import CalibrationError, CpuModel, RooflineModel, decode_shape, extend_shape
from lockstep.sim.cost.calibration import (
    BATCH_FEATURES,
    UNSEEN_MODELS,
    Calibration,
    CalibrationSource,
    Correction,
    Metric,
    Population,
    Residuals,
)
from lockstep.sim.cost.fit import correction_of, fit_weights, left_out, relative_shift
from lockstep.sim.cost.tables import BaseModel, MeasuredModel, OperatorTables
from lockstep.sim.results.batch_times import BatchTime, BatchTimes, ErrorRow, error_row

Float64s = NDArray[np.float64]
Rows = NDArray[np.int64]

MODELS_MIN = 3  # models of an engine from which the error for unseen models is estimated, by leaving one out
POINTS_MIN = 4  # points of an engine
BLOCKS = 10  # parts of a journal that are left out in turn
BATCHES_MIN = 50  # timed batches of a journal
KIND_MIN = 50  # batches of one kind and size that are left out together
LEVEL_MIN = 20  # batches with prompts, and of decodes, whose level and spread are apart
LEVEL_ROUNDS = 4  # fits after the first one; levels converge in two or three
STALL = 5.0  # times its fitted time: a longer batch waited for other processes of the machine

# ------------------------------------------------------------------------------------------------------ serving points


@dataclass(frozen=True, eq=False)
class PointTrials:
    """Serving points, each simulated without correction under every client that is consistent with its source."""

    points: Sequence[ServingPoint]
    played: Mapping[str, Sequence[Played]]  # by name of the client, one per point
    base: str = "roofline"  # kind of the cost model

    @classmethod
    def of(cls, points: Sequence[ServingPoint], *, operators: Path | None = None) -> PointTrials:
        """Simulate the points with the roofline, or with `operators`, a folder of tables, with the measured model."""
        played: dict[str, list[Played]] = {name: [] for name in CLIENTS}
        for point in points:
            known: Played | None = None
            for name, client in CLIENTS.items():
                if known is None or not point.lengths_known:
                    known = play(point, client, operators=operators)
                played[name].append(known)
        return cls(points, played, "roofline" if operators is None else "measured")

    def rows(self, engine: str) -> Rows:
        """Return the indices of an engine's points."""
        return np.array([i for i, point in enumerate(self.points) if point.engine == engine], np.int64)

    @property
    def engines(self) -> list[str]:
        """Names of the engines, in order of appearance."""
        return list(dict.fromkeys(point.engine for point in self.points))

    def measured_us(self, metric: str, rows: Rows) -> Float64s:
        """Return measured `tpot_us` or `ttft_us`, float64 [rows]."""
        return np.array([getattr(self.points[i], metric) for i in rows], np.float64)

    def uncorrected_us(self, metric: str, rows: Rows, client: str) -> Float64s:
        """Return `tpot_us` or `ttft_us` simulated without correction, float64 [rows]."""
        return np.array([getattr(self.played[client][i], metric) for i in rows], np.float64)

    def parts(self, metric: str, rows: Rows, client: str) -> Float64s:
        """Return `tpot_parts` or `ttft_parts`, float64 [rows, 5]."""
        return np.array([getattr(self.played[client][i], metric) for i in rows], np.float64).reshape(len(rows), -1)


@dataclass(frozen=True)
class PointFit:
    """One correction, and the client that it was fitted with."""

    correction: Correction
    client: str

    def tpot_us(self, trial: PointTrials, rows: Rows) -> Float64s:
        """Return the predicted mean TPOT of points, float64 [rows]."""
        predicted: Float64s = trial.parts("tpot_parts", rows, self.client) @ np.array(self.correction.weights)
        return predicted

    def ttft_us(self, trial: PointTrials, rows: Rows) -> Float64s:
        """Return the predicted mean TTFT of points, float64 [rows]."""
        predicted: Float64s = trial.parts("ttft_parts", rows, self.client) @ np.array(self.correction.weights)
        return predicted + self.correction.frontend_us


def fit_points(trial: PointTrials, rows: Rows) -> PointFit:
    """Fit the correction to TPOT, then `frontend_us` to TTFT; choose the client with the smaller median errors."""
    best: tuple[float, PointFit] | None = None
    tpot_us, ttft_us = trial.measured_us("tpot_us", rows), trial.measured_us("ttft_us", rows)
    for client in CLIENTS:
        weights = fit_weights(trial.parts("tpot_parts", rows, client), tpot_us)
        frontend_us = relative_shift(trial.parts("ttft_parts", rows, client) @ weights, ttft_us)
        fit = PointFit(correction_of(weights, frontend_us), client)
        error = median_error(fit.tpot_us(trial, rows), tpot_us) + median_error(fit.ttft_us(trial, rows), ttft_us)
        if best is None or error < best[0]:
            best = error, fit
    assert best is not None
    return best[1]


def median_error(predicted_us: Float64s, measured_us: Float64s) -> float:
    """Return the median of |predicted / measured - 1|."""
    return float(np.median(np.abs(predicted_us / measured_us - 1.0)))


def left_out_ratios(trial: PointTrials, rows: Rows, groups: Sequence[object]) -> dict[Metric, Float64s]:
    """Return measured / predicted of each row, for time (TPOT) and TTFT, by a fit without the rows of its group."""
    time, ttft = np.empty(len(rows)), np.empty(len(rows))
    for mask, _ in left_out(groups):
        held = rows[mask]
        fit = fit_points(trial, rows[~mask])
        time[mask] = trial.measured_us("tpot_us", held) / fit.tpot_us(trial, held)
        ttft[mask] = trial.measured_us("ttft_us", held) / fit.ttft_us(trial, held)
    return {"time": time, "ttft": ttft}


def calibration_of_points(
    trial: PointTrials, engine: str, *, date: str, rows: Rows | None = None, sources: Sequence[CalibrationSource] = ()
) -> Calibration:
    """Fit an engine's points, and estimate the error by leaving out rows, and models if there are MODELS_MIN.

    Args:
        rows: indices of points of the engine; None: all points of the engine.
    Raises: CalibrationError if there are fewer than POINTS_MIN points, or they are of several GPUs.
    """
    rows = trial.rows(engine) if rows is None else rows
    points = [trial.points[i] for i in rows]
    if len(points) < POINTS_MIN:
        raise CalibrationError(f"engine `{engine}` has {len(points)} points, a calibration needs {POINTS_MIN}")
    gpus = sorted({point.gpu.name for point in points})
    if len(gpus) > 1:
        raise CalibrationError(f"points of engine `{engine}` are of {', '.join(gpus)}\nhint: choose one with --gpu")
    fit = fit_points(trial, rows)
    kinds: list[object] = [(p.model.name, p.tp) for p in points]
    method = "all rows of one model and tp left out"
    if len(set(kinds)) == 1:  # leaving out the only group would leave no row to fit
        kinds, method = list(range(len(points))), "one row left out"
    residuals = [
        Residuals.of(ratios, metric=metric, population="seen", method=method)
        for metric, ratios in left_out_ratios(trial, rows, kinds).items()
    ]
    models = [point.model.name for point in points]
    if len(set(models)) >= MODELS_MIN:
        residuals += [
            Residuals.of(ratios, metric=metric, population="unseen", method="one model left out")
            for metric, ratios in left_out_ratios(trial, rows, models).items()
        ]
    else:
        residuals += UNSEEN_MODELS
    client = CLIENTS[fit.client]
    notes = []
    if not all(point.lengths_known for point in points):
        notes.append(f"TTFT is that of a client whose prompts are equally long, and whose {client.why}")
    layouts = Counter(str(point.split) for point in points if not point.split.is_plain)
    notes += [f"on {layout}: {count} rows" for layout, count in sorted(layouts.items())]
    low_kv = sum(point.kv_dtype != "bf16" for point in points)
    if low_kv:
        notes.append(f"with KV in fp8: {low_kv} rows")
    backends = Counter(point.attention_backend for point in points if point.attention_backend)
    notes += [f"attention backend {backend}: {count} rows" for backend, count in sorted(backends.items())]
    return Calibration(
        engine=engine,
        engine_version=", ".join(sorted({point.engine_version or "unstated" for point in points})),
        gpu=gpus[0],
        models=tuple(sorted(set(models))),
        date=date,
        base=trial.base,
        cpu="included",
        correction=fit.correction,
        residuals=tuple(residuals),
        sources=tuple(sources),
        notes=tuple(notes),
        layouts=tuple(sorted({str(point.split) for point in points})),
        dtypes=tuple(sorted({(point.weights_dtype, point.kv_dtype) for point in points})),
    )


# -------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, eq=False)
class TimedBatches:
    """Batches with measured times and the features of their shapes, in the order of their ends."""

    batches: Sequence[BatchTime]
    parts: Float64s  # float64 [batches, 8], in the order of BATCH_FEATURES
    took_us: Float64s  # float64 [batches]
    left_out: int  # batches without times, or with sampling separate from their forward pass

    @property
    def uncorrected_us(self) -> Float64s:
        """Times predicted without a correction, float64 [batches]."""
        uncorrected: Float64s = self.parts @ np.array((*Correction().weights, 0.0, 0.0, 0.0))
        return uncorrected


def timed_batches(times: BatchTimes, base: BaseModel, where: Path) -> TimedBatches:
    """Compute the features of every batch.

    Args:
        where: source of the batches, for the message.
    Raises: CalibrationError if there are fewer than BATCHES_MIN.
    """
    if len(times.batches) < BATCHES_MIN:
        raise CalibrationError(
            f"{where}: {len(times.batches)} batches carry times, a calibration needs {BATCHES_MIN}\n"
            "hint: the host must report `started_us` and `finished_us` in BatchFinished"
        )
    parts = np.array([[*parts_of(base, one.passes).sum(axis=0), *_of_rows(base, one)] for one in times.batches])
    took_us = np.array([batch.took_us for batch in times.batches], np.float64)
    return TimedBatches(times.batches, parts, took_us, times.left_out)


def _of_rows(base: BaseModel, batch: BatchTime) -> list[float]:
    """Return the parts that BATCH_FEATURES adds to FEATURES, over all passes of a batch."""
    passes = batch.passes
    return [
        float(sum(shape.completed_prompts for shape in passes)),
        float(sum(shape.decode_context_tokens for shape in passes)),
        sum(base.attention_prefill_us(shape) for shape in passes),
    ]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The batches of a run, each tenth predicted by a fit of the other nine."""

    batches: Sequence[BatchTime]
    took_us: Float64s
    before_us: Float64s  # predicted without a correction
    after_us: Float64s  # predicted by the fit without the batch's own tenth
    ratios: Sequence[float]  # measured / predicted of each tenth as a whole, and of each frequent kind and size

    def rows(self) -> list[tuple[ErrorRow, ErrorRow]]:
        """Return the errors without and with correction, by batch mode; the last pair is of all batches."""
        modes = np.array([batch.mode for batch in self.batches])
        found = []
        for mode in [*sorted(set(modes.tolist())), "all"]:
            picked = np.ones(len(modes), np.bool_) if mode == "all" else modes == mode
            measured_us = self.took_us[picked]
            before = error_row(mode, "", measured_us, self.before_us[picked])
            found.append((before, error_row(mode, "", measured_us, self.after_us[picked])))
        return found


def batch_weights(parts: Float64s, took_us: Float64s) -> Float64s:
    """Return the weights of BATCH_FEATURES for single batches: a robust fit, at the level of the total times.

    A robust fit is near the median, and a run is as long as its mean batches. Decodes may have a mean far above their
    median where prompts have not, so the fit is repeated with the times of each kind of batches multiplied by the ratio
    of their total to the fitted one. Batches that took more than STALL times as long as fitted do not count.
    """
    weights = fit_weights(parts, took_us, BATCH_FEATURES)
    prompts = has_prompts(parts)
    kinds = [kind for kind in (prompts, ~prompts) if kind.sum() >= LEVEL_MIN]
    levels = np.ones(len(took_us))
    for _ in range(LEVEL_ROUNDS if len(kinds) > 1 else 0):
        for kind in kinds:
            levels[kind] *= _level(parts[kind] @ weights, took_us[kind])
        weights = fit_weights(parts, took_us * levels, BATCH_FEATURES)
    found: Float64s = weights * _level(parts @ weights, took_us)
    return found


def _level(fitted_us: Float64s, took_us: Float64s) -> float:
    """Return the ratio of the total times, measured to fitted, without stalls; 1 if all batches stalled."""
    usual = took_us <= STALL * fitted_us
    return float(took_us[usual].sum() / fitted_us[usual].sum()) if usual.any() else 1.0


def has_prompts(parts: Float64s) -> NDArray[np.bool_]:
    """Return which batches extend prompts, bool [batches]; `parts` as in `TimedBatches`."""
    found: NDArray[np.bool_] = parts[:, BATCH_FEATURES.index("attention_prefill")] > 0.0
    return found


def held_out(timed: TimedBatches) -> HeldOut:
    """Predict each tenth of a run, in the order of time, by a fit of the other nine.

    Each kind and size of batches that is frequent enough is also predicted by a fit of all others. This shows the error
    for loads whose batches have other shapes.
    """
    count = len(timed.took_us)
    after_us = np.empty(count)
    ratios = []
    for mask, _ in left_out((np.arange(count) * BLOCKS // count).tolist()):
        after_us[mask] = timed.parts[mask] @ batch_weights(timed.parts[~mask], timed.took_us[~mask])
        ratios.append(float(timed.took_us[mask].sum() / after_us[mask].sum()))
    kinds = [(batch.mode, (batch.size - 1).bit_length()) for batch in timed.batches]
    for mask, _ in left_out(kinds):
        if KIND_MIN <= mask.sum() <= count // 2:
            predicted_us = timed.parts[mask] @ batch_weights(timed.parts[~mask], timed.took_us[~mask])
            usual = timed.took_us[mask] <= STALL * predicted_us
            if usual.any():
                ratios.append(float(timed.took_us[mask][usual].sum() / predicted_us[usual].sum()))
    return HeldOut(timed.batches, timed.took_us, timed.uncorrected_us, after_us, ratios)


def calibration_of_batches(
    timed: TimedBatches,
    held: HeldOut,
    *,
    engine: str,
    engine_version: str,
    base: BaseModel,
    date: str,
    source: CalibrationSource,
    notes: Sequence[str] = (),
) -> Calibration:
    """Fit single batches. Residuals are those of the tenths of the run, each predicted by the other nine.

    Args:
        held: the result of `held_out(timed)`.
    """
    weights = batch_weights(timed.parts, timed.took_us)
    single, prompts = np.minimum(timed.took_us / (timed.parts @ weights), STALL), has_prompts(timed.parts)
    by_kind = min(prompts.sum(), (~prompts).sum()) >= LEVEL_MIN
    kinds = [~prompts, prompts] if by_kind else [np.ones_like(prompts)]
    spreads, varied = [spread_of(single[kind]) for kind in kinds], np.zeros(len(single))
    for kind, spread in zip(kinds, spreads, strict=True):
        varied[kind] = deviations(single[kind], spread)
    residuals = [
        Residuals.of(
            held.ratios,
            metric="time",
            population="seen",
            method=f"one of {BLOCKS} parts of the run, or one kind and size of batches, left out",
        )
    ]
    before, after = held.rows()[-1]
    errors = f"median {before.error:.1%} -> {after.error:.1%}, P95 {before.error_p95:.1%} -> {after.error_p95:.1%}"
    return Calibration(
        engine=engine,
        engine_version=engine_version,
        gpu=base.gpu.name,
        models=(base.model.name,),
        date=date,
        base=str(base.describe()["kind"]),
        cpu="separate",
        correction=correction_of(weights),
        spread=spreads[0],
        prompt_spread=spreads[1] if by_kind else msgspec.UNSET,
        lasting_spread=lasting_spread(varied),
        residuals=(*residuals, *UNSEEN_MODELS),
        sources=(source,),
        notes=(
            f"of one run, on {base.split}: other degrees of parallelism were not seen",
            f"error of held-out batches: {errors}",
            *notes,
        ),
        layouts=(str(base.split),),
    )


def with_lane(calibration: Calibration, lane: CpuModel | None) -> Calibration:
    """Return a calibration with the engine's CPU time around its batches; None: it was not measured."""
    return calibration if lane is None else replace(calibration, lane=lane)


def with_client(calibration: Calibration, twin: Twin) -> Calibration:
    """Return a calibration of batches with the front end, and with residuals of TTFT, as a client measured them."""
    frontend_us = round(twin.frontend_us, 1)
    residuals = Residuals.of(
        twin.ratios("ttft", BLOCKS),
        metric="ttft",
        population="seen",
        method=f"one of {BLOCKS} parts of the client's requests",
    )
    return replace(
        calibration,
        correction=replace(calibration.correction, frontend_us=frontend_us),
        residuals=(*(r for r in calibration.residuals if (r.metric, r.population) != ("ttft", "seen")), residuals),
    )


# ------------------------------------------------------------------------------------------------------ operator tables

DECODES = [decode_shape(rows, context) for rows in (1, 4, 16, 64, 256) for context in (512, 2048, 8192)]
EXTENDS = [extend_shape(tokens) for tokens in (64, 256, 1024, 4096, 8192)]


def calibration_of_tables(
    bases: Sequence[RooflineModel], tables: OperatorTables, *, engine: str, engine_version: str, date: str
) -> Calibration:
    """Fit the weights of kernels and collectives to tables, over the batches DECODES and EXTENDS of some models.

    Batches for which the tables would have to be extrapolated are left out. Residuals come from leaving out one batch
    and, with MODELS_MIN models, one model.
    Raises: CalibrationError if fewer than POINTS_MIN batches are left.
    """
    parts, took_us, models = [], [], []
    requested = 0
    for base in bases:
        measured = MeasuredModel(base, tables)
        for shape in (*DECODES, *EXTENDS):
            requested += 1
            measured.forget()
            us = measured.batch_us(shape).mean_us
            if not measured.extrapolated:
                parts.append(parts_of(base, [shape])[0] * [1.0, 1.0, 0.0, 0.0, 0.0])
                took_us.append(us)
                models.append(base.model.name)
    if len(took_us) < POINTS_MIN:
        raise CalibrationError(
            f"the tables of {tables.gpu} cover {len(took_us)} of {requested} batches of these models"
        )
    features, times_us = np.array(parts), np.array(took_us)

    def left_out_residuals(groups: Sequence[object], population: Population, method: str) -> Residuals:
        ratios = np.empty(len(times_us))
        for mask, _ in left_out(groups):
            ratios[mask] = times_us[mask] / (features[mask] @ fit_weights(features[~mask], times_us[~mask]))
        return Residuals.of(ratios, metric="time", population=population, method=method)

    residuals = [left_out_residuals(range(len(times_us)), "seen", "one batch left out")]
    if len(set(models)) >= MODELS_MIN:
        residuals.append(left_out_residuals(models, "unseen", "one model left out"))
    else:
        residuals += UNSEEN_MODELS
    weights = fit_weights(features, times_us)
    return Calibration(
        engine=engine,
        engine_version=engine_version,
        gpu=tables.gpu,
        models=tuple(sorted(set(models))),
        date=date,
        correction=correction_of(weights * [1.0, 1.0, 0.0, 0.0, 0.0]),
        residuals=tuple(residuals),
        sources=tuple(
            CalibrationSource(kind="operator_tables", file=t.file, sha256=t.sha256, rows_used=len(t.latency_us))
            for t in tables.files
        ),
        notes=("kernels and collectives alone: what an engine does around them is not in it",),
    )


# ---------------------------------------------------------------------------------------------------------- provenance


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file; for a folder, that of the names and digests of its files, sorted by name."""
    digest = hashlib.sha256()
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file():
                digest.update(f"{file.name} {sha256_of(file)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
