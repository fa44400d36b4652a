"""Parts of all models: norm, rotary positions, linear layers that ranks may split, attention, and the two MLPs.

A `Maker` has dtype, device and this rank's part, and makes the parameters of a layer. `tensors(prefix)` of a layer
lists the tensors of a checkpoint that fill it. Several of them may fill one weight: q, k and v are one product.

    checkpoint        q_proj [heads * d, hidden]   k_proj [kv_heads * d, hidden]   v_proj [kv_heads * d, hidden]
    rank r of R       rows of heads r*H/R...       rows of its kv heads            the same
    weight            [ q rows ][ k rows ][ v rows ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.core.contract.errors import ConfigError
from lockstep.host.quantization import FIELD, Activations, Fp8Activations, WeightFormat
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.checkpoint import TensorSpec, TensorSplit
from lockstep.runtime.forward import ForwardBatch, RankTokens
from lockstep.runtime.lora.batch import AdapterBatch
from lockstep.runtime.lora.slots import LoraSlots, LoraTarget
from lockstep.runtime.models.elementwise import add_rms_norm, norm_and_turn, silu_and_mul
from lockstep.runtime.models.packed import PackedMatrix
from lockstep.runtime.models.stage import SPLIT_EXPERTS, WHOLE, ExpertSplit, StageLayers
from lockstep.runtime.quantized.fp8 import Fp8Matrices, RowRounding
from lockstep.runtime.quantized.int4 import Int4Matrices
from lockstep.runtime.quantized.matrices import Quantized, StoredMatrix
from lockstep.runtime.turns import TurnTaking

Weight: TypeAlias = Tensor | Quantized
"""A matrix [outputs, inputs], or quantised matrices."""


AllToAll: TypeAlias = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class SharedRows:
    """What is around the MLPs of data-parallel ranks: the rows of all ranks go in, and those of this rank come out.

        rank 0   [a a a]  --.                       .--> [a a a]
                             > [a a a b . .] MLP --<           padded: gathered; otherwise [a a a b], summed up
        rank 1   [b]      --'                       '--> [b]

    Args:
        gather_rows: puts the [n, hidden] of all ranks one below the other: [ranks * n, hidden].
        all_reduce: sums over the ranks.
    """

    rank: int
    gather_rows: Callable[[Tensor], Tensor]
    all_reduce: Callable[[Tensor], Tensor]

    # mechanism: padding-of-ranks (executed)
    def gathered(self, own: Tensor, tokens: RankTokens) -> Tensor:
        """Return the rows of all ranks, [total, hidden]. Padding rows are zeros."""
        if tokens.padded:
            return self.gather_rows(F.pad(own, (0, 0, 0, max(tokens.counts) - len(own))))
        rows = own.new_zeros(tokens.total, own.shape[1])
        rows[tokens.own(self.rank)] = own
        return self.all_reduce(rows)

    def apply(self, mlp: Callable[[Tensor], Tensor], own: Tensor, tokens: RankTokens) -> Tensor:
        """Return the result of an MLP for this rank's rows, [tokens, hidden]. All ranks call it for the same layer."""
        return mlp(self.gathered(own, tokens))[tokens.own(self.rank)]


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank of the group that splits one model, and the functions that combine partial results.

    `all_reduce` sums [tokens, hidden] over the ranks; `all_gather` joins [samples, vocab / ranks] of all side by side.
    `all_to_all` sends rows to each rank: given the rows by receiver, and the numbers of rows to and from each rank, it
    returns the received rows by sender. `broadcast` sends the tensor of one rank to all, which receive it in theirs.

    Args:
        stage: the layers of this rank's pipeline stage, whose ranks these are; only our own models have stages.
        shared: with data-parallel attention: what is around the MLPs, which ranks split. All else is whole on each.
        turns: of the halves of a batch, which the functions above pass on while ranks communicate.
    """

    rank: int = 0
    ranks: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _unchanged
    all_gather: Callable[[Tensor], Tensor] = _unchanged
    all_to_all: AllToAll | None = None
    stage: StageLayers = WHOLE
    experts: ExpertSplit = SPLIT_EXPERTS
    shared: SharedRows | None = None
    broadcast: Callable[[Tensor, int], Tensor] | None = None
    turns: TurnTaking = field(default_factory=TurnTaking)

    @property
    def of_attention(self) -> Parallel:
        """The part of this rank in everything but MLPs."""
        return self if self.shared is None else Parallel(stage=self.stage, experts=self.experts)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"`rank` must be 0 to {self.ranks - 1}, got {self.rank}")
        if self.ranks > 1 and _unchanged in (self.all_reduce, self.all_gather):
            raise ValueError(f"{self.ranks} ranks need `all_reduce` and `all_gather`")


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes the parameters of a model: empty, to be filled from a checkpoint or at random."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: Parallel = field(default_factory=Parallel)
    stored: WeightFormat | None = None  # format of the layers' matrices, if it is not `dtype`
    fp8_activations: Fp8Activations = "off"  # the requested mode: quantized/activations.py
    activations: Activations = ""  # the mode in use
    prefix: str = ""  # prefix in a checkpoint of the layer that is made

    def within(self, prefix: str) -> Maker:
        """Return this maker with another prefix."""
        return replace(self, prefix=prefix)

    def matrices(self, parts: Sequence[StoredMatrix], names: Sequence[str], groups: int = 0) -> Weight:
        """Make matrices side by side, for every group.

        Args:
            names: names of all of them, for every group, behind `prefix`.
        Raises: ConfigError if a checkpoint has quantised only some of them, or if ranks cut a word, group or block.
        """
        ranks = self.parallel.ranks
        if self.stored is not None:
            called = [f"{self.prefix}.{name}" for name in names]
            kept = [name for name in called if self.stored.keeps(name)]
            if not kept:
                place = (parts, groups, self.parallel.rank, ranks, self.dtype, self.device, self.stored)
                if self.stored.layout != "fp8":
                    return Int4Matrices(*place)
                return Fp8Matrices(*place, RowRounding(self.activations, required=self.fp8_activations == "on"))
            if len(kept) < len(called):
                other = next(name for name in called if name not in kept)
                raise ConfigError(
                    f"`{FIELD}` keeps {kept[0]} as it is, but not {other}, which are one product here\n"
                    "hint: a checkpoint that quantises both, or neither"
                )
        sizes = [part.local_outputs(ranks) for part in parts]
        return self.empty(*((groups,) if groups else ()), sum(sizes), parts[0].local_inputs(ranks))

    def empty(self, *shape: int) -> nn.Parameter:
        """Make a parameter of this rank without values."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


