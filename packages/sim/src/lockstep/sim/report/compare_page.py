"""The page of `lockstep compare`: stored runs, compared with the first of them.

    write_comparison("gpus.html", compare(read_runs(folders)))

It has the parts of a report: the charts and table of `comparison.py`, and distributions of several runs in one chart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.report.answer import LOGO, bottleneck_html, slo_list
from lockstep.sim.report.comparison import comparison_charts, comparison_payload, comparison_table
from lockstep.sim.report.page import whole_page
from lockstep.sim.report.parts import escape, figure, legend, table, unbroken
from lockstep.sim.report.payload import Json
from lockstep.sim.results.compare import (
    ChangedRequest,
    Comparison,
    Figure,
    IntervalRow,
    Kind,
    PairedMetric,
    Pairs,
    Verdict,
    engine_rows,
    headline,
    routing,
    telling_rows,
)
from lockstep.sim.results.compare_text import show_ratio
from lockstep.sim.results.slo_rows import METRIC_NAMES, SloRow
from lockstep.sim.results.stored_run import StoredRun
from lockstep.sim.results.text import NOTHING, count, digits, duration, percent, setting, span

DISTRIBUTIONS = ("ttft", "tpot", "e2e", "queue")  # metrics with one value per request
COLOURS = ("other", "decode", "prefill", "mixed", "good", "used")  # of the lines, in the order of the runs
DASHED_FROM = len(COLOURS)  # from this run on colours repeat, dashed
POINTS = 200  # points of each distribution
SWEEP_MIN = 3  # runs that make a sweep
LOAD_SETTINGS = ("workload", "workload digest", "rate", "rate_scale", "concurrency")

Values = NDArray[np.float64]


def write_comparison(path: str | Path, found: Comparison, explained: Sequence[str] = ()) -> Path:
    """Write the page of a comparison to `path`. `explained` are HTML sections that follow those about requests."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_comparison(found, explained), "utf-8", newline="\n")
    return path


def render_comparison(found: Comparison, explained: Sequence[str] = ()) -> str:
    """Return the page as text: one file that loads nothing."""
    overlays = [each for metric in DISTRIBUTIONS if (each := _distribution(found, metric)) is not None]
    ratios = [each for metric in METRIC_NAMES if (each := _ratios(found, metric)) is not None]
    data: Json = {
        "runs": [],
        "first": 0,
        "compare": comparison_payload(found.runs, by_rate=_is_sweep(found)),
        "overlays": overlays + ratios,
    }
    title = " against ".join(run.name for run in reversed(found.runs)) if len(found.runs) == 2 else "Comparison of runs"
    sections = (
        _head(found),
        _side_by_side(found),
        _engines(found),
        _distributions(found, overlays),
        _requests(found, ratios),
        *explained,
        _figures(found),
        _commands(found),
    )
    version = str(found.runs[0].about.get("version", ""))
    return whole_page(title, [section for section in sections if section], data, version)


# ---------------------------------------------------------------------------------------------------------------- head


def _head(found: Comparison) -> str:
    places = sorted({f"{run.about.get('model')} on {run.engines_title}" for run in found.runs})
    answer = re.sub(r"(?<=[0-9]) (?=(us|ms|s|min|%))", "&nbsp;", escape(headline(found).replace(" -> ", " → ")))
    fair = "".join(f"<li>{escape(line)}</li>" for line in found.warnings)
    notes = "".join(f"<li>{escape(line)}</li>" for line in found.notes)
    unfair = f'<div class="unfair" role="note"><b>✕ Not a fair comparison</b><ul>{fair}</ul></div>' if fair else ""
    return f"""<header id="answer">
<p class="mark">{LOGO}<span><b>Lockstep</b> comparison of {len(found.runs)} simulated runs</span></p>
<h1>{escape(", ".join(places))}</h1>
<p class="answer compared">{answer}</p>
{unfair}{f'<ul class="remarks">{notes}</ul>' if notes else ""}
{comparison_table(found.runs, linked=False)}
{_settings(found)}
</header>"""


def _settings(found: Comparison) -> str:
    if not found.settings:
        return '<p class="evidence">All settings are the same.</p>'
    head = '<th scope="col">differs</th>' + "".join(
        f'<th scope="col" class="text">{escape(r.name)}</th>' for r in found.runs
    )
    rows = [
        f'<tr><th scope="row">{escape(row.name)}</th>'
        + "".join(f'<td class="text value">{escape(setting(value))}</td>' for value in row.values)
        + "</tr>"
        for row in found.settings
    ]
    return table(head, rows, "Settings that differ")


