"""Which simulations are worth running. Every configuration is searched in two stages, and between them compared.

    estimate    the cost model alone: the best case of one engine                     no simulation
    narrow      short runs, one replication: from which load on the SLO is missed     a handful per configuration
    prune       those worse than another one whatever their long runs would show      no simulation
    confirm     long runs, replicated until the verdict is sure                       of those that are left

A load is a rate, or in a closed loop a number of sessions at a time; everything here holds of both.

A search is a generator: it yields the trials it needs next and is sent their results. It looks at nothing but its own
results, and stages end together, so the answer does not depend on the worker of a trial, or on the order. Where a few
results settle what many were asked for, a search gets the shortest beginning that does, however many are known by then:
more workers run replications side by side, one worker runs only those that are needed, and the answer is the same.

**Verdict.** A load is sustained if every SLO's interval lies within its bound: not the estimate alone, its upper end.
If only the estimate does, more replications are run; if that does not settle it, the load counts as missed. It is
missed for sure, and no further replication is run, once the others could be perfect and the mean be beyond the bound.

**Common random numbers.** Replication i has the same seed, so the same traffic and the same draw of the calibration's
error, in every configuration and at every rate: differences between them are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from lockstep.core.contract.config import DELAYER_SETTINGS, DRAFT_SETTINGS, TRANSFER_SETTINGS, TRIGGER_SETTINGS
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import options_of
from lockstep.sim.catalogue import load_gpu
from lockstep.sim.cluster.capacity_estimate import CapacityEstimate, estimate_capacity, new_prompt_tokens
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cost import CapacityError
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
from lockstep.sim.scenario.scenario import Scenario, names_where
from lockstep.sim.scenario.tier_options import HYBRID_KEYS, TIER_KEYS
from lockstep.sim.workload.generate import PREFIX
from lockstep.sim.workload.workload import Workload, WorkloadError, WorkloadSummary

NARROW_RATIO = 1.2  # short runs stop when the largest rate is known to this factor
NARROW_STEPS_MAX = 14
NARROW_LOWEST = 1 / 300  # of the estimate: a configuration that misses the SLO there misses it always
CONFIRM_STEPS_MAX = 12
PRUNE_MARGIN = 1.15  # what short runs may be wrong by, in either direction
SESSIONS_OVER_ESTIMATE = 4.0  # times what keeps an engine busy, before more of them make no difference any more
REPLICAS_MORE_MAX = 4  # times what one replica's short runs suggest, before a rate counts as out of reach

Status = Literal["met", "missed", "undecided"]


class TrialNeed(NamedTuple):
    """Trials whose results a search waits for: all of them, or the first ones if those are enough."""

    trials: list[Trial]
    enough: Callable[[Sequence[TrialResult]], bool] = lambda results: False


Search = Generator[TrialNeed, list[TrialResult], None]


# ------------------------------------------------------------------------------------------------------- one evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A configuration under one load, with as many replications as it took."""

    load: float  # arrivals per second, or sessions at a time
    replicas: int
    status: Status
    intervals: tuple[Interval, ...]  # one per SLO, microseconds
    results: tuple[TrialResult, ...]
    first_trial: Trial  # what the first of the results came of

    @property
    def paid_replicas(self) -> float:
        """Replicas that cost something, on average: fewer than there may be where they come and go."""
        known = [result.replicas_mean for result in self.results if result.replicas_mean is not None]
        return math.fsum(known) / len(known) if known else self.replicas

    @property
    def met(self) -> bool:
        return self.status == "met"

    def mean(self, part: str, name: str) -> float | None:
        """Of a number of the summary, over the replications."""
        values = [result.summary[part][name] for result in self.results]
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known else None


def judge(
    slos: Sequence[Slo], results: Sequence[TrialResult], confidence: float, *, systematic: bool
) -> tuple[Status, tuple[Interval, ...]]:
    """Whether every bound holds, as far as these replications say."""
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
    # Without draws an interval is unbounded: then the value has to do.
    highs = [i.value if len(results) == 1 and math.isinf(i.low) else i.high for i in intervals]
    sure = all(high <= bound for high, bound in zip(highs, bounds, strict=True))
    return "met" if sure else "undecided", tuple(intervals)


