"""A digital twin of vLLM on this machine: fitted on one load, tested on three others and on changes of settings.

    python benchmarks/vllm_twin.py measure FOLDER --vllm PYTHON [--loads fit,rate] [--runs 2]   # about 100 s a load
    python benchmarks/vllm_twin.py choose FOLDER                  # loads for changes of the policy, by simulation
    python benchmarks/vllm_twin.py report FOLDER [--json FILE]    # no vLLM needed

PYTHON is the interpreter of an environment with vLLM (`dev.py vllm-test` makes one). Every load is served by
a vLLM of its own, with the demo model on the CPU under lockstep.vllm.Scheduler, and sent by `lockstep bench serve` from
this machine. `report` calibrates on the journal and the client of the load `fit`, simulates the arrivals of every load
with that calibration, and compares the latencies of the clients with the simulated ones. Other work on the machine
during `measure` is in the figures, so there should be none; `chrt -r 1 python benchmarks/vllm_twin.py measure ...`
gives server and client a priority above it.

Bars: mean end-to-end time within 5 %, TTFT and TPOT p50 and p90 within 10 % on the three loads that the fit has not
seen; the printed 90 % interval contains at least 80 % of these figures; the simulated effect of a change of chunks and
of policy has the sign of the measured one, and differs by at most a third of it. Exit status 1 if a bar is missed.

The pace of two runs of one load differs by some percent. The noise of a simulated effect is what it changes if
batches take PACE_NOISE longer in one of the two runs, as the root of the sum of both squares. An effect below NOISES
times its noise is printed and not judged: measurements of it differ by as much as a third. `choose` applies this to the
mean and the median TTFT of candidates, and takes for each kind of load the lowest rate from which on both are judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
PACKAGES = ("packages/sched-core", "packages/sim", "packages/vllm-scheduler", "tools")
COMMAND = "import sys; from lockstep.core.command import main; sys.exit(main(sys.argv[1:]))"
VOCABULARY = 2048
WARM_UP = 40  # first requests, which are not in the figures
READY_S = 180.0
CONTEXT, PAGE = 4096, 32
DATE = "2026-11-27"

# The worker runs inside the engine core. vLLM's default on CPUs is a process for each, and the one that waits polls.
# Two cores are busy then: front end and client take their time from the worker, and batches take longer at high rates.
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # of matrices as small as these, more threads are slower
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

CHAT = "input=lognormal:200:0.7,output=uniform:20:80,max_total=3000"
LONG = "gen:n=560,rate=9,input=lognormal:600:0.5,output=uniform:10:50,max_total=3000"
# An overload of 15 s: more than twice what two rows sustain, so that the queue, which a policy orders, has hundreds of
# requests. Waits are then as uncertain as the speed of batches. Close to what is sustained (12 requests/s of these)
# batches that take 5 % longer change the simulated effect of a policy by 15 to 30 %.
OVERLOAD = "gen:n=600,rate=40,input=lognormal:300:0.9,output=uniform:10:70,max_total=3000"


@dataclass(frozen=True)
class Load:
    """A load, and the settings of the engine that serves it. It may be served several times."""

    workload: str
    rows: int = 16  # --max-num-seqs
    tokens: int = 512  # --max-num-batched-tokens
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # further settings of Lockstep

    def settings(self, pages: int) -> dict[str, Any]:
        """Return the settings of its simulation."""
        sizes = {"page_size": PAGE, "pages": pages, "context_tokens_max": CONTEXT, "overlap_depth": 0}
        budget = {"max_running_requests": self.rows, "max_prefill_tokens": self.tokens}
        return {**sizes, **budget, "chunked_prefill_size": self.tokens, **self.scheduler}


# Chosen by `choose`, on the calibration of the load `fit`, before they were measured.
ROWS = "gen:n=600,rate=32,input=lognormal:300:0.9,output=uniform:10:70,max_total=3000"
WIDE = "gen:n=600,rate=32,input=lognormal:150:1.4,output=uniform:10:40,max_total=3000"
NEAR = "gen:n=350,rate=12,input=lognormal:300:0.9,output=uniform:10:70,max_total=3000"  # not judged: below the noise
SPF = {"schedule_policy": "spf"}

LOADS = {
    "fit": Load(f"gen:n=850,rate=14,{CHAT}"),
    "rate": Load(f"gen:n=1250,rate=20,{CHAT}"),
    "lengths": Load(LONG),
    "sharing": Load(
        "gen:n=850,rate=14,input=lognormal:100:0.6,output=uniform:20:80,shared_prefix=512x4,max_total=3000"
    ),
    "chunk": Load(LONG, tokens=64),
    "fcfs": Load(OVERLOAD, rows=2),
    "spf": Load(OVERLOAD, rows=2, scheduler=SPF),
    "rows-fcfs": Load(ROWS, rows=4),
    "rows-spf": Load(ROWS, rows=4, scheduler=SPF),
    "wide-fcfs": Load(WIDE, rows=2),
    "wide-spf": Load(WIDE, rows=2, scheduler=SPF),
    "near-fcfs": Load(NEAR, rows=2),
    "near-spf": Load(NEAR, rows=2, scheduler=SPF),
}
TESTED = ("rate", "lengths", "sharing")
BARS = {"e2e_us_mean": 0.05, "ttft_us_p50": 0.1, "ttft_us_p90": 0.1, "tpot_us_p50": 0.1, "tpot_us_p90": 0.1}
COVERED_MIN = 0.8
CHANGES = (  # before, after, figure
    ("lengths", "chunk", "ttft_us_mean"),
    ("lengths", "chunk", "e2e_us_mean"),
    ("fcfs", "spf", "ttft_us_mean"),
    ("fcfs", "spf", "ttft_us_p50"),
    ("fcfs", "spf", "ttft_us_p90"),  # the longest prompts wait longer
    *((f"{kind}-fcfs", f"{kind}-spf", f"ttft_us_{figure}") for kind in ("rows", "wide", "near")
      for figure in ("mean", "p50", "p90")),
)  # fmt: skip
SIZE_MAX = 1 / 3  # largest error of an effect, as a share of the measured one
PACE_NOISE = 0.02  # of two runs of one load
NOISES = 3.0

CANDIDATES = {  # kinds of loads: lengths, and rows of the engine
    "usual, 2 rows": ("input=lognormal:300:0.9,output=uniform:10:70", 2),
    "usual, 4 rows": ("input=lognormal:300:0.9,output=uniform:10:70", 4),
    "wide, 2 rows": ("input=lognormal:150:1.4,output=uniform:10:40", 2),
    "wide, 4 rows": ("input=lognormal:150:1.4,output=uniform:10:40", 4),
}
CANDIDATE_RATES = (12, 16, 20, 24, 28, 32, 40)


# ------------------------------------------------------------------------------------------------------------- measure


@contextmanager
def vllm_server(python: str, load: Load, folder: Path) -> Iterator[str]:
    """A vLLM that serves the demo model and writes its journal to `folder`; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"journal": str(folder / "engine"), "scheduler": dict(load.scheduler)}
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", "demo",
        "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT),
        "--block-size", str(PAGE), "--max-num-seqs", str(load.rows), "--max-num-batched-tokens", str(load.tokens),
        "--distributed-executor-backend", EXECUTOR,
        "--scheduler-cls", "lockstep.vllm.Scheduler", "--additional-config", json.dumps({"lockstep": settings}),
    ]  # fmt: skip
    sources = os.pathsep.join(str(ROOT / package / "src") for package in PACKAGES)
    environment = {**os.environ, **VLLM_ENVIRONMENT, "PYTHONPATH": sources}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            until_s = time.monotonic() + READY_S
            while process.poll() is None and time.monotonic() < until_s:
                with suppress(OSError), urllib.request.urlopen(url + "/v1/models", timeout=5):
                    break
                time.sleep(0.5)
            else:
                raise SystemExit(f"vLLM does not get ready: {folder / 'server.log'}")
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def runs_of(folder: Path, name: str) -> list[Path]:
    """Return the folders of the runs of a load: NAME, NAME.2, ..."""
    return [place for place in (folder / name, *sorted(folder.glob(f"{name}.*"))) if (place / "client").is_dir()]


