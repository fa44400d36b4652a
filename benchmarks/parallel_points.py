#!/usr/bin/env python3
"""Expert and attention-data parallelism against what others published, with nothing calibrated.

    LOCKSTEP_DATA=... python benchmarks/parallel_points.py > benchmarks/results/parallel_points.txt

1. TPOT of TensorRT-LLM at fixed concurrency, Qwen3-235B-A22B with its experts over 4 and 8 H100
   (`serving_points.csv`, column `ep`), beside the same GPUs as tensor parallelism alone.
2. Offline throughput of TensorRT-LLM with attention data and expert parallelism, "DEP" (`trtllm_perf_overview.csv`),
   and of plain tensor parallelism as a control. The tokens that a rank takes in a pass are not published: RANK_TOKENS.
   KV is fp8: the source states it of DeepSeek, of others that it is as the quantised checkpoint has it, which usually
   is fp8.
3. The kernels: grouped GEMMs of a rank with part of the experts (`moe` tables), and DeepEP's dispatch and combine.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recorded_data import data_folder

from lockstep.sim.calibrate.serving_points import CLIENTS, ENGINES, play, read_serving_points
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import CapacityError, CatalogueError, Parallelism, roofline_model
from lockstep.sim.cost.hardware import achieved
from lockstep.sim.cost.tables import read_operator_tables
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

RANK_TOKENS = 8192  # new tokens that a rank takes in one pass, at most: the engine's default (`max_num_tokens`)
ROWS_MAX = 4096
OUTPUT_MAX = 8192  # longer ones take many minutes each to simulate
ALL_AT_ONCE = 1e6  # requests per second
MODELS = {"DeepSeek-R1-0528": "deepseek-r1", "Qwen3-235B-A22B": "qwen3-235b-a22b", "Llama-3.3-70B": "llama-3.3-70b"}
"""Of the source's models those that are modelled. gpt-oss is left out: its rows call mxfp4 weights FP8."""

Float64s = NDArray[np.float64]


def main() -> int:
    published = data_folder("published/serving_points.csv") / "published"
    serving_points(published / "serving_points.csv")
    offline(published / "trtllm_perf_overview.csv")
    kernels(published / "aic_ops")
    return 0


def serving_points(path: Path) -> None:
    """Part 1."""
    print("1. TPOT at fixed concurrency, ms; error of the prediction")
    print(f"{'layout':14} {'users':>5} {'measured':>9} {'with ep':>16} {'as tp alone':>16}")
    errors: dict[str, list[float]] = {"ep": [], "tp": []}
    points, _ = read_serving_points(path)
    for point in points:
        if point.split.ep == 1:
            continue
        cells = []
        for name, ep in (("ep", point.ep), ("tp", 1)):
            tpot_us = play(replace(point, ep=ep), CLIENTS["spread"]).tpot_us
            errors[name].append(tpot_us / point.tpot_us - 1.0)
            cells.append(f"{tpot_us / 1e3:7.2f} ({100 * errors[name][-1]:+5.1f} %)")
        print(
            f"{point.split!s:14} {point.concurrency:5} {point.tpot_us / 1e3:9.2f} {cells[0]:>16} {cells[1]:>16}",
            flush=True,
        )
    for name, found in errors.items():
        print(f"{name}: {summary(found)}")


@dataclass(frozen=True)
class Offline:
    """One row: all requests at once."""

    model: str
    gpu: str
    split: Parallelism
    prompt: int
    output: int
    requests: int
    tokens_per_s_per_gpu: float

    def predicted(self, split: Parallelism, operators: Path | None = None) -> float:
        """Output tokens per second and GPU, simulated."""
        tokens = RANK_TOKENS * split.attention_dp
        settings: dict[str, Any] = {"chunked_prefill_size": tokens, "max_prefill_tokens": tokens}
        settings |= {"max_running_requests": ROWS_MAX, "reserve": ENGINES["trtllm"]["reserve"]}
        scenario = Scenario(
            engine="none",
            model=MODELS[self.model],
            gpu=self.gpu.lower(),
            workload=f"gen:n={self.requests},input=fixed:{self.prompt},output=fixed:{self.output},rate={ALL_AT_ONCE:g}",
            tp=split.tp,
            ep=split.ep,
            attention_dp=split.attention_dp,
            weights_dtype="fp8",
            kv_dtype="fp8",
            operators=None if operators is None else str(operators),
            profile="vllm",
            settings={**settings, "context_tokens_max": max(40_960, self.prompt + self.output + 1)},
        )
        run = simulate(assemble(scenario, {}))
        return float(run.data.summary["throughput"]["output_tokens_per_s"]) / split.gpus


