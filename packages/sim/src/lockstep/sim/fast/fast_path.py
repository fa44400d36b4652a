"""The fast path: simulation by the machine code of kernel.py, of runs without a journal, checks and an observer.

    run = simulate(setup)      # uses the fast path if it can, with equal results

It is used if it `pays` for the number of requests. `run.fast_runs.unsupported_by` names the part of a setup that only
the core can simulate. If a situation occurs that only the core can simulate, `FastRun.run` returns False, and the core
simulates the run from the beginning. Each batch is one call of the setup's own cost model, so every cost model works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from lockstep.core.cluster.router import OUTPUT_TOKENS_FIRST_GUESS, EngineShare, RouterConfig
from lockstep.core.contract.commands import Int64s
from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests.budget import NewTokenRatio
from lockstep.core.requests.rules import BATCHINGS, NO_LIMIT, RESERVES
from lockstep.core.scheduler.ordering import REFRESHED_REQUESTS, shuffled
from lockstep.sim.cost import BatchShape, CostModel, CpuModel
from lockstep.sim.cost.draws import drawn_factor
from lockstep.sim.fast import machine_code
from lockstep.sim.fast import state as arrays_of
from lockstep.sim.fast.lines import line_for, no_lines
from lockstep.sim.fast.loops import Loop
from lockstep.sim.fast.open_gaps import OpenGaps
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.measured import MeasuredRequests, MeasuredRows
from lockstep.sim.workload.turns import Turns

# The core simulates 1,000 requests in 0.4 s under load, and in 4 s if each token is a batch. Loading takes 1 s and
# compiling half a minute, once in an installation.
REQUESTS_MIN = 1_000
REQUESTS_MIN_NOT_STORED = 30_000
FLUSH_ROWS = 4_096  # most rows of an engine's batches, gauges and messages between two flushes
FLUSH_ROWS_ALL = 262_144  # most such rows of all engines together
FLUSH_ROWS_MIN = 64  # fewest such rows of an engine; this limit overrides FLUSH_ROWS_ALL
BLOCK_KEYS_MAX = 2**31 - 1  # different blocks of prompts, with those of all copies of the workload
GAPS = 4  # rows for gaps between tokens, per row of batches
SEGMENTS = 256  # rows for retractions
AHEAD = 64  # requests of each engine that are routed before the engines go on, if their load does not matter
MODES, WORKS = ("extend", "decode", "mixed"), ("arrival", "plan", "results")  # in the order of the kernel's numbers
DEFERRED = ("running_limit", "rows", "kv_budget", "prefill_budget", "pages", "prefix")
POLICIES = {
    "fcfs": arrays_of.QUEUE_ORDER,
    "priority": arrays_of.QUEUE_ORDER,  # simulated requests have no priorities
    "routing-key": arrays_of.QUEUE_ORDER,  # and no routing keys
    "lpm": arrays_of.LONGEST_CACHED,
    "lof": arrays_of.LONGEST_OUTPUT,
    "random": arrays_of.SHUFFLED,
    "hrrn": arrays_of.RESPONSE_RATIO,
    "spf": arrays_of.FEWEST_UNCACHED,
}
"""Policies of the waiting queue that the kernel follows, with its numbers for them."""
DEDUPLICATIONS = {"off": arrays_of.KEEPS, "last": arrays_of.LAST, "defer": arrays_of.DEFERS}
_requests = 0  # requests of this process that machine code could have simulated


def pays(requests: int) -> bool:
    """Count the requests of one more run. Return whether the process has had so many that machine code pays.

    Fewer are enough to load it than to compile it first.
    """
    global _requests
    _requests += requests
    if _requests < REQUESTS_MIN:
        return False
    return _requests >= REQUESTS_MIN_NOT_STORED or machine_code.is_stored()


class FastEngine(NamedTuple):
    """Settings and costs of one engine of the fast path."""

    config: SchedConfig
    cost: CostModel
    cpu: CpuModel
    frontend_us: int  # time from the end of an answer to its client, and from there to the engine


class Finished(NamedTuple):
    """What is known of a run of engines behind a router at its end, beside the folds."""

    batches: list[int]  # launched by each engine
    rejected: list[Counter[str]]  # requests that each engine has rejected, by reason
    clamped: list[int]  # requests that each engine has allowed fewer tokens than they asked for
    never_sent: int  # requests that wait for an answer that has not ended
    routed: int  # requests that have arrived at the router
    routed_by_state: dict[str, int]  # by reason: requests whose engine follows from earlier requests


class FastLoad(NamedTuple):
    """The requests of a run, and the settings of its measurement."""

    turns: Turns
    seed: int  # seed of the spread of batch times
    warm_up: int  # requests with an id below this are not measured
    has_front_end: bool = True  # whether answers and requests pass the front end, see `FastEngine.frontend_us`
    loop: Loop | None = None  # the requests, if some follow the answers of others
    shares_prefixes: bool = True  # whether prompts may begin alike


class FastRun:
    """A run of one engine, or of several engines behind a router, on the fast path. Each engine has its own fold.

    Call `route` first if there is a router, then `run` once. A signal handler that sets `stop_requested` ends the run
    early.

    Args:
        load: the requests of all engines. `run.fast_runs.unsupported_by` must be empty for it and each engine.
        metrics: one fold per engine, in the same order.
        on_finish: called at intervals with the number of requests that ended. If the fast path cannot simulate the
            run, the core's run calls it again from 0.
    """

    def __init__(
        self,
        load: FastLoad,
        engines: Sequence[FastEngine],
        metrics: Sequence[MetricsFold],
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        self.stop_requested = self._is_lost = False
        self.metrics = metrics
        self._load = load
        self._engines = engines
        self._on_finish = on_finish
        turns, count, loop = load.turns, len(engines), load.loop
        turn_of = np.arange(len(turns)) if loop is None else loop.rows  # by request
        rows = min(max(one.config.max_running_requests for one in engines), len(turn_of))
        slots = max(one.config.launches_max for one in engines)
        nodes = 2 + max(one.config.pages if one.config.radix_cache else 0 for one in engines)
        run = np.zeros(1, arrays_of.RUN)
        run["priced"], run["until_question"], run["warm_up"] = 1, arrays_of.NONE, load.warm_up
        requests = arrays_of.zeros_in_lines(len(turn_of), arrays_of.REQUEST)
        for name in ("arrival_us", "prompt_tokens", "output_tokens", "output_first_token"):
            requests[name] = getattr(turns, name)[turn_of]
        requests["run_start"], requests["run_stop"] = turns.run_starts[turn_of], turns.run_stops[turn_of]
        requests["asked_tokens"], requests["session"] = requests["output_tokens"], np.arange(len(turn_of))
        requests["id"], requests["last_batch"], requests["cached_tokens"] = turn_of, arrays_of.NONE, -1
        requests["waits_for"] = requests["joined"] = arrays_of.NONE
        for name in ("admitted_us", "first_us", "last_us", "ended_us", "itl_us_max"):
            requests[name] = -1
        flush_rows = max(min(FLUSH_ROWS, FLUSH_ROWS_ALL // count), FLUSH_ROWS_MIN)
        gap_rows = GAPS * flush_rows + rows
        self._state = np.array([_engine(one, load.shares_prefixes) for one in engines])
        # Without a router all requests are sent to one engine at the start, which then runs without a pause.
        requests["next"] = np.append(np.arange(1, len(turn_of)), arrays_of.NONE)
        self._state["coming"] = 0
        self._state["answer_us"] = [one.frontend_us if load.has_front_end else 0 for one in engines]
        run["until_us"], run["next_request"] = arrays_of.NEVER_US, len(turn_of)
        self._turn_of = turn_of
        thinking = np.zeros(len(turn_of) if loop is not None else 1, np.int32)
        if loop is not None:
            self._follow(loop, run, requests, thinking)
        self._arrays = arrays_of.Arrays(
            run=run,
            engines=self._state,
            requests=requests,
            due_us=np.zeros(count, np.int64),
            running_batch=np.zeros((count, rows), np.int64),
            phases=np.zeros((count, max(one.config.page_size for one in engines)), np.int64),
            flights=np.zeros((count, slots), arrays_of.FLIGHT),
            samplers=np.zeros((count, slots, rows), np.int64),
            parts=np.zeros((count, slots, rows, 3), np.int64),
            run_first_token=turns.run_first_token,
            run_stop=_run_stops(turns),
            nodes=np.zeros((count, nodes), arrays_of.NODE),
            buckets=np.zeros((count, 1 << min(nodes, 4 * len(turn_of)).bit_length()), np.int32),
            heap_ticks=np.zeros((count, nodes), np.int64),
            heap_nodes=np.zeros((count, nodes), np.int32),
            deferred_rows=np.zeros((count, rows * (slots + 1)), arrays_of.DEFERRED_ROW),
            deferred_pages=np.zeros((count, rows * (slots + 1), 2), np.int64),
            thinking=thinking,
            begins=np.zeros(1 if loop is None else len(loop.thinking) + 1, np.int64),
            sessions=np.zeros(1, np.int32) if loop is None else np.append(loop.sessions, 0).astype(np.int32),
            scratch=np.zeros(REFRESHED_REQUESTS, np.int64),
            shuffled=_shuffled(engines, len(turn_of)),
            block_keys=np.zeros(1, np.int32),
            blocks=np.zeros((count, 1), arrays_of.BLOCK),
            block_buckets=np.zeros((count, 1), np.int32),
            unseen=np.zeros((2 * rows, 2), np.int64),
            lines=no_lines(count, rows),
            shape=np.zeros(1, arrays_of.SHAPE),
            launches=np.zeros((count, flush_rows, 9), np.int64),
            gauges=np.zeros((count, flush_rows, 5), np.int64),
            works=np.zeros((count, 2 * flush_rows, 3), np.int64),
            messages=np.zeros((count, flush_rows, 2), np.int64),
            gaps=np.zeros((count, gap_rows, 2), np.int64),
            decodes_us=np.zeros((count, flush_rows), np.int64),
            segments=np.zeros((count, rows + SEGMENTS, 4), np.int64),
        )
        self._advance = machine_code.bound(self._arrays)
        self._open_gaps = [OpenGaps() for _ in engines]

    def _follow(self, loop: Loop, run: Any, requests: Any, thinking: Any) -> None:
        """Let requests follow the answers of others."""
        run["loops"] = 2 if len(loop.sessions) else 1
        for name in ("arrival_us", "think_us", "key", "shift", "follow", "sibling", "session"):
            requests[name] = getattr(loop, name)
        requests["output_first_token"] += loop.shift
        requests["id"] = requests["next"] = arrays_of.NONE
        requests["next"][loop.clock[:-1]] = loop.clock[1:]
        run["expected"], run["clock"] = loop.expected, loop.clock[0] if len(loop.clock) else arrays_of.NONE
        run["lookahead_us"] = self._state["answer_us"].min() + loop.think_us_min
        first = loop.thinking[np.lexsort((loop.key[loop.thinking], loop.arrival_us[loop.thinking]))]
        thinking[: len(first)], run["thinking"] = first, len(first)  # a sorted list is a heap
        self._state["coming"] = first[0] if len(first) else run["clock"]

    def route(self, config: RouterConfig, shares: Sequence[EngineShare], hop_us: int, given: Sequence[int]) -> None:
        """Put a router in front of the engines; no request is sent yet.

        Args:
            hop_us: time from the router to an engine.
            given: engine of each request by its id, if the policy fixes it; else empty.
        """
        run, requests, loop = self._arrays.run, self._arrays.requests, self._load.loop
        first = self._state["coming"][0]
        self._state["coming"] = requests["engine"] = arrays_of.NONE
        if len(given):
            requests["room"][: len(given)] = given
        run["routes"], run["until_us"] = 1, requests["arrival_us"][first]
        if loop is None:
            run["next_request"] = 0
        self._state["answer_us"] += hop_us
        run["lookahead_us"] += hop_us
        run["routing_rule"] = {
            "least_requests": arrays_of.LEAST_REQUESTS,
            "total_requests": arrays_of.LEAST_REQUESTS,  # by the router's own counts, because engines send no reports
            "session_sticky": arrays_of.STICKY,
            "least_tokens": arrays_of.LEAST_TOKENS,
            "total_tokens": arrays_of.LEAST_PROMPTS,
            "prefix_affinity": arrays_of.BOUNDED,
            "follow_bootstrap_room": arrays_of.GIVEN,
        }.get(config.policy, arrays_of.IN_TURN)
        run["sees_ends"] = run["routing_rule"] not in (arrays_of.IN_TURN, arrays_of.GIVEN)
        run["ahead"] = AHEAD * len(shares) if loop is None else 0
        run["load_bound"], run["load_floor"] = config.load_bound, config.load_floor
        run["first_guess"], run["hop_us"] = OUTPUT_TOKENS_FIRST_GUESS, hop_us
        self._state["weight"] = [share.weight for share in shares]
        if config.policy == "prefix_affinity" and self._load.shares_prefixes:
            self._follow_prefixes(config, shares)

    def _follow_prefixes(self, config: RouterConfig, shares: Sequence[EngineShare]) -> None:
        """Let the router send requests to engines that received the beginning of their prompts, see `Router`."""
        turns, requests = self._load.turns, self._arrays.requests
        starts, stops, keys = block_keys(turns, config.block_tokens)
        requests["block_start"], requests["block_stop"] = starts[self._turn_of], stops[self._turn_of]
        different = int(keys.max(initial=-1)) + 1
        if self._load.loop is not None:  # copies of the workload have blocks of their own
            copies, copy = np.unique(self._load.loop.shift, return_inverse=True)
            self._is_lost = len(copies) * different > BLOCK_KEYS_MAX
            requests["block_shift"] = 0 if self._is_lost else copy * different
            different *= len(copies)
        longest = int((requests["block_stop"] - requests["block_start"]).max())
        most = [min(share.cache_tokens // config.block_tokens, different) for share in shares]
        self._state["blocks_max"] = most
        entries = min(max(most) + longest, different) + 1
        self._arrays = self._arrays._replace(
            block_keys=keys,
            blocks=np.zeros((len(shares), entries), arrays_of.BLOCK),
            block_buckets=np.zeros((len(shares), 1 << entries.bit_length()), np.int32),
        )
        self._advance = machine_code.bound(self._arrays)

    @property
    def expected(self) -> int:
        """Number of requests that are sent, if every answer ends."""
        return len(self._turn_of) if self._load.loop is None else self._load.loop.expected

    def _routed_by_state(self) -> dict[str, int]:
        """Return the requests by the reason for which the router sent them, if that is another than its policy."""
        run = self._arrays.run[0]
        return {name: int(run[f"routed_by_{name}"]) for name in ("prefix", "bound", "session")}

    def run(self, pause_after: int = -1, on_pause: Callable[[int], int] | None = None) -> bool:
        """Run to the end, or until `stop_requested`, and pass all measurements to the folds.

        Args:
            pause_after: number of arrived requests at which `on_pause` is first called; -1: never.
            on_pause: called with the number of arrived requests; returns the number of further requests before the
                next call, or 0 to end the run there.
        Returns: False if a situation occurred that only the core can simulate; the measurements are then incomplete.
        """
        run, took_us = self._arrays.run, 0.0
        if self._is_lost:
            return False
        run["until_question"] = pause_after
        while True:
            if self.stop_requested:
                if run["until_us"] == arrays_of.NEVER_US:
                    break
                run["asks"], run["ahead"] = 1, 0  # engines go on until all of them are at the same time
            why = self._advance(took_us)
            if why == arrays_of.PRICED:
                took_us = self._price()
            elif why == arrays_of.FLUSH:
                self._flush(int(run["engine"][0]))
                if self._on_finish is not None:
                    self._on_finish(int(self._state["ended"].sum()))
            elif why == arrays_of.ASKED and on_pause is not None and not self.stop_requested:
                again = on_pause(self._routed())
                if not again:
                    break
                run["until_question"] = again
            elif why == arrays_of.LOST and not self.stop_requested:
                return False
            else:
                break
        self.hand_over()
        for engine, fold in enumerate(self.metrics):
            fold.take_back(self._open_gaps[engine].gaps_us(self._arrays.requests, self._running(engine)))
        if self._on_finish is not None:
            self._on_finish(int(self._state["ended"].sum()))
        return True

    def _price(self) -> float:
        """Return the time of the batch in `shape` by the cost model of its engine."""
        *sums, batch_id, engine = self._arrays.shape.tolist()[0]
        shape, one = BatchShape(*sums), self._engines[int(engine)]
        expected = one.cost.batch_us(shape)
        if expected.spread_us > 0.0:
            return expected.mean_us * drawn_factor(expected, f"{self._load.seed} engine{engine}", batch_id)
        if not shape.extend_rows or (shape.extend_rows == 1 and not shape.sampled_rows):  # others have no line
            line_for(one.cost, self._arrays.lines[engine], shape, one.config.request_tokens_max)
        return expected.mean_us

    def batches(self, engine: int) -> int:
        """Return the number of batches that an engine has launched."""
        return int(self._state["next_batch_id"][engine])

    def finished(self) -> Finished:
        """Give back the memory of a run that has ended. Return what remains to be known of it."""
        counts = range(len(self._engines))
        found = Finished(
            batches=[self.batches(engine) for engine in counts],
            rejected=[self.rejected(engine) for engine in counts],
            clamped=[self.clamped(engine) for engine in counts],
            never_sent=self.never_sent(),
            routed=self._routed(),
            routed_by_state=self._routed_by_state(),
        )
        del self._arrays, self._state, self._advance
        return found

    def _routed(self) -> int:
        """Return the number of requests that have arrived at the router; without one, of those that were sent."""
        return int(self._arrays.run["next_request" if self._load.loop is None else "arrived"][0])

    def never_sent(self) -> int:
        """Return the number of requests that wait for an answer that has not ended."""
        loop, requests = self._load.loop, self._arrays.requests
        if loop is None or len(loop.sessions):
            return 0
        before = requests[self._load.turns.after[self._load.turns.after >= 0]]
        return int(((before["ended_us"] < 0) | _rejected(before)).sum())

    def rejected(self, engine: int) -> Counter[str]:
        """Return the requests that an engine has rejected, by reason."""
        return +Counter(too_long=int(self._state["rejected"][engine]))

    def clamped(self, engine: int) -> int:
        """Return the requests that an engine has allowed fewer tokens than they asked for."""
        return int(self._state["clamped"][engine])

    def _labels(self, by_id: Int64s, ids: Int64s) -> list[str]:
        """Return the labels of requests by id, where copies of the workload are numbered."""
        assert self._load.loop is not None
        numbers = by_id[ids]
        labels, copies = self._load.turns.labels(self._turn_of[numbers]), self._load.loop.copy[numbers].tolist()
        return [f"{label}#{copy + 1}" if copy else label for label, copy in zip(labels, copies, strict=True)]

    def _flush(self, engine: int) -> None:
        """Pass the rows of an engine since the last flush to its fold, and free their place."""
        arrays, state = self._arrays, self._state[engine : engine + 1]
        taken = {}
        for name in ("launches", "gauges", "works", "messages", "gaps", "decodes", "segments"):
            rows = arrays.decodes_us if name == "decodes" else getattr(arrays, name)
            taken[name] = rows[engine, : int(state[name][0])]
            state[name] = 0
        gaps = self._open_gaps[engine]
        gaps.add(taken["decodes"], taken["segments"])
        if gaps.is_full:
            gaps.forget(arrays.requests, self._running(engine))
        self.metrics[engine].take_measured(
            MeasuredRows(
                batches=taken["launches"],
                modes=MODES,
                gauges=taken["gauges"],
                cpu=taken["works"],
                works=WORKS,
                messages=taken["messages"],
                itl_us=taken["gaps"],
            )
        )
        if int(arrays.run["unseen"][0]) + arrays.running_batch.shape[1] > len(arrays.unseen):
            self._arrays = arrays._replace(unseen=np.concatenate((arrays.unseen, np.zeros_like(arrays.unseen))))
            self._advance = machine_code.bound(self._arrays)

    def _running(self, engine: int) -> Int64s:
        """Return the requests of an engine that are in its running batch or in flight; some may be named twice."""
        arrays, state = self._arrays, self._state[engine]
        found = [arrays.running_batch[engine, : state["decoding"]]]
        for i in range(int(state["in_flight"])):
            slot = (int(state["oldest"]) + i) % arrays.flights.shape[1]
            flight = arrays.flights[engine, slot]
            found.append(arrays.samplers[engine, slot, : 0 if flight["in_stretch"] else flight["samplers"]])
        numbers = np.concatenate(found)
        return numbers[numbers >= 0]

    def hand_over(self) -> None:
        """Pass all measurements so far to the folds: rows, requests, batches in flight, counts."""
        self._arrays.run["settles"] = 1
        self._advance(0.0)
        for engine in range(len(self.metrics)):
            self._flush(engine)
        arrays, turns = self._arrays, self._load.turns
        numbers = np.arange(self._routed())  # by id
        if self._load.loop is not None:
            sent = np.flatnonzero(arrays.requests["id"] >= 0)
            numbers = sent[np.argsort(arrays.requests["id"][sent])]
        sent_to = arrays.requests["engine"][numbers]
        labels = turns.labels if self._load.loop is None else partial(self._labels, numbers)
        for engine, fold in enumerate(self.metrics):
            state = self._state[engine]
            arrived = numbers[sent_to == engine][: int(state["arrived"])]
            requests = arrays.requests[arrived]
            slots = (state["oldest"] + np.arange(state["in_flight"])) % arrays.flights.shape[1]
            flying = arrays.flights[engine, slots]
            columns = ("batch_id", "mode", "launched_us", "rows", "new_tokens", "prefill_tokens", "kv_tokens")
            fold.take_measured_requests(
                MeasuredRequests(
                    request_id=requests["id"],
                    arrival_us=requests["arrival_us"] + arrays.run["hop_us"] - state["frontend_us"],
                    prompt_tokens=requests["prompt_tokens"],
                    admitted_us=requests["admitted_us"],
                    ended_us=requests["ended_us"],
                    rejected=_rejected(requests),
                    output_tokens=requests["outputs"],
                    first_message_us=requests["first_us"],
                    last_message_us=requests["last_us"],
                    itl_us_max=np.where(requests["itl_us_max"] < 0, np.nan, requests["itl_us_max"]),
                    labels=labels,
                    tenants=[turns.tenants[code] for code in turns.tenant[self._turn_of[arrived]].tolist()],
                    last_us=int(state["last_us"]),
                    open_batches={name: flying[name] for name in columns},
                    modes=MODES,
                    cached_tokens=requests["cached_tokens"],
                    retractions=requests["retractions"],
                    retracted=int(state["retractions"]),
                    tokens_discarded=int(state["tokens_discarded"]),
                    evicted_pages={name: int(state[f"evicted_by_{name}"]) for name in ("admission", "decode")},
                    decodes_skipped=int(state["decodes_skipped"]),
                    deferred={reason: int(state[f"deferred_{reason}"]) for reason in DEFERRED},
                )
            )


def _rejected(requests: Any) -> Any:
    """Return which requests were rejected at their arrival, bool [requests]."""
    return (requests["ended_us"] >= 0) & (requests["admitted_us"] < 0)


def _run_stops(turns: Turns) -> Int64s:
    """Return the position in its prompt at which each run of a prompt stops, int64 [runs]."""
    stops = np.cumsum(turns.run_tokens, dtype=np.int64)
    before = np.concatenate((np.zeros(1, np.int64), stops))[turns.run_starts]
    return stops - np.repeat(before, turns.run_stops - turns.run_starts)


def block_keys(turns: Turns, block_tokens: int) -> tuple[Int64s, Int64s, Any]:
    """Return where the whole blocks of each prompt start and stop among all of them, and the key of each block, int32.

    Blocks have the same key exactly if their prompts have the same tokens up to their end, and the same tenant. Token
    ids are chained, so the last token of a block identifies these tokens.
    """
    counts = turns.prompt_tokens.astype(np.int64) // block_tokens
    stops = np.cumsum(counts)
    starts = stops - counts
    run_stops = np.cumsum(turns.run_tokens, dtype=np.int64)
    begins = np.append(0, run_stops)[turns.run_starts]
    ends = np.arange(1, int(counts.sum()) + 1) - np.repeat(starts, counts)  # blocks of the prompt up to this one
    last = np.repeat(begins, counts) + ends * block_tokens - 1
    run = np.searchsorted(run_stops, last, side="right")
    tokens = turns.run_first_token[run].astype(np.int64) + last - (run_stops[run] - turns.run_tokens[run])
    tenants = np.repeat(turns.tenant.astype(np.int64), counts)
    _, keys = np.unique(tenants << 32 | tokens, return_inverse=True)
    return starts, stops, keys.astype(np.int32)


def _shuffled(engines: Sequence[FastEngine], requests: int) -> Any:
    """Return the rank of each request id on each engine whose waiting queue is shuffled, int32 [engines, requests]."""
    shuffles = any(one.config.schedule_policy == "random" for one in engines)
    ranks = np.zeros((len(engines), requests if shuffles else 1), np.int32)
    for row, one in zip(ranks, engines, strict=True):
        if one.config.schedule_policy == "random":
            queue: Any = SimpleNamespace(request_ids=range(requests), config=one.config)
            row[shuffled(queue)] = np.arange(requests)
    return ranks


def _engine(engine: FastEngine, shares_prefixes: bool) -> Any:
    """Return the initial state of an engine, a `arrays_of.ENGINE`."""
    config, cpu = engine.config, engine.cpu
    ratio = NewTokenRatio(config.schedule_conservativeness)
    chunked, most = config.chunked_prefill_size, config.prefill_max_requests
    least = config.chunked_prefill_size_min
    policy = POLICIES[config.schedule_policy]
    deduplication = DEDUPLICATIONS[config.prefix_deduplication] if shares_prefixes else arrays_of.KEEPS
    state = np.zeros((), arrays_of.ENGINE)
    values = {
        "page_size": config.page_size,
        "pages": config.pages,
        "radix_cache": config.radix_cache,
        "same_step_sharing": config.same_step_sharing,
        "refresh": config.waiting_prefix_refresh,
        "reserve": RESERVES[config.reserve],
        "batching": BATCHINGS[config.batching],
        "slots": config.launches_max,
        "max_running_requests": config.max_running_requests,
        "prompt_tokens_max": config.prompt_tokens_max(True),
        "prompts_only_tokens_max": config.prompt_tokens_max(False),
        "request_tokens_max": config.request_tokens_max,
        "rows_max": config.rows_max,
        "newest_first": config.retraction_policy == "newest",
        "to_front": config.retracted_requeue == "front",
        "keeps_retracted": config.retracted_kv == "cache",
        "prefill_max_requests": NO_LIMIT if most is None else most,
        "prefill_decode_interval": config.prefill_decode_interval,
        "max_prefill_tokens": config.max_prefill_tokens,
        "chunked_prefill_size": NO_LIMIT if chunked is None else chunked,
        "chunked_prefill_size_min": NO_LIMIT if least is UNSET else least,
        "policy": policy,
        "deduplication": deduplication,
        "passes": policy != arrays_of.QUEUE_ORDER or deduplication != arrays_of.KEEPS,
        "bypass_limit": NO_LIMIT if config.bypass_limit is None else config.bypass_limit,
        "align": config.split_tokens,
        "unit": config.chunk_unit_tokens,
        "ratio_initial": ratio.initial,
        "ratio_floor": ratio.floor,
        "ratio_decay": ratio.decay,
        "plan_fixed_us": cpu.plan_fixed_us,
        "plan_row_us": cpu.plan_row_us,
        "result_fixed_us": cpu.result_fixed_us,
        "result_row_us": cpu.result_row_us,
        "arrival_us": cpu.arrival_us,
        "frontend_us": engine.frontend_us,
        "nothing_new": 1,
        "extended_at": -config.prefill_decode_interval,
        "ratio": ratio.value,
        "free_pages": config.pages,
        "weight": 1.0,
    }
    values |= dict.fromkeys(("sent", "coming", "head", "tail", "prefilling", "deferred", "last_chosen"), arrays_of.NONE)
    for name, value in values.items():
        state[name] = value
    return state
