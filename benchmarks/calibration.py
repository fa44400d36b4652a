"""How fast this machine is, in three small programs, to compare figures of one machine with another's."""

from __future__ import annotations

import time

PEERS_CALIBRATION_US = {"1,000 dict look-ups": 21.8, "100 method calls": 2.66, "10 million additions": 555_000.0}
"""The machine on which the peers' published figures were measured."""


def calibrate() -> dict[str, float]:
    """CPU us of three small programs, each the best of several runs, to compare machines by."""
    table = {i: i for i in range(1000)}

    class Counter:
        def step(self) -> None:
            pass

    step = Counter().step

    def look_up() -> None:
        for i in range(1000):
            table[i]

    def call() -> None:
        for _ in range(100):
            step()

    def add() -> None:
        total = 0
        for i in range(10_000_000):
            total += i

    best = {}
    programs = {
        "1,000 dict look-ups": (look_up, 2000),
        "100 method calls": (call, 2000),
        "10 million additions": (add, 3),
    }
    for name, (program, repeats) in programs.items():
        costs = []
        for _ in range(repeats):
            start = time.process_time_ns()
            program()
            costs.append(time.process_time_ns() - start)
        best[name] = min(costs) / 1e3
    return best
