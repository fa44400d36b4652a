"""KV bytes of a token compared with published figures, of latent and hybrid models too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lockstep.sim.catalogue import load_model, model_names

PRECISIONS = {"bf16_fp16": "bf16", "fp8_int8": "fp8"}


def test_kv_bytes_of_a_token_are_those_published() -> None:
    """Bytes of layers with full attention: the state of linear attention does not grow, and is not included."""
    data = os.environ.get("LOCKSTEP_DATA")
    path = Path(data or ".") / "published" / "kvcache_ai_bytes_per_token.json"
    if data is None or not path.exists():
        pytest.skip("LOCKSTEP_DATA is not set or has no kvcache_ai_bytes_per_token.json: KV bytes not compared")
    published: dict[str, float] = json.loads(path.read_text())["bytes_per_token"]
    compared = 0
    for key, expected in published.items():
        name, precision, indexer, draft = key.split("|")
        dtype = PRECISIONS.get(precision.removeprefix("precision="))
        if name not in model_names() or dtype is None or indexer != "indexer=" or draft != "draft=0":
            continue
        found = load_model(name).kv_bytes_per_token(dtype)  # type: ignore[arg-type]
        assert found == expected, f"{name} in {dtype}: {found} bytes, published are {expected}"
        compared += 1
    assert compared >= 30, f"{compared} of {len(published)} compared"
