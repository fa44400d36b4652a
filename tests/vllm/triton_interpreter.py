"""vLLM's model runner V2 on a processor: its Triton kernels run in Triton's interpreter.

Runner V2 is vLLM's default on GPUs, and its kernels are written in Triton, which has no backend for processors in its
wheel. Triton's interpreter runs them with numpy, slowly. vLLM for CPUs has the rest of runner V2, and requests a Triton
backend named "cpu"; `interpret` registers one that is never compiled for.
"""

from __future__ import annotations

from typing import Any

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Variables of the process, set before vLLM and Triton are imported."""


class _Driver:
    """The driver of no device."""

    @staticmethod
    def is_active() -> bool:
        """Whether Triton may compile for it."""
        return False


class _Backend:
    driver: Any = _Driver
    compiler: Any = None


def interpret() -> None:
    """Let vLLM, which is not imported yet, use Triton's interpreter."""
    from triton.backends import backends

    backends["cpu"] = _Backend
