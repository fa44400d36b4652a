"""Options of memory beside and below the device's pages: host, storage, separate pools of other layers.

This module imports nothing heavy, so that --help stays fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from lockstep.core.contract.config import CacheTiers, PrefetchPolicy, WritePolicy
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import Option
from lockstep.host.tier_options import cache_tiers, check_values

STORAGE_KEYS = (
    "storage_gbs", "storage_latency_us", "storage_latency_spread", "prefetch_policy", "prefetch_tokens_min"
)  # fmt: skip
SPREAD_MAX = 10.0  # of latencies: a transfer in a thousand then takes over 70 times the mean
LINK_LATENCY_US = 10  # estimate: time to begin a copy between a GPU and the host


class HybridShares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Division of memory among layers of different kinds, see hybrid_memory.py. The default ratios are SGLang's."""

    hybrid_memory: Annotated[
        Literal["on", "off"], Option("on: separate pools for sliding windows and states of linear attention")
    ] = "off"
    swa_full_tokens_ratio: Annotated[
        float, Option("with --hybrid-memory: positions of the sliding-window pool over those of the full one")
    ] = 0.8
    mamba_full_memory_ratio: Annotated[float, Option("with --hybrid-memory: bytes of states over bytes of KV")] = 0.9
    mamba_track_interval: Annotated[int, Option("with --hybrid-memory: tokens between checkpoints of a state")] = 256

    def __post_init__(self) -> None:
        if self.hybrid_memory not in ("on", "off"):
            raise ConfigError(f"`hybrid_memory` must be on or off, got `{self.hybrid_memory}`")
        if self.hybrid_memory == "off":
            given = [name for name, value in _given(self).items() if value != "off"]
            if given:
                raise ConfigError(
                    f"`{given[0]}` requires separate pools, but `hybrid_memory` is off\nhint: add --hybrid-memory on"
                )
        if not 0.0 < self.swa_full_tokens_ratio <= 1.0:
            raise ConfigError(
                f"`swa_full_tokens_ratio` must be above 0 and at most 1, got `{self.swa_full_tokens_ratio}`"
            )
        if not 0.0 < self.mamba_full_memory_ratio < 1e3:
            raise ConfigError(
                f"`mamba_full_memory_ratio` must be above 0 and below 1000, got `{self.mamba_full_memory_ratio}`"
            )
        if self.mamba_track_interval < 1:
            raise ConfigError(f"`mamba_track_interval` must be at least 1, got `{self.mamba_track_interval}`")

    @property
    def on(self) -> bool:
        """Whether layers of other kinds have separate pools."""
        return self.hybrid_memory == "on"


class HostTiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory below the device's cache, by options of the command line. Without `host_cache_gb` there is none."""

    host_cache_gb: Annotated[float, Option("host memory for an engine's KV, in gigabytes; 0: none")] = (
        0.0  # 1e9 bytes, over all GPUs of the engine
    )
    host_link_gbs: Annotated[
        float | None, Option("GB/s between a GPU and the host, each way: 450 is NVLink-C2C", default="PCIe")
    ] = None
    host_link_latency_us: Annotated[int, Option("time until a copy to or from the host begins")] = LINK_LATENCY_US
    host_link_latency_spread: Annotated[float, Option("standard deviation of it, as a share of it")] = 0.0
    host_write_policy: Annotated[
        WritePolicy, Option("when KV is copied to the host: write_through, write_through_selective or write_back")
    ] = "write_through"
    load_tokens_min: Annotated[int, Option("fewer cached tokens on the host are computed again instead of loaded")] = 10
    storage_gb: Annotated[float, Option("storage below the host, in gigabytes; 0: none")] = 0.0  # 1e9 bytes
    storage_gbs: Annotated[float, Option("GB/s of storage, each way, for all GPUs of an engine")] = 10.0
    storage_latency_us: Annotated[int, Option("time until the first byte from storage arrives")] = 200
    storage_latency_spread: Annotated[float, Option("standard deviation of it, as a share of it")] = 0.0
    prefetch_policy: Annotated[
        PrefetchPolicy, Option("how long a request waits for storage: timeout, wait_complete or best_effort")
    ] = "timeout"
    prefetch_tokens_min: Annotated[int, Option("shorter cached prefixes are not read from storage")] = 256

    def __post_init__(self) -> None:
        if not self.host_cache_gb:
            given = [name for name, value in _given(self).items() if value]
            if given:
                raise ConfigError(
                    f"`{given[0]}` requires a tier below the device, but `host_cache_gb` is 0\n"
                    "hint: add --host-cache-gb, such as 1000"
                )
        check_values(self)
        for name in ("host_link_gbs", "storage_gbs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"`{name}` must be gigabytes per second above 0, got `{value}`")
        for name in ("host_link_latency_spread", "storage_latency_spread"):
            if not 0.0 <= getattr(self, name) <= SPREAD_MAX:
                raise ConfigError(f"`{name}` must be from 0 to {SPREAD_MAX:g}, got `{getattr(self, name)}`")
        for name in ("host_link_latency_us", "storage_latency_us"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{name}` must be at least 0, got `{getattr(self, name)}`")
        if not self.storage_gb:
            for name in STORAGE_KEYS:
                if name in _given(self):
                    raise ConfigError(f"`{name}` requires storage, but `storage_gb` is 0\nhint: add --storage-gb")

    def settings(self, page_bytes: int) -> CacheTiers | msgspec.UnsetType:
        """Return the scheduler's settings for these tiers, or unset without a host tier.

        Args:
            page_bytes: bytes of one page on the host.
        Raises: ConfigError if the host cache or the storage is smaller than one page.
        """
        if not self.host_cache_gb:
            return msgspec.UNSET
        return cache_tiers(self, page_bytes)


def _given(tiers: HostTiers | HybridShares) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(type(tiers))}
    return {name: value for name, value in msgspec.structs.asdict(tiers).items() if value != defaults[name]}


def host_tiers(given: Mapping[str, Any]) -> HostTiers:
    """Return the tiers below the device, from the settings that were given. Raises ConfigError."""
    return HostTiers(**{name: value for name, value in given.items() if name not in HYBRID_KEYS})


def hybrid_shares(given: Mapping[str, Any]) -> HybridShares:
    """Return the pools beside the pages of full attention, from the settings that were given. Raises ConfigError."""
    return HybridShares(**{name: value for name, value in given.items() if name in HYBRID_KEYS})


NO_TIERS = HostTiers()
HYBRID_KEYS = tuple(field.name for field in msgspec.structs.fields(HybridShares))
TIER_KEYS = (*(field.name for field in msgspec.structs.fields(HostTiers)), *HYBRID_KEYS)
