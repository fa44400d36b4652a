"""Structured output over HTTP, with the demo model behind the server: every answer matches its constraint."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
if find_spec("torch") is None:  # searched, not imported, which would take seconds: the server imports it
    pytest.skip("the GPU runtime is not installed", allow_module_level=True)
pytest.importorskip("llguidance", reason="no grammar backend is installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from pydantic import BaseModel, Field  # noqa: E402

from lockstep.core.contract.commands import SampleBatch  # noqa: E402
from lockstep.core.contract.events import BatchFinished, EngineRestarted, GrammarReady, TokensForced  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from tests.support.live_server import LiveServer, serving, until  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

HELLO = [{"role": "user", "content": "Describe a list."}]
SETTINGS = ("--device", "cpu", "--numerics", "invariant", "--shutdown-s", "1", "--grammar-compile-s", "0.5")


class Kind(BaseModel):
    name: str = Field(max_length=6)
    size: int = Field(ge=0, le=99)
    colour: Literal["red", "green"]
    tags: list[Literal["a", "b"]] = Field(max_length=2)


SCHEMA = {**Kind.model_json_schema(), "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "kind", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structured") / "run"


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[LiveServer]:
    with serving(run.parent / "log", *SETTINGS, "--journal", str(run)) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="nothing", max_retries=0, timeout=300) as made:
        yield made


def test_a_chat_keeps_to_its_schema_whole_and_streamed(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "seed": 4, "n": 2, "response_format": FORMAT}
    whole = client.chat.completions.create(**asked)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for choice in whole.choices:
        Kind.model_validate_json(choice.message.content)
        assert choice.finish_reason == "stop"
        assert texts[choice.index] == choice.message.content
    assert texts[0] != texts[1]


def test_the_clients_own_parsers(client: Any) -> None:
    said = client.chat.completions.parse(model="demo", messages=HELLO, response_format=Kind)
    assert isinstance(said.choices[0].message.parsed, Kind)
    response = client.responses.parse(model="demo", input="Describe a list.", text_format=Kind)
    assert isinstance(response.output_parsed, Kind)
    assert response.text.format.type == "json_schema"
    with client.responses.stream(model="demo", input="Describe a list.", text_format=Kind) as events:
        assert isinstance(events.get_final_response().output_parsed, Kind)


EBNF = 'root ::= "<" word ">" | "none"\nword ::= [a-c] [a-c]?'
TAG = {
    "structures": [{"begin": "<f=one>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
    "triggers": ["<f="],
    "at_least_one": True,
    "stop_after_first": True,
}
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"[A-F]{3}-\d\d"}, r"[A-F]{3}-\d\d"),
    ({"guided_regex": "(ab)+c"}, "(ab)+c"),
    ({"guided_choice": ["yes (1+1)", "no.", "Zürich"]}, r"yes \(1\+1\)|no\.|Zürich"),
    ({"guided_json": json.dumps({"enum": [1, "x"]})}, r'\s*(1|"x")\s*'),
    ({"guided_grammar": 'start: "a" | "b" "c"'}, "a|bc"),
    ({"ebnf": EBNF}, "<[a-c]{1,2}>|none"),
    ({"json_schema": {"type": "boolean"}}, r"\s*(true|false)\s*"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"json": {"const": None}, "regex": None}}, r"\s*null\s*"),
    ({"structured_outputs": {"grammar": EBNF}}, "<[a-c]{1,2}>|none"),
    ({"structural_tag": TAG}, r"(.|\n)*<f=one>\s*[12]\s*</f>"),
    ({"response_format": {"type": "structural_tag", **TAG}}, r"(.|\n)*<f=one>\s*[12]\s*</f>"),
]


@pytest.mark.parametrize(("asked", "pattern"), ASKED, ids=lambda value: str(value)[:30])
def test_every_field_for_structured_output(client: Any, asked: dict[str, Any], pattern: str) -> None:
    said = client.completions.create(model="demo", prompt="It is", max_tokens=60, seed=2, extra_body=asked)
    (choice,) = said.choices
    if choice.finish_reason == "length":
        assert "structural_tag" in str(asked)  # free text may continue for long before the part
    else:
        assert re.fullmatch(pattern, choice.text), choice.text


def test_any_json_object(client: Any) -> None:
    said = client.chat.completions.create(
        model="demo", messages=HELLO, response_format={"type": "json_object"}, max_completion_tokens=100, seed=1
    )
    if said.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(said.choices[0].message.content), dict)
    assert said.choices[0].message.content.lstrip().startswith("{")


def test_generate_under_the_names_of_sglang(server: LiveServer) -> None:
    params = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 300, "seed": 5}
    said = httpx2.post(f"{server.url}/generate", json={"text": "A list is", "sampling_params": params}, timeout=300)
    Kind.model_validate_json(said.json()["text"])


def test_samples_that_must_be_long_and_end_tokens_that_are_passed_over(client: Any) -> None:
    """min_tokens and ignore_eos delay the end token, not the grammar: an answer ends with its grammar."""
    for more in ({"min_tokens": 3}, {"ignore_eos": True}):
        asked = {"regex": "(ab){2,200}", **more}
        said = client.completions.create(model="demo", prompt="x", max_tokens=30, seed=3, extra_body=asked)
        assert re.fullmatch("(ab){2,200}a?", said.choices[0].text)


MULTIPLIED = {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(7)]}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "strin"}}, "json_schema"),
    ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
    ({"json_schema": {"$ref": "http://127.0.0.1/schema"}}, "json_schema"),
    ({"json_schema": {"type": "string", "pattern": "(?<=a)b"}}, "json_schema"),
    ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "regex"),
    ({"regex": "("}, "regex"),
    ({"json_schema": MULTIPLIED}, "json_schema"),
    ({"ebnf": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "ebnf"),
    ({"ebnf": "root ::= nothing"}, "ebnf"),
    ({"regex": "a" * 300_000}, "regex"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"lark": "b"}}, "structured_outputs.lark"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"guided_choice": [""]}, "guided_choice"),
]  # fmt: skip


def nested(levels: int) -> dict[str, Any]:
    """A schema of arrays of arrays."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_invalid_grammars_are_refused_beside_a_stream_that_continues(client: Any) -> None:
    """The limits hold for any grammar, and other requests are not affected."""
    bystander = {"model": "demo", "prompt": "def ", "max_tokens": 120, "temperature": 0, "stream": True}
    bystander["extra_body"] = {"ignore_eos": True}
    alone = "".join(chunk.choices[0].text for chunk in client.completions.create(**bystander))
    arrivals: list[float] = []
    heard: list[str] = []
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            text = ""
            for chunk in client.completions.create(**bystander):
                text += chunk.choices[0].text
                arrivals.append(time.monotonic())
            heard.append(text)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        until(lambda: len(arrivals) > 3)
        for asked, param in [*HOSTILE, ({"json_schema": nested(80)}, "json_schema")]:
            began_s, before = time.monotonic(), len(arrivals)
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="demo", prompt="a", max_tokens=5, extra_body=asked)
            assert caught.value.body["param"] == param, caught.value.message
            assert len(caught.value.message) < 1000
            if time.monotonic() - began_s > 1.5:  # compiled up to its limit; the engine did not wait for it
                assert len(arrivals) > before + 5, asked
    finally:
        over.set()
        thread.join(300)
    assert heard
    assert set(heard) == {alone}
    said = client.completions.create(model="demo", prompt="a", max_tokens=9, extra_body={"regex": "ab"})
    assert said.choices[0].text == "ab"  # the next grammar is compiled


