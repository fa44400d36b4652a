"""Settings: the core's `SchedConfig` from vLLM's configuration, and what of vLLM is refused.

Settings of Lockstep come from `--additional-config '{"lockstep": {...}}'`, or from the TOML file that the environment
variable LOCKSTEP_VLLM_CONFIG names:

    profile = "vllm"                    # a family of scheduling settings: docs/profiles.md
    journal = "/var/log/vllm/{start}"   # a new run folder for each start; absent: no journal
    mean_request_tokens = 3000          # prompt and output; divides KV blocks between layers of several kinds
    journal_tokens = false              # true: the journal holds token ids; false: pseudonyms that share prefixes alike

    [scheduler]                         # fields of SchedConfig, over the profile
    schedule_policy = "spf"

Sizes (pages, page size, context, requests at once, tokens per pass) are vLLM's and cannot be set here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.records import JournalError
from lockstep.vllm.checks import check_values
from lockstep.vllm.groups import divided, divided_by_states, kinds_of, page_tokens, state_groups, window_tokens
from lockstep.vllm.tiers import cache_tiers, uses_host_tier

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.v1.kv_cache_interface import KVCacheConfig

ENVIRONMENT = "LOCKSTEP_VLLM_CONFIG"
KEY = "lockstep"  # of --additional-config
START = "{start}"  # in the name of a run folder, the time of the start
ENGINES = "engines"  # in the run folder of several engines: one folder for each, as in the runs of `lockstep serve`
V2_DRAFTS = ("draft_model",)  # vLLM's methods of drafting that are tested with its model runner V2
DATA_PARALLEL_PROCESS = "EngineCore_DP"  # how the names of vLLM's processes of data-parallel engines begin

OF_VLLM = (
    "page_size",
    "pages",
    "context_tokens_max",
    "max_running_requests",
    "max_prefill_tokens",
    "overlap_depth",
    "radix_cache",
    "max_loras",
    "base_beside_loras",
    "speculative_method",
    "num_speculative_tokens",
    "tables_append_only",
    "tiers",
    "hybrid",
    "pp_size",
    "pp_async_batch_depth",
    "encoder_cache_tokens",
    "encoder_budget_tokens",
)
"""Fields of SchedConfig that follow from vLLM's configuration."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user of vLLM may set of Lockstep."""

    profile: str = "vllm"
    journal: str = ""  # run folder, see `run_folder`; empty: no journal
    journal_tokens: bool = False
    mean_request_tokens: int = 0  # prompt and output, for models with windows or states; 0: estimated
    scheduler: dict[str, Any] = {}  # fields of SchedConfig


def read_settings(additional: object, environment: dict[str, str] | os._Environ[str] = os.environ) -> VllmSettings:
    """Read the settings from `--additional-config`, or else from the file that the environment names.

    Raises: ConfigError for an unknown field, a value of the wrong type, or a file that cannot be read.
    """
    source, values = "", {}
    if isinstance(additional, dict) and KEY in additional:
        source, values = f"--additional-config `{KEY}`", additional[KEY]
    elif path := environment.get(ENVIRONMENT, ""):
        source = f"{ENVIRONMENT}={path}"
        try:
            values = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{source}: {error}") from error
    check_values(values, source, OF_VLLM)
    return msgspec.convert(values, VllmSettings)


def run_folder(settings: VllmSettings, vllm_config: VllmConfig) -> Path:
    """Return the run folder of this engine: `journal`, or `engines/I` in it for data-parallel engine I.

    `{start}` in it becomes the time of this start, such as 20261126T022027Z, so that each start has a new folder. For
    data-parallel engines that is the start of the process that has started all of them.
    """
    parallel = vllm_config.parallel_config
    shared = _is_data_parallel(parallel)
    parent = multiprocessing.parent_process() if shared else None
    start = time.gmtime(_started_s(parent.pid) if parent is not None and parent.pid is not None else None)
    folder = Path(settings.journal.replace(START, time.strftime("%Y%m%dT%H%M%SZ", start)))
    return folder / ENGINES / str(parallel.data_parallel_index) if shared else folder


def _is_data_parallel(parallel: ParallelConfig) -> bool:
    """Whether this is one of several data-parallel engines.

    In the engines of a dense model vLLM sets the sizes to 1. Of engine 0 there is only the name of its process left.
    """
    named = multiprocessing.current_process().name.startswith(DATA_PARALLEL_PROCESS)
    return named or parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0


def _started_s(pid: int) -> float:
    """Return when a process started, in seconds since 1970."""
    psutil: Any = importlib.import_module("psutil")  # required by vLLM, and without types
    return float(psutil.Process(pid).create_time())


