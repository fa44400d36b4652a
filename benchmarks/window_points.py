#!/usr/bin/env python3
"""Sliding windows in a pool of their own against what others published, with nothing calibrated: gpt-oss, offline.

    LOCKSTEP_DATA=... python benchmarks/window_points.py > benchmarks/results/window_points.txt

Throughput of TensorRT-LLM with all requests at once (`trtllm_perf_overview.csv`) on an H100 or H200. Half the layers
of gpt-oss see 128 tokens, and TensorRT-LLM keeps the KV of each kind of layer in a pool of its own. Beside the engine
that does so (`--hybrid-memory on`, with the share of the window pool set to what rows of these lengths need) stands one
that keeps every token in every layer. The source calls the weights FP8; the checkpoint has experts in mxfp4, which is
what is simulated. KV is "auto" on Hopper: bf16. What else is assumed is as in `parallel_points.py`. Rows of 8,192
output tokens are left out: they take minutes each.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from recorded_data import offline_points

from lockstep.sim.cost import CapacityError
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

MODELS = {"gpt-oss-120b": "gpt-oss-120b", "gpt-oss-20b": "gpt-oss-20b"}
RANK_TOKENS = 8192
ROWS_MAX = 4096
ALL_AT_ONCE = 1e6
WINDOW = 128


def predicted(row: dict[str, str], pools: str) -> float:
    """Output tokens per second, simulated."""
    prompt, output = int(row["isl"]), int(row["osl"])
    tiers: dict[str, Any] = {}
    if pools == "on":
        # What a row needs of windows, and of a prompt's chunk, of all its tokens: 16 tokens a page.
        tiers = {"hybrid_memory": "on", "swa_full_tokens_ratio": min(1.0, 2 * WINDOW / (prompt + output / 2) + 0.02)}
    scenario = Scenario(
        engine="none",
        model=MODELS[row["model"]],
        gpu=row["gpu"].lower(),
        workload=f"gen:n={row['num_requests']},input=fixed:{prompt},output=fixed:{output},rate={ALL_AT_ONCE:g}",
        profile="vllm",
        tiers=tiers,
        settings={
            "chunked_prefill_size": RANK_TOKENS,
            "max_prefill_tokens": RANK_TOKENS,
            "max_running_requests": ROWS_MAX,
            "reserve": "full",
            "same_step_sharing": False,
            "context_tokens_max": max(40_960, prompt + output + 1),
        },
    )
    run = simulate(assemble(scenario, {}))
    return float(run.data.summary["throughput"]["output_tokens_per_s"])


def main() -> int:
    rows = [row for row in offline_points(MODELS) if row["gpu"] in ("H100", "H200") and row["parallel"] == "TP1"]
    print("Offline throughput of one GPU, output tokens/s")
    print(f"{'model':13} {'gpu':5} {'in/out':>11} {'measured':>8} {'window pool':>17} {'all layers alike':>17}")
    errors: dict[str, list[float]] = {"on": [], "off": []}
    for row in rows:
        measured, cells = float(row["output_tok_s_per_gpu"]), []
        for pools, found in errors.items():
            try:
                tokens_per_s = predicted(row, pools)
            except CapacityError:
                cells.append("does not fit")
                continue
            found.append(tokens_per_s / measured - 1.0)
            cells.append(f"{tokens_per_s:7.0f} ({100 * found[-1]:+6.1f} %)")
        lengths = f"{row['isl']}/{row['osl']}"
        both = " ".join(f"{cell:>17}" for cell in cells)
        print(f"{row['model']:13} {row['gpu']:5} {lengths:>11} {measured:8.0f} {both}", flush=True)
    for pools, found in errors.items():
        size = 100 * np.abs(np.array(found))
        if len(size):
            print(f"pools {pools}: {len(size)} rows, median error {np.median(size):.1f} %, worst {size.max():.1f} %, "
                  f"bias {100 * np.median(found):+.1f} %")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
