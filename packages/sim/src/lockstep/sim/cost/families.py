"""Reading a Hugging Face config.json: the families of architectures, and a ModelSpec from the fields of a config.

A field that changes the arithmetic and is not modelled is refused by name, because a wrong cost is not recognisable as
such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.host.quantization import INT4_BITS, INT4_GROUP, METHODS, WeightsDtype, read_weight_format
from lockstep.sim.cost.config_fields import ConfigFields
from lockstep.sim.cost.errors import CatalogueError
from lockstep.sim.cost.models import AttentionShape, ExpertShape, GatedDelta, LatentAttention, Mamba2, ModelSpec
from lockstep.sim.cost.whole_prompts import (
    ENCODERS,
    check_architecture,
    decoder_labels,
    encoder_fields,
    labels_of,
    local_layers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that follow from `model_type`, because they are not fields of the config."""

    qk_norm: bool | Literal["flag", "whole"] = False  # flag: the field `use_qk_norm`; whole: over all heads together
    qkv_bias: bool | None = None  # None: the value of `attention_bias` or `use_bias`
    o_bias: bool | None = None
    norms_per_layer: int = 2
    norm_bias: bool = False
    tied_default: bool = False
    latent: bool = False
    gated: bool = False
    sinks: bool = False
    sliding: Literal["", "layer_types", "pattern", "all", "upper"] = ""
    pattern: int = 0  # with sliding "pattern": every n-th layer is full, unless the config has a number of its own
    state: Literal["", "delta", "mamba2"] = ""  # what the layers without KV are
    gated_ffn: bool = True
    ffn_bias: bool | None = None  # None: the value of `mlp_bias` or `use_bias`
    ffn_factor: int = 0  # width of the feed-forward by the hidden size, where the config has no width
    positions: int = -1  # rows of the table of learned positions beyond the longest context; -1: no table
    one_kv_head: bool = False  # with the field `multi_query`
    experts: str = ""  # the field with the number of experts; empty: dense
    expert_ffn: str = ""
    gated_experts: bool = True
    score_bias: bool = False
    notes: tuple[str, ...] = ()


