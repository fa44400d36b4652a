"""An upper estimate of the requests per second of one engine, from the cost model alone, without simulation.

GPU time per request, with every batch full and no waiting:

    new prompt tokens x time of a full extend / its tokens  +  (output - 1) x time of a full decode / its rows

A full decode has as many rows as fit, in the table and in KV pages. Prefixes that two prompts share count as cached. In
a pipeline, prefills follow each other at the rate of the slowest stage. Lengths are means; the time of attention is
convex in them, so their spread only adds time. Queueing and partly filled batches, which are left out, also only add
time. The estimate is the start of a search and is never reported as a result.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.core.contract.config import SchedConfig
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.workload.workload import WorkloadSummary


class CapacityEstimate(NamedTuple):
    """The best case of one engine."""

    requests_per_s: float
    prefill_us: float  # GPU time per request
    decode_us: float  # GPU time per request
    decode_rows: int  # rows of a full batch


def estimate_capacity(cost: CostModel, config: SchedConfig, workload: WorkloadSummary) -> CapacityEstimate:
    """Return the best case of one engine; `requests_per_s` is above 0."""
    prompt, output = workload.prompt.mean, max(workload.output.mean, 1.0)
    new_tokens = new_prompt_tokens(workload) if config.radix_cache else max(prompt, 1.0)
    chunk = min(config.chunked_prefill_size or config.max_prefill_tokens, config.max_prefill_tokens)
    tokens = max(int(min(chunk, new_tokens * config.max_running_requests)), 1)
    pairs = int(tokens * prompt / 2)
    prompts = 1 if getattr(cost, "shards", 1) == 1 else max(round(tokens / new_tokens), 1)  # shards divide prompts
    extend_us = _between_us(cost, BatchShape(extend_rows=prompts, extend_tokens=tokens, extend_pairs=pairs))
    prefill_us = new_tokens * extend_us / tokens

    per_request = max(new_tokens + output / 2, 1.0)  # unshared KV tokens of a request at half of its answer
    fitting = int(config.pool_tokens / per_request)
    rows = max(min(fitting, config.max_running_requests), 1)
    context = int(rows * (prompt + output / 2))
    shape = BatchShape(decode_rows=rows, decode_context_tokens=context, sampled_rows=rows)
    decode_us = (output - 1.0) * cost.batch_us(shape).mean_us / rows
    return CapacityEstimate(1e6 / max(prefill_us + decode_us, 1e-3), prefill_us, decode_us, rows)


def new_prompt_tokens(workload: WorkloadSummary) -> float:
    """Return the mean tokens of a prompt after its shared prefix; at least 1."""
    return max(workload.prompt.mean * (1.0 - workload.sharing_ratio), 1.0)


def _between_us(cost: CostModel, shape: BatchShape) -> float:
    """Return the least time between the ends of two prefills; in a pipeline, batches overlap."""
    return max(cost.stage_us(shape)) if isinstance(cost, PipelineModel) else cost.batch_us(shape).mean_us
