"""The run folder: created or emptied before a run, and written after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.run.out_paths import check_folder
from lockstep.sim.run.simulate import Run
from lockstep.sim.workload.workload import Workload

if TYPE_CHECKING:
    from lockstep.sim.metrics.run_data import RunData

OUTPUTS = ("metrics.json", "requests.parquet", "requests.csv", "trace.json.gz", "report.html")


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Create the run folder, or empty an existing one. Only files of runs are removed.

    Raises: ConfigError if the folder has other contents, or has a run and `overwrite` is not set, or cannot be written.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        check_folder(folder)
        return
    journal = folder / "journal"
    journals = [journal, *sorted(folder.glob("engines/*/journal"))]
    if not folder.is_dir() or not (any(any(j.glob("*.log")) for j in journals) or (folder / "metrics.json").is_file()):
        raise ConfigError(f"`{folder}` exists and is not a run folder\nhint: choose another --out")
    if not overwrite:
        raise ConfigError(f"`{folder}` already holds a run\nhint: choose another --out, or add --overwrite")
    for old in journals:
        for path in [*old.glob("*.log"), *old.glob("snapshot-*")]:
            path.unlink()
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)
    for part in (folder, folder / "decode"):  # routers, and that of decode engines
        for path in [*part.glob("router/*.log"), *part.glob("router.jsonl")]:
            path.unlink()
        if (part / "router").is_dir() and not any((part / "router").iterdir()):
            (part / "router").rmdir()
    if (folder / "decode").is_dir() and not any((folder / "decode").iterdir()):
        (folder / "decode").rmdir()
    for engine in folder.glob("engines/*"):
        for name in ("metrics.json", "trace.json.gz"):
            (engine / name).unlink(missing_ok=True)
        for empty in (engine / "journal", engine):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


def write_run(folder: Path, run: Run, *, requests: bool = True, trace: bool = True, report: bool = True) -> None:
    """Write the results of a run beside the journal: metrics.json, and further files of OUTPUTS.

    Args:
        requests: whether to write requests.parquet and requests.csv.
        trace: whether to write trace.json.gz.
        report: whether to write report.html; it is not written if no request arrived.
    Raises: OSError with the file that was not written.
    """
    from lockstep.sim.report import write_report
    from lockstep.sim.results.perfetto import write_trace
    from lockstep.sim.results.results import write_json, write_requests

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = run.about()
    with whole(folder / "metrics.json") as path:
        write_json(path, run.metrics())
    if requests:
        with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
            write_requests(run.data, parquet, csv)
    if trace:
        with whole(folder / "trace.json.gz") as path:
            write_trace(path, run.data, about={"seed": about["seed"], "command": about["command"]})
    if report and run.data.summary["requests"]["arrived"]:
        with whole(folder / "report.html") as path:
            write_report(
                path,
                [report_run(run)],
                title=run.setup.title,
                subtitle=workload_line(run.setup.workload, closed=run.setup.scenario.concurrency is not None),
                headline=interrupted_headline(len(run.setup.workload.turns), run.data) if run.interrupted else None,
            )


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield the path of a partial file that replaces `path` at the end, so that `path` is never incomplete.

    Raises: OSError with the name of `path`.
    """
    part = path.with_name(f".part-{path.name}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"{path.name} was not written: {error.strerror}", str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def interrupted_headline(requests: int, data: RunData) -> str:
    """Return the headline of an interrupted run of a workload with `requests` requests."""
    arrived = data.summary["requests"]["arrived"]
    minutes = (data.span_us[1] - data.span_us[0]) / 60e6
    return f"Interrupted after {minutes:.1f} simulated minutes: {arrived:,} of {requests:,} requests had arrived"


def report_run(run: Run, name: str = "", rate_per_s: float | None = None) -> Any:
    """Return the run in the form of a report: its facts, data, intervals and remarks."""
    from lockstep.sim.report import ReportRun
    from lockstep.sim.results.text import setting

    setup = run.setup
    facts = {
        "model": setup.model.name,
        "GPU": setup.hardware,
        "workload": setup.workload.source,
        "workload digest": setup.workload.digest,
        "cost model": str(setup.cost.describe()["kind"]),
        "calibration": setup.calibration.title,
        **{name: setting(value) for name, value in msgspec.to_builtins(setup.config).items()},
        "seed": str(setup.scenario.seed),
        "version": code_version(),
        "commit": code_commit() or "unknown",
        "command": setup.scenario.command(),
    }
    return ReportRun(
        name or setup.title,
        facts,
        run.data,
        rate_per_s,
        intervals=None if run.intervals is None else run.intervals.describe(),
        calibration=setup.calibration.title,
        remarks=run.remarks(),
    )


def workload_line(workload: Workload, *, closed: bool = False) -> str:
    """Return a workload as one line of text; `closed`: in a closed loop, which ignores arrival times."""
    summary = workload.summary()
    rate = f"{summary.arrivals_per_s:.4g}/s" if summary.duration_us else "all at once"
    if closed:
        rate = f"{summary.turns - summary.follow_ups:,} sessions in a closed loop"
    return (
        f"{workload.name}: {summary.turns:,} requests, {rate}, "
        f"{summary.prompt.mean:,.0f} tokens in and {summary.output.mean:,.0f} out on average, "
        f"{100 * summary.sharing_ratio:.0f} % of the prompts shared"
    )
