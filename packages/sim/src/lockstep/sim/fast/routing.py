"""The router of a cluster on the fast path."""

from __future__ import annotations

import numpy as np

from lockstep.sim.fast.state import (
    BOUNDED,
    GIVEN,
    IN_TURN,
    LEAST_PROMPTS,
    LEAST_TOKENS,
    NONE,
    Arrays,
    Record,
)


def route_due(a: Arrays, run: Record) -> None:
    """Count ends that reach the router before `until_us`, and route its arrivals of that time, like `Cluster.run`."""
    now_us = run.until_us
    left = 0
    for i in range(run.unseen):
        seen_us, number = a.unseen[i, 0], a.unseen[i, 1]
        if seen_us < now_us:
            request = a.requests[number]
            s = a.engines[request.engine]
            s.open_requests -= 1
            s.open_tokens -= request.open_tokens
            run.ended += 1
            run.output_tokens += request.output_tokens
        else:
            a.unseen[left, 0], a.unseen[left, 1] = seen_us, number
            left += 1
    run.unseen = left
    while run.next_request < a.requests.size and a.requests[run.next_request].arrival_us == now_us:
        number = run.next_request
        request = a.requests[number]
        expected = (run.output_tokens + run.first_guess) // (run.ended + 1)
        request.open_tokens = request.prompt_tokens + expected
        engine = _engine_for(a, run, request)
        s = a.engines[engine]
        s.open_requests += 1
        s.open_tokens += request.open_tokens
        s.last_chosen = number
        request.engine = engine
        request.next = NONE
        if s.coming == NONE:
            s.coming = number
        if s.sent != NONE:
            a.requests[s.sent].next = number
        s.sent = number
        run.next_request += 1
        if run.until_question > 0:
            run.until_question -= 1


def _engine_for(a: Arrays, run: Record, request: Record) -> int:
    """Return the engine for a request, like `Router._chosen` with all engines up and no shared prefixes."""
    engines = a.engines
    if run.routing_rule == GIVEN:
        return request.engine
    if run.routing_rule == IN_TURN:
        weights = 0.0
        for engine in range(engines.size):
            engines[engine].credit += engines[engine].weight
            weights += engines[engine].weight
        best = 0
        for engine in range(1, engines.size):
            if engines[engine].credit > engines[best].credit:
                best = engine
        engines[best].credit -= weights
        return best
    total, weights = 1, 0.0
    if run.routing_rule == BOUNDED:
        for engine in range(engines.size):
            total += engines[engine].open_requests
            weights += engines[engine].weight
    best, least, chosen = NONE, 0.0, 0
    for engine in range(engines.size):
        s = engines[engine]
        if run.routing_rule == BOUNDED:
            fair = np.int64(np.ceil(run.load_bound * total * s.weight / weights))
            if s.open_requests >= max(run.load_floor, fair):
                continue
        if run.routing_rule == LEAST_TOKENS:
            load = s.open_tokens + request.open_tokens
        elif run.routing_rule == LEAST_PROMPTS:
            load = s.open_tokens + request.prompt_tokens
        else:
            load = s.open_requests + 1
        share = load / s.weight
        if best == NONE or share < least or (share == least and s.last_chosen < chosen):
            best, least, chosen = engine, share, s.last_chosen
    return best
