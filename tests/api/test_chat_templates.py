"""Chat templates: strangers' programs within bounds, and special tokens of a format that are text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="the tokenizer is not installed")
pytest.importorskip("jinja2", reason="templates are not installed")

from lockstep.core.errors import ConfigError
from lockstep.host.text import StopTexts, Text
from tests.support.words import word_tokenizer


def text_of(folder: Path, template: str = "", special: tuple[str, ...] = ()) -> Text:
    return Text(word_tokenizer(folder, template=template, special=special))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "takes longer than"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}", "takes longer than"),
        ("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", "writes more than the 10000 characters"),
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
    assert time.monotonic() - began_s < 20


def test_what_templates_do_is_not_changed_by_their_bounds(tmp_path: Path) -> None:
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
    import random

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


def test_calls_are_read_from_tokens_whatever_stands_between_them(tmp_path: Path) -> None:
    import random

    from lockstep.api.answer_text import AnswerText
    from lockstep.api.chat_formats.driver import Answer, AnswerParser
    from lockstep.api.chat_formats.tables import TOOL_FORMATS
    from tests.api.test_chat_formats import RENDER, TOOLS

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
            answer = Answer.of(events + parser.finish())
            assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == calls, name
            assert answer.content == ""
