"""The kind of radix cache of an engine: none, least recently used first, or with parts of tenants."""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.config import SchedConfig
from lockstep.core.kv.radix import NoRadixCache, RadixCache
from lockstep.core.kv.radix_shares import SharedRadixCache


def new_radix_cache(config: SchedConfig) -> RadixCache:
    """Return an empty radix cache for these settings."""
    if not config.radix_cache:
        return NoRadixCache()
    if config.guaranteed_pages:
        return SharedRadixCache(config.page_size, config.radix_capacity_pages, config.guaranteed_pages)
    return RadixCache(config.page_size, config.radix_capacity_pages)


def radix_cache_of(state: dict[str, Any] | None) -> RadixCache:
    """Return the radix cache of a snapshot."""
    if state is None:
        return NoRadixCache()
    return (SharedRadixCache if "guaranteed_pages" in state else RadixCache).load(state)
