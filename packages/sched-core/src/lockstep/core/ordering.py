"""The waiting line: in which order requests are considered for admission. One function per policy.

A policy changes nothing but what a request remembers of its match, which is void once the tree has moved on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.core.requests import Request

if TYPE_CHECKING:
    from lockstep.core.radix import RadixCache

LPM_FALLBACK_WAITING = 128
"""Above this many waiting requests, matching each of them costs more than it gains (SGLang's threshold)."""

Order = Callable[[list[Request], "RadixCache | None"], list[Request]]


def fcfs(waiting: list[Request], radix: RadixCache | None) -> list[Request]:
    """First come, first served: the waiting line as it stands, retracted requests where they were requeued."""
    return waiting


def longest_prefix_match(waiting: list[Request], radix: RadixCache | None) -> list[Request]:
    """Longest cached prefix first, ties as they wait; fcfs when the line is long (LPM_FALLBACK_WAITING)."""
    if radix is None or len(waiting) > LPM_FALLBACK_WAITING:
        return waiting
    return sorted(waiting, key=lambda request: -matched_pages(request, radix))


def matched_pages(request: Request, radix: RadixCache) -> int:
    """Pages of its prefix in the radix cache, at most one token short of all; looked up once per tree epoch."""
    epoch, pages = request.matched
    if epoch != radix.epoch:
        most = (len(request.tokens) // 4 - 1) // radix.page_tokens
        pages = radix.match(request.namespace, request.tokens, most).pages
        request.matched = (radix.epoch, pages)
    return pages


ORDERS: dict[str, Order] = {"fcfs": fcfs, "lpm": longest_prefix_match}
