"""Rows in fp8 for weights in fp8: rounded as the checkpoint specifies, by torch and our kernels; the choice of both."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.host.quantization import WeightFormat, read_weight_format, rounds_rows  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.quantized.activations import choose_activations  # noqa: E402
from lockstep.runtime.quantized.fp8 import Fp8Matrices, RowRounding, to_codes, to_fp8  # noqa: E402
from lockstep.runtime.quantized.matrices import StoredMatrix  # noqa: E402
from tests.runtime.test_models import Ranks  # noqa: E402
from tests.runtime.test_quantized import MOE, QWEN3, changed, compressed, folder_of, logits  # noqa: E402
from tests.support.quantize import KINDS, write  # noqa: E402

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
CPU: dict[str, Any] = {"device": "cpu", "grammar_backend": "none"}
FP8 = {"method": "fp8", "layout": "fp8", "scale": "weight_scale"}
FORMATS = {
    "blocks": WeightFormat(**FP8, block=(128, 128)),
    "small blocks": WeightFormat(**FP8, block=(16, 32)),
    "outputs": WeightFormat(**FP8, by_output=True),
    "tensors": WeightFormat(**FP8),
}

# The value of a byte of e4m3, by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities.
E4M3 = np.array(
    [
        (m / 8 * 2.0**-6 if not e else (1 + m / 8) * 2.0 ** (e - 7))
        for e, m in itertools.product(range(16), range(8))
        if (e, m) != (15, 7)
    ]
)


def nearest(values: Any) -> Any:
    """Each number as the nearest one of e4m3; of two equally near ones that with the even code."""
    sizes = np.minimum(np.abs(values), 448.0)[..., None]
    far = np.abs(sizes - E4M3)
    codes = far.argmin(-1)
    above = np.take_along_axis(far, np.minimum(codes + 1, len(E4M3) - 1)[..., None], -1)[..., 0]
    tied = (codes + 1 < len(E4M3)) & (above == far.min(-1))
    codes = np.where(tied & (codes % 2 == 1), codes + 1, codes)
    return np.sign(values) * E4M3[codes]


def made(kind: str, sizes: list[int], inputs: int, groups: int, activations: Any, device: str = "cpu") -> Fp8Matrices:
    parts = [StoredMatrix(f"part{number}", size, inputs) for number, size in enumerate(sizes)]
    one = Fp8Matrices(parts, groups, 0, 1, torch.float32, torch.device(device), FORMATS[kind], RowRounding(activations))
    generator = torch.Generator().manual_seed(3)
    one.weight.data.copy_(to_fp8(torch.randn(one.weight.shape, generator=generator) * 60))
    one.scale.data.copy_(torch.rand(one.scale.shape, generator=generator) * 0.01 + 0.001)
    if one.input_scale is not None:
        one.input_scale.data.copy_(torch.rand(one.input_scale.shape, generator=generator) * 0.01 + 0.005)
    return one


def some_rows(count: int, inputs: int) -> Any:
    """Rows of very different sizes, one of them zeros."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    rows *= torch.logspace(-6, 3, count)[:, None]
    rows[count // 2] = 0.0
    return rows


# --------------------------------------------------------------------------------------------------------- the rounding


@pytest.mark.parametrize(
    ("kind", "activations", "run"),
    [
        ("small blocks", "dynamic", 32),
        ("tensors", "dynamic", 96),
        ("outputs", "dynamic", 96),
        ("tensors", "static", 96),
    ],
)
def test_the_reference_rounds_by_the_definition(kind: str, activations: Any, run: int) -> None:
    one, rows = made(kind, [32, 16], 96, 0, activations), some_rows(7, 96)
    wide = rows.double().numpy().reshape(7, -1, run)
    if activations == "static":
        scale = np.full((*wide.shape[:2], 1), one.input_scale.max().double().numpy())
    else:
        scale = np.maximum(np.abs(wide).max(-1, keepdims=True), 1e-10).astype(np.float32) / np.float32(448)
    rounded = (nearest((wide.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)) * scale).reshape(7, 96)
    expected = rounded @ one.widened(torch.float32).double().numpy().T
    bias = torch.randn(48)
    found = one.linear(rows, bias).double().numpy()
    each = np.abs(expected).max(-1, keepdims=True) + np.abs(bias.numpy()).max()
    assert (np.abs(found - expected - bias.double().numpy()) <= 1e-5 * each).all()
    widened = rows.double() @ one.widened(torch.float32).double().t()  # the result without rounding
    assert np.abs(widened.numpy() - expected).max() > 1e-3 * np.abs(expected).max()


def test_experts_round_each_row_as_it_would_be_alone() -> None:
    one, rows = made("small blocks", [48], 64, 3, "dynamic"), some_rows(6, 64)
    found = one.grouped(rows, torch.tensor([3, 3, 6], dtype=torch.int32))
    codes, scale = to_codes(rows, 32)
    wide = (codes.float().view(6, 2, 32) * scale[..., None]).view(6, 64)
    expected = torch.cat([wide[:3] @ one.widened(torch.float32, 0).t(), wide[3:] @ one.widened(torch.float32, 2).t()])
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert made("small blocks", [48], 64, 0, "dynamic").linear(rows[:0]).shape == (0, 48)


def test_what_is_no_number_stays_none() -> None:
    rows = torch.ones(3, 64)
    rows[1, 5], rows[2, 6] = float("nan"), float("inf")
    found = made("tensors", [16], 64, 0, "dynamic").linear(rows)
    assert [bool(one.isnan().any()) for one in found] == [False, True, True]


# ----------------------------------------------------------------------------------------------------------- the models


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("dense") / "model", QWEN3)


