"""The default scene, as far as it runs: a multimodal hybrid with experts, its text served, and its journal read."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the model runs by transformers' code")
pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("llguidance", reason="structured output needs a grammar library")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from lockstep.core.contract.commands import LaunchBatch  # noqa: E402
from lockstep.core.contract.events import RequestFinished  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from tests.support.architectures import greedy_answers  # noqa: E402
from tests.support.live_server import RUN, serving  # noqa: E402
from tests.support.scene import save_scene  # noqa: E402

OPTIONS = ("--device", "cpu", "--mamba-track-interval", "32", "--set=chunked_prefill_size=48", "--set=page_size=16")
SYSTEM = "You answer briefly. " * 12
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("scene") / "scene"
    return folder, save_scene(folder)


def test_its_text_is_that_of_transformers(scene: tuple[Path, Any]) -> None:
    folder, model = scene
    requests = [([5 + (number * 7) % 900 for number in range(length)], 8) for length in (3, 70, 70, 130)]
    prompts, counts = zip(*requests, strict=True)
    with LLM(folder, device="cpu", debug=True, page_size=16, chunked_prefill_size=48, mamba_track_interval=32) as llm:
        params = [Params(max_new_tokens=count, ignore_eos=True) for count in counts]
        answers = [llm.generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    model.generation_config.eos_token_id = None
    assert [answer.token_ids for answer in answers] == greedy_answers(model, requests)
    assert answers[2].cached_tokens == 64  # the last checkpoint within the same prompt


def asked(url: str, **body: Any) -> tuple[int, Any]:
    """Status and answer of a chat."""
    sent = json.dumps({"model": "scene", "max_tokens": 200, "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", sent, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_is_served_and_its_journal_tells_the_story(scene: tuple[Path, Any], tmp_path: Path) -> None:
    """A prompt in chunks, the same beginning from the cache, a tool call, structured output, a refused picture."""
    folder, _ = scene
    journal = tmp_path / "journal"
    system = {"role": "system", "content": SYSTEM}
    with serving(tmp_path / "log", "--model", str(folder), "--journal", str(journal), *OPTIONS) as server:
        status, first = asked(server.url, messages=[system, {"role": "user", "content": "hello"}])
        assert status == 200, first
        status, second = asked(server.url, messages=[system, {"role": "user", "content": "weather?"}])
        assert status == 200, second
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        user = {"role": "user", "content": "weather in Oslo?"}
        status, called = asked(server.url, messages=[system, user], tools=[TOOL], tool_choice="required")
        assert status == 200, called
        call, *_ = called["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        status, formed = asked(server.url, messages=[user], response_format=form)
        assert status == 200, formed
        assert isinstance(json.loads(formed["choices"][0]["message"]["content"])["ok"], bool)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        status, refused = asked(server.url, messages=[{"role": "user", "content": [picture]}])
        assert status == 400, refused
    steps = [step for _, step in fold(journal)]  # compares every digest: the same decisions
    assert sum(isinstance(one, RequestFinished) for step in steps for one in step.decided) >= 4
    commands = [one for step in steps for one in step.commands]
    plans = [one.plan for one in commands if isinstance(one, LaunchBatch) and one.plan.hybrid is not None]
    assert any((plan.hybrid.state_sources >= 0).any() for plan in plans)  # a row begins with a checkpoint
    assert any(plan.hybrid.checkpoint_slots.size for plan in plans)
    for command in (["journal", "verify", str(journal)], ["explain", str(journal), "--slowest", "ttft", "3"]):
        done = subprocess.run([sys.executable, "-c", RUN, *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout
