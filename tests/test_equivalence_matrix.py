"""The same requests under every combination of settings that must not matter get the same tokens and finish reasons.

Every cell runs over a tagged KV pool, which checks each cell of KV that is read. A failure names the seed and the cell.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from lockstep.core.contract.config import SchedConfig
from tests.support.served import Asked, Moment, Served, serve

SEEDS = 20


def axes(page_size: int) -> dict[str, tuple[Any, ...]]:
    """Settings that change the schedule and must not change an answer. A new axis is a line here."""
    return {
        "overlap_depth": (0, 1, 2),
        "radix_cache": (True, False),
        "chunked_prefill_size": (page_size, 3 * page_size, None),
        "retract_every": (0, 3),
        "batching": ("prefill_first", "mixed"),
    }


def cells(seed: int) -> Iterator[tuple[str, SchedConfig]]:
    """Every combination, with a page size and a pool that the seed draws: each request fits alone, all rarely do."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    longest = max(len(asked.prompt) + asked.max_new for asked in all_requests(seed))
    pages = -(-longest // page_size) + rng.choice([0, 2, 10, 400])
    varied = axes(page_size)
    for values in product(*varied.values()):
        settings = dict(zip(varied, values, strict=True))
        name = " ".join(f"{setting}={value}" for setting, value in settings.items())
        yield name, SchedConfig(page_size=page_size, pages=pages, schedule_conservativeness=0.02, **settings)


def workload(seed: int) -> tuple[list[Moment], list[Asked]]:
    """A timeline of first turns, and the later turns: shared prefixes, stops, held-back stops, all cadences."""
    rng = random.Random(seed)
    timeline: list[Moment] = []
    later = []
    most_outputs = rng.choice([5, 20])
    key = 0
    for _ in range(rng.randint(3, 6)):
        base = 100 * rng.randint(1, 2)
        prompt = tuple(range(base, base + rng.randint(1, 12)))
        asked: Asked | None = None
        for turn in range(rng.randint(1, 3)):
            if asked is not None:
                prompt = (*asked.prompt, *asked.answer.tokens, *range(500, 500 + rng.randint(1, 3)))
            max_new = rng.randint(1, most_outputs)
            asked = Asked(
                key=key,
                prompt=prompt,
                max_new=max_new,
                min_new=rng.choice([0, 0, rng.randint(0, max_new)]),
                stops=tuple(rng.sample(range(most_outputs), rng.choice([0, 0, 1, 2]))),
                stream=rng.random() < 0.8,
                after=asked,
            )
            key += 1
            if turn:
                later.append(asked)
            else:
                timeline += [asked, *[None] * rng.choice([0, 0, 1, 3])]
    return timeline, later


def all_requests(seed: int) -> list[Asked]:
    timeline, later = workload(seed)
    return [asked for asked in (*timeline, *later) if asked is not None]


def served(seed: int, config: SchedConfig) -> Served:
    timeline, later = workload(seed)
    return serve(config, timeline, later=later)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_cell_serves_the_same_tokens(seed: int) -> None:
    expected = {asked.key: asked.answer for asked in all_requests(seed)}
    again = f'again: pytest "tests/test_equivalence_matrix.py::test_every_cell_serves_the_same_tokens[{seed}]"'
    for cell, config in cells(seed):
        try:
            answers = served(seed, config).answers
        except AssertionError as error:
            error.add_note(f"seed {seed}, cell {cell}\n{again}")
            raise
        assert answers == expected, f"seed {seed}, cell {cell}\n{again}"


def test_the_workloads_are_not_tame() -> None:
    """The seeds reach hits, evictions, retractions of both kinds and late tokens, stops, and stops held back."""
    marks = Counter[str]()
    for seed in range(SEEDS):
        for _, config in cells(seed):
            if config.radix_cache and config.overlap_depth == 2:
                marks += served(seed, config).marks
        for asked in all_requests(seed):
            marks[asked.answer.reason] += 1
            marks["held back"] += any(number + 1 < asked.min_new for number in asked.stops)
    wanted = ["tokens cached", "pages evicted", "retracted (pages)", "retracted (forced)", "tokens discarded"]
    assert not [mark for mark in (*wanted, "stop", "length", "held back") if not marks[mark]], marks
