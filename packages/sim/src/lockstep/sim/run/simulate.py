"""One simulated run from start to finish: scenario, setup, run, run folder.

setup = assemble(Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=500,rate=4"))
run = simulate(setup, folder=Path("runs/0192"))
write_run(Path("runs/0192"), run)

runs/0192/journal/           every observed event and the digest of its Step; `lockstep journal verify` replays it
          metrics.json       everything that is needed to repeat the run, then the summary
          requests.parquet   one row per request; also as requests.csv
          trace.json.gz      for ui.perfetto.dev
          report.html        self-contained, opens offline
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
from simpy import Environment

from lockstep.core import invariants
from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ObservedEvent, RequestArrived
from lockstep.core.journal.sinks import JournalSink, NoJournal
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.cost import (
    Calibration,
)
from lockstep.sim.cost.power import Energy, describe_energy, energy_line
from lockstep.sim.fast.fast_path import pays
from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.closed_loop import ConcurrentSessions
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.host_options import ALONE, NOT_WATCHED, HostFeatures, HostLinks, HostOptions, HostWatch
from lockstep.sim.host.pipeline import device_type_of, with_stages
from lockstep.sim.host.ports import MetricsSink, Observer, RequestSource
from lockstep.sim.host.sessions import Conversations
from lockstep.sim.host.watch import WatchedMetrics
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.intervals import Intervals, leverage_text
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.energy import energy_of, site_of
from lockstep.sim.run.fast_runs import fast_run_of, unsupported_by
from lockstep.sim.run.load import arrivals_of_load
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.whole_prompts import request_kind
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX

GARBAGE_THRESHOLD = 1_000_000  # new objects before a search for garbage cycles; Python's default is 700


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished simulation."""

    setup: Setup
    data: RunData
    batches: int
    clamped: int  # requests that may generate fewer tokens than they requested
    rejected: Counter[str]  # by reason
    never_sent: int  # turns that were not sent because their session broke off
    interrupted: bool
    cpu_s: float  # CPU time of this process for the simulation and its metrics
    intervals: Intervals | None = None  # see intervals_of
    spent: tuple[Energy, float] | None = None  # energy and GPU-hours of a run without its batches

    @property
    def calibration(self) -> Calibration:
        return self.setup.calibration

    def without_batches(self) -> Run:
        """Return the run without its lists of batches, the most of its memory. Reports and traces need them."""
        return replace(self, data=self.data.without_batches(), spent=energy_of([(self.setup, self.data)], 0.0))

    def metrics(self) -> dict[str, Any]:
        """Return the contents of metrics.json."""
        intervals = {} if self.intervals is None else {"intervals": self.intervals.describe()}
        energy = self.energy()
        return {
            "about": self.about(),
            **self.data.summary,
            **({} if energy is None else {"energy": energy}),
            **intervals,
        }

    def energy(self) -> dict[str, Any] | None:
        """Return the energy and carbon of the run, see `describe_energy`; None if the power of the GPU is not known."""
        found = self.spent or energy_of([(self.setup, self.data)], 0.0)
        if found is None:
            return None
        tokens = self.data.summary["throughput"]["output_tokens"]
        return describe_energy(found[0], site_of(self.setup.scenario), tokens, found[1])

    def about(self) -> dict[str, Any]:
        """Return `Setup.about` with the facts that qualify the numbers: interruption, clamped and unsent requests."""
        return {
            **self.setup.about(),
            "interrupted": self.interrupted,
            "clamped_requests": self.clamped,
            "never_sent_turns": self.never_sent,
        }

    def remarks(self) -> list[str]:
        """Return remarks to be shown with the results, one line each."""
        energy = self.energy()
        return [*self.remarks_on_requests(), *([] if energy is None else [energy_line(energy)])]

    def remarks_on_requests(self) -> list[str]:
        """Return the remarks that hold for one engine and for several; empty if the run went as requested."""
        workload, config, scenario = self.setup.workload, self.setup.config, self.setup.scenario
        requests = self.data.summary["requests"]
        lines = []
        if self.interrupted:
            open_requests = requests["unfinished"]
            lines.append(f"interrupted: the numbers are those until then; {open_requests:,} requests were still open")
        elif requests["unfinished"]:
            lines.append(f"{requests['unfinished']:,} requests never ended: the scheduler stopped launching")
        if requests["rejected"]:
            rejected = requests["by_reject_reason"]
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items()))
            limit = f" ({_limit(config)})" if "too_long" in rejected else ""
            lines.append(f"rejected {requests['rejected']:,} of {requests['arrived']:,} requests: {reasons}{limit}")
        if self.clamped:
            lines.append(f"clamped {self.clamped:,} answers to what fits behind their prompt ({_limit(config)})")
        if scenario.warm_up:
            lines.append(f"the first {scenario.warm_up:,} requests are not in the numbers")
        if self.never_sent and not self.interrupted:
            lines.append(f"{self.never_sent:,} turns were never sent: their session broke off before")
        if workload.skipped.count:
            lines.append(f"left out {workload.skipped.count:,} bad rows: {workload.skipped.examples[0]}")
        extrapolated = self.setup.cost.describe().get("extrapolated")
        if extrapolated:
            lines.append(f"some batches were far from what the operator tables measured, in {', '.join(extrapolated)}")
        lines += self.setup.doubts(has_intervals=self.intervals is not None)
        if self.intervals is not None and (why := leverage_text(self.intervals.describe())):
            lines.append(why)
        lines += [f"{self.setup.model.name}: {note}" for note in self.setup.model.notes]
        return lines + list(workload.notes)


