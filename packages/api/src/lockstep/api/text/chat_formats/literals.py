"""Parses a JSON value or a Python literal piece by piece, and emits the part that is certain as JSON.

    input  | {"city": "Zü | rich", "days": 1 | 2, "sunny": tr | ue}        parsed character by character by ROWS, so
    output | {"city": "Zü | rich", "days": 1 | 2, "sunny":    | true}      the result does not depend on the cuts

Control characters inside a string, which models write and JSON forbids, are emitted as escapes. Any other invalid JSON
makes the value bad; no repair is tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEPTH_MAX = 64
SPACE = " \t\n\r"

DIGITS = "0123456789"
HEX = frozenset("0123456789abcdefABCDEF")

NUMBER_ROWS = {
    "minus": {"0": "zero", **dict.fromkeys(DIGITS[1:], "digits")},
    "zero": {".": "point", **dict.fromkeys("eE", "power")},
    "digits": {**dict.fromkeys(DIGITS, "digits"), ".": "point", **dict.fromkeys("eE", "power")},
    "point": dict.fromkeys(DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(DIGITS, "fraction"), **dict.fromkeys("eE", "power")},
    "power": {**dict.fromkeys("+-", "sign"), **dict.fromkeys(DIGITS, "exponent")},
    "sign": dict.fromkeys(DIGITS, "exponent"),
    "exponent": dict.fromkeys(DIGITS, "exponent"),
}
MORE_DIGITS, RUN_OF_DIGITS = frozenset(("digits", "fraction", "exponent")), re.compile("[0-9]+")
"""States that a digit does not change, and a run of digits, which is taken in one step."""

NUMBER_ENDS = frozenset(("zero", "digits", "fraction", "exponent"))
"""States in which a number may end. The character after it is then parsed as one behind a value."""

BEGIN = {"{": "first key", "[": "first item", "-": "minus", **NUMBER_ROWS["minus"]}
ROWS: dict[str, dict[str, str]] = {
    "value": BEGIN,
    "first item": {**BEGIN, "]": "close"},
    "first key": {"}": "close"},
    "next key": {},
    "colon": {":": "value"},
    "behind item": {",": "value", "]": "close"},
    "behind member": {",": "next key", "}": "close"},
    **NUMBER_ROWS,
}
"""State -> character -> next state. `Language` has the quotes and words, which differ between languages."""

SPACED = frozenset(("value", "first item", "first key", "next key", "colon", "behind item", "behind member"))
KEYS = frozenset(("first key", "next key"))
VALUES = frozenset(("value", "first item"))
IN_STRING = frozenset(("string", "escape"))
IN_VALUE = frozenset(("value", "word", *IN_STRING, *NUMBER_ROWS))
ESCAPED = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)} | {'"': '\\"', "\\": "\\\\"}


@dataclass(frozen=True)
class Language:
    """The notation of values.

    Args:
        quotes: characters that delimit strings.
        keywords: names of true, false and null -> their JSON.
        escapes: character after a backslash -> its JSON, or the number of hexadecimal digits that follow.
        unknown_escapes: whether the backslash of an unknown escape is kept as a backslash.
    """

    quotes: str
    keywords: Mapping[str, str]
    escapes: Mapping[str, str | int]
    unknown_escapes: bool = False


JSON = Language(
    quotes='"',
    keywords={word: word for word in ("true", "false", "null")},
    escapes={**{letter: "\\" + letter for letter in '"\\/bfnrt'}, "u": 4},
)
PYTHON = Language(
    quotes="'\"",
    keywords={"True": "true", "False": "false", "None": "null", **JSON.keywords},
    escapes={
        **{letter: "\\" + letter for letter in '"\\bfnrt'},
        "'": "'",
        "a": "\\u0007",
        "v": "\\u000b",
        "\n": "",
        "x": 2,
        "u": 4,
        "U": 8,
    },
    unknown_escapes=True,
)
PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f{'' if quote == chr(34) else chr(34)}]+") for quote in "'\""}
"""Characters of a string that are emitted unchanged."""


class Literal:
    """One value of a language, parsed piece by piece.

    `state` is "whole" after its end, and "bad" once it cannot be a value; `depth` counts open brackets; `in_key` is
    whether the current or last string is the name of a member. `pending` is text that was taken and is not emitted yet:
    the beginning of a word or of an escape.
    """

    def __init__(self, language: Language = JSON) -> None:
        self._language = language
        self.state = "value"
        self.pending = ""
        self._closers: list[str] = []  # closing brackets of the open ones
        self._quote = ""
        self.in_key = False

    @property
    def depth(self) -> int:
        return len(self._closers)

    def run(self, text: str, at: int) -> tuple[int, str]:
        """Take one token of the value from position `at` on, such as a run of digits. Returns its end and its JSON.

        No text is taken if the state becomes bad, or whole because the character at `at` ends a number.
        """
        letter = text[at]
        if self.state == "string":
            return self._string(text, at)
        if self.state == "escape":
            return self._escape(letter, at)
        if self.state == "word":
            return self._word(letter, at)
        if letter in SPACE and self.state in SPACED:
            stop = at + 1
            while stop < len(text) and text[stop] in SPACE:
                stop += 1
            return stop, text[at:stop]
        if self.state in MORE_DIGITS and letter in DIGITS:
            digits = RUN_OF_DIGITS.match(text, at)
            assert digits is not None
            return digits.end(), digits[0]
        return self._letter(letter, at)

    def end(self) -> str:
        """Handle the end of the text. Returns the state: whole, bad, or another one if the value is unfinished."""
        if self.state in NUMBER_ENDS and not self._closers:
            self.state = "whole"
        return self.state

    def _letter(self, letter: str, at: int) -> tuple[int, str]:
        if self.state in NUMBER_ENDS and letter not in ROWS[self.state]:
            self._value_over()
            return at, ""
        following = ROWS[self.state].get(letter, "bad") if self.state in ROWS else "bad"
        if self.state in VALUES or self.state in KEYS:
            if letter in self._language.quotes:
                self.in_key = self.state in KEYS
                self._quote, self.state = letter, "string"
                return at + 1, '"'
            if self.state in VALUES and any(word.startswith(letter) for word in self._language.keywords):
                self.state = "word"
                return self._word(letter, at)
        if following in ("first key", "first item"):
            self._closers.append("}" if letter == "{" else "]")
            if len(self._closers) > DEPTH_MAX:
                following = "bad"
        if following == "bad":
            self.state = "bad"
            return at, ""
        if following == "close":
            self._closers.pop()
            self._value_over()
        else:
            self.state = following
        return at + 1, letter

    def _value_over(self) -> None:
        if not self._closers:
            self.state = "whole"
        else:
            self.state = "behind member" if self._closers[-1] == "}" else "behind item"

    def _string(self, text: str, at: int) -> tuple[int, str]:
        plain = PLAIN[self._quote].match(text, at)
        if plain is not None:
            return plain.end(), plain[0]
        letter = text[at]
        if letter == self._quote:
            if self.in_key:
                self.state = "colon"
            else:
                self._value_over()
            return at + 1, '"'
        if letter == "\\":
            self.state, self.pending = "escape", letter
            return at + 1, ""
        return at + 1, ESCAPED[letter]

    def _escape(self, letter: str, at: int) -> tuple[int, str]:
        self.pending += letter
        meant = self._language.escapes.get(self.pending[1])
        if meant is None and self._language.unknown_escapes and letter not in DIGITS and letter >= " ":
            meant = "\\\\" + letter
        if isinstance(meant, int):
            digits = self.pending[2:]
            if not HEX.issuperset(digits):
                meant = None
            elif len(digits) < meant:
                return at + 1, ""
            elif meant == 8:
                meant = json.dumps(chr(int(digits, 16)))[1:-1] if int(digits, 16) < 0x110000 else None
            else:
                meant = f"\\u{digits.rjust(4, '0')}"
        if meant is None:
            self.state, self.pending = "bad", self.pending[:-1]
            return at, ""
        self.state, self.pending = "string", ""
        return at + 1, meant

    def _word(self, letter: str, at: int) -> tuple[int, str]:
        known = self._language.keywords.get(self.pending + letter)
        if known is not None:
            self.pending = ""
            self._value_over()
            return at + 1, known
        if not any(word.startswith(self.pending + letter) for word in self._language.keywords):
            self.state = "bad"
            return at, ""
        self.pending += letter
        return at + 1, ""


def as_json(text: str, language: Language = JSON) -> str | None:
    """Return a whole text as one value in JSON; None if it is not exactly one value."""
    literal, at, emitted = Literal(language), 0, []
    while at < len(text) and literal.state not in ("whole", "bad"):
        at, piece = literal.run(text, at)
        emitted.append(piece)
    return "".join(emitted) if literal.end() == "whole" and not text[at:].strip(SPACE) else None


class Members:
    """A JSON object, parsed piece by piece, with its members emitted one after the other.

    After each `run`, `piece` is new JSON of the value of `key`, and `over` whether that value ended with it.
    """

    def __init__(self) -> None:
        self.literal = Literal()
        self.key = ""
        self.piece = ""
        self.over = False
        self._key_text: list[str] = []

    def run(self, text: str, at: int) -> int:
        """Take one token of the object from `at` on, and return its end. Another value sets `literal.state` to bad."""
        literal = self.literal
        before, depth, in_key = literal.state, literal.depth, literal.in_key
        self.piece, self.over = "", False
        if depth == 0 and text[at] != "{" and text[at] not in SPACE:
            literal.state = "bad"
            return at
        stop, emitted = literal.run(text, at)
        if depth == 1 and (before in KEYS or (in_key and before in IN_STRING)):
            if before in KEYS and literal.state == "string":
                self._key_text = []
            self._key_text.append(emitted)
            if literal.state == "colon":
                self.key = json.loads("".join(self._key_text))
        elif depth > 1 or (depth == 1 and before in IN_VALUE):
            self.piece = "" if literal.state == "value" and depth == 1 else emitted
            self.over = literal.depth == 1 and literal.state == "behind member"
        return stop
