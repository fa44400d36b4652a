"""POST /v1/responses by the official client: whole, streamed, cut off, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

from tests.support.live_server import LiveServer, running, until  # noqa: E402

MODEL = "qwen3-0.6b"


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{emulated.url}/v1", api_key="nothing", max_retries=0) as made:
        yield made


def test_an_input_is_what_a_user_says(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    said = client.responses.create(input="hello", max_output_tokens=5, instructions="Rhyme.", **asked)
    told = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=told, max_completion_tokens=5, **asked)
    assert said.output_text == chat.choices[0].message.content
    assert (said.object, said.status, said.incomplete_details.reason) == ("response", "incomplete", "max_output_tokens")
    assert said.id.startswith("resp_")
    assert (said.model, said.instructions, said.max_output_tokens) == (MODEL, "Rhyme.", 5)
    (item,) = said.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (said.usage.input_tokens, said.usage.output_tokens) == (chat.usage.prompt_tokens, 5)
    assert said.usage.total_tokens == said.usage.input_tokens + 5


def test_an_answer_that_ends_by_itself_is_completed(client: Any) -> None:
    said = client.responses.create(model=MODEL, input="hello", temperature=0)
    assert said.status == "completed"
    assert said.incomplete_details is None
    assert said.output[0].status == "completed"


def test_items_and_parts(client: Any) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
    items = [
        {"role": "developer", "content": "Rhyme."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yellow"}]},
        {"role": "user", "content": "more"},
    ]
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_completion_tokens=4,
        messages=[
            {"role": "system", "content": "Rhyme."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "yellow"},
            {"role": "user", "content": "more"},
        ],
    )
    assert client.responses.create(input=items, **asked).output_text == chat.choices[0].message.content


def test_a_stream_has_every_event_in_order_and_says_the_same(client: Any) -> None:
    asked = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 400}
    whole = client.responses.create(**asked, extra_body={"ignore_eos": True})
    events = list(client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert deltas  # how many depends on who else is at work
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[-1].response.usage.output_tokens == 400
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[2].item.id}
    assert events[0].response.id == events[-1].response.id


def test_the_clients_own_accumulator_takes_the_stream(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0}
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**asked).output_text


def test_stop_texts_and_deadlines_hold_here_too(client: Any) -> None:
    asked = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 40}
    text = client.responses.create(**asked).output_text
    stop = text[20:26]
    said = client.responses.create(**asked, extra_body={"stop": stop})
    assert (said.output_text, said.status) == (text[: text.index(stop)], "completed")
    endless = {"ignore_eos": True, "timeout_s": 0.3}
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model=MODEL, input="hello", max_output_tokens=30_000, extra_body=endless)
    assert caught.value.status_code == 504
    *_, last = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=30_000, stream=True, extra_body=endless
    )
    assert (last.type, last.response.error.message) == ("response.failed", "the request ran out of time")


def test_leaving_a_stream_cancels_it(client: Any, emulated: LiveServer) -> None:
    stream = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    until(lambda: running(emulated) == 1)
    stream.close()
    until(lambda: running(emulated) == 0)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 50_000}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "x" * 50_000}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_served_is_refused_by_name(client: Any, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "a", **asked})
    assert caught.value.body["param"].startswith(param)
    assert f"`{param}" in caught.value.message or "context length" in caught.value.message


def test_what_changes_nothing_is_accepted(client: Any) -> None:
    said = client.responses.create(
        model=MODEL,
        input="a",
        max_output_tokens=1,
        store=False,
        tools=[],
        truncation="disabled",
        text={"format": {"type": "text"}},
        tool_choice="auto",
        parallel_tool_calls=True,
        metadata={"for": "a test"},
        extra_body={"previous_response_id": None},
    )
    assert said.metadata == {"for": "a test"}
