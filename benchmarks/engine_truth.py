"""How true an engine of the catalogue is: errors and coverage by groups that were left out of the fit.

Every group of the serving points of a file (a family of models, GPU, engine, tensor-parallel size, band of concurrency,
precision) is left out in turn, and predicted by a fit to the rest. Its 90 % interval comes from the errors of the other
groups of the same kind, each left out of its own fit. Beside it stands the uncorrected roofline with its own interval,
`--engine none`. Rows with text in the column `aside` are in no fit; they are predicted at the end, as kept aside.

    python benchmarks/engine_points.py silicon_sample.csv --out engine_points.csv
    LOCKSTEP_DATA=... python benchmarks/engine_truth.py engine_points.csv --cache DIR [--json FILE]
    python benchmarks/engine_truth.py engine_points.csv --cache DIR --write DATE   # fit, write catalogue/engines
    python benchmarks/engine_truth.py other.csv --cache DIR --catalogue            # other points, engines as shipped
    python benchmarks/engine_truth.py engine_points.csv --cache DIR --beside FILE  # of aiconfigurator_points.py
    python benchmarks/engine_truth.py engine_points.csv --cache DIR --widths       # of levels, by the fit

Simulated: the figures are the same on every machine. Schedules of points are kept in the cache, so that a change of the
fit takes seconds. How to read the figures: docs/validation.md, section 10.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lockstep.sim.catalogue as catalogue
from lockstep.sim.calibrate.calibrate import sha256_of
from lockstep.sim.calibrate.engine_fit import (
    COSTS,
    METRICS,
    EngineFacts,
    EngineTrial,
    Fitted,
    Ratios,
    engine_of,
    fit_trial,
    part_of,
    predicted_us,
    release_of,
    residuals_of,
    schedule_of,
)
from lockstep.sim.calibrate.levels import LevelFit
from lockstep.sim.calibrate.serving_points import ServingPoint, read_serving_points
from lockstep.sim.cost import CalibrationError, CapacityError
from lockstep.sim.cost.calibration import COVERAGE, UNCALIBRATED, CalibrationSource, Metric
from lockstep.sim.cost.engines import EngineCalibration, GpuCard

Float64s = NDArray[np.float64]
Rows = NDArray[np.int64]
Figures = dict[str, Any]

POINTS_MIN = 5  # a group has a row from this number of points on
SAME = 0.03  # relative difference of TPOT up to which two points are one measurement
TPOT_MAX, TTFT_MAX, RATE_MAX = 0.10, 0.20, 0.10  # bars of median absolute errors; no group above twice that
COVERED_MIN, COVERED = 0.75, (0.85, 0.95)  # of each group; of all points

FAMILIES = {
    "deepseek": "DeepSeek", "gpt-oss": "gpt-oss", "llama": "Llama", "minimax": "MiniMax", "qwen3": "Qwen3",
    "kimi": "Kimi",
}  # fmt: skip


def family(point: ServingPoint) -> str:
    """Return the family of a model; dense and sparse models of one name are two families."""
    name = next((title for start, title in FAMILIES.items() if point.model.name.startswith(start)), point.model.name)
    sparse = point.model.experts is not None
    return f"{name} {'with experts' if sparse else 'dense'}"


def band(point: ServingPoint) -> str:
    """Return the band of a concurrency."""
    return "1 to 8 users" if point.concurrency <= 8 else "16 to 32 users" if point.concurrency <= 32 else "64 users up"


KINDS: dict[str, Callable[[ServingPoint], Hashable]] = {
    "family": family,
    "model": lambda point: point.model.name,
    "gpu": lambda point: point.gpu.name,
    "engine": lambda point: point.engine,
    "tp": lambda point: f"tp {point.tp}",
    "concurrency": band,
    "precision": lambda point: point.weights_dtype,
    "engine and model": lambda point: f"{point.engine}, {point.model.name}",
    "cell": lambda point: f"{point.engine} {point.gpu.name} {point.model.name}",
}
INTERPOLATED = ("tp", "concurrency")  # kinds that a fit interpolates: few groups do not widen their intervals
LARGE = {"chunked_prefill_size": 8192, "max_prefill_tokens": 8192, "max_running_requests": 256}
FACTS = {
    "vllm": EngineFacts(title="vLLM", profile="vllm", release="0.19.0", large_gpu_settings=LARGE),
    "sglang": EngineFacts(title="SGLang", profile="sglang", release="0.5.9"),
    "trtllm": EngineFacts(
        title="TensorRT-LLM", profile="vllm", release="1.2.0", settings={"reserve": "full"}, large_gpu_settings=LARGE
    ),
    "lockstep": EngineFacts(title="Lockstep", profile="lockstep", release="0.1"),
}


@dataclass(frozen=True)
class Predicted:
    """Ratios measured / predicted of points, and the interval of each ratio, all float64 [points]."""

    tpot: Float64s
    ttft: Float64s
    rate: Float64s  # output tokens per second
    tpot_ends: tuple[Float64s, Float64s]
    ttft_ends: tuple[Float64s, Float64s]

    def figures(self, rows: NDArray[np.int64]) -> Figures:
        """Return errors and coverage of some points."""
        found: Figures = {"points": len(rows)}
        for name, ratios in (("tpot", self.tpot), ("ttft", self.ttft), ("rate", self.rate)):
            errors = 1.0 / ratios[rows] - 1.0
            found[name] = {
                "bias": round(float(np.median(errors)), 4),
                "median": round(float(np.median(np.abs(errors))), 4),
                "p90": round(float(np.quantile(np.abs(errors), 0.9)), 4),
            }
        for name, ratios, (low, high) in (
            ("tpot", self.tpot, self.tpot_ends),
            ("ttft", self.ttft, self.ttft_ends),
        ):
            inside = (low[rows] <= ratios[rows]) & (ratios[rows] <= high[rows])
            found[name]["covered"] = round(float(inside.mean()), 4)
            found[name]["interval"] = [round(float(np.median(low[rows])), 3), round(float(np.median(high[rows])), 3)]
        return found


def rate_of(points: Sequence[ServingPoint], tpot_us: Float64s, ttft_us: Float64s) -> Float64s:
    """Return output tokens per second at fixed concurrency, from TPOT and TTFT."""
    users = np.array([point.concurrency for point in points], np.float64)
    tokens = np.array([(1 + point.lengths_from) / 2 * point.output_tokens for point in points])
    rate: Float64s = 1e6 * users * tokens / (ttft_us + tpot_us * (tokens - 1.0))
    return rate


def predicted(
    trial: EngineTrial, tpot_us: Float64s, ttft_us: Float64s, ends: dict[Metric, tuple[Float64s, Float64s]]
) -> Predicted:
    """Return the ratios of predictions."""
    everything = np.arange(len(trial.points))
    measured_tpot, measured_ttft = trial.measured_us("time", everything), trial.measured_us("ttft", everything)
    rate = rate_of(trial.points, measured_tpot, measured_ttft) / rate_of(trial.points, tpot_us, ttft_us)
    return Predicted(measured_tpot / tpot_us, measured_ttft / ttft_us, 1.0 / rate, ends["time"], ends["ttft"])


def uncorrected(trial: EngineTrial) -> Predicted:
    """Return the predictions of the roofline, with the interval that it states."""
    count = len(trial.points)
    ends: dict[Metric, tuple[Float64s, Float64s]] = {}
    metrics: tuple[Metric, ...] = ("time", "ttft")
    for metric in metrics:
        low, high = UNCALIBRATED.interval(metric)
        ends[metric] = np.full(count, low), np.full(count, high)
    return predicted(trial, trial.kernels_tpot_us, trial.kernels_ttft_us, ends)


def without_groups(trial: EngineTrial, fitted: Rows, kind: str) -> Predicted:
    """Predict each group by a fit to the other groups, with an interval from the errors of the other groups.

    Args:
        fitted: the rows that may be in a fit; other rows are only predicted.
    """
    group_of = KINDS[kind]
    groups = [group_of(point) for point in trial.points]
    count = len(groups)
    whole = fit_trial(trial, fitted)
    us = {"time": np.empty(count), "ttft": np.empty(count)}
    for group in dict.fromkeys(groups):
        held = np.flatnonzero([g == group for g in groups])
        fit = fit_trial(trial, np.array([i for i in fitted if groups[i] != group], np.int64), whole)
        for metric in METRICS:
            us[metric][held] = predicted_us(fit, trial, held, metric)
    everything = np.arange(count)
    ratios: Ratios = {metric: trial.measured_us(metric, everything) / us[metric] for metric in METRICS}
    ends: dict[Metric, tuple[Float64s, Float64s]] = {metric: (np.empty(count), np.empty(count)) for metric in METRICS}
    for group in dict.fromkeys(groups):
        held = np.flatnonzero([g == group for g in groups])
        others = np.array([i for i in fitted if groups[i] != group], np.int64)
        number = 0 if kind in INTERPOLATED else len({groups[i] for i in others})
        for metric, (low, high) in ends.items():
            residuals = residuals_of(ratios[metric][others], number, metric=metric, method="")
            low[held], high[held] = residuals.at([(1.0 - COVERAGE) / 2.0, (1.0 + COVERAGE) / 2.0])
    return predicted(trial, us["time"], us["ttft"], ends)


def by_catalogue(trial: EngineTrial) -> Predicted:
    """Predict points by the engines of the catalogue as they are shipped."""
    count = len(trial.points)
    tpot_us, ttft_us = np.empty(count), np.empty(count)
    ends: dict[Metric, tuple[Float64s, Float64s]] = {
        metric: (np.empty(count), np.empty(count)) for metric in ("time", "ttft")
    }
    for i, point in enumerate(trial.points):
        calibration = catalogue_calibration(point)
        weights = np.array([getattr(calibration.costs, cost.name) for cost in COSTS])
        tpot_us[i], ttft_us[i] = trial.tpot_columns[i] @ weights, trial.ttft_columns[i] @ weights
        for metric, (low, high) in ends.items():
            low[i], high[i] = calibration.interval(metric, model=point.model.name)
    return predicted(trial, tpot_us, ttft_us, ends)


def catalogue_calibration(point: ServingPoint) -> EngineCalibration:
    """Return the calibration of the catalogue's engine for a point; a release that is not stated is the usual one."""
    spec, _ = catalogue.load_engine(point.engine)
    return spec.calibration(point.model, point.gpu.name, point.weights_dtype, release_of(point))


