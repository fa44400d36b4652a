"""The same load from a public load generator and from `lockstep bench serve`: do their figures agree?

AIPerf (PyPI) and our generator load one server in turn, `lockstep serve` with an emulated model that is slow enough for
network and clients not to matter: requests at a constant rate, prompts and answers of fixed lengths, the demo model's
tokenizer, nothing from the network. Bar: means of TTFT, ITL, end to end latency and both throughputs within 5 %. One
after the other, so a machine that others use, too, needs several rounds, or quiet.

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf         # 1.2 GB, so not into our environment
    python benchmarks/load_generators.py --aiperf /tmp/aiperf/bin/aiperf [--requests 180] [--rounds 3] [--json FILE]

HF_HUB_OFFLINE must not be set: AIPerf 0.13 then refuses tokenizers of local folders.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from live_server import serving

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "packages" / "gpu-runtime" / "src" / "lockstep" / "runtime" / "demo_model" / "files"
BENCH = "from lockstep.tools.bench import bench; bench()"
RATE, INPUT, OUTPUT = 3, 200, 16
SPEED = 0.1  # of the emulated GPU: about 50 ms a token
BAR = 0.05
OURS = {
    "TTFT, ms": ("latency", "ttft_us_mean", 1e-3),
    "ITL, ms": ("latency", "tpot_us_mean", 1e-3),  # what AIPerf calls inter token latency: docs/metrics.md
    "end to end, ms": ("latency", "e2e_us_mean", 1e-3),
    "requests/s": ("throughput", "requests_per_s", 1.0),
    "output tokens/s": ("throughput", "output_tokens_per_s", 1.0),
}
AIPERF = {
    "TTFT, ms": "time_to_first_token",
    "ITL, ms": "inter_token_latency",
    "end to end, ms": "request_latency",
    "requests/s": "request_throughput",
    "output tokens/s": "output_token_throughput",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), help="the program")
    parser.add_argument("--requests", type=int, default=180)
    parser.add_argument("--rounds", type=int, default=3, help="of each; medians are compared")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.aiperf is None or not Path(arguments.aiperf).is_file():
        parser.error(f"aiperf is not installed: {arguments.aiperf or 'none on PATH'}; see above for how")
    found: dict[str, list[dict[str, float]]] = {"aiperf": [], "lockstep": []}
    with served() as url, tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            found["aiperf"].append(aiperf(arguments.aiperf, url, arguments.requests, Path(folder) / str(number)))
            found["lockstep"].append(ours(url, arguments.requests))
    print(f"{arguments.requests} requests at {RATE}/s, {INPUT} tokens in, {OUTPUT} out; median of {arguments.rounds}")
    print(f"{'':<18}{'aiperf':>10}{'lockstep':>10}{'ratio':>8}")
    worst = 0.0
    for name in OURS:
        theirs, mine = (statistics.median(one[name] for one in found[who]) for who in ("aiperf", "lockstep"))
        worst = max(worst, abs(mine / theirs - 1))
        print(f"{name:<18}{theirs:>10.2f}{mine:>10.2f}{mine / theirs:>8.3f}")
    print(f"farthest apart: {100 * worst:.1f} % (bar {100 * BAR:.0f} %)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"found": found, "worst": worst}, indent=1))
    return int(worst > BAR)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The server's address."""
    emulated = ("--emulate", "qwen3-8b@h200", "--tokenizer", str(DEMO), "--speed", str(SPEED), "--answer-tokens", "0")
    with serving(*emulated) as (url, _):
        yield url


def aiperf(program: str, url: str, requests: int, folder: Path) -> dict[str, float]:
    """What AIPerf measures."""
    words = ["profile", "-m", "qwen3-8b", "--url", url, "--endpoint-type", "completions", "--streaming"]
    words += ["--tokenizer", str(DEMO), "--use-server-token-count", "--use-legacy-max-tokens"]
    words += ["--request-rate", str(RATE), "--arrival-pattern", "constant", "--request-count", str(requests)]
    for kind, tokens in (("synthetic-input", INPUT), ("output", OUTPUT)):
        words += [f"--{kind}-tokens-mean", str(tokens), f"--{kind}-tokens-stddev", "0"]
    words += ["--extra-inputs", "ignore_eos:true", "--random-seed", "7", "--ui", "none", "--artifact-dir", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    done = subprocess.run([program, *words], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"aiperf ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    if said["request_count"]["avg"] != requests:
        raise SystemExit(f"aiperf has {said['request_count']['avg']} answers of {requests}")
    return {name: float(said[theirs]["avg"]) for name, theirs in AIPERF.items()}


def ours(url: str, requests: int) -> dict[str, float]:
    """What `lockstep bench serve` measures."""
    load = f"gen:n={requests},rate={RATE},arrivals=constant,input=fixed:{INPUT},output=fixed:{OUTPUT}"
    command = [sys.executable, "-c", BENCH, "serve", "--to", url, "--workload", load, "--json"]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if said["requests"]["completed"] != requests:
        raise SystemExit(f"{said['requests']['completed']} answers of {requests}: {said['errors']}")
    return {name: said[group][field] * unit for name, (group, field, unit) in OURS.items()}


if __name__ == "__main__":
    sys.exit(main())
