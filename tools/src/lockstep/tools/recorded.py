"""The requests of a journal, read back as a workload that can be simulated again.

A run that `lockstep simulate` wrote stores the command that produces its exact workload (sim/cli/requested.py). For any
other journal the requests are read from the events (`lockstep.sim.workload.journal_turns`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import fold
from lockstep.sim.workload.journal_turns import COMPLETE, requests_in, turns_of_journal
from lockstep.sim.workload.workload import Workload, workload_digest
from lockstep.tools.runs import engine_journal


def journal_workload(run: Path) -> Workload:
    """Return the requests of a journal as a workload. Raises WorkloadError if it has no requests or no prompts."""
    turns, notes = turns_of_journal(engine_journal(run))
    at_engines = frozenset(turns.tenants)
    digest = workload_digest(turns)
    return Workload(run.name, str(run), "journal", digest, turns, notes=tuple(notes), tenants_of_engines=at_engines)


def output_limit(run: Path) -> int | None:
    """Return the largest `max_new_tokens` of the requests; None if no request ended before its own limit.

    The scheduler reserves KV by this limit. The simulator has one limit for all requests.
    """
    requests = requests_in(fold(engine_journal(run)))
    early = any(one.reason in COMPLETE and one.output_tokens < one.arrived.max_new_tokens for one in requests)
    return max(one.arrived.max_new_tokens for one in requests) if early else None


def scaled(workload: Workload, rate_scale: float) -> Workload:
    """Return the workload with every gap between arrivals divided by `rate_scale`; think times stay."""
    if rate_scale == 1.0:
        return workload
    if not 1e-6 <= rate_scale <= 1e6:
        raise ConfigError(f"`rate_scale` must be from 1e-6 to 1e6, got `{rate_scale}`\nhint: 2 halves every gap")
    arrivals_us = np.rint(workload.turns.arrival_us / rate_scale).astype(np.int64)
    turns = workload.turns.at(arrivals_us)
    return replace(workload, turns=turns, digest=workload_digest(turns))