def test_a_grammar_that_is_too_much_work_in_the_middle_of_an_answer_ends_that_answer(client: Any) -> None:
    """The trial of a grammar follows it for 48 tokens. The nested repetitions begin behind them."""
    asked = {"regex": "y" * 64 + "(((([a-z]{1,999}){2,999}){2,999}){2,999}){2,999}"}
    with pytest.raises(openai.BadRequestError, match=r"`regex` admits no token after \d+ tokens"):
        client.completions.create(model="demo", prompt="y", max_tokens=200, temperature=0, extra_body=asked)
    said = client.completions.create(model="demo", prompt="a", max_tokens=9, extra_body={"regex": "ab"})
    assert said.choices[0].text == "ab"


DEMO = Path(__file__).resolve().parents[2] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"


def test_an_emulated_engine_with_a_tokenizer_keeps_to_it_too(tmp_path: Path) -> None:
    """Killed in the middle, it continues with the same tokens: prompt, seed, position and grammar determine them."""
    arguments = ("--emulate", "qwen3-0.6b@h200", "--tokenizer", str(DEMO), "--speed", "1", "--answer-tokens", "20")
    with (
        serving(tmp_path / "log", *arguments, "--shutdown-s", "1") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="nothing", timeout=300) as own,
    ):
        asked: dict[str, Any] = {"model": "qwen3-0.6b", "messages": HELLO, "n": 4, "seed": 3}
        whole = own.chat.completions.create(**asked, response_format=FORMAT)
        texts = [choice.message.content for choice in whole.choices]
        for text in texts:
            Kind.model_validate_json(text)
        assert len(set(texts)) > 1
        found = [""] * 4
        for number, chunk in enumerate(own.chat.completions.create(**asked, response_format=FORMAT, stream=True)):
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
            if number == 12:
                os.kill(server.children()["engine"], signal.SIGKILL)
        assert found == texts
        free = own.chat.completions.create(**asked, response_format={"type": "json_object"}, max_tokens=200)
        assert all(isinstance(json.loads(choice.message.content), dict) for choice in free.choices)


