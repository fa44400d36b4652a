"""Charts of runs and plans by Altair, for notebooks and for files: PNG, SVG and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.interface.options import nearest

if TYPE_CHECKING:
    import altair
    import polars

    from lockstep.sim.results.slo_rows import SloRow

METRICS = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end to end", "queue": "in the queue"}
ARRIVALS = "arrivals"
POINTS_MAX = 2_000  # of a curve or a cloud; Altair refuses more than 5,000 rows


def _altair() -> Any:
    try:
        import altair
    except ImportError:
        raise ConfigError("charts need Altair\nhint: pip install 'lockstep[notebook]'") from None
    return altair


def run_chart(requests: polars.DataFrame, name: str, slos: Sequence[SloRow]) -> altair.Chart:
    """Return the distribution of a metric over requests, or TTFT by arrival, with the bounds of SLOs on the metric."""
    import polars as pl

    alt = _altair()
    if name not in (*METRICS, ARRIVALS):
        raise ConfigError(f"`{name}` is no chart of a run{nearest(name, [*METRICS, ARRIVALS])}")
    metric = "ttft" if name == ARRIVALS else name
    known = requests.filter(pl.col(f"{metric}_us").is_not_null())
    if name == ARRIVALS:
        shown = known.select(s=pl.col("arrival_us") / 1e6, ms=pl.col("ttft_us") / 1e3)
        shown = shown.gather_every(-(-shown.height // POINTS_MAX)) if shown.height > POINTS_MAX else shown
        marks = alt.Chart(shown).mark_circle(size=18, opacity=0.6)
        x = alt.X("s:Q", title="arrival (s)")
        cloud: altair.Chart = marks.encode(x=x, y=alt.Y("ms:Q", title="time to first token (ms)")).properties(
            title="TTFT by arrival"
        )
        return cloud
    values = known.select(ms=pl.col(f"{metric}_us") / 1e3).sort("ms").with_row_index("rank", offset=1)
    values = values.with_columns(share=pl.col("rank") / max(values.height, 1))
    step = -(-values.height // POINTS_MAX)
    values = pl.concat([values.gather_every(step), values.tail(1)]) if step > 1 else values
    curve = (
        alt.Chart(values)
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X("ms:Q", title=f"{METRICS[metric]} (ms)"),
            y=alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%")),
        )
    )
    bounds = [slo.bound_us / 1e3 for slo in slos if slo.metric == metric]
    rules = [
        alt.Chart(pl.DataFrame({"ms": [bound]})).mark_rule(strokeDash=[4, 4], color="#b3261e").encode(x="ms:Q")
        for bound in bounds
    ]
    chart: altair.Chart = alt.layer(curve, *rules).properties(title=f"Requests by {METRICS[metric]}")
    return chart


def front_chart(described: Mapping[str, Any], slo: int) -> altair.LayerChart:
    """Return cost against the latency of an SLO; `described` is `PlanAnswer.describe`."""
    import polars as pl

    alt = _altair()
    slos = described["question"]["slos"]
    if not 0 <= slo < len(slos):
        raise ConfigError(f"`slo` must be from 0 to {len(slos) - 1}, the SLOs of the question, got `{slo}`")
    rows = []
    for one in described["configurations"]:
        cost = one["usd_per_million_output_tokens"] or one["gpu_hours_per_million_output_tokens"]
        if one["best"] is None or cost is None:
            continue
        found = one["best"]["slos"][slo]
        name = " ".join([one["gpu"], *(f"{key}={value}" for key, value in one["settings"].items())])
        value, low, high = (found[key] for key in ("value_us", "low_us", "high_us"))
        if value is not None:
            rows.append(
                {
                    "configuration": name, "cost": cost, "ms": value / 1e3,
                    "low": (value if low is None else max(low, 0.0)) / 1e3,
                    "high": (value if high is None else high) / 1e3,
                    "kind": "winner" if one["number"] == described["winner"] else "other",
                }
            )  # fmt: skip
    if not rows:
        raise ConfigError("no configuration has an answer\nhint: the headline tells which load or SLO is out of reach")
    unit = "$" if any(one["usd_per_million_output_tokens"] for one in described["configurations"]) else "GPU-hours"
    base = alt.Chart(pl.DataFrame(rows))
    x = alt.X("cost:Q", title=f"{unit} per million output tokens")
    bars = base.mark_rule(opacity=0.6).encode(
        x=x, y=alt.Y("low:Q", title=f"{slos[slo].partition('=')[0]} (ms)"), y2="high:Q"
    )
    points = base.mark_point(filled=True, size=70).encode(
        x=x, y="ms:Q", shape="kind:N", color="kind:N", tooltip=["configuration", "cost", "ms", "low", "high"]
    )
    names = base.mark_text(align="left", dx=8).encode(x=x, y="ms:Q", text="configuration:N")
    chart: altair.LayerChart = alt.layer(bars, points, names).properties(title=described["headline"])
    return chart
