"""The overload campaign in a minute: all of its checks, at sizes that allow no conclusions on times."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from lockstep.api.endpoints.app import ROUTES  # noqa: E402
from tests.campaigns import hostile  # noqa: E402
from tests.campaigns.overload import SHORT, overload  # noqa: E402


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of clients that disconnect
def test_an_overloaded_server_stays_well(tmp_path: Path) -> None:
    assert overload(SHORT, tmp_path) == []


def test_every_route_with_a_body_is_tried() -> None:
    taken = [route.path for route in ROUTES if route.method == "POST"]
    assert {re.sub(r"{\w+}", "resp_1", path) for path in taken} == set(hostile.VALID)


def test_requests_are_determined_by_the_seed() -> None:
    for make in (hostile.body, hostile.http):
        assert make(random.Random(1)) == make(random.Random(1)) != make(random.Random(2))
