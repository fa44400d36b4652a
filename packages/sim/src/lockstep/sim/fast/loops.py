"""Requests that follow answers on the fast path: turns of sessions, and closed loops.

Each row is a request that may be sent. Which session of a closed loop ends first is not known in
advance. But the sessions begin in an order that is drawn before, so their rows can be laid out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    session: Int64s  # the first request of the session
    clock: Int64s  # requests that are sent by the clock, in order
    thinking: Int64s  # requests that are sent at `arrival_us` although they belong to sessions
    sessions: Int64s  # first request of each session that begins when another one ends; empty: none begins
    expected: int  # requests that are sent
    think_us_min: int = 0  # least time from the end of an answer at its client to the next request


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
        session=turns.root(),
        clock=turns.by_clock_rows,
        thinking=np.empty(0, np.int64),
        sessions=np.empty(0, np.int64),
        expected=count,
        think_us_min=int(turns.think_us[turns.after >= 0].min()),
    )


def closed_loop(
    turns: Turns, source: ConcurrentSessions, refused: NDArray[np.bool_], refused_by_some: NDArray[np.bool_]
) -> Loop:
    """Return the requests of a closed loop. Takes its sessions out of `source`.

    Args:
        refused: turns that every engine rejects, at which their session breaks off.
        refused_by_some: turns that at least one engine rejects, at which their session may break off.
    """
    first = source.under_way()
    least = [len(_until_refused(rows, refused_by_some)) for rows in source.rows_by_session]
    lengths = [len(_until_refused(rows, refused_by_some)) for *_, rows in first]
    by_session = [_until_refused(rows, refused) for rows in source.rows_by_session]
    starts = [(copy, _until_refused(rows, refused)) for _, _, copy, rows in first]
    mean = sum(least) / len(least)
    while not _suffice(lengths, len(first), source.expected):
        more = source.upcoming(int(source.expected / mean) + len(first))
        starts += [(copy, by_session[session]) for copy, session in more]
        lengths += [least[session] for _, session in more]
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
        session=np.repeat(begin, counts),
        clock=np.empty(0, np.int64),
        thinking=begin[: len(first)],
        sessions=begin[len(first) :],
        expected=source.expected,
    )


def _until_refused(rows: Int64s, refused: NDArray[np.bool_]) -> Int64s:
    """Return the turns of a session up to the first that is rejected, which is sent, too."""
    found = np.flatnonzero(refused[rows])
    return rows[: found[0] + 1] if len(found) else rows


def _suffice(lengths: list[int], concurrency: int, requests: int) -> bool:
    """Return whether no more sessions can begin before `requests` requests have arrived.

    A session begins when another one has ended, that is, after all its requests. The sessions in progress may be the
    longest ones.

    Args:
        lengths: the least number of requests of each session.
    """
    counts = np.sort(np.array(lengths))
    return int(counts[: len(counts) - concurrency].sum()) >= requests
