"""The grouped product: torch's and our kernel against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from lockstep.runtime.models.grouped import grouped_linear, grouped_linear_reference, has_torch_kernel  # noqa: E402

CASES = [  # rows of each group, inputs, outputs
    ([3, 0, 2, 4], 16, 24),
    ([0, 0, 17, 0, 1], 70, 65),
    ([1], 64, 64),
    ([40, 33], 8, 130),
    ([90, 0, 7], 72, 8),  # many rows for few groups: high tiles
    ([0, 0, 0], 8, 8),
]
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the largest

INTERPRETED = (torch.float32, torch.float16)


def operands(counts: list[int], inputs: int, outputs: int, dtype: Any, device: str = "cpu") -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), inputs, generator=generator).to(device, dtype)
    weights = torch.randn(len(counts), outputs, inputs, generator=generator).to(device, dtype)
    return rows, weights, torch.tensor(np.cumsum(counts), dtype=torch.int32, device=device)


def assert_close(found: Any, rows: Any, weights: Any, ends: Any) -> None:
    expected = grouped_linear_reference(rows.float(), weights.float(), ends)
    assert found.shape == expected.shape
    assert found.dtype == rows.dtype
    assert not found.isnan().any()
    if len(expected):
        assert (found.float() - expected).abs().max() <= TOLERANCE[rows.dtype] * expected.abs().max()


def test_the_reference_is_one_product_after_the_other() -> None:
    rows, weights, ends = operands([3, 0, 2, 4], 16, 24, torch.float32)
    expected = torch.stack([weights[group] @ row for group, row in zip([0, 0, 0, 2, 2, 3, 3, 3, 3], rows, strict=True)])
    assert torch.allclose(grouped_linear(rows, weights, ends), expected, atol=1e-5)


def test_torch_takes_the_same_groups() -> None:
    rows, weights, ends = operands([3, 0, 2, 4], 16, 24, torch.float32)
    assert_close(torch.nn.functional.grouped_mm(rows, weights.transpose(-2, -1), offs=ends), rows, weights, ends)


def test_our_kernel_under_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is decided when its module is imported.

    Without bfloat16: Triton's interpreter multiplies its bits as if they were whole numbers.
    """
    run = subprocess.run(
        [sys.executable, "-c", "import tests.runtime.test_grouped as this; this.try_all('cpu', this.INTERPRETED)"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": PATHS},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def try_all(device: str, dtypes: Iterable[Any] = TOLERANCE) -> None:
    from lockstep.runtime.models import grouped_kernel

    # NaN in unwritten memory would show.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for counts, inputs, outputs in CASES:
        for dtype in dtypes:
            rows, weights, ends = operands(counts, inputs, outputs, dtype, device)
            assert_close(grouped_kernel.grouped_linear_triton(rows, weights, ends), rows, weights, ends)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.runtime.models.grouped_kernel import grouped_linear_kernel as kernel
for dtype in ("bf16", "fp16", "fp32"):
    for block_m in (16, 64):
        constants = dict(GROUPS=128, GROUPS_PADDED=128, BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64)
        types = dict(rows="*" + dtype, weights="*" + dtype, ends="*i32", out="*" + dtype, N="i32", K="i32")
        types |= dict.fromkeys(constants, "constexpr")
        indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, types, indices), target=GPUTarget("cuda", int(sys.argv[1]), 32))
        assert len(compiled.asm["cubin"]) > 1000
        assert compiled.metadata.shared <= 99 * 1024, (dtype, block_m, compiled.metadata.shared)
"""


@pytest.mark.parametrize(
    ("capability", "torchs"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_torch_multiplies_where_its_kernel_is_compiled_for(
    capability: tuple[int, int], torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capabilities do not order the kernels that run on them: those of 9.0 and 10.0 do not run on 12.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows, weights = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(2, 24, 16, dtype=torch.bfloat16)
    assert has_torch_kernel(rows, weights) is torchs


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_our_kernel_compiles_without_a_gpu(capability: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env=env | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_without_asking_the_device() -> None:
    try_all("cuda")
    for dtype in TOLERANCE:
        rows, weights, ends = operands([3, 0, 2, 4], 64, 128, dtype, "cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = grouped_linear(rows, weights, ends)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_close(found, rows, weights, ends)
