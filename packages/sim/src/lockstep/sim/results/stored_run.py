"""A stored run, read from its folder: metrics.json, the requests if they were written, and the headers of its journals.

    run = read_run(Path("runs/0192"))
    run.metrics["latency"]["ttft_us_p99"]
    run.requests["ttft_us"]               # int64 [requests], -1 without a first token
    run.engines[0].summary("device", "busy_us")

A cluster is read with its engines; a run without a router is one engine. Nothing is simulated or replayed here. A
folder that `lockstep simulate` cannot have written is rejected.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert
from numpy.typing import NDArray

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.metrics.balance import balance
from lockstep.sim.metrics.bottleneck import Bottleneck, bottleneck
from lockstep.sim.metrics.columns import COMPLETED
from lockstep.sim.results.results import METRICS_FORMAT, METRICS_VERSION
from lockstep.sim.results.slo_rows import SloRow, meets_all, offered_rate, slo_rows

if TYPE_CHECKING:
    import polars

NUMBER_MAX = 1e300  # so that a quotient of two numbers is finite
NEEDED = {
    "requests": ("arrived", "completed", "unfinished", "by_reject_reason"),
    "throughput": ("makespan_us", "prompt_tokens", "output_tokens"),
    "latency": ("ttft_us_p99",),
    "kv": ("used_share_max",),
    "scheduler": ("waiting_mean", "running_max", "retractions", "admissions_deferred_by_reason"),
    "device": ("busy_us", "busy_fraction", "bubble_share"),
}
"""Figures that every run must have, by group. Further figures are optional."""
DEEPER = {"device": "pipeline", "cache": "links"}
COUNTS = ("arrived", "completed", "unfinished", "prompt_tokens", "output_tokens", "retractions")
INTEGERS = ("request_id", "arrival_us", "queue_us", "ttft_us", "e2e_us", "prompt_tokens", "output_tokens")
FLOATS = ("tpot_us",)
TEXTS = ("finish_reason", "label", "tenant")
HINT = "hint: give folders that `lockstep simulate --out` or `lockstep bench serve --out` wrote"

Number = Annotated[float, Meta(ge=0, le=NUMBER_MAX)]
Group = dict[str, Number | dict[str, Number] | None]


class _Titled(Struct):
    title: str


class _RunFacts(Struct):
    seed: int
    workload: dict[str, Any]
    calibration: _Titled
    scheduler: dict[str, Any] | UnsetType = UNSET
    cost_model: dict[str, Any] | UnsetType = UNSET
    cpu_model: dict[str, Any] | UnsetType = UNSET
    router: dict[str, Any] | UnsetType = UNSET
    hop_us: Number | UnsetType = UNSET
    engines: list[_Weighted] | UnsetType = UNSET
    # facts of a run measured at a server from outside, where engine settings and inner events are unknown
    measured: dict[str, Any] | UnsetType = UNSET


class _Weighted(Struct):
    weight: Annotated[float, Meta(gt=0, le=NUMBER_MAX)]


class _Slo(Struct):
    slo: str
    bound_us: Number
    measured_us: Number | None
    met: bool | None


class _StoredIntervals(Struct):
    calibration: str
    coverage: Number
    time_factors: tuple[Number, Number]
    answers: dict[str, tuple[Number, Number] | None]


class _Router(Struct):
    routed_by_reason: dict[str, int]


class _Pipeline(Struct):
    """Busy times of pipeline stages; with `pp_size` also of microbatches. See sim/host/pipeline.py."""

    stages: int
    stage_busy_us: list[Number]  # by stage
    stage_busy_share: Number | None
    pipeline_bubble_us: Number
    microbatches: int | UnsetType = UNSET
    batches_by_microbatch: list[Number] | UnsetType = UNSET
    stage_bubble_us: list[Number] | UnsetType = UNSET  # by stage


class _StoredDevice(Struct):
    pipeline: _Pipeline | UnsetType = UNSET


class _Cache(Struct):
    links: dict[str, dict[str, Number]] | UnsetType = UNSET  # links to and from the tiers below the device


class _Deeper(Struct):
    """Groups of metrics.json with a part that is neither a number nor numbers by name; see DEEPER."""

    device: _StoredDevice
    cache: _Cache


class _Metrics(Struct):
    """The parts of metrics.json that are read here."""

    about: _RunFacts
    requests: Group
    latency: Group
    throughput: Group
    cache: Group
    kv: Group
    scheduler: Group
    device: Group
    cpu: Group
    slos: list[_Slo]
    intervals: _StoredIntervals | UnsetType = UNSET
    router: _Router | UnsetType = UNSET
    balance: Group | UnsetType = UNSET
    adapters: Group | UnsetType = UNSET
    samples: Group | UnsetType = UNSET
    sessions: Group | UnsetType = UNSET
    engines: list[dict[str, Any]] | UnsetType = UNSET


Requests = Mapping[str, NDArray[Any]]
"""Columns by name. Values of what did not happen are -1 in integers, NaN in floats and "" in texts."""


@dataclass(frozen=True, eq=False)
class StoredEngine:
    """One engine of a run."""

    metrics: Mapping[str, Any]
    weight: float  # at the router

    @property
    def about(self) -> Mapping[str, Any]:
        """The settings of the engine."""
        about: Mapping[str, Any] = self.metrics["about"]
        return about

    @property
    def kind(self) -> str:
        """The GPUs of the engine: `2 x H100-SXM`."""
        if "measured" in self.about:
            return "a server"
        return f"{self.about.get('tp')} x {self.about.get('gpu')}"

    def summary(self, part: str, name: str) -> Any:
        """Return a number of metrics.json; None if nothing was measured."""
        return self.metrics.get(part, {}).get(name)


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run read from its folder."""

    name: str  # short name for tables and charts
    folder: Path
    metrics: Mapping[str, Any]
    requests: Requests | None  # None if the run was written without them
    engines: tuple[StoredEngine, ...]

    @property
    def router(self) -> Mapping[str, Any] | None:
        """The settings of the router; None without a router."""
        return self.about.get("router")

    @property
    def routed_by_reason(self) -> Mapping[str, int]:
        """Requests by the reason of their routing; empty without a router."""
        counts: Mapping[str, int] = self.metrics["router"]["routed_by_reason"] if self.router is not None else {}
        return counts

    @property
    def engines_title(self) -> str:
        """The engines of the run: `1 x H100-SXM`, `3 x (1 x H100-SXM) and 2 x H200-SXM`."""
        kinds = Counter(engine.kind for engine in self.engines)
        return " and ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in kinds.items())

    @property
    def about(self) -> Mapping[str, Any]:
        """Settings and provenance of the run."""
        about: Mapping[str, Any] = self.metrics["about"]
        return about

    def summary(self, part: str, name: str) -> Any:
        """Return a number of metrics.json; None if nothing was measured."""
        return self.metrics.get(part, {}).get(name)

    @property
    def is_measured(self) -> bool:
        """Whether the run was measured at a server, from outside. Otherwise it was simulated."""
        return "measured" in self.about

    @property
    def slos(self) -> list[SloRow]:
        """The SLOs of the run with their measured values."""
        return slo_rows(self.metrics["slos"])

    @property
    def meets_slos(self) -> bool | None:
        """Whether all SLOs hold; None without SLOs, or if nothing was measured."""
        return meets_all(self.slos)

    @property
    def offered_per_s(self) -> float | None:
        """Requests per second that arrived; None if unknown."""
        return None if self.requests is None else offered_rate(self.requests["arrival_us"])

    @cached_property
    def completed(self) -> NDArray[np.bool_]:
        """Which requests got their complete answer: bool [requests]."""
        return np.isin(self.requests["finish_reason"], COMPLETED) if self.requests is not None else np.empty(0, bool)

    @property
    def bottleneck(self) -> Bottleneck:
        """The bottleneck of the run."""
        return bottleneck(self.metrics)

    @property
    def intervals(self) -> Mapping[str, Any] | None:
        """The intervals of the run, as in metrics.json; None without intervals."""
        return self.metrics.get("intervals")

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the interval of a figure; None without one."""
        ends = None if self.intervals is None else self.intervals["answers"].get(name)
        return None if ends is None else (ends[0], ends[1])

    @property
    def calibration(self) -> str:
        """The title of the calibration that corrected the times of the run."""
        return str(self.about["calibration"]["title"])


def read_run(folder: Path, name: str = "") -> StoredRun:
    """Read a run folder. Raises ConfigError if it is not one, has another version, or mixes files of two runs."""
    metrics = _read_metrics(folder)
    engines = _read_engines(folder, metrics)
    if len(engines) == 1 and "balance" not in metrics:
        metrics["balance"] = balance([metrics], [1.0], metrics["throughput"].get("makespan_us"))
    requests = _read_requests(folder)
    arrived = metrics["requests"]["arrived"]
    if requests is not None and len(requests["request_id"]) != arrived:
        raise ConfigError(
            f"`{folder}` has {len(requests['request_id']):,} requests in its table and {arrived:,} in metrics.json: "
            "they are of different runs\nhint: simulate it again with --overwrite"
        )
    if "router" not in metrics["about"]:
        _check_journal(folder, metrics["about"])
    return StoredRun(name or folder.name, folder, metrics, requests, engines)


def _read_engines(folder: Path, metrics: Mapping[str, Any]) -> tuple[StoredEngine, ...]:
    """Return the engines of a cluster, each with its own settings; or the run itself as its only engine."""
    about = metrics["about"]
    if "router" not in about:
        return (StoredEngine(metrics, 1.0),)
    engines = []
    for number, listed in enumerate(about["engines"]):
        place = folder / "engines" / str(number)
        if not place.is_dir():
            raise ConfigError(
                f"`{folder}` is of {len(about['engines'])} engines, but {place.relative_to(folder)} is not there\n"
                "hint: copy the whole folder, or simulate it again with --overwrite"
            )
        own = _read_metrics(place)
        of_both = [(each["seed"], each["workload"].get("digest")) for each in (about, own["about"])]
        summaries = [
            {name: each[name] for name in ("requests", "latency")} for each in (metrics["engines"][number], own)
        ]
        if of_both[0] != of_both[1] or summaries[0] != summaries[1]:
            raise ConfigError(
                f"`{place}/metrics.json` is not of the run in `{folder}/metrics.json`\n"
                "hint: simulate it again with --overwrite"
            )
        _check_journal(place, about)
        engines.append(StoredEngine(own, float(listed["weight"])))
    return tuple(engines)


def _read_metrics(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.json"
    if not folder.exists():
        raise ConfigError(f"`{folder}` does not exist\n{HINT}")
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is a file, expected a run folder\n{HINT}")
    if not path.is_file():
        inside = sorted(part.parent.name for part in folder.glob("*/metrics.json"))
        hint = f"hint: the runs are inside it: {', '.join(inside)}" if inside else HINT
        raise ConfigError(f"`{folder}` is not a run folder: it has no metrics.json\n{hint}")
    try:
        metrics: Any = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:  # from the JSON or the UTF-8 decoder
        raise ConfigError(f"`{path}` is not JSON: {error}\n{HINT}") from error
    about = metrics.get("about") if isinstance(metrics, dict) else None
    if not isinstance(about, dict) or about.get("format") != METRICS_FORMAT:
        raise ConfigError(
            f"`{path}` is not from `lockstep simulate`: its about.format is not `{METRICS_FORMAT}`\n{HINT}"
        )
    if about.get("format_version") != METRICS_VERSION:
        raise ConfigError(
            f"`{path}` is of version `{about.get('format_version')}` of {METRICS_FORMAT}, this lockstep reads "
            f"{METRICS_VERSION}\nhint: run its about.command again"
        )
    if problem := _problem(metrics):
        raise ConfigError(f"`{path}` is damaged: {problem}\nhint: run its about.command again")
    found: dict[str, Any] = metrics
    return found


def _problem(metrics: Any) -> str:
    """Return the first missing or invalid part of metrics.json, as text; empty if all are valid."""
    try:
        read = convert({name: _shallow(name, part) for name, part in metrics.items()}, _Metrics)
        convert(metrics, _Deeper)
    except (ValidationError, OverflowError) as error:
        return str(error)
    for group, names in NEEDED.items():
        for name in names:
            value = getattr(read, group).get(name, UNSET)
            is_right = isinstance(value, dict) if "_by_" in f"_{name}" else not isinstance(value, dict)
            unknown = value is None and name in COUNTS and not (group == "scheduler" and read.about.measured)
            if value is UNSET or not is_right or unknown:
                return f"{group} has no valid `{name}`"
    about = read.about
    if about.router is UNSET:
        return "about has no `scheduler`" if about.scheduler is UNSET and about.measured is UNSET else ""
    for part, name in ((read, "router"), (read, "balance"), (about, "hop_us"), (about, "engines"), (read, "engines")):
        if getattr(part, name) is UNSET:
            return f"{'about' if part is about else 'a cluster'} has no `{name}`"
    listed, measured = about.engines, read.engines
    assert not isinstance(listed, UnsetType)
    assert not isinstance(measured, UnsetType)
    return (
        "" if listed and len(listed) == len(measured) else f"{len(listed)} engines in about, {len(measured)} measured"
    )


def _shallow(group: str, part: Any) -> Any:
    """Return a part of metrics.json without the field that `_Deeper` reads."""
    if group not in DEEPER or not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != DEEPER[group]}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _read_requests(folder: Path) -> Requests | None:
    """Read the table of requests, from parquet or else from CSV; None without either."""
    parquet, csv = folder / "requests.parquet", folder / "requests.csv"
    path = parquet if parquet.is_file() else csv
    if not path.is_file():
        return None
    import polars as pl

    names = [*INTEGERS, *FLOATS, *TEXTS]
    try:
        if path is parquet:
            frame = pl.read_parquet(path, columns=names)
        else:
            kinds = dict.fromkeys(INTEGERS, pl.Int64) | dict.fromkeys(FLOATS, pl.Float64)
            frame = pl.read_csv(path, columns=names, schema_overrides=kinds | dict.fromkeys(TEXTS, pl.String))
    except (pl.exceptions.PolarsError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"`{path}` cannot be read: {first}\nhint: simulate it again with --overwrite") from error
    return _columns(frame)


def _columns(frame: polars.DataFrame) -> Requests:
    import polars as pl

    integers = {name: frame[name].cast(pl.Int64).fill_null(-1).to_numpy() for name in INTEGERS}
    floats = {name: frame[name].cast(pl.Float64).fill_null(float("nan")).to_numpy() for name in FLOATS}
    texts = {name: frame[name].cast(pl.String).fill_null("").to_numpy() for name in TEXTS}
    return integers | floats | texts


def _check_journal(folder: Path, about: Mapping[str, Any]) -> None:
    """Raise ConfigError if the journal beside metrics.json is of another run. A missing journal is accepted."""
    if not any((folder / "journal").glob("*.log")):
        return
    from lockstep.core.journal.reader import read_journal
    from lockstep.core.journal.records import JournalError
    from lockstep.host.host_header import HostHeader

    try:
        header = read_journal(folder).header
    except JournalError as error:
        raise ConfigError(
            f"the journal in `{folder}` cannot be read: {error}\nhint: simulate it again with --overwrite"
        ) from error
    expected = (about["seed"], about["workload"].get("digest"))
    digest = HostHeader.of(header).workload_digest
    if (header.seed, digest) != expected:
        raise ConfigError(
            f"`{folder}` has a metrics.json of seed {expected[0]} and workload {expected[1]}, but a journal of seed "
            f"{header.seed} and workload {digest}\nhint: simulate it again with --overwrite"
        )