# ------------------------------------------------------------------------------------------------------------ candidate


@dataclass(kw_only=True)
class Candidate:
    """A configuration and what is known of it so far."""

    configuration: Configuration
    question: Question
    setup: Setup | None = None  # None: it cannot run, see `unfit`; of decode engines where others prefill
    prefill_setup: Setup | None = None  # of these others
    unfit: str = ""
    trial: Trial | None = None  # of one replica; rate, limit, seed and factor are filled in
    drawn: bool = False  # another seed makes another workload
    estimate: CapacityEstimate | None = None  # of one replica: one engine, or some of each kind
    session_s: float = 0.0  # that a session's users think, on average
    turns_per_arrival: float = 1.0  # a rate counts arrivals by the clock, sessions; each has so many requests
    usd_per_gpu_hour: float | None = None
    price_source: str = ""
    replicas: int = 1  # searched with in `narrow`, and in `confirm` where the largest load is asked for
    narrow_met: float | None = None  # the largest load that a short run sustained
    narrow_missed: float | None = None  # the smallest one that it did not
    pruned: str = ""  # why it was not confirmed
    impossible: Evaluation | None = None  # the SLO is missed under the lowest load, too: this is what remains
    evaluations: list[Evaluation] = field(default_factory=list)  # long ones
    best: Evaluation | None = None  # the answer for this configuration
    missed: Evaluation | None = None  # the nearest one that was not sustained

    @property
    def estimated_load(self) -> float:
        """The best case of one replica: arrivals by the clock per second, or sessions that keep it busy all the time.

        The latter are, by Little's law, sessions that think and sessions that are served at its best.
        """
        assert self.estimate is not None
        if self.question.load == "rate":
            return self.estimate.requests_per_s / self.turns_per_arrival
        served_s = (self.estimate.prefill_us + self.estimate.decode_us * self.estimate.decode_rows) / 1e6
        return max(self.estimate.requests_per_s * (self.session_s / self.turns_per_arrival + served_s), 1.0)

    @property
    def load_max(self) -> float:
        """No more than this is tried. Not even the best case serves a higher rate; more sessions than this all wait."""
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
        """How prefill and decode are shared out; None if all engines do both."""
        chosen, common = self.configuration.chosen, self.question.common
        return parse_split(chosen.get(PREFILL_DECODE, common.get(PREFILL_DECODE, MIXED)))

    def usd_per_hour(self, replicas: float) -> float | None:
        return None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour * replicas * self.gpus

    def cost_per_hour(self, replicas: float) -> float:
        """What is minimised: dollars, or GPUs where some GPU has no price."""
        usd = self.usd_per_hour(replicas)
        return float(replicas * self.gpus) if usd is None else usd


def prepare(question: Question) -> tuple[list[Candidate], Workload]:
    """Load what the question names, and work out the configurations that fit and their best case."""
    effort = question.effort
    limit = effort.long.requests_min
    load = {name: value for name, value in question.common.items() if name in names_where("of_load")}
    workload = open_load(
        Scenario(
            model=question.model,
            gpu="",
            workload=with_count(question.workload, limit),
            seed=question.seed,
            concurrency=1 if question.load == "sessions" else None,
            limit=limit,
            **load,
        )
    )
    if question.load == "rate" and len(workload.turns.by_clock_rows) < 2:
        problem = "it has one arrival, which is at no rate: any would count as sustained"
        raise WorkloadError(question.workload, problem, "a longer trace, or --load sessions")
    _check_gpus(question)
    summary = workload.summary()
    content = " ".join([code_version(), code_commit() or "", *(file_digest(path) for path in content_files(question))])
    drawn = question.load == "sessions" or is_drawn(workload)  # of a closed loop, the order of its sessions is
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
        for candidate in candidates:  # dollars beside GPU-hours cannot be compared
            candidate.usd_per_gpu_hour = None
    return candidates, workload


def _setups_of(trial: Trial, workload: Workload) -> tuple[Setup, Setup | None]:
    """Of its engines; where these hand over, of the decode engines and of the prefill engines."""
    scenario = trial.scenario()
    if trial.split is None:
        return assemble(scenario.base, {}, workload=workload), None
    cluster = assemble_cluster(scenario, {}, workload=workload)
    return cluster.engines[-1], cluster.engines[0]


