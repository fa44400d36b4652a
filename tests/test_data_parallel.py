"""Data-parallel ranks: their agreements, the waits of ranks for one another, failures of other engines.

Every rank's invariants are checked after every event, every KV cell that is read against its prefix, and every decision
of all ranks against that of the others (`tests/support/rank_group.py`).
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.commands import LaunchBatch, ProposeBatch, SampleBatch
from lockstep.core.contract.config import CacheTiers, SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    Grammar,
    GrammarReady,
    LaneReady,
    RanksAgreed,
    RequestArrived,
    SamplingParams,
    SwitchRole,
    TokenIds,
    Wish,
)
from lockstep.core.contract.runtime_settings import refuse_in_runtime
from lockstep.core.features.data_parallel import padding_of
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.rank_group import RankGroup
from tests.support.served import Answer
from tests.support.small_ranks import (
    DELAYING,
    JUMPING,
    SMALL,
    asked,
    compile_all,
    deliver,
    group,
    modes,
    offer,
)

# --------------------------------------------------------------------------------------------------------- the exchange


def test_rank_without_work_runs_idle_batches_beside_one_that_has_some() -> None:
    made = group(overlap_depth=0)
    made.arrive(0, asked(0, max_new=3))
    offer(made)
    assert modes(made) == ["extend", "idle"]
    deliver(made)
    offer(made)
    assert modes(made) == ["decode", "idle"]
    assert made.passes[-1].use_graph
    made.settle()
    assert made.answers[0] == asked(0, max_new=3).answer
    made.replay()


def test_all_take_the_branch_of_extends_if_any_extends() -> None:
    made = group(overlap_depth=0)
    made.arrive(0, asked(0))
    offer(made)
    deliver(made)
    made.arrive(1, asked(1, prompt=5))
    offer(made)
    assert modes(made) == ["mixed", "extend"], "a decode becomes an extend by one token"
    agreed = made.passes[-1]
    assert (agreed.extends, agreed.use_graph, agreed.padding) == (True, False, "sum_length")
    assert (agreed.tokens, agreed.logit_rows) == ((1, 5), (1, 1))
    made.settle()


@pytest.mark.parametrize(
    ("tokens", "extends", "padding"),
    [((8, 8, 8, 8), False, "max_length"), ((8, 1, 1, 1), False, "sum_length"), ((8, 8), True, "sum_length"),
     ((8, 0), False, "sum_length"), ((8, 1), False, "max_length")],
)  # fmt: skip
def test_rows_are_padded_to_the_longest_where_ranks_hardly_differ(
    tokens: tuple[int, ...], extends: bool, padding: str
) -> None:
    assert padding_of(tokens, extends) == padding


def test_rows_of_logits_count_positions_of_the_prompt_with_requested_logprobs() -> None:
    engine = Engine(SchedConfig(dp_ranks=2, **SMALL))
    prompt = TokenIds(np.arange(6, dtype=np.int32).tobytes())
    asks = SamplingParams(top_logprobs=1)
    engine.step(
        RequestArrived(time_us=0, request_id=0, prompt=prompt, max_new_tokens=2, logprob_start=1, sampling=asks)
    )
    (proposal,) = engine.step(LaneReady(0)).commands
    assert proposal == ProposeBatch(0, (6, 1 + 4, 1, 0))


def test_request_that_comes_behind_a_proposal_is_in_the_next_one() -> None:
    made = group(overlap_depth=0)
    made.ready(1)
    made.arrive(1, asked(1))
    made.arrive(0, asked(0))
    offer(made)
    assert modes(made) == ["extend", "idle"]
    deliver(made)
    offer(made)
    assert modes(made) == ["mixed", "extend"]
    made.settle()


def test_proposal_binds_a_request_that_leaves() -> None:
    """The request is cancelled between proposal and agreement: counts stay as proposed, and the row is dead."""
    made = group(overlap_depth=1)
    made.arrive(0, asked(0))
    made.arrive(1, asked(1))
    made.ready(0)
    made.ready(1)
    made.cancel(0, 0)
    assert made.answers[0] == Answer("cancelled", ())
    offer(made)
    assert made.passes[0].tokens == (4, 4)
    made.settle()
    assert made.answers[1] == asked(1).answer


@pytest.mark.parametrize("between", [False, True])
def test_sampling_under_a_grammar_waits_for_the_result_before(between: bool) -> None:
    """Also if that result comes between proposal and launch: then the matcher can move at once."""
    engine = Engine(SchedConfig(dp_ranks=2, overlap_depth=1, **SMALL))
    grammar = Grammar("regex", "a+", b"g")
    prompt = TokenIds(np.arange(4, dtype=np.int32).tobytes())
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=prompt, max_new_tokens=4, grammar=grammar))
    engine.step(GrammarReady(0, b"g"))
    engine.step(LaneReady(0))
    engine.step(RanksAgreed(0, 0, ((4, 1, 1, 0), (0, 0, 0, 1))))
    engine.step(LaneReady(0))
    result = BatchFinished(0, 0, np.array([7], np.int32).tobytes())
    early = engine.step(result).commands if between else []
    launch = engine.step(RanksAgreed(0, 1, ((1, 1, 0, 1), (0, 0, 0, 1)))).commands
    late = [] if between else engine.step(result).commands
    assert isinstance(launch[0], LaunchBatch)
    assert launch[0].sample == "deferred"
    samples = [one for one in (*early, *launch, *late) if isinstance(one, SampleBatch)]
    assert samples == [SampleBatch(1, ((0, 0, (7,)),))]
    assert (samples[0] in launch) == between


def test_rank_whose_mask_is_not_ready_launches_with_the_others() -> None:
    """Its forward runs with those of the others; only its sampling waits, for the previous result."""
    made = group(overlap_depth=1)
    made.arrive(0, asked(0, max_new=8), grammar="g")
    made.arrive(1, asked(1, max_new=8))
    compile_all(made)
    offer(made)
    offer(made)
    behind = [member.engine.in_flight[-1].plan for member in made.members]
    assert [plan.sample_after for plan in behind] == [0, None]
    assert [len(member.launched) for member in made.members] == [2, 2]
    deliver(made)
    assert made.marks["sampled once a result was there"] == 1
    made.settle()
    made.replay()


def test_rank_that_waits_for_a_grammar_joins_with_idle_batches() -> None:
    made = group(overlap_depth=0)
    made.arrive(0, asked(0), grammar="g")
    made.arrive(1, asked(1))
    offer(made)
    assert modes(made) == ["idle", "extend"]
    deliver(made)
    compile_all(made)
    offer(made)
    assert modes(made) == ["extend", "mixed"]
    made.settle()
    made.replay()


def forcing(made: RankGroup, positions: range) -> None:
    """The grammars of rank 0 admit only one token at these positions."""
    made.members[0].kv.force = lambda _, position: position in positions


def test_forced_tokens_are_part_of_a_proposal() -> None:
    made = group(overlap_depth=0, **JUMPING)
    forcing(made, range(6, 9))
    made.arrive(0, asked(0, max_new=12), grammar="g")
    made.arrive(1, asked(1, max_new=12))
    compile_all(made)
    for tokens, logits in (((4, 4), (1, 1)), ((1, 1), (1, 1)), ((4, 1), (4, 1)), ((1, 1), (1, 1))):
        offer(made)
        assert (made.passes[-1].tokens, made.passes[-1].logit_rows) == (tokens, logits)
        deliver(made)
    assert made.marks["computed forced tokens (verify)"] == 1
    made.settle()
    made.replay()


def test_forced_tokens_become_an_extend_where_others_extend() -> None:
    made = group(overlap_depth=0, **JUMPING)
    forcing(made, range(5, 8))
    made.arrive(0, asked(0, max_new=12), grammar="g")
    compile_all(made)
    offer(made)
    deliver(made)
    made.arrive(1, asked(1))
    offer(made)
    assert modes(made) == ["mixed", "extend"]
    assert made.passes[-1].tokens == (4, 4)
    assert made.marks["computed forced tokens (mixed)"] == 1
    made.settle()
    made.replay()


def test_what_is_forced_between_proposal_and_launch_is_in_the_next_proposal() -> None:
    """A proposal binds: tokens that the matcher forces after the previous result come too late for it."""
    made = group(overlap_depth=1, **JUMPING)
    forcing(made, range(5, 12))
    made.arrive(0, asked(0, max_new=12), grammar="g")
    made.arrive(1, asked(1, max_new=12))
    compile_all(made)
    offer(made)
    made.ready(0)
    made.finish(0)
    assert made.marks["told what is forced between proposal and launch"] == 1
    offer(made)
    assert made.passes[-1].tokens == (1, 1)
    deliver(made)
    offer(made)
    assert made.passes[-1].tokens == (7, 1), "the first of the seven is what the pass before samples"
    made.settle()
    made.replay()


def test_limits_of_depth_are_those_of_one_engine() -> None:
    made = group(overlap_depth=1)
    for rank in (0, 1):
        made.arrive(rank, asked(rank, max_new=8))
    for _ in range(4):
        offer(made)
    assert [len(member.engine.in_flight) for member in made.members] == [2, 2]
    made.settle()


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("for which rank 0 proposed nothing", RanksAgreed(0, 0, ((3, 1, 1, 0), (0, 0, 0, 1)))),
        ("rank 0 proposed 0", RanksAgreed(0, 1, ((4, 1, 1, 0), (0, 0, 0, 1)))),
        ("expected 2", RanksAgreed(0, 0, ((4, 1, 1, 0),))),
        ("which proposed", RanksAgreed(0, 0, ((3, 1, 1, 0), (0, 0, 0, 1)))),
        (
            "which proposed None",
            RanksAgreed(0, 0, ((4, 1, 1, 0), (0, 0, 0, 1)), (Wish(False, False, False, 0, 0, 0),) * 2),
        ),
        ("of generation 3", RanksAgreed(0, 0, ((4, 1, 1, 0), (0, 0, 0, 1)), (), 3)),
        ("is only proposed", BatchFinished(0, 0, b"")),
    ],
)
def test_impossible_fact_changes_nothing(message: str, event: Any) -> None:
    made = group()
    made.arrive(0, asked(0))
    if "nothing" not in message:
        made.ready(0)
    engine = made.members[0].engine
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(event)
    assert snapshot.dump(engine) == before


def test_one_engine_alone_has_no_ranks() -> None:
    with pytest.raises(ContractError, match="does not have yet"):
        Engine(SchedConfig(**SMALL)).step(RanksAgreed(0, 0, ()))
    plain = SchedConfig(**SMALL)
    assert SchedConfig(dp_ranks=1, **SMALL) == plain
    assert b"dp_rank" not in msgspec.json.encode(plain)
    assert b"delayer" not in msgspec.json.encode(plain)
    delaying = SchedConfig(dp_ranks=2, **DELAYING)
    assert b"delayer_slots" not in msgspec.json.encode(delaying)
    assert b"queue_min_ratio" not in msgspec.json.encode(delaying)
    assert SchedConfig(dp_ranks=2, **DELAYING, prefill_delayer_slots=False) == delaying


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_ranks": 0}, "`dp_ranks` must be a whole number of at least 1, got `0`"),
        ({"dp_ranks": 2, "dp_rank": 2}, "`dp_rank` 2 is none of 2 ranks"),
        ({"dp_rank": 1}, "`dp_rank` is 1, but there is one rank"),
        ({"prefill_delayer": True}, "`prefill_delayer` is True, but there is one rank"),
        ({"dp_ranks": 2, "prefill_delayer_max_delay_passes": 3}, "but nothing delays prompts"),
        ({"dp_ranks": 2, "prefill_delayer": True, "prefill_delayer_max_delay_us": 0}, "at least 1, got `0`"),
        ({"dp_ranks": 2, "prefill_full_skip_passes": -1}, "at least 0, got `-1`"),
        (
            {"dp_ranks": 2, "prefill_delayer": True, "prefill_delayer_token_usage_low_watermark": 1.5},
            "above 0 and at most 1, got `1.5`",
        ),
        ({"dp_ranks": 2, "prefill_delayer_slots": True}, "`prefill_delayer_slots` is True, but nothing delays"),
        ({"dp_ranks": 2, "prefill_delayer": True, "prefill_delayer_slots": 1.5}, "must be true or false, got `1.5`"),
        (
            {"dp_ranks": 2, "prefill_delayer": True, "prefill_delayer_queue_min_ratio": 0},
            "`prefill_delayer_queue_min_ratio` must be above 0 and at most 1, got `0.0`",
        ),
        ({"dp_ranks": 2, "decode_steps_per_launch": 2}, "ranks agree on every pass"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedConfig(**settings)


@pytest.mark.parametrize("name", ["dp_ranks", "dp_rank"])
def test_runtimes_refuse_the_number_of_a_rank_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` follows from the data-parallel ranks of the engine"):
        refuse_in_runtime(name)


def test_role_of_a_rank_cannot_be_switched() -> None:
    made = group()
    made.control(0, SwitchRole("prefill"))
    answer = made.members[0].controls[0]
    assert answer is not None
    assert not answer.ok
    assert "data-parallel ranks" in answer.message


# -------------------------------------------------------------------------------------------------------------- drafts


def test_tokens_of_a_rank_that_verifies_are_those_it_computes() -> None:
    """With drafts in flight a row may start anywhere between minimum and maximum; its number of tokens is known."""
    made = group(overlap_depth=1, speculative_method="ngram", num_speculative_tokens=3)
    made.arrive(0, asked(0, max_new=20))
    offer(made)
    offer(made)
    deliver(made)
    offer(made)
    first, second = (batch.plan for batch in made.members[0].engine.in_flight)
    assert first.ranks is not None
    assert second.ranks is not None
    assert second.stops[0] - second.starts[0] > 4, "it is open where it starts"
    assert (first.ranks.tokens, second.ranks.tokens) == ((4, 0), (4, 0))
    assert second.ranks.logit_rows == (4, 0)
    made.settle()


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_all_ranks_run_as_many_passes_of_the_drafter_as_the_longest_drafts_need(method: Any) -> None:
    """Its experts need the rows of all ranks, so a rank that ran fewer would leave the others in a collective."""
    made = group(ranks=3, overlap_depth=0, speculative_method=method, num_speculative_tokens=4)
    made.arrive(0, asked(0, max_new=3))
    made.arrive(1, asked(1, max_new=12))
    offer(made)
    assert made.passes[-1].draft_passes == 0, "no row has anything to draft behind yet"
    deliver(made)
    offer(made)
    plans = [member.engine.in_flight[-1].plan for member in made.members]
    own = [0 if plan.speculation is None else int(plan.speculation.draft_lengths.max()) for plan in plans]
    assert own == [1, 4, 0], "the first one has one token to go behind the next"
    assert [plan.ranks.draft_passes for plan in plans if plan.ranks is not None] == [4, 4, 4]
    made.settle()
    made.replay()


def test_what_only_looks_at_the_text_is_no_pass_of_all() -> None:
    made = group(speculative_method="ngram")
    made.arrive(0, asked(0))
    offer(made)
    assert made.passes[-1].draft_passes is msgspec.UNSET
    made.settle()


def test_rank_that_reports_less_than_the_others_is_refused() -> None:
    made = group(speculative_method="mtp")
    made.arrive(0, asked(0))
    made.ready(0)
    (said,) = made.proposals.values()
    with pytest.raises(ContractError, match=r"has \[4, 7\] counts of a rank, expected 7"):
        made.members[0].engine.step(RanksAgreed(0, 0, (said.counts, (0, 0, 0, 1))))


# -------------------------------------------------------------------------------------------------- in pipeline stages

STAGES: dict[str, Any] = {"pp_size": 2, "overlap_depth": 0}


def flying(made: RankGroup) -> list[list[tuple[int, str]]]:
    """The batches in flight of each rank: microbatch and mode."""
    return [[(one.plan.microbatch, one.plan.mode) for one in member.engine.in_flight] for member in made.members]


def test_ranks_launch_the_same_microbatch_though_only_one_has_anything_in_it() -> None:
    made = group(**STAGES, pp_max_micro_batch_size=1)
    made.arrive(0, asked(0))
    made.arrive(0, asked(1))
    made.arrive(1, asked(2))
    offer(made)
    offer(made)
    assert flying(made) == [[(0, "extend"), (1, "extend")], [(0, "extend"), (1, "idle")]]
    deliver(made)
    offer(made)
    assert flying(made) == [[(1, "extend"), (0, "decode")], [(1, "idle"), (0, "decode")]]
    made.settle()
    made.replay()
    assert all(made.answers[key] == asked(key).answer for key in range(3))


def test_a_round_is_of_one_microbatch_and_a_slot_of_another_waits_for_its_turn() -> None:
    """A rank that proposed for the microbatch of its own slot would meet the other ranks in another one's pass."""
    made = group(**STAGES)
    made.arrive(0, asked(0))
    made.ready(0, further=1)
    assert not made.proposals
    made.ready(0)
    made.ready(1, further=1)
    assert list(made.proposals) == [0]
    made.ready(1)
    while any(made.hear(member.rank) for member in made.members):
        pass
    assert [member.rounds.slot for member in made.members] == [1, 1]
    assert made.marks["offered out of turn"] == 2
    made.ready(0, further=1)
    assert not made.proposals, "microbatch 0 is in flight, and it is the turn of the other one"
    made.settle()
    made.replay()


