"""`lockstep replay RUN --what-if`: simulate the same requests under other settings, and compare each request.

A is the run; if it was no simulation, a simulation of it under its own settings, so that two simulations are compared.
B has the same requests under the changed settings. The comparison is that of `lockstep compare`. The causes of a
changed TTFT are the waits of a request in both runs. Those of B are recorded while it is simulated, those of a recorded
A by a replay beside that simulation (recorded_waits.py). B has a journal only with `--out`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
import numpy as np

from lockstep.core.cluster.router import RequestRouted, RouterConfig, policy_settings
from lockstep.core.contract.config import DRAFT_SETTINGS
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestId
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.contract.text import shown
from lockstep.core.journal.reader import read_journal
from lockstep.host.host_header import HostHeader
from lockstep.host.options import Option, option_of, options_of, take, with_flags
from lockstep.host.router_journal import Route
from lockstep.sim.cli.cluster_options import router_flag
from lockstep.sim.cli.errors import reading, refusals
from lockstep.sim.cli.run_output import progress_bar
from lockstep.sim.cli.stored_command import requested_by_command
from lockstep.sim.cluster.routed import ClusterWatch
from lockstep.sim.cluster.run_folder import write_cluster_run
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import REPORTING, assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost.parallel import BESIDES_TP
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.report.compare_page import write_comparison
from lockstep.sim.report.parts import escape
from lockstep.sim.results.compare import compare, match_requests
from lockstep.sim.results.compare_text import comparison_lines, show_change
from lockstep.sim.results.stored_run import StoredRun, read_run
from lockstep.sim.results.text import duration
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.load import open_load
from lockstep.sim.run.out_paths import check_file
from lockstep.sim.run.run_folder import prepare_folder, write_run
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import given_settings, scheduler_options, tier_options
from lockstep.sim.scenario.values import KINDS
from lockstep.sim.workload.adapters import RECORDED
from lockstep.sim.workload.workload import Workload, WorkloadError
from lockstep.tools.narration import key_text
from lockstep.tools.recorded import journal_workload, output_limit, scaled
from lockstep.tools.recorded_waits import RecordedWaits, SimulatedWaits
from lockstep.tools.runs import RUN, divergences
from lockstep.tools.waits import Waited, WaitFold

OF_THE_RUN = tuple(
    name for name in options_of(Scenario) if name in ("workload", "rate", "time_window", "concurrency", "warm_up")
    or name in ("limit", "sample", "seed", "skip_bad_rows", "columns", "tokenizer", "chars_per_token", "max_new_tokens")
    or name in ("media", "adapters", "samples", "server_sessions")
)  # fmt: skip
"""Options about the requests, which --what-if takes from the run."""
OF_SCENARIO = tuple(
    name
    for name, field in options_of(Scenario).items()
    if name not in (*OF_THE_RUN, "rate_scale", "settings", "tiers") and field.takes("simulate")
)
OF_CLUSTER = ("replicas",)
ROLES = ("prefill", "decode")
AS_IT_WAS = "as in the run"
CHANGED = (
    *(options_of(Scenario)[name].absent(AS_IT_WAS) for name in OF_SCENARIO),
    *(options_of(ClusterScenario)[name].absent(AS_IT_WAS) for name in OF_CLUSTER),
)
"""Options of `lockstep simulate` that may have another value. Absent ones are as in the run."""
OF_MEMORY = tuple(
    name
    for name, field in options_of(Scenario).items()
    if name in ("model", "gpu", "mem_fraction", "draft_model", "max_lora_rank")
    or getattr(field.option, "configures", False)
)
"""Options on which the number of pages depends."""
REQUESTS_SHOWN = 3  # requests whose TTFT rose most, and as many whose TTFT fell most
PARTS_SHOWN = 4  # largest parts of a change

ROUTES = {
    "policy": "by its policy, without regard to the prompt",
    "session": "which had its session",
    "prefix": "which had received the longest beginning of its prompt",
    "bound": "because the engine with the longest beginning of its prompt was above the load bound",
    "room": "which its room names",
    "named": "which it named",
}
"""The reasons of a router for an engine."""


@dataclass(frozen=True)
class Base:
    """The recorded run: its settings and its requests."""

    asked: Scenario | ClusterScenario
    workload: Workload
    notes: tuple[str, ...]
    simulated: bool  # whether the run folder is that of a simulation, which serves as A

    @property
    def scenario(self) -> Scenario:
        """The scenario of one engine, or the part that holds for all engines of a cluster."""
        return self.asked if isinstance(self.asked, Scenario) else self.asked.base

    @property
    def cluster(self) -> ClusterScenario | None:
        """The scenario with its router; None for one engine."""
        return None if isinstance(self.asked, Scenario) else self.asked


@dataclass(frozen=True)
class RequestChange:
    """A request in both runs, with its waits in each."""

    name: str
    ids: tuple[RequestId, RequestId]
    ttft_us: tuple[int, int]
    waited: tuple[Waited, Waited]
    prompt_tokens: int
    routes: tuple[Route | None, Route | None]

    @property
    def change_us(self) -> int:
        return self.ttft_us[1] - self.ttft_us[0]


@dataclass(frozen=True, kw_only=True)
class WhatIfOptions:
    """Options of `lockstep replay RUN --what-if` besides those of `lockstep simulate`."""

    rate_scale: Annotated[float, Option("divides gaps between arrivals; think times stay")] = 1.0
    policy: Annotated[str | None, Option("short for --schedule-policy", metavar="POLICY")] = None
    html_file: Annotated[Path | None, Option("write a page", flag="--html", metavar="FILE")] = None
    out: Annotated[Path | None, Option("keep the simulated run", metavar="DIR")] = None
    overwrite: Annotated[bool, Option("replace FILE and the run in DIR")] = False
    as_json: Annotated[bool, Option("one JSON object instead of text", flag="--json")] = False


def refused_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add hidden options for those of `simulate` that a what-if does not take; each is refused with the way to it."""

    def refuse(_context: click.Context, option: click.Parameter, value: Any) -> None:
        if value not in (None, (), False):
            flag = option.opts[0]
            other = "--rate-scale 2 doubles the rate of the run; or " if flag == "--rate" else ""
            raise click.UsageError(
                f"{flag} is not for --what-if, which has the requests and the roles of the run\n"
                f"hint: {other}`lockstep simulate` with the command of the run (in its metrics.json) and {flag}, then "
                "`lockstep compare` of both"
            )

    fields = [options_of(Scenario)[name] for name in OF_THE_RUN]
    fields += [field for name, field in options_of(ClusterScenario).items() if name not in OF_CLUSTER]
    flags = [*(f"--{role}-engines" for role in ROLES), *(option_of(f"router_{name}") for name in policy_settings())]
    roles = [click.option(flag, hidden=True, expose_value=False, callback=refuse) for flag in flags]
    for decorator in roles:
        command = decorator(command)
    for field in fields:
        switch: dict[str, Any] = {"is_flag": True} if field.kind is bool else {"multiple": field.multiple}
        command = click.option(field.flag, field.name, hidden=True, expose_value=False, callback=refuse, **switch)(
            command
        )
    return command


