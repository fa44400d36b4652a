"""The online fit of the duration of passes, and the chunk that it allows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestArrived, TokenRuns
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.latency import PASSES_MIN, ExtendLatency, pairs_of

BASE_US, TOKEN_US, PAIR_US = 400.0, 0.5, 0.001


def a_pass(*spans: tuple[int, int]) -> BatchPlan:
    """A plan that computes these positions [start:stop), one row each."""
    starts, stops = np.array(spans, np.int32).T
    rows = np.arange(len(spans), dtype=np.int32)
    return BatchPlan(
        batch_id=0,
        mode="extend",
        rows=rows,
        request_ids=rows.astype(np.int64),
        starts=starts,
        stops=stops,
        extend_rows=len(spans),
        token_ids=np.zeros(int((stops - starts).sum()), np.int32),
        sample_rows=rows,
    )


def took_us(plan: BatchPlan) -> int:
    return round(BASE_US + TOKEN_US * float((plan.stops - plan.starts).sum()) + PAIR_US * pairs_of(plan))


def fitted(*passes: BatchPlan) -> ExtendLatency:
    latency = ExtendLatency()
    for plan in passes:
        latency.observe(plan, took_us(plan))
    return latency


VARIED = [a_pass((1024 * i, 1024 * i + 256 * (1 + i % 5))) for i in range(20)]


@pytest.mark.parametrize("context", [0, 1000, 20_000])
@pytest.mark.parametrize("decodes", [0, 64])
def test_known_coefficients_are_recovered(context: int, decodes: int) -> None:
    chunk = fitted(*VARIED).tokens_within(5000, context, decodes, decodes * 500)
    assert chunk is not None
    beside = TOKEN_US * decodes + PAIR_US * decodes * 500
    takes = BASE_US + beside + took_us(a_pass((context, context + chunk))) - BASE_US
    assert takes == pytest.approx(5000, rel=0.01)


def test_pairs_are_what_causal_attention_computes() -> None:
    assert pairs_of(a_pass((0, 4))) == 1 + 2 + 3 + 4
    assert pairs_of(a_pass((2, 4), (9, 10))) == 3 + 4 + 10


def test_pairs_of_a_long_context_do_not_overflow() -> None:
    assert pairs_of(a_pass((1_000_000, 1_100_000))) == sum(range(1_000_001, 1_100_001))


def test_nothing_is_known_before_enough_passes() -> None:
    assert fitted(*VARIED[: PASSES_MIN - 1]).tokens_within(5000, 0, 0, 0) is None
    assert fitted(*VARIED[:PASSES_MIN]).tokens_within(5000, 0, 0, 0) is not None


def test_nothing_is_known_while_all_passes_are_alike() -> None:
    assert fitted(*[a_pass((0, 512))] * 50).tokens_within(5000, 0, 0, 0) is None


def test_tokens_alone_are_fitted_if_pairs_follow_from_them() -> None:
    """Prompts without context: pairs grow with tokens, so only the curvature distinguishes the two."""
    chunk = fitted(*[a_pass(*[(0, 8)] * n) for n in range(1, 20)]).tokens_within(1000, 0, 0, 0)
    assert chunk == pytest.approx((1000 - BASE_US) / (TOKEN_US + PAIR_US * 4.5), rel=0.01)


def test_passes_that_take_less_the_longer_they_are_teach_nothing() -> None:
    latency = ExtendLatency()
    for n in range(1, 20):
        latency.observe(a_pass((0, 64 * n)), 5000 - 64 * n)
    assert latency.tokens_within(4000, 0, 0, 0) is None


def test_small_chunks_are_fitted_too() -> None:
    latency = ExtendLatency()
    for i in range(20):
        tokens = 8 * (1 + i % 5)
        latency.observe(a_pass((0, tokens)), 400 + 50 * tokens)
    assert latency.tokens_within(2400, 0, 0, 0) == pytest.approx(40, abs=1)


def test_passes_without_a_duration_teach_nothing() -> None:
    latency = ExtendLatency()
    for plan in VARIED:
        latency.observe(plan, 0)
    assert latency.tokens_within(1000, 0, 0, 0) is None
    assert latency.tokens_like_first(512, 1000) is None


def test_chunks_of_one_size_show_a_small_cost_of_pairs() -> None:
    """Half a microsecond for 1,024 x 1,024 pairs: behind 20,000 tokens a chunk takes 5 us longer, of 10,000."""
    latency = ExtendLatency()
    for i in range(20):
        latency.observe(a_pass((20_000 * i, 20_000 * i + 512)), 10_000 + round(0.5 * 512 * 20_000 * i / 1024**2))
    assert latency.tokens_like_first(512, 0) == pytest.approx(512, abs=2)
    assert latency.tokens_like_first(512, 400_000) == pytest.approx(507, abs=2)


def test_a_constant_that_is_most_of_the_duration_counts_as_part_of_the_tokens() -> None:
    """Passes of 256 to 1,280 tokens take 20 ms more than by their tokens and pairs, which is about 26 us a token."""
    latency = ExtendLatency()
    for plan in VARIED:
        latency.observe(plan, took_us(plan) + 20_000)
    assert latency.tokens_like_first(512, 20_000) == pytest.approx(334, abs=5)  # 18 if only b and c counted


def test_a_target_below_the_base_cost_allows_nothing() -> None:
    assert fitted(*VARIED).tokens_within(300, 0, 0, 0) == 0


def test_decodes_that_fill_the_target_leave_nothing() -> None:
    assert fitted(*VARIED).tokens_within(1000, 0, 256, 256 * 4000) == 0


def test_older_passes_fade() -> None:
    latency = fitted(*VARIED)
    for _ in range(50):
        for plan in VARIED:
            latency.observe(plan, 2 * took_us(plan))
    chunk = latency.tokens_within(10_000, 0, 0, 0)
    assert chunk == pytest.approx(fitted(*VARIED).tokens_within(5000, 0, 0, 0), rel=0.01)


def test_passes_are_counted_exactly() -> None:
    assert Fraction(fitted(*VARIED).sums[-1]) == len(VARIED)


# ---------------------------------------------------------------------------------------------------- in the engine


def engine_with_a_fit(**settings: object) -> Engine:
    defaults = {"page_size": 16, "pages": 4096, "context_tokens_max": 65_536, "overlap_depth": 0, "radix_cache": False}
    engine = Engine(SchedConfig(**{**defaults, **settings}))
    engine.latency = fitted(*VARIED)
    return engine


def first_chunk(engine: Engine, prompt: int) -> int:
    """Tokens of the first chunk of a prompt that arrives now."""
    request_id = engine.last_request_id + 1
    engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=TokenRuns((1, prompt)), max_new_tokens=9))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    return int((plan.stops - plan.starts)[0])


def test_a_chunk_stays_under_the_target() -> None:
    chunk = first_chunk(engine_with_a_fit(chunk_target_us=2000), 8000)
    assert took_us(a_pass((0, chunk))) <= 2000 < took_us(a_pass((0, chunk + 16)))


@pytest.mark.parametrize("target_us", [2000, 5000, 20_000])
def test_a_first_chunk_is_the_longest_without_context(target_us: int) -> None:
    """In pages of one token no rounding hides a token."""
    engine = engine_with_a_fit(chunk_target_us=target_us, page_size=1, pages=65_536)
    assert first_chunk(engine, 20_000) == fitted(*VARIED).tokens_within(target_us, 0, 0, 0)


def test_a_chunk_is_never_lengthened() -> None:
    assert first_chunk(engine_with_a_fit(chunk_target_us=10**9, chunked_prefill_size=512), 8000) == 512


def test_a_target_that_cannot_be_met_leaves_one_page_a_pass() -> None:
    assert first_chunk(engine_with_a_fit(chunk_target_us=1), 8000) == 16


def test_a_split_is_aligned_under_a_target_too() -> None:
    assert first_chunk(engine_with_a_fit(chunk_target_us=1, truncation_align_size=64), 8000) == 64


def test_decodes_beside_a_chunk_are_charged_once() -> None:
    """Their time is already part of the target; their number must not shorten the chunk as well."""
    engine = engine_with_a_fit(chunk_target_us=2000, batching="mixed", max_running_requests=300)
    for request_id in range(50):
        engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=TokenRuns((1, 16)), max_new_tokens=1000))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    engine.step(BatchFinished(0, plan.batch_id, bytes(4 * 50)))
    chunk = first_chunk(engine, 8000)
    assert took_us(a_pass((0, chunk), *[(16, 17)] * 50)) <= 2000 < took_us(a_pass((0, chunk + 16), *[(16, 17)] * 50))