BODIES: list[dict[str, Any]] = [
    {"prompt": "A list", "seed": seed, "temperature": 1.0, "max_tokens": 200, "json_schema": SCHEMA, "n": 2}
    for seed in range(2)
] + [{"prompt": "A", "seed": 7, "max_tokens": 60, "regex": "([a-z]{4} ){5}end"}]


def answers(url: str) -> list[dict[int, str]]:
    """The texts of all bodies, streamed at the same time."""
    found: list[dict[int, str]] = [{} for _ in BODIES]

    def read(number: int) -> None:
        body = {**BODIES[number], "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line[6:])
                    assert "error" not in said, said
                    for choice in said["choices"]:
                        found[number][choice["index"]] = found[number].get(choice["index"], "") + choice["text"]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(BODIES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


@pytest.fixture(scope="module")
def undisturbed(server: LiveServer) -> list[dict[int, str]]:
    return answers(server.url)


@pytest.mark.parametrize("jump", [0, 16])
def test_killed_in_the_middle_of_an_answer_it_goes_on_and_its_journal_replays_strictly(
    undisturbed: list[dict[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    """Killed after tokens, with jump-forward forced ones, were written and before they were sent."""
    for number, texts in enumerate(undisturbed):
        for text in texts.values():
            if "regex" in BODIES[number]:
                assert re.fullmatch(BODIES[number]["regex"], text)
            else:
                Kind.model_validate_json(text)
    tokens = TokensForced if jump else BatchFinished
    monkeypatch.setenv("LOCKSTEP_FAULT", f"written:{1 if jump else 6}:1:{tokens.__name__}")
    settings = ("--set", f"jump_forward_tokens={jump}", "--journal", str(tmp_path / "run"))
    with serving(tmp_path / "log", *SETTINGS, *settings) as made:
        assert answers(made.url) == undisturbed
        assert made.text().count(" s after the end of the previous generation") == 1
        assert "recovered 0 requests" not in made.text()
        figures = httpx2.get(f"{made.url}/metrics", timeout=120).text
        forced = [line for line in figures.splitlines() if line.startswith("lockstep_forced_tokens_total")]
        assert [float(line.rpartition(" ")[2]) > 10 for line in forced] == [True] * (jump > 0)
        assert made.end() == 0
    kinds = [type(event) for event, _ in fold(tmp_path / "run")]  # raises Divergence
    assert EngineRestarted in kinds[kinds.index(tokens) :]
    assert tokens in kinds[kinds.index(EngineRestarted) :]


def test_its_journal_replays_strictly(server: LiveServer, run: Path) -> None:
    """The last test of this file: it ends the server."""
    assert server.end() == 0
    folded = list(fold(run))  # raises Divergence
    assert any(isinstance(event, GrammarReady) and event.error for event, _ in folded)
    assert any(isinstance(event, GrammarReady) and not event.error for event, _ in folded)
    commands = [command for _, step in folded for command in step.commands]
    assert any(isinstance(command, SampleBatch) and command.grammar_advance for command in commands)
