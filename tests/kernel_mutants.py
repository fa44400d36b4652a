"""Mutants of the fast path: does an equality test find every small change of the kernel?

    python tests/kernel_mutants.py                        every mutant of every module, on all cases
    python tests/kernel_mutants.py --module memory.py     the mutants of one module
    python tests/kernel_mutants.py --match "evict"        the mutants with this text in their line of the table
    python tests/kernel_mutants.py --cases 80 --seed 7    other random runs
    python tests/kernel_mutants.py --results FILE         mutants that FILE lists as found are not run again

A mutant is the kernel with one change: another comparison, a constant that is one larger, `min` for `max`, `and` for
`or`, plus for minus. Each mutant simulates random runs, interpreted, until its result differs from the core's. The
functions that the core shares with the kernel (`core/requests/rules.py`) are changed for the kernel only. A mutant that
raises, or takes much longer than the kernel, is found too. Every mutant that no run finds must be in
`tests/data/kernel_mutants.txt` with the reason for which it is equivalent; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lockstep.sim.cluster.fast import run_compiled
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.fast import fast_path, kernel, machine_code
from lockstep.sim.fast.state import Arrays
from lockstep.sim.run import simulate as simulate_module
from tests.support.fast_path_cases import SHARINGS, Case, ClusterCase, Load, cases, cluster_cases, differing
from tests.support.mutation.operators import ARITHMETIC, Mutant, mutants_of

KNOWN = Path(__file__).resolve().parent / "data" / "kernel_mutants.txt"
TINY_PER_RUN = 8  # tiny runs, whose pages and budgets are spent to the last token, for each other run of an engine
TINY_REQUESTS_MAX = 40
REQUESTS_MIN = 20  # of the other runs
SLOWER = 20  # a mutant may take this many times as long as the kernel, plus a second
PLANTS = {"rules.py": (("CLIP_MAX_NEW_TOKENS = 4096", "CLIP_MAX_NEW_TOKENS = 9_000_000"),)}
"""Constants of modules that are changed in one place, by file: text before and after."""
Advance = Callable[[Arrays, float], int]
Run = Callable[[bool], "Outcome | None"]  # by the kernel or by the core; None: the kernel leaves the run to the core
Outcome = tuple[list[Any], dict[str, int]]  # RunData, of a cluster and of each engine; requests by reason of routing


class TooLongError(Exception):
    """A mutant took too long."""


def _mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module with compiled functions."""
    return mutants_of(path, kinds=ARITHMETIC, plants=PLANTS.get(path.name, ()))


def _module_of(name: str, source: str) -> ModuleType:
    """Import a changed copy of our own source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.py"
        path.write_text(source, encoding="utf-8")
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def advance_of(mutant: Mutant | None) -> Advance:
    """Return `kernel.advance` with the change of a mutant; None: unchanged."""
    functions: dict[str, Any] = {}
    module = ModuleType("unchanged")
    for path in machine_code.SOURCES:
        changed = mutant is not None and mutant.path == path
        source = ast.unparse(mutant.tree) if mutant is not None and changed else path.read_text(encoding="utf-8")
        module = _module_of(f"lockstep.sim.fast._mutant_{path.stem}", source)
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                if value.__module__ == module.__name__:
                    functions[name] = value
                else:
                    setattr(module, name, functions.get(name, value))
    advance: Advance = vars(module)["advance"]
    return advance


# ----------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Example:
    """One random run, with the outcome of the core."""

    run: Run
    expected: Outcome
    took_s: float = 1.0
    kills: int = 0


def examples(count: int, number: int) -> list[Example]:
    """Draw random runs of engines and clusters."""
    drawn: list[Any] = []
    options: Any = {"database": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

    @seed(number)
    @settings(max_examples=4 * count, **options)
    @given(cases(st.sampled_from((40, 300, 1_000)), SHARINGS[1:]))
    def draw_engine(case: Case) -> None:
        if case.load.requests >= REQUESTS_MIN and len(drawn) < count:  # the first cases that are drawn are the smallest
            drawn.append(case)

    @seed(number)
    @settings(max_examples=TINY_PER_RUN * count, **options)
    @given(cases(st.sampled_from((12, 40))))
    def draw_tiny(case: Case) -> None:
        if case.load.requests <= TINY_REQUESTS_MAX:
            drawn.append(case)

    @seed(number)
    @settings(max_examples=max(count // 4, 2), **options)
    @given(cluster_cases(300))
    def draw_cluster(case: ClusterCase) -> None:
        drawn.append(case)

    draw_engine()
    draw_tiny()
    draw_cluster()
    made = [_engine_example(one) if isinstance(one, Case) else _cluster_example(one) for one in drawn]
    found = []
    for run in made:
        expected = run(False)
        assert expected is not None
        began_s = time.process_time()
        ours = run(True)
        took_s = time.process_time() - began_s
        if ours is None:
            continue  # only the core can simulate it
        if why := _differing(ours, expected):
            raise SystemExit(f"the kernel itself differs from the core: {why}")
        found.append(Example(run, expected, took_s))
    found.sort(key=lambda one: one.took_s)
    return found


def long_examples() -> list[Example]:
    """Return runs with outputs above the limit of a reserve. They take seconds each, so only `rules.py` meets them."""
    long = Load(3, 6, 200, 7_000, 40_000.0, 0.0, 1, 0)
    sched = {"pages": 600, "context_tokens_max": 16_384, "chunked_prefill_size": 64}
    found = []
    for reserve in (0.4, 1.0):
        run = _engine_example(Case({**sched, "schedule_conservativeness": reserve}, long))
        expected = run(False)
        assert expected is not None
        found.append(Example(run, expected, 10.0))
    return found


def _engine_example(case: Case) -> Run:
    setup = case.setup()

    def run(compiled: bool) -> Outcome | None:
        if not compiled:
            return [simulate_module.simulate(setup, compiled=False).data], {}
        made = simulate_module._run_compiled(setup, None, always=True)
        return None if made is None else ([made.data], {})

    return run


def _cluster_example(case: ClusterCase) -> Run:
    setup = case.setup()

    def run(compiled: bool) -> Outcome | None:
        if compiled:
            made = run_compiled(setup, None, None, always=True)
        else:
            made = simulate_cluster(setup, compiled=False)
        return None if made is None else ([made.data, *(one.data for one in made.engines)], dict(made.routed_by_reason))

    return run


def _differing(ours: Outcome | None, theirs: Outcome) -> str:
    """Return how the outcome of the kernel differs from the core's; None: it has left the run to the core."""
    if ours is None:
        return "left to the core"
    if dict(ours[1]) != dict(theirs[1]):
        return "routed_by_reason"
    return next(filter(None, map(differing, ours[0], theirs[0])), "")


