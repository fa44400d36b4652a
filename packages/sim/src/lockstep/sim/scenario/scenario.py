"""What to simulate on one engine. Flags, trials of a plan, command lines and tables of options follow from its fields.

An option of the simulator is one field with a `SimOption` here, and whatever reads it; docs/options.md lists them all.
Reads nothing heavy, for --help.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.host.options import Option, OptionField, changed_words, options_of
from lockstep.host.quantization import Fp8Activations, KvDtype, WeightsDtype
from lockstep.sim.metrics.slo import Slo

if TYPE_CHECKING:
    from lockstep.sim.cost.parallel import Parallelism

SIMULATE = ("simulate",)
"""The command that takes options of a load and of one simulation; a plan varies or decides these itself."""


@dataclass(frozen=True)
class SimOption(Option):
    """An option of the simulator.

    Args:
        searched: a plan may search over its values.
        configures: it is part of what an engine is, and no assumption about the workload: a plan names it among what
            `lockstep serve` does not carry out.
        stored: a stored trial of a plan has it at its default, too. Keys of trials are digests of what is stored, so an
            option that is added stays out at its default.
        of_load: the requests of the workload depend on it.
        sent: `lockstep bench serve` has it, too.
    """

    _: KW_ONLY
    searched: bool = False
    configures: bool = False
    stored: bool = False
    of_load: bool = False
    sent: bool = False


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate on one engine. Fields are in the order in which a command line has them."""

    model: Annotated[str, SimOption("catalogue name, such as qwen3-8b, or the path of a config.json", stored=True)]
    gpu: Annotated[str, SimOption("catalogue name, such as h200, or the path of a JSON file", stored=True)]
    workload: Annotated[
        str,
        SimOption(
            "a trace, a fitted model, or a generator: docs/workloads.md; several, [TENANT=]WORKLOAD[@RATE], are mixed",
            metavar="PATH|gen:...",
            stored=True,
            of_load=True,
        ),
    ]
    # The layout of an engine: lockstep.sim.cost.parallel.Parallelism has the same names and defaults.
    tp: Annotated[
        int,
        SimOption(
            "GPUs that share one copy of the model (tensor parallelism)", searched=True, configures=True, stored=True
        ),
    ] = 1
    ep: Annotated[
        int,
        SimOption(
            "groups of the tp GPUs that share out the experts; divides tp", searched=True, configures=True, stored=True
        ),
    ] = 1
    attention_dp: Annotated[
        int,
        SimOption(
            "shards of the tp GPUs, each with rows of its own; divides tp", searched=True, configures=True, stored=True
        ),
    ] = 1
    pp: Annotated[
        int,
        SimOption(
            "stages of tp GPUs that share out the layers (pipeline parallelism)",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = 1
    moe_a2a: Annotated[
        bool,
        SimOption(
            "rows go to their experts by all-to-all (DeepEP); needs ep = tp",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = False
    expert_cv: Annotated[
        float, SimOption("how unequally popular experts are: deviation over mean", searched=True, stored=True)
    ] = 0.0
    eplb: Annotated[
        bool,
        SimOption("place experts by their load; needs ep and --expert-cv", searched=True, configures=True, stored=True),
    ] = False
    redundant_experts: Annotated[
        int,
        SimOption("with --eplb: slots for further copies, of all ranks", searched=True, configures=True, stored=True),
    ] = 0
    eplb_interval: Annotated[
        int, SimOption("with --eplb: passes between two rebalancings", searched=True, stored=True)
    ] = 1000
    expert_drift: Annotated[
        float, SimOption("with --eplb: share of experts that change meanwhile", searched=True, stored=True)
    ] = 0.0
    # The load.
    rate: Annotated[
        float | None,
        SimOption(
            "requests per second: stretches a trace",
            default="as recorded",
            commands=SIMULATE,
            stored=True,
            of_load=True,
            sent=True,
        ),
    ] = None
    rate_scale: Annotated[
        float, SimOption("multiplies the rate: 2 halves every gap", commands=SIMULATE, of_load=True, sent=True)
    ] = 1.0
    time_window: Annotated[
        str | None,
        SimOption(
            "keep what arrives then, in recorded time: 600..1200, 10m..1h",
            metavar="FROM..TO",
            commands=SIMULATE,
            of_load=True,
            sent=True,
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        SimOption(
            "a closed loop: so many sessions at a time, whatever the clock", commands=SIMULATE, stored=True, sent=True
        ),
    ] = None
    warm_up: Annotated[
        int, SimOption("the first so many requests are not measured", commands=SIMULATE, stored=True, sent=True)
    ] = 0
    limit: Annotated[
        int | None, SimOption("keep the first so many requests", commands=SIMULATE, stored=True, sent=True)
    ] = None
    seed: Annotated[
        int,
        SimOption(
            "of a generated workload, and of random durations", commands=SIMULATE, stored=True, of_load=True, sent=True
        ),
    ] = 7
    # The model in memory, and how its batches are timed.
    mem_fraction: Annotated[
        float, SimOption("of GPU memory, for weights, activations and KV", searched=True, stored=True)
    ] = 0.9
    weights_dtype: Annotated[
        WeightsDtype | None,
        SimOption("bf16, fp8, ...", default="the checkpoint's own", searched=True, configures=True, stored=True),
    ] = None
    kv_dtype: Annotated[KvDtype, SimOption("bf16 or fp8", searched=True, configures=True, stored=True)] = "bf16"
    fp8_activations: Annotated[
        Fp8Activations,
        SimOption("whether fp8 weights meet rows in fp8: auto, on, off", searched=True, configures=True),
    ] = "auto"
    operators: Annotated[
        str | None,
        SimOption(
            "measured operator tables of this GPU: docs/cost-models.md, section 3",
            metavar="DIR",
            configures=True,
            stored=True,
        ),
    ] = None
    calibration: Annotated[
        str | None,
        SimOption("vllm-h100, ..., or a file of `lockstep calibrate`", metavar="NAME|FILE", stored=True),
    ] = None
    profile: Annotated[
        str,
        SimOption("policy of another engine: sglang or vllm; options override it", searched=True, stored=True),
    ] = "lockstep"
    # Drafts besides the scheduler's settings: docs/cost-models.md, section 10.
    acceptance: Annotated[
        str | None,
        SimOption("chance that draft 1,2,... is right", metavar="RATES", default="by the method", stored=True),
    ] = None
    acceptance_spread: Annotated[float, SimOption("deviation of its log-odds between requests", stored=True)] = 0.0
    draft_model: Annotated[
        str | None, SimOption("the drafting model of --speculative-method draft_model: qwen3-0.6b", stored=True)
    ] = None
    grammar_forces: Annotated[
        str | None,
        SimOption(
            "with --jump-forward-tokens: how often a grammar leaves no choice, for so many",
            metavar="CHANCExTOKENS",
            default="0.12x2",
            stored=True,
        ),
    ] = None
    media: Annotated[
        str | None,
        SimOption(
            "media of requests, simulated only: image=0.3x1..4:1024x768/200, video=0.1:640x360:8s, audio=0.2:12s, "
            "recorded; may be repeated",
            metavar="SPEC",
            separator=";",
            of_load=True,
        ),
    ] = None
    mm_encoder_tp_mode: Annotated[
        str,
        SimOption("the encoder on the tp GPUs: weights (split), or data (whole on each, which encode side by side)"),
    ] = "weights"
    encoder_gpus: Annotated[
        int, SimOption("GPUs of the encoder alone; 0: it is on the engine's", commands=SIMULATE)
    ] = 0
    adapters: Annotated[
        str | None,
        SimOption(
            "LoRA adapters of requests: 40 different ones, 0.8x40:zipf:1.2 of 0.8 of the sessions, or tenants",
            metavar="SPEC",
            of_load=True,
        ),
    ] = None
    max_lora_rank: Annotated[int, SimOption("rank that each of the --max-loras slots has room for")] = 16
    lora_targets: Annotated[str, SimOption("matrices that it has room for: all, or q_proj,v_proj")] = "all"
    samples: Annotated[
        str | None,
        SimOption(
            "answers that each request gets (n, best_of): 4, or 0.3x2..8 of 0.3 of them", metavar="SPEC", of_load=True
        ),
    ] = None
    server_sessions: Annotated[
        bool, SimOption("turns are of sessions that the server keeps: they bring what is new only", of_load=True)
    ] = False
    rank_schedulers: Annotated[
        bool, SimOption("each shard of --attention-dp has a scheduler of its own: a rank", configures=True)
    ] = False
    max_new_tokens: Annotated[
        int | None, SimOption("limit of every request; shorter answers end with an end token", stored=True)
    ] = None
    grammar_compile_us: Annotated[int, SimOption("time for one grammar", commands=SIMULATE)] = 50_000
    receive_interval: Annotated[
        int, SimOption("decodes between two looks at the socket, at most; 1: at every one", commands=SIMULATE)
    ] = 1
    skip_bad_rows: Annotated[
        bool,
        SimOption(
            "leave out rows that cannot be right; otherwise they are refused", stored=True, of_load=True, sent=True
        ),
    ] = False
    settings: Annotated[Mapping[str, Any], SimOption("fields of SchedConfig that were given", stored=True)] = field(
        default_factory=dict
    )
    tiers: Annotated[Mapping[str, Any], SimOption("fields of HostTiers and HybridShares that were given")] = field(
        default_factory=dict
    )
    slos: Annotated[
        tuple[Slo, ...],
        SimOption(
            "such as ttft_p99=500ms; may be repeated", flag="--slo", metavar="METRIC=TIME", stored=True, sent=True
        ),
    ] = ()

    @property
    def parallelism(self) -> Parallelism:
        """How an engine is laid out. Raises CapacityError for what cannot be."""
        from lockstep.sim.cost.parallel import BESIDES_TP, Parallelism

        return Parallelism(**{name: getattr(self, name) for name in ("tp", *BESIDES_TP)})

    @property
    def gpus(self) -> int:
        """GPUs of an engine."""
        return self.tp * self.pp

    def command(self) -> str:
        """The command line that runs this again."""
        return shlex.join(["lockstep", "simulate", *changed_words(self, always=("seed",))])


def sim_options(command: str = "", *, struct: type = Scenario) -> tuple[OptionField, ...]:
    """Options of the simulator, in order; with `command`, those that it takes."""
    return tuple(field for field in options_of(struct).values() if not command or field.takes(command))


def names_where(trait: str, *, struct: type = Scenario) -> tuple[str, ...]:
    """Names of the options for which a field of SimOption is set: searched, configures, stored."""
    return tuple(field.name for field in options_of(struct).values() if getattr(field.option, trait, False))
