"""Attention backends behind one interface, `base.AttentionBackend`: `choose` selects one, `make` creates it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import Numerics
from lockstep.runtime import triton_trial
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.attention.rules import BLOCKS, LayerRules
from lockstep.runtime.kv_pool import KvPool

__all__ = ["NAMES", "WRONG", "AttentionBackend", "BackendChoice", "Needs", "Numerics", "choose", "make"]

NAMES = ("flashinfer", "triton", "cpu", "reference")  # order of preference of `auto` with fast numerics
INVARIANT_NAMES = ("triton", "flashinfer", "cpu", "reference")  # order of preference with invariant numerics
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_VERSIONS = ("0.6.18", "0.7")  # signatures and attributes: tests/runtime/flashinfer_signatures.py
TRITON_HEAD_DIM_MAX = 256
WRONG = "gives wrong results"  # part of the reason of a backend with wrong results in its trial
SMALLEST_CAPABILITY = (8, 0)  # Ampere: bf16 on tensor cores, asynchronous copies
FP8_CAPABILITY = (8, 9)  # Ada: Triton has no e4m3 on older GPUs

log = logging.getLogger("lockstep.runtime")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """An attention backend that can run here, and the reason for the choice."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements for a backend.

    Args:
        graphs: whether it must run in CUDA graphs.
        group: query heads that share a KV head.
        kv_fp8: whether KV lies in fp8.
        special: what layers need beside attention to all positions, such as sliding windows; see `rules`.
        trees: whether rows have trees of drafts.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    page_size: int
    graphs: bool = False
    numerics: Numerics = "fast"
    group: int = 1
    kv_fp8: bool = False
    special: tuple[str, ...] = ()
    trees: bool = False


def choose(requested: str, needs: Needs) -> BackendChoice:
    """Pick the attention backend; logs the choice with its reason once.

    FlashInfer is tried out on the device before it is taken: that its packages are there does not prove that its
    kernels for this dtype and head dim are, or that they can be built. Triton is tried out likewise, see
    `triton_trial`.

    Args:
        requested: `auto`, or the name of the one to take.
    Raises: ConfigError if the requested one cannot run here, with why, and with what can.
    """
    if requested not in ("auto", *NAMES):
        raise ConfigError(f"`attention_backend` must be one of auto, {', '.join(NAMES)}, got `{requested}`")
    numerics = needs.numerics
    if numerics not in ("fast", "invariant"):
        raise ConfigError(f"`numerics` must be `fast` or `invariant`, got `{numerics}`")
    if requested != "auto":
        unavailable_because = UNAVAILABLE_BECAUSE[requested](needs)
        if unavailable_because is None:
            return _logged(BackendChoice(requested, "requested"))
        able = [name for name in NAMES if name != requested and UNAVAILABLE_BECAUSE[name](needs) is None]
        others = ", ".join(f"`{name}`" for name in able) or "none without another setting"
        why = f"`attention_backend` {requested} cannot run here: {unavailable_because}"
        raise ConfigError(f"{why}\nhint: these can: {others}")
    unavailable: dict[str, str] = {}
    for name in INVARIANT_NAMES if numerics == "invariant" else NAMES:
        if name == "cpu" and needs.device.type != "cpu":
            continue  # that it is of another device is no reason worth showing
        unavailable_because = UNAVAILABLE_BECAUSE[name](needs)
        if unavailable_because is None and name == "triton" and needs.device.type != "cuda":
            unavailable_because = "it would run in Triton's interpreter"
        if unavailable_because is not None:
            unavailable[name] = unavailable_because
            continue
        reason = "; ".join(f"{other} cannot: {why}" for other, why in unavailable.items())
        if not reason and numerics == "invariant":
            reason = "numerics are invariant, which FlashInfer's prefill is only in part"
        return _logged(BackendChoice(name, reason or "fastest, and can run here"))
    why = "; ".join(f"{name}: {unavailable_because}" for name, unavailable_because in unavailable.items())
    raise ConfigError(f"`attention_backend` auto found none that can run here: {why}\nhint: switch CUDA graphs off")


def make(
    name: str,
    pool: KvPool,
    heads: int,
    *,
    scale: float | None = None,
    rules: Sequence[LayerRules] = (),
    numerics: Numerics = "fast",
    graph_rows: int = 0,
    plans_in_flight: int | None = None,
) -> AttentionBackend:
    """Create the backend of this name over a pool.

    Args:
        heads: query heads of this rank.
        scale: factor of the scores before the softmax; head_dim ** -0.5 unless given.
        rules: attention of each layer, for a model with windows, caps or sinks.
        graph_rows: rows of the largest CUDA graph, 0 for none; workspaces are sized for it.
        plans_in_flight: plans that may be made before the first of them is on the device; see `flashinfer_backend`.
    """
    if name == "reference":
        from lockstep.runtime.attention.reference import ReferenceAttention

        return ReferenceAttention(pool, scale, rules)
    if name == "cpu":
        from lockstep.runtime.attention.cpu import CpuAttention

        return CpuAttention(pool, scale, rules)
    if name == "triton":
        from lockstep.runtime.attention.triton_backend import TritonAttention

        return TritonAttention(pool, heads, scale, numerics, rules=rules)
    if name == "flashinfer":
        from lockstep.runtime.attention.flashinfer_backend import FlashInferAttention

        ring = {} if plans_in_flight is None else {"plans_in_flight": plans_in_flight}
        return FlashInferAttention(pool, heads, scale, numerics, graph_rows=graph_rows, **ring)
    raise ConfigError(f"`attention_backend` must be one of {', '.join(NAMES)}, got `{name}`")


