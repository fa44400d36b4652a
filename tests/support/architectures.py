"""Small random models of many architectures: greedy answers of transformers, and those of the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.core.contract.events import RequestRetracted
from lockstep.runtime import LLM, Params

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # so that a wrong weight or position shows
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, **ROUTED}
WINDOW = {"sliding_window": 9}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 16}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Apertus": ("ApertusConfig", {}),
    "Arcee": ("ArceeConfig", {}),
    "BitNet": ("BitNetConfig", {}),
    "Cohere": ("CohereConfig", {}),
    "Cohere 2": ("Cohere2Config", {"num_hidden_layers": 4, **WINDOW}),
    "Cwm": ("CwmConfig", {"num_hidden_layers": 4, **WINDOW}),
    "DeepSeek-V2": ("DeepseekV2Config", LATENT),
    "DeepSeek-V3": ("DeepseekV3Config", LATENT),
    "dots.llm1": ("Dots1Config", ROUTED),
    "ERNIE 4.5": ("Ernie4_5Config", {}),
    "ERNIE 4.5 MoE": ("Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "EXAONE 4": ("Exaone4Config", {"num_hidden_layers": 4, **WINDOW}),
    "FlexOlmo": ("FlexOlmoConfig", EXPERTS),
    "Gemma": ("GemmaConfig", {"head_dim": 8}),
    "Gemma 2": ("Gemma2Config", {"num_hidden_layers": 4, **GEMMA, **WINDOW}),
    "Gemma 3": ("Gemma3TextConfig", {"num_hidden_layers": 7, **GEMMA, **WINDOW}),
    "GLM-4 (2024)": ("GlmConfig", {"head_dim": 8}),
    "GLM-4 (2025)": ("Glm4Config", {"head_dim": 8}),
    "GLM-4.5": ("Glm4MoeConfig", {"head_dim": 8, **ROUTED}),
    "GPT-2": ("GPT2Config", {}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 8, **WINDOW, **EXPERTS}),
    "Granite": ("GraniteConfig", {}),
    "Granite MoE": ("GraniteMoeConfig", EXPERTS),
    "Llama": ("LlamaConfig", {}),
    "MiniMax-M2": ("MiniMaxM2Config", EXPERTS),
    "Ministral 3": ("Ministral3Config", {}),
    "Mistral": ("MistralConfig", WINDOW),
    "Mixtral": ("MixtralConfig", EXPERTS),
    "NanoChat": ("NanoChatConfig", {}),
    "Nemotron": ("NemotronConfig", {}),
    "OLMo": ("OlmoConfig", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", {"num_hidden_layers": 4, **WINDOW}),
    "OLMoE": ("OlmoeConfig", EXPERTS),
    "OPT": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Persimmon": ("PersimmonConfig", {}),
    "Phi-2": ("PhiConfig", {}),
    "Phi-3": ("Phi3Config", WINDOW),
    "Phi-3.5 MoE": ("PhimoeConfig", EXPERTS),
    "Qwen2 with windows": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "Qwen2 MoE": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 24, **EXPERTS}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3 MoE": ("Qwen3MoeConfig", EXPERTS),
    "Seed-OSS": ("SeedOssConfig", {}),
    "SmolLM3": ("SmolLM3Config", {}),
    "Solar Open": ("SolarOpenConfig", {"head_dim": 8, **ROUTED}),
    "StableLM": ("StableLmConfig", {}),
    "StarCoder": ("GPTBigCodeConfig", {}),
    "StarCoder 2": ("Starcoder2Config", WINDOW),
}
"""By name: the class of transformers' config, and what is special in the settings."""

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"head_dim": 16, "num_hidden_layers": 4, "shared_expert_intermediate_size": 24, **EXPERTS}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bamba": ("BambaConfig", {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA}),
    "Falcon-H1": ("FalconH1Config", {"mamba_d_ssm": 64, "head_dim": 8, **MAMBA}),
    "Granite 4 (hybrid)": (
        "GraniteMoeHybridConfig",
        {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], **MAMBA, **EXPERTS},
    ),
    "Jamba": (
        "JambaConfig",
        {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, **EXPERTS},
    ),
    "LFM2": ("Lfm2Config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "LFM2 MoE": (
        "Lfm2MoeConfig",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, **EXPERTS},
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M-M*-", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
            "n_groups": 1, "chunk_size": 16, "head_dim": 8,
        },
    ),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5 MoE": ("Qwen3_5MoeTextConfig", DELTA),
}  # fmt: skip
"""Architectures with layers that keep a state."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "BLOOM": ("BloomConfig", {}),
    "DiffLlama": ("DiffLlamaConfig", {}),
    "Falcon": ("FalconConfig", {}),
    "Falcon-Mamba": ("FalconMambaConfig", {}),
    "Gemma 3 with pictures": ("Gemma3Config", {}),
    "GPT-J": ("GPTJConfig", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 128}),
    "Llama 4": ("Llama4TextConfig", {}),
    "Llama with dynamic positions": ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "Mamba": ("MambaConfig", {}),
    "MPT": ("MptConfig", {}),
    "OLMo hybrid": ("OlmoHybridConfig", DELTA),
    "RecurrentGemma": ("RecurrentGemmaConfig", {}),
    "T5": ("T5Config", {}),
}
"""Architectures that cannot run by transformers' code here; each with its reason."""

