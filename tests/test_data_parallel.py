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

from lockstep.core import data_parallel, snapshot
from lockstep.core.commands import LaunchBatch, ProposeBatch, SampleBatch
from lockstep.core.config import CacheTiers, SchedConfig, refuse_simulated_only
from lockstep.core.data_parallel import DELAYER, SITUATIONS, Counts, Delay, Rounds, padding_of, situation_of
from lockstep.core.engine import Engine
from lockstep.core.errors import ConfigError, ContractError, InvariantError
from lockstep.core.events import (
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
        ({"dp_ranks": 2, "decode_steps_per_launch": 2}, "ranks agree on every pass"),
        ({"dp_ranks": 2, "jump_forward_tokens": 4}, "not part of what ranks tell each other yet"),
        ({"dp_ranks": 2, "role": "prefill"}, "do not hand requests over yet"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedConfig(**settings)


@pytest.mark.parametrize("name", ["dp_ranks", "prefill_delayer", "prefill_full_skip_passes"])
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


# ---------------------------------------------------------------------------------------------------------- the delayer


def test_table_of_the_delayer_knows_every_situation() -> None:
    for (state, situation), following in DELAYER.items():
        assert state in ("free", "delaying")
        assert (following == "delaying") == (situation in ("mixed", "full"))
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
    seen = []
    for _ in range(4):
        offer(made)
        seen.append(modes(made)[0])
        deliver(made)
    assert seen == ["idle", "idle", "idle", "extend"]
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
    seen = []
    for _ in range(3):
        offer(made)
        seen.append(modes(made)[0])
        deliver(made)
    assert seen == ["idle", "idle", "extend"]
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
    for more in (DELAYING, {"overlap_consecutive_prefills": False, "batching": "mixed"}):
        plain = {name: value for name, value in {**SMALL, **settings, **more}.items() if "delayer" not in name}
        expected = serve(SchedConfig(**plain), requests).answers
        made = group(ranks, restores=False, **{**settings, **more})
        for number, one in enumerate(requests):
            made.arrive(rng.randrange(ranks), one)
            if number % 3 == 0:
                made.turn()
        made.settle()
        assert made.answers == expected == {one.key: one.answer for one in requests}
        made.replay()


# ----------------------------------------------------------------------------------------------------- random histories


@pytest.mark.parametrize("first", [0, 40, 80])
def test_random_histories_with_faults(first: int) -> None:
    for seed in range(first, first + 3):
        made = run_history(seed, steps=200)
        made.replay()


def test_history_is_the_same_from_snapshots() -> None:
    """Every engine is dumped and restored before every event, with proposals under way."""
    made = group(ranks=3, **DELAYING, overlap_depth=1)
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


@pytest.mark.parametrize("plant", [idle_rank_returns_early, own_branch, delay_without_end])
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
