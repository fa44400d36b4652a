"""A calibration from the times of single requests: fitted to the first requests of a run, tested on the others.

**The fit** has two numbers: a factor on the time of kernels, collectives included, and a time per pass. For each pair
the run is simulated again, because with another speed other requests run together. The pair with the smallest spread
of measured less simulated times wins: time to first token and end-to-end time of each fitted request. A delay that all
of them have in common does not count; it is work outside of the engine's passes (`frontend_us`), or the first pass of a
fresh engine. A weak prior (`cost/fit.py: PRIOR`) decides where the spread does not.

**The test** replays the whole run without the calibration, with it, and at both ends of its interval, and compares the
requests that were kept aside. Nothing measured of them enters the fit; their lengths and times of sending do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from msgspec.structs import replace

from lockstep.sim.calibrate.load_runs import Floats, LoadRun, ServerFacts
from lockstep.sim.calibrate.replayed_run import ReplayedServer, SimulatedTimes
from lockstep.sim.cost import Calibration, CalibrationError
from lockstep.sim.cost.calibration import (
    UNSEEN_MODELS,
    CalibrationSource,
    Correction,
    Metric,
    Residuals,
)
from lockstep.sim.cost.fit import PRIOR, relative_shift

FIT_SHARE = 0.2
FITTED_MIN, FITTED_MAX = 20, 500  # requests; more change the fit less than a replay differs from a server
KEPT_MIN = 30  # requests kept aside
BLOCKS, BLOCK_MIN = 10, 10  # parts of the requests kept aside, by order, and requests in each
OUTLIER = 3.0  # robust standard deviations beyond which a lateness counts no more
PRIOR_WEIGHT = 0.01  # share of the spread by which one standard deviation from the prior counts
START, STRIDE, STRIDE_MIN = (1.0, 300.0), (0.08, 300.0), 0.002
KERNELS_RANGE = (0.05, 20.0)
UNQUEUED_S = 0.05  # wait for admission, at most, of a request whose first token shows the time of the front end
UNQUEUED_SHARE = 0.5  # of the fitted requests, at least: a run that queues from its start does not show the front end
COLD_REQUESTS = 5  # first requests of a run, which may meet a server that has just started
BETWEEN_LOADS = {"time": 0.06, "ttft": 0.14}
"""Standard deviation of log(measured / predicted) for another load of the same model, GPU and engine.

