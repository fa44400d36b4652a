"""Products with weights in fewer bits: our kernels against widened weights and torch's product."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.host.quantization import WeightFormat  # noqa: E402
from lockstep.runtime.quantized.fp8 import Fp8Matrices, to_fp8  # noqa: E402
from lockstep.runtime.quantized.int4 import Int4Matrices  # noqa: E402
from lockstep.runtime.quantized.matrices import Quantized, StoredMatrix  # noqa: E402

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # relative to the largest
INTERPRETED = (torch.float32, torch.float16)

FP8 = {"method": "fp8", "layout": "fp8", "scale": "weight_scale"}
FORMATS: dict[str, WeightFormat] = {
    "blocks": WeightFormat(**FP8, block=(128, 128)),
    "small blocks": WeightFormat(**FP8, block=(16, 16)),
    "outputs": WeightFormat(**FP8, by_output=True),
    "tensors": WeightFormat(**FP8),
    "gptq": WeightFormat(method="gptq", layout="gptq", group=32, zero_add=1),
    "awq": WeightFormat(method="awq", layout="awq", group=64),
    "one group": WeightFormat(method="awq", layout="awq"),
}
SHAPES: list[tuple[int, list[int], int, list[int]]] = [  # rows, outputs of parts, inputs, rows of groups
    (1, [24, 16], 192, []),
    (5, [40], 64, []),
    (37, [64, 8], 128, []),  # high tiles
    (6, [32], 64, [3, 0, 3]),
]


def made(kind: str, sizes: list[int], inputs: int, groups: int, dtype: Any, device: str, seed: int) -> Quantized:
    """Matrices with values of their whole range, the smallest numbers of e4m3 among them."""
    parts = [StoredMatrix(f"part{number}", size, inputs) for number, size in enumerate(sizes)]
    stored, generator = FORMATS[kind], torch.Generator().manual_seed(seed)
    where = torch.device(device)
    if stored.layout == "fp8":
        fp8 = Fp8Matrices(parts, groups, 0, 1, dtype, where, stored)
        drawn = torch.randn(fp8.weight.shape, generator=generator) * 60
        tiny = torch.rand(drawn.shape, generator=generator) < 0.1
        fp8.weight.data.copy_(to_fp8(torch.where(tiny, drawn * 2**-14, drawn)))
        fp8.scale.data.copy_(torch.rand(fp8.scale.shape, generator=generator) * 0.01 + 0.001)
        return fp8
    int4 = Int4Matrices(parts, groups, 0, 1, dtype, where, stored)
    for words in (int4.qweight, int4.zeros):
        words.data.copy_(torch.randint(-(2**31), 2**31, words.shape, generator=generator, dtype=torch.int64))
    int4.scales.data.copy_(torch.rand(int4.scales.shape, generator=generator) * 0.05 + 0.01)
    return int4


def try_all(device: str, dtypes: Iterable[Any] = TOLERANCE, *, in_turn: bool = False) -> None:
    """Args: in_turn: each format in every other case, and each of these in one of the dtypes."""
    dtypes = list(dtypes)
    torch.utils.deterministic.fill_uninitialized_memory = True  # NaN in unwritten memory would show
    torch.use_deterministic_algorithms(True, warn_only=True)
    for number, kind in enumerate(FORMATS):
        for case, (count, sizes, inputs, of_groups) in enumerate(SHAPES):
            if inputs % (FORMATS[kind].group or 1) or (in_turn and (number + case) % 2):
                continue
            for dtype in [dtypes[case // 2 % len(dtypes)]] if in_turn else dtypes:
                weights = made(kind, sizes, inputs, len(of_groups), dtype, device, case)
                assert weights.kernel_fits(dtype)
                compare(weights, count, of_groups, dtype, device, (kind, case, dtype))


def compare(weights: Quantized, count: int, of_groups: list[int], dtype: Any, device: str, what: Any) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, weights.inputs + 16, generator=generator).to(device, dtype)[:, : weights.inputs]
    bias = None if of_groups else torch.randn(weights.outputs, generator=generator).to(device, dtype)
    if of_groups:
        ends = torch.tensor(of_groups, device=device).cumsum(0).int()
        parts = rows.float().split(of_groups)
        expected = torch.cat([part @ weights.widened(torch.float32, g).t() for g, part in enumerate(parts)])
    else:
        ends, wide = None, weights.widened(torch.float32)
        expected = rows.float() @ wide.t() + bias.float()
        fast = weights.widened_fast(dtype)
        bound = 0 if dtype == torch.float32 else 2.0**-8
        assert (fast.float() - wide).abs().max() <= bound * wide.abs().max(), what
    found = weights.kernel_linear(rows, bias, ends)
    assert not found.isnan().any(), what
    assert found.dtype == dtype
    assert (found.float() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max(), what


def test_our_kernels_under_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is decided when its module is imported.

    Without bfloat16: Triton's interpreter multiplies its bits as if they were whole numbers.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    call = "import tests.runtime.test_quantized_kernels as this; this.try_all('cpu', this.INTERPRETED, in_turn=True)"
    run = subprocess.run(
        [sys.executable, "-c", call],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": PATHS},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.runtime.quantized.kernels import fp8_linear_kernel, int4_linear_kernel, int4_widen_kernel
TYPES = dict(weight="*u8", scale="*fp32", ends="*i32", qweight="*i32", zeros="*i32")
WIDE = dict(DOWN=128, ACROSS=128, GROUP=128, ZERO_ADD=1, BIAS=True)
LOW, HIGH, EXACT = (80, "bf16", 1, 0), (90, "bf16", 0, 8), (90, "fp32", 0, 0)
for kernel, kinds in ((fp8_linear_kernel, (LOW, EXACT)), (int4_linear_kernel, (HIGH,)), (int4_widen_kernel, (LOW,))):
    for capability, dtype, low, groups in kinds:
        constants = WIDE | dict(GROUPS=groups, GROUPS_PADDED=max(groups, 1), BIAS=not groups)
        constants |= dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=128) if low else dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {name: TYPES.get(name, "*" + dtype) for name in kernel.arg_names}
        types |= {name: "i32" for name in ("M", "N", "K", "row_stride") if name in types}
        types |= dict.fromkeys(constants, "constexpr")
        indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        options = dict(num_warps=4, num_stages=4 if low else 3)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(ASTSource(kernel, types, indices), target=target, options=options)
        assert len(compiled.asm["cubin"]) > 1000
        assert compiled.metadata.shared <= 99 * 1024, (kernel, capability, dtype, low, compiled.metadata.shared)
"""


def test_our_kernels_compile_without_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
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
    for kind in ("blocks", "gptq"):
        weights = made(kind, [64], 128, 3, torch.bfloat16, "cuda", 0)
        rows = torch.randn(5, 128, device="cuda", dtype=torch.bfloat16)
        ends = torch.tensor([2, 2, 5], device="cuda", dtype=torch.int32)
        torch.cuda.set_sync_debug_mode("error")
        try:
            weights.kernel_linear(rows, None, ends)
        finally:
            torch.cuda.set_sync_debug_mode("default")
