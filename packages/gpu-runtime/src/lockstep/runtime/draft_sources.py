"""What drafts in an engine: a draft model, a head of EAGLE-3, or the layer of the model itself (MTP)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import ModelBackend, Numerics
from lockstep.host.quantization import Fp8Activations
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.checkpoint import Checkpoint, CheckpointError, fill_randomly, load
from lockstep.runtime.draft_model import ModelDrafter
from lockstep.runtime.drafting import Drafter, NgramDrafter
from lockstep.runtime.head_drafter import HeadDrafter
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.memory import explained
from lockstep.runtime.models import (
    Decoder,
    LanguageModel,
    ModelSettings,
    build_model,
    read_settings,
    weights_read,
)
from lockstep.runtime.models.draft_heads import MTP, DraftHead, MtpHead, check_whole, eagle_head
from lockstep.runtime.models.packed import pack_matrices
from lockstep.runtime.overlap import StreamLane
from lockstep.runtime.rank_wire import RankSettings
from lockstep.runtime.stage_drafts import ReceivedDrafts, SentDrafts
from lockstep.runtime.stages import StageLinks

Draft: TypeAlias = LanguageModel | DraftHead


def takes_media(draft: Draft | None) -> bool:
    """Return whether prompts may have media beside what drafts; None: n-grams, or nothing."""
    return draft is None or (isinstance(draft, DraftHead) and draft.takes_media)


def check_draft_fits(folder: str | Path, model: ModelSettings, backend: ModelBackend, context_tokens: int) -> None:
    """Raise ConfigError if a draft model does not fit the model, by the settings of both.

    Args:
        context_tokens: of the longest request.
    """
    draft = read_settings(folder, backend=backend)
    if draft.vocab != model.vocab or not draft.generates:
        raise ConfigError(
            f"`draft_model` {folder} has {draft.vocab:,} tokens, the model {model.vocab:,}\n"
            "hint: take a model that generates, of the same family"
        )
    if draft.context_tokens < context_tokens:
        raise ConfigError(
            f"`draft_model` takes {draft.context_tokens:,} tokens, but `context_tokens_max` is {context_tokens:,}\n"
            "hint: a shorter context_tokens_max, or another draft model"
        )


def layers_beside(settings: RankSettings) -> float:
    """Return to how many layers of the model one pass of its draft model amounts, by the weights that they read."""
    if settings.draft_model is None:
        return 0.0
    of_model = weights_read(settings.model, settings.model_backend)
    of_draft = weights_read(settings.draft_model, settings.model_backend)
    return (of_draft.layers + of_draft.logits) / of_model.of_layer


def check_trees(config: SchedConfig, numerics: Numerics, *, debug: bool) -> None:
    """Raise ConfigError if trees of drafts cannot be verified here."""
    if config.speculative_method == "draft_model":
        raise ConfigError(
            f"`speculative_topk` is {config.speculative_topk}, but a draft model drafts chains here\n"
            "hint: speculative_topk 1, or a head: speculative_method eagle or mtp"
        )
    if numerics == "invariant":
        raise ConfigError(
            f"`numerics` is invariant, but with `speculative_topk` {config.speculative_topk} sums are in the order of "
            "the slots of a tree, not in that of a decode\nhint: numerics fast, or speculative_topk 1"
        )
    if debug:
        raise ConfigError(
            f"`debug` compares the KV of each position, and `speculative_topk` {config.speculative_topk} has several "
            "tokens at one\nhint: speculative_topk 1 with debug"
        )


def taps_of(draft: Draft | None) -> tuple[int, ...]:
    """Return the layers of a model whose input a drafter reads."""
    return tuple(draft.taps) if isinstance(draft, DraftHead) else ()


def draft_of(settings: RankSettings, method: object, model: LanguageModel, dtype: torch.dtype | None) -> Draft | None:
    """Build what drafts for a model by a method that is not `ngram`. None: another stage has the draft model.

    Args:
        dtype: of a draft model; heads have that of the model.
    Raises: ConfigError if the folder holds something else, or does not fit the model.
    """
    if method == "draft_model" and not model.stage.is_first:
        return None
    if method == "mtp":
        return _mtp_head(settings.model, model, settings.random_weights_seed)
    assert settings.draft_model is not None
    if method == "eagle":
        return eagle_head(settings.draft_model, model)
    return _draft_model(settings, settings.draft_model, model, dtype)


def draft_page_bytes(settings: RankSettings, page_size: int, model: LanguageModel) -> int:
    """Return the bytes of a page of the draft model, which another stage of `model` has; 0 without a draft model."""
    if settings.draft_model is None:
        return 0
    draft = read_settings(settings.draft_model, backend=settings.model_backend)
    return KvPool.bytes_per_page(draft.layers, page_size, draft.kv_heads, draft.head_dim, model.dtype)


def make_drafter(
    draft: Draft | None,
    config: SchedConfig,
    lane: StreamLane,
    links: StageLinks | None,
    attention_of: Callable[[Draft], AttentionBackend],
) -> Drafter | None:
    """Make the drafter of an executor; None: its plans verify no drafts.

    Args:
        draft: the model or head that drafts here.
        links: to the other pipeline stages; None: there is one stage.
        attention_of: makes the attention of the draft, over a pool of its own.
    """
    if isinstance(draft, DraftHead):
        return HeadDrafter(draft, attention_of(draft), lane.upload)
    if draft is not None:
        drafter = ModelDrafter(draft, attention_of(draft), config.pages)
        return drafter if links is None else SentDrafts(drafter, links)
    if not config.speculates:
        return None
    if links is not None and config.speculative_method != "ngram":
        return ReceivedDrafts(links)
    return NgramDrafter((config.pages + 1) * config.page_size, config.page_size, lane.device)


def _draft_model(settings: RankSettings, folder: str, model: LanguageModel, dtype: torch.dtype | None) -> LanguageModel:
    """Build the draft model. Raises ConfigError if its vocabulary is not the model's, or if it does not generate."""
    with explained("the draft model's weights", model.device, "a smaller draft model, or none"):
        rounds: Fp8Activations = "off" if settings.fp8_activations == "off" else "auto"  # `on` is for the model itself
        draft = build_model(Path(folder), dtype, model.device, fp8_activations=rounds, backend=settings.model_backend)
        pack_matrices(draft)
    if draft.settings.vocab != model.settings.vocab or not draft.settings.generates:
        raise ConfigError(
            f"`draft_model` {folder} has {draft.settings.vocab:,} tokens, the model {model.settings.vocab:,}\n"
            "hint: take a model that generates, of the same family"
        )
    return draft