@click.command(context_settings={"max_content_width": 120})
@RUN
@with_flags(click.option, CHANGED, keep_absent=True, kinds=KINDS)
@router_flag(AS_IT_WAS)
@with_flags(click.option, options_of(WhatIfOptions).values())
@tier_options
@scheduler_options
@refused_options
def what_if(run: Path, **options: Any) -> None:
    """Simulate the same requests under other settings, and show whose TTFT changed most, with the causes.

    Takes every option of `lockstep simulate` about engines, memory and the scheduler. Arrivals, prompts and lengths of
    answers are those of the run; later turns of a conversation are sent the recorded time after the previous answer.
    Other requests, or other roles of engines, are a run of their own: `lockstep simulate`, then `lockstep compare`.

    \b
    lockstep replay runs/chat --what-if --policy lpm
    lockstep replay runs/chat --what-if --gpu b200 --html b200.html
    lockstep replay runs/chat --what-if --weights-dtype fp8 --kv-dtype fp8 --host-cache-gb 200
    lockstep replay runs/chat --what-if --replicas 2 --router prefix_affinity
    """
    asks = take(WhatIfOptions, options)
    html_file, out = asks.html_file, asks.out
    with refusals(), divergences(), ExitStack() as stack:
        if html_file is not None:
            if html_file.exists() and not asks.overwrite:
                raise click.UsageError(f"{html_file} exists\nhint: choose another file, or add --overwrite")
            check_file(html_file, "--html")
        changed = given_settings(options)
        if asks.policy:
            changed["schedule_policy"] = asks.policy
        given = {name: value for name, value in options.items() if value not in (None, ())}
        with reading():
            base = read_base(run, given)
        for note in (*base.notes, *base.workload.notes):
            click.echo(f"note: {note}", err=True)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-what-if-")))
        waits_of_first: RecordedWaits | SimulatedWaits
        first, other = run, out if out is not None else scratch / "what if"
        if out is not None:
            if out.resolve() == run.resolve():
                raise ConfigError(f"`--out` {out} is the folder of A\nhint: choose another folder for B")
            prepare_folder(out, overwrite=asks.overwrite)
        asked = at_rate(changed_base(base, given, changed), asks.rate_scale)
        for note in asked.notes[len(base.notes) :]:
            click.echo(f"note: {note}", err=True)
        if base.simulated:
            waits_of_first = stack.enter_context(RecordedWaits(run))
        else:
            first = scratch / f"{run.name or 'run'} simulated"
            waits_of_first = simulate_base(base, first, base.workload)
        waits = simulate_base(asked, other, asked.workload, kept=out is not None)
        before, after = read_run(first, run.name or "recorded"), read_run(other, out.name if out else "what if")
        if first != run:
            before = replace(before, folder=Path(f"{run}, simulated under its own settings, and not kept"))
        if out is None:
            after = replace(after, folder=Path("simulated for this comparison, and not kept"))
        found = compare([before, after], is_asked=True)
        losers, winners = felt(before, after, waits_of_first, waits)
        if html_file is not None:
            write_comparison(html_file, found, [why_html(losers, winners, (before.name, after.name))])
        if asks.as_json:
            click.echo(json.dumps({**found.describe(), **_described(losers, winners)}, indent=2, allow_nan=False))
        else:
            for line in (*comparison_lines(found), *why_lines(losers, winners)):
                click.echo(line)
            if out is None:
                click.echo("hint: --out DIR keeps B for lockstep explain", err=True)
    if html_file is not None:
        click.echo(f"{html_file} written, {html_file.stat().st_size:,} bytes", err=True)


