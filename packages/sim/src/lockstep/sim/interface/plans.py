"""Questions about capacity, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.sim.interface.options import config_errors, parsed
from lockstep.sim.interface.page import HtmlPage
from lockstep.sim.report.parts import escape

if TYPE_CHECKING:
    import altair
    import polars

    from lockstep.sim.plan.answer import PlanAnswer


@dataclass(frozen=True)
class PlanResult:
    """The answer to a question about capacity."""

    answer: PlanAnswer = field(repr=False)

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        return self.answer.headline

    @property
    def remarks(self) -> Sequence[str]:
        """What qualifies the answer, one line each."""
        return self.answer.remarks()

    @property
    def found(self) -> bool:
        """Whether a configuration serves the load within its SLOs."""
        return self.answer.winner is not None

    def describe(self) -> dict[str, Any]:
        """Return the whole answer as `lockstep plan --json` writes it."""
        return self.answer.describe()

    @property
    def configurations(self) -> polars.DataFrame:
        """One row per configuration: GPU, settings as text, verdict, load, replicas, cost, Pareto front."""
        import polars as pl

        described = self.describe()
        rows = []
        for one in described["configurations"]:
            best = one["best"] or {}
            settings = ", ".join(f"{key}={value}" for key, value in one["settings"].items())
            won = one["number"] == described["winner"]
            rows.append(
                {
                    "number": one["number"], "gpu": one["gpu"], "settings": settings, "verdict": one["verdict"],
                    "winner": won, "pareto": one["pareto"], "load": best.get("load"), "replicas": best.get("replicas"),
                    "usd_per_hour": one["usd_per_hour"],
                    "usd_per_million_output_tokens": one["usd_per_million_output_tokens"],
                    "limited_by": one["limited_by"],
                }
            )  # fmt: skip
        schema: dict[str, Any] = {
            "number": pl.Int64, "gpu": pl.String, "settings": pl.String, "verdict": pl.String, "winner": pl.Boolean,
            "pareto": pl.Boolean, "load": pl.Float64, "replicas": pl.Int64, "usd_per_hour": pl.Float64,
            "usd_per_million_output_tokens": pl.Float64, "limited_by": pl.String,
        }  # fmt: skip
        return pl.DataFrame(rows, schema=schema, orient="row")

    def chart(self, slo: int = 0) -> altair.LayerChart:
        """Return cost against the latency of one SLO as an Altair chart, intervals as bars, the winner named.

        Args:
            slo: number of the SLO, in the order of the question.
        Raises: ConfigError without Altair, or if no configuration has an answer.
        """
        from lockstep.sim.interface.charts import front_chart

        return front_chart(self.describe(), slo)

    def report(self) -> HtmlPage:
        """Return the page of the answer."""
        from lockstep.sim.plan.page import render_plan

        return HtmlPage(self.headline, render_plan(self.answer))

    def __str__(self) -> str:
        return "\n".join((self.headline, *self.remarks))

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.headline)}</b></p>{self.configurations._repr_html_()}"


def plan(*, out: str | Path | None = None, **options: Any) -> PlanResult:
    """Find the cheapest configuration that meets the SLOs at a rate, or the largest load that each one sustains.

    Args:
        out: folder that keeps the finished simulations, so that the same question continues where it stopped.
        options: those of `lockstep plan`: `model`, `gpus`, `workload`, `slo`, `rate`, `search`, ...
    Raises: ConfigError, WorkloadError, CatalogueError, CapacityError: bad options, as of the command.
    """
    from lockstep.host.options import take
    from lockstep.sim.cli.plan import PlanOptions, grown, question_of, usable_cores
    from lockstep.sim.cli.plan import plan as command
    from lockstep.sim.plan.ledger import TrialStore
    from lockstep.sim.plan.search import Progress, prepare
    from lockstep.sim.plan.solve import solve
    from lockstep.sim.plan.workers import workers_of

    params = parsed(command, "lockstep.plan", {**options, "out": out})
    given = take(PlanOptions, params)
    with config_errors():
        question = question_of(given, params)
        later = grown(question, given.growth)
    jobs = usable_cores() if given.jobs is None else given.jobs
    with workers_of(jobs, given.ray_address) as workers:
        return PlanResult(solve(question, prepare(question), later, workers, TrialStore(given.out), Progress()))