_QWEN3 = Family(qk_norm=True, sliding="upper")
_QWEN3_MOE = Family(qk_norm=True, sliding="upper", experts="num_experts", expert_ffn="moe_intermediate_size")
_QWEN2 = Family(qkv_bias=True, o_bias=False, sliding="upper")
_QWEN35 = Family(qk_norm=True, gated=True, state="delta")
_QWEN35_MOE = Family(qk_norm=True, gated=True, state="delta", experts="num_experts", expert_ffn="moe_intermediate_size")
_DEEPSEEK = Family(latent=True, experts="n_routed_experts", expert_ffn="moe_intermediate_size", score_bias=True)
_GLM_MOE = Family(
    qk_norm="flag", o_bias=False, experts="n_routed_experts", expert_ffn="moe_intermediate_size", score_bias=True
)
_LOCAL_EXPERTS = Family(experts="num_local_experts", expert_ffn="intermediate_size")
_GEMMA = Family(norms_per_layer=2, tied_default=True)
_GEMMA2 = Family(norms_per_layer=4, tied_default=True, sliding="pattern", pattern=2)
_COHERE = Family(norms_per_layer=1, tied_default=True, qk_norm="flag")
_LAYER_NORM = Family(norm_bias=True, gated_ffn=False)
_GPT2 = Family(
    norm_bias=True, gated_ffn=False, ffn_bias=True, ffn_factor=4, qkv_bias=True, o_bias=True, tied_default=True,
    positions=0, one_kv_head=True,
)  # fmt: skip
_MAMBA_RATES = "Mamba-2 layers take the measured rates of the gated delta rule, with their own sizes"
_PARALLEL = Family(norm_bias=True, norms_per_layer=1, gated_ffn=False, ffn_bias=True, ffn_factor=4)
FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        qk_norm=True, gated=True, norms_per_layer=4, sliding="pattern", pattern=4,
        experts="num_experts", expert_ffn="moe_intermediate_size", score_bias=True,
    ),
    "apertus": Family(qk_norm=True, gated_ffn=False),
    "arcee": Family(gated_ffn=False),
    "bamba": Family(state="mamba2", notes=(_MAMBA_RATES,)),
    "bitnet": Family(norms_per_layer=3),
    "bloom": replace(_LAYER_NORM, ffn_bias=True, ffn_factor=4, qkv_bias=True, o_bias=True, tied_default=True),
    "codegen": _PARALLEL,
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, sliding="pattern", pattern=4),
    "cwm": Family(sliding="pattern", pattern=4),
    "deepseek_v2": replace(_DEEPSEEK, score_bias=False),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "dots1": Family(
        qk_norm=True, sliding="upper", experts="n_routed_experts", expert_ffn="moe_intermediate_size", score_bias=True
    ),
    "ernie4_5": Family(tied_default=True),
    "ernie4_5_moe": Family(
        tied_default=True, experts="moe_num_experts", expert_ffn="moe_intermediate_size", score_bias=True
    ),
    "exaone4": Family(qk_norm=True, sliding="pattern", pattern=4),
    "exaone_moe": Family(
        qk_norm=True, sliding="pattern", pattern=4, experts="num_experts", expert_ffn="moe_intermediate_size",
        score_bias=True,
    ),
    "falcon": Family(
        norm_bias=True, norms_per_layer=1, gated_ffn=False, ffn_factor=4, tied_default=True, one_kv_head=True
    ),
    "flex_olmo": Family(qk_norm="whole", experts="num_experts", expert_ffn="intermediate_size"),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, qk_norm=True, pattern=0),
    "glm": Family(o_bias=False),
    "glm4": Family(o_bias=False, norms_per_layer=4),
    "glm4_moe": _GLM_MOE,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": replace(_GPT2, qkv_bias=False, one_kv_head=False, sliding="layer_types"),
    "gpt_neox": replace(_LAYER_NORM, ffn_bias=True),
    "gpt_oss": Family(
        qkv_bias=True, o_bias=True, sinks=True, sliding="layer_types",
        experts="num_local_experts", expert_ffn="intermediate_size",
    ),
    "gptj": _PARALLEL,
    "granite": Family(),
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoehybrid": replace(_LOCAL_EXPERTS, state="mamba2", notes=(_MAMBA_RATES,)),
    "granitemoeshared": _LOCAL_EXPERTS,
    "helium": Family(),
    "hunyuan_v1_dense": Family(qk_norm=True),
    "hunyuan_v1_moe": Family(qk_norm=True, experts="num_experts", expert_ffn="intermediate_size"),
    "hyperclovax": Family(norms_per_layer=4),
    "internlm3": Family(),
    "jais2": _LAYER_NORM,
    "kimi_k2": _DEEPSEEK,
    "llama": Family(),
    "llama4": Family(
        sliding="layer_types", experts="num_local_experts", expert_ffn="intermediate_size",
        notes=("chunked attention is a sliding window of the chunk's length, which reads twice as much on average",),
    ),
    "minicpm3": Family(latent=True, tied_default=True),
    "minimax_m2": Family(
        qk_norm="whole", experts="num_local_experts", expert_ffn="intermediate_size", score_bias=True,
    ),
    "ministral": Family(sliding="layer_types"),
    "ministral3": Family(),
    "mistral": Family(sliding="all"),
    "mixtral": replace(_LOCAL_EXPERTS, sliding="all"),
    "mpt": Family(gated_ffn=False, ffn_factor=4, tied_default=True),
    "nanochat": Family(gated_ffn=False),
    "nemotron": _LAYER_NORM,
    "nemotron_h": Family(
        state="mamba2", norms_per_layer=2, gated_ffn=False, experts="n_routed_experts",
        expert_ffn="moe_intermediate_size", gated_experts=False, score_bias=True, notes=(_MAMBA_RATES,),
    ),
    "olmo": Family(),
    "olmo2": Family(qk_norm="whole"),
    "olmo3": Family(qk_norm="whole", sliding="pattern", pattern=4),
    "olmoe": Family(qk_norm="whole", experts="num_experts", expert_ffn="intermediate_size"),
    "opt": Family(
        norm_bias=True, gated_ffn=False, ffn_bias=True, qkv_bias=True, o_bias=True, tied_default=True, positions=2
    ),
    "persimmon": replace(_LAYER_NORM, ffn_bias=True, qkv_bias=True, o_bias=True),
    "phi": replace(_LAYER_NORM, norms_per_layer=1, ffn_bias=True, qkv_bias=True, o_bias=True),
    "phi3": Family(sliding="all"),
    "phimoe": replace(_LOCAL_EXPERTS, norm_bias=True, sliding="all"),
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_audio": _QWEN2,
    "qwen2_moe": replace(_QWEN2, experts="num_experts", expert_ffn="moe_intermediate_size"),
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN35_MOE,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "seed_oss": Family(o_bias=False),
    "smollm3": Family(tied_default=True),
    "solar_open": Family(experts="n_routed_experts", expert_ffn="moe_intermediate_size", score_bias=True),
    "stablelm": Family(norm_bias=True, o_bias=False),
    "starcoder2": replace(_LAYER_NORM, tied_default=True),
    "vaultgemma": replace(_GEMMA, sliding="pattern", pattern=2),
    "xglm": Family(norm_bias=True, gated_ffn=False, ffn_bias=True, qkv_bias=True, o_bias=True, tied_default=True),
    "youtu": Family(latent=True, tied_default=True),
}  # fmt: skip

ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length", "seq_length"),
    "num_experts_per_tok": ("moe_k", "num_experts_per_token", "moe_topk"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "first_k_dense_replace": ("num_dense_layers",),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "sliding_window": ("window_size",),
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_chunk_size": ("chunk_size",),
}
"""Fields by the names that most configs have, with the names that some architectures have instead."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Fields that change the arithmetic and are not modelled.
REFUSED = {
    "num_kv_shared_layers": "KV shared between layers",
    "hidden_size_per_layer_input": "per-layer embeddings",
}
LAYER_KINDS = {
    "full_attention": "full", "attention": "full", "global": "full", "indexed_attention": "full",
    "sliding_attention": "sliding", "chunked_attention": "sliding", "local": "sliding",
    "linear_attention": "linear", "mamba": "linear",
}  # fmt: skip
"""Kinds of `layer_types` and of the fields that stand for it; the indexer of a model applies to all its layers."""
TORCH_DTYPES = ("bfloat16", "float16", "float32")  # float32 checkpoints are served in bf16


def model_from_config(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Build a ModelSpec from the fields of a Hugging Face config.json.

    Raises: CatalogueError naming the field and its value, for a malformed field or one that is not modelled.
    """
    if not isinstance(config, dict):
        raise CatalogueError(f"{where}: a config.json must be an object, got `{type(config).__name__}`")
    inner = ConfigFields(where, config).table("text_config")
    data = {**config, **inner}  # fields of the language model inside a multimodal model come first
    for field, others in ALIASES.items():
        if data.get(field) is None:
            data[field] = next((data[other] for other in others if data.get(other) is not None), None)
    f = ConfigFields(where, data)
    for field, meaning in REFUSED.items():
        if f.data.get(field):
            raise CatalogueError(f"{where}: `{field}` {f.data[field]} ({meaning}) is not modelled")
    model_type = str(f.data.get("model_type", "nothing")).removesuffix("_text")
    if model_type in ENCODERS:
        return _encoder(f, model_type, name, str(config.get("_source", where)))
    if model_type not in FAMILIES:
        raise CatalogueError(
            f"{where}: `model_type` `{model_type}` is not modelled\nhint: one of {', '.join((*FAMILIES, *ENCODERS))}"
        )
    family = FAMILIES[model_type]
    if model_type == "nemotron_h":
        data |= _mixers(f)
    layers = f.whole("num_hidden_layers")
    sliding, linear = _layer_kinds(f, family, layers)
    window = (
        f.whole("attention_chunk_size" if f.data.get("attention_chunk_size") else "sliding_window") if sliding else 0
    )
    moe_layers = _moe_layers(f, family, layers)
    dense_layers = f.whole("_dense_layers", layers - moe_layers, 0)
    context = _context_tokens_max(f, model_type)
    return ModelSpec(
        name=name,
        source=str(config.get("_source", where)),
        model_type=model_type,
        hidden=f.whole("hidden_size"),
        vocab=f.whole("vocab_size"),
        tied_embedding=f.flag("tie_word_embeddings", family.tied_default),
        ffn=_dense_ffn(f, family) if dense_layers else 0,
        dense_layers=dense_layers,
        moe_layers=moe_layers,
        full_layers=layers - sliding - linear,
        sliding_layers=sliding,
        linear_layers=linear,
        attention=_latent(f) if family.latent else _attention(f, family, window),
        delta=_state(f, family) if linear or family.state == "delta" else None,
        experts=_experts(f, family) if moe_layers else None,
        norms_per_layer=family.norms_per_layer,
        norm_bias=family.norm_bias,
        gated_ffn=family.gated_ffn,
        ffn_bias=f.any_flag("mlp_bias", "use_bias", "bias") if family.ffn_bias is None else family.ffn_bias,
        positions=0 if family.positions < 0 else context + family.positions,
        checkpoint_dtype=_checkpoint_dtype(f),
        weights_only=_weights_only(f),
        context_tokens_max=context,
        whole=decoder_labels(f.whole("hidden_size"), labels) if (labels := labels_of(f)) else None,
        notes=family.notes,
    )


