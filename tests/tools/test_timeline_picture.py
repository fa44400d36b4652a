"""The picture of a timeline: where bars and ticks are, in characters and in SVG."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from lockstep.sim.results.text import duration
from lockstep.tools import timeline_picture
from lockstep.tools.timeline_picture import NAME_WIDTH, PictureLane, _merged, headline_name, picture, text_lines

S = 1_000_000
LANES = [
    PictureLane("wait", "waits: <pages>", [(1 * S, 1_250_000)]),
    PictureLane("decode", "decode", [(1_500_000, 1_600_000), (1_601_000, 1_700_000), (1_702_000, 2 * S)]),
    PictureLane("token", "t" * 50, [(1_250_000, 1_250_000), (2 * S, 2 * S)]),
]


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A timeline from 1 s to 2 s with these lanes."""
    monkeypatch.setattr(timeline_picture, "lanes", lambda timeline, chronicle: LANES)
    return SimpleNamespace(arrived_us=1 * S, stop_us=2 * S, label="a<b", request_id=3)


def test_bars_in_characters(timeline: Any) -> None:
    """60 characters are one second."""
    head, *rows = text_lines(timeline, cast(Any, None))
    assert head == f"{'':{NAME_WIDTH}}1.000 s{'2.000 s':>53}"
    names = ["waits: <pages>", "decode", "t" * (NAME_WIDTH - 1)]
    bars = ["w" * 15 + "." * 45, "." * 30 + "D" * 30, "." * 15 + "|" + "." * 43 + "|"]
    assert rows == [f"{name:{NAME_WIDTH}}{bar}" for name, bar in zip(names, bars, strict=True)]


def test_bars_in_svg(timeline: Any) -> None:
    """880 units are one second, from 280 on; lanes are 26 apart, and bars 16 high."""
    svg = ElementTree.fromstring(picture(timeline, cast(Any, None)))
    assert svg.get("viewBox") == "0 0 1180 112"
    assert svg.get("aria-label") == "Waits and batches of a<b, from 1.000 s to 2.000 s"
    found = [(one.get("class"), one.get("x"), one.get("y"), one.get("width")) for one in svg.iter("rect")]
    assert found == [
        ("lane-wait", "280.0", "26", "220.0"),
        ("lane-decode", "720.0", "52", "176.0"),
        ("lane-decode", "897.8", "52", "262.2"),
        ("lane-token", "500.0", "78", "1.2"),
        ("lane-token", "1160.0", "78", "1.2"),
    ]
    assert {one.get("height") for one in svg.iter("rect")} == {"16"}
    assert [one.text for one in svg.iter("title")] == [
        f"waits: <pages>: 1.000 s, {duration(250_000)}",
        f"decode: 1.500 s, {duration(200_000)}",
        f"decode: 1.702 s, {duration(298_000)}",
        f"{'t' * 50}: 1.250 s",
        f"{'t' * 50}: 2.000 s",
    ]
    xs = ["280.0", "456.0", "632.0", "808.0", "984.0", "1160.0"]
    lines = [(one.get("x1"), one.get("x2"), one.get("y1"), one.get("y2")) for one in svg.iter("line")]
    assert lines == [(x, x, "20", "112") for x in xs]
    texts = [(one.text, one.get("x"), one.get("y"), one.get("text-anchor")) for one in svg.iter("text")]
    clocks = ["1.000 s", "1.200 s", "1.400 s", "1.600 s", "1.800 s", "2.000 s"]
    anchors = ["start", "middle", "middle", "middle", "middle", "end"]
    assert texts[:6] == [(text, x, "14", anchor) for text, x, anchor in zip(clocks, xs, anchors, strict=True)]
    assert texts[6:] == [(lane.name, "268", str(26 * n + 13), "end") for n, lane in enumerate(LANES, 1)]


def test_a_request_that_ends_as_it_arrives_has_a_picture(timeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline.stop_us = timeline.arrived_us
    monkeypatch.setattr(timeline_picture, "lanes", lambda timeline, chronicle: [PictureLane("wait", "w", [(S, S)])])
    assert text_lines(timeline, cast(Any, None))[1].endswith("w" + "." * 59)
    (bar,) = ElementTree.fromstring(picture(timeline, cast(Any, None))).iter("rect")
    assert (bar.get("x"), bar.get("width")) == ("280.0", "1.2")


def test_bars_are_merged_where_no_gap_can_be_seen() -> None:
    assert _merged([(0, 10), (15, 20), (24, 30)], 5) == [(0, 10), (15, 30)]
    assert _merged([(20, 22), (0, 30), (31, 40)], 2) == [(0, 40)]
    assert _merged([], 5) == []


def test_a_request_without_a_label_has_its_number() -> None:
    assert headline_name(cast(Any, SimpleNamespace(label="x", request_id=3))) == "x"
    assert headline_name(cast(Any, SimpleNamespace(label="", request_id=3))) == "r3"
