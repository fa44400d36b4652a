"""What an engine does around its batches: the CPU lane between them, and the front end between client and engine.

    run = EngineRun.read(Path("runs/vllm"))          # a journal of the core, or a recording of another scheduler
    lane = run.lane()                                # CpuModel, from the gaps between a result and the next launch
    client = read_clients([Path("runs/client")])     # of `lockstep bench serve --out`
    twin = Twin.of(run, client, cost, lane)          # the client's requests, simulated
    twin.frontend_us                                 # measured at the client, and not part of the engine

The client's clock and the engine's differ by an unknown constant, so no time of one is compared with a time of the
other. Requests of both are paired by their lengths, in order of arrival. The engine records an arrival when its loop
takes the request in, which is up to a batch later than the request reached it, unless the engine was idle. So the
front end is what the client measured beyond the engine for requests that found it idle, if these are most. Under more
load it is what the client measured beyond a simulation of its own arrivals, in which requests wait for the loop, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray
from simpy import Environment

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    ObservedEvent,
    RequestArrived,
    RequestFinished,
    RequestRejected,
)
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.host.recording import RecordingHeader, has_recording
from lockstep.sim.cost import CalibrationError, CostModel, CpuModel
from lockstep.sim.cost.calibration import RATIOS_MIN
from lockstep.sim.cost.fit import nonnegative_least_squares
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.host_options import HostOptions
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.results.batch_times import BatchFold, BatchTime, BatchTimes
from lockstep.sim.results.recorded_engine import ReadRecording
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.workload.journal_turns import turns_of_journal
from lockstep.sim.workload.recording_turns import turns_of_recording
from lockstep.sim.workload.turns import Turns, WorkloadError

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

GAPS_MIN = 50  # gaps from which a lane is fitted
LONG_GAP = 20.0  # times the median: a longer gap is time of other processes, not of the engine
IDLE_MIN, IDLE_SHARE = 10, 0.5  # requests that found the engine idle, from which on the front end is theirs
PAIRED_MIN = 0.95  # share of the client's requests that must be found in the journal
Answer = tuple[float, float, float]
"""TTFT, TPOT and end-to-end time of a request, in us; NaN where it has none."""

FIGURES: dict[str, Callable[[Float64s], float]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p90": lambda values: float(np.percentile(values, 90)),
}
METRICS = ("ttft", "tpot", "e2e")
NO_ANSWER = (np.nan, np.nan, np.nan)


@dataclass(frozen=True, eq=False)
class EngineRun:
    """The facts of a recorded run that a calibration is fitted to."""

    folder: Path
    config: SchedConfig
    times: BatchTimes
    gaps: LaneSpans  # from a result, or from an arrival at an idle engine, to the launch slot behind it
    plans: LaneSpans  # from a launch slot to the start of the batch, while the device is idle
    answers: Mapping[str, Answer]  # by label
    came_us: Mapping[str, float]  # by label: how long before its recorded arrival the request came, as an estimate
    idle: Mapping[str, bool]  # by label: whether the request found the engine idle

    @classmethod
    def read(cls, folder: Path) -> EngineRun:
        """Read a journal of the core, or a recording of another scheduler. Raises: JournalError, Divergence."""
        if has_recording(folder):
            recording = ReadRecording(folder)
            config = _config_of(recording.header)
            steps: Iterable[tuple[ObservedEvent, Step]] = ((event, step) for event, step, _ in recording.steps())
        else:
            config, steps = read_journal(folder).header.config, fold(folder)
        gaps, batches, metrics = GapFold(), BatchFold(), MetricsFold(kv_pages=config.pages)
        found: list[BatchTime] = []
        for event, step in steps:
            metrics.observe(event, step)
            gaps.observe(event, step)
            if (one := batches.observe(event, step)) is not None:
                found.append(one)
        return cls(
            folder,
            config,
            BatchTimes(found, batches.left_out),
            LaneSpans.of(gaps.gaps_us, gaps.counts),
            LaneSpans.of(gaps.plans_us, gaps.plan_counts),
            answers_of(metrics.result()),
            gaps.came_us,
            gaps.idle,
        )

    @cached_property
    def turns(self) -> Turns:
        """Its requests as turns. Raises WorkloadError if they cannot be simulated again."""
        turns, _ = (turns_of_recording if has_recording(self.folder) else turns_of_journal)(self.folder)
        return turns

    @property
    def not_simulated(self) -> str:
        """Why a simulation of the engine alone would not be this run; empty if it can be simulated."""
        config = self.config
        features = {
            "drafts": config.speculates,
            "forced tokens": config.jumps,
            "host memory below its cache": config.tiers is not UNSET,
            "pools of windows or states": config.hybrid is not UNSET,
            "another engine": config.hands_over or config.shares_passes,
            "pipeline stages": config.pipelines,
        }
        try:
            features["adapters"] = self.turns.adapter is not None
        except WorkloadError as error:
            return error.problem
        found = [name for name, is_there in features.items() if is_there]
        return f"the engine has {', '.join(found)}" if found else ""

    def lane(self) -> CpuModel | None:
        """Return the engine's CPU time around its batches; None if the run has fewer than GAPS_MIN gaps.

        Plans are timed where the device is idle, from the offered launch slot to the start of the batch. That is 0 if
        the duration of a batch begins with its plan, as in vLLM. If the device never is, plans cost what CpuModel has.
        """
        gaps, plans = self.gaps, self.plans
        if len(gaps.us) < GAPS_MIN:
            return None
        fixed_us, row_us, arrival_us = _line(gaps)
        usual = CpuModel()
        known = len(plans.us) >= GAPS_MIN
        plan_us, plan_row_us, _ = _line(plans) if known else (usual.plan_fixed_us, usual.plan_row_us, 0.0)
        return CpuModel(
            plan_fixed_us=round(plan_us, 2),
            plan_row_us=round(plan_row_us, 3),
            result_fixed_us=round(fixed_us, 2),
            result_row_us=round(row_us, 3),
            arrival_us=round(arrival_us, 2),
        )


@dataclass(frozen=True, eq=False)
class LaneSpans:
    """Spans of CPU work, with what was done in each."""

    us: Float64s  # [spans]
    counts: Float64s  # [spans, 3]: results or plans, rows, requests that arrived

    @classmethod
    def of(cls, us: Sequence[int], counts: Sequence[tuple[int, int, int]]) -> LaneSpans:
        """Return the spans as arrays."""
        return cls(np.array(us, np.float64), np.array(counts, np.float64).reshape(len(counts), 3))


def _line(spans: LaneSpans) -> tuple[float, float, float]:
    """Return us per span, per row and per arrival. Spans far above the median are time of other processes."""
    usual = spans.us <= LONG_GAP * max(float(np.median(spans.us)), 1.0)
    fixed_us, row_us, arrival_us = nonnegative_least_squares(spans.counts[usual], spans.us[usual]).tolist()
    return fixed_us, row_us, arrival_us


def _config_of(header: RecordingHeader) -> SchedConfig:
    """Return the settings under which the core decides most like the recorded engine: profile `vllm`, its sizes."""
    sizes = {
        "page_size": header.page_size,
        "pages": header.pages,
        "context_tokens_max": header.context_tokens_max,
        "max_running_requests": header.max_running_requests,
        "max_prefill_tokens": header.batch_tokens_max,
        "chunked_prefill_size": header.batch_tokens_max,
    }
    known = {name: value for name, value in sizes.items() if value}
    return SchedConfig(**{**profile_settings("vllm"), **known, "overlap_depth": header.overlap_depth})


class GapFold:
    """Collects the spans of CPU work around batches, event by event."""

    def __init__(self) -> None:
        self.gaps_us: list[int] = []
        self.counts: list[tuple[int, int, int]] = []
        self.plans_us: list[int] = []
        self.plan_counts: list[tuple[int, int, int]] = []
        self._launched: dict[int, tuple[int, int]] = {}  # by launched batch: time of its launch slot, rows
        self._free_us = -1  # end of the last batch on the device
        self._open = 0  # requests that have not ended
        # Time and rows of the last result, or 0 rows for an arrival at an idle engine; None: no gap is open.
        self._since: tuple[int, int] | None = None
        self._arrived = 0
        self._took_us = 0  # duration of the last batch
        self.came_us: dict[str, float] = {}
        self.idle: dict[str, bool] = {}

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Take in an event and its Step."""
        if type(event) is RequestArrived:
            self._open += event.parallel_samples
            self._arrived += event.parallel_samples
            self.idle[event.label] = not self._open - event.parallel_samples and not self._launched
            if self.idle[event.label]:
                self._since, self._arrived = (event.time_us, 0), event.parallel_samples
            elif self._since is not None and self._since[1]:  # taken in behind a batch, so it came during that batch
                self.came_us[event.label] = self._took_us / 2.0
        self._open -= sum(type(one) in (RequestFinished, RequestRejected) for one in step.decided)
        if type(event) is BatchFinished:
            ready_us, rows = self._launched.pop(event.batch_id, (0, 0))
            if rows and event.started_us > self._free_us:
                self.plans_us.append(event.started_us - ready_us)
                self.plan_counts.append((1, rows, 0))
            self._free_us = event.finished_us
            self._since, self._arrived = (event.time_us, rows) if self._open and rows else None, 0
            self._took_us = event.finished_us - event.started_us
        launched = step.launched()
        if launched is not None:
            self._launched[launched.batch_id] = (event.time_us, len(launched.rows))
            if self._since is not None:
                since_us, rows = self._since
                self.gaps_us.append(event.time_us - since_us)
                self.counts.append((int(rows > 0), rows, self._arrived))
                self._since = None


