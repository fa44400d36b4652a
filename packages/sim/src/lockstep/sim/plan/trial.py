"""One simulation of a plan: its complete description, the key that follows from it, and its result.

A trial is plain data. It is sent to another process or machine as JSON, and equal trials have equal results, so a
stored result replaces the run. A worker runs nothing but `run_trial`.
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
    """Everything that a simulation depends on. `content` is a digest of the files and of the installed code."""

    base: Scenario
    replicas: int
    router: RouterConfig = field(default_factory=RouterConfig)
    hop_us: int = 0
    autoscale: str = NO_SCALING  # in the syntax of `parse_scaling`; `replicas` is the maximum
    factor: float = 1.0  # factor on the time of every batch: a draw of the calibration's systematic error
    resample: bool = False  # resample blocks, for intervals of a recorded trace
    give_up: bool = False  # stop once so many requests are late that the SLO cannot be met
    content: str = ""
    prefill_decode: str | None = None  # split of a replica, see split.py; None: all engines do both
    link_gbs: float | None = None  # of each GPU to other engines; None: the default of ClusterScenario
    link_latency_us: int | None = None
    placement: str | None = None  # of prefill and decode engines in racks

    @property
    def key(self) -> str:
        """Digest of the record: equal trials have equal keys, in every process."""
        return blake2b(msgspec.json.encode(self.record(), order="sorted"), digest_size=16).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the trial as it is stored and sent: fields of the scenario and its own fields, as plain data."""
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
        """Return the trial of a record. Raises TypeError for a name that is not an option."""
        base = {name: value for name, value in record.items() if name in options_of(Scenario)}
        own = {name: value for name, value in record.items() if name not in base}
        base["slos"] = tuple(map(Slo.parse, base["slos"]))
        own["router"] = msgspec.convert(own["router"], RouterConfig)
        return cls(base=Scenario(**base), **own)

    @property
    def split(self) -> RoleSplit | None:
        """The split into prefill and decode engines; None if all engines do both."""
        return None if self.prefill_decode is None else parse_split(self.prefill_decode)

    @property
    def _encoder_tp_mode(self) -> str:
        """The requested mode, or `weights` for one GPU, where the mode has no meaning."""
        base, split = self.base, self.split
        tps = [base.tp] if split is None else [side.tp or base.tp for side in split.sides.values()]
        gpus = max(gpus_of_a_scheduler(tp, base.attention_dp, rank_schedulers=base.rank_schedulers) for tp in tps)
        meaningless = base.mm_encoder_tp_mode == "data" and gpus == 1 and base.media is not None
        return "weights" if meaningless else base.mm_encoder_tp_mode

    def scenario(self) -> ClusterScenario:
        """Return the scenario to simulate; the factor is not part of it."""
        split = self.split
        scaling = None if self.autoscale == NO_SCALING else parse_scaling(self.autoscale).within(self.replicas)
        links = {name: getattr(self, name) for name in ("link_gbs", "link_latency_us", "placement")}
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
    """Result of one bound."""

    measured_us: float | None  # None: nothing was measured, or see `failed`
    failed: bool  # whether failures reach into the percentile, so that it counts as infinite
    samples: tuple[float, ...] = ()  # of resampled runs: finite values, ascending
    samples_failed: int = 0  # resampled runs in which failures reach into the percentile

    @property
    def value(self) -> float:
        """The measured value in us; infinite after failures, and if nothing was measured."""
        return math.inf if self.failed or self.measured_us is None else self.measured_us


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial. A trial that was given up missed the SLO, and its numbers end at that time."""

    slos: tuple[SloResult, ...] = ()
    gave_up: bool = False
    requests: int = 0
    prompt_tokens: int = 0  # of all measured requests
    rejected: int = 0  # measured requests that no engine admits, such as prompts beyond the context
    rejected_prompt_tokens: int = 0
    extend_share: float | None = None  # share of the device's busy time in batches that extend
    summary: dict[str, Any] = {}
    replicas_mean: float | None = None  # mean number of paid replicas, with autoscaling
    sides: dict[str, dict[str, Any]] = {}  # of prefill and decode engines and the transfers between them: see sides.py
    machine_kwh: tuple[float, ...] = ()  # low, likely, high, without PUE; empty if a GPU's power is not known
    cpu_s: float = 0.0  # never part of an answer
    interrupted: bool = False


def run_trial(trial: Trial) -> TrialResult:
    """Simulate and measure a trial; return what a plan reads. Raises the errors of `assemble_cluster`."""
    run = simulate_trial(trial)
    if run.interrupted:
        return TrialResult(interrupted=True)
    data = run.data
    slos = run.setup.scenario.base.slos
    prompt_tokens, invalid = data.requests.prompt_tokens, data.requests.invalid
    return TrialResult(
        slos=tuple(_slo_result(slo, data, trial) for slo in slos),
        gave_up=run.stopped_early,
        requests=data.summary["requests"]["arrived"],
        prompt_tokens=int(prompt_tokens.sum()),
        rejected=int(invalid.sum()),
        rejected_prompt_tokens=int(prompt_tokens[invalid].sum()),
        extend_share=_extend_share(data),
        summary=_kept(data.summary),
        sides=sides_of(run) if run.setup.hands_over else {},
        replicas_mean=None if run.autoscale is None else run.autoscale["replicas_mean"],
        machine_kwh=() if (energy := run.machine_energy()) is None else tuple(round(kwh, 9) for kwh in energy[0]),
        cpu_s=run.cpu_s,
    )


def simulate_trial(trial: Trial) -> ClusterRun:
    """Simulate a trial; return the whole run."""
    # Overrides from the environment are ignored, because a result must follow from its trial.
    base = trial.base
    setup = assemble_cluster(trial.scenario(), {}, workload=_workload_of(trial))
    if trial.factor != 1.0:
        setup = setup.slowed(trial.factor)
    requests = len(setup.workload.turns) if base.concurrency is None or base.limit is None else base.limit
    if (samples := setup.workload.turns.samples) is not None:  # each sample counts as a request
        requests = int(samples.sum()) if base.concurrency is None else requests * int(samples.max())
    lateness = Lateness(setup.scenario.base.slos, requests - base.warm_up) if trial.give_up else None
    return simulate_cluster(setup, give_up=lateness)


_recorded: dict[tuple[Any, ...], Workload] = {}  # the last workload that is the same for every seed, by its load


@lru_cache(maxsize=4)
def _workload(content: str, model: str, closed: bool, limit: int | None, *load: Any) -> Workload:
    options = dict(zip(names_where("of_load"), load, strict=True))
    of_any_seed = (content, model, closed, limit, *(value for name, value in options.items() if name != "seed"))
    if (known := _recorded.get(of_any_seed)) is not None:
        return known
    workload = open_load(Scenario(model=model, gpu="", concurrency=1 if closed else None, limit=limit, **options))
    if not workload.is_drawn:
        _recorded.clear()
        _recorded[of_any_seed] = workload
    return workload


def _workload_of(trial: Trial) -> Workload:
    """Return the workload of a trial. Configurations share their traffic, so each worker keeps the last few workloads.

    In a closed loop the workload is the same for any number of sessions.
    """
    base = trial.base
    closed = base.concurrency is not None
    model = "" if base.media is None else base.model  # prompts with media depend on the model
    load = (getattr(base, name) for name in names_where("of_load"))
    return _workload(trial.content, model, closed, None if closed else base.limit, *load)


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
    """Return the share of the devices' busy time in batches with a prompt."""
    batches = data.batches
    took_us = np.where(batches.finished_us >= 0, batches.finished_us - batches.started_us, 0)
    total_us = int(took_us.sum())
    return round(int(took_us[batches.prefill_tokens > 0].sum()) / total_us, 6) if total_us else None


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a summary that tables, limits and the report read."""
    return {name: summary[name] for name in ("requests", "latency", "throughput", "cache", "kv", "scheduler", "device")}


@dataclass(frozen=True)
class Lateness:
    """Decides whether so many requests are late that an SLO cannot be met any more.

    A request is late if its first token came too late, or has been awaited too long; if it ended too slowly; or if it
    failed. Each exceeds the bound. If enough of all requests do, their percentile exceeds it as well.
    """

    slos: tuple[Slo, ...]
    requests: int  # measured requests, at most

    def __call__(self, cluster: Cluster | HandoverCluster | RankCluster) -> bool:
        """Return whether to give up now."""
        late = [sum(counts) for counts in zip(*(fold.late(self.slos) for fold in cluster.client_metrics), strict=True)]
        return any(count > self._may_be_late(slo) for slo, count in zip(self.slos, late, strict=True))

    def _may_be_late(self, slo: Slo) -> float:
        percentile = 100.0 if slo.percentile is None else slo.percentile
        return (self.requests - 1) * (1.0 - percentile / 100.0) + 1.0


def encode_trial(trial: Trial) -> bytes:
    """Encode a trial for another process."""
    return msgspec.json.encode(trial.record())


def run_encoded(data: bytes) -> bytes:
    """Run an encoded trial and return its encoded result. Every kind of worker calls this."""
    return msgspec.json.encode(run_trial(Trial.of_record(msgspec.json.decode(data))))


def decode_result(data: bytes) -> TrialResult:
    """Decode a result of `run_encoded`."""
    return msgspec.json.decode(data, type=TrialResult)


def file_digest(path: Path) -> str:
    """Return a digest of the contents of a file."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()
