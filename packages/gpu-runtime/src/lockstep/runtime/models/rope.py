"""Rotary positions: one frequency per pair of a head's values, scaled for long contexts as a model requires.

Kinds are those of `rope_scaling` in config.json. `dynamic` is refused: its frequencies depend on the longest request of
a batch, so that KV computed in one batch would be wrong in another.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071), section 3;
`llama3`: the reference code of Llama 3.1, `apply_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.runtime.models.config_reader import ConfigReader
from lockstep.runtime.models.layers import Rotation

KINDS = ("default", "linear", "llama3", "yarn")
FULL = "full_attention"
"""The kind of layer whose settings are used if `rope_parameters` has them by kind. Other kinds are not supported."""


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary positions of a model. `factor` and the fields after it belong to the kinds that scale."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0  # training context before it was extended
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # yarn: factor of cosines and sines; None: derived from `factor`
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def extended_tokens(self) -> int:
        """Context after scaling the original one, regardless of `max_position_embeddings`; 0 if unknown.

        Folders for use with yarn keep the original context in `max_position_embeddings`, as Qwen documents it.
        """
        return int(self.original_tokens * self.factor) if self.kind == "yarn" else 0

    def frequencies(self, head_dim: int) -> Tensor:
        """Return radians per position, float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        match self.kind:
            case "linear":
                return frequencies / self.factor
            case "llama3":
                return self._llama3(frequencies)
            case "yarn":
                return self._yarn(frequencies, head_dim)
        return frequencies

    @property
    def scale(self) -> float:
        """Factor of cosines and sines; scores are multiplied by its square."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Stretch long waves by `factor`, keep short ones, and blend those between."""
        wavelength = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        blend = ((self.original_tokens / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return torch.lerp(frequencies / self.factor, frequencies, blend)

    def _yarn(self, frequencies: Tensor, head_dim: int) -> Tensor:
        """Keep pairs that turn often within the original context, and stretch pairs that turn seldom."""

        def pair_of(turns: float) -> float:
            return head_dim * math.log(self.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32)
        stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return torch.lerp(frequencies, frequencies / self.factor, stretched)


class Rotary(nn.Module):
    """Cosines and sines of positions, computed in float32 once per pass."""

    def __init__(self, settings: RopeSettings, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.scale = dtype, settings.scale
        self.frequencies = settings.frequencies(head_dim).to(device)

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation of tokens at positions int64 [tokens]."""
        angles = (positions[:, None].float() * self.frequencies)[:, None, :]
        return Rotation((angles.cos() * self.scale).to(self.dtype), (angles.sin() * self.scale).to(self.dtype))


def read_rope(read: ConfigReader) -> RopeSettings:
    """Return the rotary settings of a config.json, from `rope_parameters` or, older, `rope_theta` and `rope_scaling`.

    Problems are added to the reader's.
    """
    name = "rope_parameters" if read.config.get("rope_parameters") else "rope_scaling"
    given = read.config.get(name) or {}
    if not isinstance(given, Mapping):
        read.wrong(name, "an object")
        return RopeSettings()
    if objects := [key for key, value in given.items() if isinstance(value, Mapping)]:
        if FULL not in objects or len(objects) < len(given):  # otherwise by kind of layer
            listed = ", ".join(f"`{key}`" for key in objects)
            read.problems.append(f"`{name}` holds {listed}, where numbers are expected, or one object `{FULL}`")
            return RopeSettings()
        name, given = f"{name}.{FULL}", given[FULL]
    inner = ConfigReader(given, read.where, inside=name, problems=read.problems)
    inner.only("partial_rotary_factor", 1.0, None)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        why = "; its frequencies would depend on the batch" if kind == "dynamic" else ""
        read.problems.append(f"`{name}` has `rope_type` `{kind}`, known are {', '.join(KINDS)}{why}")
        return RopeSettings()
    needed = {"default": (), "linear": ("factor",), "yarn": ("factor",)}.get(
        kind, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if lacking := [one for one in needed if not inner.has(one)]:
        read.problems.append(f"`{name}` of type `{kind}` lacks {', '.join(f'`{one}`' for one in lacking)}")
        return RopeSettings()
    theta = (inner if inner.has("rope_theta") else read).number("rope_theta", 10_000.0)
    match kind:
        case "linear":
            return RopeSettings(theta, kind, inner.number("factor", least=1.0))
        case "llama3":
            found = len(read.problems)
            low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
            if low >= high and found == len(read.problems):
                inner.wrong("high_freq_factor", f"above `low_freq_factor`, which is {low:g}")
            return RopeSettings(
                theta,
                kind,
                inner.number("factor", least=1.0),
                inner.count("original_max_position_embeddings"),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            return _read_yarn(read, inner, theta)
    return RopeSettings(theta)


def _read_yarn(read: ConfigReader, inner: ConfigReader, theta: float) -> RopeSettings:
    """Return settings of kind `yarn`. The default of the original context is `max_position_embeddings`."""
    original = "original_max_position_embeddings"
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if fast <= slow:
        inner.problems.append(f"{inner.called('beta_fast')} must be above `beta_slow`, got {fast:g} and {slow:g}")
    if theta <= 1.0:
        read.problems.append(f"`rope_theta` must be above 1 with yarn, got {theta:g}")
    return RopeSettings(
        theta,
        "yarn",
        inner.number("factor", least=1.0),
        inner.count(original) if inner.has(original) else read.count("max_position_embeddings"),
        beta_fast=fast,
        beta_slow=slow,
        truncate=inner.flag("truncate", True),
        attention_factor=inner.number_or_none("attention_factor"),
        mscale=inner.number_or_none("mscale", least=0.0),
        mscale_all_dim=inner.number_or_none("mscale_all_dim", least=0.0),
    )
