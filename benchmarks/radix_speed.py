"""What a match, an insert, a lock and an evicted leaf cost, beside the prefix trees of other engines.

Workload W4: prompts of 1k to 8k tokens (4.6k on average) over 64 system prompts with 8 contexts each. They are bytes
before the clock starts, as they are in the engine. Times are CPU microseconds per call, garbage collection off, and
the median of three rounds: in the first, a virtual machine may pay for memory it never touched before. The peers were
measured on another machine; the calibration beside gives the ratio of that one to this one, and bars go by it.

    LOCKSTEP_PEERS=... python benchmarks/radix_speed.py [--n 2000]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import numpy as np
from calibration import calibrate, show, slowdown
from peers import load_workloads, packed

from lockstep.core.kv.radix import RadixCache

EVICT_TOKENS = 65_536
PAGE_TOKENS = (1, 16, 64)
ROUNDS = 3

# CPU us per call, W4 with 10,000 prompts, for pages of 1, 16 and 64 tokens. Published per eviction of 18 leaves.
PEERS_US = {
    "SGLang Rust": {
        "match, building": (14.9, 15.3, 15.8),
        "insert": (29.2, 31.1, 31.9),
        "match, full hit": (20.1, 20.5, 20.9),
        "lock + unlock": (7.2, 8.0, 8.1),
        "pages_of": (8.1, 8.4, 8.5),
        "evict a leaf": (395 / 18, 409 / 18, 449 / 18),
    },
    "SGLang Python": {
        "match, building": (31.8, 39.3, 46.2),
        "insert": (34.7, 40.8, 45.8),
        "match, full hit": (41.7, 49.2, 58.6),
        "lock + unlock": (9.7, 11.1, 10.4),
        "pages_of": (8.2, 9.1, 8.9),
        "evict a leaf": (2183 / 18, 2473 / 18, 2795 / 18),
    },
    "mini-sglang": {
        "match, building": (18.4, 20.9, 25.0),
        "insert": (27.6, 28.4, 32.8),
        "match, full hit": (25.8, 27.6, 33.9),
        "lock + unlock": (2.4, 2.2, 2.3),
        "pages_of": (6.5, 6.2, 6.5),
        "evict a leaf": (2380 / 18, 2392 / 18, 2554 / 18),
    },
}
BARS_US = {"match, full hit": 15.0, "insert": 25.0, "evict a leaf": 5.0}


def measure(prompts: list[bytes], page_tokens: int) -> dict[str, float]:
    """CPU us per call of everything the cache does, on one tree built from all prompts."""
    clock = time.process_time_ns
    clock_ns = min(-clock() + clock() for _ in range(1000))
    counts = [len(prompt) // (4 * page_tokens) for prompt in prompts]
    ids = np.arange(sum(counts), dtype=np.int32)
    starts = np.cumsum([0, *counts]).tolist()
    cache = RadixCache(page_tokens)
    cost: dict[str, float] = {}

    match_ns = insert_ns = 0
    for prompt, count, start in zip(prompts, counts, starts, strict=False):
        pages = ids[start : start + count]
        a = clock()
        cache.match("", prompt, count)
        b = clock()
        cache.insert("", prompt, pages)
        c = clock()
        match_ns += b - a - clock_ns
        insert_ns += c - b - clock_ns
    cost["match, building"] = match_ns / len(prompts) / 1e3
    cost["insert"] = insert_ns / len(prompts) / 1e3

    a = clock()
    matches = [cache.match("", prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    cost["match, full hit"] = (clock() - a) / len(prompts) / 1e3
    assert [match.pages for match in matches] == counts

    a = clock()
    for prompt, count in zip(prompts, counts, strict=True):
        cache.match("", prompt, count - 1)  # the engine always leaves a token to compute
    cost["match, all but a page"] = (clock() - a) / len(prompts) / 1e3

    a = clock()
    for match in matches:
        cache.unlock(cache.lock(match))
    cost["lock + unlock"] = (clock() - a) / len(prompts) / 1e3

    nodes = [match.node for match in matches if match.node is not None]
    a = clock()
    for node in nodes:
        cache.pages_of(node)
    cost["pages_of"] = (clock() - a) / len(prompts) / 1e3
    del matches, nodes, node, match

    leaves, half, evictions = sum(1 for _ in cache.walk()), cache.total_pages // 2, []
    while cache.total_pages > half:
        a = clock()
        cache.evict(EVICT_TOKENS // page_tokens)
        evictions.append(clock() - a - clock_ns)
    leaves -= sum(1 for _ in cache.walk())
    cost["evict a leaf"] = sum(evictions) / leaves / 1e3
    cost["evict a leaf, without the first eviction"] = sum(evictions[1:]) / (leaves * (1 - 1 / len(evictions))) / 1e3
    cache.reset()  # cuts every link, so that the next round finds this memory free
    return cost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2000, help="prompts (default 2000; the peers ran 10000)")
    count: int = parser.parse_args().n
    prompts = [packed(tokens) for tokens in load_workloads().w4_sequences(count)]

    machine = calibrate()
    show(machine)
    print()

    gc.collect()
    gc.disable()
    missed = 0
    for column, page_tokens in enumerate(PAGE_TOKENS):
        rounds = [measure(prompts, page_tokens) for _ in range(ROUNDS)]
        cost = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        print(
            f"{count} prompts, pages of {page_tokens}".ljust(42), "us", *(f"{peer:>15}" for peer in PEERS_US), "   bar"
        )
        for name, us in cost.items():
            ratios = [f"{rows[name][column] / us:.1f}x" if name in rows else "" for rows in PEERS_US.values()]
            bar = BARS_US.get(name)
            met = bar is None or us <= bar * slowdown(machine)
            missed += not met
            verdict = "" if bar is None else f"{bar:6.0f} {'met' if met else 'MISSED'}"
            print(f"  {name:34} {us:8.1f}", *(f"{ratio:>15}" for ratio in ratios), verdict)
        print()
    print("Nx: the peer took N times as long, on its machine")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
