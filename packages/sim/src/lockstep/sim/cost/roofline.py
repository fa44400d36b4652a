"""The roofline: microseconds of a batch from a model's matrices and a GPU's rates, operator by operator.

Each operator takes its kernel's latency plus the larger of compute time and memory time. What depends only on the
number of tokens (projections, experts, norms, all-reduce) is computed once per token count and remembered; what depends
on contexts (attention) is a few multiplications. docs/cost-models.md has one line per term, with its constants.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.exchange import Exchange
from lockstep.sim.cost.expert_balance import Spread, spread_of
from lockstep.sim.cost.experts import expected_max_load, expected_max_touched
from lockstep.sim.cost.hardware import AllReduce, Constant, GpuSpec, achieved, all_reduce_of
from lockstep.sim.cost.lora import LoraCost, LoraSpec
from lockstep.sim.cost.model import BatchShape, Duration
from lockstep.sim.cost.models import (
    ACTIVATION_BYTES,
    DELTA_CHUNK,
    KV_BYTES,
    WEIGHT_BYTES,
    AttentionShape,
    Fp8Activations,
    GatedDelta,
    KvDtype,
    LatentAttention,
    ModelSpec,
    WeightMatrix,
    WeightsDtype,
    ceil_div,
    checked_kv_dtype,
    checked_weights_dtype,
    products_in_fp8,
)
from lockstep.sim.cost.parallel import Parallelism, parallelism_of

Float64s = NDArray[np.float64]
Precision = Literal["bf16", "fp8"]

# Estimates, used as they are; a calibration replaces them.
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
LATENT_KERNELS = 8  # of one layer of latent attention: four GEMMs, attention, and small ones with the latents' norms

ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward

# Compute and latency of attention that decodes.
DECODE = ("attention_prefill_tflops", "attention_decode_latency_us")
LATENT_DECODE = ("latent_decode_tflops", "latent_decode_latency_us")

# Matrices by whose rows they see: those of a shard; with all-to-all, those of a rank; all others see the rows of all.
OF_SHARD = frozenset(("qkv_a", "q_b", "kv_b", "qkv", "o", "delta_qkvz", "delta_ba", "delta_o"))
OF_RANK = frozenset(("router", "shared_gate_up", "shared_down", "shared_gate"))


class RooflineModel:
    """Cost of a batch of one model on the GPUs of one stage, which has all its layers: see `stages.py` for several.

    Immutable but for a memo; no spread, for nothing was calibrated.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        split: Parallelism,
        weights_dtype: WeightsDtype,
        kv_dtype: KvDtype,
        cuda_graph: bool,
        graph_rows_max: int,
        fp8_activations: Fp8Activations = "auto",
        lora: LoraSpec | None = None,
    ) -> None:
        tp = split.tp
        self.model, self.gpu, self.tp, self.split = model, gpu, tp, split
        self.shards = split.attention_dp
        self.weights_dtype, self.kv_dtype = weights_dtype, kv_dtype
        self.fp8_activations = fp8_activations
        self.fp8_products = products_in_fp8(model, gpu, weights_dtype, fp8_activations)
        self.cuda_graph, self.graph_rows_max = cuda_graph, graph_rows_max
        self.constants: dict[str, Constant] = {}
        self.matrices = [m for m in model.matrices(split) if m.name != "embedding"]
        self.all_reduce: AllReduce | None = all_reduce_of(gpu, tp) if tp > 1 else None
        self.collectives = ALL_REDUCES_PER_LAYER * model.layers if tp > 1 else 0
        self._memory = 1.0 / self._us_rate("weight_read_gbs", 1e3)  # us per byte of weights and activations
        self._small_us = self._rate("small_kernel_us")
        self.exchange: Exchange | None = None  # None: all-reduces, if anything
        if split.attention_dp > 1 or split.moe_a2a:
            self.exchange = Exchange(
                model, gpu, split, fp8=self.fp8_products, rate=self._rate, all_reduce_us=self.all_reduce_us
            )
            self.collectives = self.exchange.calls
        self.spread: Spread | None = None if model.experts is None else spread_of(model.experts, split)
        self._moves_us = self._rebalancing_us() if split.eplb else 0.0  # once an interval
        self._even = split.ep == 1 and not split.expert_cv and self.exchange is None
        self._prepare_gemms()
        self._prepare_small()
        self._prepare_attention()
        self._prepare_sampling()
        self._tokens_us: dict[int, float] = {}
        self._sharded_us: dict[tuple[int, int], float] = {}
        self._sampling_us: dict[int, float] = {}
        kernels = sum(self._gemm_kernels.values()) + self._small_kernels
        kernels += model.attention_layers + self.collectives
        self.kernels = kernels
        eager_us = self._note("eager_kernel_us", EAGER_KERNEL_US)
        self._eager_floor_us = self.kernels * eager_us
        if isinstance(model.attention, LatentAttention):
            counted_us = LATENT_KERNELS * eager_us
            self._eager_floor_us += model.attention_layers * (
                self._note("latent_eager_us", LATENT_EAGER_US) - counted_us
            )
        self._fixed_us = self._note("forward_fixed_us", FORWARD_FIXED_US)
        self.lora = LoraCost(model, gpu, split, lora) if lora is not None else None
        self._eager_lora_us = 0.0 if self.lora is None else self.lora.kernels * eager_us

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of one forward pass and its sampling. The hot path: a few dozen float operations."""
        extend_tokens, decode_rows = shape.extend_tokens, shape.decode_rows
        tokens = extend_tokens + decode_rows + shape.draft_tokens
        if not tokens:
            return Duration(0.0)
        if self.shards > 1:
            return Duration(self._sharded_batch_us(shape))
        us = self._tokens_us.get(tokens)
        if us is None:
            us = self._tokens_us[tokens] = sum(self.tokens_terms_us(tokens).values())
        if decode_rows:
            us += self.decode_attention_us(decode_rows, shape.decode_context_tokens, shape.draft_tokens)
        if extend_tokens:
            us += self.extend_attention_us(shape)
        if self._delta_row_us:
            us += self.delta_us(shape)
        if shape.sampled_rows:
            sampling_us = self._sampling_us.get(shape.sampled_rows)
            us += self.sampling_us(shape.sampled_rows) if sampling_us is None else sampling_us
        if shape.adapter_tokens:
            return Duration(self.launched_us(shape, us + self.lora_us(shape)))
        # What follows is `launched_us`, without the call: this is asked once or twice a batch.
        graph = self.cuda_graph and not extend_tokens and decode_rows <= self.graph_rows_max
        if not graph and us < self._eager_floor_us:
            us = self._eager_floor_us
        return Duration(us + self._fixed_us)

    def _sharded_batch_us(self, shape: BatchShape) -> float:
        """The same where rows are spread over shards: everybody waits for the one with the most."""
        own = self.own_shape(shape)
        key = (
            shape.extend_tokens + shape.decode_rows + shape.draft_tokens,
            own.extend_tokens + own.decode_rows + own.draft_tokens,
        )
        us = self._sharded_us.get(key)
        if us is None:
            us = self._sharded_us[key] = sum(self.tokens_terms_us(*key).values())
        if own.decode_rows:
            us += self.decode_attention_us(own.decode_rows, own.decode_context_tokens, own.draft_tokens)
        if own.extend_tokens:
            us += self.extend_attention_us(own)
        if self._delta_row_us:
            us += self.delta_us(own)
        if shape.sampled_rows:
            us += self.sampling_us(shape.sampled_rows)
        return self.launched_us(shape, us)

    def own_shape(self, shape: BatchShape) -> BatchShape:
        """Return what the attention of the shard with the most rows sees: all of the batch where there is one shard."""
        if shape.own is not None:
            return shape.own
        return shape if self.shards == 1 else fullest_shard(shape, self.shards)

    def launched_us(self, shape: BatchShape, us: float) -> float:
        """Return the time of kernels that take `us`, launched as a graph or one by one: so are those with adapters."""
        if shape.adapter_tokens:
            return max(us, self._eager_floor_us + self._eager_lora_us) + self._fixed_us
        rows = shape.decode_rows if shape.own is None else shape.own.decode_rows  # each rank captures its own graphs
        graph = self.cuda_graph and not shape.extend_tokens and rows <= self.graph_rows_max
        if not graph and us < self._eager_floor_us:
            us = self._eager_floor_us
        return us + self._fixed_us

    def lora_us(self, shape: BatchShape) -> float:
        """Return the time of what adapters add to the products. Raises CapacityError where there is no room for any."""
        if self.lora is None:
            raise CapacityError(
                f"{shape.adapter_tokens} tokens run on adapters, and this cost model has none\nhint: give it a LoraSpec"
            )
        return self.lora.products_us(shape.adapter_tokens, shape.adapters)

    def collectives_us(self, tokens: int) -> float:
        """Return the part of `batch_us` that is communication between GPUs, logits aside, for so many tokens.

        Tokens are taken as evenly spread over shards here, whatever the rows are.
        """
        if self.all_reduce is None:
            return 0.0
        if self.exchange is not None:
            return sum(self.exchange.terms_us(tokens, ceil_div(tokens, self.shards)).values())
        return self.collectives * self.all_reduce_us(self.all_reduce_bytes(tokens))

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the same time split by operator; the values sum to `batch_us`."""
        tokens = shape.extend_tokens + shape.decode_rows + shape.draft_tokens
        if not tokens:
            return {}
        own = self.own_shape(shape)
        terms = self.tokens_terms_us(tokens, own.extend_tokens + own.decode_rows + own.draft_tokens)
        if own.decode_rows:
            terms["attention_decode"] = self.decode_attention_us(
                own.decode_rows, own.decode_context_tokens, own.draft_tokens
            )
        if own.extend_tokens:
            terms["attention_prefill"] = self.extend_attention_us(own)
        if self._delta_row_us:
            terms["linear_attention"] = self.delta_us(own)
        if shape.sampled_rows:
            terms["logits_and_sampling"] = self.sampling_us(shape.sampled_rows)
        if shape.adapter_tokens:
            terms["lora"] = self.lora_us(shape)
        terms["launch"] = self.batch_us(shape).mean_us - sum(terms.values())
        return terms

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
                "rebalancing_us": round(self._moves_us, 1),
            }
        if self.lora is not None:
            described["lora"] = self.lora.describe()
        if self.exchange is not None:
            described["all_gather"] = {str(gpus): asdict(line) for gpus, line in self.exchange.lines.items()}
        return described

    def _rows_named(self) -> bool:
        return self.weights_dtype == "fp8" and self.fp8_activations != "auto"

    # --- constants ----------------------------------------------------------------------------------------------------

    def _note(self, name: str, constant: Constant) -> float:
        self.constants[name] = constant
        return constant.value

    def _rate(self, name: str) -> float:
        return self._note(name, achieved(self.gpu, name))

    def _us_rate(self, name: str, per_us: float) -> float:
        """Return a rate per microsecond: 1e3 turns GB/s into bytes per us, 1e6 turns TFLOP/s into FLOPs per us."""
        return self._rate(name) * per_us

    # --- projections, experts, norms, all-reduce: functions of the number of tokens -----------------------------------

    def precision_of(self, m: WeightMatrix) -> Precision:
        """Return the precision a dense matrix is multiplied in: low-precision weights are widened where need be."""
        return "fp8" if self.fp8_products and m.kind == "linear" else "bf16"

    def gemm_us(self, precision: Precision, m: Float64s, k: Float64s, n: Float64s, weight_bytes: float) -> Float64s:
        """Return the time of GEMMs [m, k] x [k, n], each float64 [shapes]; what `tokens_terms_us` charges a matrix."""
        compute = 2.0 * m * k * n / (achieved(self.gpu, f"{precision}_gemm_tflops").value * 1e6)
        memory = (k * n * weight_bytes + m * (k + n) * ACTIVATION_BYTES) * self._memory
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
        """Return the time of the grouped GEMMs of one layer, each float64 [shapes]; what `tokens_terms_us` charges.

        With `ep` above 1: on the fullest of so many ranks; `cv` is that of the popularity of experts, 0: routing even.
        """
        low = self.fp8_products
        flops_us = achieved(self.gpu, "fp8_moe_tflops" if low else "bf16_moe_tflops").value * 1e6
        latency_us = achieved(self.gpu, "fp8_gemm_latency_us" if low else "bf16_gemm_latency_us").value
        touched = count * (1.0 - (1.0 - per_token / count) ** tokens)
        load = per_token * tokens
        if ep > 1:
            rows = list(zip(*(column.astype(int).tolist() for column in (tokens, per_token, count)), strict=True))
            load = np.array([expected_max_load(n * k, ep, c // ep, cv) for n, k, c in rows])
            touched = np.array([expected_max_touched(n, k, c, ep, cv) for n, k, c in rows])
        total = np.zeros_like(tokens)
        for inputs, outputs in ((hidden, 2.0 * ffn), (ffn, hidden)):
            compute = load * 2.0 * inputs * outputs / flops_us
            weights = touched * inputs * outputs * WEIGHT_BYTES[self.weights_dtype]["expert"] * self._memory
            memory = weights + load * (inputs + outputs) * ACTIVATION_BYTES * self._memory
            total += latency_us + np.maximum(compute, memory)
        return total

    def _prepare_gemms(self) -> None:
        """Work out, per matrix: layers, latency, us per token of compute, us of weights, us per token of memory."""
        weight_bytes = WEIGHT_BYTES[self.weights_dtype]
        low = self.fp8_products
        self.gemm_matrices: list[WeightMatrix] = []
        self._gemms: dict[str, tuple[int, float, float, float, float]] = {}
        self._gemm_kernels: dict[str, int] = {}
        for m in self.matrices:
            if m.kind == "expert" or m.name == "lm_head":
                continue
            self.gemm_matrices.append(m)
            precision = self.precision_of(m)
            latency = self._rate(f"{precision}_gemm_latency_us")
            flops_us = self._us_rate(f"{precision}_gemm_tflops", 1e6)
            self._gemms[m.name] = (
                m.count,
                latency,
                2.0 * m.inputs * m.outputs / flops_us,
                m.inputs * m.outputs * weight_bytes[m.kind] * self._memory,
                (m.inputs + m.outputs) * ACTIVATION_BYTES * self._memory,
            )
            self._gemm_kernels[m.name] = m.count
        self._expert_gemms: list[tuple[float, float, float]] = []
        experts = self.model.experts
        if experts is None:
            return
        flops_us = self._us_rate("fp8_moe_tflops" if low else "bf16_moe_tflops", 1e6)
        self._expert_latency_us = self._rate("fp8_gemm_latency_us" if low else "bf16_gemm_latency_us")
        for m in self.matrices:
            if m.kind == "expert":
                self._expert_gemms.append(
                    (
                        experts.per_token * 2.0 * m.inputs * m.outputs / flops_us,
                        m.inputs * m.outputs * weight_bytes["expert"] * self._memory,
                        experts.per_token * (m.inputs + m.outputs) * ACTIVATION_BYTES * self._memory,
                    )
                )
                self._gemm_kernels[m.name] = self.model.moe_layers

    def _prepare_small(self) -> None:
        """Work out the number of small kernels, and their bytes per token: those of own rows, and those of all."""
        model, tp, heads_tp = self.model, self.tp, self.split.attention_tp
        hidden = model.hidden
        kernels = model.layers * model.norms_per_layer * NORM_KERNELS
        values = model.layers * model.norms_per_layer * 4 * hidden  # read input and residual, write both
        a = model.attention
        if isinstance(a, LatentAttention):
            kernels += model.attention_layers * (ATTENTION_SMALL_KERNELS + 1)  # and the norms of the two latents
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
        dense_values = model.dense_layers * 3 * model.ffn // tp
        expert_values = 0
        if model.experts is not None:
            e = model.experts
            kernels += model.moe_layers * (
                ACTIVATION_KERNELS + EXPERT_KERNELS + (ACTIVATION_KERNELS if e.shared_ffn else 0)
            )
            width = e.per_token * e.ffn + e.shared_ffn
            expert_values = model.moe_layers * (3 * width // tp + (e.per_token + 1) * hidden)
        self._small_kernels = kernels
        self._small_token_us = (values + dense_values + expert_values) * ACTIVATION_BYTES * self._memory
        self._small_own_us = values * ACTIVATION_BYTES * self._memory  # per token of the shard
        self._small_dense_us = dense_values * ACTIVATION_BYTES * self._memory  # per token of all

    def _small_experts_us(self, tokens: int, rows: int, load: float) -> float:
        """Sorting rows by expert, activations and the sum over experts, where ranks do not all do the same.

        Without all-to-all every rank sorts and sums the rows of all, as grouped kernels do.
        """
        e, split, hidden = self.model.experts, self.split, self.model.hidden
        assert e is not None
        if split.moe_a2a:
            values = rows * (hidden + 3 * e.shared_ffn) + load * (3 * e.ffn + hidden)
        else:
            values = tokens * ((e.per_token + 1) * hidden + 3 * e.shared_ffn / self.tp)
            values += load * 3 * e.ffn / split.expert_tp
        return self.model.moe_layers * values * ACTIVATION_BYTES * self._memory

    def tokens_terms_us(self, tokens: int, own_tokens: int | None = None) -> dict[str, float]:
        """Return the time of what depends only on the number of tokens, by operator.

        `own_tokens` are those of the shard with the most, where there are shards.
        """
        if not self._even:
            return self._split_terms_us(tokens, tokens if own_tokens is None else own_tokens)
        terms = {
            name: count * (latency + max(tokens * compute, weights + tokens * memory))
            for name, (count, latency, compute, weights, memory) in self._gemms.items()
        }
        if self.model.experts is not None:
            touched = self.model.experts.touched(tokens)
            terms["experts"] = self.model.moe_layers * sum(
                self._expert_latency_us + max(tokens * compute, touched * weights + tokens * memory)
                for compute, weights, memory in self._expert_gemms
            )
        terms["small_kernels"] = self._small_kernels * self._small_us + tokens * self._small_token_us
        if self.all_reduce is not None:
            terms["all_reduce"] = self.collectives_us(tokens)
        return terms

    def _split_terms_us(self, tokens: int, own_tokens: int) -> dict[str, float]:
        """The same where ranks differ: by the rows they have, or by the experts."""
        split, e = self.split, self.model.experts
        rows = ceil_div(own_tokens, split.attention_tp)  # of one rank, of those its shard has
        terms = {}
        for name, (count, latency, compute, weights, memory) in self._gemms.items():
            seen = own_tokens if name in OF_SHARD else rows if split.moe_a2a and name in OF_RANK else tokens
            terms[name] = count * (latency + max(seen * compute, weights + seen * memory))
        terms["small_kernels"] = self._small_kernels * self._small_us
        terms["small_kernels"] += own_tokens * self._small_own_us + tokens * self._small_dense_us
        if e is not None:
            assert self.spread is not None
            slots, load_cv, slot_cv = self.spread.slots, self.spread.load_cv, self.spread.slot_cv
            load = expected_max_load(tokens * e.per_token, split.ep, slots // split.ep, load_cv)
            touched = expected_max_touched(tokens, e.per_token, slots, split.ep, slot_cv)
            seen_by_all = load / e.per_token  # the fullest rank is as busy as all together are with so many tokens
            terms["experts"] = self.model.moe_layers * sum(
                self._expert_latency_us + max(seen_by_all * compute, touched * weights + seen_by_all * memory)
                for compute, weights, memory in self._expert_gemms
            )
            terms["small_kernels"] += self._small_experts_us(tokens, rows, load)
            if self._moves_us:
                terms["expert_moves"] = self._moves_us / split.eplb_interval
        if self.exchange is not None:
            terms |= self.exchange.terms_us(tokens, own_tokens)
        elif self.all_reduce is not None:
            terms["all_reduce"] = self.collectives_us(tokens)
        return terms

    @property
    def expert_bytes(self) -> float:
        """Bytes of the weights of one expert of one layer, on one of the GPUs that share its width."""
        e = self.model.experts
        assert e is not None
        width = ceil_div(e.ffn, self.split.expert_tp)
        return 3.0 * self.model.hidden * width * WEIGHT_BYTES[self.weights_dtype]["expert"]

    @property
    def moved_bytes(self) -> float:
        """Bytes that the GPU with the most of them fetches at a rebalancing, all layers together; 0 without EPLB."""
        return self.spread.fetched * self.model.moe_layers * self.expert_bytes if self.spread is not None else 0.0

    def _rebalancing_us(self) -> float:
        """Fetching experts between two passes: nothing else runs meanwhile, and senders are taken as not in the way."""
        return self.moved_bytes / self._us_rate("send_gbs", 1e3)

    def all_reduce_bytes(self, tokens: int) -> int:
        """Return the size of one all-reduce for a batch of so many tokens."""
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
        """Work out microseconds per query-key pair and per KV token, for all layers of a kind together."""
        model, tp, a = self.model, self.split.attention_tp, self.model.attention
        flops_us = self._us_rate("attention_prefill_tflops", 1e6)
        read_us = self._us_rate("attention_decode_read_gbs", 1e3)
        heads = a.heads // tp
        kv_bytes = model.kv_values_per_layer(tp) * KV_BYTES[self.kv_dtype]
        if isinstance(a, LatentAttention):
            # Prefill expands the latent to keys and values per head; decode stays in the latent ("absorbed").
            pair_flops = 2.0 * heads * (a.nope_dim + a.rope_dim + a.value_dim)
            decode_flops = 2.0 * heads * (2 * a.kv_rank + a.rope_dim)
            decode_flops_us = self._us_rate("latent_decode_tflops", 1e6)
            decode_latency_us = self._rate("latent_decode_latency_us")
            expand_us = self._gemms["kv_b"][2]
        else:
            pair_flops = decode_flops = 4.0 * heads * a.head_dim
            decode_flops_us, decode_latency_us = flops_us, self._rate("attention_decode_latency_us")
            expand_us = 0.0
        self._pair_us = pair_flops / flops_us
        self._read_us = kv_bytes / read_us
        self._decode_query_us = decode_flops / decode_flops_us
        self._decode_token_us = max(self._read_us, self._decode_query_us)
        self._expand_us = expand_us  # per context token and layer: keys and values of earlier chunks, once more
        self._extra_keys = self._rate("attention_prefill_extra_keys")
        self._decode_latency_us = model.attention_layers * decode_latency_us
        self._extend_latency_us = model.attention_layers * self._rate("attention_prefill_latency_us")
        self._full, self._sliding = model.full_layers, model.sliding_layers
        self._window = a.window if isinstance(a, AttentionShape) else 0
        self._delta_row_us = 0.0
        if model.delta is not None:
            self._prepare_delta(model.delta)

    def _prepare_delta(self, d: GatedDelta) -> None:
        """Work out the gated delta rule of all linear layers together.

        A prompt goes through a row of kernels: inverses within chunks of DELTA_CHUNK tokens, then states from chunk to
        chunk, then outputs. So there is a latency, a time per chunk of a request, whose chunks follow one another, and
        work that all tokens and heads share the GPU for. While it is little, it stays in the cache and costs nothing.
        """
        layers, tp = self.model.linear_layers, self.split.attention_tp
        state_us = 2 * d.state_bytes / tp * self._memory  # read and written
        self._delta_row_us = layers * state_us
        head_us = d.chunk_flops / self._us_rate("delta_rule_tflops", 1e6)
        self._delta_token_us = layers * d.value_heads / tp * head_us
        self._delta_cached_tokens = self._rate("delta_rule_cached_token_heads") / (d.value_heads / tp)
        self._delta_latency_us = layers * self._rate("delta_rule_latency_us")
        self._delta_chunk_us = layers * self._rate("delta_rule_chunk_us")

    def decode_attention_us(self, rows: int, context_tokens: int, draft_tokens: int = 0) -> float:
        """Return the time of attention in all layers that keep KV, for rows that decode; see `delta_us`.

        Rows that verify drafts read their KV once for all their queries.
        """
        token_us = self._decode_token_us
        if draft_tokens:
            token_us = max(self._read_us, self._decode_query_us * (rows + draft_tokens) / rows)
        us = self._decode_latency_us + self._full * context_tokens * token_us
        if self._sliding:
            # Sums hide which rows are longer than the window: exact if all or none are, otherwise too high.
            us += self._sliding * min(context_tokens, rows * self._window) * token_us
        return us

    def delta_us(self, shape: BatchShape) -> float:
        """Return the time of linear attention in all its layers."""
        us = shape.decode_rows * self._delta_row_us + shape.draft_tokens * self._delta_token_us
        if shape.extend_tokens:
            tokens = shape.extend_tokens
            us += self._delta_latency_us + shape.extend_rows * self._delta_row_us
            us += max(1.0, long_row_tokens(shape) / DELTA_CHUNK) * self._delta_chunk_us
            us += max(0.0, tokens - self._delta_cached_tokens) * self._delta_token_us
        return us

    def _per_kv_token(self, heads: Float64s, *rest: Float64s, expanded: bool) -> tuple[Float64s, Float64s]:
        """Return values read, and FLOPs of one query, per token of KV in one layer; float64 [shapes] both.

        MLA, which has no `rest`, computes in the latent unless `expanded`.
        """
        if rest:
            kv_heads, head_dim = rest
            return 2.0 * kv_heads * head_dim, 4.0 * heads * head_dim
        a = self.model.attention
        assert isinstance(a, LatentAttention)
        width = a.nope_dim + a.rope_dim + a.value_dim if expanded else 2 * a.kv_rank + a.rope_dim
        return np.full_like(heads, a.kv_rank + a.rope_dim), 2.0 * heads * width

    def one_layer_decode_us(self, tokens: Float64s, heads: Float64s, *rest: Float64s) -> Float64s:
        """Return the time of one layer that reads `tokens` of KV in all, each float64 [shapes].

        `rest` is the number of KV heads and the head's size, for attention that has them.
        """
        values, flops = self._per_kv_token(heads, *rest, expanded=False)
        read_us = achieved(self.gpu, "attention_decode_read_gbs").value * 1e3
        flops_us, latency_us = (achieved(self.gpu, name).value for name in (LATENT_DECODE if not rest else DECODE))
        per_token = np.maximum(values * KV_BYTES[self.kv_dtype] / read_us, flops / (flops_us * 1e6))
        return latency_us + tokens * per_token

    def one_layer_extend_us(
        self, rows: Float64s, tokens: Float64s, heads: Float64s, *rest: Float64s, expanded: bool = True
    ) -> Float64s:
        """Return the time of one layer over `rows` prompts of `tokens` each, each float64 [shapes].

        MLA with `expanded` False is that of a kernel that stays in the latent, which `batch_us` never charges.
        """
        values, flops = self._per_kv_token(heads, *rest, expanded=expanded)
        pairs = rows * tokens * (tokens + 1.0) / 2.0 + self._extra_keys * rows * tokens
        compute = pairs * flops / (achieved(self.gpu, "attention_prefill_tflops").value * 1e6)
        read_us = achieved(self.gpu, "attention_decode_read_gbs").value * 1e3
        memory = rows * tokens * values * KV_BYTES[self.kv_dtype] / read_us
        return achieved(self.gpu, "attention_prefill_latency_us").value + np.maximum(compute, memory)

    def extend_attention_us(self, shape: BatchShape) -> float:
        """Return the time of attention in all layers that keep KV, for rows that extend; see `delta_us`."""
        tokens, context, rows = shape.extend_tokens, shape.extend_context_tokens, shape.extend_rows
        extra = self._extra_keys * tokens
        us = self._extend_latency_us
        us += self._full * max((shape.extend_pairs + extra) * self._pair_us, (context + tokens) * self._read_us)
        if self._expand_us:
            us += self._full * context * self._expand_us
        if self._sliding:
            pairs = min(shape.extend_pairs, tokens * self._window)
            keys = min(context, rows * self._window) + tokens
            us += self._sliding * max((pairs + extra) * self._pair_us, keys * self._read_us)
        return us

    # --- logits and sampling: a function of the sampled rows ----------------------------------------------------------

    def _prepare_sampling(self) -> None:
        vocab = ceil_div(self.model.vocab, self.tp)
        hidden = self.model.hidden
        self._head_latency_us = self._rate("bf16_gemm_latency_us")
        self._head_row_us = 2.0 * hidden * vocab / self._us_rate("bf16_gemm_tflops", 1e6)
        self._head_weights_us = hidden * vocab * ACTIVATION_BYTES * self._memory
        passes = self._note("sampling_passes", SAMPLING_PASSES)
        self._draw_row_us = passes * self.model.vocab * LOGIT_BYTES * self._memory
        self._draw_fixed_us = self._note("sampling_fixed_us", SAMPLING_FIXED_US)

    def sampling_us(self, rows: int) -> float:
        """Return the time of logits and sampling for so many rows; remembered."""
        us = self._sampling_us.get(rows)
        if us is None:
            us = self._sampling_us[rows] = self._sampling_terms_us(rows)
        return us

    def _sampling_terms_us(self, rows: int) -> float:
        """Return the logits GEMM, the gathering of logits from all ranks, and the draw."""
        head = self._head_latency_us + max(rows * self._head_row_us, self._head_weights_us)
        gather = self.all_reduce_us(rows * self.model.vocab * ACTIVATION_BYTES) / 2.0  # an all-gather is half of one
        if self.shards > 1:  # every rank multiplies the rows of all, and draws for its own
            assert self.exchange is not None
            gather += self.exchange.gather_us(rows, self.tp)
            rows = ceil_div(rows, self.shards)
        return head + gather + self._draw_fixed_us + rows * self._draw_row_us


def long_row_tokens(shape: BatchShape) -> float:
    """Return the new tokens of the row that an average new token is in: those of each row if they are equally long.

    Rows behind a context look longer, for sums do not tell contexts from lengths; at most one row has all tokens.
    """
    tokens = shape.extend_tokens
    squares = 2.0 * shape.extend_pairs - tokens  # without contexts, of the rows' lengths, summed
    return min(squares / tokens, tokens - shape.extend_rows + 1.0)


def fullest_shard(shape: BatchShape, shards: int) -> BatchShape:
    """Return the part of a batch on the shard with the most rows: rows are spread evenly, and taken as equally long."""
    extends, decodes = ceil_div(shape.extend_rows, shards), ceil_div(shape.decode_rows, shards)

    def of_extends(total: int) -> int:
        return ceil_div(total * extends, shape.extend_rows) if extends else 0

    return BatchShape(
        extend_rows=extends,
        extend_tokens=of_extends(shape.extend_tokens),
        extend_context_tokens=of_extends(shape.extend_context_tokens),
        extend_pairs=of_extends(shape.extend_pairs),
        decode_rows=decodes,
        decode_context_tokens=ceil_div(shape.decode_context_tokens * decodes, shape.decode_rows) if decodes else 0,
        sampled_rows=ceil_div(shape.sampled_rows, shards),
        draft_tokens=ceil_div(shape.draft_tokens * decodes, shape.decode_rows) if decodes else 0,
    )


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int | Parallelism = 1,
    weights_dtype: WeightsDtype | None = None,
    kv_dtype: KvDtype = "bf16",
    cuda_graph: bool = True,
    graph_rows_max: int = GRAPH_ROWS_MAX,
    fp8_activations: Fp8Activations = "auto",
    lora: LoraSpec | None = None,
) -> RooflineModel:
    """Build the roofline of `model` on `tp` GPUs, or on one stage laid out as said; `base_cost_model` builds several.

    `weights_dtype` None is the checkpoint's own. `fp8_activations` is whether fp8 weights meet rows in fp8. `lora` is
    the room for adapters, of models that serve any.

    Batches with extend rows, or with more than `graph_rows_max` decode rows, are launched eagerly.
    Raises: CatalogueError for a dtype that is not modelled, CapacityError for a split that is not possible.
    """
    weights, split = checked_weights_dtype(model, weights_dtype), parallelism_of(tp)
    if split.pp > 1:
        raise CapacityError(f"a roofline is of one stage, got pp {split.pp}\nhint: base_cost_model builds pipelines")
    kv = checked_kv_dtype(kv_dtype)
    return RooflineModel(model, gpu, split, weights, kv, cuda_graph, graph_rows_max, fp8_activations, lora)
