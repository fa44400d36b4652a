"""Random runs for the fast path: every setting that it follows, and every size, over its whole range.

A `Case` is one run of an engine, made of plain numbers, so that Hypothesis can draw and shrink it. Each order of
magnitude of a size is as likely as another. Outputs of thousands of tokens need thousands of batches, so a run has few
of them (`LONG_REQUESTS_MAX`).

    setup = case.setup()
    differing(simulate(setup, compiled=True).data, simulate(setup, compiled=False).data)     "": they are equal
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from lockstep.core.cluster.router import ROUTER_POLICIES, EngineShare, RouterConfig
from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests.budget import CLIP_MAX_NEW_TOKENS
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.cost import BatchShape, ContextBends, CostModel, CpuModel, Duration
from lockstep.sim.cost.calibration import Correction
from lockstep.sim.cost.model import LastingSpread
from lockstep.sim.fast.fast_path import POLICIES
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.setup import Setup
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.token_runs import append_run
from lockstep.sim.workload.turns import TurnLabel, Turns, TurnsBuilder, TurnStart

LONG_REQUESTS_MAX = 10  # requests of a run with outputs of thousands of tokens
TOKENS_APART = 50_000  # distance of the token ids of two requests; above the longest prompt with its output
POLICIES_WITH = tuple(POLICIES)
POLICIES_WITHOUT = tuple(name for name in POLICIES if name != "lpm")  # without a radix cache
SHARINGS = ("nothing", "documents", "turns", "sessions")


@cache
def base() -> Setup:
    """Return a setup of a small workload, whose parts the cases replace."""
    scenario = Scenario(model="llama-3.1-8b", gpu="a100", workload="gen:rate=10", limit=1, settings={"pages": 64})
    return assemble(scenario, {})


class Jittery:
    """A cost model with random batch times."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of a batch, with a spread, which decodes have in part in common."""
        mean_us = self.cost.batch_us(shape).mean_us
        return Duration(mean_us, 0.2 * mean_us, None if shape.extend_rows else LastingSpread(share=0.5, batches=8))

    def describe(self) -> dict[str, Any]:
        """Return the description of the model below."""
        return self.cost.describe()


class Halved:
    """A cost model whose decodes take a line of their context, up to 0.1 ps: half of them end between two microseconds.

    So these times are rounded up or down by a difference that the line does not have.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of a batch."""
        if shape.extend_rows:
            return self.cost.batch_us(shape)
        context_tokens = shape.decode_context_tokens
        return Duration(200.0 * shape.decode_rows + 0.5 * context_tokens + 1e-7 * (context_tokens % 7 % 3 - 1))

    def decode_bends(self, rows: int) -> tuple[int, ...]:
        """Return the contexts at which the line bends: none."""
        return ()

    def chunk_bends(self, tokens: int) -> tuple[int, ...] | None:
        """Return the contexts at which the time of an extend bends."""
        return self.cost.chunk_bends(tokens) if isinstance(self.cost, ContextBends) else None

    def describe(self) -> dict[str, Any]:
        """Return the description of the model below."""
        return self.cost.describe()


COSTS: dict[str, Callable[[CostModel], CostModel]] = {
    "catalogue": lambda cost: cost,
    "with a spread": Jittery,
    "halved": Halved,
}


