"""What the processor can do, where the engine runs on the CPU."""

from __future__ import annotations

import os
from functools import cache

import torch


@cache
def multiplies_bfloat16() -> bool:
    """Return whether products in bfloat16 are fast here: the processor has instructions, and torch's oneDNN uses them.

    AVX512-BF16 or AMX on x86, BF16 on Arm. Elsewhere oneDNN widens to float32, which is slower than float32 itself.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _has_instructions()


def threads_of_rank(ranks: int) -> int:
    """Return the threads with which each of `ranks` ranks of this machine computes on the CPU.

    Ranks share the processors out: with more threads than processors, every product waits until the last of its
    threads was given one. `OMP_NUM_THREADS` in the environment is the number of each rank.
    """
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // ranks)


def _has_instructions() -> bool:
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    names = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16")
    return any(able.get(name) for name in names)
