"""`lockstep simulate`: argument parsing, progress and printing only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.sim.cli.cluster_options import cluster_options
from lockstep.sim.cli.errors import EXIT_INTERRUPTED, refusals
from lockstep.sim.cli.progress import terminal_bar
from lockstep.sim.scenario.scenario import sim_options
from lockstep.sim.scenario.settings import scheduler_options, tier_options
from lockstep.sim.scenario.values import KINDS

if TYPE_CHECKING:
    from rich.progress import Progress

    from lockstep.sim.cluster.result import ClusterRun
    from lockstep.sim.run.setup import Setup
    from lockstep.sim.run.simulate import Run

PROGRESS_EVERY = 64  # requests


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `lockstep simulate` that change nothing of what is simulated; a stored run does not keep them."""

    intervals: Annotated[bool, Option("state how sure the answers are, by two more simulations", negatable=True)] = True
    check: Annotated[str, Option("check invariants after every N-th event", metavar="every|N|off")] = "off"
    out: Annotated[Path | None, Option("run folder", metavar="DIR", default="nothing is written")] = None
    overwrite: Annotated[bool, Option("replace the run in DIR")] = False
    requests: Annotated[bool, Option("write requests.parquet and requests.csv", negatable=True)] = True
    trace: Annotated[bool, Option("write trace.json.gz, for ui.perfetto.dev", negatable=True)] = True
    report: Annotated[bool, Option("write report.html", negatable=True)] = True
    as_json: Annotated[bool, Option("print metrics.json instead of tables", flag="--json")] = False

    @property
    def check_every(self) -> int:
        """Events between two checks; 0 is never."""
        return _parse_check(self.check)

    @property
    def files(self) -> dict[str, bool]:
        """The files of a run folder that may be left out."""
        return {"requests": self.requests, "trace": self.trace, "report": self.report}


def scenario_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every option of a scenario, of a cluster, of the scheduler and of memory below the device.

    `workload` may be given several times; `gpu` may be left out.
    """
    fields = {field.name: field for field in sim_options("simulate")}
    first, layout = [fields.pop("model")], list(fields)[: list(fields).index("rate")]
    gpu, workload, slos = fields.pop("gpu"), fields.pop("workload"), fields.pop("slos")
    flags = with_flags(click.option, [fields.pop(name) for name in layout if name in fields], kinds=KINDS)
    decorators: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        with_flags(click.option, first),
        click.option(gpu.flag, gpu.name, help=gpu.option.help),
        click.option(
            workload.flag, "workloads", required=True, multiple=True, metavar=workload.option.metavar,
            help=workload.option.help,
        ),
        flags,
        cluster_options("simulate"),
        with_flags(click.option, fields.values(), kinds=KINDS),
        tier_options,
        scheduler_options,
        with_flags(click.option, [slos]),
    ]  # fmt: skip
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command(context_settings={"show_default": True, "max_content_width": 120})
@scenario_flags
@with_flags(click.option, options_of(RunOptions).values())
def simulate(**options: Any) -> None:
    """Simulate a workload on a model and a GPU, and print the latencies, throughput and limits that come of it.

    \b
    lockstep simulate --model qwen3-8b --gpu h200 --workload gen:n=500,rate=4 --out runs/0192
    lockstep simulate --model llama-3.1-8b --gpu h100 --workload azure-code.csv --rate 6.5 --slo ttft_p99=500ms
    lockstep simulate --model qwen3-32b --engines 4xh100:tp=2,2xh200 --router prefix_affinity --workload conv.jsonl.gz
    """
    given = take(RunOptions, options)
    check_every, cut_short = given.check_every, False
    with refusals():
        from lockstep.sim.cli.requested import requested_of
        from lockstep.sim.cluster.intervals import intervals_of
        from lockstep.sim.run.assemble import assemble
        from lockstep.sim.run.run_folder import prepare_folder, write_run
        from lockstep.sim.run.simulate import simulate
        from lockstep.sim.scenario.scenario import Scenario

        scenario = requested_of(options)
        if not isinstance(scenario, Scenario):
            from lockstep.sim.cli.cluster import run_cluster

            done, cut_short = run_cluster(scenario, given)
            if done.interrupted or cut_short:
                sys.exit(EXIT_INTERRUPTED)
            return
        if given.out is not None:
            prepare_folder(given.out, overwrite=given.overwrite)
        setup = assemble(scenario)
        announce(setup, given.out)
        with progress_bar(scenario.limit or len(setup.workload.turns)) as on_finish:
            run = simulate(setup, folder=given.out, check_every=check_every, on_finish=on_finish)
        if given.intervals and not run.interrupted:
            run = replace(run, intervals=intervals_of(run))
            cut_short = run.intervals is None
        if given.out is not None:
            write_run(given.out, run, **given.files)
    show(run, given.out, given.as_json)
    if cut_short:
        say_no_intervals()
    if run.interrupted or cut_short:
        sys.exit(EXIT_INTERRUPTED)


def say_no_intervals() -> None:
    """After a Ctrl-C behind the run itself."""
    click.echo("interrupted while the intervals were worked out: the run is whole, its answers carry none", err=True)


def _parse_check(text: str) -> int:
    if text in ("off", "every"):
        return int(text == "every")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise click.BadParameter(f"expected every, off or a number of events, got `{text}`", param_hint="--check")


def announce(setup: Setup, out: Path | None) -> None:
    """Say on stderr what is about to run: the first line names seed, commit and journal."""
    from lockstep.sim.results.code_version import code_commit, code_version
    from lockstep.sim.run.run_folder import workload_line

    code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
    journal = out / "journal" if out is not None else "none, for lack of --out"
    click.echo(f"seed {setup.scenario.seed}, {code}, journal {journal}", err=True)
    for name in setup.overridden:
        click.echo(f"{name} is {getattr(setup.config, name)}, as the environment says", err=True)
    closed = setup.scenario.concurrency is not None
    pool = f"{setup.config.pages:,} KV pages of {setup.config.page_size}"
    click.echo(f"{setup.title}, {pool}; {workload_line(setup.workload, closed=closed)}", err=True)


@contextmanager
def progress_bar(requests: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr that is told how many requests ended; None, and no bar, if stderr is not a terminal."""
    with terminal_bar() as bar:
        yield None if bar is None else _advance(bar, requests)


def _advance(bar: Progress, requests: int) -> Callable[[int], None]:
    task = bar.add_task("requests finished", total=requests)

    def on_finish(ended: int) -> None:
        if ended % PROGRESS_EVERY == 0:
            bar.update(task, completed=ended)

    return on_finish


def show(run: Run | ClusterRun, out: Path | None, as_json: bool) -> None:
    """Print the result on stdout, and where it lies on stderr."""
    if as_json:
        import json

        click.echo(json.dumps(run.metrics(), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from rich.console import Console

        from lockstep.sim.results.results import intervals_table, summary_table

        Console().print(summary_table(run.data))
        if run.intervals is not None:
            Console().print(intervals_table(run.intervals))
        click.echo(f"calibration: {run.calibration.title}")
        for line in run.remarks():
            click.echo(line)
    counts = f"{run.data.summary['requests']['arrived']:,} requests, {run.batches:,} batches"
    click.echo(f"simulated {counts} in {run.cpu_s:.1f} s of CPU time", err=True)
    if out is not None:
        written = ", ".join(path.name for path in sorted(out.iterdir()))
        click.echo(f"{out} has {written}", err=True)
