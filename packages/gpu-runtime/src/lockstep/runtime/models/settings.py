"""What config.json says of a model, checked: everything that cannot be served is in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.core.errors import ConfigError
from lockstep.runtime.models.rope import RopeSettings, read_rope

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """Experts of a mixture."""

    experts: int
    per_token: int  # experts that see a token
    intermediate: int  # of one expert
    normalise: bool  # the weights of a token's experts sum to 1
    dense_layers: frozenset[int]  # layers with an ordinary MLP instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A decoder, in the names of the field. Sizes are of the whole model, not of a rank."""

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
    tied: bool = False  # the last product uses the embeddings
    generates: bool = True  # has that product; one without gives hidden states only
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of the product behind attention
    experts: ExpertSettings | None = None
    dtype: torch.dtype = torch.bfloat16  # that the checkpoint was made in
    end_tokens: tuple[int, ...] = ()


class ConfigReader:
    """Reads config.json field by field; what is wrong is gathered and raised at once by `check`."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config, self.where = config, where
        self.problems: list[str] = []

    def count(self, name: str, default: int | None = None, *, also: str = "") -> int:
        """A positive whole number; `also` is another name that some write it under."""
        value = self.config.get(name, self.config.get(also))
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(f"`{name}` must be a positive whole number, got `{value}`")
            return 1
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.problems.append(f"`{name}` must be a positive number, got `{value}`")
            return default
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"`{name}` must be true or false, got `{value}`")
            return default
        return value

    def only(self, name: str, *allowed: object) -> None:
        """A setting of which only some values are implemented; the first is what its absence means."""
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            self.problems.append(f"`{name}` must be {' or '.join(f'`{one}`' for one in allowed)}, got `{value}`")

    def dtype(self) -> torch.dtype:
        """`dtype`, which older folders call `torch_dtype`; float32 where neither is given."""
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if name not in DTYPES:
            self.problems.append(f"`dtype` must be {', '.join(DTYPES)}, got `{name}`")
            return torch.float32
        return DTYPES[name]

    def end_tokens(self) -> tuple[int, ...]:
        """`eos_token_id`, one or several."""
        value = self.config.get("eos_token_id")
        values = value if isinstance(value, Sequence) else [] if value is None else [value]
        if not all(isinstance(one, int) for one in values):
            self.problems.append(f"`eos_token_id` must be token ids, got `{value}`")
            return ()
        return tuple(values)

    def rope(self) -> RopeSettings:
        """Rotary positions, see rope.py."""
        return read_rope(self.config, self.problems)

    def check(self) -> None:
        """Raises: ConfigError with everything that was found wrong."""
        if self.problems:
            raise ConfigError("\n  ".join([f"{self.where} describes a model that cannot be served:", *self.problems]))


def read_decoder(
    config: Mapping[str, Any], *, architecture: str, qkv_bias: bool = False, experts: bool = False
) -> ModelSettings:
    """Settings of a Llama-like decoder.

    Args:
        qkv_bias: q, k and v always have a bias, the product behind attention never; else `attention_bias` is of all.
        experts: whether the MLPs are mixtures of experts, unless config.json names a layer as dense.
    Raises: ConfigError with everything that is missing, out of range or not implemented.
    """
    read = ConfigReader(config)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False, None)
    read.only("use_sliding_window", False, None)
    read.only("pretraining_tp", 1, None)
    read.only("quantization_config", None)
    read.only("partial_rotary_factor", 1.0, None)
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        read.problems.append("`layer_types` may hold only `full_attention`")
    layers, hidden = read.count("num_hidden_layers"), read.count("hidden_size")
    heads = read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        read.problems.append(
            f"`num_attention_heads` must be a multiple of `num_key_value_heads`, got {heads} and {kv_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        read.problems.append(f"`hidden_size` must be a multiple of `num_attention_heads`, got {hidden} and {heads}")
    head_dim = read.count("head_dim", max(hidden // heads, 1))
    if head_dim % 2:
        read.problems.append(f"`head_dim` must be even, got {head_dim}")
    settings = ModelSettings(
        architecture=architecture,
        vocab=read.count("vocab_size"),
        hidden=hidden,
        intermediate=read.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        context_tokens=read.count("max_position_embeddings"),
        rope=read.rope(),
        tied=read.flag("tie_word_embeddings"),
        generates=not str((config.get("architectures") or [""])[0]).endswith("Model"),
        attention_bias=qkv_bias or read.flag("attention_bias"),
        output_bias=not qkv_bias and read.flag("attention_bias"),
        experts=_experts(read, layers) if experts else None,
        dtype=read.dtype(),
        end_tokens=read.end_tokens(),
    )
    read.check()
    return settings


def _experts(read: ConfigReader, layers: int) -> ExpertSettings:
    count, per_token = read.count("num_experts", also="num_local_experts"), read.count("num_experts_per_tok")
    if per_token > count:
        read.problems.append(f"`num_experts_per_tok` must be at most `num_experts`, got {per_token} and {count}")
    every = read.count("decoder_sparse_step", 1)
    named = read.config.get("mlp_only_layers") or []
    dense = {layer for layer in range(layers) if layer in named or (layer + 1) % every}
    return ExpertSettings(
        experts=count,
        per_token=per_token,
        intermediate=read.count("moe_intermediate_size"),
        normalise=read.flag("norm_topk_prob"),
        dense_layers=frozenset(dense),
    )
