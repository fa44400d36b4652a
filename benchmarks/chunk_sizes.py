"""Rules for the length of chunks, on three recorded traces: fixed, by load, by a latency target, of equal cost.

Each trace runs near the knee of its engine: code completion and chat by arrivals, coding agents as a closed loop of
sessions. Chunks of equal cost are compared with two pipeline stages, where they exist. A request is good if its first
token came within 2 s and its TPOT is at most 50 ms. Times are those of vLLM.

    LOCKSTEP_DATA=... python benchmarks/chunk_sizes.py [--trace NAME ...] [--limit N] [--json FILE]

Simulated: the figures are the same on every machine. What they show: docs/profiles.md, "Chunk sizes".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from recorded_data import data_folder

from lockstep.sim.metrics.slo import Slo
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

SLOS = (Slo.parse("ttft=2s"), Slo.parse("tpot=50ms"))
MAX_NEW_TOKENS = 4096
TRACES: dict[str, tuple[str, dict[str, Any]]] = {
    "code": ("traces/azure/AzureLLMInferenceTrace_code.csv.gz", {"rate": 2.5}),
    "chat": ("traces/mooncake/conversation_trace.jsonl.gz", {"rate": 0.7}),
    "agents": ("traces/agentic/agentic_developers.jsonl.gz", {"concurrency": 6}),
}
"""Files below LOCKSTEP_DATA, and the load."""

RULES: dict[str, dict[str, Any]] = {
    "8192": {"chunked_prefill_size": 8192},
    "2048": {},
    "1024": {"chunked_prefill_size": 1024},
    "512": {"chunked_prefill_size": 512},
    "by load, 8192 to 512": {"chunked_prefill_size": 8192, "chunked_prefill_size_min": 512, "max_running_requests": 64},
    "by load, 2048 to 256": {"chunked_prefill_size_min": 256, "max_running_requests": 64},
    "2048, at most 64 running": {"max_running_requests": 64},
    "target 45 ms": {"chunked_prefill_size": 8192, "chunk_target_us": 45_000},
    "target 45 ms, by load": {
        "chunked_prefill_size": 8192,
        "chunk_target_us": 45_000,
        "chunked_prefill_size_min": 512,
        "max_running_requests": 64,
    },
    "2 stages, 2048": {"pp_size": 2},
    "2 stages, equal cost": {"pp_size": 2, "pp_dynamic_chunking": True},
    "2 stages, 8192": {"pp_size": 2, "chunked_prefill_size": 8192},
    "2 stages, 8192, equal cost": {"pp_size": 2, "chunked_prefill_size": 8192, "pp_dynamic_chunking": True},
}
"""Settings of the scheduler, beside those of the profile lockstep."""

Row = dict[str, Any]


def main() -> int:
    """Compare the rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES), help="which; default all")
    parser.add_argument("--rule", nargs="+", choices=RULES, default=list(RULES), help="which; default all")
    parser.add_argument("--limit", type=int, default=600, help="requests of each run (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    given = parser.parse_args()
    data, rows = data_folder("traces/"), list[Row]()
    for trace in given.trace:
        print(
            f"{trace}\n{'':28}{'TTFT p50':>9}{'p99':>9}{'ITL p99':>9}{'TPOT p50':>9}{'p99':>9}{'good':>8}{'tok/s':>8}"
        )
        for rule in given.rule:
            rows.append(row := {"trace": trace, "rule": rule} | run_one(trace, rule, given.limit, data))
            names = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
            times = "".join(f"{row[name]:9,.1f}" for name in names)
            print(f"{rule:28}{times}{100 * row['good']:7.1f}%{row['output_tokens_per_s']:8,.0f}", flush=True)
        print()
    if given.json is not None:
        given.json.write_text(json.dumps({"limit": given.limit, "rows": rows}, indent=1) + "\n")
    return 0


def run_one(trace: str, rule: str, limit: int, data: Path) -> Row:
    """Return the figures of one simulation, times in ms."""
    file, load = TRACES[trace]
    settings = dict(RULES[rule])
    stages = settings.pop("pp_size", 1)
    scenario = Scenario(
        model="llama-3.1-8b",
        gpu="h100",
        pp=stages,
        workload=str(data / file),
        limit=limit,
        warm_up=60 if "concurrency" in load else 0,
        max_new_tokens=MAX_NEW_TOKENS,
        profile="lockstep",
        settings=settings | ({"pp_size": stages} if stages > 1 else {}),
        slos=SLOS,
        **load,
    )
    summary = simulate(assemble(scenario, environ={})).data.summary
    latency, throughput = summary["latency"], summary["throughput"]
    names = ("ttft_us_p50", "ttft_us_p99", "itl_us_p99", "tpot_us_p50", "tpot_us_p99")
    return {
        **{name.replace("_us_", "_ms_"): round((latency[name] or 0) / 1e3, 2) for name in names},
        "good": throughput["goodput_share"],
        "output_tokens_per_s": throughput["output_tokens_per_s"],
    }


if __name__ == "__main__":
    sys.exit(main())
