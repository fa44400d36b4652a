"""Tool calls and thoughts over HTTP with the official clients: an emulated model with answers from a file."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")
pytest.importorskip("tokenizers", reason="the tokenizer is not installed")

from tests.support.live_server import EMULATED, LiveServer, serving  # noqa: E402
from tests.support.words import word_tokenizer  # noqa: E402

MODEL = "qwen3-0.6b"
TEMPLATE = r"""
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
TEXT = 'Zürich "HB" \\ \U0001f600\nline'
PARIS: dict[str, Any] = {"city": TEXT, "days": 2, "near": [{"a": None}]}
CALL = f"""<tool_call>
{json.dumps({"name": "get_weather", "arguments": PARIS}, ensure_ascii=False)}
</tool_call>"""
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LONG = "Llanfairpwllgwyngyll " * 400  # seconds of output, so that no pause of the machine joins it into one piece
ANSWERS = {
    "A long one": f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps({"city": LONG})}}}</tool_call>',
    "Weather and time?": f"<think>\nTwo of them.\n</think>\n\nI look.\n{CALL}\n{SECOND}",
    "it is sunny": "It is sunny.",
    "Just think": "<think>\nHm.\n</think>\n\nDone.",
    "Nearly": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par</tool_call> that was it',
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "near": {"type": "array"}},
    "required": ["city"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def script(folder: Path, answers: dict[str, str]) -> str:
    path = folder / "answers.toml"
    quoted = [
        (json.dumps(one, ensure_ascii=False), json.dumps(say, ensure_ascii=False)) for one, say in answers.items()
    ]
    lines = [f"[[answer]]\nwhen = {when}\nsay = {say}" for when, say in quoted]
    path.write_text("\n".join(lines), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = word_tokenizer(folder / "words", template=TEMPLATE, special=("<|im_start|>",), eos="<|im_end|>")
    arguments = ("--speed", "20", "--tokenizer", str(tokenizer), "--answers", script(folder, ANSWERS))
    with serving(folder / "log", *EMULATED, *arguments, "--shutdown-s", "1") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="nothing", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="nothing", max_retries=0) as made:
        yield made


def plain(message: Any) -> dict[str, Any]:
    """A message without the ids of its calls."""
    said = {"content": message.content, "reasoning": getattr(message, "reasoning_content", None)}
    return said | {"calls": [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]}


def test_calls_and_thoughts_of_a_whole_answer(client: Any) -> None:
    said = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS)
    (choice,) = said.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Two of them."
    assert choice.message.content == "I look."
    weather, now = choice.message.tool_calls
    assert (weather.type, weather.function.name) == ("function", "get_weather")
    assert json.loads(weather.function.arguments) == PARIS
    assert (now.function.name, now.function.arguments) == ("now", "{}")
    assert weather.id.startswith("call_")
    assert weather.id != now.id
    thought = said.usage.completion_tokens_details.reasoning_tokens
    assert 10 < thought < said.usage.completion_tokens / 2


def test_a_stream_adds_up_to_the_whole_answer(client: Any) -> None:
    whole = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS)
    thoughts, heads, pieces = "", [], 0
    with client.chat.completions.stream(
        **asked("Weather and time?"), tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        for event in stream:
            if event.type != "chunk" or not event.chunk.choices:
                continue
            (choice,) = event.chunk.choices
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert (call.type, call.function.arguments) == ("function", "")
                    heads.append((call.index, call.function.name))
                else:
                    assert call.function.name is None
                    assert call.index == heads[-1][0]
                    pieces += 1
        final = stream.get_final_completion()
    assert heads == [(0, "get_weather"), (1, "now")]
    assert pieces >= 2
    assert plain(final.choices[0].message) | {"reasoning": thoughts} == plain(whole.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens_details.reasoning_tokens == (
        whole.usage.completion_tokens_details.reasoning_tokens
    )


def test_arguments_are_streamed_as_they_are_generated(client: Any) -> None:
    chunks = client.chat.completions.create(**asked("A long one"), tools=TOOLS, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    pieces = [call.function.arguments for call in calls[1:]]
    assert "".join(pieces) == json.dumps({"city": LONG})
    assert len(pieces) > 3  # of thousands of tokens, however busy the machine is


def test_long_answers_are_read_beside_the_event_loop() -> None:
    from lockstep.api.endpoints.openai_api import shaped

    async def where(characters: int) -> int:
        return await shaped(threading.get_ident, characters)

    assert asyncio.run(where(100)) == threading.get_ident() != asyncio.run(where(100_000))


def test_samples_are_read_apart(client: Any) -> None:
    chunks = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS, n=3, stream=True)
    arguments: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                place = choice.index, call.index
                arguments[place] = arguments.get(place, "") + call.function.arguments
    assert {place: json.loads(text) for place, text in arguments.items()} == {
        (sample, number): (PARIS, {})[number] for sample in range(3) for number in range(2)
    }


def test_a_conversation_goes_on_behind_a_call(client: Any) -> None:
    first = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS).choices[0].message
    told = [
        {"role": "user", "content": "Weather and time?"},
        first.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": one.id, "content": "it is sunny"} for one in first.tool_calls),
    ]
    said = client.chat.completions.create(model=MODEL, messages=told, tools=TOOLS).choices[0]
    assert (said.message.content, said.finish_reason) == ("It is sunny.", "stop")
    assert said.message.tool_calls is None


def test_choices_about_tools(client: Any) -> None:
    with_tools = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS)
    none = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == f"I look.\n{CALL}\n{SECOND}"
    assert none.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens < with_tools.usage.prompt_tokens / 2  # the prompt does not contain the tools
    one = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]
    chunks = client.chat.completions.create(
        **asked("Weather and time?"), tools=TOOLS, parallel_tool_calls=False, stream=True
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}


