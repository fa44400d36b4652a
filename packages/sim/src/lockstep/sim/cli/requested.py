"""The scenario that the options of `lockstep simulate` request.

Both the command and the simulation of a stored run (`stored_command.py`) read their options here, so they accept the
same ones. Options without an effect on the simulation are in `run_options.RunOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.admission_options import parse_admission
from lockstep.sim.cli.cluster_options import check_router_options, cluster_given, router_given
from lockstep.sim.cluster.prices import parse_price
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup, parse_engines, parse_scaling
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import given_settings, parse_setting
from lockstep.sim.workload.mix import mix_of


def requested_of(options: Mapping[str, Any]) -> Scenario | ClusterScenario:
    """Return the scenario that the options of `lockstep simulate` describe, without those of `RunOptions`.

    Raises: click.UsageError for options that exclude each other; ConfigError or WorkloadError for invalid values.
    """
    given = dict(options)
    policy, cluster = router_given(given), cluster_given(given)
    gpu = given.pop("gpu")
    shared_out = "prefill_engines" in cluster or "decode_engines" in cluster
    _check_together(gpu, cluster, shared_out)
    base = Scenario(
        gpu=gpu or "",
        workload=mix_of(given.pop("workloads")),
        slos=tuple(map(Slo.parse, given.pop("slos"))),
        settings=given_settings(given),
        **given,
    )
    if not (cluster or policy or base.rank_schedulers):
        return base
    config = RouterConfig(**policy)
    check_router_options(policy, [config.policy])
    roles = {role: cluster.pop(f"{role}_engines", None) for role in ("prefill", "decode")}
    if shared_out:
        cluster["engines"] = tuple(_of_role(base, role, count) for role, count in roles.items())
        base = replace(base, gpu="")  # the engine groups name the GPU
    elif "engines" in cluster:
        cluster["engines"] = parse_engines(cluster["engines"], parse_setting)
    for name, parse in (("scaling", parse_scaling), ("dispatch", parse_admission), ("price", parse_price)):
        if name in cluster:
            cluster[name] = parse(cluster[name])
    return ClusterScenario(base=base, router=config, **cluster)


def _check_together(gpu: str | None, cluster: Mapping[str, Any], shared_out: bool) -> None:
    """Raise click.UsageError for options that exclude each other, or if one is missing."""
    if gpu is None and "engines" not in cluster:
        raise click.UsageError("Missing option '--gpu', or '--engines' for several kinds.")
    if "engines" in cluster and (gpu is not None or "replicas" in cluster):
        raise click.UsageError(
            "'--engines' sets the number and the GPU of engines: leave out '--gpu' and '--replicas'."
        )
    if shared_out and not ("prefill_engines" in cluster and "decode_engines" in cluster):
        raise click.UsageError("'--prefill-engines' and '--decode-engines' must be given together.")
    if shared_out and ("replicas" in cluster or "engines" in cluster):
        raise click.UsageError(
            "'--prefill-engines' and '--decode-engines' are numbers of engines: leave out '--replicas' and '--engines'."
        )
    if "price" in cluster and "scaling" not in cluster:
        raise click.UsageError("'--price' is the price of replicas that come and go: add '--autoscale'.")
    if not shared_out and "role=" not in cluster.get("engines", ""):
        flags = {"link_gbs": "--link-bandwidth", "link_latency_us": "--link-latency", "placement": "--placement"}
        for name, flag in flags.items():
            if name in cluster:
                raise click.UsageError(f"'{flag}' applies to prefill and decode engines; there are none.")


def _of_role(base: Scenario, role: str, count: int) -> EngineGroup:
    if count < 1:
        raise ConfigError(f"`{role}_engines` must be at least 1, got `{count}`")
    return EngineGroup(count=count, gpu=base.gpu, settings={"role": role})
