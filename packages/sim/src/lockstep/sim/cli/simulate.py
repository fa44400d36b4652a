"""`lockstep simulate`: argument parsing only. What is done with the arguments is in simulate.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec

from lockstep.sim.cli.progress import terminal_bar

if TYPE_CHECKING:
    from rich.progress import Progress

    from lockstep.sim.cluster.result import ClusterRun
    from lockstep.sim.run.setup import Setup
    from lockstep.sim.run.simulate import Run

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # which older releases of click do not subscript

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

PROGRESS_EVERY = 64  # requests

# ------------------------------------------------------------------------------------------------------ kinds of values


class Refusal(click.ClickException):
    """Something asked for that cannot be. The message explains itself: no traceback, its type's name in front."""

    exit_code = EXIT_USAGE

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.name = type(error).__name__

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"{self.name}: {self.message}", file=file or sys.stderr)


class Failure(Refusal):
    """Something that could have been, such as a file on a disk that was not full."""

    exit_code = EXIT_FAILED


class _None:
    """What the word `none` on a command line is, where None means that the option was not given."""


NONE = _None()


class _Or(ParamType):
    """A value, or a word that stands for one."""

    def __init__(self, kind: ParamType, **words: Any) -> None:
        self.kind = kind
        self.words = words
        self.name = "|".join([kind.name, *words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.lower() in self.words:
            return self.words[value.lower()]
        return self.kind.convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name.upper()


class DurationType(ParamType):
    """A time with its unit, in whole microseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from lockstep.sim.workload.lengths import parse_duration_us

        try:
            return parse_duration_us(str(value))
        except ValueError as error:
            self.fail(f"{error}, got `{value}`", param, ctx)


# One row per field of SchedConfig, in its order: (field, type of the value, help). SchedConfig checks and has defaults.
SCHEDULER_OPTIONS: tuple[tuple[str, ParamType, str], ...] = (
    ("page_size", click.INT, "tokens per KV page, a power of two"),
    ("pages", click.INT, "KV pages in the pool  [default: what fits beside the weights]"),
    ("radix_cache", click.BOOL, "keep the KV of finished prompts for later requests with the same prefix"),
    ("same_step_sharing", click.BOOL, "share a prompt's KV with whoever is launched behind it, before it is computed"),
    ("waiting_prefix_refresh", click.INT, "count cached prefixes of the line as used every so many launches; 0: never"),
    ("radix_capacity_pages", _Or(click.INT, none=NONE), "cap on pages the radix cache may keep"),
    ("context_tokens_max", click.INT, "prompt and output together, per request  [default: the model's context]"),
    ("max_running_requests", click.INT, "requests that hold a row and are not finished"),
    ("request_rows", _Or(click.INT, none=NONE), "rows of the request table"),
    ("max_queued_requests", _Or(click.INT, none=NONE), "waiting requests beyond this are rejected"),
    ("waiting_timeout_us", _Or(DurationType(), none=NONE), "a request not admitted by then is rejected, e.g. 30s"),
    ("running_timeout_us", _Or(DurationType(), none=NONE), "a request not finished by then is ended, e.g. 10min"),
    (
        "schedule_policy",
        click.STRING,
        "order of the waiting line: fcfs, lpm, ...: docs/scheduling.md, docs/policies.md",
    ),
    ("schedule_conservativeness", click.FLOAT, "scales the output that running requests are expected to want"),
    ("chunk_target_us", _Or(DurationType(), none=NONE), "shorten chunks so that a pass stays under this, e.g. 20ms"),
    ("max_prefill_tokens", click.INT, "new tokens one extend may take in all"),
    ("chunked_prefill_size", _Or(click.INT, none=NONE), "new tokens of one extend before a prompt is split"),
    ("chunk_unit", click.STRING, "what these two count in, and where a prompt may be split: page or token"),
    ("retracted_requeue", click.STRING, "where a retracted request waits: tail or front"),
    ("retracted_kv", click.STRING, "KV of who is retracted for pages: free, or cache (left to the radix cache)"),
    ("batching", click.STRING, "prefill_first, mixed (decodes join an extend), or running_first (vLLM's one budget)"),
    ("reserve", click.STRING, "room left for running requests: ratio, on_demand or full"),
    ("retraction_policy", click.STRING, "who gives pages back: length (fewest outputs) or newest"),
    ("prefill_max_requests", _Or(click.INT, none=NONE), "requests that one extend may take in"),
    ("truncation_align_size", _Or(click.INT, none=NONE), "prompts are split at multiples of so many tokens"),
    ("decode_look_ahead", click.INT, "tokens of every running request that must fit before a decode"),
    ("prefill_decode_interval", click.INT, "decodes between two extends while anybody decodes, at least"),
    ("retract_every", click.INT, "force one retraction every so many decodes, for testing; 0 is never"),
    ("overlap_depth", click.INT, "batches launched beyond the one running: 0, 1 or 2"),
    ("decode_steps_per_launch", click.INT, "decodes in one launch: multi-step scheduling"),
    ("overlap_consecutive_prefills", click.BOOL, "launch an extend behind an extend in flight"),
    ("stream_interval", click.INT, "tokens between two messages of a streaming request"),
    ("force_stream_interval", click.INT, "the same for a request that does not stream"),
    ("eos_token_ids", click.INT, "the model's end tokens; give the option once for each"),
    ("schedule_policy_version", click.STRING, "version that a policy of an installed package must have"),
    ("schedule_seed", click.INT, "shuffles the line under policy random"),
    ("schedule_low_priority_values_first", click.BOOL, "under policy priority, 0 goes before 1"),
    ("default_priority_value", _Or(click.INT, none=NONE), "priority of requests that come without"),
    ("prefix_deduplication", click.STRING, "requests whose prefix another one computes: off, last or defer"),
    ("bypass_limit", _Or(click.INT, none=NONE), "requests from behind that may go before one that waits"),
    ("session_kv", click.STRING, "KV of sessions between turns: hold (until pages lack) or evictable"),
    ("max_sessions", click.INT, "sessions open at once"),
    (
        "grammar_timeout_us",
        _Or(DurationType(), none=NONE),
        "a request whose grammar is not compiled by then is rejected",
    ),
    ("max_input_tokens", _Or(click.INT, none=NONE), "the longest prompt, in tokens"),
    ("truncate_input", click.STRING, "which end a longer prompt loses: left, right, or no (it is rejected)"),
    ("isolate_tenants", click.BOOL, "no tenant ever hits a prefix of another one"),
    ("encoder_cache_tokens", _Or(click.INT, none=NONE), "encoder output of media kept at once, in tokens"),
    ("enable_priority_preemption", click.BOOL, "less important requests make room for more important ones"),
    ("priority_preemption_threshold", click.INT, "and are less important by more than this"),
    ("speculative_method", click.STRING, "who drafts: ngram, draft_model, eagle, mtp or none  [default: none]"),
    ("num_speculative_tokens", click.INT, "drafts of a request in one launch, at most  [default: 3]"),
    ("speculative_min_chance", click.FLOAT, "drafts less likely to count are left out  [default: none is]"),
    ("speculative_max_batch_size", click.INT, "no drafts while more requests decode  [default: no limit]"),
    (
        "jump_forward_tokens",
        click.INT,
        "tokens that a grammar forces, computed in one launch, at most  [default: none]",
    ),
    ("max_loras", _Or(click.INT, none=NONE), "adapters that run together, the base model as one; 0 is no LoRA"),
    ("role", click.STRING, "prefill or decode, of engines in a cluster; or mixed  [default: mixed]"),
    ("transfer_allocation", click.STRING, "decode engines give pages early or prefill_complete  [default: early]"),
    ("transfer_failure", click.STRING, "a request whose KV does not come: fail or recompute  [default: fail]"),
    ("num_reserved_decode_tokens", click.INT, "left to each request that decodes when pages are given  [default: 512]"),
    ("transfer_slots", _Or(click.INT, none=NONE), "metadata slots  [default: twice max-running-requests]"),
    ("bootstrap_timeout_us", _Or(DurationType(), none=NONE), "without a word of the other half  [default: 300s]"),
    ("transfer_timeout_us", _Or(DurationType(), none=NONE), "until a transfer has ended  [default: 300s]"),
    ("prefill_delayer", click.BOOL, "of ranks: prompts wait until every rank has some  [default: no]"),
    ("prefill_delayer_max_delay_passes", click.INT, "but for so many passes at most  [default: 30]"),
    ("prefill_delayer_max_delay_us", DurationType(), "and for so long  [default: 5s]"),
    (
        "prefill_delayer_token_usage_low_watermark",
        _Or(click.FLOAT, none=NONE),
        "and not while a rank that has some uses less of its KV than this share  [default: none]",
    ),
    ("prefill_delayer_slots", click.BOOL, "also until as many may start at once as did lately  [default: no]"),
    ("prefill_delayer_queue_min_ratio", click.FLOAT, "also until this share of those that run waits  [default: none]"),
    ("prefill_full_skip_passes", click.INT, "so many passes while some ranks are full, others not  [default: 0]"),
    ("encoder_budget_tokens", click.INT, "encoder tokens of media in the making at once  [default: no limit]"),
    ("pp_size", click.INT, "as --pp: a running batch per stage (microbatches)  [default: one running batch]"),
    ("pp_async_batch_depth", click.INT, "and so many more, whose results are on their way  [default: 0]"),
    ("pp_max_micro_batch_size", click.INT, "requests in each  [default: max-running-requests shared out over stages]"),
    ("pp_dynamic_chunking", click.BOOL, "chunks of a prompt that take as long as its first  [default: no]"),
)


def scheduler_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option per scheduler setting. Those not on the command line arrive as None or ()."""
    from lockstep.core.contract.config import SchedConfig

    defaults = {field.name: field.default for field in msgspec.structs.fields(SchedConfig)}
    for field, kind, text in reversed(SCHEDULER_OPTIONS):
        if defaults[field] not in (None, ()) and "default" not in text:
            text += f"  [default: {str(defaults[field]).lower()}]"
        flag = "--" + field.removesuffix("_us").replace("_", "-")
        if kind is click.BOOL:
            option = click.option(f"{flag}/--no-{flag[2:]}", field, default=None, help=text)
        elif field == "eos_token_ids":
            option = click.option(flag.removesuffix("s"), field, type=kind, multiple=True, help=text)
        else:
            option = click.option(flag, field, type=kind, default=None, help=text)
        command = option(command)
    return command


def given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Take the scheduler settings out of a command's options, leaving out what was not given."""
    values = {field: options.pop(field) for field, _, _ in SCHEDULER_OPTIONS}
    return {
        field: None if value is NONE else value for field, value in values.items() if value is not None and value != ()
    }


# One row per setting of a router's policy: (field of RouterConfig, policy, type of the value, help).
ROUTER_OPTIONS: tuple[tuple[str, str, ParamType, str], ...] = (
    ("load_bound", "prefix_affinity", click.FLOAT, "an engine's load over the mean, at most"),
    ("load_floor", "prefix_affinity", click.INT, "open requests up to which no engine counts as loaded"),
    ("block_tokens", "prefix_affinity", click.INT, "prompts are compared in blocks of so many tokens"),
    ("sessions_max", "session_sticky", click.INT, "sessions remembered"),
)


def check_router_options(given: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Raise ConfigError if a setting was given that none of the policies looks at."""
    from lockstep.core.contract.errors import ConfigError

    for name, policy, _, _ in ROUTER_OPTIONS:
        if name in given and policy not in policies:
            raise ConfigError(
                f"`router_{name}` is a setting of {policy}, got `{given[name]}` under {' and '.join(policies)}\n"
                f"hint: --router {policy}, or leave out --router-{name.replace('_', '-')}"
            )


def router_given(options: dict[str, Any], *, engines: bool) -> dict[str, Any]:
    """Take the settings of the router out of a command's options, leaving out what was not given."""
    names = {"router": "policy", "router_hop_us": "hop_us"} | {f"router_{name}": name for name, *_ in ROUTER_OPTIONS}
    if engines:
        names |= {"router_report_interval_us": "report_interval_us", "router_report_delay_us": "report_delay_us"}
        names |= {"autoscale": "scaling", "admission": "admission"}
    given = {short: options.pop(name) for name, short in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def cluster_options(*, engines: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of a cluster; of its router only, unless `engines`."""
    return lambda command: _with_cluster_options(command, engines=engines)


def _with_cluster_options(command: Callable[..., Any], *, engines: bool) -> Callable[..., Any]:
    """Those of the router arrive together, as given, in `router`."""
    from lockstep.core.cluster.router import ROUTER_POLICIES, RouterConfig

    defaults = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}

    @functools.wraps(command)
    def collecting(*args: Any, **options: Any) -> Any:
        return command(*args, router=router_given(options, engines=engines), **options)

    options = []
    if engines:
        options += [
            click.option("--replicas", type=click.INT, help="engines behind a router  [default: one, and no router]"),
            click.option(
                "--engines", metavar="SPEC", help="engines of several kinds: 4xh100:tp=2,2xh200; docs/routing.md"
            ),
            click.option("--prefill-engines", type=click.INT, help="engines that compute prompts: docs/distributed.md"),
            click.option("--decode-engines", type=click.INT, help="engines that go on from there"),
            click.option("--link-bandwidth", "link_gbs", type=click.FLOAT, help="GB/s per GPU, each way  [default 40]"),
            click.option(
                "--link-latency", "link_latency_us", type=DurationType(), help="from host to host  [default: 15us]"
            ),
        ]
    options += [
        click.option("--router", help=f"{', '.join(ROUTER_POLICIES)}  [default: {defaults['policy']}]"),
        click.option(
            "--router-hop", "router_hop_us", type=DurationType(), help="router to engine, and back  [default: 0]"
        ),
    ]
    if engines:
        options += [
            click.option(
                "--router-report-interval", "router_report_interval_us", type=DurationType(),
                help="under total_requests and total_tokens: between two reports of an engine  [default: none]",
            ),
            click.option(
                "--router-report-delay", "router_report_delay_us", type=DurationType(),
                help="how old a report is when it comes  [default: 0]",
            ),
            click.option(
                "--autoscale", metavar="SPEC", help="replicas come and go: open_requests=24,minimum=2; docs/routing.md"
            ),
            click.option(
                "--admission", metavar="SPEC", help="requests wait at the router: open=64,share.a=2; docs/routing.md"
            ),
        ]  # fmt: skip
    for name, policy, kind, text in ROUTER_OPTIONS:
        flag, text = "--router-" + name.replace("_", "-"), f"under {policy}: {text}  [default: {defaults[name]}]"
        options.append(click.option(flag, f"router_{name}", type=kind, help=text))
    decorated: Callable[..., Any] = collecting
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def parallel_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of an engine's layout besides `--tp`: docs/cost-models.md, section 9."""
    for option in reversed(
        (
            click.option("--ep", default=1, help="groups of the tp GPUs that share out the experts; divides tp"),
            click.option(
                "--attention-dp", default=1, help="shards of the tp GPUs, each with rows of its own; divides tp"
            ),
            click.option("--pp", default=1, help="stages of tp GPUs that share out the layers (pipeline parallelism)"),
            click.option(
                "--rank-schedulers", is_flag=True, help="each shard of --attention-dp schedules on its own: a rank"
            ),
            click.option(
                "--moe-a2a", is_flag=True, help="rows go to their experts by all-to-all (DeepEP); needs ep = tp"
            ),
            click.option("--expert-cv", default=0.0, help="how unequally popular experts are: deviation over mean"),
            click.option("--eplb", is_flag=True, help="place experts by their load; needs ep and --expert-cv"),
            click.option("--redundant-experts", default=0, help="with --eplb: slots for further copies, of all ranks"),
            click.option("--eplb-interval", default=1000, help="with --eplb: passes between two rebalancings"),
            click.option("--expert-drift", default=0.0, help="with --eplb: share of experts that change meanwhile"),
        )
    ):
        command = option(command)
    return command


def drafting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of drafts besides the scheduler's: docs/cost-models.md, section 10."""
    for option in reversed(
        (
            click.option(
                "--acceptance", metavar="RATES", help="chance that draft 1,2,... is right  [default: by the method]"
            ),
            click.option("--acceptance-spread", default=0.0, help="deviation of its log-odds between requests"),
            click.option("--draft-model", help="what drafts under --speculative-method draft_model: qwen3-0.6b"),
            click.option(
                "--grammar-forces",
                metavar="CHANCExTOKENS",
                help="with --jump-forward-tokens: how often a grammar leaves no choice, for so many  [default: 0.12x2]",
            ),
        )
    ):
        command = option(command)
    return command


def media_options(*, gpus: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of media, with `gpus` that of GPUs of their own. `--media` arrives as one text."""
    options = (
        click.option(
            "--media",
            multiple=True,
            callback=lambda context, option, given: ";".join(given) or None,
            metavar="SPEC",
            help="media of requests, simulated only: image=0.3x1..4:1024x768/200, video=0.1:640x360:8s, "
            "audio=0.2:12s, recorded; may be repeated",
        ),
        click.option(
            "--mm-encoder-tp-mode",
            default="weights",
            help="the encoder on the tp GPUs: weights (split), or data (whole on each, which encode side by side)",
        ),
        click.option("--encoder-gpus", default=0, help="GPUs of the encoder alone; 0: it is on the engine's"),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options if gpus else options[:-1]):
            command = option(command)
        return command

    return decorate


def adapter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of LoRA adapters."""
    for option in reversed(
        (
            click.option(
                "--adapters",
                metavar="SPEC",
                help="LoRA adapters of requests: 40 different ones, 0.8x40:zipf:1.2 of 0.8 of the sessions, or tenants",
            ),
            click.option("--max-lora-rank", default=16, help="rank that each of the --max-loras slots has room for"),
            click.option("--lora-targets", default="all", help="matrices that it has room for: all, or q_proj,v_proj"),
        )
    ):
        command = option(command)
    return command


samples_option = click.option(
    "--samples", metavar="SPEC", help="answers that requests ask for (n, best_of): 4, or 0.3x2..8 of 0.3 of them"
)


server_sessions_option = click.option(
    "--server-sessions", is_flag=True, help="turns are of sessions that the server keeps: they bring what is new only"
)


# One row per setting of what lies beside and below the pages: (field of HostTiers or HybridShares, type, help).
TIER_OPTIONS: tuple[tuple[str, ParamType, str], ...] = (
    ("host_cache_gb", click.FLOAT, "host memory for an engine's KV, in gigabytes; 0: none"),
    ("host_link_gbs", click.FLOAT, "GB/s between a GPU and the host, each way: 450 is NVLink-C2C  [default: PCIe]"),
    ("host_write_policy", click.STRING, "when KV goes there: write_through, write_through_selective or write_back"),
    ("load_tokens_min", click.INT, "fewer tokens that only the host has are computed rather than loaded"),
    ("storage_gb", click.FLOAT, "storage below the host, in gigabytes; 0: none"),
    ("storage_gbs", click.FLOAT, "GB/s of storage, each way, for all GPUs of an engine"),
    ("storage_latency_us", DurationType(), "until the first byte from storage comes"),
    ("prefetch_policy", click.STRING, "how long a request waits for storage: timeout, wait_complete or best_effort"),
    ("prefetch_tokens_min", click.INT, "fewer tokens are not asked of storage"),
    ("hybrid_memory", click.STRING, "on: sliding windows and states of linear attention have pools of their own"),
    ("swa_full_tokens_ratio", click.FLOAT, "with it: positions of the sliding layers' pool, of those of the full one"),
    ("mamba_full_memory_ratio", click.FLOAT, "with it: bytes of states, as a multiple of those of KV"),
    ("mamba_track_interval", click.INT, "with it: tokens between checkpoints of a state"),
)


def tier_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of what lies beside and below the pages. Those given arrive together, in `tiers`.

    So they are in the context as well, for who reads a command line again without running it.
    """
    from lockstep.sim.host.tier_options import HostTiers, HybridShares

    defaults = {
        field.name: field.default for kind in (HostTiers, HybridShares) for field in msgspec.structs.fields(kind)
    }

    def collect(context: click.Context, option: click.Parameter, value: Any) -> None:
        given = {**context.params.get("tiers", {}), **({} if value is None else {option.name: value})}
        context.params["tiers"] = {name: given[name] for name, _, _ in TIER_OPTIONS if name in given}

    for name, kind, text in reversed(TIER_OPTIONS):
        default = f"{defaults[name]}us" if name.endswith("_us") else defaults[name]
        text = text if "default" in text else f"{text}  [default: {default}]"
        flag = "--" + name.removesuffix("_us").replace("_", "-")
        command = click.option(flag, name, type=kind, help=text, expose_value=False, callback=collect)(command)
    return command


# ------------------------------------------------------------------------------------------------------------ simulate


@click.command(context_settings={"show_default": True, "max_content_width": 120})
@click.option("--model", required=True, help="catalogue name, such as qwen3-8b, or the path of a config.json")
@click.option("--gpu", help="catalogue name, such as h200, or the path of a JSON file")
@click.option(
    "--workload",
    "workloads",
    required=True,
    multiple=True,
    metavar="PATH|gen:...",
    help="a trace, a fitted model, or a generator: docs/workloads.md; several, as [TENANT=]WORKLOAD[@RATE], are mixed",
)
@click.option("--tp", default=1, help="GPUs that share one copy of the model (tensor parallelism)")
@parallel_options
@cluster_options(engines=True)
@click.option("--rate", type=click.FLOAT, help="requests per second: stretches a trace  [default: as recorded]")
@click.option("--rate-scale", default=1.0, help="multiplies the rate: 2 halves every gap")
@click.option("--time-window", metavar="FROM..TO", help="keep what arrives then, in recorded time: 600..1200, 10m..1h")
@click.option(
    "--concurrency", type=click.INT, help="a closed loop: so many sessions at a time, whatever the clock says"
)
@click.option("--limit", type=click.INT, help="keep the first so many requests")
@click.option("--warm-up", default=0, help="the first so many requests are simulated and not measured")
@click.option("--skip-bad-rows", is_flag=True, help="leave out rows that cannot be right; otherwise they are refused")
@click.option("--seed", default=7, help="of a generated workload, and of random durations")
@click.option("--max-new-tokens", type=click.INT, help="limit of every request; shorter answers end with an end token")
@click.option(
    "--grammar-compile", "grammar_compile_us", type=DurationType(), default="50ms", help="time for one grammar"
)
@click.option("--receive-interval", default=1, help="decodes between two looks at the socket, at most; 1: always look")
@click.option("--mem-fraction", default=0.9, help="of GPU memory, for weights, activations and KV")
@click.option("--weights-dtype", help="bf16, fp8, ...  [default: the checkpoint's own]")
@click.option("--kv-dtype", default="bf16", help="bf16 or fp8")
@click.option("--fp8-activations", default="auto", help="whether fp8 weights meet rows in fp8: auto, on, off")
@click.option("--operators", metavar="DIR", help="measured operator tables of this GPU: docs/cost-models.md, section 3")
@click.option("--calibration", metavar="NAME|FILE", help="vllm-h100, ..., or a file of `lockstep calibrate`")
@click.option("--intervals/--no-intervals", default=True, help="say how sure the answers are, by two more simulations")
@click.option("--profile", default="lockstep", help="policy of another engine: sglang or vllm; options override it")
@drafting_options
@media_options(gpus=True)
@adapter_options
@samples_option
@server_sessions_option
@tier_options
@scheduler_options
@click.option("--slo", "slos", multiple=True, metavar="METRIC=TIME", help="such as ttft_p99=500ms; may be repeated")
@click.option("--check", default="off", metavar="every|N|off", help="check invariants after every N-th event")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="run folder  [default: nothing is written]")
@click.option("--overwrite", is_flag=True, help="replace the run in DIR")
@click.option("--requests/--no-requests", default=True, help="write requests.parquet and requests.csv")
@click.option("--trace/--no-trace", default=True, help="write trace.json.gz, for ui.perfetto.dev")
@click.option("--report/--no-report", default=True, help="write report.html")
@click.option("--json", "as_json", is_flag=True, help="print metrics.json instead of tables")
def simulate(
    check: str,
    intervals: bool,
    out: Path | None,
    overwrite: bool,
    requests: bool,
    trace: bool,
    report: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate a workload on a model and a GPU, and say how it went.

    \b
    lockstep simulate --model qwen3-8b --gpu h200 --workload gen:n=500,rate=4 --out runs/0192
    lockstep simulate --model llama-3.1-8b --gpu h100 --workload azure-code.csv --rate 6.5 --slo ttft_p99=500ms
    lockstep simulate --model qwen3-32b --engines 4xh100:tp=2,2xh200 --router prefix_affinity --workload conv.jsonl.gz
    """
    check_every = _parse_check(check)
    cut_short = False
    with refusals():
        from lockstep.sim.cluster.intervals import intervals_of
        from lockstep.sim.run.assemble import assemble
        from lockstep.sim.run.options import asked_of
        from lockstep.sim.run.run_folder import prepare_folder, write_run
        from lockstep.sim.run.simulate import simulate
        from lockstep.sim.scenario.scenario import Scenario

        scenario = asked_of(options)
        if not isinstance(scenario, Scenario):
            from lockstep.sim.cli.cluster import run_cluster

            done, cut_short = run_cluster(
                scenario,
                out=out,
                overwrite=overwrite,
                check_every=check_every,
                intervals=intervals,
                write={"requests": requests, "trace": trace, "report": report},
                as_json=as_json,
            )
            if done.interrupted or cut_short:
                sys.exit(EXIT_INTERRUPTED)
            return
        if out is not None:
            prepare_folder(out, overwrite=overwrite)
        setup = assemble(scenario)
        announce(setup, out)
        with progress_bar(scenario.limit or len(setup.workload.turns)) as on_finish:
            run = simulate(setup, folder=out, check_every=check_every, on_finish=on_finish)
        if intervals and not run.interrupted:
            run = replace(run, intervals=intervals_of(run))
            cut_short = run.intervals is None
        if out is not None:
            write_run(out, run, requests=requests, trace=trace, report=report)
    show(run, out, as_json)
    if cut_short:
        say_no_intervals()
    if run.interrupted or cut_short:
        sys.exit(EXIT_INTERRUPTED)


def say_no_intervals() -> None:
    """After a Ctrl-C behind the run itself."""
    click.echo("interrupted while the intervals were worked out: the run is whole, its answers carry none", err=True)


def _parse_check(text: str) -> int:
    if text in ("off", "every"):
        return int(text == "every")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise click.BadParameter(f"expected every, off or a number of events, got `{text}`", param_hint="--check")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors that are made for people into one message and an exit status."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has seen enough: click ends in silence
        raise
    except Exception as error:
        from lockstep.core.contract.errors import ConfigError, PolicyError
        from lockstep.core.journal.records import JournalError
        from lockstep.sim.cost import CalibrationError, CapacityError, CatalogueError
        from lockstep.sim.workload.workload import WorkloadError

        if isinstance(error, ConfigError | CatalogueError | CapacityError | CalibrationError | WorkloadError):
            raise Refusal(error) from error
        if isinstance(error, JournalError | OSError | PolicyError):
            raise Failure(error) from error
        if isinstance(error, MemoryError):
            raise Failure(MemoryError(f"{error}\nhint: lower --limit, --pages or --request-rows")) from error
        raise


def announce(setup: Setup, out: Path | None) -> None:
    """Say on stderr what is about to run: the first line names seed, commit and journal."""
    from lockstep.sim.results.code_version import code_commit, code_version
    from lockstep.sim.run.run_folder import workload_line

    code = f"lockstep {code_version()}" + (f" ({code_commit()})" if code_commit() else "")
    journal = out / "journal" if out is not None else "none, for lack of --out"
    click.echo(f"seed {setup.scenario.seed}, {code}, journal {journal}", err=True)
    for name in setup.overridden:
        click.echo(f"{name} is {getattr(setup.config, name)}, as the environment says", err=True)
    closed = setup.scenario.concurrency is not None
    pool = f"{setup.config.pages:,} KV pages of {setup.config.page_size}"
    click.echo(f"{setup.title}, {pool}; {workload_line(setup.workload, closed=closed)}", err=True)


@contextmanager
def progress_bar(requests: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr that is told how many requests ended; None, and no bar, if stderr is not a terminal."""
    with terminal_bar() as bar:
        yield None if bar is None else _advance(bar, requests)


def _advance(bar: Progress, requests: int) -> Callable[[int], None]:
    task = bar.add_task("requests finished", total=requests)

    def on_finish(ended: int) -> None:
        if ended % PROGRESS_EVERY == 0:
            bar.update(task, completed=ended)

    return on_finish


def show(run: Run | ClusterRun, out: Path | None, as_json: bool) -> None:
    """Print the result on stdout, and where it lies on stderr."""
    if as_json:
        import json

        click.echo(json.dumps(run.metrics(), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from rich.console import Console

        from lockstep.sim.results.results import intervals_table, summary_table

        Console().print(summary_table(run.data))
        if run.intervals is not None:
            Console().print(intervals_table(run.intervals))
        click.echo(f"calibration: {run.calibration.title}")
        for line in run.remarks():
            click.echo(line)
    counts = f"{run.data.summary['requests']['arrived']:,} requests, {run.batches:,} batches"
    click.echo(f"simulated {counts} in {run.cpu_s:.1f} s of CPU time", err=True)
    if out is not None:
        written = ", ".join(path.name for path in sorted(out.iterdir()))
        click.echo(f"{out} has {written}", err=True)
