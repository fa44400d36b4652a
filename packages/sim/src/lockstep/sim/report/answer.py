"""The top of the page: the question, the answer in one sentence, and its evidence."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sim.metrics.intervals import coverage_text, leverage_text
from lockstep.sim.report.parts import escape
from lockstep.sim.report.report_run import ReportRun
from lockstep.sim.results.slo_rows import Compared, unsure
from lockstep.sim.results.text import count, digits, duration, percent, span

LOGO = (
    '<svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true"><g fill="currentColor">'
    '<path d="M2 3h6v6H2zM2 13h6v6H2z"/><path d="M11 3h10v6H11zM11 13h10v6H11z" opacity=".55"/>'
    "</g></svg>"
)


def answer(
    runs: Sequence[ReportRun], title: str, subtitle: str, headline: str | None, *, of_parts: bool = False
) -> str:
    """Return the head of the page as HTML. With `of_parts` it describes the first run; the other runs are its parts."""
    runs = runs[:1] if of_parts else runs
    alone = len(runs) == 1
    kind = "a simulated cluster" if of_parts else "a simulated run" if alone else f"{len(runs)} simulated runs"
    below = f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    if alone:
        proof = f'<p class="evidence">{escape(_evidence(runs[0]))}</p>{slo_list(runs[0])}{limits(runs[0])}'
    else:
        proof = f'<p class="evidence">{escape(_evidence_of_many(runs))}</p>'
    return head(f"report of {kind}", title, below, headline or _headline(runs), proof)


def head(kind: str, title: str, below: str, headline: str, proof: str) -> str:
    """Return the head of any page: kind, question, answer. `below` and `proof` are HTML already."""
    return f"""<header id="answer">
<p class="mark">{LOGO}<span><b>Lockstep</b> {escape(kind)}</span></p>
<h1>{escape(title)}</h1>{below}
<p class="answer">{escape(headline)}</p>
{proof}
</header>"""


def _headline(runs: Sequence[ReportRun]) -> str:
    """Return an answer made from the numbers, for callers without a headline."""
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


def _evidence_of_many(runs: Sequence[ReportRun]) -> str:
    """Return latency and load of the last run that meets its SLOs, and the bottleneck of the next one."""
    met = [key for key, run in enumerate(runs) if run.meets_slos]
    text = ""
    if met:
        run = runs[met[-1]]
        figures = [
            f"TTFT p99 {duration(run.summary('latency', 'ttft_us_p99'))}",
            f"TPOT p99 {duration(run.summary('latency', 'tpot_us_p99'))}",
            f"{digits(run.summary('throughput', 'output_tokens_per_s'))} output tokens/s",
            f"KV at most {percent(run.summary('kv', 'used_share_max'))} held",
        ]
        text = f"At {run.name}: {', '.join(figures)}. "
    missed = [run for run in runs[met[-1] + 1 if met else 0 :] if run.meets_slos is False]
    return text + (f"Bottleneck at {missed[0].name}: {missed[0].bottleneck}." if missed else "")


def limits(run: ReportRun) -> str:
    """Return the bottleneck of the run and the calibration of its times, as HTML."""
    return f'<dl class="limits"><div><dt>Bottleneck</dt><dd>{bottleneck_html(run)}</dd></div>{_certainty(run)}</dl>'


def bottleneck_html(run: Compared) -> str:
    """Return the name of the bottleneck and its evidence, as HTML."""
    found = run.bottleneck
    return f"<b>{escape(found.name)}</b> {escape(found.evidence)}"


def _certainty(run: ReportRun) -> str:
    if run.intervals is None:
        words = f"{run.calibration}; no intervals were worked out" if run.calibration else ""
    else:
        low, high = run.intervals["time_factors"]
        times = f"batches may take {low:.2f} to {high:.2f} times as long"
        words = f"{run.calibration}; intervals ({coverage_text(run.intervals)}) stand below the answers: {times}"
        words += f"; {why}" if (why := leverage_text(run.intervals)) else ""
    return f"<div><dt>Calibration</dt><dd>{escape(words)}</dd></div>" if words else ""


def slo_list(run: Compared) -> str:
    """Return each SLO with its verdict, and its interval if the verdict is uncertain; empty without SLOs."""
    items = ""
    for slo in run.slos:
        kind, words = verdict(slo.met)
        ends = unsure(run, slo)
        doubt = f"; not sure: {span(duration(ends[0]), duration(ends[1]))}" if ends is not None else ""
        items += (
            f'<li class="slo {kind}"><b>{words}</b> '
            f"<span>{escape(slo.title)}: {escape(slo.measured)}, limit {duration(slo.bound_us)}{doubt}</span></li>"
        )
    return f'<ul class="slos" aria-label="SLOs">{items}</ul>' if items else ""


def verdict(met: bool | None) -> tuple[str, str]:
    """Return the CSS class and the text of a verdict. A sign and a word carry it, so that colour is not needed."""
    if met is None:
        return "unknown", "? no data"
    return ("met", "✓ met") if met else ("missed", "✕ missed")
