"""Folders of small models for `LLM` and `generate`, with a tokenizer or with weights, and requests for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from lockstep.runtime import Params
from lockstep.runtime.demo_model.tokenizer import tokenizer_config, train_tokenizer
from lockstep.runtime.generate import generate
from lockstep.runtime.models import build_model
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


def write_weights(path: Path, config: dict[str, Any]) -> Path:
    """Write a model's settings and weights into a folder. The weights are so large that tokens differ."""
    (path / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(7)
    tensors = {
        one.name: torch.ones(one.shape) if one.initial else torch.empty(one.shape).normal_(0, 0.3, generator=draw)
        for one in build_model(config, random_weights_seed=0).tensors()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def requests_with_shared_beginnings(count: int, kinds: list[dict[str, Any]]) -> list[tuple[list[int], Params]]:
    """Prompts of which many share a beginning, most of several chunks, with parameters of these kinds in turn."""
    rng = random.Random(5)
    beginnings = [[rng.randrange(3, 300) for _ in range(rng.randrange(40))] for _ in range(5)]
    return [
        (
            rng.choice(beginnings) + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 24))],
            Params(max_new_tokens=rng.randrange(1, 9), **kinds[number % len(kinds)]),
        )
        for number in range(count)
    ]


def run(folder: Path, *args: str, stdin: str = "") -> Any:
    common = ("--model", str(folder), "--random-weights", "3", "--set", "pages=64", "--set", "page_size=4")
    return CliRunner().invoke(generate, [*common, *args], input=stdin, standalone_mode=False)
