"""Encoders of transformers: models whose tokens attend in both directions, and models with a head of labels.

    prompts of a pass ──groups of similar length, padded──> the library's model ──> hidden states by token
                                                                                └─> logits of labels by prompt

A prompt is computed whole, in one pass, so no KV is kept: the model has no layers with KV, and its pages take no
memory. The scheduler counts them all the same, as the tokens that one pass may have.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from lockstep.core.contract.errors import ConfigError
from lockstep.host.quantization import FIELD
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.checkpoint import TensorSpec
from lockstep.runtime.forward import ForwardBatch, Int32s
from lockstep.runtime.from_transformers.settings import NOT_OF_THE_MODEL
from lockstep.runtime.from_transformers.split import Plan
from lockstep.runtime.from_transformers.tensors import CheckpointNames, Held
from lockstep.runtime.lora.slots import LoraTarget
from lockstep.runtime.models.config_reader import ConfigReader
from lockstep.runtime.models.language_model import LanguageModel
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.settings import ModelSettings

Activation = Literal["sigmoid", "softmax", "identity"]
ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
"""What turns logits of labels into scores, by the last part of its name in a config.json."""
PADDING_MAX = 0.25
"""Share of padding in the shortest prompt of a group: shorter prompts are in another group."""
OTHER_HEADS = (
    "cls.",
    "lm_head.",
    "classifier.",
    "head.",
    "decoder.",
    "predictions.",
    "vocab_",
    "discriminator_",
    "pooler.",
)
"""Beginnings of tensors that a checkpoint may have beside those of a model that returns hidden states."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether transformers has a config's model as one that classifies, or that attends in both directions."""
    return _class_of(config) is not None


