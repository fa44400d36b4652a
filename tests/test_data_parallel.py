"""Data-parallel ranks: what they agree on, who waits for whom, stories in which others broke, equivalence, histories.

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
from lockstep.core.contract.config import CacheTiers, HybridMemory, SchedConfig, refuse_simulated_only
from lockstep.core.contract.errors import ConfigError, ContractError, InvariantError
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
from lockstep.core.features import data_parallel
from lockstep.core.features.data_parallel import DELAYER, SITUATIONS, Counts, Delay, Rounds, padding_of, situation_of
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.rank_group import RankGroup, run_history
from tests.support.served import Answer, Asked, serve

SMALL: dict[str, Any] = {"page_size": 2, "pages": 32, "max_running_requests": 4, "batching": "prefill_first"}
DELAYING: dict[str, Any] = {"prefill_delayer": True, "prefill_delayer_max_delay_passes": 3}


def group(ranks: int = 2, *, restores: bool = True, **settings: Any) -> RankGroup:
    return RankGroup([SchedConfig(dp_ranks=ranks, **{**SMALL, **settings})] * ranks, restores=restores)


def asked(key: int, prompt: int = 4, max_new: int = 4, **more: Any) -> Asked:
    return Asked(key, tuple(range(100 * (key + 1), 100 * (key + 1) + prompt)), max_new, **more)


def offer(made: RankGroup) -> None:
    """Every rank is given a slot, and hears what all agreed on."""
    for member in made.members:
        made.ready(member.rank)
    while any(made.hear(member.rank) for member in made.members):
        pass


def deliver(made: RankGroup) -> None:
    for member in made.members:
        made.finish(member.rank)


def modes(made: RankGroup) -> list[str]:
    """What each rank launched last."""
    return [member.engine.in_flight[-1].plan.mode for member in made.members]


def first_runs(made: RankGroup, passes: int) -> list[str]:
    """What the first rank runs in so many passes, each delivered before the next."""
    seen = []
    for _ in range(passes):
        offer(made)
        seen.append(modes(made)[0])
        deliver(made)
    return seen


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


def test_rows_of_logits_count_positions_of_the_prompt_whose_logprobs_are_wanted() -> None:
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


def test_proposal_binds_whoever_leaves() -> None:
    """The client leaves between proposal and agreement: counts stay what was said, and the row is dead."""
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
    """Also where that result comes between proposal and launch: then the matcher can move at once."""
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


def compile_all(made: RankGroup) -> None:
    for member in made.members:
        while member.compiling:
            made.compiled(member)


def test_rank_whose_mask_is_not_ready_launches_with_the_others() -> None:
    """Its forward runs with theirs; only its sampling waits, for the result before."""
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


JUMPING: dict[str, Any] = {"jump_forward_tokens": 8}


def forcing(made: RankGroup, positions: range) -> None:
    """The grammars of rank 0 admit but one token at these positions."""
    made.members[0].kv.force = lambda _, position: position in positions


def test_forced_tokens_are_part_of_what_a_rank_tells() -> None:
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
    """A proposal binds: what the matcher says of the result before it comes too late for it."""
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
        ("which said None", RanksAgreed(0, 0, ((4, 1, 1, 0), (0, 0, 0, 1)), (Wish(False, False, False, 0, 0, 0),) * 2)),
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


def test_one_engine_alone_knows_no_ranks() -> None:
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
            "`prefill_delayer_queue_min_ratio` must be above 0 and at most 1, got `0`",
        ),
        ({"dp_ranks": 2, "decode_steps_per_launch": 2}, "ranks agree on every pass"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedConfig(**settings)


@pytest.mark.parametrize("name", ["dp_ranks", "prefill_delayer", "prefill_delayer_slots", "prefill_full_skip_passes"])
def test_runtimes_refuse_what_only_ranks_have(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is of data-parallel attention, which is simulated only"):
        refuse_simulated_only(name)


def test_role_of_a_rank_cannot_be_switched() -> None:
    made = group()
    made.control(0, SwitchRole("prefill"))
    answer = made.members[0].controls[0]
    assert answer is not None
    assert not answer.ok
    assert "data-parallel ranks" in answer.message


# -------------------------------------------------------------------------------------------------------------- drafts


def test_tokens_of_a_rank_that_verifies_are_those_it_computes() -> None:
    """With drafts in flight a row may start anywhere between the least and the most; what it computes is known."""
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
    """Its experts want the rows of all, so a rank that ran fewer would leave the others in a collective."""
    made = group(ranks=3, overlap_depth=0, speculative_method=method, num_speculative_tokens=4)
    made.arrive(0, asked(0, max_new=3))
    made.arrive(1, asked(1, max_new=12))
    offer(made)
    assert made.passes[-1].draft_passes == 0, "nobody has anything to draft behind yet"
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


def test_rank_that_says_less_than_the_others_is_refused() -> None:
    made = group(speculative_method="mtp")
    made.arrive(0, asked(0))
    made.ready(0)
    (said,) = made.proposals.values()
    with pytest.raises(ContractError, match=r"has \[4, 7\] counts of a rank, expected 7"):
        made.members[0].engine.step(RanksAgreed(0, 0, (said.counts, (0, 0, 0, 1))))


# ---------------------------------------------------------------------------------------------------------- the delayer


def test_table_of_the_delayer_knows_every_situation() -> None:
    for (state, situation), following in DELAYER.items():
        assert state in ("free", "delaying")
        assert (following == "delaying") == (situation in ("mixed", "full", "slots", "queue"))
    assert {situation for _, situation in DELAYER} == set(SITUATIONS)
    assert {key for key in SITUATIONS if ("free", key) not in DELAYER} == {"spent"}, "who waits for nothing is not done"


NOTHING, DECODING, EXTENDING = (0, 0, 0, 1), (1, 1, 0, 1), (4, 1, 1, 0)


def wish(**values: Any) -> Wish:
    usual = {"wants": False, "full": False, "starved": False, "running": 1, "in_flight": 0, "time_us": 0}
    return Wish(**{**usual, **values})


@pytest.mark.parametrize(
    ("wishes", "planned", "passes", "situation"),
    [
        ([{}, {}], NOTHING, 0, "none"),
        ([{"wants": True}, {"wants": True}], NOTHING, 0, "all"),
        ([{"wants": True}, {}], NOTHING, 0, "mixed"),
        ([{"wants": True}, {}], NOTHING, 2, "mixed"),
        ([{"wants": True}, {}], NOTHING, 3, "spent"),
        ([{"wants": True, "time_us": 900}, {}], NOTHING, 1, "spent"),
        ([{"wants": True, "starved": True}, {}], NOTHING, 0, "starved"),
        ([{"wants": True}, {}], EXTENDING, 0, "along"),
        ([{"wants": True, "running": 0}, {"running": 0}], NOTHING, 0, "idle"),
        ([{"wants": True, "running": 0}, {"running": 0}], DECODING, 0, "mixed"),
        ([{"wants": True}, {"full": True}], NOTHING, 0, "full"),
        ([{"wants": True, "starved": True}, {"full": True}], NOTHING, 1, "full"),
        ([{"wants": True, "starved": True}, {"full": True}], NOTHING, 2, "starved"),
        ([{"wants": True, "full": True}, {"full": True}], NOTHING, 0, "mixed"),
    ],
)
def test_how_ranks_stand(wishes: list[dict[str, Any]], planned: Counts, passes: int, situation: str) -> None:
    config = SchedConfig(dp_ranks=2, **DELAYING, prefill_delayer_max_delay_us=900, prefill_full_skip_passes=2)
    said = tuple(wish(**one) for one in wishes)
    assert situation_of(config, Delay(passes), (NOTHING, planned), said) == situation


@pytest.mark.parametrize(
    ("told", "running", "starved", "passes", "situation"),
    [
        ([(0, 0, 0), (0, 1, 0)], 3, False, 0, "all"),  # nobody has extended yet
        ([(0, 1, 2), (0, 1, 1)], 3, False, 0, "slots"),  # room for 1, the latest extends took in 2
        ([(0, 1, 1), (0, 1, 1)], 3, False, 0, "all"),
        ([(0, 1, 4), (0, 1, 4)], 4, False, 0, "slots"),
        ([(0, 1, 2), (0, 1, 1)], 3, True, 0, "starved"),
        ([(0, 1, 2), (0, 1, 1)], 3, False, 3, "spent"),
        ([(0, 1, 2), (0, 1, 2)], 2, False, 0, "all"),  # room for 2, half of 2 wait
        ([(0, 2, 2), (0, 0, 2)], 2, False, 0, "all"),
    ],
)
def test_triggers_hold_prompts_up_though_every_rank_has_some(
    told: list[tuple[int, ...]], running: int, starved: bool, passes: int, situation: str
) -> None:
    config = SchedConfig(
        dp_ranks=2,
        max_running_requests=4,
        prefill_delayer_slots=True,
        prefill_delayer_queue_min_ratio=0.5,
        **DELAYING,
    )
    said = tuple(wish(wants=True, running=running, starved=starved and not i) for i in range(2))
    counts = tuple((*NOTHING, *more) for more in told)
    assert situation_of(config, Delay(passes), counts, said) == situation


def test_queue_trigger_waits_for_a_share_of_those_that_run() -> None:
    config = SchedConfig(dp_ranks=2, prefill_delayer_queue_min_ratio=0.5, **DELAYING)
    said = (wish(wants=True, running=10), wish(wants=True, running=4))
    for waiting, taken, situation in ((4, 8, "queue"), (5, 8, "all"), (3, 3, "all"), (2, 3, "queue")):
        counts = ((*NOTHING, 0, waiting, taken), (*NOTHING, 0, 1, 0))
        assert situation_of(config, Delay(), counts, said) == situation


def test_prompts_wait_for_more_of_their_kind() -> None:
    """With one place left and extends that took in two, nobody extends until another place is free."""
    made = group(overlap_depth=0, max_running_requests=3, prefill_delayer_slots=True, **DELAYING)
    for rank in (0, 1):
        for number in range(2):
            made.arrive(rank, asked(10 * rank + number, max_new=3 if number else 12))
    offer(made)
    assert modes(made) == ["extend", "extend"]
    deliver(made)
    for rank in (0, 1):
        for number in (2, 3):
            made.arrive(rank, asked(10 * rank + number))
    assert first_runs(made, 3) == ["decode", "decode", "extend"]
    assert made.marks["prompts waited (slots)"] == 4, "as both ranks say, twice"
    assert made.marks["prompts went ahead (all)"] == 2
    made.settle()
    made.replay()


def test_prompts_wait_until_as_many_do_as_a_share_of_those_that_run() -> None:
    made = group(overlap_depth=0, max_running_requests=8, prefill_delayer_queue_min_ratio=0.7, **DELAYING)
    for rank in (0, 1):
        for number in range(3):
            made.arrive(rank, asked(10 * rank + number, max_new=12))
    offer(made)
    deliver(made)
    seen = []
    for number in (3, 4):
        made.arrive(0, asked(number))
        if number == 3:
            made.arrive(1, asked(10 + number))
        offer(made)
        seen.append(modes(made))
        deliver(made)
    assert seen == [["decode", "decode"], ["extend", "extend"]], "two of three wait at the first rank"
    assert made.marks["prompts waited (queue)"] == 2
    assert made.marks["prompts went ahead (all)"] == 2
    made.settle()
    made.replay()


def test_without_a_delayer_only_full_ranks_hold_prompts_up() -> None:
    config = SchedConfig(dp_ranks=2, prefill_full_skip_passes=2)
    wanting = wish(wants=True)
    assert situation_of(config, Delay(), (NOTHING, NOTHING), (wanting, wish())) == "open"
    assert situation_of(config, Delay(1), (NOTHING, NOTHING), (wanting, wish(full=True))) == "full"
    assert situation_of(config, Delay(2), (NOTHING, NOTHING), (wanting, wish(full=True))) == "spent"


def busy(made: RankGroup) -> None:
    """Rank 1 decodes."""
    made.arrive(1, asked(100, max_new=20))
    offer(made)
    deliver(made)


def test_prompt_waits_until_every_rank_has_one() -> None:
    made = group(**DELAYING, overlap_depth=0)
    busy(made)
    made.arrive(0, asked(0))
    offer(made)
    assert modes(made) == ["idle", "decode"]
    deliver(made)
    made.arrive(1, asked(1))
    offer(made)
    assert modes(made) == ["extend", "extend"]
    assert made.marks["prompts waited (mixed)"] == 2, "as both ranks say"
    assert made.marks["deferred (proposal_undone)"] == 1, "of the one that waits, said once"
    made.settle()
    made.replay()


def test_prompt_waits_for_so_many_passes_at_most() -> None:
    made = group(**DELAYING, overlap_depth=0)
    busy(made)
    made.arrive(0, asked(0))
    assert first_runs(made, 4) == ["idle", "idle", "idle", "extend"]
    made.settle()


@pytest.mark.parametrize("late_us", [0, 1_000])
def test_prompt_waits_for_so_long_by_the_first_ranks_clock(late_us: int) -> None:
    """Script 18: clocks 1 ms apart at a deadline; the first rank's is everybody's."""
    made = group(**DELAYING, overlap_depth=0, prefill_delayer_max_delay_us=500)
    busy(made)
    made.clock(10_000)
    made.members[1].late_us = late_us
    made.arrive(0, asked(0))
    offer(made)
    deliver(made)
    assert made.marks["prompts waited (mixed)"] == 2
    made.clock(499)
    offer(made)
    deliver(made)
    assert made.marks["prompts waited (mixed)"] == 4
    made.clock(1)
    offer(made)
    assert modes(made) == ["extend", "mixed"]
    assert made.marks["prompts went ahead (spent)"] == 2
    made.settle()
    made.replay()


def test_rank_that_uses_little_of_its_pool_does_not_wait() -> None:
    made = group(**DELAYING, overlap_depth=0, prefill_delayer_token_usage_low_watermark=0.2)
    busy(made)
    made.arrive(0, asked(0))
    offer(made)
    assert modes(made) == ["extend", "mixed"]
    made.settle()


def test_prompt_never_waits_for_ranks_that_have_nothing_to_decode() -> None:
    """A delay that nobody uses would be for ever: nothing else happens that could end it."""
    made = group(ranks=4, **DELAYING)
    made.arrive(2, asked(0))
    offer(made)
    assert modes(made) == ["idle", "idle", "extend", "idle"]
    made.settle()


def test_prompts_go_along_with_one_that_is_split() -> None:
    made = group(**DELAYING, overlap_depth=0, chunked_prefill_size=4)
    busy(made)
    made.arrive(1, asked(1, prompt=10))
    made.arrive(0, asked(0))
    offer(made)
    assert modes(made) == ["extend", "extend"], "both have one"
    deliver(made)
    made.arrive(0, asked(2))
    offer(made)
    assert modes(made) == ["extend", "extend"]
    assert made.marks["prompts went ahead (along)"] == 2
    made.settle()


def test_prompts_wait_while_some_ranks_are_full() -> None:
    made = group(overlap_depth=0, prefill_full_skip_passes=2, max_running_requests=1)
    busy(made)
    made.arrive(0, asked(0))
    assert first_runs(made, 3) == ["idle", "idle", "extend"]
    made.settle()


@pytest.mark.parametrize(
    "pools",
    [HybridMemory(state_slots=2, checkpoint_tokens=2), HybridMemory(window_tokens=5, window_pages=6)],
    ids=["states", "windows"],
)
def test_rank_without_room_for_states_or_windows_is_full(pools: HybridMemory) -> None:
    """Places for requests are left on rank 1, and no slot or window page for one more than two."""
    made = group(overlap_depth=0, prefill_full_skip_passes=2, chunked_prefill_size=32, reserve="full", hybrid=pools)
    for key in range(3):
        made.arrive(1, asked(100 + key, max_new=20))
    offer(made)
    deliver(made)
    assert made.members[1].engine.active == 2
    made.arrive(0, asked(0))
    assert first_runs(made, 3) == ["idle", "idle", "extend"]
    assert made.marks["prompts waited (full)"] == 4
    made.settle()
    made.replay()


def test_rank_that_uses_much_of_one_pool_is_not_starved() -> None:
    """As SGLang, which takes the fullest of its pools: of slots three quarters are taken, of pages a few."""
    low = {**DELAYING, "prefill_delayer_token_usage_low_watermark": 0.5}
    for slots, situation in ((4, "mixed"), (16, "starved")):
        pools = HybridMemory(state_slots=slots, checkpoint_tokens=2)
        made = group(**low, overlap_depth=0, chunked_prefill_size=8, pages=64, hybrid=pools, radix_cache=False)
        busy(made)
        for key in range(3):
            made.arrive(0, asked(key, max_new=20))
        offer(made)
        deliver(made)
        made.arrive(0, asked(9))
        made.marks.clear()
        offer(made)
        word = "waited" if situation == "mixed" else "went ahead"
        assert made.marks[f"prompts {word} ({situation})"] == 2, (slots, +made.marks)
        made.settle()


def test_wait_begins_anew_when_whoever_waited_has_left() -> None:
    made = group(**DELAYING, overlap_depth=0)
    busy(made)
    made.arrive(0, asked(0))
    for _ in range(2):
        offer(made)
        deliver(made)
    assert [member.rounds.delay.passes for member in made.members] == [2, 2]
    made.cancel(0, 0)
    offer(made)
    deliver(made)
    assert [member.rounds.delay.passes for member in made.members] == [0, 0]
    made.settle()


# -------------------------------------------------------------------------------------------------- in pipeline stages

STAGES: dict[str, Any] = {"pp_size": 2, "overlap_depth": 0}


def flying(made: RankGroup) -> list[list[tuple[int, str]]]:
    """What each rank has in flight: microbatch and mode."""
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
    """Who proposed for the microbatch that it was offered would meet other ranks in another one's pass."""
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


