"""The contract as a machine of its own: explored whole in small bounds, each rule needed, and the product within it.

All of it: `make explore ARGS="--contract --histories 1000"`.
"""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lockstep.core.contract.config import SchedConfig
from lockstep.host.rank_agreement import RankAgreement
from tests.explore import main, run_histories
from tests.support.contract import histories
from tests.support.contract.engine_host import EngineHost
from tests.support.contract.handover_host import HandoverHost
from tests.support.contract.histories import RUNS, engine_config, ranks_config, transfer_configs
from tests.support.contract.machine import Forbidden
from tests.support.contract.play import ContractWorld
from tests.support.contract.rank_host import RankHost
from tests.support.contract.transfer_host import DECODE, PREFILL, TransferHost
from tests.support.contract.violations import VIOLATIONS, Violation, refusal_of
from tests.support.contract.worlds import MACHINES, NEEDED, OF_FORM, contract_world, contract_worlds
from tests.support.explorer.search import Explorer
from tests.support.served import Asked

TRANSITIONS_MAX = 5_000  # of one world here
LAX_TRANSITIONS_MAX = 25_000
seeds = st.integers(min_value=0, max_value=2**32)
small = st.integers(min_value=0, max_value=11)
sides = st.sampled_from([PREFILL, DECODE])
halves = st.sampled_from(["p", "d"])


# --------------------------------------------------------------------------------------------------- the machines alone


@pytest.mark.parametrize("world", list(contract_worlds()), ids=lambda world: world.name)
def test_no_step_that_the_contract_allows_is_unsafe(world: ContractWorld) -> None:
    found = Explorer(world).run(transitions_max=TRANSITIONS_MAX)
    assert not found.failure, f'python tests/explore.py --world "{world.name}": {found.failure}'
    assert found.states > 20


@pytest.mark.parametrize(
    ("kind", "without", "title"),
    [(kind, rule, title) for kind, table in NEEDED.items() for rule, title in table.items()],
)
def test_without_this_rule_something_is_lost_or_never_ends(kind: str, without: str, title: str) -> None:
    found = Explorer(contract_world(f"contract: {kind}, {title}", lax=without)).run(transitions_max=LAX_TRANSITIONS_MAX)
    assert found.failure, f"nothing is unsafe without: {MACHINES[kind].rules[without]}"
    assert "different futures" not in found.failure


def test_every_rule_is_needed_or_has_a_reason() -> None:
    for kind, machine in MACHINES.items():
        assert not NEEDED[kind].keys() & OF_FORM[kind].keys()
        assert NEEDED[kind].keys() | OF_FORM[kind].keys() == machine.rules.keys()


def test_a_rule_is_named_as_it_stands() -> None:
    with pytest.raises(ValueError, match="`lax` must name a rule, got `results`; the rules are ids rise, results once"):
        contract_world("contract: engine, plain", lax="results")


# ------------------------------------------------------------------------------------------------ the product within it


class EngineSteps(RuleBasedStateMachine):
    """Core, journal and recovery: any order of arrivals, cancels, slots, results, losses and crashes."""

    host: EngineHost | None = None

    @initialize(seed=seeds)
    def start(self, seed: int) -> None:
        self.folder = TemporaryDirectory()
        self.host = EngineHost(engine_config(random.Random(seed)), Path(self.folder.name))

    @rule(family=st.integers(0, 1), prompt=st.integers(1, 7), limit=st.integers(1, 8))
    def arrive(self, family: int, prompt: int, limit: int) -> None:
        assert self.host is not None
        self.host.arrive(family, prompt, limit)

    @rule(choice=small)
    def cancel(self, choice: int) -> None:
        assert self.host is not None
        self.host.cancel(choice)

    @rule(times=st.integers(1, 3))
    def slots(self, times: int) -> None:
        assert self.host is not None
        for _ in range(times):
            self.host.slot()

    @rule(stops=st.sampled_from([0, 0, 1, 2]), error=st.sampled_from([False, False, False, True]))
    def result(self, stops: int, error: bool) -> None:
        assert self.host is not None
        self.host.result(stops=stops, error=error)

    @rule(times=st.integers(2, 6))
    def run_a_while(self, times: int) -> None:
        assert self.host is not None
        for _ in range(times):
            self.host.slot()
            self.host.result()

    @rule()
    def lose(self) -> None:
        assert self.host is not None
        self.host.lose()

    @rule(performed=st.integers(-1, 3), torn=st.sampled_from([0, 1, 9]))
    def crash(self, performed: int, torn: int) -> None:
        assert self.host is not None
        self.host.crash(performed=performed, torn=torn)

    def teardown(self) -> None:
        if self.host is not None:
            try:
                self.host.settle()
            finally:
                self.host.close()
                self.folder.cleanup()