# ---------------------------------------------------------------------------------------------------------- the report


def that_fit(points: Sequence[ServingPoint], cache: Path | None) -> list[ServingPoint]:
    """Return the points that can be simulated, and print the others, such as models that do not fit their GPUs."""
    kept = []
    for point in points:
        try:
            schedule_of(point, cache)
        except (CapacityError, CalibrationError) as error:
            print(f"row {point.row} left out: {str(error).splitlines()[0]}")
            continue
        kept.append(point)
    return kept


def line(title: str, found: Figures) -> str:
    text = f"{title:34} {found['points']:4}"
    for name in ("tpot", "ttft", "rate"):
        one = found[name]
        text += f"  {name} {100 * one['median']:5.1f} ({100 * one['bias']:+6.1f}) p90 {100 * one['p90']:6.1f}"
    for name in ("tpot", "ttft"):
        low, high = found[name]["interval"]
        text += f"  {name} in {100 * found[name]['covered']:4.0f} % of {low:.2f}..{high:.2f}"
    return text


def table(trial: EngineTrial, shown: Rows, kinds: Sequence[str], engines: Callable[[str], Predicted]) -> Figures:
    """Print and return, for every kind, each group of the `shown` points by an engine and by the roofline alone."""
    plain = uncorrected(trial)
    figures: Figures = {}
    for kind in kinds:
        group_of = KINDS[kind]
        groups = [group_of(point) for point in trial.points]
        found = engines(kind)
        figures[kind] = {}
        print(f"== by {kind}")
        for group in [*sorted({groups[i] for i in shown}, key=str), None]:
            rows = shown if group is None else np.array([i for i in shown if groups[i] == group], np.int64)
            if len(rows) < POINTS_MIN:
                continue
            title = "all" if group is None else str(group)
            figures[kind][title] = {"engine": found.figures(rows), "none": plain.figures(rows)}
            print(line(title, found.figures(rows)))
            print(line("  --engine none", plain.figures(rows)), flush=True)
    return figures


