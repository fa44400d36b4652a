"""Progress and printed results of `lockstep simulate`, for one engine and for clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.sim.cli.progress import ProgressLines, terminal_bar

if TYPE_CHECKING:
    from rich.progress import Progress

    from lockstep.sim.cluster.result import ClusterRun
    from lockstep.sim.run.setup import Setup
    from lockstep.sim.run.simulate import Run

PROGRESS_EVERY = 64  # requests


def print_no_intervals() -> None:
    """Print, after a Ctrl-C behind the run itself, that the answers have no intervals."""
    click.echo("interrupted while the intervals were worked out: the run is complete, its answers have none", err=True)


def announce(setup: Setup, out: Path | None) -> None:
    """Print on stderr what is about to run. The first line has seed, commit and journal."""
    from lockstep.sim.results.code_version import code_commit, code_version
    from lockstep.sim.run.run_folder import workload_line

    code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
    journal = out / "journal" if out is not None else "none, for lack of --out"
    click.echo(f"seed {setup.scenario.seed}, {code}, journal {journal}", err=True)
    for name in setup.overridden:
        click.echo(f"{name} is {getattr(setup.config, name)}, from the environment", err=True)
    closed = setup.scenario.concurrency is not None
    pool = f"{setup.config.pages:,} KV pages of {setup.config.page_size}"
    if setup.model.whole is not None:
        pool = f"whole prompts without KV, up to {setup.config.max_prefill_tokens:,} tokens at once"
    click.echo(f"{setup.title}, {pool}; {workload_line(setup.workload, closed=closed)}", err=True)


@contextmanager
def progress_bar(requests: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, lines if it is no terminal; yield a function that takes the number of ended requests."""
    with terminal_bar() as bar:
        yield _lines(requests) if bar is None else _advance(bar, requests)


def _lines(requests: int) -> Callable[[int], None]:
    lines = ProgressLines()

    def on_finish(ended: int) -> None:
        if ended % PROGRESS_EVERY == 0:
            lines.line(f"{ended:,} of {requests:,} requests have ended ({100 * ended / requests:.0f} %)")

    return on_finish


def _advance(bar: Progress, requests: int) -> Callable[[int], None]:
    task = bar.add_task("requests finished", total=requests)

    def on_finish(ended: int) -> None:
        if ended % PROGRESS_EVERY == 0:
            bar.update(task, completed=ended)

    return on_finish


def show(run: Run | ClusterRun, out: Path | None, as_json: bool) -> None:
    """Print the result on stdout, and the files of the run folder on stderr."""
    if as_json:
        import json

        click.echo(json.dumps(run.metrics(), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from rich.console import Console

        from lockstep.sim.results.results import intervals_table, summary_table

        Console().print(summary_table(run.data, never_sent=0 if run.interrupted else run.never_sent))
        if run.intervals is not None:
            Console().print(intervals_table(run.intervals))
        click.echo(run.calibration.line)
        for line in run.remarks():
            click.echo(line)
    counts = f"{run.data.summary['requests']['arrived']:,} requests, {run.batches:,} batches"
    click.echo(f"simulated {counts} in {run.cpu_s:.1f} s of CPU time", err=True)
    if out is not None:
        written = ", ".join(path.name for path in sorted(out.iterdir()))
        click.echo(f"{out} has {written}", err=True)
