"""Requests handed over from prefill to decode engines on tensors: every answer is that of one plain engine.

The exact tests run the sum model, whose arithmetic has no rounding: a page of other tokens, or one that is read too
early, gives other tokens. The canary reads the tag of every slot beside, also of those that were sent.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from tests.support.pair import Pair, pages_held  # noqa: E402
from tests.support.small_runtime import alone, small_config  # noqa: E402

NEW = 12


def prompts(seed: int, count: int, longest: int = 60) -> list[list[int]]:
    """Prompts of which many share a beginning."""
    rng = random.Random(seed)
    starts = [[rng.randrange(90) for _ in range(rng.randrange(4, 40))] for _ in range(5)]
    made = []
    for _ in range(count):
        start = rng.choice(starts) if rng.random() < 0.7 else []
        more = [rng.randrange(90) for _ in range(rng.randrange(1, 24))]
        made.append((start + more)[:longest])
    return made


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_answer_is_that_of_one_engine(transport: str, tmp_path: Path) -> None:
    with Pair(tmp_path, transport=transport) as pair:
        asked = prompts(1, 12)
        answers = [pair.submit(prompt, NEW) for prompt in asked]
        pair.wait(*answers)
        assert [one.tokens for one in answers] == [alone(prompt, NEW) for prompt in asked]
        pair.settle()
        assert pair.receivers[0].counts.done == 12
        assert pair.receivers[0].counts.pages > 12
    assert [pages_held(one) for one in pair.runtimes] == [0, 0]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "retraction": {"decode": {"retract_every": 5}},
    "few pages": {"decode": {"pages": 30, "num_reserved_decode_tokens": 4}},
    "overlap": {"overlap_depth": 1},
    "no cache": {"radix_cache": False},
    "prefill complete": {"transfer_allocation": "prefill_complete"},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "few slots": {"transfer_slots": 2},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_two_hundred_requests_equal_one_engine(name: str, tmp_path: Path) -> None:
    settings = {**SETTINGS[name]}
    prefill, decode = ({**settings.pop(side, {})} for side in ("prefill", "decode"))
    kept = [
        JournalWriter.create(
            tmp_path / f"{i}",
            JournalHeader(config=small_config(role=role, **{"radix_cache": True, **settings, **more})),
        )
        for i, (role, more) in enumerate((("prefill", prefill), ("decode", decode), ("decode", decode)))
    ]
    rng = random.Random(7)
    with Pair(tmp_path, decodes=2, prefill=prefill, decode=decode, journals=kept, **settings) as pair:
        asked = prompts(2, 200)
        answers, cancelled = [], set()
        for number, prompt in enumerate(asked):
            answers.append(pair.submit(prompt, NEW, decode=number % 2))
            if rng.random() < 0.1:
                cancelled.add(number)
                pair.decodes[number % 2].host.cancel(answers[-1].request_id)
            if number % 40 == 39:
                pair.wait(*answers)
        pair.wait(*answers)
        for number, (one, prompt) in enumerate(zip(answers, asked, strict=True)):
            right = alone(prompt, NEW)
            if number in cancelled and one.reason == "cancelled":
                assert one.tokens == right[: len(one.tokens)]
            else:
                assert (one.reason, one.tokens) == ("length", right), number
        pair.settle()
        assert sum(one.counts.done for one in pair.receivers) >= 170
    assert [pages_held(one) for one in pair.runtimes] == [0, 0, 0]
    assert all(one.executor.canary is not None and one.executor.canary.slots_verified > 0 for one in pair.runtimes)
    for number, (journal, one) in enumerate(zip(kept, pair.runtimes, strict=True)):
        journal.close()
        assert replay(tmp_path / f"{number}").digest == one.engine.digest
