"""Options of a simulation of one engine. Flags, trials of a plan, command lines and tables of options follow from them.

An option of the simulator is one field with a `SimOption` here, plus the code that reads it. docs/options.md lists all
options. This module imports nothing heavy, so that --help stays fast.
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

PUE = 1.56  # average of the Uptime Institute's survey of 2024
GRID_GCO2_PER_KWH = 445.0  # world average of 2024: IEA, Electricity 2025
SAMPLES = BEGINNING, SPREAD = ("beginning", "spread")
"""Values of `sample`."""

SIMULATE = ("simulate",)
"""The command that takes options of a load and of one simulation. A plan varies these options or sets them itself."""


@dataclass(frozen=True)
class SimOption(Option):
    """An option of the simulator.

    Args:
        searched: a plan may search over its values.
        configures: the option is part of the engine's configuration, not an assumption about the workload. A plan lists
            it if `lockstep serve` does not support it.
        stored: a plan stores the option in a trial even at its default. Trial keys are digests of the stored values, so
            a new option is left unstored at its default, and older keys stay valid.
        of_load: the requests of the workload depend on the option.
        sent: `lockstep bench serve` has the option, too.
    """

    _: KW_ONLY
    searched: bool = False
    configures: bool = False
    stored: bool = False
    of_load: bool = False
    sent: bool = False


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate on one engine. Fields are in the order of the flags on a command line."""

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
    # The layout of an engine. lockstep.sim.cost.parallel.Parallelism has the same names and defaults.
    tp: Annotated[
        int,
        SimOption(
            "GPUs that share one copy of the model (tensor parallelism)", searched=True, configures=True, stored=True
        ),
    ] = 1
    ep: Annotated[
        int,
        SimOption(
            "groups of the tp GPUs over which experts are divided; divides tp",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = 1
    attention_dp: Annotated[
        int,
        SimOption(
            "shards of the tp GPUs, each with its own rows; divides tp", searched=True, configures=True, stored=True
        ),
    ] = 1
    pp: Annotated[
        int,
        SimOption(
            "stages of tp GPUs over which layers are divided (pipeline parallelism)",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = 1
    pp_layer_partition: Annotated[
        str | None,
        SimOption(
            "layers of each stage of --pp, such as 17,17,17,13",
            metavar="LAYERS",
            default="even; fewer on a stage that drafts",
            configures=True,
        ),
    ] = None
    scale_up_gpus: Annotated[
        int | None,
        SimOption(
            "GPUs of an NVLink domain (a node or a rack); larger layouts span several over the network",
            default="the GPU's: 8 for an HGX node, 72 for an NVL72 rack",
            searched=True,
        ),
    ] = None
    network_gbs: Annotated[
        float | None,
        SimOption("network between domains: GB/s per GPU, each way", default="the GPU's, or 40", searched=True),
    ] = None
    network_latency_us: Annotated[
        int | None, SimOption("network between domains: one message, GPU to GPU", default="the GPU's, or 15us")
    ] = None
    moe_a2a: Annotated[
        bool,
        SimOption(
            "send rows to their experts by all-to-all (DeepEP); requires ep = tp",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = False
    expert_cv: Annotated[
        float, SimOption("imbalance of expert load: standard deviation over mean", searched=True, stored=True)
    ] = 0.0
    eplb: Annotated[
        bool,
        SimOption(
            "place experts by their load; requires ep and --expert-cv", searched=True, configures=True, stored=True
        ),
    ] = False
    redundant_experts: Annotated[
        int,
        SimOption("with --eplb: slots for extra copies, over all ranks", searched=True, configures=True, stored=True),
    ] = 0
    eplb_interval: Annotated[
        int, SimOption("with --eplb: passes between two rebalancings", searched=True, stored=True)
    ] = 1000
    eplb_imbalance_min: Annotated[
        float,
        SimOption(
            "with --eplb: experts stay while the fullest rank has at most this times the mean load",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = 1.0
    expert_drift: Annotated[
        float,
        SimOption("with --eplb: share of experts whose load changes between rebalancings", searched=True, stored=True),
    ] = 0.0
    # PD multiplexing: core/features/multiplexing.py.
    pdmux: Annotated[
        bool,
        SimOption(
            "compute prompts some layers at a time beside decodes, on shares of the GPU",
            searched=True,
            configures=True,
        ),
    ] = False
    pdmux_sm_groups: Annotated[
        int,
        SimOption(
            "with --pdmux: divisions of the GPU, and two groups that have all of it", searched=True, configures=True
        ),
    ] = 8
    pdmux_decode_divisor: Annotated[
        int,
        SimOption(
            "with --pdmux: decode rows from which on decodes have their largest share", searched=True, configures=True
        ),
    ] = 36
    pdmux_divisions: Annotated[
        str | None,
        SimOption(
            "with --pdmux: SMs for prompts, for decodes, and decode rows from which on, such as 112:20:0,96:36:10",
            metavar="SMS",
            default="by the GPU",
            configures=True,
        ),
    ] = None
    pdmux_token_budget: Annotated[
        int,
        SimOption("with --pdmux: new tokens times layers of one launch of a prompt", searched=True, configures=True),
    ] = 65536
    # The load.
    rate: Annotated[
        float | None,
        SimOption(
            "requests per second; a trace is stretched to it",
            default="as recorded",
            commands=SIMULATE,
            stored=True,
            of_load=True,
            sent=True,
        ),
    ] = None
    rate_scale: Annotated[
        float, SimOption("factor on the rate: 2 halves every gap", commands=SIMULATE, of_load=True, sent=True)
    ] = 1.0
    time_window: Annotated[
        str | None,
        SimOption(
            "keep the requests that arrive in this span of recorded time: 600..1200, 10m..1h",
            metavar="FROM..TO",
            of_load=True,
            sent=True,
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        SimOption(
            "closed loop: sessions in progress at any time; arrival times are ignored",
            commands=SIMULATE,
            stored=True,
            sent=True,
        ),
    ] = None
    warm_up: Annotated[
        int, SimOption("number of first requests that are not measured", commands=SIMULATE, stored=True, sent=True)
    ] = 0
    limit: Annotated[
        int | None,
        SimOption("keep only the first requests, up to this number", commands=SIMULATE, stored=True, sent=True),
    ] = None
    sample: Annotated[
        str,
        SimOption(
            "requests of a trace that a limit keeps: beginning, or spread (groups of common prompts, from all of it)",
            of_load=True,
            sent=True,
        ),
    ] = SAMPLES[0]
    seed: Annotated[
        int,
        SimOption(
            "seed of a generated workload and of random durations",
            commands=SIMULATE,
            stored=True,
            of_load=True,
            sent=True,
        ),
    ] = 7
    # The model in memory, and the timing of its batches.
    mem_fraction: Annotated[
        float, SimOption("share of GPU memory for weights, activations and KV", searched=True, stored=True)
    ] = 0.9
    weights_dtype: Annotated[
        WeightsDtype | None,
        SimOption(
            "type of the weights: bf16, fp8, ...",
            default="the checkpoint's own",
            searched=True,
            configures=True,
            stored=True,
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype, SimOption("type of the KV: bf16 or fp8", searched=True, configures=True, stored=True)
    ] = "bf16"
    fp8_activations: Annotated[
        Fp8Activations,
        SimOption("round rows to fp8 before fp8 weights: auto, on, off", searched=True, configures=True),
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
    engine: Annotated[
        str | None,
        SimOption(
            "engine whose costs are simulated: vllm, sglang, trtllm, lockstep, with a release as in vllm@0.12; a named "
            "engine implies its profile; none: the lower bound, kernels without an engine",
            metavar="NAME",
            default="vllm",
            searched=True,
            stored=True,
        ),
    ] = None
    calibration: Annotated[
        str | None,
        SimOption("name such as vllm-h100, or a file of `lockstep calibrate`", metavar="NAME|FILE", stored=True),
    ] = None
    profile: Annotated[
        str | None,
        SimOption(
            "scheduler settings of an engine: lockstep, sglang or vllm; options override them",
            metavar="NAME",
            default="that of --engine, else lockstep",
            searched=True,
            stored=True,
        ),
    ] = None
    # Drafts, besides the scheduler's settings: docs/cost-models.md, section 10.
    acceptance: Annotated[
        str | None,
        SimOption(
            "probability that draft 1,2,... is right; of a tree 0.7/0.1,0.6/0.1",
            metavar="RATES",
            default="by the method",
            stored=True,
        ),
    ] = None
    acceptance_spread: Annotated[
        float, SimOption("standard deviation of its log-odds between requests", stored=True)
    ] = 0.0
    draft_model: Annotated[
        str | None, SimOption("model of --speculative-method draft_model, such as qwen3-0.6b", stored=True)
    ] = None
    grammar_forces: Annotated[
        str | None,
        SimOption(
            "with --jump-forward-tokens: probability that a grammar forces tokens, and how many",
            metavar="CHANCExTOKENS",
            default="0.12x2",
            stored=True,
        ),
    ] = None
    diffusion_block: Annotated[
        int | None,
        SimOption(
            "tokens of a block, of a model that answers in blocks (LLaDA2, SDAR); none: token by token", configures=True
        ),
    ] = None
    diffusion_iterations: Annotated[
        str | None,
        SimOption(
            "with --diffusion-block: passes after which a block has no mask left, 8 or 4..12",
            metavar="PASSES",
            default="a quarter of the block",
        ),
    ] = None
    media: Annotated[
        str | None,
        SimOption(
            "media of simulated requests: image=0.3x1..4:1024x768/200, video=0.1:640x360:8s, audio=0.2:12s, "
            "recorded; may be repeated",
            metavar="SPEC",
            separator=";",
            of_load=True,
        ),
    ] = None
    mm_encoder_tp_mode: Annotated[
        str,
        SimOption(
            "encoder on the tp GPUs: weights (split over them), or data (a copy on each; the copies run in parallel)"
        ),
    ] = "weights"
    encoder_gpus: Annotated[
        int, SimOption("GPUs for the encoder alone; 0: it shares the engine's GPUs", commands=SIMULATE)
    ] = 0
    adapters: Annotated[
        str | None,
        SimOption(
            "LoRA adapters: 40, 0.8x40:zipf:1.2 (for 0.8 of the sessions), or tenants (one for each)",
            metavar="SPEC",
            of_load=True,
        ),
    ] = None
    max_lora_rank: Annotated[int, SimOption("largest adapter rank that fits in one of the --max-loras slots")] = 16
    lora_targets: Annotated[str, SimOption("matrices that a slot has room for: all, or q_proj,v_proj")] = "all"
    samples: Annotated[
        str | None,
        SimOption(
            "answers per request (n, best_of): 4, or 0.3x2..8 (2 to 8 for 0.3 of the requests)",
            metavar="SPEC",
            of_load=True,
        ),
    ] = None
    server_sessions: Annotated[
        bool, SimOption("the server keeps sessions; turns send only their new tokens", of_load=True)
    ] = False
    rank_schedulers: Annotated[
        bool, SimOption("each shard of --attention-dp has its own scheduler: a rank", configures=True)
    ] = False
    max_new_tokens: Annotated[
        int | None, SimOption("output tokens per request, at most; shorter answers end with an end token", stored=True)
    ] = None
    grammar_compile_us: Annotated[int, SimOption("time to compile one grammar", commands=SIMULATE)] = 50_000
    receive_interval: Annotated[
        int, SimOption("decodes between two reads of the socket, at most; 1: read at every decode", commands=SIMULATE)
    ] = 1
    pue: Annotated[
        float, SimOption("energy of the facility by that of its machines, for kWh and g CO2 per million tokens")
    ] = PUE
    grid_gco2_per_kwh: Annotated[float, SimOption("grams of CO2 per kWh of the grid, for the same")] = GRID_GCO2_PER_KWH
    skip_bad_rows: Annotated[
        bool, SimOption("leave out invalid rows instead of failing", stored=True, of_load=True, sent=True)
    ] = False
    columns: Annotated[
        str | None,
        SimOption(
            "columns of a request log: arrival=ts,input=prompt_tokens,output=128; docs/workloads.md",
            metavar="ROLE=COLUMN,...",
            of_load=True,
            sent=True,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        SimOption("folder of a tokenizer that counts the texts of a log", metavar="DIR", of_load=True, sent=True),
    ] = None
    chars_per_token: Annotated[
        float | None,
        SimOption("characters per token of the texts of a log, instead of a tokenizer", of_load=True, sent=True),
    ] = None
    settings: Annotated[Mapping[str, Any], SimOption("given fields of SchedConfig", stored=True)] = field(
        default_factory=dict
    )
    tiers: Annotated[Mapping[str, Any], SimOption("given fields of HostTiers and HybridShares")] = field(
        default_factory=dict
    )
    slos: Annotated[
        tuple[Slo, ...],
        SimOption(
            "bound on a metric, such as ttft_p99=500ms; may be repeated",
            flag="--slo",
            metavar="METRIC=TIME",
            stored=True,
            sent=True,
        ),
    ] = ()

    @property
    def parallelism(self) -> Parallelism:
        """The layout of an engine over GPUs by its options alone; of an engine that may draft, see `layout_of`.

        Raises: CapacityError for an impossible layout.
        """
        from lockstep.sim.cost.errors import CapacityError
        from lockstep.sim.cost.parallel import BESIDES_TP, Parallelism

        if self.pp == 1 and self.pp_layer_partition is not None:
            raise CapacityError(
                f"`pp_layer_partition` is for several stages, got `{self.pp_layer_partition}` with pp 1\n"
                "hint: --pp 2 or more, or leave out --pp-layer-partition"
            )
        return Parallelism(**{name: getattr(self, name) for name in ("tp", *BESIDES_TP)})

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of an engine."""
        return self.tp * self.pp

    def command(self) -> str:
        """Return the command line that repeats this simulation."""
        return shlex.join(["lockstep", "simulate", *changed_words(self, always=("seed",))])


def sim_options(command: str = "", *, struct: type = Scenario) -> tuple[OptionField, ...]:
    """Return the options of the simulator, in order. With `command`, only those that the command takes."""
    return tuple(field for field in options_of(struct).values() if not command or field.takes(command))


def names_where(trait: str, *, struct: type = Scenario) -> tuple[str, ...]:
    """Return the names of the options for which this field of SimOption is set: searched, configures, stored."""
    return tuple(field.name for field in options_of(struct).values() if getattr(field.option, trait, False))
