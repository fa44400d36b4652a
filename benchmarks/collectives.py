#!/usr/bin/env python3
"""The catalogue's lines of all-reduce, all-gather and send, made of published tables; and how far the tables are off.

    LOCKSTEP_DATA=... python benchmarks/collectives.py > benchmarks/results/collectives.txt

Relative least squares of us = latency + bytes / rate, with what each operation moves:

    all-reduce, direct    the engine's own kernel under a CUDA graph, 8 KiB to 8 MiB: 2 (n - 1) / n of the bytes
    all-reduce, ring      NCCL, from 8 MiB
    all-gather            NCCL, all-gather and reduce-scatter together, all sizes: (n - 1) / n of the bytes
    send                  NCCL, all-to-all of 2 GPUs, all sizes: half of the bytes

8 MiB is up to where SGLang and vLLM use their own kernel. Exit status 1 if the catalogue differs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.catalogue import load_gpu
from lockstep.sim.cost.hardware import GpuSpec
from lockstep.sim.cost.tables import OperatorTables, read_operator_tables

Float64s = NDArray[np.float64]

GPUS = ("a100-80g-sxm", "h100-sxm", "h200-sxm", "l40s")
RANKS = (2, 4, 8)
DIRECT_BYTES_MIN, DIRECT_BYTES_MAX = 2**13, 2**23
SHOWN_BYTES_MIN, SHOWN_BYTES_MAX = 2**12, 2**28  # between which errors are stated


def rows(tables: OperatorTables, operator: str, operation: str, gpus: int) -> tuple[Float64s, Float64s]:
    """Bytes, ascending, and microseconds of an operation in half precision; by graph replay where there is one."""
    table = tables.of(operator)
    assert table is not None
    c = table.columns
    mask = (c["num_gpus"] == gpus) & (c["operation"] == operation)
    if "backend" in c:
        mask &= np.char.endswith(c["backend"], "graph")
    if "nccl_dtype" in c:
        mask &= c["nccl_dtype"] == "half"
    order = np.argsort(c["message_bytes"][mask], kind="stable")
    return c["message_bytes"][mask][order], table.latency_us[mask][order]


def fitted(moved_bytes: Float64s, us: Float64s) -> tuple[float, float]:
    """Latency in us and rate in GB/s, to three digits."""
    latency, per_byte = np.linalg.lstsq(np.column_stack([1.0 / us, moved_bytes / us]), np.ones(len(us)), rcond=None)[0]
    return float(f"{latency:.3g}"), float(f"{1e-3 / per_byte:.3g}")


def lines_of(tables: OperatorTables, gpus: int) -> dict[str, dict[str, float]]:
    """The entries of a catalogue file for so many GPUs."""
    around = 2.0 * (gpus - 1) / gpus
    own, own_us = rows(tables, "custom_allreduce", "all_reduce", gpus)
    near = (own >= DIRECT_BYTES_MIN) & (own <= DIRECT_BYTES_MAX)
    direct = fitted(around * own[near], own_us[near])
    ring_bytes, ring_us = rows(tables, "nccl", "all_reduce", gpus)
    ring = fitted(around * ring_bytes[ring_bytes >= DIRECT_BYTES_MAX], ring_us[ring_bytes >= DIRECT_BYTES_MAX])
    both = [rows(tables, "nccl", operation, gpus) for operation in ("all_gather", "reduce_scatter")]
    gather = fitted(around / 2.0 * np.concatenate([b for b, _ in both]), np.concatenate([us for _, us in both]))
    found = {
        "all_reduce": dict(
            zip(("direct_latency_us", "direct_gbs", "ring_latency_us", "ring_gbs"), (*direct, *ring), strict=True)
        ),
        "all_gather": dict(zip(("latency_us", "gbs"), gather, strict=True)),
    }
    if gpus == 2:
        sent_bytes, sent_us = rows(tables, "nccl", "alltoall", gpus)
        found["send"] = dict(zip(("send_latency_us", "send_gbs"), fitted(sent_bytes / 2.0, sent_us), strict=True))
    return found


def reduce_errors(tables: OperatorTables, gpus: int, line: dict[str, float]) -> Float64s:
    """Predicted over the faster of both kernels, less one."""
    best: dict[float, float] = {}
    for operator in ("custom_allreduce", "nccl"):
        for size, us in zip(*rows(tables, operator, "all_reduce", gpus), strict=True):
            if SHOWN_BYTES_MIN <= size <= SHOWN_BYTES_MAX:
                best[size] = min(us, best.get(size, np.inf))
    moved, us = 2.0 * (gpus - 1) / gpus * np.array(list(best)), np.array(list(best.values()))
    predicted = np.minimum(
        line["direct_latency_us"] + moved / (line["direct_gbs"] * 1e3),
        line["ring_latency_us"] + moved / (line["ring_gbs"] * 1e3),
    )
    errors: Float64s = predicted / us - 1.0
    return errors


def differences(gpu: GpuSpec, found: dict[str, dict[str, float]], gpus: int) -> list[str]:
    """Where the catalogue differs."""
    said = {
        "all_reduce": {name: getattr(gpu.all_reduce.get(gpus), name, None) for name in found["all_reduce"]},
        "all_gather": {name: getattr(gpu.all_gather.get(gpus), name, None) for name in found["all_gather"]},
    }
    if "send" in found and "send_gbs" in gpu.measured:
        said["send"] = {name: gpu.measured[name].value for name in found["send"]}
    return [
        f"{gpu.name}, {gpus} GPUs: {name} is {value}, the tables give {found[kind][name]}"
        for kind, values in said.items()
        for name, value in values.items()
        if value != found[kind][name]
    ]


def main() -> int:
    folder = Path(os.environ.get("LOCKSTEP_DATA", "")) / "published" / "aic_ops"
    if not folder.is_dir():
        print("LOCKSTEP_DATA names no folder with published/aic_ops", file=sys.stderr)
        return 1
    print(f"{'':16} GPUs  direct us    GB/s    ring us    GB/s  off, median    worst   gather us    GB/s")
    wrong = []
    for name in GPUS:
        gpu = load_gpu(name)
        tables = read_operator_tables(folder, gpu)
        for gpus in RANKS:
            found = lines_of(tables, gpus)
            reduce, gather = found["all_reduce"], found["all_gather"]
            off = np.abs(reduce_errors(tables, gpus, reduce))
            print(
                f"{gpu.name:16} {gpus:4}  {reduce['direct_latency_us']:9}  {reduce['direct_gbs']:6}  "
                f"{reduce['ring_latency_us']:9}  {reduce['ring_gbs']:6}  {np.median(off):11.1%}  {off.max():7.1%}  "
                f"{gather['latency_us']:10}  {gather['gbs']:6}"
            )
            wrong += differences(gpu, found, gpus)
    print("\n".join(wrong) if wrong else "the catalogue says the same")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
