"""Speculative decoding: for any drafts and accepted numbers, each request gets the tokens of a run without drafts."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import DRAFT_SETTINGS, SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestArrived, RequestCancelled, TokenRuns
from lockstep.core.features.speculation import Chances
from lockstep.core.invariants import check
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.latency import new_tokens_of, pairs_of
from tests.support.driver.draw import with_trees
from tests.support.driver.run import run_actions
from tests.support.served import Asked, Moment, serve

SEEDS = 25


def workload(rng: random.Random) -> list[Moment]:
    """Requests with shared beginnings, stop tokens at any output, minima, all cadences, spread over time."""
    timeline: list[Moment] = []
    most = rng.choice([5, 20, 60])
    for key in range(rng.randint(3, 9)):
        base, max_new = 100 * rng.randint(1, 2), rng.randint(1, most)
        timeline.append(
            Asked(
                key=key,
                prompt=tuple(range(base, base + rng.randint(1, 14))),
                max_new=max_new,
                min_new=rng.choice([0, 0, rng.randint(0, max_new)]),
                stops=tuple(rng.sample(range(most), rng.choice([0, 0, 1, 2]))),
                stream=rng.random() < 0.8,
            )
        )
        timeline += [None] * rng.choice([0, 0, 1, 3])
    return timeline


def settings(rng: random.Random, timeline: list[Moment]) -> SchedConfig:
    page_size = rng.choice([1, 2, 4, 16])
    longest = max(len(asked.prompt) + asked.max_new for asked in timeline if asked is not None)
    return SchedConfig(
        page_size=page_size,
        pages=-(-longest // page_size) + rng.choice([0, 2, 10, 400]),
        schedule_conservativeness=0.02,
        overlap_depth=rng.choice([0, 1, 1, 2]),
        chunked_prefill_size=rng.choice([page_size, 3 * page_size, None]),
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        reserve=rng.choice(["ratio", "on_demand", "full"]),
        retract_every=rng.choice([0, 0, 3]),
        radix_cache=(radix := rng.random() < 0.7),
        retracted_kv=rng.choice(["free", "cache"]) if radix else "free",
        stream_interval=rng.choice([1, 3]),
        speculative_method="eagle",
        num_speculative_tokens=rng.choice([1, 2, 3, 7]),
        speculative_min_chance=rng.choice([UNSET, 0.3]),
        speculative_max_batch_size=rng.choice([UNSET, UNSET, 3]),
    )


def test_every_request_gets_the_tokens_that_it_gets_without_drafts() -> None:
    """Over random requests x overlap x retraction x chunking x memory; all invariants after every event."""
    marks = Counter[str]()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        timeline = workload(rng)
        config = settings(rng, timeline)
        expected = {asked.key: asked.answer for asked in timeline if asked is not None}
        for one in (config, replace(config, **dict.fromkeys(DRAFT_SETTINGS, UNSET))):
            served = serve(one, timeline, check=True)
            assert served.answers == expected, f"seed {seed}, {one}"
        marks += served.marks
        marks.update(answer.reason for answer in expected.values())
    assert all(marks[wanted] for wanted in ("retracted (pages)", "retracted (forced)", "stop", "length")), marks


def test_every_request_gets_the_same_with_trees() -> None:
    """Drafts with alternatives, some paths of which are right; rows keep the pages of refused branches."""
    marks = Counter[str]()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        timeline = workload(rng)
        config = with_trees(settings(rng, timeline), rng)
        expected = {asked.key: asked.answer for asked in timeline if asked is not None}
        served = serve(config, timeline, check=True)
        assert served.answers == expected, f"seed {seed}, {config}"
        marks += served.marks
    assert all(marks[wanted] for wanted in ("retracted (pages)", "retracted (forced)")), marks


def test_every_request_gets_the_same_where_tables_cannot_shrink() -> None:
    """Rows keep the pages of refused drafts, and tables are only ever extended."""
    marks = Counter[str]()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        timeline = workload(rng)
        config = replace(settings(rng, timeline), tables_append_only=True)
        expected = {asked.key: asked.answer for asked in timeline if asked is not None}
        served = serve(config, timeline, check=True)
        assert served.answers == expected, f"seed {seed}, {config}"
        marks += served.marks
    assert all(marks[wanted] for wanted in ("retracted (pages)", "retracted (forced)")), marks


def test_histories_where_tables_cannot_shrink_replay_and_survive_snapshots() -> None:
    from tests.swarm import history

    histories, seed = 0, 0
    while histories < 25:
        config, actions = history(seed)
        seed += 1
        if config.speculates and config.hybrid is UNSET and not config.hands_over:
            run_actions(replace(config, tables_append_only=True), actions, replay=True)
            histories += 1


def test_histories_with_drafts_replay_and_survive_snapshots() -> None:
    """Faults, cancels, restarts and snapshots between any two events; the replayed digests are equal."""
    from tests.swarm import history

    marks, seed = Counter[str](), 0
    while marks["histories"] < 25:
        config, actions = history(seed)
        seed += 1
        if config.speculates:
            driver = run_actions(config, actions, replay=True)
            marks.update(driver.marks)
            marks["histories"] += 1
    wanted = ["verify batch with drafts", "mixed batch with drafts", "start left open", "dead row verified"]
    wanted += ["sits out at its end", "drafts left out", "fewer drafts", "finished (error)", "finished (stop)"]
    assert not [mark for mark in wanted if not marks[mark]], marks


# ------------------------------------------------------------------------------------------------------- single steps


def engine_of(**settings: object) -> Engine:
    return Engine(SchedConfig(page_size=4, pages=16, speculative_method="ngram", **settings))  # type: ignore[arg-type]


def arrive(engine: Engine, tokens: int, max_new: int, request_id: int = 0, **fields: object) -> None:
    prompt = TokenRuns((100, tokens))
    engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=prompt, max_new_tokens=max_new, **fields))  # type: ignore[arg-type]


def launch(engine: Engine) -> BatchPlan:
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    return plan


def finish(engine: Engine, batch_id: int, tokens: list[int], accepted: list[int]) -> None:
    engine.step(
        BatchFinished(
            0, batch_id, np.array(tokens, np.int32).tobytes(), accepted=np.array(accepted, np.int32).tobytes()
        )
    )


def test_drafts_get_pages_ahead_and_pages_of_wrong_drafts_are_freed() -> None:
    """Retracting for, or forgetting, pages beyond the newest one caused SG#14180 and VL#57104."""
    engine = engine_of(num_speculative_tokens=7, overlap_depth=0)
    arrive(engine, tokens=4, max_new=40)
    finish(engine, launch(engine).batch_id, [1], [])
    plan = launch(engine)
    assert (plan.mode, plan.starts.tolist(), plan.stops.tolist()) == ("verify", [4], [12])
    assert engine.memory.pool.free_count == 16 - 3
    finish(engine, plan.batch_id, [2, 3], [2])
    assert engine.positions.tolist() == [6]
    assert engine.memory.pool.free_count == 16 - 2


