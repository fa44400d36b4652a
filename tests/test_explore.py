"""Small worlds are explored whole, and planted bugs are found there. All of them: `make explore`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.core.journal import snapshot
from tests.explore import explore, main
from tests.support.driver.driver import Driver
from tests.support.explorer import play, search
from tests.support.explorer.canonical import canonical
from tests.support.explorer.catalogue import FEATURES, refused, world
from tests.support.explorer.copies import restore, save
from tests.support.explorer.group_catalogue import FLEETS, RANKS, group_world
from tests.support.explorer.play import AnyWorld, play_of
from tests.support.explorer.search import Explorer
from tests.support.explorer.world import Left, moves
from tests.support.plants import OBLIGATIONS

TRANSITIONS_MAX = 1500  # of one world here
GROUP_TRANSITIONS_MAX = 150  # of one world of several engines here
SHOWN_BY = {
    "cancel_of_a_split_prompt_lost": ("chunks", "cancel"),
    "evicts_the_whole_allocation": ("retraction", "three requests"),
    "fenced_pages_not_counted": ("retraction", "three requests", "cancel"),
    "min_tokens_ignored": ("least output",),
    "no_preemption_for_a_place": ("priority preemption",),
    "pause_leaves_a_split_prompt": ("chunks", "pause and retract"),
    "prefetch_not_cancelled": ("cancel", "storage"),
    "retracts_for_drafts": ("retraction", "drafts"),
}
SHOWN_BY_GROUPS = {
    "extends_of_this_rank_only": "ranks: no consecutive extends",
    "first_token_ends_too_early": "fleet: least output",
    "kv_of_other_weights_accepted": "fleet: new weights",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_no_interleaving_breaks_anything(feature: str) -> None:
    found = explore(world((feature,), 1), transitions_max=TRANSITIONS_MAX)
    assert not found.failure, f'python tests/explore.py --world "{found.world.name}": {found.failure}'


@pytest.mark.parametrize("name", [*(f"fleet: {one}" for one in FLEETS), *(f"ranks: {one}" for one in RANKS)])
def test_no_interleaving_of_several_engines_breaks_anything(name: str) -> None:
    found = explore(group_world(name, 0), transitions_max=GROUP_TRANSITIONS_MAX)
    assert not found.failure, f'python tests/explore.py --world "{found.world.name}": {found.failure}'


@pytest.mark.parametrize("world_of", [lambda: group_world("fleet: plain", 1), lambda: group_world("ranks: plain", 0)])
def test_restored_engines_go_on_as_those_that_were_saved(world_of: Callable[[], AnyWorld]) -> None:
    """Every third move is tried and taken back, as in the test of one engine."""
    tried, plain = play_of(world_of()), play_of(world_of())
    left = tried.left()
    for number in range(60):
        possible = list(tried.moves(left))
        if number % 3 == 0:
            saved = tried.save()
            tried.do(possible[0].action)
            tried.restore(saved)
        move = possible[number % len(possible)]
        left = left.after(move)
        tried.do(move.action)
        plain.do(move.action)
        assert tried.key(left) == plain.key(left)


@pytest.mark.parametrize(("plant", "name"), sorted(SHOWN_BY_GROUPS.items()))
def test_a_planted_bug_is_found_among_several_engines(plant: str, name: str) -> None:
    failures = [explore(group_world(name, depth), plant=plant).failure for depth in (0, 1)]
    assert any(one and "futures" not in one for one in failures), f"{plant} survived: {failures}"


@pytest.mark.parametrize("plant", sorted(OBLIGATIONS))
def test_a_planted_bug_is_found(plant: str) -> None:
    failures = [explore(world(SHOWN_BY[plant], depth), plant=plant).failure for depth in (1, 2)]
    assert any(failures), f"{plant} survived"


def test_states_that_are_taken_for_one_have_the_same_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "COMPARED_SHARE", 1)
    found = Explorer(world(("retraction", "cancel"), 1)).run(transitions_max=TRANSITIONS_MAX)
    assert not found.failure


def test_a_canonical_form_that_forgets_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(driver: Driver, left: Left) -> bytes:
        state = canonical(driver.engine)
        return repr((state["waiting"], len(state["in_flight"]), left)).encode()

    monkeypatch.setattr(search, "COMPARED_SHARE", 1)
    monkeypatch.setattr(play, "key", forgetful)
    found = Explorer(world(("retraction",), 1)).run()
    assert "different futures" in found.failure


def test_a_restored_driver_goes_on_as_the_one_that_was_saved() -> None:
    """Every third move is tried and taken back; the decisions behind it are those of a driver that never tried it."""
    one = world(("storage", "cancel"), 1)
    tried, plain, left = Driver(one.config), Driver(one.config), Left.all_of(one)
    for number in range(40):
        possible = list(moves(one, tried, left))
        if number % 3 == 0:
            saved = save(tried)
            tried.do(possible[0].action)
            restore(tried, saved)
        move = possible[number % len(possible)]
        left = left.after(move)
        tried.do(move.action)
        plain.do(move.action)
        assert snapshot.dump(tried.engine) == snapshot.dump(plain.engine)
    tried.settle()


def test_a_host_that_never_answers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.explorer.world._answers", lambda driver: iter(()))
    found = explore(world(("grammar",), 0))
    assert "no idle state is reached" in found.failure
    assert found.actions[0][0] == "arrive"


def test_refused_pairs_have_reasons() -> None:
    assert all(refused().values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drafts + canccel, depth 1", "got feature `canccel`; features are plain, cancel, "),
        ("drafts", "`world`: depth must be one of (0, 1, 2), got ``"),
        ("same-step sharing + no radix cache, depth 1", "`same_step_sharing` is on, but `radix_cache` is off"),
    ],
)
def test_a_wrong_world_is_one_error(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--world", name])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
