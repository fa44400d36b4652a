"""Lockstep's scheduler inside vLLM: `vllm serve MODEL --scheduler-cls lockstep.vllm.Scheduler`.

vLLM calls the scheduler; the scheduler feeds an unchanged `lockstep.core.Engine` and translates in both directions:

    vLLM                              this package                         core
    add_request, finish_requests  ->  requests.py: arrivals            ->  RequestArrived, RequestCancelled
    schedule()                    ->  plans.py: BatchPlan to           <-  LaneReady -> LaunchBatch
                                      SchedulerOutput
    update_from_output()          ->  results.py: ModelRunnerOutput    ->  BatchFinished -> StreamTokens, FinishRequest
                                      to EngineCoreOutputs
    every event                   ->  recording.py: a thread               the journal

`adapters.py`, `media.py` and `groups.py` translate LoRA adapters, multimodal items, and models with several KV cache
groups. `tiers.py` and `host_tier.py` are both halves of host memory below the KV cache. `settings.py` derives the
core's settings from vLLM's, and refuses what is not supported, by name. `scheduler.py` holds the class itself.
`recorder.py` records vLLM's own scheduler and decides nothing. No module of this package decides what runs. Importing
this package does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.vllm.scheduler import Scheduler as Scheduler


def __getattr__(name: str) -> Any:
    if name == "Scheduler":
        from lockstep.vllm.scheduler import Scheduler

        return Scheduler
    if name == "Recorder":
        from lockstep.vllm.recorder import SchedulerRecorder

        return SchedulerRecorder
    raise AttributeError(f"lockstep.vllm has no `{name}`; it has Scheduler and Recorder")
