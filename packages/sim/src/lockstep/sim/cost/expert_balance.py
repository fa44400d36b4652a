"""What placing experts by their load (EPLB) changes: how full the fullest rank is, and what moving them costs.

Popularities of LAYERS_DRAWN layers are drawn as `experts.py` takes them to be, placed by the balancer that an engine
would use, `lockstep.core.cluster.expert_placement`, and measured under the traffic of the interval that follows,
in which a share `expert_drift` of the experts has a popularity drawn anew. What comes of it goes back into the formulas
of `experts.py` as two numbers: the coefficients of variation with which experts placed at random would fill the fullest
rank as much (`load_cv`), and with which slots are chosen (`slot_cv`). So chance, which no placement removes, stays in.

Each `eplb_interval` passes the new placement is fetched, GPU by GPU, renamed so that much of it is there already. Loads
are those of expectation: a balancer that counts a finite window estimates them a little worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from lockstep.core.cluster.expert_placement import balance, fetched, gpu_loads, settled
from lockstep.sim.cost.experts import Float64s
from lockstep.sim.cost.models import ExpertShape
from lockstep.sim.cost.parallel import Parallelism

LAYERS_DRAWN = 64
SEED = 20_250_224  # of the draws: the same in every run, so that configurations differ by what they are
POINTS = 16_384  # of an integral over a rank's popularity
SHAPES = (1e-3, 1e9)  # of a gamma distribution, that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How unevenly assignments fall on ranks, and tokens on the slots of a rank."""

    slots: int  # of all ranks, in one layer
    load_cv: float
    slot_cv: float
    long_run: float = 0.0  # the fullest rank's share of everything over its even share; with EPLB only
    unbalanced: float = 0.0  # the same without it
    fetched: float = 0.0  # experts per layer that a GPU gets at each rebalancing, of the GPU with the most


def spread_of(experts: ExpertShape, split: Parallelism) -> Spread:
    """How the experts of a layer lie over `split.ep` ranks."""
    if not split.eplb:
        return Spread(slots=experts.count, load_cv=split.expert_cv, slot_cv=split.expert_cv)
    slots = experts.count + split.redundant_experts
    return _balanced(experts.count, slots, split.ep, split.expert_cv, split.expert_drift)


@cache
def _balanced(experts: int, slots: int, ranks: int, cv: float, drift: float) -> Spread:
    random = np.random.Generator(np.random.Philox(SEED))
    shape = 1.0 / cv**2
    first, again = (random.gamma(shape, size=(LAYERS_DRAWN, experts)) + 1e-300 for _ in range(2))
    then = np.where(random.random((LAYERS_DRAWN, experts)) < drift, again, first)
    before = balance(first, slots=slots, gpus=ranks)
    after = settled(before, balance(then, slots=slots, gpus=ranks), ranks)
    loads = gpu_loads(then, before, ranks)
    long_run = float((loads.max(1) / loads.mean(1)).mean())
    each = _by_slot(then, before)
    own = slots // ranks
    return Spread(
        slots=slots,
        load_cv=math.sqrt(own / _shape_of(long_run, ranks)),
        slot_cv=float((each.std(1) / each.mean(1)).mean()),
        long_run=long_run,
        unbalanced=fullest_of_gammas(experts // ranks * shape, ranks),
        fetched=float(fetched(before, after, ranks).mean(0).max()),
    )


def _by_slot(loads: Float64s, placement: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Float64s:
    """What each slot has to do, [layers, slots]: with one slot to a GPU, what each GPU has."""
    return gpu_loads(loads, placement, placement.shape[1])


def _shape_of(factor: float, ranks: int) -> float:
    """The shape of gamma distributed popularities of ranks, the fullest of which has `factor` times its share."""
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
    """Return the expected greatest of so many shares of a whole, over their mean, if they are Dirichlet distributed.

    Shares of independent gammas do not depend on their sum, so the expected greatest share is the expected greatest
    gamma over the expected sum. It is integrated over the logarithm, in which the density is smooth for every shape.
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
