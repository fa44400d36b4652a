"""What a host's callers may meet."""

from __future__ import annotations

from lockstep.core.contract.errors import LockstepError


class EngineStopped(LockstepError):
    """The host has ended, on request or by a failure; the message says which, and no request is taken any more."""
