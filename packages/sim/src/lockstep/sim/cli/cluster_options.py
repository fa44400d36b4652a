"""Command-line options of a cluster and of its router."""

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
    """Raise ConfigError if a given setting is read by none of the policies."""
    for name, setting in policy_settings().items():
        if name in given and setting.policy not in policies:
            raise ConfigError(
                f"`router_{name}` is a setting of {setting.policy}, got `{given[name]}` under "
                f"{' and '.join(policies)}\n"
                f"hint: --router {setting.policy}, or leave out --router-{name.replace('_', '-')}"
            )


SHARED_OUT = ("prefill_engines", "decode_engines")
"""Options of `simulate` that define groups of engines with a role."""


def router_given(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of the router's policy from a command's options, and return those that were given."""
    names = {"router": "policy"} | {f"router_{name}": name for name in policy_settings()}
    given = {short: options.pop(name) for name, short in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def cluster_given(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a cluster, except its router's, from a command's options; return those that were given."""
    names = [*options_of(ClusterScenario), *SHARED_OUT]
    given = {name: options.pop(name) for name in names if name in options}
    return {name: value for name, value in given.items() if value is not None}


def cluster_options(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a cluster that the named command takes, and those of the router's policy."""
    fields = {field.name: field for field in sim_options(command, struct=ClusterScenario)}
    engines = [fields.pop(one) for one in ("replicas", "engines") if one in fields]
    decorators: list[Callable[..., Any]] = [with_flags(click.option, engines, keep_absent=True, kinds=KINDS)]
    if engines:
        decorators += [
            click.option("--prefill-engines", type=click.INT, help="engines that compute prompts: docs/distributed.md"),
            click.option("--decode-engines", type=click.INT, help="engines that decode after the prefill engines"),
        ]
    decorators.append(router_flag(USUAL["policy"]))
    decorators.append(with_flags(click.option, fields.values(), keep_absent=True, kinds=KINDS))
    for name, setting in policy_settings().items():
        flag, text = option_of(f"router_{name}"), f"under {setting.policy}: {setting.help}  [default: {USUAL[name]}]"
        decorators.append(click.option(flag, f"router_{name}", type=type(USUAL[name]), help=text))
    return lambda given: functools.reduce(lambda made, decorator: decorator(made), reversed(decorators), given)
