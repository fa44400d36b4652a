"""Layers of prompts on a tagged device: which parts of a split prefill ran, and what their cells hold in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import SchedConfig

PARTIAL = -3  # minus the layers behind which a cell has no KV yet; it may not be read by another pass


class TaggedLayers:
    """The layers of a device's model. Without multiplexing every plan computes all of them."""

    def __init__(self, config: SchedConfig) -> None:
        self.layers = 0 if config.multiplexing is msgspec.UNSET else config.multiplexing.layers
        self.at: dict[int, tuple[int, int, int, int]] = {}  # by row: start, stop, next layer, version of the weights

    def is_partial(self, plan: BatchPlan) -> bool:
        """Whether a plan computes some layers and not the last one."""
        return plan.layers is not None and plan.layers[1] < self.layers

    def follow(self, plan: BatchPlan, row: int, span: tuple[int, int], weights: int) -> str:
        """Note that a row is in a plan. Returns: what is wrong with its layers. Parts follow, with equal spans."""
        at, (start, stop) = self.at.pop(row, None), span
        if self.layers and not np.isin(plan.deltas.rows, plan.rows).all():
            return f"is in a plan that changes the tables of rows {plan.deltas.rows.tolist()}, which may be elsewhere"
        if plan.layers is None:
            return "" if at is None else f"runs at [{start}:{stop}], but is computed to layer {at[2]} of [{at[:2]}]"
        first, behind = plan.layers
        if (at or (start, stop, 0, weights)) != (start, stop, first, weights) or behind <= first:
            return f"computes layers {plan.layers} of [{start}:{stop}], but is at {at}"
        if behind < self.layers:
            self.at[row] = start, stop, behind, weights
        return ""

    def unexpected(self, plan: BatchPlan, cells: Iterable[int], garbage: Sequence[int]) -> str:
        """Return what is wrong with the new cells of a part before it runs: they hold KV of the layers before it."""
        first = 0 if plan.layers is None else plan.layers[0]
        found = [cell for cell in cells if cell != PARTIAL - first and cell not in garbage] if first else []
        return f"goes on at layer {first} of cells that hold {found}" if found else ""

    def written(self, plan: BatchPlan, prefix_ids: list[int]) -> list[int]:
        """Return what a plan leaves in its new cells."""
        if plan.layers is None or not self.is_partial(plan):
            return prefix_ids
        return [PARTIAL - plan.layers[1]] * len(prefix_ids)


def of_stream(stream: Iterable[Any], plan: BatchPlan) -> list[Any]:
    """Return what is on the stream of a plan: with multiplexing, prompts have one of their own."""
    return [one for one in stream if (one.plan.layers is not None) == (plan.layers is not None)]


def oldest(stream: Sequence[Any]) -> list[Any]:
    """Return the launched plans of which the results may be next: the oldest one of each stream."""
    return [one for one in stream if of_stream(stream, one.plan)[0] is one]