def test_pages_of_refused_drafts_stay_with_the_row_where_tables_cannot_shrink() -> None:
    engine = engine_of(num_speculative_tokens=7, overlap_depth=0, tables_append_only=True)
    arrive(engine, tokens=4, max_new=40)
    finish(engine, launch(engine).batch_id, [1], [])
    finish(engine, launch(engine).batch_id, [2, 3], [2])
    assert engine.positions.tolist() == [6]
    assert engine.memory.pool.free_count == 16 - 3  # of positions 0 to 5, and one for the next
    check(engine)
    plan = launch(engine)
    assert plan.stops.tolist() == [14]
    assert plan.deltas.index.tolist() == [3]  # entries 0 to 2 stay as they are
    check(engine)
    assert snapshot.dump(snapshot.restore(snapshot.dump(engine))) == snapshot.dump(engine)
    engine.step(RequestCancelled(0, 0))
    finish(engine, plan.batch_id, [4], [1])
    assert engine.memory.available_pages == 16
    check(engine)


def test_append_only_tables_with_drafts_refuse_features_without_spare_pages() -> None:
    with pytest.raises(ConfigError, match="rows keep the pages of refused drafts; this is not supported with `role`"):
        engine_of(tables_append_only=True, role="decode")


def test_no_draft_lies_past_the_length() -> None:
    engine = engine_of(num_speculative_tokens=7, overlap_depth=0)
    arrive(engine, tokens=4, max_new=4)
    finish(engine, launch(engine).batch_id, [1], [])
    plan = launch(engine)  # outputs 2, 3 and 4 are still to come: the newest token and two drafts
    assert plan.speculation is not None
    assert (plan.stops.tolist(), plan.speculation.draft_lengths.tolist()) == ([7], [2])


