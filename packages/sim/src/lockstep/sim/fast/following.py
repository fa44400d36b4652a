"""Requests that follow answers, in the kernel of the fast path: turns of sessions, and sessions that follow sessions.

`loops.py` lays them out. A request whose time of arrival is known because an answer has ended is in a heap. Sessions
follow sessions in a fixed order, so of these only the times are in a heap: the next one begins at the earliest.
"""

from __future__ import annotations

from typing import Any

from lockstep.sim.fast.state import NEVER_US, NONE, Array, Arrays, Record


def answered(a: Arrays, run: Record, s: Record, number: int, seen_us: int) -> None:
    """Begin the think time of the requests that follow an answer, or the next session, like `Arrivals.answered`."""
    requests = a.requests
    follow = requests[number].follow
    if follow == NONE and run.loops == 2:
        begin_session(a, run, seen_us)
    else:
        while follow != NONE:
            _think(a, run, follow, seen_us + requests[follow].think_us)
            follow = requests[follow].sibling
    look_ahead(a, run, s)


def begin_session(a: Arrays, run: Record, now_us: int) -> None:
    """Begin the next session of a closed loop at `now_us`, if more requests are sent at all."""
    if run.arrived < run.expected:
        place = run.begins
        run.begins += 1
        while place and now_us < a.begins[(place - 1) // 2]:
            a.begins[place] = a.begins[(place - 1) // 2]
            place = (place - 1) // 2
        a.begins[place] = now_us


def look_ahead(a: Arrays, run: Record, s: Record) -> None:
    """Find the next request: the engine `s` receives it, or with a router the engines work until it arrives there."""
    number = next_number(a, run)
    if not run.routes:
        s.coming = number
    elif number != NONE and not run.asks:  # before a question all engines advance to one time, see `kernel.advance`
        run.until_us = min(run.until_us, a.requests[number].arrival_us)


def next_number(a: Arrays, run: Record) -> Any:
    """Return the next request by the clock, after an answer, or of a new session; NONE if there is none yet."""
    if run.arrived >= run.expected:
        return NONE
    number = run.clock
    if run.thinking and (number == NONE or _before(a, a.thinking[0], number)):
        number = a.thinking[0]
    if run.begins and (number == NONE or a.begins[0] < a.requests[number].arrival_us):
        number = a.sessions[run.upcoming]
        a.requests[number].arrival_us = a.begins[0]
    return number


def next_us(a: Arrays, run: Record) -> Any:
    """Return the time of the next request that follows others or is sent by the clock; NEVER_US if there is none."""
    number = next_number(a, run)
    return NEVER_US if number == NONE else a.requests[number].arrival_us


def take(a: Arrays, run: Record, number: int) -> None:
    """Remove the request of `next_number` from those that will arrive, and give it its id."""
    a.requests[number].id = run.arrived
    run.arrived += 1
    if number == run.clock:
        run.clock = a.requests[number].next
    elif run.thinking and number == a.thinking[0]:
        _pop_thinking(a, run)
    else:
        run.upcoming += 1
        _pop_begin(run, a.begins)


def _before(a: Arrays, one: int, other: int) -> bool:
    """Return whether a request arrives before another one."""
    first, second = a.requests[one], a.requests[other]
    if first.arrival_us != second.arrival_us:
        earlier: bool = first.arrival_us < second.arrival_us
    else:
        earlier = first.key < second.key
    return earlier


def _think(a: Arrays, run: Record, number: int, arrival_us: int) -> None:
    """Add a request to the heap of those whose time of arrival is known."""
    a.requests[number].arrival_us = arrival_us
    place = run.thinking
    run.thinking += 1
    while place and _before(a, number, a.thinking[(place - 1) // 2]):
        a.thinking[place] = a.thinking[(place - 1) // 2]
        place = (place - 1) // 2
    a.thinking[place] = number


def _pop_thinking(a: Arrays, run: Record) -> None:
    """Remove the next request from the heap of those whose time of arrival is known."""
    run.thinking -= 1
    number, place = a.thinking[run.thinking], 0
    while 2 * place + 1 < run.thinking:
        below = 2 * place + 1
        if below + 1 < run.thinking and _before(a, a.thinking[below + 1], a.thinking[below]):
            below += 1
        if not _before(a, a.thinking[below], number):
            break
        a.thinking[place] = a.thinking[below]
        place = below
    a.thinking[place] = number


def _pop_begin(run: Record, begins: Array) -> None:
    """Remove the earliest of the times at which sessions begin."""
    run.begins -= 1
    time_us, place = begins[run.begins], 0
    while 2 * place + 1 < run.begins:
        below = 2 * place + 1
        if below + 1 < run.begins and begins[below + 1] < begins[below]:
            below += 1
        if begins[below] >= time_us:
            break
        begins[place] = begins[below]
        place = below
    begins[place] = time_us
