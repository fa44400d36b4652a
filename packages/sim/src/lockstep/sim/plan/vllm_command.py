"""The configuration of a plan as a command line of vLLM with Lockstep's scheduler (docs/vllm.md).

Sizes are vLLM's own options, and what remains of the scheduler's settings goes in `--additional-config`. The command is
printed if the calibration is one of vLLM: then the times of the plan are those of vLLM.

Replicas of a dense model are `--data-parallel-size`: independent engines of one vLLM, whose front end sends a request
to the engine with the fewest. The same option divides the experts of a model that has them over all engines, which then
step together, so replicas of such a model are separate servers. `lockstep.vllm` refuses vLLM's connectors between
prefill and decode engines.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.contract.two_batch_settings import THRESHOLDS
from lockstep.host.options import number_word
from lockstep.sim.cost.hardware import scale_up_gpus
from lockstep.sim.plan.question import shown
from lockstep.sim.plan.search import Candidate
from lockstep.sim.plan.trial import NO_SCALING
from lockstep.sim.run.engine import profile_of
from lockstep.sim.scenario.scenario import Scenario, names_where, sim_options

SCHEDULER = "lockstep.vllm.Scheduler"
MACHINE_GPUS = 8  # of the usual server; more are in several, even with one NVLink domain
BY_MACHINE = "--data-parallel-size-local and --data-parallel-address"  # options of vLLM for several machines
FEWEST_REQUESTS = "least_requests"  # the router's policy that is vLLM's
ENGINE = "vllm"  # `engine` of a calibration of vLLM

OF_VLLM = frozenset(
    "page_size pages context_tokens_max max_running_requests max_prefill_tokens overlap_depth radix_cache max_loras "
    "base_beside_loras tables_append_only speculative_method num_speculative_tokens".split()
)
"""Settings of the scheduler that follow from vLLM's own options."""

OF_HALVES = ("two_batch_overlap", *THRESHOLDS)
"""Settings of two-batch overlap: vLLM's own splits batches of engines with data-parallel experts only."""

WITHOUT_CACHE = ("same_step_sharing", "prefix_deduplication", "retracted_kv")
"""Settings that lockstep.vllm sets by itself without a prefix cache."""

CARRIED = ("tp", "weights_dtype", "kv_dtype", "ep", "profile")
"""Options of a configuration that the command has."""


class ServeCommand(NamedTuple):
    """A command line of a server, and the parts of the configuration that it does not support."""

    line: str
    lacks: list[str]


def vllm_command(candidate: Candidate) -> ServeCommand | None:
    """Return the command of all replicas, or of one if vLLM has no equivalent of several, and what it lacks.

    Returns: None if the plan's calibration is not one of vLLM.
    """
    setup = candidate.setup
    if setup is None or candidate.trial is None or setup.calibration.engine != ENGINE:
        return None
    base, config = candidate.trial.base, setup.config
    words = ["vllm", "serve", base.model if Path(base.model).exists() else "MODEL", *_sizes(base, config)]
    if base.tp > 1:
        words += ["--tensor-parallel-size", str(base.tp)]
    replicas, replicas_lack = _replicas(candidate)
    if replicas > 1:
        words += ["--data-parallel-size", str(replicas)]
    if base.ep > 1:
        words.append("--enable-expert-parallel")
    if base.weights_dtype == "fp8":
        words += ["--quantization", "fp8"]
    if base.kv_dtype == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if "pages" not in base.settings:
        words += ["--gpu-memory-utilization", shown(base.mem_fraction)]
    words += ["--scheduler-cls", SCHEDULER]
    own = _own_settings(base, config)
    if own:
        words += ["--additional-config", json.dumps({"lockstep": own})]
    return ServeCommand(shlex.join(words), [*replicas_lack, *_lacks(base)])


