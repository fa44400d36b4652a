"""Levels and rates over time: means of gauges and sums of tokens in at most BINS_MAX equal spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.core.contract.commands import (
    Int64s,
)
from lockstep.sim.metrics.columns import Float64s, Series, Summary
from lockstep.sim.metrics.packed_rows import PackedRows
from lockstep.sim.metrics.spans import Spans
from lockstep.sim.metrics.summary import number, ratio

BINS_MAX = 600  # a chart has no more pixels
LEVELS = ("waiting", "running", "used_pages", "cached_pages")


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Levels over time. A level holds from one report to the next; it is 0 before the first, unknown without any."""

    edges_us: Int64s  # [spans + 1], bounds of the spans of the series, from the start of the run to its end
    span_us: tuple[int, int]
    areas: dict[str, Float64s]  # [spans + 1] per level: level x us, summed up to each bound
    maxima: dict[str, int | None]

    @classmethod
    def of(cls, reports: PackedRows, kv_pages: int | None, edges_us: Int64s, span_us: tuple[int, int]) -> Levels:
        known = [level for level in LEVELS if len(reports) and (kv_pages is not None or level != "used_pages")]
        areas = {
            level: np.zeros(len(edges_us)) if level in known else np.full(len(edges_us), np.nan) for level in LEVELS
        }
        maxima: dict[str, int | None] = dict.fromkeys(LEVELS)
        so_far = dict.fromkeys(known, 0.0)
        parts = reports.parts()
        part = next(parts, None)
        while part is not None:
            following = next(parts, None)
            time_us, waiting, running, free_pages, cached_pages = part
            until_us = int(following[0][0]) if following else max(span_us[1], int(time_us[-1]))
            levels = {"waiting": waiting, "running": running, "cached_pages": cached_pages}
            if kv_pages is not None:
                levels["used_pages"] = kv_pages - free_pages - cached_pages
            knots_us = np.append(time_us, until_us)
            first = np.searchsorted(edges_us, time_us[0])
            last = np.searchsorted(edges_us, until_us) if following else len(edges_us)
            for name in known:
                steps = levels[name].astype(np.float64) * np.diff(knots_us)
                area = np.cumsum(np.append(so_far[name], steps))
                so_far[name] = float(area[-1])
                areas[name][first:last] = np.interp(edges_us[first:last], knots_us, area)
                peak, before = int(levels[name].max()), maxima[name]
                maxima[name] = peak if before is None else max(peak, before)
            part = following
        return cls(edges_us, span_us, areas, maxima)

    def means(self, level: str) -> Float64s:
        """Return the mean of a level in each span, weighted by time; NaN without reports."""
        means: Float64s = np.diff(self.areas[level]) / np.diff(self.edges_us)
        return means

    def mean(self, level: str) -> float | None:
        """Return the mean over the whole run; None for an empty run."""
        start_us, stop_us = self.span_us
        if stop_us <= start_us:
            return None
        area = self.areas[level]
        return number((area[-1] - area[0]) / (stop_us - start_us))

    def max(self, level: str) -> int | None:
        return self.maxima[level]

    def describe_kv(self, kv_pages: int | None) -> Summary:
        peak, mean = self.max("used_pages"), self.mean("used_pages")
        return {
            "pages": kv_pages,
            "used_pages_mean": mean,
            "used_pages_max": peak,
            "used_share_mean": ratio(mean, kv_pages),
            "used_share_max": ratio(peak, kv_pages),
            "cached_pages_mean": self.mean("cached_pages"),
            "cached_pages_max": self.max("cached_pages"),
        }


def edges_us(span_us: tuple[int, int]) -> Int64s:
    """Return the bounds of the spans of the series: each start, and the end of the last span."""
    start_us, stop_us = span_us[0], max(span_us[1], span_us[0] + 1)
    width_us = -(-(stop_us - start_us) // BINS_MAX)
    return np.append(np.arange(start_us, stop_us, width_us), stop_us).astype(np.int64)


def make_series(edges_us: Int64s, gauges: Levels, messages: PackedRows, batches: PackedRows, busy: Spans) -> Series:
    bins, widths_us = len(edges_us) - 1, np.diff(edges_us)

    def add_up(time_us: Int64s, amounts: Int64s) -> Int64s:
        # the end of the run belongs to the last span
        indices = np.clip((time_us - edges_us[0]) // widths_us[0], 0, bins - 1)
        return np.bincount(indices, weights=amounts, minlength=bins).astype(np.int64)

    prefill_tokens, decode_tokens, output_tokens = (np.zeros(bins, np.int64) for _ in range(3))
    for launched_us, finished_us, new, of_prompts in batches.parts(
        "launched_us", "finished_us", "new_tokens", "prefill_tokens"
    ):
        ended_us = np.where(finished_us >= 0, finished_us, launched_us)
        prefill_tokens += add_up(ended_us, of_prompts)
        decode_tokens += add_up(ended_us, new - of_prompts)
    for time_us, new_tokens in messages.parts():
        output_tokens += add_up(time_us, new_tokens)
    return Series(
        t_us=edges_us[:-1],
        waiting=gauges.means("waiting"),
        running=gauges.means("running"),
        kv_used_pages=gauges.means("used_pages"),
        kv_cached_pages=gauges.means("cached_pages"),
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        gpu_busy_fraction=np.diff(busy.covered_us(edges_us)) / widths_us,
        output_tokens_per_s=output_tokens / widths_us * 1e6,
    )
