"""One simulation of a plan: what describes it wholly, the key that follows from that, and what came of it.

A trial is plain data: it travels to another process or machine as JSON, and equal trials have equal results, so that
a stored result stands for the run. `run_trial` is all that a worker does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from lockstep.core.cluster.router import RouterConfig
from lockstep.host.options import options_of
from lockstep.sim.cluster.data_parallel import RankCluster
from lockstep.sim.cluster.handover import HandoverCluster
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.routed import Cluster
from lockstep.sim.cluster.scenario import ClusterScenario, parse_scaling
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.interval import block_samples
from lockstep.sim.plan.sides import sides_of
from lockstep.sim.plan.split import RoleSplit, parse_split
from lockstep.sim.run.encoding import gpus_of_a_scheduler
from lockstep.sim.run.load import open_load
from lockstep.sim.scenario.scenario import Scenario, names_where
from lockstep.sim.workload.workload import Workload

NO_SCALING = "none"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Everything that a simulation depends on. `content` stands for what files and the installed code contain."""

    base: Scenario
    replicas: int
    router: RouterConfig = field(default_factory=RouterConfig)
    hop_us: int = 0
    autoscale: str = NO_SCALING  # as `parse_scaling` reads it; `replicas` are the most
    factor: float = 1.0  # multiplies the time of every batch: a draw of the calibration's systematic error
    resample: bool = False  # draw blocks again, for intervals of a recorded trace
    give_up: bool = False  # stop once too many requests are late for the SLO ever to be met
    content: str = ""
    prefill_decode: str | None = None  # of a replica, see split.py; None: all engines do both
    link_gbs: float | None = None  # of each GPU to other engines; None: ClusterScenario's
    link_latency_us: int | None = None

    @property
    def key(self) -> str:
        """A digest of the record: equal trials have equal keys, in every process."""
        return blake2b(msgspec.json.encode(self.record(), order="sorted"), digest_size=16).hexdigest()

    def record(self) -> dict[str, Any]:
        """The trial as it is stored and sent: fields of the scenario beside its own, as plain data."""
        found: dict[str, Any] = {}
        for one in options_of(type(self.base)).values():
            value = getattr(self.base, one.name)
            if getattr(one.option, "stored", False) or value != one.default:
                found[one.name] = tuple(map(str, value)) if one.multiple else value
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "base"}
        record = found | {name: value for name, value in own.items() if value is not None}
        return cast("dict[str, Any]", msgspec.to_builtins(record))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Trial:
        """The trial of a record. Raises TypeError for a name that is no option."""
        base = {name: value for name, value in record.items() if name in options_of(Scenario)}
        own = {name: value for name, value in record.items() if name not in base}
        base["slos"] = tuple(map(Slo.parse, base["slos"]))
        own["router"] = msgspec.convert(own["router"], RouterConfig)
        return cls(base=Scenario(**base), **own)

    @property
    def split(self) -> RoleSplit | None:
        """How prefill and decode are shared out; None if all engines do both."""
        return None if self.prefill_decode is None else parse_split(self.prefill_decode)

    @property
    def _encoder_tp_mode(self) -> str:
        """As requested, where it means something: beside others a plan may have configurations of one GPU."""
        base, split = self.base, self.split
        tps = [base.tp] if split is None else [side.tp or base.tp for side in split.sides.values()]
        gpus = max(gpus_of_a_scheduler(tp, base.attention_dp, rank_schedulers=base.rank_schedulers) for tp in tps)
        meaningless = base.mm_encoder_tp_mode == "data" and gpus == 1 and base.media is not None
        return "weights" if meaningless else base.mm_encoder_tp_mode

    def scenario(self) -> ClusterScenario:
        """What is simulated; the factor is not part of it."""
        split = self.split
        scaling = None if self.autoscale == NO_SCALING else parse_scaling(self.autoscale).within(self.replicas)
        links = {"link_gbs": self.link_gbs, "link_latency_us": self.link_latency_us}
        given: dict[str, Any] = {name: value for name, value in links.items() if value is not None}
        return ClusterScenario(
            base=replace(self.base, mm_encoder_tp_mode=self._encoder_tp_mode),
            replicas=self.replicas,
            engines=() if split is None else split.groups(self.base.gpu, self.replicas),
            router=self.router,
            hop_us=self.hop_us,
            scaling=scaling,
            **given,
        )


class SloResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one bound fared."""

    measured_us: float | None  # None: nothing was measured; see `failed`
    failed: bool  # so many requests failed that they fill the percentile: infinitely late
    samples: tuple[float, ...] = ()  # of drawn blocks, finite ones, ascending
    samples_failed: int = 0  # draws in which failures fill the percentile

    @property
    def value(self) -> float:
        """Infinite for failure and for nothing measured."""
        return math.inf if self.failed or self.measured_us is None else self.measured_us


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trial. One that was given up missed the SLO; its numbers are those until then."""

    slos: tuple[SloResult, ...] = ()
    gave_up: bool = False
    requests: int = 0
    extend_share: float | None = None  # of the device's busy time, in batches that extend
    summary: dict[str, Any] = {}
    replicas_mean: float | None = None  # paid for, where they come and go
    sides: dict[str, dict[str, Any]] = {}  # of prefill and decode engines, and of what is between: see sides.py
    cpu_s: float = 0.0  # never part of an answer
    interrupted: bool = False


