"""The choice of a grammar library: llguidance or xgrammar, imported in `make_backend`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lockstep.core.contract.errors import ConfigError
from lockstep.host.grammars import GrammarBackend

BackendName = Literal["auto", "llguidance", "xgrammar", "none"]


def choose_backend(name: BackendName) -> str:
    """Return the library to use; "" for none. Raises ConfigError for a library that is not installed."""
    if name == "none":
        return ""
    if name == "auto":
        return "llguidance" if find_spec("llguidance") is not None else ""
    if find_spec(name) is None:
        raise ConfigError(f"`grammar_backend` {name} is not installed\nhint: pip install {name}, or auto")
    return name


def make_backend(name: str, tokenizer: Path, vocabulary: int, end_tokens: Sequence[int]) -> GrammarBackend:
    """Return a library for one tokenizer.

    Args:
        name: from `choose_backend`.
        tokenizer: path of a tokenizer.json.
        vocabulary: number of token ids in the model's logits.
        end_tokens: token ids that end an answer.
    Raises: ConfigError for a tokenizer that the library cannot use.
    """
    if name == "xgrammar":
        from lockstep.host.xgrammar_backend import XGrammar

        return XGrammar(tokenizer, vocabulary, end_tokens)
    from lockstep.host.llguidance_backend import LlGuidance

    return LlGuidance(tokenizer, vocabulary, end_tokens)
