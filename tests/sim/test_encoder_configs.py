"""Configs of encoders and of models with a head of labels: parameters equal those that transformers allocates.

The models are built on the meta device, which allocates nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.sim.catalogue import load_model
from lockstep.sim.cost.errors import CatalogueError
from lockstep.sim.cost.families import model_from_config
from lockstep.sim.cost.whole_prompts import ENCODERS

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
FLAGS = {"norm_bias": True, "mlp_bias": True, "attention_bias": True, "classifier_bias": True}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert-large": ("Bert", LARGE),
    "camembert": ("Camembert", {}),
    "distilbert": ("DistilBert", {"n_layers": 4, "hidden_dim": 1000}),
    "electra-small": ("Electra", {}),
    "electra-base": ("Electra", {"hidden_size": 768, "embedding_size": 768, "intermediate_size": 3072}),
    "modernbert": ("ModernBert", {}),
    "modernbert-biases": ("ModernBert", FLAGS),
    "roberta": ("Roberta", {"type_vocab_size": 1, "max_position_embeddings": 514}),
    "xlm-roberta": ("XLMRoberta", {"vocab_size": 250002, "num_labels": 5}),
}
"""Class names begin with the first, configs have the fields of the second."""

DECODERS = {"Qwen3": {"num_hidden_layers": 4}, "Llama": {"num_hidden_layers": 2}, "Gemma2": {"num_hidden_layers": 2}}


def built(family: str, kind: str, fields: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the config of a class of transformers, and its model on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**fields)
    config.architectures = [f"{family}{kind}"]
    with torch.device("meta"):
        model = getattr(transformers, f"{family}{kind}")(config)
    return config.to_dict(), model


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_an_encoder_are_those_of_transformers(name: str, kind: str) -> None:
    config, library = built(CONFIGS[name][0], kind, CONFIGS[name][1])
    found = model_from_config(config, name, name)
    assert found.params == sum(weights.numel() for weights in library.parameters())
    assert found.kv_bytes_per_token() == 0
    assert found.whole is not None
    assert found.whole.labels == (0 if kind == "Model" else library.config.num_labels)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_with_a_head_of_labels_has_no_logits(family: str) -> None:
    config, library = built(family, "ForSequenceClassification", {"num_labels": 3, **DECODERS[family]})
    found = model_from_config(config, family, family)
    assert found.params == sum(weights.numel() for weights in library.parameters())
    assert found.whole is not None
    assert not found.whole.bidirectional
    assert found.whole.labels == 3


def test_the_context_begins_behind_the_padding_token() -> None:
    assert load_model("bge-reranker-v2-m3").context_tokens_max == 8192
    config, _ = built("Bert", "Model", {})
    assert model_from_config(config, "bert", "bert").context_tokens_max == 512


def test_the_encoders_of_the_catalogue_have_their_published_parameters() -> None:
    found = {name: load_model(name).params for name in ("bge-m3", "bge-reranker-v2-m3")}
    assert found == {"bge-m3": 567_754_752, "bge-reranker-v2-m3": 567_755_777}


def test_all_families_are_compared() -> None:
    assert {name.rpartition("-")[0] or name for name in CONFIGS} >= {"bert", "electra", "modernbert"}
    assert set(ENCODERS) <= set(CONFIGS) | {"electra"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "`architectures` BertForTokenClassification is not"),
        ({"architectures": "BertModel"}, "`architectures` must be a list"),
        ({"is_decoder": True}, "`is_decoder` true is not modelled for `bert`"),
        ({"position_embedding_type": "relative_key"}, "`position_embedding_type` relative_key is not modelled"),
        ({"num_attention_heads": 7}, "`num_attention_heads` must be a divisor of `hidden_size` 96"),
        ({"model_type": "roberta", "max_position_embeddings": 2}, "`max_position_embeddings` must be more than"),
        ({"model_type": "deberta-v2"}, "`model_type` `deberta-v2` is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    small = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    assert model_from_config(small, "small", "small").params > 0
    with pytest.raises(CatalogueError, match=why):
        model_from_config(small | changes, "small", "small")
