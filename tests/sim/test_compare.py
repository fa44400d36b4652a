"""`lockstep compare`: the differences between run folders, their texts, and the refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.compare import compare as command
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.metrics.bottleneck import bottleneck
from lockstep.sim.report.compare_page import overlay, render_comparison
from lockstep.sim.results.compare import Comparison, change, compare, headline, read_runs
from lockstep.sim.results.compare_text import COLUMNS, comparison_lines
from lockstep.sim.results.results import show_us
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.results.text import setting, span
from tests.support.browser import dom_of, needs_chromium

CHAT = "gen:n=40,rate=60,input=lognormal:300:0.8,output=lognormal:40:0.5"
SESSIONS = "gen:n=40,rate=60,turns=uniform:1:3,think=fixed:20ms,input=lognormal:300:0.8,output=fixed:20"
EVIL = '</script><img src=x onerror="alert(1)">'

# Every run of these tests: name, and its options besides model, GPU and --no-trace --no-report.
RUNS = {
    "base": ["--workload", CHAT, "--slo", "ttft_p99=500ms", "--slo", "tpot_p99=40ms"],
    "narrow": ["--workload", CHAT, "--slo", "ttft_p99=500ms", "--slo", "tpot_p99=40ms", "--max-running-requests", "2"],
    "seed": ["--workload", CHAT, "--slo", "ttft_p99=500ms", "--slo", "tpot_p99=40ms", "--seed", "8"],
    "loose": ["--workload", CHAT, "--slo", "ttft_p99=9s", "--no-intervals", "--no-requests"],
    "refusing": ["--workload", CHAT, "--max-running-requests", "2", "--max-queued-requests", "4"],
    "calibrated": ["--workload", CHAT, "--calibration", "vllm-h100"],
    "sessions": ["--workload", SESSIONS],
    "double": ["--workload", CHAT, "--slo", "ttft_p99=500ms", "--slo", "tpot_p99=40ms", "--rate-scale", "2"],
    "fourfold": ["--workload", CHAT, "--slo", "ttft_p99=500ms", "--slo", "tpot_p99=40ms", "--rate-scale", "4"],
    "few-sessions": ["--workload", SESSIONS, "--max-running-requests", "1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        arguments = ["--model", "qwen3-0.6b", "--gpu", "h100", *options, "--no-trace", "--no-report"]
        result = CliRunner().invoke(simulate, [*arguments, "--out", str(root / name)])
        assert result.exit_code == 0, result.output
    return root


def found(folder: Path, *names: str) -> Comparison:
    return compare(read_runs([folder / name for name in names]))


def lines(folder: Path, *names: str) -> str:
    return "\n".join(comparison_lines(found(folder, *names)))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("Error") == 1
    assert "hint: " in result.stderr
    return result.stderr


def edited(folder: Path, name: str, edit: Any) -> Path:
    """A copy of a run whose metrics.json was changed by `edit`."""
    copy = folder / f"{name}-edited"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / name, copy)
    metrics = json.loads((copy / "metrics.json").read_text())
    edit(metrics)
    (copy / "metrics.json").write_text(json.dumps(metrics))
    return copy


# --------------------------------------------------------------------------------------------------------- differences


def test_only_settings_that_differ_are_named(folder: Path) -> None:
    comparison = found(folder, "base", "narrow")
    assert [(row.name, row.values) for row in comparison.settings if row.name != "pages"] == [
        ("max_running_requests", (256, 2))
    ]
    assert not comparison.warnings


def test_constants_are_named_where_nothing_else_explains_them(folder: Path) -> None:
    def edit(metrics: dict[str, Any]) -> None:
        metrics["about"]["cost_model"]["constants"]["weight_read_gbs"]["value"] = 1.0

    edited(folder, "base", edit)
    named = [row.name for row in found(folder, "base", "base-edited").settings]
    assert named == ["cost.weight_read_gbs"]
    assert not any(row.name.startswith(("cost.", "cpu.")) for row in found(folder, "base", "calibrated").settings)


def test_other_operator_tables_and_an_edited_collective_are_named(folder: Path, tmp_path: Path) -> None:
    """Two folders of tables may have files of one name; an edited GPU file may differ in its all-reduce alone."""

    def measured(about: dict[str, Any], sha256: str) -> None:
        about["cost_model"] |= {
            "kind": "measured",
            "tables": [{"operator": "gemm", "file": "gemm.csv", "sha256": sha256}],
        }

    def made(name: str, edit: Any) -> Path:
        return edited(folder, "base", edit).rename(tmp_path / name)

    one = made("one", lambda metrics: measured(metrics["about"], "1" * 64))
    other = made("other", lambda metrics: measured(metrics["about"], "2" * 64))
    assert [difference.name for difference in compare(read_runs([one, other])).settings] == ["operator tables"]

    def line(about: dict[str, Any], gbs: float) -> None:
        about["cost_model"]["all_reduce"] = {"direct_gbs": gbs, "source": "here"}
        about["cost_model"]["all_gather"] = {"8": {"gbs": gbs, "source": "here"}}

    slow = made("slow", lambda metrics: line(metrics["about"], 96.0))
    fast = made("fast", lambda metrics: line(metrics["about"], 223.0))
    names = [difference.name for difference in compare(read_runs([slow, fast])).settings]
    assert names == ["cost.all_reduce.direct_gbs", "cost.all_gather.8.gbs"]


def test_figures_are_those_of_metrics_json_and_ratios_are_to_the_first(folder: Path) -> None:
    comparison = found(folder, "base", "narrow")
    metrics = [json.loads((folder / name / "metrics.json").read_text()) for name in ("base", "narrow")]
    for figure in comparison.figures:
        assert list(figure.values) == [each[figure.group][figure.name] for each in metrics]
    ttft = comparison.figure("ttft_us_p99")
    assert ttft.values[0] is not None
    assert ttft.values[1] is not None
    assert ttft.changes[0].ratio == ttft.values[1] / ttft.values[0]
    assert ttft.changes[0].verdict == "worse"  # two at a time: the others wait
    assert "x higher" in ttft.changes[0].words


def test_pairs_agree_with_a_join_of_the_tables(folder: Path) -> None:
    pairs = found(folder, "base", "narrow").pairs[0]
    assert pairs is not None
    first, other = (pl.read_csv(folder / name / "requests.csv") for name in ("base", "narrow"))
    both = first.join(other, on="label", suffix="_other")
    change_us = (both["ttft_us_other"] - both["ttft_us"]).to_numpy()
    ttft = pairs.metrics["ttft"]
    assert (pairs.matched, pairs.completed_in_both, ttft.count) == (40, 40, 40)
    assert ttft.change_us_median == np.median(change_us)
    assert ttft.worst.change_us == change_us.max()
    assert ttft.best.change_us == change_us.min()
    assert [each.change_us for each in ttft.most_changed] == sorted(change_us, key=abs, reverse=True)[:5]
    assert ttft.faster_share + ttft.same_share + ttft.slower_share == pytest.approx(1)
    assert ttft.slower_share == np.mean(change_us > 0.01 * both["ttft_us"].to_numpy())


def test_turns_of_sessions_are_matched_by_label_because_their_ids_differ_between_runs(folder: Path) -> None:
    first, other = (pl.read_csv(folder / name / "requests.csv") for name in ("sessions", "few-sessions"))
    ids = first.join(other, on="request_id")
    assert (ids["label"] != ids["label_right"]).any()  # the premise of this test
    pairs = found(folder, "sessions", "few-sessions").pairs[0]
    assert pairs is not None
    assert (pairs.matched_by, pairs.completed_in_both) == ("label", 40)
    by_label = dict(zip(other["label"], other["request_id"], strict=True))
    for each in pairs.metrics["ttft"].most_changed:
        assert by_label[each.label] == each.request_ids[1]


def test_requests_without_labels_are_matched_by_id_and_only_if_their_prompts_are_alike(
    folder: Path, tmp_path: Path
) -> None:
    copies = []
    for name in ("base", "narrow"):
        copies.append(tmp_path / name)
        shutil.copytree(folder / name, copies[-1])
        table = pl.read_parquet(copies[-1] / "requests.parquet").with_columns(label=pl.lit(""))
        if name == "narrow":
            grown = pl.col("prompt_tokens") + (pl.col("request_id") == 3).cast(pl.Int64)
            table = table.with_columns(prompt_tokens=grown)
        table.write_parquet(copies[-1] / "requests.parquet")
    pairs = compare(read_runs(copies)).pairs[0]
    assert pairs is not None
    assert (pairs.matched_by, pairs.matched) == ("request_id", 39)


def test_the_csv_gives_the_same_as_the_parquet(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "narrow", tmp_path / "narrow")
    (tmp_path / "narrow" / "requests.parquet").unlink()
    from_csv, from_parquet = read_run(tmp_path / "narrow").requests, read_run(folder / "narrow").requests
    assert from_csv is not None
    assert from_parquet is not None
    for name, column in from_parquet.items():
        np.testing.assert_array_equal(from_csv[name], column)


def test_intervals_stand_side_by_side_and_it_is_reported_whether_they_overlap(folder: Path) -> None:
    comparison = found(folder, "base", "narrow")
    row = next(row for row in comparison.intervals if row.name == "ttft_us_p99")
    first, other = row.intervals
    assert first is not None
    assert other is not None
    assert row.overlaps == (first[0] <= other[1] and other[0] <= first[1],)
    assert row.ratios_at_ends == ((other[0] / first[0], other[1] / first[1]),)
    assert "share one calibration" in comparison.intervals_note
    told = [line for line in lines(folder, "base", "narrow").splitlines() if "TPOT p50" in line][-1]
    assert "overlap" in told or "apart" in told


def test_errors_of_different_calibrations_are_not_taken_for_shared(folder: Path) -> None:
    comparison = found(folder, "base", "calibrated")
    assert all(ratios == (None,) for ratios in (row.ratios_at_ends for row in comparison.intervals))
    assert "no run is certainly ahead" in comparison.intervals_note


def slos_of_base(told: list[str]) -> str:
    """The verdicts of the second run."""
    return next(line for line in told if line.startswith("SLOs of B"))


def test_a_verdict_is_not_sure_if_the_limit_lies_within_the_interval(folder: Path) -> None:
    def edit(metrics: dict[str, Any]) -> None:
        low, high = metrics["intervals"]["answers"]["ttft_us_p99"]
        metrics["slos"][0] |= {"bound_us": round((low + high) / 2), "measured_us": low, "met": True}

    copy = edited(folder, "base", edit)
    comparison = compare(read_runs([folder / "narrow", copy]))
    assert "not sure: " in render_comparison(comparison)
    assert "not sure: " in slos_of_base(comparison_lines(comparison))
    assert "not sure: " not in slos_of_base(lines(folder, "narrow", "base").splitlines())


def test_runs_without_intervals_report_so(folder: Path) -> None:
    (folder / "loose2").exists() or shutil.copytree(folder / "loose", folder / "loose2")
    assert "unknown" in found(folder, "loose", "loose2").intervals_note


# ------------------------------------------------------------------------------------------------------ comparable runs


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("base", "seed"), ("different workloads", "different seeds (7 and 8)")),
        (("base", "loose"), ("different SLOs",)),
        (("base", "calibrated"), ("different calibrations",)),
        (("base", "sessions"), ("different workloads",)),
        (("base", "refusing"), ("different numbers of completed requests",)),
    ],
)
def test_what_is_not_fair_is_reported(folder: Path, names: tuple[str, ...], words: tuple[str, ...]) -> None:
    warnings = "\n".join(found(folder, *names).warnings)
    for word in words:
        assert word in warnings
    assert "not fair: " in lines(folder, *names)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model",), "qwen3-8b", "different models (qwen3-0.6b and qwen3-8b)"),
        (("gpu",), "H200-SXM", "different GPUs (H100-SXM and H200-SXM)"),
        (("workload", "limit"), 10, "different limits (none and 10)"),
        (("interrupted",), True, "base-edited was interrupted"),
    ],
)
def test_other_hardware_limits_and_interruptions_are_reported(
    folder: Path, path: tuple[str, ...], value: object, words: str
) -> None:
    def edit(metrics: dict[str, Any]) -> None:
        about = metrics["about"]
        for part in path[:-1]:
            about = about[part]
        about[path[-1]] = value

    edited(folder, "base", edit)
    assert words in "\n".join(found(folder, "base", "base-edited").warnings)


def test_another_workload_is_not_paired_and_a_run_without_requests_reports_why(folder: Path) -> None:
    assert found(folder, "base", "sessions").pairs == (None,)
    comparison = found(folder, "base", "loose")
    assert comparison.pairs == (None,)
    assert any("--no-requests" in note for note in comparison.notes)


# -------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("first", "other", "kind", "better", "words", "verdict"),
    [
        (1.66e6, 0.41e6, "us", "lower", "4.0x lower", "better"),
        (100.0, 112.0, "us", "lower", "12 % higher", "worse"),
        (100.0, 100.4, "us", "lower", "about the same", "same"),
        (100.0, 100.0, "us", "lower", "the same", "same"),
        (10.0, 2000.0, "rate", "higher", "200x higher", "better"),
        (0.25, 0.5, "share", "higher", "25 points higher", "better"),
        (0.5, 0.5004, "share", "higher", "about the same", "same"),
        (0, 7, "count", "lower", "7 more", "worse"),
        (7, 0, "count", "lower", "7 fewer", "better"),
        (2000, 1000, "count", "", "2.0x lower", "changed"),
        (0.0, 5.0, "us", "lower", "up from 0", "worse"),
        (5.0, 0.0, "us", "lower", "down to 0", "better"),
        (None, 5.0, "us", "lower", "nothing measured in the first", "unknown"),
        (5.0, None, "us", "lower", "nothing measured here", "unknown"),
    ],
)  # fmt: skip
def test_changes_are_reported_in_words(
    first: float | None, other: float | None, kind: Any, better: str, words: str, verdict: str
) -> None:
    moved = change(first, other, kind, better)
    assert (moved.words, moved.verdict) == (words, verdict)


def test_settings_are_reported_as_on_a_command_line() -> None:
    values: tuple[object, ...] = (None, "", [], True, [7, 8], 0, "fcfs")
    assert [setting(value) for value in values] == ["none", "none", "none", "true", "7,8", "0", "fcfs"]


def test_ranges_name_their_unit_once() -> None:
    assert span("149 ms", "370 ms") == "149 to 370 ms"
    assert span("850 ms", "1.2 s") == "850 ms to 1.2 s"
    assert span("11.8", "12.4") == "11.8 to 12.4"


@pytest.mark.parametrize("names", [("base", "narrow"), ("base", "refusing"), tuple(RUNS)])
def test_text_is_at_most_100_columns_wide_and_reports_no_nan(folder: Path, names: tuple[str, ...]) -> None:
    text = lines(folder, *names)
    assert all(len(line) <= COLUMNS for line in text.splitlines())
    assert not re.search(r"\b(nan|inf|None)\b", text)
    for name in names:
        assert str(folder / name)[-60:] in text.replace("\n   ", "")


def test_headline_of_two_runs_has_both_values_and_the_change(folder: Path) -> None:
    first, other = (json.loads((folder / name / "metrics.json").read_text()) for name in ("base", "narrow"))
    values = [show_us(each["latency"]["ttft_us_p99"]) for each in (first, other)]
    said = headline(found(folder, "base", "narrow"))
    assert f"narrow against base: TTFT p99 {values[0]} -> {values[1]}, " in said
    assert "x higher" in said


def test_headline_of_many_runs_counts_runs_that_meet_the_slos(folder: Path) -> None:
    assert "1 of 3 runs meet their SLOs (base)" in headline(found(folder, "base", "narrow", "refusing"))


# --------------------------------------------------------------------------------------------------------- bottleneck


def summary(**changes: Any) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {
        "requests": {"arrived": 10, "by_reject_reason": {}},
        "kv": {"used_share_max": 0.4},
        "scheduler": {
            "waiting_mean": 0.0, "running_max": 8, "retractions": 0, "admissions_deferred_by_reason": {},
        },
        "device": {"busy_fraction": 0.99, "bubble_share": 0.0},
    }  # fmt: skip
    for name, value in changes.items():
        group = next(group for group in groups.values() if name in group)
        group[name] = value
    return groups


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "none"),
        ({"waiting_mean": 30.0, "admissions_deferred_by_reason": {"prefill_budget": 9, "pages": 1}}, "GPU compute"),
        ({"waiting_mean": 30.0, "admissions_deferred_by_reason": {"pages": 9, "prefill_budget": 1}}, "KV memory"),
        ({"waiting_mean": 30.0, "retractions": 4, "used_share_max": 1.0}, "KV memory"),
        ({"waiting_mean": 30.0, "admissions_deferred_by_reason": {"running_limit": 9}}, "limit on running requests"),
        ({"by_reject_reason": {"queue_full": 3}}, "GPU compute"),
        ({"retractions": 4}, "KV memory"),
        ({"bubble_share": 0.3}, "CPU"),
        ({"busy_fraction": None}, "unknown"),
        ({"arrived": 0}, "unknown"),
    ],
)
def test_bottleneck_is_what_requests_wait_for(changes: dict[str, Any], name: str) -> None:
    assert bottleneck(summary(**changes)).name == name


def test_bottleneck_of_two_running_requests_is_that_limit(folder: Path) -> None:
    assert read_run(folder / "narrow").bottleneck.name == "limit on running requests"


# ------------------------------------------------------------------------------------------------------------ refusals


def test_too_few_runs_and_the_same_twice_are_refused(folder: Path) -> None:
    assert "at least two run folders, got none" in refused()
    assert "at least two run folders, got one" in refused(folder / "base")
    assert "is given twice" in refused(folder / "base", folder / "narrow" / ".." / "base")


def test_what_is_no_run_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused(folder / "base", tmp_path / "nowhere")
    assert "is a file" in refused(folder / "base", folder / "base" / "metrics.json")
    assert "it has no metrics.json" in refused(folder / "base", tmp_path)
    assert "the runs are inside it: base, " in refused(folder / "base", folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"a": NaN}', "NaN is not a number"),
        ("[]", "is not from `lockstep simulate`"),
        ('{"about": {"engines": [{}, {}]}}', "is not from `lockstep simulate`"),
        ('{"about": {"format": "other"}}', "its about.format is not `lockstep-metrics`"),
        ('{"about": {"format": "lockstep-metrics", "format_version": 99}}', "is of version `99`"),
        (
            '{"about": {"format": "lockstep-metrics", "format_version": 1}}',
            "Object missing required field `seed` - at `$.about`",
        ),
    ],
)
def test_foreign_metrics_are_refused(folder: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    assert words in refused(folder / "base", tmp_path)


def test_folders_put_together_from_two_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(folder / "base", mixed)
    shutil.copy(folder / "seed" / "metrics.json", mixed)
    assert "has a metrics.json of seed 8" in refused(folder / "base", mixed)
    shutil.copy(folder / "base" / "metrics.json", mixed)
    pl.read_parquet(mixed / "requests.parquet").head(3).write_parquet(mixed / "requests.parquet")
    assert "3 requests in its table and 40 in metrics.json" in refused(folder / "base", mixed)
    (mixed / "requests.parquet").write_bytes(b"PAR1 not really")
    assert "requests.parquet` cannot be read" in refused(folder / "base", mixed)


# ---------------------------------------------------------------------------------------------------------- the command


def test_files_are_written_once_and_hold_what_was_found(folder: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "new" / "c.json", "--html", tmp_path / "c.html")
    result = run(folder / "base", folder / "narrow", *files)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("narrow against base: TTFT p99 ")
    described = json.loads((tmp_path / "new" / "c.json").read_text())
    assert [each["name"] for each in described["runs"]] == ["base", "narrow"]
    assert described["pairs"][0]["metrics"]["ttft"]["count"] == 40
    assert {"name": "max_running_requests", "values": [256, 2]} in described["settings"]
    assert "exists" in run(folder / "base", folder / "narrow", *files).stderr
    before = (tmp_path / "c.html").read_bytes()
    assert run(folder / "base", folder / "narrow", *files, "--overwrite").exit_code == 0
    assert (tmp_path / "c.html").read_bytes() == before


def test_runs_of_one_name_are_distinguished(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "narrow", tmp_path / "base")
    names = [each.name for each in read_runs([folder / "base", tmp_path / "base"])]
    assert len(set(names)) == 2
    assert all(name.endswith("base") for name in names)


# ------------------------------------------------------------------------------------------------------------- the page


def test_page_reports_it_all_loads_nothing_and_keeps_words_words(folder: Path) -> None:
    def edit(metrics: dict[str, Any]) -> None:
        metrics["about"]["command"] = EVIL
        metrics["about"]["scheduler"]["schedule_policy"] = EVIL

    evil = edited(folder, "base", edit)
    page = render_comparison(compare([read_run(folder / "narrow"), read_run(evil, EVIL)]))
    assert "<img" not in page
    assert "unsafe" not in page
    assert not re.search(r'\s(src|style|on\w+)="', page.partition("<script")[0])
    assert page.count("&lt;img") >= 4
    for words in ("The runs side by side", "Request by request", "Most changed", "Every figure", "intervals"):
        assert words in page
    assert len(page) < 400_000


def test_runs_that_differ_in_load_alone_are_drawn_against_it(folder: Path) -> None:
    page = render_comparison(found(folder, "fourfold", "base", "double"))
    compared = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["compare"]
    assert compared["x_label"] == "offered load (requests/s)"
    assert compared["headings"] == ["base", "double", "fourfold"]
    page = render_comparison(found(folder, "base", "double", "narrow"))
    assert json.loads(page.partition('id="data">')[2].partition("</script>")[0])["compare"]["names"] is not None


def test_distributions_of_several_runs_share_one_axis() -> None:
    first, other = np.arange(1000.0), np.arange(1000.0) * 3
    drawn = overlay("c", "l", [(0, "a", first), (1, "b", other), (2, "none", np.array([-1.0, np.nan]))])
    assert drawn is not None
    assert [line["name"] for line in drawn["lines"]] == ["a", "b"]
    x = np.array(drawn["x"])
    assert (np.diff(x) >= 0).all()
    for line, values in zip(drawn["lines"], (first, other), strict=True):
        assert line["share"][0] == 0
        assert line["share"][-1] == 1
        assert line["share"][50] == pytest.approx(np.mean(values <= x[50]), abs=1e-4)
    assert overlay("c", "l", [(0, "a", np.array([-1.0]))]) is None


@needs_chromium
@pytest.mark.parametrize(
    ("names", "charts"), [(("base", "narrow"), 3 + 4 + 3), (("base", "loose"), 3 + 4), (tuple(RUNS), 3 + 4 + 3)]
)
def test_browser_draws_every_chart_without_a_complaint(
    folder: Path, tmp_path: Path, names: tuple[str, ...], charts: int
) -> None:
    path = tmp_path / "comparison.html"
    path.write_text(render_comparison(found(folder, *names)), "utf-8")
    dom = dom_of(path, tmp_path / "profile")
    assert dom.count('class="uplot') == charts


def test_errors_are_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_run(tmp_path / "nowhere")