def _encoder(f: ConfigFields, model_type: str, name: str, source: str) -> ModelSpec:
    """Return an encoder. Raises CatalogueError for one that is used as something else."""
    check_architecture(f)
    family, layers = ENCODERS[model_type], f.whole("num_hidden_layers")
    local, window = local_layers(f, layers) if family.modern else (0, 0)
    biases = not family.modern
    return ModelSpec(
        name=name,
        source=source,
        model_type=model_type,
        hidden=f.whole("hidden_size"),
        vocab=f.whole("vocab_size"),
        tied_embedding=True,
        ffn=f.whole("intermediate_size"),
        dense_layers=layers,
        moe_layers=0,
        full_layers=layers - local,
        sliding_layers=local,
        linear_layers=0,
        attention=_attention(f, Family(qkv_bias=biases or None, o_bias=biases or None), window if local else 0),
        norm_bias=biases or f.flag("norm_bias", False),
        gated_ffn=family.modern,
        ffn_bias=biases or f.flag("mlp_bias", False),
        checkpoint_dtype=_checkpoint_dtype(f),
        **encoder_fields(f, family, model_type),
    )


def _mixers(f: ConfigFields) -> dict[str, Any]:
    """Return the fields of Nemotron-H, whose layers have either attention, a state or a feed-forward, as pairs of both.

    A letter of `hybrid_override_pattern` is a layer: M Mamba-2, * attention, - dense, E experts.
    """
    kinds = f.data.get("layers_block_type")
    if kinds is None:
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        pattern = str(f.data.get("hybrid_override_pattern") or "")
        if not pattern or set(pattern) - set(letters):
            raise f.complain("hybrid_override_pattern", "a text of M, *, - and E, one letter per layer")
        kinds = [letters[letter] for letter in pattern]
    mixers = [kind for kind in kinds if kind not in ("mlp", "moe")]
    return {
        "num_hidden_layers": len(mixers),
        "layer_types": mixers,
        "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in kinds if kind in ("mlp", "moe")],
        "_dense_layers": kinds.count("mlp"),
    }


