"""The overload campaign in a minute: everything that it looks at, at sizes at which times say little."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from tests.campaigns import hostile  # noqa: E402
from tests.campaigns.overload import SHORT, overload  # noqa: E402


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of clients that drop
def test_an_overloaded_server_stays_well(tmp_path: Path) -> None:
    assert overload(SHORT, tmp_path) == []


def test_what_is_sent_follows_from_the_seed() -> None:
    for make in (hostile.body, hostile.http):
        assert make(random.Random(1)) == make(random.Random(1)) != make(random.Random(2))
