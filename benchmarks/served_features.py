"""What a server measures with one feature of the runtime, against the simulator: TTFT and TPOT of the demo model.

    python benchmarks/cache_tiers.py --rounds 2   # rates of copies, for --host-gbs and --storage-gbs
    python benchmarks/handover.py                 # rate of shm, for --link-gbs
    OMP_NUM_THREADS=1 python benchmarks/served_features.py --out runs/features --host-gbs G --storage-gbs G --link-gbs G

For each feature `lockstep serve` runs on this CPU, one thread for each rank, and `lockstep bench serve` sends requests.
`lockstep simulate` then has the same requests, the settings of the engine's journal and a calibration. The calibration
is never of the run that it predicts: `fit` runs send other requests (another seed) before. Features whose batches
cannot be timed alone (stages, prefill and decode engines, tiers) take the calibration of one engine without a feature,
with the threads of one rank and requests of the same kind; ranks that compute together take one of their own layout.
For stages a run of their own gives what messages between processes take: the CPU time around batches, and the time of
a send, by which decodes of one request take longer than on one engine. The time between the client and the engine is
that of the plain engine in all of them.

The speed of a machine that others use, too, changes by the minute. So every round measures and fits every feature once,
and the medians of all rounds are compared.

An idle machine is needed: the ranks of a feature use both cores of a machine that has two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from live_server import serving

from lockstep.core.contract.config import SchedConfig
from lockstep.runtime.demo_model import demo_model_folder
from lockstep.sim.calibrate.engine_run import EngineRun
from lockstep.sim.cost import Calibration
from lockstep.sim.results.batch_times import BatchTime
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.scenario.settings import flag_of_setting, unusual_settings

CHAT = "gen:n={n},rate=1,input=lognormal:600:0.4,output=lognormal:40:0.4"
PREFIXES = "gen:n={n},rate=1,input=lognormal:100:0.4,output=lognormal:40:0.4,shared_prefix=2000x6"
FIT_SEED, TEST_SEED = 7, 8
WARM_UP = 3  # requests that neither side counts
SHARED_BY_RANKS = ("pages", "chunked_prefill_size", "max_running_requests")  # of all shards together in a simulation
KV_BYTES_SHARE = 0.5  # the simulator's KV is bf16, that of a CPU float32
NO_OPTIONS: tuple[str, ...] = ()
DATE = "2026-11-28"  # of the calibrations, which are not kept


@dataclass(frozen=True)
class Feature:
    """A server with a feature, and its simulation."""

    name: str
    serve: tuple[str, ...] = ()
    simulate: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()  # options of both
    fit: Literal["plain", "prefixes", "own", "stages"] = "plain"  # whose runs calibrate it, see above
    journal: str = ""  # folder of an engine below that of the server
    ranks: int = 1  # data-parallel ranks, by whose number settings of one rank are multiplied
    load: str = CHAT
    experts: bool = False  # the model with experts instead of the demo model


def features(host_gbs: float, storage_gbs: float, link_gbs: float, storage: Path) -> list[Feature]:
    """Return the features in the order in which they are measured; the plain engine is the first."""
    tiers = ("--host-cache-gb", "1", "--set", "pages=400")
    simulated_tiers = (
        "--host-cache-gb", str(KV_BYTES_SHARE), "--host-link-gbs", str(host_gbs * KV_BYTES_SHARE),
    )  # fmt: skip
    handover = ("--prefill-engines", "1", "--decode-engines", "1")
    below = ("--storage", str(storage), "--storage-gb", "4", "--prefetch-policy", "wait_complete")
    stored = (
        "--storage-gb", "2", "--storage-gbs", str(storage_gbs * KV_BYTES_SHARE), "--prefetch-policy", "wait_complete",
    )  # fmt: skip
    ranks = ("--tp", "2", "--attention-dp", "2", "--rank-schedulers")
    return [
        Feature("plain"),
        Feature("prefixes", load=PREFIXES, fit="prefixes"),
        Feature("host memory", tiers, simulated_tiers, load=PREFIXES, fit="prefixes"),
        Feature("storage", (*tiers, *below), (*simulated_tiers, *stored), load=PREFIXES, fit="prefixes"),
        Feature(
            "prefill and decode engines", simulate=("--link-bandwidth", str(link_gbs)), layout=handover,
            journal="engines/1",
        ),
        Feature("pp 2", layout=("--pp", "2"), fit="stages"),
        Feature("tp 2", layout=("--tp", "2"), fit="own"),
        Feature("attention-dp 2", layout=ranks, fit="own", journal="engines/0", ranks=2),
        Feature("tp 2, experts", layout=("--tp", "2"), fit="own", experts=True),
        Feature("ep 2", layout=("--tp", "2", "--ep", "2"), fit="own", experts=True),
        Feature("ep 2, all-to-all", layout=(*ranks, "--ep", "2", "--moe-a2a"), fit="own", experts=True,
                journal="engines/0", ranks=2),
        Feature("two halves", layout=(*ranks, "--ep", "2", "--moe-a2a"),
                serve=("--set", "two_batch_overlap=true", "--set", "two_batch_decode_tokens=2"),
                fit="own", experts=True, journal="engines/0", ranks=2),
    ]  # fmt: skip


class Bench:
    """The runs of features in one folder."""

    def __init__(self, folder: Path, requests: int, experts: Path) -> None:
        self._folder, self._requests, self._experts = folder, requests, experts

    def at(self, feature: Feature, part: str) -> Path:
        """Return a path for a part of what is known of a feature."""
        return self._folder / f"{feature.name.replace(' ', '-').replace(',', '')}-{part}"

    def serve(self, feature: Feature, part: str, seed: int) -> Path:
        """Send the requests of a seed to a server with the feature; return the folder of its journal."""
        journal = self.at(feature, part)
        client = self.client(journal)
        for folder in (journal, client):
            shutil.rmtree(folder, ignore_errors=True)
        model = ("--model", str(self._experts), "--random-weights", "1") if feature.experts else ()
        with serving(*model, *feature.serve, *feature.layout, "--journal", str(journal)) as (url, _):
            lockstep(
                "bench", "serve", "--to", url, "--workload", feature.load.format(n=self._requests), "--seed", str(seed),
                "--warm-up", str(WARM_UP), "--out", str(client),
            )  # fmt: skip
        return journal

    @staticmethod
    def client(journal: Path) -> Path:
        """Return the folder of what the client measured of a run."""
        return journal.with_name(f"{journal.name}-client")

    def calibrate(self, feature: Feature, run: Path, part: str, *, with_client: bool = False) -> Path:
        """Fit a calibration to a run and, if asked, to its client's requests; return its file."""
        file = self.at(feature, f"{part}.json")
        at = ("--client", str(self.client(run))) if with_client else ()
        of = ("--model", str(self._experts)) if feature.experts else ()
        lockstep("calibrate", "journal", str(run / feature.journal), *of, *at, "--date", DATE, "--out", str(file))
        return file

    def simulate(self, feature: Feature, run: Path, calibration: Path, part: str, link: Sequence[str] = ()) -> Path:
        """Simulate the requests of a test run; return the run folder."""
        folder = self.at(feature, part)
        shutil.rmtree(folder, ignore_errors=True)
        config = EngineRun.read(run / feature.journal).config
        model = str(self._experts) if feature.experts else "demo"
        lockstep(
            "simulate", "--model", model, "--gpu", "cpu", "--workload", feature.load.format(n=self._requests),
            "--seed", str(TEST_SEED), "--warm-up", str(WARM_UP), "--calibration", str(calibration),
            *feature.layout, *feature.simulate, *link, *settings_of(config, feature), "--out", str(folder),
        )  # fmt: skip
        return folder


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