# --------------------------------------------------------------------------------------------------------- the client


@dataclass(frozen=True, eq=False)
class ClientRun:
    """Requests as their clients measured them, in the order of clients and of arrival.

    Args:
        columns: values of requests, int64 [requests] each; `request_id` counts on over the clients, and `client` is the
            number of the client. Each client has a clock of its own.
    """

    columns: Mapping[str, Any]

    @property
    def count(self) -> int:
        return len(self.columns["arrival_us"])

    def values(self, metric: str) -> Float64s:
        """Return ttft, tpot or e2e in us, float64 [requests]."""
        found = np.asarray(self.columns[f"{metric}_us"], np.float64)
        return np.where(found >= 0.0, found, np.nan)


def read_clients(folders: Sequence[Path]) -> ClientRun:
    """Read the completed requests of run folders of `lockstep bench serve`, which ran one after another.

    Args:
        folders: at least one.
    Raises: CalibrationError if one is none; ConfigError if it cannot be read.
    """
    before, parts = 0, []
    for number, folder in enumerate(folders):
        columns, asked = _client_columns(folder)
        columns["request_id"] = columns["request_id"] + before
        parts.append({**columns, "client": np.full(len(columns["request_id"]), number)})
        before += asked
    return ClientRun({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _client_columns(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the columns of the completed requests of a folder, and the number of all its requests."""
    run = read_run(folder)
    if not run.is_measured or run.requests is None:
        raise CalibrationError(
            f"`--client` {folder} is not a run folder of `lockstep bench serve --out` with its requests\n"
            "hint: give the folder that the requests of this run were measured into"
        )
    requests = run.requests
    done = np.isin(requests["finish_reason"], ("length", "stop")) & (requests["ttft_us"] >= 0)
    order = np.flatnonzero(done)[np.argsort(requests["arrival_us"][done], kind="stable")]
    names = ("request_id", "arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "tpot_us", "e2e_us")
    return {name: np.asarray(requests[name])[order] for name in names}, len(done)


def paired(turns: Turns, client: ClientRun) -> Int64s:
    """Return for each request of the client the turn that it was, [requests]; -1 where none has its lengths.

    Of several turns with equal lengths it is the one nearest in the order of sending.
    """
    lengths = list(zip(turns.prompt_tokens.tolist(), turns.output_tokens.tolist(), strict=True))
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, pair in enumerate(lengths):
        places[pair].append(at)
    columns = (client.columns[name].tolist() for name in ("request_id", "prompt_tokens", "output_tokens"))
    asked = [(number, (prompt, output)) for number, prompt, output in zip(*columns, strict=True)]
    alone = [places[pair][0] - number for number, pair in asked if len(places[pair]) == 1]
    shift = round(float(np.median(alone))) if alone else 0  # requests of the engine before the client's first
    found = []
    for number, pair in asked:
        left = places[pair]
        best = min(left, key=lambda at: abs(at - number - shift), default=-1)
        if best >= 0:
            left.remove(best)
        found.append(best)
    return np.array(found, np.int64)


@dataclass(frozen=True, eq=False)
class Twin:
    """Requests, measured and simulated; float64 [requests] by metric: ttft, tpot, e2e, in us.

    `frontend_us` is the time of a request outside of the engine, from the client to it and of its answers back. It is
    0 if both sides end at the engine, and is not in `simulated`.
    """

    measured: Mapping[str, Float64s]
    simulated: Mapping[str, Float64s]
    frontend_us: float = 0.0

    @classmethod
    def of(cls, run: EngineRun, client: ClientRun, cost: CostModel, cpu: CpuModel) -> Twin:
        """Simulate the requests of a run at the times at which clients sent them.

        Args:
            cost, cpu: fitted to the run's batches and gaps.
        Raises: CalibrationError if the clients' requests are too few or not those of the run, or it cannot be
            simulated.
        """
        if run.not_simulated:
            raise CalibrationError(
                f"the front end cannot be fitted, because {run.folder} cannot be simulated: {run.not_simulated}\n"
                "hint: leave out --client"
            )
        if client.count < RATIOS_MIN:
            raise CalibrationError(
                f"`--client` has {client.count} completed requests, the front end needs {RATIOS_MIN}\n"
                "hint: send more requests with `lockstep bench serve`, or leave out --client"
            )
        turns = run.turns
        rows = paired(turns, client)
        known = rows >= 0
        if known.mean() < PAIRED_MIN:
            raise CalibrationError(
                f"`--client` has {client.count:,} requests, and {int(known.sum()):,} of them have the lengths of "
                f"requests in {run.folder}\nhint: give the client that sent the requests of this run"
            )
        sent_us, of_client = client.columns["arrival_us"].astype(np.float64), client.columns["client"]
        # Requests that no client's table has, those of a warm-up, keep the engine's times.
        arrival_us = turns.arrival_us.astype(np.float64)
        for number in np.unique(of_client[known]):
            own = known & (of_client == number)
            clock_us = float(np.median(turns.arrival_us[rows[own]] - sent_us[own]))
            arrival_us[rows[own]] = sent_us[own] + clock_us
        answers = simulated_answers(_at(turns, arrival_us), run.config, cost, cpu)
        labels = turns.labels(rows[known])
        measured = {metric: client.values(metric)[known] for metric in METRICS}
        simulated = _columns([answers.get(label, NO_ANSWER) for label in labels])
        beyond_us = measured["ttft"] - simulated["ttft"]
        idle = np.array([run.idle.get(label, False) for label in labels])
        if idle.sum() >= IDLE_MIN and idle.mean() >= IDLE_SHARE:  # exact, while batches differ from simulated ones
            of_engine = np.array([run.answers.get(label, NO_ANSWER)[0] for label in labels])
            beyond_us = (measured["ttft"] - of_engine)[idle]
        return cls(measured, simulated, middle(beyond_us))

    @classmethod
    def of_engine(cls, run: EngineRun, cost: CostModel, cpu: CpuModel) -> Twin:
        """Simulate the requests of a run at the times at which they reached the engine, compared with the engine's.

        A request that was taken in behind a batch came during it, half the batch before on average. TTFT and
        end-to-end time of both sides count from there. The run must be one that can be simulated.
        """
        turns = run.turns
        labels = turns.labels(np.arange(len(turns)))
        came_us: Float64s = np.array([run.came_us.get(label, 0.0) for label in labels])
        reached_us = np.asarray(turns.arrival_us - came_us, dtype=np.float64)
        answers = simulated_answers(_at(turns, reached_us), run.config, cost, cpu)
        measured = _columns([run.answers.get(label, NO_ANSWER) for label in labels])
        for metric in ("ttft", "e2e"):
            measured[metric] = measured[metric] + came_us
        return cls(measured, _columns([answers.get(label, NO_ANSWER) for label in labels]))

    def ratios(self, metric: str, parts: int) -> list[float]:
        """Return measured / simulated of each part of the requests, in order of arrival, with the front end."""
        measured, simulated = self.values(metric)
        blocks = np.array_split(np.arange(len(measured)), parts)
        return [float(measured[block].sum() / simulated[block].sum()) for block in blocks if len(block)]

    def values(self, metric: str) -> tuple[Float64s, Float64s]:
        """Return the measured and the simulated values of the requests that have both, with the front end."""
        measured = self.measured[metric]
        simulated = self.simulated[metric] + (self.frontend_us if metric != "tpot" else 0.0)
        both = np.isfinite(measured) & np.isfinite(simulated)
        return measured[both], simulated[both]

    def table(self) -> list[tuple[str, str, float, float]]:
        """Return (metric, figure, measured, simulated) in us for FIGURES of METRICS, with the front end."""
        found = []
        for metric in METRICS:
            measured, simulated = self.values(metric)
            if len(measured):
                found += [(metric, figure, of(measured), of(simulated)) for figure, of in FIGURES.items()]
        return found


def middle(differences: Float64s) -> float:
    """Return the mean of the differences without the lowest and the highest tenth, at least 0."""
    known = np.sort(differences[np.isfinite(differences)])
    tenth = len(known) // 10
    return max(0.0, float(known[tenth : len(known) - tenth].mean())) if len(known) else 0.0


def simulated_answers(turns: Turns, config: SchedConfig, cost: CostModel, cpu: CpuModel) -> dict[str, Answer]:
    """Simulate turns on one engine. Return the answers by label."""
    metrics = MetricsFold(kv_pages=config.pages)
    host = EngineHost(
        Environment(), Engine(config, digests=False), Arrivals(turns), cost, cpu, NoJournal(), metrics, HostOptions()
    )
    host.env.process(host.run())
    host.env.run()
    return answers_of(metrics.result())


def answers_of(data: RunData) -> dict[str, Answer]:
    """Return the answers of a run's requests by label."""
    requests = data.requests
    columns = [np.asarray(getattr(requests, f"{metric}_us"), np.float64) for metric in METRICS]
    rows = [np.where(column >= 0.0, column, np.nan).tolist() for column in columns]
    return dict(zip(requests.label.tolist(), zip(*rows, strict=True), strict=True))


def _at(turns: Turns, arrival_us: Float64s) -> Turns:
    """Return the turns at these times, in unchanged order, the first at 0."""
    by_clock = turns.by_clock_rows
    times_us = arrival_us.copy()
    times_us[by_clock] = np.maximum.accumulate(arrival_us[by_clock] - arrival_us[by_clock].min())
    return turns.at(np.rint(times_us).astype(np.int64))


def _columns(answers: Sequence[Answer]) -> dict[str, Float64s]:
    rows = np.array(answers, np.float64).reshape(len(answers), len(METRICS))
    return {metric: rows[:, at] for at, metric in enumerate(METRICS)}
