"""A request's timeline as a picture: lanes for its waits and batches, as text for a terminal and as one HTML page.

The page loads no files and runs no scripts. Its picture is SVG; its style is that of the simulator's reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.render import Names
from lockstep.core.contract.text import shown
from lockstep.sim.report.page import still_page
from lockstep.sim.report.parts import escape
from lockstep.sim.results.text import duration
from lockstep.tools.narration import cause_key, clock, headline, sentences, without
from lockstep.tools.request_timeline import Chronicle, RequestTimeline

LaneKind = Literal["wait", "prefill", "decode", "out", "token"]

WIDTH = 60  # characters of the bars
NAME_WIDTH = 38
LETTERS = {"wait": "w", "prefill": "E", "decode": "D", "out": "-", "token": "|"}

LEFT, LANE, BAR, RIGHT, WIDE = 280, 26, 16, 20, 1180  # sizes in the picture, in its own units

STYLE = """
.lane-wait { fill: var(--other); } .lane-prefill { fill: var(--prefill); } .lane-decode { fill: var(--decode); }
.lane-out { fill: var(--mixed); } .lane-token { fill: var(--ink); }
.picture { width: 100%; height: auto; font-size: 13px; } .picture text { fill: var(--ink); }
.picture .tick { stroke: var(--grid); } .picture .when { fill: var(--ink-soft); font-size: 12px; }
.told { list-style: none; padding: 0; margin: 1.2rem 0 0; display: grid; gap: 0.9rem; }
.told li { display: grid; grid-template-columns: 8rem minmax(0, 1fr); gap: 0 1rem; }
.told time { color: var(--ink-soft); font-variant-numeric: tabular-nums; text-align: right; }
.told small { display: block; color: var(--ink-soft); font-size: 0.875rem; }
"""


@dataclass
class PictureLane:
    """One row of the picture: its kind, its name and the times of its bars."""

    kind: LaneKind
    name: str
    bars: list[tuple[int, int]]  # [start:stop) in microseconds


def lanes(timeline: RequestTimeline, chronicle: Chronicle) -> list[PictureLane]:
    """Return a lane for each cause of waits, then lanes for prefills, decodes, batches without the request, tokens."""
    by_cause: dict[str, list[tuple[int, int]]] = {}
    for wait in timeline.waits:
        for span in wait.spans:
            if span.stop_us > span.start_us:
                by_cause.setdefault(cause_key(span.cause), []).append((span.start_us, span.stop_us))
    found = [PictureLane("wait", f"waits: {name}", bars) for name, bars in by_cause.items()]
    encoded = [
        (max(one.asked_us, timeline.arrived_us), _until(one.done_us, timeline))
        for wait in timeline.waits
        for _, _, one in chronicle.encodings_of(timeline, wait)
        if one.done_us < 0 or one.done_us > wait.start_us
    ]
    if encoded:
        found.append(PictureLane("prefill", "encoder: its media", sorted(set(encoded))))
    chunks = [(w.batch.launched_us, _until(w.batch.delivered_us, timeline)) for w in timeline.works if w.extends]
    if chunks:
        found.append(PictureLane("prefill", "prefill", chunks))
    decodes, out = [], []
    for stay in range(len(timeline.waits)):
        works = [work for work in timeline.works if work.stay == stay and not work.extends]
        if not works:
            continue
        bounds = (works[0].batch.launched_us, _until(works[-1].batch.delivered_us, timeline))
        decodes.append(bounds)
        missed = without(timeline, chronicle, *bounds)
        out += [(batch.started_us, batch.finished_us) for batch in missed if batch.took_us]
    if decodes:
        found.append(PictureLane("decode", "decode", decodes))
    if out:
        found.append(PictureLane("out", "batches without it", out))
    if timeline.messages:
        found.append(
            PictureLane("token", "tokens sent", [(message.time_us, message.time_us) for message in timeline.messages])
        )
    return found


def _until(us: int, timeline: RequestTimeline) -> int:
    return us if us >= 0 else timeline.stop_us


# ---------------------------------------------------------------------------------------------------------------- text


def text_lines(timeline: RequestTimeline, chronicle: Chronicle) -> list[str]:
    """Return the picture in characters, at most 100 columns."""
    start_us, stop_us = timeline.arrived_us, max(timeline.stop_us, timeline.arrived_us + 1)
    per_us = WIDTH / (stop_us - start_us)
    ends = f"{clock(start_us)}{clock(stop_us):>{WIDTH - len(clock(start_us))}}"
    lines = [f"{'':{NAME_WIDTH}}{ends}"]
    for lane in lanes(timeline, chronicle):
        row = ["."] * WIDTH
        for bar_start, bar_stop in lane.bars:
            first = min(int((bar_start - start_us) * per_us), WIDTH - 1)
            last = min(max(int((bar_stop - start_us) * per_us), first + 1), WIDTH)
            row[first:last] = LETTERS[lane.kind] * (last - first)
        lines.append(f"{lane.name:{NAME_WIDTH}.{NAME_WIDTH - 1}}{''.join(row)}")
    return lines


# ---------------------------------------------------------------------------------------------------------------- page


def picture(timeline: RequestTimeline, chronicle: Chronicle) -> str:
    """Return the picture as SVG."""
    rows = lanes(timeline, chronicle)
    start_us, stop_us = timeline.arrived_us, max(timeline.stop_us, timeline.arrived_us + 1)
    scale = (WIDE - LEFT - RIGHT) / (stop_us - start_us)
    height = LANE * (len(rows) + 1) + 8
    label = escape(f"Waits and batches of {headline_name(timeline)}, from {clock(start_us)} to {clock(stop_us)}")
    parts = [f'<svg class="picture" viewBox="0 0 {WIDE} {height}" role="img" aria-label="{label}">']
    for tick in range(6):
        at_us = start_us + (stop_us - start_us) * tick // 5
        x = LEFT + (at_us - start_us) * scale
        anchor = "end" if tick == 5 else "middle" if tick else "start"
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{LANE - 6}" y2="{height}"></line>')
        parts.append(f'<text class="when" x="{x:.1f}" y="14" text-anchor="{anchor}">{clock(at_us)}</text>')
    for number, lane in enumerate(rows):
        y = LANE * (number + 1)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 13}" text-anchor="end">{escape(lane.name)}</text>')
        for bar_start, bar_stop in _merged(lane.bars, 1 / scale):
            x, width = LEFT + (bar_start - start_us) * scale, max((bar_stop - bar_start) * scale, 1.2)
            when = f"{lane.name}: {clock(bar_start)}" + (
                f", {duration(bar_stop - bar_start)}" if bar_stop > bar_start else ""
            )
            parts.append(
                f'<rect class="lane-{lane.kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}">'
                f"<title>{escape(when)}</title></rect>"
            )
    return "".join([*parts, "</svg>"])


def _merged(bars: Sequence[tuple[int, int]], near_us: float) -> list[tuple[int, int]]:
    """Merge bars with gaps too small to be seen, so that the picture of any request is small."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(bars):
        if merged and start - merged[-1][1] < near_us:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def headline_name(timeline: RequestTimeline) -> str:
    """Return the label of a request, or its id without a label."""
    return shown(timeline.label) or f"r{timeline.request_id}"


def write_page(
    path: Path,
    title: str,
    timelines: Sequence[RequestTimeline],
    chronicle: Chronicle,
    names: Names,
    config: SchedConfig,
    about: str,
) -> None:
    """Write the timelines to one HTML file, each a picture and its sentences."""
    body = [f'<section id="answer"><h1>{escape(title)}</h1><p class="note">{escape(about)}</p></section>']
    for timeline in timelines:
        items = []
        for sentence in sentences(timeline, chronicle, names, config):
            more = "".join(f"<small>{escape(line)}</small>" for line in sentence.more)
            when = clock(sentence.time_us)
            items.append(f"<li><time>{when}</time><div>{escape(sentence.text)}{more}</div></li>")
        body.append(
            f"<section><h2>{escape(headline(timeline, names))}</h2>"
            f'<div class="scroll">{picture(timeline, chronicle)}</div><ol class="told">{"".join(items)}</ol></section>'
        )
    path.write_text(still_page(title, body, STYLE), "utf-8", newline="\n")
