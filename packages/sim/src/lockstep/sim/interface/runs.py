"""Runs: simulated, opened from their folders, compared."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.interface.options import config_errors, nearest, parsed, text_of
from lockstep.sim.interface.page import HtmlPage
from lockstep.sim.report.parts import escape

if TYPE_CHECKING:
    import altair
    import polars

    from lockstep.sim.results.compare import Comparison
    from lockstep.sim.results.stored_run import StoredRun

GROUPS = ("requests", "latency", "throughput", "cache", "kv", "scheduler", "device", "cpu")
"""Groups of metrics.json whose numbers are rows of `Run.figures`."""


class RunFolder:
    """A run of the simulator, or one measured by `lockstep bench serve`, read from its folder."""

    def __init__(self, folder: str | Path, *, temporary: bool = False) -> None:
        """Read a run folder.

        Args:
            temporary: whether the folder is deleted with this object.
        Raises: ConfigError if the folder has no run.
        """
        from lockstep.sim.results.stored_run import read_run

        self.folder = Path(folder)
        self._temporary = temporary
        if temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.stored: StoredRun = read_run(self.folder)

    @property
    def name(self) -> str:
        """The name of the run's folder; empty if the folder is temporary."""
        return "" if self._temporary else self.folder.name

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Everything in metrics.json, see docs/metrics.md. Times are in us."""
        return self.stored.metrics

    @property
    def command(self) -> str:
        """The command line that repeats the run; empty for a measured run."""
        return str(self.stored.about.get("command") or "")

    @property
    def meets_slos(self) -> bool | None:
        """Whether every SLO holds; None without SLOs, or if nothing was measured."""
        return self.stored.meets_slos

    @property
    def requests(self) -> polars.DataFrame:
        """One row per request; the columns are in docs/metrics.md. Raises ConfigError for a run without them."""
        import polars as pl

        path = self.folder / "requests.parquet"
        if not path.is_file():
            raise ConfigError(f"`{self.folder}` has no requests.parquet\nhint: simulate without requests=False")
        return pl.read_parquet(path)

    @property
    def figures(self) -> polars.DataFrame:
        """One row per number of metrics.json: group, name, value, and low and high of its interval if it has one."""
        import polars as pl

        rows: list[tuple[str, str, float | None, float | None, float | None]] = []
        for group in GROUPS:
            for name, value in self.metrics.get(group, {}).items():
                if isinstance(value, int | float | None):
                    ends = self.stored.interval(name) or (None, None)
                    rows.append((group, name, None if value is None else float(value), *ends))
        schema = {"group": pl.String, "name": pl.String, "value": pl.Float64, "low": pl.Float64, "high": pl.Float64}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def figure(self, name: str) -> float | None:
        """Return one number of metrics.json by its name, such as `ttft_us_p99`; None if nothing was measured.

        Raises: ConfigError for an unknown name, with the nearest ones.
        """
        for group in GROUPS:
            values = self.metrics.get(group, {})
            if name in values and isinstance(values[name], int | float | None):
                return None if values[name] is None else float(values[name])
        known = self.figures["name"].to_list()
        raise ConfigError(f"`{name}` is no figure of the run{nearest(name, known)}")

    def chart(self, name: str = "ttft") -> altair.Chart:
        """Return an Altair chart: the share of requests below each `ttft`, `tpot`, `e2e` or `queue`, or `arrivals`.

        `arrivals` is TTFT over the time of arrival. A chart is shown by a notebook, and saved by
        `chart.save("ttft.svg")`; the end of the name chooses PNG, SVG or HTML.
        Raises: ConfigError for another name, or without Altair.
        """
        from lockstep.sim.interface.charts import run_chart

        return run_chart(self.requests, name, self.stored.slos)

    def report(self) -> HtmlPage:
        """Return the report of the run. Raises ConfigError for a run without one."""
        path = self.folder / "report.html"
        if not path.is_file():
            raise ConfigError(f"`{self.folder}` has no report.html\nhint: simulate without report=False")
        return HtmlPage(self.stored.engines_title, path.read_text("utf-8"))

    def save(self, folder: str | Path) -> RunFolder:
        """Copy the run to a folder that does not exist yet, and return it from there."""
        shutil.copytree(self.folder, folder)
        return RunFolder(folder)

    def __repr__(self) -> str:
        return f"<lockstep.Run {self.stored.engines_title}: {_line(self)}>"

    def _repr_html_(self) -> str:
        shown = {name: ends for name, ends in _shown(self) if ends is not None}
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{value}</td></tr>" for name, value in shown.items())
        return f"<table><caption>{escape(self.stored.engines_title)}</caption>{rows}</table>"


@dataclass(frozen=True)
class ComparedFolders:
    """A comparison of runs. The first one is the baseline."""

    found: Comparison = field(repr=False)

    @property
    def figures(self) -> polars.DataFrame:
        """One row per figure and run: name, run, value, change from the baseline in words."""
        import polars as pl

        rows = []
        for figure in self.found.describe()["figures"]:
            changes = [None, *(change["words"] for change in figure["changes"])]
            for run, value, words in zip(self.found.runs, figure["values"], changes, strict=True):
                rows.append((figure["name"], run.name, None if value is None else float(value), words))
        schema = {"name": pl.String, "run": pl.String, "value": pl.Float64, "change": pl.String}
        return pl.DataFrame(rows, schema=schema, orient="row")

    @property
    def settings(self) -> polars.DataFrame:
        """One row per setting that differs: name, and one column with its value in each run, as text."""
        import polars as pl

        names = [run.name for run in self.found.runs]
        rows = [(row.name, *map(text_of, row.values)) for row in self.found.settings]
        return pl.DataFrame(rows, schema={"name": pl.String, **dict.fromkeys(names, pl.String)}, orient="row")

    @property
    def warnings(self) -> Sequence[str]:
        """Reasons why the comparison is not fair."""
        return self.found.warnings

    def report(self) -> HtmlPage:
        """Return the page of the comparison."""
        from lockstep.sim.report.compare_page import render_comparison

        return HtmlPage("comparison", render_comparison(self.found))

    def __str__(self) -> str:
        from lockstep.sim.results.compare_text import comparison_lines

        return "\n".join(comparison_lines(self.found))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def simulate(*, out: str | Path | None = None, journal: bool | None = None, **options: Any) -> RunFolder:
    """Simulate a workload on a model and a GPU, or on a cluster of engines.

    Args:
        out: run folder, as of `lockstep simulate --out`; None: a temporary one, deleted with the result.
        journal: whether the folder has the journals of the engines, which `lockstep journal` and `lockstep explain`
            read; None: if `out` is given. A journal costs about a fifth of the run's time.
        options: those of `lockstep simulate`: `model`, `gpu`, `workload` (one or a list), `slo`, `rate`, ...
    Raises:
        ConfigError, WorkloadError, CatalogueError, CapacityError: bad options, as of the command.
        KeyboardInterrupt: the run was interrupted.
    """
    from lockstep.host.options import take
    from lockstep.sim.cli.requested import requested_of
    from lockstep.sim.cli.run_options import RunOptions
    from lockstep.sim.cli.simulate import simulate as command
    from lockstep.sim.run.run_folder import prepare_folder

    params = parsed(command, "lockstep.simulate", {**options, "out": out})
    given = take(RunOptions, params)
    with config_errors():
        requested = requested_of(params)
    temporary = given.out is None
    folder = given.out or Path(tempfile.mkdtemp(prefix="lockstep-run-"))
    try:
        prepare_folder(folder, overwrite=given.overwrite)
        files = {**given.files, "trace": given.trace and (not temporary or "trace" in options)}
        _simulate_into(folder, requested, given, journal=not temporary if journal is None else journal, files=files)
    except BaseException:
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return RunFolder(folder, temporary=temporary)


def open_run(folder: str | Path) -> RunFolder:
    """Open a folder of `lockstep simulate --out` or `lockstep bench serve --out`. Raises ConfigError."""
    return RunFolder(folder)


def compare(*runs: RunFolder | str | Path, **named: RunFolder | str | Path) -> ComparedFolders:
    """Compare runs with the first of them: settings, figures, and each request where the workload is the same.

    Args:
        runs: runs or their folders. The name of a run in the comparison is that of its folder, or `run 1` if the
            folder is temporary.
        named: further ones with a name: `compare(fcfs=one, lpm=other)`.
    Raises: ConfigError for fewer than two runs.
    """
    from lockstep.sim.results import compare as comparing

    opened = [run if isinstance(run, RunFolder) else RunFolder(run) for run in (*runs, *named.values())]
    names = [run.name or f"run {place}" for place, run in enumerate(opened[: len(runs)], start=1)] + list(named)
    if len(opened) < 2:
        raise ConfigError(f"a comparison needs at least two runs, got {len(opened)}")
    return ComparedFolders(
        comparing.compare([replace(run.stored, name=name) for run, name in zip(opened, names, strict=True)])
    )


def _simulate_into(folder: Path, requested: Any, given: Any, *, journal: bool, files: dict[str, bool]) -> None:
    """Simulate one engine or a cluster, and write the run folder. Raises KeyboardInterrupt after Ctrl-C."""
    from lockstep.sim.cluster.intervals import intervals_of
    from lockstep.sim.cluster.run_folder import write_cluster_run
    from lockstep.sim.cluster.setup import assemble_cluster
    from lockstep.sim.cluster.simulate import simulate_cluster
    from lockstep.sim.run.assemble import assemble
    from lockstep.sim.run.run_folder import write_run
    from lockstep.sim.run.simulate import simulate as simulate_engine
    from lockstep.sim.scenario.scenario import Scenario

    run: Any
    write: Callable[..., None]
    options: dict[str, Any] = {"folder": folder if journal else None, "check_every": given.check_every}
    if isinstance(requested, Scenario):
        run, write = simulate_engine(assemble(requested), **options), write_run
    else:
        run, write = simulate_cluster(assemble_cluster(requested), **options), write_cluster_run
    if run.interrupted:
        raise KeyboardInterrupt
    if given.intervals:
        run = replace(run, intervals=intervals_of(run))
    write(folder, run, **files)


def _shown(run: RunFolder) -> Iterator[tuple[str, str | None]]:
    """Yield heading and text of the figures that a run shows first."""
    from lockstep.sim.results.results import INTERVALS_SHOWN, show_rate, show_us

    for heading, name in INTERVALS_SHOWN.items():
        show = show_us if "_us_" in name else show_rate
        value = run.figure(name)
        ends = run.stored.interval(name)
        between = f" ({show(ends[0])} to {show(ends[1])})" if ends is not None else ""
        yield heading, None if value is None else f"{show(value)}{between}"


def _line(run: RunFolder) -> str:
    completed = run.metrics["requests"]["completed"]
    first = [f"{heading} {text}" for heading, text in _shown(run) if text is not None][:4]
    return ", ".join((f"{completed:,} requests completed", *first))
