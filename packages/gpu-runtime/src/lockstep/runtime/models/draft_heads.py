"""Heads that draft: one layer that continues from the hidden states of a model.

    hidden states of the model, of the token before      embedding of a token
            | features                                        |
            `------------------- one layer -------------------' -> features of the token -> logits of the next one

The features of a token are those of the model where it has computed the token, and the head's own beyond: a head that
drafts several tokens feeds its output back. Two kinds, by the names in their checkpoints:

EAGLE-3 (Li et al. 2025, arXiv 2503.01840), a folder of its own: the features are `fc` of the inputs of three layers of
the model; the layer attends from the norms of embedding and features side by side; the vocabulary may be a part of the
model's (`d2t`: what to add to a token of the head to get the model's).

MTP (DeepSeek-V3, arXiv 2412.19437, section 2.2), `mtp.*` of the model's own folder: the features are what the model
returns; `fc` joins the norms of both for an ordinary layer of the model; embeddings and logits are the model's. The
layer of a model that transformers' code runs is in from_transformers/mtp.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.checkpoint import Checkpoint, TensorSpec, load, read_config
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.models.decoder import Decoder, Layer
from lockstep.runtime.models.language_model import LanguageModel
from lockstep.runtime.models.layers import Attention, AttentionSizes, Maker, Mlp, RmsNorm, VocabEmbedding
from lockstep.runtime.models.rope import Rotary
from lockstep.runtime.models.settings import ModelSettings, read_decoder

EAGLE3 = "LlamaForCausalLMEagle3"
MTP = "mtp"


class DraftHead(nn.Module, ABC):
    """A head that drafts for a model. Its one layer has KV of its own, in the pages of the model's.

    Pool and attention backend read `layers`, `heads`, `kv_heads`, `head_dim`, `scale` and `rules`, as of a model.
    """

    layers = 1
    shares_kv = False
    rules: tuple[LayerRules, ...] = ()
    kv_scales: tuple[tuple[float, float], ...] | None = None
    taps: tuple[int, ...] = ()  # layers of the model whose inputs it reads
    takes_media: bool = False  # whether it takes embeddings of media in place of those of tokens

    def __init__(self, model: LanguageModel, settings: ModelSettings) -> None:
        super().__init__()
        self.features = settings.hidden
        self.dtype, self.device = model.dtype, model.device
        self.heads, self.kv_heads, self.head_dim = settings.heads, settings.kv_heads, settings.head_dim
        self.scale = settings.head_dim**-0.5

    def prepare(self) -> None:
        """Complete the head when its weights are in place. Raises ConfigError for one that cannot run."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own parameters."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @abstractmethod
    def read(self, taps: Mapping[int, Tensor | None], hidden: Tensor) -> Tensor:
        """Return the features of tokens that the model has computed, [tokens, features].

        Args:
            taps: inputs of layers; hidden: what the model returned, [tokens, hidden] each.
        """

    @abstractmethod
    def forward(self, before: Tensor, batch: ForwardBatch, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Return features of the tokens of a pass, [tokens, features], and what `logits` takes, [tokens, hidden].

        Args:
            before: [tokens, features], of the token before each.
        """

    @abstractmethod
    def logits(self, normed: Tensor) -> Tensor:
        """Return float32 logits of the next tokens, [tokens, tokens of the head]."""

    def likeliest(self, normed: Tensor, count: int) -> Tensor:
        """Return the likeliest next tokens, likeliest first: int64 [tokens, count]; fewer are repeated."""
        logits = self.logits(normed)
        found = logits.topk(min(count, logits.shape[1]), dim=1).indices
        if found.shape[1] < count:
            found = torch.cat((found, found[:, -1:].expand(-1, count - found.shape[1])), 1)
        return self.named(found)

    def named(self, tokens: Tensor) -> Tensor:
        """Return tokens of the model for tokens of the head."""
        return tokens

    @abstractmethod
    def tensors(self, stored: Collection[str] = ()) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the head.

        Args:
            stored: the names in the checkpoint, for heads that are stored in several layouts.
        """


class EagleHead(DraftHead):
    """A head of EAGLE-3."""

    def __init__(self, config: Mapping[str, Any], model: Decoder, *, own_embeddings: bool, prefix: str) -> None:
        """Make the head without weights.

        Args:
            config: of its config.json.
            own_embeddings: whether its checkpoint has embeddings; otherwise the model's are used.
            prefix: of its layer in its checkpoint.
        Raises: ConfigError for settings that do not fit the model.
        """
        settings = read_decoder(config, architecture=EAGLE3)
        super().__init__(model, settings)
        self.rotary = Rotary(settings.rope, settings.head_dim, model.dtype, model.device)
        if settings.vocab != model.settings.vocab:
            raise ConfigError(
                f"`draft_model` has {settings.vocab:,} tokens, the model {model.settings.vocab:,}\n"
                "hint: a head that was trained for this model"
            )
        make, hidden = Maker(model.dtype, model.device), settings.hidden
        self.prefix, layers = prefix, model.settings.layers
        given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        self.taps = tuple(given) if given else (2, layers // 2, layers - 3)
        if len(self.taps) != 3 or not all(isinstance(one, int) and 0 <= one < layers for one in self.taps):
            raise ConfigError(
                f"`draft_model` reads the inputs of layers {', '.join(map(str, self.taps))}, the model has {layers}\n"
                "hint: `eagle_config.eagle_aux_hidden_state_layer_ids` of its config.json names three"
            )
        self.embeddings = VocabEmbedding(make, settings.vocab, hidden) if own_embeddings else None
        if self.embeddings is None and model.settings.hidden != hidden:
            raise ConfigError(
                f"`draft_model` has no embeddings, and its hidden size is {hidden}, that of the model "
                f"{model.settings.hidden}\nhint: a head with `embed_tokens.weight`"
            )
        assert model.embeddings is not None
        self._shared = [self.embeddings or model.embeddings]  # in a list, so that they are no parameters of the head
        self.fc = make.empty(hidden, 3 * model.settings.hidden)
        self.norm_embedding = RmsNorm(make, hidden, settings.norm_eps)
        self.norm_features = RmsNorm(make, hidden, settings.norm_eps)
        self.attention = Attention(
            make,
            0,
            AttentionSizes(
                hidden=hidden,
                heads=settings.heads,
                kv_heads=settings.kv_heads,
                head_dim=settings.head_dim,
                bias=settings.attention_bias,
                output_bias=settings.output_bias,
                inputs=2 * hidden,
            ),
        )
        self.mlp_norm = RmsNorm(make, hidden, settings.norm_eps)
        self.mlp = Mlp(make, hidden, settings.intermediate)
        self.norm = RmsNorm(make, hidden, settings.norm_eps)
        own_tokens = int(config.get("draft_vocab_size") or settings.vocab)
        self.head = VocabEmbedding(make, own_tokens, hidden)
        self.d2t: Tensor | None = None
        if own_tokens != settings.vocab:
            self.d2t = torch.zeros(own_tokens, dtype=torch.int64, device=model.device)

    def read(self, taps: Mapping[int, Tensor | None], hidden: Tensor) -> Tensor:
        """Return `fc` of the inputs of three layers."""
        found = [tap for one in self.taps if (tap := taps[one]) is not None]
        return nn.functional.linear(torch.cat(found, 1), self.fc)

    def forward(self, before: Tensor, batch: ForwardBatch, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Return features, which are sums before the last norm, and their norm."""
        embedded = self._shared[0].embed(batch.token_ids)
        joined = torch.cat((self.norm_embedding(embedded, None)[1], self.norm_features(before, None)[1]), 1)
        attended = self.attention(joined, self.rotary(batch.positions), batch, attention)
        residual, normed = self.mlp_norm(before, attended)
        features, normed = self.norm(residual, self.mlp(normed, None))
        return features, normed

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits of the head's own tokens."""
        return self.head.logits(normed)

    def named(self, tokens: Tensor) -> Tensor:
        """Return tokens of the model for tokens of the head."""
        return tokens if self.d2t is None else tokens + self.d2t[tokens]

    def tensors(self, stored: Collection[str] = ()) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the head."""
        if self.embeddings is not None:
            yield from self.embeddings.tensors("embed_tokens")
        yield TensorSpec("fc.weight", tuple(self.fc.shape), self.fc.data)
        yield from self.norm_embedding.tensors(f"{self.prefix}.input_layernorm")
        yield from self.norm_features.tensors(f"{self.prefix}.hidden_norm")
        yield from self.attention.tensors(f"{self.prefix}.self_attn")
        yield from self.mlp_norm.tensors(f"{self.prefix}.post_attention_layernorm")
        yield from self.mlp.tensors(f"{self.prefix}.mlp")
        yield from self.norm.tensors("norm")
        yield from self.head.tensors("lm_head")
        if self.d2t is not None:
            yield TensorSpec("d2t", tuple(self.d2t.shape), self.d2t, initial=0.0, dtypes=("I64",))


class MtpHead(DraftHead):
    """A layer for multi-token prediction in the checkpoint of the model itself."""

    takes_media = True

    def __init__(self, model: Decoder) -> None:
        settings = model.settings
        super().__init__(model, settings)
        self.rotary = Rotary(settings.rope, settings.head_dim, model.dtype, model.device)
        make, hidden = Maker(model.dtype, model.device), settings.hidden
        first = model.stack[0]
        assert isinstance(first, Layer)
        self.norm_embedding = RmsNorm(make, hidden, settings.norm_eps)
        self.norm_features = RmsNorm(make, hidden, settings.norm_eps)
        self.fc = make.empty(hidden, 2 * hidden)
        self.layer = Layer(make, 0, settings, first.attention.query_norm is not None)
        self.norm = RmsNorm(make, hidden, settings.norm_eps)
        self._model = [model]  # in a list, so that its parameters are not those of the head

    def read(self, taps: Mapping[int, Tensor | None], hidden: Tensor) -> Tensor:
        """Return what the model returned."""
        return hidden

    def forward(self, before: Tensor, batch: ForwardBatch, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Return the hidden states behind the last norm, twice."""
        embedded = self._model[0].embed(batch)
        joined = torch.cat((self.norm_embedding(embedded, None)[1], self.norm_features(before, None)[1]), 1)
        mixed = nn.functional.linear(joined, self.fc)
        residual, added = self.layer(mixed, None, self.rotary(batch.positions), batch, attention)
        _, normed = self.norm(residual, added)
        return normed, normed

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits of the model's tokens."""
        return self._model[0].logits(normed)

    def tensors(self, stored: Collection[str] = ()) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the head."""
        yield TensorSpec(f"{MTP}.fc.weight", tuple(self.fc.shape), self.fc.data)
        yield from self.norm_embedding.tensors(f"{MTP}.pre_fc_norm_embedding")
        yield from self.norm_features.tensors(f"{MTP}.pre_fc_norm_hidden")
        yield from self.layer.tensors(f"{MTP}.layers.0")
        yield from self.norm.tensors(f"{MTP}.norm")


def check_whole(model: LanguageModel, method: str) -> None:
    """Raise ConfigError for a model that other processes have parts of, or that draws no tokens."""
    if model.is_part or not model.settings.generates:
        kind = (
            "split over ranks or stages" if model.is_part else f"a {model.settings.architecture}, which draws nothing"
        )
        raise ConfigError(
            f"`speculative_method` is {method}, but the model is {kind}: heads draft for models that one process runs\n"
            "hint: ngram or draft_model"
        )


def eagle_head(folder: str | Path, model: LanguageModel) -> DraftHead:
    """Return the EAGLE-3 head of a folder. Raises ConfigError if it is none, or does not fit the model."""
    check_whole(model, "eagle")
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"`speculative_method` is eagle, but transformers' code runs {model.settings.architecture}: heads of "
            "EAGLE-3 read layers of our own code\nhint: ngram or mtp; --model-backend native names the families"
        )
    config = dict(read_config(Path(folder)))
    names = config.get("architectures") or ["none"]
    if names[0] != EAGLE3:
        raise ConfigError(
            f"`draft_model` {folder} is a {names[0]}, but `speculative_method` is eagle, which needs a head of "
            f"EAGLE-3, {EAGLE3}\nhint: speculative_method draft_model for a whole model"
        )
    with torch.no_grad(), Checkpoint(Path(folder)) as checkpoint:
        prefix = "layers.0" if any(name.startswith("layers.0.") for name in checkpoint.stored) else "midlayer"
        own = "embed_tokens.weight" in checkpoint.stored
        head = EagleHead(config, model, own_embeddings=own, prefix=prefix)
        load(list(head.tensors()), checkpoint, surplus=lambda name: name == "t2d")
    return head.eval()
