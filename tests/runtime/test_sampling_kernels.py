"""Triton kernels of sampling: equal to their references to the bit under the interpreter, and compiled without a GPU.

Triton decides at import whether it interprets, so the tests run in processes of their own: this file starts itself
twice, with TRITON_INTERPRET=1 and with 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
triton = pytest.importorskip("triton", reason="the kernels need triton")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import SamplingParams  # noqa: E402
from lockstep.runtime.sampling import Sampler, SamplingTable, philox, reference  # noqa: E402

INSIDE = "SAMPLING_KERNELS_INSIDE"
inside = os.environ.get(INSIDE)
interpreted = pytest.mark.skipif(inside != "1", reason="runs in the interpreter's process")
compiled = pytest.mark.skipif(inside != "0", reason="runs in the compiler's process")
# Infinities are intended; numpy, which runs the interpreter, warns of inf - inf in values that a kernel then ignores.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.skipif(inside is not None, reason="starts the others")
@pytest.mark.parametrize(("interpret", "least"), [("1", 9), ("0", 8)], ids=["interpreted", "compiled"])
def test_kernels_in_their_own_process(interpret: str, least: int, tmp_path: Path) -> None:
    settings = {INSIDE: interpret, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=os.environ | settings, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    passed = int(counted[1]) if counted else 0
    assert passed >= least, done.stdout


def kernels() -> Any:
    from lockstep.runtime.sampling import kernels as module

    return module


# --------------------------------------------------------------------------------------------------------- interpreted


def setup(vocab: int, samples: int, seed: int) -> tuple[SamplingTable, Any, Any, Any]:
    """Rows with random settings of every kind, and logits with ties, zeros of both signs and infinities."""
    rng = np.random.default_rng(seed)
    table = SamplingTable(samples + 3, vocab, "cpu")
    rows = rng.permutation(samples + 3)[:samples].astype(np.int32)
    for i, row in enumerate(rows):
        bias = {int(t): float(rng.normal()) for t in rng.integers(0, vocab, int(rng.choice([0, 1, 40])))}
        table.take_row(
            int(row),
            SamplingParams(
                temperature=float(rng.choice([0, 0.3, 1, 4])) if i else 1.0,
                top_k=int(rng.choice([0, 1, 5, vocab])),
                top_p=float(rng.choice([1, 0.9, 0.4, 0])),
                min_p=float(rng.choice([0, 0.05, 1])) if i else 0.02,
                frequency_penalty=float(rng.choice([0, 0.7])),
                presence_penalty=float(rng.choice([0, -0.3])),
                repetition_penalty=float(rng.choice([1, 1.3])),
                seed=int(rng.integers(-(2**63), 2**63)),
                logit_bias=tuple(bias.items()),
            ),
            rng.integers(0, vocab, 9),
            rng.integers(0, vocab, 5),
            min_new_tokens=int(rng.choice([0, 8])),
            stop_token_ids=set(rng.integers(0, vocab, 3).tolist()),
        )
    logits = (rng.normal(0, 3, (samples, vocab)) * rng.choice([1, 1, 1e-3])).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = 0.0
    logits[rng.random(logits.shape) < 0.05] = -0.0
    logits[rng.random(logits.shape) < 0.05] = 1.25
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    if samples > 3:
        logits[2] = -np.inf
        logits[3, vocab // 2] = np.nan
    return table, torch.from_numpy(logits), rows, rng


def same(got: Any, expected: Any) -> None:
    """Equal to the bit; NaN equals NaN."""
    nan = expected.isnan()
    assert bool((got.isnan() == nan).all())
    assert bool((got.view(torch.int32) == expected.view(torch.int32))[~nan].all())


@interpreted
@pytest.mark.parametrize(("vocab", "seed"), [(1, 0), (5, 1), (96, 2), (96, 3), (1027, 4)])
def test_kernels_do_what_the_reference_does(vocab: int, seed: int) -> None:
    samples = 5 if vocab < 1000 else 2
    table, logits, rows_host, rng = setup(vocab, samples, seed)
    table.flush()
    columns, rows = table.columns, torch.from_numpy(rows_host)
    positions = torch.from_numpy(rng.integers(9, 2**34, samples))
    positions[0] = 12
    module = kernels()

    expected = logits.clone()
    reference.edit_(expected, rows, positions, columns)
    module.edit_(logits, rows, positions, columns)
    same(logits, expected)

    allowed = torch.from_numpy(rng.integers(-(2**31), 2**31, (samples, (vocab + 31) // 32)).astype(np.int32))
    allowed[1:] |= torch.from_numpy(rng.integers(-(2**31), 2**31, allowed[1:].shape).astype(np.int32))
    reference.mask_(expected, allowed)
    module.mask_(logits, allowed)
    same(logits, expected)

    reference.penalise_(expected, rows, columns)
    module.penalise_(logits, rows, columns)
    same(logits, expected)

    maxima = logits.amax(1)
    floor = reference.pivots(expected, rows, columns, maxima)
    found = module.pivots(logits, rows, columns, maxima)
    valid = maxima > -torch.inf
    assert bool((found == floor)[valid].all()), (found, floor)
    for limit in (floor, None):
        for random in (True, False):
            drawn = module.draw(logits, rows, positions, columns, maxima, limit, random)
            assert drawn.tolist() == reference.draw(logits, rows, positions, columns, maxima, limit, random).tolist()


@interpreted
def test_one_nan_and_plus_infinity_under_every_kernel() -> None:
    table = SamplingTable(3, 11, "cpu")
    for row in range(3):
        params = SamplingParams(
            temperature=1, top_k=3, top_p=0.9, seed=row, presence_penalty=1.0, logit_bias=((4, 1.0),)
        )
        table.take_row(row, params, [], [4], min_new_tokens=3, stop_token_ids=(4,))
    logits = torch.zeros((3, 11))
    logits[0, 4], logits[1, 4], logits[2, 5] = torch.nan, torch.inf, torch.inf
    rows = np.arange(3, dtype=np.int32)
    outs = []
    for backend in ("torch", "triton"):
        given = logits.clone()
        sampler = Sampler(table, backend=backend)  # type: ignore[arg-type]
        outs.append((sampler.sample(given, torch.from_numpy(rows), torch.tensor([1, 1, 1]), rows), given))
        table.columns.seen.zero_()
        table.columns.seen[1:, 4] = 1
    (a, logits_a), (b, logits_b) = outs
    assert a.tokens.tolist() == b.tokens.tolist()
    assert int(a.tokens[2]) == 5
    assert a.invalid.tolist() == b.invalid.tolist() == [True, False, False]
    assert sampler.backend == "triton"
    assert logits_a.isnan().sum() == logits_b.isnan().sum() == 1


@interpreted
def test_both_backends_generate_the_same_tokens() -> None:
    """The whole sampler, many positions, penalties fed by its own draws."""
    drawn: list[list[list[int]]] = []
    for backend in ("torch", "triton"):
        table, _, rows, _ = setup(70, 3, 7)
        sampler = Sampler(table, backend=backend)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        tokens = []
        for position in range(12, 16):
            logits = torch.randn((3, 70), generator=generator) * 2
            out = sampler.sample(logits, torch.from_numpy(rows), torch.full((3,), position), rows)
            assert not out.invalid.any()
            tokens.append(out.tokens.tolist())
        drawn.append(tokens)
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) > 2


@interpreted
def test_block_sizes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels()
    table = SamplingTable(3, 333, "cpu")
    table.take_row(0, SamplingParams(temperature=1, top_k=30, top_p=0.8))
    table.take_row(1, SamplingParams(temperature=1, top_p=0.9))  # its token is among the candidates ...
    table.take_row(2, SamplingParams(temperature=0.02, top_k=40))  # ... and this one's is not
    table.flush()
    rows, positions = torch.arange(3, dtype=torch.int32), torch.tensor([5, 6, 7])
    logits = torch.randn((3, 333), generator=torch.Generator().manual_seed(5)) * 2
    maxima = logits.amax(1)
    floor = reference.pivots(logits, rows, table.columns, maxima).tolist()
    tokens = reference.draw(logits, rows, positions, table.columns, maxima, torch.tensor(floor), True).tolist()
    for vocab_block, pivot_block, candidates in ((64, 128, 16), (512, 1024, 16384)):
        monkeypatch.setattr(module, "VOCAB_BLOCK", vocab_block)
        monkeypatch.setattr(module, "PIVOT_BLOCK", pivot_block)
        monkeypatch.setattr(module, "CANDIDATES_MAX", candidates)
        found = module.pivots(logits, rows, table.columns, maxima)
        assert found.tolist() == floor
        assert module.draw(logits, rows, positions, table.columns, maxima, found, True).tolist() == tokens


@interpreted
def test_words_of_the_kernel_are_those_of_numpy() -> None:
    """With equal logits and temperature 1, the token is the one with the largest word of numpy's Philox."""
    table = SamplingTable(3, 1030, "cpu")
    seeds, positions = (3, -9, 2**62 + 5), (0, 77, 2**33 + 1)
    for row, seed in enumerate(seeds):
        table.take_row(row, SamplingParams(temperature=1, seed=seed))
    rows = np.arange(3, dtype=np.int32)
    out = Sampler(table, backend="triton").sample(
        torch.zeros((3, 1030)), torch.from_numpy(rows), torch.tensor(positions), rows
    )
    # Small words make large numbers: see numerics.gumbel.
    best = [int(philox.words_numpy(s, p, 1030).argmin()) for s, p in zip(seeds, positions, strict=True)]
    assert out.tokens.tolist() == best


