"""A small model's folder for `LLM` and `generate`: settings and a tokenizer, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from lockstep.runtime.demo_model.tokenizer import tokenizer_config, train_tokenizer
from lockstep.runtime.generate import generate
from tests.support.small_runtime import SMALL_QWEN3

VOCABULARY = SMALL_QWEN3["vocab_size"]
SMALL: dict[str, Any] = {"page_size": 4, "pages": 160, "chunked_prefill_size": 16, "max_running_requests": 12}

TEXTS = ["the quick brown fox jumps over the lazy dog, and the dog sleeps on", "naïve cafés — 漢字 and 🙂 too"]


def write_model(path: Path) -> Path:
    """Write a model's settings and a tokenizer into a folder. Weights are drawn when it is loaded."""
    (path / "config.json").write_text(json.dumps(SMALL_QWEN3))
    train_tokenizer(TEXTS, VOCABULARY).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(128)))
    return path


def run(folder: Path, *args: str, stdin: str = "") -> Any:
    common = ("--model", str(folder), "--random-weights", "3", "--set", "pages=64", "--set", "page_size=4")
    return CliRunner().invoke(generate, [*common, *args], input=stdin, standalone_mode=False)
