"""The official OpenAI client against a live server with an emulated model: it can parse every answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

from tests.support.live_server import LiveServer, metric, running, until  # noqa: E402

MODEL = "qwen3-0.6b"
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
LEFT = 'lockstep_http_requests_total.*status="499"'  # answers after their clients had left


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{emulated.url}/v1", api_key="nothing", max_retries=0, timeout=300) as made:
        yield made


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 40960)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert "gpt-5" in caught.value.message


def test_a_chat(client: Any) -> None:
    said = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=5, temperature=0)
    (choice,) = said.choices
    assert said.object == "chat.completion"
    assert said.id.startswith("chatcmpl-")
    assert said.model == MODEL
    assert choice.message.role == "assistant"
    assert re.fullmatch(r"( w\d+){5}", choice.message.content)
    assert choice.finish_reason == "length"
    assert (said.usage.completion_tokens, said.usage.total_tokens) == (5, said.usage.prompt_tokens + 5)


def test_a_stream_equals_the_whole_answer(client: Any) -> None:
    asked: dict[str, Any]
    asked = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 1000, "seed": 5, "temperature": 0.7}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {first.id}
    spoken = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert spoken == whole.choices[0].message.content
    assert middle  # the text came in several pieces


def test_greedy_and_seeded_answers_can_be_had_again(client: Any) -> None:
    def text(**more: Any) -> str:
        return str(client.completions.create(model=MODEL, prompt="Once", max_tokens=9, **more).choices[0].text)

    assert text(temperature=0) == text(temperature=0)
    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()  # each has its own seed


def test_samples_differ(client: Any) -> None:
    said = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, max_completion_tokens=4, seed=8)
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in said.choices}) == 3
    assert said.usage.completion_tokens == 12
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, max_completion_tokens=4, seed=8, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in said.choices}


def test_prompts_of_every_kind(client: Any) -> None:
    def texts(prompt: Any) -> list[str]:
        said = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0)
        return [choice.text for choice in said.choices]

    one, other = texts("one")[0], texts("other")[0]
    assert one != other
    assert texts(["one", "other"]) == [one, other]
    assert texts(list(b"one")) == [one]  # without a tokenizer, ids are bytes
    assert texts([list(b"one"), list(b"other")]) == [one, other]


def test_echo(client: Any) -> None:
    said = client.completions.create(model=MODEL, prompt="Zürich", echo=True, temperature=0, max_tokens=2)
    assert re.fullmatch(r"Zürich( w\d+){2}", said.choices[0].text)
    alone = client.completions.create(model=MODEL, prompt="Zürich", echo=True, max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("Zürich", "length")
    chunks = client.completions.create(
        model=MODEL, prompt="Zürich", echo=True, temperature=0, max_tokens=2, stream=True
    )
    assert re.fullmatch(r"Zürich( w\d+){2}", "".join(chunk.choices[0].text for chunk in chunks))


def test_a_stop_text_ends_an_answer_in_front_of_it(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_completion_tokens": 20}
    whole = str(client.chat.completions.create(**asked).choices[0].message.content)
    words = whole.split(" ")
    stop = f"{words[7][-2:]} {words[8][:3]}"  # across the border of two tokens
    front = whole[: whole.index(stop)]
    said = client.chat.completions.create(**asked, stop=[stop, "never said"])
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == (front, "stop")
    assert said.choices[0].stop_reason == stop
    pieces = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == front
    kept = client.chat.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == front + stop
    later = client.chat.completions.create(**asked, stop=stop, extra_body={"min_tokens": 15})
    assert later.choices[0].message.content == whole


def test_a_stop_token_is_no_part_of_the_text(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "tokens", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**asked).choices[0].text
    third = whole.split(" ")[3]
    said = client.completions.create(**asked, extra_body={"stop_token_ids": [int(third[1:])]}).choices[0]
    assert said.text == whole[: whole.index(third) - 1]
    assert (said.finish_reason, said.stop_reason) == ("stop", int(third[1:]))


def test_an_answer_ends_by_itself(client: Any) -> None:
    said = client.completions.create(model=MODEL, prompt="by itself", temperature=0, max_tokens=8192)
    assert said.choices[0].finish_reason == "stop"
    assert said.choices[0].stop_reason is None
    assert said.usage.completion_tokens == len(said.choices[0].text.split()) + 1  # the end is a token without text
    longer = client.completions.create(
        model=MODEL,
        prompt="by itself",
        temperature=0,
        max_tokens=said.usage.completion_tokens + 5,
        extra_body={"ignore_eos": True},
    )
    assert longer.usage.completion_tokens == said.usage.completion_tokens + 5


def test_token_ids_on_request(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "ab", "max_tokens": 3, "temperature": 0}
    (choice,) = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices
    assert choice.prompt_token_ids == [97, 98]
    assert choice.text == "".join(f" w{token}" for token in choice.token_ids)
    pieces = client.completions.create(**asked, extra_body={"return_token_ids": True}, stream=True)
    assert [token for piece in pieces for token in piece.choices[0].token_ids] == choice.token_ids


def test_a_repeated_prompt_is_cached(client: Any) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    said = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert said.usage.prompt_tokens_details.cached_tokens >= 160
    salted = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_content_parts_are_text_and_tools_go_to_the_template(client: Any) -> None:
    parts = [{"type": "text", "text": "Hello, who"}, {"type": "text", "text": "are you?"}]
    joined = [{"role": "user", "content": "Hello, who\nare you?"}]
    asked = {"model": MODEL, "temperature": 0, "max_completion_tokens": 4}
    said = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    assert said.choices[0] == client.chat.completions.create(messages=joined, **asked).choices[0]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert client.chat.completions.create(messages=HELLO, tools=[tool], **asked).choices[0].finish_reason == "length"
    picture = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.0\.image_url` is an image, but"):
        client.chat.completions.create(messages=[{"role": "user", "content": picture}], **asked)


def test_the_last_message_can_go_on(client: Any) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_completion_tokens": 4}
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    said = client.chat.completions.create(messages=begun, **asked, extra_body=more)
    written = "user: Hello, who are you?\nassistant: I am"
    assert said.usage.prompt_tokens == len(written)
    alone = client.completions.create(model=MODEL, prompt=written, temperature=0, max_tokens=4)
    assert said.choices[0].message.content == alone.choices[0].text


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"model": "nobody", "messages": HELLO}, "NotFoundError", "model"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"messages": HELLO, "temperature": 3}, "BadRequestError", "temperature"),
        ({"messages": HELLO, "max_tokens": 50_000}, "BadRequestError", "max_tokens"),
        ({"messages": HELLO, "logprobs": True}, "BadRequestError", "logprobs"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "BadRequestError", "response_format"),
        ({"messages": HELLO, "tool_choice": "required", "tools": []}, "BadRequestError", "tool_choice"),
        ({"messages": HELLO, "logit_bias": {"999999": 1}}, "BadRequestError", "logit_bias"),
        ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "BadRequestError", "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_are_typed_and_name_the_field(client: Any, asked: dict[str, Any], kind: str, param: str | None) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(**{"model": MODEL, **asked})
    assert caught.value.body["type"] == kind
    assert caught.value.body["code"] == caught.value.status_code
    if param is not None:
        assert caught.value.body["param"] == param
        assert f"`{param}" in caught.value.message or param in caught.value.message


def test_structured_output_is_refused_where_there_is_no_tokenizer(client: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    fields: tuple[dict[str, Any], ...] = (
        {"response_format": schema},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["a", "b"]},
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
    )
    for asked in fields:
        (name,) = asked
        with pytest.raises(openai.BadRequestError, match=f"`{name}` requests structured output: .* --tokenizer DIR"):
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=asked)


def test_embeddings_of_an_emulated_model_are_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="an emulated engine has no hidden states"):
        client.embeddings.create(model=MODEL, input="a")


def test_a_field_that_changes_nothing_is_accepted(client: Any) -> None:
    more = {"response_format": {"type": "text"}, "skip_special_tokens": True, "suffix": None, "a_field_of_others": 1}
    said = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=1, extra_body=more)
    assert said.usage.completion_tokens == 1


def test_null_is_as_good_as_nothing(emulated: LiveServer) -> None:
    import httpx2

    from lockstep.api.endpoints.schemas import ChatBody, CompletionBody

    for path, body, given in (
        ("completions", CompletionBody, {"prompt": "a"}),
        ("chat/completions", ChatBody, {"messages": HELLO}),
    ):
        kept = ("prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message")
        nothing = {name: None for name in (*body.model_fields, *body.REFUSED) if name not in kept}
        answer = httpx2.post(f"{emulated.url}/v1/{path}", json={**nothing, **given, "max_tokens": 1}, timeout=120)
        assert answer.status_code == 200, answer.text


def test_a_client_that_leaves_is_cancelled(client: Any, emulated: LiveServer) -> None:
    endless = {"ignore_eos": True}
    before = metric(emulated, "lockstep_generation_tokens_total")
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=30_000, stream=True, extra_body=endless)
    next(iter(stream))
    until(lambda: metric(emulated, "lockstep_num_requests_running") == 1)
    stream.close()
    until(lambda: metric(emulated, "lockstep_num_requests_running") == 0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model=MODEL, prompt="a", max_tokens=30_000, extra_body=endless
        )
    until(lambda: metric(emulated, "lockstep_num_requests_running") == 0)
    assert metric(emulated, "lockstep_generation_tokens_total") - before < 20_000


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 30_000}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 30_000}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 30_000}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}),
    ],
)
def test_g11_a_client_that_leaves_is_detected_though_nothing_is_streamed(
    emulated: LiveServer, path: str, more: dict[str, Any]
) -> None:
    """SG#20625: nothing is written before the end, so only a read detects it; metrics count around all routes."""
    body = json.dumps({"model": MODEL, "ignore_eos": True, **more} if path != "/generate" else more).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = emulated.url.removeprefix("http://").split(":")
    until(lambda: running(emulated) == 0)
    tokens = metric(emulated, "lockstep_generation_tokens_total")
    left = metric(emulated, LEFT)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: running(emulated) == 1)
    until(lambda: running(emulated) == 0)
    until(lambda: metric(emulated, LEFT) == left + 1)
    assert metric(emulated, "lockstep_generation_tokens_total") - tokens < 20_000


def test_a_client_that_reads_nothing_is_disconnected(emulated: LiveServer) -> None:
    host, port = emulated.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True, "n": 8}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    left = metric(emulated, LEFT)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: metric(emulated, LEFT) > left)
        until(lambda: running(emulated) == 0)
    assert "read less than 16384 bytes in 2 s" in emulated.text()
    assert "without completing response" not in emulated.text()


def test_many_at_once_do_not_mix_their_answers(emulated: LiveServer) -> None:
    async def ask(client: Any, number: int) -> tuple[str, str]:
        asked = {"model": MODEL, "prompt": f"number {number}", "temperature": 0, "max_tokens": 20 + number % 7}
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[tuple[str, str]]:
        url = f"{emulated.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="nothing", max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    answers = asyncio.run(ask_all())
    assert all(whole == streamed for whole, streamed in answers)
    assert len({whole for whole, _ in answers}) == 64
