"""Sections of a plan's page: the front of cost and latency, splits as a heat map, growth, and what would change it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.sim.plan.sensitivity import Assumption, assumptions_of, next_questions
from lockstep.sim.report.parts import escape, legend, table
from lockstep.sim.report.pictures import Axis, Point, PointKind, picture_figure, points_picture
from lockstep.sim.results.results import show_us
from lockstep.sim.results.text import digits

if TYPE_CHECKING:
    from lockstep.sim.plan.answer import PlanAnswer
    from lockstep.sim.plan.search import Candidate

HEAT_STEPS = 5
LABELS_MAX = 14  # configurations with a number beside their point; of more, only those of the front


def front_section(answer: PlanAnswer) -> str:
    """Return a picture for each SLO: cost against latency, with intervals as bars; empty with fewer than two points."""
    from lockstep.sim.plan.answer import gpu_hours_per_million, usd_per_million

    winner = answer.winner
    found = [c for c in answer.candidates if c.best is not None]
    priced = all(c.usd_per_gpu_hour is not None for c in found)
    costs = {c.configuration.number: (usd_per_million if priced else gpu_hours_per_million)(c) for c in found}
    found = [c for c in found if costs[c.configuration.number] is not None]
    if winner is None or len(found) < 2:
        return ""
    unit = "$" if priced else "GPU-hours"
    figures = []
    for number, slo in enumerate(answer.question.slos):
        points = []
        for c in found:
            assert c.best is not None
            own, interval = c.configuration.number, c.best.intervals[number]
            if not math.isfinite(interval.value):
                continue
            low, high = (end if math.isfinite(end) else interval.value for end in (interval.low, interval.high))
            label = f"winner: {c.configuration.name}" if c is winner else f"{own}"
            kind: PointKind = "best" if c is winner else "other"
            points.append(Point(label, float(costs[own] or 0.0), interval.value, low, high, kind))
        if len(points) < 2:
            continue
        points = _with_front(points)
        name = str(slo).partition("=")[0]
        y = Axis.of(name, [*(p.high for p in points), *(p.y for p in points), slo.bound_us], show_us)
        x = Axis.of(f"{unit} per million output tokens", [p.x for p in points], digits)
        about = (
            f"{len(points)} configurations; the winner, {winner.configuration.name}, costs "
            f"{digits(float(costs[winner.configuration.number] or 0.0))} {unit}. The table below has all values."
        )
        marks = legend(
            ("dot decode", "winner"), ("ring decode", "none is cheaper and faster"), ("ring", "others"),
            ("whisker", "interval"), ("line limit", "SLO"),
        )  # fmt: skip
        bound = f"SLO: {show_us(slo.bound_us)}"
        picture = points_picture(f"Cost against {name}", about, x, y, points, (slo.bound_us, bound))
        figures.append(picture_figure(f"Cost against {name}", name, picture, "", marks))
    if not figures:
        return ""
    return f"""<section id="front" aria-labelledby="front-h">
<h2 id="front-h">What less latency costs</h2>
<p class="lead">Each point is a configuration at the load that it serves, with its number in the table below. On the
dashed line none is both cheaper and faster than another one.</p>
<div class="grid2">
{chr(10).join(figures)}
</div>
</section>"""


def _with_front(points: list[Point]) -> list[Point]:
    """Return the points with those marked that no other one beats in both cost and latency."""
    lowest, found = math.inf, []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        on_front = point.y < lowest
        lowest = min(lowest, point.y)
        kind: PointKind = "best" if point.kind == "best" else "front" if on_front else "other"
        label = point.label if kind != "other" or len(points) <= LABELS_MAX else ""
        found.append(replace(point, kind=kind, label=label))
    return found


def split_section(answer: PlanAnswer) -> str:
    """Return the load by the numbers of prefill and decode engines as a table with shades; empty without splits."""
    groups: dict[str, dict[tuple[int, int], float | None]] = {}
    for c in answer.candidates:
        if c.split is None:
            continue
        sides = c.split
        own = c.configuration.chosen.get("tp", answer.question.common.get("tp", 1))
        tps = [side.tp or own for side in (sides.prefill, sides.decode)]
        name = f"{c.configuration.gpu}, prefill tp={tps[0]}, decode tp={tps[1]}"
        cell = sides.prefill.engines, sides.decode.engines
        groups.setdefault(name, {})[cell] = _load_of(c)
    tables = [_heat(name, cells) for name, cells in groups.items() if len(cells) > 1]
    if not tables:
        return ""
    return f"""<section id="splits" aria-labelledby="splits-h">
