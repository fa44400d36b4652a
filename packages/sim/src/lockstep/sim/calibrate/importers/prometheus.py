"""Scrapes of the metrics of a running vLLM or SGLang, in Prometheus' text format.

Two scrapes are a span of time: the differences of their counters are the requests of that span, and the sums of their
histograms give the means of TTFT and TPOT exactly. Several scrapes are as many spans, less one. A single scrape counts
from the start of the server. Source of the names: docs/design/metrics.md of vLLM, docs/references/production_metrics.md
of SGLang; `vllm:request_time_per_output_token_seconds` is a mean per request, the older
`vllm:time_per_output_token_seconds` has an observation per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.sim.calibrate.load_runs import MeasuredPoint, Measurements, ServerFacts
from lockstep.sim.cost import CalibrationError

FORM = "Prometheus"
REQUESTS_MIN = 20  # of a span; fewer have no stable mean
CACHED_SHARE = 0.05  # of the prompt tokens; with more, prompts played without a cache take too long

_SAMPLE = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+(?P<time>-?\d+))?\s*$"
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_CLASS_OF_TOTALS = ("_total", "")  # some exporters leave the ending of counters out


@dataclass(frozen=True)
class MetricNames:
    """The names of what is read, by engine, best first."""

    engine: str
    ttft: tuple[str, ...]
    tpot: tuple[str, ...]
    e2e: tuple[str, ...]
    prompt_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    running: str
    waiting: str
    cached: tuple[str, ...]


NAMES = (
    MetricNames(
        "vllm",
        ttft=("vllm:time_to_first_token_seconds",),
        tpot=(
            "vllm:request_time_per_output_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
        ),
        e2e=("vllm:e2e_request_latency_seconds",),
        prompt_tokens=("vllm:prompt_tokens",),
        output_tokens=("vllm:generation_tokens",),
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        cached=("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    ),
    MetricNames(
        "sglang",
        ttft=("sglang:time_to_first_token_seconds",),
        tpot=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        e2e=("sglang:e2e_request_latency_seconds",),
        prompt_tokens=("sglang:prompt_tokens",),
        output_tokens=("sglang:generation_tokens",),
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        cached=("sglang:cached_tokens",),
    ),
)


@dataclass(frozen=True)
class Scrape:
    """The samples of one scrape, summed over engines and labels."""

    name: str  # file
    values: Mapping[str, float]
    labels: Mapping[str, Mapping[str, str]]  # of the last sample, by metric
    models: frozenset[str]
    time_s: float | None  # of the samples, if the scrape has times

    def first(self, names: Sequence[str], endings: Sequence[str] = ("",)) -> str | None:
        """Return the first name, with the first ending, that the scrape has."""
        return next((name + end for name in names for end in endings if name + end in self.values), None)


def is_scrape(text: str) -> bool:
    """Whether a text is a scrape: a comment or a sample of one of the engines is among its first lines."""
    return any(line.startswith(("vllm:", "sglang:", "# HELP", "# TYPE")) for line in text.splitlines()[:50])


def read_scrape(text: str, name: str) -> Scrape:
    """Parse a scrape. Raises: CalibrationError with the line and column of what is no sample."""
    values: dict[str, float] = {}
    labels: dict[str, dict[str, str]] = {}
    models, time_s = set(), None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.match(line)
        where = f"{name}, line {number}"
        if found is None:
            raise CalibrationError(
                f'{where}: expected a sample, such as vllm:num_requests_running{{engine="0"}} 3.0, got `{line[:60]}`\n'
                "hint: save the answer of GET /metrics as it is"
            )
        try:
            value = float(found["value"])
        except ValueError:
            raise CalibrationError(
                f"{where}, column {found.start('value') + 1}: expected a number, got `{found['value'][:40]}`\n"
                "hint: save the answer of GET /metrics as it is"
            ) from None
        own = dict(_LABEL.findall(found["labels"] or ""))
        if found["name"].endswith("_bucket"):
            continue  # means follow from sums and counts alone
        values[found["name"]] = values.get(found["name"], 0.0) + value
        labels[found["name"]] = own
        if found["name"].startswith(("vllm:", "sglang:")) and own.get("model_name"):
            models.add(own["model_name"])
        if found["time"]:
            time_s = int(found["time"]) / 1e3
    return Scrape(name, values, labels, frozenset(models), time_s)


def measurements_of(scrapes: Sequence[Scrape], interval_s: float | None = None) -> Measurements:
    """Return one point for each span between two scrapes, or for all time of the server with a single scrape.

    Args:
        scrapes: of one server, in the order of time.
        interval_s: seconds from a scrape to the next, for scrapes without times.
    Raises: CalibrationError if a metric is missing, a counter fell, or no span has REQUESTS_MIN requests.
    """
    names = next((one for one in NAMES if scrapes[0].first(one.ttft, ("_count",))), None)
    if names is None:
        raise CalibrationError(
            f"{scrapes[0].name}: metric `{NAMES[0].ttft[0]}` or `{NAMES[1].ttft[0]}` is missing\n"
            "hint: scrape a vLLM, or an SGLang started with --enable-metrics"
        )
    if len(scrapes[0].models) > 1:
        models = ", ".join(sorted(scrapes[0].models))
        raise CalibrationError(f"{scrapes[0].name}: samples of {models}\nhint: scrape the server of one model")
    pairs: list[tuple[Scrape | None, Scrape]] = [*pairwise(scrapes)] or [(None, scrapes[0])]
    points, short = [], 0
    for before, after in pairs:
        point = _point(names, before, after, interval_s)
        if point is None:
            short += 1
        else:
            points.append(point)
    if not points:
        raise CalibrationError(
            f"{scrapes[-1].name}: fewer than {REQUESTS_MIN} requests ended in each of {short} spans\n"
            "hint: scrape farther apart, or under more load"
        )
    return Measurements(points=tuple(points))


def _point(names: MetricNames, before: Scrape | None, after: Scrape, interval_s: float | None) -> MeasuredPoint | None:
    """Return the means of a span; None if fewer than REQUESTS_MIN requests had their first token in it."""

    def grown(wanted: Sequence[str], endings: Sequence[str] = ("",)) -> float:
        key = after.first(wanted, endings)
        if key is None:
            raise CalibrationError(
                f"{after.name}: metric `{wanted[0]}{endings[0]}` is missing\nhint: save all of GET /metrics"
            )
        now, then = after.values[key], before.values.get(key, 0.0) if before is not None else 0.0
        if now < then:
            raise CalibrationError(
                f"{after.name}: counter `{key}` fell from {then:,.0f} to {now:,.0f}\n"
                "hint: the server restarted in between, or the scrapes are not in the order of time"
            )
        return now - then

    requests = grown(names.ttft, ("_count",))
    if requests < REQUESTS_MIN:
        return None
    ttft_s = grown(names.ttft, ("_sum",)) / requests
    tpot_s = grown(names.tpot, ("_sum",)) / max(grown(names.tpot, ("_count",)), 1.0)
    prompt_tokens = grown(names.prompt_tokens, _CLASS_OF_TOTALS)
    prompt, output = prompt_tokens / requests, grown(names.output_tokens, _CLASS_OF_TOTALS) / requests
    notes = []
    span_s = interval_s
    if before is not None and before.time_s is not None and after.time_s is not None:
        span_s = after.time_s - before.time_s
    if before is not None and span_s and after.first(names.e2e, ("_sum",)):
        in_progress = grown(names.e2e, ("_sum",)) / span_s
    else:
        both = [one for one in (before, after) if one is not None]
        in_progress = sum(one.values.get(key, 0.0) for one in both for key in (names.running, names.waiting)) / len(
            both
        )
        notes.append(
            f"{after.name}: requests in progress are those of the moments of the scrapes, {in_progress:.1f}; "
            "--scrape-interval gives the mean over the time between"
        )
    if after.first(names.cached, _CLASS_OF_TOTALS):
        share = grown(names.cached, _CLASS_OF_TOTALS) / prompt_tokens if prompt_tokens else 0.0
        if share > CACHED_SHARE:
            notes.append(
                f"{after.name}: {share:.0%} of the prompt tokens were cached, points are played without a cache"
            )
    if before is None:
        notes.append(f"{after.name}: one scrape counts from the start of the server, its first requests included")
    what = after.name if before is None else f"{before.name} to {after.name}"
    return MeasuredPoint(
        what, FORM, prompt, max(output, 2.0), max(in_progress, 1.0), ttft_s, tpot_s, int(requests), False,
        _facts(names, after), tuple(notes),
    )  # fmt: skip


def _facts(names: MetricNames, scrape: Scrape) -> ServerFacts:
    config = scrape.labels.get("vllm:cache_config_info", {})
    kv_dtype = "fp8" if config.get("cache_dtype", "").startswith("fp8") else ""
    return ServerFacts(engine=names.engine, model=next(iter(scrape.models), ""), kv_dtype=kv_dtype)
