"""Mutants: does a test find every small change of the sources?

    python tests/mutants.py core                          every mutant of lockstep.core; hours
    python tests/mutants.py core --sample 600 --seed 1    600 of them, drawn by a seed
    python tests/mutants.py core --match "radix.py"       the mutants with this text in their names
    python tests/mutants.py core --again                  those that survived before, with a larger budget of tests
    python tests/mutants.py core --budget 6 --histories 0  a first pass: random histories find 3 of 1,000
    python tests/mutants.py core --measure                which test runs which line; done by itself if it is missing
    python tests/mutants.py --table FILE                  the table of all results by module

A mutant is one changed place of a function: another comparison, a constant that is one larger, a statement left out, a
condition negated. A test that runs its line must fail, or a random history of `swarm.py`. Quick tests that run most
of the changed file are the first. Results are kept in `.mutants/`, by the text of the function: a run that was
interrupted goes on where it was. Each mutant that survives must be in `tests/data/mutants.txt` with the reason for
which nothing can notice it; otherwise the exit status is 1. Functions that the simulator compiles have
`tests/kernel_mutants.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.mutation.operators import EVERY, Mutant, mutants_of
from tests.support.mutation.session import Measuring, Mutating, Tests, Verdict, run_pytest
from tests.swarm import run_seeds

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".mutants"
KNOWN = ROOT / "tests/data/mutants.txt"
CORE = "packages/sched-core/src/lockstep/core"
HISTORIES = range(1_000_000)  # seeds, as many as the budget has time for
COLUMNS = f"{'module':<40}{'mutants':>9}{'found':>7}{'timeout':>9}{'equal':>7}{'open':>6}{'share':>8}"


@dataclass(frozen=True)
class Target:
    """Sources that are changed, and the tests that must notice."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    histories: bool = False  # random histories are searched too
    without: tuple[str, ...] = ()  # files that are not changed, relative to the sources


