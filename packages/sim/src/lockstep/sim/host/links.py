"""Links between two memories, over which transfers go one after another."""

from __future__ import annotations

from lockstep.sim.cost import Duration
from lockstep.sim.cost.draws import drawn_factor


class Link:
    """One direction of a link with a fixed rate. Transfers use it one at a time, in the order in which they begin.

    A transfer ends its latency after its last byte was sent. The latency of a transfer overlaps with the bytes of the
    next one.

    Args:
        gbs: rate in 1e9 bytes per second.
        latency_us: mean latency.
        spread: standard deviation of the latency, as a share of the mean; 0: all transfers have the mean.
        key: what the random latencies depend on, besides the number of the transfer.
    """

    def __init__(self, gbs: float, latency_us: float = 0.0, *, spread: float = 0.0, key: str = "") -> None:
        self.bytes_per_us = gbs * 1e3
        self._latency = Duration(latency_us, spread * latency_us)
        self._key = key
        self.free_us = 0.0  # when the last byte of all transfers begun so far will have been sent
        self.bytes = 0
        self.busy_us = 0.0
        self.transfers = 0

    @property
    def latency_us(self) -> float:
        """Mean latency of a transfer."""
        return self._latency.mean_us

    def send(self, now_us: int, size: int) -> int:
        """Begin a transfer of `size` bytes after all transfers begun before. Return its end in whole microseconds."""
        took_us = size / self.bytes_per_us
        self.free_us = max(self.free_us, float(now_us)) + took_us
        self.bytes += size
        self.busy_us += took_us
        latency_us = self.latency_us * drawn_factor(self._latency, self._key, self.transfers)
        self.transfers += 1
        return max(now_us + 1, round(self.free_us + latency_us))

    def cut_short(self, now_us: int, size: int) -> int:
        """Stop the transfer that was begun last, of `size` bytes. Return the bytes that were sent."""
        left = min(max(self.free_us - now_us, 0.0) * self.bytes_per_us, float(size))
        self.free_us -= left / self.bytes_per_us
        self.busy_us -= left / self.bytes_per_us
        gone = size - round(left)
        self.bytes -= size - gone
        return gone
