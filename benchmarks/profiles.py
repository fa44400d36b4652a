"""Which settings serve recorded traffic best: the profiles, and single deviations from the defaults of SchedConfig.

Each case is a workload on one GPU at three rates: comfortable, near the knee, beyond it. The profiles and the most
promising deviations run at all three; those that are about one thing run near the knee. A request is good if its
first token came within 2 s and its TPOT is at most 50 ms; `lax` counts those within 100 ms instead. Clients do not set
the length of their answers: every request may have 4,096 tokens and ends by a stop token where the trace has its end.

    LOCKSTEP_DATA=... python benchmarks/profiles.py [--case NAME ...] [--limit N] [--json FILE]

Simulated: the figures are the same on every machine. What they show and what not: docs/profiles.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recorded_data import data_folder

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.profiles import profile_settings
from lockstep.sim.metrics.latency import meets_every
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario

AZURE_CODE = "traces/azure/AzureLLMInferenceTrace_code.csv.gz"
MOONCAKE = "traces/mooncake/conversation_trace.jsonl.gz"
CHAT = "gen:n={n},input=lognormal:900:0.75,output=lognormal:300:0.85,shared_prefix=512x4,max_total=16384"
ANSWERS = "gen:n={n},input=lognormal:300:0.8,output=lognormal:1200:0.7,max_total=16384"

SLOS = (Slo.parse("ttft=2s"), Slo.parse("tpot=50ms"))
LAX = (Slo.parse("ttft=2s"), Slo.parse("tpot=100ms"))
MAX_NEW_TOKENS = 4096
LOADS = ("comfortable", "knee", "beyond")
KNEE = 1

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload on one GPU."""

    workload: str  # a path below LOCKSTEP_DATA, or a generator's spec with {n} requests
    model: str
    gpu: str
    rates: tuple[float, float, float]  # arrivals per second, one for each of LOADS
    mem_fraction: float = 0.9

    @property
    def recorded(self) -> bool:
        return not self.workload.startswith("gen:")


