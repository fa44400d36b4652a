"""The default scene: a multimodal hybrid with experts served end to end, and its journal read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the model runs by transformers' code")
pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("llguidance", reason="structured output needs a grammar library")
pytest.importorskip("PIL", reason="images are decoded by Pillow")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from lockstep.core.contract.commands import EncodeMedia, LaunchBatch  # noqa: E402
from lockstep.core.contract.events import BatchFinished, RequestFinished  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.sim.rerun.rerun import rerun  # noqa: E402
from tests.support.architectures import greedy_answers  # noqa: E402
from tests.support.live_server import RUN, LiveServer, serving  # noqa: E402
from tests.support.pictures import data_url, picture  # noqa: E402
from tests.support.scene import REPEATED, save_scene  # noqa: E402

OPTIONS = (
    "--device", "cpu", "--mamba-track-interval", "32", "--set=chunked_prefill_size=48", "--set=page_size=16",
    "--set=speculative_method=mtp", "--set=num_speculative_tokens=2",
)  # fmt: skip
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


def asked(url: str, *, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, Any]:
    """Status and answer of a chat."""
    sent = json.dumps({"model": "scene", "max_tokens": 200, "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{url}{path}", sent, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def see_pictures(url: str) -> str:
    """Send the same two pictures in three dialects, which have the same answer, then broken ones. Returns an id."""
    urls = [data_url(picture(number)) for number in (3, 2)]
    pictures = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    text, limits = "compare", {"ignore_eos": True, "max_tokens": 12}
    seen = [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]
    status, first = asked(url, messages=seen, **limits)
    assert status == 200, first
    status, again = asked(url, messages=seen, **limits)
    assert status == 200, again
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    wanted = first["choices"][0]["message"]["content"]
    assert again["choices"][0]["message"]["content"] == wanted
    sources = [{"type": "base64", "media_type": "image/png", "data": one.partition(",")[2]} for one in urls]
    parts = [*({"type": "image", "source": one} for one in sources), {"type": "text", "text": text}]
    status, third = asked(url, path="/v1/messages", messages=[{"role": "user", "content": parts}], max_tokens=12)
    assert status == 200, third
    assert wanted.startswith(third["content"][0]["text"])
    parts = [*({"type": "input_image", "image_url": one} for one in urls), {"type": "input_text", "text": text}]
    given = [{"role": "user", "content": parts}]
    status, fourth = asked(url, path="/v1/responses", input=given, max_output_tokens=16)
    assert status == 200, fourth
    begun = fourth["output"][0]["content"][0]["text"]
    assert begun.startswith(wanted) or wanted.startswith(begun)
    for broken, why in (
        ("data:image/png;base64,AAAA", "cannot be decoded"),
        ("file:///etc/hostname", "reads no files"),
        ("http://127.0.0.1/", "fetches no images"),
    ):
        part = {"type": "image_url", "image_url": {"url": broken}}
        status, refused = asked(url, messages=[{"role": "user", "content": [pictures[0], part]}])
        assert status == 400, refused
        assert refused["error"]["param"] == "messages.0.content.1.image_url"
        assert why in refused["error"]["message"]
    status, refused = asked(url, messages=seen, prompt_logprobs=1)
    assert status == 400
    assert refused["error"]["param"] == "prompt_logprobs"
    vectors = []
    for one in pictures:
        status, made = asked(url, path="/v1/embeddings", messages=[{"role": "user", "content": [one]}])
        assert status == 200, made
        vectors.append(made["data"][0]["embedding"])
    assert vectors[0] != vectors[1]
    assert made["usage"]["prompt_tokens"] > 20
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, refused = asked(url, path="/v1/embeddings", messages=[{"role": "user", "content": [bad]}])
    assert (status, refused["error"]["param"]) == (400, "messages.0.content.0.image_url")
    return str(first["id"])


def picture_outlives_the_engine(server: LiveServer) -> None:
    """Kill the engine in the middle of an answer about a picture: the next engine gets the picture, and continues."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture(3))}}, {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    status, wanted = asked(server.url, **body)
    assert status == 200, wanted
    sent = json.dumps({"model": "scene", "stream": True, **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", sent, {"Content-Type": "application/json"})
    text, killed = "", False
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                assert "error" not in said, said
                text += said["choices"][0]["delta"].get("content") or ""
                if len(text) > 40 and not killed:
                    os.kill(server.children()["engine"], signal.SIGKILL)
                    killed = True
    assert killed
    assert text == wanted["choices"][0]["message"]["content"]


def test_it_is_served_and_its_journal_tells_the_story(scene: tuple[Path, Any], tmp_path: Path) -> None:
    """A prompt in chunks, the same beginning from the cache, drafts, a tool call, structured output, pictures, a broken
    one; the simulator decides the same with the same facts.
    """
    folder, _ = scene
    journal = tmp_path / "journal"
    system = {"role": "system", "content": SYSTEM}
    with serving(tmp_path / "log", "--model", str(folder), "--journal", str(journal), *OPTIONS) as server:
        status, first = asked(server.url, messages=[system, {"role": "user", "content": "hello"}], max_tokens=64)
        assert status == 200, first
        status, second = asked(server.url, messages=[system, {"role": "user", "content": "weather?"}], max_tokens=64)
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
        one_token = {"logit_bias": {str(REPEATED): 100}, "ignore_eos": True, "max_tokens": 24}
        status, repeated = asked(server.url, messages=[user], **one_token)
        assert status == 200, repeated
        seen = see_pictures(server.url)
        picture_outlives_the_engine(server)
    steps = list(fold(journal))  # compares every digest: the same decisions
    assert sum(isinstance(one, RequestFinished) for _, step in steps for one in step.decided) >= 4
    commands = [one for _, step in steps for one in step.commands]
    plans = [one.plan for one in commands if isinstance(one, LaunchBatch) and one.plan.hybrid is not None]
    assert any((plan.hybrid.state_sources >= 0).any() for plan in plans)  # a row begins with a checkpoint
    assert any(plan.hybrid.checkpoint_slots.size for plan in plans)
    assert sum(isinstance(one, EncodeMedia) for one in commands) == 3  # one of two again, in the second engine
    spans = [span for one in plans for span in one.media_spans]
    assert any(span.offset for span in spans)  # a chunk ended inside of a picture
    counts = [np.frombuffer(event.accepted, "<i4") for event, _ in steps if isinstance(event, BatchFinished)]
    assert sum(int((found - 1).sum()) for found in counts) > 8  # drafts were right
    simulated = rerun(journal)  # the simulator makes the same events, decisions and commands
    assert simulated.difference is None
    assert simulated.given.keys() >= {"RequestArrived", "EngineRestarted"}
    assert simulated.answers == {"GrammarReady": 2, "MediaEncoded": 3}
    for command in (["journal", "verify", str(journal)], ["explain", str(journal), "--request", seen]):
        done = subprocess.run([sys.executable, "-c", RUN, *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert "its media were being encoded" in done.stdout