def _is_sweep(found: Comparison) -> bool:
    """Return whether the runs differ only in load and are enough for a curve, so that charts run against the load."""
    return len(found.runs) >= SWEEP_MIN and all(row.name in LOAD_SETTINGS for row in found.settings)


def _side_by_side(found: Comparison) -> str:
    verdicts = "".join(
        f"<div><dt>{escape(run.name)}</dt><dd>{slo_list(run) or 'no SLOs were set'}"
        f'<p class="why">Bottleneck: {bottleneck_html(run)}</p></dd></div>'
        for run in found.runs
    )
    return f"""<section id="compare">
<h2>The runs side by side</h2>
<p class="lead">{escape(found.intervals_note)}</p>
{comparison_charts(found.runs, by_rate=_is_sweep(found))}
<dl class="limits">{verdicts}</dl>
</section>"""


# ------------------------------------------------------------------------------------------------------------- engines


def _engines(found: Comparison) -> str:
    """Return each run's router and engines, if any run has several."""
    if all(len(run.engines) == 1 for run in found.runs):
        return ""
    return f"""<section>
<h2>How evenly did the engines work?</h2>
<p class="lead">A bar is an engine's requests; the mark is its fair share, by its weight at the router. GPU busy is of
the time from the first arrival to the last finish of any engine.</p>
{"".join(_engines_table(run) for run in found.runs)}
</section>"""


def _engines_table(run: StoredRun) -> str:
    heads = (
        ("engine", ""), ('<span class="unseen">load</span>', ""), ("requests", ""), ("of fair", "share"),
        ("output", "tokens/s"), ("TTFT", "p99"), ("TPOT", "p99"), ("cache", "hit ratio"), ("KV", "peak"),
        ("GPU", "busy"),
    )  # fmt: skip
    head = "".join(f'<th scope="col">{name}<small>{below}</small></th>' for name, below in heads)
    every = engine_rows(run)
    shown = telling_rows(every)
    rows = [
        f'<tr><th scope="row"><span class="label">{row.number}: {escape(row.kind)}</span></th>'
        f'<td class="text">{_load_bar(row.fair_ratio)}</td><td>{count(row.requests)}</td>'
        f"<td>{show_ratio(row.fair_ratio)}</td><td>{digits(row.output_tokens_per_s)}</td>"
        f"<td>{duration(row.ttft_us_p99)}</td><td>{duration(row.tpot_us_p99)}</td><td>{percent(row.hit_ratio)}</td>"
        f"<td>{percent(row.kv_share_max)}</td><td>{percent(row.busy_share)}</td></tr>"
        for row in shown
    ]
    hidden = len(every) - len(shown)
    rest = f"; {count(hidden, 'engine')} between the fullest and the emptiest are not shown" if hidden else ""
    return f"""<h3 class="pair">{escape(run.name)}</h3>
<p class="lead">{escape(routing(run))}{rest}.</p>
{table(head, rows, f"Engines of {run.name}")}"""


def _load_bar(fair_ratio: float | None) -> str:
    """Return the bar of an engine's load as SVG. Half the bar is the fair share."""
    width = min(50 * (fair_ratio or 0.0), 100)
    return (
        '<svg class="shares" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="same" width="100" height="10"/>'
        f'<rect class="load" width="{width:.2f}" height="10"/><rect class="fair" x="49.5" width="1" height="10"/></svg>'
    )


# ------------------------------------------------------------------------------------------------------- distributions


def overlay(
    chart: str, label: str, lines: Sequence[tuple[int, str, Values]], *, slo: SloRow | None = None
) -> Json | None:
    """Return the cumulative distributions of several runs on one axis, for a chart; None without values.

    Args:
        lines: (index of the run, name, values) of each line; negative values are missing.
        slo: a bound that is drawn as a limit.
    """
    known = [(place, name, np.sort(values[values >= 0])) for place, name, values in lines]
    known = [line for line in known if line[2].size]
    if not known:
        return None
    parts = [values[np.unique(np.linspace(0, values.size - 1, POINTS).astype(np.int64))] for _, _, values in known]
    x = np.unique(np.concatenate(parts))
    x = np.concatenate((x[:1], x))
    drawn = []
    for place, name, values in known:
        share = np.searchsorted(values, x, "right") / values.size
        share[0] = np.searchsorted(values, x[0], "left") / values.size
        dash = {"dash": [6, 4]} if place >= DASHED_FROM else {}
        colour = f"--{COLOURS[place % len(COLOURS)]}"
        drawn.append({"name": name, "colour": colour, "share": np.round(share, 5).tolist(), **dash})
    limit = {"limit_us": slo.bound_us, "label": slo.bound} if slo is not None else None
    return {"chart": chart, "label": label, "x": np.round(x, 5).tolist(), "lines": drawn, "slo": limit}


