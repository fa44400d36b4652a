"""The interface of a journal for hosts, and the sink of runs that are not recorded."""

from __future__ import annotations

from typing import Protocol

from lockstep.core.contract.events import ObservedEvent


class JournalSink(Protocol):
    """The sink to which a host writes its events, for example a `JournalWriter`."""

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Record one event and the digest of its Step."""

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Record an event whose step raised."""

    def flush(self) -> None:
        """Write the appended records to the kernel."""


class NoJournal:
    """A sink that discards every record, for runs that are never replayed. Their engines need no digests."""

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Discard the event."""

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Discard the event."""

    def flush(self) -> None:
        """Do nothing: no record is kept."""