def _files(folder: str, names: str) -> tuple[str, ...]:
    """Return files of tests by their subjects, which spaces separate."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names.split())


TARGETS = {
    "core": Target(
        (CORE,),
        (
            "tests/core",
            "tests/golden",
            "tests/lockstep/test_decode_runs.py",
            "tests/properties",
            "tests/test_command.py",
            "tests/test_data_parallel.py",
            "tests/test_data_parallel_delayer.py",
            "tests/test_data_parallel_histories.py",
            "tests/test_distributed.py",
            "tests/test_distributed_histories.py",
            "tests/test_distributed_kinds.py",
            "tests/test_hybrid_handover.py",
            "tests/test_museum.py",
            "tests/test_scenarios.py",
        ),
        histories=True,
    ),
    "host": Target(
        ("packages/sched-core/src/lockstep/host",),
        (
            *_files("core", "adapter_registry bad_words cache_moves durable given_embeddings grammar_backends"),
            *_files("core", "grammar_process grammar_rows grammar_trial handover_link host_header idle_check"),
            *_files("core", "inbox journal_expiry layout_options media_processor microbatches options page_store"),
            *_files("core", "prefill_side prompt_results queued_writer rank_agreement recovery_verdicts salvage"),
            *_files("core", "startup stated_bytes stop_regexes stop_texts text weight_formats"),
            *_files("api", "answer_text audio chat_templates images settings wire"),
            *_files(
                "runtime", "drafting given_embeddings host jump_forward llm_text quantized recorded transfer videos"
            ),
            *_files("sim", "engine_run handover requested whole_prompts"),
            *_files("tools", "explain on_hardware router_journal"),
            "tests/test_contract.py",
            "tests/test_options_page.py",
        ),
    ),
    "fast": Target(
        ("packages/sim/src/lockstep/sim/fast", "packages/sim/src/lockstep/sim/cluster"),
        (
            *_files("sim", "closed_loop cluster cluster_lanes cluster_scaling compare_clusters data_parallel"),
            *_files("sim", "fast_lines fast_path forcing front_end handover machine_code placement stored_run"),
        ),
        without=("following.py", "kernel.py", "loops.py", "memory.py", "ordering.py", "routing.py", "stretches.py"),
    ),
    "tools": Target(
        ("tools/src/lockstep/tools",),
        (
            "tests/tools",
            *_files("core", "salvage"),
            *_files("sim", "rerun samples stored_run"),
            "tests/test_command_line_page.py",
            "tests/test_json_schemas.py",
        ),
    ),
}
"""Tests that start servers are left out: a mutant is in effect in the process of the test only."""

WITHOUT = (
    "test_a_planted_bug_is_found",
    "test_a_fresh_campaign",
    "test_structure",
    "test_layers",
    "every_scenario_is_written",
    "ended_from_outside_ends_all_requests_once",
)
"""Tests that are about planted bugs or about the text of sources and scenarios, and one that is slow while traced."""


@dataclass(frozen=True)
class Result:
    """The verdict on one mutant."""

    name: str
    digest: str  # of its function
    verdict: Verdict
    by: str  # the test that found it
    seconds: float


def results_of(target: str) -> dict[str, Result]:
    """Return the newest result of each mutant of a target, by name."""
    path = KEPT / f"{target}.jsonl"
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line["name"]: Result(**line) for line in lines}


def known() -> dict[str, str]:
    """Return the mutants that nothing can notice, by name, with the reason of each."""
    lines = [line for line in KNOWN.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {name: why for name, _, why in (line.partition(" -- ") for line in lines)}


def all_mutants(target: Target, modules: set[str] | None = None) -> list[Mutant]:
    """Return every mutant of a target, in the order of its files. `modules`: only of these."""
    found = []
    for source in target.sources:
        for path in sorted((ROOT / source).rglob("*.py")):
            module = path.relative_to(ROOT / source).as_posix()
            if module not in target.without and (modules is None or module in modules):
                found += list(mutants_of(path, module, EVERY))
    return found


def drawn(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Return so many mutants, drawn by a seed; None: all. A larger sample has the smaller one in it."""
    shuffled = sorted(mutants, key=lambda one: random.Random(f"{seed} {one.name}").random())
    return shuffled[:count]


def finds_by_histories(budget_s: float) -> Callable[[Mutant], bool]:
    """Return a check whether random histories, so many seconds of them, find the mutant in effect."""

    def finds(_: Mutant) -> bool:
        ends_s = time.process_time() + budget_s
        for seed in HISTORIES:
            if time.process_time() >= ends_s:
                return False
            if run_seeds(seed, 1).failure:
                return True
        return False

    return finds


def run(
    name: str, mutants: Iterable[Mutant], tests: Sequence[str], budget_s: float, histories_s: float, jobs: int
) -> None:
    """Run mutants of a target under some of its tests, and keep each result."""
    target, folder = TARGETS[name], KEPT / name
    todo = list(mutants)
    done = 0
    with (KEPT / f"{name}.jsonl").open("a", encoding="utf-8") as kept:

        def report(mutant: Mutant, verdict: Verdict, by: str, seconds: float) -> None:
            nonlocal done
            done += 1
            result = Result(mutant.name, mutant.digest, verdict, by, round(seconds, 2))
            kept.write(json.dumps(vars(result)) + "\n")
            kept.flush()
            if verdict in ("survived", "uncovered"):
                print(
                    f"{done} of {len(todo)}: {verdict}: {mutant.name}, line {mutant.line}",
                    file=sys.__stdout__,
                    flush=True,
                )

        further = finds_by_histories(histories_s) if target.histories and histories_s > 0 else None
        plugin = Mutating(
            Tests(folder), todo, report, budget_s=budget_s, jobs=jobs, further=further, further_s=histories_s
        )
        run_pytest(plugin, [*tests, *_deselected()])


def measure(name: str, tests: Sequence[str]) -> None:
    """Run tests of a target once, and keep the lines that each of them runs."""
    run_pytest(Measuring(KEPT / name, [ROOT / one for one in TARGETS[name].sources]), [*tests, *_deselected()])


