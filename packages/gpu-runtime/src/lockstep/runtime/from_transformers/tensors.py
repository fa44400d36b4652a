"""Tensors of checkpoints by the names that a model of transformers has for them, through the library's conversions.

A checkpoint may use older names (`block_sparse_moe.gate` for `mlp.gate`), and may store the matrices of experts one by
one that are one parameter of the library's model. The library has both as rules. Here they are applied to names only:
each stored tensor fills a view of a parameter, so that a rank reads its own part, and nothing is kept twice.

    stored      mlp.experts.3.gate_proj.weight     mlp.experts.3.up_proj.weight
    parameter   mlp.experts.gate_up_proj[3]  =  [ gate rows | up rows ]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.checkpoint import TensorSpec, TensorSplit
from lockstep.runtime.from_transformers.split import ParameterPart, packed_part

EXPERT = re.compile(r"\.(\d+)\.(?=[^.]+\.[^.]+$|[^.]+$)")
"""The number of an expert in a stored name: the last number of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer of the library's model on this rank.

    Args:
        shape: of all ranks together.
        initial: its value with random weights; None: drawn.
    """

    name: str
    into: Tensor
    shape: tuple[int, ...]
    part: ParameterPart
    initial: float | None = None


class CheckpointNames:
    """The names of tensors of one model in checkpoints.

    Args:
        model: the library's, complete, with its names.
    """

    def __init__(self, model: Any, held: Sequence[Held], rank: int, ranks: int) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix, self._held = model.base_model_prefix, {one.name: one for one in held}
        self._known = {one.name: one.into for one in held}
        self._rank, self._ranks = rank, ranks
        self._ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
        self._tied = set(model.all_tied_weights_keys)
        self._by_pattern = {
            pattern: rule for rule in self._converters for pattern in rule.source_patterns if _merges(rule)
        }

    def specs(self) -> Iterator[TensorSpec]:
        """Yield what fills the model, under its own names; an expert's matrices one by one, if they are stored so."""
        for one in self._held.values():
            rule = next((rule for rule in self._converters if _merges(rule) and _fills(rule, one.name)), None)
            if rule is None:
                self._refuse_joined(one.name)
                yield self._whole(one)
                continue
            stem = one.name.removesuffix(rule.target_patterns[0])
            for expert in range(one.shape[0]):
                for number, pattern in enumerate(rule.source_patterns):
                    name = stem + pattern.replace("*.", f"{expert}.").replace("\\.", ".")
                    yield self._of_expert(one, name, expert, number, len(rule.source_patterns))

    def _refuse_joined(self, name: str) -> None:
        """Raise ConfigError for a parameter whose rows checkpoints store in parts of any size, which are joined."""
        for rule in self._converters:
            if [type(one) for one in rule.operations] == [Concatenate] and _fills(rule, name):
                stored = ", ".join(rule.source_patterns)
                raise ConfigError(f"checkpoints store {name} as {stored}, which this model backend does not join")

    def named_as(self, stored: Collection[str], wanted: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return the specs of `specs` under the names of a source."""
        names: dict[tuple[str, int, int], str] = {}
        for name in stored:
            key, pattern = self._renamed(name)
            expert, number = -1, 0
            if pattern is not None and (rule := self._by_pattern.get(pattern)) is not None:
                found = EXPERT.search(name)
                expert, number = int(found[1]) if found else -1, rule.source_patterns.index(pattern)
            names[key, expert, number] = name
        out = []
        for want in wanted:
            key, pattern = self._renamed(want.name)
            expert, number = -1, 0
            if pattern is not None and (rule := self._by_pattern.get(pattern)) is not None:
                found = EXPERT.search(want.name)
                assert found is not None
                expert, number = int(found[1]), rule.source_patterns.index(pattern)
            out.append(replace(want, name=names.get((key, expert, number), want.name)))
        return out

    def surplus(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although the model does not need it."""
        key, _ = self._renamed(name)
        if key in self._tied or name in self._tied or key.endswith(("rotary_emb.inv_freq", "attn.masked_bias")):
            return True
        return any(pattern.search(one) for pattern in self._ignored for one in (key, name))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return the model's name for a stored one, and the pattern of the conversion that it is part of."""
        renamed: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        return renamed

    def _whole(self, one: Held) -> TensorSpec:
        if one.part.packed and self._ranks > 1:
            dim = one.part.split.dim
            assert dim is not None
            return TensorSpec(
                one.name,
                one.shape,
                one.into,
                initial=one.initial,
                convert=lambda tensor: packed_part(tensor, dim, self._rank, self._ranks),
            )
        return TensorSpec(one.name, one.shape, one.into, one.part.split, initial=one.initial)

    def _of_expert(self, one: Held, name: str, expert: int, number: int, parts: int) -> TensorSpec:
        """Return the spec of one matrix of an expert, the `number`-th of `parts` along its rows."""
        into, shape, dim = one.into[expert], one.shape[1:], one.part.split.dim
        split = TensorSplit() if dim is None else TensorSplit(dim - 1, shape[dim - 1] // (parts if dim == 1 else 1))
        if parts > 1:
            into, shape = into.chunk(parts, 0)[number], (shape[0] // parts, *shape[1:])
        return TensorSpec(name, shape, into, split, initial=one.initial)


def _merges(rule: Any) -> bool:
    """Return whether a conversion only stacks the matrices of experts, and joins two of them by rows."""
    kinds = [type(one) for one in rule.operations]
    if kinds == [MergeModulelist]:
        return len(rule.source_patterns) == 1 and rule.operations[0].dim == 0
    if kinds == [MergeModulelist, Concatenate]:
        return rule.operations[0].dim == 0 and rule.operations[1].dim == 1
    return False


def _fills(rule: Any, name: str) -> bool:
    return len(rule.target_patterns) == 1 and name.endswith(rule.target_patterns[0])
