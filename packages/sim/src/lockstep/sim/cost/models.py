"""Models: the fields of a Hugging Face config.json, and the figures that are computed from them.

A model is a list of weight matrices plus a description of its attention. Parameters, weight bytes, FLOPs and KV bytes
are all sums over that list, so the roofline and the capacity model cannot disagree about a model's size.

A field that changes the arithmetic and is not modelled is refused by name, because a wrong cost is not recognisable as
such. Bytes of weights and KV in fewer bits are those of `lockstep.host.quantization`, which the runtime uses, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.host.quantization import INT4_BITS, INT4_GROUP, METHODS, Activations, read_weight_format, rounds_rows
from lockstep.host.quantization import KV_BYTES as KV_BYTES
from lockstep.host.quantization import WEIGHT_BYTES as WEIGHT_BYTES
from lockstep.host.quantization import Fp8Activations as Fp8Activations
from lockstep.host.quantization import KvDtype as KvDtype
from lockstep.host.quantization import WeightsDtype as WeightsDtype
from lockstep.sim.cost.errors import CapacityError, CatalogueError
from lockstep.sim.cost.parallel import Parallelism, divisors, parallelism_of

if TYPE_CHECKING:
    from lockstep.sim.cost.hardware import GpuSpec

ACTIVATION_BYTES = 2  # bf16
DELTA_CHUNK = 64  # tokens per chunk of the chunked delta rule
STATE_BYTES = 4  # the recurrent state of linear attention is float32 (`mamba_ssm_dtype`)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """`count` weight matrices of the same size on one rank."""

    name: str
    inputs: int
    outputs: int
    count: int  # matrices in all layers; for experts, layers x experts
    kind: Literal["linear", "expert", "plain"] = "linear"  # plain is bf16 for every dtype of the weights

    @property
    def params(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Grouped-query attention. Sliding layers read at most `window` keys."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    gated: bool = False  # the query projection also yields an output gate (Qwen3-Next)
    sinks: bool = False  # one learned logit per head (gpt-oss)
    window: int = 0  # tokens that a sliding layer attends to; 0: no sliding layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): every rank caches the same latent per token, shared by all heads."""

    heads: int
    q_rank: int  # 0: the query is projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5): a fixed state per request, no KV."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def recurrent_elements(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def chunk_flops(self) -> int:
        """FLOPs of the chunked rule per token and value head: products with the state and with tokens of the chunk."""
        return 4 * self.key_dim * self.value_dim + 4 * DELTA_CHUNK * (self.key_dim + self.value_dim)

    @property
    def state_bytes(self) -> int:
        """Bytes of state per request and layer: the recurrent matrix in float32, the convolution's tail in bf16."""
        return STATE_BYTES * self.recurrent_elements + ACTIVATION_BYTES * (self.conv_kernel - 1) * self.conv_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The mixture of experts of one layer."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0  # width of the expert that every token visits; 0: none
    shared_gate: bool = False
    bias: bool = False  # biases in router and experts (gpt-oss)
    score_bias: bool = False  # a correction per expert for load balance (DeepSeek-V3)

    def touched(self, tokens: int) -> float:
        """Return the expected number of distinct experts that `tokens` tokens visit, if each chooses evenly."""
        missed: float = (1.0 - self.per_token / self.count) ** tokens
        return self.count * (1.0 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The figures of a model that determine its cost. Vision towers and MTP heads are not counted."""

    name: str
    source: str
    model_type: str
    hidden: int
    vocab: int
    tied_embedding: bool
    ffn: int  # width of the dense feed-forward; 0 without dense layers
    dense_layers: int
    moe_layers: int
    full_layers: int
    sliding_layers: int
    linear_layers: int
    attention: AttentionShape | LatentAttention
    delta: GatedDelta | None = None
    experts: ExpertShape | None = None
    norms_per_layer: int = 2
    checkpoint_dtype: WeightsDtype = "bf16"
    weights_only: bool = False  # the checkpoint is fp8 and declares no precision of activations
    context_tokens_max: int

    @property
    def layers(self) -> int:
        return self.full_layers + self.sliding_layers + self.linear_layers

    @property
    def attention_layers(self) -> int:
        """Layers that keep KV."""
        return self.full_layers + self.sliding_layers

    def matrices(self, tp: int | Parallelism = 1) -> tuple[WeightMatrix, ...]:
        """Return the weight matrices of one rank of `tp`, in order of use, as if one stage had all layers.

        Raises: CapacityError for a split that is not possible.
        """
        split = parallelism_of(tp)
        check_split(self, split)
        tp, attention_tp = split.tp, split.attention_tp
        found: list[WeightMatrix] = []
        hidden, layers = self.hidden, self.attention_layers
        found.append(WeightMatrix("embedding", hidden, ceil_div(self.vocab, attention_tp), 1, "plain"))
        a = self.attention
        if isinstance(a, LatentAttention):
            heads, query = a.heads // attention_tp, a.nope_dim + a.rope_dim
            # q_a and kv_a are one GEMM, whole on every rank; kv_b is applied to new tokens, or absorbed in decode.
            found.append(WeightMatrix("qkv_a", hidden, a.q_rank + a.kv_rank + a.rope_dim, layers))
            found.append(WeightMatrix("q_b", a.q_rank or hidden, heads * query, layers))
            found.append(WeightMatrix("kv_b", a.kv_rank, heads * (a.nope_dim + a.value_dim), layers))
            found.append(WeightMatrix("o", heads * a.value_dim, hidden, layers))
        elif layers:
            query = a.heads // attention_tp * a.head_dim
            kv = 2 * ceil_div(a.kv_heads, attention_tp) * a.head_dim
            found.append(WeightMatrix("qkv", hidden, query * (2 if a.gated else 1) + kv, layers))
            found.append(WeightMatrix("o", query, hidden, layers))
        if self.delta is not None:
            d = self.delta
            values = d.value_heads * d.value_dim // attention_tp
            keys = d.key_heads * d.key_dim // attention_tp
            found.append(WeightMatrix("delta_qkvz", hidden, 2 * keys + 2 * values, self.linear_layers))
            found.append(
                WeightMatrix("delta_ba", hidden, 2 * d.value_heads // attention_tp, self.linear_layers, "plain")
            )
            found.append(WeightMatrix("delta_o", values, hidden, self.linear_layers))
        if self.dense_layers:
            found.append(WeightMatrix("gate_up", hidden, 2 * ceil_div(self.ffn, tp), self.dense_layers))
            found.append(WeightMatrix("down", ceil_div(self.ffn, tp), hidden, self.dense_layers))
        if self.experts is not None:
            e = self.experts
            ffn, total = (
                ceil_div(e.ffn, split.expert_tp),
                self.moe_layers * ((e.count + split.redundant_experts) // split.ep),
            )
            found.append(WeightMatrix("router", hidden, e.count, self.moe_layers, "plain"))
            found.append(WeightMatrix("expert_gate_up", hidden, 2 * ffn, total, "expert"))
            found.append(WeightMatrix("expert_down", ffn, hidden, total, "expert"))
            if e.shared_ffn:
                # With all-to-all a rank has only its own rows there, so it needs the whole shared expert.
                shared = ceil_div(e.shared_ffn, 1 if split.moe_a2a else tp)
                found.append(WeightMatrix("shared_gate_up", hidden, 2 * shared, self.moe_layers))
                found.append(WeightMatrix("shared_down", shared, hidden, self.moe_layers))
            if e.shared_gate:
                found.append(WeightMatrix("shared_gate", hidden, 1, self.moe_layers, "plain"))
        if not self.tied_embedding:
            found.append(WeightMatrix("lm_head", hidden, ceil_div(self.vocab, tp), 1, "plain"))
        return tuple(found)

    @property
    def vector_params(self) -> int:
        """Number of norm weights, biases and other parameters that are not matrices; all are bf16."""
        total = self.layers * self.norms_per_layer * self.hidden + self.hidden
        a = self.attention
        if isinstance(a, LatentAttention):
            total += self.attention_layers * (a.q_rank + a.kv_rank)
        else:
            query, kv = a.heads * a.head_dim, 2 * a.kv_heads * a.head_dim
            per_layer = 2 * a.head_dim * a.qk_norm + (query + kv) * a.qkv_bias
            per_layer += self.hidden * a.o_bias + a.heads * a.sinks
            total += self.attention_layers * per_layer
        if self.delta is not None:
            d = self.delta
            total += self.linear_layers * (d.conv_kernel * d.conv_channels + 2 * d.value_heads + d.value_dim)
        if self.experts is not None:
            e = self.experts
            per_layer = e.count * (1 + 2 * e.ffn + self.hidden) * e.bias + e.count * e.score_bias
            total += self.moe_layers * per_layer
        return total

    def vector_params_of(self, tp: int | Parallelism) -> int:
        """Return the `vector_params` of one rank: all except biases of experts on other ranks."""
        split, e = parallelism_of(tp), self.experts
        if e is None or split.ep == 1:
            return self.vector_params
        elsewhere = e.count - (e.count + split.redundant_experts) // split.ep
        return self.vector_params - self.moe_layers * elsewhere * (2 * e.ffn + self.hidden) * e.bias

    @property
    def params(self) -> int:
        return sum(m.params for m in self.matrices()) + self.vector_params

    @property
    def active_params(self) -> int:
        """Parameters that one token uses; the whole embedding table is counted."""
        if self.experts is None:
            return self.params
        e = self.experts
        idle = e.count - e.per_token
        return self.params - self.moe_layers * idle * (3 * self.hidden * e.ffn + e.bias * (2 * e.ffn + self.hidden))

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one token's matrix products, logits included, attention over the context excluded."""
        table = 0 if self.tied_embedding else self.hidden * self.vocab
        return 2 * (self.active_params - self.vector_params - table)

    def weights_bytes(self, dtype: WeightsDtype | None = None, tp: int | Parallelism = 1) -> int:
        """Return the bytes of weights on one rank that has all layers; `dtype` None is that of the checkpoint."""
        cost = WEIGHT_BYTES[checked_weights_dtype(self, dtype)]
        return int(sum(m.params * cost[m.kind] for m in self.matrices(tp)) + self.vector_params_of(tp) * 2)

    def kv_values_per_layer(self, tp: int | Parallelism = 1) -> int:
        """Return how many numbers one token caches in one layer, on one rank of the token's shard."""
        a = self.attention
        if isinstance(a, LatentAttention):
            return a.kv_rank + a.rope_dim
        return 2 * ceil_div(a.kv_heads, parallelism_of(tp).attention_tp) * a.head_dim

    def kv_bytes_per_token(self, dtype: KvDtype = "bf16", tp: int | Parallelism = 1) -> int:
        """Return the KV bytes of one token on one rank of its shard, as if every attention layer kept every token."""
        return self.attention_layers * self.kv_values_per_layer(tp) * KV_BYTES[checked_kv_dtype(dtype)]

    def state_bytes_per_request(self, tp: int | Parallelism = 1) -> int:
        """Return the bytes of a request's linear-attention state on one rank of its shard, equal for every length."""
        if self.delta is None:
            return 0
        return self.linear_layers * ceil_div(self.delta.state_bytes, parallelism_of(tp).attention_tp)


def checked_weights_dtype(model: ModelSpec, dtype: WeightsDtype | None) -> WeightsDtype:
    """Return the weights' dtype, the checkpoint's if None. Raises CatalogueError for one that is not modelled."""
    dtype = dtype or model.checkpoint_dtype
    if dtype not in WEIGHT_BYTES:
        raise CatalogueError(f"`weights_dtype` must be one of {', '.join(WEIGHT_BYTES)}, got `{dtype}`")
    if dtype == "mxfp4" and model.experts is None:
        raise CatalogueError(f"`weights_dtype` mxfp4 stores experts only, and {model.name} has none\nhint: fp8 or bf16")
    return dtype


def checked_kv_dtype(dtype: KvDtype) -> KvDtype:
    """Return `dtype`. Raises CatalogueError if it is not modelled."""
    if dtype not in KV_BYTES:
        raise CatalogueError(f"`kv_dtype` must be one of {', '.join(KV_BYTES)}, got `{dtype}`")
    return dtype


def products_in_fp8(model: ModelSpec, gpu: GpuSpec, weights: WeightsDtype, setting: Fp8Activations) -> bool:
    """Return whether products with the weights run in fp8, by the runtime's own rule; else weights are widened.

    Weights that are fp8 by `--weights-dtype` alone count as a checkpoint with fp8 activations.
    Raises: CatalogueError if `setting` requires fp8 and the weights are not fp8 or the GPU lacks it.
    """
    if setting not in get_args(Fp8Activations):
        raise CatalogueError(f"`fp8_activations` must be auto, on or off, got `{setting}`")
    if setting == "on" and (weights != "fp8" or not gpu.has_fp8):
        why = f"weights are {weights}" if weights != "fp8" else f"{gpu.name} has no fp8 tensor cores"
        raise CatalogueError(
            f"`fp8_activations` is on, but {why}\nhint: leave it out, or --weights-dtype fp8 on an H100"
        )
    declared: Activations = "" if model.weights_only and model.checkpoint_dtype == weights else "dynamic"
    return weights == "fp8" and rounds_rows(setting, declared, gpu.has_fp8)


def check_split(model: ModelSpec, tp: int | Parallelism) -> None:
    """Raise CapacityError unless heads, experts and layers can be split as requested."""
    split = parallelism_of(tp)
    ranks = split.attention_tp
    named = f"tp {split.tp}" if split.attention_dp == 1 else f"tp {split.tp} / attention_dp {split.attention_dp}"
    counts = {"num_attention_heads": model.attention.heads}
    if model.delta is not None:
        counts |= {"linear_num_key_heads": model.delta.key_heads, "linear_num_value_heads": model.delta.value_heads}
    for field, count in counts.items():
        if count % ranks:
            fits = ", ".join(str(n * split.attention_dp) for n in divisors(count))
            raise CapacityError(f"{named} does not divide `{field}` {count} of {model.name}\nhint: --tp {fits}")
    kv_heads = model.attention.kv_heads if isinstance(model.attention, AttentionShape) else ranks
    if kv_heads % ranks and ranks % kv_heads:
        raise CapacityError(
            f"{named} and `num_key_value_heads` {kv_heads} of {model.name}: neither divides the other\n"
            "hint: a power of two usually works"
        )
    if split.pp > model.layers:
        raise CapacityError(f"pp {split.pp} is more than the {model.layers} layers of {model.name}\nhint: lower --pp")
    experts = model.experts
    if experts is None:
        for name in ("ep", "moe_a2a", "expert_cv", "eplb"):
            if name in split.describe():
                raise CapacityError(
                    f"`{name}` is for models with experts, {model.name} has none; got `{getattr(split, name)}`\n"
                    f"hint: leave out --{name.replace('_', '-')}"
                )
    elif experts.count % split.ep:
        more = "is more than" if split.ep > experts.count else "does not divide"
        fits = ", ".join(str(n) for n in divisors(experts.count) if n <= split.tp and split.tp % n == 0)
        raise CapacityError(f"ep {split.ep} {more} the {experts.count} experts of {model.name}\nhint: --ep {fits}")
    elif split.redundant_experts % split.ep or split.redundant_experts > experts.count * (split.ep - 1):
        raise CapacityError(
            f"`redundant_experts` must be a multiple of ep {split.ep}, and every expert at most once on each rank, "
            f"got `{split.redundant_experts}`\nhint: such as --redundant-experts {4 * split.ep}"
        )


# --- reading a config.json ------------------------------------------------------------------------------------------


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
