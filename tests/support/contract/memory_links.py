"""Links between hosts in memory: as `PeerLink`, but a frame arrives, and a loss is noticed, when a test lets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.host.handover.wire import LinkError, LinkMessage, encode


class MemoryLink:
    """One end of a link."""

    def __init__(
        self,
        name: str,
        opened: Callable[[], Any],
        received: Callable[[Any, bytes], None],
        lost: Callable[[Any, str], None],
    ) -> None:
        self.name = name
        self.inbox: list[bytes] = []
        self.sent: Callable[[LinkMessage], None] = lambda message: None  # called with each message
        self.is_broken = self.is_over = False
        self._received, self._lost = received, lost
        self._ends: list[MemoryLink] = opened()
        self._ends.append(self)

    @property
    def has_news(self) -> bool:
        """Whether a frame or the loss of the link may arrive at this end."""
        return not self.is_over and bool(self.inbox or self.is_broken)

    def start(self) -> None:
        """It begins when it is made."""

    def send(self, message: LinkMessage) -> None:
        """Send a message; to a broken link it is dropped."""
        self.sent(message)
        if not self.is_broken:
            for one in self._ends:
                if one is not self:
                    one.inbox.append(encode(message))

    def deliver(self) -> None:
        """Let the oldest frame arrive at this end, or the loss behind the last one."""
        if self.inbox:
            try:
                self._received(self, self.inbox.pop(0))
            except LinkError:
                self.close()
        elif self.is_broken and not self.is_over:
            self.is_over = True
            self._lost(self, "the connection was closed")

    def end(self) -> None:
        """Messages that were sent still arrive."""

    def close(self) -> None:
        """Break the link for both ends."""
        for one in self._ends:
            one.is_broken = True

    def join(self, seconds: float) -> None:
        """It has no thread."""


class MemoryNetwork:
    """Where a listener and links meet."""

    def __init__(self) -> None:
        self.links: list[MemoryLink] = []
        self.address = "memory"
        self.accept: Callable[[Any], None] | None = None

    def listen(self, address: str, secret: bytes, accept: Callable[[Any], None]) -> MemoryNetwork:
        """Take the place of a `Listener`."""
        self.accept = accept
        return self

    def connect(self, address: str, secret: bytes) -> list[MemoryLink]:
        """Return the ends of a new link; the listener's is the first."""
        ends: list[MemoryLink] = []
        assert self.accept is not None
        self.accept(ends)
        return ends

    def link(self, *values: Any) -> MemoryLink:
        """Take the place of `PeerLink`."""
        link = MemoryLink(*values)
        self.links.append(link)
        return link

    def close(self) -> None:
        """Nothing is listened on."""