def _logged(choice: BackendChoice) -> BackendChoice:
    if choice not in _logged_choices:
        _logged_choices.add(choice)
        log.info("attention backend %s: %s", choice.name, choice.reason)
    return choice


_logged_choices: set[BackendChoice] = set()


def _flashinfer_unavailable(needs: Needs) -> str | None:
    """Return why FlashInfer cannot run, or None."""
    if needs.special:
        return f"it is not called here with {', '.join(needs.special)}"
    if needs.device.type != "cuda":
        return f"it needs a CUDA device, this is `{needs.device}`"
    if find_spec("flashinfer") is None:
        return 'flashinfer is not installed; pip install "lockstep-runtime[cuda]"'
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        found = "unknown"
    if not found.startswith(FLASHINFER_VERSIONS):
        return f"it is written for flashinfer-python {', '.join(FLASHINFER_VERSIONS)}, found {found}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"it has kernels for bfloat16 and float16, not for {_name(needs.dtype)}"
    if needs.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has kernels for head dims {', '.join(map(str, FLASHINFER_HEAD_DIMS))}, not for {needs.head_dim}"
    if torch.cuda.get_device_capability(needs.device) < SMALLEST_CAPABILITY:
        return _too_old(needs.device)
    if find_spec("flashinfer_jit_cache") is None and not _has_compiler():
        return (
            "it compiles its kernels with nvcc, which is not on PATH, and no precompiled flashinfer_jit_cache is there"
        )
    return _flashinfer_fails(needs)


def _flashinfer_fails(needs: Needs) -> str | None:
    """Return the error of one small FlashInfer pass of this kind, or None if it succeeds."""
    kind = f"{_name(needs.dtype)}, head dim {needs.head_dim}, {needs.group} heads per KV head"
    kind += ", KV in fp8" * needs.kv_fp8 + ", trees of drafts" * needs.trees
    try:
        from lockstep.runtime.attention.flashinfer_backend import masks_hold, try_out

        right = try_out(
            needs.device,
            needs.dtype,
            needs.head_dim,
            needs.page_size,
            needs.group,
            needs.numerics,
            needs.graphs,
            needs.kv_fp8,
        )
        shape = (needs.head_dim, needs.page_size, needs.group)
        right = right and (not needs.trees or masks_hold(needs.device, needs.dtype, *shape, needs.kv_fp8))
    except Exception as error:  # a missing module, a kernel that was not compiled ahead, a failing compiler
        why = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return f"a trial with {kind} failed: {why}"
    return None if right else f"a trial with {kind} {WRONG}"


def _triton_unavailable(needs: Needs) -> str | None:
    """Return why our Triton kernels cannot run, or None."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if BLOCKS in needs.special:
        return f"it is not written for {BLOCKS}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if needs.device.type != "cuda" and not interpreted:
        return f"it needs a CUDA device, this is `{needs.device}`"
    if needs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it has kernels for bfloat16, float16 and float32, not for {_name(needs.dtype)}"
    if needs.head_dim > TRITON_HEAD_DIM_MAX:
        return f"it has kernels for head dims up to {TRITON_HEAD_DIM_MAX}, not for {needs.head_dim}"
    if needs.device.type == "cuda" and torch.cuda.get_device_capability(needs.device) < SMALLEST_CAPABILITY:
        return _too_old(needs.device)
    if needs.device.type == "cuda" and needs.kv_fp8 and not _has_fp8(needs.device):
        needed = ".".join(map(str, FP8_CAPABILITY))
        return f"KV in fp8 needs compute capability {needed}"
    return triton_trial.unavailable_because(needs.device) if needs.device.type == "cuda" else None


def _cpu_unavailable(needs: Needs) -> str | None:
    """Return why the products of a CPU's libraries cannot run, or None."""
    if needs.device.type != "cpu":
        return f"it needs the CPU, this is `{needs.device}`"
    if needs.numerics == "invariant":
        return "the order of its sums depends on the batch, and numerics are invariant"
    return "it cannot run in CUDA graphs" if needs.graphs else None


def _reference_unavailable(needs: Needs) -> str | None:
    """Return why plain torch cannot run, or None."""
    return "it cannot run in CUDA graphs" if needs.graphs else None


UNAVAILABLE_BECAUSE: dict[str, Callable[[Needs], str | None]] = {
    "flashinfer": _flashinfer_unavailable,
    "triton": _triton_unavailable,
    "cpu": _cpu_unavailable,
    "reference": _reference_unavailable,
}


def _has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _too_old(device: torch.device) -> str:
    needed, found = (f"{a}.{b}" for a, b in (SMALLEST_CAPABILITY, torch.cuda.get_device_capability(device)))
    return f"it needs compute capability {needed}, {torch.cuda.get_device_name(device)} has {found}"


def _has_compiler() -> bool:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes)
