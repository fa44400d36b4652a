"""Several rates of one workload: curves against the load, a table, and the switch between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from lockstep.sim.report.answer import verdict
from lockstep.sim.report.parts import figure, legend, table
from lockstep.sim.report.payload import Json
from lockstep.sim.report.report_run import ReportRun
from lockstep.sim.report.text import count, digits, duration, percent


def comparison_payload(runs: Sequence[ReportRun]) -> Json:
    """Latency and throughput against the offered load, or run by run where loads are not known or not distinct."""
    rates = [run.offered_per_s for run in runs]
    known = [rate for rate in rates if rate is not None]
    by_rate = len(set(known)) == len(runs)
    order = sorted(range(len(runs)), key=lambda k: known[k]) if by_rate else list(range(len(runs)))

    def line(label: str, colour: str, part: str, name: str, *, dashed: bool = False) -> Json:
        values = [runs[k].summary(part, name) for k in order]
        return {"name": label, "colour": colour, "values": values, **({"dash": [6, 4]} if dashed else {})}

    charts: list[Json] = []
    for metric in ("ttft", "tpot"):
        slos = [slo for run in runs for slo in run.slos if slo.metric == metric]
        slo = next((slo for slo in slos if slo.statistic == "p99"), slos[0] if slos else None)
        p99 = line("p99", "--decode", "latency", f"{metric}_us_p99")
        p50 = line("p50", "--other", "latency", f"{metric}_us_p50", dashed=True)
        limit = {"limit_us": slo.bound_us, "limit_label": slo.bound} if slo else {"limit_us": None}
        charts.append({"name": f"compare_{metric}", "kind": "latency", "lines": [p99, p50], **limit})
    lines = [line("completed", "--other", "throughput", "requests_per_s", dashed=True)]
    if _has_slos(runs):
        lines.insert(0, line("goodput", "--decode", "throughput", "goodput_requests_per_s"))
    charts.append({"name": "compare_goodput", "kind": "count", "unit": "requests/s", "limit_us": None, "lines": lines})
    return {
        "rates": [known[k] for k in order] if by_rate else [float(place) for place in range(len(order))],
        "names": None if by_rate else [runs[k].name for k in order],
        "headings": [runs[k].name for k in order],
        "x_label": "offered load (requests/s)" if by_rate else "run",
        "charts": charts,
    }


def comparison(runs: Sequence[ReportRun]) -> str:
    """The section that compares the runs, as HTML."""
    has_slos = _has_slos(runs)
    slo = [("line limit", "SLO")] if has_slos else []
    latency = legend(("line decode", "p99, the slowest in a hundred"), ("line dash", "p50, the median"), *slo)
    goodput = [("line decode", "goodput: met every SLO")] if has_slos else []
    rate = legend(*goodput, ("line dash", "completed"))
    return f"""<section id="compare" aria-labelledby="compare-h">
<h2 id="compare-h">How load changes latency</h2>
<p class="lead">Each point is one run. Where a line bends upwards, requests start to queue: to the right of the bend,
more load buys waiting and little else.</p>
<div class="grid3">
{figure("compare_ttft", "Time to first token", legend=latency)}
{figure("compare_tpot", "Time per output token", legend=latency)}
{figure("compare_goodput", "Requests per second", legend=rate)}
</div>
{_table(runs, has_slos=has_slos)}
</section>"""


def _table(runs: Sequence[ReportRun], *, has_slos: bool) -> str:
    columns: list[tuple[str, str, Callable[[ReportRun], str]]] = [
        ("completed", "requests", lambda run: count(run.summary("requests", "completed"))),
        ("throughput", "tokens/s", lambda run: digits(run.summary("throughput", "output_tokens_per_s"))),
        ("TTFT", "p50", lambda run: duration(run.summary("latency", "ttft_us_p50"))),
        ("TTFT", "p99", lambda run: duration(run.summary("latency", "ttft_us_p99"))),
        ("TPOT", "p50", lambda run: duration(run.summary("latency", "tpot_us_p50"))),
        ("TPOT", "p99", lambda run: duration(run.summary("latency", "tpot_us_p99"))),
        ("cache", "hit ratio", lambda run: percent(run.summary("cache", "hit_ratio"))),
        ("GPU", "busy", lambda run: percent(run.summary("device", "busy_fraction"))),
        ("retracted", "times", lambda run: count(run.summary("scheduler", "retractions"))),
        ("rejected", "requests", lambda run: count(run.summary("requests", "rejected"))),
    ]
    if has_slos:
        goodput = ("goodput", "requests/s", lambda run: digits(run.summary("throughput", "goodput_requests_per_s")))
        columns.insert(2, goodput)
    head = '<th scope="col">run</th>' + ('<th scope="col" class="text">SLOs</th>' if has_slos else "")
    head += "".join(f'<th scope="col">{name}<small>{unit}</small></th>' for name, unit, _ in columns)
    rows = []
    for key, run in enumerate(runs):
        name = f'<th scope="row"><a class="label" href="#run-{key}" data-run="{key}">{escape(run.name)}</a></th>'
        kind, words = verdict(run.meets_slos)
        slos = f'<td class="text"><span class="verdict {kind}">{words}</span></td>' if has_slos else ""
        rows.append(f"<tr>{name}{slos}{''.join(f'<td>{show(run)}</td>' for _, _, show in columns)}</tr>")
    return table(head, rows, "Comparison of the runs")


def switch(runs: Sequence[ReportRun]) -> str:
    """Radio buttons that choose the run shown below. Without JavaScript all of them are."""
    options = "".join(
        f'<label><input type="radio" name="run" value="{key}"><span>{escape(run.name)}</span></label>'
        for key, run in enumerate(runs)
    )
    return f'<fieldset class="switch"><legend>One run in detail</legend><div class="options">{options}</div></fieldset>'


def _has_slos(runs: Sequence[ReportRun]) -> bool:
    return any(run.slos for run in runs)
