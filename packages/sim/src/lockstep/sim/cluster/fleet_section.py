"""The section of a cluster's report about replicas that come and go: their number and their cost over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.sim.cluster.prices import HOUR_US
from lockstep.sim.report.parts import escape, table
from lockstep.sim.report.pictures import Axis, picture_figure, steps_picture
from lockstep.sim.results.results import show_us
from lockstep.sim.results.text import digits

ROWS_MAX = 48  # of the table of hours or days
MINUTE_US = HOUR_US / 60
TIME_STEPS = tuple(
    MINUTE_US * minutes for minutes in (1 / 60, 1 / 6, 1 / 2, 1, 5, 15, 30, 60, 120, 180, 360, 720, 1440)
)
COUNT_STEPS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def time_text(us: float) -> str:
    """Return a time since the start of a run, from an hour on in hours."""
    return f"{us / HOUR_US:.3g} h" if us >= HOUR_US else show_us(us) if us else "0"


def fleet_section(autoscale: Mapping[str, Any]) -> str:
    """Return the section from the `autoscale` part of a run; empty if no time passed."""
    replicas = [(float(us), float(count)) for us, count in autoscale["replicas_by_time"]]
    if not replicas:
        return ""
    end_us = autoscale["replica_hours_fixed"] * HOUR_US / max(autoscale["replicas_given"], 1)
    end_us = max(end_us, replicas[-1][0] + 1.0)
    x = Axis("time since the start", 0.0, end_us, time_text, steps=TIME_STEPS)
    y = Axis("replicas", 0.0, 1.12 * max(count for _, count in replicas), lambda count: f"{count:g}", steps=COUNT_STEPS)
    about = (
        f"{autoscale['replicas_mean']:.2f} replicas on average, at most {autoscale['replicas_max']}; "
        f"{autoscale['starts']} started"
    )
    figures = [
        picture_figure(
            "Replicas", "paid replicas", steps_picture("Replicas over time", about, x, y, replicas, end_us), about
        )
    ]
    costs = [(float(us), float(usd)) for us, _, usd in autoscale.get("usd_by_time", ())]
    rows = ""
    if len(costs) > 1:
        of = "hour" if costs[1][0] - costs[0][0] <= HOUR_US else "day"
        dollars = Axis("dollars", 0.0, 1.12 * max(usd for _, usd in costs) or 1.0, lambda usd: f"{usd:.2f}")
        words = f"{autoscale['usd']:.2f} $ in all; every replica all the time would be {autoscale['usd_fixed']:.2f} $"
        picture = steps_picture(f"Cost by {of}", words, x, dollars, costs, end_us)
        figures.append(picture_figure(f"Cost by {of}", f"$ per {of}", picture, words))
        head = "".join(f'<th scope="col" class="text">{title}</th>' for title in (f"{of} from", "replicas, mean", "$"))
        cells = [(time_text(us), digits(mean), f"{usd:.2f}") for us, mean, usd in autoscale["usd_by_time"][:ROWS_MAX]]
        lines = ["<tr>" + "".join(f'<td class="text">{escape(cell)}</td>' for cell in line) + "</tr>" for line in cells]
        rows = table(head, lines, f"Replicas and cost by {of}")
    elif "usd" in autoscale:
        rows = (
            f'<p class="lead">{autoscale["usd"]:.2f} $ at {autoscale["usd_per_gpu_hour"]:g} $ per GPU-hour; every '
            f"replica all the time would be {autoscale['usd_fixed']:.2f} $.</p>"
        )
    return f"""<section id="fleet" aria-labelledby="fleet-h">
<h2 id="fleet-h">Replicas that come and go</h2>
<p class="lead">A replica is paid from its start until it is released, cold start included.</p>
<div class="grid2">
{chr(10).join(figures)}
</div>
{rows}
</section>"""
