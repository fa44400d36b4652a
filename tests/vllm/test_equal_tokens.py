"""Answers under Lockstep's scheduler equal those of an engine with vLLM's own: both loops, a small pool.

Further families and features run in test_families.py, where one engine has both schedulers one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.support import (
    LOCKSTEP,
    OWN,
    SMALL_POOL,
    Answer,
    Asked,
    assert_idle,
    different,
    engine,
    mixed_requests,
    model_folder,
    needs_vllm,
    not_tied,
    run,
    scheduler_of,
)

pytestmark = needs_vllm
long = pytest.mark.long

Reference = Callable[[str], tuple[list[Asked], list[Answer]]]

POOLS = {
    "demo": SMALL_POOL,  # 100 requests and 60 blocks of 32 tokens
    "gemma3": {**SMALL_POOL, "num_gpu_blocks_override": 36},  # full attention and windows, in one group
    "mistral": {**SMALL_POOL, "num_gpu_blocks_override": 36},  # windows only
}
REQUESTS = {"demo": 100, "gemma3": 40, "mistral": 40}
TIES_MAX = 0.05  # share of the requests; vLLM differs from itself about as often under other batch shapes


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The requests of a family and their answers under vLLM's own scheduler, computed once."""
    known: dict[str, tuple[list[Asked], list[Answer]]] = {}

    def of(family: str) -> tuple[list[Asked], list[Answer]]:
        if family not in known:
            requests = mixed_requests(REQUESTS[family], seed=5)
            with engine(model_folder(family), scheduler=OWN, **POOLS[family]) as llm:
                known[family] = requests, run(llm, requests, aborts_of(requests))
        return known[family]

    return of


def aborts_of(requests: list[Asked]) -> dict[int, int]:
    """Return, by number, the output tokens after which every sixth long request is aborted."""
    long = [number for number, one in enumerate(requests) if one.params["max_tokens"] >= 60]
    return {number: 1 + number % 20 for number in long[::6]}


def check_equal(llm: Any, requests: list[Asked], ours: list[Answer], own: list[Answer]) -> None:
    """Assert that answers are equal but for a few ties; print how many ties there are."""
    ties = different(requests, ours, own)
    assert not_tied(llm, requests, ours, own) == []
    print(f"{len(requests)} requests, {len(ties)} ties of rounding: {ties}")
    assert len(ties) <= TIES_MAX * len(requests)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", [one if one == "demo" else pytest.param(one, marks=long) for one in REQUESTS])
def test_answers_equal_vllms_own(family: str, overlap: bool, reference: Reference) -> None:
    requests, own = reference(family)
    with engine(model_folder(family), overlap=overlap, **POOLS[family]) as llm:
        ours = run(llm, requests, aborts_of(requests))
        counts = scheduler_of(llm).engine_state().counts
        assert_idle(llm)
        check_equal(llm, requests, ours, own)
    assert counts.retractions > 0  # the pool is small enough
    assert counts.cached_tokens > 0
    assert counts.finished["cancelled"] > 0
    assert {reason for one in ours for reason, _ in one.ends} == {"stop", "length", "abort"}


@long
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_no_prefix_cache_and_no_chunks(overlap: bool, reference: Reference) -> None:
    requests, own = reference("demo")
    options = {**SMALL_POOL, "enable_prefix_caching": False, "enable_chunked_prefill": False}
    with engine(model_folder("demo"), overlap=overlap, **options) as llm:
        ours = run(llm, requests, aborts_of(requests))
        assert scheduler_of(llm).engine_state().counts.cached_tokens == 0
        assert_idle(llm)
        check_equal(llm, requests, ours, own)


@long
def test_a_reset_of_running_requests_changes_no_answer(reference: Reference) -> None:
    """Every running request loses its KV in the middle, and the workers get it as a preempted one."""
    requests, own = reference("demo")
    with engine(model_folder("demo"), **POOLS["demo"]) as llm:
        scheduler, steps = scheduler_of(llm), iter(range(1000))
        original = scheduler.schedule

        def schedule(throttle_prefills: bool = False) -> Any:
            if next(steps) == 20:
                assert scheduler.get_request_counts()[0] > 1
                assert not scheduler.reset_prefix_cache()
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
                assert scheduler.get_request_counts()[0] == 0
                output = original()
                assert output.preempted_req_ids
                return output
            return original()

        scheduler.schedule = schedule
        check_equal(llm, requests, run(llm, requests, aborts_of(requests)), own)
        assert_idle(llm)


@long
def test_chunks_of_64_tokens(reference: Reference) -> None:
    requests, own = reference("demo")
    with engine(model_folder("demo"), num_gpu_blocks_override=60, max_num_batched_tokens=64) as llm:
        check_equal(llm, requests, run(llm, requests, aborts_of(requests)), own)
        assert_idle(llm)


@long
def test_a_changed_policy_changes_no_answer(reference: Reference) -> None:
    requests, own = reference("demo")
    settings = {"profile": "sglang", "scheduler": {"schedule_policy": "lpm", "batching": "prefill_first"}}
    with engine(model_folder("demo"), settings=settings, **SMALL_POOL) as llm:
        ours = run(llm, requests, aborts_of(requests))
        assert scheduler_of(llm).config.schedule_policy == "lpm"
        assert_idle(llm)
        check_equal(llm, requests, ours, own)


def test_priorities_are_vllms() -> None:
    """Smaller values run first: requests of the two schedulers end in the same order of priorities."""
    requests = [
        Asked(one.prompt, {"max_tokens": 8, "ignore_eos": True}, extra={"priority": number % 3})
        for number, one in enumerate(mixed_requests(30, seed=3, structured=False))
    ]
    orders = []
    for scheduler in (OWN, LOCKSTEP):
        options = {"scheduling_policy": "priority", "max_num_seqs": 4, "max_num_batched_tokens": 512}
        with engine(model_folder("demo"), scheduler=scheduler, num_gpu_blocks_override=200, **options) as llm:
            orders.append(_order_of_ends(llm, requests))
    ranks = [[requests[number].extra["priority"] for number in order] for order in orders]
    assert ranks[1] == sorted(ranks[1])
    assert ranks[0] == ranks[1]


def _order_of_ends(llm: Any, requests: list[Asked]) -> list[int]:
    engine, order = llm.llm_engine, []
    for number, request in enumerate(requests):
        engine.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, request.sampling(), **request.extra)
    while engine.has_unfinished_requests():
        order += [int(output.request_id) for output in engine.step() if output.finished]
    return order


def test_streaming_input_is_refused_and_other_requests_are_served() -> None:
    """A resumable request, which vLLM's front end uses for streaming input, gets an error; the engine continues."""
    from vllm import SamplingParams
    from vllm.v1.engine import FinishReason
    from vllm.v1.request import Request

    with engine(model_folder("demo")) as llm:
        scheduler = scheduler_of(llm)
        scheduler._finished_by_client = {}  # as in a data-parallel engine
        scheduler.add_request(Request("streamed", [5, 6, 7], SamplingParams(max_tokens=4), None, resumable=True))
        assert scheduler.has_requests()
        outputs, _ = llm.llm_engine.engine_core.engine_core.step()
        assert [(one.request_id, one.finish_reason) for one in outputs[0].outputs] == [("streamed", FinishReason.ERROR)]
        assert outputs[0].finished_requests == {"streamed"}
        (answer,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 4
        assert_idle(llm)
