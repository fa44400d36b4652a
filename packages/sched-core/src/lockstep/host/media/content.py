"""What the encoder receives for one medium, embeddings that a client gives, and prompts with such contents.

All are plain values, which can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.events import PromptSpan

GIVEN = "given embeddings"
"""Name of the only array of a content that is embeddings: float32 [positions, hidden]. No encoder has this argument."""

DTYPES = frozenset(("float32", "int64", "int32", "uint8", "bool"))


class Array(msgspec.Struct, frozen=True):
    """An array of numbers: its dtype by numpy's name, its shape and its bytes, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"an array of {self.dtype}")

    def numpy(self) -> NDArray[Any]:
        """Return the array, read-only. Raises ValueError if its size is not that of its shape."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


def array_of(values: Any) -> Array:
    """Return numbers as an Array; other floats become float32, other integers int64."""
    made = np.asarray(values)
    if made.dtype.name not in DTYPES:
        made = made.astype(np.float32 if made.dtype.kind == "f" else np.int64)
    return Array(made.dtype.name, made.shape, np.ascontiguousarray(made).tobytes())


class EncoderInput(msgspec.Struct, frozen=True):
    """The input of the encoder for one medium, and the tokens at its positions.

    Args:
        digest: SHA-256 of ids and arrays.
        ids: int32 [positions], tokens at the positions of its span. Those that are not the model's placeholder keep
            their own embeddings, such as breaks between rows of a picture.
        arrays: by the name of the argument of the model's encoder.
        kind: as in `PromptSpan.kind`.
    """

    digest: bytes
    ids: bytes
    arrays: dict[str, Array]
    kind: str = "image"

    @property
    def size(self) -> int:
        """Bytes of its arrays."""
        return sum(len(one.data) for one in self.arrays.values())

    @property
    def positions(self) -> int:
        """Positions of the prompt that it takes."""
        return len(self.ids) // 4


def content_of(ids: Sequence[int], arrays: Mapping[str, Any], kind: str = "image") -> EncoderInput:
    """Return a content with its digest."""
    packed = {name: array_of(arrays[name]) for name in sorted(arrays)}
    tokens, state = np.array(ids, "<i4").tobytes(), sha256()
    state.update(msgspec.msgpack.encode([(name, one.dtype, one.shape) for name, one in packed.items()]))
    for data in (tokens, *(one.data for one in packed.values())):
        state.update(data)
    return EncoderInput(state.digest(), tokens, packed, kind)


class MediaPrompt(msgspec.Struct, frozen=True):
    """A prompt with media: its text, its tokens (placeholders included), the spans, and each content once.

    Given embeddings are media without an encoder: one span over the whole prompt.
    """

    text: str
    ids: list[int]
    spans: tuple[PromptSpan, ...]
    contents: tuple[EncoderInput, ...]
