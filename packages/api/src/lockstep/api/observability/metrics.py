"""Prometheus metrics under Lockstep's names, and on request also under the names of vLLM and SGLang.

Times are measured by the worker, from the head of a request to the arrival of tokens from the engine. Times to the
first token and between tokens are measured for streams only, since other answers are delivered whole. The state of an
engine is read from its messages. Several workers share their figures in files (prometheus_client's multiprocess mode),
so each worker can serve all figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from lockstep.api.observability.batched import BatchedCounter, BatchedHistogram, BatchedLabels, ManyHistogram
from lockstep.api.observability.metrics_folder import FOLDER
from lockstep.api.processes.wire import (
    ITERATION_TOKENS,
    RATIOS,
    BatchDrift,
    DraftFigures,
    ExpertFigures,
    Gauges,
    SampleEnded,
    TierFigures,
)

if TYPE_CHECKING:
    from lockstep.api.processes.bridge import Reply, Ticket

# fmt: off
TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
# fmt: on
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""Buckets of vLLM's histograms, so that one dashboard can show both servers."""

SGLANG = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prompt_tokens_cached": "cached_tokens",
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
    "num_preemptions": "num_retracted_reqs",
    "request_queue_time_seconds": "queue_time_seconds",
    "num_requests": "num_requests",
    "num_aborted_requests": "num_aborted_requests",
    "kv_used_tokens": "num_used_tokens",
    "prefix_cache_hit_ratio": "cache_hit_rate",
}
"""Metrics with an SGLang equivalent of the same meaning -> its name after the prefix sglang:."""

NOT_VLLM = (
    *("engine_up", "journal_blocked", "kv_used_tokens", "kv_cached_pages", "prefix_cache_hit_ratio"),
    *("num_requests", "num_aborted_requests", "accepted_length_mean"),
)
NOT_VLLM_GROUPS = ("http_", "expert_", "batch_", "tier_", "storage_", "prompt_tokens_from_")
"""Metrics with these prefixes have no vLLM equivalent; every other metric is also served under its vLLM name."""

ADDED_AT_ONCE = 256
"""Requests, or parts of answers, whose figures are collected before they are added."""


Batched = TypeVar("Batched", BatchedHistogram, BatchedCounter, BatchedLabels)


@dataclass(slots=True)
class CountedAnswer:
    """An answer, with the part of it that the metrics have counted. The times are of time.monotonic, in seconds."""

    ticket: Ticket
    reply: Reply
    arrived_s: float  # when its request arrived
    streams: bool  # whether tokens are sent as they come
    tokens: int = 0  # counted
    newest_s: float = 0.0  # when the last of these came
    end: bool = False  # whether the end was counted


