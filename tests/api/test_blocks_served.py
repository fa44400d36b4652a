"""A folder of a model that answers in blocks, served: messages of blocks, and what it refuses by name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")

from tests.support.live_server import LiveServer, serving
from tests.support.small_llm import write_model
from tests.support.small_runtime import SMALL_QWEN3


def posted(server: LiveServer, body: dict[str, Any]) -> tuple[int, bytes]:
    data = json.dumps({"model": "sdar", "prompt": [5, 6, 7, 8, 9], **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_answers_come_block_by_block_and_stop_texts_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sdar"
    folder.mkdir()
    write_model(folder)
    blocks = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": 4, "mask_token_id": 299}
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN3 | blocks))
    words = ("--model", str(folder), "--random-weights", "3", "--set", "pages=64")
    with serving(tmp_path / "log", *words) as server:
        asked = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
        status, whole = posted(server, asked)
        assert status == 200, whole
        answer = json.loads(whole)
        assert answer["usage"]["completion_tokens"] == 10
        status, streamed = posted(server, {**asked, "stream": True})
        assert status == 200
        events = [json.loads(line[6:]) for line in streamed.decode().splitlines() if line.startswith("data: {")]
        assert (
            "".join(event["choices"][0]["text"] for event in events if event["choices"])
            == (answer["choices"][0]["text"])
        )
        status, refused = posted(server, {**asked, "stop": "x"})
        assert status == 400
        assert b"`stop_texts` is not supported by a model that answers in blocks" in refused
