"""Requests that follow answers on the fast path: turns of sessions, and closed loops.

Each row is a request that may be sent. Which session of a closed loop ends first is not known in
advance. But the sessions begin in an order that is drawn before, so their rows can be laid out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.sim.host.closed_loop import ConcurrentSessions
from lockstep.sim.workload.turns import Int64s, Turns


class Loop(NamedTuple):
    """Requests, some of which follow the answers of others. All columns are int64 [requests]."""

    rows: Int64s  # the turn of each request in the workload
    copy: Int64s  # the copy of the workload to which the turn belongs
    shift: Int64s  # token ids of the prompt are those of the turn plus this
    arrival_us: Int64s  # of requests that are sent by the clock; else 0
    think_us: Int64s
    key: Int64s  # order of requests that arrive at the same time
    follow: Int64s  # the first request that is sent after the answer; -1: none
    sibling: Int64s  # the next request that is sent after the same answer; -1: none
    clock: Int64s  # requests that are sent by the clock, in order
    thinking: Int64s  # requests that are sent at `arrival_us` although they belong to sessions
    sessions: Int64s  # first request of each session that begins when another one ends; empty: none begins
    expected: int  # requests that are sent


def open_loop(turns: Turns) -> Loop:
    """Return the requests of a workload that is sent by the clock, with its follow-up turns."""
    count = len(turns)
    follow, sibling = np.full(count, -1), np.full(count, -1)
    for row in np.flatnonzero(turns.after >= 0)[::-1].tolist():
        before = int(turns.after[row])
        sibling[row], follow[before] = follow[before], row
    numbers = np.arange(count)
    return Loop(
        rows=numbers,
        copy=np.zeros(count, np.int64),
        shift=np.zeros(count, np.int64),
        arrival_us=turns.arrival_us.astype(np.int64),
        think_us=turns.think_us.astype(np.int64),
        key=numbers,
        follow=follow,
        sibling=sibling,
        clock=turns.by_clock_rows,
        thinking=np.empty(0, np.int64),
        sessions=np.empty(0, np.int64),
        expected=count,
    )


def closed_loop(turns: Turns, source: ConcurrentSessions) -> Loop:
    """Return the requests of a closed loop. Takes its sessions out of `source`."""
    first, upcoming = source.under_way(), source.upcoming(source.expected)
    by_session = source.rows_by_session
    starts = [(copy, rows) for _, _, copy, rows in first] + [(copy, by_session[session]) for copy, session in upcoming]
    counts = np.array([len(rows) for _, rows in starts])
    stops = np.cumsum(counts)
    rows = np.concatenate([rows for _, rows in starts])
    copy = np.repeat([copy for copy, _ in starts], counts)
    follow = np.arange(1, len(rows) + 1)
    follow[stops - 1] = -1
    begin = stops - counts
    arrival_us = np.zeros(len(rows), np.int64)
    arrival_us[begin[: len(first)]] = [time_us for time_us, *_ in first]
    return Loop(
        rows=rows,
        copy=copy,
        shift=source.shift_of(copy),
        arrival_us=arrival_us,
        think_us=turns.think_us[rows].astype(np.int64),
        key=np.repeat(np.arange(len(starts)), counts),
        follow=follow,
        sibling=np.full(len(rows), -1),
        clock=np.empty(0, np.int64),
        thinking=begin[: len(first)],
        sessions=begin[len(first) :],
        expected=source.expected,
    )
