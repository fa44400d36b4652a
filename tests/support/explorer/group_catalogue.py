"""The worlds of several engines that are explored: a prefill and a decode engine, and two data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.core.contract.config import SchedConfig
from tests.support.explorer.groups import FleetWorld, RankWorld
from tests.support.served import Asked

DEPTHS = (0, 1)  # of overlap
SETTINGS: dict[str, Any] = {
    "page_size": 2,
    "pages": 10,
    "max_running_requests": 2,
    "max_prefill_tokens": 8,
    "context_tokens_max": 64,
    "num_reserved_decode_tokens": 1,
}
ONE = (Asked(0, (101, 102, 103), 2),)
TWO = (*ONE, Asked(1, (101, 102, 201, 202), 2, stops=(0,)))

FLEETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of both engines, and fields of the world
    "plain": ({}, {"arrivals": TWO}),
    "cancel": ({}, {"arrivals": ONE, "cancels": 1}),
    "batch error": ({}, {"arrivals": ONE, "batch_errors": 1}),
    "link down": ({}, {"arrivals": ONE, "link_downs": 1}),
    "link down and recompute": ({"transfer_failure": "recompute"}, {"arrivals": ONE, "link_downs": 1}),
    "lost fact": ({}, {"arrivals": ONE, "lost": 1}),
    "restart": ({"transfer_failure": "recompute"}, {"arrivals": ONE, "restarts": 1}),
    "new weights": ({"transfer_failure": "recompute"}, {"arrivals": ONE, "weights": 1}),
    "chunks": ({"chunked_prefill_size": 2}, {"arrivals": ONE, "cancels": 1}),
    "one slot": ({"transfer_slots": 1}, {"arrivals": TWO}),
    "late allocation": ({"transfer_allocation": "prefill_complete"}, {"arrivals": ONE, "cancels": 1}),
    "least output": ({}, {"arrivals": (Asked(0, (101, 102, 103), 3, 2, (0,)),)}),
    "few pages": ({"pages": 4}, {"arrivals": TWO}),
}
RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "cancel": ({}, {"cancels": 1}),
    "batch error": ({}, {"batch_errors": 1}),
    "restart": ({}, {"restarts": 1}),
    "chunks": ({"chunked_prefill_size": 2}, {}),
    "mixed batches": ({"chunked_prefill_size": 2, "batching": "mixed"}, {}),
    "delayer": ({"prefill_delayer": True, "prefill_delayer_max_delay_passes": 2}, {}),
    "no consecutive extends": ({"overlap_consecutive_prefills": False}, {}),
}


def group_worlds() -> Iterator[FleetWorld | RankWorld]:
    """Yield all worlds of several engines."""
    for name in (*(f"fleet: {one}" for one in FLEETS), *(f"ranks: {one}" for one in RANKS)):
        for depth in DEPTHS:
            yield group_world(name, depth)


def group_world(name: str, depth: int) -> FleetWorld | RankWorld:
    """Return a world by the name of its kind and feature. Raises: ValueError for a name without a world."""
    kind, _, feature = name.partition(": ")
    table = {"fleet": FLEETS, "ranks": RANKS}.get(kind, {})
    if feature not in table:
        names = ", ".join((*(f"fleet: {one}" for one in FLEETS), *(f"ranks: {one}" for one in RANKS)))
        raise ValueError(f"`world` must name a world of several engines, got `{name}`; they are {names}")
    settings, fields = table[feature]
    settings = {**SETTINGS, "overlap_depth": depth, **settings}
    full = f"{name}, depth {depth}"
    if kind == "fleet":
        return FleetWorld(
            full, SchedConfig(role="prefill", **settings), SchedConfig(role="decode", **settings), **fields
        )
    settings.pop("num_reserved_decode_tokens")
    arrivals = ((0, ONE[0]), (1, TWO[1]))
    return RankWorld(full, SchedConfig(dp_ranks=2, dp_rank=0, **settings), arrivals, **fields)