def figures(folder: Path) -> dict[str, float]:
    """Return mean and median of TTFT, TPOT and end-to-end time of a run folder's requests, in ms."""
    requests = read_run(folder).requests
    assert requests is not None
    rows = np.isin(requests["finish_reason"], ("length", "stop"))
    found = {}
    for metric in ("ttft", "tpot", "e2e"):
        values = np.asarray(requests[f"{metric}_us"], np.float64)[rows]
        values = values[np.isfinite(values) & (values >= 0)]
        found[f"{metric} mean"], found[f"{metric} p50"] = float(values.mean()) / 1e3, float(np.median(values)) / 1e3
    return found


def show(name: str, measured: Sequence[Path], simulated: Sequence[Path]) -> None:
    """Print a row for each figure: measured and simulated in each round, their medians, and how far these are apart."""
    runs, predicted = [figures(folder) for folder in measured], [figures(folder) for folder in simulated]
    for figure in predicted[0]:
        took, expected = [run[figure] for run in runs], [run[figure] for run in predicted]
        middle, foreseen = float(np.median(took)), float(np.median(expected))
        each, of_each = (" ".join(f"{ms:.2f}" for ms in values) for values in (took, expected))
        print(
            f"{name:28}{figure:10}{middle:9.2f} ms measured ({each}){foreseen:9.2f} ms simulated ({of_each})  "
            f"{foreseen / middle - 1:+.0%}",
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


def of_stages(calibration: Path, plain: Path, staged: Path, file: Path) -> tuple[Path, tuple[str, ...]]:
    """Return a calibration of one engine with the CPU time around batches of stages, and the options of their link.

    Args:
        plain, staged: runs of one engine and of stages.
        file: where the calibration goes.
    """
    runs = [EngineRun.read(plain), EngineRun.read(staged)]
    alone_us, staged_us = (np.median([one.took_us for one in run.times.batches if is_single(one)]) for run in runs)
    send_us = max(0, round(float(staged_us - alone_us)))
    lane = runs[1].lane()
    assert lane is not None  # a run of a few requests has many more gaps
    msgspec.structs.replace(Calibration.load(calibration), lane=lane).save(file)
    return file, ("--scale-up-gpus", "1", "--network-latency", f"{send_us}us")


def is_single(batch: BatchTime) -> bool:
    """Return whether a batch decodes one request."""
    return batch.mode == "decode" and batch.shape.decode_rows == 1


class Rounds:
    """The rounds of all features: runs to fit and to compare with, and simulations."""

    def __init__(self, bench: Bench, plain: Feature, prefixes: Feature) -> None:
        self._bench, self._plain, self._prefixes = bench, plain, prefixes
        self.measured: dict[str, list[Path]] = {}
        self.simulated: dict[str, list[Path]] = {}

    def run(self, number: int, features: Sequence[Feature]) -> None:
        """Serve and simulate each feature once."""
        bench, plain, prefixes = self._bench, self._plain, self._prefixes
        plain_run = bench.serve(plain, f"fit-{number}", FIT_SEED)
        plain_fit = bench.calibrate(plain, plain_run, f"fit-{number}", with_client=True)
        fits = {"plain": plain_fit}
        if any(feature.fit == "prefixes" for feature in features):
            found = bench.calibrate(prefixes, bench.serve(prefixes, f"fit-{number}", FIT_SEED), f"fit-{number}")
            fits["prefixes"] = with_frontend(found, plain_fit)
        for feature in features:
            calibration, link = fits.get(feature.fit, plain_fit), NO_OPTIONS
            if feature.fit in ("own", "stages"):
                fitted = bench.serve(feature, f"fit-{number}", FIT_SEED)
                if feature.fit == "own":
                    calibration = with_frontend(bench.calibrate(feature, fitted, f"fit-{number}"), plain_fit)
                else:
                    file = bench.at(feature, f"fit-{number}.json")
                    calibration, link = of_stages(plain_fit, plain_run, fitted, file)
            run = bench.serve(feature, f"test-{number}", TEST_SEED)
            simulated = bench.simulate(feature, run, calibration, f"simulated-{number}", link)
            self.measured.setdefault(feature.name, []).append(bench.client(run))
            self.simulated.setdefault(feature.name, []).append(simulated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="servers of each feature that are measured")
    parser.add_argument("--features", help="some of them, by name, separated by semicolons")
    parser.add_argument("--host-gbs", type=float, default=6.4, help="of benchmarks/cache_tiers.py")
    parser.add_argument("--storage-gbs", type=float, default=3.5, help="of benchmarks/cache_tiers.py")
    parser.add_argument("--link-gbs", type=float, default=1.7, help="half of what benchmarks/handover.py has for shm")
    given = parser.parse_args()
    out: Path = given.out
    known = features(given.host_gbs, given.storage_gbs, given.link_gbs, out / "store")
    wanted = given.features.split(";") if given.features else [feature.name for feature in known]
    if unknown := set(wanted) - {feature.name for feature in known}:
        parser.error(f"--features has {', '.join(sorted(unknown))}; known are {', '.join(one.name for one in known)}")
    bench = Bench(out, given.requests, write_experts_model(out / "experts"))
    rounds = Rounds(bench, known[0], known[1])
    for number in range(given.rounds):
        rounds.run(number, [feature for feature in known if feature.name in wanted])
        print(f"after {number + 1} of {given.rounds} rounds:")
        for name, measured in rounds.measured.items():
            show(name, measured, rounds.simulated[name])


if __name__ == "__main__":
    main()