def _deselected() -> list[str]:
    return ["-k", " and ".join(f"not {name}" for name in WITHOUT)]


def table() -> tuple[list[str], int]:
    """Return the table of kept results by module, and the number of mutants that are neither found nor listed."""
    equal, lines, still_open = known(), [], 0
    for target in TARGETS:
        results = results_of(target).values()
        if not results:
            continue
        by_module: dict[str, Counter[str]] = {}
        survivors = []
        for one in results:
            counts = by_module.setdefault(one.name.split()[0], Counter())
            verdict = "equal" if one.verdict in ("survived", "uncovered") and one.name in equal else one.verdict
            if verdict == "unbuilt":
                continue
            counts[verdict] += 1
            if verdict in ("survived", "uncovered"):
                survivors.append(f"  {verdict}: {one.name}")
        lines += [f"# {target}: `make mutants ARGS={target}`", COLUMNS]
        total: Counter[str] = Counter()
        for module, counts in sorted(by_module.items()):
            lines.append(_row(module, counts))
            total += counts
        lines += [_row("all", total), "", *sorted(survivors), ""]
        still_open += len(survivors)
    return lines, still_open


def _row(module: str, counts: Counter[str]) -> str:
    left, equal = counts["survived"] + counts["uncovered"], counts["equal"]
    found, late = counts["killed"] + counts["timeout"], counts["timeout"]
    share = f"{found / (found + left):.1%}" if found + left else "-"
    return f"{module:<40}{found + left + equal:>9}{found:>7}{late:>9}{equal:>7}{left:>6}{share:>8}"


def main() -> int:
    """Run the command line. Returns 1 if a mutant is neither found nor listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS), default="core")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn by --seed; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--match", default="", help="text in the name of a mutant")
    parser.add_argument("--again", action="store_true", help="run those that survived before once more")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of tests a mutant")
    parser.add_argument("--histories", type=float, help="seconds of random histories behind (default: as --budget)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--tests", nargs="+", help="only these tests of the target, which is quicker and finds fewer")
    parser.add_argument("--measure", action="store_true", help="only record which test runs which line")
    parser.add_argument("--table", type=Path, help="write the table of all results, and run nothing")
    asked = parser.parse_args()
    if asked.table:
        lines, still_open = table()
        asked.table.write_text("\n".join(lines), encoding="utf-8")
        return 1 if still_open else 0
    tests = asked.tests or TARGETS[asked.target].tests
    if asked.measure or not (KEPT / asked.target / "seconds.json").exists():
        measure(asked.target, tests)
    if asked.measure:
        return 0
    before = results_of(asked.target)
    chosen = drawn(
        [one for one in all_mutants(TARGETS[asked.target]) if asked.match in one.name], asked.sample, asked.seed
    )
    todo = [one for one in chosen if _is_open(one, before.get(one.name), again=asked.again)]
    print(f"{len(chosen)} mutants, {len(todo)} to run", flush=True)
    histories_s = asked.budget if asked.histories is None else asked.histories
    run(asked.target, todo, tests, asked.budget, histories_s, asked.jobs)
    after, equal = results_of(asked.target), known()
    lost = [one for one in chosen if after[one.name].verdict in ("survived", "uncovered") and one.name not in equal]
    for one in lost:
        print(f"NOT FOUND: {one.name}, line {one.line}")
    print(f"{len(chosen)} mutants, {len(lost)} neither found nor listed in {KNOWN.relative_to(ROOT)}")
    return 1 if lost else 0


def _is_open(mutant: Mutant, result: Result | None, *, again: bool) -> bool:
    """Whether a mutant is to be run: it has no result, its function has changed, or it survived and runs again."""
    if result is None or result.digest != mutant.digest:
        return True
    return again and result.verdict in ("survived", "uncovered")


if __name__ == "__main__":
    sys.exit(main())
