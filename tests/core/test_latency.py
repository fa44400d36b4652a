"""The online fit of the duration of passes, and the chunk that it allows."""

from __future__ import annotations

from collections.abc import Callable
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


def new_tokens(plan: BatchPlan) -> float:
    return float((plan.stops - plan.starts).sum())


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


def chunk_of_passes(plans: list[BatchPlan], us: Callable[[BatchPlan], float], context: int) -> int | None:
    """The chunk behind a context that takes as long as a first one of 512 tokens, if passes took so long."""
    latency = ExtendLatency()
    for plan in plans:
        latency.observe(plan, round(us(plan)))
    return latency.tokens_like_first(512, context)


def test_a_chunk_like_the_first_is_the_longest_that_takes_no_longer() -> None:
    """A pair takes as long as a token, so that the pair of each token with itself counts too."""

    def cost_us(start: int, tokens: int) -> int:
        return tokens + pairs_of(a_pass((start, start + tokens)))

    latency = ExtendLatency()
    for i in range(20):
        latency.observe(a_pass((64 * i, 64 * i + 1 + i % 5)), 100 + cost_us(64 * i, 1 + i % 5))
    for context in range(0, 3000, 7):
        chunk = latency.tokens_like_first(1000, context)
        assert chunk is not None
        assert cost_us(context, chunk) <= cost_us(0, 1000) * (1 + 1e-9)
        assert cost_us(context, chunk + 1) > cost_us(0, 1000) * (1 - 1e-9)


def test_a_cost_of_pairs_below_a_microsecond_a_unit_shortens_chunks() -> None:
    """Half a microsecond for 1,024 x 1,024 pairs: behind 400,000 tokens a token takes 1.19 us instead of 1."""
    plans = [a_pass((20_000 * i, 20_000 * i + 256 * (1 + i % 5))) for i in range(20)]

    def us(plan: BatchPlan) -> float:
        return 300 + float((plan.stops - plan.starts).sum()) + 0.5 * pairs_of(plan) / 1024**2

    latency = ExtendLatency()
    for plan in plans:
        latency.observe(plan, round(us(plan)))
    assert latency.tokens_within(10_300, 0, 0, 0) == pytest.approx(10_000, rel=0.01)
    assert latency.tokens_within(10_300, 400_000, 0, 0) == pytest.approx(10_000 / 1.19, rel=0.01)
    assert latency.tokens_like_first(512, 400_000) == pytest.approx(512 / 1.19, rel=0.01)


@pytest.mark.parametrize(("constant_us", "behind"), [(700, 112), (900, 341)])
def test_a_constant_counts_as_part_of_the_tokens_if_it_is_more_than_half_of_the_duration(
    constant_us: int, behind: int
) -> None:
    """The passes take 770 us by their tokens and pairs on average. Without a constant a token takes 1.4 us, not 0.5."""
    plans = [a_pass((512 * (i % 4), 512 * (i % 4) + 512 * (1 + i % 3))) for i in range(60)]
    chunk = chunk_of_passes(plans, lambda plan: constant_us + 0.5 * new_tokens(plan) + 0.0002 * pairs_of(plan), 10_000)
    assert chunk == pytest.approx(behind, abs=3)


def test_two_kinds_of_passes_separate_tokens_from_pairs_without_a_constant() -> None:
    """All chunks behind no tokens have 512, all others 1,024: a constant would explain them as well as pairs do."""
    plans = [a_pass((0, 512)), a_pass((8192, 8192 + 1024))] * 10
    chunk = chunk_of_passes(plans, lambda plan: new_tokens(plan) + pairs_of(plan) / 8192, 8192)
    assert chunk == pytest.approx(263, abs=2)


def test_chunks_that_take_the_same_time_behind_any_context_stay_as_long() -> None:
    plans = [a_pass((1024 * i, 1024 * i + 512)) for i in range(20)]
    assert chunk_of_passes(plans, lambda _: 512, 20_000) == 512


def test_chunks_of_one_size_need_no_more_passes_than_others() -> None:
    plans = [a_pass((1024 * i, 1024 * i + 512)) for i in range(PASSES_MIN)]
    assert chunk_of_passes(plans, took_us, 20_000) is not None
    assert chunk_of_passes(plans[:-1], took_us, 20_000) is None


