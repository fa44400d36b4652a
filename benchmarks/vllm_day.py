"""A day in small of a vLLM server under Lockstep: 30 minutes of Mooncake's requests, then what its journal tells.

    LOCKSTEP_DATA=... python -m benchmarks.vllm_day --out runs/day [--minutes 30] [--share 0.6] [--json FILE]

Run it with the interpreter of an environment that has vLLM, with PYTHONPATH as `dev.py vllm-test` sets it. It

1. scales Mooncake's conversation trace to the demo model: lengths and blocks divided, times and sharing unchanged;
2. starts a vLLM server with the scheduler class, and measures the requests per second that it serves in a closed loop
   of STREAMS requests, with requests from the end of the trace;
3. starts it again, with a journal, and sends the trace from its beginning, at `--share` of that rate, for `--minutes`;
4. stops the server, and verifies, measures and explains the journal.

Four bars, exit status 1 if one is missed. Every request is answered, and the journal verifies. Of each of the ten
slowest requests, at least 80 % of the time to the first token is attributed to causes. Between the last and the middle
third of the time, the scheduler's own structures (the smallest sample, that with the fewest open requests) and the
resident set of the engine process (the mean) differ by less than 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
TRACE = "traces/mooncake/conversation_trace.jsonl.gz"
TRACE_S = 3537.0
STREAMS = 24  # of the closed loop
PROBED = "2950..3537"  # the part of the trace by which the sustained rate is measured, in seconds
CONTEXT = 4096
PROMPT_TOKENS_MAX = 2000  # longer ones of the scaled trace are left out, so that prompt and output fit into CONTEXT
VOCAB = 2048
SLOWEST = 10
FLAT = 0.05
EXPLAINED = 0.8
START_S = 300.0  # the most that the server may take to start

SERVER_OPTIONS = [
    "--served-model-name", "demo", "--max-model-len", str(CONTEXT), "--block-size", "32", "--dtype", "float32",
    "--enforce-eager", "--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--num-gpu-blocks-override", "4096",
    "--shutdown-timeout", "30",
    "--scheduler-cls", "benchmarks.sampled_scheduler.SampledScheduler",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="A day in small of a vLLM server under Lockstep.")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for everything that is written")
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.6, help="of the sustained rate (default %(default)s)")
    parser.add_argument("--by", type=int, default=16, help="divisor of the trace's prompts (default %(default)s)")
    parser.add_argument("--outputs-by", type=int, default=1, help="divisor of its outputs (default %(default)s)")
    parser.add_argument("--probe", type=int, default=400, help="requests of the closed loop (default %(default)s)")
    parser.add_argument("--port", type=int, default=8123, help="of the server (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    data = os.environ.get("LOCKSTEP_DATA")
    if data is None or not (Path(data) / TRACE).is_file():
        print(f"LOCKSTEP_DATA must name the folder with {TRACE}", file=sys.stderr)
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True)
    workload, samples = out / "workload.jsonl", out / "samples.jsonl"
    scale = ["examples/scale_mooncake.py", str(Path(data) / TRACE), "--by", str(options.by)]
    scale += ["--outputs-by", str(options.outputs_by), "--longest", str(PROMPT_TOKENS_MAX)]
    workload.write_bytes(subprocess.run([sys.executable, *scale], cwd=ROOT, check=True, capture_output=True).stdout)
    with server(out, options.port, {}, samples.with_suffix(".probe")):
        probe = bench(options.port, out / "probe", workload, window=PROBED, limit=options.probe, concurrency=STREAMS)
        sustained = probe["throughput"]["requests_per_s"]
        rows = sum(1 for _ in workload.open())
        scale_by = options.share * sustained * TRACE_S / rows
        recorded_s = options.minutes * 60 * scale_by
    print(f"sustained {sustained:.2f} requests/s; sends at {options.share:.0%} of it", flush=True)
    if recorded_s > TRACE_S:
        print(
            f"the trace has {TRACE_S:,.0f} s, and {recorded_s:,.0f} s are required: lower --minutes, or --by and "
            "--outputs-by, so that fewer requests are as much work",
            file=sys.stderr,
        )
        return 2
    with server(out, options.port, {"journal": str(out / "engine")}, samples):
        began = time.monotonic()
        day = bench(options.port, out / "day", workload, window=f"0..{recorded_s:.0f}", rate_scale=scale_by)
        lasted_s = time.monotonic() - began
    figures = {"sustained_requests_per_s": sustained, "lasted_s": lasted_s, **judged(out, day, samples, lasted_s)}
    for line in lines_of(figures):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(not all(figures["bars"].values()))


# --------------------------------------------------------------------------------------------------- server and clients


@contextlib.contextmanager
def server(out: Path, port: int, settings: dict[str, str], samples: Path) -> Iterator[int]:
    """A vLLM server with these settings of Lockstep, ready; stopped at the end. Yields its process id."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO), "--port", str(port),
        "--host", "127.0.0.1", *SERVER_OPTIONS, "--additional-config", json.dumps({"lockstep": settings}),
    ]  # fmt: skip
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ, "LOCKSTEP_SAMPLES": str(samples),
    }  # fmt: skip
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    with (out / "server.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            wait_for(process, port, out / "server.log")
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once the server answers. Raises SystemExit if it ends or takes longer than START_S."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}: {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(1)
    raise SystemExit(f"the server did not answer within {START_S:.0f} s: {log}")


def lockstep(name: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `lockstep NAME ARGUMENTS` of this checkout, which need not be installed."""
    program = f"from lockstep.tools.{name} import {name}; {name}(prog_name='lockstep {name}')"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise SystemExit(f"lockstep {name} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def bench(port: int, out: Path, workload: Path, **load: object) -> dict[str, Any]:
    """Run `lockstep bench serve` with this load; return its metrics."""
    flags = [text for name, value in load.items() for text in (FLAGS.get(name, f"--{name}"), value)]
    common = ("--to", f"http://127.0.0.1:{port}", "--vocab", VOCAB, "--workload", workload, "--out", out)
    print(lockstep("bench", "serve", *common, *flags).stdout, flush=True)
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


FLAGS = {"window": "--time-window", "rate_scale": "--rate-scale"}

# -------------------------------------------------------------------------------------------------------------- figures


def judged(out: Path, day: dict[str, Any], samples: Path, lasted_s: float) -> dict[str, Any]:
    """Verify and explain the journal, and compare the samples of memory. Returns the figures, with `bars`."""
    run = out / "engine"
    verified = lockstep("journal", "verify", run, check=False)
    told = json.loads(lockstep("explain", run, "--slowest", "ttft", SLOWEST, "--json").stdout)["requests"]
    slowest = [named(one) for one in told]
    (out / "slowest.txt").write_text(lockstep("explain", run, "--slowest", "ttft", SLOWEST).stdout)
    read = [json.loads(line) for line in samples.read_text().splitlines()]
    end_us = read[-1]["time_us"]
    middle, last = ([one for one in read if a <= one["time_us"] < b] for a, b in thirds(end_us, lasted_s))
    memory = {name: {"middle": typical(middle, name), "last": typical(last, name)} for name in ("rss_bytes", *COUNTED)}
    own = [sum(memory[name][part] for name in OWN) for part in ("middle", "last")]
    requests = day["requests"]
    return {
        "requests": {name: requests[name] for name in ("arrived", "completed")},
        "rates": day["throughput"],
        "latency": {name: day["latency"][name] for name in day["latency"] if name.endswith(("p50", "p90", "p99"))},
        "journal_bytes": sum(path.stat().st_size for path in (run / "journal").iterdir()),
        "verify": verified.stdout.strip(),
        "slowest": slowest,
        "memory": memory,
        "samples": [[one[name] for name in ("time_us", "rss_bytes", *COUNTED)] for one in read if "objects" in one],
        "bars": {
            "answered and verified": verified.returncode == 0 and requests["completed"] == requests["arrived"],
            "slowest explained": all(one["explained"] >= EXPLAINED for one in slowest),
            "structures flat": abs(own[1] / own[0] - 1) < FLAT,
            "resident set flat": abs(memory["rss_bytes"]["last"] / memory["rss_bytes"]["middle"] - 1) < FLAT,
        },
    }


def named(one: dict[str, Any]) -> dict[str, Any]:
    """Return where the TTFT of an explained request went: causes of waits, prefill, and the explained share.

    A wait for the next launch is no cause: it is not counted as explained. The TTFT is that of the engine: what a late
    client adds is not in the journal.
    """
    causes = {name: us for name, us in one["waited_us_by_cause"].items() if us}
    prefill_us = one["ttft_us"] - one["queue_us"]
    share = (prefill_us + sum(us for name, us in causes.items() if name != "next launch")) / one["ttft_us"]
    return {
        "label": one["label"], "prompt_tokens": one["prompt_tokens"], "ttft_us": one["ttft_us"],
        "prefill_us": prefill_us, "causes": causes, "explained": round(share, 4),
    }  # fmt: skip


OWN = ("core_bytes", "host_bytes", "recording_bytes")
COUNTED = (*OWN, "radix_nodes", "objects", "requests")


def thirds(end_us: int, lasted_s: float) -> list[tuple[float, float]]:
    """Return the middle and the last third of the load, in microseconds of the engine."""
    part_us = lasted_s * 1e6 / 3
    return [(end_us - 2 * part_us, end_us - part_us), (end_us - part_us, end_us + 1)]


def typical(samples: list[dict[str, Any]], name: str) -> float:
    """Return the mean of the resident set, and the smallest sample of what grows with the open requests."""
    values = [one[name] for one in samples if name in one]
    return statistics.fmean(values) if name == "rss_bytes" else min(values)


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures as text."""
    rates, requests, latency = figures["rates"], figures["requests"], figures["latency"]
    yield (
        f"{requests['completed']:,} of {requests['arrived']:,} requests answered in "
        f"{figures['lasted_s'] / 60:.1f} minutes; {rates['requests_per_s']:.2f} requests/s of "
        f"{figures['sustained_requests_per_s']:.2f} sustained"
    )
    for name in ("ttft", "tpot", "e2e"):
        row = [f"{latency[f'{name}_us_{part}'] / 1e3:,.0f}" for part in ("p50", "p90", "p99")]
        yield f"{name:>8} p50, p90, p99: {', '.join(row)} ms"
    written = figures["journal_bytes"]
    yield f"journal: {written:,} bytes, {written / requests['arrived']:,.0f} a request"
    yield f"verify: {figures['verify']}"
    for one in figures["slowest"]:
        causes = ", ".join(f"{us / 1e3:,.0f} ms {cause}" for cause, us in one["causes"].items() if us)
        yield (
            f"  {one['label'][:-9]:<16} {one['prompt_tokens']:>5} tokens, TTFT {one['ttft_us'] / 1e3:,.0f} ms, "
            f"{one['explained']:.0%} explained: "
            f"{causes or 'no wait'}, {one['prefill_us'] / 1e3:,.0f} ms prefill"
        )
    for name, values in figures["memory"].items():
        yield f"  {name:>16}: {values['middle']:,.0f} in the middle third, {values['last']:,.0f} in the last"
    for name, kept in figures["bars"].items():
        yield f"{name}: {'kept' if kept else 'missed'}"


if __name__ == "__main__":
    sys.exit(main())
