"""How many tokens of KV fit beside the weights.

# 0 ......... weights ......... activations ........ runtime ........ KV pages ......... mem_fraction ... memory
# | per rank    | peak of one chunk  | context, NCCL   | what is left, whole pages only  | left to others
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.hardware import GpuSpec, all_reduce_of
from lockstep.sim.cost.models import (
    ACTIVATION_BYTES,
    KvDtype,
    LatentAttention,
    ModelSpec,
    WeightsDtype,
    checked_weights_dtype,
)

MIB = 2**20
RUNTIME_BYTES = 1024 * MIB  # estimate: CUDA context and libraries about 500 MiB, graphs and fragmentation as much
NCCL_BYTES = {
    2: 342 * MIB,
    4: 392 * MIB,
}  # ai-dynamo/aiconfigurator@095f58a5 systems/*.yaml, by number of GPUs, 4 and up
LOGITS_BYTES_PER_VALUE = 10  # bf16 logits, a float32 copy and float32 probabilities
CHUNK_TOKENS = 8192  # SGLang's chunked_prefill_size on 60 to 160 GB
SAMPLED_ROWS = 256  # rows whose logits exist at once: a full decode batch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """The memory of one GPU, divided. All bytes are per rank; `tokens` are those every rank can hold."""

    tokens: int
    pages: int
    page_tokens: int
    memory_bytes: int
    usable_bytes: int  # memory x mem_fraction
    weights_bytes: int
    activation_bytes: int
    runtime_bytes: int
    state_bytes: int  # linear-attention state of `state_rows` requests
    kv_bytes: int
    kv_bytes_per_token: int

    def describe(self) -> dict[str, Any]:
        """Return every figure, for a run's metrics.json."""
        return asdict(self)


def kv_capacity(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int = 1,
    mem_fraction: float = 0.9,
    page_tokens: int = 16,
    kv_dtype: KvDtype = "bf16",
    weights_dtype: WeightsDtype | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    sampled_rows: int = SAMPLED_ROWS,
    state_rows: int = SAMPLED_ROWS,
) -> KvCapacity:
    """Return the KV tokens that fit on `tp` GPUs. `mem_fraction` covers weights, activations and KV, as in vLLM.

    Every attention layer keeps every token: separate pools for sliding layers are not modelled.
    Raises: CapacityError with the numbers when nothing, or not one page, is left for KV.
    """
    if not 0.0 < mem_fraction <= 1.0:
        raise CapacityError(f"`mem_fraction` must be above 0 and at most 1, got `{mem_fraction}`")
    if page_tokens < 1:
        raise CapacityError(f"`page_tokens` must be at least 1, got `{page_tokens}`")
    if tp > 1:
        all_reduce_of(gpu, tp)  # raises beyond the scale-up domain
    weights = model.weights_bytes(checked_weights_dtype(model, weights_dtype), tp)
    activations = activation_bytes(model, tp, chunk_tokens, sampled_rows)
    runtime = RUNTIME_BYTES + (NCCL_BYTES[min(4, 2 if tp < 4 else 4)] if tp > 1 else 0)
    state = state_rows * model.state_bytes_per_request(tp)
    usable = int(gpu.memory_bytes * mem_fraction)
    per_token = model.kv_bytes_per_token(kv_dtype, tp)
    left = usable - weights - activations - runtime - state
    pages = left // (per_token * page_tokens) if per_token else 0
    if pages < 1:
        gb = 1e9
        parts = f"weights {weights / gb:.1f} + activations {activations / gb:.1f} + runtime {runtime / gb:.1f} GB"
        parts += f" + state of {state_rows} requests {state / gb:.1f} GB" if state else ""
        raise CapacityError(
            f"{model.name} does not fit on {tp} x {gpu.name}: per GPU {parts} = "
            f"{(usable - left) / gb:.1f} GB, of {usable / gb:.1f} GB usable "
            f"({mem_fraction:g} x {gpu.memory_bytes / gb:.1f} GB)\n"
            "hint: raise --tp, choose a GPU with more memory, or a smaller --weights-dtype"
        )
    return KvCapacity(
        tokens=pages * page_tokens,
        pages=pages,
        page_tokens=page_tokens,
        memory_bytes=gpu.memory_bytes,
        usable_bytes=usable,
        weights_bytes=weights,
        activation_bytes=activations,
        runtime_bytes=runtime,
        state_bytes=state,
        kv_bytes=pages * page_tokens * per_token,
        kv_bytes_per_token=per_token,
    )


def activation_bytes(model: ModelSpec, tp: int, chunk_tokens: int, sampled_rows: int) -> int:
    """Return the peak of one forward pass: the widest layer over the chunk, or the logits of the sampled rows."""
    a = model.attention
    if isinstance(a, LatentAttention):
        attention = a.q_rank + a.kv_rank + a.heads // tp * (2 * (a.nope_dim + a.rope_dim) + 2 * a.value_dim)
    else:
        attention = 2 * a.heads // tp * a.head_dim + model.kv_values_per_layer(tp)  # qkv and the attention's output
    feed_forward = 3 * model.ffn // tp  # gate and up, and their product
    if model.experts is not None:
        e = model.experts
        feed_forward = max(feed_forward, e.per_token * (3 * e.ffn // tp + model.hidden) + 3 * e.shared_ffn // tp)
    width = 2 * model.hidden + max(attention, feed_forward)  # residual and input stay alive throughout
    logits = sampled_rows * model.vocab * LOGITS_BYTES_PER_VALUE
    return max(chunk_tokens * width * ACTIVATION_BYTES, logits)
