"""Operations between the matrix products of a layer: our kernels against torch, interpreted and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from lockstep.runtime.models import elementwise  # noqa: E402

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative; torch rounds in between
SHAPES = [(5, 4, 2, 16), (1, 7, 1, 80), (3, 2, 2, 64), (0, 4, 2, 16)]  # tokens, heads, kv heads, head_dim


def run_in_a_process(code: str, **environment: str) -> None:
    """Whether a kernel is interpreted is decided when its module is imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"import tests.runtime.test_elementwise as this; {code}"],
        env=os.environ | {"PYTHONPATH": PATHS, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def close(found: Any, expected: Any, dtype: Any) -> None:
    """Equal but for rounding, and of the same kind."""
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def try_all(device: str, dtypes: Iterable[Any] = tuple(TOLERANCE)) -> None:
    """Every kernel, over shapes that are no powers of two as well."""
    from lockstep.runtime.models import elementwise_kernels as kernels

    for dtype in dtypes:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, dtype: Any = dtype, generator: Any = generator) -> Any:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        for tokens, heads, kv_heads, head_dim in SHAPES:
            hidden = heads * head_dim + 3
            residual, added, weight = normal(tokens, hidden), normal(tokens, hidden), 1 + normal(hidden) / 4
            for more in (added, None):
                found = kernels.add_rms_norm_triton(residual, more, weight, 1e-6)
                expected = elementwise.add_rms_norm_reference(residual, more, weight, 1e-6)
                for one, other in zip(found, expected, strict=True):
                    close(one, other, dtype)
                if device == "cuda" or dtype != torch.bfloat16:  # the interpreter truncates bits instead of rounding
                    assert torch.equal(found[0], expected[0]), "the sum is not what torch adds up"

            qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim)
            angles = torch.rand(tokens, 1, head_dim // 2, generator=generator) * 6
            turns = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
            for weights in ((1 + normal(head_dim) / 4, 1 + normal(head_dim) / 4), None):
                given = (qkv, heads, kv_heads, weights, 1e-6, *turns)
                before = qkv.clone()
                for one, other in zip(
                    kernels.norm_and_turn_triton(*given), elementwise.norm_and_turn_reference(*given), strict=True
                ):
                    assert one.shape == other.shape
                    close(one, other, dtype)
                assert torch.equal(qkv, before)

            gate_up = normal(tokens, 2 * (head_dim * 20 + 1)) * 4
            close(kernels.silu_and_mul_triton(gate_up), elementwise.silu_and_mul_reference(gate_up), dtype)


def compile_all(capability: int) -> None:
    """To machine code, for a GPU that this machine need not have."""
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lockstep.runtime.models import elementwise_kernels as kernels

    sizes = {"SIZE": 4096, "PADDED": 4096, "ADD": True}
    heads = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "PADDED": 64, "NORM": True}
    for kernel, constants, warps in (
        (kernels.add_rms_norm_kernel, sizes, 8),
        (kernels.add_rms_norm_kernel, {**sizes, "SIZE": 5120, "PADDED": 8192, "ADD": False}, 16),
        (kernels.norm_and_turn_kernel, heads, 1),
        (kernels.norm_and_turn_kernel, {**heads, "HALF": 40, "NORM": False}, 1),
        (kernels.silu_and_mul_kernel, {"INNER": 12288, "BLOCK": 1024}, 4),
    ):
        for kind in ("bf16", "fp32"):
            signature = {
                name: "constexpr" if name in constants else "fp32" if name == "eps" else f"*{kind}"
                for name in kernel.arg_names
            }
            made = build(
                ASTSource(kernel, signature, constants),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": warps},
            )
            assert made.asm["cubin"]


def test_on_a_cpu_torch_does_it() -> None:
    assert not elementwise.has_kernels(torch.zeros(1))
    gate_up = torch.randn(3, 8)
    assert torch.equal(elementwise.silu_and_mul(gate_up), torch.nn.functional.silu(gate_up[:, :4]) * gate_up[:, 4:])


def test_our_kernels_under_the_interpreter() -> None:
    run_in_a_process("this.try_all('cpu')", TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_a_gpu(capability: int) -> None:
    run_in_a_process(f"this.compile_all({capability})", TRITON_INTERPRET="0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_our_kernels_on_a_gpu() -> None:
    try_all("cuda")
