"""Published serving points: TTFT and TPOT at a fixed concurrency, and their values in the simulator.

points, left_out = read_serving_points(Path("serving_points.csv"))
played = play(points[0], CLIENTS["spread"])
played.tpot_us, played.ttft_us      # means over requests, to compare with points[0].tpot_us and points[0].ttft_us
played.tpot_parts @ weights         # TPOT under a correction, without a new simulation: see cost/fit.py

A point is simulated with as many users as its concurrency; each user sends a request when the answer to the previous
one ends. Scheduler settings are those of the engine (ENGINES). CLIENTS has the possible properties of the load
generator that the sources do not state.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simpy import Environment

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import (
    BatchShape,
    CalibrationError,
    CapacityError,
    CatalogueError,
    CostModel,
    CpuModel,
    Duration,
    GpuSpec,
    KvDtype,
    MemoryNeeds,
    ModelSpec,
    Parallelism,
    WeightsDtype,
    kv_capacity,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import Calibration
from lockstep.sim.cost.models import check_split
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import BaseModel
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.host_options import HostOptions
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, Turn

Float64s = NDArray[np.float64]

FREE_CPU = CpuModel(plan_fixed_us=0.0, plan_row_us=0.0, result_fixed_us=0.0, result_row_us=0.0, arrival_us=0.0)
FRONTEND_US = 20_000
"""The assumed time from an answer's end to the user's next request, for schedules that are recorded before a fit.

So an arrival falls anywhere in the batch that runs then, as measured ones do, and not just before a launch. 5 to 80 ms
give the same schedules within the errors of a fit; the fit determines the value.
"""
OUTPUT_FIRST_TOKEN = 2**30  # token ids of outputs begin here; prompts have lower ids


# -------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """One row of a file: an engine on some GPUs under a fixed concurrency, with its measured latencies."""

    row: int  # number in the file; the first after the header is 2
    engine: str
    engine_version: str
    model: ModelSpec
    gpu: GpuSpec
    tp: int
    weights_dtype: WeightsDtype
    prompt_tokens: int
    output_tokens: int
    lengths_from: float  # lengths are uniform in [lengths_from * N, N]; 1.0: N
    lengths_known: bool  # the source describes how lengths were distributed
    concurrency: int
    ttft_us: float
    tpot_us: float
    ep: int = 1
    kv_dtype: KvDtype = "bf16"
    attention_backend: str = ""  # such as flashinfer; "": unstated
    prefill_tokens: int = 0  # new tokens of a pass, at most; 0: as its engine usually has
    receive_interval: int = 1  # passes between two receptions of requests
    overlaps: bool = False  # the scheduler runs beside the GPU, although the release does not do so by default
    extra_users: int = 0  # users beyond `concurrency`, the number of requests that the server then takes at a time

    @property
    def split(self) -> Parallelism:
        """The layout of the engine over GPUs."""
        return Parallelism(tp=self.tp, ep=self.ep)

    @property
    def key(self) -> tuple[Any, ...]:
        """The conditions of the measurement.

        Only the first of several points with equal conditions is kept. Otherwise a fit would be tested on conditions
        that it was fitted to.
        """
        return (
            self.engine, self.engine_version, self.model.name, self.gpu.name, self.split, self.weights_dtype,
            self.prompt_tokens, self.output_tokens, self.concurrency, self.kv_dtype, self.attention_backend,
            self.prefill_tokens, self.receive_interval, self.extra_users,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """The conditions as one line of text."""
        lengths = f"{self.prompt_tokens}/{self.output_tokens}"
        return f"{self.engine} {self.model.name} {self.weights_dtype} {self.split}, {lengths}, {self.concurrency} users"


REQUIRED = ("engine", "model", "gpu", "tp", "precision", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms")
OPTIONAL = (
    "engine_version", "kv_dtype", "attention_backend", "dp", "ep", "length_dist", "suspect", "prefill_tokens",
    "receive_interval", "overlap", "extra_users",
)  # fmt: skip
KV_DTYPES: dict[str, KvDtype] = {"bf16": "bf16", "fp16": "bf16", "auto": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}
PRECISIONS: dict[str, WeightsDtype] = {
    "bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp4": "mxfp4", "mxfp4": "mxfp4", "nvfp4": "nvfp4",
}  # fmt: skip
UNIFORM_CAMPAIGN = "InferenceX"  # beginning of `length_dist` in rows of this campaign: lengths uniform in [0.8 N, N]
UNIFORM_FROM = 0.8
USERS_MAX = 2**20
TP_MAX = 1024
PASSES_MAX = 10_000
HINT = "hint: docs/cost-models.md, section 6, describes serving points"


def read_serving_points(
    path: Path, *, suspect: bool = False, experts: bool = True
) -> tuple[list[ServingPoint], dict[str, list[int]]]:
    """Read a CSV file with the columns REQUIRED, and with those of OPTIONAL that it has.

    Args:
        suspect: whether to keep rows with text in the column `suspect`.
        experts: whether the column `ep` sets the layout of experts; False: all GPUs share the width of every expert.
    Returns: the points, and by reason the numbers of rows that were left out.
    Raises: CalibrationError with the file, the row and the column that cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise CalibrationError(f"{path}: column `{missing[0]}` is missing\nhint: {', '.join(REQUIRED)}")
            rows = list(reader)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror or error}\n{HINT}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{path}: not a CSV file: {error}\n{HINT}") from error
    points: list[ServingPoint] = []
    left_out: dict[str, list[int]] = {}
    seen: set[tuple[Any, ...]] = set()
    for number, row in enumerate(rows, start=2):
        where = f"{path}, row {number}"
        if row.get("suspect") and not suspect:
            left_out.setdefault("marked suspect", []).append(number)
            continue
        if _number(row, "dp", where, default=1.0) > 1:
            left_out.setdefault("data parallel, which is not modelled", []).append(number)
            continue
        try:
            point = _point(row, number, where, experts=experts)
            check_split(point.model, point.split)
        except (CatalogueError, CapacityError) as error:
            reason = str(error).splitlines()[0]
            left_out.setdefault(reason, []).append(number)
            continue
        if point.key in seen:
            left_out.setdefault("the same conditions again", []).append(number)
            continue
        seen.add(point.key)
        points.append(point)
    return points, left_out


