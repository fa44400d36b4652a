"""KV capacity: the tokens of KV that fit beside the weights.

# 0 ......... weights ......... activations ........ runtime ........ KV pages ......... mem_fraction ... memory
# | per rank    | peak of one chunk  | context, NCCL   | the rest, in whole pages        | not used
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.expert_balance import spread_of
from lockstep.sim.cost.experts import expected_max_load
from lockstep.sim.cost.hardware import GpuSpec, all_reduce_of
from lockstep.sim.cost.lora import LoraSpec, slot_bytes
from lockstep.sim.cost.models import (
    ACTIVATION_BYTES,
    KvDtype,
    LatentAttention,
    ModelSpec,
    WeightsDtype,
    ceil_div,
    checked_weights_dtype,
)
from lockstep.sim.cost.parallel import Parallelism, parallelism_of
from lockstep.sim.cost.stages import Stage, stages_of

MIB = 2**20
RUNTIME_BYTES = 1024 * MIB  # estimate: CUDA context and libraries about 500 MiB, graphs and fragmentation as much
NCCL_BYTES = {  # ai-dynamo/aiconfigurator@095f58a5 systems/*.yaml, by number of GPUs
    2: 342 * MIB,
    4: 392 * MIB,  # 4 GPUs or more
}
LOGITS_BYTES_PER_VALUE = 10  # bf16 logits, a float32 copy and float32 probabilities
CHUNK_TOKENS = 8192  # SGLang's chunked_prefill_size on 60 to 160 GB
SAMPLED_ROWS = 256  # rows with logits in memory at once: a full decode batch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """The memory of one GPU by use, in bytes per rank. `tokens` and `pages` are the capacity of the whole engine.

    With several stages the figures are those of the stage with the least room for KV, which limits the engine.
    """

    tokens: int
    pages: int
    page_tokens: int
    memory_bytes: int
    usable_bytes: int  # memory x mem_fraction
    weights_bytes: int
    activation_bytes: int
    runtime_bytes: int
    state_bytes: int  # linear-attention state of `state_rows` requests, or of one shard's part of them
    kv_bytes: int
    kv_bytes_per_token: int
    shards: int = 1  # shards of attention data parallelism; one shard has the KV of a token
    stages_weights_bytes: tuple[int, ...] = ()  # weights of each stage; empty with one stage
    stages_left_bytes: tuple[int, ...] = ()  # room for KV of each stage; empty with one stage, not in `describe`
    window_pages: int = 0  # pages of a separate pool of sliding layers; if above 0, `kv_bytes` covers both pools
    window_bytes_per_token: int = 0  # KV of sliding layers in that pool; `kv_bytes_per_token` is then of full layers
    state_slots: int = 0  # state slots if checkpoints are kept; `state_bytes` then covers all slots
    state_bytes_per_request: int = 0

    @property
    def shard_tokens(self) -> int:
        """Tokens of one shard, which is the most that a single request can have."""
        return self.tokens // self.shards

    def describe(self) -> dict[str, Any]:
        """Return every figure, for a run's metrics.json."""
        described = asdict(self)
        del described["stages_left_bytes"]
        if self.shards == 1:
            del described["shards"]
        if not self.stages_weights_bytes:
            del described["stages_weights_bytes"]
        for pool, size in (("window_pages", "window_bytes_per_token"), ("state_slots", "state_bytes_per_request")):
            if not described[pool]:
                del described[pool], described[size]
        return described


class StageBytes(NamedTuple):
    """Bytes on each GPU of a stage besides its layers of the language model."""

    weights: int = 0
    activations: int = 0
    kv_per_token: int = 0  # KV of the drafter, in the same pages

    def plus(self, other: StageBytes) -> StageBytes:
        """Return the bytes of both."""
        return StageBytes(*(own + more for own, more in zip(self, other, strict=True)))


NOTHING = StageBytes()


class MemoryNeeds(NamedTuple):
    """The memory needs of an engine besides the weights and the KV of its model."""

    chunk_tokens: int = CHUNK_TOKENS  # new tokens of the largest pass
    sampled_rows: int = SAMPLED_ROWS
    state_rows: int = SAMPLED_ROWS  # requests with a state of linear attention
    lora: LoraSpec | None = None
    first_stage: StageBytes = NOTHING
    last_stage: StageBytes = NOTHING  # used with several stages only

    def beside(self, stage: Stage) -> StageBytes:
        """Return the bytes on each GPU of a stage besides its layers."""
        return self.first_stage if stage.is_first else self.last_stage if stage.is_last else NOTHING


