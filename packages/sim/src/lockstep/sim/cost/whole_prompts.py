"""Models that compute each prompt whole, in one pass and without KV: encoders, and decoders with a head of labels.

    words ──tables──> embeddings ──layers──> states of all tokens ──pooling──> a vector
                                                        └─head, of one state──> logits of labels

They are read from a config.json by its `model_type` and its `architectures`, as the runtime does
(`runtime/from_transformers/encoder.py`): `...ForSequenceClassification` has a head of labels, the class of the states
or `...ForMaskedLM` gives vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lockstep.sim.cost.config_fields import ConfigFields
from lockstep.sim.cost.errors import CatalogueError

CLASSIFIES = "ForSequenceClassification"
OF_STATES = ("Model", "ForMaskedLM")  # the head of a masked language model is not computed
LABELS = 2  # of a config that names none: transformers' default


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePrompts:
    """What a model has that computes prompts whole. Without a head it gives vectors."""

    bidirectional: bool  # every token attends to all tokens of its prompt; False: to those before it
    embedding: int  # width of the tables of words and positions
    labels: int = 0
    head: tuple[tuple[int, int], ...] = ()  # inputs and outputs of the matrices that one state of a prompt passes
    pooler: int = 0  # parameters of a pooler that a checkpoint has, and vectors do not need
    beside: int = 0  # parameters of token types, of norms and biases of embeddings and head

    @property
    def head_params(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """Properties of an encoder that follow from its `model_type`."""

    types: bool = True  # a table of token types
    padding_first: bool = False  # positions begin behind the number of the padding token
    pooler: Literal["", "vectors", "always"] = ""  # vectors: a model with labels has a head instead
    dense_head: bool = True  # a dense layer before that of labels, besides a pooler
    narrow: bool = False  # tables may have a width of their own, `embedding_size`
    modern: bool = False  # rotary positions, gated feed-forward, biases by flags, sliding layers


ENCODERS = {
    "bert": EncoderFamily(pooler="always", dense_head=False),
    "camembert": EncoderFamily(pooler="vectors", padding_first=True),
    "distilbert": EncoderFamily(types=False),
    "electra": EncoderFamily(narrow=True),
    "modernbert": EncoderFamily(types=False, modern=True),
    "roberta": EncoderFamily(pooler="vectors", padding_first=True),
    "xlm-roberta": EncoderFamily(pooler="vectors", padding_first=True),
}
TYPES = {"bert": 2, "electra": 2, "roberta": 2, "xlm-roberta": 2, "camembert": 2}  # transformers' defaults
GLOBAL_EVERY = 3  # of ModernBERT: every third layer attends to all tokens, beginning with the first
LOCAL_TOKENS = 128


def labels_of(f: ConfigFields) -> int:
    """Return the number of labels of a config; 0 for a model without a head of labels.

    Raises: CatalogueError for an architecture with another head.
    """
    names = f.data.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise f.complain("architectures", "a list with the name of a class")
    if not names or not names[0].endswith(CLASSIFIES):
        return 0
    named = f.data.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    return f.whole("num_labels", LABELS)


def check_architecture(f: ConfigFields) -> None:
    """Raise CatalogueError for an encoder that is used as something else."""
    names = f.data.get("architectures") or [OF_STATES[0]]
    if not labels_of(f) and not str(names[0]).endswith(OF_STATES):
        raise CatalogueError(
            f"{f.where}: `architectures` {names[0]} is not modelled\n"
            f"hint: encoders are served as ...{CLASSIFIES} for labels, ...{' or ...'.join(OF_STATES)} for vectors"
        )
    for field in ("is_decoder", "is_encoder_decoder", "add_cross_attention"):
        if f.flag(field, False):
            raise CatalogueError(f"{f.where}: `{field}` true is not modelled for `{f.data.get('model_type')}`")
    if (kind := f.data.get("position_embedding_type")) not in (None, "absolute"):
        raise CatalogueError(f"{f.where}: `position_embedding_type` {kind} is not modelled\nhint: absolute is")


def encoder_fields(f: ConfigFields, family: EncoderFamily, model_type: str) -> dict[str, Any]:
    """Return the fields of a ModelSpec of an encoder that differ from those of a decoder with its sizes."""
    hidden, labels = f.whole("hidden_size"), labels_of(f)
    width = f.whole("embedding_size", hidden) if family.narrow else hidden
    norm = 1 if family.modern and not f.flag("norm_bias", False) else 2  # vectors of a norm
    types = f.whole("type_vocab_size", TYPES[model_type]) if family.types else 0
    rows = f.whole("max_position_embeddings")
    beside = types * width + (width - hidden) * norm  # the norm of embeddings counts as one of the layers' width
    beside += hidden if width != hidden else 0  # bias of the product that widens embeddings
    head: tuple[tuple[int, int], ...] = ()
    dense = family.dense_head or family.pooler == "always"
    if labels:
        head = ((hidden, hidden), (hidden, labels)) if dense else ((hidden, labels),)
        beside += labels
        if family.modern:
            beside += hidden * norm + (hidden if f.flag("classifier_bias", False) else 0)
        elif dense:
            beside += hidden
    context = rows - (f.whole("pad_token_id", 1, 0) + 1 if family.padding_first else 0)
    if context < 1:
        raise f.complain("max_position_embeddings", "more than the number of the padding token")
    return {
        "whole": WholePrompts(
            bidirectional=True,
            embedding=width,
            labels=labels,
            head=head,
            pooler=hidden * hidden + hidden if family.pooler and not labels else 0,
            beside=beside,
        ),
        "positions": 0 if family.modern else rows,
        "context_tokens_max": context,
    }


def decoder_labels(hidden: int, labels: int) -> WholePrompts:
    """Return what a decoder with a head of labels has: one matrix without a bias, of the last token."""
    return WholePrompts(bidirectional=False, embedding=hidden, labels=labels, head=((hidden, labels),))


def local_layers(f: ConfigFields, layers: int) -> tuple[int, int]:
    """Return the layers of a ModernBERT that attend within a window, and the tokens that a token sees there."""
    kinds = f.data.get("layer_types")
    if kinds is None:
        every = f.whole("global_attn_every_n_layers", GLOBAL_EVERY)
        local = sum(1 for layer in range(layers) if layer % every)
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise f.complain("layer_types", f"a list of {layers} kinds, one per layer")
    else:
        local = kinds.count("sliding_attention")
    return local, 2 * (f.whole("local_attention", LOCAL_TOKENS) // 2) + 1
