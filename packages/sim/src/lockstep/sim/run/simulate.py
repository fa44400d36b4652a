"""One simulated run from start to finish: what was asked, what that amounts to, the run, the run folder.

setup = assemble(Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=500,rate=4"))
run = simulate(setup, folder=Path("runs/0192"))
write_run(Path("runs/0192"), run)

runs/0192/journal/           every observed event and the digest of its Step; `lockstep journal verify` replays it
          metrics.json       the summary, behind all that is needed to get it again
          requests.parquet   one row per request, and the same as requests.csv
          trace.json.gz      for ui.perfetto.dev
          report.html        opens anywhere, offline
"""

from __future__ import annotations

import gc
import math
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from simpy import Environment

from lockstep.core import invariants
from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import OVERLAP_DEPTH_MAX, HybridMemory, SchedConfig, profile_settings
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ObservedEvent, RequestArrived
from lockstep.core.journal.journal import JournalHeader, JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import LORAS
from lockstep.sim.catalogue import load_calibration, load_encoders, load_gpu, load_model
from lockstep.sim.cli.out_paths import check_folder
from lockstep.sim.cluster.ranks import check_ranks, config_of_engine, settings_of_rank
from lockstep.sim.cost import (
    UNCALIBRATED,
    Calibration,
    CapacityError,
    CostModel,
    CpuModel,
    GpuSpec,
    KvCapacity,
    KvDtype,
    ModelSpec,
    WeightsDtype,
    kv_capacity,
)
from lockstep.sim.cost.capacity import StageBytes
from lockstep.sim.cost.encoder import Encoders
from lockstep.sim.cost.expert_balance import spread_of
from lockstep.sim.cost.lora import LORA_RANK, LoraSpec, check_targets, slot_bytes
from lockstep.sim.cost.models import Fp8Activations, check_split, checked_weights_dtype
from lockstep.sim.cost.parallel import EPLB_INTERVAL, Parallelism
from lockstep.sim.cost.stages import Stage, stages_of
from lockstep.sim.cost.tables import base_cost_model
from lockstep.sim.fast.fast_path import FastRun, pays, unsupported_by
from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.host.adapters import (
    ALL_TARGETS,
    AdapterLane,
    adapter_link,
    adapters_in,
    check_adapters,
    describe_adapters,
    describe_loads,
    lora_of,
    parse_adapters,
    with_adapters,
)
from lockstep.sim.host.cache_tiers import PageBytes, TierLinks
from lockstep.sim.host.encoding import EncoderSetup, beside_encoder, check_encoding
from lockstep.sim.host.forcing import Forcing
from lockstep.sim.host.host import (
    EOS_TOKEN_ID,
    GRAMMAR_COMPILE_US,
    Arrivals,
    Device,
    EngineHost,
    JournalSink,
    MetricsSink,
    Observer,
    RankExchange,
    RequestSource,
    TransferPort,
)
from lockstep.sim.host.hybrid_memory import (
    block_bytes,
    check_hybrid,
    host_page_bytes,
    hybrid_settings,
    shared_out,
    state_copy_us,
    window_tokens_of,
)
from lockstep.sim.host.pipeline import device_type_of, with_stages
from lockstep.sim.host.speculation import Acceptance, Drafting, ModelDraftCost, NgramDraftCost, head_of
from lockstep.sim.host.tier_options import NO_TIERS, HostTiers, host_tiers, hybrid_shares
from lockstep.sim.host.watch import LEVELS, WatchedMetrics
from lockstep.sim.metrics.metrics import MetricsFold, RunData, Slo
from lockstep.sim.workload.closed_loop import CONCURRENCY_MAX, ConcurrentSessions
from lockstep.sim.workload.media import RECORDED, describe_media, parse_media, with_media
from lockstep.sim.workload.samples import describe_samples, parse_samples, with_samples
from lockstep.sim.workload.server_sessions import (
    Conversations,
    check_server_sessions,
    describe_server_sessions,
    with_server_sessions,
)
from lockstep.sim.workload.trace_turns import CLOCKLESS
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, Turns
from lockstep.sim.workload.workload import Workload, open_workload, workload_digest

if TYPE_CHECKING:
    from lockstep.sim.cluster.cluster import ClusterRun
    from lockstep.sim.run.intervals import Intervals

OUTPUTS = ("metrics.json", "requests.parquet", "requests.csv", "trace.json.gz", "report.html", "router.jsonl")
SEEDS = 2**63
PAGES_MAX = 2**28  # which take 3 GB of host memory
ROWS_MAX = 2**20
ENVIRONMENT_SETTINGS = {"LOCKSTEP_OVERLAP": "overlap_depth", "LOCKSTEP_RETRACT_EVERY": "retract_every"}

