"""Tensor parallel by the plan of a model of transformers, and linear layers that adapters may change.

A plan names a style for linear layers and parameters, by pattern:

    colwise                  a rank keeps rows of the matrix; its results stay on the rank
    rowwise                  a rank keeps columns; the results of all ranks are summed, then the bias is added
    colwise_gather_output    rows; the results of all ranks are joined
    rowwise_split_input      columns, of which the rank takes its part from an input that all ranks have
    packed_colwise           rows of each of the two matrices that lie in one, gate and up
    moe_tp_experts           the results of a mixture of experts, each of them split, are summed

Styles that only concern training leave a layer whole, and so does `embedding_rowwise`: every rank keeps the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.checkpoint import WHOLE, TensorSplit
from lockstep.runtime.from_transformers.attending import CurrentPass
from lockstep.runtime.lora.slots import LoraSlots, LoraTarget
from lockstep.runtime.models.layers import Parallel

ROWS, JOINED_ROWS = "colwise", ("colwise_gather_output", "colwise_rep")
COLUMNS, OWN_COLUMNS = "rowwise", ("rowwise_split_input", "rowwise_rep")
PACKED_ROWS, SUMMED = "packed_colwise", ("moe_tp_experts", "all_reduce")
WHOLE_STYLES = ("embedding_rowwise", "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
STYLES = (ROWS, *JOINED_ROWS, COLUMNS, *OWN_COLUMNS, PACKED_ROWS, *SUMMED, *WHOLE_STYLES)
HEADS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
"""Matrices whose rows are heads, so that ranks split whole heads."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The part of a parameter that a rank keeps.

    Args:
        packed: the parts are of each half along the dimension of `split`, joined again.
    """

    split: TensorSplit = WHOLE
    packed: bool = False

    def shape(self, whole: tuple[int, ...], ranks: int, name: str) -> tuple[int, ...]:
        """Return the shape on a rank. Raises ConfigError if the ranks cannot split it."""
        if self.split.dim is None:
            return whole
        dim = self.split.dim
        size = self.split.local(whole[dim] // 2, ranks, name) * 2 if self.packed else None
        size = self.split.local(whole[dim], ranks, name) if size is None else size
        return (*whole[:dim], size, *whole[dim + 1 :])


class Plan:
    """The style of each module and parameter of a model, for a number of ranks.

    Raises: ConfigError if the model has no plan, or one that cannot be followed here or by this number of ranks.
    """

    def __init__(self, model: Any, ranks: int) -> None:
        self.ranks = ranks
        self.styles: dict[str, str] = {}
        if ranks == 1:
            return
        name, plan = type(model).__name__, dict(model._tp_plan or {})
        if not any(style not in WHOLE_STYLES for key, style in plan.items() if ".layers." in f".{key}"):
            raise ConfigError(
                f"`tp` is {ranks}, but transformers has no plan to split {name} over ranks\nhint: tp 1, a plan in "
                "transformers, or an architecture with model_backend native"
            )
        unknown = sorted({style for style in plan.values() if style not in STYLES})
        if unknown:
            raise ConfigError(f"`tp` is {ranks}, but the plan of {name} has the style {', '.join(unknown)}\nhint: tp 1")
        config = model.config.get_text_config()
        attends = any(style == ROWS and key.rsplit(".", 1)[-1] in HEADS for key, style in plan.items())
        heads = {"num_attention_heads": config.num_attention_heads}
        if any(style == ROWS and key.endswith("k_proj") for key, style in plan.items()):
            heads["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        for field, count in heads.items() if attends else ():
            if count % ranks:
                raise ConfigError(
                    f"`tp` is {ranks}, which does not divide `{field}` {count} of {name}: transformers' code splits "
                    "whole heads\nhint: a number of ranks that divides it"
                )
        patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
        names = [found for found, _ in model.named_modules()] + [found for found, _ in model.named_parameters()]
        for found in names:
            style = next((style for pattern, style in patterns.items() if pattern.fullmatch(found)), None)
            if style is not None and style not in WHOLE_STYLES:
                self.styles[found] = style

    def part(self, name: str, parameter: Tensor) -> ParameterPart:
        """Return the part of a parameter that every rank keeps."""
        style, dims = self.styles.get(name), parameter.dim()
        owner, _, last = name.rpartition(".")
        if style is None:  # a linear layer's own
            style = self.styles.get(owner)
            if style in SUMMED:
                return ParameterPart()
            if style in (COLUMNS, *OWN_COLUMNS) and last == "bias":
                return ParameterPart()
        if style in (ROWS, *JOINED_ROWS):
            dim = max(dims - 2, 0)
            if owner.endswith("lm_head") or owner == "lm_head":
                return ParameterPart(TensorSplit(dim, units=None))
            return ParameterPart(TensorSplit(dim, parameter.shape[dim]))
        if style in (COLUMNS, *OWN_COLUMNS):
            return ParameterPart(TensorSplit(dims - 1, parameter.shape[-1]))
        if style == PACKED_ROWS:
            dim = dims - 1 if dims == 1 else dims - 2
            return ParameterPart(TensorSplit(dim, parameter.shape[dim] // 2), packed=True)
        return ParameterPart()


class RankLinear(nn.Module):
    """A linear layer of which a rank has a part, and which adapters may change.

    Args:
        whole: the layer of transformers, with this rank's parameters.
        style: of the plan; empty: every rank has all of it.
        current: of the model, with the adapters of the pass.
    """

    def __init__(self, whole: nn.Linear, style: str, parallel: Parallel, current: CurrentPass) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight, self.bias = whole.weight, whole.bias
        tied = style in JOINED_ROWS and len(whole.weight) == whole.out_features  # to embeddings, which are whole
        self.style, self.parallel = "" if tied else style, parallel
        self.current = current
        self.lora: LoraSlots | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply, [..., in_features] to [..., out_features], or with parts of them, by style."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.style in OWN_COLUMNS:
            width = self.weight.shape[1]
            rows = rows[:, self.parallel.rank * width : (self.parallel.rank + 1) * width]
        summed = self.style in (COLUMNS, *OWN_COLUMNS)
        out = F.linear(rows, self.weight, None if summed else self.bias)
        batch = self.current.batch
        if self.lora is not None and batch is not None and batch.adapters is not None:
            out = self.lora.add_to(out, rows.contiguous(), batch.adapters)
        if summed:
            out = self.parallel.all_reduce(out)
            out = out if self.bias is None else out + self.bias
        elif self.style in JOINED_ROWS:
            out = self.parallel.all_gather(out)[:, : self.out_features]
        return out.view(*hidden.shape[:-1], out.shape[-1])

    def take_adapters(self, name: str, slots: int, rank: int) -> LoraTarget:
        """Allocate adapter slots for this layer, and return it as a target under its name."""
        outputs, inputs = self.weight.shape
        self.lora = LoraSlots(inputs, (outputs,), slots, rank, self.weight.dtype, self.weight.device)
        rows = TensorSplit(0, self.out_features) if self.style in (ROWS, *JOINED_ROWS) else WHOLE
        columns = TensorSplit(1, self.in_features) if self.style in (COLUMNS, *OWN_COLUMNS) else WHOLE
        return LoraTarget(name, self.in_features, self.out_features, self.lora, 0, rows=rows, columns=columns)


def follow(model: nn.Module, styles: Mapping[str, str], parallel: Parallel, current: CurrentPass) -> None:
    """Put a RankLinear in place of every split linear layer, and sum the results of split experts.

    Raises: ConfigError for a style on a module that is no linear layer.
    """
    modules = dict(model.named_modules())
    for name, style in styles.items():
        module = modules.get(name)
        if module is None:  # a parameter
            continue
        if style in SUMMED:
            module.register_forward_hook(lambda _, __, out: parallel.all_reduce(out.contiguous()))
        elif type(module) is nn.Linear:
            replace_linear(modules, name, RankLinear(module, style, parallel, current))
        else:
            raise ConfigError(f"the plan of transformers splits {name}, a {type(module).__name__}, as a linear layer")


def replace_linear(modules: Mapping[str, nn.Module], name: str, by: RankLinear) -> None:
    """Put a layer in the place of the one of this name."""
    owner, _, last = name.rpartition(".")
    setattr(modules[owner], last, by)


def packed_part(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of each half of a tensor along a dimension, joined."""
    halves = [half.chunk(ranks, dim)[rank] for half in tensor.chunk(2, dim)]
    return torch.cat(halves, dim)
