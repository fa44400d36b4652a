"""The settings of a model in config.json, checked: all unsupported ones are in one error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lockstep.host.media.kinds import KINDS
from lockstep.host.quantization import WeightFormat, read_weight_format
from lockstep.runtime.models.config_reader import ConfigReader
from lockstep.runtime.models.rope import RopeSettings, read_rope

log = logging.getLogger("lockstep.runtime")


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """Settings of a mixture of experts."""

    experts: int
    per_token: int  # experts per token
    intermediate: int  # size of one expert
    normalise: bool  # whether the weights of a token's experts sum to 1
    dense_layers: frozenset[int]  # layers with an ordinary MLP


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """The blocks in which a model answers."""

    size: int  # tokens, a power of two
    mask_token: int
    threshold: float = 0.95  # probability above which a drawn token stays: the default of SGLang's LowConfidence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of a decoder, under the usual names. Sizes are of the whole model, not of a rank."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    context_tokens: int
    rope: RopeSettings = field(default_factory=RopeSettings)
    tied: bool = False  # whether the output projection uses the embeddings
    generates: bool = True  # whether it has an output projection; without one it returns hidden states only
    media: tuple[str, ...] = ()  # kinds of media that prompts may have: image, audio, video
    media_refused: str = ""  # why they may not, for a model that takes some in other programs
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of the output product of attention
    experts: ExpertSettings | None = None
    blocks: BlockSettings | None = None  # None: it answers token by token
    dtype: torch.dtype = torch.bfloat16  # dtype of the checkpoint
    end_tokens: tuple[int, ...] = ()
    quantization: WeightFormat | None = None  # how matrices of layers are quantised; None: they are not
    backend: Literal["native", "transformers"] = "native"  # the code that runs it
    labels: tuple[str, ...] = ()  # of a head that classifies whole prompts; empty: there is none
    activation: Literal["sigmoid", "softmax", "identity"] = "softmax"  # from logits of labels to scores
    token_types: int = 0  # number of types that tokens of a prompt may have; 0: tokens have no type
    described: tuple[tuple[str, str], ...] = ()  # all fields of its config and their JSON, for code of transformers

    def no_kind(self, kind: str) -> str:
        """Return why prompts may not have media of a kind, for a model with media; empty if they may."""
        if kind in self.media:
            return ""
        known = " and ".join(KINDS[one].several for one in self.media)
        return self.media_refused or f"{self.architecture} takes {known} only"


def read_decoder(
    config: Mapping[str, Any], *, architecture: str, qkv_bias: bool = False, experts: bool = False
) -> ModelSettings:
    """Return the settings of a Llama-like decoder.

    Args:
        qkv_bias: q, k and v always have a bias, and the output product never; otherwise `attention_bias` is for all.
        experts: whether the MLPs are mixtures of experts, except in layers that config.json names as dense.
    Raises: ConfigError with everything that is missing, out of range or not implemented.
    """
    read = ConfigReader(config)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False, None)
    read.only("use_sliding_window", False, None)
    read.only("pretraining_tp", 1, None)
    read.only("partial_rotary_factor", 1.0, None)
    if any(kind != "full_attention" for kind in read.texts("layer_types")):
        read.problems.append("`layer_types` may hold only `full_attention`")
    layers, hidden = read.count("num_hidden_layers"), read.count("hidden_size")
    heads = read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        read.problems.append(
            f"`num_attention_heads` must be a multiple of `num_key_value_heads`, got {heads} and {kv_heads}"
        )
    if not read.has("head_dim") and hidden % heads:
        read.problems.append(f"`hidden_size` must be a multiple of `num_attention_heads`, got {hidden} and {heads}")
    head_dim = read.count("head_dim", max(hidden // heads, 1))
    if head_dim % 2:
        read.problems.append(f"`head_dim` must be even, got {head_dim}")
    rope = read_rope(read)
    vocab, end_tokens = read.count("vocab_size"), read.end_tokens()
    settings = ModelSettings(
        architecture=architecture,
        vocab=vocab,
        hidden=hidden,
        intermediate=read.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        context_tokens=max(read.count("max_position_embeddings"), rope.extended_tokens),
        rope=rope,
        tied=read.flag("tie_word_embeddings"),
        generates=not any(name.endswith("Model") for name in read.texts("architectures")[:1]),
        attention_bias=qkv_bias or read.flag("attention_bias"),
        output_bias=not qkv_bias and read.flag("attention_bias"),
        experts=_experts(read, layers) if experts else None,
        dtype=read.dtype(),
        end_tokens=tuple(token for token in end_tokens if 0 <= token < vocab),
        quantization=read_weight_format(config, read.problems),
    )
    read.check()
    if strange := [token for token in end_tokens if token not in settings.end_tokens]:
        log.warning(
            "`eos_token_id` %s is passed over: the model has %d tokens", ", ".join(map(str, strange)), settings.vocab
        )
    return settings


def _experts(read: ConfigReader, layers: int) -> ExpertSettings:
    count, per_token = read.count("num_experts", also="num_local_experts"), read.count("num_experts_per_tok")
    if per_token > count:
        read.problems.append(f"`num_experts_per_tok` must be at most `num_experts`, got {per_token} and {count}")
    every = read.count("decoder_sparse_step", 1)
    named = read.numbers_from_0("mlp_only_layers")
    dense = {layer for layer in range(layers) if layer in named or (layer + 1) % every}
    return ExpertSettings(
        experts=count,
        per_token=per_token,
        intermediate=read.count("moe_intermediate_size"),
        normalise=read.flag("norm_topk_prob"),
        dense_layers=frozenset(dense),
    )
