"""Settings of a model that transformers' code runs, and everything because of which that code cannot run here."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
)

from lockstep.core.contract.errors import ConfigError
from lockstep.host.media.thinker import thinker_of
from lockstep.host.quantization import FIELD
from lockstep.runtime.from_transformers.media_encoder import served_kinds
from lockstep.runtime.from_transformers.mixers import has_mixers
from lockstep.runtime.models.config_reader import ConfigReader
from lockstep.runtime.models.settings import ModelSettings

log = logging.getLogger("lockstep.runtime")

GENERATING = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
"""The library's classes with an output projection."""
KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that attend, and can run."""
OTHER_KINDS = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp")
"""Kinds of layers in models with states that can run: with a state, with a state and attention, or with neither."""

NOT_OF_THE_MODEL = frozenset(
    "architectures transformers_version torch_dtype dtype _name_or_path use_cache eos_token_id bos_token_id "
    "pad_token_id".split()
)
"""Fields of a config.json in which new weights may differ from the running model."""


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model of transformers that can run here: its config, its class, and its settings."""

    config: Any
    kind: type
    settings: ModelSettings


def read_library_model(config: Mapping[str, Any]) -> LibraryModel:
    """Return the model that a config.json describes. No code of a folder runs: the library must have the model.

    A model with media is read with them, or as its text if they cannot be served and the library has a class for it.
    Of a whole Qwen-Omni model it is the thinker.

    Raises: ConfigError with everything because of which it cannot run here.
    """
    config = thinker_of(config)
    read = ConfigReader(config)
    names = read.texts("architectures")
    read.check()
    name, model_type = names[0] if names else "", config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"`model_type` of config.json is `{model_type}`, which transformers {transformers.__version__} lacks\n"
            "hint: code in a model's folder is not run; a newer transformers may have the model"
        )
    config_class = CONFIG_MAPPING[model_type]
    plain = {key: value for key, value in config.items() if key not in ("auto_map", FIELD)}
    perceiving = _class_with_media(config_class, name)
    text = _class_of_text(config_class, name)
    kind = perceiving or text or _class_of(config_class, name)
    made, served, without, problems = None, tuple[str, ...](), list[str](), list[str]()
    try:
        made = config_class.from_dict(config_class._decode_special_floats(plain))
        if perceiving is not None:
            served, without = served_kinds(perceiving, MODEL_MAPPING.get(config_class, perceiving), made)
            if not served and text is not None:
                perceiving, kind = None, text
        problems += refusals_of_class(config_class, kind)
        inner = config.get("text_config")
        if perceiving is not None:
            problems += [] if served else without
            config = {**(inner if isinstance(inner, Mapping) else {}), **config}
        elif text is not None:
            made = made.get_text_config()
            config = {**(inner if isinstance(inner, Mapping) else {}), **config}
        problems += refusals(made if perceiving is None else made.get_text_config())
    except Exception as error:  # the library's own checks, of many types
        if not problems:
            why = " ".join(str(error).split())
            raise ConfigError(f"config.json is not one of transformers' `{model_type}`: {why}") from error
    if (stored := config.get(FIELD)) is not None:
        method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
        problems.append(f"`{FIELD}`: weights quantised by `{method}` are not read by this model backend")
    if problems:
        raise ConfigError("\n  ".join([f"{kind.__name__} cannot run by transformers' code here:", *problems]))
    why = "; ".join(without) if without else "pictures, sound and video are refused"
    if text is not None and perceiving is None:
        log.warning("%s: only its text is served; %s", name, why)
    elif without:
        log.info("%s: %s", name, why)
    settings = _settings(made, kind, config)
    if perceiving is not None:
        settings = replace(settings, media=served)
    if without:
        settings = replace(settings, media_refused=why)
    return LibraryModel(made, kind, settings)


def _class_with_media(config_class: Any, name: str) -> type | None:
    """Return the library's class of this name if it takes pictures or sound beside text."""
    kind: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(config_class, None)
    return kind if isinstance(kind, type) and kind.__name__ == name else None


