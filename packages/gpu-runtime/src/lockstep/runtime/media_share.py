"""Contents of media that are encoded together, divided over the ranks of an engine.

    rank 0   encode a       notes: a 40 positions, -, -       broadcast a    receive b      outputs a, b
    rank 1   encode b, c    notes: -, b 30, c failed: why     receive a      broadcast b    and why c failed

Every rank has the whole encoder and all contents, and computes the same division (`lockstep.host.media.division`). The
notes of all ranks are joined first: which of its contents a rank has encoded, how large the outputs are, and why others
failed. So a content that fails on its rank fails on all. Notes contain a digest of contents and division, which must be
equal on all ranks. Then each output is sent from its rank to all others, in the order of the contents. An output has
memory of its own, so that it can be dropped alone.

Layout of a note, one for each content, uint8 [NOTE_BYTES], little-endian:

    [ check 8 ][ positions, int32 ][ layers, int32 ][ why, UTF-8, padded with zeros ]

`layers` is 1, plus the number of layers behind which features are added; FAILED: there is no output; 0: a content of
another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.host.media.division import divided
from lockstep.runtime.errors import RankLost
from lockstep.runtime.overlap import StreamLane

Output: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]
"""Embeddings [positions, hidden] of a content, and those that are added behind the first layers."""

NOTE_BYTES = 256
CHECK_BYTES = 8
HEAD_BYTES = CHECK_BYTES + 8
FAILED = -1

Bytes = NDArray[np.uint8]


class EncoderRanks(Protocol):
    """This rank of the group that has one encoder each; `models.layers.Parallel`."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def all_gather(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def broadcast(self) -> Callable[[Tensor, int], Tensor] | None: ...


# mechanism: encoder-division (executed)
class EncoderShare:
    """This rank's part in encoding: division, and exchange of outputs. Every rank makes the same calls in one order.

    Args:
        hidden: numbers of the embedding of a position.
    """

    def __init__(self, parallel: EncoderRanks, lane: StreamLane, hidden: int, dtype: torch.dtype) -> None:
        assert parallel.broadcast is not None
        self.rank, self.ranks = parallel.rank, parallel.ranks
        self._join, self._broadcast = parallel.all_gather, parallel.broadcast
        self._lane, self._hidden, self._dtype = lane, hidden, dtype

    def owners(self, costs: Sequence[int]) -> list[int]:
        """Return the rank that encodes each content."""
        return divided(costs, self.ranks)

    def exchange(
        self, digests: Sequence[bytes], owners: Sequence[int], own: Mapping[int, Output | str]
    ) -> list[Output | str]:
        """Return the outputs of all contents, or why there are none; the same on every rank.

        Args:
            own: by number of the content: what this rank has made of its share.
        Raises: RankLost if another rank divides the contents differently, or has notes that are no such ones;
            CollectiveFailed.
        """
        notes = self._joined(self._notes(digests, owners, own))
        made: list[Output | str] = []
        for number, owner in enumerate(owners):
            note = notes[owner, number]
            head = _head(note)
            made.append(_why(note) if head[1] == FAILED else self._passed_on(owner, head, own.get(number)))
        return made

    def _notes(self, digests: Sequence[bytes], owners: Sequence[int], own: Mapping[int, Output | str]) -> Bytes:
        """Return this rank's notes, [contents, NOTE_BYTES]."""
        notes = np.zeros((len(digests), NOTE_BYTES), np.uint8)
        notes[:, :CHECK_BYTES] = np.frombuffer(_check(digests, owners), np.uint8)
        for number, made in own.items():
            note = notes[number]
            head = note[CHECK_BYTES:HEAD_BYTES].view("<i4")
            if isinstance(made, str):
                head[:] = 0, FAILED
                text = made.encode("utf-8", "replace")[: NOTE_BYTES - HEAD_BYTES]
                note[HEAD_BYTES : HEAD_BYTES + len(text)] = np.frombuffer(text, np.uint8)
            else:
                head[:] = len(made[0]), 1 + len(made[1])
        return notes

    def _joined(self, notes: Bytes) -> Bytes:
        """Return the notes of all ranks, [ranks, contents, NOTE_BYTES]. Raises RankLost if their checks differ."""
        joined = self._join(self._lane.upload(notes)).cpu().numpy()
        found: Bytes = joined.reshape(len(notes), self.ranks, NOTE_BYTES).transpose(1, 0, 2)
        other = (found[:, :, :CHECK_BYTES] != notes[0, :CHECK_BYTES]).any(axis=(1, 2)).nonzero()[0]
        if len(other):
            raise RankLost(
                f"rank {other[0]} divides {len(notes)} contents of media differently than rank {self.rank}: "
                "the ranks have other contents, or compute other shares"
            )
        return found

    def _passed_on(self, owner: int, head: tuple[int, int], mine: Output | str | None) -> Output:
        """Send an output of this rank to the others, or receive one of theirs. Returns the output."""
        positions, layers = head
        if isinstance(mine, tuple):
            self._broadcast(torch.cat((mine[0], *mine[1])) if mine[1] else mine[0].contiguous(), owner)
            return mine
        rows = torch.empty((positions * layers, self._hidden), dtype=self._dtype, device=self._lane.device)
        first, *deeper = self._broadcast(rows, owner).split(positions)
        return first, tuple(deeper)


def _check(digests: Sequence[bytes], owners: Sequence[int]) -> bytes:
    state = blake2b(digest_size=CHECK_BYTES)
    for digest, owner in zip(digests, owners, strict=True):
        state.update(len(digest).to_bytes(4, "little") + digest + owner.to_bytes(4, "little"))
    return state.digest()


def _head(note: Bytes) -> tuple[int, int]:
    """Return positions and layers of a note of a rank about its own content. Raises RankLost if there are none."""
    positions, layers = (int(one) for one in np.ascontiguousarray(note[CHECK_BYTES:HEAD_BYTES]).view("<i4"))
    if not (layers == FAILED or (layers > 0 and positions > 0)):
        raise RankLost(f"a rank has nothing of its share: {positions} positions, {layers} layers")
    return positions, layers


def _why(note: Bytes) -> str:
    text = note[HEAD_BYTES:].tobytes().rstrip(b"\0").decode("utf-8", "ignore")
    return text or "the encoder failed"
