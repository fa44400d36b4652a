#!/usr/bin/env python3
"""Device and host memory together against known hit counts of a real trace, and a simulated engine beside them.

    LOCKSTEP_DATA=... python benchmarks/cache_oracles.py > benchmarks/results/cache_oracles.txt

The trace is Mooncake's conversation trace: prompts are lists of hash ids, one for 512 tokens. The known counts are
those of an exact cache that evicts leaves, least recently used first (`prefix_cache_oracles.json`); it is made again
here and must come to the same counts, so that it can be queried for single requests and other numbers of them.

1. The engine's own tiers (`core/kv/tiers.py`), written through: a block is a token and a page, and requests are
   served one at a time by a host that copies in an instant. An engine always computes the last block of a prompt, so
   the cache is asked about the others. That must be equal, request for request.
2. `lockstep simulate` on the beginning of the trace at its own rate, with as much host memory: prompts that come
   together cannot read each other's blocks before they are computed, answers take room, what runs is not evicted.
   Where the device is larger than the host, it finds more.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recorded_data import CACHE_BLOCK_TOKENS, CACHE_TRACE, cache_oracles, cache_trace, data_folder

from lockstep.core.contract.commands import CopyToHost, LaunchBatch, LoadFromHost
from lockstep.core.contract.config import CacheTiers, SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    HostCopyFinished,
    LaneReady,
    Observed,
    RequestAdmitted,
    RequestArrived,
    TokenIds,
)
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.catalogue import load_model
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

DEVICE_PAGES = 500  # the longest prompt has 247 blocks
MODEL, GPUS = "llama-3.1-8b", 4
CAPACITIES = (2_000, 10_000, 50_000)  # blocks on the host, of those that are published
SIMULATED = 1_000  # requests
ANSWER = 9  # every answer is one token, which is never fed back and so in no cache

Prompts = Sequence[Sequence[int]]


def exact_hits(prompts: Prompts, capacity: int) -> list[int]:
    """Blocks of each prompt that the cache has when it comes."""
    held: OrderedDict[int, None] = OrderedDict()
    found = []
    for prompt in prompts:
        hits = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
        found.append(hits)
        for block in reversed(prompt):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return found


def engine_hits(prompts: Prompts, capacity: int) -> tuple[list[int], int]:
    """Blocks of each prompt that device and host have, and how many of all were loaded from the host."""
    tiers = CacheTiers(host_pages=capacity, load_tokens_min=0)
    engine = Engine(SchedConfig(page_size=1, pages=DEVICE_PAGES, chunked_prefill_size=None, tiers=tiers))
    found, loaded = [], 0
    for number, prompt in enumerate(prompts):
        ids = TokenIds(np.array(prompt, np.int32).tobytes())
        arrived = RequestArrived(time_us=number, request_id=number, prompt=ids, max_new_tokens=1)
        events: deque[Observed] = deque([arrived, LaneReady(number)])
        while events:
            step = engine.step(events.popleft())
            for decided in step.decided:
                if isinstance(decided, RequestAdmitted):
                    found.append(decided.cached_tokens)
                    loaded += decided.host_tokens
            for command in step.commands:
                if isinstance(command, LaunchBatch):
                    tokens = np.full(len(command.plan.sample_rows), ANSWER, np.int32).tobytes()
                    events.append(BatchFinished(number, command.plan.batch_id, tokens))
                elif isinstance(command, CopyToHost | LoadFromHost):
                    events.append(HostCopyFinished(number, command.copy_id, len(command.host_pages)))
                    events.append(LaneReady(number))
    return found, loaded


def simulated_share(path: Path, capacity: int) -> float:
    """The share of prompt tokens that a simulated engine with as much host memory finds cached."""
    kv_bytes = load_model(MODEL).kv_bytes_per_token("bf16")
    scenario = Scenario(
        engine="none",
        model=MODEL,
        gpu="h200",
        workload=str(path),
        tp=GPUS,
        limit=SIMULATED,
        tiers={"host_cache_gb": capacity * CACHE_BLOCK_TOKENS * kv_bytes / 1e9},
        settings={"context_tokens_max": 131_072},
    )
    summary: dict[str, Any] = simulate(assemble(scenario, {})).data.summary
    return float(summary["cache"]["hit_ratio"])


def main() -> int:
    rows = cache_trace()
    prompts = [row["hash_ids"] for row in rows]
    oracles = {row["capacity_blocks"]: row["hit_blocks"] for row in cache_oracles()
               if row["capacity_blocks"] in CAPACITIES}  # fmt: skip
    differences = 0
    print(f"1. {len(prompts)} prompts, one at a time; {DEVICE_PAGES} blocks on the device")
    print(f"{'host':>7} {'known':>8} {'made again':>10} {'not last':>10} {'engine':>8} {'from host':>9} {'us each':>8}")
    for capacity, hit_blocks in oracles.items():
        exact = exact_hits(prompts, capacity)
        possible = [min(hits, len(prompt) - 1) for hits, prompt in zip(exact, prompts, strict=True)]
        start = time.process_time()
        found, loaded = engine_hits(prompts, capacity)
        request_us = (time.process_time() - start) / len(prompts) * 1e6
        differences += sum(exact) != hit_blocks
        wrong = sum(one != other for one, other in zip(found, possible, strict=True))
        differences += wrong
        verdict = "equal" if not wrong and sum(exact) == hit_blocks else f"{wrong} REQUESTS DIFFER"
        counts = f"{hit_blocks:8} {sum(exact):10} {sum(possible):10} {sum(found):8} {loaded:9}"
        print(f"{capacity:7} {counts} {request_us:8.0f}  {verdict}", flush=True)

    first = rows[:SIMULATED]
    tokens = sum(row["input_length"] for row in first)
    print(f"\n2. {MODEL} on {GPUS} H200, {SIMULATED} requests at the trace's rate: prompt tokens found")
    print(f"{'host':>7} {'exact cache':>11} {'simulated':>9}")
    for capacity in (5_000, 20_000):
        exact = exact_hits([row["hash_ids"] for row in first], capacity)
        read = zip(exact, first, strict=True)
        share = sum(min(CACHE_BLOCK_TOKENS * hits, row["input_length"]) for hits, row in read) / tokens
        simulated = simulated_share(data_folder(CACHE_TRACE) / CACHE_TRACE, capacity)
        print(f"{capacity:7} {share:11.4f} {simulated:9.4f}", flush=True)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