def product(hidden: Tensor, weight: Weight, bias: Tensor | None = None, packed: PackedMatrix | None = None) -> Tensor:
    """Multiply, [tokens, inputs] to [tokens, outputs]; from the packed copy of the matrix, if it has one."""
    if packed is not None:
        return packed.linear(hidden, bias)
    return F.linear(hidden, weight, bias) if isinstance(weight, Tensor) else weight.linear(hidden, bias)


def packable(weight: Weight) -> PackedMatrix | None:
    """Return what packs a matrix; None for quantised ones, whose layouts are their own."""
    return PackedMatrix(weight) if isinstance(weight, Tensor) else None


class RmsNorm(nn.Module):
    """The norm x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, make: Maker, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = make.empty(size), eps

    def forward(self, residual: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of both, [tokens, size], and its norm, of the same shape and dtype."""
        return add_rms_norm(residual, added, self.weight, self.eps)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensor of a checkpoint that fills the weight."""
        yield TensorSpec(f"{prefix}.weight", tuple(self.weight.shape), self.weight.data, initial=1.0)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One matrix of a checkpoint in a ColumnLinear: its name, total rows, and the units that ranks split.

    With `replicate`, and fewer units than ranks, several ranks keep each unit (kv heads).
    """

    name: str
    outputs: int
    units: int
    replicate: bool = False