UNIT = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"enum": [1, 2, 3]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
UNIT_TOOLS: Any = [*TOOLS[1:], {"type": "function", "function": {"name": "forecast", "parameters": UNIT}}]


def test_a_tool_that_must_be_called_is(client: Any, claude: Any) -> None:
    pytest.importorskip("llguidance", reason="no grammar backend is installed")

    def check(name: str, arguments: Any) -> None:
        known = {"unit", "days"} if name == "forecast" else set()
        assert set(arguments) == known
        assert not known or (arguments["unit"] in ("C", "F") and arguments["days"] in (1, 2, 3))

    named: Any = {"type": "function", "function": {"name": "forecast"}}
    for choice in ("required", named):
        for stream in (False, True):
            more = {"tools": UNIT_TOOLS, "tool_choice": choice, "seed": 3, "parallel_tool_calls": False}
            if stream:
                with client.chat.completions.stream(**asked("Now"), **more) as streamed:
                    said = streamed.get_final_completion().choices[0]
            else:
                said = client.chat.completions.create(**asked("Now"), **more).choices[0]
            assert (said.finish_reason, said.message.content or None) == ("tool_calls", None)
            (call,) = said.message.tool_calls
            check(call.function.name, json.loads(call.function.arguments))
            assert call.function.name == "forecast" or choice == "required"
    flat: Any = [{"type": "function", **one["function"]} for one in UNIT_TOOLS]
    (item,) = client.responses.create(
        model=MODEL, input="Now", tools=flat, tool_choice={"type": "function", "name": "forecast"}
    ).output
    check(item.name, json.loads(item.arguments))
    tools: Any = [{"name": "forecast", "input_schema": UNIT}]
    told: Any = [{"role": "user", "content": "Now"}]
    message = claude.messages.create(
        model=MODEL, max_tokens=900, messages=told, tools=tools, tool_choice={"type": "tool", "name": "forecast"}
    )
    (block,) = message.content
    check(block.name, block.input)
    assert message.stop_reason == "tool_use"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNIT}}
    with pytest.raises(openai.BadRequestError, match="`response_format` and `tool_choice` both constrain"):
        client.chat.completions.create(
            **asked("Now"), tools=UNIT_TOOLS, tool_choice="required", extra_body={"response_format": schema}
        )


def test_an_incomplete_call_is_content(client: Any) -> None:
    said = client.chat.completions.create(**asked("Nearly"), tools=TOOLS).choices[0]
    assert said.message.content == ANSWERS["Nearly"]
    assert (said.message.tool_calls, said.finish_reason) == (None, "stop")
    cut = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS, max_completion_tokens=90)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content.startswith("I look.\n<tool_call>\n{")
    stopped = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS, stop=["HB"]).choices[0]
    assert stopped.message.content.endswith('"city": "Zürich \\"')
    assert stopped.stop_reason == "HB"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_in_the_form_that_the_client_selects(client: Any, stream: bool) -> None:
    def said(**more: Any) -> tuple[list[str], str]:
        told = client.chat.completions.create(**asked("Just think"), extra_body=more, stream=stream)
        if not stream:
            message = told.choices[0].message
            return [getattr(message, "reasoning_content", None) or ""], message.content
        deltas = [chunk.choices[0].delta for chunk in told]
        thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
        return thoughts or [""], "".join(delta.content or "" for delta in deltas)

    thoughts, content = said()
    assert ("".join(thoughts), content) == ("Hm.", "Done.")
    assert said(stream_reasoning=False) == (["Hm."], "Done.")
    assert said(include_reasoning=False) == ([""], "Done.")
    assert said(separate_reasoning=False) == ([""], ANSWERS["Just think"])
    # The template closes thoughts in the prompt, so all output is content, whatever it looks like.
    assert said(chat_template_kwargs={"enable_thinking": False}) == ([""], ANSWERS["Just think"])


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": "no"}}}, "chat_template_kwargs.enable_thinking"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_fields_are_refused_by_name(client: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked("Just think"), **more)
    assert caught.value.body["param"] == param
    assert f"`{param}`" in caught.value.message


