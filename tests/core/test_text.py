"""Text of tokens: pieces of characters in several tokens, pairs of texts, special tokens, and bounds of templates."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="no tokenizer is installed")
pytest.importorskip("jinja2", reason="templates are not installed")

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from lockstep.host import text as text_module
from lockstep.host.text import BUDGET, BoundedEnvironment, Budget, Text


def text_of(folder: Path, vocabulary: dict[str, int]) -> Text:
    """Return a tokenizer whose tokens are bytes."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return Text(folder)


def test_a_character_may_begin_in_any_token_of_the_prompt(tmp_path: Path) -> None:
    """The bytes of "é" are the tokens 0 and 1. A placeholder of media, below 0, has no text.

    The first piece of an answer is the rest of a character in which the prompt ends, and never text of the prompt.
    """
    text = text_of(tmp_path, {"Ã": 0, "©": 1, "x": 2})
    assert text.decode([0, 1, 2]) == "éx"
    behind = {prompt: text.stream(prompt)(1) for prompt in ((0,), (-1, 0), (2, 0), (2, 2, 0), (0, 1, 2, 0))}
    assert behind == dict.fromkeys(behind, "é")
    for prompt in ((2,), (2, 0, 1), (0, 1), ()):
        step = text.stream(prompt)
        assert [step(token) for token in (0, 1, 2)] == ["", "é", "x"]


def test_a_character_of_four_bytes_may_be_divided_between_prompt_and_answer(tmp_path: Path) -> None:
    """The bytes of U+1F600, and a letter in front of them."""
    text = text_of(tmp_path, {"ð": 0, "Ł": 1, "ĺ": 2, "Ģ": 3, "x": 4})
    assert text.decode([0, 1, 2, 3]) == "\U0001f600"
    for begun in range(4):
        step = text.stream((4, 4, *range(begun)))
        assert "".join(step(token) for token in (*range(begun, 4), 4)) == "\U0001f600x"


def test_a_begun_character_behind_others_is_taken_by_itself(tmp_path: Path) -> None:
    """The prompt has a byte that is no character, "é", and the first byte of another."""
    assert text_of(tmp_path, {"Ã": 0, "©": 1, "x": 2}).stream((0, 0, 1, 0))(1) == "é"


def test_a_stream_goes_on_behind_bytes_that_are_no_character(tmp_path: Path) -> None:
    """Bytes of such a tokenizer are characters only if all bytes beside them are: what was sent stays as it is.

    A space in front of a word is part of the answer unless the answer begins with it.
    """
    tokenizer = Tokenizer(models.BPE(vocab={"<0xC3>": 0, "<0xA9>": 1, "x": 2, "▁y": 3}, merges=[]))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path)
    for prompt, answer, pieces in (
        ((), (0, 1, 0, 2, 3), ["", "é", "", "x", " y"]),
        ((0, 1), (1, 2, 3), ["", "x", " y"]),
        ((0, 1, 0), (2, 1, 0), ["x", "", ""]),
        ((), (3, 2, 3), ["y", "x", " y"]),
    ):
        step = text.stream(prompt)
        assert [step(token) for token in answer] == pieces


def test_the_longest_token_of_a_vocabulary(tmp_path: Path) -> None:
    """Tokens that were added to a vocabulary count as well."""
    text = text_of(tmp_path, {"a": 0, "abcd": 1, "ab": 2})
    assert text.characters_max() == 4
    text.tokenizer.add_tokens(["abcdefg"])
    assert text.characters_max() == 7
    assert text_of(tmp_path, {}).characters_max() == 1


def test_special_tokens_are_left_out_of_text_unless_they_are_kept(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"a": 0})
    text.tokenizer.add_special_tokens([AddedToken("<call>", special=True), AddedToken("<end>", special=True)])
    ids = [1, 0, 2]
    assert text.decode(ids) == "a"
    assert text.verbatim().decode(ids) == "<call>a<end>"
    assert text.decode(ids) == "a", "the view changes nothing"
    text.keep(["<call>", "a"])
    assert text.decode(ids) == "<call>a"
    step = text.stream(())
    assert "".join(step(token) for token in ids) == "<call>a"
    text.keep(["a"])
    assert text.decode(ids) == "a"


def test_special_tokens_have_the_names_that_templates_use(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"a": 0})
    text.settings = {
        "eos_token": "<e>",
        "bos_token": {"content": "<b>"},
        "pad_token": None,
        "unk_token": {"content": 3},
        "padding_side": "left",
    }
    assert text.special_tokens() == {"eos_token": "<e>", "bos_token": "<b>"}


# --------------------------------------------------------------------------------------------------------- two texts


@pytest.fixture
def pairs(tmp_path: Path) -> Text:
    """A tokenizer of the words 0 to 9, with a mark 10 in front of the first text and 11 in front of the second."""
    words = {**{str(number): number for number in range(10)}, "[C]": 10, "[S]": 11}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[C] $A", pair="[C] $A [S] $B:1", special_tokens=[("[C]", 10), ("[S]", 11)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Text(tmp_path)


LONG, SHORT = [1, 2, 3, 4, 5], [6, 7, 8]