def offline_rows(path: Path) -> Iterator[Offline]:
    """Rows of FP8 weights on H100 and H200 with a published number of requests."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            layout = re.fullmatch(r"(DEP|TP)(\d+)", row["parallel"])
            known = row["model"] in MODELS and row["gpu"] in ("H100", "H200") and row["num_requests"]
            if layout is None or not known or row["weight_precision"] != "FP8":
                continue
            if int(row["osl"]) > OUTPUT_MAX:
                continue
            gpus = int(layout[2])
            split = Parallelism(tp=gpus, ep=gpus, attention_dp=gpus) if layout[1] == "DEP" else Parallelism(tp=gpus)
            yield Offline(
                row["model"], row["gpu"], split, int(row["isl"]), int(row["osl"]), int(row["num_requests"]),
                float(row["output_tok_s_per_gpu"]),
            )  # fmt: skip


def offline(path: Path) -> None:
    """Part 2."""
    print(f"\n2. Offline throughput, output tokens/s per GPU; {RANK_TOKENS} new tokens per rank and pass")
    heads = " ".join(f"{head:>17}" for head in ("as laid out", "on tables", "as tp alone"))
    print(f"{'model':17} {'gpu':5} {'layout':29} {'in/out':>11} {'measured':>8} {heads}")
    errors: dict[str, list[float]] = {"dep": [], "dep, tables": [], "dep as tp": [], "tp": [], "tp, tables": []}
    for row in offline_rows(path):
        cells = []
        kind = "tp" if row.split.is_plain else "dep"
        asked: list[tuple[str, Parallelism, Path | None]] = [
            (kind, row.split, None), (f"{kind}, tables", row.split, path.parent / "aic_ops")
        ]  # fmt: skip
        if kind == "dep":
            asked.append(("dep as tp", Parallelism(tp=row.split.tp), None))
        for name, split, operators in asked:
            try:
                found = row.predicted(split, operators)
            except CapacityError:
                cells.append("does not fit")
                continue
            errors[name].append(found / row.tokens_per_s_per_gpu - 1.0)
            cells.append(f"{found:7.0f} ({100 * errors[name][-1]:+6.1f} %)")
        lengths = f"{row.prompt}/{row.output}"
        print(
            f"{row.model:17} {row.gpu:5} {row.split!s:29} {lengths:>11} {row.tokens_per_s_per_gpu:8.0f} "
            + " ".join(f"{cell:>17}" for cell in cells),
            flush=True,
        )
    for name, found in errors.items():
        print(f"{name}: {summary(found)}")


def kernels(folder: Path) -> None:
    """Part 3. Ratios are predicted / measured."""
    print("\n3. Kernels: predicted / measured, quantiles 10 %, 50 %, 90 %")
    for name in ("h100", "h200"):
        gpu = load_gpu(name)
        try:
            table = read_operator_tables(folder, gpu).of("moe")
        except CatalogueError as error:
            print(error)
            continue
        assert table is not None
        for dtype, table_dtype in (("fp8", "fp8_block"), ("bf16", "bfloat16")):
            cost = roofline_model(load_model("qwen3-235b-a22b"), gpu, weights_dtype=dtype)  # type: ignore[arg-type]
            for ep in (1, 2, 4, 8, 16):
                for distribution in ("balanced", "power_law_1.01"):
                    c = table.columns
                    mask = (c["moe_dtype"] == table_dtype) & (c["moe_ep_size"] == ep) & (c["moe_tp_size"] == 1)
                    mask &= (c["distribution"] == distribution) & (c["num_experts"] >= 64)
                    if not mask.any():
                        continue
                    columns = (c["num_tokens"], c["hidden_size"], c["inter_size"], c["topk"], c["num_experts"])
                    tokens, hidden, ffn, topk, _ = (column[mask] for column in columns)
                    us = cost.experts_us(*(column[mask] for column in columns), ep=ep)
                    # The tables' kernels sort, activate and add up, too: `small_kernels` of the roofline, in bf16.
                    values = tokens * ((topk + 1) * hidden + topk / ep * 3 * ffn)
                    us += 4 * achieved(gpu, "small_kernel_us").value
                    us += 2 * values / (achieved(gpu, "weight_read_gbs").value * 1e3)
                    print(
                        f"experts {name} {dtype:4} ep {ep:2} {distribution:15} {int(mask.sum()):5} rows  "
                        + quantiles(us / table.latency_us[mask])
                    )
        deep_ep(folder, name)


def deep_ep(folder: Path, name: str) -> None:
    """Dispatch and combine of 8 GPUs, the faster of both kernels where both were measured."""
    gpu, best = load_gpu(name), {}
    for kind, columns in (("ll", "{}_avg_t_us"), ("normal", "{}_transmit_us")):
        for path in folder.glob(f"{name}_sxm__comm__*deepep_{kind}_perf.csv.gz"):
            for row in csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()):
                if kind == "normal" and row["dispatch_sms"] != "24":
                    continue
                shape = tuple(int(row[c]) for c in ("num_token", "hidden_size", "num_topk", "num_experts"))
                for what in ("dispatch", "combine"):
                    us = float(row[columns.format(what)])
                    best[what, shape] = min(us, best.get((what, shape), us))
    model = load_model("deepseek-v3")
    assert model.experts is not None
    for what in ("dispatch", "combine"):
        ratios = []
        for (kind, (tokens, hidden, topk, count)), us in best.items():
            if kind != what or count < 64:
                continue
            shaped = replace(model, hidden=hidden, experts=replace(model.experts, count=count, per_token=topk))
            cost = roofline_model(
                shaped, gpu, Parallelism(tp=8, ep=8, attention_dp=8, moe_a2a=True), weights_dtype="fp8"
            )
            assert cost.exchange is not None
            ratios.append(cost.exchange.all_to_all_us(what, tokens, 8 * tokens) / us)
        print(f"{what:8} {name} {len(ratios):5} shapes  " + quantiles(np.array(ratios)))


def quantiles(ratios: Float64s) -> str:
    return " ".join(f"{value:5.2f}" for value in np.quantile(ratios, (0.1, 0.5, 0.9)))


def summary(errors: list[float]) -> str:
    if not errors:
        return "nothing compared"
    found = 100 * np.array(errors)
    size = np.abs(found)
    middle, bias = np.median(size), np.median(found)
    return f"{len(found)} rows, median error {middle:.1f} %, worst {size.max():.1f} %, bias {bias:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