def run_trial(trial: Trial) -> TrialResult:
    """Simulate, measure, and keep what a plan needs of it. Raises what `assemble_cluster` raises."""
    run = simulate_trial(trial)
    if run.interrupted:
        return TrialResult(interrupted=True)
    data = run.data
    slos = run.setup.scenario.base.slos
    return TrialResult(
        slos=tuple(_slo_result(slo, data, trial) for slo in slos),
        gave_up=run.stopped_early,
        requests=data.summary["requests"]["arrived"],
        extend_share=_extend_share(data),
        summary=_kept(data.summary),
        sides=sides_of(run) if run.setup.hands_over else {},
        replicas_mean=None if run.autoscale is None else run.autoscale["replicas_mean"],
        cpu_s=run.cpu_s,
    )


def simulate_trial(trial: Trial) -> ClusterRun:
    """The run itself, measured whole."""
    # The environment's overrides stay out: a result must follow from its trial.
    base = trial.base
    setup = assemble_cluster(trial.scenario(), {}, workload=_workload_of(trial))
    if trial.factor != 1.0:
        setup = setup.slowed(trial.factor)
    requests = len(setup.workload.turns) if base.concurrency is None or base.limit is None else base.limit
    if (samples := setup.workload.turns.samples) is not None:  # each is late by itself
        requests = int(samples.sum()) if base.concurrency is None else requests * int(samples.max())
    lateness = Lateness(setup.scenario.base.slos, requests - base.warm_up) if trial.give_up else None
    return simulate_cluster(setup, give_up=lateness)


@lru_cache(maxsize=4)
def _workload(model: str, closed: bool, limit: int | None, *load: Any) -> Workload:
    options = dict(zip(names_where("of_load"), load, strict=True))
    return open_load(Scenario(model=model, gpu="", concurrency=1 if closed else None, limit=limit, **options))


def _workload_of(trial: Trial) -> Workload:
    """The workload of a trial. Configurations are compared under the same traffic, so each worker keeps the last few.

    Of a closed loop the workload itself is the same for any number of sessions.
    """
    base = trial.base
    closed = base.concurrency is not None
    model = "" if base.media is None else base.model  # prompts with media grow by the model
    load = (getattr(base, name) for name in names_where("of_load"))
    return _workload(model, closed, None if closed else base.limit, *load)


def _slo_result(slo: Slo, data: RunData, trial: Trial) -> SloResult:
    measured_us = data.measured_us(slo)
    failed = measured_us is not None and math.isinf(measured_us)
    samples = block_samples(slo, data.requests, trial.base.seed) if trial.resample else []
    finite = tuple(round(sample, 3) for sample in samples if math.isfinite(sample))
    return SloResult(
        measured_us=None if failed or measured_us is None else round(measured_us, 3),
        failed=failed,
        samples=finite,
        samples_failed=len(samples) - len(finite),
    )


def _extend_share(data: RunData) -> float | None:
    """Of the time the devices were busy, the part in batches with a prompt in them."""
    batches = data.batches
    took_us = np.where(batches.finished_us >= 0, batches.finished_us - batches.started_us, 0)
    total_us = int(took_us.sum())
    return round(int(took_us[batches.prefill_tokens > 0].sum()) / total_us, 6) if total_us else None


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    """The parts that tables, limits and the report look at."""
    return {name: summary[name] for name in ("requests", "latency", "throughput", "cache", "kv", "scheduler", "device")}


@dataclass(frozen=True)
class Lateness:
    """Whether so many requests are late that an SLO cannot be met any more, whatever follows.

    Late is a request with its first token too late, or awaited too long; one that ended too slowly; and one that
    failed. Each stands beyond the bound, and a percentile that this many of all requests to come stand beyond is beyond
    it too.
    """

    slos: tuple[Slo, ...]
    requests: int  # that are measured, at most

    def __call__(self, cluster: Cluster | HandoverCluster | RankCluster) -> bool:
        """Whether to give up now."""
        late = [sum(counts) for counts in zip(*(fold.late(self.slos) for fold in cluster.client_metrics), strict=True)]
        return any(count > self._may_be_late(slo) for slo, count in zip(self.slos, late, strict=True))

    def _may_be_late(self, slo: Slo) -> float:
        percentile = 100.0 if slo.percentile is None else slo.percentile
        return (self.requests - 1) * (1.0 - percentile / 100.0) + 1.0


def encode_trial(trial: Trial) -> bytes:
    """For another process."""
    return msgspec.json.encode(trial.record())


def run_encoded(data: bytes) -> bytes:
    """What a worker of any kind is given, and gives back."""
    return msgspec.json.encode(run_trial(Trial.of_record(msgspec.json.decode(data))))


def decode_result(data: bytes) -> TrialResult:
    """What `run_encoded` gave back."""
    return msgspec.json.decode(data, type=TrialResult)


def file_digest(path: Path) -> str:
    """Of what a file holds."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()
