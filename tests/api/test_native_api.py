"""The endpoints other than OpenAI's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import LiveServer, running, until  # noqa: E402


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


def generate(client: Any, **fields: Any) -> Any:
    answer = client.post("/generate", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text_and_ids(client: Any) -> None:
    params = {"max_new_tokens": 4, "temperature": 0}
    said = generate(client, text="hello", sampling_params=params)
    assert said["text"] == "".join(f" w{token}" for token in said["output_ids"])
    about = said["meta_info"]
    assert (about["prompt_tokens"], about["completion_tokens"]) == (5, 4)
    assert about["finish_reason"] == {"type": "length", "length": 4}
    assert generate(client, input_ids=list(b"hello"), sampling_params=params)["text"] == said["text"]
    several = generate(client, text=["hello", "there"], sampling_params=params)
    assert [one["text"] == said["text"] for one in several] == [True, False]
    assert len(generate(client, text="hello", sampling_params={**params, "n": 3})) == 3


def test_a_stream_is_cumulative(client: Any) -> None:
    asked = {"text": "hello", "sampling_params": {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True}}
    whole = generate(client, **asked)
    with client.stream("POST", "/generate", json={**asked, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert events[-1]["text"] == whole["text"]
    assert all(after["text"].startswith(before["text"]) for before, after in pairwise(events))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert len(events) > 1


def test_abort_by_the_id_that_the_client_gave(client: Any, emulated: LiveServer) -> None:
    params = {"max_new_tokens": 30_000, "ignore_eos": True}
    said: list[Any] = []

    def ask() -> None:
        with httpx2.Client(base_url=emulated.url, timeout=120) as own:
            said.append(generate(own, text="endless", sampling_params=params, rid="mine"))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: running(emulated) == 1)
    assert client.post("/abort_request", json={"rid": "somebody else's"}).status_code == 200
    assert thread.is_alive()
    client.post("/abort_request", json={"rid": "mine"})
    thread.join(120)
    assert said[0]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "named", "called"),
    [
        ("/v1/completions", {"prompt": "a"}, {"rid": "my completion"}, "my completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, {"rid": "my chat"}, "my chat"),
        ("/v1/completions", {"prompt": "a"}, {"request_id": "42"}, "cmpl-42"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, {"request_id": "7"}, "chatcmpl-7"),
    ],
    ids=str,
)
def test_answers_of_openai_endpoints_are_cancelled_by_the_ids_of_their_clients(
    client: Any, emulated: LiveServer, path: str, body: dict[str, Any], named: dict[str, str], called: str
) -> None:
    endless = {**body, **named, "max_tokens": 30_000, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: client.post(path, json=endless).json())
        until(lambda: running(emulated) == 1)
        assert client.post("/abort_request", json={"rid": called}).json() == {"success": True}
        said = waiting.result(timeout=120)
    assert (said["id"], said["choices"][0]["finish_reason"]) == (called, "abort")
    until(lambda: running(emulated) == 0)


def test_a_request_has_one_name_and_a_client_aborts_only_its_own(client: Any) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "rid": "a", "request_id": "b"}, "rid"),
        ("/abort_request", {"rid": "", "abort_all": True}, "abort_all"),
        ("/abort_request", {"rid": "\x9b"}, "rid"),
        ("/v1/completions", {"prompt": "a", "rid": "a\nb"}, "rid"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "request_id": "\x7f"}, "request_id"),
    ):
        said = client.post(path, json=body)
        assert (said.status_code, said.json()["error"]["param"]) == (400, param)


def test_invalid_inputs(client: Any) -> None:
    for fields, param in (
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": [10**6]}, "prompt"),
        ({"text": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
        ({"text": "a", "lora_path": "/etc/passwd"}, "lora_path"),
        ({"text": "a", "rid": "r" * 257}, "rid"),
        ({"text": "a", "rid": "r\x1b[31m"}, "rid"),
    ):
        answer = client.post("/generate", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_tokens_there_and_back(client: Any) -> None:
    text = "Zürich 😀"
    said = client.post("/tokenize", json={"prompt": text}).json()
    assert said == {"tokens": list(text.encode()), "count": 12, "max_model_len": 40960}
    assert client.post("/detokenize", json={"tokens": said["tokens"]}).json()["prompt"] == text
    told = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert bytes(told["tokens"]).decode() == "user: hi\nassistant:"
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_a_conversation_has_the_tokens_that_a_chat_of_it_has(client: Any) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
    on = {"messages": said, "add_generation_prompt": False, "continue_final_message": True}
    told = client.post("/tokenize", json={**on, "return_token_strs": True}).json()
    assert bytes(told["tokens"]).decode() == "".join(told["token_strs"]) == "user: hi\nassistant: I say"
    chat = client.post("/v1/chat/completions", json={**on, "max_tokens": 1, "return_token_ids": True}).json()
    assert chat["choices"][0]["prompt_token_ids"] == told["tokens"]


def test_invalid_inputs_of_tokenize(client: Any) -> None:
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    for fields, param in (
        ({"messages": []}, "messages"),
        ({**hello, "tools": [{"x": 1}]}, "tools.0.type"),
        ({**hello, "tools": [{"type": "function", "function": {"name": 5}}]}, "tools.0.function.name"),
        ({**hello, "chat_template_kwargs": {"enable_thinking": True}}, None),
        ({**hello, "add_special_tokens": True}, "add_special_tokens"),
        ({**hello, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"prompt": "hi", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt": "hi", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"prompt": "hi", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "hi", "prompts": ["a"]}, None),
    ):
        answer = client.post("/tokenize", json=fields)
        said = answer.json().get("error", {})
        assert (answer.status_code, said.get("param")) == (200 if param is None else 400, param), fields
    for fields, param in (({"tokens": [1, [2]]}, "tokens"), ({"tokens": [[1], [10**9]]}, "tokens"), ({}, "tokens")):
        answer = client.post("/detokenize", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_health_and_info(client: Any) -> None:
    assert [client.get(path).status_code for path in ("/health", "/ready", "/ping")] == [200, 200, 200]
    assert client.get("/health").content == b""
    info = client.get("/get_model_info").json()
    assert (info["served_model_name"], info["engine"], info["max_model_len"]) == ("qwen3-0.6b", "emulated", 40960)
    assert set(client.get("/version").json()) == {"version"}


def test_metrics_have_the_names_and_buckets_of_dashboards(client: Any) -> None:
    body = {"prompt": "metrics", "max_tokens": 5, "stream": True}
    list(client.post("/v1/completions", json=body).iter_lines())
    text = client.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_inference_time_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "request_max_num_generation_tokens_bucket",
        "iteration_tokens_total_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
    ):
        assert f"\nlockstep_{name}{{" in text, name
    assert 'le="0.001"' in text
    assert 'le="2560.0"' in text
    assert 'model_name="qwen3-0.6b"' in text


def test_openapi_describes_the_bodies(client: Any) -> None:
    described = client.get("/openapi.json").json()
    posted = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert posted == {"$ref": "#/components/schemas/ChatBody"}
    fields = described["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(fields)
    assert "$defs" not in json.dumps(described)
    (named,) = described["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert (named["name"], named["in"], named["required"]) == ("name", "path", True)
