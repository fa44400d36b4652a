"""llguidance as a `grammars.GrammarBackend`: no dependencies, grammars compile in about a millisecond.

A schema is enforced exactly, or refused: keywords that llguidance does not support are an error ("lenient" is off).
Between tokens of JSON, one space or a new line with its indentation is admitted. Unlimited whitespace is not, because a
model might continue it without end.

Source of the interface: github.com/guidance-ai/llguidance, python/llguidance/_lib.pyi, version 1.9.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Grammar
from lockstep.host.batches import Int32s
from lockstep.host.grammars import GrammarError, short

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,20})?", "lenient": False}

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits of a matcher: about 100 MB, and by the library's own limits some tens of milliseconds for a mask."""

QUICK_S = 0.01  # CPU time of a compilation that the engine's thread may do


MESSAGES = {
    "NoExtensionBias": "no text matches it: it leaves out every character, or each of its rules leads back to itself",
    "too many expressions": "it needs too many states; use smaller repetitions, and do not nest them",
    "too many lexer states": "it needs too many states; use smaller repetitions, and do not nest them",
    "lexer fuel": "it takes too long to match; use smaller repetitions, and do not nest them",
}
"""Part of a message of the library -> the same for a client."""


def readable(message: str) -> str:
    """Return a message of the library as one line, for the client that sent the grammar."""
    return next((text for part, text in MESSAGES.items() if part in message), short(message.replace(VERBOSE, "")))


VERBOSE = "<non-verbose/>"
"""What the library writes in place of a description of its state."""


class LlGuidance:
    """The library with one tokenizer. The arguments are those of `grammar_backends.make_backend`."""

    name = "llguidance"

    def __init__(self, tokenizer: Path, vocabulary: int, end_tokens: Sequence[int]) -> None:
        text = tokenizer.read_text("utf-8")
        known = 1 + max((one["id"] for one in json.loads(text).get("added_tokens", [])), default=-1)
        try:
            self._tokenizer = llguidance.LLTokenizer(
                text, n_vocab=max(vocabulary, known), eos_token=list(end_tokens) or None
            )
        except Exception as error:  # the library documents no error classes
            raise ConfigError(f"`{tokenizer}` cannot be used for grammars by llguidance: {error}") from error
        self._words = -(
            -self._tokenizer.vocab_size // 32
        )  # int32 words of the library's masks: more than the logits need if its vocabulary is larger

    def compile(self, grammar: Grammar) -> LlCompiled:
        """Compile a grammar. Raises GrammarError."""
        try:
            source = self._source(grammar)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise GrammarError(short(str(error))) from error

        def make() -> Any:
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarError(readable(matcher.get_error()))
            return matcher

        return LlCompiled(self._words, make)

    def _source(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case "json_schema":
                return llguidance.LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_OPTIONS)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(grammar.source)
            case "ebnf":
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(grammar.source))
            case "structural_tag":
                return llguidance.LLMatcher.grammar_from_lark(self._tagged(json.loads(grammar.source)))

    def _tagged(self, tag: dict[str, Any]) -> str:
        """Return a grammar in Lark's form for free text with parts after triggers.

            start: (text_0 (part_0 | part_1) | text_1 part_2)* REST          text_n ends with trigger n

        With `at_least_one` an answer without a part cannot end. With `stop_after_first` it ends after its first part.
        """
        branches, rules = [], []
        for number, trigger in enumerate(tag["triggers"]):
            parts = []
            for i, one in enumerate(tag["structures"]):
                begin: str = one["begin"]
                if _trigger_of(begin, tag["triggers"]) != number:
                    continue
                rest = self._literal(begin.removeprefix(trigger))
                schema = {**one.get("schema", {}), "x-guidance": JSON_OPTIONS}
                rules.append(f"part_{i}: {rest} %json {json.dumps(schema)} {self._literal(one['end'])}".rstrip())
                parts.append(f"part_{i}")
            if parts:
                rules.append(self._until(number, trigger))
                branches.append(f"text_{number} ({' | '.join(parts)})")
        tagged = f"({' | '.join(branches)})"
        if tag.get("stop_after_first"):
            start = tagged if tag.get("at_least_one") else f"{tagged} | REST"
        else:
            start = f"{tagged}{'+' if tag.get('at_least_one') else '*'} REST"
        return "\n".join([f"start: {start}", r"REST: /(.|\n)*/", *rules, ""])

    def _until(self, number: int, trigger: str) -> str:
        """Return the rule of text up to the end of a trigger. If this is a special token, the rule has the token."""
        special = self._special(trigger)
        if special:
            return f"text_{number}: REST {special}"
        return f"text_{number}[lazy]: /(.|\\n)*/ {json.dumps(trigger)}"

    def _literal(self, text: str) -> str:
        """Return a text as part of a rule; "" for an empty text."""
        return (self._special(text) or json.dumps(text)) if text else ""

    def _special(self, text: str) -> str:
        """Return Lark's form of a special token if this text is one, else ""."""
        if not text.startswith("<"):
            return ""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0]) else ""


