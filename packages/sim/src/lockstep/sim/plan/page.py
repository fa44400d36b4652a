"""The report of a plan: the answer, every configuration, the winner against the load, and its run in detail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.sim.plan.pictures import forecast_section, front_section, sensitivity_section, split_section
from lockstep.sim.report.answer import head
from lockstep.sim.report.details import details
from lockstep.sim.report.page import SPANS_MAX, whole_page
from lockstep.sim.report.parts import escape, figure, legend, table
from lockstep.sim.report.payload import Json, run_payload
from lockstep.sim.report.report_run import ReportRun
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.results.slo_rows import SloRow
from lockstep.sim.results.text import digits

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.sim.plan.answer import PlanAnswer
    from lockstep.sim.plan.search import Candidate, Evaluation

SPANS = SPANS_MAX // 4


def render_plan(answer: PlanAnswer) -> str:
    """Return the page as text. The winner's first long run is simulated once more for its details."""
    question, winner = answer.question, answer.winner
    title = f"{question.model} on {', '.join(question.gpus)}"
    remarks = "".join(f"<li>{escape(line)}</li>" for line in answer.remarks())
    below = f'<p class="subtitle">{escape(answer.workload_line)}</p>'
    body = [head("plan", title, below, answer.headline, ""), front_section(answer), _configurations(answer, remarks)]
    body += [section for section in (split_section(answer), forecast_section(answer)) if section]
    data: Json = {"runs": [], "first": 0}
    if winner is not None:
        points = sweep(winner)
        body += [sensitivity_section(answer, winner), _commands(winner)]
        if len(points) > 1:
            data["compare"] = _compare_payload(winner, points)
            body.append(_compare([slo.title for slo in _slo_rows(winner)]))
        run = _winner_run(winner)
        payload = run_payload(run, SPANS)
        data["runs"] = [payload]
        body.append(
            f"<section><h2>The winner at {escape(_load(winner))}</h2></section>{details(run, payload, 0, alone=True)}"
        )
    return whole_page(f"Plan: {title}", body, data, code_version())


def sweep(candidate: Candidate) -> list[Evaluation]:
    """Return the long runs of a configuration with the replicas of its answer, by load."""
    best = candidate.best
    assert best is not None
    return sorted((e for e in candidate.evaluations if e.replicas == best.replicas), key=lambda e: e.load)


def _load(candidate: Candidate) -> str:
    from lockstep.sim.plan.answer import show_load

    best = candidate.best
    assert best is not None
    return show_load(candidate.question, best.load)


def _configurations(answer: PlanAnswer, remarks: str) -> str:
    """Return the table of the terminal as HTML, followed by the remarks."""
    sides = answer.sides_table()
    below = (
        ""
        if sides is None
        else f"<h3 class='pair'>{escape(str(sides.title))}</h3>\n{_html(sides, 'Prefill and decode')}\n"
    )
    return f"""<section id="plan" aria-labelledby="plan-h">
<h2 id="plan-h">Every configuration</h2>
<p class="lead">&gt; is the winner. * is on the Pareto front: no other one is cheaper without being slower in some
SLO.</p>
{_html(answer.table(), "Configurations")}
{below}<ul class="remarks">{remarks}</ul>
</section>"""


def _html(shown: Table, caption: str) -> str:
    """Return a table of the terminal as HTML."""
    head_cells = "".join(
        f'<th scope="col" class="wrapped text">{escape(str(column.header))}</th>' for column in shown.columns
    )
    cells = [[str(cell) for cell in column.cells] for column in shown.columns]
    rows = []
    for row_cells in zip(*cells, strict=True):
        row = "".join(f'<td class="wrapped text">{escape(cell.strip())}</td>' for cell in row_cells)
        rows.append(f"<tr>{row}</tr>")
    return table(head_cells, rows, caption)


