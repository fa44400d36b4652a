"""Servers shared by several test files, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_server import EMULATED, LiveServer, serving


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """An emulated model, ten times as fast as its GPU."""
    arguments = (*EMULATED, "--speed", "10", "--slow-reader-s", "2", "--shutdown-s", "1")
    with serving(tmp_path_factory.mktemp("emulated") / "log", *arguments) as server:
        yield server
