"""xgrammar behind `grammars.GrammarBackend`: compiles for tens of milliseconds, then makes masks the fastest.

It needs torch and transformers, and passes over keywords of JSON Schema that it does not know, so an answer may not
validate against a schema that has such: llguidance refuses them, and is the default.

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
    """The library with one tokenizer; arguments as of `grammar_backends.make_backend`."""

    name = "xgrammar"

    def __init__(self, tokenizer: Path, vocabulary: int, end_tokens: Sequence[int]) -> None:
        import torch  # here and not above: nothing else in the host imports torch
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
        except Exception as error:  # of whatever kind the library raises
            raise ConfigError(f"`{tokenizer}` cannot be used for grammars by xgrammar: {error}") from error
        ends = np.zeros(32 * -(-vocabulary // 32), np.bool_)
        ends[list(end_tokens)] = True
        self._ends = np.packbits(ends, bitorder="little").view(np.int32)

    def compile(self, grammar: Grammar) -> XCompiled:
        """Raises GrammarError."""
        try:
            return XCompiled(self, self._compile(grammar))
        except Exception as error:  # of whatever kind the library raises
            raise GrammarError(short(str(error)) or "it is no grammar") from error

    def matcher(self, compiled: Any) -> XMatcher:
        """A matcher of what was compiled, at its start."""
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
    """Tags as this library has them."""
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
    """A grammar that was compiled."""

    def __init__(self, backend: XGrammar, compiled: Any) -> None:
        self._backend, self._compiled = backend, compiled

    def matcher(self) -> XMatcher:
        """One at the start."""
        return self._backend.matcher(self._compiled)


class XMatcher:
    """How far one answer has got. The library goes on until it is given an end token, which never happens here."""

    def __init__(self, matcher: Any, ends: Int32s, tensor: Any) -> None:
        self._matcher, self._ends, self._tensor = matcher, ends, tensor

    def accept(self, token: int) -> bool:
        """Move by a token."""
        return bool(self._matcher.accept_token(token))

    def rollback(self, tokens: int) -> None:
        """Take tokens back."""
        self._matcher.rollback(tokens)

    def fill(self, mask: Int32s) -> None:
        """Write what may come next; the library writes nothing where every token may."""
        if not self._matcher.fill_next_token_bitmask(self._tensor(mask[None])):
            mask[:] = -1

    def is_done(self) -> bool:
        """Whether nothing may follow but the end."""
        mask = np.empty_like(self._ends)
        self.fill(mask)
        return not (mask & ~self._ends).any()

    def forced(self) -> list[int]:
        """What must follow, found mask by mask: forced text would be known at once, but not as which tokens."""
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
