"""The prefill delayer of data-parallel ranks: its table, its triggers, and when prompts are delayed.

Every rank's invariants are checked after every event (`tests/support/rank_group.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import (
    RanksAgreed,
    Wish,
)
from lockstep.core.features.data_parallel import DELAYER, SITUATIONS, Counts, Delay, Rounds, situation_of
from tests.support.rank_group import RankGroup
from tests.support.small_ranks import (
    DELAYING,
    asked,
    deliver,
    first_runs,
    group,
    modes,
    offer,
)

# ---------------------------------------------------------------------------------------------------------- the delayer


def test_table_of_the_delayer_has_every_situation() -> None:
    for (state, situation), following in DELAYER.items():
        assert state in ("free", "delaying")
        assert (following == "delaying") == (situation in ("mixed", "full", "slots", "queue"))
    assert {situation for _, situation in DELAYER} == set(SITUATIONS)
    assert {key for key in SITUATIONS if ("free", key) not in DELAYER} == {"spent"}, (
        "a rank that waits for nothing is not done"
    )


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
        ([(0, 0, 0), (0, 1, 0)], 3, False, 0, "all"),  # no rank has extended yet
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


def test_slots_trigger_counts_state_slots() -> None:
    # Of 64 places 61 are free, but with 4 state slots one more request can start, and recent extends took in two.
    pools = HybridMemory(state_slots=4, checkpoint_tokens=2)
    config = SchedConfig(
        page_size=2, dp_ranks=2, max_running_requests=64, prefill_delayer_slots=True, hybrid=pools, **DELAYING
    )
    reports = (wish(wants=True, running=3), wish(wants=True, running=1))
    counts = ((*NOTHING, 0, 1, 2), (*NOTHING, 0, 1, 2))
    assert situation_of(config, Delay(), counts, reports) == "slots"


def test_queue_trigger_waits_for_a_share_of_those_that_run() -> None:
    config = SchedConfig(dp_ranks=2, prefill_delayer_queue_min_ratio=0.5, **DELAYING)
    said = (wish(wants=True, running=10), wish(wants=True, running=4))
    for waiting, taken, situation in ((4, 8, "queue"), (5, 8, "all"), (3, 3, "all"), (2, 3, "queue")):
        counts = ((*NOTHING, 0, waiting, taken), (*NOTHING, 0, 1, 0))
        assert situation_of(config, Delay(), counts, said) == situation


def test_prompts_wait_for_more_of_their_kind() -> None:
    """With one place left and extends that took in two, no rank extends until another place is free."""
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
    """Script 18: clocks 1 ms apart at a deadline; the first rank's clock counts for all."""
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
    """A delay that no rank ends would last for ever: no other event could end it."""
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
    """Rank 1 has free places for requests, and slots and window pages for only two more."""
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
    """As in SGLang, the fullest pool counts: three quarters of the slots are taken, and a few of the pages."""
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


def test_wait_begins_anew_when_the_waiting_request_has_left() -> None:
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


# --------------------------------------------------------------------------------------------------------- planted bugs


def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank measures the wait of prompts with its own clock."""
    decide = Rounds._decide

    def by_own_clock(self: Rounds, event: RanksAgreed, step: Any) -> bool:
        own = tuple(msgspec.structs.replace(one, time_us=self._scheduler.now_us) for one in event.wishes)
        return decide(self, msgspec.structs.replace(event, wishes=own), step)

    monkeypatch.setattr(Rounds, "_decide", by_own_clock)


def test_planted_clock_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own_clock(monkeypatch)
    with pytest.raises(AssertionError, match=r"S28|L5"):
        test_prompt_waits_for_so_long_by_the_first_ranks_clock(1_000)
