"""What one pass over the waiting queue costs before any request is admitted, beside SGLang's policies.

Workload W5: 16, 64 or 128 requests wait with 2,560 tokens each, in 64 groups that share 2,048; the groups' prefixes
are in the radix cache, in pages of 16. Per policy, CPU microseconds of putting the line in order, the median of many:

    cold     nothing is remembered: every request is matched
    warm     nothing has changed since the pass before
    insert   one prompt of another client was cached since
    extend   the same, below the shared prefix of one group: its requests have to be matched again
    admit    the first was admitted and its like arrived since

SGLang was measured on another machine; the calibration beside gives the ratio of that one to this one.

    LOCKSTEP_PEERS=... python benchmarks/policy_pass.py
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from calibration import calibrate, show
from peers import load_workloads

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import LaneReady, RequestArrived, TokenIds
from lockstep.core.requests.table import RequestState
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.ordering import Ordering

QUEUES = (16, 64, 128)
PAGE_TOKENS = 16
GROUPS, SHARED_TOKENS, OWN_TOKENS = 64, 2048, 512
ROUNDS = 200

# CPU us per pass for 16, 64 and 128 waiting requests, W5. Of fcfs and lof the ends of a range were published.
SGLANG_US: dict[str, dict[str, tuple[float, ...]]] = {
    "fcfs": {"cold": (2, 3, 3), "warm": (2, 3, 3)},
    "lof": {"cold": (4, 7, 9), "warm": (4, 7, 9)},
    "lpm": {"cold": (466, 1861, 4707), "warm": (179, 704, 1357)},
    "dfs-weight": {"cold": (496, 1985, 4904), "warm": (192, 761, 1373)},
    "hrrn": {"cold": (536, 2074, 4995), "warm": (185, 714, 1372)},
}
POLICIES = (*SGLANG_US, "spf", "priority", "random", "routing-key")


def waiting_engine(policy: str, prompts: list[list[int]], waiting: int) -> Engine:
    """An engine in which one request runs and so many wait, their groups' prefixes cached."""
    engine = Engine(SchedConfig(schedule_policy=policy, page_size=PAGE_TOKENS, pages=65536, overlap_depth=0))
    radix = engine.memory.radix
    engine.memory.table.reserve((SHARED_TOKENS + OWN_TOKENS) // PAGE_TOKENS, 0)
    for i in range(GROUPS):
        prefix = np.array(prompts[i][:SHARED_TOKENS], np.int32).tobytes()
        pages = engine.memory.pool.alloc(SHARED_TOKENS // PAGE_TOKENS)
        radix.insert("", prefix, pages)
    engine.step(arrival(0, prompts[-1]))
    engine.step(LaneReady(0))
    for i in range(waiting):
        engine.step(arrival(i + 1, prompts[i]))
    return engine


def arrival(request_id: int, prompt: list[int]) -> RequestArrived:
    tokens = TokenIds(np.array(prompt, np.int32).tobytes())
    key = "ab"[request_id % 2]
    outputs = 100 + request_id % 7
    return RequestArrived(
        time_us=0,
        request_id=request_id,
        prompt=tokens,
        max_new_tokens=outputs,
        priority=request_id % 3,
        routing_key=key,
    )


def measure(policy: str, prompts: list[list[int]], waiting: int) -> dict[str, float]:
    """CPU us of one pass that admits no request, by what happened before it."""
    engine = waiting_engine(policy, prompts, waiting)
    radix = engine.memory.radix
    rng = np.random.default_rng(5)

    def look() -> None:
        turn = engine.ordering.turn(engine)
        next(turn)
        turn.close()
        engine.ordering.close()

    def forget() -> None:
        engine.ordering = Ordering(engine.config)
        for request in engine.waiting:
            request.matched = None

    def cache_a_stranger() -> None:
        grow(b"")

    def cache_below_a_group() -> None:
        grow(np.array(prompts[int(rng.integers(GROUPS))][:SHARED_TOKENS], np.int32).tobytes())

    def grow(prefix: bytes) -> None:
        tokens = prefix + rng.integers(40_000, 50_000, PAGE_TOKENS, np.int32).tobytes()
        radix.insert("", tokens, np.arange(len(tokens) // (4 * PAGE_TOKENS), dtype=np.int32))

    def admit_one() -> None:
        turn = engine.ordering.turn(engine)
        request = next(turn)
        request.state = RequestState.PREFILLING
        next(turn)
        turn.close()
        engine.ordering.close()
        request.state, request.matched = RequestState.WAITING, None
        engine.waiting.append(request)

    before: dict[str, Callable[[], None]] = {
        "cold": forget,
        "warm": lambda: None,
        "insert": cache_a_stranger,
        "extend": cache_below_a_group,
        "admit": admit_one,
    }
    costs = {}
    for name, prepare in before.items():
        look()
        samples = []
        for _ in range(ROUNDS):
            prepare()
            start = time.perf_counter_ns()
            look()
            samples.append(time.perf_counter_ns() - start)
        costs[name] = statistics.median(samples) / 1e3
    return costs


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    prompts: list[list[int]] = load_workloads().w2_prompts(GROUPS, 3, SHARED_TOKENS, OWN_TOKENS)

    show(calibrate())
    print()

    gc.collect()
    gc.disable()
    columns = ("cold", "warm", "insert", "extend", "admit")
    for number, waiting in enumerate(QUEUES):
        print(f"{waiting} waiting, us".ljust(16), *(f"{name:>8}" for name in columns), "  SGLang cold, warm")
        for policy in POLICIES:
            costs = measure(policy, prompts, waiting)
            published = SGLANG_US.get(policy, {})
            theirs = [published[kind][number] for kind in ("cold", "warm") if kind in published]
            print(f"  {policy:14}", *(f"{costs[name]:8.1f}" for name in columns), *(f"{us:9,.0f}" for us in theirs))
        print()
    print("SGLang's figures are from its machine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
