"""Kill the engine of a live server again and again, during streams with known tokens.

    python -m tests.campaigns.kills                    1,000 kills, 32 streams
    python -m tests.campaigns.kills --kills 200
    python -m tests.campaigns.kills --every-process    1,000 kills of all kinds of processes, one layout after another
    python -m tests.campaigns.kills --dp 2             one of two engines each time
    python -m tests.campaigns.kills --prefill 2 --decode 2        any of these engines each time
    python -m tests.campaigns.kills --demo-model       the torch demo model instead of an emulated one
    python -m tests.campaigns.kills --demo-model --pp 2 --tp 2    any process of its stages and ranks each time
    python -m tests.campaigns.kills --demo-model --attention-dp 2    one of its data-parallel ranks each time
    python -m tests.campaigns.kills --demo-model --prefill 1 --decode 1 --pp 2    any process of both engines
    python -m tests.campaigns.kills --seed 7           the same requests and the same pauses again
    python -m tests.campaigns.kills --results FILE     one that goes on where it ended, part by part

The tokens of an emulated engine follow from prompt, seed and position. Those of the demo model are compared with the
answers that the server gave before the first kill: completions and chats with logprobs, usage and grammars.

After ten kills in a row without a token the campaign waits for one: where recovery takes longer than the gaps, no token
would ever be sent. Engines of several processes start slowly, and most kills would hit one that starts: there two, and
the gap counts from the first token. It is longer, too: grammars are compiled again in each life of an engine, and a
request that waits for its grammar through many short lives would get no token.

With stages, rank 0 is the engine's process, in the last stage. The ranks 1 to `tp` - 1 are in the last stage, too, and
the next ones in the stages before it.

A file of results has the figures of all parts so far; it is written after every fifth kill and at the end. Each part
has a server and a seed of its own: the seed of the part before, plus 1.

With `--every-process` there are layouts of prefill and decode engines, ranks and stages, and the campaign of
`tests/campaigns/resumption.py` over engines, API workers, launchers and whole servers. The router is in the launcher.
Transfers are performed by the processes of both engines. It has no other options than `--kills` and `--seed`.

It prints the kills of each process, the lost, doubled or wrong tokens (there must be none) and the recovery times. An
engine that ends by itself is a fault, too. Exit status 1 after any fault.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
from pathlib import Path

from tests.campaigns import resumption
from tests.support.kills import ARGUMENTS, IN_A_ROW, Outcome, campaign, own_failures, stored
from tests.support.live_server import serving
from tests.support.model_streams import DEMO, ModelStreams, requests_of

UNSTORED = ("kills", "seed", "log", "results")
"""Options that may differ between two parts of a campaign."""

OF_THE_MODEL = ("--demo-model",)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 prefill and 2 decode engines, emulated": (550, ("--prefill", "2", "--decode", "2")),
    "prefill and decode engine": (20, (*OF_THE_MODEL, "--prefill", "1", "--decode", "1")),
    "2 ranks": (20, (*OF_THE_MODEL, "--tp", "2")),
    "2 stages": (30, (*OF_THE_MODEL, "--pp", "2")),
    "2 stages of 2 ranks": (20, (*OF_THE_MODEL, "--pp", "2", "--tp", "2")),
    "2 data-parallel ranks": (20, (*OF_THE_MODEL, "--attention-dp", "2")),
    "prefill and decode engine of 2 stages": (10, (*OF_THE_MODEL, "--prefill", "1", "--decode", "1", "--pp", "2")),
}
"""Kills of 1,000 in each layout, and its options."""
EVERY_PROCESS_MIN = 20  # kills, so that each layout has one
RETURNING = "2 engines behind a router, workers, launcher, server, emulated"
"""The rest of the kills: clients return, `tests/campaigns/resumption.py`."""


def _options_of(told: argparse.Namespace) -> list[str]:
    """Return the options that all parts of a campaign have in common."""
    return [f"{name}={value}" for name, value in sorted(vars(told).items()) if name not in UNSTORED]


def every_process(kills: int, seed: int) -> int:
    """Kill all kinds of processes in one layout after another, and print a row for each; return the exit status.

    Args:
        kills: of all layouts together.
        seed: of the first layout; each one has the seed of the one before, plus 1.
    """
    rows, left, faults = [], kills, 0
    for number, (name, (share, options)) in enumerate(LAYOUTS.items()):
        of_layout = max(1, kills * share // 1000)
        left -= of_layout
        print(f"{name}:", flush=True)
        done = run([*options, "--kills", str(of_layout), "--seed", str(seed + number)])
        rows.append((name, done.victims, done.seconds, done.tally.requests, done.tally.tokens))
        faults += done.tally.faults.total()
    print(f"{RETURNING}:", flush=True)
    of_rest = ["--dp", "2", "--kills", str(left), "--seed", str(seed + len(LAYOUTS))]
    returned = resumption.run(of_rest)
    rows.append((RETURNING, returned.kills, returned.seconds, returned.tally.requests, returned.tally.tokens))
    faults += returned.tally.faults.total()
    for name, victims, seconds, requests, tokens in rows:
        by_victim = ", ".join(f"{count} of {victim}" for victim, count in sorted(victims.items()))
        print(
            f"{name}: {victims.total()} kills in {seconds:.0f} s, {requests} requests, {tokens:,} tokens; {by_victim}"
        )
    print(f"{sum(row[1].total() for row in rows)} kills in all, {faults} faults")
    return 1 if faults else 0


def main(arguments: list[str]) -> int:
    """Run a campaign, or one of every process. Returns the exit status."""
    if "--every-process" in arguments:
        parser = argparse.ArgumentParser()
        parser.add_argument("--every-process", action="store_true")
        parser.add_argument("--kills", type=int, default=1000)
        parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
        told = parser.parse_args(arguments)
        if told.kills < EVERY_PROCESS_MIN:
            parser.error(f"--kills is {told.kills}; --every-process needs {EVERY_PROCESS_MIN}, some in each layout")
        return every_process(told.kills, told.seed)
    return 1 if run(arguments).tally.faults else 0


def run(arguments: list[str]) -> Outcome:
    """Run a campaign in one layout; return its figures. It ends early only after a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=None, help="clients; default: 32, and 8 of the demo model")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--speed", type=float, default=0.1, help="of the emulated GPU")
    parser.add_argument("--demo-model", action="store_true", help="the torch demo model, on the CPU")
    parser.add_argument("--requests", type=int, default=48, help="different requests to the demo model")
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="engines, of which one is killed each time")
    parser.add_argument("--prefill", type=int, default=0, help="prefill engines, with --decode; any engine is killed")
    parser.add_argument("--decode", type=int, default=0, help="decode engines")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each stage of the demo model; any is killed")
    parser.add_argument("--pp", type=int, default=1, help="stages of the demo model")
    parser.add_argument("--attention-dp", type=int, default=1, help="data-parallel ranks of the demo model")
    parser.add_argument("--snapshot-s", type=float, default=2.0)
    parser.add_argument(
        "--gap-s", type=float, nargs=2, default=None, help="between two kills; default: 0.05 to 1, over ranks 1 to 8"
    )
    parser.add_argument(
        "--in-a-row", type=int, default=None, help="kills without a token between them; default: 10, and 2 over ranks"
    )
    parser.add_argument("--log", type=Path, default=None, help="keep the server's log there")
    parser.add_argument("--results", type=Path, default=None, help="file of the results, from which it goes on")
    told = parser.parse_args(arguments)
    options = _options_of(told)
    before = Outcome()
    if told.results is not None and told.results.exists():
        try:
            before = stored(told.results, options)
        except ValueError as error:
            parser.error(str(error))
        if told.seed not in (None, before.seeds[0]):
            parser.error(f"{told.results} is of a campaign that began with the seed {before.seeds[0]}")
        if before.kills >= told.kills or before.tally.faults:
            print(before.text())
            return before
    first = random.SystemRandom().randrange(2**31) if told.seed is None else told.seed
    first, seed = (before.seeds[0], before.seeds[-1] + 1) if before.seeds else (first, first)
    again = shlex.join([*arguments, *(() if told.seed is not None else ("--seed", str(first)))])
    print(f"seed {seed}: python -m tests.campaigns.kills {again}", flush=True)

    def progress(part: Outcome) -> None:
        whole = before.plus(part)
        if told.results is not None:
            whole.store(told.results, options)
        print(f"{whole.kills} kills, {whole.tally.requests} requests", flush=True)

    given: tuple[str, ...] = DEMO if told.demo_model else (*ARGUMENTS, "--speed", str(told.speed))
    given += ("--snapshot-s", str(told.snapshot_s))
    given += ("--api-workers", str(told.api_workers), "--dp", str(told.dp))
    if told.demo_model:
        given += ("--tp", str(max(told.tp, told.attention_dp)), "--pp", str(told.pp))
    if told.attention_dp > 1:
        given += ("--attention-dp", str(told.attention_dp), "--rank-schedulers")
    if told.prefill:
        given += ("--prefill-engines", str(told.prefill), "--decode-engines", str(told.decode))
    of_ranks = max(told.tp, told.pp, told.attention_dp) > 1
    with tempfile.TemporaryDirectory() as folder:
        log = told.log or Path(folder) / "log"
        with serving(log, *given, "--restarts", str(2 * told.kills + 1)) as server:
            client = None
            if told.demo_model:
                expected = ModelStreams(server, requests_of(seed, told.requests))
                print(f"{len(expected.expected)} of {told.requests} requests are compared: no near tie", flush=True)
                client = expected.client
            part = campaign(
                server,
                seed=seed,
                kills=told.kills - before.kills,
                streams=told.streams or (8 if told.demo_model else 32),
                gap_s=tuple(told.gap_s or ((1.0, 8.0) if of_ranks else (0.05, 1.0))),
                prefills=told.prefill * told.attention_dp,
                in_a_row_max=told.in_a_row or (2 if of_ranks else IN_A_ROW),
                gap_from_token=of_ranks,
                client=client,
                progress=progress,
            )
        for line in own_failures(log.read_text("utf-8", "replace")):
            part.tally.fault("failed", line)
        outcome = before.plus(part)
        if told.results is not None:
            outcome.store(told.results, options)
        print(outcome.text())
        if outcome.tally.faults:
            print(log.read_text()[-3000:])
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