@pytest.mark.parametrize("kind", ["fp8, small blocks", "fp8, tensors", "compressed-tensors, channels", "modelopt"])
def test_a_model_with_rows_in_fp8_is_near_the_one_without(kind: str, dense: Path, tmp_path: Path) -> None:
    folder = write(dense, kind, tmp_path / "stored")
    plain, rounded = (build_model(folder, torch.float32, fp8_activations=setting) for setting in ("off", "on"))
    assert (plain.activations, rounded.activations) == (
        "",
        "static" if kind in ("fp8, tensors", "modelopt") else "dynamic",
    )
    expected, found = logits(plain), logits(rounded)
    assert 1e-4 < (found - expected).abs().max() / expected.abs().max() < 0.2
    if rounded.activations == "static":  # q, k and v read one row, so the largest of their scales holds
        scale = rounded.stack[0].attention.qkv.weight.input_scale
        assert scale.tolist() == [0.25] * 3
        name = "model.layers.0.self_attn.k_proj.input_scale"
        other = build_model(changed(folder, {name: torch.tensor([0.75])}), torch.float32, fp8_activations="on")
        assert other.stack[0].attention.qkv.weight.input_scale.tolist() == [0.25, 0.75, 0.25]
        assert not torch.equal(logits(other), found)


def test_ranks_round_what_one_rank_rounds(tmp_path: Path) -> None:
    """Runs of 32 inputs lie within the parts of both ranks, so their scales are the same."""
    model, meeting = folder_of(tmp_path / "model", QWEN3 | {"intermediate_size": 128}), Ranks(2)
    folder = write(model, "fp8, small blocks", tmp_path / "stored")
    expected = logits(build_model(folder, torch.float32, fp8_activations="on"))

    def run(rank: int) -> Any:
        parallel = meeting.parallel(rank)
        return logits(build_model(folder, torch.float32, parallel=parallel, fp8_activations="on"))

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(2)):
            assert (found - expected).abs().max() <= 5e-3 * expected.abs().max()


def test_experts_of_a_checkpoint_with_scales_of_rows(tmp_path: Path) -> None:
    folder = write(folder_of(tmp_path / "model", MOE), "fp8, tensors", tmp_path / "stored")
    plain, rounded = (build_model(folder, torch.float32, fp8_activations=setting) for setting in ("off", "on"))
    assert rounded.stack[1].mlp.gate_up.input_scale.shape == (MOE["num_experts"], 2)
    expected, found = logits(plain), logits(rounded)
    assert 1e-4 < (found - expected).abs().max() / expected.abs().max() < 0.3