# --------------------------------------------------------------------------------------------------------- A and B


def read_base(run: Path, given: dict[str, Any]) -> Base:
    """Read options and requests of a run. Raises ConfigError, JournalError or WorkloadError if that is impossible."""
    if not (run / "metrics.json").is_file():
        return _base_of_journal(run, given)
    about = read_run(run).about
    if "engine" in about:
        raise ConfigError(
            f"`{run}` is one engine of a cluster, and has only the requests that the router sent to it\n"
            f"hint: use the whole run, {run.parent.parent}"
        )
    asked = requested_by_command(str(about["command"]))
    scenario = asked if isinstance(asked, Scenario) else asked.base
    notes: tuple[str, ...] = ()
    try:
        workload = open_load(scenario)
        if workload.digest != about["workload"]["digest"]:
            notes = (f"`{scenario.workload}` has other requests than the run, so they are read from its journal",)
    except (WorkloadError, OSError) as error:
        workload = None
        notes = (f"its workload cannot be read ({str(error).partition(chr(10))[0]}): it is read from the journal",)
    if workload is not None and not notes:
        return Base(asked, workload, (), simulated=True)
    lost = [
        name
        for name, is_there in (
            ("a closed loop", scenario.concurrency is not None),
            ("a cluster", not isinstance(asked, Scenario)),
            ("requests with media", scenario.media is not None),
        )
        if is_there
    ]
    if lost:
        raise ConfigError(
            f"`{run}` had its requests from `{scenario.workload}`, which is missing or has changed, and "
            f"{' with '.join(lost)} cannot be read from journals\nhint: restore the workload"
        )
    plain = replace(scenario, rate=None, rate_scale=1.0, time_window=None, limit=None, skip_bad_rows=False)
    return Base(plain, journal_workload(run), notes, simulated=False)