def _mtp_head(folder: str | Path, model: LanguageModel, random_weights_seed: int | None) -> DraftHead:
    """Return the MTP layer of the model's own folder; with a seed, one with random weights.

    Raises: ConfigError if the folder has none.
    """
    check_whole(model, "mtp")
    with torch.no_grad():
        head = _mtp_layer(model)
        if random_weights_seed is not None:
            fill_randomly(head.tensors(), random_weights_seed)
        else:
            with Checkpoint(Path(folder)) as checkpoint:
                if f"{MTP}.fc.weight" not in checkpoint.stored:
                    raise CheckpointError(
                        folder,
                        [f"{MTP}.fc.weight: missing, and with it the layer that drafts"],
                        "another method of drafts",
                    )
                wanted = list(head.tensors(checkpoint.stored))
                load(wanted, checkpoint, surplus=lambda name: not name.startswith(f"{MTP}."))
        head.prepare()
    return head.eval()


def _mtp_layer(model: LanguageModel) -> DraftHead:
    """Return the MTP layer of a model without weights, of the code that runs the model. Raises ConfigError."""
    if isinstance(model, Decoder):
        return MtpHead(model)
    from lockstep.runtime.from_transformers.decoder import TransformersDecoder
    from lockstep.runtime.from_transformers.mtp import LibraryMtpHead

    assert isinstance(model, TransformersDecoder), "a model that generates is a decoder"
    return LibraryMtpHead(model)