def not_begun(error: JournalError, settings: VllmSettings) -> JournalError:
    """Return the error of a journal that cannot be begun with a hint that fits these settings."""
    problem = str(error).partition("\nhint:")[0]
    hint = "set `journal` to a folder in which vLLM may write"
    if "already" in problem or "exists" in problem:
        hint = "set another `journal`"
        if START not in settings.journal:
            hint += f", such as {settings.journal}-{START}, a new folder for each start"
    return JournalError(f"{problem}\nhint: {hint}")


def sched_config(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: VllmSettings,
    block_size: int,
    encoder: MultiModalBudget | None = None,
) -> SchedConfig:
    """Return the core's settings for this engine.

    Args:
        encoder: encoder tokens of one pass and in the encoder cache; None for a model without multimodal inputs.
    Raises: ConfigError for what is not supported, or for settings that contradict each other.
    """
    if refused := unsupported(vllm_config, kv_cache_config, block_size):
        raise ConfigError(
            "lockstep.vllm does not support: " + "; ".join(refused) + "\nhint: drop these, or --scheduler-cls"
        )
    scheduler = vllm_config.scheduler_config
    budget = token_budget(vllm_config)
    block_size = page_tokens(kv_cache_config, block_size)
    values: dict[str, Any] = profile_settings(settings.profile)
    values |= {
        "page_size": block_size,
        "pages": pages(vllm_config, kv_cache_config, block_size),
        "context_tokens_max": vllm_config.model_config.max_model_len,
        "max_running_requests": scheduler.max_num_active_seqs or scheduler.max_num_seqs,
        "max_prefill_tokens": budget,
        "chunked_prefill_size": budget if scheduler.enable_chunked_prefill else None,
        "overlap_depth": 1 if scheduler.async_scheduling else 0,
        "radix_cache": bool(vllm_config.cache_config.enable_prefix_caching and kv_cache_config.kv_cache_groups),
        "tables_append_only": True,
    }
    if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        values |= {"pp_size": stages}
    if not values["radix_cache"]:
        values |= {"same_step_sharing": False, "prefix_deduplication": "off", "retracted_kv": "free"}
    if scheduler.policy == "priority":  # vLLM: smaller values go first, the least important running request yields
        values |= {
            "schedule_policy": "priority",
            "schedule_low_priority_values_first": True,
            "retraction_policy": "priority",
            "default_priority_value": 0,
        }
    if vllm_config.lora_config is not None:
        values |= {"max_loras": vllm_config.lora_config.max_loras, "base_beside_loras": True}
    if vllm_config.speculative_config is not None:
        values |= {
            "speculative_method": draft_method(vllm_config),
            "num_speculative_tokens": vllm_config.num_speculative_tokens,
        }
    if window := window_tokens(kv_cache_config):
        number = len(kv_cache_config.kv_cache_groups) - 1
        ahead = values["overlap_depth"]
        context = values["context_tokens_max"]
        mean = settings.mean_request_tokens
        full, windows = divided(kv_cache_config.num_blocks - 1, number, window, block_size, context, ahead, mean)
        values |= {"pages": full, "hybrid": HybridMemory(window_tokens=window, window_pages=windows)}
    if number := state_groups(kv_cache_config):
        rows = values["max_running_requests"] * (values["overlap_depth"] + 1)
        context, mean = values["context_tokens_max"], settings.mean_request_tokens
        full, slots = divided_by_states(kv_cache_config.num_blocks - 1, number, block_size, context, rows, mean)
        if "full" not in kinds_of(kv_cache_config):
            full, slots = values["pages"], min((kv_cache_config.num_blocks - 1) // number, rows)
        checkpoint = max(256, block_size)  # not used: without a prefix cache there are no checkpoints
        values |= {"pages": full, "hybrid": HybridMemory(state_slots=slots, checkpoint_tokens=checkpoint)}
    if uses_host_tier(vllm_config):
        values |= {"tiers": cache_tiers(vllm_config, kv_cache_config)}
    if encoder is not None:
        values |= {
            "encoder_cache_tokens": encoder.encoder_cache_size,
            "encoder_budget_tokens": encoder.encoder_compute_budget,
        }
    if settings.mean_request_tokens and "hybrid" not in values:
        raise ConfigError(
            "`mean_request_tokens` divides KV blocks between layers of several kinds, and those of this model have one "
            "pool\nhint: remove it"
        )
    values |= settings.scheduler
    config = SchedConfig(**_known(values))
    _check_budget(config, budget)
    return config


def pages(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> int:
    """Return the KV pages of the core: all blocks but vLLM's null block, which is block 0.

    A model without attention over a KV cache has as many pages as its requests could fill: pages never limit it.
    """
    states = state_groups(kv_cache_config)
    if kv_cache_config.kv_cache_groups and states != len(kv_cache_config.kv_cache_groups):
        return kv_cache_config.num_blocks - 1
    rows = vllm_config.scheduler_config.max_num_seqs * (2 if vllm_config.scheduler_config.async_scheduling else 1)
    return rows * -(-vllm_config.model_config.max_model_len // block_size)


def token_budget(vllm_config: VllmConfig) -> int:
    """Return the most tokens of one pass that vLLM lets a scheduler plan.

    Raises: ConfigError if the slots that drafting takes of each request leave none.
    """
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    most: int = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    slots = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    budget = min(most, scheduler.max_num_batched_tokens - slots * scheduler.max_num_seqs)
    if budget < 1:
        raise ConfigError(
            f"a pass of {scheduler.max_num_batched_tokens} tokens (--max-num-batched-tokens) has no room beside the "
            f"{slots} draft slots of each of {scheduler.max_num_seqs} requests (--max-num-seqs)\n"
            "hint: raise the first or lower the second"
        )
    return budget


def draft_method(vllm_config: VllmConfig) -> str:
    """Return the core's word for the source of vLLM's drafts."""
    speculative = vllm_config.speculative_config
    if speculative.method in ("ngram", "suffix"):
        return "ngram"
    if speculative.method == "draft_model":
        return "draft_model"
    return "mtp" if speculative.method == "mtp" else "eagle"


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for names that are no fields of SchedConfig."""
    fields = SchedConfig.__struct_fields__
    for name in values:
        if name not in fields:
            raise ConfigError(f"`scheduler.{name}` is no scheduler setting; docs/options.md lists them")
    return values


def _check_budget(config: SchedConfig, budget: int) -> None:
    """Raises ConfigError if a pass could have more tokens than vLLM's worker has room for."""
    if config.batching == "running_first":
        return  # one budget for prompts and decodes: `max_prefill_tokens`
    rows = config.max_running_requests
    decodes = rows * (1 + config.drafts_max)
    if decodes + (config.batching == "mixed") > budget:  # mixed: and at least a token of a prompt
        raise ConfigError(
            f"`batching` {config.batching} decodes all {rows} running requests in one pass, with drafts {decodes} "
            f"tokens, but a pass of vLLM has at most {budget} tokens (--max-num-batched-tokens)\n"
            "hint: lower --max-num-seqs, or set scheduler.batching to running_first"
        )
    chunk = config.chunked_prefill_size or config.max_prefill_tokens
    if config.batching == "mixed" and chunk + decodes > budget:
        raise ConfigError(
            f"`batching` mixed computes up to {chunk} prompt tokens beside {decodes} tokens of decodes, but "
            f"a pass of vLLM has at most {budget} tokens (--max-num-batched-tokens)\n"
            f"hint: set scheduler.chunked_prefill_size to at most {budget - decodes}"
        )


def connector_name(vllm_config: VllmConfig) -> str:
    """Return the name of the KV connector; empty if there is none."""
    config = vllm_config.kv_transfer_config
    return "" if config is None else str(config.kv_connector)


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> list[str]:
    """Return what of this configuration the scheduler does not support, in words; empty if it supports all."""
    parallel, model, scheduler = vllm_config.parallel_config, vllm_config.model_config, vllm_config.scheduler_config
    groups, speculative = kv_cache_config.kv_cache_groups, vllm_config.speculative_config
    page_size = page_tokens(kv_cache_config, block_size)
    findings = {
        f"KV connector {connector_name(vllm_config)} (--kv-transfer-config; hint: HostTier of lockstep.vllm.host_tier, "
        "host memory by the decisions of Lockstep)": bool(
            vllm_config.kv_transfer_config is not None and not uses_host_tier(vllm_config)
        ),
        "HostTier beside anything but one KV cache group of full attention, without pipeline stages": bool(
            uses_host_tier(vllm_config)
            and (parallel.pipeline_parallel_size > 1 or len(groups) != 1 or kinds_of(kv_cache_config) != ["full"])
        ),
        "HostTier without prefix caching (--enable-prefix-caching)": bool(
            uses_host_tier(vllm_config) and not vllm_config.cache_config.enable_prefix_caching
        ),
        "an encoder cache manager of another package (--ec-manager-config)": bool(
            vllm_config.ec_manager_config.encoder_cache_manager_cls
        ),
        "encoder connectors (--ec-transfer-config)": vllm_config.ec_transfer_config is not None,
        "KV cache events (--kv-events-config)": bool(
            vllm_config.kv_events_config and vllm_config.kv_events_config.enable_kv_cache_events
        ),
        "asynchronous scheduling with pipeline parallelism (hint: --no-async-scheduling)": bool(
            parallel.pipeline_parallel_size > 1 and scheduler.async_scheduling
        ),
        "drafts with pipeline parallelism": parallel.pipeline_parallel_size > 1 and speculative is not None,
        "an interval between prefills (--prefill-schedule-interval)": scheduler.prefill_schedule_interval > 1,
        "a watermark of free KV blocks (--watermark)": bool(scheduler.watermark),
        "admission by the first chunk of a prompt (--no-scheduler-reserve-full-isl)": bool(
            not scheduler.scheduler_reserve_full_isl
        ),
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "encoder-decoder models": model.is_encoder_decoder,
        "multimodal items that are computed whole (--disable-chunked-mm-input)": bool(
            model.supports_multimodal_inputs and scheduler.disable_chunked_mm_input
        ),
        "engines that only encode multimodal items": vllm_config.is_mm_encoder_only,
        "diffusion models": model.is_diffusion,
        "MTP with several modules": speculative is not None and speculative.use_multi_module_mtp(),
        "a number of drafts by batch size (num_speculative_tokens_per_batch_size)": bool(
            speculative is not None and speculative.num_speculative_tokens_per_batch_size
        ),
        f"drafts of method {speculative.method if speculative is not None else ''} with model runner V2 "
        "(hint: VLLM_USE_V2_MODEL_RUNNER=0)": bool(
            speculative is not None and vllm_config.use_v2_model_runner and speculative.method not in V2_DRAFTS
        ),
        "drafts with model runner V2 and asynchronous scheduling (hint: --no-async-scheduling)": bool(
            speculative is not None and vllm_config.use_v2_model_runner and scheduler.async_scheduling
        ),
        "auxiliary outputs": vllm_config.aux_output_config.enabled,
        "metrics of the drafts of each request (--per-request-spec-decode-metrics)": bool(
            vllm_config.observability_config.per_request_spec_decode_metrics != "none"
        ),
        "metrics of the lives of KV blocks (--kv-cache-metrics)": bool(
            vllm_config.observability_config.kv_cache_metrics
        ),
        "metrics of FLOPs and memory traffic (--enable-mfu-metrics)": bool(
            vllm_config.observability_config.enable_mfu_metrics
        ),
        "sampling masks": bool(model.return_sampling_mask),
        f"{len(groups)} KV cache groups other than one of full attention and those of windows of one length "
        "(hint: --disable-hybrid-kv-cache-manager)": bool(
            len(groups) > 1 and not window_tokens(kv_cache_config) and not kv_cache_config.has_mamba_layers
        ),
        f"a KV cache of kind {type(groups[0].kv_cache_spec).__name__ if groups else ''}": bool(
            not kv_cache_config.has_mamba_layers and kinds_of(kv_cache_config) == ["other"]
        ),
        "prefix caching of recurrent state (Mamba, GDN; hint: --no-enable-prefix-caching)": bool(
            kv_cache_config.has_mamba_layers and vllm_config.cache_config.enable_prefix_caching
        ),
        "drafts of a model with recurrent state (Mamba, GDN)": bool(
            kv_cache_config.has_mamba_layers and speculative is not None
        ),
        "recurrent state (Mamba, GDN) beside layers other than those of one full attention": bool(
            kv_cache_config.has_mamba_layers
            and not vllm_config.cache_config.enable_prefix_caching
            and speculative is None
            and not state_groups(kv_cache_config)
        ),
        "drafts with KV cache groups of windows (hint: --disable-hybrid-kv-cache-manager)": bool(
            speculative is not None and window_tokens(kv_cache_config)
        ),
        "models without KV cache that generate text": not groups and model.runner_type != "pooling",
        f"a block size of {page_size} tokens, which is no power of two (hint: --block-size "
        f"{1 << page_size.bit_length()})": bool(page_size & (page_size - 1)),
        "a long-prefill threshold (--long-prefill-token-threshold)": scheduler.long_prefill_token_threshold > 0,
        "models that require zeroed KV blocks": bool(
            kv_cache_config.needs_kv_cache_zeroing and not kv_cache_config.has_mamba_layers
        ),
    }
    return [name for name, found in findings.items() if found]
