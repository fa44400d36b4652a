"""What lies below the device's cache, in the words of the command line. Reads nothing heavy, for the sake of --help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from lockstep.core.config import CacheTiers, PrefetchPolicy, WritePolicy
from lockstep.core.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.sim.cache_tiers import PageBytes


class HostTiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies below the device's cache, in the words of the command line. Nothing does without `host_cache_gb`."""

    host_cache_gb: float = 0.0  # 1e9 bytes of host memory for the KV of one engine, all its GPUs together; 0: none
    host_link_gbs: float | None = None  # between a GPU and the host, one direction; None: the GPU's PCIe
    host_write_policy: WritePolicy = "write_through"
    load_tokens_min: int = 10
    storage_gb: float = 0.0  # 1e9 bytes of storage; 0: none
    storage_gbs: float = 10.0  # one direction, for all GPUs together
    storage_latency_us: int = 200
    prefetch_policy: PrefetchPolicy = "timeout"
    prefetch_tokens_min: int = 256

    def __post_init__(self) -> None:
        if not self.host_cache_gb:
            given = [name for name, value in _given(self).items() if value]
            if given:
                raise ConfigError(
                    f"`{given[0]}` is about a tier below the device, but `host_cache_gb` is 0\n"
                    "hint: add --host-cache-gb, such as 1000"
                )
        for name, choices in (("host_write_policy", WritePolicy), ("prefetch_policy", PrefetchPolicy)):
            if getattr(self, name) not in get_args(choices):
                *others, last = get_args(choices)
                raise ConfigError(f"`{name}` must be {', '.join(others)} or {last}, got `{getattr(self, name)}`")
        for name in ("host_cache_gb", "storage_gb"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ConfigError(f"`{name}` must be gigabytes from 0 on, got `{getattr(self, name)}`")
        for name in ("host_link_gbs", "storage_gbs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"`{name}` must be gigabytes per second above 0, got `{value}`")
        if not self.storage_gb:
            for name in ("storage_gbs", "storage_latency_us", "prefetch_policy", "prefetch_tokens_min"):
                if name in _given(self):
                    raise ConfigError(f"`{name}` is about storage, but `storage_gb` is 0\nhint: add --storage-gb")

    def settings(self, pages: PageBytes) -> CacheTiers | msgspec.UnsetType:
        """The scheduler's part of it; unset if there is no host tier. Raises ConfigError if not one page fits."""
        if not self.host_cache_gb:
            return msgspec.UNSET
        host_pages = int(self.host_cache_gb * 1e9) // pages.on_host
        if not host_pages:
            raise ConfigError(
                f"`host_cache_gb` {self.host_cache_gb:g} does not hold one page of {pages.on_host:,} bytes\n"
                "hint: raise --host-cache-gb"
            )
        return CacheTiers(
            host_pages=host_pages,
            write_policy=self.host_write_policy,
            load_tokens_min=self.load_tokens_min,
            storage=self.storage_gb > 0,
            prefetch_policy=self.prefetch_policy,
            prefetch_tokens_min=self.prefetch_tokens_min,
        )


def _given(tiers: HostTiers) -> dict[str, Any]:
    """What differs from its default."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(HostTiers)}
    return {name: value for name, value in msgspec.structs.asdict(tiers).items() if value != defaults[name]}


def host_tiers(given: Mapping[str, Any]) -> HostTiers:
    """What was asked for by name. Raises ConfigError."""
    return HostTiers(**given)


NO_TIERS = HostTiers()
TIER_KEYS = tuple(field.name for field in msgspec.structs.fields(HostTiers))