def test_a_static_checkpoint_without_its_scales_is_refused_where_they_are_wanted(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, "fp8, tensors", tmp_path / "stored")
    name = "model.layers.1.mlp.down_proj.input_scale"
    changed(folder, {name: None})
    build_model(folder, torch.float32)
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        build_model(folder, torch.float32, fp8_activations="on")
    changed(folder, {name: torch.tensor(-1.0)})
    with pytest.raises(CheckpointError, match=f"{name}: holds scales that are not above 0"):
        build_model(folder, torch.float32, fp8_activations="on")


# ----------------------------------------------------------------------------------------------- the choice of rounding


def test_what_checkpoints_report_of_their_activations() -> None:
    def said(settings: Any) -> str:
        problems: list[str] = []
        found = read_weight_format({"quantization_config": settings}, problems)
        assert found is not None, problems
        return found.activations

    assert {kind: said(settings) for kind, (settings, _) in KINDS.items() if "activ" in json.dumps(settings)} == {
        "fp8": "dynamic",
        "fp8, small blocks": "dynamic",
        "fp8, tensors": "static",
        "compressed-tensors": "dynamic",
        "compressed-tensors, channels": "dynamic",
        "compressed-tensors, blocks": "dynamic",
    }
    assert said(KINDS["modelopt"][0]) == "static"
    assert said({"quant_method": "fp8"}) == said(KINDS["awq"][0]) == ""
    weights_only = compressed()
    weights_only["config_groups"]["group_0"]["input_activations"] = None
    assert said(weights_only) == ""


@pytest.mark.parametrize(
    ("setting", "said", "tensor_cores", "rounds"),
    [
        ("auto", "dynamic", True, True),
        ("auto", "static", True, True),
        ("auto", "dynamic", False, False),
        ("auto", "", True, False),
        ("on", "", True, True),
        ("off", "dynamic", True, False),
    ],
)
def test_the_rule(setting: Any, said: Any, tensor_cores: bool, rounds: bool) -> None:
    assert rounds_rows(setting, said, tensor_cores) is rounds


def test_a_gpu_without_fp8_widens_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    stored, gpu = WeightFormat(**FP8, activations="dynamic"), torch.device("cuda", 0)
    with caplog.at_level("INFO"):
        assert choose_activations("auto", stored, gpu) == ""
    assert "not rounded to fp8: a GPU of compute capability 8.0 has no fp8 tensor cores" in caplog.text
    with pytest.raises(ConfigError, match=r"`fp8_activations` is on, but a GPU of compute capability 8\.0 has no"):
        choose_activations("on", stored, gpu)
    assert choose_activations("off", stored, gpu) == ""
    with pytest.raises(ConfigError, match="`fp8_activations` is on, but weights are awq in groups of 16 inputs"):
        choose_activations("on", WeightFormat(method="awq", layout="awq", group=16), gpu)


def test_a_run_that_a_gpu_cannot_multiply_is_named_or_widened() -> None:
    stored = WeightFormat(**FP8, block=(16, 16))
    place = ([StoredMatrix("o_proj", 32, 64)], 0, 0, 1, torch.float32)
    with pytest.raises(ConfigError, match="is on, but on this rank 16 inputs of `o_proj` share a scale"):
        _OnGpu(*place, torch.device("cuda"), stored, RowRounding("dynamic", required=True))
    dynamic = RowRounding("dynamic")
    assert _OnGpu(*place, torch.device("cuda"), stored, dynamic).activations == ""  # auto: these weights are widened
    assert _OnGpu(*place, torch.device("cuda"), WeightFormat(**FP8), dynamic).activations == "dynamic"


class _OnGpu(Fp8Matrices):
    def empty(self, *shape: int, dtype: Any) -> Any:
        self.device, where = torch.device("cpu"), self.device
        try:
            return super().empty(*shape, dtype=dtype)
        finally:
            self.device = where


