"""One simulation of a plan: what describes it wholly, the key that follows from that, and what came of it.

A trial is plain data: it travels to another process or machine as JSON, and equal trials have equal results, so that
whoever has the result need not run it again. `run_trial` is all that a worker does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.core.cluster.router import RouterConfig
from lockstep.sim.cluster.data_parallel import RankCluster
from lockstep.sim.cluster.handover import HandoverCluster
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.routed import Cluster
from lockstep.sim.cluster.scenario import ClusterScenario, parse_scaling
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import KvDtype, WeightsDtype
from lockstep.sim.cost.lora import LORA_RANK
from lockstep.sim.cost.models import Fp8Activations
from lockstep.sim.cost.parallel import EPLB_INTERVAL
from lockstep.sim.host.adapters import ALL_TARGETS
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.interval import block_samples
from lockstep.sim.plan.sides import sides_of
from lockstep.sim.plan.split import RoleSplit, parse_split
from lockstep.sim.run.encoding import gpus_of_a_scheduler
from lockstep.sim.run.load import open_load
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.workload import Workload

NO_SCALING = "none"


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a simulation depends on. `content` stands for what files and the installed code say."""

    model: str
    gpu: str
    workload: str
    replicas: int
    rate: float | None  # arrivals per second; None in a closed loop
    limit: int | None  # requests, at most
    concurrency: int | None = None  # sessions at a time, in a closed loop
    warm_up: int = 0  # requests that are not measured
    seed: int
    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    pp: int = 1
    moe_a2a: bool = False
    expert_cv: float = 0.0
    eplb: bool = False
    redundant_experts: int = 0
    eplb_interval: int = EPLB_INTERVAL
    expert_drift: float = 0.0
    mem_fraction: float = 0.9
    weights_dtype: WeightsDtype | None = None
    kv_dtype: KvDtype = "bf16"
    profile: str = "lockstep"
    settings: dict[str, Any] = {}
    max_new_tokens: int | None = None
    skip_bad_rows: bool = False
    calibration: str | None = None
    operators: str | None = None
    acceptance: str | None = None
    acceptance_spread: float = 0.0
    draft_model: str | None = None
    grammar_forces: str | None = None
    router: RouterConfig = RouterConfig()
    hop_us: int = 0
    autoscale: str = NO_SCALING  # as `parse_scaling` reads it; `replicas` are the most
    slos: tuple[str, ...] = ()
    factor: float = 1.0  # multiplies the time of every batch: a draw of the calibration's systematic error
    resample: bool = False  # draw blocks again, for intervals of a recorded trace
    give_up: bool = False  # stop once too many requests are late for the SLO ever to be met
    content: str = ""
    tiers: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # fields of HostTiers that were given; unset: none
    rank_schedulers: bool | msgspec.UnsetType = msgspec.UNSET  # unset: no
    prefill_decode: str | msgspec.UnsetType = msgspec.UNSET  # of a replica, see split.py; unset: all engines do both
    fp8_activations: Fp8Activations | msgspec.UnsetType = msgspec.UNSET  # unset: auto
    link_gbs: float | msgspec.UnsetType = msgspec.UNSET  # of each GPU to other engines; unset: ClusterScenario's
    link_latency_us: int | msgspec.UnsetType = msgspec.UNSET
    media: str | msgspec.UnsetType = msgspec.UNSET  # as `parse_media` reads it; unset: none
    mm_encoder_tp_mode: str | msgspec.UnsetType = msgspec.UNSET
    adapters: str | msgspec.UnsetType = msgspec.UNSET  # as `parse_adapters` reads it; unset: no request runs on any
    max_lora_rank: int | msgspec.UnsetType = msgspec.UNSET
    server_sessions: bool | msgspec.UnsetType = msgspec.UNSET  # unset: no
    samples: str | msgspec.UnsetType = msgspec.UNSET  # as `parse_samples` reads it; unset: one answer each
    lora_targets: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def key(self) -> str:
        return blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()

    @property
    def split(self) -> RoleSplit | None:
        """How prefill and decode are shared out; None if all engines do both."""
        return None if self.prefill_decode is msgspec.UNSET else parse_split(self.prefill_decode)

    @property
    def _encoder_tp_mode(self) -> str:
        """As asked for, where it means something: beside others a plan may have configurations of one GPU."""
        mode = "weights" if self.mm_encoder_tp_mode is msgspec.UNSET else self.mm_encoder_tp_mode
        split = self.split
        tps = [self.tp] if split is None else [side.tp or self.tp for side in split.sides.values()]
        by_rank = self.rank_schedulers is True
        gpus = max(gpus_of_a_scheduler(tp, self.attention_dp, rank_schedulers=by_rank) for tp in tps)
        return "weights" if mode == "data" and gpus == 1 and self.media is not msgspec.UNSET else mode

    def scenario(self) -> ClusterScenario:
        """The same in the words of the command line; the factor is not among them."""
        base = Scenario(
            model=self.model,
            gpu=self.gpu,
            workload=self.workload,
            tp=self.tp,
            ep=self.ep,
            attention_dp=self.attention_dp,
            pp=self.pp,
            moe_a2a=self.moe_a2a,
            expert_cv=self.expert_cv,
            eplb=self.eplb,
            redundant_experts=self.redundant_experts,
            eplb_interval=self.eplb_interval,
            expert_drift=self.expert_drift,
            rate=self.rate,
            concurrency=self.concurrency,
            warm_up=self.warm_up,
            limit=self.limit,
            skip_bad_rows=self.skip_bad_rows,
            seed=self.seed,
            mem_fraction=self.mem_fraction,
            weights_dtype=self.weights_dtype,
            kv_dtype=self.kv_dtype,
            fp8_activations="auto" if self.fp8_activations is msgspec.UNSET else self.fp8_activations,
            max_new_tokens=self.max_new_tokens,
            profile=self.profile,
            calibration=self.calibration,
            operators=self.operators,
            acceptance=self.acceptance,
            acceptance_spread=self.acceptance_spread,
            draft_model=self.draft_model,
            grammar_forces=self.grammar_forces,
            settings=self.settings,
            slos=tuple(map(Slo.parse, self.slos)),
            tiers={} if self.tiers is msgspec.UNSET else self.tiers,
            rank_schedulers=self.rank_schedulers is True,
            media=None if self.media is msgspec.UNSET else self.media,
            mm_encoder_tp_mode=self._encoder_tp_mode,
            server_sessions=self.server_sessions is True,
            samples=None if self.samples is msgspec.UNSET else self.samples,
            adapters=None if self.adapters is msgspec.UNSET else self.adapters,
            max_lora_rank=LORA_RANK if self.max_lora_rank is msgspec.UNSET else self.max_lora_rank,
            lora_targets=ALL_TARGETS if self.lora_targets is msgspec.UNSET else self.lora_targets,
        )
        split = self.split
        scenario = ClusterScenario(
            base=base,
            replicas=self.replicas,
            engines=() if split is None else split.groups(self.gpu, self.replicas),
            router=self.router,
            hop_us=self.hop_us,
            scaling=None if self.autoscale == NO_SCALING else parse_scaling(self.autoscale).within(self.replicas),
        )
        if self.link_gbs is not msgspec.UNSET:
            scenario = replace(scenario, link_gbs=self.link_gbs)
        if self.link_latency_us is not msgspec.UNSET:
            scenario = replace(scenario, link_latency_us=self.link_latency_us)
        return scenario


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
    setup = assemble_cluster(trial.scenario(), {}, workload=_workload_of(trial))
    if trial.factor != 1.0:
        setup = setup.slowed(trial.factor)
    requests = len(setup.workload.turns) if trial.concurrency is None or trial.limit is None else trial.limit
    if (samples := setup.workload.turns.samples) is not None:  # each is late by itself
        requests = int(samples.sum()) if trial.concurrency is None else requests * int(samples.max())
    lateness = Lateness(setup.scenario.base.slos, requests - trial.warm_up) if trial.give_up else None
    return simulate_cluster(setup, give_up=lateness)