def test_chunks_of_one_size_behind_almost_one_context_teach_nothing() -> None:
    plans = [a_pass((100_000 + i, 100_512 + i)) for i in range(20)]
    assert chunk_of_passes(plans, lambda plan: 1000 * (BASE_US + TOKEN_US * 512) + pairs_of(plan), 20_000) is None


@pytest.mark.parametrize("context", [0, 1024])
def test_a_fast_device_is_fitted_too(context: int) -> None:
    """Half a microsecond for 1,024 tokens: nothing is rounded, since the passes are long."""
    latency = ExtendLatency()
    for i in range(1, 20):
        plan = a_pass(*[(context, context + 1024)] * 4 * i)
        latency.observe(plan, 100 + 2 * i)
    assert latency.tokens_within(200, 0, 0, 0) == pytest.approx(200 * 1024, rel=0.01)


def test_chunks_of_one_size_on_a_fast_device_are_fitted_too() -> None:
    plans = [a_pass((65_536 * i, 65_536 * (i + 2))) for i in range(20)]
    chunk = chunk_of_passes(plans, lambda plan: 0.5 * new_tokens(plan) / 1024 + pairs_of(plan) / 1024**2 / 1024, 10_000)
    assert chunk == pytest.approx(512 / (1 + 10_000 / 1024 / 512), abs=3)


def test_tokens_that_hardly_separate_from_pairs_are_fitted_alone() -> None:
    """All passes have rows of 1,024 tokens without context, but for one token: a context costs nothing then."""
    latency = ExtendLatency()
    for i in range(1, 40):
        plan = a_pass(*[(0, 1024)] * i, (i % 3, i % 3 + 1))
        latency.observe(plan, 1000 * took_us(plan))
    chunk = latency.tokens_within(10_000_000, 0, 0, 0)
    assert chunk is not None
    assert latency.tokens_within(10_000_000, 1_000_000, 0, 0) == chunk


def test_a_difference_of_one_pair_teaches_nothing_about_pairs() -> None:
    """Passes of 10 and 11 pairs: the longer duration of the latter is not taken for the cost of a pair."""
    latency = ExtendLatency()
    for _ in range(10):
        latency.observe(a_pass((0, 4)), 400)
        latency.observe(a_pass((9, 10)), 100)
        latency.observe(a_pass((10, 11)), 101)
    chunk = latency.tokens_within(10_000, 0, 0, 0)
    assert chunk == pytest.approx(100, abs=1)
    assert latency.tokens_within(10_000, 1000, 0, 0) == chunk


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


def test_without_decodes_a_first_chunk_pays_for_its_own_pairs_only() -> None:
    """A pair takes a whole microsecond, so that one more shortens the chunk for about every twentieth target."""
    latency = ExtendLatency()
    for plan in VARIED:
        latency.observe(plan, 400 + int((plan.stops - plan.starts).sum()) + pairs_of(plan))
    for target_us in range(600, 640):
        engine = engine_with_a_fit(chunk_target_us=target_us, page_size=1, batching="mixed")
        engine.latency = latency
        assert first_chunk(engine, 2000) == latency.tokens_within(target_us, 0, 0, 0)


def test_the_context_of_decodes_in_the_same_pass_counts() -> None:
    engine = engine_with_a_fit(page_size=1, pages=65_536, batching="mixed", chunk_target_us=5000)
    for request_id in range(4):
        engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=TokenRuns((1, 3000)), max_new_tokens=1000))
    while not engine.in_flight or engine.in_flight[0].plan.mode != "decode":
        while engine.in_flight:
            batch = engine.in_flight[0]
            engine.step(BatchFinished(0, batch.plan.batch_id, bytes(4 * batch.tokens)))
        engine.step(LaneReady(0))
    engine.step(BatchFinished(0, engine.in_flight[0].plan.batch_id, bytes(4 * 4)))
    assert first_chunk(engine, 8000) == fitted(*VARIED).tokens_within(5000, 0, 4, 4 * 3001)


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
