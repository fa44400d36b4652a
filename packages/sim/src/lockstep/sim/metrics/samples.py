"""Latencies of requests with several samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 99)


def measure_samples(
    groups: Sequence[tuple[int, int]], arrival_us: NDArray[Any], first_us: NDArray[Any], ended_us: NDArray[Any],
    completed: NDArray[np.bool_],
) -> dict[str, Any]:  # fmt: skip
    """Return the counts and latencies for `samples` of metrics.json.

    Args:
        groups: for each request with several samples, the row of the first one and their number.
        arrival_us, first_us, ended_us: int64 [rows], arrival, first message and end; below 0: none.
        completed: bool [rows].
    """
    whole = [(row, row + count) for row, count in groups if completed[row : row + count].all()]
    ttft_us = np.array([first_us[row:stop].min() - arrival_us[row] for row, stop in whole], np.int64)
    e2e_us = np.array([ended_us[row:stop].max() - arrival_us[row] for row, stop in whole], np.int64)
    return {
        "requests": len(groups),
        "samples": sum(count for _, count in groups),
        "requests_completed": len(whole),
        **{f"ttft_us_p{p}": _percentile(ttft_us, p) for p in PERCENTILES},
        "e2e_us_mean": round(float(e2e_us.mean()), 1) if len(e2e_us) else None,
        **{f"e2e_us_p{p}": _percentile(e2e_us, p) for p in PERCENTILES},
    }


def _percentile(values: NDArray[np.int64], percent: int) -> float | None:
    return round(float(np.percentile(values, percent)), 1) if len(values) else None
