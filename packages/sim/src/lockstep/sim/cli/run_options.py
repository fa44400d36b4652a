"""Options of one call of `lockstep simulate`: checks, intervals, files, output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from lockstep.host.options import Option
from lockstep.sim.metrics.slo import Slo

EXIT_MISSED = 3  # as `lockstep plan` ends where no configuration meets the SLOs


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `lockstep simulate` without an effect on the simulation; a stored run does not keep them."""

    intervals: Annotated[bool, Option("compute intervals of the answers with two more simulations", negatable=True)] = (
        True
    )
    check: Annotated[str, Option("check invariants after every N-th event", metavar="every|N|off")] = "off"
    out: Annotated[Path | None, Option("run folder", metavar="DIR", default="nothing is written")] = None
    overwrite: Annotated[bool, Option("replace the run in DIR")] = False
    requests: Annotated[bool, Option("write requests.parquet and requests.csv", negatable=True)] = True
    trace: Annotated[bool, Option("write trace.json.gz, for ui.perfetto.dev", negatable=True)] = True
    report: Annotated[bool, Option("write report.html", negatable=True)] = True
    fail_on_slo: Annotated[bool, Option("exit with status 3 if an SLO is missed or was not measured")] = False
    as_json: Annotated[bool, Option("print metrics.json instead of tables", flag="--json")] = False

    @property
    def check_every(self) -> int:
        """Return the number of events between two checks; 0 means never."""
        return _parse_check(self.check)

    def check_slos(self, slos: Sequence[Slo]) -> None:
        """Raise UsageError if the exit status depends on SLOs and there are none."""
        if self.fail_on_slo and not slos:
            raise click.UsageError("--fail-on-slo needs an SLO\nhint: such as --slo ttft_p99=500ms")

    def status_of(self, summary: Mapping[str, Any]) -> int:
        """Return the exit status of a finished run with this summary: EXIT_MISSED with `fail_on_slo`, else 0."""
        return EXIT_MISSED if self.fail_on_slo and not all(slo["met"] for slo in summary["slos"]) else 0

    @property
    def files(self) -> dict[str, bool]:
        """Return which optional files of a run folder are written."""
        return {"requests": self.requests, "trace": self.trace, "report": self.report}


def _parse_check(text: str) -> int:
    if text in ("off", "every"):
        return int(text == "every")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise click.BadParameter(f"expected every, off or a number of events, got `{text}`", param_hint="--check")
