"""Comparison of runs: settings and results that differ, request by request, and reasons why the comparison is not fair.

    found = compare([read_run(Path("runs/a")), read_run(Path("runs/b"))])
    found.settings                        # [Difference("overlap_depth", (1, 0))]; equal settings are left out
    found.figures[0].changes[0].words     # "4.0x lower"
    found.pairs[0].metrics["ttft"].faster_share

The first run is the baseline of the others. The meaning of a comparison: docs/metrics.md, "Comparing runs".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from os.path import commonpath
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost.parallel import BESIDES_TP, USUAL
from lockstep.sim.metrics.intervals import intervals_title
from lockstep.sim.results.results import show_rate, show_us
from lockstep.sim.results.stored_run import Requests, StoredRun, read_run
from lockstep.sim.results.text import setting

SAME = 0.01  # smaller relative changes are called the same
SAME_POINTS = 0.001  # smaller changes of shares are called the same
TIMES_FROM = 1.5  # larger ratios are shown as "2.1x" instead of percent
MOST_CHANGED = 5
ENGINES_SHOWN = 8  # of one run

Kind = Literal["us", "rate", "count", "share", "times"]
Verdict = Literal["better", "worse", "same", "changed", "unknown"]

# (group in metrics.json, name, title, kind, better direction or "")
FIGURES: tuple[tuple[str, str, str, Kind, str], ...] = (
    ("latency", "ttft_us_mean", "TTFT mean", "us", "lower"),
    ("latency", "ttft_us_p50", "TTFT p50", "us", "lower"),
    ("latency", "ttft_us_p90", "TTFT p90", "us", "lower"),
    ("latency", "ttft_us_p99", "TTFT p99", "us", "lower"),
    ("latency", "tpot_us_p50", "TPOT p50", "us", "lower"),
    ("latency", "tpot_us_p99", "TPOT p99", "us", "lower"),
    ("latency", "itl_us_p50", "ITL p50", "us", "lower"),
    ("latency", "itl_us_p99", "ITL p99", "us", "lower"),
    ("latency", "e2e_us_p50", "end to end p50", "us", "lower"),
    ("latency", "e2e_us_p99", "end to end p99", "us", "lower"),
    ("latency", "queue_us_p50", "queue p50", "us", "lower"),
    ("latency", "queue_us_p99", "queue p99", "us", "lower"),
    ("throughput", "requests_per_s", "requests per s", "rate", "higher"),
    ("throughput", "output_tokens_per_s", "output tokens per s", "rate", "higher"),
    ("throughput", "total_tokens_per_s", "all tokens per s", "rate", "higher"),
    ("throughput", "goodput_requests_per_s", "goodput, requests per s", "rate", "higher"),
    ("throughput", "goodput_share", "requests within SLOs", "share", "higher"),
    ("throughput", "makespan_us", "makespan", "us", ""),
    ("requests", "completed", "completed requests", "count", "higher"),
    ("requests", "failed", "failed requests", "count", "lower"),
    ("requests", "rejected", "rejected requests", "count", "lower"),
    ("requests", "unfinished", "unfinished requests", "count", "lower"),
    ("cache", "hit_ratio", "cache hit ratio", "share", "higher"),
    ("cache", "pages_evicted", "pages evicted", "count", ""),
    ("kv", "used_share_mean", "KV held, mean", "share", ""),
    ("kv", "used_share_max", "KV held, peak", "share", ""),
    ("scheduler", "retractions", "retractions", "count", "lower"),
    ("scheduler", "tokens_discarded", "tokens discarded", "count", "lower"),
    ("scheduler", "waiting_mean", "waiting, mean", "rate", "lower"),
    ("scheduler", "running_mean", "running, mean", "rate", ""),
    ("device", "busy_fraction", "GPU busy", "share", ""),
    ("device", "bubble_share", "GPU bubbles", "share", "lower"),
    ("device", "decode_gap_us_p50", "GPU gap p50", "us", "lower"),
    ("device", "batches", "batches", "count", ""),
    ("adapters", "loads", "adapter loads", "count", ""),
    ("adapters", "requests_waited", "waited for adapters", "count", "lower"),
    ("adapters", "wait_us_p99", "adapter wait p99", "us", "lower"),
    ("sessions", "held_share_mean", "KV held by sessions, mean", "share", ""),
    ("sessions", "yields", "sessions that yielded", "count", "lower"),
    ("samples", "ttft_us_p99", "first of several answers p99", "us", "lower"),
    ("samples", "e2e_us_p99", "all of several answers p99", "us", "lower"),
    ("balance", "requests_imbalance", "requests, fullest", "times", "lower"),
    ("balance", "tokens_imbalance", "tokens, fullest", "times", "lower"),
    ("balance", "busy_share_min", "GPU busy, least", "share", ""),
    ("balance", "busy_share_max", "GPU busy, most", "share", ""),
    ("balance", "ttft_us_p99_max", "TTFT p99, slowest", "us", "lower"),
)

OF_ADAPTERS = {"adapters": "asked", "max_lora_rank": "max_lora_rank", "lora_targets": "lora_targets"}
"""Settings of adapters, and their names in `about.adapters` of metrics.json."""

PAIRED = ("ttft", "tpot", "e2e")
EXPLAIN_CONSTANTS = (
    "model", "gpu", "tp", *BESIDES_TP, "engines", "weights_dtype", "kv_dtype", "cost model", "operator tables",
    "calibration",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Difference:
    """A setting that differs between runs."""

    name: str
    values: tuple[Any, ...]  # one per run


@dataclass(frozen=True)
class FigureChange:
    """Change of one figure of a run against the first run."""

    ratio: float | None  # value over that of the first run; None if one is missing or the first is 0
    words: str
    verdict: Verdict


@dataclass(frozen=True)
class Figure:
    """One figure of every run."""

    group: str
    name: str
    title: str
    kind: Kind
    values: tuple[float | None, ...]
    changes: tuple[FigureChange, ...]  # of every run except the first


@dataclass(frozen=True)
class IntervalRow:
    """The interval of one figure in every run with intervals."""

    name: str
    title: str
    kind: Kind
    intervals: tuple[tuple[float, float] | None, ...]
    overlaps: tuple[bool | None, ...]  # overlap with the first run, of every other run; None if one has no interval
    ratios_at_ends: tuple[tuple[float, float] | None, ...]  # low/low, high/high; None unless errors are shared


@dataclass(frozen=True)
class ChangedRequest:
    """A request in both runs. The ids are those of requests.csv and the journals; the label comes from the workload."""

    label: str
    tenant: str
    request_ids: tuple[int, int]
    prompt_tokens: int
    output_tokens: int
    first_us: float
    other_us: float
    change_us: float


@dataclass(frozen=True)
class PairedMetric:
    """Change of one latency over requests completed in both runs. Shares are of one, changes (other - first) in us."""

    count: int
    faster_share: float
    slower_share: float
    same_share: float  # changes within SAME
    change_us_median: float
    change_us_mean: float
    ratio_median: float | None
    worst: ChangedRequest
    best: ChangedRequest
    most_changed: tuple[ChangedRequest, ...]


@dataclass(frozen=True)
class Pairs:
    """Request-by-request comparison of a run with the first one."""

    name: str
    matched_by: str  # "label" or "request_id"
    matched: int
    completed_in_both: int
    completed_in_first_only: int
    completed_in_other_only: int
    metrics: Mapping[str, PairedMetric]
    ratios: Mapping[str, NDArray[np.float64]]  # other / first of every pair, for charts


@dataclass(frozen=True)
class Comparison:
    """A comparison. What cannot be compared is None or empty, and `warnings` or `notes` contain the reason."""

    runs: tuple[StoredRun, ...]
    settings: tuple[Difference, ...]
    figures: tuple[Figure, ...]
    intervals: tuple[IntervalRow, ...]
    intervals_note: str
    pairs: tuple[Pairs | None, ...]  # of every run except the first
    warnings: tuple[str, ...]  # reasons why the comparison is not fair
    notes: tuple[str, ...]  # other facts that affect its reading

    def figure(self, name: str) -> Figure:
        """Return the figure with this name in metrics.json."""
        return next(figure for figure in self.figures if figure.name == name)

    def describe(self) -> dict[str, Any]:
        """Return the whole comparison, for JSON."""
        return {
            "format": "lockstep-comparison",
            "format_version": 1,
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "command": run.about.get("command"),
                    "calibration": run.calibration,
                    "meets_slos": run.meets_slos,
                    "slos": run.metrics["slos"],
                    "bottleneck": asdict(run.bottleneck),
                    "routed_by_reason": dict(run.routed_by_reason),
                    "engines": [asdict(row) for row in engine_rows(run)],
                }
                for run in self.runs
            ],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "settings": [{"name": row.name, "values": list(row.values)} for row in self.settings],
            "figures": [asdict(figure) for figure in self.figures],
            "intervals": [asdict(row) for row in self.intervals],
            "intervals_note": self.intervals_note,
            "pairs": [None if pairs is None else _describe_pairs(pairs) for pairs in self.pairs],
        }


def _describe_pairs(pairs: Pairs) -> dict[str, Any]:
    described = {name: getattr(pairs, name) for name in pairs.__dataclass_fields__ if name not in ("metrics", "ratios")}
    return {**described, "metrics": {name: asdict(metric) for name, metric in pairs.metrics.items()}}


# --------------------------------------------------------------------------------------------------------- comparing


def read_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """Read run folders, and name each by its shortest distinct path.

    Raises: ConfigError for fewer than two folders, for a repeated folder, and for the errors of `read_run`.
    """
    if len(folders) < 2:
        given = "one" if folders else "none"
        raise ConfigError(f"a comparison needs at least two run folders, got {given}\nhint: lockstep compare A B")
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise ConfigError(f"`{folders[index]}` is given twice\nhint: name each run once")
    return [read_run(folder, name) for folder, name in zip(folders, _short_names(places), strict=True)]


def _short_names(places: Sequence[Path]) -> list[str]:
    """Return the last part of each path; if two are equal, the whole paths below their common parent."""
    names = [place.name for place in places]
    if len(set(names)) == len(names):
        return names
    shared = Path(commonpath(places))
    return [place.relative_to(shared).as_posix() for place in places]


def compare(runs: Sequence[StoredRun], *, is_asked: bool = False) -> Comparison:
    """Compare every run with the first.

    Args:
        is_asked: different models, GPUs or engines are the purpose of the comparison, so they cause no warning.
    """
    first, others = runs[0], runs[1:]
    warnings, notes = list(_warnings(runs, is_asked)), list(_notes(runs))
    pairs = tuple(_pair(first, other) if _is_same_workload(first, other) else None for other in others)
    rows, note = _interval_rows(runs)
    return Comparison(
        runs=tuple(runs),
        settings=tuple(_differences(runs)),
        figures=tuple(_figures(runs)),
        intervals=rows,
        intervals_note=note,
        pairs=pairs,
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _is_same_workload(first: StoredRun, other: StoredRun) -> bool:
    digests = [run.about["workload"].get("digest") for run in (first, other)]
    return digests[0] is not None and digests[0] == digests[1]


# ------------------------------------------------------------------------------------------------------------ engines


@dataclass(frozen=True)
class EngineRow:
    """One engine of a run."""

    number: int
    kind: str  # 2 x H100-SXM
    weight: float
    requests: int
    fair_ratio: float | None  # requests over the number that follows from its weight
    output_tokens_per_s: float | None
    ttft_us_p99: float | None
    tpot_us_p99: float | None
    hit_ratio: float | None
    kv_share_max: float | None
    busy_share: float | None  # share of the makespan of all engines


def engine_rows(run: StoredRun) -> list[EngineRow]:
    """Return each engine of a run, by number."""
    arrived = [engine.summary("requests", "arrived") for engine in run.engines]
    each_per_weight = sum(arrived) / sum(engine.weight for engine in run.engines)
    makespan_us = run.summary("throughput", "makespan_us")
    return [
        EngineRow(
            number=number,
            kind=engine.kind,
            weight=engine.weight,
            requests=requests,
            fair_ratio=requests / (engine.weight * each_per_weight) if each_per_weight else None,
            output_tokens_per_s=engine.summary("throughput", "output_tokens_per_s"),
            ttft_us_p99=engine.summary("latency", "ttft_us_p99"),
            tpot_us_p99=engine.summary("latency", "tpot_us_p99"),
            hit_ratio=engine.summary("cache", "hit_ratio"),
            kv_share_max=engine.summary("kv", "used_share_max"),
            busy_share=min((engine.summary("device", "busy_us") or 0) / makespan_us, 1.0) if makespan_us else None,
        )
        for number, (engine, requests) in enumerate(zip(run.engines, arrived, strict=True))
    ]


def telling_rows(rows: Sequence[EngineRow], most: int = ENGINES_SHOWN) -> list[EngineRow]:
    """Return all rows or, of many, those with the most and the fewest requests for their weight, in that order."""
    if len(rows) <= most:
        return list(rows)
    by_load = sorted(rows, key=lambda row: (-(row.fair_ratio or 0.0), row.number))
    return by_load[: most - most // 2] + by_load[-(most // 2) :]


def routing(run: StoredRun) -> str:
    """Return how requests were routed: `prefix_affinity, 2 ms away: 210 by prefix, 90 by policy`."""
    if run.router is None:
        return "no router"
    hop_us = run.about["hop_us"]
    away = f", {show_us(hop_us)} away" if hop_us else ""
    counts = sorted(run.routed_by_reason.items(), key=lambda item: -item[1])
    return f"{run.router.get('policy')}{away}: {', '.join(f'{count:,} by {reason}' for reason, count in counts)}"


# ----------------------------------------------------------------------------------------------------------- settings


def settings_of(run: StoredRun) -> dict[str, Any]:
    """Return the settings of a run, flat, under the names of `lockstep simulate` and SchedConfig.

    If engines of a cluster differ, the value names them: `engines 0 to 1: 256, engine 2: 128`.
    """
    if run.is_measured:
        return _load_settings(run.about) | {"SLOs": _slo_texts(run)}
    each = [_engine_settings(engine.about) for engine in run.engines]
    merged = {name: _merged([one.get(name) for one in each]) for one in each for name in one}
    weights = [engine.weight for engine in run.engines]
    router = run.router or {}
    cluster = {
        "engines": len(run.engines),
        "router": router.get("policy"),
        "router_hop": show_us(run.about.get("hop_us", 0)),
        **{f"router_{name}": value for name, value in router.items() if name != "policy"},
        "weights": _merged([f"{weight:g}" for weight in weights]) if len(set(weights)) > 1 else None,
    }
    ours = {"calibration": run.calibration, "SLOs": _slo_texts(run)}
    return {**cluster, **merged, **ours}


def _slo_texts(run: StoredRun) -> str | None:
    return ", ".join(slo["slo"] for slo in run.metrics["slos"]) or None


def _load_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the load, and the version of the code."""
    workload = about["workload"]
    return {
        "workload": workload.get("source"),
        "workload digest": workload.get("digest"),
        **{
            name: workload.get(name)
            for name in ("rate", "rate_scale", "time_window", "concurrency", "warm_up", "limit", "skipped_rows")
        },
        "seed": about.get("seed"),
        "max_new_tokens": about.get("max_new_tokens"),
        "lockstep version": about.get("version"),
        "lockstep commit": about.get("commit"),
    }