def measure(folder: Path, names: list[str], python: str, runs: int) -> None:
    """Serve the loads in turn, `runs` times. Runs that are there already stay."""
    for name in names * runs:
        number = len(runs_of(folder, name)) + 1
        place = folder / (name if number == 1 else f"{name}.{number}")
        place.mkdir(parents=True)
        with vllm_server(python, LOADS[name], place) as url:
            client = [
                sys.executable, "-c", COMMAND, "bench", "serve", "--to", url, "--vocab", str(VOCABULARY),
                "--workload", LOADS[name].workload, "--warm-up", str(WARM_UP), "--out", str(place / "client"),
            ]  # fmt: skip
            subprocess.run(client, check=True)


# -------------------------------------------------------------------------------------------------------------- report


def calibrate(folder: Path) -> Path:
    """Calibrate on the load `fit`. Returns the file."""
    out = folder / "twin.json"
    command = [
        sys.executable, "-c", COMMAND, "calibrate", "--from", str(folder / "fit/engine"),
        "--client", str(folder / "fit/client"), "--gpu", "cpu", "--model", str(MODEL), "--date", DATE,
        "--out", str(out),
    ]  # fmt: skip
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print("\n".join(line for line in said.splitlines() if not line.startswith("simulate: ")))  # it has paths
    return out


