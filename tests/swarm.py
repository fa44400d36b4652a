"""Random histories under random settings, every invariant checked after every event.

    python tests/swarm.py --seconds 600            a campaign on all cores, fresh seeds
    python tests/swarm.py --steps 10_000_000       one of so many steps, however long that takes
    python tests/swarm.py --steps 100_000_000 --results FILE    one that goes on where it ended, part by part
    python tests/swarm.py --seed 1234              one history again
    python tests/swarm.py --plant double_free      prove that the detectors detect

A failure prints its seed, commit and settings, the line that runs it again, and a shortened history as a test to paste.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, count
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import fleet_swarm
from tests.support import feature_plants
from tests.support.blocky import blocky_history
from tests.support.conversing import conversing_actions, conversing_config
from tests.support.driver.actions import Action
from tests.support.driver.draw import (
    commanded_actions,
    commanded_config,
    crowded_actions,
    crowded_config,
    in_halves,
    multiplexed,
    pipelined,
    pressed_actions,
    pressed_config,
    random_actions,
    random_config,
    under_grammars,
)
from tests.support.driver.run import run_actions, shrunk
from tests.support.feature_plants import FEATURE_PLANTS
from tests.support.hybrids import hybrid, hybrid_history
from tests.support.plants import (
    FOUND_BY_SCENARIO,
    OBLIGATIONS,
    OF_COMMANDS,
    OF_HYBRIDS,
    OF_MICROBATCHES,
    OF_TIERS,
    PLANTS,
    RELEASES,
    SUITS,
    UNSEEN,
)
from tests.support.quality import BOUNDS
from tests.support.scenario import run_file
from tests.support.tiered import contested, loads_in_trouble, moving, returning, tiered

SCENARIOS = Path(__file__).parent / "scenarios"
ALL_PLANTS = PLANTS | RELEASES | UNSEEN | OBLIGATIONS | FEATURE_PLANTS
SHOWN_BY = Path(__file__).parent / "data" / "plant_seeds.json"  # by planted bug: a seed that has shown it
SEEDS_PER_TASK = 10
TASKS_AHEAD = 8  # tasks of a process, so that a long one delays no other
TIERED_SEEDS = 10  # one history of so many has cache tiers below the device
HYBRID_SEEDS = 10  # and one has sliding windows or linear attention
COMMANDED_SEEDS, COMMANDED_AT = 10, 5  # one of so many has many commands, this one
PIPELINED_SEEDS, PIPELINED_AT = 20, 13  # and one of so many has microbatches, this one
CONVERSING_AT = 3  # as often: conversations with media
MULTIPLEXED_AT = 18  # and as often: prompts by layers beside decodes
BLOCKY_SEEDS, BLOCKY_AT = 40, 17  # and one of so many has a model that answers in blocks, this one
HYBRID_HUNT_FROM = 20  # from 0 on; those before it are long
PROGRESS_EVERY_S = 60  # in output that is not a terminal with one line for progress
TAME_STEPS = 1_000_000  # steps, or seconds, after which a missing mark is an error: the histories are too tame
TAME_SECONDS = 300
EXPECTED_MARKS = (
    "adapter evicted between two uses",
    "adapter load failed",
    "adapter unloaded while loading",
    "another sample leads",
    "bypass limit reached",
    "cancelled while PREFILLING",
    "cancelled while RUNNING",
    "cancelled while WAITING",
    "cancelled while waiting for prerequisites",
    "decode sits out beside an extend",
    "decode waits for deferred frees",
    "deferred (prefix)",
    "deferred for its adapter",
    "duplicate pages freed later",
    "encoder output freed later",
    "encoder output of an older generation ignored",
    "evicted (admission)",
    "evicted (capacity)",
    "evicted (decode)",
    "evicted (flush)",
    "finished (cancelled)",
    "dead row sampled",
    "dead row verified",
    "drafts left out",
    "fewer drafts",
    "finished (computed)",
    "finished (error)",
    "finished (grammar)",
    "finished (invalid)",
    "finished (length)",
    "finished (stop)",
    "finished (text_stop)",
    "finished (timeout)",
    "later layers of a prompt",
    "layers of a prompt beside decodes",
    "result before that of an earlier launch",
    "grammar cancelled while compiling",
    "grammar compiled",
    "grammar compiled in vain",
    "grammar refused",
    "load of an older generation ignored",
    "media encoded",
    "mixed batch",
    "mixed batch with drafts",
    "pages of a preempted request awaited",
    "preemption across priorities",
    "preemption refused by threshold",
    "preemption would not be enough",
    "prompt truncated",
    "rejected (bad_request)",
    "rejected (deadline)",
    "rejected (draining)",
    "rejected (grammar)",
    "rejected (media)",
    "rejected (queue_full)",
    "rejected (too_long)",
    "restart with work in flight",
    "result of an older generation ignored",
    "results wanted from inside an extend",
    "retracted (forced)",
    "retracted (pages)",
    "retracted (pause)",
    "retracted (preempted)",
    "retracted (prefix_failed)",
    "retracted (restart)",
    "retraction asks for media again",
    "retraction of a chunked request",
    "retraction with 1 tokens in flight",
    "retraction with 2 tokens in flight",
    "row kept for work in flight",
    "encoder output outdated by new weights",
    "several prerequisites",
    "samples follow",
    "sits out at its end",
    "start left open",
    "verify batch with drafts",
    "turn waits for its media",
    "CancelMany done",
    "CloseSession done",
    "GetState done",
    "OpenSession done",
    "OpenSession refused",
    "Profile done",
    "ReleaseMemory done",
    "ReleaseMemory refused",
    "ResumeMemory done",
    "SetState done",
    "SetState refused",
    "SlowDown done",
    "SwitchRole refused",
    "UpdateWeights done",
    "UpdateWeights refused",
    "answer of an older generation ignored",
    "evicted (release)",
    "evicted (weights)",
    "rejected (session_closed)",
    "retracted (weights)",
    "running across a change of weights",
    "session closed (closed)",
    "session closed (timeout)",
    "session yielded",
    "turn drops the output",
    "turn rewound",
    "turn started",
    "sampling deferred",
    "text held back",
    "unload waited for users",
    "deferred (load)",
    "deferred (prefetch)",
    "checkpoint left",
    "deferred (state)",
    "deferred (window)",
    "blocks alone fetched",
    "blocks alone loaded",
    "blocks alone stored",
    "blocks alone written",
    "blocks fetched",
    "blocks loaded",
    "blocks stored",
    "blocks written",
    "evicted (host state)",
    "evicted (host window)",
    "evicted (state)",
    "evicted (window)",
    "started from a checkpoint",
    "load done",
    "load failed",
    "load lasted too long",
    "load orphaned",
    "move of an older generation ignored",
    "prefetch cancelled",
    "checkpoint left beside another microbatch",
    "chunk in another microbatch",
    "deferred (microbatch)",
    "drafts of several microbatches in flight",
    "every microbatch in flight",
    "forced tokens beside another microbatch",
    "preempted for a place",
    "preempted in another microbatch",
    "windows opened beside another microbatch",
    "started behind loaded pages",
    "store done",
    "write orphaned",
    "write partial",
    "write void",
)
"""Branches that a campaign must reach, or its histories are too tame."""


def history(seed: int) -> tuple[Any, list[Action]]:
    """Settings and actions of one seed."""
    if seed % BLOCKY_SEEDS == BLOCKY_AT:
        return blocky_history(seed)
    return history_by_token(seed)


def history_by_token(seed: int) -> tuple[Any, list[Action]]:
    """Settings and actions of one seed, of a model that answers token by token."""
    rng = random.Random(seed)
    kind = rng.random()
    if seed % TIERED_SEEDS == TIERED_SEEDS - 1:  # beside the others, which stay the same
        drawn = random.Random(f"others {seed}").random()
        if drawn > 0.8:
            return loads_in_trouble(rng) if drawn > 0.96 else contested(rng)
        config, actions = _plain_history(rng, kind) if drawn < 0.3 else returning(rng)  # with other features as well
        config, actions = tiered(rng, config), moving(rng, actions)
        pools = random.Random(f"pools {seed}")
        return hybrid(pools, config) if pools.random() < 0.4 else config, actions
    if seed % HYBRID_SEEDS == 0:
        config, actions = hybrid_history(rng)
        host = random.Random(f"host {seed}")
        return (tiered(host, config), moving(host, actions)) if host.random() < 0.25 else (config, actions)
    if seed % COMMANDED_SEEDS == COMMANDED_AT:
        return commanded_config(rng), commanded_actions(rng, 250)
    if seed % PIPELINED_SEEDS == CONVERSING_AT:
        return conversing_config(rng), conversing_actions(rng, 250)
    config, actions = _plain_history(rng, kind)
    if seed % PIPELINED_SEEDS == PIPELINED_AT:
        config = pipelined(random.Random(f"stages {seed}"), config)
        actions = under_grammars(actions) if config.jumps else actions
    if seed % PIPELINED_SEEDS == MULTIPLEXED_AT:
        return multiplexed(random.Random(f"multiplexing {seed}"), config), actions
    return in_halves(random.Random(f"halves {seed}"), config), actions


def _plain_history(rng: random.Random, kind: float) -> tuple[Any, list[Action]]:
    if kind < 0.2:
        return pressed_config(rng), pressed_actions(rng, 300)
    if kind < 0.35:
        return crowded_config(rng), crowded_actions(rng, 200)
    config = random_config(rng)
    return config, random_actions(rng, rng.choice([20, 100, 300, 500]), adapters=config.max_loras is not None)


@dataclass
class Found:
    """The findings of consecutive seeds."""

    steps: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # measures of quality
    failure: tuple[int, str] | None = None  # the first seed that failed, with its error

    def worsen(self, measures: dict[str, float]) -> None:
        """Take in the measures of a history or of other seeds."""
        for name, value in measures.items():
            self.worst[name] = max(self.worst.get(name, value), value)


def run_seeds(first: int, seeds: int) -> Found:
    """Run consecutive seeds, up to the first one that fails."""
    found = Found()
    for seed in range(first, first + seeds):
        config, actions = history(seed)
        try:
            driver = run_actions(config, actions, replay=seed % 20 in (0, PIPELINED_AT, MULTIPLEXED_AT))
        except Exception as error:  # any exception is a finding
            found.failure = seed, f"{type(error).__name__}: {error}"
            return found
        found.steps += driver.steps
        found.marks.update(driver.marks)
        found.worsen(driver.quality.quality.worst())
    return found


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no commit"


def explain(seed: int, error: str) -> None:
    """Print what reproduces a failure."""
    config, actions = history(seed)
    short = shrunk(config, actions)
    print(f"\nFAILED seed {seed} at commit {commit()}: {error}")
    print(f"again: python tests/swarm.py --seed {seed}")
    print(f"settings: {config}")
    print(f"shortened from {len(actions)} to {len(short)} actions; as a test:\n")
    print(f"def test_seed_{seed}() -> None:\n    run_actions(\n        {config!r},\n        {short!r},\n    )")


class Shown(NamedTuple):
    """Where a planted bug was found, and as which error."""

    where: str
    error: str
    seed: int | None = None  # None: a scenario


def hunt(plant: str, first: int, most: int, shown: tuple[int, ...] = ()) -> Shown | None:
    """Search for a planted bug, in histories that have shown it first. None: it survived."""
    first -= first % PIPELINED_SEEDS  # so that the kinds of histories are at their expected seeds
    with ALL_PLANTS[plant]():
        if plant in FOUND_BY_SCENARIO:
            scenario = FOUND_BY_SCENARIO[plant]
            try:
                difference, _ = run_file(SCENARIOS / f"{scenario}.txt", update=False)
            except Exception as error:  # any exception is a finding
                difference = f"{type(error).__name__}: {error}"
            return Shown(scenario, difference) if difference else None
        kind = feature_plants.PLANTS[plant].histories if plant in FEATURE_PLANTS else ""
        where = range(first, first + most)
        if plant in OF_HYBRIDS or kind == feature_plants.HYBRID:
            where = range(first + HYBRID_HUNT_FROM, first + most, HYBRID_SEEDS)
        if plant in OF_COMMANDS or kind == feature_plants.COMMANDED:
            where = range(first + COMMANDED_AT, first + most, COMMANDED_SEEDS)
        if plant in OF_TIERS or kind == feature_plants.TIERED:
            where = range(first + TIERED_SEEDS - 1, first + most, TIERED_SEEDS)
        if kind == feature_plants.CONVERSING:
            where = range(first + CONVERSING_AT, first + most, PIPELINED_SEEDS)
        if kind == feature_plants.MULTIPLEXED:
            where = range(first + MULTIPLEXED_AT, first + most, PIPELINED_SEEDS)
        if plant in OF_MICROBATCHES:
            where = range(first + PIPELINED_AT, first + most, PIPELINED_SEEDS)
        suits = SUITS.get(plant)
        for seed in chain(shown, where):
            if suits is not None and not suits(history(seed)[0]):
                continue
            if kind in (feature_plants.FLEET, feature_plants.RANKS):
                failure = fleet_swarm.run_seed(seed, kind == feature_plants.RANKS)[2]
            else:
                failure = run_seeds(seed, 1).failure
            if failure:
                return Shown(f"{max(seed - first, 0) + 1} seeds", failure[1], seed)
    return None


def seeds_shown() -> dict[str, int]:
    """Return by planted bug a seed that has shown it, which `hunt` may try first."""
    kept: dict[str, int] = json.loads(SHOWN_BY.read_text())
    return kept


@dataclass
class Tally(Found):
    """The findings of the first tasks of a campaign; its failure is that of the least seed that failed."""

    seeds: int = 0
    elapsed_s: float = 0.0
    parts: dict[str, int] = field(default_factory=dict)  # steps by commit

    def add(self, tasks: Iterable[Future[Found]], at: str) -> None:
        """Take in tasks that ran at the commit `at`."""
        for task in tasks:
            found = task.result()
            self.steps, self.seeds = self.steps + found.steps, self.seeds + SEEDS_PER_TASK
            self.parts[at] = self.parts.get(at, 0) + found.steps
            self.marks.update(found.marks)
            self.worsen(found.worst)
            if found.failure and (self.failure is None or found.failure < self.failure):
                self.failure = found.failure

    def store(self, first: int, path: Path | None) -> None:
        """Write the campaign that began with the seed `first` to its file of results."""
        if path is not None:
            values = {"first": first, **vars(self)}
            path.with_suffix(".new").write_text(json.dumps(values) + "\n", encoding="utf-8")
            path.with_suffix(".new").replace(path)


def stored(path: Path) -> tuple[int, Tally]:
    """Return first seed and tally of a campaign from its file of results. Raises ValueError for another file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        first = values.pop("first")
        tally = Tally(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no results of a campaign: {error}; name another file, or delete it") from None
    tally.marks = Counter(tally.marks)
    return first, tally


def campaign(
    seconds: float | None,
    first: int,
    processes: int,
    *,
    steps: int | None = None,
    quiet: bool = False,
    tally: Tally | None = None,
    results: Path | None = None,
) -> Tally:
    """Run until time is up, the number of steps is done, or a history fails.

    A process that is done with its seeds gets the next ones at once. At the end, histories in progress are finished and
    count; so the seeds of a campaign are consecutive from `first` on.

    Args:
        tally: what the campaign has found in its seeds so far, if it goes on.
        results: a file for the tally, written with each line of progress, and at the end.
    """
    tally, at = tally or Tally(), commit()
    start, reported = time.monotonic() - tally.elapsed_s, tally.elapsed_s
    begun = tally.elapsed_s
    with ProcessPoolExecutor(processes) as pool:
        firsts, tasks = count(first + tally.seeds, SEEDS_PER_TASK), deque[Future[Found]]()
        while True:
            while len(tasks) < TASKS_AHEAD * processes:
                tasks.append(pool.submit(run_seeds, next(firsts), SEEDS_PER_TASK))
            failed = any(task.result().failure for task in wait(tasks, return_when=FIRST_COMPLETED).done)
            while tasks and tasks[0].done():
                tally.add([tasks.popleft()], at)
            tally.elapsed_s = time.monotonic() - start
            over = seconds is not None and tally.elapsed_s - begun >= seconds
            if failed or over or (steps is not None and tally.steps >= steps):
                break
            if not quiet and (sys.stderr.isatty() or tally.elapsed_s - reported >= PROGRESS_EVERY_S):
                reported = tally.elapsed_s
                report(tally, steps)
                tally.store(first, results)
        tally.add([task for task in tasks if not task.cancel()], at)
    tally.elapsed_s = time.monotonic() - start
    if not tally.failure:
        tally.store(first, results)
    if not quiet:
        report(tally, steps)
        print(file=sys.stderr)
    return tally


def report(tally: Tally, steps: int | None) -> None:
    """The line of progress, on stderr."""
    wanted = f"{tally.steps:,} of {steps:,}" if steps is not None else f"{tally.steps:,}"
    line = (
        f"{tally.seeds:,} seeds, {wanted} steps, {tally.elapsed_s:,.0f} s, {tally.steps / tally.elapsed_s:,.0f} steps/s"
    )
    before, after = ("\r", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{before}{line}", end=after, file=sys.stderr, flush=True)


def at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, such as 10_000_000, got `{text}`")
    return number


def find_all(text: str, first: int) -> int:
    """Hunt for planted bugs and keep the seeds that show them. Returns 1 if any survives."""
    kept, survivors = seeds_shown() if SHOWN_BY.exists() else {}, 0
    for plant in sorted(name for name in ALL_PLANTS if text in name):
        start = time.process_time()
        found = hunt(plant, first, 10_000)
        took = f"{time.process_time() - start:.1f} s"
        survivors += found is None
        print(f"{plant}: {took}: {'SURVIVED' if found is None else f'{found.where}: {found.error}'}", flush=True)
        if found is not None and found.seed is not None:
            kept[plant] = found.seed
            SHOWN_BY.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="how long (default 60, or no limit with --steps)")
    parser.add_argument(
        "--steps",
        type=at_least_one,
        help="until the histories that ended have so many calls of Engine.step together, replays not counted; those "
        f"under way then ({SEEDS_PER_TASK} a task) are finished and counted too, so it ends a little above",
    )
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--first", type=int, help="first seed of the campaign (default: fresh)")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="where a campaign ended; if the file exists, the campaign goes on behind its last seed, with --steps in "
        "all, and --seconds of this part",
    )
    parser.add_argument("--processes", type=int, default=cpu_count() or 1)
    parser.add_argument("--plant", choices=sorted(ALL_PLANTS), help="plant a bug; success is to find it")
    parser.add_argument(
        "--plants",
        metavar="TEXT",
        help='plant every bug with TEXT in its name ("" has all) in fresh histories, and keep a seed that shows each',
    )
    options = parser.parse_args()
    if options.seed is not None or options.plant or options.plants is not None:
        for name in ("steps", "results"):
            if getattr(options, name) is not None:
                parser.error(f"argument --{name}: is for a campaign, not for --seed, --plant or --plants; leave it out")
    if options.seed is not None:
        with ALL_PLANTS[options.plant]() if options.plant else nullcontext():
            one = run_seeds(options.seed, 1)
        said = one.failure[1] if one.failure else f"{one.steps:,} steps, all well"
        print(f"seed {options.seed}: {said}")
        return 1 if one.failure else 0
    first, tally = options.first if options.first is not None else time.time_ns() % 10**12, Tally()
    if options.results is not None and options.results.exists():
        if options.first is not None:
            parser.error(f"argument --first: {options.results} has the first seed already; leave it out")
        try:
            first, tally = stored(options.results)
        except (OSError, ValueError) as error:
            parser.error(f"argument --results: {error}")
    elif options.results is not None and not options.results.parent.is_dir():
        parser.error(f"argument --results: there is no folder {options.results.parent}; make it first")
    print(f"first seed {first}, commit {commit()}, {options.processes} processes", file=sys.stderr)
    if options.plants is not None:
        return find_all(options.plants, first)
    if options.plant:
        start = time.monotonic()
        where = hunt(options.plant, first, 10_000)
        if where is None:
            print(f"{options.plant} was NOT found")
            return 1
        print(f"{options.plant} found by {where.where}, {time.monotonic() - start:.1f} s: {where.error}")
        return 0
    seconds = 60.0 if options.seconds is None and options.steps is None else options.seconds
    found = campaign(seconds, first, options.processes, steps=options.steps, tally=tally, results=options.results)
    steps, marks = found.steps, found.marks
    if found.failure:
        explain(*found.failure)
        return 1
    print(f"{steps:,} steps, no invariant broken")
    if len(found.parts) > 1:
        print("  of these " + ", ".join(f"{part:,} at commit {at}" for at, part in found.parts.items()))
    for name, bound in BOUNDS.items():
        print(f"  {found.worst.get(name, 0):>8.3g} of {bound.most:<5g}  {name}")
    for mark in sorted(marks.keys() | set(EXPECTED_MARKS)):
        print(f"  {marks[mark]:>8,} seeds  {mark}")
    missed = [mark for mark in EXPECTED_MARKS if not marks[mark]]
    if missed and (steps >= TAME_STEPS or (seconds or 0) >= TAME_SECONDS):
        print(f"too tame: never reached {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
