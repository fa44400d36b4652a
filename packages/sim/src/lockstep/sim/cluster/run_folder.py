"""The run folder of a cluster: metrics.json, tables, traces and the report."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.sim.cluster.result import ClusterRun

ENGINES_REPORTED = 16  # most engines in report.html, to bound its size


def write_cluster_run(
    folder: Path, run: ClusterRun, *, requests: bool = True, trace: bool = True, report: bool = True
) -> None:
    """Write the results of a cluster beside its journals; traces are in the folders of their engines.

    Args:
        requests: whether to write requests.parquet and requests.csv.
        trace: whether to write a trace.json.gz per engine.
        report: whether to write report.html; it is not written if no request arrived.
    """
    from lockstep.sim.cluster.fleet_section import fleet_section
    from lockstep.sim.report import ReportRun, write_report
    from lockstep.sim.results.perfetto import write_trace
    from lockstep.sim.results.results import write_metrics_json, write_requests
    from lockstep.sim.run.run_folder import interrupted_headline, report_run, whole, workload_line

    about = run.about()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole(folder / "metrics.json") as path:
        text = json.dumps(run.metrics(), indent=2, allow_nan=False, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    for engine, one in enumerate(run.engines):
        (folder / "engines" / str(engine)).mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole(folder / "engines" / str(engine) / "metrics.json") as path:
            write_metrics_json(path, one.data, {**one.setup.about(), "command": about["command"], "engine": engine})
        if trace:
            with whole(folder / "engines" / str(engine) / "trace.json.gz") as path:
                write_trace(path, one.data, about={"seed": about["seed"], "command": about["command"]})
    if requests:
        with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
            write_requests(run.data, parquet, csv)
    if report and run.data.summary["requests"]["arrived"]:
        facts = {"command": about["command"], "router": run.setup.scenario.router.policy}
        whole_run = ReportRun(
            "all",
            facts,
            run.data,
            intervals=None if run.intervals is None else run.intervals.describe(),
            calibration=run.calibration.title,
            remarks=run.remarks(),
        )
        runs = [whole_run]
        shown = _engines_to_report(run)
        runs += [report_run(run.engines[engine], f"engine {engine}") for engine in shown]
        parts = "All together are what clients of the router see; an engine saw only what was routed to it."
        if len(shown) < len(run.engines):
            parts += (
                f" Of {len(run.engines)} engines, {len(shown)} are shown: "
                "those with the most requests and those with the fewest, and none without any."
            )
        with whole(folder / "report.html") as path:
            write_report(
                path,
                runs,
                title=run.setup.title,
                subtitle=workload_line(run.setup.workload, closed=run.setup.scenario.base.concurrency is not None),
                headline=interrupted_headline(len(run.setup.workload.turns), run.data) if run.interrupted else None,
                parts=parts,
                sections=[] if run.autoscale is None else [fleet_section(run.autoscale)],
            )


def _engines_to_report(run: ClusterRun) -> list[int]:
    """Return the numbers of the engines that received requests.

    Beyond ENGINES_REPORTED they are the engines with the most and with the fewest requests.
    """
    arrived = [one.data.summary["requests"]["arrived"] for one in run.engines]
    busy = sorted((engine for engine, count in enumerate(arrived) if count), key=lambda engine: -arrived[engine])
    half = ENGINES_REPORTED // 2
    return sorted(busy if len(busy) <= ENGINES_REPORTED else busy[:half] + busy[-half:])