def test_microbatch_in_which_no_rank_has_anything_is_passed_over() -> None:
    made = group(**STAGES)
    made.arrive(1, asked(0, max_new=3))
    offer(made)
    deliver(made)
    offer(made)
    assert flying(made) == [[], []], "microbatch 1: no rank proposes a token"
    offer(made)
    assert flying(made) == [[(0, "idle")], [(0, "decode")]]
    made.settle()
    assert len(made.passes) == 3


def test_prompts_wait_for_so_many_passes_of_their_microbatch() -> None:
    """One table for all would be reset by a microbatch that is full: no rank can extend there, which ends waits."""
    made = group(**STAGES, **DELAYING, pp_max_micro_batch_size=1)
    made.arrive(0, asked(0, max_new=20))
    made.arrive(1, asked(1, max_new=20))
    offer(made)
    made.arrive(1, asked(2, max_new=20))
    offer(made)
    assert flying(made) == [[(0, "extend"), (1, "idle")], [(0, "extend"), (1, "extend")]]
    made.arrive(0, asked(3))
    seen: list[str] = []
    for _ in range(8):
        deliver(made)
        offer(made)
        microbatch, mode = flying(made)[0][-1]
        seen.append(f"{microbatch} {mode}")
    assert seen == ["0 decode", "1 idle", "0 decode", "1 idle", "0 decode", "1 idle", "0 decode", "1 extend"]
    assert made.marks["prompts waited (mixed)"] == 3 * 2
    assert made.marks["prompts went ahead (spent)"] == 2
    made.settle()
    made.replay()


