"""The placement of experts on GPUs: an expert-parallel load balancer (EPLB), and the counts that it uses.

    placement = balance(loads, slots=288, gpus=8)       loads: [layers, experts], placement: [layers, slots]
    gpu_loads(loads, placement, gpus=8).max(1)          what the fullest GPU of every layer has to do

    slots of a layer   | 0 .. 35 | 36 .. 71 | ...       those of one GPU stand together; each holds one expert
                         GPU 0     GPU 1

With more slots than experts the heaviest experts get a second copy, and a third; tokens for an expert are spread evenly
over its copies. As in DeepSeek's EPLB (github.com/deepseek-ai/EPLB), which this follows in what it does:

1. **Copies.** Each spare slot goes to the expert with the most load per copy. That makes the heaviest copy as light
   as any choice of numbers of copies could.
2. **Packing.** Copies go to GPUs, as many to each, so that the fullest has little more than its share. Two ways are
   tried: heaviest first to the emptiest GPU that has a slot; and in rounds, one copy for every GPU, the heaviest of a
   round to the emptiest. The second is never above (2 - 1 / gpus) times the best packing there is, because GPUs never
   differ by more than one copy; the first is nearly always better. The better one counts, layer by layer.
3. **Nodes.** With `nodes` above 1, groups of experts (a token's experts are in few groups) are first packed onto nodes,
   whole, so that a token need not go to many; then each node does 1 and 2 for itself.

Where experts divide evenly over GPUs, a layer for which all this is no better stays as it would be without. So no layer
is ever worse off. Of equals the first counts: equal loads have equal placements everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lockstep.core.contract.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lockstep.core.contract.events import ExpertLoadMeasured

    Float64s = NDArray[np.float64]
    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]

COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoads:
    """Tokens routed to each expert since the engine began; a window is the difference of two moments."""

    counts: Int64s  # [layers, experts]; read only
    reports: int

    def image(self) -> tuple[int, int, bytes]:
        """Return layers, reports and counts (packed int64) for a snapshot."""
        return len(self.counts), self.reports, self.counts.tobytes()

    @classmethod
    def of_image(cls, image: tuple[int, int, bytes]) -> ExpertLoads:
        """Return the loads that `image` described."""
        layers, reports, counts = image
        return cls(np.frombuffer(counts, np.int64).reshape(layers, -1), reports)

    @classmethod
    def folded(cls, before: ExpertLoads | None, event: ExpertLoadMeasured) -> ExpertLoads:
        """With one more report. Raises ContractError for one that is no such table, or of another shape."""
        if before is None:
            return cls(counts_of(event), 1)
        return cls(before.counts + counts_of(event, before.counts.shape), before.reports + 1)


def counts_of(event: ExpertLoadMeasured, shape: tuple[int, ...] | None = None) -> Int64s:
    """The report as int64 [layers, experts]. Raises ContractError if it is none, or not of this shape."""
    layers, size = event.layers, len(event.counts)
    if layers < 1 or not size or size % (layers * COUNT_BYTES):
        raise ContractError(f"loads of experts: {size} bytes are no int64 [{layers}, experts]")
    counts = np.frombuffer(event.counts, np.int64).reshape(layers, -1)
    if shape is not None and counts.shape != shape:
        raise ContractError(f"loads of experts are {list(counts.shape)} now and were {list(shape)} before")
    if counts.min() < 0:
        raise ContractError(f"loads of experts cannot be negative, got {counts.min()}")
    return counts


def balance(loads: NDArray[np.generic], *, slots: int, gpus: int, nodes: int = 1, groups: int = 1) -> Int32s:
    """Place experts; see the module.

    Args:
        loads: any unit, [layers, experts], not negative.
        slots: of each layer, over all GPUs; as many on each.
        nodes: that GPUs are divided among; 1 takes no notice of groups (the global policy).
        groups: of neighbouring experts that stay on one node, where there are several.
    Returns: int32 [layers, slots]: the expert in each slot, ascending within a GPU.
    Raises: ConfigError, with the numbers, for what does not divide or does not fit.
    """
    weights = np.asarray(loads, np.float64)
    if weights.ndim != 2 or not weights.size or not np.isfinite(weights).all() or weights.min() < 0:
        raise ConfigError("`loads` must be finite numbers of at least 0, [layers, experts]")
    layers, experts = weights.shape
    _check(experts, slots, gpus, nodes, groups)
    order = np.broadcast_to(np.arange(experts), weights.shape)  # experts by node, those of a node together
    if nodes > 1:
        of_group = weights.reshape(layers, groups, -1).sum(2)
        node = _packed(of_group, nodes)
        by_node = np.argsort(node, axis=1, kind="stable")
        size = experts // groups
        order = (by_node[:, :, None] * size + np.arange(size)).reshape(layers, experts)
    own = np.take_along_axis(weights, order, 1).reshape(layers * nodes, -1)
    copies = _copies(own, slots // nodes, gpus // nodes)
    local = np.repeat(np.tile(np.arange(own.shape[1]), len(own)), copies.ravel()).reshape(len(own), -1)
    each = np.take_along_axis(own / copies, local, 1)
    by_gpu = np.argsort(_packed(each, gpus // nodes), axis=1, kind="stable")
    placed = np.take_along_axis(local, by_gpu, 1).reshape(layers, nodes, -1)
    order = order.reshape(layers, nodes, -1)
    found = np.take_along_axis(order, placed, 2).reshape(layers, gpus, -1)
    found.sort(axis=2)
    placement = found.reshape(layers, slots).astype(np.int32)
    if experts % gpus == 0:
        plain = unbalanced(experts, slots=slots, gpus=gpus, layers=layers)
        worse = gpu_loads(weights, placement, gpus).max(1) > gpu_loads(weights, plain, gpus).max(1)
        placement[worse] = plain[worse]
    return placement


def unbalanced(experts: int, *, slots: int, gpus: int, layers: int = 1) -> Int32s:
    """Experts in their order, as many on every GPU, and spare slots with copies that take load off no other GPU.

    Returns: int32 [layers, slots]. Raises: ConfigError if experts do not divide over GPUs.
    """
    _check(experts, slots, gpus, 1, 1)
    if experts % gpus:
        raise ConfigError(f"{experts} experts do not divide over {gpus} GPUs\nhint: spare slots make up for it")
    own = experts // gpus
    first = np.arange(gpus)[:, None] * own
    row = np.sort(first + np.arange(slots // gpus) % own, axis=1).reshape(-1)
    return np.tile(row.astype(np.int32), (layers, 1))


def gpu_loads(loads: NDArray[np.generic], placement: Int32s, gpus: int) -> Float64s:
    """The load of every GPU, [layers, gpus], if the tokens of an expert are spread evenly over its copies."""
    weights = np.asarray(loads, np.float64)
    layers, experts = weights.shape
    rows = np.arange(layers)[:, None]
    copies = np.zeros((layers, experts), np.int64)
    np.add.at(copies, (rows, placement), 1)
    each = np.take_along_axis(weights / np.maximum(copies, 1), placement, 1)
    totals: Float64s = each.reshape(layers, gpus, -1).sum(2)
    return totals


def settled(before: Int32s, after: Int32s, gpus: int, nodes: int = 1) -> Int32s:
    """`after` with its GPUs renamed within their nodes, so that few experts have to be moved.

    Pairs of an old and a new GPU are made from those that have the most in common; of equals the lowest numbers.
    """
    layers = len(after)
    had, has = _held(before, gpus), _held(after, gpus)
    common = np.einsum("lge,lhe->lgh", had, has)  # [layers, before, after]
    node = np.arange(gpus) // (gpus // nodes)
    common[:, node[:, None] != node[None, :]] = -1
    out = after.reshape(layers, gpus, -1).copy()
    rows = np.arange(layers)
    for _ in range(gpus):
        best = common.reshape(layers, -1).argmax(1)
        old, new = np.divmod(best, gpus)
        out[rows, old] = after.reshape(layers, gpus, -1)[rows, new]
        common[rows, old, :] = -2
        common[rows, :, new] = -2
    return out.reshape(after.shape)


def fetched(before: Int32s, after: Int32s, gpus: int) -> Int64s:
    """Experts that each GPU must get from other GPUs, [layers, gpus]; an expert that it holds already is copied
    locally."""
    new = np.maximum(_held(after, gpus) - _held(before, gpus), 0)
    missing: Int64s = new.sum(2)
    return missing


def _held(placement: Int32s, gpus: int) -> Int64s:
    """1 where a GPU holds an expert, [layers, gpus, experts]."""
    layers, slots = placement.shape
    held = np.zeros((layers, gpus, int(placement.max()) + 1), np.int64)
    gpu = np.arange(slots) // (slots // gpus)
    held[np.arange(layers)[:, None], gpu[None, :], placement] = 1
    return held


def _check(experts: int, slots: int, gpus: int, nodes: int, groups: int) -> None:
    for name, value in (("slots", slots), ("gpus", gpus), ("nodes", nodes), ("groups", groups)):
        if value < 1:
            raise ConfigError(f"`{name}` must be at least 1, got `{value}`")
    if slots % gpus:
        raise ConfigError(f"`slots` must be as many on each of {gpus} GPUs, got `{slots}`\nhint: a multiple of {gpus}")
    if slots < experts:
        raise ConfigError(f"`slots` must be at least the {experts} experts, got `{slots}`")
    if gpus % nodes:
        raise ConfigError(f"`nodes` {nodes} does not divide the {gpus} GPUs")
    most = experts * gpus // nodes
    if slots > most:
        raise ConfigError(f"`slots` must be at most {most}, every expert on every GPU of a node, got `{slots}`")
    if nodes > 1 and (groups % nodes or experts % groups):
        raise ConfigError(
            f"`groups` must divide the {experts} experts and be divided by {nodes} nodes, got `{groups}`\n"
            "hint: nodes=1 places without groups"
        )


def _copies(weights: Float64s, slots: int, copies_max: int) -> Int64s:
    """Number of copies of every item, [rows, items], `slots` in all, with the least possible load of the heaviest
    copy."""
    copies = np.ones(weights.shape, np.int64)
    rows = np.arange(len(weights))
    for _ in range(slots - weights.shape[1]):
        each = np.where(copies < copies_max, weights / copies, -1.0)
        heaviest = each == each.max(1, keepdims=True)
        copies[rows, np.where(heaviest, -copies, -slots - 1).argmax(1)] += 1
    return copies


def _packed(weights: Float64s, packs: int) -> Int64s:
    """A pack for every item, [rows, items], as many in each: the better of both ways, row by row."""
    one, other = _heaviest_first(weights, packs), _in_rounds(weights, packs)
    better = _fullest(weights, other, packs) < _fullest(weights, one, packs)
    return np.where(better[:, None], other, one)


def _fullest(weights: Float64s, pack: Int64s, packs: int) -> Float64s:
    totals = np.zeros((len(weights), packs))
    np.add.at(totals, (np.arange(len(weights))[:, None], pack), weights)
    most: Float64s = totals.max(1)
    return most


def _heaviest_first(weights: Float64s, packs: int) -> Int64s:
    """Each item, the heaviest first, to the lightest pack that is not full."""
    rows, items = np.arange(len(weights)), weights.shape[1]
    order = np.argsort(-weights, axis=1, kind="stable")
    totals = np.zeros((len(weights), packs))
    free = np.full((len(weights), packs), items // packs)
    pack = np.zeros(weights.shape, np.int64)
    for place in range(items):
        item = order[:, place]
        chosen = np.where(free > 0, totals, np.inf).argmin(1)
        pack[rows, item] = chosen
        totals[rows, chosen] += weights[rows, item]
        free[rows, chosen] -= 1
    return pack


def _in_rounds(weights: Float64s, packs: int) -> Int64s:
    """The heaviest items one to each pack, the next heaviest to the lightest of them, and so on."""
    rows = np.arange(len(weights))[:, None]
    order = np.argsort(-weights, axis=1, kind="stable")
    totals = np.zeros((len(weights), packs))
    pack = np.zeros(weights.shape, np.int64)
    for first in range(0, weights.shape[1], packs):
        item = order[:, first : first + packs]
        lightest = np.argsort(totals, axis=1, kind="stable")
        pack[rows, item] = lightest
        totals[rows, lightest] += weights[rows, item]
    return pack
