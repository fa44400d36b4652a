"""What to simulate on one engine, in the words of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from lockstep.sim.cost import (
    KvDtype,
    WeightsDtype,
)
from lockstep.sim.cost.lora import LORA_RANK
from lockstep.sim.cost.models import Fp8Activations
from lockstep.sim.cost.parallel import EPLB_INTERVAL, Parallelism
from lockstep.sim.host.adapters import ALL_TARGETS
from lockstep.sim.host.host_options import GRAMMAR_COMPILE_US
from lockstep.sim.metrics.slo import Slo

if TYPE_CHECKING:
    pass


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
