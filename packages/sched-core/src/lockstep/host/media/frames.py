"""Frames of a video, and what Qwen-VL's encoders receive for them without torchvision: patches of two frames.

transformers has these processors of videos for torchvision only, while it has those of images for Pillow, too. Sizes,
normalisation and the order of patches are those of its classes; pixels that Pillow resizes differ a little from
those of torchvision. Where that is installed, transformers' own classes are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RATIO_MAX = 200  # of the sides of a frame
MEANS = {"Qwen2VLVideoProcessor": "OPENAI_CLIP", "Qwen3VLVideoProcessor": "IMAGENET_STANDARD"}
"""Classes of transformers whose work is done here, and the names of their usual means and deviations."""
OF_MODELS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen3VLVideoProcessor"),
}
"""`model_type` -> the class, for folders that name none. transformers empties its own table without torchvision."""
SIZES = {
    "Qwen2VLVideoProcessor": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "Qwen3VLVideoProcessor": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
}
USUAL: dict[str, Any] = {
    "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "rescale_factor": 1 / 255,
    "do_resize": True, "do_rescale": True, "do_normalize": True, "cap_pixels_per_frame": False,
}  # fmt: skip


class FrameSampling(NamedTuple):
    """Which frames a model gets.

    Args:
        rate: per second of the video.
        least, most: frames of one video; a video with fewer has all of them.
    """

    rate: float
    least: int
    most: int

    def frames(self, total: int, rate: float) -> list[int]:
        """Return the numbers of the wanted frames of a video, as transformers' Qwen3VLVideoProcessor draws them."""
        count = min(max(int(total / rate * self.rate), self.least), self.most, total)
        wanted: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return wanted


class VideoFrames(NamedTuple):
    """Frames of a video.

    Args:
        pixels: uint8 [frames, height, width, 3].
        numbers: of these frames among `total`.
        rate: frames per second of the whole video.
    """

    pixels: NDArray[np.uint8]
    numbers: list[int]
    total: int
    rate: float


class PillowFrames:
    """Takes the place of a processor of videos of transformers.

    Args:
        kind: the name of its class, one of MEANS.
        settings: of the model's folder.
    """

    valid_kwargs = None  # arguments are not checked by the library

    def __init__(self, kind: str, settings: Mapping[str, Any]) -> None:
        from transformers import image_utils

        old = kind == "Qwen2VLVideoProcessor"
        usual = {**USUAL, "patch_size": 14 if old else 16, "fps": None if old else 2, "size": SIZES[kind]}
        usual |= {"max_video_tokens": 128_000 if old else 768}
        usual |= {f"image_{one}": getattr(image_utils, f"{MEANS[kind]}_{one.upper()}") for one in ("mean", "std")}
        given = {name: settings[name] for name in usual if settings.get(name) is not None}
        self._made = {**usual, **given}
        size = dict(self._made["size"])
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if old and isinstance(settings.get(name), int):
                size[edge] = settings[name]
        self._least, self._most, self._by_frame = int(size["shortest_edge"]), int(size["longest_edge"]), old
        self.patch_size, self.merge_size = int(self._made["patch_size"]), int(self._made["merge_size"])
        self.temporal_patch_size = int(self._made["temporal_patch_size"])
        self.fps = self._made["fps"]
        self.min_frames, self.max_frames = int(self._made["min_frames"]), int(self._made["max_frames"])

    def __call__(
        self, videos: Sequence[Any], video_metadata: Any = None, size: Mapping[str, int] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return the arrays for videos, uint8 [frames, height, width, 3] each, and their metadata.

        Args:
            size: least and most pixels, which the processor of Qwen-Omni gives, whatever the folder has.
        """
        sized = self
        if size is not None:
            sized = copy(self)
            sized._least, sized._most = int(size["shortest_edge"]), int(size["longest_edge"])
        made = [sized._patches(np.asarray(one)) for one in videos]
        return {
            "pixel_values_videos": np.concatenate([patches for patches, _ in made]),
            "video_grid_thw": np.array([grid for _, grid in made], np.int64),
            "video_metadata": video_metadata,
        }

    def side(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return height and width of resized frames. Raises ValueError for frames that are far from square."""
        factor, given = self.patch_size * self.merge_size, (height, width)
        most = self._most
        if self._made["cap_pixels_per_frame"]:
            most = self._capped(frames, factor)
        if not self._by_frame:
            if frames < self.temporal_patch_size:
                raise ValueError(f"it has {frames} frames, at least {self.temporal_patch_size} are needed")
            if height < factor or width < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > RATIO_MAX:
            raise ValueError(f"a frame has {given[1]} x {given[0]} pixels, which is too long")
        counted, exact = 1, 1
        if not self._by_frame:
            step = self.temporal_patch_size
            counted, exact = round(frames / step) * step, frames
        sides = round(height / factor) * factor, round(width / factor) * factor
        if counted * sides[0] * sides[1] > most:
            beta = math.sqrt(exact * height * width / most)
            return _down(height / beta, factor), _down(width / beta, factor)
        if counted * sides[0] * sides[1] < self._least:
            beta = math.sqrt(self._least / (exact * height * width))
            return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
        return sides

    def _capped(self, frames: int, factor: int) -> int:
        """Return the most pixels, of a frame or of all frames, when each frame has its share of a budget."""
        tokens, floor = int(self._made["max_video_tokens"]) * factor * factor, int(self._least * 1.05)
        if self._by_frame:
            return max(min(self._most, int(tokens * 0.9) * self.temporal_patch_size // frames), floor)
        return max(min(tokens, self._most // frames), floor) * frames

    def _patches(self, frames: NDArray[np.uint8]) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        """Return patches of frames, float32 [patches, numbers], and how many there are along time, height and width."""
        from PIL import Image

        count, height, width, _ = frames.shape
        if self._made["do_resize"]:
            height, width = self.side(count, height, width)
            turned = [Image.fromarray(one).resize((width, height), Image.Resampling.BICUBIC) for one in frames]
            frames = np.stack([np.asarray(one) for one in turned])
        mean, deviation = np.zeros(3, np.float32), np.ones(3, np.float32)
        if self._made["do_normalize"]:
            mean, deviation = (np.array(self._made[f"image_{one}"], np.float32) for one in ("mean", "std"))
        factor = np.float32(self._made["rescale_factor"] if self._made["do_rescale"] else 1.0)
        values = (frames.astype(np.float32) - mean / factor) / (deviation / factor)
        values = np.concatenate((values, values[-1:].repeat(-count % self.temporal_patch_size, 0)))
        time, patch, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        grid = len(values) // time, height // patch, width // patch
        split = values.reshape(grid[0], time, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
        ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return ordered.reshape(math.prod(grid), 3 * time * patch * patch), grid


def _down(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)