USUAL_NEEDS = MemoryNeeds()


def kv_capacity(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int | Parallelism = 1,
    mem_fraction: float = 0.9,
    page_tokens: int = 16,
    kv_dtype: KvDtype = "bf16",
    weights_dtype: WeightsDtype | None = None,
    needs: MemoryNeeds = USUAL_NEEDS,
) -> KvCapacity:
    """Return the KV tokens that fit on the GPUs. `mem_fraction` covers weights, activations and KV, as in vLLM.

    Every attention layer keeps every token: separate pools for sliding layers are not modelled here. With attention
    data parallelism each shard has its own KV, and the engine's capacity is their sum. With several stages the stage
    with the fewest pages limits the engine. Slots for adapters (`needs.lora`) count as weights, as in the runtime's
    memory table.
    Raises: CapacityError with the numbers if less than one page is left for KV.
    """
    if not 0.0 < mem_fraction <= 1.0:
        raise CapacityError(f"`mem_fraction` must be above 0 and at most 1, got `{mem_fraction}`")
    if page_tokens < 1:
        raise CapacityError(f"`page_tokens` must be at least 1, got `{page_tokens}`")
    split = parallelism_of(tp)
    if split.tp > 1:
        all_reduce_of(gpu, split.tp)  # raises if scale-up domains are filled in part
    dtype = checked_weights_dtype(model, weights_dtype)
    room = _Room(gpu, split, mem_fraction, page_tokens, kv_dtype, needs)
    stages = stages_of(model, split)
    found = [room.of(stage, number, dtype) for number, stage in enumerate(stages, 1)]
    tightest = min(found, key=lambda one: one.pages)
    if len(found) == 1:
        return tightest
    taken = (one.weights_bytes + one.activation_bytes + one.runtime_bytes + one.state_bytes for one in found)
    left = tuple(tightest.usable_bytes - bytes_taken for bytes_taken in taken)
    return replace(tightest, stages_weights_bytes=tuple(one.weights_bytes for one in found), stages_left_bytes=left)


UNBOUNDED_PAGES = 2**40  # capacity of a stage, or a model, without layers that keep KV


@dataclass(frozen=True, slots=True)
class _Room:
    """The settings that all stages share when their memory is divided."""

    gpu: GpuSpec
    split: Parallelism
    mem_fraction: float
    page_tokens: int
    kv_dtype: KvDtype
    needs: MemoryNeeds

    def of(self, stage: Stage, number: int, dtype: WeightsDtype) -> KvCapacity:
        """Return the capacity of one stage; `pages` is that of the engine if this stage limits it.

        Args:
            number: position of the stage, from 1, for the error message.
        """
        model, gpu, split, needs = stage.model, self.gpu, self.split, self.needs
        beside, lora = needs.beside(stage), needs.lora
        slots = 0 if lora is None else lora.slots * slot_bytes(model, replace(split, pp=1), lora)
        weights = stage.weights_bytes(dtype, split) + beside.weights + slots
        activations = activation_bytes(model, split, needs.chunk_tokens, needs.sampled_rows if stage.is_last else 0)
        activations += beside.activations
        runtime = RUNTIME_BYTES + (NCCL_BYTES[2 if split.gpus < 4 else 4] if split.gpus > 1 else 0)
        state_rows = ceil_div(needs.state_rows, split.attention_dp)
        state = state_rows * model.state_bytes_per_request(split)
        usable = int(gpu.memory_bytes * self.mem_fraction)
        per_token = model.kv_bytes_per_token(self.kv_dtype, split) + beside.kv_per_token
        left = usable - weights - activations - runtime - state
        pages = left // (per_token * self.page_tokens) if per_token else 0
        if not per_token and (split.pp > 1 or model.whole is not None) and left >= 0:
            pages = UNBOUNDED_PAGES
        if pages < 1:
            gb = 1e9
            room = f" + room for adapters {slots / gb:.1f}" if slots else ""
            drafter = beside.weights if beside.kv_per_token else 0
            room += f" + drafter {drafter / gb:.1f}" if drafter else ""
            parts = f"weights {(weights - slots - drafter) / gb:.1f}{room} + activations {activations / gb:.1f}"
            parts += f" + runtime {runtime / gb:.1f} GB"
            parts += f" + state of {state_rows} requests {state / gb:.1f} GB" if state else ""
            where = "" if split.is_plain else f" with {split}"
            where += f" (stage {number} of {split.pp})" if split.pp > 1 else ""
            raise CapacityError(
                f"{model.name} does not fit on {split.gpus} x {gpu.name}{where}: per GPU {parts} = "
                f"{(usable - left) / gb:.1f} GB, of {usable / gb:.1f} GB usable "
                f"({self.mem_fraction:g} x {gpu.memory_bytes / gb:.1f} GB)\n"
                f"hint: {'lower --max-loras or --max-lora-rank, ' if slots else ''}"
                f"{'choose a smaller drafter, ' if drafter else ''}"
                "raise --tp, choose a GPU with more memory, or a smaller --weights-dtype"
            )
        return KvCapacity(
            tokens=pages * self.page_tokens * split.attention_dp,
            pages=pages * split.attention_dp,
            page_tokens=self.page_tokens,
            memory_bytes=gpu.memory_bytes,
            usable_bytes=usable,
            weights_bytes=weights,
            activation_bytes=activations,
            runtime_bytes=runtime,
            state_bytes=state,
            kv_bytes=pages * self.page_tokens * per_token,
            kv_bytes_per_token=per_token,
            shards=split.attention_dp,
        )


