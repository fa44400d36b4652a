"""The network between engines: each has a way out and a way in, which all that it sends or receives share fairly.

    links = Links(env, out_bytes_per_us=[50e3, 50e3], in_bytes_per_us=[50e3, 50e3])
    links.start(0, 1, size_bytes, done)          done is called when the last byte has left

A flow gets what is fair where it is tightest (max-min fairness, by progressive filling: Bertsekas and Gallager, *Data
Networks*, 2nd edition, section 6.5.2): of all ways the one with the least left per flow is shared out first, then the
next. Rates change only when a flow begins or ends, so between two such moments nothing has to be computed. What the
fabric between the engines can carry is taken as enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from simpy import Environment


def later(env: Environment, delay_us: int, act: Callable[[], None]) -> None:
    """Call a function after a delay, or at once if that time is past."""
    env.timeout(max(delay_us, 0)).callbacks.append(lambda _: act())


@dataclass(eq=False)
class Flow:
    """Bytes on their way. Only `Links` changes it."""

    source: int
    target: int
    left_bytes: float
    done: Callable[[], None] = field(repr=False)
    bytes_per_us: float = 0.0


class Links:
    """Flows between engines, and their rates."""

    def __init__(self, env: Environment, out_bytes_per_us: Sequence[float], in_bytes_per_us: Sequence[float]) -> None:
        """Begin without flows; for each engine, the bytes per us that it can send, and receive."""
        self._env = env
        self._out = list(out_bytes_per_us)
        self._in = list(in_bytes_per_us)
        self._flows: list[Flow] = []
        self._since_us = 0  # all `left_bytes` are of this moment
        self._changes = 0  # a wake-up of before the last one is void
        self.sent_bytes = [0.0] * len(self._out)  # by engine
        self.busy_us = 0  # with anything under way at all

    def start(self, source: int, target: int, size_bytes: float, done: Callable[[], None]) -> Flow:
        """Begin to send; `done` is called once all of it has gone."""
        self._settle()
        flow = Flow(source, target, max(size_bytes, 0.0), done)
        self._flows.append(flow)
        self._share()
        return flow

    def stop(self, flow: Flow) -> None:
        """Stop a flow; its remaining bytes are not sent."""
        self._settle()
        if flow in self._flows:
            self._flows.remove(flow)
            self._share()

    def _settle(self) -> None:
        """Subtract the bytes sent since the last change."""
        now_us = int(self._env.now)
        passed_us = now_us - self._since_us
        self._since_us = now_us
        if passed_us and self._flows:
            self.busy_us += passed_us
            for flow in self._flows:
                gone = min(flow.left_bytes, flow.bytes_per_us * passed_us)
                flow.left_bytes -= gone
                self.sent_bytes[flow.source] += gone

    def _share(self) -> None:
        """Give every flow its rate, and wake up when the first one is complete."""
        out, into = list(self._out), list(self._in)
        waiting = list(self._flows)
        while waiting:
            ways: list[tuple[float, int, list[Flow]]] = []
            for capacity, ends in ((out, [flow.source for flow in waiting]), (into, [flow.target for flow in waiting])):
                for way in dict.fromkeys(ends):
                    mine = [flow for flow, end in zip(waiting, ends, strict=True) if end == way]
                    ways.append((capacity[way] / len(mine), len(ways), mine))
            rate, _, tightest = min(ways)
            for flow in tightest:
                flow.bytes_per_us = rate
                out[flow.source] -= rate
                into[flow.target] -= rate
            waiting = [flow for flow in waiting if flow not in tightest]
        self._changes += 1
        if self._flows:
            first_us = min(ceil(flow.left_bytes / flow.bytes_per_us) for flow in self._flows)
            change = self._changes
            later(self._env, first_us, lambda: self._wake(change))

    def _wake(self, change: int) -> None:
        if change != self._changes:
            return
        self._settle()
        through = [flow for flow in self._flows if flow.left_bytes < 1e-6 * max(flow.bytes_per_us, 1.0)]
        self._flows = [flow for flow in self._flows if flow not in through]
        self._share()
        for flow in through:
            flow.done()