class TransferSteps(RuleBasedStateMachine):
    """A prefill and a decode engine: any order of what they and the network between them do."""

    host: TransferHost | None = None

    @initialize(seed=seeds)
    def start(self, seed: int) -> None:
        self.host = TransferHost(*transfer_configs(random.Random(seed)))

    def has(self, of: str) -> bool:
        return self.host is not None and bool(getattr(self.host, of))

    @rule(first=st.sampled_from([100, 200]), prompt=st.integers(1, 8), limit=st.integers(1, 4), stops=st.booleans())
    def arrive(self, first: int, prompt: int, limit: int, stops: bool) -> None:
        assert self.host is not None
        prompt_ids = tuple(range(first, first + prompt))
        self.host.arrive_in(Asked(len(self.host.wires), prompt_ids, limit, stops=(0,) if stops else ()))

    @precondition(lambda self: self.has("wires"))
    @rule(choice=small, side=sides)
    def cancel(self, choice: int, side: str) -> None:
        assert self.host is not None
        self.host.cancel(self.host.wires[choice % len(self.host.wires)], side)

    @rule(side=sides)
    def ready(self, side: str) -> None:
        assert self.host is not None
        self.host.ready(side)

    @rule(side=sides, error=st.sampled_from(["", "", "the device failed"]))
    def finish(self, side: str, error: str) -> None:
        assert self.host is not None
        self.host.finish(side, error)

    @precondition(lambda self: self.has("told"))
    @rule(choice=small)
    def tell(self, choice: int) -> None:
        assert self.host is not None
        self.host.tell(self.host.told[choice % len(self.host.told)])

    @precondition(lambda self: self.host is not None and self.host.movable())
    @rule(choice=small)
    def move(self, choice: int) -> None:
        assert self.host is not None
        movable = self.host.movable()
        self.host.move(movable[choice % len(movable)])

    @precondition(lambda self: self.has("stops"))
    @rule(choice=small)
    def stop(self, choice: int) -> None:
        assert self.host is not None
        self.host.stop(self.host.stops[choice % len(self.host.stops)])

    @rule(seed=seeds, times=st.integers(2, 12))
    def run_a_while(self, seed: int, times: int) -> None:
        assert self.host is not None
        rng = random.Random(seed)
        for _ in range(times):
            self.host.do_something(rng)

    @rule()
    def link_down(self) -> None:
        assert self.host is not None
        self.host.link_down(PREFILL, DECODE)

    @rule(side=sides)
    def restart(self, side: str) -> None:
        assert self.host is not None
        self.host.restart(side)

    def teardown(self) -> None:
        if self.host is not None:
            self.host.end_all()


