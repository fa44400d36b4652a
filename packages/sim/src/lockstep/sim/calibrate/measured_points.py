"""Means of measured runs as serving points: conversion, a fit for few points, and the errors before and after.

points, left_out = serving_points_of(measured, facts)
found = fit_of_points(points, date="2026-11-26", sources=[...])     # the calibration, and each point left out in turn
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from lockstep.sim.calibrate.calibrate import (
    POINTS_MIN,
    PointTrials,
    calibration_of_points,
    left_out_ratios,
)
from lockstep.sim.calibrate.load_runs import Floats, MeasuredPoint, ServerFacts
from lockstep.sim.calibrate.serving_points import (
    CLIENTS,
    ENGINES,
    FP8_KV,
    KV_DTYPES,
    OPTIONAL,
    PRECISIONS,
    REQUIRED,
    UNIFORM_CAMPAIGN,
    UNIFORM_FROM,
    ServingPoint,
    play,
)
from lockstep.sim.catalogue import load_engine, load_gpu, load_model
from lockstep.sim.cost import Calibration, CalibrationError, CapacityError, CatalogueError
from lockstep.sim.cost.calibration import UNSEEN_MODELS, CalibrationSource
from lockstep.sim.cost.engines import release_key
from lockstep.sim.cost.fit import correction_of, fit_weights
from lockstep.sim.cost.models import check_split


@dataclass(frozen=True)
class PointErrors:
    """A point, and predicted / measured - 1 of it without and with a calibration that was fitted without it."""

    name: str
    tpot: tuple[float, float]  # before, after
    ttft: tuple[float, float]
    tpot_ms: float  # measured
    ttft_ms: float


@dataclass(frozen=True)
class PointsCalibration:
    """The calibration of points, with how it was tested."""

    calibration: Calibration
    errors: tuple[PointErrors, ...]
    method: str  # what was kept aside


def serving_points_of(
    measured: Sequence[MeasuredPoint], facts: ServerFacts
) -> tuple[list[ServingPoint], dict[str, int]]:
    """Return measured means as serving points, and by reason the number of those that are not modelled.

    An open loop becomes a closed one with as many requests in progress as it had on average.
    Args:
        facts: what the user states of the server; it replaces what the files state.
    Raises: CalibrationError, CatalogueError.
    """
    found: list[ServingPoint] = []
    left_out: dict[str, int] = {}
    for row, one in enumerate(measured, 1):
        own = facts.over(one.facts)
        _check_facts(own, one.name)
        try:
            point = _serving_point(row, one, own)
            check_split(point.model, point.split)
        except (CatalogueError, CapacityError) as error:
            reason = str(error).splitlines()[0]
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        if any(point.key == other.key for other in found):
            left_out["the same conditions again"] = left_out.get("the same conditions again", 0) + 1
            continue
        found.append(point)
    return found, left_out


def _check_facts(facts: ServerFacts, name: str) -> None:
    if facts.engine not in ENGINES:
        got = f"`{facts.engine}`" if facts.engine else "nothing"
        raise CalibrationError(f"{name}: `engine` must be one of {', '.join(ENGINES)}, got {got}\nhint: --engine vllm")
    for key, hint in (("model", "--model qwen3-8b"), ("gpu", "--gpu h100")):
        if not getattr(facts, key):
            raise CalibrationError(f"{name}: the file does not state the {key}\nhint: {hint}")


def _serving_point(row: int, one: MeasuredPoint, facts: ServerFacts) -> ServingPoint:
    precision = facts.weights_dtype or ("fp8" if facts.model.lower().endswith("-fp8") else "bf16")
    if precision not in PRECISIONS:
        raise CatalogueError(f"weights in {precision} are not modelled")
    weights = PRECISIONS[precision]
    kv_dtype = KV_DTYPES.get(facts.kv_dtype or "", "fp8" if facts.engine in FP8_KV and weights == "fp8" else "bf16")
    uniform = one.lengths_from < 1.0
    return ServingPoint(
        row=row,
        engine=facts.engine,
        engine_version=facts.engine_version,
        model=load_model(facts.model.removesuffix("-FP8").removesuffix("-fp8")),
        gpu=load_gpu(facts.gpu),
        tp=facts.tp or 1,
        ep=facts.ep or 1,
        weights_dtype=weights,
        kv_dtype=kv_dtype,
        attention_backend=facts.attention_backend,
        prompt_tokens=max(round(one.prompt_tokens), 1),
        output_tokens=max(round(one.output_tokens), 2),
        lengths_from=one.lengths_from,
        lengths_known=uniform,
        concurrency=max(round(one.in_progress), 1),
        ttft_us=1e6 * one.ttft_s,
        tpot_us=1e6 * one.tpot_s,
    )


def fit_of_points(
    points: Sequence[ServingPoint], *, date: str, sources: Sequence[CalibrationSource]
) -> PointsCalibration:
    """Fit points of one engine and GPU; each point is predicted by a fit of the others.

    With fewer than POINTS_MIN points the fit is to TPOT alone, and TTFT is kept aside. Intervals are then those of
    models outside of a fit.
    """
    engines = sorted({point.engine for point in points})
    if len(engines) > 1:
        raise CalibrationError(f"results of {', '.join(engines)}\nhint: give those of one engine, or --engine")
    gpus = sorted({point.gpu.name for point in points})
    if len(gpus) > 1:
        raise CalibrationError(f"results on {', '.join(gpus)}\nhint: give those of one GPU, or --gpu")
    trial = PointTrials.of(points)
    rows = trial.rows(engines[0])
    if len(points) < POINTS_MIN:
        return _fit_of_few(trial, date, sources)
    calibration = calibration_of_points(trial, engines[0], date=date, sources=sources)
    ratios = left_out_ratios(trial, rows, list(range(len(rows))))
    before = of_engines(points)
    errors = tuple(
        PointErrors(
            point.title,
            tpot=(float(before["tpot_us"][row] / point.tpot_us - 1.0), float(1.0 / ratios["time"][row] - 1.0)),
            ttft=(float(before["ttft_us"][row] / point.ttft_us - 1.0), float(1.0 / ratios["ttft"][row] - 1.0)),
            tpot_ms=point.tpot_us / 1e3,
            ttft_ms=point.ttft_us / 1e3,
        )
        for row, point in enumerate(points)
    )
    return PointsCalibration(calibration, errors, "each point predicted by a fit of the others")


def of_engines(points: Sequence[ServingPoint]) -> dict[str, Floats]:
    """Return `tpot_us` and `ttft_us` of points, float64 [points], as simulated without a calibration of the user.

    These are times of the catalogue's engines, which `lockstep simulate` has for the same load.
    """
    client = CLIENTS[next(iter(CLIENTS))]
    found: dict[str, list[float]] = {"tpot_us": [], "ttft_us": []}
    for point in points:
        spec, _ = load_engine(point.engine)
        release = point.engine_version if release_key(point.engine_version) else ""
        calibration = spec.calibration(point.model, point.gpu.name, point.weights_dtype, release)
        played = play(point, client, calibration)
        found["tpot_us"].append(played.tpot_us)
        found["ttft_us"].append(played.ttft_us + calibration.correction.frontend_us)
    return {name: np.array(values, np.float64) for name, values in found.items()}


def _fit_of_few(trial: PointTrials, date: str, sources: Sequence[CalibrationSource]) -> PointsCalibration:
    points = trial.points
    rows = trial.rows(points[0].engine)
    client = next(iter(CLIENTS))
    parts = trial.parts("tpot_parts", rows, client)
    weights = fit_weights(parts, trial.measured_us("tpot_us", rows))
    tpot_us = parts @ weights
    ttft_us = trial.parts("ttft_parts", rows, client) @ weights
    before = of_engines(points)
    errors = tuple(
        PointErrors(
            point.title,
            tpot=(float(before["tpot_us"][row] / point.tpot_us - 1.0), float(tpot_us[row] / point.tpot_us - 1.0)),
            ttft=(float(before["ttft_us"][row] / point.ttft_us - 1.0), float(ttft_us[row] / point.ttft_us - 1.0)),
            tpot_ms=point.tpot_us / 1e3,
            ttft_ms=point.ttft_us / 1e3,
        )
        for row, point in enumerate(points)
    )
    calibration = Calibration(
        engine=points[0].engine,
        engine_version=points[0].engine_version,
        gpu=points[0].gpu.name,
        models=tuple(sorted({point.model.name for point in points})),
        date=date,
        base=trial.base,
        cpu="included",
        correction=correction_of(weights),
        residuals=(*(replace(one, population="seen") for one in UNSEEN_MODELS), *UNSEEN_MODELS),
        sources=tuple(sources),
        notes=(f"fitted to the TPOT of {len(points)} points; intervals are those of models outside of a fit",),
        layouts=tuple(sorted({str(point.split) for point in points})),
        dtypes=tuple(sorted({(point.weights_dtype, point.kv_dtype) for point in points})),
    )
    return PointsCalibration(calibration, errors, "TTFT kept aside; TPOT is what was fitted")


def write_points(path: Path, points: Sequence[ServingPoint]) -> None:
    """Write points as the CSV that `lockstep calibrate points` reads."""
    columns = (*REQUIRED, *(name for name in OPTIONAL if name not in ("dp", "suspect")))
    precisions = {dtype: name for name, dtype in reversed(PRECISIONS.items())}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for point in points:
            known = f"{UNIFORM_CAMPAIGN}: uniform" if point.lengths_from == UNIFORM_FROM else ""
            writer.writerow(
                {
                    "engine": point.engine, "model": point.model.name, "gpu": point.gpu.name, "tp": point.tp,
                    "precision": precisions[point.weights_dtype], "isl": point.prompt_tokens,
                    "osl": point.output_tokens, "concurrency": point.concurrency,
                    "ttft_ms": f"{point.ttft_us / 1e3:.3f}", "tpot_ms": f"{point.tpot_us / 1e3:.4f}",
                    "engine_version": point.engine_version, "kv_dtype": point.kv_dtype,
                    "attention_backend": point.attention_backend, "ep": point.ep, "length_dist": known,
                    "prefill_tokens": point.prefill_tokens or "", "receive_interval": point.receive_interval,
                    "overlap": "yes" if point.overlaps else "", "extra_users": point.extra_users or "",
                }
            )  # fmt: skip


def median_errors(errors: Sequence[PointErrors], metric: str) -> tuple[float, float]:
    """Return the medians of |error| of `tpot` or `ttft`, before and after."""
    pairs = np.abs(np.array([getattr(one, metric) for one in errors]))
    before, after = np.median(pairs, axis=0).tolist()
    return before, after
