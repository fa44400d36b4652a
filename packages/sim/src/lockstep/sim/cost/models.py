"""Models: the figures that are computed from the description of a model. `families.py` reads it from a config.json.

A model is a list of weight matrices plus a description of its attention. Parameters, weight bytes, FLOPs and KV bytes
are all sums over that list, so the roofline and the capacity model cannot disagree about a model's size. Bytes of
weights and KV in fewer bits are those of `lockstep.host.quantization`, which the runtime uses, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.host.quantization import KV_BYTES as KV_BYTES
from lockstep.host.quantization import WEIGHT_BYTES as WEIGHT_BYTES
from lockstep.host.quantization import Activations, rounds_rows
from lockstep.host.quantization import Fp8Activations as Fp8Activations
from lockstep.host.quantization import KvDtype as KvDtype
from lockstep.host.quantization import WeightsDtype as WeightsDtype
from lockstep.sim.cost.errors import CapacityError, CatalogueError
from lockstep.sim.cost.parallel import Parallelism, divisors, parallelism_of
from lockstep.sim.cost.whole_prompts import WholePrompts

if TYPE_CHECKING:
    from lockstep.sim.cost.hardware import GpuSpec

ACTIVATION_BYTES = 2  # bf16
DELTA_CHUNK = 64  # tokens per chunk of the chunked delta rule
HEAD = "head"  # name of the matrices that one state of a prompt passes, of a model that computes prompts whole
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
    whole_qk_norm: bool = False  # one norm over all heads of the query, and one over those of the key (OLMo 2)
    qkv_bias: bool = False
    o_bias: bool = False
    gated: bool = False  # the query projection also yields an output gate (Qwen3-Next)
    sinks: bool = False  # one learned logit per head (gpt-oss)
    window: int = 0  # tokens that a sliding layer attends to; 0: no sliding layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): every rank caches the same latent per token, shared by all heads.

    With an indexer (DeepSeek-V3.2) each query scores all earlier tokens by small keys, which every rank caches in fp8
    beside the latent, and attends to the `index_topk` tokens with the highest scores.
    """

    heads: int
    q_rank: int  # 0: the query is projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int = 0  # 0: no indexer, every query attends to all tokens
    index_dim: int = 0
    index_topk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5): a fixed state per request, no KV."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def split_counts(self) -> dict[str, int]:
        """The counts that the ranks of a layer must divide, by the names of their fields."""
        return {"linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads}

    @property
    def vector_params(self) -> int:
        """Parameters of one layer that are not matrices: convolution, decay and time step per head, norm."""
        return self.conv_kernel * self.conv_channels + 2 * self.value_heads + self.value_dim

    def matrices(self, hidden: int, layers: int, ranks: int) -> list[WeightMatrix]:
        """Return the matrices of one of `ranks` ranks."""
        values, keys = self.value_heads * self.value_dim // ranks, self.key_heads * self.key_dim // ranks
        return [
            WeightMatrix("delta_qkvz", hidden, 2 * keys + 2 * values, layers),
            WeightMatrix("delta_ba", hidden, 2 * self.value_heads // ranks, layers, "plain"),
            WeightMatrix("delta_o", values, hidden, layers),
        ]

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
class Mamba2:
    """Mamba-2 (Nemotron-H, Granite 4, Bamba): a fixed state per request of `heads` matrices, no KV.

    Its times are those of the gated delta rule with as many values: rates of its own kernels are not measured.
    """

    heads: int
    head_dim: int
    groups: int  # B and C are shared by the heads of a group
    state_dim: int
    conv_kernel: int
    chunk: int = 256  # tokens per chunk of the parallel form

    @property
    def value_heads(self) -> int:
        return self.heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def split_counts(self) -> dict[str, int]:
        """The counts that the ranks of a layer must divide, by the names of their fields."""
        return {"mamba_n_heads": self.heads}

    @property
    def vector_params(self) -> int:
        """Parameters of one layer that are not matrices: convolution with bias, A, D and time step, norm."""
        return (self.conv_kernel + 1) * self.conv_channels + 3 * self.heads + self.inner

    def matrices(self, hidden: int, layers: int, ranks: int) -> list[WeightMatrix]:
        """Return the matrices of one of `ranks` ranks; a group is repeated where there are fewer groups than ranks."""
        groups = ceil_div(self.groups, ranks)
        outputs = 2 * self.inner // ranks + 2 * groups * self.state_dim + self.heads // ranks
        return [
            WeightMatrix("mamba_in", hidden, outputs, layers),
            WeightMatrix("mamba_out", self.inner // ranks, hidden, layers),
        ]

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def recurrent_elements(self) -> int:
        return self.inner * self.state_dim

    @property
    def chunk_flops(self) -> int:
        """FLOPs of the parallel form per token and head: products with the state and with half of a chunk's tokens."""
        return 4 * self.state_dim * self.head_dim + self.chunk * (self.state_dim + self.head_dim)

    @property
    def state_bytes(self) -> int:
        """Bytes of state per request and layer: the matrices in float32, the convolution's tail in bf16."""
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
    gated: bool = True  # three matrices per expert; False: two, without a gate (Nemotron-H)

    @property
    def up_matrices(self) -> int:
        """Matrices of an expert from hidden to its width: gate and up, or up alone."""
        return 2 if self.gated else 1

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
    delta: GatedDelta | Mamba2 | None = None
    experts: ExpertShape | None = None
    whole: WholePrompts | None = None  # prompts are computed whole, without KV; None: a language model
    norms_per_layer: int = 2
    norm_bias: bool = False  # norms have a bias, as a LayerNorm has
    gated_ffn: bool = True  # dense layers have gate, up and down; False: up and down (GPT-2, Nemotron)
    ffn_bias: bool = False
    positions: int = 0  # rows of a table of learned positions; 0: rotary or none
    checkpoint_dtype: WeightsDtype = "bf16"
    weights_only: bool = False  # the checkpoint is fp8 and declares no precision of activations
    context_tokens_max: int
    notes: tuple[str, ...] = ()  # parts of the architecture that are modelled as something else, one sentence each

    @property
    def up_matrices(self) -> int:
        """Matrices of a dense layer from hidden to its width: gate and up, or up alone."""
        return 2 if self.gated_ffn else 1

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
        width = hidden if self.whole is None else self.whole.embedding
        found.append(WeightMatrix("embedding", width, ceil_div(self.vocab, attention_tp), 1, "plain"))
        if width != hidden:
            found.append(WeightMatrix("embedding_widening", width, hidden, 1))
        a = self.attention
        if isinstance(a, LatentAttention):
            heads, query = a.heads // attention_tp, a.nope_dim + a.rope_dim
            # q_a and kv_a are one GEMM, whole on every rank; kv_b is applied to new tokens, or absorbed in decode.
            found.append(WeightMatrix("qkv_a", hidden, a.q_rank + a.kv_rank + a.rope_dim, layers))
            found.append(WeightMatrix("q_b", a.q_rank or hidden, heads * query, layers))
            found.append(WeightMatrix("kv_b", a.kv_rank, heads * (a.nope_dim + a.value_dim), layers))
            found.append(WeightMatrix("o", heads * a.value_dim, hidden, layers))
            if a.index_heads:  # whole on every rank
                found.append(WeightMatrix("index_q", a.q_rank or hidden, a.index_heads * a.index_dim, layers))
                found.append(WeightMatrix("index_k", hidden, a.index_dim + a.index_heads, layers))
        elif layers:
            query = a.heads // attention_tp * a.head_dim
            kv = 2 * ceil_div(a.kv_heads, attention_tp) * a.head_dim
            found.append(WeightMatrix("qkv", hidden, query * (2 if a.gated else 1) + kv, layers))
            found.append(WeightMatrix("o", query, hidden, layers))
        if self.delta is not None:
            found.extend(self.delta.matrices(hidden, self.linear_layers, attention_tp))
        if self.dense_layers:
            found.append(WeightMatrix("gate_up", hidden, self.up_matrices * ceil_div(self.ffn, tp), self.dense_layers))
            found.append(WeightMatrix("down", ceil_div(self.ffn, tp), hidden, self.dense_layers))
        if self.experts is not None:
            e = self.experts
            ffn, total = (
                ceil_div(e.ffn, split.expert_tp),
                self.moe_layers * ((e.count + split.redundant_experts) // split.ep),
            )
            found.append(WeightMatrix("router", hidden, e.count, self.moe_layers, "plain"))
            found.append(WeightMatrix("expert_gate_up", hidden, e.up_matrices * ffn, total, "expert"))
            found.append(WeightMatrix("expert_down", ffn, hidden, total, "expert"))
            if e.shared_ffn:
                # With all-to-all a rank has only its own rows there, so it needs the whole shared expert.
                shared = ceil_div(e.shared_ffn, 1 if split.moe_a2a else tp)
                found.append(WeightMatrix("shared_gate_up", hidden, e.up_matrices * shared, self.moe_layers))
                found.append(WeightMatrix("shared_down", shared, hidden, self.moe_layers))
            if e.shared_gate:
                found.append(WeightMatrix("shared_gate", hidden, 1, self.moe_layers, "plain"))
        if self.whole is not None:
            found.extend(WeightMatrix(HEAD, *sizes, 1, "plain") for sizes in self.whole.head)
        elif not self.tied_embedding:
            found.append(WeightMatrix("lm_head", hidden, ceil_div(self.vocab, tp), 1, "plain"))
        return tuple(found)

    @property
    def vector_params(self) -> int:
        """Number of norm weights, biases and other parameters that are not matrices; all are bf16."""
        total = (self.layers * self.norms_per_layer + 1) * self.hidden * (1 + self.norm_bias)
        total += self.positions * (self.hidden if self.whole is None else self.whole.embedding)
        if self.whole is not None:
            total += self.whole.pooler + self.whole.beside
        total += self.dense_layers * (self.up_matrices * self.ffn + self.hidden) * self.ffn_bias
        a = self.attention
        if isinstance(a, LatentAttention):
            total += self.attention_layers * (a.q_rank + a.kv_rank + 2 * a.index_dim)
        else:
            query, kv = a.heads * a.head_dim, 2 * a.kv_heads * a.head_dim
            norms = query + kv // 2 if a.whole_qk_norm else 2 * a.head_dim
            per_layer = norms * a.qk_norm + (query + kv) * a.qkv_bias
            per_layer += self.hidden * a.o_bias + a.heads * a.sinks
            total += self.attention_layers * per_layer
        if self.delta is not None:
            total += self.linear_layers * self.delta.vector_params
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
        weights = (e.up_matrices + 1) * self.hidden * e.ffn
        return self.params - self.moe_layers * idle * (weights + e.bias * (2 * e.ffn + self.hidden))

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one token's matrix products, logits included, attention over the context excluded."""
        table = 0 if self.tied_embedding else self.hidden * self.vocab
        if self.whole is not None:  # no logits of tokens; the head is computed once per prompt
            table = self.whole.embedding * self.vocab + self.whole.head_params
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
        per_layer = self.kv_values_per_layer(tp) * KV_BYTES[checked_kv_dtype(dtype)]
        if self.whole is not None:
            return 0
        if isinstance(self.attention, LatentAttention):
            per_layer += self.attention.index_dim  # keys of the indexer, one byte each
        return self.attention_layers * per_layer

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
    if model.whole is not None and split.gpus > 1:
        raise CapacityError(
            f"{split} is not possible: {model.name} computes prompts whole, each engine on one GPU\n"
            "hint: tp 1, and several engines behind a router"
        )
    ranks = split.attention_tp
    named = f"tp {split.tp}" if split.attention_dp == 1 else f"tp {split.tp} / attention_dp {split.attention_dp}"
    counts = {"num_attention_heads": model.attention.heads}
    if model.delta is not None:
        counts |= model.delta.split_counts
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
