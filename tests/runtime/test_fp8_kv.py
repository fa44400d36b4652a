"""KV in fp8: the contents of the pool, the result of attention, and the scales of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.quantization import KV_BYTES  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.page_bytes import page_bytes_of  # noqa: E402
from lockstep.runtime.quantized.fp8 import to_fp8  # noqa: E402
from lockstep.runtime.quantized.fp8_format import FP8  # noqa: E402
from tests.runtime.test_models import some_tokens  # noqa: E402
from tests.runtime.test_quantized import QWEN3, folder_of  # noqa: E402
from tests.support.model_passes import Passes  # noqa: E402

TOLERANCE = 0.15
"""Of logits, relative to the largest. e4m3 errs by up to 1/16 of each key and value; this model has large ones."""


class Rounded(KvPool):
    """In float32, with numbers rounded as in fp8."""

    def write(self, layer: int, key: Any, value: Any, batch: Any) -> None:
        scales = (1 / 16, 1 / 16)
        super().write(layer, *(to_fp8(one / s).float() * s for one, s in zip((key, value), scales, strict=True)), batch)


class Fp8Passes(Passes):
    """Passes over a pool in fp8."""

    def __init__(self, model: Any, scales: list[tuple[float, float]] | None, kind: type[KvPool] = KvPool) -> None:
        super().__init__(model)
        old = self.pool
        sizes = (model.layers, old.pages, old.page_size, old.kv_heads, old.head_dim)
        self.pool = kind(*sizes, model.dtype, model.device, scales)
        self.attention = ReferenceAttention(self.pool, model.scale)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("fp8") / "model", QWEN3)


def test_what_lies_in_the_pool_is_what_was_written_rounded_to_fp8(folder: Path) -> None:
    pool = KvPool(2, 3, 4, 1, 8, torch.float32, torch.device("cpu"), [(1.0, 1.0), (0.5, 2.0)])
    passes = Passes(build_model(folder, torch.float32), rows=1)
    batch = passes.batch({0: some_tokens(5, 1)}, 1)
    batch.slots = torch.tensor([3, 4, 5, 9, 10])
    key, value = torch.randn(5, 1, 8) * 30, torch.randn(5, 1, 8)
    key[0, 0, 0] = 1e6
    for layer in range(2):
        pool.write(layer, key, value, batch)
        keys, values = pool.read(layer, torch.arange(3))
        key_scale, value_scale = pool.scales[layer]
        for found, written, scale in ((keys, key, key_scale), (values, value, value_scale)):
            expected = to_fp8(written / scale).float() * scale
            assert torch.equal(found[batch.slots], expected)
            assert found.abs().max() <= 448 * scale
        assert keys[[0, 1, 2, 6, 7, 8, 11]].abs().max() == 0
    assert pool.keys[0].dtype == FP8
    pool.release()
    pool.resume()
    assert pool.read(0, torch.arange(3))[0].abs().max() == 0


def test_logits_stay_within_what_fp8_rounds(folder: Path) -> None:
    model, prompt = build_model(folder, torch.float32), some_tokens(25, 9)
    plain, fp8 = Passes(model), Fp8Passes(model, [(1 / 16, 1 / 16)] * model.layers)
    expected = torch.cat([plain.run({1: prompt[:20]})[1], plain.run({1: prompt[20:]})[1]])
    found = torch.cat([fp8.run({1: prompt[:20]})[1], fp8.run({1: prompt[20:]})[1]])
    rounded = Fp8Passes(model, None, Rounded)
    same = torch.cat([rounded.run({1: prompt[:20]})[1], rounded.run({1: prompt[20:]})[1]])
    assert (found - same).abs().max() <= 1e-5 * same.abs().max()
    error = (found - expected).abs().max() / expected.abs().max()
    assert 1e-4 < error < TOLERANCE, f"{error:.4f}"
    chunks = Fp8Passes(model, [(1 / 16, 1 / 16)] * model.layers)
    cut = torch.cat([chunks.run({1: prompt[a:b]})[1] for a, b in ((0, 3), (3, 4), (4, 17), (17, 25))])
    assert (cut - found).abs().max() < 0.02 * found.abs().max()  # own tokens are read as other rows will read them


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_scales_of_a_checkpoint(names: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for layer, (key, value) in enumerate(((0.25, 0.5), (0.125, 1.5))):
        around = f"model.layers.{layer}.self_attn"
        tensors |= {f"{around}.{names[0]}": torch.tensor(key), f"{around}.{names[1]}": torch.tensor([value])}
    save_file(tensors, tmp_path / "model.safetensors")
    quantised = {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["model.layers"]}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | quantised))
    assert build_model(tmp_path, torch.float32).kv_scales is None
    model = build_model(tmp_path, torch.float32, kv_fp8=True)
    assert model.kv_scales == ((0.25, 0.5), (0.125, 1.5))
    assert build_model(folder, torch.float32, kv_fp8=True).kv_scales == ((1.0, 1.0),) * 2


def test_scales_that_are_none_are_named(folder: Path, tmp_path: Path) -> None:
    around = "model.layers.1.self_attn"
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{around}.k_scale": torch.tensor(-1.0), "model.layers.0.self_attn.v_scale": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    quantised = {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["model.layers"]}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | quantised))
    with pytest.raises(CheckpointError) as caught:
        build_model(tmp_path, torch.float32, kv_fp8=True)
    assert caught.value.problems == (
        "model.layers.0.self_attn.v_scale: expected [] BF16/F16/F32, found [3] F32",
        "layer 0 has a scale of keys or of values, but not of both",
        f"{around}.k_scale: a scale must be above 0, got -1",
        "layer 1 has a scale of keys or of values, but not of both",
    )


def test_a_page_takes_the_bytes_of_the_planners_table(folder: Path) -> None:
    model = build_model(folder, torch.bfloat16)
    fp8 = build_model(folder, torch.bfloat16, kv_fp8=True)
    numbers = 16 * 2 * model.layers * model.kv_heads * model.head_dim
    assert (page_bytes_of(model, 16), page_bytes_of(fp8, 16)) == (numbers * KV_BYTES["bf16"], numbers * KV_BYTES["fp8"])


def test_an_unknown_dtype_of_kv_is_refused() -> None:
    from lockstep.runtime.llm import LLM

    with pytest.raises(ConfigError, match="`kv_cache_dtype` must be auto or fp8_e4m3, got `fp8_e5m2`"):
        LLM(kv_cache_dtype="fp8_e5m2")
