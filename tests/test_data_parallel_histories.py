"""Data-parallel ranks: answers equal to those of one engine, random histories with faults, and planted bugs.

Every rank's invariants are checked after every event, every KV cell that is read against its prefix, and every decision
of all ranks against that of the others (`tests/support/rank_group.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from lockstep.core.contract.commands import LaunchBatch, ProposeBatch
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ContractError, InvariantError
from lockstep.core.contract.events import (
    LaneReady,
    RanksAgreed,
    Wish,
)
from lockstep.core.features import data_parallel
from lockstep.core.features.data_parallel import Counts, Delay, Rounds
from tests.support.rank_group import run_history
from tests.support.served import Answer, Asked, serve
from tests.support.small_ranks import (
    DELAYING,
    JUMPING,
    SMALL,
    asked,
    campaign,
    group,
)

# ---------------------------------------------------------------------------------------------------------- equivalence


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_answers_are_those_of_one_plain_engine(ranks: int, depth: int) -> None:
    """DP x overlap: equal tokens and reasons, whatever runs beside a request, also if its prompt had to wait."""
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
    """Every engine is dumped and restored before every event, with open proposals."""
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
    """A rank with nothing to run does not propose (VL#43547)."""
    propose = Rounds._propose

    def early(self: Rounds, step: Any, *, wants: bool) -> None:
        if self.held is not None or wants or self._scheduler.in_flight:
            propose(self, step, wants=wants)

    monkeypatch.setattr(Rounds, "_propose", early)


def own_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank skips the microbatch in which it has no work, whatever the others have there (VL#43547)."""
    fold = Rounds._fold

    def on_its_own(self: Rounds, event: RanksAgreed, step: Any) -> bool:
        engine: Any = self._scheduler
        found_nothing = fold(self, event, step)
        if engine.microbatches.several and not engine.has_work(self.slot):
            self.slot = (self.slot + 1) % self.slots
        return found_nothing

    monkeypatch.setattr(Rounds, "_fold", on_its_own)


def own_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap is turned off by the mode of this rank alone (SG#20853)."""

    def by_own(self: Rounds) -> bool:
        engine = self._scheduler
        last = engine.in_flight[-1].plan if engine.in_flight else None
        if not engine.config.overlap_consecutive_prefills and last is not None:
            self.extended = last.extend_rows > 0
        return reports_first(self)

    reports_first = Rounds._reports_first
    monkeypatch.setattr(Rounds, "_reports_first", by_own)


def delay_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait though no rank decodes (SG#35241)."""
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


def test_steps_of_a_round_name_every_launch() -> None:
    """A LaneReady never launches on a rank; only an agreement of all does."""
    made = group()
    made.arrive(0, asked(0))
    step = made.members[0].engine.step(LaneReady(0))
    assert [type(command) for command in step.commands] == [ProposeBatch]
    agreed = RanksAgreed(5, 0, (step.commands[0].counts, (0, 0, 0, 1)))  # type: ignore[union-attr]
    assert [type(command) for command in made.members[0].engine.step(agreed).commands] == [LaunchBatch]
