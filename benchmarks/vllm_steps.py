"""Does the profile `vllm` decide as vLLM does? Batches and preemptions on the inputs on which vLLM's were counted.

    w2   prefill: 512 requests of 2,560 tokens, G groups sharing 2,048; a budget of 8,192 tokens
    w3   closed loop: C=256, 2,000 requests of 1,024 prompt tokens, 64 to 192 out
    w6   the same under memory pressure: 800 requests, 256 to 768 out, a pool of 196,608 tokens

No time is involved: vLLM (V1 0.33) was driven step by step, and so is the engine here. Overlap depth 0 stands for its
synchronous scheduling, 1 for its asynchronous one.

    LOCKSTEP_PEERS=... python benchmarks/vllm_steps.py [--json FILE]

Exit status 1 if a count of batches is off by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metered_host import MeteredHost
from peers import load_workloads, packed
from scheduler_speed import CHUNK_TOKENS, EOS, PEERS_CLOSED_STEPS, PEERS_PREFILL_STEPS, PEERS_PRESSED, closed_loop

from lockstep.core import SchedConfig
from lockstep.core.contract.profiles import profile_settings

GROUPS = (64, 1, 512)
AMPLE_TOKENS = 1 << 21
BAR = 0.01
KINDS = ("vLLM", "vLLM async")  # by overlap depth


def config(pool_tokens: int, running: int, depth: int) -> SchedConfig:
    """The profile, with the settings of the measured runs."""
    profile = profile_settings("vllm")
    return SchedConfig(
        **{
            **profile,
            "pages": pool_tokens // profile["page_size"],
            "max_running_requests": running,
            "chunked_prefill_size": CHUNK_TOKENS,
            "max_prefill_tokens": CHUNK_TOKENS,
            "overlap_depth": depth,
            "eos_token_ids": (EOS,),
        }
    )


def prefill_all(host: MeteredHost, prompts: list[bytes]) -> None:
    """All requests arrive at once; until all prompts are computed."""
    for prompt in prompts:
        host.arrive(prompt, 600)
    while host.engine.waiting or host.engine.prefilling is not None:
        host.next_batch()


def count(settings: SchedConfig, play: Callable[[MeteredHost], object]) -> tuple[int, int]:
    """Batches launched and requests retracted."""
    with tempfile.TemporaryDirectory(prefix="lockstep-steps-") as folder:
        host = MeteredHost(settings, Path(folder))
        play(host)
        host.journal.close()
    return host.launches, host.retractions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    workloads = load_workloads()
    rows: list[dict[str, Any]] = []

    def add(workload: str, depth: int, batches: int, published: int, retractions: int = 0, preempted: int = 0) -> None:
        off = batches / published - 1
        rows.append(
            {"workload": workload, "overlap": depth, "batches": batches, "vllm_batches": published}
            | {"retractions": retractions, "vllm_preemptions": preempted}
        )
        met = "met" if abs(off) <= BAR else "MISSED"
        print(f"{workload:15} {depth:7} {batches:8,} {published:6,} {off:+8.2%} {retractions:12} {preempted:6}   {met}")

    print("workload        overlap  batches   vLLM      off  retractions   vLLM   bar 1 % of batches")
    for groups, published in zip(GROUPS, PEERS_PREFILL_STEPS["vLLM"], strict=True):
        prompts = [packed(tokens) for tokens in workloads.w2_prompts(groups, 512 // groups, 2048, 512)]
        batches, _ = count(config(AMPLE_TOKENS, 512, 0), lambda host, prompts=prompts: prefill_all(host, prompts))
        add(f"w2 {groups} groups", 0, batches, published)
    closed = [(packed(tokens), out) for tokens, out in workloads.w3_requests(2000)]
    pressed = [(packed(tokens), out) for tokens, out in workloads.w3_requests(800, lo=256, hi=768)]
    for depth, kind in enumerate(KINDS):
        batches, _ = count(config(AMPLE_TOKENS, 256, depth), lambda host: closed_loop(host, closed, 256))
        add("w3", depth, batches, PEERS_CLOSED_STEPS[kind][0])
        batches, retractions = count(config(196_608, 256, depth), lambda host: closed_loop(host, pressed, 256))
        preempted, published, _ = PEERS_PRESSED[kind]
        add("w6", depth, batches, int(published), retractions, int(preempted))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(abs(row["batches"] / row["vllm_batches"] - 1) > BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
