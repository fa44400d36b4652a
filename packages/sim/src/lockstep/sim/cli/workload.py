"""`lockstep workload`: describe a workload, or fit a model to it. Argument parsing and printing only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.host.options import with_flags
from lockstep.sim.cli.errors import refusals
from lockstep.sim.scenario.scenario import sim_options
from lockstep.sim.scenario.values import KINDS

if TYPE_CHECKING:
    from lockstep.sim.workload.fit import Row
    from lockstep.sim.workload.workload import Workload

LOG_OPTIONS = ("columns", "tokenizer", "chars_per_token")
"""Options about request logs, as `simulate` has them."""

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("workloads", nargs=-1, required=True, metavar="WORKLOAD..."),
    click.option(
        "--rate", type=click.FLOAT, help="requests per second; a trace is stretched to it  [default: as recorded]"
    ),
    click.option("--rate-scale", default=1.0, help="factor on the rate: 2 halves every gap"),
    click.option(
        "--time-window", metavar="FROM..TO", help="keep the requests that arrive in this span of recorded time: 10m..1h"
    ),
    click.option("--limit", type=click.INT, help="keep only the first requests, up to this number"),
    click.option("--skip-bad-rows", is_flag=True, help="leave out invalid rows instead of failing"),
    *(
        with_flags(click.option, [one for one in sim_options("workload") if one.name == name], kinds=KINDS)
        for name in LOG_OPTIONS
    ),
    click.option("--seed", default=7, help="seed of all random draws"),
)


def _workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_sources(workloads: Sequence[str], options: dict[str, Any]) -> Workload:
    """Open the workloads of a command line as one; `options` are those that all subcommands share."""
    from lockstep.sim.run.load import check_seed
    from lockstep.sim.workload.logs import LogReading
    from lockstep.sim.workload.mix import mix_of
    from lockstep.sim.workload.workload import SourceReading, open_workload

    check_seed(options["seed"])
    drawn = {name: value for name, value in options.items() if name not in ("skip_bad_rows", *LOG_OPTIONS)}
    log = LogReading(*(options[name] for name in LOG_OPTIONS))
    return open_workload(mix_of(workloads), reading=SourceReading(options["skip_bad_rows"], log=log), **drawn)


@click.group()
def workload() -> None:
    """Describe a workload, or fit a model to it. WORKLOAD takes the values of `simulate --workload`."""


@workload.command(context_settings={"show_default": True, "max_content_width": 120})
@_workload_options
@click.option("--json", "as_json", is_flag=True, help="one JSON object instead of text")
def describe(workloads: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Describe a workload: arrivals, lengths, sessions, sharing, tenants.

    \b
    lockstep workload describe conversation_trace.jsonl.gz
    lockstep workload describe servegen_deepseek-r1.tar.zst --time-window 10h..11h
    """
    with refusals():
        from lockstep.sim.results.workload_figures import describe, description_lines

        figures = describe(open_sources(workloads, options))
    if as_json:
        click.echo(json.dumps(figures, indent=2, allow_nan=False, ensure_ascii=False))
    else:
        for line in description_lines(figures):
            click.echo(line)


@workload.command("import", context_settings={"show_default": True, "max_content_width": 120})
@_workload_options
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="JSON lines, also .gz or .zst"
)
@click.option("--overwrite", is_flag=True, help="replace FILE")
def import_(workloads: tuple[str, ...], out: Path, overwrite: bool, **options: Any) -> None:
    """Read a request log or any other workload, print what was understood, and write it without its texts.

    \b
    lockstep workload import usage.csv -o usage.jsonl.gz
    lockstep workload import log.csv --columns arrival=when:ms,input=n_in,output=n_out -o log.jsonl.gz
    lockstep workload import chats.jsonl --chars-per-token 4 -o chats.jsonl.gz
    """
    with refusals():
        from lockstep.sim.results.workload_figures import describe, description_lines
        from lockstep.sim.run.out_paths import check_file
        from lockstep.sim.run.run_folder import whole
        from lockstep.sim.workload.export import write_workload

        if out.exists() and not overwrite:
            raise click.UsageError(f"{out} exists\nhint: choose another --out, or add --overwrite")
        check_file(out)
        opened = open_sources(workloads, options)
        with whole(out) as part:
            write_workload(part, opened.turns)
        figures = describe(opened)
    for line in description_lines(figures):
        click.echo(line)
    for example in opened.skipped.examples:
        click.echo(f"left out: {example}", err=True)
    click.echo(f"{out} written, {out.stat().st_size:,} bytes", err=True)


@workload.command(context_settings={"show_default": True, "max_content_width": 120})
@_workload_options
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="the model, as JSON")
@click.option("--overwrite", is_flag=True, help="replace FILE")
@click.option("--json", "as_json", is_flag=True, help="one JSON object instead of a table")
def fit(workloads: tuple[str, ...], out: Path, overwrite: bool, as_json: bool, **options: Any) -> None:
    """Fit a model to a workload, write it, and compare what it generates with the workload.

    \b
    lockstep workload fit azure-code.csv -o code.json
    lockstep simulate --model qwen3-8b --gpu h200 --workload code.json --rate 5
    lockstep simulate --model qwen3-8b --gpu h200 --workload gen:file=code.json,n=20000 --seed 3
    """
    with refusals():
        from lockstep.sim.results.code_version import code_version
        from lockstep.sim.run.out_paths import check_file
        from lockstep.sim.workload.fit import compare, fit
        from lockstep.sim.workload.fitted import draw_model, write_model

        if out.exists() and not overwrite:
            raise click.UsageError(f"{out} exists\nhint: choose another --out, or add --overwrite")
        check_file(out)
        opened = open_sources(workloads, options)
        provenance = {
            "source": opened.name,
            "format": opened.format,
            "digest": opened.digest,
            "turns": len(opened.turns),
            "skipped_rows": opened.skipped.count,
            "notes": list(opened.notes),
            "options": {name: str(value) for name, value in options.items() if value not in (None, False)},
            "lockstep": code_version(),
        }
        model = fit(opened.turns, provenance)
        write_model(out, model)
        rows = compare(opened.turns, draw_model(model, seed=options["seed"]))
    if as_json:
        comparison = [
            {"what": row.what, "trace": row.trace, "generated": row.generated, "off": row.off} for row in rows
        ]
        report = {"file": str(out), "arrivals_tried": list(model.arrivals.evidence), "comparison": comparison}
        click.echo(json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False))
        return
    for line in _fit_lines(rows, model.arrivals.evidence, model.arrivals.chosen):
        click.echo(line)
    click.echo(f"{out} written, {out.stat().st_size:,} bytes", err=True)


def _fit_lines(rows: Sequence[Row], evidence: Sequence[dict[str, Any]], chosen: str) -> Iterator[str]:
    if evidence:
        yield f"{'arrivals tried':<44}{'numbers':>10}{'error':>10}"
        for tried in evidence:
            mark = "  <- taken" if tried["tried"] == chosen else ""
            yield f"{tried['tried']:<44}{tried['numbers']:>10}{tried['error']:>10.3f}{mark}"
        yield ""
    yield f"{'':<30}{'trace':>14}{'generated':>14}{'off':>12}"
    for row in rows:
        off = "" if row.off is None else f"{100 * row.off:+.1f} {'pt' if row.kind == 'share' else '%'}"
        yield f"{row.what:<30}{_cell(row.trace, row.kind):>14}{_cell(row.generated, row.kind):>14}{off:>12}"


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if kind == "count" else f"{value:.4f}" if kind == "share" else f"{value:.4g}"