def _merged(values: Sequence[Any]) -> Any:
    """Return the value that all engines share, or a text with the value of each group of engines."""
    if all(value == values[0] for value in values):
        return values[0]
    parts, start = [], 0
    for stop in range(1, len(values) + 1):
        if stop == len(values) or values[stop] != values[start]:
            place = f"engine {start}" if stop == start + 1 else f"engines {start} to {stop - 1}"
            parts.append(f"{place}: {setting(values[start])}")
            start = stop
    return ", ".join(parts)


def _engine_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    cost = about.get("cost_model", {})
    return {
        "model": about.get("model"),
        "gpu": about.get("gpu"),
        "tp": about.get("tp"),
        **{name: about.get(name, getattr(USUAL, name)) for name in BESIDES_TP},
        **_load_settings(about),
        "grammar_compile_us": about.get("grammar_compile_us"),
        "grammar_forces": about.get("grammar_forces"),
        "diffusion": about.get("diffusion"),
        "samples": about.get("samples"),
        "server_sessions": about.get("server_sessions", False),
        **{name: about.get("adapters", {}).get(key) for name, key in OF_ADAPTERS.items()},
        "receive_interval": about.get("receive_interval", 1),
        "weights_dtype": cost.get("weights_dtype"),
        "kv_dtype": cost.get("kv_dtype"),
        "cost model": cost.get("kind"),
        "operator tables": _tables(cost),
        **about["scheduler"],
        **{f"cost.{name}": constant.get("value") for name, constant in cost.get("constants", {}).items()},
        **_line("all_reduce", cost.get("all_reduce", {})),
        **{
            name: value
            for gpus, line in cost.get("all_gather", {}).items()
            for name, value in _line(f"all_gather.{gpus}", line).items()
        },
        **{f"cpu.{name}": value for name, value in about.get("cpu_model", {}).items() if name != "sources"},
    }


