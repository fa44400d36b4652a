"""Moves experts between the ranks of an engine, as the core orders: on every rank, behind the launched passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.core.contract.config import ExpertPlacing, SchedConfig
from lockstep.host.engine_options import RankOptions
from lockstep.runtime.errors import DeviceLost
from lockstep.runtime.models.experts import Experts
from lockstep.runtime.models.language_model import LanguageModel
from lockstep.runtime.overlap import StreamLane
from lockstep.runtime.rank_wire import MoveLayers

if TYPE_CHECKING:
    from lockstep.runtime.ranks import RankGroup

Int32s = NDArray[np.int32]

LOAD_INTERVAL = 100  # batches between two measurements, where no interval is given


def with_placing(settings: RankOptions, config: SchedConfig, model: LanguageModel) -> SchedConfig:
    """Return the settings of the scheduler with the placement of the model's experts."""
    layers = list(model.expert_layers())
    experts = layers[0].experts
    placing = ExpertPlacing(
        layers=len(layers),
        experts=experts,
        ranks=settings.ep,
        slots=experts + settings.redundant_experts,
        interval=settings.eplb_interval,
        imbalance_min=settings.eplb_imbalance_min,
    )
    interval = config.expert_load_interval
    if interval is msgspec.UNSET:
        interval = min(LOAD_INTERVAL, settings.eplb_interval)
    return msgspec.structs.replace(config, experts=placing, expert_load_interval=interval)


class RankExpertMover:
    """Moves the experts of one rank, together with those of the other ranks."""

    def __init__(self, model: LanguageModel, lane: StreamLane) -> None:
        self._model, self._lane = model, lane

    # mechanism: expert-moves (executed)
    def move(self, layers: Sequence[int], placement: Int32s) -> None:
        """Move the experts of layers, by number, to int32 [layers, slots]. Raises DeviceLost."""
        there = [one for one in self._model.expert_layers() if isinstance(one, Experts)]
        with self._lane.stream(), torch.inference_mode():
            for layer, row in zip(layers, placement, strict=True):
                there[layer].move(row)


class LeadExpertMover:
    """Moves the experts of all ranks."""

    def __init__(self, mover: RankExpertMover, group: RankGroup) -> None:
        self._mover, self._group = mover, group

    def move(self, layers: Sequence[int], placement: Int32s) -> None:
        """Move the experts of layers on all ranks; see `RankExpertMover.move`. Raises RankLost, DeviceLost."""
        self._group.tell(MoveLayers(tuple(layers), placement.shape[1], placement.astype("<i4").tobytes()))
        try:
            self._mover.move(layers, placement)
        except DeviceLost as error:
            raise self._group.explain(error) from error
