"""Choice of the simulations to run. Every configuration is searched in two stages; between them it is compared.

    estimate    the cost model alone: the best case of one engine                     no simulation
    narrow      short runs, one replication: from which load on the SLO is missed     a handful per configuration
    prune       drop configurations that are worse whatever their long runs show      no simulation
    confirm     long runs, replicated until the verdict is certain                    of the remaining ones

A load is a rate or, in a closed loop, a number of sessions in progress. Everything here applies to both.

A search is a generator: it yields the trials that it needs next and receives their results. It depends only on its own
results, and all searches of a stage end together. So the answer does not depend on the workers, nor on the order of
results. If the first few results are sufficient, a search receives the shortest sufficient prefix, however many results
exist by then. More workers run replications in parallel, one worker runs only the necessary ones, and the answer is the
same.

**Verdict.** A load is sustained if every SLO's interval lies within its bound: its upper end, not only the estimate. If
only the estimate does, more replications are run; if these do not settle it, the load counts as missed. No further
replication is run once a miss is certain: the mean would exceed the bound even if the remaining replications were
perfect.

**Common random numbers.** Replication i has the same seed in every configuration and at every rate, so the same traffic
and the same draw of the calibration's error. Differences are due to configuration and rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from lockstep.core.contract.config import DELAYER_SETTINGS, DRAFT_SETTINGS, TRANSFER_SETTINGS, TRIGGER_SETTINGS
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import options_of
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cluster.capacity_estimate import CapacityEstimate, estimate_capacity, new_prompt_tokens
from lockstep.sim.cluster.scenario import USUAL_PLACEMENT
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cost import CapacityError
from lockstep.sim.cost.engines import NONE
from lockstep.sim.cost.hardware import achieved
from lockstep.sim.host.hybrid_memory import TransferBytes, window_tokens_of
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.interval import Interval, interval_of, interval_of_samples
from lockstep.sim.plan.ledger import TrialStore
from lockstep.sim.plan.question import (
    LINK_KEYS,
    LIVES,
    OWN_KEYS,
    SHORT_SHARE,
    WARM_UP_PER_SESSION,
    Configuration,
    Question,
    content_files,
    has_calls,
    is_drawn,
    price_of,
)
from lockstep.sim.plan.split import MIXED, PREFILL_DECODE, RoleSplit, parse_split
from lockstep.sim.plan.trial import Trial, TrialResult, file_digest
from lockstep.sim.plan.workers import WorkerPool
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.load import open_load
from lockstep.sim.run.ranks import config_of_engine
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.whole_prompts import check_requests
from lockstep.sim.scenario.scenario import SPREAD, Scenario, names_where
from lockstep.sim.scenario.tier_options import HYBRID_KEYS, TIER_KEYS
from lockstep.sim.workload.generate import PREFIX
from lockstep.sim.workload.workload import Workload, WorkloadError, WorkloadSummary

NARROW_RATIO = 1.2  # ratio of missed to met rate at which short runs stop
NARROW_STEPS_MAX = 14
NARROW_LOWEST = 1 / 300  # of the estimate: a configuration that misses the SLO at this load always misses it
CONFIRM_STEPS_MAX = 12
PRUNE_MARGIN = 1.15  # error of short runs, in either direction
SESSIONS_OVER_ESTIMATE = 4.0  # factor on the sessions that keep an engine busy; more sessions only wait
REPLICAS_MORE_MAX = 4  # factor on the replicas suggested by short runs, beyond which a rate counts as unreachable

Status = Literal["met", "missed", "undecided"]


class TrialNeed(NamedTuple):
    """Trials that a search waits for: all of them, or the first ones if `enough` returns True for their results."""

    trials: list[Trial]
    enough: Callable[[Sequence[TrialResult]], bool] = lambda results: False


Search = Generator[TrialNeed, list[TrialResult], None]


# ------------------------------------------------------------------------------------------------------- one evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A configuration under one load, with its replications."""

    load: float  # arrivals per second, or sessions in progress
    replicas: int
    status: Status
    intervals: tuple[Interval, ...]  # one per SLO, us
    results: tuple[TrialResult, ...]
    first_trial: Trial  # trial of the first result
    clients: int | None = None  # requests in progress at any time: sessions of a closed loop without pauses

    @property
    def paid_replicas(self) -> float:
        """Mean number of paid replicas. With autoscaling it is below `replicas`."""
        known = [result.replicas_mean for result in self.results if result.replicas_mean is not None]
        return math.fsum(known) / len(known) if known else self.replicas

    @property
    def met(self) -> bool:
        return self.status == "met"

    @property
    def rejected_share(self) -> float:
        """Share of the requests that no engine admits, such as prompts beyond the context, to a tenth of a percent."""
        return rejected_share(self.results)

    @property
    def served(self) -> float:
        """The load without rejected requests. Sessions at a time are not reduced: after a rejection the next begins."""
        return self.load if self.first_trial.base.concurrency is not None else self.load * (1.0 - self.rejected_share)

    def steady(self, name: str) -> float | None:
        """Return the mean of a rate in the steady state, which does not depend on the number of requests.

        Runs without a steady state, such as of arrivals at one instant, count with their mean over the makespan.
        In a closed loop without pauses the rate follows from the time of a request (Little's law): sessions with
        answers of one length go on in waves, of which a window of time has no whole number.
        """
        rates = [self._rate_of_clients(result.summary, name) for result in self.results]
        if None in rates:
            throughputs = [result.summary["throughput"] for result in self.results]
            rates = [one["steady"].get(name, one[name]) for one in throughputs]
        known = [rate for rate in rates if rate is not None]
        return math.fsum(known) / len(known) if known else None

    def _rate_of_clients(self, summary: Mapping[str, Any], name: str) -> float | None:
        """Return a rate of completed requests, of which `clients` are always in progress; None if that is not known."""
        took_us, over_makespan = summary["latency"]["e2e_us_mean"], summary["throughput"][name]
        completed_per_s = summary["throughput"]["requests_per_s"]
        if self.clients is None or not took_us or over_makespan is None or not completed_per_s:
            return None
        return float(self.clients / took_us * 1e6 * over_makespan / completed_per_s)

    def mean(self, part: str, name: str) -> float | None:
        """Return the mean of a number of the summary over the replications."""
        values = [result.summary[part][name] for result in self.results]
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known else None


