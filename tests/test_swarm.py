"""A short campaign with fresh seeds, and the proof that planted bugs are found. The long one is `make swarm`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from lockstep.core.contract.config import Batching, SchedConfig
from lockstep.core.contract.events import Drain
from tests import swarm
from tests.support.driver.actions import CONTROLS
from tests.support.driver.run import run_actions
from tests.support.plants import PLANTS
from tests.swarm import (
    ALL_PLANTS,
    Tally,
    campaign,
    commit,
    history,
    history_by_token,
    hunt,
    run_seeds,
    seeds_shown,
    stored,
)

SECONDS = 25.0
SEEDS_MAX = 1000  # histories in which a planted bug must show; most need fewer than twenty
WITHIN_BOUNDS = (
    283349191151,  # a resumed request is charged with its whole output, so admission pauses though its rest is short
    495835177122,  # prompts are cut to two tokens, so the output that is computed again outweighs them
    190447747842,  # prompts have one to three tokens by chance, and the output of two retractions outweighs them
    190447749789,  # a restart voids a load that has lasted too long, and the request may wait for another one
    757154242297,  # drafts hold pages that the reserve counts again until their results
    639727806824,  # the drafts of a pass are not charged beside the reserve of `ratio`
    1428475001,  # nor are they while the last tokens of a request are drafts
    864065747943,  # pages that a session yields to a chunk are in the budget of the same extend
    353135318507,  # pages of duplicates come free with a result, and admission goes on
)
"""Histories whose waits once were beyond the bounds. They are those that docs/scheduling.md prescribes."""


def test_a_fresh_campaign_breaks_nothing() -> None:
    first = time.time_ns() % 10**12
    found = campaign(SECONDS, first, processes=2, quiet=True)
    failure = found.failure
    assert failure is None, f"{failure[1]}\nagain: python tests/swarm.py --seed {failure[0]} (commit {commit()})"
    assert found.steps > 1000
    assert found.marks["retracted (pages)"], "no history ran out of pages: the campaign is too tame"


def test_a_campaign_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts find what one campaign over the same seeds finds, and the file of results names their commits."""
    monkeypatch.setattr(swarm, "SEEDS_PER_TASK", 1)
    monkeypatch.setattr(swarm, "TASKS_AHEAD", 2)
    path, tally = tmp_path / "results.json", Tally()
    for number in (1, 2):
        monkeypatch.setattr(swarm, "commit", lambda number=number: f"commit {number}")
        campaign(None, 7, 1, steps=tally.steps + 1, quiet=True, tally=tally, results=path)
        first, tally = stored(path)
        assert first == 7
    whole = run_seeds(7, tally.seeds)
    assert (tally.steps, tally.marks, tally.worst) == (whole.steps, whole.marks, whole.worst)
    assert list(tally.parts) == ["commit 1", "commit 2"]
    assert sum(tally.parts.values()) == tally.steps


@pytest.mark.parametrize("seed", WITHIN_BOUNDS)
def test_a_prescribed_wait_is_within_bounds(seed: int) -> None:
    run_actions(*history_by_token(seed))


def test_a_session_that_is_refused_as_another_order_ends_was_not_opened() -> None:
    """The session of that name times out in the same step, and was idle all the time."""
    grammar = {"grammar": "g1", "grammar_ends": 4}
    opened = ("session_open", 1, 60, 30, False)
    drain = ("control", CONTROLS.index(Drain()))
    config = SchedConfig(page_size=1, pages=14, max_sessions=2, grammar_timeout_us=30)
    marks = run_actions(config, [("arrive", 1, 5, 1, grammar), opened, ("wait", 25), drain, ("wait", 8), opened]).marks
    assert {"OpenSession refused", "Drain done", "session closed (timeout)"} <= marks


@pytest.mark.parametrize("plant", sorted(ALL_PLANTS))
def test_a_planted_bug_is_found(plant: str) -> None:
    """The history that has shown it last is tried first; where decisions have changed, others are."""
    shown = seeds_shown().get(plant)
    found = hunt(plant, first=0, most=SEEDS_MAX, shown=() if shown is None else (shown,))
    assert found is not None, f"{plant} survived"
    assert f"{plant}.<locals>" not in found.error, f"not the bug was found, its planting fails: {found.error}"


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_bug_names_its_public_reference(plant: str) -> None:
    assert re.search(r"\((SG|VL|MS|NV|BI|VA)#\w+\)", PLANTS[plant].__doc__ or "")


@pytest.mark.parametrize("batching", get_args(Batching))
def test_no_request_is_retracted_for_pages_where_all_is_reserved(batching: Batching) -> None:
    for seed in range(12):
        config, actions = history(seed)
        driver = run_actions(replace(config, reserve="full", batching=batching, truncation_align_size=None), actions)
        assert "retracted (pages)" not in driver.marks


def test_a_seed_is_one_history() -> None:
    assert history(7) == history(7)
    assert history(7) != history(8)
