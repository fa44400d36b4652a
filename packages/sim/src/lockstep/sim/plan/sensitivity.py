"""What would change the answer of a plan, and the questions that come next, each with its command."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lockstep.core.cluster.router import RouterConfig, policy_settings
from lockstep.host.options import number_word, option_of, options_of, setting_words, value_word
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.plan.question import FULL, QUICK, Question, shown
from lockstep.sim.plan.search import Candidate
from lockstep.sim.results.results import show_us
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import tier_fields

ROOM_SHOWN = 10.0  # a bound with more room than this factor is left out


class Assumption(NamedTuple):
    """An assumption of the answer: what it would take to change it, and the command that tries it."""

    text: str
    command: str


def assumptions_of(question: Question, candidates: Sequence[Candidate], winner: Candidate) -> list[Assumption]:
    """Return which assumptions would change the winner, the price of other GPUs first, then bounds and load."""
    return [
        *_prices(question, candidates, winner),
        *_bounds(question, winner),
        *_loads(question, winner),
    ]


def _cost(candidate: Candidate) -> float:
    """Return what the winner has least of: the cost of the given load, or the cost of a unit of load."""
    best = candidate.best
    assert best is not None
    cost = candidate.cost_per_hour(best.paid_replicas)
    return cost if candidate.question.wanted is not None else cost / best.served


def _prices(question: Question, candidates: Sequence[Candidate], winner: Candidate) -> Iterator[Assumption]:
    cheapest: dict[str, Candidate] = {}
    for candidate in candidates:
        gpu, best = candidate.configuration.gpu, candidate.best
        if best is None or best.served <= 0 or candidate.usd_per_gpu_hour is None:
            continue
        if gpu not in cheapest or _cost(candidate) < _cost(cheapest[gpu]):
            cheapest[gpu] = candidate
    if question.gpus_max is not None or winner.usd_per_gpu_hour is None:
        return
    for gpu, other in cheapest.items():
        if gpu == winner.configuration.gpu or other.usd_per_gpu_hour is None:
            continue
        price = other.usd_per_gpu_hour * _cost(winner) / _cost(other)
        yield Assumption(
            f"{other.configuration.name} wins below {price:.2f} $ per GPU-hour; the assumed price is "
            f"{other.usd_per_gpu_hour:.2f} $.",
            plan_command(question, prices={**question.prices, gpu: max(math.floor(price * 95) / 100, 0.01)}),
        )


def _bounds(question: Question, winner: Candidate) -> Iterator[Assumption]:
    best = winner.best
    assert best is not None
    for number, (slo, interval) in enumerate(zip(question.slos, best.intervals, strict=True)):
        high = interval.high if math.isfinite(interval.high) else interval.value
        if not 0 < high <= slo.bound_us or slo.bound_us / high > ROOM_SHOWN:
            continue
        name = str(slo).partition("=")[0]
        slos = [str(one) for one in question.slos]
        slos[number] = f"{name}={math.ceil(high / 1000)}ms" if high > 20_000 else f"{name}={math.ceil(high)}us"
        yield Assumption(
            f"Below {show_us(high)}, the upper end of the winner's interval, a bound on {name} may need another "
            f"configuration; the assumed bound is {show_us(slo.bound_us)}.",
            plan_command(question, slos=slos),
        )


def _loads(question: Question, winner: Candidate) -> Iterator[Assumption]:
    best = winner.best
    assert best is not None
    missed = [e.load for e in winner.evaluations if e.replicas == best.replicas and not e.met and e.load > best.load]
    if question.wanted is None or not missed:
        return
    more = min(missed)
    what = "rate" if question.load == "rate" else "sessions"
    yield Assumption(
        f"The same GPUs were not sure of the SLO at {number_word(round(more, 4))}: a load beyond it takes more.",
        plan_command(question, **{what: more if what == "rate" else round(more)}),
    )


def next_questions(question: Question, winner: Candidate, limit: str, simulate: str) -> list[Assumption]:
    """Return the questions that follow from the answer.

    Args:
        limit: the resource that limits the winner, as `limit_of` has it.
        simulate: the command that repeats the winner's simulation.
    """
    found = []
    searched = {name for name, _ in question.search}

    def also(text: str, name: str, values: str) -> None:
        if name not in searched and name not in question.common and name not in question.settings:
            found.append(Assumption(text, plan_command(question, search=[f"{name}={values}"])))

    if _is_quick(question):
        found.append(Assumption("The same with long simulations, to about 5 %.", plan_command(question, quick=False)))
    if "KV memory" in limit:
        also("KV memory is the limit: KV in fp8 halves it.", "kv_dtype", "bf16,fp8")
        also("KV memory is the limit: a cache in host memory keeps what was evicted.", "host_cache_gb", "0,500")
    if "bandwidth" in limit:
        also("Reading the weights is the limit: fewer bits take less time.", "weights_dtype", "bf16,fp8")
    if "prefill" in limit:
        also("Prompts are the limit: engines of their own keep them from answers.", "prefill_decode", "mixed,1:1,2:1")
        also(
            "Prompts are the limit: the size of their chunks moves TTFT against TPOT.",
            "chunked_prefill_size",
            "1024..8192",
        )
    if question.wanted is not None:
        found.append(Assumption("What growth takes.", plan_command(question, growth="1.25,1.5,2")))
    explain = f"{simulate} --out runs/winner\nlockstep explain runs/winner --slowest ttft 10"
    found.append(Assumption("Why single requests were slow.", explain))
    return found


def plan_command(question: Question, **changes: Any) -> str:
    """Return the command line of a question. Changes: slos, prices, search (added), rate, sessions, growth, quick."""
    words = ["lockstep", "plan", "--model", question.model, "--gpus", ",".join(question.gpus)]
    words += ["--workload", question.workload]
    for slo in changes.get("slos", question.slos):
        words += ["--slo", str(slo)]
    for name in ("rate", "sessions"):
        value = changes.get(name, getattr(question, name))
        words += [f"--{name}", number_word(float(value))] if value is not None else []
    words += ["--max-gpus", str(question.gpus_max)] if question.gpus_max is not None else []
    for name, values in question.search:
        words += ["--search", f"{name}={','.join(map(shown, values))}"]
    for text in changes.get("search", ()):
        words += ["--search", text]
    words += [
        word for gpu, usd in changes.get("prices", question.prices).items() for word in ("--price", f"{gpu}={usd:g}")
    ]
    scenario, tiers = {**options_of(Scenario), **options_of(ClusterScenario)}, tier_fields()
    for name, value in question.common.items():
        if name == "tiers":
            words += [word for tier, given in value.items() for word in tiers[tier].words(given)]
        elif name in scenario:
            words += scenario[name].words(value)
        else:
            words += [f"--{name.replace('_', '-')}", shown(value)]
    words += [word for name, value in question.settings.items() for word in setting_words(name, value)]
    usual_router = RouterConfig()
    words += ["--router", question.router.policy] if question.router.policy != usual_router.policy else []
    for name in policy_settings():
        if (value := getattr(question.router, name)) != getattr(usual_router, name):
            words += [option_of(f"router_{name}"), value_word(name, value)]
    words += ["--router-hop", f"{question.hop_us}us"] if question.hop_us else []
    words += ["--growth", changes["growth"]] if "growth" in changes else []
    words += ["--load", "sessions"] if question.load == "sessions" and question.sessions is None else []
    usual = {field.name: field.default for field in dataclasses.fields(question)}
    for name in ("seed", "confidence", "price_kind"):
        if getattr(question, name) != usual[name]:
            words += [option_of(name), shown(getattr(question, name))]
    if changes.get("quick", True):
        words += ["--quick"] if _is_quick(question) else []
        if question.effort.long not in (FULL.long, QUICK.long):
            words += ["--requests", str(question.effort.long.requests_max)]
    return shlex.join(words)


def _is_quick(question: Question) -> bool:
    return question.effort.precision >= QUICK.precision