def _point(row: Mapping[str, str], number: int, where: str, *, experts: bool) -> ServingPoint:
    name = row["model"].strip()
    model = load_model(name.removesuffix("-FP8").removesuffix("-fp8"))
    precision = row["precision"].strip().split(" ")[0].lower()
    if precision not in PRECISIONS:
        raise CalibrationError(f"{where}: `precision` must be one of {', '.join(PRECISIONS)}, got `{precision}`")
    engine = row["engine"].strip().lower()
    if engine not in ENGINES:
        raise CalibrationError(f"{where}: `engine` must be one of {', '.join(ENGINES)}, got `{row['engine']}`")
    lengths = row.get("length_dist") or "unknown"
    uniform = lengths.startswith(UNIFORM_CAMPAIGN)
    return ServingPoint(
        row=number,
        engine=engine,
        engine_version=row.get("engine_version") or "",
        model=model,
        gpu=load_gpu(row["gpu"]),
        tp=_whole(row, "tp", where, TP_MAX),
        weights_dtype=PRECISIONS[precision],
        kv_dtype=_kv_dtype(row, where, "fp8" if engine in FP8_KV and PRECISIONS[precision] == "fp8" else "bf16"),
        attention_backend=(row.get("attention_backend") or "").strip().lower(),
        prompt_tokens=_whole(row, "isl", where, LENGTH_TOKENS_MAX),
        output_tokens=_whole(row, "osl", where, LENGTH_TOKENS_MAX),
        lengths_from=UNIFORM_FROM if uniform else 1.0,
        lengths_known=uniform or lengths.startswith("fixed"),
        concurrency=_whole(row, "concurrency", where, USERS_MAX),
        ttft_us=1e3 * _number(row, "ttft_ms", where),
        tpot_us=1e3 * _number(row, "tpot_ms", where),
        ep=int(_number(row, "ep", where, default=1.0)) if experts else 1,
        prefill_tokens=_whole(row, "prefill_tokens", where, LENGTH_TOKENS_MAX, default=0.0),
        receive_interval=_whole(row, "receive_interval", where, PASSES_MAX, default=1.0),
        overlaps=(row.get("overlap") or "").strip().lower() == "yes",
        extra_users=_extra_users(row, where),
    )


