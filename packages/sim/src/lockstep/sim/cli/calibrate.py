"""`lockstep calibrate`: argument parsing only. The work is done by lockstep.sim.calibrate."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec

from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.host.quantization import KvDtype, WeightsDtype
from lockstep.sim.cli.errors import refusals
from lockstep.sim.run.out_paths import check_file

if TYPE_CHECKING:
    from lockstep.core.journal.records import JournalHeader
    from lockstep.sim.calibrate.calibrate import HeldOut
    from lockstep.sim.cost import Calibration
    from lockstep.sim.cost.models import Fp8Activations

OF_RUN = "as RUN states"
OPERATORS = Option("calibrate the cost model measured by these operator tables", metavar="DIR", default="the roofline")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


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
class CalibrationFile:
    """The file that a calibration is written to, with what every source states of it."""

    date: Annotated[str, Option("of the calibration: never taken from the clock", metavar="YYYY-MM-DD")]
    out: Annotated[Path, Option("where to write it", metavar="FILE")]

    def check(self) -> str:
        """Return the date in full. Raises BadParameter if it is none, ConfigError if the file cannot be written."""
        date = _checked_date(self.date)
        check_file(self.out)
        return date


@dataclass(frozen=True, kw_only=True)
class StoredTypes:
    """How the model of the measured batches stores its weights and its KV."""

    weights_dtype: Annotated[WeightsDtype | None, Option("bf16, fp8, ...", default="the checkpoint's own")] = None
    kv_dtype: Annotated[KvDtype, Option("bf16 or fp8")] = "bf16"


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

    model: Annotated[str | None, Option("what ran", default=OF_RUN)] = None
    gpu: Annotated[str | None, Option("where it ran", default=OF_RUN)] = None
    tp: Annotated[int | None, Option("on so many GPUs", default=OF_RUN)] = None
    ep: Annotated[int | None, Option("groups over which experts were divided", default=OF_RUN)] = None
    attention_dp: Annotated[int | None, Option("shards with rows of their own", default=OF_RUN)] = None
    engine: Annotated[str, Option("what ran it")] = "lockstep"
    engine_version: Annotated[str | None, Option("of the engine", default="of the core that wrote it")] = None
    operators: Annotated[Path | None, OPERATORS] = None


@dataclass(frozen=True, kw_only=True)
class TablesFit(StoredTypes):
    """Options of `calibrate operators` about the tables."""

    models: Annotated[tuple[str, ...], Option("model of the shapes; may be repeated", flag="--model")]
    gpu: Annotated[str, Option("GPU of the tables")]
    ranks: Annotated[tuple[int, ...], Option("once for each", flag="--tp")] = (1,)
    engine: Annotated[str, Option("engine of the kernels")] = "kernels"
    engine_version: Annotated[str | None, Option("of the engine")] = None


FILE = with_flags(click.option, options_of(CalibrationFile).values())
SHOWN = {"show_default": True}


def _checked_date(date: str) -> str:
    try:
        if DATE.fullmatch(date):
            return datetime.date.fromisoformat(date).isoformat()
    except ValueError:
        pass
    raise click.BadParameter(f"expected a day as YYYY-MM-DD, got `{date}`", param_hint="--date")


def _no_rows(file: Path, engine: str, gpu: str | None, engines: list[str], left_out: Mapping[str, list[int]]) -> str:
    """Return an error text: why no row is left, and which engine, file or GPU has rows."""
    text = f"{file} has no rows of engine `{engine}`" + (f" on `{gpu}`" if gpu else "")
    if left_out:
        text += "; left out: " + "; ".join(f"{len(rows)} ({reason})" for reason, rows in left_out.items())
    other = f"--engine {' or '.join(engines)}" if engines else "another file" if gpu is None else "another --gpu"
    return f"{text}\nhint: give {other}"


def _write(calibration: Calibration, out: Path) -> None:
    """Write the calibration file and print a summary of it."""
    calibration.save(out)
    c = calibration.correction
    click.echo(f"{calibration.title}: {', '.join(calibration.models)}")
    click.echo(
        f"kernels x {c.kernels:.3g}, collectives x {c.collectives:.3g}; {c.step_us:,.0f} us a pass, "
        f"{c.row_us:.3g} us a row, {c.collective_us:.3g} us a collective, {c.frontend_us / 1e3:,.1f} ms a request"
    )
    for residuals in calibration.residuals:
        low, middle, high = residuals.at([0.05, 0.5, 0.95])
        click.echo(
            f"measured / predicted {residuals.metric}, models {residuals.population}: median {middle:.2f}, "
            f"90 % in {low:.2f} to {high:.2f} ({residuals.count} predictions, {residuals.method})"
        )
    for source in calibration.sources:
        left_out = f", {source.rows_left_out:,} left out ({source.why_left_out})" if source.rows_left_out else ""
        click.echo(f"from {source.file}: {source.rows_used:,} rows{left_out}, SHA-256 {source.sha256[:16]}...")
    for note in calibration.notes:
        click.echo(note)
    click.echo(f"wrote {out}", err=True)


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
        _write(calibration_of_points(trial, given.engine, date=date, sources=[source]), target.out)


@calibrate.command(context_settings=SHOWN)
@click.argument("run", type=click.Path(path_type=Path))
@with_flags(click.option, options_of(JournalFit).values())
@FILE
def journal(run: Path, **options: Any) -> None:
    """Fit to the timed batches of a run; `lockstep calibrate --from RUN` does the same.

    RUN is the folder of a run whose host reported when each batch began and ended, such as one of `lockstep serve
    --journal`, or a file of `lockstep replay PLANS --on-hardware`. It prints the error of predictions before and after
    the fit, for batches that were not used in it.
    """
    given, target = take(JournalFit, options), take(CalibrationFile, options)
    with refusals():
        from lockstep.host.host_header import RUNTIME, HostHeader
        from lockstep.sim.calibrate.calibrate import calibration_of_batches, held_out, sha256_of, timed_batches
        from lockstep.sim.catalogue import load_gpu, load_model
        from lockstep.sim.cost import CalibrationError, Parallelism
        from lockstep.sim.cost.base_model import base_cost_model
        from lockstep.sim.cost.calibration import CalibrationSource
        from lockstep.sim.cost.stages import PipelineModel
        from lockstep.sim.results.batch_times import of_journal, read_batch_times

        date = target.check()
        notes: list[str] = []
        weights_dtype: Any = given.weights_dtype
        fp8_activations: Fp8Activations = "auto"
        if run.is_file():
            times, file = read_batch_times(run), run
            measured = times.measured
            assert measured is not None, "it is the first line"
            said: dict[str, Any] = msgspec.structs.asdict(measured)
            weights_dtype = weights_dtype or measured.weights_dtype or None
            if measured.device:
                notes.append(f"measured on {measured.device}")
            notes += measured.notes
        else:
            header = _journal_header(run)
            host = HostHeader.of(header)
            said = {**host.entries(), "engine_version": header.core_version}
            if host.kind == RUNTIME and host.fp8_activations is None:  # rows met fp8 weights as they were
                fp8_activations = "off"
            if host.speed is not None and host.speed != 1.0:
                raise CalibrationError(
                    f"{run} was emulated {host.speed:g} times as fast as its cost model says: no device is\n"
                    "hint: serve with --speed 1"
                )
            times, file = None, run / "journal" if (run / "journal").is_dir() else run
        for name, value in (("model", given.model), ("gpu", given.gpu)):
            if not (value or said.get(name)):
                raise CalibrationError(f"{run}: the journal's header does not say `{name}`\nhint: give --{name}")
        known = [field.name for field in fields(Parallelism)]
        layout: dict[str, Any] = {name: said[name] for name in known if name in said}
        layout |= {name: value for name in known if (value := getattr(given, name, None)) is not None}
        split = Parallelism(**layout)
        base = base_cost_model(
            load_model(str(given.model or said["model"])),
            load_gpu(str(given.gpu or said["gpu"])),
            split,
            weights_dtype=weights_dtype,
            kv_dtype=given.kv_dtype,
            operators=given.operators,
            fp8_activations=fp8_activations,
        )
        if isinstance(base, PipelineModel):
            raise CalibrationError(
                f"{run}: batches of a run with pp {split.pp} overlap, so what each took alone is not known\n"
                "hint: calibrate with a run on one stage"
            )
        timed = timed_batches(times or of_journal(run), base, run)
        source = CalibrationSource(
            kind="journal" if times is None else "batch_times",
            file=run.name,
            sha256=sha256_of(file),
            rows_used=len(timed.took_us),
            rows_left_out=timed.left_out,
            why_left_out="no times" if timed.left_out else "",
        )
        held = held_out(timed)
        found = calibration_of_batches(
            timed,
            held,
            engine=given.engine,
            engine_version=given.engine_version or str(said["engine_version"]),
            base=base,
            date=date,
            source=source,
            notes=notes,
        )
        _write(found, target.out)
        _print_held_out(held)


@calibrate.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def acceptance(run: Path, as_json: bool) -> None:
    """Compare the accepted drafts of a run with those that the simulator predicts for the same verifications.

    RUN is the folder of a run that verified drafts, such as one of `lockstep serve --set speculative_method=ngram
    --journal RUN`. Prints the value for `lockstep simulate --acceptance`; writes nothing.
    """
    with refusals():
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


def _journal_header(run: Path) -> JournalHeader:
    from lockstep.core.journal.reader import read_journal
    from lockstep.core.journal.records import JournalError
    from lockstep.sim.cost import CalibrationError

    try:
        return read_journal(run).header
    except JournalError as error:
        parts = sorted(part.parent.name for part in run.glob("engines/*/journal"))
        place = f"{run}/engines/{parts[0]}: it is a cluster" if parts else "a run folder"
        raise CalibrationError(f"{error}\nhint: give {place}") from error


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
        _write(found, target.out)
