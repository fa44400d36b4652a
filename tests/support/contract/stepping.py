"""A step of the core beside the machine of its contract: both refuse an impossible fact, or neither."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import Observed
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine


def stepped(engine: Engine, event: Observed, in_machine: Callable[[], object]) -> Step:
    """Step an engine. `in_machine` makes the same step in the machine, without what the core decides.

    Raises: Forbidden for an impossible fact, which the core has refused, and which has changed nothing; AssertionError
        if the core refuses what the contract allows, or is no longer as it was.
    """
    before = snapshot.dump(engine)
    try:
        return engine.step(event)
    except ContractError as error:
        assert snapshot.dump(engine) == before, f"the core refuses {event}, and has changed"
        in_machine()
        raise AssertionError(f"the core refuses {event}, which the contract allows: {error}") from error
