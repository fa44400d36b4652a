"""Names of single tokens in logprobs: their text, and their bytes, which the text may not contain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from lockstep.api.text.plain_text import BYTES, Texts
from lockstep.host.text import Text

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's character for a space
ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """Names of the tokens of a tokenizer; without a tokenizer, their numbers."""

    def __init__(self, text: Texts | None) -> None:
        self._text = text
        self._of_bytes = isinstance(text, Text) and "ByteLevel" in repr(text.tokenizer.decoder)
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token: int) -> tuple[str, bytes]:
        """Return text and bytes of a token."""
        known = self._known.get(token)
        if known is None:
            raw = self._bytes(token)
            known = self._known[token] = (raw.decode("utf-8", "replace"), raw)
        return known

    def _bytes(self, token: int) -> bytes:
        if self._text is None:
            return f"token_id:{token}".encode()
        if not isinstance(self._text, Text):
            return bytes((token,)) if token < BYTES else self._text.decode([token]).encode()
        written: str = self._text.tokenizer.id_to_token(token) or ""
        if self._of_bytes and all(letter in bytes_by_letter() for letter in written):
            return bytes(bytes_by_letter()[letter] for letter in written)
        if (byte := ONE_BYTE.fullmatch(written)) is not None:
            return bytes((int(byte[1], 16),))
        return written.replace(SPACE, " ").encode()


@cache
def bytes_by_letter() -> Mapping[str, int]:
    """Return the byte of each letter in a byte-level vocabulary.

    The letter of a printable byte is its own character. The letters of the other bytes, in order, are the code points
    from 256 on. Source: GPT-2's encoder.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
