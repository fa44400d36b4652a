"""`lockstep simulate` with several engines: from options to a cluster, and its result on the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.run_options import RunOptions
from lockstep.sim.cli.run_output import print_no_intervals, progress_bar, show
from lockstep.sim.cluster.intervals import intervals_of
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.run_folder import write_cluster_run
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import ClusterSetup, assemble_cluster, kind_of
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.results.results import NOTHING, show_rate, show_share, show_us
from lockstep.sim.run.environment import debug_level
from lockstep.sim.run.run_folder import prepare_folder, workload_line

NUMBER_WIDTH = 5  # of `100.0`


def run_cluster(scenario: ClusterScenario, given: RunOptions) -> tuple[ClusterRun, bool]:
    """Simulate a cluster, write the run folder and print the result.

    Returns: the run, and whether its intervals were interrupted.
    Raises: the errors of `assemble_cluster`.
    """
    out, as_json, check_every = given.out, given.as_json, given.check_every
    cut_short = False
    if debug_level(os.environ):
        raise ConfigError(
            f"LOCKSTEP_DEBUG prints the steps of one engine, got `{os.environ['LOCKSTEP_DEBUG']}` for a cluster\n"
            "hint: unset it, or leave out --replicas, --engines and --router"
        )
    if out is not None:
        prepare_folder(out, overwrite=given.overwrite)
    setup = assemble_cluster(scenario)
    announce(setup, out)
    with progress_bar(scenario.base.limit or len(setup.workload.turns)) as on_finish:
        run = simulate_cluster(setup, folder=out, check_every=check_every, on_finish=on_finish)
    if out is None:
        run = run.without_batches()  # further runs, for the intervals, take their memory
    if given.intervals and not run.interrupted:
        run = replace(run, intervals=intervals_of(run))
        cut_short = run.intervals is None
    if out is not None:
        write_cluster_run(out, run, **given.files)
    show(run, out, as_json)
    if not as_json:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(engines_table(run))
        if "transfers" in run.data.summary:
            console.print(transfers_table(run.data.summary["transfers"]))
        for key, ranks in (
            ("ranks", "all ranks"),
            ("ranks_prefill", "prefill ranks"),
            ("ranks_decode", "decode ranks"),
        ):
            if key in run.data.summary:
                console.print(ranks_table(run.data.summary[key], ranks))
    if cut_short:
        print_no_intervals()
    return run, cut_short


def transfers_table(summary: Mapping[str, Any]) -> Any:
    """Return a table of the KV transfers between prefill and decode engines."""
    from rich import box
    from rich.table import Table

    table = Table(title="Between prefill and decode engines", title_justify="left", box=box.SIMPLE_HEAD)
    rows = {
        "transfers": f"{summary['transfers']:,}",
        "failed": f"{summary['transfers_failed']:,}",
        "tokens sent": f"{summary['transferred_tokens']:,}",
        "not sent": f"{summary['tokens_not_sent']:,}",
        "GB": f"{summary['transferred_bytes'] / 1e9:,.1f}",
        "wait for pages p99": show_us(summary["page_wait_us_p99"]),
        "transfer p50": show_us(summary["transfer_us_p50"]),
        "transfer p99": show_us(summary["transfer_us_p99"]),
        "links busy": show_share(summary["link_busy_share"]),
    }
    for heading in rows:
        table.add_column(heading, justify="right")
    table.add_row(*rows.values())
    return table


def ranks_table(summary: Mapping[str, Any], ranks: str = "all ranks") -> Any:
    """Return a table of the passes that ranks ran together, and of the effect of the prefill delayer."""
    from rich import box
    from rich.table import Table

    title = f"Passes of {ranks} together"
    waited, released = summary["passes_prompts_waited"], summary["prompts_released"]
    if summary["prompts_by_situation"]:
        title += f"; prompts waited in {waited:,} of them and went ahead {released:,} times"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    rows = {
        "passes": f"{summary['passes']:,}",
        "extending": f"{summary['passes_extending']:,}",
        "ranks extending in these": show_share(summary["extending_rank_share"]),
        "idle ranks": show_share(summary["idle_share"]),
        "by graph": show_share(summary["graph_share"]),
        "padding": show_share(summary["padding_share"]),
        **(
            {
                "prompts waited, mean": show_us(summary["release_wait_us_mean"]),
                "ranks that joined": f"{summary['ranks_joined']:,}",
            }
            if released
            else {}
        ),
    }
    for heading in rows:
        table.add_column(heading, justify="right")
    table.add_row(*rows.values())
    return table


def announce(setup: ClusterSetup, out: Path | None) -> None:
    """Print on stderr what is about to run."""
    code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
    journals = f"{out}/engines/*/journal" if out is not None else "none, for lack of --out"
    click.echo(f"seed {setup.scenario.base.seed}, {code}, journals {journals}", err=True)
    first = setup.engines[0]
    for name in first.overridden:
        click.echo(f"{name} is {getattr(first.config, name)}, from the environment", err=True)
    click.echo(
        f"{setup.title}; {workload_line(setup.workload, closed=setup.scenario.base.concurrency is not None)}", err=True
    )


def engines_table(run: ClusterRun) -> Any:
    """Return a table with one line per engine."""
    from rich import box
    from rich.table import Table

    reasons = ", ".join(f"{count:,} {reason}" for reason, count in run.routed_by_reason.items())
    title = f"Engines behind {run.setup.scenario.router.policy} (routed by: {reasons})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("engine", no_wrap=True)
    weighted = len({share.weight for share in run.setup.shares}) > 1
    headings = [
        "requests",
        "of\nfair",
        "output\ntok/s",
        "TTFT\np99",
        "TPOT\np99",
        "cache\nhits",
        "KV\npeak",
        "GPU\nbusy",
    ]
    for heading in (["weight"] if weighted else []) + headings:
        # On a narrow terminal the unit wraps below its number. The minimum width keeps every digit.
        table.add_column(heading, justify="right", min_width=max(NUMBER_WIDTH, *map(len, heading.split())))
    arrived = run.data.summary["requests"]["arrived"]
    for number, (one, share) in enumerate(zip(run.engines, run.setup.shares, strict=True)):
        summary, role = one.data.summary, one.setup.config.role
        fair = arrived / sum(other.weight for other in run.setup.shares_of(str(role)))
        rank = f", rank {one.setup.config.dp_rank}" if one.setup.config.shares_passes else ""
        table.add_row(
            f"{number}: {kind_of(one.setup)}{rank}",
            *([f"{share.weight:g}"] if weighted else []),
            f"{summary['requests']['arrived']:,}",
            f"{summary['requests']['arrived'] / (share.weight * fair):.2f}x" if fair else NOTHING,
            show_rate(summary["throughput"]["output_tokens_per_s"]),
            show_us(summary["latency"]["ttft_us_p99"]),
            show_us(summary["latency"]["tpot_us_p99"]),
            show_share(summary["cache"]["hit_ratio"]),
            show_share(summary["kv"]["used_share_max"]),
            show_share(summary["device"]["busy_fraction"]),
        )
    return table
