"""The part of a model that one rank has: the layers of its pipeline stage, and its share of experts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.core.cluster.stage_layers import layers_of_stages

LAYER = re.compile(r"(?:model\.)?layers\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Stage `number` of `count`. Layers are divided by `core/cluster/stage_layers.py`: evenly, if no stage drafts.

    Args:
        beside: work of the first stage for its drafts, in layers of the model; 0: it makes none, or n-grams.

    The first stage has the embedding, the last one the last norm and the output projection. If these two are one matrix
    (tied), both stages have it.
    """

    number: int = 0
    count: int = 1
    beside: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ValueError(f"`number` must be 0 to {self.count - 1}, got {self.number}")

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last norm and the output projection, and samples."""
        return self.number == self.count - 1

    def layers(self, layers: int) -> range:
        """Return the layers of this stage, of a model with `layers` layers."""
        divided = layers_of_stages(layers, self.count, self.beside, first=True)
        start = sum(divided[: self.number])
        return range(start, start + divided[self.number])

    def lacks(self, name: str, layers: int, *, tied: bool) -> bool:
        """Return whether another stage has a tensor of a checkpoint, by its name, and this one does not."""
        if (found := LAYER.match(name)) is not None:
            layer = int(found[1])
            return layer < layers and layer not in self.layers(layers)
        bare = name.removeprefix("model.")
        if bare == "embed_tokens.weight":
            return not (self.is_first or (tied and self.is_last))
        return bare in ("norm.weight", "lm_head.weight") and not self.is_last


WHOLE = StageLayers()


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """How ranks share experts: each has a part of every expert (`ep` 1), or whole experts (`ep` is the ranks).

    With `a2a` a token is sent to the ranks of its experts; otherwise a rank computes its experts for all tokens. With
    `moves` copies of experts move between ranks; `redundant` of their slots, on all ranks together, are beyond one for
    each expert.
    """

    ep: int = 1
    a2a: bool = False
    moves: bool = False
    redundant: int = 0


SPLIT_EXPERTS = ExpertSplit()
