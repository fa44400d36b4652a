"""What a server measures with one feature of the runtime, against the simulator: TTFT and TPOT of the demo model.

    python benchmarks/cache_tiers.py --rounds 2   # rates of copies, for --host-gbs and --storage-gbs
    python benchmarks/handover.py                 # rate of shm, for --link-gbs
    OMP_NUM_THREADS=1 python benchmarks/served_features.py --out runs/features --host-gbs G --storage-gbs G --link-gbs G

For each feature `lockstep serve` runs on this CPU, one thread for each rank, and `lockstep bench serve` sends requests.
`lockstep simulate` then has the same requests, the settings of the engine's journal and a calibration. The calibration
is never of the run that it predicts: a server of the same layout gets other requests (another seed), and its batches
are fitted. For prefill and decode engines these are the batches of both, and the time from the end of a prompt to the
end of its transfer gives the latency of the link. The latencies of host memory and of storage are what loads and
prefetches took beyond their bytes at the measured rates. Batches of stages cannot be timed alone. Stages take the
calibration of one engine, the CPU time around their own batches, and the time of a send, by which decodes of one
request take longer than on one engine. The time between the client and the engine is that of the plain engine in all
of them.

A simulation draws the durations of batches, loads and prefetches, so it is repeated (`--draws`). The simulated figure
is the mean of all repetitions; the lowest and the highest one are printed behind it.

The speed of a machine that others use, too, changes by the minute. So the servers of the fit and of the feature are
there together and get parts of their requests in turn; one of them is idle while the other one answers. The requests of
the simulation have the same pauses between parts.

An idle machine is needed: the ranks of a feature use both cores of a machine that has two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from live_server import serving
from numpy.typing import NDArray

from lockstep.core.contract.commands import LoadFromHost, PrefetchFromStorage
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import HostCopyFinished, PrefetchFinished
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.runtime.demo_model import demo_model_folder
from lockstep.sim.calibrate.calibrate import STALL, batch_weights, timed_batches
from lockstep.sim.calibrate.engine_run import METRICS, EngineRun
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import Calibration, roofline_model
from lockstep.sim.cost.fit import correction_of
from lockstep.sim.results.batch_times import BatchTime, BatchTimes
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.scenario.settings import flag_of_setting, unusual_settings
from lockstep.sim.scenario.tier_options import SPREAD_MAX
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn, WorkloadError
from lockstep.sim.workload.workload import open_workload

CHAT = "gen:n={n},rate=1,input=lognormal:600:0.4,output=lognormal:40:0.4"
PREFIXES = "gen:n={n},rate=1,input=lognormal:100:0.4,output=lognormal:40:0.4,shared_prefix=2000x6"
STORED = PREFIXES.replace("2000x6", "2000x12")  # so that most requests wait for storage
WARM_UP = 3  # requests that are not compared
COLD = 12  # the same of PREFIXES, of STORED twice as many: prompts with new beginnings wait for each other
SHARED_BY_RANKS = ("pages", "chunked_prefill_size", "max_running_requests")  # of all shards together in a simulation
KV_BYTES_SHARE = 0.5  # the simulator's KV is bf16, that of a CPU float32
CPU_CORE = resources.files("lockstep.sim.catalogue") / "cpus" / "cpu-core.json"
PAUSE_S = 10  # between two parts at least: a client waits for the last answer of a part
DATE = "2026-11-28"  # of the calibrations, which are not kept


@dataclass(frozen=True)
class Feature:
    """A server with a feature, and its simulation."""

    name: str
    serve: tuple[str, ...] = ()
    simulate: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()  # options of both
    fit: Literal["plain", "own", "roles", "stages"] = "own"  # how a calibration is made, see above
    journal: str = ""  # folder of an engine below that of the server
    ranks: int = 1  # data-parallel ranks, by whose number settings of one rank are multiplied
    load: str = CHAT
    from_request: int = WARM_UP  # the first one that is compared
    experts: bool = False  # the model with experts instead of the demo model
    storage: bool = False  # with a folder of its own, which is empty before a run


def features(host_gbs: float, storage_gbs: float, link_gbs: float) -> list[Feature]:
    """Return the features in the order in which they are measured; the plain engine is the first."""
    tiers = ("--host-cache-gb", "1", "--set", "pages=400")
    simulated_tiers = (
        "--host-cache-gb", str(KV_BYTES_SHARE), "--host-link-gbs", str(host_gbs * KV_BYTES_SHARE),
    )  # fmt: skip
    handover = ("--prefill-engines", "1", "--decode-engines", "1")
    small = (
        "--host-cache-gb",
        "0.03",
        "--set",
        "pages=400",
    )  # three of twelve shared beginnings: others are in storage
    below = (*small, "--storage-gb", "4", "--prefetch-policy", "wait_complete")
    stored = (
        "--host-cache-gb", str(0.03 * KV_BYTES_SHARE), "--host-link-gbs", str(host_gbs * KV_BYTES_SHARE),
        "--storage-gb", "2", "--storage-gbs", str(storage_gbs * KV_BYTES_SHARE), "--prefetch-policy", "wait_complete",
    )  # fmt: skip
    ranks = ("--tp", "2", "--attention-dp", "2", "--rank-schedulers")
    return [
        Feature("plain", fit="plain"),
        Feature("prefixes", load=PREFIXES, from_request=COLD),
        Feature("host memory", tiers, simulated_tiers, load=PREFIXES, from_request=COLD),
        Feature("storage", below, stored, load=STORED, storage=True, from_request=2 * COLD),
        Feature(
            "prefill and decode engines", fit="roles", simulate=("--link-bandwidth", str(link_gbs)), layout=handover,
            journal="engines/1",
        ),
        Feature("pp 2", layout=("--pp", "2"), fit="stages"),
        Feature("tp 2", layout=("--tp", "2")),
        Feature("attention-dp 2", layout=ranks, journal="engines/0", ranks=2),
        Feature("tp 2, experts", layout=("--tp", "2"), experts=True),
        Feature("ep 2", layout=("--tp", "2", "--ep", "2"), experts=True),
        Feature("ep 2, all-to-all", layout=(*ranks, "--ep", "2", "--moe-a2a"), experts=True,
                journal="engines/0", ranks=2),
        Feature("two halves", layout=(*ranks, "--ep", "2", "--moe-a2a"),
                serve=("--set", "two_batch_overlap=true", "--set", "two_batch_decode_tokens=2"),
                experts=True, journal="engines/0", ranks=2),
    ]  # fmt: skip


class Bench:
    """The runs of features in one folder.

    Args:
        seconds: of each part of a load; one request a second arrives.
        parts: of each load.
        seed: of the requests of fits; those of features have the next one.
        draws: simulations of each run, the first with the seed of its requests, each other one with the next seed.
        experts: folder of the model with experts.
    """

    def __init__(self, folder: Path, seconds: int, parts: int, seed: int, draws: int, experts: Path) -> None:
        self._folder, self._seconds, self._parts, self._experts = folder, seconds, parts, experts
        self._draws = draws
        self._fit_seed, self._test_seed = seed, seed + 1

    def at(self, feature: Feature, part: str) -> Path:
        """Return a path for a part of what is known of a feature."""
        return self._folder / f"{feature.name.replace(' ', '-').replace(',', '')}-{part}"

    def _load(self, feature: Feature) -> str:
        return feature.load.format(n=2 * self._parts * self._seconds)  # more than arrive in all windows

    def _window(self, number: int) -> str:
        """Return the time window of a part of a load."""
        return f"{number * self._seconds}..{(number + 1) * self._seconds}"

    def _requests(self, feature: Feature, number: int, seed: int) -> list[Turn]:
        """Return the requests of a part of a load; of few seconds it may have none."""
        try:
            return list(open_workload(self._load(feature), seed=seed, time_window=self._window(number)).turns)
        except WorkloadError:  # nothing arrives in the window
            return []

    def _trace(self, feature: Feature) -> Path:
        """Write the requests of a test run with a pause behind each part; return the file."""
        rows = []
        for number in range(self._parts):
            begun_us = number * (self._seconds + max(self._seconds, PAUSE_S)) * 1_000_000
            for turn in self._requests(feature, number, self._test_seed):
                row = {"arrival_us": begun_us + turn.arrival_us, "input_tokens": turn.prompt_tokens}
                row |= {"output_tokens": turn.output_tokens, "prompt_token_ids": prompt_ids(turn.prompt).tolist()}
                rows.append(json.dumps(row))
        file = self.at(feature, "trace.jsonl")
        file.write_text("\n".join(rows) + "\n")
        return file

    def serve(self, runs: Mapping[str, tuple[Feature, int]], of: Feature) -> dict[str, Path]:
        """Send parts of loads to several servers in turn; return the folders of their journals.

        Args:
            runs: by name, a server with a feature, and the seed of its requests.
            of: the feature that these runs are of.
        """
        journals = {name: self.at(of, name) for name in runs}
        with contextlib.ExitStack() as servers:
            urls = {}
            for name, (feature, _) in runs.items():
                storage = self.at(of, f"{name}-store")
                for folder in (journals[name], storage):
                    shutil.rmtree(folder, ignore_errors=True)
                below = ("--storage", str(storage)) if feature.storage else ()
                model = ("--model", str(self._experts), "--random-weights", "1") if feature.experts else ()
                server = serving(*model, *feature.serve, *below, *feature.layout, "--journal", str(journals[name]))
                urls[name], _ = servers.enter_context(server)
            for number in range(self._parts):
                for name, (feature, seed) in runs.items():
                    client = self.client(journals[name], number)
                    shutil.rmtree(client, ignore_errors=True)
                    if not self._requests(feature, number, seed):
                        continue
                    lockstep(
                        "bench", "serve", "--to", urls[name], "--workload", self._load(feature),
                        "--time-window", self._window(number), "--seed", str(seed), "--out", str(client),
                    )  # fmt: skip
        return journals

    @staticmethod
    def client(journal: Path, number: int) -> Path:
        """Return the folder of what the client measured of a part of a run."""
        return journal.with_name(f"{journal.name}-client-{number}")

    def clients(self, journal: Path) -> list[Path]:
        """Return the folders of what the client measured of a run."""
        folders = [self.client(journal, number) for number in range(self._parts)]
        return [folder for folder in folders if folder.exists()]

    def calibrate(self, feature: Feature, run: Path, of: Feature, *, with_client: bool = False) -> Path:
        """Fit a calibration to a run and, if asked, to what its clients measured; return its file."""
        file = self.at(of, "fit.json")
        at = [word for folder in self.clients(run) if with_client for word in ("--client", str(folder))]
        model = ("--model", str(self._experts)) if feature.experts else ()
        lockstep("calibrate", "journal", str(run / feature.journal), *model, *at, "--date", DATE, "--out", str(file))
        return file

    def simulate(self, feature: Feature, run: Path, costs: Costs) -> list[Path]:
        """Simulate the requests of a test run with several draws of durations; return the run folders."""
        config = EngineRun.read(run / feature.journal).config
        model = str(self._experts) if feature.experts else "demo"
        trace = self._trace(feature)
        folders = [self.at(feature, f"simulated-{number}") for number in range(self._draws)]
        for number, folder in enumerate(folders):
            shutil.rmtree(folder, ignore_errors=True)
            lockstep(
                "simulate", "--model", model, "--gpu", str(costs.device),
                "--workload", str(trace), "--seed", str(self._test_seed + number),
                "--calibration", str(costs.calibration), *feature.layout, *feature.simulate, *costs.options,
                *settings_of(config, feature), "--out", str(folder),
            )  # fmt: skip
        return folders

    def compare(self, feature: Feature, plain: Feature) -> None:
        """Serve and simulate a feature, and print the figures of both."""
        runs = {"fit": (feature, self._fit_seed), "test": (feature, self._test_seed)}
        if feature.fit == "stages":
            runs["plain"] = (plain, self._fit_seed)
        journals = self.serve(runs, feature)
        of_plain = self.at(plain, "fit.json")
        if feature.fit == "plain":
            costs = Costs(self.calibrate(feature, journals["fit"], feature, with_client=True))
        elif feature.fit == "own":
            fitted = with_frontend(self.calibrate(feature, journals["fit"], feature), of_plain)
            costs = Costs(fitted, options=tier_latencies(journals["fit"], feature) if feature.simulate else ())
        elif feature.fit == "roles":
            costs = of_roles(of_plain, journals["fit"], feature, self.at(feature, "fit.json"))
        else:
            calibration = with_frontend(self.calibrate(plain, journals["plain"], feature), of_plain)
            costs = of_stages(calibration, journals["plain"], journals["fit"], self.at(feature, "link"))
        show(feature, self.clients(journals["test"]), self.simulate(feature, journals["test"], costs))


@dataclass(frozen=True)
class Costs:
    """What a simulation takes from runs of the fit: a calibration, a device, and options."""

    calibration: Path
    device: Path = Path("cpu")
    options: tuple[str, ...] = ()


def settings_of(config: SchedConfig, feature: Feature) -> list[str]:
    """Return the options of `simulate` that give an engine these settings."""
    given, given_with = ["--profile", "lockstep"], (*feature.layout, *feature.simulate)
    for name, value in unusual_settings(config, "lockstep").items():
        if f"--{name.replace('_', '-')}" in given_with or name == "role":
            continue
        shown = value * feature.ranks if name in SHARED_BY_RANKS and isinstance(value, int) else value
        flag = flag_of_setting(name)
        if isinstance(shown, bool):
            given.append(flag if shown else f"--no-{flag[2:]}")
        else:
            given += [flag, f"{shown}us" if name.endswith("_us") else str(shown)]
    return given


def lockstep(*arguments: str) -> None:
    """Run a command; its output is shown only if it fails."""
    code = "import sys; from lockstep.core.command import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lockstep {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def figures(folders: Sequence[Path], from_request: int) -> dict[str, float]:
    """Return mean, median and 90th percentile of TTFT, TPOT and end-to-end time of a run's requests, in ms.

    Args:
        folders: run folders of the parts of a run.
        from_request: the first request that counts.
    """
    columns: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for folder in folders:
        requests = read_run(folder).requests
        assert requests is not None
        order = np.argsort(requests["request_id"])
        done = np.isin(requests["finish_reason"], ("length", "stop"))
        for metric in METRICS:
            values = np.asarray(requests[f"{metric}_us"], np.float64)
            columns[metric].append(np.where(done & (values >= 0), values, np.nan)[order])
    found = {}
    for metric, parts in columns.items():
        values = np.concatenate(parts)[from_request:] / 1e3
        found[f"{metric} mean"] = float(np.nanmean(values))
        found |= {f"{metric} p{share}": float(np.nanpercentile(values, share)) for share in (50, 90)}
    return found


def show(feature: Feature, measured: Sequence[Path], simulated: Sequence[Path]) -> None:
    """Print a row for each figure: measured, mean of the simulations, how far they are apart, and the range."""
    took = figures(measured, feature.from_request)
    drawn = [figures([folder], feature.from_request) for folder in simulated]
    for figure, ms in took.items():
        values = [one[figure] for one in drawn]
        expected = sum(values) / len(values)
        print(
            f"{feature.name:28}{figure:10}{ms:9.2f} ms measured {expected:9.2f} ms simulated  {expected / ms - 1:+.0%}"
            f"  ({min(values) / ms - 1:+.0%} to {max(values) / ms - 1:+.0%})",
            flush=True,
        )


def write_experts_model(folder: Path) -> Path:
    """Write the folder of a model like the demo model with 8 experts in each layer, without weights; return it."""
    source = demo_model_folder()
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config["intermediate_size"] // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder


def with_frontend(calibration: Path, plain: Path) -> Path:
    """Give a calibration of a layout the time between client and engine that the plain server has."""
    of_layout, of_plain = Calibration.load(calibration), Calibration.load(plain)
    correction = msgspec.structs.replace(of_layout.correction, frontend_us=of_plain.correction.frontend_us)
    msgspec.structs.replace(of_layout, correction=correction).save(calibration)
    return calibration


def of_roles(of_plain: Path, run: Path, feature: Feature, file: Path) -> Costs:
    """Return the costs of prefill and decode engines: their batches, and the latency of their link.

    Args:
        of_plain: calibration that has the front end.
        run: with the journals of a prefill and a decode engine.
        file: where the calibration goes.
    """
    prefill, decode = (EngineRun.read(run / "engines" / number) for number in ("0", "1"))
    model = load_model("demo")
    timed = timed_batches(
        BatchTimes([*prefill.times.batches, *decode.times.batches]), roofline_model(model, load_gpu("cpu")), run
    )
    known, lane = Calibration.load(of_plain), decode.lane()
    assert lane is not None  # a run of a few requests has many more gaps
    correction = correction_of(batch_weights(timed.parts, timed.took_us), known.correction.frontend_us)
    msgspec.structs.replace(known, correction=correction, lane=lane).save(file)
    sent_us = np.median([e2e_us - ttft_us for ttft_us, _, e2e_us in prefill.answers.values()])
    rate_gbs = float(feature.simulate[feature.simulate.index("--link-bandwidth") + 1])
    copied_us = (
        np.median([one.shape.extend_tokens for one in prefill.times.batches])
        * model.kv_bytes_per_token("bf16")
        / (rate_gbs * 1e3)
    )
    return Costs(file, options=("--link-latency", f"{max(0, round(float(sent_us - copied_us)))}us"))


def tier_latencies(run: Path, feature: Feature) -> tuple[str, ...]:
    """Return the options with the latencies of loads and prefetches of a run, and their spreads.

    A latency is the time beyond the bytes of a move at the given rate.
    """
    config = read_journal(run).header.config
    page_bytes = config.page_size * load_model("demo").kv_bytes_per_token("bf16")
    begun_us: dict[tuple[str, int], int] = {}
    took_us: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by tier: pages and time of each move
    for event, step in fold(run):
        if isinstance(event, PrefetchFinished):
            tier, number = "storage", event.prefetch_id
        elif isinstance(event, HostCopyFinished):
            tier, number = "host-link", event.copy_id
        else:
            tier, number = "", 0
        if (tier, number) in begun_us and event.pages_done:
            took_us[tier].append((event.pages_done, event.time_us - begun_us[tier, number]))
        for command in step.commands:
            if isinstance(command, PrefetchFromStorage):
                begun_us["storage", command.prefetch_id] = event.time_us
            elif isinstance(command, LoadFromHost):
                begun_us["host-link", command.copy_id] = event.time_us
    options: list[str] = []
    for tier, moves in took_us.items():
        gbs = float(feature.simulate[feature.simulate.index(f"--{tier}-gbs") + 1])
        whole = [one for one in moves if 2 * one[0] >= max(moves)[0]]  # others are of rests of a beginning
        bytes_us = float(np.mean([pages for pages, _ in whole])) * page_bytes / (gbs * 1e3)
        took_us = [us - bytes_us for _, us in whole]
        mean_us, median_us = max(float(np.mean(took_us)), 1.0), max(float(np.median(took_us)), 1.0)
        spread = math.sqrt(max((mean_us / median_us) ** 2 - 1.0, 0.0))  # of a log-normal distribution with these two
        options += [f"--{tier}-latency", f"{round(mean_us)}us"]
        options += [f"--{tier}-latency-spread", f"{min(spread, SPREAD_MAX):.3f}"]
    return tuple(options)


def of_stages(calibration: Path, plain: Path, staged: Path, folder: Path) -> Costs:
    """Return the costs of stages: a calibration of one engine, with their CPU time around batches and their link.

    Args:
        plain, staged: runs of one engine and of stages.
        folder: where the files go.
    """
    runs = [EngineRun.read(plain), EngineRun.read(staged)]
    alone_us, staged_us = (usual_mean([one.took_us for one in run.times.batches if is_single(one)]) for run in runs)
    lane = runs[1].lane()
    assert lane is not None  # a run of a few requests has many more gaps
    folder.mkdir(exist_ok=True)
    fit, device = folder / "calibration.json", folder / "device.json"
    msgspec.structs.replace(Calibration.load(calibration), lane=lane).save(fit)
    described = json.loads(CPU_CORE.read_text())
    described["measured"] = {"send_latency_us": max(0, round(staged_us - alone_us))}
    described["sources"]["measured.send_latency_us"] = "decodes of one request, by stages and by one engine"
    device.write_text(json.dumps(described))
    return Costs(fit, device)


def usual_mean(took_us: Sequence[float]) -> float:
    """Return the mean of times without stalls, as a fit has it."""
    values = np.asarray(took_us)
    return float(values[values <= STALL * np.median(values)].mean())


def is_single(batch: BatchTime) -> bool:
    """Return whether a batch decodes one request."""
    return batch.mode == "decode" and batch.shape.decode_rows == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=30, help="of each part of a load, with a request a second")
    parser.add_argument("--parts", type=int, default=2, help="of each load")
    parser.add_argument(
        "--seed", type=int, default=7, help="of the requests of fits; those of features have the next one"
    )
    parser.add_argument("--draws", type=int, default=8, help="simulations of each feature")
    parser.add_argument("--features", help="some of them, by name, separated by semicolons")
    parser.add_argument("--host-gbs", type=float, default=6.4, help="of benchmarks/cache_tiers.py")
    parser.add_argument("--storage-gbs", type=float, default=3.5, help="of benchmarks/cache_tiers.py")
    parser.add_argument("--link-gbs", type=float, default=1.7, help="half of what benchmarks/handover.py has for shm")
    given = parser.parse_args()
    if min(given.seconds, given.parts, given.draws) < 1:
        had = f"{given.seconds}, {given.parts} and {given.draws}"
        parser.error(f"--seconds, --parts and --draws must be at least 1, got {had}")
    out: Path = given.out
    known = features(given.host_gbs, given.storage_gbs, given.link_gbs)
    wanted = given.features.split(";") if given.features else [feature.name for feature in known]
    if unknown := set(wanted) - {feature.name for feature in known}:
        parser.error(f"--features has {', '.join(sorted(unknown))}; known are {', '.join(one.name for one in known)}")
    bench = Bench(out, given.seconds, given.parts, given.seed, given.draws, write_experts_model(out / "experts"))
    plain = known[0]
    for feature in known:
        has_front_end = bench.at(plain, "fit.json").exists()
        if feature.name in wanted or (feature is plain and not has_front_end):
            bench.compare(feature, plain)


if __name__ == "__main__":
    main()
