"""Pictures in a model of transformers: the library's encoder, and positions of three axes.

    content ──get_image_features──> features at placeholders, token embeddings between them ──> its output

All models with pictures in the library have `get_image_features`, which takes the arrays of the model's processor. The
decoder gets embeddings in place of token ids. Qwen-VL also adds features behind the first layers, and has positions
along time, height and width (`get_rope_index`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import PromptSpan
from lockstep.host.media.content import EncoderInput

TOKEN_NAMES = ("image_token_id", "image_token_index")
FEATURES = "get_image_features"
GRID = "image_grid_thw"


def picture_refusals(kind: Any, base: Any, config: Any, ranks: int) -> Iterator[str]:
    """Yield why the pictures of a model cannot be served here.

    Args:
        kind: the library's class with the output projection; base: the one below it.
    """
    if not hasattr(base, FEATURES) or placeholder_of(config) is None:
        yield f"the library's {kind.__name__} has no {FEATURES}, or config.json no `image_token_id`"
        return
    if "token_type_ids" in inspect.signature(base.forward).parameters:
        yield "tokens of a picture attend to later ones of it"
    if ranks > 1:
        yield f"pictures need one rank, and `tp` is {ranks}"


def placeholder_of(config: Any) -> int | None:
    """Return the token that stands for a picture's features; None if the config names none."""
    found = (getattr(config, name, None) for name in TOKEN_NAMES)
    return next((one for one in found if isinstance(one, int)), None)


class PictureEncoder:
    """The encoder of a library's model.

    Args:
        base: the model below the output projection, with encoder and decoder.
    """

    def __init__(self, base: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._base, self._dtype, self._device = base, dtype, device
        placeholder = placeholder_of(base.config)
        assert placeholder is not None
        self._placeholder = placeholder
        self._embed = base.get_input_embeddings()
        self._accepted = inspect.signature(inspect.unwrap(getattr(base, FEATURES))).parameters
        self._axes = getattr(base, "get_rope_index", None)

    @property
    def token_bytes(self) -> int:
        """Bytes of the output for one position."""
        vision = getattr(self._base.config, "vision_config", None)
        deeper = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        hidden: int = self._base.config.get_text_config().hidden_size
        return hidden * self._dtype.itemsize * (1 + deeper)

    def encode(self, content: EncoderInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return embeddings [positions, hidden], and those that are added behind the first layers.

        Raises: ConfigError for a content that does not fit the model.
        """
        given = {name: self._tensor(name, content) for name in content.arrays if name in self._accepted}
        found = getattr(self._base, FEATURES)(**given, return_dict=True)
        features = _joined(found.pooler_output)
        ids = torch.from_numpy(np.frombuffer(content.ids, "<i4").astype(np.int64)).to(self._device)
        at = torch.nonzero(ids == self._placeholder)[:, 0]
        if len(at) != len(features):
            raise ConfigError(f"the encoder made {len(features)} embeddings for {len(at)} positions")
        ids = ids.index_fill(0, at, 0)  # a placeholder may lie beyond the vocabulary
        out = self._embed(ids).to(self._dtype)
        out.index_copy_(0, at, features.to(self._dtype))
        deeper = []
        for layer in getattr(found, "deepstack_features", None) or ():
            spread = torch.zeros_like(out)
            deeper.append(spread.index_copy_(0, at, _joined(layer).to(self._dtype)))
        return out, tuple(deeper)

    def _tensor(self, name: str, content: EncoderInput) -> Tensor:
        made = torch.from_numpy(content.arrays[name].numpy().copy())
        return made.to(self._device, self._dtype) if made.is_floating_point() else made.to(self._device)

    def places(self, spans: Sequence[tuple[PromptSpan, EncoderInput]], tokens: int) -> NDArray[np.int64] | None:
        """Return positions of three axes, int64 [3, tokens], of a prompt; None: the model has one axis."""
        if self._axes is None:
            return None
        kinds = torch.zeros((1, tokens), dtype=torch.int32)
        for span, _ in spans:
            kinds[0, span.start : span.stop] = 1
        grids = torch.cat([torch.from_numpy(content.arrays[GRID].numpy().copy()) for _, content in spans])
        found, _ = self._axes(
            torch.zeros((1, tokens), dtype=torch.int64), mm_token_type_ids=kinds, image_grid_thw=grids
        )
        places: NDArray[np.int64] = found[:, 0].numpy()
        return places


def _joined(features: Any) -> Tensor:
    """Return the features of all parts of a picture, [features, hidden]."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in parts])