def judge(
    slos: Sequence[Slo], results: Sequence[TrialResult], confidence: float, *, systematic: bool
) -> tuple[Status, tuple[Interval, ...]]:
    """Return whether every bound holds according to these replications, and the interval of each SLO."""
    intervals = []
    for number in range(len(slos)):
        found = [result.slos[number] for result in results]
        if len(found) == 1:
            samples = [*found[0].samples, *[math.inf] * found[0].samples_failed]
            intervals.append(interval_of_samples(found[0].value, samples, confidence))
        else:
            intervals.append(interval_of([slo.value for slo in found], confidence, systematic=systematic))
    if any(result.gave_up for result in results):
        return "missed", tuple(intervals)
    bounds = [slo.bound_us for slo in slos]
    if any(interval.value > bound for interval, bound in zip(intervals, bounds, strict=True)):
        return "missed", tuple(intervals)
    # Without draws an interval is unbounded; the value is used instead.
    highs = [i.value if len(results) == 1 and math.isinf(i.low) else i.high for i in intervals]
    sure = all(high <= bound for high, bound in zip(highs, bounds, strict=True))
    return "met" if sure else "undecided", tuple(intervals)


def rejected_share(results: Sequence[TrialResult]) -> float:
    """Return the share of requests that were rejected as invalid, over all replications, to a tenth of a percent."""
    requests = sum(result.requests for result in results)
    return round(sum(result.rejected for result in results) / requests, 3) if requests else 0.0


# ------------------------------------------------------------------------------------------------------------ candidate


@dataclass(kw_only=True)
class Candidate:
    """A configuration and the results of its search so far."""

    configuration: Configuration
    question: Question
    # None: it cannot run, see `unfit`; with separate prefill engines that of a decode engine
    setup: Setup | None = None
    prefill_setup: Setup | None = None  # of a prefill engine, if prefill is separate
    unfit: str = ""
    trial: Trial | None = None  # for one replica; the search fills in rate, limit, seed and factor
    drawn: bool = False  # whether another seed makes another workload
    estimate: CapacityEstimate | None = None  # of one replica: one engine, or some of each role
    session_s: float = 0.0  # think time of a session, s, on average
    turns_per_arrival: float = 1.0  # requests per arrival: a rate counts arrivals by the clock, which are sessions
    usd_per_gpu_hour: float | None = None
    price_source: str = ""
    replicas: int = 1  # in `narrow`, and in `confirm` if the largest load is searched
    narrow_met: float | None = None  # largest load that a short run sustained
    narrow_missed: float | None = None  # smallest load that a short run missed
    narrow_rejected: float = 0.0  # share of requests that the last short run with a met SLO rejected as invalid
    pruned: str = ""  # reason why it was not confirmed
    impossible: Evaluation | None = None  # evaluation at the lowest load, if it misses the SLO even there
    evaluations: list[Evaluation] = field(default_factory=list)  # long runs
    best: Evaluation | None = None  # the evaluation that answers the question
    missed: Evaluation | None = None  # nearest load that was not sustained

    @property
    def estimated_load(self) -> float:
        """Best case of one replica: arrivals by the clock per second, or sessions that keep it busy all the time.

        The number of sessions follows from Little's law: sessions that think plus sessions that are served.
        """
        assert self.estimate is not None
        if self.question.load == "rate":
            return self.estimate.requests_per_s / self.turns_per_arrival
        served_s = (self.estimate.prefill_us + self.estimate.decode_us * self.estimate.decode_rows) / 1e6
        return max(self.estimate.requests_per_s * (self.session_s / self.turns_per_arrival + served_s), 1.0)

    @property
    def load_max(self) -> float:
        """The largest load that is tried. Even the best case serves no higher rate; more sessions would all wait."""
        over = PRUNE_MARGIN if self.question.load == "rate" else SESSIONS_OVER_ESTIMATE
        return self.estimated_load * self.replicas * over

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        chosen, common = self.configuration.chosen, self.question.common
        tp, pp = (int(chosen.get(name, common.get(name, 1))) for name in ("tp", "pp"))
        split = self.split
        return tp * pp if split is None else split.gpus(tp, pp)

    @property
    def split(self) -> RoleSplit | None:
        """The split into prefill and decode engines; None if all engines do both."""
        chosen, common = self.configuration.chosen, self.question.common
        return parse_split(chosen.get(PREFILL_DECODE, common.get(PREFILL_DECODE, MIXED)))

    def usd_per_hour(self, replicas: float) -> float | None:
        return None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour * replicas * self.gpus

    def cost_per_hour(self, replicas: float) -> float:
        """Return the quantity to minimise: dollars per hour, or GPUs if some GPU has no price."""
        usd = self.usd_per_hour(replicas)
        return float(replicas * self.gpus) if usd is None else usd