class Load(NamedTuple):
    """Random requests, from idle to overloaded."""

    seed: int
    requests: int
    prompt_tokens_max: int
    output_tokens_max: int
    gap_us: float
    bursts: float  # share of the requests that arrive together with the previous one
    round_to: int  # prompt lengths are multiples of this, so that decodes open pages together
    warm_up: int
    sharing: str = "nothing"  # what prompts have in common, one of SHARINGS; turns of sessions also follow answers
    prompts_only: float = 0.0  # share of the requests without output
    branches: float = 0.0  # share of the turns that may follow an answer that another turn follows, too
    oversized: float = 0.0  # share of the requests that are not cut to what engines accept, and up to twice as long

    def turns(self, configs: list[SchedConfig]) -> Turns:
        """Return the requests, cut to what engines with these settings accept but for those that are `oversized`."""
        rng = np.random.default_rng(self.seed)
        most = min(config.prompt_tokens_max(True) for config in configs)
        both = min(config.request_tokens_max for config in configs)
        prompts = rng.integers(1, self.prompt_tokens_max, self.requests, endpoint=True)
        prompts = np.minimum(-(-prompts // self.round_to) * self.round_to, most)
        outputs = rng.integers(1, self.output_tokens_max, self.requests, endpoint=True)
        outputs = np.minimum(outputs, both - prompts)
        outputs[rng.random(self.requests) < self.prompts_only] = 0
        if self.oversized:
            long = rng.random(self.requests) < self.oversized
            prompts[long] = rng.integers(most // 2 + 1, 2 * most, int(long.sum()), endpoint=True)
            asks = long & (outputs > 0)
            outputs[asks] = rng.integers(1, both, int(asks.sum()), endpoint=True)
        gaps = rng.exponential(self.gap_us, self.requests)
        gaps[rng.random(self.requests) < self.bursts] = 0.0
        arrival_us = np.cumsum(gaps).astype(np.int64)
        if self.sharing != "sessions":
            return turns_of(arrival_us, prompts, outputs, self._shared(rng, prompts, outputs))
        after, followed = np.full(self.requests, -1), set[int]()
        for index in range(1, self.requests):
            before = int(rng.integers(max(index - 12, 0), index))
            if rng.random() < 0.7 and (before not in followed or rng.random() < self.branches):
                after[index] = before
                followed.add(before)
        think_us = rng.exponential(self.gap_us, self.requests).astype(np.int64)
        return turns_of(arrival_us, prompts, outputs, self._of_sessions(prompts, outputs, after), after, think_us)

    def _of_sessions(self, prompts: Any, outputs: Any, after: Any) -> list[list[int]]:
        """Return the beginning of each prompt: the prompt and the answer of the turn before it."""
        beginnings: list[list[int]] = []
        for prompt, before in zip(prompts.tolist(), after.tolist(), strict=True):
            whole = whole_of(before, prompts.tolist(), outputs.tolist(), beginnings[before]) if before >= 0 else []
            beginnings.append(cut(whole, prompt))
        return beginnings

    def _shared(self, rng: np.random.Generator, prompts: Any, outputs: Any) -> list[list[int]]:
        """Return the beginning of each prompt that other prompts have, as runs of token ids; the rest is its own."""
        if self.sharing == "nothing":
            return [[] for _ in prompts]
        documents = int(rng.integers(1, 4, endpoint=True))
        beginnings: list[list[int]] = []
        for index, prompt in enumerate(prompts.tolist()):
            of = int(rng.integers(0, documents))
            if self.sharing == "turns" and index and rng.random() < 0.7:
                earlier = int(rng.integers(max(index - 12, 0), index))
                runs = whole_of(earlier, prompts.tolist(), outputs.tolist(), beginnings[earlier])
            else:
                runs = [TOKENS_APART * (len(prompts) + of), int(rng.integers(0, self.prompt_tokens_max, endpoint=True))]
            beginnings.append(cut(runs, prompt if rng.random() < 0.3 else int(rng.integers(0, prompt, endpoint=True))))
        return beginnings


def cut(runs: list[int], tokens: int) -> list[int]:
    """Return the first `tokens` tokens of some runs."""
    kept: list[int] = []
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        if (take := min(count, tokens)) > 0:
            append_run(kept, first, take)
            tokens -= take
    return kept


def whole_of(index: int, prompts: list[int], outputs: list[int], beginning: list[int]) -> list[int]:
    """Return the prompt and the output of a request, as runs."""
    runs, first = list(beginning), TOKENS_APART * index
    if own := prompts[index] - sum(beginning[1::2]):
        append_run(runs, first, own)
    if outputs[index]:
        append_run(runs, first + prompts[index], outputs[index])
    return runs


def turns_of(
    arrival_us: Any,
    prompts: Any,
    outputs: Any,
    beginnings: list[list[int]] | None = None,
    after: Any = None,
    think_us: Any = None,
) -> Turns:
    """Return requests whose prompts have these beginnings in common, and else nothing.

    Args:
        after: the request whose answer each one follows, `think_us` later; -1: it is sent by the clock.
    """
    builder = TurnsBuilder()
    columns = zip(*(column.tolist() for column in (arrival_us, prompts, outputs)), strict=True)
    for index, (at, prompt, output) in enumerate(columns):
        runs = list(beginnings[index]) if beginnings is not None else []
        if own := prompt - sum(runs[1::2]):
            append_run(runs, TOKENS_APART * index, own)
        before = -1 if after is None else int(after[index])
        builder.append(
            TurnStart(at) if before < 0 else TurnStart(0, before, int(think_us[index])),
            TurnLabel("r{0}", index),
            prompt=runs,
            prompt_tokens=prompt,
            output_tokens=output,
            output_first_token=TOKENS_APART * index + prompt,
            tenant=f"t{index % 3}",
        )
    return builder.build()


class Case(NamedTuple):
    """One run of one engine."""

    sched: Mapping[str, Any]
    load: Load
    cpu: CpuModel = CpuModel()
    frontend_us: float = 0.0
    cost: str = "catalogue"  # of COSTS
    concurrency: int | None = None  # sessions in progress, in a closed loop
    sent: int = 0  # requests of the closed loop

    def setup(self) -> Setup:
        """Return the setup of the run."""
        return self.setup_with(SchedConfig(**self.sched), self.load.turns([SchedConfig(**self.sched)]))

    def setup_with(self, config: SchedConfig, turns: Turns) -> Setup:
        """Return the setup of an engine with these settings and requests."""
        setup = base()
        correction = Correction(frontend_us=self.frontend_us) if self.frontend_us else setup.calibration.correction
        return replace(
            setup,
            scenario=replace(
                setup.scenario,
                warm_up=self.load.warm_up,
                concurrency=self.concurrency,
                limit=self.sent or setup.scenario.limit,
            ),
            workload=replace(setup.workload, turns=turns),
            config=config,
            cpu=self.cpu,
            cost=COSTS[self.cost](setup.cost),
            calibration=replace_struct(setup.calibration, correction=correction),
        )


# ----------------------------------------------------------------------------------------------------------- strategies


@st.composite
def sizes(draw: st.DrawFn, low: int, high: int) -> int:
    """Draw a whole number of [low, high], each order of magnitude as likely as another."""
    order = draw(st.integers(low.bit_length(), high.bit_length()))
    return draw(st.integers(max(low, (1 << order) >> 1), max(low, min(high, (1 << order) - 1))))


OF_THE_CACHE = st.fixed_dictionaries(
    {
        "same_step_sharing": st.booleans(),
        "retracted_kv": st.sampled_from(("free", "cache")),
        "waiting_prefix_refresh": st.just(0) | sizes(1, 50),
        "prefix_deduplication": st.sampled_from(("off", "last", "defer")),
    }
)


@st.composite
def schedulers(draw: st.DrawFn, context_tokens: int = 1_000) -> dict[str, Any]:
    """Draw the settings that the fast path follows, over their ranges, and some that have no effect on its runs."""
    page_size = 1 << draw(st.sampled_from((0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 7)))
    radix_cache = draw(st.sampled_from((True, True, True, False)))
    batching = draw(st.sampled_from(("prefill_first", "mixed", "running_first")))
    running = draw(sizes(1, 300))
    align = None
    chunked = draw(st.none() | sizes(page_size, max(4 * context_tokens, page_size)))
    most = draw(sizes(page_size, max(4 * context_tokens, page_size)))
    if batching == "prefill_first" and draw(st.booleans()):
        limit = min(most, most if chunked is None else chunked)
        align = page_size * draw(sizes(1, max(limit // page_size, 1)))
    tokens = draw(st.integers(context_tokens // 2, context_tokens) | sizes(context_tokens, 12 * context_tokens))
    least = msgspec.UNSET
    if chunked is not None and draw(st.booleans()):
        least = draw(st.integers(page_size, chunked))
    return {
        "page_size": page_size,
        "pages": tokens // page_size + 2,
        "radix_cache": radix_cache,
        "batching": batching,
        "reserve": draw(st.sampled_from(("ratio", "ratio", "on_demand", "full"))),
        "max_running_requests": running,
        "request_rows": draw(st.none() | st.integers(running, 3 * running)),
        "chunked_prefill_size": chunked,
        "chunked_prefill_size_min": least,
        "max_prefill_tokens": most,
        "truncation_align_size": align,
        "chunk_unit": draw(st.sampled_from(("page", "token"))),
        "overlap_depth": draw(st.integers(0, 2)),
        "prefill_max_requests": draw(st.none() | sizes(1, 20)),
        "prefill_decode_interval": draw(st.just(0) | sizes(1, 40)),
        "schedule_conservativeness": draw(
            st.sampled_from((0.01, 0.3, 1.0, 1.4, 100.0)) | st.floats(0.001, 2.0, exclude_min=True)
        ),
        "context_tokens_max": context_tokens,
        "retraction_policy": draw(st.sampled_from(("length", "newest", "priority"))),
        "retracted_requeue": draw(st.sampled_from(("tail", "front"))),
        "schedule_policy": draw(st.just("fcfs") | st.sampled_from(POLICIES_WITH if radix_cache else POLICIES_WITHOUT)),
        "schedule_seed": draw(st.integers(0, 3)),
        "bypass_limit": draw(st.none() | sizes(0, 300)),
        **(draw(OF_THE_CACHE) if radix_cache else {}),
    }


@st.composite
def loads(
    draw: st.DrawFn,
    context_tokens: int = 1_000,
    sharings: tuple[str, ...] = SHARINGS[:1],
    oversized: tuple[float, ...] = (0.0,),
) -> Load:
    """Draw requests of up to `context_tokens`."""
    long = context_tokens > 2 * CLIP_MAX_NEW_TOKENS
    return Load(
        seed=draw(st.integers(0, 2**32 - 1)),
        requests=draw(st.integers(2, LONG_REQUESTS_MAX) if long else st.integers(1, 120)),
        prompt_tokens_max=draw(sizes(1, context_tokens)),
        output_tokens_max=draw(
            st.integers(CLIP_MAX_NEW_TOKENS, context_tokens) if long else sizes(1, max(context_tokens // 4, 1))
        ),
        gap_us=draw(st.sampled_from((1.0, 3e3, 3e4, 3e5))),
        bursts=draw(st.sampled_from((0.0, 0.5, 0.95))),
        round_to=draw(st.sampled_from((1, 16))),
        warm_up=draw(st.sampled_from((0, 10))),
        sharing=draw(st.sampled_from(sharings)),
        prompts_only=draw(st.sampled_from((0.0, 0.0, 0.1))),
        branches=draw(st.sampled_from((0.0, 0.3))),
        oversized=draw(st.sampled_from(oversized)),
    )


CPUS = st.one_of(
    st.just(CpuModel()),
    st.just(CpuModel(0.0, 0.0, 0.0, 0.0, 0.0)),
    st.builds(CpuModel, *[st.floats(0.0, limit) for limit in (30_000.0, 50.0, 10_000.0, 50.0, 6_000.0)]),
)
CONTEXTS = st.sampled_from((40, 300, 1_000, 1_000, 4_000))
LONG_CONTEXTS = st.just(4 * CLIP_MAX_NEW_TOKENS)


@st.composite
def cases(draw: st.DrawFn, contexts: st.SearchStrategy[int] = CONTEXTS, sharings: tuple[str, ...] = SHARINGS) -> Case:
    """Draw a run of one engine."""
    context_tokens = draw(contexts)
    load, concurrency, sent = draw(loads(context_tokens, sharings, (0.0, 0.0, 0.1, 0.5))), None, 0
    if load.sharing == "sessions" and draw(st.booleans()):
        load, concurrency = load._replace(branches=0.0), draw(sizes(1, 40))
        sent = draw(st.integers(1, 2 * load.requests))
    return Case(
        draw(schedulers(context_tokens)),
        load,
        draw(CPUS),
        draw(st.sampled_from((0.0, 0.0, 1_500.4))),
        draw(st.sampled_from(tuple(COSTS))),
        concurrency,
        sent,
    )


class ClusterCase(NamedTuple):
    """One run of engines behind a router."""

    load: Load
    engines: list[tuple[Mapping[str, Any], EngineShare]]  # settings of each, and its place at the router
    router: RouterConfig
    hop_us: int
    cpu: CpuModel = CpuModel()
    frontend_us: float = 0.0  # of the first engine; the next ones have the double, and so on
    concurrency: int | None = None  # sessions in progress, in a closed loop
    sent: int = 0  # requests of the closed loop

    def setup(self) -> ClusterSetup:
        """Return the setup of the run."""
        configs = [SchedConfig(**sched) for sched, _ in self.engines]
        turns = self.load.turns(configs)
        setups = [
            Case(
                sched,
                self.load,
                self.cpu,
                self.frontend_us * (1 + engine),
                concurrency=self.concurrency,
                sent=self.sent,
            ).setup_with(config, turns)
            for engine, ((sched, _), config) in enumerate(zip(self.engines, configs, strict=True))
        ]
        return ClusterSetup(
            scenario=ClusterScenario(
                base=setups[0].scenario, replicas=len(setups), router=self.router, hop_us=self.hop_us
            ),
            engines=tuple(replace(one, workload=setups[0].workload) for one in setups),
            shares=tuple(share for _, share in self.engines),
        )


ROUTERS = st.builds(
    RouterConfig,
    policy=st.sampled_from(ROUTER_POLICIES) | st.just("prefix_affinity"),
    load_bound=st.sampled_from((1.0, 1.25, 3.0)) | st.floats(1.0, 10.0),
    load_floor=st.sampled_from((0, 8)) | st.integers(0, 40),
    block_tokens=st.sampled_from((1, 16, 256)) | sizes(1, 600),
)
SHARES = st.builds(
    EngineShare,
    weight=st.sampled_from((1.0, 1.0, 0.3, 2.5)) | st.floats(0.1, 10.0),
    cache_tokens=st.just(1 << 40) | sizes(0, 20_000),
)


@st.composite
def cluster_cases(draw: st.DrawFn, context_tokens: int = 1_000) -> ClusterCase:
    """Draw a run of up to five engines behind a router.

    Requests follow answers only after at least 1 us; without any time the core simulates them.
    """
    load, concurrency, sent = draw(loads(context_tokens, SHARINGS, (0.0, 0.0, 0.1, 0.5))), None, 0
    hop_us, frontend_us = draw(st.sampled_from((0, 0, 700)) | sizes(1, 500_000)), draw(st.sampled_from((0.0, 1_500.4)))
    if load.sharing == "sessions":
        frontend_us = draw(st.sampled_from((1.0, 1_500.4, 40_000.0))) if not hop_us else frontend_us
        if draw(st.booleans()):
            load, concurrency = load._replace(branches=0.0), draw(sizes(1, 40))
            sent = draw(st.integers(1, 2 * load.requests))
    engines = draw(st.lists(st.tuples(schedulers(context_tokens), SHARES), min_size=1, max_size=5))
    return ClusterCase(load, engines, draw(ROUTERS), hop_us, draw(CPUS), frontend_us, concurrency, sent)


# ------------------------------------------------------------------------------------------------------------- equality


def differing(ours: RunData, theirs: RunData) -> str:
    """Return the first measure in which two runs differ; empty if there is none."""
    for name, table, other in (
        ("requests", ours.requests, theirs.requests),
        ("series", ours.series, theirs.series),
        ("batches", ours.batches, theirs.batches),
        ("cpu", ours.cpu, theirs.cpu),
    ):
        columns = table.columns()
        for column, values in other.columns().items():
            try:
                np.testing.assert_array_equal(columns[column], values)
            except AssertionError as error:
                return f"{name}.{column}: {error}"
    for name in ("values", "counts"):
        if not np.array_equal(getattr(ours.itl_us, name), getattr(theirs.itl_us, name)):
            return f"itl_us.{name}"
    if ours.summary != theirs.summary:
        return f"summary: {ours.summary} != {theirs.summary}"
    return "" if ours.span_us == theirs.span_us else f"span_us: {ours.span_us} != {theirs.span_us}"


def rare_events(data: RunData) -> Iterator[tuple[str, float]]:
    """Yield counts that Hypothesis is to make large, with names: they show rare branches of the scheduler."""
    scheduler, kv = data.summary["scheduler"], data.summary["cache"]
    yield "decodes skipped", float(scheduler["decodes_skipped"])
    for reason in ("running_limit", "kv_budget", "prefill_budget", "pages", "prefix"):
        yield f"deferred for {reason}", float(scheduler["admissions_deferred_by_reason"].get(reason, 0))
    yield "cached tokens", float(kv["prompt_tokens_cached"])
    yield "retractions", float(scheduler["retractions"])
    yield "evicted pages", float(sum(kv["pages_evicted_by_reason"].values()) if "pages_evicted_by_reason" in kv else 0)