# ------------------------------------------------------------------------------------------------------------ compiled

POINTERS = {
    f"{name}_ptr": kind
    for kind, names in {
        "*fp32": "logits reals bias pivots candidates maxima best",
        "*i32": "rows ids allowed seen token tokens",
        "*i64": "positions ints until",
    }.items()
    for name in names.split()
}
KERNELS = [
    ("_edit_kernel", {"BLOCK": 32}, 1),
    ("_mask_kernel", {"BLOCK": 1024}, 4),
    ("_penalise_kernel", {"BLOCK": 1024}, 4),
    ("_pivot_kernel", {"BLOCK": 2048}, 16),
    ("_draw_kernel", {"LIMITED": True, "RANDOM": True, "GROUPS": 256}, 4),
    ("_draw_kernel", {"LIMITED": False, "RANDOM": False, "GROUPS": 256}, 4),
    ("_pick_kernel", {"BLOCK": 256}, 1),
]


@compiled
def test_the_kernels_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="`backend` triton needs a CUDA device, got `cpu`"):
        Sampler(SamplingTable(1, 5, "cpu"), backend="triton")


@compiled
@pytest.mark.parametrize(("name", "constants", "warps"), KERNELS, ids=lambda value: str(value))
def test_kernels_compile_without_a_gpu(name: str, constants: dict[str, int], warps: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels(), name)
    signature = {a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in kernel.arg_names}
    options = {"num_warps": warps, "enable_fp_fusion": False}
    for capability in (80, 90, 100):
        target = GPUTarget("cuda", capability, 32)
        binary = triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)
        assert len(binary.asm["cubin"]) > 1000
        assert "fma." not in binary.asm["ptx"], "a fused multiply-add rounds differently from the reference"
        assert "div.full" not in binary.asm["ptx"]
        assert binary.metadata.shared <= 16384
