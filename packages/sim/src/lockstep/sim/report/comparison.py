"""Several runs of one workload: curves against the load, a table, and the switch between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from lockstep.sim.report.answer import verdict
from lockstep.sim.report.parts import escape, figure, legend, table, unbroken
from lockstep.sim.report.payload import Json
from lockstep.sim.results.slo_rows import Compared
from lockstep.sim.results.text import NOTHING, count, digits, duration, percent, span

LOADS_APART = 1.02  # ratio of two offered loads; closer ones count as one load


def loads_of(runs: Sequence[Compared]) -> list[float] | None:
    """Return the offered load of each run, if it is known for all and differs between any two; else None."""
    known = [rate for run in runs if (rate := run.offered_per_s) is not None]
    in_order = sorted(known)
    apart = all(low * LOADS_APART < high for low, high in pairwise(in_order))
    return known if len(known) == len(runs) and apart else None


def comparison_payload(runs: Sequence[Compared], *, by_rate: bool = True) -> Json:
    """Return the chart data: latency and throughput against the offered load, or by run without distinct loads."""
    known = (loads_of(runs) if by_rate else None) or []
    by_rate = bool(known)
    order = sorted(range(len(runs)), key=lambda k: known[k]) if by_rate else list(range(len(runs)))

    def line(label: str, colour: str, part: str, name: str, *, dashed: bool = False) -> Json:
        values = [runs[k].summary(part, name) for k in order]
        intervals = [runs[k].interval(name) for k in order]
        known = {"intervals": intervals} if any(intervals) else {}
        return {"name": label, "colour": colour, "values": values, **known, **({"dash": [6, 4]} if dashed else {})}

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


def comparison(runs: Sequence[Compared], parts: str = "") -> str:
    """Return the section that compares the runs, as HTML: charts, then a table with a link to each run.

    Args:
        parts: a sentence about the parts of a run; with it the first run is a whole and the others are its parts.
    """
    title, lead = "The runs side by side", "Each point is one run; the median and the slowest in a hundred."
    if parts:
        title, lead = "The whole and its parts", parts
    elif loads_of(runs) is not None:
        title = "How load changes latency"
        lead = (
            "Each point is one run. Where a line bends upwards, requests start to queue: to the right of the bend, "
            "more load adds waiting time and little throughput."
        )
    return f"""<section id="compare" aria-labelledby="compare-h">
<h2 id="compare-h">{title}</h2>
<p class="lead">{escape(lead)}</p>
{comparison_charts(runs, by_rate=not parts)}
{comparison_table(runs, linked=True)}
</section>"""


def comparison_charts(runs: Sequence[Compared], *, by_rate: bool = True) -> str:
    """Return the places for the charts of `comparison_payload`."""
    is_line = by_rate and loads_of(runs) is not None
    high, low = ("line decode", "line dash") if is_line else ("dot decode", "dot")
    has_slos = _has_slos(runs)
    slo = [("line limit", "SLO")] if has_slos else []
    if any(run.interval("ttft_us_p99") for run in runs):
        slo.append(("whisker", "interval"))
    latency = legend((high, "p99, the slowest in a hundred"), (low, "p50, the median"), *slo)
    goodput = [(high, "goodput: met every SLO")] if has_slos else []
    rate = legend(*goodput, (low, "completed"))
    return f"""<div class="grid3">
{figure("compare_ttft", "Time to first token", legend=latency)}
{figure("compare_tpot", "Time per output token", legend=latency)}
{figure("compare_goodput", "Requests per second", legend=rate)}
</div>"""


def comparison_table(runs: Sequence[Compared], *, linked: bool) -> str:
    """Return a table with one row per run: verdict, figures, bottleneck. `linked`: names link to the run below."""
    has_slos = _has_slos(runs)

    def answer(part: str, name: str, show: Callable[[float | None], str]) -> Callable[[Compared], str]:
        def cell(run: Compared) -> str:
            ends = run.interval(name)
            sure = f"<small>{unbroken(span(show(ends[0]), show(ends[1])))}</small>" if ends is not None else ""
            return show(run.summary(part, name)) + sure

        return cell

    columns: list[tuple[str, str, Callable[[Compared], str]]] = [
        ("output", "tokens/s", answer("throughput", "output_tokens_per_s", digits)),
        ("TTFT", "p50", answer("latency", "ttft_us_p50", duration)),
        ("TTFT", "p99", answer("latency", "ttft_us_p99", duration)),
        ("TPOT", "p50", answer("latency", "tpot_us_p50", duration)),
        ("TPOT", "p99", answer("latency", "tpot_us_p99", duration)),
        ("GPU", "busy", lambda run: percent(run.summary("device", "busy_fraction"))),
        ("KV", "peak", lambda run: percent(run.summary("kv", "used_share_max"))),
    ]
    rare: list[tuple[str, str, str, str, Callable[[float | None], str]]] = [
        ("cache", "hit ratio", "cache", "hit_ratio", percent),
        ("retracted", "times", "scheduler", "retractions", count),
        ("rejected", "requests", "requests", "rejected", count),
    ]
    for title, unit, part, name, show_value in rare:
        if any(run.summary(part, name) for run in runs):  # a column of zeros takes room for nothing
            columns.append((title, unit, answer(part, name, show_value)))
    if any(run.summary("requests", "completed") != run.summary("requests", "arrived") for run in runs):
        columns.append(("completed", "requests", lambda run: count(run.summary("requests", "completed"))))
    if has_slos:
        goodput = ("goodput", "requests/s", lambda run: digits(run.summary("throughput", "goodput_requests_per_s")))
        columns.insert(1, goodput)
    head = '<th scope="col">run</th>' + ('<th scope="col" class="text">SLOs</th>' if has_slos else "")
    head += '<th scope="col" class="text">bottleneck</th>'
    head += "".join(f'<th scope="col">{name}<small>{unit}</small></th>' for name, unit, _ in columns)
    rows = []
    for key, run in enumerate(runs):
        title = escape(run.name)
        link = f'<a class="label" href="#run-{key}" data-run="{key}">{title}</a>'
        plain = f'<span class="label">{title}</span>'
        name = f'<th scope="row">{link if linked else plain}</th>'
        kind, words = verdict(run.meets_slos)
        shown = f'<span class="verdict {kind}">{words}</span>' if run.slos else NOTHING
        slos = f'<td class="text">{shown}</td>' if has_slos else ""
        cells = "".join(f"<td>{show(run)}</td>" for _, _, show in columns)
        found = run.bottleneck
        limit = f'<td class="text limit" title="{escape(found.evidence)}">{escape(found.name)}</td>'
        rows.append(f"<tr>{name}{slos}{limit}{cells}</tr>")
    return table(head, rows, "Comparison of the runs")


def switch(runs: Sequence[Compared]) -> str:
    """Return radio buttons that select the run shown below. Without JavaScript all runs are shown."""
    options = "".join(
        f'<label><input type="radio" name="run" value="{key}"><span>{escape(run.name)}</span></label>'
        for key, run in enumerate(runs)
    )
    return f'<fieldset class="switch"><legend>One run in detail</legend><div class="options">{options}</div></fieldset>'


def _has_slos(runs: Sequence[Compared]) -> bool:
    return any(run.slos for run in runs)
