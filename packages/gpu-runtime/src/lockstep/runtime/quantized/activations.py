"""Whether rows are rounded to fp8 before products with fp8 weights: by the mode, the checkpoint and the GPU.

fp8_activations   auto    by the checkpoint (activation_scheme, input_activations), if the GPU multiplies
                          fp8 by fp8; otherwise rows are not rounded and weights are widened
                  on      always, on a CPU by the reference: with the checkpoint's scales if they are static,
                          otherwise by each row's largest number
                  off     never
"""

from __future__ import annotations

import logging
from functools import cache
from typing import get_args

import torch

from lockstep.core.contract.errors import ConfigError
from lockstep.host.quantization import FP8_CAPABILITY, Activations, Fp8Activations, WeightFormat, rounds_rows
from lockstep.runtime import triton_trial

log = logging.getLogger("lockstep.runtime")

FP8_ACTIVATIONS: tuple[str, ...] = get_args(Fp8Activations)
FAR = 0.02  # tolerance of a trial, relative to the largest product


def check_fp8_activations(setting: str) -> None:
    """Raise ConfigError for an unknown value."""
    if setting not in FP8_ACTIVATIONS:
        raise ConfigError(f"`fp8_activations` must be {', '.join(FP8_ACTIVATIONS)}, got `{setting}`")


def choose_activations(setting: Fp8Activations, stored: WeightFormat | None, device: torch.device) -> Activations:
    """Return how rows of a model's fp8 products are rounded. The result of auto, and its reason, are logged.

    Raises: ConfigError if rounding is required and not possible.
    """
    if stored is None or stored.layout != "fp8":
        if setting == "on":
            how = "not quantised" if stored is None else str(stored)
            raise ConfigError(
                f"`fp8_activations` is on, but weights are {how}: only fp8 meets fp8\n"
                "hint: a checkpoint in fp8, or leave it out"
            )
        return ""
    if setting == "off" or (setting == "auto" and not stored.activations):
        return ""
    why = unavailable_because(device)
    if not rounds_rows(setting, stored.activations, why is None):
        log.info("activations are not rounded to fp8: %s", why)
        return ""
    if why is not None and device.type == "cuda":
        raise ConfigError(f"`fp8_activations` is on, but {why}\nhint: leave it out, and weights are widened")
    return stored.activations or "dynamic"


def unavailable_because(device: torch.device) -> str | None:
    """Return why a device does not multiply fp8 by fp8, or None. The first call for a GPU runs a small product."""
    if device.type != "cuda":
        return f"a device of kind {device.type} has no fp8 tensor cores"
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        return "a GPU of compute capability {}.{} has no fp8 tensor cores, which begin with {}.{}".format(
            *found, *FP8_CAPABILITY
        )
    return triton_trial.unavailable_because(device) or _tried(device.index or 0)


@cache
def _tried(index: int) -> str | None:
    try:
        with torch.cuda.device(index), torch.inference_mode():
            return None if try_out(torch.device("cuda", index)) else "a small product of fp8 by fp8 came out wrong"
    except Exception as error:  # a compiler that does not support this GPU
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return f"a small product of fp8 by fp8 could not be run: {reason}"


def try_out(device: torch.device) -> bool:
    """Return whether products equal the reference, with scales of blocks and with one scale, for few and many rows."""
    from lockstep.runtime.quantized.fp8 import Fp8Matrices, RowRounding, to_fp8
    from lockstep.runtime.quantized.matrices import StoredMatrix

    generator = torch.Generator().manual_seed(1)
    for block in ((128, 128), None):
        stored = WeightFormat(method="fp8", layout="fp8", block=block)
        one = Fp8Matrices(
            [StoredMatrix("trial", 128, 256)], 0, 0, 1, torch.bfloat16, device, stored, RowRounding("dynamic")
        )
        one.weight.data.copy_(to_fp8(torch.randn(one.weight.shape, generator=generator) * 64))
        one.scale.data.copy_(torch.rand(one.scale.shape, generator=generator) * 0.01 + 0.001)
        for count in (3, 300):
            rows = torch.randn(count, 256, generator=generator).to(device, torch.bfloat16)
            expected = one.rounded_linear(rows, None).float()
            if not bool((one.scaled(rows, None, None).float() - expected).abs().max() <= FAR * expected.abs().max()):
                return False
    return True
