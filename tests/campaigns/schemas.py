"""Random JSON schemas through a whole engine with the demo model: every answer validates, or was cut off, or refused.

    python -m tests.campaigns.schemas                     1,000 schemas, weights as trained and random ones
    python -m tests.campaigns.schemas --schemas 100 --seed 7

Exit status 1 if an answer does not validate, or more schemas are refused than --refused-max allows.
"""

from __future__ import annotations

import argparse
import logging
import sys

from lockstep.runtime import LLM
from tests.support.schemas import draw_schemas, judge


def main(arguments: list[str]) -> int:
    """Run a campaign. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=300, help="the most that an answer may have")
    parser.add_argument("--refused-max", type=float, default=0.1, help="share of the schemas")
    parser.add_argument("--jump-forward-tokens", type=int, default=0, help="forced tokens of one launch, at most")
    parser.add_argument("--backend", default="llguidance", choices=["llguidance", "xgrammar"])
    told = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    schemas = draw_schemas(told.schemas, told.seed)
    failed = False
    for weights in (None, 1):
        with LLM(
            device="cpu",
            random_weights=weights,
            grammar_backend=told.backend,
            jump_forward_tokens=told.jump_forward_tokens,
        ) as llm:
            outcome = judge(llm, schemas, tokens=told.tokens, seed=told.seed)
        print(f"{'random' if weights else 'trained'} weights: {outcome.text()}", flush=True)
        refused = sum(outcome.refused.values())
        failed = failed or bool(outcome.faults) or refused > told.refused_max * len(schemas) or not outcome.valid
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
