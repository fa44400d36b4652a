"""What a decode step costs the scheduling thread of vLLM: its own scheduler and Lockstep's, in one process, no model.

    python benchmarks/vllm_scheduling_cost.py [--running 32,256,1024] [--steps 200] [--rounds 5] [--json FILE]

Run it with the interpreter of an environment that has vLLM and lockstep-vllm. Both schedulers get the same requests and
the same made-up tokens. `schedule()` and `update_from_output()` of steady decode steps are timed in alternating rounds.
Exit status 1 if Lockstep's step costs more than a third of vLLM's at 256 running.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import lockstep.vllm

MODEL = Path(__file__).resolve().parent.parent / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
BLOCK_TOKENS, BLOCKS, PROMPT_TOKENS = 16, 60_000, 512
BAR = 1 / 3
AT = 256


def configuration(running: int, *, overlap: bool) -> tuple[VllmConfig, KVCacheConfig]:
    """vLLM's configuration for so many requests at once, and a KV cache of one group."""
    config = EngineArgs(
        model=str(MODEL), max_model_len=2048, max_num_seqs=running, max_num_batched_tokens=8192, enforce_eager=True,
        block_size=BLOCK_TOKENS, dtype="float32",
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = BLOCKS
    config.scheduler_config.async_scheduling = overlap
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return config, KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def filled(kind: type[SchedulerInterface], running: int) -> SchedulerInterface:
    """A scheduler with so many requests in decode."""
    config, kv_cache = configuration(running, overlap=False)
    scheduler = kind(config, kv_cache, StructuredOutputManager(config), BLOCK_TOKENS, BLOCK_TOKENS, log_stats=True)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    for i in range(running):
        params = SamplingParams(temperature=0, max_tokens=1400, ignore_eos=True)
        params.update_from_generation_config({}, None)
        prompt = [(i * 7 + j * 13) % 1900 for j in range(PROMPT_TOKENS)]
        scheduler.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
    while scheduler.get_request_counts()[1]:
        one_step(scheduler)
    for _ in range(3):
        one_step(scheduler)
    return scheduler


def one_step(scheduler: SchedulerInterface) -> float:
    """Run one step with made-up tokens; seconds in the scheduler."""
    began = time.perf_counter()
    output = scheduler.schedule()
    middle = time.perf_counter()
    names = list(output.num_scheduled_tokens)
    index = {name: i for i, name in enumerate(names)}
    chunk = {one.req_id for one in output.scheduled_new_reqs if output.num_scheduled_tokens[one.req_id] < PROMPT_TOKENS}
    tokens = [[] if name in chunk else [i % 1900] for i, name in enumerate(names)]
    result = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)
    again = time.perf_counter()
    scheduler.update_from_output(output, result)
    return middle - began + time.perf_counter() - again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="32,256,1024", help="requests in decode (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    init_none_hash(sha256)
    rows: list[dict[str, Any]] = []
    print("running     vLLM us  Lockstep us   ratio")
    for running in map(int, arguments.running.split(",")):
        kinds = {"vllm": VllmScheduler, "lockstep": lockstep.vllm.Scheduler}
        schedulers = {name: filled(kind, running) for name, kind in kinds.items()}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(arguments.rounds):
            for name, scheduler in schedulers.items():
                times[name].append(statistics.mean(one_step(scheduler) for _ in range(arguments.steps)))
        cost = {name: 1e6 * statistics.median(values) for name, values in times.items()}
        ratio = cost["lockstep"] / cost["vllm"]
        rows.append({"running": running, **cost, "ratio": ratio})
        print(f"{running:7} {cost['vllm']:11.0f} {cost['lockstep']:12.0f} {ratio:7.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["ratio"] > BAR for row in rows if row["running"] == AT))


if __name__ == "__main__":
    sys.exit(main())