def _estimate(candidate: Candidate, setup: Setup, summary: WorkloadSummary) -> CapacityEstimate:
    """Of one replica. Where prefill and decode are shared out, the slower side decides, or the links between them."""
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
    link_gpus = min(side.engines * one.split.gpus for side, one in ((split.prefill, prefill), (split.decode, setup)))
    rates = (
        split.prefill.engines * 1e6 / max(prefill_us, 1e-3),
        split.decode.engines * 1e6 / max(own.decode_us, 1e-3),
        links.link_gbs * 1e9 * link_gpus / kv_bytes,
    )
    return CapacityEstimate(min(rates), prefill_us, own.decode_us, own.decode_rows)


def _check_gpus(question: Question) -> None:
    """Raises ConfigError if two names are of one GPU, and CatalogueError for one that is none."""
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
    if tiers.get("hybrid_memory") == "off":  # searched beside `on`, which the others are about
        tiers = {name: value for name, value in tiers.items() if name not in HYBRID_KEYS}
    router = question.router
    if "router" in chosen:
        router = msgspec.structs.replace(router, policy=chosen.pop("router"))
    settings = {**question.settings, **chosen}
    if chosen.get("prefill_delayer") is False:  # searched beside one that the rest is about
        delays = (*DELAYER_SETTINGS, *TRIGGER_SETTINGS)
        settings = {name: value for name, value in settings.items() if name not in delays}
    split = own.pop(PREFILL_DECODE, common.pop(PREFILL_DECODE, MIXED))
    common.pop(PREFILL_DECODE, None)
    if split == MIXED and question.splits:  # beside splits, which the rest is about
        common = {name: value for name, value in common.items() if name not in LINK_KEYS}
        settings = {name: value for name, value in settings.items() if name not in TRANSFER_SETTINGS}
    if chosen.get("speculative_method") == "none":  # searched beside methods that the rest is about
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
    """A generator that does not say how many requests it makes makes as many as are simulated."""
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
        """`factors`: a draw of the calibration's error for each replication; None without a calibration."""
        self.question = question
        self.factors = factors
        self.systematic = factors is not None

    def narrow(self, candidate: Candidate) -> Search:
        """Find by short runs between which loads the SLO begins to be missed. Sets narrow_met and narrow_missed."""
        best_case = candidate.estimated_load * candidate.replicas
        most = self.rounded(best_case if self.question.load == "rate" else candidate.load_max)
        load = self.rounded(best_case * 0.6)
        for _ in range(NARROW_STEPS_MAX):
            trial = self.trial(candidate, load, candidate.replicas, 0, short=True)
            (result,) = yield TrialNeed([trial])
            status, _ = judge(self.question.slos, [_without_samples(result)], 0.5, systematic=False)
            if status == "met":
                candidate.narrow_met = load
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
                return  # so short a run does not get to miss anything; long ones will
            else:
                load = min(self.beyond(load, 1.6), most)

    def confirm_load(self, candidate: Candidate) -> Search:
        """Find by long runs the largest load that is sustained. Sets best and missed, or impossible."""
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
        """Find by long runs how few replicas sustain the load asked for. Sets best and missed, or impossible."""
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

    # Loads: of a rate three digits, since none is known better; of sessions whole ones.

    def rounded(self, load: float) -> float:
        """As loads are tried, so that two searches meet at the same ones."""
        return rounded(load) if self.question.load == "rate" else float(max(round(rounded(load)), 1))

    def close(self, met: float, missed: float, ratio: float) -> bool:
        """Whether nothing is left to try between two loads."""
        return missed / met <= ratio or (self.question.load == "sessions" and missed - met <= 1)

    def between(self, met: float, missed: float) -> float:
        """The load to try between two."""
        load = self.rounded(math.sqrt(met * missed))
        return load if self.question.load == "rate" else min(max(load, met + 1), missed - 1)

    def beyond(self, load: float, factor: float) -> float:
        """A load above or below another one."""
        further = self.rounded(load * factor)
        if self.question.load == "rate" or further != load:
            return further
        return load + 1 if factor > 1 else max(load - 1, 1.0)

    def lowest(self, candidate: Candidate) -> float:
        """The load under which a configuration that misses the SLO misses it always."""
        return self.rounded(candidate.estimated_load * candidate.replicas * NARROW_LOWEST)

    def _lowest_load(self, candidate: Candidate) -> Generator[TrialNeed, list[TrialResult], None]:
        """What remains under the lowest load: the best that can be had, bursts included. Sets impossible."""
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
        """Run replications until the verdict is sure, or there are enough of them."""
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
        )
        candidate.evaluations.append(evaluation)
        return evaluation

    def _settled(self, before: Sequence[TrialResult], wanted: int, found: Sequence[TrialResult]) -> bool:
        """Whether no further replication can help."""
        return surely_missed(self.question.slos, [*before, *found], wanted)

    def trial(self, candidate: Candidate, load: float, replicas: int, replication: int, *, short: bool) -> Trial:
        """One simulation of a configuration."""
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
    """Whether the mean of `wanted` replications is beyond a bound whatever those to come find: no time is below 0."""
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
    """Three digits: no rate is known better, and two searches meet at the same ones."""
    return float(f"{rate:.3g}")