# ------------------------------------------------------------------------------------------------------ what was asked


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate, in the words of the command line."""

    model: str
    gpu: str
    workload: str  # path of a trace or a fitted model, gen:..., or mix:...
    tp: int = 1
    ep: int = 1  # these five: see Parallelism
    attention_dp: int = 1
    pp: int = 1
    moe_a2a: bool = False
    expert_cv: float = 0.0
    eplb: bool = False  # these four, too
    redundant_experts: int = 0
    eplb_interval: int = EPLB_INTERVAL
    expert_drift: float = 0.0
    rate: float | None = None  # arrivals per second; None: as recorded, or as the generator says
    rate_scale: float = 1.0
    time_window: str | None = None  # FROM..TO, by the workload's own clock
    concurrency: int | None = None  # sessions at a time, see closed_loop.py; None: requests come by the clock
    warm_up: int = 0  # requests, the first so many, that are simulated and not measured
    limit: int | None = None
    skip_bad_rows: bool = False
    seed: int = 7
    mem_fraction: float = 0.9  # of GPU memory, for weights, activations and KV
    weights_dtype: WeightsDtype | None = None  # None: the checkpoint's own
    kv_dtype: KvDtype = "bf16"
    fp8_activations: Fp8Activations = "auto"  # whether fp8 weights meet rows in fp8
    max_new_tokens: int | None = None  # the limit of every request; None: its own length
    grammar_compile_us: int = GRAMMAR_COMPILE_US
    receive_interval: int = 1
    acceptance: str | None = None  # chances of drafts, with commas; None: see speculation.DEFAULT_RATES
    acceptance_spread: float = 0.0  # between requests
    grammar_forces: str | None = None  # how often grammars leave no choice, CHANCExTOKENS; None: see forcing.py
    draft_model: str | None = None  # what drafts under speculative_method draft_model
    operators: str | None = None  # folder of operator tables; None: the roofline
    calibration: str | None = None  # catalogue name, or path of a file; None: the cost model as it is
    profile: str = "lockstep"  # of scheduler settings
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of SchedConfig that were given
    slos: tuple[Slo, ...] = ()
    tiers: Mapping[str, Any] = field(default_factory=dict)  # fields of HostTiers and HybridShares that were given
    media: str | None = None  # images, videos and sounds that turns bring; see media.py; None: none
    mm_encoder_tp_mode: str = "weights"  # or data: how encoders are laid out over the tp GPUs
    encoder_gpus: int = 0  # of the encoder's own; 0: those of the engine
    adapters: str | None = None  # which requests run on which LoRA adapters; see adapters.py; None: on none
    max_lora_rank: int = LORA_RANK  # which slots have room for
    samples: str | None = None  # answers that requests ask for; see samples.py; None: one each
    server_sessions: bool = False  # whether turns are of sessions that the server keeps; see server_sessions.py
    lora_targets: str = ALL_TARGETS  # matrices that slots have room for, with commas
    rank_schedulers: bool = False  # each shard of `attention_dp` has a scheduler of its own: see data_parallel.py

    @property
    def parallelism(self) -> Parallelism:
        """How an engine is laid out. Raises CapacityError for what cannot be."""
        return Parallelism(**{field.name: getattr(self, field.name) for field in fields(Parallelism)})

    @property
    def gpus(self) -> int:
        """GPUs of an engine."""
        return self.tp * self.pp

    def command(self) -> str:
        """The command line that runs this again."""
        words = ["lockstep", "simulate", "--model", self.model, "--gpu", self.gpu, "--workload", self.workload]
        for name in (
            "tp",
            "ep",
            "attention_dp",
            "pp",
            "expert_cv",
            "redundant_experts",
            "eplb_interval",
            "expert_drift",
            "rate",
            "rate_scale",
            "time_window",
            "concurrency",
            "warm_up",
            "limit",
            "seed",
            "mem_fraction",
            "weights_dtype",
            "kv_dtype",
            "fp8_activations",
            "operators",
            "calibration",
            "profile",
            "acceptance",
            "acceptance_spread",
            "draft_model",
            "grammar_forces",
            "media",
            "mm_encoder_tp_mode",
            "encoder_gpus",
            "adapters",
            "max_lora_rank",
            "lora_targets",
            "samples",
        ):
            value = getattr(self, name)
            if name == "seed" or value != getattr(Scenario, name):
                words += [option_of(name), number_word(value) if isinstance(value, float) else str(value)]
        if self.max_new_tokens is not None:
            words += ["--max-new-tokens", str(self.max_new_tokens)]
        if self.grammar_compile_us != GRAMMAR_COMPILE_US:
            words += _setting_words("grammar_compile_us", self.grammar_compile_us)
        if self.receive_interval != 1:
            words += ["--receive-interval", str(self.receive_interval)]
        if self.moe_a2a:
            words.append("--moe-a2a")
        if self.eplb:
            words.append("--eplb")
        if self.server_sessions:
            words.append("--server-sessions")
        if self.rank_schedulers:
            words.append("--rank-schedulers")
        if self.skip_bad_rows:
            words.append("--skip-bad-rows")
        for name, value in (*self.settings.items(), *self.tiers.items()):
            words += _setting_words(name, value)
        for slo in self.slos:
            words += ["--slo", str(slo)]
        return shlex.join(words)


def number_word(value: float) -> str:
    """For a command line: as short as it can be and still be the same number."""
    return word if float(word := f"{value:g}") == value else repr(value)


def _json_number(value: float | None) -> float | str | None:
    """JSON has no infinity; `inf` is what the command line calls it."""
    return "inf" if value == math.inf else value


def option_of(name: str) -> str:
    """`page_size` is `--page-size`; a time in microseconds takes its unit with the value: `--waiting-timeout 30s`."""
    return "--" + name.removesuffix("_us").replace("_", "-")


def _setting_words(name: str, value: Any) -> list[str]:
    option = option_of(name)
    if isinstance(value, bool):
        return [option if value else "--no-" + option.removeprefix("--")]
    if isinstance(value, tuple):
        return [word for item in value for word in (option.removesuffix("s"), str(item))]
    if value is None:
        return [option, "none"]
    return [option, f"{value}us" if name.endswith("_us") else str(value)]


def environment_settings(environ: Mapping[str, str]) -> dict[str, int]:
    """Settings that LOCKSTEP_* variables override. Raises ConfigError for a value that is no whole number."""
    settings = {}
    for variable, name in ENVIRONMENT_SETTINGS.items():
        text = environ.get(variable)
        if text is None:
            continue
        if not text.strip().isascii() or not text.strip().isdigit():
            raise ConfigError(f"{variable} must be a whole number of at least 0, got `{text}`\nhint: unset it")
        settings[name] = int(text)
        if name == "overlap_depth" and settings[name] > OVERLAP_DEPTH_MAX:
            raise ConfigError(f"{variable} must be 0, 1 or 2, got `{text}`\nhint: unset it")
    return settings


def debug_level(environ: Mapping[str, str]) -> int:
    """How much LOCKSTEP_DEBUG wants to see, 0 to 4. Raises ConfigError for anything else."""
    text = environ.get("LOCKSTEP_DEBUG", "0")
    if text not in map(str, LEVELS):
        raise ConfigError(f"LOCKSTEP_DEBUG must be 0 to {LEVELS[-1]}, got `{text}`\nhint: 1 prints a line per step")
    return int(text)


# ------------------------------------------------------------------------------------------------- what that amounts to


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A scenario with everything it names loaded, checked and worked out."""

    scenario: Scenario
    model: ModelSpec
    gpu: GpuSpec
    workload: Workload
    cost: CostModel
    cpu: CpuModel
    config: SchedConfig
    kv: KvCapacity | None  # how the pool's size was found; None if `pages` was given
    tiers: HostTiers = NO_TIERS  # what lies below the device
    calibration: Calibration = UNCALIBRATED  # already in `cost` and `cpu`
    debug: int = 0  # how much of each step to print, see watch.py
    overridden: tuple[str, ...] = ()  # settings that the environment decided
    drafting: Drafting | None = None  # where drafts are verified
    forcing: Forcing | None = None  # where tokens that grammars force are computed together
    encoding: EncoderSetup | None = None  # where requests have media
    lora: LoraSpec | None = None  # where requests run on adapters

    @property
    def title(self) -> str:
        return f"{self.model.name} on {self.hardware}"

    @property
    def split(self) -> Parallelism:
        return self.scenario.parallelism

    @property
    def host_page_bytes(self) -> int | None:
        """What a page of KV weighs on the host; None if nothing is kept there."""
        return self._page_bytes.on_host if self.tiers.host_cache_gb else None

    @property
    def _page_bytes(self) -> PageBytes:
        return self._host_bytes[0]

    @property
    def _host_bytes(self) -> tuple[PageBytes, dict[str, PageBytes]]:
        """What a page of KV weighs below the device, and what it has beside it there."""
        page_size, kv_dtype = self.config.page_size, self.scenario.kv_dtype
        if self.config.hybrid is msgspec.UNSET:
            return PageBytes.of(self.model, self.split, kv_dtype, page_size), {}
        return block_bytes(self.model, self.split, kv_dtype, page_size)

    @property
    def host_block_bytes(self) -> dict[str, int]:
        """What a window page and a state weigh on the host, by kind, where the model has any."""
        return {kind: one.on_host for kind, one in self._host_bytes[1].items()}

    def tier_links(self) -> TierLinks | None:
        """Fresh lanes to the tiers below the device; None if there are none."""
        return (
            TierLinks(self.tiers, self._page_bytes, self.gpu, self._host_bytes[1]) if self.tiers.host_cache_gb else None
        )

    @property
    def slot_bytes(self) -> int:
        """What a slot for adapters weighs on one GPU, of the stage that has most; 0 where no request runs on any."""
        if self.lora is None:
            return 0
        one = replace(self.split, pp=1)
        return max(slot_bytes(stage.model, one, self.lora) for stage in stages_of(self.model, self.split))

    def adapter_lane(self, tiers: TierLinks | None) -> AdapterLane | None:
        """What brings adapters to one engine, over its cache tiers' link; None if no request runs on any."""
        if self.lora is None:
            return None
        link = adapter_link(self.gpu) if tiers is None else tiers.up
        return AdapterLane(adapters_in(self.workload.turns), self.slot_bytes, link)

    @property
    def state_copy_us(self) -> float:
        """What a copy of one request's recurrent state takes; 0 where there are none to copy."""
        return state_copy_us(self.model, self.gpu, self.split) if self.config.hybrid is not msgspec.UNSET else 0.0

    @property
    def hardware(self) -> str:
        """`8 x H200-SXM`, with how it is laid out where that is not tensor parallelism alone."""
        layout = "" if self.split.is_plain else f" ({self.split})"
        return f"{self.split.gpus} x {self.gpu.name}{layout}"

    def slowed(self, factor: float) -> Setup:
        """The same with the time of every batch multiplied: the calibration is in `cost` already. Prints nothing."""
        drafting = self.drafting.slowed(factor) if self.drafting is not None else None
        encoding = self.encoding.slowed(factor) if self.encoding is not None else None
        cost = UNCALIBRATED.cost_model(self.cost, factor)
        return replace(self, cost=cost, drafting=drafting, encoding=encoding, debug=0)

    def doubts(self, *, has_intervals: bool = True) -> list[str]:
        """Settings beyond what the model and the GPU are: simulated as asked, and said."""
        lines = []
        asked, context = self.config.context_tokens_max, self.model.context_tokens_max
        if asked > context:
            lines.append(f"context_tokens_max {asked:,} is beyond the model's {context:,}; simulated all the same")
        if self.kv is None:
            try:
                fits = _capacity(self.scenario, self.model, self.gpu, config_of_engine(self.config)).pages
            except CapacityError:
                fits = 0
            if config_of_engine(self.config).pages > fits:
                lines.append(f"{self.config.pages:,} KV pages do not fit this GPU, {fits:,} do; simulated all the same")
        if self.config.hybrid is msgspec.UNSET and (window_tokens_of(self.model) or self.model.delta is not None):
            lines.append(
                f"{self.model.name} has layers without full attention; --hybrid-memory on gives them own pools"
            )
        lines += self._layout_doubts()
        if self.encoding is not None:
            lines += self.encoding.doubts(self.config)
        if self.lora is not None:
            lines.append(
                "adapters: their products are uncalibrated; passes with any are launched kernel by kernel, as in this "
                "runtime, where others may replay CUDA graphs"
            )
        depth = self.config.overlap_depth
        more = self.calibration.doubts(self.model.name, self.gpu.name, depth, self.split, has_intervals=has_intervals)
        return lines + more

    def _layout_doubts(self) -> list[str]:
        """What is taken for granted about rows, experts and stages."""
        split, lines = self.split, []
        if self.config.shares_passes:
            lines.append(
                f"attention_dp {split.attention_dp}: a scheduler and a prefix cache per rank, which share out the "
                f"engine's limits; a request has to fit the {self.config.pool_tokens:,} tokens of a rank"
            )
        elif split.attention_dp > 1:
            shard_tokens = self.config.pages // split.attention_dp * self.config.page_size
            lines.append(
                f"attention_dp {split.attention_dp}: rows are taken as spread evenly over shards, prefix caches as "
                f"one; a request has to fit the {shard_tokens:,} tokens of a shard"
            )
        if split.ep > 1 and not split.expert_cv:
            lines.append(f"ep {split.ep}: routing is even (--expert-cv 0), so ranks differ by chance alone")
        if split.eplb and self.model.experts is not None:
            spread = spread_of(self.model.experts, split)
            lines.append(
                f"eplb: in the long run the fullest rank has {spread.long_run:.2f} times its share, "
                f"{spread.unbalanced:.2f} times without"
            )
        if split.pp > 1 and not self.config.pipelines:
            depth = self.config.overlap_depth
            lines.append(
                f"pp {split.pp}: at most {depth + 1} batches are in the pipeline, and a row decodes again only when "
                "its token is back; engines with a set of rows per stage keep stages busier"
            )
        if self.config.pipelines and self.config.overlap_depth:
            lines.append(
                f"overlap_depth {self.config.overlap_depth} with microbatches: where two batches of one follow each "
                "other, the second keeps the first stage waiting for its tokens; pp_async_batch_depth does not"
            )
        return lines

    def header(self) -> JournalHeader:
        """What a replay must know, and what a person wants to know. No times, no paths: equal runs, equal journals."""
        return JournalHeader(
            config=self.config,
            seed=self.scenario.seed,
            model_digest=blake2b(repr(asdict(self.model)).encode(), digest_size=16).hexdigest(),
            host={
                "kind": "simulator",
                "model": self.model.name,
                "gpu": self.gpu.name,
                "tp": self.scenario.tp,
                **self.split.describe(),
                "cost": str(self.cost.describe()["kind"]),
                "calibration": self.calibration.title,
                "workload": self.workload.name,
                "workload_digest": self.workload.digest,
                **({} if self.scenario.media is None else {"media": self.scenario.media}),
                **({} if self.scenario.samples is None else {"samples": self.scenario.samples}),
                **({"server_sessions": "on"} if self.scenario.server_sessions else {}),
                **({} if self.scenario.adapters is None else {"adapters": self.scenario.adapters}),
            },
        )

    def about(self) -> dict[str, Any]:
        """All that is needed to get the run again, with the sources of every constant; for metrics.json."""
        from lockstep.sim.results.results import METRICS_FORMAT, METRICS_VERSION

        workload, scenario = self.workload, self.scenario
        return {
            "format": METRICS_FORMAT,
            "format_version": METRICS_VERSION,
            "command": scenario.command(),
            "seed": scenario.seed,
            "version": code_version(),
            "commit": code_commit(),
            "model": self.model.name,
            "gpu": self.gpu.name,
            "tp": scenario.tp,
            **self.split.describe(),
            "workload": describe_load(scenario, workload),
            "scheduler": msgspec.to_builtins(self.config),
            "max_new_tokens": scenario.max_new_tokens,
            "grammar_compile_us": scenario.grammar_compile_us,
            "receive_interval": scenario.receive_interval,
            "kv_capacity": self.kv.describe() if self.kv is not None else None,
            "cost_model": self.cost.describe(),
            "cpu_model": self.cpu.describe(),
            "calibration": self.calibration.describe(),
            **({} if self.drafting is None else {"speculation": self.drafting.describe()}),
            **({} if self.forcing is None else {"grammar_forces": self.forcing.describe()}),
            **({} if self.encoding is None else {"media": self.encoding.describe()}),
            **({} if scenario.samples is None else {"samples": scenario.samples}),
            **({"server_sessions": True} if scenario.server_sessions else {}),
            **({} if self.lora is None else {"adapters": self._describe_adapters(self.lora)}),
            **({"tiers": msgspec.to_builtins(self.tiers)} if self.tiers.host_cache_gb else {}),
            **({"state_copy_us": self.state_copy_us} if self.state_copy_us else {}),
        }

    def _describe_adapters(self, lora: LoraSpec) -> dict[str, Any]:
        """Room for adapters, and what a load takes."""
        names = adapters_in(self.workload.turns)
        return {
            "asked": self.scenario.adapters,
            "adapters": len(names),
            "max_loras": lora.slots,
            "max_lora_rank": lora.rank,
            "lora_targets": list(lora.targets),
            **describe_loads(self.slot_bytes, self.gpu),
        }


