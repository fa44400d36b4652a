"""The roofline: microseconds of a batch from a model's matrices and a GPU's rates, operator by operator.

Each operator is a cost term (`terms.py`): its kernel's latency plus the larger of compute time and memory time. The
builders of all terms are listed in TERMS, which is the one place where a term is added or left out.
docs/cost-models.md has one line per term, with its constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.exchange import Exchange
from lockstep.sim.cost.expert_balance import Spread, spread_of
from lockstep.sim.cost.experts import expected_max_load, expected_max_touched
from lockstep.sim.cost.hardware import AllReduce, Constant, GpuSpec, achieved, all_reduce_of
from lockstep.sim.cost.lora import LoraCost, LoraSpec
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.cost.models import (
    ACTIVATION_BYTES,
    DELTA_CHUNK,
    HEAD,
    KV_BYTES,
    WEIGHT_BYTES,
    AttentionShape,
    ExpertShape,
    Fp8Activations,
    GatedDelta,
    KvDtype,
    LatentAttention,
    Mamba2,
    ModelSpec,
    WeightMatrix,
    WeightsDtype,
    ceil_div,
    checked_kv_dtype,
    checked_weights_dtype,
    products_in_fp8,
)
from lockstep.sim.cost.parallel import Parallelism, parallelism_of
from lockstep.sim.cost.terms import (
    ATTENTION_PREFILL,
    Bends,
    Constants,
    CostTerm,
    Launching,
    TermSum,
    never,
    new_tokens,
)

Float64s = NDArray[np.float64]
Precision = Literal["bf16", "fp8", "fp4"]
MatrixLine = tuple[str, int, float, float, float, float]  # name, layers, us: latency, per token, weights, per token

# Estimates. A calibration corrects times that are computed with them.
EAGER_KERNEL_US = Constant(5.0, "estimate: CPU time to launch one kernel from Python, 4 to 6 us in PyTorch eager mode")
LATENT_EAGER_US = Constant(
    620.0,
    "p50 of latent attention with its projections, prompts of up to 64 tokens in all, launched from Python: H100 634, "
    "H200 613 us (ai-dynamo/aiconfigurator@095f58a5, Apache-2.0: wideep_context_mla, SGLang 0.5.10)",
)
FORWARD_FIXED_US = Constant(10.0, "estimate: inputs to the device, graph replay, sampled tokens back")
SAMPLING_FIXED_US = Constant(20.0, "estimate: about ten small kernels for penalties, top-k, top-p and the draw")
SAMPLING_PASSES = Constant(4.0, "passes over the float32 logits: copy, maximum, softmax, draw")
GRAPH_ROWS_MAX = 512  # largest decode batch captured as a CUDA graph: SGLang's default from 60 GB with tp >= 4
LOGIT_BYTES = 4  # float32

# Small kernels per layer besides GEMMs and attention.
NORM_KERNELS = 1  # residual add and norm are one kernel, per norm
ATTENTION_SMALL_KERNELS = 2  # rope; KV write
ACTIVATION_KERNELS = 1  # silu and multiply
EXPERT_KERNELS = 3  # top-k, sort by expert, sum over experts
DELTA_KERNELS = 3  # convolution, recurrence, gated norm
LATENT_KERNELS = 8  # kernels of one layer of latent attention: four GEMMs, attention, small ones with latents' norms

ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward

# Names of the compute rate and the latency of decode attention.
DECODE = ("attention_prefill_tflops", "attention_decode_latency_us")
LATENT_DECODE = ("latent_decode_tflops", "latent_decode_latency_us")

# Matrices by the rows that they multiply. OF_SHARD: the rows of a shard. OF_RANK: with all-to-all, the rows of a rank.
# All other matrices multiply the rows of all shards.
OF_SHARD = frozenset("qkv_a q_b kv_b qkv o index_q index_k delta_qkvz delta_ba delta_o mamba_in mamba_out".split())
OF_RANK = frozenset(("router", "shared_gate_up", "shared_down", "shared_gate"))


class Dtypes(NamedTuple):
    """The precisions with which a model is served."""

    weights: WeightsDtype
    kv: KvDtype
    fp8_activations: Fp8Activations = "auto"


class Graphs(NamedTuple):
    """CUDA graphs of decode batches: whether they are captured, and up to how many rows."""

    captured: bool = True
    rows_max: int = GRAPH_ROWS_MAX


GRAPHS = Graphs()


class RooflineModel(TermSum):
    """Cost of a batch of one model on the GPUs of one stage that has all its layers. `stages.py` has several stages.

    Its list of terms is what the builders in TERMS return. The spread of its durations is 0.
    """

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, split: Parallelism, dtypes: Dtypes, graphs: Graphs, lora: LoraSpec | None
    ) -> None:
        tp = split.tp
        self.model, self.gpu, self.tp, self.split = model, gpu, tp, split
        self.weights_dtype, self.kv_dtype, self.fp8_activations = dtypes
        self.fp8_products = products_in_fp8(model, gpu, self.weights_dtype, self.fp8_activations)
        self.fp4_products = self.weights_dtype == "nvfp4" and gpu.has_fp4  # else weights are widened to bf16
        self.cuda_graph, self.graph_rows_max = graphs
        self.matrices = [m for m in model.matrices(split) if m.name != "embedding"]
        self.gemm_matrices = [m for m in self.matrices if m.kind != "expert" and m.name not in ("lm_head", HEAD)]
        self.all_reduce: AllReduce | None = all_reduce_of(gpu, tp) if tp > 1 else None
        self.memory_us = 1.0 / (achieved(gpu, "weight_read_gbs").value * 1e3)  # per byte of weights and activations
        self.exchange: Exchange | None = None  # None: all-reduces, or no collectives at tp 1
        if split.attention_dp > 1 or split.moe_a2a:
            self.exchange = Exchange(model, gpu, split, fp8=self.fp8_products, all_reduce_us=self.all_reduce_us)
        self.spread: Spread | None = None if model.experts is None else spread_of(model.experts, split)
        self.is_even = split.ep == 1 and not split.expert_cv and self.exchange is None  # all ranks do equal work
        self.lora = LoraCost(model, gpu, split, lora) if lora is not None else None
        self._prepare_attention()
        terms = [term for build in TERMS for term in build(self)]
        self.kernels = sum(term.kernels for term in terms if term.scope != "adapters")
        launching, constants = self._launching(terms)
        self.constants: dict[str, Constant] = {
            name: constant for one in (*(term.constants for term in terms), constants) for name, constant in one.items()
        }
        super().__init__(terms, split.attention_dp, launching)

    def _launching(self, terms: Sequence[CostTerm]) -> tuple[Launching, dict[str, Constant]]:
        """Return the launching time, computed from the kernels of all terms, and its constants."""
        read, model = Constants(self.gpu), self.model
        kernel_us = read.note("eager_kernel_us", EAGER_KERNEL_US)
        eager_us = self.kernels * kernel_us
        if isinstance(model.attention, LatentAttention):
            counted_us = LATENT_KERNELS * kernel_us
            eager_us += model.attention_layers * (read.note("latent_eager_us", LATENT_EAGER_US) - counted_us)
        adapters_us = sum(term.kernels for term in terms if term.scope == "adapters") * kernel_us
        fixed_us = read.note("forward_fixed_us", FORWARD_FIXED_US)
        return Launching(self.cuda_graph, self.graph_rows_max, eager_us, adapters_us, fixed_us), read.read

    def describe(self) -> dict[str, Any]:
        """Return kind, model, GPU, settings and every constant with its source."""
        described: dict[str, Any] = {
            "kind": "roofline",
            "model": {"name": self.model.name, "source": self.model.source, "params": self.model.params},
            "gpu": {"name": self.gpu.name, "notes": list(self.gpu.notes)},
            "tp": self.tp,
            **self.split.describe(),
            "weights_dtype": self.weights_dtype,
            "kv_dtype": self.kv_dtype,
            **({"fp8_activations": self.fp8_activations} if self._rows_named() else {}),
            "cuda_graph": self.cuda_graph,
            "graph_rows_max": self.graph_rows_max,
            "kernels": self.kernels,
            "constants": {name: asdict(constant) for name, constant in sorted(self.constants.items())},
        }
        if self.all_reduce is not None:
            described["all_reduce"] = asdict(self.all_reduce)
        if self.split.eplb and self.spread is not None:
            described["eplb"] = {
                "slots": self.spread.slots,
                "fullest_rank": round(self.spread.long_run, 4),
                "fullest_rank_unbalanced": round(self.spread.unbalanced, 4),
                "moved_bytes_per_gpu": round(self.moved_bytes),
                "rebalancing_us": round(self.rebalancing_us, 1),
            }
        if self.lora is not None:
            described["lora"] = self.lora.describe()
        if self.exchange is not None:
            described["all_gather"] = {str(gpus): asdict(line) for gpus, line in self.exchange.lines.items()}
        return described

    def _rows_named(self) -> bool:
        return self.weights_dtype == "fp8" and self.fp8_activations != "auto"

    # --- projections, experts, norms, all-reduce: functions of the number of tokens -----------------------------------

    def precision_of(self, m: WeightMatrix) -> Precision:
        """Return the precision that a dense matrix is multiplied in: weights in fewer bits are widened to bf16."""
        return self.expert_precision if m.kind == "linear" else "bf16"

    @property
    def expert_precision(self) -> Precision:
        """The precision of grouped products, and of all other products with weights in fewer bits."""
        return "fp8" if self.fp8_products else "fp4" if self.fp4_products else "bf16"

    @property
    def expert_read(self) -> str:
        """The name of the rate at which weights of experts are read.

        Without fp4 products, mxfp4 is widened to bf16 by the multiprocessors. Where memory delivers more than they
        widen, the GPU has a rate of its own (docs/cost-models.md, section 2).
        """
        widened = self.weights_dtype == "mxfp4" and not self.gpu.has_fp4
        return "widened_read_gbs" if widened and "widened_read_gbs" in self.gpu.measured else "weight_read_gbs"

    def gemm_us(self, precision: Precision, m: Float64s, k: Float64s, n: Float64s, weight_bytes: float) -> Float64s:
        """Return the times of GEMMs [m, k] x [k, n], by the formula of `matrix_terms`; arrays are float64 [shapes]."""
        compute = 2.0 * m * k * n / (achieved(self.gpu, f"{precision}_gemm_tflops").value * 1e6)
        memory = (k * n * weight_bytes + m * (k + n) * ACTIVATION_BYTES) * self.memory_us
        return achieved(self.gpu, f"{precision}_gemm_latency_us").value + np.maximum(compute, memory)

    def experts_us(
        self,
        tokens: Float64s,
        hidden: Float64s,
        ffn: Float64s,
        per_token: Float64s,
        count: Float64s,
        ep: int = 1,
        cv: float = 0.0,
    ) -> Float64s:
        """Return the times of the grouped GEMMs of one layer, by the formula of the term `experts`.

        Arrays are float64 [shapes].
        Args:
            ep: ranks that share the experts; above 1 the time is that of the fullest rank.
            cv: coefficient of variation of the popularity of experts; 0: routing is even.
        """
        precision = self.expert_precision
        flops_us = achieved(self.gpu, f"{precision}_moe_tflops").value * 1e6
        latency_us = achieved(self.gpu, f"{precision}_gemm_latency_us").value
        read_us = 1.0 / (achieved(self.gpu, self.expert_read).value * 1e3)
        touched = count * (1.0 - (1.0 - per_token / count) ** tokens)
        load = per_token * tokens
        if ep > 1:
            rows = list(zip(*(column.astype(int).tolist() for column in (tokens, per_token, count)), strict=True))
            load = np.array([expected_max_load(n * k, ep, c // ep, cv) for n, k, c in rows])
            touched = np.array([expected_max_touched(n, k, c, ep, cv) for n, k, c in rows])
        total = np.zeros_like(tokens)
        for inputs, outputs in ((hidden, 2.0 * ffn), (ffn, hidden)):
            compute = load * 2.0 * inputs * outputs / flops_us
            weights = touched * inputs * outputs * WEIGHT_BYTES[self.weights_dtype]["expert"] * read_us
            memory = weights + load * (inputs + outputs) * ACTIVATION_BYTES * self.memory_us
            total += latency_us + np.maximum(compute, memory)
        return total

    def seen_tokens(self, name: str, tokens: int, own_tokens: int) -> int:
        """Return the tokens that a matrix multiplies on one rank: those of all shards, of its shard, or of the rank.

        Args:
            tokens: new tokens of all shards.
            own_tokens: new tokens of the shard with the most rows.
        """
        if name in OF_SHARD:
            return own_tokens
        if self.split.moe_a2a and name in OF_RANK:
            return ceil_div(own_tokens, self.split.attention_tp)
        return tokens

    def matrix_terms(self) -> Iterator[CostTerm]:
        """Yield a term per dense matrix: its latency plus the larger of compute and memory time, in all its layers."""
        weight_bytes = WEIGHT_BYTES[self.weights_dtype]
        for m in self.gemm_matrices:
            read, precision = Constants(self.gpu), self.precision_of(m)
            memory_us = 1.0 / read.us_rate("weight_read_gbs", 1e3)
            latency = read.rate(f"{precision}_gemm_latency_us")
            compute = 2.0 * m.inputs * m.outputs / read.us_rate(f"{precision}_gemm_tflops", 1e6)
            weights = m.inputs * m.outputs * weight_bytes[m.kind] * memory_us
            memory = (m.inputs + m.outputs) * ACTIVATION_BYTES * memory_us
            line = (m.name, m.count, latency, compute, weights, memory)

            def us(batch: BatchShape, own: BatchShape, line: MatrixLine = line) -> float:
                name, count, latency, compute, weights, memory = line
                seen = self.seen_tokens(name, new_tokens(batch), new_tokens(own))
                return count * (latency + max(seen * compute, weights + seen * memory))

            yield CostTerm(m.name, "tokens", us, read.read, kernels=m.count)

    def layer_terms(self) -> Iterator[CostTerm]:
        """Yield the terms of experts, small kernels and moves of experts.

        Their order is fixed, because it decides how the sum is rounded.
        """
        small = self._small_kernels_term()
        if self.model.experts is None:
            yield small
        elif self.is_even:
            yield from (self._experts_term(self.model.experts), small)
        else:
            yield from (small, self._experts_term(self.model.experts))
            if self.rebalancing_us:
                yield self._expert_moves_term()

    def _experts_term(self, e: ExpertShape) -> CostTerm:
        """Return the term of both grouped GEMMs of all layers with experts.

        The time is that of a rank with the greatest load and the greatest number of experts to read.
        """
        read, precision, split = Constants(self.gpu), self.expert_precision, self.split
        memory_us = 1.0 / read.us_rate("weight_read_gbs", 1e3)
        flops_us = read.us_rate(f"{precision}_moe_tflops", 1e6)
        latency = read.rate(f"{precision}_gemm_latency_us")
        matrices = [m for m in self.matrices if m.kind == "expert"]
        bytes_each, read_us = WEIGHT_BYTES[self.weights_dtype]["expert"], 1.0 / read.us_rate(self.expert_read, 1e3)
        lines = [
            (
                e.per_token * 2.0 * m.inputs * m.outputs / flops_us,
                m.inputs * m.outputs * bytes_each * read_us,
                e.per_token * (m.inputs + m.outputs) * ACTIVATION_BYTES * memory_us,
            )
            for m in matrices
        ]
        layers = self.model.moe_layers

        def us(batch: BatchShape, own: BatchShape) -> float:
            tokens = new_tokens(batch)
            if self.is_even:
                seen, touched = float(tokens), e.touched(tokens)
            else:
                assert self.spread is not None
                seen = self._expert_load(e, tokens) / e.per_token  # tokens that would give one rank this load
                touched = expected_max_touched(tokens, e.per_token, self.spread.slots, split.ep, self.spread.slot_cv)
            return layers * sum(
                latency + max(seen * compute, touched * weights + seen * memory) for compute, weights, memory in lines
            )

        return CostTerm("experts", "tokens", us, read.read, kernels=len(matrices) * layers)

    def _expert_load(self, e: ExpertShape, tokens: int) -> float:
        """Return the expected assignments of tokens to experts on the fullest rank."""
        assert self.spread is not None
        ep = self.split.ep
        return expected_max_load(tokens * e.per_token, ep, self.spread.slots // ep, self.spread.load_cv)

    def _expert_moves_term(self) -> CostTerm:
        """Return the term of expert moves: the time of one rebalancing, spread over the passes between two of them."""
        read = Constants(self.gpu)
        read.rate("send_gbs")
        return CostTerm(
            "expert_moves", "tokens", lambda batch, own: self.rebalancing_us / self.split.eplb_interval, read.read
        )

    def _small_kernels_term(self) -> CostTerm:
        """Return the term of norms, rope, KV writes, activations and the sorting of rows by expert.

        Its time is a latency per kernel plus the time of the bytes moved.
        """
        model, tp, heads_tp = self.model, self.tp, self.split.attention_tp
        hidden = model.hidden
        kernels = model.layers * model.norms_per_layer * NORM_KERNELS
        values = model.layers * model.norms_per_layer * 4 * hidden  # read input and residual, write both
        a = model.attention
        if isinstance(a, LatentAttention):
            kernels += model.attention_layers * (ATTENTION_SMALL_KERNELS + 1)  # 1: the norms of the two latents
            latent = a.q_rank + a.kv_rank + a.rope_dim + a.heads // heads_tp * a.rope_dim
            values += model.attention_layers * 2 * latent
        else:
            kernels += model.attention_layers * (ATTENTION_SMALL_KERNELS + a.qk_norm + a.gated)
            query = a.heads // heads_tp * a.head_dim
            kv = model.kv_values_per_layer(heads_tp)
            values += model.attention_layers * (2 * (1 + a.qk_norm) * (query + kv // 2) + 2 * kv + 3 * query * a.gated)
        if model.delta is not None:
            d = model.delta
            kernels += model.linear_layers * DELTA_KERNELS
            values += model.linear_layers * (2 * d.conv_channels + 4 * d.value_heads * d.value_dim) // heads_tp
        kernels += model.dense_layers * ACTIVATION_KERNELS
        dense_values = model.dense_layers * (model.up_matrices + 1) * model.ffn // tp
        expert_values = 0
        if model.experts is not None:
            e = model.experts
            kernels += model.moe_layers * (
                ACTIVATION_KERNELS + EXPERT_KERNELS + (ACTIVATION_KERNELS if e.shared_ffn else 0)
            )
            width = e.per_token * e.ffn + e.shared_ffn
            expert_values = model.moe_layers * (3 * width // tp + (e.per_token + 1) * hidden)
        read = Constants(self.gpu)
        launched_us = kernels * read.rate("small_kernel_us")
        memory_us = 1.0 / read.us_rate("weight_read_gbs", 1e3)
        token_us = (values + dense_values + expert_values) * ACTIVATION_BYTES * memory_us
        own_us, dense_us = values * ACTIVATION_BYTES * memory_us, dense_values * ACTIVATION_BYTES * memory_us

        def even_us(batch: BatchShape, own: BatchShape) -> float:
            return launched_us + new_tokens(batch) * token_us

        def uneven_us(batch: BatchShape, own: BatchShape) -> float:
            tokens, own_tokens = new_tokens(batch), new_tokens(own)
            us = launched_us + (own_tokens * own_us + tokens * dense_us)
            return us if model.experts is None else us + self._small_experts_us(model.experts, tokens, own_tokens)

        return CostTerm("small_kernels", "tokens", even_us if self.is_even else uneven_us, read.read, kernels)

    def _small_experts_us(self, e: ExpertShape, tokens: int, own_tokens: int) -> float:
        """Return the time of the small kernels around experts, for ranks with different loads.

        These kernels sort rows by expert, apply the activation and sum over experts. Without all-to-all every rank
        sorts and sums the rows of all ranks, as grouped kernels do.
        """
        split, hidden, load = self.split, self.model.hidden, self._expert_load(e, tokens)
        if split.moe_a2a:
            rows = ceil_div(own_tokens, split.attention_tp)  # of one rank
            values = rows * (hidden + 3 * e.shared_ffn) + load * (3 * e.ffn + hidden)
        else:
            values = tokens * ((e.per_token + 1) * hidden + 3 * e.shared_ffn / self.tp)
            values += load * 3 * e.ffn / split.expert_tp
        return self.model.moe_layers * values * ACTIVATION_BYTES * self.memory_us

    # --- communication ------------------------------------------------------------------------------------------------

    def collective_terms(self) -> Iterator[CostTerm]:
        """Yield the terms of collectives: all-reduces, or the operations of `Exchange`; none on one GPU."""
        if self.exchange is not None:
            yield from self.exchange.terms()
        elif self.all_reduce is not None:
            calls = ALL_REDUCES_PER_LAYER * self.model.layers

            def us(batch: BatchShape, own: BatchShape) -> float:
                return calls * self.all_reduce_us(self.all_reduce_bytes(new_tokens(batch)))

            yield CostTerm("all_reduce", "tokens", us, kernels=calls, is_collective=True)

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights in one layer, on one of the GPUs that share its width."""
        e = self.model.experts
        assert e is not None
        width = ceil_div(e.ffn, self.split.expert_tp)
        return (e.up_matrices + 1.0) * self.model.hidden * width * WEIGHT_BYTES[self.weights_dtype]["expert"]

    @property
    def moved_bytes(self) -> float:
        """Bytes that the GPU with the most moves fetches at a rebalancing, all layers together; 0 without EPLB."""
        return self.spread.fetched * self.model.moe_layers * self.expert_bytes if self.spread is not None else 0.0

    @property
    def rebalancing_us(self) -> float:
        """Time to fetch moved experts between two passes. Nothing else runs meanwhile, and sending costs no time."""
        return self.moved_bytes / (achieved(self.gpu, "send_gbs").value * 1e3) if self.split.eplb else 0.0

    def all_reduce_bytes(self, tokens: int) -> int:
        """Return the bytes of one all-reduce for a batch of `tokens` new tokens."""
        return tokens * self.model.hidden * ACTIVATION_BYTES

    def all_reduce_us(self, message_bytes: float) -> float:
        """Return the time of one all-reduce."""
        if self.all_reduce is None:
            return 0.0
        r, moved = self.all_reduce, 2.0 * (self.tp - 1) / self.tp * message_bytes
        return min(
            r.direct_latency_us + moved / (r.direct_gbs * 1e3),
            r.ring_latency_us + moved / (r.ring_gbs * 1e3),
        )

    # --- attention: a function of contexts ----------------------------------------------------------------------------

    def _prepare_attention(self) -> None:
        """Compute and store the microseconds per query-key pair and per KV token of one layer."""
        model, tp, a = self.model, self.split.attention_tp, self.model.attention
        decoding, extending = Constants(self.gpu), Constants(self.gpu)
        flops_us = extending.us_rate("attention_prefill_tflops", 1e6)
        read_us = extending.us_rate("attention_decode_read_gbs", 1e3)
        decoding.rate("attention_decode_read_gbs")
        heads = a.heads // tp
        kv_bytes = model.kv_values_per_layer(tp) * KV_BYTES[self.kv_dtype]
        self._expand_us = self._index_pair_us = self._index_read_us = 0.0
        self._full, self._sliding = model.full_layers, model.sliding_layers
        self._window = a.window if isinstance(a, AttentionShape) else 0
        self._bidirectional = model.whole is not None and model.whole.bidirectional
        if isinstance(a, LatentAttention):
            # Prefill expands the latent to keys and values per head; decode stays in the latent ("absorbed").
            pair_flops = 2.0 * heads * (a.nope_dim + a.rope_dim + a.value_dim)
            decode_flops = 2.0 * heads * (2 * a.kv_rank + a.rope_dim)
            decode_flops_us = decoding.us_rate(LATENT_DECODE[0], 1e6)
            decode_latency_us = decoding.rate(LATENT_DECODE[1])
            kv_b = next(m for m in self.gemm_matrices if m.name == "kv_b")
            rate = extending.us_rate(f"{self.precision_of(kv_b)}_gemm_tflops", 1e6)
            # Per context token and layer: keys and values of earlier chunks are expanded again.
            self._expand_us = 2.0 * kv_b.inputs * kv_b.outputs / rate
            if a.index_heads:
                # Every query attends to `index_topk` tokens, as in a sliding layer, and scores all tokens before it.
                # The chosen tokens differ from query to query, so prompts stay in the latent, too.
                self._full, self._sliding, self._window = 0, model.full_layers, a.index_topk
                pair_flops, self._expand_us = decode_flops, 0.0
                self._index_pair_us = 2.0 * a.index_heads * a.index_dim / flops_us
                self._index_read_us = a.index_dim / read_us
        else:
            pair_flops = decode_flops = 4.0 * heads * a.head_dim
            decode_flops_us, decode_latency_us = decoding.us_rate(DECODE[0], 1e6), decoding.rate(DECODE[1])
        self._pair_us = pair_flops / flops_us
        self._read_us = kv_bytes / read_us
        self._decode_query_us = decode_flops / decode_flops_us
        self._decode_token_us = max(self._read_us, self._decode_query_us)
        self._extra_keys = extending.rate("attention_prefill_extra_keys")
        self._decode_latency_us = model.attention_layers * decode_latency_us
        self._extend_latency_us = model.attention_layers * extending.rate("attention_prefill_latency_us")
        self._attention_constants = decoding.read, extending.read
        self._delta_constants = {} if model.delta is None else self._prepare_delta(model.delta)

    def _prepare_delta(self, d: GatedDelta | Mamba2) -> dict[str, Constant]:
        """Compute and store the times of the gated delta rule, all linear layers together; return the constants read.

        A prompt passes through a series of kernels: inverses within chunks of DELTA_CHUNK tokens, states from chunk to
        chunk, and outputs. So its time has three parts: a latency; a time per chunk of a request, because the chunks
        of a request run one after another; and work that is parallel over all tokens and heads. Work small enough to
        stay in the GPU's cache costs nothing.
        """
        layers, tp, read = self.model.linear_layers, self.split.attention_tp, Constants(self.gpu)
        memory_us = 1.0 / read.us_rate("weight_read_gbs", 1e3)
        state_us = 2 * d.state_bytes / tp * memory_us  # read and written
        self._delta_row_us = layers * state_us
        head_us = d.chunk_flops / read.us_rate("delta_rule_tflops", 1e6)
        self._delta_token_us = layers * d.value_heads / tp * head_us
        self._delta_cached_tokens = read.rate("delta_rule_cached_token_heads") / (d.value_heads / tp)
        self._delta_latency_us = layers * read.rate("delta_rule_latency_us")
        self._delta_chunk_us = layers * read.rate("delta_rule_chunk_us")
        return read.read

    def attention_terms(self) -> Iterator[CostTerm]:
        """Yield the terms of decode attention, extend attention, and linear attention, on the shard with most rows."""
        decoding, extending = self._attention_constants
        layers = self.model.attention_layers  # one kernel per layer, with decode and extend rows
        windows: Bends = (lambda rows: (rows * self._window,)) if self._sliding else never
        yield CostTerm(
            "attention_decode", "decode", self.decode_attention_us, decoding, kernels=layers, decode_bends=windows
        )
        yield CostTerm(
            ATTENTION_PREFILL, "extend", self.extend_attention_us, extending, chunk_bends=self._bends_of_chunk
        )
        if self.model.linear_layers:
            yield CostTerm(
                "linear_attention",
                "rows",
                lambda batch, own: self.delta_us(own),
                self._delta_constants,
                decode_bends=never,
            )

    def decode_attention_us(self, batch: BatchShape, own: BatchShape) -> float:
        """Return the time of attention of the decode rows of `own` in all layers that keep KV.

        `delta_us` has the other layers. A row that verifies drafts reads its KV once for all its queries.
        """
        token_us, rows, context_tokens = self._decode_token_us, own.decode_rows, own.decode_context_tokens
        if own.draft_tokens:
            token_us = max(self._read_us, self._decode_query_us * (rows + own.draft_tokens) / rows)
        us = self._decode_latency_us + self._full * context_tokens * token_us
        if self._sliding:
            # The sums do not show which rows are longer than the window. The result is exact if all rows or no rows
            # are longer, and too high otherwise.
            us += self._sliding * min(context_tokens, rows * self._window) * token_us
            us += self._sliding * context_tokens * max(self._index_read_us, self._index_pair_us)
        return us

    def delta_us(self, shape: BatchShape) -> float:
        """Return the time of all linear-attention layers, for the rows of one shard."""
        us = shape.decode_rows * self._delta_row_us + shape.draft_tokens * self._delta_token_us
        if shape.extend_tokens:
            tokens = shape.extend_tokens
            us += self._delta_latency_us + shape.extend_rows * self._delta_row_us
            us += max(1.0, long_row_tokens(shape) / DELTA_CHUNK) * self._delta_chunk_us
            us += max(0.0, tokens - self._delta_cached_tokens) * self._delta_token_us
        return us

    def _per_kv_token(self, heads: Float64s, *rest: Float64s, expanded: bool) -> tuple[Float64s, Float64s]:
        """Return the values read and the FLOPs of one query, per token of KV in one layer; both float64 [shapes].

        Args:
            rest: number of KV heads and size of a head; empty for MLA, which computes in the latent unless `expanded`.
        """
        if rest:
            kv_heads, head_dim = rest
            return 2.0 * kv_heads * head_dim, 4.0 * heads * head_dim
        a = self.model.attention
        assert isinstance(a, LatentAttention)
        width = a.nope_dim + a.rope_dim + a.value_dim if expanded else 2 * a.kv_rank + a.rope_dim
        return np.full_like(heads, a.kv_rank + a.rope_dim), 2.0 * heads * width

    def one_layer_decode_us(self, tokens: Float64s, heads: Float64s, *rest: Float64s) -> Float64s:
        """Return the decode time of one layer, by the formula of `decode_attention_us`; arrays are float64 [shapes].

        Args:
            tokens: KV tokens that all rows of a batch read together.
            rest: number of KV heads and size of a head; empty for MLA.
        """
        values, flops = self._per_kv_token(heads, *rest, expanded=False)
        read_us = achieved(self.gpu, "attention_decode_read_gbs").value * 1e3
        flops_us, latency_us = (achieved(self.gpu, name).value for name in (LATENT_DECODE if not rest else DECODE))
        per_token = np.maximum(values * KV_BYTES[self.kv_dtype] / read_us, flops / (flops_us * 1e6))
        return latency_us + tokens * per_token

    def one_layer_extend_us(
        self, rows: Float64s, tokens: Float64s, heads: Float64s, *rest: Float64s, expanded: bool = True
    ) -> Float64s:
        """Return the extend time of one layer over `rows` prompts of `tokens` tokens each; arrays are float64 [shapes].

        Args:
            rest: number of KV heads and size of a head; empty for MLA.
            expanded: of MLA, whether keys and values are expanded per head. False is a kernel that stays in the
                latent, which `batch_us` never charges.
        """
        values, flops = self._per_kv_token(heads, *rest, expanded=expanded)
        pairs = rows * tokens * (tokens + 1.0) / 2.0 + self._extra_keys * rows * tokens
        compute = pairs * flops / (achieved(self.gpu, "attention_prefill_tflops").value * 1e6)
        read_us = achieved(self.gpu, "attention_decode_read_gbs").value * 1e3
        memory = rows * tokens * values * KV_BYTES[self.kv_dtype] / read_us
        return achieved(self.gpu, "attention_prefill_latency_us").value + np.maximum(compute, memory)

    def extend_attention_us(self, batch: BatchShape, own: BatchShape) -> float:
        """Return the time of attention of the extend rows of `own` in all layers that keep KV."""
        tokens, context, rows = own.extend_tokens, own.extend_context_tokens, own.extend_rows
        # The pairs of a shape are those of tokens with the tokens up to them; in both directions they are a square.
        pairs_all = 2 * own.extend_pairs - tokens if self._bidirectional else own.extend_pairs
        extra = self._extra_keys * tokens
        us = self._extend_latency_us
        us += self._full * max((pairs_all + extra) * self._pair_us, (context + tokens) * self._read_us)
        if self._expand_us:
            us += self._full * context * self._expand_us
        if self._sliding:
            pairs = min(pairs_all, tokens * self._window)
            keys = min(context, rows * self._window) + tokens
            us += self._sliding * max((pairs + extra) * self._pair_us, keys * self._read_us)
            us += self._sliding * max(own.extend_pairs * self._index_pair_us, (context + tokens) * self._index_read_us)
        return us

    def _bends_of_chunk(self, tokens: int) -> tuple[int, ...]:
        """Return the contexts at which the pairs or the keys of one extend row in a sliding layer stop growing."""
        if not self._sliding:
            return ()
        pairs_at = self._window - (tokens + 1) // 2  # of all pairs, `tokens` * (context + (tokens + 1) / 2)
        return pairs_at - 1, pairs_at, self._window

    # --- logits and sampling: a function of the sampled rows ----------------------------------------------------------

    def sampling_terms(self) -> Iterator[CostTerm]:
        """Yield the term of the logits GEMM, the gathering of logits from all ranks, and the draw.

        A model that computes prompts whole draws no tokens.
        """
        if self.model.whole is not None:
            return
        vocab, hidden, read = ceil_div(self.model.vocab, self.tp), self.model.hidden, Constants(self.gpu)
        memory_us = 1.0 / read.us_rate("weight_read_gbs", 1e3)
        latency_us = read.rate("bf16_gemm_latency_us")
        row_us = 2.0 * hidden * vocab / read.us_rate("bf16_gemm_tflops", 1e6)
        weights_us = hidden * vocab * ACTIVATION_BYTES * memory_us
        draw_row_us = read.note("sampling_passes", SAMPLING_PASSES) * self.model.vocab * LOGIT_BYTES * memory_us
        draw_us = read.note("sampling_fixed_us", SAMPLING_FIXED_US)
        shards, exchange = self.split.attention_dp, self.exchange

        def us(batch: BatchShape, own: BatchShape) -> float:
            rows = batch.sampled_rows
            head = latency_us + max(rows * row_us, weights_us)
            gather = self.all_reduce_us(rows * self.model.vocab * ACTIVATION_BYTES) / 2.0  # half an all-reduce
            if shards > 1:  # every rank multiplies the rows of all shards, and draws tokens for the rows of its own
                assert exchange is not None
                gather += exchange.gather_us(rows, self.tp)
                rows = ceil_div(rows, shards)
            return head + gather + draw_us + rows * draw_row_us

        yield CostTerm("logits_and_sampling", "sampled", us, read.read)

    # --- vectors and labels: a function of the prompts, which are whole -----------------------------------------------

    def head_terms(self) -> Iterator[CostTerm]:
        """Yield the term of pooling, and of the head of labels, of a model that computes prompts whole.

        Pooling is one kernel that reads the states of all tokens. A matrix of the head multiplies one row per prompt.
        """
        if self.model.whole is None:
            return
        read, hidden = Constants(self.gpu), self.model.hidden
        memory_us = 1.0 / read.us_rate("weight_read_gbs", 1e3)
        pooling_us, latency_us = read.rate("small_kernel_us"), read.rate("bf16_gemm_latency_us")
        flops_us = read.us_rate("bf16_gemm_tflops", 1e6)
        head = self.model.whole.head

        def us(batch: BatchShape, own: BatchShape) -> float:
            rows, total = own.extend_rows, pooling_us + own.extend_tokens * hidden * ACTIVATION_BYTES * memory_us
            for inputs, outputs in head:
                moved = (inputs * outputs + rows * (inputs + outputs)) * ACTIVATION_BYTES
                total += latency_us + max(2.0 * rows * inputs * outputs / flops_us, moved * memory_us)
            return total

        yield CostTerm("pooling_and_head", "extend", us, read.read, kernels=1 + len(head), chunk_bends=never)

    # --- adapters -----------------------------------------------------------------------------------------------------

    def lora_terms(self) -> Iterator[CostTerm]:
        """Yield the term of the products that adapters add.

        Its `us` raises CapacityError if the model has no LoraSpec.
        """
        lora = self.lora

        def us(batch: BatchShape, own: BatchShape) -> float:
            if lora is None:
                raise CapacityError(
                    f"{batch.adapter_tokens} tokens run on adapters, and this cost model has none\n"
                    "hint: give it a LoraSpec"
                )
            return lora.products_us(batch.adapter_tokens, batch.adapters)

        yield CostTerm(
            "lora", "adapters", us, {} if lora is None else lora.constants, 0 if lora is None else lora.kernels
        )


