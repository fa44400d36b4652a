"""Which simulations are worth running. Every configuration is searched in two stages, and between them compared.

    estimate    the cost model alone: the best case of one engine                     no simulation
    narrow      short runs, one replication: from which rate on the SLO is missed     a handful per configuration
    prune       who is worse than another one whatever its long runs say              no simulation
    confirm     long runs, replicated until the verdict is sure                       of those that are left

A search is a generator: it yields the trials it needs next and is sent their results. It looks at nothing but its own
results, and stages end together, so the answer does not depend on who ran what, or in which order.

**Verdict.** A rate is sustained if every SLO's interval lies within its bound: not the estimate alone, its upper end.
If only the estimate does, more replications are run; if that does not settle it, the rate counts as missed.

**Common random numbers.** Replication i has the same seed, so the same traffic and the same draw of the calibration's
error, in every configuration and at every rate: differences between them are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from lockstep.sim.capacity_estimate import CapacityEstimate, estimate_capacity
from lockstep.sim.cost import CapacityError
from lockstep.sim.generate import PREFIX
from lockstep.sim.metrics import Slo
from lockstep.sim.plan.interval import Interval, interval_of, interval_of_samples
from lockstep.sim.plan.ledger import Ledger
from lockstep.sim.plan.question import (
    LIVES,
    OWN_KEYS,
    Configuration,
    Question,
    content_files,
    is_drawn,
    price_of,
)
from lockstep.sim.plan.trial import Trial, TrialResult, file_digest
from lockstep.sim.plan.workers import Crew
from lockstep.sim.simulate import Setup, assemble, code_commit, code_version
from lockstep.sim.workload import Workload, open_workload

NARROW_RATIO = 1.2  # short runs stop when the largest rate is known to this factor
NARROW_STEPS_MAX = 14
NARROW_LOWEST = 1 / 300  # of the estimate: whoever misses the SLO there misses it always
CONFIRM_STEPS_MAX = 12
PRUNE_MARGIN = 1.15  # what short runs may be wrong by, in either direction
REPLICAS_MORE_MAX = 4  # times what one replica's short runs suggest, before a rate counts as out of reach

Status = Literal["met", "missed", "undecided"]
Search = Generator[list[Trial], list[TrialResult], None]


# ------------------------------------------------------------------------------------------------------- one evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A configuration at one rate, with as many replications as it took."""

    rate: float
    replicas: int
    status: Status
    intervals: tuple[Interval, ...]  # one per SLO, microseconds
    results: tuple[TrialResult, ...]
    first_trial: Trial  # what the first of the results came of

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
    setup: Setup | None = None  # None: it cannot run, see `unfit`
    unfit: str = ""
    trial: Trial | None = None  # of one replica; rate, limit, seed and factor are filled in
    drawn: bool = False  # another seed makes another workload
    estimate: CapacityEstimate | None = None  # of one engine
    session_s: float = 0.0  # that a session's users think, on average
    turns_per_arrival: float = 1.0  # a rate counts arrivals by the clock, sessions; each has so many requests
    usd_per_gpu_hour: float | None = None
    price_source: str = ""
    replicas: int = 1  # searched with in `narrow`, and in `confirm` where the largest rate is asked for
    narrow_met: float | None = None  # the largest rate that a short run sustained
    narrow_missed: float | None = None  # the smallest one that it did not
    pruned: str = ""  # why it was not confirmed
    impossible: Evaluation | None = None  # the SLO is missed at the lowest rate, too: this is what remains
    evaluations: list[Evaluation] = field(default_factory=list)  # long ones
    best: Evaluation | None = None  # the answer for this configuration
    missed: Evaluation | None = None  # the nearest one that was not sustained

    @property
    def estimated_rate(self) -> float:
        """The best case of one engine, in arrivals by the clock."""
        assert self.estimate is not None
        return self.estimate.requests_per_s / self.turns_per_arrival

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        chosen, common = self.configuration.chosen, self.question.common
        return math.prod(int(chosen.get(name, common.get(name, 1))) for name in ("tp", "pp"))

    def usd_per_hour(self, replicas: int) -> float | None:
        return None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour * replicas * self.gpus

    def cost_per_hour(self, replicas: int) -> float:
        """What is minimised: dollars, or GPUs where some GPU has no price."""
        usd = self.usd_per_hour(replicas)
        return float(replicas * self.gpus) if usd is None else usd


