"""Several engines behind a router, in one process: what was asked, what that amounts to, the run, the run folder.

    base = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=4000,rate=40")
    setup = assemble_cluster(ClusterScenario(base=base, replicas=8))
    run = simulate_cluster(setup, folder=Path("runs/0192"))

    runs/0192/router.jsonl        every fact the router was told, and what it decided
              engines/0/journal/  as of a run with one engine, one per engine; request ids are those of the cluster
              engines/0/metrics.json
              metrics.json        all engines together, then each

A request comes to the router, is routed at that instant, and reaches its engine one hop later; a token takes one hop
back. What the router knows at an instant are the requests it routed and the answers whose end has reached it by then:
exactly what passed through it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core import invariants
from lockstep.core.engine import Engine
from lockstep.core.errors import ConfigError
from lockstep.core.events import RequestArrived, RequestId, TokenRuns
from lockstep.core.journal import JournalHeader, JournalWriter
from lockstep.core.router import (
    EngineShare,
    RequestEnded,
    RequestOffered,
    Router,
    RouterConfig,
    prefix_keys,
)
from lockstep.host.router_journal import NoRouterJournal, RouterJournal
from lockstep.sim.capacity_estimate import estimate_capacity
from lockstep.sim.cluster_lane import Feed, Lane, LaneClock
from lockstep.sim.cluster_metrics import balance, combine
from lockstep.sim.cost import Calibration
from lockstep.sim.cost.hardware import NETWORK_GBS, NETWORK_LATENCY_US
from lockstep.sim.cost.parallel import COUNTS
from lockstep.sim.handover import DECODE_ROUTER, HandoverCluster
from lockstep.sim.host import NEVER_US, EngineHost, JournalSink
from lockstep.sim.metrics import MetricsFold, RunData
from lockstep.sim.pipeline import device_type_of, with_stages
from lockstep.sim.simulate import (
    FrontEnd,
    NoJournal,
    Run,
    Scenario,
    Setup,
    arrivals_of,
    assemble,
    collecting_seldom,
    number_word,
    option_of,
    stopping_on_interrupt,
)
from lockstep.sim.token_runs import prompt_ids
from lockstep.sim.workload import Workload

if TYPE_CHECKING:
    from lockstep.sim.intervals import Intervals

DECODE = "decode"  # in a run folder, what the router of the decode engines decided
LAYOUT = COUNTS[1:]  # of an engine, besides `tp`
HOP_US_MAX = 60_000_000
WEIGHTS = (1e-3, 1e3)  # of an engine in `engines`
COMMON = (
    *("format", "format_version", "command", "seed", "version", "commit", "model", "workload"),
    *("max_new_tokens", "grammar_compile_us", "receive_interval", "calibration"),
)  # of what is said of a run, what is the same for all engines
REPLICAS_MAX = 1024
ENGINES_REPORTED = 16  # in report.html, which must stay small enough to open

# ------------------------------------------------------------------------------------------------------ what was asked


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """Equal engines: `4xh100:tp=2`."""

    count: int
    gpu: str
    tp: int | None = None  # None, and what is not in `layout` and `settings`: as the command line says for all
    layout: Mapping[str, int] = field(default_factory=dict)  # of LAYOUT
    weight: float | None = None  # at the router; None: what the cost model estimates
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of SchedConfig

    def __str__(self) -> str:
        words = [f"{self.count}x{self.gpu}"]
        words += [f"tp={self.tp}"] if self.tp is not None else []
        words += [f"{name}={value}" for name, value in self.layout.items()]
        words += [f"weight={number_word(self.weight)}"] if self.weight is not None else []
        words += [f"{name}={_word(value)}" for name, value in self.settings.items()]
        return ":".join(words)


def _word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parse_engines(text: str, parse_setting: Callable[[str, str], tuple[str, Any]]) -> tuple[EngineGroup, ...]:
    """Read `4xh100:tp=2,2xh200:weight=1.5`; `parse_setting` reads a scheduler setting. Raises ConfigError."""
    groups = []
    for item in text.split(","):
        head, *pairs = item.strip().split(":")
        count, times, gpu = head.partition("x")
        if not times or not count.isascii() or not count.isdigit() or not gpu or int(count) < 1:
            raise ConfigError(f"`engines` has `{item.strip()}`, expected COUNTxGPU\nhint: such as 4xh100:tp=2,2xh200")
        values: dict[str, Any] = {}
        layout: dict[str, int] = {}
        settings: dict[str, Any] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals or name in values or name in layout or name in settings:
                problem = "is given twice" if equals else "has no value"
                raise ConfigError(f"`engines`: `{name}` of `{head}` {problem}\nhint: write NAME=VALUE once for each")
            if name == "tp" or name in LAYOUT:
                if not value.isascii() or not value.isdigit() or int(value) < 1:
                    raise ConfigError(
                        f"`engines`: `{name}` of `{head}` must be a whole number of at least 1, got `{value}`"
                    )
                (values if name == "tp" else layout)[name] = int(value)
            elif name == "weight":
                values["weight"] = _parse_weight(head, value)
            else:
                field_name, parsed = parse_setting(name, value)
                settings[field_name] = parsed
        groups.append(EngineGroup(count=int(count), gpu=gpu, layout=layout, settings=settings, **values))
    return tuple(groups)


def _parse_weight(head: str, text: str) -> float:
    low, high = WEIGHTS
    try:
        if low <= (weight := float(text)) <= high:
            return weight
    except ValueError:
        pass
    raise ConfigError(f"`engines`: `weight` of `{head}` must be a number from {low:g} to {high:g}, got `{text}`")


@dataclass(frozen=True, kw_only=True)
class ClusterScenario:
    """What to simulate. `base` says what holds for every engine, and what comes; its `gpu` where no group names one."""

    base: Scenario
    replicas: int = 1  # of the base; without effect beside `engines`
    engines: tuple[EngineGroup, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    hop_us: int = 0  # from the router to an engine, and as long back
    link_gbs: float = NETWORK_GBS.value  # of each GPU to other engines, each way; 1e9 bytes per second
    link_latency_us: int = round(NETWORK_LATENCY_US.value)  # from one host to another

    def groups(self) -> tuple[EngineGroup, ...]:
        return self.engines or (EngineGroup(count=self.replicas, gpu=self.base.gpu),)

    def command(self) -> str:
        """The command line that runs this again."""
        words = shlex.split(self.base.command())
        if self.engines:
            at = words.index("--gpu")
            words[at : at + 2] = ["--engines", ",".join(map(str, self.engines))]
        else:
            words += ["--replicas", str(self.replicas)]
        words += ["--router", self.router.policy]
        usual = RouterConfig()
        for name in ("load_bound", "load_floor", "block_tokens", "sessions_max"):
            value = getattr(self.router, name)
            if value != getattr(usual, name):
                words += [
                    f"--router-{option_of(name)[2:]}",
                    number_word(value) if isinstance(value, float) else str(value),
                ]
        if self.hop_us:
            words += ["--router-hop", f"{self.hop_us}us"]
        if self.link_gbs != NETWORK_GBS.value:
            words += ["--link-bandwidth", number_word(self.link_gbs)]
        if self.link_latency_us != round(NETWORK_LATENCY_US.value):
            words += ["--link-latency", f"{self.link_latency_us}us"]
        return shlex.join(words)


# ------------------------------------------------------------------------------------------------- what that amounts to


@dataclass(frozen=True, kw_only=True)
class ClusterSetup:
    """A scenario with everything it names loaded, checked and worked out."""

    scenario: ClusterScenario
    engines: tuple[Setup, ...]  # one per engine; those of a group share theirs
    shares: tuple[EngineShare, ...]

    @property
    def workload(self) -> Workload:
        return self.engines[0].workload

    @property
    def gpus(self) -> int:
        return sum(setup.split.gpus for setup in self.engines)

    @property
    def hands_over(self) -> bool:
        """Whether prompts are computed by some engines and continued by others."""
        return self.engines[0].config.hands_over

    def link_bytes_per_us(self, engine: Setup) -> float:
        """What an engine can send to others at once, and receive."""
        return self.scenario.link_gbs * 1e3 * engine.split.gpus

    @property
    def title(self) -> str:
        kinds = Counter(kind_of(setup) for setup in self.engines)
        on = " and ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in kinds.items())
        return f"{self.engines[0].model.name} on {on}, {self.scenario.router.policy}"

    def about(self) -> dict[str, Any]:
        """All that is needed to get the run again."""
        first = self.engines[0].about()
        return {
            **{name: first[name] for name in COMMON},
            "command": self.scenario.command(),
            "router": msgspec.to_builtins(self.scenario.router),
            "hop_us": self.scenario.hop_us,
            **(
                {"link_gbs": self.scenario.link_gbs, "link_latency_us": self.scenario.link_latency_us}
                if self.hands_over
                else {}
            ),
            "engines": [
                {
                    "gpu": setup.gpu.name,
                    **({"role": setup.config.role} if setup.config.hands_over else {}),
                    "tp": setup.scenario.tp,
                    **setup.split.describe(),
                    "weight": share.weight,
                    "cache_tokens": share.cache_tokens,
                }
                for setup, share in zip(self.engines, self.shares, strict=True)
            ],
        }

    def shares_of(self, role: str) -> tuple[EngineShare, ...]:
        """Of the engines that a router chooses from: of this role, or all where none is handed over."""
        return tuple(
            share
            for share, engine in zip(self.shares, self.engines, strict=True)
            if not self.hands_over or engine.config.role == role
        )

    def slowed(self, factor: float) -> ClusterSetup:
        """The same with the time of every batch multiplied; routing weights stay what they were."""
        return replace(self, engines=tuple(setup.slowed(factor) for setup in self.engines))

    def header(self, engine: int) -> JournalHeader:
        """Of one engine's journal."""
        header = self.engines[engine].header()
        return msgspec.structs.replace(header, host={**header.host, "engine": engine, "engines": len(self.engines)})


