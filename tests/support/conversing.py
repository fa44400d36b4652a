"""Random histories of conversations: turns of a few sessions, with media, in a pool that cannot hold them all.

Weights change and the device is lost meanwhile. Used by the swarm.
"""

from __future__ import annotations

import random
from typing import Any

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DROP_OUTPUT, PromptSpan, UpdateWeights
from tests.support.driver.actions import CONTROLS, LETTING_GO, SESSIONS, STOP_TOKEN, Action

NEW_WEIGHTS = [CONTROLS.index(UpdateWeights(0, "w", mode)) for mode in ("wait", "retract", "in_place")]


def conversing_config(rng: random.Random) -> SchedConfig:
    """Room for the KV of one or two sessions and for the encoder output of one or two requests."""
    page_size = rng.choice([1, 2, 4])
    return SchedConfig(
        page_size=page_size,
        pages=rng.randint(40, 90) // page_size,
        max_running_requests=rng.choice([2, 4]),
        chunked_prefill_size=rng.choice([None, 4, 8]),
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        overlap_depth=rng.choice([0, 1, 2]),
        reserve=rng.choice(["ratio", "on_demand", "full"]),
        encoder_cache_tokens=rng.choice([None, 5, 5, 8]),
        session_kv="hold",
        eos_token_ids=(STOP_TOKEN,),
    )


def conversing_actions(rng: random.Random, count: int) -> list[Action]:
    """Draw turns that continue, rewind or drop the output before them, and a few commands."""
    weights = {
        "arrive": 1.5,
        "ready": 6,
        "finish": 5,
        "wait": 0.5,
        "clock": 0.5,
        "encode": rng.choice([1, 3]),
        "cancel": rng.choice([0, 0.5, 1.5]),
        "session_open": 0.4,
        "session_close": 0.05,
        "weights": rng.choice([0, 0.2]),
        "order_done": 1,
        "restart": rng.choice([0, 0.1]),
        "snapshot": 0.1,
    }
    alone = rng.choice([0.1, 0.5])  # share of requests without a session
    actions = [_opened(rng) for _ in range(6)]
    for name in rng.choices(list(weights), list(weights.values()), k=count):
        match name:
            case "arrive":
                actions.append(_arrival(rng, alone))
            case "session_open":
                actions.append(_opened(rng))
            case "wait" | "clock":
                actions.append((name, rng.randint(1, 12)))
            case "cancel" | "session_close":
                actions.append((name, rng.randrange(100)))
            case "weights":
                actions.append(("control", rng.choice([*NEW_WEIGHTS, *LETTING_GO])))
            case "order_done":
                actions.append((name, "no room" if rng.random() < 0.1 else ""))
            case _:
                actions.append((name,))
    return actions


def _opened(rng: random.Random) -> Action:
    capacity, timeout = rng.choice([12, 30, 1000]), rng.choice([None, None, 30, 100])
    return ("session_open", rng.randrange(100), capacity, timeout, rng.random() < 0.2)


def _arrival(rng: random.Random, alone: float) -> Action:
    tokens, options = rng.randint(1, 12), dict[str, Any]()
    if rng.random() >= alone:
        options["session"] = rng.choice(SESSIONS)
        options["session_start"] = rng.choice([None, None, None, DROP_OUTPUT, rng.randrange(100)])
    if rng.random() < 0.5:
        start = rng.randrange(tokens)
        digest = bytes([rng.randrange(4)]) * 32
        options["spans"] = (PromptSpan(start, tokens, "image", digest, rng.choice([3, 3, 5])),)
    if rng.random() < 0.3:
        options["stops_at"] = rng.randint(0, 10)
    return ("arrive", 1 + 1000 * rng.randrange(3), tokens, rng.choice([1, rng.randint(1, 12), 30]), options)
