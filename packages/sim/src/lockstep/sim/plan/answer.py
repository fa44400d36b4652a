"""The answer of a plan: one row per configuration, the winner, the Pareto front, and the commands that follow from it.

The answer is a function of the candidates, so equal searches produce equal bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from lockstep.host.options import number_word
from lockstep.sim.cluster.scenario import USUAL_PLACEMENT
from lockstep.sim.cost.engines import NONE
from lockstep.sim.cost.hardware import achieved, scale_up_gpus
from lockstep.sim.cost.power import Energy, Site, describe_energy, energy_line
from lockstep.sim.plan.interval import Interval
from lockstep.sim.plan.question import Question, has_calls, shown
from lockstep.sim.plan.search import Candidate, Evaluation
from lockstep.sim.plan.serve_command import serve_commands, simulate_command
from lockstep.sim.plan.sides import DEVICE_FULL, KV_FULL, limit_of_sides
from lockstep.sim.plan.trial import TrialResult
from lockstep.sim.plan.vllm_command import vllm_command
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.results.results import NOTHING, show_rate, show_share, show_us
from lockstep.sim.scenario.scenario import GRID_GCO2_PER_KWH, PUE

# routers that send a turn to the engine with the KV of the previous turn
KEEPS_SESSIONS = ("session_sticky", "prefix_affinity")

SIDES = (
    "prefill busy", "queue", "compute", "links busy", "transfer", "wait for pages", "decode busy", "KV peak", "rows",
)  # fmt: skip
SIDES_TITLE = "Prefill and decode at the load that each sustains (times: means)"

GOODPUT = (
    "requests per second that complete within every SLO's bound, a percentile's bound serving as each request's own"
)


# ------------------------------------------------------------------------------------------------------------- findings


def winner_of(question: Question, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the cheapest configuration that serves the load or, without a given load, the best one.

    Without a given load, the best one serves the largest load on `gpus_max` GPUs, or the largest load per cost.
    Requests that are rejected as invalid are not served; of a given load, the configuration that rejects least comes
    first.
    """
    able = [c for c in candidates if c.best is not None and c.best.served > 0]
    if not able:
        return None

    def preference(candidate: Candidate) -> tuple[float, ...]:
        best = candidate.best
        assert best is not None
        cost = candidate.cost_per_hour(best.paid_replicas)
        gpus = best.paid_replicas * candidate.gpus
        slack = max(_strain(candidate, best))
        if question.wanted is not None:
            return best.rejected_share, cost, gpus, slack
        if question.gpus_max is not None:
            return -best.served, cost, slack
        return cost / best.served, gpus, slack

    return min(able, key=lambda c: (*preference(c), c.configuration.number))


def _strain(candidate: Candidate, evaluation: Evaluation) -> list[float]:
    """Return the share of each bound that is used up."""
    bounds = [slo.bound_us for slo in candidate.question.slos]
    return [interval.value / bound for interval, bound in zip(evaluation.intervals, bounds, strict=True)]


def usd_per_million(candidate: Candidate) -> float | None:
    """Return the dollars per million output tokens, at the load that was found; None without a price."""
    best = candidate.best
    assert best is not None
    usd, tokens_per_s = candidate.usd_per_hour(best.paid_replicas), best.steady("output_tokens_per_s")
    return None if usd is None or not tokens_per_s else usd / (tokens_per_s * 3600) * 1e6


def energy_per_million(candidate: Candidate) -> dict[str, Any] | None:
    """Return energy and carbon at the load that was found, see `describe_energy`; None if no power is known."""
    best, common = candidate.best, candidate.question.common
    assert best is not None
    results = [result for result in best.results if result.machine_kwh]
    tokens = sum(result.summary["throughput"]["output_tokens"] for result in results)
    if not tokens:
        return None
    energy = Energy(*(sum(kwh) for kwh in zip(*(result.machine_kwh for result in results), strict=True)))
    site = Site(common.get("pue", PUE), common.get("grid_gco2_per_kwh", GRID_GCO2_PER_KWH))
    hours = sum(result.summary["throughput"]["makespan_us"] for result in results) / 3.6e9
    return describe_energy(energy, site, tokens, hours * best.paid_replicas * candidate.gpus)


def gpu_hours_per_million(candidate: Candidate) -> float | None:
    """Return the GPU-hours per million output tokens, at the load that was found."""
    best = candidate.best
    assert best is not None
    tokens_per_s = best.steady("output_tokens_per_s")
    return None if not tokens_per_s else best.paid_replicas * candidate.gpus / (tokens_per_s * 3600) * 1e6


