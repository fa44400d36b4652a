"""The examples of docs/features.md run as printed, against one server with drafts and jump-forward switched on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
if find_spec("torch") is None:  # searched, not imported, which would take seconds: the server imports it
    pytest.skip("the GPU runtime is not installed", allow_module_level=True)
pytest.importorskip("openai", reason="the OpenAI client is not installed")
pytest.importorskip("llguidance", reason="no grammar backend is installed")

from tests.support.live_server import LiveServer, serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
FOUND = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))
ELSEWHERE = {"Quantised weights and KV"}  # with a model of its own: test_quantized.py
SECTIONS = {section: source for section, source in FOUND.items() if "admin.sock" not in source}  # test_live_weights.py
PRINTED = {
    "Drafts": r"40 tokens\ntokens of a verification: [1-5]\.\d+\n",
    "Sessions": r"True True\n200\n",
    "Several answers": r"2 True\nTrue\n",
    "Vectors and scores": r"2 \d+\n1\n\[1\.0, 1\.0\]\n",
    "Structured output": r"verdict='(yes|no)' percent=\d{1,3}\n\d{3}-\d{4}\n",
    "Jump-forward": r"(yes|no), because the answer is always the same stop\nforced: True\n",
    "Tools and thoughts": r"tool_calls get_weather \{'city': '(Rome|Paris)', 'days': [123]\}\n",
}

STARTED = (
    "--device",
    "cpu",
    "--shutdown-s",
    "1",
    "--set",
    "speculative_method=ngram",
    "--set",
    "num_speculative_tokens=4",
    "--set",
    "jump_forward_tokens=16",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("features") / "log", *STARTED) as made:
        yield made


def test_every_example_is_known() -> None:
    assert set(SECTIONS) == set(PRINTED) | ELSEWHERE


@pytest.mark.parametrize("section", PRINTED)
def test_an_example_runs_as_printed(section: str, server: LiveServer, tmp_path: Path) -> None:
    source = SECTIONS[section]
    assert "http://127.0.0.1:8000" in source
    example = tmp_path / "example.py"
    example.write_text(source.replace("http://127.0.0.1:8000", server.url), "utf-8")
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300)
    assert re.fullmatch(PRINTED[section], done.stdout), done.stdout + done.stderr
