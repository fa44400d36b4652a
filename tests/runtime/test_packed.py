"""Packed matrices: equal products, and every change of the plain ones reaches them; the dtype of a CPU by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.runtime import LLM, Params, assembly  # noqa: E402
from lockstep.runtime.assembly import choose_dtype  # noqa: E402
from lockstep.runtime.demo_model import demo_model_folder  # noqa: E402
from lockstep.runtime.models import build_model, packed  # noqa: E402
from lockstep.runtime.models.packed import PackedMatrix, pack_matrices, packed_bytes, unpack_matrices  # noqa: E402
from lockstep.runtime.processor import multiplies_bfloat16  # noqa: E402

CPU = torch.device("cpu")
GREEDY = Params(max_new_tokens=16, ignore_eos=True)
PROMPTS = ["Returns the number of", "import "]
needs_bfloat16 = pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor has no products in bfloat16")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The demo model with other weights."""
    folder = tmp_path / "other"
    shutil.copytree(demo_model_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {
        name: (one.flip(0) if name.endswith("_proj.weight") else one).contiguous() for name, one in tensors.items()
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens(llm: LLM) -> list[Any]:
    return [list(one.token_ids) for one in llm.generate(PROMPTS, GREEDY)]


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 7, 32, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_that_of_the_plain_matrix(rows: int, bias: bool) -> None:
    torch.manual_seed(1)
    weight, hidden = torch.randn(100, 72).bfloat16(), torch.randn(rows, 72).bfloat16()
    added = torch.randn(100).bfloat16() if bias else None
    matrix = PackedMatrix(weight)
    plain = matrix.linear(hidden, added)
    assert matrix.bytes == 0
    matrix.pack()
    assert matrix.bytes == 100 * 72 * 2
    torch.testing.assert_close(matrix.linear(hidden, added), plain, atol=1e-2, rtol=1e-2)
    assert matrix.linear(hidden[:0], added).shape == (0, 100)
    matrix.unpack()
    assert torch.equal(matrix.linear(hidden, added), plain)


@needs_bfloat16
def test_matrices_of_layers_and_the_output_projection_are_packed() -> None:
    model = build_model(demo_model_folder(), torch.bfloat16)
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    assert pack_matrices(model) == packed_bytes(model) == 2 * matrices  # its embeddings are its output projection
    assert unpack_matrices(model)
    assert packed_bytes(model) == 0
    assert not unpack_matrices(model)
    assert pack_matrices(build_model(demo_model_folder(), torch.float32)) == 0


def test_without_memory_or_instructions_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(demo_model_folder(), torch.bfloat16)
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(packed, "free_bytes_of", lambda device: 1000)
    assert pack_matrices(model) == 0
    monkeypatch.setattr(packed, "free_bytes_of", lambda device: None)
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)
    assert pack_matrices(model) == 0


@needs_bfloat16
def test_new_weights_reach_the_packed_matrices(other: Path) -> None:
    with LLM(other, dtype="bfloat16") as llm:
        expected = tokens(llm)
    with LLM(dtype="bfloat16") as llm:
        assert packed_bytes(llm.model) > 0
        before = tokens(llm)
        llm.update_weights(other)
        assert tokens(llm) == expected != before
        llm.release_memory()
        assert packed_bytes(llm.model) == 0
        llm.resume_memory()
        assert packed_bytes(llm.model) > 0
        assert tokens(llm) == expected


@pytest.mark.parametrize(
    ("able", "bytes_least", "stored", "expected"),
    [
        (True, 1, "bfloat16", torch.bfloat16),
        (True, 1 << 40, "bfloat16", torch.float32),
        (False, 1, "bfloat16", torch.float32),
        (True, 1, "float32", torch.float32),
    ],
)
def test_auto_is_bfloat16_for_large_models_where_the_processor_has_it(
    able: bool, bytes_least: int, stored: str, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    monkeypatch.setattr(assembly, "multiplies_bfloat16", lambda: able)
    monkeypatch.setattr(assembly, "NARROW_BYTES", bytes_least)
    assert choose_dtype("auto", CPU, folder) == expected
    assert choose_dtype("float16", CPU, folder) == torch.float16
    assert choose_dtype("auto", torch.device("cuda", 0), folder) is None