def sampled(question: Question, limit: int | None) -> Workload:
    """Return the workload of a simulation of `limit` requests, at its own rate; without a limit the whole one."""
    load = {name: value for name, value in question.common.items() if name in names_where("of_load")}
    spec = question.workload if limit is None else with_count(question.workload, limit)
    closed = 1 if question.load == "sessions" else None
    return open_load(
        Scenario(
            model=question.model, gpu="", workload=spec, seed=question.seed, concurrency=closed, limit=limit, **load
        )
    )


def sample_line(question: Question, part: Workload) -> str:
    """Return how the simulated part of a trace differs from the whole; "" if all of it is simulated, or it is drawn.

    Args:
        part: the workload of the shortest long simulation, as returned by `prepare`.
    """
    if question.load == "sessions" or is_drawn(part):
        return ""
    whole, found = sampled(question, None).summary(), part.summary()
    if found.turns >= whole.turns:
        return ""
    spread = question.common.get("sample") == SPREAD
    kind = "a sample from the whole time" if spread else "the first ones"
    window = question.common.get("time_window")
    line = (
        f"Simulated are {found.turns:,} or more of {whole.turns:,} recorded requests"
        f"{f' of the window {window}' if window else ''}, {kind}: {found.prompt.mean:,.0f} tokens in and "
        f"{found.output.mean:,.0f} out on average, {100 * found.sharing_ratio:.0f} % of the prompts shared; in all of "
        f"them {whole.prompt.mean:,.0f}, {whole.output.mean:,.0f} and {100 * whole.sharing_ratio:.0f} %."
    )
    if spread:
        return f"{line} In the sample, uses of a prefix are closer together than recorded, which favours small caches."
    return f"{line} --sample spread draws from their whole time, --time-window chooses a part, --requests takes more."


def requests_if_short(question: Question, part: Workload) -> int | None:
    """Return the requests of a workload that ends before a long simulation would; None if it has enough.

    Args:
        part: the workload of the shortest long simulation, as returned by `prepare`.
    """
    found = len(part.turns)
    return found if question.load == "rate" and found < question.effort.long.requests_min else None


def prepare(question: Question) -> tuple[list[Candidate], Workload]:
    """Load what the question names. Return the configurations, with the best case of each, and the workload."""
    workload = sampled(question, question.effort.long.requests_min)
    if question.load == "rate" and len(workload.turns.by_clock_rows) < 2:
        problem = "it has one arrival and so no rate: any rate would count as sustained"
        raise WorkloadError(question.workload, problem, "a longer trace, or --load sessions")
    _check_gpus(question)
    model = load_model(question.model)
    if model.whole is not None and question.splits:
        raise ConfigError(
            f"`{PREFILL_DECODE}` divides prompts from decodes, and {model.name} computes prompts only, whole\n"
            "hint: leave it out"
        )
    check_requests(workload.turns, model)
    summary = workload.summary()
    content = " ".join([code_version(), code_commit() or "", *(file_digest(path) for path in content_files(question))])
    drawn = question.load == "sessions" or is_drawn(workload)  # a closed loop draws the order of its sessions
    candidates = []
    for configuration in question.configurations():
        candidate = Candidate(configuration=configuration, question=question, drawn=drawn)
        trial = _trial_of(question, configuration, content)
        try:
            setup, candidate.prefill_setup = _setups_of(trial, workload)
        except CapacityError as error:
            candidate.unfit = str(error).partition("\nhint:")[0]
        else:
            candidate.setup = setup
            candidate.trial = trial
            candidate.estimate = _estimate(candidate, setup, summary)
            sessions = summary.turns - summary.follow_ups
            if has_calls(question.workload):
                sessions = len(np.unique(workload.turns.arrival_us))
            candidate.turns_per_arrival = summary.turns / sessions
            candidate.session_s = float(workload.turns.think_us.sum()) / sessions / 1e6
            price = price_of(question, configuration.gpu, setup.gpu)
            candidate.usd_per_gpu_hour, candidate.price_source = price
            if question.gpus_max is not None:
                candidate.replicas = question.gpus_max // candidate.gpus
                if not candidate.replicas:
                    candidate.setup = None
                    candidate.unfit = f"needs {candidate.gpus} GPUs, of at most {question.gpus_max}"
        candidates.append(candidate)
    if any(c.setup is not None and c.usd_per_gpu_hour is None for c in candidates):
        for candidate in candidates:  # dollars and GPU-hours cannot be compared
            candidate.usd_per_gpu_hour = None
    return candidates, workload


