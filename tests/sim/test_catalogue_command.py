"""`lockstep catalogue`: lists, details, comparisons, JSON, and files of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.sim.catalogue import engine_names, gpu_names, load_gpu, load_model, model_names
from lockstep.sim.cli.catalogue import catalogue
from lockstep.sim.cli.simulate import simulate


def run(*args: str) -> Result:
    return CliRunner().invoke(catalogue, list(args))


def found(*args: str) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("what", "names"), [("models", model_names()), ("gpus", gpu_names()), ("engines", engine_names())]
)
def test_every_entry_is_listed(what: str, names: tuple[str, ...]) -> None:
    assert [one["name"] for one in found(what)[what]] == list(names)
    assert all(name in run(what).stdout for name in names)


def test_words_select_by_their_letters_and_names_are_found_under_their_public_names() -> None:
    assert {one["name"] for one in found("models", "qwen3-vl")["models"]} == {
        name for name in model_names() if name.startswith("qwen3-vl")
    }
    assert [one["name"] for one in found("models", "Qwen/Qwen3-8B")["models"]] == ["qwen3-8b"]
    assert [one["name"] for one in found("gpus", "h100")["gpus"]] == ["H100-SXM"]


def test_models_are_compared_with_the_room_on_each_card() -> None:
    one, other = found("models", "qwen3-8b", "deepseek-v3", "--gpus", "h200,l4")["models"]
    assert one["kv_bytes_per_token"]["bf16"] == load_model("qwen3-8b").kv_bytes_per_token()
    room = {row["gpu"]: row for row in other["room"]}
    assert room["H200-SXM"]["tp"] == 8
    assert room["L4"]["tp"] is None
    assert "does not fit" in room["L4"]["why"]
    text = run("models", "qwen3-8b", "deepseek-v3", "--gpus", "h200,l4").stdout
    assert "grouped-query attention: 32 heads, 8 of KV" in text
    assert "too large" in text


def test_a_config_file_is_shown_with_what_it_is_modelled_as(tmp_path: Path) -> None:
    config = {
        "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8, "vocab_size": 100,
        "max_position_embeddings": 4096, "attention_chunk_size": 128, "num_local_experts": 4, "num_experts_per_tok": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = run("models", str(tmp_path)).stdout
    assert "read as llama4" in text
    assert "chunked attention is a sliding window" in text
    result = CliRunner().invoke(
        simulate,
        ["--model", str(tmp_path), "--gpu", "h100", "--workload", "gen:n=5,input=fixed:20", "--engine", "none"],
    )
    assert result.exit_code == 0, result.output
    assert "chunked attention is a sliding window" in result.output


def test_a_card_is_printed_as_a_file_that_can_be_edited_and_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert run("gpus", "h100", "-o", str(path)).exit_code == 0
    assert "exists" in run("gpus", "h100", "-o", str(path)).output
    entry = json.loads(path.read_text())
    entry["name"], entry["aliases"] = "mine", []
    entry["datasheet"]["memory_bytes"] *= 2
    path.write_text(json.dumps(entry))
    assert load_gpu(str(path)).memory_bytes == 2 * load_gpu("h100").memory_bytes
    text = run("gpus", str(path), "h100").stdout
    assert "mine" in text
    assert "datasheet.memory_gbs = 3350" in text


def test_cards_without_measurements_say_so() -> None:
    basis = {one["name"]: one["basis"] for one in found("gpus")["gpus"]}
    assert {basis[name] for name in ("L4", "MI355X", "B300-SXM", "GB300-NVL72", "TPU-v6e")} == {"public figures"}
    assert basis["H100-SXM"] == "measured"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_an_engine_has_a_card_for_each_usual_gpu(engine: str) -> None:
    """The card of a GPU without a measured point begins with that fact."""
    (one,) = found("engines", engine)["engines"]
    cards = {card["gpu"]: card for card in one["gpus"]}
    measured = {pair["gpu"] for pair in one["fitted"]}
    text = run("engines", engine).stdout
    for name in ("a100", "h100", "h200", "b200", "l40s", "rtx4090"):
        card = cards[load_gpu(name).name]
        assert card["fitted_on"].startswith("no point") == (card["gpu"] not in measured)
        assert f"{card['gpu']}: {card['fitted_on']}" in text
        assert card["not_for"] in text


def test_unknown_names_and_bad_files_are_refused_with_what_is_known(tmp_path: Path) -> None:
    result = run("models", "no-such-model")
    assert result.exit_code == 2
    assert "known:" in result.output
    path = tmp_path / "bad.json"
    path.write_text("{}")
    result = run("gpus", str(path))
    assert result.exit_code != 0
    assert "`name` must be a text" in result.output
    assert "--out writes one GPU, got 2" in run("gpus", "h100", "l4", "-o", str(tmp_path / "two.json")).output
