"""Tokens per second of a whole vLLM engine on the demo model, by vLLM's own scheduler and by Lockstep's.

    python -m benchmarks.vllm_throughput [--streams 64,256] [--rounds 5] [--tokens 64] [--json FILE]

Run it with the interpreter of an environment that has vLLM, with PYTHONPATH as `dev.py vllm-test` sets it. Both engines
are in one process. In each round one engine after the other serves so many equal requests at once, and the order
changes by round; the figure is the median of the rounds' ratios. Loops: synchronous, and asynchronous scheduling, which
vLLM's CPU platform switches off by itself. Exit status 1 if Lockstep is below 0.97 of vLLM in any cell.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.support import LOCKSTEP, OWN, VOCAB, Asked, engine, model_folder

BAR = 0.97
PROMPT_TOKENS = 64


def requests_of(streams: int, tokens: int, seed: int) -> list[Asked]:
    """Return requests with prompts of their own, so that no round finds the prompts of the one before in the cache."""
    rng = random.Random(seed)
    params = {"max_tokens": tokens, "ignore_eos": True}
    return [Asked(tuple(rng.randrange(10, VOCAB) for _ in range(PROMPT_TOKENS)), params) for _ in range(streams)]


def tokens_per_s(llm: Any, requests: list[Asked]) -> float:
    """Serve requests all at once. Returns output tokens per second, from the first `add_request` to the last token."""
    prompts = [{"prompt_token_ids": list(one.prompt)} for one in requests]
    params = [one.sampling() for one in requests]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - began
    return sum(len(sample.token_ids) for one in outputs for sample in one.outputs) / took_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens per second of vLLM under both schedulers.")
    parser.add_argument("--streams", default="64,256", help="requests at once (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    streams = [int(text) for text in options.streams.split(",")]
    sizes = {"max_num_seqs": max(streams), "max_num_batched_tokens": 4096, "num_gpu_blocks_override": 6000}
    rows = []
    print(f"{'loop':>6}{'streams':>9}{'vLLM':>11}{'Lockstep':>11}   output tokens/s; ratio, and of the rounds")
    for loop in ("sync", "async"):
        overlap = loop == "async"
        folder = model_folder("demo")
        with (
            engine(folder, scheduler=OWN, overlap=overlap, **sizes) as own,
            engine(folder, scheduler=LOCKSTEP, overlap=overlap, **sizes) as ours,
        ):
            engines = {"vllm": own, "lockstep": ours}
            for count in streams:
                found: dict[str, list[float]] = {"vllm": [], "lockstep": []}
                for number in range(options.rounds + 1):  # the first round warms up
                    order = list(engines) if number % 2 else list(engines)[::-1]
                    for name in order:
                        speed = tokens_per_s(engines[name], requests_of(count, options.tokens, seed=number))
                        if number:
                            found[name].append(speed)
                ratios = [ours / own for ours, own in zip(found["lockstep"], found["vllm"], strict=True)]
                row = {
                    "loop": loop, "streams": count, "ratio": statistics.median(ratios), "ratios": ratios,
                    **{name: statistics.median(values) for name, values in found.items()},
                }  # fmt: skip
                rows.append(row)
                shown = " ".join(f"{one:.2f}" for one in ratios)
                print(
                    f"{loop:>6}{count:>9}{row['vllm']:>11,.0f}{row['lockstep']:>11,.0f}   {row['ratio']:.3f}: {shown}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["ratio"] < BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
