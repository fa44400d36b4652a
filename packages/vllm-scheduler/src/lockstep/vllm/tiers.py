"""Host memory below vLLM's KV cache, the scheduler's half: orders of the core, and their answers.

    core                                   this module                        vLLM's workers (host_tier.py)
    CopyToHost, LoadFromHost            -> with the next plan              -> before the pass of the plan
    HostCopyFinished                    <- with the result of that plan    <-

A plan without tokens is sent, too, if it brings copies: the requests that wait for them have nothing to compute.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.contract.commands import CopyToHost, LoadFromHost
from lockstep.core.contract.config import CacheTiers
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import HostCopyFinished
from lockstep.vllm.groups import FIRST_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

CONNECTOR = ("HostTier", "lockstep.vllm.host_tier")
"""Values of `kv_connector` and `kv_connector_module_path`."""

Copies = list[tuple[bool, list[int], list[int]]]
"""Copies in order: whether to the host, blocks of the device, pages of the host."""


class HostTierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of HostTier."""

    host_gb: float  # host memory of each worker, in 1e9 bytes
    write_policy: str = "write_through"
    load_tokens_min: int = 10


def uses_host_tier(vllm_config: VllmConfig) -> bool:
    """Whether the KV connector is HostTier."""
    config = vllm_config.kv_transfer_config
    return config is not None and (config.kv_connector, config.kv_connector_module_path) == CONNECTOR


def _settings(vllm_config: VllmConfig) -> HostTierSettings:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    try:
        return msgspec.convert(extra, HostTierSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"`kv_connector_extra_config` of HostTier: {error}\n"
            f"hint: fields are {', '.join(HostTierSettings.__struct_fields__)} (docs/vllm.md)"
        ) from error


def host_pages(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many pages the host memory of a worker holds.

    Raises: ConfigError if there is room for none, or for wrong settings.
    """
    host_bytes = _settings(vllm_config).host_gb * 1e9
    page_bytes = sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups
    )
    if host_bytes < page_bytes:
        raise ConfigError(
            f"`host_gb` {host_bytes / 1e9} of HostTier is less than one page, {page_bytes / 1e9:.6f} GB\nhint: raise it"
        )
    return int(host_bytes // page_bytes)


def cache_tiers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheTiers:
    """Return the core's settings of the tier."""
    settings = _settings(vllm_config)
    return CacheTiers(
        host_pages=host_pages(vllm_config, kv_cache_config),
        write_policy=settings.write_policy,  # type: ignore[arg-type]  # CacheTiers checks it
        load_tokens_min=settings.load_tokens_min,
    )


class HostCopies:
    """The copies that the core has ordered and that are not answered."""

    def __init__(self, *, present: bool) -> None:
        """
        Args:
            present: whether there is host memory.
        """
        self.present = present
        self.loaded_pages = 0  # by answered copies, so far
        self.written_pages = 0
        self._ordered: list[CopyToHost | LoadFromHost] = []  # since the newest plan
        self._sent: deque[list[CopyToHost | LoadFromHost]] = deque()  # with each plan without result, oldest first

    @property
    def is_busy(self) -> bool:
        """Whether a copy is not answered."""
        return bool(self._ordered) or any(self._sent)

    def order(self, command: CopyToHost | LoadFromHost) -> None:
        """Take in an order of the core."""
        self._ordered.append(command)

    def send(self, output: Any) -> None:
        """Put the ordered copies into a plan, a vLLM SchedulerOutput. `answers` is called for each plan, in order."""
        if not self.present:
            return
        from lockstep.vllm.host_tier import PlanCopies

        output.kv_connector_metadata = PlanCopies(
            [
                (isinstance(one, CopyToHost), (one.device_pages + FIRST_BLOCK).tolist(), one.host_pages.tolist())
                for one in self._ordered
            ]
        )
        output.has_sync_kv_loads = bool(self._ordered)  # workers copy before the pass, not behind it
        self._sent.append(self._ordered)
        self._ordered = []

    def answers(self, time_us: int) -> list[HostCopyFinished]:
        """Return the answers to the copies of the oldest plan without result, whose result has come."""
        if not self.present:
            return []
        found = []
        for one in self._sent.popleft():
            count = len(one.device_pages)
            if isinstance(one, CopyToHost):
                self.written_pages += count
            else:
                self.loaded_pages += count
            found.append(HostCopyFinished(time_us, one.copy_id, count, generation=one.generation))
        return found

    def void(self) -> None:
        """Drop the copies that no plan has: the core has lost the device, and its pages are given out again.

        Copies of plans in flight run before any plan that follows, and their answers belong to an older generation.
        """
        self._ordered.clear()
