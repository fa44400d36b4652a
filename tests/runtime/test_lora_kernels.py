"""The products of adapters: our kernels against the reference, and the reference against one token after the other."""

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

from lockstep.runtime.lora.batch import lay_out  # noqa: E402
from lockstep.runtime.lora.slots import add_lora_reference  # noqa: E402

CASES: list[tuple[list[int], list[int], int, list[int], int]] = [  # slots and tokens of rows, inputs, sizes, rank
    ([0, -1, 2, 0], [1, 1, 1, 1], 24, [8], 4),  # decodes
    ([1, -1, 0, 1], [5, 3, 17, 2], 70, [24, 8, 8], 3),  # extends of q, k and v
    ([2], [1], 16, [130, 6], 16),
    ([0, 1, 1], [70, 1, 20], 33, [65], 20),  # many tokens for few adapters: high tiles
]
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the largest
INTERPRETED = (torch.float32, torch.float16)
SLOTS = 3


def operands(case: int, dtype: Any, device: str = "cpu") -> tuple[Any, Any, Any, Any, list[int], Any]:
    slots, counts, inputs, sizes, rank = CASES[case]
    generator = torch.Generator().manual_seed(case)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    tokens = sum(counts)
    batch = lay_out(
        np.array(slots, np.int32), np.array(counts, np.int32), lambda one: torch.from_numpy(one.copy()).to(device)
    )
    down, up = drawn(SLOTS, len(sizes) * rank, inputs), drawn(SLOTS, sum(sizes), rank)
    return drawn(tokens, sum(sizes)), drawn(tokens, inputs), down, up, sizes, batch


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_reference_is_one_token_after_the_other(case: int) -> None:
    out, hidden, down, up, sizes, batch = operands(case, torch.float32)
    slots, counts, _, _, rank = CASES[case]
    expected = out.clone()
    for token, slot in enumerate(np.repeat(slots, counts).tolist()):
        if slot < 0:
            continue
        inner, first = down[slot] @ hidden[token], 0
        for part, size in enumerate(sizes):
            expected[token, first : first + size] += (
                up[slot, first : first + size] @ inner[part * rank : (part + 1) * rank]
            )
            first += size
    assert torch.allclose(add_lora_reference(out, hidden, down, up, sizes, batch), expected, atol=1e-4)


def test_tiles_hold_every_token_of_an_adapter_once() -> None:
    for case, (slots, counts, *_) in enumerate(CASES):
        *_, batch = operands(case, torch.float32)
        of_tokens = np.repeat(slots, counts)
        seen: list[int] = []
        for first, stop, slot in batch.tiles.T.tolist():
            assert 0 < stop - first <= batch.tile
            assert set(of_tokens[batch.tokens[first:stop].numpy()]) == {slot}
            seen += batch.tokens[first:stop].tolist()
        assert sorted(seen) == np.flatnonzero(of_tokens >= 0).tolist()


def try_all(device: str, dtypes: Iterable[Any] = TOLERANCE) -> None:
    from lockstep.runtime.lora.kernels import add_lora_triton

    torch.utils.deterministic.fill_uninitialized_memory = True  # NaN in unwritten memory would show
    torch.use_deterministic_algorithms(True, warn_only=True)
    for case in range(len(CASES)):
        for dtype in dtypes:
            out, hidden, down, up, sizes, batch = operands(case, dtype, device)
            exact = [one.float() for one in (out, hidden, down, up)]
            expected = add_lora_reference(*exact, sizes, batch)
            found = add_lora_triton(out, hidden, down, up, sizes, batch)
            assert found is out
            assert not found.isnan().any()
            assert (found.float() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max(), (case, dtype)


def test_our_kernels_under_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is decided when its module is imported.

    Without bfloat16: Triton's interpreter multiplies its bits as if they were whole numbers.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    run = subprocess.run(
        [sys.executable, "-c", "import tests.runtime.test_lora_kernels as this; this.try_all('cpu', this.INTERPRETED)"],
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
from lockstep.runtime.lora.kernels import expand_kernel, shrink_kernel
WHOLE = "hidden_stride out_stride tile_count N K outputs inner_width inner_first out_first".split()
for kernel, more in ((shrink_kernel, dict(BLOCK_K=64)), (expand_kernel, dict(RANK=512, BLOCK_K=64))):
    for dtype, block_m in (("bf16", 16), ("fp32", 64)):
        constants = dict(BLOCK_M=block_m, BLOCK_N=64, **more)
        types = {name: "*" + dtype for name in kernel.arg_names}
        types |= {name: "i32" for name in WHOLE if name in types} | dict(tokens="*i64", tiles="*i32")
        types |= dict.fromkeys(constants, "constexpr")
        indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, types, indices), target=GPUTarget("cuda", 90, 32))
        assert len(compiled.asm["cubin"]) > 1000
        assert compiled.metadata.shared <= 99 * 1024, (dtype, block_m, compiled.metadata.shared)
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
    from lockstep.runtime.lora.kernels import add_lora_triton

    try_all("cuda")
    out, hidden, down, up, sizes, batch = operands(1, torch.bfloat16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_lora_triton(out, hidden, down, up, sizes, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
