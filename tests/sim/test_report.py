"""The HTML report: its contents, what it must never contain, and that it stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import BatchPlan, LaunchBatch, Step, StreamTokens
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    TokenDigest,
)
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.packed_rows import PackedRows
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.report import ReportRun, render_report, write_report
from lockstep.sim.report.parts import escape
from lockstep.sim.report.payload import ChartSpans, pack, timeline
from lockstep.sim.results.text import NOTHING, count, digits, duration, percent
from tests.support.browser import dom_of, needs_chromium

EVIL = '</script><img src=x onerror="alert(1)">{{script}}&amp;'
FACTS = {"model": "qwen3-8b", "gpu": "1 x H200", "seed": "7", "command": "lockstep simulate --rate 8 --seed 7"}


def run_data(
    requests: int, *, label: str = "", slos: tuple[str, ...] = ("ttft_p99=500ms",), gap_us: int = 50_000
) -> RunData:
    """One request after another: an extend and nine decodes of 8 ms each, on a device that is idle in between."""
    fold = MetricsFold(kv_pages=1000)
    batch_id = 0
    for request_id in range(requests):
        time_us = request_id * gap_us * 4
        arrived = RequestArrived(
            time_us=time_us,
            request_id=request_id,
            prompt=TokenDigest(100 + request_id, b""),
            max_new_tokens=10,
            label=label,
        )
        fold.observe(arrived, Step())
        for position in range(10):
            time_us += 9_000
            fold.gauge(time_us, 0, 1, 900, 50)
            fold.cpu_interval(time_us, time_us + 300, "plan")
            start = 0 if position == 0 else 99 + request_id + position
            stop = 100 + request_id + position
            one = np.array([request_id], np.int64)
            plan = BatchPlan(
                batch_id=batch_id,
                mode="decode" if position else "extend",
                rows=np.zeros(1, np.int32),
                request_ids=one,
                starts=np.array([start], np.int32),
                stops=np.array([stop], np.int32),
                extend_rows=0 if position else 1,
            )
            admitted = RequestAdmitted(time_us, request_id, 0, 0, 100 + request_id, 0)
            fold.observe(LaneReady(time_us), Step([] if position else [admitted], [LaunchBatch(plan)]))
            finished = BatchFinished(
                time_us=time_us + 8_500, batch_id=batch_id, started_us=time_us + 300, finished_us=time_us + 8_300
            )
            ones = np.ones(1, np.int32)
            stream = StreamTokens(one, np.array([position], np.int32), ones, ones)
            ended = [RequestFinished(time_us + 8_500, request_id, "length", 10, 0)] if position == 9 else []
            fold.observe(finished, Step([*ended], [stream]))
            batch_id += 1
    return fold.result([Slo.parse(slo) for slo in slos])


def repeated(rows: PackedRows, times: int, shift_us: int) -> PackedRows:
    """The rows many times over, each time later by `shift_us`."""
    many = PackedRows(*rows.names)
    for number in range(times):
        shift = dict.fromkeys(MOMENTS, number * shift_us)
        many.add_columns(*(rows.column(name) + shift.get(name, 0) for name in rows.names))
    return many


MOMENTS = ("launched_us", "started_us", "finished_us", "start_us")


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "": []}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = [tag] if tag in ("script", "style") else []

    def handle_endtag(self, tag: str) -> None:
        if [tag] == self.inside:
            self.inside = []

    def handle_data(self, data: str) -> None:
        self.texts[self.inside[0] if self.inside else ""].append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts[""])

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0], parse_constant=lambda name: pytest.fail(f"{name} in the data"))


def test_one_run_reads_from_the_answer_to_the_command(tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "deep" / "report.html", [ReportRun("8 req/s", FACTS, run_data(20))], title="azure-code"
    )
    page = Page(path.read_text("utf-8"))
    story = ["azure-code", "Meets its SLO", "20 of 20 requests", "✓ met", "In numbers", "How long did requests take?"]
    story += ["What was the server doing?", "Batch by batch", "Which requests waited longest?", FACTS["command"]]
    places = [page.text.index(words) for words in story]
    assert places == sorted(places)
    assert not page.all("fieldset")
    charts = {attrs["data-chart"] for attrs in page.all("div") if "data-chart" in attrs}
    assert charts == {
        "ttft",
        "tpot",
        "itl",
        "e2e",
        "queue",
        "scatter",
        "load",
        "kv",
        "tokens",
        "output",
        "gpu",
        "timeline",
    }


def test_intervals_calibration_and_bottleneck_stand_beside_the_answers() -> None:
    answers = {"ttft_us_p99": [149e3, 370e3], "tpot_us_p99": None}
    intervals = {"calibration": "of 2026", "coverage": 0.9, "time_factors": [0.84, 1.17], "answers": answers}
    data = run_data(20)
    data.summary["requests"] |= {"rejected": 12, "by_reject_reason": {"queue_full": 10, "too_long": 2}}
    remarks = ["the calibration has not seen this model"]
    run = ReportRun("r", FACTS, data, intervals=intervals, calibration="of 2026", remarks=remarks)
    text = Page(render_report([run], title="t")).text
    head = text[: text.index("How long did requests take?")]
    for words in ("90 %: 149 to 370 ms", "of 2026", "0.84 to 1.17 times", "Bottleneck", "10 queue full, 2 too long"):
        assert words in head
    assert remarks[0] in head


def test_several_runs_are_compared_and_can_be_switched() -> None:
    slow = run_data(20, slos=("ttft_p99=1ms",))
    runs = [ReportRun("4 req/s", FACTS, run_data(20), 4.0), ReportRun("8 req/s", FACTS, slow, 8.0)]
    page = Page(render_report(runs, title="How much fits?", headline="Meets the SLO up to 4 req/s"))
    assert "Meets the SLO up to 4 req/s" in page.text
    assert "✓ met" in page.text
    assert "✕ missed" in page.text
    assert [attrs["value"] for attrs in page.all("input") if attrs.get("type") == "radio"] == ["0", "1"]
    assert page.data["compare"]["rates"] == [4.0, 8.0]
    assert page.data["first"] == 0
    assert "Meets the SLOs up to 4 req/s" in render_report(runs, title="without a headline")


def test_runs_at_equal_rates_are_compared_by_name() -> None:
    runs = [ReportRun(policy, FACTS, run_data(5), 4.0) for policy in ("fcfs", "longest prefix")]
    assert Page(render_report(runs, title="")).data["compare"]["names"] == ["fcfs", "longest prefix"]


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_little_or_no_data_is_reported_in_words_and_never_as_nan(requests: int) -> None:
    for runs in (1, 2):
        page = Page(render_report([ReportRun("r", {}, run_data(requests))] * runs, title="t"))
        assert page.data["runs"][0]["span_us"]
        assert not re.search(r"\b(nan|inf|none|null|undefined)\b", page.text.replace("none failed", ""), re.IGNORECASE)
        if requests == 0:
            assert "No request was completed" in page.text
            assert "✓" not in page.text


def test_words_from_users_stay_words() -> None:
    facts = {EVIL: EVIL, "command": EVIL, "version": EVIL}
    for runs in (1, 2):
        text = render_report(
            [ReportRun(EVIL, facts, run_data(3, label=EVIL))] * runs, title=EVIL, subtitle=EVIL, headline=EVIL
        )
        page = Page(text)
        assert not page.all("img")
        assert len(page.all("script")) == 2
        assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"]
        assert page.text.count("onerror") >= 8
        assert "<" not in page.texts["script"][0]


def test_page_loads_nothing_and_its_policy_lets_only_its_own_script_run() -> None:
    page = Page(render_report([ReportRun("r", FACTS, run_data(3))] * 2, title="t"))
    loads = [
        attrs[name] for _, attrs in page.tags for name in ("src", "href", "action", "data", "srcset") if name in attrs
    ]
    assert all(re.fullmatch(r"#[\w-]+|data:,", str(place)) for place in loads), loads
    assert not re.search(r"@import|url\(", page.texts["style"][0])
    script = page.texts["script"][1]
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|sendBeacon|importScripts|eval)\s*\(|innerHTML", script)
    policy = next(str(attrs["content"]) for attrs in page.all("meta") if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    for text in (script, page.texts["style"][0]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "unsafe" not in policy


def test_license_of_the_charts_travels_with_them() -> None:
    page = render_report([ReportRun("r", {}, run_data(1))], title="t")
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert "The above copyright notice and this permission notice shall be included" in page


@pytest.mark.parametrize("runs", [1, 5])
def test_300_000_batches_fit_and_the_page_reports_what_it_merged(runs: int) -> None:
    data = run_data(300)
    times, span_us = 100, data.span_us[1] + 100_000
    many = replace(
        data,
        packed=replace(
            data.packed,
            batches=repeated(data.packed.batches, times, span_us),
            cpu=repeated(data.packed.cpu, times, span_us),
        ),
        span_us=(0, times * span_us),
    )
    assert len(many.batches.batch_id) == 300_000
    text = render_report([ReportRun("long", FACTS, many)] * runs, title="t")
    assert len(text.encode()) < 8_000_000
    assert re.search(r"it shows 300,000 batches as [\d,]+ and 300,000 CPU intervals as", text)
    assert len(render_report([ReportRun("long", FACTS, many)], title="t", bytes_max=600_000).encode()) < 600_000


def test_report_without_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        render_report([], title="t")


def unpack(column: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The function of charts.js."""
    raw = np.frombuffer(base64.b64decode(column["b64"]), "<" + column["dtype"]).astype(np.float64)
    return column["first"] + np.cumsum(raw) if "first" in column else raw


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 255], "u1"),
        ([0, 256], "u2"),
        ([1 << 16], "u4"),
        ([-1, 5], "i4"),
        ([1 << 40], "f8"),
        ([], "u1"),
        ([0.5], "f4"),
    ],
)
def test_columns_are_packed_in_the_smallest_type_and_come_back(values: list[float], dtype: str) -> None:
    column = pack(np.array(values, np.float64 if 0.5 in values else np.int64))
    assert column["dtype"] == dtype
    assert unpack(column).tolist() == values


