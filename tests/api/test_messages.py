"""POST /v1/messages with Anthropic's client: whole, streamed, counted, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import LiveServer, running, until  # noqa: E402

MODEL = "qwen3-0.6b"
GREEDY = {"temperature": 0.0}  # the client lacks this parameter for newer models
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=emulated.url, api_key="nothing", max_retries=0) as made:
        yield made


def chat(server: LiveServer, messages: Any, **more: Any) -> Any:
    body = {"messages": messages, "temperature": 0, **more}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()


def test_a_message(client: Any, emulated: LiveServer) -> None:
    said = client.messages.create(model=MODEL, max_tokens=5, messages=HELLO, system="Rhyme.", extra_body=GREEDY)
    other = chat(emulated, [{"role": "system", "content": "Rhyme."}, *HELLO], max_tokens=5)
    (block,) = said.content
    assert (block.type, block.text) == ("text", other["choices"][0]["message"]["content"])
    assert (said.type, said.role, said.model) == ("message", "assistant", MODEL)
    assert said.id.startswith("msg_")
    assert (said.stop_reason, said.stop_sequence) == ("max_tokens", None)
    used = said.usage
    assert used.output_tokens == 5
    assert used.input_tokens + used.cache_read_input_tokens == other["usage"]["prompt_tokens"]


def test_it_ends_by_itself_or_at_a_stop(client: Any) -> None:
    asked = {"model": MODEL, "messages": HELLO, "extra_body": GREEDY}
    whole = client.messages.create(max_tokens=2000, **asked)
    assert whole.stop_reason == "end_turn"
    text = whole.content[0].text
    stop = text[20:26]
    said = client.messages.create(max_tokens=2000, stop_sequences=["nowhere", stop], **asked)
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert said.content[0].text == text[: text.index(stop)]


def test_a_stream_adds_up_to_the_whole(client: Any) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 300, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"ping", "content_block_delta"}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_blocks_and_a_begun_answer(client: Any, emulated: LiveServer) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}, {"role": "assistant", "content": "yel"}]
    said = client.messages.create(
        model=MODEL,
        max_tokens=4,
        messages=blocks,
        system=[{"type": "text", "text": "Rhyme."}],
        extra_body=GREEDY,
    )
    told = [{"role": "system", "content": "Rhyme."}, *HELLO, {"role": "assistant", "content": "yel"}]
    other = chat(emulated, told, max_tokens=4, continue_final_message=True, add_generation_prompt=False)
    assert said.content[0].text == other["choices"][0]["message"]["content"]


def test_counting(client: Any) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Rhyme.")
    assert counted.input_tokens == len("system: Rhyme.\nuser: hello\nassistant:")


def test_leaving_a_stream_cancels_it(client: Any, emulated: LiveServer) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=30_000, messages=[{"role": "user", "content": "1"}], extra_body=GREEDY
    ) as stream:
        next(iter(stream.text_stream))
    until(lambda: running(emulated) == 0)


def test_errors_have_the_shape_that_the_client_reads(client: Any) -> None:
    for asked, param in (
        ({"timeout": 3600, "max_tokens": 50_000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": [{"name": "now", "type": "bash_20250124"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages.0.content.0.source",
        ),
    ):
        extra = {name: value for name, value in asked.items() if name == "temperature"}
        given = {name: value for name, value in asked.items() if name != "temperature"}
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": HELLO, **given, "extra_body": extra})
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert param in caught.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=5, messages=[])