def test_microbatch_in_which_nobody_has_anything_is_passed_over() -> None:
    made = group(**STAGES)
    made.arrive(1, asked(0, max_new=3))
    offer(made)
    deliver(made)
    offer(made)
    assert flying(made) == [[], []], "microbatch 1: nobody proposes a token"
    offer(made)
    assert flying(made) == [[(0, "idle")], [(0, "decode")]]
    made.settle()
    assert len(made.passes) == 3


def test_prompts_wait_for_so_many_passes_of_their_microbatch() -> None:
    """One table for all would be set back by a microbatch that is full: nobody can extend there, which ends waits."""
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
    """`prefill_full_skip_passes`: in microbatch 1 nobody is full, in microbatch 0 rank 1 is, though it may run more."""
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


# --------------------------------------------------------------------------------------------- where others have broken


@pytest.mark.parametrize("early", [0, 1])
def test_result_that_one_rank_sees_a_poll_earlier_changes_nothing(early: int) -> None:
    """Script 18 (SG#27164): equal plans, and nobody enters a collective that the others do not."""
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
def test_rank_that_raises_leaves_nobody_in_a_collective(proposed: int) -> None:
    """Script 18: rank 1 meets something impossible. Either all launch a round, or none does."""
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
    """VL#43547: a rank with requests and nothing to run, here for want of pages, returned early."""
    made = group(overlap_depth=0, pages=4, max_running_requests=2, reserve="full")
    made.arrive(0, asked(0, prompt=4, max_new=4))
    made.arrive(1, asked(1, prompt=4, max_new=2))
    made.arrive(1, asked(2, prompt=6, max_new=2))
    made.settle()
    assert all(made.answers[key].reason == "length" for key in range(3))


