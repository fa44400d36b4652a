"""One run of a request whose answer is kept: what a later run draws and cuts as the first run did.

    first run      draws ids and seeds from a secret, records where it cut the answer into pieces, and its requests
    later run      the same secret, the same cuts, the same requests of the engine: the same events, byte for byte

A request that is not kept has no run; its ids and seeds are random. The run is a context variable, so that code which
draws an id need not receive it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import shake_128

Cut = tuple[int, ...]
"""For each choice, twice its number of tokens in the pieces so far, plus 1 if it has ended."""


@dataclass
class AnswerRun:
    """One run.

    Args:
        secret: from which ids and seeds are drawn.
        created_s: when the first run began, seconds since 1970.
        cuts: where earlier runs cut the answer, in order.
        origins: the engine's requests of the earlier run; () for the first run.
        submitted: called with the engine's requests of this run.
        leaving: whether the server stops, so that a later run continues the requests.
    """

    secret: bytes
    created_s: float
    cuts: Sequence[Cut] = ()
    origins: tuple[str, ...] = ()
    submitted: Callable[[tuple[str, ...]], object] = lambda origins: None
    leaving: Callable[[], bool] = lambda: False  # whether a later run will continue the requests
    _drawn: Counter[str] = field(default_factory=Counter)

    def draw(self, purpose: str, size: int) -> bytes:
        """Return `size` bytes, other ones for each purpose and call."""
        self._drawn[purpose] += 1
        return shake_128(self.secret + f"\0{purpose}\0{self._drawn[purpose]}".encode()).digest(size)


RUN: ContextVar[AnswerRun | None] = ContextVar("RUN", default=None)


def new_hex(size: int, purpose: str = "id") -> str:
    """Return `size` bytes in hexadecimal: random, or those of the current run."""
    run = RUN.get()
    return secrets.token_hex(size) if run is None else run.draw(purpose, size).hex()


def new_seed() -> int:
    """Return a seed for a request without one, below 2**62. The journal stores it."""
    run = RUN.get()
    return secrets.randbits(62) if run is None else int.from_bytes(run.draw("seed", 8), "little") >> 2


def created_s() -> float:
    """Return when the answer began, seconds since 1970."""
    run = RUN.get()
    return time.time() if run is None else run.created_s