def _dense_ffn(f: ConfigFields, family: Family) -> int:
    """Return the width of the feed-forward of layers without experts."""
    if f.data.get("shared_intermediate_size") and family.experts and not f.data.get(family.experts):
        return f.whole("shared_intermediate_size")  # Granite 4 without experts
    if f.data.get("intermediate_size_mlp"):
        return f.whole("intermediate_size_mlp")  # Llama 4
    return f.whole("intermediate_size", family.ffn_factor * f.whole("hidden_size") if family.ffn_factor else None)


def _attention(f: ConfigFields, family: Family, window: int) -> AttentionShape:
    heads = f.whole("num_attention_heads")
    if f.data.get("head_dim") is None and f.whole("hidden_size") % heads:
        raise f.complain("num_attention_heads", f"a divisor of `hidden_size` {f.whole('hidden_size')}")
    kv_heads = f.whole("num_key_value_heads", default=heads)
    if family.one_kv_head and f.flag("multi_query", False) and not f.flag("new_decoder_architecture", False):
        kv_heads = 1
    if heads % kv_heads:
        raise f.complain("num_key_value_heads", f"a divisor of `num_attention_heads` {heads}")
    bias = f.any_flag("attention_bias", "use_bias", "bias", "use_qkv_bias")
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.whole("head_dim", default=f.whole("hidden_size") // heads),
        qk_norm=f.flag("use_qk_norm", False) if family.qk_norm == "flag" else bool(family.qk_norm),
        whole_qk_norm=family.qk_norm == "whole",
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        gated=family.gated,
        sinks=family.sinks,
        window=window,
    )


