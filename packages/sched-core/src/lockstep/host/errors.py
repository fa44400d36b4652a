"""Errors that a host raises in its callers."""

from __future__ import annotations

from lockstep.core.contract.errors import LockstepError


class EngineStopped(LockstepError):
    """The host has ended, by `stop` or a failure, and accepts no requests. The message has the reason."""


def killed_from_outside(error: BaseException | None) -> bool:
    """Return whether an engine ended because another process of it was killed from outside (`RankLost.killed`)."""
    return bool(getattr(error, "killed", False))


class PeerRankLost(LockstepError):
    """Another data-parallel rank ended. No rank can run a pass without it, so this engine ends, too, and restarts.

    Attributes:
        killed: True, since the cause lies in another process: no request of this engine is suspected.
    """

    killed = True
