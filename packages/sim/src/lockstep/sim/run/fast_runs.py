"""The conditions of the fast path, and the parts of a setup that it reads.

`unsupported_by` names the first part of a setup that only the core can simulate. A setting may have any value if the
kernel implements it (FOLLOWED), or if it cannot affect a run that meets the other conditions (NEVER_READ). Every other
setting must have its default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests.table import VERSION_MARK
from lockstep.sim.fast.fast_path import POLICIES, FastEngine, FastLoad, FastRun
from lockstep.sim.fast.loops import Loop, closed_loop, open_loop
from lockstep.sim.host.closed_loop import ConcurrentSessions
from lockstep.sim.host.device import Device
from lockstep.sim.host.pipeline import device_type_of
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.load import arrivals_of_load
from lockstep.sim.workload.turns import Turns

if TYPE_CHECKING:
    from lockstep.sim.run.setup import Setup

LOOP_REQUESTS_MAX = 4_000_000  # requests of all sessions that a closed loop may begin
# Settings that may have any value.
FOLLOWED = frozenset(
    "page_size pages radix_cache same_step_sharing context_tokens_max max_running_requests request_rows "
    "schedule_conservativeness batching max_prefill_tokens chunked_prefill_size chunked_prefill_size_min chunk_unit "
    "reserve prefill_max_requests truncation_align_size prefill_decode_interval overlap_depth waiting_prefix_refresh "
    "retracted_requeue retracted_kv retraction_policy prefix_deduplication bypass_limit "
    "schedule_seed schedule_policy".split()
)
NEVER_READ = frozenset(
    "force_stream_interval "
    "schedule_low_priority_values_first default_priority_value session_kv max_sessions "
    "grammar_timeout_us max_input_tokens truncate_input isolate_tenants encoder_cache_tokens "
    "priority_preemption_threshold".split()
)


def unsupported_by(setup: Setup) -> str:
    """Return the first part of a setup that only the core can simulate, in a few words; empty if there is none.

    A run that passes may still need the core, because retractions are not known in advance.
    """
    config, scenario, turns = setup.config, setup.scenario, setup.workload.turns
    plain = SchedConfig()
    if config.schedule_policy not in POLICIES:
        return "schedule_policy"
    for name in config.__struct_fields__:
        if name not in FOLLOWED and name not in NEVER_READ and getattr(config, name) != getattr(plain, name):
            return name
    beside = {
        "early ends": scenario.max_new_tokens is not None,
        "receive_interval": scenario.receive_interval != 1,
        "server sessions": scenario.server_sessions,
        "drafts": setup.drafting is not None or setup.forcing is not None,
        "media": setup.encoding is not None or turns.media is not None,
        "adapters": setup.lora is not None or turns.adapter is not None,
        "samples": turns.samples is not None,
        "grammars": any(turns.grammars[code] for code in np.unique(turns.grammar)),
        "debugging": bool(setup.debug),
        "tenants": any(VERSION_MARK in name for name in turns.tenants),
        "stages": device_type_of(setup.cost) is not Device,
        "turns of a journal beside others": 0 < len(setup.workload.tenants_of_engines) < len(set(turns.tenants)),
        "no requests": not len(turns),
    }
    for name, is_there in beside.items():
        if is_there:
            return name
    if not turns.prompt_tokens.min():
        return "empty prompts"
    if config.truncate_input != "no" and refused_by(config, turns).any():
        return "prompts that are cut"
    if scenario.concurrency is not None:
        sent = len(turns) if scenario.limit is None else scenario.limit
        if sent + (scenario.concurrency + 1) * int(np.bincount(turns.root()).max()) > LOOP_REQUESTS_MAX:
            return "many long sessions"
    if config.radix_cache and (follows_answers(setup) or share_prefixes(turns)):
        if config.isolate_tenants and len(turns.tenants) > 1:
            return "shared prefixes with isolate_tenants"
        if not are_chained(turns):
            return "prompts with equal tokens behind different ones"
    return ""


def follows_answers(setup: Setup) -> bool:
    """Return whether requests follow the answers of others: turns of sessions, or a closed loop."""
    return setup.scenario.concurrency is not None or bool((setup.workload.turns.after >= 0).any())


def loop_of(setup: Setup, others: Sequence[Setup] = ()) -> Loop | None:
    """Return the requests of a setup in which some follow the answers of others; None: none does.

    Args:
        others: further engines that the requests may be sent to.
    """
    if not follows_answers(setup):
        return None
    turns = setup.workload.turns
    if setup.scenario.concurrency is None:
        return open_loop(turns)
    source = arrivals_of_load(setup.scenario, turns, setup.config.prompt_tokens_max(True))
    assert isinstance(source, ConcurrentSessions)
    refused = [refused_by(one.config, turns) for one in (setup, *others)]
    return closed_loop(turns, source, np.logical_and.reduce(refused), np.logical_or.reduce(refused))


def refused_by(config: SchedConfig, turns: Turns) -> NDArray[np.bool_]:
    """Return which requests are rejected because their prompts are too long, bool [requests]."""
    most = np.where(turns.output_tokens > 0, config.prompt_tokens_max(True), config.prompt_tokens_max(False))
    return turns.prompt_tokens > most


def share_prefixes(turns: Turns) -> bool:
    """Return whether two prompts begin alike."""
    firsts = turns.run_first_token[turns.run_starts]
    return len(np.unique(firsts)) < len(firsts)


def are_chained(turns: Turns) -> bool:
    """Return whether all occurrences of a token id have the same prefix before them, answers included.

    Each run of consecutive ids must begin behind the same id as all other runs that begin with its first id; and a run
    that begins inside another one, behind the id before its first.
    """
    firsts, counts = turns.run_first_token.astype(np.int64), turns.run_tokens.astype(np.int64)
    lasts = firsts + counts - 1
    before = np.concatenate((np.full(1, -1), lasts[:-1]))
    before[turns.run_starts] = -1
    answers = turns.output_first_token.astype(np.int64)
    answered = turns.output_tokens > 0
    stops = np.concatenate((firsts + counts, (answers + turns.output_tokens)[answered]))
    before = np.concatenate((before, lasts[turns.run_stops - 1][answered]))
    firsts = np.concatenate((firsts, answers[answered]))
    order = np.lexsort((before, firsts))
    firsts, stops, before = firsts[order], stops[order], before[order]
    again = firsts[1:] == firsts[:-1]
    if (before[1:] != before[:-1])[again].any():
        return False
    furthest = np.maximum.accumulate(stops)
    inside = np.append(False, firsts[1:] < furthest[:-1])
    return not (before != firsts - 1)[inside & np.append(True, ~again)].any()


def fast_run_of(
    setups: Sequence[Setup], metrics: Sequence[MetricsFold], on_finish: Callable[[int], None] | None = None
) -> FastRun:
    """Return the fast path of one engine, or of several engines with one workload.

    `unsupported_by` must be empty for each setup.
    """
    scenario = setups[0].scenario
    first, turns = setups[0], setups[0].workload.turns
    return FastRun(
        FastLoad(
            turns,
            scenario.seed,
            scenario.warm_up,
            not first.workload.tenants_of_engines,
            loop_of(first, setups[1:]),
            follows_answers(first) or share_prefixes(turns),
        ),
        [FastEngine(one.config, one.cost, one.cpu, round(one.calibration.correction.frontend_us)) for one in setups],
        metrics,
        on_finish,
    )