def setup_of(load: Load, calibration: Path, pages: int) -> Any:
    """Return the setup of a simulation of a load's arrivals."""
    from lockstep.sim.run.assemble import assemble
    from lockstep.sim.scenario.scenario import Scenario

    scenario = Scenario(
        model=str(MODEL),
        gpu="cpu",
        workload=load.workload,
        warm_up=WARM_UP,
        calibration=str(calibration),
        profile="vllm",
        settings=load.settings(pages),
    )
    return assemble(scenario, {})


def pace(journal: Path, setup: Any) -> float:
    """Return how much longer the batches of a run took than simulated: what the machine did meanwhile, and the fit."""
    from lockstep.sim.results.batch_times import of_journal, predict

    batches = of_journal(journal).batches
    return float(sum(one.took_us for one in batches) / predict(setup.cost, batches).sum())


@dataclass(frozen=True)
class Found:
    """The latencies of a load: at its client, simulated, and simulated with batches at the pace of its runs."""

    runs: Sequence[Mapping[str, float]]  # as measured
    measured: Mapping[str, float]  # their mean
    simulated: Mapping[str, float]
    at_pace: Mapping[str, float]
    slower: Mapping[str, float]  # simulated, with batches that take PACE_NOISE longer
    intervals: Mapping[str, tuple[float, float]]
    pace: float

    @classmethod
    def of(cls, places: list[Path], load: Load, calibration: Path, pages: int) -> Found:
        """Simulate a load and read what was measured in its runs."""
        from lockstep.sim.cluster.intervals import intervals_of
        from lockstep.sim.run.simulate import simulate

        setup = setup_of(load, calibration, pages)
        run = simulate(setup)
        intervals = intervals_of(run)
        assert intervals is not None
        spans = {name: span for name, span in intervals.answers.items() if span is not None}
        speed = mean(pace(place / "engine", setup) for place in places)
        paced, slower = (simulate(setup.slowed(by)).data.summary["latency"] for by in (speed, 1.0 + PACE_NOISE))
        runs = [json.loads((place / "client/metrics.json").read_text())["latency"] for place in places]
        measured = {name: mean(one[name] for one in runs) for name in ("ttft_us_mean", *BARS)}
        return cls(runs, measured, run.data.summary["latency"], paced, slower, spans, speed)

    def spread(self, figure: str) -> float:
        """Return the largest difference of a figure between two runs; 0 for one run."""
        values = [one[figure] for one in self.runs]
        return max(values) - min(values)