def _extra_users(row: Mapping[str, str], where: str) -> int:
    text = (row.get("extra_users") or "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) <= USERS_MAX):
        raise CalibrationError(f"{where}: `extra_users` must be a whole number from 0 to {USERS_MAX:,}, got `{text}`")
    return int(text or 0)


def _kv_dtype(row: Mapping[str, str], where: str, usual: KvDtype) -> KvDtype:
    """Return the type of KV that a row states, or the usual one of its engine."""
    text = (row.get("kv_dtype") or "").strip().lower()
    if text and text not in KV_DTYPES:
        raise CalibrationError(f"{where}: `kv_dtype` must be one of {', '.join(KV_DTYPES)}, got `{text}`")
    return KV_DTYPES[text] if text else usual


def _number(row: Mapping[str, str], column: str, where: str, default: float | None = None) -> float:
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise CalibrationError(f"{where}: `{column}` must be a number above 0, got `{text}`\nhint: leave the row out")
    return value


def _whole(row: Mapping[str, str], column: str, where: str, most: int, default: float | None = None) -> int:
    value = _number(row, column, where, default)
    if value != int(value) or value > most:
        problem = f"`{column}` must be a whole number from 1 to {most:,}, got `{row[column]}`"
        raise CalibrationError(f"{where}: {problem}\nhint: leave the row out")
    return int(value)


# ----------------------------------------------------------------------------------------------- engines and clients

ENGINES: dict[str, dict[str, Any]] = {
    # vLLM serves with up to 8,192 new tokens per pass on a GPU of 70 GB or more (v1 engine defaults, by usage).
    "vllm": {**profile_settings("vllm"), "chunked_prefill_size": 8192, "max_prefill_tokens": 8192},
    "sglang": profile_settings("sglang"),
    # TensorRT-LLM's in-flight batching works like vLLM's batching: one budget (`max_num_tokens` 8,192), and running
    # requests go first. Its default policy (GUARANTEED_NO_EVICT) never retracts: an admitted request has the pages of
    # its whole answer.
    "trtllm": {
        **profile_settings("vllm"),
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 8192,
        "reserve": "full",
    },
}
"""Settings of the scheduler by engine."""


FP8_KV = ("trtllm",)
"""Engines that are assumed to keep KV in fp8 if weights are fp8 and the column `kv_dtype` is empty.

The evidence: with 128 requests of 1,536 tokens each, Qwen3-32B on one H100 streamed first tokens after 0.75 s. So all
requests were admitted at once, and KV in bf16 would not have fitted (5.6 s in simulation).
"""


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """The properties of a load generator that published reports do not state."""

    name: str
    requests_per_user: int  # sent one after another
    output_spread: float  # output lengths are uniform in [(1 - spread) N, (1 + spread) N] if their lengths are unknown
    why: str  # completes the sentence "TTFT is that of a client whose ..."
    output_spread_tokens: int = 0  # the same in tokens, added to the share

    def output_range(self, tokens: int) -> tuple[int, int]:
        """Return the least and the most output tokens where lengths are not stated: `tokens` and the spread."""
        spread = self.output_spread * tokens + self.output_spread_tokens
        return round(max(tokens - spread, 0.1 * tokens)), round(tokens + spread)


CLIENTS = {
    client.name: client
    for client in (
        LoadGenerator("spread", 10, 0.2, "outputs vary by a fifth, so its users get out of step"),
        LoadGenerator("waves", 10, 0.0, "requests are all equally long, so its users stay in step"),
    )
}
"""Clients that a fit chooses between. Ten requests per user is the number of InferenceX.

TTFT depends on whether the users stay in step: prompts that arrive together wait for each other. The sources do not
state it; a calibration's notes name the client that it was fitted with.
"""


# ---------------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True, eq=False)
class Played:
    """The simulated values of a point. Parts are float64 [5], means over requests, in the order of FEATURES."""

    tpot_us: float
    ttft_us: float
    tpot_parts: Float64s  # features of the passes between a request's first and last token, per token
    ttft_parts: Float64s  # features of the passes between its arrival and its first token
    batches: int


class _Recorder:
    """A cost model that records the shapes of all batches, in order."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.shapes: list[BatchShape] = []

    def batch_us(self, shape: BatchShape) -> Duration:
        self.shapes.append(shape)
        return Duration(self._cost.batch_us(shape).mean_us)  # the mean alone, because a point is simulated only once

    def describe(self) -> dict[str, Any]:
        return self._cost.describe()


def play(
    point: ServingPoint,
    client: LoadGenerator,
    calibration: Calibration | None = None,
    *,
    operators: Path | None = None,
    seed: int = 7,
) -> Played:
    """Simulate a point: its users in a closed loop, on the scheduler settings of its engine.

    Args:
        calibration: correction of the cost model and its front end; None: no correction, and FRONTEND_US.
        operators: folder of operator tables, with which the cost model is the measured model; None: the roofline.
    Raises: CalibrationError if a request does not end with its answer.
    """
    base = base_of(point, operators)
    cost: CostModel = base if calibration is None else calibration.cost_model(base)
    frontend_us = FRONTEND_US if calibration is None else round(calibration.correction.frontend_us)
    run, shapes = _simulate(point, client, cost, seed, frontend_us)
    return _measure(run, shapes, base, point)


def base_of(point: ServingPoint, operators: Path | None = None) -> BaseModel:
    """Return the uncorrected cost model of a point: the roofline, or with `operators` the measured model."""
    dtypes: dict[str, Any] = {"weights_dtype": point.weights_dtype, "kv_dtype": point.kv_dtype}
    base = base_cost_model(point.model, point.gpu, point.split, **dtypes, operators=operators)
    assert not isinstance(base, PipelineModel)  # the file has no column for the number of stages
    return base


def simulated(
    point: ServingPoint, client: LoadGenerator, cost: CostModel, seed: int = 7, frontend_us: int = FRONTEND_US
) -> tuple[RunData, list[BatchShape]]:
    """Simulate a point with any cost model. Return the run and the shapes of its batches, in order.

    Args:
        frontend_us: time from the end of an answer to the arrival of its user's next request. TTFT begins at the
            engine, without it.
    Raises: CalibrationError if a request does not end with its answer.
    """
    run, shapes = _simulate(point, client, cost, seed, frontend_us)
    _check_answered(run, point)
    return run, shapes


def _simulate(
    point: ServingPoint, client: LoadGenerator, model: CostModel, seed: int, frontend_us: int
) -> tuple[RunData, list[BatchShape]]:
    cost = _Recorder(model)
    settings = ENGINES[point.engine]
    if point.prefill_tokens:
        budget = {"chunked_prefill_size": point.prefill_tokens, "max_prefill_tokens": point.prefill_tokens}
        settings = {**settings, **budget}
    config = SchedConfig(
        context_tokens_max=2 * (point.prompt_tokens + point.output_tokens),
        **{**settings, "max_running_requests": _rows_max(point, settings)},
    )
    kv = kv_capacity(
        point.model,
        point.gpu,
        point.split,
        weights_dtype=point.weights_dtype,
        kv_dtype=point.kv_dtype,
        page_tokens=config.page_size,
        needs=MemoryNeeds(sampled_rows=config.max_running_requests, state_rows=point.concurrency),
    )
    config = SchedConfig(**{**_fields(config), "pages": kv.pages})
    metrics = MetricsFold(kv_pages=config.pages)
    arrivals = Arrivals(turns_of(point, client, seed))
    host = EngineHost(
        Environment(),
        Engine(config, digests=False),
        arrivals,
        cost,
        FREE_CPU,
        NoJournal(),
        metrics,
        HostOptions(seed=seed, frontend_us=frontend_us, receive_interval=point.receive_interval),
    )
    host.env.process(host.run())
    host.env.run()
    return metrics.result(), cost.shapes


def _fields(config: SchedConfig) -> dict[str, Any]:
    return {field: getattr(config, field) for field in config.__struct_fields__}


def _rows_max(point: ServingPoint, settings: Mapping[str, Any]) -> int:
    """Return the requests that a server takes at a time: its setting, or the concurrency if that is its limit."""
    usual: int = settings.get("max_running_requests", 256)
    return point.concurrency if point.extra_users else max(point.concurrency, usual)


def turns_of(point: ServingPoint, client: LoadGenerator, seed: int) -> list[Turn]:
    """Return the requests of all users. The n-th request of a user follows the answer to its request before."""
    rng = np.random.Generator(np.random.Philox(seed))
    users = point.concurrency + point.extra_users
    count = users * client.requests_per_user
    prompts = rng.integers(math.ceil(point.lengths_from * point.prompt_tokens), point.prompt_tokens + 1, count)
    if point.lengths_known:
        least, most = math.ceil(point.lengths_from * point.output_tokens), point.output_tokens
    else:
        least, most = client.output_range(point.output_tokens)
    outputs = rng.integers(max(2, least), most + 1, count)
    turns = []
    first_token, output_token = 0, OUTPUT_FIRST_TOKEN
    for index, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        after = index - users if index >= users else None
        turns.append(Turn(index, 0, (first_token, prompt), prompt, output, output_token, str(index), after=after))
        first_token += prompt
        output_token += output
    return turns


def _measure(run: RunData, shapes: list[BatchShape], base: BaseModel, point: ServingPoint) -> Played:
    requests, batches = run.requests, run.batches
    _check_answered(run, point)
    parts = parts_of(base, shapes)
    until = np.vstack([np.zeros(parts.shape[1]), np.cumsum(parts, axis=0)])  # until[i]: sum over the first i batches
    arrival_us = requests.arrival_us
    arrived = np.searchsorted(batches.finished_us, arrival_us, side="right")
    first = np.searchsorted(batches.finished_us, arrival_us + requests.ttft_us, side="right")
    last = np.searchsorted(batches.finished_us, arrival_us + requests.e2e_us, side="right")
    gaps = (requests.output_tokens - 1)[:, None]
    # A request that arrives during a batch waits for the rest of that batch.
    running = np.minimum(arrived, len(shapes) - 1)
    took_us = np.maximum(batches.finished_us - batches.started_us, 1)
    gone = np.clip((arrival_us - batches.started_us[running]) / took_us[running], 0.0, 1.0)
    ttft_parts = until[first] - until[arrived] - gone[:, None] * parts[running]
    return Played(
        tpot_us=float(requests.tpot_us.mean()),
        ttft_us=float(requests.ttft_us.mean()),
        tpot_parts=((until[last] - until[first]) / gaps).mean(axis=0),
        ttft_parts=ttft_parts.mean(axis=0),
        batches=len(shapes),
    )


def _check_answered(run: RunData, point: ServingPoint) -> None:
    if not run.requests.completed.all():
        lost = int((~run.requests.completed).sum())
        raise CalibrationError(f"{point.title}: {lost} requests were not answered: {run.requests.finish_reason[0]}")


def parts_of(base: BaseModel, shapes: list[BatchShape]) -> Float64s:
    """Return the features of each batch, float64 [batches, 5], in the order of FEATURES."""
    tokens = [shape.extend_tokens + shape.decode_rows for shape in shapes]
    total_us = np.array([base.batch_us(shape).mean_us for shape in shapes])
    collectives_us = np.array([base.collectives_us(count) for count in tokens])
    rows = np.array([shape.extend_rows + shape.decode_rows for shape in shapes], np.float64)
    ones = np.ones(len(shapes))
    return np.column_stack([total_us - collectives_us, collectives_us, ones, rows, base.collectives * ones])
