"""Prefill and decode engines over small pools, and the common steps of tests of their transfers."""

from __future__ import annotations

import dataclasses
from typing import Any

from lockstep.core.contract.config import SchedConfig
from tests.support.fleet.fleet import Fleet
from tests.support.served import Asked

SMALL: dict[str, Any] = {"page_size": 2, "pages": 32, "max_running_requests": 4, "num_reserved_decode_tokens": 2}


def fleet(*, prefills: int = 1, decodes: int = 1, restores: bool = True, **settings: Any) -> Fleet:
    common = {**SMALL, **settings}
    own = {"chunked_prefill_size": 4, "overlap_depth": 1}
    return Fleet(
        [SchedConfig(role="prefill", **(own | common)) for _ in range(prefills)],
        [SchedConfig(role="decode", **(own | common)) for _ in range(decodes)],
        restores=restores,
    )


def asked(key: int, prompt: int = 4, max_new: int = 4, **more: Any) -> Asked:
    return Asked(key, tuple(range(100 * (key + 1), 100 * (key + 1) + prompt)), max_new, **more)


def state(made: Fleet, name: str, request_id: int = 0) -> str:
    transfers = made.members[name].engine.transfers
    assert transfers.hands_over
    transfer = transfers.all.get(request_id)
    return transfer.state if transfer is not None else "over"


def free_pages(made: Fleet, name: str) -> set[int]:
    return set(made.members[name].engine.memory.pool.free_ids().tolist())


def hear(made: Fleet, status: str, name: str) -> None:
    """Deliver the first pending fact with this status to the host of an engine."""
    made.tell(next(told for told in made.told if (told.status, told.to) == (status, name)))


def to_receiving(made: Fleet, one: Asked) -> None:
    """A prompt of one batch is computed, and no part of it has moved."""
    made.arrive(one)
    hear(made, "accepted", "p0")
    assert made.ready("p0")
    made.finish("p0")


def samples(key: int, number: int, **more: Any) -> list[Asked]:
    first = asked(key, **more)
    return [first, *(dataclasses.replace(first, key=key + i) for i in range(1, number))]


def ranks(**settings: Any) -> Fleet:
    """One prefill and one decode engine, of two data-parallel ranks each."""
    engines = {role: [SchedConfig(role=role, **{**SMALL, **settings})] * 2 for role in ("prefill", "decode")}
    return Fleet(engines["prefill"], engines["decode"], ranks=True, restores=True)


def offer(made: Fleet, engine: str) -> list[str]:
    """Offer a slot to every rank of an engine. Returns the modes of their batches."""
    names = [name for name in made.members if name[0] == engine]
    for name in names:
        made.ready(name)
    while any(made.hear(name) for name in names):
        pass
    return [made.members[name].engine.in_flight[-1].plan.mode for name in names]
