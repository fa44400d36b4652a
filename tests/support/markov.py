"""A model with known chances of each token, and how far drawn tokens are from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.core.contract.events import SamplingParams
from lockstep.runtime.assembly import TableSampler
from lockstep.runtime.sampling import Sampler, SamplingTable
from tests.support.small_runtime import CPU, SmallRuntime

CHANCES = np.array([[0.1, 0.6, 0.2, 0.1], [0.5, 0.1, 0.1, 0.3], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.1, 0.8]])
"""Of each token behind each, [4, 4]."""


class Markov:
    """A model whose next token depends on the one before, by fixed chances."""

    def __init__(self, chances: Any) -> None:
        self.chances = torch.tensor(chances, dtype=torch.float32)

    def forward(self, batch: Any, attention: Any) -> Any:
        return batch.token_ids[:, None].to(torch.float32)

    def logits(self, hidden: Any) -> Any:
        return self.chances[hidden[:, 0].long() % 4].log()


def statistic_of_pairs(runtime: SmallRuntime, seeds: int) -> float:
    """Answer one prompt with each of these seeds. Returns chi-square of the pairs of consecutive tokens."""
    runtime.executor.model = Markov(CHANCES)
    table = SamplingTable(runtime.config.rows_max, 4, CPU)
    runtime.executor.sampler = TableSampler(table, Sampler(table))
    answers = [
        runtime.submit([0, 1, 0, 1, 3, 3, 0], 12, sampling=SamplingParams(temperature=1.0, seed=seed))
        for seed in range(seeds)
    ]
    runtime.run()
    seen = np.zeros((4, 4))
    for answer in answers:
        tokens = [0, *answer.tokens]
        np.add.at(seen, (tokens[:-1], tokens[1:]), 1)
    expected = CHANCES * seen.sum(1, keepdims=True)
    return float(((seen - expected) ** 2 / expected).sum())
