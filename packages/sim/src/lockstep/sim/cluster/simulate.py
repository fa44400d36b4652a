"""Simulation of several engines behind a router, in one process.

base = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=4000,rate=40")
setup = assemble_cluster(ClusterScenario(base=base, replicas=8))
run = simulate_cluster(setup, folder=Path("runs/0192"))

runs/0192/router/             every fact of the router, with its decision
          engines/0/journal/  journal of one engine; request ids are those of the cluster
          engines/0/metrics.json
          metrics.json        all engines together, then each engine
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.core.contract.errors import ContractError
from lockstep.core.journal.sinks import JournalSink, NoJournal
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.router_journal import NoRouterJournal, RouterJournal
from lockstep.sim.cluster.data_parallel import RankCluster
from lockstep.sim.cluster.fast import run_compiled
from lockstep.sim.cluster.handover import DECODE_ROUTER, HandoverCluster
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.routed import NOT_WATCHED, Cluster, ClusterWatch
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.run.simulate import collecting_seldom, stopping_on_interrupt

DECODE = "decode"  # folder in a run folder with the journal of the decode engines' router


def simulate_cluster(
    setup: ClusterSetup,
    *,
    folder: Path | None = None,
    check_every: int = 0,
    on_finish: Callable[[int], None] | None = None,
    give_up: Callable[[Any], bool] | None = None,
    eager: bool = False,
    watch: ClusterWatch = NOT_WATCHED,
    compiled: bool | None = None,
) -> ClusterRun:
    """Run a cluster to its end, or until Ctrl-C.

    Args:
        folder: run folder for the journals; None: no journals.
        check_every: events of an engine between two checks of its invariants; 0: no checks.
        on_finish: called with the number of requests that ended.
        give_up: called at intervals while requests arrive; if it returns True, no more requests arrive.
        eager: whether to advance every engine to every arrival, which changes the wall-clock time only.
        watch: callbacks; allowed only if `setup.each_alone`.
        compiled: whether a run without journals uses the fast path, which does not change results; None: if it pays.
    Raises: ContractError if `watch` does not fit the setup.
    """
    if watch.is_set and not setup.each_alone:
        raise ContractError("routes and steps cannot be observed where engines hand requests over, or are ranks")
    if watch.observers and len(watch.observers) != len(setup.engines):
        raise ContractError(f"{len(watch.observers)} observers of {len(setup.engines)} engines")
    watched = folder is not None or check_every or eager or watch.is_set
    if not watched and compiled is not False:
        run = run_compiled(setup, on_finish, give_up, always=compiled is True)
        if run is not None:
            return run
    with ExitStack() as stack:
        journals: list[JournalSink] = []
        router_journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        decode_router_journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for engine in range(len(setup.engines)):
                journal = JournalWriter.create(folder / "engines" / str(engine), setup.header(engine))
                journals.append(stack.enter_context(journal))
            scenario = setup.scenario
            router_journal = stack.enter_context(
                RouterJournal(folder, scenario.router, setup.shares_of("prefill"), scenario.dispatch)
            )
            if setup.hands_over:
                (folder / DECODE).mkdir(mode=0o700, exist_ok=True)
                decode_journal = RouterJournal(folder / DECODE, DECODE_ROUTER, setup.shares_of("decode"))
                decode_router_journal = stack.enter_context(decode_journal)
        else:
            journals = [NoJournal()] * len(setup.engines)
        cluster: Cluster | HandoverCluster | RankCluster
        if setup.hands_over:
            both = router_journal, decode_router_journal
            cluster = HandoverCluster(setup, journals, both, check_every=check_every, on_finish=on_finish)
        elif setup.ranks > 1:
            cluster = RankCluster(setup, journals, router_journal, check_every=check_every, on_finish=on_finish)
        else:
            cluster = Cluster(
                setup,
                journals,
                router_journal,
                check_every=check_every,
                on_finish=on_finish,
                eager=eager,
                watch=watch,
            )
        began_s = time.process_time()
        with collecting_seldom():
            with stopping_on_interrupt(cluster):
                stopped_early = cluster.run(give_up)
            run = cluster.result(stopped_early, began_s)
        for sink in journals:
            if isinstance(sink, JournalWriter):
                sink.close("interrupted" if run.interrupted else "closed")
        for routers in (router_journal, decode_router_journal):
            routers.close("interrupted" if run.interrupted else "closed")
    return run
