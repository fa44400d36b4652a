"""The base of every causal language model that the engine runs: our own decoders, and those of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.checkpoint import TensorSpec
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.lora.slots import LoraTarget
from lockstep.runtime.media import ContentEncoder
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.settings import ModelSettings
from lockstep.runtime.states.pool import StatePart

if TYPE_CHECKING:
    from lockstep.runtime.memory_saver import MemorySaver
    from lockstep.runtime.stages import StageLinks


class CountedExperts(Protocol):
    """The experts of one layer, whose tokens can be counted."""

    @property
    def experts(self) -> int:
        """The number of experts that tokens are routed to."""

    def count_into(self, count: Callable[[Tensor], None]) -> None:
        """Call `count` with the experts of the tokens of every pass from now on, int [tokens, k]."""


class LanguageModel(nn.Module, ABC):
    """A causal language model of one rank.

    Pool and attention backend need its `layers` (those that attend), `heads` and `kv_heads` (of this rank), `head_dim`,
    `scale`, the factor of scores before the softmax, and `rules`, the attention of each of these layers if it is more
    than that.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    shares_kv: bool = False  # values are the first numbers of keys, which are stored once
    rules: tuple[LayerRules, ...] = ()  # by layer; empty: every layer attends to all positions with `scale`
    states: tuple[StatePart, ...] = ()  # of layers that keep a state beside KV, or instead of it
    uncapturable_because: str = ""  # why its passes cannot be captured in CUDA graphs; empty: they can
    media_encoder: ContentEncoder | None = None  # of models that take media
    whole_prompts: bool = False  # prompts are computed in one pass each, without KV
    embedding_size: int = 0  # numbers of a given embedding; 0: the model takes tokens only
    embeds_apart: bool = False  # whether `forward` may begin with `ForwardBatch.embedded`, which `embed` returns
    first_layer: int = 0  # of those that this stage has
    tells_layers: bool = False  # whether `forward` fills `ForwardBatch.taps`
    activations: str = ""  # how rows are rounded before products with fp8 weights; empty: not at all

    def __init__(self, make: Maker, settings: ModelSettings) -> None:
        super().__init__()
        self.settings, self.parallel, self.dtype, self.device = settings, make.parallel, make.dtype, make.device
        self.stage = make.parallel.stage
        self.links: StageLinks | None = None  # to the other pipeline stages
        self.saver: MemorySaver | None = None  # of the memory of its weights and KV; None: it is torch's
        self.kv_scales: tuple[tuple[float, float], ...] | None = None  # of keys and values by layer, for KV in fp8
        self.adapter_slots, self.adapter_rank = 0, 0
        self.targets: tuple[LoraTarget, ...] = ()  # matrices that adapters may change

    def prepare(self) -> None:
        """Complete the model when its weights are in place. All ranks call this at the same time."""

    def expert_layers(self) -> Iterable[CountedExperts]:
        """Return the layers with experts here, in their order."""
        return ()

    @abstractmethod
    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the hidden states behind the last norm, [tokens, hidden].

        The backend must be planned for this batch. A pipeline stage before the last one returns what the next stage
        needs as `batch.hidden`, [2, tokens, hidden]: residual, and what the next norm adds to it.
        """

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the new tokens, those of media in their places, [tokens, embedding size]."""
        raise AssertionError(f"{self.settings.architecture} does not embed apart from its layers")

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [samples, vocab] of hidden states [samples, hidden] that `forward` returned.

        Raises: ConfigError for any sample, if the model has no output projection.
        """

    def take_adapters(self, slots: int, rank: int) -> None:
        """Allocate `slots` adapters of up to `rank`. Called once, before the first pass."""
        self.adapter_slots, self.adapter_rank = slots, rank
        with torch.no_grad():
            self.targets = tuple(self._adapted(slots, rank))

    @abstractmethod
    def _adapted(self, slots: int, rank: int) -> Iterator[LoraTarget]:
        """Allocate adapter slots, and yield the matrices that adapters may change."""

    @abstractmethod
    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the model."""

    @abstractmethod
    def surplus(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although it is not read, because it follows from others."""

    def named_as(self, stored: Collection[str], wanted: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return what `tensors` yielded, under the names by which a source stores the tensors.

        Embedding models are saved without `model.`.
        """
        prefix = "model." if "embed_tokens.weight" in stored else ""
        return [replace(want, name=want.name.removeprefix(prefix)) for want in wanted]

    def has_elsewhere(self, name: str) -> bool:
        """Return whether another pipeline stage has a tensor, by its name in a checkpoint, and this one does not."""
        settings = self.settings
        return self.stage.lacks(name, settings.layers, tied=settings.tied and settings.generates)

    @property
    def is_part(self) -> bool:
        """Whether other ranks or stages have parts of the model."""
        return self.parallel.ranks > 1 or self.stage.count > 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters on this rank."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