def describe_load(scenario: Scenario, workload: Workload) -> dict[str, Any]:
    """What was sent, for metrics.json."""
    return {
        "name": workload.name,
        "source": workload.source,
        "format": workload.format,
        "digest": workload.digest,
        "turns": len(workload.turns),
        "tenants": [tenant for tenant in workload.turns.tenants if tenant],
        "rate": _json_number(scenario.rate),
        "rate_scale": scenario.rate_scale,
        "time_window": scenario.time_window,
        "concurrency": scenario.concurrency,
        "warm_up": scenario.warm_up,
        "limit": scenario.limit,
        "skipped_rows": workload.skipped.count,
        "notes": list(workload.notes),
    }


def assemble(scenario: Scenario, environ: Mapping[str, str] = os.environ, *, workload: Workload | None = None) -> Setup:
    """Load and work out what the scenario names, cheapest first. A `workload` that is given is not read again.

    Raises: ConfigError, CatalogueError, CapacityError, CalibrationError or WorkloadError, with a message for people.
    """
    check_seed(scenario.seed)
    overridden = environment_settings(environ)
    scenario = replace(scenario, settings={**scenario.settings, **overridden})
    model, gpu = load_model(scenario.model), load_gpu(scenario.gpu)
    check_encoding(scenario)
    check_adapters(scenario)
    check_samples(scenario)
    check_server_sessions(scenario)
    config, kv = configure(scenario, model, gpu)
    check_load(scenario)
    if workload is None:
        workload = open_load(scenario)
    check_measured(scenario, workload)
    base = base_cost_model(
        model,
        gpu,
        scenario.parallelism,
        weights_dtype=scenario.weights_dtype,
        kv_dtype=scenario.kv_dtype,
        fp8_activations=scenario.fp8_activations,
        operators=None if scenario.operators is None else Path(scenario.operators),
        lora=lora_of(scenario, config),
    )
    calibration = UNCALIBRATED if scenario.calibration is None else load_calibration(scenario.calibration)
    cost = calibration.cost_model(base)
    return Setup(
        scenario=scenario,
        model=model,
        gpu=gpu,
        workload=workload,
        cost=cost,
        cpu=calibration.cpu_model(CpuModel()),
        config=config,
        kv=kv,
        tiers=host_tiers(scenario.tiers),
        calibration=calibration,
        debug=debug_level(environ),
        overridden=tuple(overridden),
        drafting=_drafting(scenario, config, model, gpu, cost, calibration),
        forcing=Forcing.of(scenario.grammar_forces, scenario.seed) if config.jumps else None,
        encoding=EncoderSetup.of(scenario, gpu, workload.turns) if scenario.media is not None else None,
        lora=lora_of(scenario, config),
    )