def prepare(question: Question) -> tuple[list[Candidate], Workload]:
    """Load what the question names, and work out who fits and how fast it could be at best."""
    effort = question.effort
    limit = effort.long.requests_min
    workload_text = with_count(question.workload, limit)
    skip_bad_rows = bool(question.common.get("skip_bad_rows", False))
    workload = open_workload(workload_text, seed=question.seed, limit=limit, skip_bad_rows=skip_bad_rows)
    summary = workload.summary()
    content = " ".join([code_version(), code_commit() or "", *(file_digest(path) for path in content_files(question))])
    candidates = []
    for configuration in question.configurations():
        candidate = Candidate(configuration=configuration, question=question, drawn=is_drawn(workload))
        trial = _trial_of(question, configuration, content)
        try:
            setup = assemble(trial.scenario().base, {}, workload=workload)
        except CapacityError as error:
            candidate.unfit = str(error).partition("\nhint:")[0]
        else:
            candidate.setup = setup
            candidate.trial = trial
            candidate.estimate = estimate_capacity(setup.cost, setup.config, summary)
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


def _trial_of(question: Question, configuration: Configuration, content: str) -> Trial:
    chosen = dict(configuration.chosen)
    own = {key: chosen.pop(key) for key in OWN_KEYS if key != "router" and key in chosen}
    router = question.router
    if "router" in chosen:
        router = msgspec.structs.replace(router, policy=chosen.pop("router"))
    settings = {**question.settings, **chosen}
    return Trial(
        model=question.model,
        gpu=configuration.gpu,
        workload=question.workload,
        replicas=1,
        rate=1.0,
        limit=None,
        seed=question.seed,
        settings={name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
        router=router,
        hop_us=question.hop_us,
        slos=tuple(map(str, question.slos)),
        content=content,
        **(dict(question.common) | own),
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
        """Find by short runs between which rates the SLO begins to be missed. Sets narrow_met and narrow_missed."""
        best_case = candidate.estimated_rate * candidate.replicas
        rate = rounded(best_case * 0.6)
        for _ in range(NARROW_STEPS_MAX):
            trial = self.trial(candidate, rate, candidate.replicas, 0, short=True)
            (result,) = yield [trial]
            status, _ = judge(self.question.slos, [_without_samples(result)], 0.5, systematic=False)
            if status == "met":
                candidate.narrow_met = rate
            else:
                candidate.narrow_missed = rate
            met, missed = candidate.narrow_met, candidate.narrow_missed
            if met is not None and missed is not None:
                if missed / met <= NARROW_RATIO:
                    return
                rate = rounded(math.sqrt(met * missed))
            elif missed is not None:
                if missed <= best_case * NARROW_LOWEST:
                    return
                rate = rounded(missed / 3)
            elif rate >= best_case:
                return  # so short a run does not get to miss anything; long ones will
            else:
                rate = rounded(min(rate * 1.6, best_case))

    def confirm_rate(self, candidate: Candidate) -> Search:
        """Find by long runs the largest rate that is sustained. Sets best and missed, or impossible."""
        precision = self.question.effort.precision
        if candidate.narrow_met is None:
            yield from self._lowest_rate(candidate)
            return
        rate = candidate.narrow_met
        step = 1 + 2 * precision
        tried: list[float] = []
        for _ in range(CONFIRM_STEPS_MAX):
            if rate in tried:
                break
            tried.append(rate)
            evaluation = yield from self._evaluate(candidate, rate, candidate.replicas)
            if evaluation.met:
                candidate.best = evaluation
            else:
                candidate.missed = evaluation
            met, missed = candidate.best, candidate.missed
            if met is not None and missed is not None:
                if missed.rate / met.rate <= 1 + precision:
                    break
                rate = rounded(math.sqrt(met.rate * missed.rate))
            else:
                rate = rounded(rate / step if met is None else rate * step)
                step = min(step * step, 4.0)
        if candidate.best is None:
            yield from self._lowest_rate(candidate)

    def confirm_replicas(self, candidate: Candidate) -> Search:
        """Find by long runs how few replicas sustain the rate asked for. Sets best and missed, or impossible."""
        rate = self.question.rate
        assert rate is not None
        if candidate.narrow_met is None:
            yield from self._lowest_rate(candidate)
            return
        first = math.ceil(rate / candidate.narrow_met)
        least = max(math.ceil(rate / (candidate.estimated_rate * PRUNE_MARGIN)), 1)
        replicas = max(first, least)
        most = replicas * REPLICAS_MORE_MAX + REPLICAS_MORE_MAX
        while least <= replicas <= most:
            evaluation = yield from self._evaluate(candidate, rate, replicas)
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

    def _lowest_rate(self, candidate: Candidate) -> Generator[list[Trial], list[TrialResult], None]:
        """What remains when hardly anybody comes: the best that can be had, bursts included. Sets impossible."""
        rate = rounded(candidate.estimated_rate * candidate.replicas * NARROW_LOWEST)
        trial = self.trial(candidate, rate, candidate.replicas, 0, short=True)
        (result,) = yield [msgspec.structs.replace(trial, give_up=False)]
        results = [_without_samples(result)]
        status, intervals = judge(self.question.slos, results, 0.5, systematic=False)
        candidate.impossible = Evaluation(
            rate=rate,
            replicas=candidate.replicas,
            status=status,
            intervals=intervals,
            results=tuple(results),
            first_trial=trial,
        )

    def _evaluate(
        self, candidate: Candidate, rate: float, replicas: int
    ) -> Generator[list[Trial], list[TrialResult], Evaluation]:
        """Run replications until the verdict is sure, or there are enough of them."""
        effort, question = self.question.effort, self.question
        replicated = candidate.drawn or self.systematic
        wanted = effort.replications_min if replicated else 1
        results: list[TrialResult] = []
        while True:
            trials = [self.trial(candidate, rate, replicas, i, short=False) for i in range(len(results), wanted)]
            results += yield trials
            status, intervals = judge(question.slos, results, question.confidence, systematic=self.systematic)
            if status != "undecided" or wanted >= effort.replications_max or not replicated:
                break
            wanted = min(wanted + 2, effort.replications_max)
        evaluation = Evaluation(
            rate=rate,
            replicas=replicas,
            status=status,
            intervals=intervals,
            results=tuple(results),
            first_trial=self.trial(candidate, rate, replicas, 0, short=False),
        )
        candidate.evaluations.append(evaluation)
        return evaluation

    def trial(self, candidate: Candidate, rate: float, replicas: int, replication: int, *, short: bool) -> Trial:
        """One simulation of a configuration."""
        assert candidate.trial is not None
        question, effort = self.question, self.question.effort
        length = effort.short if short else effort.long
        limit = length.requests_at(rate * candidate.turns_per_arrival, candidate.session_s * LIVES)
        return msgspec.structs.replace(
            candidate.trial,
            workload=with_count(question.workload, limit),
            rate=rate,
            limit=limit,
            replicas=replicas,
            seed=question.seed + (replication if candidate.drawn else 0),
            factor=1.0 if self.factors is None or short else self.factors[replication],
            resample=not short and not candidate.drawn and not self.systematic,
            give_up=True,
        )


def _without_samples(result: TrialResult) -> TrialResult:
    slos = tuple(msgspec.structs.replace(slo, samples=(), samples_failed=0) for slo in result.slos)
    return msgspec.structs.replace(result, slos=slos)


def rounded(rate: float) -> float:
    """Three digits: no rate is known better, and two searches meet at the same ones."""
    return float(f"{rate:.3g}")


# ----------------------------------------------------------------------------------------------------------------- plan


def prune(question: Question, candidates: Sequence[Candidate]) -> None:
    """Leave out who is worse than another one even if its short runs were as wrong as they may be. Sets pruned."""
    running = [c for c in candidates if c.setup is not None and c.narrow_met is not None]
    if question.confirm_all or not running:
        return
    if question.rate is not None:
        bounds = {c.configuration.number: _replica_bounds(c, question.rate) for c in running}
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
    for candidate in running:
        for other in running:
            same_gpus = (other.configuration.gpu, other.gpus) == (candidate.configuration.gpu, candidate.gpus)
            most = candidate.narrow_missed
            assert other.narrow_met is not None
            if same_gpus and most is not None and most * PRUNE_MARGIN < other.narrow_met:
                candidate.pruned = f"serves less than #{other.configuration.number} on the same GPUs"
                break


def _replica_bounds(candidate: Candidate, rate: float) -> tuple[int, int]:
    """The fewest and the most replicas that the rate may take, by short runs."""
    assert candidate.narrow_met is not None
    most = candidate.narrow_missed or candidate.estimated_rate
    return max(math.ceil(rate / (most * PRUNE_MARGIN)), 1), max(math.ceil(rate / candidate.narrow_met), 1)


@dataclass(kw_only=True)
class Progress:
    """Told as the plan goes on."""

    stage: Callable[[str, int], None] = lambda name, searches: None  # a stage begins, with so many searches
    trial: Callable[[], None] = lambda: None  # a simulation ended
    search: Callable[[], None] = lambda: None  # a search ended


def run_plan(
    question: Question, candidates: Sequence[Candidate], crew: Crew, ledger: Ledger, progress: Progress | None = None
) -> None:
    """Search every configuration that `prepare` made. What is found is written into the candidates."""
    progress = progress or Progress()
    running = [candidate for candidate in candidates if candidate.setup is not None]
    searcher = Searcher(question, _factors(question, running))
    drive([searcher.narrow(c) for c in running], crew, ledger, progress, "narrowing down")
    prune(question, candidates)
    left = [candidate for candidate in running if not candidate.pruned]
    confirm = searcher.confirm_rate if question.rate is None else searcher.confirm_replicas
    drive([confirm(c) for c in left], crew, ledger, progress, "confirming")


def _factors(question: Question, running: Sequence[Candidate]) -> list[float] | None:
    """The calibration's draws, one per replication, as they are for every configuration; None without one."""
    if not question.common.get("calibration") or not running:
        return None
    setup = running[0].setup
    assert setup is not None
    draws = setup.calibration.factors(question.effort.replications_max, question.seed, setup.model.name)
    return [round(float(draw), 6) for draw in draws]


def drive(searches: Sequence[Search], crew: Crew, ledger: Ledger, progress: Progress, stage: str) -> None:
    """Run searches to their end, each sent its results in the order of its trials as soon as all are there."""
    progress.stage(stage, len(searches))
    asked: dict[int, list[Trial]] = {}
    wanted_by: dict[str, list[int]] = {}  # keys of trials that run, to the searches that wait for them

    def go_on(number: int, results: list[TrialResult] | None) -> None:
        while True:
            try:
                trials = next(searches[number]) if results is None else searches[number].send(results)
            except StopIteration:
                asked.pop(number, None)
                progress.search()
                return
            asked[number] = trials
            missing = [trial for trial in trials if ledger.find(trial) is None]
            for trial in missing:
                if trial.key not in wanted_by:
                    crew.submit(trial)
                wanted_by.setdefault(trial.key, []).append(number)
            if missing:
                return
            results = _found(ledger, trials)

    for number in range(len(searches)):
        go_on(number, None)
    while wanted_by:
        trial, result = crew.next_result()
        ledger.add(trial, result)
        progress.trial()
        for number in wanted_by.pop(trial.key):
            if all(ledger.find(needed) is not None for needed in asked[number]):
                go_on(number, _found(ledger, asked[number]))


def _found(ledger: Ledger, trials: Sequence[Trial]) -> list[TrialResult]:
    found = []
    for trial in trials:
        result = ledger.find(trial)
        assert result is not None
        found.append(result)
    return found
