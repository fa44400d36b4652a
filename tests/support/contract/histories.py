"""Random histories of the product beside the machines of its contract: by seed, and one step at a time for Hypothesis.

A *twist* is what a host that breaks the contract does in place of a step. It returns whether it could.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.contract.config import SchedConfig
from tests.support.contract.engine_host import EngineHost
from tests.support.contract.handover_host import HandoverHost
from tests.support.contract.rank_host import RankHost
from tests.support.contract.transfer_host import DECODE, PREFILL, TransferHost
from tests.support.served import Asked

STEPS = 80
TWIST_SHARE = 0.1
Twist = Callable[[Any, random.Random], bool]
COMMON: dict[str, Any] = {
    "page_size": 2,
    "max_running_requests": 3,
    "max_prefill_tokens": 16,
    "context_tokens_max": 64,
}


def engine_config(rng: random.Random) -> SchedConfig:
    """Draw the settings of an engine with few pages."""
    return SchedConfig(
        **COMMON,
        pages=rng.choice([4, 5, 6, 10]),
        chunked_prefill_size=rng.choice([2, 4, 8]),
        overlap_depth=rng.choice([0, 1, 2]),
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        radix_cache=rng.random() < 0.8,
        reserve=rng.choice(["ratio", "on_demand"]),
    )


def step_engine(host: EngineHost, rng: random.Random) -> None:
    """Make one step of an engine, its host or its clients."""
    chance = rng.random()
    if chance < 0.15:
        host.arrive(rng.randrange(2), rng.randrange(1, 7), rng.randrange(1, 9))
    elif chance < 0.2:
        host.cancel(rng.randrange(9))
    elif chance < 0.55:
        host.slot()
    elif chance < 0.9:
        host.result(stops=rng.randrange(8) if rng.random() < 0.2 else 0, error=rng.random() < 0.08)
    elif chance < 0.93:
        host.lose()
    else:
        host.crash(performed=rng.randrange(-1, 3), torn=rng.choice([0, 0, 5]))


def run_engine(seed: int, folder: Path, twist: Twist | None = None) -> set[str]:
    """Run one history of an engine to its end. Returns the marks that it has reached."""
    rng = random.Random(seed)
    host = EngineHost(engine_config(rng), folder, check=twist is None)
    try:
        for _ in range(STEPS):
            if twist is None or rng.random() >= TWIST_SHARE or not twist(host, rng):
                step_engine(host, rng)
        host.settle()
    finally:
        host.close()
    return host.marks


def transfer_configs(rng: random.Random) -> tuple[SchedConfig, SchedConfig]:
    """Draw the settings of a prefill and a decode engine."""
    settings: dict[str, Any] = {
        **COMMON,
        "pages": rng.choice([6, 8, 12]),
        "num_reserved_decode_tokens": 1,
        "chunked_prefill_size": rng.choice([2, 4, 8]),
        "overlap_depth": rng.choice([0, 1]),
        "transfer_failure": rng.choice(["fail", "recompute"]),
        "transfer_allocation": rng.choice(["early", "early", "prefill_complete"]),
        "transfer_slots": rng.choice([1, 4]),
    }
    return SchedConfig(role="prefill", **settings), SchedConfig(role="decode", **settings)


def asked_of(number: int, rng: random.Random) -> Asked:
    """Draw a request; its prompt begins like those of its family."""
    first = rng.choice([100, 200])
    stops = (0,) if rng.random() < 0.1 else ()
    return Asked(number, tuple(range(first, first + rng.randrange(1, 8))), rng.randrange(1, 5), stops=stops)


def step_transfers(host: TransferHost, rng: random.Random) -> None:
    """Make one step of two engines and the network between them."""
    chance = rng.random()
    if chance < 0.1:
        host.arrive_in(asked_of(len(host.wires), rng))
    elif chance < 0.14 and host.wires:
        sent = [wire for wire in host.open if wire.parts]  # with pages that another engine may read or write
        host.cancel(rng.choice(sent or host.open or host.wires), rng.choice([PREFILL, DECODE]))
    elif chance < 0.155:
        host.link_down(PREFILL, DECODE)
    elif chance < 0.17:
        host.restart(rng.choice([PREFILL, DECODE]))
    elif chance < 0.19:
        host.finish(rng.choice([PREFILL, DECODE]), "the device failed")
    else:
        host.do_something(rng)


def run_transfers(seed: int, folder: Path, twist: Twist | None = None) -> set[str]:
    """Run one history of a prefill and a decode engine to its end. Returns the marks that it has reached."""
    rng = random.Random(seed)
    host = TransferHost(*transfer_configs(rng), check=twist is None)
    for _ in range(STEPS):
        if twist is None or rng.random() >= TWIST_SHARE or not twist(host, rng):
            step_transfers(host, rng)
    host.end_all()
    return {mark for mark, count in host.marks.items() if count}


def step_handover(host: HandoverHost, rng: random.Random) -> None:
    """Make one step of two engines with the product's two sides of a handover."""
    chance = rng.random()
    if chance < 0.06:
        host.arrive_in(asked_of(len(host.asked), rng))
    elif chance < 0.09:
        host.cancel(rng.choice("pd"), rng.randrange(9))
    elif chance < 0.1:
        host.break_link(rng.randrange(4))
    elif chance < 0.11:
        host.result(rng.choice("pd"), error=True)
    else:
        host.do_something(rng)


