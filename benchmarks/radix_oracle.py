"""Is the radix cache exact LRU? Its hits on a real trace against published ones, at every capacity.

The trace is Mooncake's conversation trace, in which prompts are lists of hash ids, one for 512 tokens: here an id is a
token and a page is one token. Requests are served one at a time in file order: match, count, insert, trim. The oracle
keeps single blocks in an LRU list; it was computed without a tree.

    LOCKSTEP_DATA=... python benchmarks/radix_oracle.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from recorded_data import CACHE_BLOCK_TOKENS, CACHE_TRACE, cache_oracles, cache_trace

from lockstep.core.kv.radix import RadixCache


class Request(NamedTuple):
    prompt: bytes  # int32, one hash id per block
    input_tokens: int


class Outcome(NamedTuple):
    hit_blocks: int
    hit_tokens: int
    evictions: int


def serve(requests: Sequence[Request], capacity_blocks: int | None) -> Outcome:
    """Serve every request at once and alone; return what was hit and evicted."""
    cache = RadixCache(page_tokens=1, capacity_pages=capacity_blocks)
    hit_blocks = hit_tokens = evictions = 0
    for prompt, input_tokens in requests:
        blocks = np.frombuffer(prompt, dtype=np.int32)
        hits = cache.match("", prompt, len(blocks)).pages
        hit_blocks += hits
        hit_tokens += min(CACHE_BLOCK_TOKENS * hits, input_tokens)
        cache.insert("", prompt, blocks)
        evictions += len(cache.trim())
    cache.check([])
    return Outcome(hit_blocks, hit_tokens, evictions)


def main() -> int:
    requests = [
        Request(np.array(row["hash_ids"], dtype=np.int32).tobytes(), row["input_length"]) for row in cache_trace()
    ]
    print(f"{len(requests)} requests of {CACHE_TRACE}")
    print(f"{'capacity':>9} {'hit blocks':>11} {'hit tokens':>12} {'evictions':>10} {'us/request':>11}  oracle")
    differences = 0
    oracles = cache_oracles()
    for row in oracles:
        start = time.process_time()
        outcome = serve(requests, row["capacity_blocks"])
        request_us = (time.process_time() - start) / len(requests) * 1e6
        expected = Outcome(row["hit_blocks"], row["hit_tokens"], row["evictions"])
        differences += outcome != expected
        verdict = "equal" if outcome == expected else f"DIFFERS: {expected}"
        capacity = "none" if row["capacity_blocks"] is None else row["capacity_blocks"]
        counts = f"{outcome.hit_blocks:11} {outcome.hit_tokens:12} {outcome.evictions:10}"
        print(f"{capacity:>9} {counts} {request_us:11.1f}  {verdict}")
    print(f"{len(oracles) - differences} of {len(oracles)} capacities equal")
    return 1 if differences or not oracles else 0


if __name__ == "__main__":
    sys.exit(main())
