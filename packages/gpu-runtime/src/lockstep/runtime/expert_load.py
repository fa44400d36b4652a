"""Counts, on the device, how many tokens each expert of each layer gets.

    pass      route ──> experts [tokens, k] ──> counts[layer] += tokens of each expert      on the stream of the pass
    interval  counts ──copy──> the CPU, behind the launched batches; the counts begin again at 0

Nothing waits for the device: on a GPU a count is one scatter of ones, or of zeros for rows that are padding of a CUDA
graph or belong to other data-parallel ranks. The graph contains the scatter; which rows count is filled in before each
replay. On a CPU these rows are cut off, and the rest is counted by a bincount.

The ranks that count, so that each token is counted once:

| ranks | counts |
|---|---|
| `tp`, `ep` | rank 0, since every rank routes every token |
| `ep` with `moe_a2a` | every rank its share of the tokens; the sum over the ranks is read |
| data-parallel attention | every rank the tokens of its own requests, for its own engine |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.forward import RankTokens
from lockstep.runtime.models.language_model import LanguageModel


class ExpertCounter:
    """The counts of one rank.

    Args:
        rows_max: most rows that one pass routes here.
        gathered: number of this data-parallel rank, if the rows of all ranks are routed on each; else None.
        reduce: sums the counts over the ranks; None: those of this rank are all.
        by_weights: count by a scatter of weights, as on a GPU.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        device: torch.device,
        rows_max: int,
        *,
        gathered: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        by_weights: bool = False,
    ) -> None:
        self.experts, self.gathered, self._reduce = experts, gathered, reduce
        # one more column for numbers beyond, which some models give to tokens that pass unchanged
        self._counts = torch.zeros(layers, experts + 1, dtype=torch.int64, device=device)
        self._rows = slice(0, 0)  # of the pass, those that count
        self._weights: Tensor | None = None  # int64 [rows_max], 1 for rows that count; an input of CUDA graphs
        if by_weights:
            self._weights = torch.zeros(rows_max, dtype=torch.int64, device=device)

    @property
    def sums(self) -> bool:
        """Whether the ranks count together, so that all of them take part in a reading."""
        return self._reduce is not None

    def begin(self, own: int, ranks: RankTokens | None) -> None:
        """Set which rows of the next pass count.

        Args:
            own: new tokens of this rank; rows behind them are padding.
            ranks: new tokens of all data-parallel ranks; None: there is one.
        """
        self._rows = slice(0, own)
        if self.gathered is not None and ranks is not None:
            self._rows = ranks.own(self.gathered)
        if self._weights is not None:
            self._weights.zero_()
            self._weights[self._rows].fill_(1)

    def counts(self, layer: int) -> Callable[[Tensor], None]:
        """Return the function that counts the experts of the tokens of a layer: int [tokens, k]."""
        return partial(self._count, layer)

    # mechanism: expert-load (executed)
    def _count(self, layer: int, experts: Tensor) -> None:
        if self._weights is None:
            found = torch.bincount(experts[self._rows].flatten(), minlength=self.experts + 1)
            self._counts[layer] += found[: self.experts + 1]
            return
        rows, each = experts.shape
        weights = self._weights[:rows, None].expand(rows, each).clone(memory_format=torch.contiguous_format)
        places = experts.reshape(-1).to(torch.int64).clamp(max=self.experts)
        self._counts[layer].scatter_add_(0, places, weights.view(-1))

    def take(self) -> Tensor:
        """Return the counts so far, of all ranks that count together; they begin again at 0."""
        counts = self._counts[:, : self.experts].clone()
        self._counts.zero_()
        return counts if self._reduce is None else self._reduce(counts)


def counter_for(model: LanguageModel, config: SchedConfig, rows_max: int) -> ExpertCounter | None:
    """Attach a counter to the experts of a model, if the settings measure their load and this rank counts.

    Args:
        rows_max: most new tokens of one rank in a pass.
    Raises: ConfigError if the load cannot be measured here.
    """
    interval = config.expert_load_interval
    if interval is msgspec.UNSET:
        return None
    named = f"`expert_load_interval` is {interval}, but"
    layers = list(model.expert_layers())
    sizes = {layer.experts for layer in layers}
    if not layers:
        raise ConfigError(f"{named} {model.settings.architecture} has no experts\nhint: leave it out")
    if len(sizes) > 1:
        raise ConfigError(
            f"{named} layers of {model.settings.architecture} have different numbers of experts: "
            f"{', '.join(map(str, sorted(sizes)))}\nhint: leave it out"
        )
    parallel = model.parallel
    together = parallel.experts.a2a and parallel.shared is None
    if parallel.rank and parallel.shared is None and not together:
        return None
    gathers = parallel.shared is not None and not parallel.experts.a2a
    counter = ExpertCounter(
        len(layers),
        sizes.pop(),
        model.device,
        rows_max * (parallel.ranks if gathers else 1),
        gathered=parallel.rank if gathers else None,
        reduce=parallel.all_reduce if together else None,
        by_weights=model.device.type == "cuda",
    )
    for number, layer in enumerate(layers):
        layer.count_into(counter.counts(number))
    return counter
