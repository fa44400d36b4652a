"""How fast this machine is, in three small programs, to compare figures of one machine with another's."""

from __future__ import annotations

import statistics
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


def slowdown(machine: dict[str, float]) -> float:
    """How many times slower a machine is than the peers', for which targets in us were set; at least 1.

    The median over the three programs. A target times this is the target for this machine, now: shared CPUs change
    their speed by the minute. A faster machine gets no smaller target.
    """
    return max(1.0, statistics.median(us / PEERS_CALIBRATION_US[name] for name, us in machine.items()))


def show(machine: dict[str, float]) -> None:
    """Print it beside the peers'."""
    print("calibration, CPU us       here      peers")
    for name, us in machine.items():
        print(f"{name:21} {us:9,.2f}  {PEERS_CALIBRATION_US[name]:9,.2f}")
    print(f"bars in us are for the peers' machine; this one is {slowdown(machine):.2f} times slower by the median")
