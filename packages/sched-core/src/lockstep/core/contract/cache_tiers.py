"""Settings of the tiers below the radix cache: host memory and storage."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.floats import store_floats
from lockstep.core.contract.setting import one_of

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


class CacheTiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers below the radix cache: host memory, and storage below that (docs/tiers.md). Defaults are SGLang's."""

    host_pages: int  # KV pages of host memory
    write_policy: WritePolicy = "write_through"  # when a page is copied to the host: see tiers.py
    write_uses: int = 2  # under write_through_selective: uses of a page, incl. its computation, until it is copied
    load_tokens_min: int = 10  # if only the host has fewer tokens than this, they are computed again, not loaded
    load_pages_max: int | None = None  # pages being loaded to the device at once, or one load; None: no limit
    load_timeout_us: int | None = None  # longest wait of a request for a load, before it computes; None: no limit
    storage: bool = False  # a tier below the host: pages of the host are written to it and fetched from it
    prefetch_policy: PrefetchPolicy = "timeout"  # how long a request waits for its prefix from storage
    prefetch_tokens_min: int = 256  # fewer tokens are not prefetched
    prefetch_timeout_us: int = 1_000_000  # under policy timeout: the wait of a request, in us ...
    prefetch_timeout_us_per_ki_token: int = 250_000  # ... and the additional wait for each 1,024 requested tokens
    prefetch_share: float = 0.5  # largest share of the host's pages that prefetches may fill at once

    def __post_init__(self) -> None:
        for name in ("host_pages", "write_uses", "load_pages_max", "load_timeout_us", "prefetch_tokens_min"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"`tiers.{name}` must be a whole number of at least 1, got `{value}`")
        for name in ("load_tokens_min", "prefetch_timeout_us", "prefetch_timeout_us_per_ki_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"`tiers.{name}` must be a whole number, 0 or more, got `{value}`")
        for name, choices in (("write_policy", get_args(WritePolicy)), ("prefetch_policy", get_args(PrefetchPolicy))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"`tiers.{name}` must be {one_of(choices)}, got `{getattr(self, name)}`")
        store_floats(self, ("prefetch_share",))
        if not isinstance(self.prefetch_share, float) or not 0.0 < self.prefetch_share <= 1.0:
            raise ConfigError(f"`tiers.prefetch_share` must be above 0 and at most 1, got `{self.prefetch_share}`")

    @property
    def uses_to_write(self) -> int:
        """Uses after which a page is copied to the host while it is cached on the device."""
        return self.write_uses if self.write_policy == "write_through_selective" else 1