def _class_of(config: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the library's class of configs and of the model; None if the model is a decoder, or unknown."""
    names, model_type = config.get("architectures") or [""], config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING or not isinstance(names, list):
        return None
    config_class: Any = CONFIG_MAPPING[model_type]

    def named(mapping: Any) -> Any:
        kind = mapping.get(config_class, None)
        return kind if isinstance(kind, type) and kind.__name__ == names[0] else None

    if (kind := named(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)) is not None:
        return config_class, kind
    masked = MODEL_FOR_MASKED_LM_MAPPING.get(config_class, None)
    if masked is None or config.get("is_decoder") or config.get("is_encoder_decoder"):
        return None
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if causal is not None and causal.__name__ == names[0]:
        return None
    base = MODEL_MAPPING.get(config_class, None)
    if base is None or (named(MODEL_FOR_MASKED_LM_MAPPING) is None and named(MODEL_MAPPING) is None):
        return None
    return config_class, base


# mechanism: whole-prompts (executed)
class TransformersEncoder(LanguageModel):
    """An encoder of transformers, on one rank.

    Raises: ConfigError, from the constructor, for a model that cannot run here.
    """

    layers, heads, kv_heads, head_dim, scale = 0, 1, 1, 1, 1.0
    whole_prompts = True
    uncapturable_because = "prompts are computed whole"

    def __init__(self, config: Mapping[str, Any], make: Maker) -> None:
        found = _class_of(config)
        assert found is not None, "not an encoder"
        config_class, kind = found
        if make.parallel.ranks > 1 or make.parallel.stage.count > 1:
            raise ConfigError(f"`tp` and `pp` must be 1 for {kind.__name__}, which computes prompts whole\nhint: dp")
        if (stored := config.get(FIELD)) is not None:
            method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
            raise ConfigError(f"`{FIELD}`: weights quantised by `{method}` are not read for {kind.__name__}")
        plain = {key: value for key, value in config.items() if key != "auto_map"}
        try:
            made_config = config_class.from_dict(config_class._decode_special_floats(plain))
            made_config.torchscript = False
            with make.device, torch.no_grad():
                library = kind._from_config(made_config, dtype=make.dtype).eval()
            settings = _settings(library, config)
        except ConfigError:
            raise
        except Exception as error:  # the library's own checks, of many types
            why = " ".join(str(error).split())[:300]
            raise ConfigError(f"{kind.__name__} cannot run by transformers' code here: {why}") from error
        if not hasattr(library, "classifier") and kind not in _classifying():
            library.pooler = None  # hidden states are pooled by the settings of the folder
        super().__init__(make, settings)
        self.library, self.base = library, library.base_model
        accepted = inspect.signature(inspect.unwrap(library.forward)).parameters
        self._takes_types = "token_type_ids" in accepted and bool(self.settings.token_types)
        self._states: Tensor | None = None  # of the base model, in the newest call
        self.base.register_forward_hook(self._keep)
        plan = Plan(library, 1)
        held = [
            Held(name, tensor.data, tuple(tensor.shape), plan.part(name, tensor))
            for name, tensor in library.state_dict(keep_vars=True).items()
        ]
        self.names = CheckpointNames(library, held, 0, 1)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._states = output[0]

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the hidden states of the last layer, [tokens, hidden]; `batch.scores` gets the logits of labels.

        Raises: ConfigError for a prompt that is not whole.
        """
        lengths = batch.lengths_host
        if batch.starts_host.any():
            raise ConfigError(
                f"{self.settings.architecture} computes prompts whole, and a part of one is to be computed"
            )
        ids = batch.token_ids.split(lengths.tolist())
        types = None if batch.token_types is None else batch.token_types.split(lengths.tolist())
        hidden: list[Tensor] = [batch.token_ids.new_empty(0)] * len(lengths)
        scores: list[Tensor] = list(hidden)
        padding = getattr(self.library.config, "pad_token_id", None)
        for group in groups(lengths, at_once=padding is not None):
            padded = nn.utils.rnn.pad_sequence([ids[row] for row in group], True, float(padding or 0))
            given: dict[str, Any] = {"input_ids": padded}
            at = torch.arange(padded.shape[1], device=padded.device)
            counts = torch.as_tensor(lengths[group], device=padded.device)
            given["attention_mask"] = (at < counts[:, None]).to(torch.int64)
            if self._takes_types and types is not None:
                given["token_type_ids"] = nn.utils.rnn.pad_sequence([types[row] for row in group], True)
            out = self.library(**given)
            assert self._states is not None
            for place, row in enumerate(group):
                hidden[row] = self._states[place, : lengths[row]]
                if self.settings.labels:
                    scores[row] = out.logits[place]
            self._states = None
        if self.settings.labels and scores:
            batch.scores = torch.stack(scores).float()
        if not hidden:
            return torch.empty(0, self.settings.hidden, dtype=self.dtype, device=self.device)
        return torch.cat(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return no logits: the model predicts no tokens. Raises ConfigError for any sample."""
        if len(hidden):
            raise ConfigError(f"{self.settings.architecture} has no logits of tokens")
        return hidden.new_empty((0, self.settings.vocab), dtype=torch.float32)

    def _adapted(self, slots: int, rank: int) -> Iterator[LoraTarget]:
        """Raise: no adapter fits."""
        raise ConfigError(
            f"`max_loras` is {slots}, but {self.settings.architecture} takes no adapters\nhint: leave it out"
        )

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the model."""
        return self.names.specs()

    def named_as(self, stored: Collection[str], wanted: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return what `tensors` yielded, under the names by which a source stores the tensors."""
        return self.names.named_as(stored, wanted)

    def surplus(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although it is not read, because it follows from others."""
        if name.endswith(("position_ids", "token_type_ids")) or self.names.surplus(name):
            return True
        inside = name.removeprefix(f"{self.base.base_model_prefix}.")
        return not self.settings.labels and inside.startswith(OTHER_HEADS)


def groups(lengths: Int32s, *, at_once: bool = True) -> Iterator[list[int]]:
    """Yield the rows that are padded to one length together, longest first.

    Args:
        lengths: int32 [rows], tokens of each.
        at_once: rows may be padded; otherwise each is alone.
    """
    group: list[int] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        if group and (not at_once or lengths[row] < (1 - PADDING_MAX) * lengths[group[0]]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _classifying() -> tuple[Any, ...]:
    return tuple(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.values())


def _settings(library: Any, config: Mapping[str, Any]) -> ModelSettings:
    made, read = library.config.get_text_config(), ConfigReader(config)
    dtype = read.dtype()
    read.check()
    labels = (
        tuple(made.id2label[number] for number in range(made.num_labels)) if type(library) in _classifying() else ()
    )
    context = getattr(made, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ConfigError(f"config.json of {type(library).__name__} has no `max_position_embeddings`")
    positions = getattr(getattr(library.base_model, "embeddings", None), "position_embeddings", None)
    if (padding := getattr(positions, "padding_idx", None)) is not None:
        context -= padding + 1  # positions of these models begin behind it
    fields = {key: value for key, value in library.config.to_dict().items() if key not in NOT_OF_THE_MODEL}
    heads = made.num_attention_heads
    return ModelSettings(
        architecture=type(library).__name__,
        vocab=made.vocab_size,
        hidden=made.hidden_size,
        intermediate=getattr(made, "intermediate_size", None) or 4 * made.hidden_size,
        layers=made.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(made, "num_key_value_heads", None) or heads,
        head_dim=made.hidden_size // heads,
        context_tokens=context,
        generates=False,
        dtype=dtype,
        backend="transformers",
        labels=labels,
        activation=_activation(config, len(labels)),
        token_types=getattr(made, "type_vocab_size", None) or 0,
        described=tuple((key, json.dumps(fields[key], sort_keys=True, default=str)) for key in sorted(fields)),
    )


def _activation(config: Mapping[str, Any], labels: int) -> Activation:
    """Return what turns logits of labels into scores: that of sentence-transformers, or that of the kind of problem."""
    of_trainer = config.get("sentence_transformers")
    named = of_trainer.get("activation_fn") if isinstance(of_trainer, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        for suffix, kind in ACTIVATIONS.items():
            if named.endswith(suffix):
                return kind
        raise ConfigError(f"`activation_fn` of config.json is {named}; supported are Sigmoid, Softmax and Identity")
    of_problem: dict[str, Activation] = {"regression": "identity", "multi_label_classification": "sigmoid"}
    return of_problem.get(str(config.get("problem_type")), "sigmoid" if labels == 1 else "softmax")