def test_times_are_packed_as_distances() -> None:
    times_us = np.array([1 << 45, (1 << 45) + 7, (1 << 45) + 300])
    column = pack(times_us, delta=True)
    assert column["dtype"] == "u2"
    assert unpack(column).tolist() == times_us.tolist()


def test_merging_keeps_counts_sums_and_busy_time() -> None:
    n, most = 10_000, 700
    start_us = np.arange(n, dtype=np.int64) * 100
    lane = (np.arange(n) % 7 == 0).astype(np.int64)
    tokens = np.arange(n, dtype=np.int64)
    merged = timeline(ChartSpans(start_us, start_us + 80, lane, ("a", "b")), {"tokens": (tokens, "sum")}, most)
    columns = {name: unpack(column) for name, column in merged["columns"].items()}
    assert merged["shown"] == len(columns["start"]) <= most
    assert columns["count"].sum() == n
    assert columns["tokens"].sum() == tokens.sum()
    assert (np.diff(columns["start"]) >= 0).all()
    busy_us = (columns["busy"] / 255 * columns["length"]).sum()
    assert busy_us == pytest.approx(80 * n, rel=0.02)
    assert columns["count"][columns["lane"] == 1].sum() == lane.sum()


def test_lone_batch_between_others_stays_visible() -> None:
    start_us = np.arange(5000, dtype=np.int64) * 100
    lane = np.zeros(5000, np.int64)
    lane[2500] = 1
    merged = timeline(ChartSpans(start_us, start_us + 90, lane, ("decode", "extend")), {}, 100)
    columns = {name: unpack(column) for name, column in merged["columns"].items()}
    alone = columns["lane"] == 1
    assert columns["start"][alone].tolist() == [250_000]
    assert columns["length"][alone].tolist() == [90]


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 µs"), (950, "950 µs"), (999.7, "1 ms"), (85_000, "85 ms"), (1_234_000, "1.23 s"), (90e6, "90 s"),
     (204e6, "3.4 min"), (9e9, "2.5 h"), (-1, NOTHING), (None, NOTHING), (float("nan"), NOTHING)],
)  # fmt: skip
def test_durations_have_three_digits_and_the_unit_that_suits(us: float | None, text: str) -> None:
    assert duration(us) == text


