"""A finished simulation of a cluster: its engines, its metrics, its remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.core.contract.events import RequestId
from lockstep.sim.cluster.prices import HOUR_US
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.cost import Calibration
from lockstep.sim.cost.power import Energy, describe_energy, energy_line
from lockstep.sim.metrics.balance import balance
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.results.results import show_us
from lockstep.sim.run.energy import energy_of, site_of
from lockstep.sim.run.simulate import Run

if TYPE_CHECKING:
    from lockstep.sim.metrics.intervals import Intervals


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """A finished simulation of a cluster."""

    setup: ClusterSetup
    engines: tuple[Run, ...]
    data: RunData  # all engines together, with the latencies of the router's clients
    routed_by_reason: Mapping[str, int]
    never_sent: int
    interrupted: bool
    stopped_early: bool  # `give_up` stopped the arrivals
    cpu_s: float
    intervals: Intervals | None = None  # see intervals_of
    autoscale: Mapping[str, Any] | None = None  # see Cluster.describe_scaling
    admission: Mapping[str, Any] | None = None  # see Cluster.describe_admission
    sent: Sequence[RequestId] = ()  # see Cluster.sent
    spent: tuple[Energy, float] | None = None  # energy and GPU-hours of a run without its batches

    def without_batches(self) -> ClusterRun:
        """Return the run without its lists of batches, the most of its memory. Reports and traces need them."""
        engines = tuple(replace(one, data=one.data.without_batches()) for one in self.engines)
        return replace(self, engines=engines, data=self.data.without_batches(), spent=self.machine_energy())

    @property
    def calibration(self) -> Calibration:
        return self.setup.engines[0].calibration

    @property
    def batches(self) -> int:
        return sum(run.batches for run in self.engines)

    def metrics(self) -> dict[str, Any]:
        """Return the contents of metrics.json: all engines together, then each engine."""
        return {
            "about": self.about(),
            **self.data.summary,
            **({} if (energy := self.energy()) is None else {"energy": energy}),
            **({} if self.intervals is None else {"intervals": self.intervals.describe()}),
            "router": {"routed_by_reason": dict(self.routed_by_reason)},
            **({} if self.autoscale is None else {"autoscale": dict(self.autoscale)}),
            **({} if self.admission is None else {"admission": dict(self.admission)}),
            "balance": self.balance(),
            "engines": [run.data.summary for run in self.engines],
        }

    def machine_energy(self) -> tuple[Energy, float] | None:
        """Return the energy of the machines and their GPU-hours; None if the power of a GPU is not known."""
        if self.spent is not None:
            return self.spent
        paid_s = 0.0 if self.autoscale is None else 3600 * float(self.autoscale["gpu_hours"])
        return energy_of([(one.setup, one.data) for one in self.engines], paid_s)

    def energy(self) -> dict[str, Any] | None:
        """Return the energy and carbon of the run, see `describe_energy`; None if the power of a GPU is not known."""
        found = self.machine_energy()
        if found is None:
            return None
        tokens = self.data.summary["throughput"]["output_tokens"]
        return describe_energy(found[0], site_of(self.setup.scenario.base), tokens, found[1])

    def balance(self) -> dict[str, Any]:
        """Return the evenness of the work of the engines; see `metrics.balance`."""
        weights = [share.weight for share in self.setup.shares]
        makespan_us = self.data.summary["throughput"]["makespan_us"]
        return balance([run.data.summary for run in self.engines], weights, makespan_us)

    def about(self) -> dict[str, Any]:
        """Return `ClusterSetup.about` with the facts that qualify the numbers: interruption, clamped, unsent turns."""
        return {
            **self.setup.about(),
            "interrupted": self.interrupted,
            "clamped_requests": sum(run.clamped for run in self.engines),
            "never_sent_turns": self.never_sent,
        }

    def remarks(self) -> list[str]:
        """Return remarks to be shown with the results, one line each."""
        together = Run(
            setup=self.setup.engines[0],
            data=self.data,
            batches=self.batches,
            clamped=sum(run.clamped for run in self.engines),
            rejected=sum((run.rejected for run in self.engines), Counter()),
            never_sent=self.never_sent,
            interrupted=self.interrupted,
            cpu_s=self.cpu_s,
            intervals=self.intervals,
        )
        lines = together.remarks_on_requests()
        if self.setup.hands_over and self.intervals is not None:
            lines.append("handovers between engines were never measured; intervals do not cover that")
        if self.autoscale is not None:
            lines.append(
                "autoscale: {replica_hours:.2f} replica-hours ({gpu_hours:.2f} GPU-hours); all of them all the time "
                "would be {replica_hours_fixed:.2f}; {replicas_mean:.2f} replicas on average, at most {replicas_max}, "
                "{starts} started".format(**self.autoscale)
            )
            if "usd" in self.autoscale:
                lines.append(
                    "cost: {usd:.2f} $ at {usd_per_gpu_hour:.2f} $ per GPU-hour ({price_kind}); all of them all the "
                    "time would be {usd_fixed:.2f} $".format(**self.autoscale)
                )
            if len(by_time := self.autoscale.get("usd_by_time", ())) > 2:
                dearest, cheapest = (pick(by_time[:-1], key=lambda row: row[2]) for pick in (max, min))
                lines.append(
                    f"cost over time: from {cheapest[2]:.2f} $ in the {_span(by_time)} from {show_us(cheapest[0])} to "
                    f"{dearest[2]:.2f} $ in that from {show_us(dearest[0])}"
                )
            lines.append(f"replicas over time: {replicas_text(self.autoscale['replicas_by_time'])}")
        if (energy := self.energy()) is not None:
            lines.append(energy_line(energy))
        if self.admission is not None:
            lines.append(
                "admission: {waited} requests waited at the router, {refused} were refused".format(**self.admission)
            )
        return lines


CHANGES_MAX = 24  # in a line about replicas over time; of more changes the largest number of each part is listed


def replicas_text(by_time: Sequence[Sequence[int]]) -> str:
    """Return the numbers of paid replicas over time, such as `2 from 0 us, 3 from 40.0 s`.

    Args:
        by_time: time in us and the number from then on, ascending. More than CHANGES_MAX changes are divided into parts
            of equal time, each with its largest number.
    """
    if len(by_time) <= CHANGES_MAX:
        return _changes(by_time)
    last_us, found = by_time[-1][0], []
    for part in range(CHANGES_MAX):
        start_us, stop_us = (round(last_us * (part + more) / CHANGES_MAX) for more in (0, 1))
        before = [count for us, count in by_time if us <= start_us][-1:]
        within = [count for us, count in by_time if start_us < us < stop_us]
        found.append((start_us, max([*before, *within], default=0)))
    changed = [one for at, one in enumerate(found) if at == 0 or found[at - 1][1] != one[1]]
    return f"at most {_changes(changed)}"


def _span(by_time: Sequence[Sequence[float]]) -> str:
    return "hour" if by_time[1][0] - by_time[0][0] <= HOUR_US else "day"


def _changes(by_time: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{count} from {show_us(us)}" for us, count in by_time)