def assemble_cluster(
    scenario: ClusterScenario, environ: Mapping[str, str] | None = None, *, workload: Workload | None = None
) -> ClusterSetup:
    """Load and work out what the scenario names. Raises what `simulate.assemble` raises."""
    if not 0 <= scenario.hop_us <= HOP_US_MAX:
        hop = f"{scenario.hop_us / 1e6:g}s"
        raise ConfigError(f"`router_hop` must be from 0 to {HOP_US_MAX // 10**6}s, got `{hop}`")
    groups = scenario.groups()
    count = sum(group.count for group in groups)
    if not 1 <= count <= REPLICAS_MAX:
        name = "engines" if scenario.engines else "replicas"
        raise ConfigError(f"`{name}` must be from 1 to {REPLICAS_MAX}, got `{count}`")
    base = scenario.base
    setups: list[Setup] = []
    for group in groups:
        one = replace(
            base,
            gpu=group.gpu,
            tp=base.tp if group.tp is None else group.tp,
            ep=group.layout.get("ep", base.ep),
            attention_dp=group.layout.get("attention_dp", base.attention_dp),
            pp=group.layout.get("pp", base.pp),
            settings={**base.settings, **group.settings},
        )
        setup = assemble(one, workload=workload) if environ is None else assemble(one, environ, workload=workload)
        workload = setup.workload
        setups.append(setup)
    if any(setup.config.hands_over for setup in setups):
        _check_roles(scenario, setups)
    weights = _weights(groups, setups)
    engines = [setup for group, setup in zip(groups, setups, strict=True) for _ in range(group.count)]
    shares = [
        EngineShare(weight=weight, cache_tokens=setup.config.pool_tokens if setup.config.radix_cache else 0)
        for group, setup, weight in zip(groups, setups, weights, strict=True)
        for _ in range(group.count)
    ]
    return ClusterSetup(scenario=scenario, engines=tuple(engines), shares=tuple(shares))


