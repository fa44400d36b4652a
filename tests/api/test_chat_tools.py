"""Calls of tools and thoughts over HTTP, by the official clients: an emulated model says what a file says."""

from __future__ import annotations

import json
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
ANSWERS = {
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
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="nothing", max_retries=0) as made:
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


def test_a_stream_says_the_same_as_its_client_puts_it_together(client: Any) -> None:
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
    assert pieces > 2  # arguments come as they are said; a busy machine joins pieces
    assert plain(final.choices[0].message) | {"reasoning": thoughts} == plain(whole.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens_details.reasoning_tokens == (
        whole.usage.completion_tokens_details.reasoning_tokens
    )


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
    assert none.usage.prompt_tokens < with_tools.usage.prompt_tokens / 2  # it does not even know them
    one = client.chat.completions.create(**asked("Weather and time?"), tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]
    chunks = client.chat.completions.create(
        **asked("Weather and time?"), tools=TOOLS, parallel_tool_calls=False, stream=True
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}


def test_what_begins_as_a_call_and_is_none_is_content(client: Any) -> None:
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
def test_thoughts_as_the_client_wants_them(client: Any, stream: bool) -> None:
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
    # The template closes thoughts in the prompt, so what comes is what is told, whatever it looks like.
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
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": "no"}}}, "chat_template_kwargs.enable_thinking"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, "chat_template_kwargs.thinking"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_is_refused_by_name(client: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked("Just think"), **more)
    assert caught.value.body["param"] == param
    assert f"`{param}`" in caught.value.message
