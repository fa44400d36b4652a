"""What overlap is worth: one decode-heavy workload with 0, 1 and 2 batches launched beyond the one running.

Every request must be sent the same tokens at every depth; then depth changes nothing but when the GPU waits. A bubble
is time in which the GPU was idle although there was work; a gap is the idle time between two decode batches in a row.

    python benchmarks/overlap.py [--model qwen3-0.6b] [--gpu h200]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simpy import Environment

from lockstep.core.contract.commands import Step, StreamTokens
from lockstep.core.contract.events import Observed
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.assemble import assemble
from lockstep.sim.scenario.scenario import Scenario

WORKLOAD = "gen:n=600,rate=60,input=lognormal:200:0.5,output=lognormal:300:0.6"
DEPTHS = (0, 1, 2)


class TokensToo(MetricsFold):
    """Metrics, and every token that was streamed."""

    def __init__(self, kv_pages: int) -> None:
        super().__init__(kv_pages=kv_pages)
        self.streamed: list[StreamTokens] = []

    def observe(self, event: Observed, step: Step) -> None:
        super().observe(event, step)
        self.streamed += [command for command in step.commands if isinstance(command, StreamTokens)]

    def tokens(self) -> NDArray[np.int64]:
        """(request id, output number, token id) of everything streamed, in that order."""
        requests = [np.repeat(message.request_ids, message.token_counts) for message in self.streamed]
        numbers = [
            np.concatenate(
                [np.arange(n) + first for first, n in zip(message.offsets, message.token_counts, strict=True)]
            )
            for message in self.streamed
        ]
        ids = [message.tokens for message in self.streamed]
        rows = np.stack([np.concatenate(requests), np.concatenate(numbers), np.concatenate(ids)])
        return rows[:, np.lexsort((rows[1], rows[0]))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a small one has short steps, and most to gain")
    parser.add_argument("--gpu", default="h200")
    arguments = parser.parse_args()

    print(f"{arguments.model} on {arguments.gpu}, {WORKLOAD}")
    print("depth   output tok/s   TPOT p50   TPOT p99   GPU bubbles   gap p50   gap p99   tokens")
    reference: NDArray[np.int64] | None = None
    different = False
    for depth in DEPTHS:
        summary, tokens = run(arguments.model, arguments.gpu, depth)
        if reference is None:
            reference, verdict = tokens, f"{tokens.shape[1]:,}"
        elif np.array_equal(reference, tokens):
            verdict = "the same"
        else:
            different, verdict = True, "DIFFERENT"
        latency, device = summary["latency"], summary["device"]
        print(
            f"{depth:5} {summary['throughput']['output_tokens_per_s']:14,.0f} "
            f"{latency['tpot_us_p50'] / 1e3:7.2f} ms {latency['tpot_us_p99'] / 1e3:7.2f} ms "
            f"{100 * device['bubble_share']:11.2f} % {device['decode_gap_us_p50']:6.0f} us "
            f"{device['decode_gap_us_p99']:6.0f} us   {verdict}"
        )
    if different:
        print("overlap changed what a client was sent", file=sys.stderr)
    return int(different)


def run(model: str, gpu: str, depth: int) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Simulate at one depth; the summary and all tokens."""
    setup = assemble(
        Scenario(model=model, gpu=gpu, workload=WORKLOAD, settings={"overlap_depth": depth}, engine="none"), environ={}
    )
    metrics = TokensToo(setup.config.pages)
    env, engine = Environment(), Engine(setup.config)
    host = EngineHost(env, engine, Arrivals(setup.workload.turns), setup.cost, setup.cpu, NoJournal(), metrics)
    env.process(host.run())
    env.run()
    return metrics.result().summary, metrics.tokens()


if __name__ == "__main__":
    sys.exit(main())