def _latent(f: ConfigFields) -> LatentAttention:
    return LatentAttention(
        heads=f.whole("num_attention_heads"),
        q_rank=f.whole("q_lora_rank", default=0, least=0),
        kv_rank=f.whole("kv_lora_rank"),
        nope_dim=f.whole("qk_nope_head_dim"),
        rope_dim=f.whole("qk_rope_head_dim"),
        value_dim=f.whole("v_head_dim"),
        index_heads=f.whole("index_n_heads") if f.data.get("index_topk") else 0,
        index_dim=f.whole("index_head_dim") if f.data.get("index_topk") else 0,
        index_topk=f.whole("index_topk", 0, 0),
    )


def _state(f: ConfigFields, family: Family) -> GatedDelta | Mamba2:
    """Return the layers that keep a state instead of KV."""
    if family.state == "mamba2":
        return Mamba2(
            heads=f.whole("mamba_n_heads"),
            head_dim=f.whole("mamba_d_head"),
            groups=f.whole("mamba_n_groups", 1),
            state_dim=f.whole("mamba_d_state"),
            conv_kernel=f.whole("mamba_d_conv"),
            chunk=f.whole("mamba_chunk_size", 256),
        )
    return GatedDelta(
        key_heads=f.whole("linear_num_key_heads"),
        value_heads=f.whole("linear_num_value_heads"),
        key_dim=f.whole("linear_key_head_dim"),
        value_dim=f.whole("linear_value_head_dim"),
        conv_kernel=f.whole("linear_conv_kernel_dim"),
    )


def _experts(f: ConfigFields, family: Family) -> ExpertShape:
    field = _expert_field(f, family)
    count, per_token = f.whole(field), f.whole("num_experts_per_tok")
    if per_token > count:
        raise f.complain("num_experts_per_tok", f"at most `{field}` {count}")
    ffn = f.whole(family.expert_ffn)
    gate = f.whole("shared_expert_intermediate_size", 0, 0) > 0
    shared = ffn if f.data.get("intermediate_size_mlp") else ffn * f.whole("n_shared_experts", 0, 0)
    for own in ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        shared = f.whole(own, shared, 0)
    return ExpertShape(
        count=count,
        per_token=per_token,
        ffn=ffn,
        shared_ffn=shared,
        shared_gate=gate,
        bias=family.sinks,  # gpt-oss, the one family with biases in router and experts
        score_bias=family.score_bias,
        gated=family.gated_experts,
    )


def _expert_field(f: ConfigFields, family: Family) -> str:
    """Return the field with the number of experts, which may have another name in configs of another release."""
    named = (family.experts, *EXPERT_COUNTS)
    return next((name for name in named if f.data.get(name) is not None), family.experts)


def _moe_layers(f: ConfigFields, family: Family, layers: int) -> int:
    """Return the number of layers with experts.

    They are listed, or every n-th layer has experts (Qwen), without the first `first_k_dense_replace` (DeepSeek) and
    `mlp_only_layers`.
    """
    if not family.experts or f.data.get(_expert_field(f, family)) == 0:
        return 0
    kinds, numbers = f.data.get("mlp_layer_types"), f.data.get("moe_layers")
    if isinstance(kinds, list):
        return kinds.count("sparse")
    if isinstance(numbers, list):
        return len(numbers)
    first = f.whole("first_k_dense_replace", f.whole("moe_layer_start_index", 0, 0), 0)
    last = f.data.get("moe_layer_end_index")
    stop = layers if last in (None, -1) else min(f.whole("moe_layer_end_index") + 1, layers)
    step = f.whole("decoder_sparse_step", f.whole("moe_layer_freq", f.whole("interleave_moe_layer_step", 1)))
    listed = f.data.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise f.complain("mlp_only_layers", "a list of layer numbers")
    offset = 0 if "moe_layer_freq" in f.data else 1
    return sum(1 for i in range(first, stop) if i not in listed and (i + offset) % step == 0)