def activation_bytes(model: ModelSpec, tp: int | Parallelism, chunk_tokens: int, sampled_rows: int) -> int:
    """Return the peak bytes of one forward pass: the widest layer over the chunk, or the logits of the sampled rows.

    Each shard has its part of the chunk in attention, and the rows of all shards in the feed-forward. Without
    all-to-all, grouped kernels allocate room for the assignments of all ranks. All-to-all kernels exchange the number
    of assignments first and allocate only those of the rank.
    """
    split, a = parallelism_of(tp), model.attention
    tp, heads_tp = split.tp, split.attention_tp
    if isinstance(a, LatentAttention):
        attention = a.q_rank + a.kv_rank + a.heads // heads_tp * (2 * (a.nope_dim + a.rope_dim) + 2 * a.value_dim)
    else:  # qkv and the attention's output
        attention = 2 * a.heads // heads_tp * a.head_dim + model.kv_values_per_layer(heads_tp)
    feed_forward = 3 * model.ffn // tp  # gate and up, and their product
    logits = 0 if model.whole is not None else sampled_rows * model.vocab * LOGITS_BYTES_PER_VALUE
    if model.experts is not None and split.ep == 1 and not split.moe_a2a:
        e = model.experts
        feed_forward = max(feed_forward, e.per_token * (3 * e.ffn // tp + model.hidden) + 3 * e.shared_ffn // tp)
    if split.attention_dp == 1 and split.ep == 1:
        width = 2 * model.hidden + max(attention, feed_forward)  # residual and input stay alive throughout
        return max(chunk_tokens * width * ACTIVATION_BYTES, logits)
    own = ceil_div(chunk_tokens, split.attention_dp)
    peak = chunk_tokens * feed_forward
    if model.experts is not None and split.ep > 1:
        e = model.experts
        rows = float(chunk_tokens * e.per_token)
        if split.moe_a2a:
            spread = spread_of(e, split)
            rows = expected_max_load(chunk_tokens * e.per_token, split.ep, spread.slots // split.ep, spread.load_cv)
        routed = rows * (3 * e.ffn / split.expert_tp + model.hidden)
        shared = ceil_div(own, heads_tp) * 3 * e.shared_ffn if split.moe_a2a else chunk_tokens * 3 * e.shared_ffn // tp
        peak = max(peak, int(routed) + shared)
    gathered = chunk_tokens * model.hidden if split.attention_dp > 1 else 0
    values = own * 2 * model.hidden + max(own * attention, gathered + peak)
    return max(values * ACTIVATION_BYTES, logits)
