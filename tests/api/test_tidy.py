"""A worker gives memory back once no answer is open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api import worker


def test_memory_is_given_back_after_answers_and_bodies_and_never_beside_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    bridge: Any = SimpleNamespace(open_answers=0)
    processes: Any = SimpleNamespace(jobs=0)

    async def looks(count: int) -> None:
        turns = 0

        async def sleep(_: float) -> None:
            nonlocal turns
            turns += 1
            if turns > count:
                raise asyncio.CancelledError

        monkeypatch.setattr(worker, "asyncio", SimpleNamespace(sleep=sleep))
        with contextlib.suppress(asyncio.CancelledError):
            await worker.tidy(bridge, processes)

    asyncio.run(looks(3))
    assert not collected  # nothing was served
    processes.jobs = 1
    asyncio.run(looks(3))
    assert len(collected) == 1
    bridge.open_answers = 2
    asyncio.run(looks(3))
    assert len(collected) == 1
