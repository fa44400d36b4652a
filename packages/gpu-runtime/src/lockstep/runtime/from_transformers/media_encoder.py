"""Media in a model of transformers: the library's encoders, and positions of three axes.

    image    content ──get_image_features──> features at placeholders, token embeddings between them ──> its output
    video    content ──get_video_features──> as for an image
    audio    content ──the model's forward, up to its decoder──> the embeddings that the decoder would get

All models with pictures in the library have `get_image_features`, which takes the arrays of the model's processor. The
decoder gets embeddings in place of token ids. Qwen-VL also adds features behind the first layers, and has positions
along time, height and width (`places.py`). Models with sound have no such method in common (Qwen2-Audio has none):
which features are padding, and where the others go, is in their `forward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import PromptSpan
from lockstep.host.media.content import EncoderInput
from lockstep.runtime.from_transformers import places

FEATURES = {"image": "get_image_features", "video": "get_video_features"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SOUND = "input_features"  # argument of models with sound
ROPE_INDEX = "get_rope_index"  # method of models with positions of three axes


def served_kinds(kind: Any, base: Any, config: Any) -> tuple[tuple[str, ...], list[str]]:
    """Return the kinds of media of a model that are served here, and why the others are not.

    Args:
        kind: the library's class with the output projection; base: the one below it.
    """
    taken = [one for one, takes in (("image", _sees), ("audio", _hears), ("video", _watches)) if takes(base, config)]
    if not taken:
        lacking = f"the library's {kind.__name__} has no {FEATURES['image']}, or config.json no `image_token_id`"
        return (), [f"{lacking}; and no {SOUND}, or no `audio_token_id`"]
    served, why = [], list[str]()
    for one in taken:
        found = list(_refusals(one, base, config))
        why += found
        if not found:
            served.append(one)
    return tuple(served), why


def _refusals(kind: str, base: Any, config: Any) -> Iterator[str]:
    shown = {"image": "pictures", "audio": "sounds", "video": "videos"}[kind]
    if hasattr(base, ROPE_INDEX):
        yield from (
            f"{shown} with {why}" for why in places.refusals(_arguments(getattr(base, ROPE_INDEX)), kind, config)
        )
    if kind == "audio" and getattr(config, "has_lora_adapter", False):
        yield f"{shown} need an adapter beside the weights, for prompts with any (`has_lora_adapter`)"
    if "token_type_ids" in inspect.signature(base.forward).parameters:
        yield f"tokens of {'a sound' if kind == 'audio' else 'a picture'} attend to later ones of it"
    if kind == "video" and GRIDS[kind] not in _arguments(getattr(base, FEATURES[kind])):
        yield f"{shown} whose encoder takes no {GRIDS[kind]}"


def _sees(base: Any, config: Any) -> bool:
    """Return whether a model takes pictures."""
    return hasattr(base, FEATURES["image"]) and placeholder_of(config, "image") is not None


def _watches(base: Any, config: Any) -> bool:
    """Return whether a model takes videos."""
    return hasattr(base, FEATURES["video"]) and placeholder_of(config, "video") is not None


def _hears(base: Any, config: Any) -> bool:
    """Return whether a model takes sound, as features of spectra."""
    accepted = inspect.signature(inspect.unwrap(base.forward)).parameters
    return SOUND in accepted and placeholder_of(config, "audio") is not None


def placeholder_of(config: Any, kind: str) -> int | None:
    """Return the token that stands for features of a kind of media; None if the config names none."""
    found = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
    return next((one for one in found if isinstance(one, int)), None)


# mechanism: media-spans (executed)
class LibraryEncoder:
    """The encoder of a library's model.

    Args:
        base: the model below the output projection, with encoder and decoder.
    """

    def __init__(self, base: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._base, self._dtype, self._device = base, dtype, device
        self._placeholders = {kind: placeholder_of(base.config, kind) for kind in ("image", "video", "audio")}
        self._embed = base.get_input_embeddings()
        self._accepted = {kind: _arguments(getattr(base, name, None)) for kind, name in FEATURES.items()}
        self._of_forward = _arguments(base.forward)
        self._axes: places.AxesOfMedia | None = None
        if (method := getattr(base, ROPE_INDEX, None)) is not None:
            self._axes = places.AxesOfMedia(method, _arguments(method), base.config, self._placeholders)

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
        ids = torch.from_numpy(np.frombuffer(content.ids, "<i4").astype(np.int64)).to(self._device)
        if self._axes is not None:
            self._axes.check(content)
        if content.kind == "audio":
            return self._forwarded(ids, content), ()
        accepted = self._accepted[content.kind]
        given = {name: self._tensor(name, content) for name in content.arrays if name in accepted}
        found = getattr(self._base, FEATURES[content.kind])(**given, return_dict=True)
        features = _joined(found.pooler_output)
        at = torch.nonzero(ids == self._placeholders[content.kind])[:, 0]
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

    def _forwarded(self, ids: Tensor, content: EncoderInput) -> Tensor:
        """Return the embeddings that the model's code gives its decoder for a prompt of this content only."""
        given = {name: self._tensor(name, content) for name in content.arrays if name in self._of_forward}
        handle = self._base.get_decoder().register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self._base(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **given)
        except _Reached as reached:
            embeddings: Tensor = reached.embeddings[0].to(self._dtype)
        else:
            raise ConfigError("the model's code does not pass embeddings to its decoder")
        finally:
            handle.remove()
        if len(embeddings) != len(ids):
            raise ConfigError(f"the encoder made {len(embeddings)} embeddings for {len(ids)} positions")
        return embeddings

    def _tensor(self, name: str, content: EncoderInput) -> Tensor:
        made = torch.from_numpy(content.arrays[name].numpy().copy())
        return made.to(self._device, self._dtype) if made.is_floating_point() else made.to(self._device)

    def places(self, spans: Sequence[tuple[PromptSpan, EncoderInput]], tokens: int) -> NDArray[np.int64] | None:
        """Return positions of three axes, int64 [3, tokens], of a prompt; None: the model has one axis."""
        return None if self._axes is None else self._axes.of(spans, tokens)


class _Reached(Exception):
    """Raised in place of the decoder's pass. Takes along the embeddings, [1, positions, hidden]."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.embeddings = embeddings


def _stop(_: Any, __: Any, given: Mapping[str, Any]) -> None:
    raise _Reached(given["inputs_embeds"])


def _arguments(method: Any) -> Mapping[str, Any]:
    return {} if method is None else inspect.signature(inspect.unwrap(method)).parameters


def _joined(features: Any) -> Tensor:
    """Return the features of all parts of a picture, [features, hidden]."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in parts])
