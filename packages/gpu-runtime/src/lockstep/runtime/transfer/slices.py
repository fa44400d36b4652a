"""Which bytes of which ranks of a prefill engine a rank of a decode engine needs.

Each rank of an engine has the KV of some layers, those of its pipeline stage, and of some heads of them. Parts without
heads (tokens of drafts, tags of the canary) are the same on every rank.

    4 heads, 2 ranks ──> 4 ranks      rank 1 needs the second head of rank 0
    4 heads, 4 ranks ──> 2 ranks      rank 1 needs the heads of ranks 2 and 3
    2 heads, 4 ranks                  ranks 0 and 1 have the first head, 2 and 3 the second
    3 layers, 2 stages ──> 3 stages   the second stage needs the first layer of rank 0, which is in the last stage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.wire import LayoutPart, PageLayout, StagingPlace


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A part of a page that is copied from another rank: all of it, or some of its heads.

    Args:
        number: of the part in the pages of the receiving rank.
        theirs: the part on the sending rank.
        first, heads, into: heads [first:first + heads) become heads [into:into + heads) here; `heads` 0: all bytes.
    """

    number: int
    theirs: LayoutPart
    first: int = 0
    heads: int = 0
    into: int = 0


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """Return the KV heads of a tensor-parallel rank, as numbers in the model."""
    if heads >= ranks:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank * heads // ranks
    return range(head, head + 1)


def sources_of(
    theirs: PageLayout, places: Sequence[StagingPlace], ours: PageLayout, column: int, *, all_layers: bool = True
) -> dict[int, list[PartCopy]]:
    """Return what a rank copies, by rank of the sender.

    Args:
        places: of all ranks of the sender; those of one stage are neighbours.
        ours: the pages of this rank.
        column: number of this rank in its stage.
        all_layers: whether this rank has all layers of the model.
    Raises: ConfigError, with the difference, if KV of the prefill engine is not KV of the decode engine.
    """
    for name in ("model", "page_size", "kv_heads"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise ConfigError(f"the prefill engine has `{name}` {there}, the decode engine {here}")
    if theirs.ranks != ours.ranks and not ours.kv_heads:
        raise ConfigError(f"this model has no KV heads that {theirs.ranks} and {ours.ranks} ranks could share")
    has = {part.name for place in places for part in place.parts}
    needs = {part.name for part in ours.parts}
    if more := sorted(needs - has if not all_layers else needs ^ has):
        raise ConfigError(f"pages of the prefill and of the decode engine differ: only one has {', '.join(more)}")
    found: dict[int, list[PartCopy]] = {}
    for number, part in enumerate(ours.parts):
        holders = [(rank, one) for rank, place in enumerate(places) for one in place.parts if one.name == part.name]
        if not part.heads:  # of ranks that are read anyway, if there is one
            holders = [next((one for one in holders if one[0] in found), holders[0])]
        for rank, copy in _copies(number, part, holders, theirs, ours, column):
            if copy.theirs.dtype != part.dtype:
                raise ConfigError(
                    f"`{part.name}` has the number type {copy.theirs.dtype} on the prefill engine, {part.dtype} on the "
                    "decode engine"
                )
            if not copy.heads and copy.theirs.size != part.size:
                raise ConfigError(f"`{part.name}` of a page has {copy.theirs.size} bytes there, and {part.size} here")
            found.setdefault(rank, []).append(copy)
    return found


def _copies(
    number: int,
    part: LayoutPart,
    holders: list[tuple[int, LayoutPart]],
    theirs: PageLayout,
    ours: PageLayout,
    column: int,
) -> list[tuple[int, PartCopy]]:
    """Return the copies that make up one part, with their ranks. `holders` have it, or some heads of it."""
    if not part.heads:
        return [(rank, PartCopy(number, whole)) for rank, whole in holders]
    if theirs.ranks == ours.ranks:
        return [(rank, PartCopy(number, whole)) for rank, whole in holders if rank % theirs.ranks == column]
    wanted = heads_of(column, ours.ranks, ours.kv_heads)
    found, covered = list[tuple[int, PartCopy]](), wanted.start
    for rank, some in holders:
        there = heads_of(rank % theirs.ranks, theirs.ranks, ours.kv_heads)
        first, stop = max(covered, there.start), min(wanted.stop, there.stop)
        if first < stop:  # heads that several ranks have are copied once
            copy = PartCopy(number, some, first - there.start, stop - first, first - wanted.start)
            found.append((rank, copy))
            covered = stop
    return found
