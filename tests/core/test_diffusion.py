"""Models that answer in blocks: the bounds of a block's passes, what goes with it, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.commands import BatchPlan, Step, StreamTokens
from lockstep.core.contract.config import BlockDiffusion, HybridMemory
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    Grammar,
    LaneReady,
    PromptSpan,
    RequestArrived,
    RequestRejected,
    SamplingParams,
    TokenRuns,
)
from lockstep.core.journal.snapshot import dump, restore

BLOCKS: dict[str, Any] = {"overlap_depth": 0, "page_size": 4, "pages": 20, "context_tokens_max": 64}
CONFIG = SchedConfig(diffusion=BlockDiffusion(4), **BLOCKS)


def started(**arrival: Any) -> tuple[Engine, BatchPlan]:
    """An engine with one request behind its prompt, and the plan of the first pass over its first block."""
    engine = Engine(CONFIG)
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 5)), max_new_tokens=20, **arrival))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    engine.step(BatchFinished(0, plan.batch_id, b"", 0, 0))
    following = engine.step(LaneReady(0)).launched()
    assert following is not None
    return engine, following


def passed(engine: Engine, plan: BatchPlan, tokens: list[int]) -> tuple[Step, BatchPlan | None]:
    """The result of a pass over one row: its tokens, or none. Returns its step, and the next plan."""
    accepted = np.array([len(tokens)], np.int32).tobytes() if tokens else b""
    step = engine.step(BatchFinished(0, plan.batch_id, np.array(tokens, np.int32).tobytes(), 0, 0, accepted=accepted))
    return step, engine.step(LaneReady(0)).launched()


def test_the_first_block_begins_with_the_end_of_the_prompt() -> None:
    engine, plan = started()
    assert plan.mode == "diffusion_extend"
    assert plan.blocks is not None
    assert (plan.starts.tolist(), plan.stops.tolist()) == ([4], [8])
    assert (plan.blocks.given.tolist(), plan.token_ids.tolist()) == ([1], [5])
    _, again = passed(engine, plan, [])
    assert again is not None
    assert again.blocks is not None
    assert (again.blocks.numbers.tolist(), again.blocks.given.tolist(), again.token_ids.size) == ([1], [0], 0)


def test_tokens_are_streamed_when_their_block_is_finished() -> None:
    engine, plan = started()
    step, following = passed(engine, plan, [])
    assert not step.commands
    assert following is not None
    step, following = passed(engine, following, [7, 8, 9])
    (message,) = step.commands
    assert isinstance(message, StreamTokens)
    assert message.tokens.tolist() == [7, 8, 9]
    assert following is not None
    assert (following.starts.tolist(), following.stops.tolist()) == ([8], [12])


def test_a_block_with_m_masks_is_finished_after_m_plus_one_passes() -> None:
    engine, plan = started()
    launched: BatchPlan | None = plan
    for _ in range(3):  # masks
        assert launched is not None
        _, launched = passed(engine, launched, [])
    assert launched is not None
    with pytest.raises(ContractError, match="leaves masks in the block of sampling row 0 after 4 passes"):
        passed(engine, launched, [])
    passed(engine, launched, [7, 8, 9])


@pytest.mark.parametrize("tokens", [[7], [7, 8, 9, 10]], ids=["fewer", "more"])
def test_a_result_has_all_tokens_of_a_block_or_none(tokens: list[int]) -> None:
    engine, plan = started()
    before = dump(engine)
    with pytest.raises(ContractError, match="its block has 3, and 0 while masks are left"):
        passed(engine, plan, tokens)
    assert dump(engine) == before
    with pytest.raises(ContractError, match="8 bytes of accepted counts, expected 4"):
        engine.step(BatchFinished(0, plan.batch_id, b"", 0, 0, accepted=bytes(8)))


def test_a_snapshot_in_the_middle_of_a_block_goes_on_the_same() -> None:
    engine, plan = started()
    copy = restore(dump(engine))
    assert dump(copy) == dump(engine)
    for one in (engine, copy):
        _, following = passed(one, plan, [])
        assert following is not None
        passed(one, following, [7, 8, 9])
    assert copy.digest == engine.digest


def test_which_pass_a_block_is_in_enters_the_digest() -> None:
    engine, plan = started()
    other, same = started()
    assert engine.digest == other.digest
    _, following = passed(engine, plan, [])
    passed(other, same, [7, 8, 9])
    assert following is not None
    assert engine.digest != other.digest


def test_an_engine_without_blocks_has_none_in_snapshots_and_refuses_their_counts() -> None:
    engine = Engine(SchedConfig(**{**BLOCKS, "overlap_depth": 1}))
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 5)), max_new_tokens=20))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    assert b"block_passes" not in dump(engine)
    with pytest.raises(ContractError, match="none were asked for"):
        engine.step(BatchFinished(0, plan.batch_id, bytes(4), 0, 0, accepted=bytes(4)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"diffusion": BlockDiffusion(3)}, "`diffusion.block_tokens` must be a power of two from 2 to 256, got `3`"),
        ({"diffusion": BlockDiffusion(512)}, "got `512`"),
        ({"diffusion": BlockDiffusion(8)}, "`page_size` must be a multiple of `diffusion.block_tokens` 8, got `4`"),
        ({"context_tokens_max": 62}, "`context_tokens_max` must be a multiple of `diffusion.block_tokens` 4, got `62`"),
        ({"chunk_unit": "token"}, "prompts are split between two blocks"),
        ({"overlap_depth": 1}, "`overlap_depth` is 1, but `diffusion` is set"),
        ({"batching": "mixed"}, "`batching` is mixed, but `diffusion` is set"),
        ({"reserve": "full"}, "`reserve` is full, but `diffusion` is set"),
        ({"decode_look_ahead": 2}, "`decode_look_ahead` is 2, but `diffusion` is set"),
        ({"decode_steps_per_launch": 2}, "`decode_steps_per_launch` is 2, but `diffusion` is set"),
        (
            {"enable_priority_preemption": True, "schedule_policy": "priority", "retraction_policy": "priority"},
            "`enable_priority_preemption` is True, but `diffusion` is set",
        ),
        ({"speculative_method": "ngram"}, "`speculative_method` is ngram, but `diffusion` is set"),
        ({"jump_forward_tokens": 3}, "`jump_forward_tokens` is 3, but `diffusion` is set"),
        ({"role": "prefill"}, "`role` is prefill, but `diffusion` is set"),
        ({"dp_ranks": 2}, "`dp_ranks` is 2, but `diffusion` is set"),
        ({"pp_size": 2}, "`pp_size` is 2, but `diffusion` is set"),
        ({"two_batch_overlap": True}, "`two_batch_overlap` is True, but `diffusion` is set"),
        (
            {"hybrid": HybridMemory(window_tokens=8, window_pages=20), "chunked_prefill_size": 8},
            "`hybrid` is set, but `diffusion` is set",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_blocks_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SchedConfig(**{**BLOCKS, "diffusion": BlockDiffusion(4), **settings})
    assert message in str(refused.value)
    assert "\nhint: " in str(refused.value) or "block_tokens` must be" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "arrival"),
    [
        ("kind", {"kind": "embed", "max_new_tokens": 0}),
        ("grammar", {"grammar": Grammar("regex", "a", b"a")}),
        ("stop_texts", {"stop_texts": ("x",)}),
        ("stop_regexes", {"stop_regexes": ("x",)}),
        ("sampling.logprobs", {"sampling": SamplingParams(top_logprobs=1)}),
        ("logprob_start", {"logprob_start": 0}),
        ("return_hidden_states", {"return_hidden_states": True}),
        ("spans", {"spans": (PromptSpan(0, 1, "embedding", bytes(32), 0),)}),
    ],
    ids=str,
)
def test_requests_that_need_single_tokens_are_refused_by_name(field: str, arrival: dict[str, Any]) -> None:
    engine = Engine(CONFIG)
    options = {"max_new_tokens": 4, **arrival}
    step = engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 5)), **options))
    (rejected,) = step.decided
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "unsupported"
    assert f"`{field}` is not supported by a model that answers in blocks" in rejected.message


def test_a_pool_holds_every_position_of_a_request_in_blocks() -> None:
    config = SchedConfig(**{**BLOCKS, "pages": 2}, diffusion=BlockDiffusion(4))
    assert config.request_tokens_max == 8
    assert SchedConfig(**{**BLOCKS, "pages": 2}).request_tokens_max == 9
