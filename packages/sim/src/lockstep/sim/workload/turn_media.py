"""Images, videos and sounds of turns: their contents, and the positions of their placeholders in prompts.

A content is a number within a workload. Its digest is a SHA-256 over the workload's salt and that number. So equal
contents have equal digests in all turns, and contents of two workloads differ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.encoder import KINDS, MediaContent, MediaKind

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


class TurnMedia(NamedTuple):
    """One content in one prompt, at positions [start:start + tokens)."""

    kind: MediaKind
    start: int
    tokens: int
    segments: int
    digest: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaColumns:
    """Media of every turn, in order of position. A later turn of a session includes those of earlier turns."""

    stops: Int64s  # [n]; turn i has the rows [stops[i - 1]:stops[i]) of the columns below, from 0 for i = 0
    kind: NDArray[np.int8]  # into KINDS
    start: Int32s
    tokens: Int32s
    segments: Int32s
    content: Int64s  # number of the content
    salt: str

    @property
    def nbytes(self) -> int:
        """Memory of all columns, bytes."""
        return sum(value.nbytes for value in self._columns().values()) + self.stops.nbytes

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray) and field.name != "stops"
        }

    def of(self, rows: Int64s) -> list[tuple[TurnMedia, ...]]:
        """Return the media of some turns."""
        found: list[tuple[TurnMedia, ...]] = []
        for row in rows.tolist():
            first, stop = int(self.stops[row - 1]) if row else 0, int(self.stops[row])
            columns = (self.kind, self.start, self.tokens, self.segments, self.content)
            items = zip(*(column[first:stop].tolist() for column in columns), strict=True)
            found.append(
                tuple(
                    TurnMedia(KINDS[kind], start, tokens, segments, self.digest(content))
                    for kind, start, tokens, segments, content in items
                )
            )
        return found

    def digest(self, content: int) -> bytes:
        """Return the SHA-256 that identifies a content."""
        return sha256(f"{self.salt}/{content}".encode()).digest()

    def contents(self) -> dict[bytes, MediaContent]:
        """Return every content by its digest, as the encoder requires it."""
        _, first = np.unique(self.content, return_index=True)
        columns = (self.content, self.kind, self.tokens, self.segments)
        rows = zip(*(column[first].tolist() for column in columns), strict=True)
        return {self.digest(number): MediaContent(KINDS[kind], tokens, parts) for number, kind, tokens, parts in rows}

    def take(self, rows: Int64s) -> MediaColumns:
        """Return the columns for some turns, in that order."""
        starts = np.concatenate((np.zeros(1, np.int64), self.stops[:-1]))[rows]
        counts = self.stops[rows] - starts
        stops = np.cumsum(counts)
        picked = np.repeat(starts - (stops - counts), counts) + np.arange(int(counts.sum()))
        columns: dict[str, Any] = {name: column[picked] for name, column in self._columns().items()}
        return replace(self, stops=stops, **columns)
