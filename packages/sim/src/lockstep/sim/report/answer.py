"""The top of the page: the question, the answer in one sentence, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.sim.report.report_run import ReportRun, SloRow
from lockstep.sim.report.text import count, duration

LOGO = (
    '<svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true"><g fill="currentColor">'
    '<path d="M2 3h6v6H2zM2 13h6v6H2z"/><path d="M11 3h10v6H11zM11 13h10v6H11z" opacity=".55"/>'
    "</g></svg>"
)


def answer(runs: Sequence[ReportRun], title: str, subtitle: str, headline: str | None) -> str:
    """The head of the page as HTML."""
    alone = len(runs) == 1
    kind = "a simulated run" if alone else f"{len(runs)} simulated runs"
    below = f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    proof = f'<p class="evidence">{escape(_evidence(runs[0]))}</p>{slo_list(runs[0].slos)}' if alone else ""
    return head(f"report of {kind}", title, below, headline or _headline(runs), proof)


def head(kind: str, title: str, below: str, headline: str, proof: str) -> str:
    """The head of any page: what it is, the question, the answer; `below` and `proof` are HTML already."""
    return f"""<header id="answer">
<p class="mark">{LOGO}<span><b>Lockstep</b> {escape(kind)}</span></p>
<h1>{escape(title)}</h1>{below}
<p class="answer">{escape(headline)}</p>
{proof}
</header>"""


def _headline(runs: Sequence[ReportRun]) -> str:
    """An answer made from the numbers, for callers that bring none."""
    if len(runs) > 1:
        met = [run for run in runs if run.meets_slos]
        if met:
            return f"Meets the SLOs up to {met[-1].name}"
        return "No run meets the SLOs" if any(run.slos for run in runs) else f"{len(runs)} runs compared"
    run = runs[0]
    if run.summary("requests", "completed") == 0:
        return "No request was completed"
    missed = [slo.title for slo in run.slos if not slo.met]
    if missed:
        return f"Misses the SLO on {' and '.join(missed)}"
    if run.slos:
        return {1: "Meets its SLO", 2: "Meets both SLOs"}.get(len(run.slos), f"Meets all {len(run.slos)} SLOs")
    return f"Half the requests see their first token within {duration(run.summary('latency', 'ttft_us_p50'))}"


def _evidence(run: ReportRun) -> str:
    completed, arrived = run.summary("requests", "completed"), run.summary("requests", "arrived")
    text = f"{count(completed)} of {count(arrived, 'request')} got their whole answer"
    makespan_us = run.summary("throughput", "makespan_us")
    if makespan_us:
        text += f" in {duration(makespan_us)} of simulated time"
    p50_us, p99_us = run.summary("latency", "ttft_us_p50"), run.summary("latency", "ttft_us_p99")
    if completed == 1:
        text += f". The first token came after {duration(p50_us)}"
    elif p50_us is not None:
        text += f". Half had their first token within {duration(p50_us)}, and 99 % within {duration(p99_us)}"
    tpot_us = run.summary("latency", "tpot_us_p50")
    if tpot_us is not None:
        text += f"; each further token took {duration(tpot_us)} in the median"
    return text + "."


def slo_list(slos: Sequence[SloRow]) -> str:
    """Each SLO with its verdict; empty without any."""
    items = "".join(
        f'<li class="slo {verdict(slo.met)[0]}"><b>{verdict(slo.met)[1]}</b> '
        f"<span>{escape(slo.title)}: {escape(slo.measured)}, limit {duration(slo.bound_us)}</span></li>"
        for slo in slos
    )
    return f'<ul class="slos" aria-label="SLOs">{items}</ul>' if items else ""


def verdict(met: bool | None) -> tuple[str, str]:
    """Class and words. A sign and a word say it, so that the colour need not."""
    if met is None:
        return "unknown", "? no data"
    return ("met", "✓ met") if met else ("missed", "✕ missed")
