"""`lockstep replay PLANS --on-hardware`: run a journal's batches on a device, and compare times with predictions.

Plans run in the order of the journal, without new decisions (`lockstep.host.recorded`), and the executor times each.
The output shows the cost model's prediction beside each time. `--out` writes all times to a file, from which `lockstep
calibrate --from FILE` makes a calibration. With `--calibration` the corrected model predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec

from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import CORE_VERSION
from lockstep.core.journal.replay import fold
from lockstep.host.engine_options import EngineOptions, RankOptions
from lockstep.host.host_header import HostHeader
from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.sim.catalogue import load_calibration, load_gpu, load_model
from lockstep.sim.cli.progress import terminal_bar
from lockstep.sim.cost import UNCALIBRATED, Calibration, CalibrationError, CatalogueError, CostModel
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import Case
from lockstep.sim.results.batch_times import (
    OUTLIER,
    BatchTime,
    BatchTimesHeader,
    Durations,
    ErrorRow,
    Outlier,
    batch_time,
    error_rows,
    line_of,
    outliers,
    predict,
)
from lockstep.sim.results.text import duration
from lockstep.sim.run.out_paths import check_file
from lockstep.tools.runs import JSON, RUN, ToolError, engine_journal, print_json, refusals

if TYPE_CHECKING:
    from lockstep.runtime.recorded import Extent, PlansRunner

OUTLIERS_SHOWN = 10
INTERRUPTED = 130


@dataclass(frozen=True)
class Predictor:
    """The cost model with which measured times are compared."""

    cost: CostModel
    model: str
    gpu: str
    calibration: Calibration

    @property
    def title(self) -> str:
        """Model, GPU and calibration in a few words."""
        corrected = "not calibrated" if self.calibration.engine == "none" else f"calibration {self.calibration.title}"
        return f"{self.model} on {self.gpu}, {corrected}"


OF_ENGINE = (
    *(
        "device",
        "random_weights",
        "model_backend",
        "dtype",
        "kv_cache_dtype",
        "fp8_activations",
        "attention_backend",
        "numerics",
        "cuda_graphs",
    ),
    "cuda_graph_max_batch",
    "piecewise_graph_max_tokens",
)
"""Options of an engine with a model (`lockstep.host.engine_options`) that plans of a journal run with."""


KV_CACHE_DTYPE = options_of(EngineOptions)["kv_cache_dtype"].absent("as the journal's run had it")


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Options of `lockstep replay --on-hardware` besides those of an engine."""

    model: Annotated[Path | None, Option("a Hugging Face folder", default="the demo model")] = None
    gpu: Annotated[
        str | None,
        Option("what the cost model takes the device for", metavar="NAME|FILE", default="the device's name"),
    ] = None
    calibration: Annotated[str | None, Option("corrects the cost model: docs/cost-models.md", metavar="NAME|FILE")] = (
        None
    )
    batches: Annotated[int | None, Option("run the first N", metavar="N", default="all")] = None
    out: Annotated[Path | None, Option("write every batch, for lockstep calibrate", metavar="FILE")] = None
    overwrite: Annotated[bool, Option("replace FILE")] = False


