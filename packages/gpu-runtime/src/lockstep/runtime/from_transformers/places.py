"""Positions along time, height and width of a prompt with media, by the library's `get_rope_index`.

What it is given differs:

    Qwen-VL     mm_token_type_ids   0 0 0 1 1 1 1 0 0    the kind of media at each position
    Qwen-Omni   input_ids           . . s i i i i . .    placeholders, in front of them the token that begins a medium;
                                                         frames of each audio clip, seconds between patches of a video
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import PromptSpan
from lockstep.host.media.content import EncoderInput
from lockstep.host.media.thinker import FRAMES_MASK, STARTS

KINDS_OF_TOKENS = {"image": 1, "video": 2}  # in `mm_token_type_ids` of the library
TEXT = -1  # in place of all other tokens of a prompt, whose ids are of no account
Contents = Sequence[tuple[PromptSpan, EncoderInput]]


def of_kinds(arguments: Mapping[str, Any]) -> bool:
    """Return whether a `get_rope_index` of these arguments is that of Qwen-VL."""
    return "mm_token_type_ids" in arguments


def of_starts(arguments: Mapping[str, Any]) -> bool:
    """Return whether a `get_rope_index` of these arguments is that of Qwen-Omni."""
    return {"input_ids", "attention_mask", "audio_seqlens", "second_per_grids"} <= set(arguments)


def refusals(arguments: Mapping[str, Any], kind: str, config: Any) -> Iterator[str]:
    """Yield why positions of prompts with media of a kind cannot be computed."""
    if of_starts(arguments):
        name = STARTS[kind]
        if not isinstance(getattr(config, name, None), int):
            yield f"positions of three axes without `{name}` in config.json"
    elif not of_kinds(arguments) or kind == "audio":
        yield "positions of three axes, which the library computes in another way than Qwen's"


class AxesOfMedia:
    """Positions of three axes of one model.

    Args:
        rope_index: the library's `get_rope_index`.
        arguments: its arguments, by name.
        placeholders: the token of each kind of media.
    """

    def __init__(
        self,
        rope_index: Callable[..., tuple[Tensor, Tensor]],
        arguments: Mapping[str, Any],
        config: Any,
        placeholders: Mapping[str, int | None],
    ) -> None:
        self._rope_index, self._placeholders = rope_index, placeholders
        self._by_kinds = of_kinds(arguments)
        self._starts = {kind: getattr(config, name, None) for kind, name in STARTS.items()}

    def of(self, spans: Contents, tokens: int) -> NDArray[np.int64]:
        """Return the positions of a prompt, int64 [3, tokens]."""
        places: NDArray[np.int64] = self._found(spans, tokens).to(torch.int64).numpy()
        return places

    def check(self, content: EncoderInput) -> None:
        """Raise ConfigError for a content whose positions are no whole numbers, for which there is no room."""
        kind: Any = content.kind
        span = PromptSpan(1, 1 + content.positions, kind, content.digest, content.positions)
        found = self._found([(span, content)], content.positions + 2)
        if found.is_floating_point() and not bool((found == found.round()).all()):
            raise ConfigError(f"the positions of the {content.kind} are no whole numbers")

    def _found(self, spans: Contents, tokens: int) -> Tensor:
        given = self._kinds(spans, tokens) if self._by_kinds else self._ids(spans, tokens)
        axes, _ = self._rope_index(**given)
        return axes[:, 0]

    def _kinds(self, spans: Contents, tokens: int) -> dict[str, Tensor]:
        kinds = torch.zeros((1, tokens), dtype=torch.int32)
        for span, content in spans:
            held = self._is_held(content)
            kinds[0, span.start : span.stop] = torch.where(held, KINDS_OF_TOKENS[content.kind], 0)
        arrays = {name: name for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        ids = torch.zeros((1, tokens), dtype=torch.int64)
        return {"input_ids": ids, "mm_token_type_ids": kinds, **_joined(spans, arrays)}

    def _ids(self, spans: Contents, tokens: int) -> dict[str, Tensor]:
        ids = torch.full((1, tokens), TEXT, dtype=torch.int64)
        lengths = []
        for span, content in spans:
            token, start = self._placeholders[content.kind], self._starts[content.kind]
            assert token is not None
            assert start is not None
            ids[0, span.start : span.stop] = torch.where(self._is_held(content), token, TEXT)
            ids[0, span.start - 1] = start
            if content.kind == "audio":
                lengths.append(int(content.arrays[FRAMES_MASK].numpy().sum()))
        arrays = {"image_grid_thw": "image_grid_thw", "video_grid_thw": "video_grid_thw"}
        given = _joined(spans, {**arrays, "video_second_per_grid": "second_per_grids"})
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "audio_seqlens": torch.tensor(lengths),
            **given,
        }

    def _is_held(self, content: EncoderInput) -> Tensor:
        """Return which tokens of a content are placeholders."""
        return torch.from_numpy(np.frombuffer(content.ids, "<i4").copy()) == self._placeholders[content.kind]


def _joined(spans: Contents, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return arrays of all contents, end to end, by the name of the argument that takes them."""
    found: dict[str, list[Tensor]] = {}
    for _, content in spans:
        for name, argument in names.items():
            if name in content.arrays:
                found.setdefault(argument, []).append(torch.from_numpy(content.arrays[name].numpy().copy()))
    return {argument: torch.cat(parts) for argument, parts in found.items()}