def _base_of_journal(run: Path, given: dict[str, Any]) -> Base:
    """Read a journal without metrics.json: settings from its header, model and GPU from the header or command line."""
    from lockstep.tools.runs import engine_journal

    header = read_journal(engine_journal(run)).header
    config = header.config
    for name, value, is_there in (
        ("tiers", "host memory or storage below its cache, whose size in the journal is in pages and not in gigabytes",
         config.tiers is not msgspec.UNSET),
        ("role", "an engine that hands requests over to another one, or receives them", config.hands_over),
        ("dp_ranks", "one of several ranks that run their passes together", config.shares_passes),
    ):  # fmt: skip
        if is_there:
            raise ConfigError(
                f"`{run}` is a journal without metrics.json, and its `{name}` is set: {value}\n"
                "hint: simulate it with --out, and use that folder as it was written"
            )
    host = HostHeader.of(header)
    model, gpu = _named("model", given, host.model), _named("gpu", given, host.gpu)
    recorded = msgspec.structs.asdict(config)  # all settings: the profile would replace missing ones
    settings = {name: value for name, value in recorded.items() if value is not msgspec.UNSET}
    del settings["schedule_policy_version"]
    workload = journal_workload(run)
    layout: dict[str, Any] = {name: host.layout[name] for name in BESIDES_TP if name in host.layout}
    scenario = Scenario(
        model=model,
        gpu=gpu,
        workload=str(run),
        tp=int(given.get("tp", 1 if host.tp is None else host.tp)),
        **layout,
        seed=header.seed,
        settings=settings,
        max_new_tokens=output_limit(run),
        adapters=RECORDED if workload.turns.adapter is not None else None,
    )
    note = "the run was no simulation: A is a simulation of it under its own settings"
    return Base(scenario, workload, (note,), simulated=False)


def _named(name: str, given: dict[str, Any], recorded: str | None) -> str:
    value = given.get(name, recorded)
    if not value:
        raise ConfigError(f"the journal does not record its {name}\nhint: give --{name}, as to `simulate`")
    return str(value)


def changed_base(base: Base, given: dict[str, Any], settings: dict[str, Any]) -> Base:
    """Return the base with the changes of the command line. Raises ConfigError for changes that do not fit it."""
    scenario = base.scenario
    kept = dict(scenario.settings)
    moved = [name for name in OF_MEMORY if name in given and given[name] != getattr(scenario, name)]
    named = profile_settings(given["profile"]) if "profile" in given else {}
    if not base.simulated and (moved or "page_size" in settings or "page_size" in named):
        kept.pop("pages", None)  # the number of pages follows from the model, the GPU and the page size
    if not base.simulated:
        kept = {name: value for name, value in kept.items() if name not in named}
    if settings.get("speculative_method") == "none":  # drop the other settings of drafts, too
        kept = {name: value for name, value in kept.items() if name not in DRAFT_SETTINGS}
        scenario = replace(scenario, acceptance=None, acceptance_spread=0.0, draft_model=None)
    named_options = {name: given[name] for name in OF_SCENARIO if name in given}
    if "slos" in named_options:
        named_options["slos"] = tuple(map(Slo.parse, named_options["slos"]))
    scenario = replace(
        scenario,
        **named_options,
        settings={**kept, **settings},
        tiers={**scenario.tiers, **given.get("tiers", {})},
    )
    cluster, notes = base.cluster, list(base.notes)
    if cluster is None and "replicas" in given:
        cluster = ClusterScenario(base=scenario, replicas=given["replicas"])
    elif cluster is not None:
        cluster = _changed_engines(replace(cluster, base=scenario), given, settings, notes)
    if "router" in given:
        if cluster is None:
            raise ConfigError(f"`--router` {given['router']} needs engines to choose from\nhint: add --replicas 2")
        cluster = _with_policy(cluster, given["router"], notes)
    return replace(base, asked=scenario if cluster is None else cluster, notes=tuple(notes))