@click.command(context_settings={"max_content_width": 120})
@RUN
@with_flags(
    click.option,
    [KV_CACHE_DTYPE if name == "kv_cache_dtype" else options_of(EngineOptions)[name] for name in OF_ENGINE],
    keep_absent=True,
    choice=click.Choice,
)
@with_flags(click.option, options_of(HardwareOptions).values(), kinds={"batches": click.IntRange(1)})
@JSON
def on_hardware(run: Path, as_json: bool, **options: Any) -> int:
    """Run a journal's batches on this machine, and hold their times against the cost model.

    Nothing is scheduled: the plans are those of the journal, simulated or real. Ctrl-C ends it with what there is.

    \b
    lockstep replay runs/chat --on-hardware --out measured.jsonl
    lockstep calibrate --from measured.jsonl --date 2026-11-22 --out mine.json
    lockstep replay runs/other --on-hardware --calibration mine.json
    """
    given = take(HardwareOptions, options)
    out, gpu = given.out, given.gpu
    with _refused(), ExitStack() as stack:
        if out is not None:
            if out.exists() and not given.overwrite:
                raise click.UsageError(f"{out} exists\nhint: choose another file, or add --overwrite")
            check_file(out)
        runner_of = _runtime()
        journal = engine_journal(run)
        corrected = UNCALIBRATED if given.calibration is None else load_calibration(given.calibration)
        header = read_journal(journal).header
        extent = _extent(journal, given.batches)
        of_engine = {name: value for name, value in options.items() if value is not None}
        of_engine.setdefault("kv_cache_dtype", HostHeader.of(header).kv_cache_dtype or "auto")
        device, random_weights = of_engine.pop("device", "auto"), of_engine.pop("random_weights", None)
        runner: PlansRunner = runner_of(
            extent,
            header.config,
            RankOptions(**of_engine),
            model=given.model,
            device=device,
            random_weights=random_weights,
        )
        predictor = make_predictor(runner, gpu, corrected)
        case = Case(predictor.model, predictor.gpu)
        for doubt in corrected.doubts(case, header.config.overlap_depth, has_intervals=False):
            click.echo(f"note: {doubt}", err=True)
        write = stack.enter_context(_written(out, _measured(run, runner, predictor, gpu)))
        advance = stack.enter_context(_progress(extent.batches))
        times: list[BatchTime] = []
        interrupted = False
        try:
            for one in _timed(journal, runner, predictor, extent.batches):
                times.append(one)
                write(one)
                advance()
        except KeyboardInterrupt:
            interrupted = True
        stack.close()  # the file, the bar
        _show(times, runner, predictor, interrupted, as_json)
        if out is not None:
            click.echo(f"{out} written: lockstep calibrate --from {out} --date YYYY-MM-DD --out FILE", err=True)
        return INTERRUPTED if interrupted else 0


def make_predictor(runner: PlansRunner, gpu: str | None, calibration: Calibration) -> Predictor:
    """Return the cost model of the runner's device. Raises ConfigError if the catalogue does not have the device."""
    card_name = gpu or runner.device
    try:
        card = load_gpu(card_name)
    except CatalogueError as error:
        if gpu is not None:
            raise
        raise ConfigError(
            f"the catalogue has no entry for this device, `{runner.device}`\nhint: describe it with --gpu NAME or FILE"
        ) from error
    spec = load_model(str(runner.folder) if runner.model != "demo" else "demo")
    model = runner.made.model
    stored = model.settings.quantization
    widens = stored is not None and stored.layout == "fp8" and not model.activations
    base = base_cost_model(
        spec,
        card,
        kv_dtype="bf16" if model.kv_scales is None else "fp8",
        fp8_activations="off" if widens else "auto",
    )
    return Predictor(calibration.cost_model(base), spec.name, card.name, calibration)


def _runtime() -> Any:
    """Import the runtime. Raises ConfigError if it is not installed."""
    try:
        from lockstep.runtime.recorded import make_runner
    except ImportError as error:
        raise ConfigError(
            f"`--on-hardware` needs the package lockstep-runtime with torch: {error}\nhint: install it; a CPU is enough"
        ) from error
    return make_runner


def _extent(journal: Path, most: int | None) -> Extent:
    """Return the sizes that the first `most` plans need. Raises ConfigError if there are no plans; Divergence."""
    from lockstep.runtime.recorded import Extent

    extent = Extent()
    for _, step in fold(journal):
        if (plan := step.launched()) is not None:
            extent.see(plan)
            if extent.batches == most:
                break
    if not extent.batches:
        raise ConfigError(
            f"no batch was launched in the journal of `{journal}`\nhint: `lockstep journal info` shows its content"
        )
    return extent


def _timed(journal: Path, runner: PlansRunner, predictor: Predictor, most: int) -> Iterator[BatchTime]:
    """Run the plans and yield their times. Failed batches and batches with deferred sampling are left out."""
    from lockstep.host.recorded import run_recorded

    durations = Durations()
    vocab = runner.made.model.settings.vocab
    for number, (event, result) in enumerate(run_recorded(journal, runner.made.executor, vocab), start=1):
        plan = result.plan
        took_us = durations.took_us(result.started_us, result.finished_us)
        if took_us and not event.error and not result.error and plan.sample_after is None:
            one = batch_time(plan, took_us)
            if one.size:
                (predicted_us,) = predict(predictor.cost, [one])
                yield msgspec.structs.replace(one, predicted_us=round(float(predicted_us), 1))
        if number >= most:
            return


