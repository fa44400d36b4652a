"""What a host's callers may meet."""

from __future__ import annotations

from lockstep.core.contract.errors import LockstepError


class EngineStopped(LockstepError):
    """The host has ended, on request or by a failure; the message has the reason, and no request is accepted any
    more."""
