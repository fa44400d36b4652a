"""What a command line of `lockstep simulate` asks to be simulated, as it is given and as a run folder kept it.

    asked_by_command("lockstep simulate --model qwen3-8b --gpu h200 --workload gen:n=500,rate=4 --replicas 2 --seed 7")

The command reads its options here, and so does whoever simulates a stored run again: an option that one of them knows,
both know. `SAYS_NOTHING` has the options that are no part of what is simulated, and why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.admission_options import parse_admission
from lockstep.sim.cli.settings import parse_setting
from lockstep.sim.cli.simulate import check_router_options, given_settings, router_given, simulate
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup, parse_engines, parse_scaling
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.mix import mix_of

SAYS_NOTHING = {
    "check": "how often invariants are checked changes nothing that is decided",
    "intervals": "two more simulations of the same, for error bars",
    "out": "where the run is written",
    "overwrite": "whether what lies there may go",
    "requests": "whether requests.parquet and requests.csv are written",
    "trace": "whether trace.json.gz is written",
    "report": "whether report.html is written",
    "as_json": "how the answer is printed",
}
"""Options of `lockstep simulate` by the name of their parameter, and why a stored run does not keep them."""


def asked_of(options: Mapping[str, Any]) -> Scenario | ClusterScenario:
    """What the options of `lockstep simulate` ask for, those of SAYS_NOTHING left out; the router's are in `router`.

    Raises: click.UsageError for options that do not go together; ConfigError or WorkloadError for what cannot be read.
    """
    given = dict(options)
    names = ("gpu", "replicas", "engines", "prefill_engines", "decode_engines", "link_gbs", "link_latency_us", "router")
    cluster = {name: given.pop(name) for name in names}
    gpu, replicas, engines = cluster["gpu"], cluster["replicas"], cluster["engines"]
    prefill_engines, decode_engines = cluster["prefill_engines"], cluster["decode_engines"]
    shared_out = prefill_engines is not None or decode_engines is not None
    if gpu is None and engines is None:
        raise click.UsageError("Missing option '--gpu', or '--engines' for several kinds.")
    if engines is not None and (gpu is not None or replicas is not None):
        raise click.UsageError("'--engines' says how many of which GPU: leave out '--gpu' and '--replicas'.")
    if shared_out and (prefill_engines is None or decode_engines is None):
        raise click.UsageError("'--prefill-engines' and '--decode-engines' need each other.")
    if shared_out and (replicas is not None or engines is not None):
        raise click.UsageError(
            "'--prefill-engines' and '--decode-engines' say how many there are: leave out '--replicas' and '--engines'."
        )
    links = {name: cluster[name] for name in ("link_gbs", "link_latency_us") if cluster[name] is not None}
    if not shared_out and "role=" not in (engines or ""):
        for flag, name in (("--link-bandwidth", "link_gbs"), ("--link-latency", "link_latency_us")):
            if name in links:
                raise click.UsageError(f"'{flag}' is of links between prefill and decode engines; there are none.")
    base = Scenario(
        gpu=gpu or "",
        workload=mix_of(given.pop("workloads")),
        slos=tuple(map(Slo.parse, given.pop("slos"))),
        settings=given_settings(given),
        **given,
    )
    router = dict(cluster["router"])
    if not (shared_out or replicas is not None or engines is not None or router or base.rank_schedulers):
        return base
    hop_us = router.pop("hop_us", 0)
    reports = {name: router.pop(name, 0) for name in ("report_interval_us", "report_delay_us")}
    scaling, admission = router.pop("scaling", None), router.pop("admission", None)
    config = RouterConfig(**router)
    check_router_options(router, [config.policy])
    if shared_out:
        groups = tuple(_of_role(base, role, cluster[f"{role}_engines"]) for role in ("prefill", "decode"))
        base = replace(base, gpu="")  # which its engines name
    else:
        groups = parse_engines(engines, parse_setting) if engines is not None else ()
    return ClusterScenario(
        base=base,
        replicas=1 if replicas is None else replicas,
        engines=groups,
        router=config,
        hop_us=hop_us,
        **links,
        **reports,
        scaling=None if scaling is None else parse_scaling(scaling),
        dispatch=None if admission is None else parse_admission(admission),
    )


def _of_role(base: Scenario, role: str, count: int) -> EngineGroup:
    if count < 1:
        raise ConfigError(f"`{role}_engines` must be at least 1, got `{count}`")
    return EngineGroup(count=count, gpu=base.gpu, settings={"role": role})


def asked_by_command(command: str) -> Scenario | ClusterScenario:
    """What a run was asked for, by the command line that it kept. Raises ConfigError if that is of another command."""
    words = shlex.split(command)
    if words[:2] != ["lockstep", "simulate"]:
        raise ConfigError(f"the run was not made by `lockstep simulate`, but by `{' '.join(words[:2])}`")
    options = simulate.make_context("lockstep simulate", words[2:]).params
    router = router_given(options, engines=True)
    return asked_of({**{name: options[name] for name in options if name not in SAYS_NOTHING}, "router": router})