class HandoverSteps(RuleBasedStateMachine):
    """The product's two sides of a handover: any order of frames, copies, results and broken links."""

    host: HandoverHost | None = None

    @initialize(seed=seeds)
    def start(self, seed: int) -> None:
        self.host = HandoverHost(*transfer_configs(random.Random(seed)))

    @rule(first=st.sampled_from([100, 200]), prompt=st.integers(1, 8), limit=st.integers(1, 4), stops=st.booleans())
    def arrive(self, first: int, prompt: int, limit: int, stops: bool) -> None:
        assert self.host is not None
        prompt_ids = tuple(range(first, first + prompt))
        self.host.arrive_in(Asked(len(self.host.asked), prompt_ids, limit, stops=(0,) if stops else ()))

    @rule(side=halves, choice=small)
    def cancel(self, side: str, choice: int) -> None:
        assert self.host is not None
        self.host.cancel(side, choice)

    @rule(side=halves)
    def slot(self, side: str) -> None:
        assert self.host is not None
        self.host.slot(side)

    @rule(side=halves, error=st.sampled_from([False, False, False, True]))
    def result(self, side: str, error: bool) -> None:
        assert self.host is not None
        self.host.result(side, error=error)

    @rule(choice=small)
    def deliver(self, choice: int) -> None:
        assert self.host is not None
        self.host.deliver(choice)

    @rule(side=halves)
    def copy(self, side: str) -> None:
        assert self.host is not None
        self.host.copy(side)

    @rule(side=halves)
    def take(self, side: str) -> None:
        assert self.host is not None
        self.host.take(side)

    @rule(seed=seeds, times=st.integers(4, 25))
    def run_a_while(self, seed: int, times: int) -> None:
        assert self.host is not None
        rng = random.Random(seed)
        for _ in range(times):
            self.host.do_something(rng)

    @rule(frames=st.integers(0, 3))
    def break_link(self, frames: int) -> None:
        assert self.host is not None
        self.host.break_link(frames)

    def teardown(self) -> None:
        if self.host is not None:
            self.host.settle()


class RankSteps(RuleBasedStateMachine):
    """Two or three ranks with the product's hub: any order of their turns and of messages."""

    host: RankHost | None = None

    @initialize(seed=seeds)
    def start(self, seed: int) -> None:
        self.host = RankHost(ranks_config(random.Random(seed)))

    def rank(self, choice: int) -> int:
        assert self.host is not None
        return choice % len(self.host.seats)

    @rule(choice=small, prompt=st.integers(1, 8), limit=st.integers(1, 5))
    def arrive(self, choice: int, prompt: int, limit: int) -> None:
        assert self.host is not None
        self.host.arrive(self.rank(choice), prompt, limit)

    @rule(choice=small)
    def cancel(self, choice: int) -> None:
        assert self.host is not None
        self.host.cancel(self.rank(choice), choice)

    @rule(choice=small)
    def turn(self, choice: int) -> None:
        assert self.host is not None
        self.host.turn(self.rank(choice))

    @rule(choice=small)
    def deliver(self, choice: int) -> None:
        assert self.host is not None
        self.host.deliver(choice)

    @rule(choice=small)
    def hear(self, choice: int) -> None:
        assert self.host is not None
        self.host.hear(self.rank(choice))

    @rule(choice=small, error=st.sampled_from([False, False, False, True]))
    def finish(self, choice: int, error: bool) -> None:
        assert self.host is not None
        self.host.finish(self.rank(choice), error=error)

    @rule(seed=seeds, times=st.integers(5, 20))
    def run_a_while(self, seed: int, times: int) -> None:
        assert self.host is not None
        rng = random.Random(seed)
        for _ in range(times):
            histories.step_ranks(self.host, rng)

    @rule()
    def restart(self) -> None:
        assert self.host is not None
        self.host.restart()

    def teardown(self) -> None:
        if self.host is not None:
            self.host.settle()


TestEngineSteps = EngineSteps.TestCase
TestEngineSteps.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTransferSteps = TransferSteps.TestCase
TestTransferSteps.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHandoverSteps = HandoverSteps.TestCase
TestHandoverSteps.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestRankSteps = RankSteps.TestCase
TestRankSteps.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