TERMS: tuple[Callable[[RooflineModel], Iterable[CostTerm]], ...] = (
    RooflineModel.matrix_terms,
    RooflineModel.layer_terms,
    RooflineModel.collective_terms,
    RooflineModel.attention_terms,
    RooflineModel.sampling_terms,
    RooflineModel.head_terms,
    RooflineModel.lora_terms,
)
"""The builders of all cost terms, in the order of summation. A new term is one more builder here."""


def long_row_tokens(shape: BatchShape) -> float:
    """Return the mean length in new tokens of extend rows, weighted by length; equal rows give their common length.

    A row behind a context is overestimated, because `extend_pairs` does not separate contexts from lengths. The
    result is at most the length of one row if all other rows had one token.
    """
    tokens = shape.extend_tokens
    squares = 2.0 * shape.extend_pairs - tokens  # sum of squared lengths, if no row has a context
    return min(squares / tokens, tokens - shape.extend_rows + 1.0)


def roofline_model(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int | Parallelism = 1,
    weights_dtype: WeightsDtype | None = None,
    kv_dtype: KvDtype = "bf16",
    graphs: Graphs = GRAPHS,
    fp8_activations: Fp8Activations = "auto",
    lora: LoraSpec | None = None,
) -> RooflineModel:
    """Build the roofline of `model` on one pipeline stage; `base_cost_model` builds several stages.

    Args:
        tp: GPUs of plain tensor parallelism, or the layout of the stage.
        weights_dtype: precision of the weights; None is that of the checkpoint.
        graphs: batches with extend rows, or with more decode rows than `graphs.rows_max`, are launched eagerly.
        fp8_activations: whether rows are rounded to fp8 for products with fp8 weights.
        lora: room for adapters; None: the model serves none.
    Raises: CatalogueError for a dtype that is not modelled, CapacityError for a split that is not possible.
    """
    weights, split = checked_weights_dtype(model, weights_dtype), parallelism_of(tp)
    if split.pp > 1:
        raise CapacityError(f"a roofline is of one stage, got pp {split.pp}\nhint: base_cost_model builds pipelines")
    return RooflineModel(model, gpu, split, Dtypes(weights, checked_kv_dtype(kv_dtype), fp8_activations), graphs, lora)
