"""LoRA: the time that adapters add to the products of a pass, and the bytes of a slot and of a load.

The layout is that of the runtime (`lockstep.runtime.lora.slots`): each slot has room for every target at the largest
rank, matrices that read the same input form one product, and adapters run in two kinds of kernel:

    shrink   inner [tokens, parts * rank]    = down[slot] x          one launch for each product of each layer
    expand   out [tokens, outputs of a part] += up[slot] inner       one launch for each part

Tokens of one adapter form one product wherever they are in the batch, so the matrices of each adapter of a batch are
read once. Rows of `up` are split over ranks like the rows of the product, and columns of `down` like its columns, so
adapters add no collective. Tokens without an adapter cost nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lockstep.sim.cost.errors import CapacityError, CatalogueError
from lockstep.sim.cost.hardware import Constant, GpuSpec, achieved
from lockstep.sim.cost.models import ACTIVATION_BYTES, LatentAttention, ModelSpec, ceil_div, check_split
from lockstep.sim.cost.parallel import Parallelism

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_RANK = 16  # default rank of the slots, as in the server
LORA_RANK_MAX = 512
TILE_TOKENS = 16  # smallest tile of tensor cores: an adapter with one token computes as many
TILE_RANK = 16


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Room for adapters on the device: number of slots, rank, and matrices."""

    slots: int
    rank: int = LORA_RANK
    targets: tuple[str, ...] = TARGETS


class Product(NamedTuple):
    """The targets that read the same input: one product in each of `layers` layers, on one rank."""

    name: str
    layers: int
    inputs: int
    sizes: tuple[int, ...]  # outputs of each part

    def slot_values(self, rank: int) -> int:
        """Return the numbers of one slot in one layer: `down` [parts * rank, inputs] and `up` [outputs, rank]."""
        return rank * (len(self.sizes) * self.inputs + sum(self.sizes))


def products_of(model: ModelSpec, split: Parallelism, targets: tuple[str, ...]) -> tuple[Product, ...]:
    """Return the products that adapters change on one rank. Experts and linear-attention layers have no adapters.

    Raises: CatalogueError for latent attention, which has other matrices.
    """
    check_split(model, split)
    a = model.attention
    if isinstance(a, LatentAttention):
        raise CatalogueError(
            f"{model.name} has latent attention, with other matrices than {', '.join(TARGETS)}: adapters of it are "
            "not priced\nhint: leave out --adapters"
        )
    hidden, tp, heads_tp = model.hidden, split.tp, split.attention_tp
    query, key = a.heads // heads_tp * a.head_dim, ceil_div(a.kv_heads, heads_tp) * a.head_dim
    ffn = ceil_div(model.ffn, tp)
    outputs = {
        "q_proj": query * (2 if a.gated else 1), "k_proj": key, "v_proj": key, "o_proj": hidden,
        "gate_proj": ffn, "up_proj": ffn, "down_proj": hidden,
    }  # fmt: skip
    groups = (
        ("lora_qkv", model.attention_layers, hidden, TARGETS[:3]),
        ("lora_o", model.attention_layers, query, TARGETS[3:4]),
        ("lora_gate_up", model.dense_layers, hidden, TARGETS[4:6]),
        ("lora_down", model.dense_layers, ffn, TARGETS[6:]),
    )
    found = []
    for name, layers, inputs, parts in groups:
        sizes = tuple(outputs[part] for part in parts if part in targets)
        if sizes and layers:
            found.append(Product(name, layers, inputs, sizes))
    return tuple(found)


def check_targets(model: ModelSpec, split: Parallelism, spec: LoraSpec) -> None:
    """Raise CatalogueError for a model without any matrix that the adapters of `spec` change."""
    if not products_of(model, split, spec.targets):
        raise CatalogueError(
            f"{model.name} has no matrix that adapters of {', '.join(spec.targets)} change: experts take none\n"
            "hint: --lora-targets all, or leave out --adapters"
        )


def slot_bytes(model: ModelSpec, split: Parallelism, spec: LoraSpec) -> int:
    """Return the bytes of one slot on one rank. A load copies as many, because padding zeros are loaded, too."""
    values = sum(product.layers * product.slot_values(spec.rank) for product in products_of(model, split, spec.targets))
    return values * ACTIVATION_BYTES


# mechanism: adapters (simulated)
class LoraCost:
    """Microseconds of the products of adapters, for the layers of one stage on one rank.

    A kernel takes its latency plus the larger of compute time and memory time, like other operators. Constants are
    those of bf16 GEMMs: these kernels have not been measured on a GPU of the catalogue.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, split: Parallelism, spec: LoraSpec) -> None:
        if split.attention_dp > 1:
            raise CapacityError(
                f"adapters with attention_dp {split.attention_dp} are not priced: shards use different adapters\n"
                "hint: --attention-dp 1, or leave out --adapters"
            )
        self.spec = spec
        self.products = products_of(model, split, spec.targets)
        self.slot_bytes = slot_bytes(model, split, spec)
        self.kernels = sum(product.layers * (1 + len(product.sizes)) for product in self.products)
        names = ("bf16_gemm_latency_us", "bf16_gemm_tflops", "weight_read_gbs")
        self.constants: Mapping[str, Constant] = {name: achieved(gpu, name) for name in names}
        self._latency_us = self.constants["bf16_gemm_latency_us"].value
        self._flops_us = self.constants["bf16_gemm_tflops"].value * 1e6
        self._memory = ACTIVATION_BYTES / (self.constants["weight_read_gbs"].value * 1e3)  # us per number
        self._us: dict[tuple[int, int], float] = {}

    def products_us(self, tokens: int, adapters: int) -> float:
        """Return the time of the adapters' products in a pass; results are cached.

        Args:
            tokens: new tokens that run on adapters.
            adapters: distinct adapters of these tokens.
        """
        if not tokens:
            return 0.0
        key = tokens, adapters
        us = self._us.get(key)
        if us is None:
            us = self._us[key] = sum(self.terms_us(tokens, adapters).values())
        return us

    def terms_us(self, tokens: int, adapters: int) -> dict[str, float]:
        """Return the time by product, all layers together; the values sum to `products_us`."""
        rank = self.spec.rank
        computed, padded = max(tokens, TILE_TOKENS * adapters), max(rank, TILE_RANK)
        terms = {}
        for name, layers, inputs, sizes in self.products:
            inner = len(sizes) * rank
            us = self._kernel_us(
                2.0 * computed * inputs * len(sizes) * padded, adapters * inner * inputs + tokens * (inputs + inner)
            )
            for size in sizes:  # 2: the output is read and written
                us += self._kernel_us(
                    2.0 * computed * size * padded, adapters * size * rank + tokens * (rank + 2 * size)
                )
            terms[name] = layers * us
        return terms

    def _kernel_us(self, flops: float, values: float) -> float:
        return self._latency_us + max(flops / self._flops_us, values * self._memory)

    def describe(self) -> dict[str, Any]:
        """Return room, bytes, launches and constants with their sources, for a run's metrics.json."""
        return {
            "slots": self.spec.slots,
            "rank": self.spec.rank,
            "targets": list(self.spec.targets),
            "slot_bytes": self.slot_bytes,
            "kernels": self.kernels,
            "constants": {name: asdict(constant) for name, constant in self.constants.items()},
        }