def _distribution(found: Comparison, metric: str) -> Json | None:
    lines = [
        (place, run.name, run.requests[f"{metric}_us"][run.completed].astype(np.float64))
        for place, run in enumerate(found.runs)
        if run.requests is not None
    ]
    slos = [next((slo for slo in run.slos if slo.metric == metric), None) for run in found.runs]
    shared = slos[0] if slos[0] is not None and all(slo and slo.bound == slos[0].bound for slo in slos) else None
    return overlay(f"overlay_{metric}", METRIC_NAMES[metric], lines, slo=shared)


def _distributions(found: Comparison, overlays: Sequence[Json]) -> str:
    if not overlays:
        return ""
    names = _legend([(place, run.name) for place, run in enumerate(found.runs) if run.requests is not None])
    figures = [
        figure(each["chart"], str(each["label"]).capitalize(), "share of requests", legend=names) for each in overlays
    ]
    return f"""<section>
<div class="section-head"><div><h2>How long did requests take?</h2>
<p class="lead">A curve is the share of completed requests that were at least this fast: farther left is faster.</p>
</div><label class="toggle"><input type="checkbox" data-log checked>log scale</label></div>
<div class="grid2">{"".join(figures)}</div>
</section>"""


def _legend(runs: Sequence[tuple[int, str]]) -> str:
    return legend(
        *(
            (f"line {COLOURS[place % len(COLOURS)]}{' dash' if place >= DASHED_FROM else ''}", name)
            for place, name in runs
        )
    )


# --------------------------------------------------------------------------------------------------- request by request


def _ratios(found: Comparison, metric: str) -> Json | None:
    lines = [
        (place, pairs.name, pairs.ratios[metric])
        for place, pairs in enumerate(found.pairs, start=1)
        if pairs is not None and metric in pairs.ratios
    ]
    label = f"{METRIC_NAMES[metric]}, times that of {found.runs[0].name}"
    each = overlay(f"ratio_{metric}", label, lines) if lines else None
    return None if each is None else {**each, "is_ratio": True}


def _requests(found: Comparison, ratios: Sequence[Json]) -> str:
    paired = [(place, pairs) for place, pairs in enumerate(found.pairs, start=1) if pairs is not None and pairs.metrics]
    if not paired:
        return ""
    first = found.runs[0].name
    names = _legend([(place, pairs.name) for place, pairs in paired])
    titles = {f"ratio_{metric}": name.capitalize() for metric, name in METRIC_NAMES.items()}
    figures = "".join(
        figure(each["chart"], titles[each["chart"]], "share of requests", legend=names) for each in ratios
    )
    tables = "".join(_pair_tables(pairs, first) for _, pairs in paired)
    return f"""<section>
<h2>Request by request</h2>
<p class="lead">The workload is the same, so every request is compared with itself: same prompt, same answer length.
Left of 1x it was faster than in {escape(first)}, right of it slower.</p>
<div class="grid3">{figures}</div>
{tables}
</section>"""


def _pair_tables(pairs: Pairs, first: str) -> str:
    head = "".join(
        f'<th scope="col"{kind}>{name}</th>'
        for name, kind in (
            ('<span class="unseen">metric</span>', ""), ('<span class="unseen">shares</span>', ' class="text"'),
            ("faster", ""), ("same, within 1 %", ""), ("slower", ""), ("median change", ""), ("worst", ""),
            ("best", ""),
        )
    )  # fmt: skip
    rows = [_paired_row(METRIC_NAMES[metric], row) for metric, row in pairs.metrics.items()]
    alone = [
        f"{count(number, 'request')} completed in {escape(name)} alone"
        for number, name in ((pairs.completed_in_first_only, first), (pairs.completed_in_other_only, pairs.name))
        if number
    ]
    both = f"{count(pairs.completed_in_both, 'request')} completed in both"
    metric, row = next(iter(pairs.metrics.items()))
    most = ""
    if row.most_changed:
        most = f"<h4>Most changed: {METRIC_NAMES[metric]}</h4>{_changed_table(row.most_changed, first, pairs.name)}"
    return f"""<h3 class="pair">{escape(pairs.name)} against {escape(first)}</h3>
<p class="lead">{"; ".join([both, *alone])}.</p>
{table(head, rows, f"{pairs.name} against {first}, request by request")}{most}"""


