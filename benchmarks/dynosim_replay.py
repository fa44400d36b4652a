"""Replay of a trace in NVIDIA Dynamo's offline simulator, for `trace_speed.py`. Runs in an environment of its own.

    PYTHON dynosim_replay.py TRACE.jsonl --block-tokens 512 --workers 8 --router kv_router

Prints one JSON object: requests, user and system seconds of the replay, memory, and the peer's own report in short.
"""

import argparse
import json
import resource
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--block-tokens", type=int, required=True, help="tokens of a block of the trace")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--router", default="round_robin", choices=["round_robin", "kv_router"])
    parser.add_argument("--backend", default="sglang", choices=["sglang", "vllm"])
    parser.add_argument("--concurrency", type=int, help="requests or sessions in progress, in a closed loop")
    parser.add_argument("--pages", type=int, default=26_000)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--batch-tokens", type=int, default=512)
    asked = parser.parse_args()

    from dynamo._core import _normalize_mocker_config, run_mocker_trace_replay

    engine = {
        "backend": asked.backend,
        "num_gpu_blocks": asked.pages,
        "block_size": 16,
        "max_num_seqs": asked.running,
        "max_num_batched_tokens": asked.batch_tokens,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    if asked.backend == "sglang":
        engine["sglang"] = {"chunked_prefill_size": asked.batch_tokens}
    more = {} if asked.concurrency is None else {"replay_concurrency": asked.concurrency}
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = run_mocker_trace_replay(
        [str(asked.trace)],
        extra_engine_args=_normalize_mocker_config({"engine": engine}),
        num_workers=asked.workers,
        router_mode=asked.router,
        trace_block_size=asked.block_tokens,
        capture_planner_details=False,
        **more,
    )
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "requests": sum(1 for _ in asked.trace.open()),
                "user_s": after.ru_utime - before.ru_utime,
                "system_s": after.ru_stime - before.ru_stime,
                "memory_mb": after.ru_maxrss / 1024,
                "report": str(getattr(result, "summary", result))[:2_000],
            }
        )
    )


if __name__ == "__main__":
    main()
