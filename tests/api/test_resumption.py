"""Every process of a server is killed below clients that come back: a short `make resume-campaign`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from tests.support.returning import KINDS, campaign, supervised  # noqa: E402


@pytest.mark.parametrize("engines", [1, 2])
def test_no_answer_is_lost_by_kills_of_every_process(engines: int, tmp_path: Path) -> None:
    seed, kills = random.SystemRandom().randrange(2**31), 12
    server = supervised(tmp_path, dp=engines)
    try:
        outcome = campaign(server, seed=seed, kills=kills, streams=12, weights=(1,) * len(KINDS))
    finally:
        server.server.end()
    again = f"python -m tests.campaigns.resumption --dp {engines} --seed {seed} --kills {kills} --streams 12"
    told = f"{again}\n{outcome.text()}"
    assert not outcome.tally.faults, told
    assert outcome.kills.total() == kills, told
    assert outcome.tally.taken_up, told