def _changed_engines(
    cluster: ClusterScenario, given: dict[str, Any], settings: dict[str, Any], notes: list[str]
) -> ClusterScenario:
    """Return the scenario with the changes of its engines in `given` and `settings`; note the options that are dropped.

    Raises: ConfigError for options that cannot be applied to the engines of `--engines`.
    """
    spec = ",".join(map(str, cluster.engines))
    if "replicas" in given:
        if not cluster.base.gpu:
            raise ConfigError(
                f"`--replicas` {given['replicas']} needs one kind of engine, and the run has `{spec}`\n"
                "hint: choose the GPU with --gpu"
            )
        usual = {name: getattr(ClusterScenario, name) for name in ("link_gbs", "link_latency_us", "placement")}
        notes += [
            f"{name} is left out of B: it applies to links between prefill and decode engines"
            for name, value in usual.items()
            if getattr(cluster, name) != value
        ]
        count = given["replicas"]
        scaling = None if cluster.scaling is None else cluster.scaling.within(count)
        return replace(cluster, engines=(), replicas=count, scaling=scaling, **usual)
    if not cluster.engines:
        return cluster
    if "gpu" in given and len({group.gpu for group in cluster.engines}) > 1:
        raise ConfigError(
            f"`--gpu` {given['gpu']} is one GPU, and the run has engines of several kinds: `{spec}`\n"
            "hint: add --replicas N for N equal engines, or simulate other --engines and compare"
        )
    asked = {"tp": given["tp"], **settings} if "tp" in given else settings
    for name, value in asked.items():
        if any(name in group.settings or (name == "tp" and group.tp is not None) for group in cluster.engines):
            raise ConfigError(
                f"`{name}` {value} is for all engines, and the run sets it for single engines: `{spec}`\n"
                "hint: add --replicas N for N equal engines, or simulate other --engines and compare"
            )
    if "gpu" in given:
        engines = tuple(replace(group, gpu=given["gpu"]) for group in cluster.engines)
        return replace(cluster, base=replace(cluster.base, gpu=""), engines=engines)
    return cluster


def _with_policy(cluster: ClusterScenario, policy: Any, notes: list[str]) -> ClusterScenario:
    """Return the scenario with another policy of the router. Settings that only the old policy uses are noted and left
    out."""
    usual = RouterConfig(policy=policy)
    others = {name: getattr(usual, name) for name, one in policy_settings().items() if one.policy != policy}
    reports: dict[str, Any] = dict.fromkeys(() if policy in REPORTING else ("report_interval_us", "report_delay_us"), 0)
    lost = [name for name, value in others.items() if getattr(cluster.router, name) != value]
    lost += [name.removesuffix("_us") for name, value in reports.items() if getattr(cluster, name) != value]
    notes += [f"router_{name} is left out of B: {policy} does not use it" for name in lost]
    router = msgspec.structs.replace(cluster.router, policy=policy, **others)
    return replace(cluster, router=router, **reports)


def at_rate(base: Base, rate_scale: float) -> Base:
    """Return the base with every gap between arrivals divided by `rate_scale`. Raises ConfigError for a closed loop."""
    if rate_scale == 1.0:
        return base
    scenario = base.scenario
    if scenario.concurrency is not None:
        raise ConfigError(
            f"`--rate-scale` {rate_scale:g} needs an open loop, and the run was a closed loop of "
            f"{scenario.concurrency} sessions at a time\nhint: simulate it with another --concurrency, and compare"
        )
    workload = scaled(base.workload, rate_scale)
    if base.simulated:  # the stored command of B must reproduce its workload
        scenario = replace(scenario, rate_scale=scenario.rate_scale * rate_scale)
        workload = open_load(scenario)
    asked = scenario if base.cluster is None else replace(base.cluster, base=scenario)
    return replace(base, asked=asked, workload=workload)


