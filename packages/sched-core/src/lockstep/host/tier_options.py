"""The tiers below the device's cache by options of a command line, and the scheduler's settings that follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, get_args

from lockstep.core.contract.config import CacheTiers, PrefetchPolicy, WritePolicy
from lockstep.core.contract.errors import ConfigError

OF_STORAGE = ("storage_gb", "prefetch_policy", "prefetch_tokens_min")
OF_TIERS = ("host_write_policy", "load_tokens_min", "storage", *OF_STORAGE)


class TierSizes(Protocol):
    """Options from which the scheduler's settings follow."""

    @property
    def host_cache_gb(self) -> float: ...
    @property
    def host_write_policy(self) -> WritePolicy: ...
    @property
    def load_tokens_min(self) -> int: ...
    @property
    def storage_gb(self) -> float: ...
    @property
    def prefetch_policy(self) -> PrefetchPolicy: ...
    @property
    def prefetch_tokens_min(self) -> int: ...


class EngineTiers(TierSizes, Protocol):
    """Options of an engine with a model."""

    @property
    def storage(self) -> str | None: ...


def check_tiers(given: EngineTiers, defaults: EngineTiers) -> None:
    """Raise ConfigError for options that contradict each other or are out of range."""
    if not given.host_cache_gb:
        for name in OF_TIERS:
            if getattr(given, name) != getattr(defaults, name):
                raise ConfigError(
                    f"`{name}` requires memory below the device, but `host_cache_gb` is 0\n"
                    "hint: add --host-cache-gb, such as 20"
                )
    check_values(given)
    if given.storage is None:
        for name in OF_STORAGE:
            if getattr(given, name) != getattr(defaults, name):
                raise ConfigError(f"`{name}` requires `storage`\nhint: add --storage DIR")
    elif not given.storage_gb:
        raise ConfigError(f"`storage` is {given.storage}, but `storage_gb` is 0\nhint: add --storage-gb, such as 200")


def check_values(given: TierSizes) -> None:
    """Raise ConfigError for a value that is out of range by itself."""
    for name, choices in (("host_write_policy", WritePolicy), ("prefetch_policy", PrefetchPolicy)):
        if getattr(given, name) not in get_args(choices):
            *others, last = get_args(choices)
            raise ConfigError(f"`{name}` must be {', '.join(others)} or {last}, got `{getattr(given, name)}`")
    for name in ("host_cache_gb", "storage_gb"):
        value = getattr(given, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise ConfigError(f"`{name}` must be at least 0 gigabytes and below 1e9, got `{value}`")
    for name, least in (("load_tokens_min", 0), ("prefetch_tokens_min", 1)):
        value = getattr(given, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"`{name}` must be a whole number of at least {least}, got `{value}`")


def bytes_with_blocks(page_bytes: int, pages: int, blocks: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of a host page with its share of windows and states, of which it has as many as on the device.

    Args:
        page_bytes: of the page alone.
        pages: of the device.
        blocks: numbers of windows and of states on the device, and the bytes of one.
    """
    return page_bytes + -(-sum(count * size for count, size in blocks) // pages)


def cache_tiers(given: TierSizes, page_bytes: int) -> CacheTiers:
    """Return the scheduler's settings for these tiers.

    Args:
        page_bytes: bytes of one page on the host, on all ranks together, with its share of windows and states.
    Raises: ConfigError if the host cache or the storage is smaller than one page.
    """
    for name in ("host_cache_gb", "storage_gb"):
        gigabytes = getattr(given, name)
        if gigabytes and int(gigabytes * 1e9) < page_bytes:
            raise ConfigError(
                f"`{name}` {gigabytes:g} does not hold one page of {page_bytes:,} bytes\n"
                f"hint: raise --{name.replace('_', '-')}"
            )
    return CacheTiers(
        host_pages=int(given.host_cache_gb * 1e9) // page_bytes,
        write_policy=given.host_write_policy,
        load_tokens_min=given.load_tokens_min,
        storage=given.storage_gb > 0,
        prefetch_policy=given.prefetch_policy,
        prefetch_tokens_min=given.prefetch_tokens_min,
    )
