"""Options of a cluster and of its router, as the commands have them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

from lockstep.core.cluster.router import ROUTER_POLICIES, RouterConfig, policy_settings
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import option_of, options_of, with_flags
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.scenario.scenario import sim_options
from lockstep.sim.scenario.values import KINDS

USUAL = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}


def router_flag(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the flag `--router`. Its help shows this default; not given, it arrives as None."""
    return click.option("--router", help=f"{', '.join(ROUTER_POLICIES)}  [default: {default}]")


def check_router_options(given: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Raise ConfigError if a setting was given that none of the policies looks at."""
    for name, setting in policy_settings().items():
        if name in given and setting.policy not in policies:
            raise ConfigError(
                f"`router_{name}` is a setting of {setting.policy}, got `{given[name]}` under "
                f"{' and '.join(policies)}\n"
                f"hint: --router {setting.policy}, or leave out --router-{name.replace('_', '-')}"
            )


SHARED_OUT = ("prefill_engines", "decode_engines")
"""Options of `simulate` that stand for groups of engines with roles."""


def router_given(options: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of the router's policy out of a command's options, leaving out what was not given."""
    names = {"router": "policy"} | {f"router_{name}": name for name in policy_settings()}
    given = {short: options.pop(name) for name, short in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def cluster_given(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a cluster, its router's policy aside, out of a command's; leaving out what was not given."""
    names = [*options_of(ClusterScenario), *SHARED_OUT]
    given = {name: options.pop(name) for name in names if name in options}
    return {name: value for name, value in given.items() if value is not None}


def cluster_options(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command, by its name, the options of a cluster that it takes, and those of the router's policy."""
    fields = {field.name: field for field in sim_options(command, struct=ClusterScenario)}
    engines = [fields.pop(one) for one in ("replicas", "engines") if one in fields]
    decorators: list[Callable[..., Any]] = [with_flags(click.option, engines, keep_absent=True, kinds=KINDS)]
    if engines:
        decorators += [
            click.option("--prefill-engines", type=click.INT, help="engines that compute prompts: docs/distributed.md"),
            click.option("--decode-engines", type=click.INT, help="engines that go on from there"),
        ]
    decorators.append(router_flag(USUAL["policy"]))
    decorators.append(with_flags(click.option, fields.values(), keep_absent=True, kinds=KINDS))
    for name, setting in policy_settings().items():
        flag, text = option_of(f"router_{name}"), f"under {setting.policy}: {setting.help}  [default: {USUAL[name]}]"
        decorators.append(click.option(flag, f"router_{name}", type=type(USUAL[name]), help=text))
    return lambda given: functools.reduce(lambda made, decorator: decorator(made), reversed(decorators), given)
