"""`lockstep calibrate`: argument parsing only. The work is done by lockstep.sim.calibrate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec

from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.sim.cli.calibrate_requests import requests
from lockstep.sim.cli.calibration_file import FILE, CalibrationFile, StoredTypes, write
from lockstep.sim.cli.errors import reading, refusals

if TYPE_CHECKING:
    from lockstep.sim.calibrate.calibrate import HeldOut
    from lockstep.sim.calibrate.engine_run import Twin

OF_RUN = "as RUN states"
OPERATORS = Option("calibrate the cost model measured by these operator tables", metavar="DIR", default="the roofline")


class _Calibrate(click.Group):
    """Group in which `calibrate --from RUN ...` runs `calibrate journal RUN ...`, with the options of `journal`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if not any(word == "--from" or word.startswith("--from=") for word in args):
            return super().make_context(info_name, args, parent, **extra)
        rest = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--from=") else [arg])]
        rest.remove("--from")
        return journal.make_context(f"{info_name} --from", rest, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.group(cls=_Calibrate)
@click.option("--from", "source", metavar="RUN", help="Refresh from a run: --from RUN --help. Same as journal RUN.")
def calibrate(source: str | None) -> None:
    """Fit the cost model to measurements, and write a calibration file for `lockstep simulate --calibration`."""


@dataclass(frozen=True, kw_only=True)
class PointsFit:
    """Options of `calibrate points` about the points."""

    engine: Annotated[str, Option("engine of the rows: vllm, sglang or trtllm")]
    gpu: Annotated[str | None, Option("only rows of this GPU", default="all, which must be of one")] = None
    suspect: Annotated[bool, Option("use rows that are marked in the column `suspect`")] = False
    experts: Annotated[
        bool, Option("lay experts out by the column `ep`, or by tp alone", flag="--ep", negatable=True)
    ] = True
    operators: Annotated[Path | None, OPERATORS] = None


@dataclass(frozen=True, kw_only=True)
class JournalFit(StoredTypes):
    """Options of `calibrate journal` about the run, for values that it does not state, or states wrongly."""

    client: Annotated[
        tuple[Path, ...],
        Option(
            "the run folder of `lockstep bench serve` that sent the requests: fits what lies between client and "
            "engine; may be repeated, for clients that ran one after another",
            metavar="DIR",
        ),
    ] = ()
    model: Annotated[str | None, Option("what ran", default=OF_RUN)] = None
    gpu: Annotated[str | None, Option("where it ran", default=OF_RUN)] = None
    tp: Annotated[int | None, Option("on so many GPUs", default=OF_RUN)] = None
    ep: Annotated[int | None, Option("groups over which experts were divided", default=OF_RUN)] = None
    attention_dp: Annotated[int | None, Option("shards with rows of their own", default=OF_RUN)] = None
    engine: Annotated[str | None, Option("what ran it", default=OF_RUN)] = None
    engine_version: Annotated[str | None, Option("of the engine", default=OF_RUN)] = None
    operators: Annotated[Path | None, OPERATORS] = None


@dataclass(frozen=True, kw_only=True)
class TablesFit(StoredTypes):
    """Options of `calibrate operators` about the tables."""

    models: Annotated[tuple[str, ...], Option("model of the shapes; may be repeated", flag="--model")]
    gpu: Annotated[str, Option("GPU of the tables")]
    ranks: Annotated[tuple[int, ...], Option("once for each", flag="--tp")] = (1,)
    engine: Annotated[str, Option("engine of the kernels")] = "kernels"
    engine_version: Annotated[str | None, Option("of the engine")] = None


SHOWN = {"show_default": True}


def _no_rows(file: Path, engine: str, gpu: str | None, engines: list[str], left_out: Mapping[str, list[int]]) -> str:
    """Return an error text: why no row is left, and which engine, file or GPU has rows."""
    text = f"{file} has no rows of engine `{engine}`" + (f" on `{gpu}`" if gpu else "")
    if left_out:
        text += "; left out: " + "; ".join(f"{len(rows)} ({reason})" for reason, rows in left_out.items())
    other = f"--engine {' or '.join(engines)}" if engines else "another file" if gpu is None else "another --gpu"
    return f"{text}\nhint: give {other}"


@calibrate.command(context_settings=SHOWN)
@click.argument("file", type=click.Path(path_type=Path))
@with_flags(click.option, options_of(PointsFit).values())
@FILE
def points(file: Path, **options: Any) -> None:
    """Calibrate with published serving points: a CSV with TTFT and TPOT at fixed concurrencies.

    Each point is simulated once, in about a second. Columns: docs/cost-models.md, section 6.
    """
    given, target = take(PointsFit, options), take(CalibrationFile, options)
    with refusals():
        from lockstep.sim.calibrate.calibrate import POINTS_MIN, PointTrials, calibration_of_points, sha256_of
        from lockstep.sim.calibrate.serving_points import read_serving_points
        from lockstep.sim.catalogue import load_gpu
        from lockstep.sim.cost import CalibrationError
        from lockstep.sim.cost.calibration import CalibrationSource

        date = target.check()
        found, left_out = read_serving_points(file, suspect=given.suspect, experts=given.experts)
        if given.gpu is not None:
            name = load_gpu(given.gpu).name
            found = [point for point in found if point.gpu.name == name]
        engines = sorted({point.engine for point in found})
        if given.engine not in engines:
            raise CalibrationError(_no_rows(file, given.engine, given.gpu, engines, left_out))
        found = [point for point in found if point.engine == given.engine]
        if len(found) < POINTS_MIN:
            raise CalibrationError(
                f"{file} has {len(found)} points of engine `{given.engine}`, a calibration needs {POINTS_MIN}\n"
                "hint: measure at more lengths or concurrencies"
            )
        click.echo(f"simulating {len(found)} points", err=True)
        trial = PointTrials.of(found, operators=given.operators)
        reasons = "; ".join(f"{len(rows)}: {reason}" for reason, rows in left_out.items())
        source = CalibrationSource(
            kind="serving_points",
            file=file.name,
            sha256=sha256_of(file),
            rows_used=len(found),
            rows_left_out=sum(map(len, left_out.values())),
            why_left_out=reasons,
        )
        write(calibration_of_points(trial, given.engine, date=date, sources=[source]), target.out)


@calibrate.command(context_settings=SHOWN)
@click.argument("run", type=click.Path(path_type=Path))
@with_flags(click.option, options_of(JournalFit).values())
@FILE
def journal(run: Path, **options: Any) -> None:
    """Fit to the timed batches of a run; `lockstep calibrate --from RUN` does the same.

    RUN is the folder of a run whose host reported when each batch began and ended, such as one of `lockstep serve
    --journal` or of vLLM under lockstep.vllm.Scheduler or lockstep.vllm.Recorder, or a file of `lockstep replay PLANS
    --on-hardware`. It prints the error of predictions before and after the fit, for batches that were not used in it.
    The requests of a journal or recording are then simulated, and compared with what happened.
    """
    given, target = take(JournalFit, options), take(CalibrationFile, options)
    with refusals():
        from lockstep.sim.calibrate.calibrate import (
            calibration_of_batches,
            held_out,
            sha256_of,
            timed_batches,
            with_client,
            with_lane,
        )
        from lockstep.sim.calibrate.engine_run import EngineRun, Twin, read_clients
        from lockstep.sim.calibrate.measured_run import described_batches, described_run, fit_base
        from lockstep.sim.cost import CalibrationError, CpuModel
        from lockstep.sim.cost.calibration import CalibrationSource
        from lockstep.sim.results.batch_times import read_batch_times
        from lockstep.sim.scenario.scenario import Scenario
        from lockstep.sim.scenario.settings import unusual_settings

        date = target.check()
        if run.is_file():
            if given.client:
                first = given.client[0]
                raise CalibrationError(f"`--client` {first}: a file of batch times has no requests to compare")
            times, recorded = read_batch_times(run), None
            about = described_batches(times)
        else:
            about = described_run(run)
            recorded = EngineRun.read(run)
            times = recorded.times
        base = fit_base(run, about, given)
        timed = timed_batches(times, base, run)
        source = CalibrationSource(
            kind="batch_times" if recorded is None else "journal",
            file=run.name,
            sha256=sha256_of(about.file or run),
            rows_used=len(timed.took_us),
            rows_left_out=timed.left_out,
            why_left_out="no times, or not those of their rows" if timed.left_out else "",
        )
        held = held_out(timed)
        found = calibration_of_batches(
            timed,
            held,
            engine=given.engine or about.engine,
            engine_version=given.engine_version or about.engine_version,
            base=base,
            date=date,
            source=source,
            notes=about.notes,
        )
        twin = None
        if recorded is not None:
            found = with_lane(found, recorded.lane())
            cost, cpu = found.cost_model(base), found.cpu_model(CpuModel())
            if given.client:
                twin = Twin.of(recorded, read_clients(given.client), cost, cpu)
                found = with_client(found, twin)
            elif not recorded.not_simulated:
                twin = Twin.of_engine(recorded, cost, cpu)
        write(found, target.out)
        _print_held_out(held)
        if twin is not None:
            _print_twin(twin, "the client" if given.client else "the engine")
        if recorded is not None and recorded.not_simulated:
            click.echo(f"its requests are not simulated for a comparison: {recorded.not_simulated}")
        elif recorded is not None:
            model, gpu = given.model or about.entries["model"], given.gpu or about.entries["gpu"]
            profile = "vllm" if found.engine == "vllm" else str(about.entries.get("profile", "lockstep"))
            scenario = Scenario(
                model=str(model),
                gpu=str(gpu),
                tp=base.tp,
                workload=str(run),
                calibration=str(target.out),
                profile=profile,
                settings=unusual_settings(recorded.config, profile),
            )
            click.echo(f"simulate: {scenario.command()}")


def _print_twin(twin: Twin, where: str) -> None:
    """Print what was measured of the requests, beside a simulation of them with the fit."""
    click.echo(f"the requests of this run, at {where}: measured, simulated with this calibration")
    for metric, figure, measured_us, simulated_us in twin.table():
        title = "end to end" if metric == "e2e" else metric.upper()
        click.echo(
            f"  {title:11}{figure:5}{measured_us / 1e3:10.2f} ms{simulated_us / 1e3:10.2f} ms"
            f"{simulated_us / measured_us - 1.0:+8.1%}"
        )


@calibrate.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def acceptance(run: Path, as_json: bool) -> None:
    """Compare the accepted drafts of a run with those that the simulator predicts for the same verifications.

    RUN is the folder of a run that verified drafts, such as one of `lockstep serve --set speculative_method=ngram
    --journal RUN`. Prints the value for `lockstep simulate --acceptance`; writes nothing.
    """
    with refusals(), reading():
        from lockstep.sim.calibrate.acceptance import describe

        found = describe(run)
        if as_json:
            click.echo(msgspec.json.encode(found).decode())
            return
        click.echo(f"{found['rows']:,} verifications of {found['requests']:,} requests, {found['method']}")
        click.echo(f"{'first n drafts right':24}{'measured':>10}{'fitted':>10}{'usual':>10}")
        columns = (found["by_position"], found["by_position_predicted"], found["by_position_usual"])
        for number, row in enumerate(zip(*columns, strict=True), 1):
            click.echo(f"{number:<24}" + "".join(f"{share:>10.1%}" for share in row))
        lengths = (found[f"accepted_length{which}"] for which in ("", "_predicted", "_usual"))
        click.echo(f"{'tokens per verification':24}" + "".join(f"{length:>10.3f}" for length in lengths))
        for half in found["held_out"]:
            off = half["predicted"] / half["measured"] - 1
            click.echo(
                f"requests the fit has not seen: {half['measured']:.3f} measured, {half['predicted']:.3f} predicted "
                f"({off:+.1%})"
            )
        click.echo(f"simulate with: --speculative-method {found['method']} --acceptance {found['acceptance']}")


def _print_held_out(held: HeldOut) -> None:
    """Print the errors of predictions for batches that the fit had not seen."""
    click.echo("error of batches that the fit had not seen, each tenth of the run by the other nine: before -> after")
    for before, after in held.rows():
        click.echo(
            f"  {before.mode:7} median {before.error:7.1%} -> {after.error:6.1%}   "
            f"P95 {before.error_p95:7.1%} -> {after.error_p95:6.1%}   ({before.batches:,} batches)"
        )


@calibrate.command(context_settings=SHOWN)
@click.argument("folder", type=click.Path(path_type=Path))
@with_flags(click.option, options_of(TablesFit).values())
@FILE
def operators(folder: Path, **options: Any) -> None:
    """From operator tables: what kernels and collectives take, without what an engine does around them.

    Their format: docs/cost-models.md, section 3. `lockstep simulate --operators DIR` uses the tables themselves.
    """
    given, target = take(TablesFit, options), take(CalibrationFile, options)
    with refusals():
        from lockstep.sim.calibrate.calibrate import calibration_of_tables
        from lockstep.sim.catalogue import load_gpu, load_model
        from lockstep.sim.cost import roofline_model
        from lockstep.sim.cost.tables import read_operator_tables

        date = target.check()
        card = load_gpu(given.gpu)
        tables = read_operator_tables(folder, card)
        bases = [
            roofline_model(load_model(name), card, tp, weights_dtype=given.weights_dtype, kv_dtype=given.kv_dtype)
            for name in given.models
            for tp in given.ranks
        ]
        found = calibration_of_tables(
            bases, tables, engine=given.engine, engine_version=given.engine_version or "", date=date
        )
        write(found, target.out)


calibrate.add_command(requests)
