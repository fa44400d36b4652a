"""The time of a batch that runs as two halves: the communication of one lies under the computation of the other.

    compute         A1 | B1 | A2 | B2 | ...           of blocks: what lies between two collectives
    communication        a1 | b1 | a2 | ...           of each block, by its collective

A half computes a block while the other one communicates. Both then change places, so each block of both halves takes
max(B, a) + max(A, b), where the batch as a whole takes (A + B) + (a + b). The first computation and the last collective
lie alone. Three losses stand against it:

- A and B are computed apart: each half reads all weights, and launches every kernel.
- The collectives have their latency twice.
- Kernels that communicate occupy multiprocessors (`OVERLAP_SHARE`), so what is computed beside them takes longer.

Hence it gains where communication and computation both take long, that is with many tokens over slow links, and loses
where reading the weights is most of the time. Work that is done once per pass (sampling, the CPU) is not split.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from msgspec import structs

from lockstep.sim.cost.hardware import Constant
from lockstep.sim.cost.model import BatchShape, CostModel, Duration
from lockstep.sim.cost.terms import LAUNCH, new_tokens

OVERLAP_SHARE = Constant(
    20 / 132,
    "estimate: the 20 multiprocessors that high-throughput all-to-all kernels occupy by default (DeepEP, "
    "Buffer.num_sms), of the 132 of an H100",
)
ONCE = frozenset(
    "logits_and_sampling expert_moves engine_step engine_rows engine_prefill step_us row_us prompt_us "
    "kv_token_us".split()
)
"""Terms that belong to the pass, not to its halves. Others with `LAUNCH`: launching both halves takes twice as long."""
WAITS = frozenset(("engine_waits", "collective_us"))
"""Terms beside the collectives that ranks spend in them, waiting for the slowest one."""
LARGE = BatchShape(extend_rows=1, extend_tokens=10**7, extend_pairs=10**14)
"""A batch with kernels that take longer than launching them."""


@runtime_checkable
class SplitTerms(CostModel, Protocol):
    """A cost model with terms, some of which are collectives: `TermSum`, or a calibrated one."""

    collectives: int  # in one pass

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time of a batch by term; the values sum to `batch_us`."""
        ...

    @property
    def collective_names(self) -> frozenset[str]:
        """The terms that are collectives."""
        ...


class TwoBatchModel:
    """A cost model of an engine that splits batches. Shapes without `halves` have the times of the base.

    Args:
        base: of one stage.
    """

    def __init__(self, base: SplitTerms) -> None:
        self.base = base
        self._names = base.collective_names | WAITS
        self._blocks = max(1, base.collectives)
        self._fixed_us = base.terms_us(LARGE)[LAUNCH]

    # mechanism: two-batch-overlap (simulated)
    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of one pass and its sampling."""
        whole = self.base.batch_us(shape)
        if shape.halves is None:
            return whole
        us = sum(self.terms_us(shape).values())
        return Duration(us, whole.spread_us * us / whole.mean_us if whole.mean_us else 0.0, whole.lasting)

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time by term; of collectives, the part that no computation hides. The values sum to `batch_us`."""
        if shape.halves is None:
            return self.base.terms_us(shape)
        found = {name: us for name, us in self.base.terms_us(shape).items() if name in ONCE}
        computed, communicated, floor_us = [], [], 0.0
        hidden: dict[str, float] = {}
        for half in shape.halves:
            terms = self.base.terms_us(structs.replace(half, sampled_rows=0)) if new_tokens(half) else {}
            launch_us = terms.pop(LAUNCH, self._fixed_us) - self._fixed_us
            if launch_us > 0.0:
                floor_us += launch_us + sum(terms.values())
            own = {name: us for name, us in terms.items() if name not in ONCE}
            computed.append(sum(us for name, us in own.items() if name not in self._names))
            communicated.append(sum(us for name, us in own.items() if name in self._names))
            for name, us in own.items():
                into = hidden if name in self._names else found
                into[name] = into.get(name, 0.0) + us
        us = overlapped_us(computed, communicated, self._blocks)
        exposed = (us - sum(computed)) / sum(communicated) if sum(communicated) else 0.0
        found |= {name: exposed * of_term for name, of_term in hidden.items()}
        found[LAUNCH] = self._fixed_us + max(0.0, floor_us - sum(found.values()))
        return found

    def describe(self) -> dict[str, Any]:
        """Return the description of the base, with the constant of the overlap."""
        described = self.base.describe()
        constants = {"overlap_share": {"value": OVERLAP_SHARE.value, "source": OVERLAP_SHARE.source}}
        return {
            **described,
            "kind": f"{described['kind']}, two-batch overlap",
            "constants": dict(sorted({**described["constants"], **constants}.items())),
        }


def overlapped_us(computed: list[float], communicated: list[float], blocks: int) -> float:
    """Return the time of two halves that take turns.

    Args:
        computed: us of both halves, in which they compute; communicated: likewise, in which they communicate.
        blocks: parts in which a half does both in turn.
    """
    first, second = (us / blocks for us in computed)
    of_first, of_second = (us / blocks for us in communicated)
    beside_first, beside_second = _side_by_side_us(second, of_first), _side_by_side_us(first, of_second)
    return first + blocks * beside_first + (blocks - 1) * beside_second + of_second


def _side_by_side_us(compute_us: float, communicate_us: float) -> float:
    """Return the time of one half's computation and the other's communication, begun together."""
    slowed_us = compute_us + OVERLAP_SHARE.value * min(compute_us, communicate_us)
    return max(slowed_us, communicate_us)
