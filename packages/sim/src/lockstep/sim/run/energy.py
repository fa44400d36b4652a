"""The energy of simulated engines: their batches and the time for which they were paid, by `cost.power`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sim.cost.models import checked_weights_dtype, products_in_fp8
from lockstep.sim.cost.power import DevicePower, Energy, Site, WorkTime
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.encoding import gpus_of_a_scheduler
from lockstep.sim.run.setup import Setup
from lockstep.sim.scenario.scenario import Scenario


def site_of(scenario: Scenario) -> Site:
    """Return the site of a scenario. Raises ConfigError for values that no site has."""
    return Site(scenario.pue, scenario.grid_gco2_per_kwh)


def energy_of(engines: Sequence[tuple[Setup, RunData]], paid_s: float) -> tuple[Energy, float] | None:
    """Return the energy of engines, and their GPU-hours; None if the power of a GPU is not known.

    Args:
        paid_s: GPU-seconds of all of them for which they were up, work included; 0: from the first arrival to the last
            end of each.
    """
    total, gpu_hours = Energy(), 0.0
    works: list[tuple[float, WorkTime, float]] = []
    for setup, data in engines:
        tdp = setup.gpu.datasheet.get("power_w")
        if tdp is None:
            return None
        device = _device(setup, tdp.value)
        work = WorkTime(0.0, 0.0)
        for started_us, finished_us, new_tokens in data.packed.batches.parts("started_us", "finished_us", "new_tokens"):
            known = finished_us >= 0
            more = WorkTime.of(device, (finished_us - started_us)[known], new_tokens[known])
            work = WorkTime(work.busy_s + more.busy_s, work.computing_s + more.computing_s)
        works.append((tdp.value, work, device.gpus))
    spans = [data.span_us for _, data in engines if data.span_us[1] > data.span_us[0]]
    together_s = (max(stop for _, stop in spans) - min(start for start, _ in spans)) / 1e6 if spans else 0.0
    all_gpus = sum(gpus for _, _, gpus in works)
    for tdp_w, work, gpus in works:
        up_s = paid_s * gpus / all_gpus if paid_s else together_s * gpus
        total = total.plus(Energy.of(tdp_w, work, up_s))
        gpu_hours += max(up_s, work.busy_s) / 3600
    return total, gpu_hours


def _device(setup: Setup, tdp_w: float) -> DevicePower:
    scenario, sheet = setup.scenario, setup.gpu.datasheet
    weights = checked_weights_dtype(setup.model, scenario.weights_dtype)
    rate = sheet["bf16_tflops"]
    if products_in_fp8(setup.model, setup.gpu, weights, scenario.fp8_activations):
        rate = sheet["fp8_tflops"]
    elif weights == "nvfp4" and setup.gpu.has_fp4:
        rate = sheet["fp4_tflops"]
    gpus = gpus_of_a_scheduler(scenario.tp, scenario.attention_dp, rank_schedulers=scenario.rank_schedulers)
    return DevicePower(gpus * scenario.pp, tdp_w, float(setup.model.flops_per_token), rate.value * 1e12, scenario.pp)