def test_rank_is_full_where_a_microbatch_has_no_place() -> None:
    """`prefill_full_skip_passes`: in microbatch 1 no rank is full, in microbatch 0 rank 1 is, below its limit."""
    made = group(**STAGES, prefill_full_skip_passes=2, pp_max_micro_batch_size=1)
    made.arrive(1, asked(0, max_new=20))
    offer(made)
    made.arrive(0, asked(1, max_new=20))
    made.arrive(0, asked(2, max_new=20))
    seen: list[str] = []
    for _ in range(6):
        offer(made)
        microbatch, mode = flying(made)[0][-1]
        seen.append(f"{microbatch} {mode}")
        deliver(made)
    assert seen == ["1 extend", "0 idle", "1 decode", "0 idle", "1 decode", "0 extend"]
    assert made.marks["prompts waited (full)"] == 2 * 2
    made.settle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stages_and_ranks_go_with_roles(role: Any) -> None:
    config = SchedConfig(dp_ranks=2, dp_rank=1, role=role, **STAGES)
    assert (config.pipelines, config.shares_passes, config.hands_over) == (True, True, True)


# -------------------------------------------------------------------------------------------- failures of other engines


@pytest.mark.parametrize("early", [0, 1])
def test_result_that_one_rank_sees_a_poll_earlier_changes_nothing(early: int) -> None:
    """Script 18 (SG#27164): equal plans, and no rank enters a collective that the others do not enter."""
    made = group(overlap_depth=1)
    made.arrive(0, asked(0, max_new=6))
    made.arrive(1, asked(1, max_new=6))
    for _ in range(2):
        offer(made)
    made.finish(early)
    offer(made)
    assert len({len(member.launched) for member in made.members}) == 1
    made.finish(1 - early)
    offer(made)
    made.settle()
    made.replay()
    assert [made.answers[key] for key in (0, 1)] == [asked(key, max_new=6).answer for key in (0, 1)]