@pytest.mark.parametrize(
    ("most", "long", "short"),
    [(None, 5, 3), (11, 5, 3), (10, 5, 3), (9, 4, 3), (7, 3, 2), (6, 2, 2), (3, 1, 0), (2, 0, 0), (0, 0, 0)],
)
def test_of_two_texts_the_longer_one_is_cut_until_they_fit(
    most: int | None, long: int, short: int, pairs: Text
) -> None:
    """The limit has room for the two marks. Texts that both exceed half of it get half each."""

    def written(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    ids, types = pairs.encode_pair(written(LONG), written(SHORT), most)
    assert ids == [10, *LONG[:long], 11, *SHORT[:short]]
    assert types == [0] * (long + 2) + [1] * short
    ids, _ = pairs.encode_pair(written(SHORT), written(LONG), most)
    assert ids == [10, *SHORT[:short], 11, *LONG[:long]]


# --------------------------------------------------------------------------------------------------------- templates


def test_of_several_templates_the_one_named_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    text_of(tmp_path, {"a": 0})
    for templates, found in ((named, "a"), (named[:1], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert Text(tmp_path).chat_template == found


def test_blocks_leave_no_space_and_centred_text_has_a_bounded_width(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"a": 0})
    text.chat_template = "  {% if true %}\n[{{ 'a' | center(5) }}]{{ 'a' | center(5000) | length }}\n  {% endif %}\n"
    assert text.chat([]) == "[  a  ]1000\n"


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of a budget's clock."""
    now_s = [100.0]
    monkeypatch.setattr(text_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_a_budget_ends_behind_its_last_second_and_character(now_s: list[float]) -> None:
    budget = Budget(5.0, 8)
    budget.write(8)
    now_s[0] = 105.0
    budget.write(0)
    assert list(budget.turns([1, 2])) == [1, 2]
    with pytest.raises(jinja2.TemplateError, match="it writes more than 8 characters"):
        budget.write(1)
    turns = Budget(0.0, 8).turns([1, 2])
    assert next(turns) == 1
    now_s[0] = 106.0
    for late in (budget.spend, lambda: Budget.write(budget, -1), lambda: next(turns)):
        with pytest.raises(jinja2.TemplateError, match="it takes longer than"):
            late()


class Applied:
    """Operators of a template, with results of at most 10 characters or items."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text_module, "LARGEST", 10)
        self.environment: Any = BoundedEnvironment()
        self.context = {BUDGET: Budget(5.0, 8)}

    def __call__(self, left: Any, operator: str, right: Any) -> Any:
        return self.environment.call_binop(self.context, operator, left, right)


def test_operators_have_results_up_to_a_size(monkeypatch: pytest.MonkeyPatch, now_s: list[float]) -> None:
    applied = Applied(monkeypatch)
    assert applied("a" * 5, "+", "b" * 5) == "aaaaabbbbb"
    assert applied("ab", "*", 5) == applied(5, "*", "ab") == "ababababab"
    assert applied(1000, "**", 1) == 1000
    assert applied(1, "**", 1000) == 1
    assert applied(7000, "*", 5000) == 35_000_000
    assert applied(20_000, "+", 30_000) == 50_000
    assert applied(20_000, "%", 30_000) == 20_000
    assert applied("%999d", "%", 3) == f"{3:999}"
    assert applied("%1000d", "+", "") == "%1000d"
    for left, operator, right, why in (
        ("a" * 5, "+", "b" * 6, "`\\+` is too large"),
        ([0] * 11, "+", [], "`\\+` is too large"),
        ("ab", "*", 6, "`\\*` is too large"),
        (6, "*", "ab", "`\\*` is too large"),
        (1001, "**", 1, "`\\*\\*` is too large"),
        (-1001, "**", 1, "`\\*\\*` is too large"),
        (1, "**", 1001, "`\\*\\*` is too large"),
        ("%1000d", "%", 3, "a width in `%` is too large"),
    ):
        with pytest.raises(jinja2.TemplateError, match=why):
            applied(left, operator, right)
    assert text_module._joined("a" * 10) == "a" * 10
    with pytest.raises(jinja2.TemplateError, match="`~` is too large"):
        text_module._joined("a" * 11)
    now_s[0] = 106.0
    with pytest.raises(jinja2.TemplateError, match="it takes longer than 5 s"):
        applied(1, "+", 1)
    with pytest.raises(jinja2.TemplateError, match="it takes longer than 5 s"):
        applied.environment.call(applied.context, len, "a")


@pytest.mark.parametrize("prompt", [(2, 0, 0, 0, 0), (2, 2, 1, 1, 1, 1, 0), (0, 0), (0,), (2, 0)])
def test_the_first_piece_behind_bytes_that_are_no_character_has_no_text_of_the_prompt(
    prompt: tuple[int, ...], tmp_path: Path
) -> None:
    text = text_of(tmp_path, {"Ã": 0, "©": 1, "x": 2})
    step = text.stream(prompt)
    assert [step(1), step(2)] == ["é", "x"]


def test_an_answer_has_what_its_prompt_does_not_have(tmp_path: Path) -> None:
    """All prompts of up to three tokens of a vocabulary with bytes of two characters, and answers that end with `x`."""
    vocabulary = {"Ã": 0, "©": 1, "x": 2, "â": 3, "Ĥ": 4, "¬": 5}
    text = text_of(tmp_path, vocabulary)
    for count in range(4):
        for prompt in itertools.product(vocabulary.values(), repeat=count):
            for answer in itertools.product((0, 1, 3), repeat=2):
                step = text.stream(prompt)
                before, whole = text.decode(prompt), text.decode((*prompt, *answer, 2))
                pieces = "".join(step(token) for token in (*answer, 2))
                assert pieces == whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071
