"""Text of an answer: whole characters, nothing after a stop, equal in pieces and at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the server is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the server is not installed")

from lockstep.api.processes.wire import SampleEnded  # noqa: E402
from lockstep.api.text.answer_text import AnswerText  # noqa: E402
from lockstep.api.text.plain_text import PlainText  # noqa: E402
from lockstep.api.text.token_names import TokenNames, bytes_by_letter  # noqa: E402
from lockstep.host.text import Text  # noqa: E402

PLAIN = PlainText()


def ended(reason: str) -> SampleEnded:
    return SampleEnded(0, 0, reason)


def spelt(tokens: list[int], cuts: list[int], end: SampleEnded, **more: Any) -> tuple[list[str], AnswerText]:
    """The pieces of an answer that arrives up to each cut, then whole."""
    answer = AnswerText(PLAIN, [], **more)
    pieces = [answer.spell(tokens[:cut], None) for cut in sorted(cuts)]
    return [*pieces, answer.spell(tokens, end)], answer


@given(st.text(max_size=20), st.lists(st.integers(0, 60), max_size=5))
def test_pieces_are_the_whole_and_never_half_a_character(text: str, cuts: list[int]) -> None:
    text = text.encode("utf-8", "ignore").decode()
    pieces, answer = spelt(list(text.encode()), cuts, ended("length"))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert len(answer.starts) == len(text.encode())
    assert answer.characters == len(text)


def test_a_stop_text_cuts_the_last_piece() -> None:
    tokens = list(b"one two END and more"[:11])
    pieces, answer = spelt(tokens, [3, 8], ended("text_stop"), stops=["END", "never"])
    assert pieces == ["one", " two ", ""]
    assert answer.stop_reason == "END"
    kept, _ = spelt(tokens, [3, 8], ended("text_stop"), stops=["END"], include_stop=True)
    assert "".join(kept) == "one two END"


@pytest.mark.parametrize("cuts", [[], [3, 8], list(range(1, 11))])
def test_a_regex_and_a_stop_text_end_an_answer_in_one_place(cuts: list[int]) -> None:
    tokens = list(b"one two 42.")
    for stops, reason, text in (
        (["."], r"\d+\.", "one two "),
        (["2."], r"\d+\.", "one two "),
        (["wo 42."], "wo 42.", "one t"),
    ):
        pieces, answer = spelt(tokens, [], ended("text_stop"), stops=stops, regexes=[r"\d+\."])
        assert ("".join(pieces), answer.stop_reason, answer.characters) == (text, reason, len(text))
    pieces, answer = spelt(tokens, [one for one in cuts if one <= 8], ended("text_stop"), regexes=[r"\d+\."])
    assert ("".join(pieces), answer.stop_reason) == ("one two ", r"\d+\.")
    pieces, _ = spelt(tokens, cuts, ended("text_stop"), stops=["x"], regexes=[r"\d+\."], include_stop=True)
    assert "".join(pieces) == "one two 42."


def test_the_first_of_several_stops_counts_and_too_early_ones_do_not() -> None:
    tokens = list(b"a.b,c.")
    pieces, answer = spelt(tokens, [], ended("text_stop"), stops=[",", "."])
    assert (pieces, answer.stop_reason) == (["a"], ".")
    late, after = spelt(tokens, [2], ended("text_stop"), stops=["."], min_tokens=4)
    assert ("".join(late), after.stop_reason) == ("a.b,c", ".")


def test_a_token_that_ends_an_answer_is_no_part_of_it() -> None:
    pieces, answer = spelt([97, 98, 99], [], ended("stop"), stop_token_ids=[99])
    assert (pieces, answer.stop_reason) == (["ab"], 99)
    assert len(answer.starts) == 3
    pieces, answer = spelt([97, 98, 256], [], ended("stop"))
    assert (pieces, answer.stop_reason) == (["ab"], None)


def test_without_a_tokenizer_there_is_no_text() -> None:
    answer = AnswerText(None, [1, 2])
    assert answer.spell([3, 4], ended("length")) == ""


@given(st.lists(st.integers(0, 2000), max_size=30))
def test_plain_text_decodes_in_pieces_as_at_once(ids: list[int]) -> None:
    step = PLAIN.stream(())
    assert "".join(map(step, ids)) == PLAIN.decode(ids)


@given(st.text(max_size=40))
def test_plain_text_comes_back(text: str) -> None:
    assert PLAIN.decode(PLAIN.encode(text)) == text.encode("utf-8", "replace").decode()


def test_tokens_have_names_and_bytes(tmp_path: Any) -> None:
    """A byte-level tokenizer with single-byte tokens, one word, and an end."""
    letters = {byte: letter for letter, byte in bytes_by_letter().items()}
    assert len(letters) == 256
    vocabulary = {letters[byte]: byte for byte in range(256)} | {letters[32] + "word": 256}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    names = TokenNames(Text(tmp_path))
    assert names.of(ord("a")) == ("a", b"a")
    assert names.of(256) == (" word", b" word")
    assert names.of(0xC3) == ("\ufffd", b"\xc3")
    assert names.of(257) == ("<|end|>", b"<|end|>")
    assert TokenNames(PLAIN).of(300) == (" w300", b" w300")
    assert TokenNames(PLAIN).of(0xFF) == ("\ufffd", b"\xff")
    assert TokenNames(None).of(7) == ("token_id:7", b"token_id:7")