# ----------------------------------------------------------------------------------------------------------------- plan


def prune(question: Question, candidates: Sequence[Candidate]) -> None:
    """Leave out configurations worse than another even if short runs were as wrong as they may be. Sets pruned."""
    running = [c for c in candidates if c.setup is not None and c.narrow_met is not None]
    if question.confirm_all or not running:
        return
    wanted = question.wanted
    if wanted is not None:
        bounds = {c.configuration.number: _replica_bounds(c, wanted) for c in running}
        cheapest = min(
            running, key=lambda c: (c.cost_per_hour(bounds[c.configuration.number][1]), c.configuration.number)
        )
        ceiling = cheapest.cost_per_hour(bounds[cheapest.configuration.number][1]) * PRUNE_MARGIN
        for candidate in running:
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
            if most * PRUNE_MARGIN < other.narrow_met:
                candidate.pruned = f"serves less than #{other.configuration.number} on the same GPUs"
                break


def best_mixed(question: Question, running: Sequence[Candidate]) -> Candidate | None:
    """Of engines that do both those that serve most, by short runs: what splits are measured against. None without."""
    mixed = [c for c in running if question.splits and c.split is None]
    return max(mixed, key=lambda c: (c.narrow_met or 0.0, -c.configuration.number), default=None)


def promising(question: Question, running: Sequence[Candidate]) -> list[Candidate]:
    """Candidates to narrow down first: all; of many splits the best by the estimate on the same GPUs."""
    if not question.splits or question.wanted is not None or question.confirm_all:
        return list(running)
    best: dict[tuple[str, int, bool], Candidate] = {}
    for candidate in running:
        key = (candidate.configuration.gpu, candidate.gpus * candidate.replicas, candidate.split is None)
        if key not in best or candidate.load_max > best[key].load_max:
            best[key] = candidate
    return [candidate for candidate in running if candidate in best.values()]


def hopeful(running: Sequence[Candidate], first: Sequence[Candidate]) -> list[Candidate]:
    """Other candidates that might serve more than the first ones in short runs. Sets pruned of the rest."""
    others = [candidate for candidate in running if candidate not in first]
    for candidate in others:
        for other in first:
            if other.narrow_met is None or not _same_total(candidate, other):
                continue
            if candidate.load_max < other.narrow_met:
                candidate.pruned = f"at best less than #{other.configuration.number}"
                break
    return [candidate for candidate in others if not candidate.pruned]


