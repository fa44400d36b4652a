"""Folders of the Hugging Face layout: what is read, what is refused, and that one error reports all problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime.checkpoint import (  # noqa: E402
    Checkpoint,
    CheckpointError,
    TensorSpec,
    TensorSplit,
    fill_randomly,
    load,
)
from lockstep.runtime.models import build_model  # noqa: E402

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "dtype": "float32",
}


def tensors_of(config: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    return {tensor.name: tensor.into.clone() for tensor in build_model(config, random_weights_seed=seed).tensors()}


def write(folder: Path, tensors: dict[str, Any], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(tensors)
    files = {f"model-0000{part + 1}-of-00003.safetensors": names[part::3] for part in range(3)}
    for file, held in files.items():
        safetensors_torch.save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def same(model: Any, tensors: dict[str, Any]) -> bool:
    return all(torch.equal(tensor.into, tensors[tensor.name].to(tensor.into.dtype)) for tensor in model.tensors())


def refusal(folder: Path, **settings: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        build_model(folder, torch.float32, **settings)
    assert str(folder) in str(caught.value)
    assert isinstance(caught.value, ConfigError)
    return caught.value


def test_one_file_and_several_give_the_same_model(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    assert same(build_model(write(tmp_path / "one", tensors)), tensors)
    assert same(build_model(write_sharded(tmp_path / "three", tensors)), tensors)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_each_dtype_loads_as_each(stored: Any, wanted: Any, tmp_path: Path) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(CONFIG).items()}
    model = build_model(write(tmp_path, tensors), wanted)
    assert model.embeddings.weight.dtype == wanted
    assert same(model, tensors)


def test_the_dtype_of_the_config_is_the_default(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    assert build_model(write(tmp_path, tensors, CONFIG | {"dtype": "bfloat16"})).dtype == torch.bfloat16
    older = {name: value for name, value in CONFIG.items() if name != "dtype"} | {"torch_dtype": "float16"}
    assert build_model(write(tmp_path, tensors, older)).dtype == torch.float16


def test_all_wrong_tensors_are_in_one_error_and_nothing_is_read(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 9)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(4, 8, dtype=torch.int8)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(12, 8, dtype=torch.bfloat16)
    error = refusal(write(tmp_path, tensors))
    any_float = "BF16/F16/F32"
    assert sorted(error.problems) == [
        f"model.layers.0.self_attn.k_proj.weight: expected [4, 8] {any_float}, found [4, 8] I8",
        f"model.layers.0.self_attn.q_proj.weight: expected [8, 8] {any_float}, found [8, 9] F32",
        f"model.layers.1.mlp.up_proj.weight: missing, expected [12, 8] {any_float}",
        "model.layers.2.mlp.up_proj.weight: not a tensor of this model, found [12, 8] BF16",
        f"model.norm.weight: missing, expected [8] {any_float}",
    ]
    assert all(problem in str(error) for problem in error.problems)
    assert "cannot be loaded, 5 problems:" in str(error)


def test_very_many_problems_are_counted_in_the_text_and_kept_in_the_error(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    error = refusal(write(tmp_path, tensors | {f"stray.{number}": torch.zeros(1) for number in range(250)}))
    assert len(error.problems) == 250
    assert "and 50 more" in str(error)


def test_a_tied_head_is_not_wanted_and_not_in_the_way(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = tensors_of(config)
    assert "lm_head.weight" not in tensors
    extra = {"lm_head.weight": torch.zeros(13, 8), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    model = build_model(write(tmp_path, tensors | extra, config))
    assert model.head is model.embeddings
    assert same(model, tensors)
    assert "lm_head.weight: missing" in refusal(write(tmp_path, tensors, CONFIG)).problems[0]


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (tmp_path / name).write_bytes(b"\x80\x04N.")
    error = refusal(tmp_path)
    assert len(error.problems) == 2
    assert "is a pickle, which may run code when it is read" in error.problems[0]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: "),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold a JSON object, got list"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: cut(folder / "model.safetensors", 100), "model.safetensors: "),
        (lambda folder: cut(folder / "model.safetensors", 4), "model.safetensors: "),
    ],
)
def test_broken_folders(break_it: Any, says: str, tmp_path: Path) -> None:
    folder = write(tmp_path, tensors_of(CONFIG))
    break_it(folder)
    error = refusal(folder)
    assert len(error.problems) == 1
    assert says in error.problems[0]


def test_no_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").problems == ("there is no such folder",)


def test_what_is_wrong_with_the_files_of_an_index_is_reported_at_once(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    folder = write_sharded(tmp_path, tensors)
    (folder / "model-00001-of-00003.safetensors").unlink()
    cut(folder / "model-00002-of-00003.safetensors", 50)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"a": "../elsewhere.safetensors", "b": "model-00003-of-00003.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    problems = "\n".join(refusal(folder).problems)
    assert "names `../elsewhere.safetensors`, which is not a file of this folder" in problems
    assert "model-00001-of-00003.safetensors is missing, with 9 tensors" in problems
    assert "model-00002-of-00003.safetensors: " in problems
    assert "b: model.safetensors.index.json says it is in model-00003-of-00003.safetensors, which lacks it" in problems


def test_an_index_without_a_map(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, tensors_of(CONFIG))
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "no `weight_map`" in refusal(folder).problems[0]


def test_values_that_float16_cannot_hold_are_named(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["model.norm.weight"][3] = 70_000.0
    folder = write(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        build_model(folder, torch.float16)
    (problem,) = caught.value.problems
    assert problem.startswith("model.norm.weight: holds values above 65,504")


def test_random_weights_read_only_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert same(build_model(tmp_path, random_weights_seed=4), tensors_of(CONFIG, seed=4))


# -------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("split", "total", "ranks", "parts"),
    [
        (TensorSplit(), 10, 2, [(0, 10), (0, 10)]),
        (TensorSplit(0, 4), 12, 2, [(0, 6), (6, 12)]),
        (TensorSplit(1, 4), 12, 4, [(0, 3), (3, 6), (6, 9), (9, 12)]),
        (TensorSplit(0, 2, replicate=True), 8, 4, [(0, 4), (0, 4), (4, 8), (4, 8)]),
        (TensorSplit(0, None), 10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (TensorSplit(0, None), 5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    ],
)
def test_parts_of_ranks(split: TensorSplit, total: int, ranks: int, parts: list[tuple[int, int]]) -> None:
    found = [split.shard(total, rank, ranks) for rank in range(ranks)]
    assert [(part.start, part.stop) for part in found] == parts


@pytest.mark.parametrize(
    ("split", "ranks"), [(TensorSplit(0, 4), 3), (TensorSplit(0, 4), 8), (TensorSplit(0, 2, replicate=True), 3)]
)
def test_units_that_ranks_cannot_share(split: TensorSplit, ranks: int) -> None:
    with pytest.raises(ConfigError, match="cannot be split"):
        split.shard(24, 0, ranks)


def test_a_rank_reads_its_part_and_pads_with_zeros(tmp_path: Path) -> None:
    stored = torch.arange(30.0).view(5, 6)
    write(tmp_path, {name: stored.clone() for name in ("rows", "columns", "all")})
    for rank in range(2):
        rows, columns, whole = torch.full((3, 6), 9.0), torch.full((5, 3), 9.0), torch.full((5, 6), 9.0)
        wanted = [
            TensorSpec("rows", (5, 6), rows, TensorSplit(0, None)),
            TensorSpec("columns", (5, 6), columns, TensorSplit(1, 2)),
            TensorSpec("all", (5, 6), whole),
        ]
        with Checkpoint(tmp_path) as checkpoint:
            load(wanted, checkpoint, rank=rank, ranks=2)
        assert torch.equal(rows, torch.cat([stored, torch.zeros(1, 6)])[rank * 3 : rank * 3 + 3])
        assert torch.equal(columns, stored[:, rank * 3 : rank * 3 + 3])
        assert torch.equal(whole, stored)
        drawn = torch.full((3, 6), 9.0)
        fill_randomly([TensorSpec("rows", (5, 6), drawn, TensorSplit(0, None))], 1, rank=rank, ranks=2)
        assert (drawn[2] == 0).all().item() == (rank == 1)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
