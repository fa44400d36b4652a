"""Random histories over cache tiers: settings below any config, and moves that end between any actions.

Used by the swarm, and by tests/properties/test_tiers.py with seeds of its own.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from lockstep.core.contract.config import CacheTiers, SchedConfig
from lockstep.core.contract.events import Flush, ReleaseMemory, UpdateWeights
from tests.support.driver.actions import CONTROLS, LETTING_GO, PRIORITIES, Action


def tiered(rng: random.Random, config: SchedConfig) -> SchedConfig:
    """Return the settings with drawn tiers below the device, from a single page up to room for all."""
    tiers = CacheTiers(
        host_pages=rng.choice([1, rng.randint(2, 60), 100, 300]),
        write_policy=rng.choice(["write_through", "write_through_selective", "write_back"]),
        write_uses=rng.choice([1, 2, 3]),
        load_tokens_min=rng.choice([0, 1, 10]),
        load_pages_max=rng.choice([None, 1, 5]),
        load_timeout_us=rng.choice([None, None, 20]),
        storage=rng.random() < 0.6,
        prefetch_policy=rng.choice(["best_effort", "wait_complete", "timeout"]),
        prefetch_tokens_min=rng.choice([1, 4]),
        prefetch_timeout_us=rng.choice([0, 5, 50]),
        prefetch_share=rng.choice([0.3, 1.0]),
    )
    return replace(config, radix_cache=True, tiers=tiers)


def moving(rng: random.Random, actions: list[Action]) -> list[Action]:
    """Return the actions with ends of moves between them: whole or in part, in any order, or not at all."""
    often, trouble = rng.choice([0.1, 0.5, 1.0]), rng.choice([0.0, 0.3])
    mixed: list[Action] = []
    for action in actions:
        mixed.append(action)
        while rng.random() < often / 2:
            faulty = rng.random() < trouble
            share = rng.choice([0.0, 0.5]) if faulty else 1.0
            mixed.append(("move", rng.choice([0, 0, rng.randrange(100)]), share, "lost" if faulty else ""))
        if rng.random() < 0.01:
            mixed.append(("late_move",))
    return mixed


def contested(rng: random.Random) -> tuple[SchedConfig, list[Action]]:
    """Moves that compete: loads that time out and loads behind pages in flight, many prefetches, stores that fail.

    A few prompts come again at different lengths, so that one request computes what another loads, and batches fail.
    """
    page_size = rng.choice([1, 2, 4])
    config = SchedConfig(
        page_size=page_size,
        pages=rng.randint(40, 110) // page_size,
        max_running_requests=rng.choice([1, 2, 4]),
        chunked_prefill_size=rng.choice([None, None, 8, 16]),
        overlap_depth=rng.choice([0, 1, 2]),
        same_step_sharing=rng.random() < 0.7,
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        tiers=CacheTiers(
            host_pages=rng.choice([rng.randint(2, 60), 100, 300]),
            write_policy=rng.choice(["write_through", "write_through", "write_back"]),
            load_tokens_min=rng.choice([0, 4, 10]),
            load_pages_max=rng.choice([None, 5]),
            load_timeout_us=rng.choice([None, 5, 20]),
            storage=rng.random() < 0.7,
            prefetch_policy=rng.choice(["best_effort", "wait_complete", "timeout"]),
            prefetch_tokens_min=1,
            prefetch_timeout_us=rng.choice([5, 50]),
            prefetch_share=rng.choice([0.1, 0.3, 1.0]),
        ),
    )
    weights: dict[str, float] = {
        "arrive": 1.5,
        "ready": 6,
        "finish": 4,
        "wait": 1,
        "clock": 0.3,
        "trouble": rng.choice([0, 0.3, 1]),
        "move": rng.choice([1, 3, 6]),
        "weights": rng.choice([0, 0.15]),
        "order_done": 0.5,
        "cancel": rng.choice([0, 0.2]),
    }
    swaps = [CONTROLS.index(UpdateWeights(0, "w", mode)) for mode in ("wait", "retract", "in_place")]
    actions: list[Action] = []
    for name in rng.choices(list(weights), list(weights.values()), k=250):
        match name:
            case "arrive":
                lengths, options = [rng.randint(1, 12), rng.randint(1, 60), 50], dict[str, Any]()
                for _ in range(rng.choice([1, 1, 2, 3])):
                    base = 1 + 1000 * rng.randrange(3)
                    actions.append((name, base, rng.choice(lengths), rng.choice([1, 6, 25]), options))
            case "wait" | "clock":
                actions.append((name, rng.randint(1, 12)))
            case "cancel":
                actions.append((name, rng.randrange(100)))
            case "trouble":
                actions.append(("finish", "error"))
            case "move":
                lost = rng.random() < 0.2
                actions.append((name, rng.randrange(100), rng.choice([0.0, 0.5]) if lost else 1.0, "lost" * lost))
            case "weights":
                actions.append(("control", rng.choice(swaps)))
            case _:
                actions.append((name,))
    return config, actions


def loads_in_trouble(rng: random.Random) -> tuple[SchedConfig, list[Action]]:
    """Loads behind pages of a batch in flight, which fails, and loads that last longer than a request waits.

    Two prompts take turns in a pool for one of them, so that the host keeps what the device evicts. A beginning too
    short for a load is computed; a longer one is loaded behind it while that batch is in flight. In some rounds a
    request with output is cancelled while the host swaps the weights.
    """
    page_size = rng.choice([1, 2])
    config = SchedConfig(
        page_size=page_size,
        pages=rng.randint(42, 48) // page_size,
        max_running_requests=rng.choice([2, 4]),
        overlap_depth=rng.choice([1, 2]),
        same_step_sharing=True,
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        tiers=CacheTiers(
            host_pages=200,
            write_policy=rng.choice(["write_through", "write_back"]),
            load_tokens_min=12,
            load_timeout_us=rng.choice([None, 3]),
        ),
    )
    swap = CONTROLS.index(UpdateWeights(0, "w", "in_place"))
    actions: list[Action] = []

    def arrive(base: int, length: int) -> None:
        actions.append(("arrive", base, length, 1, {}))

    def settle() -> None:
        for _ in range(4):
            actions.extend([("ready",), ("move", 0, 1.0, ""), ("finish",)])

    bases = [1, 1001]
    for _ in range(12):
        rng.shuffle(bases)
        for base in bases:
            arrive(base, rng.randint(36, 40))
            settle()
        arrive(bases[0], rng.randint(2, 10))
        actions.append(("ready",))
        for _ in range(rng.choice([1, 2])):
            arrive(bases[0], rng.randint(24, 40))
        actions.append(("ready",))
        happens: list[Action] = [
            ("finish", rng.choice(["error", ""])),
            ("move", 0, 1.0, ""),
            ("wait", rng.randint(1, 5)),
            ("ready",),
            ("ready",),
        ]
        rng.shuffle(happens)
        actions.extend(happens)
        settle()
        if rng.random() < 0.1:
            actions.extend([("arrive", bases[0], 4, 20, {}), *[("ready",), ("finish",)] * 6, ("move", 0, 1.0, "")])
            actions.extend([("control", swap), ("finish",), ("finish",), ("cancel", 0), ("order_done",)])
    return config, actions


def returning(rng: random.Random) -> tuple[SchedConfig, list[Action]]:
    """A pool for one or two of a few prompts that are repeated, so that evicted pages are needed again."""
    page_size = rng.choice([1, 2, 4])
    config = SchedConfig(
        page_size=page_size,
        pages=rng.randint(60, 110) // page_size,
        max_running_requests=rng.choice([1, 2, 4]),
        chunked_prefill_size=rng.choice([None, 16]),
        overlap_depth=rng.choice([0, 1, 2]),
        same_step_sharing=rng.random() < 0.3,
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        schedule_policy=rng.choice(["fcfs", "lpm", "priority"]),
        bypass_limit=rng.choice([0, 2, 256]),
        prefix_deduplication=rng.choice(["off", "last", "defer"]),
        radix_capacity_pages=rng.choice([None, None, 10]),
    )
    names = ["arrive", "ready", "finish", "wait", "cancel", "control", "order_done", "restart", "snapshot", "trouble"]
    weights = [1.5, 6, 5, 2, rng.choice([0, 0.3]), rng.choice([0, 0, 0.1]), 1, rng.choice([0, 0, 0.06]), 0.2, 0.1]
    controls = (Flush(), UpdateWeights(0, "w", "wait"), UpdateWeights(0, "w", "in_place"), ReleaseMemory(("kv_cache",)))
    actions: list[Action] = []
    for name in rng.choices(names, weights, k=240):
        match name:
            case "arrive":
                length, options = rng.choice([rng.randint(1, 60), 50]), {"priority": rng.choice(PRIORITIES)}
                actions.append((name, 1 + 1000 * rng.randrange(4), length, rng.choice([1, 6, 25]), options))
            case "wait" | "cancel":
                actions.append((name, rng.randint(1, 25)))
            case "control":
                actions.append((name, CONTROLS.index(rng.choice((*controls, *(CONTROLS[i] for i in LETTING_GO))))))
            case "trouble":
                actions.append(("finish", "error"))
            case _:
                actions.append((name,))
    return config, actions
