"""Chat templates: untrusted programs within bounds, and special tokens of a format as text."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="the tokenizer is not installed")
pytest.importorskip("jinja2", reason="templates are not installed")

from lockstep.api.text.answer_text import AnswerText
from lockstep.api.text.chat_formats.driver import AnswerParser, ParsedAnswer
from lockstep.api.text.chat_formats.tables import THOUGHTS, TOOL_FORMATS, choose, opening, with_thoughts
from lockstep.core.contract.errors import ConfigError
from lockstep.host.stop_texts import StopTexts
from lockstep.host.text import Text
from tests.api.test_chat_formats import RENDER, TOOLS
from tests.support.words import word_tokenizer


def text_of(folder: Path, template: str = "", special: tuple[str, ...] = ()) -> Text:
    return Text(word_tokenizer(folder, template=template, special=special))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "takes longer than"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}", "takes longer than"),
        ("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", "writes more than 10000 characters"),
        ("{{ 'a' * 10**9 }}", "too large"),
        ("{{ 10**10**10 }}", "too large"),
        ("{% set s = namespace(x='aa') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}", "too large"),
        ("{% set s = namespace(x='aa') %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}", "too large"),
        ("{{ '%1000000000d' % 3 }}", "too large"),
        ("{{ '%1000000000d' | format(3) }}", "too large"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set messages[0].content = 'x' %}{{ messages[0].update({}) }}", "expected token|unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe|undefined"),
        ("{% include 'tokenizer.json' %}", "no loader"),
    ],
)
def test_a_template_stays_within_its_bounds(tmp_path: Path, template: str, why: str) -> None:
    text = text_of(tmp_path, template)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"the chat template refuses the conversation: .*({why})"):
        text.chat([{"role": "user", "content": "x" * 50}], seconds=0.3, characters_max=10_000)
    assert time.monotonic() - began_s < 100


def test_bounds_do_not_change_the_output_of_templates(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}"
        "{{ ' ' ~ m.content ~ ' ' ~ 2 * 3 ~ 2 ** 3 ~ '%s' % 7 }}{% else %}nobody{% endfor %}"
        "{% for name, value in things.items() %}{{ name }}={{ value }}"
        "{% if name == 'b' %}{% break %}{% endif %}{% endfor %}"
    )
    text = text_of(tmp_path, template)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    things = {"a": 1, "b": 2, "c": 3}
    assert text.chat(messages, things=things) == "1/2 a 6872/2! b 687a=1b=2"
    assert text.chat(messages[:1], things={}) == "nobody"


def test_special_tokens_of_a_format_are_text_and_others_are_not(tmp_path: Path) -> None:
    text = text_of(tmp_path, special=("[TOOL_CALLS]", "<eos>"))
    ids = text.encode("say [TOOL_CALLS]word<eos> next", special=False)
    assert "TOOL" not in text.decode(ids)
    text.keep(("[TOOL_CALLS]", "<tool_call>"))
    assert text.decode(ids) == "say [TOOL_CALLS]word next"
    step = text.stream(())
    assert "".join(map(step, ids)) == text.decode(ids)
    watch = StopTexts(text, (), ["[TOOL_CALLS]w"])
    stopped = [watch.push(number, token)[0] for number, token in enumerate(ids)]
    assert any(stopped)


def test_any_tokens_in_a_stream_are_the_text_of_all(tmp_path: Path) -> None:
    text = text_of(tmp_path, special=("[TOOL_CALLS]", "[ARGS]", "<eos>"))
    text.keep(("[TOOL_CALLS]", "[ARGS]"))
    size: Any = text.tokenizer.get_vocab_size(with_added_tokens=True)
    draw = random.Random(3)
    for _ in range(60):
        given = json.dumps("".join(draw.choice("añ\U0001f600 {}[]") for _ in range(12)), ensure_ascii=False)
        ids = text.encode(f"[TOOL_CALLS]f[ARGS]{given}<eos>", special=False)
        assert "".join(map(text.stream(()), ids)) == text.decode(ids) == f"[TOOL_CALLS]f[ARGS]{given}"
        noise = [draw.randrange(size) for _ in range(20)]
        told = "".join(map(text.stream(()), noise))
        kept = [one for one in ("[TOOL_CALLS]", "[ARGS]") for _ in range(text.decode(noise).count(one))]
        assert sum(told.count(one) for one in ("[TOOL_CALLS]", "[ARGS]")) == len(kept)


TURN = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}WRITTEN{% if not loop.last %}SEP{% endif %}{% endfor %}"
WRITTEN = {
    "hermes": ('\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', ""),
    "llama3_json": ('{# <|python_tag|> #}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; "),
    "mistral": ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "qwen3_coder": (
        (
            "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
            "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        ),
        "\n",
    ),
    "glm45": (
        (
            "<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
            "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        ),
        "\n",
    ),
    "deepseek_v3": (
        (
            "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"  # noqa: RUF001
            "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"  # noqa: RUF001
        ),
        "",
    ),
    "pythonic": (
        (
            "{# func_name1(params_name1=1) #}{% if loop.first %}[{% endif %}{{ f.name }}("
            "{% for k, v in f.arguments | items %}"
            "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if loop.last %}]{% endif %}"
        ),
        ", ",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_is_read_back_in_the_format_that_it_teaches(name: str, tmp_path: Path) -> None:
    written, between = WRITTEN[name]
    each = EACH.replace("WRITTEN", written).replace("SEP", between)
    text = text_of(tmp_path, TURN.replace("CALLS", each))
    formats = choose("auto", "auto", text.chat_template)
    assert formats.names() == (name, "qwen3")
    assert formats.tools is not None
    assert formats.thoughts is not None
    calls = [("now", {}), ("get_weather", {"text": 'in "Zürich"', "number": -2.5, "list": [{"a": None}, True]})]
    functions = [{"type": "function", "function": {"name": one, "arguments": given}} for one, given in calls]
    content = "" if not formats.tools.marked else "I look."
    told: dict[str, Any] = {"content": content, "reasoning_content": "So be it.", "tool_calls": functions}
    user = {"role": "user", "content": "?"}
    whole = text.chat([user, {"role": "assistant", **told}], add_generation_prompt=False)
    for options, how in (({}, "neither"), ({"enable_thinking": True}, "open"), ({"enable_thinking": False}, "closed")):
        prompt = text.chat([user], **options)
        assert opening(formats.thoughts, prompt) == how
        answer = whole.removeprefix(text.chat([user])).removesuffix("<end>")
        if how != "neither":  # the template begins or skips the opening of the answer
            answer = answer.removeprefix("<think>\n") if how == "open" else answer.partition("</think>\n\n")[2]
        parser = AnswerParser(with_thoughts(formats.tools, formats.thoughts, how), tools=TOOLS, make_id=str)
        read = ParsedAnswer.of(parser.feed(answer) + parser.finish())
        assert [(one.name, json.loads(one.arguments)) for one in read.calls] == calls
        assert (read.content, read.thought) == (content, "" if how == "closed" else "So be it.")


def test_formats_are_named_or_found_or_none() -> None:
    assert choose("none", "none", "<tool_call> </think>").names() == ("none", "none")
    assert choose("auto", "auto", None).names() == ("none", "none")
    assert choose("mistral", "deepseek_r1", "<tool_call> <think> </think>").names() == ("mistral", "deepseek_r1")
    # A template that removes thoughts and never opens them: the model begins within them.
    assert choose("auto", "auto", "{{ content.split('</think>')[-1] }}").names() == ("none", "deepseek_r1")
    begun = "<user>?<assistant><think>\nSo"
    assert opening(THOUGHTS["qwen3"], begun) == "neither"
    assert opening(THOUGHTS["qwen3"], begun, continues=True) == "open"
    assert opening(THOUGHTS["qwen3"], begun + "</think> is", continues=True) == "closed"


def test_calls_are_read_from_tokens_whatever_stands_between_them(tmp_path: Path) -> None:
    draw = random.Random(5)
    arguments = {"text": 'Zürich "HB" \U0001f600', "number": 2, "list": [{"a": None}]}
    for name, form in TOOL_FORMATS.items():
        text = text_of(
            tmp_path / name, special=tuple(sorted(form.texts() - {"{", "[", "]", ",", ";", "(", ")", "=", ">"}))
        )
        text.keep(form.texts())
        calls = [("now", arguments), ("get_weather", {})]
        tokens = text.encode(RENDER[name](calls), special=False)
        for stops in ((), ("nowhere", "<tool", "city")):
            if any(stop in text.decode(tokens) for stop in stops):
                continue
            spelled = AnswerText(text, (), stops)
            parser, events, at = AnswerParser(form, tools=TOOLS, make_id=str), [], 0
            while at < len(tokens):
                at = min(len(tokens), at + draw.choice((1, 1, 3)))
                events += parser.feed(spelled.spell(tokens[:at], None))
            answer = ParsedAnswer.of(events + parser.finish())
            assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == calls, name
            assert answer.content == ""
