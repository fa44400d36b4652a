"""What can go wrong in the runtime beside what the core refuses."""

from __future__ import annotations

from lockstep.core.contract.errors import ContractError, LockstepError
from lockstep.host.errors import EngineStopped as EngineStopped


class PlanError(ContractError):
    """A plan cannot be run: it names rows without a holder, pages that do not exist, or an unknown mode."""


class DeviceLost(LockstepError):
    """The device does not work any more: nothing that is in flight will come back. The engine ends."""


class RankLost(DeviceLost):
    """A rank of a tensor-parallel group ended, does not answer, or is out of step with the others. The engine ends."""
