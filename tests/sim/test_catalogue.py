"""The catalogue: every derived figure is exact, every refusal names its field, every number has a source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.sim.catalogue import CatalogueError, gpu_names, load_gpu, load_model, model_names
from lockstep.sim.cost import CapacityError
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.cost.models import ModelSpec
from lockstep.sim.cost.roofline import roofline_model

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 10,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture
def published_models() -> Path:
    """Configs with parameter counts computed independently of this code."""
    data = os.environ.get("LOCKSTEP_DATA")
    if not data or not (Path(data) / "models").is_dir():
        pytest.skip("LOCKSTEP_DATA is not set or has no models/: derived figures not compared")
    return Path(data) / "models"


def write_config(folder: Path, **changes: Any) -> str:
    config = {**TINY, **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return str(path)


def test_a_tiny_model_counts_by_hand(tmp_path: Path) -> None:
    model = load_model(write_config(tmp_path))
    attention = 8 * (8 + 2 * 4) + 8 * 8  # qkv and o; head_dim is 8 / 4 = 2
    layer = attention + 3 * 8 * 16 + 2 * 8
    assert model.params == 2 * 10 * 8 + 3 * layer + 8
    assert model.kv_bytes_per_token() == 3 * 2 * 2 * 2 * 2  # layers, K and V, KV heads, head_dim, bf16
    assert model.weights_bytes() == 2 * model.params
    assert model.flops_per_token == 2 * (3 * (attention + 3 * 8 * 16) + 8 * 10)


def test_derived_figures_of_published_models_are_exact(published_models: Path) -> None:
    compared = 0
    for path in sorted(published_models.glob("*.json")):
        derived = json.loads(path.read_text())["_derived"]
        if "params_total_computed" not in derived:
            continue
        for model in (load_model(str(path)), load_model(path.stem)):
            assert model.params == derived["params_total_computed"], path.stem
            assert model.active_params == derived.get("params_active_per_token_computed", model.params), path.stem
            assert model.kv_bytes_per_token() == derived["kv_bytes_per_token_bf16"], path.stem
            state = derived.get("gdn_state_bytes_per_sequence(fp32 recurrent + bf16 conv)", 0)
            assert model.state_bytes_per_request() == state, path.stem
        compared += 1
    assert compared >= 27


def test_a_model_with_sparse_attention_keeps_index_keys_and_decodes_long_contexts_faster(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "v_head_dim": 128, "num_hidden_layers": 8}
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_shared_experts": 1}
    dense = load_model(write_config(tmp_path, model_type="deepseek_v3", **latent, **sizes, **experts))
    index = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    sparse = load_model(write_config(tmp_path, model_type="deepseek_v32", **latent, **sizes, **experts, **index))
    assert sparse.kv_bytes_per_token() == dense.kv_bytes_per_token() + 8 * 128  # one byte per value of the keys
    assert sparse.params - dense.params == 8 * (1536 * 64 * 128 + 4096 * (128 + 64) + 2 * 128)

    def decode_us(model: ModelSpec, context: int) -> float:
        rows = 16
        shape = BatchShape(decode_rows=rows, decode_context_tokens=rows * context, sampled_rows=rows)
        return roofline_model(model, load_gpu("h200")).terms_us(shape)["attention_decode"]

    assert decode_us(sparse, 100_000) < 0.6 * decode_us(dense, 100_000)
    assert decode_us(sparse, 1_000) >= decode_us(dense, 1_000)  # below `index_topk` the indexer is only more work


def test_published_sparse_attention_is_read(published_models: Path) -> None:
    model = load_model(str(published_models / "deepseek-v3.2.json"))
    assert model.kv_bytes_per_token() == 78_080  # kvcache-ai's figure with the keys of the indexer in fp8
    assert model.params == pytest.approx(671.9e9, rel=1e-3)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt_fp4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ],
)
def test_nvfp4_checkpoints_of_dense_models_are_read(tmp_path: Path, quantization: dict[str, str]) -> None:
    model = load_model(write_config(tmp_path, quantization_config=quantization))
    assert model.checkpoint_dtype == "nvfp4"
    assert model.weights_bytes() < 0.6 * model.weights_bytes("bf16")


def test_layers_of_one_mixer_each_are_counted_by_their_pattern(tmp_path: Path) -> None:
    """Nemotron-H: M is Mamba-2, * attention, - a feed-forward, E experts."""
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4}
    path = write_config(
        tmp_path, model_type="nemotron_h", hybrid_override_pattern="M-M*-M-", num_hidden_layers=7, head_dim=2, **mamba
    )
    model = load_model(path)
    assert (model.linear_layers, model.full_layers, model.dense_layers, model.moe_layers) == (3, 1, 3, 0)
    assert any("Mamba-2" in note for note in model.notes)
    assert model.state_bytes_per_request() == 3 * (4 * 4 * 4 * 8 + 2 * 3 * (16 + 2 * 2 * 8))


def test_chunked_attention_is_a_window_and_says_so(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
    path = write_config(
        tmp_path, model_type="llama4_text", num_hidden_layers=8, attention_chunk_size=64, head_dim=2, **experts
    )
    model = load_model(path)
    assert (model.full_layers, model.sliding_layers) == (2, 6)
    assert any("chunked attention" in note for note in model.notes)


@pytest.mark.parametrize("name", model_names())
def test_every_catalogue_model_loads_with_a_source(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    assert model.layers == model.dense_layers + model.moe_layers
    assert 0 < model.active_params <= model.params


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_number_has_a_source(name: str) -> None:
    gpu = load_gpu(name)
    for constants in (gpu.datasheet, gpu.measured, gpu.usd_per_gpu_hour):
        for field, constant in constants.items():
            assert not constant.source.startswith("catalogue GPU"), f"{name} {field} has no source"
    assert gpu.memory_bytes > 1.5e10


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
    ],
)
def test_hugging_face_names_find_the_model(alias: str, name: str) -> None:
    assert load_model(alias).name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h200", "H200-SXM"),
        ("H200-SXM", "H200-SXM"),
        ("NVIDIA H100", "H100-SXM"),
        ("a100", "A100-80G-SXM"),
        ("l40s", "L40S"),
        ("rtx4090", "RTX4090"),
        ("GeForce RTX_4090", "RTX4090"),
    ],
)
def test_gpu_aliases_ignore_case(alias: str, name: str) -> None:
    assert load_gpu(alias).name == name


@pytest.mark.parametrize("given", ["2xh100", "h100x2", "2 x h100", "h100 x2"])
def test_a_number_of_gpus_in_a_name_is_told_the_option(given: str) -> None:
    with pytest.raises(CatalogueError, match="for an engine on 2 of them `h100` with --tp 2"):
        load_gpu(given)


def test_unknown_names_report_what_is_known_and_what_is_close() -> None:
    with pytest.raises(CatalogueError, match=r"known: .*qwen3-8b") as caught:
        load_model("qwen3-9b")
    assert "did you mean `qwen3-8b`" in str(caught.value) or "did you mean `qwen3-4b`" in str(caught.value)
    assert "config.json" in str(caught.value)
    with pytest.raises(CatalogueError, match="did you mean `H100-SXM`"):
        load_gpu("h100-sxm4")
    with pytest.raises(CatalogueError, match="no such file"):
        load_model("./nowhere/config.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "4096", "`hidden_size` must be a whole number of at least 1, got `4096`"),
        ("num_hidden_layers", 0, "`num_hidden_layers` must be .* got `0`"),
        ("num_hidden_layers", True, "`num_hidden_layers` must be .* got `True`"),
        ("vocab_size", ..., "`vocab_size` must be .* got `nothing`"),
        ("num_key_value_heads", 3, "`num_key_value_heads` must be a divisor of `num_attention_heads` 4"),
        ("tie_word_embeddings", "no", "`tie_word_embeddings` must be true or false"),
        ("model_type", "mamba2", "`model_type` `mamba2` is not modelled"),
        ("num_kv_shared_layers", 4, "`num_kv_shared_layers` 4"),
        ("sliding_window", 4096, "`sliding_window` 4096 without `layer_types`"),
        ("layer_types", ["full_attention"], "`layer_types` must be a list of 3 kinds"),
        ("layer_types", ["mamba"] * 3, "`layer_types` `mamba`"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "`quantization_config.quant_method` `bitsandbytes`"),
        ("quantization_config", {"quant_method": "gptq", "bits": 8}, "`quantization_config.bits` `8` of gptq"),
        ("rope_scaling", {"rope_type": "new"}, "`rope_scaling.rope_type` `new`"),
        ("rope_scaling", {"rope_type": "yarn", "factor": "4"}, "`rope_scaling.factor` must be a number"),
        ("torch_dtype", "int8", "`torch_dtype` must be one of"),
    ],
)
def test_a_malformed_config_names_field_and_value(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = write_config(tmp_path, **{field: value})
    with pytest.raises(CatalogueError, match=message):
        load_model(path)


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(CatalogueError, match="not readable as JSON"):
        load_model(str(tmp_path))
    path.write_text("[]")
    with pytest.raises(CatalogueError, match="expected a JSON object"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}, 384),
        ({"rope_type": "linear", "factor": 2.0}, 256),
    ],
)
def test_context_follows_the_rope_scaling_conventions(tmp_path: Path, scaling: Any, tokens: int) -> None:
    assert load_model(write_config(tmp_path, rope_scaling=scaling)).context_tokens_max == tokens


def test_ranks_share_the_weights_and_replicate_scarce_kv_heads() -> None:
    model = load_model("qwen3-30b-a3b")  # 4 KV heads
    assert model.weights_bytes(tp=2) == pytest.approx(model.weights_bytes() / 2, rel=0.01)
    assert model.kv_bytes_per_token(tp=4) == model.kv_bytes_per_token() // 4
    assert model.kv_bytes_per_token(tp=8) == model.kv_bytes_per_token(tp=4)
    latent = load_model("deepseek-v3")
    assert latent.kv_bytes_per_token(tp=8) == latent.kv_bytes_per_token()
    with pytest.raises(CapacityError, match="tp 3 does not divide `num_attention_heads` 32"):
        model.weights_bytes(tp=3)


def test_checkpoint_dtype_sets_the_weight_bytes() -> None:
    assert load_model("deepseek-v3").weights_bytes() == pytest.approx(671.0e9, rel=0.01)
    assert load_model("gpt-oss-120b").weights_bytes() == pytest.approx(65e9, rel=0.03)  # the checkpoint is 65 GB
    assert load_model("llama-3.1-8b").weights_bytes("fp8") == pytest.approx(9.08e9, rel=0.01)
    assert load_model("llama-3.1-8b").weights_bytes("int4") == pytest.approx(5.73e9, rel=0.01)  # AWQ checkpoints
    with pytest.raises(
        CatalogueError, match="`weights_dtype` must be one of bf16, fp8, mxfp4, nvfp4, int4, got `int3`"
    ):
        load_model("qwen3-8b").weights_bytes("int3")  # type: ignore[arg-type]


def test_a_gpu_can_be_a_file(tmp_path: Path) -> None:
    sheet = {"bf16_tflops": 100, "memory_bytes": 2**35, "memory_gbs": 1000, "pcie_gbs": 32, "scale_up_gpus": 1}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "datasheet": sheet}))
    assert load_gpu(str(path)).memory_gbs == 1000
    path.write_text(json.dumps({"name": "mine", "datasheet": {**sheet, "memory_gbs": "fast"}}))
    with pytest.raises(CatalogueError, match=r"`datasheet\.memory_gbs` must be a number above 0, got `fast`"):
        load_gpu(str(path))
    path.write_text(json.dumps({"name": "mine", "datasheet": sheet, "measured": {"speed": 1}}))
    with pytest.raises(CatalogueError, match=r"`measured\.speed` is not a rate"):
        load_gpu(str(path))
