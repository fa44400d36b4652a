"""Errors of the runtime, in addition to those of the core."""

from __future__ import annotations

from lockstep.core.contract.errors import ContractError, LockstepError
from lockstep.host.errors import EngineStopped as EngineStopped


class PlanError(ContractError):
    """A plan cannot be run: it names rows without a request, pages that do not exist, or an unknown mode."""


class DeviceLost(LockstepError):
    """The device does not work any more: no batch in flight will be reported. The engine ends."""


class RankLost(DeviceLost):
    """A rank of an engine ended, does not respond, or is out of step with the others. The engine ends.

    Attributes:
        killed: it was ended by a signal from outside.
    """

    killed = False
