"""The winner of a plan with a calibration of vLLM, as a command line of vLLM."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from lockstep.core.cluster.router import RouterConfig
from lockstep.sim.catalogue import load_model
from lockstep.sim.plan.vllm_command import vllm_command
from tests.sim.test_plan import planned, question


def test_a_calibration_of_vllm_gives_the_command_of_vllm() -> None:
    """Sizes become options of vLLM; lockstep.vllm reads the other settings as they are printed."""
    settings = {
        "page_size": 32,
        "pages": 8000,
        "context_tokens_max": 4096,
        "max_running_requests": 16,
        "max_prefill_tokens": 512,
        "chunked_prefill_size": 256,
        "overlap_depth": 0,
        "schedule_policy": "spf",
    }
    common = {"profile": "vllm", "calibration": "vllm-h100", "kv_dtype": "fp8"}
    winner = planned(question(settings=settings, common=common, rate=1.0)).winner
    assert winner is not None
    command = vllm_command(winner)
    assert command is not None
    words = shlex.split(command.line)
    assert words[:3] == ["vllm", "serve", "MODEL"]  # the catalogue's name is not that of a checkpoint
    given = dict(pairwise(words))
    assert given["--max-num-seqs"] == "16"
    assert given["--max-num-batched-tokens"] == "512"
    assert given["--block-size"] == "32"
    assert given["--num-gpu-blocks-override"] == "8001"  # vLLM keeps one block for itself
    assert given["--max-model-len"] == "4096"
    assert given["--kv-cache-dtype"] == "fp8"
    assert given["--scheduler-cls"] == "lockstep.vllm.Scheduler"
    assert "--no-async-scheduling" in words
    assert command.lacks == []
    own = json.loads(given["--additional-config"])
    assert own == {"lockstep": {"scheduler": {"chunked_prefill_size": 256, "schedule_policy": "spf"}}}
    read_settings = pytest.importorskip("lockstep.vllm.settings", reason="lockstep.vllm is not installed").read_settings
    assert read_settings(own).scheduler == own["lockstep"]["scheduler"]


def test_a_calibration_of_another_engine_gives_no_command_of_vllm() -> None:
    winner = planned(question(common={"calibration": "sglang-h100"}, rate=1.0)).winner
    assert winner is not None
    assert vllm_command(winner) is None


def test_replicas_of_a_dense_model_are_data_parallel_engines_of_one_vllm() -> None:
    winner = planned(question(common={"calibration": "vllm-h100"}, rate=1.0)).winner
    assert winner is not None
    assert winner.best is not None
    assert winner.trial is not None
    assert winner.setup is not None
    alone = vllm_command(winner)
    assert alone is not None
    assert "--data-parallel-size" not in alone.line
    several = replace(winner, best=replace(winner.best, replicas=3))
    command = vllm_command(several)
    assert command is not None
    assert dict(pairwise(shlex.split(command.line)))["--data-parallel-size"] == "3"
    assert command.lacks == []

    routed = replace(winner.trial, router=RouterConfig(policy="prefix_affinity"), autoscale="open_requests:16")
    command = vllm_command(replace(several, trial=routed))
    assert command is not None
    assert command.lacks == ["router prefix_affinity", "autoscale open_requests:16"]

    command = vllm_command(replace(winner, best=replace(winner.best, replicas=9)))
    assert command is not None
    assert "--data-parallel-size 9 " in command.line
    assert command.lacks == [
        "9 GPUs on more than one machine (add --data-parallel-size-local and --data-parallel-address)"
    ]

    experts = replace(winner.setup, model=load_model("qwen3-30b-a3b"))
    command = vllm_command(replace(several, setup=experts))
    assert command is not None
    assert "--data-parallel-size" not in command.line
    assert command.lacks == ["3 replicas of a model with experts (start this command once for each)"]