def _measured(run: Path, runner: PlansRunner, predictor: Predictor, gpu: str | None) -> BatchTimesHeader:
    """Return the first line of the file."""
    return BatchTimesHeader(
        model="demo" if runner.model == "demo" else str(runner.folder.resolve()),
        gpu=str(Path(gpu).resolve()) if gpu is not None and Path(gpu).is_file() else predictor.gpu,
        engine_version=CORE_VERSION,
        device=runner.device,
        plans=run.name,
        calibration="" if predictor.calibration.engine == "none" else predictor.calibration.title,
        notes=runner.notes,
    )


@contextmanager
def _written(out: Path | None, measured: BatchTimesHeader) -> Iterator[Callable[[BatchTime], object]]:
    """Yield a function that writes one batch to the file at once, so that nothing is lost with the process."""
    if out is None:
        yield lambda _: None
        return
    with out.open("wb", buffering=0) as file:
        file.write(line_of(measured))
        yield lambda one: file.write(line_of(one))


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Yield a function that advances a progress bar on stderr, if that is a terminal."""
    with terminal_bar(remaining=True) as bar:
        if bar is None:
            yield lambda: None
            return
        task = bar.add_task("batches", total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _refused() -> Iterator[None]:
    """Turn expected errors into one message and an exit status."""
    try:
        with refusals():
            yield
    except (CalibrationError, CatalogueError, LockstepError) as error:
        raise ToolError(error) from error


# -------------------------------------------------------------------------------------------------------------- output


def _show(times: Sequence[BatchTime], runner: PlansRunner, by: Predictor, interrupted: bool, as_json: bool) -> None:
    import numpy as np

    predicted_us = np.array([one.predicted_us for one in times])
    rows, unusual = error_rows(times, predicted_us), outliers(times, predicted_us)
    if as_json:
        print_json(
            {
                "model": runner.model,
                "device": runner.device,
                "notes": list(runner.notes),
                "predicted_by": by.title,
                "interrupted": interrupted,
                "batches": len(times),
                "errors": [_described(row) for row in rows],
                "outliers": [
                    {"batch": msgspec.to_builtins(one.batch), "times": round(one.times, 3)} for one in unusual
                ],
            }
        )
        return
    for line in outlier_lines(times, rows, unusual, interrupted):
        click.echo(line)
    click.echo(f"ran     {runner.model} on {runner.device}: {'; '.join(runner.notes)}")
    click.echo(f"by      {by.title}")


def outlier_lines(
    times: Sequence[BatchTime], rows: Sequence[ErrorRow], unusual: Sequence[Outlier], interrupted: bool
) -> list[str]:
    """Return times, errors and outliers as lines for a terminal."""
    lines = ["interrupted: the figures end there"] if interrupted else []
    if not times:
        return [*lines, "no batch was timed"]
    lines.append(
        f"{'batches':<25}{'count':>7}{'measured':>10}{'predicted':>10}{'ratio':>7}{'error':>9}{'error p95':>11}"
    )
    for row in rows:
        name = row.mode if not row.sizes else f"{row.mode} {row.sizes}"
        lines.append(
            f"{name:<25}{row.batches:>7,}{duration(row.measured_us):>10}{duration(row.predicted_us):>10}"
            f"{row.ratio:>7.2f}{row.error:>9.1%}{row.error_p95:>11.1%}"
        )
    lines.append("medians; ratio is measured / predicted, error is |predicted / measured - 1|")
    if unusual:
        lines.append(
            f"{len(unusual):,} of {len(times):,} took more than {OUTLIER:g} times as long as other batches of their "
            "kind and size, or less than half"
        )
        for one in unusual[:OUTLIERS_SHOWN]:
            batch = one.batch
            lines.append(
                f"  b{batch.batch_id} {batch.mode} of {batch.size:,} {_unit(batch)}: "
                f"{duration(batch.took_us)}, {one.times:.2f} times the expected time"
            )
        if len(unusual) > OUTLIERS_SHOWN:
            lines.append(f"  and {len(unusual) - OUTLIERS_SHOWN:,} more: --json lists all")
    return lines


def _unit(batch: BatchTime) -> str:
    return ("row" if batch.mode == "decode" else "token") + "s" * (batch.size > 1)


def _described(row: ErrorRow) -> dict[str, Any]:
    return {
        "mode": row.mode,
        "sizes": row.sizes,
        "batches": row.batches,
        "measured_us": round(row.measured_us, 1),
        "predicted_us": round(row.predicted_us, 1),
        "measured_over_predicted": round(row.ratio, 4),
        "error": round(row.error, 4),
        "error_p95": round(row.error_p95, 4),
    }