def check_drafting(scenario: Scenario, config: SchedConfig) -> None:
    """Raise ConfigError for options of drafts that nobody looks at, or that lack something."""
    method = config.speculative_method or "none"
    given: dict[str, str | float | None] = {
        "acceptance": scenario.acceptance,
        "acceptance_spread": scenario.acceptance_spread or None,
        "draft_model": scenario.draft_model,
    }
    for name, value in given.items():
        if value is not None and (not config.speculates or (name == "draft_model" and method != "draft_model")):
            wanted = "draft_model" if name == "draft_model" else "ngram, draft_model, eagle or mtp"
            raise ConfigError(
                f"`{name}` is `{value}`, but `speculative_method` is {method}\n"
                f"hint: --speculative-method {wanted}, or leave out {option_of(name)}"
            )
    if method == "draft_model" and scenario.draft_model is None:
        raise ConfigError("`speculative_method` draft_model needs a `draft_model`\nhint: --draft-model qwen3-0.6b")
    if scenario.grammar_forces is not None and not config.jumps:
        raise ConfigError(
            f"`grammar_forces` is `{scenario.grammar_forces}`, but `jump_forward_tokens` is 0\n"
            "hint: --jump-forward-tokens 16, or leave out --grammar-forces"
        )


def _drafting(
    scenario: Scenario, config: SchedConfig, model: ModelSpec, gpu: GpuSpec, cost: CostModel, calibration: Calibration
) -> Drafting | None:
    """How drafts turn out and what they cost, where there are any."""
    method = config.speculative_method
    if method is msgspec.UNSET:
        return None
    acceptance = Acceptance.of(method, scenario.acceptance, scenario.acceptance_spread, scenario.seed)
    if method == "ngram":
        return Drafting(acceptance, NgramDraftCost())
    if scenario.draft_model is None:
        return Drafting(acceptance, head_of(cost, model.layers))
    small = load_model(scenario.draft_model)
    base = base_cost_model(small, gpu, replace(scenario.parallelism, pp=1), kv_dtype=scenario.kv_dtype)
    return Drafting(acceptance, ModelDraftCost(calibration.cost_model(base), name=small.name))


def check_load(scenario: Scenario) -> None:
    """Raises ConfigError for a load that is two at once, or nothing to measure."""
    if scenario.warm_up < 0:
        raise ConfigError(
            f"`warm_up` must be a number of requests of at least 0, got `{scenario.warm_up}`\nhint: 0 measures all"
        )
    if scenario.receive_interval < 1:
        interval = scenario.receive_interval
        raise ConfigError(f"`receive_interval` must be at least 1, got `{interval}`\nhint: 1 looks every time")
    if scenario.limit is not None and scenario.warm_up >= max(scenario.limit, 1):
        raise ConfigError(
            f"`warm_up` must be less than the {scenario.limit} requests of `limit`, got `{scenario.warm_up}`\n"
            "hint: nothing would be measured"
        )
    if scenario.concurrency is None:
        return
    if scenario.limit is not None and scenario.limit < 1:
        raise ConfigError(f"`limit` must be at least 1, got `{scenario.limit}`\nhint: leave it out")
    if not 1 <= scenario.concurrency <= CONCURRENCY_MAX:
        raise ConfigError(
            f"`concurrency` must be from 1 to {CONCURRENCY_MAX:,}, got `{scenario.concurrency}`\n"
            "hint: leave it out and requests come by the clock"
        )
    if scenario.rate is not None or scenario.rate_scale != 1.0:
        raise ConfigError("`concurrency` and `rate` are two kinds of load\nhint: leave one of them out")


