"""Two-batch overlap on a device: the halves of a batch take turns at every collective of their ranks.

    first half   | attention | sum .......... | MLP       | sum ...
    second half              | attention      | sum ..... | MLP
                               compute stream: both halves; the collectives run beside it

Each half runs the model's own code (`turns`). A collective is begun, then the other half continues, and its result is
waited for when the turn is back. So the order of collectives is the same on every rank, halves need no
code in layers, and any model whose ranks communicate by `Collectives` can be split.

On a CPU gloo sends in threads of its own. Between GPUs a collective begun here runs on the stream of the NCCL group,
behind what the current stream has computed so far, and waiting for it makes the current stream wait, not the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.contract.commands import Halves
from lockstep.core.contract.errors import ConfigError
from lockstep.core.features.two_batch import first_half_tokens
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.forward import ForwardBatch, Int32s, RankTokens
from lockstep.runtime.lora.batch import AdapterBatch, lay_out
from lockstep.runtime.models.settings import ModelSettings
from lockstep.runtime.turns import TurnTaking


class InHalves:
    """Runs passes as two halves.

    Args:
        attention: a backend for each half, over one pool: both are planned at the same time.
        upload: copies an array to the device.
    """

    def __init__(
        self,
        model: Any,
        attention: tuple[AttentionBackend, AttentionBackend],
        turns: TurnTaking,
        upload: Callable[..., Any],
    ) -> None:
        self._model, self._attention, self._turns, self._upload = model, attention, turns, upload

    # mechanism: two-batch-overlap (executed)
    def forward(self, batch: ForwardBatch, halves: Halves, adapter_slots: Int32s | None) -> Tensor:
        """Return the hidden states of all new tokens, as the model's `forward` of the whole batch does.

        Args:
            adapter_slots: int32 [rows]; None: no row is on an adapter.
        """
        parts = divided_batch(batch, halves, adapter_slots, self._upload)
        found = self._turns.run([self._half(*both) for both in zip(parts, self._attention, strict=True)])
        return torch.cat([hidden for hidden in found if hidden is not None])

    def join(self, ranks: RankTokens) -> None:
        """Take part in both halves of a pass in which only other data-parallel ranks have rows."""
        self._turns.run([partial(self._model.join, half) for half in halves_of_ranks(ranks)])

    def _half(self, batch: ForwardBatch, attention: AttentionBackend) -> Callable[[], Tensor | None]:
        def run() -> Tensor | None:
            if not batch.tokens:  # of a data-parallel rank
                self._model.join(batch.ranks)
                return None
            attention.plan(batch)
            hidden: Tensor = self._model.forward(batch, attention)
            return hidden

        return run


def halves_of_ranks(ranks: RankTokens) -> tuple[RankTokens, RankTokens]:
    """Return the new tokens of all data-parallel ranks in each half of a pass."""
    first = first_half_tokens(ranks.counts)
    rest = tuple(count - half for count, half in zip(ranks.counts, first, strict=True))
    return RankTokens(first, ranks.padded), RankTokens(rest, ranks.padded)


def divided_batch(
    batch: ForwardBatch, halves: Halves, adapter_slots: Int32s | None, upload: Callable[..., Any]
) -> tuple[ForwardBatch, ForwardBatch]:
    """Return the halves of a batch without states, windows, media or trees. A cut row is in both.

    `logits_at` is that of the whole batch: logits are computed behind both halves.
    """
    rows, cut = halves.rows, halves.cut
    behind = rows + (cut > 0)  # rows of the first half
    counts = batch.lengths_host - batch.starts_host
    tokens = int(counts[:rows].sum()) + cut
    first_lengths, first_lengths_host = batch.lengths[:behind], batch.lengths_host[:behind].copy()
    second_starts_host = batch.starts_host[rows:].copy()
    if cut:
        rest = int(counts[rows]) - cut
        first_lengths = first_lengths.clone()
        first_lengths[rows] -= rest
        first_lengths_host[rows] -= rest
        second_starts_host[0] += cut
    ranks = (None, None) if batch.ranks is None else halves_of_ranks(batch.ranks)
    first = replace(
        batch,
        token_ids=batch.token_ids[:tokens],
        positions=batch.positions[:tokens],
        slots=batch.slots[:tokens],
        rows=batch.rows[:behind],
        indptr=batch.indptr[: behind + 1].clamp(max=tokens),
        lengths=first_lengths,
        extend_rows=min(batch.extend_rows, behind),
        starts_host=batch.starts_host[:behind],
        lengths_host=first_lengths_host,
        ranks=ranks[0],
    )
    second = replace(
        batch,
        token_ids=batch.token_ids[tokens:],
        positions=batch.positions[tokens:],
        slots=batch.slots[tokens:],
        rows=batch.rows[rows:],
        indptr=(batch.indptr[rows:] - tokens).clamp(min=0),
        lengths=batch.lengths[rows:],
        extend_rows=max(batch.extend_rows - rows, 0),
        starts_host=second_starts_host,
        lengths_host=batch.lengths_host[rows:],
        ranks=ranks[1],
    )
    if adapter_slots is not None:
        first.adapters = _laid_out(adapter_slots[:behind], first, upload)
        second.adapters = _laid_out(adapter_slots[rows:], second, upload)
    return first, second


def _laid_out(slots: Int32s, half: ForwardBatch, upload: Callable[..., Any]) -> AdapterBatch | None:
    """Return the tokens of a half by adapter slot; None if none is on an adapter."""
    if not np.any(slots >= 0):
        return None
    return lay_out(slots, half.lengths_host - half.starts_host, upload)


def check_two_batch(model: ModelSettings) -> None:
    """Raise ConfigError if a model cannot run as two halves."""
    if model.backend == "transformers":
        raise ConfigError(
            f"`two_batch_overlap` is on, but {model.architecture} runs by transformers' code, which is not split in "
            "halves\nhint: leave it out"
        )
