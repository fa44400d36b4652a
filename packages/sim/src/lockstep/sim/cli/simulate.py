"""`lockstep simulate`: argument parsing, progress and printing only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from lockstep.host.options import options_of, take, with_flags
from lockstep.sim.cli.cluster_options import cluster_options
from lockstep.sim.cli.errors import EXIT_INTERRUPTED, refusals
from lockstep.sim.cli.option_file import FileCommand, with_option_file
from lockstep.sim.cli.run_options import RunOptions
from lockstep.sim.cli.run_output import announce, print_no_intervals, progress_bar, show
from lockstep.sim.scenario.scenario import sim_options
from lockstep.sim.scenario.settings import scheduler_options, tier_options
from lockstep.sim.scenario.values import KINDS


def scenario_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of a scenario, of a cluster, of the scheduler and of memory below the device to a command.

    `workload` may be repeated; `gpu` may be left out.
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


@click.command(cls=FileCommand, context_settings={"show_default": True, "max_content_width": 120})
@with_option_file
@scenario_flags
@with_flags(click.option, options_of(RunOptions).values())
def simulate(**options: Any) -> None:
    """Simulate a workload on a model and a GPU, and print latencies, throughput and limits.

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
        given.check_slos(scenario.slos if isinstance(scenario, Scenario) else scenario.base.slos)
        if not isinstance(scenario, Scenario):
            from lockstep.sim.cli.cluster import run_cluster

            done, cut_short = run_cluster(scenario, given)
            if done.interrupted or cut_short:
                sys.exit(EXIT_INTERRUPTED)
            sys.exit(given.status_of(done.data.summary))
        if given.out is not None:
            prepare_folder(given.out, overwrite=given.overwrite)
        setup = assemble(scenario)
        announce(setup, given.out)
        with progress_bar(scenario.limit or len(setup.workload.turns)) as on_finish:
            run = simulate(setup, folder=given.out, check_every=check_every, on_finish=on_finish)
        if given.out is None:
            run = run.without_batches()  # further runs, for the intervals, take their memory
        if given.intervals and not run.interrupted:
            run = replace(run, intervals=intervals_of(run))
            cut_short = run.intervals is None
        if given.out is not None:
            write_run(given.out, run, **given.files)
    show(run, given.out, given.as_json)
    if cut_short:
        print_no_intervals()
    if run.interrupted or cut_short:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(given.status_of(run.data.summary))
