"""`lockstep demo`: find the rate that one GPU serves within its SLOs, in about a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.sim.cli.errors import refusals

if TYPE_CHECKING:
    from lockstep.sim.run.simulate import Run
    from lockstep.sim.scenario.scenario import Scenario

MODEL, GPU = "qwen3-8b", "h200"
SLOS = ("ttft_p99=500ms", "tpot_p99=40ms")
RATES = (8, 16, 24, 32, 36, 40)  # requests per second
MINUTES = 3  # of traffic at each rate
TURNS_MEAN = 1.5  # of a session

# A chat service: eight system prompts with zipf popularity, one or two turns per session, think times of about 3 s.
CHAT = (
    "gen:n={requests},rate={sessions_per_s:g},shared_prefix=600x8,prefix_choice=zipf,turns=uniform:1:2,"
    "think=lognormal:3s:0.5,input=lognormal:300:0.9,output=lognormal:200:0.7"
)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), metavar="DIR", show_default=True)
def demo(out: Path) -> None:
    """Find the request rate that one GPU serves within its SLOs, and write a report that shows why.

    Simulates qwen3-8b on one H200 under a chat workload at six request rates. No GPU, no torch.
    """
    with refusals():
        _check_folder(out)
        from lockstep.sim.results.code_version import code_commit, code_version

        code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
        runs: dict[int, Run] = {}
        for rate in RATES:
            folder = out / f"{rate:02d}-per-s"
            scenario = _scenario(rate)
            if not runs:
                click.echo(f"seed {scenario.seed}, {code}, journals {out}/*/journal", err=True)
            runs[rate] = _run(scenario, folder)
            summary = f"{runs[rate].batches:,} batches in {runs[rate].cpu_s:.1f} s of CPU time"
            click.echo(f"{rate} requests/s: {scenario.workload.partition(',')[0]}, {summary}", err=True)
        headline = answer(runs, *_range_of_answers(runs))
        report = _write_report(out, runs, headline)
    _show(runs, headline, report)


def highest_met(runs: dict[int, Run]) -> int:
    """Return the highest rate such that it and every lower rate met every SLO; 0 if none did."""
    met = 0
    for rate, run in sorted(runs.items()):
        if not all(slo["met"] for slo in run.data.summary["slos"]):
            break
        met = rate
    return met


def answer(runs: dict[int, Run], low: int, high: int) -> str:
    """Return the rate that meets the SLOs, as a sentence: the lower end of its interval, which is what to rely on.

    Args:
        low, high: highest rates that meet the SLOs with batches as slow, or as fast, as calibration allows; 0: none.
    """
    from lockstep.sim.cost.calibration import COVERAGE

    met, slos = highest_met(runs), " and ".join(SLOS)
    is_tested = next(iter(runs.values())).setup.is_tested
    ends = " to ".join(dict.fromkeys(str(end) if end else f"below {min(runs)}" for end in (low, high)))
    kind = f"{100 * COVERAGE:g} % interval" if is_tested else "range, coverage not tested:"
    sure = f"Meets the SLO up to {low} req/s" if low else f"Does not meet the SLO for certain at {min(runs)} req/s"
    expected = (
        "" if met == low else f"; as predicted up to {met} req/s" if met else "; as predicted at none of these rates"
    )
    return f"{sure} ({slos}){expected}; {kind} {ends} req/s"


def _range_of_answers(runs: dict[int, Run]) -> tuple[int, int]:
    """Return the highest rates with every batch as slow, and with every batch as fast, as calibration allows; 0: none.

    A simulation stops as soon as it must miss an SLO, so only simulations that meet the SLOs run to their end.
    """
    from lockstep.sim.cost.calibration import COVERAGE

    setup = next(iter(runs.values())).setup
    fast, slow = setup.calibration.interval("time", COVERAGE, setup.model.name)
    met = highest_met(runs)
    low = next((rate for rate in sorted(runs, reverse=True) if rate <= met and _meets_at(runs, rate, slow)), 0)
    high = met  # slower batches cannot serve more
    for rate in (rate for rate in sorted(runs) if rate > met and fast < 1.0):
        if not _meets_at(runs, rate, fast):
            break
        high = rate
    return low, high


def _meets_at(runs: dict[int, Run], rate: int, factor: float) -> bool:
    """Return whether the SLOs hold at a rate when the duration of every batch is multiplied by a factor."""
    from lockstep.sim.cluster.scenario import ClusterScenario
    from lockstep.sim.cluster.setup import assemble_cluster
    from lockstep.sim.cluster.simulate import simulate_cluster
    from lockstep.sim.plan.trial import Lateness

    scenario, workload = runs[rate].setup.scenario, runs[rate].setup.workload
    setup = assemble_cluster(ClusterScenario(base=scenario), workload=workload).slowed(factor)
    done = simulate_cluster(setup, give_up=Lateness(scenario.slos, len(workload.turns)))
    if done.interrupted:
        raise KeyboardInterrupt
    met = not done.stopped_early and all(slo["met"] for slo in done.data.summary["slos"])
    verdict = f"{'meets' if met else 'misses'} the SLO, {done.cpu_s:.1f} s of CPU time"
    click.echo(f"{rate} requests/s, every batch {factor:.2f} times as long: {verdict}", err=True)
    return met


def _check_folder(out: Path) -> None:
    from lockstep.core.contract.errors import ConfigError

    if out.exists() and not (out.is_dir() and ((out / "report.html").is_file() or not any(out.iterdir()))):
        raise ConfigError(f"`{out}` exists and does not hold a demo\nhint: choose another --out")


def _scenario(rate: int) -> Scenario:
    from lockstep.sim.metrics.slo import Slo
    from lockstep.sim.scenario.scenario import Scenario

    workload = CHAT.format(requests=rate * MINUTES * 60, sessions_per_s=rate / TURNS_MEAN)
    return Scenario(model=MODEL, gpu=GPU, workload=workload, slos=tuple(map(Slo.parse, SLOS)))


def _run(scenario: Scenario, folder: Path) -> Run:
    from lockstep.sim.run.assemble import assemble
    from lockstep.sim.run.run_folder import prepare_folder, write_run
    from lockstep.sim.run.simulate import simulate

    prepare_folder(folder, overwrite=True)
    run = simulate(assemble(scenario), folder=folder)
    if run.interrupted:
        raise KeyboardInterrupt
    write_run(folder, run, trace=False, report=False)
    return run


def _write_report(out: Path, runs: dict[int, Run], headline: str) -> Path:
    from lockstep.sim.report import write_report
    from lockstep.sim.run.run_folder import report_run

    title = next(iter(runs.values())).setup.title
    subtitle = (
        f"A chat service with shared system prompts and sessions of one or two turns; {MINUTES} minutes at each rate"
    )
    reports = [report_run(run, f"{rate} req/s", float(rate)) for rate, run in runs.items()]
    return write_report(out / "report.html", reports, title=title, subtitle=subtitle, headline=headline)


def _show(runs: dict[int, Run], headline: str, report: Path) -> None:
    from rich.console import Console

    from lockstep.sim.results.results import rates_table

    title = next(iter(runs.values())).setup.title
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(rates_table([(rate, run.data.summary) for rate, run in runs.items()], title=title))
    from lockstep.sim.cost.calibration import COVERAGE

    setup = next(iter(runs.values())).setup
    low, high = setup.calibration.interval("time", model=setup.model.name)
    share = f"{100 * COVERAGE:g} %" if setup.is_tested else "range, coverage not tested"
    click.echo(f"{setup.calibration.line}; batches may take {low:.2f} to {high:.2f} times as long ({share})")
    click.echo(headline)
    click.echo(f"report: {report}")
