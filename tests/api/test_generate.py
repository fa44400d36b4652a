"""Fields of /generate beyond a prompt and its length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import LiveServer  # noqa: E402


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


def generate(client: Any, **fields: Any) -> Any:
    answer = client.post("/generate", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


GREEDY = {"temperature": 0, "ignore_eos": True}


def test_each_prompt_may_have_parameters_of_its_own(client: Any) -> None:
    said = generate(
        client,
        text=["hello", "there"],
        sampling_params=[{**GREEDY, "max_new_tokens": 3}, {**GREEDY, "max_new_tokens": 5}],
        rid=["one", "two"],
    )
    assert [len(one["output_ids"]) for one in said] == [3, 5]
    assert [one["meta_info"]["id"] for one in said] == ["one", "two"]
    alone = generate(client, text="there", sampling_params={**GREEDY, "max_new_tokens": 5})
    assert alone["output_ids"] == said[1]["output_ids"]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"rid": ["a"]}, "rid"),
        ({"rid": ["a", "a"]}, "rid"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"token_ids_logprob": [1], "return_logprob": False}, "token_ids_logprob"),
        ({"sampling_params": {"stop_regex": "a("}}, "stop_regex"),
        ({"sampling_params": {"stop_regex": ["a"] * 100}}, "stop_regex"),
        ({"sampling_params": {"stop_regex": "a" * 1000}}, "stop_regex"),
        ({"sampling_params": {"stop_regex": "((()){512}){512}a"}}, "stop_regex"),
        ({"sampling_params": {"stop_regex": [".{480}" + one for one in "abcd"], "n": 8}}, "stop_regex"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused(client: Any, more: dict[str, Any], name: str) -> None:
    answer = client.post("/generate", json={"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_regular_expression_ends_the_answer(client: Any, stream: bool) -> None:
    """Answers of this server are words w257, w258, ..."""
    params = {**GREEDY, "max_new_tokens": 400}
    whole = generate(client, text="hello", sampling_params=params)["text"]
    word = whole.split()[40]
    pattern = f"{word[:-1]}[{word[-1]}]( |$)".replace("( |$)", "") + r"\s"
    asked = {"text": "hello", "sampling_params": {**params, "stop_regex": pattern}}
    if stream:
        with client.stream("POST", "/generate", json={**asked, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        events = [json.loads(line[6:]) for line in lines[:-1]]
        said = events[-1]
        assert all(whole.startswith(event["text"]) and f"{word} " not in event["text"] for event in events)
    else:
        said = generate(client, **asked)
    at = whole.index(f"{word} ")
    assert said["text"] == whole[:at]
    assert said["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    kept = generate(client, text="hello", sampling_params={**params, "stop_regex": pattern, "no_stop_trim": True})
    assert kept["text"] == whole[: at + len(word) + 1]


def test_the_first_of_a_stop_text_and_a_regular_expression_counts(client: Any) -> None:
    params = {**GREEDY, "max_new_tokens": 400}
    words = generate(client, text="hello", sampling_params=params)["text"].split()
    late, early = words[40], words[20]
    said = generate(client, text="hello", sampling_params={**params, "stop": f" {early} ", "stop_regex": f" {late} "})
    assert said["meta_info"]["finish_reason"]["matched"] == f" {early} "
    said = generate(client, text="hello", sampling_params={**params, "stop": f" {late} ", "stop_regex": f" {early} "})
    assert said["meta_info"]["finish_reason"]["matched"] == f" {early} "


def test_the_pattern_counts_on_other_endpoints_too(client: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stop_regex": r"w\d*7 "}
    answer = client.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["stop_reason"] == r"w\d*7 "


def test_special_tokens_are_text_on_request(client: Any) -> None:
    params = {"max_new_tokens": 3, "temperature": 0, "stop_token_ids": [257], "ignore_eos": False}
    end = 256
    shown = client.post("/detokenize", json={"tokens": [end, 300], "skip_special_tokens": False}).json()
    assert shown["text"] == "<|end|> w300"
    assert client.post("/detokenize", json={"tokens": [end, 300]}).json()["text"] == " w300"
    said = generate(client, text="a", sampling_params={**params, "skip_special_tokens": False})
    assert said["text"] == "".join(f" w{token}" for token in said["output_ids"])


def test_a_stream_interval_bounds_the_number_of_events(client: Any) -> None:
    asked = {
        "text": "hello",
        "sampling_params": {**GREEDY, "max_new_tokens": 100, "stream_interval": 25},
        "stream": True,
    }
    with client.stream("POST", "/generate", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line[6:]) for line in lines[:-1]]
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts[-1] == 100
    assert len(counts) <= 4
    assert all(after - before >= 25 for before, after in pairwise(counts[:-1]))


def test_a_prompt_may_be_truncated(client: Any) -> None:
    body = {"prompt": "x" * 50 + "hello", "max_tokens": 4, "temperature": 0, "truncate_prompt_tokens": 5}
    said = client.post("/v1/completions", json=body).json()
    alone = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "temperature": 0}).json()
    assert said["usage"]["prompt_tokens"] == 5
    assert said["choices"][0]["text"] == alone["choices"][0]["text"]
    too_long = {"prompt": [1] * 60_000, "max_tokens": 1}
    assert client.post("/v1/completions", json=too_long).status_code == 400
    assert client.post("/v1/completions", json={**too_long, "truncate_prompt_tokens": -1}).status_code == 200