BARS = {"tpot": TPOT_MAX, "ttft": TTFT_MAX, "rate": RATE_MAX}


def outside(found: Figures, name: str, *, whole: bool) -> bool:
    """Return whether the coverage of a quantity misses its bar; `whole`: of all points of a kind, not of a group."""
    least, most = COVERED if whole else (COVERED_MIN, 1.0)
    return bool(not least <= found[name]["covered"] <= most)


def markdown(figures: Figures) -> str:
    """Return figures as the table of docs/validation.md: medians of absolute errors, and shares inside intervals.

    Figures of the engine that miss a bar are bold.
    """
    lines = [
        "| left out | points | TPOT | kernels | TTFT | kernels | throughput | kernels | inside 90 % | kernels |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def shown(share: float, missed: bool, digits: int = 1) -> str:
        text = f"{100 * share:.{digits}f}"
        return f"**{text}**" if missed else text

    for kind, groups in figures.items():
        for group, both in groups.items():
            ours, plain = both["engine"], both["none"]
            cells = []
            for name, bar in BARS.items():
                median = ours[name]["median"]
                cells += [shown(median, median > bar), shown(plain[name]["median"], False)]
            for one in (ours, plain):
                missed = [one is ours and outside(one, name, whole=group == "all") for name in ("tpot", "ttft")]
                covered = one["tpot"]["covered"], one["ttft"]["covered"]
                cells.append(", ".join(map(shown, covered, missed, (0, 0))))
            title = f"all, by {kind}" if group == "all" else group
            lines.append(f"| {title} | {ours['points']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def misses(figures: Figures) -> list[str]:
    """Return the groups that miss a bar."""
    found = []
    for kind, groups in figures.items():
        for group, both in groups.items():
            one = both["engine"]
            for name, most in BARS.items():
                if one[name]["median"] > most:
                    twice = ", above twice" if one[name]["median"] > 2 * most else ""
                    found.append(f"{kind} {group}: {name} {100 * one[name]['median']:.1f} %{twice}")
                if name != "rate" and outside(one, name, whole=group == "all"):
                    found.append(f"{kind} {group}: {name} in {100 * one[name]['covered']:.0f} % of intervals")
    return found


def beside(trial: EngineTrial, path: Path, fitted: Rows) -> None:
    """Print the errors of another tool's predictions beside ours, for each engine and family of models.

    Ours twice: by a fit without the engine's points of the model, and by the catalogue as shipped.

    Args:
        path: CSV with the columns row, ttft_ms and tpot_ms; an empty value has no prediction.
    """
    with path.open(newline="", encoding="utf-8") as file:
        theirs = {int(row["row"]): row for row in csv.DictReader(file) if row["tpot_ms"]}
    rows = np.array([i for i, point in enumerate(trial.points) if point.row in theirs], np.int64)
    left, shipped = without_groups(trial, fitted, "engine and model"), by_catalogue(trial)
    errors: list[tuple[str, Float64s, Float64s]] = [
        (name, np.abs(1.0 / one.tpot[rows] - 1.0), np.abs(1.0 / one.ttft[rows] - 1.0))
        for name, one in (("ours, left out", left), ("ours, as shipped", shipped))
    ]
    other = [theirs[trial.points[i].row] for i in rows]
    tpot_us, ttft_us = (np.array([1e3 * float(row[name]) for row in other]) for name in ("tpot_ms", "ttft_ms"))
    measured = {metric: trial.measured_us(metric, rows) for metric in METRICS}
    errors.append(("theirs", np.abs(tpot_us / measured["time"] - 1.0), np.abs(ttft_us / measured["ttft"] - 1.0)))
    groups = [f"{trial.points[i].engine}, {family(trial.points[i])}" for i in rows]
    print(f"\n| engine, family | points | {' | '.join(name for name, _, _ in errors)} |")
    print("|---|---|" + "---|" * len(errors))
    for group in [*sorted(set(groups)), "all"]:
        own = np.array([group in ("all", one) for one in groups])
        if own.sum() >= POINTS_MIN:
            cells = " | ".join(
                f"{100 * np.median(tpot[own]):.1f} / {100 * np.median(ttft[own]):.0f}" for _, tpot, ttft in errors
            )
            print(f"| {group} | {own.sum()} | {cells} |")


NEVER_MEASURED = {
    "A100-80G-SXM": "kernels and collectives follow public operator tables of this GPU",
    "L40S": "kernels and collectives follow public operator tables of this GPU",
    "RTX4090": "rates of products and weights follow public micro-benchmarks, the rest the data sheet",
}
"""GPUs that users have and the file lacks, with what their kernels are from."""
MEASURED_RUN = (
    "one run of vLLM 0.19 with Llama-3.1-8B, 300 requests under overload, which was not in the fit: "
    "benchmarks/results/rtx4090_truth.txt"
)


def cards(trial: EngineTrial, fitted: Rows, aside: Sequence[str], fit: LevelFit, engine: str) -> list[GpuCard]:
    """Return what is known of an engine on each GPU: the points of the fit, and errors of those kept aside."""
    found = []
    for gpu in sorted({point.gpu.name for point in trial.points}):
        own = [i for i, point in enumerate(trial.points) if (point.engine, point.gpu.name) == (engine, gpu)]
        within = [i for i in own if i in set(fitted.tolist())]
        models = sorted({f"{trial.points[i].model.name} in {trial.points[i].weights_dtype}" for i in within})
        kept = np.array([i for i in own if aside[i]], np.int64)
        errors = "no point was kept aside"
        if len(kept):
            median = {
                metric: np.median(
                    np.abs(predicted_us(fit, trial, kept, metric) / trial.measured_us(metric, kept) - 1.0)
                )
                for metric in METRICS
            }
            errors = (
                f"{len(kept)} points kept aside: median absolute error of TPOT {100 * median['time']:.0f} %, of TTFT "
                f"{100 * median['ttft']:.0f} %"
            )
        few = len(within) < POINTS_MIN
        found.append(
            GpuCard(
                gpu=gpu,
                fitted_on=f"{len(within)} points: {'; '.join(models)}" if within else "no point of this engine",
                errors=errors,
                not_for="promises: too few points" if few else "models that are far from those of the fit",
            )
        )
    for gpu, kernels in NEVER_MEASURED.items():
        known = MEASURED_RUN if (engine, gpu) == ("vllm", "RTX4090") else "none was measured"
        found.append(
            GpuCard(
                gpu=gpu,
                fitted_on=f"no point; {kernels}; the engine's costs are those common to all GPUs",
                errors=known,
                not_for="promises: intervals are those of GPUs left out of the fit, and called a range",
            )
        )
    return found


def write(
    fitted: Fitted, path: Path, left: dict[str, list[int]], date: str, gpus: Callable[[LevelFit, str], list[GpuCard]]
) -> None:
    """Write the catalogue's entries of all engines."""
    folder = Path(catalogue.__file__).parent / "engines"
    for engine, facts in FACTS.items():
        source = CalibrationSource(
            kind="serving_points",
            file=path.name,
            sha256=sha256_of(path),
            rows_used=len(fitted.trial.rows(engine)),
            rows_left_out=sum(map(len, left.values())),
            why_left_out="; ".join(f"{len(numbers)}: {why}" for why, numbers in left.items()),
        )
        own = gpus(fitted.fit, engine) if len(fitted.trial.rows(engine)) else []
        spec = engine_of(fitted, engine, facts, date=date, sources=[source], gpus=own)
        (folder / f"{engine}.json").write_text(spec.to_json(), encoding="utf-8")
        print(f"{folder.name}/{engine}.json: {spec.costs}")


def widths(fit: LevelFit) -> None:
    """Print the width of every level and cost, as it is stated and as groups deviate (`LevelFit.shown_deviations`)."""
    for level in fit.levels:
        shown = fit.shown_deviations(level.name)
        count = sum(name == level.name for name, _ in fit.groups)
        print(f"{level.name}, {count} groups: stated, shown")
        for cost, width in shown.items():
            print(f"  {cost:18} {level.deviations[cost]:.3f} {width:.3f}")


def aside_of(path: Path, points: Sequence[ServingPoint]) -> list[str]:
    """Return for each point why it is kept aside; empty: it is not."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [rows[point.row - 2].get("aside") or "" for point in points]


def is_published(points: Sequence[ServingPoint]) -> list[bool]:
    """Return which points are among those of $LOCKSTEP_DATA, to which earlier figures of this table refer."""
    path = Path(os.environ.get("LOCKSTEP_DATA", "")) / "published" / "serving_points.csv"
    if not path.is_file():
        return [False] * len(points)
    known = {_conditions(point): point.tpot_us for point in read_serving_points(path)[0]}
    return [abs(known.get(_conditions(point), 0.0) / point.tpot_us - 1.0) < SAME for point in points]


def _conditions(point: ServingPoint) -> Hashable:
    lengths = point.prompt_tokens, point.output_tokens, point.concurrency
    return point.engine, point.model.name, point.gpu.name, point.split, point.weights_dtype, *lengths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, help="file of points, as benchmarks/engine_points.py writes it")
    parser.add_argument("--cache", type=Path, help="folder that keeps the schedules of points")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--write", metavar="DATE", help="fit, and write the catalogue's engines")
    parser.add_argument("--catalogue", action="store_true", help="only test the catalogue's engines as shipped")
    parser.add_argument("--beside", type=Path, help="only compare with another tool's predictions, in this file")
    parser.add_argument("--widths", action="store_true", help="only print the widths of levels, stated and shown")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of groups (default %(default)s)")
    arguments = parser.parse_args()
    path: Path = arguments.points
    points, left = read_serving_points(path)
    print(f"{len(points)} points; left out: " + "; ".join(f"{len(rows)} rows, {why}" for why, rows in left.items()))
    print(f"{path.name}, SHA-256 {sha256_of(path)}\n")
    points = that_fit(points, arguments.cache)
    trial = EngineTrial.of(points, arguments.cache)
    aside = aside_of(path, points)
    kinds = arguments.kinds.split(",")
    fitted = np.flatnonzero([not one for one in aside])
    figures: Figures = {}
    if arguments.beside is not None:
        beside(trial, arguments.beside, fitted)
        return 0
    if arguments.widths:
        widths(fit_trial(trial, fitted))
        return 0
    if arguments.write:
        left = {**left, "kept aside": [points[i].row for i, one in enumerate(aside) if one]}
        whole = Fitted.of(part_of(trial, fitted))
        write(whole, path, left, arguments.write, lambda fit, engine: cards(trial, fitted, aside, fit, engine))
    elif not arguments.catalogue:
        shown = {"points of the fit": fitted, "points published before": np.flatnonzero(is_published(points))}
        predictions = {kind: without_groups(trial, fitted, kind) for kind in kinds}
        for title, rows in shown.items():
            print(f"\n==== {title}: {len(rows)}, each group left out of the fit")
            figures[title] = table(trial, rows, kinds, predictions.__getitem__)
    found = by_catalogue(trial)
    for why in ("layout", "cell", *(("",) if arguments.catalogue else ())):
        rows = np.flatnonzero([one == why for one in aside])
        title = f"kept aside: {why}" if why else "not kept aside"
        print(f"\n==== {title}: {len(rows)}, engines as shipped")
        figures[title] = table(trial, rows, kinds, lambda kind: found) if len(rows) else {}
    missed = {title: misses(one) for title, one in figures.items()}
    for title, one in figures.items():
        print(f"\n{title}\n{markdown(one)}")
    for title, groups in missed.items():
        print(f"\nmissed, {title}: " + ("; ".join(groups) or "no bar"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 1 if any(missed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
