"""Configs of transformers' decoder models: parameters and KV bytes equal those that its own code allocates.

The models are built on the meta device, which allocates nothing. The configs are the defaults of their classes.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.sim.cost.families import FAMILIES, model_from_config

CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {}, "apertus": {}, "arcee": {}, "bamba": {"attn_layer_indices": [9, 18, 27]}, "bitnet": {},
    "bloom": {"seq_length": 2048, "hidden_size": 1024, "n_layer": 24, "n_head": 16}, "codegen": {}, "cohere": {},
    "cohere2": {}, "cwm": {}, "deepseek_v2": {"num_experts_per_tok": 6}, "deepseek_v3": {}, "deepseek_v32": {},
    "ernie4_5": {}, "ernie4_5_moe": {}, "exaone4": {}, "exaone_moe": {}, "falcon": {}, "flex_olmo": {}, "gemma": {},
    "gemma2": {}, "gemma3_text": {}, "glm": {}, "glm4": {}, "glm4_moe": {"head_dim": 128}, "glm4_moe_lite": {},
    "glm_moe_dsa": {}, "gpt2": {}, "gpt_bigcode": {}, "gpt_neo": {}, "gpt_neox": {}, "gpt_oss": {}, "gptj": {},
    "granite": {}, "granitemoe": {}, "granitemoehybrid": {}, "granitemoeshared": {}, "helium": {},
    "hunyuan_v1_dense": {"head_dim": 128}, "hyperclovax": {}, "internlm3": {}, "jais2": {}, "llama": {},
    "llama4_text": {}, "minicpm3": {}, "minimax_m2": {}, "ministral": {"head_dim": 128}, "ministral3": {},
    "mistral": {}, "mixtral": {}, "mpt": {}, "nanochat": {}, "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "nemotron_h": {}, "olmo": {}, "olmo2": {}, "olmo3": {}, "olmoe": {}, "opt": {}, "persimmon": {}, "phi": {},
    "phi3": {}, "phimoe": {}, "qwen2": {}, "qwen2_moe": {}, "qwen3": {}, "qwen3_5_moe_text": {}, "qwen3_5_text": {},
    "qwen3_moe": {}, "qwen3_next": {}, "seed_oss": {}, "smollm3": {}, "solar_open": {}, "stablelm": {},
    "starcoder2": {}, "vaultgemma": {}, "xglm": {}, "youtu": {},
}  # fmt: skip
"""Architectures, with the fields whose defaults transformers' own code cannot build."""

TOKENS = 8
NO_CACHE = ("bamba", "deepseek_v2", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid", "nemotron_h")
"""Architectures whose forward pass does not run on the meta device."""


def built(name: str) -> tuple[dict[str, Any], Any]:
    """Return the config of an architecture, and its model on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if name not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return config.to_dict(), model


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_kv_are_those_of_transformers(name: str) -> None:
    config, model = built(name)
    found = model_from_config({**config, "torch_dtype": "bfloat16"}, name, name)
    params = sum(weights.numel() for weights in model.parameters())
    assert found.params == pytest.approx(params, rel=1e-3)
    if name in NO_CACHE:
        return
    import torch

    with torch.no_grad():
        tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
        cache = model(input_ids=tokens, use_cache=True).past_key_values
    kept = (getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values"))
    assert found.kv_bytes_per_token() * TOKENS == sum(t.numel() * t.element_size() for t in kept if t is not None)


def test_at_least_forty_architectures_are_compared() -> None:
    assert len(CONFIGS) >= 40
    assert {name.removesuffix("_text") for name in CONFIGS} <= set(FAMILIES)
