"""Data-parallel ranks over small pools, and the common steps of tests of their passes."""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.config import SchedConfig
from tests.support.rank_group import RankGroup, run_history
from tests.support.served import Asked

SMALL: dict[str, Any] = {"page_size": 2, "pages": 32, "max_running_requests": 4, "batching": "prefill_first"}
DELAYING: dict[str, Any] = {"prefill_delayer": True, "prefill_delayer_max_delay_passes": 3}
JUMPING: dict[str, Any] = {"jump_forward_tokens": 8}


def group(ranks: int = 2, *, restores: bool = True, **settings: Any) -> RankGroup:
    return RankGroup([SchedConfig(dp_ranks=ranks, **{**SMALL, **settings})] * ranks, restores=restores)


def asked(key: int, prompt: int = 4, max_new: int = 4, **more: Any) -> Asked:
    return Asked(key, tuple(range(100 * (key + 1), 100 * (key + 1) + prompt)), max_new, **more)


def offer(made: RankGroup) -> None:
    """Offer a slot to every rank, and deliver what all agreed on."""
    for member in made.members:
        made.ready(member.rank)
    while any(made.hear(member.rank) for member in made.members):
        pass


def deliver(made: RankGroup) -> None:
    for member in made.members:
        made.finish(member.rank)


def modes(made: RankGroup) -> list[str]:
    """The last launch of each rank."""
    return [member.engine.in_flight[-1].plan.mode for member in made.members]


def first_runs(made: RankGroup, passes: int) -> list[str]:
    """The runs of the first rank in this number of passes, each collected before the next."""
    seen = []
    for _ in range(passes):
        offer(made)
        seen.append(modes(made)[0])
        deliver(made)
    return seen


def compile_all(made: RankGroup) -> None:
    for member in made.members:
        while member.compiling:
            made.compiled(member)


def campaign(seeds: int) -> None:
    for seed in range(seeds):
        run_history(seed, steps=200)
