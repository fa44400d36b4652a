"""Text of tokens: pieces of characters in several tokens, and the longest token of a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="no tokenizer is installed")

from tokenizers import Tokenizer, decoders, models

from lockstep.host.text import Text


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


def test_the_longest_token_of_a_vocabulary(tmp_path: Path) -> None:
    assert text_of(tmp_path, {"a": 0, "abcd": 1, "ab": 2}).characters_max() == 4
