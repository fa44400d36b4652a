"""`lockstep plan`: argument parsing only. What is done with the arguments is in search.py and answer.py."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.sim.cli.out_paths import check_file
from lockstep.sim.cli.progress import terminal_bar
from lockstep.sim.cli.simulate import (
    EXIT_INTERRUPTED,
    DurationType,
    adapter_options,
    check_router_options,
    cluster_options,
    drafting_options,
    given_settings,
    media_options,
    parallel_options,
    refusals,
    samples_option,
    scheduler_options,
    server_sessions_option,
    tier_options,
)

if TYPE_CHECKING:
    from lockstep.sim.plan.answer import PlanAnswer
    from lockstep.sim.plan.question import Load
    from lockstep.sim.plan.search import Progress

EXIT_NONE_FOUND = 3


@click.command(context_settings={"show_default": True, "max_content_width": 120})
@click.option("--model", required=True, help="catalogue name, such as qwen3-8b, or the path of a config.json")
@click.option("--gpus", required=True, metavar="GPU,...", help="catalogue names, such as h100,h200, or JSON files")
@click.option("--workload", required=True, metavar="PATH|gen:...", help="a trace, or a generator: docs/workloads.md")
@click.option("--slo", "slos", multiple=True, metavar="METRIC=TIME", help="such as ttft_p99=500ms; may be repeated")
@click.option("--rate", type=click.FLOAT, help="find the cheapest that serves so many per second")
@click.option("--sessions", type=click.INT, help="find the cheapest that serves so many sessions at a time")
@click.option(
    "--load",
    help="rate, or sessions (a closed loop)  [default: sessions for a trace of them that lacks their beginnings]",
)
@click.option("--max-gpus", "gpus_max", type=click.INT, help="find the largest rate of as many replicas as fit on them")
@click.option("--search", multiple=True, metavar="NAME=VALUES", help="tp=1,2,4 or chunked_prefill_size=512..8192")
@click.option("--price", "prices", multiple=True, metavar="GPU=USD", help="per GPU-hour, for a GPU of --gpus")
@click.option("--price-kind", default="rental_3yr", help="of the catalogue's prices")
@click.option("--confidence", default=0.95, help="of every interval")
@click.option("--quick", is_flag=True, help="short simulations: an answer within some 15 %")
@click.option(
    "--requests", type=click.INT, help="of a long simulation, per replica, at most  [default: 3000; quick: 800]"
)
@click.option("--all", "confirm_all", is_flag=True, help="confirm also what others have shown to be worse")
@click.option("--jobs", type=click.INT, help="processes  [default: one per core that may be used]")
@click.option("--ray", "ray_address", metavar="ADDRESS", help="run on a Ray cluster: auto, HOST:PORT, or local")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="keep simulations there, and plan.html")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="write the answer as JSON")
@click.option("--report", "report_path", type=click.Path(path_type=Path), metavar="FILE", help="write the report")
@click.option("--seed", default=7, help="of the first replication")
@click.option("--tp", default=1, help="GPUs that share one copy of the model, where it is not searched")
@parallel_options
@click.option("--prefill-decode", default="mixed", help="engines by role: mixed, PREFILL:DECODE as 2:6, or auto")
@click.option("--link-bandwidth", "link_gbs", type=click.FLOAT, help="GB/s per GPU between these  [default: 40]")
@click.option("--link-latency", "link_latency_us", type=DurationType(), help="from host to host  [default: 15us]")
@click.option("--max-new-tokens", type=click.INT, help="limit of every request; shorter answers end with an end token")
@click.option("--mem-fraction", default=0.9, help="of GPU memory, for weights, activations and KV")
@click.option("--weights-dtype", help="bf16, fp8, ...  [default: the checkpoint's own]")
@click.option("--kv-dtype", default="bf16", help="bf16 or fp8")
@click.option("--fp8-activations", help="whether fp8 weights meet rows in fp8: auto, on, off  [default: auto]")
@click.option("--profile", default="lockstep", help="policy of another engine: sglang or vllm; options override it")
@click.option("--calibration", metavar="NAME|FILE", help="vllm-h100, ..., or a file of `lockstep calibrate`")
@click.option("--operators", metavar="DIR", help="operator tables instead of the roofline's kernels")
@click.option("--autoscale", metavar="SPEC", default="none", help="replicas come and go: docs/routing.md")
@click.option("--skip-bad-rows", is_flag=True, help="leave out rows that cannot be right; otherwise they are refused")
@cluster_options(engines=False)
@drafting_options
@media_options(gpus=False)
@adapter_options
@samples_option
@server_sessions_option
@tier_options
@scheduler_options
def plan(
    model: str,
    gpus: str,
    workload: str,
    slos: tuple[str, ...],
    rate: float | None,
    sessions: int | None,
    load: Load | None,
    gpus_max: int | None,
    search: tuple[str, ...],
    prices: tuple[str, ...],
    price_kind: str,
    confidence: float,
    quick: bool,
    requests: int | None,
    confirm_all: bool,
    jobs: int | None,
    ray_address: str | None,
    out: Path | None,
    json_path: Path | None,
    report_path: Path | None,
    seed: int,
    router: dict[str, Any],
    **options: Any,
) -> None:
    """Find the cheapest configuration that meets the SLO at a rate, or the largest rate that each one sustains.

    \b
    lockstep plan --model qwen3-8b --gpus h100,h200 --workload gen:turns=uniform:1:3 --slo ttft_p99=500ms --rate 40
    lockstep plan --model qwen3-32b --gpus h200 --search tp=1,2,4 --workload conv.jsonl.gz --slo tpot_p99=50ms
    lockstep plan --model llama-3.1-70b --gpus h200 --max-gpus 16 --search tp=2,4 --search prefill_decode=auto ...
    """
    with refusals():
        from lockstep.core.cluster.router import RouterConfig
        from lockstep.core.contract.errors import ConfigError
        from lockstep.sim.cluster.scenario import parse_scaling
        from lockstep.sim.metrics.slo import Slo
        from lockstep.sim.plan.answer import PlanAnswer
        from lockstep.sim.plan.ledger import TrialStore
        from lockstep.sim.plan.question import (
            FULL,
            LINK_KEYS,
            QUICK,
            ROWS_KEY,
            Length,
            Question,
            natural_load,
            parse_prices,
            parse_search,
            split_of,
        )
        from lockstep.sim.plan.search import prepare, run_plan
        from lockstep.sim.plan.workers import crew_of
        from lockstep.sim.run.adapters import USUAL
        from lockstep.sim.run.run_folder import workload_line

        if jobs is not None and jobs < 1:
            raise ConfigError(f"`jobs` must be at least 1, got `{jobs}`")
        if requests is not None and requests < 10:
            raise ConfigError(f"`requests` must be at least 10, got `{requests}`")
        if options["autoscale"] != "none":
            parse_scaling(options["autoscale"])
        options["prefill_decode"] = split_of(options["prefill_decode"])
        options = {
            name: value for name, value in options.items() if value is not None or name not in (*LINK_KEYS, ROWS_KEY)
        }
        usual = {
            "media": None,
            "mm_encoder_tp_mode": "weights",
            **USUAL,
            "samples": None,
            "server_sessions": False,
        }  # nothing is said of what was not asked for
        options = {name: value for name, value in options.items() if name not in usual or value != usual[name]}
        bad_rows = bool(options["skip_bad_rows"])
        settings = given_settings(options)
        searched = parse_search(search)
        for key, _ in searched:
            settings.pop(key, None)
            options["tiers"].pop(key, None)
        effort = QUICK if quick else FULL
        if requests is not None:
            short = effort.short._replace(
                requests_min=min(effort.short.requests_min, requests),
                requests_max=min(effort.short.requests_max, requests),
            )
            effort = replace(effort, long=Length(requests, requests, 0.0), short=short)
        hop_us = router.pop("hop_us", 0)
        router_config = RouterConfig(**router)
        check_router_options(router, dict(searched).get("router", (router_config.policy,)))
        question = Question(
            model=model,
            gpus=tuple(gpu.strip() for gpu in gpus.split(",")),
            workload=workload,
            slos=tuple(map(Slo.parse, slos)),
            load=load or ("sessions" if sessions is not None else natural_load(workload, skip_bad_rows=bad_rows)),
            rate=rate,
            sessions=sessions,
            gpus_max=gpus_max,
            search=searched,
            common=options,
            settings=settings,
            router=router_config,
            hop_us=hop_us,
            seed=seed,
            confidence=confidence,
            effort=effort,
            prices=parse_prices(prices),
            price_kind=price_kind,
            confirm_all=confirm_all,
        )
        for option, path in (("--json", json_path), ("--report", report_path)):
            if path is not None:
                check_file(path, option)
        if json_path is not None and report_path is not None and json_path.resolve() == report_path.resolve():
            raise ConfigError(f"--json and --report both name `{json_path}`\nhint: give each its own file")
        ledger = TrialStore(out)
        try:
            candidates, opened = prepare(question)
            line = workload_line(opened, closed=question.load == "sessions")
            announce(question, line, len(candidates), out)
            with (
                crew_of(usable_cores() if jobs is None else jobs, ray_address) as crew,
                showing_progress(ledger) as progress,
            ):
                run_plan(question, candidates, crew, ledger, progress)
            answer = PlanAnswer(question=question, candidates=candidates, workload_line=line)
            show(answer)
            write_answer(answer, [*_given(json_path), *_given(out, "plan.json")])
            write_report(answer, [*_given(report_path), *_given(out, "plan.html")])
        except KeyboardInterrupt:
            say_how_to_go_on(ledger, out)
            sys.exit(EXIT_INTERRUPTED)
        found = f"; {ledger.reused} found from before" if ledger.reused else ""
        click.echo(f"{ledger.run} simulations in {ledger.cpu_s:.1f} s of CPU time{found}", err=True)
    if answer.winner is None:
        sys.exit(EXIT_NONE_FOUND)


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds it may use in a period, or "max"


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Cores that this process may use: a container may have two of a machine's hundred."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        used_us, period_us = map(int, quota.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no container, or no quota
        return cores
    return max(min(cores, math.ceil(used_us / period_us)), 1)


def _given(path: Path | None, *names: str) -> list[Path]:
    return [] if path is None else [path.joinpath(*names)]


def write_answer(answer: PlanAnswer, paths: list[Path]) -> None:
    """The answer as JSON."""
    from lockstep.sim.run.run_folder import whole

    for path in paths:
        with whole(path) as part:
            part.write_text(answer.to_json(), encoding="utf-8", newline="\n")


def write_report(answer: PlanAnswer, paths: list[Path]) -> None:
    """The page. Raises KeyboardInterrupt if Ctrl-C ended the simulation that it shows."""
    from lockstep.sim.plan.page import render_plan
    from lockstep.sim.run.run_folder import whole

    text = render_plan(answer) if paths else ""
    for path in paths:
        with whole(path) as part:
            part.write_text(text, encoding="utf-8", newline="\n")
        click.echo(f"report: {path}", err=True)


def announce(question: Any, line: str, configurations: int, out: Path | None) -> None:
    """Say on stderr what is about to run."""
    from lockstep.sim.results.code_version import code_commit, code_version

    code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
    kept = f"simulations kept in {out}" if out is not None else "nothing is kept, for lack of --out"
    click.echo(f"seed {question.seed}, {code}, {kept}", err=True)
    click.echo(f"{configurations} configurations of {question.model}; {line}", err=True)


@contextmanager
def showing_progress(ledger: Any) -> Iterator[Progress]:
    """A bar of configurations on stderr, with the number of simulations; silent if stderr is not a terminal."""
    from lockstep.sim.plan.search import Progress

    with terminal_bar() as bar:
        if bar is None:
            yield Progress()
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


def say_how_to_go_on(ledger: Any, out: Path | None) -> None:
    """After Ctrl-C."""
    if out is None:
        click.echo(f"interrupted after {ledger.run} simulations; with --out DIR they would be kept", err=True)
        return
    click.echo(f"interrupted: {out} keeps {ledger.run + ledger.reused} simulations", err=True)
    click.echo("hint: the same command goes on from there", err=True)


def show(answer: Any) -> None:
    """Print the answer on stdout."""
    from rich.console import Console

    from lockstep.sim.plan.answer import serve_commands, simulate_command

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(answer.table())
    sides = answer.sides_table()
    if sides is not None:
        console.print(sides)
    click.echo("> winner   * on the Pareto front of cost and latency")
    click.echo(answer.headline)
    for line in answer.remarks():
        click.echo(line)
    winner = answer.winner
    if winner is not None:
        for name, command in zip(("serve:   ", "emulate: "), serve_commands(winner), strict=True):
            click.echo(f"{name} {command.line}")
            if command.lacks:
                click.echo("          not carried out there yet: " + ", ".join(command.lacks))
        click.echo("simulate: " + simulate_command(winner))
