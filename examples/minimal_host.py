"""A complete host in sixty lines: the scheduler, a journal, and a "device" that takes 10 ms and samples token 42.

python examples/minimal_host.py [RUN]        writes RUN/journal (default: runs/minimal)
lockstep journal verify RUN                  replays every decision
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from lockstep.core import Engine, JournalWriter, SchedConfig
from lockstep.core.contract.commands import BatchPlan, FinishRequest, LaunchBatch, StreamTokens
from lockstep.core.contract.events import BatchFinished, LaneReady, Observed, RequestArrived, TokenRuns
from lockstep.core.contract.render import Names, decided_line, plan_text
from lockstep.core.journal.records import JournalHeader

BATCH_US = 10_000


def main() -> None:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/minimal")
    shutil.rmtree(run / "journal", ignore_errors=True)
    config = SchedConfig(page_size=4, pages=16, overlap_depth=1)
    engine = Engine(config)
    names = Names()
    in_flight: list[BatchPlan] = []

    with JournalWriter.create(run, JournalHeader(config=config, host={"kind": "example"})) as journal:

        def take_in(event: Observed) -> None:
            names.observe(event)
            step = engine.step(event)  # decide
            journal.append(event, step.digest)  # record
            journal.flush()  # before any effect of the step leaves the process
            for decided in step.decided:
                print(f"{event.time_us / 1000:7.1f} ms  {decided_line(decided, names)}")
            for command in step.commands:  # perform
                match command:
                    case LaunchBatch(plan):
                        print(f"{event.time_us / 1000:7.1f} ms  launch {plan_text(plan, names)}")
                        in_flight.append(plan)
                    case StreamTokens() | FinishRequest():
                        pass  # a server writes to its clients here

        for request_id, (label, prompt_tokens) in enumerate([("short", 6), ("long", 21), ("third", 9)]):
            prompt = TokenRuns((1, prompt_tokens))
            take_in(RequestArrived(time_us=0, request_id=request_id, prompt=prompt, max_new_tokens=8, label=label))
        now_us = 0
        while engine.requests or in_flight:
            take_in(LaneReady(now_us))
            if len(in_flight) > config.overlap_depth or engine.launch_found_nothing:
                plan = in_flight.pop(0)
                now_us += BATCH_US
                tokens = np.full(len(plan.sample_rows), 42, np.int32).tobytes()
                take_in(BatchFinished(now_us, plan.batch_id, tokens, now_us - BATCH_US, now_us))
    print(f"\njournal: {run / 'journal'}; final digest {engine.digest.hex()}")


if __name__ == "__main__":
    main()
