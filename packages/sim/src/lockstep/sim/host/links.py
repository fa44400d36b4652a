"""Links between two memories, over which transfers go one after another."""

from __future__ import annotations


class Link:
    """One direction of a link with a fixed rate. Transfers use it one at a time, in the order in which they begin.

    A transfer ends `latency_us` after its last byte was sent. The latency of a transfer overlaps with the bytes of the
    next one.
    """

    def __init__(self, gbs: float, latency_us: float = 0.0) -> None:
        """Set up an idle link. `gbs` is its rate in 1e9 bytes per second."""
        self.bytes_per_us = gbs * 1e3
        self.latency_us = latency_us
        self.free_us = 0.0  # when the last byte of all transfers begun so far will have been sent
        self.bytes = 0
        self.busy_us = 0.0
        self.transfers = 0

    def send(self, now_us: int, size: int) -> int:
        """Begin a transfer of `size` bytes after all transfers begun before. Return its end in whole microseconds."""
        took_us = size / self.bytes_per_us
        self.free_us = max(self.free_us, float(now_us)) + took_us
        self.bytes += size
        self.busy_us += took_us
        self.transfers += 1
        return max(now_us + 1, round(self.free_us + self.latency_us))

    def cut_short(self, now_us: int, size: int) -> int:
        """Stop the transfer that was begun last, of `size` bytes. Return the bytes that were sent."""
        left = min(max(self.free_us - now_us, 0.0) * self.bytes_per_us, float(size))
        self.free_us -= left / self.bytes_per_us
        self.busy_us -= left / self.bytes_per_us
        gone = size - round(left)
        self.bytes -= size - gone
        return gone
