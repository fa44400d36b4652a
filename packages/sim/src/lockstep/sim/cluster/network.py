"""The network between engines: each engine has one way out and one way in, which its flows share fairly.

    links = Links(env, out_bytes_per_us=[50e3, 50e3], in_bytes_per_us=[50e3, 50e3])
    links.start(0, 1, size_bytes, done)          done is called when the last byte has left

Rates are max-min fair, by progressive filling (Bertsekas and Gallager, *Data Networks*, 2nd edition, section 6.5.2):
the way with the least capacity per flow is divided first, then the next. Rates change only when a flow begins or ends,
so nothing is computed between two such moments. The fabric between the ways is assumed to have enough capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from simpy import Environment


def later(env: Environment, delay_us: int, act: Callable[[], None]) -> None:
    """Call a function after a delay; a delay below 0 counts as 0."""
    env.timeout(max(delay_us, 0)).callbacks.append(lambda _: act())


@dataclass(eq=False)
class Flow:
    """Bytes on their way from one engine to another. Only `Links` changes a flow."""

    source: int
    target: int
    left_bytes: float
    done: Callable[[], None] = field(repr=False)
    bytes_per_us: float = 0.0


class Links:
    """Flows between engines, and their rates."""

    def __init__(self, env: Environment, out_bytes_per_us: Sequence[float], in_bytes_per_us: Sequence[float]) -> None:
        """Set up links without flows. Both sequences have, by engine, the bytes per us that it can send and receive."""
        self._env = env
        self._out = list(out_bytes_per_us)
        self._in = list(in_bytes_per_us)
        self._flows: list[Flow] = []
        self._since_us = 0  # time for which all `left_bytes` are valid
        self._changes = 0  # number of changes; a wake-up scheduled before the last change is void
        self.sent_bytes = [0.0] * len(self._out)  # by engine
        self.busy_us = 0  # time with at least one flow

    def start(self, source: int, target: int, size_bytes: float, done: Callable[[], None]) -> Flow:
        """Begin a flow of `size_bytes`; `done` is called when its last byte has left."""
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
        """Set the rate of every flow, and schedule a wake-up for the end of the first flow."""
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