def kind_of(setup: Setup) -> str:
    """What an engine is called: its hardware, and its role if it has one."""
    return f"{setup.config.role}: {setup.hardware}" if setup.config.hands_over else setup.hardware


def _check_roles(scenario: ClusterScenario, setups: list[Setup]) -> None:
    """Raise ConfigError for engines that cannot hand requests over to each other, or for requests that they cannot."""
    roles = [str(setup.config.role) if setup.config.hands_over else "mixed" for setup in setups]
    if not set(roles) == {"prefill", "decode"}:
        raise ConfigError(
            f"`engines` has the roles {', '.join(sorted(set(roles)))}; prompts need prefill engines, and these need "
            "decode engines behind them\nhint: 2xh200:role=prefill,2xh200:role=decode"
        )
    for name in ("transfer_allocation",):
        values = {getattr(setup.config, name) for setup in setups}
        if len(values) > 1:
            raise ConfigError(f"`{name}` must be the same for all engines, got {', '.join(sorted(map(str, values)))}")
    model, turns = setups[0].model, setups[0].workload.turns
    if model.delta is not None:
        raise ConfigError(f"`role`: {model.name} has linear-attention state, which is not handed over yet")
    if (turns.output_tokens == 0).any():
        raise ConfigError(
            "`workload` has requests that want no output: there is nothing to hand over\nhint: leave out the roles"
        )
    if not 0.001 <= scenario.link_gbs <= 1e6:
        raise ConfigError(f"`link_bandwidth` must be from 0.001 to 1,000,000 GB/s, got `{scenario.link_gbs:g}`")
    if not 0 <= scenario.link_latency_us <= HOP_US_MAX:
        raise ConfigError(
            f"`link_latency` must be from 0 to {HOP_US_MAX // 10**6}s, got `{scenario.link_latency_us}us`"
        )


