"""The placement of experts on GPUs: an expert-parallel load balancer (EPLB), and the counts that it uses.

    placement = balance(loads, slots=288, gpus=8)       loads: [layers, experts], placement: [layers, slots]
    gpu_loads(loads, placement, gpus=8).max(1)          load of the fullest GPU of every layer

    slots of a layer   | 0 .. 35 | 36 .. 71 | ...       the slots of one GPU are contiguous; each holds one expert
                         GPU 0     GPU 1

With more slots than experts the heaviest experts get further copies; tokens for an expert are spread evenly over its
copies. The algorithm is that of DeepSeek's EPLB (github.com/deepseek-ai/EPLB):

1. **Copies.** Each spare slot goes to the expert with the most load per copy. This minimises the load of the heaviest
   copy.
2. **Packing.** Copies are packed onto GPUs, the same number on each, so that the fullest GPU has little more than its
   share. Two ways are tried. The first assigns the heaviest copy first, to the emptiest GPU with a free slot. The
   second works in rounds of one copy per GPU, the heaviest of a round to the emptiest GPU. The second is at most
   (2 - 1 / gpus) times the best packing, because GPUs never differ by more than one copy. The first is nearly always
   better. The better result is used, layer by layer.
3. **Nodes.** With `nodes` above 1, whole groups of experts (a token's experts are in few groups) are first packed onto
   nodes, so that a token is sent to few nodes. Steps 1 and 2 then run within each node.

If experts divide evenly over GPUs, a layer keeps its plain placement unless the new one is better. So no layer becomes
worse. Of equal choices the first is taken: equal loads have equal placements everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import ConfigError, ContractError

if TYPE_CHECKING:
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
        """Return the loads with one more report. Raises ContractError for a malformed report or another shape."""
        if before is None:
            return cls(counts_of(event), 1)
        return cls(before.counts + counts_of(event, before.counts.shape), before.reports + 1)


def counts_of(event: ExpertLoadMeasured, shape: tuple[int, ...] | None = None) -> Int64s:
    """Return the report as int64 [layers, experts]. Raises ContractError if it is malformed or of another shape."""
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
    """Return a placement of experts by the algorithm described in the module docstring.

    Args:
        loads: [layers, experts], not negative, in any unit.
        slots: slots of each layer over all GPUs, the same number on each.
        nodes: nodes among which the GPUs are divided; 1 ignores groups (the global policy).
        groups: groups of neighbouring experts; each stays on one node if there are several.
    Returns: int32 [layers, slots]: the expert in each slot, ascending within a GPU.
    Raises: ConfigError, with the numbers, for numbers that do not divide or do not fit.
    """
    weights = np.asarray(loads, np.float64)
    if weights.ndim != 2 or not weights.size or not np.isfinite(weights).all() or weights.min() < 0:
        raise ConfigError("`loads` must be finite numbers of at least 0, [layers, experts]")
    layers, experts = weights.shape
    _check(experts, slots, gpus, nodes, groups)
    order = np.broadcast_to(np.arange(experts), weights.shape)  # experts sorted by node
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
    """Return the plain placement: experts in order, the same number on every GPU.

    Spare slots hold copies of experts of the same GPU, so that they change no load of a GPU.

    Returns: int32 [layers, slots].
    Raises: ConfigError if experts do not divide over GPUs.
    """
    _check(experts, slots, gpus, 1, 1)
    if experts % gpus:
        raise ConfigError(f"{experts} experts do not divide over {gpus} GPUs\nhint: spare slots make up for it")
    own = experts // gpus
    first = np.arange(gpus)[:, None] * own
    row = np.sort(first + np.arange(slots // gpus) % own, axis=1).reshape(-1)
    return np.tile(row.astype(np.int32), (layers, 1))


def gpu_loads(loads: NDArray[np.generic], placement: Int32s, gpus: int) -> Float64s:
    """Return the load of every GPU, float64 [layers, gpus]. Tokens are spread evenly over the copies of an expert."""
    weights = np.asarray(loads, np.float64)
    layers, experts = weights.shape
    rows = np.arange(layers)[:, None]
    copies = np.zeros((layers, experts), np.int64)
    np.add.at(copies, (rows, placement), 1)
    each = np.take_along_axis(weights / np.maximum(copies, 1), placement, 1)
    totals: Float64s = each.reshape(layers, gpus, -1).sum(2)
    return totals


def settled(before: Int32s, after: Int32s, gpus: int, nodes: int = 1) -> Int32s:
    """Return `after` with its GPUs renumbered within their nodes, so that few experts have to be moved.

    Old and new GPUs are paired greedily by the most common experts; of equals the lowest numbers first.
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
    """Return how many experts each GPU must fetch from other GPUs, int64 [layers, gpus].

    An expert that the GPU holds already is copied locally.
    """
    new = np.maximum(_held(after, gpus) - _held(before, gpus), 0)
    missing: Int64s = new.sum(2)
    return missing


def _held(placement: Int32s, gpus: int) -> Int64s:
    """Return 1 for each expert that a GPU holds and 0 for others, int64 [layers, gpus, experts]."""
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
    """Return the number of copies of every item, int64 [rows, items], `slots` in each row.

    The numbers minimise the load of the heaviest copy. No item has more than `copies_max` copies.
    """
    copies = np.ones(weights.shape, np.int64)
    rows = np.arange(len(weights))
    for _ in range(slots - weights.shape[1]):
        each = np.where(copies < copies_max, weights / copies, -1.0)
        heaviest = each == each.max(1, keepdims=True)
        copies[rows, np.where(heaviest, -copies, -slots - 1).argmax(1)] += 1
    return copies


def _packed(weights: Float64s, packs: int) -> Int64s:
    """Return the pack of every item, int64 [rows, items], the same number in each: the better of two ways per row."""
    one, other = _heaviest_first(weights, packs), _in_rounds(weights, packs)
    better = _fullest(weights, other, packs) < _fullest(weights, one, packs)
    return np.where(better[:, None], other, one)


def _fullest(weights: Float64s, pack: Int64s, packs: int) -> Float64s:
    totals = np.zeros((len(weights), packs))
    np.add.at(totals, (np.arange(len(weights))[:, None], pack), weights)
    most: Float64s = totals.max(1)
    return most


def _heaviest_first(weights: Float64s, packs: int) -> Int64s:
    """Return the pack of every item: the heaviest item first, to the lightest pack that is not full."""
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
    """Return the pack of every item: in rounds of one item per pack, the heaviest of a round to the lightest pack."""
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
