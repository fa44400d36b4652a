"""Drawn tokens as one tensor, as the last pipeline stage sends them to the stages before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.tables import ForwardPass, Int32s


def samples_of(one: ForwardPass) -> Int32s:
    """Return the number of samples of each sampler of a pass, int32 [samplers]."""
    return np.ones(len(one.sample_rows), np.int32) if one.samples is None else one.samples


def drawn_values(one: ForwardPass) -> int:
    """Return how many numbers a stage sends for a pass: tokens, whether they are invalid, and accepted drafts."""
    return 2 * int(samples_of(one).sum()) + (len(one.sample_rows) if one.verifying is not None else 0)


def packed_drawn(found: dict[str, Tensor]) -> Tensor:
    """Return drawn tokens as one tensor, int32 [values]."""
    parts = [found["tokens"], found["invalid"].to(torch.int32)]
    return torch.cat([*parts, found["accepted"]] if "accepted" in found else parts)


def unpacked_drawn(drawn: Tensor, one: ForwardPass, samples: int) -> dict[str, Tensor]:
    """Return the tensors of `packed_drawn` by name."""
    found = {"tokens": drawn[:samples], "invalid": drawn[samples : 2 * samples] != 0}
    if one.verifying is not None:
        found["accepted"] = drawn[2 * samples :]
    return found
