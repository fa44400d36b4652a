"""Settings of the placement of experts on ranks by their load."""

from __future__ import annotations

import msgspec

from lockstep.core.contract.errors import ConfigError


class ExpertPlacing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts whose copies move between the ranks of an engine (docs/distributed.md, "Experts placed by load").

    `interval` is SGLang's `eplb_rebalance_num_iterations`, `layers_at_once` its `eplb_rebalance_layers_per_chunk`.
    """

    layers: int  # with experts
    experts: int  # of a layer
    ranks: int  # that have whole experts
    slots: int  # of a layer, over all ranks; slots beyond one for each expert hold further copies
    interval: int = 1000  # batches between two placements
    layers_at_once: int = 4  # layers whose experts move between two batches
    imbalance_min: float = 1.0  # experts stay while the fullest rank has at most this times the mean load

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "ranks", "slots", "interval", "layers_at_once"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"`experts.{name}` must be a whole number of at least 1, got `{value}`")
        if self.ranks < 2 or self.experts % self.ranks or self.slots % self.ranks or self.slots < self.experts:
            raise ConfigError(
                f"`experts` places {self.experts} experts in {self.slots} slots on {self.ranks} ranks: experts and "
                "slots must divide over 2 ranks or more, and each expert needs a slot"
            )
        if self.slots > self.experts * self.ranks:
            raise ConfigError(
                f"`experts.slots` must be at most {self.experts * self.ranks}, every expert on every rank, "
                f"got `{self.slots}`"
            )
        if not self.imbalance_min >= 1.0:
            raise ConfigError(f"`experts.imbalance_min` must be at least 1 (the mean load), got `{self.imbalance_min}`")
