"""Operator tables for the simulator, of this card: `lockstep simulate --operators`, `lockstep calibrate operators`.

The columns are those of docs/cost-models.md, section 3. Where the simulator is installed, both calibrations (of the
tables, and of the journal that the section `bubbles` wrote) are made at once; the commands are in the report.
"""

from __future__ import annotations

import csv
import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import backends, decode_us, extend_us
from benchmarks.gpu_check.bubbles import JOURNAL
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.served import gpu_name
from benchmarks.gpu_check.shapes import PAGE_SIZE
from benchmarks.gpu_check.timing import graph_time_us

COLD_BYTES = 256 << 20
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DECODES = tuple(
    (rows, step) for step in (256, 1024, 4096, 16384) for rows in (1, 4, 16, 64, 256) if rows * step <= 1 << 19
)
PROMPTS = tuple((rows, new) for new in (128, 512, 1024, 4096, 8192) for rows in (1, 4, 16) if rows * new <= 1 << 15)
MODEL = "qwen3-8b"


def run(section: Section) -> None:
    """Products, attention of decodes, attention of prompts; then what the simulator makes of them."""
    folder = section.out / "operators"
    folder.mkdir(parents=True, exist_ok=True)
    gpu = gpu_name(section)
    layer = shapes.Layer.of(section)
    backend = backends(section, layer)[0]
    section.put("backend", backend)
    section.put("gpu", gpu)
    with section.trying("gemm"):
        write(section, folder / f"{gpu}__gemm_perf.csv", gemm(section, layer))
    with section.trying("generation_attention"):
        section.needs(3 if section.gpu else 0)
        rows = generation_attention(section, layer, backend)
        write(section, folder / f"{gpu}__generation_attention_perf.csv", rows)
    with section.trying("context_attention"):
        section.needs(3 if section.gpu else 0)
        rows = context_attention(section, layer, backend)
        write(section, folder / f"{gpu}__context_attention_perf.csv", rows)
    with section.trying("calibrations"):
        calibrate(section, folder, gpu)


def write(section: Section, path: Path, rows: list[dict[str, Any]]) -> None:
    """One table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    section.put(f"rows.{path.stem}", len(rows))


def gemm(section: Section, layer: shapes.Layer) -> list[dict[str, Any]]:
    """The products of the model's layers and of its logits, weights cold."""
    tokens = (1, 8) if section.small else TOKENS
    rows: list[dict[str, Any]] = []
    for n, k in sorted(set(layer.products)):
        size = n * k * layer.dtype.itemsize
        copies = max(1, min(16, COLD_BYTES // size)) if section.gpu else 1
        matrices = [torch.randn(n, k, device=section.device).to(layer.dtype) for _ in range(copies)]
        for m in tokens:
            if section.gpu and m * n > 1 << 30:
                continue
            given = torch.randn(m, k, device=section.device).to(layer.dtype)

            def products(given: torch.Tensor = given, matrices: list[torch.Tensor] = matrices) -> None:
                for matrix in matrices:
                    torch.nn.functional.linear(given, matrix)

            us = graph_time_us(products, section.device, repeats=5) / copies
            rows.append({"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": round(us / 1e3, 6)})
    return rows


def heads(layer: shapes.Layer) -> dict[str, Any]:
    """Columns that all rows of attention share."""
    return {
        "num_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
    }


def generation_attention(section: Section, layer: shapes.Layer, backend: str) -> list[dict[str, Any]]:
    """One new token for each row."""
    rows: list[dict[str, Any]] = []
    for count, step in ((1, 16), (3, 24)) if section.small else DECODES:
        if section.left_s() < 5 and rows:
            section.skip(f"generation_attention from {count} x {step} on", "no time")
            break
        us = decode_us(layer, backend, count, step + 1, PAGE_SIZE)
        rows.append({"batch_size": count, "step": step, **heads(layer), "latency": round(us / 1e3, 6)})
    return rows


def context_attention(section: Section, layer: shapes.Layer, backend: str) -> list[dict[str, Any]]:
    """Whole prompts."""
    rows: list[dict[str, Any]] = []
    for count, new in ((1, 8), (2, 16)) if section.small else PROMPTS:
        if section.left_s() < 5 and rows:
            section.skip(f"context_attention from {count} x {new} on", "no time")
            break
        us = extend_us(layer, backend, count, 0, new, PAGE_SIZE)
        rows.append({"batch_size": count, "isl": new, **heads(layer), "latency": round(us / 1e3, 6)})
    return rows


def calibrate(section: Section, folder: Path, gpu: str) -> None:
    """Both calibration files, by the simulator's own command."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    commands = {
        "operators": ["operators", str(folder), "--model", MODEL, "--gpu", gpu],
        "journal": ["journal", str(section.out / JOURNAL), "--model", MODEL, "--gpu", gpu],
    }
    for name, command in commands.items():
        out = section.out / f"{gpu}-{name}.json"
        line = ["calibrate", *command, "--date", date, "--out", str(out)]
        section.put(f"commands.{name}", "lockstep " + " ".join(line))
        if name == "operators" and section.small:
            section.skip("calibration of operators", "small shapes are no model's")
            continue
        if name == "journal" and not (section.out / JOURNAL).is_dir():
            section.skip("calibration of journal", "the section bubbles wrote none")
            continue
        # Not by the command `lockstep`: it finds its subcommands in installed packages only.
        call = "import sys; from lockstep.sim.cli.calibrate import calibrate; calibrate(sys.argv[1:])"
        done = subprocess.run([sys.executable, "-c", call, *line[1:]], capture_output=True, text=True, timeout=60)
        said = (done.stdout + done.stderr).strip()
        if "ModuleNotFoundError" in said:
            section.skip(f"calibration of {name}", f"the simulator is not whole here: {said.splitlines()[-1]}")
            continue
        section.check(f"calibration of {name} is accepted", done.returncode == 0, said[-600:])
