"""How a host receives requests: when it reads its socket, and when it keeps received requests back.

Both decisions precede the journal: only events that the host passes to the engine are recorded. Both are pure: equal
calls have equal results on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, Literal, TypeVar

from lockstep.core.contract.commands import Mode
from lockstep.core.contract.errors import ConfigError

Item = TypeVar("Item")

POLL_WEIGHT_DEFAULT = 1000  # of modes that are not listed below; SGLang: scheduler_recv_skipper_weight_default
POLL_WEIGHTS: dict[Mode | None, int] = {"decode": 1, "verify": 1, "diffusion_extend": 1, None: 1}
"""As in SGLang. None: nothing was launched."""


class ReceiveSkipper:
    """Decides before each pass of the host loop whether to read the socket, which costs more than a short decode.

    Each pass adds the weight of the last launch to a sum. When the sum reaches `interval`, the socket is read and the
    sum starts again. With the default weights the socket is read after every extend, or after `interval` decodes,
    whichever is first. With an interval of 1, the default, it is read in every pass.
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

    # mechanism: receive-interval (decided)
    def due(self, launched: Mode | None) -> bool:
        """Whether to read the socket now. `launched`: the mode of the last pass, None if it launched nothing."""
        self._sum += self._weights.get(launched, self._default_weight)
        if self._sum < self._interval:
            return False
        self._sum = 0
        return True


class InputBlocker(Generic[Item]):
    """Keeps requests back while an operator changes the engine, on all ranks alike.

    open --block--> blocked --unblock--> opening --all ranks are opening--> open
                       ^                    |
                       +-------block--------+

    Requests that arrive while it is not open are kept in order and released when it opens. If one rank opened alone, it
    would admit a request that the other ranks do not have yet.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "blocked", "opening"] = "open"
        self._pending: deque[Item] = deque()

    def take(self, items: Iterable[Item]) -> list[Item]:
        """Take in arrived items. Returns the items that are released now."""
        self._pending.extend(items)
        return self._released()

    # mechanism: input-block (decided)
    def block(self) -> None:
        """Keep back all items from now on. A second call changes nothing."""
        self.state = "blocked"

    def unblock(self) -> None:
        """Mark this rank as opening. It opens once all ranks are opening. Without a block the call changes nothing."""
        if self.state == "blocked":
            self.state = "opening"

    def ranks_agreed(self, every_rank_opening: bool) -> list[Item]:
        """Take in whether all ranks are opening. Returns the items that are released now, in their order."""
        if self.state == "opening" and every_rank_opening:
            self.state = "open"
        return self._released()

    def _released(self) -> list[Item]:
        if self.state != "open":
            return []
        released = list(self._pending)
        self._pending.clear()
        return released