def check_measured(scenario: Scenario, workload: Workload) -> None:
    """Raises ConfigError if the workload ends before anything is measured. A closed loop may play it several times."""
    requests = len(workload.turns)
    if scenario.concurrency is not None and scenario.limit is not None:
        return
    if scenario.warm_up >= max(requests, 1):
        raise ConfigError(
            f"`warm_up` must be less than the {requests:,} requests of the workload, got `{scenario.warm_up}`\n"
            "hint: nothing would be measured"
        )


def open_load(scenario: Scenario) -> Workload:
    """The workload that a scenario names, at its rate; of a closed loop, as it stands. Raises WorkloadError."""
    closed = scenario.concurrency is not None
    workload = open_workload(
        scenario.workload,
        seed=scenario.seed,
        rate=math.inf if closed else scenario.rate,
        rate_scale=scenario.rate_scale,
        time_window=scenario.time_window,
        limit=None if closed else scenario.limit,
        skip_bad_rows=scenario.skip_bad_rows,
        recorded_media=scenario.media == RECORDED,
    )
    if scenario.media is not None:
        workload = _with_media(workload, scenario, scenario.media)
    if scenario.adapters is not None:
        workload = _with_adapters(workload, scenario, scenario.adapters)
    if scenario.samples is not None:
        turns = with_samples(workload.turns, parse_samples(scenario.samples), seed=scenario.seed)
        notes = (*workload.notes, describe_samples(turns))
        workload = replace(workload, turns=turns, digest=workload_digest(turns), notes=notes)
    if scenario.server_sessions:
        turns = with_server_sessions(workload.turns)
        workload = replace(workload, turns=turns, notes=(*workload.notes, describe_server_sessions(turns)))
    if not closed:
        return workload
    # When its requests would come by the clock is not asked of a closed loop.
    return replace(workload, notes=tuple(note for note in workload.notes if CLOCKLESS not in note))


def _with_media(workload: Workload, scenario: Scenario, media: str) -> Workload:
    """The same with what turns bring besides text. Raises ConfigError or CatalogueError."""
    encoders = encoders_of(scenario)
    turns = workload.turns
    if media != RECORDED:
        turns = with_media(turns, parse_media(media), encoders, seed=scenario.seed)
    assert turns.media is not None
    for kind in {content.kind for content in turns.media.contents().values()}:
        encoders.tower(kind)  # raises for a kind that the model does not take
    notes = (*workload.notes, describe_media(turns.media, len(turns)))
    return replace(workload, turns=turns, digest=workload_digest(turns), notes=notes)


def check_samples(scenario: Scenario) -> None:
    """Raise ConfigError for what cannot be read, or is not simulated together."""
    if scenario.samples is None:
        return
    parse_samples(scenario.samples)
    for what, value in (("rank_schedulers", scenario.rank_schedulers), ("role", scenario.settings.get("role"))):
        if value and value != "mixed":
            raise ConfigError(
                f"`samples` is `{scenario.samples}`, but `{what}` is {'on' if value is True else value}: several "
                "answers are simulated where engines do all of a request themselves\nhint: leave out one of the two"
            )


def _with_adapters(workload: Workload, scenario: Scenario, adapters: str) -> Workload:
    """The same with what each request runs on. Raises ConfigError."""
    turns = with_adapters(workload.turns, parse_adapters(adapters), seed=scenario.seed)
    notes = (*workload.notes, describe_adapters(turns))
    return replace(workload, turns=turns, digest=workload_digest(turns), notes=notes)


def encoders_of(scenario: Scenario) -> Encoders:
    """What the scenario's model sees and hears with. Raises ConfigError if it has nothing for that."""
    encoders = load_encoders(scenario.model)
    if encoders is None:
        raise ConfigError(
            f"`media` is `{scenario.media}`, but {scenario.model} takes text alone\n"
            "hint: a model with an encoder, such as --model qwen2.5-vl-7b, qwen3-vl-8b, gemma-3-27b or qwen2-audio-7b"
        )
    return encoders


def arrivals_of(setup: Setup) -> Arrivals | ConcurrentSessions:
    """Who sends what and when."""
    cut = setup.config.truncate_input != "no"  # then what is too long is not turned away
    prompt_tokens_max = LENGTH_TOKENS_MAX if cut else setup.config.prompt_tokens_max(True)
    return arrivals_of_load(setup.scenario, setup.workload.turns, prompt_tokens_max)


def arrivals_of_load(scenario: Scenario, turns: Turns, prompt_tokens_max: int) -> Arrivals | ConcurrentSessions:
    """The same of turns alone. A session with a longer prompt breaks off there."""
    if scenario.concurrency is None:
        return Arrivals(turns)
    requests = len(turns) if scenario.limit is None else scenario.limit
    return ConcurrentSessions(turns, scenario.concurrency, requests, scenario.seed, prompt_tokens_max)


def check_seed(seed: int) -> None:
    """Raise ConfigError for what cannot be a seed."""
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"`seed` must be a whole number from 0 to {SEEDS - 1}, got `{seed}`")