REACHED = {
    "engine": {
        "crashed",
        "crashed in a write",
        "crashed with commands left",
        "end sent again",
        "ended (cancelled)",
        "ended (error)",
        "ended (length)",
        "ended (stop)",
        "prefix of the cache",
        "retracted (pages)",
        "table of another row moved",
        "tokens sent again",
    },
    "transfers": {
        "d quarantined (abandoned)",
        "p quarantined (abandoned)",
        "read in quarantine",
        "written in quarantine",
        "d ready (done)",
        "d retracted (restart)",
        "p sending (part_given)",
    },
    "handover": {
        "d done",
        "d failed",
        "d link_down",
        "link_down behind another end",
        "p done",
        "part moved",
        "part passed over",
    },
    "ranks": {"cancelled between proposal and launch", "launched idle", "lost with a round open", "slept"},
}


@pytest.mark.parametrize("kind", RUNS)
def test_histories_by_seed_reach_what_they_are_for(kind: str, tmp_path: Path) -> None:
    missing = set(REACHED[kind])
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        missing -= RUNS[kind](seed, folder, None)
        if not missing:
            return
    raise AssertionError(f"never reached: {missing}")


@pytest.mark.parametrize("notes", [True, False])
def test_prompts_that_wait_for_other_ranks_are_not_forgotten(notes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt waits for other ranks, and the request that decodes beside it is cancelled: nothing runs in that round.

    Without `_note_delay` all hosts stop offering slots.
    """
    if not notes:
        monkeypatch.setattr(RankAgreement, "_note_delay", lambda agreement, step: None)
    delayer: dict[str, Any] = {"prefill_delayer": True, "prefill_delayer_max_delay_passes": 3}
    settings: dict[str, Any] = {"page_size": 2, "pages": 8, "context_tokens_max": 64, "overlap_depth": 1, **delayer}
    host = RankHost(SchedConfig(dp_ranks=2, dp_rank=0, **settings))
    host.arrive(0, 3, 4)
    while not all(seat.device for seat in host.seats):
        _exchange(host)
    host.arrive(0, 3, 2)
    for rank in (0, 1):
        host.turn(rank)
    for rank in (0, 1):
        host.finish(rank)
    host.cancel(0, 0)
    if notes:
        host.settle()
    else:
        with pytest.raises(AssertionError, match="not at rest"):
            host.settle()


def _exchange(host: RankHost) -> None:
    """Each rank offers a slot, and receives what all have agreed on."""
    for rank in (0, 1):
        host.turn(rank)
    while host.deliver(0):
        pass
    for rank in (0, 1):
        host.hear(rank)


# ------------------------------------------------------------------------------------------------- planted violations


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda one: f"{one.machine}: {one.side}: {one.what}")
def test_a_planted_violation_is_refused_by_its_rule(violation: Violation) -> None:
    refusal = refusal_of(violation)
    assert refusal is not None, f"survived: {violation.what}"
    assert refusal.rule in violation.rules, refusal
    assert refusal.by_core == violation.by_core, refusal


def test_an_impossible_fact_is_refused_by_core_and_machine(tmp_path: Path) -> None:
    host = EngineHost(engine_config(random.Random(0)), tmp_path)
    try:
        host.arrive(0, 3, 2)
        host.slot()
        host.perform_all()
        with pytest.raises(Forbidden, match="restart generation rises: 0"):
            host.restart(rise=0)
        assert "the core refuses" not in host.marks
        host.settle()
    finally:
        host.close()


def test_a_history_that_breaks_the_contract_is_printed_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(seed: int, folder: Path, twist: object) -> set[str]:
        raise Forbidden("results once", f"seed {seed}")

    monkeypatch.setitem(RUNS, "engine", broken)
    assert not run_histories(7, 1, jobs=1)
    assert "engine, seed 7: Forbidden: results once: seed 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--histories", "3"], "argument --histories: goes with --contract"),
        (["--contract", "--histories", "0"], "argument --histories: must be 1 or more, got 0"),
        (["--contract", "--plant", "double_free"], "--without leaves out a rule"),
        (["--without", "depth"], "name that with --world"),
        (["--world", "drafts, depth 1", "--without", "depth"], "`drafts, depth 1` is a world of the core"),
        (
            ["--world", "contract: ranks, none"],
            "`world` must name a world of the contract, got `contract: ranks, none`",
        ),
    ],
)
def test_a_wrong_command_is_one_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