def _paired_row(name: str, row: PairedMetric) -> str:
    shares = (("faster", row.faster_share), ("same", row.same_share), ("slower", row.slower_share))
    start, bars = 0.0, ""
    for kind, share in shares:
        bars += f'<rect class="{kind}" x="{100 * start:.2f}" width="{100 * share:.2f}" height="10"/>'
        start += share
    bar = f'<svg class="shares" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'
    cells = "".join(f"<td>{percent(share)}</td>" for _, share in shares)
    changes = (row.change_us_median, row.worst.change_us, row.best.change_us)
    cells += "".join(f"<td>{_signed(change_us)}</td>" for change_us in changes)
    return f'<tr><th scope="row">{escape(name)}</th><td class="text">{bar}</td>{cells}</tr>'


def _changed_table(requests: Sequence[ChangedRequest], first: str, other: str) -> str:
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            "request", f"id<small>{escape(first)}</small>", f"id<small>{escape(other)}</small>",
            "prompt<small>tokens</small>", "output<small>tokens</small>", escape(first), escape(other), "change",
        )
    )  # fmt: skip
    rows = [
        f'<tr><th scope="row"><span class="label">{escape(request.label or str(request.request_ids[0]))}</span></th>'
        f"<td>{request.request_ids[0]}</td><td>{request.request_ids[1]}</td>"
        f"<td>{count(request.prompt_tokens)}</td><td>{count(request.output_tokens)}</td>"
        f"<td>{duration(request.first_us)}</td><td>{duration(request.other_us)}</td><td>{_signed(request.change_us)}</td></tr>"
        for request in requests
    ]
    return table(head, rows, "Most changed requests")


def _signed(us: float) -> str:
    return "0" if us == 0 else f"{'+' if us > 0 else '−'}{duration(abs(us))}"  # noqa: RUF001  a minus sign


# ------------------------------------------------------------------------------------------------------------- figures


def _figures(found: Comparison) -> str:
    head = '<th scope="col">figure</th>' + "".join(f'<th scope="col">{escape(run.name)}</th>' for run in found.runs[:1])
    head += "".join(
        f'<th scope="col">{escape(run.name)}</th><th scope="col" class="text">against {escape(found.runs[0].name)}</th>'
        for run in found.runs[1:]
    )
    intervals = {row.name: row for row in found.intervals}
    rows, group = [], ""
    for each in found.figures:
        if each.group != group:
            group = each.group
            rows.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{2 * len(found.runs)}">{escape(group)}</th></tr>'
            )
        rows.append(_figure_row(each, intervals.get(each.name)))
    return f"""<section>
<h2>Every figure</h2>
<p class="lead">Below a figure is its interval, if the run has one. A verdict of better or worse is given only if one
direction is better for users or for the machine.</p>
{table(head, rows, "Every figure of every run")}
</section>"""


def _figure_row(each: Figure, sure: IntervalRow | None) -> str:
    cells = ""
    for place, value in enumerate(each.values):
        ends = None if sure is None else sure.intervals[place]
        small = f"<small>{unbroken(span(_show(ends[0], each.kind), _show(ends[1], each.kind)))}</small>" if ends else ""
        cells += f"<td>{_show(value, each.kind)}{small}</td>"
        if place == 0:
            continue
        moved = each.changes[place - 1]
        words = f'<span class="moved {moved.verdict}">{MARKS[moved.verdict]}{escape(moved.words)}</span>'
        overlaps = None if sure is None else sure.overlaps[place - 1]
        verdict = "" if overlaps is None else "intervals overlap" if overlaps else "intervals are apart"
        notes = [show_ratio(moved.ratio)] if moved.ratio is not None and moved.verdict != "same" else []
        notes += [verdict] if verdict else []
        below = f"<small>{', '.join(notes)}</small>" if notes else ""
        cells += f'<td class="text">{words}{below}</td>'
    return f'<tr><th scope="row">{escape(each.title)}</th>{cells}</tr>'


MARKS: dict[Verdict, str] = {"better": "✓ ", "worse": "✕ ", "same": "", "changed": "", "unknown": ""}


def _show(value: float | None, kind: Kind) -> str:
    if value is None:
        return NOTHING
    if kind == "us":
        return duration(value)
    if kind == "times":
        return show_ratio(value)
    return percent(value) if kind == "share" else count(value) if kind == "count" else digits(value)


def _commands(found: Comparison) -> str:
    each = "".join(
        f'<h3 class="pair">{escape(run.name)}</h3><p class="lead">{escape(str(run.folder))}; calibration: '
        f'{escape(run.calibration)}</p><div class="command"><pre>{escape(str(run.about.get("command", "")))}</pre>'
        '<button type="button" data-copy hidden>Copy</button></div>'
        for run in found.runs
    )
    return f"<section><h2>How to reproduce the runs</h2>{each}</section>"
