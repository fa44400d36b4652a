"""The scheduler with a worker that checks what blocks hold: overlap, pipeline stages, recurrent state, host memory."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.core.invariants import check
from tests.vllm.fake_worker import FakeWorker, expected
from tests.vllm.support import DEMO, needs_vllm

pytestmark = needs_vllm

BLOCK_TOKENS = 16
PAGE_BYTES = 2 * 4 * BLOCK_TOKENS  # keys and values of one float32 each


@dataclass(frozen=True)
class World:
    """An engine."""

    kinds: tuple[str, ...] = ("full",)
    blocks: int = 40
    depth: int = 1  # plans that are launched before the oldest result is delivered
    options: dict[str, Any] = field(default_factory=dict)  # of vLLM's EngineArgs
    overlap: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # of Lockstep
    host_pages: int = 0


NO_PREFIXES = {"enable_prefix_caching": False}
WORLDS = {
    "plain": World(),
    "overlap": World(depth=2, overlap=True),
    "stages": World(depth=2, options={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "four stages": World(depth=4, options={"pipeline_parallel_size": 4, "distributed_executor_backend": "mp"}),
    "states": World(("state", "full", "state"), 80, options=NO_PREFIXES, settings={"mean_request_tokens": 32}),
    "states with overlap": World(
        ("full", "state"), 60, 2, NO_PREFIXES, overlap=True, settings={"mean_request_tokens": 32}
    ),
    "states in stages": World(
        ("full", "state"), 60, 2, NO_PREFIXES | {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        settings={"mean_request_tokens": 32},
    ),
    "states only": World(("state",), 9, options=NO_PREFIXES),
    "host memory": World(host_pages=100),
    "host memory with overlap": World(depth=2, overlap=True, host_pages=100),
    "host memory, written back": World(depth=2, overlap=True, host_pages=40, settings={"write_policy": "write_back"}),
}  # fmt: skip


def scheduler_of(world: World) -> Any:
    """Return Lockstep's scheduler in a vLLM configuration without a model."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    import lockstep.vllm
    from lockstep.vllm.tiers import CONNECTOR

    options = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 96, "enforce_eager": True}
    settings = dict(world.settings)
    if world.host_pages:
        extra = {
            "host_gb": world.host_pages * PAGE_BYTES / 1e9,
            "write_policy": settings.pop("write_policy", "write_through"),
        }
        name, module = CONNECTOR
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=name, kv_connector_module_path=module, kv_role="kv_both", kv_connector_extra_config=extra
        )
    arguments = EngineArgs(str(DEMO), dtype="float32", block_size=BLOCK_TOKENS, **(options | world.options))
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = world.overlap
    config.additional_config = {"lockstep": settings}
    specs = {
        "full": FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32),
        "state": MambaSpec(block_size=256, shapes=((4, 4),), dtypes=(torch.float32,)),
    }
    groups = [KVCacheGroupSpec([f"layer {i}"], specs[kind]) for i, kind in enumerate(world.kinds)]
    kv_cache = KVCacheConfig(num_blocks=world.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return lockstep.vllm.Scheduler(config, kv_cache, StructuredOutputManager(config), BLOCK_TOKENS)


def requests(rng: random.Random, count: int) -> dict[str, tuple[list[int], int]]:
    """Return prompts and lengths of answers. Two of three prompts begin with one of four shared prefixes."""
    shared = [[rng.randrange(1900) for _ in range(rng.choice([20, 50, 100]))] for _ in range(4)]
    return {
        f"q{i}": (
            (rng.choice(shared) if rng.random() < 0.67 else [])
            + [rng.randrange(1900) for _ in range(rng.randrange(1, 60))],
            rng.randrange(1, 60),
        )
        for i in range(count)
    }


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", WORLDS)
def test_every_read_finds_the_content_of_its_prefix(name: str, seed: int) -> None:
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    world, rng = WORLDS[name], random.Random(seed)
    scheduler, worker = scheduler_of(world), FakeWorker(list(world.kinds), BLOCK_TOKENS)
    engine = scheduler.engine_state()
    wanted = requests(rng, 80)
    coming, answers = deque(wanted), {one: [] for one in wanted}
    left: set[str] = set()
    launched: deque[tuple[Any, dict[str, list[int]]]] = deque()
    in_flight = 0
    for step in range(5_000):
        while coming and rng.random() < 0.4:
            one = coming.popleft()
            params = SamplingParams(temperature=0, max_tokens=wanted[one][1], ignore_eos=True)
            params.update_from_generation_config({}, None)
            scheduler.add_request(Request(one, wanted[one][0], params, None))
        if scheduler.requests and rng.random() < 0.02:
            one = rng.choice(sorted(scheduler.requests))
            left.add(one)
            scheduler.finish_requests(one, RequestStatus.FINISHED_ABORTED)
        if step == 200:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if not coming and not launched and not scheduler.has_requests():
            break
        output = scheduler.schedule()
        launched.append((output, worker.run(output)))
        in_flight = max(in_flight, sum(bool(plan.num_scheduled_tokens) for plan, _ in launched))
        if len(launched) >= world.depth:
            output, tokens = launched.popleft()
            names = list(tokens)
            index = {one: i for i, one in enumerate(names)}
            result = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=list(tokens.values()))
            for outputs in scheduler.update_from_output(output, result).values():
                for one in outputs.outputs:
                    answers[one.request_id] += one.new_token_ids
        if step % 16 == 0:
            check(engine)
    check(engine)
    assert not scheduler.requests
    assert not coming
    for one, (prompt, count) in wanted.items():
        answer = expected(prompt, count)
        assert answers[one] == answer if one not in left else answers[one] == answer[: len(answers[one])], one
    assert left
    assert in_flight == world.depth
    assert engine.counts.retractions > 0 or name == "states only"
    if world.host_pages:
        assert scheduler._copies.written_pages > 0
        assert scheduler._copies.loaded_pages > 0


@pytest.mark.parametrize("setting", ["waiting_timeout_us", "running_timeout_us"])
def test_a_request_ends_at_its_deadline(setting: str) -> None:
    """Of two requests that must run one after the other, the second waits and never runs: it ends with an error."""
    from vllm import SamplingParams
    from vllm.v1.engine import FinishReason
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    world = World(options={"max_num_seqs": 1}, settings={"scheduler": {setting: 1_000_000}})
    scheduler, worker = scheduler_of(world), FakeWorker(list(world.kinds), BLOCK_TOKENS)
    clock = iter(range(0, 60_000_000, 100_000))  # each look at it is a tenth of a second after the one before
    scheduler._now_us = lambda: next(clock)
    for name in ("first", "second"):
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        params.update_from_generation_config({}, None)
        scheduler.add_request(Request(name, [5, 6, 7], params, None))
    ended, tokens = {}, {"first": 0, "second": 0}
    for _ in range(200):
        output = scheduler.schedule()
        sampled = worker.run(output)
        result = ModelRunnerOutput(list(sampled), {one: i for i, one in enumerate(sampled)}, list(sampled.values()))
        for outputs in scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                tokens[one.request_id] += len(one.new_token_ids)
                if one.finish_reason is not None:
                    ended[one.request_id] = one.finish_reason
        if len(ended) == 2:
            break
    waits = setting == "waiting_timeout_us"
    assert ended == {"first": FinishReason.LENGTH if waits else FinishReason.ABORT, "second": FinishReason.ERROR}
    assert tokens["first"] == 100 if waits else 0 < tokens["first"] < 100
    assert tokens["second"] == 0
    assert not scheduler.requests