def pareto_front(question: Question, candidates: Sequence[Candidate]) -> frozenset[int]:
    """Return the numbers of the configurations that no other one beats in cost without a longer latency in some SLO.

    The cost is that of the load if one is given, else that of a million output tokens.
    """
    points: dict[int, tuple[float, ...]] = {}
    for candidate in candidates:
        if candidate.best is None:
            continue
        if question.wanted is not None:
            cost = candidate.cost_per_hour(candidate.best.paid_replicas)
        else:
            cost = usd_per_million(candidate) or gpu_hours_per_million(candidate) or math.inf
        points[candidate.configuration.number] = (cost, *(interval.value for interval in candidate.best.intervals))
    return frozenset(
        number
        for number, point in points.items()
        if not any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points.values()
        )
    )


def limit_of(candidate: Candidate) -> str:
    """Return the SLO that is missed first, and the resource that is exhausted then.

    If nothing was missed, because the estimate alone excludes fewer replicas, the SLO nearest to its bound is named.
    """
    nearest = candidate.missed or candidate.best
    if nearest is None:
        return ""
    number, _ = max(enumerate(_strain(candidate, nearest)), key=lambda pair: (pair[1], -pair[0]))
    slo = str(candidate.question.slos[number]).partition("=")[0]
    assert candidate.setup is not None
    rows_max, result = candidate.setup.config.max_running_requests, nearest.results[0]
    if candidate.split is None:
        return f"{_slo_name(slo)}: {_full_resource(result, rows_max)}"
    metric = slo.partition("_")[0]
    return f"{_slo_name(slo)}: {limit_of_sides(result.sides, metric, result.summary['latency'], rows_max)}"


def _full_resource(result: TrialResult, rows_max: int) -> str:
    kv, scheduler, device = (result.summary[part] for part in ("kv", "scheduler", "device"))
    waiting = (scheduler["waiting_max"] or 0) > 0
    if waiting and ((kv["used_share_max"] or 0.0) >= KV_FULL or scheduler["retractions"]):
        return "KV memory"
    if waiting and (scheduler["running_max"] or 0) >= rows_max:
        return "max_running_requests"
    if (device["busy_fraction"] or 0.0) >= DEVICE_FULL:
        if "pipeline" in device and (device["pipeline"]["stage_busy_share"] or 0.0) < DEVICE_FULL:
            return "pipeline bubbles"
        return "compute, prefill" if (result.extend_share or 0.0) >= 0.5 else "bandwidth, decode"
    return "bursts, queue"


def _slo_name(name: str) -> str:
    metric, _, statistic = name.partition("_")
    return f"{metric if metric in ('e2e', 'call') else metric.upper()} {statistic}".strip()


