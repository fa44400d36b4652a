"""Experts placed on ranks by their load: when they are placed anew, and which layers move when.

    ExpertLoadMeasured, `interval` batches after the last placement
      └─ plan: `balance` of the load since then, for the layers that gain by it          ExpertsPlaced
           └─ behind a launch, if no order is open: the next `layers_at_once` layers     MoveExperts
                └─ ExpertsMoved: the placement of these layers is in force

The layers with the most gain move first. Before the first launch all layers move at once, since nothing waits for them.
A layer is left as it is if the load of its fullest rank would fall by less than `GAIN_MIN`. All layers are while the
fullest ranks have at most `imbalance_min` times the mean load. Copies stay on the ranks that have them, as far as the
new placement allows (`settled`).

A restart voids the plan: the new device has the plain placement. A failed move leaves its layers as they were, and ends
the plan.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from lockstep.core.cluster.expert_placement import (
    ExpertLoads,
    Float64s,
    Int32s,
    balance,
    fetched,
    gpu_loads,
    settled,
    unbalanced,
)
from lockstep.core.contract.commands import MoveExperts, Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import ExpertsMoved, ExpertsPlaced
from lockstep.core.features.view import AdminView
from lockstep.core.kv.component import Component, Restored

GAIN_MIN = 0.01  # least share by which the load of a layer's fullest rank must fall


class PlacementImage(msgspec.Struct):
    """Placed experts in a snapshot. Placements are packed int32 [layers, slots]."""

    placement: bytes
    target: bytes
    left: list[int]  # layers of the plan that have not moved, in their order
    moving: list[int]  # layers of the open order
    launches: int  # since the last placement
    base: tuple[int, int, bytes] | None  # loads at the last placement
    orders: int


class PlacementPart(msgspec.Struct):
    """Placed experts as a field of a snapshot."""

    expert_placement: PlacementImage | UnsetType = UNSET


class ExpertPlacer(Component):
    """The placement of experts, and the plan of the next one.

    Attributes:
        placement: int32 [layers, slots], the expert in each slot; the slots of a rank are contiguous.
        orders: given so far.
    """

    PART = PlacementPart

    def __init__(self, scheduler: AdminView) -> None:
        config = scheduler.config.experts
        self._scheduler = scheduler
        self.config = None if isinstance(config, UnsetType) else config
        self.placement = self._plain()
        self._target = self.placement
        self._left: list[int] = []
        self._moving: list[int] = []
        self._launches, self.orders = 0, 0
        self._base: ExpertLoads | None = None

    def _plain(self) -> Int32s:
        if self.config is None:
            return np.zeros((0, 0), np.int32)
        of = self.config
        return unbalanced(of.experts, slots=of.slots, gpus=of.ranks, layers=of.layers)

    def part(self) -> PlacementPart:
        """Return the state for a snapshot."""
        if self.config is None:
            return PlacementPart()
        base = None if self._base is None else self._base.image()
        plan = (self._target.tobytes(), list(self._left), list(self._moving))
        return PlacementPart(PlacementImage(self.placement.tobytes(), *plan, self._launches, base, self.orders))

    def load(self, part: PlacementPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        own = part.expert_placement
        if isinstance(own, UnsetType) or self.config is None:
            return
        shape = (self.config.layers, self.config.slots)
        self.placement = np.frombuffer(own.placement, np.int32).reshape(shape)
        self._target = np.frombuffer(own.target, np.int32).reshape(shape)
        self._left, self._moving = list(own.left), list(own.moving)
        self._launches, self.orders = own.launches, own.orders
        self._base = None if own.base is None else ExpertLoads.of_image(own.base)

    def measured(self, loads: ExpertLoads, step: Step) -> None:
        """Plan a new placement by the load since the last one, if it is due.

        Raises: ContractError if the loads are not of the layers and experts of the settings.
        """
        of = self.config
        if of is None:
            return
        if loads.counts.shape != (of.layers, of.experts):
            raise ContractError(
                f"loads of experts are {list(loads.counts.shape)}, and the settings have [{of.layers}, {of.experts}]"
            )
        first = not self._scheduler.next_batch_id
        if self._left or self._moving or (self._launches < of.interval and not first):
            return
        window = loads.counts - (0 if self._base is None else self._base.counts)
        self._base, self._launches = loads, 0
        self._plan(window.astype(np.float64), step)
        if first:
            self._order(step, len(self._left))

    # mechanism: expert-moves (decided)
    def _plan(self, window: Float64s, step: Step) -> None:
        of = self.config
        assert of is not None
        before = gpu_loads(window, self.placement, of.ranks)
        mean = np.maximum(before.mean(1), 1e-300)
        fullest = before.max(1) / mean
        if not window.any() or float(fullest.mean()) <= of.imbalance_min:
            return
        target = settled(self.placement, balance(window, slots=of.slots, gpus=of.ranks), of.ranks)
        then = gpu_loads(window, target, of.ranks).max(1) / mean
        gains = fullest - then
        layers = np.flatnonzero(gains > GAIN_MIN * fullest)
        if not layers.size:
            return
        self._target = self.placement.copy()
        self._target[layers] = target[layers]
        self._left = layers[np.argsort(-gains[layers], kind="stable")].tolist()
        moves = fetched(self.placement, self._target, of.ranks)
        after = np.where(np.isin(np.arange(of.layers), layers), then, fullest)
        step.decided.append(
            ExpertsPlaced(
                step.time_us, len(layers), int(moves.sum()), _permille(fullest.mean()), _permille(after.mean())
            )
        )

    def launched(self, step: Step) -> None:
        """Count a launch, and order the next layers of the plan behind it."""
        if self.config is None:
            return
        self._launches += 1
        if self._left and not self._moving:
            self._order(step, self.config.layers_at_once)

    def _order(self, step: Step, layers: int) -> None:
        if not self._left:
            return
        self._moving, self._left = self._left[:layers], self._left[layers:]
        order = MoveExperts(self.orders, tuple(self._moving), self._target[self._moving], self._scheduler.generation)
        self.orders += 1
        step.commands.append(order)

    def moved(self, event: ExpertsMoved, step: Step) -> None:
        """Take in that the host moved experts, or left them where they were after an error.

        Raises: ContractError for an answer to no order.
        """
        if event.generation < self._scheduler.generation:
            return  # of a lost device: void
        if not self._moving or event.move_id != self.orders - 1 or event.generation > self._scheduler.generation:
            raise ContractError(f"ExpertsMoved {event.move_id} of generation {event.generation} was not ordered")
        if event.error:
            self._left = []
        else:
            placement = self.placement.copy()
            placement[self._moving] = self._target[self._moving]
            self.placement = placement
        self._moving = []

    def restarted(self) -> None:
        """Begin again with the plain placement, which the new device has."""
        self.placement = self._target = self._plain()
        self._left, self._moving = [], []


def _permille(ratio: float) -> int:
    return round(float(ratio) * 1000)
