"""The effects of placing experts by load (EPLB): the load of the fullest rank, and the experts that are moved.

Popularities of LAYERS_DRAWN layers are drawn from the distribution of `experts.py`. The balancer of engines,
`lockstep.core.cluster.expert_placement`, places the experts. The placement is then measured under the traffic of the
next interval, in which a share `expert_drift` of the experts has newly drawn popularities. The result enters the
formulas of `experts.py` as two coefficients of variation. With `load_cv`, experts placed at random would give the
fullest rank the same load; `slot_cv` is that of the popularity of slots. The formulas keep the variation of single
batches, which no placement removes.

A run with one scheduler follows events instead: `sim/host/expert_traffic.py`. For stages, and for ranks with schedulers
of their own, the long run is averaged: after every `eplb_interval` passes each GPU fetches the experts of the new
placement that it lacks; ranks of the new placement are renumbered so that most experts are in place already. Loads are
expectations: a balancer that counts tokens over a finite window estimates them slightly less well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lockstep.core.cluster.expert_placement import balance, fetched, gpu_loads, settled
from lockstep.sim.cost.experts import Float64s
from lockstep.sim.cost.models import ExpertShape
from lockstep.sim.cost.parallel import Parallelism

LAYERS_DRAWN = 64
SEED = 20_250_224  # seed of the draws; fixed, so that chance adds no difference between configurations
POINTS = 16_384  # grid points of the integral over a rank's popularity
SHAPES = (1e-3, 1e9)  # bounds of the search for the shape of a gamma distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The imbalance of assignments over ranks, and of tokens over the slots of a rank."""

    slots: int  # expert slots of all ranks in one layer
    load_cv: float
    slot_cv: float
    long_run: float = 0.0  # long-run load of the fullest rank over the mean load; 0 without EPLB
    unbalanced: float = 0.0  # the same ratio for experts placed at random; 0 without EPLB
    fetched: float = 0.0  # experts per layer fetched at each rebalancing by the GPU that fetches the most


def spread_of(experts: ExpertShape, split: Parallelism) -> Spread:
    """Return the imbalance of the experts of a layer over `split.ep` ranks."""
    if split.measured is not None:
        load_cv, slot_cv = split.measured
        return Spread(slots=experts.count + split.redundant_experts, load_cv=load_cv, slot_cv=slot_cv)
    if not split.eplb:
        return Spread(slots=experts.count, load_cv=split.expert_cv, slot_cv=split.expert_cv)
    slots = experts.count + split.redundant_experts
    return _balanced(experts.count, slots, split.ep, split.expert_cv, split.expert_drift)


@cache
def _balanced(experts: int, slots: int, ranks: int, cv: float, drift: float) -> Spread:
    random = np.random.Generator(np.random.Philox(SEED))
    first, again = (drawn_popularity(random, (LAYERS_DRAWN, experts), cv) for _ in range(2))
    then = np.where(random.random((LAYERS_DRAWN, experts)) < drift, again, first)
    before = balance(first, slots=slots, gpus=ranks)
    after = settled(before, balance(then, slots=slots, gpus=ranks), ranks)
    return replace(
        measured_spread(then, before, ranks),
        unbalanced=fullest_of_gammas(experts // ranks / cv**2, ranks),
        fetched=float(fetched(before, after, ranks).mean(0).max()),
    )


def drawn_popularity(random: np.random.Generator, shape: tuple[int, int], cv: float) -> Float64s:
    """Return drawn popularities of experts, in any unit: [layers, experts] with a coefficient of variation."""
    return random.gamma(1.0 / cv**2, size=shape) + 1e-300 if cv else np.ones(shape)


def measured_spread(loads: Float64s, placement: np.ndarray[tuple[int, ...], np.dtype[np.int32]], ranks: int) -> Spread:
    """Return the imbalance of loads under a placement.

    Args:
        loads: [layers, experts]; placement: [layers, slots].
    """
    by_rank, each = gpu_loads(loads, placement, ranks), _by_slot(loads, placement)
    long_run, slots = float((by_rank.max(1) / by_rank.mean(1)).mean()), placement.shape[1]
    return Spread(
        slots=slots,
        load_cv=math.sqrt(slots // ranks / _shape_of(long_run, ranks)),
        slot_cv=float((each.std(1) / each.mean(1)).mean()),
        long_run=long_run,
    )


def _by_slot(loads: Float64s, placement: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Float64s:
    """Return the load of each slot, float64 [layers, slots]: `gpu_loads` with one slot per GPU."""
    return gpu_loads(loads, placement, placement.shape[1])


def _shape_of(factor: float, ranks: int) -> float:
    """Return the shape of the gamma distribution of rank popularities whose greatest is `factor` times the mean."""
    low, high = map(math.log, SHAPES)
    for _ in range(60):
        middle = (low + high) / 2
        if fullest_of_gammas(math.exp(middle), ranks) > factor:
            low = middle
        else:
            high = middle
    return math.exp(high)


@cache
def fullest_of_gammas(shape: float, ranks: int) -> float:
    """Return the expected greatest of `ranks` Dirichlet-distributed shares over their mean.

    The shares of independent gammas are independent of their sum, so the expected greatest share is the expected
    greatest gamma over the expected sum. The integral is over the logarithm, where the density is smooth for every
    shape.
    """
    deviation = math.sqrt(shape)
    low = math.log(max(shape - 12.0 * deviation, 1e-12 * shape))
    high = math.log(shape + 12.0 * deviation + 30.0)
    t = np.linspace(low, high, POINTS)
    density = np.exp(shape * t - np.exp(t) - math.lgamma(shape))
    step = t[1] - t[0]
    begun = math.exp(min(shape * low - math.lgamma(shape + 1.0), 0.0)) if shape <= 144.0 else 0.0
    below = begun + np.append(0.0, np.cumsum((density[1:] + density[:-1]) * step / 2.0))
    below = np.minimum(below / below[-1], 1.0)
    x = np.exp(t)
    within = below**ranks
    greatest = x[-1] - float(((within[1:] + within[:-1]) / 2.0 * np.diff(x)).sum()) - float(within[0] * x[0])
    return max(float(greatest) / shape, 1.0)