def run_handover(seed: int, folder: Path, twist: Twist | None = None) -> set[str]:
    """Run one history of a handover to its end. Returns the marks that it has reached."""
    rng = random.Random(seed)
    host = HandoverHost(*transfer_configs(rng), check=twist is None)
    for _ in range(2 * STEPS):
        if twist is None or rng.random() >= TWIST_SHARE or not twist(host, rng):
            step_handover(host, rng)
    host.settle()
    return host.marks


def ranks_config(rng: random.Random) -> SchedConfig:
    """Draw the settings of two or three ranks."""
    delayer: dict[str, Any] = {"prefill_delayer": True, "prefill_delayer_max_delay_passes": 2}
    return SchedConfig(
        **COMMON,
        dp_ranks=rng.choice([2, 2, 3]),
        dp_rank=0,
        pages=rng.choice([6, 12]),
        chunked_prefill_size=rng.choice([2, 8]),
        overlap_depth=rng.choice([0, 1]),
        batching=rng.choice(["prefill_first", "mixed"]),
        **(delayer if rng.random() < 0.4 else {}),
    )


def step_ranks(host: RankHost, rng: random.Random) -> None:
    """Make one step of a rank, or of the hub."""
    chance, rank = rng.random(), rng.randrange(len(host.seats))
    if chance < 0.1:
        host.arrive(rank, rng.randrange(1, 8), rng.randrange(1, 6))
    elif chance < 0.13:
        host.cancel(rank, rng.randrange(9))
    elif chance < 0.4:
        host.turn(rank)
    elif chance < 0.7:
        host.deliver(rng.randrange(9))
    elif chance < 0.85:
        host.hear(rank)
    elif chance < 0.985:
        host.finish(rank, error=rng.random() < 0.05)
    else:
        host.restart()


def run_ranks(seed: int, folder: Path, twist: Twist | None = None) -> set[str]:
    """Run one history of a group of ranks to its end. Returns the marks that it has reached."""
    rng = random.Random(seed)
    host = RankHost(ranks_config(rng), check=twist is None)
    for _ in range(2 * STEPS):
        if twist is None or rng.random() >= TWIST_SHARE or not twist(host, rng):
            step_ranks(host, rng)
    host.settle()
    return host.marks


Run = Callable[[int, Path, Twist | None], set[str]]
RUNS: dict[str, Run] = {
    "engine": run_engine,
    "transfers": run_transfers,
    "handover": run_handover,
    "ranks": run_ranks,
}
