"""Checks of clusters whose data-parallel ranks have separate schedulers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.core.contract.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.sim.cluster.scenario import ClusterScenario
    from lockstep.sim.run.setup import Setup


def check_cluster_of_ranks(scenario: ClusterScenario, setups: Sequence[Setup]) -> None:
    """Raise ConfigError for cluster options that cannot be combined with ranks, or for engines with unequal ranks."""
    others = {
        "autoscale": scenario.scaling,
        "admission": scenario.dispatch,
    }
    for name, value in others.items():
        if value:
            raise ConfigError(f"`rank_schedulers` is on, and `{name}` is given: they do not go together yet")
    kinds = Counter((setup.config.role, setup.config.dp_ranks) for setup in setups)
    if len(kinds) > len({role for role, _ in kinds}):
        found = ", ".join(sorted(str(ranks) for _, ranks in kinds))
        raise ConfigError(
            f"`engines` of one role have {found} ranks: all of a role must have as many\n"
            "hint: give them the same attention_dp"
        )
