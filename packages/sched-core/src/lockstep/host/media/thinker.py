"""The thinker in the config of a whole Qwen-Omni model: the part that takes media and answers in text.

    {"model_type": "qwen2_5_omni", "thinker_config": {...}, "talker_config": {...}, "token2wav_config": {...}}

The talker, which speaks the answer, and what makes its sound are not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""`model_type` of a whole model -> transformers' class of its thinker."""
OF_ALL = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""Fields of the whole model that hold for its thinker."""
SUFFIX = "_thinker"
STARTS = {"image": "vision_start_token_id", "audio": "audio_start_token_id", "video": "vision_start_token_id"}
"""Fields of a thinker's config: tokens in front of media, by which it counts positions along three axes."""
FRAMES_MASK = "feature_attention_mask"
"""Array of an audio clip, [1, frames]: which frames of its spectrum are no padding."""


def thinker_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a whole model's thinker, as a folder of the thinker has it; any other config as it is."""
    name, inner = THINKERS.get(str(config.get("model_type"))), config.get("thinker_config")
    if name is None or not isinstance(inner, Mapping):
        return config
    kept = {field: config[field] for field in OF_ALL if config.get(field) is not None}
    return {**inner, **kept, "architectures": [name], "model_type": f"{config['model_type']}{SUFFIX}"}


def is_thinker(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a thinker, by itself or in a whole model."""
    return str(thinker_of(config).get("model_type")).removesuffix(SUFFIX) in THINKERS
