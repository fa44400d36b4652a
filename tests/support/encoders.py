"""Folders of small encoders with random weights and a tokenizer, and pairs of texts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = "the a cat dog sat on mat quick brown fox jumps over lazy and then some more words for test".split()
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "num_labels": 1,
    "pad_token_id": 0,
}
ENDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
DISTIL = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 130}
RELATIVE = {"type_vocab_size": 2, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertForSequenceClassification", SIZES),
    "XLMRoberta": ("XLMRobertaForSequenceClassification", SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "ModernBert": ("ModernBertForSequenceClassification", SIZES | ENDS | {"local_attention": 16}),
    "DistilBert": ("DistilBertForSequenceClassification", DISTIL | {"num_labels": 3}),
    "Electra": ("ElectraForSequenceClassification", SIZES | {"embedding_size": 32}),
    "DebertaV2": ("DebertaV2ForSequenceClassification", SIZES | RELATIVE),
    "Qwen3": ("Qwen3ForSequenceClassification", SIZES | {"head_dim": 8, "num_key_value_heads": 2}),
}
"""Class of the library and fields of its config, by family. Qwen3 is a decoder that classifies."""
VECTORS = {"Bert": "BertModel", "ModernBert": "ModernBertForMaskedLM"}
"""Classes without labels."""


def tokenizer() -> Any:
    """A tokenizer of whole words, with the marks and token types of BERT."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    numbers = {token: number for number, token in enumerate([*marks, *WORDS])}
    made = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def save_encoder(folder: Path, family: str, *, labels: bool = True, **more: Any) -> Any:
    """Write a model with its tokenizer into a folder. Returns the library's model."""
    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**fields | more)
    torch.manual_seed(1)
    model = getattr(transformers, name if labels else VECTORS[family])(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def some_pairs(count: int = 20) -> list[tuple[str, str]]:
    """Pairs of texts, from 2 to 110 words."""
    rng = random.Random(3)
    return [
        (" ".join(rng.choices(WORDS, k=rng.randrange(1, 20))), " ".join(rng.choices(WORDS, k=rng.randrange(1, 90))))
        for _ in range(count)
    ]


def reference(model: Any, *texts: str) -> Any:
    """The library's output for a text or a pair, with types of tokens if the model reads them."""
    given = tokenizer()(*texts, return_tensors="pt", return_token_type_ids=True)
    if (getattr(model.config, "type_vocab_size", None) or 0) < 2:
        del given["token_type_ids"]
    with torch.no_grad():
        return model(**given)