def finds(example: Example, advance: Advance) -> bool:
    """Return whether a run of a mutant differs from the core's, fails or takes too long."""
    with _instead(advance), _at_most(SLOWER * example.took_s + 1.0):
        try:
            return bool(_differing(example.run(True), example.expected))
        except Exception:  # whatever a mutant raises, it is found
            return True


class _instead:  # noqa: N801
    """Context in which the fast path runs a mutant, interpreted, and does not fall back to the core."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def __enter__(self) -> None:
        self._before = kernel.advance, machine_code.is_available
        kernel.advance = self._advance
        machine_code.is_available = lambda: False  # type: ignore[assignment]  # as if numba were missing

    def __exit__(self, *_: object) -> None:
        kernel.advance, machine_code.is_available = self._before  # type: ignore[assignment]  # what __enter__ replaced


class _at_most:  # noqa: N801
    """Context that raises TooLongError after some seconds of CPU time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        def too_long(*_: object) -> None:
            raise TooLongError

        signal.signal(signal.SIGVTALRM, too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, 0.2)  # again, should a mutant swallow the first

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


# --------------------------------------------------------------------------------------------------------------- report


def known() -> dict[str, str]:
    """Return the equivalent mutants, by name, with the reason of each."""
    lines = [line for line in KNOWN.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {name: why for name, _, why in (line.partition(" -- ") for line in lines)}


def found_before(results: Path | None) -> set[str]:
    """Return the names of the mutants that an earlier run with the same file has found."""
    if results is None or not results.exists():
        return set()
    return set(results.read_text(encoding="utf-8").splitlines())


def main() -> int:
    """Run the mutants; print one line for each that no run finds."""
    parser = argparse.ArgumentParser(description="mutants of the kernel of the fast path")
    parser.add_argument("--module", help="file name of one module")
    parser.add_argument("--match", default="", help="text in the name of a mutant")
    parser.add_argument("--cases", type=int, default=40, help="random runs of one engine; and a quarter of clusters")
    parser.add_argument("--seed", type=int, default=1, help="of the random runs")
    parser.add_argument("--every", type=int, default=1, help="run every n-th mutant only")
    parser.add_argument("--results", type=Path, help="file with the name of each mutant that was found")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    machine_code.is_available = lambda: False  # type: ignore[assignment]  # as if numba were missing
    fast_path.FLUSH_ROWS, fast_path.FLUSH_ROWS_MIN, fast_path.FLUSH_ROWS_ALL, fast_path.GAPS = 20, 5, 40, 1
    runs = examples(asked.cases, asked.seed)
    print(f"{len(runs)} runs, {sum(one.took_s for one in runs):.1f} s of CPU by the kernel, interpreted", flush=True)
    paths = [path for path in machine_code.SOURCES if asked.module in (None, path.name)]
    every = [one for path in paths for one in _mutants_of(path) if asked.match in one.name]
    mutants = every[:: asked.every]
    equivalent, survived, found = known(), [], 0
    long: list[Example] = []
    before = found_before(asked.results)
    for mutant in mutants:
        if mutant.name in before:
            found += 1
            continue
        advance = advance_of(mutant)
        if mutant.path.name == "rules.py" and not long:
            long = long_examples()
        further = long if mutant.path.name == "rules.py" else []
        killer = next((one for one in (*runs, *further) if finds(one, advance)), None)
        if killer is None:
            survived.append(mutant)
            mark = "equivalent" if mutant.name in equivalent else "NOT FOUND"
            print(f"{mark}: {mutant.name}, line {mutant.line}", flush=True)
        else:
            found += 1
            if asked.results is not None:
                with asked.results.open("a", encoding="utf-8") as file:
                    file.write(f"{mutant.name}\n")
            killer.kills += 1
            runs.sort(key=lambda one: one.took_s / (1 + one.kills))
    unknown = [one for one in survived if one.name not in equivalent]
    print(f"{len(mutants)} mutants, {found} found, {len(survived) - len(unknown)} equivalent, {len(unknown)} not found")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
