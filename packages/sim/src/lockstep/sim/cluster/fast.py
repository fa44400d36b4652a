"""Clusters on the fast path: engines behind a router simulated by compiled code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lockstep.core.cluster.router import engine_of_room
from lockstep.sim.cluster.metrics import combine
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.routed import GIVE_UP_EVERY, GIVE_UP_SHARE, room_of
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.fast.fast_path import pays
from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.fast_runs import are_chained, fast_run_of, follows_answers, unsupported_by
from lockstep.sim.run.simulate import Run, collecting_seldom, stopping_on_interrupt


class FastCluster:
    """A cluster on the fast path, with engines that interact only at the router."""

    def __init__(
        self, setup: ClusterSetup, on_finish: Callable[[int], None] | None, *, only_requests: bool = False
    ) -> None:
        """Prepare the run of a setup for which `unsupported_by_cluster` is empty."""
        self.setup = setup
        self.metrics = [
            MetricsFold(kv_pages=one.config.pages, warm_up=one.scenario.warm_up, only_requests=only_requests)
            for one in setup.engines
        ]
        router, seed = setup.scenario.router, setup.scenario.base.seed
        given = []
        self.fast = fast_run_of(setup.engines, self.metrics, on_finish)
        if router.policy == "follow_bootstrap_room":
            given = [engine_of_room(room_of(seed, number), len(setup.engines)) for number in range(self.fast.expected)]
        self.fast.route(router, setup.shares, setup.scenario.hop_us, given)

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Metrics of the engines that stream to clients, which are all engines, up to the present time."""
        self.fast.hand_over()
        return self.metrics

    def run(self, give_up: Callable[[FastCluster], bool] | None) -> ClusterRun | None:
        """Route every request and finish every answer. Return None if only the core can simulate the run.

        Args:
            give_up: called at intervals while requests arrive; if it returns True, the run ends there.
        """
        stopped_early = False

        def ask(arrived: int) -> int:
            nonlocal stopped_early
            stopped_early = give_up is not None and give_up(self)
            return 0 if stopped_early else max(GIVE_UP_EVERY, arrived // GIVE_UP_SHARE)

        began_s = time.process_time()
        with stopping_on_interrupt(self.fast), collecting_seldom():
            if not self.fast.run(*(() if give_up is None else (GIVE_UP_EVERY, ask))):
                return None
        setup = self.setup
        fast = self.fast.finished()
        datas = []
        while self.metrics:  # each takes much memory, which the next result needs
            datas.append(self.metrics.pop(0).result(setup.scenario.base.slos))
        data = combine(datas, hop_us=setup.scenario.hop_us, slos=setup.scenario.base.slos)
        cpu_s = time.process_time() - began_s
        reason = "room" if setup.scenario.router.policy == "follow_bootstrap_room" else "policy"
        by_reason = fast.routed_by_state
        by_reason[reason] = fast.routed - sum(by_reason.values())
        return ClusterRun(
            setup=setup,
            engines=tuple(
                Run(
                    setup=one,
                    data=measured,
                    batches=fast.batches[engine],
                    clamped=fast.clamped[engine],
                    rejected=fast.rejected[engine],
                    never_sent=0,
                    interrupted=self.fast.stop_requested,
                    cpu_s=cpu_s / len(datas),
                )
                for engine, (one, measured) in enumerate(zip(setup.engines, datas, strict=True))
            ),
            data=data,
            routed_by_reason={name: count for name, count in by_reason.items() if count},
            never_sent=fast.never_sent,
            interrupted=self.fast.stop_requested,
            stopped_early=stopped_early,
            cpu_s=cpu_s,
        )


def unsupported_by_cluster(setup: ClusterSetup) -> str:
    """Return the first part of a cluster's setup that only the core can simulate, in a few words; empty if none."""
    scenario, turns = setup.scenario, setup.workload.turns
    beside = {
        "answers without delay": follows_answers(setup.engines[0]) and not _delay_us(setup),
        "prefixes at the router": scenario.router.policy == "prefix_affinity" and not are_chained(turns),
        "engines that meet": not setup.each_alone,
        "autoscaling": scenario.scaling is not None,
        "waiting at the router": scenario.dispatch is not None,
        "reports": bool(scenario.report_interval_us),
        "sessions": scenario.router.policy == "session_sticky" and not _knows_sessions(setup),
    }
    for name, is_there in beside.items():
        if is_there:
            return name
    different = {id(engine): engine for engine in setup.engines}  # engines of a group share one setup
    return next(filter(None, map(unsupported_by, different.values())), "")


def _delay_us(setup: ClusterSetup) -> int:
    """Return the least time from the end of an answer to the arrival of a request that follows it at the router.

    If it is 0, the core's lanes decide what comes first of an answer's end on one engine and a batch's on another.
    """
    turns, of_journal = setup.workload.turns, setup.workload.tenants_of_engines
    delay_us = setup.scenario.hop_us
    if not of_journal:
        delay_us += min(round(one.calibration.correction.frontend_us) for one in setup.engines)
    if setup.scenario.base.concurrency is None:
        delay_us += int(turns.think_us[turns.after >= 0].min())
    return delay_us


def _knows_sessions(setup: ClusterSetup) -> bool:
    """Return whether sessions have different names, and the router forgets none."""
    base, turns = setup.scenario.base, setup.workload.turns
    requests = len(turns) if base.concurrency is None or base.limit is None else base.limit
    return turns.labels_differ and requests <= setup.scenario.router.sessions_max


def run_compiled(
    setup: ClusterSetup,
    on_finish: Callable[[int], None] | None,
    give_up: Callable[[Any], bool] | None,
    *,
    always: bool,
    only_requests: bool = False,
) -> ClusterRun | None:
    """Run a cluster on the fast path. Return None if it is unavailable, unsupported, does not pay, or gave up.

    Args:
        always: whether it is used even if it is interpreted or does not pay.
        only_requests: whether only figures of requests are needed, latencies and rates. Those of batches, levels and
            series are then missing, which saves memory.
    """
    if unsupported_by_cluster(setup) or not (always or (is_available() and pays(len(setup.workload.turns)))):
        return None
    return FastCluster(setup, on_finish, only_requests=only_requests).run(give_up)
