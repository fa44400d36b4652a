"""xgrammar as a `grammars.GrammarBackend`: grammars compile in tens of milliseconds; its masks are the fastest.

It needs torch and transformers. It ignores keywords of JSON Schema that it does not support, so an answer may not
validate against a schema with such keywords. llguidance refuses such schemas and is the default.

Source of the interface: xgrammar.mlc.ai/docs, version 0.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Grammar
from lockstep.host.batches import Int32s
from lockstep.host.grammars import FORCED_MAX, GrammarError, short


class XGrammar:
    """The library with one tokenizer. The arguments are those of `grammar_backends.make_backend`."""

    name = "xgrammar"

    def __init__(self, tokenizer: Path, vocabulary: int, end_tokens: Sequence[int]) -> None:
        import torch  # local, because the rest of the package must run without torch
        import xgrammar

        self._new, self._tensor = xgrammar.GrammarMatcher, torch.from_numpy
        text = tokenizer.read_text("utf-8")
        known = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
        words = [b""] * max(vocabulary, 1 + max(known.values()))
        for word, token in known.items():
            words[token] = word.encode("utf-8")
        try:
            kind = xgrammar.TokenizerInfo._detect_metadata_from_hf(text)
            info = xgrammar.TokenizerInfo(
                words[:vocabulary],
                xgrammar.VocabType(kind["vocab_type"]),
                vocab_size=vocabulary,
                stop_token_ids=list(end_tokens),
                add_prefix_space=kind["add_prefix_space"],
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        except Exception as error:  # the library documents no error classes
            raise ConfigError(f"`{tokenizer}` cannot be used for grammars by xgrammar: {error}") from error
        ends = np.zeros(32 * -(-vocabulary // 32), np.bool_)
        ends[list(end_tokens)] = True
        self._ends = np.packbits(ends, bitorder="little").view(np.int32)

    def compile(self, grammar: Grammar) -> XCompiled:
        """Compile a grammar. Raises GrammarError."""
        try:
            return XCompiled(self, self._compile(grammar))
        except Exception as error:  # the library documents no error classes
            raise GrammarError(short(str(error)) or "it is not a grammar") from error

    def matcher(self, compiled: Any) -> XMatcher:
        """Return a new matcher at the start of a compiled grammar."""
        return XMatcher(self._new(compiled), self._ends, self._tensor)

    def _compile(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case "json_schema":
                schema = json.loads(grammar.source)
                if not isinstance(schema, dict):
                    raise GrammarError("the schema must be an object")
                return self._compiler.compile_json_schema(grammar.source, any_whitespace=True, max_whitespace_cnt=20)
            case "regex":
                return self._compiler.compile_regex(grammar.source)
            case "ebnf":
                return self._compiler.compile_grammar(grammar.source)
            case "structural_tag":
                return self._compiler.compile_structural_tag(json.dumps(_tag_format(json.loads(grammar.source))))


def _tag_format(tag: dict[str, Any]) -> dict[str, Any]:
    """Return a structural tag in the form of this library."""
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    tags_format = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    tags_format |= {name: bool(tag.get(name)) for name in ("at_least_one", "stop_after_first")}
    return {"type": "structural_tag", "format": tags_format}


class XCompiled:
    """A compiled grammar."""

    def __init__(self, backend: XGrammar, compiled: Any) -> None:
        self._backend, self._compiled = backend, compiled

    def matcher(self) -> XMatcher:
        """Return a new matcher at the start of the grammar."""
        return self._backend.matcher(self._compiled)


class XMatcher:
    """The position of one answer in its grammar. The library ends a matcher at an end token, which it never gets."""

    def __init__(self, matcher: Any, ends: Int32s, tensor: Any) -> None:
        self._matcher, self._ends, self._tensor = matcher, ends, tensor

    def accept(self, token: int) -> bool:
        """Move by a token. Returns False, without a move, if the grammar does not admit it."""
        return bool(self._matcher.accept_token(token))

    def rollback(self, tokens: int) -> None:
        """Undo the moves by the last `tokens` tokens."""
        self._matcher.rollback(tokens)

    def fill(self, mask: Int32s) -> None:
        """Write the mask of the tokens that may come next. The library writes no mask if every token may."""
        if not self._matcher.fill_next_token_bitmask(self._tensor(mask[None])):
            mask[:] = -1

    def is_done(self) -> bool:
        """Whether only the end may follow."""
        mask = np.empty_like(self._ends)
        self.fill(mask)
        return not (mask & ~self._ends).any()

    def forced(self) -> list[int]:
        """Return the forced tokens, found mask by mask: the library returns forced text at once, but not its tokens."""
        found: list[int] = []
        mask = np.empty_like(self._ends)
        while len(found) < FORCED_MAX:
            self.fill(mask)
            places = mask.nonzero()[0]
            if len(places) != 1 or (bits := int(mask[places[0]]) & 0xFFFFFFFF) & (bits - 1):
                break
            token = 32 * int(places[0]) + bits.bit_length() - 1
            if not self.accept(token):
                break
            found.append(token)
        self.rollback(len(found))
        return found