def _setups_of(trial: Trial, workload: Workload) -> tuple[Setup, Setup | None]:
    """Return the setup of an engine; with separate roles that of a decode engine and that of a prefill engine."""
    scenario = trial.scenario()
    if trial.split is None:
        return assemble(scenario.base, {}, workload=workload), None
    cluster = assemble_cluster(scenario, {}, workload=workload)
    return cluster.engines[-1], cluster.engines[0]


def _estimate(candidate: Candidate, setup: Setup, summary: WorkloadSummary) -> CapacityEstimate:
    """Estimate the capacity of one replica. With separate roles the slower side, or the link between them, decides."""
    own = estimate_capacity(setup.cost, config_of_engine(setup.config), summary)
    split, prefill = candidate.split, candidate.prefill_setup
    if split is None or prefill is None:
        return own
    prefill_us = estimate_capacity(prefill.cost, prefill.config, summary).prefill_us
    assert candidate.trial is not None
    links = candidate.trial.scenario()
    hybrid = setup.config.hybrid is not msgspec.UNSET
    sizes = TransferBytes.of(setup.model, setup.scenario.kv_dtype, hybrid=hybrid)
    kv_bytes = sizes.of_prompt(new_prompt_tokens(summary), window_tokens_of(setup.model))
    way_gbs = links.link_gbs
    if links.placement != USUAL_PLACEMENT:  # the best case: every transfer stays within a rack
        way_gbs = max(way_gbs, achieved(setup.gpu, "send_gbs").value)
    link_gpus = min(side.engines * one.split.gpus for side, one in ((split.prefill, prefill), (split.decode, setup)))
    rates = (
        split.prefill.engines * 1e6 / max(prefill_us, 1e-3),
        split.decode.engines * 1e6 / max(own.decode_us, 1e-3),
        way_gbs * 1e9 * link_gpus / kv_bytes,
    )
    return CapacityEstimate(min(rates), prefill_us, own.decode_us, own.decode_rows)


def _check_gpus(question: Question) -> None:
    """Raise ConfigError if two names denote one GPU, and CatalogueError for an unknown GPU."""
    written: dict[str, str] = {}
    for gpu in question.gpus:
        name = load_gpu(gpu).name
        if name in written:
            raise ConfigError(f"`gpus` names {name} twice: `{written[name]}` and `{gpu}`\nhint: leave one of them out")
        written[name] = gpu


