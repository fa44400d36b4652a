"""Images, videos and sounds of turns: which contents, and where in the prompts their placeholders stand.

A content is a number in a workload; its digest is a SHA-256 over the workload's salt and that number, so that equal
contents are equal wherever they come, and those of two workloads are not.
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
    """One of them in one prompt, whose positions [start:start + tokens) it takes."""

    kind: MediaKind
    start: int
    tokens: int
    segments: int
    digest: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaColumns:
    """Those of every turn, in order of position; of a later turn of a session also those before it."""

    stops: Int64s  # [n]; turn i has the rows [stops[i - 1]:stops[i]) of the columns below, from 0 for i = 0
    kind: NDArray[np.int8]  # into KINDS
    start: Int32s
    tokens: Int32s
    segments: Int32s
    content: Int64s  # its number
    salt: str

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""
        return sum(value.nbytes for value in self._columns().values()) + self.stops.nbytes

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray) and field.name != "stops"
        }

    def of(self, rows: Int64s) -> list[tuple[TurnMedia, ...]]:
        """Those of some turns."""
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
        """SHA-256 by which a content is known."""
        return sha256(f"{self.salt}/{content}".encode()).digest()

    def contents(self) -> dict[bytes, MediaContent]:
        """Every content by its digest: what an encoder needs of it."""
        _, first = np.unique(self.content, return_index=True)
        columns = (self.content, self.kind, self.tokens, self.segments)
        rows = zip(*(column[first].tolist() for column in columns), strict=True)
        return {self.digest(number): MediaContent(KINDS[kind], tokens, parts) for number, kind, tokens, parts in rows}

    def take(self, rows: Int64s) -> MediaColumns:
        """Those of some turns, in that order."""
        starts = np.concatenate((np.zeros(1, np.int64), self.stops[:-1]))[rows]
        counts = self.stops[rows] - starts
        stops = np.cumsum(counts)
        picked = np.repeat(starts - (stops - counts), counts) + np.arange(int(counts.sum()))
        columns: dict[str, Any] = {name: column[picked] for name, column in self._columns().items()}
        return replace(self, stops=stops, **columns)