def pruned_in_vain(question: Question, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates left out that long runs of the others do not show to be worse after all. Clears `pruned`, and returns
    them.

    A short run may say more for a configuration than its long ones confirm; no candidate may be left out for that.
    """
    confirmed = [c for c in candidates if c.best is not None]
    wanted = question.wanted
    in_vain = []
    for candidate in candidates:
        if not candidate.pruned:
            continue
        if wanted is not None:
            least_cost = candidate.cost_per_hour(_replica_bounds(candidate, wanted)[0])
            worse = any(c.cost_per_hour(_best(c).paid_replicas) < least_cost for c in confirmed)
        else:
            most = candidate.narrow_missed  # None: it was left out for its best case
            most = candidate.load_max if most is None else most
            worse = any(_same_gpus(c, candidate) and _best(c).load > most for c in confirmed)
        if not worse:
            candidate.pruned = ""
            in_vain.append(candidate)
    return in_vain


def _best(candidate: Candidate) -> Evaluation:
    assert candidate.best is not None
    return candidate.best


def _same_gpus(one: Candidate, other: Candidate) -> bool:
    """Whether a load means the same of both: so many replicas of so many GPUs, or of splits so many GPUs in all."""
    if one.question.splits and one.question.gpus_max is not None:
        return _same_total(one, other)
    return (one.configuration.gpu, one.gpus) == (other.configuration.gpu, other.gpus)


def _same_total(one: Candidate, other: Candidate) -> bool:
    return (one.configuration.gpu, one.gpus * one.replicas) == (other.configuration.gpu, other.gpus * other.replicas)


def _replica_bounds(candidate: Candidate, load: float) -> tuple[int, int]:
    """The fewest and the most replicas that a load may take, by short runs."""
    assert candidate.narrow_met is not None
    most = candidate.narrow_missed or candidate.load_max / candidate.replicas
    return max(math.ceil(load / (most * PRUNE_MARGIN)), 1), max(math.ceil(load / candidate.narrow_met), 1)


@dataclass(kw_only=True)
class Progress:
    """Told as the plan goes on."""

    stage: Callable[[str, int], None] = lambda name, searches: None  # a stage begins, with so many searches
    trial: Callable[[], None] = lambda: None  # a simulation ended
    search: Callable[[], None] = lambda: None  # a search ended


def run_plan(
    question: Question,
    candidates: Sequence[Candidate],
    workers: WorkerPool,
    ledger: TrialStore,
    progress: Progress | None = None,
) -> None:
    """Search every configuration that `prepare` made. What is found is written into the candidates."""
    progress = progress or Progress()
    running = [candidate for candidate in candidates if candidate.setup is not None]
    searcher = Searcher(question, _factors(question, running))

    def narrow(some: Sequence[Candidate]) -> None:
        if some:
            drive([searcher.narrow(c) for c in some], workers, ledger, progress, "narrowing down")

    first = promising(question, running)
    narrow(first)
    if len(first) < len(running):
        narrow(hopeful(running, first))
    prune(question, candidates)
    confirm = searcher.confirm_load if question.wanted is None else searcher.confirm_replicas
    left = [candidate for candidate in running if not candidate.pruned]
    while left:
        drive([confirm(c) for c in left], workers, ledger, progress, "confirming")
        left = pruned_in_vain(question, candidates)
        narrow([c for c in left if c.narrow_met is None and c.narrow_missed is None])


def _factors(question: Question, running: Sequence[Candidate]) -> list[float] | None:
    """The calibration's draws, one per replication, as they are for every configuration; None without one."""
    if not question.common.get("calibration") or not running:
        return None
    setup = running[0].setup
    assert setup is not None
    draws = setup.calibration.factors(question.effort.replications_max, question.seed, setup.model.name)
    return [round(float(draw), 6) for draw in draws]


def drive(searches: Sequence[Search], workers: WorkerPool, ledger: TrialStore, progress: Progress, stage: str) -> None:
    """Run searches to their end, each sent the results of its trials, or the first ones if they are enough.

    A free worker runs what a search waits for now; if there is nothing of that, what it may need next. So results
    come in any order, and some that no search needs: what is sent depends on neither.
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
    """The shortest beginning of the results that will do, or all; None while it is not known yet."""
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
    """Trials that no worker has run or runs: first the next one of each search, then those that may not be needed."""
    unknown = ([trial for trial in need.trials if ledger.find(trial) is None] for need in needs)
    later: list[Trial] = []
    for trials in unknown:
        later += trials[1:]
        if trials[0].key not in workers.running:
            yield trials[0]
    for trial in later:
        if trial.key not in workers.running:
            yield trial
