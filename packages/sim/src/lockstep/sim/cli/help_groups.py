"""Help in groups: `--help` shows the options that matter first, `--help-all` every option by its group.

The group of an option follows from the struct that declares it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from lockstep.host.options import options_of
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.scenario.scenario import Scenario, names_where
from lockstep.sim.scenario.settings import setting_names, tier_fields

FIRST = {
    "plan": ("model", "gpus", "workload", "slos", "rate", "sessions", "search", "gpus_max", "quick", "out"),
    "simulate": ("model", "gpu", "workloads", "rate", "slos", "tp", "replicas", "engine", "limit", "out"),
}
"""The options that `--help` shows, by command."""

SHOWN = "lockstep.sim.cli.help_all"  # in the context: whether every option is shown
ENGINE, LOAD, CLUSTER, TIERS, SCHEDULER, OWN = (
    "The engine: model, layout, memory, drafts", "The load", "Several engines and their router",
    "Memory below the device, and pools of their own", "The scheduler", "This command",
)  # fmt: skip
GROUPS = (OWN, LOAD, ENGINE, CLUSTER, TIERS, SCHEDULER)
OF_ROUTER = ("router", "prefill_engines", "decode_engines")


def group_of(name: str) -> str:
    """Return the heading of the group of an option."""
    if name in setting_names():
        return SCHEDULER
    if name in tier_fields():
        return TIERS
    if name in options_of(ClusterScenario) or name in OF_ROUTER or name.startswith("router_"):
        return CLUSTER
    if name in (*names_where("of_load"), *names_where("sent"), "workloads", "max_new_tokens"):
        return LOAD
    return ENGINE if name in options_of(Scenario) or name == "gpus" else OWN


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command: the first ones, or with `--help-all` every one by its group."""
    records: dict[str, list[tuple[str, str]]] = {}
    shown = FIRST.get(command.name or "", ())
    for one in command.get_params(ctx):
        record = one.get_help_record(ctx)
        if record is None or one.name is None:
            continue
        if ctx.meta.get(SHOWN):
            records.setdefault(group_of(one.name), []).append(record)
        elif one.name in (*shown, "help", "help_all") or not shown:
            records.setdefault("Options", []).append(record)
    for heading in ("Options", *GROUPS):
        if heading in records:
            with formatter.section(heading):
                formatter.write_dl(records[heading])
    if not ctx.meta.get(SHOWN) and shown:
        formatter.write_paragraph()
        formatter.write_text(
            f"Further options, {len(command.params) - len(shown)} in all, are in the groups of --help-all and in "
            "docs/options.md; all of them may be in FILE.toml."
        )


def with_help_all(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--help-all`."""

    def show(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[SHOWN] = True
            click.echo(ctx.get_help())
            ctx.exit()

    decorator = click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="show every option, in groups",
    )
    return decorator(command)
