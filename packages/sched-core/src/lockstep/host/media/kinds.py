"""Kinds of media that prompts may have, and what messages to clients call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class MediaKind:
    """One kind of media.

    Args:
        name: as in `PromptSpan.kind`, in the type of a data URL, and in the names of limits.
        shown: what messages call one of them.
        packages: that are imported to read it, beside transformers.
        extra: of `lockstep-core`, which installs these.
        parts: types of the parts of a message that hold one.
    """

    name: Kind
    shown: str
    packages: tuple[str, ...]
    extra: str
    parts: tuple[str, ...]

    @property
    def one(self) -> str:
        """Return what messages call any of them."""
        return f"{'an' if self.shown[0] in 'aeiou' else 'a'} {self.shown}"

    @property
    def several(self) -> str:
        """Return what messages call several of them."""
        return f"{self.shown}s"


KINDS: dict[str, MediaKind] = {
    one.name: one
    for one in (
        MediaKind("image", "image", ("PIL",), "images", ("image_url",)),
        MediaKind("audio", "audio clip", ("soundfile", "soxr"), "audio", ("input_audio", "audio_url")),
        MediaKind("video", "video", ("av", "PIL"), "video", ("video_url",)),
    )
}
PARTS: dict[str, Kind] = {part: one.name for one in KINDS.values() for part in one.parts}
"""Type of a part of a message -> its kind."""
