"""Two-batch overlap: where a plan is divided, and that its halves are the plan."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.commands import BatchPlan, Halves, LaunchBatch, Ranks
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestArrived, TokenRuns
from lockstep.core.features.two_batch import SHARE_MIN, divided, first_half_tokens, halves_of
from lockstep.core.journal.snapshot import dump, restore
from lockstep.core.scheduler.decode_run import DecodeRun

ON = SchedConfig(two_batch_overlap=True, two_batch_decode_tokens=4, two_batch_prefill_tokens=8)


def plan_of(extends: list[int], decodes: int = 0, ranks: Ranks | None = None) -> BatchPlan:
    """A plan with prompts of so many new tokens, half as many computed before, and decodes behind them."""
    starts = np.array([new // 2 for new in extends] + list(range(10, 10 + decodes)), np.int32)
    stops = starts + np.array(extends + [1] * decodes, np.int32)
    rows = np.arange(len(starts), dtype=np.int32)
    return BatchPlan(
        batch_id=0,
        mode="decode" if not extends else "mixed" if decodes else "extend",
        rows=rows,
        request_ids=rows.astype(np.int64),
        starts=starts,
        stops=stops,
        extend_rows=len(extends),
        token_ids=np.arange(sum(extends), dtype=np.int32),
        sample_rows=rows[::2],
        ranks=ranks,
    )


@pytest.mark.parametrize(
    ("extends", "decodes", "expected"),
    [
        ([], 3, None),
        ([], 4, Halves(2)),
        ([], 9, Halves(4)),
        ([7], 0, None),
        ([8], 0, Halves(0, 4)),
        ([9], 0, Halves(0, 4)),
        ([50, 50], 0, Halves(1)),
        ([48, 52], 0, Halves(1)),
        ([47, 53], 0, Halves(1, 3)),
        ([90, 10], 0, Halves(0, 50)),
        ([2, 90, 8], 0, Halves(1, 48)),
        ([20], 20, Halves(1)),
        ([6], 20, Halves(8)),
    ],
    ids=str,
)
def test_a_batch_is_divided_at_a_row_near_its_middle_else_through_a_prompt(
    extends: list[int], decodes: int, expected: Halves | None
) -> None:
    assert halves_of(ON, plan_of(extends, decodes)) == expected


def test_halves_hold_every_token_once_and_neither_is_small() -> None:
    rng = random.Random(1)
    cut = 0
    for _ in range(300):
        extends = [rng.randint(1, 60) for _ in range(rng.randint(0, 5))]
        plan = plan_of(extends, rng.randint(0, 12))
        halves = halves_of(ON, plan)
        tokens = int((plan.stops - plan.starts).sum())
        if halves is None:
            assert tokens < (8 if extends else 4)
            continue
        plan = msgspec.structs.replace(plan, halves=halves)
        first, second = divided(plan)
        sizes = [int((half.stops - half.starts).sum()) for half in (first, second)]
        assert sum(sizes) == tokens
        assert min(sizes) >= min(SHARE_MIN * tokens, tokens // 2)
        assert np.concatenate((first.token_ids, second.token_ids)).tolist() == plan.token_ids.tolist()
        sampling = np.concatenate((first.request_ids[first.sample_rows], second.request_ids[second.sample_rows]))
        assert sampling.tolist() == plan.request_ids[plan.sample_rows].tolist()
        if halves.cut:
            cut += 1
            assert halves.rows < plan.extend_rows, "only a prompt is cut"
            assert first.rows[-1] == second.rows[0]
            assert first.stops[-1] == second.starts[0]
            assert not np.isin(len(first.rows) - 1, first.sample_rows), "its last token is in the second half"
        for half, extending in ((first, first.rows), (second, second.rows)):
            assert half.extend_rows == int((extending < plan.extend_rows).sum())
            assert len(half.token_ids) == int((half.stops - half.starts)[: half.extend_rows].sum())
    assert cut > 30


def test_ranks_split_a_pass_together_and_in_their_middles() -> None:
    for extends, tokens, is_split in (
        (True, (20, 9, 0), True),
        (True, (20, 7, 0), False),
        (False, (4, 5, 0), True),
        (False, (4, 3, 0), False),
    ):
        ranks = Ranks(round=0, tokens=tokens, padding="sum_length", use_graph=False, extends=extends)
        for count in tokens:
            prompts = [1, count - 1] if extends and count else []
            plan = plan_of(prompts, count - sum(prompts), ranks)
            halves = halves_of(ON, plan)
            assert (halves is not None) == is_split
            if halves is not None:
                first, _ = divided(msgspec.structs.replace(plan, halves=halves))
                assert int((first.stops - first.starts).sum()) == first_half_tokens((count,))[0]


def engine_with(requests: int, **settings: Any) -> Engine:
    """An engine whose requests decode, with `overlap_depth` + 1 batches in flight."""
    given = {"pages": 400, "page_size": 4, "two_batch_overlap": True, "two_batch_decode_tokens": 4} | settings
    engine = Engine(SchedConfig(**given))
    for request_id in range(requests):
        engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=TokenRuns((1, 3)), max_new_tokens=50))
    return engine


def launched(engine: Engine) -> BatchPlan:
    """The plan of the next launch; the oldest batch is collected first if no slot is free."""
    if len(engine.in_flight) > engine.config.overlap_depth:
        oldest = engine.in_flight[0].plan
        engine.step(BatchFinished(0, oldest.batch_id, bytes(4 * len(oldest.sample_rows))))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    return plan


def test_runs_of_decodes_are_launched_in_the_same_halves() -> None:
    engine = engine_with(7)
    for _ in range(4):
        plan = launched(engine)
    assert plan.halves == Halves(3)
    run = DecodeRun.begin(engine)
    assert run is not None
    run.finished(BatchFinished(0, engine.in_flight[0].plan.batch_id, bytes(4 * 7)))
    [command] = run.launched(LaneReady(0)).commands
    assert isinstance(command, LaunchBatch)
    assert command.plan.halves == Halves(3)


def test_halves_are_in_the_digest_and_not_in_the_state() -> None:
    plain, split = engine_with(7, two_batch_overlap=False, two_batch_decode_tokens=msgspec.UNSET), engine_with(7)
    for engine in (plain, split):
        for _ in range(4):
            launched(engine)
    assert plain.digest != split.digest
    again = restore(dump(split))
    assert dump(again) == dump(split)
    assert launched(again).halves == launched(split).halves == Halves(3)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"two_batch_decode_tokens": 4}, "two_batch_decode_tokens"),
        ({"two_batch_overlap": True, "two_batch_prefill_tokens": 1}, "two_batch_prefill_tokens"),
        ({"two_batch_overlap": 2}, "two_batch_overlap"),
        ({"two_batch_overlap": True, "speculative_method": "ngram"}, "speculative_method"),
        ({"two_batch_overlap": True, "jump_forward_tokens": 4}, "jump_forward_tokens"),
        ({"two_batch_overlap": True, "decode_steps_per_launch": 2}, "decode_steps_per_launch"),
        ({"two_batch_overlap": True, "pp_size": 2}, "pp_size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_what_no_half_can_be_laid_out_with_is_refused_by_name(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=f"`{names}`"):
        SchedConfig(**settings)


def test_off_is_left_out_of_journals() -> None:
    off = SchedConfig(two_batch_overlap=False)
    assert off == SchedConfig()
    assert b"two_batch" not in msgspec.json.encode(off)
    assert ON.splits_batches
    assert SchedConfig(two_batch_overlap=True).two_batch_prefill_tokens == 512
