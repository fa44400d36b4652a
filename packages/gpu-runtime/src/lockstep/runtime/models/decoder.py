"""The decoder of all models here: embeddings, layers of attention and MLP, a last norm, logits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.checkpoint import WHOLE, TensorSpec
from lockstep.runtime.forward import ForwardBatch, RankTokens
from lockstep.runtime.lora.batch import AdapterBatch
from lockstep.runtime.lora.slots import LoraTarget
from lockstep.runtime.models.experts import Experts, experts_of
from lockstep.runtime.models.language_model import CountedExperts, LanguageModel
from lockstep.runtime.models.layers import (
    Attention,
    AttentionSizes,
    Maker,
    Mlp,
    RmsNorm,
    Rotation,
    VocabEmbedding,
    packable,
)
from lockstep.runtime.models.rope import Rotary
from lockstep.runtime.models.settings import ModelSettings
from lockstep.runtime.quantized.activations import choose_activations

OF_EXPERT = re.compile(r"\.experts\.([0-9]+)\.")
OF_ROWS = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")
"""Suffixes of scales of rows and KV in a quantised checkpoint. They are read only if fp8 rows or fp8 KV are enabled."""
OF_DRAFTS = "mtp."  # layers that draft, which are read only if they do: draft_heads.py


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, make: Maker, layer: int, settings: ModelSettings, qk_norm: bool) -> None:
        """Make layer `layer` of the model; its KV has the place of the layer in its stage."""
        super().__init__()
        self.shared, whole = make.parallel.shared, replace(make, parallel=make.parallel.of_attention)
        self.norm = RmsNorm(make, settings.hidden, settings.norm_eps)
        prefix = f"model.layers.{layer}"
        self.attention = Attention(
            whole.within(f"{prefix}.self_attn"),
            layer - make.parallel.stage.layers(settings.layers).start,
            AttentionSizes(
                hidden=settings.hidden,
                heads=settings.heads,
                kv_heads=settings.kv_heads,
                head_dim=settings.head_dim,
                bias=settings.attention_bias,
                output_bias=settings.output_bias,
            ),
            norm_eps=settings.norm_eps if qk_norm else None,
        )
        self.mlp_norm = RmsNorm(make, settings.hidden, settings.norm_eps)
        self.mlp: Mlp | Experts
        if settings.experts is None or layer in settings.experts.dense_layers:
            self.mlp = Mlp(make.within(f"{prefix}.mlp"), settings.hidden, settings.intermediate)
        else:
            self.mlp = Experts(make.within(f"{prefix}.mlp"), settings.hidden, settings.experts)

    def forward(
        self,
        residual: Tensor,
        added: Tensor | None,
        rotation: Rotation,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer. The input is residual + added, the output the sum of both results, [tokens, hidden] each.

        The next norm adds them, in one launch.
        """
        residual, normed = self.norm(residual, added)
        residual, normed = self.mlp_norm(residual, self.attention(normed, rotation, batch, attention))
        return residual, self._mixed(normed, batch.ranks, batch.adapters)

    def join(self, hidden: Tensor, tokens: RankTokens) -> None:
        """Compute this rank's part of the MLP for the rows of the other ranks. `hidden`: [0, hidden]."""
        self._mixed(hidden, tokens)

    def _mixed(self, normed: Tensor, tokens: RankTokens | None, adapters: AdapterBatch | None = None) -> Tensor:
        """Apply the MLP, to the rows of all ranks if they share it."""
        if self.shared is None or (isinstance(self.mlp, Experts) and self.mlp.exchanges):
            mixed: Tensor = self.mlp(normed, adapters)
            return mixed
        assert tokens is not None
        return self.shared.apply(self.mlp, normed, tokens)

    def take_adapters(self, slots: int, rank: int, prefix: str) -> Iterator[LoraTarget]:
        """Allocate adapter slots, and yield the matrices that adapters may change. Experts have none."""
        yield from self.attention.take_adapters(slots, rank, f"{prefix}.self_attn")
        if isinstance(self.mlp, Mlp):
            yield from self.mlp.take_adapters(slots, rank, f"{prefix}.mlp")

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill this layer."""
        yield from self.norm.tensors(f"{prefix}.input_layernorm")
        yield from _kept(self.attention.tensors(f"{prefix}.self_attn"), whole=self.shared is not None)
        yield from self.mlp_norm.tensors(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.tensors(f"{prefix}.mlp")


class Decoder(LanguageModel):
    """A causal language model of one rank, of our own layers. A pipeline stage has some of the layers."""

    tells_layers = True

    def __init__(self, make: Maker, settings: ModelSettings, *, qk_norm: bool = False) -> None:
        super().__init__(make, settings)
        self.rotary = Rotary(settings.rope, settings.head_dim, make.dtype, make.device)
        if make.parallel.experts.a2a:
            self.uncapturable_because = "tokens are sent to the ranks of their experts, as many as are known on the CPU"
        whole = replace(make, parallel=make.parallel.of_attention)
        stage, own = make.parallel.stage, make.parallel.stage.layers(settings.layers)
        tied_head = stage.is_last and settings.tied and settings.generates
        self.embeddings: VocabEmbedding | None = None
        if stage.is_first or tied_head:
            self.embeddings = VocabEmbedding(whole, settings.vocab, settings.hidden)
        self.activations = choose_activations(make.fp8_activations, settings.quantization, make.device)
        of_layers = replace(make, stored=settings.quantization, activations=self.activations)
        stack = [Layer(of_layers, layer, settings, qk_norm) for layer in own]
        self.stack = nn.ModuleList(stack)
        self.norm = RmsNorm(make, settings.hidden, settings.norm_eps) if stage.is_last else None
        self.head: VocabEmbedding | None = None
        if settings.generates and stage.is_last:
            self.head = self.embeddings if tied_head else VocabEmbedding(whole, settings.vocab, settings.hidden)
            assert self.head is not None
            self.head.packed = packable(self.head.weight)
        self.embedding_size, self.embeds_apart = settings.hidden, stage.is_first
        query, key, _ = stack[0].attention.qkv.sizes
        self.layers, self.first_layer = len(own), own.start
        self.head_dim, self.scale = settings.head_dim, settings.head_dim**-0.5
        self.heads, self.kv_heads = query // settings.head_dim, key // settings.head_dim

    def prepare(self) -> None:
        """Fill further copies of experts."""
        with torch.no_grad():
            for layer in self.stack:
                if isinstance(layer, Layer) and isinstance(layer.mlp, Experts):
                    layer.mlp.fill_copies()

    def expert_layers(self) -> Iterable[CountedExperts]:
        """Return the layers with experts here, in their order."""
        return [layer.mlp for layer in self.stack if isinstance(layer, Layer) and isinstance(layer.mlp, Experts)]

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the hidden states behind the last norm, or what the next stage needs; see `LanguageModel.forward`."""
        residual, added = self._input(batch)
        rotation = self.rotary(batch.positions)
        if batch.layers is not None:
            for layer in islice(self.stack, *batch.layers):
                residual, added = layer(residual, added, rotation, batch, attention)
            if batch.layers[1] < len(self.stack):
                assert added is not None
                return torch.stack((residual, added))
        elif batch.taps is None:
            for layer in self.stack:
                residual, added = layer(residual, added, rotation, batch, attention)
        else:
            for number, layer in enumerate(self.stack, self.first_layer):
                if number in batch.taps:
                    batch.taps[number] = residual if added is None else residual + added
                residual, added = layer(residual, added, rotation, batch, attention)
        if self.norm is None:
            assert added is not None
            return torch.stack((residual, added))
        normed: Tensor
        _, normed = self.norm(residual, added)
        return normed

    def join(self, tokens: RankTokens) -> None:
        """Compute this rank's part of the MLPs in a pass in which only other data-parallel ranks have rows."""
        none = torch.empty((0, self.settings.hidden), dtype=self.dtype, device=self.device)
        for layer in self.stack:
            assert isinstance(layer, Layer)
            layer.join(none, tokens)

    def _input(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Return the input of the first layer here: residual, and what its norm adds."""
        if batch.hidden is not None:
            residual, added = batch.hidden.unbind()
            return residual, added
        return self.embed(batch) if batch.embedded is None else batch.embedded, None

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the new tokens, those of media in their places, [tokens, hidden]."""
        assert self.embeddings is not None
        if batch.media is None:
            return self.embeddings.embed(batch.token_ids)
        found = self.embeddings.embed(batch.token_ids.clamp(min=0))  # placeholders are negative
        return found.index_copy(0, batch.media.at, batch.media.embeddings.to(found.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [samples, vocab] of hidden states [samples, hidden] that `forward` returned.

        Raises: ConfigError for any sample, if the model has no `lm_head`.
        """
        if self.head is None:
            if len(hidden):
                raise ConfigError(f"{self.settings.architecture} without `lm_head` has no logits")
            return hidden.new_empty((0, self.settings.vocab), dtype=torch.float32)
        return self.head.logits(hidden)

    def _adapted(self, slots: int, rank: int) -> Iterator[LoraTarget]:
        """Allocate adapter slots, and yield the matrices that adapters may change."""
        for index, layer in enumerate(self.stack, self.first_layer):
            assert isinstance(layer, Layer)
            yield from layer.take_adapters(slots, rank, f"model.layers.{index}")

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the model."""
        shares = self.parallel.shared is not None
        if self.embeddings is not None:
            yield from _kept(self.embeddings.tensors("model.embed_tokens"), whole=shares)
        for index, layer in enumerate(self.stack, self.first_layer):
            assert isinstance(layer, Layer)
            yield from layer.tensors(f"model.layers.{index}")
        if self.norm is not None:
            yield from self.norm.tensors("model.norm")
        if self.head is not None and self.head is not self.embeddings:
            yield from _kept(self.head.tensors("lm_head"), whole=shares)

    def _has_other_rank(self, name: str) -> bool:
        """Return whether a tensor is of an expert that another rank has."""
        if self.parallel.experts.ep == 1 or self.settings.experts is None or (found := OF_EXPERT.search(name)) is None:
            return False
        count = self.settings.experts.experts
        expert = int(found[1])
        return expert < count and expert not in experts_of(count, self.parallel.rank, self.parallel.ranks)

    def surplus(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although it is not read, because it follows from others."""
        if self.settings.quantization is not None and name.endswith(OF_ROWS):
            return True
        if self.has_elsewhere(name) or self._has_other_rank(name) or name.startswith(OF_DRAFTS):
            return True
        return name.endswith(".rotary_emb.inv_freq") or (
            name == "lm_head.weight" and (self.settings.tied or not self.settings.generates)
        )


def _kept(tensors: Iterator[TensorSpec], *, whole: bool) -> Iterator[TensorSpec]:
    """Yield tensors of a checkpoint, of which with `whole` every rank keeps all."""
    for one in tensors:
        yield replace(one, split=WHOLE) if whole else one
