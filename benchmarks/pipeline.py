"""Bubbles of two pipeline stages with one, two and four microbatches, against the formula and against one stage.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--rounds 3] [--layers 8] [--hidden 512] [--rows 16] [--tokens 60]

A model with random weights decodes `rows` requests at the same time, on one thread per process. Two stages with m
microbatches of rows / m requests each. While m is below the number of stages, a stage waits for the tokens of its only
microbatches: it is idle for 1 - m / 2 of the time. From m = 2 on no stage waits. Stages are as busy as the processor
time of their processes; runs of all engines are taken in turn, and the best of each counts. The machine needs two idle
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.runtime import LLM, Params

ENGINES: dict[str, dict[str, Any]] = {
    "one stage": {},
    "1 microbatch": {"pp": 2, "pp_size": 1},
    "2 microbatches": {"pp": 2},
    "4 microbatches": {"pp": 2, "pp_async_batch_depth": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("rounds", 3), ("layers", 8), ("hidden", 512), ("rows", 16), ("tokens", 60)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    arguments = parser.parse_args()
    best: dict[str, tuple[float, float, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.layers, arguments.hidden)
        options = {"device": "cpu", "dtype": "float32", "random_weights": 1, "max_running_requests": arguments.rows}
        options |= {"pages": 20 * arguments.rows, "page_size": 16, "grammar_backend": "none"}
        made = {name: LLM(folder, **options, **more) for name, more in ENGINES.items()}
        try:
            for _ in range(arguments.rounds):
                for name, llm in made.items():
                    run = measured(llm, arguments.rows, arguments.tokens)
                    best[name] = max(best.get(name, run), run)
        finally:
            for llm in made.values():
                llm.close()
    alone = best["one stage"][0]
    print(f"{'':16}{'tokens/s':>10}{'of one stage':>14}{'busy share of stages':>24}{'formula':>10}")
    for name, (rate, _, shares) in best.items():
        microbatches = int(name[0]) if name[0].isdigit() else 0
        formula = f"{min(1.0, microbatches / 2):.2f}" if microbatches else ""
        print(f"{name:16}{rate:10,.0f}{rate / alone:14.2f}{' '.join(f'{one:.2f}' for one in shares):>24}{formula:>10}")


def write_config(folder: Path, layers: int, hidden: int) -> None:
    """Write the settings of a model without weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def measured(llm: LLM, rows: int, tokens: int) -> tuple[float, float, list[float]]:
    """Return tokens per second, seconds, and the processor time of each stage, first to last, as a share of them."""
    processes = [os.getpid()]
    if llm.group is not None:
        processes = [*(worker.process.pid for worker in reversed(llm.group._workers)), os.getpid()]
    prompts = [[3 + number, 7, 11, 13] for number in range(rows)]
    began, before = time.perf_counter(), [cpu_s(pid) for pid in processes]
    llm.generate(prompts, Params(max_new_tokens=tokens, ignore_eos=True))
    took = time.perf_counter() - began
    shares = [(cpu_s(pid) - start) / took for pid, start in zip(processes, before, strict=True)]
    return rows * tokens / took, took, shares


def cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
