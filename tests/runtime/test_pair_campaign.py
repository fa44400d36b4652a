"""The campaign over pairs of features: two cheap ones in a short run, faults that it must report, and its cases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.runtime import LLM  # noqa: E402
from tests.campaigns import pairs  # noqa: E402
from tests.support import feature_campaign  # noqa: E402
from tests.support.feature_campaign import CASES, PAIRS, Case, Models, campaign, check, table  # noqa: E402
from tests.support.refused_pairs import REFUSED, Refused, refusal  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
SHORT = [
    Case(
        name="drafts, tiers",
        options={**feature_campaign.NGRAM, **feature_campaign.TIERS, "pages": 24},
        overlaps=(1,),
        retract_every=2,
    ),
    Case(name="adapters, plain", kind="adapters", options=feature_campaign.ADAPTERS, overlaps=(2,)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), seed=3, requests=12)


def test_a_short_campaign_is_right(models: Models, tmp_path: Path) -> None:
    seen: list[Any] = []
    outcomes = campaign(SHORT, models, seed=3, place=tmp_path, progress=seen.append)
    assert seen == outcomes
    assert [one.faults for one in outcomes] == [[], []]
    assert all(one.ended + one.aborted == 12 and one.journals == 1 for one in outcomes)
    assert "retractions" in table(outcomes)


def test_one_wrong_token_is_reported_with_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wait, spoiled = LLM.wait, list[int]()

    def spoilt(llm: LLM, pending: Any) -> Any:
        answer = wait(llm, pending)
        if llm.config.overlap_depth == 1 and answer.finish_reason == "length" and not spoiled:
            spoiled.append(answer.request_id)
            answer.token_ids[0] ^= 1
        return answer

    monkeypatch.setattr(LLM, "wait", spoilt)
    assert pairs.main(["--requests", "6", "--seed", "5", "--only", "plain"]) == 1
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert "2 of 3 checks are right" in printed
    assert re.search(r"request \d+: tokens \[.*, one plain engine gives", printed)
    assert "again: python -m tests.campaigns.pairs --seed 5 --requests 6 --only plain" in printed


@pytest.mark.parametrize("fault", ["the canary verified no slot", "retractions: none"])
def test_a_check_that_has_checked_nothing_fails(
    fault: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "the canary verified no slot":
        monkeypatch.setattr(feature_campaign, "DEBUG", {})
    never = 0 if fault == "retractions: none" else 6
    case = Case(name="plain", kind="adapters", options=feature_campaign.ADAPTERS, retract_every=never)
    assert [fault in one for one in check(case, models, 1, 3, tmp_path).faults] == [True]


def rows_of(heading: str) -> list[tuple[str, str]]:
    """The first two cells of each row of the first table behind some words of the page."""
    page = PAGE.read_text()
    lines = page[page.index(heading) :].split("\n\n| ")[1].split("\n\n")[0].splitlines()
    found = [line.strip("| ").split(" | ") for line in lines[2:]]
    return [(name, text) for name, text in found]


def test_every_pair_of_the_page_is_a_case() -> None:
    names = [name for name, _ in rows_of("# Which pairs are tested on tensors")]
    assert sorted(names) == sorted({case.name for case in PAIRS})
    titles = [case.title for case in CASES]
    assert len(set(titles)) == len(titles), "a title repeats a case"


def test_every_refused_pair_of_the_page_is_tried() -> None:
    assert {name for name, _ in rows_of("Refused by name on tensors:")} == {one.name for one in REFUSED}


QUICK = [one for one in REFUSED if one.model == "demo" and ("pp" in one.options or "attention_dp" in one.options)]
"""Those that are refused before ranks are started."""


@pytest.mark.parametrize("one", QUICK, ids=lambda one: one.words)
def test_a_pair_is_refused(one: Refused, tmp_path: Path) -> None:
    assert "hint:" in refusal(one, tmp_path)


def test_a_pair_that_is_not_refused_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = Refused(name="nothing", options={}, words="never")
    monkeypatch.setattr(pairs, "REFUSED", [works])
    assert pairs.main(["--only", "nothing"]) == 1
    assert "nothing: an engine with {} starts" in capsys.readouterr().out
