"""A part of `make vllm-families`: answers under both schedulers, with fewer requests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import families
from tests.vllm.families import FAMILIES, LOGPROBS_DIFFER, Answer, Ask, Row, Sample, difference, line, row_of
from tests.vllm.support import needs_vllm

RUNS = [(name, loop) for name, family in FAMILIES.items() for loop in family.loops]
SHORT = ("dense", "hybrid", "stages", "host_tier", "encoder", "embedding")
REQUESTS = 60


Rows = Callable[[str, str], Row]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    """Rows by family and loop. Those of all selected tests are computed at once, as many processes as cores."""
    here = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params for item in here if "rows" in getattr(item, "fixturenames", ())]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [(one["name"], one["loop"]) for one in selected]
        found = {run: pool.submit(row_of, *run, REQUESTS) for run in runs}
        yield lambda name, loop: found[name, loop].result()
        pool.shutdown(cancel_futures=True)  # after a stop at the first failure


@needs_vllm
@pytest.mark.parametrize(
    ("name", "loop"),
    [run if run[0] in SHORT and run[1] == "sync" else pytest.param(*run, marks=pytest.mark.long) for run in RUNS],
)
def test_answers_are_those_of_vllm(name: str, loop: str, rows: Rows) -> None:
    row = rows(name, loop)
    assert row.equal + row.ties + row.own_wrong == row.requests == REQUESTS, row
    assert not [one for one in row.why if "the run shows no" not in one], row  # fewer requests may not be preempted
    assert row.ties <= 0.1 * REQUESTS


class Params:
    """The parts of SamplingParams that the comparison reads."""

    temperature = 0.0


def answer(*tokens: int, end: str = "length", logprobs: tuple[float, ...] = ()) -> Answer:
    """Return an answer of one sample."""
    positions = [{token: value} for token, value in zip(tokens, logprobs, strict=False)]
    return Answer([Sample(list(tokens), (end, None), positions)])


def compared(own: Answer, ours: Answer, gap: float, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    monkeypatch.setattr(families, "score_gap", lambda *_: gap)
    ask: Any = Ask({"prompt_token_ids": [1]}, Params())
    return difference(None, ask, own, ours)


def test_an_answer_is_equal_a_tie_or_different(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(answer(1, 2), answer(1, 2), 0.0, monkeypatch)[0] == ""
    text, gap = compared(answer(1, 2, 3), answer(1, 4, 3), 0.0005, monkeypatch)
    assert (text, gap) == ("sample 0: token 1 is 2 and 4", 0.0005)
    assert compared(answer(1, 2), answer(1, 4), 0.5, monkeypatch)[1] == 0.5


@pytest.mark.parametrize(
    ("own", "ours", "text"),
    [
        (answer(1, 2), answer(1, 2, end="stop"), "ends"),
        (answer(1, 2), answer(1, 2, 3), "2 and 3 tokens"),
        (answer(1, 2), Answer([]), "1 and 0 samples"),
        (answer(1, logprobs=(-1.0,)), answer(1, logprobs=(-1.0 - 2 * LOGPROBS_DIFFER,)), "log probabilities"),
    ],
)
def test_what_is_never_a_tie(own: Answer, ours: Answer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, gap = compared(own, ours, 0.0, monkeypatch)
    assert text in found
    assert gap == float("inf")


def test_the_table_has_a_line_for_each_run() -> None:
    row = Row("moe", "sync", 200, 198, 2, 0, 0, 11, 5_000, (48, 47), 6_144, (0, 0), (90, 91), 0.001, 12.5)
    head, marks = families.HEADER.splitlines()
    assert line(row).count("|") == head.count("|") == marks.count("|")
    assert line(row).startswith("| mixture of experts (Mixtral) | sync | 200 | 198 | 2 | 0 | 0 | 11 | 48, 47 | 6,144 |")


def test_a_stored_row_replaces_that_of_the_same_run_only(tmp_path: Path) -> None:
    def row(name: str, loop: str, equal: int) -> Row:
        return Row(name, loop, 200, equal, 0, 0, 200 - equal, 11, 5_000, (48, 47), 6_144, (0, 0), (90, 91), 0.0, 12.5)

    path = tmp_path / "rows.json"
    families.store([row("moe", "sync", 198), row("dense", "async", 200)], path)
    families.store([row("moe", "sync", 200), row("moe", "async", 199)], path)
    stored = [(one["family"], one["loop"], one["equal"]) for one in json.loads(path.read_text())]
    assert stored == [("dense", "async", 200), ("moe", "sync", 200), ("moe", "async", 199)]
    assert len(path.with_suffix(".txt").read_text().splitlines()) == 2 + len(stored)
