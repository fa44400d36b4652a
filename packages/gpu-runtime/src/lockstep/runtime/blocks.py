"""Blocks of a model that answers in blocks: the tokens and masks of each row, and which masks become tokens in a pass.

    pass 0     Once upon  __   __   __   __        given tokens, then masks
    pass 1     Once upon  a    __   __   .         every mask above the threshold, the likeliest at least
    pass 2     Once upon  a    time ,    .
    pass 3     the same tokens: the KV that this pass writes stays, and the block is finished

A token is drawn at every mask, by the sampling of its request and keyed by its position, and its probability under the
model decides whether it stays (low confidence remasking: LLaDA, arXiv 2502.09992, section 2.4; by a threshold as in
Fast-dLLM, arXiv 2505.22618). The mask itself is never drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.errors import ConfigError
from lockstep.host.batches import BatchResult, Int32s
from lockstep.runtime.errors import PlanError
from lockstep.runtime.models.settings import BlockSettings, ModelSettings
from lockstep.runtime.overlap import StreamLane
from lockstep.runtime.sampling import Sampled
from lockstep.runtime.tables import ForwardPass, PassTensors


def with_threshold(settings: ModelSettings, threshold: float | None) -> ModelSettings:
    """Return the settings of a model with the threshold that an operator chose; None: none was chosen.

    Raises: ConfigError for a threshold that is no probability, or of a model that does not answer in blocks.
    """
    if threshold is None:
        return settings
    if settings.blocks is None:
        raise ConfigError(
            f"`diffusion_threshold` is {threshold}, but {settings.architecture} does not answer in blocks\n"
            "hint: leave it out"
        )
    if not 0.0 <= threshold <= 1.0:
        raise ConfigError(
            f"`diffusion_threshold` must be from 0 (every token stays) to 1, got `{threshold}`\nhint: 0.95 is usual"
        )
    return replace(settings, blocks=replace(settings.blocks, threshold=threshold))


def check_blocks(architecture: str, several: bool, max_loras: int | None, debug: bool) -> None:
    """Raise ConfigError for options that do not go with a model that answers in blocks, beside those of SchedConfig.

    Args:
        several: whether the engine has several ranks or stages.
    """
    beside = {
        "tp, pp or attention_dp": (several, "above 1", "one device"),
        "max_loras": (bool(max_loras), max_loras, "no adapters"),
        "debug": (debug, "on", "debug off"),
    }
    for name, (there, shown, instead) in beside.items():
        if there:
            raise ConfigError(
                f"`{name}` is {shown}, but {architecture} answers in blocks: this is not supported yet\n"
                f"hint: {instead} for this model"
            )


class BlockSampler(Protocol):
    """The part of `executor.RowSampler` that blocks use."""

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: Int32s, allowed: Tensor | None
    ) -> Sampled:
        """Draw a token for each row of logits."""


class DeviceBlocks:
    """The newest block of each row of an engine.

    Args:
        rows: of the engine's request table.
        lane: of the passes.
    """

    def __init__(self, settings: BlockSettings, rows: int, lane: StreamLane) -> None:
        self.settings, self._upload, device = settings, lane.upload, lane.device
        self._mask_token = torch.full((1,), settings.mask_token, dtype=torch.int64, device=device)
        self.tokens = torch.full((rows, settings.size), settings.mask_token, dtype=torch.int64, device=device)
        self.masked = torch.ones((rows, settings.size), dtype=torch.bool, device=device)
        self._masks: Int32s = np.zeros(rows, np.int32)  # with which the newest block of each row began

    # mechanism: block-diffusion (executed)
    def begin(self, plan: BatchPlan, tensors: PassTensors) -> PassTensors:
        """Fill the blocks whose first pass this is, and return the pass with the tokens and masks of all blocks.

        Raises: PlanError for a block of another size.
        """
        assert plan.blocks is not None
        size, at = self.settings.size, 0
        if ((plan.stops - plan.starts) != size).any():
            raise PlanError(f"batch {plan.batch_id} has blocks of other than {size} tokens")
        for i in np.flatnonzero(plan.blocks.numbers == 0).tolist():
            row, given = int(plan.rows[i]), int(plan.blocks.given[i])
            self.tokens[row] = self.settings.mask_token
            self.masked[row] = True
            if given:
                ids = plan.token_ids[at : at + given].astype(np.int64)
                self.tokens[row, :given] = self._upload(ids)
                self.masked[row, :given] = False
                at += given
            self._masks[row] = size - given
        return replace(tensors, given_ids=self.tokens.index_select(0, tensors.rows.to(torch.int64)).view(-1))

    def draw(
        self, one: ForwardPass, tensors: PassTensors, logits: Tensor, sampler: BlockSampler
    ) -> dict[str, list[Tensor]]:
        """Draw at every mask, keep likely tokens, and return the results by name.

        Args:
            logits: float32 [rows * block, vocabulary]; overwritten.
        """
        rows, size = tensors.rows.to(torch.int64), self.settings.size
        before, masked = self.tokens.index_select(0, rows), self.masked.index_select(0, rows)
        logits.index_fill_(1, self._mask_token, -torch.inf)
        likely = logits.softmax(1)
        of_rows = tensors.rows.repeat_interleave(size)
        sampled = sampler.sample(logits, of_rows, tensors.positions, one.rows.repeat(size), None)
        chances = likely.gather(1, sampled.tokens.to(torch.int64)[:, None]).view(-1, size).nan_to_num()
        chances = chances.masked_fill(~masked, -1.0)
        stays = chances > self.settings.threshold
        stays.scatter_(1, chances.argmax(1)[:, None], True)
        stays &= masked
        self.tokens.index_copy_(0, rows, torch.where(stays, sampled.tokens.to(torch.int64).view(-1, size), before))
        self.masked.index_copy_(0, rows, masked & ~stays)
        invalid = (sampled.invalid.view(-1, size) & masked).any(1)
        finished = ~masked.any(1)
        return {"tokens": [before.to(torch.int32)], "invalid": [invalid], "finished": [finished]}

    def fill(self, result: BatchResult, arrays: dict[str, NDArray[Any]]) -> None:
        """Set the tokens of finished blocks, and how many each row has."""
        masks = self._masks[result.plan.rows]
        finished: NDArray[np.bool_] = arrays["finished"]
        blocks: Int32s = arrays["tokens"]
        result.accepted = np.where(finished, masks, np.int32(0)).astype(np.int32)
        there = [blocks[i, self.settings.size - int(masks[i]) :] for i in np.flatnonzero(finished).tolist()]
        result.tokens = np.concatenate(there) if there else np.zeros(0, np.int32)
