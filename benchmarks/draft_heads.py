"""What a head drafts: chains and trees of a trained head of EAGLE-3, and tokens of random heads.

All engines are in one process and take turns, so that only ratios mean anything: tokens per second with drafts over
those without. Every request must be answered with the same tokens.

    lockstep demo-model /tmp/head --head                      trains a head for the demo model, some minutes
    python benchmarks/draft_heads.py --head /tmp/head         acceptance by depth, tokens per verification, ratios
    python benchmarks/draft_heads.py --check 200              greedy tokens of so many requests with random heads
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lockstep.runtime import LLM, Params
from tests.support.heads import saved_head, saved_with_mtp

BEGINNINGS = (
    "Returns the number of", "This function is", "If the file does not exist,", "The following example shows",
    "Changed in version", "class Node:", "def __init__(self", "A dictionary that maps", "Raises an exception if",
    "The default value is", "This module provides", "Note that the", "For example, the string", "When the object is",
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "chain of 1": {"num_speculative_tokens": 1},
    "chain of 3": {"num_speculative_tokens": 3},
    "chain of 5": {"num_speculative_tokens": 5},
    "tree of 4, 2 wide": {"num_speculative_tokens": 4, "speculative_topk": 2},
    "tree of 8, 3 wide": {"num_speculative_tokens": 8, "speculative_topk": 3, "speculative_num_steps": 4},
    "tree of 16, 4 wide": {"num_speculative_tokens": 16, "speculative_topk": 4, "speculative_num_steps": 5},
}
SMALL_POOL: dict[str, Any] = {"page_size": 4, "pages": 600}


def prompts_of(count: int, seed: int) -> list[str]:
    """Beginnings of sentences of documentation, with a number, so that no two are equal."""
    rng = random.Random(seed)
    return [f"{rng.choice(BEGINNINGS)} {rng.randrange(10**6)}"[: rng.randint(8, 60)] for _ in range(count)]


def timed(llm: LLM, prompts: list[str], params: Params) -> tuple[list[list[int]], float]:
    """Tokens of all, and output tokens per second."""
    began_s = time.perf_counter()
    answers = [answer.token_ids for answer in llm.generate(prompts, params)]
    return answers, sum(map(len, answers)) / (time.perf_counter() - began_s)


def compared(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Print one line for each shape. Returns how many texts differ."""
    different, params = 0, Params(max_new_tokens=arguments.tokens, ignore_eos=True)
    print(f"{arguments.rows} rows, {arguments.tokens} tokens each, {arguments.rounds} rounds")
    print("shape                with / without   tokens a verification   right by depth   tokens")
    with LLM(**options, radix_cache=False) as plain:
        for name, shape in SHAPES.items():
            with LLM(**options, radix_cache=False, draft_model=arguments.head, **shape) as drafted:
                ratios = []
                for round_ in range(arguments.rounds + 1):  # the first warms up
                    prompts = prompts_of(arguments.rows, round_)
                    expected, without = timed(plain, prompts, params)
                    found, with_drafts = timed(drafted, prompts, params)
                    different += sum(one != other for one, other in zip(found, expected, strict=True))
                    ratios += [with_drafts / without] if round_ else []
                counts = drafted.stats().drafts
            by_depth = " ".join(f"{right / counts.verifications:.2f}" for right in counts.right_by_position)
            verdict = "the same" if not different else f"{different} DIFFER"
            print(
                f"{name:20} {statistics.median(ratios):8.2f}         {counts.accepted_length_mean:8.2f}"
                f"                {by_depth:26} {verdict}",
                flush=True,
            )
    return different


def checked(count: int, options: dict[str, Any]) -> int:
    """Print how many of `count` greedy answers differ with random heads. Returns their number."""
    different, params, prompts = 0, Params(max_new_tokens=24, ignore_eos=True), prompts_of(count, 7)
    with LLM(**options, **SMALL_POOL) as plain:
        expected = [answer.token_ids for answer in plain.generate(prompts, params)]
    with tempfile.TemporaryDirectory() as scratch:
        mtp = saved_with_mtp(Path(scratch) / "model", 1)
        heads: dict[str, dict[str, Any]] = {
            "eagle": {"draft_model": saved_head(Path(scratch) / "head", 2)},
            "mtp": {"model": mtp, "speculative_method": "mtp"},
        }
        for kind, settings in heads.items():
            for shape in ("chain of 3", "tree of 8, 3 wide"):
                for more in ({"overlap_depth": 0}, {"overlap_depth": 1, "retract_every": 9}):
                    with LLM(**{**options, **settings}, **SMALL_POOL, **SHAPES[shape], **more) as llm:
                        found = [answer.token_ids for answer in llm.generate(prompts, params)]
                        counts = llm.stats().drafts
                    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
                    different += wrong
                    print(
                        f"{kind:6} {shape:18} {more}: {count - wrong} of {count} equal, "
                        f"{counts.right} of {counts.drafts} drafts right",
                        flush=True,
                    )
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, help="folder of a head for the model")
    parser.add_argument("--model", type=Path, help="folder of the model; the demo model if left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", type=int, metavar="REQUESTS", help="tokens only, with random heads")
    arguments = parser.parse_args()
    options = {"model": arguments.model, "device": arguments.device, "dtype": "float32", "max_running_requests": 16}
    if arguments.check:
        return 1 if checked(arguments.check, options) else 0
    if arguments.head is None:
        parser.error("give --head DIR: `lockstep demo-model DIR --head` trains one")
    return 1 if compared(arguments, options) else 0


if __name__ == "__main__":
    sys.exit(main())
