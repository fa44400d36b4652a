"""A small tokenizer of bytes and a few words, in a folder like that of a model: chat template, special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

WORDS = (" the", " and", " is", "tool", "call", "name", "arguments", "city", " {", '": "', '"}')


def word_tokenizer(folder: Path, *, template: str = "", special: Sequence[str] = (), eos: str = "<eos>") -> Path:
    """Write the tokenizer. Returns the folder.

    Args:
        special: tokens that a tokenizer leaves out of text; `eos` is one of them, at the end if it is not named.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        ((written, _),) = byte_level.pre_tokenize_str(word)
        for stop in range(2, len(written) + 1):
            if written[:stop] not in vocabulary:
                vocabulary[written[:stop]] = len(vocabulary)
                merges.append((written[: stop - 1], written[stop - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in dict.fromkeys((*special, eos))])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if template:
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about), "utf-8")
    return folder
