"""`lockstep compare` of clusters: the whole of each, its router, and the balance of its engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.compare import compare as command
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.report.compare_page import render_comparison
from lockstep.sim.results.compare import Comparison, EngineRow, compare, engine_rows, read_runs, telling_rows
from lockstep.sim.results.compare_text import COLUMNS, comparison_lines
from lockstep.sim.results.stored_run import read_run
from tests.support.browser import dom_of, needs_chromium

CHAT = "gen:n=60,rate=90,shared_prefix=300x4,prefix_choice=zipf,input=lognormal:200:0.8,output=lognormal:30:0.5"

RUNS = {
    "alone": ["--gpu", "h100"],
    "cluster-of-one": ["--gpu", "h100", "--replicas", "1"],
    "in-turn": ["--gpu", "h100", "--replicas", "3", "--router", "round_robin"],
    "by-prefix": ["--gpu", "h100", "--replicas", "3", "--router", "prefix_affinity", "--router-hop", "2ms"],
    "two-kinds": ["--engines", "2xh100:max_running_requests=32,1xh200"],
    "many": ["--gpu", "h100", "--replicas", "12", "--router", "prefix_affinity", "--no-intervals"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        arguments = ["--model", "qwen3-0.6b", "--workload", CHAT, "--slo", "ttft_p99=500ms", *options]
        result = CliRunner().invoke(simulate, [*arguments, "--no-trace", "--no-report", "--out", str(root / name)])
        assert result.exit_code == 0, result.output
    return root


def found(folder: Path, *names: str) -> Comparison:
    return compare(read_runs([folder / name for name in names]))


def lines(folder: Path, *names: str) -> str:
    return "\n".join(comparison_lines(found(folder, *names)))


def settings(comparison: Comparison) -> dict[str, tuple[Any, ...]]:
    return {row.name: row.values for row in comparison.settings}


def test_a_cluster_of_one_is_compared_with_the_engine_alone_and_is_the_same(folder: Path) -> None:
    comparison = found(folder, "alone", "cluster-of-one")
    assert settings(comparison) == {"router": (None, "least_requests")}
    assert not comparison.warnings
    assert {figure.changes[0].verdict for figure in comparison.figures} == {"same"}
    assert not any(figure.group == "balance" for figure in comparison.figures)
    assert comparison.pairs[0] is not None
    assert comparison.pairs[0].metrics["ttft"].same_share == 1
    assert "engine  " not in lines(folder, "alone", "cluster-of-one")


def test_two_routers_are_distinguished_and_their_engines_stand_side_by_side(folder: Path) -> None:
    comparison = found(folder, "in-turn", "by-prefix")
    assert settings(comparison) == {
        "router": ("round_robin", "prefix_affinity"),  # and no settings of prefix_affinity: the other has none
        "router_hop": ("0 us", "2.00 ms"),
    }
    assert not comparison.warnings
    pairs = comparison.pairs[0]
    assert pairs is not None
    assert (pairs.matched_by, pairs.completed_in_both) == ("label", 60)
    text = lines(folder, "in-turn", "by-prefix")
    assert "router of A  round_robin: 60 by policy" in text
    assert "router of B  prefix_affinity, 2.00 ms away: " in text
    for line in ("A 0: 1 x H100-SXM ", "A 2: 1 x H100-SXM ", "B 2: 1 x H100-SXM "):
        assert line in text
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_balance_follows_from_the_engines(folder: Path) -> None:
    metrics = json.loads((folder / "two-kinds" / "metrics.json").read_text())
    weights = [engine["weight"] for engine in metrics["about"]["engines"]]
    assert len(set(weights)) == 2  # the premise of this test
    arrived = [engine["requests"]["arrived"] for engine in metrics["engines"]]
    fair = [60 * weight / sum(weights) for weight in weights]
    ratios = [count / share for count, share in zip(arrived, fair, strict=True)]
    assert metrics["balance"]["requests_imbalance"] == pytest.approx(max(ratios), abs=1e-6)
    busy = [engine["device"]["busy_us"] / metrics["throughput"]["makespan_us"] for engine in metrics["engines"]]
    assert metrics["balance"]["busy_share_min"] == pytest.approx(min(busy), abs=1e-6)
    assert metrics["balance"]["busy_share_max"] == pytest.approx(max(busy), abs=1e-6)
    slowest = max(engine["latency"]["ttft_us_p99"] for engine in metrics["engines"])
    assert metrics["balance"]["ttft_us_p99_max"] == slowest
    rows = engine_rows(read_run(folder / "two-kinds"))
    assert [row.fair_ratio for row in rows] == pytest.approx(ratios)
    assert [row.busy_share for row in rows] == pytest.approx(busy)
    figure = found(folder, "alone", "two-kinds").figure("requests_imbalance")
    assert figure.values == (1.0, metrics["balance"]["requests_imbalance"])


def test_engines_of_several_kinds_report_whose_setting_it_is(folder: Path) -> None:
    comparison = found(folder, "in-turn", "two-kinds")
    differing = settings(comparison)
    assert differing["gpu"] == ("H100-SXM", "engines 0 to 1: H100-SXM, engine 2: H200-SXM")
    assert differing["max_running_requests"] == (256, "engines 0 to 1: 32, engine 2: 256")
    assert differing["weights"][0] is None
    assert differing["weights"][1].startswith("engines 0 to 1: 1, engine 2: ")
    assert len(comparison.warnings) == 1
    assert comparison.warnings[0].startswith("different GPUs (H100-SXM and engines 0 to 1: H100-SXM, engine 2: H200")
    assert found(folder, "alone", "in-turn").warnings == (
        "different numbers of engines (1 and 3): fair only if the number of engines is the question",
    )


def test_a_single_engine_of_a_cluster_is_no_whole_run(folder: Path) -> None:
    runs = read_runs([folder / "in-turn" / "engines" / "0", folder / "by-prefix" / "engines" / "0"])
    warnings = compare(runs).warnings
    assert "in-turn/engines/0 is engine 0 of a cluster: its figures cover its own requests alone" in warnings
    assert "by-prefix/engines/0 is engine 0 of a cluster: its figures cover its own requests alone" in warnings


def test_of_very_many_engines_the_fullest_and_the_emptiest_are_shown(folder: Path) -> None:
    rows = engine_rows(read_run(folder / "many"))
    assert (len(rows), sum(row.requests for row in rows)) == (12, 60)
    shown = telling_rows(rows)
    loads = sorted((row.requests for row in rows), reverse=True)
    assert [row.requests for row in shown] == loads[:4] + loads[-4:]
    assert telling_rows(rows[:8]) == rows[:8]
    assert "B has 4 more, between these; all are in --json" in lines(folder, "in-turn", "many")
    page = render_comparison(found(folder, "in-turn", "many"))
    assert "4 engines between the fullest and the emptiest are not shown" in page


def test_json_has_every_engine(folder: Path, tmp_path: Path) -> None:
    arguments = [str(folder / "in-turn"), str(folder / "many"), "--json", str(tmp_path / "c.json")]
    shown = CliRunner().invoke(command, arguments)
    assert shown.exit_code == 0, shown.output
    runs = json.loads((tmp_path / "c.json").read_text())["runs"]
    assert [len(run["engines"]) for run in runs] == [3, 12]
    assert set(runs[0]["engines"][0]) == set(EngineRow.__dataclass_fields__)
    assert runs[0]["routed_by_reason"] == {"policy": 60}


def test_page_shows_the_engines_of_clusters_only(folder: Path) -> None:
    page = render_comparison(found(folder, "alone", "two-kinds"))
    assert "How evenly did the engines work?" in page
    assert "qwen3-0.6b on 2 x (1 x H100-SXM) and 1 x H200-SXM" in page
    assert page.count('class="load"') == 1 + 3
    assert "How evenly" not in render_comparison(found(folder, "alone", "cluster-of-one"))


@needs_chromium
def test_browser_draws_clusters_without_a_complaint(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "comparison.html"
    path.write_text(render_comparison(found(folder, *RUNS)), "utf-8")
    assert dom_of(path, tmp_path / "profile").count('class="uplot') == 3 + 4 + 3


# ------------------------------------------------------------------------------------------------------------ refusals


def edited(folder: Path, tmp_path: Path, edit: Any, where: str = "metrics.json") -> Path:
    """A copy of a cluster whose metrics.json, or that of an engine, was changed by `edit`."""
    copy = tmp_path / "edited"
    shutil.copytree(folder / "in-turn", copy)
    metrics = json.loads((copy / where).read_text())
    edit(metrics)
    (copy / where).write_text(json.dumps(metrics))
    return copy


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda metrics: metrics["about"].pop("format"), "its about.format is not `lockstep-metrics`"),
        (lambda metrics: metrics["about"].pop("hop_us"), "about has no `hop_us`"),
        (lambda metrics: metrics["about"].pop("engines"), "about has no `engines`"),
        (lambda metrics: metrics["about"]["engines"][1].pop("weight"), "field `weight` - at `$.about.engines[1]`"),
        (lambda metrics: metrics["engines"].pop(), "3 engines in about, 2 measured"),
        (lambda metrics: metrics.update(router=[]), "got `array` - at `$.router`"),
        (lambda metrics: metrics.pop("balance"), "a cluster has no `balance`"),
        (lambda metrics: metrics["engines"][0]["requests"].update(arrived=1), "0/metrics.json` is not of the run"),
        (lambda metrics: metrics["about"].update(seed=8), "engines/0/metrics.json` is not of the run"),
    ],
)  # fmt: skip
def test_metrics_of_a_cluster_that_lack_something_are_refused(
    folder: Path, tmp_path: Path, edit: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match="hint: ") as caught:
        read_run(edited(folder, tmp_path, edit))
    assert message in str(caught.value)


def test_a_cluster_without_its_engines_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = edited(folder, tmp_path, lambda metrics: None)
    shutil.rmtree(copy / "engines" / "1")
    with pytest.raises(ConfigError, match=r"is of 3 engines, but engines/1 is not there\nhint: copy the whole folder"):
        read_run(copy)


def test_an_engine_with_the_journal_of_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    arguments = ["--model", "qwen3-0.6b", "--gpu", "h100", "--workload", "gen:n=2", "--no-intervals", "--no-report"]
    assert CliRunner().invoke(simulate, [*arguments, "--out", str(other)]).exit_code == 0
    copy = edited(folder, tmp_path, lambda metrics: None)
    shutil.rmtree(copy / "engines" / "2" / "journal")
    shutil.copytree(other / "journal", copy / "engines" / "2" / "journal")
    with pytest.raises(ConfigError, match=r"but a journal of seed 7 and workload .*\nhint: "):
        read_run(copy)