# ------------------------------------------------------------------------------------------------------ /v1/responses

FLAT: Any = [{"type": "function", "name": "get_weather", "parameters": WEATHER}, {"type": "function", "name": "now"}]


def bare(value: Any) -> Any:
    """A value without ids, and without additions of clients."""
    if isinstance(value, list):
        return [bare(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: bare(one) for name, one in value.items() if "id" not in name.split("_") and "parsed" not in name}


def test_a_response_has_items_for_thoughts_text_and_calls(client: Any) -> None:
    said = client.responses.create(model=MODEL, input="Weather and time?", tools=FLAT)
    thoughts, message, weather, now = said.output
    assert (thoughts.type, thoughts.content[0].text, thoughts.summary) == ("reasoning", "Two of them.", [])
    assert (message.type, message.content[0].text) == ("message", "I look.")
    assert (weather.type, weather.name, weather.status) == ("function_call", "get_weather", "completed")
    assert json.loads(weather.arguments) == PARIS
    assert (now.name, now.arguments) == ("now", "{}")
    assert len({one.id for one in said.output}) == 4
    assert said.usage.output_tokens_details.reasoning_tokens > 10
    assert (said.status, said.tools[0].name) == ("completed", "get_weather")
    told = [
        {"role": "user", "content": "Weather and time?"},
        *(one.model_dump(exclude_none=True) for one in said.output),
        {"type": "function_call_output", "call_id": weather.call_id, "output": "it is sunny"},
    ]
    assert client.responses.create(model=MODEL, input=told, tools=FLAT).output_text == "It is sunny."


def test_a_stream_of_items_adds_up_to_the_response(client: Any) -> None:
    whole = client.responses.create(model=MODEL, input="Weather and time?", tools=FLAT)
    with client.responses.stream(model=MODEL, input="Weather and time?", tools=FLAT) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert bare(final.model_dump()["output"]) == bare(whole.model_dump()["output"])
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]
    text = ("content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done")
    call = ("output_item.added", *(f"function_call_arguments.{one}" for one in ("delta", "done")), "output_item.done")
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", *(one.format("reasoning_text") for one in text)),
        *("output_item.added", *(one.format("output_text") for one in text)),
        *(*call, *call, "completed"),
    ]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(event.delta for event in deltas if event.output_index == 2)) == PARIS
    cut = client.responses.create(model=MODEL, input="Weather and time?", tools=FLAT, max_output_tokens=90, stream=True)
    *_, last = cut
    states = [one.status for one in last.response.output]
    assert (states[:2], set(states[2:])) == (["completed", "completed"], {"incomplete"})
    assert last.response.output[2].name == "get_weather"


# ------------------------------------------------------------------------------------------------------- /v1/messages

BLOCK_TOOLS: Any = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]


USE = {"type": "tool_use", "id": "a"}


def test_a_message_has_blocks_for_thoughts_text_and_calls(claude: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "tools": BLOCK_TOOLS}
    first: Any = {"role": "user", "content": "Weather and time?"}
    said = claude.messages.create(messages=[first], thinking={"type": "enabled", "budget_tokens": 1024}, **asked)
    thoughts, text, weather, now = said.content
    assert (thoughts.type, thoughts.thinking) == ("thinking", "Two of them.")
    assert (text.type, text.text) == ("text", "I look.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", PARIS)
    assert (now.name, now.input) == ("now", {})
    assert weather.id.startswith("toolu_")
    assert said.stop_reason == "tool_use"
    sunny = [{"type": "text", "text": "it is sunny"}]
    results: Any = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": sunny},
        {"type": "tool_result", "tool_use_id": now.id, "content": "noon"},
    ]
    told: Any = [first, {"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    answer = claude.messages.create(messages=told, **asked)
    assert (answer.content[0].text, answer.stop_reason) == ("It is sunny.", "end_turn")
    counted = claude.messages.count_tokens(model=MODEL, messages=told, tools=BLOCK_TOOLS)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_a_stream_of_blocks_adds_up_to_the_message(claude: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "tools": BLOCK_TOOLS}
    asked["messages"] = [{"role": "user", "content": "Weather and time?"}]

    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert bare(final.model_dump()["content"]) == bare(claude.messages.create(**asked).model_dump()["content"])
    assert final.stop_reason == "tool_use"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    one = claude.messages.create(**asked | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert [block.name for block in one.content if block.type == "tool_use"] == ["get_weather"]
    none = claude.messages.create(**asked | {"tool_choice": {"type": "none"}})
    assert [block.type for block in none.content] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "`tools.0.type` must be custom"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "`tools.0.name` must be 1 to 128"),
        ({"tools": BLOCK_TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "`tool_choice` names 'no'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "`messages.0.content.0.type` must be"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "0.name` must be a text"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
                ]
            },
            "send its result",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_messages_are_refused_by_name(claude: Any, more: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **more}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**asked)
    assert said in caught.value.body["error"]["message"]
