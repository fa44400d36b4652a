"""`lockstep calibrate requests`: argument parsing and printing only."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.host.quantization import KvDtype, WeightsDtype
from lockstep.sim.cli.calibration_file import FILE, CalibrationFile, write
from lockstep.sim.cli.errors import refusals
from lockstep.sim.scenario.settings import given_settings, scheduler_options

if TYPE_CHECKING:
    from lockstep.sim.calibrate.measured_points import PointsCalibration
    from lockstep.sim.calibrate.request_fit import KeptAside
    from lockstep.sim.calibrate.requests import RequestsCalibration
    from lockstep.sim.cost.calibration import Metric

AS_STATED = "as the files state"


@dataclass(frozen=True, kw_only=True)
class RequestsFit:
    """Options of `calibrate requests` about the server, the files and what is kept aside."""

    model: Annotated[str | None, Option("what ran", default=AS_STATED)] = None
    gpu: Annotated[str | None, Option("where it ran", default=AS_STATED)] = None
    tp: Annotated[int | None, Option("on so many GPUs", default=f"{AS_STATED}, or 1")] = None
    ep: Annotated[int | None, Option("groups over which experts were divided", default=f"{AS_STATED}, or 1")] = None
    attention_dp: Annotated[int, Option("shards with rows of their own")] = 1
    weights_dtype: Annotated[WeightsDtype | None, Option("bf16, fp8, ...", default="the checkpoint's own")] = None
    kv_dtype: Annotated[KvDtype | None, Option("bf16 or fp8", default=f"{AS_STATED}, or bf16")] = None
    attention_backend: Annotated[str | None, Option("of the engine, such as flashinfer: for the record")] = None
    engine: Annotated[str | None, Option("what ran it: vllm, sglang, trtllm, lockstep", default=AS_STATED)] = None
    engine_version: Annotated[str | None, Option("release of the engine", default=AS_STATED)] = None
    profile: Annotated[str | None, Option("scheduling policy: lockstep, sglang or vllm", default="the engine's")] = None
    mem_fraction: Annotated[float, Option("share of GPU memory for weights, activations and KV")] = 0.9
    workload: Annotated[
        str | None,
        Option(
            "the prompts that were sent, in order, for the prefixes that they share",
            metavar="PATH|gen:...",
            default="no shared prefixes, but for what the files have of cached tokens",
        ),
    ] = None
    seed: Annotated[int, Option("seed of a generated --workload")] = 7
    fit_share: Annotated[float, Option("share of a run's requests, the first ones, that are fitted")] = 0.2
    test: Annotated[tuple[Path, ...], Option("a further run that is only tested; may be repeated", metavar="FILE")] = ()
    concurrency: Annotated[
        int | None,
        Option("requests in progress of a closed loop; 0: sent by the clock", default="as the files state or show"),
    ] = None
    prompt_tokens: Annotated[int | None, Option("length of prompts, for files without it")] = None
    output_tokens: Annotated[int | None, Option("length of answers, for files without it")] = None
    scrape_interval: Annotated[
        float | None, Option("seconds between scrapes of metrics", default="by the times of their samples")
    ] = None
    points: Annotated[
        Path | None, Option("also write means as serving points, for `calibrate points`", metavar="CSV")
    ] = None
    as_json: Annotated[bool, Option("print JSON", flag="--json")] = False


@click.command(context_settings={"show_default": True})
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@with_flags(click.option, options_of(RequestsFit).values())
@scheduler_options
@FILE
def requests(files: tuple[Path, ...], **options: Any) -> None:
    """Calibrate with the results of a load generator, or with the metrics of a running server.

    \b
    lockstep calibrate requests runs/real --model qwen3-8b --gpu h100 --engine vllm --date 2026-11-26 --out mine.json
    lockstep calibrate requests result.json --gpu h200 --tp 2 --date 2026-11-26 --out mine.json
    lockstep calibrate requests scrape1.txt scrape2.txt --gpu h100 --date 2026-11-26 --out mine.json

    The format is recognised by content: folders of `lockstep bench serve`, vLLM `bench serve` (--save-detailed), SGLang
    bench_serving, guidellm, AIPerf, genai-perf, InferenceX, scrapes of vLLM's and SGLang's metrics, CSV with a request
    per row. The first requests of a run are fitted; errors before and after are those of the others.
    docs/cost-models.md, section 6.
    """
    given, target = take(RequestsFit, options), take(CalibrationFile, options)
    with refusals():
        from lockstep.sim.calibrate.importers import ReadingOptions
        from lockstep.sim.calibrate.load_runs import ServerFacts
        from lockstep.sim.calibrate.requests import RequestsSource, calibrate_requests

        date = target.check()
        facts = {field.name: getattr(given, field.name) for field in fields(ServerFacts)}
        source = RequestsSource(
            facts=ServerFacts(**{name: value for name, value in facts.items() if value is not None}),
            profile=given.profile,
            settings=given_settings(options),
            attention_dp=given.attention_dp,
            mem_fraction=given.mem_fraction,
            fit_share=given.fit_share,
            concurrency=given.concurrency,
            workload=given.workload,
            seed=given.seed,
            reading=ReadingOptions(given.prompt_tokens, given.output_tokens, given.scrape_interval),
        )
        click.echo("fitting", err=True)
        found = calibrate_requests(files, source, date=date, tests=given.test, points=given.points)
        if given.as_json:
            found.calibration.save(target.out)
            click.echo(json.dumps(_described(found), indent=1))
            return
        write(found.calibration, target.out)
        for kept in found.kept_aside:
            _show_kept(kept)
        if found.kept_aside:
            _show_coverage(found)
        if found.points is not None:
            _show_points(found.points)
        for remark in found.remarks:
            click.echo(remark)


def _show_kept(kept: KeptAside) -> None:
    """Print what was kept aside of a run: measured, before, after, and the interval."""
    from lockstep.sim.results.results import show_us

    click.echo(f"\nkept aside: {kept.requests:,} of {kept.of:,} requests of {kept.run}")
    click.echo(f"{'':18}{'measured':>11}{'before':>11}{'error':>9}{'after':>11}{'error':>9}   90 % interval")
    for name, measured in kept.measured.items():
        values = [measured, kept.before[name], kept.after[name], *kept.interval[name]]
        texts = [f"{value:,.0f}" if name.endswith("/s") else show_us(1e3 * value) for value in values]
        real, before, after, low, high = texts
        click.echo(
            f"{name:18}{real:>11}{before:>11}{kept.error(name, before=True):>+9.1%}{after:>11}{kept.error(name):>+9.1%}"
            f"   {low} to {high}"
        )
    singles = (f"{name} {before:.1%} -> {after:.1%}" for name, (before, after) in kept.per_request.items())
    click.echo(f"median error of single requests, before -> after: {', '.join(singles)}")


def _show_coverage(found: RequestsCalibration) -> None:
    from lockstep.sim.calibrate.request_fit import coverage_of

    parts = []
    names: dict[Metric, str] = {"time": "TPOT", "ttft": "TTFT"}
    for metric, name in names.items():
        inside, count = coverage_of(found.ratios[metric], metric)
        parts.append(f"{name} {inside} of {count}")
    click.echo(f"\nblocks of requests kept aside within the 90 % interval of the other blocks: {', '.join(parts)}")


def _show_points(points: PointsCalibration) -> None:
    """Print the errors of points before and after."""
    from lockstep.sim.calibrate.measured_points import median_errors

    click.echo(f"\nkept aside: {points.method}")
    click.echo(f"{'TPOT, ms':>9}{'before':>9}{'after':>9}{'TTFT, ms':>11}{'before':>9}{'after':>9}")
    for one in points.errors:
        click.echo(
            f"{one.tpot_ms:>9.2f}{one.tpot[0]:>+9.1%}{one.tpot[1]:>+9.1%}{one.ttft_ms:>11.1f}{one.ttft[0]:>+9.1%}"
            f"{one.ttft[1]:>+9.1%}   {one.name}"
        )
    texts = []
    for metric in ("tpot", "ttft"):
        before, after = median_errors(points.errors, metric)
        texts.append(f"{metric.upper()} {before:.1%} -> {after:.1%}")
    click.echo(f"median error, before -> after: {', '.join(texts)}")


def _described(found: RequestsCalibration) -> dict[str, Any]:
    """Return the result for --json."""
    described: dict[str, Any] = {"calibration": found.calibration.describe(), "remarks": list(found.remarks)}
    described["kept_aside"] = [
        {
            "run": kept.run,
            "requests": kept.requests,
            "of": kept.of,
            "figures": {
                name: {
                    "measured": kept.measured[name],
                    "before": kept.before[name],
                    "after": kept.after[name],
                    "interval": kept.interval[name],
                }
                for name in kept.measured
            },
            "median_error_of_requests": kept.per_request,
        }
        for kept in found.kept_aside
    ]
    if found.points is not None:
        described["points"] = [
            {"name": one.name, "tpot_error": one.tpot, "ttft_error": one.ttft} for one in found.points.errors
        ]
        described["method"] = found.points.method
    return described