def configure(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> tuple[SchedConfig, KvCapacity | None]:
    """The scheduler's settings: what was given, else what the model's context and the GPU's memory say."""
    profile = profile_settings(scenario.profile)
    given = {"context_tokens_max": model.context_tokens_max, **profile, **scenario.settings}
    if scenario.max_new_tokens is not None:
        if scenario.max_new_tokens < 1:
            raise ConfigError(f"`max_new_tokens` must be at least 1, got `{scenario.max_new_tokens}`")
        given["eos_token_ids"] = (*given.get("eos_token_ids", ()), EOS_TOKEN_ID)
    split = scenario.parallelism
    tiers = host_tiers(scenario.tiers)
    if tiers.host_cache_gb:
        check_split(model, split)
        page_size = given.get("page_size", SchedConfig().page_size)
        given["tiers"] = tiers.settings(PageBytes.of(model, split, scenario.kv_dtype, page_size))
    shares = hybrid_shares(scenario.tiers)
    if shares.on:
        check_hybrid(model)
    if given.get("pp_size", 1) != 1 and "overlap_depth" not in scenario.settings:
        given["overlap_depth"] = 0  # microbatches overlap with each other
    if scenario.adapters is not None:
        given.setdefault("max_loras", LORAS)
    if scenario.rank_schedulers:
        check_ranks(scenario)
        given = settings_of_rank(given, split.attention_dp)
    config = SchedConfig(**given)
    check_stages(scenario, config)
    check_drafting(scenario, config)
    lora = lora_of(scenario, config)
    if lora is not None:
        check_targets(model, split, lora)
    check_split(model, split)
    for name, most in (("pages", PAGES_MAX), ("max_running_requests", ROWS_MAX), ("request_rows", ROWS_MAX)):
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(f"`{name}` is simulated up to {most:,}, got `{value}`\nhint: no GPU holds so many")
    kv = None if "pages" in given else _capacity(scenario, model, gpu, config_of_engine(config))
    if shares.on:
        config = _with_pools(config, hybrid_settings(model, config, shares, kv), kv, scenario, model)
    if kv is None:
        return _within_a_shard(config, split, config.pages), None
    if config.shares_passes:
        own = kv.pages // split.attention_dp
        context = min(config.context_tokens_max, own * config.page_size)
        return msgspec.structs.replace(config, pages=own, context_tokens_max=context), kv
    return _within_a_shard(msgspec.structs.replace(config, pages=kv.pages), split, kv.pages), kv


def _with_pools(
    config: SchedConfig, hybrid: HybridMemory, kv: KvCapacity | None, scenario: Scenario, model: ModelSpec
) -> SchedConfig:
    """The settings with pools beside full attention, on the host as well."""
    tiers, ranks = host_tiers(scenario.tiers), config.dp_ranks if isinstance(config.dp_ranks, int) else 1
    pages = config.pages if kv is None else kv.pages
    below: dict[str, Any] = {}
    if config.tiers is not msgspec.UNSET:
        page, beside = block_bytes(model, scenario.parallelism, scenario.kv_dtype, config.page_size)
        of_engine = tiers.settings(host_page_bytes(pages if kv is None else pages // ranks, hybrid, page, beside))
        assert of_engine is not msgspec.UNSET
        below["tiers"] = msgspec.structs.replace(of_engine, host_pages=max(of_engine.host_pages // ranks, 1))
    return msgspec.structs.replace(config, pages=pages, hybrid=hybrid, **below)


def check_stages(scenario: Scenario, config: SchedConfig) -> None:
    """Raise ConfigError for microbatches for other stages than there are."""
    if config.pipelines and config.pp_size != scenario.pp:
        raise ConfigError(
            f"`pp_size` is {config.pp_size}, but `pp` is {scenario.pp}: an engine has microbatches for the stages it "
            f"has\nhint: --pp {config.pp_size} --pp-size {config.pp_size}, or leave out --pp-size"
        )


def _within_a_shard(config: SchedConfig, split: Parallelism, pages: int) -> SchedConfig:
    """A request's KV is in one shard, so its context ends where the shard does."""
    if split.attention_dp == 1 or config.shares_passes:
        return config
    most = pages // split.attention_dp * config.page_size
    return msgspec.structs.replace(config, context_tokens_max=min(config.context_tokens_max, most))


def _capacity(scenario: Scenario, model: ModelSpec, gpu: GpuSpec, config: SchedConfig) -> KvCapacity:
    """What the GPUs' memory leaves for KV. Raises CapacityError if the model does not fit."""
    shares = hybrid_shares(scenario.tiers)
    capacity = partial(
        kv_capacity,
        model,
        gpu,
        scenario.parallelism,
        mem_fraction=scenario.mem_fraction,
        page_tokens=config.page_size,
        kv_dtype=scenario.kv_dtype,
        weights_dtype=scenario.weights_dtype,
        chunk_tokens=config.chunked_prefill_size or max(config.max_prefill_tokens, config.context_tokens_max),
        sampled_rows=config.max_running_requests,
        state_rows=0 if shares.on else config.max_running_requests,
        lora=lora_of(scenario, config),
    )
    drafts, several = _has_drafter(config), scenario.pp > 1
    drafter = _last_stage_drafter(scenario, model) if drafts and several else (0, 0)
    if drafts and several and not shares.on:
        capacity = partial(capacity, last_stage=StageBytes(drafter[0], kv_per_token=drafter[1]))
    if scenario.media is None:
        kv = capacity()
    else:
        kv = beside_encoder(lambda besides: capacity(first_stage=besides), scenario, gpu, config)
    if shares.on:
        if drafts and not several:
            drafter = _drafter_bytes(kv.weights_bytes, kv.kv_bytes_per_token, scenario, model)
        return shared_out(kv, model, scenario.parallelism, scenario.kv_dtype, shares, drafter)
    return _beside_drafter(kv, scenario, model) if drafts and not several else kv


def _has_drafter(config: SchedConfig) -> bool:
    return config.speculative_method not in (msgspec.UNSET, "ngram")


def _drafter_bytes(weights: int, kv_per_token: int, scenario: Scenario, model: ModelSpec) -> tuple[int, int]:
    """Bytes of a drafter's weights, and of its KV of a token. A head is taken as an average layer of these of a model.

    It is on the GPUs of one stage.
    """
    if scenario.draft_model is None:
        return weights // model.layers, kv_per_token // max(model.attention_layers, 1)
    split, small = replace(scenario.parallelism, pp=1), load_model(scenario.draft_model)
    check_split(small, split)
    weights = stages_of(small, split)[0].weights_bytes(checked_weights_dtype(small, None), split)
    return weights, small.kv_bytes_per_token(scenario.kv_dtype, split)


def _last_stage_drafter(scenario: Scenario, model: ModelSpec) -> tuple[int, int]:
    """The same of the last of several stages: a head there needs an embedding of its own, unless that is tied."""
    split, dtype = replace(scenario.parallelism, pp=1), checked_weights_dtype(model, scenario.weights_dtype)
    whole = Stage(model, True, True).weights_bytes(dtype, split)
    drafter, kv_per_token = _drafter_bytes(whole, model.kv_bytes_per_token(scenario.kv_dtype, split), scenario, model)
    if scenario.draft_model is None:
        drafter += whole - Stage(model, False, True).weights_bytes(dtype, split)
    return drafter, kv_per_token


def _beside_drafter(kv: KvCapacity, scenario: Scenario, model: ModelSpec) -> KvCapacity:
    """What the drafter's weights leave, its KV being in the same pages."""
    weights, per_token = _drafter_bytes(kv.weights_bytes, kv.kv_bytes_per_token, scenario, model)
    kv_bytes = max(kv.kv_bytes - weights, 0)
    per_token += kv.kv_bytes_per_token
    pages = kv_bytes // (per_token * kv.page_tokens) * kv.shards
    if pages < 1:
        raise CapacityError(
            f"{model.name} leaves {kv.kv_bytes / 1e9:.1f} GB for KV; its drafter takes {weights / 1e9:.1f} GB of them\n"
            "hint: raise --tp, or choose a smaller --draft-model"
        )
    return replace(
        kv,
        pages=pages,
        tokens=pages * kv.page_tokens,
        weights_bytes=kv.weights_bytes + weights,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=per_token,
    )


# ------------------------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished simulation."""

    setup: Setup
    data: RunData
    batches: int
    clamped: int  # requests granted fewer tokens than they asked for
    rejected: Counter[str]  # by reason
    never_sent: int  # turns of sessions that broke off
    interrupted: bool
    cpu_s: float  # of this process, for the replay and its metrics alone
    intervals: Intervals | None = None  # see intervals_of

    @property
    def calibration(self) -> Calibration:
        return self.setup.calibration

    def metrics(self) -> dict[str, Any]:
        """What metrics.json holds."""
        intervals = {} if self.intervals is None else {"intervals": self.intervals.describe()}
        return {"about": self.about(), **self.data.summary, **intervals}

    def about(self) -> dict[str, Any]:
        """See Setup.about; and what must be known to read the numbers."""
        return {
            **self.setup.about(),
            "interrupted": self.interrupted,
            "clamped_requests": self.clamped,
            "never_sent_turns": self.never_sent,
        }

    def remarks(self) -> list[str]:
        """What a reader of the table must know, one line each; empty if all went as asked."""
        workload, config, scenario = self.setup.workload, self.setup.config, self.setup.scenario
        requests = self.data.summary["requests"]
        lines = []
        if self.interrupted:
            open_requests = requests["unfinished"]
            lines.append(f"interrupted: the numbers are those until then; {open_requests:,} requests were still open")
        elif requests["unfinished"]:
            lines.append(f"{requests['unfinished']:,} requests never ended: the scheduler stopped launching")
        if requests["rejected"]:
            rejected = requests["by_reject_reason"]
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items()))
            limit = f" ({_limit(config)})" if "too_long" in rejected else ""
            lines.append(f"rejected {requests['rejected']:,} of {requests['arrived']:,} requests: {reasons}{limit}")
        if self.clamped:
            lines.append(f"clamped {self.clamped:,} answers to what fits behind their prompt ({_limit(config)})")
        if scenario.warm_up:
            lines.append(f"the first {scenario.warm_up:,} requests are not in the numbers")
        if self.never_sent and not self.interrupted:
            lines.append(f"{self.never_sent:,} turns were never sent: their session broke off before")
        if workload.skipped.count:
            lines.append(f"left out {workload.skipped.count:,} bad rows: {workload.skipped.examples[0]}")
        extrapolated = self.setup.cost.describe().get("extrapolated")
        if extrapolated:
            lines.append(f"some batches were far from what the operator tables measured, in {', '.join(extrapolated)}")
        lines += self.setup.doubts(has_intervals=self.intervals is not None)
        return lines + list(workload.notes)


def _limit(config: SchedConfig) -> str:
    if config.request_tokens_max == config.context_tokens_max:
        return f"context {config.context_tokens_max} tokens"
    return f"KV pool {config.pool_tokens} tokens"


class FrontEnd:
    """Metrics as clients see them: a request has been under way for a while when the engine first hears of it."""

    def __init__(self, metrics: MetricsSink, frontend_us: int) -> None:
        self._metrics = metrics
        self._frontend_us = frontend_us
        self.gauge = metrics.gauge
        self.cpu_interval = metrics.cpu_interval

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Take in one event and its Step."""
        if type(event) is RequestArrived:
            event = msgspec.structs.replace(event, time_us=event.time_us - self._frontend_us)
        self._metrics.observe(event, step)


class NoJournal:
    """For runs that are only measured. Their engines need no digests."""

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Forget."""

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Forget."""


def simulate(
    setup: Setup,
    *,
    folder: Path | None = None,
    check_every: int = 0,
    on_finish: Callable[[int], None] | None = None,
    witness: Observer | None = None,
    compiled: bool | None = None,
) -> Run:
    """Run a setup to its end, or until Ctrl-C. With `folder`, its journal is written there; see `prepare_folder`.

    Args:
        check_every: check the core's invariants after every so many events; 0 is never.
        on_finish: called with the number of requests that ended, after each; now and then by machine code.
        witness: told of every step that decides anything; see host.Witness.
        compiled: whether a plain run without a journal is one of machine code, see plain_run.py, which changes no
            result; None: once that is worth it.
    Raises: JournalError if the journal cannot be written; what was written is a valid journal. ConfigError for a role
        that one engine alone cannot have.
    """
    if setup.config.shares_passes:
        raise ConfigError("`rank_schedulers` is on: its ranks are simulated as a cluster, see cluster.py")
    if setup.config.hands_over:
        raise ConfigError(
            f"`role` is {setup.config.role}, but there is one engine, and nobody with the other role\n"
            "hint: --prefill-engines 1 --decode-engines 1"
        )
    if folder is None:
        if compiled is not False and not check_every and witness is None:
            run = _run_compiled(setup, on_finish, always=compiled is True)
            if run is not None:
                return run
        return _run(setup, NoJournal(), check_every, on_finish, witness)
    journal = JournalWriter.create(folder, setup.header())
    with journal:
        run = _run(setup, journal, check_every, on_finish, witness)
        journal.close("interrupted" if run.interrupted else "closed")
    return run


def host_of(
    setup: Setup,
    arrivals: RequestSource,
    journal: JournalSink,
    *,
    env: Environment,
    name: str = "engine0",
    check_every: int = 0,
    on_finish: Callable[[int], None] | None = None,
    port: TransferPort | None = None,
    exchange: RankExchange | None = None,
    device_type: type[Device] | None = None,
    tells: Callable[[MetricsSink], MetricsSink] | None = None,
    witness: Observer | None = None,
) -> tuple[EngineHost, MetricsFold]:
    """One engine's host and what measures it, alone or among others: whoever simulates an engine asks here for it.

    Args:
        env: the clock, its own or one that it shares.
        check_every: check invariants after so many events; 0: never.
        port: of a prefill or a decode engine.
        exchange: of one of several data-parallel ranks.
        device_type: what runs batches; None: what the cost model asks for.
        tells: who else hears what is measured, in front of what measures it.
        witness: told of every step; see host.Witness.
    """
    scenario = setup.scenario
    engine = Engine(setup.config, digests=not isinstance(journal, NoJournal))
    if setup.debug:
        metrics: MetricsFold = WatchedMetrics(engine, setup.debug, warm_up=scenario.warm_up)
    else:
        metrics = MetricsFold(
            kv_pages=setup.config.pages,
            warm_up=scenario.warm_up,
            host_page_bytes=setup.host_page_bytes,
            host_block_bytes=setup.host_block_bytes,
            needs_media=setup.config.role != "decode",
        )
    tiers = setup.tier_links()
    frontend_us = round(setup.calibration.correction.frontend_us)
    sink: MetricsSink = metrics if tells is None else tells(metrics)
    host = EngineHost(
        env,
        engine,
        arrivals,
        setup.cost,
        setup.cpu,
        journal,
        FrontEnd(sink, frontend_us) if frontend_us else sink,
        seed=scenario.seed,
        name=name,
        max_new_tokens=scenario.max_new_tokens,
        check=invariants.self_check if check_every else None,
        check_every=check_every or 1,
        on_finish=on_finish,
        decode_runs=not setup.debug,
        grammar_compile_us=scenario.grammar_compile_us,
        receive_interval=scenario.receive_interval,
        device_type=device_type or device_type_of(setup.cost),
        speculation=setup.drafting.for_engine(setup.config) if setup.drafting is not None else None,
        forcing=setup.forcing,
        tiers=tiers,
        state_copy_us=setup.state_copy_us,
        port=port,
        exchange=exchange,
        witness=witness,
        encoder=setup.encoding.lane(metrics) if setup.encoding is not None else None,
        adapters=setup.adapter_lane(tiers),
        conversations=Conversations(setup.config.context_tokens_max, metrics) if scenario.server_sessions else None,
    )
    return host, metrics


def _run(
    setup: Setup,
    journal: JournalSink,
    check_every: int,
    on_finish: Callable[[int], None] | None,
    witness: Observer | None,
) -> Run:
    arrivals, env = arrivals_of(setup), Environment()
    host, metrics = host_of(
        setup, arrivals, journal, env=env, check_every=check_every, on_finish=on_finish, witness=witness
    )
    began_s = time.process_time()
    with stopping_on_interrupt(host), collecting_seldom():
        host.env.process(host.run())
        host.env.run()
    data = with_stages(metrics.result(setup.scenario.slos), host)
    if host.tiers is not None:
        data.summary["cache"]["links"] = host.tiers.describe()
    return Run(
        setup=setup,
        data=data,
        batches=host.batches,
        clamped=host.clamped,
        rejected=host.rejected,
        never_sent=arrivals.never_sent,
        interrupted=host.stop_requested,
        cpu_s=time.process_time() - began_s,
    )


def _run_compiled(setup: Setup, on_finish: Callable[[int], None] | None, *, always: bool) -> Run | None:
    """The same as machine code; None: it is none that may be, turned out to be none, or is not worth it."""
    if not is_available() or unsupported_by(setup) or not (always or pays(len(setup.workload.turns))):
        return None
    began_s = time.process_time()
    metrics = MetricsFold(kv_pages=setup.config.pages, warm_up=setup.scenario.warm_up)
    plain = FastRun([setup], [metrics], on_finish)
    with stopping_on_interrupt(plain), collecting_seldom():
        if not plain.run():
            return None
    return Run(
        setup=setup,
        data=metrics.result(setup.scenario.slos),
        batches=plain.batches(0),
        clamped=0,
        rejected=Counter(),
        never_sent=0,
        interrupted=plain.stop_requested,
        cpu_s=time.process_time() - began_s,
    )


GARBAGE_THRESHOLD = 100_000  # more objects than before: then cycles are looked for; Python's own is 700


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for cycles of garbage seldom: a run makes none worth it, and each search goes over much that it keeps."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Stoppable(Protocol):
    """What ends before its next fact once `stop_requested` is set."""

    stop_requested: bool


@contextmanager
def stopping_on_interrupt(host: Stoppable) -> Iterator[None]:
    """Let the first Ctrl-C end the run between two events, so that engine and journal agree; a second one raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        host.stop_requested = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------------- the run folder


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make the run folder, or empty the one that is there. Nothing but files of runs is ever removed.

    Raises: ConfigError if the folder holds something else, or a run and `overwrite` is not set, or cannot be written.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        check_folder(folder)
        return
    journal = folder / "journal"
    journals = [journal, *sorted(folder.glob("engines/*/journal"))]
    if not folder.is_dir() or not (any(any(j.glob("*.log")) for j in journals) or (folder / "metrics.json").is_file()):
        raise ConfigError(f"`{folder}` exists and is not a run folder\nhint: choose another --out")
    if not overwrite:
        raise ConfigError(f"`{folder}` already holds a run\nhint: choose another --out, or add --overwrite")
    for old in journals:
        for path in [*old.glob("*.log"), *old.glob("snapshot-*")]:
            path.unlink()
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)
    for decisions in folder.glob("decode/router.jsonl"):  # of a cluster that hands requests over
        decisions.unlink()
        decisions.parent.rmdir()
    for engine in folder.glob("engines/*"):
        for name in ("metrics.json", "trace.json.gz"):
            (engine / name).unlink(missing_ok=True)
        for empty in (engine / "journal", engine):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


def write_run(folder: Path, run: Run, *, requests: bool = True, trace: bool = True, report: bool = True) -> None:
    """Write what was measured beside the journal: metrics.json, and the rest of OUTPUTS unless it is not wanted."""
    from lockstep.sim.report import write_report
    from lockstep.sim.results.perfetto import write_trace
    from lockstep.sim.results.results import write_metrics_json, write_requests

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = run.about()
    with whole(folder / "metrics.json") as path:
        write_metrics_json(path, run.data, about, run.intervals)
    if requests:
        with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
            write_requests(run.data, parquet, csv)
    if trace:
        with whole(folder / "trace.json.gz") as path:
            write_trace(path, run.data, about={"seed": about["seed"], "command": about["command"]})
    if report and run.data.summary["requests"]["arrived"]:
        with whole(folder / "report.html") as path:
            write_report(
                path,
                [report_run(run)],
                title=run.setup.title,
                subtitle=workload_line(run.setup.workload, closed=run.setup.scenario.concurrency is not None),
                headline=interrupted_headline(run) if run.interrupted else None,
            )


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write `path`, so that it is there whole or not at all. An OSError names the file that was wanted."""
    part = path.with_name(f".part-{path.name}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"{path.name} was not written: {error.strerror}", str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def interrupted_headline(run: Run | ClusterRun) -> str:
    """The answer of a run that was stopped."""
    requests, arrived = len(run.setup.workload.turns), run.data.summary["requests"]["arrived"]
    minutes = (run.data.span_us[1] - run.data.span_us[0]) / 60e6
    return f"Interrupted after {minutes:.1f} simulated minutes: {arrived:,} of {requests:,} requests had arrived"


def report_run(run: Run, name: str = "", rate_per_s: float | None = None) -> Any:
    """The run as a report takes it in."""
    from lockstep.sim.report import ReportRun
    from lockstep.sim.report.text import setting

    setup = run.setup
    facts = {
        "model": setup.model.name,
        "GPU": setup.hardware,
        "workload": setup.workload.source,
        "workload digest": setup.workload.digest,
        "cost model": str(setup.cost.describe()["kind"]),
        "calibration": setup.calibration.title,
        **{name: setting(value) for name, value in msgspec.to_builtins(setup.config).items()},
        "seed": str(setup.scenario.seed),
        "version": code_version(),
        "commit": code_commit() or "unknown",
        "command": setup.scenario.command(),
    }
    return ReportRun(
        name or setup.title,
        facts,
        run.data,
        rate_per_s,
        intervals=None if run.intervals is None else run.intervals.describe(),
        calibration=setup.calibration.title,
        remarks=run.remarks(),
    )


def workload_line(workload: Workload, *, closed: bool = False) -> str:
    """A workload in one line; `closed`: as a closed loop, which has no arrivals by the clock."""
    summary = workload.summary()
    rate = f"{summary.arrivals_per_s:.4g}/s" if summary.duration_us else "all at once"
    if closed:
        rate = f"{summary.turns - summary.follow_ups:,} sessions in a closed loop"
    return (
        f"{workload.name}: {summary.turns:,} requests, {rate}, "
        f"{summary.prompt.mean:,.0f} tokens in and {summary.output.mean:,.0f} out on average, "
        f"{100 * summary.sharing_ratio:.0f} % of the prompts shared"
    )


# ------------------------------------------------------------------------------------------------------ which code ran


def code_version() -> str:
    """The version of the installed simulator."""
    try:
        return version("lockstep-sim")
    except PackageNotFoundError:
        return "source"


@cache
def code_commit() -> str | None:
    """The commit this file was checked out from, with `-dirty` if something changed since; None if it was installed."""
    root = Path(__file__).resolve().parents[5]
    if not (root / ".git").exists() or not (root / "packages" / "sim").is_dir():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