def _trigger_of(begin: str, triggers: Sequence[str]) -> int:
    """Return the number of the longest trigger that a part begins with. Raises ValueError if there is none."""
    found = [(len(trigger), -number) for number, trigger in enumerate(triggers) if begin.startswith(trigger)]
    if not found:
        raise ValueError(f"{begin!r} begins with no trigger")
    return -max(found)[1]


class LlCompiled:
    """A compiled grammar: a matcher at its start, which is copied for each row. For any thread.

    The library's copies share the states of one lexer, and a lexer that has reached a limit fails for all of them. Then
    the next matcher, and every matcher that meets the failure, gets a copy of another start with an empty lexer. One is
    compiled beforehand, because the caller may be the engine's thread.
    """

    def __init__(self, words: int, make: Callable[[], Any]) -> None:
        self._words, self._make = words, make
        self._lock = threading.Lock()
        began_s = time.thread_time()
        self._start = make()
        self._quick = time.thread_time() - began_s < QUICK_S
        self._spare: Any = make()

    def matcher(self) -> LlMatcher:
        """Return a new matcher at the start of the grammar."""
        return LlMatcher(self, self._words)

    def start(self, failed: Any = None) -> tuple[Any, bool]:
        """Return the start to copy, and whether it is new: other than `failed`, the lexer of which has reached a limit.

        Raises: GrammarError if another start is not compiled yet, and would take long.
        """
        with self._lock:
            if self._start is not failed:
                return self._start, False
            if self._spare is None and not self._quick:
                raise GrammarError("it needs too many states; use smaller repetitions, and do not nest them")
            self._start, self._spare = self._make() if self._spare is None else self._spare, None
        threading.Thread(target=self._prepare, name="lockstep-grammar-spare").start()
        return self._start, True

    def _prepare(self) -> None:
        made = self._make()
        with self._lock:
            self._spare = made


class LlMatcher:
    """The position of one answer in its grammar; implements `grammars.Matcher`."""

    def __init__(self, compiled: LlCompiled, words: int) -> None:
        self._compiled = compiled
        self._start, _ = compiled.start()
        self._matcher = self._start.deep_copy()
        self._taken = array("i")  # tokens since the start
        self._scratch = np.empty(words, np.int32)

    def accept(self, token: int) -> bool:
        """Move by a token. Returns False, without a move, if the grammar does not admit it."""
        accepted = bool(self._matcher.try_consume_tokens([token]))
        if not accepted and self._matcher.is_error():
            accepted = self._on_another_lexer(lambda: bool(self._matcher.try_consume_tokens([token])))
        if accepted:
            self._taken.append(token)
        return accepted

    def rollback(self, tokens: int) -> None:
        """Undo the moves by the last `tokens` tokens."""
        self._matcher.rollback(tokens)
        if tokens:
            del self._taken[-tokens:]

    def fill(self, mask: Int32s) -> None:
        """Write the mask of the tokens that may come next. Raises GrammarError at a limit of the library."""
        if not self._filled():
            message = self._matcher.get_error()
            if not self._on_another_lexer(self._filled):
                raise GrammarError(readable(message))
        mask[:] = self._scratch[: len(mask)]

    def is_done(self) -> bool:
        """Whether only the end may follow."""
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """Return the forced tokens. Masks of forced text admit only its canonical token, so these equal the masks'."""
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def _filled(self) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        return not self._matcher.is_error()

    def _on_another_lexer(self, attempt: Callable[[], bool]) -> bool:
        """Repeat what failed at a limit, on a lexer without states. Returns whether it succeeds there."""
        taken, new = self._taken.tolist(), False
        while not new:  # a start that another matcher requested may have failed meanwhile
            try:
                self._start, new = self._compiled.start(failed=self._start)
            except GrammarError:
                return False
            self._matcher = self._start.deep_copy()
            if self._matcher.try_consume_tokens(taken) == len(taken) and attempt():
                return True
        return False
