"""CPU time of the search for stop texts per token, beside an answer without any; optionally of another checkout, too.

A token is a word of seven characters, decoded without a tokenizer. `ordinary` stop texts occur nowhere in the text,
`hostile` ones agree with it everywhere but at their last character. Rounds alternate between checkouts, and the figures
are medians over the rounds. Without stop texts a token is only decoded.

    python benchmarks/stop_texts.py [--other CHECKOUT] [--tokens 20000] [--rounds 5]

`--other` names a checkout with an environment of its own, in `.venv`; its rounds alternate with those of this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
MEASURE = """
import json, sys, time
try:
    from lockstep.host.stop_texts import StopTexts
except ImportError:
    from lockstep.host.text import StopTexts

class Words:
    def stream(self, prompt_ids):
        return lambda token: " aaaaaa"

def us_per_token(stops, tokens):
    watch = StopTexts(Words(), [], stops) if stops else None
    step = Words().stream([])
    began = time.process_time()
    for number in range(tokens):
        step(0) if watch is None else watch.push(number, 0)
    return (time.process_time() - began) * 1e6 / tokens

ordinary = ["\\n\\n", "###", "</answer>", "User:"]
hostile = [(" aaaaaa" * 72)[i:i + 500] + "!" for i in range(16)]
cases = {"no stops": [], "1 ordinary": ordinary[:1], "4 ordinary": ordinary, "1 hostile": hostile[:1],
         "16 hostile": hostile}
tokens = int(sys.argv[1])
print(json.dumps({name: us_per_token(stops, min(tokens, 4000) if "hostile" in name else tokens)
                  for name, stops in cases.items()}))
"""


def measured(checkout: Path, tokens: int) -> dict[str, float]:
    """Return CPU us per token by case, measured in a fresh process of a checkout."""
    python = sys.executable if checkout == HERE else str(checkout / ".venv/bin/python")
    done = subprocess.run(
        [python, "-c", MEASURE, str(tokens)], cwd=checkout, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--other", type=Path, help="a checkout that is measured in alternation, as `before`")
    options.add_argument("--tokens", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    checkouts = {"here": HERE} if given.other is None else {"before": given.other.resolve(), "here": HERE}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(given.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(measured(checkout, given.tokens))
    print(f"{'':12}" + "".join(f"{name:>16}" for name in checkouts) + "   us per token")
    for case in rounds["here"][0]:
        figures = [statistics.median(one[case] for one in rounds[name]) for name in checkouts]
        print(f"{case:12}" + "".join(f"{figure:16.2f}" for figure in figures))


if __name__ == "__main__":
    main()