def simulate_base(base: Base, folder: Path, workload: Workload, *, kept: bool = False) -> SimulatedWaits:
    """Simulate a base, write the files of a comparison, and return the waits of each request.

    There are no waits if engines hand requests over or run their passes together.

    Args:
        kept: also write journals and report, but no trace.
    """
    journals = folder if kept else None
    with progress_bar(base.scenario.limit or len(workload.turns)) as on_finish:
        if isinstance(base.asked, Scenario):
            setup = assemble(base.asked, os.environ, workload=workload)
            fold = WaitFold()
            done = simulate(setup, folder=journals, on_finish=on_finish, observer=fold)
            _go_on(done.interrupted)
            write_run(folder, done, trace=False, report=kept)
            return SimulatedWaits(fold.close(), {})
        cluster = assemble_cluster(base.asked, workload=workload)
        folds = [WaitFold() for _ in cluster.engines] if cluster.each_alone else []
        sent: list[RequestRouted] = []  # rejections included
        ended = simulate_cluster(
            cluster,
            folder=journals,
            on_finish=on_finish,
            watch=ClusterWatch(observers=folds, on_route=sent.append if cluster.each_alone else None),
        )
        _go_on(ended.interrupted)
        write_cluster_run(folder, ended, trace=False, report=kept)
        own_ids = {name: own for own, name in enumerate(ended.sent)}
        routes = {
            routed.request_id: Route(
                routed.engine, routed.reason, own_ids.get(routed.request_id, routed.request_id), routed.matched_tokens
            )
            for routed in sent
            if routed.engine is not None
        }
        waits = [fold.close() for fold in folds]
        return SimulatedWaits({name: waits[route.engine][route.own_id] for name, route in routes.items()}, routes)


def _go_on(interrupted: bool) -> None:
    """Raise KeyboardInterrupt after a Ctrl-C: an incomplete run cannot be compared."""
    if interrupted:
        raise KeyboardInterrupt


# -------------------------------------------------------------------------------------------------- changes of TTFT


def felt(
    first: StoredRun,
    other: StoredRun,
    waits_of_first: RecordedWaits | SimulatedWaits,
    waits_of_other: SimulatedWaits,
) -> tuple[list[RequestChange], list[RequestChange]]:
    """Return the requests whose TTFT rose most, and those whose TTFT fell most, with their waits in both runs."""
    if first.requests is None or other.requests is None:
        return [], []
    rows, others, _ = match_requests(first.requests, other.requests)
    ttft = first.requests["ttft_us"][rows], other.requests["ttft_us"][others]
    known = np.flatnonzero((ttft[0] >= 0) & (ttft[1] >= 0) & (ttft[0] != ttft[1]))
    order = known[np.argsort((ttft[1] - ttft[0])[known], kind="stable")]
    change = ttft[1] - ttft[0]
    lost = [int(at) for at in order[::-1] if change[at] > 0][:REQUESTS_SHOWN]
    won = [int(at) for at in order if change[at] < 0][:REQUESTS_SHOWN]
    chosen = lost + won
    ids = (
        [int(first.requests["request_id"][rows[at]]) for at in chosen],
        [int(other.requests["request_id"][others[at]]) for at in chosen],
    )
    labels = [shown(str(first.requests["label"][rows[at]])) or f"r{ids[0][place]}" for place, at in enumerate(chosen)]
    waits = waits_of_first.of(ids[0]), waits_of_other.of(ids[1])
    routes = waits_of_first.routes(ids[0]), waits_of_other.routes(ids[1])
    both = [
        RequestChange(
            labels[place],
            (a, b),
            (int(ttft[0][at]), int(ttft[1][at])),
            (waits[0][a], waits[1][b]),
            int(first.requests["prompt_tokens"][rows[at]]),
            (routes[0].get(a), routes[1].get(b)),
        )
        for place, (at, a, b) in enumerate(zip(chosen, *ids, strict=True))
        if a in waits[0] and b in waits[1]
    ]
    return [each for each in both if each.change_us > 0], [each for each in both if each.change_us < 0]


