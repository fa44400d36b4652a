"""Small worlds, explored whole: every interleaving of the events of a few requests, every state checked.

    python tests/explore.py                             every feature alone, and every two together
    python tests/explore.py --alone                     every feature alone
    python tests/explore.py --groups                    prefill and decode engines, and data-parallel ranks
    python tests/explore.py --contract                  the contract alone, without a line of core or host
    python tests/explore.py --contract --histories 1000 and the product beside it, in random histories
    python tests/explore.py --world "drafts + cancel, depth 1"
    python tests/explore.py --world "contract: ranks, loss" --without "all ranks restart"
    python tests/explore.py --transitions 100_000       so many at most of each world; 10^8 in all take a day of CPU
    python tests/explore.py --plant double_free         prove that planted bugs are found

A failure prints the schedule that leads to it, shortened, and the line that runs the world again.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Observed
from lockstep.core.contract.render import Names, command_line, decided_line, observed_line
from lockstep.core.scheduler.engine import Engine
from tests.support.contract.histories import RUNS
from tests.support.contract.play import ContractWorld
from tests.support.contract.worlds import contract_world, contract_worlds
from tests.support.driver.actions import Action
from tests.support.driver.driver import Driver
from tests.support.driver.run import shrunk
from tests.support.explorer.catalogue import DEPTHS, FEATURES, refused, world, worlds
from tests.support.explorer.group_catalogue import DEPTHS as GROUP_DEPTHS
from tests.support.explorer.group_catalogue import group_world, group_worlds
from tests.support.explorer.play import AnyWorld, play_of
from tests.support.explorer.search import Explorer, Found
from tests.support.explorer.world import World
from tests.swarm import ALL_PLANTS

COLUMNS = ("world", "states", "transitions", "depth", "seconds", "whole", "compared", "found")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 1 if something was found, except with --plant, where it is the other way round."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.histories is not None and not options.contract:
        parser.error("argument --histories: goes with --contract; histories of the whole core: make swarm")
    if options.histories is not None and options.histories < 1:
        parser.error(f"argument --histories: must be 1 or more, got {options.histories}")
    if options.contract and options.plant:
        parser.error(
            "argument --plant: is for worlds of the core, and --contract has none; --without leaves out a rule"
        )
    try:
        chosen = [_named(options.world, options.without)] if options.world else _all_worlds(options)
        if options.without and not options.world:
            raise ValueError("`without` leaves out a rule of one world of the contract; name that with --world")
    except (ValueError, ConfigError) as error:
        parser.exit(2, f"{error}\n")
    begun, failure = time.time(), None
    total = whole = transitions = states = 0
    rows = []
    for found in explored(chosen, options.transitions, options.plant, options.jobs):
        rows.append(row_of(found))
        total, whole = total + 1, whole + found.is_whole
        transitions, states = transitions + found.transitions, states + found.states
        print(f"{total:,} of {len(chosen):,}: {line_of(found)}", flush=True)
        if found.failure and (failure is None or len(found.actions) < len(failure.actions)):
            failure = found
            if not options.all:
                break
    print(
        f"{total:,} worlds, {whole:,} whole, {states:,} states, {transitions:,} transitions in "
        f"{time.time() - begun:,.0f} s; {len(refused()):,} pairs of features are refused by the core"
    )
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    if failure is not None:
        print(story_of(failure, options.plant))
    if failure is None and options.histories is not None:
        first = options.seed if options.seed is not None else time.time_ns() % 10**9
        return int(not run_histories(first, options.histories, options.jobs))
    return int((failure is None) == bool(options.plant or options.without))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="each feature alone, no pairs")
    parser.add_argument("--groups", action="store_true", help="only worlds of several engines: fleets and ranks")
    parser.add_argument("--contract", action="store_true", help="only the machines of the contract, no core or host")
    parser.add_argument(
        "--histories", type=int, help="with --contract: random histories of the product beside each machine"
    )
    parser.add_argument(
        "--seed", type=int, help="of the first history; default: another one each time, which is printed"
    )
    parser.add_argument("--without", default="", metavar="RULE", help="leave out a rule of the contract: must be found")
    parser.add_argument("--world", help='one world by its name, for instance "drafts + cancel, depth 1"')
    parser.add_argument("--transitions", type=int, help="the most of each world; default: all of them")
    parser.add_argument("--plant", choices=sorted(ALL_PLANTS), help="plant a bug, which must be found")
    parser.add_argument("--jobs", type=int, default=cpu_count(), help="processes; default: one per core")
    parser.add_argument("--all", action="store_true", help="go on after a failure; the shortest one is shown")
    parser.add_argument("--csv", type=Path, help="write a table of all worlds")
    return parser


def _all_worlds(options: argparse.Namespace) -> list[AnyWorld]:
    groups: list[AnyWorld] = list(group_worlds())
    machines: list[AnyWorld] = [] if options.plant else list(contract_worlds())  # bugs are planted in the core
    if options.contract:
        return machines
    return groups if options.groups else [*worlds(pairs=not options.alone), *groups, *machines]


def _named(name: str, without: str = "") -> AnyWorld:
    """Return a world by its name. Raises: ValueError for a name without a world, ConfigError for a refused pair.

    `without`: a rule of the contract that is left out.
    """
    if name.startswith("contract: "):
        return contract_world(name, lax=without)
    if without:
        raise ValueError(f"`without` leaves out a rule of the contract; `{name}` is a world of the core")
    listed, _, depth = name.partition(", depth ")
    if ": " in listed:
        if depth not in map(str, GROUP_DEPTHS):
            raise ValueError(f"`world`: depth must be one of {GROUP_DEPTHS}, got `{depth}`")
        return group_world(listed, int(depth))
    features = tuple(listed.split(" + "))
    if unknown := [one for one in features if one not in FEATURES]:
        hint = f"features are {', '.join(FEATURES)}"
        raise ValueError(f'`world` must be "FEATURE + FEATURE, depth 0", got feature `{unknown[0]}`; {hint}')
    if depth not in map(str, DEPTHS):
        raise ValueError(f"`world`: depth must be one of {DEPTHS}, got `{depth}`")
    return world(features, int(depth))


def explored(
    chosen: Iterable[AnyWorld], transitions_max: int | None, plant: str | None = None, jobs: int | None = None
) -> Iterator[Found]:
    """Explore worlds in processes of their own. Yields what was found, in order."""
    run = partial(explore, transitions_max=transitions_max, plant=plant)
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(run, chosen)
        finally:
            pool.shutdown(cancel_futures=True)


def run_histories(first: int, count: int, jobs: int | None = None) -> bool:
    """Run the product beside each machine of the contract, so many seeds each. Returns whether all is well."""
    begun = time.time()
    with ProcessPoolExecutor(jobs) as pool:
        for kind in RUNS:
            marks: set[str] = set()
            for seed, found in zip(
                range(first, first + count), pool.map(partial(_history, kind), range(first, first + count)), strict=True
            ):
                if isinstance(found, str):
                    again = f"python tests/explore.py --contract --histories 1 --seed {seed}"
                    print(f"{kind}, seed {seed}: {found}\nagain: {again}")
                    pool.shutdown(cancel_futures=True)
                    return False
                marks |= found
            took_s = time.time() - begun
            print(f"{kind}: {count:,} histories from seed {first} on, {len(marks)} marks, {took_s:,.0f} s", flush=True)
    return True


def _history(kind: str, seed: int) -> set[str] | str:
    """Run one history. Returns its marks, or what was wrong."""
    try:
        with TemporaryDirectory() as folder:
            return RUNS[kind](seed, Path(folder), None)
    except Exception as error:  # a traceback of the core is a finding, too
        return f"{type(error).__name__}: {error}"


def explore(one: AnyWorld, *, transitions_max: int | None = None, plant: str | None = None) -> Found:
    """Explore one world, with a planted bug if one is named."""
    with ALL_PLANTS[plant]() if plant else nullcontext():
        return Explorer(one).run(transitions_max=transitions_max)


def row_of(found: Found) -> list[object]:
    """The row of a world in the table."""
    seconds = round(found.seconds, 2)
    counts = (found.states, found.transitions, found.depth, seconds, found.is_whole, found.compared)
    return [found.world.name, *counts, found.failure.splitlines()[0] if found.failure else ""]


def line_of(found: Found) -> str:
    """One line about a world."""
    text = f"{found.world.name}: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}"
    text += f", {found.seconds:.1f} s" + ("" if found.is_whole else ", not whole")
    return f"{text}: FAILED, {found.failure.splitlines()[0]}" if found.failure else text


def story_of(found: Found, plant: str | None) -> str:
    """What broke, the shortest schedule that leads to it, and how to run the world again."""
    one = found.world
    with ALL_PLANTS[plant]() if plant else nullcontext():
        if isinstance(one, World):
            actions = shrunk(one.config, found.actions)
            lines = [*_told(one, actions), f"    config = {one.config!r}", f"    run_actions(config, {actions!r})"]
        else:
            lines = [f"  {action}" for action in _shrunk_group(one, found.actions)]
    planted = f" --plant {plant}" if plant else ""
    if isinstance(one, ContractWorld) and one.machine.lax:
        planted = f' --without "{one.machine.lax}"'
    again = f'again: python tests/explore.py --world "{one.name}"{planted}'
    return "\n".join([f"\n{found.failure}", again, *lines])


def _shrunk_group(one: AnyWorld, actions: list[Action]) -> list[Action]:
    """Leave out actions one by one while the rest still breaks a check; those that are impossible are skipped."""

    def fails(candidate: list[Action]) -> bool:
        play = play_of(one)
        left = play.left()
        for action in candidate:
            move = next((move for move in play.moves(left) if move.action == action), None)
            if move is not None:
                left = left.after(move)
                try:
                    play.do(action)
                except Exception:  # as in the search: any exception is a finding
                    return True
        return False

    for at in reversed(range(len(actions))):
        if fails(shorter := actions[:at] + actions[at + 1 :]):
            actions = shorter
    return actions


class _Told(Driver):
    """A driver that writes down each event and what an engine of its own decides on it."""

    def __init__(self, one: World) -> None:
        super().__init__(one.config)
        self.lines: list[str] = []
        self._beside, self._names = Engine(one.config), Names()

    def fold(self, event: Observed) -> None:
        self._names.observe(event)
        self.lines.append(f"  {observed_line(event, self._names)}")
        step = self._beside.step(event)
        self.lines += [f"      {decided_line(decided, self._names)}" for decided in step.decided]
        self.lines += [f"      {command_line(command, self._names)}" for command in step.commands]
        super().fold(event)


def _told(one: World, actions: list[Action]) -> list[str]:
    """Each event of a schedule, and what was decided."""
    driver = _Told(one)
    try:
        for action in actions:
            driver.do(action)
    except Exception as error:
        driver.lines.append(f"  {type(error).__name__}: {error}")
    return driver.lines


if __name__ == "__main__":
    sys.exit(main())
