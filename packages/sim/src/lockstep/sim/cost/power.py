"""Energy and carbon of a run, from the TDP of its GPUs and the utilisation of each batch. Estimates with intervals.

    power of a GPU = TDP x (share of a memory-bound pass + u x what a compute-bound pass draws beyond it)

u is the utilisation of the matrix units in a batch: the FLOPs of its new tokens by the rate that kernels reach. A GPU
without a batch draws the idle share. The rest of the node (CPUs, network, fans) is a share of the TDP of its GPUs, and
the facility multiplies both by its PUE. Low and high are the ends of the ranges of SHARES, all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import ConfigError

Int64s = NDArray[np.int64]
REACHED = 0.7  # of the data sheet's rate, by large products: see hardware.FRACTIONS
CASES = ("low", "likely", "high")


class TdpShare(NamedTuple):
    """A share of the TDP of a GPU: its range, with the source."""

    low: float
    likely: float
    high: float
    source: str


SHARES = {
    "idle": TdpShare(0.08, 0.12, 0.20, "estimate: 56 to 140 W of 700 W, weights in memory and no work"),
    "memory_bound": TdpShare(
        0.20, 0.43, 0.60, "decode on H200: 137 to 300 W of 700 W (arXiv 2605.11999); 0.60: estimate for large batches"
    ),
    "compute_bound": TdpShare(0.80, 0.95, 1.00, "estimate: large matrix products run at the power limit"),
    "rest_of_node": TdpShare(
        0.15, 0.40, 0.82, "DGX H100: 6.5 to 8.5 kW in use and 10.2 kW at most, of which GPUs 5.6 kW"
    ),
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where the machines are. Raises ConfigError for values that no site has."""

    pue: float
    grid_gco2_per_kwh: float

    def __post_init__(self) -> None:
        if not 1.0 <= self.pue < 10.0:
            raise ConfigError(
                f"`pue` must be from 1 to 10, got `{self.pue:g}`\nhint: energy of the facility by that of machines; "
                "1.1 is a large cloud, 1.56 the average of surveys"
            )
        if not 0.0 <= self.grid_gco2_per_kwh < 5_000.0:
            raise ConfigError(
                f"`grid_gco2_per_kwh` must be from 0 to 5000, got `{self.grid_gco2_per_kwh:g}`\n"
                "hint: grams of CO2 per kWh; 445 is the world average of 2024"
            )


class DevicePower(NamedTuple):
    """What determines the power of the GPUs of one engine."""

    gpus: float
    tdp_w: float
    flops_per_token: float
    flops_per_s: float  # of one GPU, by the data sheet, in the precision of the products
    stages: int = 1  # a batch occupies one of them at a time


class WorkTime(NamedTuple):
    """Time of batches on GPUs, in GPU-seconds: all of it, and the part that counts as compute-bound."""

    busy_s: float
    computing_s: float

    @classmethod
    def of(cls, device: DevicePower, took_us: Int64s, new_tokens: Int64s) -> WorkTime:
        """Return the work of batches; arrays are int64 [batches]."""
        took_s = took_us / 1e6 / device.stages
        needed_s = new_tokens * (device.flops_per_token / (device.gpus * device.flops_per_s * REACHED)) / device.stages
        return cls(float(took_s.sum()) * device.gpus, float(np.minimum(needed_s, took_s).sum()) * device.gpus)


class Energy(NamedTuple):
    """Energy of the machines in kWh, PUE not included: low, likely, high."""

    low: float = 0.0
    likely: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, tdp_w: float, work: WorkTime, paid_s: float) -> Energy:
        """Return the energy of GPUs that were paid for `paid_s` GPU-seconds, with their share of the node."""
        idle_s = max(paid_s - work.busy_s, 0.0)

        def kwh(case: int) -> float:
            idle, memory, compute, rest = (SHARES[name][case] for name in SHARES)
            seconds = idle_s * float(idle) + work.busy_s * float(memory)
            seconds += work.computing_s * (float(compute) - float(memory)) + max(paid_s, work.busy_s) * float(rest)
            return tdp_w * seconds / 3.6e6

        return cls(kwh(0), kwh(1), kwh(2))

    def plus(self, other: Energy) -> Energy:
        """Return the sum of both."""
        return Energy(*(one + more for one, more in zip(self, other, strict=True)))


def describe_energy(energy: Energy, site: Site, output_tokens: float, gpu_hours: float) -> dict[str, Any]:
    """Return kWh and grams of CO2 of the facility, together and per million output tokens, with their ranges."""
    found: dict[str, Any] = {"pue": site.pue, "grid_gco2_per_kwh": site.grid_gco2_per_kwh}
    per_million = 1e6 / output_tokens if output_tokens else None
    for case, kwh in zip(CASES, energy, strict=True):
        facility = kwh * site.pue
        grams = facility * site.grid_gco2_per_kwh
        found[case] = {
            "kwh": round(facility, 6),
            "gco2": round(grams, 3),
            "kwh_per_million_output_tokens": None if per_million is None else round(facility * per_million, 6),
            "gco2_per_million_output_tokens": None if per_million is None else round(grams * per_million, 3),
            "machine_w_per_gpu": round(kwh / gpu_hours * 1e3, 1) if gpu_hours else None,
        }
    found["sources"] = {name: share.source for name, share in SHARES.items()}
    return found


def energy_line(described: dict[str, Any]) -> str:
    """Return the energy and carbon of a million output tokens in a sentence."""
    low, likely, high = (described[case] for case in CASES)
    kwh, carbon = "kwh_per_million_output_tokens", "gco2_per_million_output_tokens"
    if likely[kwh] is None:
        return f"energy: {likely['kwh']:.3g} kWh, estimated from TDP ({low['kwh']:.2g} to {high['kwh']:.2g})"
    return (
        f"energy: {likely[kwh]:.3g} kWh per million output tokens ({low[kwh]:.2g} to {high[kwh]:.2g}, estimated from "
        f"TDP), {likely[carbon]:,.0f} g CO2 ({low[carbon]:,.0f} to {high[carbon]:,.0f}), at PUE {described['pue']:g} "
        f"and {described['grid_gco2_per_kwh']:g} g per kWh"
    )
