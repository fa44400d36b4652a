"""A workload as JSON lines of the format `imported`: arrivals, lengths, sessions, and which tokens are equal."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

from lockstep.sim.workload.turns import Turns

BLOCK_TURNS = 4_096


def write_workload(path: Path, turns: Turns) -> None:
    """Write turns to a file, compressed by its ending .gz or .zst; equal turns give equal bytes."""
    data = io.BytesIO()
    with io.TextIOWrapper(data, encoding="utf-8", newline="\n", write_through=True) as text:
        for row in _rows(turns):
            text.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")
        content = data.getvalue()
    name = path.name.removeprefix(".part-")
    if name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    elif name.endswith(".zst"):
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)


def _rows(turns: Turns) -> Iterator[dict[str, object]]:
    """Yield turns in the order of the file. The rows of a session follow one another in their order."""
    roots = turns.root()
    sizes = np.bincount(roots, minlength=len(turns))
    for start in range(0, len(turns), BLOCK_TURNS):
        rows = np.arange(start, min(start + BLOCK_TURNS, len(turns)))
        for row, prompt in zip(rows.tolist(), turns.prompts(rows), strict=True):
            follows = int(turns.after[row]) >= 0
            found: dict[str, object] = {
                "arrival_us": None if follows else int(turns.arrival_us[row]),
                "input_tokens": int(turns.prompt_tokens[row]),
                "output_tokens": int(turns.output_tokens[row]),
                "prompt_runs": list(prompt),
            }
            if sizes[roots[row]] > 1:
                found["session"] = f"s{roots[row]}"
                found |= {"think_us": int(turns.think_us[row])} if follows else {}
            if tenant := turns.tenants[turns.tenant[row]]:
                found["tenant"] = tenant
            yield found
