"""Endpoints with which clients of vLLM, SGLang and OpenAI look at a server; conversations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.api.endpoints.responses_api import newest_turns  # noqa: E402
from lockstep.api.endpoints.schemas import ChatMessage  # noqa: E402
from tests.support.live_server import LiveServer, running, until  # noqa: E402


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


def test_what_clients_look_at(client: Any) -> None:
    info = client.get("/get_server_info").json()
    assert info == {**client.get("/server_info").json(), "internal_states": info["internal_states"]}
    assert (info["model_path"], info["dp_size"]) == ("qwen3-0.6b", 1)
    assert not {"api_keys", "journal", "admin_socket"} & set(info)
    loads = client.get("/v1/loads").json()
    assert [one["dp_rank"] for one in loads["loads"]] == [0]
    assert loads["loads"][0]["num_running_reqs"] >= 0
    assert client.get("/v1/loads?dp_rank=0").status_code == 200
    assert client.get("/v1/loads?dp_rank=1").json()["error"]["param"] == "dp_rank"
    assert client.get("/tokenizer_info").json() == {"tokenizer_class": "PlainText"}


def test_requests_are_cancelled_by_a_list_of_ids(client: Any, emulated: LiveServer) -> None:
    said: list[Any] = []

    def ask() -> None:
        body = {"text": "endless", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}, "rid": "listed"}
        said.append(httpx2.post(f"{emulated.url}/generate", json=body, timeout=120).json())

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: running(emulated) == 1)
    assert client.post("/abort_requests", json={"request_ids": ["unknown", "listed"]}).status_code == 200
    thread.join(120)
    assert said[0]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a", "max_tokens": 2}, "choices"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, "choices"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 2}}, "meta_info"),
    ],
    ids=str,
)
def test_invocations_choose_the_endpoint_by_the_body(client: Any, body: dict[str, Any], field: str) -> None:
    answer = client.post("/invocations", json={**body, "seldom": 1})
    assert field in answer.json()
    assert answer.headers["X-Ignored-Fields"] == "seldom"
    assert client.post("/invocations", json={"a": 1}).status_code == 400
    assert client.post("/invocations", json={"prompt": 5}).json()["error"]["param"] == "prompt"


def test_texts_and_tokens_in_lists(client: Any) -> None:
    found = client.post("/v1/tokenize", json={"prompt": ["ab", "c"]}).json()
    assert (found["tokens"], found["count"]) == ([[97, 98], [99]], [2, 1])
    assert client.post("/v1/detokenize", json={"tokens": found["tokens"]}).json()["text"] == ["ab", "c"]


def test_input_tokens_are_those_of_the_answer(client: Any) -> None:
    body = {"input": "hello there", "instructions": "be brief", "tools": [{"type": "web_search"}]}
    counted = client.post("/v1/responses/input_tokens", json=body).json()
    said = client.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": said["usage"]["input_tokens"]}


def test_a_conversation_is_continued_and_extended(client: Any) -> None:
    first = {"type": "message", "role": "user", "content": "My name is Ada."}
    made = client.post("/v1/conversations", json={"items": [first], "metadata": {"a": "b"}}).json()
    name = made["id"]
    assert client.get(f"/v1/conversations/{name}").json() == made
    alone = client.post("/v1/responses/input_tokens", json={"input": "Who am I?"}).json()["input_tokens"]
    said = client.post(
        "/v1/responses", json={"input": "Who am I?", "conversation": name, "max_output_tokens": 3}
    ).json()
    assert said["conversation"] == {"id": name}
    assert said["usage"]["input_tokens"] > alone
    items = client.get(f"/v1/conversations/{name}/items?order=asc").json()["data"]
    assert [one["role"] for one in items] == ["user", "user", "assistant"]
    assert items[2]["content"][0]["text"] == said["output"][0]["content"][0]["text"]
    page = client.get(f"/v1/conversations/{name}/items?limit=1").json()
    assert (page["has_more"], page["data"]) == (True, items[2:])
    one = f"/v1/conversations/{name}/items/{items[0]['id']}"
    assert client.get(one).json() == items[0]
    assert client.delete(one).status_code == 200
    assert client.get(one).status_code == 404
    added = client.post(f"/v1/conversations/{name}/items", json={"items": [first]}).json()
    assert added["data"][0]["content"] == first["content"]
    both = {"input": "a", "conversation": name, "previous_response_id": said["id"]}
    assert client.post("/v1/responses", json=both).json()["error"]["param"] == "conversation"
    assert client.post(f"/v1/conversations/{name}", json={"metadata": {}}).json()["metadata"] == {}
    assert client.delete(f"/v1/conversations/{name}").json()["deleted"]
    assert client.get(f"/v1/conversations/{name}").status_code == 404
    gone = client.post("/v1/responses", json={"input": "a", "conversation": name})
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "conversation")


def test_the_oldest_turns_are_dropped_where_the_client_allows_it(client: Any) -> None:
    turns = [
        {"type": "message", "role": role, "content": f"{number} " + "x" * 9000}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    body = {"input": [*turns, {"role": "user", "content": "now"}], "max_output_tokens": 4}
    assert client.post("/v1/responses", json=body).status_code == 400
    said = client.post("/v1/responses", json={**body, "truncation": "auto"})
    assert said.status_code == 200
    assert 9000 < said.json()["usage"]["input_tokens"] <= 40_956
    assert said.json()["truncation"] == "auto"


def test_as_many_of_the_newest_turns_are_kept_as_fit() -> None:
    from lockstep.api.endpoints.generation import Prompt

    messages = [ChatMessage(role=role, content="x") for _ in range(9) for role in ("user", "assistant")]

    async def render(kept: list[ChatMessage]) -> Prompt:
        return Prompt([1] * (10 * len(kept)))

    for room in range(20, 200):
        prompt = asyncio.run(newest_turns(messages, room, render))
        assert len(prompt.ids) == room // 20 * 20 if room < 180 else len(prompt.ids) == 180
