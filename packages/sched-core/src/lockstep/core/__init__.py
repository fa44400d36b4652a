"""The scheduler as a function of its journal: facts go in, decisions and commands come out.

The whole host, simulated or real:

    engine = Engine(config)
    for event in host.events():                 # arrivals, cancels, finished batches, then one LaneReady
        step = engine.step(event)
        journal.append(event, step.digest)      # written before any effect of the step leaves the process
        for command in step.commands:
            host.perform(command)               # sim: a timeout; runtime: kernels on a stream

Public names: `Engine`, `SchedConfig`, `Step`, the errors, `JournalWriter`, `read_journal`. Each is imported when it is
first used. Events are in `lockstep.core.contract.events`, commands in `lockstep.core.contract.commands`, replay of a
journal in `lockstep.core.journal.replay`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.contract.commands import Step as Step
    from lockstep.core.contract.config import SchedConfig as SchedConfig
    from lockstep.core.contract.errors import ConfigError as ConfigError
    from lockstep.core.contract.errors import ContractError as ContractError
    from lockstep.core.contract.errors import InvariantError as InvariantError
    from lockstep.core.contract.errors import LockstepError as LockstepError
    from lockstep.core.journal.reader import read_journal as read_journal
    from lockstep.core.journal.writer import JournalWriter as JournalWriter
    from lockstep.core.scheduler.engine import Engine as Engine

_HOME = {
    "Engine": "scheduler.engine",
    "SchedConfig": "contract.config",
    "Step": "contract.commands",
    "ConfigError": "contract.errors",
    "ContractError": "contract.errors",
    "InvariantError": "contract.errors",
    "LockstepError": "contract.errors",
    "JournalWriter": "journal.writer",
    "read_journal": "journal.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"lockstep.core has no `{name}`; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"lockstep.core.{_HOME[name]}"), name)