def _layer_kinds(f: ConfigFields, family: Family, layers: int) -> tuple[int, int]:
    """Return the numbers of sliding-window layers and of linear-attention layers."""
    kinds = f.data.get("layer_types", f.data.get("attention_layers"))
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise f.complain("layer_types", f"a list of {layers} kinds, one per layer")
        for kind in kinds:
            if kind not in LAYER_KINDS:
                raise CatalogueError(
                    f"{f.where}: `layer_types` `{kind}` is not modelled\nhint: {', '.join(LAYER_KINDS)}"
                )
        counted = [LAYER_KINDS[kind] for kind in kinds]
        if "linear" in counted and not family.state:
            named = next(kind for kind in kinds if LAYER_KINDS[kind] == "linear")
            raise CatalogueError(f"{f.where}: `layer_types` `{named}` is not modelled for this model_type")
        return counted.count("sliding"), counted.count("linear")
    if family.state == "delta":
        return 0, layers - layers // f.whole("full_attention_interval")
    if family.state == "mamba2":
        return 0, layers - len(_numbers(f, "attn_layer_indices"))
    if f.data.get("attention_chunk_size"):
        rotary = f.data.get("no_rope_layers") or [(i + 1) % 4 for i in range(layers)]
        return sum(1 for one in rotary if one), 0
    if not f.data.get("sliding_window") or not f.flag("use_sliding_window", True):
        return 0, 0
    if family.sliding == "pattern":  # every n-th layer is full
        return layers - layers // _pattern(f, family), 0
    if family.sliding == "upper":  # Qwen: the layers from max_window_layers on
        return max(0, layers - f.whole("max_window_layers", 0, 0)), 0
    if family.sliding == "all":
        return layers, 0
    raise CatalogueError(f"{f.where}: `sliding_window` {f.data['sliding_window']} without `layer_types`")


def _pattern(f: ConfigFields, family: Family) -> int:
    """Return n where every n-th layer is full: a number, or a text such as LLLG, or the usual one of the family."""
    given = f.data.get("sliding_window_pattern")
    return len(given) if isinstance(given, str) and given else f.whole("sliding_window_pattern", family.pattern or None)


def _numbers(f: ConfigFields, field: str) -> list[int]:
    value = f.data.get(field) or []
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise f.complain(field, "a list of layer numbers")
    return value


def _checkpoint_dtype(f: ConfigFields) -> WeightsDtype:
    method = f.table("quantization_config").get("quant_method")
    if _is_nvfp4(f.table("quantization_config")):
        return "nvfp4"
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


def _is_nvfp4(quantization: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is stored as nvfp4, by ModelOpt or compressed-tensors."""
    algorithm = str(quantization.get("quant_algo") or quantization.get("format") or "").lower()
    return quantization.get("quant_method") == "modelopt_fp4" or algorithm.startswith("nvfp4")


def _weights_only(f: ConfigFields) -> bool:
    """Return whether an fp8 checkpoint declares no precision of activations, by the runtime's own reader."""
    if _is_nvfp4(f.table("quantization_config")):
        return False
    stored = read_weight_format(f.data, [])
    return stored is not None and stored.layout == "fp8" and not stored.activations


def _context_tokens_max(f: ConfigFields, model_type: str) -> int:
    """Return the longest context the config allows.

    `max_position_embeddings` already includes llama3 and longrope scaling, and Gemma 3's linear scaling. yarn scales
    `original_max_position_embeddings`; linear and dynamic scale `max_position_embeddings`. vLLM and SGLang do the same.
    """
    limit = f.whole("max_position_embeddings")
    scaling = f.table("rope_scaling") or f.table("rope_parameters")
    if isinstance(of_full := scaling.get("full_attention"), dict):  # one entry per kind of layer
        scaling = of_full
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
