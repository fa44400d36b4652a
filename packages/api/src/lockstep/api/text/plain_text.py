"""Text without a tokenizer, for an emulated engine: a prompt token is a byte, an answer token is a word.

    ids   0 .... 255 | 256 | 257 ......... vocabulary
         a byte of   | end | words of answers: " w257"
         UTF-8 each

A prompt has about four times the tokens that a real tokenizer would give it; use one (`--tokenizer DIR`) where that
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


class Texts(Protocol):
    """The tokenizer interface that the server uses: `lockstep.host.text.Text` or `PlainText`."""

    chat_template: str | None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; with `special`, including the tokens that the tokenizer puts around every text."""

    def characters_max(self) -> int:
        """The largest number of characters that one token can stand for."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """A decoder of the tokens after a prompt: returns the text that each token completes, often ""."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        now: Callable[[], time.struct_time] = time.localtime,
        seconds: float = TEMPLATE_S,
        characters_max: int = TEMPLATE_CHARACTERS,
        **more: Any,
    ) -> str:
        """A conversation as the model's template writes it. Raises ConfigError if there is no template, or it fails."""


class PlainText:
    """Encodes text as UTF-8 bytes; decodes answers as numbered words."""

    chat_template: str | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """One token per byte of UTF-8; a code point that is not valid Unicode text, such as a lone surrogate, is
        replaced.
        """
        return list(text.encode("utf-8", "replace"))

    def characters_max(self) -> int:
        """1: a prompt token is a byte, and a character has one or more bytes."""
        return 1

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without the end token."""
        step = self.stream(())
        return "".join(map(step, ids))

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """A decoder token by token: bytes are returned once they form a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def step(token: int) -> str:
            if token < BYTES:
                return decoder.decode(bytes((token,)))
            return decoder.decode(b"", True) + (f" w{token}" if token != END else "")

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
        """Each message after its role, then the role of the answer."""
        lines = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in messages)
        return lines + ("assistant:" if more.get("add_generation_prompt", True) else "")