@pytest.mark.parametrize("proposed", [0, 1, 2])
def test_rank_that_raises_leaves_no_rank_in_a_collective(proposed: int) -> None:
    """Script 18: rank 1 gets an impossible fact. Either all launch a round, or none does."""
    made = group(overlap_depth=1)
    for key, rank in enumerate((0, 1, 0)):
        made.arrive(rank, asked(key, max_new=6))
    offer(made)
    for rank in range(proposed):
        made.ready(rank)
    made.raises(1)
    assert all(not member.launched for member in made.members)
    made.settle()
    made.replay()
    assert all(made.answers[key] == asked(key, max_new=6).answer for key in range(3))


def test_i2_ranks_turn_overlap_off_together() -> None:
    """SG#20853: one rank extends and one decodes; each decided by its own mode whether it overlaps."""
    made = group(overlap_depth=1, overlap_consecutive_prefills=False)
    made.arrive(1, asked(1, max_new=8))
    offer(made)
    deliver(made)
    made.arrive(0, asked(0))
    offer(made)
    assert made.passes[-1].extends
    made.arrive(0, asked(2))
    passes = len(made.passes)
    offer(made)
    assert len(made.passes) == passes, "rank 0 would extend behind an extend: neither launches"
    assert all(member.rounds.awaits_results for member in made.members)
    made.finish(1)
    offer(made)
    assert len(made.passes) == passes, "rank 0 has not seen the result yet"
    made.finish(0)
    offer(made)
    assert len(made.passes) == passes + 1
    made.settle()