def _class_of_text(config_class: Any, name: str) -> type | None:
    """Return the library's class for the text of a model with pictures, sound or video, which reads its folder, too.

    None if the model takes text only, or if the library has no such class.
    """
    of_text: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    inner = getattr(config_class, "sub_configs", None) or {}
    if not isinstance(of_text, type) or not name.endswith("ForConditionalGeneration"):
        return None
    return of_text if getattr(of_text, "config_class", None) in inner.values() else None


def _class_of(config_class: Any, name: str) -> type:
    """Return the library's class of this name. Raises ConfigError if it is none for this class of configs."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    known = [mapping[config_class] for mapping in mappings if config_class in mapping]
    for kind in known:
        if isinstance(kind, type) and kind.__name__ == name:
            return kind
    listed = ", ".join(kind.__name__ for kind in known if isinstance(kind, type)) or "none"
    raise ConfigError(
        f"`architectures` of config.json must begin with a decoder of `{config_class.model_type}` in transformers "
        f"{transformers.__version__} ({listed}), got `{name}`"
    )


def refusals_of_class(config_class: Any, kind: Any) -> Iterator[str]:
    """Yield why models of a class cannot run here, whatever their settings."""
    if kind._is_stateful and not has_mixers(kind):
        yield "its layers keep a state beside KV, in another way than by the library's cache"
    if not kind._can_set_attn_implementation():
        yield "its attention does not go through transformers' attention interface"
    if "position_ids" not in inspect.signature(MODEL_MAPPING.get(config_class, kind).forward).parameters:
        yield "its code takes no positions of tokens"


def refusals(config: Any) -> Iterator[str]:
    """Yield why a model cannot run here, as far as its config shows."""
    if config.get_text_config() is not config:
        yield "it takes more than text: pictures, sound or video"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "its layers attend to an encoder (cross attention)"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(KINDS + OTHER_KINDS))
    if others:
        strange = ", ".join(f"`{one}`" for one in others)
        yield f"`layer_types` holds {strange}; only {', '.join(KINDS + OTHER_KINDS)} run here"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        yield "its scores have biases by distance (ALiBi)"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "its tokens attend to later ones"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "`num_kv_shared_layers`: layers share the KV of others"
    for rope in _ropes(config):
        if rope.get("rope_type") == "dynamic":
            yield "`rope_type` dynamic: its frequencies would depend on the batch"


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings, of all kinds of layers."""
    given = getattr(config, "rope_parameters", None) or {}
    inner = [one for one in given.values() if isinstance(one, Mapping)]
    return inner or [given]


def _settings(described: Any, kind: type, config: Mapping[str, Any]) -> ModelSettings:
    read, made = ConfigReader(config), described.get_text_config()
    heads = made.num_attention_heads
    head_dim = getattr(made, "head_dim", None) or made.hidden_size // heads
    dtype, ends, vocab = read.dtype(), read.end_tokens(), made.vocab_size
    read.check()
    context = getattr(made, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ConfigError(f"config.json of {kind.__name__} has no `max_position_embeddings`, the longest context")
    for rope in _ropes(made):
        if rope.get("rope_type") == "longrope":  # beyond it, all frequencies change with the longest row of a batch
            original = rope.get("original_max_position_embeddings") or context
            if original < context:
                log.warning("`rope_type` longrope: the context is the original one, %d tokens of %d", original, context)
            context = min(context, original)
    known = tuple(token for token in ends if 0 <= token < vocab)
    if strange := [token for token in ends if token not in known]:
        log.warning("`eos_token_id` %s is passed over: the model has %d tokens", ", ".join(map(str, strange)), vocab)
    fields = {key: value for key, value in described.to_dict().items() if key not in NOT_OF_THE_MODEL}
    return ModelSettings(
        architecture=kind.__name__,
        vocab=vocab,
        hidden=made.hidden_size,
        intermediate=getattr(made, "intermediate_size", None) or 4 * made.hidden_size,
        layers=made.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(made, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        context_tokens=context,
        tied=bool(getattr(made, "tie_word_embeddings", False)),
        generates=kind in (mapping.get(type(described), None) for mapping in GENERATING),
        dtype=dtype,
        end_tokens=known,
        backend="transformers",
        described=tuple((key, json.dumps(fields[key], sort_keys=True, default=str)) for key in sorted(fields)),
    )