def _limit(config: SchedConfig) -> str:
    if config.request_tokens_max == config.context_tokens_max:
        return f"context {config.context_tokens_max} tokens"
    return f"KV pool {config.pool_tokens} tokens"


class FrontEnd:
    """A metrics sink that dates arrivals as clients do: `frontend_us` before the engine receives the request."""

    def __init__(self, metrics: MetricsSink, frontend_us: int) -> None:
        self._metrics = metrics
        self._frontend_us = frontend_us
        self.gauge = metrics.gauge
        self.cpu_interval = metrics.cpu_interval

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Record one event and its Step."""
        if type(event) is RequestArrived:
            event = msgspec.structs.replace(event, time_us=event.time_us - self._frontend_us)
        self._metrics.observe(event, step)


def simulate(
    setup: Setup,
    *,
    folder: Path | None = None,
    check_every: int = 0,
    on_finish: Callable[[int], None] | None = None,
    observer: Observer | None = None,
    compiled: bool | None = None,
    only_requests: bool = False,
) -> Run:
    """Run a setup to its end, or until Ctrl-C.

    Args:
        folder: run folder for the journal, see `prepare_folder`; None: no journal.
        check_every: events between two checks of the core's invariants; 0: no checks.
        on_finish: called with the number of requests that ended, after each end; at intervals on the fast path.
        observer: receives every step that decides anything; see `ports.Observer`.
        compiled: whether a run without a journal, checks and an observer uses the fast path, which does not change
            results; None: if it pays.
        only_requests: whether only figures of requests are needed, see `cluster.fast.run_compiled`.
    Raises:
        JournalError: the journal cannot be written; the part that was written is a valid journal.
        ConfigError: the engine has a role that needs a cluster.
    """
    if setup.config.shares_passes:
        raise ConfigError("`rank_schedulers` is on: its ranks are simulated as a cluster, see cluster.py")
    if setup.config.hands_over:
        raise ConfigError(
            f"`role` is {setup.config.role}, but there is one engine, and none with the other role\n"
            "hint: --prefill-engines 1 --decode-engines 1"
        )
    if folder is None:
        if compiled is not False and not check_every and observer is None:
            run = _run_compiled(setup, on_finish, always=compiled is True, only_requests=only_requests)
            if run is not None:
                return run
        return _run(setup, NoJournal(), check_every, on_finish, observer)
    journal = JournalWriter.create(folder, setup.header())
    with journal:
        run = _run(setup, journal, check_every, on_finish, observer)
        journal.close("interrupted" if run.interrupted else "closed")
    return run


def watch_of(
    check_every: int, on_finish: Callable[[int], None] | None = None, observer: Observer | None = None
) -> HostWatch:
    """Return the callbacks of a host that checks the core's invariants after `check_every` events; 0: no checks."""
    check = invariants.self_check if check_every else None
    return HostWatch(check=check, check_every=check_every or 1, on_finish=on_finish, observer=observer)


