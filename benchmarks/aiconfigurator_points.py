"""Predictions of NVIDIA aiconfigurator for serving points, for the table of benchmarks/engine_truth.py.

Runs in an environment of its own, which has aiconfigurator and not Lockstep:

    python -m venv aic && aic/bin/pip install aiconfigurator==0.12.0
    aic/bin/python benchmarks/aiconfigurator_points.py engine_points.csv --out aiconfigurator.csv
    python benchmarks/engine_truth.py engine_points.csv --cache DIR --beside aiconfigurator.csv

Each point is estimated with aiconfigurator's tables for its GPU and engine, in the database of its default release,
since few releases of the points have one. A point that it refuses has its message in the column `error`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found, unused-ignore]

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200-nvl72": "gb200"}
MODELS = {
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B-FP8",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "kimi-k2.5": "nvidia/Kimi-K2.5-NVFP4",
}
SPARSE = ("deepseek", "gpt-oss", "minimax", "a22b", "a17b", "kimi")
IN_CHECKPOINT = ("deepseek-r1", "gpt-oss-120b", "minimax-m2.5", "qwen3-235b-a22b")  # precision of the public weights


def arguments_of(row: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of an estimate."""
    model, tp, ep = row["model"], int(row["tp"]), int(float(row["ep"] or 1))
    found: dict[str, Any] = {
        "model_path": MODELS[model], "system_name": SYSTEMS[row["gpu"]], "mode": "agg", "backend_name": row["engine"],
        "backend_version": None, "isl": int(row["isl"]), "osl": int(row["osl"]),
        "batch_size": int(row["concurrency"]), "tp_size": tp, "pp_size": 1, "attention_dp_size": 1,
    }  # fmt: skip
    if any(name in model for name in SPARSE):
        found |= {"moe_tp_size": tp // ep, "moe_ep_size": ep}
    if row["precision"] == "nvfp4":
        found |= {"gemm_quant_mode": "nvfp4"} | ({"moe_quant_mode": "nvfp4"} if "moe_tp_size" in found else {})
    elif row["precision"] == "fp8" and model not in IN_CHECKPOINT:
        found |= {"gemm_quant_mode": "fp8"} | ({"moe_quant_mode": "fp8_block"} if "moe_tp_size" in found else {})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, help="file of points, as benchmarks/engine_points.py writes it")
    parser.add_argument("--out", type=Path, required=True, help="file of predictions: row, ttft_ms, tpot_ms, error")
    parser.add_argument("--every", type=int, default=1, help="take every n-th row; an estimate takes seconds")
    arguments = parser.parse_args()
    with arguments.points.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with arguments.out.open("w", newline="", encoding="utf-8", buffering=1) as file:
        writer = csv.writer(file)
        writer.writerow(("row", "ttft_ms", "tpot_ms", "error"))
        for number, row in list(enumerate(rows, start=2))[:: arguments.every]:
            try:
                with redirect_stdout(sys.stderr):
                    found = cli_estimate(**arguments_of(row))
                writer.writerow((number, round(found.ttft, 3), round(found.tpot, 4), ""))
            except Exception as error:  # whatever it refuses is its answer for the point
                writer.writerow((number, "", "", " ".join(str(error).split())[:150]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