Not seen in one run, and added to the spread that the run shows. Source: docs/decisions/0100-calibration-of-requests.md.
"""


@dataclass(frozen=True)
class RequestFit:
    """A fit to the first requests of a run."""

    correction: Correction
    fitted: int  # requests
    spread_s: float  # of what is left of their lateness
    delay_s: float  # that all fitted requests have in common
    replays: int


def split_rows(run: LoadRun, share: float) -> int:
    """Return how many first requests are fitted.

    Raises: CalibrationError if `share` is no share, or too few requests are left on either side.
    """
    if not 0.0 < share < 1.0:
        raise CalibrationError(f"`fit_share` must be above 0 and below 1, got `{share:g}`\nhint: 0.2")
    count = len(run.requests)
    fitted = min(max(math.ceil(share * count), FITTED_MIN), FITTED_MAX)
    if count - fitted < KEPT_MIN:
        raise CalibrationError(
            f"{run.name}: {count} answered requests, a fit with a test needs {FITTED_MIN + KEPT_MIN}"
            f" and at --fit-share {share:g} at least {math.ceil(KEPT_MIN / (1 - share))}\n"
            "hint: measure a longer run, or give it with --test and another one to fit"
        )
    return fitted


def fit_requests(servers: Sequence[tuple[ReplayedServer, LoadRun, int]], draft: Calibration) -> RequestFit:
    """Fit the first requests of one or several runs of a server.

    Args:
        servers: setup, run and number of fitted requests of each.
        draft: calibration whose correction is replaced.
    """
    replays = 0

    def lateness(kernels: float, step_us: float) -> list[tuple[Floats, Floats]]:
        nonlocal replays
        replays += len(servers)
        late = []
        for server, run, rows in servers:
            replay = server.play(run, _corrected(draft, kernels, step_us), rows=rows)
            measured = run.requests
            late.append((measured.ttft_s[:rows] - replay.ttft_s, measured.e2e_s[:rows] - replay.e2e_s))
        return late

    def loss(kernels: float, step_us: float) -> float:
        spread = math.sqrt(sum(_spread(np.concatenate(pair)) ** 2 for pair in lateness(kernels, step_us)))
        distance = ((kernels - PRIOR["kernels"][0]) / PRIOR["kernels"][1]) ** 2
        distance += ((step_us - PRIOR["step_us"][0]) / PRIOR["step_us"][1]) ** 2
        return spread * (1.0 + PRIOR_WEIGHT * distance)

    kernels, step_us = compass_search(loss)
    late = lateness(kernels, step_us)
    common = np.concatenate([part for pair in late for part in pair])
    correction = replace(
        _corrected(draft, kernels, step_us).correction,
        frontend_us=round(1e6 * _frontend_s(servers, _corrected(draft, kernels, step_us)), 1),
    )
    spread_s = math.sqrt(sum(_spread(np.concatenate(pair)) ** 2 for pair in late) / len(late))
    fitted = sum(rows for _, _, rows in servers)
    return RequestFit(correction, fitted, spread_s, float(np.median(common)), replays)


def _corrected(draft: Calibration, kernels: float, step_us: float) -> Calibration:
    correction = Correction(kernels=round(kernels, 5), collectives=round(kernels, 5), step_us=round(step_us, 2))
    return replace(draft, correction=correction)


def _spread(late: Floats) -> float:
    """Return a standard deviation around the median, in which outliers count up to OUTLIER times the usual one."""
    off = np.abs(late - np.median(late))
    usual = 1.4826 * float(np.median(off))
    if usual > 0.0:
        off = np.minimum(off, OUTLIER * usual)
    return float(np.sqrt(np.mean(off**2)))


def _frontend_s(servers: Sequence[tuple[ReplayedServer, LoadRun, int]], calibration: Calibration) -> float:
    """Return the time of a request outside of the engine, from requests that did not wait for admission.

    Behind a queue the lateness is that of all passes before, so it has nothing to do with the front end. If fewer than
    UNQUEUED_SHARE of the fitted requests did not wait, 0.
    """
    predicted, measured, fitted = [], [], 0
    for server, run, rows in servers:
        replay = server.play(run, calibration, rows=rows)
        unqueued = replay.queue_s < UNQUEUED_S
        unqueued[:COLD_REQUESTS] = False
        predicted.append(replay.ttft_s[unqueued])
        measured.append(run.requests.ttft_s[:rows][unqueued])
        fitted += rows
    ours, theirs = np.concatenate(predicted), np.concatenate(measured)
    return relative_shift(ours, theirs) if len(ours) >= UNQUEUED_SHARE * fitted else 0.0


def compass_search(loss: Callable[[float, float], float]) -> tuple[float, float]:
    """Return the kernels' factor and the time per pass with the smallest loss found.

    No derivatives are used: the scheduler's decisions make the loss a function with steps.
    """
    seen: dict[tuple[float, float], float] = {}

    def at(point: tuple[float, float]) -> float:
        key = (round(point[0], 6), round(point[1], 3))
        if key not in seen:
            seen[key] = loss(*key)
        return seen[key]

    point, stride = START, STRIDE
    while stride[0] > STRIDE_MIN:
        around = [
            (min(max(point[0] + i * stride[0], KERNELS_RANGE[0]), KERNELS_RANGE[1]), max(point[1] + j * stride[1], 0.0))
            for i in (-1, 0, 1)
            for j in (-1, 0, 1)
            if i or j
        ]
        best = min(around, key=at)
        if at(best) < at(point):
            point = best
        else:
            stride = (stride[0] / 2, stride[1] / 2)
    return point


# ------------------------------------------------------------------------------------------------------- the part aside

FIGURES = ("TTFT mean", "TTFT p99", "TPOT mean", "TPOT p99", "end to end mean", "end to end p99", "output tokens/s")


@dataclass(frozen=True)
class KeptAside:
    """The requests of one run that were kept aside: measured, before, after, and the interval of the calibration."""

    run: str
    requests: int
    of: int
    measured: dict[str, float]  # by FIGURES: ms, or tokens per s
    before: dict[str, float]
    after: dict[str, float]
    interval: dict[str, tuple[float, float]]
    per_request: dict[
        str, tuple[float, float]
    ]  # median of |predicted / measured - 1| of single requests, before and after
    ratios: dict[Metric, list[float]]  # measured / predicted of each block of requests

    def error(self, figure: str, *, before: bool = False) -> float:
        """Return predicted / measured - 1 of a figure."""
        return (self.before if before else self.after)[figure] / self.measured[figure] - 1.0


def _figures(run: LoadRun, replay: SimulatedTimes | None, rows: slice) -> dict[str, float]:
    """Return FIGURES of some requests: measured, or of a replay."""
    requests = run.requests
    ttft = requests.ttft_s if replay is None else replay.ttft_s
    e2e = requests.e2e_s if replay is None else replay.e2e_s
    tpot = requests.tpot_s if replay is None else replay.tpot_s(requests.output_tokens)
    found: dict[str, float] = {}
    for name, values in (("TTFT", ttft[rows]), ("TPOT", tpot[rows]), ("end to end", e2e[rows])):
        values = values[np.isfinite(values)]
        found[f"{name} mean"] = 1e3 * float(values.mean()) if len(values) else math.nan
        found[f"{name} p99"] = 1e3 * float(np.percentile(values, 99)) if len(values) else math.nan
    if requests.has_clock:
        span_s = float((requests.sent_s + requests.e2e_s).max()) if replay is None else replay.end_s
        found["output tokens/s"] = float(requests.output_tokens.sum()) / span_s  # of the whole run
    return found


def block_ratios(run: LoadRun, replay: SimulatedTimes, fitted: int) -> dict[Metric, list[float]]:
    """Return measured / predicted of TPOT and TTFT, for blocks of consecutive requests behind the fitted ones."""
    requests = run.requests
    count = len(requests) - fitted
    edges = np.linspace(fitted, len(requests), min(BLOCKS, max(count // BLOCK_MIN, 3)) + 1).astype(int)
    found: dict[Metric, list[float]] = {"time": [], "ttft": []}
    pairs: tuple[tuple[Metric, Floats, Floats], ...] = (
        ("time", requests.tpot_s, replay.tpot_s(requests.output_tokens)),
        ("ttft", requests.ttft_s, replay.ttft_s),
    )
    for metric, measured, predicted in pairs:
        for start, stop in pairwise(edges):
            ours, theirs = predicted[start:stop], measured[start:stop]
            good = np.isfinite(ours) & np.isfinite(theirs)
            if good.any():
                found[metric].append(float(theirs[good].mean() / ours[good].mean()))
    return found


def residuals_of(ratios: dict[Metric, list[float]], method: str) -> list[Residuals]:
    """Return residuals of blocks of requests kept aside, widened by BETWEEN_LOADS."""
    found = []
    for metric, values in ratios.items():
        if len(values) < 3:
            continue
        logs = np.log(np.array(values))
        spread = math.hypot(float(logs.std(ddof=1)), BETWEEN_LOADS[metric])
        normal = NormalDist(float(logs.mean()), spread)
        widened = [math.exp(normal.inv_cdf((i + 0.5) / 20)) for i in range(20)]
        residuals = Residuals.of(widened, metric=metric, population="seen", method=method)
        found.append(replace(residuals, count=len(values)))
    return found


def test_of(server: ReplayedServer, run: LoadRun, fitted: int, calibration: Calibration, model: str) -> KeptAside:
    """Replay a whole run without the calibration, with it, and at the ends of its interval."""
    low, high = calibration.interval("time", model=model)
    before, after = server.play(run, None), server.play(run, calibration)
    ends = [server.play(run, calibration, factor=factor) for factor in (low, high)]
    rows = slice(fitted, None)
    measured = _figures(run, None, rows)
    sides = [_figures(run, replay, rows) for replay in ends]
    found = _figures(run, after, rows)
    ttft = calibration.interval("ttft", model=model)
    interval = {}
    for name, value in found.items():
        bounds = sorted((sides[0][name], sides[1][name]))
        if name.startswith("TTFT"):
            bounds = [min(bounds[0], value * ttft[0]), max(bounds[1], value * ttft[1])]
        interval[name] = (bounds[0], bounds[1])
    single = {}
    requests = run.requests
    columns = (
        ("TTFT", requests.ttft_s, before.ttft_s, after.ttft_s),
        ("TPOT", requests.tpot_s, before.tpot_s(requests.output_tokens), after.tpot_s(requests.output_tokens)),
        ("end to end", requests.e2e_s, before.e2e_s, after.e2e_s),
    )
    for name, real, *predicted in columns:
        errors = [float(np.nanmedian(np.abs(one[rows] / real[rows] - 1.0))) for one in predicted]
        single[name] = (errors[0], errors[1])
    return KeptAside(
        run=run.name,
        requests=len(requests) - fitted,
        of=len(requests),
        measured=measured,
        before=_figures(run, before, rows),
        after=found,
        interval=interval,
        per_request=single,
        ratios=block_ratios(run, after, fitted),
    )


def coverage_of(ratios: Sequence[float], metric: Metric) -> tuple[int, int]:
    """Return how many blocks are within the 90 % interval of the other blocks, and how many there are."""
    inside = 0
    for index, ratio in enumerate(ratios):
        others = [*ratios[:index], *ratios[index + 1 :]]
        residuals = residuals_of({metric: others}, "the other blocks")
        if residuals:
            low, high = residuals[0].at([0.05, 0.95])
            inside += bool(low <= ratio <= high)
    return inside, len(ratios)


def calibration_of_requests(
    fit: RequestFit, draft: Calibration, ratios: dict[Metric, list[float]], notes: Sequence[str]
) -> Calibration:
    """Return the calibration of a fit, with the residuals of the requests kept aside."""
    method = "blocks of the requests kept aside, widened for other loads"
    return replace(
        draft,
        correction=fit.correction,
        residuals=(*residuals_of(ratios, method), *UNSEEN_MODELS),
        notes=(
            f"fitted to the times of {fit.fitted:,} requests; {1e3 * fit.spread_s:,.0f} ms (one deviation) are left",
            *notes,
        ),
    )


def draft_calibration(
    server: ReplayedServer, facts: ServerFacts, date: str, sources: Sequence[CalibrationSource]
) -> Calibration:
    """Return a calibration without correction, whose residuals are those of models outside of any fit."""
    unseen = {residuals.metric: residuals for residuals in UNSEEN_MODELS}
    seen = [replace(residuals, population="seen") for residuals in unseen.values()]
    return Calibration(
        engine=facts.engine,
        engine_version=facts.engine_version,
        gpu=server.setup.gpu.name,
        models=(server.setup.model.name,),
        date=date,
        base=str(server.base.describe()["kind"]),
        residuals=tuple(seen),
        sources=tuple(sources),
        layouts=(str(server.setup.split),),
        dtypes=((server.setup.case.weights_dtype, server.setup.case.kv_dtype),),
    )
