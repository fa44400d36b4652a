"""What drafts in an engine: a draft model, a head of EAGLE-3, or the layer of the model itself (MTP)."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import Numerics
from lockstep.host.quantization import Fp8Activations
from lockstep.runtime.checkpoint import Checkpoint, CheckpointError, fill_randomly, load
from lockstep.runtime.memory import explained
from lockstep.runtime.models import Decoder, LanguageModel, build_model
from lockstep.runtime.models.draft_heads import MTP, DraftHead, MtpHead, check_whole, eagle_head
from lockstep.runtime.models.packed import pack_matrices
from lockstep.runtime.rank_wire import RankSettings

Draft: TypeAlias = LanguageModel | DraftHead


def takes_media(draft: Draft | None) -> bool:
    """Return whether prompts may have media beside what drafts; None: n-grams, or nothing."""
    return draft is None or (isinstance(draft, DraftHead) and draft.takes_media)


def check_draft_model(folder: str | Path | None, method: object, ranks: int) -> None:
    """Raise ConfigError if the speculative method and the draft model do not fit together."""
    if folder is None and method in ("draft_model", "eagle"):
        raise ConfigError(f"`speculative_method` is {method}, but no `draft_model` is given\nhint: give its folder")
    if method == "mtp" and ranks > 1:
        raise ConfigError(
            f"`speculative_method` is mtp, but {ranks} processes run the model: its layer is not split\n"
            "hint: speculative_method ngram needs no layer"
        )
    if folder is not None and method not in ("draft_model", "eagle"):
        raise ConfigError(f"`draft_model` is {folder}, but `speculative_method` is {method}\nhint: drop one of the two")
    if folder is not None and ranks > 1:
        raise ConfigError(
            f"`draft_model` is {folder}, but `tp` is {ranks}: a draft model is not split\n"
            "hint: speculative_method ngram needs no model"
        )


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


def draft_of(settings: RankSettings, method: object, model: LanguageModel, dtype: torch.dtype | None) -> Draft:
    """Build what drafts for a model by a method that is not `ngram`.

    Args:
        dtype: of a draft model; heads have that of the model.
    Raises: ConfigError if the folder holds something else, or does not fit the model.
    """
    if method == "mtp":
        return _mtp_head(settings.model, model, settings.random_weights_seed)
    assert settings.draft_model is not None
    if method == "eagle":
        return eagle_head(settings.draft_model, model)
    return _draft_model(settings, settings.draft_model, model, dtype)


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