def _tables(cost: Mapping[str, Any]) -> str | None:
    """Return the number of operator tables and a digest of their contents, because file names are not unique."""
    tables = cost.get("tables")
    if not tables:
        return None
    contents = " ".join(sorted(str(table.get("sha256")) for table in tables))
    return f"{len(tables)} of {blake2b(contents.encode(), digest_size=4).hexdigest()}"


def _line(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of a collective's cost line."""
    return {f"cost.{name}.{field}": value for field, value in line.items() if field != "source"}


def _differences(runs: Sequence[StoredRun]) -> Iterator[Difference]:
    settings = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    for run, each in zip(runs, settings, strict=True):
        if run.is_measured:  # only the load of a measured engine is known
            names = {name: None for name in names if name in each}
    # Constants follow from these settings. They are shown only if no other setting differs, as after an edit of a GPU
    # file.
    is_explained = any(each.get(name) != settings[0].get(name) for each in settings for name in EXPLAIN_CONSTANTS)
    is_rerouted = any(each.get("router") != settings[0].get("router") for each in settings)
    for name in names:
        if is_explained and name.startswith(("cost.", "cpu.")):
            continue
        if name.startswith("router_") and name != "router_hop" and is_rerouted:
            continue  # settings of different policies
        values = tuple(each.get(name) for each in settings)
        is_implied = name == "workload digest" and len({str(each["workload"]) for each in settings}) > 1
        if any(value != values[0] for value in values) and not is_implied:
            yield Difference(name, values)


FAIR_IF = "fair only if"


def _warnings(runs: Sequence[StoredRun], is_asked: bool) -> Iterator[str]:
    """Yield reasons why a difference in the figures need not come from the intended difference of settings."""

    def values(name: str) -> list[str]:
        known = (settings_of(run) for run in runs)
        found = (each.get(name) for run, each in zip(runs, known, strict=True) if not run.is_measured or name in each)
        return list(dict.fromkeys("none" if value is None else str(value) for value in found))

    if len(values("workload digest")) > 1:
        yield (
            "different workloads: the requests are not the same, which causes part of every difference; "
            "nothing is compared request by request"
        )
    for name, why in (
        ("seed", "chance causes part of every difference; give all runs one --seed"),
        ("model", f"{FAIR_IF} the model is the question"),
        ("gpu", f"{FAIR_IF} the GPU is the question"),
        ("tp", f"{FAIR_IF} the number of GPUs is the question"),
        ("pp", f"{FAIR_IF} the number of GPUs is the question"),
        ("engines", f"{FAIR_IF} the number of engines is the question"),
        ("limit", "not the same number of requests; give all runs one --limit"),
        ("calibration", "their times were not corrected alike; give all runs one --calibration"),
        ("cost model", "their times were not predicted alike"),
        ("SLOs", "goodput counts other requests in each; give all runs the same --slo"),
    ):
        if len(found := values(name)) > 1 and not (is_asked and why.startswith(FAIR_IF)):
            titles = {"gpu": "GPUs", "tp": "tp", "pp": "pp", "SLOs": "SLOs", "engines": "numbers of engines"}
            title = titles.get(name, f"{name}s")
            yield f"different {title} ({' and '.join(found)}): {why}"
    for run in runs:
        if "engine" in run.about:
            yield f"{run.name} is engine {run.about['engine']} of a cluster: its figures cover its own requests alone"
        if run.about.get("interrupted"):
            yield f"{run.name} was interrupted: its figures end there"
        elif unfinished := run.metrics["requests"]["unfinished"]:
            yield f"{run.name} left {unfinished:,} requests unfinished: their latencies are in no figure"
    completed = [run.metrics["requests"]["completed"] for run in runs]
    if len(set(completed)) > 1 and len(values("workload digest")) == 1:
        yield (
            "different numbers of completed requests: latencies are those of completed requests alone, "
            "and rejecting requests makes the others faster"
        )


def _notes(runs: Sequence[StoredRun]) -> Iterator[str]:
    for name in ("version", "commit"):
        found = list(dict.fromkeys(str(run.about.get(name)) for run in runs))
        if len(found) > 1:
            yield f"written by different code ({name} {' and '.join(found)}): the code may be the cause of a difference"
            break
    for run in runs:
        if run.is_measured:
            yield (
                f"{run.name} was measured at a server, network and text included: settings and inner events of its "
                "engine are unknown, so only settings of the load are compared"
            )
        if run.requests is None and "engine" not in run.about:
            yield f"{run.name} has no table of requests (--no-requests), so it is not compared request by request"


# ------------------------------------------------------------------------------------------------------------ figures


def _figures(runs: Sequence[StoredRun]) -> Iterator[Figure]:
    is_of_many = any(len(run.engines) > 1 for run in runs)
    for group, name, title, kind, better in FIGURES:
        if group == "balance" and not is_of_many:
            continue  # balance needs several engines
        values = tuple(run.summary(group, name) for run in runs)
        if all(value is None for value in values):
            continue
        changes = tuple(change(values[0], value, kind, better) for value in values[1:])
        yield Figure(group, name, title, kind, values, changes)


def change(first: float | None, other: float | None, kind: Kind = "us", better: str = "lower") -> FigureChange:
    """Describe the change of a figure: `4.0x lower`, `12 % higher`, `3.1 points higher`, `the same`."""
    if first is None or other is None:
        where = "" if first is other else " in the first" if first is None else " here"
        return FigureChange(None, f"nothing measured{where}", "unknown")
    ratio = other / first if first else None
    if first == other or (ratio is not None and abs(ratio - 1) < SAME):
        return FigureChange(
            1.0 if first == other else ratio, "the same" if first == other else "about the same", "same"
        )
    direction = "higher" if other > first else "lower"
    verdict: Verdict = "changed" if not better else "better" if direction == better else "worse"
    if kind == "share" and abs(other - first) < SAME_POINTS:
        return FigureChange(ratio, "about the same", "same")
    if kind == "share":
        return FigureChange(ratio, f"{100 * abs(other - first):.3g} points {direction}", verdict)
    if kind == "count" and (ratio is None or max(first, other) < 100):
        return FigureChange(ratio, f"{abs(other - first):,.0f} {'more' if other > first else 'fewer'}", verdict)
    if ratio is None or ratio == 0:
        return FigureChange(ratio, "up from 0" if other > first else "down to 0", verdict)
    times = max(ratio, 1 / ratio)
    if times >= TIMES_FROM:
        return FigureChange(
            ratio, f"{times:,.0f}x {direction}" if times >= 99.5 else f"{times:.1f}x {direction}", verdict
        )
    return FigureChange(ratio, f"{100 * abs(ratio - 1):.2g} % {direction}", verdict)


# ---------------------------------------------------------------------------------------------------------- intervals


def _interval_rows(runs: Sequence[StoredRun]) -> tuple[tuple[IntervalRow, ...], str]:
    """Return the intervals of all figures that have one, and a note on how to read them."""
    with_some = [run for run in runs if run.intervals is not None]
    if not with_some:
        return (
            (),
            "no run has intervals (--no-intervals), so the uncertainty of the figures is unknown",
        )
    factors = [(run.intervals["calibration"], run.intervals["time_factors"]) for run in with_some if run.intervals]
    is_shared = len(with_some) == len(runs) and all(each == factors[0] for each in factors)
    rows = []
    for _, name, title, kind, _ in FIGURES:
        ends = tuple(run.interval(name) for run in runs)
        if all(each is None for each in ends):
            continue
        rows.append(
            IntervalRow(
                name,
                title,
                kind,
                ends,
                tuple(_overlap(ends[0], other) for other in ends[1:]),
                tuple(_ratios_at_ends(ends[0], other) if is_shared else None for other in ends[1:]),
            )
        )
    note = f"{intervals_title(with_some[0].metrics['intervals'])}: the error of the cost model, queueing included."
    if is_shared:
        note += (
            " All runs share one calibration and so one error: if real batches are slower, they are slower in every "
            "run. So where intervals overlap, the ratio at both ends of the error still shows which run is ahead."
        )
    elif len(with_some) < len(runs):
        note += f" Only {' and '.join(run.name for run in with_some)} has any." if len(with_some) == 1 else ""
    else:
        note += " The calibrations differ, and so do their errors: where intervals overlap, no run is certainly ahead."
    return tuple(rows), note


def _overlap(first: tuple[float, float] | None, other: tuple[float, float] | None) -> bool | None:
    return None if first is None or other is None else first[0] <= other[1] and other[0] <= first[1]


def _ratios_at_ends(first: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    if first is None or other is None or not first[0] or not first[1]:
        return None
    return other[0] / first[0], other[1] / first[1]


# -------------------------------------------------------------------------------------------------------------- pairs


def _pair(first: StoredRun, other: StoredRun) -> Pairs | None:
    if first.requests is None or other.requests is None:
        return None
    rows, others, matched_by = match_requests(first.requests, other.requests)
    done, other_done = first.completed[rows], other.completed[others]
    both = done & other_done
    rows, others = rows[both], others[both]
    metrics, ratios = {}, {}
    for metric in PAIRED:
        column = f"{metric}_us"
        first_us = first.requests[column][rows].astype(np.float64)
        other_us = other.requests[column][others].astype(np.float64)
        known = (first_us >= 0) & (other_us >= 0)  # NaN compares false
        if known.any():
            pair = (first_us[known], other_us[known])
            metrics[metric] = _paired(first.requests, other.requests, rows[known], others[known], *pair)
            real = pair[0] > 0
            ratios[metric] = pair[1][real] / pair[0][real]
    return Pairs(
        name=other.name,
        matched_by=matched_by,
        matched=len(both),
        completed_in_both=int(both.sum()),
        completed_in_first_only=int((done & ~other_done).sum()),
        completed_in_other_only=int((other_done & ~done).sum()),
        metrics=metrics,
        ratios=ratios,
    )


def match_requests(first: Requests, other: Requests) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return the rows of the same requests in both tables, and the column by which they were matched.

    Requests are matched by tenant and label, which identify a row of the workload. Later turns of a session get their
    request ids when they are sent, at different times in different runs, so ids are used only if labels are not unique.
    """
    keys: list[list[object]] = [list(zip(table["tenant"], table["label"], strict=True)) for table in (first, other)]
    matched_by = "label"
    if any(len(set(column)) < len(column) for column in keys):
        keys = [table["request_id"].tolist() for table in (first, other)]
        matched_by = "request_id"
    at = {key: row for row, key in enumerate(keys[1])}
    found = [(row, at[key]) for row, key in enumerate(keys[0]) if key in at]
    rows, others = np.array(found, np.int64).reshape(-1, 2).T
    alike = first["prompt_tokens"][rows] == other["prompt_tokens"][others]
    return rows[alike], others[alike], matched_by


def _paired(
    first: Mapping[str, NDArray[Any]],
    other: Mapping[str, NDArray[Any]],
    rows: NDArray[np.int64],
    others: NDArray[np.int64],
    first_us: NDArray[np.float64],
    other_us: NDArray[np.float64],
) -> PairedMetric:
    change_us = other_us - first_us
    same = np.abs(change_us) <= SAME * first_us
    real = first_us > 0

    def request(index: int) -> ChangedRequest:
        row = int(rows[index])
        return ChangedRequest(
            label=str(first["label"][row]),
            tenant=str(first["tenant"][row]),
            request_ids=(int(first["request_id"][row]), int(other["request_id"][others[index]])),
            prompt_tokens=int(first["prompt_tokens"][row]),
            output_tokens=int(first["output_tokens"][row]),
            first_us=float(first_us[index]),
            other_us=float(other_us[index]),
            change_us=float(change_us[index]),
        )

    order = np.argsort(-np.abs(change_us), kind="stable")[:MOST_CHANGED]
    return PairedMetric(
        count=len(change_us),
        faster_share=float(np.mean((change_us < 0) & ~same)),
        slower_share=float(np.mean((change_us > 0) & ~same)),
        same_share=float(np.mean(same)),
        change_us_median=float(np.median(change_us)),
        change_us_mean=float(np.mean(change_us)),
        ratio_median=float(np.median(other_us[real] / first_us[real])) if real.any() else None,
        worst=request(int(np.argmax(change_us))),
        best=request(int(np.argmin(change_us))),
        most_changed=tuple(request(int(index)) for index in order if change_us[index] != 0),
    )


# ------------------------------------------------------------------------------------------------------- one sentence


def headline(found: Comparison) -> str:
    """Return the comparison in one or two sentences: the largest changes for users, and the throughput."""
    first, others = found.runs[0], found.runs[1:]
    if len(others) > 1:
        return _ranking(found)
    other = others[0]
    names = ("ttft_us_p99", "tpot_us_p99", "output_tokens_per_s")
    parts = [_moved(figure) for figure in found.figures if figure.name in names]
    return f"{other.name} against {first.name}: {'; '.join(parts)}" if parts else "Neither run completed a request"


def _moved(figure: Figure) -> str:
    """Return the change of one figure: `TTFT p99 1.66 s -> 410 ms, 4.0x lower`."""
    moved = figure.changes[0]
    if moved.verdict in ("same", "unknown"):
        return f"{figure.title} {moved.words}"
    first, other = map(show_us if figure.kind == "us" else show_rate, figure.values)
    return f"{figure.title} {first} -> {other}, {moved.words}"


def _ranking(found: Comparison) -> str:
    """Return the headline of more than two runs: the shortest TTFT p99 among the runs that meet their SLOs."""
    met = [run for run in found.runs if run.meets_slos]
    if any(run.slos for run in found.runs):
        names = ", ".join(run.name for run in met)
        verdict = f"{len(met)} of {len(found.runs)} runs meet their SLOs" + (f" ({names})" if met else "")
    else:
        verdict = f"{len(found.runs)} runs"
    measured = [run for run in (met or found.runs) if run.summary("latency", "ttft_us_p99") is not None]
    if not measured:
        return verdict
    fastest = min(measured, key=lambda run: run.summary("latency", "ttft_us_p99"))
    return f"{verdict}; the shortest TTFT p99 {'of them ' if met and len(met) > 1 else ''}is that of {fastest.name}"
