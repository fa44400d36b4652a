"""Text without a tokenizer, for an emulated engine: a prompt token is a byte, an answer token is a word.

    ids   0 .... 255 | 256 | 257 ......... vocabulary
         a byte of   | end | words of answers: " w257"
         UTF-8 each

A prompt has about four times as many tokens as with a real tokenizer, which `--tokenizer DIR` provides where that
matters.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lockstep.host.text import TEMPLATE_CHARACTERS, TEMPLATE_S, Message

BYTES = 256
END = 256
FIRST_WORD = 257
END_TEXT = "<|end|>"  # of the end token, where special tokens are decoded


class Texts(Protocol):
    """The tokenizer interface that the server uses: `lockstep.host.text.Text` or `PlainText`."""

    chat_template: str | None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, with `special` including the tokens that the tokenizer adds to every text."""

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts in one prompt, at most `most`, and the type of each token."""

    def characters_max(self) -> int:
        """Return the largest number of characters of one token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""

    def verbatim(self) -> Texts:
        """Return a view that decodes all special tokens."""

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Return a decoder of the tokens after a prompt. It returns the text that each token completes, often ""."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        now: Callable[[], time.struct_time] = time.localtime,
        seconds: float = TEMPLATE_S,
        characters_max: int = TEMPLATE_CHARACTERS,
        **more: Any,
    ) -> str:
        """Render a conversation by the chat template. Raises ConfigError if there is no template, or it fails."""


class PlainText:
    """A tokenizer that encodes text as UTF-8 bytes and decodes answers as numbered words."""

    chat_template: str | None = None

    def __init__(self, end: str = "") -> None:
        self._end = end  # text of the end token

    def verbatim(self) -> PlainText:
        """Return a tokenizer that decodes the end token, too."""
        return PlainText(END_TEXT)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return one token per byte of UTF-8. A code point that UTF-8 cannot encode, a lone surrogate, becomes "?"."""
        return list(text.encode("utf-8", "replace"))

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """Return the tokens of one text behind those of another; their types are 0 and 1."""
        ids, more = self.encode(first), self.encode(second)
        return [*ids, *more][:most], [*([0] * len(ids)), *([1] * len(more))][:most]

    def characters_max(self) -> int:
        """Return 1: a prompt token is a byte, and a character has one or more bytes."""
        return 1

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        step = self.stream(())
        return "".join(map(step, ids))

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Return a decoder of single tokens. It returns bytes once they form a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def step(token: int) -> str:
            if token < BYTES:
                return decoder.decode(bytes((token,)))
            return decoder.decode(b"", True) + (f" w{token}" if token != END else self._end)

        return step

    def chat(
        self,
        messages: Sequence[Message],
        *,
        now: Callable[[], time.struct_time] = time.localtime,
        seconds: float = TEMPLATE_S,
        characters_max: int = TEMPLATE_CHARACTERS,
        **more: Any,
    ) -> str:
        """Return each message after its role, then the role of the answer."""
        lines = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in messages)
        return lines + ("assistant:" if more.get("add_generation_prompt", True) else "")
