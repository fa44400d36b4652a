"""The load of a scenario: its workload at its rate, with media, adapters and samples, and the arrivals of requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.closed_loop import CONCURRENCY_MAX, ConcurrentSessions
from lockstep.sim.run.encoding import encoders_of
from lockstep.sim.scenario.scenario import SAMPLES, SPREAD, Scenario
from lockstep.sim.workload.adapters import describe_adapters, parse_adapters, with_adapters
from lockstep.sim.workload.logs import LogReading
from lockstep.sim.workload.media import RECORDED, describe_media, parse_media, with_media
from lockstep.sim.workload.samples import describe_samples, parse_samples, with_samples
from lockstep.sim.workload.server_sessions import describe_server_sessions, with_server_sessions
from lockstep.sim.workload.trace_turns import CLOCKLESS
from lockstep.sim.workload.turns import Turns
from lockstep.sim.workload.workload import SourceReading, Workload, open_workload, workload_digest

SEEDS = 2**63


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed out of range."""
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"`seed` must be a whole number from 0 to {SEEDS - 1}, got `{seed}`")


def check_load(scenario: Scenario) -> None:
    """Raise ConfigError for load options that are out of range, contradict each other, or leave nothing to measure."""
    if scenario.warm_up < 0:
        raise ConfigError(
            f"`warm_up` must be a number of requests of at least 0, got `{scenario.warm_up}`\nhint: 0 measures all"
        )
    if scenario.receive_interval < 1:
        interval = scenario.receive_interval
        raise ConfigError(f"`receive_interval` must be at least 1, got `{interval}`\nhint: 1 looks every time")
    if scenario.limit is not None and scenario.warm_up >= max(scenario.limit, 1):
        raise ConfigError(
            f"`warm_up` must be less than the {scenario.limit} requests of `limit`, got `{scenario.warm_up}`\n"
            "hint: nothing would be measured"
        )
    if scenario.concurrency is None:
        return
    if scenario.limit is not None and scenario.limit < 1:
        raise ConfigError(f"`limit` must be at least 1, got `{scenario.limit}`\nhint: leave it out")
    if not 1 <= scenario.concurrency <= CONCURRENCY_MAX:
        raise ConfigError(
            f"`concurrency` must be from 1 to {CONCURRENCY_MAX:,}, got `{scenario.concurrency}`\n"
            "hint: leave it out and requests come by the clock"
        )
    if scenario.rate is not None or scenario.rate_scale != 1.0:
        raise ConfigError("`concurrency` and `rate` are two kinds of load\nhint: leave one of them out")


def check_measured(scenario: Scenario, workload: Workload) -> None:
    """Raise ConfigError if all requests of the workload are warm-up.

    A closed loop with a `limit` is not checked, because it may repeat the workload.
    """
    requests = len(workload.turns)
    if scenario.concurrency is not None and scenario.limit is not None:
        return
    if scenario.warm_up >= max(requests, 1):
        raise ConfigError(
            f"`warm_up` must be less than the {requests:,} requests of the workload, got `{scenario.warm_up}`\n"
            "hint: nothing would be measured"
        )


def check_samples(scenario: Scenario) -> None:
    """Raise ConfigError if `samples` cannot be parsed, or is combined with options that are not simulated with it."""
    if scenario.samples is None:
        return
    parse_samples(scenario.samples)
    for what, value in (("rank_schedulers", scenario.rank_schedulers), ("role", scenario.settings.get("role"))):
        if value and value != "mixed":
            raise ConfigError(
                f"`samples` is `{scenario.samples}`, but `{what}` is {'on' if value is True else value}: several "
                "answers are simulated where engines do all of a request themselves\nhint: leave out one of the two"
            )


