"""Recorded traces and published measurements, in the folder that LOCKSTEP_DATA names."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

CACHE_TRACE = "traces/mooncake/conversation_trace.jsonl.gz"
CACHE_ORACLES = "published/prefix_cache_oracles.json"
CACHE_BLOCK_TOKENS = 512  # of that trace
OFFLINE_POINTS = "published/trtllm_perf_overview.csv"
OFFLINE_OUTPUT_MAX = 1024  # output tokens of each request; runs with more take too long to simulate


def data_folder(inside: str) -> Path:
    """The folder. Raises SystemExit, saying what should be inside, when LOCKSTEP_DATA does not lead to it."""
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder:
        raise SystemExit(f"LOCKSTEP_DATA is not set: it names the folder with {inside}")
    if not Path(folder, inside).exists():
        raise SystemExit(f"LOCKSTEP_DATA is {folder}, which has no {inside}")
    return Path(folder)


def cache_trace() -> list[dict[str, Any]]:
    """Requests of Mooncake's conversation trace: `hash_ids`, one for `CACHE_BLOCK_TOKENS`, `input_length`, ..."""
    with gzip.open(data_folder(CACHE_TRACE) / CACHE_TRACE, "rt") as lines:
        return [json.loads(line) for line in lines]


def cache_oracles() -> list[dict[str, Any]]:
    """What an exact cache that evicts leaves, least recently used first, finds in that trace, by its capacity."""
    published: dict[str, Any] = json.loads((data_folder(CACHE_ORACLES) / CACHE_ORACLES).read_text())
    assert published["block_tokens"] == CACHE_BLOCK_TOKENS
    return [row for row in published["traces"]["mooncake_conversation_trace"] if row["leaf_first"]]


def offline_points(models: Collection[str]) -> list[dict[str, str]]:
    """Rows of TensorRT-LLM's published offline throughput of some models, as strings by column.

    Rows without a number of requests, or with more than OFFLINE_OUTPUT_MAX output tokens each, are left out.
    """
    with (data_folder(OFFLINE_POINTS) / OFFLINE_POINTS).open(newline="", encoding="utf-8") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["model"] in models and row["num_requests"] and int(row["osl"]) <= OFFLINE_OUTPUT_MAX
        ]
