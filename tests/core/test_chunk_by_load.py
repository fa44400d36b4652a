"""Chunks by load: `chunked_prefill_size_min` of a full running batch, `chunked_prefill_size` of an empty one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    BatchFinished,
    ControlRequested,
    LaneReady,
    RequestArrived,
    SetState,
    TokenRuns,
)
from lockstep.core.requests.rules import chunk_by_load, shortened


def chunk_beside(decodes: int, prompt: int = 8_000, **settings: Any) -> int:
    """Tokens of the first chunk of a prompt that arrives while so many requests decode."""
    settings = {"chunked_prefill_size": 1024, "chunked_prefill_size_min": 128, "max_running_requests": 64} | settings
    settings |= {"page_size": 16, "pages": 4096, "overlap_depth": 0, "radix_cache": False}
    engine = Engine(SchedConfig(**settings))
    for request_id in range(decodes):
        engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=TokenRuns((1, 16)), max_new_tokens=1000))
    while decodes and (plan := engine.step(LaneReady(0)).launched()) is not None and plan.mode == "extend":
        engine.step(BatchFinished(0, plan.batch_id, bytes(4 * len(plan.sample_rows))))
    if engine.in_flight:
        engine.step(BatchFinished(0, engine.in_flight[0].plan.batch_id, bytes(4 * decodes)))
    engine.step(RequestArrived(time_us=0, request_id=decodes, prompt=TokenRuns((1, prompt)), max_new_tokens=9))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    return int((plan.stops - plan.starts)[0])


@pytest.mark.parametrize(("decodes", "chunk"), [(0, 1024), (1, 1008), (16, 800), (32, 576), (63, 128)])
def test_chunks_shrink_in_proportion_to_the_running_batch(decodes: int, chunk: int) -> None:
    assert chunk_beside(decodes) == chunk


def test_decodes_in_the_same_pass_are_not_subtracted_from_a_chunk_by_load_again() -> None:
    assert chunk_beside(32, batching="mixed") == 576
    assert chunk_beside(32, batching="mixed", chunked_prefill_size_min=1024) == 992, "1,024 minus 32 decodes"


def test_without_the_setting_the_chunk_does_not_depend_on_load() -> None:
    assert chunk_beside(63, chunked_prefill_size_min=msgspec.UNSET) == 1024


def test_a_prompt_shorter_than_its_chunk_is_whole() -> None:
    assert chunk_beside(32, prompt=500) == 500


def test_a_chunk_by_load_is_split_at_aligned_positions() -> None:
    assert chunk_beside(63, batching="prefill_first", truncation_align_size=256) == 256
    assert chunk_beside(16, batching="prefill_first", truncation_align_size=256) == 768


def test_a_limit_that_an_operator_lowers_below_the_least_chunk_holds() -> None:
    engine = Engine(SchedConfig(page_size=16, chunked_prefill_size=512, chunked_prefill_size_min=128))
    answered = engine.step(ControlRequested(0, 1, SetState("chunked_prefill_size", 64)))
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 2000)), max_new_tokens=9))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    assert int(plan.stops[0]) <= 512, answered


def test_the_arithmetic_at_its_bounds() -> None:
    assert [chunk_by_load(1000, 200, decodes, 8) for decodes in (0, 4, 8, 9)] == [1000, 600, 200, 200]
    assert chunk_by_load(100, 200, 8, 8) == 100
    assert [shortened(1000, tokens, 16) for tokens in (0, 15, 17, 999, 5000)] == [16, 16, 16, 992, 1000]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunked_prefill_size_min": 8}, "must be from `page_size` 16 to `chunked_prefill_size` 8192, got `8`"),
        ({"chunked_prefill_size_min": 8193}, "must be from `page_size` 16 to `chunked_prefill_size` 8192, got `8193`"),
        ({"chunked_prefill_size_min": True}, "got `True`"),
        ({"chunked_prefill_size_min": 64, "chunked_prefill_size": None}, "nothing is split"),
    ],
)
def test_a_chunk_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("`", "`")):
        SchedConfig(**settings)


def test_a_journal_without_the_setting_does_not_contain_it() -> None:
    assert b"chunked_prefill_size_min" not in msgspec.json.encode(SchedConfig())
