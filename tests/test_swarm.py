"""A short campaign with fresh seeds, and the proof that the detectors detect. The long one is `make swarm`."""

from __future__ import annotations

import time

import pytest

from tests.support.plants import PLANTS
from tests.swarm import campaign, commit, history, run_seeds

SECONDS = 20.0


def test_a_fresh_campaign_breaks_nothing() -> None:
    first = time.time_ns() % 10**12
    steps, marks, failure = campaign(SECONDS, first, processes=2, quiet=True)
    assert failure is None, f"{failure[1]}\nagain: python tests/swarm.py --seed {failure[0]} (commit {commit()})"
    assert steps > 1000
    assert marks["retracted (pages)"], "no history ran out of pages: the campaign is too tame"


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_bug_is_found_within_seconds(plant: str) -> None:
    start = time.monotonic()
    with PLANTS[plant]():
        for seed in range(1_000):
            _, _, failure = run_seeds(seed, 1)
            if failure is not None:
                break
    assert failure is not None, f"{plant} survived 1,000 seeds"
    assert time.monotonic() - start < 60


def test_a_seed_is_one_history() -> None:
    assert history(7) == history(7)
    assert history(7) != history(8)
