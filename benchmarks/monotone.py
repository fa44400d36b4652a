"""Whether less load or more hardware ever gives a worse median: 200 random pairs of simulations.

A pair differs in one respect: a faster GPU, twice the GPUs in a replica, half of the rate, or prompts of half the
length. Every other setting is drawn, among them the engine. Both runs have one seed, and so the same arrivals where
the rate is the same. A pair is an exception if the median of TTFT, TPOT or end-to-end time is worse by more than NOISE.
Two kinds of exceptions are properties of the machine or of the load (`reason`); the others are faults of the model.

    python benchmarks/monotone.py [--pairs 200] [--seed 1]

Simulated: the figures are the same on every machine. Exit status 1 if there are exceptions without a reason.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lockstep.sim.catalogue import load_gpu
from lockstep.sim.cost import CapacityError
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

NOISE = 0.04
"""Relative difference of a median that is not one of the model: errors of TPOT have this size where a model, a GPU and
an engine are in the fit together (`levels.ERRORS`), so a smaller difference between two GPUs has no sign that is known.
"""
REQUESTS = 120
FASTER = {"l40s": "h100", "a100": "h100", "h100": "h200", "h200": "b200", "rtx4090": "h100"}
MODELS = {"llama-3.1-8b": 1, "qwen3-8b": 1, "qwen3-32b": 2, "qwen3-30b-a3b": 2, "gpt-oss-120b": 4, "llama-3.1-70b": 4}
"""Models with the number of GPUs from which they fit."""
KINDS = ("faster GPU", "more GPUs", "fewer requests", "shorter prompts")
MEDIANS = ("ttft_us_p50", "tpot_us_p50", "e2e_us_p50")


def drawn(rng: random.Random, kind: str) -> tuple[Scenario, Scenario]:
    """Return a random scenario and the same with less load or more hardware."""
    model = rng.choice(list(MODELS))
    gpus = [name for name in FASTER if name not in ("l40s", "rtx4090") or MODELS[model] == 1]
    tp = max(MODELS[model], rng.choice((1, 2, 4)))
    rate, prompt, output = rng.choice((1, 2, 4, 8)), rng.choice((256, 1024, 4096)), rng.choice((32, 128, 256))

    def workload(rate: float, prompt: int) -> str:
        return f"gen:n={REQUESTS},rate={rate:g},input=lognormal:{prompt}:0.5,output=lognormal:{output}:0.5"

    base = Scenario(
        model=model,
        gpu=rng.choice(gpus),
        workload=workload(rate, prompt),
        tp=tp,
        engine=rng.choice((None, "vllm", "sglang", "trtllm", "lockstep", "none")),
        seed=rng.randrange(10_000),
    )
    match kind:
        case "faster GPU":
            return base, replace(base, gpu=FASTER[base.gpu])
        case "more GPUs":
            return base, replace(base, tp=2 * tp)
        case "fewer requests":
            return base, replace(base, workload=workload(rate / 2, prompt))
        case _:
            return base, replace(base, workload=workload(rate, prompt // 2))


def reason(kind: str, after: Scenario, rises: Mapping[str, float]) -> str:
    """Return why a pair is an exception although the model is as it should be; empty: there is no such reason.

    Args:
        rises: relative changes of MEDIANS.
    """
    if kind == "more GPUs" and "scale_up_gbs" not in load_gpu(after.gpu).datasheet:
        return "collectives of more GPUs over PCIe"
    if kind != "more GPUs" and max(rises["ttft_us_p50"], rises["e2e_us_p50"]) < 0.0:
        return "more requests fit and decode together, which takes less time from end to end"
    return ""


def medians(scenario: Scenario) -> dict[str, float]:
    run = simulate(assemble(scenario, {}))
    return {name: float(run.data.summary["latency"][name]) for name in MEDIANS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, done = random.Random(arguments.seed), Counter[str]()
    exceptions, explained = 0, Counter[str]()
    while done.total() < arguments.pairs:
        kind = KINDS[done.total() % len(KINDS)]
        before, after = drawn(rng, kind)
        try:
            worse, better = medians(before), medians(after)
        except CapacityError:
            continue  # does not fit
        done[kind] += 1
        rises = {name: better[name] / worse[name] - 1.0 for name in MEDIANS}
        bad = {name: rise for name, rise in rises.items() if rise > NOISE}
        if bad:
            why = reason(kind, after, rises)
            exceptions += 1
            explained[why] += 1
            text = ", ".join(f"{name} {100 * rise:+.1f} %" for name, rise in bad.items())
            print(f"{kind}: {text}{': ' if why else ''}{why}\n  {before.command()}\n  {after.command()}", flush=True)
    counts = ", ".join(f"{count} {kind}" for kind, count in done.items())
    print(f"{done.total()} pairs ({counts}): {exceptions} worse by more than {100 * NOISE:g} %")
    for why, count in explained.items():
        print(f"  {count}: {why or 'without a reason'}")
    return 1 if explained[""] else 0


if __name__ == "__main__":
    sys.exit(main())
