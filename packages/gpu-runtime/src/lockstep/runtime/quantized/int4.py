"""Weights of 4 bits in groups along the inputs, as in AWQ and GPTQ: (q - zero) * scale.

Both are stored in GPTQ's layout, in which words run along the inputs. AWQ's are rearranged when they are read.

    qweight   int32 [inputs / 8, outputs]      bits 4 i of a word: input 8 k + i
    zeros     int32 [groups, outputs / 8]      bits 4 i of a word: output 8 n + i
    scales    [groups, outputs]                of the model's dtype

AWQ's words run along the outputs, in the order 0 2 4 6 1 3 5 7, and so do the words of its zeros. The first format of
GPTQ stores a zero minus 1, modulo 16. `g_idx` is the group of each input; only groups in order are supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.quantization import FIELD, WeightFormat
from lockstep.runtime.checkpoint import RANDOM_STD, WHOLE, TensorSpec, TensorSplit
from lockstep.runtime.quantized.matrices import Quantized, StoredMatrix

PER_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in bits 4 i
CODES_STD = 4.6  # of random codes minus their middle
STORED = ("I32",)


class Int4Matrices(Quantized):
    """Matrices of 4 bits. Raises ConfigError if this rank's share cuts a word or a group."""

    def __init__(
        self,
        parts: Sequence[StoredMatrix],
        groups: int,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: WeightFormat,
    ) -> None:
        super().__init__(parts, groups, rank, ranks, dtype, device)
        self.stored = stored
        self.group = stored.group or self.inputs  # inputs of a group
        for part, size in zip(parts, self.sizes, strict=True):
            _check(part, size, self.inputs, stored.group, ranks)
        self.qweight = self.empty(self.inputs // PER_WORD, self.outputs, dtype=torch.int32)
        self.zeros = self.empty(self.inputs // self.group, self.outputs // PER_WORD, dtype=torch.int32)
        self.scales = self.empty(self.inputs // self.group, self.outputs, dtype=dtype)

    def widened(self, dtype: torch.dtype, group: int = 0) -> Tensor:
        """Return (q - zero) * scale, computed in float32."""
        codes = _unpacked(self.of_group(self.qweight, group), 0)
        zeros = _unpacked(self.of_group(self.zeros, group), 1) + self.stored.zero_add & 15
        scales = self.of_group(self.scales, group).to(torch.float32)
        steps = (codes.view(len(scales), self.group, self.outputs) - zeros[:, None]).to(torch.float32)
        return (steps * scales[:, None]).view(self.inputs, self.outputs).t().contiguous().to(dtype)

    def widened_fast(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix by a kernel, without an int32 for each weight."""
        from lockstep.runtime.quantized.kernels import int4_widened

        return int4_widened(self.qweight, self.zeros, self.scales, self.group, self.stored.zero_add, dtype)

    def kernel_fits(self, dtype: torch.dtype) -> bool:
        """Return whether a tile of at least 16 inputs lies within a group."""
        return self.group % 16 == 0

    def kernel_linear(self, rows: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Multiply in Triton; see `kernels`."""
        from lockstep.runtime.quantized.kernels import int4_linear

        return int4_linear(rows, self.qweight, self.zeros, self.scales, self.group, self.stored.zero_add, bias, ends)

    def part_tensors(self, prefix: str, number: int, group: int) -> Iterator[TensorSpec]:
        """Yield words, zeros and scales; for GPTQ also the order of its groups, which is checked."""
        part, first, size = self.parts[number], self.firsts[number], self.sizes[number]
        qweight, zeros, scales = (self.of_group(one, group) for one in (self.qweight, self.zeros, self.scales))
        groups = part.inputs // (self.stored.group or part.inputs)
        # In a checkpoint inputs run down and outputs across; ranks split one of the two.
        down, across = _along(part.columns, 0), _along(part.rows, 1)
        of_groups = across if part.columns.dim is None else down if self.stored.group else WHOLE
        awq = self.stored.layout == "awq"
        packed = (part.inputs, part.outputs // PER_WORD) if awq else (part.inputs // PER_WORD, part.outputs)
        middle = 8 - self.stored.zero_add
        yield TensorSpec(
            f"{prefix}.qweight",
            packed,
            qweight[:, first : first + size],
            down if part.columns.dim is not None else across,
            dtypes=STORED,
            convert=_awq_words if awq else None,
        )
        yield TensorSpec(
            f"{prefix}.qzeros",
            (groups, part.outputs // PER_WORD),
            zeros[:, first // PER_WORD : (first + size) // PER_WORD],
            of_groups,
            initial=int.from_bytes(bytes([middle * 0x11] * 4), "little", signed=True),
            dtypes=STORED,
            convert=_awq_zeros if awq else None,
        )
        yield TensorSpec(
            f"{prefix}.scales",
            (groups, part.outputs),
            scales[:, first : first + size],
            of_groups,
            initial=RANDOM_STD / CODES_STD,
        )
        if not awq:
            yield TensorSpec(
                f"{prefix}.g_idx",
                (part.inputs,),
                torch.empty(0, dtype=torch.int32),
                dtypes=STORED,
                optional=True,
                convert=partial(_in_order, group=self.stored.group or part.inputs),
            )
            # AutoGPTQ writes a bias of zeros for models without a bias. The bias of a model that has one follows this
            # entry.
            yield TensorSpec(
                f"{prefix}.bias",
                (part.outputs,),
                torch.empty(0, dtype=self.dtype),
                optional=True,
                convert=_of_zeros,
            )


def _check(part: StoredMatrix, outputs: int, inputs: int, group: int, ranks: int) -> None:
    """Raise ConfigError if words or groups of a matrix would be cut."""
    for on, down, across in ((1, part.outputs, part.inputs), (ranks, outputs, inputs)):
        why = ""
        if down % PER_WORD or across % PER_WORD:
            why = f"its {down:,} outputs and {across:,} inputs must be multiples of {PER_WORD}, of which a word has"
        elif group and across % group:
            why = f"its {across:,} inputs are no multiple of `{FIELD}.group_size` {group}"
        if why and on > 1:
            raise ConfigError(f"`tp` {ranks} cuts `{part.name}`: on a rank {why}\nhint: fewer ranks")
        if why:
            raise ConfigError(f"`{part.name}` cannot be stored in 4 bits: {why}")


def _along(split: TensorSplit, dim: int) -> TensorSplit:
    """Return the same split along another dimension."""
    return WHOLE if split.dim is None else TensorSplit(dim, split.units, split.replicate)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=device)


def _unpacked(words: Tensor, dim: int) -> Tensor:
    """Return the int32 codes of words that run along a dimension, which becomes 8 times as long."""
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = PER_WORD
    codes = words.unsqueeze(dim + 1) >> _shifts(words.device).view(shape) & 15
    return codes.flatten(dim, dim + 1)


def _awq_codes(words: Tensor) -> Tensor:
    """Return uint8 [inputs or groups, outputs] of words along the outputs."""
    halves = words.contiguous().view(torch.uint8).view(len(words), -1, 4)  # bytes of a word, lowest first
    codes = torch.stack((halves & 15, halves >> 4), -1).view(len(words), -1, PER_WORD)
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return codes[..., place].reshape(len(words), -1)


def _awq_words(words: Tensor) -> Tensor:
    """Convert int32 [inputs, outputs / 8] in AWQ's order to [inputs / 8, outputs], along the inputs."""
    codes = _awq_codes(words)
    inputs, outputs = codes.shape
    pairs = codes.view(inputs // 2, 2, outputs)
    packed = (pairs[:, 0] | pairs[:, 1] << 4).view(inputs // PER_WORD, 4, outputs)
    return packed.transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)


def _awq_zeros(words: Tensor) -> Tensor:
    """Return the words with their outputs in order."""
    codes = _awq_codes(words)
    pairs = codes.view(len(codes), -1, 4, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32).squeeze(-1)


def _of_zeros(bias: Tensor) -> Tensor:
    """Check that a bias has no effect, and return nothing of it. Raises ValueError."""
    if bool(bias.any()):
        raise ValueError("the model has no such bias, and it is not zero")
    return bias.new_empty(0)


def _in_order(groups: Tensor, group: int) -> Tensor:
    """Check that input k is in group k // size, and return nothing of it. Raises ValueError."""
    expected = torch.div(torch.arange(len(groups)), group, rounding_mode="floor")
    if not torch.equal(groups.to(torch.int64), expected):
        raise ValueError(f"its groups of {group} inputs are not in order: `{FIELD}.desc_act` must be false")
    return groups.new_empty(0)
