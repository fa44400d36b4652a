"""The cost of one loop of the scheduler on the host's processor (the CPU lane), in microseconds.

The CPU lane runs beside the GPU lane; with overlap its time hides behind the forward pass in flight. The cost grows
little with the batch, because steady decode works on columns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.sim.cost.model import BatchShape

PLAN_SOURCE = (
    "plan + launch: 100 us at 256 rows and 250 us at 1,024 are this scheduler's limits for plan, result and stream "
    "together (docs/cost-models.md); SGLang's plan + glue measured 404 us at 256 rows, 1,083 us at 1,024, nano-vllm's "
    "71 and 261 us. 120 + 0.25 per row lies between, and includes launching one CUDA graph"
)
RESULT_SOURCE = (
    "results: nano-vllm's post-processing measured 61 us at 256 rows and 247 us at 1,024 (0.24 us per row); "
    "SGLang's 1,711 and 6,844 us with one message per token. 40 + 0.25 per row assumes batched messages"
)
ARRIVAL_SOURCE = (
    "arrival: the target is at most 150 us for a prefill-only request of 2,560 tokens in all phases; SGLang's "
    "admission measured 73 to 81 us per request, its radix match 15 us"
)


@dataclass(frozen=True, slots=True)
class CpuModel:
    """CPU times that are linear in the number of rows; every coefficient can be overridden."""

    plan_fixed_us: float = 120.0
    plan_row_us: float = 0.25
    result_fixed_us: float = 40.0
    result_row_us: float = 0.25
    arrival_us: float = 60.0  # per arrival: validate, match the radix tree, enqueue

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"CpuModel: `{field}` must be at least 0 and finite, got `{value}`")

    def plan_us(self, shape: BatchShape) -> float:
        """Return the time from `LaneReady` to the launched batch."""
        return self.plan_fixed_us + self.plan_row_us * (shape.extend_rows + shape.decode_rows)

    def result_us(self, rows: int) -> float:
        """Return the time to collect one `BatchFinished` of `rows` rows and send its messages."""
        return self.result_fixed_us + self.result_row_us * rows

    def describe(self) -> dict[str, Any]:
        """Return the coefficients and their sources."""
        sources = {"plan": PLAN_SOURCE, "result": RESULT_SOURCE, "arrival": ARRIVAL_SOURCE}
        return {"kind": "lines", **asdict(self), "sources": sources}
