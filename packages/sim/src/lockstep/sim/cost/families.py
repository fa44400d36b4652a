"""Reading a Hugging Face config.json: the families of architectures, and a ModelSpec from the fields of a config.

A field that changes the arithmetic and is not modelled is refused by name, because a wrong cost is not recognisable as
such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.host.quantization import INT4_BITS, INT4_GROUP, METHODS, WeightsDtype, read_weight_format
from lockstep.sim.cost.errors import CatalogueError
from lockstep.sim.cost.models import AttentionShape, ExpertShape, GatedDelta, LatentAttention, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that follow from `model_type`, because they are not fields of the config."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the value of `attention_bias`
    o_bias: bool | None = None
    norms_per_layer: int = 2
    tied_default: bool = False
    latent: bool = False
    gated: bool = False
    sinks: bool = False
    sliding: Literal["", "layer_types", "pattern", "all", "upper"] = ""
    delta: bool = False
    experts: str = ""  # the field with the number of experts; empty: dense
    expert_ffn: str = ""
    score_bias: bool = False


_QWEN3 = Family(qk_norm=True, sliding="upper")
_QWEN3_MOE = Family(qk_norm=True, sliding="upper", experts="num_experts", expert_ffn="moe_intermediate_size")
_QWEN2 = Family(qkv_bias=True, o_bias=False, sliding="upper")
_QWEN35 = Family(qk_norm=True, gated=True, delta=True)
_QWEN35_MOE = Family(qk_norm=True, gated=True, delta=True, experts="num_experts", expert_ffn="moe_intermediate_size")
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(sliding="all"),
    "mixtral": Family(sliding="all", experts="num_local_experts", expert_ffn="intermediate_size"),
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_audio": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN35_MOE,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "gemma3": Family(qk_norm=True, norms_per_layer=4, tied_default=True, sliding="pattern"),
    "gpt_oss": Family(
        qkv_bias=True, o_bias=True, sinks=True, sliding="layer_types",
        experts="num_local_experts", expert_ffn="intermediate_size",
    ),
    "minimax_m2": Family(
        qk_norm=True, experts="num_local_experts", expert_ffn="intermediate_size", score_bias=True,
    ),
    "deepseek_v3": Family(latent=True, experts="n_routed_experts", expert_ffn="moe_intermediate_size", score_bias=True),
}  # fmt: skip

# Fields that change the arithmetic and are not modelled.
REFUSED = {
    "index_topk": "sparse attention behind an indexer",
    "attention_chunk_size": "chunked local attention",
    "num_kv_shared_layers": "KV shared between layers",
    "hidden_size_per_layer_input": "per-layer embeddings",
}
TORCH_DTYPES = ("bfloat16", "float16", "float32")  # float32 checkpoints are served in bf16


@dataclass(frozen=True, slots=True)
class _ConfigFields:
    """Typed access to a config. Every error names the file, the field and the value."""

    where: str
    data: Mapping[str, Any]

    def complain(self, field: str, wanted: str) -> CatalogueError:
        value = self.data.get(field, "nothing")
        return CatalogueError(f"{self.where}: `{field}` must be {wanted}, got `{value}`")

    def whole(self, field: str, default: int | None = None, least: int = 1) -> int:
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.complain(field, f"a whole number of at least {least}")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.complain(field, "true or false")
        return value

    def table(self, field: str) -> Mapping[str, Any]:
        value = self.data.get(field)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.complain(field, "an object")
        return value


def model_from_config(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Build a ModelSpec from the fields of a Hugging Face config.json.

    Raises: CatalogueError naming the field and its value, for a malformed field or one that is not modelled.
    """
    if not isinstance(config, dict):
        raise CatalogueError(f"{where}: a config.json must be an object, got `{type(config).__name__}`")
    inner = _ConfigFields(where, config).table("text_config")
    f = _ConfigFields(where, {**config, **inner})  # fields of the language model inside a multimodal model come first
    for field, meaning in REFUSED.items():
        if f.data.get(field):
            raise CatalogueError(f"{where}: `{field}` {f.data[field]} ({meaning}) is not modelled")
    model_type = str(f.data.get("model_type", "nothing")).removesuffix("_text")
    if model_type not in FAMILIES:
        raise CatalogueError(
            f"{where}: `model_type` `{model_type}` is not modelled\nhint: one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    layers = f.whole("num_hidden_layers")
    sliding, linear = _layer_kinds(f, family, layers)
    window = f.whole("sliding_window") if sliding else 0
    moe_layers = _moe_layers(f, family, layers)
    return ModelSpec(
        name=name,
        source=str(config.get("_source", where)),
        model_type=model_type,
        hidden=f.whole("hidden_size"),
        vocab=f.whole("vocab_size"),
        tied_embedding=f.flag("tie_word_embeddings", family.tied_default),
        ffn=f.whole("intermediate_size") if moe_layers < layers else 0,
        dense_layers=layers - moe_layers,
        moe_layers=moe_layers,
        full_layers=layers - sliding - linear,
        sliding_layers=sliding,
        linear_layers=linear,
        attention=_latent(f) if family.latent else _attention(f, family, window),
        delta=_delta(f) if family.delta else None,
        experts=_experts(f, family) if moe_layers else None,
        norms_per_layer=family.norms_per_layer,
        checkpoint_dtype=_checkpoint_dtype(f),
        weights_only=_weights_only(f),
        context_tokens_max=_context_tokens_max(f, model_type),
    )


def _attention(f: _ConfigFields, family: Family, window: int) -> AttentionShape:
    heads = f.whole("num_attention_heads")
    if "head_dim" not in f.data and f.whole("hidden_size") % heads:
        raise f.complain("num_attention_heads", f"a divisor of `hidden_size` {f.whole('hidden_size')}")
    kv_heads = f.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise f.complain("num_key_value_heads", f"a divisor of `num_attention_heads` {heads}")
    bias = f.flag("attention_bias", False)
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.whole("head_dim", default=f.whole("hidden_size") // heads),
        qk_norm=family.qk_norm,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        gated=family.gated,
        sinks=family.sinks,
        window=window,
    )


def _latent(f: _ConfigFields) -> LatentAttention:
    return LatentAttention(
        heads=f.whole("num_attention_heads"),
        q_rank=f.whole("q_lora_rank", default=0, least=0),
        kv_rank=f.whole("kv_lora_rank"),
        nope_dim=f.whole("qk_nope_head_dim"),
        rope_dim=f.whole("qk_rope_head_dim"),
        value_dim=f.whole("v_head_dim"),
    )


def _delta(f: _ConfigFields) -> GatedDelta:
    return GatedDelta(
        key_heads=f.whole("linear_num_key_heads"),
        value_heads=f.whole("linear_num_value_heads"),
        key_dim=f.whole("linear_key_head_dim"),
        value_dim=f.whole("linear_value_head_dim"),
        conv_kernel=f.whole("linear_conv_kernel_dim"),
    )


def _experts(f: _ConfigFields, family: Family) -> ExpertShape:
    count, per_token = f.whole(family.experts), f.whole("num_experts_per_tok")
    if per_token > count:
        raise f.complain("num_experts_per_tok", f"at most `{family.experts}` {count}")
    ffn = f.whole(family.expert_ffn)
    return ExpertShape(
        count=count,
        per_token=per_token,
        ffn=ffn,
        shared_ffn=f.whole("shared_expert_intermediate_size", ffn * f.whole("n_shared_experts", 0, 0), 0),
        shared_gate=f.whole("shared_expert_intermediate_size", 0, 0) > 0,
        bias=family.sinks,  # gpt-oss, the one family with biases in router and experts
        score_bias=family.score_bias,
    )


def _moe_layers(f: _ConfigFields, family: Family, layers: int) -> int:
    """Return the number of layers with experts.

    Every n-th layer has experts (Qwen), without the first `first_k_dense_replace` (DeepSeek) and `mlp_only_layers`.
    """
    if not family.experts:
        return 0
    first = f.whole("first_k_dense_replace", 0, 0)
    step = f.whole("decoder_sparse_step", f.whole("moe_layer_freq", 1))
    listed = f.data.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise f.complain("mlp_only_layers", "a list of layer numbers")
    offset = 0 if "moe_layer_freq" in f.data else 1
    return sum(1 for i in range(first, layers) if i not in listed and (i + offset) % step == 0)


def _layer_kinds(f: _ConfigFields, family: Family, layers: int) -> tuple[int, int]:
    """Return the numbers of sliding-window layers and of linear-attention layers."""
    kinds = f.data.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention", "linear_attention")
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise f.complain("layer_types", f"a list of {layers} kinds, one per layer")
        for kind in kinds:
            if kind not in known:
                raise CatalogueError(f"{f.where}: `layer_types` `{kind}` is not modelled\nhint: {', '.join(known)}")
        linear = kinds.count("linear_attention")
        if linear and not family.delta:
            raise CatalogueError(f"{f.where}: `layer_types` linear_attention is not modelled for this model_type")
        return kinds.count("sliding_attention"), linear
    if family.delta:
        return 0, layers - layers // f.whole("full_attention_interval")
    if not f.data.get("sliding_window") or not f.flag("use_sliding_window", True):
        return 0, 0
    if family.sliding == "pattern":  # every n-th layer is full
        return layers - layers // f.whole("sliding_window_pattern"), 0
    if family.sliding == "upper":  # Qwen: the layers from max_window_layers on
        return max(0, layers - f.whole("max_window_layers", 0, 0)), 0
    if family.sliding == "all":
        return layers, 0
    raise CatalogueError(f"{f.where}: `sliding_window` {f.data['sliding_window']} without `layer_types`")


def _checkpoint_dtype(f: _ConfigFields) -> WeightsDtype:
    method = f.table("quantization_config").get("quant_method")
    if method is not None:
        if method not in METHODS:
            raise CatalogueError(
                f"{f.where}: `quantization_config.quant_method` `{method}` is not modelled\n"
                f"hint: {', '.join(METHODS)}, or remove the field and choose --weights-dtype"
            )
        if METHODS[method] == "int4":
            quantization = f.table("quantization_config")
            for field, modelled in (("bits", INT4_BITS), ("group_size", INT4_GROUP)):
                if quantization.get(field, modelled) != modelled:
                    raise CatalogueError(
                        f"{f.where}: `quantization_config.{field}` `{quantization[field]}` of {method} "
                        "is not modelled\n"
                        f"hint: {modelled} is; or remove the field and choose --weights-dtype"
                    )
        elif method in ("compressed-tensors", "modelopt"):  # these methods have formats besides fp8
            problems: list[str] = []
            read_weight_format(f.data, problems)
            if problems:
                raise CatalogueError(f"{f.where}: {problems[0]}\nhint: remove the field and choose --weights-dtype")
        return METHODS[method]
    dtype = f.data.get("torch_dtype") or f.data.get("dtype") or "bfloat16"
    if dtype not in TORCH_DTYPES:
        raise CatalogueError(f"{f.where}: `torch_dtype` must be one of {', '.join(TORCH_DTYPES)}, got `{dtype}`")
    return "bf16"


def _weights_only(f: _ConfigFields) -> bool:
    """Return whether an fp8 checkpoint declares no precision of activations, by the runtime's own reader."""
    stored = read_weight_format(f.data, [])
    return stored is not None and stored.layout == "fp8" and not stored.activations


def _context_tokens_max(f: _ConfigFields, model_type: str) -> int:
    """Return the longest context the config allows.

    `max_position_embeddings` already includes llama3 and longrope scaling, and Gemma 3's linear scaling. yarn scales
    `original_max_position_embeddings`; linear and dynamic scale `max_position_embeddings`. vLLM and SGLang do the same.
    """
    limit = f.whole("max_position_embeddings")
    scaling = f.table("rope_scaling") or f.table("rope_parameters")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor = scaling.get("factor", 1.0)
    if kind not in ("default", "mrope", "llama3", "longrope", "su", "yarn", "linear", "dynamic"):
        raise CatalogueError(f"{f.where}: `rope_scaling.rope_type` `{kind}` is not modelled")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise CatalogueError(f"{f.where}: `rope_scaling.factor` must be a number above 0, got `{factor}`")
    if kind == "yarn":
        return int(scaling.get("original_max_position_embeddings", limit) * factor)
    if kind in ("linear", "dynamic") and model_type != "gemma3":
        return int(limit * factor)
    return limit