class Metrics:
    """All figures of a worker."""

    def __init__(self, compat: Iterable[str] = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client has no types here
        self.registry = CollectorRegistry()
        self._compat = tuple(compat)
        self._model = ""
        self._batched: list[BatchedHistogram | BatchedCounter | BatchedLabels] = []
        self._collected = 0  # requests and parts of answers since the figures were added
        http = ("lockstep_http_requests", "HTTP requests.", ("path", "method", "status"))
        self._http = self._collecting(BatchedLabels(Counter(*http, registry=self.registry)))

    def _collecting(self, one: Batched) -> Batched:
        self._batched.append(one)
        return one

    def add_collected(self) -> None:
        """Add the collected figures to those that `exposition` returns, of this worker and of others."""
        self._collected = 0
        for one in self._batched:
            one.add_all()

    def _collect(self) -> None:
        self._collected += 1
        if self._collected >= ADDED_AT_ONCE:
            self.add_collected()

    def name_model(self, name: str, engines: int = 1) -> None:
        """Set the model label of all figures, before the first request is generated."""
        self._model = name
        keys = ("model_name", "engine")

        def histogram(suffix: str, text: str, buckets: tuple[float, ...]) -> _ByEngine[BatchedHistogram]:
            made = ManyHistogram(f"lockstep_{suffix}", text, keys, buckets=buckets, registry=self.registry)
            return _ByEngine(
                lambda engine: self._collecting(BatchedHistogram(made.labels(*self._labels(engine)))), engines
            )

        def counter(suffix: str, text: str) -> _ByEngine[BatchedCounter]:
            made = Counter(f"lockstep_{suffix}", text, keys, registry=self.registry)
            return _ByEngine(
                lambda engine: self._collecting(BatchedCounter(made.labels(*self._labels(engine)))), engines
            )

        self._ttft = histogram("time_to_first_token_seconds", "From the request to its first token.", TTFT_S)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", ITL_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From the request to the end of its answer.", REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "From arrival at the engine to admission.", REQUEST_S)
        self._prefill = histogram("request_prefill_time_seconds", "From admission to the first token.", REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST_S)
        self._inference = histogram("request_inference_time_seconds", "From admission to the last token.", REQUEST_S)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time per token after the first.", ITL_S)
        self._tokens_max = histogram(
            "request_max_num_generation_tokens", "Largest number of tokens allowed for an answer.", TOKENS
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._output_tokens = counter("generation_tokens", "Tokens of answers.")
        self._cached = counter("prompt_tokens_cached", "Tokens of prompts found in the radix cache.")
        self._queries = counter("prefix_cache_queries", "Tokens of prompts looked up in the radix cache.")
        self._hits = counter("prefix_cache_hits", "Tokens of prompts found in the radix cache.")
        self._requests = counter("num_requests", "Answers requested.")
        self._aborted = counter("num_aborted_requests", "Answers that were cancelled, also because the client left.")
        ended = ("lockstep_request_success", "Answers that ended.", (*keys, "finished_reason"))
        self._ended = self._collecting(BatchedLabels(Counter(*ended, registry=self.registry)))

    # --------------------------------------------------------------------------------------------------------- requests

    def began(self, ticket: Ticket, prompt_tokens: int, max_tokens: int | None) -> None:
        """Count a prompt that was sent to its engine, and the limit of its answers."""
        engine = ticket.engine
        for _ in ticket.replies:
            self._prompt[engine].observe(prompt_tokens)
            self._requests[engine].inc()
            if max_tokens is not None:
                self._tokens_max[engine].observe(max_tokens)
        self._prompt_tokens[engine].inc(prompt_tokens)

    def observe_tokens(self, answer: CountedAnswer) -> None:
        """Count new tokens of an answer, or its end. Each token is counted once."""
        self._collect()
        reply, engine = answer.reply, answer.ticket.engine
        arrivals, reply.arrivals = reply.arrivals, []
        if arrivals:
            if answer.streams:  # other answers arrive whole, or a few dozen tokens at a time
                self._saw_times(answer, arrivals)
            now_s, tokens = arrivals[-1]
            self._output_tokens[engine].inc(tokens - answer.tokens)
            answer.tokens, answer.newest_s = tokens, now_s
        ended = reply.ended
        if ended is None or answer.end:
            return
        answer.end = True
        self._ended.inc(*self._labels(engine), ended.reason)
        if ended.reason == "cancelled":
            self._aborted[engine].inc()
        if ended.rejected:
            return
        self._output[engine].observe(len(reply.tokens))
        self._e2e[engine].observe((answer.newest_s or time.monotonic()) - answer.arrived_s)
        self._cached[engine].inc(ended.cached_tokens)
        self._queries[engine].inc(ended.prompt_tokens)
        self._hits[engine].inc(ended.cached_tokens)
        self._saw_phases(engine, ended)

    def _saw_phases(self, engine: int, ended: SampleEnded) -> None:
        """Record the times of queue, prefill and decode that the engine reported."""
        if ended.queue_us >= 0:
            self._queue[engine].observe(ended.queue_us / 1e6)
        if ended.prefill_us < 0:
            return
        self._prefill[engine].observe(ended.prefill_us / 1e6)
        self._decode[engine].observe(ended.decode_us / 1e6)
        self._inference[engine].observe((ended.prefill_us + ended.decode_us) / 1e6)
        if ended.output_tokens > 1:
            self._tpot[engine].observe(ended.decode_us / 1e6 / (ended.output_tokens - 1))

    def _saw_times(self, answer: CountedAnswer, arrivals: list[tuple[float, int]]) -> None:
        times = [now_s for now_s, _ in arrivals]
        if answer.tokens:
            times.insert(0, answer.newest_s)
        else:
            self._ttft[answer.ticket.engine].observe(times[0] - answer.arrived_s)
        self._itl[answer.ticket.engine].observe_many(map(sub, times[1:], times))

    def answered(self, path: str, method: str, status: int) -> None:
        """Count an HTTP request that was answered."""
        self._http.inc(path, method, str(status))
        self._collect()

    # ------------------------------------------------------------------------------------------------------------------

    def exposition(self, *gauges: Gauges | None, up: Sequence[bool] = (), blocked: Sequence[bool] = ()) -> bytes:
        """Return the figures of all workers and the state of the engines in Prometheus' text format.

        Args:
            gauges: the newest gauges of each engine; None: none were received yet, or the engine does not run.
            up: for each engine whether it takes requests; empty if that is unknown.
            blocked: for each engine whether it waits until its journal can be written.
        """
        self.add_collected()
        source: Any = self.registry
        if FOLDER in os.environ:
            source = CollectorRegistry()
            MultiProcessCollector(source)  # type: ignore[no-untyped-call]  # it has no types here either
        found = [*source.collect()]
        found += self._by_engine("engine_up", "Whether the engine takes requests.", up)
        found += self._by_engine(
            "journal_blocked", "Whether the engine waits until its journal can be written.", blocked
        )
        stand: dict[str, Metric] = {}
        for engine, one in enumerate(gauges):
            for metric in () if one is None else self._engine(engine, one):
                if metric.name in stand:
                    stand[metric.name].samples += metric.samples
                else:
                    stand[metric.name] = metric
        found += stand.values()
        return generate_latest(_MetricList([*found, *self._renamed(found)]))

    def _labels(self, engine: int) -> tuple[str, str]:
        """Return the labels of a model and an engine. Requests that never had an engine have `none`."""
        return self._model, str(engine) if engine >= 0 else "none"

    def _by_engine(self, suffix: str, text: str, values: Sequence[bool]) -> Iterator[Metric]:
        one = GaugeMetricFamily(f"lockstep_{suffix}", text, labels=("model_name", "engine"))
        for engine, value in enumerate(values):
            one.add_metric(self._labels(engine), float(value))
        if values:
            yield one

    def _engine(self, engine: int, gauges: Gauges) -> Iterator[Metric]:
        """Yield the metrics of an engine's state."""
        labels, values = ("model_name", "engine"), self._labels(engine)
        used_tokens = round(gauges.token_usage * gauges.pages) * gauges.page_size
        hit_ratio = gauges.cached_tokens / max(gauges.cached_tokens + gauges.new_tokens, 1)
        for name, text, value in (
            ("num_requests_running", "Requests that run.", gauges.running),
            ("num_requests_waiting", "Requests that wait.", gauges.waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV pool that is neither free nor evictable, 0 to 1.",
                gauges.token_usage,
            ),
            ("kv_used_tokens", "Tokens of the KV pool that are neither free nor evictable.", used_tokens),
            ("kv_cached_pages", "Pages held by the radix cache only.", gauges.pages_cached),
            ("prefix_cache_hit_ratio", "Share of prompt tokens found in the radix cache, 0 to 1.", hit_ratio),
        ):
            one = GaugeMetricFamily(f"lockstep_{name}", text, labels=labels)
            one.add_metric(values, value)
            yield one
        counted = CounterMetricFamily("lockstep_num_preemptions", "Retractions of requests.", labels=labels)
        counted.add_metric(values, gauges.retractions)
        yield counted
        restarted = CounterMetricFamily("lockstep_engine_restarts", "Restarts of the engine.", labels=labels)
        restarted.add_metric(values, gauges.restarts)
        yield restarted
        batches = HistogramMetricFamily("lockstep_iteration_tokens_total", "Tokens of a batch.", labels=labels)
        bounds = zip([*map(str, ITERATION_TOKENS), "+Inf"], accumulate(gauges.batch_counts), strict=True)
        if gauges.batch_counts:
            batches.add_metric(values, list(bounds), gauges.batch_tokens)
            yield batches
        if gauges.experts is not None:
            yield from self._experts(values, gauges.experts)
        if gauges.drafts is not None:
            yield from self._drafts(values, gauges.drafts)
        if gauges.forced_tokens is not None:
            forced = CounterMetricFamily(
                "lockstep_forced_tokens",
                "Tokens forced by grammars and computed by jump-forward.",
                labels=("model_name", "engine"),
            )
            forced.add_metric(values, gauges.forced_tokens)
            yield forced
        if gauges.tiers is not None:
            yield from self._tiers(values, gauges.tiers)
        if (received := gauges.transfers) is not None:
            text = "Transfers of KV from prefill engines that ended."
            ended = CounterMetricFamily("lockstep_transfers", text, labels=("model_name", "engine", "outcome"))
            ended.add_metric((*values, "done"), received.done)
            ended.add_metric((*values, "failed"), received.failed)
            text = "Pages of KV that prefill engines sent."
            moved = CounterMetricFamily("lockstep_transferred_pages", text, labels=("model_name", "engine"))
            moved.add_metric(values, received.pages)
            yield from (ended, moved)
        if gauges.checks is not None:
            for name, text, value in (
                ("checks", "Checks of the scheduler's invariants while the engine was idle.", gauges.checks.checks),
                ("failures", "Checks that found a broken invariant.", gauges.checks.failures),
                ("check_seconds", "Time of these checks, in seconds.", gauges.checks.seconds),
            ):
                checked = CounterMetricFamily(f"lockstep_invariant_{name}", text, labels=labels)
                checked.add_metric(values, value)
                yield checked
        if gauges.drift:
            yield from self._drift(engine, gauges.drift)

    def _drafts(self, values: tuple[str, str], found: DraftFigures) -> Iterator[Metric]:
        """Yield the metrics of verified drafts, under vLLM's names."""
        labels = ("model_name", "engine")
        for name, text, value in (
            (
                "num_drafts",
                "Verifications of a row; each yields one token and the right drafts.",
                found.verifications,
            ),
            ("num_draft_tokens", "Drafts that were verified.", found.drafts),
            ("num_accepted_tokens", "Drafts that were right.", found.right),
        ):
            counted = CounterMetricFamily(f"lockstep_spec_decode_{name}", text, labels=labels)
            counted.add_metric(values, value)
            yield counted
        text = "Verifications with right drafts up to this position, from 0 on."
        by_position = CounterMetricFamily(
            "lockstep_spec_decode_num_accepted_tokens_per_pos", text, labels=(*labels, "position")
        )
        for position, right in enumerate(found.right_by_position):
            by_position.add_metric((*values, str(position)), right)
        yield by_position
        mean = GaugeMetricFamily(
            "lockstep_accepted_length_mean", "Mean tokens per verification of a row.", labels=labels
        )
        mean.add_metric(values, 1 + found.right / max(found.verifications, 1))
        yield mean

    def _tiers(self, values: tuple[str, str], found: TierFigures) -> Iterator[Metric]:
        """Yield the metrics of host memory and storage."""
        labels = ("model_name", "engine")
        for name, text, tokens in (
            ("host", "Tokens of prompts that were loaded from host memory.", found.host_tokens),
            ("storage", "Those of them that were read from storage.", found.storage_tokens),
        ):
            counted = CounterMetricFamily(f"lockstep_prompt_tokens_from_{name}", text, labels=labels)
            counted.add_metric(values, tokens)
            yield counted
        text = "Ended moves of pages between device, host memory and storage."
        moves = CounterMetricFamily("lockstep_tier_moves", text, labels=(*labels, "kind", "outcome"))
        for kind, outcome, count in found.moves:
            moves.add_metric((*values, kind, outcome), count)
        pages = CounterMetricFamily("lockstep_tier_pages", "Pages that moves brought.", labels=(*labels, "kind"))
        for kind, count in found.pages:
            pages.add_metric((*values, kind), count)
        text = "Windows and states of hybrid models that moves brought."
        blocks = CounterMetricFamily("lockstep_tier_blocks", text, labels=(*labels, "kind", "block"))
        for kind, block, count in found.blocks:
            blocks.add_metric((*values, kind, block), count)
        yield from (moves, pages, blocks) if found.blocks else (moves, pages)
        if found.store:
            text = "Pages of the storage: read, missed, damaged, written, known, failed, removed."
            stored = CounterMetricFamily("lockstep_storage_pages", text, labels=(*labels, "event"))
            counts = dict(found.store)
            held = GaugeMetricFamily("lockstep_storage_bytes", "Bytes in the storage, of all engines.", labels=labels)
            held.add_metric(values, counts.pop("bytes_stored"))
            for name, count in counts.items():
                stored.add_metric((*values, name.removeprefix("pages_").removeprefix("writes_")), count)
            yield from (stored, held)

    def _experts(self, values: tuple[str, str], found: ExpertFigures) -> Iterator[Metric]:
        """Yield the metrics of the load of experts."""
        labels = ("model_name", "engine")
        text = "Tokens routed to experts, counted once for each expert of each layer."
        tokens = CounterMetricFamily("lockstep_expert_tokens", text, labels=labels)
        tokens.add_metric(values, found.tokens)
        text = "Load of the fullest expert over the mean, as a mean over the layers, of the newest measurements."
        imbalance = GaugeMetricFamily("lockstep_expert_load_imbalance", text, labels=labels)
        imbalance.add_metric(values, found.imbalance)
        yield from (tokens, imbalance)

    def _drift(self, engine: int, kinds: Iterable[BatchDrift]) -> Iterator[Metric]:
        """Yield the metrics of measured over predicted times, by kind of batch, in cumulative buckets."""
        labels = ("model_name", "engine", "kind")
        text = "Measured over predicted time of a batch."
        ratio = HistogramMetricFamily("lockstep_batch_time_ratio", text, labels=labels)
        took = CounterMetricFamily("lockstep_batch_seconds", "Measured time of batches.", labels=labels)
        meant = CounterMetricFamily(
            "lockstep_batch_predicted_seconds", "Predicted time of these batches.", labels=labels
        )
        bounds = [*map(str, RATIOS), "+Inf"]
        for one in kinds:
            values = (*self._labels(engine), one.kind)
            ratio.add_metric(values, list(zip(bounds, accumulate(one.counts), strict=True)), one.ratios)
            took.add_metric(values, one.measured_s)
            meant.add_metric(values, one.predicted_s)
        yield from (ratio, took, meant)

    def _renamed(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """Yield the same metrics under the names of the servers in `compat`."""
        for metric in metrics:
            name = metric.name.removeprefix("lockstep_")
            if "vllm" in self._compat and not name.startswith(NOT_VLLM_GROUPS) and name not in NOT_VLLM:
                yield _called(metric, f"vllm:{name}")
            if "sglang" in self._compat and name in SGLANG:
                yield _called(metric, f"sglang:{SGLANG[name]}")


Figure = TypeVar("Figure")


class _ByEngine(dict[int, Figure]):
    """Figures by engine. The figure for requests without an engine is created on first use."""

    def __init__(self, make: Callable[[int], Figure], engines: int) -> None:
        super().__init__({engine: make(engine) for engine in range(engines)})
        self._make = make

    def __missing__(self, engine: int) -> Figure:
        self[engine] = made = self._make(engine)
        return made


class _MetricList:
    """A registry of metrics that already exist."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _called(metric: Metric, name: str) -> Metric:
    other = Metric(name, metric.documentation, metric.type, metric.unit)
    other.samples = [Sample(name + one.name.removeprefix(metric.name), *one[1:]) for one in metric.samples]
    return other
