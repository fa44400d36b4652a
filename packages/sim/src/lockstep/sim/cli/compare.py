"""`lockstep compare`: argument parsing and printing only. lockstep.sim.results.compare makes the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import click

from lockstep.sim.cli.errors import refusals
from lockstep.sim.run.out_paths import check_file


@click.command(context_settings={"max_content_width": 120})
@click.argument("folders", nargs=-1, metavar="RUN_A RUN_B...", type=click.Path(path_type=Path))
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="write the comparison as JSON"
)
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="write the comparison as one HTML file"
)
@click.option("--overwrite", is_flag=True, help="replace FILE")
def compare(folders: tuple[Path, ...], json_file: Path | None, html_file: Path | None, overwrite: bool) -> None:
    """Compare runs: settings, figures, SLOs, and each request where the workload is the same.

    Takes folders written by `lockstep simulate --out`. The first is the baseline of the others.

    \b
    lockstep compare runs/fcfs runs/lpm
    lockstep compare runs/h100 runs/h200 runs/b200 --html gpus.html
    """
    with refusals():
        from lockstep.sim.results.compare import compare, read_runs
        from lockstep.sim.results.compare_text import comparison_lines

        for file in (json_file, html_file):
            if file is not None and file.exists() and not overwrite:
                raise click.UsageError(f"{file} exists\nhint: choose another file, or add --overwrite")
        if json_file is not None and html_file is not None and json_file.resolve() == html_file.resolve():
            raise click.UsageError(f"--json and --html both name {json_file}\nhint: give each its own file")
        if json_file is not None:
            check_file(json_file, "--json")
        if html_file is not None:
            check_file(html_file, "--html")
        found = compare(read_runs(folders))
        if json_file is not None:
            text = json.dumps(found.describe(), indent=2, allow_nan=False, ensure_ascii=False)
            json_file.write_text(text + "\n", encoding="utf-8")
        if html_file is not None:
            from lockstep.sim.report.compare_page import write_comparison

            write_comparison(html_file, found)
    for line in comparison_lines(found):
        click.echo(line)
    for file in (json_file, html_file):
        if file is not None:
            click.echo(f"{file} written, {file.stat().st_size:,} bytes", err=True)