def host_of(
    setup: Setup,
    arrivals: RequestSource,
    journal: JournalSink,
    *,
    env: Environment,
    name: str = "engine0",
    watch: HostWatch = NOT_WATCHED,
    links: HostLinks = ALONE,
) -> tuple[EngineHost, MetricsFold]:
    """Return a host for one engine, and its metrics. All simulations of the core, of clusters too, call this function.

    Args:
        env: the clock, which may be shared with other engines.
        links: connections to other engines; without a `device_type` the cost model determines the device.
    """
    scenario = setup.scenario
    engine = Engine(setup.config, digests=not isinstance(journal, NoJournal))
    if setup.debug:
        metrics: MetricsFold = WatchedMetrics(engine, setup.debug, warm_up=scenario.warm_up)
    else:
        metrics = MetricsFold(
            kv_pages=setup.config.pages,
            warm_up=scenario.warm_up,
            host_page_bytes=setup.host_page_bytes,
            host_block_bytes=setup.host_block_bytes,
            needs_media=setup.config.role != "decode",
        )
    tiers = setup.tier_links(name)
    frontend_us = round(setup.calibration.correction.frontend_us)
    sessions = Conversations(setup.config.context_tokens_max, metrics) if scenario.server_sessions else None
    sink: MetricsSink = metrics if links.wrap_metrics is None else links.wrap_metrics(metrics)
    host = EngineHost(
        env,
        engine,
        arrivals,
        setup.cost,
        setup.cpu,
        journal,
        FrontEnd(sink, frontend_us) if frontend_us else sink,
        HostOptions(
            seed=scenario.seed,
            name=name,
            max_new_tokens=scenario.max_new_tokens,
            grammar_compile_us=scenario.grammar_compile_us,
            frontend_us=frontend_us,
            tenants_of_engines=setup.workload.tenants_of_engines,
            receive_interval=scenario.receive_interval,
            decode_runs=not setup.debug,
            watch=watch,
            links=replace(links, device_type=links.device_type or device_type_of(setup.cost)),
            features=HostFeatures(
                speculation=setup.drafting.for_engine(setup.config) if setup.drafting is not None else None,
                blocks=setup.blocks.for_rows(setup.config.rows_max) if setup.blocks is not None else None,
                forcing=setup.forcing,
                tiers=tiers,
                encoder=setup.encoding.lane(metrics) if setup.encoding is not None else None,
                adapters=setup.adapter_lane(tiers),
                conversations=sessions,
                experts=setup.experts.traffic() if setup.experts is not None else None,
                state_copy_us=setup.state_copy_us,
            ),
        ),
    )
    return host, metrics


def _run(
    setup: Setup,
    journal: JournalSink,
    check_every: int,
    on_finish: Callable[[int], None] | None,
    observer: Observer | None,
) -> Run:
    arrivals, env = arrivals_of(setup), Environment()
    host, metrics = host_of(setup, arrivals, journal, env=env, watch=watch_of(check_every, on_finish, observer))
    began_s = time.process_time()
    with collecting_seldom():
        with stopping_on_interrupt(host):
            host.env.process(host.run())
            host.env.run()
        data = with_stages(metrics.result(setup.scenario.slos), host)
    if host.tiers is not None:
        data.summary["cache"]["links"] = host.tiers.describe()
    return Run(
        setup=setup,
        data=data,
        batches=host.batches,
        clamped=host.clamped,
        rejected=host.rejected,
        never_sent=arrivals.never_sent,
        interrupted=host.stop_requested,
        cpu_s=time.process_time() - began_s,
    )


def _run_compiled(
    setup: Setup, on_finish: Callable[[int], None] | None, *, always: bool, only_requests: bool = False
) -> Run | None:
    """Run a setup on the fast path. Return None if it is unavailable, unsupported, does not pay, or gave up."""
    if unsupported_by(setup) or not (always or (is_available() and pays(len(setup.workload.turns)))):
        return None
    began_s = time.process_time()
    metrics = MetricsFold(kv_pages=setup.config.pages, warm_up=setup.scenario.warm_up, only_requests=only_requests)
    plain = fast_run_of([setup], [metrics], on_finish)
    with collecting_seldom():
        with stopping_on_interrupt(plain):
            if not plain.run():
                return None
        data = metrics.result(setup.scenario.slos)
    return Run(
        setup=setup,
        data=data,
        batches=plain.batches(0),
        clamped=plain.clamped(0),
        rejected=plain.rejected(0),
        never_sent=plain.never_sent(),
        interrupted=plain.stop_requested,
        cpu_s=time.process_time() - began_s,
    )


def arrivals_of(setup: Setup) -> Arrivals | ConcurrentSessions:
    """Return the source of requests: arrivals by the clock, or sessions of a closed loop."""
    cut = setup.config.truncate_input != "no"  # then prompts that are too long are cut, not rejected
    prompt_tokens_max = LENGTH_TOKENS_MAX if cut else setup.config.prompt_tokens_max(True)
    source = arrivals_of_load(setup.scenario, setup.workload.turns, prompt_tokens_max)
    source.kind = request_kind(setup.model)
    return source


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Context with rare garbage collection: a run makes few cycles, and each search visits all objects of the run."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Stoppable(Protocol):
    """A simulation that ends before its next fact when `stop_requested` is set."""

    stop_requested: bool


@contextmanager
def stopping_on_interrupt(host: Stoppable) -> Iterator[None]:
    """Context in which the first Ctrl-C ends the run between two events, so that engine and journal agree.

    A second Ctrl-C raises KeyboardInterrupt. Outside the main thread the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        host.stop_requested = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