<h2 id="splits-h">How many engines prefill, and how many decode</h2>
<p class="lead">The load that one replica of each split sustains. Darker is more; a load in brackets is that of
short simulations only.</p>
{chr(10).join(tables)}
</section>"""


def _load_of(candidate: Candidate) -> float | None:
    """Return the load that a replica sustains; negative if short simulations alone have found it; None: unknown."""
    best = candidate.best
    if best is not None:
        return best.served / best.replicas
    return None if candidate.narrow_met is None else -candidate.narrow_met


def _heat(name: str, cells: dict[tuple[int, int], float | None]) -> str:
    prefills, decodes = sorted({p for p, _ in cells}), sorted({d for _, d in cells})
    most = max((abs(load) for load in cells.values() if load is not None), default=0.0)
    head = '<th scope="col" class="text">prefill engines</th>'
    head += "".join(f'<th scope="col" class="text">{count} decode</th>' for count in decodes)
    rows = []
    for prefill in prefills:
        row = f'<th scope="row">{prefill}</th>'
        for decode in decodes:
            load = cells.get((prefill, decode))
            if load is None:
                row += '<td class="heat text">-</td>'
                continue
            step = min(HEAT_STEPS, 1 + int(HEAT_STEPS * abs(load) / most)) if most else 1
            text = digits(load) if load > 0 else f"({digits(-load)})"
            row += f'<td class="heat text h{step}">{escape(text)}</td>'
        rows.append(f"<tr>{row}</tr>")
    return f'<h3 class="pair">{escape(name)}</h3>\n{table(head, rows, f"Load by split: {name}")}'


def forecast_section(answer: PlanAnswer) -> str:
    """Return the answers at later loads as a table; empty without any."""
    if not answer.forecast:
        return ""
    head = "".join(
        f'<th scope="col" class="text">{title}</th>' for title in ("load", "factor", "GPUs", "$/h", "configuration")
    )
    rows = []
    for one in answer.forecast:
        usd = "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.2f}"
        cells = (digits(one.load), f"{one.factor:g}", str(one.gpus or "-"), usd, one.configuration or one.headline)
        rows.append("<tr>" + "".join(f'<td class="wrapped text">{escape(cell)}</td>' for cell in cells) + "</tr>")
    return f"""<section id="growth" aria-labelledby="growth-h">
<h2 id="growth-h">When the load grows</h2>
{table(head, rows, "Answers at later loads")}
</section>"""


def sensitivity_section(answer: PlanAnswer, winner: Candidate) -> str:
    """Return which assumptions would change the winner, and the next questions, each with its command."""
    from lockstep.sim.plan.answer import limit_of
    from lockstep.sim.plan.serve_command import simulate_command

    changing = assumptions_of(answer.question, answer.candidates, winner)
    asking = next_questions(answer.question, winner, limit_of(winner), simulate_command(winner))
    found = _listed(changing) if changing else '<p class="lead">No other GPU with a price was searched.</p>'
    return f"""<section id="sensitivity" aria-labelledby="sensitivity-h">
<h2 id="sensitivity-h">What would change the answer</h2>
{found}
</section>
<section id="next" aria-labelledby="next-h">
<h2 id="next-h">What to ask next</h2>
{_listed(asking)}
</section>"""


def _listed(found: list[Assumption]) -> str:
    items = "".join(f"<li>{escape(one.text)}<pre>{escape(one.command)}</pre></li>" for one in found)
    return f'<ul class="next">{items}</ul>'
