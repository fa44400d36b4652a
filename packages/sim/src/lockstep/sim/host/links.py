"""Links: what carries bytes from one memory to another, one transfer after another."""

from __future__ import annotations


class Link:
    """A lane of so many bytes per second. Transfers use it alone, in the order in which they were begun.

    A transfer of n bytes ends `latency_us` after its last byte has gone; latencies of several overlap with the bytes of
    those behind them.
    """

    def __init__(self, gbs: float, latency_us: float = 0.0) -> None:
        """`gbs`: 1e9 bytes per second, in the direction that this link is."""
        self.bytes_per_us = gbs * 1e3
        self.latency_us = latency_us
        self.free_us = 0.0  # when the last byte of what was begun will have gone
        self.bytes = 0
        self.busy_us = 0.0
        self.transfers = 0

    def send(self, now_us: int, size: int) -> int:
        """Begin a transfer of `size` bytes behind those begun before. Returns when it ends, in whole microseconds."""
        took_us = size / self.bytes_per_us
        self.free_us = max(self.free_us, float(now_us)) + took_us
        self.bytes += size
        self.busy_us += took_us
        self.transfers += 1
        return max(now_us + 1, round(self.free_us + self.latency_us))

    def cut_short(self, now_us: int, size: int) -> int:
        """Stop the transfer that was begun last, of `size` bytes. Returns the bytes that have gone."""
        left = min(max(self.free_us - now_us, 0.0) * self.bytes_per_us, float(size))
        self.free_us -= left / self.bytes_per_us
        self.busy_us -= left / self.bytes_per_us
        gone = size - round(left)
        self.bytes -= size - gone
        return gone
