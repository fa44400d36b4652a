"""The MTP layer of a model that transformers' code runs: Qwen3-Next, Qwen3.5, with experts or without.

The library passes over `mtp.*` of a checkpoint and has no class for it. The layer is an ordinary full attention layer
of the model behind a projection: here the library's decoder once more, with one layer and its last norm.

    embedding of a token ─────────── pre_fc_norm_embedding ──┐
                                                             fc ── layers.0 ── norm ──> features of the token
    features of the token before ─── pre_fc_norm_hidden ─────┘

Positions, partial and along three axes, gates and experts are those of the library's code. A checkpoint may store the
matrices of the layer's experts one by one (Qwen3-Next, Qwen3.5) or stacked as the library has them (Qwen3.6).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.checkpoint import TensorSpec
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.from_transformers.attending import CurrentPass
from lockstep.runtime.from_transformers.decoder import TransformersDecoder, made_on_meta, materialise, run_pass
from lockstep.runtime.from_transformers.split import Plan
from lockstep.runtime.from_transformers.tensors import Held
from lockstep.runtime.from_transformers.trial import try_out
from lockstep.runtime.models.draft_heads import MTP, DraftHead
from lockstep.runtime.models.layers import Maker

ATTENDS = "full_attention"
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parameters of all experts of a layer, and the matrices of one expert that lie in them, one below the other."""


class LibraryMtpHead(DraftHead):
    """A layer for multi-token prediction, by the library's code of the model's own layers."""

    takes_media = True

    def __init__(self, model: TransformersDecoder) -> None:
        """Make the layer without weights. Raises ConfigError for a model whose layers cannot be one."""
        super().__init__(model, model.settings)
        self._model = [model]  # in a list, so that its parameters are not those of the head
        self.current = CurrentPass()
        self.decoder = self._made(model)
        make = Maker(model.dtype, model.device)
        self._held: list[Held] = materialise(self.decoder, Plan(self.decoder, 1), make)

    @staticmethod
    def _made(model: TransformersDecoder) -> Any:
        """Return the library's decoder with one layer, the projection and its norms, without memory for weights."""
        name, config = model.settings.architecture, copy.deepcopy(model.decoder.config)
        if ATTENDS not in (getattr(config, "layer_types", None) or ()):
            raise ConfigError(
                f"`speculative_method` is mtp, but no layer of {name} is known to be of the kind of an MTP layer\n"
                "hint: ngram, or draft_model"
            )
        config.num_hidden_layers, config.layer_types = 1, [ATTENDS]
        made = made_on_meta(config, type(model.decoder))
        made.set_input_embeddings(nn.Identity())  # the model's are used
        hidden = model.settings.hidden
        made.pre_fc_norm_embedding, made.pre_fc_norm_hidden = copy.deepcopy(made.norm), copy.deepcopy(made.norm)
        made.fc = nn.Linear(2 * hidden, hidden, bias=False, device="meta")
        return made

    def prepare(self) -> None:
        """Take heads, scale and rules of attention from a trial. Raises ConfigError, see `trial.try_out`."""
        model = self._model[0]
        self.decoder.set_input_embeddings(model.base.get_input_embeddings())
        try:
            one, *_ = try_out(
                self.decoder, None, self.current, replace(model.settings, layers=1), self.dtype, self.device
            )
        finally:
            self.decoder.set_input_embeddings(nn.Identity())
        self.current.places = {one.layer: 0}
        self.heads, self.kv_heads, self.scale = one.heads, one.kv_heads, one.rules.scale
        self.head_dim = self.current.head_dim = max(one.head_dim, one.value_dim)
        self.rules = (one.rules,) if one.rules.beyond(self.scale) else ()

    def read(self, taps: Any, hidden: Tensor) -> Tensor:
        """Return what the model returned."""
        return hidden

    def forward(self, before: Tensor, batch: ForwardBatch, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Return the hidden states behind the last norm, twice."""
        embedded = self._model[0].embed(batch)
        parts = self.decoder.pre_fc_norm_embedding(embedded), self.decoder.pre_fc_norm_hidden(before)
        mixed = self.decoder.fc(torch.cat(parts, 1))
        normed = run_pass(self.decoder, self.current, batch, attention, {"inputs_embeds": mixed[None]})
        return normed, normed

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits of the model's tokens."""
        return self._model[0].logits(normed)

    def tensors(self, stored: Collection[str] = ()) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the layer, those of experts one by one if they are stored so."""
        for one in self._held:
            name = f"{MTP}.{one.name}"
            owner, _, last = name.rpartition(".")
            if last not in STACKED or f"{owner}.0.{STACKED[last][0]}.weight" not in stored:
                yield TensorSpec(name, one.shape, one.into, initial=one.initial)
                continue
            for expert, of_expert in enumerate(one.into):
                parts = of_expert.chunk(len(STACKED[last]))
                for matrix, into in zip(STACKED[last], parts, strict=True):
                    yield TensorSpec(f"{owner}.{expert}.{matrix}.weight", tuple(into.shape), into)
