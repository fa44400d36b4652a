"""What drafts by n-grams are worth: texts that repeat themselves, and texts that do not, with and without drafts.

Both engines are in one process and take turns, so that only ratios mean anything: tokens per second with drafts over
those without. Every request must be answered with the same tokens; with --retract-every most of them are retracted on
the way, and with --temperature they are drawn. What a repetitive text gains is the accepted length less what a
verification costs more than a decode.

    python benchmarks/drafts.py                         the demo model, greedy
    python benchmarks/drafts.py --random-weights 1      a model that soon repeats itself
    python benchmarks/drafts.py --model DIR --device cuda --rows 16 --tokens 256
    python benchmarks/drafts.py --check 200             greedy tokens of so many requests, overlap 0 and 1, retracted
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.runtime import LLM, Params

WORDS = "page row batch token cache slot step plan clock lane radix chunk".split()
SMALL_POOL = {"page_size": 4, "pages": 400}


def repetitive(rng: random.Random, number: int) -> str:
    """A text of one sentence over and over, as of a table, a log, or code that is edited."""
    sentence = " ".join(rng.sample(WORDS, 6))
    return f"{number}: " + f"{sentence}. " * 8


def varied(rng: random.Random, number: int) -> str:
    """A text of words in no order."""
    return f"{number}: " + " ".join(rng.choice(WORDS) for _ in range(48))


def timed(llm: LLM, prompts: list[str], params: list[Params]) -> tuple[list[list[int]], float]:
    """Tokens of all, and output tokens per second."""
    began_s = time.perf_counter()
    answers = [answer.token_ids for answer in llm.generate(prompts, params)]
    return answers, sum(map(len, answers)) / (time.perf_counter() - began_s)


def compared(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Print the ratios. Returns how many texts differ."""
    different = 0
    print(f"{arguments.rows} rows, {arguments.tokens} tokens, {arguments.drafts} drafts, overlap {arguments.overlap}")
    print("text         with / without   accepted length   drafts right   tokens")
    for name, make in (("repetitive", repetitive), ("varied", varied)):
        drafting = {"speculative_method": "ngram", "num_speculative_tokens": arguments.drafts}
        with LLM(**options, radix_cache=False) as plain, LLM(**options, radix_cache=False, **drafting) as drafted:
            ratios = []
            for round_ in range(arguments.rounds + 1):  # the first compiles and warms up
                rng = random.Random(round_)
                prompts = [make(rng, number) for number in range(arguments.rows)]
                params = [
                    Params(
                        max_new_tokens=arguments.tokens,
                        ignore_eos=True,
                        temperature=arguments.temperature,
                        seed=number,
                    )
                    for number in range(arguments.rows)
                ]
                expected, without = timed(plain, prompts, params)
                found, with_drafts = timed(drafted, prompts, params)
                different += sum(one != other for one, other in zip(found, expected, strict=True))
                ratios += [with_drafts / without] if round_ else []
            counts = drafted.stats().drafts
        verdict = "the same" if not different else f"{different} DIFFER"
        print(
            f"{name:12} {statistics.median(ratios):8.2f}         {counts.accepted_length_mean:8.2f}          "
            f"{100 * counts.acceptance_ratio:6.1f} %     {verdict}"
        )
    return different


def checked(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Greedy tokens of many requests at overlap 0 and 1 with retractions. Returns how many differ."""
    rng = random.Random(1)
    prompts = [
        (repetitive if number % 2 else varied)(rng, number)[: rng.randrange(8, 120)]
        for number in range(arguments.check)
    ]
    params = [Params(max_new_tokens=rng.randrange(1, arguments.tokens)) for _ in prompts]
    with LLM(**options) as llm:
        expected = [answer.token_ids for answer in llm.generate(prompts, params)]
    different = 0
    for depth in (0, 1):
        settings = {**options, "overlap_depth": depth, "retract_every": 5, **SMALL_POOL}
        with LLM(**settings, speculative_method="ngram", num_speculative_tokens=arguments.drafts) as llm:
            found = [answer.token_ids for answer in llm.generate(prompts, params)]
            stats = llm.stats()
        wrong = sum(one != other for one, other in zip(found, expected, strict=True))
        different += wrong
        print(
            f"overlap {depth}: {len(found)} requests, {sum(map(len, found)):,} tokens, "
            f"{stats.engine.counts.retractions} retractions, accepted length "
            f"{stats.drafts.accepted_length_mean:.2f}, {wrong} differ"
        )
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; the demo model unless given")
    parser.add_argument("--random-weights", type=int, metavar="SEED", help="instead of the model's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=4, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer, at most")
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--overlap", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--check", type=int, metavar="REQUESTS", help="compare tokens only")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"device": arguments.device, "overlap_depth": arguments.overlap}
    options["max_running_requests"] = max(arguments.rows, 8)
    options["random_weights"] = arguments.random_weights
    if arguments.model is not None:
        options["model"] = arguments.model
    return 1 if (checked if arguments.check else compared)(arguments, options) else 0


if __name__ == "__main__":
    sys.exit(main())