def _weights(groups: tuple[EngineGroup, ...], setups: list[Setup]) -> list[float]:
    """Of each group: what was given, else its estimated capacity beside the first group's, to two digits."""
    if len(groups) == 1:
        return [groups[0].weight or 1.0]
    summary = setups[0].workload.summary()
    rates = [estimate_capacity(setup.cost, setup.config, summary).requests_per_s for setup in setups]
    return [
        group.weight if group.weight is not None else float(f"{rate / rates[0]:.2g}")
        for group, rate in zip(groups, rates, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """A finished simulation of a cluster."""

    setup: ClusterSetup
    engines: tuple[Run, ...]
    data: RunData  # of all engines together, as a client of the router sees it
    routed_by_reason: Mapping[str, int]
    never_sent: int
    interrupted: bool
    stopped_early: bool  # by `give_up`
    cpu_s: float
    intervals: Intervals | None = None  # see intervals_of

    @property
    def calibration(self) -> Calibration:
        return self.setup.engines[0].calibration

    @property
    def batches(self) -> int:
        return sum(run.batches for run in self.engines)

    def metrics(self) -> dict[str, Any]:
        """What metrics.json holds: all engines together, then each."""
        return {
            "about": self.about(),
            **self.data.summary,
            **({} if self.intervals is None else {"intervals": self.intervals.describe()}),
            "router": {"routed_by_reason": dict(self.routed_by_reason)},
            "balance": self.balance(),
            "engines": [run.data.summary for run in self.engines],
        }

    def balance(self) -> dict[str, Any]:
        """How evenly the work lay; see cluster_metrics.balance."""
        weights = [share.weight for share in self.setup.shares]
        makespan_us = self.data.summary["throughput"]["makespan_us"]
        return balance([run.data.summary for run in self.engines], weights, makespan_us)

    def about(self) -> dict[str, Any]:
        """See ClusterSetup.about; and what must be known to read the numbers."""
        return {
            **self.setup.about(),
            "interrupted": self.interrupted,
            "clamped_requests": sum(run.clamped for run in self.engines),
            "never_sent_turns": self.never_sent,
        }

    def remarks(self) -> list[str]:
        """What a reader of the table must know, one line each."""
        together = Run(
            setup=self.setup.engines[0],
            data=self.data,
            batches=self.batches,
            clamped=sum(run.clamped for run in self.engines),
            rejected=sum((run.rejected for run in self.engines), Counter()),
            never_sent=self.never_sent,
            interrupted=self.interrupted,
            cpu_s=self.cpu_s,
        )
        return together.remarks()


def simulate_cluster(
    setup: ClusterSetup,
    *,
    folder: Path | None = None,
    check_every: int = 0,
    on_finish: Callable[[int], None] | None = None,
    give_up: Callable[[Any], bool] | None = None,
    eager: bool = False,
) -> ClusterRun:
    """Run a cluster to its end, or until Ctrl-C. With `folder`, its journals are written there.

    Args:
        give_up: asked now and then while requests still come; once it says yes, no more of them do.
        eager: bring every engine up to every arrival. It changes nothing but the time it takes.
    """
    with ExitStack() as stack:
        journals: list[JournalSink] = []
        router_journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        decode_router_journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for engine in range(len(setup.engines)):
                journal = JournalWriter.create(folder / "engines" / str(engine), setup.header(engine))
                journals.append(stack.enter_context(journal))
            router_journal = stack.enter_context(
                RouterJournal(folder, setup.scenario.router, setup.shares_of("prefill"))
            )
            if setup.hands_over:
                (folder / DECODE).mkdir(mode=0o700, exist_ok=True)
                decode_journal = RouterJournal(folder / DECODE, DECODE_ROUTER, setup.shares_of("decode"))
                decode_router_journal = stack.enter_context(decode_journal)
        else:
            journals = [NoJournal()] * len(setup.engines)
        cluster: Cluster | HandoverCluster
        if setup.hands_over:
            both = router_journal, decode_router_journal
            cluster = HandoverCluster(setup, journals, both, check_every=check_every, on_finish=on_finish)
        else:
            cluster = Cluster(
                setup, journals, router_journal, check_every=check_every, on_finish=on_finish, eager=eager
            )
        began_s = time.process_time()
        with stopping_on_interrupt(cluster), collecting_seldom():
            stopped_early = cluster.run(give_up)
        run = cluster.result(stopped_early, began_s)
        for sink in journals:
            if isinstance(sink, JournalWriter):
                sink.close("interrupted" if run.interrupted else "closed")
    return run


GIVE_UP_EVERY = 32  # requests between two questions whether to give up, at least


class Cluster:
    """Lanes behind a router. The only place where engines meet."""

    def __init__(
        self,
        setup: ClusterSetup,
        journals: list[JournalSink],
        router_journal: RouterJournal | NoRouterJournal,
        *,
        check_every: int = 0,
        on_finish: Callable[[int], None] | None = None,
        eager: bool = False,
    ) -> None:
        scenario = setup.scenario.base
        self.setup = setup
        self.now_us = 0
        self.arrivals = arrivals_of(setup.engines[0])
        self.router = Router(setup.scenario.router, setup.shares)
        self.lanes: list[Lane] = []
        self.metrics: list[MetricsFold] = []
        self.routed_by_reason: Counter[str] = Counter()
        self._journal = router_journal
        self._hop_us = setup.scenario.hop_us
        self._max_new_tokens = scenario.max_new_tokens
        self._by_prefix = setup.scenario.router.policy == "prefix_affinity"
        self._by_session = setup.scenario.router.policy == "session_sticky"
        self._sessions: dict[int, str] = {}  # by index of a turn: the label of the first of its session
        self._ended: list[
            tuple[int, int, RequestId, int]
        ] = []  # heap: when the router sees it, engine, request, output
        self._ended_count = 0
        self._on_finish = on_finish
        self._eager = eager
        self._stop_requested = False
        turns = setup.workload.turns
        thinking = turns.think_us[turns.after >= 0]
        # In a closed loop the next session begins where one ends.
        closed = scenario.concurrency is not None
        self._think_us_min = int(thinking.min()) if len(thinking) and not closed else 0
        for engine, (one, journal) in enumerate(zip(setup.engines, journals, strict=True)):
            clock = LaneClock()
            feed = Feed(engine, self.arrivals.open_turns, self._on_end, clock)
            metrics = MetricsFold(
                kv_pages=one.config.pages, warm_up=scenario.warm_up, host_page_bytes=one.host_page_bytes
            )
            frontend_us = round(one.calibration.correction.frontend_us)
            host = EngineHost(
                clock,
                Engine(one.config, digests=not isinstance(journal, NoJournal)),
                feed,
                one.cost,
                one.cpu,
                journal,
                FrontEnd(metrics, frontend_us) if frontend_us else metrics,
                seed=scenario.seed,
                name=f"engine{engine}",
                max_new_tokens=scenario.max_new_tokens,
                check=invariants.self_check if check_every else None,
                check_every=check_every or 1,
                grammar_compile_us=scenario.grammar_compile_us,
                receive_interval=scenario.receive_interval,
                device_type=device_type_of(one.cost),
                speculation=one.drafting.for_engine(one.config) if one.drafting is not None else None,
                tiers=one.tier_links(),
            )
            self.lanes.append(Lane(host, feed, clock, one.cost, early_ends=scenario.max_new_tokens is not None))
            self.metrics.append(metrics)

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Of the engines that clients hear of: all."""
        return self.metrics

    @property
    def stop_requested(self) -> bool:
        """Set from a signal handler: every engine stops before its next fact."""
        return self._stop_requested

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._stop_requested = value
        for lane in self.lanes:
            lane.host.stop_requested = value

    def run(self, give_up: Callable[[Cluster], bool] | None = None) -> bool:
        """Route every request and finish every answer. Return whether it was given up before all had come."""
        arrivals, lanes, hop_us = self.arrivals, self.lanes, self._hop_us
        until_question = GIVE_UP_EVERY
        while not self._stop_requested:
            now_us = arrivals.next_us
            if arrivals.awaits_answers:
                # A turn to come is not known yet: none comes before the first answer ends and its reader has thought.
                first_us = min(lane.quiet_until_us for lane in lanes)
                sure_us = first_us + hop_us + self._think_us_min
                if sure_us < now_us:
                    self._advance(max(sure_us, first_us + 1))
                    continue
            if now_us == NEVER_US:
                break
            if self._eager:
                self._advance_all(now_us)
            else:
                self._catch_up(now_us)
            self._tell_ends(now_us)
            while arrivals.next_us == now_us:
                self._route()
                until_question -= 1
            if give_up is not None and until_question <= 0:
                until_question = max(GIVE_UP_EVERY, arrivals.arrived // 16)
                if give_up(self):
                    return True
        for lane in lanes:
            lane.advance(float("inf"))
        self._tell_ends(NEVER_US)
        return False

    def _advance(self, until_us: float) -> None:
        """Bring every engine that may have an answer to end before `until_us` there, or to the turn that follows."""
        for lane in self.lanes:
            until_us = min(until_us, self.arrivals.next_us)
            if lane.quiet_until_us < until_us or self._eager:
                lane.advance(until_us)

    def _advance_all(self, until_us: float) -> None:
        for lane in self.lanes:
            lane.advance(until_us)

    def _catch_up(self, now_us: int) -> None:
        """Have every end happen that the router would have seen by now. What is sent now comes one hop later."""
        seen_us, until_us = now_us - self._hop_us, now_us + self._hop_us
        for lane in self.lanes:
            if lane.quiet_until_us < seen_us:
                lane.advance(until_us)

    def _route(self) -> None:
        event = self.arrivals.take(self._max_new_tokens)
        assert type(event) is RequestArrived
        turn = self.arrivals.open_turns[event.request_id]
        prefix: tuple[int, ...] = ()
        if self._by_prefix:
            assert type(event.prompt) is TokenRuns
            ids = prompt_ids(event.prompt.runs)
            prefix = prefix_keys(ids, self.router.config.block_tokens, event.tenant)
        session = ""
        if self._by_session:
            session = turn.label if turn.after is None else self._sessions[turn.after]
            self._sessions[turn.index] = session
        offered = RequestOffered(
            time_us=event.time_us,
            request_id=event.request_id,
            prompt_tokens=turn.prompt_tokens,
            prefix=prefix,
            session=session,
        )
        routed = self.router.step(offered)
        assert routed is not None
        assert routed.engine is not None  # engines of a simulated cluster do not go down
        self._journal.append(offered, routed, self.router.digest)
        self.routed_by_reason[routed.reason] += 1
        if self._hop_us:
            event = msgspec.structs.replace(event, time_us=event.time_us + self._hop_us)
        self.lanes[routed.engine].send(event)

    def _on_end(self, engine: int, request_id: RequestId, now_us: int, answered: bool) -> None:
        """A lane says that a request ended. The router and the client learn of it one hop later."""
        seen_us = now_us + self._hop_us
        turn = self.arrivals.open_turns[request_id]  # which it leaves now
        heappush(self._ended, (seen_us, engine, request_id, turn.output_tokens if answered else 0))
        if answered:
            self.arrivals.answered(request_id, seen_us)
        else:
            self.arrivals.broke_off(request_id, seen_us)
        self.lanes[engine].hold_at(self.arrivals.next_us + self._hop_us)
        self._ended_count += 1
        if self._on_finish is not None:
            self._on_finish(self._ended_count)

    def _tell_ends(self, before_us: int) -> None:
        """Tell the router what it has seen end before a moment."""
        while self._ended and self._ended[0][0] < before_us:
            time_us, _, request_id, output_tokens = heappop(self._ended)
            fact = RequestEnded(time_us=time_us, request_id=request_id, output_tokens=output_tokens)
            self.router.step(fact)
            self._journal.append(fact, None, self.router.digest)

    def result(self, stopped_early: bool, began_s: float) -> ClusterRun:
        """Measure it."""
        slos = self.setup.scenario.base.slos
        datas = [
            with_stages(metrics.result(slos), lane.host.device)
            for metrics, lane in zip(self.metrics, self.lanes, strict=True)
        ]
        data = combine(datas, hop_us=self._hop_us, slos=slos)
        cpu_s = time.process_time() - began_s
        return ClusterRun(
            setup=self.setup,
            engines=tuple(
                Run(
                    setup=one,
                    data=measured,
                    batches=lane.host.batches,
                    clamped=lane.host.clamped,
                    rejected=lane.host.rejected,
                    never_sent=0,
                    interrupted=self._stop_requested,
                    cpu_s=cpu_s / len(self.lanes),
                )
                for one, measured, lane in zip(self.setup.engines, datas, self.lanes, strict=True)
            ),
            data=data,
            routed_by_reason=dict(sorted(self.routed_by_reason.items())),
            never_sent=self.arrivals.never_sent,
            interrupted=self._stop_requested,
            stopped_early=stopped_early,
            cpu_s=cpu_s,
        )


# ------------------------------------------------------------------------------------------------------- the run folder


def write_cluster_run(
    folder: Path, run: ClusterRun, *, requests: bool = True, trace: bool = True, report: bool = True
) -> None:
    """Write what was measured beside the journals; traces lie with their engines."""
    from lockstep.sim.perfetto import write_trace
    from lockstep.sim.report import ReportRun, write_report
    from lockstep.sim.results import write_metrics_json, write_requests
    from lockstep.sim.simulate import interrupted_headline, report_run, whole, workload_line

    about = run.about()
    with whole(folder / "metrics.json") as path:
        text = json.dumps(run.metrics(), indent=2, allow_nan=False, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    for engine, one in enumerate(run.engines):
        with whole(folder / "engines" / str(engine) / "metrics.json") as path:
            write_metrics_json(path, one.data, {**one.setup.about(), "command": about["command"], "engine": engine})
        if trace:
            with whole(folder / "engines" / str(engine) / "trace.json.gz") as path:
                write_trace(path, one.data, about={"seed": about["seed"], "command": about["command"]})
    if requests:
        with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
            write_requests(run.data, parquet, csv)
    if report and run.data.summary["requests"]["arrived"]:
        facts = {"command": about["command"], "router": run.setup.scenario.router.policy}
        whole_run = ReportRun(
            "all",
            facts,
            run.data,
            intervals=None if run.intervals is None else run.intervals.describe(),
            calibration=run.calibration.title,
            remarks=run.remarks(),
        )
        runs = [whole_run]
        shown = _engines_to_report(run)
        runs += [report_run(run.engines[engine], f"engine {engine}") for engine in shown]
        parts = "All together are what clients of the router see; an engine saw only what was routed to it."
        if len(shown) < len(run.engines):
            parts += (
                f" Of {len(run.engines)} engines, {len(shown)} are shown: "
                "those with the most requests and those with the fewest, and none without any."
            )
        with whole(folder / "report.html") as path:
            write_report(
                path,
                runs,
                title=run.setup.title,
                subtitle=workload_line(run.setup.workload, closed=run.setup.scenario.base.concurrency is not None),
                headline=interrupted_headline(run) if run.interrupted else None,
                parts=parts,
            )


def _engines_to_report(run: ClusterRun) -> list[int]:
    """The engines that got requests; of very many those with the most and those with the fewest. By number."""
    arrived = [one.data.summary["requests"]["arrived"] for one in run.engines]
    busy = sorted((engine for engine, count in enumerate(arrived) if count), key=lambda engine: -arrived[engine])
    half = ENGINES_REPORTED // 2
    return sorted(busy if len(busy) <= ENGINES_REPORTED else busy[:half] + busy[-half:])
