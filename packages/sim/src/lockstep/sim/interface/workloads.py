"""A workload as a frame."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.sim.interface.options import parsed

if TYPE_CHECKING:
    import polars

    from lockstep.sim.workload.workload import Workload


class WorkloadFrame:
    """A workload: a trace, a generator `gen:...`, a fitted model, or a mix of several."""

    def __init__(self, *sources: str | Path, **options: Any) -> None:
        """Open a workload; `options` are those of `lockstep workload describe`: rate, time_window, limit, seed, ...

        Raises: WorkloadError for a source that cannot be read or options that do not fit it.
        """
        from lockstep.sim.cli.workload import describe, open_sources

        named = [str(source) for source in sources]
        self._options = {"workload": named[0] if len(named) == 1 else named, **options}
        given = parsed(describe, "lockstep.Workload", {"workloads": named, **options})
        given.pop("as_json")
        self.opened: Workload = open_sources(given.pop("workloads"), given)

    def as_options(self) -> dict[str, Any]:
        """Return the options by which another command reads the same workload: sources, rate, time window, ..."""
        return dict(self._options)

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.opened.turns)

    @property
    def requests(self) -> polars.DataFrame:
        """One row per request: arrival in us, prompt and output tokens, predecessor (-1: none), label, tenant."""
        import polars as pl

        turns = self.opened.turns
        rows = [
            (t.arrival_us, t.prompt_tokens, t.output_tokens, -1 if t.after is None else t.after, t.label, t.tenant)
            for t in turns
        ]
        schema = {
            "arrival_us": pl.Int64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64, "after": pl.Int64,
            "label": pl.String, "tenant": pl.String,
        }  # fmt: skip
        return pl.DataFrame(rows, schema=schema, orient="row")

    def describe(self) -> Mapping[str, Any]:
        """Return all figures of the workload: times in us, lengths in tokens, shares of one."""
        from lockstep.sim.results.workload_figures import describe

        return describe(self.opened)

    def __str__(self) -> str:
        from lockstep.sim.results.workload_figures import description_lines

        return "\n".join(description_lines(self.describe()))

    def __repr__(self) -> str:
        return f"<lockstep.Workload {self.opened.name}: {len(self):,} requests>"
