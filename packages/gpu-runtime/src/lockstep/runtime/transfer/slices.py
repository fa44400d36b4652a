"""Which bytes of which ranks of a prefill engine a rank of a decode engine needs.

Each rank of an engine has the KV of some heads of the model; parts without heads (tokens of drafts, tags of the canary)
are the same on every rank.

    4 heads, 2 ranks ──> 4 ranks     rank 1 needs the second head of rank 0
    4 heads, 4 ranks ──> 2 ranks     rank 1 needs the heads of ranks 2 and 3
    2 heads, 4 ranks                 ranks 0 and 1 have the first head, 2 and 3 the second
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.wire import PageLayout


@dataclass(frozen=True, slots=True)
class Source:
    """Heads [first:first + heads) of a rank of the sender, which become heads [into:into + heads) here.

    Args:
        whole: the pages are equal in every byte, and all heads are copied.
        shared: parts without heads are copied from this rank, too.
    """

    rank: int
    first: int
    heads: int
    into: int
    whole: bool = False
    shared: bool = False


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """Return the KV heads of a rank, as numbers in the model."""
    if heads >= ranks:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank * heads // ranks
    return range(head, head + 1)


def sources_of(theirs: PageLayout, ours: PageLayout, rank: int) -> list[Source]:
    """Return what a rank copies. Raises ConfigError if the pages of both engines do not have the same meaning."""
    check_layouts(theirs, ours)
    if theirs.ranks == ours.ranks:
        return [Source(rank, 0, 0, 0, whole=True, shared=True)]
    wanted, heads = heads_of(rank, ours.ranks, ours.kv_heads), ours.kv_heads
    found: list[Source] = []
    for sender in range(theirs.ranks):
        has = heads_of(sender, theirs.ranks, heads)
        first, stop = max(wanted.start, has.start), min(wanted.stop, has.stop)
        covered = wanted.start + sum(one.heads for one in found)
        first = max(first, covered)  # heads that several ranks have are copied once
        if first < stop:
            into = first - wanted.start
            found.append(Source(sender, first - has.start, stop - first, into, shared=not found))
    return found


def check_layouts(theirs: PageLayout, ours: PageLayout) -> None:
    """Raise ConfigError, with the difference, if KV of a prefill engine is not KV of a decode engine."""
    for name in ("model", "page_size", "kv_heads"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise ConfigError(f"the prefill engine has `{name}` {there}, the decode engine {here}")
    if [(one.name, one.dtype) for one in theirs.parts] != [(one.name, one.dtype) for one in ours.parts]:
        names = [one.name for one in theirs.parts], [one.name for one in ours.parts]
        more = sorted(set(names[0]) ^ set(names[1]))
        what = f"only one has {', '.join(more)}" if more else "their number types differ"
        raise ConfigError(f"pages of the prefill and of the decode engine have different parts: {what}")
    if theirs.ranks == ours.ranks and theirs.page_bytes != ours.page_bytes:
        raise ConfigError(f"a page has {theirs.page_bytes} bytes there, and {ours.page_bytes} here")
    if theirs.ranks != ours.ranks and not ours.kv_heads:
        raise ConfigError(f"this model has no KV heads that {theirs.ranks} and {ours.ranks} ranks could share")