def test_numbers_are_rounded_for_reading() -> None:
    assert [digits(v) for v in (0.012345, 4.5678, 1_234_567, 10.0, None)] == [
        "0.0123",
        "4.57",
        "1,234,567",
        "10",
        NOTHING,
    ]
    assert [count(1, "request"), count(2, "request"), count(None)] == ["1 request", "2 requests", NOTHING]
    assert [percent(0.1234), percent(1.0), percent(None)] == ["12.3 %", "100 %", NOTHING]


@needs_chromium
@pytest.mark.parametrize("requests", [0, 1, 40])
def test_browser_draws_every_chart_without_a_complaint(tmp_path: Path, requests: int) -> None:
    runs = [ReportRun(f"{rate} req/s", FACTS, run_data(requests, label=EVIL), rate) for rate in (4.0, 8.0)]
    path = write_report(tmp_path / "report.html", runs, title=EVIL)
    dom = dom_of(path, tmp_path / "profile")
    drawn = dom.count('class="uplot')
    assert drawn == {0: 3, 1: 3 + 5 + 5, 40: 3 + 6 + 5}[requests]


def test_names_that_cannot_be_seen_are_spelt_out_on_every_page() -> None:
    """Pages insert text through one function, which leaves no characters that reorder or reverse text beside them."""
    assert escape("a\x1b[2J<\x9b\u202eb\u2066\x7f\u2028") == "a\\x1b[2J&lt;\\x9b\\u202eb\\u2066\\x7f\\u2028"
    assert escape("é 日本 שלום\nb") == "é 日本 שלום\nb"
    root = Path(__file__).parents[2]
    modules = [*root.glob("packages/*/src/**/*.py"), *root.glob("tools/src/**/*.py")]
    takers = {path.name for path in modules if re.search(r"^(import html|from html import)\b", path.read_text(), re.M)}
    assert takers == {"parts.py"}
    page = render_report([ReportRun("8 req/s", FACTS, run_data(3, label="x\u202ey\x1b"))], title="t\u2066")
    assert "x\\u202ey\\x1b" in page
    assert "t\\u2066" in page
    assert not [one for one in page if one in "\u202e\u2066\x1b"]
