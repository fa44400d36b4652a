"""Requests that follow answers, in the kernel of the fast path: turns of sessions, and sessions that follow sessions.

`loops.py` lays them out. A request whose time of arrival is known because an answer has ended is in a heap.
"""

from __future__ import annotations

from lockstep.sim.fast.state import NONE, Arrays, Record


def answered(a: Arrays, run: Record, s: Record, number: int, seen_us: int) -> None:
    """Begin the think time of the requests that follow an answer, or the next session, like `Arrivals.answered`."""
    requests = a.requests
    follow = requests[number].follow
    if follow == NONE and run.loops == 2:
        begin_session(a, s, seen_us)
    else:
        while follow != NONE:
            _think(a, s, follow, seen_us + requests[follow].think_us)
            follow = requests[follow].sibling
    look_ahead(a, s)


def begin_session(a: Arrays, s: Record, now_us: int) -> None:
    """Begin the next session of a closed loop, if more requests are sent at all."""
    if s.arrived < s.expected:
        _think(a, s, a.sessions[s.upcoming], now_us)
        s.upcoming += 1


def look_ahead(a: Arrays, s: Record) -> None:
    """Find the next request that arrives: by the clock, or after an answer."""
    s.coming = s.clock
    if s.thinking and (s.coming == NONE or _before(a, a.thinking[0], s.coming)):
        s.coming = a.thinking[0]
    if s.arrived >= s.expected:
        s.coming = NONE


def _before(a: Arrays, one: int, other: int) -> bool:
    """Return whether a request arrives before another one."""
    first, second = a.requests[one], a.requests[other]
    if first.arrival_us != second.arrival_us:
        earlier: bool = first.arrival_us < second.arrival_us
    else:
        earlier = first.key < second.key
    return earlier


def _think(a: Arrays, s: Record, number: int, arrival_us: int) -> None:
    """Add a request to the heap of those whose time of arrival is known."""
    a.requests[number].arrival_us = arrival_us
    place = s.thinking
    s.thinking += 1
    while place and _before(a, number, a.thinking[(place - 1) // 2]):
        a.thinking[place] = a.thinking[(place - 1) // 2]
        place = (place - 1) // 2
    a.thinking[place] = number


def pop_thinking(a: Arrays, s: Record) -> None:
    """Remove the next request from the heap of those whose time of arrival is known."""
    s.thinking -= 1
    number, place = a.thinking[s.thinking], 0
    while 2 * place + 1 < s.thinking:
        below = 2 * place + 1
        if below + 1 < s.thinking and _before(a, a.thinking[below + 1], a.thinking[below]):
            below += 1
        if not _before(a, a.thinking[below], number):
            break
        a.thinking[place] = a.thinking[below]
        place = below
    a.thinking[place] = number
