"""`lockstep calibrate requests`: from files of load generators to a calibration, and what became better by it.

    found = calibrate_requests(paths, RequestsSource(...))
    found.calibration, found.kept_aside, found.points

Runs with the times of requests are replayed and fitted (`request_fit.py`); results with means only are fitted as
serving points (`measured_points.py`). If there are both, the runs are fitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from lockstep.core.contract.profiles import PROFILES
from lockstep.host.quantization import KvDtype, WeightsDtype
from lockstep.sim.calibrate.importers import ReadingOptions, read_measurements
from lockstep.sim.calibrate.load_runs import LoadRun, Measurements, ServerFacts, turns_of_run
from lockstep.sim.calibrate.measured_points import (
    PointsCalibration,
    fit_of_points,
    serving_points_of,
    write_points,
)
from lockstep.sim.calibrate.replayed_run import ReplayedServer
from lockstep.sim.calibrate.request_fit import (
    FIT_SHARE,
    KeptAside,
    RequestFit,
    block_ratios,
    calibration_of_requests,
    draft_calibration,
    fit_requests,
    split_rows,
    test_of,
)
from lockstep.sim.calibrate.serving_points import ENGINES
from lockstep.sim.catalogue import engine_names, load_gpu
from lockstep.sim.cost import Calibration, CalibrationError
from lockstep.sim.cost.calibration import CalibrationSource, Metric
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.turns import Turns
from lockstep.sim.workload.workload import open_workload

VLLM_LARGE_BYTES = (
    70e9  # of a GPU: vLLM's defaults as a server depend on it (EngineArgs, by usage context, 0.10 to 0.33)
)
VLLM_ON_LARGE = {"chunked_prefill_size": 8192, "max_prefill_tokens": 8192, "max_running_requests": 1024}
VLLM_ON_SMALL = {"chunked_prefill_size": 2048, "max_prefill_tokens": 2048, "max_running_requests": 256}
DTYPES = {"bf16": "bf16", "fp16": "bf16", "bfloat16": "bf16", "float16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class RequestsSource:
    """The server that was measured, how its files are read, and what is kept aside."""

    facts: ServerFacts  # what the user states; it replaces what the files state
    profile: str | None = None  # None: that of the engine
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the scheduler
    attention_dp: int = 1
    mem_fraction: float = 0.9
    fit_share: float = FIT_SHARE
    concurrency: int | None = None  # 0: sent by the clock; None: as the file states or its times show
    workload: str | None = None  # spec of the prompts that were sent, for what they share
    seed: int = 7
    reading: ReadingOptions = field(default_factory=ReadingOptions)


@dataclass(frozen=True)
class RequestsCalibration:
    """The result of `calibrate_requests`."""

    calibration: Calibration
    fit: RequestFit | None = None  # of runs
    kept_aside: tuple[KeptAside, ...] = ()
    points: PointsCalibration | None = None
    ratios: Mapping[Metric, Sequence[float]] = field(default_factory=dict)  # of blocks of the requests kept aside
    remarks: tuple[str, ...] = ()


def calibrate_requests(
    paths: Sequence[Path], source: RequestsSource, *, date: str, tests: Sequence[Path] = (), points: Path | None = None
) -> RequestsCalibration:
    """Read files, fit the first part of each run, and test on the rest and on other runs.

    Args:
        tests: files of runs of the same server that are only tested.
        points: file to which results with means only are written, as serving points.
    Raises: CalibrationError, ConfigError, CatalogueError, CapacityError, WorkloadError.
    """
    found, left_out = read_measurements(paths, source.reading)
    sources = _sources(paths, found, left_out)
    remarks = [f"left out {count:,} results: {reason}" for reason, count in left_out.items()]
    if points is not None and not found.points:
        raise CalibrationError(f"`points`: {paths[0]} has no means of a run\nhint: leave out --points")
    if found.runs:
        if found.points:
            remarks.append(
                f"{len(found.points):,} results with means only were not used: others have times of requests"
            )
        done = _calibrate_runs(found.runs, source, date, sources, tests)
        return _with_remarks(done, remarks)
    if not found.points:
        raise CalibrationError(f"{paths[0]}: no result that is modelled; {'; '.join(remarks)}\nhint: give others")
    if tests:
        raise CalibrationError("`test` needs runs with the times of requests, got means\nhint: leave out --test")
    serving, odd = serving_points_of(found.points, source.facts)
    remarks += [f"left out {count:,} results: {reason}" for reason, count in odd.items()]
    remarks += list(dict.fromkeys(note for point in found.points for note in point.notes))
    if not serving:
        raise CalibrationError(f"{paths[0]}: no result that is modelled; {'; '.join(remarks)}\nhint: give others")
    if points is not None:
        write_points(points, serving)
    fitted = fit_of_points(serving, date=date, sources=sources)
    notes = [] if all(one.is_closed for one in found.points) else ["loads by the clock were played as closed loops"]
    calibration = replace(fitted.calibration, notes=(*fitted.calibration.notes, *notes))
    return RequestsCalibration(calibration, points=fitted, remarks=tuple(remarks))


def _with_remarks(done: RequestsCalibration, remarks: Sequence[str]) -> RequestsCalibration:
    return RequestsCalibration(
        done.calibration, done.fit, done.kept_aside, done.points, done.ratios, (*remarks, *done.remarks)
    )


def _sources(paths: Sequence[Path], found: Measurements, left_out: Mapping[str, int]) -> list[CalibrationSource]:
    """Return the files with their digests; a folder has that of its files."""
    reasons = dict(left_out)
    for run in found.runs:
        for reason, count in run.left_out.items():
            reasons[reason] = reasons.get(reason, 0) + count
    rows = sum(len(run.requests) for run in found.runs) or len(found.points)
    sources = []
    for number, path in enumerate(paths):
        digest = hashlib.sha256()
        files = [path] if path.is_file() else [path / name for name in ("metrics.json", "requests.csv")]
        for file in files:
            if file.is_file():
                digest.update(file.read_bytes())
        first = number == 0  # counts are those of all files together
        sources.append(
            CalibrationSource(
                kind="requests",
                file=path.name,
                sha256=digest.hexdigest(),
                rows_used=rows if first else 0,
                rows_left_out=sum(reasons.values()) if first else 0,
                why_left_out="; ".join(reasons) if first else "",
            )
        )
    return sources


def _calibrate_runs(
    runs: Sequence[LoadRun],
    source: RequestsSource,
    date: str,
    sources: Sequence[CalibrationSource],
    tests: Sequence[Path],
) -> RequestsCalibration:
    facts = _facts_of(runs, source.facts)
    prompts = None if source.workload is None else _prompts(source, runs)
    servers = [(*_server(run, facts, source, prompts), split_rows(run, source.fit_share)) for run in runs]
    others = []
    if tests:
        more, _ = read_measurements(tests, source.reading)
        if not more.runs:
            raise CalibrationError(f"`test`: {tests[0]} has no times of requests\nhint: leave out --test")
        others = [(*_server(run, facts, source, None), 0) for run in more.runs]
    draft = draft_calibration(servers[0][0], facts, date, sources)
    fit = fit_requests(servers, draft)
    fitted = replace(draft, correction=fit.correction)
    ratios: dict[Metric, list[float]] = {"time": [], "ttft": []}
    for server, run, rows in [*servers, *others]:
        for metric, values in block_ratios(run, server.play(run, fitted), rows).items():
            ratios[metric] += values
    calibration = calibration_of_requests(fit, draft, ratios, _notes(servers, facts, source))
    model = servers[0][0].setup.model.name
    kept = tuple(test_of(server, run, rows, calibration, model) for server, run, rows in [*servers, *others])
    return RequestsCalibration(calibration, fit, kept, None, ratios, tuple(_remarks(runs, fit)))


def _facts_of(runs: Sequence[LoadRun], given: ServerFacts) -> ServerFacts:
    """Return the facts of the server of all runs. Raises: CalibrationError if they differ, or one is missing."""
    all_facts = [given.over(run.facts) for run in runs]
    for name, hint in (("model", "--model qwen3-8b"), ("gpu", "--gpu h100"), ("engine", "--engine vllm")):
        values = list(dict.fromkeys(getattr(facts, name) for facts in all_facts if getattr(facts, name)))
        if not values:
            raise CalibrationError(f"{runs[0].name}: the file does not state the {name}\nhint: {hint}")
        if len(values) > 1:
            raise CalibrationError(
                f"runs of different {name}: {', '.join(values)}\nhint: give runs of one server, or {hint}"
            )
    facts = all_facts[0]
    for other in all_facts[1:]:
        facts = facts.over(other)
    return facts


def _prompts(source: RequestsSource, runs: Sequence[LoadRun]) -> Turns:
    """Return the prompts of the one run, from the workload that was sent."""
    if len(runs) > 1:
        raise CalibrationError(f"`workload` has the prompts of one run, got {len(runs)} runs\nhint: give one file")
    assert source.workload is not None
    return open_workload(source.workload, seed=source.seed, digest=False).turns


def _server(
    run: LoadRun, facts: ServerFacts, source: RequestsSource, prompts: Turns | None
) -> tuple[ReplayedServer, LoadRun]:
    if source.concurrency is not None:
        concurrency = source.concurrency or None
        if concurrency is None and not run.requests.has_clock:
            raise CalibrationError(
                f"{run.name}: `concurrency` is 0, but the file has no times of sending\nhint: leave out --concurrency"
            )
        run = LoadRun(run.name, run.form, run.requests, concurrency, run.facts, run.left_out)
    model = facts.model
    is_fp8 = model.lower().endswith("-fp8")
    weights = facts.weights_dtype or ("fp8" if is_fp8 else "")
    scenario = Scenario(
        model=model.removesuffix("-FP8").removesuffix("-fp8"),
        gpu=facts.gpu,
        workload=run.name,
        tp=facts.tp or 1,
        ep=facts.ep or 1,
        attention_dp=source.attention_dp,
        weights_dtype=cast(WeightsDtype, DTYPES.get(weights, weights)) if weights else None,
        kv_dtype=cast(KvDtype, facts.kv_dtype or "bf16"),
        mem_fraction=source.mem_fraction,
        engine=facts.engine if facts.engine in engine_names() else None,
        profile=source.profile or (facts.engine if facts.engine in PROFILES else "vllm"),
        settings=_settings(facts, source),
    )
    return ReplayedServer.of(scenario, turns_of_run(run, prompts), run.name), run


def _settings(facts: ServerFacts, source: RequestsSource) -> dict[str, Any]:
    """Return the scheduler's settings: defaults of the engine that its profile lacks, then the given ones.

    With a profile of the user, the given ones alone.
    """
    if source.profile is not None:
        return dict(source.settings)
    if facts.engine == "vllm":
        large = load_gpu(facts.gpu).memory_bytes >= VLLM_LARGE_BYTES
        return {**(VLLM_ON_LARGE if large else VLLM_ON_SMALL), **source.settings}
    profile = PROFILES.get(facts.engine, PROFILES["vllm"])
    of_engine = {name: value for name, value in ENGINES.get(facts.engine, {}).items() if profile.get(name) != value}
    return {**of_engine, **source.settings}


def _notes(
    servers: Sequence[tuple[ReplayedServer, LoadRun, int]], facts: ServerFacts, source: RequestsSource
) -> list[str]:
    """Return what a later use of the calibration must regard, one sentence each."""
    notes = [f"of {len(servers)} run{'s' if len(servers) > 1 else ''}, on {servers[0][0].setup.split}"]
    for name, value in (("KV", facts.kv_dtype), ("attention backend", facts.attention_backend)):
        if value:
            notes.append(f"{name}: {value}")
    loads = [
        "by the clock" if run.concurrency is None else f"a closed loop of {run.concurrency}" for _, run, _ in servers
    ]
    notes.append(f"load: {', '.join(dict.fromkeys(loads))}")
    if source.workload is None and all((run.requests.cached_tokens < 0).all() for _, run, _ in servers):
        notes.append("prompts were replayed without shared prefixes: the files do not have them")
    return notes


def _remarks(runs: Sequence[LoadRun], fit: RequestFit) -> list[str]:
    lines = []
    for run in runs:
        for reason, count in run.left_out.items():
            lines.append(
                f"{run.name}: {count:,} requests left out ({reason}); the server had their load, the replay has not"
            )
    lines.append(
        f"{fit.replays} replays; fitted requests are {1e3 * fit.delay_s:+,.0f} ms late in the median, "
        f"{1e3 * fit.spread_s:,.0f} ms (standard deviation) are left"
    )
    return lines
