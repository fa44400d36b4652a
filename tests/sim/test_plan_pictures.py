"""The page of a plan: cost against latency, splits, growth, what would change the answer; and charts of runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import lockstep
from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import take
from lockstep.sim.cli.plan import PlanOptions, grown, question_of
from lockstep.sim.cli.plan import plan as plan_command
from lockstep.sim.cluster.fleet_section import fleet_section, time_text
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.ledger import TrialStore
from lockstep.sim.plan.page import render_plan
from lockstep.sim.plan.question import QUICK, Length, Question, parse_search
from lockstep.sim.plan.search import Progress, prepare
from lockstep.sim.plan.sensitivity import plan_command as plan_words
from lockstep.sim.plan.solve import solve
from lockstep.sim.plan.workers import Alone
from lockstep.sim.report.pictures import Axis, Point, points_picture, steps_picture

TINY = replace(QUICK, long=Length(60, 60, 0.0), short=Length(60, 60, 0.0), replications_min=2, replications_max=3)
QUESTION = Question(
    model="qwen3-8b",
    gpus=("h100", "h200"),
    workload="gen:n=60,input=fixed:2000",
    slos=(Slo.parse("ttft_p90=5s"), Slo.parse("tpot_p90=100ms")),
    rate=4.0,
    search=parse_search(("tp=1,2",)),
    effort=TINY,
    confirm_all=True,
)


def answered(question: Question, growth: str | None = None) -> Any:
    later = grown(question, growth)
    return solve(question, prepare(question), later, Alone(), TrialStore(None), Progress())


@pytest.fixture(scope="module")
def page() -> str:
    return render_plan(answered(QUESTION, "3"))


def pictures_of(text: str) -> Iterator[ElementTree.Element]:
    for found in re.findall(r'<div class="picture">(<svg.*?</svg>)</div>', text, re.DOTALL):
        yield ElementTree.fromstring(found)


def test_cost_against_latency_has_a_point_and_a_bar_for_each_configuration_and_names_the_winner(page: str) -> None:
    pictures = list(pictures_of(page))
    assert len(pictures) == 2  # one per SLO
    for picture in pictures:
        assert picture.get("role") == "img"
        assert "configurations; the winner, h" in str(picture.get("aria-label"))
        assert len(picture.findall("circle")) == 4
        assert len([line for line in picture.findall("line") if (line.get("class") or "").startswith("bar")]) == 4
        texts = ["".join(text.itertext()) for text in picture.findall("text")]
        assert sum(text.startswith("winner: ") for text in texts) == 1
        assert any(text.startswith("SLO: ") for text in texts)


def test_the_page_has_growth_assumptions_and_next_questions_as_commands_that_parse(page: str) -> None:
    assert 'id="growth"' in page
    assert "wins below" in page  # the price of the other GPU
    section = page[page.index('id="sensitivity"') : page.index('id="commands"')]
    commands = [line for block in re.findall(r"<pre>(.*?)</pre>", section, re.DOTALL) for line in block.split("\n")]
    plans = [command.replace("&#x27;", "'") for command in commands if command.startswith("lockstep plan")]
    assert len(plans) >= 4
    for command in plans:
        plan_command.make_context("plan", shlex.split(command)[2:])


def test_the_command_of_a_question_asks_it_again() -> None:
    asked = replace(
        QUESTION, effort=QUICK, common={"kv_dtype": "fp8", "tiers": {"host_cache_gb": 20.0}}, prices={"h100": 1.25},
        settings={"chunked_prefill_size": 4096}, seed=9, hop_us=300,
        router=RouterConfig(policy="prefix_affinity", load_bound=1.75),
    )  # fmt: skip
    context = plan_command.make_context("plan", shlex.split(plan_words(asked))[2:])
    params = dict(context.params)
    again = question_of(take(PlanOptions, params), params)
    assert again == replace(asked, search=asked.search, common=again.common, confirm_all=again.confirm_all)
    assert again.common["kv_dtype"] == "fp8"
    assert again.common["tiers"]["host_cache_gb"] == 20.0


def test_splits_are_shaded_by_their_load() -> None:
    answer = answered(
        replace(
            QUESTION,
            gpus=("h200",),
            rate=None,
            gpus_max=4,
            slos=QUESTION.slos,
            search=parse_search(("tp=1", "prefill_decode=1:1,1:3,2:2,3:1")),
        )
    )
    text = render_plan(answer)
    table = text[text.index('id="splits"') :]
    shades = re.findall(r'<td class="heat text h(\d)">', table[: table.index("</section>")])
    assert len(shades) >= 3
    assert "5" in shades  # the largest load


def test_axes_begin_at_zero_or_are_logarithmic_over_a_wide_range() -> None:
    near, far = Axis.of("x", [2.0, 4.0], str), Axis.of("x", [1.0, 1000.0], str)
    assert (near.low, near.is_log) == (0.0, False)
    assert near.ticks()[0] == 0.0
    assert far.is_log
    assert far.ticks() == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert 0.0 < far.share(1.0) < far.share(1000.0) < 1.0
    assert Axis("t", 0.0, 86_400.0, str, steps=(3600.0, 21_600.0)).ticks() == [
        0.0,
        21_600.0,
        43_200.0,
        64_800.0,
        86_400.0,
    ]


def test_text_in_a_picture_is_escaped() -> None:
    x, y = Axis.of("<x>", [1.0, 2.0], str), Axis.of("y", [1.0, 2.0], str)
    text = points_picture("a", "b", x, y, [Point("<i>", 1.0, 1.0, 0.5, 1.5, "best")], (1.0, "<b>"))
    assert "<i>" not in text
    assert "<x>" not in text
    assert "<b>" not in text
    assert ElementTree.fromstring(steps_picture("a", "b", x, y, [(0.0, 1.0), (1.0, 2.0)], 2.0)) is not None


def test_replicas_and_cost_over_a_day_are_drawn() -> None:
    hour = 3_600_000_000
    autoscale = {
        "replicas_by_time": [[0, 1], [5 * hour, 3]], "replica_hours_fixed": 96.0, "replicas_given": 4,
        "replicas_mean": 2.5, "replicas_max": 3, "starts": 2, "usd": 40.0, "usd_fixed": 90.0,
        "usd_by_time": [[number * hour, 1.0 if number < 5 else 3.0, 1.5] for number in range(24)],
    }  # fmt: skip
    text = fleet_section(autoscale)
    assert len(list(pictures_of(text))) == 2
    assert text.count("<tr>") == 25
    assert time_text(5 * hour) == "5 h"


def test_charts_are_saved_as_svg_png_and_html(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    run = lockstep.simulate(
        model="qwen3-8b", gpu="h200", workload="gen:n=60,rate=8", slo="ttft_p99=500ms", intervals=False, report=False
    )
    for name in ("ttft", "tpot", "e2e", "queue", "arrivals"):
        run.chart(name).save(str(tmp_path / f"{name}.svg"))
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    run.chart().save(str(tmp_path / "ttft.png"))
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    run.chart().save(str(tmp_path / "ttft.html"))
    assert "vega" in (tmp_path / "ttft.html").read_text()
    with pytest.raises(ConfigError, match="no chart of a run"):
        run.chart("ttfb")


def test_the_front_of_a_plan_is_a_chart_too() -> None:
    pytest.importorskip("altair")
    found = lockstep.plan(
        model="qwen3-8b", gpus="h100,h200", workload="gen:n=60", slo=["ttft_p90=5s"], rate=4, quick=True, requests=20,
        jobs=1, growth="2",
    )  # fmt: skip
    chart = found.chart().to_dict()
    assert len(chart["layer"]) == 3
    assert len(found.answer.forecast) == 1
    with pytest.raises(ConfigError, match="`slo` must be from 0 to 0"):
        found.chart(1)