def open_load(scenario: Scenario) -> Workload:
    """Return the workload of a scenario at its rate; for a closed loop without scaling of its arrival times.

    Raises: WorkloadError, ConfigError, CatalogueError.
    """
    closed = scenario.concurrency is not None
    if scenario.sample not in SAMPLES:
        raise ConfigError(f"`sample` must be one of {', '.join(SAMPLES)}, got `{scenario.sample}`")
    workload = open_workload(
        scenario.workload,
        seed=scenario.seed,
        rate=math.inf if closed else scenario.rate,
        rate_scale=scenario.rate_scale,
        time_window=scenario.time_window,
        limit=None if closed else scenario.limit,
        reading=SourceReading(
            scenario.skip_bad_rows,
            recorded_media=scenario.media == RECORDED,
            spread=scenario.sample == SPREAD and not closed,
            log=LogReading(scenario.columns, scenario.tokenizer, scenario.chars_per_token),
        ),
    )
    if scenario.media is not None:
        workload = _with_media(workload, scenario, scenario.media)
    if scenario.adapters is not None:
        workload = _with_adapters(workload, scenario, scenario.adapters)
    if scenario.samples is not None:
        turns = with_samples(workload.turns, parse_samples(scenario.samples), seed=scenario.seed)
        notes = (*workload.notes, describe_samples(turns))
        workload = replace(workload, turns=turns, digest=workload_digest(turns), notes=notes)
    if scenario.server_sessions:
        turns = with_server_sessions(workload.turns)
        workload = replace(workload, turns=turns, notes=(*workload.notes, describe_server_sessions(turns)))
    if any(value is not None for value in (scenario.media, scenario.adapters, scenario.samples)):
        workload = replace(workload, is_drawn=True)
    if not closed:
        return workload
    # Notes about arrival times do not apply to a closed loop.
    return replace(workload, notes=tuple(note for note in workload.notes if CLOCKLESS not in note))


def _with_media(workload: Workload, scenario: Scenario, media: str) -> Workload:
    """Return the workload with the media of its turns. Raises ConfigError or CatalogueError."""
    encoders = encoders_of(scenario)
    turns = workload.turns
    if media != RECORDED:
        turns = with_media(turns, parse_media(media), encoders, seed=scenario.seed)
    assert turns.media is not None
    for kind in {content.kind for content in turns.media.contents().values()}:
        encoders.tower(kind)  # raises for a kind that the model does not accept
    notes = (*workload.notes, describe_media(turns.media, len(turns)))
    return replace(workload, turns=turns, digest=workload_digest(turns), notes=notes)


def _with_adapters(workload: Workload, scenario: Scenario, adapters: str) -> Workload:
    """Return the workload with an adapter assigned to each request that uses one. Raises ConfigError."""
    turns = with_adapters(workload.turns, parse_adapters(adapters), seed=scenario.seed)
    notes = (*workload.notes, describe_adapters(turns))
    return replace(workload, turns=turns, digest=workload_digest(turns), notes=notes)


def arrivals_of_load(scenario: Scenario, turns: Turns, prompt_tokens_max: int) -> Arrivals | ConcurrentSessions:
    """Return the source of requests for turns: arrivals by the clock, or sessions of a closed loop.

    Args:
        prompt_tokens_max: longest prompt that the engine accepts; a session breaks off at a longer one.
    """
    if scenario.concurrency is None:
        return Arrivals(turns)
    requests = len(turns) if scenario.limit is None else scenario.limit
    return ConcurrentSessions(turns, scenario.concurrency, requests, scenario.seed, prompt_tokens_max)


def describe_load(scenario: Scenario, workload: Workload) -> dict[str, Any]:
    """Return the facts of the workload and of the load options, for metrics.json."""
    return {
        "name": workload.name,
        "source": workload.source,
        "format": workload.format,
        "digest": workload.digest,
        "turns": len(workload.turns),
        "tenants": [tenant for tenant in workload.turns.tenants if tenant],
        "rate": _json_number(scenario.rate),
        "rate_scale": scenario.rate_scale,
        "time_window": scenario.time_window,
        "concurrency": scenario.concurrency,
        "warm_up": scenario.warm_up,
        "limit": scenario.limit,
        "skipped_rows": workload.skipped.count,
        "notes": list(workload.notes),
    }


def _json_number(value: float | None) -> float | str | None:
    """Return a number as JSON can store it: infinity, which JSON lacks, as `inf`, its spelling in options."""
    return "inf" if value == math.inf else value