@lru_cache(maxsize=4)
def _workload(key: tuple[Any, ...]) -> Workload:
    source, seed, rate, closed, limit, skip_bad_rows, model, media, adapters, samples, server_sessions = key
    scenario = Scenario(
        model=model,
        gpu="",
        workload=source,
        seed=seed,
        rate=rate,
        concurrency=1 if closed else None,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        media=media,
        adapters=adapters,
        samples=samples,
        server_sessions=server_sessions,
    )
    return open_load(scenario)


def _workload_of(trial: Trial) -> Workload:
    """Configurations are compared under the same traffic, one after another in each worker: keep the last few.

    Of a closed loop the workload itself is the same for any number of sessions.
    """
    closed = trial.concurrency is not None
    limit = None if closed else trial.limit
    media = (trial.model, trial.media) if isinstance(trial.media, str) else ("", None)  # prompts grow by the model
    adapters = None if trial.adapters is msgspec.UNSET else trial.adapters
    samples = None if trial.samples is msgspec.UNSET else trial.samples
    key = trial.workload, trial.seed, trial.rate, closed, limit, trial.skip_bad_rows, *media, adapters, samples
    return _workload((*key, trial.server_sessions is True))


def _slo_result(slo: Slo, data: RunData, trial: Trial) -> SloResult:
    measured_us = data.measured_us(slo)
    failed = measured_us is not None and math.isinf(measured_us)
    samples = block_samples(slo, data.requests, trial.seed) if trial.resample else []
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

    Late is who got its first token too late or has waited too long for it; who ended too slowly; and who failed. Each
    stands beyond the bound, and a percentile that this many of all requests to come stand beyond is beyond it too.
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
    return msgspec.json.encode(trial)


def run_encoded(data: bytes) -> bytes:
    """What a worker of any kind is given, and gives back."""
    return msgspec.json.encode(run_trial(msgspec.json.decode(data, type=Trial)))


def decode_result(data: bytes) -> TrialResult:
    """What `run_encoded` gave back."""
    return msgspec.json.decode(data, type=TrialResult)


def file_digest(path: Path) -> str:
    """Of what a file holds."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()