class ColumnLinear(nn.Module):
    """Matrices that read the same input, as one product. Ranks split their rows, so results stay on the rank."""

    def __init__(self, make: Maker, inputs: int, parts: Sequence[MatrixPart], bias: bool = False) -> None:
        super().__init__()
        self.inputs, self.parts, self.parallel = inputs, tuple(parts), make.parallel
        self.splits = [TensorSplit(0, part.units, part.replicate) for part in parts]
        ranks = make.parallel.ranks
        self.sizes = [
            split.local(part.outputs, ranks, part.name) for split, part in zip(self.splits, parts, strict=True)
        ]
        self.dtype, self.device = make.dtype, make.device
        matrices = [
            StoredMatrix(part.name, part.outputs, inputs, split) for part, split in zip(parts, self.splits, strict=True)
        ]
        self.weight = make.matrices(matrices, [part.name for part in parts])
        self.bias = make.empty(sum(self.sizes)) if bias else None
        self.packed = packable(self.weight)
        self.lora: LoraSlots | None = None

    def forward(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Multiply, [tokens, inputs] to [tokens, rows of this rank], the parts side by side: see `sizes`."""
        out = product(hidden, self.weight, self.bias, self.packed)
        return out if adapters is None or self.lora is None else self.lora.add_to(out, hidden, adapters)

    def take_adapters(self, slots: int, rank: int, prefix: str) -> Iterator[LoraTarget]:
        """Allocate adapter slots for the matrices under this prefix, and yield them."""
        self.lora = LoraSlots(self.inputs, self.sizes, slots, rank, self.dtype, self.device)
        for number, (part, split) in enumerate(zip(self.parts, self.splits, strict=True)):
            yield LoraTarget(f"{prefix}.{part.name}", self.inputs, part.outputs, self.lora, number, rows=split)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill weight and bias."""
        if isinstance(self.weight, Quantized):
            yield from self.weight.tensors([f"{prefix}.{part.name}" for part in self.parts])
        else:
            for part, split, weight in zip(
                self.parts, self.splits, self.weight.data.split_with_sizes(self.sizes), strict=True
            ):
                yield TensorSpec(f"{prefix}.{part.name}.weight", (part.outputs, self.inputs), weight, split)
        if self.bias is not None:
            for part, split, bias in zip(
                self.parts, self.splits, self.bias.data.split_with_sizes(self.sizes), strict=True
            ):
                yield TensorSpec(f"{prefix}.{part.name}.bias", (part.outputs,), bias, split)


class RowLinear(nn.Module):
    """A matrix with columns split over ranks: each rank multiplies its columns, and the results are summed."""

    def __init__(self, make: Maker, name: str, inputs: int, outputs: int, units: int, bias: bool = False) -> None:
        super().__init__()
        self.name, self.shape, self.parallel = name, (outputs, inputs), make.parallel
        self.split = TensorSplit(1, units)
        self.dtype, self.device = make.dtype, make.device
        self.inputs = self.split.local(inputs, make.parallel.ranks, name)
        self.weight = make.matrices([StoredMatrix(name, outputs, inputs, columns=self.split)], [name])
        self.bias = make.empty(outputs) if bias else None
        self.packed = packable(self.weight)
        self.lora: LoraSlots | None = None

    def forward(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Multiply, [tokens, columns of this rank] to [tokens, outputs], equal on all ranks."""
        alone = self.parallel.ranks == 1
        out = product(hidden, self.weight, self.bias if alone else None, self.packed)
        if adapters is not None and self.lora is not None:
            out = self.lora.add_to(out, hidden, adapters)
        if alone:
            return out
        summed = self.parallel.all_reduce(out)
        return summed if self.bias is None else summed + self.bias

    def take_adapters(self, slots: int, rank: int, prefix: str) -> Iterator[LoraTarget]:
        """Allocate adapter slots for the matrix under this prefix, and yield it."""
        outputs, inputs = self.shape
        self.lora = LoraSlots(self.inputs, (outputs,), slots, rank, self.dtype, self.device)
        yield LoraTarget(f"{prefix}.{self.name}", inputs, outputs, self.lora, 0, columns=self.split)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill weight and bias."""
        if isinstance(self.weight, Quantized):
            yield from self.weight.tensors([f"{prefix}.{self.name}"])
        else:
            yield TensorSpec(f"{prefix}.{self.name}.weight", self.shape, self.weight.data, self.split)
        if self.bias is not None:
            yield TensorSpec(f"{prefix}.{self.name}.bias", self.shape[:1], self.bias.data)


class VocabEmbedding(nn.Module):
    """A row of `hidden` values per token, for the embeddings and for the output projection. Ranks split the rows.

    If the ranks do not divide the vocabulary, the last of them have rows of zeros behind it.
    """

    def __init__(self, make: Maker, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab, self.parallel = vocab, make.parallel
        self.split = TensorSplit(0, units=None)
        self.weight = make.empty(self.split.local(vocab, make.parallel.ranks, "tokens"), hidden)
        self.packed: PackedMatrix | None = None  # of the output projection only: rows of embeddings are looked up
        self.first = make.parallel.rank * len(self.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up embeddings, int64 [tokens] to [tokens, hidden]."""
        if self.parallel.ranks == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        mine = (local >= 0) & (local < len(self.weight))
        found = F.embedding(local.clamp(0, len(self.weight) - 1), self.weight)
        return self.parallel.all_reduce(found.masked_fill(~mine[:, None], 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [samples, hidden] to float32 [samples, vocab]."""
        logits = product(hidden, self.weight, packed=self.packed)
        if self.parallel.ranks > 1:
            logits = self.parallel.all_gather(logits)[:, : self.vocab]
        return logits.float()

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensor of a checkpoint that fills the weight."""
        shape = (self.vocab, self.weight.shape[1])
        yield TensorSpec(f"{prefix}.weight", shape, self.weight.data, self.split)


class Mlp(nn.Module):
    """silu(gate(x)) * up(x), then down."""

    def __init__(self, make: Maker, hidden: int, intermediate: int) -> None:
        super().__init__()
        parts = [MatrixPart(name, intermediate, intermediate) for name in ("gate_proj", "up_proj")]
        self.gate_up = ColumnLinear(make, hidden, parts)
        self.down = RowLinear(make, "down_proj", intermediate, hidden, intermediate)

    def forward(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Apply the MLP, [tokens, hidden] to the same shape."""
        down: Tensor = self.down(silu_and_mul(self.gate_up(hidden, adapters)), adapters)
        return down

    def take_adapters(self, slots: int, rank: int, prefix: str) -> Iterator[LoraTarget]:
        """Allocate adapter slots, and yield the matrices that adapters may change."""
        yield from self.gate_up.take_adapters(slots, rank, prefix)
        yield from self.down.take_adapters(slots, rank, prefix)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the MLP."""
        yield from self.gate_up.tensors(prefix)
        yield from self.down.tensors(prefix)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of the projections of attention, and which of them add a bias.

    Args:
        bias: of query, key and value.
        output_bias: of the output.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    inputs: int = 0  # of the projections of query, key and value; 0: `hidden`


class Attention(nn.Module):
    """Projections, optional norms of query and key by head, rotary positions; attending is the backend's."""

    def __init__(self, make: Maker, layer: int, sizes: AttentionSizes, norm_eps: float | None = None) -> None:
        super().__init__()
        heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.layer, self.head_dim = layer, head_dim
        parts = [
            MatrixPart("q_proj", heads * head_dim, heads),
            MatrixPart("k_proj", kv_heads * head_dim, kv_heads, replicate=True),
            MatrixPart("v_proj", kv_heads * head_dim, kv_heads, replicate=True),
        ]
        self.qkv = ColumnLinear(make, sizes.inputs or sizes.hidden, parts, sizes.bias)
        self.output = RowLinear(make, "o_proj", heads * head_dim, sizes.hidden, heads, sizes.output_bias)
        self.query_norm = RmsNorm(make, head_dim, norm_eps) if norm_eps is not None else None
        self.key_norm = RmsNorm(make, head_dim, norm_eps) if norm_eps is not None else None

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Apply attention, [tokens, hidden] to the same shape."""
        qkv = self.qkv(hidden, batch.adapters)
        heads, kv_heads, _ = (size // self.head_dim for size in self.qkv.sizes)
        norms, eps = None, 0.0
        if self.query_norm is not None and self.key_norm is not None:
            norms, eps = (self.query_norm.weight, self.key_norm.weight), self.query_norm.eps
        query, key = norm_and_turn(qkv, heads, kv_heads, norms, eps, rotation.cos, rotation.sin)
        value = qkv[:, -kv_heads * self.head_dim :].view(len(hidden), kv_heads, self.head_dim)
        attended = attention.run(self.layer, query, key, value, batch).flatten(-2)
        mixed: Tensor = self.output(attended, batch.adapters)
        return mixed

    def take_adapters(self, slots: int, rank: int, prefix: str) -> Iterator[LoraTarget]:
        """Allocate adapter slots, and yield the matrices that adapters may change."""
        yield from self.qkv.take_adapters(slots, rank, prefix)
        yield from self.output.take_adapters(slots, rank, prefix)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the projections and norms."""
        yield from self.qkv.tensors(prefix)
        yield from self.output.tensors(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            yield from self.query_norm.tensors(f"{prefix}.q_norm")
            yield from self.key_norm.tensors(f"{prefix}.k_norm")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one pass, [tokens, 1, head_dim / 2] each in the model's dtype, used in every layer."""

    cos: Tensor
    sin: Tensor