def test_a13_every_rank_prefills_in_the_first_pass() -> None:
    """SG#25741: only one rank did, for the length of whole prompts was held against the budget of all."""
    made = group(ranks=4, pages=128, chunked_prefill_size=16, max_prefill_tokens=32)
    for rank in range(4):
        made.arrive(rank, asked(rank, prompt=60))
    offer(made)
    assert modes(made) == ["extend"] * 4
    assert made.passes[0].tokens == (16,) * 4
    made.settle()


@pytest.mark.parametrize("moment", ["before the proposal", "before the agreement"])
def test_written_pages_come_back_though_nobody_arrives(moment: str) -> None:
    """Script 14: a write locks pages, and a decode goes on to the edge of the pool; the acknowledgement frees them."""
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


# ---------------------------------------------------------------------------------------------------------- equivalence


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_answers_are_those_of_one_plain_engine(ranks: int, depth: int) -> None:
    """DP x overlap: equal tokens and reasons, whatever runs beside a request, and whether its prompt had to wait."""
    rng = random.Random(10 * ranks + depth)
    requests = [
        Asked(
            key,
            tuple(range(50 * (key % 3), 50 * (key % 3) + rng.randint(1, 14))),
            rng.randint(1, 9),
            stops=tuple(rng.sample(range(9), rng.choice([0, 1]))),
        )
        for key in range(16)
    ]
    settings = {"overlap_depth": depth, "chunked_prefill_size": 6, "pages": 24, "retract_every": 5}
    staged = {"pp_size": 2 + ranks % 4 // 2, "pp_max_micro_batch_size": 2, "batching": "mixed", **DELAYING}
    for more in (DELAYING, {"overlap_consecutive_prefills": False, "batching": "mixed"}, staged):
        together = {**SMALL, **settings, **more}
        plain = {name: value for name, value in together.items() if "delayer" not in name and "pp_" not in name}
        expected = serve(SchedConfig(**plain), requests).answers
        made = group(ranks, restores=False, **{**settings, **more})
        for number, one in enumerate(requests):
            made.arrive(rng.randrange(ranks), one)
            if number % 3 == 0:
                made.turn()
        made.settle()
        assert made.answers == expected == {one.key: one.answer for one in requests}
        made.replay()


WINDOWS = HybridMemory(window_tokens=5, window_pages=12)
STATES = HybridMemory(state_slots=5, checkpoint_tokens=2)
BOTH = HybridMemory(window_tokens=5, window_pages=12, state_slots=5, checkpoint_tokens=2)


@pytest.mark.parametrize("pools", [WINDOWS, STATES, BOTH], ids=["windows", "states", "both"])
@pytest.mark.parametrize(
    "more", [{}, {"overlap_depth": 2, **DELAYING}, {"overlap_consecutive_prefills": False}], ids=str
)
def test_answers_beside_pools_of_their_own_are_those_of_one_plain_engine(
    pools: HybridMemory, more: dict[str, Any]
) -> None:
    """Ranks x windows and states x overlap, from snapshots between proposal and launch."""
    rng = random.Random(7)
    made = group(3, **{"pages": 24, "retract_every": 5, "chunked_prefill_size": 6, "hybrid": pools, **more})
    for key in range(18):
        made.arrive(rng.randrange(3), Asked(key, tuple(range(50 * (key % 3), 50 * (key % 3) + rng.randint(1, 14))), 7))
        for _ in range(4):
            made.do_something(rng)
    made.settle(rng)
    for member in made.members:
        assert all(made.answers[one.key] == one.answer for one in member.asked)
    made.replay()


@pytest.mark.parametrize("depth", [0, 2])
def test_answers_under_grammars_are_those_of_one_plain_engine(depth: int) -> None:
    """Ranks x jump-forward x overlap: equal tokens and reasons."""
    rng = random.Random(depth)
    made = group(3, restores=False, overlap_depth=depth, pages=24, retract_every=5, chunked_prefill_size=6, **JUMPING)
    ends: dict[int, int | None] = {}
    for key in range(14):
        ends[key] = rng.choice([None, 2, 9])
        one = asked(key, prompt=rng.randint(1, 12), max_new=rng.randint(1, 9))
        made.arrive(rng.randrange(3), one, grammar=f"g{key % 3}", ends=ends[key])
        for _ in range(4):
            made.do_something(rng)
    made.settle(rng)
    for member in made.members:
        for one in member.asked:
            stop = min(one.max_new, ends[one.key] or one.max_new)
            reason = "grammar" if stop == ends[one.key] else "length"
            assert made.answers[one.key] == Answer(reason, one.answer.tokens[:stop])
    made.replay()


# ----------------------------------------------------------------------------------------------------- random histories


@pytest.mark.parametrize("first", [0, 40, 80])
def test_random_histories_with_faults(first: int) -> None:
    for seed in range(first, first + 3):
        made = run_history(seed, steps=200)
        made.replay()


@pytest.mark.parametrize("stages", [{}, {"pp_size": 2, "pp_max_micro_batch_size": 1}])
def test_history_is_the_same_from_snapshots(stages: dict[str, int]) -> None:
    """Every engine is dumped and restored before every event, with proposals under way."""
    made = group(ranks=3, **DELAYING, overlap_depth=1, **stages)
    rng = random.Random(5)
    for key in range(12):
        made.arrive(rng.randrange(3), asked(key, prompt=1 + key, max_new=1 + key % 5))
        for _ in range(8):
            made.do_something(rng)
    made.settle(rng)
    made.replay()


# --------------------------------------------------------------------------------------------------------- planted bugs


def idle_rank_returns_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has nothing to run does not propose (VL#43547)."""
    propose = Rounds._propose

    def early(self: Rounds, engine: Engine, step: Any, *, wants: bool) -> None:
        if self.held is not None or wants or engine.in_flight:
            propose(self, engine, step, wants=wants)

    monkeypatch.setattr(Rounds, "_propose", early)


def own_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank passes over the microbatch in which it has nothing, whatever the others have there (VL#43547)."""
    fold = Rounds._fold

    def on_its_own(self: Rounds, engine: Engine, event: RanksAgreed, step: Any) -> bool:
        found_nothing = fold(self, engine, event, step)
        if engine.microbatches.several and not engine.has_work(self.slot):
            self.slot = (self.slot + 1) % self.slots
        return found_nothing

    monkeypatch.setattr(Rounds, "_fold", on_its_own)


def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank asks its own clock how long prompts have waited."""
    decide = Rounds._decide

    def by_own_clock(self: Rounds, engine: Engine, event: RanksAgreed, step: Any) -> bool:
        own = tuple(msgspec.structs.replace(one, time_us=engine.now_us) for one in event.wishes)
        return decide(self, engine, msgspec.structs.replace(event, wishes=own), step)

    monkeypatch.setattr(Rounds, "_decide", by_own_clock)


def own_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap is turned off by what this rank does, not by what any does (SG#20853)."""

    def by_own(self: Rounds, engine: Engine) -> bool:
        last = engine.in_flight[-1].plan if engine.in_flight else None
        if not engine.config.overlap_consecutive_prefills and last is not None:
            self.extended = last.extend_rows > 0
        return asks(self, engine)

    asks = Rounds._asks
    monkeypatch.setattr(Rounds, "_asks", by_own)


def delay_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait though nobody decodes (SG#35241)."""
    judge = data_parallel.situation_of

    def never_idle(config: SchedConfig, delay: Delay, counts: tuple[Counts, ...], wishes: tuple[Wish, ...]) -> Any:
        said = judge(config, delay, counts, wishes)
        return "mixed" if said == "idle" else said

    monkeypatch.setattr(data_parallel, "situation_of", never_idle)


@pytest.mark.parametrize("plant", [idle_rank_returns_early, own_branch, own_turn, delay_without_end])
def test_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr("tests.support.rank_group.ROUNDS_MAX", 300)
    with pytest.raises((AssertionError, InvariantError, ContractError)):
        campaign(60)


def test_planted_clock_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own_clock(monkeypatch)
    with pytest.raises(AssertionError, match="S28"):
        test_prompt_waits_for_so_long_by_the_first_ranks_clock(1_000)


def campaign(seeds: int) -> None:
    for seed in range(seeds):
        run_history(seed, steps=200)


def test_steps_of_a_round_name_every_launch() -> None:
    """A LaneReady never launches on a rank; only what all agreed on does."""
    made = group()
    made.arrive(0, asked(0))
    step = made.members[0].engine.step(LaneReady(0))
    assert [type(command) for command in step.commands] == [ProposeBatch]
    agreed = RanksAgreed(5, 0, (step.commands[0].counts, (0, 0, 0, 1)))  # type: ignore[union-attr]
    assert [type(command) for command in made.members[0].engine.step(agreed).commands] == [LaunchBatch]
