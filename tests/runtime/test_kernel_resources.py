"""Kernels compiled for GPUs of other machines: the stored table, and a few rows of it compiled again."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.triton_target import MACHINES

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "kernel_resources.csv"


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_stored_table_has_every_kernel_and_none_that_cannot_run() -> None:
    found = rows(STORED)
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for path in (ROOT / "packages/gpu-runtime/src/lockstep/runtime").rglob("*kernel*.py")
        for before, line in zip(["", *path.read_text().splitlines()], path.read_text().splitlines(), strict=False)
        if before.startswith("@triton.jit") and line.startswith("def ")
    }
    called = {"_scan", "_add", "_origin", "_with_sink", "_attend", "_attend_in_order", "_units"}  # by other kernels
    compiled = {row["kernel"] for row in found}
    assert compiled <= kernels
    assert {name for name in kernels - called - compiled if not name.startswith("_")} == set()
    by_capability = Counter(row["capability"] for row in found)
    assert set(by_capability) == {"80", "90", "100", "120"}
    for row in found:
        limit = MACHINES[int(row["capability"])].shared_bytes - (1 << 10)
        assert int(row["shared_bytes"]) <= limit, row
        if row["capability"] in ("90", "100"):
            assert int(row["spilled_bytes"]) == 0, row
    numerics = {(row["capability"], row["use"]) for row in found if row["kernel"] == "extend"}
    assert {(one, f"attention {kind}") for one in ("90", "100") for kind in ("fast", "invariant")} <= numerics


@pytest.mark.parametrize("capability", [90, 120])
def test_compiled_again_a_kernel_needs_what_the_table_says(capability: int, tmp_path: Path) -> None:
    """In a process of its own: whether a kernel is compiled or interpreted is decided when Triton is imported."""
    file = tmp_path / "found.csv"
    command = [sys.executable, "-m", "benchmarks.kernel_resources", "--capability", str(capability)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [*command, "--only", "LoRA of rank 512, bfloat16", "--csv", str(file)],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(file)
    assert {row["kernel"] for row in found} == {"expand_kernel", "shrink_kernel"}
    stored = [row for row in rows(STORED) if row["capability"] == str(capability)]
    for row in found:
        same = [one for one in stored if (one["kernel"], one["warps"]) == (row["kernel"], row["warps"])]
        assert any(one["shared_bytes"] == row["shared_bytes"] for one in same), row


LAYOUTS = """
import json
from benchmarks.kernel_resources import BF16, MODELS, attention, compiling
with compiling(90) as target:
    attention(MODELS["Llama-3.1-8B"], 90, "invariant", BF16, False)
    found = {one.kernel: (one.layouts, one.instructions) for one, _ in target.launches}
print(json.dumps(found))
"""


def test_with_invariant_numerics_all_kernels_multiply_in_one_layout() -> None:
    """They add in the same order only then. Loads of keys and values are asynchronous."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", LAYOUTS], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    multiplying = {name: one for name, one in found.items() if name in ("extend", "decode", "attend_split")}
    assert len(multiplying) == 3
    assert len({str(layouts) for layouts, _ in multiplying.values()}) == 1, multiplying
    assert all({"mma.sync", "cp.async"} <= set(instructions) for _, instructions in multiplying.values())