def test_impossible_counts_are_refused_and_change_nothing() -> None:
    engine = engine_of(overlap_depth=0)
    arrive(engine, tokens=4, max_new=40)
    finish(engine, launch(engine).batch_id, [1], [])
    plan, before = launch(engine), snapshot.dump(engine)
    with pytest.raises(ContractError, match="reports 5 tokens of sampling row 0, which samples 1 to 4"):
        finish(engine, plan.batch_id, [2] * 5, [5])
    with pytest.raises(ContractError, match="reports 0 tokens of sampling row 0"):
        finish(engine, plan.batch_id, [], [0])
    with pytest.raises(ContractError, match="8 bytes of accepted counts, expected 4"):
        finish(engine, plan.batch_id, [2, 2], [1, 1])
    with pytest.raises(ContractError, match="has 4 bytes of tokens, expected 8"):
        finish(engine, plan.batch_id, [2], [2])
    assert snapshot.dump(engine) == before


def test_a_request_watched_token_by_token_has_no_drafts() -> None:
    engine = engine_of(overlap_depth=0)
    arrive(engine, tokens=4, max_new=10)
    arrive(engine, tokens=4, max_new=10, request_id=1, stop_texts=("END",))
    finish(engine, launch(engine).batch_id, [1, 1], [])
    plan = launch(engine)
    assert plan.speculation is not None
    assert plan.speculation.draft_lengths.tolist() == [3, 0]


def test_the_number_of_drafts_follows_from_results() -> None:
    config = SchedConfig(speculative_method="eagle", num_speculative_tokens=7, speculative_min_chance=0.3)
    chances, eight = Chances(), np.full(8, 7, np.int32)
    assert chances.worth_drafting(config, 8) == 7  # no acceptance was observed yet
    for _ in range(20):
        chances.observe(eight, np.array([0, 0, 0, 0, 1, 1, 2, 7], np.int32))  # 1/2, then 1/2 of those, then 1/2
    assert chances.worth_drafting(config, 8) == 1
    for _ in range(200):
        chances.observe(np.ones(8, np.int32), np.array([1] * 7 + [0], np.int32))
    assert chances.worth_drafting(config, 8) > 1  # more drafts are worth trying again
    for _ in range(200):
        chances.observe(eight, np.zeros(8, np.int32))
    assert chances.worth_drafting(config, 8) == 1  # never none, since no acceptance would be measured
    alone = replace(config, speculative_max_batch_size=4)
    assert [alone.drafts_max, chances.worth_drafting(alone, 5), chances.worth_drafting(alone, 4)] == [7, 0, 1]


def test_a_pass_is_fitted_by_its_computed_tokens_not_by_possible_positions() -> None:
    engine = engine_of(overlap_depth=1)
    arrive(engine, tokens=4, max_new=40)
    finish(engine, launch(engine).batch_id, [1], [])
    launch(engine)
    plan = launch(engine)  # from 5 to 8 on, a token and three drafts
    assert (plan.starts.tolist(), plan.stops.tolist()) == ([5], [12])
    assert new_tokens_of(plan).tolist() == [4]
    assert pairs_of(plan) == 9 + 10 + 11 + 12


def test_several_decodes_of_one_launch_are_refused() -> None:
    with pytest.raises(ConfigError, match="`speculative_method` is eagle, but `decode_steps_per_launch` is 2"):
        SchedConfig(speculative_method="eagle", decode_steps_per_launch=2)
    with pytest.raises(ConfigError, match="`speculative_method` must be none, ngram, draft_model, eagle or mtp"):
        SchedConfig(speculative_method="medusa")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`num_speculative_tokens` must be a whole number from 1 to 64, got `0`"):
        SchedConfig(speculative_method="mtp", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="`num_speculative_tokens` is 5, but there are no drafts"):
        SchedConfig(num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="`speculative_min_chance` must be above 0 and below 1"):
        SchedConfig(speculative_method="mtp", speculative_min_chance=1.0)


def test_settings_omit_drafts_unless_there_are_any() -> None:
    assert SchedConfig(speculative_method="none") == SchedConfig()
    assert b"speculative" not in msgspec.msgpack.encode(SchedConfig())
    config = msgspec.msgpack.decode(msgspec.msgpack.encode(SchedConfig(speculative_method="mtp")), type=SchedConfig)
    assert (config.speculative_method, config.num_speculative_tokens) == ("mtp", 3)


def test_drafts_behind_a_batch_that_failed_before_it_ran() -> None:
    """The rows are dead, and the device may start them anywhere between the plan's least and greatest position."""
    config = SchedConfig(page_size=2, overlap_depth=2, speculative_method="ngram", num_speculative_tokens=1)
    actions = [("arrive", 1, 3, 36, {}), ("ready",), ("ready",), ("finish", "error", 0)]
    assert "finished (error)" in run_actions(config, actions).marks  # type: ignore[arg-type]
