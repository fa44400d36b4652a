"""How a host takes requests in: when it looks at its socket, and when it holds back what it found there.

Both decide before anything is a fact, so nothing of this is in the journal; an event is what the host gives the engine.
Both are pure: the same calls give the same answers, on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, Literal, TypeVar

from lockstep.core.contract.commands import Mode
from lockstep.core.contract.errors import ConfigError

Item = TypeVar("Item")

POLL_WEIGHT_DEFAULT = 1000  # SGLang: scheduler_recv_skipper_weight_default, of modes not named below
POLL_WEIGHTS: dict[Mode | None, int] = {"decode": 1, "verify": 1, None: 1}  # SGLang's; None: nothing was launched


class ReceiveSkipper:
    """Says before each pass of the loop whether to look at the socket: a look costs more than a short decode.

    Each pass adds the weight of what was launched last; at `interval` it is time to look, and the sum starts again.
    With the weights given, a look comes after every extend or after `interval` decodes, whatever is first. An interval
    of 1, the default, looks every time.
    """

    def __init__(
        self,
        interval: int = 1,
        weights: Mapping[Mode | None, int] = POLL_WEIGHTS,
        default_weight: int = POLL_WEIGHT_DEFAULT,
    ) -> None:
        if interval < 1:
            raise ConfigError(f"`receive_interval` must be at least 1, got `{interval}`\nhint: 1 looks every time")
        self._interval = interval
        self._weights = weights
        self._default_weight = default_weight
        self._sum = 0

    def due(self, launched: Mode | None) -> bool:
        """Whether to look now. `launched` is the mode of the last pass, None if it launched nothing."""
        self._sum += self._weights.get(launched, self._default_weight)
        if self._sum < self._interval:
            return False
        self._sum = 0
        return True


class InputBlocker(Generic[Item]):
    """Holds requests back while an operator moves something below them, on all ranks alike.

    open --block--> blocked --unblock--> opening --every rank said so--> open
                       ^                    |
                       +-------block--------+

    What comes while it is not open is kept in order and given out when it opens. A rank that opened alone would let a
    request in that the others do not see yet.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "blocked", "opening"] = "open"
        self._pending: deque[Item] = deque()

    def take(self, items: Iterable[Item]) -> list[Item]:
        """Take in what arrived. Returns what may go on now."""
        self._pending.extend(items)
        return self._released()

    def block(self) -> None:
        """Hold back what comes from here on. Twice does no harm."""
        self.state = "blocked"

    def unblock(self) -> None:
        """This rank may open. It does when all may; without a block before there is nothing to wait for."""
        if self.state == "blocked":
            self.state = "opening"

    def ranks_agreed(self, every_rank_opening: bool) -> list[Item]:
        """The ranks compared their states. Returns what may go on now, in the order in which it came."""
        if self.state == "opening" and every_rank_opening:
            self.state = "open"
        return self._released()

    def _released(self) -> list[Item]:
        if self.state != "open":
            return []
        released = list(self._pending)
        self._pending.clear()
        return released
