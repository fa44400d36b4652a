"""Command-line options of a cluster and of its router."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

from lockstep.core.cluster.router import ROUTER_POLICIES, RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import options_of, with_flags
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.scenario.scenario import sim_options
from lockstep.sim.scenario.values import KINDS, ParamType

# One row per setting of a router's policy: (field of RouterConfig, policy, type of the value, help).
ROUTER_OPTIONS: tuple[tuple[str, str, ParamType, str], ...] = (
    ("load_bound", "prefix_affinity", click.FLOAT, "an engine's load over the mean, at most"),
    ("load_floor", "prefix_affinity", click.INT, "open requests up to which no engine counts as loaded"),
    ("block_tokens", "prefix_affinity", click.INT, "prompts are compared in blocks of so many tokens"),
    ("sessions_max", "session_sticky", click.INT, "sessions remembered"),
)


def check_router_options(given: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Raise ConfigError if a given setting is read by none of the policies."""
    for name, policy, _, _ in ROUTER_OPTIONS:
        if name in given and policy not in policies:
            raise ConfigError(
                f"`router_{name}` is a setting of {policy}, got `{given[name]}` under {' and '.join(policies)}\n"
                f"hint: --router {policy}, or leave out --router-{name.replace('_', '-')}"
            )


SHARED_OUT = ("prefill_engines", "decode_engines")
"""Options of `simulate` that define groups of engines with a role."""


def router_given(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of the router's policy from a command's options, and return those that were given."""
    names = {"router": "policy"} | {f"router_{name}": name for name, *_ in ROUTER_OPTIONS}
    given = {short: options.pop(name) for name, short in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def cluster_given(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a cluster, except its router's, from a command's options; return those that were given."""
    names = [*options_of(ClusterScenario), *SHARED_OUT]
    given = {name: options.pop(name) for name in names if name in options}
    return {name: value for name, value in given.items() if value is not None}


def cluster_options(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a cluster that the named command takes, and those of the router's policy."""
    usual = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
    fields = {field.name: field for field in sim_options(name, struct=ClusterScenario)}
    engines = [fields.pop(one) for one in ("replicas", "engines") if one in fields]
    decorators = [with_flags(click.option, engines, keep_absent=True, kinds=KINDS)]
    if engines:
        decorators += [
            click.option("--prefill-engines", type=click.INT, help="engines that compute prompts: docs/distributed.md"),
            click.option("--decode-engines", type=click.INT, help="engines that decode after the prefill engines"),
        ]
    decorators.append(click.option("--router", help=f"{', '.join(ROUTER_POLICIES)}  [default: {usual['policy']}]"))
    decorators.append(with_flags(click.option, fields.values(), keep_absent=True, kinds=KINDS))
    for setting, policy, kind, text in ROUTER_OPTIONS:
        flag, text = "--router-" + setting.replace("_", "-"), f"under {policy}: {text}  [default: {usual[setting]}]"
        decorators.append(click.option(flag, f"router_{setting}", type=kind, help=text))
    return lambda command: functools.reduce(lambda made, decorator: decorator(made), reversed(decorators), command)