def test_an_engine_with_rows_in_fp8(tmp_path: Path) -> None:
    """On a CPU auto leaves rows as they are, and journals too; on rounds them, which the header records."""
    folder = write(demo_folder(), "fp8", tmp_path / "stored")
    params = Params(max_new_tokens=8, ignore_eos=True, logprobs=0)
    prompts = ["def f(", "The list is", "import "]

    def run(name: str, **more: Any) -> Any:
        with LLM(folder, journal=tmp_path / name, **more, **CPU) as llm:
            return llm.generate(prompts, params)

    plain, rounded = run("auto"), run("on", fp8_activations="on")
    assert "fp8_activations" not in read_journal(tmp_path / "auto").header.host
    assert read_journal(tmp_path / "on").header.host["fp8_activations"] == "dynamic"
    assert replay(tmp_path / "on").steps
    pairs = [
        (a.logprobs[0], b.logprobs[0]) for a, b in zip(plain, rounded, strict=True) if a.token_ids[0] == b.token_ids[0]
    ]
    assert len(pairs) >= 2
    assert all(1e-6 < abs(a - b) < 0.5 for a, b in pairs)
    assert [a.token_ids for a in run("again", fp8_activations="on")] == [a.token_ids for a in rounded]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fp8_activations": "yes"}, "`fp8_activations` must be auto, on, off, got `yes`"),
        ({"fp8_activations": "on"}, "`fp8_activations` is on, but weights are not quantised"),
        ({"fp8_activations": "on", "tp": 2}, "`fp8_activations` is on, but weights are not quantised"),
    ],
)
def test_what_cannot_be_is_one_error(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(**settings, **CPU)


# ---------------------------------------------------------------------------------------------------------- the kernels

SHAPES: list[tuple[str, int, list[int], int, list[int]]] = [  # rows, outputs of parts, inputs, rows of groups
    ("blocks", 3, [128, 64], 256, []),
    ("small blocks", 11, [64, 16], 96, []),
    ("outputs", 5, [40], 80, []),
    ("tensors", 4, [24, 16], 160, []),
    ("small blocks", 6, [32], 64, [3, 0, 3]),
    ("tensors", 41, [24], 32, []),  # the largest tiles
]


def try_all(device: str, dtypes: Any) -> None:
    """Both kernels against their references; on a CPU under Triton's interpreter."""
    from lockstep.runtime.quantized import fp8_kernels
    from lockstep.runtime.quantized.fp8_kernels import rounded_rows, scaled_linear

    fp8_kernels.FEW_ROWS, fp8_kernels.MORE_ROWS = 8, 40  # all kinds of tiles by few rows
    torch.utils.deterministic.fill_uninitialized_memory = True  # NaN in unwritten memory would show
    torch.use_deterministic_algorithms(True, warn_only=True)
    for number, (kind, count, sizes, inputs, of_groups) in enumerate(SHAPES):
        dtype = dtypes[number % len(dtypes)]
        weights = made(kind, sizes, inputs, len(of_groups), "static" if number == 3 else "dynamic", device)
        rows = some_rows(count, inputs + 16).to(device, dtype)[:, :inputs]
        rows = rows.clamp(-6e4, 6e4)
        codes, scale = to_codes(rows, weights.run, weights.input_scale)
        found, by = rounded_rows(rows, weights.run, weights.input_scale)
        assert torch.allclose(by, scale, rtol=1e-6), kind
        ours, theirs = found.float(), codes.float()
        # The interpreter (Triton 3.7) loses the carry if a number is rounded up to a power of two, and truncates
        # numbers below the smallest normal one.
        known = ((theirs.abs().log2() % 1 == 0) | (theirs.abs() < 2.0**-6)) & (device == "cpu")
        unlike = (ours != theirs) & ~known
        asked = (rows.float().view(*scale.shape, -1) / scale[..., None]).view(rows.shape)
        middle = ((ours + theirs) / 2 - asked).abs() <= 1e-5 * asked.abs()  # two are equally near: either is fine
        assert not bool((unlike & ~middle).any()), kind
        assert bool(((ours - theirs).abs() <= 0.5 * theirs.abs() + 2.0**-9).all()), kind
        ends = torch.tensor(of_groups, device=device).cumsum(0).int() if of_groups else None
        bias = None if of_groups else torch.randn(weights.outputs, device=device).to(dtype)
        out = scaled_linear(
            codes, scale.contiguous(), weights.weight.data, weights.scale.data, weights.block, bias, ends, dtype
        )
        parts = rows.split(of_groups) if of_groups else [rows]
        expected = torch.cat(
            [
                weights.rounded_linear(part.float(), None if bias is None else bias.float(), g)
                for g, part in enumerate(parts)
            ]
        )
        step = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        each = expected.abs().amax(1, keepdim=True) + 1e-3
        assert bool(((out.float() - expected).abs() <= step * each).all()), kind
        assert out.dtype == dtype


def in_a_process(code: str, **environment: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": PATHS, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_our_kernels_under_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is decided when its module is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    call = (
        "import torch, tests.runtime.test_fp8_activations as this; this.try_all('cpu', [torch.float32, torch.float16])"
    )
    in_a_process(call, TRITON_INTERPRET="1")


COMPILE = r"""
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.runtime.quantized.fp8_kernels import round_rows_kernel, scaled_linear_kernel, tiling_of
TYPES = dict(codes="*fp8e4nv", weight="*fp8e4nv", scale="*fp32", row_scale="*fp32", static="*fp32", ends="*i32")
def compiled(kernel, capability, constants, options):
    types = {name: TYPES.get(name, "*bf16") for name in kernel.arg_names}
    types |= {name: "i32" for name in ("M", "N", "K", "row_stride") if name in types}
    types |= dict.fromkeys(constants, "constexpr")
    indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names)
               if types[name].startswith("*") or name in ("N", "K", "row_stride")}
    source = ASTSource(kernel, types, indices, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(found.asm["cubin"]) > 1000
    return found
WHOLE = dict(RUN=4096, DOWN=6144, ACROSS=4096, WHOLE=True)
BLOCKS = dict(RUN=128, DOWN=128, ACROSS=128, WHOLE=False)
CASES = [(89, 1, BLOCKS, 0), (90, 1, WHOLE, 0), (90, 100, BLOCKS, 8), (90, 4096, BLOCKS, 0)]
for capability, rows, scales, groups in CASES:
    tiling = tiling_of(rows, max(groups, 1), 128) if not groups else tiling_of(rows * groups, groups, 128)
    constants = scales | dict(BIAS=not groups, GROUPS=groups, GROUPS_PADDED=max(groups, 1))
    constants |= {name: tiling[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    found = compiled(scaled_linear_kernel, capability, constants, {n: tiling[n] for n in ("num_warps", "num_stages")})
    ptx = found.asm["ptx"]
    products = set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.[a-z0-9.]*", ptx))
    assert products and all("e4m3.e4m3" in one for one in products), (capability, rows, products)
    assert any(one.startswith("wgmma") for one in products) == (capability == 90), (capability, rows, products)
    assert found.metadata.shared <= 99 * 1024, (capability, rows, found.metadata.shared)
for run, statics in ((128, 0), (4096, 3)):
    constants = dict(RUN=run, STATICS=statics, STATICS_PADDED=4 if statics else 1, RUNS=16 if run == 128 else 1)
    found = compiled(round_rows_kernel, 90, constants | dict(RUN_PADDED=run), dict(num_warps=4))
    assert "cvt.rn.satfinite.e4m3x2" in found.asm["ptx"]
"""


def test_our_kernels_compile_to_products_of_fp8_by_fp8() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    in_a_process(COMPILE)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)
def test_on_a_gpu_without_asking_the_device() -> None:
    try_all("cuda", [torch.bfloat16, torch.float16, torch.float32])
    weights = made("small blocks", [64], 128, 3, "dynamic", "cuda")
    rows = torch.randn(5, 128, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([2, 2, 5], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights.grouped(rows, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
