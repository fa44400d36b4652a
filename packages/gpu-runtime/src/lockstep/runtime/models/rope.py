"""Rotary positions: one frequency for each pair of a head's values, scaled for long contexts as a model says.

Kinds are those of `rope_scaling` in config.json. `dynamic` is refused: its frequencies follow the longest request of a
batch, so that KV computed in one batch would be wrong in another.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071), section 3;
`llama3`: the reference code of Llama 3.1, `apply_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.runtime.models.layers import Rotation

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary positions of a model. `factor` and what follows it belong to the kinds that scale."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0  # context the model was trained with before it was extended
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # yarn: of cosines and sines; None follows from `factor`
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position, float32 [head_dim / 2]."""
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
        """What cosines and sines are multiplied by, hence scores by its square."""
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
        """Long waves are stretched by `factor`, short ones are kept, those between are a blend."""
        wavelength = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        blend = ((self.original_tokens / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return torch.lerp(frequencies / self.factor, frequencies, blend)

    def _yarn(self, frequencies: Tensor, head_dim: int) -> Tensor:
        """Pairs that turn often within the original context are kept, those that turn seldom are stretched."""

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
    """Cosines and sines of positions, computed in float32 once for a pass."""

    def __init__(self, settings: RopeSettings, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.scale = dtype, settings.scale
        self.frequencies = settings.frequencies(head_dim).to(device)

    def forward(self, positions: Tensor) -> Rotation:
        """int64 [tokens] to the rotation of those tokens."""
        angles = (positions[:, None].float() * self.frequencies)[:, None, :]
        return Rotation((angles.cos() * self.scale).to(self.dtype), (angles.sin() * self.scale).to(self.dtype))


def read_rope(config: Mapping[str, Any], problems: list[str]) -> RopeSettings:
    """Rotary settings of a config.json, in the older form (`rope_theta`, `rope_scaling`) or as `rope_parameters`.

    What is wrong is added to `problems`.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        problems.append(f"`rope_scaling` must be an object, got {given!r}")
        return RopeSettings()
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        why = "; its frequencies would depend on the batch" if kind == "dynamic" else ""
        problems.append(f"`rope_scaling` has `rope_type` `{kind}`, known are {', '.join(KINDS)}{why}")
        return RopeSettings()
    needed = {"default": (), "linear": ("factor",), "yarn": ("factor",)}.get(
        kind, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if lacking := [name for name in needed if not isinstance(given.get(name), int | float)]:
        problems.append(f"`rope_scaling` of type `{kind}` lacks {', '.join(f'`{name}`' for name in lacking)}")
        return RopeSettings()
    original = given.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0
    return RopeSettings(
        theta=float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(given.get("factor") or 1.0),
        original_tokens=int(original),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
    )
