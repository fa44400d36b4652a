"""Offline throughput of TensorRT-LLM, published, beside the catalogue's engine and kernels alone: points of no fit.

    LOCKSTEP_DATA=... python benchmarks/offline_points.py > benchmarks/results/offline_points.txt

All requests at once, on H100, H200, B200 and GB200 (`trtllm_perf_overview.csv`): each row with a stated number of
requests, a model of the catalogue and answers of at most 1,024 tokens; longer ones take minutes each to simulate. "DEP"
has as many ranks of experts and shards of attention as GPUs. What the source does not state is assumed as in
`parallel_points.py`: 8,192 new tokens of a rank and pass, as many requests as fit, KV in fp8 but for gpt-oss on Hopper.
Weights are those of the checkpoints: gpt-oss in mxfp4, others in fp8, or on Blackwell in nvfp4.

Simulated: the figures are the same on every machine.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import Any

import numpy as np
from recorded_data import offline_points

from lockstep.sim.cost import CapacityError
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

MODELS = {
    "DeepSeek-R1-0528": "deepseek-r1", "Llama-3.3-70B": "llama-3.3-70b", "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-120b": "gpt-oss-120b", "gpt-oss-20b": "gpt-oss-20b",
}  # fmt: skip
GPUS = {"H100": "h100", "H200": "h200", "B200": "b200", "GB200": "gb200-nvl72"}
RANK_TOKENS = 8192
ROWS_MAX = 4096
ALL_AT_ONCE = 1_000_000  # requests per second


def scenario_of(row: dict[str, str], engine: str) -> Scenario | None:
    """Return the scenario of a row; None for a layout that is neither tensor parallelism nor shards with experts."""
    layout = re.fullmatch(r"(DEP|TP)(\d+)", row["parallel"])
    if layout is None:
        return None
    gpus, ranks = int(layout[2]), int(layout[2]) if layout[1] == "DEP" else 1
    prompt, output = int(row["isl"]), int(row["osl"])
    oss, blackwell = row["model"].startswith("gpt-oss"), row["gpu"] in ("B200", "GB200")
    settings: dict[str, Any] = {"chunked_prefill_size": RANK_TOKENS * ranks, "max_prefill_tokens": RANK_TOKENS * ranks}
    settings |= {"max_running_requests": ROWS_MAX, "reserve": "full", "same_step_sharing": False}
    return Scenario(
        engine=engine,
        model=MODELS[row["model"]],
        gpu=GPUS[row["gpu"]],
        workload=f"gen:n={row['num_requests']},input=fixed:{prompt},output=fixed:{output},rate={ALL_AT_ONCE}",
        tp=gpus,
        ep=ranks,
        attention_dp=ranks,
        weights_dtype="mxfp4" if oss else "fp8" if row["weight_precision"] == "FP8" else "nvfp4",
        kv_dtype="bf16" if oss and not blackwell else "fp8",
        profile="vllm",
        settings={**settings, "context_tokens_max": max(40_960, prompt + output + 1)},
    )


def main() -> int:
    rows = offline_points(MODELS)
    print(f"{'model':17} {'GPU':6} {'layout':6} {'in/out':>11} {'measured':>9} {'trtllm':>8} {'kernels':>8}")
    errors: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured, found = float(row["output_tok_s_per_gpu"]), []
        for engine in ("trtllm", "none"):
            scenario = scenario_of(row, engine)
            if scenario is None:
                continue
            try:
                run = simulate(assemble(scenario, {}))
            except CapacityError:
                continue
            tokens_per_s = float(run.data.summary["throughput"]["output_tokens_per_s"])
            found.append(tokens_per_s / scenario.tp / measured - 1.0)
        if len(found) < 2:
            continue  # does not fit
        kind = "shards and experts" if row["parallel"].startswith("DEP") else "tensor parallelism"
        for group in (f"model {row['model']}", f"GPU {row['gpu']}", "all"):
            errors[kind, group].append((found[0], found[1]))
        cells = " ".join(f"{100 * error:+7.1f}%" for error in found)
        lengths = f"{row['isl']}/{row['osl']}"
        print(f"{row['model']:17} {row['gpu']:6} {row['parallel']:6} {lengths:>11} {measured:9.0f} {cells}", flush=True)
    print("\nmedian absolute error (bias)")
    for (kind, group), pairs in sorted(errors.items()):
        cells = "  ".join(
            f"{name} {100 * np.median(np.abs(one)):5.1f} ({100 * np.median(one):+5.1f}) %"
            for name, one in zip(("trtllm", "kernels"), np.array(pairs).T, strict=True)
        )
        print(f"{kind:19} {group:24} {len(pairs):2} rows  {cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