def _trial_of(question: Question, configuration: Configuration, content: str) -> Trial:
    chosen = dict(configuration.chosen)
    own = {key: chosen.pop(key) for key in OWN_KEYS if key != "router" and key in chosen}
    common = dict(question.common)
    tiers = common.pop("tiers", {}) | {key: chosen.pop(key) for key in TIER_KEYS if key in chosen}
    if tiers.get("hybrid_memory") == "off":  # searched beside `on`, which the other settings apply to
        tiers = {name: value for name, value in tiers.items() if name not in HYBRID_KEYS}
    router = question.router
    if "router" in chosen:
        router = msgspec.structs.replace(router, policy=chosen.pop("router"))
    settings = {**question.settings, **chosen}
    if chosen.get("prefill_delayer") is False:  # searched beside True, which the other settings apply to
        delays = (*DELAYER_SETTINGS, *TRIGGER_SETTINGS)
        settings = {name: value for name, value in settings.items() if name not in delays}
    split = own.pop(PREFILL_DECODE, common.pop(PREFILL_DECODE, MIXED))
    common.pop(PREFILL_DECODE, None)
    if split == MIXED and question.splits:  # beside splits, which these settings apply to
        own.pop("placement", None)
        common = {name: value for name, value in common.items() if name not in LINK_KEYS}
        settings = {name: value for name, value in settings.items() if name not in TRANSFER_SETTINGS}
    if chosen.get("speculative_method") == "none":  # searched beside methods that these settings apply to
        for name in ("acceptance", "acceptance_spread", "draft_model"):
            common.pop(name, None)
        settings = {name: value for name, value in settings.items() if name not in DRAFT_SETTINGS[1:]}
    if chosen.get("jump_forward_tokens") == 0:
        common.pop("grammar_forces", None)
    given = common | own
    base = {name: given.pop(name) for name in options_of(Scenario) if name in given}
    return Trial(
        base=Scenario(
            model=question.model,
            gpu=configuration.gpu,
            workload=question.workload,
            seed=question.seed,
            settings={name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
            slos=question.slos,
            tiers=tiers,
            **base,
        ),
        replicas=1,
        router=router,
        hop_us=question.hop_us,
        content=content,
        prefill_decode=None if split == MIXED else split,
        **given,
    )


def with_count(workload: str, requests: int) -> str:
    """Return the workload with `n=requests` added, if it is a generator without a number of requests."""
    if not workload.startswith(PREFIX):
        return workload
    keys = [item.partition("=")[0] for item in workload.removeprefix(PREFIX).split(",")]
    if "n" in keys or "sessions" in keys:
        return workload
    return f"{workload}{',' if workload != PREFIX else ''}n={requests}"


# ----------------------------------------------------------------------------------------------------------- searching


class Searcher:
    """Makes the trials of one question."""

    def __init__(self, question: Question, factors: Sequence[float] | None) -> None:
        """Store the question.

        Args:
            factors: a draw of the calibration's error for each replication; None without a calibration.
        """
        self.question = question
        self.factors = factors
        self.systematic = factors is not None

    def narrow(self, candidate: Candidate) -> Search:
        """Find with short runs between which loads the SLO starts to be missed. Sets narrow_met and narrow_missed."""
        best_case = candidate.estimated_load * candidate.replicas
        most = self.rounded(best_case if self.question.load == "rate" else candidate.load_max)
        load = self.rounded(best_case * 0.6)
        for _ in range(NARROW_STEPS_MAX):
            trial = self.trial(candidate, load, candidate.replicas, 0, short=True)
            (result,) = yield TrialNeed([trial])
            status, _ = judge(self.question.slos, [_without_samples(result)], 0.5, systematic=False)
            if status == "met":
                candidate.narrow_met = load
                candidate.narrow_rejected = rejected_share([result])
            else:
                candidate.narrow_missed = load
            met, missed = candidate.narrow_met, candidate.narrow_missed
            if met is not None and missed is not None:
                if self.close(met, missed, NARROW_RATIO):
                    return
                load = self.between(met, missed)
            elif missed is not None:
                if missed <= self.lowest(candidate):
                    return
                load = max(self.rounded(missed / 3), self.lowest(candidate))
            elif load >= most:
                return  # short runs end before they miss anything; long runs will find the limit
            else:
                load = min(self.beyond(load, 1.6), most)

    def confirm_load(self, candidate: Candidate) -> Search:
        """Find with long runs the largest load that is sustained. Sets best and missed, or impossible."""
        precision = self.question.effort.precision
        if candidate.narrow_met is None:
            yield from self._lowest_load(candidate)
            return
        load = candidate.narrow_met
        step = 1 + 2 * precision
        tried: list[float] = []
        for _ in range(CONFIRM_STEPS_MAX):
            if load in tried:
                break
            tried.append(load)
            evaluation = yield from self._evaluate(candidate, load, candidate.replicas)
            if evaluation.met:
                candidate.best = evaluation
            else:
                candidate.missed = evaluation
            met, missed = candidate.best, candidate.missed
            if met is not None and missed is not None:
                if self.close(met.load, missed.load, 1 + precision):
                    break
                load = self.between(met.load, missed.load)
            elif met is None:
                load = max(self.lowest(candidate), self.beyond(load, 1 / step))
                step = min(step * step, 4.0)
            elif load >= candidate.load_max:
                break
            else:
                load = self.beyond(load, step)
                step = min(step * step, 4.0)
        if candidate.best is None:
            yield from self._lowest_load(candidate)

    def confirm_replicas(self, candidate: Candidate) -> Search:
        """Find with long runs the fewest replicas that sustain the given load. Sets best and missed, or impossible."""
        load = self.question.wanted
        assert load is not None
        if candidate.narrow_met is None:
            yield from self._lowest_load(candidate)
            return
        first = math.ceil(load / candidate.narrow_met)
        least = max(math.ceil(load / (candidate.load_max / candidate.replicas)), 1)
        replicas = max(first, least)
        most = replicas * REPLICAS_MORE_MAX + REPLICAS_MORE_MAX
        while least <= replicas <= most:
            evaluation = yield from self._evaluate(candidate, load, replicas)
            if evaluation.met:
                candidate.best = evaluation
                if candidate.missed is not None:
                    return
                replicas -= 1
            else:
                candidate.missed = evaluation
                if candidate.best is not None:
                    return
                replicas += 1

    # Rates have three digits, the precision of the search. Sessions are whole numbers.

    def rounded(self, load: float) -> float:
        """Round a load, so that two searches try the same ones."""
        return rounded(load) if self.question.load == "rate" else float(max(round(rounded(load)), 1))

    def close(self, met: float, missed: float, ratio: float) -> bool:
        """Return whether no load between the two is left to try."""
        return missed / met <= ratio or (self.question.load == "sessions" and missed - met <= 1)

    def between(self, met: float, missed: float) -> float:
        """Return the load to try between two loads."""
        load = self.rounded(math.sqrt(met * missed))
        return load if self.question.load == "rate" else min(max(load, met + 1), missed - 1)

    def beyond(self, load: float, factor: float) -> float:
        """Return a load above or below another one, by about this factor."""
        further = self.rounded(load * factor)
        if self.question.load == "rate" or further != load:
            return further
        return load + 1 if factor > 1 else max(load - 1, 1.0)

    def lowest(self, candidate: Candidate) -> float:
        """Return the load at which a configuration that misses the SLO always misses it."""
        return self.rounded(candidate.estimated_load * candidate.replicas * NARROW_LOWEST)

    def _lowest_load(self, candidate: Candidate) -> Generator[TrialNeed, list[TrialResult], None]:
        """Evaluate the lowest load, the best that can be achieved, bursts included. Sets impossible."""
        load = self.lowest(candidate)
        trial = self.trial(candidate, load, candidate.replicas, 0, short=True)
        (result,) = yield TrialNeed([replace(trial, give_up=False)])
        results = [_without_samples(result)]
        status, intervals = judge(self.question.slos, results, 0.5, systematic=False)
        candidate.impossible = Evaluation(
            load=load,
            replicas=candidate.replicas,
            status=status,
            intervals=intervals,
            results=tuple(results),
            first_trial=trial,
        )

    def _evaluate(
        self, candidate: Candidate, load: float, replicas: int
    ) -> Generator[TrialNeed, list[TrialResult], Evaluation]:
        """Run replications until the verdict is certain, or their number reaches the maximum."""
        effort, question = self.question.effort, self.question
        replicated = candidate.drawn or self.systematic
        wanted = effort.replications_min if replicated else 1
        results: list[TrialResult] = []
        while True:
            trials = [self.trial(candidate, load, replicas, i, short=False) for i in range(len(results), wanted)]
            results += yield TrialNeed(trials, partial(self._settled, tuple(results), wanted))
            status, intervals = judge(question.slos, results, question.confidence, systematic=self.systematic)
            if status != "undecided" or wanted >= effort.replications_max or not replicated:
                break
            wanted = min(wanted + 2, effort.replications_max)
        evaluation = Evaluation(
            load=load,
            replicas=replicas,
            status=status,
            intervals=intervals,
            results=tuple(results),
            first_trial=self.trial(candidate, load, replicas, 0, short=False),
            clients=int(load) if question.load == "sessions" and candidate.session_s == 0.0 else None,
        )
        candidate.evaluations.append(evaluation)
        return evaluation

    def _settled(self, before: Sequence[TrialResult], wanted: int, found: Sequence[TrialResult]) -> bool:
        """Return whether no further replication can change the verdict."""
        return surely_missed(self.question.slos, [*before, *found], wanted)

    def trial(self, candidate: Candidate, load: float, replicas: int, replication: int, *, short: bool) -> Trial:
        """Return the trial of one simulation of a configuration."""
        assert candidate.trial is not None
        question, effort = self.question, self.question.effort
        length = effort.short if short else effort.long
        if question.load == "rate":
            requests = length.requests_at(load * candidate.turns_per_arrival, candidate.session_s * LIVES)
            how: dict[str, Any] = {"rate": load, "limit": requests}
        else:
            per_session = math.ceil(effort.per_session / (SHORT_SHARE if short else 1))
            warm_up = WARM_UP_PER_SESSION * int(load)
            requests = warm_up + min(max(length.requests_min, per_session * int(load)), length.requests_max)
            how = {"concurrency": int(load), "warm_up": warm_up, "limit": requests}
        base = replace(
            candidate.trial.base,
            workload=with_count(question.workload, requests),
            seed=question.seed + (replication if candidate.drawn else 0),
            **how,
        )
        return replace(
            candidate.trial,
            base=base,
            replicas=replicas,
            factor=1.0 if self.factors is None or short else self.factors[replication],
            resample=not short and not candidate.drawn and not self.systematic,
            give_up=True,
        )


def surely_missed(slos: Sequence[Slo], results: Sequence[TrialResult], wanted: int) -> bool:
    """Return whether the mean of `wanted` replications exceeds a bound even if all remaining values are 0."""
    if any(result.gave_up for result in results):
        return True
    for number, slo in enumerate(slos):
        if math.fsum(result.slos[number].value for result in results) > slo.bound_us * wanted:
            return True
    return False


def _without_samples(result: TrialResult) -> TrialResult:
    slos = tuple(msgspec.structs.replace(slo, samples=(), samples_failed=0) for slo in result.slos)
    return msgspec.structs.replace(result, slos=slos)


def rounded(rate: float) -> float:
    """Round a rate to three digits, the precision of the search, so that two searches try the same rates."""
    return float(f"{rate:.3g}")


# ----------------------------------------------------------------------------------------------------------------- plan


def prune(question: Question, candidates: Sequence[Candidate]) -> None:
    """Drop configurations that are worse than another one even with the greatest errors of short runs. Sets pruned."""
    running = [c for c in candidates if c.setup is not None and c.narrow_met is not None]
    if question.confirm_all or not running:
        return
    wanted = question.wanted
    if wanted is not None:
        bounds = {c.configuration.number: _replica_bounds(c, wanted) for c in running}
        for candidate in running:
            cheapest = min(  # of those that reject no more: a part of the load is no answer to the whole
                (c for c in running if c.narrow_rejected <= candidate.narrow_rejected),
                key=lambda c: (c.cost_per_hour(bounds[c.configuration.number][1]), c.configuration.number),
            )
            ceiling = cheapest.cost_per_hour(bounds[cheapest.configuration.number][1]) * PRUNE_MARGIN
            if candidate is cheapest:
                continue
            if candidate.cost_per_hour(bounds[candidate.configuration.number][0]) > ceiling:
                candidate.pruned = f"costs more than #{cheapest.configuration.number}"
        return
    measure = best_mixed(question, running)
    for candidate in running:
        if candidate is measure:
            continue
        for other in running:
            most = candidate.narrow_missed
            assert other.narrow_met is not None
            if other is candidate or most is None or not _same_gpus(candidate, other):
                continue
            if most * (1 - candidate.narrow_rejected) * PRUNE_MARGIN < other.narrow_met * (1 - other.narrow_rejected):
                candidate.pruned = f"serves less than #{other.configuration.number} on the same GPUs"
                break


def best_mixed(question: Question, running: Sequence[Candidate]) -> Candidate | None:
    """Return the mixed configuration that serves most in short runs, as the baseline of splits; None without one."""
    mixed = [c for c in running if question.splits and c.split is None]
    return max(mixed, key=lambda c: (c.narrow_met or 0.0, -c.configuration.number), default=None)


def candidates_to_narrow(question: Question, running: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates to narrow first: all, or of many splits the best on the same GPUs by the estimate."""
    if not question.splits or question.wanted is not None or question.confirm_all:
        return list(running)
    best: dict[tuple[str, int, bool], Candidate] = {}
    for candidate in running:
        key = (candidate.configuration.gpu, candidate.gpus * candidate.replicas, candidate.split is None)
        if key not in best or candidate.load_max > best[key].load_max:
            best[key] = candidate
    return [candidate for candidate in running if candidate in best.values()]


def hopeful(running: Sequence[Candidate], first: Sequence[Candidate]) -> list[Candidate]:
    """Return the other candidates that might serve more than the first ones in short runs. Sets pruned of the rest."""
    others = [candidate for candidate in running if candidate not in first]
    for candidate in others:
        for other in first:
            if other.narrow_met is None or not _same_total(candidate, other):
                continue
            if candidate.load_max < other.narrow_met:
                candidate.pruned = f"at best less than #{other.configuration.number}"
                break
    return [candidate for candidate in others if not candidate.pruned]


def pruned_too_early(question: Question, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return pruned candidates that long runs of the others do not show to be worse. Clears their `pruned`.

    A short run may promise more for a configuration than its long runs confirm, and no candidate may be dropped because
    of that.
    """
    confirmed = [c for c in candidates if c.best is not None]
    wanted = question.wanted
    in_vain = []
    for candidate in candidates:
        if not candidate.pruned:
            continue
        if wanted is not None:
            least_cost = candidate.cost_per_hour(_replica_bounds(candidate, wanted)[0])
            worse = any(
                c.cost_per_hour(_best(c).paid_replicas) < least_cost
                and _best(c).rejected_share <= candidate.narrow_rejected
                for c in confirmed
            )
        else:
            most = candidate.narrow_missed  # None: dropped because of its best case
            most = candidate.load_max if most is None else most
            most *= 1 - candidate.narrow_rejected
            worse = any(_same_gpus(c, candidate) and _best(c).served > most for c in confirmed)
        if not worse:
            candidate.pruned = ""
            in_vain.append(candidate)
    return in_vain


def _best(candidate: Candidate) -> Evaluation:
    assert candidate.best is not None
    return candidate.best


def _same_gpus(one: Candidate, other: Candidate) -> bool:
    """Return whether a load means the same for both: equal GPUs and replicas, or for splits equal GPUs in total."""
    if one.question.splits and one.question.gpus_max is not None:
        return _same_total(one, other)
    return (one.configuration.gpu, one.gpus) == (other.configuration.gpu, other.gpus)


def _same_total(one: Candidate, other: Candidate) -> bool:
    return (one.configuration.gpu, one.gpus * one.replicas) == (other.configuration.gpu, other.gpus * other.replicas)


def _replica_bounds(candidate: Candidate, load: float) -> tuple[int, int]:
    """Return the fewest and the most replicas that a load may require, according to short runs."""
    assert candidate.narrow_met is not None
    most = candidate.narrow_missed or candidate.load_max / candidate.replicas
    return max(math.ceil(load / (most * PRUNE_MARGIN)), 1), max(math.ceil(load / candidate.narrow_met), 1)


@dataclass(kw_only=True)
class Progress:
    """Callbacks on the progress of a plan."""

    stage: Callable[[str, int], None] = lambda name, searches: (
        None
    )  # called with the name of a new stage and its number of searches
    trial: Callable[[], None] = lambda: None  # called after each simulation
    search: Callable[[], None] = lambda: None  # called after each search


def run_plan(
    question: Question,
    candidates: Sequence[Candidate],
    workers: WorkerPool,
    ledger: TrialStore,
    progress: Progress | None = None,
) -> None:
    """Search every configuration that `prepare` returned. The results are stored in the candidates."""
    progress = progress or Progress()
    running = [candidate for candidate in candidates if candidate.setup is not None]
    searcher = Searcher(question, _factors(question, running))

    def narrow(some: Sequence[Candidate]) -> None:
        if some:
            drive([searcher.narrow(c) for c in some], workers, ledger, progress, "narrowing down")

    first = candidates_to_narrow(question, running)
    narrow(first)
    if len(first) < len(running):
        narrow(hopeful(running, first))
    prune(question, candidates)
    confirm = searcher.confirm_load if question.wanted is None else searcher.confirm_replicas
    left = [candidate for candidate in running if not candidate.pruned]
    while left:
        drive([confirm(c) for c in left], workers, ledger, progress, "confirming")
        left = pruned_too_early(question, candidates)
        narrow([c for c in left if c.narrow_met is None and c.narrow_missed is None])


def _factors(question: Question, running: Sequence[Candidate]) -> list[float] | None:
    """Return the draws of the engine's or the calibration's error, one per replication, for every configuration.

    Returns: None for the lower bound, `--engine none`: its interval does not contain its answer.
    """
    setups = [candidate.setup for candidate in running if candidate.setup is not None]
    if not setups or setups[0].calibration.engine == NONE:
        return None

    def width(setup: Setup) -> float:
        low, high = setup.calibration.interval("time", model=setup.model.name)
        return high / low

    setup = max(setups, key=width)  # one draw for all configurations, so that they are compared under one error
    draws = setup.calibration.factors(question.effort.replications_max, question.seed, setup.model.name)
    return [round(float(draw), 6) for draw in draws]


def drive(searches: Sequence[Search], workers: WorkerPool, ledger: TrialStore, progress: Progress, stage: str) -> None:
    """Run searches to their end. Each receives the results of its trials, or the first ones if these are enough.

    A free worker runs a trial that a search waits for or, if there is none, one that a search may need next. So results
    arrive in any order, and some are never needed. The results that a search receives depend on neither.
    """
    progress.stage(stage, len(searches))
    waiting: dict[int, TrialNeed] = {}

    def go_on(number: int, results: list[TrialResult] | None) -> None:
        while True:
            try:
                need = next(searches[number]) if results is None else searches[number].send(results)
            except StopIteration:
                waiting.pop(number, None)
                progress.search()
                return
            waiting[number] = need
            results = _enough(need, ledger)
            if results is None:
                return

    for number in range(len(searches)):
        go_on(number, None)
    while waiting:
        needs = [waiting[number] for number in sorted(waiting)]
        for trial in _to_run(needs, workers, ledger):
            if len(workers.running) >= workers.size:
                break
            workers.submit(trial)
        trial, result = workers.next_result()
        ledger.add(trial, result)
        progress.trial()
        for number in sorted(waiting):
            if trial in waiting[number].trials and (results := _enough(waiting[number], ledger)) is not None:
                go_on(number, results)


def _enough(need: TrialNeed, ledger: TrialStore) -> list[TrialResult] | None:
    """Return the shortest sufficient prefix of the results, or all of them; None while some are missing."""
    found: list[TrialResult] = []
    for trial in need.trials:
        result = ledger.find(trial)
        if result is None:
            return None
        found.append(result)
        if need.enough(found):
            break
    return found


def _to_run(needs: Sequence[TrialNeed], workers: WorkerPool, ledger: TrialStore) -> Iterator[Trial]:
    """Yield trials that neither run nor have a result: first the next one of each search, then the rest."""
    unknown = ([trial for trial in need.trials if ledger.find(trial) is None] for need in needs)
    later: list[Trial] = []
    for trials in unknown:
        later += trials[1:]
        if trials[0].key not in workers.running:
            yield trials[0]
    for trial in later:
        if trial.key not in workers.running:
            yield trial