# ----------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Forecast:
    """The answer at a load that is `factor` times the one of the question."""

    factor: float
    load: float
    configuration: str | None  # None: none serves the load within the SLO
    replicas: int
    gpus: int
    usd_per_hour: float | None
    headline: str

    @classmethod
    def of(cls, factor: float, answer: PlanAnswer) -> Forecast:
        """Return the forecast of an answer."""
        winner, load = answer.winner, float(answer.question.wanted or 0.0)
        if winner is None or winner.best is None:
            return cls(factor, load, None, 0, 0, None, answer.headline)
        best = winner.best
        usd = winner.usd_per_hour(best.paid_replicas)
        gpus = best.replicas * winner.gpus
        return cls(factor, load, winner.configuration.name, best.replicas, gpus, usd, answer.headline)

    @property
    def line(self) -> str:
        """The answer in a line of text."""
        return f"at {self.factor:g} times the load: {self.headline}"


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """A finished plan."""

    question: Question
    candidates: Sequence[Candidate]
    workload_line: str
    forecast: tuple[Forecast, ...] = ()  # answers at other loads
    sample_line: str = ""  # how the simulated part of a trace differs from the whole one
    requests_if_short: int | None = None  # of a workload that ends before a long simulation would

    @property
    def winner(self) -> Candidate | None:
        return winner_of(self.question, self.candidates)

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        slos = " and ".join(map(str, self.question.slos))
        winner = self.winner
        if winner is None:
            return f"No configuration meets {slos}. {self._best_achievable()}"
        best = winner.best
        assert best is not None
        gpus = best.replicas * winner.gpus
        usd = winner.usd_per_hour(best.paid_replicas)
        cost = "" if usd is None else f", {usd:.2f} $/h"
        on = f"{gpus} GPU{'s' if gpus > 1 else ''}: {best.replicas} x ({winner.configuration.name})"
        rejected = rejections(winner, best)
        rejected = f"; {rejected}" if rejected else ""
        if self.question.wanted is not None:
            wanted = show_load(self.question, self.question.wanted)
            part = f"{_three(best.served)} of " if best.served < best.load else ""
            return f"{part}{wanted} within {slos} takes {on}{cost}{rejected}"
        return f"{on} sustains {show_load(self.question, float(_three(best.served)))} within {slos}{cost}{rejected}"

    def _best_achievable(self) -> str:
        """Return the values at the lowest load of the configuration that comes nearest to the SLOs."""
        tried = [c for c in self.candidates if c.impossible is not None]
        if not tried:
            if any(c.setup is not None for c in self.candidates):
                return "No tried number of replicas served the load."
            return "No configuration can run."
        nearest = min(tried, key=lambda c: (max(_strain(c, _known(c.impossible))), c.configuration.number))
        remains = _known(nearest.impossible)
        values = ", ".join(
            f"{_slo_name(str(slo).partition('=')[0])} {show_us(_finite(interval.value))}"
            for slo, interval in zip(self.question.slos, remains.intervals, strict=True)
        )
        at = f"{show_load(self.question, remains.load)}, the lowest load tried"
        return f"The best achievable, at {at}, is {values} on {nearest.configuration.name}."

    def remarks(self) -> list[str]:
        """Return the facts that are needed to read the numbers, one line each."""
        question = self.question
        if question.load == "sessions":
            unit = (
                "The load is sessions in progress at a time, pauses included: when a session ends, the next one begins"
            )
        elif has_calls(question.workload):
            unit = "Rates are calls per second, of several requests each"
        elif any(c.turns_per_arrival > 1 for c in self.candidates):
            unit = "Rates are sessions begun per second"
        else:
            unit = "Rates are requests per second"
        lines = [f"{unit}. Goodput: {GOODPUT}."]
        lines += [self.sample_line] if self.sample_line else []
        lines += [self._remark_on_the_end()] if self.requests_if_short is not None else []
        if not any(slo.metric in ("ttft", "e2e", "call") for slo in question.slos):
            lines.append("No SLO bounds the wait of a request: a load may count as sustained while the queue grows.")
        roaming = [c for c in self.candidates if c.trial is not None and c.trial.router.policy not in KEEPS_SESSIONS]
        several = not has_calls(question.workload)
        if several and any(c.turns_per_arrival > 1 and c.best is not None and c.best.replicas > 1 for c in roaming):
            lines.append(
                "Turns of a session go to any engine, with its KV or without; with --router session_sticky, to one."
            )
        sure = f"{100 * question.confidence:g} %"
        setups = [c.setup for c in self.candidates if c.setup is not None]
        engine = setups[0].calibration if setups else None
        lines += [f"{setups[0].model.name}: {note}." for note in setups[0].model.notes] if setups else []
        if engine is not None and engine.engine != NONE:
            lines.append(f"Times: {engine.line}.")
            what = "replications and the systematic error of the predicted times together"
        elif any(c.drawn for c in self.candidates):
            what = "replications with other seeds"
        else:
            what = "blocks of the trace drawn again"
        lines.append(f"A load is sustained if the {sure} interval of every SLO, from {what}, lies within its bound.")
        if engine is not None and engine.engine == NONE:
            low, high = engine.interval("time", 0.9, setups[0].model.name)
            lines.append(
                f"Times: {engine.line}. Not in the intervals: true times were {low:.2f} to {high:.2f} times the "
                "predicted ones on 125 public points of H100 (central 90 %). Leave out --engine none for an engine's "
                "times."
            )
        elif engine is not None:
            spans = {}
            for setup in setups:
                low, high = setup.calibration.interval("time", 0.9, setup.model.name)
                share = "90 % of left-out points" if setup.is_tested else "range, coverage not tested"
                spans[setup.gpu.name] = f"{low:.2f} to {high:.2f} on {setup.gpu.name} ({share})"
            lines.append(f"True times divided by predicted ones: {'; '.join(spans.values())}.")
        links = [c.trial.scenario() for c in self.candidates if c.trial is not None and c.split is not None]
        if links:
            speed = f"{links[0].link_gbs:g} GB/s per GPU and way, {show_us(links[0].link_latency_us)}"
            lines.append(f"The links between prefill and decode engines, as simulated: {speed}.")
            if (placed := {one.placement for one in links} - {USUAL_PLACEMENT}) and setups:
                inside, size = achieved(setups[0].gpu, "send_gbs").value, scale_up_gpus(setups[0].gpu)
                lines.append(
                    f"Racks, {' and '.join(sorted(placed))}: transfers within a domain of {size} GPUs take its links, "
                    f"{inside:g} GB/s per GPU; a request's decode engine is chosen by load, not by rack."
                )
        prices = sorted({(c.configuration.gpu, c.price_source) for c in self.candidates if c.price_source})
        if all(c.usd_per_gpu_hour is None for c in self.candidates):
            unknown = [(gpu, why) for gpu, why in prices if "has no price" in why]
            lines += [f"GPU-hours, no dollars: {why}; --price {gpu}=USD" for gpu, why in unknown]
        else:
            lines += [f"Price of {gpu}: {why}" for gpu, why in prices]
        if (winner := self.winner) is not None and (energy := energy_per_million(winner)) is not None:
            lines.append(f"The winner's {energy_line(energy)}.")
        setups += [c.prefill_setup for c in self.candidates if c.prefill_setup is not None]
        lines += [self._remark_on_rejections()] if self._rejecting else []
        if setups:
            lines += dict.fromkeys(line for setup in setups for line in setup.doubts())
        return lines

    def _remark_on_the_end(self) -> str:
        assert self.requests_if_short is not None
        ended = f"The workload ends after {self.requests_if_short:,} requests"
        if self.winner is not None and self.winner.best is not None:
            rate = self.winner.best.load * self.winner.turns_per_arrival
            ended += f", {show_us(1e6 * self.requests_if_short / rate)} at this load"
        return (
            f"{ended}: a queue that grows for longer is not seen, so the load may be too high. `lockstep workload fit "
            "TRACE -o more.json` and `--workload gen:file=more.json` draw as many similar ones as a simulation takes."
        )

    @property
    def _rejecting(self) -> bool:
        return any(c.best is not None and c.best.rejected_share for c in self.candidates)

    def _remark_on_rejections(self) -> str:
        counted = "" if self.question.load == "sessions" else ", and do not count in the rates above"
        return (
            f"Rejected requests (in brackets: their share of the prompt tokens) are never answered{counted}. "
            "--context-tokens-max admits longer prompts, if the model is published for such a context."
        )

    def table(self) -> Table:
        """Return a table with one line per configuration."""
        question, winner, front = self.question, self.winner, pareto_front(self.question, self.candidates)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("#", "configuration"):
            table.add_column(heading, no_wrap=True)
        priced = any(c.usd_per_gpu_hour is not None for c in self.candidates)
        headings = ["GPUs", "$/h" if priced else "GPU-h/h", "$/1M out" if priced else "GPU-h/1M"]
        headings += ["rate/s" if question.load == "rate" else "sessions", *(["rejected"] if self._rejecting else [])]
        headings += ["goodput"]
        for heading in (*headings, *(_slo_name(str(slo).partition("=")[0]) for slo in question.slos)):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("limited by")
        for candidate in self.candidates:
            number = candidate.configuration.number
            mark = ">" if candidate is winner else "*" if number in front else " "
            name = candidate.configuration.name
            best = candidate.best
            if best is None:
                empty = [NOTHING] * (len(headings) + len(question.slos))
                table.add_row(f"{mark}{number}", name, *empty, why_not(candidate))
                continue
            usd, million = candidate.usd_per_hour(best.paid_replicas), usd_per_million(candidate)
            gpus = best.replicas * candidate.gpus
            paid = number_word(float(f"{best.paid_replicas * candidate.gpus:.3g}"))
            gpu_hours = gpu_hours_per_million(candidate)
            table.add_row(
                f"{mark}{number}",
                name,
                (f"{gpus}" if best.replicas == 1 else f"{best.replicas}x{candidate.gpus}")
                + (f" (mean {paid})" if best.paid_replicas != best.replicas else ""),
                f"{usd:.2f}" if usd is not None else paid,
                (f"{million:.2f}" if million is not None else NOTHING)
                if priced
                else (f"{gpu_hours:.3g}" if gpu_hours else NOTHING),
                _load_text(candidate, best, question),
                *([_rejected_cell(best)] if self._rejecting else []),
                show_rate(best.steady("goodput_requests_per_s")),
                *(interval_text(interval) for interval in best.intervals),
                limit_of(candidate),
            )
        return table

    def sides_table(self) -> Table | None:
        """Return a table with one line per answered configuration with prefill and decode engines; None without any."""
        found = [c for c in self.candidates if c.split is not None and c.best is not None]
        if not found:
            return None
        table = Table(title=SIDES_TITLE, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("#", "configuration"):
            table.add_column(heading, no_wrap=True)
        for heading in SIDES:
            table.add_column(heading, justify="right", no_wrap=True)
        for candidate in found:
            sides = _known(candidate.best).results[0].sides
            prefill, transfer, decode = sides["prefill"], sides["transfer"], sides["decode"]
            table.add_row(
                f"{candidate.configuration.number}",
                candidate.configuration.name,
                show_share(prefill["busy_share"]),
                show_us(prefill["queue_us_mean"]),
                show_us(prefill["compute_us_mean"]),
                show_share(transfer["link_busy_share"]),
                show_us(transfer["transfer_us_mean"]),
                show_us(decode["page_wait_us_mean"]),
                show_share(decode["busy_share"]),
                show_share(decode["kv_used_share_max"]),
                f"{decode['running_max'] or 0:,}",
            )
        return table

    def describe(self) -> dict[str, Any]:
        """Return everything for JSON, without times and counts of simulations: equal questions give equal bytes."""
        question, winner, front = self.question, self.winner, pareto_front(self.question, self.candidates)
        return {
            "version": code_version(),
            "commit": code_commit(),
            "question": {
                "model": question.model,
                "gpus": list(question.gpus),
                "workload": question.workload,
                "slos": [str(slo) for slo in question.slos],
                "load": question.load,
                "rate": question.rate,
                "sessions": question.sessions,
                "gpus_max": question.gpus_max,
                "search": {key: [shown(value) for value in values] for key, values in question.search},
                "seed": question.seed,
                "confidence": question.confidence,
                "precision": question.effort.precision,
                "requests_min": question.effort.long.requests_min,
                "engine": question.common.get("engine"),
                "calibration": question.common.get("calibration"),
            },
            "goodput": GOODPUT,
            "headline": self.headline,
            "forecast": [asdict(one) for one in self.forecast],
            "remarks": self.remarks(),
            "winner": winner.configuration.number if winner is not None else None,
            "serve": [one._asdict() for one in serve_commands(winner)] if winner is not None else [],
            "vllm": _described_vllm(winner) if winner is not None else None,
            "simulate": simulate_command(winner) if winner is not None else None,
            "configurations": [self._describe(c, pareto=c.configuration.number in front) for c in self.candidates],
        }

    def _describe(self, candidate: Candidate, *, pareto: bool) -> dict[str, Any]:
        best = candidate.best
        estimate = candidate.estimate
        return {
            "number": candidate.configuration.number,
            "gpu": candidate.configuration.gpu,
            "settings": {key: shown(value) for key, value in candidate.configuration.chosen.items()},
            "verdict": "confirmed" if best is not None else why_not(candidate),
            "pareto": pareto,
            "limited_by": limit_of(candidate) or None,
            "estimated_load_max": None if estimate is None else round(candidate.estimated_load, 4),
            "usd_per_hour": None if best is None else candidate.usd_per_hour(best.paid_replicas),
            "usd_per_million_output_tokens": None if best is None else usd_per_million(candidate),
            "energy": None if best is None else energy_per_million(candidate),
            "gpu_hours_per_million_output_tokens": None if best is None else gpu_hours_per_million(candidate),
            **({} if candidate.split is None or best is None else {"sides": best.results[0].sides}),
            "best": _describe_evaluation(self.question, best),
            "nearest_missed": _describe_evaluation(self.question, candidate.missed),
            "lowest_load": _describe_evaluation(self.question, candidate.impossible),
            "evaluations": [_describe_evaluation(self.question, one) for one in candidate.evaluations],
        }

    def to_json(self) -> str:
        """Return `describe` as JSON text."""
        return json.dumps(self.describe(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _described_vllm(winner: Candidate) -> dict[str, Any] | None:
    command = vllm_command(winner)
    return None if command is None else command._asdict()


def _known(evaluation: Evaluation | None) -> Evaluation:
    assert evaluation is not None
    return evaluation


def why_not(candidate: Candidate) -> str:
    """Return why a configuration has no answer."""
    if candidate.setup is None:
        return candidate.unfit
    if candidate.pruned:
        load = candidate.narrow_met
        about = f", about {show_load(candidate.question, load)} each" if load is not None else ""
        return f"not confirmed: {candidate.pruned}{about}"
    if candidate.impossible is not None:
        remains = candidate.impossible
        pairs = zip(candidate.question.slos, remains.intervals, strict=True)
        beyond = [(slo, i.value) for slo, i in pairs if i.value > slo.bound_us]
        text = ", ".join(f"{_slo_name(str(s).partition('=')[0])} {show_us(_finite(v))}" for s, v in beyond)
        at = show_load(candidate.question, remains.load)
        return f"misses the SLO at {at} too: {text}" if beyond else "not sure of the SLO under any load"
    return "does not serve the load with any number of replicas tried"


def show_load(question: Question, load: float) -> str:
    """Return a load as text: `3.5/s`, or `12 sessions`."""
    if question.load == "rate":
        return f"{load:g}/s"
    return f"{load:,.0f} session{'s' if load != 1 else ''}"


def _load_text(candidate: Candidate, best: Evaluation, question: Question) -> str:
    """Return the load that is sustained, and the nearest one that is not."""
    if best.served < best.load:
        served, missed = _three(best.served), candidate.missed
        if question.wanted is not None:
            return f"{served} of {best.load:g}"
        return served if missed is None else f"{served} (<{_three(missed.load * (1 - best.rejected_share))})"
    if question.wanted is not None or candidate.missed is None:
        return f"{best.load:g}"
    return f"{best.load:g} (<{candidate.missed.load:g})"


def _three(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.3g}"


def rejections(candidate: Candidate, evaluation: Evaluation) -> str:
    """Return how many requests the first run rejects as invalid, with their share of the prompt tokens; else ""."""
    rejected, requests = evaluation.results[0].rejected, evaluation.results[0].requests
    if not rejected:
        return ""
    assert candidate.setup is not None
    config = candidate.setup.config
    limit = f"the context of {config.context_tokens_max:,} tokens"
    if config.request_tokens_max != config.context_tokens_max:
        limit = f"the KV memory of {config.pool_tokens:,} tokens"
    return (
        f"{rejected:,} of {requests:,} requests ({show_share(rejected / requests)}, with "
        f"{show_share(_rejected_tokens(evaluation))} of the prompt tokens) are rejected as too long for {limit}"
    )


def _rejected_tokens(evaluation: Evaluation) -> float:
    """Return the share of the prompt tokens in rejected requests."""
    tokens = sum(one.prompt_tokens for one in evaluation.results)
    return sum(one.rejected_prompt_tokens for one in evaluation.results) / tokens if tokens else 0.0


def _rejected_cell(evaluation: Evaluation) -> str:
    if not evaluation.rejected_share:
        return "0 %"
    return f"{show_share(evaluation.rejected_share)} ({show_share(_rejected_tokens(evaluation))})"


def interval_text(interval: Interval) -> str:
    """Return `412 ms (398-430 ms)`, or the value alone if the interval is unbounded."""
    value = show_us(_finite(interval.value))
    if math.isinf(interval.low) or math.isinf(interval.high):
        return value
    low, high = show_us(interval.low).split(" "), show_us(interval.high).split(" ")
    between = (
        f"{low[0]}-{high[0]}" if low[-1] == high[-1] == value.split(" ")[-1] else f"{' '.join(low)}-{' '.join(high)}"
    )
    return f"{value} ({between})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_evaluation(question: Question, evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {
        "rate" if question.load == "rate" else "sessions": evaluation.load,
        "replicas": evaluation.replicas,
        **({"replicas_mean": round(paid, 6)} if (paid := evaluation.paid_replicas) != evaluation.replicas else {}),
        "status": evaluation.status,
        "replications": len(evaluation.results),
        "served": round(evaluation.served, 6),
        "rejected_requests_share": evaluation.rejected_share,
        "rejected_prompt_tokens_share": round(_rejected_tokens(evaluation), 6),
        "goodput_requests_per_s": evaluation.steady("goodput_requests_per_s"),
        "output_tokens_per_s": evaluation.steady("output_tokens_per_s"),
        "slos": [
            {
                "slo": str(slo),
                "value_us": _rounded(interval.value),
                "low_us": _rounded(interval.low),
                "high_us": _rounded(interval.high),
            }
            for slo, interval in zip(question.slos, evaluation.intervals, strict=True)
        ],
    }


def _rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