CASES = {
    "code-h100": Case(workload=AZURE_CODE, model="llama-3.1-8b", gpu="h100-sxm", rates=(1, 2.5, 6)),
    "code-h200": Case(workload=AZURE_CODE, model="qwen3-8b", gpu="h200-sxm", rates=(1, 2.5, 6)),
    "mooncake-h100": Case(workload=MOONCAKE, model="llama-3.1-8b", gpu="h100-sxm", rates=(0.4, 0.7, 1.2)),
    "mooncake-h200": Case(workload=MOONCAKE, model="qwen3-8b", gpu="h200-sxm", rates=(0.7, 1.4, 2.5)),
    "chat-h100": Case(workload=CHAT, model="llama-3.1-8b", gpu="h100-sxm", rates=(10, 15, 20)),
    # Less than half of the memory, so that the pool is what lacks.
    "answers-h100": Case(workload=ANSWERS, model="llama-3.1-8b", gpu="h100-sxm", rates=(2.5, 4, 5.5), mem_fraction=0.4),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A profile, and settings that deviate from it."""

    profile: str = "lockstep"
    settings: Mapping[str, Any] = field(default_factory=dict)
    rate_scale: float = 1.0
    every_load: bool = False


DEFAULTS = {name: getattr(SchedConfig(), name) for name in profile_settings("lockstep")}


def only(**settings: Any) -> Variant:
    """Deviations from the defaults, near the knee only."""
    return Variant(settings=DEFAULTS | settings)


def always(**settings: Any) -> Variant:
    """Deviations from the defaults, at every load."""
    return Variant(settings=DEFAULTS | settings, every_load=True)


VARIANTS = {
    "defaults": always(),
    "lockstep": Variant(profile="lockstep", every_load=True),
    "sglang": Variant(profile="sglang", every_load=True),
    "vllm": Variant(profile="vllm", every_load=True),
    "mixed": always(batching="mixed"),
    "mixed 2048": always(batching="mixed", chunked_prefill_size=2048),
    "mixed 1024": always(batching="mixed", chunked_prefill_size=1024),
    "mixed, target 45 ms": always(batching="mixed", chunk_target_us=45_000),
    "on_demand": always(reserve="on_demand"),
    "spf": always(schedule_policy="spf"),
    "mixed 1024, on_demand": always(batching="mixed", chunked_prefill_size=1024, reserve="on_demand"),
    "mixed 45 ms, on_demand": always(batching="mixed", chunk_target_us=45_000, reserve="on_demand"),
    "mixed 45 ms, on_demand, spf": always(
        batching="mixed", chunk_target_us=45_000, reserve="on_demand", schedule_policy="spf"
    ),
    # How much one per cent of load does: differences of that size mean nothing.
    "1 % more load": Variant(settings=DEFAULTS, rate_scale=1.01),
    "prefill_first 4096": only(chunked_prefill_size=4096),
    "prefill_first 2048": only(chunked_prefill_size=2048),
    "mixed 4096": only(batching="mixed", chunked_prefill_size=4096),
    "running_first 2048": only(batching="running_first", chunked_prefill_size=2048),
    "running_first 2048, on_demand": only(batching="running_first", chunked_prefill_size=2048, reserve="on_demand"),
    "prefill_decode_interval 4": only(prefill_decode_interval=4),
    "page_size 1": only(page_size=1),
    "lpm": only(schedule_policy="lpm"),
    "hrrn": only(schedule_policy="hrrn"),
    "spf, bypass_limit none": only(schedule_policy="spf", bypass_limit=None),
    "defer": only(prefix_deduplication="defer"),
    "defer, same_step_sharing": only(prefix_deduplication="defer", same_step_sharing=True),
    "on_demand, newest, front": only(reserve="on_demand", retraction_policy="newest", retracted_requeue="front"),
    "full": only(reserve="full"),
    "overlap_depth 0": only(overlap_depth=0),
    "overlap_depth 2": only(overlap_depth=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="which; default all")
    parser.add_argument("--limit", type=int, default=600, help="requests of each run (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    arguments = parser.parse_args()
    recorded = any(CASES[name].recorded for name in arguments.case)
    data = data_folder("traces/") if recorded else Path()

    rows: list[Row] = []
    for name in arguments.case:
        rows += run_case(name, CASES[name], arguments.limit, data)
    print_overview(arguments.case, rows)
    if arguments.json is not None:
        about = {"limit": arguments.limit, "max_new_tokens": MAX_NEW_TOKENS, "slos": list(map(str, SLOS)), "rows": rows}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


def run_case(name: str, case: Case, limit: int, data: Path) -> list[Row]:
    """All variants at their loads, printed as they come."""
    rows = []
    for load, rate in zip(LOADS, case.rates, strict=True):
        print(f"{name}, {case.model}, {rate:g} requests/s ({load})")
        print(
            f"{'':30}{'TTFT p50':>9}{'p99':>9}{'ITL p99':>9}{'TPOT p50':>9}{'p99':>9}"
            f"{'good':>8}{'lax':>8}{'good/s':>8}{'tok/s':>8}{'hits':>8}{'retracted':>10}"
        )
        for variant_name, variant in VARIANTS.items():
            if not variant.every_load and load != LOADS[KNEE]:
                continue
            run = run_one(case, rate * variant.rate_scale, variant, limit, data)
            rows.append(row := {"case": name, "load": load, "variant": variant_name} | figures(run, rate))
            print_row(row)
        print(flush=True)
    return rows


def run_one(case: Case, rate: float, variant: Variant, limit: int, data: Path) -> Run:
    """One simulation."""
    workload = str(data / case.workload) if case.recorded else case.workload.format(n=limit)
    scenario = Scenario(
        engine="none",
        model=case.model,
        gpu=case.gpu,
        workload=workload,
        rate=rate,
        limit=limit if case.recorded else None,
        mem_fraction=case.mem_fraction,
        max_new_tokens=MAX_NEW_TOKENS,
        profile=variant.profile,
        settings=variant.settings,
        slos=SLOS,
    )
    return simulate(assemble(scenario, environ={}))


def figures(run: Run, rate: float) -> Row:
    """What is compared, times in ms."""
    summary = run.data.summary
    latency, throughput = summary["latency"], summary["throughput"]
    names = ("ttft_us_p50", "ttft_us_p99", "itl_us_p99", "tpot_us_p50", "tpot_us_p99")
    return {
        "rate": rate,
        **{name.replace("_us_", "_ms_"): round((latency[name] or 0) / 1e3, 2) for name in names},
        "goodput_share": throughput["goodput_share"],
        "lax_goodput_share": lax_share(run),
        "goodput_requests_per_s": throughput["goodput_requests_per_s"],
        "output_tokens_per_s": throughput["output_tokens_per_s"],
        "hit_ratio": summary["cache"]["hit_ratio"],
        "retractions": summary["scheduler"]["retractions"],
        "rejected": summary["requests"]["rejected"],
    }


def lax_share(run: Run) -> float:
    """Like goodput_share, under LAX."""
    requests = run.data.requests
    return round(float(meets_every(LAX, requests).sum() / (requests.completed | requests.failed).sum()), 6)


def print_row(row: Row) -> None:
    times = "".join(
        f"{row[name]:9,.1f}" for name in ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
    )
    print(
        f"{row['variant']:30}{times}{100 * row['goodput_share']:7.1f}%{100 * row['lax_goodput_share']:7.1f}%"
        f"{row['goodput_requests_per_s']:8.2f}"
        f"{row['output_tokens_per_s']:8,.0f}{100 * row['hit_ratio']:7.1f}%{row['retractions']:10,}"
    )


def print_overview(cases: list[str], rows: list[Row]) -> None:
    """The share of good requests in every case, one line per variant; first near the knee, then beyond it."""
    for load in (LOADS[KNEE], LOADS[-1]):
        share = {(row["case"], row["variant"]): row["goodput_share"] for row in rows if row["load"] == load}
        print(f"good requests, %, {load}")
        print(" " * 30 + "".join(f"{case:>15}" for case in cases))
        for variant in dict.fromkeys(variant for _, variant in share):
            print(f"{variant:30}" + "".join(f"{100 * share[case, variant]:15.1f}" for case in cases))
        print()


if __name__ == "__main__":
    sys.exit(main())
