"""Host memory below vLLM's KV cache: the core decides what is copied and when, vLLM's workers copy.

    --kv-transfer-config '{"kv_connector": "HostTier", "kv_connector_module_path": "lockstep.vllm.host_tier",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"host_gb": 20}}'

This module is the workers' half, a KV connector of vLLM. `tiers.py` is the scheduler's half. A plan brings the copies
that the core has ordered since the plan before, and each worker carries them out in this order before the pass. So a
page is read before the pass that overwrites it, and written before a pass that reads it, without further locks.

vLLM's own connectors decide in their scheduler half what they keep and which tokens of a prompt they have. The core
decides that itself, in a form that a journal replays, so they are refused at start (`settings.py: unsupported`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.contract.errors import ConfigError
from lockstep.vllm.tiers import Copies, host_pages
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HostTier(KVConnectorBase_V1):
    """Copies blocks between the KV cache of one worker and its host memory."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError in a scheduler other than Lockstep's, which does not make the scheduler's half."""
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.refuse_other_schedulers()
        self._pages = host_pages(vllm_config, kv_cache_config)
        self._blocks = kv_cache_config.num_blocks
        self._pairs: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # of each layer: device [blocks, ...], host [pages, ...]

    @staticmethod
    def refuse_other_schedulers() -> None:
        """Raises ConfigError."""
        raise ConfigError(
            "HostTier carries out what Lockstep's scheduler decides, and another scheduler runs\n"
            "hint: --scheduler-cls lockstep.vllm.Scheduler"
        )

    # -------------------------------------------------------------------------------------------------------- workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocate host memory for the layers of this worker; layers that share their cache share it here, too."""
        found: dict[int, torch.Tensor] = {}
        for name, cache in kv_caches.items():
            if cache.shape[0] % self._blocks:
                raise ConfigError(
                    f"HostTier: the KV cache of layer {name} has the shape {tuple(cache.shape)}; its first dimension "
                    f"must be a multiple of the {self._blocks} blocks"
                )
            found.setdefault(cache.data_ptr(), cache.unflatten(0, (self._blocks, -1)))
        pinned = next(iter(found.values())).is_cuda
        self._pairs = [
            (cache, torch.empty((self._pages, *cache.shape[1:]), dtype=cache.dtype, pin_memory=pinned))
            for cache in found.values()
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carry out the copies of this plan, in their order."""
        del forward_context, kwargs
        copies = self._get_connector_metadata()
        assert isinstance(copies, PlanCopies)
        for to_host, blocks, pages in copies.copies:
            for device, host in self._pairs:
                at = torch.tensor(blocks, device=device.device)
                if to_host:
                    host[pages] = device[at].to("cpu")
                else:
                    device[at] = host[pages].to(device.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copies are complete when `start_load_kv` returns, or ordered before the pass on its stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is copied during a pass."""

    def wait_for_save(self) -> None:
        """Nothing is copied during a pass."""

    # ------------------------------------------------------------------------ the scheduler's half, which is `tiers.py`

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Not called by Lockstep's scheduler: a prompt's tokens of the host are loaded before it is admitted."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Not called by Lockstep's scheduler."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return no copies; Lockstep's scheduler puts its own into the plan."""
        return PlanCopies([])


class PlanCopies(KVConnectorMetadata):
    """The copies that a plan brings to the workers."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