def test_i4_rank_that_schedules_nothing_joins_all_the_same() -> None:
    """VL#43547: a rank with requests and nothing to run, here for lack of pages, returned early."""
    made = group(overlap_depth=0, pages=4, max_running_requests=2, reserve="full")
    made.arrive(0, asked(0, prompt=4, max_new=4))
    made.arrive(1, asked(1, prompt=4, max_new=2))
    made.arrive(1, asked(2, prompt=6, max_new=2))
    made.settle()
    assert all(made.answers[key].reason == "length" for key in range(3))


def test_a13_every_rank_prefills_in_the_first_pass() -> None:
    """SG#25741: only one rank did, since the length of whole prompts was compared with the budget of all."""
    made = group(ranks=4, pages=128, chunked_prefill_size=16, max_prefill_tokens=32)
    for rank in range(4):
        made.arrive(rank, asked(rank, prompt=60))
    offer(made)
    assert modes(made) == ["extend"] * 4
    assert made.passes[0].tokens == (16,) * 4
    made.settle()


@pytest.mark.parametrize("moment", ["before the proposal", "before the agreement"])
def test_written_pages_come_back_without_arrivals(moment: str) -> None:
    """Script 14: a write locks pages, and a decode runs to the edge of the pool; the acknowledgement frees them."""
    tiers = CacheTiers(host_pages=8, write_policy="write_through")
    made = group(overlap_depth=0, pages=8, tiers=tiers, max_running_requests=2)
    made.arrive(0, asked(0, prompt=6, max_new=1))
    offer(made)
    deliver(made)
    member = made.members[0]
    assert member.tier_moves(), "what it computed is being written"
    made.arrive(0, asked(1, prompt=4, max_new=11))
    for _ in range(30):
        if member.tier_moves() and moment == "before the agreement":
            made.ready(0)
            made.move_tier(member, random.Random(0))
        elif member.tier_moves() and member.engine.memory.available_pages == 0:
            made.move_tier(member, random.Random(0))
        offer(made)
        deliver(made)
    made.settle()
    assert made.answers[1] == asked(1, prompt=4, max_new=11).answer