TRACK_INTERVAL = 8
"""Tokens between two checkpoints of a state: fewer than prompts begin alike."""
WINDOW_SHARE = 0.35
"""Window pages as a share of the others: fewer than the prompts have, so that pages of windows are released."""
REQUESTS = 24
CHUNK = 32
STIRRED: dict[str, Any] = {
    "page_size": 4, "pages": 140, "chunked_prefill_size": CHUNK, "max_running_requests": 12, "retract_every": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine answered, and what happened meanwhile."""

    answers: list[list[int]]
    cached_tokens: int
    retractions: int
    attention: str


def save_architecture(folder: Path, name: str, **settings: Any) -> Any:
    """Save a small random model in a folder, and return it. `settings` replace those of the table."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    config_class, special = (ARCHITECTURES | HYBRIDS)[name]
    config = getattr(transformers, config_class)(**(SMALL | special | settings))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # which start at 0 or 1, where a mistake would hide
            if "bias" in parameter_name or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def mixed_prompts() -> list[tuple[list[int], int]]:
    """Prompts of 1 to 70 tokens that begin alike, in groups, and numbers of tokens to draw."""
    rng, vocabulary = random.Random(11), int(SMALL["vocab_size"])
    beginnings = [[rng.randrange(3, vocabulary) for _ in range(length)] for length in (0, 9, 26, 48)]
    return [
        (
            beginnings[number % 4] + [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 23))],
            rng.randrange(4, 15),
        )
        for number in range(REQUESTS)
    ]


def greedy_answers(model: Any, requests: Sequence[tuple[list[int], int]] | None = None) -> list[list[int]]:
    """Return the answers of transformers' `generate`, one at a time, to prompts with numbers of tokens to draw.

    Without `requests` to `mixed_prompts`.
    """
    answers = []
    for prompt, count in mixed_prompts() if requests is None else requests:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        answers.append(said[0, len(prompt) :].tolist())
    return answers


def serve(folder: Path, **options: Any) -> Served:
    """Answer the prompts by an engine with chunks, cached prefixes, retractions and the canary."""
    decided: list[Any] = []
    settings: Mapping[str, Any] = {**STIRRED, "debug": True, **options}
    prompts, counts = zip(*mixed_prompts(), strict=True)
    with LLM(folder, **settings) as llm:
        llm.host.observe = lambda _, step: decided.extend(step.decided)
        answers = llm.generate(prompts, [Params(max_new_tokens=count) for count in counts])
        attention = llm.attention_backend
    return Served(
        [answer.token_ids for answer in answers],
        sum(answer.cached_tokens for answer in answers),
        sum(isinstance(one, RequestRetracted) for one in decided),
        attention,
    )
