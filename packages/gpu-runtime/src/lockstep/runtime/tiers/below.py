"""The tiers of a rank by its options: how much host memory its pages take, and what carries out its moves."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.kv.block_tiers import host_block_counts
from lockstep.host.cache_moves import BlockKind
from lockstep.host.page_store import open_store
from lockstep.host.tier_options import bytes_with_blocks, cache_tiers
from lockstep.runtime.canary import Canary
from lockstep.runtime.draft_sources import Draft, draft_page_bytes
from lockstep.runtime.executor import Executor
from lockstep.runtime.memory import MIB
from lockstep.runtime.models import LanguageModel
from lockstep.runtime.page_bytes import drafting_bytes_of, layer_bytes_of
from lockstep.runtime.rank_wire import RankSettings
from lockstep.runtime.states.pool import slot_bytes_of
from lockstep.runtime.tiers.identity import Identity, random_weights_digest, weights_digest
from lockstep.runtime.tiers.mover import HostMover
from lockstep.runtime.tiers.page_parts import all_parts_of

log = logging.getLogger("lockstep.runtime")


def with_tiers(settings: RankSettings, config: SchedConfig, model: LanguageModel, draft: Draft | None) -> SchedConfig:
    """Return the settings of the scheduler with the tiers below the device. Raises ConfigError.

    Bytes are those of this rank, whose stage has the layers of `model`.
    """
    page_size, canary = config.page_size, 0
    if settings.debug:
        canary = Canary.bytes_per_page(page_size)
    windows = config.hybrid is not msgspec.UNSET and config.hybrid.window_pages > 0
    page, window = layer_bytes_of(model, page_size, split=windows)
    elsewhere = config.speculative_method == "draft_model" and not model.stage.is_first
    page += drafting_bytes_of(draft, config, elsewhere=elsewhere) + canary
    if config.hybrid is not msgspec.UNSET:
        state = slot_bytes_of(model.states) + (Canary.bytes_per_page(1) if settings.debug else 0)
        blocks = [(config.hybrid.window_pages, window + canary), (config.hybrid.state_slots, state)]
        page = bytes_with_blocks(page, config.pages, blocks)
    of_all = page * model.parallel.ranks
    if model.stage.count > 1:  # page bytes are proportional to layers, but for some numbers of each token
        of_all = of_all * model.settings.layers // model.layers
        of_all += draft_page_bytes(settings, page_size, model) if elsewhere else 0
    return msgspec.structs.replace(config, tiers=cache_tiers(settings, of_all))


def make_mover(settings: RankSettings, model: LanguageModel, config: SchedConfig, executor: Executor) -> HostMover:
    """Make host memory and storage of a rank. Raises ConfigError if there is no room, or the storage cannot be opened.

    Ranks share a folder, and its bound.
    """
    assert config.tiers is not msgspec.UNSET
    parts = all_parts_of(executor.attention.pool, executor.drafter, executor.canary)
    counts: dict[BlockKind, int] = {"page": config.tiers.host_pages}
    if config.hybrid is not msgspec.UNSET:
        for kind, count in host_block_counts(config.hybrid, config.pages, config.tiers.host_pages).items():
            counts[kind] = count
    store, identity = None, Identity(b"")
    if settings.storage is not None:
        bytes_max, page_bytes = int(settings.storage_gb * 1e9), parts["page"].size
        store = open_store(settings.storage, page_bytes=page_bytes, bytes_max=bytes_max, with_blocks=len(parts) > 1)
        shares = model.parallel.shared is not None
        parallel: tuple[int, ...] = (0 if shares else model.parallel.rank, model.parallel.ranks, *((1,) * shares))
        if model.stage.count > 1:
            parallel += (model.stage.number, model.stage.count)
        if settings.ep > 1:
            parallel += (settings.ep, int(settings.moe_a2a))
        layout = "\n\n".join(one.layout() for one in parts.values())
        computed = (layout, type(model).__name__, str(model.dtype), model.activations, settings.numerics)
        folder, seed = Path(settings.model), settings.random_weights_seed
        weights = weights_digest(folder) if seed is None else random_weights_digest(folder, seed)
        drafts = None if settings.draft_model is None else weights_digest(Path(settings.draft_model)).hex()
        identity = Identity(weights, (*computed, executor.attention.name, *parallel, drafts))
    made = HostMover(parts, counts, executor.lane, store, identity)
    lines = [
        f"{counts[kind]:9,} {kind + 's':8} of {one.size / 1024:10,.1f} KiB {counts[kind] * one.size / MIB:10,.0f} MiB"
        for kind, one in parts.items()
    ]
    if settings.storage is not None:
        lines.append(f"storage in {settings.storage}, up to {settings.storage_gb:g} GB")
    log.info("host memory below the KV cache\n%s", "\n".join(lines))
    return made
