"""Whether Triton can run on a GPU. An installed Triton may fail: it needs a C compiler at its first launch.

Every choice between a Triton kernel and plain torch calls `unavailable_because` first. The trial runs once per device.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec

import torch

log = logging.getLogger("lockstep.runtime")

WRONG = "a small kernel gave wrong results"


def unavailable_because(device: torch.device) -> str | None:
    """Return why our Triton kernels cannot run on a CUDA device, or None.

    The first call compiles and runs a small kernel.
    """
    return _tried(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _tried(index: int) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    try:
        why = None if try_out(torch.device("cuda", index)) else WRONG
    except Exception as error:  # no C compiler, no ptxas for this GPU, a cache folder that cannot be written
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        why = f"a small kernel could not be run: {reason}"
    if why is not None:
        log.warning("Triton cannot be used on cuda:%d, and plain torch does what its kernels would: %s", index, why)
    return why


def try_out(device: torch.device) -> bool:
    """Compile and run a small kernel. Returns whether its result is right. Raises any exception of Triton."""
    from lockstep.runtime.triton_trial_kernel import add_one

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        numbers = torch.arange(5, dtype=torch.float32, device=device)
        return add_one(numbers).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
