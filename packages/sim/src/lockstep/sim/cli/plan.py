"""`lockstep plan`: argument parsing only. The work is done by plan/search.py and plan/answer.py."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import click

from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.sim.cli.cluster_options import check_router_options, cluster_given, cluster_options, router_given
from lockstep.sim.cli.errors import EXIT_INTERRUPTED, refusals
from lockstep.sim.cli.option_file import FileCommand, with_option_file
from lockstep.sim.cli.progress import ProgressLines, terminal_bar
from lockstep.sim.run.out_paths import check_file
from lockstep.sim.scenario.scenario import sim_options
from lockstep.sim.scenario.settings import given_settings, scheduler_options, tier_options
from lockstep.sim.scenario.values import KINDS

if TYPE_CHECKING:
    from lockstep.sim.plan.answer import PlanAnswer
    from lockstep.sim.plan.ledger import TrialStore
    from lockstep.sim.plan.question import Effort, Load, Question
    from lockstep.sim.plan.search import Progress

EXIT_NONE_FOUND = 3


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `lockstep plan` itself. Options of engines and of their load are fields of `Scenario`."""

    model: Annotated[str, Option("catalogue name, such as qwen3-8b, or the path of a config.json")]
    gpus: Annotated[str, Option("catalogue names, such as h100,h200, or JSON files", metavar="GPU,...")]
    workload: Annotated[str, Option("a trace, or a generator: docs/workloads.md", metavar="PATH|gen:...")]
    slos: Annotated[
        tuple[str, ...],
        Option("bound on a metric, such as ttft_p99=500ms; may be repeated", flag="--slo", metavar="METRIC=TIME"),
    ] = ()
    rate: Annotated[
        float | None, Option("find the cheapest configuration that serves this many requests per second")
    ] = None
    sessions: Annotated[
        int | None, Option("find the cheapest configuration that serves this many concurrent sessions")
    ] = None
    growth: Annotated[
        str | None,
        Option(
            "with --rate or --sessions: factors of the load to answer as well, such as 1.25,1.5,2", metavar="FACTORS"
        ),
    ] = None
    load: Annotated[
        str | None,
        Option(
            "unit of the load: rate, or sessions (a closed loop)",
            default="sessions for a trace of sessions without start times",
        ),
    ] = None
    gpus_max: Annotated[
        int | None, Option("find the largest rate of the replicas that fit on this many GPUs", flag="--max-gpus")
    ] = None
    search: Annotated[
        tuple[str, ...], Option("values to search: tp=1,2,4 or chunked_prefill_size=512..8192", metavar="NAME=VALUES")
    ] = ()
    prices: Annotated[
        tuple[str, ...], Option("price per GPU-hour of a GPU of --gpus", flag="--price", metavar="GPU=USD")
    ] = ()
    price_kind: Annotated[str, Option("kind of price in the catalogue")] = "rental_3yr"
    confidence: Annotated[float, Option("confidence of every interval")] = 0.95
    quick: Annotated[bool, Option("short simulations; the answer is within about 15 %")] = False
    requests: Annotated[
        int | None, Option("requests of a long simulation, per replica, at most", default="3000; quick: 800")
    ] = None
    confirm_all: Annotated[
        bool, Option("also confirm configurations that proved worse in short simulations", flag="--all")
    ] = False
    jobs: Annotated[int | None, Option("worker processes", default="one per core that may be used")] = None
    ray_address: Annotated[
        str | None, Option("run on a Ray cluster: auto, HOST:PORT, or local", flag="--ray", metavar="ADDRESS")
    ] = None
    out: Annotated[Path | None, Option("folder for simulations and plan.html", metavar="DIR")] = None
    json_path: Annotated[Path | None, Option("write the answer as JSON", flag="--json", metavar="FILE")] = None
    report_path: Annotated[Path | None, Option("write the report", flag="--report", metavar="FILE")] = None
    seed: Annotated[int, Option("seed of the first replication")] = 7
    prefill_decode: Annotated[str, Option("engines by role: mixed, PREFILL:DECODE such as 2:6, or auto")] = "mixed"
    autoscale: Annotated[str, Option("add and remove replicas by load: docs/routing.md", metavar="SPEC")] = "none"


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all configurations share: those of the scenario, except the ones `plan` declares itself."""
    own = (*options_of(PlanOptions), "gpu")
    fields = [field for field in sim_options("plan") if field.name not in own]
    decorators = (
        with_flags(click.option, fields, kinds=KINDS),
        cluster_options("plan"),
        tier_options,
        scheduler_options,
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command(cls=FileCommand, context_settings={"show_default": True, "max_content_width": 120})
@with_option_file
@with_flags(click.option, options_of(PlanOptions).values())
@engine_flags
def plan(**options: Any) -> None:
    """Find the cheapest configuration that meets the SLO at a rate, or the largest rate that each one sustains.

    \b
    lockstep plan --model qwen3-8b --gpus h100,h200 --workload gen:turns=uniform:1:3 --slo ttft_p99=500ms --rate 40
    lockstep plan --model qwen3-32b --gpus h200 --search tp=1,2,4 --workload conv.jsonl.gz --slo tpot_p99=50ms
    lockstep plan question.toml --save again.toml
    lockstep plan --model llama-3.1-70b --gpus h200 --max-gpus 16 --search tp=2,4 --search prefill_decode=auto ...
    """
    given = take(PlanOptions, options)
    with refusals():
        from lockstep.core.contract.errors import ConfigError
        from lockstep.sim.plan.ledger import TrialStore

        if given.jobs is not None and given.jobs < 1:
            raise ConfigError(f"`jobs` must be at least 1, got `{given.jobs}`")
        if given.requests is not None and given.requests < 10:
            raise ConfigError(f"`requests` must be at least 10, got `{given.requests}`")
        question = question_of(given, options)
        for option, path in (("--json", given.json_path), ("--report", given.report_path)):
            if path is not None:
                check_file(path, option)
        json_path, report_path = given.json_path, given.report_path
        if json_path is not None and report_path is not None and json_path.resolve() == report_path.resolve():
            raise ConfigError(f"--json and --report both name `{json_path}`\nhint: give each its own file")
        ledger = TrialStore(given.out)
        later = grown(question, given.growth)
        try:
            answer = answer_of(question, later, given, ledger)
        except KeyboardInterrupt:
            print_next_commands(ledger, given.out)
            sys.exit(EXIT_INTERRUPTED)
        found = f"; {ledger.reused} found from before" if ledger.reused else ""
        click.echo(f"{ledger.run} simulations in {ledger.cpu_s:.1f} s of CPU time{found}", err=True)
    if answer.winner is None:
        sys.exit(EXIT_NONE_FOUND)


def question_of(given: PlanOptions, options: dict[str, Any]) -> Question:
    """Return the question that a command line poses. `options` are shared by all configurations. Raises ConfigError."""
    from lockstep.core.cluster.router import RouterConfig
    from lockstep.sim.cluster.scenario import parse_scaling
    from lockstep.sim.metrics.slo import Slo
    from lockstep.sim.plan.question import Question, natural_load, parse_prices, parse_search, split_of
    from lockstep.sim.workload.logs import LogReading
    from lockstep.sim.workload.workload import SourceReading

    if given.autoscale != "none":
        parse_scaling(given.autoscale)
    policy, cluster = router_given(options), cluster_given(options)
    hop_us = cluster.pop("hop_us", 0)
    settings = given_settings(options)
    usual = {field.name: field.default for field in sim_options()} | {"prefill_decode": "mixed", "autoscale": "none"}
    options |= {"prefill_decode": split_of(given.prefill_decode), "autoscale": given.autoscale}
    common = {name: value for name, value in options.items() if value != usual.get(name)} | cluster
    searched = parse_search(given.search)
    for key, _ in searched:
        settings.pop(key, None)
        common.get("tiers", {}).pop(key, None)
    router = RouterConfig(**policy)
    check_router_options(policy, dict(searched).get("router", (router.policy,)))
    log = LogReading(options["columns"], options["tokenizer"], options["chars_per_token"])
    reading = SourceReading(bool(options["skip_bad_rows"]), log=log)
    usual_load: Load = "sessions" if given.sessions is not None else natural_load(given.workload, reading=reading)
    return Question(
        model=given.model,
        gpus=tuple(gpu.strip() for gpu in given.gpus.split(",")),
        workload=given.workload,
        slos=tuple(map(Slo.parse, given.slos)),
        load=usual_load if given.load is None else cast("Load", given.load),
        rate=given.rate,
        sessions=given.sessions,
        gpus_max=given.gpus_max,
        search=searched,
        common=common,
        settings=settings,
        router=router,
        hop_us=hop_us,
        seed=given.seed,
        confidence=given.confidence,
        effort=_effort(given),
        prices=parse_prices(given.prices),
        price_kind=given.price_kind,
        confirm_all=given.confirm_all,
    )


def _effort(given: PlanOptions) -> Effort:
    """Return how much is simulated; `--requests`, if given, limits the requests of a simulation."""
    from lockstep.sim.plan.question import FULL, QUICK, Length

    effort, requests = QUICK if given.quick else FULL, given.requests
    if requests is None:
        return effort
    short = effort.short._replace(
        requests_min=min(effort.short.requests_min, requests), requests_max=min(effort.short.requests_max, requests)
    )
    return replace(effort, long=Length(requests, requests, 0.0), short=short)


def grown(question: Question, growth: str | None) -> list[tuple[float, Question]]:
    """Return the question at each factor of its load. Raises ConfigError."""
    from lockstep.core.contract.errors import ConfigError

    if growth is None:
        return []
    try:
        factors = [float(word) for word in growth.split(",")]
    except ValueError:
        factors = []
    if not factors or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ConfigError(f"`growth` must be factors above 0, got `{growth}`\nhint: --growth 1.25,1.5,2")
    if question.wanted is None:
        raise ConfigError("`growth` multiplies a load, and none is given\nhint: add --rate or --sessions")
    if question.rate is not None:
        return [(factor, replace(question, rate=question.rate * factor)) for factor in factors]
    assert question.sessions is not None
    return [(factor, replace(question, sessions=round(question.sessions * factor))) for factor in factors]


def answer_of(
    question: Question, later: list[tuple[float, Question]], given: PlanOptions, ledger: TrialStore
) -> PlanAnswer:
    """Search, print and write the answer, and those at later loads. Raises KeyboardInterrupt after Ctrl-C."""
    from lockstep.sim.plan.search import prepare
    from lockstep.sim.plan.solve import solve
    from lockstep.sim.plan.workers import workers_of
    from lockstep.sim.run.run_folder import workload_line

    candidates, opened = prepare(question)
    line = workload_line(opened, closed=question.load == "sessions")
    announce(question, line, len(candidates), given.out)
    jobs = usable_cores() if given.jobs is None else given.jobs
    with workers_of(jobs, given.ray_address) as workers, showing_progress(ledger) as progress:
        answer = solve(question, (candidates, opened), later, workers, ledger, progress)
    show(answer)
    write_answer(answer, [*_given(given.json_path), *_given(given.out, "plan.json")])
    write_report(answer, [*_given(given.report_path), *_given(given.out, "plan.html")])
    return answer


# CPU quota of a container: microseconds per period, or "max", and the period in microseconds
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Return the number of cores that this process may use. A container's quota may be far below the machine's cores.

    Args:
        quota: the file with the quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        used_us, period_us = map(int, quota.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # not a container, or no quota
        return cores
    return max(min(cores, math.ceil(used_us / period_us)), 1)


def _given(path: Path | None, *names: str) -> list[Path]:
    return [] if path is None else [path.joinpath(*names)]


def write_answer(answer: PlanAnswer, paths: list[Path]) -> None:
    """Write the answer as JSON to each path."""
    from lockstep.sim.run.run_folder import whole

    for path in paths:
        with whole(path) as part:
            part.write_text(answer.to_json(), encoding="utf-8", newline="\n")


def write_report(answer: PlanAnswer, paths: list[Path]) -> None:
    """Write the HTML report to each path. Raises KeyboardInterrupt if Ctrl-C ended the simulation that it shows."""
    from lockstep.sim.plan.page import render_plan
    from lockstep.sim.run.run_folder import whole

    text = render_plan(answer) if paths else ""
    for path in paths:
        with whole(path) as part:
            part.write_text(text, encoding="utf-8", newline="\n")
        click.echo(f"report: {path}", err=True)


def announce(question: Any, line: str, configurations: int, out: Path | None) -> None:
    """Print on stderr what is about to run."""
    from lockstep.sim.results.code_version import code_commit, code_version

    code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
    kept = f"simulations kept in {out}" if out is not None else "nothing is kept without --out"
    click.echo(f"seed {question.seed}, {code}, {kept}", err=True)
    click.echo(f"{configurations} configurations of {question.model}; {line}", err=True)


@contextmanager
def showing_progress(ledger: Any) -> Iterator[Progress]:
    """Show a bar of configurations on stderr, with the number of simulations; lines if stderr is not a terminal."""
    from lockstep.sim.plan.search import Progress

    with terminal_bar() as bar:
        if bar is None:
            yield _progress_lines(ledger)
            return
        task = bar.add_task("configurations", total=None)
        stage_name = ""

        def stage(name: str, searches: int) -> None:
            nonlocal stage_name
            stage_name = name
            bar.reset(task, total=searches, description=f"configurations, {name}")

        def trial() -> None:
            bar.update(task, description=f"configurations, {stage_name}: {ledger.run} simulations")

        yield Progress(stage=stage, trial=trial, search=lambda: bar.advance(task))


def _progress_lines(ledger: Any) -> Progress:
    from lockstep.sim.plan.search import Progress

    lines, stage_name, done, of = ProgressLines(), "", 0, 0

    def stage(name: str, searches: int) -> None:
        nonlocal stage_name, done, of
        stage_name, done, of = name, 0, searches

    def search() -> None:
        nonlocal done
        done += 1

    def trial() -> None:
        lines.line(f"{stage_name}: {done} of {of} configurations, {ledger.run} simulations")

    return Progress(stage=stage, trial=trial, search=search)


def print_next_commands(ledger: Any, out: Path | None) -> None:
    """Print, after Ctrl-C, which simulations are kept and how to continue."""
    if out is None:
        click.echo(f"interrupted after {ledger.run} simulations; none is kept; --out DIR keeps them", err=True)
        return
    click.echo(f"interrupted: {out} keeps {ledger.run + ledger.reused} simulations", err=True)
    click.echo("hint: run the same command again to continue", err=True)


def show(answer: Any) -> None:
    """Print the answer on stdout."""
    from rich.console import Console

    from lockstep.sim.plan.serve_command import serve_commands, simulate_command
    from lockstep.sim.plan.vllm_command import vllm_command

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(answer.table())
    sides = answer.sides_table()
    if sides is not None:
        console.print(sides)
    click.echo("> winner   * on the Pareto front of cost and latency")
    click.echo(answer.headline)
    for later in answer.forecast:
        click.echo(later.line)
    for line in answer.remarks():
        click.echo(line)
    winner = answer.winner
    if winner is not None:
        of_vllm = vllm_command(winner)
        titled = [*zip(("serve:   ", "emulate: "), serve_commands(winner), strict=False)]
        for name, command in [*titled, *([("vllm:    ", of_vllm)] if of_vllm is not None else [])]:
            click.echo(f"{name} {command.line}")
            if command.lacks:
                click.echo("          not supported there yet: " + ", ".join(command.lacks))
        click.echo("simulate: " + simulate_command(winner))
