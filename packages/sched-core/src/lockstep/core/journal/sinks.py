"""What a host needs of a journal, and the journal of a run that is not recorded."""

from __future__ import annotations

from typing import Protocol

from lockstep.core.contract.events import ObservedEvent


class JournalSink(Protocol):
    """Where a host records its events; `JournalWriter` is one."""

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Record one event and the digest of its Step."""

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Record an event whose step raised."""

    def flush(self) -> None:
        """Give the appended records to the kernel."""


class NoJournal:
    """Discards every record, for runs that are never replayed; engines of such runs need no digests."""

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Discard the event."""

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Discard the event."""

    def flush(self) -> None:
        """Do nothing: no record is kept."""
