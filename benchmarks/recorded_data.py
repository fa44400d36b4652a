"""Recorded traces and published measurements, in the folder that LOCKSTEP_DATA names."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

CACHE_TRACE = "traces/mooncake/conversation_trace.jsonl.gz"
CACHE_ORACLES = "published/prefix_cache_oracles.json"
CACHE_BLOCK_TOKENS = 512  # of that trace


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
