"""How true is a simulated run? A real one of vLLM 0.19, request by request: 300 requests on one RTX 4090.

The run (LLMServingSim's, in LOCKSTEP_DATA/published/llmservingsim): Llama-3.1-8B in bf16, prompts and output lengths of
ShareGPT, 10 requests/s for 30 s, which is far more than the card can serve: 200 requests wait most of the time, the KV
cache is full, requests are preempted. Errors of the simulator add up in it instead of averaging out.

    generic      data sheet times the fractions of `cost/hardware.py`, nothing measured on any RTX 4090
    catalogue    the catalogue's entry: data sheet, and micro-benchmarks of other people's RTX 4090
    engine       the catalogue's vLLM on it, whose costs were fitted on H100: what `--engine vllm` simulates
    calibrated   the same as catalogue, corrected by what the first --prefix seconds of the run took, tested on the rest

The replay is given the measured arrivals, lengths, prompts and KV capacity, and the profile `vllm`; nothing else of the
run, unless calibrated. Times are from arrival; figures are the same on every machine. docs/validation.md reads them.

    LOCKSTEP_DATA=... python benchmarks/rtx4090_truth.py [--prefix 30] [--json FILE]

Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from recorded_data import data_folder
from simpy import Environment

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import ObservedEvent
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.calibrate.load_runs import ServerFacts
from lockstep.sim.calibrate.request_fit import compass_search
from lockstep.sim.calibrate.requests import RequestsSource, calibrate_requests
from lockstep.sim.catalogue import load_engine, load_gpu, load_model
from lockstep.sim.cost import CostModel, CpuModel, roofline_model
from lockstep.sim.cost.calibration import Calibration, CalibrationSource, Correction, Residuals
from lockstep.sim.cost.roofline import RooflineModel
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.workload.token_runs import append_run
from lockstep.sim.workload.turns import Turn

Floats = NDArray[np.float64]
Row = dict[str, Any]

MODEL, GPU = "llama-3.1-8b", "rtx4090"
RECORDING = "published/llmservingsim"
METRICS = ("ttft", "tpot", "e2e")
BEYOND_S = 5.0  # how much longer than the prefix a replay goes on while calibrating: then nothing more is late
TICK_LAG_S = 0.1  # of the recorded series: where its counts agree best with the recorded times of requests
BARS = {
    "catalogue": {"e2e": 0.086},
    "engine": {"e2e": 0.05},
    "calibrated": {"e2e": 0.022, "tpot": 0.017},
    "a fifth": {"end to end mean": 0.015, "TPOT mean": 0.01},
}  # error of the mean, at most


@dataclass(frozen=True)
class Timeline:
    """What happened to each request, in the order of arrival. Seconds since the first arrival."""

    arrived: Floats
    scheduled: Floats  # for the first time
    first_token: Floats
    last_token: Floats
    output_tokens: Floats

    def latency_ms(self, metric: str) -> Floats:
        """TTFT, TPOT or end-to-end time of each request, from its arrival."""
        if metric == "ttft":
            return (self.first_token - self.arrived) * 1e3
        if metric == "e2e":
            return (self.last_token - self.arrived) * 1e3
        return (self.last_token - self.first_token) / (self.output_tokens - 1) * 1e3


@dataclass(frozen=True)
class Gauges:
    """How things stood at each second of the run."""

    time: Floats
    running: Floats
    waiting: Floats
    kv_percent: Floats


@dataclass(frozen=True)
class Recording:
    """The real run: what the replay is given, and what it is compared with."""

    turns: list[Turn]
    config: SchedConfig
    timeline: Timeline
    gauges: Gauges
    source: CalibrationSource
    vllm_version: str


def read_recording(folder: Path) -> Recording:
    """Read the run. Prompts keep which blocks of tokens they share, which is all that scheduling looks at."""
    meta = json.loads((folder / "RTX4090_Llama-3.1-8B_meta.json").read_text())
    path = folder / "RTX4090_Llama-3.1-8B_requests.csv"
    rows = sorted(_numbers(path), key=lambda row: row["idx"])
    with gzip.open(folder / "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz", "rt") as lines:
        prompts = [json.loads(line)["input_tok_ids"] for line in lines]

    def column(name: str) -> Floats:
        return np.array([row[name] for row in rows])

    timeline = Timeline(
        column("wall_arrival_s"), column("scheduled_s"), column("first_token_s"), column("last_token_s"),
        column("output_toks"),
    )  # fmt: skip
    ticks = _numbers(folder / "RTX4090_Llama-3.1-8B_timeseries.csv")
    time, *counts = (np.array([tick[name] for tick in ticks]) for name in ("t", "running", "waiting", "kv_cache_pct"))
    gauges = Gauges(time - TICK_LAG_S, *counts)
    engine, kv = meta["engine_kwargs"], meta["kv_cache"]
    config = SchedConfig(
        **{
            **profile_settings("vllm"),
            "page_size": kv["block_size"],
            "pages": kv["num_gpu_blocks"] - 1,  # vLLM keeps one block for itself, the null block
            "max_running_requests": engine["max_num_seqs"],
            "context_tokens_max": engine["max_model_len"],
            "max_prefill_tokens": engine["max_num_batched_tokens"],
            "chunked_prefill_size": engine["max_num_batched_tokens"],
        }
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    source = CalibrationSource(kind="serving_points", file=path.name, sha256=digest, rows_used=0)
    return Recording(_turns(rows, prompts, kv["block_size"]), config, timeline, gauges, source, meta["vllm_version"])


def _numbers(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as lines:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]


def _turns(rows: list[dict[str, float]], prompts: list[list[int]], block: int) -> list[Turn]:
    """Number the blocks by all that comes before and in them, so that equal beginnings, and no others, are equal."""
    numbers: dict[bytes, int] = {}
    runs_of_prompts = []
    for prompt in prompts:
        runs: list[int] = []
        chain = b""
        for start in range(0, len(prompt), block):
            tokens = prompt[start : start + block]
            chain = hashlib.blake2b(chain + np.array(tokens, np.int32).tobytes(), digest_size=16).digest()
            append_run(runs, numbers.setdefault(chain, len(numbers)) * block, len(tokens))
        runs_of_prompts.append(tuple(runs))
    turns, free = [], len(numbers) * block
    for index, (row, runs_of_prompt) in enumerate(zip(rows, runs_of_prompts, strict=True)):
        outputs, arrival_us = int(row["output_toks"]), round(row["wall_arrival_s"] * 1e6)
        turns.append(Turn(index, arrival_us, runs_of_prompt, int(row["input_toks"]), outputs, free, str(index)))
        free += outputs
    return turns


# ------------------------------------------------------------------------------------------------------------ replay


class GaugedMetrics:
    """Metrics that also keep every gauge."""

    def __init__(self, pages: int) -> None:
        self.fold = MetricsFold(kv_pages=pages)
        self.pages = pages
        self.seen: list[tuple[int, int, int, int]] = []
        self._host: EngineHost | None = None
        self._stop_us = 0

    def stop(self, host: EngineHost, at_s: float) -> None:
        """Stop the host once it has come so far."""
        self._host, self._stop_us = host, round(at_s * 1e6)

    def observe(self, event: ObservedEvent, step: Step) -> None:
        self.fold.observe(event, step)

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        self.seen.append((time_us, running, waiting, self.pages - free_pages - cached_pages))
        self.fold.gauge(time_us, waiting, running, free_pages, cached_pages)
        if self._host is not None and time_us > self._stop_us:
            self._host.stop_requested = True

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        self.fold.cpu_interval(start_us, stop_us, what)

    def at(self, times: Floats) -> Gauges:
        """The gauges as they stood at these seconds."""
        seen = np.array(self.seen, np.float64)
        last = np.maximum(np.searchsorted(seen[:, 0], times * 1e6, side="right") - 1, 0)
        return Gauges(times, seen[last, 1], seen[last, 2], 100.0 * seen[last, 3] / self.pages)


@dataclass(frozen=True)
class Replay:
    """The same run, simulated."""

    timeline: Timeline
    gauges: Gauges
    data: RunData


def simulate(recording: Recording, cost: CostModel, cpu: CpuModel, until_s: float | None = None) -> Replay:
    """Play the recording's arrivals to a simulated engine: to the end, or for so many seconds.

    What has not happened by then happens, in the timeline, when the replay stops.
    """
    env, metrics = Environment(), GaugedMetrics(recording.config.pages)
    arrivals = Arrivals(recording.turns)
    host = EngineHost(env, Engine(recording.config), arrivals, cost, cpu, NoJournal(), metrics)
    if until_s is not None:
        metrics.stop(host, until_s)
    env.process(host.run())
    env.run()
    data = metrics.fold.result()
    requests = data.requests
    count, end_s = len(requests.request_id), data.span_us[1] / 1e6
    assert until_s is not None or (count == len(recording.turns) and requests.completed.all()), "not all was served"
    arrived = recording.timeline.arrived
    times = [np.full(len(arrived), end_s) for _ in range(3)]
    for time, since_us in zip(times, (requests.queue_us, requests.ttft_us, requests.e2e_us), strict=True):
        time[:count] = np.where(since_us >= 0, (requests.arrival_us + since_us) / 1e6, end_s)
    timeline = Timeline(arrived, *times, recording.timeline.output_tokens)
    return Replay(timeline, metrics.at(recording.gauges.time), data)


# ------------------------------------------------------------------------------------------------------- calibration


def calibrate(recording: Recording, base: RooflineModel, prefix_s: float) -> tuple[Calibration, float, float]:
    """Fit the time of kernels and of a step's fixed part to the first seconds: first and last tokens until then.

    A delay of all of them is left out of the fit: the first pass of a fresh engine takes longer than any later one, and
    all requests behind it wait. Nothing after the prefix is looked at.
    Returns the calibration; that delay; and the standard deviation of what is left; the two in seconds.
    """
    measured = recording.timeline
    first, last = measured.first_token <= prefix_s, measured.last_token <= prefix_s

    def calibration(kernels: float, step_us: float) -> Calibration:
        return Calibration(
            engine="vllm",
            engine_version=recording.vllm_version,
            gpu=base.gpu.name,
            models=(base.model.name,),
            correction=Correction(kernels=kernels, step_us=step_us),
            residuals=(PLACEHOLDER,),
            sources=(replace_struct(recording.source, rows_used=int(first.sum())),),
            notes=(f"first and last tokens of the first {prefix_s:g} s of one overloaded run",),
        )

    def replayed(kernels: float, step_us: float) -> Timeline:
        cost = calibration(kernels, step_us).cost_model(base)
        return simulate(recording, cost, CpuModel(), until_s=prefix_s + BEYOND_S).timeline

    def late_s(found: Timeline) -> Floats:
        return np.concatenate(
            ((measured.first_token - found.first_token)[first], (measured.last_token - found.last_token)[last])
        )

    kernels, step_us = compass_search(lambda kernels, step_us: float(late_s(replayed(kernels, step_us)).std()))
    found = replayed(kernels, step_us)
    left_s = float(late_s(found).std())
    ratios = measured.latency_ms("tpot")[last] / found.latency_ms("tpot")[last]
    residuals = Residuals.of(ratios, metric="time", population="seen", method="TPOT of the rows that were fitted")
    fitted = calibration(kernels, step_us)
    return replace_struct(fitted, residuals=(residuals,)), float(late_s(found).mean()), left_s


PLACEHOLDER = Residuals(
    metric="time", population="seen", method="none yet", count=0, probabilities=(0.5, 0.9), ratios=(1.0, 1.0)
)


def replace_struct(struct: Any, **changes: Any) -> Any:
    """A changed copy."""
    return msgspec.structs.replace(struct, **changes)


# -------------------------------------------------------------------------------------------------------- comparison


def compare(name: str, measured: Timeline, replay: Replay, rows: NDArray[np.bool_], which: str) -> Row:
    """Errors over some requests, as shares of what was measured."""
    result: Row = {"cost": name, "requests": which, "count": int(rows.sum())}
    for metric in METRICS:
        real, simulated = measured.latency_ms(metric)[rows], replay.timeline.latency_ms(metric)[rows]
        result[metric] = {
            "mean_ms": [float(real.mean()), float(simulated.mean())],
            "p99_ms": [float(np.percentile(real, 99)), float(np.percentile(simulated, 99))],
            "mean_error": float(simulated.mean() / real.mean() - 1),
            "p99_error": float(np.percentile(simulated, 99) / np.percentile(real, 99) - 1),
            "per_request_error": float((np.abs(simulated - real) / real).mean()),
            "mean_absolute_error": float(np.abs(simulated - real).mean() / real.mean()),
        }
    return result


def net_preemptions(gauges: Gauges, timeline: Timeline) -> int:
    """Preempted less resumed within each second, where more were preempted: what one-second samples show of them."""
    edges = gauges.time
    started = np.diff(np.searchsorted(np.sort(timeline.scheduled), edges, side="right"))
    ended = np.diff(np.searchsorted(np.sort(timeline.last_token), edges, side="right"))
    left = started - ended - np.diff(gauges.running)
    return int(left[left > 0].sum())


def compare_series(name: str, recording: Recording, replay: Replay) -> Row:
    """Means of the series, mean absolute differences, and preemptions as far as they can be seen."""
    result: Row = {"cost": name}
    for field in ("running", "waiting", "kv_percent"):
        real, simulated = getattr(recording.gauges, field), getattr(replay.gauges, field)
        result[field] = {
            "mean": [float(real.mean()), float(simulated.mean())],
            "mean_absolute_difference": float(np.abs(simulated - real).mean()),
        }
    result["net_preemptions"] = [
        net_preemptions(recording.gauges, recording.timeline),
        net_preemptions(replay.gauges, replay.timeline),
    ]
    result["preemptions_simulated"] = int(replay.data.requests.retractions.sum())
    result["end_s"] = [float(recording.timeline.last_token.max()), float(replay.timeline.last_token.max())]
    return result


def show(row: Row) -> None:
    print(f"{row['cost']:11} {row['requests']} ({row['count']})")
    print("            metric   measured  simulated   error of mean      p99   per request")
    for metric in METRICS:
        found = row[metric]
        print(
            f"            {metric:5} {found['mean_ms'][0]:10,.1f} {found['mean_ms'][1]:10,.1f} "
            f"{found['mean_error']:+15.1%} {found['p99_error']:+8.1%} {found['per_request_error']:13.1%}"
        )


def show_series(row: Row) -> None:
    parts = [
        f"{field} {row[field]['mean'][0]:.1f} / {row[field]['mean'][1]:.1f} "
        f"(off by {row[field]['mean_absolute_difference']:.2f})"
        for field in ("running", "waiting", "kv_percent")
    ]
    real, simulated = row["net_preemptions"]
    print(f"            each second, measured / simulated: {', '.join(parts)}")
    print(
        f"            preemptions that one-second samples show: {real} / {simulated}; "
        f"simulated in all: {row['preemptions_simulated']}; the last token at {row['end_s'][0]:.1f} / "
        f"{row['end_s'][1]:.1f} s"
    )


def first_fifth(folder: Path, pages: int) -> Row:
    """Print the errors of the run's last four fifths after `lockstep calibrate requests`, which fits the first one.

    Args:
        pages: the pages of the recorded server.
    Returns: errors of means, after the fit and before it.
    """
    source = RequestsSource(
        facts=ServerFacts(engine="vllm", model=MODEL, gpu=GPU),
        settings={"pages": pages, "max_running_requests": 256, "context_tokens_max": 32768},
        workload=str(folder / "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"),
    )
    [kept] = calibrate_requests([folder / "RTX4090_Llama-3.1-8B_requests.csv"], source, date="2026-11-26").kept_aside
    names = ("TTFT mean", "TPOT mean", "end to end mean")
    found: Row = {"requests": kept.requests, "of": kept.of}
    found |= {name: [kept.error(name), kept.error(name, before=True)] for name in names}
    print(f"a fifth     fitted to the first {kept.of - kept.requests} requests, on the other {kept.requests}")
    for name in names:
        after, before = found[name]
        print(f"            {name:16} {after:+7.2%} (before the fit {before:+.2%})")
    return found


def judge(row: Row, bars: Mapping[str, float]) -> int:
    """Print how a row stands to its bars. Returns how many it misses."""
    missed = 0
    for metric, bar in bars.items():
        met = abs(row[metric]["mean_error"]) <= bar
        missed += not met
        print(f"            bar: mean {metric} within {bar:.1%}: {'met' if met else 'MISSED'}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=float, default=30.0, help="seconds to calibrate on (default 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--series", type=Path, metavar="FILE", help="write both series of the catalogue's replay there")
    arguments = parser.parse_args()
    recording = read_recording(data_folder(RECORDING) / RECORDING)
    measured = recording.timeline
    everyone = np.ones(len(recording.turns), np.bool_)
    rest = measured.first_token > arguments.prefix
    gpu, model = load_gpu(GPU), load_model(MODEL)

    print(f"vLLM {recording.vllm_version}, {model.name} on one {gpu.name}, {len(recording.turns)} requests; ms")
    rows, series, missed = [], [], 0
    replays = {}
    for name, base in (("generic", replace(gpu, measured={})), ("catalogue", gpu)):
        replays[name] = simulate(recording, roofline_model(model, base), CpuModel())
        rows.append(compare(name, measured, replays[name], everyone, "all requests"))
        show(rows[-1])
        missed += judge(rows[-1], BARS.get(name, {}))
        series.append(compare_series(name, recording, replays[name]))
        show_series(series[-1])
    engine = load_engine("vllm")[0].calibration(model, gpu.name, "bf16", recording.vllm_version)
    replays["engine"] = simulate(recording, engine.cost_model(roofline_model(model, gpu)), engine.cpu_model(CpuModel()))
    rows.append(compare("engine", measured, replays["engine"], everyone, "all requests"))
    show(rows[-1])
    missed += judge(rows[-1], BARS["engine"])
    which = f"those with no token in the first {arguments.prefix:g} s"
    rows.append(compare("catalogue", measured, replays["catalogue"], rest, which))
    show(rows[-1])

    base = roofline_model(model, gpu)
    calibration, delay_s, left_s = calibrate(recording, base, arguments.prefix)
    correction = calibration.correction
    print(
        f"calibrated on {int((~rest).sum())} first and {int((measured.last_token <= arguments.prefix).sum())} last "
        f"tokens of the first {arguments.prefix:g} s: kernels x {correction.kernels:.3f}, "
        f"+ {correction.step_us:.0f} us a step; all {1e3 * delay_s:.0f} ms late, "
        f"{1e3 * left_s:.0f} ms (standard deviation) are left"
    )
    replays["calibrated"] = simulate(recording, calibration.cost_model(base), CpuModel())
    rows.append(compare("calibrated", measured, replays["calibrated"], rest, which))
    show(rows[-1])
    missed += judge(rows[-1], BARS["calibrated"])
    series.append(compare_series("calibrated", recording, replays["calibrated"]))
    show_series(series[-1])

    fifth = first_fifth(data_folder(RECORDING) / RECORDING, recording.config.pages)
    for name, bar in BARS["a fifth"].items():
        met = abs(fifth[name][0]) <= bar
        missed += not met
        print(f"            bar: {name} within {bar:.1%}: {'met' if met else 'MISSED'}")

    if arguments.json:
        figures = {"prefix_s": arguments.prefix, "requests": rows, "series": series, "fifth": fifth}
        figures["calibration"] = json.loads(calibration.to_json())
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.series:
        write_series(arguments.series, recording.gauges, replays)
    return int(missed > 0)


def write_series(path: Path, real: Gauges, replays: Mapping[str, Replay]) -> None:
    """A CSV of the recorded series with those of the replays beside them."""
    names = ("running", "waiting", "kv_percent")
    columns = {"t_s": real.time} | {f"{name}_measured": getattr(real, name) for name in names}
    for cost, replay in replays.items():
        columns |= {f"{name}_{cost}": getattr(replay.gauges, name) for name in names}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([[f"{value:g}" for value in row] for row in zip(*columns.values(), strict=True)])


if __name__ == "__main__":
    sys.exit(main())
