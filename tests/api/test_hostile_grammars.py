"""Grammars from clients: the end of a grammar ends the answer, and a grammar that cannot be used is a 400.

The server emulates its model with the demo model's tokenizer, so no torch is needed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("llguidance", reason="no grammar backend is installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.host.grammars import COMPILED_MAX  # noqa: E402
from tests.support.live_server import EMULATED, serving, until  # noqa: E402

TOKENIZER = Path(__file__).parents[2] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
ITEM = {"type": "object", "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["size"]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    arguments = (*EMULATED, "--speed", "10", "--shutdown-s", "1", "--tokenizer", str(TOKENIZER))
    with (
        serving(tmp_path_factory.mktemp("grammars") / "log", *arguments) as server,
        httpx2.Client(base_url=server.url, timeout=120) as made,
    ):
        yield made


def completed(client: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 64, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_min_tokens_do_not_continue_an_answer_behind_the_end_of_its_grammar(client: Any) -> None:
    choice = completed(client, regex="ab", min_tokens=12)
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    choice = completed(client, json_schema={**ITEM, "additionalProperties": False}, min_tokens=60)
    assert choice["finish_reason"] == "stop"
    assert 0 <= json.loads(choice["text"])["size"] <= 9
    answer = client.post(
        "/generate", json={"text": "x", "sampling_params": {"regex": "ab", "min_new_tokens": 12, "max_new_tokens": 64}}
    ).json()
    assert answer["text"] == "ab"
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_min_tokens_hold_back_an_end_that_the_grammar_does_not_require(client: Any) -> None:
    choice = completed(client, regex="[ab]*", min_tokens=20, return_token_ids=True)
    assert re.fullmatch("[ab]*", choice["text"])
    assert len(choice["token_ids"]) >= 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(((a{1,100}){1,100}){1,100}){1,100}"}, "`regex` .*too many states; use smaller repetitions"),
        ({"json_schema": {"$ref": "#"}}, "`json_schema` .*no text matches it.* leads back to itself"),
        ({"ebnf": "root ::= root"}, "`ebnf` .*no text matches it.* leads back to itself"),
        ({"regex": r"ab[^\s\S]"}, "`regex` .*no text matches it"),
        ({"regex": "(?=a)b"}, "`regex` .*look-around.* is not supported"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_a_bad_request(client: Any, fields: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 64, "stream": stream, **fields})
        assert answer.status_code == 400, answer.text
        assert re.search(message, answer.json()["error"]["message"])
        assert "non-verbose" not in answer.text


def test_a_large_grammar_has_few_answers(client: Any) -> None:
    """Each answer takes milliseconds of the engine for its first token under a large grammar."""
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(500)}}
    fields = {"prompt": "x", "max_tokens": 4, "json_schema": schema}
    assert client.post("/v1/completions", json={**fields, "n": 2}).status_code == 200
    for more in ({"n": 64}, {"prompt": ["x"] * 64}):
        answer = client.post("/v1/completions", json={**fields, **more})
        assert answer.status_code == 400, answer.text
        assert "`json_schema` has 827008 characters over all answers" in answer.text
        assert "fewer answers at once" in answer.text


def test_a_grammar_that_was_dropped_is_compiled_again(client: Any) -> None:
    """More grammars than are kept; the first one, which the scheduler has as compiled, is asked for again and left."""
    for number in [*range(COMPILED_MAX + 4), 0, 1]:
        choice = completed(client, regex=f"x{number}y", max_tokens=12)
        assert choice["text"] == f"x{number}y"
    for number in (2, 3):
        with contextlib.suppress(httpx2.TimeoutException):
            client.post("/v1/completions", json={"prompt": "x", "regex": f"x{number}y"}, timeout=0.003)
    until(lambda: client.get("/get_load").json()["server_load"] == 0)
    assert completed(client, regex="x2y")["text"] == "x2y"