def noise(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return the noise of an effect, given the figure of each load as simulated, and with slower batches."""
    return math.hypot(before[1] - before[0], after[1] - after[0])


def choose(folder: Path) -> None:
    """Print the effect of spf instead of fcfs on each candidate, and the rates that are chosen."""
    from lockstep.core.journal.reader import read_journal
    from lockstep.sim.run.simulate import simulate

    calibration, pages = folder / "twin.json", read_journal(folder / "fit/engine").header.config.pages
    if not calibration.is_file():
        calibrate(folder)
    print(f"{'kind':15}{'rate':>5}   effect on mean and median TTFT, and how many times their noise")
    for kind, (lengths, rows) in CANDIDATES.items():
        judged: list[bool] = []
        for rate in CANDIDATE_RATES:
            pairs = []  # of each policy: the latencies as simulated, and with slower batches
            for scheduler in ({}, SPF):
                load = Load(f"gen:n=600,rate={rate},{lengths},max_total=3000", rows=rows, scheduler=scheduler)
                setup = setup_of(load, calibration, pages)
                pairs.append([simulate(setup.slowed(by)).data.summary["latency"] for by in (1.0, 1.0 + PACE_NOISE)])
            text, least = "", math.inf
            for figure in ("ttft_us_mean", "ttft_us_p50"):
                before, after = ((usual[figure], slower[figure]) for usual, slower in pairs)
                effect, error = after[0] - before[0], noise(before, after)
                least = min(least, abs(effect) / error)
                text += f"{effect / 1e3:+11.1f} ms {abs(effect) / error:5.1f}"
            judged.append(least >= NOISES)
            print(f"{kind:15}{rate:5}{text}", flush=True)
        lowest = next((rate for i, rate in enumerate(CANDIDATE_RATES) if all(judged[i:])), None)
        print(f"{kind}: {f'{lowest} requests/s' if lowest else 'no rate'}")


def report(folder: Path) -> dict[str, Any]:
    """Print measured and simulated figures of every load in the folder. Returns them, with the bars that are missed."""
    from lockstep.core.journal.reader import read_journal

    calibration = calibrate(folder)
    pages = read_journal(folder / "fit/engine").header.config.pages
    loads: dict[str, Found] = {}
    for name, load in LOADS.items():
        if places := runs_of(folder, name):
            loads[name] = Found.of(places, load, calibration, pages)
        else:
            print(f"{name}: not measured")
    missed: list[str] = []
    figures = list(_figures(loads, missed))
    tested = [row for row in figures if row["load"] in TESTED]
    if tested:
        covered = sum(row["covered"] for row in tested) / len(tested)
        print(f"{covered:.0%} of the {len(tested)} figures of {', '.join(TESTED)} are inside their 90 % intervals")
        if covered < COVERED_MIN:
            missed.append(f"coverage {covered:.0%}, the bar is {COVERED_MIN:.0%}")
    changes = list(_changes(loads, missed))
    print("\nall bars are met" if not missed else "\nmissed: " + "; ".join(missed))
    return {"figures": figures, "changes": changes, "missed": missed}


def _figures(loads: Mapping[str, Found], missed: list[str]) -> Iterator[dict[str, Any]]:
    """Print and yield the figures of every load; append what misses its bar."""
    print("\nat pace: simulated with batches as long, on the whole, as those of that run; it shows what is left of the")
    print("error without the drift of the machine, and is no prediction")
    print(f"\n{'load':9}{'figure':14}{'measured':>12}{'simulated':>12}{'error':>8}{'at pace':>9}   90 % interval")
    for name, one in loads.items():
        print(f"{name}: batches took {one.pace:.3f} times as long as simulated")
        for figure, bar in BARS.items():
            real, twin, paced, (low, high) = (
                part[figure] for part in (one.measured, one.simulated, one.at_pace, one.intervals)
            )
            error, covered = twin / real - 1.0, low <= real <= high
            if name in TESTED and abs(error) > bar:
                missed.append(f"{name} {figure}: {error:+.1%}, the bar is {bar:.0%}")
            span = f"{low / 1e3:.2f} to {high / 1e3:.2f}{'' if covered else '   not covered'}"
            print(
                f"{name:9}{figure:14}{real / 1e3:9.2f} ms{twin / 1e3:9.2f} ms{error:+8.1%}{paced / real - 1.0:+9.1%}"
                f"   {span}"
            )
            yield {
                "load": name, "figure": figure, "measured_us": round(real, 1), "simulated_us": round(twin, 1),
                "error": round(error, 4), "error_at_pace": round(paced / real - 1.0, 4), "pace": round(one.pace, 4),
                "interval_us": [round(low, 1), round(high, 1)], "covered": bool(covered),
            }  # fmt: skip


def _changes(loads: Mapping[str, Found], missed: list[str]) -> Iterator[dict[str, Any]]:
    """Print and yield the effects of the changes; append what misses the bar."""
    print("\nruns: how many of each load, and the largest difference of the figure between two of them")
    print(
        f"\n{'change':23}{'figure':13}{'measured':>12}{'runs':>14}{'simulated':>13}{'noise':>8}{'at pace':>12}"
        "   error of the effect, at pace"
    )
    for before, after, figure in CHANGES:
        if before not in loads or after not in loads:
            continue
        pair = loads[before], loads[after]
        real, twin, paced = (
            getattr(pair[1], part)[figure] - getattr(pair[0], part)[figure]
            for part in ("measured", "simulated", "at_pace")
        )
        off, title = twin / real - 1.0, f"{before} -> {after}"
        error = noise(*((one.simulated[figure], one.slower[figure]) for one in pair))
        judged = abs(twin) >= NOISES * error
        if judged and abs(off) > SIZE_MAX:
            missed.append(f"{title} {figure}: the effect is off by {off:+.0%}, the bar is {SIZE_MAX:.0%}")
        number, spread = min(len(one.runs) for one in pair), max(one.spread(figure) for one in pair)
        print(
            f"{title:23}{figure:13}{real / 1e3:+9.1f} ms{number:4}{f'{spread / 1e3:.1f}' if number > 1 else '':>7} ms"
            f"{twin / 1e3:+10.1f} ms{error / 1e3:8.1f}{paced / 1e3:+9.1f} ms{off:+8.0%}{paced / real - 1.0:+8.0%}"
            f"{'' if judged else '   not judged'}"
        )
        yield {
            "change": title, "figure": figure, "measured_us": round(real, 1), "runs": number,
            "spread_us": round(spread, 1), "simulated_us": round(twin, 1), "noise_us": round(error, 1),
            "at_pace_us": round(paced, 1), "judged": judged,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="A digital twin of vLLM on this machine.")
    parser.add_argument("action", choices=("measure", "choose", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", metavar="PYTHON", help="with measure: interpreter of an environment with vLLM")
    parser.add_argument("--loads", default=",".join(LOADS), help="with measure (default %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="with measure: of each load, in turn (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with report: write the figures there as well")
    options = parser.parse_args()
    if options.action == "measure":
        if not options.vllm:
            parser.error("measure requires --vllm PYTHON")
        measure(options.folder, options.loads.split(","), options.vllm, options.runs)
        return 0
    if options.action == "choose":
        choose(options.folder)
        return 0
    found = report(options.folder)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["missed"]))


if __name__ == "__main__":
    sys.exit(main())
