"""Text without a tokenizer, for an emulated engine: a token of a prompt is a byte, a token of an answer is a word.

    ids   0 .... 255 | 256 | 257 ......... vocabulary
         a byte of   | end | words of answers: " w257"
         UTF-8 each

A prompt has about four times the tokens that a real tokenizer would give it; name one (`--tokenizer DIR`) where that
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
    """What the server needs of a tokenizer: `lockstep.host.text.Text`, or `PlainText`."""

    chat_template: str | None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; with `special`, what the tokenizer puts around every text as well."""

    def characters_max(self) -> int:
        """Of text, the most that one token of it can stand for."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text, without special tokens."""

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Decode token by token behind a prompt: a function that gives the text that a token completes, often ""."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        now: Callable[[], time.struct_time] = time.localtime,
        seconds: float = TEMPLATE_S,
        characters_max: int = TEMPLATE_CHARACTERS,
        **more: Any,
    ) -> str:
        """A conversation as the model's template writes it. Raises ConfigError if there is none, or it refuses."""


class PlainText:
    """Bytes in, numbered words out."""

    chat_template: str | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """A token for each byte of UTF-8; what is no Unicode text, such as half a surrogate, is replaced."""
        return list(text.encode("utf-8", "replace"))

    def characters_max(self) -> int:
        """A token of a prompt is a byte, a character one or more."""
        return 1

    def decode(self, ids: Sequence[int]) -> str:
        """Text, without the end."""
        step = self.stream(())
        return "".join(map(step, ids))

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Decode token by token: bytes are given out when they make up a character."""
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
        """Each message behind its role, then the role of the answer."""
        said = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in messages)
        return said + ("assistant:" if more.get("add_generation_prompt", True) else "")
