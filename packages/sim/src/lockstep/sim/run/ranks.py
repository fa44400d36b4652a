"""Settings of an engine whose data-parallel ranks have separate schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.contract.config import DELAYER_SETTINGS, RANK_SETTINGS, TRIGGER_SETTINGS, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.rank_settings import DIVIDED

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario


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