def why(one: RequestChange) -> list[str]:
    """Return the parts of a change of TTFT as text, largest first, and other differences between the runs."""
    mine, theirs = one.waited
    causes = dict.fromkeys((*mine.by_cause, *theirs.by_cause))
    parts = [(key_text(cause), mine.by_cause.get(cause, 0), theirs.by_cause.get(cause, 0)) for cause in causes]
    parts += [("computing its prompt, from its admission to its first token", mine.computed_us, theirs.computed_us)]
    outside = [ttft_us - waited.ttft_us for ttft_us, waited in zip(one.ttft_us, one.waited, strict=True)]
    parts += [("outside the engine: hops, or waiting at the router", outside[0], outside[1])]
    moved = sorted((part for part in parts if part[1] != part[2]), key=lambda part: (-abs(part[2] - part[1]), part[0]))
    lines = [
        f"{show_change(b - a)} {what} ({duration(a)} in A, {duration(b)} in B)" for what, a, b in moved[:PARTS_SHOWN]
    ]
    if mine.cached_tokens != theirs.cached_tokens:
        lines.append(
            f"of its {one.prompt_tokens:,} prompt tokens {mine.cached_tokens:,} were in the cache in A, "
            f"{theirs.cached_tokens:,} in B: the rest was computed"
        )
    lines += [
        f"the router of {letter} sent it to engine {route.engine}, {_why_there(route)}"
        for letter, route in zip("AB", one.routes, strict=True)
        if route is not None
    ]
    facts = (
        ("retractions", mine.retractions, theirs.retractions),
        ("requests from behind that went before it", mine.bypassed, theirs.bypassed),
        ("other requests that waited when it arrived", mine.waiting_then, theirs.waiting_then),
    )
    return lines + [f"{name}: {a:,} in A, {b:,} in B" for name, a, b in facts if a != b]


def _why_there(route: Route) -> str:
    sent = f" ({route.matched_tokens:,} tokens)" if route.matched_tokens else ""
    return ROUTES.get(route.reason, route.reason) + sent


def _head(one: RequestChange) -> str:
    a, b = one.ids
    change = f"TTFT {duration(one.ttft_us[0])} -> {duration(one.ttft_us[1])}, {show_change(one.change_us)}"
    return f"{one.name} (A r{a}, B r{b}): {change}"


def why_lines(losers: Sequence[RequestChange], winners: Sequence[RequestChange]) -> list[str]:
    """Return both lists as lines for a terminal."""
    lines = []
    for title, listed in (("requests that lost most, and why", losers), ("requests that won most, and why", winners)):
        if listed:
            lines += ["", title]
        for one in listed:
            lines += [f"  {_head(one)}", *(f"      {line}" for line in why(one))]
    if losers or winners:
        lines += [
            "",
            "timelines: lockstep explain RUN --request ID, for A, and for B if it was kept with --out",
        ]
    return lines


def why_html(losers: Sequence[RequestChange], winners: Sequence[RequestChange], names: tuple[str, str]) -> str:
    """Return both lists as a section of the HTML page, with the names of the runs."""
    parts = []
    for title, listed in (("Requests that lost most", losers), ("Requests that won most", winners)):
        items = "".join(
            f"<li><b>{escape(_head(one))}</b><br>{'<br>'.join(map(escape, why(one)))}</li>" for one in listed
        )
        parts.append(f"<h3>{title}</h3><ul>{items}</ul>" if items else "")
    if not any(parts):
        return ""
    return (
        '<section><h2>Why?</h2><p class="lead">The waits of the requests whose TTFT changed most, by the decisions of '
        f"both schedulers. A is {escape(names[0])}, the recorded run; B is {escape(names[1])}, the same requests under "
        f"the other settings.</p>{''.join(parts)}</section>"
    )


def _described(losers: Sequence[RequestChange], winners: Sequence[RequestChange]) -> dict[str, Any]:
    def each(listed: Sequence[RequestChange]) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "request_ids": list(one.ids), "ttft_us": list(one.ttft_us), "why": why(one)}
            for one in listed
        ]

    return {"lost_most": each(losers), "won_most": each(winners)}
