"""The calibration file that every `lockstep calibrate` command writes: its options, and the printed summary."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from lockstep.host.options import Option, options_of, with_flags
from lockstep.host.quantization import KvDtype, WeightsDtype
from lockstep.sim.run.out_paths import check_file

if TYPE_CHECKING:
    from lockstep.sim.cost import Calibration

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


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


FILE = with_flags(click.option, options_of(CalibrationFile).values())


def _checked_date(date: str) -> str:
    try:
        if DATE.fullmatch(date):
            return datetime.date.fromisoformat(date).isoformat()
    except ValueError:
        pass
    raise click.BadParameter(f"expected a day as YYYY-MM-DD, got `{date}`", param_hint="--date")


def write(calibration: Calibration, out: Path) -> None:
    """Write the calibration file and print a summary of it."""
    calibration.save(out)
    c = calibration.correction
    click.echo(f"{calibration.title}: {', '.join(calibration.models)}")
    click.echo(
        f"kernels x {c.kernels:.3g}, collectives x {c.collectives:.3g}; {c.step_us:,.0f} us a pass, "
        f"{c.row_us:.3g} us a row, {c.weight('prompt_us'):.3g} us a prompt, "
        f"{c.weight('kv_token_us'):.3g} us a KV token, attention of prompts x "
        f"{c.kernels + c.weight('attention_prefill'):.3g}, "
        f"{c.collective_us:.3g} us a collective, {c.frontend_us / 1e3:,.1f} ms a request"
    )
    for residuals in calibration.residuals:
        low, middle, high = residuals.at([0.05, 0.5, 0.95])
        click.echo(
            f"measured / predicted {residuals.metric}, models {residuals.population}: median {middle:.2f}, "
            f"90 % in {low:.2f} to {high:.2f} ({residuals.count} predictions, {residuals.method})"
        )
    if calibration.lane is not msgspec.UNSET:
        lane = calibration.lane
        click.echo(
            f"CPU lane: {lane.result_fixed_us:.0f} us a result, {lane.result_row_us:.3g} us a row of it, "
            f"{lane.arrival_us:.0f} us an arrival, {lane.plan_fixed_us:.0f} us a plan, {lane.plan_row_us:.3g} us a row "
            "of it"
        )
    for source in calibration.sources:
        left_out = f", {source.rows_left_out:,} left out ({source.why_left_out})" if source.rows_left_out else ""
        click.echo(f"from {source.file}: {source.rows_used:,} rows{left_out}, SHA-256 {source.sha256[:16]}...")
    for note in calibration.notes:
        click.echo(note)
    click.echo(f"wrote {out}", err=True)