def _sizes(base: Scenario, config: SchedConfig) -> list[str]:
    """Return vLLM's options for the sizes of the scheduler, the prefix cache and the overlap."""
    words = [
        "--max-num-seqs", str(config.max_running_requests),
        "--max-num-batched-tokens", str(config.max_prefill_tokens),
        "--block-size", str(config.page_size),
        "--async-scheduling" if config.overlap_depth else "--no-async-scheduling",
    ]  # fmt: skip
    if "context_tokens_max" in base.settings:
        words += ["--max-model-len", str(config.context_tokens_max)]
    if "pages" in base.settings:
        words += ["--num-gpu-blocks-override", str(config.pages + 1)]  # one block is vLLM's null block
    if not config.radix_cache:
        words.append("--no-enable-prefix-caching")
    if config.chunked_prefill_size is None:
        words.append("--no-enable-chunked-prefill")
    if config.schedule_policy == "priority":
        words += ["--scheduling-policy", "priority"]
    if base.adapters is not None:
        words += ["--enable-lora", "--max-loras", str(config.max_loras), "--max-lora-rank", str(base.max_lora_rank)]
    method = base.settings.get("speculative_method", "none")
    if method != "none":
        drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": config.num_speculative_tokens}
        if base.draft_model is not None:
            drafts["model"] = base.draft_model
        words += ["--speculative-config", json.dumps(drafts)]
    return words


def _own_settings(base: Scenario, config: SchedConfig) -> dict[str, Any]:
    """Return the settings of lockstep.vllm: a profile other than vLLM's, and settings that are not vLLM's options."""
    profile = profile_of(base)
    found: dict[str, Any] = {} if profile == "vllm" else {"profile": profile}
    usual: Mapping[str, Any] = profile_settings(profile)
    left_out = OF_VLLM | frozenset(OF_HALVES) | (frozenset() if config.radix_cache else frozenset(WITHOUT_CACHE))
    scheduler = {
        name: value
        for name, value in base.settings.items()
        if name not in left_out and usual.get(name, getattr(SchedConfig(), name)) != value
    }
    if scheduler.get("schedule_policy") == "priority":
        del scheduler["schedule_policy"]
    scheduler.pop("chunked_prefill_size", None)
    if config.chunked_prefill_size is not None and config.chunked_prefill_size < config.max_prefill_tokens:
        scheduler["chunked_prefill_size"] = config.chunked_prefill_size
    if scheduler:
        found["scheduler"] = scheduler
    return found


def _replicas(candidate: Candidate) -> tuple[int, list[str]]:
    """Return the number of replicas that the command has, and what it lacks of those of the plan."""
    best, trial, setup = candidate.best, candidate.trial, candidate.setup
    if candidate.split is not None:
        return 1, ["separate prefill and decode engines"]
    if best is None or trial is None or setup is None or best.replicas == 1:
        return 1, []
    lacks = [] if trial.router.policy == FEWEST_REQUESTS else [f"router {trial.router.policy}"]
    if trial.autoscale != NO_SCALING:
        lacks.append(f"autoscale {trial.autoscale}")
    count = number_word(best.replicas)
    if setup.model.experts is not None:
        return 1, [f"{count} replicas of a model with experts (start this command once for each)", *lacks]
    gpus = best.replicas * trial.base.tp * trial.base.pp
    if gpus > min(scale_up_gpus(setup.gpu), MACHINE_GPUS):
        lacks.append(f"{gpus} GPUs on more than one machine (add {BY_MACHINE})")
    return best.replicas, lacks


def _lacks(base: Scenario) -> list[str]:
    """Return the parts of a replica's configuration that the command does not have, in words."""
    usual = {one.name: one.default for one in sim_options()}
    unlike = [name for name in names_where("configures") if getattr(base, name) != usual[name]]
    lacks = [f"{name} {shown(getattr(base, name))}" for name in unlike if name not in CARRIED]
    if base.tiers.get("host_cache_gb") or "hybrid_memory" in base.tiers:
        lacks += [f"{name} {shown(value)}" for name, value in base.tiers.items()]
    lacks += [f"{name} {shown(base.settings[name])}" for name in OF_HALVES if base.settings.get(name)]
    return lacks
