"""Which bytes of which ranks of a prefill engine a rank of a decode engine needs.

Each rank of an engine has the KV of some layers, those of its pipeline stage, and of some heads of them. Parts without
heads (states, tokens of drafts, tags of the canary) are the same on every rank. Parts are found by kind and name, so
both engines may divide a state into other pieces.

    4 heads, 2 ranks ──> 4 ranks      rank 1 needs the second head of rank 0
    4 heads, 4 ranks ──> 2 ranks      rank 1 needs the heads of ranks 2 and 3
    2 heads, 4 ranks                  ranks 0 and 1 have the first head, 2 and 3 the second
    3 layers, 2 stages ──> 3 stages   the second stage needs the first layer of rank 0, which is in the last stage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.contract.errors import ConfigError
from lockstep.host.cache_moves import BlockKind
from lockstep.host.handover.wire import LayoutPart, PageLayout, StagingPlace, blocks_in


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A part of a page that is copied from another rank: all of it, or some of its heads.

    Args:
        block, number: of the kind of blocks, and of the part in it, on the receiving rank.
        theirs: the part on the sending rank.
        first, heads, into: heads [first:first + heads) become heads [into:into + heads) here; `heads` 0: all bytes.
    """

    block: int
    number: int
    theirs: LayoutPart
    first: int = 0
    heads: int = 0
    into: int = 0


Sources = tuple[dict[int, list[PartCopy]], ...]
"""Copies by the sender's number of the kind of blocks, and by rank of the sender."""


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """Return the KV heads of a tensor-parallel rank, as numbers in the model."""
    if heads >= ranks:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank * heads // ranks
    return range(head, head + 1)


def sources_of(
    theirs: PageLayout, places: Sequence[StagingPlace], ours: PageLayout, column: int, *, all_layers: bool = True
) -> Sources:
    """Return what a rank copies.

    Args:
        places: of all ranks of the sender; those of one stage are neighbours.
        ours: the pages of this rank.
        column: number of this rank in its stage.
        all_layers: whether this rank has all layers of the model.
    Raises: ConfigError, with the difference, if KV of the prefill engine is not KV of the decode engine.
    """
    for name in ("model", "page_size", "kv_heads", "window_tokens"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise ConfigError(f"the prefill engine has `{name}` {there}, the decode engine {here}")
    if theirs.ranks != ours.ranks and not ours.kv_heads:
        raise ConfigError(f"this model has no KV heads that {theirs.ranks} and {ours.ranks} ranks could share")
    has = [(rank, at, kind, part) for rank, place in enumerate(places) for at, kind, part in _all_parts(place)]
    needs = _all_parts(ours)
    names = {(kind, part.name) for *_, kind, part in has}, {(kind, part.name) for _, kind, part in needs}
    if more := sorted(names[1] - names[0] if not all_layers else names[1] ^ names[0]):
        only = ", ".join(name if kind == "page" else f"{name} ({kind})" for kind, name in more)
        raise ConfigError(f"pages of the prefill and of the decode engine differ: only one has {only}")
    found: Sources = tuple({} for _ in blocks_in(theirs))
    read: set[int] = set()  # ranks of the sender
    numbers = [number for one in blocks_in(ours) for number in range(len(one.parts))]
    for (block, kind, part), number in zip(needs, numbers, strict=True):
        holders = [(rank, at, one) for rank, at, other, one in has if (other, one.name) == (kind, part.name)]
        if not part.heads:  # of ranks that are read anyway, if there is one
            holders = [next((one for one in holders if one[0] in read), holders[0])]
        of_rank = {rank: at for rank, at, _ in holders}
        having = [(rank, one) for rank, _, one in holders]
        for rank, copy in _copies((block, number), part, having, theirs, ours, column):
            if copy.theirs.dtype != part.dtype:
                raise ConfigError(
                    f"`{part.name}` has the number type {copy.theirs.dtype} on the prefill engine, {part.dtype} on the "
                    "decode engine"
                )
            if not copy.heads and copy.theirs.size != part.size:
                raise ConfigError(f"`{part.name}` of a {kind} has {copy.theirs.size} bytes there, and {part.size} here")
            found[of_rank[rank]].setdefault(rank, []).append(copy)
            read.add(rank)
    return found


def _all_parts(one: PageLayout | StagingPlace) -> list[tuple[int, BlockKind, LayoutPart]]:
    """Return the parts of all blocks of a rank, with the number of their kind of blocks."""
    return [(at, blocks.kind, part) for at, blocks in enumerate(blocks_in(one)) for part in blocks.parts]


def _copies(
    place: tuple[int, int],
    part: LayoutPart,
    holders: list[tuple[int, LayoutPart]],
    theirs: PageLayout,
    ours: PageLayout,
    column: int,
) -> list[tuple[int, PartCopy]]:
    """Return the copies that make up one part, with their ranks.

    Args:
        place: of the part on the receiving rank: numbers of its kind of blocks, and of the part in it.
        holders: ranks of the sender that have it, or some heads of it.
    """
    if not part.heads:
        return [(rank, PartCopy(*place, whole)) for rank, whole in holders]
    if theirs.ranks == ours.ranks:
        return [(rank, PartCopy(*place, whole)) for rank, whole in holders if rank % theirs.ranks == column]
    wanted = heads_of(column, ours.ranks, ours.kv_heads)
    found, covered = list[tuple[int, PartCopy]](), wanted.start
    for rank, some in holders:
        there = heads_of(rank % theirs.ranks, theirs.ranks, ours.kv_heads)
        first, stop = max(covered, there.start), min(wanted.stop, there.stop)
        if first < stop:  # heads that several ranks have are copied once
            copy = PartCopy(*place, some, first - there.start, stop - first, first - wanted.start)
            found.append((rank, copy))
            covered = stop
    return found