def _commands(winner: Candidate) -> str:
    from lockstep.sim.plan.serve_command import serve_commands, simulate_command
    from lockstep.sim.plan.vllm_command import vllm_command

    parts = []
    titled = [*zip(("Served, with the model in FOLDER", "Emulated"), serve_commands(winner), strict=False)]
    if (of_vllm := vllm_command(winner)) is not None:
        titled.append(("Served by vLLM, under Lockstep's scheduler", of_vllm))
    for about, command in titled:
        lacks = f"; not supported there yet: {escape(', '.join(command.lacks))}" if command.lacks else ""
        parts.append(f'<p class="lead">{about}{lacks}:</p>\n<div><pre>{escape(command.line)}</pre></div>')
    served = "\n".join(parts)
    return f"""<section id="commands" aria-labelledby="commands-h">
<h2 id="commands-h">The winner as commands</h2>
{served}
<p class="lead">Its simulation again:</p>
<div><pre>{escape(simulate_command(winner))}</pre></div>
</section>"""


def _slo_rows(candidate: Candidate) -> list[SloRow]:
    return [SloRow(str(slo).partition("=")[0], slo.bound_us, None, None) for slo in candidate.question.slos]


def _compare_payload(candidate: Candidate, points: Sequence[Evaluation]) -> Json:
    """Return the data of `compareChart`: each SLO with its interval, and the resulting rates."""
    by_rate = candidate.question.load == "rate"
    charts: list[Json] = []
    for number, slo in enumerate(_slo_rows(candidate)):
        lines = [
            {"name": "measured", "colour": "--decode", "values": [_plain(e.intervals[number].value) for e in points]},
            {
                "name": "up to",
                "colour": "--other",
                "values": [_plain(e.intervals[number].high) for e in points],
                "dash": [6, 4],
            },
        ]
        limit = {"limit_us": slo.bound_us, "limit_label": slo.bound}
        charts.append({"name": f"compare_slo{number}", "kind": "latency", "lines": lines, **limit})
    goodput = [e.steady("goodput_requests_per_s") for e in points]
    done = [e.steady("requests_per_s") for e in points]
    lines = [
        {"name": "goodput", "colour": "--decode", "values": goodput},
        {"name": "completed", "colour": "--other", "values": done, "dash": [6, 4]},
    ]
    charts.append({"name": "compare_goodput", "kind": "count", "unit": "requests/s", "limit_us": None, "lines": lines})
    return {
        "rates": [e.load for e in points],
        "names": None,
        "headings": [f"{digits(e.load)}{'/s' if by_rate else ' sessions'}: {e.status}" for e in points],
        "x_label": "offered load (per s)" if by_rate else "sessions at a time",
        "charts": charts,
    }


def _plain(value: float) -> float | None:
    """Return a rounded value, or None for an infinity, which JSON does not have."""
    return round(value, 3) if abs(value) < float("inf") else None


def _compare(slos: Sequence[str]) -> str:
    marks = legend(("line decode", "measured"), ("line dash", "upper end of the interval"), ("line limit", "SLO"))
    rates = legend(("line decode", "goodput: met every SLO"), ("line dash", "completed"))
    figures = [figure(f"compare_slo{number}", slo, legend=marks) for number, slo in enumerate(slos)]
    figures.append(figure("compare_goodput", "Requests per second", legend=rates))
    return f"""<section id="compare" aria-labelledby="compare-h">
<h2 id="compare-h">The winner against the load</h2>
<p class="lead">Each point is a load that was simulated at length. The largest one whose intervals all lie below their
limits is the answer.</p>
<div class="grid3">
{chr(10).join(figures)}
</div>
</section>"""


def _winner_run(winner: Candidate) -> ReportRun:
    from lockstep.sim.plan.serve_command import simulate_command
    from lockstep.sim.plan.trial import simulate_trial

    best = winner.best
    assert best is not None
    run = simulate_trial(best.first_trial)
    if run.interrupted:
        raise KeyboardInterrupt
    facts = {
        "model": run.setup.engines[0].model.name,
        "GPUs": f"{best.replicas} x {winner.gpus} x {run.setup.engines[0].gpu.name}",
        "router": run.setup.scenario.router.policy,
        "workload": run.setup.workload.source,
        "workload digest": run.setup.workload.digest,
        "cost model": str(run.setup.engines[0].cost.describe()["kind"]),
        "seed": str(best.first_trial.base.seed),
        "version": code_version(),
        "commit": code_commit() or "unknown",
        "command": simulate_command(winner),
    }
    return ReportRun(
        winner.configuration.name, facts, run.data, best.load if best.first_trial.base.concurrency is None else None
    )
