"""Settings of an engine whose data-parallel ranks have separate schedulers, and settings of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.contract.config import DELAYER_SETTINGS, RANK_SETTINGS, TRIGGER_SETTINGS, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost.models import ceil_div

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario

DIVIDED = (
    *("max_running_requests", "request_rows", "max_queued_requests", "radix_capacity_pages", "transfer_slots"),
    "pp_max_micro_batch_size",
)
"""Limits of an engine that are divided evenly among its ranks."""


def settings_of_rank(given: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the settings of each rank: the engine's memory, rows and prefill budgets are divided evenly.

    SGLang divides `chunked_prefill_size` and `max_running_requests` in the same way.
    """
    usual = {field.name: field.default for field in msgspec.structs.fields(SchedConfig)}
    page_size = given.get("page_size", usual["page_size"])
    share = dict(given)
    for name in DIVIDED:
        value = given.get(name, usual[name])
        if isinstance(value, int):
            share[name] = ceil_div(value, ranks)
    for name in ("chunked_prefill_size", "max_prefill_tokens"):
        value = given.get(name, usual[name])
        if value is not None:
            share[name] = max(value // ranks // page_size * page_size, page_size)
    if "pages" in given:
        share["pages"] = given["pages"] // ranks
    tiers = given.get("tiers", msgspec.UNSET)
    if tiers is not msgspec.UNSET:
        share["tiers"] = msgspec.structs.replace(tiers, host_pages=max(tiers.host_pages // ranks, 1))
    return {**share, "dp_ranks": ranks, "dp_rank": 0}


def config_of_engine(config: SchedConfig) -> SchedConfig:
    """Return the settings of the engine from those of one rank: the sums over ranks. One rank: `config` itself."""
    if not config.shares_passes:
        return config
    ranks = config.dp_ranks
    assert ranks is not msgspec.UNSET
    unset = dict.fromkeys(("dp_ranks", *RANK_SETTINGS, *DELAYER_SETTINGS, *TRIGGER_SETTINGS), msgspec.UNSET)
    names = [*DIVIDED, "chunked_prefill_size", "max_prefill_tokens", "pages"]
    whole = {name: getattr(config, name) * ranks for name in names if isinstance(getattr(config, name), int)}
    below: dict[str, Any] = {}
    if config.tiers is not msgspec.UNSET:
        below["tiers"] = msgspec.structs.replace(config.tiers, host_pages=config.tiers.host_pages * ranks)
    if (pools := config.hybrid) is not msgspec.UNSET:
        sizes = {"window_pages": pools.window_pages * ranks, "state_slots": pools.state_slots * ranks}
        below["hybrid"] = msgspec.structs.replace(pools, **sizes)
    return msgspec.structs.replace(config, **(whole | unset | below))


def check_ranks(scenario: Scenario) -> None:
    """Raise ConfigError for an engine with one shard, or for options that cannot be combined with ranks."""
    if scenario.attention_dp == 1:
        raise ConfigError(
            "`rank_schedulers` is on, but `attention_dp` is 1: there is one shard\n"
            "hint: --attention-dp 8, or leave out --rank-schedulers"
        )
    others: dict[str, object] = {
        "receive_interval": scenario.receive_interval > 1 and scenario.receive_interval,
    }
    for name, value in others.items():
        if value:
            raise ConfigError(f"`rank_schedulers` is on, and `{name}` is {value}: they do not go together yet")
