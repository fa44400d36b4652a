"""Assembly of a page: one file with all contents, and a policy that forbids it to load anything else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from lockstep.sim.report.answer import answer
from lockstep.sim.report.comparison import comparison, comparison_payload, switch
from lockstep.sim.report.details import details
from lockstep.sim.report.parts import escape
from lockstep.sim.report.payload import Json, run_payload
from lockstep.sim.report.report_run import ReportRun

PAGE_BYTES_MAX = 8_000_000
SPANS_MAX = 60_000  # spans of the GPU, and as many of the CPU, in one run; all runs of a page share twice as many
SPANS_MIN = 500


def write_report(
    path: str | Path,
    runs: Sequence[ReportRun],
    *,
    title: str,
    subtitle: str = "",
    headline: str | None = None,
    parts: str = "",
    sections: Sequence[str] = (),
) -> Path:
    """Write the report of `runs` to `path`. Several runs make a comparison, with a switch between them.

    Args:
        headline: the answer in a sentence, such as "Meets the SLOs up to 8 req/s on 1 x H200". By default it is made
            from the numbers.
        parts: a sentence about the parts of a run. With it the first run is a whole and the others are its parts, not
            runs at other loads.
        sections: HTML that follows the answer.
    Raises: ValueError without runs.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        render_report(runs, title=title, subtitle=subtitle, headline=headline, parts=parts, sections=sections),
        "utf-8",
        newline="\n",
    )
    return path


def render_report(
    runs: Sequence[ReportRun],
    *,
    title: str,
    subtitle: str = "",
    headline: str | None = None,
    parts: str = "",
    sections: Sequence[str] = (),
    bytes_max: int = PAGE_BYTES_MAX,
) -> str:
    """Return the page as text. Timelines are merged until it has at most `bytes_max` bytes or SPANS_MIN is reached."""
    if not runs:
        raise ValueError("a report needs at least one run, got none")
    spans_max = max(min(SPANS_MAX, 2 * SPANS_MAX // len(runs)), SPANS_MIN)
    while True:
        text = _render(runs, title, subtitle, headline, parts, spans_max, sections)
        if len(text.encode()) <= bytes_max or spans_max == SPANS_MIN:
            return text
        spans_max = max(spans_max // 2, SPANS_MIN)


def _render(
    runs: Sequence[ReportRun],
    title: str,
    subtitle: str,
    headline: str | None,
    parts: str,
    spans_max: int,
    sections: Sequence[str],
) -> str:
    payloads = [run_payload(run, spans_max) for run in runs]
    data: Json = {"runs": payloads, "first": 0 if parts else _first_shown(runs)}
    alone = len(runs) == 1
    body = [answer(runs, title, subtitle, headline, of_parts=bool(parts)), *sections]
    if not alone:
        data["compare"] = comparison_payload(runs, by_rate=not parts)
        body += [comparison(runs, parts), switch(runs)]
    body += [details(run, payloads[key], key, alone=alone) for key, run in enumerate(runs)]
    version = next((str(run.facts["version"]) for run in runs if "version" in run.facts), "")
    return whole_page(title, body, data, version)


def whole_page(title: str, body: Sequence[str], data: Json, version: str) -> str:
    """Return sections and the data of their charts as one file that loads nothing."""
    body = [*body, _footer(version)]
    script, style = _script(), _asset("vendor/uplot/uPlot.min.css") + "\n" + _asset("report/page.css")
    values = {
        "csp": f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "title": escape(title),
        "style": style,
        "body": "\n".join(body),
        # The data contains no "<", so no label can close the element around it.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": script,
    }
    # A single pass: inserted text is not substituted again, so a label in the form of a placeholder stays a label.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("report/page.html"))


def still_page(title: str, body: Sequence[str], style: str = "") -> str:
    """Return sections without charts as one file that loads and runs nothing, in the style of a report plus `style`."""
    style = _asset("report/page.css") + "\n" + style
    policy = f"default-src 'none'; style-src {_source(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    head = "".join(
        (
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style>',
        )
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n<main>\n' + "\n".join(
        [*body, "</main>\n</body>\n</html>\n"]
    )


def _first_shown(runs: Sequence[ReportRun]) -> int:
    """Return the run shown first: the last one that meets its SLOs, else the first."""
    return max((key for key, run in enumerate(runs) if run.meets_slos), default=0)


def _footer(version: str) -> str:
    by = f"Lockstep {version}".strip()
    return (
        f"<footer>Written by {escape(by)}. Times are simulated. Charts by uPlot (MIT license, in this file).</footer>"
    )


def _source(text: str) -> str:
    """Return the Content-Security-Policy source of one inline script or style: its hash, so that no other one runs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    place = files("lockstep.sim")
    for part in name.split("/"):
        place = place / part
    return place.read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _script() -> str:
    parts = ("vendor/uplot/uPlot.iife.min.js", "report/charts.js", "report/timeline.js", "report/page.js")
    notice = f"/*\n{_asset('vendor/uplot/LICENSE')}\n*/"
    return "\n".join([notice, *(_asset(part) for part in parts)])
