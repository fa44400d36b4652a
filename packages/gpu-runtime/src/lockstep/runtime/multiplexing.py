"""PD multiplexing on a device: passes of some layers, whose hidden states are kept for the layers behind them.

    launch order   | p layers 0-1 | decode | p layers 2-3 | decode | decode + rows of p ...

A CPU runs plans in launch order, one after another, so the streams of a plan need no order between them. A part of a
prompt leaves for each new token what its next layer needs: a residual, and what the next norm adds to it. The next part
has the same spans, of the rows that are left; the states of rows that are not in it are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import Multiplexing
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import RankOptions
from lockstep.runtime.errors import PlanError
from lockstep.runtime.models.settings import ModelSettings


class LayerParts:
    """The hidden states of prompts whose layers are not all computed.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._kept: dict[int, Tensor] = {}  # by row: [2, new tokens, hidden]
        self._reached = 0  # the layers [0:reached) of these rows are computed

    # mechanism: pd-multiplexing (executed)
    def before(self, plan: BatchPlan) -> Tensor | None:
        """Return what the first layer of a part needs, [2, new tokens, hidden]; None: it begins at the embedding.

        Raises: PlanError for a part that does not follow the one before.
        """
        assert plan.layers is not None
        kept, self._kept = self._kept, {}
        if not plan.layers[0]:
            return None
        rows = plan.rows.tolist()
        if plan.layers[0] != self._reached or any(row not in kept for row in rows):
            raise PlanError(
                f"batch {plan.batch_id} begins at layer {plan.layers[0]} of rows {rows}; computed are {self._reached} "
                f"layers of rows {sorted(kept)}"
            )
        return torch.cat([kept[row] for row in rows], 1)

    def keeps(self, plan: BatchPlan, hidden: Tensor) -> bool:
        """Keep what a part leaves for the layers behind it. Returns: whether there are any; otherwise it is whole."""
        if plan.layers is None or plan.layers[1] == self.layers:
            return False
        counts = (plan.stops - plan.starts).tolist()
        self._kept = dict(zip(plan.rows.tolist(), hidden.split(counts, 1), strict=True))
        self._reached = plan.layers[1]
        return True


def multiplexing_of(given: RankOptions, model: ModelSettings, device: torch.device) -> dict[str, Any]:
    """Return the scheduler settings that `pdmux` implies; none without it.

    Raises: ConfigError for options without an effect, and for a device or a model that does not run some layers.
    """
    usual = RankOptions()
    if not given.pdmux:
        if given.pdmux_token_budget != usual.pdmux_token_budget:
            raise ConfigError(
                f"`pdmux_token_budget` is {given.pdmux_token_budget}, but `pdmux` is off\n"
                "hint: turn pdmux on, or drop it"
            )
        return {}
    if device.type != "cpu":
        raise ConfigError(
            f"`pdmux` is on, but the device is {device}: streams with shares of a GPU are simulated only "
            "(lockstep simulate --pdmux)\nhint: leave out pdmux, or device cpu"
        )
    if model.backend == "transformers":
        raise ConfigError(
            f"`pdmux` is on, but {model.architecture} runs by transformers' code, which runs all layers\n"
            "hint: leave out pdmux"
        )
    return {"multiplexing": Multiplexing(layers=model.layers, token_budget=given.pdmux_token_budget)}
